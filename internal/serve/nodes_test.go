package serve

import (
	"errors"
	"math"
	"net/http/httptest"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

func nodeConfig(source fleet.TelemetrySource, nodes ...string) *fleet.Config {
	p := fleet.Pool{Name: "gpu", Telemetry: fleet.Telemetry{Source: source}}
	for i, n := range nodes {
		p.Endpoints = append(p.Endpoints, fleet.Endpoint{Name: n, Node: n, Address: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(8000+i))})
	}
	return &fleet.Config{Pools: []fleet.Pool{p}}
}

func TestNodeIsReadyOnlyWithYoungNumbersAHealthyGPUAndItsAgent(t *testing.T) {
	known, unknown := admin.Endpoint{Known: true, Why: "none"}, admin.Endpoint{Why: "stale"}
	drained := admin.Endpoint{State: fleet.StateDraining.String(), TelemetryAge: 0.2}
	silent := admin.Endpoint{State: fleet.StateDraining.String(), TelemetryAge: 9}
	lost := admin.Endpoint{Known: true, Why: scorer.ReasonLost.String()}
	away, here := map[string]admin.Agent{"a": {}}, map[string]admin.Agent{"a": {Connected: true}}
	for _, c := range []struct {
		name      string
		source    fleet.TelemetrySource
		endpoints []admin.Endpoint
		agents    map[string]admin.Agent
		why       string
	}{
		{"scraped and young", fleet.TelemetryScrape, []admin.Endpoint{known}, nil, ""},
		{"scraped and stale", fleet.TelemetryScrape, []admin.Endpoint{unknown}, nil, "stale"},
		{"one of two is young", fleet.TelemetryScrape, []admin.Endpoint{unknown, known}, nil, ""},
		{"one of two has lost its GPU", fleet.TelemetryScrape, []admin.Endpoint{known, lost}, nil, "lost"},
		{"all drain and speak", fleet.TelemetryScrape, []admin.Endpoint{drained, drained}, nil, ""},
		{"all drain and one is silent", fleet.TelemetryScrape, []admin.Endpoint{silent, drained}, nil, ""},
		{"all drain and are silent", fleet.TelemetryScrape, []admin.Endpoint{silent}, nil, "stale"},
		{"no telemetry is configured", fleet.TelemetryNone, []admin.Endpoint{unknown}, nil, "no_source"},
		{"no agent has come", fleet.TelemetryPush, []admin.Endpoint{unknown}, nil, "no_agent"},
		{"the agent went away", fleet.TelemetryPush, []admin.Endpoint{known}, away, "agent_away"},
		{"the agent is there", fleet.TelemetryPush, []admin.Endpoint{known}, here, ""},
		{"the agent is there and says nothing", fleet.TelemetryPush, []admin.Endpoint{unknown}, here, "stale"},
	} {
		names := make([]string, len(c.endpoints))
		for i := range names {
			names[i] = "a"
		}
		got := nodesOf(nodeConfig(c.source, names...), []admin.Pool{{Endpoints: c.endpoints}}, c.agents)
		if len(got) != 1 || got[0].Why != c.why || got[0].Ready != (c.why == "") {
			t.Errorf("%s: %+v, want why %q", c.name, got, c.why)
		}
	}
}

func TestEndpointsWithoutANodeAreCountedByHost(t *testing.T) {
	cfg := nodeConfig(fleet.TelemetryNone, "", "", "b")
	got := nodesOf(cfg, []admin.Pool{{Endpoints: make([]admin.Endpoint, 3)}}, nil)
	if len(got) != 2 || got[0].Name != "10.0.0.1" || got[1].Name != "b" {
		t.Errorf("%+v", got)
	}
}

