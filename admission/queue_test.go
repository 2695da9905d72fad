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

// counting is a request of an SDK that tells how often it tried.
func (w *world) counting(client string, retry int) Ask {
	a := w.ask(client)
	a.Counts, a.Retry = true, retry
	return a
}

// TestFirstTriesLeaveThePlaceToWhoWasToldToCome, in a pool of ten and at a limit of
// ten, unless those that were told do not keep to it.
func TestFirstTriesLeaveThePlaceToWhoWasToldToCome(t *testing.T) {
	for _, limited := range []bool{false, true} {
		for _, hammers := range []bool{false, true} {
			cfg, places := config(), 10.0
			if limited {
				cfg, places = config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 10}), 100
			}
			w := newWorld(cfg, places, nil)
			l := &w.pool().levels[3]
			l.events, l.exposure = 1e6, 1e6 // a second each
			w.tick(0)
			var ids []string
			for range 10 {
				a := w.counting("a", 0)
				w.Admit(&a)
				ids = append(ids, a.ID)
			}
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
			if second := refuse(0).RetryAfter; second < told+80*time.Millisecond || second > told+130*time.Millisecond {
				t.Errorf("told %v, and the next %v; one ends each tenth of a second", told, second)
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
			if hammers != v.Admitted || !hammers && (v.Reason != ReasonTurn || !v.Refusal.ShouldRetry) {
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
		cfg, places := config(), 10.0
		if limited {
			cfg, places = config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 10}), 100
		}
		w := newWorld(cfg, places, nil)
		l := &w.pool().levels[3]
		l.events, l.exposure = 1e6, 1e6
		w.tick(0)
		var ids []string
		for range 10 {
			a := w.counting("a", 0)
			w.Admit(&a)
			ids = append(ids, a.ID)
		}
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
		if v := w.Admit(&other); v.Admitted || v.Reason != ReasonTurn {
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
	w.pool().levels[3].line.tail.Store(int64(time.Minute))
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
	line := &w.pool().levels[3].line
	tail := line.tail.Load()
	for range 10 {
		a := w.counting("hog", 0)
		if r := w.Refuse(&a, ReasonBusy); !r.ShouldRetry || r.RetryAfter > 2*time.Second {
			t.Errorf("%+v; want it behind at most ten, of which one ends in 53 ms", r)
		}
	}
	if line.tail.Load() != tail {
		t.Error("the line is longer by a client that has its share")
	}
	c := w.counting("third", 0)
	if w.Refuse(&c, ReasonBusy); line.tail.Load() == tail {
		t.Error("a client with less than its share is not in the line")
	}
}

// TestHoldsThatNeverEndAreForgotten, with the slots that they are for.
func TestHoldsThatNeverEndAreForgotten(t *testing.T) {
	w := paced(10)
	for range 10 {
		a := w.counting("a", 0)
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
