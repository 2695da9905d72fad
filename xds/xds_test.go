package xds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func TestStartSendsTheWholeWorldInEnvoysOrder(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.connect("n1", "edge")
	eventually(t, "four types", func() bool { return len(c.got()) == 4 })
	c.expect(
		"CDS +a100 +fairlead_accesslog +fairlead_extproc +h100",
		"EDS +a100 +h100",
		"LDS +fairlead.edge.127.0.0.1:9001",
		"RDS +fairlead.edge",
	)
}

func TestWeightChangeIsOneRouteResponse(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	next := target("h100=10 a100=90")
	next.Runtime.Splits = map[string]fleet.Split{"messages": {{Pool: "h100", Weight: 0}, {Pool: "a100", Weight: 100}}}
	r.publish(next)
	c.expect("RDS +fairlead.edge")
}

func TestWeightChangeReaches200Envoys(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	var clients []*client
	for i := range 200 {
		clients = append(clients, r.connect(fmt.Sprintf("n%03d", i), "edge"))
	}
	eventually(t, "all are synced", func() bool { return synced(r) == 200 })
	for _, c := range clients {
		c.forget()
	}
	r.publish(target("h100=100 a100=0"))
	for _, c := range clients {
		c.expect("RDS +fairlead.edge")
	}
	if n := r.count(EventAckTimeout); n != 0 || synced(r) != 200 {
		t.Errorf("%d timeouts, %d synced", n, synced(r))
	}
}

// connected counts Envoys with a stream.
func connected(s *Server) int {
	n := 0
	for _, node := range s.Status() {
		if node.Connected {
			n++
		}
	}
	return n
}

// synced counts connected Envoys that hold all four types.
func synced(r *rig) int {
	n := 0
	for _, s := range r.server.Status() {
		ok := s.Connected && len(s.Types) == 4
		for _, ts := range s.Types {
			ok = ok && ts.State == Synced
		}
		if ok {
			n++
		}
	}
	return n
}

func TestNewPoolComesBeforeItsRoutesAndLeavesAfterThem(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	r.publish(target("h100=10 a100=80 b200=10"))
	c.expect("CDS +b200", "EDS +b200", "RDS +fairlead.edge")
	c.forget()
	r.publish(target("h100=10 a100=90"))
	c.expect("RDS +fairlead.edge", "CDS -b200")
}

func TestBlueGreenInOneSubmitAddsFirstAndRemovesLast(t *testing.T) {
	r := newRig(t, target("blue=100"))
	c := r.join("n1", "edge")
	r.publish(target("green=100"))
	c.expect("CDS +green", "EDS +green", "RDS +fairlead.edge", "CDS -blue")
}

func TestChangedClusterIsFollowedByItsChangedAssignment(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	r.publish(target("h100=10 a100=90", window("h100", 1<<20)))
	c.expect("CDS +h100", "EDS +h100")
	if n := r.count(EventAckTimeout); n != 0 {
		t.Error("the cluster warmed until the deadline")
	}
}

func TestEndpointChangeIsOneEndpointResponse(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	r.publish(target("h100=10 a100=90", editPool("h100", func(p *fleet.Pool) { p.Endpoints = p.Endpoints[:1] })))
	c.expect("EDS +h100")
}

func TestListenerChangeComesLast(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	r.publish(target("h100=10 a100=80 b200=10", func(cfg *fleet.Config) {
		cfg.Groups[0].Listener.HTTP2.InitialStreamWindow = 1 << 20
	}))
	c.expect("CDS +b200", "EDS +b200", "RDS +fairlead.edge", "LDS +fairlead.edge.127.0.0.1:9001")
}

func TestRestartWithTheSameContentSendsNothing(t *testing.T) {
	first := newRig(t, target("h100=10 a100=90"))
	before := first.join("n1", "edge")
	second := newRig(t, target("h100=10 a100=90"))
	after := second.join("n1", "edge", holding(before))
	second.publish(target("h100=50 a100=50"))
	after.expect("RDS +fairlead.edge")
}

