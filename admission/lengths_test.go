package admission

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// answered is a world with one route, and what the limit of that was settled to.
type answered struct {
	*world
	ledger *ledgerLimiter
	stream bool
}

// framed is how long an answer of so many tokens is: whole ones have 4 bytes a token and
// 500 around them, streams 250 and 810.
func (w *answered) framed(tokens int64) int64 {
	if w.stream {
		return 810 + 250*tokens
	}
	return 500 + 4*tokens
}

// end lets a request in, and its answer end.
func (w *answered) end(cause fleet.Cause, bytes int64, usage fleet.Usage) {
	a := w.ask("c")
	a.Stream, a.Output, a.Input = w.stream, 2000, 0
	w.Admit(&a)
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: 200, Cause: cause, ResponseBytes: bytes, Usage: usage, At: w.clock.now()})
}

// tell has n answers of so many tokens and bytes.
func (w *answered) tell(n int, tokens, bytes int64) {
	for range n {
		w.end(fleet.CauseOK, bytes, fleet.Usage{Known: true, Input: 1, Output: fleet.Tokens(tokens)})
	}
}

// charged is for how many tokens of output an answer of so many bytes is taken that broke
// off; 2,000 were reserved.
func (w *answered) charged(bytes int64) fleet.Tokens {
	w.ledger.settled = nil
	w.end(fleet.CauseClientGone, bytes, fleet.Usage{})
	return w.ledger.settled[0]
}

func newAnswered(stream bool) *answered {
	l := &ledgerLimiter{}
	limit := fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 1e6, Window: time.Minute}}
	return &answered{world: newWorld(config(limit), 100, l), ledger: l, stream: stream}
}

// TestShortAnswersDoNotMakeBrokenOnesCheap: nobody's calls for a token or some change what
// others are charged whose answers break off. Each of them has as many bytes a token as an
// answer has around its text.
func TestShortAnswersDoNotMakeBrokenOnesCheap(t *testing.T) {
	for _, stream := range []bool{false, true} {
		for _, row := range []struct {
			tokens, n int64
			least     fleet.Tokens // of 1,000
		}{{1, 1, 999}, {1, 50, 999}, {1, 5000, 999}, {fewestOutput - 1, 5000, 999}, {fewestOutput, 50, 850}, {100, 50, 850}} {
			w := newAnswered(stream)
			w.tell(200, 1000, w.framed(1000))
			w.tell(int(row.n), row.tokens, w.framed(row.tokens))
			if got := w.charged(w.framed(1000)); got < row.least || got > 1001 {
				t.Errorf("stream %v: after %d answers of %d tokens one of 1,000 is charged %d; want %d at least", stream, row.n, row.tokens, got, row.least)
			}
		}
	}
}

// TestAnswersTeachByTheirTokens: the ratio is that of all bytes to all tokens, from the
// second answer on, whatever the first one was.
func TestAnswersTeachByTheirTokens(t *testing.T) {
	for _, row := range []struct {
		name          string
		first, second [2]int64 // tokens, bytes a token
		want          float64
	}{
		{"as long", [2]int64{1000, 4}, [2]int64{1000, 6}, 5},
		{"a short one first", [2]int64{100, 20}, [2]int64{900, 5}, 6.5},
		{"a short one second", [2]int64{900, 5}, [2]int64{100, 20}, 6.5},
		{"longer than counts", [2]int64{1000, 4}, [2]int64{50 * mostOutput, 8}, (4.0*1000 + 8*mostOutput) / (1000 + mostOutput)},
	} {
		w := newAnswered(false)
		for _, a := range [][2]int64{row.first, row.second} {
			w.tell(1, a[0], a[0]*a[1])
		}
		if got := w.learned(formWhole); math.Abs(got-row.want) > row.want/50 {
			t.Errorf("%s: %v bytes a token; want %v", row.name, got, row.want)
		}
	}
}

