package agent

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// get asks the agent's handler.
func get(a *Agent, path string) (code int, body string) {
	w := httptest.NewRecorder()
	a.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

func TestMetricsShowSourcesServersAndGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(_ *bench, o *Options) {
			o.GPUCounts = func() map[string]uint64 { return map[string]uint64{"late": 4} }
		})
		f := gpuFrame()
		f.GPUs[0].XID, f.GPUs[0].XIDEvents = 79, 2
		f.GPUs[1].Recovery = telemetry.RecoverGPUReset
		f.GPUs[2] = telemetry.GPU{ID: "GPU-c", Lost: true}
		b.gpus <- f
		b.read(first, engineSample(), nil)
		b.read(second, telemetry.Sample{}, errors.New("connection refused"))
		b.wait(300 * time.Millisecond)
		code, page := get(b.agent, "/metrics")
		if code != http.StatusOK {
			t.Fatalf("status %d: %s", code, page)
		}
		for _, want := range []string{
			`fairlead_agent_reads_total{source="engine"} 2`,
			`fairlead_agent_read_failures_total{source="engine"} 1`,
			`fairlead_agent_reads_total{source="gpu"} 1`,
			`fairlead_agent_read_failures_total{source="gpu"} 0`,
			`fairlead_agent_frames_total{what="written"} 7`,
			`fairlead_agent_frames_total{what="dropped"} 2`,
			`fairlead_agent_push_connected 1`,
			`fairlead_agent_gpu_epoch 3`,
			`fairlead_agent_gpu_source_total{what="late"} 4`,
			`fairlead_agent_push_refused 0`,
			`fairlead_agent_server_gpus{server="127.0.0.1:8000"} 2`,
			`fairlead_agent_servers_without_gpus 0`,
			`fairlead_agent_source_age_seconds{server="127.0.0.1:8000",source="engine"} 0.3`,
			`fairlead_agent_source_age_seconds{server="",source="gpu"} 0.3`,
			`fairlead_agent_gpu_util_ratio{gpu="GPU-b"} 0.9`,
			`fairlead_agent_gpu_power_watts{gpu="GPU-a"} 300`,
			`fairlead_agent_gpu_xid{gpu="GPU-a"} 79`,
			`fairlead_agent_gpu_xid_events_total{gpu="GPU-a"} 2`,
			`fairlead_agent_gpu_condition{condition="eject",gpu="GPU-b"} 1`,
			`fairlead_agent_gpu_condition{condition="lost",gpu="GPU-c"} 1`,
		} {
			if !strings.Contains(page, want+"\n") {
				t.Errorf("no %s", want)
			}
		}
		for _, unwanted := range []string{`gpu_util_ratio{gpu="GPU-c"}`, `source_age_seconds{server="127.0.0.1:8001"`, "gpu_framebuffer_used_bytes{"} {
			if strings.Contains(page, unwanted) {
				t.Errorf("%s is shown though it is unknown", unwanted)
			}
		}
	})
}

func TestReadinessNamesWhatIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		code, body := get(b.agent, "/readyz")
		if code != http.StatusServiceUnavailable || !strings.Contains(body, "GPUs: GPUs were not read yet") ||
			!strings.Contains(body, "GPUs of 127.0.0.1:8000: not looked for yet") {
			t.Errorf("at first: %d %s", code, body)
		}
		b.gpus <- gpuFrame()
		b.wait(300 * time.Millisecond)
		if code, body := get(b.agent, "/readyz"); code != http.StatusOK {
			t.Errorf("with GPUs and an engine that is down: %d %s", code, body)
		}
		b.gpus <- telemetry.GPUFrame{At: time.Now(), Err: errors.New("connection lost")}
		b.wait(300 * time.Millisecond)
		if code, body := get(b.agent, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "connection lost") {
			t.Errorf("without GPUs: %d %s", code, body)
		}
		if code, body := get(b.agent, "/healthz"); code != http.StatusOK {
			t.Errorf("health: %d %s", code, body)
		}
		if err := b.stop(); err != nil {
			t.Fatal(err)
		}
		b.wait(time.Minute)
		if code, _ := get(b.agent, "/healthz"); code != http.StatusServiceUnavailable {
			t.Errorf("health of an agent that stands still: %d", code)
		}
		if _, body := get(b.agent, "/readyz"); !strings.Contains(body, "agent: stuck") {
			t.Errorf("readiness of an agent that stands still: %s", body)
		}
	})
}

func TestReadinessNamesWhatServeRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(b *bench, _ *Options) {
			b.stats.Refused = []push.Refusal{{Endpoint: "10.0.0.11:8000", Reason: "no pool has it"}}
		})
		b.gpus <- gpuFrame()
		b.wait(300 * time.Millisecond)
		if code, body := get(b.agent, "/readyz"); code != http.StatusServiceUnavailable || body != "push: serve does not take 10.0.0.11:8000: no pool has it\n" {
			t.Errorf("%d %s", code, body)
		}
	})
}

func TestMetricsSurviveAGPUNamedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		f := gpuFrame()
		f.GPUs = append(f.GPUs, f.GPUs[0], gpu("GPU-\xff", 0.1, 1))
		b.gpus <- f
		b.wait(300 * time.Millisecond)
		if code, page := get(b.agent, "/metrics"); code != http.StatusOK || !strings.Contains(page, `gpu_util_ratio{gpu="GPU-b"} 0.9`) {
			t.Errorf("status %d:\n%s", code, page)
		}
	})
}

func TestCheckEndsWhenNothingIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{gpus: make(chan telemetry.GPUFrame), readings: make(chan telemetry.Reading)}
		o := Options{Config: testConfig(), GPUs: gpuFake{b}, Engines: engineFake{b}, Proc: parseMachine(t, script).proc()}
		go func() {
			b.gpus <- gpuFrame()
			b.read(first, engineSample(), nil)
			b.read(second, engineSample(), nil)
		}()
		status, err := Check(t.Context(), o)
		if err != nil || status.Complete() != nil || len(status.Servers[0].GPUs) != 2 || !strings.Contains(status.Servers[0].Reason(), "[210]") {
			t.Errorf("status %+v, %v", status, err)
		}
	})
}

func TestStatusSaysWhatKeepsItFromBeingComplete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		if err := b.agent.Status().Complete(); err == nil || !strings.Contains(err.Error(), "not read yet") {
			t.Errorf("before the first frame: %v", err)
		}
		f := gpuFrame()
		f.Processes = nil
		b.gpus <- f
		b.wait(300 * time.Millisecond)
		if err := b.agent.Status().Complete(); err == nil || !strings.Contains(err.Error(), "GPUs of 127.0.0.1:8000 are unknown: the GPUs' source tells no processes") {
			t.Errorf("without processes: %v", err)
		}
	})
}
