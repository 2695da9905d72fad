package plan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// zonedPool is onePool with so many endpoints in each of the zones a, b, c, …,
// each with room for ten.
func zonedPool(sizes ...int) Inputs {
	total := 0
	for _, n := range sizes {
		total += n
	}
	in := onePool(total, func(_ int, e *EndpointInput) { e.MaxInFlight = 10 })
	i := 0
	for z, n := range sizes {
		for range n {
			in.Pools[0].Endpoints[i].Zone = string(rune('a' + z))
			i++
		}
	}
	return in
}

func zonesOfTheirOwn(n int) Inputs {
	return onePool(n, func(i int, e *EndpointInput) { e.Zone = fmt.Sprint("zone-", i) })
}

// TestZonesKeepTheirRequests: below the threshold not one request leaves its
// zone, however little others have to do.
func TestZonesKeepTheirRequests(t *testing.T) {
	in := zonedPool(3, 9)
	p := mustCompile(t, in)
	live := make(counts, 12)
	c := benchClass
	c.Zone = p.Zone("a")
	for i := range 3 {
		live[i] = 6
	}
	for seed := range uint64(5000) {
		if d := p.Decide(c, seed, live); d.Picks[0].Endpoint > 2 || d.Reason != ReasonWeighted {
			t.Fatalf("left the zone: %+v", d)
		}
	}
	for i := range 3 {
		live[i] = 7
	}
	for seed := range uint64(5000) {
		if d := p.Decide(c, seed, live); d.Picks[0].Endpoint <= 2 && d.Reason != ReasonWeighted || d.Picks[0].Endpoint > 2 && d.Reason != ReasonZoneSpill {
			t.Fatalf("beyond the threshold: %+v", d)
		}
	}
}

// TestZonesAreToldApartOnlyWhereThereAreSeveral: one zone, no zone, or others
// without anyone to send to.
func TestZonesAreToldApartOnlyWhereThereAreSeveral(t *testing.T) {
	one, none, ejected := zonedPool(4), onePool(4, nil), zonedPool(2, 2)
	for i := range 2 {
		ejected.Pools[0].Endpoints[i].Weight = 0
	}
	for name, in := range map[string]Inputs{"one zone": one, "no zone": none, "the other ejected": ejected} {
		if p := mustCompile(t, in); p.pools[0].zones != nil {
			t.Errorf("%s: %d zones", name, len(p.pools[0].zones))
		}
	}
	p := mustCompile(t, zonedPool(2, 2))
	if p.Zone("a") != 1 || p.Zone("b") != 2 || p.Zone("") != 0 || p.Zone("c") != 0 {
		t.Error("zones are numbered from 1 in the order in which they occur")
	}
	unheard := benchClass
	unheard.Zone = math.MaxUint16
	if d := p.Decide(unheard, 1, nil); d.Action != ActionSteer {
		t.Errorf("a zone of another plan: %+v", d)
	}
}

