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

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestTheNextLargerLevelGoesToIdleEndpoints fills a pool of twenty servers with
// small requests until their level is backlogged, empties one server, and sends
// larger requests: as long as that server is idle they all go there, though every
// server has room. By chance one in ten would.
func TestTheNextLargerLevelGoesToIdleEndpoints(t *testing.T) {
	const servers, each = 20, 20
	const places = servers * each
	const small, large = 100, 200 // of levels 2 and 3
	var pool [servers]*modelServer
	var free [servers]chan struct{}
	var endpoints strings.Builder
	for i := range pool {
		pool[i], free[i] = newModelServer(t), make(chan struct{}, each)
		pool[i].answerWith(oneByOne(free[i]))
		fmt.Fprintf(&endpoints, "{ address: %q }, ", pool[i].addr())
	}
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ %s ], maxInFlight: %d }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, fairShare: false }
`, endpoints.String(), each))
	ctx, stop := context.WithCancel(t.Context())
	var parts sync.WaitGroup
	defer parts.Wait()
	defer stop()
	var refused [2]atomic.Int64
	send := func(tokens int) {
		parts.Go(func() {
			a, err := ask(ctx, s.with, "http://"+s.listen+chatPath, fmt.Sprintf(`{"max_tokens":%d}`, tokens), false)
			if err == nil && a.status == http.StatusTooManyRequests {
				refused[tokens/large].Add(1)
			}
		})
	}
	inside := func() (n int64) {
		for _, m := range pool {
			n += m.inside.Load()
		}
		return n
	}
	state := func() admin.Pool {
		f, err := s.client.Fleet(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return f.Pools[0]
	}
	settled := func(sent int) func() bool {
		return func() bool { return inside()+refused[0].Load()+refused[1].Load() == int64(sent) }
	}
	// Some at a time: on a loaded machine ext_proc would be late for all at once.
	for sent := 0; sent < places+100; {
		for range 50 {
			send(small)
		}
		sent += 50
		envoytest.Eventually(t, "the small ones inside or refused", settled(sent))
	}
	for range 80 {
		send(large)
	}
	envoytest.Eventually(t, "the large ones inside or refused", settled(places+180))
	if inside() != places || refused[1].Load() != 80 {
		t.Fatalf("%d inside, %d small and %d large ones refused; want all places taken by small ones", inside(), refused[0].Load(), refused[1].Load())
	}

	for _, f := range free {
		f <- struct{}{}
	}
	for range each - 1 {
		free[0] <- struct{}{}
	}
	left := (servers - 1) * (each - 1)
	var smaller, larger admin.Level
	envoytest.Eventually(t, "the small ones' level backlogged", func() bool {
		levels := state().Levels
		smaller, larger = levels[fleet.LevelOf(small)], levels[fleet.LevelOf(large)]
		return smaller.Backlogged && smaller.InFlight == left && inside() == int64(left)
	})
	// The larger ones are 80 at most that come for a place, and the smaller have the rest.
	if smaller.Budget < places-80 || smaller.Budget > float64(left) || smaller.QueueMillis <= 0 {
		t.Errorf("the small ones' level is %+v; want a budget of %d to %d, and a queue", smaller, places-80, left)
	}
	if larger.Budget != smaller.Budget || larger.QueueMillis != 0 || larger.Backlogged {
		t.Errorf("the large ones' level is %+v; want the budget of the small ones', %v, and no queue", larger, smaller.Budget)
	}
	page := s.metricsPage(t)
	for family, want := range map[string]float64{"budget": smaller.Budget, "queue_seconds": smaller.QueueMillis / 1000} {
		got := metric(page, "fairlead_level_"+family, fmt.Sprintf("level=\"%d\"", smaller.Level), `pool="a"`)
		if got < want/2 || got > want*2 { // of another step
			t.Errorf("fairlead_level_%s is %v; want about %v", family, got, want)
		}
	}
	clients, err := s.client.Clients(t.Context())
	if err != nil || len(clients) != 1 || clients[0].Pool != "a" || clients[0].InFlight != left || clients[0].Waiting == 0 || !strings.HasPrefix(clients[0].Client, "sha256:") {
		t.Errorf("clients %+v, %v; want one with %d in flight and some that wait", clients, err, left)
	}
	pause(t.Context(), 200*time.Millisecond) // a few plans more: the first may be of what was in flight before
	for n := range each/2 - 1 {
		send(large)
		envoytest.Eventually(t, "one more inside or refused", settled(180+left+n+1))
		if got := pool[0].inside.Load(); got != int64(n+1) {
			t.Errorf("%d large ones sent, %d of them to the idle server, %d refused", n+1, got, refused[1].Load()-80)
			break
		}
	}
}

// oneByOne answers what is posted once it is told to, one request at a time.
func oneByOne(free <-chan struct{}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-free:
		case <-r.Context().Done():
		}
		envoytest.JSON(`{}`).ServeHTTP(w, r)
	})
}
