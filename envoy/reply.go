package envoy

import (
	"net/http"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	celv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// problem is an error that Envoy answers by itself.
type problem struct {
	status uint32
	// code is for programs: OpenAI's error.code.
	code string
	// message is for people. It may hold Envoy's command operators, so a
	// literal percent sign is written twice.
	message string
}

// body is the error as JSON in a dialect. The types are those that the SDKs of
// the two APIs know.
func (p problem) body(d fleet.Dialect) *structpb.Struct {
	if d == fleet.DialectAnthropic {
		return object(map[string]*structpb.Value{
			"type": text("error"),
			"error": structpb.NewStructValue(object(map[string]*structpb.Value{
				"type":    text(anthropicType(p.status)),
				"message": text(p.message),
			})),
		})
	}
	return object(map[string]*structpb.Value{
		"error": structpb.NewStructValue(object(map[string]*structpb.Value{
			"type":    text(openAIType(p.status)),
			"code":    text(p.code),
			"message": text(p.message),
		})),
	})
}

func anthropicType(status uint32) string {
	switch status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return "timeout_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	if status >= http.StatusInternalServerError {
		return "api_error"
	}
	return "invalid_request_error"
}

func openAIType(status uint32) string {
	switch {
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status >= http.StatusInternalServerError:
		return "server_error"
	}
	return "invalid_request_error"
}

func jsonFormat(body *structpb.Struct) *corev3.SubstitutionFormatString {
	return &corev3.SubstitutionFormatString{
		Format:      &corev3.SubstitutionFormatString_JsonFormat{JsonFormat: body},
		ContentType: "application/json",
	}
}

// The retry fields of a server's answer that comes without any. One second is a
// guess that no server has confirmed.
const (
	defaultRetryAfterMs = "1000"
	defaultRetryAfter   = "1"
)

// The retry fields of what a sidecar refuses by itself: 1,001…2,000 ms, and that
// in whole seconds, rounded up. Those who are refused in one instant would come
// back in one instant too; so they are spread by the millisecond at which their
// request came and by their connection. The factors are odd primes that share no
// divisor with 1,000, so that neighbours land far apart.
const (
	spreadRetryAfterMs = "%CEL(1001 + (request.time.getMilliseconds() * 617 + int(connection.id) * 389) % 1000)%"
	spreadRetryAfter   = "2"
)

// localReply is one kind of answer that Envoy makes up itself, found by
// details, by response flags or by status.
type localReply struct {
	problem
	// details, if set, selects by the beginning of Envoy's name for what happened.
	details string
	// flags, if set, selects by Envoy's response flags; else the status does.
	flags []string
	// rewrite changes the status to the problem's.
	rewrite bool
	// again says that a caller may come back soon.
	again bool
}

// localReplies lists the answers in the order they are tried. The answers of
// ext_proc and of our own direct responses come through here too: they carry
// no response flag, none of these details and none of these statuses, and so pass
// unchanged.
func localReplies() []localReply {
	return []localReply{
		{flags: []string{"UO"}, rewrite: true, again: true, problem: problem{
			status: http.StatusTooManyRequests, code: "rate_limit_exceeded",
			message: "Too many concurrent requests at this gateway. Retry after the time given by retry-after-ms.",
		}},
		// ext_proc is dead or hung, on a route that fails closed: 500 or 504.
		{details: "ext_proc_error", rewrite: true, again: true, problem: problem{
			status: http.StatusServiceUnavailable, code: "unavailable",
			message: "Limits can't be checked right now. Retry after the time given by retry-after-ms.",
		}},
		// 401, or 403 for another's audience.
		{details: "jwt_authn_access_denied", rewrite: true, problem: problem{
			status: http.StatusUnauthorized, code: "invalid_api_key",
			message: "A valid bearer token is needed: " + detailsOperator + ".",
		}},
		{problem: problem{
			status: http.StatusRequestEntityTooLarge, code: "request_too_large",
			message: "The request body is larger than the " + maxBodyOperator + " bytes that are accepted here.",
		}},
		{problem: problem{
			status: http.StatusForbidden, code: "not_allowed",
			message: "This kind of request is not allowed here: " + detailsOperator + ".",
		}},
		{details: "path_normalization_failed", problem: problem{
			status: http.StatusBadRequest, code: "bad_request",
			message: "The path is not valid: it holds a fragment or the escape of a zero byte.",
		}},
		{flags: []string{"NR"}, problem: problem{
			status: http.StatusNotFound, code: "not_found", message: "No route matches this request.",
		}},
		{flags: []string{"UT"}, problem: problem{
			status: http.StatusGatewayTimeout, code: "timeout",
			message: "No model server answered in time: " + detailsOperator + ".",
		}},
		{flags: []string{"SI"}, problem: problem{
			status: http.StatusRequestTimeout, code: "timeout",
			message: "The request was idle for too long: " + detailsOperator + ".",
		}},
		// The upload or its headers took too long; Envoy sets no flag for either.
		{again: true, problem: problem{
			status: http.StatusRequestTimeout, code: "timeout",
			message: "The request did not arrive in time: " + detailsOperator + ".",
		}},
		{flags: []string{"DPE"}, problem: problem{
			status: http.StatusBadRequest, code: "bad_request",
			message: "The request is not valid HTTP: " + detailsOperator + ".",
		}},
		// Whatever else carries a flag: no live endpoint, refused and broken
		// connections, used-up retries, a missing cluster, overload.
		{flags: []string{}, again: true, problem: problem{
			status: http.StatusServiceUnavailable, code: "unavailable",
			message: "No model server could take the request: " + detailsOperator + ".",
		}},
	}
}

