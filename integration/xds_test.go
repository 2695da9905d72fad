package integration

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/xds"
)

// adsPlane is an xds.Server of this process that can be killed and started
// again. Unless the runtime says otherwise, ext_proc and the access log are
// dead: nothing but the pushed configuration steers.
type adsPlane struct {
	t       *testing.T
	dir     string
	address fleet.Address
	runtime envoy.Runtime
	zones   map[string]string // of sidecars, by id
	options xds.Options
	server  *xds.Server
	stop    func()

	mu     sync.Mutex
	pushes map[string]int // by type
	events map[xds.EventKind]int
}

func newADSPlane(t *testing.T, tcp bool, first *fleet.Config, edit ...func(*xds.Options)) *adsPlane {
	t.Helper()
	p := newDeadPlane(t)
	if tcp {
		p.address = fleet.Address{Host: envoytest.FreeAddr(t).String()}
	}
	for _, e := range edit {
		e(&p.options)
	}
	p.start(first)
	return p
}

// newDeadPlane is one that is still to be started.
func newDeadPlane(t *testing.T) *adsPlane {
	t.Helper()
	p := &adsPlane{t: t, dir: envoytest.ShortTempDir(t), runtime: nobody(t), pushes: map[string]int{}, events: map[xds.EventKind]int{}}
	p.address = fleet.Address{Path: filepath.Join(p.dir, "xds")}
	p.options.Observe = func(e xds.Event) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.events[e.Kind]++
		if e.Kind == xds.EventPush {
			p.pushes[e.TypeURL[strings.LastIndexByte(e.TypeURL, '.')+1:]]++
		}
	}
	t.Cleanup(func() { p.kill() })
	return p
}

// start runs a new server that knows nothing of the one before.
func (p *adsPlane) start(first *fleet.Config) {
	p.t.Helper()
	p.server = xds.New(p.options)
	p.submit(first)
	l, err := net.Listen(p.address.Network(), p.address.Target())
	if err != nil {
		p.t.Fatal(err)
	}
	g := grpc.NewServer(xds.ServerOptions()...)
	p.server.Register(g)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	server := p.server
	wg.Go(func() { _ = server.Run(ctx) })
	wg.Go(func() { _ = g.Serve(l) })
	p.stop = func() { g.Stop(); cancel(); wg.Wait() }
}

// kill breaks all streams without a word, as a crash does.
func (p *adsPlane) kill() {
	if p.stop != nil {
		p.stop()
		p.stop = nil
	}
}

func (p *adsPlane) submit(cfg *fleet.Config) {
	p.t.Helper()
	if err := p.server.Submit(xds.Target{Config: cfg, Runtime: p.runtime}); err != nil {
		p.t.Fatal(err)
	}
}

// publish submits, waits until it is out, and returns the responses per type.
func (p *adsPlane) publish(cfg *fleet.Config) map[string]int {
	p.t.Helper()
	p.mu.Lock()
	p.pushes = map[string]int{}
	p.mu.Unlock()
	p.submit(cfg)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := p.server.Settled(ctx); err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pushes
}

func (p *adsPlane) count(kind xds.EventKind) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.events[kind]
}

// sidecar starts an Envoy that knows only where the control plane is.
func (p *adsPlane) sidecar(id string, listen netip.AddrPort, opts ...envoytest.Option) *envoytest.Envoy {
	p.t.Helper()
	b, err := bootstrap.Render(bootstrap.Options{
		NodeID: id, Group: "edge", Listen: listen, Zone: p.zones[id], XDS: []fleet.Address{p.address},
		Admin: fleet.Address{Path: filepath.Join(p.dir, id)},
	}, "yaml")
	if err != nil {
		p.t.Fatal(err)
	}
	// A dead ext_proc is a warning per request.
	return envoytest.Start(p.t, b, append(opts, envoytest.WithLogLevel("error"))...)
}

// serving starts an Envoy and waits until it holds everything and answers.
func (p *adsPlane) serving(id string) (*envoytest.Envoy, string) {
	p.t.Helper()
	listen := envoytest.FreeAddr(p.t)
	e := p.sidecar(id, listen)
	envoytest.Eventually(p.t, id+" is synced", func() bool { return p.synced(id) })
	waitListening(p.t, listen.String())
	return e, listen.String()
}

