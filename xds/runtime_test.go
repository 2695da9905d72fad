package xds

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// paced sets how often a runtime is pushed and how long an Envoy that comes
// back keeps its own.
func paced(every, settle time.Duration) func(*Options) {
	return func(o *Options) { o.runtimeEvery, o.runtimeSettle = every, settle }
}

// unpaced pushes each change at once and lets nobody keep anything for long.
var unpaced = paced(time.Nanosecond, time.Nanosecond)

// runtime returns what a client holds of Fairlead's layer, or nil.
func (c *client) runtime() map[string]float64 {
	r, ok := c.hold(typeRuntime, wire.RuntimeName).(*runtimev3.Runtime)
	if !ok {
		return nil
	}
	out := map[string]float64{}
	for key, v := range r.GetLayer().GetFields() {
		out[key] = v.GetNumberValue()
	}
	return out
}

func (c *client) holdsLimit(cluster string, n float64) bool {
	return c.runtime()["circuit_breakers."+cluster+".default.max_requests"] == n
}

// limit sets one cluster's limit.
func (r *rig) limit(cluster string, n uint32) {
	r.server.SetMaxRequests("edge", map[string]uint32{cluster: n})
}

func (r *rig) group() *group { return r.server.allGroups()[0] }

func TestRuntimeIsThereFromTheStart(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.connect("n1", "edge", layered)
	eventually(t, "five types", func() bool { return len(c.got()) == 5 })
	c.expect(
		"RTDS +fairlead",
		"CDS +a100 +fairlead_accesslog +fairlead_extproc +h100",
		"EDS +a100 +h100",
		"LDS +fairlead.edge.127.0.0.1:9001",
		"RDS +fairlead.edge",
	)
	if got := c.runtime(); got == nil || len(got) != 0 {
		t.Errorf("the first runtime is %v", got)
	}
	if err := envoy.Validate(c.hold(typeRuntime, wire.RuntimeName)); err != nil {
		t.Error(err)
	}
}

func TestLimitIsOneRuntimeResponse(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90", secondGroup), unpaced)
	c, plain, other := r.join("n1", "edge", layered), r.join("n2", "edge"), r.join("n3", "core", layered)
	r.server.SetMaxRequests("edge", map[string]uint32{"h100": 5, "a100": 4_000_000_000})
	eventually(t, "the limits", func() bool { return r.state("n1", "RTDS") == "SYNCED" && c.runtime() != nil && len(c.runtime()) == 2 })
	want := map[string]float64{
		"circuit_breakers.h100.default.max_requests": 5,
		"circuit_breakers.a100.default.max_requests": 4_000_000_000,
	}
	if got := c.runtime(); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	// The same again is nothing.
	r.server.SetMaxRequests("edge", map[string]uint32{"h100": 5, "a100": 4_000_000_000})
	r.publish(target("h100=20 a100=80", secondGroup))
	c.expect("RTDS +fairlead", "RDS +fairlead.edge")
	plain.expect("RDS +fairlead.edge")
	other.expect("RDS +fairlead.core")
	if got := r.state("n2", "RTDS"); got != "absent" {
		t.Errorf("an Envoy without a layer is %s", got)
	}
	for _, g := range r.server.Groups() {
		if want := map[string]int{"edge": 2}[g.Name]; len(g.MaxRequests) != want {
			t.Errorf("group %s shows %v", g.Name, g.MaxRequests)
		}
	}
	r.server.SetMaxRequests("edge", nil)
	eventually(t, "no limits", func() bool { return len(c.runtime()) == 0 })
}

func TestNewcomerIsServedTheLimitsAtOnce(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), paced(time.Hour, time.Hour))
	r.limit("h100", 5) // the first push has nothing to wait for
	eventually(t, "the push", func() bool { return r.server.Groups()[0].MaxRequests["h100"] == 5 })
	c := r.join("n1", "edge", layered)
	if !c.holdsLimit("h100", 5) {
		t.Errorf("it has %v", c.runtime())
	}
}

