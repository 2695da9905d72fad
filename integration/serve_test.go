package integration

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// named answers with the upstream's own name.
func named(name string) http.Handler { return envoytest.JSON(fmt.Sprintf("%q", name)) }

// twoPools is a config of two pools of one plain upstream each behind one
// route.
func twoPools(listen netip.AddrPort, weightA, weightB int, a, b netip.AddrPort, extra string) string {
	return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [chat] }
pools:
%s%sroutes:
  - name: chat
    match: { prefix: / }
    dialect: openai
    strategy: dynamic
    split: [{ pool: b, weight: %d }, { pool: a, weight: %d }]
%s`, listen, poolYAML("a", "", a), poolYAML("b", "", b), weightB, weightA, extra)
}

// TestWeightsMoveUnderLoadAndSurviveARestart moves all traffic from one pool to
// the other by hand, restarts serve, and loses nothing.
func TestWeightsMoveUnderLoadAndSurviveARestart(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 90, 10, a.Addr(), b.Addr(), ""))
	process := p.serve(t)
	e, listen := p.sidecar(t)
	load := startLoad(t, 100, listen)
	envoytest.Eventually(t, "traffic on both pools", func() bool {
		_, by := load.counts()
		return by[`"a"`] > 20 && by[`"b"`] > 0
	})
	const updates = "http.fairlead.rds.fairlead.edge.update_success"
	pushes, ok := e.Stat(updates)
	if !ok || pushes < 1 {
		t.Errorf("%s is %d, there: %t", updates, pushes, ok)
	}

	out := runFairlead(t, p.dir, "rollout", "set", "-f", p.file, "chat", "a=0", "b=100")
	if !strings.Contains(out, "b=100.00% a=0.00%") {
		t.Errorf("rollout set printed:\n%s", out)
	}
	onlyB := func(what string) {
		t.Helper()
		envoytest.Eventually(t, what, func() bool {
			before := a.Count()
			_, start := load.counts()
			envoytest.Eventually(t, "more answers", func() bool { _, by := load.counts(); return by[`"b"`] > start[`"b"`]+20 })
			return a.Count() == before
		})
	}
	onlyB("all new requests on b")
	if now, ok := e.Stat(updates); !ok || now != pushes+1 {
		t.Errorf("the change took %d RDS updates, want 1; the stat is there: %t", now-pushes, ok)
	}

	process.kill()
	p.serve(t)
	onlyB("still all requests on b after a restart of serve")
	if out := runFairlead(t, p.dir, "rollout", "get", "-f", p.file); !strings.Contains(out, "b=100.00%") {
		t.Errorf("rollout get after the restart:\n%s", out)
	}

	runFairlead(t, p.dir, "rollout", "clear", "-f", p.file, "chat")
	seen := a.Count()
	envoytest.Eventually(t, "traffic on a again after rollout clear", func() bool { return a.Count() > seen })
	load.mustNotFail(t)
}

// TestConfigFileIsWatched publishes good changes without losing a request, and
// a faulty one changes nothing.
func TestConfigFileIsWatched(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	listen := envoytest.FreeAddr(t)
	p := newPlace(t, twoPools(listen, 100, 0, a.Addr(), b.Addr(), ""))
	process := p.serve(t)
	_, at := p.sidecar(t)
	load := startLoad(t, 100, at)
	envoytest.Eventually(t, "traffic on a", func() bool { return a.Count() > 20 })

	p.write(t, "", twoPools(listen, 0, 0, a.Addr(), b.Addr(), ""))
	envoytest.Eventually(t, "the fault in the log", func() bool { return strings.Contains(process.out.String(), "config not taken") })
	p.write(t, "", twoPools(listen, 0, 100, a.Addr(), b.Addr(), ""))
	envoytest.Eventually(t, "traffic on b", func() bool { return b.Count() > 20 })

	// Endpoints come and go under load.
	c := envoytest.NewUpstream(t, named("c"))
	withC := strings.Replace(twoPools(listen, 0, 100, a.Addr(), b.Addr(), ""),
		fmt.Sprintf("      - { name: b-1, address: %s }\n", b.Addr()),
		fmt.Sprintf("      - { name: b-1, address: %s }\n      - { name: b-2, address: %s }\n", b.Addr(), c.Addr()), 1)
	p.write(t, "", withC)
	envoytest.Eventually(t, "traffic on the added endpoint", func() bool { return c.Count() > 20 })
	p.write(t, "", twoPools(listen, 0, 100, a.Addr(), b.Addr(), ""))
	envoytest.Eventually(t, "no traffic on the removed endpoint", func() bool {
		before, b0 := c.Count(), b.Count()
		envoytest.Eventually(t, "more on b", func() bool { return b.Count() > b0+20 })
		return c.Count() == before
	})
	load.mustNotFail(t)
}

// TestAnswersCarryTheContract checks what stands on every answer, with ext_proc
// alive and dead, and that reserved headers never reach an upstream.
func TestAnswersCarryTheContract(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 50, 50, a.Addr(), b.Addr(), ""))
	process := p.serve(t)
	_, listen := p.sidecar(t)

	spoofed := []string{
		"x-fairlead-decision", "spoof", "X-Fairlead-Draw", "77", "x-gateway-destination-endpoint", "203.0.113.1:1",
		"x-fairlead-anything", "spoof",
	}
	check := func(what, strategy string, header http.Header) {
		t.Helper()
		if got := header.Values("X-Route-Strategy"); len(got) != 1 || got[0] != strategy {
			t.Errorf("%s: x-route-strategy %q, want one %q", what, got, strategy)
		}
		if got := header.Values("X-Request-Id"); len(got) != 1 || got[0] == "" {
			t.Errorf("%s: x-request-id %q", what, got)
		}
		for _, u := range []*envoytest.Upstream{a, b} {
			for _, r := range u.Requests() {
				for name, values := range r.Header {
					if strings.Contains(strings.Join(values, ","), "spoof") || strings.Contains(strings.Join(values, ","), "203.0.113.1") ||
						strings.EqualFold(name, "x-fairlead-draw") || strings.EqualFold(name, "x-fairlead-anything") {
						t.Errorf("%s: upstream got %s: %q", what, name, values)
					}
				}
			}
			u.Forget()
		}
	}
	envoytest.Eventually(t, "ext_proc to take part", func() bool {
		_, header, _ := chat(t, listen)
		return header.Get("X-Route-Strategy") == "dynamic"
	})
	_, header, _ := chat(t, listen, spoofed...)
	check("alive", "dynamic", header)
	if header.Get("X-Fairlead-Decision") == "" || header.Get("X-Execution-Graph-Id") == "" {
		t.Errorf("alive: decision %q, graph %q", header.Get("X-Fairlead-Decision"), header.Get("X-Execution-Graph-Id"))
	}
	_, header, _ = chat(t, listen, "x-route-strategy", "legacy")
	check("legacy asked for", "legacy", header)
	_, header, _ = chat(t, listen, "x-route-strategy", "quantum")
	check("unknown strategy", "legacy", header)

	status, header, body, err := tryPost("http://"+listen+"/v1/nowhere", "{}")
	if err != nil || status != http.StatusOK {
		t.Errorf("a path that does not generate: status %d, %s, %v", status, body, err)
	}
	check("a path that does not generate", "dynamic", header)

	process.kill()
	status, header, _ = chat(t, listen, spoofed...)
	if status != http.StatusOK {
		t.Errorf("dead: status %d", status)
	}
	check("dead", "legacy", header)
}

// TestRefusalsCarryTheIDs asks for what no route takes, and sends a body that
// the route does not take.
func TestRefusalsCarryTheIDs(t *testing.T) {
	a := envoytest.NewUpstream(t, named("a"))
	config := twoPools(envoytest.FreeAddr(t), 100, 0, a.Addr(), a.Addr(), "")
	config = strings.Replace(config, "prefix: / }", "prefix: /v1/ }", 1)
	config = strings.Replace(config, "strategy: dynamic", "strategy: dynamic\n    maxBody: 64KiB", 1)
	p := newPlace(t, config)
	process := p.serve(t)
	_, listen := p.sidecar(t)
	envoytest.Eventually(t, "steering", func() bool { _, h, _ := chat(t, listen); return h.Get("X-Route-Strategy") == "dynamic" })
	big := `{"prompt":"` + strings.Repeat("x", 100<<10) + `"}`
	for _, c := range []struct {
		path, body string
		status     int
		strategy   string
	}{
		{"/nothing/here", "{}", http.StatusNotFound, "legacy"},
		{"/v1/chat/completions", big, http.StatusRequestEntityTooLarge, "dynamic"},
	} {
		status, header, body, err := tryPost("http://"+listen+c.path, c.body)
		if err != nil || status != c.status || !strings.Contains(body, `"error"`) {
			t.Errorf("%s: status %d, %s, %v", c.path, status, body, err)
		}
		for _, name := range []string{"X-Fairlead-Decision", "X-Execution-Graph-Id", "X-Request-Id"} {
			if got := header.Values(name); len(got) != 1 || got[0] == "" {
				t.Errorf("%d has %s: %q", c.status, name, got)
			}
		}
		if got := header.Values("X-Route-Strategy"); len(got) != 1 || got[0] != c.strategy {
			t.Errorf("%d has strategy %q, want %q", c.status, got, c.strategy)
		}
	}
	envoytest.Eventually(t, "in-flight at 0 after the refusals", func() bool { return p.inFlight() == 0 })
	process.kill()
	for path, body := range map[string]string{"/nothing/here": "{}", "/v1/chat/completions": big} {
		status, header, _, err := tryPost("http://"+listen+path, body)
		if err != nil || status/100 != 4 || header.Get("X-Route-Strategy") != "legacy" || header.Get("X-Request-Id") == "" {
			t.Errorf("dead, %s: status %d, strategy %q, %v", path, status, header.Get("X-Route-Strategy"), err)
		}
	}
}

// TestServeEndsCleanlyUnderLoad interrupts serve, as a roll-out of it does.
func TestServeEndsCleanlyUnderLoad(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 50, 50, a.Addr(), b.Addr(), ""))
	process := p.serve(t)
	_, listen := p.sidecar(t)
	load := startLoad(t, 200, listen)
	envoytest.Eventually(t, "traffic", func() bool { sent, _ := load.counts(); return sent > 50 })
	process.interrupt()
	if code := process.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit %d:\n%s", code, process.out)
	}
	sent, _ := load.counts()
	envoytest.Eventually(t, "traffic without serve", func() bool { now, _ := load.counts(); return now > sent+50 })
	load.mustNotFail(t)
}

// TestStreamsPassUntouched sends each event of a stream only after the one
// before has been received, and compares every byte.
func TestStreamsPassUntouched(t *testing.T) {
	events := make(chan string)
	a := envoytest.NewUpstream(t, envoytest.SSE(events))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 100, 0, a.Addr(), a.Addr(), ""))
	p.serve(t)
	_, listen := p.sidecar(t)

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+listen+"/v1/chat/completions", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body := bufio.NewReader(response.Body)
	for i := range 20 {
		want := fmt.Sprintf("event: e%d\ndata: {\"i\":%d,\"text\":\"%s\"}\n\n", i, i, strings.Repeat("é\\n", i*40))
		select {
		case events <- want:
		case <-ctx.Done():
			t.Fatal("upstream takes no event")
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(body, got); err != nil {
			t.Fatalf("event %d: %v", i, err)
		}
		if string(got) != want {
			t.Fatalf("event %d: got %q, want %q", i, got, want)
		}
	}
	close(events)
	if rest, err := io.ReadAll(body); err != nil || len(rest) != 0 {
		t.Errorf("after the last event: %q, %v", rest, err)
	}
}

// TestOddRequestsPass sends what a proxy can trip over.
func TestOddRequestsPass(t *testing.T) {
	a := envoytest.NewUpstream(t, envoytest.Echo())
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 100, 0, a.Addr(), a.Addr(), ""))
	p.serve(t)
	_, listen := p.sidecar(t)

	big := `{"model":"m","prompt":"` + strings.Repeat("x", 1<<20) + `"}`
	if status, _, _, err := tryPost("http://"+listen+"/v1/chat/completions", big); err != nil || status != http.StatusOK {
		t.Errorf("1 MiB body: status %d, %v", status, err)
	}
	sum := sha256.Sum256([]byte(big))
	if last := a.Last(); last.BodySHA256 != hex.EncodeToString(sum[:]) {
		t.Errorf("1 MiB body changed on its way: %d bytes arrived", last.BodyLen)
	}
	for _, method := range []string{http.MethodHead, http.MethodOptions, http.MethodGet} {
		request, err := http.NewRequest(method, "http://"+listen+"/v1/models", nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != http.StatusOK || a.Last().Method != method {
			t.Errorf("%s: status %d, upstream saw %s", method, response.StatusCode, a.Last().Method)
		}
	}
}

// tunnelEcho answers CONNECT with 200 and sends back what comes through the
// tunnel.
func tunnelEcho(otherwise http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			otherwise.ServeHTTP(w, r)
			return
		}
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = io.Copy(c, rw)
	})
}

// TestUpgradesPassWithFairleadAlive opens a WebSocket, and a CONNECT tunnel on
// the route that allows it, through a sidecar that ext_proc takes part in.
func TestUpgradesPassWithFairleadAlive(t *testing.T) {
	a := envoytest.NewUpstream(t, tunnelEcho(envoytest.WebSocketEcho()))
	listen := envoytest.FreeAddr(t)
	closed := twoPools(listen, 100, 0, a.Addr(), a.Addr(), "")
	p := newPlace(t, closed)
	p.serve(t)
	_, at := p.sidecar(t)
	for _, headers := range []string{"", "content-type: application/json\r\n"} {
		expectWebSocketEcho(t, netip.MustParseAddrPort(at), "/v1/realtime", headers)
	}
	status, c := connect(t, netip.MustParseAddrPort(at))
	_ = c.Close()
	if status != http.StatusNotFound {
		t.Errorf("CONNECT without a route for it: status %d, want 404", status)
	}
	for _, r := range a.Requests() {
		if r.Method == http.MethodConnect {
			t.Error("CONNECT without a route for it reached the pool")
		}
	}

	p.write(t, "", strings.Replace(closed, "match: { prefix: / }", "match: { prefix: /, connect: true }", 1))
	envoytest.Eventually(t, "CONNECT on a route that allows it", func() bool {
		status, c = connect(t, netip.MustParseAddrPort(at))
		if status == http.StatusOK {
			return true
		}
		_ = c.Close()
		return false
	})
	for _, word := range []string{"ping", "pong"} { // both ways, more than once
		_, _ = io.WriteString(c, word)
		got := make([]byte, len(word))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != word {
			t.Errorf("through the tunnel: %q, want %q, %v", got, word, err)
		}
	}
	_ = c.Close()
	if last := a.Last(); last.Method != http.MethodConnect {
		t.Errorf("the pool saw %s %s", last.Method, last.Path)
	}
}

// TestHalfSentRequestsDontHoldTheFleet opens requests whose bodies never come,
// up to every endpoint's limit.
func TestHalfSentRequestsDontHoldTheFleet(t *testing.T) {
	a := newEngine(t, "gpu-1")
	listen := envoytest.FreeAddr(t)
	p := newPlace(t, strings.Replace(enginePool(listen, 3, a), fmt.Sprintf("listener: { address: %s }", listen),
		fmt.Sprintf("listener: { address: %s, uploadTimeout: 2s }", listen), 1))
	p.serve(t)
	_, at := p.sidecar(t)
	envoytest.Eventually(t, "steering", func() bool { _, h, _ := chat(t, at); return h.Get("X-Route-Strategy") == "dynamic" })
	envoytest.Eventually(t, "in-flight at 0", func() bool { return p.inFlight() == 0 })
	var half []net.Conn
	for range 3 {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10000000\r\n\r\n{")
		half = append(half, c)
		envoytest.Eventually(t, "one place more held", func() bool { return p.inFlight() == len(half) })
	}
	envoytest.Eventually(t, "all places held", func() bool { status, _, _ := chat(t, at); return status == http.StatusTooManyRequests })
	envoytest.Eventually(t, "places free again", func() bool { status, _, _ := chat(t, at); return status == http.StatusOK })
	for _, c := range half {
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if answer, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(answer, " 408 ") {
			t.Errorf("a half-sent request was answered %q, %v", answer, err)
		}
	}
	envoytest.Eventually(t, "in-flight at 0", func() bool { return p.inFlight() == 0 })
	// A stream that runs longer than that is not touched.
	s := openStream(t, at)
	time.Sleep(3 * time.Second) // longer than uploadTimeout
	a.endStreams()
	if rest, err := io.ReadAll(s.Body); err != nil || !strings.Contains(string(rest), "[DONE]") {
		t.Errorf("a stream longer than uploadTimeout ended with %q, %v", rest, err)
	}
}

// TestWindowChangeReachesThePool changes a pool's HTTP/2 windows in the file
// and reads the SETTINGS that its server gets.
func TestWindowChangeReachesThePool(t *testing.T) {
	server := envoytest.NewSettingsRecorder(t)
	config := func(listen netip.AddrPort, stream, connection string) string {
		return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [chat] }
pools:
%sroutes:
  - { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [{ pool: a, weight: 1 }] }
`, listen, poolYAML("a", "protocol: h2c\nhttp2: { initialStreamWindow: "+stream+", initialConnectionWindow: "+connection+" }", server.Addr()))
	}
	listen := envoytest.FreeAddr(t)
	p := newPlace(t, config(listen, "128KiB", "512KiB"))
	p.serve(t)
	_, at := p.sidecar(t)
	seen := func(stream uint32, connection int64) {
		t.Helper()
		envoytest.Eventually(t, fmt.Sprintf("a connection with windows %d and %d", stream, connection), func() bool {
			if status, _, _ := chat(t, at); status != http.StatusOK {
				t.Fatalf("status %d", status)
			}
			for _, s := range server.Seen() {
				if s.Values[http2.SettingInitialWindowSize] == stream && s.ConnectionWindow == connection {
					return true
				}
			}
			return false
		})
	}
	seen(128<<10, 512<<10)
	p.write(t, "", config(listen, "1MiB", "4MiB"))
	seen(1<<20, 4<<20)
}

