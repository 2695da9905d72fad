package admission

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Each client has a queue of its own for each level of a pool, and one behind its own
// limit: slots are given when as many places of its share as there are requests that wait
// have probably become free; see ends. First tries that are known for such leave the places that end to those
// that wait. Without it workers of one key starve each other: whoever had an answer
// asks for the next one at once, has the place that became free by it, and those that
// were told to wait come in vain until their retries are used up (ADR 0014).
//
// Places are kept for a time before a slot. Where ends are random, a place that is
// kept for x times the mean time between two ends becomes free in time with a
// probability of 1−e⁻ˣ, and stands empty for x−1+e⁻ˣ of those times, about x²/2, on
// average. Of the s places of a share that is x²/2s of its throughput, if it happens
// for each request. So for a part p of the throughput x is √(2ps).
const (
	// queueShare is the part of a share's ends that its queue's slots are given for.
	queueShare = 0.95
	// keptOnce and keptTwice are the parts of a share's throughput that may be lost
	// by places that are kept for requests that were sent away once, and for those
	// that came as told and found none: official SDKs try two times more, and then
	// their program has an error. Choices: of 64 workers on 8 places, with answers of
	// 2 s, 7 % give up with keptTwice at 0.08, and 15 % at 0.02.
	keptOnce  = 0.01
	keptTwice = 0.08
	// keptMost bounds how many ends ahead a place is kept, lateMost how many after
	// its slot.
	keptMost = 4
	lateMost = 2
	// unreliable is from how many early returns of late on slots are not what the
	// client goes by, unless more came in their slots: nothing is kept for them among its
	// own requests. One of 25 workers that comes as it likes makes none of the others
	// unreliable.
	unreliable = 0.5
)

// ahead is for how many ends of a share a place may be kept before a slot, if that
// may cost a part of its throughput.
func ahead(share, part float64) float64 { return min(keptMost, math.Sqrt(2*part*share)) }

// queue gives a slot behind those of the client's other requests. Beside other clients
// its moment is drawn within the time of one end: those that were refused together
// would else return together, each in its own queue.
func (s *slots) queue(t *turn) (time.Duration, bool) {
	at := t.now + t.queued
	if t.drawn {
		at = max(at-spread(t.seed, min(t.each, t.queued-retryFloor)), t.first)
	}
	if at > t.now+t.patience {
		return at, false
	}
	if t.drawn {
		s.last = max(s.last, at)
		s.add(slot{at: at, last: t.last, level: t.level})
		return at, true
	}
	return s.keep(t, at, false, t.each), true
}

// waiting is how many wait, by level. Who is long overdue waits no more.
func (s *slots) waiting(now time.Duration) [fleet.BurstLevels]int32 {
	n := s.of
	for _, o := range s.due[:s.from(now-grace)] {
		n[o.level]--
	}
	return n
}

// expected is how many wait of whom it is known that they may come. Slots of requests that
// their SDKs have given up keep their places in the queue all the same: without these, of
// 24 workers on 8 places half as many more would give up, and 4 % more of the places be busy.
func (s *slots) expected(now time.Duration) int {
	n := s.later
	for _, o := range s.due[s.from(now-grace):] {
		if !o.last {
			n++
		}
	}
	return n
}

// queued is how long the queue of a level is for a share of which one ends in each:
// the time until all that wait have had a place, and one more. While levels have no
// budgets of their own, those of the others are in one queue with them.
func (a *account) queued(now time.Duration, of fleet.BurstLevel, each time.Duration, share float64) time.Duration {
	waiting := a.slots.waiting(now)
	n := float64(waiting[of] + 1)
	l := &a.pool.levels[of]
	if l.budget.Load() == math.MaxInt64 {
		for i, others := range waiting {
			if others > 0 && i != int(of) {
				n += float64(others) * float64(a.pool.levels[i].expected.Load()) / float64(max(1, l.expected.Load()))
			}
		}
	}
	c := a.course(now, of, each, share)
	return c.place(n) - now
}

// course is how places for the account become free: those of its own requests, or, where
// its next may well be one that others leave, at an even pace from their first end on.
func (a *account) course(now time.Duration, of fleet.BurstLevel, each time.Duration, share float64) course {
	if a.hopes(share) {
		first := max(0, time.Duration(a.pool.firstEnd.Load())-now-retryFloor)
		return course{now: now, even: true, each: float64(each) / queueShare, from: first}
	}
	l := &a.pool.levels[of]
	s := l.shareOf(a.live, each, a.takes(l))
	return a.ends.course(now, &s)
}