func TestRestartWithOtherContentSendsTheDifference(t *testing.T) {
	first := newRig(t, target("h100=10 a100=90"))
	before := first.join("n1", "edge")
	second := newRig(t, target("h100=10 a100=90", window("h100", 1<<20)))
	c := second.connect("n1", "edge", holding(before))
	eventually(t, "the changed pool", func() bool { return len(c.got()) == 2 && synced(second) == 1 })
	c.expect("CDS +h100", "EDS +h100")
}

func TestMuteEnvoyHoldsTheGroupNoLongerThanTheDeadline(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), deadline(100*time.Millisecond))
	quick := r.join("quick", "edge")
	slow := r.join("slow", "edge")
	slow.mu.Lock()
	slow.mute[typeCDS] = true
	slow.mu.Unlock()

	r.publish(target("h100=10 a100=80 b200=10"))
	quick.expect("CDS +b200", "EDS +b200", "RDS +fairlead.edge")
	if got := r.state("slow", "CDS"); got != "STALE no ACK within 100ms" {
		t.Errorf("slow is %s", got)
	}
	if got := r.state("quick", "RDS"); got != "SYNCED" {
		t.Errorf("quick is %s", got)
	}
	// It isn't waited for again.
	timeouts := r.count(EventAckTimeout)
	r.publish(target("h100=20 a100=70 b200=10", window("a100", 1<<20)))
	if n := r.count(EventAckTimeout); n != timeouts {
		t.Errorf("%d timeouts more", n-timeouts)
	}
}

func TestEnvoyThatRefusedRoutesForWantOfClustersIsResynchronised(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), deadline(50*time.Millisecond))
	r.join("quick", "edge")
	slow := r.join("slow", "edge")
	slow.mu.Lock()
	slow.mute[typeCDS] = true
	slow.refuse = func(typ string, _ *discoveryv3.DeltaDiscoveryResponse) string {
		if typ == "RDS" {
			return "route: unknown cluster 'b200'"
		}
		return ""
	}
	slow.mu.Unlock()
	r.publish(target("h100=10 a100=80 b200=10"))
	eventually(t, "the refusal is seen", func() bool { return strings.HasPrefix(r.state("slow", "RDS"), "NACKED") })
	if r.count(EventRollback) != 0 {
		t.Error("a straggler's refusal took the content back")
	}
	slow.mu.Lock()
	slow.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeCDS, ResponseNonce: lastNonce(r, "slow", typeCDS)})
	slow.mu.Unlock()
	if err := slow.failure(); status.Code(err) != codes.Unavailable {
		t.Errorf("stream ended with %v", err)
	}
}

// lastNonce is the nonce that a node has still to answer.
func lastNonce(r *rig, node, typeURL string) string {
	for _, g := range r.server.allGroups() {
		g.mu.Lock()
		defer g.mu.Unlock()
		for ses := range g.sessions {
			if ts := ses.types[typeURL]; ses.node == node && len(ts.open) > 0 {
				return ts.open[len(ts.open)-1].nonce
			}
		}
	}
	return ""
}

// badWindow is what refuseWindow looks for.
const badWindow = 1_111_111

// refuseWindow refuses a CDS response with h100's changed cluster.
func refuseWindow(typ string, r *discoveryv3.DeltaDiscoveryResponse) string {
	for _, res := range r.GetResources() {
		m, _ := res.GetResource().UnmarshalNew()
		if c, ok := m.(*clusterv3.Cluster); ok && c.GetName() == "h100" && strings.Contains(c.String(), "1111111") {
			return "Error adding/updating cluster(s) h100:\n  goo.gle/debugonly " + strings.Repeat("field {\n  x: 1\n} ", 500)
		}
	}
	return ""
}

