package admission

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
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
		cfg := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: cap})
		if rapid.Bool().Draw(t, "tokens") {
			cfg.Limits[0].Tokens = fleet.Rate{Amount: 1000, Window: 20 * time.Second}
		}
		cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 1e6, Endpoints: make([]fleet.Endpoint, 1)})
		w := newWorld(cfg, 1e6, nil)
		type request struct {
			id, client, pool string
			until            time.Duration
			attempt          int
			reserved         fleet.Tokens
			window           time.Duration // when it ends
		}
		pools := rapid.SampledFrom([]string{"p", "q", "", "unknown"})
		var live, lapsed, over []request
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
				a.Pool = pools.Draw(t, "pool")
				a.Output = fleet.Tokens(rapid.IntRange(0, 500).Draw(t, "output"))
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
					window := cfg.Limits[0].Tokens.Window
					live = append(live, request{a.ID, client, a.Pool, now() + unconfirmedLease, 0, a.Input + a.Output, now().Truncate(window) + window})
				}
			},
			"sign of life": func(t *rapid.T) {
				if len(live) == 0 {
					return
				}
				r := pick()
				o := fleet.Outcome{ID: r.id, Node: "n", Attempt: rapid.IntRange(0, 3).Draw(t, "attempt"), At: w.clock.now()}
				o.Kind = rapid.SampledFrom([]fleet.OutcomeKind{fleet.AttemptStarted, fleet.AttemptEnded, fleet.Heartbeat}).Draw(t, "kind")
				o.Endpoint.Pool = pools.Draw(t, "runs in")
				for range rapid.IntRange(1, 2).Draw(t, "times") {
					w.Apply(o)
				}
				if o.Attempt < r.attempt {
					return
				}
				r.attempt, r.until = o.Attempt, now()+lease
				if o.Kind == fleet.AttemptEnded {
					r.until = now() + unconfirmedLease
				} else if o.Endpoint.Pool == "p" || o.Endpoint.Pool == "q" {
					r.pool = o.Endpoint.Pool
				}
			},
			"sign of life of one that lapsed": func(t *rapid.T) {
				if len(lapsed) == 0 {
					return
				}
				i := rapid.IntRange(0, len(lapsed)-1).Draw(t, "which")
				r := lapsed[i]
				w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: r.id, Node: "n", Attempt: r.attempt, At: w.clock.now(), Endpoint: fleet.EndpointKey{Pool: "q"}})
				r.until, r.pool = now()+lease, "q"
				live, lapsed = append(live, r), append(lapsed[:i], lapsed[i+1:]...)
			},
			"end of one that lapsed": func(t *rapid.T) {
				if len(lapsed) > 0 {
					w.end(lapsed[0].id)
					over, lapsed = append(over, lapsed[0]), lapsed[1:]
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
				lapsed = slices.DeleteFunc(lapsed, func(r request) bool { return r.until <= now() })
				live = slices.DeleteFunc(live, func(r request) bool {
					if r.until > now() {
						return false
					}
					r.until = now() + remembered
					lapsed = append(lapsed, r)
					return true
				})
			},
			"": func(t *rapid.T) {
				if got := counted(t, w.Gate); got != len(live) || w.Counters().Claims != len(live) {
					t.Fatalf("%d in flight, %d claims; want %d", got, w.Counters().Claims, len(live))
				}
				w.clients.each(0, func(c *client) {
					for i := range c.uses {
						u := &c.uses[i]
						var all, current int
						var tokens fleet.Tokens
						for _, r := range live {
							if named(r.client) != c.key {
								continue
							}
							all++
							if r.window == u.reserved.ends {
								current, tokens = current+1, tokens+r.reserved
							}
						}
						if u.live != all || cfg.Limits[0].Tokens.Window > 0 && (u.reserved.live != current || u.reserved.tokens != tokens) {
							t.Fatalf("the limit has %d in flight, of the window until %v %d with %d tokens; want %d, %d and %d", u.live, u.reserved.ends, u.reserved.live, u.reserved.tokens, all, current, tokens)
						}
					}
				})
				for name, p := range w.settings.Load().pools {
					want := 0
					for _, r := range live {
						if r.pool == name {
							want++
						}
					}
					if got := int(p.live.Load()); got != want {
						t.Fatalf("%d in flight in %s; want %d", got, name, want)
					}
				}
			},
		})
	})
}

