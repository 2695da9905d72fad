package admission

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// expected is how many ends are over at a time, by the definition of nth.
func (e *ends) expected(now, at time.Duration, weight, pace float64, ramp time.Duration) float64 {
	n := pace * float64(at-now)
	for _, end := range e.at {
		n += weight * min(1, max(0, float64(at-max(end, now))/float64(ramp)))
	}
	return n
}

// queue is when the n-th place of a share becomes free.
func (e *ends) queue(now time.Duration, n float64, s *share) time.Duration {
	c := e.course(now, s)
	return c.place(n)
}

func TestNthEndIsWhenSoManyAreOver(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "now"))
		e := ends{}
		for range rapid.IntRange(1, 20).Draw(t, "in flight") {
			e.add(max(1, now+time.Duration(rapid.Int64Range(-int64(5*time.Second), int64(20*time.Second)).Draw(t, "ends"))))
		}
		weight := rapid.Float64Range(0.1, 1).Draw(t, "weight")
		pace := rapid.SampledFrom([]float64{0, 1e-10, 3e-9}).Draw(t, "pace")
		ramp := time.Duration(rapid.Int64Range(int64(time.Millisecond), int64(10*time.Second)).Draw(t, "ramp"))
		n := rapid.Float64Range(0, weight*float64(len(e.at))).Draw(t, "n")
		at := e.nth(now, n, weight, pace, ramp)
		const about = 20 * time.Microsecond
		early, late := e.expected(now, at-about, weight, pace, ramp), e.expected(now, at+about, weight, pace, ramp)
		if at < now || early > n+1e-3 || late < n-1e-3 {
			t.Fatalf("%v: %.4f are over just before and %.4f just after it; want %.4f", at-now, early, late, n)
		}
	})
}

func TestQueueFollowsTheEndsOfAnswersThatTakeTheSameTime(t *testing.T) {
	const takes = 10 * time.Second
	s := share{live: 4, each: takes / 4, takes: takes, least: takes}
	e := ends{}
	for _, began := range []time.Duration{0, 1, 2, 6} {
		e.add(began*time.Second + takes)
	}
	now := 7 * time.Second
	for n, want := range []time.Duration{0, 10, 11, 12, 16, 20, 21, 22, 26, 30} {
		if n == 0 {
			continue
		}
		if got := e.queue(now, float64(n), &s); got < want*time.Second || got > want*time.Second+time.Duration(1+(n-1)/4)*110*time.Millisecond {
			t.Errorf("place %d becomes free after %v; want %v s", n, got, int(want))
		}
	}
	if got := e.queue(now, 1.04, &s); got > 10*time.Second+120*time.Millisecond {
		t.Errorf("behind a short one of another level: %v; want 10 s", got)
	}
	soon := share{live: 4, each: 10 * time.Millisecond, takes: 40 * time.Millisecond, least: 40 * time.Millisecond}
	if got := e.queue(10*time.Second-time.Millisecond, 1, &soon); got != 10*time.Second-time.Millisecond+retryFloor {
		t.Errorf("told to come after %v; want %v at the earliest", got-10*time.Second, retryFloor)
	}
	none := share{live: 0, each: takes / 4, takes: takes, least: takes} // counted elsewhere already
	if got := e.queue(now, 1, &none); got > 11*time.Second {
		t.Errorf("with none in flight the first place is free after %v", got)
	}
	if first := e.first(4); first != 10*time.Second {
		t.Errorf("none ends before %v; want 10 s", first)
	}
	if first := e.first(5); first != 0 {
		t.Errorf("with one of which nothing is known none ends before %v", first)
	}
}

// TestQueueIsEvenWhereTimesAreRandom: those that run may end at any time, or nearly so.
func TestQueueIsEvenWhereTimesAreRandom(t *testing.T) {
	const takes, now = 10 * time.Second, time.Minute
	for _, least := range []time.Duration{0, takes / 20} {
		s := share{live: 20, each: takes / 20, takes: takes, least: least}
		e := ends{}
		for i := range 20 {
			if least > 0 {
				e.add(now - time.Duration(i)*time.Second/2 + least)
			}
		}
		for n := 1; n <= 60; n += 7 {
			want := span(float64(n) * float64(s.each) / queueShare)
			if got := e.queue(now, float64(n), &s) - now; got < want-700*time.Millisecond || got > want+700*time.Millisecond {
				t.Errorf("at least %v: place %d becomes free after %v; want about %v", least, n, got, want)
			}
		}
	}
}

