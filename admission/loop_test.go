package admission

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// caller is a program behind an official SDK: it has some requests open at once,
// waits as it is told, and begins anew with another request when it is told that
// there is no point, or after two retries.
type caller struct {
	name     string
	open     int // requests at once
	think    time.Duration
	class    fleet.RequestClass
	level    fleet.BurstLevel
	takes    time.Duration // mean time in flight of its requests, if not its level's
	fails    bool          // they are answered with an error
	every    time.Duration // sends one after each such time, whatever becomes of the others
	hammers  bool          // retries at once, whatever it is told
	blind    bool          // sleeps 50 ms, whatever it is told, and tells of no retries
	waits    bool          // returns as told until it enters, and tells of no retries …
	counts   bool          // … or does tell …
	zero     bool          // … that each was tried once
	tries    int           // of each request, of which it makes one per open; 0 is without end
	longest  time.Duration // that it was told
	ghost    time.Duration // never comes back, but with another first try after so long
	sdk      bool          // begins anew at once when it is told not to retry, or after two
	foreign  bool          // not admitted here: takes a place if there is one, or tries again 0.5 s later
	gaveUp   int           // how often it did
	from     time.Duration
	admitted int
	live     int
	ended    int
	stopped  int // requests that were told not to retry, or retried in vain
	last     time.Duration
}

// event is something that happens to one of a caller's open requests.
type event struct {
	at    time.Duration
	of    *caller
	retry int
	ends  string // id of the request that ends; "" is one that is sent
	told  bool   // … and the log tells
	beats string // id of the request that shows a sign of life
	held  *Ask   // what it is held for, since then
	since time.Duration
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// loop plays callers against a gate in front of one pool.
type loop struct {
	*world
	t       testing.TB
	places  int // of the pool: the plan refuses beyond
	rng     *rand.Rand
	queue   events
	lasts   [fleet.BurstLevels]time.Duration // mean time in flight
	live    int
	levels  [fleet.BurstLevels]float64
	byLevel [fleet.BurstLevels]int
	lives   []float64 // at ticks
	shares  map[*caller]float64
	since   time.Duration
	slow    float64         // times as long requests take …
	slowAt  time.Duration   // … that enter from then on
	exact   bool            // requests take their mean time in flight
	lag     time.Duration   // until a log tells of an end, at most
	blind   bool            // places may be kept for who was told to come
	told    []time.Duration // those that wait
	whole   bool            // budgets are their levels' largest
	// sentAway is how often a return that came as told was told not to come again.
	sentAway int
	// hopeless is how often those were told not to retry.
	hopeless int
	// holds: requests that find no place are held for a while, as package extproc
	// does; held is how many are, by client.
	holds bool
	held  map[string]int
	// returns came as told, and those in vain found no place.
	returns, vain int
	see           func(PoolState) // what becomes of steps, if it is set
}

// What package extproc holds: for how long, how often it asks again, and how many
// of a client.
const (
	heldFor  = 60 * time.Millisecond
	heldStep = 10 * time.Millisecond
	heldMost = 16
)

func newLoop(t testing.TB, places int) *loop {
	if Raced {
		t.Skip("a simulation has one goroutine, and takes ten times as long with the race detector: .ci/run runs them without")
	}
	l := &loop{world: newWorld(config(), float64(places), nil), t: t, places: places, rng: rand.New(rand.NewPCG(7, uint64(places))), shares: map[*caller]float64{}, held: map[string]int{}}
	for i := range l.lasts {
		l.lasts[i] = time.Second
	}
	return l
}

func (l *loop) add(callers ...*caller) {
	for _, c := range callers {
		for range c.open {
			heap.Push(&l.queue, event{at: c.from + time.Duration(l.rng.Int64N(int64(100*time.Millisecond))), of: c})
		}
	}
}

// run plays until then; what is measured is measured from since on.
func (l *loop) run(callers []*caller, since, until time.Duration) {
	l.since = since
	l.add(callers...)
	for now := time.Duration(0); now < until; now += 50 * time.Millisecond {
		for len(l.queue) > 0 && l.queue[0].at <= now {
			e := heap.Pop(&l.queue).(event)
			l.clock.at.Store(int64(e.at))
			l.handle(e)
		}
		l.clock.at.Store(int64(now))
		states := l.Step(l.clock.now(), []PoolView{{Name: "p", Limit: l.limit, InFlight: l.live}})
		if now >= since {
			if l.see != nil {
				l.see(states[0])
			}
			l.lives = append(l.lives, float64(l.live))
			for _, c := range callers {
				l.shares[c] += float64(c.live)
			}
			for i, n := range l.byLevel {
				l.levels[i] += float64(n)
			}
		}
	}
	for _, c := range callers {
		l.shares[c] /= float64(len(l.lives))
	}
	for i := range l.levels {
		l.levels[i] /= float64(len(l.lives))
	}
}

func (l *loop) handle(e event) {
	c := e.of
	if e.beats != "" {
		l.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: e.beats, Attempt: 1, At: l.clock.now()})
		if l.claims.known(e.beats) {
			heap.Push(&l.queue, event{at: e.at + 10*time.Second, of: c, beats: e.beats})
		}
		return
	}
	if e.ends != "" && e.told {
		if c.fails {
			l.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: e.ends, Code: 400, Cause: fleet.CauseClientError, At: l.clock.now()})
		} else {
			l.end(e.ends)
		}
		l.live--
		return
	}
	if e.ends != "" {
		told := e
		told.told = true
		if l.lag == 0 {
			l.handle(told)
		} else {
			told.at += l.lag/6 + time.Duration(l.rng.Int64N(int64(l.lag)))
			heap.Push(&l.queue, told)
		}
		c.live--
		l.byLevel[c.level]--
		c.last = e.at
		if e.at >= l.since {
			c.ended++
		}
		if c.tries > 0 || c.every > 0 {
			return
		}
		heap.Push(&l.queue, event{at: e.at + l.about(c.think), of: c})
		return
	}
	if c.every > 0 && e.held == nil {
		heap.Push(&l.queue, event{at: e.at + c.every, of: c})
	}
	if c.foreign {
		l.enterForeign(e)
		return
	}
	a := l.ask(c.name)
	a.Class, a.Level, a.Retry, a.Seed = c.class, c.level, e.retry, l.rng.Uint64()
	if a.Counts = !c.blind && (!c.waits || c.counts); !a.Counts {
		a.Retry = 0
	}
	if c.class == 0 {
		a.Class = fleet.ClassInteractive
	}
	if l.whole {
		a.Output = c.level.UpperBudget()
	}
	var r Refusal
	if e.held == nil && e.retry > 0 {
		l.returns++
	}
	switch v := l.try(&e, &a); {
	case v.Held:
		return
	case v.Admitted:
		if e.at >= l.since {
			c.admitted++
		}
		c.live++
		l.live++
		l.byLevel[c.level]++
		takes := l.lasts[c.level]
		if c.takes > 0 {
			takes = c.takes
		}
		if l.slow > 0 && e.at >= l.slowAt {
			takes = time.Duration(float64(takes) * l.slow)
		}
		heap.Push(&l.queue, event{at: e.at + l.about(takes), of: c, ends: a.ID})
		heap.Push(&l.queue, event{at: e.at, of: c, beats: a.ID})
		return
	default:
		r = v.Refusal
		if l.live < l.places && l.places >= 10 && l.live*10 < l.places*8 && !l.blind {
			l.t.Fatalf("refused for %v with %d of %d in flight", v.Reason, l.live, l.places)
		}
	}
	if e.retry > 0 {
		l.vain++
	}
	c.longest = max(c.longest, r.RetryAfter)
	if e.retry > 0 && !c.hammers && !r.ShouldRetry {
		l.sentAway++
	}
	switch {
	case c.every > 0:
	case c.tries > 0 && (!r.ShouldRetry || e.retry == c.tries-1):
		c.stopped++
	case c.tries > 0:
		heap.Push(&l.queue, event{at: e.at + r.RetryAfter, of: c, retry: e.retry + 1})
	case c.ghost > 0:
		heap.Push(&l.queue, event{at: e.at + c.ghost, of: c})
	case c.blind:
		heap.Push(&l.queue, event{at: e.at + 50*time.Millisecond, of: c})
	case c.waits:
		if e.at >= l.since {
			l.told = append(l.told, r.RetryAfter)
			if !r.ShouldRetry {
				l.hopeless++
			}
		}
		retry := 0
		if c.counts && !c.zero {
			retry = e.retry + 1
		}
		heap.Push(&l.queue, event{at: e.at + r.RetryAfter, of: c, retry: retry})
	case c.hammers:
		heap.Push(&l.queue, event{at: e.at + 40*time.Millisecond, of: c, retry: e.retry + 1})
	case r.ShouldRetry && e.retry < 2:
		heap.Push(&l.queue, event{at: e.at + r.RetryAfter, of: c, retry: e.retry + 1})
	case c.sdk:
		if e.at >= l.since {
			c.gaveUp++
		}
		heap.Push(&l.queue, event{at: e.at + l.about(c.think+100*time.Millisecond), of: c})
	default: // an error to the program, which goes on with something else
		heap.Push(&l.queue, event{at: e.at + l.about(c.think+time.Second), of: c})
	}
}

