package envoy

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	jsonparserv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/content_parsers/json/v3"
	aiprotocolv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ai_protocol_manager/v3"
	jsonmetadatav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/json_to_metadata/v3"
	ssev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/sse_to_metadata/v3"
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

// Keys of wire.NamespaceSSE.
const (
	keySSEError  = "error"
	keySSEOutput = "output"
)

// usageFilters read the tokens used out of answers, and change no byte of them.
//
// The counter works on complete answers in the shape of any of the known APIs,
// which it tells apart by itself, and leaves nothing for streams that break off;
// for those, and for error events in a 200, the other one keeps what the stream
// had told so far. The counter's own request handling is never asked for: it
// rewrites answers, and stalled long streams (measured on Envoy 1.40.0).
func usageFilters() []*corev3.TypedExtensionConfig {
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
// always (measured on Envoy 1.40.0).
func usageTags() []*tracingv3.CustomTag {
	count := func(tag, field string) *tracingv3.CustomTag {
		return &tracingv3.CustomTag{Tag: tag, Type: &tracingv3.CustomTag_Value{
			Value: `%CEL(metadata.typed_filter_metadata["` + namespaceUsage + `"].` + field + `)%`,
		}}
	}
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
		count(wire.TagInput, "input_tokens"),
		count(wire.TagCached, "input_token_details.cached_tokens"),
		count(wire.TagOutput, "output_tokens"),
		found(wire.TagSSEError, keySSEError),
		found(wire.TagSSEOutput, keySSEOutput),
	}
}
