package envoy

import (
	"fmt"
	"math"
	"slices"
	"strings"

	matchingv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	extensionmatcherv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	skipv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/matcher/action/v3"
	jsonmetadatav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/json_to_metadata/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// peekKeys are the body's top-level fields that decisions need. All of them
// stand in every access-log entry too, so there are no more than needed.
var peekKeys = []string{
	wire.KeyMaxTokens, wire.KeyMaxCompletionTokens, wire.KeyMaxOutputTokens,
	wire.KeyModel, wire.KeyStream, wire.KeyN, wire.KeyPromptCacheKey,
}

// amountKeys are those of them that say how much a request may take.
var amountKeys = []string{wire.KeyMaxTokens, wire.KeyMaxCompletionTokens, wire.KeyMaxOutputTokens, wire.KeyN}

// declaredBudgets are the spellings of the header that declares an output
// budget.
var declaredBudgets = []string{wire.HeaderMaxTokens, wire.HeaderXMaxTokens, wire.HeaderMaxTokensDash}

// A header declares a budget when it is a whole number; anything else is no
// reason to leave the body unread.
const declaredBudgetPattern = "[0-9]{1,9}"

// peekFilter is the body filter behind a matcher that skips it for upgrades and
// unless the content-length has at most that many digits. The filter parses whole
// documents (8 MB of integers: 1.6 s and 780 MB on Envoy 1.40.0), and it would
// hold WebSocket upgrades, with a content-length or without, and CONNECT requests
// for ever; the latter have none, as chunked bodies.
func peekFilter(digits int) *hcmv3.HttpFilter {
	return httpFilter(filterPeek, &extensionmatcherv3.ExtensionWithMatcher{
		ExtensionConfig: extension(filterPeek, peek(peekKeys)),
		XdsMatcher:      skipIf(anyPredicate(leftUnread(digits))),
	})
}

// userFilter reads the body's user on routes that put their own matcher in the
// place of this one, which skips always. It is a second filter because only a
// filter's matcher, and not its rules, can differ by route once it stands behind
// one; and because a matcher, unlike a filter that is switched on by a route, is
// taken from the route that the model has chosen (both measured on Envoy 1.40.0).
func userFilter() *hcmv3.HttpFilter {
	return httpFilter(filterUser, &extensionmatcherv3.ExtensionWithMatcher{
		ExtensionConfig: extension(filterPeek, peek([]string{wire.KeyUser})),
		XdsMatcher:      &matchingv3.Matcher{OnNoMatch: skip()},
	})
}

// readsUser makes a route read the body's user.
func readsUser(digits int) *anypb.Any {
	return picks(skipIf(anyPredicate(leftUnread(digits))))
}

// skipsDeclared makes a route leave bodies unread where a header declares the
// budget.
func skipsDeclared(digits int) *anypb.Any {
	either := leftUnread(digits)
	for _, name := range declaredBudgets {
		either = append(either, requestHeader(name, declaredBudgetPattern))
	}
	return picks(skipIf(anyPredicate(either)))
}

func peek(keys []string) *jsonmetadatav3.JsonToMetadata {
	rules := &jsonmetadatav3.JsonToMetadata_MatchRules{
		AllowContentTypesRegex: &matcherv3.RegexMatcher{Regex: `(?i)application/([^;]*\+)?json\s*(;.*)?`},
	}
	mark := func(key string) *jsonmetadatav3.JsonToMetadata_KeyValuePair {
		return &jsonmetadatav3.JsonToMetadata_KeyValuePair{
			MetadataNamespace: wire.NamespacePeek, Key: key,
			ValueType: &jsonmetadatav3.JsonToMetadata_KeyValuePair_Value{Value: structpb.NewBoolValue(true)},
		}
	}
	for _, key := range keys {
		// Envoy drops strings of more than 8 KiB, and servers in Python read a number
		// behind any number of blanks or zeros. As a number such a string comes. Where
		// the string itself comes too it takes the number's place, since ext_proc
		// reads it as servers do.
		if slices.Contains(amountKeys, key) {
			rules.Rules = append(rules.Rules, &jsonmetadatav3.JsonToMetadata_Rule{
				Selectors: selectors(key),
				OnPresent: &jsonmetadatav3.JsonToMetadata_KeyValuePair{
					MetadataNamespace: wire.NamespacePeek, Key: key, Type: jsonmetadatav3.JsonToMetadata_NUMBER,
				},
			})
		}
		rule := &jsonmetadatav3.JsonToMetadata_Rule{
			Selectors: selectors(key),
			OnPresent: &jsonmetadatav3.JsonToMetadata_KeyValuePair{MetadataNamespace: wire.NamespacePeek, Key: key},
			OnError:   mark(wire.KeyError),
		}
		// Else a body without any of the keys would look like one that was
		// never read.
		if key == wire.KeyModel {
			rule.OnMissing = mark(wire.KeyRead)
		}
		rules.Rules = append(rules.Rules, rule)
	}
	return &jsonmetadatav3.JsonToMetadata{RequestRules: rules}
}

// selectors is a path into a JSON document.
func selectors(keys ...string) []*jsonmetadatav3.JsonToMetadata_Selector {
	var out []*jsonmetadatav3.JsonToMetadata_Selector
	for _, key := range keys {
		out = append(out, &jsonmetadatav3.JsonToMetadata_Selector{
			Selector: &jsonmetadatav3.JsonToMetadata_Selector_Key{Key: key},
		})
	}
	return out
}

// contentLengthPattern lets zeros lead, so that no body hides behind them.
func contentLengthPattern(digits int) string { return fmt.Sprintf("0*[0-9]{1,%d}", digits) }

// largestPeek is the largest body whose content-length has that many digits.
func largestPeek(digits int) uint64 { return uint64(math.Pow10(digits)) - 1 }

// leftUnread are the requests whose bodies are not looked into. Envoy has taken
// the upgrade header out of requests that ask for no upgrade by now.
func leftUnread(digits int) []*matchingv3.Matcher_MatcherList_Predicate {
	return []*matchingv3.Matcher_MatcherList_Predicate{
		not(requestHeader("content-length", contentLengthPattern(digits))),
		requestHeader("upgrade", ".*"),
	}
}

// requestHeader holds when the whole value of a header that is there matches.
func requestHeader(name, pattern string) *matchingv3.Matcher_MatcherList_Predicate {
	return &matchingv3.Matcher_MatcherList_Predicate{
		MatchType: &matchingv3.Matcher_MatcherList_Predicate_SinglePredicate_{
			SinglePredicate: &matchingv3.Matcher_MatcherList_Predicate_SinglePredicate{
				Input: matchingExtension(name, &matcherv3.HttpRequestHeaderMatchInput{HeaderName: name}),
				Matcher: &matchingv3.Matcher_MatcherList_Predicate_SinglePredicate_ValueMatch{
					ValueMatch: &matchingv3.StringMatcher{MatchPattern: &matchingv3.StringMatcher_SafeRegex{
						SafeRegex: &matchingv3.RegexMatcher{
							EngineType: &matchingv3.RegexMatcher_GoogleRe2{GoogleRe2: &matchingv3.RegexMatcher_GoogleRE2{}},
							Regex:      pattern,
						},
					}},
				},
			},
		},
	}
}

func not(p *matchingv3.Matcher_MatcherList_Predicate) *matchingv3.Matcher_MatcherList_Predicate {
	return &matchingv3.Matcher_MatcherList_Predicate{
		MatchType: &matchingv3.Matcher_MatcherList_Predicate_NotMatcher{NotMatcher: p},
	}
}

func anyPredicate(ps []*matchingv3.Matcher_MatcherList_Predicate) *matchingv3.Matcher_MatcherList_Predicate {
	return &matchingv3.Matcher_MatcherList_Predicate{
		MatchType: &matchingv3.Matcher_MatcherList_Predicate_OrMatcher{
			OrMatcher: &matchingv3.Matcher_MatcherList_Predicate_PredicateList{Predicate: ps},
		},
	}
}

// skipIf is a matcher that keeps a filter from running where p holds.
func skipIf(p *matchingv3.Matcher_MatcherList_Predicate) *matchingv3.Matcher {
	return &matchingv3.Matcher{MatcherType: &matchingv3.Matcher_MatcherList_{
		MatcherList: &matchingv3.Matcher_MatcherList{Matchers: []*matchingv3.Matcher_MatcherList_FieldMatcher{{
			Predicate: p, OnMatch: skip(),
		}}},
	}}
}

func skip() *matchingv3.Matcher_OnMatch {
	return &matchingv3.Matcher_OnMatch{OnMatch: &matchingv3.Matcher_OnMatch_Action{
		Action: matchingExtension("skip", &skipv3.SkipFilter{}),
	}}
}

// modelNeeded reports whether a request that route i may see needs its body's
// model. Envoy picks a first route before it reads the body, and what that route
// says of the body filter counts; so an earlier route that needs the body's
// model and may see the same paths goes before a later one that does not.
func modelNeeded(routes []fleet.Route, i int) bool {
	if routes[i].Match.Model != "" {
		return true
	}
	for _, earlier := range routes[:i] {
		if earlier.Match.Model != "" && overlap(earlier.Match.Prefix, routes[i].Match.Prefix) {
			return true
		}
	}
	return false
}

func overlap(a, b string) bool { return strings.HasPrefix(a, b) || strings.HasPrefix(b, a) }