// TestQueueOfAShareThatIsPassed: only half of what is in flight makes room.
func TestQueueOfAShareThatIsPassed(t *testing.T) {
	const takes = 10 * time.Second
	s := share{live: 8, each: takes / 4, takes: takes, least: takes}
	e := ends{}
	for i := range 8 {
		e.add(takes + time.Duration(i)*time.Second)
	}
	if got := e.queue(time.Second, 2, &s); got < 13*time.Second || got > 13*time.Second+120*time.Millisecond {
		t.Errorf("the second place becomes free after %v; want that of the fourth end, 13 s", got)
	}
}

func TestEndsAreBoundedAndForgotten(t *testing.T) {
	e := ends{}
	for i := range 10 * keptEnds {
		e.add(time.Duration(i + 1))
		if len(e.at) >= keptEnds || !slices.IsSorted(e.at) {
			t.Fatalf("after %d: %d are kept", i+1, len(e.at))
		}
	}
	e.add(0)
	if first := e.first(10 * keptEnds); first > keptEnds {
		t.Errorf("none ends before %d; want some of the first", first)
	}
	for i := range 11 * keptEnds {
		e.drop(time.Duration(i + 1))
	}
	if len(e.at) != 0 || e.apart != 1 {
		t.Errorf("%d are left, each for %d", len(e.at), e.apart)
	}
}

// TestSomeStandForMany: of ten thousand requests that take the same time and begin one by
// one, ends come at an even pace, and so they do when others have taken their places for
// long; of those that begin at once they come at once.
func TestSomeStandForMany(t *testing.T) {
	const live, takes = 10_000, 10 * time.Second
	each := takes / live
	s := share{live: live, each: each, takes: takes, least: takes}
	e, running, now := ends{}, []time.Duration{}, time.Duration(0)
	begin := func() {
		e.add(now + takes)
		running = append(running, now+takes)
	}
	for range live {
		begin()
		now += each
	}
	for round := range 4 {
		for _, n := range []int{1, 100, 1000, 5000, 9999} {
			want := time.Duration(n) * each
			if got := e.queue(now, float64(n), &s) - now; (got - want).Abs() > takes/20 {
				t.Errorf("round %d: place %d becomes free after %v; want %v", round, n, got, want)
			}
		}
		if first := e.first(live) - now; first.Abs() > takes/20 {
			t.Errorf("round %d: none ends before %v", round, first)
		}
		for range live { // as one ends another begins
			e.drop(running[0])
			running = running[1:]
			begin()
			now += each
		}
	}
	now += takes
	for _, at := range running {
		e.drop(at)
	}
	for range live {
		e.add(now + takes)
	}
	if first, last := e.queue(now, 1, &s), e.queue(now, 9999, &s); last-first < takes/leastRamp*9/10 {
		t.Errorf("begun at once: all places become free within %v", last-first)
	}
	for _, n := range []int{1, 5000, 9999} {
		if got := e.queue(now, float64(n), &s) - now; got < takes || got > takes+takes/leastRamp+time.Millisecond {
			t.Errorf("begun at once: place %d becomes free after %v; want %v", n, got, takes)
		}
	}
}

// TestShortestIsOfTheLastEnds: of the block before and this one.
func TestShortestIsOfTheLastEnds(t *testing.T) {
	a := answers{}
	end := func(n int, ran time.Duration) {
		for range n {
			a.add(ran)
		}
		a.step()
	}
	for i, row := range []struct {
		n         int
		ran, want time.Duration
	}{
		{0, 0, 0}, {3, time.Second, time.Second}, {1, time.Minute, time.Second}, {1, 100 * time.Millisecond, 100 * time.Millisecond},
		{blockOf, time.Second, 100 * time.Millisecond}, // ends that block
		{blockOf, time.Second, 100 * time.Millisecond},
		{1, time.Second, time.Second},
		{blockOf, 2 * time.Second, time.Second}, {blockOf, 2 * time.Second, time.Second}, {1, 3 * time.Second, 2 * time.Second},
	} {
		end(row.n, row.ran)
		if got := time.Duration(a.shortest.Load()); got != row.want {
			t.Errorf("%d: after %d of %v the shortest is %v; want %v", i, row.n, row.ran, got, row.want)
		}
	}
}

