package admission

import (
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// spent is what the limiter told last of a client's requests, where none were left.
type spent struct {
	quota Quota
	local bool
	rate  fleet.Rate    // that counted
	ends  time.Duration // of the window
	told  time.Duration // when it was told
}

// learn keeps what the limiter told. What was asked before it told that none were left
// doesn't say otherwise: answers overtake each other.
func (s *spent) learn(b *bid, got *Reservation, now time.Duration) {
	switch q := got.Requests; {
	case q.Limit <= 0:
	case q.Remaining <= 0:
		*s = spent{quota: q, local: got.Local, rate: b.rates.Requests, ends: b.now + q.Reset, told: now}
	case b.now > s.told:
		*s = spent{}
	}
}

// standing is what was told, as far as it still holds: of a window that runs.
func (s *spent) standing(b *bid) (got Reservation, ok bool) {
	if s.ends <= b.now || s.rate != b.rates.Requests {
		return Reservation{}, false
	}
	got = Reservation{Requests: s.quota, Local: s.local}
	got.Requests.Reset = s.ends - b.now
	return got, true
}

// spends reports whether a request that finds no place of the limit would find one before
// the next requests of its rate: it waits for those.
func (u *use) spends(b *bid) bool {
	if _, ok := u.spent.standing(b); !ok {
		return false
	}
	from := b.opens()
	return max(u.spent.ends, u.requests.last) > from+u.queued(from, b)
}

// promises are the slots that a client was given for one of its rates: in the windows to
// come as much of each as the limit lets in, in the order in which they were asked for.
type promises struct {
	// length is of the windows that they are in.
	length time.Duration
	// next is when the window begins that comes next, as of the last refusal.
	next time.Duration
	// window is when the one begins in which the last slot lies, of which taken is
	// promised, to n requests. last is the latest slot.
	window, last time.Duration
	taken        int64
	n            int
	// due is how many slots of the window that runs may still be used; full is how many the
	// last had that was filled.
	due, full int
}

// roll follows the windows, and reports whether a request that is refused comes too early:
// it was tried before (again), and no slot is due that might be its own. Such a one keeps
// the last slot: else one worker that asks all the time would promise the windows away
// that its siblings wait for. Windows of another length are another configuration's, and
// what was promised in those binds nobody: slots behind them would be as far away as they.
func (p *promises) roll(begins, window time.Duration, again bool) (early bool) {
	if p.length != window {
		*p = promises{length: window}
	}
	const part = 2 // clocks of Redis and here may differ by less than half a window
	if begins-p.next > window/part {
		p.due = 0
		if ran := begins - window - p.window; -window/part < ran && ran < window/part {
			p.due = p.n
		} else if ran < 0 { // slots reach further
			p.due = p.full
		}
		p.next = begins
	}
	if p.n == 0 || p.window < begins-window/part {
		p.window, p.last, p.taken, p.n = begins, 0, 0, 0
	}
	if !again || p.n == 0 {
		return false
	}
	if p.due > 0 {
		p.due--
		return false
	}
	return true
}

// promise gives a slot, no earlier than opens, to a request that takes so much of a window,
// and as far from the window's begin as what was promised before takes of it.
func (p *promises) promise(opens time.Duration, q Quota, cost int64) time.Duration {
	limit, cost := max(1, q.Limit), max(1, cost)
	for p.taken > 0 && p.taken+cost > limit || p.window+q.Window <= opens && q.Window > 0 {
		p.window, p.taken, p.n, p.full = p.window+q.Window, 0, 0, p.n
	}
	p.last = max(opens, p.window+time.Duration(float64(q.Window)*float64(p.taken)/float64(limit)))
	p.taken += min(cost, limit)
	p.n++
	return p.last
}

// spares reports whether a slot that was promised just now may be sooner than at the
// window's pace. For a request that came in vain (again) only half of a window may be
// promised then: else one worker that asks all the time would have more of each window.
func (p *promises) spares(q Quota, again bool) bool { return !again || 2*p.taken <= q.Limit }
