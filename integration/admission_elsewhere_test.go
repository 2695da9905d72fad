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

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// together posts n requests of some clients at a time, and returns how many
// were answered with each status by the time that all have an answer or stay inside
// one of the servers.
func (s *served) together(t *testing.T, n, clients int, servers ...*modelServer) (statuses map[int]int, inside []int64, wait func()) {
	t.Helper()
	var mu sync.Mutex
	var parts sync.WaitGroup
	statuses = map[int]int{}
	before := int64(0)
	for _, m := range servers {
		before += m.inside.Load()
	}
	for i := range n {
		parts.Go(func() {
			a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false, "authorization", fmt.Sprint("Bearer ", i%clients))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			statuses[a.status]++
		})
	}
	envoytest.Eventually(t, "every request inside or answered", func() bool {
		mu.Lock()
		defer mu.Unlock()
		sum := -before
		inside = inside[:0]
		for _, m := range servers {
			inside = append(inside, m.inside.Load())
			sum += m.inside.Load()
		}
		for _, k := range statuses {
			sum += int64(k)
		}
		return sum == int64(n)
	})
	return statuses, inside, parts.Wait
}

// TestWorkOnADrainingServerTakesNobodysPlace: two answers still run on the server
// that drains, and the other one, of two places as well, serves as before.
func TestWorkOnADrainingServerTakesNobodysPlace(t *testing.T) {
	for _, strategy := range []string{"dynamic", "legacy"} {
		t.Run(strategy, func(t *testing.T) {
			first, second := newModelServer(t), newModelServer(t)
			config := func(drain bool) string {
				return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 2, endpoints: [ { name: first, address: %q, drain: %v }, { name: second, address: %q, drain: %v } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: %s, pool: a }
`, first.addr(), drain, second.addr(), !drain, strategy)
			}
			s := startServed(t, config(false))
			release := make(chan struct{})
			first.answerWith(holding(release))
			_, inside, wait := s.together(t, 2, 2, first)
			if inside[0] != 2 {
				t.Fatalf("%d inside the first server", inside[0])
			}
			s.write(t, "", strings.Replace(config(true), "LISTEN", s.listen, 1))
			envoytest.Eventually(t, "requests on the second server", func() bool {
				s.postOnce(t, chatPath, `{"max_tokens":4}`)
				return second.count.Load() > 0
			})
			for i := range 20 {
				if a := s.postOnce(t, chatPath, `{"max_tokens":4}`); a.status != http.StatusOK {
					t.Errorf("request %d: status %d: %s", i, a.status, a.body)
				}
			}
			if n := first.inside.Load(); n != 2 {
				t.Errorf("%d still run on the server that drains", n)
			}
			close(release)
			wait()
		})
	}
}

// servesForty has forty callers of two clients obey for three seconds, on a pool that
// has room for all.
func (s *served) servesForty(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	var served, refused atomic.Int64
	var parts sync.WaitGroup
	for i := range 40 {
		parts.Go(func() { obey(ctx, t, s, fmt.Sprint("client-", i%2), &served, &refused) })
	}
	parts.Wait()
	t.Logf("served %d, refused %d", served.Load(), refused.Load())
	if refused.Load()*20 > served.Load() {
		t.Errorf("refused %d beside %d served; want none of 40 on 64 places but where the machine stalls", refused.Load(), served.Load())
	}
}

// TestReopenedPoolsServeAtOnce: a pool of 64 places was closed for 6 seconds by a
// single answer, and nobody asked whether others may.
func TestReopenedPoolsServeAtOnce(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { name: gpu, address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, m.addr()))
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("retry-after", "6")
		w.WriteHeader(http.StatusTooManyRequests)
	}))
	if a := s.post(t, chatPath, `{"max_tokens":4}`); a.status != http.StatusTooManyRequests {
		t.Fatalf("status %d", a.status)
	}
	told := time.Now()
	m.answerWith(taking(200 * time.Millisecond))
	closed := func() bool { return s.endpoint(t, "gpu").Closed }
	envoytest.Eventually(t, "the server closed", closed)
	if a := s.postOnce(t, chatPath, `{"max_tokens":4}`); a.status != http.StatusTooManyRequests {
		t.Errorf("status %d of a pool that is closed", a.status)
	}
	envoytest.Eventually(t, "the server open", func() bool { return !closed() })
	pause(t.Context(), 6*time.Second-time.Since(told)+200*time.Millisecond) // a few plans
	s.servesForty(t)
}

// TestLegacyRequestsGoOnAlongTheChain, beside a first pool of two places that is
// dead, or full.
func TestLegacyRequestsGoOnAlongTheChain(t *testing.T) {
	for _, dead := range []bool{true, false} {
		for _, strategy := range []string{"legacy", "dynamic"} {
			t.Run(fmt.Sprintf("%s, dead %v", strategy, dead), func(t *testing.T) {
				first, second := newModelServer(t), newModelServer(t)
				release := make(chan struct{})
				first.answerWith(holding(release))
				second.answerWith(holding(release))
				s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 2, endpoints: [ { address: %q } ] }
  - { name: b, maxInFlight: 50, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: %s, pool: a, fallback: [ { pool: b } ] }
`, first.addr(), second.addr(), strategy))
				want := []int64{2, 18}
				if dead {
					first.Listener.Close()
					first.CloseClientConnections()
					want = []int64{0, 20}
				}
				statuses, inside, wait := s.together(t, 20, 20, first, second)
				if inside[0] != want[0] || inside[1] != want[1] {
					t.Errorf("%v inside the pools, the others got %v; want %v", inside, statuses, want)
				}
				close(release)
				wait()
			})
		}
	}
}