func TestMeanOfAnswersIsThatOfTheLast(t *testing.T) {
	a := answers{}
	if got := a.mean(8); got != 8 {
		t.Errorf("%v s before the first; want the guess", got)
	}
	a.add(time.Second)
	a.step()
	if got := a.mean(8); got != 5.0/1.5 {
		t.Errorf("%v s after one of a second; want a guess of 8 s for half an end", got)
	}
	for range 3 {
		a.add(time.Second)
	}
	a.step()
	if got := a.mean(8); got != 5.0/4.5 {
		t.Errorf("%v s after four of a second; want a guess of 2 s for half an end", got)
	}
	for range 1000 {
		a.add(2 * time.Second)
		a.step()
	}
	if got := a.mean(2); math.Abs(got-2) > 1e-3 || a.ends > 1/oneRequest+1 {
		t.Errorf("%v s of %v ends; want 2 s of the last", got, a.ends)
	}
}

// TestWhatIsPredictedIsTakenBack: nothing is left in the lists of a client when all has
// ended, was cancelled, lapsed or moved.
func TestWhatIsPredictedIsTakenBack(t *testing.T) {
	cfg := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 50})
	w := newWorld(cfg, 100, nil)
	run := func(n int) (ids []string) {
		for range n {
			a := w.ask("a")
			if v := w.Admit(&a); !v.Admitted {
				t.Fatalf("%+v", v)
			}
			ids = append(ids, a.ID)
		}
		return ids
	}
	left := func() (n [2]int) {
		c := w.clients.lock(named("a"), 0)
		defer c.mu.Unlock()
		for i := range c.accounts {
			n[0] += len(c.accounts[i].ends.at)
		}
		for i := range c.uses {
			n[1] += len(c.uses[i].ends.at)
		}
		return n
	}
	for _, id := range run(2) {
		w.tick(time.Second)
		w.end(id)
	}
	w.tick(0)
	ids := run(8)
	if n := left(); n != [2]int{8, 8} {
		t.Fatalf("%v of 8 are known", n)
	}
	w.end(ids[0])
	w.Cancel(ids[1])
	w.Drop(ids[2])
	again := w.ask("a") // takes the place of another of its id
	again.ID = ids[3]
	w.Admit(&again)
	if n := left(); n != [2]int{5, 5} {
		t.Errorf("%v are known of 5", n)
	}
	w.tick(unconfirmedLease + time.Second)
	if n := left(); n != [2]int{} {
		t.Errorf("%v are known though all have lapsed", n)
	}
	w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: ids[4], Attempt: 1, At: w.clock.now()})
	if n := left(); n != [2]int{1, 1} {
		t.Errorf("%v are known of one that lives again", n)
	}
	w.end(ids[4])
	if n := left(); n != [2]int{} {
		t.Errorf("%v are known though all have ended", n)
	}
}

// TestCrowdsWhoseAnswersTakeTheSameTime come at once, where nothing has ended yet or
// some have a minute ago, and try three times.
func TestCrowdsWhoseAnswersTakeTheSameTime(t *testing.T) {
	for _, row := range []struct {
		places, keys, each int
		takes              time.Duration
		warm               bool
		gaveUp             float64 // at most
		most               float64 // how many times as long as with places that are always taken
	}{
		{50, 1, 200, 200 * time.Millisecond, true, 0, 2}, {50, 1, 200, time.Second, true, 0, 1.2},
		{50, 1, 200, 3 * time.Second, true, 0.01, 1.2}, {200, 1, 300, 5 * time.Second, true, 0, 1.2},
		{200, 1, 300, 20 * time.Second, true, 0, 1.1}, {50, 200, 1, 200 * time.Millisecond, true, 0, 3},
		{50, 200, 1, time.Second, true, 0.01, 2.5}, {50, 200, 1, 3 * time.Second, true, 0.05, 2.5},
		{50, 1, 100, 5 * time.Second, false, 0.05, 1.6}, {50, 1, 200, time.Second, false, 0.05, 2.5},
		{50, 1, 200, 3 * time.Second, false, 0.15, 2}, {50, 200, 1, 3 * time.Second, false, 0.1, 2.5},
	} {
		const runs = 3
		gaveUp, longest := 0, 0.0
		for seed := range uint64(runs) {
			l := newLoop(t, row.places)
			l.rng = rand.New(rand.NewPCG(seed, 3))
			l.blind, l.holds, l.exact = true, true, true
			for i := range l.lasts {
				l.lasts[i] = row.takes
			}
			var callers, crowd []*caller
			from := time.Duration(0)
			if row.warm {
				from = time.Minute + row.takes
				callers = append(callers, &caller{name: "before", open: 6, level: 3, tries: 1})
			}
			for k := range row.keys {
				crowd = append(crowd, &caller{name: fmt.Sprint("key", k), open: row.each, level: 3, tries: 3, from: from})
			}
			l.run(append(callers, crowd...), 0, from+2*time.Minute)
			end := time.Duration(0)
			for _, c := range crowd {
				gaveUp += c.stopped
				end = max(end, c.last-from)
			}
			rounds := math.Ceil(float64(row.keys*row.each) / float64(row.places))
			longest = max(longest, end.Seconds()/rounds/row.takes.Seconds())
		}
		t.Logf("%+v: %d of %d gave up, the last ended after %.2f times the best", row, gaveUp, runs*row.keys*row.each, longest)
		if float64(gaveUp) > row.gaveUp*float64(runs*row.keys*row.each) || longest > row.most {
			t.Errorf("%+v: %d of %d gave up, the last ended after %.2f times the best", row, gaveUp, runs*row.keys*row.each, longest)
		}
	}
}

