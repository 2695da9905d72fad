package admission

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestPromisedPlacesAreThoseOfWhoComesAboutNow: slots at times around now, of two
// levels, where one ends each 100 ms and firm ones are kept for 1.13 of that.
func TestPromisedPlacesAreThoseOfWhoComesAboutNow(t *testing.T) {
	const each, share, now = 100 * time.Millisecond, 8, 10 * time.Second
	once, twice := time.Duration(ahead(share, keptOnce)*float64(each)), time.Duration(ahead(share, keptTwice)*float64(each))
	if once != 40*time.Millisecond || twice.Round(time.Millisecond) != 113*time.Millisecond {
		t.Fatalf("kept for %v and %v", once, twice)
	}
	for name, row := range map[string]struct {
		slots []slot
		level fleet.BurstLevel
		held  int32
		told  bool
		want  int64
	}{
		"soon enough":                 {slots: []slot{{at: now + once}, {at: now + 1}}, want: 2},
		"not yet":                     {slots: []slot{{at: now + once + 1}}, want: 0},
		"kept longer for firm ones":   {slots: []slot{{at: now + once + 1, firm: true}, {at: now + twice + 1, firm: true}}, want: 1},
		"a little late":               {slots: []slot{{at: now - twice}, {at: now - twice - 1}}, want: 1},
		"of another level":            {slots: []slot{{at: now, level: 1}, {at: now}, {at: now}}, want: 2},
		"of all levels":               {slots: []slot{{at: now, level: 1}, {at: now}}, level: allLevels, want: 2},
		"those that are held are due": {slots: []slot{{at: now - 1}, {at: now - 1}, {at: now + 1}}, held: 2, want: 3},
		"held, and not due any more":  {slots: []slot{{at: now - time.Second}, {at: now + time.Second}}, held: 2, want: 2},
		"to one that was told itself": {slots: []slot{{at: now - 1}, {at: now - 1, firm: true}, {at: now + twice, firm: true}}, held: 5, told: true, want: 2},
	} {
		var s slots
		for _, o := range row.slots {
			s.add(o)
		}
		if got := s.promised(now, each, share, row.level, row.held, row.told); got != row.want {
			t.Errorf("%s: %d places; want %d", name, got, row.want)
		}
	}
}

// counting is a request of an SDK that tells how often it tried, and was seen to.
func (w *world) counting(client string, retry int) Ask {
	a := w.ask(client)
	a.Counts, a.Retry = true, retry
	now := w.since(a.At)
	c := w.clients.lock(a.Client, now)
	c.returned, c.returns = now, true
	c.mu.Unlock()
	return a
}

// tenRunning is a world where a client has ten requests in flight, of a second each: all
// places of a pool of ten, or limited, as many as it may have.
func tenRunning(limited bool) (w *world, ids []string) {
	cfg, places := config(), 10.0
	if limited {
		cfg, places = config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 10}), 100
	}
	w = newWorld(cfg, places, nil)
	l := &w.pool().levels[3]
	l.events, l.exposure = 1e6, 1e6
	w.tick(0)
	for range 10 {
		a := w.counting("a", 0)
		w.Admit(&a)
		ids = append(ids, a.ID)
	}
	return w, ids
}

// TestFirstTriesLeaveThePlaceToWhoWasToldToCome, in a pool of ten and at a limit of
// ten, unless those that were told do not keep to it.
func TestFirstTriesLeaveThePlaceToWhoWasToldToCome(t *testing.T) {
	for _, limited := range []bool{false, true} {
		for _, hammers := range []bool{false, true} {
			w, ids := tenRunning(limited)
			refuse := func(retry int) Refusal {
				a := w.counting("a", retry)
				if !limited {
					return w.Refuse(&a, ReasonBusy)
				}
				v := w.Admit(&a)
				if v.Admitted || v.Reason != ReasonConcurrency {
					t.Fatalf("%+v", v)
				}
				return v.Refusal
			}
			told := refuse(0).RetryAfter
			const one = 106 * time.Millisecond // one ends each tenth of a second, of which 0.95 are given
			second := refuse(0).RetryAfter
			if told <= one || told > retryFloor+5*one/4 || second < told+one/2 || second > retryFloor+5*one/2 {
				t.Errorf("told %v, and the next %v", told, second)
			}
			if hammers {
				for range 3 {
					w.tick(time.Millisecond)
					if later := refuse(1).RetryAfter; later < told {
						t.Errorf("who came early is told %v after %v", later, told)
					}
				}
			}
			w.clock.advance(told - 10*time.Millisecond)
			w.end(ids[0])
			early := w.counting("a", 0)
			v := w.Admit(&early)
			why := ReasonTurn
			if limited {
				why = ReasonConcurrency
			}
			if hammers != v.Admitted || !hammers && (v.Reason != why || !v.Refusal.ShouldRetry) {
				t.Errorf("limited %v, hammers %v: a first try that comes before: %+v", limited, hammers, v)
			}
			if hammers {
				continue
			}
			w.clock.advance(11 * time.Millisecond)
			due := w.counting("a", 1)
			if v := w.Admit(&due); !v.Admitted {
				t.Errorf("limited %v: who comes as told: %+v", limited, v)
			}
		}
	}
}

