package admission_test

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestWorkersWaitForTokensThatAreSoonBack: where budgets are far larger than answers few
// operations are given up, or told that there is no point in trying again, and more are
// served; where usage is not told, or budgets are used up, nothing changes. Behind each row
// is what is given up and served where the next window is waited for.
func TestWorkersWaitForTokensThatAreSoonBack(t *testing.T) {
	if admission.Raced {
		t.Skip("a simulation has one goroutine, and takes ten times as long with the race detector: .ci/run runs it without")
	}
	in := func(window time.Duration, tokens int64, concurrency int) fleet.Limit {
		return fleet.Limit{Tokens: fleet.Rate{Amount: tokens, Window: window}, Concurrency: concurrency}
	}
	minute := func(tokens int64) fleet.Limit { return in(time.Minute, tokens, 0) }
	for _, row := range []struct {
		w      sdkWorkers
		length time.Duration
		gaveUp float64 // part of the operations, at most
		served int     // at least
	}{
		{sdkWorkers{limit: minute(100_000), workers: 15, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, 10 * time.Minute, 0.02, 1990},         // 0.000 and 1,786
		{sdkWorkers{limit: minute(100_000), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, 10 * time.Minute, 0.03, 1990},         // 0.019 and 1,879
		{sdkWorkers{limit: minute(100_000), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 200}, 10 * time.Minute, 0.055, 2070},                            // 0.068 and 2,310
		{sdkWorkers{limit: in(time.Minute, 100_000, 15), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 200}, 10 * time.Minute, 0.055, 2070},               // 0.068 and 2,310
		{sdkWorkers{limit: minute(1_000_000), workers: 150, takes: 5 * time.Second, exact: true, budget: 8192, answers: 200}, 4 * time.Minute, 0.01, 4750},              // 0.005 and 4,785
		{sdkWorkers{limit: minute(1_000_000), workers: 200, takes: 20 * time.Second, budget: 8192, answers: 1000}, 4 * time.Minute, 0.08, 1240},                         // 0.030 and 1,299
		{sdkWorkers{limit: in(time.Hour, 1_000_000, 0), workers: 150, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, time.Minute, 0.03, 2220}, // 0.172 and 2,247
		// More is wanted than the limit lets in.
		{sdkWorkers{limit: minute(100_000), workers: 60, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, 10 * time.Minute, 0.19, 2010}, // 0.673 and 2,182
		{sdkWorkers{limit: minute(100_000), workers: 60, takes: 2 * time.Second, budget: 8192, answers: 1000, think: time.Second}, 10 * time.Minute, 0.5, 850},  // 0.857 and 880
		{sdkWorkers{limit: minute(100_000), workers: 100, takes: time.Second, budget: 1024, answers: 400, think: time.Second}, 5 * time.Minute, 0.08, 1090},     // 0.247 and 1,100
		{sdkWorkers{limit: minute(100_000), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 8000, think: time.Second}, 10 * time.Minute, 0.9, 119},  // 0.886 and 120
		{sdkWorkers{limit: minute(100_000), workers: 15, takes: 2 * time.Second, budget: 8192, think: time.Second}, 10 * time.Minute, 0.76, 119},                // 0.740 and 120
		{sdkWorkers{limit: in(time.Second, 1000, 0), workers: 30, takes: 100 * time.Millisecond, budget: 150, answers: 90}, 2 * time.Minute, 0.15, 710},         // 0.115 and 720
	} {
		w := &row.w
		w.prompt, w.pause = 50, 5*time.Second
		w.run(row.length)
		t.Logf("%d tokens in %v, %d workers, %d of %d in %v: %d served, %d in vain, %d told not to retry, %.3f given up; %d returns, %d in vain",
			w.limit.Tokens.Amount, w.limit.Tokens.Window, w.workers, w.answers, w.budget, w.takes, w.served, w.inVain, w.hopeless, w.gaveUp(), w.returns, w.returnsInVain)
		if w.gaveUp() > row.gaveUp || w.served < row.served {
			t.Errorf("%+v: %d served, of %.3f given up; want %d at least, and %.3f at most", *w, w.served, w.gaveUp(), row.served, row.gaveUp)
		}
	}
}
