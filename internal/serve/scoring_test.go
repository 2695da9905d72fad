package serve

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/extproc/retryafter"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// testScoring is the scoring of a config without a server around it.
func testScoring(t *testing.T, cfg *fleet.Config) *scoring {
	t.Helper()
	s := newScoring(scoringModel{Model: scorer.Formula(scorer.FormulaOptions{})}, accesslog.NewLedger(time.Now), noAdmission)
	s.reconfigure(cfg, nil)
	return s
}

// TestBucketsKeepTheirLengthWhenTicksJitter: ticks come early and late by up to
// 20 ms, as a ticker's do on a busy machine.
func TestBucketsKeepTheirLengthWhenTicksJitter(t *testing.T) {
	const ticks = 20 * 60
	rng := rand.New(rand.NewPCG(1, 2))
	s := testScoring(t, testConfig(t))
	begin := time.Now()
	var shown []time.Time
	for i := range ticks {
		now := begin.Add(time.Duration(i)*tickEvery + time.Duration(rng.Int64N(int64(40*time.Millisecond))) - 20*time.Millisecond)
		if _, view := s.step(now); view != nil {
			shown = append(shown, now)
		}
	}
	if want := int(ticks * tickEvery / bucket); len(shown) < want-1 || len(shown) > want+1 {
		t.Errorf("%d buckets in a minute, want %d", len(shown), want)
	}
	for i, at := range shown[1:] {
		if d := at.Sub(shown[i]); d < bucket-2*tickEvery || d > bucket+2*tickEvery {
			t.Errorf("bucket %d took %v", i, d)
		}
	}
	// A pause is one long bucket; nothing is made up for.
	now := begin.Add(ticks * tickEvery).Add(10 * time.Second)
	count := 0
	for range bucket / tickEvery {
		if _, view := s.step(now); view != nil {
			count++
		}
		now = now.Add(tickEvery)
	}
	if count != 1 {
		t.Errorf("%d buckets in the 200 ms after a pause, want 1", count)
	}
}

// heard is a model that says one risk of everything and keeps what it was told
// of our own doing, by the KV usage that the endpoint shows.
type heard struct {
	risk float64
	own  map[float64]scorer.Own
}

func (h *heard) Name() string { return "heard" }

func (h *heard) Assess(w *telemetry.Window, own scorer.Own, _ time.Time) (scorer.Assessment, bool) {
	latest, ok := w.Latest()
	if ok && h.own != nil {
		h.own[latest.KVUsage] = own
	}
	return scorer.AssessRisk(h.risk), ok
}

