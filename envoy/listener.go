package envoy

import (
	"fmt"
	"net/netip"
	"time"

	xdscorev3 "github.com/cncf/xds/go/xds/core/v3"
	matchingv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	grpclogv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"
	extensionmatcherv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	bodysizev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/body_size_limit/v3"
	compositev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/composite/v3"
	extprocfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	tracingv3 "github.com/envoyproxy/go-control-plane/envoy/type/tracing/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// Names of the HTTP filters, by which routes configure them.
const (
	filterAnswer  = "fairlead.answer_headers"
	filterPeek    = "envoy.filters.http.json_to_metadata"
	filterUser    = "fairlead.user"
	filterTokens  = "envoy.filters.http.jwt_authn"
	filterExtProc = wire.AttributesKey
	filterOfRoute = "fairlead.route"
	filterRouter  = "envoy.filters.http.router"
)

const (
	// bufferLimitBytes is Envoy's own default, said aloud: what one connection
	// may hold in each direction before its peer is told to wait.
	bufferLimitBytes = 1 << 20

	// shortestIdle is the least time a silent stream may last. A generation
	// that isn't streamed is silent until its end, so the listener's drain
	// time (above the longest generation) counts where it is longer.
	shortestIdle = 15 * time.Minute

	// delayedClose is how long Envoy leaves an HTTP/1.1 connection open after an
	// answer that ends it. Envoy's default of 1 s tells clients a second late
	// that a stream broke half-way. At 0 an early answer (413, 400, 429) to a
	// request still on its way is lost when the close resets the connection:
	// of 100 bodies over the limit, 25 with a content-length and 8 without
	// (measured on Envoy 1.40.0, 3 MiB on loopback); at 100 ms none of 200.
	delayedClose = 100 * time.Millisecond

	// headersTimeout ends connections that dribble a request's headers.
	headersTimeout = 30 * time.Second

	// decisionTimeout bounds the wait for ext_proc. With 50 ms, five of five
	// requests with a 2 MB JSON body went unsteered, because parsing ate the
	// time; with 200 ms none did (measured on Envoy 1.40.0).
	decisionTimeout = 200 * time.Millisecond

	// Access-log batches: a fifth of the cost of sending each entry alone, and
	// Envoy's memory stays bounded when the receiver hangs (measured on Envoy
	// 1.40.0).
	logBatchBytes = 16 << 10
	logBatchTime  = 25 * time.Millisecond

	// heartbeat is how often a running request is logged.
	heartbeat = 10 * time.Second

	// largestBody is the body limit of requests on no route at all.
	largestBody = 64 << 20
)

// BuildListener builds the listener of the group's sidecars that listen on the
// given address.
//
// Whatever changes it drains connections, so it depends on the group's
// listener settings only: never on routes, pools or the runtime's splits.
func BuildListener(cfg *fleet.Config, group fleet.Group, listen netip.AddrPort, rt Runtime) (*listenerv3.Listener, error) {
	if !listen.IsValid() {
		return nil, fmt.Errorf("group %q: no listening address", group.Name)
	}
	if err := checkStrings(cfg, group, rt); err != nil {
		return nil, err
	}
	if d := group.Listener.PeekDigits; d < 1 || d > 9 {
		return nil, fmt.Errorf("group %q: peek digits: found %d; accepted: 1…9", group.Name, d)
	}
	l := &listenerv3.Listener{
		Name:                          ListenerName(group.Name, listen),
		Address:                       socket(listen),
		PerConnectionBufferLimitBytes: u32(bufferLimitBytes),
		// Two Envoys on one address would silently share it; so the second one
		// fails to bind and says so.
		EnableReusePort: wrapperspb.Bool(false),
		FilterChains: []*listenerv3.FilterChain{{
			TransportSocket: transportSocket(group.Listener.TLS),
			Filters: []*listenerv3.Filter{{
				Name:       "envoy.filters.network.http_connection_manager",
				ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: packed(connectionManager(group))},
			}},
		}},
	}
	if err := Validate(l); err != nil {
		return nil, fmt.Errorf("group %q: %w", group.Name, err)
	}
	return l, nil
}

