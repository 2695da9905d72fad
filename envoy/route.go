package envoy

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	matchingv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	extensionmatcherv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	extprocfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	previoushostsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	prioritygroupv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/priority_group/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// GroupOwn is the name of every route's first priority group: the split. The
// further pools of the split are in GroupOwn-2, -3, …
const GroupOwn = "own"

const (
	routeNamespace = "fairlead"
	routeDialect   = "dialect"
	routeMaxBody   = "max_body"

	// Retries wait 1 ms: the next target is another server or another pool, so
	// there is nothing to wait for. Envoy's default of 25 ms costs a walk
	// along three targets up to 128 ms (measured on Envoy 1.40.0).
	retryBackOff    = time.Millisecond
	retryBackOffMax = 10 * time.Millisecond

	// hostTries bounds how often Envoy draws again when its own balancer picks
	// an endpoint that this request has already tried. In a pool of two every
	// draw falls on the tried one half of the time, so few draws are not enough;
	// they cost nothing but on a retry.
	hostTries = 20

	// On generating paths anything that ends before the response headers may
	// be sent again. reset-before-request would miss a server that dies while
	// it works.
	onGenerating = "reset,connect-failure,refused-stream,retriable-status-codes"
	// Elsewhere only what was never sent.
	onOther = "connect-failure,refused-stream,reset-before-request"
)

const requestIDOperator = "%REQ(X-REQUEST-ID)%"

// routeConfig builds a group's route table.
func routeConfig(cfg *fleet.Config, group fleet.Group, rt Runtime) (*routev3.RouteConfiguration, error) {
	configured, err := groupRoutes(cfg, group, rt)
	if err != nil {
		return nil, err
	}
	var routes []*routev3.Route
	for i, r := range configured {
		rs, err := routesOf(cfg, r, modelNeeded(configured, i), group.Listener.PeekDigits)
		if err != nil {
			return nil, err
		}
		routes = append(routes, rs...)
	}
	routes = append(routes, refusals(routes, configured, group.Listener.PeekDigits)...)
	return &routev3.RouteConfiguration{
		Name: RouteConfigName(group.Name),
		VirtualHosts: []*routev3.VirtualHost{{
			Name:                       "all",
			Domains:                    []string{"*"},
			Routes:                     routes,
			IncludeRequestAttemptCount: true,
		}},
		// Those of the reserved prefix are the answer filter's.
		ResponseHeadersToRemove: []string{wire.HeaderExecutionGraph},
		ResponseHeadersToAdd:    responseHeaders(),
		// A route to a cluster that Envoy doesn't know is refused as a whole
		// instead of answering 503.
		ValidateClusters: wrapperspb.Bool(true),
	}, nil
}

// groupRoutes resolves a group's routes with their effective splits.
func groupRoutes(cfg *fleet.Config, group fleet.Group, rt Runtime) ([]fleet.Route, error) {
	out := make([]fleet.Route, 0, len(group.Routes))
	for _, name := range group.Routes {
		r, ok := cfg.RouteByName(name)
		if !ok {
			return nil, fmt.Errorf("group %q: no route %q in the config", group.Name, name)
		}
		if s, ok := rt.Splits[name]; ok {
			if !samePools(r.Split, s) {
				return nil, fmt.Errorf("route %q: split set by hand is %v, the config's is %v; the pools and their order must be the same", name, s, r.Split)
			}
			r.Split = s
		}
		if r.Split.BasisPoints() == nil {
			return nil, fmt.Errorf("route %q: split %v has no weight above 0", name, r.Split)
		}
		out = append(out, r)
	}
	return out, nil
}

func samePools(a, b fleet.Split) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Pool != b[i].Pool {
			return false
		}
	}
	return true
}