// TestRefusalsOfServersAreTriedInTheNextTier: each before it began, so that another
// may take it.
func TestRefusalsOfServersAreTriedInTheNextTier(t *testing.T) {
	for _, status := range []int{429, 503, 529} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			first, second := newModelServer(t), newModelServer(t)
			first.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
			s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
  - { name: b, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, fallback: [ { pool: b } ] }
`, first.addr(), second.addr()))
			if a := s.post(t, chatPath, `{"max_tokens":4}`); a.status != http.StatusOK || first.count.Load() == 0 || second.count.Load() == 0 {
				t.Errorf("status %d, %d requests at the first pool and %d at the second", a.status, first.count.Load(), second.count.Load())
			}
		})
	}
}

// TestEndpointsThatLeaveDontFillThoseThatStay: one of two servers of four places, or
// three of four, leave the config under load, and come back.
func TestEndpointsThatLeaveDontFillThoseThatStay(t *testing.T) {
	for _, servers := range []int{2, 4} {
		t.Run(fmt.Sprint(servers), func(t *testing.T) { shrink(t, servers) })
	}
}

func shrink(t *testing.T, servers int) {
	stays, all := newModelServer(t), ""
	stays.answerWith(taking(60 * time.Millisecond))
	for range servers - 1 {
		m := newModelServer(t)
		m.answerWith(taking(60 * time.Millisecond))
		all += fmt.Sprintf(", { address: %q }", m.addr())
	}
	config := func(whole bool) string {
		endpoints := fmt.Sprintf("{ address: %q }", stays.addr())
		if whole {
			endpoints += all
		}
		return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 4, endpoints: [ %s ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, endpoints)
	}
	s := startServed(t, config(true))
	ctx, cancel := context.WithCancel(t.Context())
	var served, refused atomic.Int64
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel()
	for i := range 4 + 4*servers {
		parts.Go(func() { obey(ctx, t, s, fmt.Sprint("client-", i), &served, &refused) })
	}
	reloads := func() float64 { return metric(s.metricsPage(t), "fairlead_config_reloads_total") }
	for range 6 {
		for _, whole := range []bool{false, true} {
			before := reloads()
			s.write(t, "", strings.Replace(config(whole), "LISTEN", s.listen, 1))
			envoytest.Eventually(t, "the change taken", func() bool { return reloads() == before+1 })
			at := served.Load()
			envoytest.Eventually(t, "some more served", func() bool { return served.Load() > at+20 })
		}
	}
	t.Logf("served %d, refused %d, at most %d on the server that stays", served.Load(), refused.Load(), stays.peak.Load())
	// On a machine that is too busy some pass undecided, each of which may be one more.
	undecided := metric(s.metricsPage(t), "fairlead_requests_undecided_total")
	if n := stays.peak.Load(); float64(n) > 4+undecided {
		t.Errorf("the server that stays had %d at a time; its limit is 4", n)
	}
}

// TestDrainedPoolsComeBackWhole: a pool of 64 places was drained for a while.
func TestDrainedPoolsComeBackWhole(t *testing.T) {
	m := newModelServer(t)
	m.answerWith(taking(200 * time.Millisecond))
	config := func(drain bool) string {
		return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, maxInFlight: 64, endpoints: [ { name: gpu, address: %q, drain: %v } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, m.addr(), drain)
	}
	s := startServed(t, config(false))
	put := func(drain bool, state string) {
		s.write(t, "", strings.Replace(config(drain), "LISTEN", s.listen, 1))
		envoytest.Eventually(t, "the server "+state, func() bool { return (s.endpoint(t, "gpu").State == "draining") == drain })
	}
	put(true, "drains")
	pause(t.Context(), 5*time.Second) // in which a slew would come to a tenth
	put(false, "is back")
	envoytest.Eventually(t, "an answer", func() bool { return s.postOnce(t, chatPath, `{"max_tokens":4}`).status == http.StatusOK })
	s.servesForty(t)
}
