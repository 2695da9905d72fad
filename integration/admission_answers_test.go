package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// served is a config run by serve, with a sidecar and a client.
type served struct {
	*place
	process *fairleadProcess
	envoy   *envoytest.Envoy
	listen  string
	with    *http.Client
}

// startServed runs serve with a config that has its own listener in it as %s.
func startServed(t *testing.T, config string) *served {
	t.Helper()
	s := &served{place: newPlace(t, strings.Replace(config, "LISTEN", envoytest.FreeAddr(t).String(), 1)), with: wide(t)}
	s.process = s.serve(t)
	s.envoy, s.listen = s.sidecar(t)
	waitExtProc(s.envoy)
	return s
}

// post sends a request that ext_proc takes part in. On a loaded machine it may be
// late, and the request passes without it; then another is sent.
func (s *served) post(t *testing.T, path, body string, headers ...string) answer {
	t.Helper()
	for range 5 {
		if a := s.postOnce(t, path, body, headers...); a.header.Get("X-Route-Strategy") == "dynamic" {
			return a
		}
	}
	t.Fatal("ext_proc was late five times")
	return answer{}
}

func (s *served) postOnce(t *testing.T, path, body string, headers ...string) answer {
	t.Helper()
	a, err := ask(t.Context(), s.with, "http://"+s.listen+path, body, false, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// expectOwnError checks an error body in a dialect, and that ext_proc took part.
func expectOwnError(t *testing.T, a answer, status int, dialect fleet.Dialect, says string) {
	t.Helper()
	var body struct {
		Type  string
		Error struct{ Type, Message string }
	}
	err := json.Unmarshal([]byte(a.body), &body)
	if err != nil || a.status != status || (body.Type == "error") != (dialect == fleet.DialectAnthropic) ||
		body.Error.Type == "" || !strings.Contains(body.Error.Message, says) {
		t.Errorf("status %d, want %d with %q in dialect %v: %v: %s", a.status, status, says, dialect, err, a.body)
	}
	expectHeader(t, a, "X-Route-Strategy", "dynamic")
}

// TestUpstreamsRetryFields: an upstream's own retry fields stay as they are;
// where it sends neither, they are added. On a route that computes them they say
// what the headers of its limits say, within what SDKs understand, and that there is no
// point in trying again where that is more.
func TestUpstreamsRetryFields(t *testing.T) {
	in := func(d time.Duration, layout string) func() string {
		return func() string { return time.Now().Add(d).UTC().Format(layout) }
	}
	is := func(s string) func() string { return func() string { return s } }
	type sent map[string]func() string
	rows := []struct {
		name   string
		status int
		sent   sent
		fixed  bool
		// Bounds of retry-after-ms in ms; 0, 0: the upstream's own fields stand.
		least, most int64
	}{
		{"seconds", 429, sent{"retry-after": is("30")}, false, 0, 0},
		{"milliseconds", 429, sent{"retry-after-ms": is("1500")}, false, 0, 0},
		{"both", 429, sent{"retry-after": is("2"), "retry-after-ms": is("1700")}, false, 0, 0},
		{"date", 503, sent{"retry-after": in(30*time.Second, http.TimeFormat)}, false, 0, 0},
		{"seconds, fixed route", 429, sent{"retry-after": is("30")}, true, 0, 0},
		{"nothing, fixed route", 429, sent{}, true, 1000, 1999},
		{"nothing, fixed route, 529", 529, sent{}, true, 1000, 1999},
		{"nothing", 429, sent{}, false, 1, 60_000},
		{"nothing, 503", 503, sent{}, false, 1, 60_000},
		{"nothing, 529", 529, sent{}, false, 1, 60_000},
		{"Azure", 429, sent{"x-ms-retry-after-ms": is("700")}, false, 700, 700},
		{"Azure beside junk", 429, sent{"x-ms-retry-after-ms": is("700"), "retry-after": is("garbage")}, false, 700, 700},
		{"requests, Go duration", 429, sent{"x-ratelimit-reset-requests": is("12.5s"), "x-ratelimit-remaining-requests": is("0")}, false, 12_500, 12_500},
		{"tokens, milliseconds", 429, sent{"x-ratelimit-reset-tokens": is("120ms")}, false, 120, 120},
		{"minutes, clamped", 429, sent{"x-ratelimit-reset-requests": is("6m0s")}, false, 60_000, 60_000},
		{"a minute and a second, Azure", 429, sent{"x-ms-retry-after-ms": is("61000")}, false, 60_000, 60_000},
		{"the limit that is used up", 429, sent{"x-ratelimit-reset-requests": is("1s"), "x-ratelimit-remaining-requests": is("5"),
			"x-ratelimit-reset-tokens": is("20s"), "x-ratelimit-remaining-tokens": is("0")}, false, 20_000, 20_000},
		{"plain seconds", 429, sent{"x-ratelimit-reset": is("15")}, false, 15_000, 15_000},
		{"RFC 3339", 529, sent{"anthropic-ratelimit-requests-reset": in(40*time.Second, time.RFC3339)}, false, 5_000, 40_000},
		{"a time that has passed", 429, sent{"anthropic-ratelimit-requests-reset": in(-time.Hour, time.RFC3339)}, false, 1, 60_000},
		{"nonsense", 429, sent{"x-ratelimit-reset-requests": is("soon"), "x-ratelimit-reset": is("-3")}, false, 1, 60_000},
	}
	const body = `{"error":{"message":"the provider's own words"}}`
	up := envoytest.NewUpstream(t, nil)
	var pools, routes, names strings.Builder
	for i, row := range rows {
		fields := "computed"
		if row.fixed {
			fields = "fixed"
		}
		fmt.Fprintf(&pools, "  - { name: p%d, endpoints: [ { address: %q } ] }\n", i, up.Addr())
		fmt.Fprintf(&routes, "  - { name: r%d, match: { prefix: /r%d/ }, dialect: openai, pool: p%d, retryFields: %s }\n", i, i, i, fields)
		fmt.Fprintf(&names, "r%d, ", i)
	}
	s := startServed(t, "groups:\n  - { name: edge, listener: { address: LISTEN }, routes: [ "+strings.TrimSuffix(names.String(), ", ")+" ] }\npools:\n"+pools.String()+"routes:\n"+routes.String())
	for i, row := range rows {
		headers := []string{"content-type", "application/json"}
		told := http.Header{}
		for name, value := range row.sent {
			v := value()
			headers = append(headers, name, v)
			told.Set(name, v)
		}
		up.Handle(envoytest.Status(row.status, body, headers...))
		a := s.post(t, fmt.Sprintf("/r%d/v1/chat/completions", i), `{"max_tokens":4}`)
		if a.status != row.status || a.body != body {
			t.Errorf("%s: %d %s", row.name, a.status, a.body)
		}
		for name := range row.sent {
			if told.Get(name) == "garbage" {
				continue // has been replaced
			}
			if got := a.header.Values(name); len(got) != 1 || got[0] != told.Get(name) {
				t.Errorf("%s: %s %q; sent %q", row.name, name, got, told.Get(name))
			}
		}
		ms, seconds := a.header.Values("Retry-After-Ms"), a.header.Values("Retry-After")
		// Past what SDKs wait there is no point in trying again.
		hopeless := ""
		if row.least == 60_000 {
			hopeless = "false"
		}
		if got := a.header.Get("X-Should-Retry"); got != hopeless {
			t.Errorf("%s: x-should-retry %q; want %q", row.name, got, hopeless)
		}
		if row.most == 0 {
			if strings.Join(ms, ",") != told.Get("retry-after-ms") || strings.Join(seconds, ",") != told.Get("retry-after") {
				t.Errorf("%s: retry-after-ms %q, retry-after %q beside the upstream's own", row.name, ms, seconds)
			}
			continue
		}
		n := whole(a.header, "Retry-After-Ms")
		if len(ms) != 1 || len(seconds) != 1 || n < row.least || n > row.most || whole(a.header, "Retry-After") != (n+999)/1000 {
			t.Errorf("%s: retry-after-ms %q, retry-after %q; want %d … %d and the same in seconds", row.name, ms, seconds, row.least, row.most)
		}
	}
}

// TestEndpointThatSaysWaitIsLeftAlone: after a 429 with a wait the next requests
// go elsewhere, and when everybody said so they are refused with that wait; when
// it is over the endpoint is asked again.
func TestEndpointThatSaysWaitIsLeftAlone(t *testing.T) {
	away := func(ms string) http.Handler {
		return envoytest.Status(http.StatusTooManyRequests, `{"error":{"message":"later"}}`, "retry-after-ms", ms)
	}
	a, b := envoytest.NewUpstream(t, away("8000")), envoytest.NewUpstream(t, nil)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q }, { address: %q } ] }
