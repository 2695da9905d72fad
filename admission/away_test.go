package admission

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestWhoAServerTurnedAwayStaysOut of its pool until it said, and nobody else does.
func TestWhoAServerTurnedAwayStaysOut(t *testing.T) {
	cfg := config()
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 10, Endpoints: make([]fleet.Endpoint, 1)})
	w := newWorld(cfg, 100, nil)
	w.TurnAway(named("a"), "p", 20*time.Second, 0, w.clock.now())
	w.TurnAway(named("a"), "p", 5*time.Second, 0, w.clock.now()) // says less
	w.TurnAway(named("a"), "none", time.Hour, 0, w.clock.now())
	try := func(who, pool string, enters bool) Verdict {
		t.Helper()
		a := w.ask(who)
		a.Pool = pool
		v := w.Admit(&a)
		if v.Admitted != enters || !enters && v.Reason != ReasonServerLimit {
			t.Errorf("%s in %s: %+v", who, pool, v)
		}
		return v
	}
	v := try("a", "p", false)
	if r := v.Refusal; !r.ShouldRetry || r.RetryAfter < 20*time.Second || r.RetryAfter > 25*time.Second {
		t.Errorf("it is told %+v; want 20 s and a little", r)
	}
	try("a", "q", true)
	try("b", "p", true)
	a := w.ask("a")
	a.Timeout = 10 * time.Second
	if v := w.Admit(&a); v.Refusal.ShouldRetry {
		t.Errorf("who waits 10 s is told %+v", v.Refusal)
	}
	if wait := w.Wait(&a); wait < 20*time.Second {
		t.Errorf("it would wait %v for that pool", wait)
	}
	a.Pool = "q"
	if wait := w.Wait(&a); wait >= 20*time.Second {
		t.Errorf("it would wait %v for another pool", wait)
	}
	if r := w.Refuse(&Ask{ID: "1", Route: "r", Pool: "p", Client: named("a"), Level: 3, Class: fleet.ClassInteractive, At: w.clock.now()}, ReasonBusy); r.RetryAfter < 20*time.Second {
		t.Errorf("refused by the plan it is told %+v", r)
	}
	w.clock.advance(20 * time.Second)
	try("a", "p", true)
}

// TestACrowdThatIsKeptOutComesBackInTurn: not all at the moment that the server named.
func TestACrowdThatIsKeptOutComesBackInTurn(t *testing.T) {
	w := newWorld(config(), 8, nil)
	w.TurnAway(named("a"), "p", 10*time.Second, 0, w.clock.now())
	last, retries := time.Duration(0), 0
	for range 40 {
		a := w.ask("a")
		if r := w.Admit(&a).Refusal; r.ShouldRetry {
			retries++
			last = max(last, r.RetryAfter)
		}
	}
	if retries < 8 || last < 11*time.Second {
		t.Errorf("%d come back, the last after %v", retries, last)
	}
}

// TestOneOfWhomAServerTurnedAwayAsksFirst: the others would all ask in vain, while the
// server wants none yet.
func TestOneOfWhomAServerTurnedAwayAsksFirst(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.TurnAway(named("a"), "p", 10*time.Second, 0, w.clock.now())
	enter := func(want bool) {
		t.Helper()
		a := w.ask("a")
		v := w.Admit(&a)
		if v.Admitted != want || !want && (v.Reason != ReasonServerLimit || v.Refusal.RetryAfter > 15*time.Second) {
			t.Errorf("it is told %+v", v)
		}
	}
	w.clock.advance(10 * time.Second)
	enter(true)
	enter(false)
	w.TurnAway(named("a"), "p", 10*time.Second, 0, w.clock.now()) // in vain
	w.clock.advance(10 * time.Second)
	enter(true)
	enter(false)
	w.clock.advance(asksFirst)
	enter(true)
	enter(true)
	w.TurnAway(named("a"), "p", 10*time.Second, time.Second, w.clock.now())
	w.clock.advance(20 * time.Second) // also when it comes later
	enter(true)
	enter(false)
	w.clock.advance(2 * time.Second) // its refusals take a second
	enter(false)
	w.clock.advance(asksFirst)
	enter(true)
	enter(true)
	w.TurnAway(named("a"), "p", 10*time.Second, time.Hour, w.clock.now())
	w.clock.advance(10 * time.Second)
	enter(true)
	w.clock.advance(2*longestRefusal + asksFirst)
	enter(true)
	w.TurnAway(named("a"), "p", 10*time.Second, time.Minute, w.clock.now())
	w.clock.advance(10 * time.Second)
	asks := w.ask("a")
	w.Admit(&asks)
	enter(false)
	w.clock.advance(asksFirst)
	enter(false)
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: asks.ID, Cause: fleet.CauseOK, Code: 200, Attempt: 1, At: w.clock.now()})
	enter(true)
	enter(true)
	before := w.ask("a")
	w.Admit(&before)
	w.TurnAway(named("a"), "p", 10*time.Second, time.Minute, w.clock.now())
	w.clock.advance(10 * time.Second)
	enter(true)
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: before.ID, Cause: fleet.CauseOK, Code: 200, Attempt: 1, At: w.clock.now()})
	enter(false) // that one shows nothing of now
	w.TurnAway(named("a"), "p", 10*time.Second, time.Second, w.clock.now())
	w.clock.advance(10*time.Second + asksOnce) // it is another time then
	enter(true)
	enter(true)
}