// TestNewcomersWaitForTheEndsOfAFullPool: as many clients as there are places, or more, fill
// a pool at once with answers that take the same time; others come meanwhile, and try three
// times. No client's share is a whole place then, nor has it ends of its own.
func TestNewcomersWaitForTheEndsOfAFullPool(t *testing.T) {
	for _, row := range []struct{ fill, others int }{{50, 1}, {50, 5}, {60, 5}, {100, 5}} {
		gaveUp, ended := 0, 0
		for seed := range uint64(10) {
			l := newLoop(t, 50)
			l.rng = rand.New(rand.NewPCG(seed, 5))
			l.blind, l.holds, l.exact = true, true, true
			for i := range l.lasts {
				l.lasts[i] = 3 * time.Second
			}
			from := time.Minute
			callers := []*caller{{name: "before", open: 6, level: 3, tries: 1}}
			for k := range row.fill {
				callers = append(callers, &caller{name: fmt.Sprint("fills", k), open: 1, level: 3, tries: 1, from: from})
			}
			var others []*caller
			for k := range row.others {
				others = append(others, &caller{name: fmt.Sprint("other", k), open: 1, level: 3, tries: 3, from: from + 900*time.Millisecond})
			}
			l.run(append(callers, others...), 0, from+time.Minute)
			for _, c := range others {
				gaveUp, ended = gaveUp+c.stopped, ended+c.ended
			}
		}
		t.Logf("%+v: %d ended, %d gave up", row, ended, gaveUp)
		if ended+gaveUp != 10*row.others || gaveUp*20 > ended {
			t.Errorf("%+v: %d ended, %d gave up", row, ended, gaveUp)
		}
	}
}

// TestWhatMovesIsPredictedWhereItRuns: a request that Envoy tried again in another pool
// ends there, and its time counts from then on.
func TestWhatMovesIsPredictedWhereItRuns(t *testing.T) {
	cfg := config()
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)})
	w := newWorld(cfg, 100, nil)
	for range 2 { // both pools know the level
		a := w.ask("a")
		w.Admit(&a)
		w.clock.advance(time.Second)
		w.end(a.ID)
		w.tick(0)
	}
	a := w.ask("a")
	w.Admit(&a)
	left := func(pool string) int {
		c := w.clients.lock(named("a"), 0)
		defer c.mu.Unlock()
		return len(c.account(w.settings.Load().pools[pool], fleet.ClassInteractive).ends.at)
	}
	w.clock.advance(5 * time.Second)
	w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 2, At: w.clock.now(), Endpoint: fleet.EndpointKey{Pool: "q"}})
	if p, q := left("p"), left("q"); p != 0 || q != 1 {
		t.Errorf("%d are known in the pool that it left and %d where it runs", p, q)
	}
	w.clock.advance(2 * time.Second)
	w.end(a.ID)
	w.tick(0)
	if got := time.Duration(w.settings.Load().pools["q"].levels[a.Level].answers.shortest.Load()); got != 2*time.Second {
		t.Errorf("it ran %v where it ended; want 2 s", got)
	}
	if p, q := left("p"), left("q"); p != 0 || q != 0 {
		t.Errorf("%d and %d are known after its end", p, q)
	}
}

