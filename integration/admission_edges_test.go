package integration

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/plan"
)

// twoServers is a pool of two servers, told apart by their ports alone.
func twoServers(a, b netip.AddrPort) shape {
	return shape{text: shapeHead + fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1, uploadTimeout: 20s }, routes: [ chat ] }
pools:
- { name: a, endpoints: [ { address: %q }, { address: %q } ] }
routes:
- { name: chat, match: { prefix: / }, dialect: openai, pool: a, affinity: none }
`, a, b)}
}

// TestUpstreamHitIsTheLoggedDecision: with the budget only in a body of 20 KB,
// the server that got the request is the one that was decided and logged, and of
// two ports of one address each gets its own.
func TestUpstreamHitIsTheLoggedDecision(t *testing.T) {
	a, b := newModelServer(t), newModelServer(t)
	s := startSteered(t, twoServers(a.addr(), b.addr()))
	servers := map[netip.AddrPort]*modelServer{a.addr(): a, b.addr(): b}
	body := padded(`{"max_tokens":1500,"prompt":"`, 20<<10)
	for range 30 {
		r := s.postJSON(chatPath, body)
		e, id := s.lastEvent(), r.header.Get(wire.HeaderDecision)
		if r.status != http.StatusOK || e.Budget != 1500 || e.Level != fleet.LevelOf(1500) || e.Action != plan.ActionSteer {
			t.Fatalf("status %d, event %+v", r.status, e)
		}
		o := s.outcome(t, id, func(o fleet.Outcome) bool { return o.Kind == fleet.AttemptEnded })
		if slot := s.ledger.Load().Slot(o.Endpoint); slot != e.Slot {
			t.Errorf("decided for slot %d, logged on %v, which has slot %d", e.Slot, o.Endpoint, slot)
		}
		hit := servers[o.Endpoint.Address]
		if hit == nil || hit.lastArrived().header.Get(wire.HeaderDecision) != id || hit.lastArrived().sum != digest([]byte(body)) {
			t.Errorf("%s was logged on %v, which did not get it as sent", id, o.Endpoint)
		}
	}
	if a.count.Load() == 0 || b.count.Load() == 0 {
		t.Errorf("the two ports got %d and %d requests", a.count.Load(), b.count.Load())
	}
}

// TestUpgradeWithABodyIsAnswered: a POST that asks for an upgrade and has a
// length and a body neither hangs nor is read by ext_proc's peek: it is answered
// before its body has come, which then reaches the server as it is.
func TestUpgradeWithABodyIsAnswered(t *testing.T) {
	a := envoytest.NewUpstream(t, envoytest.WebSocketEcho())
	s := startSteered(t, twoServers(a.Addr(), a.Addr()).single())
	const body = `{"a":"b"}`
	for name, head := range map[string]string{
		"with a length":    "content-type: application/json\r\ncontent-length: 9\r\n",
		"without a length": "content-type: application/json\r\n",
		"no content type":  "content-length: 9\r\n",
	} {
		for _, late := range []bool{false, true} { // the body, until the answer has come
			c, err := net.Dial("tcp", s.addr.String())
			if err != nil {
				t.Fatal(err)
			}
			// Well below uploadTimeout, after which Envoy would answer 408.
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			first, then := body, ""
			if late {
				first, then = then, first
			}
			_, _ = fmt.Fprintf(c, "POST /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"+
				"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n%s\r\n%s", head, first)
			r := bufio.NewReader(c)
			response, err := http.ReadResponse(r, nil)
			if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
				t.Errorf("%s, late %v: answered %+v, %v", name, late, response, err)
				_ = c.Close()
				continue
			}
			_, _ = io.WriteString(c, then)
			echo := make([]byte, len(body))
			if _, err := io.ReadFull(r, echo); err != nil || string(echo) != body {
				t.Errorf("%s, late %v: echoed %q, %v", name, late, echo, err)
			}
			if e := s.lastEvent(); e.Action != plan.ActionSteer || e.BudgetSource != extproc.BudgetUnread {
				t.Errorf("%s, late %v: event %+v", name, late, e)
			}
			_ = c.Close()
		}
	}
	s.waitEmpty(t)
}

