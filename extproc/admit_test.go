package extproc

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

func TestAdmissionIsToldWhatTheRequestIs(t *testing.T) {
	w, g := gated(t, func(in *plan.Inputs, _ *Options) { in.Routes[0].BytesPerToken = 2 })
	m := chat(map[string]string{
		"content-length": "4000", "authorization": "Bearer a", "x-stainless-timeout": "600",
		"x-stainless-read-timeout": "20", "x-stainless-retry-count": "2",
	})
	m.peek["n"], m.peek["stream"] = 3, true
	w.ask(t, m)
	want := admission.Ask{
		ID: firstID, Route: "chat", Pool: "h100", Level: fleet.LevelOf(100), Class: fleet.ClassInteractive,
		Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte("Bearer a")), Credential: admission.ClientOf(fleet.ClientKeyAuthorization, []byte("Bearer a")),
		Input: 2000, InputAtLeast: 125, Output: 300, Answers: 3, Stream: true, Timeout: 20 * time.Second, Hold: true, Retry: 2, Counts: true,
		At: g.last().At, Seed: g.last().Seed,
	}
	if got := g.last(); got != want {
		t.Errorf("asked %+v\nwant %+v", got, want)
	}
	id, _ := ParseID(firstID)
	if g.last().Seed != id.Seed() || g.last().At.IsZero() {
		t.Error("no seed or no time")
	}
	e := w.lastEvent()
	if e.Admission != admission.ReasonAdmitted || e.Answers != 3 || e.Class != fleet.ClassInteractive || e.Tries != 1 {
		t.Errorf("event %+v", e)
	}
}