func (p *adsPlane) synced(id string) bool {
	for _, typ := range []string{"CDS", "EDS", "RDS", "LDS"} {
		if p.state(id, typ).State != xds.Synced {
			return false
		}
	}
	return true
}

func (p *adsPlane) state(id, typ string) xds.TypeStatus {
	for _, n := range p.server.Status() {
		for _, ts := range n.Types {
			if n.Connected && n.Node == id && ts.Type == typ {
				return ts
			}
		}
	}
	return xds.TypeStatus{}
}

// adsConfig is a config of one route over pools, each "name=weight" with its
// addresses.
func adsConfig(t *testing.T, extra map[string]string, pools ...adsPool) *fleet.Config {
	t.Helper()
	var list, split strings.Builder
	for _, p := range pools {
		list.WriteString(poolYAML(p.name, extra[p.name], p.at...))
		fmt.Fprintf(&split, "{ pool: %s, weight: %d }, ", p.name, p.weight)
	}
	text := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
groups:
  - { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
%sroutes:
  - { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [%s] }
`, list.String(), strings.TrimSuffix(split.String(), ", "))
	cfg, err := fleet.Parse("fairlead.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return cfg
}

type adsPool struct {
	name   string
	weight int
	at     []netip.AddrPort
}

func poolOf(name string, weight int, ups ...*envoytest.Upstream) adsPool {
	p := adsPool{name: name, weight: weight}
	for _, u := range ups {
		p.at = append(p.at, u.Addr())
	}
	return p
}

// openStreams opens event streams through an Envoy to an upstream and returns a
// func that sends one more event on each and checks that it arrives.
func openStreams(t *testing.T, n int, listen string, up *envoytest.Upstream) (check func()) {
	t.Helper()
	events := make(chan string)
	up.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			envoytest.SSE(events).ServeHTTP(w, r)
			return
		}
		named("a").ServeHTTP(w, r)
	}))
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	lines := make(chan string, n)
	for range n {
		ctx, cancel := context.WithCancel(context.Background())
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listen+"/stream", nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer response.Body.Close()
			for scan := bufio.NewScanner(response.Body); scan.Scan(); {
				if scan.Text() != "" {
					lines <- scan.Text()
				}
			}
		}()
		t.Cleanup(func() { cancel(); <-done })
	}
	return func() {
		t.Helper()
		for i := range n {
			select {
			case events <- "data: x\n\n":
			case <-time.After(20 * time.Second):
				t.Fatalf("stream %d of %d is gone", i+1, n)
			}
		}
		for i := range n {
			select {
			case <-lines:
			case <-time.After(20 * time.Second):
				t.Fatalf("%d of %d streams gave their event", i, n)
			}
		}
	}
}

// TestXDSWeightsMoveUnderLoad moves all traffic with one route response and
// cuts neither a request nor a running stream.
func TestXDSWeightsMoveUnderLoad(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	at := func(weightA, weightB int) *fleet.Config {
		return adsConfig(t, nil, poolOf("b", weightB, b), poolOf("a", weightA, a))
	}
	p := newADSPlane(t, false, at(100, 0))
	_, listen := p.serving("s1")
	streams := openStreams(t, 4, listen, a)
	p.publish(at(90, 10))
	load := startLoad(t, 100, listen)
	envoytest.Eventually(t, "traffic on both pools", func() bool {
		_, by := load.counts()
		return by[`"a"`] > 20 && by[`"b"`] > 0
	})
	if got := p.publish(at(0, 100)); len(got) != 1 || got["RouteConfiguration"] != 1 {
		t.Errorf("a change of weights sent %v", got)
	}
	// Requests that Envoy took before may still end on a; then nothing more.
	envoytest.Eventually(t, "a gets nothing new", func() bool {
		before := a.Count()
		_, start := load.counts()
		envoytest.Eventually(t, "twenty more answers", func() bool {
			_, now := load.counts()
			return now[`"b"`] >= start[`"b"`]+20
		})
		return a.Count() == before
	})
	streams()
	load.mustNotFail(t)
}

// TestXDSEndpointsAndPoolsChangeUnderLoad adds and removes endpoints (EDS
// alone), then replaces a pool by another in one submit.
func TestXDSEndpointsAndPoolsChangeUnderLoad(t *testing.T) {
	a1, a2, b := envoytest.NewUpstream(t, named("a1")), envoytest.NewUpstream(t, named("a2")), envoytest.NewUpstream(t, named("b"))
	p := newADSPlane(t, false, adsConfig(t, nil, poolOf("a", 100, a1)))
	_, listen := p.serving("s1")
	load := startLoad(t, 200, listen)
	sees := func(name string) {
		t.Helper()
		_, start := load.counts()
		envoytest.Eventually(t, "traffic on "+name, func() bool {
			_, now := load.counts()
			return now[`"`+name+`"`] > start[`"`+name+`"`]+10
		})
	}
	sees("a1")
	if got := p.publish(adsConfig(t, nil, poolOf("a", 100, a1, a2))); len(got) != 1 || got["ClusterLoadAssignment"] != 1 {
		t.Errorf("an added endpoint sent %v", got)
	}
	sees("a2")
	if got := p.publish(adsConfig(t, nil, poolOf("a", 100, a2))); len(got) != 1 || got["ClusterLoadAssignment"] != 1 {
		t.Errorf("a removed endpoint sent %v", got)
	}
	sees("a2")
	for range 10 { // blue/green: a new pool, the route, the old pool away
		p.publish(adsConfig(t, nil, poolOf("b", 100, b)))
		sees("b")
		p.publish(adsConfig(t, nil, poolOf("a", 100, a2)))
		sees("a2")
	}
	load.mustNotFail(t)
}

// TestXDSRestartUnderLoad kills the control plane and starts another with the
// same content: nothing is sent and nothing fails.
func TestXDSRestartUnderLoad(t *testing.T) {
	for _, tcp := range []bool{false, true} {
		t.Run(fmt.Sprintf("tcp=%t", tcp), func(t *testing.T) {
			a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
			cfg := adsConfig(t, nil, poolOf("a", 100, a), poolOf("b", 0, b))
			p := newADSPlane(t, tcp, cfg)
			e, listen := p.serving("s1")
			streams := openStreams(t, 2, listen, a)
			load := startLoad(t, 100, listen)
			version := p.state("s1", "RDS").Version

			p.kill()
			e.WaitStat("control_plane.connected_state", func(v int64) bool { return v == 0 })
			sent, _ := load.counts()
			envoytest.Eventually(t, "fifty requests without a control plane", func() bool {
				now, _ := load.counts()
				return now > sent+50
			})
			p.start(cfg)
			envoytest.Eventually(t, "the sidecar is back", func() bool { return p.synced("s1") })
			if got := p.state("s1", "RDS").Version; got != version {
				t.Errorf("routes were %s, now %s", version, got)
			}
			for _, stat := range []string{"cluster_manager.cluster_modified", "cluster_manager.cluster_removed", "listener_manager.listener_modified", "listener_manager.listener_removed"} {
				if v, _ := e.Stat(stat); v != 0 {
					t.Errorf("%s is %d after a restart with the same content", stat, v)
				}
			}
			p.publish(adsConfig(t, nil, poolOf("a", 0, a), poolOf("b", 100, b)))
			_, start := load.counts()
			envoytest.Eventually(t, "the new control plane moves traffic", func() bool {
				_, now := load.counts()
				return now[`"b"`] > start[`"b"`]+10
			})
			streams()
			load.mustNotFail(t)
		})
	}
}

// TestXDSWindowChangeReachesTheUpstream: a pool's window is a cluster response
// and its touched assignment, and shows in the SETTINGS of the next connection.
func TestXDSWindowChangeReachesTheUpstream(t *testing.T) {
	recorder := envoytest.NewSettingsRecorder(t)
	with := func(stream, connection string) *fleet.Config {
		return adsConfig(t, map[string]string{"a": fmt.Sprintf("protocol: h2c\nhttp2: { initialStreamWindow: %s, initialConnectionWindow: %s }", stream, connection)},
			adsPool{"a", 100, []netip.AddrPort{recorder.Addr()}})
	}
	p := newADSPlane(t, false, with("128KiB", "1MiB"))
	e, listen := p.serving("s1")
	load := startLoad(t, 50, listen)
	window := func(want uint32) func() bool {
		return func() bool {
			seen := recorder.Seen()
			return len(seen) > 0 && seen[len(seen)-1].Values[http2.SettingInitialWindowSize] == want
		}
	}
	envoytest.Eventually(t, "a window of 128 KiB", window(128<<10))
	got := p.publish(with("512KiB", "2MiB"))
	if len(got) != 2 || got["Cluster"] != 1 || got["ClusterLoadAssignment"] != 1 {
		t.Errorf("a changed window sent %v", got)
	}
	envoytest.Eventually(t, "a window of 512 KiB", window(512<<10))
	sent, _ := load.counts()
	envoytest.Eventually(t, "traffic goes on", func() bool { now, _ := load.counts(); return now > sent+20 })
	// A new control plane with another window: the change travels with the
	// reconnect, and the assignment's digest makes the cluster warm at once.
	p.kill()
	p.start(with("256KiB", "1MiB"))
	envoytest.Eventually(t, "a window of 256 KiB", window(256<<10))
	envoytest.Eventually(t, "the sidecar is synced", func() bool { return p.synced("s1") })
	if v, _ := e.Stat("cluster.a.init_fetch_timeout"); v != 0 {
		t.Error("the changed cluster warmed until its fetch timeout")
	}
	load.mustNotFail(t)
}

// TestXDSRefusedContentIsTakenBack injects a cluster, then a listener, that
// only Envoy can find faulty.
func TestXDSRefusedContentIsTakenBack(t *testing.T) {
	for _, c := range []struct{ typ, says string }{
		{"CDS", "ALPN"},
		{"LDS", "filter chain"},
	} {
		t.Run(c.typ, func(t *testing.T) {
			a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
			// Builders are pure: it is the config with even weights that is faulty.
			spoiled := func(typ string, cfg *fleet.Config) bool {
				return typ == c.typ && cfg.Routes[0].Split[0].Weight == 50
			}
			at := func(weightA int) *fleet.Config {
				return adsConfig(t, nil, poolOf("a", weightA, a), poolOf("b", 100-weightA, b))
			}
			p := newADSPlane(t, false, at(90), func(o *xds.Options) {
				o.Build = func(cfg *fleet.Config, g fleet.Group, rt envoy.Runtime) (envoy.Resources, error) {
					r, err := envoy.Build(cfg, g, rt)
					if err == nil && spoiled("CDS", cfg) {
						err = needALPN(r.Clusters[0])
					}
					return r, err
				}
				o.BuildListener = func(cfg *fleet.Config, g fleet.Group, at netip.AddrPort, rt envoy.Runtime) (*listenerv3.Listener, error) {
					l, err := envoy.BuildListener(cfg, g, at, rt)
					if err == nil && spoiled("LDS", cfg) {
						l.FilterChains = append(l.FilterChains, proto.Clone(l.FilterChains[0]).(*listenerv3.FilterChain))
					}
					return l, err
				}
			})
			_, listen := p.serving("s1")
			p.serving("s2")
			load := startLoad(t, 50, listen)
			p.publish(at(50))
			for _, id := range []string{"s1", "s2"} {
				envoytest.Eventually(t, id+" shows the refusal", func() bool {
					st := p.state(id, c.typ)
					return st.State == xds.Nacked && strings.Contains(st.Reason, "taken back")
				})
				if st := p.state(id, c.typ); !strings.Contains(st.Reason, c.says) || strings.Contains(st.Reason, "\n") {
					t.Errorf("%s: reason %q", id, st.Reason)
				}
			}
			_, start := load.counts()
			envoytest.Eventually(t, "traffic goes on", func() bool {
				_, now := load.counts()
				return now[`"a"`] > start[`"a"`]+10
			})
			p.publish(at(10))
			envoytest.Eventually(t, "repaired content is taken", func() bool { return p.synced("s1") && p.synced("s2") })
			load.mustNotFail(t)
		})
	}
}

// needALPN asks for a negotiated protocol on a connection without TLS, which
// Envoy refuses and no static check sees.
func needALPN(c *clusterv3.Cluster) error {
	options, err := anypb.New(&httpv3.HttpProtocolOptions{
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_AutoConfig{AutoConfig: &httpv3.HttpProtocolOptions_AutoHttpConfig{}},
	})
	if err != nil {
		return err
	}
	c.TypedExtensionProtocolOptions = map[string]*anypb.Any{"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}
	return nil
}

// TestXDSPortInUseIsTheSidecarsOwn: one sidecar can't bind its port; the other
// and the group's content are not touched.
func TestXDSPortInUseIsTheSidecarsOwn(t *testing.T) {
	a := envoytest.NewUpstream(t, named("a"))
	p := newADSPlane(t, false, adsConfig(t, nil, poolOf("a", 100, a)))
	_, listen := p.serving("s1")
	taken := netip.MustParseAddrPort(a.Addr().String())
	p.sidecar("s2", taken, envoytest.WithoutReadyWait())
	envoytest.Eventually(t, "s2 shows the refusal", func() bool {
		st := p.state("s2", "LDS")
		return st.State == xds.Nacked && strings.Contains(st.Reason, taken.String())
	})
	if !p.synced("s1") {
		t.Errorf("s1 is %+v", p.server.Status())
	}
	if g := p.server.Groups()[0]; g.Refused != "" || g.Desired != g.Published {
		t.Errorf("group %+v", g)
	}
	load := startLoad(t, 50, listen)
	envoytest.Eventually(t, "traffic", func() bool { sent, _ := load.counts(); return sent > 10 })
	p.publish(adsConfig(t, nil, poolOf("a", 100, a, envoytest.NewUpstream(t, named("a")))))
	envoytest.Eventually(t, "both take the next change", func() bool { return p.synced("s1") && p.state("s2", "EDS").State == xds.Synced })
	load.mustNotFail(t)
}

// TestXDSPortsInUseTakeNothingBack: no sidecar that is left has its port, and
// new content, which is good, goes out and stays all the same.
func TestXDSPortsInUseTakeNothingBack(t *testing.T) {
	a := envoytest.NewUpstream(t, named("a"))
	cfg := func(window fleet.Bytes) *fleet.Config {
		c := adsConfig(t, nil, poolOf("a", 100, a))
		c.Groups[0].Listener.HTTP2.InitialStreamWindow = window
		return c
	}
	p := newADSPlane(t, false, cfg(64<<10))
	first, _ := p.serving("s0") // so there is accepted content to go back to
	first.Kill()
	envoytest.Eventually(t, "the good one is gone", func() bool { return p.server.Groups()[0].Envoys == 0 })
	nacks := 0
	for i, window := range []fleet.Bytes{128 << 10, 256 << 10} {
		taken := envoytest.NewUpstream(t, named("taken")).Addr()
		p.sidecar(fmt.Sprintf("s%d", i+1), taken, envoytest.WithoutReadyWait())
		nacks++
		envoytest.Eventually(t, "a refusal", func() bool { return p.count(xds.EventNack) == nacks })
		if got := p.publish(cfg(window)); len(got) != 1 || got["Listener"] != i+1 {
			t.Errorf("another window sent %v", got)
		}
		nacks += i + 1
		envoytest.Eventually(t, "a refusal of the new content by each", func() bool { return p.count(xds.EventNack) == nacks })
		if st := p.state(fmt.Sprintf("s%d", i+1), "LDS"); st.State != xds.Nacked || !strings.Contains(st.Reason, taken.String()) {
			t.Errorf("with %d sidecars: %+v", i+1, st)
		}
		if g := p.server.Groups()[0]; p.count(xds.EventRollback) != 0 || g.Refused != "" || g.Desired != g.Published {
			t.Errorf("with %d sidecars: %d rollbacks, group %+v", i+1, p.count(xds.EventRollback), g)
		}
	}
}