// TestPoolsThatEnvoyPassesByAreNamed: by requests that run in another pool and reached no
// server of their own, once. The attempt that failed at nobody's address tells no pool.
func TestPoolsThatEnvoyPassesByAreNamed(t *testing.T) {
	cfg := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1})
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 10, Endpoints: make([]fleet.Endpoint, 1)})
	for _, row := range []struct {
		before       fleet.Outcome
		attempt      int
		pool, passed string
	}{
		{fleet.Outcome{}, 1, "q", "p"},
		{fleet.Outcome{}, 1, "p", ""},
		{fleet.Outcome{}, 1, "none", ""},
		{fleet.Outcome{Kind: fleet.AttemptEnded, Attempt: 1, Cause: fleet.CauseConnectFailed}, 2, "q", "p"},
		{fleet.Outcome{Kind: fleet.AttemptEnded, Attempt: 1, Cause: fleet.CauseConnectFailed, Endpoint: fleet.EndpointKey{Pool: "p"}}, 2, "q", ""},
		{fleet.Outcome{Kind: fleet.AttemptStarted, Attempt: 1, Endpoint: fleet.EndpointKey{Pool: "p"}}, 2, "q", ""},
	} {
		w := newWorld(cfg, 1, nil)
		a := w.ask("a")
		w.Admit(&a)
		tell := func(o fleet.Outcome) string {
			o.ID, o.At = a.ID, w.clock.now()
			return w.Apply(o)
		}
		if row.before.Kind != 0 {
			if pool := tell(row.before); pool != "" {
				t.Errorf("%+v: %q is passed by already", row, pool)
			}
		}
		o := fleet.Outcome{Kind: fleet.AttemptStarted, Attempt: row.attempt, Endpoint: fleet.EndpointKey{Pool: row.pool}}
		if pool := tell(o); pool != row.passed {
			t.Errorf("%+v: passed %q by; want %q", row, pool, row.passed)
		}
		o.Attempt, o.Endpoint.Pool = row.attempt+1, "p"
		if pool := tell(o); pool != "" {
			t.Errorf("%+v: passed %q by, where it ran", row, pool)
		}
		if pool := tell(o); pool != "" {
			t.Errorf("%+v: passed %q by twice", row, pool)
		}
		unknown := o
		unknown.ID = "another"
		if pool := w.Apply(unknown); pool != "" {
			t.Errorf("%+v: passed %q by, for a request that wasn't let in", row, pool)
		}
	}
}

// TestRequestsCountInThePoolWhereTheyRun: Envoy tried one again in the next pool. The
// first has its place back, for its client too, and the next one's ends are what they
// come to.
func TestRequestsCountInThePoolWhereTheyRun(t *testing.T) {
	cfg := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1})
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 10, Endpoints: make([]fleet.Endpoint, 1)})
	w := newWorld(cfg, 1, nil)
	a := w.ask("a")
	w.Admit(&a)
	w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 1, At: w.clock.now(), Endpoint: fleet.EndpointKey{Pool: "p"}})
	again := fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 2, At: w.clock.now(), Endpoint: fleet.EndpointKey{Pool: "q"}}
	if pool := w.Apply(again); pool != "" {
		t.Errorf("Envoy passed %s by, in which its first attempt was", pool)
	}
	w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: w.clock.now(), Endpoint: fleet.EndpointKey{Pool: "p"}}) // late
	q := w.settings.Load().pools["q"]
	if p := w.pool(); p.live.Load() != 0 || q.live.Load() != 1 {
		t.Errorf("%d in flight in p and %d in q", p.live.Load(), q.live.Load())
	}
	for _, c := range w.Clients(10) {
		if c.InFlight > 0 && c.Pool != "q" {
			t.Errorf("its client has %+v", c)
		}
	}
	b := w.ask("b")
	b.Unplaced = true
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 1, Places: 1}, {Name: "q", Limit: 10, InFlight: 1, Places: 10}})
	if v := w.Admit(&b); !v.Admitted {
		t.Errorf("p is empty: %+v", v)
	}
	if again := w.ask("a"); w.Admit(&again).Reason != ReasonConcurrency {
		t.Error("the client has a second request in flight")
	}
	if q.foreign.Load() != 0 {
		t.Errorf("%d in q pass for others' work", q.foreign.Load())
	}
	w.end(a.ID)
	w.end(b.ID)
	if n := counted(t, w.Gate); n != 0 || w.pool().live.Load() != 0 || q.live.Load() != 0 {
		t.Errorf("%d in flight at the end", n)
	}
}