// TestPlanGetsTheConfigAndTheVerdicts compares a step's inputs field by field
// with the config, the ledger and what the endpoints said.
func TestPlanGetsTheConfigAndTheVerdicts(t *testing.T) {
	address := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), port) }
	cfg := &fleet.Config{
		Pools: []fleet.Pool{
			{Name: "h100", Tier: "fast", MaxInFlight: 8, SpillAt: 0.4, Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush}, Endpoints: []fleet.Endpoint{
				{Name: "a", Address: address(1), Zone: "east", Capacity: 1},
				{Name: "b", Address: address(2), Zone: "west", Capacity: 2},
				{Name: "c", Address: address(3), Zone: "west", Capacity: 1, Drain: true},
			}},
			{Name: "cpu", Tier: "slow", MaxInFlight: 3, SpillAt: 0.9, Endpoints: []fleet.Endpoint{{Name: "d", Address: address(4), Capacity: 4}}},
		},
		Routes: []fleet.Route{
			{Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic, ClientStrategy: fleet.ClientStrategyHonor, TrustDeclared: true,
				DefaultMaxTokens: 512, Affinity: fleet.AffinitySession, Timeouts: fleet.Timeouts{FirstToken: 15 * time.Second},
				Split: fleet.Split{{Pool: "h100", Weight: 1}, {Pool: "cpu", Weight: 0}}},
			{Name: "messages", Dialect: fleet.DialectAnthropic, Strategy: fleet.StrategyLegacy, ClientStrategy: fleet.ClientStrategyIgnore,
				DefaultMaxTokens: 64, Split: fleet.Split{{Pool: "cpu", Weight: 1}}, Fallback: []string{"h100"},
				Class: fleet.ClassBatch, MaxOutput: 4096, Oversize: fleet.OversizeRefuse, NoRoom: fleet.OversizePass, RetryFields: fleet.RetryFieldsComputed, ReadUser: true, MaxBody: 4096},
		},
		Limits: []fleet.Limit{{Name: "tenants", Key: fleet.ClientKeyJWT, Claim: "sub", Routes: []string{"messages"}, Concurrency: 4}},
	}
	s := testScoring(t, cfg)
	s.setModel(scoringModel{Model: &heard{risk: 0.25}})
	keys := []fleet.EndpointKey{}
	for _, p := range cfg.Pools {
		for _, e := range p.Endpoints {
			keys = append(keys, fleet.EndpointKey{Pool: p.Name, Address: e.Address})
		}
	}
	for i, n := range []int{2, 0, 1, 3} { // attempts on a, b, c, d
		for k := range n {
			s.ledger.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: fmt.Sprintf("1718924567123-007-%d%03d", i, k), Attempt: 1, Endpoint: keys[i], At: time.Now()})
		}
	}
	now := time.Now()
	var got plan.Inputs
	for i := range 3 { // three readings make the five requests of others on b foreign
		now = now.Add(bucket)
		for k, running := range []float64{2, 5} {
			s.read(telemetry.Reading{Endpoint: keys[k], Sample: telemetry.Sample{
				At: now, Known: telemetry.HasKVUsage | telemetry.HasKVTokens | telemetry.HasRunning | telemetry.HasGenerationTokens,
				KVUsage: 0.25 * float64(k+1), KVTokens: 1000, Running: running, GenerationTokens: float64(i),
			}})
		}
		got, _ = s.step(now)
	}
	want := plan.Inputs{
		Tick: 3,
		Pools: []plan.PoolInput{
			{Name: "h100", Tier: "fast", SpillAt: 0.4, Endpoints: []plan.EndpointInput{
				{Address: address(1), Zone: "east", Slot: s.ledger.Slot(keys[0]), Weight: 0.5625, MaxInFlight: 8, InFlight: 2, KVFree: 750, KVSize: 1000, Risk: 0.25, State: fleet.StatePreferred},
				{Address: address(2), Zone: "west", Slot: s.ledger.Slot(keys[1]), Weight: 1.125, MaxInFlight: 3, InFlight: 0, KVFree: 500, KVSize: 1000, Risk: 0.25, State: fleet.StatePreferred},
				{Address: address(3), Zone: "west", Slot: s.ledger.Slot(keys[2]), MaxInFlight: 8, InFlight: 1, KVFree: -1, State: fleet.StateDraining},
			}},
			{Name: "cpu", Tier: "slow", SpillAt: 0.9, Endpoints: []plan.EndpointInput{
				{Address: address(4), Slot: s.ledger.Slot(keys[3]), Weight: 4, MaxInFlight: 3, InFlight: 3, KVFree: -1, State: fleet.StateUnknown},
			}},
		},
		Routes: []plan.RouteInput{
			{Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic, ClientStrategy: fleet.ClientStrategyHonor, TrustDeclared: true,
				DefaultBudget: 512, FirstTokenMillis: 15_000, Split: []string{"h100"}, Fallback: []string{"cpu"}, Affinity: fleet.AffinitySession, ClientKey: fleet.ClientKeyAuthorization},
			{Name: "messages", Dialect: fleet.DialectAnthropic, Strategy: fleet.StrategyLegacy, ClientStrategy: fleet.ClientStrategyIgnore,
				DefaultBudget: 64, Split: []string{"cpu"}, Fallback: []string{"h100"},
				ClientKey: fleet.ClientKeyJWT, Claim: "sub", Class: fleet.ClassBatch, Limited: true, MaxOutput: 4096, Oversize: fleet.OversizeRefuse,
				NoRoom: fleet.OversizePass, ComputedRetry: true, ReadUser: true, MaxBody: 4096},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
	cfg.Routes[1].OnFailure, cfg.Routes[1].Unread = fleet.FailClosed, fleet.OversizeRefuse
	if in := routeInputs(cfg, nil)[1]; in.ComputedRetry || !in.RefuseUnread {
		t.Errorf("%+v of a route that fails closed and refuses what nobody read", in)
	}
	if got, _ = s.step(now.Add(foreignAge)); got.Pools[0].Endpoints[1].MaxInFlight != 3 {
		t.Errorf("limit %d at the age of foreign work, want 3", got.Pools[0].Endpoints[1].MaxInFlight)
	}
	if got, _ = s.step(now.Add(foreignAge + tickEvery)); got.Pools[0].Endpoints[1].MaxInFlight != 8 {
		t.Errorf("limit %d by numbers too old to speak of foreign work, want 8", got.Pools[0].Endpoints[1].MaxInFlight)
	}
}

// TestModelIsToldWhatWeDidOurselves sends events of requests and attempts the
// way of Envoy's and compares what the model gets.
func TestModelIsToldWhatWeDidOurselves(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)}) // maxInFlight 4
	if err != nil {
		t.Fatal(err)
	}
	model := &heard{own: map[float64]scorer.Own{}}
	s.scoring.setModel(scoringModel{Model: model})
	key := func(port uint16) fleet.EndpointKey {
		return fleet.EndpointKey{Pool: "gpu", Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)}
	}
	request := func(port uint16, prompt fleet.Tokens, steered bool) {
		s.observeRequest(extproc.Event{Route: "chat", Pool: "gpu", Steered: steered, Slot: s.ledger.Slot(key(port)), Prompt: prompt})
	}
	attempt := func(kind fleet.OutcomeKind, n int, cause fleet.Cause) {
		s.outcome(fleet.Outcome{Kind: kind, Node: "n", ID: fmt.Sprintf("1718924567123-007-%04d", n), Attempt: 1, Endpoint: key(1001), Cause: cause, At: time.Now()})
	}
	for i := range 5 {
		attempt(fleet.AttemptStarted, i, 0)
	}
	attempt(fleet.AttemptEnded, 0, fleet.CauseOK)
	attempt(fleet.AttemptEnded, 1, fleet.CauseConnectFailed)
	attempt(fleet.AttemptEnded, 2, fleet.CauseConnectFailed)

	now := time.Now().Add(10 * time.Second) // long after the first step, New's
	s.step(now)
	request(1001, 1000, true) // more than a second before the last
	now = now.Add(tickEvery)
	s.step(now)
	now = now.Add(time.Second)
	s.step(now)
	request(1001, 100, true)
	request(1001, 7, false) // Envoy's own choice: nobody knows yet where it went
	request(1002, 50, true)
	now = now.Add(tickEvery)
	s.step(now)
	for port, usage := range map[uint16]float64{1001: 0.1, 1002: 0.2} {
		s.scoring.read(telemetry.Reading{Endpoint: key(port), Sample: telemetry.Sample{At: now, Known: telemetry.HasKVUsage, KVUsage: usage}})
	}
	request(1001, 30, true)
	s.step(now.Add(tickEvery))
	for usage, want := range map[float64]scorer.Own{
		0.1: {InFlight: 2, MaxInFlight: 4, SentPromptTokens: 30, ArrivedPromptTokens: 130, Errors5s: 2, Attempts5s: 3, ConnectStreak: 2, Successes: 1},
		0.2: {MaxInFlight: 4, ArrivedPromptTokens: 50},
	} {
		if got := model.own[usage]; got != want {
			t.Errorf("of the endpoint at %v\n%+v, want\n%+v", usage, got, want)
		}
	}
}

