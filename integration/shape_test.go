package integration

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	accesslogdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// The shape tests give the resources of package envoy to a real Envoy as one
// static configuration, with nobody behind the ext_proc and access-log
// addresses: this is what a sidecar does while Fairlead is away.

// static turns resources into a bootstrap that needs no control plane.
func static(r envoy.Resources, l *listenerv3.Listener) (*bootstrapv3.Bootstrap, error) {
	assignments := map[string]*endpointv3.ClusterLoadAssignment{}
	for _, a := range r.Endpoints {
		assignments[a.GetClusterName()] = a
	}
	var clusters []*clusterv3.Cluster
	for _, c := range r.Clusters {
		c = proto.Clone(c).(*clusterv3.Cluster)
		if a := assignments[c.GetName()]; a != nil {
			c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}
			c.EdsClusterConfig = nil
			c.LoadAssignment = a
		}
		clusters = append(clusters, c)
	}
	l, err := withRoutes(l, r.Routes[0])
	if err != nil {
		return nil, err
	}
	return &bootstrapv3.Bootstrap{
		Node: &corev3.Node{Id: "shape-1", Cluster: "edge"},
		Admin: &bootstrapv3.Admin{Address: &corev3.Address{Address: &corev3.Address_SocketAddress{
			SocketAddress: &corev3.SocketAddress{Address: "127.0.0.1", PortSpecifier: &corev3.SocketAddress_PortValue{}},
		}}},
		LayeredRuntime: &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{{
			Name:           "admin",
			LayerSpecifier: &bootstrapv3.RuntimeLayer_AdminLayer_{AdminLayer: &bootstrapv3.RuntimeLayer_AdminLayer{}},
		}}},
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{
			Clusters: clusters, Listeners: []*listenerv3.Listener{l},
		},
	}, nil
}

// withRoutes puts the route configuration into the listener.
func withRoutes(l *listenerv3.Listener, routes *routev3.RouteConfiguration) (*listenerv3.Listener, error) {
	l = proto.Clone(l).(*listenerv3.Listener)
	filter := l.GetFilterChains()[0].GetFilters()[0]
	hcm := &hcmv3.HttpConnectionManager{}
	if err := filter.GetTypedConfig().UnmarshalTo(hcm); err != nil {
		return nil, err
	}
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes}
	packed, err := anypb.New(hcm)
	if err != nil {
		return nil, err
	}
	filter.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: packed}
	return l, nil
}

