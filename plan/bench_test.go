package plan

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// ledger is a Live as the in-flight ledger has it: one atomic counter a slot.
type ledger []atomic.Int32

func (l ledger) InFlight(slot uint32) int32 { return l[slot].Load() }

// bigFleet has a route over one pool of n endpoints with unequal weights and a
// smaller fallback.
func bigFleet(n int) Inputs {
	in := Inputs{Tick: 1, Pools: []PoolInput{{Name: "big"}, {Name: "spare"}}}
	for i := range n + n/10 {
		e := EndpointInput{
			Address:     netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000),
			Slot:        uint32(i),
			Weight:      0.02 + float64(i%50)/50,
			MaxInFlight: 256,
			InFlight:    int32(i * 7 % 100),
			KVFree:      fleet.Tokens(i%7) * 300,
			State:       fleet.StateNeutral,
		}
		pool := &in.Pools[0]
		if i >= n {
			pool = &in.Pools[1]
		}
		pool.Endpoints = append(pool.Endpoints, e)
	}
	in.Routes = []RouteInput{{
		Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic,
		DefaultBudget: 512, Split: []string{"big"}, Fallback: []string{"spare"},
	}}
	return in
}

// inZones spreads a fleet's endpoints over three zones.
func inZones(in Inputs) Inputs {
	for p := range in.Pools {
		for i := range in.Pools[p].Endpoints {
			in.Pools[p].Endpoints[i].Zone = string(rune('a' + i%3))
		}
	}
	return in
}

func busyLedger(n int, perEndpoint func(i int) int32) ledger {
	l := make(ledger, n+n/10)
	for i := range l {
		l[i].Store(perEndpoint(i))
	}
	return l
}

var benchClass = Class{Route: 0, Arm: 0, Level: 4, Strategy: fleet.StrategyDynamic, Generates: true}

var sink Decision

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		in := inZones(bigFleet(n))
		in.Routes[0].Affinity = fleet.AffinitySession
		p := mustCompile(b, in)
		usual := busyLedger(n, func(i int) int32 { return int32(i * 7 % 100) })
		prompt := benchClass
		prompt.Prompt = 800 // fits where 1,311 tokens are free: on three of seven
		session := benchClass
		session.Session = 1
		zone := benchClass
		zone.Zone = 1
		both := session
		both.Zone = 1
		for _, load := range []struct {
			name  string
			class Class
			live  Live
		}{
			{"usual", benchClass, usual},
			{"prompt", prompt, usual},
			{"session", session, usual}, // a new one each time; 63 % find their home
			{"zone", zone, usual},
			{"zone and session", both, usual},
			{"zone beyond", zone, busyLedger(n, func(i int) int32 { return int32(200 * (1 - min(i%3, 1))) })},
			{"saturated", benchClass, busyLedger(n, func(int) int32 { return 256 })},
		} {
			b.Run(fmt.Sprintf("%s/%d", load.name, n), func(b *testing.B) {
				b.ReportAllocs()
				seed := uint64(0)
				for b.Loop() {
					seed++
					c := load.class
					c.Session *= Session(seed)
					sink = p.Decide(c, seed, load.live)
				}
			})
		}
	}
}

func BenchmarkCompile(b *testing.B) {
	for _, n := range []int{10, 1_000, 10_000} {
		zones, affinity := inZones(bigFleet(n)), bigFleet(n)
		affinity.Routes[0].Affinity = fleet.AffinitySession
		for _, row := range []struct {
			name string
			in   Inputs
		}{{"plain", bigFleet(n)}, {"affinity", affinity}, {"zones", zones}} {
			b.Run(fmt.Sprint(row.name, "/", n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := Compile(row.in); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// TestHotPathDoesNotAllocate covers plain choices, sessions, zones, prompts that
// fit in places and nowhere, saturated pools, refusals, spill-over, the legacy check and recording.
func TestHotPathDoesNotAllocate(t *testing.T) {
	for _, n := range []int{10, 1000, 10_000} {
		in := inZones(bigFleet(n))
		in.Routes[0].Affinity = fleet.AffinitySession
		p := mustCompile(t, in)
		legacy := benchClass
		legacy.Strategy = fleet.StrategyLegacy
		aside := benchClass
		aside.Generates = false
		long, huge := benchClass, benchClass
		long.Prompt, huge.Prompt = 800, 1<<20
		session, zone := benchClass, benchClass
		zone.Zone = 1
		for _, fill := range []int32{0, 255, 256} {
			var live Live = busyLedger(n, func(int) int32 { return fill })
			var rec Record
			for seed := range uint64(64) {
				p.DecideRecorded(benchClass, seed, live, &rec) // grows Counts
			}
			seed := uint64(0)
			got := testing.AllocsPerRun(500, func() {
				seed++
				session.Session = Session(seed)
				both := session
				both.Zone = 1
				for _, c := range []Class{benchClass, legacy, aside, long, huge, session, zone, both} {
					d := p.Decide(c, seed, live)
					if p.AddressText(d.Picks[0]) == "none" || p.RouteInfo(c.Route) == nil {
						t.Error("unreachable")
					}
				}
				p.DecideRecorded(benchClass, seed%64, live, &rec)
			})
			if got != 0 {
				t.Errorf("%d endpoints, %d in flight each: %v allocations per run", n, fill, got)
			}
		}
	}
}

func mustCompile(tb testing.TB, in Inputs) *Plan {
	tb.Helper()
	p, err := Compile(in)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}