routes:
  - { name: chat, match: { prefix: / }, dialect: openai, pool: a, affinity: none }
`, a.Addr(), b.Addr()))
	closed := func(n float64) func() bool {
		return func() bool { return metric(s.metricsPage(t), "fairlead_endpoint_closed") == n }
	}
	envoytest.Eventually(t, "a 429 of the first endpoint", func() bool {
		return s.post(t, chatPath, `{"max_tokens":4}`).status == http.StatusTooManyRequests
	})
	told := time.Now()
	envoytest.Eventually(t, "one endpoint closed", closed(1))
	seen := a.Count()
	for range 50 {
		if r := s.post(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Fatalf("status %d beside an endpoint that has room: %s", r.status, r.body)
		}
	}
	if n := a.Count() - seen; n != 0 && time.Since(told) < 7*time.Second {
		t.Errorf("%d of 50 requests went where they were told to stay away", n)
	}

	b.Handle(away("9000"))
	envoytest.Eventually(t, "both endpoints closed", func() bool {
		a.Handle(away("9000"))
		_ = s.post(t, chatPath, `{"max_tokens":4}`)
		return closed(2)()
	})
	seenA, seenB := a.Count(), b.Count()
	refused := s.post(t, chatPath, `{"max_tokens":4}`)
	if a.Count() != seenA || b.Count() != seenB {
		t.Error("a request went where everybody said to stay away")
	}
	expectRefusal(t, refused, fleet.DialectOpenAI)
	if !strings.Contains(refused.body, "busy") {
		t.Errorf("not a refusal of Fairlead's own: %s", refused.body)
	}
	// The first opens first, when its eight seconds are over, and a little sooner,
	// so that who waited finds it open.
	const sooner = 500 * time.Millisecond
	if ms, left := whole(refused.header, "Retry-After-Ms"), 8*time.Second-time.Since(told)-sooner; ms < left.Milliseconds() {
		t.Errorf("retry-after-ms %d, though both are closed for at least %v more", ms, left)
	}

	a.Handle(nil)
	b.Handle(nil)
	envoytest.Eventually(t, "both open again", closed(0))
	if r := s.post(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
		t.Errorf("status %d after the wait: %s", r.status, r.body)
	}
}

// TestTooMuchOutputIsRefusedInBothDialects: more than the model gives is a 400
// that says what fits, unless the route passes it on.
func TestTooMuchOutputIsRefusedInBothDialects(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages, pass, chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, maxOutput: 4096 }
  - { name: pass, match: { prefix: /pass/ }, dialect: openai, pool: a, maxOutput: 4096, oversize: pass }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, maxOutput: 4096 }
`, m.addr()))
	for path, dialect := range map[string]fleet.Dialect{chatPath: fleet.DialectOpenAI, "/v1/messages": fleet.DialectAnthropic} {
		before := m.count.Load()
		r := s.post(t, path, `{"max_tokens":4097}`)
		expectOwnError(t, r, http.StatusBadRequest, dialect, "4096")
		if !strings.Contains(r.body, "4097") || m.count.Load() != before {
			t.Errorf("%s: %s, %d requests reached the server", path, r.body, m.count.Load()-before)
		}
		for _, name := range []string{"Retry-After", "Retry-After-Ms"} {
			if v := r.header.Values(name); len(v) > 0 {
				t.Errorf("%s: a 400 with %s: %q", path, name, v)
			}
		}
		expectHeader(t, r, "X-Fairlead-Decision", "*")
		expectHeader(t, r, "X-Request-Id", "*")
		for _, body := range []string{`{"max_tokens":4096}`, `{}`, `{"max_tokens":"junk"}`} {
			if r := s.post(t, path, body); r.status != http.StatusOK {
				t.Errorf("%s, %s: status %d: %s", path, body, r.status, r.body)
			}
		}
		// n answers of 4,096 each are within the model's limit.
		if r := s.post(t, path, `{"max_tokens":4096,"n":4}`); r.status != http.StatusOK {
			t.Errorf("%s, four answers: status %d: %s", path, r.status, r.body)
		}
	}
	if r := s.post(t, "/pass"+chatPath, `{"max_tokens":32000}`); r.status != http.StatusOK {
		t.Errorf("on a route that passes: status %d: %s", r.status, r.body)
	}
}