func TestScalingSignalIsMeanAndDeviationOfFiveSeconds(t *testing.T) {
	var s scaling
	for i := range 2 * summaryBuckets {
		risk := 0.2
		if i%2 == 1 {
			risk = 0.4
		}
		s.add([]admin.Endpoint{{Known: true, Risk: risk, Allocation: -1}, {Known: false, Risk: 1, Allocation: 0.02}})
	}
	got := s.risk.show()
	mean := (13*0.4 + 12*0.2) / 25
	if got.N != summaryBuckets || math.Abs(got.Mean-mean) > 1e-9 || math.Abs(got.Deviation-0.1) > 0.001 {
		t.Errorf("risk %+v, want mean %v and deviation about 0.1", got, mean)
	}
	if got := s.allocation.show(); math.Abs(got.Mean-0.02) > 1e-9 || got.Deviation > 1e-9 {
		t.Errorf("allocation %+v", got)
	}
	var none scaling
	none.add([]admin.Endpoint{{Risk: 1, Allocation: -1}})
	if got := none.risk.show(); got.N != 0 {
		t.Errorf("unknown endpoints counted: %+v", got)
	}
}

func TestAllocationIsShownInSharesAndMegabytes(t *testing.T) {
	begin := time.Now()
	var kv, framebuffer telemetry.Window
	for i := range 6 {
		at := begin.Add(time.Duration(i) * bucket)
		kv.Add(telemetry.Sample{At: at, Known: telemetry.HasKVUsage | telemetry.HasKVTokens | telemetry.HasFBUsed | telemetry.HasFBTotal,
			KVUsage: 0.02 * float64(i), KVTokens: 100_000, FBUsedMiB: 70_000 + 100*float64(i), FBTotalMiB: 80_000})
		framebuffer.Add(telemetry.Sample{At: at, Known: telemetry.HasFBUsed | telemetry.HasFBTotal,
			FBUsedMiB: 1000 + 200*float64(i), FBTotalMiB: 80_000})
	}
	now := begin.Add(time.Second)
	show := func(w *telemetry.Window, kvBytes float64) (shares, megabytes float64) {
		row := admin.Endpoint{Allocation: -1, AllocationMB: -1}
		showAllocation(&row, w, now, kvBytes)
		return row.Allocation, row.AllocationMB
	}
	near := func(got, want float64) bool { return math.Abs(got-want) < 1e-6*math.Max(1, math.Abs(want)) }
	// 0.1 of 100,000 tokens a second, at 131,072 bytes each.
	if s, mb := show(&kv, 131_072); !near(s, 0.1) || !near(mb, 0.1*100_000*131_072/1e6) {
		t.Errorf("KV cache: %v/s, %v MB/s", s, mb)
	}
	if s, mb := show(&kv, 0); !near(s, 0.1) || mb != -1 {
		t.Errorf("token size unknown: %v/s, %v MB/s", s, mb)
	}
	if s, mb := show(&framebuffer, 0); !near(s, 1000.0/80_000) || !near(mb, 1000*1.048576) {
		t.Errorf("framebuffer: %v/s, %v MB/s", s, mb)
	}
	if s, mb := show(new(telemetry.Window), 1); s != -1 || mb != -1 {
		t.Errorf("nothing known: %v/s, %v MB/s", s, mb)
	}
}