// learned is the ratio of the world's route.
func (w *answered) learned(f form) float64 {
	return w.settings.Load().routes["r"].state.lengths[f].ratio()
}

// TestRatiosFollowWhatAnswersAreNow: another model, or another language, and the old
// answers fade. One answer alone moves little, however long.
func TestRatiosFollowWhatAnswersAreNow(t *testing.T) {
	w := newAnswered(false)
	w.tell(1000, 1000, 4000)
	w.tell(1, 1_000_000, 40_000_000)
	if got := w.learned(formWhole); got < 4.6 || got > 4.8 {
		t.Errorf("%v bytes a token after one answer of ten times as many; want a fiftieth of the way", got)
	}
	w.tell(outputMemory/1000, 1000, 12_000)
	if got, want := w.learned(formWhole), 12-8/math.E; math.Abs(got-want) > 0.4 {
		t.Errorf("%v bytes a token after a memory's worth of others; want about %v", got, want)
	}
	w.tell(10*outputMemory/1000, 1000, 12_000)
	if got := w.learned(formWhole); math.Abs(got-12) > 0.01 {
		t.Errorf("%v bytes a token after ten times as many; want 12", got)
	}
	if got := w.charged(1200); got != 100 {
		t.Errorf("1,200 bytes are charged as %d tokens", got)
	}
}

// TestWhatSaysNothingOfTheLengthOfATokenDoesNotTeach: what was reserved stands then.
func TestWhatSaysNothingOfTheLengthOfATokenDoesNotTeach(t *testing.T) {
	for name, row := range map[string]struct {
		cause fleet.Cause
		bytes int64
		usage fleet.Usage
	}{
		"too short":         {fleet.CauseOK, 400, fleet.Usage{Known: true, Input: 1, Output: fewestOutput - 1}},
		"no body":           {fleet.CauseOK, 0, fleet.Usage{Known: true, Input: 1, Output: 1000}},
		"broken off":        {fleet.CauseClientGone, 400, fleet.Usage{Known: true, Output: 1000}},
		"ended in an error": {fleet.CauseOK, 400, fleet.Usage{Known: true, Input: 1, Output: 1000, Error: true}},
		"told nothing":      {fleet.CauseOK, 400, fleet.Usage{}},
	} {
		w := newAnswered(false)
		w.end(row.cause, row.bytes, row.usage)
		if got := w.learned(formWhole); got != 0 {
			t.Errorf("%s: taught %v bytes a token", name, got)
		}
		if got := w.charged(40); got != 2000 {
			t.Errorf("%s: charged %d; want what was reserved", name, got)
		}
		w.tell(1, 1000, 4000)
		before := w.learned(formWhole)
		w.end(row.cause, row.bytes, row.usage)
		if got := w.learned(formWhole); before == 0 || got != before {
			t.Errorf("%s: moved %v bytes a token to %v", name, before, got)
		}
	}
}

// TestLengthsHoldWhatServersClaim: counts beyond reason leave a ratio that is a number,
// and fade like others.
func TestLengthsHoldWhatServersClaim(t *testing.T) {
	for _, claim := range [][2]int64{{math.MaxInt64, 1}, {fewestOutput, 1 << 50}, {math.MaxInt64, math.MaxInt64}} {
		w := newAnswered(false)
		w.tell(3, claim[0], claim[1])
		if got := w.learned(formWhole); !(got > 0) || math.IsInf(got, 0) {
			t.Errorf("%d tokens in %d bytes: %v", claim[0], claim[1], got)
		}
		w.tell(100*outputMemory/1000, 1000, 4000)
		if got := w.learned(formWhole); math.Abs(got-4) > 0.1 {
			t.Errorf("%d tokens in %d bytes, and many others: %v", claim[0], claim[1], got)
		}
	}
}

func TestLearningAllocatesNothing(t *testing.T) {
	var l lengths
	if n := testing.AllocsPerRun(1000, func() { l.add(4000, 1000) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