// TestEarlyReturnsWaitLongerBehindTheirOwnLimit, and leave one slot each.
func TestEarlyReturnsWaitLongerBehindTheirOwnLimit(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
	first := w.counting("a", 0)
	w.Admit(&first)
	last := time.Duration(0)
	for retry := range 5 {
		a := w.counting("a", retry)
		if retry > 0 && w.BeginHold(&a) {
			t.Errorf("return %d is held before its time", retry)
		}
		v := w.Admit(&a)
		at := time.Duration(w.clock.at.Load()) + v.Refusal.RetryAfter
		if v.Admitted || !v.Refusal.ShouldRetry || at <= last {
			t.Errorf("return %d: %+v, at %v after %v", retry, v, at, last)
		}
		last = at
		w.tick(time.Millisecond)
	}
	c := w.clients.lock(named("a"), 0)
	if n := c.use("l").slots.n(); n != 1 {
		t.Errorf("%d slots of one caller", n)
	}
	if n := c.account(w.pool(), fleet.ClassInteractive).slots.n(); n != 0 {
		t.Errorf("%d slots in a pool that has room", n)
	}
	c.mu.Unlock()
	w.end(first.ID)
	a := w.counting("a", 5) // early, and there is room
	if v := w.Admit(&a); !v.Admitted {
		t.Errorf("%+v", v)
	}
	c = w.clients.lock(named("a"), 0)
	defer c.mu.Unlock()
	if n := c.use("l").slots.n(); n != 0 {
		t.Errorf("%d slots after it entered", n)
	}
}

// TestHeldReturnsAreFirst: a return finds no place for a while after its time; the
// first that ends is its own for as long.
func TestHeldReturnsAreFirst(t *testing.T) {
	for _, limited := range []bool{false, true} {
		w, ids := tenRunning(limited)
		a := w.counting("a", 0)
		if limited {
			w.clock.advance(w.Admit(&a).Refusal.RetryAfter)
		} else {
			w.clock.advance(w.Refuse(&a, ReasonBusy).RetryAfter)
		}
		back := w.counting("a", 1)
		if !w.BeginHold(&back) {
			t.Fatal("it came in its time")
		}
		w.clock.advance(200 * time.Millisecond) // past what is kept for those who are late
		w.end(ids[0])
		other := w.counting("a", 0)
		other.Hold = true
		if v := w.Admit(&other); v.Admitted || limited != (v.Reason == ReasonConcurrency) || limited == (v.Reason == ReasonTurn) {
			t.Errorf("limited %v: a first try beside a held return: %+v", limited, v)
		}
		if v := w.Admit(&back); !v.Admitted {
			t.Errorf("limited %v: the return: %+v", limited, v)
		}
		w.EndHold(&back)
		w.end(ids[1])
		if v := w.Admit(&other); !v.Admitted {
			t.Errorf("limited %v: after it: %+v", limited, v)
		}
	}
}

// TestQueuesOfManyClientsAreNotLongerThanTheLine: a thousand clients with nothing in
// flight, whose shares are a fraction of a place.
func TestQueuesOfManyClientsAreNotLongerThanTheLine(t *testing.T) {
	w := paced(70)
	soon := 0
	for i := range 1000 {
		a := w.counting(fmt.Sprint("client", i), 0)
		if r := w.Refuse(&a, ReasonBusy); r.ShouldRetry {
			soon++
		}
	}
	if most := int(w.planned() * 1.1 * retryCap.Seconds()); soon > most {
		t.Errorf("%d of 1000 are told to come back within %v, in which %d can", soon, retryCap, most)
	}
}