func TestRefusedContentIsTakenBackOnceAndShown(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	a := r.join("n1", "edge", refusing(refuseWindow))
	b := r.join("n2", "edge", refusing(refuseWindow))
	bad := target("h100=50 a100=50", window("h100", badWindow))
	r.publish(bad)

	for _, c := range []*client{a, b} {
		got := c.got()
		if n := countOf(got, "CDS +h100"); n != 2 { // the refused one and the way back
			t.Errorf("h100 came %d times: %v", n, got)
		}
		if slices.Contains(got, "RDS +fairlead.edge") {
			t.Errorf("routes were published behind refused clusters: %v", got)
		}
	}
	if r.count(EventRollback) != 1 || r.count(EventNack) != 2 {
		t.Errorf("%d rollbacks, %d refusals", r.count(EventRollback), r.count(EventNack))
	}
	eventually(t, "the refusal is shown", func() bool {
		s := r.state("n1", "CDS")
		return strings.HasPrefix(s, "NACKED taken back; it holds the last accepted content: Error adding/updating cluster(s) h100: goo.gle/debugonly field")
	})
	if s := r.state("n1", "CDS"); strings.ContainsAny(s, "\n\r") || len(s) > maxText+len("NACKED ") {
		t.Errorf("the reason has %d bytes: %q", len(s), s)
	}
	if g := r.server.Groups()[0]; g.Refused == "" || g.Desired == g.Published || g.Publisher != "idle" {
		t.Errorf("group %+v", g)
	}

	// The same content again: nothing.
	a.forget()
	r.publish(bad)
	a.expect()
	// Repaired content: published, and the refusal is gone.
	r.publish(target("h100=50 a100=50", window("h100", 2<<20)))
	a.expect("CDS +h100", "EDS +h100", "RDS +fairlead.edge")
	eventually(t, "all is well", func() bool { return synced(r) == 2 })
	if g := r.server.Groups()[0]; g.Refused != "" || g.Desired != g.Published {
		t.Errorf("group %+v", g)
	}
}

func countOf(list []string, s string) int {
	n := 0
	for _, e := range list {
		if e == s {
			n++
		}
	}
	return n
}

func TestRefusalByOneOfSeveralIsItsOwn(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	r.join("odd", "edge", refusing(refuseWindow))
	b := r.join("n2", "edge")
	r.join("n3", "edge")
	r.publish(target("h100=50 a100=50", window("h100", badWindow)))
	b.expect("CDS +h100", "EDS +h100", "RDS +fairlead.edge")
	if s := r.state("odd", "CDS"); !strings.HasPrefix(s, "NACKED Error adding") {
		t.Errorf("odd is %s", s)
	}
	if r.count(EventRollback) != 0 {
		t.Error("rolled back")
	}
}

func TestOnlyEnvoyLeftDecides(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), deadline(50*time.Millisecond))
	odd := r.join("odd", "edge", refusing(refuseWindow))
	silent := r.join("silent", "edge")
	silent.mu.Lock()
	silent.mute[typeCDS] = true
	silent.mu.Unlock()
	r.publish(target("h100=10 a100=90", window("h100", badWindow)))
	if r.count(EventRollback) != 1 {
		t.Error("the only one that answered refused, and the content stayed")
	}
	if n := countOf(odd.got(), "CDS +h100"); n != 2 {
		t.Errorf("h100 came %d times", n)
	}
}

// A route response is refused whole: its good resources are lost with it, while
// the library's bookkeeping has them as delivered.
func TestGoodResourcesOfARefusedResponseComeAgainWithOtherBytes(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	r.join("n1", "edge")
	bad := target("h100=50 a100=50", window("a100", badWindow))
	refused := map[string]bool{}
	var mu sync.Mutex
	// A newcomer gets h100 (as accepted) and a100 (new, bad) in one response.
	picky := func(typ string, resp *discoveryv3.DeltaDiscoveryResponse) string {
		mu.Lock()
		defer mu.Unlock()
		for _, res := range resp.GetResources() {
			m, _ := res.GetResource().UnmarshalNew()
			if c, ok := m.(*clusterv3.Cluster); ok && c.GetName() == "a100" && strings.Contains(c.String(), "1111111") {
				for _, each := range resp.GetResources() {
					refused[each.GetName()+each.GetVersion()] = true
				}
				return "no"
			}
		}
		return ""
	}
	g := r.server.allGroups()[0]
	g.mu.Lock()
	for ses := range g.sessions {
		ses.cancel(errors.New("gone")) // nobody is left to accept or refuse
	}
	g.mu.Unlock()
	eventually(t, "nobody is connected", func() bool { return connected(r.server) == 0 })
	r.publish(bad)
	c := r.connect("n2", "edge", refusing(picky))
	eventually(t, "it was taken back", func() bool { return r.count(EventRollback) == 1 && synced(r) == 0 && c.hold(typeCDS, "h100") != nil })
	mu.Lock()
	defer mu.Unlock()
	eventually(t, "all clusters came", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.held[typeCDS]) == 4
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, version := range c.held[typeCDS] {
		if refused[name+version] {
			t.Errorf("%s came with the version that was refused", name)
		}
	}
	cluster := c.content[typeCDS]["h100"].(*clusterv3.Cluster)
	if cluster.GetMetadata().GetFilterMetadata()[generationNamespace] == nil {
		t.Error("h100 carries no generation")
	}
}