// routesOf builds the Envoy routes of one config route. needModel says that the
// body must be read because a model may choose the route.
func routesOf(cfg *fleet.Config, r fleet.Route, needModel bool, peekDigits int) ([]*routev3.Route, error) {
	chain, err := chainOf(cfg, r)
	if err != nil {
		return nil, err
	}
	build := func(name string, match *routev3.RouteMatch, retry *routev3.RetryPolicy) *routev3.Route {
		out := &routev3.Route{
			Name:                   name,
			Match:                  match,
			Metadata:               routeMetadata(r.Dialect, r.MaxBody),
			ResponseHeadersToAdd:   dialectHeaders(r.Dialect),
			RequestHeadersToRemove: []string{wire.HeaderDraw},
			RequestBodyBufferLimit: wrapperspb.UInt64(bufferLimit(r, peekDigits)),
			TypedPerFilterConfig:   map[string]*anypb.Any{filterOfRoute: routeFilters(limitBody(r.MaxBody))},
			Action:                 &routev3.Route_Route{Route: routeAction(chain, retry)},
		}
		if key, _ := cfg.ClientKeyOf(r.Name); key == fleet.ClientKeyJWT {
			out.TypedPerFilterConfig[filterTokens] = requiresToken()
		}
		return out
	}
	// What is left when paths and methods that generate nothing are taken away. A
	// preflight, a HEAD and a GET of something stored are passed, and not counted; SGLang
	// takes a PUT for a POST. An upgraded connection is counted too: what goes through it
	// may generate as well.
	generates := build(r.Name, prefixMatch(r.Match.Prefix), retryGenerating(chain))
	other := build(r.Name+wire.RouteOther, prefixMatch(r.Match.Prefix, otherPath()...), retryOther(chain))
	if r.Match.Model != "" {
		generates.Match.DynamicMetadata = []*matcherv3.MetadataMatcher{modelIs(r.Match.Model)}
		other.Match.DynamicMetadata = []*matcherv3.MetadataMatcher{modelIs(r.Match.Model)}
	}
	generate(cfg, r, generates)
	if !needModel {
		other.TypedPerFilterConfig[filterPeek] = disabled()
	}
	switch {
	case needModel:
	case r.SkipBody:
		generates.TypedPerFilterConfig[filterPeek] = disabled()
	case r.TrustDeclared:
		generates.TypedPerFilterConfig[filterPeek] = skipsDeclared(peekDigits)
	}
	if r.ReadUser {
		generates.TypedPerFilterConfig[filterUser] = readsUser(peekDigits)
	}
	out := []*routev3.Route{other, upgrading(generates), matching(other, headerMatches(":method", idleMethods)), generates}
	if r.Generates == fleet.GeneratesAll {
		out = out[1:]
	}
	if r.Match.Connect {
		c := build(r.Name+wire.RouteConnect, connectMatch(), retryOther(chain))
		c.GetRoute().UpgradeConfigs = []*routev3.RouteAction_UpgradeConfig{{UpgradeType: "CONNECT", Enabled: wrapperspb.Bool(true)}}
		out = append([]*routev3.Route{c}, out...)
	}
	return out, nil
}

// generate adds to an Envoy route what only requests that generate need: limits,
// what becomes of them without ext_proc, and the tokens used.
func generate(cfg *fleet.Config, r fleet.Route, out *routev3.Route) {
	out.TypedPerFilterConfig[filterAnswer] = limitHeaders(cfg, r)
	if a := processing(r); a != nil {
		out.TypedPerFilterConfig[filterExtProc] = a
	}
	if r.Usage {
		out.TypedPerFilterConfig[filterOfRoute] = picks(countUsage(limitBody(r.MaxBody)))
		// Nothing is counted in a compressed answer.
		out.RequestHeadersToRemove = append(out.RequestHeadersToRemove, "accept-encoding")
	}
}

// processing is what a route does otherwise than the listener's ext_proc filter,
// or nil.
//
// A route that fails closed gets no response phase: an answer that is on its way
// when ext_proc dies would be replaced by an error, and closed is about who may
// enter. Its retry fields are the fixed ones.
func processing(r fleet.Route) *anypb.Any {
	overrides := &extprocfilterv3.ExtProcOverrides{}
	switch {
	case r.OnFailure == fleet.FailClosed:
		overrides.FailureModeAllow = wrapperspb.Bool(false)
	case r.RetryFields == fleet.RetryFieldsComputed:
		overrides.ProcessingMode = &extprocfilterv3.ProcessingMode{
			RequestHeaderMode:  extprocfilterv3.ProcessingMode_SEND,
			ResponseHeaderMode: extprocfilterv3.ProcessingMode_SEND,
		}
	default:
		return nil
	}
	return packed(&extprocfilterv3.ExtProcPerRoute{Override: &extprocfilterv3.ExtProcPerRoute_Overrides{Overrides: overrides}})
}