// TestWhoAsksForOnePoolAsksForAnotherToo: what is told by a server of one pool changes
// nothing of the other.
func TestWhoAsksForOnePoolAsksForAnotherToo(t *testing.T) {
	cfg := config()
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 10, Endpoints: make([]fleet.Endpoint, 1)})
	w := newWorld(cfg, 100, nil)
	w.TurnAway(named("a"), "p", 10*time.Second, 0, w.clock.now())
	w.clock.advance(10 * time.Second)
	w.TurnAway(named("a"), "q", 10*time.Second, 0, w.clock.now())
	for i, want := range []bool{true, false} {
		a := w.ask("a")
		if v := w.Admit(&a); v.Admitted != want {
			t.Errorf("number %d is told %+v", i, v)
		}
	}
}

// TestWhoDoesNotAskAfterAllLetsAnother: it went away, the limiter refused it, or another
// pool answered.
func TestWhoDoesNotAskAfterAllLetsAnother(t *testing.T) {
	for name, leaves := range map[string]func(*world, *scripted, Ask){
		"its caller went away": func(w *world, _ *scripted, a Ask) { w.Cancel(a.ID) },
		"it failed": func(w *world, _ *scripted, a Ask) {
			w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Cause: fleet.CauseReset, Attempt: 1, At: w.clock.now()})
		},
		"another pool answered": func(w *world, _ *scripted, a Ask) {
			w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Cause: fleet.CauseOK, Code: 200, Attempt: 2, Endpoint: fleet.EndpointKey{Pool: "q"}, At: w.clock.now()})
		},
	} {
		limiter := &scripted{answer: Reservation{Admitted: true, Reason: ReasonAdmitted}}
		w := newWorld(config(rated(0)), 100, limiter)
		w.TurnAway(named("a"), "p", 10*time.Second, time.Minute, w.clock.now())
		w.clock.advance(10 * time.Second)
		enter := func(want bool) Ask {
			t.Helper()
			a := w.ask("a")
			if v := w.Admit(&a); v.Admitted != want {
				t.Errorf("%s: it is told %+v", name, v)
			}
			return a
		}
		asks := enter(true)
		enter(false)
		leaves(w, limiter, asks)
		enter(true)
		enter(false)
	}
	limiter := &scripted{answer: Reservation{Reason: ReasonRequests, Requests: Quota{Limit: 1, Window: time.Minute, Reset: time.Second}}}
	w := newWorld(config(rated(0)), 100, limiter)
	w.TurnAway(named("a"), "p", 10*time.Second, time.Minute, w.clock.now())
	w.clock.advance(10 * time.Second)
	a := w.ask("a")
	w.Admit(&a)
	limiter.answer = Reservation{Admitted: true, Reason: ReasonAdmitted}
	if a = w.ask("a"); !w.Admit(&a).Admitted {
		t.Error("nobody may ask after one whom the limiter refused")
	}
}

