package xds

import (
	"context"
	"maps"
	"slices"
	"time"
)

const (
	// lingerMargin is how much longer than the group's upload timeout a cluster
	// stays after the routes to it were replaced. Envoy binds a request to the
	// routes that it has when the headers come, and looks the cluster up only when
	// the body is there as far as it is read, and ext_proc has answered: the first
	// takes as long as an upload may, the second 200 ms at most (envoy's
	// decisionTimeout). A cluster that is gone by then is a final 503 (measured on
	// Envoy 1.40.0). The rest is for Envoy's workers, which take routes over a
	// moment after the ACK, and for attempts that fail at once. What failed after
	// minutes is not waited for: it may find no cluster for a further attempt.
	lingerMargin = 5 * time.Second

	// maxLeaving bounds the clusters of a group that linger. When there are more,
	// those that have lingered longest go first.
	maxLeaving = 1024
)

// lingering parts clusters that no route needs any longer into those that stay for
// a while and those that leave at once, because an Envoy refused them: they would
// be refused again by each that connects. The caller holds g.mu.
func (g *group) lingering(clusters []string) (stay, leave []string) {
	for _, name := range clusters {
		if g.refusedCluster(name) {
			leave = append(leave, name)
			delete(g.leaving, name)
		} else {
			stay = append(stay, name)
		}
	}
	return stay, leave
}

// refusedCluster reports whether this one as it is published was in what two Envoys
// refused last, or the only one, as for a way back: one Envoy that takes nothing, whatever
// it is, doesn't take clusters away from the others' requests.
func (g *group) refusedCluster(name string) bool {
	n := 0
	for ses := range g.refusers {
		if ts := ses.types[typeCDS]; ts != nil && ts.refused != nil && !ts.refused.own && !ts.refused.answered && ts.refused.versions[name] == g.clusters[name].version {
			n++
		}
	}
	return n >= 2 || n == 1 && len(g.sessions) == 1
}

func without(names, others []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(others, name) })
}

// linger notes clusters that are not w's. Each goes at a time that is fixed here,
// whatever Envoys answer until then. The caches keep it, and its assignment, and
// Envoys that connect meanwhile get both.
func (g *group) linger(w *world, clusters []string, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if over := now.Add(g.uploads); over.After(g.uploadsOver) {
		g.uploadsOver = over
	}
	g.uploads = w.group.Listener.UploadTimeout
	at := now.Add(g.uploads)
	if at.Before(g.uploadsOver) {
		at = g.uploadsOver
	}
	at = at.Add(lingerMargin)
	if g.server.linger > 0 {
		at = now.Add(g.server.linger)
	}
	for _, name := range clusters {
		if _, lingers := g.leaving[name]; !lingers {
			g.leaving[name] = at
		}
	}
}

// longestLeaving are the clusters that linger, the first to go first. The caller
// holds g.mu.
func (g *group) longestLeaving() []string {
	return slices.SortedFunc(maps.Keys(g.leaving), func(a, b string) int { return g.leaving[a].Compare(g.leaving[b]) })
}

// dueDepartures returns the clusters that go at now. The caller holds g.mu.
func (g *group) dueDepartures(now time.Time) []string {
	names := g.longestLeaving()
	for i, name := range names {
		if len(names)-i <= maxLeaving && g.leaving[name].After(now) {
			return names[:i]
		}
	}
	return names
}

// nextDeparture returns how long until the next cluster goes, if any lingers.
func (g *group) nextDeparture(now time.Time) (wait time.Duration, more bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	names := g.longestLeaving()
	if len(names) == 0 {
		return 0, false
	}
	return g.leaving[names[0]].Sub(now), true
}

// depart takes clusters away, and their assignments after them.
func (g *group) depart(ctx context.Context, clusters []string) {
	var assignments []string
	g.mu.Lock()
	for _, name := range clusters {
		delete(g.leaving, name)
		if g.endpoints[name].msg != nil {
			assignments = append(assignments, name)
		}
	}
	g.mu.Unlock()
	g.step(ctx, update{typeCDS, change{remove: clusters}})
	if ctx.Err() == nil {
		g.step(ctx, update{typeEDS, change{remove: assignments}})
	}
}
