package admission

import "time"

const (
	// slowerTurns is how often each request in flight must have been expected to end before
	// what ended is compared with it, slowerDue how many ends at least, and slowerSpan over
	// what time: those that begin together end together, and once in slowerTurns at least.
	slowerTurns = 2
	slowerDue   = 16
	slowerSpan  = 500 * time.Millisecond
	// slowerPart is the part of the ends expected below which servers have become slower.
	// Answers whose times are distributed exponentially never came below it in simulations
	// of ten minutes; of few in flight log-normal ones with a standard deviation of three
	// times the mean do now and then, and callers are told longer times for a while.
	slowerPart = 0.25
)

// recent is what ended of a level since some time, beside what would have by the time
// that requests were expected to be in flight.
type recent struct {
	span       time.Duration
	due, ended float64
}

// slower adds a step, and reports whether far fewer requests ended than were expected to:
// the servers have become slower, four times or more.
func (r *recent) slower(dt time.Duration, ended, live float64, expected time.Duration) bool {
	if live == 0 {
		*r = recent{}
		return false
	}
	r.span += dt
	r.ended += ended
	r.due += over(live*dt.Seconds(), expected)
	if r.span < slowerSpan || r.due < max(slowerDue, slowerTurns*live) {
		return false
	}
	few := r.ended < slowerPart*r.due
	*r = recent{}
	return few
}

// forget lets what was learned of times in flight count for no more ends than half of the
// requests in flight, and as much more as they have been there since: without it, callers
// are told for exposureOver to come when the answers of before would have ended. The rate
// of ends is of before as well.
func (l *level) forget(live float64) {
	if most := max(1, live/2); l.events > most {
		l.exposure *= most / l.events
		l.events = most
	}
	l.ends = 0
}