// TestRevivedRequestsCountWhereTheyRun: the first word of one comes after its lease.
func TestRevivedRequestsCountWhereTheyRun(t *testing.T) {
	cfg := config()
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 10, Endpoints: make([]fleet.Endpoint, 1)})
	w := newWorld(cfg, 10, nil)
	a := w.ask("a")
	w.Admit(&a)
	w.tick(unconfirmedLease + time.Millisecond)
	w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Attempt: 1, At: w.clock.now(), Endpoint: fleet.EndpointKey{Pool: "q"}})
	if p, q := w.pool().live.Load(), w.settings.Load().pools["q"].live.Load(); p != 0 || q != 1 {
		t.Errorf("%d in flight in p, %d in q", p, q)
	}
	w.end(a.ID)
	if n := counted(t, w.Gate); n != 0 {
		t.Errorf("%d in flight at the end", n)
	}
}

func TestSignsOfEarlierAttemptsAreLate(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	a := w.ask("a")
	w.Admit(&a)
	tell := func(kind fleet.OutcomeKind, attempt int) {
		w.Apply(fleet.Outcome{Kind: kind, ID: a.ID, Attempt: attempt, At: w.clock.now()})
	}
	tell(fleet.AttemptStarted, 2)
	tell(fleet.AttemptEnded, 1) // of the one before, and late
	w.tick(unconfirmedLease)
	if got := counted(t, w.Gate); got != 1 {
		t.Errorf("%d in flight; want the second attempt to go on", got)
	}
	tell(fleet.AttemptEnded, 2)
	tell(fleet.AttemptStarted, 1)
	w.tick(unconfirmedLease)
	if got := counted(t, w.Gate); got != 0 {
		t.Errorf("%d in flight after the last attempt ended; want none", got)
	}
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

func TestSecondRequestUnderOneIDTakesThePlaceOfTheFirst(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	a := w.ask("a")
	w.Admit(&a)
	w.Admit(&a)
	if got := counted(t, w.Gate); got != 1 {
		t.Errorf("%d in flight; want one", got)
	}
	w.tick(unconfirmedLease)
	a.At = w.clock.now()
	w.Admit(&a) // over one that lapsed
	if n := w.Counters().Claims; n != 1 || counted(t, w.Gate) != 1 {
		t.Errorf("%d claims; want one", n)
	}
	w.end(a.ID)
	if n := w.Counters().Claims; n != 0 || counted(t, w.Gate) != 0 {
		t.Errorf("%d claims after the end; want none", n)
	}
}

func TestCallerLowersItsClassAndNeverRaisesIt(t *testing.T) {
	limit := fleet.Limit{Name: "l", Key: fleet.ClientKeyAddress, Clients: []fleet.LimitClient{
		{ID: "10.0.0.1", Class: fleet.ClassInteractive, Weight: 1}, {ID: "10.0.0.2", Class: fleet.ClassBatch, Weight: 3},
	}}
	w := newWorld(config(limit), 1000, nil)
	for _, row := range []struct {
		id     string
		class  fleet.RequestClass
		weight float64
	}{
		{"10.0.0.1", fleet.ClassInteractive, interactiveWeight},
		{"10.0.0.1", fleet.ClassBatch, batchWeight},
		{"10.0.0.2", fleet.ClassInteractive, 3 * batchWeight},
		{"10.0.0.3", fleet.ClassBatch, batchWeight},
		{"10.0.0.3", fleet.ClassInteractive, interactiveWeight},
	} {
		a := w.ask("")
		a.Client, a.Class = ClientOf(fleet.ClientKeyAddress, []byte(row.id)), row.class
		if b := w.bid(&a); b.weight != row.weight {
			t.Errorf("%s asking as %v weighs %v; want %v", row.id, row.class, b.weight, row.weight)
		}
	}
}

// TestLateEndsStillSettle: the log comes when the lease is over.
func TestLateEndsStillSettle(t *testing.T) {
	limiter := &ledger{}
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 1e6, Window: time.Hour}}), 1000, limiter)
	a := w.ask("a")
	w.Admit(&a)
	w.tick(unconfirmedLease)
	if got := counted(t, w.Gate); got != 0 {
		t.Fatalf("%d in flight after the lease; want none", got)
	}
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: 200, Usage: fleet.Usage{Known: true, Input: 5, Output: 6}, At: w.clock.now()})
	if got := counted(t, w.Gate); got != 0 || limiter.settled != 11 {
		t.Errorf("%d in flight, %d tokens settled; want none and 11", got, limiter.settled)
	}
}