// TestWhoIsAwayWaitsInItsOwnQueue: others' waits are as before, and its share is theirs.
func TestWhoIsAwayWaitsInItsOwnQueue(t *testing.T) {
	waits := func(away bool) (out [4]time.Duration) {
		w := newWorld(config(), 8, nil)
		w.teach(3, 20, time.Second, 100)
		for i := range 8 {
			a := w.ask(fmt.Sprint("other", i))
			w.Admit(&a)
		}
		w.tick(50 * time.Millisecond)
		if away {
			w.TurnAway(named("away"), "p", 20*time.Second, 0, w.clock.now())
			for range 5 {
				a := w.ask("away")
				if r := w.Admit(&a).Refusal; r.RetryAfter < 20*time.Second {
					t.Errorf("who is away is told %v", r.RetryAfter)
				}
			}
		}
		for i := range out {
			a := w.ask(fmt.Sprint("new", i))
			out[i] = w.Refuse(&a, ReasonBusy).RetryAfter
		}
		return out
	}
	before, beside := waits(false), waits(true)
	for i := range before {
		if before[i] == 0 || beside[i] > 2*before[i] {
			t.Errorf("number %d is told %v beside one that is away, else %v", i, beside[i], before[i])
		}
	}
	w := newWorld(config(), 8, nil)
	for i := range 8 {
		a := w.ask("big")
		a.Retry = i
		w.Admit(&a)
	}
	w.TurnAway(named("away"), "p", 30*time.Second, 0, w.clock.now())
	for range 8 {
		a := w.ask("away")
		w.Admit(&a)
	}
	w.tick(50 * time.Millisecond)
	for _, c := range w.Clients(10) {
		if c.Client == named("big") && c.Share < 8 {
			t.Errorf("beside one that is away it may have %v of 8", c.Share)
		}
	}
}

// TestAnAnswerThatEndsLetsOneAsk: a server may limit how many of a client's requests it
// has, and say to stay away for longer than they take.
func TestAnAnswerThatEndsLetsOneAsk(t *testing.T) {
	w := newWorld(config(), 100, nil)
	enter := func(want bool) (id string) {
		t.Helper()
		a := w.ask("a")
		if v := w.Admit(&a); v.Admitted != want {
			t.Errorf("it is told %+v", v)
		}
		return a.ID
	}
	ends := func(id string, code int) {
		cause := fleet.CauseOK
		if code != 200 {
			cause = fleet.CauseThrottled
		}
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: id, Cause: cause, Code: code, Attempt: 1, At: w.clock.now()})
	}
	turned := func() { w.TurnAway(named("a"), "p", 30*time.Second, 0, w.clock.now()) }
	zero, one, two, three := enter(true), enter(true), enter(true), enter(true)
	w.clock.advance(time.Second)
	turned()
	enter(false)
	w.clock.advance(asksFirst - 1)
	ends(zero, 200) // it may have ended before
	enter(false)
	w.clock.advance(1)
	ends(one, 200)
	w.clock.advance(time.Second)
	asks := enter(true)
	enter(false)
	ends(asks, 429)
	turned()
	enter(false)
	ends(two, 500) // shows nothing
	enter(false)
	w.clock.advance(time.Second)
	ends(three, 200)
	w.clock.advance(time.Second)
	asks = enter(true)
	enter(false)
	ends(asks, 200)
	four, five := enter(true), enter(true)
	w.clock.advance(time.Second)
	turned()
	w.clock.advance(asksFirst)
	ends(four, 200)
	ends(five, 200)
	enter(true) // one for each
	enter(true)
	enter(false)
}

// TestPoolsToStayAwayFromAreBounded: what is over goes first.
func TestPoolsToStayAwayFromAreBounded(t *testing.T) {
	var told aways
	pools := make([]pool, 3*mostAway)
	for i := range pools {
		told.tell(named("a"), 0, 0, away{pool: &pools[i], told: 0, until: time.Duration(1+i%2) * time.Minute})
		if n := len(told.by[named("a")]); n > mostAway {
			t.Fatalf("%d", n)
		}
	}
	last := &pools[len(pools)-1]
	told.tell(named("a"), 150*time.Second, 150*time.Second, away{pool: last, told: 150 * time.Second, until: 4 * time.Minute})
	if n := len(told.by[named("a")]); told.from(named("a"), last) != 4*time.Minute || n > mostAway/2+1 {
		t.Errorf("%d, of which half were over", n)
	}
}

