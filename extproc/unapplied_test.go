package extproc

import (
	"fmt"
	"sync"
	"testing"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func TestUnappliedDecisionsAreFoundByEnvoysID(t *testing.T) {
	w, g := gated(t)
	const id = "5b2f8c9e-7d1a-4e36-9f0b-2c4d6e8f0a1b"
	m := chat(map[string]string{wire.HeaderRequestID: id})
	want := metadata(w.ask(t, m), wire.NamespaceLog)[wire.KeyDecision]
	if _, ok := w.Unapplied("another", true); ok {
		t.Error("a decision for an id that nobody had")
	}
	if _, ok := w.Unapplied("", true); ok {
		t.Error("a decision for no id")
	}
	for _, last := range []bool{false, false, true} {
		if got, ok := w.Unapplied(id, last); !ok || got != want {
			t.Errorf("last %v: %q, %v; want %q", last, got, ok, want)
		}
	}
	if got, ok := w.Unapplied(id, false); ok {
		t.Errorf("%q a second time", got)
	}
	g.verdict = admission.Verdict{Reason: admission.ReasonTokens, Refusal: g.refusal}
	w.ask(t, m)
	if got, ok := w.Unapplied(id, true); ok {
		t.Errorf("%q for a request that was refused: nothing counts it", got)
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
				u.put([]byte(name), ID{n: n})
				if got, ok := u.find(name, true); ok {
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