// staticOf builds the first group of a config.
func staticOf(t *testing.T, cfg *fleet.Config, rt envoy.Runtime, listen netip.AddrPort) []byte {
	t.Helper()
	group := cfg.Groups[0]
	r, err := envoy.Build(cfg, group, rt)
	if err != nil {
		t.Fatal(err)
	}
	l, err := envoy.BuildListener(cfg, group, listen, rt)
	if err != nil {
		t.Fatal(err)
	}
	b, err := static(r, l)
	if err != nil {
		t.Fatal(err)
	}
	out, err := protojson.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// nobody is an address that no process of Fairlead listens on.
func nobody(t *testing.T) envoy.Runtime {
	dir := envoytest.ShortTempDir(t)
	return envoy.Runtime{
		ExtProc:   fleet.Address{Path: filepath.Join(dir, "ep")},
		AccessLog: fleet.Address{Path: filepath.Join(dir, "al")},
	}
}

// shape is a config's text with the addresses of upstreams: $NAME stands for
// the list of endpoints of a pool.
type shape struct {
	text  string
	pools map[string][]*envoytest.Upstream
}

func (s shape) config(t *testing.T) *fleet.Config {
	t.Helper()
	text := s.text
	for name, ups := range s.pools {
		var items []string
		for _, u := range ups {
			items = append(items, fmt.Sprintf("{address: %q}", u.Addr().String()))
		}
		text = strings.ReplaceAll(text, "$"+name, "["+strings.Join(items, ", ")+"]")
	}
	cfg, err := fleet.Parse("shape.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return cfg
}

func startShape(t *testing.T, s shape, rt envoy.Runtime) *factEnvoy {
	t.Helper()
	cfg := s.config(t)
	e := &factEnvoy{t: t, Envoy: envoytest.Start(t, staticOf(t, cfg, rt, netip.MustParseAddrPort("127.0.0.1:0")))}
	e.addr = e.Listener(envoy.ListenerName(cfg.Groups[0].Name, netip.MustParseAddrPort("127.0.0.1:0")))
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 100}
	t.Cleanup(tr.CloseIdleConnections)
	e.client = &http.Client{Transport: tr, Timeout: time.Minute}
	return e
}

const shapeHead = `
apiVersion: fairlead/v1alpha1
kind: Fairlead
`

// TestShapeValidates loads each golden config as Envoy itself would.
func TestShapeValidates(t *testing.T) {
	configs, err := filepath.Glob("../envoy/testdata/*.yaml")
	if err != nil || len(configs) == 0 {
		t.Fatalf("no configs: %v", err)
	}
	binary := envoytest.Binary(t)
	dir := t.TempDir()
	validate := func(t *testing.T, name string, content []byte) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(binary, "--mode", "validate", "-l", "warning", "-c", path).CombinedOutput()
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
	for _, path := range configs {
		name := strings.TrimSuffix(filepath.Base(path), ".yaml")
		t.Run(name, func(t *testing.T) {
			cfg, err := fleet.Load(path)
			if err != nil {
				t.Fatal(err)
			}
			rt := envoy.Runtime{ExtProc: cfg.Serve.ExtProc, AccessLog: cfg.Serve.AccessLog}
			validate(t, name+".json", staticOf(t, cfg, rt, cfg.Groups[0].Listener.Address))
		})
	}
	for _, format := range []string{"yaml", "json"} {
		t.Run("bootstrap/"+format, func(t *testing.T) {
			out, err := bootstrap.Render(bootstrap.Options{
				NodeID: "edge-1", Group: "edge", Listen: netip.MustParseAddrPort("127.0.0.1:9001"),
				XDS:   []fleet.Address{{Path: "/run/fairlead/xds.sock"}, {Host: "127.0.0.1:18000"}},
				Admin: fleet.Address{Host: "127.0.0.1:0"},
			}, format)
			if err != nil {
				t.Fatal(err)
			}
			validate(t, "bootstrap."+format, out)
		})
	}
}

// expectHeader checks that an answer has exactly one value of a header.
func expectHeader(t *testing.T, a answer, name, want string) {
	t.Helper()
	got := a.header.Values(name)
	if len(got) != 1 || (want != "*" && got[0] != want) {
		t.Errorf("%s: got %q, want one %q (status %d, body %s)", name, got, want, a.status, a.body)
	}
}

// expectSoon checks the retry fields of an answer of Envoy's own.
func expectSoon(t *testing.T, a answer) {
	t.Helper()
	ms, err := strconv.Atoi(a.header.Get("Retry-After-Ms"))
	if err != nil || ms < 1000 || ms > 1999 || len(a.header.Values("Retry-After-Ms")) != 1 {
		t.Errorf("retry-after-ms: got %q, want one of 1000…1999", a.header.Values("Retry-After-Ms"))
	}
	expectHeader(t, a, "Retry-After", "2")
	if got := a.header.Values("X-Should-Retry"); len(got) > 0 {
		t.Errorf("x-should-retry: %q", got)
	}
}

// expectError checks an error body in a dialect and that it says something.
func expectError(t *testing.T, a answer, status int, dialect fleet.Dialect, says string) {
	t.Helper()
	if a.status != status {
		t.Errorf("status %d, want %d; body %s", a.status, status, a.body)
	}
	var body struct {
		Type  string `json:"type"`
		Error struct {
			Type, Code, Message string
		} `json:"error"`
	}
	if err := json.Unmarshal([]byte(a.body), &body); err != nil {
		t.Errorf("body %q: %v", a.body, err)
		return
	}
	anthropic := body.Type == "error"
	if anthropic != (dialect == fleet.DialectAnthropic) || body.Error.Type == "" {
		t.Errorf("body %s is not in dialect %v", a.body, dialect)
	}
	if !strings.Contains(body.Error.Message, says) {
		t.Errorf("message %q does not say %q", body.Error.Message, says)
	}
	expectHeader(t, a, "Content-Type", "application/json")
	expectHeader(t, a, "X-Route-Strategy", "legacy")
	expectHeader(t, a, "X-Request-Id", "*")
}

// onePool is one route for each dialect to one pool.
func onePool(up *envoytest.Upstream) shape {
	return shape{pools: map[string][]*envoytest.Upstream{"A": {up}}, text: shapeHead + `
groups:
- name: edge
  listener: { address: 127.0.0.1:1 }
  routes: [messages, chat]
pools:
- { name: a, endpoints: $A }
routes:
- { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, split: [ { pool: a, weight: 1 } ] }
- { name: chat, match: { prefix: /v1/ }, dialect: openai, split: [ { pool: a, weight: 1 } ], maxBody: 2MiB, retryBody: 1MiB }
`}
}

func TestShapePassesRequestsWithoutFairlead(t *testing.T) {
	up := envoytest.NewUpstream(t, envoytest.Echo())
	e := startShape(t, onePool(up), nobody(t))

	t.Run("reserved headers of the client are removed", func(t *testing.T) {
		a := e.postJSON("/v1/chat/completions", `{"model":"m"}`,
			"x-fairlead-decision", "spoof", "X-Fairlead-Draw", "7", "x-fairlead-anything", "1",
			"x-gateway-destination-endpoint", "10.0.0.1:1", "x-gateway-destination-endpoint-served", "10.0.0.1:1",
			"x-execution-graph-id", "spoof", "x-envoy-max-retries", "9", "x-kept", "yes")
		if a.status != http.StatusOK {
			t.Fatalf("status %d: %s", a.status, a.body)
		}
		for name := range up.Last().Header {
			low := strings.ToLower(name)
			if strings.HasPrefix(low, "x-fairlead") || strings.HasPrefix(low, "x-gateway") ||
				low == "x-execution-graph-id" || low == "x-envoy-max-retries" {
				t.Errorf("%s reached the upstream", name)
			}
		}
		if got := up.Last().Header.Get("x-kept"); got != "yes" {
			t.Errorf("x-kept: %q", got)
		}
		expectHeader(t, a, "X-Route-Strategy", "legacy")
		expectHeader(t, a, "X-Request-Id", "*")
	})
	t.Run("an untrusted caller's request id is replaced", func(t *testing.T) {
		a := e.postJSON("/v1/chat/completions", `{}`, "x-request-id", "mine")
		if got := a.header.Get("x-request-id"); got == "mine" || got == "" {
			t.Errorf("answer: %q", got)
		}
		if got := up.Last().Header.Get("x-request-id"); got != a.header.Get("x-request-id") {
			t.Errorf("upstream got %q, the client %q", got, a.header.Get("x-request-id"))
		}
	})
	t.Run("headers of ours from an upstream are removed", func(t *testing.T) {
		up.Handle(envoytest.Status(200, "{}", "x-fairlead-decision", "no", "x-route-strategy", "no",
			"x-execution-graph-id", "no", "x-request-id", "no", "x-fairlead-served-by", "no"))
		defer up.Handle(envoytest.Echo())
		a := e.postJSON("/v1/chat/completions", `{}`)
		expectHeader(t, a, "X-Route-Strategy", "legacy")
		if got := a.header.Get("x-request-id"); got == "no" || got == "" {
			t.Errorf("x-request-id %q", got)
		}
		for _, name := range []string{"x-fairlead-decision", "x-execution-graph-id"} {
			if got := a.header.Values(name); len(got) > 0 {
				t.Errorf("%s: %q", name, got)
			}
		}
	})
	t.Run("methods", func(t *testing.T) {
		for _, method := range []string{http.MethodHead, http.MethodOptions, http.MethodGet, http.MethodDelete} {
			if a := e.send(method, "/v1/models", nil); a.status != http.StatusOK || up.Last().Method != method {
				t.Errorf("%s: status %d, upstream saw %s", method, a.status, up.Last().Method)
			}
		}
	})
	t.Run("large body", func(t *testing.T) {
		body := `{"prompt":"` + strings.Repeat("x", 1<<20) + `"}`
		a := e.postJSON("/v1/chat/completions", body)
		if a.status != http.StatusOK || up.Last().BodyLen != int64(len(body)) {
			t.Errorf("status %d, upstream got %d of %d bytes", a.status, up.Last().BodyLen, len(body))
		}
	})
	t.Run("over maxBody", func(t *testing.T) {
		// Over HTTP/1.1 the answer must reach a client that is still writing.
		for name, c := range map[string]*factEnvoy{"http1": e, "http2": overHTTP2(t, e)} {
			t.Run(name, func(t *testing.T) {
				body := strings.Repeat("x", 3<<20)
				expectError(t, c.send("POST", "/v1/chat/completions", strings.NewReader(body)), 413, fleet.DialectOpenAI, "larger than the 2097152 bytes")
				if a := c.send("POST", "/v1/messages", strings.NewReader(body)); a.status != http.StatusOK {
					t.Errorf("messages: status %d, want 200: its limit is the default", a.status)
				}
				// without a content-length the size shows only on the way
				unsized := c.send("POST", "/v1/chat/completions", io.MultiReader(strings.NewReader(body)))
				expectError(t, unsized, 413, fleet.DialectOpenAI, "larger than the 2097152 bytes")
			})
		}
	})
	t.Run("no route", func(t *testing.T) {
		expectError(t, e.get("/v2/x"), 404, fleet.DialectOpenAI, "GET /v2/x")
	})
	t.Run("CONNECT is refused", func(t *testing.T) {
		if status, _ := connect(t, e.addr); status == http.StatusOK {
			t.Errorf("CONNECT was allowed: %d", status)
		}
	})
	t.Run("WebSocket", func(t *testing.T) {
		up.Handle(envoytest.WebSocketEcho())
		defer up.Handle(envoytest.Echo())
		for _, headers := range []string{"", "content-type: application/json\r\n"} {
			expectWebSocketEcho(t, e.addr, "/v1/realtime", headers)
		}
	})
}

// overHTTP2 is the same Envoy with a client that speaks HTTP/2 with prior
// knowledge.
func overHTTP2(t *testing.T, e *factEnvoy) *factEnvoy {
	t.Helper()
	tr := &http.Transport{DisableCompression: true, Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &factEnvoy{Envoy: e.Envoy, t: t, addr: e.addr, client: &http.Client{Transport: tr, Timeout: time.Minute}}
}

// connect sends a CONNECT and returns the status and the open connection.
func connect(t *testing.T, addr netip.AddrPort) (int, net.Conn) {
	t.Helper()
	c, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(c, "CONNECT model.local:80 HTTP/1.1\r\nHost: model.local:80\r\n\r\n")
	response, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, c
}

func expectWebSocketEcho(t *testing.T, addr netip.AddrPort, path, headers string) {
	t.Helper()
	c, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n", path, headers)
	r := bufio.NewReader(c)
	response, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("status %d", response.StatusCode)
	}
	fmt.Fprint(c, "ping")
	got := make([]byte, 4)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "ping" {
		t.Errorf("echo %q: %v", got, err)
	}
}

func TestShapeLeavesEventStreamsUntouched(t *testing.T) {
	events := make(chan string)
	up := envoytest.NewUpstream(t, envoytest.SSE(events))
	e := startShape(t, onePool(up), nobody(t))
	response, err := e.open(context.Background(), "POST", "/v1/chat/completions", strings.NewReader(`{"stream":true}`), "content-type", "application/json")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	r := bufio.NewReader(response.Body)
	for i := range 20 {
		event := fmt.Sprintf("data: {\"i\": %d}\n\n", i)
		events <- event
		got := make([]byte, len(event))
		// The next event is sent only after this one was received.
		if _, err := io.ReadFull(r, got); err != nil || string(got) != event {
			t.Fatalf("event %d: got %q, %v", i, got, err)
		}
	}
	close(events)
	if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
		t.Errorf("after the end: %q, %v", rest, err)
	}
}

