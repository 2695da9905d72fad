package admission_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/admission/ratelimit"
	"github.com/fairlead-proxy/fairlead/fleet"
)

func gate(limiter admission.Limiter) *admission.Gate {
	return admission.New(admission.Options{Limiter: limiter, Config: &fleet.Config{
		Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 256, Endpoints: make([]fleet.Endpoint, 8)}},
		Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, FairShare: true}},
		Limits: []fleet.Limit{{
			Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1 << 20,
			Requests: fleet.Rate{Amount: 1 << 38, Window: time.Hour}, Tokens: fleet.Rate{Amount: 1 << 38, Window: time.Hour},
		}},
	}})
}

// asks are requests of 64 clients with ids of their own.
func asks(n int) []admission.Ask {
	out := make([]admission.Ask, n)
	for i := range out {
		out[i] = admission.Ask{
			ID: fmt.Sprintf("%013d-000-%04d", i, i%10000), Route: "r", Pool: "p",
			Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte{byte(i % 64), 1}),
			Level:  fleet.BurstLevel(i % 8), Class: fleet.ClassInteractive, Input: 100, Output: 200, At: time.Now(), Seed: uint64(i),
		}
	}
	return out
}

// pass lets a request in and out again.
func pass(g *admission.Gate, a *admission.Ask, node string) {
	g.Admit(a)
	g.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: node, Attempt: 1, At: a.At})
	g.Apply(fleet.Outcome{
		Kind: fleet.RequestEnded, ID: a.ID, Node: node, Code: 200, Cause: fleet.CauseOK, At: a.At,
		Usage: fleet.Usage{Known: true, Input: 100, Output: 150},
	})
}

func TestAdmittedRequestAllocatesNothing(t *testing.T) {
	g := gate(ratelimit.NewEmbedded())
	all := asks(256)
	for i := range all {
		pass(g, &all[i], "n")
	}
	i := 0
	if n := testing.AllocsPerRun(2000, func() { pass(g, &all[i%len(all)], "n"); i++ }); n != 0 {
		t.Errorf("%v allocations per request; want none", n)
	}
}

func BenchmarkAdmitToEnd(b *testing.B) {
	g, all := gate(ratelimit.NewEmbedded()), asks(1024)
	b.ReportAllocs()
	for i := range b.N {
		pass(g, &all[i%len(all)], "n")
	}
}

func BenchmarkAdmitToEndContended(b *testing.B) {
	g, all := gate(ratelimit.NewEmbedded()), asks(1<<16)
	var next atomic.Int64
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			pass(g, &all[next.Add(1)&(1<<16-1)], "n")
		}
	})
}

func BenchmarkAdmitAndCancel(b *testing.B) {
	g, all := gate(ratelimit.NewEmbedded()), asks(1024)
	b.ReportAllocs()
	for i := range b.N {
		a := &all[i%len(all)]
		g.Admit(a)
		g.Cancel(a.ID)
	}
}

// BenchmarkRefuse is of a client that hammers.
func BenchmarkRefuse(b *testing.B) {
	g, all := gate(nil), asks(1024)
	b.ReportAllocs()
	for i := range b.N {
		g.Refuse(&all[i%len(all)], admission.ReasonBusy)
	}
}

// BenchmarkRefuseNewKeys is of callers that invent a key for each request.
func BenchmarkRefuseNewKeys(b *testing.B) {
	g, all := gate(nil), asks(1)
	b.ReportAllocs()
	for i := range b.N {
		a := all[0]
		a.Client = admission.Client{byte(i), byte(i >> 8), byte(i >> 16), byte(i >> 24)}
		g.Refuse(&a, admission.ReasonBusy)
	}
}

func BenchmarkStepOf4096Clients(b *testing.B) {
	g := gate(nil)
	for i, a := range asks(4096) {
		a.Client = admission.Client{byte(i), byte(i >> 8)}
		g.Admit(&a)
	}
	views := []admission.PoolView{{Name: "p", Limit: 2048, InFlight: 4096}}
	now := time.Now()
	b.ReportAllocs()
	for range b.N {
		now = now.Add(time.Microsecond)
		g.Step(now, views)
	}
}
