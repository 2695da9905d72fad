package admission

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// windows is a limiter of tokens in fixed windows from the clock's zero on.
type windows struct {
	*clock
	quota   Quota
	begun   time.Duration
	left    int64
	refuses int
}

func (w *windows) Reserve(_ LimitKey, _ Rates, cost fleet.Tokens, _ time.Time) Reservation {
	now := w.now().Sub(time.Unix(0, 0))
	if begin := now.Truncate(w.quota.Window); begin != w.begun || w.refuses < 0 {
		w.begun, w.left, w.refuses = begin, w.quota.Limit, 0
	}
	q := w.quota
	q.Reset = w.begun + q.Window - now
	if int64(cost) > w.left {
		w.refuses++
		q.Remaining = w.left
		return Reservation{Reason: ReasonTokens, Tokens: q}
	}
	w.left -= int64(cost)
	q.Remaining = w.left
	return Reservation{Admitted: true, Reason: ReasonAdmitted, Tokens: q}
}

func (w *windows) Settle(Ticket, fleet.Tokens) {}

// TestPromisesFitTheirWindows: whatever is promised, no window is promised more than it
// has, slots lie in their windows and in the order in which they were given.
func TestPromisesFitTheirWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p promises
		q := Quota{Limit: rapid.Int64Range(1, 2000).Draw(t, "limit"), Window: time.Duration(rapid.Int64Range(1, 3600).Draw(t, "window")) * time.Second}
		taken, last := map[time.Duration]int64{}, time.Duration(0)
		now := time.Duration(0)
		for range rapid.IntRange(1, 60).Draw(t, "refusals") {
			now += time.Duration(rapid.Int64Range(0, int64(q.Window)/3).Draw(t, "later"))
			begins := now.Truncate(q.Window) + q.Window
			opens := now + time.Duration(rapid.Int64Range(0, int64(3*q.Window)).Draw(t, "opens"))
			cost := rapid.Int64Range(0, q.Limit).Draw(t, "cost")
			skewed := begins + time.Duration(rapid.Int64Range(-int64(q.Window)/10, int64(q.Window)/10).Draw(t, "skew"))
			again := rapid.Bool().Draw(t, "again")
			if p.roll(skewed, q.Window, again) {
				if !again || p.last == 0 {
					t.Fatalf("early: %+v", p)
				}
				continue
			}
			slot := p.promise(opens, q, cost)
			if slot < opens || slot < p.window || slot >= max(opens+1, p.window+q.Window) || p.window < skewed-q.Window/5 {
				t.Fatalf("a slot at %v in the window at %v, open from %v, the next begins at %v", slot, p.window, opens, begins)
			}
			window := (p.window + q.Window/2).Truncate(q.Window)
			if taken[window] += max(1, cost); taken[window] > q.Limit {
				t.Fatalf("%d of %d promised in one window", taken[window], q.Limit)
			}
			if p.window < last-q.Window/4 {
				t.Fatalf("the window at %v after that at %v", p.window, last)
			}
			last = max(last, p.window)
		}
	})
}

// TestNoWindowIsPromisedMoreThanItHas, also by slots that are sooner than its pace; and
// nobody is told to come after its own time.
func TestNoWindowIsPromisedMoreThanItHas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(config(rated(0)), 100, nil)
		window := rapid.SampledFrom([]time.Duration{5 * time.Second, 20 * time.Second, time.Minute, 90 * time.Second}).Draw(t, "window")
		w.limiter = &windows{clock: w.clock, quota: Quota{Limit: 1000, Window: window}, refuses: -1}
		promised := map[time.Duration]fleet.Tokens{}
		for range 100 {
			w.clock.advance(time.Duration(rapid.Int64Range(0, int64(window)/20).Draw(t, "later")))
			a := w.ask("a")
			a.Input, a.Output = 0, fleet.Tokens(rapid.Int64Range(1, 400).Draw(t, "tokens"))
			a.Timeout = time.Duration(rapid.Int64Range(0, 60).Draw(t, "timeout")) * time.Second
			r := w.Admit(&a).Refusal
			if !r.ShouldRetry {
				continue
			}
			if a.Timeout > 0 && r.RetryAfter > a.Timeout {
				t.Fatalf("%v waits for %v, and is told %v", w.clock.now(), a.Timeout, r.RetryAfter)
			}
			begin := (w.clock.now().Sub(time.Unix(0, 0)) + r.RetryAfter).Truncate(window)
			if promised[begin] += a.Output; promised[begin] > 1000 {
				t.Fatalf("%d of 1000 are promised in the window at %v", promised[begin], begin)
			}
		}
	})
}

// TestWhatIsPromisedFits: who is told to come after another finds its tokens there.
func TestWhatIsPromisedFits(t *testing.T) {
	w := newWorld(config(rated(0)), 100, nil)
	limiter := &windows{clock: w.clock, quota: Quota{Limit: 1000, Window: 20 * time.Second}, refuses: -1}
	w.limiter = limiter
	admit := func(tokens fleet.Tokens) Verdict {
		a := w.ask("a")
		a.Input, a.Output = 0, tokens
		return w.Admit(&a)
	}
	if v := admit(1000); !v.Admitted {
		t.Fatalf("%+v", v)
	}
	w.clock.advance(5 * time.Second)
	type promise struct {
		tokens fleet.Tokens
		wait   time.Duration
	}
	var told []promise
	for _, tokens := range []fleet.Tokens{700, 200, 300, 400} {
		if r := admit(tokens).Refusal; r.ShouldRetry {
			told = append(told, promise{tokens, r.RetryAfter})
		}
	}
	if len(told) < 3 {
		t.Fatalf("%+v", told)
	}
	passed := time.Duration(0)
	for _, p := range told {
		w.clock.advance(p.wait - passed)
		passed = p.wait
		if v := admit(p.tokens); !v.Admitted {
			t.Errorf("%d tokens were told %v, and then %+v", p.tokens, p.wait, v)
		}
	}
}

// TestAWorkerThatAsksAllTheTimeLeavesItsSiblingsTheirSlots in the windows to come.
func TestAWorkerThatAsksAllTheTimeLeavesItsSiblingsTheirSlots(t *testing.T) {
	w := newWorld(config(rated(0)), 100, nil)
	w.limiter = &windows{clock: w.clock, quota: Quota{Limit: 60, Window: time.Minute}, refuses: -1}
	var hopeless, told, admitted int
	for tick := range 10 * 600 {
		a := w.ask("a")
		a.Input, a.Output, a.Retry = 0, 1, 1
		w.Admit(&a)
		if tick%50 == 0 {
			a := w.ask("a")
			a.Input, a.Output = 0, 1
			switch v := w.Admit(&a); {
			case v.Admitted:
				admitted++
			case v.Refusal.ShouldRetry:
				told++
			default:
				hopeless++
			}
		}
		w.clock.advance(100 * time.Millisecond)
	}
	t.Logf("of its sibling's requests %d were admitted at once, %d told to come, %d told not to", admitted, told, hopeless)
	if hopeless > (admitted+told+hopeless)/4 {
		t.Errorf("of its sibling's requests %d were admitted at once, %d told to come, %d told not to", admitted, told, hopeless)
	}
}