// hopes reports whether the account's next place may well be one that others leave. It is
// if nothing of the account is in flight, however small its share.
func (a *account) hopes(share float64) bool {
	return a.pool.accounts.Load() > 1 && (a.live <= 0 || float64(a.live+1) < share)
}

// firstEnd is the time before which a place for the account hardly becomes free; 0 if
// that is unknown.
func (a *account) firstEnd(share float64) time.Duration {
	if a.hopes(share) {
		return time.Duration(a.pool.firstEnd.Load())
	}
	return a.ends.first(a.live)
}

// queued is how long the queue behind a client's own requests is, of all levels.
func (u *use) queued(now time.Duration, b *bid) time.Duration {
	l := &b.pool.levels[b.ask.Level]
	n, takes := 1.0, float64(max(1, l.expected.Load()))
	for i, others := range u.slots.waiting(now) {
		n += float64(others) * float64(b.pool.levels[i].expected.Load()) / takes
	}
	c := u.course(now, b)
	return c.place(n) - now
}

// course is how places of the limit become free.
func (u *use) course(now time.Duration, b *bid) course {
	s := b.pool.levels[b.ask.Level].shareOf(u.live, u.each(b), b.takes)
	return u.ends.course(now, &s)
}

// shareOf is a share of which so many of the level are in flight, for so long each, and one
// ends in each.
func (l *level) shareOf(live int, each, takes time.Duration) share {
	s := share{live: live, each: max(1, each), takes: takes, least: l.least()}
	if l.cold.Load() > 0 {
		s.takes = max(s.takes, 2*coldLeast) // or slots of a guess would be all at once
	}
	return s
}

// span is a time of so many ns, an hour at most.
func span(ns float64) time.Duration { return time.Duration(min(ns, float64(time.Hour))) }

// insist gives a slot to a request that came as told and found no place, for which
// one will be kept longer. It is no further than the queue's end, and no further
// than one answer takes: all that run now have ended then, also where they began
// together.
func (s *slots) insist(t *turn) (time.Duration, bool) {
	wait := max(retryFloor, time.Duration(ahead(t.share, keptTwice)*float64(t.each)), min(t.takes, t.queued), t.cold)
	at := max(t.now+wait, t.course.next(s.lastFirm), t.first)
	if at > t.now+t.patience {
		return at, false
	}
	s.lastFirm = at
	s.add(slot{at: at, level: t.level, firm: true, last: t.last})
	return at, true
}

// promised is how many places are to be left to those who were told to come about
// now, of whom some are there and held; each is the time between two ends of their
// share. It counts slots of one level, or of all, and firm ones alone where the
// request was told to come itself.
func (s *slots) promised(now, each time.Duration, share float64, level fleet.BurstLevel, held int32, told bool) int64 {
	firmly := ahead(share, keptTwice)
	once, twice := time.Duration(ahead(share, keptOnce)*float64(each)), time.Duration(firmly*float64(each))
	over := min(grace, time.Duration(min(lateMost, firmly)*float64(each)))
	overdue, soon := int64(0), int64(0)
	for _, o := range s.due[s.from(now-over):] {
		if o.at > now+twice {
			break
		}
		if level != allLevels && o.level != level || told && !o.firm || !o.firm && o.at > now+once {
			continue
		}
		if o.at <= now {
			overdue++
		} else {
			soon++
		}
	}
	if told {
		held = 0
	}
	return soon + max(overdue, int64(held))
}

// allLevels stands for every level.
const allLevels = fleet.BurstLevels

// polite reports whether a request leaves places to others of its client that were
// told to come about now, and maybe are here already. Those that come for the first
// time leave them to all that wait, and those that come back for the first time to
// those that came as told before, and found none. Without a word on tries a request
// that comes before all slots of its client is not one that was told to come.
func (s *slots) polite(b *bid) bool {
	known := b.counts && b.ask.Retry <= 1 || b.ask.Retry == 0 && s.n() > 0 && b.now < s.first()
	return known && s.n() > 0 && s.obeyed(b.now)
}

