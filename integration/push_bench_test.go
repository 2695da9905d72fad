package integration

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// pushingNodes is the size of the fleet that design §12 budgets for: at most 0.5
// core and 128 MiB of `serve`.
const pushingNodes = 1000

func pushingAddress(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i / 250), byte(i%250 + 1)}), 8000)
}

// BenchmarkServeWithThousandAgents runs the whole of `fairlead serve` as a
// process of its own under 1,000 agents that push a frame of eight GPUs each
// 200 ms, over a Unix socket, and reports what that process uses: taking the
// frames, windows, risks, states, weights and plans. One iteration is one round
// of all agents; -benchtime 100x takes 20 s.
func BenchmarkServeWithThousandAgents(b *testing.B) {
	dir := envoytest.ShortTempDir(b)
	p := &place{dir: dir, file: dir + "/fairlead.yaml"}
	var endpoints strings.Builder
	for i := range pushingNodes {
		fmt.Fprintf(&endpoints, "      - { address: %s, node: n%d }\n", pushingAddress(i), i)
	}
	text := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
serve: { xds: "unix:%[1]s/xds", extproc: "unix:%[1]s/ep", accessLog: "unix:%[1]s/als", admin: %[2]s, push: "unix:%[1]s/push", stateDir: %[1]s/state }
groups: [ { name: edge, listener: { address: 127.0.0.1:10000 }, routes: [chat] } ]
pools:
  - name: gpu
    telemetry: { source: push }
    endpoints:
%[3]sroutes: [ { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: gpu } ]
`, dir, envoytest.FreeAddr(b), endpoints.String())
	if err := os.WriteFile(p.file, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	var err error
	if p.config, err = fleet.Load(p.file); err != nil {
		b.Fatal(err)
	}
	p.client = admin.NewClient(p.config.Serve.Admin.Target())
	process := startFairlead(b, dir, "serve", "-f", p.file)
	p.waitReady(b, process)

	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	agents := make([]*push.Client, pushingNodes)
	for i := range agents {
		agents[i], err = push.NewClient(push.ClientOptions{Target: fleet.Address{Path: dir + "/push"}, Node: fmt.Sprintf("n%d", i), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			b.Fatal(err)
		}
		running.Go(func() { _ = agents[i].Run(ctx) })
	}
	rounds := 0
	round := func() {
		began := time.Now()
		for i, agent := range agents {
			agent.Send(pushedFrame(i, rounds, time.Now()))
			if i%50 == 49 { // agents are not in step
				time.Sleep(time.Until(began.Add(200 * time.Millisecond * time.Duration(i+1) / pushingNodes)))
			}
		}
		rounds++
	}
	known := func() (n int) {
		f, err := p.client.Fleet(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		for _, e := range f.Pools[0].Endpoints {
			if e.Known {
				n++
			}
		}
		return n
	}
	for known() < pushingNodes {
		round()
	}
	before, began := processCPU(b, process.cmd.Process.Pid), time.Now()
	for b.Loop() {
		round()
	}
	cpu, took := processCPU(b, process.cmd.Process.Pid)-before, time.Since(began)
	b.ReportMetric(cpu.Seconds()/took.Seconds(), "cores")
	b.ReportMetric(processRSS(b, process.cmd.Process.Pid), "MiB-RSS")
	b.ReportMetric(float64(known()), "known")
}

// pushedFrame is what agent i says in a round.
func pushedFrame(i, round int, now time.Time) push.Frame {
	gpus := make([]telemetry.GPU, 8)
	ids := make([]string, len(gpus))
	for k := range gpus {
		ids[k] = fmt.Sprintf("GPU-%04d-%d", i, k)
		gpus[k] = telemetry.GPU{
			ID: ids[k], Model: "NVIDIA H100 80GB HBM3", At: now,
			Known: telemetry.GPUHasUtil | telemetry.GPUHasGRActive | telemetry.GPUHasDRAMActive | telemetry.GPUHasFBUsed | telemetry.GPUHasFBTotal |
				telemetry.GPUHasPower | telemetry.GPUHasXID | telemetry.GPUHasRecovery,
			Util: 0.9, GRActive: 0.8, DRAMActive: 0.6, FBUsedMiB: 74_000, FBTotalMiB: 80_000, PowerWatts: 400 + float64(round%50),
		}
	}
	s := telemetry.Sample{
		At: now, Changed: now,
		Known:   telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens | telemetry.HasPromptTokens | telemetry.HasGenerationTokens | telemetry.HasTTFT,
		KVUsage: 0.3 + 0.001*float64(round%100), Running: 40, KVTokens: 447_040,
		PromptTokens: float64(1000 * round), GenerationTokens: float64(300 * round), TTFTSum: float64(round), TTFTCount: float64(10 * round),
	}
	s.SetGPUs(gpus)
	return push.Frame{Epoch: 1, At: now, GPUs: gpus, Endpoints: []push.Update{{Endpoint: pushingAddress(i), Sample: s, GPUs: ids}}}
}

// processCPU is the CPU time that a process has used.
func processCPU(tb testing.TB, pid int) time.Duration {
	tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		tb.Skip("no /proc:", err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	var user, system int64
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		tb.Fatal(err)
	}
	const clockTicks = 100 // USER_HZ of Linux
	return time.Duration(user+system) * time.Second / clockTicks
}

// processRSS is a process's resident memory in MiB.
func processRSS(tb testing.TB, pid int) float64 {
	tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		tb.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "VmRSS:")
	var kib float64
	if _, err := fmt.Sscan(after, &kib); err != nil {
		tb.Fatal(err)
	}
	return kib / 1024
}
