package envoy

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	prioritygroupv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/priority_group/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

var update = flag.Bool("update", false, "write the golden files anew")

func load(t *testing.T, name string) *fleet.Config {
	t.Helper()
	cfg, err := fleet.Load(filepath.Join("testdata", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func runtimeOf(cfg *fleet.Config) Runtime {
	return Runtime{ExtProc: cfg.Serve.ExtProc, AccessLog: cfg.Serve.AccessLog}
}

func built(t *testing.T, cfg *fleet.Config, rt Runtime) Resources {
	t.Helper()
	r, err := Build(cfg, cfg.Groups[0], rt)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// render prints messages as one YAML document each, Any payloads opened.
func render(t *testing.T, messages ...proto.Message) []byte {
	t.Helper()
	var out bytes.Buffer
	for _, m := range messages {
		raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var tree any
		// JSON is YAML; read as such, whole numbers stay whole.
		if err := yaml.Unmarshal(raw, &tree); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "---\n# %s\n", m.ProtoReflect().Descriptor().FullName())
		enc := yaml.NewEncoder(&out)
		enc.SetIndent(2)
		if err := enc.Encode(tree); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

func TestResourcesMatchTheGoldenFiles(t *testing.T) {
	configs, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(configs) == 0 {
		t.Fatalf("no configs: %v", err)
	}
	// Those that name files, which Envoy would want to read, stand apart.
	files, err := filepath.Glob("testdata/identity/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no configs with files: %v", err)
	}
	for _, path := range append(configs, files...) {
		name := strings.TrimSuffix(strings.TrimPrefix(path, "testdata/"), ".yaml")
		t.Run(name, func(t *testing.T) {
			cfg := load(t, name)
			rt := runtimeOf(cfg)
			r := built(t, cfg, rt)
			l, err := BuildListener(cfg, cfg.Groups[0], cfg.Groups[0].Listener.Address, rt)
			if err != nil {
				t.Fatal(err)
			}
			if err := Closure(r, l); err != nil {
				t.Error(err)
			}
			got := render(t, append(r.messages(), l)...)
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s differs; look at it after `go test ./envoy -update`\n%s", golden, firstDifference(got, want))
			}
		})
	}
}

func firstDifference(got, want []byte) string {
	g, w := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d:\n got %s\nwant %s", i+1, g[i], w[i])
		}
	}
	return fmt.Sprintf("got %d lines, want %d", len(g), len(w))
}

func TestBuildIsDeterministic(t *testing.T) {
	cfg := load(t, "chain")
	marshal := func() []byte {
		var out []byte
		for _, m := range built(t, cfg, runtimeOf(cfg)).messages() {
			b, err := deterministic.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, b...)
		}
		return out
	}
	first := marshal()
	for range 20 {
		if !bytes.Equal(first, marshal()) {
			t.Fatal("two builds of one config differ")
		}
	}
}

func TestPoolResourcesAreTheSameInEveryGroup(t *testing.T) {
	cfg := load(t, "models")
	other := cfg.Groups[0]
	other.Name, other.Routes = "other", []string{"declared"}
	a := built(t, cfg, runtimeOf(cfg))
	b, err := Build(cfg, other, runtimeOf(cfg))
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Endpoints) != 1 {
		t.Fatalf("the other group got %d pools, want the one it reaches", len(b.Endpoints))
	}
	if !proto.Equal(a.Clusters[0], b.Clusters[0]) || !proto.Equal(a.Endpoints[0], b.Endpoints[0]) {
		t.Error("pool small differs between groups")
	}
}

func TestAssignmentChangesWithItsCluster(t *testing.T) {
	cfg := load(t, "models")
	before := built(t, cfg, runtimeOf(cfg))
	cfg.Pools[0].HTTP2.InitialStreamWindow = 2 << 20
	after := built(t, cfg, runtimeOf(cfg))
	if proto.Equal(before.Endpoints[0], after.Endpoints[0]) {
		t.Error("a new window left the assignment as it was: the cluster would stall while warming")
	}
	if !proto.Equal(before.Endpoints[1], after.Endpoints[1]) {
		t.Error("another pool's assignment changed too")
	}
}

