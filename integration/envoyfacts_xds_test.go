package integration

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	httpoptsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// controlPlane is a delta ADS server straight over go-control-plane's caches.
type controlPlane struct {
	t      *testing.T
	socket string
	caches map[string]*cachev3.LinearCache

	mu    sync.Mutex
	acked map[string]int // type URL to number of accepted responses
	nacks []string
}

func newControlPlane(t *testing.T, fill func(*controlPlane)) *controlPlane {
	t.Helper()
	c := &controlPlane{
		t: t, socket: filepath.Join(envoytest.ShortTempDir(t), "xds"),
		caches: make(map[string]*cachev3.LinearCache), acked: make(map[string]int),
	}
	mux := &cachev3.MuxCache{
		Classify:      func(r *cachev3.Request) string { return r.GetTypeUrl() },
		ClassifyDelta: func(r *cachev3.DeltaRequest) string { return r.GetTypeUrl() },
		Caches:        make(map[string]cachev3.Cache),
	}
	for _, url := range []string{resourcev3.ClusterType, resourcev3.EndpointType, resourcev3.ListenerType, resourcev3.RouteType, resourcev3.SecretType, resourcev3.RuntimeType} {
		c.caches[url] = cachev3.NewLinearCache(url)
		mux.Caches[url] = c.caches[url]
	}
	fill(c) // before anybody can connect: an empty world would be applied at once
	ctx, cancel := context.WithCancel(context.Background())
	server := serverv3.NewServer(ctx, mux, serverv3.CallbackFuncs{StreamDeltaRequestFunc: c.received})
	l, err := net.Listen("unix", c.socket)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, server)
	var served sync.WaitGroup
	served.Go(func() { _ = g.Serve(l) })
	t.Cleanup(func() {
		cancel()
		g.Stop()
		served.Wait()
	})
	return c
}

func (c *controlPlane) received(_ int64, r *discoveryv3.DeltaDiscoveryRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case r.GetErrorDetail() != nil:
		c.nacks = append(c.nacks, r.GetErrorDetail().GetMessage())
	case r.GetResponseNonce() != "":
		c.acked[r.GetTypeUrl()]++
	}
	return nil
}

// refused returns the error texts of NACKs so far.
func (c *controlPlane) refused() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.nacks)
}

func (c *controlPlane) acks(url string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.acked[url]
}

func (c *controlPlane) put(url, name string, m proto.Message) {
	c.t.Helper()
	if err := c.caches[url].UpdateResource(name, m); err != nil {
		c.t.Fatal(err)
	}
}

// ackTime pushes and returns how long the next accepted response of a type took.
func (c *controlPlane) ackTime(url string, push func()) time.Duration {
	c.t.Helper()
	before, start := c.acks(url), time.Now()
	push()
	envoytest.Eventually(c.t, "ACK of "+url, func() bool { return c.acks(url) > before })
	return time.Since(start)
}

func (c *controlPlane) bootstrap() []byte {
	return fmt.Appendf(nil, `{
node: {id: facts, cluster: facts},
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}},
dynamic_resources: {
  ads_config: {api_type: DELTA_GRPC, transport_api_version: V3, set_node_on_first_message_only: true,
    grpc_services: [{envoy_grpc: {cluster_name: xds}}]},
  cds_config: {ads: {}, resource_api_version: V3}, lds_config: {ads: {}, resource_api_version: V3}},
static_resources: {clusters: [%s]}}`, grpcCluster("xds", c.socket, ""))
}

func anyOf(m proto.Message) *anypb.Any {
	a, err := anypb.New(m)
	if err != nil {
		panic(err) // only a message that can't be marshalled: a mistake in the test
	}
	return a
}

func adsSource(timeout time.Duration) *corev3.ConfigSource {
	s := &corev3.ConfigSource{
		ResourceApiVersion:    corev3.ApiVersion_V3,
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
	}
	if timeout > 0 {
		s.InitialFetchTimeout = durationpb.New(timeout)
	}
	return s
}