// TestWhoHasRequestsInFlightNeedsNoLine: it is longer than anybody waits, but the
// client's own requests end in a second.
func TestWhoHasRequestsInFlightNeedsNoLine(t *testing.T) {
	w := paced(20)
	for range 5 {
		a := w.counting("a", 0)
		w.Admit(&a)
	}
	b := w.counting("b", 0)
	w.Admit(&b)
	w.tick(0)
	w.pool().tail.at.Store(int64(time.Minute))
	for client, want := range map[string]bool{"a": true, "newcomer": false} {
		ask := w.counting(client, 0)
		if r := w.Refuse(&ask, ReasonBusy); r.ShouldRetry != want {
			t.Errorf("%s: %+v", client, r)
		}
	}
}

// TestClientsAtTheirShareQueueForThemselves: they take no slots of the line, which are
// of those that have less.
func TestClientsAtTheirShareQueueForThemselves(t *testing.T) {
	w := paced(20)
	for range 20 {
		a := w.counting("hog", 0)
		w.Admit(&a)
	}
	b := w.counting("newcomer", 0)
	w.Refuse(&b, ReasonBusy)
	w.tick(0)
	tail := w.pool().tailOf(3).at.Load()
	for range 10 {
		a := w.counting("hog", 0)
		if r := w.Refuse(&a, ReasonBusy); !r.ShouldRetry || r.RetryAfter > 2*time.Second {
			t.Errorf("%+v; want it behind at most ten, of which one ends in 53 ms", r)
		}
	}
	if w.pool().tailOf(3).at.Load() != tail {
		t.Error("the line is longer by a client that has its share")
	}
	c := w.counting("third", 0)
	if w.Refuse(&c, ReasonBusy); w.pool().tailOf(3).at.Load() == tail {
		t.Error("a client with less than its share is not in the line")
	}
}

// TestHoldsThatNeverEndAreForgotten, with the slots that they are for.
func TestHoldsThatNeverEndAreForgotten(t *testing.T) {
	w := paced(10)
	for range 10 {
		a := w.counting("hog", 0)
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: a.At})
	}
	stray := w.counting("b", 1) // of whom nothing is known
	if !w.BeginHold(&stray) || w.pool().held.Load() != 0 {
		t.Fatalf("%d are held", w.pool().held.Load())
	}
	w.EndHold(&stray)
	a := w.counting("a", 0)
	w.tick(w.Refuse(&a, ReasonBusy).RetryAfter)
	back := w.counting("a", 1)
	if w.BeginHold(&back); w.pool().held.Load() != 1 {
		t.Fatalf("%d are held", w.pool().held.Load())
	}
	held := func() (n int32) {
		c := w.clients.lock(named("a"), 0)
		defer c.mu.Unlock()
		for i := range c.accounts {
			n += c.accounts[i].held[3]
		}
		return n
	}
	w.tick(abandoned / 2)
	if held() != 1 {
		t.Errorf("%d are held while the slot is outstanding", held())
	}
	w.tick(abandoned)
	w.tick(time.Millisecond)
	if held() != 0 {
		t.Errorf("%d are held after it has lapsed", held())
	}
	if w.EndHold(&back); w.pool().held.Load() != 0 {
		t.Errorf("%d are held after its late end", w.pool().held.Load())
	}
}

// TestWhoNeverReturnsDoesNotMakeTheLineDenser: a caller says of each of its requests
// that it is a first one, whatever it was told.
func TestWhoNeverReturnsDoesNotMakeTheLineDenser(t *testing.T) {
	w := paced(50)
	for range 50 {
		a := w.counting("liar", 0)
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: a.At})
	}
	b := w.counting("other", 0)
	w.Refuse(&b, ReasonBusy)
	w.tick(0)
	line := &w.pool().levels[3].line
	before := line.returning
	for range 600 {
		w.tick(50 * time.Millisecond)
		a := w.counting("liar", 0)
		w.Refuse(&a, ReasonBusy)
	}
	if line.returning < before-0.1 {
		t.Errorf("%.2f are taken to return, %.2f before", line.returning, before)
	}
}

// TestProgramsThatAskAgainThemselvesAreServed: their SDK tries each request once, and
// says so of each; they wait as told. An SDK that tries again may stand beside them.
func TestProgramsThatAskAgainThemselvesAreServed(t *testing.T) {
	for _, row := range []struct{ places, workers, sdks, limit int }{{1, 1, 0, 0}, {1, 4, 0, 0}, {2, 6, 0, 0}, {8, 12, 0, 0}, {100, 1, 0, 1}, {100, 4, 0, 1}, {100, 8, 0, 4}, {8, 12, 1, 0}, {100, 8, 1, 4}} {
		l := newLoop(t, row.places)
		l.blind, l.holds = true, true
		most := row.places
		if row.limit > 0 {
			most = row.limit
			l.world = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: row.limit}), float64(row.places), nil)
		}
		own := &caller{name: "key", open: row.workers, level: 3, waits: true, counts: true, zero: true, think: time.Millisecond}
		sdk := &caller{name: "key", open: row.sdks, level: 3, sdk: true, think: time.Millisecond}
		l.run([]*caller{own, sdk}, 20*time.Second, 80*time.Second)
		mean, _ := l.busy()
		mean *= float64(row.places) / float64(most)
		t.Logf("%+v: %d and %d served; busy %.2f", row, own.ended, sdk.ended, mean)
		if mean < 0.8 || own.ended < sdk.ended {
			t.Errorf("%+v: %d and %d served; busy %.2f", row, own.ended, sdk.ended, mean)
		}
	}
}