// ledger is a limiter that admits everything and adds up what is settled.
type ledger struct{ settled fleet.Tokens }

func (*ledger) Reserve(k LimitKey, r Rates, cost fleet.Tokens, now time.Time) Reservation {
	return Reservation{Admitted: true, Reason: ReasonAdmitted, Ticket: Ticket{Key: k, Rates: r, Cost: cost, End: now}}
}

func (l *ledger) Settle(_ Ticket, used fleet.Tokens) { l.settled += used }

// TestGateCountsRightUnderConcurrency lets everything happen at once; in the end
// nothing may be in flight.
func TestGateCountsRightUnderConcurrency(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 20}), 60, nil)
	w.Gate = New(Options{Config: config(), Now: w.clock.now, Clients: 3})
	var all sync.WaitGroup
	for n := range 8 {
		asks := make([]Ask, 2000)
		for i := range asks {
			asks[i] = w.ask(fmt.Sprint(i % 7))
			asks[i].Level = fleet.BurstLevel(i % 8)
		}
		rng := rand.New(rand.NewPCG(uint64(n), 0))
		all.Go(func() {
			for i := range asks {
				if v := w.Admit(&asks[i]); !v.Admitted {
					continue
				}
				id := asks[i].ID
				if rng.IntN(2) == 0 {
					w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: id, Node: "n", At: w.clock.now()})
				}
				if rng.IntN(4) == 0 {
					w.Cancel(id)
				}
				if rng.IntN(4) > 0 {
					w.end(id)
				}
				if rng.IntN(9) == 0 {
					w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: asks[rng.IntN(i+1)].ID, Node: "n", At: w.clock.now()})
				}
				switch {
				case i%100 == 0:
					w.clock.advance(100 * time.Millisecond)
					w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 60, InFlight: 50}})
				case i%501 == 0:
					w.Reconfigure(config())
					w.NodeGone("n")
					w.Counters()
				}
			}
		})
	}
	all.Wait()
	for range 3 {
		w.clock.advance(lease + remembered)
		w.Step(w.clock.now(), nil)
	}
	if got := counted(t, w.Gate); got != 0 || w.Counters().Claims != 0 || w.claims.n.Load() != 0 {
		t.Errorf("%d in flight, %d claims, %d places taken in the end; want none", got, w.Counters().Claims, w.claims.n.Load())
	}
}