// TestWhoAsks: each route tells clients apart by its own key, and who doesn't
// show it is known by the address. Providers know a caller by its credential all the same.
func TestWhoAsks(t *testing.T) {
	by := func(key fleet.ClientKey, value string) admission.Client {
		return admission.ClientOf(key, []byte(value))
	}
	address := by(fleet.ClientKeyAddress, "192.0.2.7")
	for _, row := range []struct {
		name string
		key  fleet.ClientKey
		m    func(*message)
		want admission.Client
	}{
		{"authorization", fleet.ClientKeyAuthorization, func(m *message) { m.headers["authorization"] = "Bearer a" }, by(fleet.ClientKeyAuthorization, "Bearer a")},
		{"no key configured", 0, func(m *message) { m.headers["authorization"] = "Bearer a" }, by(fleet.ClientKeyAuthorization, "Bearer a")},
		{"API key", fleet.ClientKeyAuthorization, func(m *message) { m.headers["x-api-key"] = "k" }, by(fleet.ClientKeyAuthorization, "Bearer k")},
		{"authorization beside another API key", fleet.ClientKeyAuthorization, func(m *message) {
			m.headers["x-api-key"], m.headers["authorization"] = "k", "Bearer a"
		}, by(fleet.ClientKeyAuthorization, "Bearer a")},
		{"no credential", fleet.ClientKeyAuthorization, func(*message) {}, address},
		{"empty credential", fleet.ClientKeyAuthorization, func(m *message) { m.headers["authorization"] = "" }, address},
		{"text claim", fleet.ClientKeyJWT, func(m *message) { m.claims = map[string]any{"sub": "ann"} }, by(fleet.ClientKeyJWT, "ann")},
		{"number claim", fleet.ClientKeyJWT, func(m *message) { m.claims = map[string]any{"sub": 1234567890123.0} }, by(fleet.ClientKeyJWT, "1234567890123")},
		{"another claim", fleet.ClientKeyJWT, func(m *message) { m.claims = map[string]any{"aud": "ann"} }, address},
		{"claim is a list", fleet.ClientKeyJWT, func(m *message) { m.claims = map[string]any{"sub": []any{"ann"}} }, address},
		{"no token", fleet.ClientKeyJWT, func(m *message) { m.headers["authorization"] = "Bearer a" }, address},
		{"SAN", fleet.ClientKeyMTLS, func(m *message) { m.san, m.subject = "spiffe://a", "CN=a" }, by(fleet.ClientKeyMTLS, "spiffe://a")},
		{"subject", fleet.ClientKeyMTLS, func(m *message) { m.subject = "CN=a" }, by(fleet.ClientKeyMTLS, "CN=a")},
		{"a claim and a key", fleet.ClientKeyJWT, func(m *message) {
			m.claims, m.headers["authorization"] = map[string]any{"sub": "ann"}, "Bearer a"
		}, by(fleet.ClientKeyJWT, "ann")},
		{"a claim and another key", fleet.ClientKeyJWT, func(m *message) {
			m.claims, m.headers["authorization"], m.headers["x-api-key"] = map[string]any{"sub": "ann"}, "Bearer a", "key"
		}, by(fleet.ClientKeyJWT, "ann")},
		{"SAN and a key", fleet.ClientKeyMTLS, func(m *message) { m.san, m.headers["authorization"] = "spiffe://a", "Bearer a" }, by(fleet.ClientKeyMTLS, "spiffe://a")},
		{"no certificate", fleet.ClientKeyMTLS, func(m *message) { m.headers["authorization"] = "Bearer a" }, address},
		{"address", fleet.ClientKeyAddress, func(m *message) { m.headers["authorization"] = "Bearer a" }, address},
		{"IPv6", fleet.ClientKeyAddress, func(m *message) { m.source = "[2001:db8:1:2:3:4:5:7]:443" }, by(fleet.ClientKeyAddress, "2001:db8:1:2::")},
		{"IPv4 in IPv6", fleet.ClientKeyAddress, func(m *message) { m.source = "[::ffff:192.0.2.7]:443" }, address},
		{"another header", fleet.ClientKeyAddress, func(m *message) {
			m.headers["x-forwarded-for"], m.headers["x-client"], m.headers["x-real-ip"] = "203.0.113.9", "bob", "203.0.113.9"
		}, address},
		{"two credentials", fleet.ClientKeyAuthorization, func(m *message) { twice(m, "authorization", "Bearer a", "Bearer junk") }, address},
		{"one credential twice", fleet.ClientKeyAuthorization, func(m *message) { twice(m, "authorization", "Bearer a", "Bearer a") }, by(fleet.ClientKeyAuthorization, "Bearer a")},
		{"nothing at all", fleet.ClientKeyAuthorization, func(m *message) { m.source = "" }, admission.Client{}},
	} {
		w, g := gated(t, func(in *plan.Inputs, _ *Options) { in.Routes[0].ClientKey, in.Routes[0].Claim = row.key, "sub" })
		m := chat(map[string]string{})
		m.source = "192.0.2.7:40000"
		row.m(&m)
		w.ask(t, m)
		if got := g.last().Client; got != row.want {
			t.Errorf("%s: %x; want %x", row.name, got, row.want)
		}
		want := row.want
		key, other := m.headers["authorization"], m.headers["x-api-key"]
		switch isToken := row.key == fleet.ClientKeyJWT; {
		case isToken && other != "":
			want = by(fleet.ClientKeyAuthorization, "Bearer "+other)
		case !isToken && key != "":
			want = by(fleet.ClientKeyAuthorization, key)
		}
		if got := g.last().Credential; got != want {
			t.Errorf("%s: the credential is %x; want %x", row.name, got, want)
		}
	}
}

// twice adds one header with two values.
func twice(m *message, key string, values ...string) {
	m.overwrite = func(r *extprocv3.ProcessingRequest) {
		headers := r.GetRequestHeaders().GetHeaders()
		for _, v := range values {
			headers.Headers = append(headers.Headers, header(key, v))
		}
	}
}