// TestNoRoomInTheKVCacheIsRefusedInBothDialects: more than any server's KV cache
// holds now is a 429 that says what fits, where the route asks for that.
func TestNoRoomInTheKVCacheIsRefusedInBothDialects(t *testing.T) {
	var running atomic.Int64
	m := newModelServer(t)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			_, _ = io.WriteString(w, `{}`)
			return
		}
		// 1,000 blocks of 16 tokens, nine tenths of them in use.
		_, _ = fmt.Fprintf(w, "vllm:num_requests_running{model_name=\"m\"} 3\nvllm:num_requests_waiting{model_name=\"m\"} 0\n"+
			"vllm:kv_cache_usage_perc{model_name=\"m\"} 0.9\nvllm:generation_tokens_total{model_name=\"m\"} %d\n"+
			"vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1\n", running.Add(7))
	}))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages, pass, chat ] }
pools:
  - { name: a, endpoints: [ { name: gpu, address: %q } ], telemetry: { source: scrape } }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, noRoom: refuse }
  - { name: pass, match: { prefix: /pass/ }, dialect: openai, pool: a }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, noRoom: refuse }
`, m.addr()))
	envoytest.Eventually(t, "telemetry", func() bool { return s.endpoint(t, "gpu").Known })
	for path, dialect := range map[string]fleet.Dialect{chatPath: fleet.DialectOpenAI, "/v1/messages": fleet.DialectAnthropic} {
		r := s.post(t, path, `{"max_tokens":3000}`)
		expectRefusal(t, r, dialect)
		if !strings.Contains(r.body, "3000") || !strings.Contains(r.body, "max_tokens of 1") {
			t.Errorf("%s: %s; want that about 1,600 fit", path, r.body)
		}
		expectOwnError(t, s.post(t, path, `{"max_tokens":17000}`), http.StatusBadRequest, dialect, "the whole KV cache")
		if r := s.post(t, path, `{"max_tokens":300}`); r.status != http.StatusOK {
			t.Errorf("%s, what fits: status %d: %s", path, r.status, r.body)
		}
	}
	if r := s.post(t, "/pass"+chatPath, `{"max_tokens":17000}`); r.status != http.StatusOK {
		t.Errorf("on a route that passes: status %d: %s", r.status, r.body)
	}
}

// TestBodiesOverTheRoutesLimitAreRefusedInBothDialects, told by their length or
// while they come.
func TestBodiesOverTheRoutesLimitAreRefusedInBothDialects(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages, chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, maxBody: 64KiB, retryBody: 64KiB }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, maxBody: 2MiB, retryBody: 1MiB }
`, m.addr()))
	for path, row := range map[string]struct {
		dialect fleet.Dialect
		limit   int
	}{chatPath: {fleet.DialectOpenAI, 2 << 20}, "/v1/messages": {fleet.DialectAnthropic, 64 << 10}} {
		for _, chunked := range []bool{false, true} {
			fits := padded(`{"max_tokens":4,"prompt":"`, row.limit)
			if a, err := ask(t.Context(), s.with, "http://"+s.listen+path, fits, chunked); err != nil || a.status != http.StatusOK {
				t.Errorf("%s, chunked %v: %d bytes: status %d, %v: %s", path, chunked, row.limit, a.status, err, a.body)
			}
			a, err := ask(t.Context(), client, "http://"+s.listen+path, padded(`{"max_tokens":4,"prompt":"`, row.limit+1), chunked)
			if err != nil {
				t.Errorf("%s, chunked %v: %v", path, chunked, err)
				continue
			}
			expectOwnError(t, a, http.StatusRequestEntityTooLarge, row.dialect, "larger")
			expectHeader(t, a, "X-Request-Id", "*")
		}
	}
	envoytest.Eventually(t, "in flight back at 0", func() bool { return s.inFlight() == 0 })
}

