package xds

import (
	"context"
	"net/netip"
	"time"

	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// run publishes what is submitted until ctx ends or the group is removed.
func (g *group) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		for ctx.Err() == nil && g.advance(ctx) {
		}
		if wait, more := g.nextDeparture(time.Now()); more {
			timer.Reset(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-g.gone:
			return
		case <-g.wake:
		case <-timer.C:
		}
	}
}

// advance does one thing: publish the desired world, go back to the accepted
// one, or take away clusters that have lingered for long enough. It returns
// false when there is nothing to do.
func (g *group) advance(ctx context.Context) bool {
	g.mu.Lock()
	desired, publish, back := g.desired, g.desired != g.handled, g.rollbackDue()
	if !publish && !back {
		if due := g.dueDepartures(time.Now()); len(due) > 0 {
			g.mu.Unlock()
			g.depart(ctx, due)
			return true
		}
		if g.removed == nil {
			select {
			case <-g.idle:
			default:
				close(g.idle)
			}
		}
		g.mu.Unlock()
		return false
	}
	if publish {
		g.handled, g.current, g.refusedText = desired, desired, ""
		g.generations.keepOnly(desired)
	}
	g.mu.Unlock()
	if publish {
		back = g.sequence(ctx, desired, true)
	}
	if back {
		g.rollBack(ctx)
	}
	return true
}

// rollBack publishes the last accepted world again, everything that was in a
// refused response with changed content. Refusals on the way back don't stop it.
func (g *group) rollBack(ctx context.Context) {
	g.mu.Lock()
	text := g.refusalText()
	g.refusedText = text
	back := g.accepted
	if back == nil || back == g.current {
		g.mu.Unlock()
		g.server.log.Error("xds content refused, and there is no accepted content to go back to", "group", g.name, "error", text)
		return
	}
	g.current = back
	g.raiseGenerations(back)
	g.mu.Unlock()
	g.server.log.Error("xds content refused: going back to the last accepted", "group", g.name, "digest", back.digest, "error", text)
	g.server.observe(Event{Kind: EventRollback, Group: g.name, Detail: text})
	g.sequence(ctx, back, false)
}

// refusalText is one of the refusals that made the group go back.
func (g *group) refusalText() string {
	for ses := range g.sessions {
		for _, ts := range ses.types {
			if r := ts.refused; r != nil && !r.own && !r.answered {
				return r.text
			}
		}
	}
	return ""
}

