package sim

import (
	"context"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

func pageText(t *testing.T, s *Server, path string) string {
	t.Helper()
	rec := call(t.Context(), s, http.MethodGet, path, "")
	if rec.Code != 200 || !strings.HasPrefix(rec.Header().Get("Content-Type"), "text/plain; version=0.0.4") {
		t.Fatalf("%s: got %d %q", path, rec.Code, rec.Header().Get("Content-Type"))
	}
	return rec.Body.String()
}

// lineOf returns the value of the first sample of a name.
func lineOf(t *testing.T, s *Server, path, name string) string {
	t.Helper()
	for line := range strings.Lines(pageText(t, s, path)) {
		if strings.HasPrefix(line, name+"{") {
			return strings.TrimSpace(line[strings.LastIndexByte(line, '}')+1:])
		}
	}
	return ""
}

func wantLine(t *testing.T, s *Server, path, name, want string) {
	t.Helper()
	if got := lineOf(t, s, path, name); got != want {
		t.Fatalf("%s is %q, want %q", name, got, want)
	}
}

func number(t *testing.T, s *Server, path, name string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(lineOf(t, s, path, name), 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}

// busyServer has 20 long requests under way when body runs.
func busyServer(t *testing.T, body func(t *testing.T, s *Server)) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		ctx, cancel := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		for range 20 {
			clients.Go(func() {
				call(ctx, s, http.MethodPost, "/v1/chat/completions", chatBody(`,"max_tokens":100000,"ignore_eos":true,"fairlead_sim":{"prompt_tokens":1000}`))
			})
		}
		pass(3 * time.Second)
		body(t, s)
		cancel()
		clients.Wait()
		atRest(t, s)
	})
}

func TestPagesArePrometheusText(t *testing.T) {
	busyServer(t, func(t *testing.T, s *Server) {
		for path, names := range map[string][]string{
			"/metrics": {
				"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total",
				"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds",
				"vllm:inter_token_latency_seconds", "vllm:cache_config_info", "fairlead_sim_queued_prompt_tokens",
			},
			"/gpu/metrics": {
				"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_POWER_USAGE",
				"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_TEMP",
			},
		} {
			parser := expfmt.NewTextParser(model.UTF8Validation)
			families, err := parser.TextToMetricFamilies(strings.NewReader(pageText(t, s, path)))
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				if families[name] == nil {
					t.Errorf("%s has no %s", path, name)
				}
			}
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, _ := parser.TextToMetricFamilies(strings.NewReader(pageText(t, s, "/metrics")))
		h := families["vllm:time_to_first_token_seconds"].Metric[0].Histogram
		if h.GetSampleCount() != 20 || h.GetSampleSum() <= 0 || h.Bucket[len(h.Bucket)-1].GetCumulativeCount() != 20 {
			t.Errorf("times to first token: %v; want 20", h)
		}
	})
}

func TestPagesTellWhatTheEngineDoes(t *testing.T) {
	busyServer(t, func(t *testing.T, s *Server) {
		wantLine(t, s, "/metrics", "vllm:num_requests_running", "20")
		wantLine(t, s, "/metrics", "vllm:num_requests_waiting", "0")
		wantLine(t, s, "/metrics", "vllm:prompt_tokens_total", "20000")
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_DEV_GPU_UTIL", "100")
		st := s.Stats()
		tokens := 20000 + float64(st.GeneratedTokens)
		within(t, "KV usage", st.KVUsage, tokens/float64(s.cfg.Engine.KVTokens), 0.02)
		within(t, "KV usage on the page", number(t, s, "/metrics", "vllm:kv_cache_usage_perc"), st.KVUsage, 1e-9)
		within(t, "busy", st.Busy.Seconds(), 3, 0.02)
		if page := pageText(t, s, "/metrics"); !strings.Contains(page, `vllm:cache_config_info{engine="0",model_name="llama-3.1-8b",block_size="16",gpu_memory_utilization="0.92",num_gpu_blocks="27940"} 1`) {
			t.Errorf("no cache_config_info in\n%s", page)
		}
		if page := pageText(t, s, "/gpu/metrics"); !strings.Contains(page, `DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-`) || !strings.Contains(page, `modelName="NVIDIA H100 80GB HBM3",Hostname="h100-1"} 0`) {
			t.Errorf("labels are missing in\n%s", page)
		}
	})
}

func TestFramebufferStaysFlat(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		idle := number(t, s, "/gpu/metrics", "DCGM_FI_DEV_FB_USED")
		within(t, "share of memory", idle/(idle+number(t, s, "/gpu/metrics", "DCGM_FI_DEV_FB_FREE")), 0.92, 0.001)
		post(t, s, "/v1/chat/completions", chatBody(`,"max_tokens":1000,"ignore_eos":true`))
		if busy := number(t, s, "/gpu/metrics", "DCGM_FI_DEV_FB_USED"); busy != idle {
			t.Fatalf("framebuffer went from %g to %g MiB", idle, busy)
		}
	})
}

func TestFrozenPagesRepeatThemselves(t *testing.T) {
	busyServer(t, func(t *testing.T, s *Server) {
		for _, path := range []string{"/metrics", "/gpu/metrics"} {
			inject(t, s, "frozen:h100-1+10s")
			one := pageText(t, s, path)
			pass(5 * time.Second)
			if pageText(t, s, path) != one {
				t.Errorf("%s changed while frozen", path)
			}
			pass(5 * time.Second)
			if pageText(t, s, path) == one {
				t.Errorf("%s did not change after it", path)
			}
		}
	})
}

func TestBlankPagesHoldNoUsableNumber(t *testing.T) {
	busyServer(t, func(t *testing.T, s *Server) {
		inject(t, s, "blank:h100-1")
		if page := pageText(t, s, "/metrics"); page != "" {
			t.Errorf("the engine's page holds %q", page)
		}
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_DEV_GPU_UTIL", "9223372036854775794")
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_DEV_FB_USED", "9223372036854775794")
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_PROF_DRAM_ACTIVE", "")
		if watts := number(t, s, "/gpu/metrics", "DCGM_FI_DEV_POWER_USAGE"); watts < math.Exp2(47) {
			t.Errorf("power is %g, not a blank", watts)
		}
	})
}

func TestEnergyGrowsOnAnIdleGPU(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		pass(10 * time.Second)
		within(t, "idle energy", number(t, s, "/gpu/metrics", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"), 10*70*1000, 1e-6)
	})
}

func BenchmarkEnginePage(b *testing.B) { benchmarkPage(b, "/metrics") }

func BenchmarkGPUPage(b *testing.B) { benchmarkPage(b, "/gpu/metrics") }

func benchmarkPage(b *testing.B, path string) {
	s := newServer(testConfig(b), 1, slog.New(slog.DiscardHandler))
	for range 100 {
		s.engine.Submit(&engine.Sequence{Prompt: 100, Output: 100, Owner: make(chan struct{}, 1)}, 0)
	}
	r := httptest.NewRequest(http.MethodGet, path, nil)
	w := discard{http.Header{}}
	b.ReportAllocs()
	for b.Loop() {
		s.handler.ServeHTTP(w, r)
	}
}

// discard is a response nobody reads.
type discard struct{ h http.Header }

func (d discard) Header() http.Header       { return d.h }
func (discard) WriteHeader(int)             {}
func (discard) Write(p []byte) (int, error) { return io.Discard.Write(p) }