// TestAgentsSpeakForEndpointsOfANewConfig: what a reload brings is known to the
// receiver of pushed telemetry too.
func TestAgentsSpeakForEndpointsOfANewConfig(t *testing.T) {
	cfg := testConfig(t)
	cfg.Serve.Push.Address = fleet.Address{Path: filepath.Join(filepath.Dir(cfg.Serve.XDS.Path), "push")}
	cfg.Pools[1].Telemetry.Source = fleet.TelemetryPush
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	added := netip.MustParseAddrPort("127.0.0.1:1005")
	next := *cfg
	next.Pools = append([]fleet.Pool(nil), cfg.Pools...)
	next.Pools[1].Endpoints = append([]fleet.Endpoint(nil), cfg.Pools[1].Endpoints...)
	next.Pools[1].Endpoints = append(next.Pools[1].Endpoints, fleet.Endpoint{Name: "s2", Address: added, Capacity: 1})
	if err := s.Reconfigure(&next); err != nil {
		t.Fatal(err)
	}
	client, err := push.NewClient(push.ClientOptions{Log: slog.New(slog.DiscardHandler), Target: cfg.Serve.Push.Address, Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- s.Run(ctx) }()
	go func() { ended <- client.Run(ctx) }()
	defer func() { stop(); <-ended; <-ended }()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		client.Send(push.Frame{At: time.Now(), Endpoints: []push.Update{{Endpoint: added, Sample: telemetry.Sample{At: time.Now(), Known: telemetry.HasRunning, Running: 1}}}})
		if c := s.push.Counters(); c.Readings > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no reading of an endpoint that a reload brought: %+v", s.push.Counters())
		}
	}
}

