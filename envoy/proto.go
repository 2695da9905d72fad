package envoy

import (
	"fmt"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// deterministic makes equal messages equal bytes, so that versions that are
// content hashes don't change on their own.
var deterministic = proto.MarshalOptions{Deterministic: true}

// packed wraps a message. It can only fail for strings that are not UTF-8,
// which checkStrings has refused before.
func packed(m proto.Message) *anypb.Any {
	a := &anypb.Any{}
	if err := anypb.MarshalFrom(a, m, deterministic); err != nil {
		panic(fmt.Sprintf("envoy: marshal %T: %v", m, err))
	}
	return a
}

func extension(name string, m proto.Message) *corev3.TypedExtensionConfig {
	return &corev3.TypedExtensionConfig{Name: name, TypedConfig: packed(m)}
}

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

func u32(v uint32) *wrapperspb.UInt32Value { return wrapperspb.UInt32(v) }

func text(s string) *structpb.Value { return structpb.NewStringValue(s) }

func object(fields map[string]*structpb.Value) *structpb.Struct {
	return &structpb.Struct{Fields: fields}
}

// ads is the aggregated stream as a source, with Envoy's default wait of 15 s
// for the first answer.
func ads() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		ResourceApiVersion:    corev3.ApiVersion_V3,
	}
}

// address converts where a process of ours listens.
func address(a fleet.Address) (*corev3.Address, error) {
	if a.Path != "" {
		return pipe(a.Path), nil
	}
	ap, err := parseHost(a.Host)
	if err != nil {
		return nil, err
	}
	return socket(ap), nil
}

func pipe(path string) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: path}}}
}

func grpcService(cluster string) *corev3.GrpcService {
	return &corev3.GrpcService{TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{
		EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{ClusterName: cluster},
	}}
}

// setHeader sets a header, replacing what was there. An empty value sets
// nothing.
func setHeader(key, value string) *corev3.HeaderValueOption {
	return headerOption(key, value, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD)
}

// addHeader sets a header only where it is absent. An empty value sets
// nothing.
func addHeader(key, value string) *corev3.HeaderValueOption {
	return headerOption(key, value, corev3.HeaderValueOption_ADD_IF_ABSENT)
}

func headerOption(key, value string, action corev3.HeaderValueOption_HeaderAppendAction) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: key, Value: value},
		AppendAction: action,
	}
}

// metadataValue is the command operator that prints a dynamic-metadata value,
// or nothing.
func metadataValue(namespace, key string) string {
	return "%DYNAMIC_METADATA(" + namespace + ":" + key + ")%"
}