// TestNobodyIsToldToComeBeforeTheFirstEnd: neither by a drawn slot nor by a firm one.
func TestNobodyIsToldToComeBeforeTheFirstEnd(t *testing.T) {
	for seed := range uint64(50) {
		s := slots{}
		drawn := turn{patience: retryCap, queued: 2 * time.Second, each: 2 * time.Second, takes: 2 * time.Second, first: 1500 * time.Millisecond, drawn: true, seed: seed}
		if at, ok := s.queue(&drawn); !ok || at < drawn.first || at > drawn.queued {
			t.Errorf("seed %d: drawn at %v, %v", seed, at, ok)
		}
	}
	s := slots{}
	firm := turn{patience: retryCap, queued: time.Second, each: time.Millisecond, takes: time.Second, first: 4 * time.Second, share: 10}
	if at, ok := s.insist(&firm); !ok || at != firm.first {
		t.Errorf("firm at %v, %v; want the first end at %v", at, ok, firm.first)
	}
	line := turn{patience: retryCap, first: 4 * time.Second, most: freeSlots, below: true, share: 10, line: &line{}, tail: &tail{}}
	line.line.spacing.Store(int64(time.Second))
	if at, ok := s.give(&line); !ok || at < 5*time.Second || at > 6*time.Second {
		t.Errorf("in line at %v, %v; want a spacing after the first end", at, ok)
	}
}

// TestTheNextPlaceIsNotPromisedBeforeTheFirstEnd, nor past the caller's time.
func TestTheNextPlaceIsNotPromisedBeforeTheFirstEnd(t *testing.T) {
	for _, row := range []struct {
		first, cold time.Duration
		ok          bool
	}{{0, 0, true}, {4 * time.Second, 0, true}, {retryCap + time.Second, 0, false}, {0, time.Second, false}} {
		p := newPool("p", 4)
		p.share.Store(math.Float64bits(2))
		p.lead.Store(int64(time.Second))
		a := account{pool: p}
		next := turn{patience: retryCap, first: row.first, cold: row.cold}
		at, ok := a.giveNext(&next, &bid{pool: p, due: true, weight: 1}, ReasonBusy)
		if want := max(time.Second, row.first); ok != row.ok || ok && (at < want || at > want+retryFloor) {
			t.Errorf("%+v: promised at %v, %v", row, at, ok)
		}
	}
}

// TestFirstEndOfAPool is unknown where requests run that were not admitted here, or of
// which nothing is known.
func TestFirstEndOfAPool(t *testing.T) {
	w := newWorld(config(), 100, nil)
	first := func(others int) time.Duration {
		w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, InFlight: int(w.pool().live.Load()) + others}})
		w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, InFlight: int(w.pool().live.Load()) + others}})
		return time.Duration(w.pool().firstEnd.Load())
	}
	run := func(client string) string {
		a := w.ask(client)
		w.Admit(&a)
		return a.ID
	}
	w.teach(3, 1, time.Second, 100)
	began := time.Duration(w.clock.at.Load())
	run("a")
	w.clock.advance(200 * time.Millisecond)
	run("b")
	if got, want := first(0), began+time.Second; got != want {
		t.Errorf("none ends before %v; want %v", got, want)
	}
	if got := first(1); got != 0 {
		t.Errorf("beside one of others none ends before %v", got)
	}
	other := w.ask("c")
	other.Level = 7
	w.pool().levels[7].cold.Store(0) // nothing is known of it
	w.Admit(&other)
	if got := first(0); got != 0 {
		t.Errorf("beside one of which nothing is known none ends before %v", got)
	}
}

// TestPartOfALevel is the account's part of its own share and of the level's budget.
func TestPartOfALevel(t *testing.T) {
	p := newPool("p", 64)
	l := &p.levels[3]
	l.expected.Store(int64(time.Second))
	a := account{pool: p, live: 20}
	for range 9 {
		a.slots.add(slot{at: time.Second, level: 3})
	}
	for range 10 {
		a.slots.add(slot{at: time.Second, level: 5})
	}
	// Of a share of 30, 17.5 of 19 that wait may come in: 9.2 of ten here.
	mine := 10 * 17.5 / 19
	for _, row := range []struct {
		undivided     bool
		budget        int64
		wanted, share float64
		want          float64
	}{
		{false, math.MaxInt64, 4 * mine, 30, 30}, {false, 60, mine, 30, 15}, {false, 8, 4 * mine, 30, 2},
		{false, 8, mine / 2, 30, 15}, {false, 60, mine, 100, 32}, {true, 8, 4 * mine, 30, 30}, {false, 8, 1000, 10, 5},
	} {
		p.undivided.Store(row.undivided)
		l.budget.Store(row.budget)
		l.wanted.Store(math.Float64bits(row.wanted))
		if got, want := a.each(3, row.share, false), time.Duration(float64(time.Second)/row.want); (got - want).Abs() > time.Microsecond {
			t.Errorf("%+v: one ends in %v; want %v", row, got, want)
		}
	}
}