// TestServerOnAnotherPortIsNamed: a server that doesn't listen where the config says
// gets no requests, and the status names it by that address, with what is wrong.
func TestServerOnAnotherPortIsNamed(t *testing.T) {
	m, wrong := newModelServer(t), envoytest.FreeAddr(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, telemetry: { source: scrape }, endpoints: [ { address: %q }, { address: %q } ] }
routes:
  - { name: chat, match: { prefix: / }, dialect: openai, pool: a, affinity: none }
`, m.addr(), wrong))
	envoytest.Eventually(t, "the address where nobody listens in the status", func() bool {
		if r := s.post(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Fatalf("status %d beside a server that answers: %s", r.status, r.body)
		}
		f, err := s.client.Fleet(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		there, missing := f.Pools[0].Endpoints[0], f.Pools[0].Endpoints[1]
		if there.Failing {
			t.Fatalf("the server that answers is shown as failing: %+v", there)
		}
		return missing.Address == wrong.String() && missing.Failing && strings.Contains(missing.TelemetryError, "refused")
	})
	got := m.count.Load()
	for range 20 {
		if r := s.post(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Errorf("status %d: %s", r.status, r.body)
		}
	}
	if n := m.count.Load() - got; n < 20 {
		t.Errorf("%d of 20 requests reached the server that is there", n)
	}
}

// single leaves out the second server.
func (s shape) single() shape {
	first, _, _ := strings.Cut(s.text, " }, {")
	_, rest, _ := strings.Cut(s.text, " } ] }\nroutes")
	s.text = first + " } ] }\nroutes" + rest
	return s
}

// TestGzippedBodiesPassBothWays: clients compress large bodies, and servers their
// errors. Neither is touched, and the budget is the route's default.
func TestGzippedBodiesPassBothWays(t *testing.T) {
	m := newModelServer(t)
	s := startSteered(t, twoServers(m.addr(), m.addr()).single())
	refusal := gzipped(t, `{"error":{"message":"max_tokens is too large"}}`)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("content-encoding", "gzip")
		w.Header().Set("content-type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, refusal)
	}))
	body := gzipped(t, `{"max_tokens":4,"prompt":"`+strings.Repeat("hello ", 10_000)+`"}`)
	r := s.send(http.MethodPost, chatPath, strings.NewReader(body), "content-type", "application/json", "content-encoding", "gzip")
	if got := m.lastArrived(); got.sum != digest([]byte(body)) || got.header.Get("content-encoding") != "gzip" {
		t.Errorf("the server got %d bytes with content-encoding %q", got.bodyLen, got.header.Get("content-encoding"))
	}
	if e := s.lastEvent(); e.BudgetSource != extproc.BudgetUnreadable || e.Budget != 512 {
		t.Errorf("%d from %s", e.Budget, e.BudgetSource)
	}
	if r.status != http.StatusBadRequest || r.header.Get("content-encoding") != "gzip" || r.body != refusal {
		t.Fatalf("status %d, content-encoding %q, %d bytes", r.status, r.header.Get("content-encoding"), len(r.body))
	}
	z, err := gzip.NewReader(strings.NewReader(r.body))
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(z); err != nil || !strings.Contains(string(text), "too large") {
		t.Errorf("the error reads %q, %v", text, err)
	}
}

// TestLargeBodiesPassWithAReason: bodies of 640 KB are read, larger ones than the
// listener reads are steered without.
func TestLargeBodiesPassWithAReason(t *testing.T) {
	m := newModelServer(t)
	s := startSteered(t, twoServers(m.addr(), m.addr()).single())
	for size, want := range map[int]extproc.BudgetSource{
		640_000: extproc.BudgetBody, 655_360: extproc.BudgetBody, 1 << 20: extproc.BudgetUnread, 5_000_000: extproc.BudgetUnread, 5 << 20: extproc.BudgetUnread,
	} {
		body := padded(`{"max_tokens":4,"prompt":"`, size)
		r := s.postJSON(chatPath, body)
		e := s.lastEvent()
		if r.status != http.StatusOK || e.BudgetSource != want || e.Action != plan.ActionSteer {
			t.Errorf("%d bytes: status %d, budget from %s, want %s; %+v", size, r.status, e.BudgetSource, want, e)
		}
		if got := m.lastArrived(); got.length != int64(size) || got.sum != digest([]byte(body)) {
			t.Errorf("%d bytes: the server got %d with content-length %d", size, got.bodyLen, got.length)
		}
	}
	s.waitEmpty(t)
}

