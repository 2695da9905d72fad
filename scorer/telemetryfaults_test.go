package scorer_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/features"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
)

// TestTelemetryFaults has one row for each way in which telemetry has misled the
// systems before this one, from the pages that came in to the share of requests
// that went out. Each row names the public report it comes from.
func TestTelemetryFaults(t *testing.T) {
	for _, row := range []struct {
		name, report string
		test         func(t *testing.T)
	}{
		{"T1 DCGM answers blank until it is restarted", "NVIDIA/DCGM #202", blankUntilRestart},
		{"T2 a utilisation of 4294967295", "NVIDIA/DCGM #199", absurdUtilisation},
		{"T4 the exporter freezes, or one GPU vanishes", "NVIDIA/dcgm-exporter #164", frozenOrVanished},
		{"T5 old values and a healthy exporter", "NVIDIA/gpu-monitoring-tools #188", oldValuesHealthOK},
		{"T6 the XID gauge never clears", "NVIDIA/dcgm-exporter #500", xidNeverClears},
		{"T7 MIG rows without pod labels", "NVIDIA/dcgm-exporter #577, #27", migRows},
		{"T11 one bad line drops the rest of the page", "prometheus/prometheus #12975, prometheus/common #703, #1135, #1469", badLines},
		{"T12 stale counts as saturated", "llm-d/llm-d-router #2408", staleIsNotSaturated},
		{"T13 stuck at 99 % KV and never asked again", "vllm-project/vllm #29928", stuckFull},
		{"T14 ties herd", "llm-d/llm-d-router #2515", tiesSpread},
		{"T15 a ghost endpoint and its stale gauge", "vllm-project/production-stack #1008, #888", ghostEndpoint},
		{"T18 killing the collector froze the GPU", "NVIDIA/dcgm-exporter #84", collectorEndsCleanly},
	} {
		t.Run(row.name, func(t *testing.T) {
			if row.report == "" {
				t.Fatal("no source")
			}
			row.test(t)
		})
	}
}

const interval = 200 * time.Millisecond

var address = netip.MustParseAddrPort("10.0.0.1:8000")

// pages answers for an engine and a GPU exporter.
type pages struct {
	engine, gpu func(since time.Duration) string
	begin       time.Time
}

func (p *pages) RoundTrip(r *http.Request) (*http.Response, error) {
	body := p.engine
	if r.URL.Path == "/gpu" {
		body = p.gpu
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(body(time.Since(p.begin))))}, nil
}

// worker is an engine at work: its numbers move.
func worker(since time.Duration) string {
	return fmt.Sprintf("vllm:num_requests_running 20\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.4\nvllm:generation_tokens_total %d\n", since)
}

// watched scrapes the pages for a while on a fake clock and hands each reading to
// see, with the window as it then is.
func watched(t *testing.T, p *pages, gpus []string, span time.Duration, see func(since time.Duration, w *telemetry.Window)) scrape.Counters {
	t.Helper()
	var counters scrape.Counters
	synctest.Test(t, func(t *testing.T) {
		p.begin = time.Now()
		target := scrape.Target{Endpoint: fleet.EndpointKey{Pool: "p", Address: address}, EngineURL: "http://10.0.0.1:8000/metrics",
			GPUs: gpus, Interval: interval}
		if p.gpu != nil {
			target.GPUURL = "http://10.0.0.1:9400/gpu"
		}
		s := scrape.New([]scrape.Target{target}, scrape.Options{Client: &http.Client{Transport: p}})
		ctx, cancel := context.WithTimeout(context.Background(), span)
		defer cancel()
		w, seen := new(telemetry.Window), 0
		_ = s.Run(ctx, func(r telemetry.Reading) { // ends with the clock
			if r.Err != nil {
				t.Errorf("reading: %v", r.Err)
				return
			}
			seen++
			w.Add(r.Sample)
			see(time.Since(p.begin), w)
		})
		if seen < int(span/interval)-2 {
			t.Fatalf("%d readings in %v", seen, span)
		}
		counters = s.Counters()
	})
	return counters
}

// vector is what a model would see.
func vector(w *telemetry.Window) features.Vector {
	latest, _ := w.Latest()
	return features.Extract(w, scorer.Own{}, latest.At)
}