func TestShapeAllowsConnectOnlyWhereTheRouteSays(t *testing.T) {
	up := envoytest.NewUpstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = io.Copy(c, rw)
	}))
	s := shape{pools: map[string][]*envoytest.Upstream{"A": {up}}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [tunnel] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: tunnel, match: { prefix: /, connect: true }, dialect: openai, split: [ { pool: a, weight: 1 } ] }
`}
	e := startShape(t, s, nobody(t))
	status, c := connect(t, e.addr)
	if status != http.StatusOK {
		t.Fatalf("status %d", status)
	}
	fmt.Fprint(c, "ping")
	got := make([]byte, 4)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "ping" {
		t.Errorf("echo %q: %v", got, err)
	}
}

// poolAnswer answers with a pool's name.
func poolAnswer(name string) http.Handler { return envoytest.JSON(`{"pool":"` + name + `"}`) }

func TestShapeRoutesByModel(t *testing.T) {
	small, large, any := envoytest.NewUpstream(t, poolAnswer("small")), envoytest.NewUpstream(t, poolAnswer("large")), envoytest.NewUpstream(t, poolAnswer("any"))
	s := shape{
		pools: map[string][]*envoytest.Upstream{"SMALL": {small}, "LARGE": {large}, "ANY": {any}},
		text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [small, large, messages-small, open-small, open] }
pools:
- { name: small, endpoints: $SMALL }
- { name: large, endpoints: $LARGE }
- { name: any, endpoints: $ANY }
routes:
- { name: small, match: { prefix: /v1/, model: m-small }, dialect: openai, split: [ { pool: small, weight: 1 } ], maxBody: 4KiB }
- { name: large, match: { prefix: /v1/, model: m-large }, dialect: openai, split: [ { pool: large, weight: 1 } ] }
- { name: messages-small, match: { prefix: /v1/messages, model: claude }, dialect: anthropic, split: [ { pool: small, weight: 1 } ] }
- { name: open-small, match: { prefix: /open, model: m-small }, dialect: openai, split: [ { pool: small, weight: 1 } ] }
- { name: open, match: { prefix: /open }, dialect: openai, split: [ { pool: any, weight: 1 } ] }
`}
	e := startShape(t, s, nobody(t))

	t.Run("known models", func(t *testing.T) {
		for path, want := range map[string]string{
			"/v1/chat/completions m-small": "small", "/v1/chat/completions m-large": "large",
			"/v1/embeddings m-large": "large", "/v1/messages claude": "small",
			"/open/chat/completions m-small": "small", "/open/chat/completions other": "any",
		} {
			path, model, _ := strings.Cut(path, " ")
			a := e.postJSON(path, `{"model":"`+model+`"}`)
			if a.status != 200 || !strings.Contains(a.body, `"`+want+`"`) {
				t.Errorf("%s %s: %d %s, want pool %s", path, model, a.status, a.body, want)
			}
			expectHeader(t, a, "X-Route-Strategy", "legacy")
		}
	})
	t.Run("unknown model", func(t *testing.T) {
		expectError(t, e.postJSON("/v1/chat/completions", `{"model":"gp\"t"}`), 404, fleet.DialectOpenAI, `'gp"t'`)
		expectError(t, e.postJSON("/v1/messages", `{"model":"gpt"}`), 404, fleet.DialectAnthropic, "'gpt'")
	})
	t.Run("model not read", func(t *testing.T) {
		expectError(t, e.postJSON("/v1/chat/completions", `{"model":`), 400, fleet.DialectOpenAI, "not valid JSON")
		expectError(t, e.send("POST", "/v1/messages", strings.NewReader(`{"model":"claude"}`), "content-type", "text/plain"), 400, fleet.DialectAnthropic, "content-type")
		expectError(t, e.postJSON("/v1/chat/completions", `{"messages":[]}`), 400, fleet.DialectOpenAI, "no top-level")
		chunked := e.send("POST", "/v1/messages", io.MultiReader(strings.NewReader(`{"model":"claude"}`)), "content-type", "application/json")
		expectError(t, chunked, 400, fleet.DialectAnthropic, "content-length")
		big := `{"model":"m-small","x":"` + strings.Repeat("x", 1<<20) + `"}`
		expectError(t, e.postJSON("/v1/chat/completions", big), 400, fleet.DialectOpenAI, "999999")
		if a := e.postJSON("/open/chat/completions", big); !strings.Contains(a.body, "any") {
			t.Errorf("a body too large to read does not take the route without a model: %d %s", a.status, a.body)
		}
	})
	t.Run("content types", func(t *testing.T) {
		for _, ct := range []string{"application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"} {
			a := e.send("POST", "/v1/chat/completions", strings.NewReader(`{"model":"m-large"}`), "content-type", ct)
			if a.status != 200 {
				t.Errorf("%s: %d %s", ct, a.status, a.body)
			}
		}
	})
	t.Run("the chosen route's own body limit counts", func(t *testing.T) {
		body := func(model string) string { return `{"model":"` + model + `","x":"` + strings.Repeat("x", 8<<10) + `"}` }
		expectError(t, e.postJSON("/v1/chat/completions", body("m-small")), 413, fleet.DialectOpenAI, "larger than the 4096 bytes")
		if a := e.postJSON("/v1/chat/completions", body("m-large")); a.status != 200 {
			t.Errorf("large: %d %s", a.status, a.body)
		}
	})
	t.Run("requests without a body pass", func(t *testing.T) {
		if a := e.get("/v1/models"); a.status != 200 || !strings.Contains(a.body, "small") {
			t.Errorf("%d %s", a.status, a.body)
		}
		small.Handle(envoytest.WebSocketEcho())
		defer small.Handle(poolAnswer("small"))
		expectWebSocketEcho(t, e.addr, "/v1/realtime", "content-type: application/json\r\n")
	})
}

