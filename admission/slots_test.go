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
	for i := range w.pool().levels {
		l := &w.pool().levels[i]
		l.events, l.exposure = 1e6, 1e6 // a second each
	}
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
		counts, levels := rapid.Bool().Draw(t, "counts"), rapid.IntRange(1, 8).Draw(t, "levels")
		seed := rapid.Uint64().Draw(t, "seed")
		var returns []time.Duration
		for _, n := range rand.New(rand.NewPCG(seed, 0)).Perm(1000) {
			a := w.ask(fmt.Sprint("client", n%clients))
			if counts {
				a = w.counting(fmt.Sprint("client", n%clients), 0)
			}
			a.Seed, a.Level = seed+uint64(n), fleet.BurstLevel(n%levels)
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
		if clients < 1000 { // each has its own queue
			plan *= queueShare / mostFree
		}
		most := 1.5 * plan
		if clients < 1000 {
			// Clients' own slots know nothing of each other, so that their number in a
			// window varies as Poisson's does, of which the most of some hundred is taken.
			most = max(most, 1.25*plan+6*math.Sqrt(plan)+2)
			first := 0
			for _, at := range returns {
				if at <= time.Second {
					first++
				}
			}
			if second := 5 * plan; float64(first) > 1.1*second+4*math.Sqrt(second) {
				t.Fatalf("%d return within a second, in which %.0f are planned to", first, second)
			}
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

// TestClientThatReturnsTooEarlyWaitsLongerEachTime: each return moves its slot back by
// one pace more than the last one did, of which jitter takes less than one.
func TestClientThatReturnsTooEarlyWaitsLongerEachTime(t *testing.T) {
	w := paced(200)
	pace := ownPace * float64(w.settings.Load().pools["p"].levels[3].line.solo.Load())
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
		// The returns before it are hardly forgiven yet, in 40 ms of earlyOver.
		if least := time.Duration((float64(i) - 0.1) * pace); next-slot < least {
			t.Errorf("return %d moves its slot back by %v; want %v at least", i, next-slot, least)
		}
		slot = next
	}
	b := w.ask("patient")
	if r := w.Refuse(&b, ReasonBusy); r.RetryAfter > 150*time.Millisecond {
		t.Errorf("another client waits %v; want about two slots", r.RetryAfter)
	}
}

func TestSlotPastTheCallersTimeIsNotGiven(t *testing.T) {
	w := paced(2) // a slot each 0.83 s
	for i, row := range []struct {
		timeout time.Duration
		retry   bool
	}{{0, true}, {500 * time.Millisecond, false}, {0, true}, {1500 * time.Millisecond, false}, {10 * time.Second, true}} {
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
	w := paced(2)
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
		var all []slot // the oracle, in order
		var of [fleet.BurstLevels]int32
		take := func(i int) {
			of[all[i].level]--
			all = slices.Delete(all, i, i+1)
		}
		level := func() fleet.BurstLevel { return fleet.BurstLevel(rapid.IntRange(0, 7).Draw(t, "level")) }
		exact := true
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			switch what := rapid.IntRange(0, 3).Draw(t, "what"); {
			case what > 1:
				n := slot{at: time.Duration(rapid.IntRange(1, 1000).Draw(t, "slot")), shared: rapid.Bool().Draw(t, "shared"), level: level()}
				for range rapid.IntRange(1, 20).Draw(t, "of them") {
					s.add(n)
					at, _ := slices.BinarySearchFunc(all, n.at, func(o slot, at time.Duration) int { return int(o.at - at) })
					all = slices.Insert(all, at, n)
					of[n.level]++
				}
			case what == 1 && len(all) > 0:
				first := s.due[0].level
				s.use()
				if exact {
					take(0)
				} else {
					of[first]--
					all = all[1:]
				}
			case what == 0:
				l := level()
				had := of[l] > 0
				s.drop(l)
				if !had {
					break
				}
				last := len(all) - 1
				for exact && all[last].level != l {
					last--
				}
				if exact {
					take(last)
				} else {
					of[l]--
					all = all[:last]
				}
			}
			exact = exact && len(all) <= keptSlots
			if s.of != of {
				t.Fatalf("by level %v; want %v", s.of, of)
			}
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
			if exact && len(all) > 0 && s.first() != all[0].at {
				t.Fatalf("the first is at %d; want %d", s.first(), all[0].at)
			}
		}
		if len(all) > 0 {
			inLine := s.shared
			s.lapse(s.last+abandoned+1, func(of fleet.BurstLevel, line bool) {
				if line {
					p.levels[of].line.gone.Add(1)
				}
			})
			gone := int64(0)
			for i := range p.levels {
				gone += p.levels[i].line.gone.Load()
			}
			if s.n() != 0 || s.shared != 0 || gone != int64(inLine) {
				t.Fatalf("%d slots left, %d of the line gone; want all %d gone", s.n(), gone, inLine)
			}
		}
	})
}