// enterForeign takes a place of the pool past the gate.
func (l *loop) enterForeign(e event) {
	if l.live >= l.places {
		e.at += 500 * time.Millisecond
		heap.Push(&l.queue, e)
		return
	}
	e.of.live++
	l.live++
	l.byLevel[e.of.level]++
	heap.Push(&l.queue, event{at: e.at + l.about(l.lasts[e.of.level]), of: e.of, ends: "foreign"})
}

// try asks for a request's place, as package extproc does: where it holds requests,
// one that finds none is tried again for a while.
func (l *loop) try(e *event, a *Ask) Verdict {
	name := e.of.name
	for final := !l.holds; ; final = true {
		a.Hold = !final
		v := Verdict{Held: true}
		switch {
		case l.live < l.places:
			v = l.Admit(a)
		case final:
			v = Verdict{Reason: ReasonBusy, Refusal: l.Refuse(a, ReasonBusy)}
		}
		switch {
		case !v.Held, e.held != nil && e.at-e.since >= heldFor, e.held == nil && (l.held[name] >= heldMost || !l.BeginHold(a)):
			if e.held != nil {
				l.held[name]--
				l.EndHold(e.held)
				e.held = nil
			}
			if !v.Held {
				return v
			}
			continue
		case e.held == nil:
			l.held[name]++
			e.held, e.since = a, e.at
		}
		again := *e
		again.at += heldStep
		heap.Push(&l.queue, again)
		return v
	}
}

// about is a time that is exponentially distributed.
func (l *loop) about(mean time.Duration) time.Duration {
	if l.exact {
		return max(mean, time.Millisecond)
	}
	return time.Millisecond + time.Duration(l.rng.ExpFloat64()*float64(mean))
}

// busy is the mean and the 1st percentile of the places that are taken.
func (l *loop) busy() (mean, low float64) {
	for _, n := range l.lives {
		mean += n
	}
	slices.Sort(l.lives)
	return mean / float64(len(l.lives)) / float64(l.places), l.lives[len(l.lives)/100] / float64(l.places)
}