// upgrading is a generating route for requests that ask for another protocol
// (WebSocket). Envoy has taken the upgrade header out of all others by now.
func upgrading(generates *routev3.Route) *routev3.Route {
	return matching(generates, isThere("upgrade"))
}

// matching is a route for those of its prefix and model whose headers are so.
func matching(r *routev3.Route, headers ...*routev3.HeaderMatcher) *routev3.Route {
	out := cloneRoute(r)
	out.Match.Headers = headers
	return out
}

func disabled() *anypb.Any { return packed(&routev3.FilterConfig{Disabled: true}) }

// bufferLimit is how much of a body Envoy keeps so that it can send it again.
// It is never below what the body filter reads, which would refuse such bodies
// with a 413.
func bufferLimit(r fleet.Route, peekDigits int) uint64 {
	return max(uint64(r.RetryBody), largestPeek(peekDigits))
}

// routeFilters are the filters that run for a route's requests alone.
func routeFilters(filters ...*corev3.TypedExtensionConfig) *anypb.Any {
	return picks(execute(filters...))
}

func picks(m *matchingv3.Matcher) *anypb.Any {
	return packed(&extensionmatcherv3.ExtensionWithMatcherPerRoute{XdsMatcher: m})
}

// routeMetadata is what the answers that Envoy makes by itself say of a route.
func routeMetadata(d fleet.Dialect, maxBody fleet.Bytes) *corev3.Metadata {
	m := &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
		routeNamespace: object(map[string]*structpb.Value{routeDialect: text(d.String())}),
	}}
	noteMaxBody(m, maxBody)
	return m
}

// noteMaxBody notes the largest body that a route takes, in bytes.
func noteMaxBody(m *corev3.Metadata, maxBody fleet.Bytes) {
	m.FilterMetadata[routeNamespace].Fields[routeMaxBody] = text(strconv.FormatUint(uint64(maxBody), 10))
}

// dialectHeaders are on the answers of routes whose clients look for the request's
// id under another name: Anthropic's SDKs read request-id. One that a server has
// sent stays.
func dialectHeaders(d fleet.Dialect) []*corev3.HeaderValueOption {
	if d != fleet.DialectAnthropic {
		return nil
	}
	return []*corev3.HeaderValueOption{
		// One value: of two that are added if absent Envoy adds both (measured on
		// Envoy 1.40.0).
		addHeader(wire.HeaderAnthropicRequestID, anthropicRequestID),
	}
}

// anthropicRequestID is the id that ext_proc decided on, or Envoy's own where it
// didn't.
var anthropicRequestID = cel(fmt.Sprintf(
	"'%[1]s' in metadata.filter_metadata && '%[2]s' in metadata.filter_metadata['%[1]s'] ? metadata.filter_metadata['%[1]s']['%[2]s'] : request.headers['%[3]s']",
	wire.NamespaceLog, wire.KeyRequestID, wire.HeaderRequestID))

func routeAction(c chain, retry *routev3.RetryPolicy) *routev3.RouteAction {
	return &routev3.RouteAction{
		ClusterSpecifier: &routev3.RouteAction_InlineClusterSpecifierPlugin{
			InlineClusterSpecifierPlugin: &routev3.ClusterSpecifierPlugin{Extension: extension(
				"envoy.router.cluster_specifier_plugin.priority_group",
				&prioritygroupv3.PriorityGroupClusterSpecifier{
					PriorityGroups:            c.selectable(),
					OverrideMetadataNamespace: wire.NamespaceGroups,
					RandomValueSpecifier: &prioritygroupv3.PriorityGroupClusterSpecifier_UseHashPolicy{
						UseHashPolicy: wrapperspb.Bool(true),
					},
				})},
		},
		// A session keeps its pool as long as the weights stay; other requests
		// draw by the header that Envoy set itself.
		HashPolicy: []*routev3.RouteAction_HashPolicy{
			hashHeader(wire.HeaderSessionAffinity, true),
			hashHeader(wire.HeaderDraw, false),
		},
		RetryPolicy: retry,
		// No limit on the whole answer: generations take as long as they take.
		Timeout: duration(0),
	}
}