// TestCredentialsThatAreToldToStayAwayAreBounded: one that may come again soon goes first,
// and all when their time is over.
func TestCredentialsThatAreToldToStayAwayAreBounded(t *testing.T) {
	var told aways
	var p pool
	one := func(i int) Client { return Client{byte(i), byte(i >> 8), 1} }
	for i := range 2 * mostTold {
		told.tell(one(i), 0, 0, away{pool: &p, told: 0, until: time.Duration(1+i) * time.Millisecond})
	}
	late := 0
	for i := mostTold; i < 2*mostTold; i++ {
		if told.from(one(i), &p) > 0 {
			late++
		}
	}
	if len(told.by) != mostTold || late < mostTold*3/4 {
		t.Errorf("%d are known, of which %d are those that are to stay away longest; want %d", len(told.by), late, mostTold)
	}
	told.step(asksOnce + mostTold*time.Millisecond)
	if n := len(told.by); n != int(told.n.Load()) || n == 0 || n > mostTold {
		t.Errorf("half way %d are known, counted %d", n, told.n.Load())
	}
	if told.step(asksOnce + 2*mostTold*time.Millisecond); len(told.by) != 0 || told.n.Load() != 0 {
		t.Errorf("in the end %d are known, counted %d", len(told.by), told.n.Load())
	}
}

// TestOneOfAClientsKeysStaysOut: clients may be told apart by something else than keys, and
// a server limits each of these.
func TestOneOfAClientsKeysStaysOut(t *testing.T) {
	w := newWorld(config(), 100, nil)
	enter := func(who, key string, want bool) Ask {
		t.Helper()
		a := w.ask(who)
		if a.Credential = named(key); key == "" {
			a.Credential = Client{}
		}
		if v := w.Admit(&a); v.Admitted != want || !want && v.Reason != ReasonServerLimit {
			t.Errorf("%s with %q is told %+v", who, key, v)
		}
		return a
	}
	w.TurnAway(named("one"), "p", 10*time.Second, 0, w.clock.now())
	enter("a", "one", false)
	enter("b", "one", false)
	enter("a", "two", true)
	enter("a", "", true)
	enter("one", "", false)
	row := ClientState{}
	for _, c := range w.Clients(10) {
		if c.Away > 0 {
			if row.Away > 0 {
				t.Errorf("%+v, and %+v", row, c)
			}
			row = c
		}
	}
	if row.Client != named("one") || row.Pool != "p" || row.Away != 10*time.Second {
		t.Errorf("who is away is shown as %+v", row)
	}
	w.clock.advance(10 * time.Second)
	asks := enter("b", "one", true)
	enter("a", "one", false)
	w.Cancel(asks.ID) // lets another
	asks = enter("a", "one", true)
	enter("b", "one", false)
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: asks.ID, Cause: fleet.CauseOK, Code: 200, Attempt: 1, At: w.clock.now()})
	enter("b", "one", true)
	enter("a", "one", true)
}

// TestKeptOutRequestsAreInNobodysWay: those of one key wait apart from what its client's
// other key, and others, wait for.
func TestKeptOutRequestsAreInNobodysWay(t *testing.T) {
	type seen struct {
		own, others [4]time.Duration
		share       float64
		backlogged  bool
		waiting     int
	}
	look := func(out int) (s seen) {
		w := newWorld(config(), 8, nil)
		w.teach(3, 20, time.Second, 100)
		for i := range 8 {
			a := w.ask(fmt.Sprint("other", i%4))
			w.Admit(&a)
		}
		w.tick(50 * time.Millisecond)
		w.TurnAway(named("one"), "p", 30*time.Second, 0, w.clock.now())
		for range out {
			a := w.ask("a")
			a.Credential, a.Counts = named("one"), true
			if v := w.Admit(&a); v.Reason != ReasonServerLimit || !v.Refusal.ShouldRetry || v.Refusal.RetryAfter < 30*time.Second {
				t.Errorf("who is kept out is told %+v", v)
			}
		}
		st := w.tick(50 * time.Millisecond)
		s.share, s.backlogged = st.Share, st.Levels[3].Backlogged
		for _, c := range w.Clients(100) {
			if c.Client == named("one") {
				s.waiting = c.Waiting
			}
		}
		for i := range s.own {
			a, b := w.ask("a"), w.ask("b")
			a.Credential, a.Counts, b.Counts = named("two"), true, true
			s.own[i], s.others[i] = w.Admit(&a).Refusal.RetryAfter, w.Admit(&b).Refusal.RetryAfter
		}
		return s
	}
	none, twenty := look(0), look(20)
	for i := 2; i < len(none.own); i++ {
		if none.own[i] == 0 || none.others[i] == 0 || twenty.own[i] > 3*none.own[i]/2 || twenty.others[i] > 3*none.others[i]/2 {
			t.Errorf("number %d is told %v, one of another client %v; without those that are kept out %v and %v", i, twenty.own[i], twenty.others[i], none.own[i], none.others[i])
		}
	}
	if twenty.share != none.share || twenty.backlogged {
		t.Errorf("beside 20 that are kept out a client's share is %v, and its level is backlogged %v; else %v", twenty.share, twenty.backlogged, none.share)
	}
	if none.waiting != 0 || twenty.waiting != 20 {
		t.Errorf("%d and %d are shown to wait; want none, and 20", none.waiting, twenty.waiting)
	}
}