func connectionManager(group fleet.Group) *hcmv3.HttpConnectionManager {
	return &hcmv3.HttpConnectionManager{
		StatPrefix: wire.StatPrefix,
		// HTTP/1.1 and HTTP/2 with prior knowledge on one port.
		CodecType:            hcmv3.HttpConnectionManager_AUTO,
		Http2ProtocolOptions: http2Options(group.Listener.HTTP2),
		// A listener that waits for its routes too long opens without them and
		// answers 404, so here the wait is not shortened.
		RouteSpecifier: &hcmv3.HttpConnectionManager_Rds{Rds: &hcmv3.Rds{
			ConfigSource: ads(), RouteConfigName: RouteConfigName(group.Name),
		}},
		StreamIdleTimeout:     duration(max(shortestIdle, group.Listener.DrainTime)),
		RequestHeadersTimeout: duration(headersTimeout),
		// Ends with the last byte of the request or the first of the answer, so
		// that it touches neither generations nor upgraded connections.
		RequestTimeout:      duration(group.Listener.UploadTimeout),
		DelayedCloseTimeout: duration(delayedClose),
		EarlyHeaderMutationExtensions: []*corev3.TypedExtensionConfig{
			extension("envoy.http.early_header_mutation.header_mutation", earlyMutations()),
		},
		// Callers in the trusted ranges keep their request id; others get one
		// of Envoy's.
		UseRemoteAddress:      wrapperspb.Bool(true),
		InternalAddressConfig: trusted(group.Listener.TrustedCIDRs),
		// Routes, limits and servers see one spelling of a path, and a limit
		// can't be passed by another one. Envoy takes out dot segments, doubled
		// slashes and needless escapes (%73, %2F), escapes stray percent signs
		// (%%37%33 becomes %2573, and no escape arises anew), and forwards what it
		// matched (measured on Envoy 1.40.0). Escaped slashes are not refused,
		// since some clients escape the slash in a model's name.
		NormalizePath:                wrapperspb.Bool(true),
		MergeSlashes:                 true,
		PathWithEscapedSlashesAction: hcmv3.HttpConnectionManager_UNESCAPE_AND_FORWARD,
		UpgradeConfigs:               []*hcmv3.HttpConnectionManager_UpgradeConfig{{UpgradeType: "websocket"}},
		// No caller says by a header whose certificate it has shown.
		ForwardClientCertDetails: hcmv3.HttpConnectionManager_SANITIZE,
		LocalReplyConfig:         localReplyConfig(),
		AccessLog: []*accesslogv3.AccessLog{accessLog(wire.LogDownstream, usageTags(), nil,
			datav3.AccessLogType_DownstreamEnd, datav3.AccessLogType_DownstreamPeriodic)},
		AccessLogOptions: &hcmv3.HttpConnectionManager_HcmAccessLogOptions{
			AccessLogFlushInterval: duration(heartbeat),
		},
		HttpFilters: httpFilters(group.Listener),
	}
}

// httpFilters are in the order that requests pass; answers pass them backwards.
func httpFilters(l fleet.Listener) []*hcmv3.HttpFilter {
	out := []*hcmv3.HttpFilter{peekFilter(l.PeekDigits), userFilter()}
	// After the peek: by now the model has chosen the route, which may require a
	// token.
	if l.JWT != nil {
		out = append(out, httpFilter(filterTokens, tokens(l.JWT)))
	}
	return append(out,
		// Before ext_proc, so that answers pass it later. After the peek, since it
		// keeps what the route says when it first sees the request.
		httpFilter(filterAnswer, answerHeaders()),
		httpFilter(filterExtProc, externalProcessor(l)),
		// After the peek too, so that the chosen route's filters run. After
		// ext_proc: so that a 413 carries the decision's ids; the place that was
		// counted for it is free again with its log entry.
		httpFilter(filterOfRoute, &extensionmatcherv3.ExtensionWithMatcher{
			ExtensionConfig: extension("envoy.filters.http.composite", &compositev3.Composite{}),
			XdsMatcher:      execute(limitBody(largestBody)),
		}),
		httpFilter(filterRouter, router()),
	)
}

func httpFilter(name string, config proto.Message) *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{Name: name, ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: packed(config)}}
}

// earlyMutations clean a request before any filter or route sees it, and give
// it its draw. The draw is the microsecond part of the request's start time:
// routes hash it.
func earlyMutations() *earlyv3.HeaderMutation {
	m := &earlyv3.HeaderMutation{}
	for _, prefix := range ReservedPrefixes() {
		m.Mutations = append(m.Mutations, removePrefix(prefix))
	}
	m.Mutations = append(m.Mutations, set(setHeader(wire.HeaderDraw, "%START_TIME(%6f)%")))
	return m
}

// ReservedPrefixes are the beginnings of request header names that no client
// may send. x-envoy- is among them because Envoy lets such headers steer
// retries and timeouts; it sets its own later.
func ReservedPrefixes() []string {
	return []string{
		wire.ReservedPrefix,
		wire.HeaderGatewayDestination,
		wire.HeaderExecutionGraph,
		"x-envoy-",
	}
}

// trusted makes only the given ranges internal. An empty list would mean
// Envoy's default, which takes every private address for internal; so nobody
// is said by a range that no caller can come from.
func trusted(prefixes []netip.Prefix) *hcmv3.HttpConnectionManager_InternalAddressConfig {
	c := &hcmv3.HttpConnectionManager_InternalAddressConfig{}
	if len(prefixes) == 0 {
		prefixes = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/32")}
	}
	for _, p := range prefixes {
		c.CidrRanges = append(c.CidrRanges, &corev3.CidrRange{
			AddressPrefix: p.Addr().String(), PrefixLen: u32(uint32(p.Bits())),
		})
	}
	return c
}

// execute runs filters that can't be configured per route inside a composite
// filter, whose matcher can be: here it always picks them.
func execute(filters ...*corev3.TypedExtensionConfig) *matchingv3.Matcher {
	return &matchingv3.Matcher{OnNoMatch: &matchingv3.Matcher_OnMatch{OnMatch: &matchingv3.Matcher_OnMatch_Action{
		Action: matchingExtension("execute", &compositev3.ExecuteFilterAction{
			FilterChain: &compositev3.FilterChainConfiguration{TypedConfig: filters},
		}),
	}}}
}

