package plan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// stickyPool is onePool on a route with affinity.
func stickyPool(n int, set func(i int, e *EndpointInput)) Inputs {
	in := onePool(n, set)
	in.Routes[0].Affinity = fleet.AffinitySession
	return in
}

func sessionClass(i int) Class {
	c := benchClass
	c.Session = SessionOf(fmt.Append(nil, "session ", i))
	return c
}

// homes returns the endpoint of each session by its address, with nothing in
// flight.
func homes(t *testing.T, in Inputs, sessions int) []netip.AddrPort {
	t.Helper()
	p := mustCompile(t, in)
	out := make([]netip.AddrPort, sessions)
	for s := range out {
		d := p.Decide(sessionClass(s), rand.Uint64(), nil)
		if d.Reason != ReasonAffinity {
			t.Fatalf("session %d: %+v", s, d)
		}
		out[s] = p.Address(d.Picks[0])
	}
	return out
}

func TestSessionOfIsTheSameInEveryProcess(t *testing.T) {
	for key, want := range map[string]Session{
		"": 0, "a": 0x3e506e5796335af0, "12345678": 0x82177327e1e4daac, "user-1/conversation-2": 0x5612d750c4cfbf72,
	} {
		if got := SessionOf([]byte(key)); got != want {
			t.Errorf("%q: %#x; want %#x", key, got, want)
		}
	}
	seen := map[Session]string{}
	for _, key := range []string{"\x00", "\x00\x00", "ab", "ba", "12345678", "123456780", "12345678\x00"} {
		s := SessionOf([]byte(key))
		if before, found := seen[s]; found || s == 0 {
			t.Errorf("%q and %q are one session", key, before)
		}
		seen[s] = key
	}
}

func TestRingFindsTheNearestPoint(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 3, 7, 8, 64, 1000} {
		in := onePool(n, nil).Pools[0].Endpoints
		set := make([]int32, n)
		for i := range set {
			set[i] = int32(i)
		}
		r := newRing(in, set)
		if !slices.IsSortedFunc(r.points, func(a, b point) int { return int(math.Copysign(1, float64(a.at)-float64(b.at))) }) {
			t.Errorf("%d points are not in order", n)
		}
		for range 1000 {
			s := Session(rng.Uint64())
			want, nearest := 0, uint64(math.MaxUint64)
			for k := range uint64(probes) {
				at := mix(uint64(s)) + (k+1)*mix(uint64(s)+golden)
				for i := range in {
					if d := place(in[i].Address) - at; d < nearest {
						want, nearest = i, d
					}
				}
			}
			if got := r.home(s); int(got) != want {
				t.Fatalf("%d endpoints, session %#x: home is %d, want %d", n, s, got, want)
			}
		}
	}
}

func TestSessionsSpread(t *testing.T) {
	const n, each = 100, 500
	got := map[netip.AddrPort]int{}
	for _, a := range homes(t, stickyPool(n, nil), n*each) {
		got[a]++
	}
	for a, k := range got {
		if k > 2*each {
			t.Errorf("%s is the home of %.1f times the mean", a, float64(k)/each)
		}
	}
	if len(got) != n {
		t.Errorf("%d of %d endpoints are home to anybody", len(got), n)
	}
}

// TestSessionsStayWhileTheirEndpointsAreThere: neither seeds nor weights, risks
// below the limit, KV caches with room, nor the order of the config move anyone.
func TestSessionsStayWhileTheirEndpointsAreThere(t *testing.T) {
	const sessions = 2000
	before := homes(t, stickyPool(20, nil), sessions)
	rng := rand.New(rand.NewPCG(3, 4))
	in := stickyPool(20, func(_ int, e *EndpointInput) {
		e.Weight = 0.02 + rng.Float64()
		e.Risk = fleet.Risk(0.49 * rng.Float64())
		e.KVFree = 5000
		e.InFlight = rng.Int32N(9)
	})
	rng.Shuffle(20, func(i, k int) {
		e := in.Pools[0].Endpoints
		e[i], e[k] = e[k], e[i]
	})
	if after := homes(t, in, sessions); !slices.Equal(before, after) {
		t.Error("sessions moved while all their endpoints were there")
	}
}

// TestOneEndpointMovesItsSessionsAndNoOthers takes each of twenty endpoints out,
// by every way there is, and brings it back.
func TestOneEndpointMovesItsSessionsAndNoOthers(t *testing.T) {
	const n, sessions = 20, 4000
	all := homes(t, stickyPool(n, nil), sessions)
	moves := 0
	for out := range n {
		in := stickyPool(n, func(i int, e *EndpointInput) {
			switch {
			case i != out:
			case out%3 == 0:
				e.Weight, e.State = 0, fleet.StateEjected
			case out%3 == 1:
				e.Weight, e.State = 0.1, fleet.StateProbe
			default:
				e.State = fleet.StateDraining
			}
		})
		gone := in.Pools[0].Endpoints[out].Address
		if out%4 == 3 {
			in.Pools[0].Endpoints = slices.Delete(in.Pools[0].Endpoints, out, out+1)
		}
		heirs := map[netip.AddrPort]bool{}
		for s, home := range homes(t, in, sessions) {
			if home == all[s] {
				continue
			}
			moves++
			heirs[home] = true
			if all[s] != gone {
				t.Fatalf("session %d moved from %s to %s when %s went", s, all[s], home, gone)
			}
		}
		if len(heirs) < n/3 {
			t.Errorf("the sessions of %s went to %d others only", gone, len(heirs))
		}
	}
	// Each session has exactly one home to lose.
	if moves != sessions {
		t.Errorf("%d moves in all, want one for each of %d sessions: 1/n each time", moves, sessions)
	}
}

