package serve

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// BenchmarkTick is one whole tick of 1,000 endpoints, of which a quarter sent
// readings since the last: scoring, states, compiling the plan, and each fourth
// time what people are shown. It runs twenty times a second.
func BenchmarkTick(b *testing.B) {
	cfg := &fleet.Config{Routes: []fleet.Route{{Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic,
		ClientStrategy: fleet.ClientStrategyHonor, DefaultMaxTokens: 512, Split: fleet.Split{{Pool: "gpu", Weight: 1}}}}}
	pool := fleet.Pool{Name: "gpu", Tier: "gpu", MaxInFlight: 256, Telemetry: fleet.Telemetry{Source: fleet.TelemetryScrape}}
	for i := range 1000 {
		pool.Endpoints = append(pool.Endpoints, fleet.Endpoint{
			Name: fmt.Sprint("g", i), Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000), Capacity: 1,
		})
	}
	cfg.Pools = []fleet.Pool{pool}
	s := newScoring(scoringModel{Model: scorer.Formula(scorer.FormulaOptions{})}, accesslog.NewLedger(time.Now), noAdmission)
	s.reconfigure(cfg, nil)
	now := time.Now()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		now = now.Add(tickEvery)
		for j, e := range pool.Endpoints {
			if j%4 != i%4 {
				continue
			}
			s.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: e.Address}, Sample: telemetry.Sample{
				At: now, Known: telemetry.HasKVUsage | telemetry.HasWaiting | telemetry.HasRunning,
				KVUsage: float64((i+j)%100) / 100, Running: 3,
			}})
		}
		inputs, _ := s.step(now)
		if _, err := plan.Compile(inputs); err != nil {
			b.Fatal(err)
		}
	}
}
