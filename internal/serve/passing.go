package serve

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// passStreak is how many requests in a row an Envoy must have sent past a pool to show
	// that it finds nobody there. It passes by a part of them where some of the servers
	// are well.
	passStreak = 8
	// reachedFor is how long another Envoy's request that reached a pool shows that it is
	// not the pool that is cut off.
	reachedFor = 10 * time.Second
	// maxPassing bounds the Envoys that are told apart in a pool.
	maxPassing = 1024
)

// passing is how one Envoy finds a pool.
type passing struct {
	// n is how many requests in a row it sent past it, passStreak at most.
	n int
	// reached is when one of its requests had a connection to a server there, zero if none
	// did.
	reached time.Time
}

// reached takes that a request reached a server of a pool.
func (s *scoring) reached(o *fleet.Outcome) {
	s.passing(o.Endpoint.Pool)[o.Node] = passing{reached: o.At}
}

// passing is how the Envoys find a pool. Where there are too many those that found nobody
// are forgotten with the others.
func (s *scoring) passing(pool string) map[string]passing {
	nodes := s.passes[pool]
	if nodes == nil || len(nodes) >= maxPassing {
		nodes = map[string]passing{}
		s.passes[pool] = nodes
	}
	return nodes
}

// passedBy takes that an Envoy sent a request that was let into a pool to the next by
// itself, by its own checks of the servers' health. When it did so with as many as
// passStreak in a row, and no other Envoy's request reached the pool of late, each further
// one counts as a failure of all its endpoints.
func (s *scoring) passedBy(pool string, o *fleet.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	nodes := s.passing(pool)
	found := nodes[o.Node]
	if found.n < passStreak {
		found.n++
		nodes[o.Node] = found
		return
	}
	for node, other := range nodes {
		if node != o.Node && o.At.Sub(other.reached) < reachedFor {
			return
		}
	}
	failed := fleet.Outcome{Kind: fleet.AttemptEnded, Route: o.Route, Cause: fleet.CauseConnectFailed, At: o.At}
	for i := range s.config.Pools {
		if p := &s.config.Pools[i]; p.Name == pool {
			for j := range p.Endpoints {
				s.endpoints[fleet.EndpointKey{Pool: pool, Address: p.Endpoints[j].Address}].fails.outcome(&failed, admission.Client{})
			}
		}
	}
}
