package admission_test

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/admission/ratelimit"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// tokenWorkers are workers of one key behind an official SDK, under a limit on tokens.
type tokenWorkers struct {
	tokens      fleet.Rate
	concurrency int
	workers     int
	takes       time.Duration // half to one and a half times that
	exact       bool          // that time, each
	budget      fleet.Tokens
	answers     fleet.Tokens
	silent      bool          // usage is not told
	think       time.Duration // between an answer and the next operation
	// What became of operations: in vain are those that came three times, hopeless those
	// that were told not to retry.
	served, inVain, hopeless int
	returns, returnsInVain   int
	used                     fleet.Tokens // by those that were served
}

func (w *tokenWorkers) run(length time.Duration, seed uint64) {
	begin := time.Now().Truncate(24 * time.Hour)
	var now time.Duration
	g := admission.New(admission.Options{
		Limiter: ratelimit.NewEmbedded(), Now: func() time.Time { return begin.Add(now) },
		Config: &fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 1000, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, FairShare: true}},
			Limits: []fleet.Limit{{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: w.tokens, Concurrency: w.concurrency}},
		},
	})
	rng := rand.New(rand.NewPCG(seed, 1))
	var queue dues
	n, live := 0, 0
	after := func(d time.Duration, do func()) {
		n++
		heap.Push(&queue, due{now + d, n, do})
	}
	var begins func()
	var try func(int)
	try = func(retry int) {
		n++
		a := &admission.Ask{
			ID: fmt.Sprint(n), Route: "r", Pool: "p", Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte("k")), Level: fleet.LevelOf(w.budget),
			Input: 50, InputAtLeast: 5, Output: w.budget, At: begin.Add(now), Seed: rng.Uint64(), Retry: retry, Counts: true,
		}
		v := g.Admit(a)
		if retry > 0 {
			w.returns++
			if !v.Admitted {
				w.returnsInVain++
			}
		}
		switch {
		case v.Admitted:
			live++
			takes := w.takes
			if !w.exact {
				takes = takes/2 + time.Duration(rng.Int64N(int64(takes)))
			}
			after(takes/10, func() {
				g.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 1, At: begin.Add(now)})
			})
			for beat := 10 * time.Second; beat < takes; beat += 10 * time.Second {
				after(beat, func() { g.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: begin.Add(now)}) })
			}
			after(takes, func() {
				live--
				w.served++
				w.used += 50 + w.answers
				o := fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Attempt: 1, At: begin.Add(now), Code: 200, Cause: fleet.CauseOK}
				if !w.silent {
					o.Usage = fleet.Usage{Known: true, Input: 50, Output: w.answers}
				}
				g.Apply(o)
				after(w.think, begins)
			})
		case !v.Refusal.ShouldRetry:
			w.hopeless++
			after(5*time.Second, begins)
		case retry == 2:
			w.inVain++
			after(5*time.Second, begins)
		default:
			after(v.Refusal.RetryAfter+2*time.Millisecond, func() { try(retry + 1) })
		}
	}
	begins = func() { try(0) }
	for i := range w.workers {
		after(time.Duration(i)*7*time.Millisecond, begins)
	}
	var tick func()
	tick = func() {
		g.Step(begin.Add(now), []admission.PoolView{{Name: "p", Limit: 1000, Capacity: 1000, Places: 1000, InFlight: live}})
		after(50*time.Millisecond, tick)
	}
	tick()
	for queue[0].at < length {
		e := heap.Pop(&queue).(due)
		now = e.at
		e.do()
	}
}

