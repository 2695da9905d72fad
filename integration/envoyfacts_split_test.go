package integration

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// drawHeader lets Envoy itself make a random value per request.
const drawHeader = `early_header_mutation_extensions: [{name: envoy.http.early_header_mutation.header_mutation, typed_config: {
	"@type": ` + typePrefix + `extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation,
	mutations: [{remove_on_match: {key_matcher: {prefix: x-fairlead-}}},
		{append: {header: {key: x-fairlead-draw, value: "%START_TIME(%6f)%"}, append_action: ADD_IF_ABSENT}}]}}],`

// splitRoute draws between canary and stable, canary first, in basis points. The
// second group has the same bounds with the other pool in each place, so that the
// same draw leads the second attempt to the pool that was not tried.
func splitRoute(match, draw, hash string, canary int) string {
	return fmt.Sprintf(`{match: %s, request_headers_to_remove: [x-fairlead-draw], route: {timeout: 0s, %s
  retry_policy: {retry_on: "reset,connect-failure,retriable-status-codes", retriable_status_codes: [503], num_retries: 1,
    refresh_cluster_on_retry: true, retry_back_off: {base_interval: 0.001s, max_interval: 0.01s}},
  inline_cluster_specifier_plugin: {extension: {name: envoy.router.cluster_specifier_plugin.priority_group, typed_config: {
    "@type": %sextensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier, %s
    priority_groups: [
      {name: own, clusters: [{cluster_name: canary, weight: %d}, {cluster_name: stable, weight: %d}]},
      {name: sibling, clusters: [{cluster_name: stable, weight: %d}, {cluster_name: canary, weight: %d}]}]}}}}}`,
		match, hash, typePrefix, draw, canary, 10000-canary, canary, 10000-canary)
}

// sticky draws by session where the client names one, else by Envoy's own value.
const (
	sticky     = `use_hash_policy: true,`
	stickyHash = `hash_policy: [{header: {header_name: x-session-affinity}, terminal: true}, {header: {header_name: x-fairlead-draw}}],`
)

// startSplit runs two pools whose servers answer with their pool's name.
func startSplit(t *testing.T, ep *processor, routes ...string) (e *factEnvoy, canary, stable *envoytest.Upstream) {
	t.Helper()
	canary = envoytest.NewUpstream(t, envoytest.Status(200, "canary"))
	stable = envoytest.NewUpstream(t, envoytest.Status(200, "stable"))
	f := facts{
		hcm: drawHeader, routes: routes,
		clusters: []string{pool("canary", "", hostsOf(canary)...), pool("stable", "", hostsOf(stable)...)},
	}
	if ep != nil {
		f.filters = []string{extProcFilter("")}
		f.clusters = append(f.clusters, ep.cluster())
	}
	return startFacts(t, f), canary, stable
}

// Progressive delivery draws the arm in Envoy, so that it is the same with
// ext_proc alive and dead; sessions must stay on their arm, and a higher canary
// weight may only add sessions to it.
func TestFactStickyDrawKeepsSessionsAndOnlyAddsThem(t *testing.T) {
	t.Parallel()
	e, _, _ := startSplit(t, nil,
		splitRoute(prefix("/ten"), sticky, stickyHash, 1000),
		splitRoute(prefix("/thirty"), sticky, stickyHash, 3000))
	const sessions = 300
	at := func(path string, session int) string {
		return e.get(path, "x-session-affinity", fmt.Sprintf("session-%d", session)).body
	}
	var low, high int
	for s := range sessions {
		first := at("/ten", s)
		for range 2 {
			if again := at("/ten", s); again != first {
				t.Errorf("session %d: first %s, then %s", s, first, again)
			}
		}
		raised := at("/thirty", s)
		if first == "canary" && raised != "canary" {
			t.Errorf("session %d left the canary when its weight rose", s)
		}
		if first == "canary" {
			low++
		}
		if raised == "canary" {
			high++
		}
	}
	// 30 and 90 are expected; the bounds lie more than 4 standard deviations off.
	if low < 8 || low > 55 || high < 55 || high > 125 {
		t.Errorf("canary got %d and %d of %d sessions, want about 30 and 90", low, high, sessions)
	}
}

