// Package wire holds the names that travel between Envoy, clients and
// Fairlead: header names, dynamic-metadata namespaces and keys, the names
// of the clusters that belong to Fairlead itself, and of routes and groups. It
// holds names, and takes one apart.
package wire

import "strings"

// Request headers that clients may send.
const (
	// HeaderRouteStrategy asks for "legacy" or "dynamic" routing; on an answer
	// it names the strategy that was really used.
	HeaderRouteStrategy = "x-route-strategy"
	// HeaderMaxTokens and its spellings declare an output budget in tokens.
	HeaderMaxTokens     = "max_tokens"
	HeaderXMaxTokens    = "x-max-tokens"
	HeaderMaxTokensDash = "max-tokens"
	// HeaderTemperature and HeaderTopK are validated and recorded, nothing else.
	HeaderTemperature = "temperature"
	HeaderTopK        = "top_k"
	// HeaderSessionAffinity is an opaque key; requests with equal keys draw the
	// same arm of a split.
	HeaderSessionAffinity = "x-session-affinity"
	// HeaderRequestClass lowers a request's class: "batch". Nothing else is
	// believed.
	HeaderRequestClass = "x-request-class"
	// HeaderStainlessTimeout and HeaderStainlessReadTimeout are how long an
	// official SDK waits for an attempt, in seconds; HeaderStainlessRetry counts
	// the attempts before this one. HeaderGRPCTimeout is gRPC's own.
	HeaderStainlessTimeout     = "x-stainless-timeout"
	HeaderStainlessReadTimeout = "x-stainless-read-timeout"
	HeaderStainlessRetry       = "x-stainless-retry-count"
	HeaderGRPCTimeout          = "grpc-timeout"
	// HeaderRequestID is Envoy's and the client's correlation id.
	HeaderRequestID = "x-request-id"
	// HeaderAnthropicRequestID is where Anthropic's SDKs look for it on answers.
	HeaderAnthropicRequestID = "request-id"
)

// Headers that Fairlead or Envoy set and that no client may send.
const (
	// ReservedPrefix covers every header of Fairlead's own; Envoy removes
	// client-sent ones before any filter runs.
	ReservedPrefix = "x-fairlead-"
	// HeaderDecision carries the decision id to the upstream, into the access
	// log and back to the client.
	HeaderDecision = "x-fairlead-decision"
	// HeaderDraw is the per-request random value that Envoy sets for the draw
	// among a split's pools; routes hide it from upstreams.
	HeaderDraw = "x-fairlead-draw"
	// HeaderServedBy, on an answer, names the pool that answered.
	HeaderServedBy = "x-fairlead-served-by"
	// HeaderExecutionGraph, on an answer, is the digest of the plan that decided.
	HeaderExecutionGraph = "x-execution-graph-id"
	// HeaderGatewayDestination is the Endpoint Picker Protocol's header; a
	// client that could set it could choose its own target.
	HeaderGatewayDestination = "x-gateway-destination-endpoint"
	// HeaderAttemptCount is Envoy's attempt number, counted from 1.
	HeaderAttemptCount = "x-envoy-attempt-count"
	// HeaderPerTryTimeout bounds the wait for response headers of each attempt,
	// in milliseconds.
	HeaderPerTryTimeout = "x-envoy-upstream-rq-per-try-timeout-ms"
)

// Headers of a 429 answer.
const (
	HeaderRetryAfterMs           = "retry-after-ms"
	HeaderRetryAfter             = "retry-after"
	HeaderRecommendedConcurrency = "x-recommended-concurrency"
	HeaderShouldRetry            = "x-should-retry"
)

// Headers that tell where a client stands with its limit. X-RateLimit-* are those
// of draft-polli-ratelimit-headers-03, which Envoy's own filter writes too, with
// the reset in seconds from now; RateLimit and RateLimit-Policy are those of
// draft-ietf-httpapi-ratelimit-headers-10.
const (
	HeaderRateLimitLimit           = "x-ratelimit-limit"
	HeaderRateLimitRemaining       = "x-ratelimit-remaining"
	HeaderRateLimitReset           = "x-ratelimit-reset"
	HeaderRateLimitLimitTokens     = "x-ratelimit-limit-tokens"
	HeaderRateLimitRemainingTokens = "x-ratelimit-remaining-tokens"
	HeaderRateLimitResetTokens     = "x-ratelimit-reset-tokens"
	HeaderRateLimit                = "ratelimit"
	HeaderRateLimitPolicy          = "ratelimit-policy"
)

// Dynamic-metadata namespaces.
const (
	// NamespacePeek holds the body's top-level fields as json_to_metadata found
	// them; Envoy forwards it to ext_proc.
	NamespacePeek = "fairlead.peek"
	// NamespaceSteer holds KeyHosts: "ip:port[,ip:port…]" in attempt order.
	NamespaceSteer = "fairlead.steer"
	// NamespaceGroups holds a priority_group override.
	NamespaceGroups = "fairlead.groups"
	// NamespaceLog holds what answers and access logs show of a decision.
	NamespaceLog = "fairlead.log"
	// NamespaceLimit holds, by header name, what routes with a limit put on
	// answers: the headers of a standing, and HeaderRecommendedConcurrency.
	NamespaceLimit = "fairlead.limit"
	// NamespaceJWT holds the claims of a verified token under KeyClaims; Envoy
	// forwards it to ext_proc.
	NamespaceJWT = "envoy.filters.http.jwt_authn"
	// NamespaceSSE holds what sse_to_metadata found in a streamed answer.
	NamespaceSSE = "fairlead.sse"
	// NamespaceServed holds KeyHost, the endpoint Envoy's load balancer chose.
	NamespaceServed = "fairlead.served"
)

