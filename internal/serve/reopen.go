package serve

import (
	"net/http"
	"time"

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

// toldBy is what a refusal closes that is believed as it is.
func toldBy(o *fleet.Outcome) closing {
	c := closing{all: closedFor(o), guessed: o.RetryAfter == 0 || o.RetryAfter > longestClosed}
	if c.less = c.all; !c.guessed {
		c.said = c.all
	}
	return c
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
	// less is until when it is closed if it takes other clients than those that it told so.
	less time.Time
	// said is until when it said itself that it wants none, zero if it did not.
	said time.Time
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
		less, said := later(c.less, o.At.Add(by.less)), c.said
		if by.said > 0 {
			said = later(said, o.At.Add(by.said))
		}
		if until := o.At.Add(by.all); until.After(c.until) {
			*c = closure{until: until, guessed: by.guessed}
		}
		c.less, c.said = less, said
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

// doubt takes that it serves others than those that it told to stay away.
func (c *closure) doubt(now time.Time) {
	if c.closed(now) && c.less.Before(c.until) {
		c.until, c.guessed = later(c.less, now), true
	}
}

func (c *closure) closed(now time.Time) bool { return now.Before(c.until) }

// open is from when on more than one may ask, as far as it is known. Where the endpoint
// said itself when it wants requests again, it is that time at the latest.
func (c *closure) open() time.Time {
	if !c.guessed {
		return c.until.Add(reopenEarly)
	}
	open := c.until.Add(unasked)
	switch {
	case !c.answered.IsZero():
		open = c.answered
	case !c.asked.IsZero():
		open = c.asked.Add(reopenEarly)
	}
	if said := c.said.Add(reopenEarly); !c.said.Before(c.until) && said.Before(open) {
		open = said
	}
	return open
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
