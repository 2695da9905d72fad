package integration

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// engine is a scripted model server: its metrics page says what the test wants,
// and it answers at once or streams until it is told to end.
type engine struct {
	*envoytest.Upstream
	kv, waiting atomic.Int64 // hundredths; requests
	running     atomic.Int64
	tokens      atomic.Int64
	frozen      atomic.Bool

	mu      sync.Mutex
	streams []chan struct{}
}

func newEngine(t *testing.T, name string) *engine {
	e := &engine{}
	e.Upstream = envoytest.NewUpstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/metrics":
			e.page(w)
		case strings.Contains(r.URL.Path, "stream"):
			e.stream(w, r)
		default:
			_, _ = fmt.Fprintf(w, "%q", name)
		}
	}))
	return e
}

func (e *engine) page(w http.ResponseWriter) {
	running := e.running.Load()
	if !e.frozen.Load() {
		e.tokens.Add(1)
	}
	_, _ = fmt.Fprintf(w, "vllm:num_requests_running{model_name=\"m\"} %d\nvllm:num_requests_waiting{model_name=\"m\"} %d\n"+
		"vllm:kv_cache_usage_perc{model_name=\"m\"} %g\nvllm:generation_tokens_total{model_name=\"m\"} %d\n",
		running, e.waiting.Load(), float64(e.kv.Load())/100, e.tokens.Load())
}

func (e *engine) stream(w http.ResponseWriter, r *http.Request) {
	end := make(chan struct{})
	e.mu.Lock()
	e.streams = append(e.streams, end)
	e.mu.Unlock()
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, "data: {}\n\n")
	_ = http.NewResponseController(w).Flush()
	select {
	case <-end:
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	case <-r.Context().Done():
	}
}

// endStreams lets all running streams end well.
func (e *engine) endStreams() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, end := range e.streams {
		close(end)
	}
	e.streams = nil
}

// generations counts requests other than scrapes and checks.
func (e *engine) generations() int {
	n := 0
	for _, r := range e.Requests() {
		if strings.HasPrefix(r.Path, "/v1/") {
			n++
		}
	}
	return n
}

// enginePool is a config with one pool of engines that is scraped.
func enginePool(listen netip.AddrPort, maxInFlight int, engines ...*engine) string {
	var addresses []netip.AddrPort
	for _, e := range engines {
		addresses = append(addresses, e.Addr())
	}
	return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [chat] }
pools:
%sroutes:
  - name: chat
    match: { prefix: / }
    dialect: openai
    strategy: dynamic
    split: [{ pool: gpu, weight: 1 }]