func TestLimitDoesNotWaitForClusters(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	c := r.join("n1", "edge", layered)
	c.mu.Lock()
	c.mute[typeCDS] = true
	c.mu.Unlock()
	r.submit(target("h100=10 a100=80 b200=10"))
	eventually(t, "the new cluster", func() bool { return slices.Contains(c.got(), "CDS +b200") })
	r.limit("h100", 5)
	eventually(t, "the limit", func() bool { return c.holdsLimit("h100", 5) })
	if got := r.server.Groups()[0].Publisher; got != "publishing" {
		t.Errorf("the publisher is %s: nothing was waited for", got)
	}
	if slices.Contains(c.got(), "RDS +fairlead.edge") {
		t.Error("routes came before the ACK of their clusters")
	}
	c.mu.Lock()
	c.mute[typeCDS] = false
	c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeCDS, ResponseNonce: lastNonce(r, "n1", typeCDS)})
	c.mu.Unlock()
	r.settle()
	eventually(t, "the routes", func() bool { return slices.Contains(c.got(), "RDS +fairlead.edge") })
}

// Nothing waits for an Envoy that never answers a runtime.
func TestMuteRuntimeHoldsNothingUp(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	c := r.join("n1", "edge", layered)
	c.mu.Lock()
	c.mute[typeRuntime] = true
	c.mu.Unlock()
	r.limit("h100", 5)
	eventually(t, "the limit went out", func() bool { return slices.Contains(c.got(), "RTDS +fairlead") })
	r.publish(target("h100=10 a100=80 b200=10"))
	if n := r.count(EventAckTimeout); n != 0 {
		t.Errorf("%d timeouts", n)
	}
	if got := r.state("n1", "RTDS"); got != "STALE waiting for its ACK" {
		t.Errorf("the runtime is %s", got)
	}
}

func TestRuntimeIsPushedAtMostOnceASecond(t *testing.T) {
	s := New(Options{})
	if err := s.Submit(target("h100=100")); err != nil {
		t.Fatal(err)
	}
	g := s.allGroups()[0]
	now := time.Now()
	served := func() uint32 { return s.Groups()[0].MaxRequests["h100"] }
	step := func(after time.Duration, wantNext time.Duration, wantServed uint32) {
		t.Helper()
		next, more := g.stepRuntime(now.Add(after))
		if more != (wantNext > 0) || next != wantNext || served() != wantServed {
			t.Errorf("after %v: next %v (%t), serves %d; want %v, %d", after, next, more, served(), wantNext, wantServed)
		}
	}
	set := func(n uint32) { s.SetMaxRequests("edge", map[string]uint32{"h100": n}) }
	step(0, 0, 0)
	set(5)
	step(0, 0, 5)
	set(6)
	step(100*time.Millisecond, 900*time.Millisecond, 5)
	set(7)
	step(600*time.Millisecond, 400*time.Millisecond, 5)
	step(time.Second, 0, 7)
	step(3*time.Second, 0, 7)
	set(8)
	set(7) // back before it was published
	step(3*time.Second, 0, 7)
	set(9)
	step(3*time.Second, 0, 9)
}

