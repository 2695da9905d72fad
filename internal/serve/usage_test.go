package serve

import (
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestBytesPerTokenAreLearnedFromUsage(t *testing.T) {
	r := newRatios()
	r.reconfigure(&fleet.Config{Routes: []fleet.Route{{Name: "chat"}}})
	if got := r.of("chat"); got != 0 {
		t.Errorf("%v before anything was learned, want 0", got)
	}
	end := func(bytes int64, input fleet.Tokens) *fleet.Outcome {
		return &fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: bytes, Usage: fleet.Usage{Known: true, Input: input}}
	}
	for range 300 {
		r.learn(end(6000, 1000))
	}
	if got := r.of("chat"); got < 5.9 || got > 6.1 {
		t.Errorf("learned %v bytes a token from bodies of 6, want 6", got)
	}
	for name, o := range map[string]*fleet.Outcome{
		"an image":             end(4_000_000, 1000),
		"a few tokens":         end(200, 10),
		"more tokens than fit": end(100, 1000),
		"no usage":             {Kind: fleet.RequestEnded, Route: "chat", RequestBytes: 100_000},
		"an attempt":           {Kind: fleet.AttemptEnded, Route: "chat", RequestBytes: 15_000, Usage: fleet.Usage{Known: true, Input: 1000}},
	} {
		before := r.of("chat")
		for range 100 {
			r.learn(o)
		}
		if got := r.of("chat"); got != before {
			t.Errorf("%s taught %v after %v", name, got, before)
		}
	}
	r.reconfigure(&fleet.Config{})
	if got := r.of("chat"); got != 0 {
		t.Errorf("%v for a route that is gone", got)
	}
}