// TestHeldRequestsOfWhoHasItsShareKeepNobodyOut: newcomers find the places that they
// may not have.
func TestHeldRequestsOfWhoHasItsShareKeepNobodyOut(t *testing.T) {
	for _, below := range []bool{false, true} {
		w := paced(100)
		hog := 92
		if below {
			hog = 0
		}
		for i := range 92 {
			a := w.counting("hog", 0)
			if i >= hog {
				a = w.counting(fmt.Sprint("other", i), 0)
			}
			w.Admit(&a)
			w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: a.At})
		}
		for i := range 20 {
			b := w.counting(fmt.Sprint("newcomer", i), 0)
			w.Refuse(&b, ReasonBusy)
		}
		w.tick(0)
		a := w.counting("hog", 0)
		w.clock.advance(w.Refuse(&a, ReasonBusy).RetryAfter)
		for i := range 3 { // one slot, and three that say they have it
			back := w.counting("hog", 1)
			if !w.BeginHold(&back) && i == 0 {
				t.Fatal("it came in its time")
			}
		}
		want := int64(0)
		if below {
			want = 1
		}
		if n := w.pool().held.Load(); n != want {
			t.Errorf("below its share %v: %d count among those that are held; want %d", below, n, want)
		}
		entered := 0
		for i := range 8 {
			a := w.counting(fmt.Sprint("another", i), 0)
			if w.Admit(&a).Admitted {
				entered++
			}
		}
		if entered != 8-int(want) {
			t.Errorf("below its share %v: %d of 8 entered", below, entered)
		}
	}
}

// TestWhoSaysThatItReturnsMustHaveBeenTold, or it is a newcomer like others.
func TestWhoSaysThatItReturnsMustHaveBeenTold(t *testing.T) {
	w := paced(8)
	for i := range 7 {
		a := w.counting(fmt.Sprint("other", i), 0)
		w.Admit(&a)
	}
	a := w.counting("a", 0)
	w.clock.advance(w.Refuse(&a, ReasonBusy).RetryAfter)
	back := w.counting("a", 1)
	w.BeginHold(&back)
	for retry := range 2 {
		b := w.counting("b", retry)
		b.Hold = true
		if v := w.Admit(&b); v.Admitted {
			t.Errorf("a newcomer that says it tried %d times: %+v", retry, v)
		}
	}
	if v := w.Admit(&back); !v.Admitted {
		t.Errorf("who was told: %+v", v)
	}
}

// TestHoldsEndWhereTheyBegan, though the route's class or limit is another by then.
func TestHoldsEndWhereTheyBegan(t *testing.T) {
	limited := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1})
	w := newWorld(limited, 100, nil)
	first := w.counting("a", 0)
	w.Admit(&first)
	a := w.counting("a", 0)
	w.clock.advance(w.Admit(&a).Refusal.RetryAfter)
	back := w.counting("a", 1)
	if !w.BeginHold(&back) {
		t.Fatal("it came in its time")
	}
	held := func() (uses, accounts int32) {
		c := w.clients.lock(named("a"), 0)
		defer c.mu.Unlock()
		for i := range c.uses {
			uses += c.uses[i].held
		}
		for i := range c.accounts {
			accounts += c.accounts[i].held[3]
		}
		return uses, accounts
	}
	if uses, accounts := held(); uses != 1 || accounts != 0 {
		t.Fatalf("%d are held for the limit, %d for the pool", uses, accounts)
	}
	other := config()
	other.Routes[0].Class = fleet.ClassBatch
	w.Reconfigure(other)
	w.EndHold(&back)
	if uses, accounts := held(); uses != 0 || accounts != 0 {
		t.Errorf("%d are held for the limit, %d for the pool", uses, accounts)
	}
}

