package admission

import (
	"fmt"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestWhoAskedIsKnown: while the request runs, and after it ended if something of it failed.
func TestWhoAskedIsKnown(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	for _, row := range []struct {
		end   fleet.Outcome
		after bool
	}{
		{fleet.Outcome{Cause: fleet.CauseOK, Code: 200, Attempt: 1}, false},
		{fleet.Outcome{Cause: fleet.CauseOK, Code: 200, Attempt: 2}, true},
		{fleet.Outcome{Cause: fleet.CauseThrottled, Code: 429, Attempt: 1}, true},
		{fleet.Outcome{Cause: fleet.CauseReset, Attempt: 1}, true},
	} {
		a := w.ask("a")
		a.Credential = named("key")
		want := Asker{named("a"), named("key")}
		if _, ok := w.Asker(a.ID); ok {
			t.Error("it is known before it asked")
		}
		w.Admit(&a)
		if c, ok := w.Asker(a.ID); !ok || c != want {
			t.Errorf("while it runs: %v, %v", c, ok)
		}
		row.end.Kind, row.end.ID, row.end.At = fleet.RequestEnded, a.ID, w.clock.now()
		w.Apply(row.end)
		if c, ok := w.Asker(a.ID); ok != row.after || ok && c != want {
			t.Errorf("after %+v: %v, %v; want %v", row.end, c, ok, row.after)
		}
	}
	a := w.ask("a") // shows nothing else
	w.Admit(&a)
	if c, ok := w.Asker(a.ID); !ok || c != (Asker{named("a"), named("a")}) {
		t.Errorf("without a credential: %v, %v", c, ok)
	}
}

func TestFormerAskersAreBounded(t *testing.T) {
	var f former
	for i := range 3 * maxFormer {
		f.add(fmt.Sprint(i), Asker{})
		f.add(fmt.Sprint(i), Asker{Client: Client{byte(i)}}) // another of that id
	}
	if len(f.byID) != maxFormer {
		t.Errorf("%d are remembered; want %d", len(f.byID), maxFormer)
	}
	for i := range 3 * maxFormer {
		if c, ok := f.of(fmt.Sprint(i)); ok != (i >= 2*maxFormer) || ok && c != (Asker{Client: Client{byte(i)}}) {
			t.Fatalf("number %d: %v, %v", i, c, ok)
		}
	}
}
