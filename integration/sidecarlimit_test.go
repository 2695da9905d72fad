package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/xds"
)

// turnstile is an upstream that holds its requests until it is told to answer.
type turnstile struct {
	*envoytest.Upstream
	mu   sync.Mutex
	open chan struct{}
	held int // of those that are counted
}

func newTurnstile(t *testing.T) *turnstile {
	t.Helper()
	u := &turnstile{open: make(chan struct{})}
	u.Upstream = envoytest.NewUpstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u.mu.Lock()
		open := u.open
		u.held++
		u.mu.Unlock()
		envoytest.Gate(open, envoytest.JSON(`{"ok":true}`)).ServeHTTP(w, r)
	}))
	return u
}

// release answers what is held; what comes later is held again. A request is counted a
// moment before it is held.
func (u *turnstile) release(t *testing.T) {
	t.Helper()
	envoytest.Eventually(t, "all that are counted to be held", func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		return u.held == u.Count()
	})
	u.mu.Lock()
	defer u.mu.Unlock()
	close(u.open)
	u.open = make(chan struct{})
}

// Forget forgets the requests that came; none must be on its way.
func (u *turnstile) Forget() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.held = 0
	u.Upstream.Forget()
}

// volley is a number of parallel requests to one address and path.
type volley struct {
	t       *testing.T
	answers chan answer
}

// startVolley sends n requests at once. Each uses a connection of its own.
func startVolley(t *testing.T, n int, listen, path string) *volley {
	t.Helper()
	b := &volley{t: t, answers: make(chan answer, n)}
	ctx, cancel := context.WithCancel(context.Background())
	transport := &http.Transport{DisableKeepAlives: true}
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+listen+path, strings.NewReader(`{"model":"m","max_tokens":16}`))
			if err != nil {
				panic(err)
			}
			request.Header.Set("Content-Type", "application/json")
			b.answers <- exchange(transport, request)
		})
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	return b
}

// exchange returns the answer to a request, or one of status 0 with the error as
// its body.
func exchange(transport *http.Transport, request *http.Request) answer {
	response, err := transport.RoundTrip(request)
	if err != nil {
		return answer{body: err.Error()}
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{body: err.Error()}
	}
	return answer{status: response.StatusCode, header: response.Header, body: string(text)}
}

// take returns n answers, each with the given status.
func (b *volley) take(n, status int) []answer {
	b.t.Helper()
	var out []answer
	for len(out) < n {
		select {
		case a := <-b.answers:
			if a.status != status {
				b.t.Fatalf("answer %d of %d is %d, want %d: %s", len(out)+1, n, a.status, status, a.body)
			}
			out = append(out, a)
		case <-time.After(30 * time.Second):
			b.t.Fatalf("%d of %d answers came", len(out), n)
		}
	}
	return out
}

// expectHeld sends n requests to the path, of which the sidecar must let through
// exactly want: the others are answered 429, and then those that got through.
func expectHeld(t *testing.T, up *turnstile, n, want int, listen, path string) {
	t.Helper()
	up.Forget()
	b := startVolley(t, n, listen, path)
	for _, a := range b.take(n-want, http.StatusTooManyRequests) {
		expectOverflow(t, a, path)
	}
	// All others are with the upstream or on their way.
	up.WaitRequests(want)
	if got := up.Count(); got != want {
		t.Errorf("%d requests got through, want %d", got, want)
	}
	up.release(t)
	b.take(want, http.StatusOK)
}

func expectOverflow(t *testing.T, a answer, path string) {
	t.Helper()
	ms, _ := strconv.Atoi(a.header.Get("retry-after-ms"))
	sec, _ := strconv.Atoi(a.header.Get("retry-after"))
	if ms < 1 || ms > 60_000 || sec != (ms+999)/1000 {
		t.Errorf("retry after %d ms, %d s", ms, sec)
	}
	var body struct {
		Type  string
		Error struct{ Type, Message string }
	}
	if err := json.Unmarshal([]byte(a.body), &body); err != nil || body.Error.Type != "rate_limit_error" || body.Error.Message == "" {
		t.Errorf("%v: %s", err, a.body)
	}
	if anthropic := strings.HasPrefix(path, "/v1/messages"); (body.Type == "error") != anthropic {
		t.Errorf("%s is answered in the other dialect: %s", path, a.body)
	}
}

// heldConfig is a config of two routes to pool a, one per dialect, and one to
// pool b, whose requests also go to a in a share.
func heldConfig(t *testing.T, a, b *turnstile, shareOfA int) *fleet.Config {
	t.Helper()
	text := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
groups:
  - { name: edge, listener: { address: 127.0.0.1:1 }, routes: [messages, chat, free] }
pools:
%s%sroutes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, strategy: dynamic, holdAtSidecar: true, split: [{ pool: a, weight: 1 }], fallback: [{ pool: b }] }
  - { name: chat, match: { prefix: /v1/chat }, dialect: openai, strategy: dynamic, holdAtSidecar: true, split: [{ pool: a, weight: %d }, { pool: b, weight: %d }] }
  - { name: free, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [{ pool: b, weight: 1 }] }
