package plan

import (
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Advice is what a refused client is told.
type Advice struct {
	// RetryAfter is 1 ms … 60 s, a whole number of milliseconds, different for
	// each refused request.
	RetryAfter time.Duration
	// RecommendedConcurrency ≥ 1 is how many requests the client should have in
	// flight.
	RecommendedConcurrency int
}

const (
	maxRetryAfter = 60 * time.Second
	// tokenTime is the assumed time per output token of a server at its limit:
	// 25 ms, a usual target for inter-token latency; an H100 with an 8B model
	// reaches it at a batch of about 212 (ML.ENERGY leaderboard: 6.91 ms +
	// 0.0852 ms per request in the batch).
	tokenTime = 25 * time.Millisecond
	// assumedCallers share what a chain can hold, as long as callers are not
	// told apart.
	assumedCallers = 8
	// unlimitedInFlight stands for an endpoint without a limit: the default
	// limit of a pool.
	unlimitedInFlight = 256
	// adviceSample is how many endpoints of a pool are asked for their load.
	adviceSample = 16
)

// routeAdvice is the part of the advice that doesn't depend on the moment.
type routeAdvice struct {
	concurrency int
	residence   time.Duration
}

// compileAdvice precomputes a route's part.
func compileAdvice(r *route, pools []PoolInput) routeAdvice {
	room := 0.0
	counted := make(map[PoolID]bool)
	for _, id := range r.chains[0] {
		if counted[id] {
			continue
		}
		counted[id] = true
		for _, e := range pools[id].Endpoints {
			if e.weight() <= 0 {
				continue
			}
			room += e.capacity()
		}
	}
	// At least one token, and no more than makes a minute: budgets come from a
	// configuration file and may be absurd.
	tokens := min(max(r.info.DefaultBudget, 1), fleet.Tokens(maxRetryAfter/tokenTime))
	return routeAdvice{
		concurrency: max(1, int(room/assumedCallers)),
		residence:   time.Duration(tokens) * tokenTime,
	}
}

// Advice computes what to tell a client whose request is refused.
//
// RecommendedConcurrency = max(1, ⌊Σ limit·(1−risk) / 8⌋) over the endpoints of
// weight > 0 of the route's chain: what the chain can hold, shared by eight
// callers. It doesn't depend on the request.
//
// RetryAfter is uniform in [W/16, W/2] · ρ, clamped to 1 ms … 60 s, where W is
// the time a request of the route's default budget takes at 25 ms per token and
// ρ = in flight / limit, at least ½ and at most 4, of up to 16 endpoints per
// pool. By Little's law the slots of a chain turn over once per W, so within
// W/2 about half of them become free, and refused clients come back spread over
// that time, not at once: the SDKs add no jitter of their own to a delay that a
// server gives. With the default budget of 512 tokens that is 0.8 … 6.4 s at
// ρ = 1, below the 8 s that some SDK versions accept.
func (p *Plan) Advice(c Class, live Live, seed uint64) Advice {
	r := p.route(c.Route)
	if r == nil {
		return Advice{RetryAfter: time.Second, RecommendedConcurrency: 1}
	}
	if live == nil {
		live = idle{}
	}
	rng := newDraws(seed ^ golden) // other draws than those of the decision
	load := min(max(p.load(r, &rng, live), 0.5), 4)
	window := float64(r.advice.residence) * load
	spread := float64(rng.next()>>11) / (1 << 53)
	wait := time.Duration(window * (1.0/16 + spread*(1.0/2-1.0/16)))
	wait = min(max(wait.Round(time.Millisecond), time.Millisecond), maxRetryAfter)
	return Advice{RetryAfter: wait, RecommendedConcurrency: r.advice.concurrency}
}

// load is what is in flight over what may be, over a sample of the chain's
// limited endpoints.
func (p *Plan) load(r *route, rng *draws, live Live) float64 {
	var inFlight, limit int64
	for _, id := range r.chains[0] {
		pl := &p.pools[id]
		n := len(pl.endpoints)
		if n == 0 {
			continue
		}
		start := rng.below(n)
		for k := range min(n, adviceSample) {
			e := &pl.endpoints[(start+k)%n]
			if e.max > 0 {
				inFlight += int64(live.InFlight(e.slot))
				limit += int64(e.max)
			}
		}
	}
	if limit == 0 {
		return 1
	}
	return float64(inFlight) / float64(limit)
}