func TestBlindGateKeepsRequestsForAsLongAsTheirLevelTakes(t *testing.T) {
	for _, row := range []struct {
		level fleet.BurstLevel
		want  time.Duration
	}{{0, unconfirmedLease}, {3, 255 * perToken}, {7, lease}} {
		w := newWorld(config(), 1000, nil)
		w.SetBlind(true, row.level == 3) // some suffice: nobody knows whose request it is
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

func TestGateThatGoesBlindKeepsWhatNothingConfirmed(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	a, b := w.ask("a"), w.ask("a")
	w.Admit(&a)
	w.Admit(&b)
	w.Apply(fleet.Outcome{Kind: fleet.AttemptEnded, ID: b.ID, Attempt: 1, At: w.clock.now()})
	w.tick(time.Second)
	w.SetBlind(true, true)
	w.tick(2 * time.Second)
	if got := counted(t, w.Gate); got != 1 {
		t.Errorf("%d in flight; want the one that no entry told of", got)
	}
}

// TestLeasesPassForEndsWhereNobodyTellsOfThem: of a sidecar whose log comes ends are
// told, and a lease that is over teaches nothing; of a silent one nothing else does.
func TestLeasesPassForEndsWhereNobodyTellsOfThem(t *testing.T) {
	for _, row := range []struct{ some, all, confirmed, want bool }{
		{false, false, false, false}, {false, false, true, false}, {true, false, false, true},
		{true, false, true, false}, {true, true, false, true}, {true, true, true, true},
	} {
		w := newWorld(config(), 1000, nil)
		w.SetBlind(row.some, row.all)
		a := w.ask("a")
		w.Admit(&a)
		if row.confirmed {
			w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
		}
		w.tick(lease)
		w.tick(time.Millisecond)
		if got := w.settings.Load().pools["p"].levels[a.Level].events; (got > 0) != row.want || counted(t, w.Gate) != 0 {
			t.Errorf("%+v: %v ends, %d in flight", row, got, counted(t, w.Gate))
		}
	}
}

// TestLeasesOfSilentSidecarsDontGrow: seven of ten requests of a second each nobody
// tells of.
func TestLeasesOfSilentSidecarsDontGrow(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.SetBlind(true, false)
	type run struct {
		id string
		at int
	}
	var running []run
	refused, most := 0, 0
	for i := range 20 * 120 { // 20 requests a second, for two minutes
		for len(running) > 0 && running[0].at+20 <= i {
			if running[0].at%10 < 3 {
				w.end(running[0].id)
			}
			running = running[1:]
		}
		a := w.ask(fmt.Sprint("client-", i%7))
		if v := w.Admit(&a); v.Admitted {
			if i%10 < 3 {
				w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
			}
			running = append(running, run{a.ID, i})
		} else if i > 20*60 { // by then it is known how long they take
			refused++
		}
		w.tick(50 * time.Millisecond)
		if i > 20*60 {
			most = max(most, counted(t, w.Gate))
		}
	}
	t.Logf("%d really in flight, %d counted, %d refused", len(running), most, refused)
	if refused > 0 || most > 60 {
		t.Errorf("%d counted of %d in flight, %d refused of a pool of 100", most, len(running), refused)
	}
}

// TestRequestsOfASilentSidecarCountForTheirUsualTime, where that is longer than
// the time in which its log would be back.
func TestRequestsOfASilentSidecarCountForTheirUsualTime(t *testing.T) {
	w := newWorld(config(), 1000, nil)
	short, long := w.ask("a"), w.ask("a")
	long.Level = 7
	for _, a := range []*Ask{&short, &long} {
		w.Admit(a)
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
	}
	w.NodeGone("n")
	w.tick(nodeGrace)
	if got := counted(t, w.Gate); got != 1 {
		t.Errorf("%d in flight after the grace; want the long one", got)
	}
	w.tick(lease - nodeGrace)
	if got := counted(t, w.Gate); got != 0 {
		t.Errorf("%d in flight after every lease", got)
	}
}

// TestRevivedClaimsCountFromTheirSignOfLife, and belong to the Envoy that gave it.
func TestRevivedClaimsCountFromTheirSignOfLife(t *testing.T) {
	for dies, want := range map[bool]time.Duration{false: lease, true: deadGrace} {
		w := newWorld(config(), 100, nil)
		a := w.ask("a")
		w.Admit(&a)
		w.tick(unconfirmedLease)
		w.tick(remembered - time.Second)
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
		if dies {
			w.NodeDead("n")
		}
		for _, row := range []struct {
			after time.Duration
			live  int
		}{{want - time.Millisecond, 1}, {time.Millisecond, 0}} {
			if w.tick(row.after); counted(t, w.Gate) != row.live {
				t.Errorf("its Envoy dies %v: %d count; want %d until %v", dies, counted(t, w.Gate), row.live, want)
			}
		}
	}
}

func TestAdviceForASentAwayRequestCountsNothing(t *testing.T) {
	w := newWorld(config(), 100, nil)
	a := w.ask("a")
	w.Admit(&a)
	first, second := w.Advise(&a), w.Advise(&a)
	if !first.ShouldRetry || second.RetryAfter <= first.RetryAfter {
		t.Errorf("told %+v and %+v; want two slots", first, second)
	}
	if n := w.Counters(); n.ByReason[ReasonBusy] != 0 || n.Routes[0].Refused != 0 || counted(t, w.Gate) != 1 {
		t.Errorf("counted %+v", n)
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
	// A client has in flight what is followed, and no more.
	c := w.clients.lock(w.ask("a").Client, w.clock.now().Sub(w.epoch))
	if c.live > 2 || c.account(w.pool(), fleet.ClassInteractive).live > 2 {
		t.Errorf("%d of the client in flight, %d in the pool; 2 are followed", c.live, c.account(w.pool(), fleet.ClassInteractive).live)
	}
	c.mu.Unlock()
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
	for range 100 {
		a := w.ask("client 0")
		w.Admit(&a)
		w.end(a.ID)
	}
	if n := w.Counters().ClientsShared; n != 0 {
		t.Errorf("%d requests were of clients that share a place, while there is room", n)
	}
	var ids []string
	for i := range 1000 {
		a := w.ask(fmt.Sprint("client", i))
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("client %d: %+v", i, v)
		}
		ids = append(ids, a.ID)
	}
	if n := w.Counters(); n.Clients > 64 || n.ClientsShared < 1000-64 {
		t.Errorf("%d clients are told apart, and %d requests were of others; want 64 at most, and the rest", n.Clients, n.ClientsShared)
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

// TestLapsedClaimsMakeRoom: in a table that is half full they are forgotten, so that
// requests find room; else a sign of life brings them back.
func TestLapsedClaimsMakeRoom(t *testing.T) {
	for claims, kept := range map[int]int64{1: 1, 2: 2, 3: 2, 4: 2} {
		w := &world{clock: &clock{}, limit: 100}
		w.Gate = New(Options{Config: config(), Now: w.clock.now, Claims: 4})
		w.tick(0)
		for range claims {
			a := w.ask("a")
			w.Admit(&a)
		}
		w.tick(unconfirmedLease)
		if n := w.claims.n.Load(); n != kept || counted(t, w.Gate) != 0 {
			t.Errorf("%d of 4 lapsed: %d known still, %d in flight; want %d and none", claims, n, counted(t, w.Gate), kept)
		}
	}
}

func TestUsualIsBetweenTheTwoLeases(t *testing.T) {
	w := newWorld(config(), 100, nil)
	for name, g := range map[string]*Gate{"before the first step": New(Options{Config: config()}), "at a cold start": w.Gate} {
		if got := g.Usual("p", 3); got != 255*perToken {
			t.Errorf("%v %s; want the whole budget's", got, name)
		}
	}
	if short, long, unknown := w.Usual("p", 0), w.Usual("p", 200), w.Usual("none", 3); short != unconfirmedLease || long != lease || unknown != lease {
		t.Errorf("%v, %v and %v", short, long, unknown)
	}
	w.teach(0, 60, 100*time.Millisecond, 4)
	w.teach(7, 60, 40*time.Second, 1600)
	if short, long := w.Usual("p", 0), w.Usual("p", 7); short != unconfirmedLease || long != lease {
		t.Errorf("%v and %v where answers take 0.1 s and 40 s", short, long)
	}
}

// teach runs requests one after the other, with a sign of life every ten seconds;
// their servers tell how long their answers were.
func (w *world) teach(level fleet.BurstLevel, requests int, takes time.Duration, output fleet.Tokens) {
	for range requests {
		a := w.ask("taught")
		a.Level, a.Output = level, level.UpperBudget()
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
		left := takes
		for ; left > 10*time.Second; left -= 10 * time.Second {
			w.tick(10 * time.Second)
			w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
		}
		w.tick(left)
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: 200, Cause: fleet.CauseOK, At: w.clock.now(),
			Usage: fleet.Usage{Known: true, Input: 100, Output: output}})
		w.tick(time.Millisecond)
	}
}

// near reports whether two times differ by a tenth at most.
func near(got, want time.Duration) bool { return 10*(got-want).Abs() <= want }

// TestUsualIsWhatThoseTookThatALogToldOf, of late and however long ago that was.
func TestUsualIsWhatThoseTookThatALogToldOf(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.teach(3, 100, 22*time.Second, 200)
	if got := w.Usual("p", 3); !near(got, 22*time.Second) {
		t.Errorf("%v; answers take 22 s, in which three signs of life came", got)
	}
	w.teach(3, 250, 3*time.Second, 200)
	for range 6 * 60 {
		w.tick(10 * time.Second)
	}
	if got := w.Usual("p", 3); !near(got, 3*time.Second) {
		t.Errorf("%v an hour later; want what the last took", got)
	}
}

// TestUsualOfFewCountsThoseThatStillRun: the first to end are the short ones.
func TestUsualOfFewCountsThoseThatStillRun(t *testing.T) {
	w := newWorld(config(), 100, nil)
	say := func(kind fleet.OutcomeKind, id string) {
		w.Apply(fleet.Outcome{Kind: kind, ID: id, Node: "n", Attempt: 1, At: w.clock.now()})
	}
	var ids []string
	for range 4 {
		a := w.ask("a")
		a.Output = 255
		w.Admit(&a)
		say(fleet.AttemptStarted, a.ID)
		ids = append(ids, a.ID)
	}
	w.tick(10 * time.Second)
	for _, id := range ids {
		say(fleet.Heartbeat, id)
	}
	w.tick(time.Millisecond)
	if got := w.Usual("p", 3); got != 255*perToken {
		t.Errorf("%v while none has ended; want the whole budget's", got)
	}
	b := w.ask("a")
	b.Output = 255
	w.Admit(&b)
	w.tick(100 * time.Millisecond)
	w.end(b.ID)
	w.tick(time.Millisecond)
	if got := w.Usual("p", 3); got != lease {
		t.Errorf("%v; one ended after 0.1 s, and four have run for ten seconds", got)
	}
}

// TestOneEndIsNoMean: the whole budget counts as half an end.
func TestOneEndIsNoMean(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.teach(7, 60, 20*time.Second, 800) // a token in 25 ms, as assumed
	w.teach(5, 1, 300*time.Millisecond, 1000)
	if got, want := w.Usual("p", 5), (300*time.Millisecond+1000*perToken/2)*2/3; !near(got, want) {
		t.Errorf("%v after one answer in 0.3 s; want %v", got, want)
	}
}

// TestUnseenTimeIsNoTimeInFlight: of those whose sidecar fell silent it is known that
// they ran until then, and of those that it shows again that they ran on.
func TestUnseenTimeIsNoTimeInFlight(t *testing.T) {
	for back, want := range map[bool]time.Duration{false: 3 * time.Second, true: 5 * time.Second} {
		w := newWorld(config(), 100, nil)
		w.teach(3, 50, 3*time.Second, 200)
		var ids []string
		for range 50 {
			a := w.ask("a")
			w.Admit(&a)
			w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "gone", Attempt: 1, At: w.clock.now()})
			ids = append(ids, a.ID)
		}
		w.NodeGone("gone")
		for range 14 * 20 {
			w.tick(50 * time.Millisecond)
		}
		if got := counted(t, w.Gate); got != 0 {
			t.Fatalf("%d count still", got)
		}
		for _, id := range ids[:10] {
			if back {
				w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: id, Node: "gone", Attempt: 1, At: w.clock.now()})
				w.end(id)
			}
		}
		w.tick(time.Millisecond)
		if got := w.Usual("p", 3); !near(got, want) {
			t.Errorf("%v, shown again %v; want about %v, as of 50 answers of 3 s and 10 of 14 s if they are", got, back, want)
		}
	}
}

