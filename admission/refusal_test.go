package admission_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/admission/ratelimit"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// noon is the begin of a window of whatever length.
var noon = time.Date(2024, 6, 21, 12, 0, 0, 0, time.UTC)

// limited is a gate with one limit, and the clock it goes by.
func limited(l fleet.Limit) (*admission.Gate, *time.Time) {
	l.Name, l.Key = "team", fleet.ClientKeyAuthorization
	now := noon
	g := admission.New(admission.Options{
		Limiter: ratelimit.NewEmbedded(), Now: func() time.Time { return now },
		Config: &fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, FairShare: true, Usage: true}},
			Limits: []fleet.Limit{l},
		},
	})
	return g, &now
}

func ask(n int, at time.Time) *admission.Ask {
	return &admission.Ask{
		ID: fmt.Sprintf("1718924567123-000-%04d", n), Route: "r", Pool: "p",
		Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte("Bearer a")),
		Level:  3, Class: fleet.ClassInteractive, Input: 100, Output: 200, At: at, Seed: uint64(n),
	}
}

func TestClientPastItsRateReturnsInTheNextWindow(t *testing.T) {
	g, now := limited(fleet.Limit{Requests: fleet.Rate{Amount: 10, Window: time.Minute}})
	*now = noon.Add(40 * time.Second)
	var waits []time.Duration
	for n := range 20 {
		v := g.Admit(ask(n, *now))
		if v.Admitted != (n < 10) {
			t.Fatalf("request %d: %+v", n, v)
		}
		if v.Admitted {
			continue
		}
		if v.Reason != admission.ReasonRequests || v.Standing.Policy != "team" || v.Standing.Requests.Remaining != 0 {
			t.Errorf("request %d: %+v", n, v)
		}
		if r := v.Refusal; r.ShouldRetry {
			waits = append(waits, r.RetryAfter)
		} else {
			t.Errorf("request %d is told not to retry: %+v", n, r)
		}
	}
	for i, wait := range waits {
		// Slots are 6 s apart, the limit's own pace, from the window's begin on, with
		// a jitter of less than a slot, as far as callers wait so long.
		from, until := 20*time.Second+time.Duration(i)*6*time.Second, 26*time.Second+time.Duration(i)*6*time.Second
		if from > time.Minute {
			from = 20 * time.Second
		}
		if until = min(until, time.Minute); wait < from || wait > until {
			t.Errorf("refused request %d waits %v; want %v to %v", i, wait, from, until)
		}
	}
}

// TestWhoFindsAWindowUsedUpEarlyReturnsInTheNext: all for whom that one has room, in the
// time between its begin and when they would not wait any longer, and nobody else.
func TestWhoFindsAWindowUsedUpEarlyReturnsInTheNext(t *testing.T) {
	for _, row := range []struct {
		amount, callers int
		at              time.Duration // in the window that is used up
		timeout, waits  time.Duration
	}{
		{60, 80, 5 * time.Second, 0, time.Minute},
		{60, 80, time.Second, 0, time.Minute},
		{60, 80, 30 * time.Second, 0, time.Minute},
		{60, 80, 55 * time.Second, 10 * time.Second, 10 * time.Second},
		{10, 3, 7 * time.Second, 0, time.Minute},
		{10, 12, 100 * time.Millisecond, 0, time.Minute},
		{600, 900, 5 * time.Second, 0, time.Minute},
	} {
		g, now := limited(fleet.Limit{Requests: fleet.Rate{Amount: int64(row.amount), Window: time.Minute}})
		g.Step(*now, []admission.PoolView{{Name: "p", Limit: 1000, Capacity: 1000, Places: 1000}})
		for n := range row.amount {
			if v := g.Admit(ask(n, *now)); !v.Admitted {
				t.Fatalf("%+v: request %d: %+v", row, n, v)
			}
		}
		*now = now.Add(row.at)
		begins := time.Minute - row.at
		var waits []time.Duration
		hopeless := 0
		for n := range row.callers {
			a := ask(1000+n, *now)
			a.Timeout = row.timeout
			switch r := g.Admit(a).Refusal; {
			case !r.ShouldRetry:
				hopeless++
			case r.RetryAfter < begins || r.RetryAfter > row.waits:
				t.Errorf("%+v: caller %d is told %v; want %v to %v", row, n, r.RetryAfter, begins, row.waits)
			default:
				waits = append(waits, r.RetryAfter)
			}
		}
		if want := max(0, row.callers-row.amount); hopeless != want {
			t.Errorf("%+v: %d are told not to retry; want %d", row, hopeless, want)
		}
		if over := slices.Max(waits) - slices.Min(waits); over < (row.waits-begins)/2 {
			t.Errorf("%+v: those told to come do so within %v of %v", row, over, row.waits-begins)
		}
	}
}