func TestShapeAddsRetryFieldsOnlyWhereNoneAre(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	e := startShape(t, onePool(up), nobody(t))
	for _, c := range []struct {
		sent       []string
		ms, second []string
	}{
		{nil, []string{"1000"}, []string{"1"}},
		{[]string{"retry-after", "30"}, nil, []string{"30"}},
		{[]string{"retry-after", "0"}, nil, []string{"0"}},
		{[]string{"retry-after", "Wed, 04 Mar 2026 05:06:27 GMT"}, nil, []string{"Wed, 04 Mar 2026 05:06:27 GMT"}},
		{[]string{"retry-after", "30", "retry-after", "30"}, nil, []string{"30", "30"}},
		{[]string{"retry-after", "30, 30"}, nil, []string{"30, 30"}},
		{[]string{"retry-after", "garbage, 30"}, []string{"1000"}, []string{"garbage, 30"}},
		{[]string{"retry-after", "garbage"}, []string{"1000"}, []string{"garbage"}},
		{[]string{"retry-after", "-3"}, []string{"1000"}, []string{"-3"}},
		{[]string{"retry-after", ""}, []string{"1000"}, []string{""}},
		{[]string{"retry-after-ms", "700"}, []string{"700"}, nil},
		{[]string{"retry-after-ms", "1000"}, []string{"1000"}, nil},
		{[]string{"retry-after", "2", "retry-after-ms", "1700"}, []string{"1700"}, []string{"2"}},
	} {
		up.Handle(envoytest.Status(429, `{"error":{"message":"busy"}}`, c.sent...))
		up.Forget()
		a := e.postJSON("/v1/chat/completions", `{}`)
		if a.status != 429 || a.body != `{"error":{"message":"busy"}}` {
			t.Errorf("sent %q: %d %s", c.sent, a.status, a.body)
		}
		if got := a.header.Values("Retry-After-Ms"); strings.Join(got, ",") != strings.Join(c.ms, ",") {
			t.Errorf("sent %q: retry-after-ms %q, want %q", c.sent, got, c.ms)
		}
		if got := a.header.Values("Retry-After"); strings.Join(got, ",") != strings.Join(c.second, ",") {
			t.Errorf("sent %q: retry-after %q, want %q", c.sent, got, c.second)
		}
		if n := up.Count(); n != 1 {
			t.Errorf("a 429 was sent %d times to a route with one tier", n)
		}
	}
	up.Handle(envoytest.Status(200, "{}"))
	if a := e.postJSON("/v1/chat/completions", `{}`); len(a.header.Values("Retry-After-Ms"))+len(a.header.Values("Retry-After")) > 0 {
		t.Errorf("a 200 has retry fields: %v", a.header)
	}
}

