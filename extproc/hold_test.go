package extproc

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// heldWorld is a world with a gate whose requests are held, and a route of one pool.
// In a bubble of synctest the clock stands still until everybody waits.
func heldWorld(t *testing.T) (*world, *gate, *Held) {
	h := &Held{}
	w, g := gated(t, func(in *plan.Inputs, o *Options) { o.Held, in.Routes[0].Split = h, []string{"h100"} })
	return w, g, h
}

func TestRequestsAreHeldUntilThereIsAPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g, h := heldWorld(t)
		g.full = 3 // when it comes, and in the first two steps
		began := time.Now()
		w.exchange(t, chat(map[string]string{}).proto())
		if took := time.Since(began); took != 3*holdStep {
			t.Errorf("held for %v; want it in with the third step", took)
		}
		last := w.lastEvent()
		if !last.Held || last.Admission != admission.ReasonAdmitted || last.Action != plan.ActionSteer || last.Took != 0 {
			t.Errorf("%+v; want it held and admitted, and no time taken beside", last)
		}
		if len(g.asked) != 4 || len(g.refused) != 0 || len(w.picks) != 1 {
			t.Errorf("asked %d times, refused %v, %d places reserved; want 4, none and one", len(g.asked), g.refused, len(w.picks))
		}
		if at := g.last().At.Sub(g.asked[0].At); h.all.Load() != 0 || at != 3*holdStep {
			t.Errorf("%d are held; the last ask is of %v later", h.all.Load(), at)
		}
	})
}

// planTurns lets a request be held, and puts another plan in force between the
// first step and the second.
func planTurns(t *testing.T, change func(*plan.RouteInput)) (w *world, g *gate) {
	return turns(t, func(in *plan.Inputs) { change(&in.Routes[0]) })
}

func turns(t *testing.T, change func(*plan.Inputs)) (w *world, g *gate) {
	var in plan.Inputs
	var next atomic.Pointer[plan.Plan]
	w, g = gated(t, func(i *plan.Inputs, o *Options) {
		o.Held = &Held{}
		i.Routes[0].Split = []string{"h100"}
		in = *i
		first := o.Plan
		o.Plan = func() *plan.Plan {
			if p := next.Load(); p != nil {
				return p
			}
			return first()
		}
	})
	time.AfterFunc(holdStep+holdStep/2, func() {
		change(&in)
		p, err := plan.Compile(in)
		if err != nil {
			t.Error(err)
		}
		next.Store(p)
	})
	return w, g
}

// TestHeldRequestsThatANewPlanRefusesUnread don't slip in by the old one.
func TestHeldRequestsThatANewPlanRefusesUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := planTurns(t, func(r *plan.RouteInput) { r.RefuseUnread = true })
		g.full = 3
		m := chat(map[string]string{})
		m.peek = nil
		r := w.ask(t, m)
		if got := r.GetImmediateResponse().GetDetails(); got != "fairlead_unread" || len(w.picks) != 0 || len(g.asked) != 2 {
			t.Errorf("%q, %d places reserved, asked %d times; want it refused in the second step", got, len(w.picks), len(g.asked))
		}
		if last := w.lastEvent(); last.Reason != plan.ReasonUnread || last.Admission != 0 || !last.Held {
			t.Errorf("%+v", last)
		}
	})
}

// TestHeldRequestsGoByTheNewPlan, and draw anew each time.
func TestHeldRequestsGoByTheNewPlan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := planTurns(t, func(r *plan.RouteInput) { r.Split = []string{"a100"} })
		g.full = 3
		m := chat(map[string]string{})
		m.cluster = "" // the route's only pool
		w.exchange(t, m.proto())
		if last := w.lastEvent(); last.Pool != "a100" || last.Tries != 4 || last.Action != plan.ActionSteer {
			t.Errorf("%+v; want it in the new plan's pool, by a fourth try", last)
		}
	})
}