func TestBindFailureIsTheNodesOwn(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	r.join("n1", "edge", listening("127.0.0.1:9101"))
	c := r.connect("n2", "edge", listening("127.0.0.1:9102"), refusing(func(typ string, _ *discoveryv3.DeltaDiscoveryResponse) string {
		if typ == "LDS" {
			return "Error adding/updating listener(s) fairlead.edge: cannot bind '127.0.0.1:9102': Address already in use"
		}
		return ""
	}))
	eventually(t, "the refusal is shown", func() bool {
		s := r.state("n2", "LDS")
		return strings.HasPrefix(s, "NACKED") && strings.Contains(s, "127.0.0.1:9102")
	})
	r.settle()
	if s := r.state("n1", "LDS"); s != "SYNCED" {
		t.Errorf("n1 is %s", s)
	}
	if r.count(EventRollback) != 0 {
		t.Error("rolled back")
	}
	if n := len(slices.DeleteFunc(c.got(), func(s string) bool { return !strings.HasPrefix(s, "LDS") })); n != 1 {
		t.Errorf("the listener came %d times", n)
	}
}

// Refusals of new content for want of a port say nothing about the content, also
// when nobody else answers.
func TestBindFailuresAloneTakeNothingBack(t *testing.T) {
	for n := 1; n <= 2; n++ {
		t.Run(fmt.Sprintf("%d of %d", n, n), func(t *testing.T) {
			var on atomic.Bool
			r := newRig(t, target("h100=10 a100=90"))
			for i := range n {
				at := fmt.Sprintf("127.0.0.1:910%d", i)
				r.join(fmt.Sprint("n", i), "edge", listening(at), refusing(func(typ string, _ *discoveryv3.DeltaDiscoveryResponse) string {
					if typ == "LDS" && on.Load() {
						return "Error adding/updating listener(s) fairlead.edge." + at + ": cannot bind '" + at + "': Address already in use"
					}
					return ""
				}))
			}
			on.Store(true)
			r.publish(target("h100=10 a100=90", func(cfg *fleet.Config) { cfg.Groups[0].Listener.HTTP2.InitialStreamWindow = 1 << 20 }))
			for i := range n {
				s := r.state(fmt.Sprint("n", i), "LDS")
				if !strings.HasPrefix(s, "NACKED Error adding") || !strings.Contains(s, fmt.Sprintf("127.0.0.1:910%d", i)) {
					t.Errorf("n%d is %s", i, s)
				}
			}
			if g := r.server.Groups()[0]; r.count(EventRollback) != 0 || g.Refused != "" || g.Desired != g.Published {
				t.Errorf("%d rollbacks, group %+v", r.count(EventRollback), g)
			}
		})
	}
}