// TestPlacesAreKeptForWhoIsToldToCome has a client at its share ask for a place
// while others are about to come for theirs, come, or stay away.
func TestPlacesAreKeptForWhoIsToldToCome(t *testing.T) {
	for _, come := range []bool{true, false} {
		w := paced(20) // a slot each 167 ms
		var hog []string
		ask := func(name string) Verdict {
			a := w.ask(name)
			v := w.Admit(&a)
			if v.Admitted && name == "hog" {
				hog = append(hog, a.ID)
			}
			return v
		}
		for range 20 {
			ask("hog")
		}
		var told []time.Duration
		for i := range 6 {
			a := w.ask(fmt.Sprint(i))
			told = append(told, w.Refuse(&a, ReasonBusy).RetryAfter)
		}
		w.tick(50 * time.Millisecond)
		for _, id := range hog[:5] {
			w.end(id)
		}
		w.tick(0)
		if v := ask("hog"); !v.Admitted {
			t.Fatalf("%+v with 15 of 20 in flight and nobody about to come; want the hog to enter", v)
		}
		w.tick(told[1] - 50*time.Millisecond)
		if v := ask("hog"); v.Admitted || v.Reason != ReasonShare {
			t.Fatalf("%+v with 16 of 20 in flight and two about to come; want its share refused", v)
		}
		if come {
			for i := range 2 {
				if v := ask(fmt.Sprint(i)); !v.Admitted {
					t.Fatalf("client %d, who was told to come: %+v", i, v)
				}
			}
			continue
		}
		w.tick(told[5] - told[1] + grace + time.Millisecond)
		if v := ask("hog"); !v.Admitted {
			t.Errorf("%+v after nobody came; want the hog to enter", v)
		}
	}
}

// TestWhoComesInVainHasTheNextPlaceKept: once, then it queues again.
func TestWhoComesInVainHasTheNextPlaceKept(t *testing.T) {
	w := paced(4) // a slot each 0.83 s, an end each 0.25 s
	for range 4 {
		a := w.ask("hog")
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: a.At})
	}
	for i := range 5 {
		a := w.ask(fmt.Sprint("other", i))
		w.Refuse(&a, ReasonBusy)
	}
	a := w.ask("patient")
	wait := w.Refuse(&a, ReasonBusy).RetryAfter
	if wait < time.Second {
		t.Fatalf("behind five others it waits %v", wait)
	}
	for i, want := range []bool{true, false} {
		w.tick(wait)
		a.Retry = i + 1
		a.At = w.clock.now()
		wait = w.Refuse(&a, ReasonBusy).RetryAfter
		if soon := wait < 500*time.Millisecond; soon != want {
			t.Errorf("after coming in vain %d times it waits %v", i+1, wait)
		}
	}
}

// TestLoneClientHasThePoolsPaceUntilAnotherComes refuses more of a client than
// the line takes.
func TestLoneClientHasThePoolsPaceUntilAnotherComes(t *testing.T) {
	w := paced(100)
	refuse := func() time.Duration {
		a := w.ask("lone")
		a.Seed = 0 // the same jitter for all
		return w.Refuse(&a, ReasonBusy).RetryAfter
	}
	const one = 10 * time.Millisecond // an end
	about := func(what string, got time.Duration, ends float64) {
		t.Helper()
		want := retryFloor + time.Duration(ends/queueShare*float64(one))
		if got < want-2*one || got > want+2*one {
			t.Errorf("%s: told %v; want about %v", what, got, want)
		}
	}
	for i := range 60 {
		about(fmt.Sprint("alone, behind ", i), refuse(), float64(i+1))
	}
	b := w.ask("second")
	w.Admit(&b)
	for range freeSlots { // of the line
		refuse()
	}
	if wait := refuse(); wait < retryFloor+2*(60+freeSlots)*one {
		t.Errorf("beside a second client, behind %d: told %v; want half the pace", 60+freeSlots, wait)
	}
	w.end(b.ID)
	w.tick(50 * time.Millisecond)
	about("alone again, behind all of them", refuse(), 60+freeSlots+2)
}