// TestBodiesOverTheRoutesLimitTakeNothing: whose length says that a 413 is certain
// gets it at once, also where the client's limit is used up, and takes nothing of it.
func TestBodiesOverTheRoutesLimitTakeNothing(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages, strict, chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, maxBody: 64KiB, retryBody: 64KiB }
  - { name: strict, match: { prefix: /strict/ }, dialect: openai, pool: a, maxBody: 64KiB, retryBody: 64KiB, unread: refuse, maxOutput: 4096 }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, maxBody: 64KiB, retryBody: 64KiB }
limits:
  - { name: daily, tokens: 3000/day }
`, m.addr()))
	const limit = 64 << 10
	post := func(path, body string) answer {
		t.Helper()
		return s.post(t, path, body, "authorization", "Bearer "+path)
	}
	large := 0
	for path, dialect := range map[string]fleet.Dialect{chatPath: fleet.DialectOpenAI, "/v1/messages": fleet.DialectAnthropic, "/strict" + chatPath: fleet.DialectOpenAI} {
		tooLarge := func(when string, size int) {
			t.Helper()
			large++
			a := post(path, padded(`{"max_tokens":5000,"prompt":"`, size))
			expectOwnError(t, a, http.StatusRequestEntityTooLarge, dialect, "larger")
			expectHeader(t, a, "X-Fairlead-Decision", "*")
			if got := m.lastArrived().bodyLen; a.header.Get("Retry-After-Ms") != "" || got > limit {
				t.Errorf("%s, %s: headers %v; %d bytes reached the server", path, when, a.header, got)
			}
		}
		const small = `{"max_tokens":2000}`
		tooLarge("unused", limit+1)
		tooLarge("more than anybody reads", 1_000_001)
		a := post(path, small)
		if left := whole(a.header, "x-ratelimit-remaining-tokens"); a.status != http.StatusOK || left != 3000-2000-int64(len(small))/4 {
			t.Errorf("%s: status %d, %d tokens left after a body over the limit and one of 2,000 tokens", path, a.status, left)
		}
		tooLarge("used", limit+1)
		if a := post(path, small); a.status != http.StatusTooManyRequests {
			t.Errorf("%s: status %d where 2,000 tokens more than the limit are asked for", path, a.status)
		}
	}
	if n := metric(s.metricsPage(t), "fairlead_requests_total", `reason="body_too_large"`); n < float64(large) {
		t.Errorf("%v requests counted as too large, want %d", n, large)
	}
}