// known reports whether a claim is there.
func (t *claims) known(id string) bool {
	s := t.shardOf(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.byID[id]
	return ok
}

func TestSmallClientsGetWhatTheyWantBesideAHog(t *testing.T) {
	for _, hammers := range []bool{false, true} {
		l := newLoop(t, 50)
		hog := &caller{name: "hog", open: 100, hammers: hammers}
		callers := []*caller{hog}
		for i := range 10 {
			callers = append(callers, &caller{name: fmt.Sprint("small", i), open: 2, from: 10 * time.Second})
		}
		l.run(callers, 20*time.Second, 50*time.Second)
		small := 0.0
		for _, c := range callers[1:] {
			small += l.shares[c]
		}
		mean, low := l.busy()
		t.Logf("hammers %v: of 50 places the hog has %.1f and ten small clients %.1f of the 20 they want; busy %.2f, 1st percentile %.2f",
			hammers, l.shares[hog], small, mean, low)
		if small < 16 {
			t.Errorf("hammers %v: small clients have %.1f in flight; want nearly 20", hammers, small)
		}
		if mean < 0.85 {
			t.Errorf("hammers %v: %.2f of the pool is busy; want 0.85", hammers, mean)
		}
	}
}

// TestClientsGetTheirMaxMinShares compares what random clients have in flight,
// who all want more than there is, with the fair division of the pool.
func TestClientsGetTheirMaxMinShares(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for range 8 {
		l := newLoop(t, 60)
		var callers []*caller
		var wants []demand
		for i := range 2 + rng.IntN(7) {
			c := &caller{name: fmt.Sprint(i), open: 1 + rng.IntN(60), hammers: true, class: fleet.RequestClass(1 + rng.IntN(2))}
			callers = append(callers, c)
			wants = append(wants, demand{float64(c.open), classWeight(c.class)})
		}
		level := bisect(wants, 60)
		l.run(callers, 8*time.Second, 20*time.Second)
		for i, c := range callers {
			// A request that was sent away comes back 40 ms later, so that a client
			// has a little less open than it wants.
			want := min(wants[i].want, level*wants[i].weight)
			if got := l.shares[c]; math.Abs(got-want) > max(2, want/8) {
				t.Errorf("client %d of %v has %.1f in flight; want %.1f", i, wants, got, want)
			}
		}
	}
}

func TestClassesShareAFullPoolByTheirWeights(t *testing.T) {
	l := newLoop(t, 100)
	people := &caller{name: "people", open: 150, class: fleet.ClassInteractive, hammers: true}
	jobs := &caller{name: "jobs", open: 150, class: fleet.ClassBatch, hammers: true}
	l.run([]*caller{people, jobs}, 10*time.Second, 40*time.Second)
	t.Logf("interactive %.1f, batch %.1f of 100", l.shares[people], l.shares[jobs])
	if ratio := l.shares[people] / l.shares[jobs]; ratio < 3 || ratio > 5.5 {
		t.Errorf("interactive has %.1f times as much as batch; want about %d", ratio, interactiveWeight/batchWeight)
	}
}

// TestAWeightOfFourIsFourShares: three keys with SDKs, one of which the config gives four
// times the others' weight, want three times what there is.
func TestAWeightOfFourIsFourShares(t *testing.T) {
	l := newLoop(t, 16)
	heavy := fleet.LimitClient{ID: named("heavy").String(), Weight: 4}
	l.world = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Clients: []fleet.LimitClient{heavy}}), 16, nil)
	l.blind, l.holds = true, true
	var callers []*caller
	for name, open := range map[string]int{"heavy": 24, "one": 12, "another": 12} {
		callers = append(callers, &caller{name: name, open: open, level: 3, sdk: true, think: time.Millisecond})
	}
	l.run(callers, 40*time.Second, 240*time.Second)
	for _, c := range callers {
		want := 16.0 / 6
		if c.name == "heavy" {
			want *= 4
		}
		t.Logf("%s has %.1f places of %.1f due", c.name, l.shares[c], want)
		if math.Abs(l.shares[c]-want) > want/5 {
			t.Errorf("%s has %.1f places; want %.1f", c.name, l.shares[c], want)
		}
	}
}

func TestLoneClientOfALoneLevelHasTheWholePool(t *testing.T) {
	l := newLoop(t, 100)
	l.run([]*caller{{name: "only", open: 400}}, 10*time.Second, 40*time.Second)
	mean, low := l.busy()
	t.Logf("busy %.2f, 1st percentile %.2f", mean, low)
	if mean < 0.9 {
		t.Errorf("%.2f of the pool is busy; want 0.9", mean)
	}
}

// TestLongRequestsDoNotCrowdOutShortOnes gives long ones most of the demand.
func TestLongRequestsDoNotCrowdOutShortOnes(t *testing.T) {
	l := newLoop(t, 100)
	l.lasts[1], l.lasts[7] = 500*time.Millisecond, 20*time.Second
	var callers []*caller
	for i := range 50 {
		callers = append(callers, &caller{name: fmt.Sprint("long", i), open: 4, level: 7})
		callers = append(callers, &caller{name: fmt.Sprint("short", i), open: 1, level: 1, from: 20 * time.Second})
	}
	l.run(callers, 60*time.Second, 120*time.Second)
	t.Logf("short %.1f, long %.1f of 100", l.levels[1], l.levels[7])
	if l.levels[1] < 25 {
		t.Errorf("short requests have %.1f places; want near the 50 they ask for", l.levels[1])
	}
	if total := l.levels[1] + l.levels[7]; total < 80 {
		t.Errorf("%.1f of 100 places are taken", total)
	}
}

// TestLevelsOfOneClientShareThePool has one client ask for much more of long
// requests than there is: its share keeps nobody from its short ones, budgets of
// levels do.
func TestLevelsOfOneClientShareThePool(t *testing.T) {
	l := newLoop(t, 100)
	l.lasts[1], l.lasts[7] = 500*time.Millisecond, 20*time.Second
	l.run([]*caller{
		{name: "only", open: 200, level: 7, hammers: true}, {name: "only", open: 40, level: 1, from: 10 * time.Second},
	}, 40*time.Second, 80*time.Second)
	t.Logf("short %.1f, long %.1f of 100", l.levels[1], l.levels[7])
	if l.levels[1] < 25 || l.levels[7] < 45 {
		t.Errorf("short requests have %.1f places, long ones %.1f; want near 40 and 60", l.levels[1], l.levels[7])
	}
}

func TestRequestsThatWereNotAdmittedHereTakeRoom(t *testing.T) {
	w := newWorld(config(), 100, nil)
	view := func(inFlight int) PoolState {
		w.clock.advance(50 * time.Millisecond)
		return w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, InFlight: inFlight}})[0]
	}
	for range 10 {
		a := w.ask("a")
		w.Admit(&a)
	}
	b := w.ask("b")
	w.Refuse(&b, ReasonBusy)
	if st := view(100); st.Share != 9.0/interactiveWeight {
		t.Errorf("share %v; want what the 90 of others and b leave", st.Share)
	}
	a := w.ask("a")
	if v := w.Admit(&a); v.Reason != ReasonShare || v.Refusal.Concurrency != 9 {
		t.Errorf("%+v; want a held to 9", v)
	}
	if st := view(10); !math.IsInf(st.Share, 1) {
		t.Errorf("share %v of a pool that is not full; want +Inf", st.Share)
	}
}

// TestFullPoolStaysFull bounds the swing of a pool whose clients all follow their
// advice.
func TestFullPoolStaysFull(t *testing.T) {
	l := newLoop(t, 200)
	var callers []*caller
	for i := range 300 {
		callers = append(callers, &caller{name: fmt.Sprint(i), open: 3, think: 100 * time.Millisecond})
	}
	l.run(callers, 20*time.Second, 60*time.Second)
	mean, low := l.busy()
	t.Logf("busy %.2f, 1st percentile %.2f", mean, low)
	if mean < 0.9 || low < 0.75 {
		t.Errorf("busy %.2f, 1st percentile %.2f; want it to stay full", mean, low)
	}
}