// TestHeldRequestsTryTheWholeChainEachTime: who was let into no pool begins with
// the first again.
func TestHeldRequestsTryTheWholeChainEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := gated(t, func(_ *plan.Inputs, o *Options) { o.Held = &Held{} })
		g.full = 4
		began := time.Now()
		w.exchange(t, chat(map[string]string{}).proto())
		var pools []string
		for _, a := range g.asked {
			pools = append(pools, a.Pool)
		}
		if want := []string{"h100", "a100", "h100", "a100", "h100"}; !slices.Equal(pools, want) || time.Since(began) != 2*holdStep {
			t.Errorf("asked for %v, held for %v; want %v, and it in with the second step", pools, time.Since(began), want)
		}
	})
}

// TestHeldRequestsTakeNothingFromTheOldPlan: ids of pools and routes are a plan's
// own, and a route may be gone.
func TestHeldRequestsTakeNothingFromTheOldPlan(t *testing.T) {
	for _, gone := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w, g := turns(t, func(in *plan.Inputs) {
				slices.Reverse(in.Pools)
				slices.Reverse(in.Routes)
				if gone {
					in.Routes = slices.DeleteFunc(in.Routes, func(r plan.RouteInput) bool { return r.Name == "chat" })
				}
			})
			g.full = 3
			w.exchange(t, chat(map[string]string{}).proto())
			last := w.lastEvent()
			if last.Route != "chat" || last.Pool != "h100" || g.last().Route != "chat" || g.last().Pool != "h100" || !last.Steered {
				t.Errorf("gone %v: %+v, asked %+v; want it on its route and in its pool", gone, last, g.last())
			}
			for _, pick := range w.picks {
				if pick.Pool != "h100" {
					t.Errorf("gone %v: a place in %+v", gone, pick)
				}
			}
		})
	}
}

// TestWhoLeavesIsHeldNoLonger: nothing is counted, and nobody's place taken.
func TestWhoLeavesIsHeldNoLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g, h := heldWorld(t)
		g.full = 1000
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(holdStep+1, cancel)
		st := &fakeStream{in: [][]byte{marshal(t, chat(map[string]string{}).proto())}, ctx: ctx}
		began := time.Now()
		if err := w.process(st); status.Code(err) != codes.Canceled {
			t.Errorf("ended with %v", err)
		}
		if took := time.Since(began); took != holdStep+1 || len(g.asked) != 2 {
			t.Errorf("held for %v, asked %d times; want until the caller left", took, len(g.asked))
		}
		if len(st.out) != 0 || len(w.events) != 0 || len(w.picks) != 0 || h.all.Load() != 0 {
			t.Errorf("%d answers, events %+v, %d places, %d held", len(st.out), w.events, len(w.picks), h.all.Load())
		}
	})
}

// TestNobodyIsHeldForLong: who found no place is refused, once, and leaves nothing
// behind.
func TestNobodyIsHeldForLong(t *testing.T) {
	for _, why := range []string{"the gate has none", "the plan has none"} {
		synctest.Test(t, func(t *testing.T) {
			w, g, h := heldWorld(t)
			want := admission.ReasonShare
			if why == "the plan has none" {
				want = admission.ReasonBusy
				for slot := range uint32(4) {
					w.live[slot+1] = 10
				}
			} else {
				g.full = 1000
			}
			began := time.Now()
			w.exchange(t, chat(map[string]string{}).proto())
			if took := time.Since(began); took != holdFor {
				t.Errorf("%s: held for %v; want %v", why, took, holdFor)
			}
			last := w.lastEvent()
			if !last.Held || last.Admission != want || last.Action != plan.ActionRefuse || g.last().Hold {
				t.Errorf("%s: %+v; want it refused for %v", why, last, want)
			}
			if !slices.Equal(g.earlyIn, []string{"h100"}) || g.holds != 0 {
				t.Errorf("%s: looked for slots in %v, %d holds go on", why, g.earlyIn, g.holds)
			}
			if len(w.picks) != 0 || h.all.Load() != 0 || !slices.Equal(g.refused, []admission.Reason{want}) {
				t.Errorf("%s: %d places reserved, %d held, refused %v", why, len(w.picks), h.all.Load(), g.refused)
			}
		})
	}
}