func TestBindFailureDoesNotSpeakForTheContent(t *testing.T) {
	var on atomic.Bool
	refuse := func(text string) clientOption {
		return refusing(func(typ string, _ *discoveryv3.DeltaDiscoveryResponse) string {
			if typ == "LDS" && on.Load() {
				return text
			}
			return ""
		})
	}
	r := newRig(t, target("h100=10 a100=90"))
	r.join("n1", "edge", listening("127.0.0.1:9101"), refuse("cannot bind '127.0.0.1:9101': Address already in use"))
	r.join("n2", "edge", listening("127.0.0.1:9102"), refuse("no such filter"))
	on.Store(true)
	r.publish(target("h100=10 a100=90", func(cfg *fleet.Config) { cfg.Groups[0].Listener.HTTP2.InitialStreamWindow = 1 << 20 }))
	if r.count(EventRollback) != 1 {
		t.Error("the only answer about the content was a refusal, and it stayed")
	}
}

func TestEachListeningAddressHasItsOwnListener(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	a := r.join("n1", "edge", listening("127.0.0.1:9101"))
	b := r.join("n2", "edge", listening("127.0.0.1:9102"))
	if a.hold(typeLDS, "fairlead.edge.127.0.0.1:9101") == nil || b.hold(typeLDS, "fairlead.edge.127.0.0.1:9102") == nil {
		t.Error("a listener is missing")
	}
	r.publish(target("h100=10 a100=90", func(cfg *fleet.Config) { cfg.Groups[0].Listener.HTTP2.InitialStreamWindow = 1 << 20 }))
	a.expect("LDS +fairlead.edge.127.0.0.1:9101")
	b.expect("LDS +fairlead.edge.127.0.0.1:9102")
}

func TestEnvoysWithoutAnAddressFollowTheGroupsDefault(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	r.publish(target("h100=10 a100=90", func(cfg *fleet.Config) {
		cfg.Groups[0].Listener.Address = netip.MustParseAddrPort("127.0.0.1:9009")
	}))
	if err := c.failure(); status.Code(err) != codes.Unavailable {
		t.Fatalf("the stream ended with %v", err)
	}
	again := r.connect("n1", "edge", holding(c))
	eventually(t, "the listener moved", func() bool { return again.hold(typeLDS, "fairlead.edge.127.0.0.1:9009") != nil })
	again.expect("LDS +fairlead.edge.127.0.0.1:9009 -fairlead.edge.127.0.0.1:9001")
}

func TestStreamsThatCannotBeServedAreRefusedWithAReason(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90", secondGroup))
	for _, c := range []struct {
		name, group string
		opts        []clientOption
		code        codes.Code
		want        string
	}{
		{"unknown group", "edgy", nil, codes.NotFound, `group "edgy" (node.cluster) is not in the configuration; accepted: core, edge`},
		{"no group", "", nil, codes.NotFound, "accepted: core, edge"},
		{"no node", "edge", []clientOption{func(c *client) { c.sent = true }}, codes.InvalidArgument, "must carry the node"},
		{"bad address", "edge", []clientOption{listening("localhost")}, codes.InvalidArgument, `"localhost"; accepted: IP:port`},
		{"port 0", "edge", []clientOption{listening("127.0.0.1:0")}, codes.InvalidArgument, "accepted: IP:port"},
		{"empty address", "edge", []clientOption{listening("")}, codes.InvalidArgument, "accepted: IP:port"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := r.connect("n", c.group, c.opts...).failure()
			if status.Code(err) != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	if len(r.server.Status()) != 0 {
		t.Error("a refused stream is shown")
	}
}

// TestNothingWithoutTheExtProcClusterIsPublished: neither at the start, where serve ends
// with the error, nor later, where what was published stands.
func TestNothingWithoutTheExtProcClusterIsPublished(t *testing.T) {
	missing := true
	build := func(cfg *fleet.Config, g fleet.Group, rt envoy.Runtime) (envoy.Resources, error) {
		r, err := envoy.Build(cfg, g, rt)
		r.Clusters = slices.DeleteFunc(r.Clusters, func(c *clusterv3.Cluster) bool { return missing && c.GetName() == wire.ClusterExtProc })
		return r, err
	}
	refused := func(s *Server, split string) {
		t.Helper()
		err := s.Submit(target(split))
		if err == nil || !strings.Contains(err.Error(), `group "edge"`) || !strings.Contains(err.Error(), `names cluster "`+wire.ClusterExtProc+`", which is not there`) {
			t.Errorf("submitted with %v", err)
		}
	}
	refused(New(Options{Build: build}), "h100=10 a100=90")
	missing = false
	r := newRig(t, target("h100=10 a100=90"), func(o *Options) { o.Build = build })
	c := r.join("n1", "edge")
	before := len(c.got())
	missing = true
	refused(r.server, "h100=20 a100=80")
	if err := r.server.Settled(t.Context()); err != nil {
		t.Error(err)
	}
	if after := len(c.got()); after != before {
		t.Errorf("%d responses more", after-before)
	}
}

func TestStateOfTheWorldStreamsAreRefused(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(c.conn).StreamAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "DELTA_GRPC") {
		t.Errorf("got %v", err)
	}
}

func TestTypesWithoutContentKeepTheStreamOpen(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	c.mu.Lock()
	for _, typ := range []string{resource.SecretType, resource.ScopedRouteType, resource.ExtensionConfigType, "type.googleapis.com/no.such.Type"} {
		c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typ, ResourceNamesSubscribe: []string{"x"}})
	}
	c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: resource.RuntimeType, ResourceNamesSubscribe: []string{"rt0"}})
	c.mu.Unlock()
	eventually(t, "the empty runtime layer", func() bool { return c.hold(resource.RuntimeType, "rt0") != nil })
	c.forget()
	r.publish(target("h100=20 a100=80"))
	c.expect("RDS +fairlead.edge")
}