// TestNoLengthIsAWayAroundALimit: what says that it is over the route's limit gets its
// 413 whatever comes behind it, an upgrade too.
func TestNoLengthIsAWayAroundALimit(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, maxBody: 64KiB, retryBody: 64KiB }
`, m.addr()))
	const upgrade = "connection: upgrade\r\nupgrade: websocket\r\n"
	for _, row := range []struct{ name, method, headers string }{
		{"short body", "POST", "content-length: 1000000\r\n"},
		{"long number", "POST", "content-length: 999999999999999999\r\n"},
		{"upgrade", "GET", upgrade + "content-length: 1000000\r\n"},
		{"upgrade by POST", "POST", upgrade + "content-length: 70000\r\n"},
	} {
		a, err := spoken(s.listen, row.method+" "+chatPath+" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"+row.headers+"\r\n{}")
		if err != nil || a.status != http.StatusRequestEntityTooLarge {
			t.Errorf("%s: status %d, %v: %s", row.name, a.status, err, a.body)
		}
	}
	if n := m.count.Load(); n != 0 {
		t.Errorf("%d requests reached the server", n)
	}
}

// spoken sends a request as it stands and returns the answer to it.
func spoken(address, request string) (answer, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return answer{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, request); err != nil {
		return answer{}, err
	}
	return answerOn(c)
}

// TestRecommendedConcurrencyIsTold: on a refusal, and as a hint to a client that
// is near its limit.
func TestRecommendedConcurrencyIsTold(t *testing.T) {
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(holding(release))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: clients, concurrency: 10 }
`, m.addr()))
	var parts sync.WaitGroup
	var mu sync.Mutex
	hints := map[string]int{}
	for i := range 10 {
		parts.Go(func() {
			a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":4}`, false, "authorization", "Bearer one")
			if err != nil || a.status != http.StatusOK {
				t.Errorf("status %d, %v", a.status, err)
			}
			mu.Lock()
			defer mu.Unlock()
			hints[a.header.Get("X-Recommended-Concurrency")]++
		})
		envoytest.Eventually(t, "one more inside", func() bool { return int(m.inside.Load()) == i+1 })
	}
	r := s.post(t, chatPath, `{"max_tokens":4}`, "authorization", "Bearer one")
	expectRefusal(t, r, fleet.DialectOpenAI)
	expectHeader(t, r, "X-Recommended-Concurrency", "10")
	if !strings.Contains(r.body, `"recommended_concurrency":10`) || !strings.Contains(r.body, "You have 10 requests in flight") {
		t.Errorf("body %s", r.body)
	}
	// Another client has room of its own.
	parts.Go(func() {
		a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":4}`, false, "authorization", "Bearer two")
		if err != nil || a.status != http.StatusOK {
			t.Errorf("another client: status %d, %v", a.status, err)
		}
	})
	envoytest.Eventually(t, "the other client inside", func() bool { return m.inside.Load() == 11 })
	close(release)
	parts.Wait()
	// More than four fifths of ten: the ninth and the tenth.
	if hints["10"] != 2 || hints[""] != 8 {
		t.Errorf("x-recommended-concurrency of admitted requests: %v; want 10 on two of ten", hints)
	}
}