func TestListenerDependsOnTheListenerAlone(t *testing.T) {
	cfg := load(t, "models")
	group := cfg.Groups[0]
	at := netip.MustParseAddrPort("127.0.0.1:9001")
	before, err := BuildListener(cfg, group, at, runtimeOf(cfg))
	if err != nil {
		t.Fatal(err)
	}
	group.Routes = group.Routes[:1]
	cfg.Routes[0].MaxBody = 1
	cfg.Routes[0].Dialect = fleet.DialectAnthropic
	after, err := BuildListener(cfg, group, at, Runtime{})
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(before, after) {
		t.Error("a change of routes changed the listener: it would drain connections")
	}
	if before.GetName() != ListenerName("edge", at) {
		t.Errorf("name %q", before.GetName())
	}
}

// groupsOf returns a route's priority groups as text: "own: a=9000 b=1000".
func groupsOf(t *testing.T, r *routev3.Route) []string {
	t.Helper()
	spec := &prioritygroupv3.PriorityGroupClusterSpecifier{}
	if err := r.GetRoute().GetInlineClusterSpecifierPlugin().GetExtension().GetTypedConfig().UnmarshalTo(spec); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, g := range spec.GetPriorityGroups() {
		line := g.GetName() + ":"
		for _, c := range g.GetClusters() {
			line += fmt.Sprintf(" %s=%d", c.GetClusterName(), c.GetWeight().GetValue())
		}
		out = append(out, line)
	}
	return out
}

func routeNamed(t *testing.T, r Resources, name string) *routev3.Route {
	t.Helper()
	for _, route := range r.Routes[0].GetVirtualHosts()[0].GetRoutes() {
		if route.GetName() == name {
			return route
		}
	}
	t.Fatalf("no route %q", name)
	return nil
}

// chainConfig is one route over pools p, q, r, … of the given tiers.
func chainConfig(split fleet.Split, fallback []string, tiers ...string) *fleet.Config {
	cfg := &fleet.Config{Routes: []fleet.Route{{
		Name: "x", Match: fleet.Match{Prefix: "/"}, Dialect: fleet.DialectOpenAI,
		Split: split, Fallback: fallback, RetryBody: 1 << 20, MaxBody: 1 << 20,
	}}}
	for i, tier := range tiers {
		cfg.Pools = append(cfg.Pools, fleet.Pool{Name: string(rune('p' + i)), Tier: tier, Protocol: fleet.HTTP1, ConnectTimeout: 1e9})
	}
	cfg.Groups = []fleet.Group{{Name: "edge", Routes: []string{"x"}, Listener: fleet.Listener{PeekDigits: 6}}}
	return cfg
}

var local = Runtime{ExtProc: fleet.Address{Path: "/run/ep"}, AccessLog: fleet.Address{Path: "/run/al"}}