// sequence moves the caches to w step by step. With judge set it stops and
// returns true as soon as a step is refused.
func (g *group) sequence(ctx context.Context, w *world, judge bool) (refused bool) {
	g.mu.Lock()
	g.publishing = true
	defer func() {
		g.mu.Lock()
		g.publishing = false
		if !refused {
			g.promoteAny()
		}
		g.mu.Unlock()
	}()
	clusters := g.generations.apply(typeCDS, w.clusters)
	endpoints := g.generations.apply(typeEDS, w.endpoints)
	routes := g.generations.apply(typeRDS, w.routes)
	for name := range clusters {
		delete(g.leaving, name)
	}
	cds, eds, rds := diff(g.clusters, clusters), diff(g.endpoints, endpoints), diff(g.routes, routes)
	stay, leave := g.lingering(cds.remove)
	g.mu.Unlock()

	early := change{set: only(eds.set, func(name string) bool { return g.endpoints[name].msg == nil })}
	late := change{set: only(eds.set, func(name string) bool { return g.endpoints[name].msg != nil })}
	steps := []func() bool{
		// Endpoints first: a cluster whose assignment is missing warms until
		// its fetch timeout and blocks all CDS of that Envoy meanwhile.
		func() bool { return g.step(ctx, update{typeEDS, early}) },
		// The changed assignments right behind the clusters, before any ACK:
		// an Envoy ACKs clusters only when they are warm, and a changed
		// cluster is warm when its assignment *changes*.
		func() bool {
			return g.step(ctx, update{typeCDS, change{set: cds.set}}, update{typeEDS, late})
		},
		// Routes may name only clusters that are active.
		func() bool { return g.step(ctx, update{typeRDS, change{set: rds.set}}) },
		func() bool { return g.stepListeners(ctx, w) },
		func() bool { return g.step(ctx, update{typeRDS, change{remove: rds.remove}}) },
		func() bool { return g.step(ctx, update{typeCDS, change{remove: leave}}) },
		func() bool { return g.step(ctx, update{typeEDS, change{remove: without(eds.remove, stay)}}) },
	}
	for _, step := range steps {
		if step() && judge {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
	}
	g.linger(w, stay, time.Now())
	return false
}

// promoteAny looks for an Envoy that holds all of the current world.
func (g *group) promoteAny() {
	for ses := range g.sessions {
		if g.accepted == g.current {
			return
		}
		g.promote(ses)
	}
}

// change is what differs between two states of one type.
type change struct {
	set    items
	remove []string
}

func (c change) empty() bool { return len(c.set) == 0 && len(c.remove) == 0 }

type update struct {
	typeURL string
	change
}

func diff(from, to items) change {
	c := change{set: items{}}
	for name, it := range to {
		if from[name].version != it.version {
			c.set[name] = it
		}
	}
	for _, name := range sortedNames(from) {
		if _, ok := to[name]; !ok {
			c.remove = append(c.remove, name)
		}
	}
	return c
}

func only(m items, keep func(name string) bool) items {
	out := items{}
	for name, it := range m {
		if keep(name) {
			out[name] = it
		}
	}
	return out
}

// applied returns m with a change, as a new map.
func (c change) applied(m items) items {
	out := make(items, len(m)+len(c.set))
	for name, it := range m {
		out[name] = it
	}
	for name, it := range c.set {
		out[name] = it
	}
	for _, name := range c.remove {
		delete(out, name)
	}
	return out
}

// step puts updates into the caches, one batch per type in the given order,
// and waits for the answers. It returns whether the content was refused.
func (g *group) step(ctx context.Context, updates ...update) (refused bool) {
	var work []update
	for _, u := range updates {
		if !u.empty() {
			work = append(work, u)
		}
	}
	if len(work) == 0 {
		return false
	}
	g.mu.Lock()
	types := make([]string, 0, len(work))
	for _, u := range work {
		types = append(types, u.typeURL)
		switch u.typeURL {
		case typeCDS:
			g.clusters = u.applied(g.clusters)
		case typeEDS:
			g.endpoints = u.applied(g.endpoints)
		case typeRDS:
			g.routes = u.applied(g.routes)
		}
	}
	b := g.await(types...)
	g.mu.Unlock()
	for _, u := range work {
		g.put(g.cacheOf(u.typeURL), u.typeURL, u.change)
	}
	return g.wait(ctx, b)
}

func (g *group) cacheOf(typeURL string) *cache.LinearCache {
	switch typeURL {
	case typeCDS:
		return g.cds
	case typeEDS:
		return g.eds
	default:
		return g.rds
	}
}

// put hands a batch to a cache. One call per type and step: with single
// updates the first response goes out without the others, and the changed
// assignment that warms a cluster may get ahead of it.
func (g *group) put(c *cache.LinearCache, typeURL string, ch change) {
	if err := c.UpdateResources(messages(ch.set), ch.remove); err != nil {
		// Only marshalling can fail, and every item was marshalled before.
		g.server.log.Error("xds cache update", "group", g.name, "type", typeURL, "error", err)
	}
}

// stepListeners moves the listeners of all known addresses to w and waits.
func (g *group) stepListeners(ctx context.Context, w *world) (refused bool) {
	type listenUpdate struct {
		cache *cache.LinearCache
		change
	}
	var work []listenUpdate
	g.mu.Lock()
	g.listenWorld = w
	if a := w.group.Listener.Address; g.listens[a] == nil {
		g.listens[a] = newListenCache(a, w.listeners[a])
	}
	g.moveDefault(w.group.Listener.Address)
	for a, l := range g.listens {
		next, err := g.nextListener(w, a)
		if err != nil {
			// The address came while w was under way; what it has stays.
			g.server.log.Error("xds listener", "group", g.name, "listen", a, "error", err)
			continue
		}
		ch := diff(items{l.item.name: l.item.item}, items{next.name: next.item})
		if !ch.empty() {
			l.item = next
			work = append(work, listenUpdate{l.cache, ch})
		}
	}
	if len(work) == 0 {
		g.mu.Unlock()
		return false
	}
	b := g.await(typeLDS)
	g.mu.Unlock()
	for _, u := range work {
		g.put(u.cache, typeLDS, u.change)
	}
	return g.wait(ctx, b)
}

// moveDefault ends the streams of Envoys that follow the group's default
// address when it is another now: their next stream joins the new one. The
// caller holds g.mu.
func (g *group) moveDefault(a netip.AddrPort) {
	for ses := range g.sessions {
		if ses.byDefault && ses.listen != a {
			ses.cancel(status.Errorf(codes.Unavailable, "the group's listening address is now %s: reconnect", a))
		}
	}
}

func (g *group) nextListener(w *world, a netip.AddrPort) (listenerItem, error) {
	next, err := w.listenerFor(a)
	if err != nil {
		return listenerItem{}, err
	}
	next.item = g.generations.one(typeLDS, a.String(), next.item)
	return next, nil
}

// await begins to wait for every Envoy that subscribes to one of the types and
// has something on its way now that the tables changed. Those that missed a
// deadline before are not waited for. The caller holds g.mu.
func (g *group) await(types ...string) *barrier {
	b := newBarrier()
	for ses := range g.sessions {
		for _, typeURL := range types {
			ts := ses.types[typeURL]
			if ts == nil || ts.quiet(g.published(typeURL, ses)) {
				continue
			}
			ts.queued = ts.queued || !ts.same(ts.believed, g.published(typeURL, ses))
			if !ts.late {
				b.pending[answer{ses, typeURL}] = struct{}{}
			}
		}
	}
	b.check()
	g.waiting = b
	return b
}

// wait waits for a barrier, at most the deadline. It returns whether the
// content was refused.
func (g *group) wait(ctx context.Context, b *barrier) (refused bool) {
	timer := time.NewTimer(g.server.ackDeadline)
	defer timer.Stop()
	select {
	case <-b.over:
	case <-timer.C:
	case <-g.gone:
	case <-ctx.Done():
	}
	var events []Event
	g.mu.Lock()
	g.waiting = nil
	refused = b.verdict()
	if !refused && ctx.Err() == nil && g.removed == nil {
		for key := range b.pending {
			key.ses.types[key.typeURL].late = true
			events = append(events, Event{Kind: EventAckTimeout, TypeURL: key.typeURL, Group: g.name, Node: key.ses.node})
		}
	}
	g.mu.Unlock()
	for _, e := range events {
		g.server.log.Warn("no ack within the deadline: going on without it", "group", g.name, "node", e.Node, "type", e.TypeURL, "deadline", g.server.ackDeadline)
		g.server.observe(e)
	}
	return refused
}