// threePools is one route with a split and one with a fallback.
func threePools(a, b, c []*envoytest.Upstream, weightA, weightB int) shape {
	return shape{pools: map[string][]*envoytest.Upstream{"A": a, "B": b, "C": c}, text: shapeHead + fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [messages, chat] }
pools:
- { name: a, endpoints: $A, tier: own }
- { name: b, endpoints: $B, tier: own }
- { name: c, endpoints: $C, tier: other, protocol: h2c, http2: { initialStreamWindow: 1MiB } }
routes:
- { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, split: [ { pool: a, weight: 1 } ], fallback: [ { pool: c } ] }
- { name: chat, match: { prefix: /v1/ }, dialect: openai, split: [ { pool: a, weight: %d }, { pool: b, weight: %d } ], fallback: [ { pool: c } ] }
`, weightA, weightB)}
}

func ups(u ...*envoytest.Upstream) []*envoytest.Upstream { return u }

func TestShapeSplitsByWeight(t *testing.T) {
	a, b, c := envoytest.NewUpstream(t, nil), envoytest.NewUpstream(t, nil), envoytest.NewUpstream(t, nil)
	e := startShape(t, threePools(ups(a), ups(b), ups(c), 90, 10), nobody(t))
	const n = 1000
	for range n {
		if r := e.postJSON("/v1/chat/completions", `{}`); r.status != 200 {
			t.Fatalf("status %d", r.status)
		}
	}
	// 100 expected; five standard deviations of a fair draw are 47.
	if got := b.Count(); got < 53 || got > 147 || a.Count()+got != n {
		t.Errorf("b got %d of %d, a %d", got, n, a.Count())
	}
	if d := b.Last().Header.Get("x-fairlead-draw"); d != "" {
		t.Errorf("the draw header reached the upstream: %q", d)
	}

	t.Run("a session keeps its pool", func(t *testing.T) {
		toB := 0
		for i := range 60 {
			b.Forget()
			for range 5 {
				e.postJSON("/v1/chat/completions", `{}`, "x-session-affinity", fmt.Sprintf("session-%d", i))
			}
			switch b.Count() {
			case 0:
			case 5:
				toB++
			default:
				t.Errorf("session %d: %d of 5 requests went to b", i, b.Count())
			}
		}
		if toB == 0 || toB > 25 {
			t.Errorf("%d of 60 sessions went to b, want about 6", toB)
		}
	})
}

func TestShapeFailsOverAlongTheChain(t *testing.T) {
	a, b, c := envoytest.NewUpstream(t, poolAnswer("a")), envoytest.NewUpstream(t, poolAnswer("b")), envoytest.NewUpstream(t, poolAnswer("c"))
	e := startShape(t, threePools(ups(a), ups(b), ups(c), 90, 10), nobody(t))
	many := func(t *testing.T, path string, n int, want string) {
		t.Helper()
		for range n {
			got := e.postJSON(path, `{"max_tokens":5}`)
			if got.status != 200 || got.body != `{"pool":"`+want+`"}` {
				t.Fatalf("%d %s, want pool %s", got.status, got.body, want)
			}
			expectHeader(t, got, "X-Route-Strategy", "legacy")
			expectHeader(t, got, "X-Fairlead-Served-By", want)
		}
	}
	unavailable := envoytest.Status(503, `{"error":{"message":"no"}}`)

	t.Run("a 503 goes to the split's other pool", func(t *testing.T) {
		a.Handle(unavailable)
		many(t, "/v1/chat/completions", 30, "b")
		if last := b.Last(); string(last.Body) != `{"max_tokens":5}` || last.Header.Get("x-envoy-attempt-count") == "" {
			t.Errorf("b got %q, attempt %q", last.Body, last.Header.Get("x-envoy-attempt-count"))
		}
		a.Handle(poolAnswer("a"))
		b.Handle(unavailable)
		many(t, "/v1/chat/completions", 30, "a")
	})
	t.Run("a server that dies while it works", func(t *testing.T) {
		a.Handle(envoytest.ResetBeforeAnswer())
		b.Handle(poolAnswer("b"))
		many(t, "/v1/chat/completions", 30, "b")
	})
	t.Run("both pools down: the fallback", func(t *testing.T) {
		a.Handle(unavailable)
		b.Handle(unavailable)
		many(t, "/v1/chat/completions", 10, "c")
		if last := c.Last(); last.Proto != "HTTP/2.0" {
			t.Errorf("c was spoken to in %s", last.Proto)
		}
		many(t, "/v1/messages", 3, "c")
	})
	t.Run("paths that don't generate are not sent twice", func(t *testing.T) {
		a.Forget()
		b.Forget()
		if got := e.postJSON("/v1/files", `{}`); got.status != 503 || a.Count()+b.Count() != 1 {
			t.Errorf("status %d after %d attempts", got.status, a.Count()+b.Count())
		}
	})
	t.Run("a 429 stays inside its tier", func(t *testing.T) {
		a.Handle(envoytest.Status(429, "{}"))
		b.Handle(envoytest.Status(429, "{}"))
		if got := e.postJSON("/v1/chat/completions", `{}`); got.status != 429 {
			t.Errorf("split of one tier: %d, want the 429", got.status)
		}
		many(t, "/v1/messages", 3, "c")
	})
	t.Run("everything down", func(t *testing.T) {
		for _, u := range ups(a, b, c) {
			u.Close()
		}
		got := e.postJSON("/v1/messages", `{}`)
		expectError(t, got, 503, fleet.DialectAnthropic, "No model server")
		expectError(t, e.postJSON("/v1/chat/completions", `{}`), 503, fleet.DialectOpenAI, "No model server")
		if by := got.header.Values("X-Fairlead-Served-By"); len(by) > 0 {
			t.Errorf("served by %q, but nobody did", by)
		}
	})
}

func TestShapeSurvivesPoolsWithoutALiveEndpoint(t *testing.T) {
	b, c := envoytest.NewUpstream(t, poolAnswer("b")), envoytest.NewUpstream(t, poolAnswer("c"))
	dead := envoytest.NewUpstream(t, nil)
	dead.Close()
	for name, a := range map[string][]*envoytest.Upstream{"empty": nil, "refusing": {dead}} {
		t.Run(name, func(t *testing.T) {
			e := startShape(t, threePools(a, ups(b), ups(c), 90, 10), nobody(t))
			for range 20 {
				if got := e.postJSON("/v1/chat/completions", `{}`); got.status != 200 || !strings.Contains(got.body, "b") {
					t.Fatalf("%d %s, want pool b", got.status, got.body)
				}
				if got := e.get("/v1/models"); got.status != 200 {
					t.Fatalf("GET: %d %s", got.status, got.body)
				}
			}
			if got := e.postJSON("/v1/messages", `{}`); got.status != 200 || !strings.Contains(got.body, "c") {
				t.Fatalf("%d %s, want pool c", got.status, got.body)
			}
		})
	}
}

func TestShapeOutlierDetectionAndHealthChecksKeepTheFloor(t *testing.T) {
	a, b := envoytest.NewUpstream(t, envoytest.Status(503, "{}")), envoytest.NewUpstream(t, poolAnswer("b"))
	broken, good := envoytest.NewUpstream(t, envoytest.Status(500, "{}")), envoytest.NewUpstream(t, poolAnswer("good"))
	dead := envoytest.NewUpstream(t, nil)
	dead.Close()
	s := shape{pools: map[string][]*envoytest.Upstream{"A": {a}, "B": {b}, "DEAD": {dead}, "FIVES": {broken, good}}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [one, two, three, four] }
pools:
- { name: a, endpoints: $A, outlierDetection: true }
- { name: checked, endpoints: $DEAD, outlierDetection: true, healthCheck: { path: /health, interval: 100ms, timeout: 100ms } }
- { name: dead, endpoints: $DEAD, outlierDetection: true }
- { name: fives, endpoints: $FIVES, outlierDetection: true }
- { name: b, endpoints: $B }
routes:
- { name: one, match: { prefix: /one/ }, dialect: openai, split: [ { pool: a, weight: 1 } ], fallback: [ { pool: b } ] }
- { name: two, match: { prefix: /two/ }, dialect: openai, split: [ { pool: checked, weight: 1 } ], fallback: [ { pool: b } ] }
- { name: three, match: { prefix: /three/ }, dialect: openai, split: [ { pool: dead, weight: 1 } ], fallback: [ { pool: b } ] }
- { name: four, match: { prefix: /four/ }, dialect: openai, split: [ { pool: fives, weight: 1 } ], fallback: [ { pool: b } ] }
`}
	e := startShape(t, s, nobody(t))
	// Ejections take effect at once; three intervals of the detector pass for
	// whatever it does between requests.
	began := time.Now()
	for i := 0; i < 40 || time.Since(began) < 3*time.Second; i++ {
		for _, path := range []string{"/one/messages", "/two/messages", "/three/messages"} {
			if got := e.postJSON(path, `{}`); got.status != 200 {
				t.Fatalf("%s, request %d: %d %s", path, i, got.status, got.body)
			}
		}
	}
	if n := a.Count(); n < 3 {
		t.Errorf("the failing endpoint got %d requests, want at least 3", n)
	}
	// Once it is ejected, requests go to the floor and on to pool b.
	envoytest.Eventually(t, "the failing endpoint is left alone", func() bool {
		before := a.Count()
		for range 5 {
			if got := e.postJSON("/one/messages", `{}`); got.status != 200 {
				t.Fatalf("%d %s", got.status, got.body)
			}
		}
		return a.Count() == before
	})
	envoytest.Eventually(t, "an endpoint that answers 500 is left alone", func() bool {
		ok := 0
		for range 20 {
			if got := e.postJSON("/four/messages", `{}`); got.status == 200 {
				ok++
			}
		}
		return ok == 20
	})
	if n := broken.Count(); n < 5 {
		t.Errorf("the endpoint that answers 500 got %d requests, want at least 5", n)
	}
	for pool, ejects := range map[string]bool{"a": true, "fives": true, "checked": false, "dead": false} {
		if n, ok := e.Stat("cluster." + pool + ".outlier_detection.ejections_enforced_total"); !ok || (n > 0) != ejects {
			t.Errorf("pool %s: %d ejections; want some: %v", pool, n, ejects)
		}
	}
}

