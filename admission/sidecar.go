package admission

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// SidecarGrace is how long the place of a sidecar that left is kept for it: a
// restart takes seconds, and what its neighbours may do must not rise and fall
// with it.
const SidecarGrace = 30 * time.Second

// sidecarChange is the least growth of a part, as a share of it, that is worth a
// push: below it only the work would show.
const sidecarChange = 0.1

// SidecarGroup is what a group of sidecars has to do with pools.
type SidecarGroup struct {
	Name string
	// Connected is how many sidecars are connected now.
	Connected int
	// Reaches are the pools that any of its routes may send to, Holds those of
	// routes with HoldAtSidecar; each without repetition.
	Reaches, Holds []string
}

// SidecarGroups lays out the groups of a configuration. connected tells how many
// sidecars a group has at present.
//
// A route reaches the pools of its split, also those without weight, and of its
// fallback. Envoy counts requests in flight per pool and not per route: where
// one route of a group asks for a hold, the requests of the group's other routes
// to the same pool are held with it.
func SidecarGroups(cfg *fleet.Config, connected func(group string) int) []SidecarGroup {
	out := make([]SidecarGroup, 0, len(cfg.Groups))
	for _, g := range cfg.Groups {
		sg := SidecarGroup{Name: g.Name, Connected: connected(g.Name)}
		reaches, holds := map[string]bool{}, map[string]bool{}
		for _, name := range g.Routes {
			r, _ := cfg.RouteByName(name)
			for _, pool := range poolsOf(r) {
				if !reaches[pool] {
					reaches[pool] = true
					sg.Reaches = append(sg.Reaches, pool)
				}
				if r.HoldAtSidecar && !holds[pool] {
					holds[pool] = true
					sg.Holds = append(sg.Holds, pool)
				}
			}
		}
		out = append(out, sg)
	}
	return out
}

func poolsOf(r fleet.Route) []string {
	out := make([]string, 0, len(r.Split)+len(r.Fallback))
	for _, arm := range r.Split {
		out = append(out, arm.Pool)
	}
	return append(out, r.Fallback...)
}

// Sidecars divides the limits of pools among the sidecars that send to them, so
// that each can hold its part by itself. It is not safe for concurrent use.
//
// A pool's limit is divided evenly among all sidecars that can reach it, those
// of groups that don't hold it included, since they send to it as well. The
// parts are whole numbers that together never exceed the limit, save that each
// is at least 1. So a part shrinks at once; while the number of sidecars stays as
// it is, it grows only by a tenth or more. A pool without a limit above 0, which has no
// capacity at all, is not held: its requests must fail over, and an overflow of
// a sidecar's own is final.
type Sidecars struct {
	places map[string]*places // by group
	parts  map[string]part    // by pool
}

// part is what one sidecar may have in flight to a pool.
type part struct {
	max      uint32
	sidecars int
}

// NewSidecars returns one that knows of no sidecar.
func NewSidecars() *Sidecars {
	return &Sidecars{places: map[string]*places{}, parts: map[string]part{}}
}

// Step returns, by group and pool, how many requests each sidecar of the group
// may have in flight to the pool. Every given group is in it, with an empty map
// if it holds nothing; a pool of which limit knows nothing (0) is not. Groups and
// pools that are no longer given are forgotten.
func (s *Sidecars) Step(now time.Time, limit func(pool string) float64, groups []SidecarGroup) map[string]map[string]uint32 {
	s.places = s.count(now, groups)
	sidecars := map[string]int{}
	for _, g := range groups {
		for _, pool := range g.Reaches {
			sidecars[pool] += s.places[g.Name].most()
		}
	}
	out := make(map[string]map[string]uint32, len(groups))
	parts := map[string]part{}
	for _, g := range groups {
		held := map[string]uint32{}
		for _, pool := range g.Holds {
			next, ok := parts[pool]
			if !ok {
				next = s.parts[pool].next(limit(pool), sidecars[pool])
				parts[pool] = next
			}
			if next.max > 0 {
				held[pool] = next.max
			}
		}
		out[g.Name] = held
	}
	s.parts = parts
	return out
}

func (s *Sidecars) count(now time.Time, groups []SidecarGroup) map[string]*places {
	out := make(map[string]*places, len(groups))
	for _, g := range groups {
		p := s.places[g.Name]
		if p == nil {
			p = &places{}
		}
		p.add(now, g.Connected)
		out[g.Name] = p
	}
	return out
}

// next is the part of limit that one of sidecars gets; the zero part if there is
// nothing to divide. With no sidecar, the first to come gets all of it.
func (p part) next(limit float64, sidecars int) part {
	if !(limit > 0) || math.IsInf(limit, 0) {
		return part{}
	}
	share := math.Floor(limit / float64(max(1, sidecars)))
	share = min(max(share, 1), math.MaxUint32)
	growth := share - float64(p.max)
	if sidecars == p.sidecars && growth >= 0 && growth < sidecarChange*float64(p.max) {
		return p
	}
	return part{max: uint32(share), sidecars: sidecars}
}

// places counts the sidecars of a group: the most that were connected within
// [SidecarGrace]. Names are not told apart: when sidecars are replaced one by
// one, each with a new name, there are never twice as many places as sidecars.
type places struct {
	// counts strictly decrease and times strictly increase, so there are never
	// more than the largest count; the first is the result.
	counts []placeCount
}

type placeCount struct {
	n  int
	at time.Time
}

func (p *places) add(now time.Time, n int) {
	for len(p.counts) > 0 && p.counts[len(p.counts)-1].n <= n {
		p.counts = p.counts[:len(p.counts)-1]
	}
	p.counts = append(p.counts, placeCount{n, now})
	for len(p.counts) > 1 && now.Sub(p.counts[0].at) > SidecarGrace {
		p.counts = p.counts[1:]
	}
}

func (p *places) most() int {
	if p == nil || len(p.counts) == 0 {
		return 0
	}
	return p.counts[0].n
}
