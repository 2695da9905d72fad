package integration

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// Envoy never leaves a group whose cluster cannot take the request: no healthy
// host (UH) and a full breaker (UO) are final. Hence the floor endpoints, and
// breakers so high that Fairlead's own shedding comes first.
func TestFactUnhealthyOrFullClustersDoNotFailOver(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 3)
	held := ups[1]
	held.Handle(envoytest.Hang())
	e := startFacts(t, facts{
		routes: []string{
			chainRoute(prefix("/empty"), "", "", group("empty"), group("b")),
			chainRoute(prefix("/unhealthy"), "", "", group("unhealthy"), group("b")),
			chainRoute(prefix("/full"), "", "", group("full"), group("b")),
		},
		clusters: []string{
			pool("empty", ""),
			pool("unhealthy", "", host(ups[0].Addr(), "UNHEALTHY")),
			pool("full", `circuit_breakers: {thresholds: [{max_requests: 1, max_retries: 1000}]},`, hostsOf(held)...),
			pool("b", "", hostsOf(ups[2])...),
		},
	})
	for _, path := range []string{"/empty", "/unhealthy"} {
		if got := e.get(path); got.status != 503 {
			t.Errorf("%s: status %d, want Envoy's own 503", path, got.status)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if r, err := e.open(ctx, http.MethodGet, "/full", nil); err == nil {
			r.Body.Close()
		}
	}()
	held.WaitRequests(1)
	if got := e.get("/full"); got.status != 503 || got.header.Get("x-envoy-overloaded") != "true" {
		t.Errorf("full: status %d, x-envoy-overloaded %q, want 503 and true", got.status, got.header.Get("x-envoy-overloaded"))
	}
	cancel()
	<-done
	expectCounts(t, ups, 0, 1, 0)
}

// The floor endpoint turns a pool without a live endpoint into a refused
// connection, which is retried like any other, so that requests reach the
// split's other pool or the fallback. The outlier detection and the health-check
// exemption are part of it: without them the floor would be ejected too.
func TestFactFloorEndpointMakesADeadPoolFailOver(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 2)
	refused := host(envoytest.FreeAddr(t), "")
	const outlier = `outlier_detection: {split_external_local_origin_errors: true,
		consecutive_gateway_failure: 3, enforcing_consecutive_gateway_failure: 100, max_ejection_percent: 100,
		consecutive_5xx: 0, enforcing_consecutive_5xx: 0, enforcing_consecutive_local_origin_failure: 0,
		enforcing_success_rate: 0, enforcing_local_origin_success_rate: 0, interval: 0.1s},`
	const check = `health_checks: [{timeout: 1s, interval: 0.1s, no_traffic_interval: 0.1s, unhealthy_interval: 0.1s,
		unhealthy_threshold: 1, healthy_threshold: 1, http_health_check: {path: /health}}],`
	names := []string{"empty", "unhealthy", "outlier", "checked", "failing"}
	var routes []string
	for _, n := range names {
		routes = append(routes, chainRoute(prefix("/"+n), "", "", group(n), group("b")))
	}
	e := startFacts(t, facts{
		routes: routes,
		clusters: []string{
			poolWithFloor("empty", "", floorEndpoint),
			poolWithFloor("unhealthy", "", floorEndpoint, host(ups[0].Addr(), "UNHEALTHY")),
			poolWithFloor("outlier", outlier, floorEndpoint),
			poolWithFloor("checked", check, floorEndpoint, refused),
			poolWithFloor("failing", outlier, floorEndpoint, hostsOf(ups[0])...),
			pool("b", "", hostsOf(ups[1])...),
		},
	})
	ups[0].Handle(envoytest.Status(503, "busy"))
	e.WaitStat("cluster.checked.health_check.failure", func(n int64) bool { return n >= 1 })
	for _, name := range names {
		for i := range 20 {
			if got := e.get("/" + name); got.status != 200 || got.body != "1" {
				t.Fatalf("%s, request %d: status %d %q, want 200 from the next group", name, i+1, got.status, got.body)
			}
		}
	}
	// The server that answered 503 was ejected after three; the floor carried on.
	if n := ups[0].Count(); n < 3 || n > 10 {
		t.Errorf("the failing host got %d of 20 requests, want it ejected after 3", n)
	}
}