func TestClientPastALongWindowIsToldNotToRetry(t *testing.T) {
	g, now := limited(fleet.Limit{Requests: fleet.Rate{Amount: 1, Window: time.Hour}})
	g.Admit(ask(1, *now))
	v := g.Admit(ask(2, *now))
	if v.Admitted || v.Refusal.ShouldRetry || v.Refusal.RetryAfter != time.Minute {
		t.Errorf("%+v; want not to retry, and 60 s for who does", v)
	}
}

func TestRequestAboveAWholeWindowIsToldNotToRetry(t *testing.T) {
	g, now := limited(fleet.Limit{Tokens: fleet.Rate{Amount: 250, Window: time.Minute}})
	a := ask(1, *now)
	a.InputAtLeast = 51
	v := g.Admit(a)
	if v.Admitted || v.Reason != admission.ReasonTooMany || v.Refusal.ShouldRetry {
		t.Errorf("%+v; want too many tokens and no retry", v)
	}
	if n := g.Counters(); n.Claims != 0 {
		t.Errorf("%d claims of a refused request", n.Claims)
	}
}

// TestAnEstimateAboveAWholeWindowRefusesNobodyForGood: where the prompt may be shorter,
// the request takes a whole window that nobody has used of, and is settled by what it
// took.
func TestAnEstimateAboveAWholeWindowRefusesNobodyForGood(t *testing.T) {
	g, now := limited(fleet.Limit{Tokens: fleet.Rate{Amount: 15_000, Window: time.Minute}})
	long := func(n int) *admission.Ask {
		a := ask(n, *now)
		a.Input, a.InputAtLeast = 17_857, 14_800
		return a
	}
	if v := g.Admit(ask(1, *now)); !v.Admitted || v.Standing.Tokens.Remaining != 14_700 {
		t.Fatalf("%+v", v)
	}
	v := g.Admit(long(2))
	if v.Admitted || v.Reason != admission.ReasonTokens || !v.Refusal.ShouldRetry || v.Refusal.RetryAfter < time.Minute {
		t.Fatalf("%+v; want it told to come back in the next window", v)
	}
	*now = now.Add(time.Minute)
	if v = g.Admit(long(3)); !v.Admitted || v.Standing.Tokens.Limit != 15_000 || v.Standing.Tokens.Remaining != 0 {
		t.Fatalf("%+v; want it in, and the window taken", v)
	}
	if n := g.Counters().TokensReserved; n != 300+15_000 {
		t.Errorf("%d tokens reserved; want 300 and a whole window", n)
	}
	g.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: long(3).ID, Code: 200, Cause: fleet.CauseOK, At: *now,
		Usage: fleet.Usage{Known: true, Input: 10_000, Output: 200}})
	if v = g.Admit(ask(4, *now)); !v.Admitted || v.Standing.Tokens.Remaining != 15_000-10_200-300 {
		t.Errorf("%+v; want it settled to 10200 tokens", v)
	}
}

func TestRefusedByTheLimiterGivesItsPlaceBack(t *testing.T) {
	g, now := limited(fleet.Limit{Concurrency: 1, Requests: fleet.Rate{Amount: 1, Window: time.Second}})
	g.Admit(ask(1, *now))
	g.Cancel(ask(1, *now).ID)
	if v := g.Admit(ask(2, *now)); v.Admitted || v.Reason != admission.ReasonRequests {
		t.Fatalf("%+v; want the rate used up: a cancelled request stays counted", v)
	}
	*now = now.Add(time.Second)
	if v := g.Admit(ask(3, *now)); !v.Admitted {
		t.Fatalf("%+v; want the place of the refused one back", v)
	}
}

// window is a limiter that lets in so many requests until it is told otherwise.
type window struct {
	left, asked int
	reset       time.Duration
	transient   bool
}

func (w *window) Reserve(_ admission.LimitKey, r admission.Rates, _ fleet.Tokens, _ time.Time) admission.Reservation {
	w.asked++
	got := admission.Reservation{Admitted: w.left > 0, Reason: admission.ReasonAdmitted, Transient: w.transient}
	if w.left--; !got.Admitted {
		w.left, got.Reason = 0, admission.ReasonRequests
	}
	got.Requests = admission.Quota{Limit: int64(r.Requests.Amount), Remaining: int64(w.left), Window: r.Requests.Window, Reset: w.reset}
	return got
}

