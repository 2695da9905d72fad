package serve

import (
	"net/http"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// plainThrottle is how long an endpoint counts as full that answered 429 or
	// 529 without a time to wait: what its callers are told then.
	plainThrottle = time.Second
	// longestClosed bounds what an endpoint is believed; then one request asks
	// again.
	longestClosed = time.Minute
	// shortestClosed is how long it counts as full at least: a tick.
	shortestClosed = 50 * time.Millisecond
)

// closedFor is how long, from the arrival of the log entry on, an endpoint that
// answered so wants no requests. A 503 counts only with a time to wait: without
// one it may be that request's alone. The entry came later than the answer, and
// the plan opens the endpoint at a tick: a caller that comes back exactly when it
// was told must find it open.
func closedFor(o *fleet.Outcome) time.Duration {
	wait := o.RetryAfter
	switch o.Code {
	case http.StatusTooManyRequests, fleet.StatusOverloaded:
		if wait == 0 {
			wait = plainThrottle
		}
	case http.StatusServiceUnavailable:
		if wait == 0 {
			return 0
		}
	default:
		return 0
	}
	return max(shortestClosed, min(wait, longestClosed)-reopenEarly)
}

const (
	// othersFor is how long a client that was served shows that a server takes requests of
	// others than the one that it told to stay away, or that breaks it.
	othersFor = time.Minute
	// lone, doubled for each client after the first, is how long an endpoint counts as full
	// at most that told several; mostTurned are told apart.
	lone       = plainThrottle - reopenEarly
	mostTurned = 7
)

// closing is what the end of an attempt closes, and for how long; 0 is nothing.
type closing struct {
	all     time.Duration // the endpoint, for everybody
	guessed bool          // that is a guess
	asker   time.Duration // the pool, for who asked
}

// closes is what the end of an attempt closes: the endpoint for all, as long as it said. But
// providers limit each key for itself: a 429 may be for the asker alone, and would shut all
// others out. So where the pool has no other server (alone) and another client was served
// there of late, the asker is kept out of the pool for that time. Others are for two seconds
// if another one was told so too since then, for four if a third was, and so on.
//
// Of several servers in a pool one sheds load for itself, and the others take who was sent
// away.
func (t *tracker) closes(o *fleet.Outcome, asker admission.Client, alone bool) closing {
	told := closing{all: closedFor(o), guessed: o.RetryAfter == 0 || o.RetryAfter > longestClosed}
	if told.all == 0 || o.Code != http.StatusTooManyRequests || asker == (admission.Client{}) || !alone {
		return told
	}
	n := t.tell(asker, o.At)
	if o.At.Sub(t.served.besides(asker)) >= othersFor {
		return told
	}
	c := closing{guessed: true, asker: told.all}
	if n == 1 {
		return c
	}
	if c.all = lone << (n - 1); c.all >= told.all {
		c.all, c.guessed = told.all, told.guessed
	}
	return c
}

// tell notes that a client was told to stay away, and returns how many were since one was
// served.
func (t *tracker) tell(asker admission.Client, at time.Time) int {
	if len(t.turned) == 0 {
		t.turnedAt = at
	}
	if !slices.Contains(t.turned, asker) && len(t.turned) < mostTurned {
		t.turned = append(t.turned, asker)
	}
	return len(t.turned)
}

// serves takes that a request of a client ended well. That shows that the server took it
// when its answer began; one that began before the first of those who were told shows
// nothing of after.
func (t *tracker) serves(o *fleet.Outcome, asker admission.Client) {
	began := o.At.Add(-o.Duration)
	t.served.note(asker, began.Add(o.HeaderTime))
	if began.After(t.turnedAt) {
		t.turned = t.turned[:0]
	}
}

// known reports whether a client is one of several that an endpoint serves.
func (t *tracker) known(asker admission.Client, at time.Time) bool {
	return asker != (admission.Client{}) && at.Sub(t.served.besides(asker)) < othersFor
}

// clients are the last two clients that something happened to, and when it did.
type clients struct {
	last, other     admission.Client
	lastAt, otherAt time.Time
}