const fetchTimeout = time.Second

// windowCluster is an h2c cluster over EDS with an initial stream window.
func windowCluster(window uint32) *clusterv3.Cluster {
	options := &httpoptsv3.HttpProtocolOptions{UpstreamProtocolOptions: &httpoptsv3.HttpProtocolOptions_ExplicitHttpConfig_{
		ExplicitHttpConfig: &httpoptsv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &httpoptsv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
				Http2ProtocolOptions: &corev3.Http2ProtocolOptions{
					InitialStreamWindowSize:     wrapperspb.UInt32(window),
					InitialConnectionWindowSize: wrapperspb.UInt32(2 * window),
				}}}}}
	return &clusterv3.Cluster{
		Name: "a", ConnectTimeout: durationpb.New(time.Second),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
		EdsClusterConfig:     &clusterv3.Cluster_EdsClusterConfig{EdsConfig: adsSource(fetchTimeout)},
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": anyOf(options),
		},
	}
}

// plainCluster is an HTTP/1.1 cluster over EDS.
func plainCluster() *clusterv3.Cluster {
	c := windowCluster(65535)
	c.TypedExtensionProtocolOptions = nil
	return c
}

// assignment holds one endpoint; generation is what a touch changes.
func assignment(port uint16, generation float64) *endpointv3.ClusterLoadAssignment {
	return &endpointv3.ClusterLoadAssignment{
		ClusterName: "a",
		Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
			Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
				"fairlead": {Fields: map[string]*structpb.Value{"generation": structpb.NewNumberValue(generation)}},
			}},
			HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: loopback(port)}},
		}}}},
	}
}

func loopback(port uint16) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address: "127.0.0.1", PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(port)},
	}}}
}

// listener has a route to cluster a and an initial stream window for clients.
func listener(port uint16, window uint32) *listenerv3.Listener {
	return listenerOf("in", port, &hcmv3.HttpConnectionManager{
		Http2ProtocolOptions: &corev3.Http2ProtocolOptions{InitialStreamWindowSize: wrapperspb.UInt32(window)},
		RouteSpecifier:       &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes("facts", "a", "")},
	})
}

// routedListener takes its routes from RDS under its own name.
func routedListener(name string, port uint16) *listenerv3.Listener {
	return listenerOf(name, port, &hcmv3.HttpConnectionManager{
		RouteSpecifier: &hcmv3.HttpConnectionManager_Rds{Rds: &hcmv3.Rds{RouteConfigName: name, ConfigSource: adsSource(0)}},
	})
}

func listenerOf(name string, port uint16, manager *hcmv3.HttpConnectionManager) *listenerv3.Listener {
	manager.StatPrefix = "in"
	manager.DelayedCloseTimeout = durationpb.New(0)
	manager.HttpFilters = []*hcmv3.HttpFilter{{Name: "router", ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: anyOf(&routerv3.Router{})}}}
	return &listenerv3.Listener{
		Name: name, Address: loopback(port),
		FilterChains: []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{{
			Name: "hcm", ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: anyOf(manager)},
		}}}},
	}
}

// routes sends everything to one cluster and marks the answers.
func routes(name, cluster, mark string) *routev3.RouteConfiguration {
	r := &routev3.RouteConfiguration{
		Name: name, ValidateClusters: wrapperspb.Bool(true),
		VirtualHosts: []*routev3.VirtualHost{{Name: "all", Domains: []string{"*"}, Routes: []*routev3.Route{{
			Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}},
			Action: &routev3.Route_Route{Route: &routev3.RouteAction{
				ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: cluster}, Timeout: durationpb.New(0),
			}},
		}}}},
	}
	if mark != "" {
		r.ResponseHeadersToAdd = []*corev3.HeaderValueOption{{Header: &corev3.HeaderValue{Key: "x-mark", Value: mark}}}
	}
	return r
}

