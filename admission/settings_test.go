package admission

import (
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// crowded is a world whose pool of 100 is full: one client has 95 in flight, and
// ten others were sent away, each for one request.
func crowded(t *testing.T, cfg *fleet.Config) *world {
	t.Helper()
	w := newWorld(cfg, 100, nil)
	for range 95 {
		a := w.ask("hog")
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("an idle pool refused: %+v", v)
		}
	}
	for range 10 {
		a := w.ask("other")
		w.Refuse(&a, ReasonBusy)
	}
	w.tick(50 * time.Millisecond)
	return w
}

func TestRoutesWithoutFairShareHoldNobodyToAShare(t *testing.T) {
	fair := crowded(t, config())
	a := fair.ask("hog")
	if v := fair.Admit(&a); v.Reason != ReasonShare || v.Refusal.Concurrency != 90 {
		t.Fatalf("%+v; want the hog held to the 90 that the others leave", v)
	}
	cfg := config()
	cfg.Routes[0].FairShare = false
	unfair := crowded(t, cfg)
	a = unfair.ask("hog")
	if v := unfair.Admit(&a); !v.Admitted || v.Concurrency != 0 {
		t.Errorf("%+v; want it admitted, and no hint at a share", v)
	}
	b := unfair.ask("hog")
	if r := unfair.Refuse(&b, ReasonBusy); r.Concurrency != 96 || r.InFlight != 96 {
		t.Errorf("%+v; want it advised what it has in flight, 96", r)
	}
	// Levels have their budgets all the same, the only one all of the pool.
	for range 10 {
		a := unfair.ask("hog")
		if v := unfair.Admit(&a); !v.Admitted && v.Reason != ReasonBusy {
			t.Errorf("%+v; want the pool's limit to refuse", v)
		}
	}
	if n := counted(t, unfair.Gate); n != 100 {
		t.Errorf("%d in flight; want the level's 100", n)
	}
}

func TestClientsNearTheirShareGetAHint(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.pool().share.Store(math.Float64bits(10.0 / interactiveWeight))
	for n := 1; n <= 10; n++ {
		want := 0
		if n > 8 {
			want = 10
		}
		a := w.ask("a")
		if v := w.Admit(&a); !v.Admitted || v.Concurrency != want {
			t.Errorf("with %d of a share of 10: %+v; want a hint of %d", n, v, want)
		}
	}
}

func TestAdviceStaysWithinTheLimitOnConcurrency(t *testing.T) {
	w := newWorld(config(rated(3)), 100, nil)
	w.pool().share.Store(math.Float64bits(20))
	a := w.ask("a")
	for _, why := range []Reason{ReasonBusy, ReasonNoRoom} {
		if r := w.Refuse(&a, why); r.Concurrency != 3 {
			t.Errorf("%v: %+v; want the limit's 3, not the share of 80", why, r)
		}
	}
	if r := w.Advise(&a); r.Concurrency != 3 {
		t.Errorf("%+v; want the limit's 3, not the share of 80", r)
	}
}

func TestExceptionsInheritWhatTheyDoNotSay(t *testing.T) {
	few, many := fleet.Rate{Amount: 7, Window: time.Second}, fleet.Rate{Amount: 1e6, Window: time.Hour}
	limit := rated(3)
	limit.Key = fleet.ClientKeyAddress
	limit.Clients = []fleet.LimitClient{
		{ID: "10.0.0.1", Weight: 2},
		{ID: "10.0.0.2", Concurrency: 5},
		{ID: "10.0.0.3", Requests: few},
		{ID: "10.0.0.4", Tokens: many},
		{ID: "10.0.0.5", Concurrency: 1, Requests: few, Tokens: many, Weight: 0.5},
	}
	for _, row := range []struct {
		id          string
		concurrency int
		rates       Rates
		weight      float64
	}{
		{"10.0.0.1", 3, Rates{limit.Requests, limit.Tokens}, 2},
		{"10.0.0.2", 5, Rates{limit.Requests, limit.Tokens}, 1},
		{"10.0.0.3", 3, Rates{few, limit.Tokens}, 1},
		{"10.0.0.4", 3, Rates{limit.Requests, many}, 1},
		{"10.0.0.5", 1, Rates{few, many}, 0.5},
		{"10.0.0.6", 3, Rates{limit.Requests, limit.Tokens}, 1},
	} {
		limiter := &scripted{}
		w := newWorld(config(limit), 100, limiter)
		admitted := 0
		for range 10 {
			a := w.ask("")
			a.Client = ClientOf(fleet.ClientKeyAddress, []byte(row.id))
			if b := w.bid(&a); b.weight != row.weight*interactiveWeight {
				t.Errorf("%s weighs %v; want %v", row.id, b.weight, row.weight*interactiveWeight)
			}
			if w.Admit(&a).Admitted {
				admitted++
			}
		}
		if admitted != row.concurrency || len(limiter.rates) != admitted || limiter.rates[0] != row.rates {
			t.Errorf("%s: %d admitted of rates %+v; want %d of %+v", row.id, admitted, limiter.rates, row.concurrency, row.rates)
		}
	}
}