// TestRecommendedConcurrencyIsTheShareOfAFullPool: a client that alone has all places is
// told half of them once another wants as many.
func TestRecommendedConcurrencyIsTheShareOfAFullPool(t *testing.T) {
	const places = 20
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(holding(release))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ], maxInFlight: %d }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, m.addr(), places))
	var parts sync.WaitGroup
	for i := range places {
		parts.Go(func() {
			a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":4}`, false, "authorization", "Bearer one")
			if err != nil || a.status != http.StatusOK {
				t.Errorf("status %d, %v", a.status, err)
			}
		})
		envoytest.Eventually(t, "one more inside", func() bool { return int(m.inside.Load()) == i+1 })
	}
	recommended := func(client string) int64 {
		r := s.post(t, chatPath, `{"max_tokens":4}`, "authorization", "Bearer "+client)
		expectRefusal(t, r, fleet.DialectOpenAI)
		return whole(r.header, "X-Recommended-Concurrency")
	}
	for range places {
		recommended("two")
	}
	for _, client := range []string{"one", "two"} {
		envoytest.Eventually(t, "half of the pool told to "+client, func() bool { return recommended(client) == places/2 })
	}
	close(release)
	parts.Wait()
}

// TestUrgentClientsKeepTheirShare: of a pool that is full, an interactive client
// has more than one whose requests are batch, and neither starves; each comes
// back when it is told to.
func TestUrgentClientsKeepTheirShare(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 14 seconds")
	}
	m := newModelServer(t)
	var now, sum [2]atomic.Int64 // in flight: batch, interactive; summed over samples
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who := 0
		if r.Header.Get("authorization") == "Bearer urgent" {
			who = 1
		}
		now[who].Add(1)
		defer now[who].Add(-1)
		select {
		case <-time.After(time.Second):
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, `{}`)
	}))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ], maxInFlight: 20 }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, m.addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 14*time.Second)
	defer cancel()
	var parts sync.WaitGroup
	var answers [2]struct{ ok, later, other atomic.Int64 }
	for worker := range 60 {
		who, token, class := 0, "Bearer batch", "batch"
		if worker%2 == 1 {
			who, token, class = 1, "Bearer urgent", "interactive"
		}
		parts.Go(func() {
			for ctx.Err() == nil {
				a, err := ask(context.WithoutCancel(ctx), s.with, "http://"+s.listen+chatPath, `{"max_tokens":40}`, false, "authorization", token, "x-request-class", class)
				switch {
				case err == nil && a.status == http.StatusOK:
					answers[who].ok.Add(1)
				case err == nil && a.status == http.StatusTooManyRequests:
					answers[who].later.Add(1)
					pause(ctx, time.Duration(whole(a.header, "Retry-After-Ms"))*time.Millisecond)
				default:
					answers[who].other.Add(1)
				}
			}
		})
	}
	samples := 0
	// Both begin with as many as they can get; running requests are not ended for
	// a share, so it takes a few of them until the shares hold.
	for pause(ctx, 5*time.Second); ctx.Err() == nil; pause(ctx, 20*time.Millisecond) {
		samples++
		for who := range now {
			sum[who].Add(now[who].Load())
		}
	}
	parts.Wait()
	mean := func(who int) float64 { return float64(sum[who].Load()) / float64(max(1, samples)) }
	t.Logf("in flight on average: urgent %.1f, batch %.1f; served: urgent %d, batch %d; told to wait: urgent %d, batch %d",
		mean(1), mean(0), answers[1].ok.Load(), answers[0].ok.Load(), answers[1].later.Load(), answers[0].later.Load())
	if answers[0].other.Load()+answers[1].other.Load() > 0 {
		t.Errorf("%d and %d answers were neither 200 nor 429", answers[0].other.Load(), answers[1].other.Load())
	}
	if m.peak.Load() > 20 {
		t.Errorf("the server had %d at a time; its limit is 20", m.peak.Load())
	}
	if mean(1) <= mean(0) || answers[0].ok.Load() == 0 {
		t.Errorf("urgent has %.1f in flight and batch %.1f; batch was served %d times", mean(1), mean(0), answers[0].ok.Load())
	}
}

