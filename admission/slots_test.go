package admission

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"pgregory.net/rapid"
)

// busiest is the most returns in any span of a length.
func busiest(returns []time.Duration, span time.Duration) int {
	slices.Sort(returns)
	most, from := 0, 0
	for i := range returns {
		for returns[i]-returns[from] >= span {
			from++
		}
		most = max(most, i-from+1)
	}
	return most
}

// paced is a world whose pool ends a number of requests per second.
func paced(perSecond float64) *world {
	w := newWorld(config(), perSecond, nil)
	l := &w.settings.Load().pools["p"].levels[3]
	l.events, l.exposure = 1e6, 1e6 // a second each
	w.tick(0)
	return w
}

// planned is the rate per second at which refused clients are to return.
func (w *world) planned() float64 {
	spacing := w.settings.Load().pools["p"].levels[3].line.spacing.Load()
	return float64(time.Second) / float64(spacing)
}

// TestRefusedClientsReturnAtThePlannedRate refuses 1,000 requests in one tick, of
// one client, of many, or of some with many each.
func TestRefusedClientsReturnAtThePlannedRate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := paced(rapid.Float64Range(70, 3000).Draw(t, "ends per second"))
		clients := rapid.SampledFrom([]int{1, 2, 30, 1000}).Draw(t, "clients")
		seed := rapid.Uint64().Draw(t, "seed")
		var returns []time.Duration
		for _, n := range rand.New(rand.NewPCG(seed, 0)).Perm(1000) {
			a := w.ask(fmt.Sprint("client", n%clients))
			a.Seed = seed + uint64(n)
			r := w.Refuse(&a, ReasonBusy)
			if r.RetryAfter < time.Millisecond || r.RetryAfter > retryMax || r.RetryAfter%time.Millisecond != 0 {
				t.Fatalf("told to wait %v; want whole milliseconds, 1 ms … 60 s", r.RetryAfter)
			}
			if r.ShouldRetry {
				returns = append(returns, r.RetryAfter)
			}
		}
		window := 200 * time.Millisecond
		plan := w.planned() * window.Seconds()
		if clients == 1 { // alone, all places that it leaves are its own
			plan *= soloShare / freeShare
		}
		most := 1.5 * plan
		if clients < 1000 {
			// Clients' own slots know nothing of each other, so that their number in a
			// window varies as Poisson's does.
			most = max(most, 1.25*plan+3*math.Sqrt(plan)+2)
		}
		if got := busiest(returns, window); float64(got) > most {
			t.Fatalf("%d of %d return in one %v; planned are %.1f", got, len(returns), window, plan)
		}
		if len(returns) < min(1000, int(w.planned())) {
			t.Fatalf("only %d have a slot; want at least a second's worth of %.0f/s", len(returns), w.planned())
		}
	})
}

// TestHammeringClientDelaysOthersByAFewSlotsOnly compares the waits of honest
// clients beside one that asks a thousand times a second with their waits
// without it.
func TestHammeringClientDelaysOthersByAFewSlotsOnly(t *testing.T) {
	waits := func(hammers, retry int) (mean, worst time.Duration) {
		w := paced(200)
		sum, n := time.Duration(0), 0
		for ms := range 2000 {
			w.tick(time.Millisecond)
			for range hammers {
				a := w.ask("hammer")
				a.Retry = retry
				w.Refuse(&a, ReasonBusy)
			}
			if ms%50 == 0 {
				a := w.ask(fmt.Sprint("honest", ms))
				r := w.Refuse(&a, ReasonBusy)
				sum, n, worst = sum+r.RetryAfter, n+1, max(worst, r.RetryAfter)
			}
		}
		return sum / time.Duration(n), worst
	}
	alone, _ := waits(0, 0)
	for _, retry := range []int{0, 1} {
		beside, worst := waits(1, retry)
		t.Logf("retry count %d: honest clients wait %v on average (worst %v) instead of %v", retry, beside, worst, alone)
		if worst > alone+500*time.Millisecond+10*time.Second/60 {
			t.Errorf("retry count %d: an honest client waits %v; want %v and half a second and ten slots at most", retry, worst, alone)
		}
	}
}

func TestClientThatReturnsTooEarlyWaitsLongerEachTime(t *testing.T) {
	w := paced(200)
	a := w.ask("impatient")
	slot := time.Duration(w.clock.at.Load()) + w.Refuse(&a, ReasonBusy).RetryAfter
	for i := 1; i < 10; i++ {
		w.clock.advance(5 * time.Millisecond)
		a := w.ask("impatient")
		a.Retry = i
		r := w.Refuse(&a, ReasonBusy)
		next := time.Duration(w.clock.at.Load()) + r.RetryAfter
		if next <= slot {
			t.Fatalf("return %d gets %v; want later than %v", i, next, slot)
		}
		slot = next
	}
	b := w.ask("patient")
	if r := w.Refuse(&b, ReasonBusy); r.RetryAfter > 150*time.Millisecond {
		t.Errorf("another client waits %v; want about two slots", r.RetryAfter)
	}
}