func (w *window) Settle(admission.Ticket, fleet.Tokens) {}

// crowded is a gate with as many requests of one client in flight as its limit of two
// lets it have at a time, which were the last of its window.
func crowded(t *testing.T, reset time.Duration) (*admission.Gate, *window, *time.Time, func(fleet.Rate)) {
	w := &window{left: 2, reset: reset}
	now := noon
	config := func(r fleet.Rate) *fleet.Config {
		return &fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, FairShare: true}},
			Limits: []fleet.Limit{{Name: "team", Key: fleet.ClientKeyAuthorization, Concurrency: 2, Requests: r}},
		}
	}
	g := admission.New(admission.Options{Limiter: w, Now: func() time.Time { return now }, Config: config(fleet.Rate{Amount: 50, Window: time.Minute})})
	for n := range 2 {
		if v := g.Admit(ask(n, now)); !v.Admitted {
			t.Fatalf("%+v", v)
		}
	}
	return g, w, &now, func(r fleet.Rate) { g.Reconfigure(config(r)) }
}

// TestWhoIsPastItsConcurrencyWaitsForItsWindow, where the limiter said that that is used
// up and it begins later than a place is free: without asking it again, and not held.
func TestWhoIsPastItsConcurrencyWaitsForItsWindow(t *testing.T) {
	g, w, now, _ := crowded(t, 40*time.Second)
	*now = now.Add(6 * time.Second)
	for n := 2; n < 5; n++ {
		a := ask(n, *now)
		a.Hold = n == 2
		v := g.Admit(a)
		if v.Admitted || v.Held || v.Reason != admission.ReasonRequests || w.asked != 2 {
			t.Fatalf("%+v, the limiter was asked %d times; want it refused at once, for its requests", v, w.asked)
		}
		if want := (admission.Quota{Limit: 50, Window: time.Minute, Reset: 34 * time.Second}); v.Standing.Requests != want || v.Standing.Policy != "team" {
			t.Errorf("standing %+v; want %+v", v.Standing, want)
		}
		// Each has a place of its own in the next window.
		from := 34*time.Second + time.Duration(n-2)*time.Minute/50
		if r := v.Refusal; !r.ShouldRetry || r.RetryAfter < from || r.RetryAfter > from+1201*time.Millisecond || r.InFlight != 2 || r.Concurrency != 2 {
			t.Errorf("request %d: %+v; want it told to come back in %v", n, r, from)
		}
	}
	if c := g.Counters(); c.Claims != 2 {
		t.Errorf("%d claims; want those of two requests", c.Claims)
	}
	*now = now.Add(34 * time.Second)
	for n := range 2 {
		g.Cancel(ask(n, *now).ID)
	}
	w.left = 50
	if v := g.Admit(ask(6, *now)); !v.Admitted {
		t.Errorf("in the next window: %+v", v)
	}
}

// TestWhoIsPastItsConcurrencyWaitsForAPlace, where nothing is known of its window, or no
// more, and where a place becomes free later than the window begins.
func TestWhoIsPastItsConcurrencyWaitsForAPlace(t *testing.T) {
	for name, row := range map[string]struct {
		reset  time.Duration
		change func(g *admission.Gate, w *window, now *time.Time, rate func(fleet.Rate))
	}{
		"the window has ended": {time.Second, func(_ *admission.Gate, _ *window, now *time.Time, _ func(fleet.Rate)) {
			*now = now.Add(time.Second)
		}},
		"the rate is another": {40 * time.Second, func(_ *admission.Gate, _ *window, _ *time.Time, rate func(fleet.Rate)) {
			rate(fleet.Rate{Amount: 100, Window: time.Minute})
		}},
		"the limiter said otherwise later": {40 * time.Second, func(g *admission.Gate, w *window, now *time.Time, _ func(fleet.Rate)) {
			*now = now.Add(time.Millisecond)
			w.left = 20
			g.Cancel(ask(1, *now).ID)
			g.Admit(ask(2, *now))
		}},
		"a part alone said that nothing is left": {40 * time.Second, func(g *admission.Gate, w *window, now *time.Time, _ func(fleet.Rate)) {
			*now = now.Add(time.Millisecond)
			w.left = 20
			g.Cancel(ask(1, *now).ID)
			g.Admit(ask(2, *now))
			g.Cancel(ask(2, *now).ID)
			*now = now.Add(time.Millisecond)
			w.left, w.transient = 1, true
			g.Admit(ask(3, *now))
			g.Admit(ask(4, *now))
		}},
		"answers take longer": {time.Millisecond, func(*admission.Gate, *window, *time.Time, func(fleet.Rate)) {}},
	} {
		g, w, now, rate := crowded(t, row.reset)
		row.change(g, w, now, rate)
		asked := w.asked
		v := g.Admit(ask(9, *now))
		if v.Reason != admission.ReasonConcurrency || v.Standing.Requests.Limit != 0 || v.Refusal.InFlight != 2 || w.asked != asked {
			t.Errorf("%s: %+v; want it refused for its concurrency", name, v)
		}
	}
}