func missing(x features.Vector, i int) bool { return math.IsNaN(float64(x[i])) }

// T1: after an XID 31 profiling fields stay at DCGM's sentinel. They are missing,
// never 1.4e14, and the engine goes on being judged. The agent, which reads DCGM
// itself, watches anew after ten such ticks.
func blankUntilRestart(t *testing.T) {
	mustExist(t, "../telemetry/dcgm", "TestTenBlankTicksRenewTheWatch")
	values := func(since time.Duration) string {
		activity, util := "0.9", "97"
		if since > 2*time.Second {
			activity, util = "140737488355328", "9223372036854775792"
		}
		return "DCGM_FI_PROF_GR_ENGINE_ACTIVE " + activity + "\nDCGM_FI_PROF_DRAM_ACTIVE " + activity + "\nDCGM_FI_DEV_GPU_UTIL " + util + "\n"
	}
	blank := 0
	counters := watched(t, &pages{engine: worker, gpu: values}, nil, 8*time.Second, func(since time.Duration, w *telemetry.Window) {
		x := vector(w)
		if missing(x, features.KVUsage) {
			t.Errorf("%v: the engine's numbers went with the GPU's", since)
		}
		if since > 3*time.Second {
			if blank++; !missing(x, features.GRActive1s) || !missing(x, features.DRAMActive1s) {
				t.Errorf("%v: activity %v, %v", since, x[features.GRActive1s], x[features.DRAMActive1s])
			}
		} else if since > time.Second && since < 2*time.Second && x[features.GRActive1s] != 0.9 {
			t.Errorf("%v: activity %v", since, x[features.GRActive1s])
		}
	})
	if blank < 10 || counters.Rejected < 3*10 {
		t.Errorf("%d blank ticks, %+v", blank, counters)
	}
}

// T2: a value outside of its range is dropped and counted.
func absurdUtilisation(t *testing.T) {
	for _, absurd := range []string{"4294967295", "334905", "101", "-1"} {
		gpu := func(time.Duration) string {
			return "DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-1\"} " + absurd + "\nDCGM_FI_DEV_FB_USED{UUID=\"GPU-1\"} 70000\n"
		}
		counters := watched(t, &pages{engine: worker, gpu: gpu}, nil, 2*time.Second, func(since time.Duration, w *telemetry.Window) {
			s, _ := w.Latest()
			if s.Known.Has(telemetry.HasGPUUtil) || since > time.Second && s.FBUsedMiB != 70000 {
				t.Errorf("utilisation %s: %+v", absurd, s)
			}
		})
		if counters.Rejected < 8 {
			t.Errorf("utilisation %s: %+v", absurd, counters)
		}
	}
}

func gpuLines(gpu string, energy int64, util int) string {
	return fmt.Sprintf("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{UUID=%q} %d\nDCGM_FI_DEV_POWER_USAGE{UUID=%q} 400\nDCGM_FI_DEV_GPU_UTIL{UUID=%q} %d\n", gpu, energy, gpu, gpu, util)
}

// T4: equal values under a counter that must move are old; a GPU that is not on
// the page any more takes its own numbers along and nobody else's.
func frozenOrVanished(t *testing.T) {
	mustExist(t, "../telemetry/dcgm", "TestValueWithAStandingStampGoesStale")
	gpu := func(since time.Duration) string {
		moving := gpuLines("GPU-2", since.Milliseconds(), 20)
		switch {
		case since < 2*time.Second:
			return gpuLines("GPU-1", since.Milliseconds(), 90) + moving
		case since < 7*time.Second:
			return gpuLines("GPU-1", 2000, 90) + moving // GPU-1 hangs
		case since < 9*time.Second:
			return gpuLines("GPU-1", since.Milliseconds(), 90) + moving
		}
		return moving // GPU-1 has vanished
	}
	for _, both := range []bool{true, false} {
		selection := []string{"GPU-1", "GPU-2"}
		if !both {
			selection = selection[:1]
		}
		watched(t, &pages{engine: worker, gpu: gpu}, selection, 12*time.Second, func(since time.Duration, w *telemetry.Window) {
			s, _ := w.Latest()
			known, hidden := s.Known.Has(telemetry.HasGPUUtil), since > 4600*time.Millisecond && since < 6900*time.Millisecond || since > 9500*time.Millisecond
			switch {
			case !s.Known.HasEngine():
				t.Errorf("%v: no engine", since)
			case since < time.Second:
			case hidden && (known != both || both && s.GPUUtil != 0.2):
				t.Errorf("%v, both %v: known %v, utilisation %v while GPU-1 is hidden", since, both, known, s.GPUUtil)
			case (since < 4*time.Second || since > 8*time.Second && since < 9*time.Second) && s.GPUUtil != 0.9:
				t.Errorf("%v, both %v: utilisation %v", since, both, s.GPUUtil)
			}
		})
	}
}