func TestShapeFollowsDecisions(t *testing.T) {
	a1, a2, b, c := envoytest.NewUpstream(t, poolAnswer("a1")), envoytest.NewUpstream(t, poolAnswer("a2")),
		envoytest.NewUpstream(t, poolAnswer("b")), envoytest.NewUpstream(t, poolAnswer("c"))
	logged := map[string]any{"strategy": "dynamic", "decision": "1718924567123-007-0001", "plan": "abc"}
	p := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	rt := nobody(t)
	rt.ExtProc = fleet.Address{Path: p.socket}
	e := startShape(t, threePools(ups(a1, a2), ups(b), ups(c), 1, 0), rt)
	envoytest.Eventually(t, "ext_proc is healthy", func() bool {
		e.postJSON("/v1/chat/completions", `{}`)
		return len(p.requests()) > 0
	})
	send := func(m metadata, set ...string) answer {
		p.answerWith(always(func() *extprocv3.ProcessingResponse {
			return withHeaders(reply(m), set...)
		}))
		return e.postJSON("/v1/chat/completions", `{"max_tokens": 77, "max_output_tokens": 78, "stream": true, "model": "m", "prompt_cache_key": "k"}`)
	}

	t.Run("what ext_proc is told", func(t *testing.T) {
		send(metadata{})
		for key, want := range map[string]any{"max_tokens": 77.0, "max_output_tokens": 78.0, "stream": true, "model": "m", "prompt_cache_key": "k"} {
			if got, _ := peeked(p.last(), key); got != want {
				t.Errorf("%s: %v, want %v", key, got, want)
			}
		}
		attributes := p.last().GetAttributes()["envoy.filters.http.ext_proc"].GetFields()
		for name, want := range map[string]string{"xds.cluster_name": "a", "xds.route_name": "chat"} {
			if got := attributes[name].GetStringValue(); got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
		if got := attributes["source.address"].GetStringValue(); !strings.HasPrefix(got, "127.0.0.1:") {
			t.Errorf("source.address %q", got)
		}
	})
	t.Run("named endpoints and the headers of a decision", func(t *testing.T) {
		for _, at := range ups(a2, a1, a2) {
			got := send(metadata{"fairlead.steer": map[string]any{"hosts": list(at)}, "fairlead.log": logged},
				"x-fairlead-decision", "1718924567123-007-0001", "x-request-id", "1718924567123-007-0001",
				"x-envoy-upstream-rq-per-try-timeout-ms", "60000")
			if got.status != 200 {
				t.Fatalf("%d %s", got.status, got.body)
			}
			if at.Last().Header.Get("x-fairlead-decision") != "1718924567123-007-0001" {
				t.Errorf("the decision did not reach the server it named")
			}
			expectHeader(t, got, "X-Route-Strategy", "dynamic")
			expectHeader(t, got, "X-Fairlead-Decision", "1718924567123-007-0001")
			expectHeader(t, got, "X-Execution-Graph-Id", "abc")
			expectHeader(t, got, "X-Request-Id", "1718924567123-007-0001")
		}
	})
	t.Run("an answer of ext_proc passes as it is", func(t *testing.T) {
		p.answerWith(always(func() *extprocv3.ProcessingResponse {
			return refused(logged, `{"type":"error","error":{"type":"rate_limit_error","message":"reduce"}}`,
				"content-type", "application/json", "retry-after-ms", "333", "retry-after", "1")
		}))
		got := e.postJSON("/v1/messages", `{}`)
		if got.status != 429 || got.body != `{"type":"error","error":{"type":"rate_limit_error","message":"reduce"}}` {
			t.Errorf("%d %s", got.status, got.body)
		}
		expectHeader(t, got, "Retry-After-Ms", "333")
		expectHeader(t, got, "Retry-After", "1")
		expectHeader(t, got, "Content-Type", "application/json")
		expectHeader(t, got, "X-Route-Strategy", "dynamic")
		expectHeader(t, got, "X-Fairlead-Decision", "1718924567123-007-0001")
		expectHeader(t, got, "X-Request-Id", "*")
	})
	t.Run("a 404 carries the ids that ext_proc gave it", func(t *testing.T) {
		p.answerWith(func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
			unknown := maps.Clone(logged)
			unknown["strategy"] = "legacy"
			return reply(metadata{"fairlead.log": unknown})
		})
		got := e.get("/v2")
		expectError(t, got, 404, fleet.DialectOpenAI, "/v2")
		expectHeader(t, got, "X-Fairlead-Decision", "1718924567123-007-0001")
	})
	t.Run("Envoy's own answers carry the decision", func(t *testing.T) {
		for _, u := range ups(a1, a2, b, c) {
			u.Close()
		}
		got := send(metadata{"fairlead.log": logged})
		if got.status != 503 {
			t.Errorf("status %d", got.status)
		}
		expectHeader(t, got, "X-Route-Strategy", "dynamic")
		expectHeader(t, got, "X-Fairlead-Decision", "1718924567123-007-0001")
	})
}

