package admission

import (
	"container/heap"
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// chainOf is a configuration with more pools behind "p".
func chainOf(more ...string) *fleet.Config {
	cfg := config()
	for _, name := range more {
		cfg.Pools = append(cfg.Pools, fleet.Pool{Name: name, MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)})
		cfg.Routes[0].Fallback = append(cfg.Routes[0].Fallback, name)
	}
	return cfg
}

// chain plays programs behind official SDKs against a gate in front of a chain of pools,
// of which the plan refuses whoever finds all full.
type chain struct {
	*world
	loop   *loop // its events and its draws
	names  []string
	places map[string]int
	live   map[string]int
	of     map[string]string // pool by request
	held   map[string]int    // by client
	takes  time.Duration
	since  time.Duration

	ended, gaveUp, refused, hopeless int
	told                             time.Duration
}

func newChain(t testing.TB, takes time.Duration, places ...int) *chain {
	c := &chain{
		loop: newLoop(t, places[0]), takes: takes,
		places: map[string]int{}, live: map[string]int{}, of: map[string]string{}, held: map[string]int{},
	}
	for i, n := range places {
		name := string(rune('p' + i))
		c.names, c.places[name] = append(c.names, name), n
	}
	c.world = newWorld(chainOf(c.names[1:]...), float64(places[0]), nil)
	c.loop.world = c.world
	return c
}

// run plays until then; what is measured is measured from since on.
func (c *chain) run(callers []*caller, since, until time.Duration) {
	c.since = since
	c.loop.add(callers...)
	for now := time.Duration(0); now < until; now += 50 * time.Millisecond {
		for q := &c.loop.queue; len(*q) > 0 && (*q)[0].at <= now; {
			e := heap.Pop(q).(event)
			c.clock.at.Store(int64(e.at))
			c.handle(e)
		}
		c.clock.at.Store(int64(now))
		var views []PoolView
		for _, name := range c.names {
			views = append(views, PoolView{Name: name, Limit: float64(c.places[name]), InFlight: c.live[name]})
		}
		c.Step(c.clock.now(), views)
	}
}

func (c *chain) handle(e event) {
	switch {
	case e.beats != "":
		c.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: e.beats, Attempt: 1, At: c.clock.now()})
		return
	case e.ends != "":
		c.end(e.ends)
		c.live[c.of[e.ends]]--
		delete(c.of, e.ends)
		if e.at >= c.since {
			c.ended++
		}
		heap.Push(&c.loop.queue, event{at: e.at + time.Millisecond, of: e.of})
		return
	}
	a := c.ask(e.of.name)
	a.Retry, a.Counts, a.Seed = e.retry, true, c.loop.rng.Uint64()
	v := c.try(&e, &a)
	switch r := v.Refusal; {
	case v.Held:
	case v.Admitted:
		c.live[a.Pool]++
		c.of[a.ID] = a.Pool
		heap.Push(&c.loop.queue, event{at: e.at + c.loop.about(c.takes), of: e.of, ends: a.ID})
		heap.Push(&c.loop.queue, event{at: e.at, of: e.of, beats: a.ID})
	default:
		again := e.at + r.RetryAfter
		if e.at >= c.since {
			c.refused++
			c.told += r.RetryAfter
			if !r.ShouldRetry {
				c.hopeless++
			}
		}
		e.retry++
		if !r.ShouldRetry || e.retry > 2 {
			if again = e.at + 100*time.Millisecond; e.at >= c.since {
				c.gaveUp++
			}
			e.retry = 0
		}
		heap.Push(&c.loop.queue, event{at: again, of: e.of, retry: e.retry})
	}
}

// try asks for a request's place along the chain, as package extproc does, which holds
// for a while who finds none.
func (c *chain) try(e *event, a *Ask) Verdict {
	v, found := c.pass(a, true)
	if found {
		c.unhold(e)
		return v
	}
	if e.held == nil && c.held[e.of.name] < heldMost && c.BeginHold(a) {
		c.held[e.of.name]++
		held := *a
		e.held, e.since = &held, e.at
	}
	if e.held != nil && e.at-e.since < heldFor {
		again := *e
		again.at += heldStep
		heap.Push(&c.loop.queue, again)
		return Verdict{Held: true}
	}
	c.unhold(e)
	v, _ = c.pass(a, false)
	return v
}

func (c *chain) unhold(e *event) {
	if e.held != nil {
		c.held[e.of.name]--
		c.EndHold(e.held)
		e.held = nil
	}
}

// pass asks pool by pool. Where none of them lets it in it is refused, or may be held,
// for the pool that it waits for.
func (c *chain) pass(a *Ask, hold bool) (v Verdict, found bool) {
	why := ReasonBusy
	for _, name := range c.names {
		if c.live[name] >= c.places[name] {
			continue
		}
		a.Pool, a.Hold = name, true
		if v = c.Admit(a); v.Admitted {
			return v, true
		}
		why = v.Reason
	}
	a.Pool = c.awaited(a)
	if !hold {
		v = Verdict{Reason: why, Refusal: c.Refuse(a, why)}
	}
	return v, !hold
}

