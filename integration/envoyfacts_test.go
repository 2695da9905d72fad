package integration

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	accesslogdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// This file is the rig of the envoyfacts tests: a bootstrap put together from
// YAML in flow style (where indentation carries no meaning), a small ext_proc
// server, a small access-log receiver and a client.

const typePrefix = "type.googleapis.com/envoy."

// facts is one static configuration; every field is YAML flow text.
type facts struct {
	hcm         string   // more fields of the connection manager, "name: value,"
	filters     []string // HTTP filters in front of the router
	router      string   // more fields of the router filter
	routeConfig string   // more fields of the route configuration
	virtualHost string   // more fields of the virtual host
	routes      []string
	clusters    []string
}

func (f facts) bootstrap() []byte {
	filters := append(slices.Clone(f.filters), `{name: router, typed_config: {"@type": `+typePrefix+`extensions.filters.http.router.v3.Router, `+f.router+`}}`)
	return fmt.Appendf(nil, `{
node: {id: facts, cluster: facts},
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}},
static_resources: {
  listeners: [{name: in, address: {socket_address: {address: 127.0.0.1, port_value: 0}}, filter_chains: [{filters: [{
    name: hcm, typed_config: {
      "@type": %sextensions.filters.network.http_connection_manager.v3.HttpConnectionManager,
      stat_prefix: in, delayed_close_timeout: 0s, %s
      http_filters: [%s],
      route_config: {name: facts, %s virtual_hosts: [{name: all, domains: ["*"], %s routes: [%s]}]}}}]}]}],
  clusters: [%s]}}`,
		typePrefix, f.hcm, strings.Join(filters, ",\n"), f.routeConfig, f.virtualHost,
		strings.Join(f.routes, ",\n"), strings.Join(f.clusters, ",\n"))
}

// factEnvoy is a running configuration with a client of its own.
type factEnvoy struct {
	*envoytest.Envoy
	t      *testing.T
	addr   netip.AddrPort
	scheme string // "" is http
	client *http.Client
}

func startFacts(t *testing.T, f facts, opts ...envoytest.Option) *factEnvoy {
	t.Helper()
	e := &factEnvoy{t: t, Envoy: envoytest.Start(t, f.bootstrap(), opts...)}
	e.addr = e.Listener("in")
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 100}
	t.Cleanup(tr.CloseIdleConnections)
	e.client = &http.Client{Transport: tr, Timeout: time.Minute}
	return e
}

type answer struct {
	status int
	header http.Header
	body   string
}

// get sends a GET with headers given as name, value pairs.
func (e *factEnvoy) get(path string, headers ...string) answer {
	e.t.Helper()
	return e.send(http.MethodGet, path, nil, headers...)
}

func (e *factEnvoy) postJSON(path, body string, headers ...string) answer {
	e.t.Helper()
	return e.send(http.MethodPost, path, strings.NewReader(body), append([]string{"content-type", "application/json"}, headers...)...)
}

