package admission

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// A limit on tokens reserves a request's whole budget when it enters, and has back what
// that did not use when it ends. Where budgets are far larger than answers most of what is
// used of a window is soon back: who is refused then waits for the ends of its client's own
// requests, as behind a limit on concurrency, and not for the next window. How much
// requests give back is known from those that told their usage; where none did, nobody
// waits for it. A replica knows of those alone that it let in itself.

// reservation is what a request has reserved of a limit's tokens.
type reservation struct {
	tokens fleet.Tokens
	window time.Duration
	ends   time.Duration // of the window that it has them of; 0 is none
	since  time.Duration // of the count that it is in; 0 is none
	back   fleet.Tokens  // what it gave back when it ended; less than 0 if it used more
	told   bool          // by its usage
}

// reserved is what a client's requests in flight have reserved of the window that runs.
// What they have of windows before gives nothing back to it.
type reserved struct {
	window time.Duration
	ends   time.Duration // of the window
	since  time.Duration // when this count of it began, 0 if none did
	live   int           // requests
	tokens fleet.Tokens
	// left is what the limiter told last is left of so much (limit; 0 until it tells), less
	// what was reserved and more what was given back here since then.
	left, limit int64
	// asked is what requests had reserved that told their usage, and back what of it they
	// gave back, the old ones fading.
	asked, back float64
	// wants is what those take that wait for it, on average.
	wants float64
}

// oneSettled is the weight of one request in what is given back: of the last 16 or so.
const oneSettled = 1.0 / 16

const (
	// keptLonger makes tokens be kept for those that were told to come for √2 times as long
	// as places of a limit on concurrency are. A choice: with 4 half as many operations are
	// given up where little is wanting, and one to two per cent fewer are served.
	keptLonger = 2
	// promisedPart is the part of a window that is promised to those that wait for it, by
	// what requests fill of it; the rest is for those that come for the first time.
	promisedPart = 0.75
)

// has reports whether a request has its tokens of that window.
func (s *reserved) has(r *reservation) bool { return r.window == s.window && r.ends == s.ends }

// add takes in a request that enters now.
func (s *reserved) add(r *reservation, now time.Duration) {
	switch same := r.window == s.window; {
	case r.ends == 0 || same && r.ends < s.ends: // none, or of a window that is over
		return
	case !same || r.ends > s.ends:
		*s = reserved{window: r.window, ends: r.ends, since: max(now, 1), asked: s.asked, back: s.back, wants: s.wants}
	}
	r.since = s.since
	s.live++
	s.tokens += r.tokens
}

// again takes in a request that was not counted for a while. The count that it was in may
// have been forgotten meanwhile, and another of the window begun.
func (s *reserved) again(r *reservation) {
	switch {
	case r.since == 0:
		return
	case s.since == 0:
		s.window, s.ends, s.since = r.window, r.ends, r.since
	case s.has(r):
		r.since = s.since
	}
	if r.since == s.since {
		s.live++
		s.tokens += r.tokens
	}
}

// drop takes a request out of flight, and in what it gave back.
func (s *reserved) drop(r *reservation) {
	if r.told {
		s.asked += float64(r.tokens) - oneSettled*s.asked
		s.back += float64(max(0, r.back)) - oneSettled*s.back
	}
	if r.since > 0 && r.since == s.since && s.live > 0 {
		s.live--
		s.tokens -= min(s.tokens, r.tokens)
		s.left += int64(r.back)
	}
}

// part is what part of reservations is given back; 0 is none, or unknown.
func (s *reserved) part() float64 {
	if s.asked == 0 {
		return 0
	}
	return s.back / s.asked
}

// teaches reports whether what was given back still tells something: not long after its
// window.
func (s *reserved) teaches(now time.Duration) bool { return s.asked > 0 && now < s.ends+idleAfter }

// awaitTokens gives a slot when there are tokens again: at the ends of the client's own
// requests, or in one of the limit's next windows. The client is locked.
func (c *client) awaitTokens(r *Refusal, b *bid, q Quota) {
	u := c.use(b.limit.Name)
	slot, ok := time.Duration(0), false
	if !c.shared { // or it would be by what others have reserved
		slot, ok = u.awaitReturns(b, q, c.gaveUp(b))
	}
	if ok {
		r.ShouldRetry, r.RetryAfter = true, whole(slot-b.now)
		return
	}
	c.nextWindow(r, b, &u.tokens, q, u.reserved.fills(b))
	if r.ShouldRetry && u.reserved.part() > 0 { // it isn't too early for those in the queue
		u.slots.lend(b.now, b.now+r.RetryAfter)
	}
}

// awaitReturns gives a slot when the client's own requests have probably given back what
// those take that wait already, and this one. It returns false where they don't before the
// window ends.
func (u *use) awaitReturns(b *bid, q Quota, last bool) (time.Duration, bool) {
	s := &u.reserved
	if !s.has(&b.reserved) {
		return 0, false
	}
	s.left, s.limit = q.Remaining, q.Limit
	part, left, cost := s.part(), float64(q.Remaining), float64(b.cost)
	gives, waiting := part*float64(s.tokens), 0.0
	for _, n := range u.slots.waiting(b.now) {
		waiting += float64(n)
	}
	// Those that wait already have given back their part by then.
	if gives <= 0 || left+gives < waiting*s.wants*(1-part)+cost {
		return 0, false
	}
	from := b.opens()
	t := u.turn(b, u.live)
	t.now, t.patience, t.last = from, min(b.patience(retryMax)-(from-b.now), s.ends-from), last
	places := b.pool.levels[b.ask.Level].shareOf(u.live, t.each, t.takes)
	t.course = u.ends.course(from, &places)
	// Those of earlier windows end first, and give nothing back to this one. One more end:
	// half of them come later than expected.
	n := float64(u.live-s.live) + math.Ceil((waiting*s.wants+cost-left)/gives*float64(s.live)) + 1
	t.queued = t.course.place(n) - from
	if b.took {
		u.slots.add(b.slot)
	}
	slot, ok := u.slot(b, &t)
	switch {
	case ok:
		s.wants += (cost - s.wants) / (waiting + 1)
	case b.took:
		u.slots.use()
	}
	return slot, ok
}

// short reports whether a request leaves the last tokens to others of its client, that were
// told to come now.
func (u *use) short(b *bid) bool {
	s := &u.reserved
	if s.limit == 0 || !s.has(&b.reserved) || !b.counts || !u.slots.polite(b) {
		return false
	}
	places := float64(max(1, u.live))
	each := span(float64(b.takes) / places)
	promised := u.slots.promised(b.now, each, keptLonger*places, allLevels, u.held, b.ask.Retry > 0)
	return promised > 0 && float64(s.left-int64(b.cost)) < float64(promised)*s.wants
}

// fills is how much of a window a request fills, on average: what it uses, and for as long
// as it runs what it gives back.
func (s *reserved) fills(b *bid) int64 {
	runs := min(1, float64(b.takes)/float64(max(1, b.rates.Tokens.Window)))
	return int64(float64(b.cost) * min(1, (1-s.part()*(1-runs))/promisedPart))
}