// T5: after a restart of its host engine an exporter went on with the values of
// before, and its health page with OK. 200 proves nothing; what must move decides,
// for the GPU and for the engine.
func oldValuesHealthOK(t *testing.T) {
	mustExist(t, "../telemetry/dcgm", "TestFrozenHostEngineMakesEverythingStaleAndRecovers")
	old := func(since time.Duration) time.Duration { return min(since, time.Second) }
	gpu := func(since time.Duration) string { return gpuLines("GPU-1", old(since).Milliseconds(), 99) }
	engine := func(since time.Duration) string { return worker(old(since)) }
	watched(t, &pages{engine: engine, gpu: gpu}, nil, 10*time.Second, func(since time.Duration, w *telemetry.Window) {
		s, _ := w.Latest()
		if age := w.Age(s.At); since > 4*time.Second && (s.Known.HasGPU() || age < 2*time.Second) {
			t.Errorf("%v: GPU known %v, engine's age %v", since, s.Known.HasGPU(), age)
		}
		if x := vector(w); since > 4*time.Second && (!missing(x, features.KVUsage) || !missing(x, features.GRActive1s)) {
			t.Errorf("%v: features of old values %v", since, x)
		}
	})
}

// pool is endpoints judged by the formula, on a clock of its own.
type pool struct {
	judge     *scorer.Judge
	now       time.Time
	endpoints []scorer.EndpointView
	samples   []telemetry.Sample
	silent    map[int]bool
}

func newPool(n int) *pool {
	p := &pool{judge: scorer.NewJudge(scorer.Formula(scorer.FormulaOptions{})), now: time.Now(), silent: map[int]bool{}}
	for i := range n {
		p.endpoints = append(p.endpoints, scorer.EndpointView{
			Address:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + i)}), 8000),
			Capacity: 1, Window: new(telemetry.Window), Own: scorer.Own{InFlight: 10, Attempts5s: 20},
		})
		p.samples = append(p.samples, telemetry.Sample{
			Known:   telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasGenerationTokens | telemetry.HasXID | telemetry.HasGPUUtil,
			KVUsage: 0.3, Running: 10,
		})
	}
	return p
}

func (p *pool) step() []scorer.Verdict {
	p.now = p.now.Add(interval)
	for i := range p.samples {
		s := &p.samples[i]
		if s.At = p.now; s.Running > 0 {
			s.GenerationTokens += 100
		}
		p.endpoints[i].Own.Successes++
		if !p.silent[i] {
			p.endpoints[i].Window.Add(*s)
		}
	}
	return p.judge.Step(p.now, []scorer.PoolView{{Name: "p", MaxInFlight: 256, Endpoints: p.endpoints}})
}

func (p *pool) pass(span time.Duration) (last []scorer.Verdict) {
	for range span / interval {
		last = p.step()
	}
	return last
}

// share is an endpoint's part of the pool's weight.
func share(verdicts []scorer.Verdict, i int) float64 {
	sum := 0.0
	for _, v := range verdicts {
		sum += v.Weight
	}
	return verdicts[i].Weight / sum
}

