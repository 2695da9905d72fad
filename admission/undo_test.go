package admission

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// scripted admits as it is told, and keeps what it was asked and what was settled.
type scripted struct {
	// answer is what Reserve says; a reason of 0 admits.
	answer  Reservation
	rates   []Rates
	costs   []fleet.Tokens
	settled []settled
}

// settled is one call of Settle.
type settled struct{ cost, used fleet.Tokens }

func (l *scripted) Reserve(k LimitKey, r Rates, cost fleet.Tokens, now time.Time) Reservation {
	l.rates, l.costs = append(l.rates, r), append(l.costs, cost)
	if l.answer.Reason != 0 {
		return l.answer
	}
	return Reservation{Admitted: true, Reason: ReasonAdmitted, Ticket: Ticket{Key: k, Rates: r, End: now.Add(time.Minute), Cost: cost}}
}

func (l *scripted) Settle(t Ticket, used fleet.Tokens) {
	l.settled = append(l.settled, settled{t.Cost, used})
}

// rated is a limit on everything that can be limited.
func rated(concurrency int) fleet.Limit {
	return fleet.Limit{
		Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: concurrency,
		Requests: fleet.Rate{Amount: 100, Window: time.Minute}, Tokens: fleet.Rate{Amount: 100_000, Window: time.Minute},
	}
}

// pool is the world's pool now.
func (w *world) pool() *pool { return w.settings.Load().pools["p"] }

func TestRefusalOfTheLimiterLeavesNothingCounted(t *testing.T) {
	limiter := &scripted{answer: Reservation{Reason: ReasonRequests, Requests: Quota{Limit: 100, Window: time.Minute, Reset: time.Second}}}
	w := newWorld(config(rated(2)), 100, limiter)
	for range 10 { // more than its concurrency, should any be kept
		a := w.ask("a")
		if v := w.Admit(&a); v.Admitted || v.Reason != ReasonRequests || v.Refusal.InFlight != 0 {
			t.Fatalf("%+v; want it refused with none in flight", v)
		}
	}
	if n, of := w.pool().live.Load(), w.pool().levels[3].live.Load(); n != 0 || of != 0 {
		t.Errorf("%d in flight in the pool, %d of the level; want none", n, of)
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight; want none", n)
	}
	if st := w.tick(time.Second); w.pool().levels[3].ends != 0 || st.Levels[3].InFlight != 0 {
		t.Errorf("%v ends a second and %d in flight of requests that never began", w.pool().levels[3].ends, st.Levels[3].InFlight)
	}
}

func TestRefusalOfALevelLeavesNothingCounted(t *testing.T) {
	w := newWorld(config(), 100, nil)
	p := w.pool()
	p.fullAt.Store(2)
	p.levels[3].budget.Store(2)
	var ids []string
	for i := range 10 {
		a := w.ask("a")
		// Where no other level wants the pool it is full, and not the level's part of it.
		p.undivided.Store(i%2 == 0)
		why := []Reason{ReasonBusy, ReasonLevel}[i%2]
		v := w.Admit(&a)
		if want := i < 2; v.Admitted != want || !want && v.Reason != why {
			t.Fatalf("request %d of a budget of 2: %+v; want %v", i, v, why)
		}
		if v.Admitted {
			ids = append(ids, a.ID)
		}
	}
	if n, of := p.live.Load(), p.levels[3].live.Load(); n != 2 || of != 2 {
		t.Errorf("%d in flight in the pool, %d of the level; want the 2 that entered", n, of)
	}
	for _, id := range ids {
		w.end(id)
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight after both ended; want none", n)
	}
}

func TestRefusalForWantOfAPlaceLeavesNothingCounted(t *testing.T) {
	w := newWorld(config(), 100, nil)
	p := w.pool()
	p.places.Store(2)
	var ids []string
	for i := range 10 {
		a := w.ask("a")
		a.Unplaced = true
		v := w.Admit(&a)
		if want := i < 2; v.Admitted != want || !want && v.Reason != ReasonBusy {
			t.Fatalf("request %d of 2 places: %+v", i, v)
		}
		if v.Admitted {
			ids = append(ids, a.ID)
		}
	}
	if n := counted(t, w.Gate); n != 2 {
		t.Errorf("%d in flight; want the 2 that entered", n)
	}
	placed := w.ask("a") // the plan has a place for it
	if v := w.Admit(&placed); !v.Admitted {
		t.Errorf("%+v; want it admitted", v)
	}
	for _, id := range append(ids, placed.ID) {
		w.end(id)
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight after all ended; want none", n)
	}
}