// TestUsualOfAnUnknownLevelGoesByThePoolsSpeed, by its whole budget.
func TestUsualOfAnUnknownLevelGoesByThePoolsSpeed(t *testing.T) {
	for _, row := range []struct {
		takes time.Duration // 200 tokens, where 5 s are guessed
		level fleet.BurstLevel
		want  time.Duration
	}{
		{1250 * time.Millisecond, 5, 1023 * perToken / 4},
		{5 * time.Second, 4, 511 * perToken},
		{15 * time.Second, 2, 3 * 127 * perToken},
	} {
		w := newWorld(config(), 100, nil)
		w.teach(3, 60, row.takes, 200)
		if got := w.Usual("p", row.level); !near(got, row.want) {
			t.Errorf("level %d, where 200 tokens take %v: %v; want %v", row.level, row.takes, got, row.want)
		}
	}
}

// TestRefusedClientsGoByLeasesWhereNothingElseEnds: places become free as leases
// end, so that is what those are told that wait for one.
func TestRefusedClientsGoByLeasesWhereNothingElseEnds(t *testing.T) {
	for _, known := range []bool{false, true} {
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 10}), 100, nil)
		if known {
			w.teach(3, 60, 3*time.Second, 200)
		}
		w.SetBlind(true, true)
		w.steady("a", 3, 10, time.Second, 2*time.Minute, false)
		l, takes := &w.pool().levels[3], w.Usual("p", 3)
		if got := time.Duration(l.expected.Load()); !near(got, takes) || !near(l.hopeful(), takes) {
			t.Errorf("answers known %v: %v expected, %v hoped for; leases last %v", known, got, l.hopeful(), takes)
		}
		for range 66 * 20 { // until nobody waits any more
			w.tick(50 * time.Millisecond)
		}
		slots := 0
		for range 300 {
			a := w.ask("a")
			if v := w.Admit(&a); !v.Admitted && v.Refusal.ShouldRetry {
				slots++
			}
		}
		if want := retryMax.Seconds() * 10 / takes.Seconds(); math.Abs(float64(slots)-want) > 0.2*want {
			t.Errorf("answers known %v: %d are told to come within %v; want %.0f, of 10 places that end after %v", known, slots, retryMax, want, takes)
		}
	}
}

