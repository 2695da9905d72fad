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

// TestWhoIsRefusedWaitsForAPoolThatServes: the first pool of a chain drains, or its
// server told callers to stay away for 50 s. Eight callers that try twice more, as
// official SDKs do, have the four places of the next pool, of 0.3 s each.
func TestWhoIsRefusedWaitsForAPoolThatServes(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 5 seconds each")
	}
	away := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("retry-after", "50")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	for _, row := range []struct {
		name     string
		head     http.Handler
		drains   bool
		strategy string
	}{
		{"drained", taking(300 * time.Millisecond), true, "dynamic"},
		{"closed", away, false, "dynamic"},
		{"drained under legacy", taking(300 * time.Millisecond), true, "legacy"},
		{"closed under legacy", away, false, "legacy"},
	} {
		t.Run(row.name, func(t *testing.T) {
			head, next := newModelServer(t), newModelServer(t)
			head.answerWith(row.head)
			next.answerWith(taking(300 * time.Millisecond))
			s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 4, endpoints: [ { address: %q, drain: %v } ] }
  - { name: b, maxInFlight: 4, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: %s, pool: a, fallback: [ { pool: b } ] }
`, head.addr(), row.drains, next.addr(), row.strategy))
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			var of operations
			var parts sync.WaitGroup
			for i := range 8 {
				parts.Go(func() {
					for ctx.Err() == nil {
						of.run(ctx, t, s, fmt.Sprint("client-", i))
					}
				})
			}
			parts.Wait()
			served, gaveUp, hopeless := of.served.Load(), of.gaveUp.Load(), of.hopeless.Load()
			t.Logf("%d operations served, %d given up, %d told not to retry; at most %d ms told", served, gaveUp, hopeless, of.longest.Load())
			if hopeless > 0 {
				t.Errorf("%d were told not to retry beside a pool of which a place is free each 75 ms", hopeless)
			}
			if told := of.longest.Load(); told == 0 || told > 10_000 { // before a first answer has ended up to that
				t.Errorf("at most %d ms told; want some refused, and none for longer than a few turns of eight callers on four places", told)
			}
			if gaveUp > served/5 {
				t.Errorf("%d operations given up beside %d served", gaveUp, served)
			}
		})
	}
}

// TestWhoIsRefusedWaitsWhereAPlaceIsSooner: of the nine places of a chain its first pool
// has one. 27 workers of one key wait for whichever comes free.
func TestWhoIsRefusedWaitsWhereAPlaceIsSooner(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 8 seconds")
	}
	small, large := newModelServer(t), newModelServer(t)
	small.answerWith(taking(300 * time.Millisecond))
	large.answerWith(taking(300 * time.Millisecond))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 1, endpoints: [ { address: %q } ] }
  - { name: b, maxInFlight: 8, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, fallback: [ { pool: b } ] }
`, small.addr(), large.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	var of operations
	var parts sync.WaitGroup
	for range 27 {
		parts.Go(func() {
			for ctx.Err() == nil {
				of.run(ctx, t, s, "client")
			}
		})
	}
	parts.Wait()
	served, gaveUp := of.served.Load(), of.gaveUp.Load()
	t.Logf("%d operations served, %d given up; at most %d ms told", served, gaveUp, of.longest.Load())
	if told := of.longest.Load(); told == 0 || told > 10_000 { // before a first answer has ended up to that
		t.Errorf("at most %d ms told; want some refused, and none for longer than a few turns of 27 workers on nine places", told)
	}
	if gaveUp > served/5 {
		t.Errorf("%d operations given up beside %d served", gaveUp, served)
	}
}

// operations counts what became of operations, each of which is tried three times.
type operations struct {
	served, gaveUp, hopeless atomic.Int64
	longest                  atomic.Int64 // wait that was told, ms
}

// run does one operation as an official SDK does.
func (of *operations) run(ctx context.Context, t *testing.T, s *served, credential string) {
	for retries := range 3 {
		a, err := ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false,
			"authorization", "Bearer "+credential, "x-stainless-retry-count", fmt.Sprint(retries))
		switch {
		case err != nil || a.status != http.StatusOK && a.status != http.StatusTooManyRequests:
			t.Errorf("status %d, %v: %s", a.status, err, a.body)
			return
		case a.status == http.StatusOK:
			of.served.Add(1)
			return
		}
		wait := whole(a.header, "Retry-After-Ms")
		for was := of.longest.Load(); wait > was && !of.longest.CompareAndSwap(was, wait); was = of.longest.Load() {
		}
		hopeless := a.header.Get("X-Should-Retry") == "false"
		if hopeless {
			of.hopeless.Add(1)
		}
		pause(ctx, time.Duration(wait)*time.Millisecond)
		if hopeless || ctx.Err() != nil {
			break
		}
	}
	if ctx.Err() == nil {
		of.gaveUp.Add(1)
	}
}