// TestOneMoreAfterAPlaceIsTheNext: what is given one after the other comes as places do.
func TestOneMoreAfterAPlaceIsTheNext(t *testing.T) {
	const takes, now = 10 * time.Second, time.Minute
	together, apart := ends{}, ends{}
	for i := range 50 {
		together.add(now + time.Second + time.Duration(i)*time.Millisecond)
		apart.add(now + time.Duration(i)*takes/50)
	}
	s := share{live: 50, each: takes / 50, takes: takes, least: takes}
	for name, e := range map[string]*ends{"together": &together, "apart": &apart, "unknown": {}} {
		c := e.course(now, &s)
		if got := c.next(0); got != now {
			t.Errorf("%s: after none before: %v; want now", name, got-now)
		}
		at := c.place(1)
		for n := 2; n < 120; n++ {
			at = c.next(at)
			if want := c.place(float64(n)); (at - want).Abs() > takes/leastRamp+retryFloor {
				t.Errorf("%s: the place after the %d-th is free after %v; want %v", name, n-1, at-now, want-now)
				break
			}
		}
	}
}

// TestNobodyIsEarlyWhereTimesAreNotKnown: of more than keptSlots slots the later ones'
// times are not; who comes in between is no early one, nor one for whom a place is kept.
func TestNobodyIsEarlyWhereTimesAreNotKnown(t *testing.T) {
	s := slots{}
	for i := range keptSlots + 10 {
		s.add(slot{at: time.Duration(i+1) * time.Second, level: 3})
	}
	come := func(now time.Duration) (early, due, used bool) {
		early, due, used, _ = s.arrive(now, 1, true)
		return early, due, used
	}
	if s.premature(0, 1) {
		t.Error("one is not to be held before all slots, of which some are not known")
	}
	if early, due, used := come(0); early || due || !used {
		t.Errorf("before all slots: early %v, due %v, used %v; want a slot used", early, due, used)
	}
	for range 8 {
		s.use()
	}
	for s.n() > 1 { // the last ones are recalled
		if !s.unsure() {
			t.Fatalf("sure of %d slots", s.n())
		}
		s.use()
	}
	s.use()
	if s.unsure() || s.vague != 0 {
		t.Errorf("unsure of none: %d are vague", s.vague)
	}
	s.add(slot{at: time.Hour, level: 3})
	if early, _, _ := come(0); !early {
		t.Error("before the only slot, whose time is known: not early")
	}
}

// TestWhoLeftDoesNotShortenAnswers: that a caller went away after the headers says nothing
// of how long answers take.
func TestWhoLeftDoesNotShortenAnswers(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.teach(3, 3, 10*time.Second, 100)
	for _, o := range []fleet.Outcome{{Code: 200, Cause: fleet.CauseClientGone}, {Code: 503, Cause: fleet.CauseOK}} {
		a := w.ask("a")
		w.Admit(&a)
		w.clock.advance(time.Second)
		o.Kind, o.ID, o.At = fleet.RequestEnded, a.ID, w.clock.now()
		w.Apply(o)
		w.tick(0)
	}
	if got := time.Duration(w.pool().levels[3].answers.shortest.Load()); got != 10*time.Second {
		t.Errorf("the shortest answer took %v; want 10 s", got)
	}
}

// TestWhoseNextPlaceOthersLeave is who isn't alone, and has less than its share by one place
// or more, or nothing at all.
func TestWhoseNextPlaceOthersLeave(t *testing.T) {
	for _, row := range []struct {
		accounts int64
		live     int
		share    float64
		want     bool
	}{{1, 0, 8, false}, {2, 0, 8, true}, {2, 6, 8, true}, {2, 7, 8, false}, {2, 9, 8, false}, {2, 0, 0.5, true}, {2, 1, 0.5, false}, {1, 0, 0.5, false}} {
		p := newPool("p", 16)
		p.accounts.Store(row.accounts)
		a := account{pool: p, live: row.live}
		if got := a.hopes(row.share); got != row.want {
			t.Errorf("%+v: %v", row, got)
		}
	}
}

