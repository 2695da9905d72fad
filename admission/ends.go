package admission

import (
	"math"
	"slices"
	"sync/atomic"
	"time"
)

// ends are the times before which requests in flight hardly end: when they have run
// for as long as the shortest of their level did, of late. Answers that take the same
// time, and began together, end together; who is told to come in between comes in vain.
type ends struct {
	at []time.Duration // in order
	// apart is how many requests one of them stands for, added how many there were; of
	// more than keptEnds requests some are taken for all.
	apart, added int
}

// keptEnds bounds ends.
const keptEnds = 512

// add notes a request in flight; 0 is one of which nothing is known.
func (e *ends) add(at time.Duration) {
	e.apart = max(1, e.apart)
	if e.added++; at == 0 || e.added%e.apart != 0 {
		return
	}
	i, _ := slices.BinarySearch(e.at, at)
	if e.at = slices.Insert(e.at, i, at); len(e.at) == keptEnds {
		for i := range keptEnds / 2 {
			e.at[i] = e.at[2*i+1]
		}
		e.at = e.at[:keptEnds/2]
		e.apart *= 2
	}
}

// drop forgets a request, whether it was added or not.
func (e *ends) drop(at time.Duration) {
	if i, found := slices.BinarySearch(e.at, at); found {
		e.at = slices.Delete(e.at, i, i+1)
	}
	if len(e.at) < keptEnds/8 {
		e.apart = max(1, e.apart/2)
	}
}

// trim forgets what is more than so many requests in flight: one whose end was told just
// when it moved may be left.
func (e *ends) trim(live int) {
	if n := len(e.at) - max(0, live); n > 0 {
		e.at = slices.Delete(e.at, 0, n)
	}
}

// first is the time before which hardly any of so many requests in flight ends; 0 if one
// may at any time.
func (e *ends) first(live int) time.Duration {
	if len(e.at) == 0 || e.apart == 1 && len(e.at) < live {
		return 0
	}
	return e.at[0]
}

// leastRamp is over what part of an answer's time slots are spread at least of answers that
// take the same time and began at once: else all would come at once. So a share's slots are
// never given for more than a hundred times its ends.
const leastRamp = 100

// share is what places become free of.
type share struct {
	live int // requests in flight
	// each is the time between two ends of the share, on average, and takes that for
	// which one is in flight: so takes/each is how many it may have in flight.
	each, takes time.Duration
	least       time.Duration // that one takes; 0 is unknown
}

// course is how the places of a share become free.
type course struct {
	now   time.Duration
	ends  *ends
	even  bool          // one in each, whoever runs …
	from  time.Duration // … after so long
	each  float64       // ns
	known float64       // places that an end in ends is for
	pace  float64       // of the ends of which nothing is known, per ns
	ramp  time.Duration
	// round is for how many places one round is, in which all that run have ended, period
	// how long it is until the next.
	round  float64
	period time.Duration
}

// course is how places become free from now on. A request in flight ends evenly over
// takes − least from its time in e on, and so does the one that has its place after it, a
// whole takes later. So where answers take the same time their ends come as their begins
// did, and where their times are random, at an even pace.
func (e *ends) course(now time.Duration, s *share) course {
	c := course{now: now, ends: e, each: float64(s.each) / queueShare}
	if from, _ := slices.BinarySearch(e.at, now); from == len(e.at) {
		c.even = true
		return c
	}
	c.ramp = max(span(float64(s.takes-s.least)/queueShare), s.takes/leastRamp, time.Millisecond)
	c.period = s.least + c.ramp
	live := float64(max(s.live, len(e.at)))
	c.known = min(1, float64(s.takes)/float64(s.each)/live) // of one in flight: places of the share
	c.round = c.known * live
	c.pace = (c.round - c.known*float64(len(e.at))) / float64(s.takes)
	if e.apart > 1 {
		c.known, c.pace = c.round/float64(len(e.at)), 0
	}
	return c
}

// place is when the n-th place becomes free, retryFloor after now at the earliest.
func (c *course) place(n float64) time.Duration {
	if c.even {
		return max(c.now+retryFloor+span(n*c.each), c.now+retryFloor+c.from)
	}
	n = max(1, math.Round(n)) // a part of one is of others that take longer
	rounds := max(0, math.Ceil(n/c.round)-1)
	at := c.ends.nth(c.now, n-rounds*c.round, c.known, c.pace, c.ramp)
	return max(c.now+retryFloor, at+span(rounds*float64(c.period)))
}

