package admission

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// fullShare of its limit is where a pool counts as full: the rest is for
	// clients below their share, who then find room at once.
	fullShare = 0.9
	// leadMin and leadMax bound how long before a slot a place is kept for it.
	leadMin = 100 * time.Millisecond
	leadMax = 5 * time.Second
	// Of a pool of fewer places than smallPool one is more than fullShare leaves: it
	// is kept free only while somebody is told to come for it within soonLeads times
	// the lead. With more leads, clients that come now and then have more of the
	// pool, and more of it stands empty: of 2 places beside a client that would take
	// both, a fifth at 6 and three tenths without a bound.
	smallPool = 10
	soonLeads = 6
	// A pool's limit moves no faster than this per second, so that clients who
	// follow their share do not swing with it.
	fastestDown = 0.30
	fastestUp   = 0.10
)

// pool is what admission knows of a pool; also of a route, for its requests
// whose pool is unknown: that one is never full.
type pool struct {
	name string
	// live counts admitted requests, foreign those in flight that were not
	// admitted here, as of the last step.
	live, foreign atomic.Int64
	// fullAt is from how many in flight on the pool is full.
	fullAt atomic.Int64
	// share holds the bits of λ: what a client of weight 1 may have in flight
	// while the pool is full.
	share atomic.Uint64
	// limit in whole requests.
	whole atomic.Int64
	// undivided is true while one level alone wants the pool: its budget is all of it.
	undivided atomic.Bool
	// places is PoolView.Places.
	places atomic.Int64
	// reopens is when an endpoint wants requests again, in the gate's time; in the
	// past where any does.
	reopens atomic.Int64
	// accounts is how many accounts have slots or requests in flight.
	accounts atomic.Int64
	// due is how many requests, in thousandths, are expected to come about now to
	// whom a slot and their share give a place.
	due atomic.Int64
	// soon is how many requests may come so within soonLeads times lead.
	soon atomic.Int64
	// firstEnd is the time before which hardly any of its requests ends; 0 is unknown.
	firstEnd atomic.Int64
	// fresh is how many newcomers came since the last step.
	fresh atomic.Int64
	// takes is how long its requests are in flight on average, ns; 0 while none is.
	takes atomic.Int64
	// held is how many requests came when they were told to, and are held.
	held atomic.Int64
	// lead is for how long before a slot its place is kept, ns.
	lead   atomic.Int64
	levels [fleet.BurstLevels]level
	// tail is of the line of all levels that have no budget of their own: each alone
	// would give slots for all places of the pool.
	tail tail

	// Of steps alone.
	step      uint64  // the one it took part in last
	known     bool    // a view of it was seen
	limit     float64 // of all endpoints but those that drain
	capacity  float64 // the last PoolView.Capacity that was one
	aim       float64 // PoolView.Limit then
	away      float64 // what limit was above it, because it slews
	holds     float64 // how many requests may well be in flight now
	loosened  int64   // the second up to which loose requests were ended
	demands   []demand
	active    int
	coming    int64
	earliest  time.Duration // end of a request, see ends
	hoping    int64
	newcomers float64       // the part of what ends that those who come first would take, of late
	horizon   time.Duration // up to which slots are due about now
	farther   time.Duration // the same for soon
}

func newPool(name string, limit float64) *pool {
	p := &pool{name: name, limit: limit, holds: limit}
	p.share.Store(math.Float64bits(math.Inf(1)))
	p.fullAt.Store(math.MaxInt64)
	p.whole.Store(atLeastOne(limit))
	p.places.Store(Unbounded) // until a view tells
	for i := range p.levels {
		p.levels[i].init(fleet.BurstLevel(i), limit)
	}
	return p
}

func (p *pool) inFlight() int64 { return p.live.Load() + p.foreign.Load() }

func (p *pool) full() bool { return p.inFlight() >= p.fullAt.Load() }

// expected is how many requests of others than an account are about to come in
// slots that give them a place.
func (p *pool) expected(a *account) int64 { return max(0, p.due.Load()-a.due+500) / 1000 }

// keeps reports whether the places that are left are for others than an account,
// which has its share, or all but for the fraction of a place.
func (p *pool) keeps(a *account, share float64) bool {
	taken, expected := p.inFlight(), p.expected(a)
	if a.live == 0 || share < turnsBelow && float64(a.live) < share {
		return expected > 0 && taken+expected >= p.whole.Load()
	}
	if taken+expected < p.fullAt.Load() {
		return false
	}
	return p.whole.Load() >= smallPool || taken+expected >= p.whole.Load() || p.soon.Load() > a.soon
}

func (p *pool) waterLevel() float64 { return math.Float64frombits(p.share.Load()) }

