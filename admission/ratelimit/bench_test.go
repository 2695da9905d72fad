package ratelimit

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
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
