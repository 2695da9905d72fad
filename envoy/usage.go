package envoy

import (
	"slices"

	matchingv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	jsonparserv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/content_parsers/json/v3"
	aiprotocolv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ai_protocol_manager/v3"
	jsonmetadatav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/json_to_metadata/v3"
	ssev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/sse_to_metadata/v3"
	aiv3 "github.com/envoyproxy/go-control-plane/envoy/type/ai/v3"
	metadatav3 "github.com/envoyproxy/go-control-plane/envoy/type/metadata/v3"
	tracingv3 "github.com/envoyproxy/go-control-plane/envoy/type/tracing/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// namespaceUsage is where Envoy's token counter leaves its typed metadata.
const namespaceUsage = "envoy.ai.token_usage"

// largestEvent bounds one event of a streamed answer that is looked into; larger
// ones pass unread.
const largestEvent = 64 << 10

// largestCount bounds the tokens that are believed of one answer; larger numbers
// are a server's fault.
const largestCount = "1000000000.0"

// Keys of wire.NamespaceSSE.
const (
	keySSEError  = "error"
	keySSEOutput = "output"
)

// completionsPath is where answers have the shape of chat completions, but not
// always the marks by which the counter knows them: it tells the APIs apart by
// itself, and finds nothing in a legacy completion (measured on Envoy 1.40.0).
const completionsPath = `[^?]*/completions/*(?:\?.*)?`

// countUsage picks, for a route's requests, the filters that read the tokens used
// beside the given ones.
func countUsage(filters ...*corev3.TypedExtensionConfig) *matchingv3.Matcher {
	m := execute(slices.Concat(filters, usageFilters(aiv3.LLMProtocol_LLM_PROTOCOL_UNSPECIFIED))...)
	completions := execute(slices.Concat(filters, usageFilters(aiv3.LLMProtocol_OPENAI_CHAT_COMPLETIONS))...)
	m.MatcherType = &matchingv3.Matcher_MatcherList_{MatcherList: &matchingv3.Matcher_MatcherList{
		Matchers: []*matchingv3.Matcher_MatcherList_FieldMatcher{{
			Predicate: requestHeader(":path", completionsPath), OnMatch: completions.GetOnNoMatch(),
		}},
	}}
	return m
}

// usageFilters read the tokens used out of answers, and change no byte of them.
//
// The counter works on complete answers in the shape of a known API, and leaves
// nothing for streams that break off; for those, and for error events in a 200,
// the other one keeps what the stream had told so far. The counter's own request
// handling is never asked for: it rewrites answers, and stalled long streams
// (measured on Envoy 1.40.0).
func usageFilters(shape aiv3.LLMProtocol) []*corev3.TypedExtensionConfig {
	return []*corev3.TypedExtensionConfig{
		extension("envoy.filters.http.sse_to_metadata", &ssev3.SseToMetadata{
			ResponseRules: &ssev3.SseToMetadata_ProcessingRules{
				MaxEventSize: u32(largestEvent),
				ContentParser: extension("envoy.content_parsers.json", &jsonparserv3.JsonContentParser{
					Rules: []*jsonparserv3.JsonContentParser_RuleConfig{
						// An object with a message is what both dialects send; one with a
						// type alone is one too.
						eventRule(keySSEError, structpb.NewBoolValue(true), "error", "message"),
						eventRule(keySSEError, structpb.NewBoolValue(true), "error", "type"),
						eventRule(keySSEOutput, nil, "usage", "completion_tokens"),
						eventRule(keySSEOutput, nil, "usage", "output_tokens"),
					},
				}),
			},
		}),
		extension("envoy.filters.http.ai_protocol_manager", &aiprotocolv3.AiProtocolManager{
			ResponseHandling: &aiprotocolv3.ResponseHandling{
				TokenUsage: &aiprotocolv3.TokenUsageExtraction{
					// The filter stands only on routes that want it.
					IncludeUnconfiguredRoutes: true,
					DefaultLlmProtocol:        shape,
				},
			},
		}),
	}
}

// eventRule writes a constant, or else what it finds, for the last event that has
// the path.
func eventRule(key string, value *structpb.Value, path ...string) *jsonparserv3.JsonContentParser_RuleConfig {
	pair := &jsonmetadatav3.JsonToMetadata_KeyValuePair{MetadataNamespace: wire.NamespaceSSE, Key: key}
	if value != nil {
		pair.ValueType = &jsonmetadatav3.JsonToMetadata_KeyValuePair_Value{Value: value}
	}
	return &jsonparserv3.JsonContentParser_RuleConfig{
		Rule: &jsonmetadatav3.JsonToMetadata_Rule{Selectors: selectors(path...), OnPresent: pair},
	}
}

// usageTags put what usageFilters found into downstream entries; they are absent
// where nothing was found. The counter's metadata is typed: it would come with an
// entry only together with some untyped metadata, while an expression reads it
// always. Tags and record are 180 bytes in an entry; entries of other routes stay
// as they are, and the tags' evaluation is lost in the noise there (285 µs of CPU
// a request with them and without, 9 interleaved rounds of 2,000; all measured on
// Envoy 1.40.0).
func usageTags() []*tracingv3.CustomTag {
	const counted = `metadata.typed_filter_metadata["` + namespaceUsage + `"]`
	value := func(tag, expression string) *tracingv3.CustomTag {
		return &tracingv3.CustomTag{Tag: tag, Type: &tracingv3.CustomTag_Value{Value: cel(expression)}}
	}
	// A record without counts, of an answer that could not be read, would read as
	// 0; cached tokens are 0 where the server tells of none.
	count := func(tag, known, field string) *tracingv3.CustomTag {
		n := counted + "." + field
		return value(tag, "has("+counted+"."+known+") && double("+n+") <= "+largestCount+" ? "+n+" : ''")
	}
	// The counter leaves out what is no count; here it may be any JSON value, and
	// numbers of seven digits and more would come rounded.
	const output = `metadata.filter_metadata["` + wire.NamespaceSSE + `"]["` + keySSEOutput + `"]`
	found := func(tag, key string) *tracingv3.CustomTag {
		return &tracingv3.CustomTag{Tag: tag, Type: &tracingv3.CustomTag_Metadata_{
			Metadata: &tracingv3.CustomTag_Metadata{
				Kind: &metadatav3.MetadataKind{Kind: &metadatav3.MetadataKind_Request_{Request: &metadatav3.MetadataKind_Request{}}},
				MetadataKey: &metadatav3.MetadataKey{
					Key: wire.NamespaceSSE,
					Path: []*metadatav3.MetadataKey_PathSegment{{
						Segment: &metadatav3.MetadataKey_PathSegment_Key{Key: key},
					}},
				},
			},
		}}
	}
	return []*tracingv3.CustomTag{
		count(wire.TagInput, "input_tokens", "input_tokens"),
		count(wire.TagCached, "input_tokens", "input_token_details.cached_tokens"),
		count(wire.TagOutput, "output_tokens", "output_tokens"),
		found(wire.TagSSEError, keySSEError),
		value(wire.TagSSEOutput, "type("+output+") == double && "+output+" >= 0.0 && "+output+" <= "+largestCount+
			" && double(int("+output+")) == "+output+" ? int("+output+") : ''"),
	}
}