func TestPatienceIsTheShortestThatCanBeRead(t *testing.T) {
	for _, row := range []struct {
		total, read, grpc string
		want              time.Duration
	}{
		{"", "", "", 0}, {"600", "", "", 600 * time.Second}, {"600", "30", "", 30 * time.Second}, {"0.5", "", "", 500 * time.Millisecond},
		{"600", "600", "10S", 10 * time.Second}, {"", "", "250m", 250 * time.Millisecond}, {"", "", "1H", time.Hour},
		{"", "", "99999999H", maxPatience}, {"", "", "7u", 7 * time.Microsecond}, {"", "", "5n", 5}, {"", "", "2M", 2 * time.Minute},
		{"1e3", "", "", 0}, {"NOT_GIVEN", "", "", 0}, {"-5", "", "", 0}, {"NaN", "", "", 0}, {"0", "", "", 0}, {"99999999999999999999", "", "", maxPatience},
		{"1.2.3", "", "", 0}, {strings.Repeat("9", 21), "", "", 0}, {"", "", "S", 0}, {"", "", "123456789S", 0}, {"", "", "-5S", 0}, {"", "", "5s", 0},
		{"junk", "7", "junk", 7 * time.Second},
	} {
		p := pace{timeout: []byte(row.total), readTimeout: []byte(row.read), grpcTimeout: []byte(row.grpc)}
		if got := p.patience(); got != row.want {
			t.Errorf("%q, %q, %q: %s; want %s", row.total, row.read, row.grpc, got, row.want)
		}
	}
}

func TestRetriesAreACountOrNothing(t *testing.T) {
	for text, want := range map[string]int{"": 0, "0": 0, "2": 2, "-1": 0, "x": 0, "1001": 1000, "999999999999999999": 1000, "9999999999999999999": 0} {
		_, fails := strconv.ParseUint(text, 10, 63)
		if got, ok := retries([]byte(text)); got != want || ok != (fails == nil && len(text) < 19) {
			t.Errorf("%q: %d, %v; want %d", text, got, ok, want)
		}
	}
}

func TestACallerCanOnlyLowerItsClass(t *testing.T) {
	for _, row := range []struct {
		route  fleet.RequestClass
		header string
		want   fleet.RequestClass
	}{
		{0, "", fleet.ClassInteractive}, {fleet.ClassInteractive, "batch", fleet.ClassBatch}, {fleet.ClassBatch, "", fleet.ClassBatch},
		{fleet.ClassBatch, "interactive", fleet.ClassBatch}, {fleet.ClassInteractive, "BATCH", fleet.ClassInteractive},
	} {
		w, g := gated(t, func(in *plan.Inputs, _ *Options) { in.Routes[0].Class = row.route })
		m := chat(map[string]string{})
		if row.header != "" {
			m.headers[wire.HeaderRequestClass] = row.header
		}
		w.ask(t, m)
		if g.last().Class != row.want || w.lastEvent().Class != row.want {
			t.Errorf("route %s, header %q: %s; want %s", row.route, row.header, g.last().Class, row.want)
		}
	}
}

func TestAnswersMultiplyTheCostAndSaturate(t *testing.T) {
	for _, row := range []struct {
		n    any
		want fleet.Tokens
	}{
		{1, 100}, {4, 400}, {"4", 400}, {1.5, 200}, {0, 100}, {-3, 100}, {true, 100}, {"junk", 100}, {nil, 100}, {map[string]any{}, 100},
		{1e9, MaxBudget}, {1e300, MaxBudget},
	} {
		w, g := gated(t)
		m := chat(nil)
		m.peek["n"] = row.n
		w.ask(t, m)
		if got := g.last().Output; got != row.want {
			t.Errorf("n = %v: %d tokens; want %d", row.n, got, row.want)
		}
		if w.lastEvent().Level != fleet.LevelOf(100) {
			t.Errorf("n = %v: the level is that of %d tokens", row.n, w.lastEvent().Budget)
		}
	}
}