// TestClosedPoolsOfALegacyRouteEndSomewhere: the gate lets the request into no pool
// of the chain, of which the first is passed by.
func TestClosedPoolsOfALegacyRouteEndSomewhere(t *testing.T) {
	w, g := gated(t, func(in *plan.Inputs, _ *Options) {
		in.Pools = append(in.Pools, pool("third", "10.0.2.1:8000"))
		in.Pools[2].Endpoints[0].Slot = 9
		for e := range in.Pools[0].Endpoints {
			in.Pools[0].Endpoints[e].Closed = true
		}
		in.Routes[0].Split, in.Routes[0].Strategy = []string{"h100", "a100", "third"}, fleet.StrategyLegacy
	})
	g.full = 1000
	w.exchange(t, chat(map[string]string{}).proto())
	var pools []string
	for _, a := range g.asked {
		pools = append(pools, a.Pool)
	}
	if want := []string{"a100", "third", "a100", "a100"}; !slices.Equal(pools, want) || w.lastEvent().Action != plan.ActionRefuse {
		t.Errorf("asked for %v, %+v; want %v", pools, w.lastEvent(), want)
	}
}

// TestWhoHasNoShareHereIsServedFurtherAlongTheChain: and only who finds no room in
// any pool is refused.
func TestWhoHasNoShareHereIsServedFurtherAlongTheChain(t *testing.T) {
	for i := range 16 {
		full := i % 4
		w, g := gated(t)
		g.full, g.why = full, []admission.Reason{admission.ReasonShare, admission.ReasonLevel, admission.ReasonTurn, admission.ReasonServerLimit}[i/4]
		w.exchange(t, chat(map[string]string{}).proto())
		last, pools := w.lastEvent(), []string{}
		for _, a := range g.asked {
			pools = append(pools, a.Pool)
		}
		var want []string
		switch full {
		case 0:
			want = []string{"h100"}
		case 1:
			want = []string{"h100", "a100"}
		case 2: // the last attempt
			want = []string{"h100", "a100", "h100"}
		default: // and a time to come back
			want = []string{"h100", "a100", "h100", "h100"}
		}
		if !slices.Equal(pools, want) || last.Pool != want[len(want)-1] || last.Moved != (full == 1) {
			t.Errorf("%d refuse: asked for %v, %+v; want %v", full, pools, last, want)
		}
		if refused := full > 2; (last.Action == plan.ActionRefuse) != refused || len(w.picks) != 1 == !refused || g.last().Hold == refused {
			t.Errorf("%d refuse: %+v, %d places reserved, last asked %+v", full, last, len(w.picks), g.last())
		}
	}
}

// TestWhatHoldsInEveryPoolIsNotTriedInAnother.
func TestWhatHoldsInEveryPoolIsNotTriedInAnother(t *testing.T) {
	w, g := gated(t)
	g.full, g.why = 1000, admission.ReasonConcurrency
	w.exchange(t, chat(map[string]string{}).proto())
	for _, a := range g.asked {
		if a.Pool != "h100" {
			t.Errorf("asked for %s", a.Pool)
		}
	}
	if len(g.asked) != 3 || w.lastEvent().Action != plan.ActionRefuse {
		t.Errorf("asked %d times, %+v", len(g.asked), w.lastEvent())
	}
}

// TestLegacyRequestsWithoutAPlaceAreServedFurtherAlongTheChain: Envoy would go on
// sending them to the first pool.
func TestLegacyRequestsWithoutAPlaceAreServedFurtherAlongTheChain(t *testing.T) {
	for full := range 3 {
		w, g := gated(t)
		g.full, g.why = full, admission.ReasonBusy
		m := chat(map[string]string{wire.HeaderRouteStrategy: "legacy"})
		r := w.ask(t, m)
		last, pools := w.lastEvent(), []string{}
		for _, a := range g.asked {
			pools = append(pools, fmt.Sprint(a.Pool, " ", a.Unplaced))
		}
		want := [][]string{{"h100 true"}, {"h100 true", "a100 false"}, {"h100 true", "a100 false", "h100 true"}}[full]
		if !slices.Equal(pools, want) {
			t.Errorf("%d refuse: asked for %v; want %v", full, pools, want)
		}
		switch hosts := metadata(r, wire.NamespaceSteer)[wire.KeyHosts]; {
		case full != 1 && (hosts != nil || last.Reason != plan.ReasonLegacy):
			t.Errorf("%d refuse: %+v, to %v; want it left to Envoy", full, last, hosts)
		case full == 1 && (last.Reason != plan.ReasonNotAdmitted || !strings.HasPrefix(fmt.Sprint(hosts), "10.0.1.") || len(w.picks) != 1 || !last.Moved):
			t.Errorf("%d refuse: %+v, to %v; want it moved on", full, last, hosts)
		}
	}
}