func TestPoolThatIsNotFullRefusesNobody(t *testing.T) {
	l := newLoop(t, 100)
	hog := &caller{name: "hog", open: 80}
	l.run([]*caller{hog}, 0, 10*time.Second)
	n := l.Counters().ByReason
	if n[ReasonShare]+n[ReasonLevel]+n[ReasonBusy] != 0 {
		t.Errorf("refused with 80 of 100 places taken: %v", n)
	}
}

func TestLimitOfAPoolMovesSlowly(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.limit = 10
	prev := 100.0
	for range 100 {
		got := w.tick(100 * time.Millisecond).Limit
		if got < prev*math.Pow(0.7, 0.1)-1e-9 {
			t.Fatalf("from %v to %v in 100 ms; want at most 30 %% down per second", prev, got)
		}
		prev = got
	}
	if prev != 10 {
		t.Errorf("limit %v after 10 s; want 10", prev)
	}
	w.limit = 1000
	for range 100 {
		got := w.tick(100 * time.Millisecond).Limit
		if got > max(prev*math.Pow(1.1, 0.1), prev+0.1)+1e-9 {
			t.Fatalf("from %v to %v in 100 ms; want at most 10 %% up per second", prev, got)
		}
		prev = got
	}
	w.limit = 0
	for range 600 {
		w.tick(100 * time.Millisecond)
	}
	w.limit = 100
	for range 450 {
		w.tick(100 * time.Millisecond)
	}
	if got := w.tick(0).Limit; got < 90 {
		t.Errorf("45 s after it came back from nothing the limit is %v; want 100", got)
	}
}

// TestObedientClientsHaveTheirSharesBesideABlindOne plays callers without an SDK
// beside one that comes back every 50 ms whatever it is told.
func TestObedientClientsHaveTheirSharesBesideABlindOne(t *testing.T) {
	for _, row := range []struct {
		places, blind, obedient int
		exact                   bool
	}{{2, 16, 3, false}, {8, 16, 3, false}, {32, 50, 12, false}, {2, 16, 3, true}, {8, 16, 3, true}, {32, 50, 12, true}} {
		const runs = 3 // in one run, draws decide much where there are two places
		var shares [2]float64
		busy := 0.0
		for seed := range uint64(runs) {
			l := newLoop(t, row.places)
			l.rng = rand.New(rand.NewPCG(seed, uint64(row.places)))
			l.exact, l.blind = row.exact, true
			greedy := &caller{name: "greedy", open: row.blind, blind: true}
			a := &caller{name: "a", open: row.obedient, waits: true, think: time.Millisecond}
			b := &caller{name: "b", open: row.obedient, waits: true, think: time.Millisecond}
			l.run([]*caller{greedy, a, b}, 20*time.Second, 140*time.Second)
			mean, _ := l.busy()
			busy += mean / runs
			equal := float64(greedy.ended+a.ended+b.ended) / 3
			shares[0] += float64(a.ended) / equal / runs
			shares[1] += float64(b.ended) / equal / runs
		}
		t.Logf("%d places, exact %v: a has %.2f and b %.2f of an equal share; busy %.2f", row.places, row.exact, shares[0], shares[1], busy)
		if min(shares[0], shares[1]) < 0.6 {
			t.Errorf("%d places, exact %v: %.2f of an equal share", row.places, row.exact, shares)
		}
		if busy < 0.85 {
			t.Errorf("%d places, exact %v: %.2f of the pool is busy", row.places, row.exact, busy)
		}
	}
}

// TestLoneClientWithManyParallelRequestsIsServedAtOnce sends 40 requests at once
// to 8 places of 0.65 s each, by an SDK that retries twice: 3.25 s at best.
func TestLoneClientWithManyParallelRequestsIsServedAtOnce(t *testing.T) {
	for _, row := range []struct {
		warm, exact bool
		most        time.Duration
		gaveUp      int // at most, of all runs
	}{{true, true, 4500 * time.Millisecond, 4}, {true, false, 6500 * time.Millisecond, 9}, {false, true, 6500 * time.Millisecond, 0}, {false, false, 7 * time.Second, 6}} {
		const runs = 5
		gaveUp, last := 0, time.Duration(0)
		for seed := range uint64(runs) {
			l := newLoop(t, 8)
			l.rng = rand.New(rand.NewPCG(seed, 8))
			l.exact = row.exact
			for i := range l.lasts {
				l.lasts[i] = 650 * time.Millisecond
			}
			lone := &caller{name: "lone", open: 40, level: 3, tries: 3}
			callers := []*caller{lone}
			if row.warm {
				lone.from = time.Minute
				callers = append(callers, &caller{name: "before", open: 6, level: 3, tries: 3})
			}
			l.run(callers, 0, 2*time.Minute)
			last += (lone.last - lone.from) / runs
			gaveUp += lone.stopped
			if lone.ended+lone.stopped != 40 {
				t.Errorf("%+v: %d ended", row, lone.ended)
			}
		}
		t.Logf("%+v: the last ended after %v on average, %d of %d gave up", row, last, gaveUp, 40*runs)
		if last > row.most || gaveUp > row.gaveUp {
			t.Errorf("%+v: the last ended after %v on average, %d gave up", row, last, gaveUp)
		}
	}
}

// TestCrowdsAtAColdStartAreNotSentFarAway: 24 clients on 16 places come where no
// answer has ended yet, or none of their level; answers take a tenth of a second.
func TestCrowdsAtAColdStartAreNotSentFarAway(t *testing.T) {
	for _, row := range []struct {
		name  string
		level fleet.BurstLevel
		warm  bool
		most  time.Duration
	}{
		{"cold, budgets of 255", 3, false, 4 * time.Second},
		{"cold, budgets of 2048", 6, false, 10 * time.Second},
		{"cold, budgets of 4096", 7, false, 10 * time.Second},
		{"new level, budgets of 2048", 6, true, 2 * time.Second},
	} {
		l := newLoop(t, 16)
		l.blind, l.whole = true, true
		for i := range l.lasts {
			l.lasts[i] = 100 * time.Millisecond
		}
		var callers []*caller
		from := time.Duration(0)
		if row.warm {
			from = 3 * time.Second
			for i := range 4 {
				callers = append(callers, &caller{name: fmt.Sprint("before-", i), open: 1, level: 2, think: time.Millisecond})
			}
		}
		for i := range 24 {
			callers = append(callers, &caller{name: fmt.Sprint("client-", i), open: 1, level: row.level, waits: true, counts: true, from: from, think: time.Millisecond})
		}
		l.run(callers, 0, from+10*time.Second)
		slices.Sort(l.told)
		last := l.told[len(l.told)-1]
		t.Logf("%s: %d refusals, told %v at the median, %v at most, %d without hope", row.name, len(l.told), l.told[len(l.told)/2], last, l.hopeless)
		if l.hopeless > 0 || last > row.most {
			t.Errorf("%s: told %v at most, %d times that there is no point in it; want %v at most", row.name, last, l.hopeless, row.most)
		}
	}
}