// TestNumbersThatAServerDoesNotTellAreLeftOut: a 0 would be an empty cache and an
// empty queue. A GPU's reading between two of the server takes nothing away.
func TestNumbersThatAServerDoesNotTellAreLeftOut(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	s.scoring.setModel(scoringModel{Model: &heard{}}) // judges whatever is known
	now := time.Now()
	for i := range 2 {
		for port, known := range map[uint16]telemetry.Mask{
			1001: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting,
			1002: telemetry.HasRunning,
			1003: telemetry.HasKVUsage | telemetry.HasWaiting,
		} {
			if i == 1 {
				known = telemetry.HasGPUUtil
			}
			s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)},
				Sample: telemetry.Sample{At: now, Known: known, KVUsage: 0.5, Running: 2, Waiting: 3}})
		}
		now = now.Add(bucket)
		s.step(now)
	}
	rows := s.Fleet().Pools[0].Endpoints
	for i, want := range [][3]float64{{0.5, 2, 3}, {-1, 2, -1}, {0.5, -1, 3}} {
		if got := [3]float64{rows[i].KVUsage, rows[i].Running, rows[i].Waiting}; got != want || !rows[i].Known {
			t.Errorf("%s: KV usage, running and waiting %v, want %v; known %v", rows[i].Name, got, want, rows[i].Known)
		}
	}
	page := httptest.NewRecorder()
	s.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	for _, name := range []string{"fairlead_endpoint_kv_usage", "fairlead_endpoint_waiting"} {
		for endpoint, want := range map[string]bool{"g1": true, "g2": false, "g3": true, "s1": false} {
			found := regexp.MustCompile(`(?m)^` + name + `\{[^}]*endpoint="` + endpoint + `"`).MatchString(page.Body.String())
			if found != want {
				t.Errorf("%s of %s: %v, want %v", name, endpoint, found, want)
			}
		}
	}
}

// noAdmission knows nothing of any pool.
func noAdmission(time.Time, []admission.PoolView) []admission.PoolState { return nil }