// TestDecisionsFurtherAlongTheChainCanBeComputedAgain from what the log shows.
func TestDecisionsFurtherAlongTheChainCanBeComputedAgain(t *testing.T) {
	for full, past := range []string{"", "1", ""} { // the last is a refusal, of the first pool
		w, g := gated(t)
		g.full = full
		if full == 2 {
			g.full = 1000
		}
		r := w.ask(t, chat(map[string]string{}))
		log := metadata(r, wire.NamespaceLog)
		if got, _ := log[wire.KeyPast].(string); got != past {
			t.Errorf("%d refuse: past %q; want %q", full, got, past)
		}
		if full == 2 {
			continue
		}
		id, _ := ParseID(log[wire.KeyDecision].(string))
		try, _ := log[wire.KeyTry].(string)
		n, _ := strconv.Atoi(try)
		e := w.lastEvent()
		c := plan.Class{Arm: 0, Strategy: fleet.StrategyDynamic, Level: e.Level, Budget: e.Budget, Prompt: e.Prompt, Generates: true, Past: uint8(full)}
		again := w.plan.Decide(c, id.SeedOf(n), w.live)
		if got := strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")[0]; got != w.plan.AddressText(again.Picks[0]) {
			t.Errorf("%d refuse: sent to %s, computed again %s", full, got, w.plan.AddressText(again.Picks[0]))
		}
	}
}

// TestNobodyHoldsWhoIsOnlyObserved: no one waits for the answer.
func TestNobodyHoldsWhoIsOnlyObserved(t *testing.T) {
	w, g := gated(t, func(_ *plan.Inputs, o *Options) { o.Held = &Held{} })
	g.full = 1000
	m := chat(map[string]string{})
	m.overwrite = func(r *extprocv3.ProcessingRequest) { r.ObservabilityMode = true }
	st := &fakeStream{in: [][]byte{marshal(t, m.proto())}}
	if err := w.process(st); err != nil || len(st.out) != 0 || w.lastEvent().Held {
		t.Errorf("%v, %d answers, %+v", err, len(st.out), w.lastEvent())
	}
}

// TestSlotsAreLookedForWhereTheyAreGiven: in the first pool, also when others were
// tried.
func TestSlotsAreLookedForWhereTheyAreGiven(t *testing.T) {
	w, g := gated(t, func(_ *plan.Inputs, o *Options) { o.Held = &Held{} })
	g.full, g.early = 1000, true
	w.exchange(t, chat(map[string]string{}).proto())
	if !slices.Equal(g.earlyIn, []string{"h100"}) || g.last().Pool != "h100" || w.lastEvent().Held {
		t.Errorf("looked for a slot in %v, refused in %s, %+v", g.earlyIn, g.last().Pool, w.lastEvent())
	}
}