// shareOf is what a client of a weight may have in flight while the pool is
// full; +Inf while all have what they want.
func (p *pool) shareOf(weight float64) float64 { return p.waterLevel() * weight }

// enter counts a request of a level, unless the pool is full and the level has
// its budget (which is no reason of the level's where it has the whole pool), or the
// request is unplaced and there is no place.
func (p *pool) enter(of fleet.BurstLevel, unplaced bool) Reason {
	l := &p.levels[of]
	if n := l.live.Add(1); n > l.budget.Load() && p.full() {
		l.live.Add(-1)
		if p.undivided.Load() {
			return ReasonBusy
		}
		return ReasonLevel
	}
	if places := p.places.Load(); unplaced && places != Unbounded {
		if !p.take(places) {
			l.live.Add(-1)
			return ReasonBusy
		}
		return ReasonAdmitted
	}
	p.live.Add(1)
	return ReasonAdmitted
}

// take counts a request while there is a place for it. It compares and swaps: of
// requests that were added and taken back, others would see places taken that
// are free.
func (p *pool) take(places int64) bool {
	for {
		n := p.live.Load()
		if n+p.foreign.Load() >= places {
			return false
		}
		if p.live.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// enterAgain counts a request in flight that was not counted for a while.
func (p *pool) enterAgain(of fleet.BurstLevel) {
	p.levels[of].live.Add(1)
	p.live.Add(1)
}

// leave takes back an enter without counting it as an end.
func (p *pool) leave(of fleet.BurstLevel) {
	p.levels[of].live.Add(-1)
	p.live.Add(-1)
}

// end counts the end of a request.
func (p *pool) end(of fleet.BurstLevel) {
	p.levels[of].end()
	p.live.Add(-1)
}

// slew moves the limit towards what it should be. What the config lets the endpoints
// have is meant, and no estimate: where that changes, the limit changes at once by
// what came or left, and what it was away from its aim stays, less the part of those
// that left. So it is where all drained, and are back.
func (p *pool) slew(view *PoolView, dt time.Duration) {
	if !(view.Limit >= 0) || math.IsInf(view.Limit, 1) {
		return // no number to go by
	}
	if view.Capacity < 0 {
		p.limit = 0
		return
	}
	if view.Capacity > 0 && view.Capacity != p.capacity {
		if p.capacity > 0 {
			p.aim = view.Limit
			p.away *= min(1, view.Capacity/p.capacity)
		}
		p.capacity = view.Capacity
	}
	limit := view.Limit
	if p.known {
		before := max(0, p.aim+p.away)
		down := before * math.Pow(1-fastestDown, dt.Seconds())
		// Up from nothing, a tenth of it more is nothing: one request a second is
		// always allowed.
		up := max(before*math.Pow(1+fastestUp, dt.Seconds()), before+dt.Seconds())
		limit = min(max(limit, down), up)
	}
	p.limit, p.aim, p.away, p.known = limit, view.Limit, limit-view.Limit, true
}

// begin starts a step: what clients want is gathered after it.
func (p *pool) begin(step uint64, now time.Duration) {
	p.step, p.demands, p.active, p.coming, p.hoping = step, p.demands[:0], 0, 0, 0
	p.earliest = math.MaxInt64
	lead := p.nextEnd()
	p.horizon, p.farther = now+lead, now+soonLeads*lead
	p.lead.Store(int64(lead))
	for i := range p.levels {
		p.levels[i].waiting, p.levels[i].wants = 0, 0
	}
}

// settle takes in what was gathered and a view, if there is one.
func (p *pool) settle(now, dt time.Duration, view *PoolView) {
	p.endLoose(now)
	for i := range p.levels {
		p.levels[i].step(dt)
	}
	p.meet(dt)
	speed, told := p.speed((*level).all, 0), p.speed((*level).known, 1)
	for i := range p.levels {
		p.levels[i].expect(fleet.BurstLevel(i), speed)
		p.levels[i].lend(fleet.BurstLevel(i), told)
	}
	p.accounts.Store(int64(p.active))
	p.due.Store(p.coming)
	p.soon.Store(p.hoping)
	first := int64(0)
	if p.earliest < math.MaxInt64 && p.foreign.Load() == 0 {
		first = int64(p.earliest)
	}
	p.firstEnd.Store(first)
	if view != nil {
		p.slew(view, dt)
		p.places.Store(int64(view.Places))
		p.reopens.Store(int64(now + view.Reopens))
		p.foreign.Store(max(0, int64(view.InFlight)-p.live.Load()))
		p.holds = view.holds(p.limit)
		p.whole.Store(atLeastOne(p.holds))
		p.fullAt.Store(fullAt(p.holds))
		p.divide()
	}
	p.pace(now)
}

// speed is how many times as long as guessed requests of the pool are in flight, 1
// before the first has ended. It goes by those ends of a level, and the seconds in
// flight that they came of, which are asked for; so many more count as if they had taken
// what was guessed.
func (p *pool) speed(of func(*level) (ends, seconds float64), beside float64) float64 {
	took, guessed, n := 0.0, 0.0, 0.0
	for i := range p.levels {
		l := &p.levels[i]
		if ends, seconds := of(l); ends >= 1 {
			took += seconds
			guessed += ends * l.guessed(fleet.BurstLevel(i))
			n += ends
		}
	}
	if guessed == 0 {
		return 1
	}
	beside *= guessed / n
	return min(max((took+beside)/(guessed+beside), fastest), slowest)
}

// open is the part of the limit that isn't closed. It counts at once and without
// slew: it is no estimate, and ends at a known time. Of a pool that is closed
// altogether it is all: nobody enters, and who is sent away comes back when it is
// open.
func (v *PoolView) open() float64 {
	if !(v.Closed > 0) || v.Reopens > 0 {
		return 1
	}
	return max(0, 1-v.Closed/v.Limit)
}

// holds is how many requests the pool may well have in flight now: its limit, and
// what is at endpoints that take no more. While the slewed limit still has the part of
// an endpoint that was ejected just now, that part and its requests count once.
func (v *PoolView) holds(slewed float64) float64 {
	slewed *= v.open()
	return max(slewed, min(slewed, v.Limit-v.Closed)+float64(max(0, v.Elsewhere)))
}

// fullAt is from how many in flight on a pool is full. In a small one that is at
// least one place below its limit, since the plan refuses whoever comes to none.
func fullAt(limit float64) int64 {
	return max(1, min(int64(math.Ceil(fullShare*limit)), int64(limit)-1))
}

// nextEnd is the time in which a request ends on average, between leadMin and
// leadMax: for that long before a slot a place is kept free for it, so that it
// more likely than not finds one. Places stand empty by it for half of that per
// slot; with freeShare as many slots as ends, that is 0.15 places of a pool, and 0.25 with
// mostFree.
func (p *pool) nextEnd() time.Duration {
	rate := p.rate()
	if rate == 0 {
		return leadMin
	}
	return min(max(time.Duration(float64(time.Second)/rate), leadMin), leadMax)
}

// rate is how many requests end per second.
func (p *pool) rate() float64 {
	rate := 0.0
	for i := range p.levels {
		l := &p.levels[i]
		rate += l.drain(max(l.demand, float64(l.live.Load())))
	}
	return rate
}

// meet brings up to date what part of the ends newcomers would take. Of a burst no more
// counts than twice what ends: it comes once, and all it leaves behind is the line.
func (p *pool) meet(dt time.Duration) {
	came, has := float64(max(0, p.fresh.Swap(0))), 0.0
	for i := range p.levels {
		has += p.levels[i].has()
	}
	rate := p.rate()
	p.takes.Store(nanoseconds(has / max(rate, 1e-9)))
	keep := decay(dt, freshOver)
	p.newcomers *= keep
	if ends := rate * dt.Seconds() * p.holds / max(has, 1e-9); has > 0.01 && ends > 0 { // in a full pool
		p.newcomers += min(came/ends, 2+1/ends) * (1 - keep)
	}
}

// divide finds the shares of clients and the budgets of levels.
func (p *pool) divide() {
	capacity := p.divides()
	p.share.Store(math.Float64bits(waterLevel(p.demands, capacity)))
	var wants [fleet.BurstLevels]demand
	wanting := 0
	for i := range p.levels {
		l := &p.levels[i]
		wants[i] = demand{l.has() + l.wants, 1}
		if wants[i].want > 0.01 {
			wanting++
		}
	}
	p.undivided.Store(wanting <= 1)
	budget := waterLevel(wants[:], capacity)
	for i := range p.levels {
		b := int64(math.MaxInt64)
		if !math.IsInf(budget, 1) {
			b = atLeastOne(budget)
		}
		p.levels[i].budget.Store(b)
	}
}

// has is how many of a level are in flight, or were of late.
func (l *level) has() float64 { return max(float64(l.live.Load()), l.demand) }

// want is how many of a level would be in flight if they could.
func (l *level) want() float64 { return l.has() + float64(l.waiting) }

// pace sets the pace of all lines.
func (p *pool) pace(now time.Duration) {
	for i := range p.levels {
		l := &p.levels[i]
		room, gain := p.room(l), p.gain(l)
		if b := l.budget.Load(); b < math.MaxInt64 {
			room = min(p.holds, float64(b)*gain)
		}
		l.gain.Store(math.Float64bits(gain))
		l.pace(now, room, p.newcomers, p.tailOf(fleet.BurstLevel(i)))
	}
	p.line(now)
}

// room is how many places a level that has no budget may come to have: what is free and
// what it has. Those of others end for it as well, and count by how often: where their
// requests are in flight for longer than its own, by as much less.
func (p *pool) room(l *level) float64 {
	room := max(0, p.holds-float64(p.inFlight()))
	takes := float64(max(1, l.expected.Load()))
	for i := range p.levels {
		others := &p.levels[i]
		room += float64(others.live.Load()) * min(1, takes/float64(max(1, others.expected.Load())))
	}
	return min(p.holds, max(room, p.foreignFor(l)))
}

// foreignFor is for how many places of a level those count that requests hold which were
// not admitted here, if they leave them to it. No log tells of their ends: they are taken
// to be in flight for as long as the pool's are on average, and before there are any for
// guessMost. Whether others like them come after them is not known either, so these
// places count only where there are more of them than of the others.
func (p *pool) foreignFor(l *level) float64 {
	takes := float64(p.takes.Load())
	if takes == 0 {
		takes = float64(guessMost)
	}
	return float64(p.foreign.Load()) * min(1, float64(l.expected.Load())/takes)
}

// divides is how many places clients and levels have shares of: those that foreign
// requests don't hold, but one at least, which they leave sometime.
func (p *pool) divides() float64 {
	return max(p.holds-float64(p.foreign.Load()), min(p.holds, 1))
}

// gain is how many times as many places are to come for a level as are divided, 1 or more:
// shares are of what the pool holds now, and slots of what it will.
func (p *pool) gain(l *level) float64 {
	divides := p.divides()
	return max(1, min(p.holds, p.foreignFor(l))/max(divides, 1e-3))
}

// tailOf is the end of the line in which a level's requests wait.
func (p *pool) tailOf(of fleet.BurstLevel) *tail {
	if l := &p.levels[of]; l.budget.Load() < math.MaxInt64 {
		return &l.line.tail
	}
	return &p.tail
}

// line keeps the tail of the line of all levels: its slots are as far apart as those that
// wait would have them. A level that has a budget since now takes its own out of it, and
// gives them back when it has none.
func (p *pool) line(now time.Duration) {
	spacing, waiting := 0.0, 0
	for i := range p.levels {
		l := &p.levels[i]
		l.wanted.Store(math.Float64bits(l.wants))
		apart := l.line.spacing.Load()
		spacing += float64(l.waiting) * float64(apart)
		waiting += l.waiting
		own := l.budget.Load() < math.MaxInt64
		switch {
		case own && !l.own:
			l.line.tail.after(min(int64(now+retryFloor)+int64(l.waiting)*apart, p.tail.at.Load()))
		case l.own && !own:
			p.tail.after(l.line.tail.at.Load())
		}
		l.own = own
	}
	if waiting > 0 {
		p.tail.shorten(now, int64(spacing/float64(waiting)))
	}
}

// endLoose ends the requests that found no room in the table of claims, once
// their time is over.
func (p *pool) endLoose(now time.Duration) {
	second := int64(now / time.Second)
	for s := max(p.loosened, second-looseSeconds) + 1; s <= second; s++ {
		for i := range p.levels {
			for range p.levels[i].loose[s%looseSeconds].Swap(0) {
				p.end(fleet.BurstLevel(i))
			}
		}
	}
	p.loosened = max(p.loosened, second)
}

// state tells what became of a step.
func (p *pool) state() PoolState {
	st := PoolState{Name: p.name, Limit: p.limit, Clients: p.active, Share: math.Inf(1)}
	full := p.full()
	if full {
		st.Share = p.waterLevel()
	}
	for i := range p.levels {
		st.Levels[i] = p.levels[i].state(full)
	}
	return st
}

func (l *level) state(full bool) LevelState {
	live, budget := l.live.Load(), l.budget.Load()
	st := LevelState{
		InFlight: int(live), Budget: math.Inf(1),
		MeanInput: l.meanInput, MeanOutput: l.meanOutput,
	}
	if budget == math.MaxInt64 {
		return st
	}
	st.Budget = float64(budget)
	if full && l.atBudget(budget) {
		st.Backlogged = true
		excess := l.want() - float64(budget) + 1
		rate := max(l.ends, l.drain(float64(budget)))
		st.Queue = time.Duration(max(0, min(excess/rate, time.Hour.Seconds())) * float64(time.Second))
	}
	return st
}

// atBudget reports whether the level has its budget. While more wait than would fill it,
// as much of it is enough as makes a pool full: clients' shares are rounded down, and a
// place may be kept, so that the rest stays empty for as long as they wait.
func (l *level) atBudget(budget int64) bool {
	live := l.live.Load()
	return live >= budget || live >= fullAt(float64(budget)) && l.has()+l.wants > float64(budget)
}
