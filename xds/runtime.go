package xds

import (
	"cmp"
	"context"
	"maps"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// maxRuntimeNames bounds how many runtime layers of a group are answered.
const maxRuntimeNames = 64

const (
	// runtimeEvery is the least time between two pushes of a group's runtime.
	runtimeEvery = time.Second
	// runtimeSettle is how long an Envoy that comes back keeps the runtime it came
	// with. After an outage of the control plane the Envoys of a group are back
	// within 1.3 s (a retry_back_off of at most 1 s and its jitter); what each of
	// them may do is known once they are counted, which takes a second more.
	// Without the wait, the first to come back would be told that it is alone.
	runtimeSettle = 3 * time.Second
)

// runtime is a group's RTDS content. It is published apart from the world, by a
// goroutine of its own, since a change must not wait for clusters that warm; and
// nothing waits for its ACKs, since an Envoy whose bootstrap has no RTDS layer
// never asks for it. Fields below wake are guarded by group.mu.
type runtime struct {
	cache *cache.LinearCache
	wake  chan struct{} // capacity 1: something to look at

	// set is true once SetMaxRequests was called. Until then an Envoy that comes
	// with a runtime keeps it.
	set     bool
	desired layer // last set
	handled layer // last desired one that was published, whatever came of it
	current layer // what the cache holds
	// accepted is the last one that an Envoy took and none refused, or zero.
	accepted layer
	// refusedText says why desired isn't current, or is "".
	refusedText string
	// published is all that the cache holds: current, and an empty layer for each
	// other name that was asked for.
	published items
	pushed    time.Time // the last push
	kept      map[*keptWatch]struct{}
	askers    int                   // Envoys that ask for it
	refusers  map[*session]struct{} // those that may refuse what is published
}

// layer is the content of a runtime layer. limits is never written.
type layer struct {
	limits map[string]uint32 // by cluster
	item
}

func newLayer(name string, limits map[string]uint32) (layer, error) {
	fields := make(map[string]*structpb.Value, len(limits))
	for cluster, n := range limits {
		fields["circuit_breakers."+cluster+".default.max_requests"] = structpb.NewNumberValue(float64(n))
	}
	it, err := newItem(&runtimev3.Runtime{Name: name, Layer: &structpb.Struct{Fields: fields}})
	return layer{limits, it}, err
}

// emptyLayer is a layer of a name that is valid UTF-8, as all names of a request
// are that was decoded.
func emptyLayer(name string) layer {
	l, err := newLayer(name, nil)
	if err != nil {
		panic(err)
	}
	return l
}

func newRuntime() runtime {
	empty := emptyLayer(wire.RuntimeName)
	published := items{wire.RuntimeName: empty.item}
	return runtime{
		cache: filled(typeRuntime, published), wake: make(chan struct{}, 1),
		desired: empty, handled: empty, current: empty,
		published: published, kept: map[*keptWatch]struct{}{}, refusers: map[*session]struct{}{},
	}
}

// look wakes the runtime's publisher.
func (rt *runtime) look() {
	select {
	case rt.wake <- struct{}{}:
	default:
	}
}

// SetMaxRequests bounds the requests that each sidecar of a group has in flight
// to a cluster, by cluster: beyond it Envoy answers with an overflow at once,
// also when the control plane is gone. A cluster that is not named has the limit
// of its own circuit breaker. No connection is drained and no cluster changes.
//
// It returns at once; the sidecars have it within about a second. What is set
// more often than once a second is published once a second. A group that is not
// in the configuration is passed over. Until the first call for a group, a
// sidecar that comes back keeps the limits it had; call it with nil where there
// are none.
func (s *Server) SetMaxRequests(group string, limits map[string]uint32) {
	s.mu.Lock()
	g := s.groups[group]
	s.mu.Unlock()
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	rt := &g.runtime
	if rt.set && maps.Equal(limits, rt.desired.limits) {
		return
	}
	next, err := newLayer(wire.RuntimeName, maps.Clone(limits))
	if err != nil {
		s.log.Error("xds runtime", "group", group, "error", err)
		return
	}
	rt.set, rt.desired = true, next
	rt.look()
}

// runRuntime publishes the group's runtime until ctx ends or the group is
// removed.
func (g *group) runRuntime(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.gone:
			return
		case <-g.runtime.wake:
		case <-timer.C:
		}
		if next, more := g.stepRuntime(time.Now()); more {
			timer.Reset(next)
		}
	}
}