// TestWhoIsRefusedWaitsWhereAPlaceIsSoonest: of the pools of its chain that take
// requests, whoever refuses it; but its own limit is the same for all of them.
func TestWhoIsRefusedWaitsWhereAPlaceIsSoonest(t *testing.T) {
	full := func(w *world, _ *gate) {
		for slot := range uint32(10) {
			w.live[slot] = 100
		}
	}
	refuses := func(why admission.Reason) func(*world, *gate) {
		return func(_ *world, g *gate) { g.full, g.why = 1000, why }
	}
	drains := func(in *plan.Inputs, _ *Options) {
		for e := range in.Pools[0].Endpoints {
			in.Pools[0].Endpoints[e].State = fleet.StateDraining
		}
	}
	soon, late := time.Second, 9*time.Second
	for _, tc := range []struct {
		name     string
		change   func(*plan.Inputs, *Options)
		strategy string
		refuses  func(*world, *gate)
		h, a     time.Duration
		want     string
	}{
		{"the first is sooner", nil, "dynamic", full, soon, late, "h100"},
		{"the first is as soon", nil, "dynamic", full, soon, soon, "h100"},
		{"the next is sooner", nil, "dynamic", full, late, soon, "a100"},
		{"it was told to come there", nil, "dynamic", full, 0, -1, "a100"},
		{"legacy", nil, "legacy", full, late, soon, "a100"},
		{"the first drains", drains, "dynamic", full, soon, late, "a100"},
		{"the first drains, legacy", drains, "legacy", full, soon, late, "a100"},
		{"the first drains, and its client has its share", drains, "dynamic", refuses(admission.ReasonShare), soon, late, "a100"},
		{"its client has its share", nil, "dynamic", refuses(admission.ReasonShare), late, soon, "a100"},
		{"its level has its budget", nil, "dynamic", refuses(admission.ReasonLevel), late, soon, "a100"},
		{"the turn is another's", nil, "legacy", refuses(admission.ReasonTurn), late, soon, "a100"},
		{"its own limit", nil, "dynamic", refuses(admission.ReasonConcurrency), late, soon, "h100"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, g := gated(t, func(in *plan.Inputs, o *Options) {
				o.Held = &Held{}
				if tc.change != nil {
					tc.change(in, o)
				}
			})
			g.early, g.waits = true, map[string]time.Duration{"h100": tc.h, "a100": tc.a}
			tc.refuses(w, g)
			w.exchange(t, chat(map[string]string{wire.HeaderRouteStrategy: tc.strategy}).proto())
			if !slices.Equal(g.earlyIn, []string{tc.want}) || g.last().Pool != tc.want || len(g.refused) != 1 {
				t.Errorf("looked for a slot in %v, refused in %s, %v; want %s", g.earlyIn, g.last().Pool, g.refused, tc.want)
			}
			if tc.change != nil && len(g.waited) > 0 {
				t.Errorf("asked how long it is for %v, of which one takes requests", g.waited)
			}
		})
	}
}

// TestWhoIsNotHeld: where it would be of no use, or not deserved, a refusal comes
// at once.
func TestWhoIsNotHeld(t *testing.T) {
	for what, change := range map[string]func(*world, *gate, *Held){
		"came before its slot": func(_ *world, g *gate, _ *Held) { g.early = true },
		"no log arrives":       func(_ *world, _ *gate, h *Held) { h.SetBlind(true) },
		"many are held":        func(_ *world, _ *gate, h *Held) { h.all.Store(maxHeld) },
		"many of its client are held": func(_ *world, _ *gate, h *Held) {
			for i := range h.each {
				h.each[i].Store(heldEach)
			}
		},
		"nobody is held":                        func(w *world, _ *gate, _ *Held) { w.o.Held = nil },
		"a server told its client to stay away": func(_ *world, g *gate, _ *Held) { g.why = admission.ReasonServerLimit },
		"no word on places": func(_ *world, g *gate, _ *Held) {
			g.full, g.verdict = 0, admission.Verdict{Reason: admission.ReasonTokens}
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			w, g, h := heldWorld(t)
			g.full = 1000
			change(w, g, h)
			before := h.all.Load()
			began := time.Now()
			w.exchange(t, chat(map[string]string{}).proto())
			if took := time.Since(began); took != 0 {
				t.Errorf("%s: held for %v", what, took)
			}
			if last := w.lastEvent(); last.Held || last.Action != plan.ActionRefuse {
				t.Errorf("%s: %+v; want it refused, not held", what, last)
			}
			if h.all.Load() != before {
				t.Errorf("%s: %d are held, %d before", what, h.all.Load(), before)
			}
		})
	}
}

