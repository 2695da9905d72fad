package features

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// fullWindow holds 25 samples in which a busy engine and its GPU tell all.
func fullWindow(now time.Time, w *telemetry.Window) {
	for i := range telemetry.WindowTicks {
		k := float64(i)
		w.Add(telemetry.Sample{
			At: now.Add(time.Duration(i-telemetry.WindowTicks+1) * 200 * time.Millisecond),
			Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens |
				telemetry.HasMaxSeqs | telemetry.HasPromptTokens | telemetry.HasGenerationTokens | telemetry.HasPreemptions |
				telemetry.HasTTFT | telemetry.HasGRActive | telemetry.HasDRAMActive | telemetry.HasPCIe | telemetry.HasXID,
			KVUsage: 0.5 + 0.01*k, Running: 20, Waiting: 2, KVTokens: 400_000, MaxSeqs: 256,
			PromptTokens: 1000 * k, GenerationTokens: 500 * k, TTFTSum: 0.2 * k, TTFTCount: k,
			GRActive: 0.9, DRAMActive: 0.6, PCIeShare: 0.1,
		})
	}
}

func BenchmarkExtract(b *testing.B) {
	var w telemetry.Window
	now := time.Now()
	fullWindow(now, &w)
	own := scorer.Own{InFlight: 25, SentPromptTokens: 4000, ArrivedPromptTokens: 9000, Errors5s: 1}
	b.ReportAllocs()
	for b.Loop() {
		Extract(&w, own, now)
	}
}

// BenchmarkExtract1000 goes round 1,000 endpoints, whose windows (6 MB) do not
// fit into a core's own caches.
func BenchmarkExtract1000(b *testing.B) {
	windows := make([]telemetry.Window, 1000)
	now := time.Now()
	for i := range windows {
		fullWindow(now, &windows[i])
	}
	own := scorer.Own{InFlight: 25, SentPromptTokens: 4000, ArrivedPromptTokens: 9000, Errors5s: 1}
	b.ReportAllocs()
	for b.Loop() {
		for i := range windows {
			Extract(&windows[i], own, now)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/endpoint")
}