// TestKeptOutRequestsComeBackInTheirSlots, which are used by that; who comes before gets a
// later one.
func TestKeptOutRequestsComeBackInTheirSlots(t *testing.T) {
	w := newWorld(config(), 8, nil)
	w.teach(3, 20, time.Second, 100)
	waiting := func() (n int) {
		for _, c := range w.Clients(100) {
			n += c.Waiting
		}
		return n
	}
	ask := func(retry int) Verdict {
		a := w.ask("a")
		a.Credential, a.Retry, a.Counts = named("one"), retry, true
		return w.Admit(&a)
	}
	w.TurnAway(named("one"), "p", 10*time.Second, 0, w.clock.now())
	first := ask(0).Refusal.RetryAfter
	second := ask(0).Refusal.RetryAfter
	if second <= first || waiting() != 2 {
		t.Errorf("they are told %v and %v, and %d wait", first, second, waiting())
	}
	if early := ask(1).Refusal.RetryAfter; early <= second || waiting() != 2 {
		t.Errorf("who comes early is told %v, and %d wait; want later than %v, and two", early, waiting(), second)
	}
	w.clock.advance(first)
	if v := ask(1); !v.Admitted || waiting() != 1 {
		t.Errorf("in its slot one is told %+v, and %d wait", v, waiting())
	}
	w.TurnAway(named("one"), "p", 10*time.Second, 0, w.clock.now()) // in vain
	if waiting() != 1 {
		t.Errorf("%d wait after it is told so again", waiting())
	}
	w.tick(30 * time.Second)
	w.tick(asksOnce)
	if waiting() != 0 || len(w.aways.by) != 0 {
		t.Errorf("%d wait long after their slots, %d are known", waiting(), len(w.aways.by))
	}
}

// TestANewerWordCounts, where the request began after the one before was told.
func TestANewerWordCounts(t *testing.T) {
	w := newWorld(config(), 100, nil)
	told := func() time.Duration {
		a := w.ask("a")
		return w.Admit(&a).Refusal.RetryAfter
	}
	w.TurnAway(named("a"), "p", time.Minute, 0, w.clock.now())
	w.clock.advance(5 * time.Second)
	w.TurnAway(named("a"), "p", time.Second, 5*time.Second, w.clock.now()) // that one began before
	if got := told(); got < 50*time.Second {
		t.Errorf("by an older request's end it is told %v", got)
	}
	w.TurnAway(named("a"), "p", time.Second, 4*time.Second, w.clock.now())
	if got := told(); got < time.Second || got > 2*longestRefusal {
		t.Errorf("by a newer word it is told %v; want a second, and the time in which one asks", got)
	}
}

// TestWhoAsksAndIsServedElsewhereLetsAnother ask.
func TestWhoAsksAndIsServedElsewhereLetsAnother(t *testing.T) {
	cfg := config()
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "q", MaxInFlight: 10, Endpoints: make([]fleet.Endpoint, 1)})
	w := newWorld(cfg, 100, nil)
	w.TurnAway(named("a"), "p", 10*time.Second, time.Minute, w.clock.now())
	w.clock.advance(10 * time.Second)
	enter := func(want bool) Ask {
		t.Helper()
		a := w.ask("a")
		if v := w.Admit(&a); v.Admitted != want {
			t.Errorf("it is told %+v", v)
		}
		return a
	}
	asks := enter(true)
	enter(false)
	w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: asks.ID, Attempt: 2, Endpoint: fleet.EndpointKey{Pool: "q"}, At: w.clock.now()})
	enter(true)
	enter(false)
}