// TestAnswersOfTheLimiterOvertakeEachOther: what it said before nothing was left is not
// taken for what it said after.
func TestAnswersOfTheLimiterOvertakeEachOther(t *testing.T) {
	g, w, now, _ := crowded(t, 40*time.Second)
	g.Cancel(ask(1, *now).ID)
	w.left = 20
	g.Admit(ask(2, *now)) // asked at the same time, and heard of later
	if v := g.Admit(ask(3, *now)); v.Reason != admission.ReasonRequests {
		t.Errorf("%+v; want it refused for its requests", v)
	}
}

// TestSpentWindowsAreNotTakenForOthers: clients that the table has no room for count as
// one in flight, and each has a rate of its own.
func TestSpentWindowsAreNotTakenForOthers(t *testing.T) {
	now := noon
	w := &window{left: 1, reset: 40 * time.Second}
	g := admission.New(admission.Options{Limiter: w, Now: func() time.Time { return now }, Clients: 1, Config: &fleet.Config{
		Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 1000, Endpoints: make([]fleet.Endpoint, 1)}},
		Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive}},
		Limits: []fleet.Limit{{Name: "team", Key: fleet.ClientKeyAuthorization, Concurrency: 1, Requests: fleet.Rate{Amount: 50, Window: time.Minute}}},
	}})
	g.Admit(ask(0, now)) // it takes the table's only place
	concurrency := 0
	for n := 1; n <= 500; n++ {
		w.left = 1
		a := ask(n, now)
		a.Client = admission.ClientOf(fleet.ClientKeyAuthorization, fmt.Append(nil, n))
		switch v := g.Admit(a); v.Reason {
		case admission.ReasonRequests:
			t.Fatalf("request %d is refused for the rate of another: %+v", n, v)
		case admission.ReasonConcurrency:
			concurrency++
		}
	}
	if concurrency < 400 {
		t.Errorf("%d of 500 refused for the concurrency of clients that share a place", concurrency)
	}
}

func TestTokensAreSettledByWhatWasUsed(t *testing.T) {
	for name, row := range map[string]struct {
		outcome fleet.Outcome
		left    int64 // of 1000, after a request that reserved 300, then 300 of the next
	}{
		"usage":              {fleet.Outcome{Code: 200, Cause: fleet.CauseOK, Usage: fleet.Usage{Known: true, Input: 80, Output: 20}}, 600},
		"more than reserved": {fleet.Outcome{Code: 200, Cause: fleet.CauseOK, Usage: fleet.Usage{Known: true, Input: 300, Output: 200}}, 200},
		"no usage told":      {fleet.Outcome{Code: 200, Cause: fleet.CauseOK}, 400},
		"an error":           {fleet.Outcome{Code: 500, Cause: fleet.CauseServerError}, 700},
		"refused upstream":   {fleet.Outcome{Code: 429, Cause: fleet.CauseThrottled}, 700},
		"never connected":    {fleet.Outcome{Cause: fleet.CauseConnectFailed}, 700},
		"broken off":         {fleet.Outcome{Code: 200, Cause: fleet.CauseClientGone, ResponseBytes: 500}, 400},
		"broken off, told":   {fleet.Outcome{Code: 200, Cause: fleet.CauseClientGone, Usage: fleet.Usage{Known: true, Input: 100, Output: 7}}, 593},
	} {
		g, now := limited(fleet.Limit{Tokens: fleet.Rate{Amount: 1000, Window: time.Minute}})
		first := ask(1, *now)
		g.Admit(first)
		row.outcome.Kind, row.outcome.ID, row.outcome.At = fleet.RequestEnded, first.ID, *now
		g.Apply(row.outcome)
		g.Apply(row.outcome) // told twice
		if v := g.Admit(ask(2, *now)); v.Standing.Tokens.Remaining != row.left {
			t.Errorf("%s: %d tokens left; want %d", name, v.Standing.Tokens.Remaining, row.left)
		}
	}
}