// TestSlotsThatLapseDoNotPushOutLaterOnes lets nobody come.
func TestSlotsThatLapseDoNotPushOutLaterOnes(t *testing.T) {
	w := paced(100)
	var first, last time.Duration
	for i := range 100 {
		a := w.ask("absent")
		last = w.Refuse(&a, ReasonBusy).RetryAfter
		if i == 0 {
			first = last
		}
	}
	outstanding := func() (n int) {
		c := w.clients.lock(named("absent"), 0)
		defer c.mu.Unlock()
		for i := range c.accounts {
			n += c.accounts[i].slots.n()
		}
		return n
	}
	w.tick(abandoned + (first+last)/2)
	if n := outstanding(); n < 30 || n > 70 {
		t.Errorf("%d of 100 slots are outstanding where half have lapsed", n)
	}
	w.tick((last-first)/2 + 50*time.Millisecond)
	if n := outstanding(); n != 0 {
		t.Errorf("%d slots are outstanding after all have lapsed", n)
	}
	a := w.ask("absent")
	if wait := w.Refuse(&a, ReasonBusy).RetryAfter; wait > first+20*time.Millisecond {
		t.Errorf("waits %v; want about %v, as the first did", wait, first)
	}
}

// TestNoPlaceIsHeldForWhoDoesNotCome is of a pool so small that one place is a
// quarter of it.
func TestNoPlaceIsHeldForWhoDoesNotCome(t *testing.T) {
	w := paced(4)
	var last string
	for range 4 {
		a := w.ask("hog")
		last = a.ID
		w.Admit(&a)
	}
	ghost := w.ask("ghost")
	wait := w.Refuse(&ghost, ReasonBusy).RetryAfter
	for range 2 { // the hog wants more than it has
		a := w.ask("hog")
		w.Refuse(&a, ReasonBusy)
	}
	w.tick(0)
	w.end(last)
	w.tick(0)
	a := w.ask("hog")
	if v := w.Admit(&a); v.Admitted || v.Reason != ReasonShare {
		t.Fatalf("%+v with the last place promised; want its share refused", v)
	}
	w.tick(wait + grace + time.Millisecond)
	a = w.ask("hog")
	if v := w.Admit(&a); !v.Admitted {
		t.Fatalf("%+v %v after nobody came for the last place; want the hog to enter", v, grace)
	}
}

// TestTurnsBehindOwnRequestsMoveUp: the first turns are laid by budgets, before any
// request has ended; when they end thirty times as soon, nobody waits behind them.
func TestTurnsBehindOwnRequestsMoveUp(t *testing.T) {
	for _, turns := range []int{20, 5} { // five are over by the time that it is known
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 2}), 100, nil)
		running := []string{}
		admit := func() {
			a := w.ask("a")
			if w.Admit(&a).Admitted {
				running = append(running, a.ID)
			}
		}
		told := func() time.Duration {
			a := w.ask("a")
			v := w.Admit(&a)
			if v.Admitted || v.Reason != ReasonConcurrency || !v.Refusal.ShouldRetry {
				t.Fatalf("%+v", v)
			}
			return v.Refusal.RetryAfter
		}
		admit()
		admit()
		before := time.Duration(0)
		for range turns {
			before = told()
		}
		for range 40 { // two at a time, of 200 ms each
			w.tick(200 * time.Millisecond)
			for _, id := range running {
				w.end(id)
			}
			running = running[:0]
			w.tick(0)
			admit()
			admit()
		}
		first := told()
		t.Logf("told %v at first, %v after requests of 200 ms", before, first)
		if first > 2*time.Second {
			t.Errorf("told %v, of %v before, though requests take 200 ms", first, before)
		}
		last := first
		for range 10 { // a turn in a tenth of a second
			last = told()
		}
		if last < first+700*time.Millisecond {
			t.Errorf("ten more are told %v after %v; want a turn of its own for each", last, first)
		}
	}
}

// TestSlotsOfWhoEntersEarlierAreUsed: a return that finds room before its slot
// leaves none outstanding; one that is held is no return yet.
func TestSlotsOfWhoEntersEarlierAreUsed(t *testing.T) {
	w := newWorld(config(), 2, nil)
	var ids []string
	for range 2 {
		a := w.ask("other")
		w.Admit(&a)
		ids = append(ids, a.ID)
	}
	a := w.ask("a")
	a.Unplaced = true
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 2, InFlight: 2, Places: 2}})
	r := w.Admit(&a)
	if r.Admitted || !r.Refusal.ShouldRetry {
		t.Fatalf("%+v", r)
	}
	waiting := func() (n int) {
		for _, c := range w.Clients(10) {
			if c.Client == named("a") {
				n += c.Waiting
			}
		}
		return n
	}
	line := &w.pool().levels[a.Level].line
	held := w.ask("a")
	held.Unplaced, held.Hold, held.Retry = true, true, 1
	w.clock.advance(r.Refusal.RetryAfter)
	held.At = w.clock.now()
	if v := w.Admit(&held); !v.Held || waiting() != 1 || line.returned.Load() != 0 {
		t.Errorf("%+v, %d slots, %d returned; want it held, and its slot outstanding", v, waiting(), line.returned.Load())
	}
	w.clock.advance(-r.Refusal.RetryAfter)
	w.end(ids[0])
	early := w.ask("a")
	early.Unplaced, early.Retry = true, 1
	if v := w.Admit(&early); !v.Admitted || waiting() != 0 || line.returned.Load() != 1 {
		t.Errorf("%+v, %d slots, %d returned; want it admitted, and its slot used", v, waiting(), line.returned.Load())
	}
}

