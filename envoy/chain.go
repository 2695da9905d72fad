package envoy

import (
	"fmt"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	prioritygroupv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/priority_group/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// chain is a route's pools in the order its attempts try them.
type chain struct {
	groups []*prioritygroupv3.PriorityGroup
	// tiersChange is true when, whatever pool is drawn, no attempt goes to a
	// tier that an earlier attempt went to. Only then is a 429 worth another
	// attempt.
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
		g := []arm{{pool: pool, weight: fleet.BasisPointsTotal}}
		groups = append(groups, g)
		c.groups = append(c.groups, priorityGroup(PoolGroup(pool), g))
	}
	var err error
	if c.tiersChange, err = tiersChange(cfg, r.Name, len(live), groups); err != nil {
		return chain{}, err
	}
	return c, nil
}

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