// TestBrokenStreamsAreSettledByTheirLength: an answer of the route told 10 bytes
// per token.
func TestBrokenStreamsAreSettledByTheirLength(t *testing.T) {
	g, now := limited(fleet.Limit{Tokens: fleet.Rate{Amount: 1000, Window: time.Minute}})
	end := func(n int, o fleet.Outcome) {
		g.Admit(ask(n, *now))
		o.Kind, o.ID, o.At, o.Code = fleet.RequestEnded, ask(n, *now).ID, *now, 200
		g.Apply(o)
	}
	end(1, fleet.Outcome{Cause: fleet.CauseOK, ResponseBytes: 1000, Usage: fleet.Usage{Known: true, Input: 100, Output: 100}})
	end(2, fleet.Outcome{Cause: fleet.CauseClientGone, ResponseBytes: 500})  // 50 tokens
	end(3, fleet.Outcome{Cause: fleet.CauseReset, ResponseBytes: 1_000_000}) // no more than reserved
	if got := g.Admit(ask(4, *now)).Standing.Tokens.Remaining; got != 1000-200-150-300-300 {
		t.Errorf("%d tokens left; want 50", got)
	}
}

func TestRatiosAreCountedPerRoute(t *testing.T) {
	g, now := limited(fleet.Limit{Concurrency: 100})
	for n, out := range []fleet.Tokens{200, 130, 60, 400, 300} { // level 3 is 128 … 255
		g.Admit(ask(n, *now))
		g.Apply(fleet.Outcome{
			Kind: fleet.RequestEnded, ID: ask(n, *now).ID, At: *now, Code: 200, Cause: fleet.CauseOK,
			Usage: fleet.Usage{Known: true, Input: 100, Cached: 25, Output: out},
		})
	}
	stranger := ask(9, *now)
	stranger.Route = "unknown"
	g.Admit(stranger)
	n := g.Counters()
	want := admission.RouteCounters{
		Route: "r", Admitted: 5, WithUsage: 5, Within: 2, Above: 2, Below: 1,
		Input: 500, Cached: 125, Output: 1090, OutputReserved: 1000,
	}
	if n.Routes[0] != want {
		t.Errorf("%+v; want %+v", n.Routes[0], want)
	}
	if n.Routes[1].Route != "other" || n.Routes[1].Admitted != 1 || n.ByReason[admission.ReasonAdmitted] != 6 {
		t.Errorf("%+v; want the unknown route counted as other", n)
	}
}

func TestExceptionsOfALimitCountForTheirClientsAlone(t *testing.T) {
	g, now := limited(fleet.Limit{Concurrency: 1, Clients: []fleet.LimitClient{
		{ID: "sha256:" + sha("Bearer vip"), Concurrency: 3, Weight: 2},
	}})
	for name, want := range map[string]int{"Bearer vip": 3, "Bearer a": 1} {
		admitted := 0
		for n := range 5 {
			a := ask(100*want+n, *now)
			a.Client = admission.ClientOf(fleet.ClientKeyAuthorization, []byte(name))
			if g.Admit(a).Admitted {
				admitted++
			}
		}
		if admitted != want {
			t.Errorf("%s has %d in flight; want %d", name, admitted, want)
		}
	}
}

func TestReconfigureKeepsWhatIsInFlight(t *testing.T) {
	g, now := limited(fleet.Limit{Concurrency: 2})
	g.Admit(ask(1, *now))
	cfg := &fleet.Config{
		Routes: []fleet.Route{{Name: "r", FairShare: true}}, // the pool is gone
		Limits: []fleet.Limit{{Name: "team", Key: fleet.ClientKeyAuthorization, Concurrency: 1}},
	}
	g.Reconfigure(cfg)
	for range 3 {
		g.Step(*now, nil)
	}
	if v := g.Admit(ask(2, *now)); v.Admitted || v.Reason != admission.ReasonConcurrency {
		t.Fatalf("%+v; want the smaller limit to count the request from before", v)
	}
	g.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: ask(1, *now).ID, Code: 200, Cause: fleet.CauseOK, At: *now})
	if v := g.Admit(ask(3, *now)); !v.Admitted {
		t.Fatalf("%+v; want room after its end", v)
	}
}