// The floor must not take traffic while the pool lives, however few of its hosts
// are healthy: that is what the overprovisioning factor is for.
func TestFactFloorEndpointGetsNothingWhileOneHostIsHealthy(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 2)
	var hosts []string
	for range 9 {
		hosts = append(hosts, host(envoytest.FreeAddr(t), "UNHEALTHY"))
	}
	e := startFacts(t, facts{
		routes:   []string{chainRoute(prefix("/"), "", "", group("a"), group("b"))},
		clusters: []string{poolWithFloor("a", "", floorEndpoint, append(hosts, hostsOf(ups[0])...)...), pool("b", "", hostsOf(ups[1])...)},
	})
	for range 60 {
		e.get("/")
	}
	expectCounts(t, ups, 60, 0)
	if n, _ := e.Stat("cluster.a.upstream_cx_connect_fail"); n != 0 {
		t.Errorf("%d connections to the floor or to unhealthy hosts", n)
	}
}

// A model server that dies while it works has already received the request, so
// reset-before-request would give up on exactly the requests that need help.
func TestFactResetRetriesAServerThatDiedWhileWorking(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 2)
	ups[0].Handle(envoytest.ResetBeforeAnswer())
	e := startFacts(t, facts{
		routes: []string{
			chainRoute(prefix("/before"), `retry_on: "reset-before-request,connect-failure,refused-stream,retriable-status-codes",`, "", group("a"), group("b")),
			chainRoute(prefix("/reset"), "", "", group("a"), group("b")),
		},
		clusters: []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...)},
	})
	if got := e.postJSON("/before", `{"n":1}`); got.status != 503 {
		t.Errorf("reset-before-request: status %d, want 503", got.status)
	}
	expectCounts(t, ups, 1, 0)
	if got := e.postJSON("/reset", `{"n":1}`); got.status != 200 || got.body != "1" {
		t.Errorf("reset: status %d %q, want 200 from the next group", got.status, got.body)
	}
	if got := ups[1].Last(); string(got.Body) != `{"n":1}` {
		t.Errorf("the retry carried %q", got.Body)
	}
}

// The default of 3 concurrent retries drops failovers just when a pool breaks for
// everybody at once; it counts on the first attempt's cluster.
func TestFactMaxRetriesLimitsConcurrentFailovers(t *testing.T) {
	t.Parallel()
	const parallel = 20
	for _, c := range []struct {
		name, breakers   string
		passed, rejected int
	}{
		{"default", `circuit_breakers: {thresholds: [{max_requests: 65536}]},`, 3, parallel - 3},
		{"high", highBreakers, parallel, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			ups := upstreams(t, 2)
			ups[0].Handle(envoytest.Status(503, "busy"))
			release := make(chan struct{})
			ups[1].Handle(envoytest.Gate(release, envoytest.Status(200, "1")))
			e := startFacts(t, facts{
				routes:   []string{chainRoute(prefix("/"), "", "", group("a"), group("b"))},
				clusters: []string{pool("a", c.breakers, hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...)},
			})
			statuses := make(chan int, parallel)
			for range parallel {
				go func() {
					got, err := e.try(http.MethodGet, "/", nil)
					if err != nil {
						got.status = -1
					}
					statuses <- got.status
				}()
			}
			seen := make(map[int]int)
			for range c.rejected {
				seen[<-statuses]++
			}
			ups[1].WaitRequests(c.passed)
			close(release)
			for range c.passed {
				seen[<-statuses]++
			}
			if seen[200] != c.passed || seen[503] != c.rejected {
				t.Errorf("statuses %v, want %d times 200 and %d times 503", seen, c.passed, c.rejected)
			}
			if n, _ := e.Stat("cluster.a.upstream_rq_retry_overflow"); n != int64(c.rejected) {
				t.Errorf("upstream_rq_retry_overflow = %d, want %d", n, c.rejected)
			}
		})
	}
}