// TestBurstLevelsShowInMetrics holds requests of three levels.
func TestBurstLevelsShowInMetrics(t *testing.T) {
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(holding(release))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ], maxInFlight: 10 }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, fairShare: false }
`, m.addr()))
	var parts sync.WaitGroup
	held := map[int]int{5: 4, 100: 3, 5000: 3} // max_tokens: how many
	for tokens, n := range held {
		for range n {
			parts.Go(func() {
				if a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, fmt.Sprintf(`{"max_tokens":%d}`, tokens), false); err != nil || a.status != http.StatusOK {
					t.Errorf("status %d, %v: %s", a.status, err, a.body)
				}
			})
		}
	}
	envoytest.Eventually(t, "all ten inside", func() bool { return m.inside.Load() == 10 })
	level := func(page, family string, tokens int) float64 {
		return metric(page, family, fmt.Sprintf("level=\"%d\"", fleet.LevelOf(fleet.Tokens(tokens))), `pool="a"`)
	}
	var page string
	envoytest.Eventually(t, "the levels in the metrics", func() bool {
		page = s.metricsPage(t)
		for tokens, n := range held {
			if level(page, "fairlead_level_in_flight", tokens) != float64(n) {
				return false
			}
		}
		return true
	})
	for i := range fleet.BurstLevels {
		for _, family := range []string{"fairlead_level_queue_seconds", "fairlead_level_backlogged"} {
			if !strings.Contains(page, fmt.Sprintf("%s{level=\"%d\",pool=\"a\"}", family, i)) {
				t.Errorf("no %s of level %d", family, i)
			}
		}
	}
	if n := metric(page, "fairlead_pool_limit", `pool="a"`); n <= 0 || n > 10 {
		t.Errorf("fairlead_pool_limit %v", n)
	}
	close(release)
	parts.Wait()
	envoytest.Eventually(t, "levels back at 0", func() bool { return metric(s.metricsPage(t), "fairlead_level_in_flight") == 0 })
	page = s.metricsPage(t)
	for tokens, n := range held {
		got := metric(page, "fairlead_level_requests_total", fmt.Sprintf("level=\"%d\"", fleet.LevelOf(fleet.Tokens(tokens))), `result="admitted"`)
		if got != float64(n) {
			t.Errorf("fairlead_level_requests_total of %d tokens: %v; want %d", tokens, got, n)
		}
	}
}

// TestWhatDoesNotGenerateIsNeverLimited: lists of models, preflights and checks
// pass beside a limit that is used up.
func TestWhatDoesNotGenerateIsNeverLimited(t *testing.T) {
	const route = `
  - { name: chat, match: { prefix: / }, dialect: openai, pool: a }`
	idle := []string{"OPTIONS " + chatPath, "HEAD " + chatPath, "GET " + chatPath, "DELETE " + chatPath, "GET /v1/models", "HEAD /healthz", "GET /healthz", "GET /"}
	others := []string{"POST /v1/files", "PUT /v1/files", "POST /v1/embeddings", "POST /v1/audio/transcriptions"}
	generate := []string{"POST /v1/chat/completions/batch", "PUT /generate", "POST /vertex_generate", "POST /", "POST /v1/responses/", "PATCH /v1/messages", "POST /completion"}
	limitedAre(t, route, slices.Concat(idle, others), generate)
	t.Run("all", func(t *testing.T) {
		limitedAre(t, strings.Replace(route, "pool: a", "pool: a, generates: all", 1), idle, slices.Concat(others, generate))
	})
	t.Run("by model", func(t *testing.T) {
		of := func(model string) string {
			return fmt.Sprintf(`
  - { name: %s, match: { prefix: /, model: %s }, dialect: openai, pool: a }`, model, model)
		}
		limitedAre(t, of("m")+of("n"), slices.Concat(idle, others), generate)
	})
}

// limitedAre has requests go to routes whose client has used up its limit.
func limitedAre(t *testing.T, routes string, passed, limited []string) {
	t.Helper()
	m := newModelServer(t)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{}`) }))
	names := "chat"
	if !strings.Contains(routes, names) {
		names = "m, n"
	}
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ %s ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:%s
limits:
  - { name: daily, requests: 1/day }
`, names, m.addr(), routes))
	const body = `{"max_tokens":4,"model":"m"}`
	if r := s.post(t, chatPath, body); r.status != http.StatusOK {
		t.Fatalf("the day's only request: status %d: %s", r.status, r.body)
	}
	refused := s.post(t, chatPath, body)
	expectRefusal(t, refused, fleet.DialectOpenAI)
	// Nobody can wait for tomorrow.
	expectHeader(t, refused, "X-Should-Retry", "false")
	expectHeader(t, refused, "X-Ratelimit-Remaining", "0")
	for i, row := range slices.Concat(passed, limited) {
		method, path, _ := strings.Cut(row, " ")
		var sent io.Reader
		if method != http.MethodOptions && method != http.MethodHead && method != http.MethodGet {
			sent = strings.NewReader(body)
		}
		request, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.listen+path, sent)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("content-type", "application/json")
		response, err := s.with.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		want := http.StatusOK
		if i >= len(passed) {
			want = http.StatusTooManyRequests
		}
		if response.StatusCode != want {
			t.Errorf("%s: status %d; want %d", row, response.StatusCode, want)
		}
	}
}

// TestAnthropicAnswersHaveOneID: served, refused and without ext_proc; the one of a
// server stays.
func TestAnthropicAnswersHaveOneID(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, maxOutput: 4096 }
`, m.addr()))
	check := func(what string, status, tokens int, want string) {
		t.Helper()
		r := s.postOnce(t, "/v1/messages", fmt.Sprintf(`{"max_tokens":%d}`, tokens))
		ids := r.header.Values("Request-Id")
		if want == "" {
			want = r.header.Get("X-Request-Id")
		}
		if r.status != status || len(ids) != 1 || want == "" || ids[0] != want {
			t.Errorf("%s: status %d, request-id %q, x-request-id %q; want %d and %q once", what, r.status, ids, r.header.Values("X-Request-Id"), status, want)
		}
	}
	check("served", http.StatusOK, 4, "")
	check("refused", http.StatusBadRequest, 5000, "")
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("request-id", "req_of_the_server")
		_, _ = io.WriteString(w, `{}`)
	}))
	check("with the server's own", http.StatusOK, 4, "req_of_the_server")
	m.answerWith(nil)
	s.process.kill()
	check("without Fairlead", http.StatusOK, 4, "")
}