// TestCrowdsWithTwoRetriesGetThroughAColdStart: 48 requests of official SDKs come at
// once to 16 places where no answer has ended yet.
func TestCrowdsWithTwoRetriesGetThroughAColdStart(t *testing.T) {
	for takes, most := range map[time.Duration]float64{time.Second: 0.1, 3 * time.Second: 0.15, 8 * time.Second: 0.15, 15 * time.Second: 0.2} {
		gaveUp, all := 0, 0
		for seed := range uint64(5) {
			l := newLoop(t, 16)
			l.rng = rand.New(rand.NewPCG(seed, 16))
			l.blind, l.whole = true, true
			for i := range l.lasts {
				l.lasts[i] = takes
			}
			var callers []*caller
			for i := range 48 {
				callers = append(callers, &caller{name: fmt.Sprint("client-", i), open: 1, level: 5, tries: 3})
			}
			l.run(callers, 0, 2*time.Minute)
			for _, c := range callers {
				gaveUp += c.stopped
				all += c.stopped + c.ended
			}
		}
		t.Logf("answers of %v: %d of %d gave up", takes, gaveUp, all)
		if float64(gaveUp) > most*float64(all) {
			t.Errorf("answers of %v: %d of %d gave up; want %.0f %% at most", takes, gaveUp, all, 100*most)
		}
	}
}

// TestReturnsThatObeyedAreNotSentAwayForGood while places of their client's share
// become free in time: one key has more workers than places, and it is not alone.
func TestReturnsThatObeyedAreNotSentAwayForGood(t *testing.T) {
	for _, row := range []struct{ places, many, few int }{{8, 12, 3}, {64, 96, 8}} {
		l := newLoop(t, row.places)
		l.blind = true
		for i := range l.lasts {
			l.lasts[i] = 10 * time.Second
		}
		many := &caller{name: "many", open: row.many, level: 3, think: time.Millisecond}
		few := &caller{name: "few", open: row.few, level: 3, think: time.Millisecond}
		l.run([]*caller{many, few}, 0, 3*time.Minute)
		mean, _ := l.busy()
		t.Logf("%+v: %d and %d ended, %d returns sent away; busy %.2f", row, many.ended, few.ended, l.sentAway, mean)
		if l.sentAway > 0 || mean < 0.9 {
			t.Errorf("%+v: %d returns that came as told were sent away; busy %.2f", row, l.sentAway, mean)
		}
	}
}

// TestThoseThatBeganTogetherMayEndTogether: sixteen have run for five seconds, and
// none has ended. That doesn't make it minutes.
func TestThoseThatBeganTogetherMayEndTogether(t *testing.T) {
	w := newWorld(config(), 16, nil)
	for i := range 16 {
		a := w.ask(fmt.Sprint("client-", i))
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 1, At: w.clock.now()})
	}
	for range 100 {
		w.tick(50 * time.Millisecond)
	}
	a := w.ask("newcomer")
	if r := w.Refuse(&a, ReasonBusy); !r.ShouldRetry || r.RetryAfter > 5*time.Second {
		t.Errorf("told %+v; want a place in some seconds", r)
	}
}

// TestManyWorkersOfOneClientAreNotTakenForEarly: each obeys, and says how often it
// was sent away; what its siblings send first in the meantime is not its fault.
func TestManyWorkersOfOneClientAreNotTakenForEarly(t *testing.T) {
	for _, keys := range []int{1, 3} {
		var longest [2]time.Duration
		var ended [2]int
		for i, counts := range []bool{false, true} {
			l := newLoop(t, 16)
			l.lasts = [fleet.BurstLevels]time.Duration{1: 100 * time.Millisecond}
			l.blind = true
			var callers []*caller
			for k := range keys {
				callers = append(callers, &caller{name: fmt.Sprint("client", k), open: 60 / keys, level: 1, waits: true, counts: counts, think: time.Millisecond})
			}
			l.run(callers, 3*time.Second, 20*time.Second)
			slices.Sort(l.told)
			longest[i] = l.told[len(l.told)*99/100]
			for _, c := range callers {
				ended[i] += c.ended
			}
			mean, _ := l.busy()
			t.Logf("%d clients, counts %v: %d refusals, told %v at the median, %v at p99, %v at most; busy %.2f, %d ended", keys, counts, len(l.told), l.told[len(l.told)/2], longest[i], l.told[len(l.told)-1], mean, ended[i])
		}
		if longest[1] > 2*longest[0]+time.Second || ended[1]*10 < ended[0]*8 {
			t.Errorf("%d clients: who tells of retries waits %v and has %d requests served; who doesn't, %v and %d", keys, longest[1], ended[1], longest[0], ended[0])
		}
	}
}

