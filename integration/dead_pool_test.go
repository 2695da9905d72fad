package integration

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// answering503 refuses every request without a time to wait.
var answering503 = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })

// longestDoubt is how long Fairlead waits to hear of a request that asks a server which
// failed.
const longestDoubt = 10 * time.Second

// head is a server of a chain's first pool, which fails until it is mended.
type head struct {
	*modelServer
	address string
}

// newHead makes one that nobody listens at, or that answers 503.
func newHead(t *testing.T, dead bool) *head {
	m := newModelServer(t)
	h := &head{m, m.addr().String()}
	if dead {
		m.Close()
	} else {
		m.answerWith(answering503)
	}
	return h
}

// mend lets it serve.
func (h *head) mend(t *testing.T, dead bool) {
	h.answerWith(taking(300 * time.Millisecond))
	if !dead {
		return
	}
	l, err := net.Listen("tcp", h.address)
	if err != nil {
		t.Error(err)
		return
	}
	again := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(h.serve)}}
	again.Start()
	t.Cleanup(again.Close)
}

// TestAFailingPoolLeavesTheNextItsLimit: the servers of a chain's first pool are dead, or
// answer 503, and sixty callers want more than the next pool has.
func TestAFailingPoolLeavesTheNextItsLimit(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for some 8 seconds each")
	}
	for _, strategy := range []string{"dynamic", "legacy"} {
		t.Run("dead, "+strategy, func(t *testing.T) { failingPool(t, true, false, strategy) })
		t.Run("answering 503, "+strategy, func(t *testing.T) { failingPool(t, false, false, strategy) })
		t.Run("dead, as Envoy knows, "+strategy, func(t *testing.T) { failingPool(t, true, true, strategy) })
	}
}

// failingPool is with servers that are dead or answer 503. checked: Envoy's own checks
// find them dead before any request comes.
func failingPool(t *testing.T, dead, checked bool, strategy string) {
	first := [2]*head{newHead(t, dead), newHead(t, dead)}
	next := [2]*modelServer{newModelServer(t), newModelServer(t)}
	for _, m := range next {
		m.answerWith(taking(300 * time.Millisecond))
	}
	checks, seen := "", 5*time.Second
	if checked {
		seen = longestDoubt + 2*time.Second
		checks = "healthCheck: { path: /health, interval: 200ms, timeout: 100ms }, "
	}
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 4, %sendpoints: [ { address: %q }, { address: %q } ] }
  - { name: b, maxInFlight: 8, endpoints: [ { address: %q }, { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: %s, pool: a, fallback: [ { pool: b } ] }
`, checks, first[0].address, first[1].address, next[0].addr(), next[1].addr(), strategy))
	if checked {
		s.envoy.WaitStat("cluster.a.membership_healthy", func(n int64) bool { return n == 1 })
	}
	ctx, cancel := context.WithTimeout(t.Context(), seen+15*time.Second)
	defer cancel()
	var of operations
	var parts sync.WaitGroup
	for i := range 60 {
		parts.Go(func() {
			for ctx.Err() == nil {
				of.run(ctx, t, s, fmt.Sprint("client-", i))
			}
		})
	}
	pause(ctx, 2*time.Second) // what nobody could know
	for _, m := range next {
		m.peak.Store(0)
	}
	before := of.served.Load()
	pause(ctx, seen)
	served, peaks := of.served.Load()-before, [2]int64{next[0].peak.Load(), next[1].peak.Load()}
	most := 16 * int64(seen/(300*time.Millisecond))
	t.Logf("served %d of %d at most, %d given up; at most %d at a time on servers of 8", served, most, of.gaveUp.Load(), peaks)
	for _, n := range peaks {
		if n > 10 {
			t.Errorf("%d at a time on a server of 8; want one more for each of two servers that are asked", n)
		}
	}
	if served < most/2 {
		t.Errorf("%d served in %v by 16 places of 0.3 s", served, seen)
	}
	for _, h := range first {
		h.mend(t, dead)
		h.count.Store(0)
	}
	mended := time.Now()
	for ctx.Err() == nil && first[0].count.Load()+first[1].count.Load() == 0 {
		pause(ctx, 20*time.Millisecond)
	}
	t.Logf("asked %v after it was mended", time.Since(mended))
	full := func() bool { return first[0].count.Load()+first[1].count.Load() >= 20 }
	for ctx.Err() == nil && !full() {
		pause(ctx, 20*time.Millisecond)
	}
	if !full() {
		t.Errorf("the first pool's servers had %d and %d requests after they were mended", first[0].count.Load(), first[1].count.Load())
	}
	t.Logf("used %v after it was mended: %d and %d requests", time.Since(mended), first[0].count.Load(), first[1].count.Load())
	cancel()
	parts.Wait()
}

// TestAFailingPoolThatIsAloneIsAskedOn: callers are told what Envoy found, not that
// servers are busy.
func TestAFailingPoolThatIsAloneIsAskedOn(t *testing.T) {
	for _, dead := range []bool{true, false} {
		t.Run(fmt.Sprintf("dead %v", dead), func(t *testing.T) {
			alone := newHead(t, dead)
			s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, alone.address))
			var told sync.Map
			var parts sync.WaitGroup
			for range 8 {
				parts.Go(func() {
					for range 10 {
						a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false)
						if err != nil {
							t.Error(err)
							return
						}
						n, _ := told.LoadOrStore(a.status, new(atomic.Int64))
						n.(*atomic.Int64).Add(1)
						pause(t.Context(), 30*time.Millisecond)
					}
				})
			}
			parts.Wait()
			told.Range(func(status, n any) bool {
				if status != http.StatusServiceUnavailable {
					t.Errorf("%d answers of %v; want 503 alone", n.(*atomic.Int64).Load(), status)
				}
				return true
			})
		})
	}
}