// TestWhoIsKeptOutOfSomePoolsIsHeldForAnother, in which a place may come free.
func TestWhoIsKeptOutOfSomePoolsIsHeldForAnother(t *testing.T) {
	for _, away := range []string{"h100", "a100"} {
		synctest.Test(t, func(t *testing.T) {
			w, g := gated(t, func(in *plan.Inputs, o *Options) {
				o.Held, in.Routes[0].Split, in.Routes[0].Fallback = &Held{}, []string{"h100"}, []string{"a100"}
			})
			g.full, g.whyIn = 4, map[string]admission.Reason{away: admission.ReasonServerLimit}
			began := time.Now()
			w.exchange(t, chat(map[string]string{}).proto())
			if took := time.Since(began); took != 2*holdStep {
				t.Errorf("kept out of %s: held for %v; want it in with the second step", away, took)
			}
			if last := w.lastEvent(); !last.Held || last.Action != plan.ActionSteer {
				t.Errorf("kept out of %s: %+v", away, last)
			}
		})
	}
}

// TestClosedPoolsBehindTheFirstEndTheChain: nobody is asked twice for pools that have
// no room.
func TestClosedPoolsBehindTheFirstEndTheChain(t *testing.T) {
	w, g := gated(t, func(in *plan.Inputs, _ *Options) {
		in.Pools = append(in.Pools, pool("third", "10.0.2.1:8000"))
		in.Pools[2].Endpoints[0].Slot, in.Pools[2].Endpoints[0].Closed = 9, true
		in.Routes[0].Split, in.Routes[0].Strategy = []string{"h100", "a100", "third"}, fleet.StrategyLegacy
	})
	g.full, g.why = 100, admission.ReasonBusy
	w.exchange(t, chat(map[string]string{}).proto())
	var pools []string
	for _, a := range g.asked {
		pools = append(pools, a.Pool)
	}
	if want := []string{"h100", "a100", "h100", "h100", "h100"}; !slices.Equal(pools, want) || w.lastEvent().Action != plan.ActionRefuse {
		t.Errorf("asked for %v, %+v; want %v", pools, w.lastEvent(), want)
	}
}

// TestHeldRequestsLeaveTheGroupThatTheyJoined: a new plan may tell clients apart by
// something else.
func TestHeldRequestsLeaveTheGroupThatTheyJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g := planTurns(t, func(r *plan.RouteInput) { r.ClientKey, r.Claim = fleet.ClientKeyJWT, "sub" })
		g.full = 3
		m := chat(map[string]string{"authorization": "Bearer a"})
		m.claims = map[string]any{"sub": otherGroup(t, w.o.Held, "Bearer a")}
		w.exchange(t, m.proto())
		if g.asked[0].Client == g.last().Client || !w.lastEvent().Held {
			t.Fatalf("asked for %x, then for %x; want it held, and another client by the new plan", g.asked[0].Client, g.last().Client)
		}
		h := w.o.Held
		for i := range h.each {
			if n := h.each[i].Load(); n != 0 {
				t.Errorf("%d are held in group %d", n, i)
			}
		}
		if n := h.all.Load(); n != 0 {
			t.Errorf("%d are held", n)
		}
	})
}

// otherGroup is a claim whose client is counted in another group than that of an
// authorization.
func otherGroup(t *testing.T, h *Held, authorization string) string {
	t.Helper()
	shown := admission.ClientOf(fleet.ClientKeyAuthorization, []byte(authorization))
	for i := range 100 {
		claim := fmt.Sprint("ann-", i)
		if named := admission.ClientOf(fleet.ClientKeyJWT, []byte(claim)); h.group(&named) != h.group(&shown) {
			return claim
		}
	}
	t.Fatal("all in one group")
	return ""
}

// TestRefusalAfterAHoldTellsOfTheLimit that counts for the client, as any other does.
func TestRefusalAfterAHoldTellsOfTheLimit(t *testing.T) {
	w, g := gated(t, func(_ *plan.Inputs, o *Options) { o.Held = &Held{} })
	g.verdict.Standing.Policy = "clients"
	g.full, g.why = 1<<20, admission.ReasonConcurrency
	if r := w.ask(t, chat(nil)).GetImmediateResponse(); r.GetStatus().GetCode() != 429 {
		t.Fatalf("%v", r)
	}
	if e := w.lastEvent(); e.Limit != "clients" || e.Admission != admission.ReasonConcurrency {
		t.Errorf("%+v", e)
	}
}