func TestWhoIsAsked(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*message)
		pool   string
		asked  bool
	}{
		{"dynamic", func(*message) {}, "h100", true},
		{"legacy", func(m *message) { m.headers[wire.HeaderRouteStrategy] = "legacy" }, "h100", true},
		{"legacy, unknown arm", func(m *message) { m.headers[wire.HeaderRouteStrategy] = "legacy"; m.cluster = "" }, "", true},
		{"doesn't generate", func(m *message) { m.route = "chat/other" }, "", false},
		{"unknown route", func(m *message) { m.route = "somewhere" }, "", false},
	} {
		w, g := gated(t)
		m := chat(map[string]string{})
		row.change(&m)
		w.ask(t, m)
		if asked := len(g.asked) > 0; asked != row.asked {
			t.Errorf("%s: asked %v", row.name, asked)
		} else if asked && g.last().Pool != row.pool {
			t.Errorf("%s: pool %q; want %q", row.name, g.last().Pool, row.pool)
		}
		if !row.asked && w.lastEvent().Admission != 0 {
			t.Errorf("%s: event says %s", row.name, w.lastEvent().Admission)
		}
	}
}

func TestPlaceIsReservedUnderTheLimitAndGivenBack(t *testing.T) {
	w, g := gated(t)
	w.ask(t, chat(nil))
	if len(w.picks) != 1 || !slices.Equal(w.limits, []int32{10}) {
		t.Fatalf("reserved %v under %v", w.picks, w.limits)
	}
	other := chat(nil)
	other.route = "chat/other" // counted without limit: never refused
	w.ask(t, other)
	if !slices.Equal(w.limits, []int32{10, 0}) {
		t.Errorf("limits %v", w.limits)
	}
	g.verdict = admission.Verdict{Reason: admission.ReasonShare, Refusal: g.refusal}
	r := w.ask(t, chat(nil))
	if r.GetImmediateResponse() == nil || len(w.picks) != 2 {
		t.Errorf("a refused request keeps its place: %v", w.picks)
	}
	if metadata(r, wire.NamespaceSteer) != nil || metadata(r, wire.NamespaceLog)[wire.KeyReason] != "share" {
		t.Errorf("refused, and yet %v", r.GetDynamicMetadata())
	}
	e := w.lastEvent()
	if e.Action != plan.ActionRefuse || e.Admission != admission.ReasonShare || e.Steered {
		t.Errorf("event %+v", e)
	}
}

// TestTakenPlacesAreDecidedAnew: with the seed of the try, so that the decision
// can be computed again from what the log shows.
func TestTakenPlacesAreDecidedAnew(t *testing.T) {
	w, _ := gated(t)
	for taken := range maxTries {
		w.full = taken
		r := w.ask(t, chat(nil))
		log := metadata(r, wire.NamespaceLog)
		id, _ := ParseID(log[wire.KeyDecision].(string))
		try, _ := log[wire.KeyTry].(string)
		if want := []string{"", "1", "2", "3"}[taken]; try != want {
			t.Errorf("%d places taken: try %q", taken, try)
		}
		again := w.plan.Decide(plan.Class{Arm: 0, Strategy: fleet.StrategyDynamic, Level: fleet.LevelOf(100), Budget: 100, Generates: true}, id.SeedOf(taken), w.live)
		if got := strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")[0]; got != w.plan.AddressText(again.Picks[0]) {
			t.Errorf("%d places taken: sent to %s; try %d of the id decides %s", taken, got, taken, w.plan.AddressText(again.Picks[0]))
		}
		if w.lastEvent().Tries != taken+1 {
			t.Errorf("%d places taken: event says %d tries", taken, w.lastEvent().Tries)
		}
	}
	w, g := gated(t)
	w.full = maxTries
	r := w.ask(t, chat(nil))
	if r.GetImmediateResponse().GetDetails() != "fairlead_all_busy" || len(w.picks) != 0 {
		t.Errorf("all places taken: %v", r)
	}
	if !slices.Equal(g.refused, []admission.Reason{admission.ReasonBusy}) {
		t.Errorf("refusals told: %v", g.refused)
	}
	if got := metadata(r, wire.NamespaceLog)[wire.KeyTry]; got != "4" || w.lastEvent().Tries != maxTries {
		t.Errorf("try %v, %d tries", got, w.lastEvent().Tries)
	}
	if e := w.lastEvent(); e.Reason != plan.ReasonAllBusy || e.Admission != admission.ReasonBusy || e.Action != plan.ActionRefuse {
		t.Errorf("event %+v", e)
	}
}