func TestEnvoyThatComesBackKeepsItsLimitsUntilTheOthersAreCounted(t *testing.T) {
	first := newRig(t, target("h100=10 a100=90"), unpaced)
	before := first.join("n1", "edge", layered)
	first.limit("h100", 5)
	eventually(t, "the limit", func() bool { return before.holdsLimit("h100", 5) && first.state("n1", "RTDS") == "SYNCED" })

	second := newRig(t, target("h100=10 a100=90"), paced(time.Nanosecond, time.Hour))
	c := second.join("n1", "edge", layered, holding(before))
	// It must not be told the empty layer of a server that knows nothing yet, nor
	// what it may do while it seems to be alone, nor wait for either.
	nothingNew := func(weight int) {
		t.Helper()
		second.group().stepRuntime(time.Now())
		second.publish(target(fmt.Sprintf("h100=%d a100=90", weight)))
		c.expect("RDS +fairlead.edge")
		c.forget()
		if got := second.state("n1", "RTDS"); got != "STALE it came back and keeps what it holds until the others have been counted" {
			t.Errorf("it is %s", got)
		}
	}
	nothingNew(11)
	second.limit("h100", 10)
	eventually(t, "the push", func() bool { return second.server.Groups()[0].MaxRequests["h100"] == 10 })
	nothingNew(12)
	// A change of what it subscribes to is no way around it.
	c.mu.Lock()
	c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeRuntime, ResourceNamesSubscribe: []string{"other"}})
	c.mu.Unlock()
	eventually(t, "the subscription", func() bool {
		g := second.group()
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.runtime.published) == 2 && len(g.runtime.kept) == 1
	})
	nothingNew(13)

	fresh := second.join("n2", "edge", layered)
	if !fresh.holdsLimit("h100", 10) {
		t.Errorf("a newcomer has %v", fresh.runtime())
	}
	second.limit("h100", 4)
	eventually(t, "the newcomer has it", func() bool { return fresh.holdsLimit("h100", 4) })
	second.group().stepRuntime(time.Now().Add(2 * time.Hour))
	eventually(t, "it is told", func() bool { return c.holdsLimit("h100", 4) })
	second.limit("h100", 3)
	eventually(t, "and followed from now on", func() bool { return c.holdsLimit("h100", 3) && second.state("n1", "RTDS") == "SYNCED" })
}

func TestEnvoyThatComesBackWithTheSameLimitsIsSentNothing(t *testing.T) {
	first := newRig(t, target("h100=10 a100=90"), unpaced)
	before := first.join("n1", "edge", layered)
	first.limit("h100", 5)
	eventually(t, "the limit", func() bool { return before.holdsLimit("h100", 5) })
	second := newRig(t, target("h100=10 a100=90"), unpaced)
	second.limit("h100", 5)
	eventually(t, "the push", func() bool { return second.server.Groups()[0].MaxRequests["h100"] == 5 })
	c := second.join("n1", "edge", layered, holding(before))
	if got := second.state("n1", "RTDS"); got != "SYNCED" {
		t.Errorf("it is %s", got)
	}
	second.limit("h100", 6)
	eventually(t, "the next", func() bool { return c.holdsLimit("h100", 6) })
	if got := countOf(c.got(), "RTDS +fairlead"); got != 1 {
		t.Errorf("%d responses", got)
	}
}

// An Envoy that knows a layer of a server that never sets one keeps it; its
// stream's end leaves nothing behind.
func TestEnvoyKeepsItsLimitsWhileNobodySetsAny(t *testing.T) {
	first := newRig(t, target("h100=10 a100=90"), unpaced)
	before := first.join("n1", "edge", layered)
	first.limit("h100", 5)
	eventually(t, "the limit", func() bool { return before.holdsLimit("h100", 5) })
	second := newRig(t, target("h100=10 a100=90"), unpaced)
	c := second.join("n1", "edge", layered, holding(before))
	second.group().stepRuntime(time.Now().Add(time.Hour))
	second.publish(target("h100=11 a100=90"))
	c.expect("RDS +fairlead.edge")
	c.close()
	eventually(t, "the stream is over", func() bool { return connected(second.server) == 0 })
	g := second.group()
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.runtime.kept) != 0 {
		t.Errorf("%d questions are remembered", len(g.runtime.kept))
	}
}

// refuseLimit refuses a runtime with a limit of 666.
func refuseLimit(typ string, r *discoveryv3.DeltaDiscoveryResponse) string {
	for _, res := range r.GetResources() {
		m, _ := res.GetResource().UnmarshalNew()
		if typ == "RTDS" && strings.Contains(fmt.Sprint(m), "number_value:666") {
			return "Unexpected RTDS runtime:\n no"
		}
	}
	return ""
}