// TestChunkedBodyFallsBackWhole: a body without a length goes to the next target
// of the chain as it came, and no hop-by-hop header of the client's with it.
func TestChunkedBodyFallsBackWhole(t *testing.T) {
	first, second := newModelServer(t), newModelServer(t)
	first.answerWith(envoytest.Status(http.StatusServiceUnavailable, "busy"))
	s := startSteered(t, shape{text: shapeHead + fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [ chat ] }
pools:
- { name: a, endpoints: [ { address: %q } ] }
- { name: b, endpoints: [ { address: %q } ] }
routes:
- { name: chat, match: { prefix: / }, dialect: openai, pool: a, fallback: [ { pool: b } ] }
`, first.addr(), second.addr())})
	body := padded(`{"max_tokens":4,"prompt":"`, 300_000)
	r := s.send(http.MethodPost, chatPath, io.MultiReader(strings.NewReader(body)), "content-type", "application/json", "te", "trailers", "keep-alive", "timeout=5")
	got := second.lastArrived()
	if r.status != http.StatusOK || first.count.Load() != 1 || got.sum != digest([]byte(body)) {
		t.Fatalf("status %d; the first server got %d requests, the second %d bytes", r.status, first.count.Load(), got.bodyLen)
	}
	for _, name := range []string{"Keep-Alive", "Proxy-Connection", "Upgrade"} {
		if v := got.header.Values(name); len(v) > 0 {
			t.Errorf("the second server got %s: %q", name, v)
		}
	}
	s.waitEmpty(t)
}

// TestRequestsWithTrailersAreAnswered over HTTP/1.1 and HTTP/2.
func TestRequestsWithTrailersAreAnswered(t *testing.T) {
	m := newModelServer(t)
	s := startSteered(t, twoServers(m.addr(), m.addr()).single())
	for name, e := range map[string]*factEnvoy{"HTTP/1.1": s.factEnvoy, "HTTP/2": overHTTP2(t, s.factEnvoy)} {
		const body = `{"max_tokens":4}`
		r, err := http.NewRequest(http.MethodPost, fmt.Sprintf("http://%v%s", e.addr, chatPath), io.MultiReader(strings.NewReader(body)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("content-type", "application/json")
		r.Trailer = http.Header{"X-Checksum": {digest([]byte(body))}}
		response, err := e.client.Do(r)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		if got := m.lastArrived(); response.StatusCode != http.StatusOK || got.sum != digest([]byte(body)) {
			t.Errorf("%s: status %d, the server got %d bytes", name, response.StatusCode, got.bodyLen)
		}
		if e := s.lastEvent(); e.Action != plan.ActionSteer || e.BudgetSource != extproc.BudgetUnread {
			t.Errorf("%s: event %+v", name, e)
		}
	}
	s.waitEmpty(t)
}

// TestPlainTextErrorsPassUnchanged: a server's 503 in plain text is neither
// rewritten nor taken for something of Fairlead's.
func TestPlainTextErrorsPassUnchanged(t *testing.T) {
	m := newModelServer(t)
	s := startSteered(t, twoServers(m.addr(), m.addr()).single())
	const text = "upstream says: no \"JSON\" here\n\x00\xff"
	for _, status := range []int{http.StatusServiceUnavailable, http.StatusInternalServerError, http.StatusBadRequest, http.StatusUnprocessableEntity} {
		m.answerWith(envoytest.Status(status, text, "content-type", "text/plain; charset=latin-1", "x-own", "kept"))
		r := s.postJSON(chatPath, `{"max_tokens":4}`)
		if r.status != status || r.body != text || r.header.Get("content-type") != "text/plain; charset=latin-1" || r.header.Get("x-own") != "kept" {
			t.Errorf("status %d became %d: %q, %v", status, r.status, r.body, r.header)
		}
	}
}

// TestHeadAndOptionsPass: neither waits for a body, and HEAD is answered like
// GET.
func TestHeadAndOptionsPass(t *testing.T) {
	m := newModelServer(t)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" {
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	s := startSteered(t, twoServers(m.addr(), m.addr()).single())
	for _, path := range []string{"/healthz", chatPath, "/v1/models"} {
		statuses := map[string]int{}
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions} {
			r := s.send(method, path, nil, "content-type", "application/json", "origin", "https://app.example", "access-control-request-method", "POST")
			statuses[method] = r.status
			if s.lastEvent().BudgetSource == extproc.BudgetUnread {
				t.Errorf("%s %s: taken for one with a body", method, path)
			}
		}
		if statuses[http.MethodHead] != statuses[http.MethodGet] || statuses[http.MethodOptions]/100 != 2 {
			t.Errorf("%s: %v", path, statuses)
		}
	}
	s.waitEmpty(t)
}

// spoofs are headers that callers may try to pass off as Fairlead's own.
func spoofs() [][2]string {
	var all [][2]string
	for _, name := range []string{wire.HeaderDecision, wire.HeaderDraw, wire.HeaderServedBy, "x-fairlead-anything", wire.HeaderGatewayDestination} {
		for _, spelling := range []string{name, strings.ToUpper(name), http.CanonicalHeaderKey(name), strings.ToUpper(name[:3]) + name[3:]} {
			all = append(all, [2]string{spelling, "spoof"})
		}
		all = append(all, [2]string{name, "spoof, spoof2"}, [2]string{name, ""}, [2]string{name, "  spoof  "}, [2]string{name, "203.0.113.1:1"}, [2]string{name, strings.Repeat("spoof", 500)})
	}
	return all
}

// TestSpoofedHeadersNeverReachAnUpstream sends them one by one, twice in one
// request and over HTTP/2, with ext_proc alive and dead.
func TestSpoofedHeadersNeverReachAnUpstream(t *testing.T) {
	m := newModelServer(t)
	s := startSteered(t, twoServers(m.addr(), m.addr()).single())
	h2 := overHTTP2(t, s.factEnvoy)
	if n := len(spoofs()); n < 40 {
		t.Errorf("only %d variants", n)
	}
	check := func(when string) {
		t.Helper()
		for _, spoof := range spoofs() {
			for _, r := range []answer{
				rawSpoof(t, s.addr.String(), spoof, 1), rawSpoof(t, s.addr.String(), spoof, 2), h2.postJSON(chatPath, `{}`, spoof[0], spoof[1]),
			} {
				if r.status != http.StatusOK {
					t.Errorf("%s, %.60q: status %d", when, spoof, r.status)
				}
			}
			for name, values := range m.lastArrived().header {
				text := strings.Join(values, ",")
				own := strings.EqualFold(name, wire.HeaderDecision) && len(values) == 1
				if strings.Contains(text, "spoof") || strings.Contains(text, "203.0.113.1") ||
					(strings.HasPrefix(strings.ToLower(name), wire.ReservedPrefix) && !own) || strings.EqualFold(name, wire.HeaderGatewayDestination) {
					t.Errorf("%s, %.60q: the server got %s: %q", when, spoof, name, values)
				}
			}
		}
	}
	check("ext_proc alive")
	s.stopExtProc()
	check("ext_proc dead")
}

// rawSpoof sends a header as it stands, so often.
func rawSpoof(t *testing.T, address string, header [2]string, times int) answer {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	var b bytes.Buffer
	_, _ = fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n", chatPath)
	for range times {
		_, _ = fmt.Fprintf(&b, "%s: %s\r\n", header[0], header[1])
	}
	b.WriteString("content-length: 2\r\n\r\n{}")
	if _, err := c.Write(b.Bytes()); err != nil {
		t.Fatal(err)
	}
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatalf("%.60q: %v", header, err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	return answer{status: response.StatusCode, header: response.Header, body: string(text)}
}

// TestTwoThousandStreamsDontOverflow: twice as many requests wait at once for their
// answers as the default limit of a cluster lets be, each with a stream of ext_proc
// open that is to read the answer's headers. None is failed or goes unsteered for it,
// and once the answers have begun ext_proc has nothing open.
func TestTwoThousandStreamsDontOverflow(t *testing.T) {
	if testing.Short() {
		t.Skip("opens 2,000 streams")
	}
	const (
		streams = 2000
		opening = 50 // at most so many have not reached the server yet
	)
	m := newModelServer(t)
	begin, finish := make(chan struct{}), make(chan struct{})
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		waitFor(r.Context(), begin)
		w.Header().Set("content-type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n")
		_ = http.NewResponseController(w).Flush()
		waitFor(r.Context(), finish)
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}))
	sh := twoServers(m.addr(), m.addr()).single()
	sh.text = strings.Replace(sh.text, "name: a, ", "name: a, maxInFlight: 65535, ", 1)
	sh.text = strings.Replace(sh.text, "pool: a, ", "pool: a, retryFields: computed, ", 1)
	s := startSteered(t, sh)
	h2 := overHTTP2(t, s.factEnvoy)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var parts sync.WaitGroup
	var mu sync.Mutex
	var begun atomic.Int64
	statuses, unsteered, broken := map[int]int{}, 0, 0
	for i := range int64(streams) {
		envoytest.Eventually(t, "room to open one more", func() bool { return i-m.inside.Load() < opening })
		parts.Go(func() {
			r, err := h2.open(ctx, http.MethodPost, chatPath, strings.NewReader(`{"max_tokens":4,"stream":true}`), "content-type", "application/json")
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				statuses[-1]++
				return
			}
			begun.Add(1)
			text, err := io.ReadAll(r.Body)
			_ = r.Body.Close()
			mu.Lock()
			defer mu.Unlock()
			statuses[r.StatusCode]++
			if r.Header.Get(wire.HeaderRouteStrategy) != "dynamic" {
				unsteered++
			}
			if err != nil || !strings.HasSuffix(string(text), "[DONE]\n\n") {
				broken++
			}
		})
	}
	envoytest.Eventually(t, "all wait for their answers", func() bool { return m.inside.Load() == streams })
	// A loaded machine makes ext_proc late, which costs steering. Envoy counts that
	// apart from other failures; an overflow is none that is allowed.
	lateToSteer := s.extProcLate()
	asked, _ := s.Stat("cluster." + wire.ClusterExtProc + ".upstream_rq_active")
	if asked < streams-lateToSteer || asked > streams {
		t.Errorf("%d streams of ext_proc are open for %d requests, to %d of which it was late", asked, streams, lateToSteer)
	}
	close(begin)
	envoytest.Eventually(t, "all answers have begun", func() bool { return begun.Load() == streams })
	s.WaitStat("cluster."+wire.ClusterExtProc+".upstream_rq_active", func(n int64) bool { return n == 0 })
	if n := m.inside.Load(); n != streams {
		t.Errorf("%d of %d answers still run", n, streams)
	}
	close(finish)
	parts.Wait()
	s.waitEmpty(t)
	if statuses[http.StatusOK] != streams || int64(unsteered) > s.extProcLate() || broken > 0 {
		t.Errorf("statuses %v, %d unsteered, %d times ext_proc was late, %d broken", statuses, unsteered, s.extProcLate(), broken)
	}
	for _, name := range []string{"upstream_rq_active_overflow", "upstream_rq_pending_overflow", "upstream_cx_overflow", "upstream_rq_retry_overflow"} {
		for _, cluster := range []string{wire.ClusterExtProc, "a"} {
			if n, known := s.Stat("cluster." + cluster + "." + name); !known || n != 0 {
				t.Errorf("%s of %s: %d, known %v", name, cluster, n, known)
			}
		}
	}
}

// extProcLate is how often ext_proc did not answer in time.
func (s *steered) extProcLate() int64 {
	late := int64(0)
	for line := range strings.Lines(s.AdminGet("/stats?filter=ext_proc.message_timeouts")) {
		var n int64
		if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &n); err == nil {
			late += n
		}
	}
	return late
}

func waitFor(ctx context.Context, c <-chan struct{}) {
	select {
	case <-c:
	case <-ctx.Done():
	}
}