// TestSeedsOfTriesDiffer also from those of the ids around.
func TestSeedsOfTriesDiffer(t *testing.T) {
	seen := map[uint64]bool{}
	for n := int64(1); n <= 1000; n++ {
		for try := range maxTries {
			seen[(ID{n, 7}).SeedOf(try)] = true
		}
	}
	if len(seen) != 1000*maxTries || (ID{5, 7}).SeedOf(0) != (ID{5, 7}).Seed() {
		t.Errorf("%d seeds", len(seen))
	}
}

type failingStream struct {
	fakeStream
	err error
}

func (f *failingStream) SendMsg(any) error { return f.err }

func TestWhatCouldNotBeAnsweredIsGivenBack(t *testing.T) {
	w, g := gated(t)
	st := &failingStream{fakeStream: fakeStream{in: [][]byte{marshal(t, chat(nil).proto())}}, err: errors.New("gone")}
	if err := w.process(st); err == nil {
		t.Fatal("ended well")
	}
	if len(w.picks) != 0 || !slices.Equal(g.canceled, []string{firstID}) {
		t.Errorf("reserved %v, canceled %v", w.picks, g.canceled)
	}
	w, g = gated(t, func(_ *plan.Inputs, o *Options) {
		o.Observe = func(e Event) {
			if !e.Failed {
				panic("boom")
			}
		}
	})
	if err := w.process(&fakeStream{in: [][]byte{marshal(t, chat(nil).proto())}}); err == nil {
		t.Fatal("ended well")
	}
	if len(w.picks) != 0 || !slices.Equal(g.canceled, []string{firstID}) {
		t.Errorf("after a panic: reserved %v, canceled %v", w.picks, g.canceled)
	}
}

var standing = admission.Standing{
	Policy:   "standard",
	Requests: admission.Quota{Limit: 600, Remaining: 17, Window: time.Minute, Reset: 11500 * time.Millisecond},
	Tokens:   admission.Quota{Limit: 400000, Remaining: 1200, Window: time.Minute, Reset: 11500 * time.Millisecond},
}

func standingHeaders(s admission.Standing) map[string]string {
	out := map[string]string{}
	s.EachHeader(nil, func(name string, value []byte) { out[name] = string(value) })
	return out
}