// stepRuntime does what is due at now: publish the desired layer or go back to
// the accepted one, and answer the Envoys that kept theirs for long enough. It
// returns when to look again, if that is known.
func (g *group) stepRuntime(now time.Time) (next time.Duration, more bool) {
	g.mu.Lock()
	push, refusal, paced := g.moveRuntime(now)
	due, kept := g.settledWatches(now)
	g.mu.Unlock()

	if !push.empty() {
		g.put(g.runtime.cache, typeRuntime, push)
	}
	if refusal != "" {
		g.server.log.Error("xds runtime refused: going back to the last accepted", "group", g.name, "error", refusal)
		g.server.observe(Event{Kind: EventRollback, TypeURL: typeRuntime, Group: g.name, Detail: refusal})
	}
	for _, w := range due {
		w.start(g.runtime.cache)
	}
	if paced == 0 || (kept > 0 && kept < paced) {
		return kept, kept > 0
	}
	return paced, true
}

// moveRuntime decides what the cache is to hold. It returns what to put there,
// the refusal because of which it goes back, if any, and how long a change has
// still to wait. The caller holds g.mu.
func (g *group) moveRuntime(now time.Time) (push change, refusal string, paced time.Duration) {
	rt := &g.runtime
	publish, back := rt.desired.version != rt.handled.version, g.runtimeTakeBack()
	if !publish && !back {
		return change{}, "", 0
	}
	if wait := g.server.runtimeEvery - now.Sub(rt.pushed); !rt.pushed.IsZero() && wait > 0 {
		return change{}, "", wait
	}
	if publish {
		rt.current, rt.handled = rt.desired, rt.desired
	} else {
		refusal = g.runtimeRefusalText()
		rt.current = rt.accepted
	}
	rt.refusedText, rt.pushed = refusal, now
	push = change{set: items{wire.RuntimeName: rt.current.item}}
	rt.published = push.applied(rt.published)
	return push, refusal, 0
}

// settledWatches takes out the watches that have waited long enough and returns
// how long until the next has. The caller holds g.mu.
func (g *group) settledWatches(now time.Time) (due []*keptWatch, next time.Duration) {
	for w := range g.runtime.kept {
		switch wait := w.ses.keepsUntil.Sub(now); {
		case wait > 0 && (next == 0 || wait < next):
			next = wait
		case wait <= 0 && g.runtime.set:
			delete(g.runtime.kept, w)
			w.ses.keepsUntil = time.Time{}
			due = append(due, w)
		}
	}
	return due, next
}

// runtimeRequest takes in one request about runtimes and returns what there is
// to tell. The caller holds g.mu.
func (g *group) runtimeRequest(ses *session, r *discoveryv3.DeltaDiscoveryRequest, now time.Time) ([]Event, error) {
	ts := ses.runtime
	if ts == nil {
		ts = newTypeState(r)
		ses.runtime = ts
		g.runtime.askers++
		if ts.held[wire.RuntimeName] != "" {
			ses.keepsUntil = now.Add(g.server.runtimeSettle)
		}
	}
	if err := ts.subscribe(r); err != nil {
		return nil, err
	}
	o, answered := ts.take(r.GetResponseNonce())
	if !answered {
		return nil, nil
	}
	event := Event{Kind: EventAck, TypeURL: typeRuntime, Group: g.name, Node: ses.node}
	if detail := r.GetErrorDetail(); detail != nil {
		event.Kind, event.Detail = EventNack, cmp.Or(oneLine(detail.GetMessage()), "refused without a reason")
		ts.refused = &refusal{at: now, text: event.Detail, versions: o.versions}
		g.runtime.refusers[ses] = struct{}{}
	} else {
		o.bring(ts.held)
		ts.lastAck = now
		if ts.refused != nil {
			ts.refused.answered = true
		}
	}
	rt := &g.runtime
	switch {
	case g.runtimeTakeBack():
		rt.look()
	case rt.accepted.version != rt.current.version && ts.held[wire.RuntimeName] == rt.current.version && g.runtimeRefusers() == 0:
		rt.accepted = rt.current
	}
	return []Event{event}, nil
}

// runtimeTakeBack reports whether what is published is refused by several
// Envoys, or by the only one that asks for it, and there is accepted content to
// go back to. The caller holds g.mu.
func (g *group) runtimeTakeBack() bool {
	rt := &g.runtime
	if rt.accepted.msg == nil || rt.accepted.version == rt.current.version {
		return false
	}
	n := g.runtimeRefusers()
	return n >= 2 || (n == 1 && g.runtime.askers == 1)
}