// TestWorkersOfOneKeyAreServedInTurn: a client has more workers than there are places
// for it, all of which go on at once, and are behind an SDK that retries twice. Those
// that had an answer don't take the places that others were told to come for.
func TestWorkersOfOneKeyAreServedInTurn(t *testing.T) {
	for _, row := range []struct {
		places, many, few int
		takes             time.Duration
		most              float64 // that give up
		limit             int     // on their concurrency; the pool has as many places then as it takes
	}{
		{8, 24, 0, 100 * time.Millisecond, 0.02, 0},
		{8, 64, 0, 2 * time.Second, 0.15, 0},
		{64, 96, 0, 10 * time.Second, 0.03, 0},
		{200, 300, 0, 10 * time.Second, 0.02, 0},
		{64, 96, 8, 10 * time.Second, 0.03, 0},
		{64, 200, 8, time.Second, 0.04, 0},
		{64, 96, 96, 2 * time.Second, 0.06, 0},
		{8, 12, 3, 10 * time.Second, 0.2, 0},
		{2, 16, 0, 200 * time.Millisecond, 0.12, 0},
		{100, 10, 0, time.Second, 0.15, 4},
		{200, 80, 60, 2 * time.Second, 0.05, 50},
		{100, 30, 30, 5 * time.Second, 0.15, 8},
	} {
		gaveUp, ended, busy := [2]int{}, [2]int{}, 0.0
		for _, exact := range []bool{false, true} {
			l := newLoop(t, row.places)
			l.blind, l.holds, l.exact = true, true, exact
			for i := range l.lasts {
				l.lasts[i] = row.takes
			}
			if row.limit > 0 {
				l.world = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: row.limit}), float64(row.places), nil)
			}
			many := &caller{name: "many", open: row.many, level: 3, think: time.Millisecond, sdk: true}
			few := &caller{name: "few", open: row.few, level: 3, think: time.Millisecond, sdk: true}
			l.run([]*caller{many, few}, 20*row.takes+5*time.Second, 100*row.takes+30*time.Second)
			mean, _ := l.busy()
			if row.limit > 0 {
				mean *= float64(row.places) / float64(row.limit)
				if row.few > 0 {
					mean /= 2
				}
			}
			busy += mean / 2
			for i, c := range []*caller{many, few} {
				gaveUp[i], ended[i] = gaveUp[i]+c.gaveUp, ended[i]+c.ended
			}
		}
		t.Logf("%+v: %d of %d and %d of %d gave up; busy %.2f", row, gaveUp[0], gaveUp[0]+ended[0], gaveUp[1], gaveUp[1]+ended[1], busy)
		for i := range gaveUp {
			if all := float64(gaveUp[i] + ended[i]); float64(gaveUp[i]) > row.most*all {
				t.Errorf("%+v: %d of %v gave up; want %.0f %% at most", row, gaveUp[i], all, 100*row.most)
			}
		}
		if busy < 0.85 {
			t.Errorf("%+v: %.2f of it is busy", row, busy)
		}
	}
}

// TestWhoWasToldToComeGoesBeforeNewcomers: requests of as many clients come at random,
// more than the pool can serve.
func TestWhoWasToldToComeGoesBeforeNewcomers(t *testing.T) {
	for _, row := range []struct {
		places    int
		takes     time.Duration
		perSecond float64
		most      float64 // of those that return, in vain
	}{{16, 3 * time.Second, 8, 0.3}, {16, 3 * time.Second, 50, 0.45}, {16, 100 * time.Millisecond, 200, 0.05}, {8, 100 * time.Millisecond, 600, 0.3}, {64, 10 * time.Second, 8, 0.25}, {2, 10 * time.Second, 0.5, 1}, {4, 30 * time.Second, 0.3, 0.8}} {
		l := newLoop(t, row.places)
		l.blind, l.holds = true, true
		for i := range l.lasts {
			l.lasts[i] = row.takes
		}
		var callers []*caller
		until := 10*row.takes + 30*time.Second
		for at := time.Duration(0); at < until; at += l.about(time.Duration(float64(time.Second) / row.perSecond)) {
			callers = append(callers, &caller{name: fmt.Sprint(len(callers)), open: 1, level: 3, tries: 3, from: at})
		}
		l.run(callers, 5*row.takes+5*time.Second, until)
		mean, _ := l.busy()
		t.Logf("%+v: %d of %d returns in vain; busy %.2f", row, l.vain, l.returns, mean)
		least := 0.9
		if row.places < smallPool {
			least = 0.72 // of those who come at random few find two places or four
		}
		if float64(l.vain) > row.most*float64(l.returns) || mean < least {
			t.Errorf("%+v: %d of %d returns in vain, want %.0f %% at most; busy %.2f, want %v", row, l.vain, l.returns, 100*row.most, mean, least)
		}
	}
}

// TestWorkersOfOneKeyAreServedInTurnInAllLevels: the queue of each level goes at the
// pace of its part of the client's share.
func TestWorkersOfOneKeyAreServedInTurnInAllLevels(t *testing.T) {
	for _, row := range []struct{ places, keys, workers, levels int }{{64, 4, 96, 2}, {64, 4, 96, 4}, {16, 1, 48, 2}} {
		l := newLoop(t, row.places)
		l.blind, l.holds = true, true
		for i := range l.lasts {
			l.lasts[i] = 2 * time.Second
		}
		var callers []*caller
		for k := range row.keys {
			for level := range row.levels {
				callers = append(callers, &caller{name: fmt.Sprint("key", k), open: row.workers / row.levels, level: fleet.BurstLevel(3 + level), think: time.Millisecond, sdk: true})
			}
		}
		l.run(callers, 30*time.Second, 130*time.Second)
		mean, _ := l.busy()
		gaveUp, ended := 0, 0
		for _, c := range callers {
			gaveUp, ended = gaveUp+c.gaveUp, ended+c.ended
		}
		t.Logf("%+v: %d of %d gave up; busy %.2f", row, gaveUp, gaveUp+ended, mean)
		if float64(gaveUp) > 0.15*float64(gaveUp+ended) || mean < 0.87 {
			t.Errorf("%+v: %d of %d gave up, want 15 %% at most; busy %.2f", row, gaveUp, gaveUp+ended, mean)
		}
	}
}

// TestWorkersAreServedInTurnThoughLogsAreLate: a worker that had an answer sends its next
// request before anybody knows that its place is free.
func TestWorkersAreServedInTurnThoughLogsAreLate(t *testing.T) {
	for _, row := range []struct {
		places, workers, limit int
		takes                  time.Duration
		most                   float64 // that give up
	}{
		{8, 24, 0, 300 * time.Millisecond, 0.04}, {100, 24, 8, 300 * time.Millisecond, 0.04}, {8, 24, 0, 2 * time.Second, 0.12},
		{64, 96, 0, time.Second, 0.02}, {64, 96, 0, 10 * time.Second, 0.05}, {200, 300, 0, 5 * time.Second, 0.04},
	} {
		gaveUp, ended, busy := 0, 0, 0.0
		for _, exact := range []bool{false, true} {
			l := newLoop(t, row.places)
			if row.limit > 0 {
				l.world = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: row.limit}), float64(row.places), nil)
			}
			l.blind, l.holds, l.exact, l.lag = true, true, exact, 30*time.Millisecond
			for i := range l.lasts {
				l.lasts[i] = row.takes
			}
			c := &caller{name: "key", open: row.workers, level: 3, sdk: true, think: time.Millisecond}
			l.run([]*caller{c}, 0, 24*time.Second+20*row.takes)
			mean, _ := l.busy()
			if row.limit > 0 {
				mean *= float64(row.places) / float64(row.limit)
			}
			busy += mean / 2
			gaveUp, ended = gaveUp+c.gaveUp, ended+c.ended
		}
		t.Logf("%+v: %d of %d gave up; busy %.2f", row, gaveUp, gaveUp+ended, busy)
		if float64(gaveUp) > row.most*float64(gaveUp+ended) || busy < 0.88 {
			t.Errorf("%+v: %d of %d gave up; busy %.2f", row, gaveUp, gaveUp+ended, busy)
		}
	}
}