// TestRoutesChooseWhatBecomesOfThemWithoutFairlead: with ext_proc dead nobody
// counts; a route that fails closed answers 503 in its dialect, others serve.
func TestRoutesChooseWhatBecomesOfThemWithoutFairlead(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages, closed, chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, onFailure: closed }
  - { name: closed, match: { prefix: /closed/ }, dialect: openai, pool: a, onFailure: closed }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: clients, requests: 1000/min, concurrency: 10 }
`, m.addr()))
	paths := map[string]fleet.Dialect{"/closed" + chatPath: fleet.DialectOpenAI, "/v1/messages": fleet.DialectAnthropic}
	for path := range paths {
		if r := s.post(t, path, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Errorf("alive, %s: status %d: %s", path, r.status, r.body)
		}
	}
	s.process.kill()
	before := m.count.Load()
	for path, dialect := range paths {
		r := s.postOnce(t, path, `{"max_tokens":4}`)
		expectError(t, r, http.StatusServiceUnavailable, dialect, "Limits")
		expectHeader(t, r, "X-Route-Strategy", "legacy")
		if whole(r.header, "Retry-After-Ms") < 1 || whole(r.header, "Retry-After") != (whole(r.header, "Retry-After-Ms")+999)/1000 {
			t.Errorf("%s: retry-after-ms %q, retry-after %q", path, r.header.Get("Retry-After-Ms"), r.header.Get("Retry-After"))
		}
	}
	if n := m.count.Load() - before; n != 0 {
		t.Errorf("%d requests of closed routes reached the server", n)
	}
	for range 20 {
		if r := s.postOnce(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
			t.Fatalf("dead, open: status %d: %s", r.status, r.body)
		}
	}
	s.serve(t)
	envoytest.Eventually(t, "closed routes serve again", func() bool { return s.postOnce(t, "/v1/messages", `{"max_tokens":4}`).status == http.StatusOK })
}

// TestWhoIsPastItsConcurrencyIsToldOfItsWindow where that is used up too: it would
// find no place for it when the one that runs has ended.
func TestWhoIsPastItsConcurrencyIsToldOfItsWindow(t *testing.T) {
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush() // its caller knows that it was let in
		if r.Header.Get("X-Waits") != "" {
			<-release
		}
	}))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: few, requests: 2/day, concurrency: 1 }
`, m.addr()))
	key := []string{"authorization", "Bearer one"}
	if a := s.post(t, chatPath, `{"max_tokens":4}`, key...); a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	var running *http.Response
	envoytest.Eventually(t, "the end of the first to be known", func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.listen+chatPath, strings.NewReader(`{"max_tokens":4}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header = http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer one"}, "X-Waits": {"1"}}
		if running, err = s.with.Do(request); err != nil {
			t.Fatal(err)
		}
		if running.StatusCode != http.StatusTooManyRequests {
			return true
		}
		_ = running.Body.Close()
		return false
	})
	defer running.Body.Close()
	defer close(release)
	if left := whole(running.Header, "X-Ratelimit-Remaining"); running.StatusCode != http.StatusOK || left != 0 {
		t.Fatalf("status %d, %d left", running.StatusCode, left)
	}
	a := s.post(t, chatPath, `{"max_tokens":4}`, key...)
	expectOwnError(t, a, http.StatusTooManyRequests, fleet.DialectOpenAI, "Your limit of 2 requests per day is used up; the limit is reset in ")
	expectHeader(t, a, "X-Ratelimit-Remaining", "0")
	expectHeader(t, a, "X-Should-Retry", "false")
	expectHeader(t, a, "Retry-After-Ms", "60000")
}