func TestGroupsShareAPoolAndPublishApart(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90", secondGroup))
	edge, core := r.join("n1", "edge"), r.join("n2", "core")
	if !proto.Equal(edge.hold(typeEDS, "h100"), core.hold(typeEDS, "h100")) {
		t.Error("the groups have different endpoints of one pool")
	}
	// Each group's changed cluster is followed by its changed assignment.
	r.publish(target("h100=10 a100=90", secondGroup, window("h100", 1<<20)))
	edge.expect("CDS +h100", "EDS +h100")
	core.expect("CDS +h100", "EDS +h100")
	if n := r.count(EventAckTimeout); n != 0 {
		t.Errorf("%d timeouts", n)
	}
}

func TestRemovedGroupEndsItsStreams(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90", secondGroup))
	edge, core := r.join("n1", "edge"), r.join("n2", "core")
	r.publish(target("h100=10 a100=90"))
	if err := core.failure(); status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "accepted: edge") {
		t.Errorf("got %v", err)
	}
	if err := r.connect("n2", "core").failure(); status.Code(err) != codes.NotFound {
		t.Errorf("got %v", err)
	}
	edge.expect()
	// A group that comes back is served at once.
	r.publish(target("h100=10 a100=90", secondGroup))
	r.join("n2", "core")
}

func TestFaultySubmitChangesNothing(t *testing.T) {
	var fail bool
	r := newRig(t, target("h100=10 a100=90"), func(o *Options) {
		o.Build = func(cfg *fleet.Config, g fleet.Group, rt envoy.Runtime) (envoy.Resources, error) {
			res, err := envoy.Build(cfg, g, rt)
			if fail {
				res.Endpoints = res.Endpoints[1:] // a cluster without endpoints
			}
			return res, err
		}
	})
	c := r.join("n1", "edge")
	fail = true
	err := r.server.Submit(target("h100=50 a100=50"))
	if err == nil || !strings.Contains(err.Error(), `group "edge"`) || !strings.Contains(err.Error(), "h100") {
		t.Errorf("error %v", err)
	}
	if err := r.server.Submit(Target{}); err == nil {
		t.Error("an empty target was accepted")
	}
	r.settle()
	c.expect()
}

func TestNoConfigurationYetIsARetry(t *testing.T) {
	s := New(Options{})
	if _, err := s.groupOf("edge"); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestConcurrentSubmitsEndInTheLastContent(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := r.server.Submit(target(fmt.Sprintf("h100=%d a100=90", 11+i))); err != nil {
				t.Error(err)
			}
			_ = r.server.Status()
		})
	}
	wg.Wait()
	r.publish(target("h100=77 a100=23"))
	want, err := envoy.Build(target("h100=77 a100=23").Config, target("h100=77 a100=23").Config.Groups[0], target("").Runtime)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.hold(typeRDS, "fairlead.edge"); !proto.Equal(got, want.Routes[0]) {
		t.Error("the last weights didn't arrive")
	}
}