// maxBodyOperator prints the limit of the route. It stands in the route for the same
// reason as the dialect, see anthropicRoute.
const maxBodyOperator = "%METADATA(ROUTE:" + routeNamespace + ":" + routeMaxBody + ")%"

const detailsOperator = "%RESPONSE_CODE_DETAILS%"

// localReplyConfig writes Envoy's own answers in the caller's dialect and
// stamps the headers that every answer carries.
func localReplyConfig() *hcmv3.LocalReplyConfig {
	c := &hcmv3.LocalReplyConfig{}
	for _, r := range localReplies() {
		c.Mappers = append(c.Mappers,
			r.mapper(and(r.filter(), anthropicRoute()), fleet.DialectAnthropic),
			r.mapper(r.filter(), fleet.DialectOpenAI),
		)
	}
	return c
}

func (r localReply) mapper(filter *accesslogv3.AccessLogFilter, d fleet.Dialect) *hcmv3.ResponseMapper {
	m := &hcmv3.ResponseMapper{
		Filter:             filter,
		BodyFormatOverride: jsonFormat(r.body(d)),
		// Routes set these themselves; here they are for answers without one.
		HeadersToAdd: []*corev3.HeaderValueOption{
			addHeader(wire.HeaderRouteStrategy, fleet.StrategyLegacy.String()),
			addHeader(wire.HeaderRequestID, requestIDOperator),
		},
	}
	if r.rewrite {
		m.StatusCode = u32(r.status)
	}
	if r.again {
		m.HeadersToAdd = append(m.HeadersToAdd,
			addHeader(wire.HeaderRetryAfterMs, spreadRetryAfterMs),
			addHeader(wire.HeaderRetryAfter, spreadRetryAfter))
	}
	return m
}

func (r localReply) filter() *accesslogv3.AccessLogFilter {
	if r.details != "" {
		return celFilter("response.code_details.startsWith('" + r.details + "')")
	}
	if r.flags != nil {
		return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ResponseFlagFilter{
			ResponseFlagFilter: &accesslogv3.ResponseFlagFilter{Flags: r.flags},
		}}
	}
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_StatusCodeFilter{
		StatusCodeFilter: &accesslogv3.StatusCodeFilter{Comparison: &accesslogv3.ComparisonFilter{
			Op: accesslogv3.ComparisonFilter_EQ,
			Value: &corev3.RuntimeUInt32{
				DefaultValue: r.status, RuntimeKey: "fairlead.local_reply.status",
			},
		}},
	}}
}

func and(filters ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_AndFilter{
		AndFilter: &accesslogv3.AndFilter{Filters: filters},
	}}
}

// anthropicRoute holds for requests on a route whose metadata names that
// dialect. The dialect stands in the route and not here, because a changed
// listener drains connections and a changed route does not.
func anthropicRoute() *accesslogv3.AccessLogFilter {
	return celFilter("xds.route_metadata.filter_metadata['" + routeNamespace + "']['" + routeDialect +
		"'] == '" + fleet.DialectAnthropic.String() + "'")
}

func celFilter(expression string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ExtensionFilter{
		ExtensionFilter: &accesslogv3.ExtensionFilter{
			Name: "envoy.access_loggers.extension_filters.cel",
			ConfigType: &accesslogv3.ExtensionFilter_TypedConfig{TypedConfig: packed(&celv3.ExpressionFilter{
				Expression: expression,
			})},
		},
	}}
}
