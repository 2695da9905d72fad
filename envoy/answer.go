package envoy

import (
	"fmt"
	"strings"

	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// answerHeaders is a filter that ext_proc's response phase comes before, unlike
// headers that routes add. So ext_proc sees the retry fields and limits that a
// server itself has sent, and what it adds is there when this filter looks for
// what is missing, also when ext_proc is dead.
//
// The gateway's own headers are set here, after all of that prefix are gone, so
// that no server speaks in the gateway's name.
func answerHeaders() *headermutationv3.HeaderMutation {
	return &headermutationv3.HeaderMutation{Mutations: answers(
		removePrefix(wire.ReservedPrefix),
		set(setHeader(wire.HeaderDecision, metadataValue(wire.NamespaceLog, wire.KeyDecision))),
		set(setHeader(wire.HeaderServedBy, servedBy)),
		set(addHeader(wire.HeaderRetryAfter, overloadedWithout(wire.HeaderRetryAfterMs, defaultRetryAfter))),
		set(addHeader(wire.HeaderRetryAfterMs, overloadedUnless(wire.HeaderRetryAfter, defaultRetryAfter, defaultRetryAfterMs))),
	)}
}

// limitHeaders puts a client's standing on a route's answers. What a server says
// of its own limits goes, also the fields that have no counterpart in a standing:
// it counts all of this gateway's callers as one, and its numbers beside the
// caller's own would contradict them.
func limitHeaders(cfg *fleet.Config, r fleet.Route) *anypb.Any {
	out := []*mutationv3.HeaderMutation{remove(wire.HeaderRecommendedConcurrency)}
	told := func(name string) *mutationv3.HeaderMutation {
		return set(setHeader(name, metadataValue(wire.NamespaceLimit, name)))
	}
	if cfg.LimitOf(r.Name) != nil {
		out = append(out, removePrefix(rateLimitPrefix), remove(wire.HeaderRateLimit), remove(wire.HeaderRateLimitPolicy))
		for _, name := range standingHeaders {
			out = append(out, told(name))
		}
	}
	out = append(out, told(wire.HeaderRecommendedConcurrency)) // refusals tell it on any route
	return packed(&headermutationv3.HeaderMutationPerRoute{Mutations: answers(out...)})
}

// rateLimitPrefix begins the names of the limit fields that servers send.
const rateLimitPrefix = "x-ratelimit-"

var standingHeaders = []string{
	wire.HeaderRateLimitLimit, wire.HeaderRateLimitRemaining, wire.HeaderRateLimitReset,
	wire.HeaderRateLimitLimitTokens, wire.HeaderRateLimitRemainingTokens, wire.HeaderRateLimitResetTokens,
	wire.HeaderRateLimit, wire.HeaderRateLimitPolicy,
}

func answers(changes ...*mutationv3.HeaderMutation) *headermutationv3.Mutations {
	return &headermutationv3.Mutations{ResponseMutations: changes}
}

func set(h *corev3.HeaderValueOption) *mutationv3.HeaderMutation {
	return &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_Append{Append: h}}
}

func remove(name string) *mutationv3.HeaderMutation {
	return &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_Remove{Remove: name}}
}

// removePrefix takes out every header whose name begins so.
func removePrefix(prefix string) *mutationv3.HeaderMutation {
	return &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_RemoveOnMatch_{
		RemoveOnMatch: &mutationv3.HeaderMutation_RemoveOnMatch{
			KeyMatcher: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: prefix}},
		},
	}}
}

// servedBy names the pool whose server answered, and nothing on answers that
// Envoy or ext_proc made up.
var servedBy = cel("response.code_details == 'via_upstream' ? xds.cluster_name : ''")

// overloaded holds for the answers of servers that others may come back from
// later. Envoy's own answers, and ext_proc's, say by themselves what to do.
const overloaded = "(response.code == 429 || response.code == 503 || response.code == 529) && response.code_details == 'via_upstream'"

// overloadedWithout prints value where an overloaded server has sent no such
// header, else nothing.
func overloadedWithout(header, value string) string {
	return cel(fmt.Sprintf("%s && !('%s' in response.headers) ? '%s' : ''", overloaded, header, value))
}

// overloadedUnless is the same where the header may also have one given value, or
// one that is no wait. SDKs let retry-after-ms win over retry-after, so it is added
// only where the server has not given another time in seconds.
func overloadedUnless(header, harmless, value string) string {
	return cel(fmt.Sprintf("%s && (!('%[2]s' in response.headers) || response.headers['%[2]s'] == '%[3]s' || !response.headers['%[2]s'].matches('%[5]s')) ? '%[4]s' : ''",
		overloaded, header, harmless, value, aWait))
}

// aWait is what a retry-after looks like that callers can use: a number, of several the
// first (Envoy's expressions join header lines by commas), or a date of HTTP, which begins so.
const aWait = "^([0-9.]+ *(,|$)|Mon|Tue|Wed|Thu|Fri|Sat|Sun)"

// cel is the command operator that prints an expression's value.
func cel(expression string) string {
	return "%CEL(" + strings.TrimSpace(expression) + ")%"
}
