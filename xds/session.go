package xds

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/delta/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// Bounds on what one stream may make the server remember.
const (
	maxTypes     = 16     // types asked for; Envoy asks for four to six
	maxNames     = 65_536 // resource names subscribed to, per type
	maxOpenNonce = 8      // responses without an answer, per type; Envoy leaves one open
)

// ads is the gRPC service. It speaks delta only.
type ads struct{ s *Server }

// StreamAggregatedResources refuses the state-of-the-world variant: its caches
// send a refused version again and again, thousands of times a second.
func (a ads) StreamAggregatedResources(discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	a.s.observe(Event{Kind: EventRefused, Detail: "state-of-the-world stream"})
	return status.Error(codes.Unimplemented, "only incremental ADS is served: set api_type: DELTA_GRPC in the bootstrap's ads_config")
}

// DeltaAggregatedResources serves one Envoy.
func (a ads) DeltaAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	ses := &session{server: a.s, cancel: cancel, types: map[string]*typeState{}}
	// A library server per stream gives each stream its own callbacks and an
	// end of its own; the library keeps nothing else in it.
	err := delta.NewServer(ctx, ses, ses).DeltaStreamHandler(stream, resource.AnyType)
	if cause := context.Cause(ctx); err == nil && cause != nil && stream.Context().Err() == nil {
		return cause
	}
	return err
}

// session is one Envoy's stream. Fields below group are written by the stream's
// goroutine alone; types is guarded by group.mu.
type session struct {
	server *Server
	cancel context.CancelCauseFunc // ends the stream with a status

	group     *group // nil until the first request was accepted
	node      string
	listen    netip.AddrPort
	byDefault bool // listen is the group's default
	since     time.Time
	local     *listenCache
	types     map[string]*typeState
	// runtime is the state of the runtime's type, nil where the Envoy has no
	// such layer; guarded by group.mu.
	runtime *typeState
	// keepsUntil is how long it keeps the runtime that it came with, at least; zero
	// where it came with none or is through with it. Guarded by group.mu.
	keepsUntil time.Time
}

func (ses *session) key() nodeKey { return nodeKey{ses.group.name, ses.node, ses.listen} }

// typeState is what a stream knows of one type.
type typeState struct {
	wildcard bool
	names    map[string]struct{}
	// held are the versions the Envoy has accepted, or said it had when it
	// connected.
	held map[string]string
	// believed are the versions that were sent last, accepted or not. The
	// library compares them with its caches to see what to send.
	believed map[string]string
	open     []*sent // responses without an answer, oldest first
	// queued is set when a change was handed to the caches that this stream has
	// still to send.
	queued bool
	// late is set when a deadline passed without an answer, until it caught up.
	late    bool
	lastAck time.Time
	refused *refusal // the last refusal, or nil
}

// sent is a response on its way.
type sent struct {
	nonce    string
	versions map[string]string
	removed  []string
}

// refusal is a NACK.
type refusal struct {
	at   time.Time
	text string // one line
	// own is set when the cause is the node's own (a port in use, clusters that
	// it hasn't got yet): it says nothing about the content.
	own      bool
	versions map[string]string
	world    string // digest of the desired world at that time
	answered bool   // an ACK of the same type came later
}

var _ delta.Callbacks = (*session)(nil)

// OnDeltaStreamOpen accepts every stream; its first request says who it is.
func (ses *session) OnDeltaStreamOpen(context.Context, int64, string) error { return nil }

// OnDeltaStreamClosed forgets the stream.
func (ses *session) OnDeltaStreamClosed(int64, *corev3.Node) {
	if ses.group == nil {
		return
	}
	ses.group.detach(ses)
	ses.server.log.Info("xds stream closed", "group", ses.group.name, "node", ses.node)
	ses.server.observe(Event{Kind: EventDisconnect, Group: ses.group.name, Node: ses.node})
}

// OnStreamDeltaRequest takes in a subscription, an ACK or a NACK.
func (ses *session) OnStreamDeltaRequest(_ int64, r *discoveryv3.DeltaDiscoveryRequest) error {
	if ses.group == nil {
		if err := ses.identify(r.GetNode()); err != nil {
			ses.server.log.Warn("xds stream refused", "group", oneLine(r.GetNode().GetCluster()), "node", oneLine(r.GetNode().GetId()), "error", err)
			ses.server.observe(Event{Kind: EventRefused, Group: oneLine(r.GetNode().GetCluster()), Node: oneLine(r.GetNode().GetId()), Detail: oneLine(err.Error())})
			return err
		}
		ses.server.log.Info("xds stream opened", "group", ses.group.name, "node", ses.node, "listen", ses.listen)
		ses.server.observe(Event{Kind: EventConnect, Group: ses.group.name, Node: ses.node})
	}
	events, err := ses.group.request(ses, r)
	for _, e := range events {
		if e.Kind == EventNack {
			ses.server.log.Warn("xds response refused", "group", e.Group, "node", e.Node, "type", e.TypeURL, "error", e.Detail)
		}
		ses.server.observe(e)
	}
	return err
}

// OnStreamDeltaResponse remembers what a response holds, since its answer names
// only the nonce.
func (ses *session) OnStreamDeltaResponse(_ int64, _ *discoveryv3.DeltaDiscoveryRequest, r *discoveryv3.DeltaDiscoveryResponse) {
	if !isPublished(r.GetTypeUrl()) && r.GetTypeUrl() != typeRuntime {
		return
	}
	ses.group.sending(ses, r)
	ses.server.observe(Event{Kind: EventPush, TypeURL: r.GetTypeUrl(), Group: ses.group.name, Node: ses.node})
}