// TestEndsAreTrimmed: what is more than is in flight was told in another order.
func TestEndsAreTrimmed(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 9}), 100, nil)
	a := w.ask("a")
	w.Admit(&a)
	c := w.clients.lock(named("a"), 0)
	for i := range 5 {
		c.accounts[0].ends.add(time.Duration(i + 1))
		c.uses[0].ends.add(time.Duration(i + 1))
	}
	c.mu.Unlock()
	w.tick(50 * time.Millisecond)
	c = w.clients.lock(named("a"), 0)
	defer c.mu.Unlock()
	if n, m := len(c.accounts[0].ends.at), len(c.uses[0].ends.at); n > 1 || m > 1 {
		t.Errorf("%d and %d ends are known of one request", n, m)
	}
}

// TestTokensTakeTheirTime: the default where answers told none, and never no time at all.
func TestTokensTakeTheirTime(t *testing.T) {
	for _, row := range []struct {
		measured      bool
		mean, seconds float64
		ends          float64
		want          time.Duration
	}{
		{false, 100, 10, 5, perToken}, {true, 100, 10, 5, 20 * time.Millisecond}, {true, 0.5, 10, 5, perToken},
		{true, 100, 0, 0, perToken}, {true, 1e12, 1e-3, 1, 1},
	} {
		l := level{measured: row.measured, meanOutput: row.mean}
		l.answers.seconds, l.answers.ends = row.seconds, row.ends
		l.expect(3, 1)
		if got := time.Duration(l.tokenTime.Load()); got != row.want {
			t.Errorf("%+v: a token takes %v", row, got)
		}
	}
}

// TestLevelsWantNumbers: a request that was held before anything else is known of its
// client has no weight yet.
func TestLevelsWantNumbers(t *testing.T) {
	w := newWorld(config(), 4, nil)
	a := w.counting("a", 1)
	w.BeginHold(&a)
	w.tick(50 * time.Millisecond)
	for i := range w.pool().levels {
		if wants := w.pool().levels[i].wants; wants != 0 {
			t.Errorf("level %d wants %v", i, wants)
		}
	}
	w.EndHold(&a)
}

// TestWhatWasTriedIsForgotten: of a client that tried thrice once nothing is known after
// a minute.
func TestWhatWasTriedIsForgotten(t *testing.T) {
	c := client{}
	come := func(now time.Duration, retry int) bool {
		b := bid{ask: &Ask{Retry: retry}, now: now}
		c.tried(&b)
		return c.gaveUp(&b)
	}
	if come(0, 3) || come(time.Second, 2) {
		t.Error("it is known to try oftener")
	}
	if !come(tellsFor+time.Second, 2) {
		t.Error("it tried oftener too long ago")
	}
}

// TestWaitsAreApartBeforeAnAnswerHasEnded: a crowd of one client behind its limit.
func TestWaitsAreApartBeforeAnAnswerHasEnded(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 50}), 4096, nil)
	waits := map[time.Duration]bool{}
	for i := range 200 {
		a := w.ask("a")
		a.Level, a.Output, a.Seed = 0, 4, uint64(i)
		if v := w.Admit(&a); !v.Admitted {
			waits[v.Refusal.RetryAfter] = true
		}
	}
	if len(waits) < 120 {
		t.Errorf("150 are told %d different waits", len(waits))
	}
}

// TestWaitIsNotBeforeTheFirstEnd of those that run, also for who would be in line.
func TestWaitIsNotBeforeTheFirstEnd(t *testing.T) {
	w := newWorld(config(), 8, nil)
	w.teach(3, 3, 10*time.Second, 100)
	for i := range 8 {
		a := w.ask(fmt.Sprint("running", i%2))
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 1, At: w.clock.now()})
	}
	w.tick(0)
	w.tick(time.Second)
	a := w.counting("newcomer", 0)
	if wait, told := w.Wait(&a), w.Refuse(&a, ReasonBusy).RetryAfter; wait < 9*time.Second || told < 9*time.Second {
		t.Errorf("would wait %v and is told %v; want 9 s, when the first end", wait, told)
	}
}