func TestGenerationChangesBytesOfEveryType(t *testing.T) {
	w, err := newWorld(builders{envoy.Build, envoy.BuildListener}, target("h100=10 a100=90"), target("h100=10 a100=90").Config.Groups[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, m := range []items{w.clusters, w.endpoints, w.routes, {"l": w.listeners[w.group.Listener.Address].item}} {
		for name, it := range m {
			for g := range uint64(3) {
				next, err := newItem(withGeneration(it.msg, g+1))
				if err != nil || next.version == it.version || seen[next.version] {
					t.Errorf("%s generation %d: same bytes (%v)", name, g+1, err)
				}
				seen[next.version] = true
				if err := envoy.Validate(next.msg); err != nil {
					t.Error(err)
				}
			}
			again, _ := newItem(it.msg)
			if again.version != it.version {
				t.Errorf("%s was written", name)
			}
		}
	}
}

func TestLocalCause(t *testing.T) {
	for message, want := range map[string]bool{
		"Error adding/updating listener(s) x: cannot bind '127.0.0.1:23303': Address already in use": true,
		"Cannot bind '[::1]:80': Permission denied":                                                  true,
		"cannot listen on unix socket: Address already in use":                                       true,
		"Error adding/updating listener(s) x: no such filter":                                        false,
		"route: unknown cluster 'bind'":                                                              false,
		"":                                                                                           false,
	} {
		if got := localCause(message); got != want {
			t.Errorf("localCause(%q) = %t", message, got)
		}
	}
}

func TestOneLine(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"a\n  b\tc", "a b c"},
		{"\x1b[31mred\x00", "?[31mred?"},
		{"bad \xff byte", "bad ? byte"},
		{strings.Repeat("ä", 400), strings.Repeat("ä", 254) + "…"},
	} {
		if got := oneLine(c.in); got != c.want || len(got) > maxText {
			t.Errorf("oneLine(%.20q) = %q (%d bytes)", c.in, got, len(got))
		}
	}
}

func TestNewPoolsNeverGetStuckWarming(t *testing.T) {
	r := newRig(t, target("p0=100"))
	c := r.join("n1", "edge")
	for i := range 100 {
		r.publish(target(fmt.Sprintf("p%d=100", i+1)))
	}
	if n := r.count(EventAckTimeout) + r.count(EventNack); n != 0 {
		t.Errorf("%d timeouts or refusals", n)
	}
	if got := len(c.got()); got != 400 { // CDS+, EDS+, RDS, CDS-
		t.Errorf("%d responses", got)
	}
}

func TestListeningAddressesAreBounded(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	busy := r.join("n1", "edge", listening("127.0.0.1:9101"))
	g := r.server.allGroups()[0]
	g.mu.Lock()
	for i := 0; len(g.listens) < maxListens; i++ {
		a := netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(i+1))
		g.listens[a] = &listenCache{address: a, cache: g.cds, sessions: 1}
	}
	g.mu.Unlock()
	if err := r.connect("n2", "edge", listening("127.0.0.1:9102")).failure(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more address: %v", err)
	}
	// One that nobody uses makes room.
	g.mu.Lock()
	g.listens[netip.MustParseAddrPort("10.0.0.1:7")].sessions = 0
	g.mu.Unlock()
	r.join("n3", "edge", listening("127.0.0.1:9103"))
	if err := busy.stream.Context().Err(); err != nil {
		t.Error(err)
	}
}

func TestTypesPerStreamAreBounded(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge")
	c.mu.Lock()
	for i := range maxTypes {
		c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: fmt.Sprintf("type.googleapis.com/t%d", i)})
	}
	c.mu.Unlock()
	if err := c.failure(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v", err)
	}
}

