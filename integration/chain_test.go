package integration

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	prioritygroupv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/priority_group/v3"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// drawnAndFurther parts a route's pools as a plan's inputs want them: those that
// Envoy draws, and the others in the order of later attempts. A weight that
// rounds to no basis point gets no draw.
func drawnAndFurther(r fleet.Route) (split, fallback []string) {
	for i, points := range r.Split.BasisPoints() {
		if points > 0 {
			split = append(split, r.Split[i].Pool)
		} else {
			fallback = append(fallback, r.Split[i].Pool)
		}
	}
	return split, append(fallback, r.Fallback...)
}

// TestPlanAndBuildersAgreeOnEveryChain: the plan's order of pools, after which
// ext_proc lays out the hosts, is the order in which Envoy's priority groups
// draw clusters, for every draw. If one changed without the other, retries
// would look for hosts of another pool.
func TestPlanAndBuildersAgreeOnEveryChain(t *testing.T) {
	weights := []uint32{0, 1, 30, 100_000} // 1 beside 100,000 rounds to no draw
	chains := 0
	for split := 1; split <= 4; split++ {
		for code := range pow(len(weights), split) {
			for fallback := range 4 {
				cfg := chainConfig(weights, split, code, fallback)
				if cfg.Routes[0].Split.BasisPoints() == nil {
					continue // no pool is drawn: the config is refused
				}
				chains += checkChains(t, cfg)
				if t.Failed() {
					return
				}
			}
		}
	}
	if chains < 1000 {
		t.Errorf("only %d chains compared", chains)
	}
}

func pow(base, exponent int) int {
	n := 1
	for range exponent {
		n *= base
	}
	return n
}

// chainConfig is one route whose split has weights picked by the digits of
// code.
func chainConfig(weights []uint32, split, code, fallback int) *fleet.Config {
	route := fleet.Route{
		Name: "chat", Match: fleet.Match{Prefix: "/"}, Dialect: fleet.DialectOpenAI,
		RetryBody: 1 << 20, MaxBody: 1 << 20,
	}
	cfg := &fleet.Config{Groups: []fleet.Group{{
		Name: "edge", Routes: []string{route.Name}, Listener: fleet.Listener{PeekDigits: 6},
	}}}
	for i := range split + fallback {
		// Names out of alphabetical order: nothing may sort them.
		pool := fmt.Sprintf("p%d", 9-i)
		cfg.Pools = append(cfg.Pools, fleet.Pool{Name: pool, Tier: pool, Protocol: fleet.HTTP1, ConnectTimeout: 1e9,
			Endpoints: []fleet.Endpoint{{Name: pool, Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(i+1))}}})
		if i < split {
			route.Split = append(route.Split, fleet.SplitWeight{Pool: pool, Weight: weights[code%len(weights)]})
			code /= len(weights)
		} else {
			route.Fallback = append(route.Fallback, pool)
		}
	}
	cfg.Routes = []fleet.Route{route}
	return cfg
}

// checkChains compares the chains of every arm that can be drawn, and returns
// how many there are.
func checkChains(t *testing.T, cfg *fleet.Config) int {
	t.Helper()
	address := fleet.Address{Path: "/run/x"}
	built, err := envoy.Build(cfg, cfg.Groups[0], envoy.Runtime{ExtProc: address, AccessLog: address})
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Compile(chainInputs(cfg))
	if err != nil {
		t.Fatal(err)
	}
	id, _ := p.Route("chat")
	arms := 0
	for _, name := range []string{"chat", "chat" + wire.RouteOther} {
		groups, attempts := groupsOf(t, built, name)
		first := groups[0].GetClusters()
		at := uint32(0)
		for _, arm := range first {
			pool, _ := p.Pool(arm.GetClusterName())
			var want []string
			for _, id := range p.AppendChain(nil, plan.Class{Route: id, Arm: pool}) {
				want = append(want, p.PoolName(id))
			}
			end := at + arm.GetWeight().GetValue()
			for _, draw := range []uint32{at, (at + end) / 2, end - 1} {
				var got []string
				for _, g := range groups[:attempts] {
					got = append(got, drawn(g, draw))
				}
				if !slices.Equal(got, want) {
					t.Errorf("route %s of split %v, fallback %v: draw %d walks %v; the plan has %v",
						name, cfg.Routes[0].Split, cfg.Routes[0].Fallback, draw, got, want)
				}
			}
			at = end
			arms++
		}
		split, _ := drawnAndFurther(cfg.Routes[0])
		if len(first) != len(split) {
			t.Errorf("%d arms are drawn; the plan's split is %v", len(first), split)
		}
		checkNames(t, cfg, groups)
	}
	return arms
}

func chainInputs(cfg *fleet.Config) plan.Inputs {
	in := plan.Inputs{Tick: 1}
	for _, p := range cfg.Pools {
		in.Pools = append(in.Pools, plan.PoolInput{Name: p.Name, Tier: p.Tier, Endpoints: []plan.EndpointInput{
			{Address: p.Endpoints[0].Address, Weight: 1, KVFree: -1},
		}})
	}
	r := cfg.Routes[0]
	route := plan.RouteInput{Name: r.Name, Dialect: r.Dialect, Strategy: fleet.StrategyDynamic}
	route.Split, route.Fallback = drawnAndFurther(r)
	in.Routes = []plan.RouteInput{route}
	return in
}

// groupsOf returns a route's priority groups and how many attempts it makes.
func groupsOf(t *testing.T, r envoy.Resources, name string) ([]*prioritygroupv3.PriorityGroup, uint32) {
	t.Helper()
	routes := r.Routes[0].GetVirtualHosts()[0].GetRoutes()
	i := slices.IndexFunc(routes, func(r *routev3.Route) bool { return r.GetName() == name })
	if i < 0 {
		t.Fatalf("no route %q", name)
	}
	action := routes[i].GetRoute()
	spec := &prioritygroupv3.PriorityGroupClusterSpecifier{}
	if err := action.GetInlineClusterSpecifierPlugin().GetExtension().GetTypedConfig().UnmarshalTo(spec); err != nil {
		t.Fatal(err)
	}
	return spec.GetPriorityGroups(), action.GetRetryPolicy().GetNumRetries().GetValue() + 1
}

// drawn is the cluster that a draw gives: weights add up in list order, modulo
// their sum (measured on Envoy 1.40.0).
func drawn(g *prioritygroupv3.PriorityGroup, draw uint32) string {
	sum := uint32(0)
	for _, c := range g.GetClusters() {
		sum += c.GetWeight().GetValue()
	}
	draw %= sum
	for _, c := range g.GetClusters() {
		if draw < c.GetWeight().GetValue() {
			return c.GetClusterName()
		}
		draw -= c.GetWeight().GetValue()
	}
	return ""
}

// checkNames: ext_proc names pools by groups of their own, so each pool must
// have one.
func checkNames(t *testing.T, cfg *fleet.Config, groups []*prioritygroupv3.PriorityGroup) {
	t.Helper()
	for _, p := range cfg.Pools {
		i := slices.IndexFunc(groups, func(g *prioritygroupv3.PriorityGroup) bool { return g.GetName() == wire.GroupPool+p.Name })
		if i < 0 || len(groups[i].GetClusters()) != 1 || groups[i].GetClusters()[0].GetClusterName() != p.Name {
			var names []string
			for _, g := range groups {
				names = append(names, g.GetName())
			}
			t.Errorf("no group holds pool %s alone: %s", p.Name, strings.Join(names, ", "))
		}
	}
}