func limitBody(limit fleet.Bytes) *corev3.TypedExtensionConfig {
	return extension("envoy.filters.http.body_size_limit", &bodysizev3.BodySizeLimit{
		MaxRequestBytes: wrapperspb.UInt64(uint64(limit)),
	})
}

func matchingExtension(name string, m proto.Message) *xdscorev3.TypedExtensionConfig {
	return &xdscorev3.TypedExtensionConfig{Name: name, TypedConfig: packed(m)}
}

// externalProcessor asks for a decision on the request's headers and on
// nothing else: no body mode (several can hang or crash Envoy), and no response
// but on routes that ask for it.
func externalProcessor(l fleet.Listener) *extprocfilterv3.ExternalProcessor {
	// Of the node one field alone: the attribute xds.node sends all that Envoy
	// is built with, and crashes Envoy 1.40.0 where an upstream filter asks for
	// it. This one cost nothing measurable in 36,000 requests.
	attributes := []string{wire.AttributeClusterName, wire.AttributeRouteName, wire.AttributeSource, wire.AttributeZone}
	if knowsCertificates(l) {
		attributes = append(attributes, wire.AttributeURISAN, wire.AttributeSubject)
	}
	forwarded := []string{wire.NamespacePeek}
	if l.JWT != nil {
		forwarded = append(forwarded, wire.NamespaceJWT)
	}
	return &extprocfilterv3.ExternalProcessor{
		GrpcService: grpcService(wire.ClusterExtProc),
		// Without a decision Envoy's own split and balancing serve.
		FailureModeAllow: true,
		MessageTimeout:   duration(decisionTimeout),
		ProcessingMode: &extprocfilterv3.ProcessingMode{
			RequestHeaderMode:  extprocfilterv3.ProcessingMode_SEND,
			ResponseHeaderMode: extprocfilterv3.ProcessingMode_SKIP,
		},
		RequestAttributes: attributes,
		MetadataOptions: &extprocfilterv3.MetadataOptions{
			ForwardingNamespaces: &extprocfilterv3.MetadataOptions_MetadataNamespaces{
				Untyped: forwarded,
			},
			ReceivingNamespaces: &extprocfilterv3.MetadataOptions_MetadataNamespaces{
				Untyped: []string{wire.NamespaceSteer, wire.NamespaceGroups, wire.NamespaceLog, wire.NamespaceLimit},
			},
		},
		// Lets ext_proc set wire.HeaderPerTryTimeout.
		MutationRules: &mutationv3.HeaderMutationRules{AllowEnvoy: wrapperspb.Bool(true)},
	}
}

// router logs every attempt when its connection is ready and when it ends.
// Those entries know neither the attempt's number nor the decision, so both
// come as tags from request headers. The answer's headers are those that the
// server has sent, before any filter or route adds to them.
func router() *routerv3.Router {
	tags := []*tracingv3.CustomTag{
		headerTag(wire.TagAttempt, wire.HeaderAttemptCount),
		headerTag(wire.TagDecision, wire.HeaderDecision),
	}
	return &routerv3.Router{
		UpstreamLog: []*accesslogv3.AccessLog{accessLog(wire.LogUpstream, tags, wire.RetryHeaders(),
			datav3.AccessLogType_UpstreamPoolReady, datav3.AccessLogType_UpstreamEnd)},
		UpstreamLogOptions: &routerv3.Router_UpstreamAccessLogOptions{FlushUpstreamLogOnUpstreamStream: true},
	}
}

func headerTag(tag, header string) *tracingv3.CustomTag {
	return &tracingv3.CustomTag{Tag: tag, Type: &tracingv3.CustomTag_RequestHeader{
		RequestHeader: &tracingv3.CustomTag_Header{Name: header},
	}}
}

func accessLog(name string, tags []*tracingv3.CustomTag, responseHeaders []string, types ...datav3.AccessLogType) *accesslogv3.AccessLog {
	return &accesslogv3.AccessLog{
		Name: "envoy.access_loggers.http_grpc",
		Filter: &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_LogTypeFilter{
			LogTypeFilter: &accesslogv3.LogTypeFilter{Types: types},
		}},
		ConfigType: &accesslogv3.AccessLog_TypedConfig{TypedConfig: packed(&grpclogv3.HttpGrpcAccessLogConfig{
			CommonConfig: &grpclogv3.CommonGrpcAccessLogConfig{
				LogName:             name,
				TransportApiVersion: corev3.ApiVersion_V3,
				GrpcService:         grpcService(wire.ClusterAccessLog),
				BufferSizeBytes:     u32(logBatchBytes),
				BufferFlushInterval: duration(logBatchTime),
				CustomTags:          tags,
			},
			AdditionalRequestHeadersToLog:  []string{wire.HeaderRequestID},
			AdditionalResponseHeadersToLog: responseHeaders,
		})},
	}
}
