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
		for range 300 {
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