// TestClientsPastTheirTokensReturnAtThePaceOfTheirTokens: of 1000 tokens a minute
// a request of 300 is worth 18 seconds, from the begin of the next window on.
func TestClientsPastTheirTokensReturnAtThePaceOfTheirTokens(t *testing.T) {
	left := Quota{Limit: 1000, Remaining: 10, Window: time.Minute, Reset: 5 * time.Second}
	w := newWorld(config(rated(0)), 100, &scripted{answer: Reservation{Reason: ReasonTokens, Tokens: left}})
	for i, from := range []time.Duration{5 * time.Second, 23 * time.Second, 41 * time.Second} {
		a := w.ask("a")
		v := w.Admit(&a)
		if v.Reason != ReasonTokens || v.Standing.Tokens != left || !v.Refusal.ShouldRetry {
			t.Fatalf("%+v", v)
		}
		if wait := v.Refusal.RetryAfter; wait < from || wait > from+left.Window/10 {
			t.Errorf("refused request %d waits %v; want %v and up to %v", i, wait, from, left.Window/10)
		}
	}
	for range 40 {
		a := w.ask("a")
		if r := w.Admit(&a).Refusal; r.ShouldRetry || r.RetryAfter != retryMax {
			t.Errorf("%+v; want not to retry, since its tokens come after %v", r, retryMax)
		}
	}
	// They take nothing: there is room in the first window for one that wants less.
	a := w.ask("a")
	a.Input, a.Output = 10, 10
	if r := w.Admit(&a).Refusal; !r.ShouldRetry || r.RetryAfter < 59*time.Second {
		t.Errorf("a small one is told %+v; want the rest of the first window", r)
	}
}

// TestPromisedTokensAreRemembered while nobody of the client is there.
func TestPromisedTokensAreRemembered(t *testing.T) {
	left := Quota{Limit: 1000, Remaining: 10, Window: time.Minute, Reset: 30 * time.Second}
	w := newWorld(config(rated(0)), 100, &scripted{answer: Reservation{Reason: ReasonTokens, Tokens: left}})
	for i, again := range []bool{true, true, true, false} { // 300 each
		a := w.ask("a")
		if r := w.Admit(&a).Refusal; r.ShouldRetry != again {
			t.Errorf("number %d is told %+v; want to come back: %v", i, r, again)
		}
		w.tick(50 * time.Millisecond)
	}
}

// TestWhoIsRefusedByWhatTheLimiterToldIsNoNewcomer, as if it had been asked: it takes no
// place that others would have.
func TestWhoIsRefusedByWhatTheLimiterToldIsNoNewcomer(t *testing.T) {
	quota := Quota{Limit: 100, Remaining: 0, Window: time.Minute, Reset: 40 * time.Second}
	w := newWorld(config(rated(1)), 100, &scripted{answer: Reservation{Admitted: true, Reason: ReasonAdmitted, Requests: quota}})
	a := w.ask("a")
	if v := w.Admit(&a); !v.Admitted {
		t.Fatalf("%+v", v)
	}
	before := w.pool().fresh.Load()
	b := w.ask("a")
	if v := w.Admit(&b); v.Admitted || v.Reason != ReasonRequests {
		t.Fatalf("%+v", v)
	}
	if now := w.pool().fresh.Load(); now != before {
		t.Errorf("%d newcomers, before it %d", now, before)
	}
}