func TestStandingGoesWithTheAnswer(t *testing.T) {
	w, g := gated(t)
	if got := metadata(w.ask(t, chat(nil)), wire.NamespaceLimit); got != nil {
		t.Errorf("without limit and hint: %v", got)
	}
	g.verdict.Concurrency = 5
	if got := metadata(w.ask(t, chat(nil)), wire.NamespaceLimit); !reflect.DeepEqual(got, map[string]any{wire.HeaderRecommendedConcurrency: "5"}) {
		t.Errorf("a hint alone: %v", got)
	}
	if !w.lastEvent().Hinted || w.lastEvent().Limit != "" {
		t.Errorf("event %+v", w.lastEvent())
	}
	g.verdict.Standing = standing
	want := map[string]any{wire.HeaderRecommendedConcurrency: "5"}
	for name, value := range standingHeaders(standing) {
		want[name] = value
	}
	if got := metadata(w.ask(t, chat(nil)), wire.NamespaceLimit); !reflect.DeepEqual(got, want) || len(got) != 9 {
		t.Errorf("limit and hint: %v", got)
	}
	if e := w.lastEvent(); e.Limit != "standard" || e.LimitLocal {
		t.Errorf("event %+v", e)
	}
	g.verdict = admission.Verdict{Reason: admission.ReasonRequests, Refusal: g.refusal, Standing: standing}
	r := w.ask(t, chat(nil))
	headers := headerMap(t, r.GetImmediateResponse().GetHeaders())
	for name, value := range standingHeaders(standing) {
		if headers[name] != value {
			t.Errorf("refused: %s is %q; want %q", name, headers[name], value)
		}
	}
	want[wire.HeaderRecommendedConcurrency] = headers[wire.HeaderRecommendedConcurrency]
	if got := metadata(r, wire.NamespaceLimit); !reflect.DeepEqual(got, want) {
		t.Errorf("refused: metadata %v, want %v", got, want)
	}
}

// TestRefusalsTellWhatToDo: by reason, in both dialects.
func TestRefusalsTellWhatToDo(t *testing.T) {
	share := func(inFlight, concurrency int, retry bool) admission.Refusal {
		return admission.Refusal{RetryAfter: 1234 * time.Millisecond, Concurrency: concurrency, InFlight: inFlight, ShouldRetry: retry}
	}
	for _, row := range []struct {
		reason  admission.Reason
		refusal admission.Refusal
		want    string
	}{
		{admission.ReasonConcurrency, share(12, 8, true), "You have 12 requests in flight and may have 8: reduce concurrent requests from 12 to 8. Retry in 1234 ms."},
		{admission.ReasonConcurrency, share(8, 8, true), "You have 8 requests in flight, as many as you may: wait until one has ended. Retry in 1234 ms."},
		{admission.ReasonConcurrency, share(1, 1, true), "You have 1 request in flight, as many as you may: wait until one has ended. Retry in 1234 ms."},
		{admission.ReasonConcurrency, share(7, 8, true), "Of the 8 requests that you may have in flight the last are for those of yours that have waited. Retry in 1234 ms."},
		{admission.ReasonShare, share(12, 8, true), "The model servers are full. You have 12 requests in flight and your share is 8: reduce concurrent requests from 12 to 8. Retry in 1234 ms."},
		{admission.ReasonShare, share(12, 8, false), "The model servers are full. You have 12 requests in flight and your share is 8: reduce concurrent requests from 12 to 8. Do not retry: waiting will not help in time."},
		{admission.ReasonShare, share(8, 8, true), "The model servers are full. You have 8 requests in flight, which is your share: wait until one has ended. Retry in 1234 ms."},
		{admission.ReasonShare, share(0, 1, true), "The model servers are full. Retry in 1234 ms."},
		{admission.ReasonTurn, share(8, 8, true), "The last places at the model servers are for requests of yours that have waited. Retry in 1234 ms."},
		{admission.ReasonLevel, share(1, 8, true), "The model servers are full, and requests with an output budget like this one's have their part of them. Retry in 1234 ms."},
		{admission.ReasonRequests, share(1, 8, true), "Your limit of 600 requests per minute is used up; the limit is reset in 12 s. Retry in 1234 ms."},
		{admission.ReasonTokens, share(1, 8, true), "This request may take 1100 tokens and you have 1200 left of 400000 tokens per minute; the limit is reset in 12 s. Retry in 1234 ms."},
		{admission.ReasonTooMany, share(1, 8, false), "This request may take 225 tokens even if its prompt is as short as it can be, which is more than your whole limit of 400000 tokens per minute: lower max_tokens or shorten the prompt. Do not retry: waiting will not help in time."},
		{admission.ReasonLimiterDown, share(1, 8, true), "Rate limits can't be counted at the moment, and nothing is admitted meanwhile. Retry in 1234 ms."},
	} {
		for _, route := range []string{"chat", "messages"} {
			w, g := gated(t)
			g.verdict = admission.Verdict{Reason: row.reason, Refusal: row.refusal, Standing: standing}
			m := chat(map[string]string{"content-length": "4000"})
			m.route, m.cluster = route, "a100"
			imm := w.ask(t, m).GetImmediateResponse()
			headers := headerMap(t, imm.GetHeaders())
			checkRetryFields(t, headers)
			if imm.GetStatus().GetCode() != 429 || imm.GetDetails() != "fairlead_"+row.reason.String() {
				t.Errorf("%s: %v, %q", row.reason, imm.GetStatus(), imm.GetDetails())
			}
			var body struct {
				Error struct{ Message, Code string }
			}
			if err := json.Unmarshal(imm.GetBody(), &body); err != nil || body.Error.Message != row.want {
				t.Errorf("%s: %v, message %q\nwant %q", row.reason, err, body.Error.Message, row.want)
			}
			if code := (map[string]string{"chat": "rate_limit_exceeded"})[route]; body.Error.Code != code {
				t.Errorf("%s on %s: code %q", row.reason, route, body.Error.Code)
			}
			retry, told := headers[wire.HeaderShouldRetry]
			if told == row.refusal.ShouldRetry || (told && retry != "false") {
				t.Errorf("%s: x-should-retry %q, %v", row.reason, retry, told)
			}
		}
	}
}