func TestClientNearItsLimitGetsAHint(t *testing.T) {
	g, now := limited(fleet.Limit{Concurrency: 10})
	for n := 1; n <= 10; n++ {
		want := 0
		if n > 8 {
			want = 10
		}
		if v := g.Admit(ask(n, *now)); v.Concurrency != want {
			t.Errorf("with %d in flight the hint is %d; want %d", n, v.Concurrency, want)
		}
	}
	v := g.Admit(ask(11, *now))
	if r := v.Refusal; r.Concurrency != 10 || r.InFlight != 10 || !r.ShouldRetry {
		t.Errorf("%+v; want 10 of 10", v)
	}
}

func sha(value string) string {
	sum := sha256.Sum256([]byte(value))
	return hex.EncodeToString(sum[:])
}

// down is a limiter that does not answer.
type down struct{}

func (down) Reserve(admission.LimitKey, admission.Rates, fleet.Tokens, time.Time) admission.Reservation {
	return admission.Reservation{Reason: admission.ReasonLimiterDown}
}
func (down) Settle(admission.Ticket, fleet.Tokens) {}

func TestRefusedWithoutALimiterWaitASecondAtLeast(t *testing.T) {
	g := admission.New(admission.Options{
		Limiter: down{}, Now: func() time.Time { return noon },
		Config: &fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r"}},
			Limits: []fleet.Limit{{Name: "l", Key: fleet.ClientKeyAuthorization, Requests: fleet.Rate{Amount: 9, Window: time.Minute}}},
		},
	})
	told := map[time.Duration]bool{}
	for n := range 100 {
		v := g.Admit(ask(n, noon))
		r := v.Refusal
		if v.Reason != admission.ReasonLimiterDown || !r.ShouldRetry || r.RetryAfter < time.Second || r.RetryAfter > 2*time.Second {
			t.Fatalf("%+v; want 1 s … 2 s and a retry", v)
		}
		told[r.RetryAfter] = true
	}
	if len(told) < 80 {
		t.Errorf("%d different waits of 100; want them spread", len(told))
	}
	if n := g.Counters(); n.Claims != 0 {
		t.Errorf("%d claims of refused requests", n.Claims)
	}
}

// TestSeveralAnswersAreJudgedEachByItself: four answers of 200 tokens, of a
// request that was classed by a budget of 200 for each.
func TestSeveralAnswersAreJudgedEachByItself(t *testing.T) {
	g, now := limited(fleet.Limit{Concurrency: 100})
	a := ask(1, *now)
	a.Output, a.Answers = 800, 4
	g.Admit(a)
	g.Apply(fleet.Outcome{
		Kind: fleet.RequestEnded, ID: a.ID, At: *now, Code: 200, Cause: fleet.CauseOK,
		Usage: fleet.Usage{Known: true, Input: 100, Output: 800},
	})
	if n := g.Counters().Routes[0]; n.Within != 1 || n.Above != 0 || n.Output != 800 {
		t.Errorf("%+v; want it within its level", n)
	}
}

// TestReloadThatShortensWindowsIsToldAtOnce: who was refused by the old limit holds up
// nobody in the new one's windows.
func TestReloadThatShortensWindowsIsToldAtOnce(t *testing.T) {
	rate := func(n int64, window time.Duration) fleet.Rate { return fleet.Rate{Amount: n, Window: window} }
	for name, row := range map[string]struct{ before, after fleet.Limit }{
		"requests": {fleet.Limit{Requests: rate(10, time.Minute)}, fleet.Limit{Requests: rate(100, time.Second)}},
		"tokens":   {fleet.Limit{Tokens: rate(1000, time.Minute)}, fleet.Limit{Tokens: rate(10_000, time.Second)}},
	} {
		g, now := limited(row.before)
		*now = noon.Add(5 * time.Second)
		n := 0
		told := func() (r admission.Refusal) {
			for v := (admission.Verdict{Admitted: true}); v.Admitted; n++ {
				v = g.Admit(ask(n, *now))
				r = v.Refusal
			}
			return r
		}
		for range 40 {
			told()
		}
		l := row.after
		l.Name, l.Key = "team", fleet.ClientKeyAuthorization
		g.Reconfigure(&fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 10_000, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, Usage: true}},
			Limits: []fleet.Limit{l},
		})
		if r := told(); !r.ShouldRetry || r.RetryAfter > 2*time.Second {
			t.Errorf("%s: told %+v in a window of a second", name, r)
		}
	}
}
