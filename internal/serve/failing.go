package serve

import (
	"math"
	"net/http"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

const (
	// failStreak is how many failures in a row show that an endpoint fails. As many are a
	// hard fault for the scorer.
	failStreak = 3
	// firstPause is how long nobody asks a failing endpoint, twice as long each time that
	// it failed again, longestPause at most: so long after it is well it is still left out.
	// Each time costs one request a second attempt.
	firstPause   = 250 * time.Millisecond
	longestPause = 2 * time.Second
	// longestDoubt is how long a request that asks is waited for at most; then it is
	// believed to run, or its log to be away.
	longestDoubt = 10 * time.Second
)

// failure is whether an endpoint fails, by how its last attempts ended. An attempt that
// fails gives its place back within milliseconds, and Envoy goes on with it to the next
// pool, where nothing was kept for it: a dead pool would take any number of requests. So
// where others can serve, one request at a time asks, and after a good answer the endpoint
// opens in steps, as closure does.
type failure struct {
	streak int // failStreak at most
	// by is whose request began the streak, zero where there are no others to tell apart.
	// Broken connections and 500s of one client may be its requests' doing: certain is false
	// while the streak has nothing else.
	by      admission.Client
	certain bool
	// answers is true when its failures were answers that aren't tried elsewhere.
	answers bool
	// took is how long the longest attempt of the streak lasted, longestDoubt at most.
	took time.Duration
	// since is when it was found to fail; until is when the next may ask, zero while it
	// doesn't fail.
	since, until time.Time
	pause        time.Duration
	// asked is when a request reached it after until, answered when one that came after
	// since ended well; zero before.
	asked, answered time.Time
	// tried is the first tick that saw a request there of which nothing was heard since.
	tried time.Time
	// ran is what is in flight there beside those that ask.
	ran int32
}

// outcome takes what Envoy logged of an attempt that reached the endpoint, or ended, and
// whose request it was, zero if that isn't known or nobody else was served there of late.
func (f *failure) outcome(o *fleet.Outcome, asker admission.Client) {
	f.tried = time.Time{}
	switch {
	case o.Kind == fleet.AttemptStarted:
		if f.asked.IsZero() && !o.At.Before(f.until) {
			f.asked = o.At
		}
	case failed(o):
		f.fail(o, asker)
	case worked(o):
		f.succeed(o)
	}
}

// failed reports whether the end of an attempt speaks against its endpoint: no connection,
// none to the first byte of an answer, or a server's error without a time to wait.
func failed(o *fleet.Outcome) bool {
	switch o.Cause {
	case fleet.CauseConnectFailed:
		return true
	case fleet.CauseReset:
		return o.HeaderTime == 0
	case fleet.CauseServerError:
		return o.RetryAfter == 0 && o.Code != fleet.StatusOverloaded
	}
	return false
}

// worked reports whether an attempt ended as one that the endpoint took, or refused for
// its load.
func worked(o *fleet.Outcome) bool {
	return o.Cause == fleet.CauseOK || o.Cause == fleet.CauseClientError || o.Cause == fleet.CauseThrottled
}

func (f *failure) fail(o *fleet.Outcome, asker admission.Client) {
	if f.streak == 0 {
		f.by, f.certain = asker, false
	}
	f.answers = (f.streak == 0 || f.answers) && answered500(o)
	f.certain = f.certain || o.Cause != fleet.CauseReset && !answered500(o) || asker == (admission.Client{}) || asker != f.by
	f.streak = min(f.streak+1, failStreak)
	f.took = max(f.took, min(o.Duration, longestDoubt))
	if f.streak < failStreak || !f.certain || o.At.Before(f.until) {
		return
	}
	if f.until.IsZero() {
		f.since, f.ran = o.At, math.MaxInt32
	}
	f.pause = min(max(2*f.pause, firstPause), longestPause)
	f.until = o.At.Add(f.pause)
	f.asked, f.answered = time.Time{}, time.Time{}
}

// answered500 reports whether an attempt failed by an answer that Envoy doesn't try
// elsewhere.
func answered500(o *fleet.Outcome) bool {
	return o.Cause == fleet.CauseServerError && !gatewayError(o.Code)
}

// gatewayError reports whether a status says that there is no server behind the endpoint.
func gatewayError(code int) bool {
	return code == http.StatusBadGateway || code == http.StatusServiceUnavailable || code == http.StatusGatewayTimeout
}

// succeed counts an attempt that worked. One that began before the endpoint failed, as on a
// server that stops listening and ends what it has, shows nothing.
func (f *failure) succeed(o *fleet.Outcome) {
	if !f.until.IsZero() && o.At.Add(-o.Duration).Before(f.since) {
		return
	}
	f.streak, f.pause, f.took = 0, 0, 0
	if f.answered.IsZero() {
		f.answered = o.At
	}
}

// open is from when on more than one may ask. It is zero while that isn't known.
func (f *failure) open() time.Time {
	switch {
	case !f.answered.IsZero():
		return f.answered
	case !f.asked.IsZero():
		return f.asked.Add(min(2*f.took+reopenEarly, longestDoubt))
	case !f.tried.IsZero():
		return f.tried.Add(longestDoubt)
	}
	return time.Time{}
}

// trial is whether the endpoint fails, and what it may have in flight then where others can
// serve, by its limit (0 is none) otherwise and what it has. It is called at each tick.
func (f *failure) trial(limit, inFlight int32, now time.Time) (places int32, failing bool) {
	if f.until.IsZero() {
		return 0, false
	}
	if limit == 0 {
		limit = math.MaxInt32
	}
	if open := f.open(); !open.IsZero() && !now.Before(open) {
		since := now.Sub(open)
		if since >= openSteps*openStep {
			f.until = time.Time{}
			return 0, false
		}
		return opening(limit, f.ran, since), true
	}
	f.ran = min(f.ran, inFlight)
	if now.Before(f.until) {
		f.ran = inFlight
		return 0, true
	}
	if inFlight > f.ran && f.tried.IsZero() && f.asked.IsZero() {
		f.tried = now
	}
	return min(limit, f.ran+1), true
}

// spareAnswers takes endpoints that answer 500 for such as don't fail, while others of their
// pool don't: what the requests of a pool bring about is the scorer's to tell.
func (s *scoring) spareAnswers(p *plan.PoolInput) {
	well := false
	for i := range p.Endpoints {
		e := &p.Endpoints[i]
		well = well || !e.Failing && e.Weight > 0 && e.State != fleet.StateDraining
	}
	for i := range p.Endpoints {
		e := &p.Endpoints[i]
		if well && e.Failing && s.endpoints[fleet.EndpointKey{Pool: p.Name, Address: e.Address}].fails.answers {
			e.Failing, e.Trial = false, 0
		}
	}
}