// Keys inside the namespaces.
const (
	KeyHosts    = "hosts"
	KeyHost     = "host"
	KeyDecision = "decision"
	KeyPlan     = "plan"
	KeyStrategy = "strategy"
	KeyReason   = "reason"
	// KeyTry is which try to decide the decision came from, counted from 0; not
	// there for the first. It is part of the seed of the decision's draws. With
	// a refusal as busy one more than the last: none got the place that it decided
	// on.
	KeyTry = "try"
	// KeyPast is how many pools at the begin of the chain the decision passed by,
	// since admission let the client into none of them; not there for 0.
	KeyPast = "past"
	// KeyRequestID is the request id the client gets back.
	KeyRequestID = "request_id"

	// Keys of NamespacePeek.
	KeyMaxTokens           = "max_tokens"
	KeyMaxCompletionTokens = "max_completion_tokens"
	KeyMaxOutputTokens     = "max_output_tokens"
	KeyModel               = "model"
	KeyStream              = "stream"
	KeyPromptCacheKey      = "prompt_cache_key"
	// KeyN is how many answers are asked for.
	KeyN = "n"
	// KeyUser is there only where a route reads it.
	KeyUser = "user"
	// KeyError is true when the body could not be parsed (broken JSON, or a
	// content type that is not JSON).
	KeyError = "error"
	// KeyRead is true when the body was parsed and names no usable model, so
	// that a parsed body always leaves something in NamespacePeek.
	KeyRead = "read"
)

// KeyClaims is the key of NamespaceJWT under which the payload stands.
const KeyClaims = "claims"

// Names of Fairlead's own clusters. Pool names can't contain an underscore, so
// they never collide with these.
const (
	ClusterXDS       = "fairlead_xds"
	ClusterExtProc   = "fairlead_extproc"
	ClusterAccessLog = "fairlead_accesslog"
)

// Names inside route configurations that both package envoy, which writes them,
// and package extproc, which reads and answers with them, must agree on.
const (
	// RouteOther and RouteConnect follow a config route's name in the names of
	// the Envoy routes for its requests that don't generate and for CONNECT; the
	// Envoy route for generating requests bears the plain name.
	RouteOther   = "/other"
	RouteConnect = "/connect"
	// GroupPool precedes a pool's name in the name of the priority group that
	// holds that pool alone. Every route has one for each pool of its chain.
	GroupPool = "pool-"
)

// SplitRoute parts an Envoy route's name into the config route's and whether its requests
// generate tokens.
func SplitRoute(envoyRoute string) (name string, generates bool) {
	for _, suffix := range [...]string{RouteOther, RouteConnect} {
		if name, ok := strings.CutSuffix(envoyRoute, suffix); ok {
			return name, false
		}
	}
	return envoyRoute, true
}

// StatPrefix is in the names of Envoy's statistics of our listeners' HTTP, behind
// "http.".
const StatPrefix = "fairlead"

// Names of the gRPC access logs.
const (
	// LogUpstream carries UpstreamPoolReady and UpstreamEnd entries, one pair
	// per attempt.
	LogUpstream = "fairlead.upstream"
	// LogDownstream carries DownstreamEnd and DownstreamPeriodic entries.
	LogDownstream = "fairlead.downstream"
	// TagAttempt and TagDecision are custom tags of upstream entries, taken
	// from HeaderAttemptCount and HeaderDecision.
	TagAttempt  = "attempt"
	TagDecision = "decision"
	// TagInput, TagCached and TagOutput are custom tags of downstream entries of
	// routes with usage: tokens as whole numbers. TagSSEError is there when a
	// streamed answer told an error; TagSSEOutput is what the stream had told of
	// output tokens when it broke off.
	TagInput     = "tokens_in"
	TagCached    = "tokens_cached"
	TagOutput    = "tokens_out"
	TagSSEError  = "sse_error"
	TagSSEOutput = "sse_out"
)

// Attributes that Envoy sends with a request.
const (
	AttributeClusterName = "xds.cluster_name"
	AttributeRouteName   = "xds.route_name"
	AttributeSource      = "source.address"
	// AttributeZone is the sidecar's zone, "" if its bootstrap names none.
	AttributeZone = "xds.node.locality.zone"
	// AttributeURISAN and AttributeSubject are the caller's certificate's, where
	// it showed one.
	AttributeURISAN  = "connection.uri_san_peer_certificate"
	AttributeSubject = "connection.subject_peer_certificate"
	// AttributesKey is the filter name under which they come.
	AttributesKey = "envoy.filters.http.ext_proc"
)

// NodeListen is the key of a node's metadata that names the listening address
// of this sidecar ("127.0.0.1:9001").
const NodeListen = "fairlead.listen"

// RuntimeName is the name of the runtime layer that sidecars are served over
// RTDS.
const RuntimeName = "fairlead"

// RetryHeaders are the response headers from which it can be read how long a
// server wants callers to stay away: the SDKs' own, and the families of OpenAI
// and Azure (Go-like durations, milliseconds) and Anthropic (RFC 3339).
func RetryHeaders() []string {
	return []string{
		HeaderRetryAfterMs, "x-ms-retry-after-ms", HeaderRetryAfter,
		"x-ratelimit-reset-requests", "x-ratelimit-reset-tokens", HeaderRateLimitReset,
		"anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-reset",
		"anthropic-ratelimit-input-tokens-reset", "anthropic-ratelimit-output-tokens-reset",
	}
}