// TestLearnedLimitFollowsTheEngine holds what admission's correction is fed with.
func TestLearnedLimitFollowsTheEngine(t *testing.T) {
	cfg := &fleet.Config{
		Pools: []fleet.Pool{{Name: "h100", MaxInFlight: 64, Limit: fleet.LimitLearned, Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush},
			Decode:    &fleet.Decode{Base: 5 * time.Millisecond, PerRequest: 500 * time.Microsecond, Target: 25 * time.Millisecond},
			Endpoints: []fleet.Endpoint{{Name: "a", Address: netip.MustParseAddrPort("10.0.0.1:1"), Capacity: 1}}}},
		Routes: []fleet.Route{{Name: "chat", Split: fleet.Split{{Pool: "h100", Weight: 1}}}},
	}
	s := testScoring(t, cfg)
	inputs, _ := s.step(time.Now())
	if got := inputs.Pools[0].Endpoints[0].MaxInFlight; got != 40 {
		t.Errorf("limit %d without telemetry, want 40: the batch that keeps the target", got)
	}
	// The cache holds three requests of what is in flight.
	s.states = []admission.PoolState{{Name: "h100"}}
	s.states[0].Levels[4] = admission.LevelState{InFlight: 2, MeanInput: 2000, MeanOutput: 1000}
	key := fleet.EndpointKey{Pool: "h100", Address: cfg.Pools[0].Endpoints[0].Address}
	now := time.Now()
	s.read(telemetry.Reading{Endpoint: key, Sample: telemetry.Sample{At: now, Known: telemetry.HasKVTokens | telemetry.HasKVUsage, KVTokens: 10_000}})
	inputs, _ = s.step(now)
	if got := inputs.Pools[0].Endpoints[0].MaxInFlight; got != 3 {
		t.Errorf("limit %d with a cache of 10,000 tokens and requests of 3,000, want 3", got)
	}
}

// TestEndpointThatAsksForAWaitIsClosed holds what upstreams' answers do.
func TestEndpointThatAsksForAWaitIsClosed(t *testing.T) {
	cfg := &fleet.Config{
		Pools: []fleet.Pool{{Name: "h100", MaxInFlight: 64, Endpoints: []fleet.Endpoint{
			{Name: "a", Address: netip.MustParseAddrPort("10.0.0.1:1"), Capacity: 1}, {Name: "b", Address: netip.MustParseAddrPort("10.0.0.1:2"), Capacity: 1}}}},
		Routes: []fleet.Route{{Name: "chat", Split: fleet.Split{{Pool: "h100", Weight: 1}}}},
	}
	s := testScoring(t, cfg)
	key := fleet.EndpointKey{Pool: "h100", Address: cfg.Pools[0].Endpoints[0].Address}
	now := time.Now()
	closedAfter := func(code int, wait, later time.Duration) bool {
		s.endpoints[key].closed = closure{}
		s.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Endpoint: key, Code: code, RetryAfter: wait, At: now}, admission.Asker{})
		inputs, _ := s.step(now.Add(later))
		if inputs.Pools[0].Endpoints[1].Closed {
			t.Error("the other endpoint is closed too")
		}
		return inputs.Pools[0].Endpoints[0].Closed
	}
	for _, c := range []struct {
		code        int
		wait, later time.Duration
		want        bool
	}{
		{429, 5 * time.Second, 4 * time.Second, true},
		{429, 5 * time.Second, 4900 * time.Millisecond, false}, // callers told five seconds are back then
		{429, 0, 800 * time.Millisecond, true},
		{429, 0, 900 * time.Millisecond, false},
		{429, 100 * time.Millisecond, 49 * time.Millisecond, true}, // for a tick at least
		{429, 100 * time.Millisecond, 50 * time.Millisecond, false},
		{529, 0, 800 * time.Millisecond, true},
		{503, 0, 0, false},
		{503, 3 * time.Second, 2 * time.Second, true},
		{503, time.Hour, 61 * time.Second, false},
		{429, retryafter.Max, 59 * time.Second, true}, // as long as is believed
		{429, retryafter.Max, 61 * time.Second, false},
		{429, math.MaxInt64, 59 * time.Second, true},
		{200, 5 * time.Second, time.Second, false},
	} {
		if got := closedAfter(c.code, c.wait, c.later); got != c.want {
			t.Errorf("%v after a %d with a wait of %v: closed %v, want %v", c.later, c.code, c.wait, got, c.want)
		}
	}
}