`, listen, poolYAML("gpu", fmt.Sprintf("maxInFlight: %d\ntelemetry: { source: scrape }", maxInFlight), addresses...))
}

// endpoint returns one endpoint's row of `fairlead fleet`.
func (p *place) endpoint(t *testing.T, name string) admin.Endpoint {
	t.Helper()
	f, err := p.client.Fleet(context.Background())
	if err != nil {
		return admin.Endpoint{}
	}
	for _, pool := range f.Pools {
		for _, e := range pool.Endpoints {
			if e.Name == name {
				return e
			}
		}
	}
	t.Fatalf("no endpoint %q in %+v", name, f)
	return admin.Endpoint{}
}

// inFlight sums the attempts in flight over the fleet, −1 if serve is away.
func (p *place) inFlight() int {
	f, err := p.client.Fleet(context.Background())
	if err != nil {
		return -1
	}
	sum := 0
	for _, pool := range f.Pools {
		for _, e := range pool.Endpoints {
			sum += int(e.InFlight)
		}
	}
	return sum
}

// openStream starts a stream and returns once its first bytes came.
func openStream(t *testing.T, address string) *http.Response {
	t.Helper()
	request, err := http.NewRequest(http.MethodPost, "http://"+address+"/v1/stream/chat/completions", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if _, err := response.Body.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	return response
}

// TestEjectedEndpointGetsNothingNewAndItsStreamsFinish makes one of four
// engines look overloaded: from the plan that ejects it on, nothing new goes
// there, and what runs there ends well.
func TestEjectedEndpointGetsNothingNewAndItsStreamsFinish(t *testing.T) {
	var engines []*engine
	for i := range 4 {
		engines = append(engines, newEngine(t, fmt.Sprintf("gpu-%d", i+1)))
	}
	p := newPlace(t, enginePool(envoytest.FreeAddr(t), 256, engines...))
	p.serve(t)
	_, listen := p.sidecar(t)
	envoytest.Eventually(t, "telemetry of all engines", func() bool { return p.endpoint(t, "gpu-4").Known })

	bad := engines[0]
	var stream *http.Response
	for stream == nil {
		before := bad.generations()
		s := openStream(t, listen)
		if bad.generations() > before {
			stream = s
		}
	}
	bad.kv.Store(100)
	bad.waiting.Store(50)
	bad.running.Store(1)
	envoytest.Eventually(t, "the ejection", func() bool { return p.endpoint(t, "gpu-1").State == "ejected" })
	before := bad.generations()
	load := startLoad(t, 200, listen)
	envoytest.Eventually(t, "600 requests", func() bool { sent, _ := load.counts(); return sent >= 600 })
	load.mustNotFail(t)
	if n := bad.generations() - before; n != 0 {
		t.Errorf("%d new requests reached the ejected endpoint", n)
	}
	bad.endStreams()
	rest, err := io.ReadAll(stream.Body)
	if err != nil || !strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the running stream on the ejected endpoint ended with %q, %v", rest, err)
	}
	for _, e := range engines[1:] {
		e.endStreams()
	}

	bad.kv.Store(0)
	bad.waiting.Store(0)
	bad.running.Store(0)
	envoytest.Eventually(t, "the return by probe", func() bool { s := p.endpoint(t, "gpu-1").State; return s != "ejected" && s != "" })
	envoytest.Eventually(t, "in-flight back at 0", func() bool { return p.inFlight() == 0 })
}

// TestAllAtRiskEjectsNothingAndSheds loads the whole pool to its limits.
func TestAllAtRiskEjectsNothingAndSheds(t *testing.T) {
	engines := []*engine{newEngine(t, "gpu-1"), newEngine(t, "gpu-2")}
	for _, e := range engines {
		e.kv.Store(99)
	}
	p := newPlace(t, enginePool(envoytest.FreeAddr(t), 3, engines...))
	p.serve(t)
	_, listen := p.sidecar(t)
	envoytest.Eventually(t, "risk of both engines", func() bool {
		return p.endpoint(t, "gpu-1").Risk > 0.82 && p.endpoint(t, "gpu-2").Risk > 0.82
	})
	var streams []*http.Response
	for range 6 {
		streams = append(streams, openStream(t, listen))
	}
	envoytest.Eventually(t, "six in flight", func() bool { return p.inFlight() == 6 })
	status, header, body := chat(t, listen)
	if status != http.StatusTooManyRequests {
		t.Fatalf("with all endpoints at their limit: status %d, %s", status, body)
	}
	for _, name := range []string{"Retry-After-Ms", "Retry-After", "X-Recommended-Concurrency", "X-Fairlead-Decision", "X-Execution-Graph-Id", "X-Request-Id"} {
		if len(header.Values(name)) != 1 {
			t.Errorf("429 has %s: %q", name, header.Values(name))
		}
	}
	if header.Get("X-Route-Strategy") != "dynamic" || !strings.Contains(body, `"retry_after_ms"`) || !strings.Contains(body, `"recommended_concurrency"`) {
		t.Errorf("429: strategy %q, body %s", header.Get("X-Route-Strategy"), body)
	}
	for _, name := range []string{"gpu-1", "gpu-2"} {
		if s := p.endpoint(t, name).State; s == "ejected" {
			t.Errorf("%s is ejected although the whole pool is loaded", name)
		}
	}
	for _, e := range engines {
		e.endStreams()
	}
	for _, s := range streams {
		_, _ = io.ReadAll(s.Body)
	}
	envoytest.Eventually(t, "room again", func() bool { status, _, _ := chat(t, listen); return status == http.StatusOK })
	envoytest.Eventually(t, "in-flight back at 0", func() bool { return p.inFlight() == 0 })
}

// TestFrozenTelemetryDecaysToNeutral freezes one engine's page while it says it
// is overloaded, and then all pages.
func TestFrozenTelemetryDecaysToNeutral(t *testing.T) {
	var engines []*engine
	for i := range 4 {
		e := newEngine(t, fmt.Sprintf("gpu-%d", i+1))
		e.running.Store(2)
		engines = append(engines, e)
	}
	p := newPlace(t, enginePool(envoytest.FreeAddr(t), 256, engines...))
	p.serve(t)
	_, listen := p.sidecar(t)
	envoytest.Eventually(t, "steering", func() bool { _, h, _ := chat(t, listen); return h.Get("X-Route-Strategy") == "dynamic" })
	envoytest.Eventually(t, "telemetry", func() bool { return p.endpoint(t, "gpu-4").Known })
	engines[0].kv.Store(70)
	envoytest.Eventually(t, "a smaller share for the loaded engine", func() bool { return p.endpoint(t, "gpu-1").Share < 0.24 })
	for _, e := range engines {
		e.frozen.Store(true)
	}
	envoytest.Eventually(t, "neutral shares", func() bool {
		for i := range engines {
			e := p.endpoint(t, fmt.Sprintf("gpu-%d", i+1))
			if e.State == "ejected" {
				t.Fatalf("%s was ejected for missing telemetry", e.Name)
			}
			if e.State != "unknown" || e.Share < 0.24 || e.Share > 0.26 {
				return false
			}
		}
		return true
	})
	// What the shares say holds for traffic: 400 draws of a quarter have a
	// standard deviation of 2.2 %.
	before := make([]int, len(engines))
	for i, e := range engines {
		before[i] = e.generations()
	}
	const requests = 400
	for range requests {
		status, header, body := chat(t, listen)
		if status != http.StatusOK || header.Get("X-Route-Strategy") != "dynamic" {
			t.Fatalf("with frozen pages: status %d, strategy %q, %s", status, header.Get("X-Route-Strategy"), body)
		}
	}
	for i, e := range engines {
		if n := e.generations() - before[i]; n < requests*15/100 || n > requests*35/100 {
			t.Errorf("with frozen pages gpu-%d got %d of %d requests", i+1, n, requests)
		}
	}
	for _, e := range engines {
		e.frozen.Store(false)
	}
	envoytest.Eventually(t, "telemetry back", func() bool { return p.endpoint(t, "gpu-1").Known })
}

// TestFairleadKilledUnderLoad kills the whole control plane (xDS, ext_proc and
// log receiver at once) under load, twice.
func TestFairleadKilledUnderLoad(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 75, 25, a.Addr(), b.Addr(), ""))
	process := p.serve(t)
	e1, listen1 := p.sidecar(t)
	_, listen2 := p.sidecar(t)
	load := startLoad(t, 100, listen1, listen2)
	dynamic := func() bool {
		_, header, _ := chat(t, listen1)
		return header.Get("X-Route-Strategy") == "dynamic"
	}
	envoytest.Eventually(t, "steering", dynamic)
	for round := range 2 {
		process.kill()
		const dead = 400
		before, by := load.counts()
		var now map[string]int
		envoytest.Eventually(t, "400 requests without Fairlead", func() bool {
			var sent int
			sent, now = load.counts()
			return sent >= before+dead
		})
		// The weights carry on: 75 % of a draw of 400 have a standard deviation
		// of 2.2 %.
		onA, onB := now[`"a"`]-by[`"a"`], now[`"b"`]-by[`"b"`]
		if share := float64(onA) / float64(onA+onB); onA+onB < dead || share < 0.64 || share > 0.86 {
			t.Errorf("round %d: without Fairlead %d requests on a and %d on b, want 75 %% and 25 %%", round, onA, onB)
		}
		if dynamic() {
			t.Error("an answer claims dynamic while Fairlead is dead")
		}
		process = p.serve(t)
		envoytest.Eventually(t, "steering again", dynamic)
		envoytest.Eventually(t, "both sidecars synced", func() bool {
			proxies, err := p.client.Proxies(t.Context())
			return err == nil && len(proxies) == 2 && allSynced(proxies)
		})
		for _, stat := range []string{"cluster_manager.cluster_removed", "listener_manager.listener_removed"} {
			if n, _ := e1.Stat(stat); n != 0 {
				t.Errorf("round %d: %s is %d: the restarted control plane published an emptier world", round, stat, n)
			}
		}
	}
	load.mustNotFail(t)
}

func allSynced(proxies []admin.Proxy) bool {
	for _, p := range proxies {
		if len(p.Types) != 5 {
			return false
		}
		for _, typ := range p.Types {
			if typ.State != "SYNCED" {
				return false
			}
		}
	}
	return true
}

// TestFrozenFairleadCostsNothingAfterAHealthCheck stops the process without
// ending it: the kernel still accepts connections, nobody answers.
func TestFrozenFairleadCostsNothingAfterAHealthCheck(t *testing.T) {
	a := envoytest.NewUpstream(t, named("a"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 100, 0, a.Addr(), a.Addr(), ""))
	process := p.serve(t)
	_, listen := p.sidecar(t)
	strategy := func() string {
		_, header, _ := chat(t, listen)
		return header.Get("X-Route-Strategy")
	}
	envoytest.Eventually(t, "steering", func() bool { return strategy() == "dynamic" })
	process.freeze()
	defer process.thaw()
	const messageTimeout = 200 * time.Millisecond
	quick := 0
	envoytest.Eventually(t, "ten requests in a row that don't wait for ext_proc", func() bool {
		began := time.Now()
		status, _, _ := chat(t, listen)
		if status != http.StatusOK {
			t.Fatalf("status %d while Fairlead is frozen", status)
		}
		if quick++; time.Since(began) >= messageTimeout {
			quick = 0
		}
		return quick >= 10
	})
	process.thaw()
	envoytest.Eventually(t, "steering again", func() bool { return strategy() == "dynamic" })
}

// TestDeadPoolGoesToTheSplitsOtherPool kills the only endpoint of a pool that
// draws most requests, with ext_proc alive and dead.
func TestDeadPoolGoesToTheSplitsOtherPool(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 90, 10, a.Addr(), b.Addr(), ""))
	process := p.serve(t)
	_, listen := p.sidecar(t)
	envoytest.Eventually(t, "steering", func() bool { _, h, _ := chat(t, listen); return h.Get("X-Route-Strategy") == "dynamic" })
	a.Close()
	for range 50 {
		if status, _, body := chat(t, listen); status != http.StatusOK || body != `"b"` {
			t.Fatalf("ext_proc alive: status %d, %s", status, body)
		}
	}
	process.kill()
	for range 50 {
		if status, _, body := chat(t, listen); status != http.StatusOK || body != `"b"` {
			t.Fatalf("ext_proc dead: status %d, %s", status, body)
		}
	}
}

// TestInFlightReturnsToZero goes through what can end a request badly.
func TestInFlightReturnsToZero(t *testing.T) {
	engines := []*engine{newEngine(t, "gpu-1"), newEngine(t, "gpu-2")}
	p := newPlace(t, enginePool(envoytest.FreeAddr(t), 256, engines...))
	process := p.serve(t)
	envoy, listen := p.sidecar(t)
	envoytest.Eventually(t, "steering", func() bool { _, h, _ := chat(t, listen); return h.Get("X-Route-Strategy") == "dynamic" })
	zero := func(after string) {
		t.Helper()
		envoytest.Eventually(t, "in-flight at 0 after "+after, func() bool { return p.inFlight() == 0 })
	}
	zero("a normal request")

	s := openStream(t, listen)
	envoytest.Eventually(t, "one in flight", func() bool { return p.inFlight() == 1 })
	_ = s.Body.Close()
	zero("the client went away")

	// serve is restarted in the middle of a stream: the heartbeat finds it again.
	s = openStream(t, listen)
	envoytest.Eventually(t, "one in flight", func() bool { return p.inFlight() == 1 })
	process.kill()
	p.serve(t)
	envoytest.Eventually(t, "the running stream found again", func() bool { return p.inFlight() == 1 })
	for _, e := range engines {
		e.endStreams()
	}
	_, _ = io.ReadAll(s.Body)
	zero("a stream over a restart")

	for range 3 {
		openStream(t, listen)
	}
	envoytest.Eventually(t, "three in flight", func() bool { return p.inFlight() == 3 })
	envoy.Kill()
	zero("the Envoy was killed")
}

// TestTwoModelsOnOneURL routes by the body's model, with ext_proc alive and
// dead.
func TestTwoModelsOnOneURL(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	p := newPlace(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [small, large] }
pools:
%s%sroutes:
  - { name: small, match: { prefix: /v1/, model: small }, dialect: openai, strategy: dynamic, split: [{ pool: a, weight: 1 }] }
  - { name: large, match: { prefix: /v1/, model: large }, dialect: openai, strategy: dynamic, split: [{ pool: b, weight: 1 }] }
`, envoytest.FreeAddr(t), poolYAML("a", "", a.Addr()), poolYAML("b", "", b.Addr())))
	process := p.serve(t)
	_, listen := p.sidecar(t)
	check := func(when string) {
		t.Helper()
		for model, want := range map[string]string{"small": `"a"`, "large": `"b"`} {
			status, _, body, err := tryPost("http://"+listen+"/v1/chat/completions", fmt.Sprintf(`{"max_tokens":5,"model":%q}`, model))
			if err != nil || status != http.StatusOK || body != want {
				t.Errorf("%s: model %s: status %d, body %s, %v", when, model, status, body, err)
			}
		}
		if status, _, body, err := tryPost("http://"+listen+"/v1/chat/completions", `{"model":"other"}`); err != nil || status != http.StatusNotFound || !strings.Contains(body, `"error"`) {
			t.Errorf("%s: unknown model: status %d, body %s, %v", when, status, body, err)
		}
		if status, _, body, err := tryPost("http://"+listen+"/v1/chat/completions", `{"model":"sm`); err != nil || status != http.StatusBadRequest || !strings.Contains(body, `"error"`) {
			t.Errorf("%s: broken body: status %d, body %s, %v", when, status, body, err)
		}
	}
	envoytest.Eventually(t, "steering", func() bool {
		_, h, _, err := tryPost("http://"+listen+"/v1/chat/completions", `{"model":"small"}`)
		return err == nil && h.Get("X-Route-Strategy") == "dynamic"
	})
	check("alive")
	process.kill()
	check("dead")
}