// TestOnlyOneSignOfLifeRevivesAClaim has many signs of life of one lapsed request
// arrive at once: all but one find it revived when they have counted it.
func TestOnlyOneSignOfLifeRevivesAClaim(t *testing.T) {
	const signs = 8
	w := newWorld(config(rated(50)), 1000, &scripted{})
	for range 50 {
		a := w.ask("a")
		w.Admit(&a)
		w.tick(unconfirmedLease)
		beat := fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()}
		held := w.clients.lock(a.Client, 0) // they wait for it with the lapsed claim in hand
		var begun atomic.Int64
		var all sync.WaitGroup
		for range signs {
			all.Go(func() {
				begun.Add(1)
				w.Apply(beat)
			})
		}
		for begun.Load() < signs {
			runtime.Gosched()
		}
		for range 100 {
			runtime.Gosched()
		}
		held.mu.Unlock()
		all.Wait()
		if n := counted(t, w.Gate); n != 1 {
			t.Fatalf("%d in flight after %d signs of one request; want one", n, signs)
		}
		w.end(a.ID)
		if n := counted(t, w.Gate); n != 0 {
			t.Fatalf("%d in flight after its end; want none", n)
		}
	}
}

func TestClientWithALongRequestIsNotForgotten(t *testing.T) {
	w := newWorld(config(rated(1)), 100, &scripted{})
	a := w.ask("a")
	w.Admit(&a)
	for w.clock.at.Load() < int64(3*idleAfter) {
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
		w.tick(lease / 2)
	}
	b := w.ask("a")
	if v := w.Admit(&b); v.Admitted || v.Reason != ReasonConcurrency {
		t.Errorf("%+v; want its request of minutes ago counted", v)
	}
	w.end(a.ID)
	if v := w.Admit(&b); !v.Admitted {
		t.Errorf("%+v; want room after its end", v)
	}
	w.end(b.ID)
	w.tick(2 * idleAfter)
	if n := w.Counters().Clients; n != 0 {
		t.Errorf("%d clients told apart long after their last requests; want none", n)
	}
}

func TestCancelledRequestGivesItsTokensBack(t *testing.T) {
	limiter := &scripted{}
	w := newWorld(config(rated(1)), 100, limiter)
	a := w.ask("a")
	w.Admit(&a)
	w.Cancel(a.ID)
	w.Cancel(a.ID)
	w.end(a.ID)
	if want := []settled{{300, 0}}; !slices.Equal(limiter.settled, want) {
		t.Errorf("settled %v; want %v, once", limiter.settled, want)
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight; want none", n)
	}
	w.tick(time.Second)
	for i := range w.pool().levels {
		if n := w.pool().levels[i].ends; n != 0 {
			t.Errorf("%v ends a second of a request that never went", n)
		}
	}
}

func TestSecondRequestUnderOneIDGivesTheTokensOfTheFirstBack(t *testing.T) {
	limiter := &scripted{}
	w := newWorld(config(rated(0)), 100, limiter)
	a := w.ask("a")
	w.Admit(&a)
	b := a
	b.Output = 300
	w.Admit(&b)
	if want := []settled{{300, 0}}; !slices.Equal(limiter.settled, want) {
		t.Errorf("settled %v; want %v, the first's", limiter.settled, want)
	}
	w.tick(unconfirmedLease) // the second lapses
	w.Admit(&a)
	w.Cancel(a.ID)
	if want := []settled{{300, 0}, {400, 0}, {300, 0}}; !slices.Equal(limiter.settled, want) {
		t.Errorf("settled %v; want %v, each once", limiter.settled, want)
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight; want none", n)
	}
}

func TestRequestThatFindsTheTableFullGivesAllBack(t *testing.T) {
	limiter := &scripted{}
	w := newWorld(config(), 100, nil)
	w.Gate = New(Options{Config: config(rated(10)), Limiter: limiter, Now: w.clock.now, Claims: 1})
	first, second := w.ask("a"), w.ask("a")
	w.Admit(&first)
	if v := w.Admit(&second); v.Admitted || v.Reason != ReasonBusy {
		t.Fatalf("%+v; want it refused as busy", v)
	}
	if want := []settled{{300, 0}}; !slices.Equal(limiter.settled, want) {
		t.Errorf("settled %v; want %v", limiter.settled, want)
	}
	if n := counted(t, w.Gate); n != 1 {
		t.Errorf("%d in flight; want the first", n)
	}
}

// failing is a limiter that panics.
type failing struct{}

func (failing) Reserve(LimitKey, Rates, fleet.Tokens, time.Time) Reservation { panic("no limiter") }
func (failing) Settle(Ticket, fleet.Tokens)                                  {}