func TestRefusedRuntimeIsTakenBackAloneAndShown(t *testing.T) {
	for n := 1; n <= 2; n++ {
		t.Run(fmt.Sprintf("by %d of %d", n, n), func(t *testing.T) {
			r := newRig(t, target("h100=10 a100=90"), unpaced)
			var clients []*client
			for i := range n {
				clients = append(clients, r.join(fmt.Sprint("n", i), "edge", layered, refusing(refuseLimit)))
			}
			plain := r.join("plain", "edge") // has no say
			r.limit("h100", 5)
			for i, c := range clients {
				eventually(t, "the limit", func() bool { return c.holdsLimit("h100", 5) && r.state(fmt.Sprint("n", i), "RTDS") == "SYNCED" })
				c.forget()
			}
			r.limit("h100", 666)
			eventually(t, "it is taken back", func() bool { return r.count(EventRollback) == 1 })
			for i, c := range clients {
				eventually(t, "the refusal is shown", func() bool {
					return r.state(fmt.Sprint("n", i), "RTDS") == "NACKED taken back; it holds the last accepted content: Unexpected RTDS runtime: no"
				})
				c.expect("RTDS +fairlead", "RTDS +fairlead")
				if !c.holdsLimit("h100", 5) {
					t.Errorf("it holds %v", c.runtime())
				}
			}
			if g := r.server.Groups()[0]; g.RuntimeRefused != "Unexpected RTDS runtime: no" || g.MaxRequests["h100"] != 5 || g.Refused != "" || g.Desired != g.Published {
				t.Errorf("group %+v", g)
			}
			r.limit("h100", 666) // the same again
			r.publish(target("h100=20 a100=80"))
			plain.expect("RDS +fairlead.edge")
			r.limit("h100", 7)
			for i, c := range clients {
				eventually(t, "repaired content", func() bool { return c.holdsLimit("h100", 7) && r.state(fmt.Sprint("n", i), "RTDS") == "SYNCED" })
				if got := countOf(c.got(), "RTDS +fairlead"); got != 3 {
					t.Errorf("%d responses", got)
				}
			}
			if g := r.server.Groups()[0]; g.RuntimeRefused != "" || r.count(EventRollback) != 1 {
				t.Errorf("group %+v, %d rollbacks", g, r.count(EventRollback))
			}
		})
	}
}

func TestRefusalWithoutAReasonIsOne(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	c := r.join("n1", "edge", layered)
	c.mu.Lock()
	c.mute[typeRuntime] = true
	c.mu.Unlock()
	r.limit("h100", 5)
	eventually(t, "the limit went out", func() bool { return slices.Contains(c.got(), "RTDS +fairlead") })
	g := r.group()
	g.mu.Lock()
	var nonce string
	for ses := range g.sessions {
		nonce = ses.runtime.open[0].nonce
	}
	g.mu.Unlock()
	c.mu.Lock()
	c.mute[typeRuntime] = false
	c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeRuntime, ResponseNonce: nonce, ErrorDetail: &statuspb.Status{Code: 13}})
	c.mu.Unlock()
	eventually(t, "it is taken back", func() bool { return r.count(EventRollback) == 1 })
	if g := r.server.Groups()[0]; g.RuntimeRefused != "refused without a reason" || len(g.MaxRequests) != 0 {
		t.Errorf("group %+v", g)
	}
}

func TestRuntimeRefusedByOneOfSeveralIsItsOwn(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	r.join("odd", "edge", layered, refusing(refuseLimit))
	b := r.join("n2", "edge", layered)
	r.limit("h100", 666)
	eventually(t, "the refusal", func() bool { return r.state("odd", "RTDS") == "NACKED Unexpected RTDS runtime: no" })
	eventually(t, "the other has it", func() bool { return b.holdsLimit("h100", 666) })
	if r.count(EventRollback) != 0 {
		t.Error("rolled back")
	}
}