// A per-try limit is a limit on response headers. It cannot cut a running stream,
// so it may serve as first-token limit where headers wait for the first token; it
// must not be set where a whole answer is computed before its headers.
func TestFactPerTryTimeoutCoversHeadersOnly(t *testing.T) {
	t.Parallel()
	const limit = time.Second
	ups := upstreams(t, 2)
	e := startFacts(t, facts{
		routes:   []string{chainRoute(prefix("/"), `per_try_timeout: 1s,`, "", group("a"), group("b"))},
		clusters: []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...)},
	})
	t.Run("silence after headers is not cut", func(t *testing.T) {
		events := make(chan string)
		ups[0].Handle(envoytest.SSE(events))
		response, err := e.open(t.Context(), http.MethodGet, "/", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		timer := time.AfterFunc(limit*3/2, func() { // longer than the limit: this is the subject
			events <- "data: late\n\n"
			close(events)
		})
		defer timer.Stop()
		body, err := io.ReadAll(response.Body)
		if err != nil || string(body) != "data: late\n\n" {
			t.Errorf("body %q, %v", body, err)
		}
		expectCounts(t, ups, 1, 0)
	})
	t.Run("silence before headers moves on", func(t *testing.T) {
		ups[0].Handle(envoytest.Hang())
		if got := e.get("/"); got.status != 200 || got.body != "1" {
			t.Errorf("status %d %q, want 200 from the next group", got.status, got.body)
		}
	})
	// ext_proc may set the limit per request by header; a client may not.
	t.Run("the header of a client is ignored", func(t *testing.T) {
		release := make(chan struct{})
		ups[0].Handle(envoytest.Gate(release, envoytest.Status(200, "0")))
		timer := time.AfterFunc(limit/4, func() { close(release) })
		defer timer.Stop()
		if got := e.get("/", "x-envoy-upstream-rq-per-try-timeout-ms", "1"); got.body != "0" {
			t.Errorf("served by %q: the client's limit was obeyed", got.body)
		}
	})
}

// A retry after the upstream's 503 needs the request's body: Envoy keeps as much
// as the route's request_body_buffer_limit says (1 MiB without it).
func TestFactRouteBodyLimitDecidesWhatCanBeRetried(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 2)
	ups[0].Handle(envoytest.Status(503, "busy"))
	e := startFacts(t, facts{
		routes: []string{
			chainRoute(prefix("/small"), "", "", group("a"), group("b")),
			chainRoute(prefix("/large"), "", `request_body_buffer_limit: 8388608,`, group("a"), group("b")),
		},
		clusters: []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...)},
	})
	for _, c := range []struct {
		path   string
		size   int
		status int
	}{
		{"/small", 2 << 20, 503},
		{"/large", 2 << 20, 200},
		{"/large", 9 << 20, 503},
	} {
		got := e.send(http.MethodPost, c.path, strings.NewReader(string(zeros(c.size))))
		if got.status != c.status {
			t.Errorf("%s with %d bytes: status %d, want %d", c.path, c.size, got.status, c.status)
		}
		if last := ups[1].Requests(); c.status == 200 && last[len(last)-1].BodyLen != int64(c.size) {
			t.Errorf("the retry carried %d bytes of %d", last[len(last)-1].BodyLen, c.size)
		}
	}
}

// A 429 of an upstream gets a retry hint where it has none; what the upstream
// itself says is kept, since SDKs let retry-after-ms win over retry-after.
func TestFactRetryHintIsAddedToAnUpstreams429(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	e := startFacts(t, facts{
		routes: []string{`{match: {prefix: /}, route: {cluster: a, timeout: 0s}, response_headers_to_add: [{
			header: {key: retry-after-ms, value: "%CEL(response.code == 429 && !('retry-after' in response.headers) ? '1000' : '')%"},
			append_action: ADD_IF_ABSENT}]}`},
		clusters: []string{pool("a", "", hostsOf(up)...)},
	})
	for _, c := range []struct {
		status   int
		sent     []string
		ms, secs string
	}{
		{429, nil, "1000", ""},
		{429, []string{"retry-after", "30"}, "", "30"},
		{429, []string{"retry-after-ms", "7000"}, "7000", ""},
		{429, []string{"retry-after-ms", "7000", "retry-after", "7"}, "7000", "7"},
		{200, nil, "", ""},
		{503, nil, "", ""},
	} {
		up.Handle(envoytest.Status(c.status, "", c.sent...))
		got := e.get("/")
		ms, secs := fmt.Sprint(strings.Join(got.header.Values("retry-after-ms"), "+")), got.header.Get("retry-after")
		if got.status != c.status || ms != c.ms || secs != c.secs {
			t.Errorf("upstream %d %v: client saw %d, retry-after-ms %q, retry-after %q; want %q and %q",
				c.status, c.sent, got.status, ms, secs, c.ms, c.secs)
		}
	}
}
