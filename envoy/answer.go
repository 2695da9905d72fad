package envoy

import (
	"fmt"
	"strings"

	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// answerHeaders is a filter that ext_proc's response phase comes before, unlike
// headers that routes add. So ext_proc sees the retry fields and limits that a
// server itself has sent, and what it adds is there when this filter looks for
// what is missing, also when ext_proc is dead.
func answerHeaders() *headermutationv3.HeaderMutation {
	return &headermutationv3.HeaderMutation{Mutations: mutations(
		addHeader(wire.HeaderRetryAfter, overloadedWithout(wire.HeaderRetryAfterMs, defaultRetryAfter)),
		addHeader(wire.HeaderRetryAfterMs, overloadedUnless(wire.HeaderRetryAfter, defaultRetryAfter, defaultRetryAfterMs)),
	)}
}

// limitHeaders puts a client's standing on a route's answers, or is nil. What a
// server says of its own limits gives way: it counts all of this gateway's
// callers as one.
func limitHeaders(cfg *fleet.Config, r fleet.Route) *anypb.Any {
	var set []*corev3.HeaderValueOption
	if cfg.LimitOf(r.Name) != nil {
		for _, name := range standingHeaders {
			set = append(set, setHeader(name, metadataValue(wire.NamespaceLimit, name)))
		}
	}
	if set != nil || r.FairShare {
		set = append(set, setHeader(wire.HeaderRecommendedConcurrency, metadataValue(wire.NamespaceLimit, wire.HeaderRecommendedConcurrency)))
	}
	if set == nil {
		return nil
	}
	return packed(&headermutationv3.HeaderMutationPerRoute{Mutations: mutations(set...)})
}

var standingHeaders = []string{
	wire.HeaderRateLimitLimit, wire.HeaderRateLimitRemaining, wire.HeaderRateLimitReset,
	wire.HeaderRateLimitLimitTokens, wire.HeaderRateLimitRemainingTokens, wire.HeaderRateLimitResetTokens,
	wire.HeaderRateLimit, wire.HeaderRateLimitPolicy,
}

func mutations(headers ...*corev3.HeaderValueOption) *headermutationv3.Mutations {
	m := &headermutationv3.Mutations{}
	for _, h := range headers {
		m.ResponseMutations = append(m.ResponseMutations, &mutationv3.HeaderMutation{
			Action: &mutationv3.HeaderMutation_Append{Append: h},
		})
	}
	return m
}

// overloaded holds for the answers of servers that others may come back from
// later. Envoy's own answers, and ext_proc's, say by themselves what to do.
const overloaded = "(response.code == 429 || response.code == 503 || response.code == 529) && response.code_details == 'via_upstream'"

// overloadedWithout prints value where an overloaded server has sent no such
// header, else nothing.
func overloadedWithout(header, value string) string {
	return cel(fmt.Sprintf("%s && !('%s' in response.headers) ? '%s' : ''", overloaded, header, value))
}

// overloadedUnless is the same where the header may also have one given value.
// SDKs let retry-after-ms win over retry-after, so it is added only where the
// server has not given another time in seconds.
func overloadedUnless(header, harmless, value string) string {
	return cel(fmt.Sprintf("%s && (!('%[2]s' in response.headers) || response.headers['%[2]s'] == '%[3]s') ? '%[4]s' : ''",
		overloaded, header, harmless, value))
}

// cel is the command operator that prints an expression's value.
func cel(expression string) string {
	return "%CEL(" + strings.TrimSpace(expression) + ")%"
}
