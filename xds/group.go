package xds

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxListens bounds the listening addresses of a group. When it is reached, an
// address that no Envoy uses at present makes room.
const maxListens = 4096

// group holds what one group is served and who is connected. Its publisher
// (run) is the only writer of the caches after newGroup, save that attach adds
// a cache for a new listening address, and that the runtime has a publisher of
// its own (runRuntime).
type group struct {
	server        *Server
	name          string
	cds, eds, rds *cache.LinearCache
	wake          chan struct{} // capacity 1: something to look at
	gone          chan struct{} // closed by remove

	mu       sync.Mutex
	sessions map[*session]struct{}
	refusers map[*session]struct{} // sessions that may refuse what is published
	listens  map[netip.AddrPort]*listenCache
	removed  error // the status streams are ended with, or nil

	desired  *world // last submitted
	handled  *world // last desired one that was published, whatever came of it
	current  *world // what the caches hold, once a sequence is over
	accepted *world // last one that some Envoy held completely, or nil
	// listenWorld is the world whose listeners the caches hold.
	listenWorld *world
	// refusedText says why desired isn't current, or is "".
	refusedText string

	// What the caches hold, generations included.
	clusters, endpoints, routes items
	generations                 generations
	// leaving are clusters that the caches hold beside the current world's, with
	// their assignments, and when each may go.
	leaving map[string]time.Time
	// uploads is the upload timeout of the world published before, and uploadsOver when
	// those are over that began under the worlds before that.
	uploads     time.Duration
	uploadsOver time.Time

	runtime runtime

	publishing bool          // a sequence is under way: the caches are between two worlds
	waiting    *barrier      // the step waited for, or nil
	idle       chan struct{} // closed while there is nothing to publish
}

// listenCache is the LDS cache of one listening address.
type listenCache struct {
	address  netip.AddrPort
	cache    *cache.LinearCache
	item     listenerItem
	sessions int
}

// newGroup fills the caches with the group's first world.
func newGroup(s *Server, w *world) *group {
	g := &group{
		server: s, name: w.group.Name,
		cds:  filled(typeCDS, w.clusters),
		eds:  filled(typeEDS, w.endpoints),
		rds:  filled(typeRDS, w.routes),
		wake: make(chan struct{}, 1),
		gone: make(chan struct{}),
		idle: make(chan struct{}),

		sessions: map[*session]struct{}{},
		refusers: map[*session]struct{}{},
		listens:  map[netip.AddrPort]*listenCache{},
		desired:  w, handled: w, current: w, listenWorld: w,
		clusters: w.clusters, endpoints: w.endpoints, routes: w.routes,
		generations: generations{},
		leaving:     map[string]time.Time{},
		uploads:     w.group.Listener.UploadTimeout,
		runtime:     newRuntime(),
	}
	for address, l := range w.listeners {
		g.listens[address] = newListenCache(address, l)
	}
	close(g.idle)
	return g
}

func filled(typeURL string, m items) *cache.LinearCache {
	return cache.NewLinearCache(typeURL, cache.WithInitialResources(messages(m)))
}

func newListenCache(address netip.AddrPort, l listenerItem) *listenCache {
	return &listenCache{address: address, item: l, cache: filled(typeLDS, items{l.name: l.item})}
}

func messages(m items) map[string]types.Resource {
	out := make(map[string]types.Resource, len(m))
	for name, it := range m {
		out[name] = it.msg
	}
	return out
}

func (g *group) addresses() []netip.AddrPort {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]netip.AddrPort, 0, len(g.listens))
	for a := range g.listens {
		out = append(out, a)
	}
	return out
}

// submit makes w the desired world.
func (g *group) submit(w *world) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.digest == g.desired.digest {
		return
	}
	g.desired = w
	g.markBusy()
}

// markBusy wakes the publisher. The caller holds g.mu.
func (g *group) markBusy() {
	if g.removed != nil {
		return
	}
	select {
	case <-g.idle:
		g.idle = make(chan struct{})
	default:
	}
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

func (g *group) idleChan() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.idle
}

// remove ends the group's streams and its publisher.
func (g *group) remove(reason error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed != nil {
		return
	}
	g.removed = reason
	for ses := range g.sessions {
		ses.cancel(reason)
	}
	close(g.gone)
	select {
	case <-g.idle:
	default:
		close(g.idle)
	}
}

// attach lets a stream in, with the cache of its listening address.
func (g *group) attach(ses *session) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed != nil {
		return g.removed
	}
	if !ses.listen.IsValid() {
		ses.listen, ses.byDefault = g.listenWorld.group.Listener.Address, true
	}
	l, err := g.listenCacheFor(ses.listen)
	if err != nil {
		return err
	}
	l.sessions++
	ses.local, ses.group = l, g
	g.sessions[ses] = struct{}{}
	g.server.departed.forget(ses.key())
	return nil
}