// TestTurnsOfSeveralLevelsStayApart: short requests of a client don't move its long
// ones up, whose turns are far apart for good reason.
func TestTurnsOfSeveralLevelsStayApart(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
	ask := func(level fleet.BurstLevel) (Ask, Verdict) {
		a := w.ask("a")
		a.Level, a.Output = level, level.UpperBudget()
		return a, w.Admit(&a)
	}
	for range 20 { // both levels are known: 100 ms and 5 s
		for level, takes := range map[fleet.BurstLevel]time.Duration{0: 100 * time.Millisecond, 7: 5 * time.Second} {
			a, v := ask(level)
			if !v.Admitted {
				t.Fatalf("%+v", v)
			}
			w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
			for left := takes; left > 0; left -= 100 * time.Millisecond {
				w.tick(100 * time.Millisecond)
			}
			w.end(a.ID)
			w.tick(0)
		}
	}
	if _, v := ask(7); !v.Admitted {
		t.Fatalf("%+v", v)
	}
	last := time.Duration(0)
	for i := range 5 {
		_, long := ask(7)
		ask(0)
		_, short := ask(0)
		if !long.Refusal.ShouldRetry || long.Refusal.RetryAfter < last+2*time.Second || short.Refusal.RetryAfter < long.Refusal.RetryAfter-5*time.Second {
			t.Errorf("turn %d: long ones are told %v after %v, short ones %v", i, long.Refusal.RetryAfter, last, short.Refusal.RetryAfter)
		}
		last = long.Refusal.RetryAfter
	}
}

// TestSlotsThatWereLentAreForgivenOnce: a first try may have used the slot of a
// return, which comes at that time, once, and not much later.
func TestSlotsThatWereLentAreForgivenOnce(t *testing.T) {
	const far = 30 * time.Second
	at := 100 * time.Millisecond
	type come struct {
		at               time.Duration
		retry            int
		early, due, used bool
	}
	for name, comes := range map[string][]come{
		"a sibling, then its owner, then one too early": {{at, 0, false, true, true}, {at + 1, 1, false, true, false}, {at + 2, 1, true, false, false}},
		"its owner, then one too early":                 {{at, 1, false, true, true}, {at + 1, 1, true, false, false}},
		"a sibling, then its owner much too late":       {{at, 0, false, true, true}, {at + abandoned + 1, 1, true, false, false}},
		"two siblings, then one owner":                  {{at, 0, false, true, true}, {at + 1, 0, false, false, false}, {at + 2, 1, false, true, false}, {at + 3, 1, true, false, false}},
		"long ago lent":                                 {{at, 0, false, true, true}, {far, 0, false, true, true}, {far + 1, 1, false, true, false}, {far + 2, 1, false, false, false}},
	} {
		s := slots{}
		s.add(slot{at: at})
		s.add(slot{at: far})
		for i, c := range comes {
			if got, want := s.premature(c.at, c.retry), c.early; got != want {
				t.Errorf("%s, %d: premature %v", name, i, got)
			}
			early, due, used, _ := s.arrive(c.at, c.retry, false)
			if early != c.early || due != c.due || used != c.used {
				t.Errorf("%s, %d: early %v, due %v, used %v; want %+v", name, i, early, due, used, c)
			}
		}
	}
}

// TestWhoHasLeftTakesNothingFromOthersShares: a caller asked every 25 ms, whatever it
// was told, and went away; its many slots are no demand then, but are again when it
// is back.
func TestWhoHasLeftTakesNothingFromOthersShares(t *testing.T) {
	w := paced(40)
	var running []string
	fill := func() {
		for range 40 - len(running) {
			a := w.ask("worker")
			w.Admit(&a)
			w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: a.At})
			running = append(running, a.ID)
		}
	}
	fill()
	poll := func() {
		a := w.ask("poller")
		w.Refuse(&a, ReasonBusy)
	}
	for range 200 {
		poll()
		w.tick(25 * time.Millisecond)
	}
	share := func() float64 { return w.tick(0).Share * interactiveWeight }
	if s := share(); s > 30 {
		t.Fatalf("beside the poller the share is %v of 40; want about half", s)
	}
	b := w.ask("worker")
	w.Refuse(&b, ReasonBusy)
	w.tick(2 * absentAfter)
	if s := share(); s < 38 {
		t.Errorf("after the poller left the share is %v of 40", s)
	}
	poll()
	if s := share(); s > 30 {
		t.Errorf("with the poller back the share is %v of 40; want about half", s)
	}
}