// TestNobodyIsToldToComeBeforeAnEndpointOpens: whoever is sent away, and for
// whatever reason of the pool's.
func TestNobodyIsToldToComeBeforeAnEndpointOpens(t *testing.T) {
	w := newWorld(config(), 100, nil)
	view := func(reopens time.Duration) {
		w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 0, InFlight: int(w.pool().live.Load()), Reopens: reopens}})
	}
	opens := func(in time.Duration) {
		t.Helper()
		for i := range 30 { // some of them are outside the line
			a := w.ask("a")
			a.Retry = i % 3
			for _, r := range []Refusal{w.Refuse(&a, ReasonBusy), w.Advise(&a)} {
				if r.RetryAfter < in {
					t.Errorf("request %d is told %v; want %v at the earliest", i, r.RetryAfter, in)
				}
			}
		}
	}
	w.clock.advance(time.Hour)
	view(10 * time.Second)
	opens(10 * time.Second)
	w.clock.advance(4 * time.Second) // no tick since
	opens(6 * time.Second)
	first := w.ask("new")
	if r := w.Refuse(&first, ReasonNoRoom); !r.ShouldRetry {
		t.Errorf("%+v; want a slot after the endpoint opens", r)
	}
	first.Timeout = 5 * time.Second
	if r := w.Refuse(&first, ReasonBusy); r.ShouldRetry || r.RetryAfter < 6*time.Second {
		t.Errorf("%+v; want a caller who waits 5 s not to retry", r)
	}
}

// TestALimitsSlotsWaitForTheEndpointToo: also those of the client's own limits,
// which would be earlier; and also where that is longer than anybody waits for a
// place.
func TestALimitsSlotsWaitForTheEndpointToo(t *testing.T) {
	window := Quota{Limit: 1_000_000, Window: time.Minute, Reset: time.Second}
	for _, opens := range []time.Duration{10 * time.Second, retryCap + 10*time.Second, 2 * retryMax} {
		for _, row := range []struct {
			why    Reason
			answer Reservation
		}{
			{ReasonConcurrency, Reservation{}},
			{ReasonRequests, Reservation{Reason: ReasonRequests, Requests: window}},
			{ReasonTokens, Reservation{Reason: ReasonTokens, Tokens: window}},
		} {
			t.Run(fmt.Sprint(row.why, " ", opens), func(t *testing.T) {
				w := newWorld(config(rated(2)), 100, &scripted{answer: row.answer})
				for row.why == ReasonConcurrency { // fill it
					a := w.ask("a")
					if !w.Admit(&a).Admitted {
						break
					}
				}
				early := w.ask("a")
				if r := w.Admit(&early).Refusal; r.RetryAfter >= 10*time.Second || !r.ShouldRetry {
					t.Fatalf("%+v of an open pool; want a short wait", r)
				}
				w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, InFlight: int(w.pool().live.Load()), Reopens: opens}})
				last := time.Duration(0)
				for i := range 3 {
					a := w.ask("a")
					v := w.Admit(&a)
					if row.why == ReasonConcurrency && v.Refusal.ShouldRetry && v.Refusal.RetryAfter <= last+time.Millisecond {
						t.Errorf("request %d waits %v, the one before it %v; want each a slot of its own", i, v.Refusal.RetryAfter, last)
					}
					last = v.Refusal.RetryAfter
					if r := v.Refusal; v.Admitted || v.Reason != row.why || r.RetryAfter < min(opens, retryMax) || r.ShouldRetry != (opens < retryMax) {
						t.Errorf("request %d: %+v; want it refused for %v, and told %v at the earliest", i, v, row.why, opens)
					}
				}
			})
		}
	}
}

