package extproc

import (
	"bytes"
	"fmt"
	"strconv"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// dumbScan is the oracle: the same reading with the generated types.
func dumbScan(m *extprocv3.ProcessingRequest) request {
	r := request{observe: m.GetObservabilityMode(), kind: dumbKind(m)}
	if h := m.GetRequestHeaders(); h != nil {
		r.endOfStream = h.GetEndOfStream()
		for _, header := range h.GetHeaders().GetHeaders() {
			value := header.GetRawValue()
			if len(value) == 0 {
				value = []byte(header.GetValue())
			}
			switch header.GetKey() {
			case "x-route-strategy":
				r.ask(value)
			case "max_tokens", "x-max-tokens", "max-tokens":
				r.header = r.header.Or(DeclaredText(value))
			case "temperature":
				r.sampling.temperature(value)
			case "top_k":
				r.sampling.topK(value)
			case "x-request-id":
				r.requestID = value
			case "x-session-affinity":
				r.affinity = value
			case "content-length":
				r.bodyBytes = 0
				if n, err := strconv.ParseUint(string(value), 10, 63); err == nil && len(value) <= 18 {
					r.bodyBytes = int64(n)
				}
			}
		}
	}
	peek := m.GetMetadataContext().GetFilterMetadata()["fairlead.peek"].GetFields()
	r.peeked = len(peek) > 0
	for _, key := range []string{"max_tokens", "max_completion_tokens", "max_output_tokens"} {
		v, ok := peek[key]
		if !ok {
			continue
		}
		switch v := v.GetKind().(type) {
		case *structpb.Value_NumberValue:
			r.body = r.body.Or(DeclaredNumber(v.NumberValue))
		case *structpb.Value_StringValue:
			r.body = r.body.Or(DeclaredText([]byte(v.StringValue)))
		default:
			r.body = r.body.Or(Declared{Seen: true})
		}
	}
	r.stream = peek["stream"].GetBoolValue()
	r.cacheKey = []byte(peek["prompt_cache_key"].GetStringValue())
	r.bodyError = peek["error"].GetBoolValue()
	attributes := m.GetAttributes()["envoy.filters.http.ext_proc"].GetFields()
	r.cluster = []byte(attributes["xds.cluster_name"].GetStringValue())
	r.route = []byte(attributes["xds.route_name"].GetStringValue())
	r.source = []byte(attributes["source.address"].GetStringValue())
	r.zone = []byte(attributes["xds.node.locality.zone"].GetStringValue())
	return r
}

func dumbKind(m *extprocv3.ProcessingRequest) kind {
	switch m.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return kindRequestHeaders
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return kindResponseHeaders
	case *extprocv3.ProcessingRequest_RequestBody:
		return kindRequestBody
	case *extprocv3.ProcessingRequest_ResponseBody:
		return kindResponseBody
	case *extprocv3.ProcessingRequest_RequestTrailers:
		return kindRequestTrailers
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		return kindResponseTrailers
	}
	return kindNone
}

func same(a, b request) bool {
	return bytes.Equal(a.requestID, b.requestID) && bytes.Equal(a.cluster, b.cluster) && bytes.Equal(a.route, b.route) &&
		bytes.Equal(a.source, b.source) && a.kind == b.kind && a.observe == b.observe && a.endOfStream == b.endOfStream &&
		a.strategy == b.strategy && a.header == b.header && a.peeked == b.peeked && a.body == b.body &&
		a.bodyError == b.bodyError && a.sampling == b.sampling && a.stream == b.stream && a.bodyBytes == b.bodyBytes &&
		bytes.Equal(a.zone, b.zone) && bytes.Equal(a.affinity, b.affinity) && bytes.Equal(a.cacheKey, b.cacheKey)
}

func drawValue(t *rapid.T) *structpb.Value {
	switch rapid.IntRange(0, 6).Draw(t, "value") {
	case 0:
		return structpb.NewNumberValue(rapid.Float64().Draw(t, "number"))
	case 1:
		return structpb.NewStringValue(rapid.SampledFrom([]string{"", "512", "chat", "h100", "nonsense"}).Draw(t, "text"))
	case 2:
		return structpb.NewBoolValue(rapid.Bool().Draw(t, "bool"))
	case 3:
		return structpb.NewNullValue()
	case 4:
		return structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{structpb.NewNumberValue(3)}})
	case 5:
		return structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"max_tokens": structpb.NewNumberValue(9)}})
	}
	return &structpb.Value{}
}

