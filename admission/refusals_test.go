package admission

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// behind is a world where a client has as many requests in flight as it may, which end in
// a second each.
func behind(t *testing.T, limit int) *world {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: limit}), 100, nil)
	l := &w.pool().levels[3]
	l.events, l.exposure = 1e6, 1e6
	w.tick(0)
	for range limit {
		a := w.counting("a", 0)
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("%+v", v)
		}
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: a.At})
	}
	return w
}

// TestWhoIsPastTheCapIsSpread over what is left of the minute that anybody waits, after
// everybody who has a slot of the pool. Slots behind a limit are up to the whole minute
// away: who has none there is told the minute.
func TestWhoIsPastTheCapIsSpread(t *testing.T) {
	for _, limited := range []bool{false, true} {
		for _, opens := range []time.Duration{0, 50 * time.Second} {
			w := behind(t, 2)
			if !limited {
				w = paced(4)
			}
			w.pool().reopens.Store(int64(w.since(w.clock.now()) + opens))
			told := map[time.Duration]int{}
			last, first, most, hopeless := time.Duration(0), time.Duration(math.MaxInt64), time.Duration(0), 0
			for i := range 1000 {
				a := w.counting("a", 0)
				var r Refusal
				if limited {
					r = w.Admit(&a).Refusal
				} else {
					a = w.counting(fmt.Sprint(i), 0)
					r = w.Refuse(&a, ReasonBusy)
				}
				if r.ShouldRetry {
					last = max(last, r.RetryAfter)
					continue
				}
				hopeless++
				told[r.RetryAfter]++
				first, most = min(first, r.RetryAfter), max(most, r.RetryAfter)
			}
			from, different := max(retryCap, opens), hopeless*85/100
			if limited {
				from, different = retryMax, 1
			}
			if hopeless < 500 || len(told) < different || first < from || first > from+time.Second || most > retryMax || most < retryMax-time.Second {
				t.Errorf("limited %v, open in %v: %d of 1000 have no slot, and are told %d times from %v to %v; want %v to %v", limited, opens, hopeless, len(told), first, most, from, retryMax)
			}
			if opens == 0 && last > first+time.Second {
				t.Errorf("limited %v: one with a slot is told %v, one without %v", limited, last, first)
			}
		}
	}
}

// TestWhoCannotWaitForItsSlotIsSpread: all of them would have had the same slot, which is
// given to none, behind their limit and by the pool.
func TestWhoCannotWaitForItsSlotIsSpread(t *testing.T) {
	for _, limited := range []bool{false, true} {
		w := behind(t, 2)
		if !limited {
			w = paced(4)
			for range 4 {
				a := w.counting("a", 0)
				w.Admit(&a)
			}
		}
		for range 8 {
			w.turnAway("a", limited)
		}
		told, first, most := map[time.Duration]bool{}, time.Duration(math.MaxInt64), time.Duration(0)
		for range 100 {
			a := w.counting("a", 0)
			a.Timeout = time.Second
			var r Refusal
			if limited {
				r = w.Admit(&a).Refusal
			} else {
				r = w.Refuse(&a, ReasonBusy)
			}
			if r.ShouldRetry {
				t.Fatalf("limited %v: %+v", limited, r)
			}
			told[r.RetryAfter] = true
			first, most = min(first, r.RetryAfter), max(most, r.RetryAfter)
		}
		if len(told) < 60 || first < time.Second || most > 5*first/4 {
			t.Errorf("limited %v: 100 that can't wait are told %d times from %v to %v", limited, len(told), first, most)
		}
	}
}

// TestWhoComesTooEarlyTooOftenHasNoSlotBehindItsLimit: each time it is told later, until
// that is more than anybody waits, and not sooner instead.
func TestWhoComesTooEarlyTooOftenHasNoSlotBehindItsLimit(t *testing.T) {
	w := behind(t, 1)
	r := w.turnAway("a", true)
	for retry := 1; r.ShouldRetry; retry++ {
		if retry > 100 {
			t.Fatalf("told %v after %d returns", r.RetryAfter, retry)
		}
		w.clock.advance(time.Millisecond)
		a := w.counting("a", retry)
		r = w.Admit(&a).Refusal
	}
	if r.RetryAfter < retryMax {
		t.Errorf("told %v; want it no sooner than anybody with a slot", r.RetryAfter)
	}
	if n, _ := w.waiting("a"); n != 1 {
		t.Errorf("%d slots of one caller", n)
	}
}

// TestWhoIsEarlyForOneIsNotForTheOther: where it comes before its slot of its limit, and
// the pool has no room for it, or the other way about.
func TestWhoIsEarlyForOneIsNotForTheOther(t *testing.T) {
	for _, limited := range []bool{false, true} { // what refuses it
		var told [2]time.Duration
		for i, early := range []bool{false, true} {
			w := behind(t, 2)
			for range 2 {
				b := w.counting("b", 0)
				w.Admit(&b)
			}
			w.tick(0)
			if early {
				w.turnAway("a", !limited)
			}
			w.ids = 1000 // the same jitter
			a := w.counting("a", 1)
			if limited {
				told[i] = w.Admit(&a).Refusal.RetryAfter
			} else {
				told[i] = w.Refuse(&a, ReasonBusy).RetryAfter
			}
		}
		if told[0] != told[1] {
			t.Errorf("limited %v: told %v where it is early for the other, %v where not", limited, told[1], told[0])
		}
	}
}