// TestSDKWorkersHaveTheirShareBesideWhoAsksAllTheTime: the other key's callers come back
// every 50 ms, whatever they are told, and have hundreds of slots outstanding that
// they never come for. These are nobody's demand.
func TestSDKWorkersHaveTheirShareBesideWhoAsksAllTheTime(t *testing.T) {
	l := newLoop(t, 16)
	l.blind, l.holds, l.lag = true, true, 30*time.Millisecond
	for i := range l.lasts {
		l.lasts[i] = 500 * time.Millisecond
	}
	sdk := &caller{name: "sdk", open: 24, level: 3, sdk: true, think: time.Millisecond}
	rude := &caller{name: "rude", open: 16, level: 3, blind: true, think: time.Millisecond}
	l.run([]*caller{sdk, rude}, 5*time.Second, 65*time.Second)
	mean, _ := l.busy()
	t.Logf("%d of the SDK's ended, %d gave up, told %v at most, and %d of the other's ended; busy %.2f", sdk.ended, sdk.gaveUp, sdk.longest, rude.ended, mean)
	if 10*sdk.ended < 8*rude.ended || sdk.longest > 8*time.Second || 10*sdk.gaveUp > sdk.ended || mean < 0.9 {
		t.Errorf("%d of the SDK's ended, %d gave up, told %v at most, and %d of the other's ended; busy %.2f", sdk.ended, sdk.gaveUp, sdk.longest, rude.ended, mean)
	}
}

// TestWorkersOfManyKeysAreServedInTurn: each of some keys has three workers for each
// place of its share. That many give up hardly depends on how many keys there are.
func TestWorkersOfManyKeysAreServedInTurn(t *testing.T) {
	for _, row := range []struct {
		places, keys, workers int
		fair                  bool
		most, least           float64 // that give up, and that is busy
	}{
		{8, 1, 24, true, 0.15, 0.88}, {64, 8, 24, true, 0.16, 0.9}, {128, 16, 24, true, 0.16, 0.9},
		{32, 8, 12, true, 0.23, 0.9}, {128, 32, 12, true, 0.22, 0.9}, {64, 8, 24, false, 0.1, 0.95},
	} {
		l := newLoop(t, row.places)
		cfg := config()
		cfg.Routes[0].FairShare = row.fair
		l.world = newWorld(cfg, float64(row.places), nil)
		l.blind, l.holds = true, true
		for i := range l.lasts {
			l.lasts[i] = 4 * time.Second
		}
		var callers []*caller
		for k := range row.keys {
			callers = append(callers, &caller{name: fmt.Sprint("key", k), open: row.workers, level: 3, sdk: true, think: time.Millisecond})
		}
		l.run(callers, 60*time.Second, 200*time.Second)
		gaveUp, ended, few, many := 0, 0, math.MaxInt, 0
		for _, c := range callers {
			gaveUp, ended = gaveUp+c.gaveUp, ended+c.ended
			few, many = min(few, c.ended), max(many, c.ended)
		}
		mean, _ := l.busy()
		t.Logf("%+v: %d of %d gave up, %d to %d of a key ended; busy %.2f", row, gaveUp, gaveUp+ended, few, many, mean)
		if float64(gaveUp) > row.most*float64(gaveUp+ended) || mean < row.least {
			t.Errorf("%+v: %d of %d gave up; busy %.2f", row, gaveUp, gaveUp+ended, mean)
		}
		if row.fair && 10*few < 5*many {
			t.Errorf("%+v: %d of one key ended, and %d of another", row, few, many)
		}
	}
}

// TestKeysWithLevelsOfTheirOwn are told waits as long as those that share a level.
func TestKeysWithLevelsOfTheirOwn(t *testing.T) {
	l := newLoop(t, 32)
	l.blind, l.holds = true, true
	var callers []*caller
	for i := range l.lasts {
		l.lasts[i] = 4 * time.Second
	}
	for i := range 4 {
		callers = append(callers, &caller{name: fmt.Sprint("key", i), open: 24, level: fleet.BurstLevel(1 + i), sdk: true, think: time.Millisecond})
	}
	l.run(callers, 60*time.Second, 260*time.Second)
	mean, _ := l.busy()
	for _, c := range callers {
		t.Logf("%s: %d of %d gave up, told %v at most; busy %.2f", c.name, c.gaveUp, c.gaveUp+c.ended, c.longest, mean)
		if 5*c.gaveUp > c.gaveUp+c.ended || mean < 0.88 {
			t.Errorf("%s: %d of %d gave up, told %v at most; busy %.2f", c.name, c.gaveUp, c.gaveUp+c.ended, c.longest, mean)
		}
	}
}

// TestLongOnesOfAnotherKeyAreServedInTurn: one key has short requests, another long ones.
func TestLongOnesOfAnotherKeyAreServedInTurn(t *testing.T) {
	l := newLoop(t, 64)
	l.blind, l.holds = true, true
	l.lasts[1], l.lasts[6] = 300*time.Millisecond, 8*time.Second
	short := &caller{name: "short", open: 96, level: 1, sdk: true, think: time.Millisecond}
	long := &caller{name: "long", open: 96, level: 6, sdk: true, think: time.Millisecond}
	l.run([]*caller{long, short}, 60*time.Second, 300*time.Second)
	mean, _ := l.busy()
	t.Logf("%d of %d long ones and %d of %d short ones gave up; busy %.2f", long.gaveUp, long.gaveUp+long.ended, short.gaveUp, short.gaveUp+short.ended, mean)
	if 8*long.gaveUp > long.ended || 20*short.gaveUp > short.ended || mean < 0.93 {
		t.Errorf("%d of %d long ones and %d of %d short ones gave up; busy %.2f", long.gaveUp, long.gaveUp+long.ended, short.gaveUp, short.gaveUp+short.ended, mean)
	}
}

