package integration

import (
	"net/http"
	"testing"

	accesslogdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

const (
	poolReady = accesslogdatav3.AccessLogType_UpstreamPoolReady
	attempt   = accesslogdatav3.AccessLogType_UpstreamEnd
	requested = accesslogdatav3.AccessLogType_DownstreamEnd
	periodic  = accesslogdatav3.AccessLogType_DownstreamPeriodic
)

// The ledger joins attempts by two custom tags, because per-attempt entries carry
// neither metadata nor an attempt count of their own; and it must not trust the
// sizes of an UpstreamEnd entry.
func TestFactAttemptEntriesCarryTagsAndSwappedSizes(t *testing.T) {
	t.Parallel()
	const request, response = `{"n": 1}`, `{"answer": "a good deal longer than the request"}`
	ups := upstreams(t, 2)
	ups[0].Handle(envoytest.Status(503, ""))
	ups[1].Handle(envoytest.JSON(response))
	als := newLogReceiver(t)
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse {
		return withHeaders(reply(metadata{
			"fairlead.log":   map[string]any{"decision": "d-1"},
			"fairlead.steer": map[string]any{"hosts": list(ups...)},
		}), "x-fairlead-decision", "d-1")
	}))
	e := startFacts(t, facts{
		hcm:     `access_log: [` + grpcLog("down", "DownstreamEnd", "") + `],`,
		filters: []string{extProcFilter("")},
		router: `upstream_log: [` + grpcLog("up", "UpstreamPoolReady, UpstreamEnd", `custom_tags: [
			{tag: attempt, request_header: {name: x-envoy-attempt-count}},
			{tag: decision, request_header: {name: x-fairlead-decision}}]`) + `],
			upstream_log_options: {flush_upstream_log_on_upstream_stream: true},`,
		virtualHost: `include_request_attempt_count: true,`,
		routes:      []string{chainRoute(prefix("/"), "", "", group("a"), group("b"))},
		clusters:    []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...), ep.cluster(), als.cluster()},
	})
	if got := e.postJSON("/", request); got.status != 200 {
		t.Fatalf("status %d", got.status)
	}

	starts, ends := als.find(poolReady, 2), als.find(attempt, 2)
	for i, want := range []string{"1", "2"} {
		for _, l := range []logged{starts[i], ends[i]} {
			tags := l.entry.GetCommonProperties().GetCustomTags()
			at := l.entry.GetCommonProperties().GetUpstreamRemoteAddress().GetSocketAddress()
			if l.log != "up" || tags["attempt"] != want || tags["decision"] != "d-1" || at.GetPortValue() != uint32(ups[i].Addr().Port()) {
				t.Errorf("%v of attempt %s: log %q, tags %v, upstream port %d", l.kind(), want, l.log, tags, at.GetPortValue())
			}
			if n := len(l.entry.GetCommonProperties().GetMetadata().GetFilterMetadata()); n != 0 {
				t.Errorf("%v carries %d metadata namespaces: tags would not be needed", l.kind(), n)
			}
		}
	}
	if code := ends[0].entry.GetResponse().GetResponseCode().GetValue(); code != 503 {
		t.Errorf("the failed attempt's entry has code %d, want 503", code)
	}

	sizes := func(l logged) (in, out uint64) {
		return l.entry.GetRequest().GetRequestBodyBytes(), l.entry.GetResponse().GetResponseBodyBytes()
	}
	down := als.find(requested, 1)[0]
	if in, out := sizes(down); in != uint64(len(request)) || out != uint64(len(response)) {
		t.Errorf("DownstreamEnd: request %d bytes, response %d; want %d and %d", in, out, len(request), len(response))
	}
	if in, out := sizes(ends[1]); in != uint64(len(response)) || out != uint64(len(request)) {
		t.Errorf("UpstreamEnd: request %d bytes, response %d; want them swapped, %d and %d", in, out, len(response), len(request))
	}
	props := down.entry.GetCommonProperties()
	if got := props.GetMetadata().GetFilterMetadata()["fairlead.log"].GetFields()["decision"].GetStringValue(); got != "d-1" {
		t.Errorf("DownstreamEnd: decision %q in its metadata", got)
	}
	if n := props.GetUpstreamRequestAttemptCount(); n != 2 {
		t.Errorf("DownstreamEnd: %d attempts, want 2", n)
	}
}

