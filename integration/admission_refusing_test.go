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
	// One request asks each of two servers, and as many were on their way.
	if n := next.peak.Load(); n > 8 {
		t.Errorf("%d at a time on the server of 4; want one more for each of two servers that are asked, and as many that were on their way", n)
	}
}

// TestAfterAnOutageNobodyIsSentFarAway: both servers of a pool answer 429 for a while.
// Callers of two keys do as they are told, and say how often they tried. That their
// requests come back without a slot makes none of them early.
func TestAfterAnOutageNobodyIsSentFarAway(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 11 seconds")
	}
	var out atomic.Bool
	var addrs []any
	for range 2 {
		m := newModelServer(t)
		serves := taking(300 * time.Millisecond)
		m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if out.Load() {
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			serves.ServeHTTP(w, r)
		}))
		addrs = append(addrs, m.addr())
	}
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 4, endpoints: [ { address: %q }, { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, addrs...))
	ctx, cancel := context.WithTimeout(t.Context(), 11*time.Second)
	defer cancel()
	var longest, served atomic.Int64
	var over atomic.Bool
	var parts sync.WaitGroup
	for i := range 11 {
		parts.Go(func() {
			for retries := 0; ctx.Err() == nil; {
				a, err := ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false,
					"authorization", "Bearer key-"+fmt.Sprint(i%2), "x-stainless-retry-count", fmt.Sprint(retries))
				switch {
				case err != nil:
					t.Error(err)
					return
				case a.status == http.StatusOK:
					retries = 0
					if over.Load() {
						served.Add(1)
					}
					continue
				}
				retries++
				wait := whole(a.header, "Retry-After-Ms")
				for was := longest.Load(); wait > was && !longest.CompareAndSwap(was, wait); was = longest.Load() {
				}
				pause(ctx, time.Duration(wait)*time.Millisecond)
			}
		})
	}
	pause(ctx, 2*time.Second)
	out.Store(true)
	pause(ctx, 2500*time.Millisecond)
	out.Store(false)
	over.Store(true)
	parts.Wait()
	t.Logf("nobody was told more than %d ms; %d served after it, of %d at most", longest.Load(), served.Load(), 8*6500/300)
	if longest.Load() > 6000 {
		t.Errorf("somebody was told %d ms; eleven callers have eight places of 0.3 s", longest.Load())
	}
}