// note takes what happened to a client. Times may go back: of long answers the begin counts.
func (c *clients) note(of admission.Client, at time.Time) {
	switch {
	case of == admission.Client{}: // unknown
	case of == c.last:
		c.lastAt = later(c.lastAt, at)
	case of == c.other:
		c.otherAt = later(c.otherAt, at)
	case at.After(c.lastAt):
		c.other, c.otherAt, c.last, c.lastAt = c.last, c.lastAt, of, at
	case at.After(c.otherAt):
		c.other, c.otherAt = of, at
	}
	if c.otherAt.After(c.lastAt) {
		c.other, c.otherAt, c.last, c.lastAt = c.last, c.lastAt, c.other, c.otherAt
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// besides is when it happened last to anybody but one client; zero if never.
func (c *clients) besides(one admission.Client) time.Time {
	if c.last != one {
		return c.lastAt
	}
	return c.otherAt
}

// reopenEarly is the most that a log's batch (25 ms), the plan's tick (50 ms) and
// their delays on the way add up to.
const reopenEarly = 150 * time.Millisecond

// closure is whether an endpoint takes requests that told callers to stay away: from
// until on, in steps. If it still wants none, that is known reopenEarly after the first
// asked; all that are let in until then go on to the next pool by Envoy itself, where
// nothing was kept for them. So one asks first.
type closure struct {
	until time.Time // zero if it never told
	// guessed: it did not say for how long, or for longer than it is believed. Then a
	// request has to show that it is open.
	guessed bool
	// asked is when a request first reached it after until, asker which, and answered when
	// that one ended as one that was taken; zero before.
	asked, answered time.Time
	asker           string
	// ran is what was in flight when it began to open, as of the tick that noted it.
	ran   int32
	noted bool
}

const (
	// While it opens an endpoint has a quarter of its limit beside what ran there
	// before, and twice as much each openStep.
	openPart  = 4
	openSteps = 2
	openStep  = 100 * time.Millisecond
	// unasked is how long a request is waited for that shows it to be open. Its log
	// may be away.
	unasked = 3 * time.Second
)

// outcome takes what Envoy logged of an attempt that reached the endpoint, or ended, and
// what that closes.
func (c *closure) outcome(o *fleet.Outcome, by closing) {
	switch {
	case by.all > 0:
		if until := o.At.Add(by.all); until.After(c.until) {
			*c = closure{until: until, guessed: by.guessed}
		}
	case c.until.IsZero() || o.At.Before(c.until):
		// It may have begun before the endpoint closed.
	case o.Kind == fleet.AttemptStarted && c.asked.IsZero():
		c.asked, c.asker = o.At, o.ID
	case o.Kind == fleet.AttemptEnded && o.Code > 0 && o.ID == c.asker && !c.asked.IsZero() && c.answered.IsZero():
		if fleet.TurnsAway(o.Code) { // for itself alone, as it seems: another may ask
			c.asked, c.asker = time.Time{}, ""
			return
		}
		c.answered = o.At
	}
}

func (c *closure) closed(now time.Time) bool { return now.Before(c.until) }

// open is from when on more than one may ask, as far as it is known. Where the endpoint
// said itself when it wants requests again, it is that time.
func (c *closure) open() time.Time {
	switch {
	case !c.guessed:
		return c.until.Add(reopenEarly)
	case !c.answered.IsZero():
		return c.answered
	case !c.asked.IsZero():
		return c.asked.Add(reopenEarly)
	}
	return c.until.Add(unasked)
}

// limit is what the endpoint may have in flight, by its limit (0 is none) otherwise and
// what it has. While it is closed that is its limit, of which it takes nothing. It is
// called at each tick.
func (c *closure) limit(limit, inFlight int32, now time.Time) int32 {
	if c.until.IsZero() || c.closed(now) || limit == 0 {
		return limit
	}
	if !c.noted {
		c.ran, c.noted = inFlight, true
	}
	return opening(limit, c.ran, now.Sub(c.open()))
}

// opening is what an endpoint may have in flight, of a limit and beside what ran there
// before, so long after more than one may ask.
func opening(limit, ran int32, since time.Duration) int32 {
	steps := since / openStep
	switch {
	case since < 0:
		return min(limit, ran+1)
	case steps >= openSteps:
		return limit
	}
	return min(limit, ran+max(1, limit/openPart)<<steps)
}
