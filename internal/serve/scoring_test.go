package serve

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/scorer"
)

// testScoring is the scoring of a config without a server around it.
func testScoring(t *testing.T, cfg *fleet.Config) *scoring {
	t.Helper()
	s := newScoring(scoringModel{Model: scorer.Formula(scorer.FormulaOptions{})}, accesslog.NewLedger(time.Now))
	s.reconfigure(cfg, nil)
	return s
}

// TestBucketsKeepTheirLengthWhenTicksJitter: ticks come early and late by up to
// 20 ms, as a ticker's do on a busy machine.
func TestBucketsKeepTheirLengthWhenTicksJitter(t *testing.T) {
	const ticks = 20 * 60
	rng := rand.New(rand.NewPCG(1, 2))
	s := testScoring(t, testConfig(t))
	begin := time.Now()
	var shown []time.Time
	for i := range ticks {
		now := begin.Add(time.Duration(i)*tickEvery + time.Duration(rng.Int64N(int64(40*time.Millisecond))) - 20*time.Millisecond)
		if _, view := s.step(now); view != nil {
			shown = append(shown, now)
		}
	}
	if want := int(ticks * tickEvery / bucket); len(shown) < want-1 || len(shown) > want+1 {
		t.Errorf("%d buckets in a minute, want %d", len(shown), want)
	}
	for i, at := range shown[1:] {
		if d := at.Sub(shown[i]); d < bucket-2*tickEvery || d > bucket+2*tickEvery {
			t.Errorf("bucket %d took %v", i, d)
		}
	}
	// A pause is one long bucket; nothing is made up for.
	now := begin.Add(ticks * tickEvery).Add(10 * time.Second)
	count := 0
	for range bucket / tickEvery {
		if _, view := s.step(now); view != nil {
			count++
		}
		now = now.Add(tickEvery)
	}
	if count != 1 {
		t.Errorf("%d buckets in the 200 ms after a pause, want 1", count)
	}
}
