package integration

import (
	"fmt"
	"slices"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// upstreams starts n servers that answer 200 with their own index as the body.
func upstreams(t *testing.T, n int) []*envoytest.Upstream {
	t.Helper()
	var ups []*envoytest.Upstream
	for i := range n {
		ups = append(ups, envoytest.NewUpstream(t, envoytest.Status(200, fmt.Sprint(i))))
	}
	return ups
}

func counts(ups ...*envoytest.Upstream) []int {
	var n []int
	for _, u := range ups {
		n = append(n, u.Count())
	}
	return n
}

func expectCounts(t *testing.T, ups []*envoytest.Upstream, want ...int) {
	t.Helper()
	if got := counts(ups...); !slices.Equal(got, want) {
		t.Errorf("requests per upstream %v, want %v", got, want)
	}
}

func forget(ups ...*envoytest.Upstream) {
	for _, u := range ups {
		u.Forget()
	}
}

// The whole steering inside a pool stands on this: one answer of ext_proc, with
// metadata alone, names the endpoints in attempt order. No route clearing is
// needed, which is what keeps the decision cheap.
func TestFactHostListSteersInsideACluster(t *testing.T) {
	t.Parallel()
	a := upstreams(t, 3)
	b := upstreams(t, 2)
	dead := envoytest.FreeAddr(t)
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	e := startFacts(t, facts{
		filters: []string{extProcFilter("")},
		routes: []string{
			chainRoute(prefix("/chain"), "", "", group("a"), group("b")),
			chainRoute(prefix("/"), "", "", group("a"), group("a"), group("a")),
		},
		clusters: []string{
			pool("a", "", append(hostsOf(a[:2]...), host(a[2].Addr(), "UNHEALTHY"), host(dead, "UNHEALTHY"))...),
			pool("b", "", hostsOf(b...)...),
			ep.cluster(),
		},
	})
	all := append(slices.Clone(a), b...)
	fail := envoytest.Status(503, "busy")

	t.Run("named host is used without clearing the route cache", func(t *testing.T) {
		forget(all...)
		ep.answerWith(steerTo(list(a[1])))
		for range 10 {
			if got := e.get("/"); got.status != 200 {
				t.Fatalf("status %d", got.status)
			}
		}
		expectCounts(t, a, 0, 10, 0)
	})

	// Retry targets are the list's next entries: Fairlead ranks them, Envoy walks.
	t.Run("each retry takes the next entry", func(t *testing.T) {
		forget(all...)
		a[0].Handle(fail)
		a[1].Handle(fail)
		defer a[0].Handle(envoytest.Status(200, "0"))
		defer a[1].Handle(envoytest.Status(200, "1"))
		ep.answerWith(steerTo(list(a[1], a[0], a[2])))
		if got := e.get("/"); got.status != 200 || got.body != "2" {
			t.Errorf("status %d from %q, want 200 from the third entry", got.status, got.body)
		}
		expectCounts(t, a, 1, 1, 1)
	})

	t.Run("a dead named host costs one attempt", func(t *testing.T) {
		forget(all...)
		ep.answerWith(steerTo(dead.String() + "," + list(a[1])))
		if got := e.get("/"); got.status != 200 || got.body != "1" {
			t.Errorf("status %d from %q, want 200 from the second entry", got.status, got.body)
		}
	})

	// Ejection must therefore live in the plan (and in EDS): Envoy's health
	// states do not protect a host that is named.
	t.Run("an unhealthy host is used when named", func(t *testing.T) {
		forget(all...)
		ep.answerWith(steerTo(list(a[2])))
		for range 5 {
			if got := e.get("/"); got.body != "2" {
				t.Errorf("served by %q, want the unhealthy host", got.body)
			}
		}
		ep.answerWith(always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
		for range 20 {
			if got := e.get("/"); got.body == "2" {
				t.Error("the unhealthy host served a request that named nobody")
			}
		}
	})

	// One list carries the targets of all groups: entries of other clusters are
	// skipped, the cursor is shared, so the list has to be in attempt order.
	t.Run("one cursor walks all groups", func(t *testing.T) {
		forget(all...)
		a[0].Handle(fail)
		defer a[0].Handle(envoytest.Status(200, "0"))
		ep.answerWith(steerTo(list(a[0], b[1])))
		if got := e.get("/chain"); got.status != 200 {
			t.Errorf("status %d", got.status)
		}
		expectCounts(t, all, 1, 0, 0, 0, 1)
	})

	// The strategy legacy is an answer that names nobody: Envoy's own balancer
	// chooses.
	t.Run("an answer without hosts leaves the choice to Envoy", func(t *testing.T) {
		for name, m := range map[string]metadata{
			"no metadata":      nil,
			"no namespace":     {},
			"empty namespace":  {"fairlead.steer": map[string]any{}},
			"empty list":       {"fairlead.steer": map[string]any{"hosts": ""}},
			"unknown host":     {"fairlead.steer": map[string]any{"hosts": "192.0.2.1:80"}},
			"garbage":          {"fairlead.steer": map[string]any{"hosts": ",,here,:80,"}},
			"list not a text":  {"fairlead.steer": map[string]any{"hosts": []any{"x"}}},
			"other namespaces": {"fairlead.other": map[string]any{"hosts": a[2].Addr().String()}},
		} {
			forget(all...)
			ep.answerWith(always(func() *extprocv3.ProcessingResponse { return reply(m) }))
			for range 20 {
				if got := e.get("/"); got.status != 200 {
					t.Errorf("%s: status %d", name, got.status)
				}
			}
			if n := counts(a...); n[0] == 0 || n[1] == 0 || n[2] != 0 {
				t.Errorf("%s: requests per upstream %v, want both healthy hosts used", name, n)
			}
		}
	})
}

// Other groups are named only with a reason, because that needs the route cache
// cleared; and clearing works only together with a header mutation, if an empty
// one.
func TestFactRouteClearingNeedsAHeaderMutation(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 2)
	ep := newProcessor(t, nil)
	e := startFacts(t, facts{
		filters: []string{extProcFilter("")},
		routes: []string{
			`{match: {prefix: /, dynamic_metadata: [{filter: fairlead.log, path: [{key: to}], value: {string_match: {exact: b}}}]}, route: {cluster: b}}`,
			clusterRoute(prefix("/"), "a"),
		},
		clusters: []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...), ep.cluster()},
	})
	toB := metadata{"fairlead.log": map[string]any{"to": "b"}}

	ep.answerWith(always(func() *extprocv3.ProcessingResponse {
		r := reply(toB)
		r.GetRequestHeaders().Response = &extprocv3.CommonResponse{ClearRouteCache: true}
		return r
	}))
	if got := e.get("/"); got.body != "0" {
		t.Errorf("clear_route_cache alone: served by %q, want the first route kept", got.body)
	}
	if n, _ := e.Stat("http.in.ext_proc.clear_route_cache_ignored"); n != 1 {
		t.Errorf("clear_route_cache_ignored = %d, want 1", n)
	}
	ep.answerWith(always(func() *extprocv3.ProcessingResponse { return withClear(reply(toB)) }))
	if got := e.get("/"); got.body != "1" {
		t.Errorf("with an empty header mutation: served by %q, want the re-matched route", got.body)
	}
}

