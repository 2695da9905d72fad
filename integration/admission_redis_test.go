package integration

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// replica is one of several processes of serve with one Redis, each with a
// sidecar of its own.
func replica(t *testing.T, m *modelServer, redis *redisbin.Server, shard int, limit string, deadline time.Duration) *served {
	t.Helper()
	s := &served{with: wide(t), place: newPlace(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ], maxInFlight: 4096 }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: shared, %s }
`, envoytest.FreeAddr(t), m.addr(), limit))}
	text, err := os.ReadFile(s.file)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := strings.Cut(string(text), "groups:")
	s.write(t, head+fmt.Sprintf("  shard: %d\n  redis: { address: %q, deadline: %v, replicas: 2 }\n", shard, "unix:"+redis.Socket, deadline), "groups:"+body)
	s.process = s.serve(t)
	s.envoy, s.listen = s.sidecar(t)
	waitExtProc(s.envoy)
	return s
}

// local reports whether an answer's policy is one replica's part.
func local(a answer) bool { return strings.Contains(a.header.Get("Ratelimit-Policy"), "-local") }

// storm sends n requests at a time to each replica, all of one client. On a
// loaded machine ext_proc may be late and requests pass without it; then it is
// done again as another client.
func storm(t *testing.T, n int, token string, replicas ...*served) [][]answer {
	t.Helper()
	for try := range 5 {
		if answers, whole := stormOnce(t, n, fmt.Sprintf("%s.%d", token, try), replicas); whole {
			return answers
		}
		early(t)
	}
	t.Fatal("ext_proc was late five times")
	return nil
}

// stormOnce returns false when ext_proc did not take part in all of it.
func stormOnce(t *testing.T, n int, token string, replicas []*served) (answers [][]answer, whole bool) {
	t.Helper()
	answers, whole = make([][]answer, len(replicas)), true
	var mu sync.Mutex
	var parts sync.WaitGroup
	for i, s := range replicas {
		for range n {
			parts.Go(func() {
				a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":4}`, false, "authorization", token)
				if err != nil || (a.status != http.StatusOK && a.status != http.StatusTooManyRequests) {
					t.Errorf("status %d, %v: %s", a.status, err, a.body)
				}
				mu.Lock()
				defer mu.Unlock()
				answers[i] = append(answers[i], a)
				whole = whole && a.header.Get("X-Route-Strategy") == "dynamic"
			})
		}
	}
	parts.Wait()
	return answers, whole
}

func admittedOf(all []answer) (out []answer) {
	for _, a := range all {
		if a.status == http.StatusOK {
			out = append(out, a)
		}
	}
	return out
}

// TestReplicasShareOneLimit: two replicas with one Redis admit exactly the limit
// between them, and tell no two requests the same number of remaining ones.
func TestReplicasShareOneLimit(t *testing.T) {
	m, redis := newModelServer(t), redisbin.Start(t, redisbin.Config{})
	// The longest that may be set, so that a loaded machine doesn't look like a Redis that
	// is away.
	const deadline = 100 * time.Millisecond
	one, two := replica(t, m, redis, 0, "requests: 60/min", deadline), replica(t, m, redis, 1, "requests: 60/min", deadline)
	// Both have asked Redis once.
	for _, s := range []*served{one, two} {
		envoytest.Eventually(t, "a shared count", func() bool { return !local(s.post(t, chatPath, `{}`, "authorization", "Bearer warm")) })
	}
	early(t)
	answers := storm(t, 100, "Bearer shared", one, two)
	byOne, byTwo := admittedOf(answers[0]), admittedOf(answers[1])
	if n := len(byOne) + len(byTwo); n != 60 || len(byOne) == 0 || len(byTwo) == 0 {
		t.Errorf("%d and %d entered; want 60 together", len(byOne), len(byTwo))
	}
	var left []int64
	for _, a := range append(byOne, byTwo...) {
		if local(a) {
			t.Errorf("a local count though Redis answers: %s", a.header.Get("Ratelimit-Policy"))
		}
		left = append(left, whole(a.header, "X-Ratelimit-Remaining"))
	}
	slices.Sort(left)
	for i, n := range left {
		if n != int64(i) {
			t.Errorf("remaining %v; want 0 … 59 once each", left)
			break
		}
	}
	t.Logf("%d by one replica, %d by the other", len(byOne), len(byTwo))
}

// TestReplicasOutliveTheirRedis: killed, frozen and not there at the start, Redis
// costs no answer; meanwhile each replica admits its own part of the limit and
// says so, and when Redis is back they count together again.
func TestReplicasOutliveTheirRedis(t *testing.T) {
	m, redis := newModelServer(t), redisbin.Start(t, redisbin.Config{})
	redis.Kill() // not there at the start
	// Envoy waits 200 ms for ext_proc.
	const limit, deadline = "requests: 40/min", 100 * time.Millisecond
	one, two := replica(t, m, redis, 0, limit, deadline), replica(t, m, redis, 1, limit, deadline)
	both := []*served{one, two}
	apart := func(when, token string) {
		t.Helper()
		for i, s := range both {
			n := 0
			envoytest.Eventually(t, when+": a local count", func() bool {
				n++
				return local(s.post(t, chatPath, `{}`, "authorization", fmt.Sprintf("Bearer probe.%s.%d.%d", strings.ReplaceAll(when, " ", "."), i, n)))
			})
		}
		early(t)
		began := time.Now()
		answers := storm(t, 100, token, both...)
		took := time.Since(began)
		for i := range both {
			if n := len(admittedOf(answers[i])); n != 20 {
				t.Errorf("%s: replica %d admitted %d of 100; its part is 20", when, i, n)
			}
			for _, a := range answers[i] {
				if !local(a) {
					t.Errorf("%s: policy %q, remaining %q", when, a.header.Get("Ratelimit-Policy"), a.header.Get("X-Ratelimit-Remaining"))
					break
				}
			}
		}
		t.Logf("%s: 200 requests answered in %v", when, took)
	}
	together := func(when, token string) {
		t.Helper()
		for try := range 5 {
			for i, s := range both {
				n := 0
				envoytest.Eventually(t, when+": a shared count", func() bool {
					n++
					return !local(s.post(t, chatPath, `{}`, "authorization", fmt.Sprintf("Bearer back.%s.%d.%d.%d", strings.ReplaceAll(when, " ", "."), try, i, n)))
				})
			}
			early(t)
			answers := storm(t, 60, fmt.Sprintf("%s.%d", token, try), both...)
			if slices.ContainsFunc(slices.Concat(answers...), local) {
				continue // 100 ms were not enough on a loaded machine
			}
			if n := len(admittedOf(answers[0])) + len(admittedOf(answers[1])); n != 40 {
				t.Errorf("%s: %d entered; want 40", when, n)
			}
			return
		}
		t.Errorf("%s: no burst was counted together", when)
	}
	run := func() {
		if err := redis.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	apart("not there at the start", "Bearer 1")
	run()
	together("there at last", "Bearer 2")
	redis.Kill()
	apart("killed", "Bearer 3")
	run()
	together("back", "Bearer 4")
	redis.Pause()
	apart("frozen", "Bearer 5")
	redis.Resume()
	together("thawed", "Bearer 6")
}