// TestProxyStatusNamesARefusal starts a sidecar whose port is taken.
func TestProxyStatusNamesARefusal(t *testing.T) {
	a := envoytest.NewUpstream(t, named("a"))
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 100, 0, a.Addr(), a.Addr(), ""))
	p.serve(t)
	_, good := p.sidecar(t)
	file := runFairlead(t, p.dir, "bootstrap", "-f", p.file, "--listen", a.Addr().String(), "--admin", "unix:"+p.dir+"/taken", "--node", "taken")
	envoytest.Start(t, []byte(file), envoytest.WithoutReadyWait())
	var out string
	envoytest.Eventually(t, "the refusal in proxy-status", func() bool {
		out = runFairlead(t, p.dir, "proxy-status", "-f", p.file)
		return strings.Contains(out, "NACKED")
	})
	for _, line := range strings.Split(out, "\n") {
		if strings.Contains(line, "NACKED") && (!strings.HasPrefix(line, "taken ") || !strings.Contains(line, a.Addr().String())) {
			t.Errorf("refusal: %s", line)
		}
	}
	if status, _, _ := chat(t, good); status != http.StatusOK {
		t.Errorf("the other sidecar answers %d", status)
	}
}

// TestMetricsShowWhatHappened reads the Prometheus page after a few requests.
func TestMetricsShowWhatHappened(t *testing.T) {
	gpu := newEngine(t, "gpu-1")
	p := newPlace(t, enginePool(envoytest.FreeAddr(t), 256, gpu))
	p.serve(t)
	_, listen := p.sidecar(t)
	envoytest.Eventually(t, "telemetry", func() bool { return p.endpoint(t, "gpu-1").Known })
	envoytest.Eventually(t, "steering", func() bool { _, h, _ := chat(t, listen); return h.Get("X-Route-Strategy") == "dynamic" })
	_, _, _ = chat(t, listen, "x-route-strategy", "quantum", "temperature", "hot")
	want := []string{
		`fairlead_requests_total{pool="gpu",reason="weighted",route="chat",strategy="dynamic"}`,
		`fairlead_requests_total{pool="gpu",reason="legacy",route="chat",strategy="legacy"}`,
		`fairlead_request_anomalies_total{kind="unknown_strategy"} 1`,
		`fairlead_request_anomalies_total{kind="invalid_sampling"} 1`,
		`fairlead_decision_seconds_count`,
		`fairlead_plan_age_seconds`,
		`fairlead_telemetry_age_seconds{endpoint="gpu-1",pool="gpu",source="engine"}`,
		`fairlead_attempts_total{cause="ok",pool="gpu"}`, `fairlead_requests_ended_total{cause="ok",code="2xx"}`,
		`fairlead_attempt_headers_seconds_count`, `fairlead_config_refused 0`, `fairlead_ledger_dropped_total 0`,
		`go_goroutines`, `process_resident_memory_bytes`,
		`fairlead_endpoint_risk`, `fairlead_endpoint_share`, `fairlead_endpoint_in_flight`,
		`fairlead_endpoint_state`,
		`fairlead_xds_events_total{event="ack",type="CDS"}`,
		`fairlead_accesslog_entries_total{kind="entries"}`,
		`fairlead_scrape_events_total{kind="pages"}`,
		`fairlead_budgets_total`,
	}
	var page string
	defer func() {
		if t.Failed() {
			t.Log(page)
		}
	}()
	envoytest.Eventually(t, "all families on the metrics page", func() bool {
		response, err := client.Get("http://" + p.config.Serve.Admin.Target() + "/metrics")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		page = string(text)
		for _, w := range want {
			if !strings.Contains(page, w) {
				return false
			}
		}
		return err == nil
	})
}

