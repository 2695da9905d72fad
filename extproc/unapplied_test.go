package extproc

import (
	"fmt"
	"sync"
	"testing"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// envoysID is an id as Envoy makes it, for a caller from outside.
const envoysID = "5b2f8c9e-7d1a-4e36-9f0b-2c4d6e8f0a1b"

func fromOutside(id string) message {
	return chat(map[string]string{wire.HeaderRequestID: id, "x-envoy-external-address": "127.0.0.1"})
}

func TestUnappliedDecisionsAreFoundByEnvoysID(t *testing.T) {
	w, g := gated(t)
	m := fromOutside(envoysID)
	want := metadata(w.ask(t, m), wire.NamespaceLog)[wire.KeyDecision]
	if _, ok := w.Unapplied("edge", "another", true); ok {
		t.Error("a decision for an id that nobody had")
	}
	if _, ok := w.Unapplied("edge", "", true); ok {
		t.Error("a decision for no id")
	}
	for _, last := range []bool{false, false, true} {
		if got, ok := w.Unapplied("edge", envoysID, last); !ok || got != want {
			t.Errorf("last %v: %q, %v; want %q", last, got, ok, want)
		}
	}
	if got, ok := w.Unapplied("edge", envoysID, false); ok {
		t.Errorf("%q a second time", got)
	}
	g.verdict = admission.Verdict{Reason: admission.ReasonTokens, Refusal: g.refusal}
	w.ask(t, m)
	if got, ok := w.Unapplied("edge", envoysID, true); ok {
		t.Errorf("%q for a request that was refused: nothing counts it", got)
	}
}

// TestUnappliedKnowsWhatIsCounted: what the ledger or admission alone counts is found
// as well, and nothing else.
func TestUnappliedKnowsWhatIsCounted(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*message, *Options)
		found  bool
	}{
		{"ledger and admission", func(*message, *Options) {}, true},
		{"ledger alone: generates nothing", func(m *message, _ *Options) { m.route += wire.RouteOther }, true},
		{"admission alone", func(_ *message, o *Options) { o.Ledger = nil }, true},
		{"neither: no such route", func(m *message, _ *Options) { m.route = "gone" }, false},
		{"an id of its caller's", func(m *message, _ *Options) { delete(m.headers, "x-envoy-external-address") }, false},
	} {
		m := fromOutside(envoysID)
		w, _ := gated(t, func(_ *plan.Inputs, o *Options) { row.change(&m, o) })
		want := metadata(w.ask(t, m), wire.NamespaceLog)[wire.KeyDecision]
		got, ok := w.Unapplied("edge", envoysID, true)
		if ok != row.found || (ok && got != want) {
			t.Errorf("%s: %q, %v; want %q, %v", row.name, got, ok, want, row.found)
		}
	}
}

// TestUnappliedRequestsAreKnownWhileTheyRun: to the Envoy that logged them first,
// whatever else is decided, until their end.
func TestUnappliedRequestsAreKnownWhileTheyRun(t *testing.T) {
	u := newUnapplied()
	u.latest.put([]byte(envoysID), ID{n: 7})
	for i := range 3 {
		if n, ok := u.find("edge", envoysID, false); !ok || n != 7 {
			t.Fatalf("heartbeat %d: decision %d, %v", i, n, ok)
		}
		for k := range 2 * len(u.latest.places) {
			other := fmt.Sprint("request-", k)
			u.latest.put([]byte(other), ID{n: int64(8 + k)})
			if k < 100 { // run too
				u.find("edge", other, false)
			}
		}
	}
	if n, ok := u.find("another edge", envoysID, true); ok {
		t.Errorf("decision %d for what another Envoy logs", n)
	}
	if n, ok := u.find("edge", envoysID, true); !ok || n != 7 {
		t.Errorf("at its end: decision %d, %v", n, ok)
	}
	if n, ok := u.find("edge", envoysID, true); ok {
		t.Errorf("decision %d after its end", n)
	}
}

// TestRunningForgetsWhoWasNotHeardOf, and never keeps more than twice as many as it
// may.
func TestRunningForgetsWhoWasNotHeardOf(t *testing.T) {
	r := running{most: 10}
	beating, silent := logged{"edge", "beating"}, logged{"edge", "silent"}
	r.keep(beating, 1)
	r.keep(silent, 2)
	for i := range 100 {
		r.keep(logged{"edge", fmt.Sprint(i)}, 3)
		if i%8 == 0 {
			n, ok := r.take(beating)
			if !ok || n != 1 {
				t.Fatalf("decision %d, %v after %d others", n, ok, i)
			}
			r.keep(beating, n)
		}
		if kept := len(r.young) + len(r.old); kept > 2*r.most {
			t.Fatalf("%d kept", kept)
		}
	}
	if n, ok := r.take(silent); ok {
		t.Errorf("decision %d of one not heard of", n)
	}
	for _, old := range []bool{false, true} {
		r.keep(silent, 2)
		if old {
			r.young, r.old = nil, r.young
		}
		if n, ok := r.take(silent); !ok || n != 2 {
			t.Errorf("decision %d, %v; old %v", n, ok, old)
		}
		if n, ok := r.take(silent); ok {
			t.Errorf("decision %d though it was taken; old %v", n, old)
		}
	}
}

// TestUnappliedIsRightOrSilent: many goroutines write to the same places, and what
// is found is always the request's own.
func TestUnappliedIsRightOrSilent(t *testing.T) {
	u := newUnapplied()
	var all sync.WaitGroup
	var found [8]int
	for part := range 8 {
		all.Go(func() {
			for i := range 40_000 {
				n := int64(1 + part + 8*i)
				name := fmt.Sprint("request-", n)
				u.latest.put([]byte(name), ID{n: n})
				if got, ok := u.find("edge", name, i%4 > 0); ok {
					found[part]++
					if got != n {
						t.Errorf("request %d has decision %d", n, got)
					}
				}
			}
		})
	}
	all.Wait()
	sum := 0
	for _, n := range found {
		sum += n
	}
	if sum < 300_000 {
		t.Errorf("%d of 320000 found", sum)
	}
}

// TestUnappliedIsFoundByAllWhoAskAtOnce: entries of both logs ask at once, and none of them
// misses the decision between its two places.
func TestUnappliedIsFoundByAllWhoAskAtOnce(t *testing.T) {
	u := newUnapplied()
	for i := range 2_000 {
		name := fmt.Sprint("request-", i)
		u.latest.put([]byte(name), ID{n: int64(i + 1)})
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if n, ok := u.find("edge", name, false); !ok || n != int64(i+1) {
					t.Errorf("request %d: decision %d, %v", i, n, ok)
				}
			})
		}
		all.Wait()
		u.find("edge", name, true)
	}
}
