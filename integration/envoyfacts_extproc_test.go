package integration

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// A handler that returns before it answered lets the request pass un-steered and
// nothing counts it, even where failures are not allowed: ours must never do that.
func TestFactStreamEndedBeforeAnAnswerContinuesUnsteered(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return nil }))
	e := startFacts(t, facts{
		filters:  []string{extProcFilter("failure_mode_allow: false,")},
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster()},
	})
	if got := e.get("/"); got.status != 200 || up.Count() != 1 {
		t.Errorf("status %d, %d upstream requests; want 200 and 1", got.status, up.Count())
	}
	if n, _ := e.Stat("http.in.ext_proc.failure_mode_allowed"); n != 0 {
		t.Errorf("failure_mode_allowed = %d: it is counted after all", n)
	}
	if len(ep.requests()) != 1 {
		t.Errorf("ext_proc got %d messages", len(ep.requests()))
	}
}

// A frozen server would cost every request the message timeout for ever; behind a
// gRPC health check of its cluster it costs nothing once the check has failed.
func TestFactFrozenExtProcCostsNothingBehindAHealthCheck(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	ep := newProcessor(t, steerTo(list(up)))
	e := startFacts(t, facts{
		filters: []string{extProcFilter("message_timeout: 0.5s,")},
		routes:  []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), grpcCluster("extproc", ep.socket, noPanic+`
			health_checks: [{timeout: 1s, interval: 0.2s, no_traffic_interval: 0.2s, unhealthy_interval: 0.2s,
				unhealthy_threshold: 1, healthy_threshold: 1, grpc_health_check: {}}],`)},
	})
	healthy := func(n int64) bool { return n == 1 }
	timeouts := func() int64 { n, _ := e.Stat("http.in.ext_proc.message_timeouts"); return n }
	e.WaitStat("cluster.extproc.membership_healthy", healthy)
	e.get("/")
	if len(ep.requests()) != 1 {
		t.Fatal("ext_proc was not asked while healthy")
	}

	ep.freeze.stop()
	if got := e.get("/"); got.status != 200 {
		t.Errorf("first request after the freeze: status %d, want 200 after the timeout", got.status)
	}
	e.WaitStat("cluster.extproc.membership_healthy", func(n int64) bool { return n == 0 })
	before := timeouts()
	for range 20 {
		if got := e.get("/"); got.status != 200 {
			t.Errorf("status %d", got.status)
		}
	}
	if after := timeouts(); after != before {
		t.Errorf("%d of 20 requests waited for the message timeout after the check had failed", after-before)
	}

	ep.freeze.thaw()
	e.WaitStat("cluster.extproc.membership_healthy", healthy)
	n := len(ep.requests())
	e.get("/")
	if got := len(ep.requests()); got != n+1 {
		t.Errorf("ext_proc was not asked again after it came back (%d, then %d messages)", n, got)
	}
}

// Answers show our ids through response_headers_to_add from metadata, local
// replies included; only a request without a route needs a local-reply mapper.
func TestFactMetadataHeadersAppearOnLocalReplies(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	const id = "d-77"
	ep := newProcessor(t, func(r *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
		m := metadata{"fairlead.log": map[string]any{"decision": id}}
		if requestHeader(r, ":path") != "/shed" {
			return reply(m)
		}
		return &extprocv3.ProcessingResponse{
			DynamicMetadata: structOf(m),
			Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
				Status: &typev3.HttpStatus{Code: typev3.StatusCode_TooManyRequests}, Body: []byte(`{}`),
			}},
		}
	})
	f := facts{
		filters:     []string{extProcFilter("")},
		routeConfig: `response_headers_to_add: [{header: {key: x-decision, value: "%DYNAMIC_METADATA(fairlead.log:decision)%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}],`,
		routes: []string{
			clusterRoute(prefix("/up"), "a"), clusterRoute(prefix("/shed"), "a"), clusterRoute(prefix("/none"), "empty"),
			`{match: {prefix: /direct}, direct_response: {status: 200, body: {inline_string: hello}}}`,
		},
		clusters: []string{pool("a", "", hostsOf(up)...), pool("empty", ""), ep.cluster()},
	}
	check := func(t *testing.T, e *factEnvoy, path string, status int, want string) {
		t.Helper()
		got := e.get(path)
		if ids := got.header.Values("x-decision"); got.status != status || len(ids) > 1 || got.header.Get("x-decision") != want {
			t.Errorf("%s: status %d, x-decision %q; want %d and %q", path, got.status, ids, status, want)
		}
	}
	t.Run("headers from metadata", func(t *testing.T) {
		e := startFacts(t, f)
		check(t, e, "/up", 200, id)
		check(t, e, "/shed", 429, id)
		check(t, e, "/none", 503, id)
		check(t, e, "/direct", 200, id)
		check(t, e, "/nowhere", 404, "")
	})
	t.Run("with a mapper for requests without a route", func(t *testing.T) {
		withMapper := f
		withMapper.hcm = `local_reply_config: {mappers: [{
			filter: {response_flag_filter: {flags: [NR]}},
			headers_to_add: [{header: {key: x-decision, value: "%DYNAMIC_METADATA(fairlead.log:decision)%"}, append_action: ADD_IF_ABSENT}]}]},`
		e := startFacts(t, withMapper)
		check(t, e, "/nowhere", 404, id)
		check(t, e, "/none", 503, id)
	})
}