// Refused clusters and a refused runtime don't take each other back.
func TestRefusedWorldLeavesTheRuntimeAlone(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	c := r.join("n1", "edge", layered, refusing(refuseWindow))
	r.limit("h100", 5)
	eventually(t, "the limit", func() bool { return r.state("n1", "RTDS") == "SYNCED" && c.holdsLimit("h100", 5) })
	r.publish(target("h100=50 a100=50", window("h100", badWindow)))
	if g := r.server.Groups()[0]; g.Refused == "" || g.RuntimeRefused != "" || g.MaxRequests["h100"] != 5 {
		t.Errorf("group %+v", g)
	}
	if got := r.state("n1", "RTDS"); got != "SYNCED" {
		t.Errorf("the runtime is %s", got)
	}
}

func TestOtherRuntimeLayersAreEmptyAndBounded(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"))
	c := r.join("n1", "edge", layered)
	var names []string
	for i := range 2 * maxRuntimeNames {
		names = append(names, fmt.Sprintf("rt%03d", i))
	}
	c.mu.Lock()
	c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeRuntime, ResourceNamesSubscribe: names})
	c.mu.Unlock()
	held := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.held[typeRuntime])
	}
	eventually(t, "the layers", func() bool { return held() == maxRuntimeNames })
	r.publish(target("h100=20 a100=80"))
	if n := held(); n != maxRuntimeNames {
		t.Errorf("%d layers are answered", n)
	}
}

func TestLimitsOfAnUnknownGroupArePassedOver(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	r.server.SetMaxRequests("nobody", map[string]uint32{"h100": 5})
	New(Options{}).SetMaxRequests("edge", nil)
	if g := r.server.Groups(); len(g) != 1 || len(g[0].MaxRequests) != 0 {
		t.Errorf("groups %+v", g)
	}
}

// A caller may use its map again.
func TestLimitsAreCopied(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	c := r.join("n1", "edge", layered)
	m := map[string]uint32{"h100": 5}
	r.server.SetMaxRequests("edge", m)
	m["h100"] = 6
	r.server.SetMaxRequests("edge", m)
	eventually(t, "the second", func() bool { return c.holdsLimit("h100", 6) })
}

func TestLimitsAndWeightsChangeAtOnce(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), unpaced)
	var clients []*client
	for i := range 8 {
		clients = append(clients, r.join(fmt.Sprint("n", i), "edge", layered))
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := r.server.Submit(target(fmt.Sprintf("h100=%d a100=90", 11+i), func(cfg *fleet.Config) {
				cfg.Pools[1].MaxInFlight = 100 + i
			})); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			r.limit("h100", uint32(10+i))
			_ = r.server.Status()
		})
		wg.Go(func() { // and one that comes and goes with a runtime of its own
			c := r.connect(fmt.Sprint("x", i), "edge", layered, holding(clients[0]))
			eventually(t, "it is served", func() bool { return len(c.got()) > 0 || r.state(c.node.Id, "CDS") == "SYNCED" })
			c.close()
		})
	}
	wg.Wait()
	r.limit("h100", 77)
	r.publish(target("h100=77 a100=23"))
	for _, c := range clients {
		eventually(t, "the last limit", func() bool { return c.holdsLimit("h100", 77) })
	}
	if n := r.count(EventNack) + r.count(EventAckTimeout); n != 0 {
		t.Errorf("%d refusals or timeouts", n)
	}
}

// BenchmarkLimitChange is one change of a limit until 1,000 Envoys in this process
// have confirmed it.
func BenchmarkLimitChange(b *testing.B) {
	const envoys = 1000
	r := newRig(b, target("h100=10 a100=90"), unpaced)
	for i := range envoys {
		r.connect(fmt.Sprintf("n%04d", i), "edge", layered)
	}
	confirmed := func() bool {
		for _, n := range r.server.Status() {
			if len(n.Types) != 5 || n.Types[4].State != Synced {
				return false
			}
		}
		return connected(r.server) == envoys
	}
	eventually(b, "all are synced", confirmed)
	b.ReportMetric(envoys, "envoys")
	for i := 0; b.Loop(); i++ {
		r.limit("h100", uint32(5+i))
		eventually(b, "all have it", func() bool { return r.server.Groups()[0].MaxRequests["h100"] == uint32(5+i) && confirmed() })
	}
}
