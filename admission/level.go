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
	endsOver     = 5 * time.Second
	demandOver   = time.Second
	exposureOver = 30 * time.Second
	// oneRequest is the weight of one request in the means of its level.
	oneRequest = 0.02
	// hope is how long an answer is hoped to take of which nothing is known: 40
	// tokens, at perToken.
	hope = time.Second
	// Budgets are upper bounds, often far above what answers take: until one has
	// ended, answers are taken for guessShare of their budgets, and for guessMost at
	// most. A choice: refused callers wait as long beside idle servers if it is too
	// long, and come once or twice in vain if it is too short.
	guessShare = 0.25
	guessMost  = 5 * time.Second
	// coldMost bounds how long an answer is waited for while none has ended, by those that
	// came in vain for a shorter guess: it is the last time that official SDKs try. A choice.
	coldMost = 10 * time.Second
	// coldLeast is how long answers are taken to need at least until one has ended: nobody
	// is told to come before.
	coldLeast = hope / 2
	// slowest and fastest bound how far a pool's answers may be from perToken.
	slowest, fastest = 4.0, 0.01
	// looseSeconds is longer than any lease.
	looseSeconds = 32
)

// level is one burst level of a pool, or of a route for requests whose pool is
// unknown: who is in flight, what they take, and the line of those sent away.
type level struct {
	live   atomic.Int64
	budget atomic.Int64 // of live, while the pool is full
	line   line
	wanted atomic.Uint64 // the bits of wants, as of the last step
	gain   atomic.Uint64 // the bits of pool.gain, as of the last step
	// expected is how long a request is in flight, ns.
	expected atomic.Int64
	// usual is how long it is by what logs told of alone, ns, for those that nobody will
	// tell the end of; told is the same without a guess, 0 before the first end.
	usual, told atomic.Int64
	answers     answers
	// tokenTime is in which a token is generated, ns; more than 0.
	tokenTime atomic.Int64
	// cold is how long an answer may well take while none has ended, ns; else 0.
	cold atomic.Int64

	// Sums since the last step.
	ended                    atomic.Int64
	toldEnds, toldFor        atomic.Int64 // ends that logs told of, as far as they count, and time in flight, ns
	took, tookIn, tookOut    atomic.Int64 // ends that generated, and their tokens
	asked, askedIn, askedOut atomic.Int64 // admissions, and their estimates
	// loose counts requests that found no room in the table of claims, by the
	// second in which they are taken to have ended.
	loose [looseSeconds]atomic.Int64

	// Of steps alone.
	ends       float64 // per second
	demand     float64 // mean in flight
	waiting    int     // slots that are outstanding
	own        bool    // it has a budget
	wants      float64 // of those that wait, who may enter by their clients' shares
	events     float64 // ends, and …
	exposure   float64 // … the seconds in flight they came of; both over exposureOver
	meanInput  float64
	meanOutput float64
	measured   bool   // the means are of requests that ended
	recent     recent // what ended, beside what was expected to
	// knownEnds and knownSeconds are events and exposure of what logs told of alone,
	// over the last 1/oneRequest ends.
	knownEnds, knownSeconds float64
	// wary is expected by whole budgets, whatever other levels take.
	wary time.Duration
}

func (l *level) init(of fleet.BurstLevel, limit float64) {
	l.budget.Store(math.MaxInt64)
	l.gain.Store(math.Float64bits(1))
	l.expect(of, 1)
	l.lend(of, 1)
	l.pace(0, limit, 0, &l.line.tail)
}

// end counts a request that is not in flight any more.
func (l *level) end() {
	l.live.Add(-1)
	l.ended.Add(1)
}

// least is how long requests of the level run at least, 0 if that is unknown.
func (l *level) least() time.Duration {
	if l.cold.Load() > 0 {
		return coldLeast
	}
	return time.Duration(l.answers.shortest.Load())
}