func TestLimiterThatPanicsKeepsNoPlace(t *testing.T) {
	w := newWorld(config(rated(1)), 100, failing{})
	for range 3 {
		a := w.ask("a")
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the limiter was not asked: a place is still taken")
				}
			}()
			w.Admit(&a)
		}()
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight; want none", n)
	}
}

func TestReloadKeepsTheCountsOfPools(t *testing.T) {
	w := newWorld(config(), 100, nil)
	var ids []string
	for range 3 {
		a := w.ask("a")
		w.Admit(&a)
		ids = append(ids, a.ID)
	}
	w.Reconfigure(config())
	if st := w.tick(0); st.Levels[3].InFlight != 3 || w.Counters().Routes[0].Admitted != 3 {
		t.Errorf("%d in flight and %d admitted after a reload; want 3", st.Levels[3].InFlight, w.Counters().Routes[0].Admitted)
	}
	if st := w.tick(0); st.Limit != 100 {
		t.Errorf("limit %v after a reload; want 100", st.Limit)
	}
	for _, id := range ids {
		w.end(id)
	}
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight after all ended; want none", n)
	}
}

func TestPoolThatComesBackHasNoneBelowNothing(t *testing.T) {
	w := newWorld(config(), 100, nil)
	a := w.ask("a")
	w.Admit(&a)
	gone := config()
	gone.Pools, gone.Routes[0].Split = nil, nil
	w.Reconfigure(gone)
	w.Step(w.clock.now(), nil)
	w.Reconfigure(config())
	w.end(a.ID)
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight; want none", n)
	}
}

func TestLimitThatGoesAndComesBackCountsWhatIsInFlight(t *testing.T) {
	limiter := &scripted{}
	w := newWorld(config(rated(1)), 100, limiter)
	a, b := w.ask("a"), w.ask("a")
	w.Admit(&a)
	w.Reconfigure(config())
	if v := w.Admit(&b); !v.Admitted {
		t.Fatalf("%+v; want no limit", v)
	}
	w.Reconfigure(config(rated(1)))
	c := w.ask("a")
	if v := w.Admit(&c); v.Admitted || v.Refusal.InFlight != 2 {
		t.Errorf("%+v; want both counted", v)
	}
	w.Reconfigure(config())
	w.end(a.ID) // while there is no limit
	w.Reconfigure(config(rated(1)))
	if v := w.Admit(&c); v.Admitted || v.Refusal.InFlight != 1 {
		t.Errorf("%+v; want the one that entered without a limit counted", v)
	}
	w.end(b.ID)
	if v := w.Admit(&c); !v.Admitted {
		t.Errorf("%+v; want its place free", v)
	}
	if d := w.ask("a"); w.Admit(&d).Admitted {
		t.Error("a second one entered")
	}
	w.end(c.ID)
	if len(limiter.settled) != 0 || counted(t, w.Gate) != 0 {
		t.Errorf("%d in flight, settled %v; want none, and reservations that stand", counted(t, w.Gate), limiter.settled)
	}
}

func TestSidecarsThatLeftTakeTheirRequestsAlong(t *testing.T) {
	w := newWorld(config(rated(1)), 100, &scripted{})
	for node, left := range map[string]struct {
		call func(string)
		in   time.Duration
	}{"gone": {w.NodeGone, nodeGrace}, "dead": {w.NodeDead, deadGrace}} {
		a, b := w.ask(node), w.ask(node)
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: node, Attempt: 1, At: w.clock.now()})
		left.call("another")
		w.tick(left.in)
		if w.Admit(&b).Admitted {
			t.Errorf("%s: another sidecar's end ended its request", node)
		}
		left.call(node)
		w.tick(left.in - time.Millisecond)
		if w.Admit(&b).Admitted {
			t.Errorf("%s: its request ended before its grace of %v", node, left.in)
		}
		w.tick(time.Millisecond)
		if v := w.Admit(&b); !v.Admitted {
			t.Errorf("%s: %+v after its grace of %v; want its place free", node, v, left.in)
		}
	}
}

// TestDropEndsWhatNothingToldOf, and nothing that runs.
func TestDropEndsWhatNothingToldOf(t *testing.T) {
	w := newWorld(config(), 100, nil)
	a, b := w.ask("a"), w.ask("a")
	w.Admit(&a)
	w.Admit(&b)
	w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: b.ID, Node: "n", Attempt: 1, At: w.clock.now()})
	w.Drop(a.ID)
	w.Drop(b.ID)
	w.Drop("unknown")
	if got := counted(t, w.Gate); got != 1 {
		t.Errorf("%d in flight; want the one that runs", got)
	}
}
