package integration

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// limiting is a provider that has limited keys that begin with spent, and counts their
// requests; others it answers well.
func limiting(spent *atomic.Int64, well http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Header.Get("authorization"), "Bearer spent") {
			spent.Add(1)
			w.Header().Set("retry-after", "30")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		well(w, r)
	})
}

// TestOneKeysOwn429LeavesOthersAlone: a provider limits each key for itself, and one has
// used its limit up. Others are served there before, after and meanwhile.
func TestOneKeysOwn429LeavesOthersAlone(t *testing.T) {
	m := newModelServer(t)
	m.answerWith(limiting(new(atomic.Int64), func(http.ResponseWriter, *http.Request) {}))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a }
`, m.addr()))
	say := func(key string, status int) {
		t.Helper()
		if a := s.post(t, chatPath, `{"max_tokens":4}`, "authorization", key); a.status != status {
			t.Errorf("%s: %d, told to wait %s ms; want %d", key, a.status, a.header.Get("Retry-After-Ms"), status)
		}
	}
	say("Bearer other", http.StatusOK)
	for range 3 {
		say("Bearer spent", http.StatusTooManyRequests)
		pause(t.Context(), 200*time.Millisecond) // the log tells
		say("Bearer other", http.StatusOK)
	}
}

// TestOneKeyOfAnAddressLeavesItsOthersAlone: the route tells clients apart by their
// addresses, and callers from one of them have several keys of the provider.
func TestOneKeyOfAnAddressLeavesItsOthersAlone(t *testing.T) {
	m := newModelServer(t)
	var spent atomic.Int64
	m.answerWith(limiting(&spent, func(http.ResponseWriter, *http.Request) {}))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a }
limits:
  - { name: callers, key: address, concurrency: 32 }
`, m.addr()))
	say := func(key string) answer {
		t.Helper()
		return s.post(t, chatPath, `{"max_tokens":4}`, "authorization", "Bearer "+key)
	}
	say("other")
	say("spent")
	pause(t.Context(), 200*time.Millisecond) // the log tells
	for range 3 {
		if a := say("other"); a.status != http.StatusOK {
			t.Errorf("the other key: %d, told to wait %s ms", a.status, a.header.Get("Retry-After-Ms"))
		}
		if a := say("spent"); a.status != http.StatusTooManyRequests {
			t.Errorf("the limited key: %d", a.status)
		}
	}
	if n := spent.Load(); n != 1 {
		t.Errorf("the provider was asked for the limited key %d times", n)
	}
}

// TestAKeyThatAProviderLimitsTakesTheFallbacksPlaces and no more: twelve workers of it, as
// SDKs do, want more than the next pool has. Another key goes on at the provider.
func TestAKeyThatAProviderLimitsTakesTheFallbacksPlaces(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 7 seconds")
	}
	provider, next := newModelServer(t), newModelServer(t)
	var spent atomic.Int64
	provider.answerWith(limiting(&spent, func(http.ResponseWriter, *http.Request) {}))
	next.answerWith(taking(300 * time.Millisecond))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q } ] }
  - { name: b, maxInFlight: 4, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a, fallback: [ { pool: b } ] }
`, provider.addr(), next.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 7*time.Second)
	defer cancel()
	var limited, other operations
	var parts sync.WaitGroup
	parts.Go(func() {
		for ctx.Err() == nil {
			other.run(ctx, t, s, "other")
			pause(ctx, 50*time.Millisecond)
		}
	})
	pause(ctx, 300*time.Millisecond)
	for range 12 {
		parts.Go(func() {
			for ctx.Err() == nil {
				limited.run(ctx, t, s, "spent")
			}
		})
	}
	pause(ctx, 1500*time.Millisecond) // what nobody could know
	next.peak.Store(0)
	before := spent.Load()
	parts.Wait()
	t.Logf("the limited key: %d served, %d given up, %d at a time on the server of 4, %d more in vain; the other: %d served, %d given up",
		limited.served.Load(), limited.gaveUp.Load(), next.peak.Load(), spent.Load()-before, other.served.Load(), other.gaveUp.Load())
	if next.peak.Load() > 4 || spent.Load() > before {
		t.Errorf("%d at a time on the server of 4, %d asked the provider in vain", next.peak.Load(), spent.Load()-before)
	}
	if limited.served.Load() < 40 || other.served.Load() < 40 || other.gaveUp.Load() > 0 {
		t.Errorf("the limited key had %d served, the other %d, and %d gave up", limited.served.Load(), other.served.Load(), other.gaveUp.Load())
	}
}

// TestManyKeysThatAProviderLimitsLeaveOthersAlone, also where all begin at once and nobody
// knows yet whom the provider takes: its answers take long, and its refusals don't.
func TestManyKeysThatAProviderLimitsLeaveOthersAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 10 seconds")
	}
	m := newModelServer(t)
	var spent atomic.Int64
	m.answerWith(limiting(&spent, taking(2*time.Second).ServeHTTP))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a }
`, m.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var limited, others operations
	var parts sync.WaitGroup
	for i := range 8 {
		parts.Go(func() {
			for ctx.Err() == nil {
				limited.run(ctx, t, s, fmt.Sprint("spent", i))
				pause(ctx, 100*time.Millisecond)
			}
		})
		parts.Go(func() {
			for ctx.Err() == nil {
				others.run(ctx, t, s, fmt.Sprint("other", i%2))
			}
		})
	}
	parts.Wait()
	t.Logf("others: %d served, %d given up; the limited keys: %d served, %d of their requests asked the provider", others.served.Load(), others.gaveUp.Load(), limited.served.Load(), spent.Load())
	// Undisturbed it is five of each of eight workers. A limited key asks three times at once,
	// before the log has told, and some again where the machine stalls.
	if others.served.Load() < 20 || others.gaveUp.Load() > 0 {
		t.Errorf("others: %d served, %d given up", others.served.Load(), others.gaveUp.Load())
	}
	if limited.served.Load() > 0 || spent.Load() > 32 {
		t.Errorf("eight limited keys: %d served, %d of their requests asked the provider", limited.served.Load(), spent.Load())
	}
}

