package serve

import (
	"net/netip"
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

func TestRequestsWithoutADecisionAreCounted(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	const own, foreign = "1718924567123-007-0001", "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"
	server := fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}
	for _, o := range []fleet.Outcome{
		{Kind: fleet.RequestEnded, ID: own, Code: 200, Endpoint: server},
		{Kind: fleet.RequestEnded, ID: foreign, Code: 200, Endpoint: server},
		{Kind: fleet.RequestEnded, ID: foreign, Code: 400}, // Envoy's own answer
		{Kind: fleet.AttemptEnded, ID: foreign, Code: 200, Endpoint: server},
	} {
		s.outcome(o)
	}
	if n := s.metrics.undecided.Load(); n != 1 {
		t.Errorf("%d undecided, want 1", n)
	}
}