func TestChainsTryEveryPoolOnce(t *testing.T) {
	w := func(pool string, weight uint32) fleet.SplitWeight {
		return fleet.SplitWeight{Pool: pool, Weight: weight}
	}
	for _, c := range []struct {
		name     string
		split    fleet.Split
		fallback []string
		tiers    []string
		want     []string // the chain's groups
		extra    []string // those only ext_proc selects
		codes    []uint32
	}{
		{"one pool: one retry inside it", fleet.Split{w("p", 7)}, nil, []string{"p"},
			[]string{"own: p=10000", "own-2: p=10000"}, []string{"pool-p: p=10000"}, []uint32{503}},
		{"one pool with a fallback", fleet.Split{w("p", 1)}, []string{"q"}, []string{"p", "q"},
			[]string{"own: p=10000", "pool-q: q=10000"}, []string{"pool-p: p=10000"}, []uint32{429, 503, 529}},
		{"fallback in the same tier", fleet.Split{w("p", 1)}, []string{"q"}, []string{"t", "t"},
			[]string{"own: p=10000", "pool-q: q=10000"}, []string{"pool-p: p=10000"}, []uint32{503}},
		{"two pools", fleet.Split{w("p", 90), w("q", 10)}, nil, []string{"p", "q"},
			[]string{"own: p=9000 q=1000", "own-2: q=9000 p=1000"}, []string{"pool-p: p=10000", "pool-q: q=10000"}, []uint32{429, 503, 529}},
		{"three pools and a fallback", fleet.Split{w("p", 1), w("q", 2), w("r", 1)}, []string{"s"}, []string{"p", "q", "r", "p"},
			[]string{"own: p=2500 q=5000 r=2500", "own-2: q=2500 r=5000 p=2500", "own-3: r=2500 p=5000 q=2500", "pool-s: s=10000"}, []string{"pool-p: p=10000", "pool-q: q=10000", "pool-r: r=10000"}, []uint32{503}},
		{"an arm at 0 comes last in the split", fleet.Split{w("p", 0), w("q", 5), w("r", 5)}, []string{"s"}, []string{"p", "q", "r", "s"},
			[]string{"own: q=5000 r=5000", "own-2: r=5000 q=5000", "own-3: p=10000", "pool-s: s=10000"}, []string{"pool-p: p=10000", "pool-q: q=10000", "pool-r: r=10000"}, []uint32{429, 503, 529}},
		{"cut over", fleet.Split{w("p", 0), w("q", 100)}, nil, []string{"p", "q"},
			[]string{"own: q=10000", "own-2: p=10000"}, []string{"pool-p: p=10000", "pool-q: q=10000"}, []uint32{429, 503, 529}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := built(t, chainConfig(c.split, c.fallback, c.tiers...), local)
			route := routeNamed(t, r, "x")
			if got, want := groupsOf(t, route), slices.Concat(c.want, c.extra); !reflect.DeepEqual(got, want) {
				t.Errorf("groups\n got %q\nwant %q", got, want)
			}
			policy := route.GetRoute().GetRetryPolicy()
			if got := policy.GetNumRetries().GetValue(); int(got) != len(c.want)-1 {
				t.Errorf("%d retries for a chain of %d groups", got, len(c.want))
			}
			if got := policy.GetRetriableStatusCodes(); !reflect.DeepEqual(got, c.codes) {
				t.Errorf("retriable codes %v, want %v", got, c.codes)
			}
			if got := routeNamed(t, r, "x/other").GetRoute().GetRetryPolicy().GetRetryOn(); got != onOther {
				t.Errorf("other paths are retried on %q", got)
			}
		})
	}
}

// A rotation must give every draw another pool at each attempt. The oracle
// draws as Envoy does: cumulative in list order.
func TestRotationsVisitEveryPoolForEveryDraw(t *testing.T) {
	split := fleet.Split{{Pool: "p", Weight: 1}, {Pool: "q", Weight: 50}, {Pool: "r", Weight: 37}, {Pool: "s", Weight: 12}}
	c, err := chainOf(chainConfig(split, nil, "p", "q", "r", "s"), fleet.Route{Name: "x", Split: split})
	if err != nil {
		t.Fatal(err)
	}
	for draw := range uint32(fleet.BasisPointsTotal) {
		seen := map[string]bool{}
		for _, g := range c.groups {
			at := draw
			for _, cw := range g.GetClusters() {
				if at < cw.GetWeight().GetValue() {
					seen[cw.GetClusterName()] = true
					break
				}
				at -= cw.GetWeight().GetValue()
			}
		}
		if len(seen) != len(split) {
			t.Fatalf("draw %d visits only %v", draw, seen)
		}
	}
}

