package scrape_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// TestSimulatorsPagesAreUnderstood scrapes a running simulator: at rest, after a
// request, with an XID, with blank pages and after a crash.
func TestSimulatorsPagesAreUnderstood(t *testing.T) {
	profile, err := sim.ProfileByName(sim.ProfileNames()[0])
	if err != nil {
		t.Fatal(err)
	}
	servers, err := sim.New(&sim.Config{Servers: []sim.ServerConfig{{
		Name: "one", Listen: netip.MustParseAddrPort("127.0.0.1:0"), Model: "m", GPU: "GPU-1234", Engine: profile,
	}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := servers.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	readings := make(chan telemetry.Reading, 1)
	done := make(chan error, 2)
	t.Cleanup(func() {
		cancel()
		<-done
		<-done
	})
	address := servers.Servers()[0].Addr()
	targets := scrape.Targets([]fleet.Pool{{
		Name:      "p",
		Endpoints: []fleet.Endpoint{{Address: address, GPUs: []string{"GPU-1234"}}},
		Telemetry: fleet.Telemetry{Source: fleet.TelemetryScrape, Interval: 50 * time.Millisecond,
			EnginePath: "/metrics", GPUPath: "/gpu/metrics"},
	}})
	go func() { done <- servers.Run(ctx) }()
	go func() {
		done <- scrape.New(targets, scrape.Options{}).Run(ctx, func(r telemetry.Reading) {
			select {
			case readings <- r:
			default: // the test is not looking
			}
		})
	}()
	await := func(what string, ok func(telemetry.Reading) bool) telemetry.Sample {
		t.Helper()
		var last telemetry.Reading
		for {
			select {
			case last = <-readings:
				if ok(last) {
					return last.Sample
				}
			case <-ctx.Done():
				t.Fatalf("no reading with %s; the last: %+v", what, last)
			}
		}
	}

	const all = telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens |
		telemetry.HasPromptTokens | telemetry.HasGenerationTokens | telemetry.HasPreemptions |
		telemetry.HasTTFT |
		telemetry.HasGPUUtil | telemetry.HasGRActive | telemetry.HasDRAMActive | telemetry.HasFBUsed | telemetry.HasFBTotal |
		telemetry.HasPower | telemetry.HasXID
	s := await("every field that a vLLM and a GPU have", func(r telemetry.Reading) bool { return r.Sample.Known == all })
	if s.KVTokens < 1000 || s.FBUsedMiB < 1000 || s.XID != 0 || s.Running != 0 || s.TTFTCount != 0 {
		t.Errorf("at rest: %+v", s)
	}

	body := `{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hello"}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://%s/v1/chat/completions", address), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	s = await("a first token", func(r telemetry.Reading) bool { return r.Sample.TTFTCount == 1 })
	if s.PromptTokens < 1 || s.TTFTSum <= 0 {
		t.Errorf("after a request: %+v", s)
	}

	inject := func(kind sim.FaultKind) {
		t.Helper()
		if err := servers.Inject("one", sim.NewFault(kind, 0, time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	inject(sim.XID)
	await("the XID", func(r telemetry.Reading) bool { return r.Sample.XID == 79 })
	await("the XID gone or standing with fresh numbers", func(r telemetry.Reading) bool { return r.Sample.Known.HasEngine() })
	inject(sim.Blank)
	await("no engine number on an answering page", func(r telemetry.Reading) bool {
		return r.Err != nil && strings.Contains(r.Err.Error(), "no usable number")
	})
	await("numbers again", func(r telemetry.Reading) bool { return r.Sample.Known.HasEngine() })
	inject(sim.Crash)
	await("an error", func(r telemetry.Reading) bool { return r.Err != nil })
	await("restarted counters", func(r telemetry.Reading) bool { return r.Sample.Known == all && r.Sample.TTFTCount == 0 })
}