func hashHeader(name string, terminal bool) *routev3.RouteAction_HashPolicy {
	return &routev3.RouteAction_HashPolicy{
		PolicySpecifier: &routev3.RouteAction_HashPolicy_Header_{
			Header: &routev3.RouteAction_HashPolicy_Header{HeaderName: name},
		},
		Terminal: terminal,
	}
}

// retryPolicy walks the chain once: attempt n uses group n, and the groups after
// the chain's are out of its reach. There is no
// per-try timeout: an answer that isn't streamed sends its headers at the very
// end and would be generated again for each attempt. ext_proc sets one per
// streaming request.
func retryPolicy(on string, c chain) *routev3.RetryPolicy {
	return &routev3.RetryPolicy{
		RetryOn:               on,
		NumRetries:            u32(uint32(len(c.groups) - 1)),
		RefreshClusterOnRetry: true,
		RetryBackOff: &routev3.RetryPolicy_RetryBackOff{
			BaseInterval: duration(retryBackOff), MaxInterval: duration(retryBackOffMax),
		},
		RetryHostPredicate: []*routev3.RetryPolicy_RetryHostPredicate{{
			Name: "envoy.retry_host_predicates.previous_hosts",
			ConfigType: &routev3.RetryPolicy_RetryHostPredicate_TypedConfig{
				TypedConfig: packed(&previoushostsv3.PreviousHostsPredicate{}),
			},
		}},
		HostSelectionRetryMaxAttempts: hostTries,
	}
}

// retryGenerating tries again elsewhere what a server refused before it began: a 503
// anywhere, a 429 or 529 only in another tier, since those of the same tier share
// their quota.
func retryGenerating(c chain) *routev3.RetryPolicy {
	p := retryPolicy(onGenerating, c)
	p.RetriableStatusCodes = []uint32{http.StatusServiceUnavailable}
	if c.tiersChange {
		p.RetriableStatusCodes = []uint32{http.StatusTooManyRequests, http.StatusServiceUnavailable, fleet.StatusOverloaded}
	}
	return p
}

func retryOther(c chain) *routev3.RetryPolicy { return retryPolicy(onOther, c) }

func prefixMatch(prefix string, headers ...*routev3.HeaderMatcher) *routev3.RouteMatch {
	return &routev3.RouteMatch{
		PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: prefix},
		Headers:       headers,
	}
}

func connectMatch() *routev3.RouteMatch {
	return &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_ConnectMatcher_{
		ConnectMatcher: &routev3.RouteMatch_ConnectMatcher{},
	}}
}

// idleMethods generate nothing. Servers that route by path alone may take any other for a
// POST.
const idleMethods = "GET|HEAD|OPTIONS|DELETE|TRACE|CONNECT"

// otherPath holds for the paths of which [fleet.Generates] is false. There are several
// expressions, since Envoy refuses one of more than 100 instructions
// (re2.max_program_size.error_level).
func otherPath() []*routev3.HeaderMatcher {
	var out []*routev3.HeaderMatcher
	for _, pattern := range generatingPaths() {
		m := headerMatches(":path", pattern)
		m.InvertMatch = true
		out = append(out, m)
	}
	return out
}

// endingsEach is how many endings stand in one expression.
const endingsEach = 6

// generatingPaths are regular expressions on :path of which one holds where
// [fleet.Generates] is true.
func generatingPaths() []string {
	var out []string
	for endings := range slices.Chunk(fleet.GeneratingPaths(), endingsEach) {
		out = append(out, `(?:[^?]*`+anyOf(endings)+`)?`+anyOf(fleet.GeneratingPathEnds())+`*(?:\?.*)?`)
	}
	return out
}