func drawStructs(t *rapid.T, names, keys []string) map[string]*structpb.Struct {
	out := map[string]*structpb.Struct{}
	for range rapid.IntRange(0, 3).Draw(t, "structs") {
		s := &structpb.Struct{Fields: map[string]*structpb.Value{}}
		for range rapid.IntRange(0, 6).Draw(t, "fields") {
			s.Fields[rapid.SampledFrom(keys).Draw(t, "key")] = drawValue(t)
		}
		out[rapid.SampledFrom(names).Draw(t, "name")] = s
	}
	return out
}

func drawHeaders(t *rapid.T) *corev3.HeaderMap {
	h := &corev3.HeaderMap{}
	for range rapid.IntRange(0, 8).Draw(t, "headers") {
		v := &corev3.HeaderValue{Key: rapid.SampledFrom([]string{":path", "x-route-strategy", "max_tokens", "x-max-tokens",
			"max-tokens", "x-request-id", "content-length", "x-session-affinity", "Max_Tokens", "temperature", "top_k", ""}).Draw(t, "key")}
		text := rapid.SampledFrom([]string{"", "legacy", "dynamic", "16", "1e3", "-7", "+7", "123456789012345678", "1234567890123456789", "junk", "\x00\xff"}).Draw(t, "text")
		if rapid.Bool().Draw(t, "raw") {
			v.RawValue = []byte(text)
		} else if text != "\x00\xff" {
			v.Value = text
		}
		h.Headers = append(h.Headers, v)
	}
	return h
}

func drawMessage(t *rapid.T) *extprocv3.ProcessingRequest {
	m := &extprocv3.ProcessingRequest{
		ObservabilityMode: rapid.Bool().Draw(t, "observe"),
		Attributes: drawStructs(t, []string{wire.AttributesKey, "another"},
			[]string{wire.AttributeClusterName, wire.AttributeRouteName, wire.AttributeSource, wire.AttributeZone, "x"}),
	}
	if rapid.Bool().Draw(t, "metadata") {
		m.MetadataContext = &corev3.Metadata{FilterMetadata: drawStructs(t, []string{wire.NamespacePeek, "fairlead.log", ""},
			[]string{"max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "error", "model", "prompt_cache_key"})}
	}
	end := rapid.Bool().Draw(t, "end")
	headers := &extprocv3.HttpHeaders{Headers: drawHeaders(t), EndOfStream: end}
	switch rapid.IntRange(0, 8).Draw(t, "phase") {
	case 0:
	case 1:
		m.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers}
	case 2:
		m.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("x"), EndOfStream: end}}
	case 3:
		m.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{}}
	case 4:
		m.Request = &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}
	case 5:
		m.Request = &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}
	default:
		m.Request = &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: headers}
	}
	return m
}

func TestScannerReadsWhatTheGeneratedTypesRead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMessage(t)
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var got request
		if err := got.scan(b); err != nil {
			t.Fatal(err)
		}
		if want := dumbScan(m); !same(got, want) {
			t.Fatalf("scanner: %+v\ngenerated types: %+v", got, want)
		}
	})
}

func TestScannerRefusesTruncatedMessagesAndNothingElse(t *testing.T) {
	whole := marshal(t, chat(map[string]string{"max_tokens": "16"}).proto())
	m := &extprocv3.ProcessingRequest{}
	for n := range whole {
		var r request
		ours, theirs := r.scan(whole[:n]), proto.Unmarshal(whole[:n], m)
		if (ours == nil) != (theirs == nil) {
			t.Errorf("first %d bytes: scanner says %v, protobuf %v", n, ours, theirs)
		}
	}
}

func TestLastMemberOfTheOneofWins(t *testing.T) {
	headers := marshal(t, message{headers: map[string]string{"max_tokens": "16"}}.proto())
	body := marshal(t, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{}}})
	for name, b := range map[string][]byte{
		"body after headers": append(bytes.Clone(headers), body...),
		"headers after body": append(bytes.Clone(body), headers...),
	} {
		var got request
		if err := got.scan(b); err != nil {
			t.Fatal(err)
		}
		m := &extprocv3.ProcessingRequest{}
		if err := proto.Unmarshal(b, m); err != nil {
			t.Fatal(err)
		}
		if want := dumbScan(m); !same(got, want) {
			t.Errorf("%s: %+v; want %+v", name, got, want)
		}
	}
}

func TestScannerPassesOverTenThousandAttributes(t *testing.T) {
	m := chat(nil).proto()
	for i := range 10_000 {
		m.Attributes[fmt.Sprint(i)] = mustStruct(map[string]any{"xds.route_name": "wrong"})
	}
	var r request
	if err := r.scan(marshal(t, m)); err != nil || string(r.route) != "chat" {
		t.Errorf("route %q, %v", r.route, err)
	}
}