func TestSplitSetByHandOverridesTheFile(t *testing.T) {
	cfg := chainConfig(fleet.Split{{Pool: "p", Weight: 90}, {Pool: "q", Weight: 10}}, nil, "p", "q")
	rt := local
	rt.Splits = map[string]fleet.Split{"x": {{Pool: "p", Weight: 1}, {Pool: "q", Weight: 3}}}
	if got := groupsOf(t, routeNamed(t, built(t, cfg, rt), "x"))[0]; got != "own: p=2500 q=7500" {
		t.Error(got)
	}
	for name, split := range map[string]fleet.Split{
		"other order": {{Pool: "q", Weight: 1}, {Pool: "p", Weight: 3}},
		"other pools": {{Pool: "p", Weight: 1}},
		"all zero":    {{Pool: "p"}, {Pool: "q"}},
	} {
		rt.Splits["x"] = split
		if _, err := Build(cfg, cfg.Groups[0], rt); err == nil || !strings.Contains(err.Error(), `route "x"`) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBuildNamesWhatIsMissing(t *testing.T) {
	good := func() *fleet.Config { return chainConfig(fleet.Split{{Pool: "p", Weight: 1}}, []string{"q"}, "p", "q") }
	for _, c := range []struct {
		name    string
		breakIt func(*fleet.Config, *Runtime)
		says    string
	}{
		{"route", func(cfg *fleet.Config, _ *Runtime) { cfg.Groups[0].Routes = []string{"nope"} }, `no route "nope"`},
		{"pool of a split", func(cfg *fleet.Config, _ *Runtime) { cfg.Routes[0].Split[0].Pool = "nope" }, `no pool "nope"`},
		{"pool of a fallback", func(cfg *fleet.Config, _ *Runtime) { cfg.Routes[0].Fallback[0] = "nope" }, `no pool "nope"`},
		{"ext_proc address", func(_ *fleet.Config, rt *Runtime) { rt.ExtProc = fleet.Address{} }, "accepted: unix:/path or IP:port"},
		{"access log address", func(_ *fleet.Config, rt *Runtime) { rt.AccessLog = fleet.Address{Host: "host:1"} }, `"host:1"`},
		{"text", func(cfg *fleet.Config, _ *Runtime) { cfg.Routes[0].Match.Model = "\xff" }, "not UTF-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, rt := good(), local
			c.breakIt(cfg, &rt)
			if _, err := Build(cfg, cfg.Groups[0], rt); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q in it", err, c.says)
			}
		})
	}
	cfg := good()
	if _, err := BuildListener(cfg, cfg.Groups[0], netip.AddrPort{}, local); err == nil {
		t.Error("a listener without an address was built")
	}
	cfg.Groups[0].Listener.PeekDigits = 0
	if _, err := BuildListener(cfg, cfg.Groups[0], netip.MustParseAddrPort("127.0.0.1:1"), local); err == nil {
		t.Error("a listener with 0 peek digits was built")
	}
}

func TestEndpointWeightsFollowCapacity(t *testing.T) {
	for _, c := range []struct {
		capacities []float64
		want       []uint32
	}{
		{[]float64{3, 3, 3}, []uint32{1000, 1000, 1000}},
		{[]float64{0, 0}, []uint32{1000, 1000}},
		{[]float64{2, 1, 0.5}, []uint32{1000, 500, 250}},
		{[]float64{1000, 0.01}, []uint32{1000, 1}},
	} {
		var endpoints []fleet.Endpoint
		for _, capacity := range c.capacities {
			endpoints = append(endpoints, fleet.Endpoint{Capacity: capacity})
		}
		if got := weights(endpoints); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %v, want %v", c.capacities, got, c.want)
		}
	}
}

func TestEveryPoolHasAFloor(t *testing.T) {
	cfg := load(t, "models")
	for _, cla := range built(t, cfg, runtimeOf(cfg)).Endpoints {
		groups := cla.GetEndpoints()
		last := groups[len(groups)-1]
		e := last.GetLbEndpoints()[0].GetEndpoint()
		if last.GetPriority() != 1 || e.GetAddress().GetPipe().GetPath() != FloorPath || !e.GetHealthCheckConfig().GetDisableActiveHealthCheck() {
			t.Errorf("%s: last group %v", cla.GetClusterName(), last)
		}
	}
	if _, err := os.Stat(FloorPath); err == nil {
		t.Error("the floor exists")
	}
}

// onGeneratingPath reports whether a route takes the path for a generating one.
func onGeneratingPath(path string) bool {
	return slices.ContainsFunc(generatingPaths(), func(pattern string) bool {
		return regexp.MustCompile("^(?:" + pattern + ")$").MatchString(path)
	})
}

func TestGeneratingPathAgreesWithFleet(t *testing.T) {
	for path, want := range map[string]bool{
		"/v1/chat/completions": true, "/v1/completions?x=/y": true, "/v1/messages": true, "/a/b/responses?": true,
		"/v1/realtime?model=m": true, "/v1/realtime/sessions": false,
		"/v1/models": false, "/v1/messages/count_tokens": false, "/v1/models?next=/messages": false, "": true,
		"/messages/": true, "/v1/chat/completions//?x": true, "/v1/responses%0a": true, "/v1/messages%0A/%0a": true,
		"/v1/chat/completions/batch": true, "/v1/chat/completions/batch?": true, "/vertex_generate": true, "/generate_stream/": true, "/v2/chat": true,
		"/completion": true, "/infill": true, "/v1/chat/x": false, "/v1/batch": false, "/v1/completions/batches": false,
		"/": true, "/?x": true, "//": true, "%0a": true, "/x/": false,
		"/xcompletions": false, "/v1/completions/x": false, "/v1/messages/batches/": false,
		"/v1/responses%20": false, "/v1/models?x=/completions/": false, "/v1/completions%0": false,
	} {
		if fleet.Generates(path) != want || onGeneratingPath(path) != want {
			t.Errorf("%q: fleet %v, route %v, want %v", path, fleet.Generates(path), onGeneratingPath(path), want)
		}
	}
}

