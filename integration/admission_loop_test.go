package integration

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
)

// loopPlace is a served pool of eight places whose requests take a while.
func loopPlace(t *testing.T, takes time.Duration) *served {
	m := newModelServer(t)
	m.answerWith(taking(takes))
	n := newModelServer(t)
	n.answerWith(m.script)
	return startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 4, endpoints: [ { address: %q }, { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, m.addr(), n.addr()))
}

// TestBlindRetriesDontStarveWhoWaitsAsTold: clients that come back every 50 ms have no
// more of a small pool than those that wait for the slots they were given. Who says that
// it comes back is known to be early, and has no more slots by it than requests.
func TestBlindRetriesDontStarveWhoWaitsAsTold(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 20 seconds")
	}
	s := loopPlace(t, 600*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	counting := time.Now().Add(3 * time.Second)
	callers := []struct {
		name          string
		workers       int
		waits, counts bool
	}{{"greedy", 8, false, false}, {"hasty", 8, false, true}, {"a", 3, true, false}, {"b", 3, true, true}}
	served := make([]atomic.Int64, len(callers))
	var parts sync.WaitGroup
	for i, c := range callers {
		for range c.workers {
			parts.Go(func() {
				for retries := 0; ctx.Err() == nil; retries++ {
					headers := []string{"authorization", "Bearer " + c.name}
					if c.counts {
						headers = append(headers, "x-stainless-retry-count", fmt.Sprint(retries))
					}
					a, err := ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false, headers...)
					switch {
					case err != nil || a.status != http.StatusOK && a.status != http.StatusTooManyRequests:
						t.Errorf("status %d, %v: %s", a.status, err, a.body)
						return
					case a.status == http.StatusOK:
						retries = -1
						if time.Now().After(counting) {
							served[i].Add(1)
						}
					case c.waits:
						pause(ctx, time.Duration(whole(a.header, "Retry-After-Ms"))*time.Millisecond)
					default:
						pause(ctx, 50*time.Millisecond)
					}
				}
			})
		}
	}
	parts.Wait()
	clients, err := s.client.Clients(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range callers {
		t.Logf("%s was served %d times", c.name, served[i].Load())
		// Without slots that are kept it was 25 and 12 beside 94 and 101.
		if c.waits && (served[i].Load()*4 < served[0].Load() || served[i].Load()*4 < served[1].Load()) {
			t.Errorf("%s was served %d times, greedy %d and hasty %d", c.name, served[i].Load(), served[0].Load(), served[1].Load())
		}
		var shown admin.Caller
		for _, row := range clients {
			if row.Client == clientID("Bearer "+c.name) {
				shown = row
			}
		}
		if hasty := c.counts && !c.waits; hasty != (shown.Early > 10) || hasty && shown.Waiting > c.workers {
			t.Errorf("%s with %d requests is shown as %+v", c.name, c.workers, shown)
		}
	}
}

// TestALoneClientNeedNotWaitBesideAnIdlePool: 40 parallel requests of one client on
// eight places all get through, each told when to come.
func TestALoneClientNeedNotWaitBesideAnIdlePool(t *testing.T) {
	const takes, requests, places = 400 * time.Millisecond, 40, 8
	s := loopPlace(t, takes)
	var hopeless, tries atomic.Int64
	began := time.Now()
	var parts sync.WaitGroup
	for range requests {
		parts.Go(func() {
			for {
				a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":512}`, false, "authorization", "Bearer alone")
				if err != nil || a.status != http.StatusOK && a.status != http.StatusTooManyRequests {
					t.Errorf("status %d, %v: %s", a.status, err, a.body)
					return
				}
				tries.Add(1)
				if a.status == http.StatusOK {
					return
				}
				if a.header.Get("X-Should-Retry") == "false" {
					hopeless.Add(1)
				}
				pause(t.Context(), time.Duration(whole(a.header, "Retry-After-Ms"))*time.Millisecond)
			}
		})
	}
	parts.Wait()
	t.Logf("%d requests in %v (%v of work), %d tries", requests, time.Since(began).Round(time.Millisecond), requests/places*takes, tries.Load())
	if n := hopeless.Load(); n > 0 {
		t.Errorf("%d of %d were told not to retry beside nobody else", n, requests)
	}
}

// obey sends requests one after the other until ctx ends, waits after each refusal
// as long as that says, and counts both; as an official SDK, it tells how many
// attempts it made before.
func obey(ctx context.Context, t *testing.T, s *served, credential string, served, refused *atomic.Int64) {
	for retries := 0; ctx.Err() == nil; {
		a, err := ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false,
			"authorization", "Bearer "+credential, "x-stainless-retry-count", fmt.Sprint(retries))
		if err != nil || a.status != http.StatusOK && a.status != http.StatusTooManyRequests {
			t.Errorf("status %d, %v: %s", a.status, err, a.body)
			return
		}
		if a.status == http.StatusOK {
			served.Add(1)
			retries = 0
			continue
		}
		refused.Add(1)
		retries++
		pause(ctx, time.Duration(whole(a.header, "Retry-After-Ms"))*time.Millisecond)
	}
}