// Without a session the draw comes from a header that Envoy sets, so a split holds
// with ext_proc dead; the route hides the header from upstreams, and the second
// attempt still draws the other pool from it.
func TestFactDrawHeaderSplitsWithoutASession(t *testing.T) {
	t.Parallel()
	e, canary, stable := startSplit(t, nil,
		splitRoute(prefix("/hash"), sticky, stickyHash, 1000),
		splitRoute(prefix("/header"), `header_name: x-fairlead-draw,`, "", 1000))
	const n = 600
	for _, path := range []string{"/hash", "/header"} {
		forget(canary, stable)
		for range n {
			if got := e.get(path); got.status != 200 {
				t.Fatalf("%s: status %d", path, got.status)
			}
		}
		if got := canary.Count(); got < 20 || got > 120 {
			t.Errorf("%s: canary got %d of %d requests, want about 60", path, got, n)
		}
		for _, u := range []*envoytest.Upstream{canary, stable} {
			if got := u.Last().Header.Get("x-fairlead-draw"); got != "" {
				t.Errorf("%s: the upstream sees the draw %q", path, got)
			}
		}
	}
	for _, path := range []string{"/hash", "/header"} {
		forget(canary, stable)
		stable.Handle(envoytest.Status(503, "busy"))
		for range 60 {
			if got := e.get(path); got.status != 200 || got.body != "canary" {
				t.Errorf("%s with the stable pool failing: status %d %q", path, got.status, got.body)
			}
		}
		stable.Handle(envoytest.Status(200, "stable"))
	}
}

// The draw is cumulative in list order, modulo the total: with the canary first
// and a constant total, values below its weight are the canary's.
func TestFactDrawIsCumulativeInListOrder(t *testing.T) {
	t.Parallel()
	e, _, _ := startSplit(t, nil, splitRoute(prefix("/"), `header_name: x-draw,`, "", 1000))
	for draw, want := range map[string]string{
		"0": "canary", "999": "canary", "1000": "stable", "9999": "stable",
		"10000": "canary", "10999": "canary", "11000": "stable",
	} {
		if got := e.get("/", "x-draw", draw).body; got != want {
			t.Errorf("draw %s went to %s, want %s", draw, got, want)
		}
	}
}

// ext_proc learns the arm that Envoy drew; nobody draws a second time.
func TestFactExtProcSeesTheDrawnCluster(t *testing.T) {
	t.Parallel()
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	e, _, _ := startSplit(t, ep, splitRoute(prefix("/"), sticky, stickyHash, 5000))
	seen := make(map[string]bool)
	for i := range 60 {
		served := e.get("/", "x-session-affinity", fmt.Sprint(i)).body
		told := ep.last().GetAttributes()["envoy.filters.http.ext_proc"].GetFields()["xds.cluster_name"].GetStringValue()
		if told != served {
			t.Errorf("request %d: ext_proc was told %q, served by %q", i, told, served)
		}
		seen[served] = true
	}
	if !seen["canary"] || !seen["stable"] {
		t.Errorf("only %v were drawn in 60 sessions at 50 %%", seen)
	}
}