// The chain of a request can be reordered, shortened and repeated by group name.
func TestFactGroupsAreOverriddenByName(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 3)
	ep := newProcessor(t, nil)
	e := startFacts(t, facts{
		filters:  []string{extProcFilter("")},
		routes:   []string{chainRoute(prefix("/"), "", "", group("a"), group("b"), group("c"))},
		clusters: []string{pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...), pool("c", "", hostsOf(ups[2])...), ep.cluster()},
	})
	chain := func(names ...string) metadata {
		var groups []any
		for _, n := range names {
			groups = append(groups, map[string]any{"name": n})
		}
		return metadata{"fairlead.groups": map[string]any{"priority_groups": groups}}
	}

	ep.answerWith(always(func() *extprocv3.ProcessingResponse { return reply(chain("c")) }))
	if got := e.get("/"); got.body != "0" {
		t.Errorf("without clearing: first attempt at %q, want the configured first group", got.body)
	}
	ep.answerWith(always(func() *extprocv3.ProcessingResponse { return withClear(reply(chain("c"))) }))
	if got := e.get("/"); got.body != "2" {
		t.Errorf("with clearing: first attempt at %q, want the named group", got.body)
	}

	forget(ups...)
	ups[1].Handle(envoytest.Status(503, "busy"))
	ep.answerWith(always(func() *extprocv3.ProcessingResponse { return withClear(reply(chain("b", "b", "a"))) }))
	if got := e.get("/"); got.body != "0" {
		t.Errorf("served by %q, want the last of b, b, a", got.body)
	}
	expectCounts(t, ups, 1, 2, 0)
}

