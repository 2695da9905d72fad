package serve

import (
	"math"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// poolViews is what admission is told: what each pool can well hold, which is
// Σ limit · (1 − risk) over the endpoints that take requests, and what it holds.
// Work on endpoints that take no more is no work of the others: it stands on both
// sides.
func (s *scoring) poolViews(now time.Time, pools []plan.PoolInput) []admission.PoolView {
	out := make([]admission.PoolView, len(pools))
	gone, most := s.stillRunning(), map[string]int{}
	for i := range s.config.Pools {
		most[s.config.Pools[i].Name] = s.config.Pools[i].MaxInFlight
	}
	for i := range pools {
		out[i].Name = pools[i].Name
		out[i].Reopens = s.reopens(now, &pools[i])
		viewEndpoints(&out[i], pools[i].Endpoints, s.holds(&pools[i]), most[pools[i].Name], gone[pools[i].Name])
	}
	return out
}

// holds is what each endpoint of a pool may have in flight when it is open.
func (s *scoring) holds(p *plan.PoolInput) []int32 {
	out := make([]int32, len(p.Endpoints))
	for i := range out {
		e := &p.Endpoints[i]
		out[i] = e.MaxInFlight
		if t := s.endpoints[fleet.EndpointKey{Pool: p.Name, Address: e.Address}]; t != nil {
			out[i] = max(out[i], t.holds) // less while it opens
		}
	}
	return out
}

// stillRunning counts, by pool, what is in flight at endpoints that the config has no
// more, and forgets those with nothing.
func (s *scoring) stillRunning() map[string]int {
	if len(s.departed) == 0 {
		return nil
	}
	out := map[string]int{}
	for key := range s.departed {
		if n := s.ledger.InFlight(s.ledger.Slot(key)); n > 0 {
			out[key.Pool] += int(n)
		} else {
			delete(s.departed, key)
		}
	}
	return out
}

// viewEndpoints sums up the endpoints of a pool, each of which holds so many when it is
// open, and may have most in flight by the config; gone requests are at endpoints that
// it has no more.
func viewEndpoints(out *admission.PoolView, endpoints []plan.EndpointInput, holds []int32, most, gone int) {
	serving, open, left := false, false, gone
	out.InFlight, out.Elsewhere = gone, gone
	for k := range endpoints {
		e := &endpoints[k]
		out.InFlight += int(e.InFlight)
		drains := e.State == fleet.StateDraining
		serving = serving || !drains
		if drains || e.Closed {
			left += int(e.InFlight)
		} else { // Envoy's own balancing uses those of weight 0 too
			open, out.Places = true, addPlaces(out.Places, e.MaxInFlight)
		}
		if drains || e.Closed || e.Weight == 0 {
			out.Elsewhere += int(e.InFlight)
		}
		if !drains {
			out.Capacity += float64(most)
		}
		if drains || e.Weight == 0 {
			continue
		}
		calm := 1 - float64(e.Risk)
		out.Limit += float64(holds[k]) * calm
		if e.Closed {
			out.Closed += float64(holds[k]) * calm
		} else { // it may be opening
			out.Closed += float64(holds[k]-e.MaxInFlight) * calm
		}
	}
	if out.Limit == 0 {
		out.Elsewhere = 0 // there are no others
	}
	switch {
	case !serving: // Envoy goes on to the next pool by itself
		out.Places, out.Capacity = admission.Unbounded, admission.None
	case open && out.Places != admission.Unbounded:
		out.Places += left
	}
}

// addPlaces adds the limit of an endpoint, of which 0 is none.
func addPlaces(sum int, limit int32) int {
	if sum == admission.Unbounded || limit == 0 {
		return admission.Unbounded
	}
	return sum + int(limit)
}

// reopens is how long it takes until one of the pool's endpoints takes requests
// again, 0 where any does. Callers are told to come when it is open for sure.
func (s *scoring) reopens(now time.Time, p *plan.PoolInput) time.Duration {
	first := time.Duration(math.MaxInt64)
	for i := range p.Endpoints {
		e := &p.Endpoints[i]
		switch {
		case e.Weight <= 0 || e.State == fleet.StateDraining:
		case !e.Closed:
			return 0
		default:
			first = min(first, s.endpoints[fleet.EndpointKey{Pool: p.Name, Address: e.Address}].closed.until.Sub(now))
		}
	}
	if first == math.MaxInt64 {
		return 0
	}
	return first + reopenEarly
}

// retire drains the endpoints that the next configuration has no more. Where less
// than half of a pool stays and others come, it doesn't: too many requests would go
// past the pool until those are there, and then they take what Envoy sends on. It
// reports whether there are any, and the last tick without that. restore takes it back.
func (s *scoring) retire(next *fleet.Config) (restore func(), since uint64, leaving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.config
	if before == nil {
		return func() {}, 0, false
	}
	was, stay := endpointsOf(before), endpointsOf(next)
	grows := map[string]bool{}
	for key := range stay {
		if !was[key] {
			grows[key.Pool] = true
		}
	}
	retired := *before
	retired.Pools = slices.Clone(before.Pools)
	for i := range retired.Pools {
		p := &retired.Pools[i]
		left := slices.Clone(p.Endpoints)
		staying, serving := 0, 0
		for k := range left {
			e := &left[k]
			if e.Drain {
				continue
			}
			serving++
			if stay[fleet.EndpointKey{Pool: p.Name, Address: e.Address}] {
				staying++
			} else {
				e.Drain = true
			}
		}
		if staying > 0 && staying < serving && (2*staying >= serving || !grows[p.Name]) {
			p.Endpoints, leaving = left, true
		}
	}
	if leaving {
		s.config = &retired
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.config = before
	}, s.ticks, leaving
}

func endpointsOf(cfg *fleet.Config) map[fleet.EndpointKey]bool {
	out := map[fleet.EndpointKey]bool{}
	for _, p := range cfg.Pools {
		for _, e := range p.Endpoints {
			out[fleet.EndpointKey{Pool: p.Name, Address: e.Address}] = true
		}
	}
	return out
}