`, poolYAML("a", "", a.Addr()), poolYAML("b", "", b.Addr()), shareOfA, 100-shareOfA)
	cfg, err := fleet.Parse("fairlead.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return cfg
}

// limitOf is what an Envoy's runtime says of a pool: "" when there is no limit.
func limitOf(e *envoytest.Envoy, pool string) string {
	var page struct {
		Entries map[string]struct {
			Final string `json:"final_value"`
		}
	}
	_ = json.Unmarshal([]byte(e.AdminGet("/runtime")), &page)
	return page.Entries["circuit_breakers."+pool+".default.max_requests"].Final
}

// hold sets the limit of pool a and waits until the Envoy has it.
func (p *adsPlane) hold(e *envoytest.Envoy, n uint32) {
	p.t.Helper()
	p.server.SetMaxRequests("edge", map[string]uint32{"a": n})
	awaitLimit(p.t, e, "a", fmt.Sprint(n))
}

func awaitLimit(t *testing.T, e *envoytest.Envoy, pool, want string) {
	t.Helper()
	envoytest.Eventually(t, fmt.Sprintf("a limit of %q for pool %s", want, pool), func() bool { return limitOf(e, pool) == want })
}

// TestSidecarHoldsWhatItMayHaveInFlight: the limit is exact, moves at once in
// both directions, cuts nothing that runs and touches no other pool.
func TestSidecarHoldsWhatItMayHaveInFlight(t *testing.T) {
	a, b := newTurnstile(t), newTurnstile(t)
	p := newADSPlane(t, false, heldConfig(t, a, b, 100))
	e, listen := p.serving("s1")
	if got := p.state("s1", "RTDS"); got.State != xds.Synced {
		t.Errorf("the empty runtime is %+v", got)
	}
	expectHeld(t, a, 30, 30, listen, "/v1/chat/completions") // no limit yet
	cut := func() int64 { n, _ := e.Stat("cluster.a.upstream_cx_destroy"); return n }
	before := cut()

	p.hold(e, 5)
	expectHeld(t, a, 30, 5, listen, "/v1/chat/completions")
	p.hold(e, 12)
	expectHeld(t, a, 30, 12, listen, "/v1/messages") // with a fallback: an overflow is final
	if n := b.Count(); n != 0 {
		t.Errorf("%d requests overflowed to the fallback", n)
	}
	expectHeld(t, b, 30, 30, listen, "/v1/other") // another pool

	// Both routes share the pool's limit; what runs is not cut when it falls.
	a.Forget()
	running := startVolley(t, 12, listen, "/v1/messages")
	a.WaitRequests(12)
	p.hold(e, 3)
	startVolley(t, 5, listen, "/v1/chat/completions").take(5, http.StatusTooManyRequests)
	a.release(t)
	running.take(12, http.StatusOK)
	expectHeld(t, a, 10, 3, listen, "/v1/chat/completions")

	p.server.SetMaxRequests("edge", nil)
	awaitLimit(t, e, "a", "")
	expectHeld(t, a, 30, 30, listen, "/v1/chat/completions")
	if n := cut() - before; n != 0 {
		t.Errorf("%d connections to the pool were closed", n)
	}
	for _, stat := range []string{"cluster_manager.cluster_modified", "runtime.load_error"} {
		if n, _ := e.Stat(stat); n != 0 {
			t.Errorf("%s is %d", stat, n)
		}
	}
	if p.count(xds.EventNack) != 0 {
		t.Error("a runtime was refused")
	}
}

// TestSidecarLimitAndWeightsChangeAtOnce: the two pushes don't wait for each
// other, and both take effect.
func TestSidecarLimitAndWeightsChangeAtOnce(t *testing.T) {
	a, b := newTurnstile(t), newTurnstile(t)
	p := newADSPlane(t, false, heldConfig(t, a, b, 0))
	e, listen := p.serving("s1")
	p.server.SetMaxRequests("edge", map[string]uint32{"a": 5})
	got := p.publish(heldConfig(t, a, b, 100))
	awaitLimit(t, e, "a", "5")
	if got["RouteConfiguration"] != 1 || got["Cluster"]+got["ClusterLoadAssignment"]+got["Listener"] != 0 {
		t.Errorf("weights and a limit sent %v", got)
	}
	expectHeld(t, a, 30, 5, listen, "/v1/chat/completions")
}

// TestSidecarHoldsItsLimitWithFairleadDead: it outlives the control plane, and
// the next one leaves it until it knows better.
func TestSidecarHoldsItsLimitWithFairleadDead(t *testing.T) {
	a, b := newTurnstile(t), newTurnstile(t)
	cfg := heldConfig(t, a, b, 100)
	p := newADSPlane(t, false, cfg)
	e, listen := p.serving("s1")
	p.hold(e, 5)
	p.kill()
	e.WaitStat("control_plane.connected_state", func(v int64) bool { return v == 0 })
	expectHeld(t, a, 30, 5, listen, "/v1/chat/completions")

	// A gap would show in the number of loads of the runtime, however short.
	loads := func() int64 { n, _ := e.Stat("runtime.load_success"); return n }
	before := loads()
	p.start(cfg)
	envoytest.Eventually(t, "the sidecar is back", func() bool { return p.synced("s1") && p.state("s1", "RTDS").Version != "" })
	expectHeld(t, a, 30, 5, listen, "/v1/chat/completions")
	if n := loads() - before; n != 0 || limitOf(e, "a") != "5" {
		t.Errorf("%d new runtimes, limit %s", n, limitOf(e, "a"))
	}
	p.hold(e, 7)
	if n := loads() - before; n != 1 {
		t.Errorf("%d runtimes came before the new limit", n-1)
	}
	expectHeld(t, a, 30, 7, listen, "/v1/chat/completions")
	if got := p.state("s1", "RTDS"); got.State != xds.Synced {
		t.Errorf("the runtime is %+v", got)
	}
}

// TestSidecarsShareAPoolsLimit runs the whole of serve: two sidecars have half of
// the pool's limit each, with Fairlead alive and dead, and one alone doesn't get
// the other's half when that restarts.
func TestSidecarsShareAPoolsLimit(t *testing.T) {
	a := newTurnstile(t)
	p := newPlace(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [chat] }
pools:
%sroutes:
  - { name: chat, match: { prefix: / }, dialect: openai, strategy: legacy, clientStrategy: ignore, holdAtSidecar: true, split: [{ pool: a, weight: 1 }] }
`, envoytest.FreeAddr(t), poolYAML("a", "maxInFlight: 10", a.Addr())))
	process := p.serve(t)
	e1, listen1 := p.sidecar(t)
	awaitLimit(t, e1, "a", "10") // it is alone
	e2, listen2 := p.sidecar(t)
	for _, e := range []*envoytest.Envoy{e1, e2} {
		awaitLimit(t, e, "a", "5")
	}

	process.kill()
	for _, listen := range []string{listen1, listen2} {
		expectHeld(t, a, 30, 5, listen, "/v1/chat/completions")
	}
	loads := func() int64 { n, _ := e1.Stat("runtime.load_success"); return n }
	before := loads()
	p.serve(t)
	envoytest.Eventually(t, "both are back", func() bool {
		proxies, err := p.client.Proxies(context.Background())
		return err == nil && len(proxies) == 2 && allSynced(proxies)
	})
	if n := loads() - before; n != 0 || limitOf(e1, "a") != "5" {
		t.Errorf("after a restart of serve: %d new runtimes, limit %s", n, limitOf(e1, "a"))
	}
	e2.Kill()
	p.sidecar(t)
	if n := loads() - before; n != 0 || limitOf(e1, "a") != "5" {
		t.Errorf("after a restart of its neighbour: %d new runtimes, limit %s", n, limitOf(e1, "a"))
	}
}

