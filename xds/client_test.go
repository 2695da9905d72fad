package xds

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"go.uber.org/goleak"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// patience bounds every wait of a test; it is generous, for loaded machines.
const patience = 20 * time.Second

var short = map[string]string{typeCDS: "CDS", typeEDS: "EDS", typeRDS: "RDS", typeLDS: "LDS", typeRuntime: "RTDS"}

// world under test -----------------------------------------------------------

// target is a config with one group "edge" and one route over pools of two
// endpoints each, weighted as given ("h100=10 a100=90").
func target(split string, edits ...func(*fleet.Config)) Target {
	cfg := &fleet.Config{
		Groups: []fleet.Group{{
			Name:     "edge",
			Listener: fleet.Listener{Address: netip.MustParseAddrPort("127.0.0.1:9001"), PeekDigits: 6, DrainTime: time.Hour},
			Routes:   []string{"messages"},
		}},
		Routes: []fleet.Route{{
			Name: "messages", Match: fleet.Match{Prefix: "/v1/"}, Dialect: fleet.DialectOpenAI,
			Strategy: fleet.StrategyDynamic, ClientStrategy: fleet.ClientStrategyHonor,
			DefaultMaxTokens: 512, RetryBody: 8 << 20, MaxBody: 64 << 20,
		}},
	}
	for i, arm := range strings.Fields(split) {
		var weight uint32
		name, number, _ := strings.Cut(arm, "=")
		fmt.Sscan(number, &weight)
		cfg.Routes[0].Split = append(cfg.Routes[0].Split, fleet.SplitWeight{Pool: name, Weight: weight})
		cfg.Pools = append(cfg.Pools, pool(name, i))
	}
	for _, edit := range edits {
		edit(cfg)
	}
	return Target{Config: cfg, Runtime: envoy.Runtime{
		ExtProc: fleet.Address{Path: "/run/x.sock"}, AccessLog: fleet.Address{Path: "/run/a.sock"},
	}}
}

func pool(name string, i int) fleet.Pool {
	p := fleet.Pool{Name: name, Tier: name, Protocol: fleet.HTTP1, MaxInFlight: 256, ConnectTimeout: 3 * time.Second,
		Telemetry: fleet.Telemetry{Source: fleet.TelemetryNone}}
	for j := range 2 {
		a := netip.MustParseAddrPort(fmt.Sprintf("127.0.%d.%d:8000", i+1, j+1))
		p.Endpoints = append(p.Endpoints, fleet.Endpoint{Name: a.String(), Address: a, Capacity: 1})
	}
	return p
}

// window changes a pool's cluster.
func window(name string, size fleet.Bytes) func(*fleet.Config) {
	return editPool(name, func(p *fleet.Pool) {
		p.Protocol = fleet.H2C
		p.HTTP2 = fleet.HTTP2{InitialStreamWindow: size, InitialConnectionWindow: size}
	})
}

func editPool(name string, edit func(*fleet.Pool)) func(*fleet.Config) {
	return func(c *fleet.Config) {
		for i := range c.Pools {
			if c.Pools[i].Name == name {
				edit(&c.Pools[i])
			}
		}
	}
}

// secondGroup adds a group "core" with the same routes.
func secondGroup(c *fleet.Config) {
	g := c.Groups[0]
	g.Name = "core"
	g.Listener.Address = netip.MustParseAddrPort("127.0.0.1:9002")
	c.Groups = append(c.Groups, g)
}

// rig ------------------------------------------------------------------------

// rig is a running server with an in-memory network.
type rig struct {
	t      testing.TB
	server *Server
	net    *bufconn.Listener

	mu     sync.Mutex
	events []Event
}

func newRig(t testing.TB, first Target, edit ...func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, net: bufconn.Listen(1 << 20)}
	// Tests count missed deadlines; a loaded machine must not miss one.
	// Clusters don't linger, but where a test wants it.
	o := Options{AckDeadline: patience / 2, linger: 1, Observe: func(e Event) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.events = append(r.events, e)
	}}
	for _, e := range edit {
		e(&o)
	}
	r.server = New(o)
	r.submit(first)
	grpcServer := grpc.NewServer(ServerOptions()...)
	r.server.Register(grpcServer)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.server.Run(ctx) })
	wg.Go(func() { _ = grpcServer.Serve(r.net) })
	t.Cleanup(func() {
		cancel()
		grpcServer.Stop()
		wg.Wait()
	})
	return r
}

func deadline(d time.Duration) func(*Options) { return func(o *Options) { o.AckDeadline = d } }

func (r *rig) submit(t Target) {
	r.t.Helper()
	if err := r.server.Submit(t); err != nil {
		r.t.Fatal(err)
	}
}

// publish submits and waits until everything is out.
func (r *rig) publish(t Target) {
	r.t.Helper()
	r.submit(t)
	r.settle()
}