func (c *chain) awaited(a *Ask) string {
	best, least := "", time.Duration(0)
	for _, name := range c.names {
		a.Pool = name
		if wait := c.Wait(a); best == "" || wait < least {
			best, least = name, wait
		}
	}
	return best
}

// TestWhoFindsAChainFullWaitsForWhicheverPoolIsSooner: the first pool of a chain has few
// of its places. By the slots of that one alone 85 % of the operations of the first row
// gave up, and 82 % of the second.
func TestWhoFindsAChainFullWaitsForWhicheverPoolIsSooner(t *testing.T) {
	for _, row := range []struct {
		keys, workers int
		places        []int
		gaveUp        float64 // at most, of all operations
		told          time.Duration
	}{
		{1, 216, []int{8, 64}, 0.03, 6 * time.Second},
		{72, 3, []int{8, 64}, 0.30, 6 * time.Second},
		{1, 48, []int{8, 8}, 0.10, 6 * time.Second},
	} {
		c := newChain(t, 2*time.Second, row.places...)
		var callers []*caller
		for i := range row.keys {
			callers = append(callers, &caller{name: fmt.Sprint("key", i), open: row.workers})
		}
		c.run(callers, 40*time.Second, 100*time.Second)
		gaveUp, told := float64(c.gaveUp)/float64(c.gaveUp+c.ended), c.told/time.Duration(max(1, c.refused))
		t.Logf("%d keys of %d workers on %v: %d ended, %.1f %% gave up, %d refused and told %v on average, %d not to retry",
			row.keys, row.workers, row.places, c.ended, 100*gaveUp, c.refused, told.Round(100*time.Millisecond), c.hopeless)
		if gaveUp > row.gaveUp || told > row.told || c.hopeless > 0 || c.refused == 0 {
			t.Errorf("%d keys of %d workers on %v: want at most %.0f %% to give up, %v told, and nobody not to retry",
				row.keys, row.workers, row.places, 100*row.gaveUp, row.told)
		}
	}
}

// twoPools is a world with 8 places in "p" and 64 in "q", of which the clients have all
// of one each.
func twoPools(t *testing.T, clients ...string) *world {
	w := newWorld(chainOf("q"), 8, nil)
	for i, name := range []string{"p", "q"} {
		for n := range 8 + 56*i {
			a := w.ask(clients[n%len(clients)])
			if a.Pool = name; !w.Admit(&a).Admitted {
				t.Fatalf("no place for request %d in %s", n, name)
			}
		}
	}
	w.tickBoth(time.Second)
	return w
}

func (w *world) tickBoth(d time.Duration) {
	w.clock.advance(d)
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 8, InFlight: 8}, {Name: "q", Limit: 64, InFlight: 64}})
}

func (w *world) askFor(pool, client string, retry int) Ask {
	a := w.ask(client)
	a.Pool, a.Retry, a.Counts = pool, retry, true
	return a
}

// first is when the first slot of a client is that it has in a pool.
func (w *world) first(pool, client string) time.Duration {
	c := w.clients.lock(named(client), 0)
	defer c.mu.Unlock()
	return c.find(w.settings.Load().pools[pool], fleet.ClassInteractive).slots.first()
}

// TestWaitIsWhatARefusalTells, but for the jitter and the draw within the time of one end: of who is alone, of who has its share,
// of who is new, and of who has used up its slots of the line.
func TestWaitIsWhatARefusalTells(t *testing.T) {
	for _, clients := range [][]string{{"a"}, {"a", "b"}} {
		w := twoPools(t, clients...)
		for _, name := range []string{"a", "b"} {
			for n := range 40 {
				pool := []string{"p", "q"}[n%2]
				a := w.askFor(pool, name, 0)
				wait := w.Wait(&a)
				if again := w.Wait(&a); again != wait {
					t.Errorf("%v, then %v: it took a slot", wait, again)
				}
				r := w.Refuse(&a, ReasonBusy)
				if told := r.RetryAfter; r.ShouldRetry && (told < wait/4 || told > 5*wait/4+time.Millisecond) {
					t.Errorf("%d clients, request %d of %s for %s: told %v; want about %v", len(clients), n, name, pool, told, wait)
				}
				if far := wait > retryCap; far == r.ShouldRetry {
					t.Errorf("%d clients, request %d of %s for %s: would wait %v and may retry: %v", len(clients), n, name, pool, wait, r.ShouldRetry)
				}
			}
			w.tickBoth(100 * time.Millisecond) // what is in flight is still
		}
	}
}

// TestWaitIsShorterWhereMoreEnds, until as many wait there.
func TestWaitIsShorterWhereMoreEnds(t *testing.T) {
	w := twoPools(t, "a")
	refused := map[string]int{}
	for range 72 {
		a, b := w.askFor("p", "a", 0), w.askFor("q", "a", 0)
		if w.Wait(&a) < w.Wait(&b) {
			b = a
		}
		w.Refuse(&b, ReasonBusy)
		refused[b.Pool]++
	}
	if p, q := refused["p"], refused["q"]; p < 6 || p > 10 {
		t.Errorf("%d wait for 8 places and %d for 64; want as many as have places", p, q)
	}
}

