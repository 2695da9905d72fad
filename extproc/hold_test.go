package extproc

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/plan"
)

// heldWorld is a world with a gate whose requests are held. In a bubble of
// synctest the clock stands still until everybody waits.
func heldWorld(t *testing.T) (*world, *gate, *Ends) {
	e := &Ends{}
	w, g := gated(t, func(in *plan.Inputs, o *Options) { o.Ends, in.Routes[0].Split = e, []string{"h100"} })
	return w, g, e
}

// soon signals an end after a time, and returns when it has.
func soon(e *Ends, after time.Duration) (done chan struct{}) {
	done = make(chan struct{})
	go func() {
		defer close(done)
		time.Sleep(after)
		e.Signal()
	}()
	return done
}

func TestRequestsAreHeldUntilAnotherEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, g, e := heldWorld(t)
		g.full = 3 // at its first ask, when it begins to wait, and after the first end
		began := time.Now()
		first, second := soon(e, 10*time.Millisecond), soon(e, 25*time.Millisecond)
		w.exchange(t, chat(map[string]string{}).proto())
		if took := time.Since(began); took != 25*time.Millisecond {
			t.Errorf("held for %v; want it in at the second end, after 25 ms", took)
		}
		<-first
		<-second
		last := w.lastEvent()
		if !last.Held || last.Admission != admission.ReasonAdmitted || last.Action != plan.ActionSteer {
			t.Errorf("%+v; want it held and admitted", last)
		}
		if len(g.asked) != 4 || len(g.refused) != 0 || len(w.picks) != 1 {
			t.Errorf("asked %d times, refused %v, %d places reserved; want 4, none and one", len(g.asked), g.refused, len(w.picks))
		}
		if at := g.last().At.Sub(g.asked[0].At); e.held.Load() != 0 || at != 25*time.Millisecond {
			t.Errorf("%d are held; the last ask is of %v later", e.held.Load(), at)
		}
	})
}

// TestNobodyIsHeldForLong: who found no place is refused, once, and leaves nothing
// behind.
func TestNobodyIsHeldForLong(t *testing.T) {
	for _, why := range []string{"the gate has none", "the plan has none"} {
		synctest.Test(t, func(t *testing.T) {
			w, g, e := heldWorld(t)
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
			ended := soon(e, 20*time.Millisecond)
			w.exchange(t, chat(map[string]string{}).proto())
			<-ended
			if took := time.Since(began); took != holdFor {
				t.Errorf("%s: held for %v; want %v", why, took, holdFor)
			}
			last := w.lastEvent()
			if !last.Held || last.Admission != want || last.Action != plan.ActionRefuse || g.last().Hold {
				t.Errorf("%s: %+v; want it refused for %v", why, last, want)
			}
			if len(w.picks) != 0 || e.held.Load() != 0 || (want == admission.ReasonBusy) != (len(g.refused) == 1) {
				t.Errorf("%s: %d places reserved, %d held, refused %v", why, len(w.picks), e.held.Load(), g.refused)
			}
		})
	}
}

// TestWhoHasNoShareHereIsServedFurtherAlongTheChain: and only who finds no room in
// any pool is refused, in the first.
func TestWhoHasNoShareHereIsServedFurtherAlongTheChain(t *testing.T) {
	for full := range 4 {
		w, g := gated(t)
		g.full = full
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
		default: // the last time it is for an answer
			want = []string{"h100", "a100", "h100"}
		}
		if !slices.Equal(pools, want) || last.Pool != want[len(want)-1] || last.Moved != (full == 1) {
			t.Errorf("%d refuse: asked for %v, %+v; want %v", full, pools, last, want)
		}
		if refused := full > 2; (last.Action == plan.ActionRefuse) != refused || len(w.picks) != 1 == !refused || g.last().Hold == (full > 1) {
			t.Errorf("%d refuse: %+v, %d places reserved, last asked %+v", full, last, len(w.picks), g.last())
		}
	}
}

// TestWhoIsNotHeld: where it would be of no use, or not deserved, a refusal comes
// at once.
func TestWhoIsNotHeld(t *testing.T) {
	for what, change := range map[string]func(*world, *gate, *Ends){
		"came before its slot": func(_ *world, g *gate, _ *Ends) { g.early = true },
		"no log arrives":       func(_ *world, _ *gate, e *Ends) { e.SetBlind(true) },
		"many are held":        func(_ *world, _ *gate, e *Ends) { e.held.Store(maxHeld) },
		"many of its client are held": func(_ *world, _ *gate, e *Ends) {
			for i := range e.each {
				e.each[i].Store(heldEach)
			}
		},
		"nobody tells of ends": func(w *world, _ *gate, _ *Ends) { w.o.Ends = nil },
		"no word on places": func(_ *world, g *gate, _ *Ends) {
			g.full, g.verdict = 0, admission.Verdict{Reason: admission.ReasonTokens}
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			w, g, e := heldWorld(t)
			g.full = 1000
			change(w, g, e)
			before := e.held.Load()
			began := time.Now()
			w.exchange(t, chat(map[string]string{}).proto())
			if took := time.Since(began); took != 0 {
				t.Errorf("%s: held for %v", what, took)
			}
			if last := w.lastEvent(); last.Held || last.Action != plan.ActionRefuse {
				t.Errorf("%s: %+v; want it refused, not held", what, last)
			}
			if e.held.Load() != before {
				t.Errorf("%s: %d are held, %d before", what, e.held.Load(), before)
			}
		})
	}
}