// TestShapeFollowsGroupsByName: ext_proc names groups of the route, among them
// those that no attempt of the route's own chain reaches; a name that the route
// doesn't have leaves that attempt to the route's own chain.
func TestShapeFollowsGroupsByName(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	failing := map[string]bool{}
	server := func(name string) *envoytest.Upstream {
		return envoytest.NewUpstream(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, name)
			if failing[name] {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}))
	}
	a, b, c := server("a"), server("b"), server("c")
	p := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	rt := nobody(t)
	rt.ExtProc = fleet.Address{Path: p.socket}
	// Only a is drawn: the chain is a, b, c.
	e := startShape(t, threePools(ups(a), ups(b), ups(c), 1, 0), rt)
	e.WaitStat("cluster."+wire.ClusterExtProc+".membership_healthy", func(n int64) bool { return n == 1 })

	for _, row := range []struct {
		name    string
		groups  string
		moved   bool
		failing string
		want    string
		status  int
	}{
		{"first attempt", "pool-b", true, "", "b", 200},
		{"the chain's own names", "pool-c own", true, "c", "c a", 200},
		{"every pool by name", "pool-c pool-b pool-a", true, "b c", "c b a", 200},
		{"retries only", "pool-a pool-c", false, "a", "a c", 200},
		{"fewer groups than attempts", "pool-b pool-a", true, "a b c", "b a a", 503},
		{"a name that isn't there", "pool-gone", true, "", "a", 200},
		{"no name that is there", "pool-gone pool-lost pool-away", true, "a b", "a b c", 200},
		{"some names that are there", "pool-gone pool-c pool-b", true, "a c", "a c b", 200},
		{"more names than the chain has attempts", "pool-w pool-x pool-y pool-z pool-a", true, "a b c", "a b c", 503},
		{"the chain without ext_proc's groups", "", false, "a b c", "a b c", 503},
	} {
		t.Run(row.name, func(t *testing.T) {
			mu.Lock()
			seen, failing = nil, map[string]bool{}
			for _, name := range strings.Fields(row.failing) {
				failing[name] = true
			}
			mu.Unlock()
			m := metadata{"fairlead.log": map[string]any{"strategy": "dynamic"}}
			var groups []any
			for _, name := range strings.Fields(row.groups) {
				groups = append(groups, map[string]any{"name": name})
			}
			if groups != nil {
				m["fairlead.groups"] = map[string]any{"priority_groups": groups}
			}
			p.answerWith(always(func() *extprocv3.ProcessingResponse {
				if row.moved {
					return withClear(reply(m))
				}
				return reply(m)
			}))
			got := e.postJSON("/v1/chat/completions", `{}`)
			mu.Lock()
			defer mu.Unlock()
			if order := strings.Join(seen, " "); order != row.want || got.status != row.status {
				t.Errorf("attempts %q, status %d; want %q, %d", order, got.status, row.want, row.status)
			}
			expectHeader(t, got, "X-Route-Strategy", "dynamic")
		})
	}
}

// refused is an immediate answer with status 429.
func refused(logged map[string]any, body string, headers ...string) *extprocv3.ProcessingResponse {
	mutation := &extprocv3.HeaderMutation{}
	for i := 0; i+1 < len(headers); i += 2 {
		mutation.SetHeaders = append(mutation.SetHeaders, &corev3.HeaderValueOption{
			Header: &corev3.HeaderValue{Key: headers[i], RawValue: []byte(headers[i+1])},
		})
	}
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: typev3.StatusCode_TooManyRequests}, Headers: mutation, Body: []byte(body),
			Details: "fairlead_shed",
		}},
		DynamicMetadata: structOf(metadata{"fairlead.log": logged}),
	}
}