// TestWhoComesAsToldWaitsWhereItWasTold: a slot that is due in one of the pools is what
// the request comes for.
func TestWhoComesAsToldWaitsWhereItWasTold(t *testing.T) {
	w := twoPools(t, "a")
	wait := func(pool string, retry int) time.Duration {
		a := w.askFor(pool, "a", retry)
		return w.Wait(&a)
	}
	told := func(pool string) time.Duration {
		a := w.askFor(pool, "a", 0)
		return w.Refuse(&a, ReasonBusy).RetryAfter
	}
	late, soon := told("p"), told("q")
	if soon >= late {
		t.Fatalf("told %v for 64 places, and %v for 8", soon, late)
	}
	if p, q := wait("p", 1), wait("q", 1); p != 0 || q != 0 {
		t.Errorf("before both slots: %v and %v; want 0, the slots of others", p, q)
	}
	w.clock.at.Store(int64(w.first("q", "a")))
	if p, q := wait("p", 1), wait("q", 1); p != 0 || q >= 0 {
		t.Errorf("in the slot of one: %v and %v; want that one", p, q)
	}
	if p, q := wait("p", 0), wait("q", 0); p <= 0 || q >= 0 {
		t.Errorf("maybe a return: %v and %v; want it taken for one in the pool where a slot is due", p, q)
	}
	batch := w.askFor("q", "a", 1)
	if batch.Class = fleet.ClassBatch; w.Wait(&batch) <= 0 {
		t.Errorf("in the other class: %v; want that of its own account", w.Wait(&batch))
	}
	returns := w.askFor("q", "a", 1)
	w.Refuse(&returns, ReasonBusy) // it is one whose first tries can be told
	if p, q := wait("p", 0), wait("q", 0); p <= 0 || q <= 0 {
		t.Errorf("a first try: %v and %v; want what it would be told", p, q)
	}
	w.clock.advance(late + coldMost) // nothing has ended yet
	if p, q := wait("p", 1), wait("q", 1); p >= q || q >= 0 {
		t.Errorf("in the slots of both: %v and %v; want the one longer due", p, q)
	}
}

// TestWaitInALineThatIsTooLong: who has something in flight waits in its own queue, and
// who hasn't is told how long the line is.
func TestWaitInALineThatIsTooLong(t *testing.T) {
	w := twoPools(t, "a", "a", "a", "b")
	for _, pool := range []string{"p", "q"} {
		w.settings.Load().pools[pool].tail.at.Store(w.clock.at.Load() + int64(time.Hour))
	}
	has, none := w.askFor("q", "b", 0), w.askFor("q", "new", 0)
	if wait := w.Wait(&has); wait > retryCap {
		t.Errorf("with 16 of 64 in flight: %v", wait)
	}
	if wait := w.Wait(&none); wait < time.Hour {
		t.Errorf("with nothing in flight: %v", wait)
	}
}

// TestWaitIsNotBeforeAPoolOpens.
func TestWaitIsNotBeforeAPoolOpens(t *testing.T) {
	w := twoPools(t, "a")
	w.Step(w.clock.now(), []PoolView{
		{Name: "p", Limit: 8, InFlight: 8},
		{Name: "q", Limit: 64, Closed: 64, InFlight: 64, Reopens: 20 * time.Second},
	})
	for _, client := range []string{"a", "new"} { // in its own queue, and in the line
		a := w.askFor("q", client, 0)
		if wait := w.Wait(&a); wait <= 20*time.Second || wait > 22*time.Second {
			t.Errorf("%s waits %v for a pool that opens in 20 s", client, wait)
		}
	}
}

// TestWaitLeavesNothingBehind: it allocates nothing, also for a client without anything
// in the pool, which has nothing there after it.
func TestWaitLeavesNothingBehind(t *testing.T) {
	w := twoPools(t, "a")
	a := w.askFor("q", "new", 0)
	if n := testing.AllocsPerRun(100, func() { w.Wait(&a) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	c := w.clients.lock(a.Client, 0)
	defer c.mu.Unlock()
	if len(c.accounts) != 0 {
		t.Errorf("%d accounts", len(c.accounts))
	}
	if n := w.settings.Load().pools["q"].accounts.Load(); n != 1 {
		t.Errorf("%d accounts have requests or slots in the pool", n)
	}
}

// TestHeldRequestsAreToldTheirLimit: who is refused after it goes by that.
func TestHeldRequestsAreToldTheirLimit(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 10, nil)
	a, b := w.ask("a"), w.ask("a")
	w.Admit(&a)
	b.Hold = true
	if v := w.Admit(&b); !v.Held || v.Standing.Policy != "l" {
		t.Errorf("%+v", v)
	}
}
