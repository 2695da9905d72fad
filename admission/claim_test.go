package admission

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"pgregory.net/rapid"
)

// counted adds up everything that says how many requests are in flight.
func counted(t interface{ Fatalf(string, ...any) }, g *Gate) int {
	byClient, byAccount := 0, 0
	g.clients.each(0, func(c *client) {
		byClient += c.live
		for i := range c.accounts {
			byAccount += c.accounts[i].live
		}
	})
	byPool, byLevel := 0, 0
	g.settings.Load().eachPool(func(p *pool) {
		byPool += int(p.live.Load())
		for i := range p.levels {
			byLevel += int(p.levels[i].live.Load())
		}
	})
	if byClient != byAccount || byClient != byPool || byClient != byLevel {
		t.Fatalf("in flight by client %d, by account %d, by pool %d, by level %d; want one number", byClient, byAccount, byPool, byLevel)
	}
	return byClient
}

// TestClaimsEndExactlyOnce compares the gate with a list of what must be in
// flight, over outcomes that are lost, doubled, late and of strangers.
func TestClaimsEndExactlyOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cap := rapid.IntRange(0, 5).Draw(t, "cap")
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: cap}), 1e6, nil)
		type request struct {
			id, client string
			until      time.Duration
			attempt    int
		}
		var live, over []request
		now := func() time.Duration { return time.Duration(w.clock.at.Load()) }
		pick := func() *request { return &live[rapid.IntRange(0, len(live)-1).Draw(t, "which")] }
		remove := func(id string) {
			for i := range live {
				if live[i].id == id {
					over = append(over, live[i])
					live = append(live[:i], live[i+1:]...)
					return
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"admit": func(t *rapid.T) {
				client := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "client")
				a := w.ask(client)
				a.Pool = rapid.SampledFrom([]string{"p", "", "unknown"}).Draw(t, "pool")
				a.Level = fleet.BurstLevel(rapid.IntRange(0, 7).Draw(t, "level"))
				a.Class = rapid.SampledFrom([]fleet.RequestClass{fleet.ClassInteractive, fleet.ClassBatch}).Draw(t, "class")
				of := 0
				for _, r := range live {
					if r.client == client {
						of++
					}
				}
				v := w.Admit(&a)
				if want := cap == 0 || of < cap; v.Admitted != want {
					t.Fatalf("with %d of %d in flight: %+v", of, cap, v)
				}
				if v.Admitted {
					live = append(live, request{a.ID, client, now() + unconfirmedLease, 0})
				}
			},
			"sign of life": func(t *rapid.T) {
				if len(live) == 0 {
					return
				}
				r := pick()
				o := fleet.Outcome{ID: r.id, Node: "n", Attempt: rapid.IntRange(0, 3).Draw(t, "attempt"), At: w.clock.now()}
				o.Kind = rapid.SampledFrom([]fleet.OutcomeKind{fleet.AttemptStarted, fleet.AttemptEnded, fleet.Heartbeat}).Draw(t, "kind")
				for range rapid.IntRange(1, 2).Draw(t, "times") {
					w.Apply(o)
				}
				if o.Attempt < r.attempt {
					return
				}
				r.attempt, r.until = o.Attempt, now()+lease
				if o.Kind == fleet.AttemptEnded {
					r.until = now() + unconfirmedLease
				}
			},
			"end": func(t *rapid.T) {
				if len(live) == 0 {
					return
				}
				id := pick().id
				w.end(id)
				remove(id)
			},
			"cancel": func(t *rapid.T) {
				if len(live) == 0 {
					return
				}
				id := pick().id
				w.Cancel(id)
				remove(id)
			},
			"told again or of strangers": func(t *rapid.T) {
				id := "1718924567123-007-0001"
				if len(over) > 0 && rapid.Bool().Draw(t, "again") {
					id = over[rapid.IntRange(0, len(over)-1).Draw(t, "which")].id
				}
				kind := fleet.OutcomeKind(rapid.IntRange(1, 4).Draw(t, "kind"))
				w.Apply(fleet.Outcome{Kind: kind, ID: id, Node: "n", Attempt: 1, At: w.clock.now()})
			},
			"time": func(t *rapid.T) {
				w.tick(time.Duration(rapid.IntRange(0, 9000).Draw(t, "ms")) * time.Millisecond)
				for i := len(live) - 1; i >= 0; i-- {
					if live[i].until <= now() {
						remove(live[i].id)
					}
				}
			},
			"": func(t *rapid.T) {
				if got := counted(t, w.Gate); got != len(live) || w.Counters().Claims != len(live) {
					t.Fatalf("%d in flight, %d claims; want %d", got, w.Counters().Claims, len(live))
				}
			},
		})
	})
}