func TestWaitsAreNeverNoneNorTooLong(t *testing.T) {
	for in, want := range map[time.Duration][2]uint64{
		-time.Second: {1, 1}, 0: {1, 1}, 1: {1, 1}, time.Millisecond: {1, 1}, 1500*time.Microsecond + 1: {2, 1},
		time.Second: {1000, 1}, 1001 * time.Millisecond: {1001, 2}, time.Minute: {60000, 60}, time.Hour: {60000, 60},
	} {
		if got := waitFor(in); got.millis != want[0] || got.seconds != want[1] {
			t.Errorf("%s: %d ms, %d s; want %v", in, got.millis, got.seconds, want)
		}
	}
	if got := waitOf(admission.Refusal{Concurrency: -3}); got.concurrency != 1 {
		t.Errorf("recommended concurrency %d", got.concurrency)
	}
}

// TestPlacesCountForTheUsualTimeOfTheLevel, where nobody tells of ends: a budget may
// be far above what answers take.
func TestPlacesCountForTheUsualTimeOfTheLevel(t *testing.T) {
	w, _ := gated(t)
	m := chat(map[string]string{})
	m.peek["max_tokens"] = 4096
	w.ask(t, m)
	if want := 4 * time.Second * 8; len(w.expected) != 1 || w.expected[0] != want { // of h100, level 7
		t.Errorf("expected to take %v; want %v", w.expected, want)
	}
	m.route = "chat/other"
	w.ask(t, m)
	if got := w.expected[1]; got != 0 {
		t.Errorf("what doesn't generate is expected to take %v; want no time by its route's budget", got)
	}
}

// TestPlacesCountForTheBudget, where nobody tells of ends and nothing limits who
// enters.
func TestPlacesCountForTheBudget(t *testing.T) {
	w := newWorld(t)
	m := chat(map[string]string{})
	m.peek["max_tokens"] = 300
	w.ask(t, m)
	if got := w.expected[0]; got != 300*tokenTime {
		t.Errorf("expected to take %v", got)
	}
	m.route = "chat/other"
	w.ask(t, m)
	if got := w.expected[1]; got != 0 {
		t.Errorf("what doesn't generate is expected to take %v", got)
	}
}