// TestFirstTriesUseSlotsUntilTheirClientIsSeenToReturn: it may ask again itself.
func TestFirstTriesUseSlotsUntilTheirClientIsSeenToReturn(t *testing.T) {
	for _, limited := range []bool{false, true} {
		w := newWorld(config(), 1, nil)
		if limited {
			w = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
		}
		first := w.ask("a")
		first.Counts = true
		w.Admit(&first)
		again := w.ask("a")
		again.Counts = true
		var told time.Duration
		if limited {
			told = w.Admit(&again).Refusal.RetryAfter
		} else {
			told = w.Refuse(&again, ReasonBusy).RetryAfter
		}
		w.end(first.ID)
		w.tick(told)
		again.At = w.clock.now()
		if v := w.Admit(&again); !v.Admitted {
			t.Errorf("limited %v: %+v", limited, v)
		}
		if _, waits := w.waiting("a"); waits != 0 {
			t.Errorf("limited %v: %d slots after it came", limited, waits)
		}
	}
}

// waiting counts a client's slots of its limit, and of the pool.
func (w *world) waiting(client string) (limit, pool int) {
	c := w.clients.lock(named(client), w.since(w.clock.now()))
	defer c.mu.Unlock()
	for i := range c.uses {
		limit += c.uses[i].slots.n()
	}
	for i := range c.accounts {
		pool += c.accounts[i].slots.n()
	}
	return limit, pool
}

// TestWhoFindsRoomSaysNothingOfTheLine: a caller that says it returns, and does not,
// would stretch all slots.
func TestWhoFindsRoomSaysNothingOfTheLine(t *testing.T) {
	w := paced(10)
	for range 5 {
		a := w.counting("a", 5)
		w.Admit(&a)
	}
	line := &w.pool().levels[3].line
	if n := line.others.Load(); n != 0 {
		t.Errorf("%d that were let in count as returns to the line", n)
	}
	a := w.counting("b", 5)
	w.Refuse(&a, ReasonBusy)
	if n := line.others.Load(); n != 1 {
		t.Errorf("%d returns from elsewhere were refused; want 1", n)
	}
}

// TestWhoComesEarlyIsKeptNoPlace, however often it was tried.
func TestWhoComesEarlyIsKeptNoPlace(t *testing.T) {
	w := paced(10)
	for retry := range 4 {
		a := w.counting("a", retry)
		w.Refuse(&a, ReasonBusy)
		w.tick(time.Millisecond)
	}
	c := w.clients.lock(named("a"), 0)
	defer c.mu.Unlock()
	for _, o := range c.accounts[0].slots.due {
		if o.firm {
			t.Errorf("%+v is firm", o)
		}
	}
}

// TestSlotsOfALimitOutlastItsRequests, and are told from the pool's.
func TestSlotsOfALimitOutlastItsRequests(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
	first := w.counting("a", 0)
	w.Admit(&first)
	a := w.counting("a", 0)
	w.Admit(&a)
	w.end(first.ID)
	w.tick(time.Millisecond)
	if limit, _ := w.waiting("a"); limit != 1 {
		t.Fatalf("%d slots of the limit", limit)
	}
	b := w.counting("a", 0) // refused by the pool, with an earlier slot
	b.Timeout = time.Minute
	told := w.Refuse(&b, ReasonBusy).RetryAfter
	c := w.clients.lock(named("a"), 0)
	c.uses[0].slots.due[0].at = w.since(w.clock.now()) + 10*told
	c.mu.Unlock()
	w.tick(told)
	back := w.counting("a", 1)
	w.Refuse(&back, ReasonBusy)
	if limit, pool := w.waiting("a"); limit != 1 || pool != 1 {
		t.Errorf("%d slots of the limit and %d of the pool after a return in the time of the pool's", limit, pool)
	}
}

// TestHeldRequestsThatTheirLimitKeepsOutKeepNobodyOut: one has a slot of the pool, and its
// client as many in flight as it may.
func TestHeldRequestsThatTheirLimitKeepsOutKeepNobodyOut(t *testing.T) {
	for _, full := range []bool{false, true} {
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
		a := w.counting("a", 0)
		w.clock.advance(w.Refuse(&a, ReasonBusy).RetryAfter)
		if full {
			running := w.counting("a", 0)
			w.Admit(&running)
		}
		back := w.counting("a", 1)
		want := int64(1)
		if full {
			want = 0
		}
		if !w.BeginHold(&back) || w.pool().held.Load() != want {
			t.Errorf("its limit reached %v: %d are held before newcomers; want %d", full, w.pool().held.Load(), want)
		}
		if w.EndHold(&back); w.pool().held.Load() != 0 {
			t.Errorf("%d are held after it", w.pool().held.Load())
		}
	}
}