// peekFilter copies a body's top-level fields into metadata, but only for bodies
// with a content-length of at most six digits.
const peekFilter = `{name: envoy.filters.http.json_to_metadata, typed_config: {
  "@type": ` + typePrefix + `extensions.common.matching.v3.ExtensionWithMatcher,
  extension_config: {name: envoy.filters.http.json_to_metadata, typed_config: {
    "@type": ` + typePrefix + `extensions.filters.http.json_to_metadata.v3.JsonToMetadata,
    request_rules: {
      rules: [
        {selectors: [{key: model}], on_present: {metadata_namespace: fairlead.peek, key: model}, on_error: {metadata_namespace: fairlead.peek, key: error, value: true}},
        {selectors: [{key: max_tokens}], on_present: {metadata_namespace: fairlead.peek, key: max_tokens}, on_error: {metadata_namespace: fairlead.peek, key: error, value: true}}],
      allow_content_types_regex: {regex: 'application/(.*\+)?json.*', google_re2: {}}}}},
  xds_matcher: {matcher_list: {matchers: [{
    predicate: {not_matcher: {single_predicate: {
      input: {name: content-length, typed_config: {"@type": ` + typePrefix + `type.matcher.v3.HttpRequestHeaderMatchInput, header_name: content-length}},
      value_match: {safe_regex: {google_re2: {}, regex: '[0-9]{1,6}'}}}}},
    on_match: {action: {name: skip, typed_config: {"@type": ` + typePrefix + `extensions.filters.common.matcher.action.v3.SkipFilter}}}}]}}}}`

func modelRoute(model, cluster string) string {
	return clusterRoute(fmt.Sprintf(`{prefix: /v1/, dynamic_metadata: [{filter: fairlead.peek, path: [{key: model}], value: {string_match: {exact: %s}}}]}`, model), cluster)
}

// Two models on one URL reach their pools by Envoy alone: the body's model is
// metadata before the route is first looked up, also with ext_proc dead.
func TestFactBodyModelRoutesInOnePass(t *testing.T) {
	t.Parallel()
	ups := upstreams(t, 3)
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	e := startFacts(t, facts{
		filters: []string{peekFilter, extProcFilter("")},
		routes:  []string{modelRoute("small", "a"), modelRoute("large", "b"), clusterRoute(prefix("/"), "c")},
		clusters: []string{
			pool("a", "", hostsOf(ups[0])...), pool("b", "", hostsOf(ups[1])...), pool("c", "", hostsOf(ups[2])...), ep.cluster(),
		},
	})
	for _, alive := range []bool{true, false} {
		if !alive {
			ep.kill()
		}
		for body, want := range map[string]string{
			`{"messages":[{"content":"x","model":"large"}],"model":"small"}`: "0",
			`{"model":"large","max_tokens":5}`:                               "1",
			`{"model":"none"}`:                                               "2",
			`{"model":7}`:                                                    "2",
			`{"model":"large"`:                                               "2",
			`[]`:                                                             "2",
		} {
			if got := e.postJSON("/v1/chat/completions", body); got.status != 200 || got.body != want {
				t.Errorf("ext_proc alive %v, body %s: status %d at %q, want pool %s", alive, body, got.status, got.body, want)
			}
			if alive && want == "1" {
				told := ep.last().GetAttributes()["envoy.filters.http.ext_proc"].GetFields()["xds.cluster_name"].GetStringValue()
				if n, _ := peeked(ep.last(), "max_tokens"); told != "b" || n != 5.0 {
					t.Errorf("ext_proc was told cluster %q and max_tokens %v, want b and 5", told, n)
				}
			}
		}
	}
}

// The draw must be safe under concurrency: parallel requests of one session all
// land on one arm.
func TestFactStickyDrawHoldsForParallelRequests(t *testing.T) {
	t.Parallel()
	e, _, _ := startSplit(t, nil, splitRoute(prefix("/"), sticky, stickyHash, 5000))
	var wg sync.WaitGroup
	served := make([]string, 40)
	for i := range served {
		wg.Go(func() {
			got, err := e.try(http.MethodGet, "/", nil, "x-session-affinity", "one")
			served[i] = fmt.Sprint(got.body, err)
		})
	}
	wg.Wait()
	if slices.Sort(served); served[0] != served[len(served)-1] {
		t.Errorf("one session was served by %q and %q", served[0], served[len(served)-1])
	}
}