func TestShapeAsksExtProcAfterTheModelChoseTheRoute(t *testing.T) {
	small, any := envoytest.NewUpstream(t, poolAnswer("small")), envoytest.NewUpstream(t, poolAnswer("any"))
	s := shape{pools: map[string][]*envoytest.Upstream{"SMALL": {small}, "ANY": {any}}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [small, declared] }
pools:
- { name: small, endpoints: $SMALL }
- { name: any, endpoints: $ANY }
routes:
- { name: small, match: { prefix: /v1/, model: m-small }, dialect: openai, split: [ { pool: small, weight: 1 } ] }
- { name: declared, match: { prefix: /declared/ }, dialect: openai, trustDeclared: true, split: [ { pool: any, weight: 1 } ] }
`}
	p := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	rt := nobody(t)
	rt.ExtProc = fleet.Address{Path: p.socket}
	e := startShape(t, s, rt)
	send := func(path string, headers ...string) {
		t.Helper()
		if a := e.postJSON(path, `{"model":"m-small","max_tokens":9}`, headers...); a.status != 200 {
			t.Fatalf("%s: %d %s", path, a.status, a.body)
		}
	}
	envoytest.Eventually(t, "ext_proc is healthy", func() bool {
		send("/declared/messages")
		return len(p.requests()) > 0
	})
	for _, c := range []struct {
		path, route, cluster string
		read                 bool
		headers              []string
	}{
		{"/v1/chat/completions", "small", "small", true, []string{"max_tokens", "9"}},
		{"/v1/embeddings", "small/other", "small", true, nil},
		{"/declared/messages", "declared", "any", true, nil},
		{"/declared/messages", "declared", "any", true, []string{"max_tokens", "many"}},
		{"/declared/messages", "declared", "any", false, []string{"max_tokens", "9"}},
		{"/declared/messages", "declared", "any", false, []string{"x-max-tokens", "9"}},
		{"/declared/messages", "declared", "any", false, []string{"max-tokens", "9"}},
		{"/declared/embeddings", "declared/other", "any", false, nil},
	} {
		before := len(p.requests())
		send(c.path, c.headers...)
		if n := len(p.requests()) - before; n != 1 {
			t.Errorf("%s: ext_proc was asked %d times", c.path, n)
		}
		fields := p.last().GetAttributes()["envoy.filters.http.ext_proc"].GetFields()
		if route, cluster := fields["xds.route_name"].GetStringValue(), fields["xds.cluster_name"].GetStringValue(); route != c.route || cluster != c.cluster {
			t.Errorf("%s: route %q, cluster %q", c.path, route, cluster)
		}
		if _, read := peeked(p.last(), "max_tokens"); read != c.read {
			t.Errorf("%s %q: body read: %v, want %v", c.path, c.headers, read, c.read)
		}
	}
}

func TestShapeLogsEveryAttempt(t *testing.T) {
	a, b, c := envoytest.NewUpstream(t, envoytest.Status(503, "{}")), envoytest.NewUpstream(t, nil), envoytest.NewUpstream(t, nil)
	p := newProcessor(t, always(func() *extprocv3.ProcessingResponse {
		return withHeaders(reply(metadata{"fairlead.log": map[string]any{"decision": "d-1"}}), "x-fairlead-decision", "d-1")
	}))
	logs := newLogReceiver(t)
	rt := envoy.Runtime{ExtProc: fleet.Address{Path: p.socket}, AccessLog: fleet.Address{Path: logs.socket}}
	e := startShape(t, threePools(ups(a), ups(b), ups(c), 1, 0), rt)
	envoytest.Eventually(t, "ext_proc is healthy", func() bool {
		e.get("/v1/models")
		return len(p.requests()) > 0
	})
	got := e.postJSON("/v1/chat/completions", `{}`)
	if got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	decided := func(l logged, name, path string) bool {
		return l.log == name && l.entry.GetRequest().GetPath() == path
	}
	tag := func(l logged, key string) string { return l.entry.GetCommonProperties().GetCustomTags()[key] }
	attempts := map[string]string{} // attempt to upstream address
	envoytest.Eventually(t, "both attempts ended", func() bool {
		for _, l := range logs.find(accesslogdatav3.AccessLogType_UpstreamEnd, 1) {
			if decided(l, wire.LogUpstream, "/v1/chat/completions") {
				at := l.entry.GetCommonProperties().GetUpstreamRemoteAddress().GetSocketAddress()
				attempts[tag(l, wire.TagAttempt)] = fmt.Sprintf("%s:%d", at.GetAddress(), at.GetPortValue())
				if tag(l, wire.TagDecision) != "d-1" {
					t.Errorf("decision tag %q", tag(l, wire.TagDecision))
				}
				if id := l.entry.GetRequest().GetRequestHeaders()["x-request-id"]; id != got.header.Get("x-request-id") {
					t.Errorf("x-request-id in the log %q, in the answer %q", id, got.header.Get("x-request-id"))
				}
			}
		}
		return len(attempts) == 2
	})
	if attempts["1"] != a.Addr().String() || attempts["2"] != b.Addr().String() {
		t.Errorf("attempts %v, want %v then %v", attempts, a.Addr(), b.Addr())
	}
	envoytest.Eventually(t, "the request ended", func() bool {
		for _, l := range logs.find(accesslogdatav3.AccessLogType_DownstreamEnd, 1) {
			if decided(l, wire.LogDownstream, "/v1/chat/completions") {
				common := l.entry.GetCommonProperties()
				namespace := common.GetMetadata().GetFilterMetadata()[wire.NamespaceLog]
				return namespace.GetFields()[wire.KeyDecision].GetStringValue() == "d-1" &&
					common.GetUpstreamRequestAttemptCount() == 2 && common.GetRouteName() == "chat" && common.GetUpstreamCluster() == "b"
			}
		}
		return false
	})
}

func TestShapeKeepsTheRequestIDOfTrustedCallers(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	s := onePool(up)
	s.text = strings.Replace(s.text, "{ address: 127.0.0.1:1 }", "{ address: 127.0.0.1:1, trusted: [127.0.0.0/8] }", 1)
	e := startShape(t, s, nobody(t))
	a := e.postJSON("/v1/chat/completions", `{}`, "x-request-id", "mine", "x-envoy-max-retries", "7", "x-envoy-upstream-rq-timeout-ms", "1")
	expectHeader(t, a, "X-Request-Id", "mine")
	for name, want := range map[string]string{"x-request-id": "mine", "x-envoy-max-retries": "", "x-envoy-upstream-rq-timeout-ms": ""} {
		if got := up.Last().Header.Get(name); got != want {
			t.Errorf("%s upstream: %q, want %q", name, got, want)
		}
	}
}

// A request that doesn't arrive in time is answered in the caller's dialect,
// whether Envoy waits for its body or passes that on, and the caller may come back.
func TestShapeAnswersStalledUploadsInTheDialect(t *testing.T) {
	s := onePool(envoytest.NewUpstream(t, nil))
	s.text = strings.Replace(s.text, "{ address: 127.0.0.1:1 }", "{ address: 127.0.0.1:1, uploadTimeout: 1s }", 1)
	e := startShape(t, s, nobody(t))
	const (
		head = " HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
		held = head + "content-length: 100\r\n\r\n{"
		on   = head + "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
	)
	var all sync.WaitGroup
	defer all.Wait()
	for request, dialect := range map[string]fleet.Dialect{
		"POST /v1/chat/completions" + held: fleet.DialectOpenAI,
		"POST /v1/messages" + held:         fleet.DialectAnthropic,
		"POST /v1/chat/completions" + on:   fleet.DialectOpenAI,
		"POST /v1/messages" + on:           fleet.DialectAnthropic,
		"POST /nowhere" + held:             fleet.DialectOpenAI,
		// Not even the headers came: there is neither a route nor an id.
		"POST /v1/messages" + head: 0,
	} {
		all.Go(func() {
			a, err := spoken(e.addr.String(), request)
			switch {
			case err != nil:
				t.Errorf("%q: %v", request, err)
			case dialect == 0:
				expectHeader(t, a, "Content-Type", "application/json")
			default:
				expectError(t, a, http.StatusRequestTimeout, dialect, "request_overall_timeout")
			}
			expectSoon(t, a)
		})
	}
}

func TestShapeTurnsAConcurrencyLimitInto429(t *testing.T) {
	release := make(chan struct{})
	up := envoytest.NewUpstream(t, nil)
	up.Handle(envoytest.Gate(release, poolAnswer("a")))
	e := startShape(t, onePool(up), nobody(t))
	e.AdminPost("/runtime_modify?circuit_breakers.a.default.max_requests=1")
	first := make(chan error, 1)
	go func() {
		_, err := e.try("POST", "/v1/messages", strings.NewReader(`{}`))
		first <- err
	}()
	up.WaitRequests(1)
	for path, dialect := range map[string]fleet.Dialect{"/v1/messages": fleet.DialectAnthropic, "/v1/chat/completions": fleet.DialectOpenAI} {
		a := e.postJSON(path, `{}`)
		expectError(t, a, 429, dialect, "concurrent")
		expectSoon(t, a)
	}
	// Those that are refused together don't come back together.
	const together = 40
	told := make(chan string, together)
	for range together {
		go func() {
			a, err := e.try("POST", "/v1/messages", strings.NewReader(`{}`))
			if err != nil {
				t.Error(err)
			}
			told <- a.header.Get("Retry-After-Ms")
		}()
	}
	slots := map[string]bool{}
	for range together {
		slots[<-told] = true
	}
	if len(slots) < together/2 {
		t.Errorf("%d requests were told only %d different times", together, len(slots))
	}
	close(release)
	if err := <-first; err != nil {
		t.Error(err)
	}
}