func (r *rig) settle() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.server.Settled(ctx); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) count(kind EventKind) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, e := range r.events {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

// state returns what Status says of a connected node and type, "STALE reason".
func (r *rig) state(node, typ string) string {
	for _, n := range r.server.Status() {
		for _, ts := range n.Types {
			if n.Connected && n.Node == node && ts.Type == typ {
				return strings.TrimSpace(string(ts.State) + " " + ts.Reason)
			}
		}
	}
	return "absent"
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// client ---------------------------------------------------------------------

// client is a delta ADS client that behaves as Envoy 1.40 does: the node only in
// the first message; EDS subscriptions from clusters, the CDS ACK held back
// until each new or changed cluster has had an assignment *after* it; LDS after
// the first CDS ACK; RDS from listeners. With a runtime layer it asks for that
// first, and for clusters only when it has come.
type client struct {
	t      testing.TB
	node   *corev3.Node
	stream grpc.BidiStreamingClient[discoveryv3.DeltaDiscoveryRequest, discoveryv3.DeltaDiscoveryResponse]
	conn   *grpc.ClientConn
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	refuse  func(typ string, r *discoveryv3.DeltaDiscoveryResponse) string // "" accepts
	mute    map[string]bool                                                // types without answers
	held    map[string]map[string]string                                   // type → name → version
	content map[string]map[string]proto.Message
	trace   []string
	err     error
	sent    bool // the first message, with the node
	layer   bool // its bootstrap has an RTDS layer

	warming  map[string]bool
	cdsNonce string // held back while clusters warm
}

type clientOption func(*client)

func refusing(f func(typ string, r *discoveryv3.DeltaDiscoveryResponse) string) clientOption {
	return func(c *client) { c.refuse = f }
}

func listening(addr string) clientOption {
	return func(c *client) {
		c.node.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{wire.NodeListen: structpb.NewStringValue(addr)}}
	}
}

// holding starts with what another client held, as an Envoy that reconnects.
func holding(other *client) clientOption {
	return func(c *client) {
		other.mu.Lock()
		defer other.mu.Unlock()
		for typ, m := range other.held {
			c.held[typ] = maps.Clone(m)
		}
		for typ, m := range other.content {
			c.content[typ] = maps.Clone(m)
		}
	}
}

// layered gives a client an RTDS layer.
func layered(c *client) { c.layer = true }

// connect starts a client of a group.
func (r *rig) connect(node, group string, opts ...clientOption) *client {
	r.t.Helper()
	c := &client{
		t: r.t, node: &corev3.Node{Id: node, Cluster: group}, done: make(chan struct{}),
		held: map[string]map[string]string{}, content: map[string]map[string]proto.Message{},
		mute: map[string]bool{}, warming: map[string]bool{},
	}
	for _, t := range []string{typeCDS, typeEDS, typeRDS, typeLDS, typeRuntime} {
		c.held[t], c.content[t] = map[string]string{}, map[string]proto.Message{}
	}
	for _, o := range opts {
		o(c)
	}
	var err error
	c.conn, err = grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return r.net.DialContext(ctx) }))
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	c.stream, err = discoveryv3.NewAggregatedDiscoveryServiceClient(c.conn).DeltaAggregatedResources(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	go c.run()
	r.t.Cleanup(c.close)
	return c
}

// join connects and waits until the client holds the whole world.
func (r *rig) join(node, group string, opts ...clientOption) *client {
	r.t.Helper()
	c := r.connect(node, group, opts...)
	eventually(r.t, node+" is synced", func() bool {
		for _, typ := range []string{"CDS", "EDS", "RDS", "LDS"} {
			if r.state(node, typ) != "SYNCED" {
				return false
			}
		}
		return true
	})
	c.forget()
	return c
}

func (c *client) close() {
	c.cancel()
	<-c.done
	_ = c.conn.Close()
}

func (c *client) run() {
	defer close(c.done)
	c.mu.Lock()
	if c.layer {
		c.send(&discoveryv3.DeltaDiscoveryRequest{
			TypeUrl: typeRuntime, ResourceNamesSubscribe: []string{wire.RuntimeName}, InitialResourceVersions: c.held[typeRuntime],
		})
	}
	if !c.layer || len(c.held[typeRuntime]) > 0 {
		c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeCDS, InitialResourceVersions: c.held[typeCDS]})
	}
	for _, typ := range []string{typeEDS, typeLDS, typeRDS} {
		if len(c.held[typ]) == 0 {
			continue
		}
		req := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: typ, InitialResourceVersions: c.held[typ]}
		if typ != typeLDS {
			req.ResourceNamesSubscribe = sortedNames(c.held[typ])
		}
		c.send(req)
	}
	c.mu.Unlock()
	for {
		resp, err := c.stream.Recv()
		c.mu.Lock()
		if err != nil {
			c.err = err
			c.mu.Unlock()
			return
		}
		c.take(resp)
		c.mu.Unlock()
	}
}

func (c *client) send(r *discoveryv3.DeltaDiscoveryRequest) {
	if !c.sent {
		r.Node, c.sent = c.node, true
	}
	_ = c.stream.Send(r)
}