// next is when one more place becomes free after a time.
func (c *course) next(at time.Duration) time.Duration {
	if at <= c.now {
		return c.now
	}
	if c.even {
		return at + span(c.each)
	}
	rounds := math.Floor(float64(at-c.now) / float64(c.period))
	n := rounds*c.round + c.ends.over(c.now, at-span(rounds*float64(c.period)), c.known, c.pace, c.ramp)
	return max(at, c.place(n+1))
}

// over is how many ends are over at a time; see nth.
func (e *ends) over(now, at time.Duration, weight, pace float64, ramp time.Duration) float64 {
	n := pace * float64(at-now)
	for _, end := range e.at {
		if end >= at {
			break
		}
		n += weight * min(1, float64(at-max(end, now))/float64(ramp))
	}
	return n
}

// nth is when n ends are over, of which each in e is for weight, and comes evenly within
// ramp after its time or, if that is past, from now on; others come at a pace, per ns.
func (e *ends) nth(now time.Duration, n, weight, pace float64, ramp time.Duration) time.Duration {
	at, sum, slope := now, 0.0, pace
	for begun, over := 0, 0; ; {
		next, ends := time.Duration(math.MaxInt64), false
		if begun < len(e.at) {
			next = max(e.at[begun], now)
		}
		if over < begun {
			if end := max(e.at[over], now) + ramp; end <= next {
				next, ends = end, true
			}
		}
		more := slope * float64(next-at)
		if slope > 0 && sum+more >= n-1e-6 {
			return at + span((n-sum)/slope)
		}
		switch {
		case next == math.MaxInt64:
			return at // that is all
		case ends:
			slope, over = max(pace, slope-weight/float64(ramp)), over+1
		default:
			slope, begun = slope+weight/float64(ramp), begun+1
		}
		at, sum = next, sum+more
	}
}

// answers tell how long requests of a level run that are answered well, by what logs
// told.
type answers struct {
	// Since the last step: how many ended, and their times in flight, ns: the sum, and
	// the shortest, 0 for none.
	n, sum, brief atomic.Int64

	// Of steps alone: the same of the last 1/oneRequest of them.
	ends, seconds float64
	// The shortest of the block of ends before, and of this one, of which there are so
	// many.
	before, since time.Duration
	block         int64
	// shortest of both, ns; 0 before the first end. Of answers that all take the same
	// time it is that time, of times that are distributed exponentially a twentieth of
	// their mean or so.
	shortest atomic.Int64
}

const (
	// blockOf is of how many ends the shortest is known: of the last 16 to 32.
	blockOf = 16
	// someEnds is of how many ends the mean is taken for more than a guess.
	someEnds = 4
)

// add takes in a request that ended.
func (s *answers) add(ran time.Duration) {
	ran = max(ran, 1)
	s.n.Add(1)
	s.sum.Add(int64(ran))
	for {
		brief := s.brief.Load()
		if brief != 0 && brief <= int64(ran) || s.brief.CompareAndSwap(brief, int64(ran)) {
			return
		}
	}
}

// step takes in what ended since the last one.
func (s *answers) step() {
	n, sum, brief := s.n.Swap(0), time.Duration(s.sum.Swap(0)), time.Duration(s.brief.Swap(0))
	s.ends, s.seconds = s.ends+float64(n), s.seconds+sum.Seconds()
	if lasts := s.ends * oneRequest; lasts > 1 {
		s.ends /= lasts
		s.seconds /= lasts
	}
	s.block += n
	s.since = shorter(s.since, brief)
	s.shortest.Store(int64(shorter(s.since, s.before)))
	if s.block >= blockOf {
		s.before, s.since, s.block = s.since, 0, 0
	}
}

// mean is how long they run, in seconds, with a guess as half an end, which is for twice
// of what is known at most.
func (s *answers) mean(guess float64) float64 {
	if s.ends >= someEnds {
		guess = min(guess, 2*s.seconds/s.ends)
	}
	return (s.seconds + guess/2) / (s.ends + 0.5)
}

// shorter is the smaller of two times of which 0 is none.
func shorter(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
