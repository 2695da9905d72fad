package admission

import (
	"math"
	"sync/atomic"
	"time"
)

// Times that refused clients are told.
const (
	// retryFloor is the shortest wait: below it a client comes back before
	// anything can have changed (a tick of the plan).
	retryFloor = 50 * time.Millisecond
	// retryCap is the longest wait for a place of a pool; past it a fallback serves better.
	retryCap = 30 * time.Second
	// retryMax is the longest time that official SDKs wait as told, all of them
	// (openai-node and anthropic-python ignore more than 60 s).
	retryMax = time.Minute
	// abandoned is how long after its slot a client is waited for.
	abandoned = 5 * time.Second
	// absentAfter is how long after a slot its client is taken to want anything: more
	// than a busy client is late.
	absentAfter = time.Second
	// The line has what of the ends the newcomers, those that come for the first time, do
	// not take: their part, as of late, is left to them, and freeShare at least and
	// mostFree at most is the line's. With more than they leave slots come in vain: of
	// users with a key and one request each three times as many gave up with half of the
	// ends as with three tenths. With less a burst of many keys is told to wait for thrice
	// as long as it takes, or for longer than retryCap, beside a pool that is half idle.
	freeShare = 0.3
	mostFree  = 0.6
	// Where the line is longer than longLine it has more, up to half at longestLine: then
	// more return in vain, and fewer are told that there is no point in it.
	longFree    = 0.5
	longLine    = 5 * time.Second
	longestLine = 15 * time.Second
	// farFree is what slots past longestLine are given for, as far as newcomers leave it:
	// before others are told that there is no point in waiting.
	farFree = 0.75
	// freshOver is the time constant of the rate at which newcomers come, and the time over
	// which no more of a client count than its share ends.
	freshOver = 10 * time.Second
	// soloShare is that part where one account alone uses the pool and sends no
	// more than it was told: the rest is for ends that bunch.
	soloShare = 0.8
	// oneReturn is the weight of one slot in the share of those that return.
	oneReturn = 0.01
)

// line is a virtual queue of clients that were sent away: each gets the next
// slot, one spacing after the one before (GCRA, ITU-T I.371 Annex A). So they
// come back at the rate at which places become free for them, not all at once.
type line struct {
	tail    tail
	spacing atomic.Int64 // of slots, ns; more than 0
	far     atomic.Int64 // the same of slots that are further than longestLine away
	solo    atomic.Int64 // the same for an account that is alone in the pool
	// returned and gone count, since the last step, slots that were used and
	// slots whose clients did not come; others are returns without a slot here, as
	// of those that another pool sent away.
	returned, gone, others atomic.Int64
	// returning is ρ, the share of refused requests that come back. Of steps alone.
	returning float64
}

// tail is the end of a line.
type tail struct {
	at atomic.Int64 // the slot given last
	// laid is the widest spacing of the slots in line. Of steps alone.
	laid int64
}

// next takes the next slot from a time on, a spacing after the last, unless that would
// be later than until: then it takes none, and returns when the slot would have been.
func (t *tail) next(from, until, spacing time.Duration) (slot time.Duration, ok bool) {
	for {
		last := t.at.Load()
		slot := max(int64(from), last) + int64(spacing)
		if slot > int64(until) {
			return time.Duration(slot), false
		}
		if t.at.CompareAndSwap(last, slot) {
			return time.Duration(slot), true
		}
	}
}

// free is the part of what ends that slots behind the tail are given for, and far that
// of those past longestLine, if newcomers take such a part.
func (t *tail) free(now time.Duration, newcomers float64) (free, far float64) {
	long := float64(time.Duration(t.at.Load())-now-longLine) / float64(longestLine-longLine)
	least := freeShare + (longFree-freeShare)*min(1, max(0, long))
	return min(mostFree, max(least, 1-newcomers)), min(farFree, max(longFree, 1-newcomers))
}

// apartAt is the spacing of a slot behind those that are so far away.
func (l *line) apartAt(ahead time.Duration) time.Duration {
	if ahead > longestLine {
		return time.Duration(l.far.Load())
	}
	return time.Duration(l.spacing.Load())
}

// after moves a tail to a time that is later.
func (t *tail) after(at int64) {
	if last := t.at.Load(); last < at {
		t.at.CompareAndSwap(last, at) // else a slot was given just now
	}
}

// pace sets the spacings from the rates at which places become free for those
// that return, per second, beside others, far ahead, and where all are of one account.
func (l *line) pace(now time.Duration, free, far, solo float64) {
	if l.returning == 0 {
		l.returning = 1
	}
	if given := float64(l.returned.Load() + l.gone.Load()); given > 0 {
		came := float64(l.returned.Swap(0) + l.others.Swap(0))
		l.gone.Store(0)
		l.returning += (min(came/given, 1) - l.returning) * (1 - math.Pow(1-oneReturn, given))
	}
	l.spacing.Store(l.apart(free))
	l.far.Store(l.apart(far))
	l.solo.Store(l.apart(solo))
	l.tail.shorten(now, l.spacing.Load())
}

// apart is the spacing of slots of which so many per second are to be used, ns.
func (l *line) apart(rate float64) int64 {
	spacing := min(max(l.returning, 0.1), 1) / max(rate, 1e-3) * float64(time.Second)
	return int64(min(max(spacing, float64(time.Microsecond)), float64(time.Hour)))
}

// shorten moves up a tail that was laid with more than twice the
// spacing, as at a cold start: those that come now needn't wait behind slots that
// were given by a bad guess. With both, slots are 1½ times as dense at most.
func (t *tail) shorten(now time.Duration, spacing int64) {
	last := t.at.Load()
	ahead := last - int64(now+retryFloor)
	switch {
	case ahead <= 0, t.laid < spacing:
		t.laid = spacing
	case 2*spacing < t.laid:
		shorter := int64(now+retryFloor) + int64(float64(ahead)*float64(spacing)/float64(t.laid))
		t.at.CompareAndSwap(last, shorter) // else a slot was given just now: next time
		t.laid = spacing
	}
}