func startDynamic(t *testing.T, c *controlPlane, opts ...envoytest.Option) *factEnvoy {
	t.Helper()
	e := &factEnvoy{t: t, Envoy: envoytest.Start(t, c.bootstrap(), opts...)}
	e.addr = e.Listener("in")
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	e.client = &http.Client{Transport: tr, Timeout: time.Minute}
	return e
}

// A changed cluster warms until its endpoints are sent again, and holds the ACK of
// the whole CDS response meanwhile. So the publisher touches the CLA right after
// the cluster; without the touch only initial_fetch_timeout ends the wait, and
// that is why it is 1 s.
func TestFactChangedClusterWarmsUntilItsEndpointsAreTouched(t *testing.T) {
	t.Parallel()
	server := envoytest.NewSettingsRecorder(t)
	port := server.Addr().Port()
	const first, touched, untouched = 65535, 131072, 262144
	cp := newControlPlane(t, func(c *controlPlane) {
		c.put(resourcev3.ClusterType, "a", windowCluster(first))
		c.put(resourcev3.EndpointType, "a", assignment(port, 1))
		c.put(resourcev3.ListenerType, "in", listener(uint16(envoytest.FreePort(t)), 65536))
	})
	e := startDynamic(t, cp)
	window := func() int64 {
		t.Helper()
		if got := e.get("/"); got.status != 200 {
			t.Fatalf("status %d", got.status)
		}
		seen := server.Seen()
		return int64(seen[len(seen)-1].Values[http2.SettingInitialWindowSize])
	}
	if got := window(); got != first {
		t.Fatalf("first window %d, want %d", got, first)
	}
	envoytest.Eventually(t, "ACK of the first clusters", func() bool { return cp.acks(resourcev3.ClusterType) > 0 })

	quick := cp.ackTime(resourcev3.ClusterType, func() {
		cp.put(resourcev3.ClusterType, "a", windowCluster(touched))
		cp.put(resourcev3.EndpointType, "a", assignment(port, 2))
	})
	if got := window(); got != touched {
		t.Errorf("window after the touched change %d, want %d", got, touched)
	}
	slow := cp.ackTime(resourcev3.ClusterType, func() {
		cp.put(resourcev3.ClusterType, "a", windowCluster(untouched))
		// The old cluster serves while the new one warms.
		if got := window(); got != touched && got != untouched {
			t.Errorf("window while warming %d", got)
		}
	})
	if got := window(); got != untouched {
		t.Errorf("window after the untouched change %d, want %d", got, untouched)
	}
	t.Logf("ACK after %v with the touch, %v without", quick, slow)
	if slow < fetchTimeout*9/10 {
		t.Errorf("without the touch the ACK came after %v, before initial_fetch_timeout %v", slow, fetchTimeout)
	}
	if quick > slow/2 {
		t.Errorf("with the touch the ACK took %v, without %v: no gain", quick, slow)
	}
	last := server.Seen()
	if got := last[len(last)-1].ConnectionWindow; got != 2*untouched {
		t.Errorf("connection window %d, want %d", got, 2*untouched)
	}
	if refused := cp.refused(); len(refused) > 0 {
		t.Errorf("refused: %q", refused)
	}
}