// TestAKeyThatOneServerOfFourShedsIsServedByTheOthers: the first has no room for it, and
// says so for long. Two of its requests are refused at once.
func TestAKeyThatOneServerOfFourShedsIsServedByTheOthers(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 6 seconds")
	}
	var shed atomic.Int64
	endpoints := ""
	for i := range 4 {
		m := newModelServer(t)
		answers := taking(300 * time.Millisecond)
		m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if i > 0 {
				answers.ServeHTTP(w, r)
				return
			}
			shed.Add(1)
			w.Header().Set("retry-after", "30")
			w.WriteHeader(http.StatusTooManyRequests)
		}))
		endpoints += fmt.Sprintf("{ address: %q }, ", m.addr())
	}
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ %s ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a }
`, endpoints))
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
	defer cancel()
	var key operations
	var parts sync.WaitGroup
	for range 12 {
		parts.Go(func() {
			for ctx.Err() == nil {
				key.run(ctx, t, s, "key")
			}
		})
	}
	parts.Wait()
	t.Logf("%d served, %d given up, %d shed", key.served.Load(), key.gaveUp.Load(), shed.Load())
	// Undisturbed it is 240.
	if key.served.Load() < 120 || shed.Load() > 40 {
		t.Errorf("%d served by the other servers, %d shed by the first", key.served.Load(), shed.Load())
	}
}

// TestOneKeysRequestsTakeNobodyThePool: one key's requests make both servers of a pool
// answer 500, or break their connections, at once; the fallback answers them 400. All
// others' are well, and want a tenth of the pool.
func TestOneKeysRequestsTakeNobodyThePool(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 8 seconds each")
	}
	for _, reset := range []bool{false, true} {
		t.Run(fmt.Sprintf("reset %v", reset), func(t *testing.T) { poisonedPool(t, reset) })
	}
}

func poisonedPool(t *testing.T, reset bool) {
	poisoned := func(w http.ResponseWriter) {
		if reset {
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(http.StatusInternalServerError)
	}
	answer := func(poisoned func(http.ResponseWriter)) http.Handler {
		well := taking(1500 * time.Millisecond)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("x-poison") != "" {
				poisoned(w)
				return
			}
			well.ServeHTTP(w, r)
		})
	}
	var in [2]*modelServer
	for i := range in {
		in[i] = newModelServer(t)
		in[i].answerWith(answer(poisoned))
	}
	next := newModelServer(t)
	next.answerWith(answer(func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadRequest) }))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { address: %q }, { address: %q } ] }
  - { name: b, maxInFlight: 4, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a, fallback: [ { pool: b } ] }
`, in[0].addr(), in[1].addr(), next.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var served, unserved atomic.Int64
	var parts sync.WaitGroup
	every := func(d time.Duration, f func(int)) {
		parts.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				parts.Go(func() { f(i) })
				pause(ctx, d)
			}
		})
	}
	every(200*time.Millisecond, func(i int) {
		a, err := ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false, "authorization", fmt.Sprint("Bearer good", i))
		switch {
		case err != nil:
			t.Error(err)
		case a.status == http.StatusOK:
			served.Add(1)
		default:
			unserved.Add(1)
		}
	})
	pause(ctx, 2*time.Second) // others are served here, as everybody knows then
	every(100*time.Millisecond, func(int) {
		_, _ = ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false, "authorization", "Bearer poison", "x-poison", "1")
	})
	parts.Wait()
	t.Logf("of the others' requests %d were served, %d were not", served.Load(), unserved.Load())
	if unserved.Load() > 0 {
		t.Errorf("%d of the others' %d requests were not served", unserved.Load(), served.Load()+unserved.Load())
	}
}
