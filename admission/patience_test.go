package admission

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// told are what refused requests of one kind are told, each of another seed.
type told struct {
	again       bool // those that are told to come back, else those that are told not to
	n           int
	first, last time.Duration
	different   map[time.Duration]bool
}

func (s *told) add(r Refusal) {
	if r.ShouldRetry != s.again {
		return
	}
	if s.n == 0 {
		s.first, s.different = r.RetryAfter, map[time.Duration]bool{}
	}
	s.n++
	s.first, s.last = min(s.first, r.RetryAfter), max(s.last, r.RetryAfter)
	s.different[r.RetryAfter] = true
}

// TestARateLimitTellsNobodyToComeAfterItsTime: who waits long enough for the next window,
// or for a limiter that was late, is spread over what is left of its time, and no more;
// who doesn't is told not to come, at a time of its own all the same.
func TestARateLimitTellsNobodyToComeAfterItsTime(t *testing.T) {
	requests := Quota{Limit: 2, Window: time.Minute, Reset: 4 * time.Second} // slots 30 s apart
	tokens := Quota{Limit: 600, Window: time.Minute, Reset: 4 * time.Second} // of 300 each
	const spreadOver = 6 * time.Second                                       // a tenth of the window
	for _, row := range []struct {
		name        string
		answer      Reservation
		timeout     time.Duration
		again       bool
		first, last time.Duration
	}{
		{"requests, no time told", Reservation{Reason: ReasonRequests, Requests: requests}, 0, true, 4 * time.Second, 4*time.Second + spreadOver},
		{"requests, in time", Reservation{Reason: ReasonRequests, Requests: requests}, 5 * time.Second, true, 4 * time.Second, 5 * time.Second},
		{"requests, just in time", Reservation{Reason: ReasonRequests, Requests: requests}, 4 * time.Second, true, 4 * time.Second, 4 * time.Second},
		{"requests, too late", Reservation{Reason: ReasonRequests, Requests: requests}, 3 * time.Second, false, 4 * time.Second, 4*time.Second + spreadOver},
		{"tokens, in time", Reservation{Reason: ReasonTokens, Tokens: tokens}, 5 * time.Second, true, 4 * time.Second, 5 * time.Second},
		{"no limiter, no time told", Reservation{Reason: ReasonLimiterDown}, 0, true, time.Second, 2 * time.Second},
		{"no limiter, in time", Reservation{Reason: ReasonLimiterDown}, 1500 * time.Millisecond, true, time.Second, 1500 * time.Millisecond},
		{"no limiter, too late", Reservation{Reason: ReasonLimiterDown}, 500 * time.Millisecond, false, time.Second, 2 * time.Second},
		{"requests of a part, no time told", Reservation{Reason: ReasonRequests, Requests: requests, Transient: true}, 0, true, time.Second, 2 * time.Second},
		{"requests of a part, in time", Reservation{Reason: ReasonRequests, Requests: requests, Transient: true}, 1500 * time.Millisecond, true, time.Second, 1500 * time.Millisecond},
		{"requests of a part, too late", Reservation{Reason: ReasonRequests, Requests: requests, Transient: true}, 500 * time.Millisecond, false, time.Second, 2 * time.Second},
		{"tokens of a part, in an hour", Reservation{Reason: ReasonTokens, Tokens: Quota{Limit: 600, Window: time.Hour, Reset: 59 * time.Minute}, Transient: true}, 0, true, time.Second, 2 * time.Second},
	} {
		got := told{again: row.again}
		for seed := range uint64(200) {
			w := newWorld(config(rated(2)), 100, &scripted{answer: row.answer})
			w.clock.advance(10 * time.Minute) // no slot was given in the window before
			a := w.ask("a")
			a.Timeout, a.Seed = row.timeout, seed
			got.add(w.Admit(&a).Refusal)
		}
		if got.n != 200 || got.first < row.first || got.last > row.last {
			t.Errorf("%s: %d are told to come again: %v, from %v to %v; want 200, %v to %v", row.name, got.n, got.again, got.first, got.last, row.first, row.last)
		}
		if over := row.last - row.first; over > 0 && (got.last-got.first < over*9/10 || len(got.different) < 150) {
			t.Errorf("%s: 200 are told %d times from %v to %v; want them spread over %v", row.name, len(got.different), got.first, got.last, over)
		}
	}
}