// obeyed reports whether the client goes by its slots.
func (s *slots) obeyed(now time.Duration) bool {
	early := s.earliness(now)
	return early < unreliable || early < s.timeliness(now)
}

// yields reports whether a request leaves the pool's last places to others of its
// client.
func (a *account) yields(b *bid, share float64) bool {
	if !a.slots.polite(b) {
		return false
	}
	p, level := b.pool, b.ask.Level
	l := &p.levels[level]
	left := p.whole.Load() - p.inFlight() - p.expected(a)
	if budget := l.budget.Load(); budget < math.MaxInt64 {
		left = min(left, budget-l.live.Load())
	}
	if b.fair && p.full() {
		left = min(left, a.room(share))
	}
	each := a.each(level, share, p.accounts.Load() <= 1)
	promised := a.slots.promised(b.now, each, min(share, float64(p.whole.Load())), level, a.held[level], b.ask.Retry > 0)
	return promised > 0 && left <= promised
}

// defers reports whether a request of a client that has nothing in flight, and comes
// for the first time, leaves the pool's last places to others' that were told to come
// about now, or did and are held. Without it who waits has no better odds than who
// comes by chance. Only those that are held count in a pool in which a request ends
// more often than each leadMin, since slots are known by steps, and for leadMin ahead
// at least; and in a small one, of which too much would stand empty: a third of one
// place, an eighth of two.
func (a *account) defers(b *bid) bool {
	p := b.pool
	if a.live > 0 {
		return false
	}
	if a.slots.n() > 0 && b.now >= a.slots.first() && (b.ask.Retry > 0 || !b.counts) || b.ask.Retry > 0 && a.slots.owed(b.now) {
		return false // it is one of those, or may be
	}
	first := p.held.Load()
	if p.whole.Load() >= smallPool && time.Duration(p.lead.Load()) > leadMin {
		first = max(first, p.expected(a))
	}
	return first > 0 && p.inFlight()+first >= p.whole.Load()
}

// yields reports whether a request leaves the limit's last places to others of its
// client.
func (u *use) yields(b *bid) bool {
	if !b.counts || !u.slots.polite(b) {
		return false
	}
	promised := u.slots.promised(b.now, u.each(b), float64(b.cap), allLevels, u.held, b.ask.Retry > 0)
	return promised > 0 && int64(b.cap-u.live) <= promised
}

// each is the time between two ends of a client's own requests.
func (u *use) each(b *bid) time.Duration {
	return span(float64(b.takes) / float64(b.cap))
}

// own returns the client's part of a limit where the request comes for a slot that
// it was given there, and nil where it comes for one of the pool, or for none. One that
// may be a first try comes for a slot that is due.
func (c *client) own(b *bid) *use {
	if b.use == "" || b.counts && b.ask.Retry == 0 {
		return nil
	}
	u := c.use(b.limit.Name)
	if u.slots.n() == 0 || b.now < u.slots.first() && (b.ask.Retry == 0 || c.account(b.pool, b.class).slots.n() > 0) {
		return nil
	}
	return u
}

// each is the time between two ends of the account's share, of a level's requests.
// Before the step that divides the pool a share is an even part of it. Where levels have
// budgets the account has, of its share, the level's part of what waits, and of the
// budget no more than its part of what shares let into the level.
func (a *account) each(of fleet.BurstLevel, share float64, alone bool) time.Duration {
	p := a.pool
	l := &p.levels[of]
	if alone {
		return time.Duration(soloShare * float64(l.line.solo.Load()))
	}
	whole := float64(p.whole.Load())
	if math.IsInf(share, 1) {
		share = whole / float64(max(1, p.accounts.Load()))
	}
	share = min(share, whole)
	if budget := l.budget.Load(); budget < math.MaxInt64 && !p.undivided.Load() {
		mine := float64(a.slots.of[of] + 1)
		wants := mine * a.lets(share)
		share *= mine / float64(a.slots.n()+1)
		if all := math.Float64frombits(l.wanted.Load()); wants > 0 && all > wants {
			share = min(share, float64(budget)*wants/all)
		}
	}
	share = min(share*math.Float64frombits(l.gain.Load()), whole)
	return time.Duration(min(float64(a.takes(l))/max(share, 1e-3), float64(time.Hour)))
}