// TestWorkersWaitForTokensThatAreSoonBack: where budgets are far larger than answers few
// operations are given up, or told that there is no point in trying again, and more are
// served; where usage is not told, or budgets are used up, nothing changes. Behind each row
// is what is given up and served where the next window is waited for.
func TestWorkersWaitForTokensThatAreSoonBack(t *testing.T) {
	if admission.Raced {
		t.Skip("a simulation has one goroutine, and takes ten times as long with the race detector: .ci/run runs it without")
	}
	minute := func(n int64) fleet.Rate { return fleet.Rate{Amount: n, Window: time.Minute} }
	hour := func(n int64) fleet.Rate { return fleet.Rate{Amount: n, Window: time.Hour} }
	for _, row := range []struct {
		w      tokenWorkers
		length time.Duration
		gaveUp float64 // part of the operations, at most
		served int     // at least
	}{
		{tokenWorkers{tokens: minute(100_000), workers: 15, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, 10 * time.Minute, 0.02, 1990}, // 0.000 and 1,786
		{tokenWorkers{tokens: minute(100_000), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, 10 * time.Minute, 0.03, 1990}, // 0.019 and 1,879
		{tokenWorkers{tokens: minute(100_000), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 200}, 10 * time.Minute, 0.055, 2070},                    // 0.068 and 2,310
		{tokenWorkers{tokens: minute(100_000), workers: 20, concurrency: 15, takes: 2 * time.Second, budget: 8192, answers: 200}, 10 * time.Minute, 0.055, 2070},   // 0.068 and 2,310
		{tokenWorkers{tokens: minute(1_000_000), workers: 150, takes: 5 * time.Second, exact: true, budget: 8192, answers: 200}, 4 * time.Minute, 0.01, 4750},      // 0.005 and 4,785
		{tokenWorkers{tokens: minute(1_000_000), workers: 200, takes: 20 * time.Second, budget: 8192, answers: 1000}, 4 * time.Minute, 0.08, 1240},                 // 0.030 and 1,299
		{tokenWorkers{tokens: hour(1_000_000), workers: 150, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, time.Minute, 0.03, 2220},     // 0.172 and 2,247
		// More is wanted than the limit lets in.
		{tokenWorkers{tokens: minute(100_000), workers: 60, takes: 2 * time.Second, budget: 8192, answers: 200, think: time.Second}, 10 * time.Minute, 0.19, 2010},              // 0.673 and 2,182
		{tokenWorkers{tokens: minute(100_000), workers: 60, takes: 2 * time.Second, budget: 8192, answers: 1000, think: time.Second}, 10 * time.Minute, 0.5, 850},               // 0.857 and 880
		{tokenWorkers{tokens: minute(100_000), workers: 100, takes: time.Second, budget: 1024, answers: 400, think: time.Second}, 5 * time.Minute, 0.08, 1090},                  // 0.247 and 1,100
		{tokenWorkers{tokens: minute(100_000), workers: 20, takes: 2 * time.Second, budget: 8192, answers: 8000, think: time.Second}, 10 * time.Minute, 0.9, 119},               // 0.886 and 120
		{tokenWorkers{tokens: minute(100_000), workers: 15, takes: 2 * time.Second, budget: 8192, answers: 200, silent: true, think: time.Second}, 10 * time.Minute, 0.76, 119}, // 0.740 and 120
		{tokenWorkers{tokens: fleet.Rate{Amount: 1000, Window: time.Second}, workers: 30, takes: 100 * time.Millisecond, budget: 150, answers: 90}, 2 * time.Minute, 0.15, 710}, // 0.115 and 720
	} {
		w := &row.w
		w.run(row.length, 1)
		part := float64(w.inVain+w.hopeless) / float64(max(1, w.served+w.inVain+w.hopeless))
		t.Logf("%d tokens in %v, %d workers, %d of %d in %v: %d served, %d in vain, %d told not to retry, %.3f given up; %d returns, %d in vain; %d tokens used",
			w.tokens.Amount, w.tokens.Window, w.workers, w.answers, w.budget, w.takes, w.served, w.inVain, w.hopeless, part, w.returns, w.returnsInVain, w.used)
		if part > row.gaveUp || w.served < row.served {
			t.Errorf("%+v: %d served, of %.3f given up; want %d at least, and %.3f at most", *w, w.served, part, row.served, row.gaveUp)
		}
	}
}