// TestOneAbsurdUsageDoesNotMoveTheMeans that limits are learned from.
func TestOneAbsurdUsageDoesNotMoveTheMeans(t *testing.T) {
	w := newWorld(config(), 100, nil)
	answer := func(input, output fleet.Tokens) {
		a := w.ask("a")
		a.Input, a.Output = 100, 200
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: 200, Cause: fleet.CauseOK, Usage: fleet.Usage{Known: true, Input: input, Output: output}})
	}
	for range 100 {
		answer(100, 150)
	}
	w.tick(50 * time.Millisecond)
	level := w.ask("a").Level
	before := w.tick(50 * time.Millisecond).Levels[level]
	answer(1e9, 1e9)
	w.tick(50 * time.Millisecond)
	after := w.tick(50 * time.Millisecond).Levels[level]
	if before.MeanOutput != 150 || before.MeanInput != 100 || after.MeanOutput > 2*before.MeanOutput || after.MeanInput > 2*before.MeanInput {
		t.Errorf("means of %.0f and %.0f tokens, then %.0f and %.0f", before.MeanInput, before.MeanOutput, after.MeanInput, after.MeanOutput)
	}
}

// TestHeldRequestsLeaveNoTrace: whoever is asked for again in a moment has no slot,
// is not counted as refused, and has not come before its time.
func TestHeldRequestsLeaveNoTrace(t *testing.T) {
	w := newWorld(config(rated(1)), 100, &scripted{})
	first := w.ask("a")
	w.Admit(&first)
	before := w.Counters()
	b := w.ask("a")
	b.Hold = true
	for range 5 {
		if v := w.Admit(&b); v.Admitted || !v.Held || v.Reason != ReasonConcurrency || v.Refusal != (Refusal{}) {
			t.Fatalf("%+v; want it held for its client's concurrency", v)
		}
	}
	if after := w.Counters(); !reflect.DeepEqual(after, before) {
		t.Errorf("counters %+v, before %+v", after, before)
	}
	b.Retry = 1
	if !w.BeginHold(&b) {
		t.Error("it has a slot that it comes before")
	}
	b.Hold = false
	if v := w.Admit(&b); v.Admitted || v.Held || !v.Refusal.ShouldRetry {
		t.Errorf("%+v; want it refused", v)
	}
	if c := w.clients.lock(b.Client, 0); c.use("l").live != 1 {
		t.Errorf("%d in flight; want 1", c.use("l").live)
	} else {
		c.mu.Unlock()
	}
	w.Cancel(first.ID)
	b.Hold = true
	if v := w.Admit(&b); !v.Admitted || v.Held {
		t.Errorf("%+v; want it admitted", v)
	}
	full := w.ask("b") // the whole pool is taken
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, InFlight: 1}})
	w.Refuse(&full, ReasonBusy)
	full.Retry = 1
	if w.BeginHold(&full) {
		t.Error("it was told to come later and came at once")
	}
}

func TestOpenPoolsLetCallersBackSoon(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, Reopens: 10 * time.Second}})
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100}})
	a := w.ask("a")
	if r := w.Refuse(&a, ReasonBusy); !r.ShouldRetry || r.RetryAfter > time.Second {
		t.Errorf("%+v of a pool that is open again; want a short wait", r)
	}
}

// TestClosedPoolOutlastsThePatienceForPlaces: a wait for a place may not be longer
// than 30 s; one for an endpoint that said when it opens may be.
func TestClosedPoolOutlastsThePatienceForPlaces(t *testing.T) {
	w := newWorld(config(), 100, nil)
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, Reopens: 40 * time.Second}})
	a := w.ask("a")
	if r := w.Refuse(&a, ReasonBusy); !r.ShouldRetry || r.RetryAfter < 40*time.Second || r.RetryAfter > retryMax {
		t.Errorf("%+v; want a slot 40 to 60 s ahead", r)
	}
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, Reopens: retryMax + time.Second}})
	b := w.ask("b")
	if r := w.Refuse(&b, ReasonBusy); r.ShouldRetry || r.RetryAfter != retryMax {
		t.Errorf("%+v; want not to retry within the longest wait there is", r)
	}
}