func (c *client) take(r *discoveryv3.DeltaDiscoveryResponse) {
	typ := r.GetTypeUrl()
	if len(r.GetResources())+len(r.GetRemovedResources()) > 0 {
		c.trace = append(c.trace, describe(r))
	}
	if c.mute[typ] {
		return
	}
	if c.refuse != nil {
		if text := c.refuse(short[typ], r); text != "" {
			c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typ, ResponseNonce: r.GetNonce(), ErrorDetail: &statuspb.Status{Code: 13, Message: text}})
			return
		}
	}
	var fresh []string
	for _, res := range r.GetResources() {
		msg, err := res.GetResource().UnmarshalNew()
		if err != nil {
			c.t.Error(err)
		}
		if _, known := c.content[typ][res.GetName()]; !known {
			fresh = append(fresh, res.GetName())
		}
		c.held[typ][res.GetName()], c.content[typ][res.GetName()] = res.GetVersion(), msg
	}
	for _, name := range r.GetRemovedResources() {
		delete(c.held[typ], name)
		delete(c.content[typ], name)
	}
	c.react(r, fresh)
}

func (c *client) react(r *discoveryv3.DeltaDiscoveryResponse, fresh []string) {
	typ := r.GetTypeUrl()
	ack := func(typ, nonce string) {
		c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typ, ResponseNonce: nonce})
	}
	switch typ {
	case typeCDS:
		c.warm(r, fresh)
	case typeEDS:
		for _, res := range r.GetResources() {
			delete(c.warming, res.GetName())
		}
		ack(typ, r.GetNonce())
	case typeLDS:
		for _, res := range r.GetResources() {
			if name := routeName(c.t, c.content[typ][res.GetName()].(*listenerv3.Listener)); c.held[typeRDS][name] == "" {
				c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeRDS, ResourceNamesSubscribe: []string{name}})
			}
		}
		ack(typ, r.GetNonce())
	case typeRuntime:
		ack(typ, r.GetNonce())
		if slices.Contains(fresh, wire.RuntimeName) {
			c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeCDS})
		}
	default:
		ack(typ, r.GetNonce())
	}
	if c.cdsNonce != "" && len(c.warming) == 0 {
		ack(typeCDS, c.cdsNonce)
		c.cdsNonce = ""
		if len(c.held[typeLDS]) == 0 {
			c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeLDS})
		}
	}
}

// warm notes which clusters wait for an assignment and follows their
// subscriptions.
func (c *client) warm(r *discoveryv3.DeltaDiscoveryResponse, fresh []string) {
	c.cdsNonce = r.GetNonce()
	var subscribe []string
	for _, res := range r.GetResources() {
		if c.content[typeCDS][res.GetName()].(*clusterv3.Cluster).GetType() != clusterv3.Cluster_EDS {
			continue
		}
		c.warming[res.GetName()] = true
		if slices.Contains(fresh, res.GetName()) {
			subscribe = append(subscribe, res.GetName())
		}
	}
	if len(subscribe)+len(r.GetRemovedResources()) > 0 {
		c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeEDS, ResourceNamesSubscribe: subscribe, ResourceNamesUnsubscribe: r.GetRemovedResources()})
		for _, n := range r.GetRemovedResources() {
			delete(c.held[typeEDS], n)
			delete(c.content[typeEDS], n)
		}
	}
}

func routeName(t testing.TB, l *listenerv3.Listener) string {
	for _, chain := range append(slices.Clone(l.GetFilterChains()), l.GetDefaultFilterChain()) {
		for _, f := range chain.GetFilters() {
			var m hcmv3.HttpConnectionManager
			if f.GetTypedConfig().UnmarshalTo(&m) == nil && m.GetRds() != nil {
				return m.GetRds().GetRouteConfigName()
			}
		}
	}
	t.Error("the listener names no route configuration")
	return ""
}

// describe is a response as "CDS +a +b -c".
func describe(r *discoveryv3.DeltaDiscoveryResponse) string {
	var names []string
	for _, res := range r.GetResources() {
		names = append(names, "+"+res.GetName())
	}
	for _, n := range r.GetRemovedResources() {
		names = append(names, "-"+n)
	}
	slices.Sort(names)
	return short[r.GetTypeUrl()] + " " + strings.Join(names, " ")
}

func (c *client) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trace = nil
}

// got is what came since the last forget, without empty responses.
func (c *client) got() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.trace)
}

func (c *client) failure() error {
	select {
	case <-c.done:
	case <-time.After(patience):
		return fmt.Errorf("the stream is still open: %w", os.ErrDeadlineExceeded)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *client) hold(typ, name string) proto.Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.content[typ][name]
}

func (c *client) expect(want ...string) {
	c.t.Helper()
	if got := c.got(); !slices.Equal(got, want) {
		c.t.Errorf("node %s got\n  %s\nwant\n  %s", c.node.Id, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}