// TestFaultyConfigIsListedWithLines runs the command as an operator does.
func TestFaultyConfigIsListedWithLines(t *testing.T) {
	dir := t.TempDir()
	file := dir + "/bad.yaml"
	if err := os.WriteFile(file, []byte("apiVersion: fairlead/v1alpha1\nkind: Fairlead\npools:\n  - name: A_b\n    maxInFlight: many\n    colour: red\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, code := tryFairlead(t, dir, "validate", "-f", file)
	if code != 2 {
		t.Errorf("exit %d, want 2", code)
	}
	for _, want := range []string{"bad.yaml:4:", "bad.yaml:5:", "bad.yaml:6:", "maxInFlight", "colour"} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
}

// TestPortInUseIsNamed starts serve twice.
func TestPortInUseIsNamed(t *testing.T) {
	a := envoytest.NewUpstream(t, nil)
	p := newPlace(t, twoPools(envoytest.FreeAddr(t), 100, 0, a.Addr(), a.Addr(), ""))
	p.serve(t)
	out, code := tryFairlead(t, p.dir, "serve", "-f", p.file)
	if code == 0 || !strings.Contains(out, p.config.Serve.StateDir) || !strings.Contains(out, "in use") {
		t.Errorf("same state folder: exit %d, output:\n%s", code, out)
	}
	text, err := os.ReadFile(p.file)
	if err != nil {
		t.Fatal(err)
	}
	other := p.dir + "/other.yaml"
	if err := os.WriteFile(other, bytes.Replace(text, []byte("/state\n"), []byte("/state2\n"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	out, code = tryFairlead(t, p.dir, "serve", "-f", other)
	if code == 0 || !strings.Contains(out, p.config.Serve.XDS.Path) || !strings.Contains(out, "in use") {
		t.Errorf("same addresses: exit %d, output:\n%s", code, out)
	}
}
