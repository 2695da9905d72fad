package ratelimit

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

var generous = admission.Rates{Requests: per(1e12, time.Hour), Tokens: per(1e12, time.Hour)}

func TestReservingAllocatesNothingAfterAClientsFirstRequest(t *testing.T) {
	m := NewEmbedded()
	k, now := client("a"), time.Now()
	m.Reserve(k, generous, 10, now)
	if n := testing.AllocsPerRun(1000, func() {
		a := m.Reserve(k, generous, 10, now)
		m.Settle(a.Ticket, 7)
	}); n != 0 {
		t.Errorf("admitted: %v allocations", n)
	}
	if n := testing.AllocsPerRun(1000, func() { m.Reserve(k, generous, math.MaxInt64, now) }); n != 0 {
		t.Errorf("refused: %v allocations", n)
	}
}

func BenchmarkEmbeddedAlone(b *testing.B) {
	m := NewEmbedded()
	k, r, now := client("a"), requests(1e12, time.Hour), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		m.Reserve(k, r, 0, now)
	}
}

func BenchmarkEmbeddedWithTokens(b *testing.B) {
	m := NewEmbedded()
	k, now := client("a"), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		a := m.Reserve(k, generous, 1, now)
		m.Settle(a.Ticket, 1)
	}
}

// BenchmarkEmbeddedContended has every processor reserve for one client.
func BenchmarkEmbeddedContended(b *testing.B) {
	m := NewEmbedded()
	k, r, now := client("a"), requests(1e12, time.Hour), time.Now()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			m.Reserve(k, r, 0, now)
		}
	})
}

// BenchmarkCounter is the compare-and-swap alone.
func BenchmarkCounter(b *testing.B) {
	var c counter
	for b.Loop() {
		c.take(0, 1, maxUsed)
	}
}

// BenchmarkRedis reserves through the script from 32 goroutines at once, on a
// loopback socket; BenchmarkRedisINCR is the same client with one INCR instead.
func BenchmarkRedis(b *testing.B) {
	m, stop := runningRedis(b)
	defer stop()
	k, now := client("a"), time.Now()
	b.ReportAllocs()
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if a := m.Reserve(k, generous, 1, now); a.Local {
				b.Error("not counted by the server")
				return
			}
		}
	})
}

func BenchmarkRedisINCR(b *testing.B) {
	m, stop := runningRedis(b)
	defer stop()
	c := m.link.Load().client
	b.ReportAllocs()
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			ctx, cancel := context.WithTimeout(context.Background(), patient)
			err := c.Do(ctx, c.B().Incr().Key("a").Build()).Error()
			cancel()
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkRedisAlone has one question in flight.
func BenchmarkRedisAlone(b *testing.B) {
	m, stop := runningRedis(b)
	defer stop()
	k, now := client("a"), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		m.Reserve(k, generous, 1, now)
	}
}

func runningRedis(b *testing.B) (m *Redis, stop func()) {
	b.Helper()
	s := redisbin.Start(b, redisbin.Config{})
	m = NewRedis(Options{Redis: fleet.Redis{Address: s.Address(), Deadline: patient}})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = m.Run(ctx) }()
	for !m.Counters().Up {
		time.Sleep(time.Millisecond)
	}
	b.ResetTimer()
	return m, func() { b.StopTimer(); cancel(); <-ended }
}