// TestSidecarOverflowGivesItsPlaceBack: a request that Fairlead let in and the
// sidecar refused counts nowhere once it was answered.
func TestSidecarOverflowGivesItsPlaceBack(t *testing.T) {
	a := newTurnstile(t)
	p := newPlace(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [chat] }
pools:
%sroutes:
  - { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, holdAtSidecar: true, split: [{ pool: a, weight: 1 }] }
`, envoytest.FreeAddr(t), poolYAML("a", "maxInFlight: 10", a.Addr())))
	p.serve(t)
	e1, listen := p.sidecar(t)
	e2, _ := p.sidecar(t)
	for _, e := range []*envoytest.Envoy{e1, e2} {
		awaitLimit(t, e, "a", "5")
	}
	// Of ten places, as many as Fairlead has, none may be lost to fifteen overflows.
	for overflows := int64(0); overflows < 15; overflows, _ = e1.Stat("cluster.a.upstream_rq_active_overflow") {
		expectHeld(t, a, 30, 5, listen, "/v1/chat/completions")
		p.waitEmpty(t)
	}
}

// waitEmpty waits until a tick after this call finds nothing in flight, neither by
// the endpoints' counts nor by admission's.
func (p *place) waitEmpty(t *testing.T) {
	t.Helper()
	since := time.Now()
	envoytest.Eventually(t, "nothing is in flight", func() bool {
		f, err := p.client.Fleet(context.Background())
		idle := err == nil && f.At.After(since)
		for _, pool := range f.Pools {
			for _, e := range pool.Endpoints {
				idle = idle && e.InFlight == 0
			}
			for _, level := range pool.Levels {
				idle = idle && level.InFlight == 0
			}
		}
		return idle
	})
}