// identify joins the stream to its group and listening address.
func (ses *session) identify(node *corev3.Node) error {
	if node == nil {
		return status.Error(codes.InvalidArgument, "the first request of a stream must carry the node")
	}
	g, err := ses.server.groupOf(node.GetCluster())
	if err != nil {
		return err
	}
	listen, err := listenOf(node)
	if err != nil {
		return err
	}
	ses.node, ses.listen, ses.since = oneLine(node.GetId()), listen, time.Now()
	return g.attach(ses)
}

// listenOf reads the listening address from a node's metadata; the zero value
// stands for the group's default.
func listenOf(node *corev3.Node) (netip.AddrPort, error) {
	v, ok := node.GetMetadata().GetFields()[wire.NodeListen]
	if !ok {
		return netip.AddrPort{}, nil
	}
	text, ok := v.GetKind().(*structpb.Value_StringValue)
	if !ok {
		return netip.AddrPort{}, status.Errorf(codes.InvalidArgument, "node metadata %s is not a string; accepted: IP:port", wire.NodeListen)
	}
	a, err := netip.ParseAddrPort(text.StringValue)
	if err != nil || a.Port() == 0 || a.Addr().Zone() != "" {
		return netip.AddrPort{}, status.Errorf(codes.InvalidArgument, "node metadata %s is %q; accepted: IP:port", wire.NodeListen, oneLine(text.StringValue))
	}
	return a, nil
}

// CreateDeltaWatch picks the cache that answers; it takes MuxCache's place,
// since groups and listening addresses come and go.
func (ses *session) CreateDeltaWatch(r *cache.DeltaRequest, sub cache.Subscription, out chan cache.DeltaResponse) (func(), error) {
	switch r.GetTypeUrl() {
	case typeCDS:
		return ses.group.cds.CreateDeltaWatch(r, sub, out)
	case typeEDS:
		return ses.group.eds.CreateDeltaWatch(r, sub, out)
	case typeRDS:
		return ses.group.rds.CreateDeltaWatch(r, sub, out)
	case typeLDS:
		return ses.local.cache.CreateDeltaWatch(r, sub, out)
	case typeRuntime:
		return ses.group.watchRuntime(ses, r, sub, out)
	default:
		return ses.server.extras.watch(r, sub, out)
	}
}

// CreateWatch belongs to the state-of-the-world variant and is never reached.
func (ses *session) CreateWatch(*cache.Request, cache.Subscription, chan cache.Response) (func(), error) {
	return nil, status.Error(codes.Unimplemented, "only incremental ADS is served")
}

// isPublished reports whether a type is part of a world.
func isPublished(typeURL string) bool {
	switch typeURL {
	case typeCDS, typeEDS, typeRDS, typeLDS:
		return true
	}
	return false
}

// subscribe applies a request's subscription changes. The rules are those of
// the delta protocol: a first request without names is a wildcard.
func (ts *typeState) subscribe(r *discoveryv3.DeltaDiscoveryRequest) error {
	for _, n := range r.GetResourceNamesSubscribe() {
		if n == "*" {
			ts.wildcard = true
			continue
		}
		ts.names[n] = struct{}{}
	}
	for _, n := range r.GetResourceNamesUnsubscribe() {
		if n == "*" {
			ts.wildcard = false
			continue
		}
		delete(ts.names, n)
		delete(ts.held, n)
		delete(ts.believed, n)
	}
	if len(ts.names) > maxNames {
		return status.Errorf(codes.ResourceExhausted, "more than %d names of %s", maxNames, r.GetTypeUrl())
	}
	return nil
}

func newTypeState(r *discoveryv3.DeltaDiscoveryRequest) *typeState {
	ts := &typeState{
		wildcard: len(r.GetResourceNamesSubscribe()) == 0,
		names:    map[string]struct{}{},
		held:     map[string]string{},
		believed: map[string]string{},
	}
	maps.Copy(ts.held, r.GetInitialResourceVersions())
	maps.Copy(ts.believed, r.GetInitialResourceVersions())
	return ts
}

// take removes and returns the open response with that nonce.
func (ts *typeState) take(nonce string) (*sent, bool) {
	for i, o := range ts.open {
		if o.nonce == nonce {
			ts.open = slices.Delete(ts.open, i, i+1)
			return o, true
		}
	}
	return nil, false
}

// add notes a response that goes out.
func (ts *typeState) add(o *sent) {
	o.bring(ts.believed)
	ts.queued = false
	if len(ts.open) >= maxOpenNonce {
		ts.open = slices.Delete(ts.open, 0, 1)
	}
	ts.open = append(ts.open, o)
}

// bring applies what a response holds to a set of versions.
func (o *sent) bring(versions map[string]string) {
	for name, version := range o.versions {
		versions[name] = version
	}
	for _, name := range o.removed {
		delete(versions, name)
	}
}

// caughtUp reports whether the Envoy holds exactly the published versions of
// what it subscribes to.
func (ts *typeState) caughtUp(published items) bool { return ts.same(ts.held, published) }

// quiet reports whether nothing is on its way: neither a response to send nor
// an answer to come. A refused version is quiet, since it isn't sent again.
func (ts *typeState) quiet(published items) bool {
	return !ts.queued && len(ts.open) == 0 && ts.same(ts.believed, published)
}

// same compares versions with what is published of the subscribed names.
func (ts *typeState) same(versions map[string]string, published items) bool {
	if ts.wildcard {
		if len(versions) != len(published) {
			return false
		}
		for name, it := range published {
			if versions[name] != it.version {
				return false
			}
		}
		return true
	}
	for name := range ts.names {
		if versions[name] != published[name].version {
			return false
		}
	}
	return true
}