// A listener's change drains its connections, and what is left is cut at
// --drain-time-s: the bootstrap must set that above the longest generation.
func TestFactListenerChangeCutsStreamsAtTheDrainTime(t *testing.T) {
	t.Parallel()
	const drain = 2 * time.Second
	events := make(chan string)
	up := envoytest.NewUpstream(t, envoytest.SSE(events))
	port := uint16(envoytest.FreePort(t))
	cp := newControlPlane(t, func(c *controlPlane) {
		c.put(resourcev3.ClusterType, "a", plainCluster())
		c.put(resourcev3.EndpointType, "a", assignment(up.Addr().Port(), 1))
		c.put(resourcev3.ListenerType, "in", listener(port, 65536))
	})
	e := startDynamic(t, cp, envoytest.WithDrainTime(drain))
	response, err := e.open(t.Context(), http.MethodGet, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	expect := func(event string) {
		t.Helper()
		events <- event + "\n"
		if !lines.Scan() || lines.Text() != event {
			t.Fatalf("event %q: got %q, %v", event, lines.Text(), lines.Err())
		}
	}
	expect("data: before the change")
	envoytest.Eventually(t, "ACK of the first listener", func() bool { return cp.acks(resourcev3.ListenerType) > 0 })

	start := time.Now()
	cp.ackTime(resourcev3.ListenerType, func() { cp.put(resourcev3.ListenerType, "in", listener(port, 131072)) })
	if since := time.Since(start); since < drain/2 { // else the machine was too slow to tell
		expect("data: while draining")
	}
	if lines.Scan() {
		t.Errorf("unexpected line %q", lines.Text())
	}
	if lines.Err() == nil {
		t.Error("the stream ended as if it were complete, want a cut")
	}
	if after := time.Since(start); after < drain*3/4 {
		t.Errorf("cut %v after the change, before the drain time of %v", after, drain)
	}
}

// A weight change must cut nothing: endpoints removed over EDS get no new request,
// while their running streams finish.
func TestFactRemovedEndpointFinishesItsStreams(t *testing.T) {
	t.Parallel()
	events := make(chan string)
	ups := []*envoytest.Upstream{envoytest.NewUpstream(t, envoytest.SSE(events)), envoytest.NewUpstream(t, nil)}
	cp := newControlPlane(t, func(c *controlPlane) {
		c.put(resourcev3.ClusterType, "a", plainCluster())
		c.put(resourcev3.EndpointType, "a", assignment(ups[0].Addr().Port(), 1))
		c.put(resourcev3.ListenerType, "in", listener(uint16(envoytest.FreePort(t)), 65536))
	})
	e := startDynamic(t, cp)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(errors.New("test ended"))
	response, err := e.open(ctx, http.MethodGet, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	envoytest.Eventually(t, "ACK of the first endpoints", func() bool { return cp.acks(resourcev3.EndpointType) > 0 })
	cp.ackTime(resourcev3.EndpointType, func() { cp.put(resourcev3.EndpointType, "a", assignment(ups[1].Addr().Port(), 2)) })
	// The ACK leaves the main thread; workers follow within moments.
	ups[0].Handle(nil)
	envoytest.Eventually(t, "the new endpoint", func() bool { e.get("/"); return ups[1].Count() > 0 })
	before := ups[0].Count()
	for range 20 {
		e.get("/")
	}
	if n := ups[0].Count(); n != before {
		t.Errorf("the removed endpoint got %d new requests", n-before)
	}
	lines := bufio.NewScanner(response.Body)
	for _, event := range []string{"data: one", "data: two"} {
		events <- event + "\n"
		if !lines.Scan() || lines.Text() != event {
			t.Fatalf("stream of the removed endpoint: %q, %v", lines.Text(), lines.Err())
		}
	}
	close(events)
	if lines.Scan() || lines.Err() != nil {
		t.Errorf("end of the stream: %q, %v", lines.Text(), lines.Err())
	}
}

// With validate_clusters a route to a cluster that Envoy does not know is refused
// and its old table serves on. What became of the other resources of that response
// is open: in some runs the good one applies, in others it does not, and the cache
// of the server believes that all were delivered. So after a NACK every resource of
// the response has to be published again with changed content.
func TestFactRefusedRouteResponseLeavesItsGoodResourcesOpen(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	cp := newControlPlane(t, func(c *controlPlane) {
		c.put(resourcev3.ClusterType, "a", plainCluster())
		c.put(resourcev3.EndpointType, "a", assignment(up.Addr().Port(), 1))
		for _, name := range []string{"in", "other"} {
			c.put(resourcev3.ListenerType, name, routedListener(name, uint16(envoytest.FreePort(t))))
			c.put(resourcev3.RouteType, name, routes(name, "a", "first"))
		}
	})
	e := startDynamic(t, cp)
	good, bad := e.addr, e.Listener("other")
	mark := func(at netip.AddrPort) string {
		t.Helper()
		e.addr = at
		return e.get("/").header.Get("x-mark")
	}
	for _, at := range []netip.AddrPort{good, bad} {
		envoytest.Eventually(t, "first routes", func() bool { return mark(at) == "first" })
	}

	err := cp.caches[resourcev3.RouteType].UpdateResources(map[string]types.Resource{
		"in": routes("in", "a", "second"), "other": routes("other", "nowhere", "second"),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	envoytest.Eventually(t, "NACK", func() bool { return len(cp.refused()) > 0 })
	if text := cp.refused()[0]; !strings.Contains(text, "nowhere") {
		t.Errorf("the refusal does not name the cluster: %s", text)
	}
	if got := mark(bad); got != "first" {
		t.Errorf("the refused resource shows %q, want the old table", got)
	}
	before := mark(good)
	t.Logf("the good resource of the refused response shows %q", before)

	cp.ackTime(resourcev3.RouteType, func() { cp.put(resourcev3.RouteType, "other", routes("other", "a", "third")) })
	envoytest.Eventually(t, "the repaired resource", func() bool { return mark(bad) == "third" })
	if got := mark(good); got != before {
		t.Errorf("the good resource went from %q to %q: it was sent again after all", before, got)
	}
	cp.ackTime(resourcev3.RouteType, func() { cp.put(resourcev3.RouteType, "in", routes("in", "a", "third")) })
	envoytest.Eventually(t, "the good resource with changed content", func() bool { return mark(good) == "third" })
}

// The bootstrap names a runtime layer, for which Envoy holds back its start. A
// control plane that serves none must not keep a sidecar from starting; what it
// serves later takes effect, and an operator's word goes before it.
func TestFactStartDoesNotWaitForARuntimeThatNobodyServes(t *testing.T) {
	t.Parallel()
	cp := newControlPlane(t, func(*controlPlane) {})
	b, err := bootstrap.Render(bootstrap.Options{
		NodeID: "facts-1", Group: "facts", Listen: netip.MustParseAddrPort("127.0.0.1:1"),
		XDS: []fleet.Address{{Path: cp.socket}}, Admin: fleet.Address{Host: "127.0.0.1:0"},
	}, "json")
	if err != nil {
		t.Fatal(err)
	}
	e := envoytest.Start(t, b, envoytest.WithoutReadyWait())
	// The control plane answers nothing at all: clusters are asked for only once
	// the wait for the runtime is over.
	envoytest.Eventually(t, "clusters are asked for", func() bool {
		n, _ := e.Stat("cluster_manager.cds.update_attempt")
		return n > 0
	})
	if n, _ := e.Stat("runtime.num_layers"); n != 3 {
		t.Errorf("%d runtime layers, want static, rtds and admin", n)
	}
	const key = "circuit_breakers.a.default.max_requests"
	value := func() string {
		var page struct {
			Entries map[string]struct {
				Final string `json:"final_value"`
			} `json:"entries"`
		}
		if err := json.Unmarshal([]byte(e.AdminGet("/runtime")), &page); err != nil {
			t.Fatal(err)
		}
		return page.Entries[key].Final
	}
	layer, err := structpb.NewStruct(map[string]any{key: 5})
	if err != nil {
		t.Fatal(err)
	}
	cp.put(resourcev3.RuntimeType, wire.RuntimeName, &runtimev3.Runtime{Name: wire.RuntimeName, Layer: layer})
	envoytest.Eventually(t, "the served limit", func() bool { return value() == "5" })
	e.AdminPost("/runtime_modify?" + key + "=7")
	envoytest.Eventually(t, "the operator's limit", func() bool { return value() == "7" })
}