func anyOf(texts []string) string {
	quoted := make([]string, len(texts))
	for i, s := range texts {
		quoted[i] = regexp.QuoteMeta(s)
	}
	return `(?:` + strings.Join(quoted, "|") + `)`
}

// headerMatches holds when the whole value of a header matches.
func headerMatches(name, pattern string) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{
		Name: name,
		HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: &matcherv3.StringMatcher{
			MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{Regex: pattern}},
		}},
	}
}

func isThere(name string) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{
		Name:                 name,
		HeaderMatchSpecifier: &routev3.HeaderMatcher_PresentMatch{PresentMatch: true},
	}
}

func modelIs(model string) *matcherv3.MetadataMatcher {
	return peeked(wire.KeyModel, &matcherv3.ValueMatcher{MatchPattern: &matcherv3.ValueMatcher_StringMatch{
		StringMatch: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: model}},
	}})
}

func isPresent(key string) *matcherv3.MetadataMatcher {
	return peeked(key, &matcherv3.ValueMatcher{MatchPattern: &matcherv3.ValueMatcher_PresentMatch{PresentMatch: true}})
}

func peeked(key string, value *matcherv3.ValueMatcher) *matcherv3.MetadataMatcher {
	return &matcherv3.MetadataMatcher{
		Filter: wire.NamespacePeek,
		Path: []*matcherv3.MetadataMatcher_PathSegment{{
			Segment: &matcherv3.MetadataMatcher_PathSegment_Key{Key: key},
		}},
		Value: value,
	}
}

// responseHeaders are put on every answer, Envoy's own included.
//
// A value from metadata that isn't there sets nothing. So "legacy" first and
// the decision's strategy over it gives one right value with ext_proc alive
// and dead.
func responseHeaders() []*corev3.HeaderValueOption {
	decided := func(key string) string { return metadataValue(wire.NamespaceLog, key) }
	return []*corev3.HeaderValueOption{
		setHeader(wire.HeaderRouteStrategy, fleet.StrategyLegacy.String()),
		setHeader(wire.HeaderRouteStrategy, decided(wire.KeyStrategy)),
		setHeader(wire.HeaderExecutionGraph, decided(wire.KeyPlan)),
		setHeader(wire.HeaderRequestID, requestIDOperator),
		setHeader(wire.HeaderRequestID, decided(wire.KeyRequestID)),
	}
}

// refusals are the answers to requests that no configured route takes: first
// those whose path belongs to routes that all ask for another model, longest
// prefix first, then everything else.
func refusals(built []*routev3.Route, configured []fleet.Route, peekDigits int) []*routev3.Route {
	var out []*routev3.Route
	for _, p := range modelPrefixes(configured) {
		out = append(out, passBodiless(built, p.first)...)
		out = append(out, modelRefusals(p, peekDigits)...)
	}
	unknown := problem{
		status: http.StatusNotFound, code: "not_found",
		message: "No route matches %REQ(:METHOD)% %PATH(NQ)%.",
	}
	limit, buffer := largestLimits(configured, peekDigits)
	out = append(out,
		refuse("refuse/messages", prefixMatch("/v1/messages"), fleet.DialectAnthropic, unknown),
		refuse("refuse/all", prefixMatch("/"), fleet.DialectOpenAI, unknown))
	for _, r := range out {
		if r.GetDirectResponse() == nil {
			continue
		}
		// Envoy takes a first route before it has read the model, and that is
		// often one of these: they must not be stricter than the real ones.
		r.RequestBodyBufferLimit = wrapperspb.UInt64(buffer)
		r.TypedPerFilterConfig[filterOfRoute] = routeFilters(limitBody(limit))
		noteMaxBody(r.Metadata, limit)
	}
	return out
}

func largestLimits(routes []fleet.Route, peekDigits int) (body fleet.Bytes, buffer uint64) {
	body, buffer = 1, largestPeek(peekDigits)
	for _, r := range routes {
		body = max(body, r.MaxBody)
		buffer = max(buffer, bufferLimit(r, peekDigits))
	}
	return body, buffer
}

