package admission

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// known counts what is known of a client: 0 where it is forgotten itself.
func (w *world) known(client string) (uses, accounts int, there bool) {
	key := named(client)
	for i := range w.clients.shards {
		s := &w.clients.shards[i]
		s.mu.Lock()
		if c := s.byKey[key]; c != nil {
			uses, accounts, there = len(c.uses), len(c.accounts), true
		}
		s.mu.Unlock()
	}
	return uses, accounts, there
}

// runs lets a request run, and steps.
func (w *world) runs(id string, takes time.Duration) {
	for takes > 0 {
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: id, Attempt: 1, At: w.clock.now()})
		d := min(takes, time.Second)
		w.tick(d)
		takes -= d
	}
}

// TestWhoIsExpectedIsNotForgotten: a server sent the only request of a client away, after
// a while; before it is back a sibling is admitted, and another one told to come later.
func TestWhoIsExpectedIsNotForgotten(t *testing.T) {
	const told = 20 * time.Second
	for _, limited := range []bool{false, true} {
		for _, ran := range []time.Duration{0, 2 * idleAfter} {
			for _, pause := range []time.Duration{0, 15 * time.Second} {
				w := paced(1)
				if limited {
					w = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
				}
				a := w.counting("a", 0)
				w.Admit(&a)
				w.runs(a.ID, ran)
				w.answered(a.ID, false, answer{429, told})
				w.tick(0)
				for d := pause; d > 0; d -= time.Second {
					w.tick(time.Second)
				}
				b := w.counting("a", 0)
				w.Admit(&b)
				w.clock.advance(w.turnAway("a", limited).RetryAfter / 2)
				if w.early("a") {
					t.Errorf("limited %v, ran %v, %v after a server sent it away: early", limited, ran, pause)
				}
			}
		}
	}
}

// TestWhoIsExpectedInVainIsForgotten: what it was told is over by some seconds.
func TestWhoIsExpectedInVainIsForgotten(t *testing.T) {
	for _, told := range []time.Duration{20 * time.Second, time.Hour} {
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
		a := w.counting("a", 0)
		w.Admit(&a)
		w.answered(a.ID, false, answer{429, told})
		over := min(told, retryMax) + abandoned
		for d := time.Duration(0); d < over; d += time.Second {
			w.tick(time.Second)
		}
		if uses, accounts, there := w.known("a"); uses != 1 || accounts != 1 || !there {
			t.Errorf("told %v: %d uses and %d accounts are known in the end, and the client: %v", told, uses, accounts, there)
		}
		w.tick(time.Millisecond)
		if uses, accounts, _ := w.known("a"); uses != 0 || accounts != 0 {
			t.Errorf("told %v: %d uses and %d accounts are known after it", told, uses, accounts)
		}
		w.tick(idleAfter + time.Second - min(over, idleAfter))
		if _, _, there := w.known("a"); there || w.clients.n.Load() != 0 {
			t.Errorf("told %v: %d clients are known after it", told, w.clients.n.Load())
		}
	}
}

// TestWhoIsToldAMinuteIsKnownThen: its slot is a minute after it came, when clients of
// which nothing is expected are forgotten.
func TestWhoIsToldAMinuteIsKnownThen(t *testing.T) {
	w := paced(1)
	w.turnAway("a", false)
	w.postpone("a", time.Minute)
	w.tick(idleAfter + 2*time.Second)
	if _, _, there := w.known("a"); !there {
		t.Error("forgotten before its slot is over")
	}
}

// TestWhoIsExpectedIsTheLastToMakeRoom for another client, though it was heard of before
// those of which nothing is expected.
func TestWhoIsExpectedIsTheLastToMakeRoom(t *testing.T) {
	p := newPool("p", 1)
	for name, expect := range map[string]func(c *client){
		"a slot of the pool":    func(c *client) { c.account(p, fleet.ClassBatch).slots.add(slot{at: time.Minute}) },
		"a slot of a limit":     func(c *client) { c.use("l").slots.add(slot{at: time.Minute}) },
		"sent away, by a pool":  func(c *client) { c.account(p, fleet.ClassBatch).slots.lend(0, time.Minute) },
		"sent away, of a limit": func(c *client) { c.use("l").slots.lend(0, time.Minute) },
	} {
		waits, idle := &client{seen: 1}, &client{seen: 2}
		expect(waits)
		s := clientShard{byKey: map[Client]*client{named("a"): waits, named("b"): idle}}
		if !s.evict(time.Second) || s.byKey[named("a")] == nil {
			t.Errorf("%s: forgotten first", name)
		}
		if !s.evict(time.Second) || len(s.byKey) != 0 || s.evict(time.Second) {
			t.Errorf("%s: %d clients are left", name, len(s.byKey))
		}
	}
}

// TestWhoIsExpectedNoMoreMakesRoom for another client, before a step has forgotten what it
// was told.
func TestWhoIsExpectedNoMoreMakesRoom(t *testing.T) {
	var table clients
	table.init(2)
	s := &table.shards[0]
	over := table.add(s, named("over"), 0)
	over.use("l").slots.lend(0, time.Second)
	table.add(s, named("idle"), 0).seen = 1
	table.add(s, named("new"), time.Second+abandoned+1)
	if s.byKey[named("over")] != nil || len(s.byKey) != 2 {
		t.Errorf("it is there: %v; %d clients", s.byKey[named("over")] != nil, len(s.byKey))
	}
}

// TestLentSlotsAreBounded in their number, and last until the last of them is over.
func TestLentSlotsAreBounded(t *testing.T) {
	var s slots
	s.add(slot{at: time.Hour})
	for range 2 * keptSlots {
		s.lend(0, time.Minute)
	}
	s.lend(1, time.Second) // it is over sooner than the others
	for i := range keptSlots {
		if early, due, _, _ := s.arrive(time.Minute+abandoned, 1, true); early || !due {
			t.Fatalf("return %d of %d: early %v, due %v", i, keptSlots, early, due)
		}
	}
	if early, _, _, _ := s.arrive(time.Minute+abandoned, 1, true); !early {
		t.Error("one more than are kept is not early")
	}
}
