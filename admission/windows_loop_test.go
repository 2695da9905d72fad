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

// due is something that happens at a time; of one time what was asked for first.
type due struct {
	at time.Duration
	n  int
	do func()
}

type dues []due

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].at < d[j].at || d[i].at == d[j].at && d[i].n < d[j].n }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dues) Push(x any)        { *d = append(*d, x.(due)) }
func (d *dues) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}

// sdkWorkers are workers of one key that ask without end, as official SDKs do: they come back
// as told, twice, and then their programs have an error.
type sdkWorkers struct {
	limit   fleet.Limit // of all
	workers int
	takes   time.Duration // an answer: half to one and a half times that …
	exact   bool          // … or that, each
	prompt  fleet.Tokens  // of each
	budget  fleet.Tokens  // of each; 0 draws 50 … 149
	answers fleet.Tokens  // that each answer has; 0: none tells its usage
	think   time.Duration // between an answer and the next operation
	pause   time.Duration // between an error and the next operation
	// What became of operations: in vain are those that came three times, hopeless those
	// that were told not to retry.
	served, inVain, hopeless int
	returns, returnsInVain   int
}

// gaveUp is the part of the operations that ended in an error.
func (w *sdkWorkers) gaveUp() float64 {
	return float64(w.inVain+w.hopeless) / float64(max(1, w.served+w.inVain+w.hopeless))
}

func (w *sdkWorkers) run(length time.Duration) {
	w.limit.Name, w.limit.Key = "l", fleet.ClientKeyAuthorization
	begin := time.Now().Truncate(24 * time.Hour)
	var now time.Duration
	g := admission.New(admission.Options{
		Limiter: ratelimit.NewEmbedded(), Now: func() time.Time { return begin.Add(now) },
		Config: &fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 1000, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, FairShare: true}},
			Limits: []fleet.Limit{w.limit},
		},
	})
	rng := rand.New(rand.NewPCG(1, 1))
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
		budget := w.budget
		if budget == 0 {
			budget = fleet.Tokens(50 + rng.IntN(100))
		}
		a := &admission.Ask{
			ID: fmt.Sprint(n), Route: "r", Pool: "p", Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte("k")), Level: fleet.LevelOf(budget),
			Input: w.prompt, InputAtLeast: w.prompt / 10, Output: budget, At: begin.Add(now), Seed: rng.Uint64(), Retry: retry, Counts: true,
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
			tells := func(o fleet.OutcomeKind) {
				g.Apply(fleet.Outcome{Kind: o, ID: a.ID, Attempt: 1, At: begin.Add(now)})
			}
			after(0, func() { tells(fleet.AttemptStarted) })
			for beat := 10 * time.Second; beat < takes; beat += 10 * time.Second {
				after(beat, func() { tells(fleet.Heartbeat) })
			}
			after(takes, func() {
				live--
				w.served++
				g.Apply(fleet.Outcome{
					Kind: fleet.RequestEnded, ID: a.ID, Attempt: 1, At: begin.Add(now), Code: 200, Cause: fleet.CauseOK,
					Usage: fleet.Usage{Known: w.answers > 0, Input: w.prompt, Output: w.answers},
				})
				after(w.think, begins)
			})
		case !v.Refusal.ShouldRetry:
			w.hopeless++
			after(w.pause, begins)
		case retry == 2:
			w.inVain++
			after(w.pause, begins)
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

// sdkLoad is workers of one key behind a limit, for so long.
type sdkLoad struct {
	limit         fleet.Limit
	workers       int
	takes, length time.Duration
	gaveUp        float64 // part of the operations, at most
}

func (l sdkLoad) run(t *testing.T, name string) {
	if admission.Raced {
		t.Skip("a simulation has one goroutine, and takes ten times as long with the race detector: .ci/run runs them without")
	}
	w := sdkWorkers{limit: l.limit, workers: l.workers, takes: l.takes, pause: 100 * time.Millisecond}
	w.run(l.length)
	t.Logf("%s: %d served, %.2f given up", name, w.served, w.gaveUp())
	if w.gaveUp() > l.gaveUp {
		t.Errorf("%s: beside %d operations that were served %.2f were given up; want %.2f at most", name, w.served, w.gaveUp(), l.gaveUp)
	}
}

// TestWorkersThatComeInTheirSlotsAreNotTooEarly, where slots reach over several windows:
// those who find theirs taken by a sibling's first try get another one. Most operations
// that are given up here are so since a sibling without a slot was sooner. Where a window
// is as long as anybody waits, and used up early, they all wait for the next.
func TestWorkersThatComeInTheirSlotsAreNotTooEarly(t *testing.T) {
	rate := func(amount int64, window time.Duration) fleet.Rate { return fleet.Rate{Amount: amount, Window: window} }
	for name, load := range map[string]sdkLoad{
		"ten a second, fifteen workers":           {fleet.Limit{Requests: rate(10, time.Second)}, 15, 100 * time.Millisecond, 2 * time.Minute, 0.2},
		"ten a second, thirty workers":            {fleet.Limit{Requests: rate(10, time.Second)}, 30, 100 * time.Millisecond, 2 * time.Minute, 0.17},
		"a hundred in ten seconds, three hundred": {fleet.Limit{Requests: rate(100, 10*time.Second)}, 300, 100 * time.Millisecond, 2 * time.Minute, 0.22},
		"a thousand tokens a second, thirty":      {fleet.Limit{Tokens: rate(1000, time.Second)}, 30, 100 * time.Millisecond, 2 * time.Minute, 0.17},
		"four at a time and ten a second, twenty": {fleet.Limit{Concurrency: 4, Requests: rate(10, time.Second)}, 20, 200 * time.Millisecond, 2 * time.Minute, 0.25},
		"ten, and a thousand tokens, both thirty": {fleet.Limit{Requests: rate(10, time.Second), Tokens: rate(1000, time.Second)}, 30, 100 * time.Millisecond, 2 * time.Minute, 0.3},
		"sixty a minute, thirty workers":          {fleet.Limit{Requests: rate(60, time.Minute)}, 30, 2 * time.Second, 20 * time.Minute, 0.02},
		"sixty a minute, sixty workers":           {fleet.Limit{Requests: rate(60, time.Minute)}, 60, 2 * time.Second, 20 * time.Minute, 0.12},
		"ten a minute, three workers":             {fleet.Limit{Requests: rate(10, time.Minute)}, 3, 2 * time.Second, 20 * time.Minute, 0.02},
		"ten a minute, ten workers":               {fleet.Limit{Requests: rate(10, time.Minute)}, 10, 2 * time.Second, 20 * time.Minute, 0.12},
	} {
		load.run(t, name)
	}
}

// TestWorkersBehindTheirConcurrencyWaitForLongAnswers, up to a minute, since nobody else
// would serve them.
func TestWorkersBehindTheirConcurrencyWaitForLongAnswers(t *testing.T) {
	for name, load := range map[string]sdkLoad{
		"one at a time, three workers":  {fleet.Limit{Concurrency: 1}, 3, 10 * time.Second, 30 * time.Minute, 0.3},
		"four at a time, eight workers": {fleet.Limit{Concurrency: 4}, 8, 25 * time.Second, 30 * time.Minute, 0.4},
		"eight at a time, fifteen":      {fleet.Limit{Concurrency: 8}, 15, 25 * time.Second, 30 * time.Minute, 0.2},
	} {
		load.run(t, name)
	}
}