func TestGeneratingPathAgreesWithFleetOnAnyPath(t *testing.T) {
	parts := append(append(fleet.GeneratingPaths(), fleet.GeneratingPathEnds()...),
		"?", "/v1", "/models", "s", "%", "%0", "a", "%2f", "completions", "é")
	generating := 0
	rapid.Check(t, func(t *rapid.T) {
		path := strings.Join(rapid.SliceOfN(rapid.SampledFrom(parts), 0, 6).Draw(t, "parts"), "")
		want := fleet.Generates(path)
		if want {
			generating++
		}
		if got := onGeneratingPath(path); got != want {
			t.Fatalf("%q: the route says %v, fleet %v", path, got, want)
		}
	})
	if generating == 0 {
		t.Error("no generating path was drawn")
	}
}

func TestBodyIsReadWhereAnEarlierRouteNeedsTheModel(t *testing.T) {
	route := func(prefix, model string) fleet.Route {
		return fleet.Route{Match: fleet.Match{Prefix: prefix, Model: model}}
	}
	for name, c := range map[string]struct {
		routes []fleet.Route
		want   bool
	}{
		"alone":                        {[]fleet.Route{route("/", "")}, false},
		"its own model":                {[]fleet.Route{route("/", "m")}, true},
		"a model route below it":       {[]fleet.Route{route("/v1", "m"), route("/", "")}, true},
		"a model route above it":       {[]fleet.Route{route("/", "m"), route("/v1", "")}, true},
		"a model route elsewhere":      {[]fleet.Route{route("/v2", "m"), route("/v1", "")}, false},
		"an earlier one without model": {[]fleet.Route{route("/v1", ""), route("/", "")}, false},
	} {
		if got := modelNeeded(c.routes, len(c.routes)-1); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestValidateLooksIntoAnyPayloads(t *testing.T) {
	bad := &clusterv3.Cluster{
		Name: "a", ConnectTimeout: duration(1e9),
		TypedExtensionProtocolOptions: map[string]*anypb.Any{protocolOptions: packed(http2Protocol(&corev3.Http2ProtocolOptions{
			InitialStreamWindowSize: wrapperspb.UInt32(1),
		}))},
	}
	if err := bad.ValidateAll(); err != nil {
		t.Fatalf("the fault is meant to be visible in the payload alone: %v", err)
	}
	if err := Validate(bad); err == nil || !strings.Contains(err.Error(), "InitialStreamWindowSize") {
		t.Errorf("window of one byte: %v", err)
	}

	deep := &corev3.TypedExtensionConfig{Name: "x", TypedConfig: packed(bad)}
	if err := Validate(deep); err == nil || !strings.Contains(err.Error(), "InitialStreamWindowSize") {
		t.Errorf("an Any inside an Any: %v", err)
	}
	for name, broken := range map[string]*anypb.Any{
		"bytes": {TypeUrl: packed(&httpv3.HttpProtocolOptions{}).GetTypeUrl(), Value: []byte{0xff}},
		"type":  {TypeUrl: "type.googleapis.com/no.such.Message"},
	} {
		if err := Validate(&corev3.TypedExtensionConfig{Name: "x", TypedConfig: broken}); err == nil {
			t.Errorf("a payload with broken %s passed", name)
		}
	}
	if err := Validate(&routev3.RouteConfiguration{VirtualHosts: []*routev3.VirtualHost{{}}}); err == nil {
		t.Error("a virtual host without a name passed")
	}
}

func TestClosureFindsWhatIsMissing(t *testing.T) {
	cfg := load(t, "chain")
	at := cfg.Groups[0].Listener.Address
	for _, c := range []struct {
		name    string
		breakIt func(*Resources)
		says    string
	}{
		{"nothing", func(*Resources) {}, ""},
		{"cluster of a route", func(r *Resources) { r.Clusters, r.Endpoints = r.Clusters[1:], r.Endpoints[1:] }, `names cluster "canary"`},
		{"ext_proc cluster", func(r *Resources) { r.Clusters = without(r.Clusters, wire.ClusterExtProc) }, `names cluster "fairlead_extproc"`},
		{"access log cluster", func(r *Resources) { r.Clusters = without(r.Clusters, wire.ClusterAccessLog) }, `names cluster "fairlead_accesslog"`},
		{"assignment", func(r *Resources) { r.Endpoints = r.Endpoints[1:] }, `names endpoint assignment "canary"`},
		{"routes", func(r *Resources) { r.Routes = nil }, `names route configuration "fairlead.edge"`},
		{"cluster of an assignment", func(r *Resources) {
			r.Endpoints = append(r.Endpoints, &endpointv3.ClusterLoadAssignment{ClusterName: "left"})
		}, `"left" belongs to no EDS cluster`},
		{"duplicate", func(r *Resources) { r.Clusters = append(r.Clusters, r.Clusters[0]) }, `cluster are named "canary"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := built(t, cfg, runtimeOf(cfg))
			l, err := BuildListener(cfg, cfg.Groups[0], at, runtimeOf(cfg))
			if err != nil {
				t.Fatal(err)
			}
			c.breakIt(&r)
			err = Closure(r, l)
			if (err == nil) != (c.says == "") || (err != nil && !strings.Contains(err.Error(), c.says)) {
				t.Errorf("got %v, want %q in it", err, c.says)
			}
		})
	}
}

func without(clusters []*clusterv3.Cluster, name string) []*clusterv3.Cluster {
	var out []*clusterv3.Cluster
	for _, c := range clusters {
		if c.GetName() != name {
			out = append(out, c)
		}
	}
	return out
}

func BenchmarkBuild(b *testing.B) {
	cfg, err := fleet.Load("testdata/quickstart.yaml")
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Build(cfg, cfg.Groups[0], runtimeOf(cfg)); err != nil {
			b.Fatal(err)
		}
	}
}

func TestEveryChainBuilds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "pools")
		inSplit := rapid.IntRange(1, n).Draw(t, "in split")
		var tiers, fallback []string
		var split fleet.Split
		total := uint32(0)
		for i := range n {
			pool := string(rune('p' + i))
			tiers = append(tiers, rapid.SampledFrom([]string{"t", "u", "v", "w"}).Draw(t, "tier"))
			if i >= inSplit {
				fallback = append(fallback, pool)
				continue
			}
			weight := rapid.Uint32Range(0, 1_000_000).Draw(t, "weight")
			total += weight
			split = append(split, fleet.SplitWeight{Pool: pool, Weight: weight})
		}
		cfg := chainConfig(split, fallback, tiers...)
		_, err := Build(cfg, cfg.Groups[0], local)
		if (err == nil) != (total > 0) {
			t.Fatalf("weights sum to %d: %v", total, err)
		}
		if err != nil {
			return
		}
		c, err := chainOf(cfg, cfg.Routes[0])
		if err != nil {
			t.Fatal(err)
		}
		if want := max(n, 2); len(c.groups) != want {
			t.Errorf("%d groups for %d pools", len(c.groups), n)
		}
		alone := map[string]string{}
		names := map[string]bool{}
		for _, g := range c.selectable() {
			names[g.GetName()] = true
			if pool, ok := strings.CutPrefix(g.GetName(), wire.GroupPool); ok && len(g.GetClusters()) == 1 {
				alone[pool] = g.GetClusters()[0].GetClusterName()
			}
			sum := uint32(0)
			for _, cw := range g.GetClusters() {
				sum += cw.GetWeight().GetValue()
			}
			if sum != fleet.BasisPointsTotal {
				t.Errorf("group %s sums to %d", g.GetName(), sum)
			}
		}
		if len(names) != len(c.selectable()) {
			t.Errorf("groups share a name: %v", c.selectable())
		}
		for _, p := range cfg.Pools {
			if alone[p.Name] != p.Name {
				t.Errorf("pool %s can't be named by a group of its own", p.Name)
			}
		}
	})
}