// A refused connection has an end but no start: the ledger must ignore an end
// that it never saw start.
func TestFactRefusedAttemptHasAnEndButNoStart(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	als := newLogReceiver(t)
	e := startFacts(t, facts{
		router: `upstream_log: [` + grpcLog("up", "UpstreamPoolReady, UpstreamEnd", "") + `],
			upstream_log_options: {flush_upstream_log_on_upstream_stream: true},`,
		routes:   []string{chainRoute(prefix("/"), "", "", group("a"), group("b"))},
		clusters: []string{poolWithFloor("a", "", floorEndpoint), pool("b", "", hostsOf(up)...), als.cluster()},
	})
	e.get("/")
	als.find(attempt, 2)
	if starts := als.find(poolReady, 1); len(starts) != 1 {
		t.Errorf("%d starts for one refused and one served attempt, want 1", len(starts))
	}
}

// Leases of long streams live on periodic entries, which name the endpoint and
// carry our metadata; so a restarted server finds running streams again.
func TestFactPeriodicEntriesAreAHeartbeatOfRunningStreams(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	events := make(chan string)
	up.Handle(envoytest.SSE(events))
	als := newLogReceiver(t)
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse {
		return reply(metadata{"fairlead.log": map[string]any{"decision": "d-2"}})
	}))
	e := startFacts(t, facts{
		hcm: `access_log: [` + grpcLog("down", "DownstreamEnd, DownstreamPeriodic", "") + `],
			access_log_options: {access_log_flush_interval: 0.2s},`,
		filters:  []string{extProcFilter("")},
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster(), als.cluster()},
	})
	response, err := e.open(t.Context(), http.MethodGet, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	for _, l := range als.find(periodic, 3) {
		props := l.entry.GetCommonProperties()
		if port := props.GetUpstreamRemoteAddress().GetSocketAddress().GetPortValue(); port != uint32(up.Addr().Port()) {
			t.Errorf("heartbeat names upstream port %d, want %d", port, up.Addr().Port())
		}
		if got := props.GetMetadata().GetFilterMetadata()["fairlead.log"].GetFields()["decision"].GetStringValue(); got != "d-2" {
			t.Errorf("heartbeat of decision %q", got)
		}
		if props.GetStreamId() == "" {
			t.Error("heartbeat without a stream id")
		}
		if code := l.entry.GetResponse().GetResponseCode().GetValue(); code != http.StatusOK {
			t.Errorf("heartbeat of an answer that has begun: %d", code)
		}
	}
	close(events)
	als.find(requested, 1)
}

// Heartbeats of a request whose answer has not begun have no status: by that a server that
// serves a client is told from one that has not refused it yet.
func TestFactHeartbeatsBeforeTheAnswerHaveNoStatus(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	answer := make(chan struct{})
	up.Handle(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-answer }))
	als := newLogReceiver(t)
	e := startFacts(t, facts{
		hcm: `access_log: [` + grpcLog("down", "DownstreamEnd, DownstreamPeriodic", "") + `],
			access_log_options: {access_log_flush_interval: 0.2s},`,
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), als.cluster()},
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if response, err := e.open(t.Context(), http.MethodGet, "/", nil); err == nil {
			response.Body.Close()
		}
	}()
	for _, l := range als.find(periodic, 3) {
		if code := l.entry.GetResponse().GetResponseCode().GetValue(); code != 0 {
			t.Errorf("heartbeat before an answer: %d", code)
		}
	}
	close(answer)
	<-done
}

// A client that leaves ends its request in the log, with a flag on the request's
// entry and none on the attempt's.
func TestFactClientAbortEndsAttemptAndRequest(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	events := make(chan string)
	up.Handle(envoytest.SSE(events))
	als := newLogReceiver(t)
	e := startFacts(t, facts{
		hcm: `access_log: [` + grpcLog("down", "DownstreamEnd", "") + `],`,
		router: `upstream_log: [` + grpcLog("up", "UpstreamEnd", "") + `],
			upstream_log_options: {flush_upstream_log_on_upstream_stream: true},`,
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), als.cluster()},
	})
	response, err := e.open(t.Context(), http.MethodGet, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	down := als.find(requested, 1)[0].entry.GetCommonProperties()
	if !down.GetResponseFlags().GetDownstreamConnectionTermination() {
		t.Errorf("request entry flags %v, want the client's disconnect", down.GetResponseFlags())
	}
	als.find(attempt, 1)
}