func TestClaimsOfADeadEnvoyEndSoon(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	for _, node := range []string{"dead", "gone", "well"} {
		a := w.ask("a")
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: node, Attempt: 1, At: w.clock.now()})
	}
	w.NodeDead("dead")
	w.NodeGone("gone")
	for _, at := range []struct {
		after time.Duration
		want  int
	}{{0, 3}, {deadGrace, 2}, {nodeGrace - deadGrace, 1}, {lease - nodeGrace, 0}} {
		w.tick(at.after)
		if got := counted(t, w.Gate); got != at.want {
			t.Errorf("%v later %d are in flight; want %d", at.after, got, at.want)
		}
	}
}

func TestBlindGateKeepsRequestsForAsLongAsTheirLevelTakes(t *testing.T) {
	for _, row := range []struct {
		level fleet.BurstLevel
		want  time.Duration
	}{{0, unconfirmedLease}, {3, 255 * perToken}, {7, lease}} {
		w := newWorld(config(), 1000, nil)
		w.SetBlind(true)
		a := w.ask("a")
		a.Level = row.level
		w.Admit(&a)
		w.clock.advance(row.want - time.Millisecond)
		if w.tick(0); counted(t, w.Gate) != 1 {
			t.Errorf("level %d ended before %v", row.level, row.want)
		}
		if w.tick(time.Millisecond); counted(t, w.Gate) != 0 {
			t.Errorf("level %d still counts after %v", row.level, row.want)
		}
	}
}

func TestFullTableRefusesWhereLimitsAreExactAndCountsTheRest(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	capped := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 10})
	w.Gate = New(Options{Config: capped, Now: w.clock.now, Claims: 2})
	for i := range 3 {
		a := w.ask("a")
		v := w.Admit(&a)
		if want := i < 2; v.Admitted != want || !want && v.Reason != ReasonBusy {
			t.Fatalf("request %d with room for 2: %+v", i, v)
		}
	}
	w.Gate = New(Options{Config: config(), Now: w.clock.now, Claims: 2})
	for range 5 {
		a := w.ask("a")
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("a client without a limit: %+v", v)
		}
	}
	if st := w.tick(0); st.Levels[3].InFlight != 5 {
		t.Fatalf("%d in flight; want all 5", st.Levels[3].InFlight)
	}
	if n := w.Counters().TableFull; n != 3 {
		t.Errorf("%d found the table full; want 3", n)
	}
	w.tick(unconfirmedLease + time.Second)
	if st := w.tick(0); st.Levels[3].InFlight != 0 {
		t.Errorf("%d in flight after their time; want none", st.Levels[3].InFlight)
	}
}

func TestOverflowingClientsShareAPlaceAndGoOnBeingCounted(t *testing.T) {
	w := newWorld(config(), 1e6, nil)
	w.Gate = New(Options{Config: config(), Now: w.clock.now, Clients: 64})
	var ids []string
	for i := range 1000 {
		a := w.ask(fmt.Sprint("client", i))
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("client %d: %+v", i, v)
		}
		ids = append(ids, a.ID)
	}
	if n := w.Counters().Clients; n > 64 {
		t.Errorf("%d clients told apart; want 64 at most", n)
	}
	if got := counted(t, w.Gate); got != 1000 {
		t.Errorf("%d in flight; want 1000", got)
	}
	for _, id := range ids {
		w.end(id)
	}
	if got := counted(t, w.Gate); got != 0 {
		t.Errorf("%d in flight after all ended", got)
	}
}

func TestManyKeysThatAreNeverAdmittedTakeNoRoom(t *testing.T) {
	w := newWorld(config(), 100, nil)
	for i := range 20_000 {
		a := w.ask(fmt.Sprint("key", i))
		w.Refuse(&a, ReasonBusy)
	}
	if n := w.Counters().Clients; n > maxClients {
		t.Errorf("%d clients; want %d at most", n, maxClients)
	}
}
