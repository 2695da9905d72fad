package admission

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// perToken stands for the time of one token where no time in flight was
	// measured yet: a common target of the inter-token latency.
	perToken = 25 * time.Millisecond
	// endsOver and demandOver are time constants of means over time.
	endsOver   = 5 * time.Second
	demandOver = time.Second
	// oneRequest is the weight of one request in the means of its level.
	oneRequest = 0.02
	// looseSeconds is longer than any lease.
	looseSeconds = 32
)

// level is one burst level of a pool, or of a route for requests whose pool is
// unknown: who is in flight, what they take, and the line of those sent away.
type level struct {
	live   atomic.Int64
	budget atomic.Int64 // of live, while the pool is full
	line   line
	// expected is how long a request is in flight, ns: the mean, or a guess from
	// the length of answers before there is one.
	expected atomic.Int64

	// Sums since the last step.
	ended                    atomic.Int64
	timed, resided           atomic.Int64 // ends that were seen, and their ns in flight
	took, tookIn, tookOut    atomic.Int64 // ends that generated, and their tokens
	asked, askedIn, askedOut atomic.Int64 // admissions, and their estimates
	// loose counts requests that found no room in the table of claims, by the
	// second in which they are taken to have ended.
	loose [looseSeconds]atomic.Int64

	// Of steps alone.
	ends       float64 // per second
	demand     float64 // mean in flight
	residence  float64 // ns, 0 before the first
	meanInput  float64
	meanOutput float64
	measured   bool // the means are of requests that ended
}

func (l *level) init(of fleet.BurstLevel, limit float64) {
	l.budget.Store(math.MaxInt64)
	l.expected.Store(int64(time.Duration(of.UpperBudget()) * perToken))
	l.pace(limit)
}

// end counts a request that is not in flight any more.
func (l *level) end() {
	l.live.Add(-1)
	l.ended.Add(1)
}

// sample adds how long a request was in flight that came to its end.
func (l *level) sample(inFlight time.Duration) {
	l.timed.Add(1)
	l.resided.Add(int64(inFlight))
}

// guess adds what an admitted request is expected to take.
func (l *level) guess(input, output fleet.Tokens) {
	l.asked.Add(1)
	l.askedIn.Add(int64(input))
	l.askedOut.Add(int64(output))
}

// tokens adds what a request took.
func (l *level) tokens(input, output fleet.Tokens) {
	l.took.Add(1)
	l.tookIn.Add(int64(input))
	l.tookOut.Add(int64(output))
}

// step brings rates and means up to date.
func (l *level) step(of fleet.BurstLevel, dt time.Duration) {
	if dt > 0 {
		keep := decay(dt, endsOver)
		l.ends = l.ends*keep + float64(l.ended.Swap(0))/dt.Seconds()*(1-keep)
		keep = decay(dt, demandOver)
		l.demand = l.demand*keep + float64(l.live.Load())*(1-keep)
	}
	blend(&l.residence, float64(l.resided.Swap(0)), l.timed.Swap(0))
	l.learn()
	switch {
	case l.residence > 0:
		l.expected.Store(int64(l.residence))
	case l.meanOutput > 0:
		l.expected.Store(int64(l.meanOutput * float64(perToken)))
	}
}

// learn keeps the means of tokens: of requests that ended, and of the estimates
// while there is none.
func (l *level) learn() {
	n, in, out := l.took.Swap(0), l.tookIn.Swap(0), l.tookOut.Swap(0)
	guesses, guessIn, guessOut := l.asked.Swap(0), l.askedIn.Swap(0), l.askedOut.Swap(0)
	switch {
	case n > 0:
		if !l.measured {
			l.meanInput, l.meanOutput, l.measured = 0, 0, true
		}
	case l.measured:
		return
	default:
		n, in, out = guesses, guessIn, guessOut
	}
	blend(&l.meanInput, float64(in), n)
	blend(&l.meanOutput, float64(out), n)
}

// drain is how many requests per second a capacity of so many in flight ends:
// Little's law over the expected time in flight.
func (l *level) drain(capacity float64) float64 {
	return max(0, capacity) / max(time.Duration(l.expected.Load()), time.Millisecond).Seconds()
}

// pace lets refused clients of the level return at the rate that is free for
// them. What was measured counts, and before that what the capacity would end.
func (l *level) pace(capacity float64) {
	l.line.pace(freeShare * max(l.ends, l.drain(capacity)))
}

// blend moves a mean towards the mean of n more samples; the first samples are
// the mean.
func blend(mean *float64, sum float64, n int64) {
	switch {
	case n == 0:
	case *mean == 0:
		*mean = sum / float64(n)
	default:
		*mean += (sum/float64(n) - *mean) * (1 - math.Pow(1-oneRequest, float64(n)))
	}
}

// decay is the weight that the past keeps after dt.
func decay(dt, over time.Duration) float64 { return math.Exp(-float64(dt) / float64(over)) }