// modelPrefix is a prefix that some route combines with a model, and the first
// such route.
type modelPrefix struct {
	prefix string
	first  fleet.Route
}

func modelPrefixes(routes []fleet.Route) []modelPrefix {
	var out []modelPrefix
	seen := map[string]bool{}
	for _, r := range routes {
		if r.Match.Model == "" || seen[r.Match.Prefix] {
			continue
		}
		seen[r.Match.Prefix] = true
		out = append(out, modelPrefix{prefix: r.Match.Prefix, first: r})
	}
	sort.SliceStable(out, func(i, j int) bool { return len(out[i].prefix) > len(out[j].prefix) })
	return out
}

// passBodiless sends requests that carry no body and so can't name a model
// (WebSocket handshakes, GET /v1/models, HEAD, OPTIONS) to the first route of
// the prefix, under that route's own name. Of upgrades those on generating paths
// count.
func passBodiless(built []*routev3.Route, first fleet.Route) []*routev3.Route {
	// routesOf builds both for every route.
	generates := slices.IndexFunc(built, named(first.Name))
	other := slices.IndexFunc(built, named(first.Name+wire.RouteOther))
	bodiless := headerMatches(":method", "GET|HEAD|OPTIONS|DELETE|TRACE")
	out := []*routev3.Route{upgrading(built[generates]), matching(built[other], bodiless)}
	if first.Generates != fleet.GeneratesAll {
		out = append([]*routev3.Route{matching(built[other], append(otherPath(), bodiless)...)}, out...)
	}
	for _, r := range out {
		r.Match.DynamicMetadata = nil
	}
	return out
}

func named(name string) func(*routev3.Route) bool {
	return func(r *routev3.Route) bool { return r.GetName() == name }
}

// modelRefusals say why no route took a request: the model is unknown, or it
// could not be read, and then why.
func modelRefusals(p modelPrefix, peekDigits int) []*routev3.Route {
	at := func(kind string, match *routev3.RouteMatch, why problem) *routev3.Route {
		return refuse("refuse/"+kind+p.prefix, match, p.first.Dialect, why)
	}
	known := prefixMatch(p.prefix)
	known.DynamicMetadata = []*matcherv3.MetadataMatcher{isPresent(wire.KeyModel)}
	broken := prefixMatch(p.prefix)
	broken.DynamicMetadata = []*matcherv3.MetadataMatcher{isPresent(wire.KeyError)}
	unread := "The model could not be read from the request: "
	return []*routev3.Route{
		at("model", known, problem{http.StatusNotFound, "model_not_found",
			"The model '" + metadataValue(wire.NamespacePeek, wire.KeyModel) + "' does not exist here."}),
		at("broken", broken, problem{http.StatusBadRequest, "model_not_read",
			unread + "the body is not valid JSON, or its content-type is not application/json."}),
		at("no-model", prefixMatch(p.prefix, headerMatches("content-length", contentLengthPattern(peekDigits))),
			problem{http.StatusBadRequest, "model_not_read", unread + "the body has no top-level \"model\" of at most 8192 bytes."}),
		at("unread", prefixMatch(p.prefix), problem{http.StatusBadRequest, "model_not_read",
			fmt.Sprintf("%sit is read only from bodies with a content-length of at most %d bytes.", unread, largestPeek(peekDigits))}),
	}
}

// refuse answers by itself. ext_proc is asked all the same, since the decision
// id, the plan's digest and the request id on the answer come from it.
func refuse(name string, match *routev3.RouteMatch, d fleet.Dialect, why problem) *routev3.Route {
	return &routev3.Route{
		Name:                 name,
		Match:                match,
		Metadata:             routeMetadata(d, largestBody),
		ResponseHeadersToAdd: dialectHeaders(d),
		Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{
			Status: why.status, BodyFormat: jsonFormat(why.body(d)),
		}},
		TypedPerFilterConfig: map[string]*anypb.Any{},
	}
}