// TestDemoRunsAndEnds runs the demo for a few seconds and reads its JSON.
func TestDemoRunsAndEnds(t *testing.T) {
	envoytest.Binary(t)
	out := runFairlead(t, t.TempDir(), "demo", "--duration", "6s", "--sidecars", "2", "--rps", "20", "--fault", "slow:h100-2@2s", "-o", "json")
	checkDemo(t, out)
}

// TestDemoCompares runs the smallest comparison and reads its table.
func TestDemoCompares(t *testing.T) {
	envoytest.Binary(t)
	out := runFairlead(t, t.TempDir(), "demo", "--compare", "--seeds", "1", "--compare-sidecars", "1", "--duration", "2s", "--rps", "8", "--fault", "slow:h100-2@1s")
	for _, want := range []string{"TTFT p50 ms", "TTFT p95 ms", "TTFT p99 ms", "over 2 s %", "errors", "429s", "GPU h100 %", "GPU a100 %", "CPU all Envoys", "machine idle %"} {
		if !strings.Contains(out, want) {
			t.Errorf("the table lacks %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "NaN") || strings.Contains(out, "Inf") {
		t.Errorf("the table has numbers that are none:\n%s", out)
	}
}

// TestDemoEndsCleanlyOnInterrupt interrupts a demo without an end.
func TestDemoEndsCleanlyOnInterrupt(t *testing.T) {
	envoytest.Binary(t)
	dir := envoytest.ShortTempDir(t)
	t.Setenv("TMPDIR", dir) // where the demo's sidecars have their files
	p := startFairlead(t, dir, "demo", "--sidecars", "1", "--rps", "10")
	envoytest.Eventually(t, "the first table", func() bool { return strings.Contains(p.out.String(), "h100-4") })
	p.interrupt()
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit %d:\n%s", code, p.out)
	}
	if left := processesWith(p.cmd.Dir); len(left) > 0 {
		t.Errorf("outlived the demo: %v", left)
	}
}