// steady sends so many requests a second of a client, each of which takes so long
// and is ended by its log entry where logged. It returns how many were refused,
// and the most that were counted at once.
func (w *world) steady(client string, level fleet.BurstLevel, perSecond int, takes, until time.Duration, logged bool) (refused, most int) {
	const tick = 50 * time.Millisecond
	var running []run
	for at := time.Duration(0); at < until; at += tick {
		for len(running) > 0 && running[0].until <= at {
			if logged {
				w.end(running[0].id)
			}
			running = running[1:]
		}
		if at%(time.Second/time.Duration(perSecond)) == 0 {
			a := w.ask(client)
			a.Level, a.Output = level, level.UpperBudget()
			if v := w.Admit(&a); !v.Admitted {
				refused++
			} else {
				running = append(running, run{a.ID, at + takes})
			}
			if logged {
				w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
			}
		}
		w.tick(tick)
		most = max(most, int(w.pool().live.Load()))
	}
	return refused, most
}

// run is a request that runs until then.
type run struct {
	id    string
	until time.Duration
}

// TestLeasesStayWhileTheLogIsAway: what nobody told the end of says nothing of how
// long requests take, neither after it was known nor where it never was.
func TestLeasesStayWhileTheLogIsAway(t *testing.T) {
	capped := fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 20}
	for _, row := range []struct {
		name   string
		known  bool
		level  fleet.BurstLevel
		lease  time.Duration
		counts int // at most
	}{
		{"answers of 0.3 s were told", true, 3, unconfirmedLease, 9},
		{"nothing was told, budgets of 1.6 s", false, 1, unconfirmedLease, 9},
		{"nothing was told, budgets of 3.2 s", false, 2, 127 * perToken, 14},
	} {
		for _, all := range []bool{false, true} {
			w := newWorld(config(capped), 100, nil)
			if row.known {
				w.steady("a", row.level, 4, 300*time.Millisecond, time.Minute, true)
				if got := w.Usual("p", row.level); got != unconfirmedLease {
					t.Fatalf("%s: %v beside its log", row.name, got)
				}
				for range 3 * 60 * 20 {
					w.tick(50 * time.Millisecond)
				}
			}
			w.SetBlind(true, all)
			first := w.Usual("p", row.level)
			refused, most := w.steady("a", row.level, 4, 300*time.Millisecond, 5*time.Minute, false)
			last := w.Usual("p", row.level)
			if refused > 0 || most > row.counts || first != row.lease || last != first {
				t.Errorf("%s, all away %v: %d refused of a limit of 20, %d counted at most, leases %v and %v in the end; want none, %d, and %v all along",
					row.name, all, refused, most, first, last, row.counts, row.lease)
			}
		}
	}
}