// TestAnotherLevelLeavesNoPlacesEmpty: a batch client asks for more than its share, in
// another level than all others.
func TestAnotherLevelLeavesNoPlacesEmpty(t *testing.T) {
	for _, row := range []struct {
		keys, workers, small int
		takes                time.Duration
	}{{8, 24, 40, 400 * time.Millisecond}, {8, 24, 40, 4 * time.Second}, {1, 192, 10, 4 * time.Second}} {
		l := newLoop(t, 64)
		l.blind, l.holds = true, true
		for i := range l.lasts {
			l.lasts[i] = row.takes
		}
		var callers []*caller
		for k := range row.keys {
			callers = append(callers, &caller{name: fmt.Sprint("key", k), open: row.workers, level: 3, sdk: true, think: time.Millisecond})
		}
		small := 0.0
		for k := range row.small {
			callers = append(callers, &caller{name: fmt.Sprint("small", k), open: 1, level: 3, sdk: true, think: 5 * row.takes})
		}
		batch := &caller{name: "batch", open: 16, level: 5, class: fleet.ClassBatch, sdk: true, think: time.Millisecond}
		l.run(append(callers, batch), 20*time.Second+10*row.takes, 60*time.Second+50*row.takes)
		for _, c := range callers[row.keys:] {
			small += float64(c.ended) / float64(c.ended+c.gaveUp) / float64(row.small)
		}
		mean, _ := l.busy()
		t.Logf("%+v: busy %.2f, batch has %.1f, %.2f of the small clients' operations ended", row, mean, l.shares[batch], small)
		if mean < 0.88 || l.shares[batch] < 1 || l.shares[batch] > 14 || small < 0.95 {
			t.Errorf("%+v: busy %.2f, batch has %.1f, %.2f of the small clients' operations ended", row, mean, l.shares[batch], small)
		}
	}
}

// TestCrowdsOfFewClientsEndSoon: 24 calls come at once to eight places of a second, of
// some keys, and wait as they are told. Answers take different times; five seconds are
// about the best there is, and the line is paced for newcomers, who do not come here.
func TestCrowdsOfFewClientsEndSoon(t *testing.T) {
	for _, counts := range []bool{false, true} {
		for _, keys := range []int{1, 2, 3, 4, 24} {
			const runs = 5
			last, longest := time.Duration(0), time.Duration(0)
			for seed := range uint64(runs) {
				l := newLoop(t, 8)
				l.rng = rand.New(rand.NewPCG(seed, 8))
				l.blind, l.holds = true, true
				callers := []*caller{{name: "before", open: 4, level: 3, tries: 1}}
				for k := range keys {
					callers = append(callers, &caller{name: fmt.Sprint("key", k), open: 24 / keys, level: 3, from: 20 * time.Second, tries: 100, waits: true, counts: counts})
				}
				l.run(callers, 0, 2*time.Minute)
				end := time.Duration(0)
				for _, c := range callers[1:] {
					end, longest = max(end, c.last-c.from), max(longest, c.longest)
					if c.ended != 24/keys {
						t.Errorf("%d of %d ended", c.ended, 24/keys)
					}
				}
				last += end / runs
			}
			t.Logf("counts %v, %d keys: the last ended after %v on average, nobody was told more than %v", counts, keys, last, longest)
			if last > 10*time.Second || longest > 12*time.Second {
				t.Errorf("counts %v, %d keys: the last ended after %v on average, told %v", counts, keys, last, longest)
			}
		}
	}
}

// TestWhoNeverComesBackCostsNobodyHisPlace: a client sends hundreds of first tries each
// ten seconds, and some in between, and comes for none of the slots that it is told.
func TestWhoNeverComesBackCostsNobodyHisPlace(t *testing.T) {
	for _, row := range []struct {
		places, workers int
		takes           time.Duration
	}{{64, 128, time.Second}, {64, 128, 100 * time.Millisecond}} {
		l := newLoop(t, row.places)
		l.blind, l.holds = true, true
		for i := range l.lasts {
			l.lasts[i] = row.takes
		}
		work := &caller{name: "work", open: row.workers, level: 3, sdk: true, think: time.Millisecond}
		many := &caller{name: "ghost", open: 500, level: 3, ghost: 10 * time.Second, think: 10 * time.Second}
		some := &caller{name: "ghost", open: 1, level: 3, ghost: 500 * time.Millisecond, think: time.Second}
		l.run([]*caller{work, many, some}, 30*time.Second, 100*time.Second)
		mean, _ := l.busy()
		t.Logf("%+v: busy %.2f, %d of the workers' operations ended, %d gave up", row, mean, work.ended, work.gaveUp)
		if mean < 0.93 || 10*work.gaveUp > work.ended {
			t.Errorf("%+v: busy %.2f, %d of the workers' operations ended, %d gave up", row, mean, work.ended, work.gaveUp)
		}
	}
}

// TestCallersWithoutTheHeaderLeaveTheirSiblingsSome: one key has workers behind an SDK
// and others that say nothing of their tries.
func TestCallersWithoutTheHeaderLeaveTheirSiblingsSome(t *testing.T) {
	l := newLoop(t, 8)
	l.blind, l.holds = true, true
	for i := range l.lasts {
		l.lasts[i] = 2 * time.Second
	}
	sdk := &caller{name: "key", open: 16, level: 3, sdk: true, think: time.Millisecond}
	plain := &caller{name: "key", open: 8, level: 3, waits: true, think: time.Millisecond}
	l.run([]*caller{sdk, plain}, 30*time.Second, 200*time.Second)
	mean, _ := l.busy()
	t.Logf("%d of the SDK's operations ended and %d gave up, %d of the others ended; busy %.2f", sdk.ended, sdk.gaveUp, plain.ended, mean)
	if mean < 0.9 || 3*sdk.ended < plain.ended || plain.ended < 100 || sdk.gaveUp > sdk.ended {
		t.Errorf("%d of the SDK's operations ended and %d gave up, %d of the others ended; busy %.2f", sdk.ended, sdk.gaveUp, plain.ended, mean)
	}
}
