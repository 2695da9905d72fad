package serve

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"syscall"
)

func BenchmarkZZOutcome(b *testing.B) {
	cfg := &fleet.Config{Routes: []fleet.Route{{Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic,
		ClientStrategy: fleet.ClientStrategyHonor, DefaultMaxTokens: 512, Split: fleet.Split{{Pool: "gpu", Weight: 1}}}}}
	pool := fleet.Pool{Name: "gpu", Tier: "gpu", MaxInFlight: 256, Telemetry: fleet.Telemetry{Source: fleet.TelemetryScrape}}
	for i := range 10 {
		pool.Endpoints = append(pool.Endpoints, fleet.Endpoint{
			Name: fmt.Sprint("g", i), Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000), Capacity: 1,
		})
	}
	cfg.Pools = []fleet.Pool{pool}
	cfg.Serve.StateDir = b.TempDir()
	s, err := New(Options{Config: cfg})
	if err != nil { b.Fatal(err) }
	now := time.Now()
	cpu := func() int64 { var u syscall.Rusage; syscall.Getrusage(syscall.RUSAGE_SELF, &u); return u.Utime.Nano() + u.Stime.Nano() }
	c := cpu()
	i := 0
	b.ReportAllocs()
	ids := make([]string, 1<<15)
	for i := range ids { ids[i] = fmt.Sprintf("1718924%06d-%03d-%04d", i/1000, 7, i%1000) }
	for b.Loop() {
		id := ids[i&(1<<15-1)]
		if i&(1<<15-1) == 0 { now = now.Add(time.Minute); s.ledger.Expire(now) }
		i++
		e := fleet.EndpointKey{Pool: "gpu", Address: pool.Endpoints[i%10].Address}
		s.ledger.Reserve(id, e, 0, time.Second, now)
		s.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: id, Attempt: 1, Endpoint: e, At: now})
		s.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "n", ID: id, Attempt: 1, Endpoint: e, At: now, Code: 200, Cause: fleet.CauseOK, HeaderTime: time.Millisecond})
		s.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: id, Attempt: 1, Endpoint: e, At: now, Code: 200, Cause: fleet.CauseOK})
	}
	b.ReportMetric(float64(cpu()-c)/float64(i), "cpu-ns/op")
}