func TestSlotPastTheCallersTimeIsNotGiven(t *testing.T) {
	w := paced(4) // a slot each 0.83 s
	for i, row := range []struct {
		timeout time.Duration
		retry   bool
	}{{0, true}, {500 * time.Millisecond, false}, {0, true}, {2 * time.Second, false}, {10 * time.Second, true}} {
		a := w.ask(fmt.Sprint(i))
		a.Timeout = row.timeout
		r := w.Refuse(&a, ReasonBusy)
		if r.ShouldRetry != row.retry {
			t.Errorf("request %d with a timeout of %v: %+v", i, row.timeout, r)
		}
		if row.timeout > 0 && !row.retry && r.RetryAfter <= row.timeout {
			t.Errorf("request %d is told %v and not to retry within %v", i, r.RetryAfter, row.timeout)
		}
	}
}

func TestSlotsPastTheCapAreNotGivenAndNotAllTheSame(t *testing.T) {
	w := paced(4)
	told := map[time.Duration]int{}
	for i := range 200 {
		a := w.ask(fmt.Sprint(i))
		r := w.Refuse(&a, ReasonBusy)
		if r.ShouldRetry && r.RetryAfter > retryCap+time.Second || !r.ShouldRetry && r.RetryAfter < retryCap {
			t.Fatalf("request %d: %+v; want ShouldRetry up to %v", i, r, retryCap)
		}
		if !r.ShouldRetry {
			told[r.RetryAfter]++
		}
	}
	if len(told) < 150 {
		t.Errorf("%d different waits past the cap; want them spread", len(told))
	}
}

// TestLineLearnsHowManyReturn lets half of the refused clients stay away.
func TestLineLearnsHowManyReturn(t *testing.T) {
	w := paced(200)
	type back struct {
		at     time.Duration
		client string
	}
	var due []back
	for tick := range 1200 {
		w.tick(50 * time.Millisecond)
		now := time.Duration(w.clock.at.Load())
		a := w.ask(fmt.Sprint("client", tick))
		if r := w.Refuse(&a, ReasonBusy); r.ShouldRetry && tick%2 == 0 {
			due = append(due, back{now + r.RetryAfter, fmt.Sprint("client", tick)})
		}
		due = slices.DeleteFunc(due, func(b back) bool {
			if b.at > now {
				return false
			}
			a := w.ask(b.client)
			a.Retry = 1
			if v := w.Admit(&a); !v.Admitted {
				t.Fatalf("a client that came when it was told: %+v", v)
			}
			w.end(a.ID)
			return true
		})
	}
	if got := w.settings.Load().pools["p"].levels[3].line.returning; got < 0.4 || got > 0.6 {
		t.Errorf("%.2f are taken to return; want about 0.5", got)
	}
}

func TestSlotsKeepTheirNumberBeyondWhatIsKeptExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s slots
		p := newPool("p", 1)
		var all []time.Duration // the oracle
		exact := true
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			if rapid.IntRange(0, 2).Draw(t, "add") > 0 {
				n := slot{time.Duration(rapid.IntRange(1, 1000).Draw(t, "slot")), rapid.Bool().Draw(t, "shared"), fleet.BurstLevel(rapid.IntRange(0, 7).Draw(t, "level"))}
				s.add(n)
				all = append(all, n.at)
				slices.Sort(all)
			} else if len(all) > 0 {
				s.use()
				all = all[1:]
			}
			exact = exact && len(all) <= keptSlots
			if s.shared < 0 || s.shared > s.n() || s.laterShared < 0 || s.laterShared > s.later {
				t.Fatalf("%d of %d shared, %d of %d later", s.shared, s.n(), s.laterShared, s.later)
			}
			byLevel := int32(0)
			for i, n := range s.of {
				if s.laterOf[i] < 0 || n < s.laterOf[i] {
					t.Fatalf("level %d: %d slots, %d later", i, n, s.laterOf[i])
				}
				byLevel += n
			}
			if int(byLevel) != len(all) {
				t.Fatalf("%d slots by level; want %d", byLevel, len(all))
			}
			if s.n() != len(all) || len(s.due) > keptSlots || len(s.due) == 0 && len(all) > 0 {
				t.Fatalf("%d slots, %d by time; want %d, at most %d by time", s.n(), len(s.due), len(all), keptSlots)
			}
			if exact && len(all) > 0 && s.first() != all[0] {
				t.Fatalf("the first is at %d; want %d", s.first(), all[0])
			}
		}
		if len(all) > 0 {
			s.expire(s.last+abandoned+1, p)
			gone := int64(0)
			for i := range p.levels {
				gone += p.levels[i].line.gone.Load()
			}
			if s.n() != 0 || s.shared != 0 || gone != int64(len(all)) {
				t.Fatalf("%d slots left, %d gone; want all %d gone", s.n(), gone, len(all))
			}
		}
	})
}
