package plan

import (
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Requests of benchClass are of the level after the one that is backlogged here.
var smaller = benchClass.Level - 1

// backlogged is a pool of endpoints with room for ten, of which those in busy
// have six in flight, one level is backlogged, and no prompt is known.
func backlogged(n int, busy ...int) Inputs {
	in := onePool(n, func(_ int, e *EndpointInput) { e.MaxInFlight = 10 })
	in.Pools[0].Backlogged[smaller] = true
	for _, i := range busy {
		in.Pools[0].Endpoints[i].InFlight = 6
	}
	return in
}

// inTwoZones puts the first half of the endpoints in zone a and the rest in b.
func inTwoZones(in Inputs) Inputs {
	endpoints := in.Pools[0].Endpoints
	for i := range endpoints {
		endpoints[i].Zone = "a"
		if i >= len(endpoints)/2 {
			endpoints[i].Zone = "b"
		}
	}
	return in
}

// chosen counts decisions of a class by endpoint and reason.
func chosen(p *Plan, c Class, live Live) map[choiceOf]int {
	got := map[choiceOf]int{}
	for seed := range uint64(2000) {
		d := p.Decide(c, seed, live)
		got[choiceOf{d.Picks[0].Endpoint, d.Reason}]++
	}
	return got
}

type choiceOf struct {
	endpoint int32
	why      Reason
}

// only checks that nothing but these was chosen, and each of them.
func only(t *testing.T, what string, got map[choiceOf]int, want ...choiceOf) {
	t.Helper()
	for _, w := range want {
		if got[w] == 0 {
			t.Errorf("%s: chosen %v, never %v", what, got, w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s: chosen %v, want %v alone", what, got, want)
	}
}

func TestZonesHaveIdleEndpointsOfTheirOwn(t *testing.T) {
	in := inTwoZones(backlogged(4, 1, 2)) // idle are 0 in zone a and 3 in zone b
	p := mustCompile(t, in)
	live := counts{0, 6, 6, 0}
	c := benchClass
	c.Zone = p.Zone("a")
	only(t, "zone a", chosen(p, c, live), choiceOf{0, ReasonWeighted})
	c.Zone = p.Zone("b")
	only(t, "zone b", chosen(p, c, live), choiceOf{3, ReasonWeighted})
	c.Zone = 0
	only(t, "no zone", chosen(p, c, live), choiceOf{0, ReasonWeighted}, choiceOf{3, ReasonWeighted})

	even := counts{0, 0, 0, 0} // since the tick the busy ones have emptied
	c.Zone, c.Level = p.Zone("a"), smaller
	only(t, "a level that need not spare others", chosen(p, c, even), choiceOf{0, ReasonWeighted}, choiceOf{1, ReasonWeighted})
	c.Level = benchClass.Level
	only(t, "a level that must", chosen(p, c, even), choiceOf{0, ReasonWeighted})
}

func TestZoneWithoutAnIdleEndpointSendsRequestsToOthers(t *testing.T) {
	p := mustCompile(t, inTwoZones(backlogged(4, 0, 1, 2)))
	c := benchClass
	c.Zone = p.Zone("a")
	only(t, "zone a is busy", chosen(p, c, counts{6, 6, 6, 0}), choiceOf{3, ReasonZoneSpill})
}

// TestSessionsStayAwayFromBusyHomes: nothing is in flight any more, so that the
// load bound lets each session go home.
func TestSessionsStayAwayFromBusyHomes(t *testing.T) {
	in := backlogged(4, 1, 2)
	in.Routes[0].Affinity = fleet.AffinitySession
	for _, zone := range []string{"", "a"} {
		want := []int32{0, 3}
		members := 4
		if zone != "" {
			in = inTwoZones(in)
			want, members = want[:1], 2
		}
		p := mustCompile(t, in)
		live := counts{0, 0, 0, 0}
		atHome := map[int32]bool{}
		for i := range 100 {
			c := sessionClass(i)
			c.Zone, c.Level = p.Zone(zone), smaller
			home := p.Decide(c, 1, live)
			if home.Reason != ReasonAffinity {
				t.Fatalf("zone %q: %+v of a level that need not spare others; want its home", zone, home)
			}
			at := home.Picks[0].Endpoint
			atHome[at] = true
			c.Level = benchClass.Level
			if at == 0 || at == 3 {
				only(t, "a session with an idle home", chosen(p, c, live), choiceOf{at, ReasonAffinity})
				continue
			}
			var others []choiceOf
			for _, e := range want {
				others = append(others, choiceOf{e, ReasonWeighted})
			}
			only(t, "a session with a busy home", chosen(p, c, live), others...)
		}
		if len(atHome) != members {
			t.Fatalf("zone %q: sessions live at %v", zone, atHome)
		}
	}
}

func TestClosedEndpointsAreNotIdleAndHoldNothing(t *testing.T) {
	open := EndpointInput{MaxInFlight: 10, Risk: 0.25, InFlight: 5}
	if !open.idle() || open.capacity() != 7.5 {
		t.Errorf("idle %v, capacity %v of an endpoint with 5 of 10 in flight at a risk of 0.25", open.idle(), open.capacity())
	}
	closed := open
	closed.Closed = true
	if closed.idle() || closed.capacity() != 0 {
		t.Errorf("idle %v, capacity %v of a closed endpoint", closed.idle(), closed.capacity())
	}
	for name, e := range map[string]EndpointInput{
		"more than half": {MaxInFlight: 10, InFlight: 6}, "at risk": {MaxInFlight: 10, Risk: fleet.RiskPrefer},
	} {
		if e.idle() {
			t.Errorf("an endpoint is idle with %s", name)
		}
	}
}

// TestPoolWhoseOnlyIdleEndpointIsClosedHasNone: then sessions go home and zones
// keep their requests, as where none is idle.
func TestPoolWhoseOnlyIdleEndpointIsClosedHasNone(t *testing.T) {
	in := inTwoZones(backlogged(4, 1, 2, 3))
	in.Pools[0].Endpoints[0].Closed = true
	p := mustCompile(t, in)
	live := counts{0, 6, 6, 6}
	c := benchClass
	c.Zone = p.Zone("a")
	// Six draws of two endpoints miss the open one 31 times in 2000.
	if got := chosen(p, c, live); got[choiceOf{1, ReasonWeighted}] < 1900 || got[choiceOf{0, ReasonWeighted}] > 0 {
		t.Errorf("zone a: chosen %v, want its open endpoint nearly always", got)
	}
	c.Zone = 0
	only(t, "no zone", chosen(p, c, live), choiceOf{1, ReasonWeighted}, choiceOf{2, ReasonWeighted}, choiceOf{3, ReasonWeighted})

	in = backlogged(4, 1, 2, 3)
	in.Pools[0].Endpoints[0].Closed = true
	in.Routes[0].Affinity = fleet.AffinitySession
	p = mustCompile(t, in)
	home := 0
	for i := range 100 {
		if d := p.Decide(sessionClass(i), 1, counts{0, 0, 0, 0}); d.Reason == ReasonAffinity {
			home++
		} else if d.Picks[0].Endpoint == 0 {
			t.Errorf("%+v to a closed endpoint", d)
		}
	}
	if home < 50 {
		t.Errorf("%d of 100 sessions are at home, want all but those of the closed endpoint", home)
	}
}

func TestServingIsWhereEnvoyGoes(t *testing.T) {
	in := backlogged(2)
	second := in.Pools[0]
	second.Name, second.Tier = "second", "second"
	second.Endpoints = []EndpointInput{in.Pools[0].Endpoints[0]}
	second.Endpoints[0].Slot = 77
	in.Pools = append(in.Pools, second)
	in.Routes[0].Fallback = []string{"second"}
	c := Class{Route: 0, Arm: 0}
	expect := func(what string, want PoolID) {
		t.Helper()
		if got := mustCompile(t, in).Serving(c); got != want {
			t.Errorf("%s: pool %d, want %d", what, got, want)
		}
	}
	expect("both serve", 0)
	in.Pools[0].Endpoints[0].State = fleet.StateDraining
	expect("one of two drains", 0)
	in.Pools[0].Endpoints[1].State = fleet.StateDraining
	expect("the first pool drains", 1)
	in.Pools[0].Endpoints = nil
	expect("the first pool is empty", 1)
	in.Pools[1].Endpoints[0].State = fleet.StateDraining
	expect("nobody serves", NoPool)
	c.Route = 99
	expect("an unknown route", NoPool)
}