// TestAlertRulesNameOnlyMetricsThatExist keeps the rules file in step.
func TestAlertRulesNameOnlyMetricsThatExist(t *testing.T) {
	rules, err := os.ReadFile("../../examples/alerts/fairlead.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	feed(t, s)
	page := httptest.NewRecorder()
	s.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	body := "\n" + page.Body.String()
	names := regexp.MustCompile(`\b(fairlead_\w+|gpu_\w+)`).FindAllString(string(rules), -1)
	if len(names) < 8 {
		t.Fatalf("only %d metric names in the rules", len(names))
	}
	for _, name := range names {
		if name == "gpu_condition" {
			continue
		}
		if !strings.Contains(body, "\n"+name+"{") && !strings.Contains(body, "\n"+name+" ") {
			t.Errorf("no metric %s on the page", name)
		}
	}
	for _, name := range []string{"gpu_memory_allocation_rate_mb_per_sec", "gpu_node_ready", "fairlead_pool_risk_5s", "fairlead_endpoint_gpu_condition", "fairlead_endpoint_scaling"} {
		if !strings.Contains(body, "\n"+name+"{") {
			t.Errorf("no metric %s on the page", name)
		}
	}
}

// Row T15 of the known ways in which telemetry misleads: a ghost keeps its
// gauges.
func TestEndpointThatLeavesTakesItsSeriesAlong(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	feed(t, s)
	page := func() string {
		w := httptest.NewRecorder()
		s.metrics.handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		return w.Body.String()
	}
	if !strings.Contains(page(), `endpoint="g3"`) {
		t.Fatal("g3 has no series before it leaves")
	}
	cfg := *s.config.Load()
	cfg.Pools = slices.Clone(cfg.Pools)
	cfg.Pools[0].Endpoints = cfg.Pools[0].Endpoints[:2]
	s.scoring.reconfigure(&cfg, nil)
	s.step(time.Now())
	if after := page(); strings.Contains(after, `endpoint="g3"`) || !strings.Contains(after, `endpoint="g2"`) {
		t.Error("g3's series are still there, or g2's went with them")
	}
}

// feed gives every endpoint of the test config two seconds of telemetry.
func feed(t *testing.T, s *Server) {
	t.Helper()
	cfg := *s.config.Load()
	for i := range cfg.Pools {
		cfg.Pools[i].KVBytesPerToken = 131_072
	}
	s.scoring.reconfigure(&cfg, nil)
	now := time.Now()
	for i := range 10 {
		for _, p := range cfg.Pools {
			for _, e := range p.Endpoints {
				s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: p.Name, Address: e.Address}, Sample: telemetry.Sample{
					At: now, Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens | telemetry.HasGPUUtil | telemetry.HasCondition,
					KVUsage: 0.03 * float64(i), KVTokens: 100_000, Condition: telemetry.ConditionOK,
				}})
			}
		}
		s.step(now)
		now = now.Add(bucket)
	}
}

// A GPU page that answers does not hide why the model server's page fails.
func TestEnginesErrorStaysWhileTheGPUsPageAnswers(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	e := s.config.Load().Pools[0].Endpoints[0]
	key := fleet.EndpointKey{Pool: "gpu", Address: e.Address}
	now := time.Now()
	show := func(r telemetry.Reading) string {
		r.Endpoint = key
		s.scoring.read(r)
		now = now.Add(bucket)
		s.step(now)
		return s.Fleet().Pools[0].Endpoints[0].TelemetryError
	}
	show(telemetry.Reading{Err: errors.New("status 500, want 200")})
	if got := show(telemetry.Reading{Sample: telemetry.Sample{At: now, Known: telemetry.HasGPUUtil}}); !strings.Contains(got, "status 500") {
		t.Errorf("after a GPU reading the error is %q", got)
	}
	if got := show(telemetry.Reading{Sample: telemetry.Sample{At: now, Known: telemetry.HasRunning}}); got != "" {
		t.Errorf("after an engine reading the error is %q", got)
	}
}

// An endpoint that never told a number has an age too: the alert on old telemetry
// must see it.
func TestEndpointThatNeverSpokeAges(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for i := range 20 {
		s.step(now.Add(time.Duration(i) * bucket))
	}
	page := httptest.NewRecorder()
	s.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	age := regexp.MustCompile(`fairlead_telemetry_age_seconds\{endpoint="g1",pool="gpu",source="engine"\} (\S+)`).FindStringSubmatch(page.Body.String())
	if len(age) != 2 || !strings.HasPrefix(age[1], "3.") {
		t.Errorf("age %v, want the 3.8 s since the endpoint is waited for", age)
	}
	if strings.Contains(page.Body.String(), `fairlead_telemetry_age_seconds{endpoint="s1"`) {
		t.Error("an endpoint without telemetry has an age")
	}
}
