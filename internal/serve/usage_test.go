package serve

import (
	"maps"
	"math"
	"net/netip"
	"testing"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestBytesPerTokenAreLearnedFromUsage(t *testing.T) {
	r := newRatios()
	r.reconfigure(&fleet.Config{Routes: []fleet.Route{{Name: "chat"}}})
	if got := r.of("chat"); got != 0 {
		t.Errorf("%v before anything was learned, want 0", got)
	}
	end := func(bytes int64, input fleet.Tokens) *fleet.Outcome {
		return &fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: bytes, Usage: fleet.Usage{Known: true, Input: input}}
	}
	for range 300 {
		r.learn(end(6000, 1000))
	}
	if got := r.of("chat"); got < 5.9 || got > 6.1 {
		t.Errorf("learned %v bytes a token from bodies of 6, want 6", got)
	}
	for name, o := range map[string]*fleet.Outcome{
		"an image":             end(4_000_000, 1000),
		"a few tokens":         end(200, 10),
		"a short chat":         end(600, 255),
		"more tokens than fit": end(100, 1000),
		"no usage":             {Kind: fleet.RequestEnded, Route: "chat", RequestBytes: 100_000},
		"an attempt":           {Kind: fleet.AttemptEnded, Route: "chat", RequestBytes: 15_000, Usage: fleet.Usage{Known: true, Input: 1000}},
	} {
		before := r.of("chat")
		for range 100 {
			r.learn(o)
		}
		if got := r.of("chat"); got != before {
			t.Errorf("%s taught %v after %v", name, got, before)
		}
	}
	r.reconfigure(&fleet.Config{})
	if got := r.of("chat"); got != 0 {
		t.Errorf("%v for a route that is gone", got)
	}
}

// TestLongPromptsAreNotMeasuredByShortOnes: a short chat has more tokens than its text,
// those of the chat template, and many of them say little about how long a token is.
func TestLongPromptsAreNotMeasuredByShortOnes(t *testing.T) {
	for _, others := range []struct {
		n      int
		bytes  int64
		tokens fleet.Tokens
	}{{0, 0, 0}, {100, 200, 90}, {100_000, 200, 90}, {100, 800, 330}, {10, 2000, 1999}} {
		r := newRatios()
		r.reconfigure(&fleet.Config{Routes: []fleet.Route{{Name: "chat"}}})
		teach := func(n int, bytes int64, tokens fleet.Tokens) {
			for range n {
				r.learn(&fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: bytes, Usage: fleet.Usage{Known: true, Input: tokens}})
			}
		}
		teach(100, 45_000, 10_000)
		teach(others.n, others.bytes, others.tokens)
		if got := 45_000 / r.of("chat"); got < 9_500 || got > 11_500 {
			t.Errorf("after %+v a prompt of 10000 tokens is taken for %.0f", others, got)
		}
	}
}

// TestOnePromptDoesNotMakeTheRatio, however long it is; the first of a model counts no
// more than what is usual.
func TestOnePromptDoesNotMakeTheRatio(t *testing.T) {
	r := newRatios()
	r.reconfigure(&fleet.Config{Routes: []fleet.Route{{Name: "chat"}}})
	long := func(tokens int64) {
		r.learn(&fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: tokens, Usage: fleet.Usage{Known: true, Input: fleet.Tokens(tokens)}})
	}
	long(1_000_000)
	if got := r.of("chat"); got < 2.5 {
		t.Errorf("one prompt whose tokens are a byte long made the ratio %v", got)
	}
	for range 1000 {
		r.learn(&fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: 8000, Usage: fleet.Usage{Known: true, Input: 2000}})
	}
	before := r.of("chat")
	long(1_000_000)
	if got := r.of("chat"); before-got > 0.1 || before <= got {
		t.Errorf("one prompt whose tokens are a byte long moved the ratio from %v to %v", before, got)
	}
}

// TestOldPromptsAreForgotten: a model that is asked for another language is measured
// by that.
func TestOldPromptsAreForgotten(t *testing.T) {
	r := newRatios()
	r.reconfigure(&fleet.Config{Routes: []fleet.Route{{Name: "chat"}}})
	for _, ratio := range []int64{4, 2, 24} { // the last as text whose every letter is escaped
		for range 3000 {
			r.learn(&fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: 1000 * ratio, Usage: fleet.Usage{Known: true, Input: 1000}})
		}
		if got := r.of("chat"); math.Abs(got-float64(ratio)) > 0.1 {
			t.Errorf("%v bytes a token after three million tokens of %d", got, ratio)
		}
	}
}