// TestAPlaceIsNotPromisedAfterTheCallersTime: a slot that is just in time has less jitter
// than others, in the line and in the queue of a client that is alone.
func TestAPlaceIsNotPromisedAfterTheCallersTime(t *testing.T) {
	const timeout = 3 * time.Second
	for _, alone := range []bool{false, true} {
		got, patient := told{again: true}, told{again: true}
		for seed := range uint64(300) {
			w := paced(2)
			for i := range seed % 12 {
				other := w.ask(fmt.Sprint(i))
				if alone {
					other = w.ask("a")
				}
				w.Refuse(&other, ReasonBusy)
			}
			a := w.ask("a")
			a.Seed = seed
			if a.Timeout = timeout; seed%2 == 0 {
				a.Timeout = timeout + time.Second
				patient.add(w.Refuse(&a, ReasonBusy))
			} else {
				got.add(w.Refuse(&a, ReasonBusy))
			}
		}
		if got.n < 30 || got.last > timeout || patient.last <= timeout {
			t.Errorf("alone %v: %d who wait %v are told up to %v, those who wait a second more %v", alone, got.n, timeout, got.last, patient.last)
		}
	}
}

// TestASlotsJitterEndsWithTheCallersTime, which runs from when the request came, also
// where there are slots only from later on, and with no more than its pace or a quarter of
// the wait.
func TestASlotsJitterEndsWithTheCallersTime(t *testing.T) {
	const asked, at = time.Minute, time.Minute + 4*time.Second
	for _, row := range []struct {
		name           string
		now, patience  time.Duration
		spacing, until time.Duration
	}{
		{"its pace", asked, time.Minute, 500 * time.Millisecond, at + 500*time.Millisecond},
		{"a quarter of the wait", asked, time.Minute, 10 * time.Second, at + time.Second},
		{"its time", asked, 4*time.Second + 300*time.Millisecond, 10 * time.Second, at + 300*time.Millisecond},
		{"its time, of slots from later on", asked + 3*time.Second, time.Second + 300*time.Millisecond, 10 * time.Second, at + 300*time.Millisecond},
		{"none left", asked, 4 * time.Second, 10 * time.Second, at},
	} {
		first, last := time.Hour, time.Duration(0)
		for seed := range uint64(200) {
			s := &slots{}
			slot := s.keep(&turn{asked: asked, now: row.now, patience: row.patience, level: fleet.BurstLevel(3), seed: seed}, at, false, row.spacing)
			first, last = min(first, slot), max(last, slot)
			if s.first() != slot || s.last != at {
				t.Fatalf("%s: told %v, and kept %v and %v", row.name, slot, s.first(), s.last)
			}
		}
		if over := row.until - at; first < at || last > row.until || last-first < over*9/10 {
			t.Errorf("%s: slots from %v to %v; want them spread from %v to %v", row.name, first, last, at, row.until)
		}
	}
}

// TestTheFirstRefusedReturnsAsTheWindowBegins, also in the first minutes of the process; the
// others behind it, at the limit's pace.
func TestTheFirstRefusedReturnsAsTheWindowBegins(t *testing.T) {
	for _, age := range []time.Duration{0, time.Second, 10 * time.Minute} {
		quota := Quota{Limit: 2, Window: time.Minute, Reset: 4 * time.Second}
		w := newWorld(config(rated(2)), 100, &scripted{answer: Reservation{Reason: ReasonRequests, Requests: quota}})
		for _, later := range []time.Duration{age, 10 * time.Minute} { // long after the last slot too
			w.clock.advance(later)
			for i, from := range []time.Duration{4 * time.Second, 34 * time.Second} {
				a := w.ask("a")
				if r := w.Admit(&a).Refusal; !r.ShouldRetry || r.RetryAfter < from || r.RetryAfter > from+6*time.Second {
					t.Errorf("%v after the start, then %v, refused request %d: %+v; want it told %v and up to 6 s", age, later, i+1, r, from)
				}
			}
		}
	}
}
