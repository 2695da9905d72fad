package integration

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestRefusingServersSendFewOnToTheNextPool: all servers of the first pool answer 429,
// each time that they are open again. Envoy takes those requests to the next pool by
// itself, in which nothing is kept for them.
func TestRefusingServersSendFewOnToTheNextPool(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 8 seconds")
	}
	busy, next := [2]*modelServer{newModelServer(t), newModelServer(t)}, newModelServer(t)
	for _, m := range busy {
		m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) }))
	}
	next.answerWith(taking(300 * time.Millisecond))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 16, endpoints: [ { address: %q }, { address: %q } ] }
  - { name: b, maxInFlight: 4, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, fallback: [ { pool: b } ] }
`, busy[0].addr(), busy[1].addr(), next.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	var served, refused atomic.Int64
	var parts sync.WaitGroup
	for i := range 48 {
		parts.Go(func() { obey(ctx, t, s, fmt.Sprint("client-", i), &served, &refused) })
	}
	pause(ctx, 2*time.Second) // what nobody could know
	next.peak.Store(0)
	parts.Wait()
	t.Logf("served %d, refused %d; %d and %d went in vain; at most %d at a time on the server of 4",
		served.Load(), refused.Load(), busy[0].count.Load(), busy[1].count.Load(), next.peak.Load())
	if n := next.peak.Load(); n > 8 {
		t.Errorf("%d at a time on the server of 4; want what two servers have one request ask for, and as many that were on their way", n)
	}
}