// T6: an XID 31 costs half of the risk for 5 s, and its gauge, which stands at 31
// until the driver is loaded anew, nothing more.
func xidNeverClears(t *testing.T) {
	p := newPool(4)
	fair := share(p.pass(2*time.Second), 0)
	p.samples[0].XID = 31
	least, lost := 1.0, 0.0
	for range 25 {
		verdicts := p.step()
		if verdicts[0].State == fleet.StateEjected {
			t.Fatalf("ejected: %+v", verdicts[0])
		}
		now := share(verdicts, 0)
		least, lost = min(least, now), lost+(fair-now)*interval.Seconds()
	}
	if least > 0.5*fair || least < 0.1*fair {
		t.Errorf("share %v of a fair %v while the XID is news", least, fair)
	}
	verdicts := p.pass(2 * time.Second)
	if after := share(verdicts, 0); math.Abs(after-fair) > 0.01*fair {
		t.Errorf("share %v of a fair %v after 7 s", after, fair)
	}
	if p.pass(time.Hour); math.Abs(share(p.step(), 0)-fair) > 0.01*fair {
		t.Error("the gauge still costs an hour later")
	}
	if lost > 5*fair {
		t.Errorf("lost %v fair seconds", lost/fair)
	}
}

// T7: instances are known by UUID and GPU_I_ID; pod labels, which may be missing or
// be the exporter's own, are not looked at; rows of no GPU speak for the node.
func migRows(t *testing.T) {
	for _, pod := range []string{"", `,pod="dcgm-exporter-x7k2p",namespace="monitoring"`, `,pod="other-tenant"`} {
		gpu := func(time.Duration) string {
			return "DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu=\"0\",UUID=\"GPU-1\",GPU_I_PROFILE=\"3g.40gb\",GPU_I_ID=\"1\"" + pod + "} 0.25\n" +
				"DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu=\"0\",UUID=\"GPU-1\",GPU_I_PROFILE=\"1g.10gb\",GPU_I_ID=\"13\"" + pod + "} 0.75\n" +
				"DCGM_FI_DEV_XID_ERRORS 31\n"
		}
		for selection, want := range map[string]float64{"GPU-1/1": 0.25, "GPU-1/13": 0.75, "GPU-1": 0.75} {
			watched(t, &pages{engine: worker, gpu: gpu}, []string{selection}, 2*time.Second, func(since time.Duration, w *telemetry.Window) {
				if s, _ := w.Latest(); since > time.Second && (s.GRActive != want || s.XID != 31) {
					t.Errorf("pod %q, %s: activity %v, XID %d", pod, selection, s.GRActive, s.XID)
				}
			})
		}
	}
}