// TestWorkElsewhereTakesNobodysPlace: what runs on servers that take no more (they
// drain, are closed or ejected) leaves the others as many places as they have.
func TestWorkElsewhereTakesNobodysPlace(t *testing.T) {
	for _, elsewhere := range []int{0, 8, 30} {
		w := newWorld(config(), 8, nil)
		for range elsewhere {
			a := w.ask("before")
			if v := w.Admit(&a); !v.Admitted {
				t.Fatalf("%+v", v)
			}
		}
		view := PoolView{Name: "p", Limit: 8, InFlight: elsewhere, Elsewhere: elsewhere, Places: 8 + elsewhere}
		step := func() {
			w.clock.advance(50 * time.Millisecond)
			w.Step(w.clock.now(), []PoolView{view})
		}
		step()
		for i := range 8 {
			a := w.ask([]string{"a", "b"}[i%2])
			a.Unplaced = true
			if v := w.Admit(&a); !v.Admitted {
				t.Errorf("%d elsewhere: number %d of 8 is refused: %+v", elsewhere, i, v)
			}
			view.InFlight++
			step()
		}
		a := w.ask("a")
		a.Unplaced = true
		if v := w.Admit(&a); v.Admitted {
			t.Errorf("%d elsewhere: a ninth entered", elsewhere)
		}
	}
}

// TestPoolsHoldTheirLimitAndWhatIsElsewhere: once.
func TestPoolsHoldTheirLimitAndWhatIsElsewhere(t *testing.T) {
	for name, row := range map[string]struct {
		view         PoolView
		slewed, want float64
	}{
		"all take requests":                  {PoolView{Limit: 100}, 100, 100},
		"some drains":                        {PoolView{Limit: 100, Elsewhere: 30}, 100, 130},
		"some is closed":                     {PoolView{Limit: 100, Closed: 40, Elsewhere: 30}, 100, 90},
		"was ejected just now":               {PoolView{Limit: 100, Elsewhere: 30}, 150, 150},
		"was ejected just now, has more":     {PoolView{Limit: 100, Elsewhere: 60}, 150, 160},
		"ejected beside one that is closed":  {PoolView{Limit: 100, Closed: 40, Elsewhere: 70}, 200, 130},
		"risk fell just now, and one drains": {PoolView{Limit: 100, Elsewhere: 30}, 50, 80},
		"all are closed":                     {PoolView{Limit: 100, Closed: 100, Reopens: time.Second, Elsewhere: 70}, 100, 100},
	} {
		if got := row.view.holds(row.slewed); math.Abs(got-row.want) > 1e-9 {
			t.Errorf("%s: %v; want %v", name, got, row.want)
		}
	}
}

// TestReopenedPoolsHoldAtOnceWhatTheyDid: their closing is no estimate, and after
// it nothing rises slowly.
func TestReopenedPoolsHoldAtOnceWhatTheyDid(t *testing.T) {
	w := newWorld(config(), 100, nil)
	view := PoolView{Name: "p", Limit: 100, Closed: 100, Reopens: 30 * time.Second}
	var state PoolState
	step := func() {
		w.clock.advance(50 * time.Millisecond)
		state = w.Step(w.clock.now(), []PoolView{view})[0]
	}
	var told []time.Duration
	for ; view.Reopens > 0; view.Reopens -= 50 * time.Millisecond {
		step()
		if len(told) < 60 && view.Reopens < 5*time.Second {
			a := w.ask(fmt.Sprint("refused-", len(told)))
			r := w.Refuse(&a, ReasonBusy)
			if r.RetryAfter < view.Reopens {
				t.Fatalf("told to come in %v, and the pool opens in %v", r.RetryAfter, view.Reopens)
			}
			told = append(told, r.RetryAfter)
		}
	}
	// At 25 ms for each of 255 tokens 100 places end 16 requests a second, and three
	// tenths of them are for those that return.
	if last := told[len(told)-1]; last > 15*time.Second {
		t.Errorf("the last of 60 is told to come in %v", last)
	}
	view.Closed, view.Reopens = 0, 0
	step()
	if state.Limit != 100 {
		t.Errorf("a limit of %v; want 100", state.Limit)
	}
	for i := range 60 {
		a := w.ask(fmt.Sprint("new-", i))
		if v := w.Admit(&a); !v.Admitted {
			t.Fatalf("number %d is refused: %+v", i, v)
		}
		view.InFlight++
		if i%10 == 0 {
			step()
		}
	}
}

// TestHalfClosedPoolsAreDividedByWhatIsOpen: a pool is full when those of its
// servers are that are open.
func TestHalfClosedPoolsAreDividedByWhatIsOpen(t *testing.T) {
	w := newWorld(config(), 100, nil)
	for range 50 {
		a := w.ask("hog")
		w.Admit(&a)
	}
	other := w.ask("newcomer")
	w.Refuse(&other, ReasonBusy)
	w.clock.advance(50 * time.Millisecond)
	w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 100, Closed: 50, InFlight: 50}})
	a := w.ask("hog")
	if v := w.Admit(&a); v.Reason != ReasonShare {
		t.Errorf("the hog has all that is open, and gets %+v", v)
	}
}