// TestUnequalZonesAreNotOverloaded plays a closed loop: requests arrive at each
// zone's sidecars and stay for a second. Zones have one and nine endpoints and
// unlike shares of the traffic, at loads from half to all that the pool can hold;
// requests have no session, or one of a hundred.
func TestUnequalZonesAreNotOverloaded(t *testing.T) {
	const (
		capacity = 10 // of an endpoint, in flight
		second   = 1000
		tick     = second / 5
	)
	type row struct {
		name string
		// fromSmall is the share of requests that the small zone's sidecars send.
		fromSmall, load float64
		// most that an endpoint of the small zone may hold on average, and least
		// of its own requests that stay, as shares.
		smallMost, smallStays float64
		// the same for requests of the large zone.
		largeStays float64
	}
	play := func(row row, sessions int) (small, smallStay, largeStay float64) {
		in := zonedPool(1, 9)
		in.Routes[0].Affinity = fleet.AffinitySession
		var p *Plan
		live := make(counts, 10)
		rng := rand.New(rand.NewPCG(5, 6))
		type end struct{ at, endpoint int }
		var ends []end
		stays, sent := [2]float64{}, [2]float64{}
		due := 0.0
		for now := range 20 * second {
			for len(ends) > 0 && ends[0].at <= now {
				live[ends[0].endpoint]--
				ends = ends[1:]
			}
			if now%tick == 0 {
				for i := range live {
					in.Pools[0].Endpoints[i].InFlight = live[i]
				}
				p = mustCompile(t, in)
			}
			for due += row.load * capacity * 10 / second; due >= 1; due-- {
				c, from := benchClass, 1
				if rng.Float64() < row.fromSmall {
					from = 0
				}
				c.Zone = ZoneID(from + 1)
				if sessions > 0 {
					c.Session = sessionClass(rng.IntN(sessions)).Session
				}
				d := p.Decide(c, rng.Uint64(), live)
				if d.Action != ActionSteer {
					continue
				}
				e := int(d.Picks[0].Endpoint)
				live[e]++
				ends = append(ends, end{now + second, e})
				if now < 5*second {
					continue // it fills
				}
				sent[from]++
				if (e == 0) == (from == 0) {
					stays[from]++
				}
			}
			if now >= 5*second {
				small += float64(live[0]) / capacity / (15 * second)
			}
		}
		return small, stays[0] / max(1, sent[0]), stays[1] / max(1, sent[1])
	}
	for _, row := range []row{
		{"little, each its own", 0.1, 0.5, 0.6, 0.85, 0.98},
		{"the small one sends half", 0.5, 0.5, 0.75, 0.20, 0.99},
		{"the small one sends all", 1, 0.6, 0.82, 0.10, 0},
		{"the small one sends nothing", 0, 0.5, 0.05, 0, 0.98},
		{"the large one is beyond its share", 0.02, 0.85, 0.9, 0.10, 0.85},
		{"nearly full everywhere", 0.5, 0.95, 1, 0, 0.85},
	} {
		for _, sessions := range []int{0, 100} {
			small, smallStay, largeStay := play(row, sessions)
			t.Logf("%s, %d sessions: small zone at %.2f; of the small zone's requests %.2f stay, of the large one's %.2f", row.name, sessions, small, smallStay, largeStay)
			if small > row.smallMost {
				t.Errorf("%s, %d sessions: the small zone is at %.2f of its capacity, at most %.2f was wanted", row.name, sessions, small, row.smallMost)
			}
			if row.fromSmall > 0 && smallStay < row.smallStays || row.fromSmall < 1 && largeStay < row.largeStays {
				t.Errorf("%s, %d sessions: %.2f and %.2f of the requests stay, at least %.2f and %.2f were wanted",
					row.name, sessions, smallStay, largeStay, row.smallStays, row.largeStays)
			}
		}
	}
}

// TestRiskShrinksAZone: a zone in trouble sends its requests away long before its
// limits are reached.
func TestRiskShrinksAZone(t *testing.T) {
	in := zonedPool(3, 3)
	for i := range 3 {
		in.Pools[0].Endpoints[i].Risk = 0.8
		in.Pools[0].Endpoints[i].Weight = 0.04
		in.Pools[0].Endpoints[i].State = fleet.StateNeutral
	}
	p := mustCompile(t, in)
	c := benchClass
	c.Zone = p.Zone("a")
	for _, row := range []struct {
		each int32
		want Reason
	}{{0, ReasonWeighted}, {1, ReasonWeighted}, {2, ReasonZoneSpill}} {
		live := counts{row.each, row.each, row.each, row.each, row.each, row.each}
		got := map[Reason]int{}
		for seed := range uint64(1000) {
			got[p.Decide(c, seed, live).Reason]++
		}
		if got[row.want] < 950 {
			t.Errorf("%d in flight each: %v", row.each, got)
		}
	}
}