// memoryStream is a delta stream without a network.
type memoryStream struct {
	grpc.ServerStream
	ctx context.Context
	in  chan *discoveryv3.DeltaDiscoveryRequest
}

func (m memoryStream) Context() context.Context                       { return m.ctx }
func (m memoryStream) Send(*discoveryv3.DeltaDiscoveryResponse) error { return nil }
func (m memoryStream) SetHeader(metadata.MD) error                    { return nil }
func (m memoryStream) SendHeader(metadata.MD) error                   { return nil }
func (m memoryStream) SetTrailer(metadata.MD)                         {}
func (m memoryStream) Recv() (*discoveryv3.DeltaDiscoveryRequest, error) {
	select {
	case r, ok := <-m.in:
		if !ok {
			return nil, io.EOF
		}
		return r, nil
	case <-m.ctx.Done():
		return nil, m.ctx.Err()
	}
}

// FuzzStream: no sequence of requests breaks the server, and none is remembered
// when its stream is over. The input is a list of requests, each behind its
// length in one byte.
func FuzzStream(f *testing.F) {
	var seed []byte
	for _, r := range []*discoveryv3.DeltaDiscoveryRequest{
		{Node: &corev3.Node{Id: "n", Cluster: "edge"}, TypeUrl: typeCDS},
		{TypeUrl: typeEDS, ResourceNamesSubscribe: []string{"h100"}},
		{TypeUrl: typeCDS, ResponseNonce: "1"},
		{TypeUrl: typeEDS, ResponseNonce: "2", ErrorDetail: &statuspb.Status{Message: "no"}},
		{TypeUrl: typeLDS, InitialResourceVersions: map[string]string{"x": "y"}},
		{TypeUrl: typeRDS, ResourceNamesSubscribe: []string{"*", "a"}, ResourceNamesUnsubscribe: []string{"*"}},
		{TypeUrl: typeRuntime, ResourceNamesSubscribe: []string{"fairlead", "x"}, InitialResourceVersions: map[string]string{"fairlead": "y"}},
		{TypeUrl: typeRuntime, ResourceNamesUnsubscribe: []string{"fairlead"}},
		{TypeUrl: "t"},
	} {
		raw, err := proto.Marshal(r)
		if err != nil || len(raw) > 255 {
			f.Fatal(err, len(raw))
		}
		seed = append(append(seed, byte(len(raw))), raw...)
	}
	f.Add(seed)
	f.Add([]byte{0})
	server := New(Options{})
	if err := server.Submit(target("h100=10 a100=90")); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := memoryStream{ctx: t.Context(), in: make(chan *discoveryv3.DeltaDiscoveryRequest, len(raw)+1)}
		for len(raw) > 0 {
			n := min(int(raw[0]), len(raw)-1)
			r := &discoveryv3.DeltaDiscoveryRequest{}
			if proto.Unmarshal(raw[1:1+n], r) != nil {
				r = &discoveryv3.DeltaDiscoveryRequest{Node: &corev3.Node{Cluster: "edge"}, TypeUrl: string(raw[1 : 1+n])}
			}
			m.in <- r
			raw = raw[1+n:]
		}
		close(m.in)
		_ = ads{server}.DeltaAggregatedResources(m)
		if n := connected(server); n != 0 {
			t.Fatalf("%d streams are remembered", n)
		}
	})
}

// BenchmarkWeightChange is one change of weights from Submit to the last ACK,
// over 1,000 Envoys in this process.
func BenchmarkWeightChange(b *testing.B) {
	const envoys = 1000
	r := newRig(b, target("h100=10 a100=90"), deadline(patience))
	for i := range envoys {
		r.connect(fmt.Sprintf("n%04d", i), "edge")
	}
	eventually(b, "all are synced", func() bool { return synced(r) == envoys })
	b.ReportMetric(envoys, "envoys")
	for i := 0; b.Loop(); i++ {
		r.publish(target(fmt.Sprintf("h100=%d a100=90", 11+i%2)))
	}
	if synced(r) != envoys || r.count(EventAckTimeout) != 0 {
		b.Error("not all have it")
	}
}