// TestBytesPerTokenAreTheModels: what one route teaches counts for all routes that
// the same model serves, and for no other.
func TestBytesPerTokenAreTheModels(t *testing.T) {
	r := newRatios()
	cfg := &fleet.Config{
		Pools: []fleet.Pool{{Name: "big", Model: "llama"}, {Name: "small", Model: "qwen"}, {Name: "bare"}},
		Routes: []fleet.Route{
			{Name: "teaches", Split: fleet.Split{{Pool: "big", Weight: 9}, {Pool: "small", Weight: 1}}},
			{Name: "learns", Split: fleet.Split{{Pool: "small", Weight: 1}, {Pool: "big", Weight: 2}}, Match: fleet.Match{Model: "any"}},
			{Name: "other", Split: fleet.Split{{Pool: "small", Weight: 1}}},
			{Name: "asks", Split: fleet.Split{{Pool: "bare", Weight: 1}}, Match: fleet.Match{Model: "llama"}},
			{Name: "bare", Split: fleet.Split{{Pool: "bare", Weight: 1}}},
			{Name: "bare-too", Split: fleet.Split{{Pool: "bare", Weight: 1}}},
		},
	}
	r.reconfigure(cfg)
	teach := func(route, pool string, ratio int64) {
		for range 1000 {
			r.learn(&fleet.Outcome{
				Kind: fleet.RequestEnded, Route: route, Endpoint: fleet.EndpointKey{Pool: pool}, RequestBytes: 1000 * ratio,
				Usage: fleet.Usage{Known: true, Input: 1000},
			})
		}
	}
	teach("teaches", "big", 6)
	teach("teaches", "small", 2)
	teach("bare", "bare", 8)
	teach("gone", "nowhere", 12)
	check := func(when string, want map[string]float64) {
		t.Helper()
		for route, ratio := range want {
			if got := r.of(route); math.Abs(got-ratio) > 0.05 {
				t.Errorf("%s: %s has %v bytes a token; want %v", when, route, got, ratio)
			}
		}
	}
	want := map[string]float64{"teaches": 6, "learns": 6, "other": 2, "asks": 6, "bare": 8, "bare-too": 0}
	check("taught", want)
	r.reconfigure(cfg)
	check("after a reload", want)
	cfg.Pools[0].Model = "another"
	r.reconfigure(cfg)
	check("with another model", map[string]float64{"teaches": 0, "learns": 0, "other": 2, "asks": 6, "bare": 8})
}

func TestRequestsWithoutADecisionAreCounted(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	const own, foreign = "1718924567123-007-0001", "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"
	server := fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}
	for _, o := range []fleet.Outcome{
		{Kind: fleet.RequestEnded, ID: own, Code: 200, Endpoint: server},
		{Kind: fleet.RequestEnded, ID: foreign, Code: 200, Endpoint: server},
		{Kind: fleet.RequestEnded, ID: foreign, Code: 400}, // Envoy's own answer
		{Kind: fleet.AttemptEnded, ID: foreign, Code: 200, Endpoint: server},
		{Kind: fleet.RequestEnded, ID: foreign, Code: 429, Endpoint: server, Cause: fleet.CauseLocal}, // held at the sidecar
		{Kind: fleet.RequestEnded, ID: foreign, Code: 503, Cause: fleet.CauseLocal},                   // fails closed
		{Kind: fleet.RequestEnded, ID: foreign, Code: 503, Cause: fleet.CauseLocal},
		{Kind: fleet.RequestEnded, ID: own, Code: 503, Cause: fleet.CauseLocal},
	} {
		s.outcome(o)
	}
	if passed, refused := s.metrics.undecided.passed.Load(), s.metrics.undecided.refused.Load(); passed != 1 || refused != 2 {
		t.Errorf("without a decision %d passed and %d were refused, want 1 and 2", passed, refused)
	}
}

// TestUsageRatiosAreWhatTheySay, each of other counts.
func TestUsageRatiosAreWhatTheySay(t *testing.T) {
	reader := sdkmetric.NewManualReader()
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	t.Cleanup(func() { _ = provider.Shutdown(t.Context()) })
	if err := observeUsage(provider.Meter(scopeName), func() admission.Counters {
		return admission.Counters{Claims: 7, Clients: 11, Routes: []admission.RouteCounters{{
			Route: "chat", Output: 30, OutputReserved: 120, Cached: 50, Input: 100, Within: 9, Above: 1, Below: 2, WithUsage: 12,
		}, {Route: "none"}}}
	}); err != nil {
		t.Fatal(err)
	}
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, m := range all.ScopeMetrics[0].Metrics {
		points := m.Data.(metricdata.Gauge[float64]).DataPoints
		if len(points) != 1 {
			t.Errorf("%s has %d values, want one: no ratio of nothing", m.Name, len(points))
		}
		got[m.Name] = points[0].Value
	}
	want := map[string]float64{
		"fairlead.usage.token_efficiency": 0.25, "fairlead.usage.cache_hit_ratio": 0.5, "fairlead.usage.burst_compliance": 0.75,
		"fairlead.admission.in_flight": 7, "fairlead.admission.clients": 11,
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