func (e *factEnvoy) send(method, path string, body io.Reader, headers ...string) answer {
	e.t.Helper()
	a, err := e.try(method, path, body, headers...)
	if err != nil {
		e.t.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

// try is send without the test: it may be used from other goroutines.
func (e *factEnvoy) try(method, path string, body io.Reader, headers ...string) (answer, error) {
	response, err := e.open(context.Background(), method, path, body, headers...)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{status: response.StatusCode, header: response.Header, body: string(text)}, err
}

func (e *factEnvoy) open(ctx context.Context, method, path string, body io.Reader, headers ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("%s://%v%s", cmp.Or(e.scheme, "http"), e.addr, path), body)
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	return e.client.Do(r)
}

// Filters and clusters.

// extProcFilter asks the ext_proc cluster about request headers only; it fails
// open unless more says otherwise.
func extProcFilter(more string) string {
	if !strings.Contains(more, "message_timeout") {
		more += ` message_timeout: 10s,`
	}
	if !strings.Contains(more, "failure_mode_allow") {
		more += ` failure_mode_allow: true,`
	}
	return `{name: envoy.filters.http.ext_proc, typed_config: {"@type": ` + typePrefix + `extensions.filters.http.ext_proc.v3.ExternalProcessor,
  grpc_service: {envoy_grpc: {cluster_name: extproc}}, ` + more + `
  processing_mode: {request_header_mode: SEND, response_header_mode: SKIP},
  request_attributes: [xds.cluster_name],
  metadata_options: {forwarding_namespaces: {untyped: [fairlead.peek]},
    receiving_namespaces: {untyped: [fairlead.steer, fairlead.groups, fairlead.log]}}}}`
}

func grpcCluster(name, socket, more string) string {
	return fmt.Sprintf(`{name: %s, connect_timeout: 1s, %s
  circuit_breakers: {thresholds: [{max_requests: 65536, max_pending_requests: 65536}]},
  typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3.HttpProtocolOptions: {
    "@type": %sextensions.upstreams.http.v3.HttpProtocolOptions, explicit_http_config: {http2_protocol_options: {}}}},
  load_assignment: {cluster_name: %s, endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: %s}}}}]}]}}`,
		name, more, typePrefix, name, socket)
}

const (
	highBreakers = `circuit_breakers: {thresholds: [{max_retries: 1000, max_requests: 65536, max_pending_requests: 65536, max_connections: 65536}]},`
	noPanic      = `common_lb_config: {healthy_panic_threshold: {value: 0}, update_merge_window: 0s},`

	overrideHost = `load_balancing_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.override_host, typed_config: {
    "@type": ` + typePrefix + `extensions.load_balancing_policies.override_host.v3.OverrideHost,
    override_host_sources: [{metadata: {key: fairlead.steer, path: [{key: hosts}]}}],
    selected_host_key: {key: fairlead.served, path: [{key: host}]},
    fallback_policy: {policies: [{typed_extension_config: {name: envoy.load_balancing_policies.least_request, typed_config: {
      "@type": ` + typePrefix + `extensions.load_balancing_policies.least_request.v3.LeastRequest}}}]}}}}]},`
)

// pool is a cluster that serves the named host if metadata names one. hosts are
// lb_endpoints (see host); more may replace the breakers.
func pool(name, more string, hosts ...string) string {
	return poolWithFloor(name, more, "", hosts...)
}

// floor is an endpoint at priority 1 that nobody listens on.
const floorEndpoint = `{priority: 1, lb_endpoints: [{endpoint: {
  address: {pipe: {path: /nonexistent/fairlead-void.sock}},
  health_check_config: {disable_active_health_check: true}}}]}`

func poolWithFloor(name, more, floor string, hosts ...string) string {
	if !strings.Contains(more, "circuit_breakers") {
		more += highBreakers
	}
	var localities []string
	if len(hosts) > 0 {
		localities = append(localities, `{priority: 0, lb_endpoints: [`+strings.Join(hosts, ", ")+`]}`)
	}
	if floor != "" {
		localities = append(localities, floor)
	}
	return fmt.Sprintf(`{name: %s, type: STATIC, connect_timeout: 2s, %s %s %s
  load_assignment: {cluster_name: %s, policy: {overprovisioning_factor: 1000000}, endpoints: [%s]}}`,
		name, noPanic, overrideHost, more, name, strings.Join(localities, ", "))
}

// host is an lb_endpoint; health is empty or a health status such as UNHEALTHY.
func host(at netip.AddrPort, health string) string {
	if health != "" {
		health = "health_status: " + health + ", "
	}
	return fmt.Sprintf(`{%sendpoint: {address: {socket_address: {address: %s, port_value: %d}}}}`, health, at.Addr(), at.Port())
}

func hostsOf(ups ...*envoytest.Upstream) []string {
	var hosts []string
	for _, u := range ups {
		hosts = append(hosts, host(u.Addr(), ""))
	}
	return hosts
}

// list joins addresses as the host list that ext_proc sends.
func list(ups ...*envoytest.Upstream) string {
	var addrs []string
	for _, u := range ups {
		addrs = append(addrs, u.Addr().String())
	}
	return strings.Join(addrs, ",")
}

// chainRoute walks groups in order, one per attempt; a group is the text of a
// priority_group. retry holds more fields of the retry policy.
func chainRoute(match, retry, more string, groups ...string) string {
	if !strings.Contains(retry, "retry_on") {
		retry += ` retry_on: "reset,connect-failure,refused-stream,retriable-status-codes",`
	}
	return fmt.Sprintf(`{match: %s, %s route: {timeout: 0s,
  retry_policy: {%s retriable_status_codes: [503], num_retries: %d, refresh_cluster_on_retry: true,
    retry_back_off: {base_interval: 0.001s, max_interval: 0.01s}},
  inline_cluster_specifier_plugin: {extension: {name: envoy.router.cluster_specifier_plugin.priority_group, typed_config: {
    "@type": %sextensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier,
    override_metadata_namespace: fairlead.groups, priority_groups: [%s]}}}}}`,
		match, more, retry, max(1, len(groups)-1), typePrefix, strings.Join(groups, ", "))
}

func group(name string) string {
	return fmt.Sprintf(`{name: %s, clusters: [{cluster_name: %s, weight: 1}]}`, name, name)
}

func prefix(p string) string { return `{prefix: "` + p + `"}` }

func clusterRoute(match, cluster string) string {
	return fmt.Sprintf(`{match: %s, route: {cluster: %s, timeout: 0s}}`, match, cluster)
}

// A small ext_proc server.

// processor answers each request-headers message with answer; a nil answer ends
// the stream without one, as a handler that returns early would.
type processor struct {
	extprocv3.UnimplementedExternalProcessorServer
	t      *testing.T
	socket string
	server *grpc.Server
	served sync.WaitGroup
	freeze *freezer

	mu     sync.Mutex
	answer func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse
	seen   []*extprocv3.ProcessingRequest
}

func newProcessor(t *testing.T, answer func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse) *processor {
	t.Helper()
	p := &processor{t: t, socket: filepath.Join(envoytest.ShortTempDir(t), "ep"), answer: answer}
	p.start()
	t.Cleanup(p.kill)
	return p
}

func (p *processor) cluster() string { return grpcCluster("extproc", p.socket, "") }

func (p *processor) start() {
	p.t.Helper()
	l, err := net.Listen("unix", p.socket)
	if err != nil {
		p.t.Fatal(err)
	}
	p.freeze = newFreezer(l)
	p.server = grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(p.server, p)
	healthv1.RegisterHealthServer(p.server, health.NewServer())
	server := p.server
	p.served.Go(func() { _ = server.Serve(p.freeze) })
}

// kill ends the server at once; its socket refuses connections afterwards.
func (p *processor) kill() {
	p.freeze.thaw()
	p.server.Stop()
	p.served.Wait()
	_ = os.Remove(p.socket)
}

func (p *processor) answerWith(f func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = f
}

// requests returns what was received so far.
func (p *processor) requests() []*extprocv3.ProcessingRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.seen)
}

