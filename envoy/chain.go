package envoy

import (
	"fmt"
	"slices"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	prioritygroupv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/priority_group/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// chain is a route's pools in the order its attempts try them.
type chain struct {
	groups []*prioritygroupv3.PriorityGroup
	// extra has a group for each pool that stands alone in none of groups, so
	// that ext_proc can name any pool of the chain by a group of the route.
	extra []*prioritygroupv3.PriorityGroup
	// tiersChange is true when, whatever pool is drawn, no attempt goes to a
	// tier that an earlier attempt went to. Only then is a 429 or 529 worth
	// another attempt.
	tiersChange bool
}

// arm is a pool with its share of the draw.
type arm struct {
	pool   string
	weight uint32 // basis points
}

// chainOf lays a route's split and fallback out as priority groups.
//
// The split's arms stand in one group with their basis points. The groups
// after it are rotations: the same points at the same positions with the pools
// moved on by one, so that the draw value that gave pool i now gives the next
// one, and each request tries every pool of the split once. Arms at weight 0
// get no draw and come after the others, since a pool on the way out is still
// better than an error. Then each fallback pool has a group of its own. A
// chain of one pool has it twice: one retry inside the pool.
//
// The split's pools also get groups of their own that are not part of the walk.
// ext_proc moves requests by the names of groups and never of clusters: a group
// that a sidecar's route doesn't have (its routes are older or newer than the
// plan) leaves the attempt to the group of the same position, while an unknown
// cluster would be Envoy's own final 503 (both measured on Envoy 1.40.0).
func chainOf(cfg *fleet.Config, r fleet.Route) (chain, error) {
	live, idle := arms(r.Split)
	var groups [][]arm
	for turn := range live {
		groups = append(groups, rotate(live, turn))
	}
	for _, a := range idle {
		groups = append(groups, []arm{a})
	}
	if len(groups)+len(r.Fallback) == 1 {
		groups = append(groups, groups[0])
	}
	c := chain{}
	for i, g := range groups {
		name := GroupOwn
		if i > 0 {
			name = fmt.Sprintf("%s-%d", GroupOwn, i+1)
		}
		c.groups = append(c.groups, priorityGroup(name, g))
	}
	for _, pool := range r.Fallback {
		g := alone(pool)
		groups = append(groups, g)
		c.groups = append(c.groups, priorityGroup(wire.GroupPool+pool, g))
	}
	for _, w := range r.Split {
		c.extra = append(c.extra, priorityGroup(wire.GroupPool+w.Pool, alone(w.Pool)))
	}
	var err error
	if c.tiersChange, err = tiersChange(cfg, r.Name, len(live), groups); err != nil {
		return chain{}, err
	}
	return c, nil
}

// selectable is every group of the route: first the chain's in the order of the
// attempts, then those that only ext_proc selects.
func (c chain) selectable() []*prioritygroupv3.PriorityGroup {
	return slices.Concat(c.groups, c.extra)
}

func alone(pool string) []arm { return []arm{{pool: pool, weight: fleet.BasisPointsTotal}} }

func arms(s fleet.Split) (live, idle []arm) {
	for i, points := range s.BasisPoints() {
		if points > 0 {
			live = append(live, arm{s[i].Pool, points})
		} else {
			idle = append(idle, arm{s[i].Pool, fleet.BasisPointsTotal})
		}
	}
	return live, idle
}

// rotate keeps the weights in place and moves the pools on by turn.
func rotate(arms []arm, turn int) []arm {
	out := make([]arm, len(arms))
	for i, a := range arms {
		out[i] = arm{arms[(i+turn)%len(arms)].pool, a.weight}
	}
	return out
}

func priorityGroup(name string, arms []arm) *prioritygroupv3.PriorityGroup {
	g := &prioritygroupv3.PriorityGroup{Name: name}
	for _, a := range arms {
		g.Clusters = append(g.Clusters, &prioritygroupv3.ClusterWeight{ClusterName: a.pool, Weight: u32(a.weight)})
	}
	return g
}

// tiersChange follows the draw of each position of the split along the chain.
func tiersChange(cfg *fleet.Config, route string, positions int, groups [][]arm) (bool, error) {
	change := true
	for position := range positions {
		seen := map[string]bool{}
		for _, g := range groups {
			name := g[min(position, len(g)-1)].pool
			p, ok := cfg.PoolByName(name)
			if !ok {
				return false, fmt.Errorf("route %q: no pool %q in the config", route, name)
			}
			change = change && !seen[p.Tier]
			seen[p.Tier] = true
		}
	}
	return change, nil
}

func cloneRoute(r *routev3.Route) *routev3.Route { return proto.Clone(r).(*routev3.Route) }