// TestTwoClientsOfOneKeyMayComeEarlyAtOnce: the slot that both take is there once.
func TestTwoClientsOfOneKeyMayComeEarlyAtOnce(t *testing.T) {
	w := newWorld(config(), 100, nil)
	bids := make([]bid, 2)
	w.TurnAway(named("one"), "p", 10*time.Second, 0, w.clock.now())
	a := w.ask("a")
	a.Credential = named("one")
	w.Admit(&a)
	w.TurnAway(named("one"), "p", time.Millisecond, -time.Second, w.clock.now())
	for i := range bids {
		a := w.ask(fmt.Sprint("client", i))
		a.Credential, a.Retry = named("one"), 1
		bids[i] = w.bid(&a)
		c := w.meet(&bids[i])
		w.arrive(c, &bids[i], false)
		c.mu.Unlock()
		if !bids[i].early || !bids[i].kept {
			t.Fatalf("number %d is not early", i)
		}
	}
	for i := range bids {
		c := w.meet(&bids[i])
		w.served(c, &bids[i])
		c.mu.Unlock()
	}
}

// TestWhoObeysTheServerItselfIsNotEarly, though others of its credential wait for later.
func TestWhoObeysTheServerItselfIsNotEarly(t *testing.T) {
	w := newWorld(config(), 16, nil)
	w.teach(3, 20, 2*time.Second, 100)
	ids := make([]string, 14)
	for i := range ids {
		a := w.ask("a")
		w.Admit(&a)
		ids[i] = a.ID
	}
	told := w.clock.now()
	for _, id := range ids {
		w.Apply(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "n", ID: id, Attempt: 1, Code: 429, Cause: fleet.CauseThrottled, RetryAfter: 10 * time.Second, Endpoint: fleet.EndpointKey{Pool: "p"}, At: told})
		w.TurnAway(named("a"), "p", 10*time.Second, 0, told)
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: id, Attempt: 1, Code: 429, Cause: fleet.CauseThrottled, At: told})
	}
	other := w.ask("a")
	w.Admit(&other) // waits, and has a slot
	w.clock.advance(10 * time.Second)
	var last time.Duration
	for i := range ids {
		a := w.ask("a")
		a.Retry = 1
		v := w.Admit(&a)
		if i == 0 != v.Admitted {
			t.Errorf("number %d is told %+v", i, v)
		}
		last = max(last, v.Refusal.RetryAfter)
	}
	if last > 3*time.Second {
		t.Errorf("the last is told %v", last)
	}
}

// TestSlotsBeginAfterOneHasAsked: those that come while it does would come in vain.
func TestSlotsBeginAfterOneHasAsked(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.teach(3, 20, time.Second, 100)
	w.TurnAway(named("a"), "p", 10*time.Second, 500*time.Millisecond, w.clock.now())
	ask := func() time.Duration {
		a := w.ask("a")
		return w.Admit(&a).Refusal.RetryAfter
	}
	first, second, third := ask(), ask(), ask()
	if first < 10*time.Second || first > 11*time.Second {
		t.Errorf("the first is told %v", first)
	}
	if most := first + asksFirst + time.Second; min(second, third) < 10*time.Second+asksFirst+time.Second || max(second, third) > most+time.Second {
		t.Errorf("the others are told %v and %v, after the first's %v and the time in which it alone asks", second, third, first)
	}
}

// TestKeptOutRequestsAreShownOnce, also of a client that asks in both classes.
func TestKeptOutRequestsAreShownOnce(t *testing.T) {
	w := newWorld(config(), 100, nil)
	for _, class := range []fleet.RequestClass{fleet.ClassInteractive, fleet.ClassBatch} {
		a := w.ask("a")
		a.Class = class
		w.Admit(&a)
	}
	w.TurnAway(named("a"), "p", 10*time.Second, 0, w.clock.now())
	for range 3 {
		a := w.ask("a")
		w.Admit(&a)
	}
	rows, waiting := 0, 0
	for _, c := range w.Clients(10) {
		rows, waiting = rows+1, waiting+c.Waiting
		if c.Away == 0 {
			t.Errorf("%+v; want it away", c)
		}
	}
	if rows != 2 || waiting != 3 {
		t.Errorf("%d rows with %d that wait; want 2 with 3", rows, waiting)
	}
}