// endsAfter is the time before which a request that enters now hardly ends; 0 if that is
// unknown.
func (l *level) endsAfter(now time.Duration) time.Duration {
	if least := l.least(); least > 0 {
		return now + least
	}
	return 0
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
func (l *level) step(dt time.Duration) {
	if dt > 0 {
		ended, live := float64(l.ended.Swap(0)), float64(l.live.Load())
		keep := decay(dt, endsOver)
		l.ends = l.ends*keep + ended/dt.Seconds()*(1-keep)
		keep = decay(dt, demandOver)
		l.demand = l.demand*keep + live*(1-keep)
		keep = decay(dt, exposureOver)
		l.events = l.events*keep + ended
		l.exposure = l.exposure*keep + live*dt.Seconds()
		if l.recent.slower(dt, ended, live, time.Duration(l.expected.Load())) {
			l.forget(live)
		}
	}
	l.answers.step()
	l.hear()
	l.learn()
}

// hear adds what logs told of, and keeps it for as long as they tell nothing more.
// Leases go by it: by all time in flight they would grow by themselves, since what
// nobody tells the end of is in flight for as long as its lease.
func (l *level) hear() {
	l.knownEnds += float64(l.toldEnds.Swap(0))
	l.knownSeconds += time.Duration(l.toldFor.Swap(0)).Seconds()
	if lasts := l.knownEnds * oneRequest; lasts > 1 {
		l.knownEnds /= lasts
		l.knownSeconds /= lasts
	}
}

// lend finds for how long a request counts that nobody will tell the end of: the
// mean of what logs told of, in which the whole budget counts as half an end, and
// before the first end the whole budget alone. Accounts are compared with that mean
// without the budget.
func (l *level) lend(of fleet.BurstLevel, speed float64) {
	seconds := l.output(of) * perToken.Seconds() * speed
	if l.knownEnds > 0 {
		seconds = (l.knownSeconds + seconds/2) / (l.knownEnds + 0.5)
	}
	l.usual.Store(nanoseconds(seconds))
	if l.knownEnds >= 1 {
		l.told.Store(nanoseconds(l.knownSeconds / l.knownEnds))
	}
}

// expect finds how long a request is in flight: all time in flight over the ends in
// it, which counts requests that still run as well, so that the first to end, the
// short ones, do not pass for all. A guess counts as half an end.
func (l *level) expect(of fleet.BurstLevel, speed float64) {
	whole, guess := l.output(of)*perToken.Seconds(), l.guessed(of)*speed
	if !l.measured {
		guess = min(guess, guessMost.Seconds())
	}
	byTokens := guess
	if l.answers.ends > 0 {
		whole, guess = l.answers.mean(whole), l.answers.mean(guess)
	}
	live := float64(l.live.Load())
	age := l.exposure / max(1, live)
	cold := int64(0)
	if l.answers.ends == 0 && l.events < 1 {
		least := hope.Seconds() * min(1, speed) // a small budget is no promise of a short time
		guess = max(guess, least)
		cold = nanoseconds(min(max(whole, 4*least, 2*age), coldMost.Seconds()))
	}
	l.cold.Store(cold)
	l.wary = time.Duration(nanoseconds((l.exposure + whole/2) / (l.events + 0.5)))
	seconds := (l.exposure + guess/2) / (l.events + 0.5)
	// Before any has ended that is no estimate: they may all have begun at once, and end
	// at once. They take twice as long as until now, and four times when the first end.
	switch {
	case l.events < 1:
		seconds = min(seconds, max(guess, 2*age))
	case 4*l.events < live:
		seconds = min(seconds, max(guess, byTokens, 4*age))
	}
	l.expected.Store(nanoseconds(seconds))
	l.tokenTime.Store(max(1, l.perToken()))
}

// perToken is in which a token is generated, by what answers took, ns.
func (l *level) perToken() int64 {
	if !l.measured || l.meanOutput < 1 || l.answers.ends == 0 {
		return int64(perToken)
	}
	return nanoseconds(l.answers.seconds / l.answers.ends / l.meanOutput)
}

// all are ends of late, and the seconds in flight that they came of.
func (l *level) all() (ends, seconds float64) { return l.events, l.exposure }

// known are those that logs told of last.
func (l *level) known() (ends, seconds float64) { return l.knownEnds, l.knownSeconds }

// guessed is how long a request is in flight by its tokens, at perToken, in seconds.
func (l *level) guessed(of fleet.BurstLevel) float64 {
	seconds := l.output(of) * perToken.Seconds()
	if !l.measured {
		seconds *= guessShare
	}
	return seconds
}

// output is the mean length of an answer as far as it is known, else its budget.
func (l *level) output(of fleet.BurstLevel) float64 {
	if l.meanOutput == 0 {
		return float64(of.UpperBudget())
	}
	return l.meanOutput
}

func nanoseconds(seconds float64) int64 {
	return int64(min(seconds, 24*time.Hour.Seconds()) * float64(time.Second))
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
	return over(capacity, time.Duration(l.expected.Load()))
}

func over(capacity float64, each time.Duration) float64 {
	return max(0, capacity) / max(each, time.Millisecond).Seconds()
}

// pace lets refused clients of the level return at the rate that is free for
// them. What was measured counts, and before that what the capacity would end.
func (l *level) pace(now time.Duration, capacity, newcomers float64, t *tail) {
	free, far := freeShare, longFree
	if l.cold.Load() == 0 { // else what they take is a guess
		free, far = t.free(now, newcomers)
	}
	rate := max(l.ends, l.drain(capacity))
	l.line.pace(now, free*rate, far*rate, soloShare*max(l.ends, over(capacity, l.hopeful())))
}

// hopeful is how long a request is in flight, for an account that is alone in its
// pool: without an end yet, hope or twice as long as those in flight are there on
// average. If that is too short it is the account's own requests that come in
// vain, once; budgets are often far above what answers take, and who is told the
// time of a whole budget waits beside an idle pool.
func (l *level) hopeful() time.Duration {
	if l.events >= 1 {
		return l.wary
	}
	least := hope
	if l.answers.ends > 0 {
		least = time.Duration(nanoseconds(l.answers.mean(hope.Seconds())))
	}
	age := l.exposure / max(1, float64(l.live.Load()))
	return min(l.wary, max(least, time.Duration(2*age*float64(time.Second))))
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