// runtimeRefusers counts the Envoys whose last answer about the published
// runtime was a refusal, and forgets those of whom that no longer holds.
func (g *group) runtimeRefusers() int {
	for ses := range g.runtime.refusers {
		if !g.refusesRuntime(ses) {
			delete(g.runtime.refusers, ses)
		}
	}
	return len(g.runtime.refusers)
}

func (g *group) refusesRuntime(ses *session) bool {
	r := ses.runtime.refused
	return !r.answered && r.versions[wire.RuntimeName] == g.runtime.current.version
}

// runtimeRefusalText is one of the refusals of what is published.
func (g *group) runtimeRefusalText() string {
	for ses := range g.runtime.refusers {
		if g.refusesRuntime(ses) {
			return ses.runtime.refused.text
		}
	}
	return ""
}

// forgetRuntime is told that an Envoy is gone. The caller holds g.mu.
func (g *group) forgetRuntime(ses *session) {
	if ses.runtime == nil {
		return
	}
	g.runtime.askers--
	delete(g.runtime.refusers, ses)
	if g.runtimeTakeBack() {
		g.runtime.look()
	}
}

// runtimeStatus judges what an Envoy holds of the runtime. The caller holds g.mu.
func (g *group) runtimeStatus(ses *session) TypeStatus {
	ts := ses.runtime
	st := TypeStatus{Type: "RTDS", TypeURL: typeRuntime, State: Synced, LastAck: ts.lastAck, Version: heldDigest(ts.held)}
	switch r := ts.refused; {
	case r != nil && !r.answered:
		st.State, st.Reason = Nacked, r.text
	case r != nil && g.runtime.refusedText != "" && r.versions[wire.RuntimeName] == g.runtime.handled.version:
		st.State, st.Reason = Nacked, oneLine("taken back; it holds the last accepted content: "+r.text)
	case ts.caughtUp(g.runtime.published):
	case !ses.keepsUntil.IsZero():
		st.State, st.Reason = Stale, "it came back and keeps what it holds until the others have been counted"
	default:
		st.State, st.Reason = Stale, "waiting for its ACK"
	}
	return st
}

// keptWatch is the question of an Envoy that came with a runtime and is left
// with it for a while. The library's rule that a watch which was cancelled is
// never answered is kept by mu.
type keptWatch struct {
	ses *session

	mu        sync.Mutex
	request   *cache.DeltaRequest
	sub       cache.Subscription
	out       chan cache.DeltaResponse
	cancelled bool
	stop      func() // of the cache's watch, once there is one
}

// watchRuntime answers a question about runtimes from the cache, at once or, if
// the Envoy came with a runtime, when the group has settled.
func (g *group) watchRuntime(ses *session, r *cache.DeltaRequest, sub cache.Subscription, out chan cache.DeltaResponse) (func(), error) {
	if missing := g.emptyRuntimes(sub.SubscribedResources()); len(missing) > 0 {
		if err := g.runtime.cache.UpdateResources(missing, nil); err != nil {
			return nil, err
		}
	}
	g.mu.Lock()
	rt := &g.runtime
	if ses.keepsUntil.IsZero() {
		g.mu.Unlock()
		return rt.cache.CreateDeltaWatch(r, sub, out)
	}
	w := &keptWatch{ses: ses, request: r, sub: sub, out: out}
	rt.kept[w] = struct{}{}
	rt.look()
	g.mu.Unlock()
	return func() {
		g.mu.Lock()
		delete(rt.kept, w)
		g.mu.Unlock()
		w.cancel()
	}, nil
}

// start hands the question to the cache.
func (w *keptWatch) start(c *cache.LinearCache) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancelled {
		return
	}
	stop, err := c.CreateDeltaWatch(w.request, w.sub, w.out)
	if err != nil {
		// Only a request of another type is refused.
		w.ses.server.log.Error("xds runtime watch", "node", w.ses.node, "error", err)
		return
	}
	w.stop = stop
}

func (w *keptWatch) cancel() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancelled = true
	if w.stop != nil {
		w.stop()
	}
}

// emptyRuntimes notes an empty layer for each name that has none yet, and returns
// them: an Envoy with an RTDS layer asks for nothing else until that layer has
// come.
func (g *group) emptyRuntimes(names map[string]struct{}) map[string]types.Resource {
	g.mu.Lock()
	defer g.mu.Unlock()
	fresh := items{}
	for name := range names {
		if _, known := g.runtime.published[name]; known || len(g.runtime.published)+len(fresh) >= maxRuntimeNames {
			continue
		}
		fresh[name] = emptyLayer(name).item
	}
	if len(fresh) > 0 {
		g.runtime.published = change{set: fresh}.applied(g.runtime.published)
	}
	return messages(fresh)
}