// Trust in x-fairlead-* headers, in metrics and in the draw rests on this: what a
// client sends under a reserved name is gone before ext_proc, the route match and
// the upstream see it, whether ext_proc lives or not.
func TestFactReservedHeadersAreRemovedEarly(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, envoytest.Echo())
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	e := startFacts(t, facts{
		hcm: `early_header_mutation_extensions: [{name: envoy.http.early_header_mutation.header_mutation, typed_config: {
			"@type": ` + typePrefix + `extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation,
			mutations: [{remove_on_match: {key_matcher: {prefix: x-fairlead-}}}, {remove: x-gateway-destination-endpoint},
				{append: {header: {key: x-fairlead-draw, value: "%START_TIME(%6f)%"}, append_action: ADD_IF_ABSENT}}]}}],`,
		filters:  []string{extProcFilter("")},
		routes:   []string{`{match: {prefix: /, headers: [{name: x-fairlead-arm, present_match: true}]}, direct_response: {status: 418}}`, clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster()},
	})
	spoof := []string{
		"x-fairlead-draw", "nonsense", "X-Fairlead-Draw", "twice", "x-fairlead-arm", "h100", "X-FAIRLEAD-Decision", "d",
		"x-gateway-destination-endpoint", "10.0.0.1:80", "X-Gateway-Destination-Endpoint", "10.0.0.2:80", "x-kept", "yes",
	}
	check := func(where string, header func(string) []string) {
		t.Helper()
		for _, name := range []string{"x-fairlead-arm", "x-fairlead-decision", "x-gateway-destination-endpoint"} {
			if got := header(name); len(got) != 0 {
				t.Errorf("%s sees %s %q", where, name, got)
			}
		}
		draw := header("x-fairlead-draw")
		if len(draw) != 1 || len(draw[0]) != 6 {
			t.Errorf("%s sees the draw %q, want Envoy's own six digits alone", where, draw)
		}
		if got := header("x-kept"); !slices.Equal(got, []string{"yes"}) {
			t.Errorf("%s: x-kept %q", where, got)
		}
	}
	upstreamHeader := func(name string) []string { return up.Last().Header.Values(name) }

	if got := e.get("/", spoof...); got.status != 200 {
		t.Fatalf("status %d: a route matched on a header that the client made up", got.status)
	}
	check("ext_proc", func(name string) (found []string) {
		for _, h := range ep.last().GetRequestHeaders().GetHeaders().GetHeaders() {
			if h.GetKey() == name {
				found = append(found, string(h.GetRawValue()))
			}
		}
		return found
	})
	check("upstream", upstreamHeader)
	ep.kill()
	if got := e.get("/", spoof...); got.status != 200 {
		t.Fatalf("ext_proc dead: status %d", got.status)
	}
	check("upstream (ext_proc dead)", upstreamHeader)
}