// last returns the newest message.
func (p *processor) last() *extprocv3.ProcessingRequest {
	p.t.Helper()
	all := p.requests()
	if len(all) == 0 {
		p.t.Fatal("ext_proc received nothing")
	}
	return all[len(all)-1]
}

func (p *processor) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) || err != nil {
			return nil
		}
		p.mu.Lock()
		p.seen = append(p.seen, request)
		answer := p.answer
		p.mu.Unlock()
		response := answer(request)
		if response == nil {
			return nil
		}
		if err := stream.Send(response); err != nil {
			return err
		}
	}
}

// requestHeader returns a header of a request-headers message, "" when absent.
func requestHeader(r *extprocv3.ProcessingRequest, name string) string {
	for _, h := range r.GetRequestHeaders().GetHeaders().GetHeaders() {
		if h.GetKey() == name {
			return string(h.GetRawValue())
		}
	}
	return ""
}

// peeked returns a body field that json_to_metadata found.
func peeked(r *extprocv3.ProcessingRequest, key string) (any, bool) {
	v, ok := r.GetMetadataContext().GetFilterMetadata()["fairlead.peek"].GetFields()[key]
	return v.AsInterface(), ok
}

// metadata is the content of an answer: namespace to struct.
type metadata map[string]any

func structOf(m metadata) *structpb.Struct {
	s, err := structpb.NewStruct(m)
	if err != nil {
		panic(err) // a mistake in the test's own literal
	}
	return s
}

// reply is an answer to a request-headers message with metadata alone.
func reply(m metadata) *extprocv3.ProcessingResponse {
	r := &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}}}
	if m != nil {
		r.DynamicMetadata = structOf(m)
	}
	return r
}

// withClear adds clear_route_cache, and a header mutation that sets the given
// headers (name, value pairs); it may be empty.
func withClear(r *extprocv3.ProcessingResponse, set ...string) *extprocv3.ProcessingResponse {
	common := withHeaders(r, set...).GetRequestHeaders().GetResponse()
	common.ClearRouteCache = true
	return r
}