func (g *group) listenCacheFor(a netip.AddrPort) (*listenCache, error) {
	if l := g.listens[a]; l != nil {
		return l, nil
	}
	if len(g.listens) >= maxListens && !g.forgetListen() {
		return nil, status.Errorf(codes.ResourceExhausted, "group %q has %d listening addresses in use, the most that are served", g.name, maxListens)
	}
	item, err := g.listenWorld.listenerFor(a)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "listening address %s: %s", a, oneLine(err.Error()))
	}
	l := newListenCache(a, item)
	g.listens[a] = l
	return l, nil
}

// forgetListen drops one listening address without streams, never the default.
func (g *group) forgetListen() bool {
	for a, l := range g.listens {
		if l.sessions == 0 && a != g.listenWorld.group.Listener.Address {
			delete(g.listens, a)
			delete(g.generations, generationKey{typeLDS, a.String()})
			return true
		}
	}
	return false
}

func (g *group) detach(ses *session) {
	g.mu.Lock()
	defer g.mu.Unlock()
	last := g.nodeStatus(ses, time.Now())
	delete(g.sessions, ses)
	delete(g.refusers, ses)
	last.Connected = false
	g.server.departed.add(last)
	ses.local.sessions--
	g.waiting.drop(ses)
	// Who is left may be the only one, and may have refused.
	if g.rollbackDue() {
		g.markBusy()
	}
	g.forgetRuntime(ses)
}

// request takes in one request of a stream and returns what there is to tell.
func (g *group) request(ses *session, r *discoveryv3.DeltaDiscoveryRequest) ([]Event, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	typeURL := r.GetTypeUrl()
	if typeURL == typeRuntime {
		return g.runtimeRequest(ses, r, time.Now())
	}
	ts := ses.types[typeURL]
	if ts == nil {
		if len(ses.types) >= maxTypes {
			return nil, status.Errorf(codes.ResourceExhausted, "more than %d types on one stream", maxTypes)
		}
		ts = newTypeState(r)
		ses.types[typeURL] = ts
	}
	if !isPublished(typeURL) {
		return nil, nil
	}
	if err := ts.subscribe(r); err != nil {
		return nil, err
	}
	event := Event{TypeURL: typeURL, Group: g.name, Node: ses.node}
	o, answered := ts.take(r.GetResponseNonce())
	if len(ts.open) == 0 && ts.same(ts.believed, g.published(typeURL, ses)) {
		// The library sends all it has queued before it hands over a request.
		ts.queued = false
	}
	switch {
	case !answered:
		if ts.quiet(g.published(typeURL, ses)) {
			g.waiting.done(ses, typeURL, accepted)
		}
		return nil, nil
	case r.GetErrorDetail() != nil:
		event.Kind, event.Detail = EventNack, oneLine(r.GetErrorDetail().GetMessage())
		g.nack(ses, typeURL, ts, o, event.Detail, localCause(r.GetErrorDetail().GetMessage()))
	default:
		event.Kind = EventAck
		g.ack(ses, typeURL, ts, o)
	}
	return []Event{event}, nil
}

func (g *group) ack(ses *session, typeURL string, ts *typeState, o *sent) {
	o.bring(ts.held)
	ts.lastAck = time.Now()
	if ts.refused != nil {
		ts.refused.answered = true
	}
	if !ts.quiet(g.published(typeURL, ses)) {
		return
	}
	wasLate := ts.late
	ts.late = false
	g.waiting.done(ses, typeURL, accepted)
	if routes := ses.types[typeRDS]; wasLate && typeURL == typeCDS && routes != nil && routes.refused != nil && !routes.refused.answered {
		// It refused routes to clusters it has only now. A new stream makes it
		// name what it really holds, and it is sent what it lacks.
		ses.cancel(status.Error(codes.Unavailable, "clusters came late: reconnect to be brought up to date"))
		return
	}
	g.promote(ses)
}

func (g *group) nack(ses *session, typeURL string, ts *typeState, o *sent, text string, local bool) {
	clusters := ses.types[typeCDS]
	ts.refused = &refusal{
		at: time.Now(), text: text, versions: o.versions, world: g.desired.digest,
		own: local || (typeURL == typeRDS && clusters != nil && clusters.late),
	}
	g.refusers[ses] = struct{}{}
	if holdsAny(g.published(typeURL, ses), o.versions) {
		// Else it refused content that was replaced meanwhile; its answer to
		// the new content is still to come.
		g.waiting.done(ses, typeURL, outcomeOf(ts.refused))
	}
	if g.rollbackDue() {
		g.markBusy()
	}
}

// promote makes the current world the accepted one if an Envoy holds all of it
// and none refuses it. The caller holds g.mu.
func (g *group) promote(ses *session) {
	if g.publishing || g.accepted == g.current {
		return
	}
	if g.holdsAll(ses) && g.refusing() == 0 {
		g.accepted = g.current
	}
}