// T11: each line is one that the reference parser ends at, and costs nothing but
// itself, and that only where it cannot be read.
func badLines(t *testing.T) {
	for name, tc := range map[string]struct {
		line string
		bad  bool // lost: no number can be read
	}{
		"exemplar":         {line: `vllm:prompt_tokens_total 7 # {trace_id="x"} 0.5`},
		"trailing blank":   {line: "vllm:prompt_tokens_total 7 "},
		"CRLF":             {line: "vllm:prompt_tokens_total 7\r"},
		"second HELP":      {line: "# HELP vllm:prompt_tokens_total a\n# HELP vllm:prompt_tokens_total b\nvllm:prompt_tokens_total 7"},
		"second TYPE":      {line: "# TYPE vllm:prompt_tokens_total counter\n# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 7"},
		"float timestamp":  {line: "vllm:prompt_tokens_total 7 1.7e9"},
		"bad UTF-8":        {line: "vllm:prompt_tokens_total{model_name=\"\xff\"} 7"},
		"bad escape":       {line: `vllm:prompt_tokens_total{model_name="\q"} 7`},
		"duplicate label":  {line: `vllm:prompt_tokens_total{engine="0",engine="0"} 7`},
		"1e309":            {line: "vllm:prompt_tokens_total 1e309", bad: true},
		"blank value":      {line: "vllm:prompt_tokens_total ", bad: true},
		"no final newline": {line: ""},
	} {
		page := "vllm:num_requests_running 3\n" + tc.line + "\nvllm:kv_cache_usage_perc 0.5"
		if tc.line == "" {
			page = "vllm:num_requests_running 3\nvllm:prompt_tokens_total 7\nvllm:kv_cache_usage_perc 0.5"
		} else {
			page += "\n"
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		if families, err := parser.TextToMetricFamilies(bytes.NewReader([]byte(page))); err == nil && families["vllm:kv_cache_usage_perc"] != nil {
			t.Errorf("%s: the reference parser reads it, so the row shows nothing", name)
		}
		counters := watched(t, &pages{engine: func(time.Duration) string { return page }}, nil, 2*time.Second, func(since time.Duration, w *telemetry.Window) {
			s, _ := w.Latest()
			if s.Running != 3 || s.KVUsage != 0.5 || s.Known.Has(telemetry.HasPromptTokens) == tc.bad || !tc.bad && s.PromptTokens != 7 {
				t.Errorf("%s: %+v", name, s)
			}
		})
		if (counters.BadLines > 0) != tc.bad || counters.Failures > 0 {
			t.Errorf("%s: %+v", name, counters)
		}
	}
}

// T12: an endpoint whose telemetry stops is neither full nor empty: it ends at its
// pool's median, whatever it said last; see also R6's property test,
// TestTelemetryBlackoutUnderLoadEjectsNothing.
func staleIsNotSaturated(t *testing.T) {
	for _, last := range []float64{0, 0.3, 0.8} {
		p := newPool(5)
		p.samples[0].KVUsage = last
		p.pass(2 * time.Second)
		p.silent[0] = true
		p.pass(30 * time.Second)
		verdicts := p.step()
		if got := share(verdicts, 0); !verdicts[0].Stale || verdicts[0].State != fleet.StateUnknown || math.Abs(got-0.2) > 0.005 {
			t.Errorf("with a last KV usage of %v: %+v, share %v, want a fair 0.2", last, verdicts[0], got)
		}
	}
}

// decide compiles the verdicts into a plan and asks it n times.
func decide(t *testing.T, verdicts []scorer.Verdict, n int) (shares []float64, p *plan.Plan) {
	t.Helper()
	in := plan.Inputs{Pools: []plan.PoolInput{{Name: "p"}}, Routes: []plan.RouteInput{{Name: "r", Split: []string{"p"}, DefaultBudget: 512}}}
	for i, v := range verdicts {
		in.Pools[0].Endpoints = append(in.Pools[0].Endpoints, plan.EndpointInput{
			Address: v.Endpoint.Address, Slot: uint32(i), Weight: v.Weight, KVFree: v.KVFree, Risk: v.Risk, State: v.State,
		})
	}
	p, err := plan.Compile(in)
	if err != nil {
		t.Fatal(err)
	}
	route, ok := p.Route("r")
	if !ok {
		t.Fatal("the plan has no route")
	}
	shares = make([]float64, len(verdicts))
	for seed := range uint64(n) {
		d := p.Decide(plan.Class{Route: route, Arm: plan.NoPool, Strategy: fleet.StrategyDynamic, Generates: true}, seed, nil)
		if d.N == 0 {
			t.Fatalf("decision %+v", d)
		}
		shares[d.Picks[0].Endpoint] += 1 / float64(n)
	}
	return shares, p
}

// T13: an engine whose KV usage stands at 99 % with nothing running is ejected and
// would, asked no more, stay so for ever. It keeps at least 1 % of the requests.
func stuckFull(t *testing.T) {
	p := newPool(8)
	p.pass(2 * time.Second)
	p.samples[0].KVUsage, p.samples[0].Running = 0.99, 0
	p.endpoints[0].Own.InFlight = 0
	if v := p.pass(10 * time.Second)[0]; v.State != fleet.StateEjected {
		t.Fatalf("a full engine: %+v", v)
	}
	verdicts := p.pass(10 * time.Minute)
	if got := share(verdicts, 0); got < 0.01-1e-9 || got > 0.02 {
		t.Errorf("weight %v of the pool's, want 1 %%: %+v", got, verdicts[0])
	}
	// Of 20,000 requests 200 ± 14.
	if shares, _ := decide(t, verdicts, 20_000); shares[0] < 0.0079 {
		t.Errorf("%v of the requests", shares[0])
	}
}

// T14: equal endpoints, and endpoints that are equal in pairs, get what their
// weights say: no more than three standard deviations above.
func tiesSpread(t *testing.T) {
	const n = 10_000
	rng := rand.New(rand.NewPCG(14, 28))
	for name, kv := range map[string][]float64{
		"all equal":    {0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3},
		"two groups":   {0.1, 0.1, 0.1, 0.6, 0.6, 0.6},
		"all idle":     make([]float64, 16),
		"equally full": {0.75, 0.75, 0.75, 0.75},
		"random pairs": {rng.Float64() / 2, 0.2, 0.2, rng.Float64() / 2, 0.4, 0.4},
	} {
		p := newPool(len(kv))
		for i := range kv {
			p.samples[i].KVUsage = kv[i]
		}
		verdicts := p.pass(3 * time.Second)
		shares, _ := decide(t, verdicts, n)
		for i, got := range shares {
			want := share(verdicts, i)
			if limit := want + 3*math.Sqrt(want*(1-want)/n); got > limit {
				t.Errorf("%s: endpoint %d has %v of the requests, weight %v, limit %v", name, i, got, want, limit)
			}
		}
	}
}

// T15: what leaves the config is gone with all it left: its page is not asked, no
// reading of it arrives, no verdict names it, and when it comes back it is new.
func ghostEndpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		target := func(i byte) scrape.Target {
			at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 8000)
			return scrape.Target{Endpoint: fleet.EndpointKey{Pool: "p", Address: at}, EngineURL: "http://" + at.String() + "/metrics", Interval: interval}
		}
		var mu sync.Mutex
		asked := map[string]time.Duration{}
		transport := roundTripper(func(r *http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			asked[r.URL.Host] = time.Since(begin)
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(worker(time.Since(begin))))}, nil
		})
		s := scrape.New([]scrape.Target{target(1), target(2)}, scrape.Options{Client: &http.Client{Transport: transport}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		heard := map[fleet.EndpointKey]time.Duration{}
		go func() {
			done <- s.Run(ctx, func(r telemetry.Reading) { heard[r.Endpoint] = time.Since(begin) })
		}()
		time.Sleep(5 * time.Second)
		s.SetTargets([]scrape.Target{target(2)})
		synctest.Wait()
		time.Sleep(5 * time.Second)
		cancel()
		<-done
		for i, want := range map[byte]bool{1: false, 2: true} {
			at := target(i)
			if late := asked[at.Endpoint.Address.String()] > 5*time.Second; late != want {
				t.Errorf("endpoint %d asked after the change: %v", i, late)
			}
			if late := heard[at.Endpoint] > 5*time.Second; late != want {
				t.Errorf("endpoint %d heard after the change: %v", i, late)
			}
		}
	})

	p := newPool(3)
	p.step()
	p.endpoints[2].Own.ConnectStreak = 3
	if v := p.pass(2 * time.Second)[2]; v.State != fleet.StateEjected {
		t.Fatalf("%+v", v)
	}
	ghost, sample := p.endpoints[2], p.samples[2]
	p.endpoints, p.samples = p.endpoints[:2], p.samples[:2]
	for _, v := range p.pass(time.Second) {
		if v.Endpoint.Address == ghost.Address {
			t.Fatalf("a verdict on what has left: %+v", v)
		}
	}
	ghost.Window, ghost.Own = new(telemetry.Window), scorer.Own{}
	p.endpoints, p.samples = append(p.endpoints, ghost), append(p.samples, sample)
	if v := p.step()[2]; v.State != fleet.StateProbe || v.Reason != scorer.ReasonProbe {
		t.Errorf("when it comes back: %+v", v)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// T18: a killed exporter left the driver hanging (XID 119, 120). The collector of
// the agent closes DCGM before it ends, also while a call hangs.
func collectorEndsCleanly(t *testing.T) {
	mustExist(t, "../telemetry/dcgm", "TestRunEndsWithinASecondWhileACallHangs")
	mustExist(t, "../telemetry/dcgm", "TestEndIsPromptWhileACallHangs")
	mustExist(t, "../internal/agent", "TestChildrenEndInOrder")
}

// mustExist fails unless the folder has a test of that name: the row's other half
// needs another package's parts.
func mustExist(t *testing.T, folder, test string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(source, []byte("func "+test+"(t *testing.T)")) {
			return
		}
	}
	t.Errorf("%s has no %s", folder, test)
}