func withHeaders(r *extprocv3.ProcessingResponse, set ...string) *extprocv3.ProcessingResponse {
	mutation := &extprocv3.HeaderMutation{}
	for i := 0; i+1 < len(set); i += 2 {
		mutation.SetHeaders = append(mutation.SetHeaders, &corev3.HeaderValueOption{
			Header: &corev3.HeaderValue{Key: set[i], RawValue: []byte(set[i+1])},
		})
	}
	r.GetRequestHeaders().Response = &extprocv3.CommonResponse{HeaderMutation: mutation}
	return r
}

// always answers every message alike.
func always(build func() *extprocv3.ProcessingResponse) func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	return func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse { return build() }
}

// steerTo answers with a host list.
func steerTo(hosts string) func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	return always(func() *extprocv3.ProcessingResponse {
		return reply(metadata{"fairlead.steer": map[string]any{"hosts": hosts}})
	})
}

// freezer is a listener whose connections can be made to stand still: the kernel
// still accepts, nothing is read or answered, as with a stopped process.
type freezer struct {
	net.Listener
	mu   sync.Mutex
	gate chan struct{} // closed while running
}

func newFreezer(l net.Listener) *freezer {
	f := &freezer{Listener: l, gate: make(chan struct{})}
	close(f.gate)
	return f
}

func (f *freezer) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gate = make(chan struct{})
}

func (f *freezer) thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.gate:
	default:
		close(f.gate)
	}
}

func (f *freezer) wait() {
	f.mu.Lock()
	gate := f.gate
	f.mu.Unlock()
	<-gate
}

func (f *freezer) Accept() (net.Conn, error) {
	c, err := f.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &frozenConn{Conn: c, f: f}, nil
}

type frozenConn struct {
	net.Conn
	f *freezer
}

func (c *frozenConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.f.wait()
	return n, err
}

func (c *frozenConn) Write(p []byte) (int, error) {
	c.f.wait()
	return c.Conn.Write(p)
}

// A small access-log receiver.

type logReceiver struct {
	accesslogv3.UnimplementedAccessLogServiceServer
	t      *testing.T
	socket string

	mu      sync.Mutex
	entries []logged
}

// logged is one HTTP entry with the name of its log.
type logged struct {
	log   string
	entry *accesslogdatav3.HTTPAccessLogEntry
}

func (l logged) kind() accesslogdatav3.AccessLogType {
	return l.entry.GetCommonProperties().GetAccessLogType()
}

func newLogReceiver(t *testing.T) *logReceiver {
	t.Helper()
	r := &logReceiver{t: t, socket: filepath.Join(envoytest.ShortTempDir(t), "als")}
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	accesslogv3.RegisterAccessLogServiceServer(server, r)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() {
		server.Stop()
		served.Wait()
	})
	return r
}

func (r *logReceiver) cluster() string { return grpcCluster("als", r.socket, "") }

func (r *logReceiver) StreamAccessLogs(stream accesslogv3.AccessLogService_StreamAccessLogsServer) error {
	name := ""
	for {
		message, err := stream.Recv()
		if err != nil {
			return nil
		}
		if id := message.GetIdentifier(); id != nil {
			name = id.GetLogName()
		}
		r.mu.Lock()
		for _, e := range message.GetHttpLogs().GetLogEntry() {
			r.entries = append(r.entries, logged{log: name, entry: e})
		}
		r.mu.Unlock()
	}
}

// find waits for n entries of a kind and returns them.
func (r *logReceiver) find(kind accesslogdatav3.AccessLogType, n int) []logged {
	r.t.Helper()
	var found []logged
	envoytest.Eventually(r.t, fmt.Sprintf("%d log entries of kind %v", n, kind), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		found = found[:0]
		for _, e := range r.entries {
			if e.kind() == kind {
				found = append(found, e)
			}
		}
		return len(found) >= n
	})
	return found
}

// grpcLog is an access logger that writes the given kinds of entries.
func grpcLog(name, kinds, more string) string {
	return fmt.Sprintf(`{name: envoy.access_loggers.http_grpc, filter: {log_type_filter: {types: [%s]}}, typed_config: {
  "@type": %sextensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig, common_config: {log_name: %s, transport_api_version: V3,
    grpc_service: {envoy_grpc: {cluster_name: als}}, buffer_size_bytes: 16384, buffer_flush_interval: 0.05s, %s}}}`,
		kinds, typePrefix, name, more)
}

func zeros(n int) []byte { return bytes.Repeat([]byte("0"), n) }