func (g *group) holdsAll(ses *session) bool {
	if ses.types[typeCDS] == nil || ses.types[typeLDS] == nil {
		return false
	}
	for typeURL, ts := range ses.types {
		if isPublished(typeURL) && !ts.caughtUp(g.published(typeURL, ses)) {
			return false
		}
	}
	return true
}

// rollbackDue reports whether what the caches hold is refused by several
// Envoys, or by the only one, and there is accepted content to go back to.
// During a sequence the verdict of its steps decides. The caller holds g.mu.
func (g *group) rollbackDue() bool {
	if g.publishing || g.accepted == nil || g.accepted == g.current {
		return false
	}
	n := g.refusing()
	return n >= 2 || (n == 1 && len(g.sessions) == 1)
}

// refusing counts the Envoys that refuse what is published, and forgets those
// that no longer do.
func (g *group) refusing() int {
	for ses := range g.refusers {
		if !g.refuses(ses) {
			delete(g.refusers, ses)
		}
	}
	return len(g.refusers)
}

// refuses reports whether an Envoy's last answer about published content was a
// refusal for a reason that lies in the content.
func (g *group) refuses(ses *session) bool {
	for typeURL, ts := range ses.types {
		if r := ts.refused; r != nil && !r.own && !r.answered && holdsAny(g.published(typeURL, ses), r.versions) {
			return true
		}
	}
	return false
}

func holdsAny(published items, versions map[string]string) bool {
	for name, v := range versions {
		if published[name].version == v {
			return true
		}
	}
	return false
}

// sending notes a response that goes out.
func (g *group) sending(ses *session, r *discoveryv3.DeltaDiscoveryResponse) {
	o := &sent{nonce: r.GetNonce(), versions: make(map[string]string, len(r.GetResources())), removed: r.GetRemovedResources()}
	for _, res := range r.GetResources() {
		o.versions[res.GetName()] = res.GetVersion()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.GetTypeUrl() == typeRuntime {
		ses.runtime.add(o)
		return
	}
	ses.types[r.GetTypeUrl()].add(o)
}

// published returns what the caches hold of a type for an Envoy. The caller
// holds g.mu.
func (g *group) published(typeURL string, ses *session) items {
	switch typeURL {
	case typeCDS:
		return g.clusters
	case typeEDS:
		return g.endpoints
	case typeRDS:
		return g.routes
	case typeLDS:
		return items{ses.local.item.name: ses.local.item.item}
	}
	panic(fmt.Sprintf("xds: type %q is not published", typeURL))
}

// barrier waits until Envoys have answered. A nil barrier ignores all calls.
// It is guarded by group.mu.
type barrier struct {
	pending  map[answer]struct{}
	accepted map[string]int      // by type: Envoys that caught up
	refused  map[*session]string // the type each refused last
	closed   bool
	over     chan struct{} // closed when there is nothing more to wait for
}

type answer struct {
	ses     *session
	typeURL string
}

func newBarrier() *barrier {
	return &barrier{
		pending: map[answer]struct{}{}, accepted: map[string]int{}, refused: map[*session]string{},
		over: make(chan struct{}),
	}
}

// outcome is how an Envoy answered what a barrier waits for.
type outcome uint8

const (
	accepted outcome = iota + 1 // it has caught up
	refused                     // because of the content
	excused                     // refused for a reason of its own: says nothing
)

func outcomeOf(r *refusal) outcome {
	if r.own {
		return excused
	}
	return refused
}

// done notes an Envoy's answer.
func (b *barrier) done(ses *session, typeURL string, how outcome) {
	if b == nil {
		return
	}
	key := answer{ses, typeURL}
	if _, ok := b.pending[key]; !ok {
		return
	}
	delete(b.pending, key)
	switch how {
	case accepted:
		b.accepted[typeURL]++
	case refused:
		b.refused[ses] = typeURL
	}
	b.check()
}

// drop forgets an Envoy that is gone.
func (b *barrier) drop(ses *session) {
	if b == nil {
		return
	}
	for _, typeURL := range []string{typeCDS, typeEDS, typeRDS, typeLDS} {
		delete(b.pending, answer{ses, typeURL})
	}
	delete(b.refused, ses)
	b.check()
}

func (b *barrier) check() {
	if !b.closed && (len(b.pending) == 0 || len(b.refused) >= 2) {
		b.closed = true
		close(b.over)
	}
}

// verdict reports whether the content is refused: by several, or by the only
// one that answered.
func (b *barrier) verdict() bool {
	for _, typeURL := range b.refused {
		if len(b.refused) >= 2 || b.accepted[typeURL] == 0 {
			return true
		}
	}
	return false
}