// TestAdmissionShowsInThePool: budgets and queues as the gate tells them, and the share of
// an interactive client, which has four times that of a unit of weight; −1 stands
// for what has no bound.
func TestAdmissionShowsInThePool(t *testing.T) {
	cfg := &fleet.Config{
		Pools: []fleet.Pool{{Name: "a", MaxInFlight: 8, Endpoints: []fleet.Endpoint{
			{Name: "a", Address: netip.MustParseAddrPort("10.0.0.1:1"), Capacity: 1}}}},
		Routes: []fleet.Route{{Name: "chat", Split: fleet.Split{{Pool: "a", Weight: 1}}}},
	}
	s := testScoring(t, cfg)
	state := admission.PoolState{Name: "a", Limit: 7.5, Clients: 3, Share: 2.5}
	for i := range state.Levels {
		state.Levels[i].Budget = math.Inf(1)
	}
	state.Levels[2] = admission.LevelState{InFlight: 2, Budget: 4}
	state.Levels[3] = admission.LevelState{InFlight: 5, Budget: 4, Queue: 1500500 * time.Microsecond, Backlogged: true}
	s.admit = func(time.Time, []admission.PoolView) []admission.PoolState { return []admission.PoolState{state} }
	_, shown := s.step(time.Now())
	a := shown.Pools[0]
	if a.Limit != 7.5 || a.Clients != 3 || a.Share != 10 || a.Endpoints[0].Limit != 8 || len(a.Levels) != fleet.BurstLevels {
		t.Errorf("shown: %+v", a)
	}
	for i, got := range a.Levels {
		want := admin.Level{Level: i, Budget: -1}
		switch i {
		case 2:
			want = admin.Level{Level: 2, InFlight: 2, Budget: 4}
		case 3:
			want = admin.Level{Level: 3, InFlight: 5, Budget: 4, QueueMillis: 1500.5, Backlogged: true}
		}
		if got != want {
			t.Errorf("level %d: %+v; want %+v", i, got, want)
		}
	}
	state.Share = math.Inf(1)
	if _, shown := s.step(time.Now().Add(bucket)); shown.Pools[0].Share != -1 {
		t.Errorf("without a bound the share is %v; want −1", shown.Pools[0].Share)
	}
}

// TestStatesAreFoundByPool: the gate goes over to a new config a moment before the
// scoring does, so that what it returns may lack a pool.
func TestStatesAreFoundByPool(t *testing.T) {
	cfg := &fleet.Config{
		Pools: []fleet.Pool{
			{Name: "a", MaxInFlight: 8, Endpoints: []fleet.Endpoint{{Name: "a", Address: netip.MustParseAddrPort("10.0.0.1:1"), Capacity: 1}}},
			{Name: "b", MaxInFlight: 8, Endpoints: []fleet.Endpoint{{Name: "b", Address: netip.MustParseAddrPort("10.0.0.1:2"), Capacity: 1}}}},
		Routes: []fleet.Route{{Name: "chat", Split: fleet.Split{{Pool: "a", Weight: 1}, {Pool: "b", Weight: 1}}}},
	}
	s := testScoring(t, cfg)
	s.admit = func(time.Time, []admission.PoolView) []admission.PoolState {
		b := admission.PoolState{Name: "b", Limit: 77}
		b.Levels[3].Backlogged = true
		return []admission.PoolState{b}
	}
	inputs, shown := s.step(time.Now())
	if inputs.Pools[0].Backlogged[3] || !inputs.Pools[1].Backlogged[3] {
		t.Errorf("backlogged: a %v, b %v", inputs.Pools[0].Backlogged, inputs.Pools[1].Backlogged)
	}
	if shown.Pools[0].Limit == 77 || shown.Pools[1].Limit != 77 {
		t.Errorf("limits shown: a %v, b %v", shown.Pools[0].Limit, shown.Pools[1].Limit)
	}
}