// TestListsOfModelsHoldNoPlaces: while a log is away they count for the short lease,
// after which what generates finds every place free.
func TestListsOfModelsHoldNoPlaces(t *testing.T) {
	for _, asked := range []bool{false, true} {
		now := epoch
		ledger := accesslog.NewLedger(func() time.Time { return now })
		ledger.SetBlind(true)
		w := newWorld(t, func(in *plan.Inputs, o *Options) {
			o.Ledger, o.Live, o.Now = ledger, ledger, func() time.Time { return now }
			if asked {
				o.Admission = quiet{}
			}
			for i := range in.Pools {
				p := &in.Pools[i]
				for j := range p.Endpoints {
					p.Endpoints[j].Slot = ledger.Slot(fleet.EndpointKey{Pool: p.Name, Address: p.Endpoints[j].Address})
				}
			}
		})
		list := chat(map[string]string{})
		list.route, list.peek = "chat/other", nil
		for range 30 {
			w.ask(t, list)
		}
		if got := ledger.Total(); got != 30 {
			t.Fatalf("%d count; want all", got)
		}
		now = now.Add(accesslog.ProvisionalLease)
		if ledger.Expire(now); ledger.Total() != 0 {
			t.Errorf("with admission %v: %d of 30 count still after %v", asked, ledger.Total(), accesslog.ProvisionalLease)
		}
		m := chat(map[string]string{})
		for range 20 {
			w.ask(t, m)
		}
		elsewhere := 0
		for _, e := range w.events[30:] {
			if e.Pool != "h100" {
				elsewhere++
			}
		}
		if elsewhere > 0 {
			t.Errorf("with admission %v: %d of 20 are not served by the first pool, which is free", asked, elsewhere)
		}
	}
}

// TestEventAndAnswerTellOneReason: what metrics count a request under is what its
// answer's metadata and details say.
func TestEventAndAnswerTellOneReason(t *testing.T) {
	refuses := func(why admission.Reason) func(*world, *gate) {
		return func(_ *world, g *gate) { g.verdict = admission.Verdict{Reason: why, Refusal: g.refusal} }
	}
	for _, row := range []struct {
		want   string
		change func(*world, *gate)
		tokens float64
		code   int // 0: it goes on
	}{
		{"weighted", func(*world, *gate) {}, 5, 0},
		{"all_busy", func(w *world, _ *gate) { w.full = 100 }, 5, 429},
		{"oversize", func(*world, *gate) {}, 100_000, 400},
		{"all_busy", refuses(admission.ReasonBusy), 5, 429},
		{"no_room", refuses(admission.ReasonNoRoom), 5, 429},
		{"concurrency", refuses(admission.ReasonConcurrency), 5, 429},
		{"turn", refuses(admission.ReasonTurn), 5, 429},
		{"share", refuses(admission.ReasonShare), 5, 429},
		{"level", refuses(admission.ReasonLevel), 5, 429},
		{"rate_requests", refuses(admission.ReasonRequests), 5, 429},
		{"rate_tokens", refuses(admission.ReasonTokens), 5, 429},
		{"rate_too_many_tokens", refuses(admission.ReasonTooMany), 5, 429},
		{"limiter_down", refuses(admission.ReasonLimiterDown), 5, 429},
	} {
		w, g := gated(t, small)
		row.change(w, g)
		m := chat(nil)
		m.peek["max_tokens"] = row.tokens
		r := w.ask(t, m)
		e := w.lastEvent()
		if got := metadata(r, wire.NamespaceLog)[wire.KeyReason]; e.Why() != row.want || got != row.want {
			t.Errorf("event says %s, metadata %v; want %s", e.Why(), got, row.want)
		}
		details := ""
		if row.code > 0 {
			details = "fairlead_" + row.want
		}
		if imm := r.GetImmediateResponse(); int(imm.GetStatus().GetCode()) != row.code || imm.GetDetails() != details || (e.Action == plan.ActionRefuse) != (row.code > 0) {
			t.Errorf("%s: action %v, answer %v", row.want, e.Action, imm)
		}
	}
}
