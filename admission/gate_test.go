package admission

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

var start = time.Date(2024, 6, 21, 0, 0, 0, 0, time.UTC)

// clock is a clock that stands still until it is moved.
type clock struct{ at atomic.Int64 }

func (c *clock) now() time.Time { return start.Add(time.Duration(c.at.Load())) }

func (c *clock) advance(d time.Duration) { c.at.Add(int64(d)) }

// world is a gate with a clock and one pool, "p", of one route, "r".
type world struct {
	*Gate
	clock *clock
	limit float64
	ids   int
}

func config(limits ...fleet.Limit) *fleet.Config {
	return &fleet.Config{
		Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)}},
		Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, FairShare: true, Split: fleet.Split{{Pool: "p", Weight: 1}}}},
		Limits: limits,
	}
}

func newWorld(cfg *fleet.Config, limit float64, limiter Limiter) *world {
	w := &world{clock: &clock{}, limit: limit}
	w.Gate = New(Options{Config: cfg, Limiter: limiter, Now: w.clock.now})
	w.tick(0)
	return w
}

// tick lets time pass and steps, with no other traffic than the gate's own.
func (w *world) tick(d time.Duration) PoolState {
	w.clock.advance(d)
	p := w.settings.Load().pools["p"]
	return w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: w.limit, InFlight: int(p.live.Load())}})[0]
}

func named(name string) Client { return ClientOf(fleet.ClientKeyAuthorization, []byte(name)) }

func (w *world) ask(client string) Ask {
	w.ids++
	return Ask{
		ID: fmt.Sprintf("%013d-000-%04d", w.ids, w.ids%10000), Route: "r", Pool: "p", Client: named(client),
		Level: 3, Class: fleet.ClassInteractive, Input: 100, Output: 200, At: w.clock.now(), Seed: uint64(w.ids),
	}
}

func (w *world) end(id string) {
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: id, Code: 200, Cause: fleet.CauseOK, At: w.clock.now()})
}

func TestGateAdmitsExactlyItsConcurrencyInParallel(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 50}), 1000, nil)
	asks := make([]Ask, 200)
	for i := range asks {
		asks[i] = w.ask("a")
	}
	var admitted atomic.Int64
	var all sync.WaitGroup
	for i := range asks {
		all.Go(func() {
			switch v := w.Admit(&asks[i]); {
			case v.Admitted:
				admitted.Add(1)
			case v.Reason != ReasonConcurrency || v.Refusal.Concurrency != 50 || v.Refusal.InFlight != 50:
				t.Errorf("refused with %+v", v)
			}
		})
	}
	all.Wait()
	if admitted.Load() != 50 {
		t.Fatalf("%d of 200 admitted; want 50", admitted.Load())
	}
}

func TestGateGivesPlacesBackAtTheEnd(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 1000, nil)
	first := w.ask("a")
	if v := w.Admit(&first); !v.Admitted {
		t.Fatalf("first: %+v", v)
	}
	second := w.ask("a")
	if v := w.Admit(&second); v.Admitted {
		t.Fatal("two in flight of one")
	}
	w.end(first.ID)
	w.end(first.ID)
	if v := w.Admit(&second); !v.Admitted {
		t.Fatalf("after the end: %+v", v)
	}
	third := w.ask("a")
	if v := w.Admit(&third); v.Admitted {
		t.Fatal("an end that was told twice made two places")
	}
}

func TestGateHoldsClientsToTheirSharesWhileThePoolIsFull(t *testing.T) {
	w := newWorld(config(), 100, nil)
	var last string
	for range 100 {
		a := w.ask("hog")
		last = a.ID
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("an idle pool refused: %+v", v)
		}
	}
	other := w.ask("newcomer")
	w.Refuse(&other, ReasonBusy)
	w.tick(50 * time.Millisecond)
	a := w.ask("hog")
	v := w.Admit(&a)
	if v.Admitted || v.Reason != ReasonShare {
		t.Fatalf("the hog got %+v; want its share refused", v)
	}
	if v.Refusal.Concurrency != 99 && v.Refusal.Concurrency != 98 {
		t.Errorf("the hog is advised %d in flight; want what the newcomer leaves", v.Refusal.Concurrency)
	}
	w.end(last)
	b := w.ask("newcomer")
	if v := w.Admit(&b); !v.Admitted {
		t.Fatalf("the newcomer got %+v; want to enter", v)
	}
}

// TestUnplacedRequestsEnterWhileThereIsAPlace sends 200 at once, of as many
// clients, to 50 places, of which others have some.
func TestUnplacedRequestsEnterWhileThereIsAPlace(t *testing.T) {
	for _, others := range []int{0, 20} {
		w := newWorld(config(), 1000, nil)
		view := []PoolView{{Name: "p", Limit: 1000, InFlight: others, Places: 50}}
		w.Step(w.clock.now(), view)
		asks := make([]Ask, 200)
		for i := range asks {
			asks[i] = w.ask(fmt.Sprint(i))
			asks[i].Unplaced = true
		}
		var admitted atomic.Int64
		var all sync.WaitGroup
		for i := range asks {
			all.Go(func() {
				switch v := w.Admit(&asks[i]); {
				case v.Admitted:
					admitted.Add(1)
				case v.Reason != ReasonBusy || v.Refusal.RetryAfter < retryFloor || !v.Refusal.ShouldRetry:
					t.Errorf("refused with %+v", v)
				}
			})
		}
		all.Wait()
		if got, want := int(admitted.Load()), 50-others; got != want {
			t.Fatalf("%d of 200 admitted beside %d others; want %d", got, others, want)
		}
		placed := w.ask("placed")
		if v := w.Admit(&placed); !v.Admitted {
			t.Errorf("a request that has its place: %+v", v)
		}
		w.Cancel(placed.ID)
		view[0].Places = 0 // all endpoints are closed
		w.Step(w.clock.now(), view)
		closed := w.ask("closed")
		closed.Unplaced = true
		if v := w.Admit(&closed); v.Admitted || v.Reason != ReasonBusy {
			t.Errorf("without a place: %+v", v)
		}
		view[0].Places = Unbounded // an endpoint has no limit
		w.Step(w.clock.now(), view)
		late := w.ask("late")
		late.Unplaced = true
		if v := w.Admit(&late); !v.Admitted {
			t.Errorf("without a limit: %+v", v)
		}
	}
}