// TestWhatTheConfigTakesAndGivesCountsAtOnce: a pool that was drained holds what it
// did when it is back, and one that grows what it is now; risk alone slews.
func TestWhatTheConfigTakesAndGivesCountsAtOnce(t *testing.T) {
	w := &world{clock: &clock{}}
	w.Gate = New(Options{Config: config(), Now: w.clock.now})
	limit := func(v PoolView) float64 {
		v.Name = "p"
		w.clock.advance(50 * time.Millisecond)
		return w.Step(w.clock.now(), []PoolView{v})[0].Limit
	}
	is := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 0.01*want {
			t.Errorf("%s: a limit of %v; want %v", what, got, want)
		}
	}
	usual := PoolView{Limit: 90, Capacity: 100}
	limit(usual)
	for range 100 {
		limit(usual)
	}
	is("at a risk of 0.1", limit(usual), 90)
	for range 1000 {
		is("drained", limit(PoolView{Capacity: None}), 0)
	}
	is("back", limit(usual), 90)
	is("twice as large", limit(PoolView{Limit: 180, Capacity: 200}), 180)
	is("half as large", limit(PoolView{Limit: 45, Capacity: 50}), 45)
	got := limit(PoolView{Limit: 5, Capacity: 50})
	if got < 43 || got >= 45 {
		t.Errorf("a limit of %v 50 ms after the risk rose; want it to fall slowly", got)
	}
}

// TestLimitIsThatOfThoseThatStay: sick servers, which have no part of the limit, leave
// or join; those that stay hold what they did. What still moves with risk goes on to.
func TestLimitIsThatOfThoseThatStay(t *testing.T) {
	type view struct{ limit, capacity, want float64 }
	for name, views := range map[string][]view{
		"two of four are ejected, and leave":  {{256, 256, 256}, {128, 256, 128}, {128, 128, 128}},
		"nine of ten are ejected, and drain":  {{640, 640, 640}, {64, 640, 64}, {64, 64, 64}},
		"nine join that are not ready":        {{64, 64, 64}, {64, 640, 64}},
		"one of two drains, and is back":      {{128, 128, 128}, {64, 64, 64}, {128, 128, 128}},
		"all drain and half of them are back": {{128, 128, 128}, {0, None, 0}, {64, 64, 64}},
	} {
		w := &world{clock: &clock{}}
		w.Gate = New(Options{Config: config(), Now: w.clock.now})
		for i, v := range views {
			step := func() float64 {
				w.clock.advance(50 * time.Millisecond)
				return w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: v.limit, Capacity: v.capacity}})[0].Limit
			}
			got := step()
			if i > 0 && v.capacity == views[i-1].capacity { // only risk moves: let it
				for range 400 {
					got = step()
				}
			}
			if math.Abs(got-v.want) > 0.01 {
				t.Errorf("%s: a limit of %v in step %d; want %v", name, got, i, v.want)
			}
		}
	}
	// Four at a risk that fell: the limit is on its way up by a tenth a second. Three
	// leave, and the one that stays has a quarter of the way before it.
	w := &world{clock: &clock{}}
	w.Gate = New(Options{Config: config(), Now: w.clock.now})
	step := func(d time.Duration, limit, capacity float64) float64 {
		w.clock.advance(d)
		return w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: limit, Capacity: capacity}})[0].Limit
	}
	step(time.Second, 100, 256)
	if got := step(time.Second, 256, 256); math.Abs(got-110) > 0.01 {
		t.Errorf("a limit of %v a second after it was 100; want 110", got)
	}
	if got := step(time.Second, 64, 64); math.Abs(got-1.1*27.5) > 0.01 {
		t.Errorf("a limit of %v for the one of four that stays; want a tenth more than a quarter of 110", got)
	}
	if got := step(time.Second, 64, 0); math.Abs(got-1.21*27.5) > 0.01 { // the config's part is not known
		t.Errorf("a limit of %v a second later; want a tenth more", got)
	}
}