// The strategy header says "legacy" when ext_proc is away and what ext_proc
// decided when it is there, and has one value either way.
func TestFactStrategyHeaderHasOneValueAliveAndDead(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, envoytest.Status(200, "", "x-route-strategy", "from the upstream"))
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse {
		return reply(metadata{"fairlead.log": map[string]any{"strategy": "dynamic"}})
	}))
	e := startFacts(t, facts{
		filters: []string{extProcFilter("")},
		routeConfig: `response_headers_to_add: [
			{header: {key: x-route-strategy, value: legacy}, append_action: OVERWRITE_IF_EXISTS_OR_ADD},
			{header: {key: x-route-strategy, value: "%DYNAMIC_METADATA(fairlead.log:strategy)%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}],`,
		routes:   []string{clusterRoute(prefix("/up"), "a"), clusterRoute(prefix("/none"), "empty")},
		clusters: []string{pool("a", "", hostsOf(up)...), pool("empty", ""), ep.cluster()},
	})
	check := func(want string) {
		t.Helper()
		for _, path := range []string{"/up", "/none"} {
			if got := e.get(path).header.Values("x-route-strategy"); len(got) != 1 || got[0] != want {
				t.Errorf("%s: x-route-strategy %q, want %q alone", path, got, want)
			}
		}
	}
	check("dynamic")
	ep.kill()
	check("legacy")
}

// Only with allow_envoy may ext_proc set Envoy's own per-request limits, which is
// how streaming requests get a first-token limit.
func TestFactExtProcSetsThePerTryLimitOfARequest(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 2)
	ups[0].Handle(envoytest.Hang())
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse {
		return withHeaders(reply(nil), "x-envoy-upstream-rq-per-try-timeout-ms", "200")
	}))
	e := startFacts(t, facts{
		filters:  []string{extProcFilter("mutation_rules: {allow_envoy: true},")},
		routes:   []string{chainRoute(prefix("/"), "", "", group("a"), group("b"))},
		clusters: []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...), ep.cluster()},
	})
	if got := e.send(http.MethodGet, "/", nil); got.status != 200 || got.body != "1" {
		t.Errorf("status %d %q, want 200 from the next group after 200 ms", got.status, got.body)
	}
}

// An attribute may be a path into the node: a downstream ext_proc filter gets the
// zone as a string of its own, empty where the bootstrap names none.
func TestFactExtProcSeesTheSidecarsZone(t *testing.T) {
	t.Parallel()
	for node, want := range map[string]string{
		"{id: facts, cluster: facts}":                         "",
		"{id: facts, cluster: facts, locality: {region: eu}}": "",
		"{id: facts, cluster: facts, locality: {zone: eu-1}}": "eu-1",
	} {
		ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
		f := facts{
			filters: []string{strings.Replace(extProcFilter(""), "request_attributes: [xds.cluster_name]",
				"request_attributes: ["+wire.AttributeZone+"]", 1)},
			routes:   []string{clusterRoute(prefix("/"), "a")},
			clusters: []string{ep.cluster(), pool("a", "", hostsOf(envoytest.NewUpstream(t, nil))...)},
		}
		b := bytes.Replace(f.bootstrap(), []byte("node: {id: facts, cluster: facts}"), []byte("node: "+node), 1)
		e := &factEnvoy{t: t, Envoy: envoytest.Start(t, b), client: client}
		e.addr = e.Listener("in")
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodOptions} {
			if r := e.send(method, "/", nil); r.status != http.StatusOK {
				t.Errorf("%s: %d %s", method, r.status, r.body)
			}
			got := ep.last().GetAttributes()[wire.AttributesKey].GetFields()
			if zone := got[wire.AttributeZone].GetStringValue(); zone != want || len(got) != 1 {
				t.Errorf("%s, %s: ext_proc was told %v", node, method, got)
			}
		}
	}
}