// TestHotSessionOverflows sends nothing but one session to a pool with load: its
// home takes up to the bound, and the rest goes where other requests go.
func TestHotSessionOverflows(t *testing.T) {
	const n, mean = 10, 8
	const most = mean*5/4 + 64/16
	p := mustCompile(t, stickyPool(n, func(_ int, e *EndpointInput) { e.InFlight, e.MaxInFlight = mean, 64 }))
	live := make(counts, n)
	for i := range live {
		live[i] = mean
	}
	home := p.Decide(sessionClass(1), 1, live).Picks[0].Endpoint
	for seed := range uint64(3 * n) {
		d := p.Decide(sessionClass(1), seed, live)
		bound := live[home] <= most
		if sticky := d.Reason == ReasonAffinity; sticky != bound || sticky && d.Picks[0].Endpoint != home {
			t.Fatalf("%d in flight at home: %+v", live[home], d)
		}
		live[d.Picks[0].Endpoint]++
	}
	if fullest := slices.Max(live); fullest > most+1 || live[home] != most+1 {
		t.Errorf("in flight: %v; want %d at home, and nobody above", live, most+1)
	}
	// When the others' requests end, it comes home again.
	live[home] = 0
	if d := p.Decide(sessionClass(1), 99, live); d.Reason != ReasonAffinity || d.Picks[0].Endpoint != home {
		t.Errorf("afterwards: %+v", d)
	}
}

// TestUnfitHomesAreLeft: what a home lacks, and what it takes to get it back.
func TestUnfitHomesAreLeft(t *testing.T) {
	in := stickyPool(5, func(_ int, e *EndpointInput) { e.MaxInFlight = 4; e.KVFree = 5000 })
	c := sessionClass(7)
	home := mustCompile(t, in).Decide(c, 1, nil).Picks[0].Endpoint
	for _, row := range []struct {
		name   string
		break_ func(e *EndpointInput, c *Class)
		live   int32
		want   Reason
	}{
		{"as it was", func(*EndpointInput, *Class) {}, 0, ReasonAffinity},
		{"risk at the limit", func(e *EndpointInput, _ *Class) { e.Risk = 0.5 }, 0, ReasonWeighted},
		{"risk below it", func(e *EndpointInput, _ *Class) { e.Risk = 0.49 }, 0, ReasonAffinity},
		{"at its limit", func(e *EndpointInput, _ *Class) { e.InFlight = 20 }, 4, ReasonWeighted},
		{"below it", func(e *EndpointInput, _ *Class) { e.InFlight = 20 }, 3, ReasonAffinity},
		{"above the bound", func(*EndpointInput, *Class) {}, 2, ReasonWeighted},
		{"at the bound", func(*EndpointInput, *Class) {}, 1, ReasonAffinity},
		{"no room for the level", func(e *EndpointInput, _ *Class) { e.KVFree = c.Level.UpperBudget() - 1 }, 0, ReasonWeighted},
		{"no room for the prompt", func(_ *EndpointInput, c *Class) { c.Prompt = 4800 }, 0, ReasonWeighted},
		{"room for both", func(_ *EndpointInput, c *Class) { c.Prompt = 4400 }, 0, ReasonAffinity},
		{"KV unknown", func(e *EndpointInput, c *Class) { e.KVFree, c.Prompt = -1, 1<<20 }, 0, ReasonAffinity},
		{"in its slow start", func(e *EndpointInput, _ *Class) { e.State = fleet.StateProbe }, 0, ReasonAffinity}, // another's
		{"no session", func(_ *EndpointInput, c *Class) { c.Session = 0 }, 0, ReasonWeighted},
	} {
		changed, class := in, c
		changed.Pools = slices.Clone(in.Pools)
		changed.Pools[0].Endpoints = slices.Clone(in.Pools[0].Endpoints)
		row.break_(&changed.Pools[0].Endpoints[home], &class)
		live := make(counts, 5)
		live[home] = row.live
		d := mustCompile(t, changed).Decide(class, 5, live)
		if d.Reason != row.want || d.Action != ActionSteer {
			t.Errorf("%s: %+v; want %s", row.name, d, row.want)
		}
	}
	in.Routes[0].Affinity = fleet.AffinityNone
	if d := mustCompile(t, in).Decide(c, 1, nil); d.Reason != ReasonWeighted {
		t.Errorf("route without affinity: %+v", d)
	}
}