// TestWhoWaitsAsToldKeepsThePoolBusy: ten workers of two clients on eight places,
// each of whom sends its next request the moment it has an answer. That request
// comes before the log has told of the end of the one before it.
func TestWhoWaitsAsToldKeepsThePoolBusy(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 15 seconds")
	}
	const takes, places = 500 * time.Millisecond, 8
	s := loopPlace(t, takes)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	var served, refused atomic.Int64
	var parts sync.WaitGroup
	for i := range 10 {
		parts.Go(func() { obey(ctx, t, s, fmt.Sprint("client-", i%2), &served, &refused) })
	}
	began := time.Now()
	parts.Wait()
	possible := float64(places) * float64(time.Since(began)) / float64(takes)
	t.Logf("served %d of %.0f possible, refused %d", served.Load(), possible, refused.Load())
	if got := float64(served.Load()); got < 0.7*possible {
		t.Errorf("served %.0f; want at least 7 of 10 of the %.0f possible", got, possible)
	}
}

// TestWhoKeepsItsConcurrencyIsNotRefused: a client that has no more in flight than
// its limit lets it, and never a pause.
func TestWhoKeepsItsConcurrencyIsNotRefused(t *testing.T) {
	m := newModelServer(t)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{}`) }))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: few, concurrency: 2 }
`, m.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	var served, refused atomic.Int64
	var parts sync.WaitGroup
	for range 2 {
		parts.Go(func() { obey(ctx, t, s, "steady", &served, &refused) })
	}
	parts.Wait()
	t.Logf("served %d, refused %d", served.Load(), refused.Load())
	if refused.Load()*20 > served.Load() {
		t.Errorf("refused %d beside %d served; want none but where the machine stalls", refused.Load(), served.Load())
	}
}

// TestFullPoolsPassClientsOnAlongTheChain: who has its share of the first pool gets
// the second, which stands empty else.
func TestFullPoolsPassClientsOnAlongTheChain(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 8 seconds")
	}
	first, second := newModelServer(t), newModelServer(t)
	for _, m := range []*modelServer{first, second} {
		m.answerWith(taking(400 * time.Millisecond))
	}
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 10, endpoints: [ { address: %q } ] }
  - { name: b, maxInFlight: 10, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: a, fallback: [ { pool: b } ] }
`, first.addr(), second.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	var served, refused atomic.Int64
	var parts sync.WaitGroup
	for i := range 30 {
		parts.Go(func() { obey(ctx, t, s, fmt.Sprint("client-", i%2), &served, &refused) })
	}
	var inside [2]int64
	samples := int64(0)
	for pause(ctx, 2*time.Second); ctx.Err() == nil; pause(ctx, 20*time.Millisecond) {
		samples++
		inside[0] += first.inside.Load()
		inside[1] += second.inside.Load()
	}
	parts.Wait()
	mean := func(i int) float64 { return float64(inside[i]) / float64(max(1, samples)) }
	t.Logf("on average %.1f in the first pool and %.1f in the second, of 10 each; served %d, refused %d", mean(0), mean(1), served.Load(), refused.Load())
	if mean(0) < 7 || mean(1) < 7 {
		t.Errorf("%.1f and %.1f of 10 in flight, with 30 callers", mean(0), mean(1))
	}
}

// TestClosedPoolsArePassedByOnLegacyRoutesToo: Envoy's own split would send
// requests to servers that told callers to stay away.
func TestClosedPoolsArePassedByOnLegacyRoutesToo(t *testing.T) {
	first, second := newModelServer(t), newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
  - { name: b, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: legacy, pool: a, fallback: [ { pool: b } ] }
`, first.addr(), second.addr()))
	if r := s.postOnce(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	first.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("retry-after", "30")
		w.WriteHeader(http.StatusTooManyRequests)
	}))
	// Sent until the log has told of the answer; Envoy tries the second pool then.
	before := first.count.Load()
	s.postOnce(t, chatPath, `{"max_tokens":4}`)
	if first.count.Load() == before {
		t.Fatal("the first pool was not asked")
	}
	pause(t.Context(), time.Second)
	before = first.count.Load()
	for range 20 {
		if r := s.postOnce(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Errorf("status %d: %s", r.status, r.body)
		}
	}
	if n := first.count.Load() - before; n != 0 {
		t.Errorf("%d of 20 requests went to the pool that told callers to stay away", n)
	}
}

// TestDrainedPoolsOfLegacyRoutesRefuseNobody: Envoy goes on to the next pool by
// itself.
func TestDrainedPoolsOfLegacyRoutesRefuseNobody(t *testing.T) {
	first, second := newModelServer(t), newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q, drain: true } ] }
  - { name: b, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: legacy, pool: a, fallback: [ { pool: b } ] }
`, first.addr(), second.addr()))
	for range 20 {
		if r := s.postOnce(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Errorf("status %d: %s", r.status, r.body)
		}
	}
	if n, m := first.count.Load(), second.count.Load(); n != 0 || m != 20 {
		t.Errorf("%d requests went to the pool that drains and %d to the other", n, m)
	}
}

// clientID is how a client that is told apart by its authorization header is shown.
func clientID(authorization string) string { return "sha256:" + digest([]byte(authorization))[:32] }
