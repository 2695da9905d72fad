package extproc

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
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
			case "x-envoy-external-address":
				r.madeID = true
			case "x-session-affinity":
				r.affinity = value
			case "content-length":
				r.bodyBytes = 0
				if n, err := strconv.ParseUint(string(value), 10, 63); err == nil && len(value) <= 18 {
					r.bodyBytes = int64(n)
				}
			case "authorization":
				r.shown.authorization.add(value)
			case "x-api-key":
				r.shown.apiKey.add(value)
			case "x-request-class":
				r.pace.batch = r.pace.batch || string(value) == "batch"
			case "x-stainless-timeout":
				r.pace.timeout = value
			case "x-stainless-read-timeout":
				r.pace.readTimeout = value
			case "x-stainless-retry-count":
				r.pace.retries = value
			case "grpc-timeout":
				r.pace.grpcTimeout = value
			}
		}
	}
	r.endOfStream = r.endOfStream || m.GetResponseHeaders().GetEndOfStream()
	for _, header := range m.GetResponseHeaders().GetHeaders().GetHeaders() {
		value := header.GetRawValue()
		if len(value) == 0 {
			value = []byte(header.GetValue())
		}
		switch key := header.GetKey(); {
		case key == ":status":
			r.status = 0
			if n, err := strconv.ParseUint(string(value), 10, 63); err == nil && len(value) <= 18 {
				r.status = int(min(n, 1000))
			}
		case len(value) > 0 && (strings.Contains(key, "retry") || strings.Contains(key, "ratelimit") || key == "x-recommended-concurrency"):
			r.notes = append(r.notes, note{[]byte(key), value})
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
	r.user = []byte(peek["user"].GetStringValue())
	switch v := peek["n"].GetKind().(type) {
	case *structpb.Value_NumberValue:
		r.answers = DeclaredNumber(v.NumberValue).Tokens
	case *structpb.Value_StringValue:
		r.answers = DeclaredText([]byte(v.StringValue)).Tokens
	}
	r.bodyError = peek["error"].GetBoolValue()
	attributes := m.GetAttributes()["envoy.filters.http.ext_proc"].GetFields()
	r.cluster = []byte(attributes["xds.cluster_name"].GetStringValue())
	r.route = []byte(attributes["xds.route_name"].GetStringValue())
	r.source = []byte(attributes["source.address"].GetStringValue())
	r.zone = []byte(attributes["xds.node.locality.zone"].GetStringValue())
	r.uriSAN = []byte(attributes["connection.uri_san_peer_certificate"].GetStringValue())
	r.subject = []byte(attributes["connection.subject_peer_certificate"].GetStringValue())
	return r
}

func dumbClaim(m *extprocv3.ProcessingRequest, name string) string {
	claims := m.GetMetadataContext().GetFilterMetadata()["envoy.filters.http.jwt_authn"].GetFields()["claims"]
	switch v := claims.GetStructValue().GetFields()[name].GetKind().(type) {
	case *structpb.Value_NumberValue:
		return strconv.FormatFloat(v.NumberValue, 'f', -1, 64)
	case *structpb.Value_StringValue:
		return v.StringValue
	}
	return ""
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

// same compares what two scans found; empty and nil slices are the same.
func same(a, b request) bool {
	for _, pair := range [][2][]byte{
		{a.requestID, b.requestID}, {a.cluster, b.cluster}, {a.route, b.route}, {a.source, b.source}, {a.zone, b.zone},
		{a.affinity, b.affinity}, {a.cacheKey, b.cacheKey}, {a.user, b.user}, {a.uriSAN, b.uriSAN}, {a.subject, b.subject},
		{a.shown.authorization.value, b.shown.authorization.value}, {a.shown.apiKey.value, b.shown.apiKey.value},
		{a.pace.timeout, b.pace.timeout}, {a.pace.readTimeout, b.pace.readTimeout},
		{a.pace.grpcTimeout, b.pace.grpcTimeout}, {a.pace.retries, b.pace.retries},
	} {
		if !bytes.Equal(pair[0], pair[1]) {
			return false
		}
	}
	return a.kind == b.kind && a.observe == b.observe && a.endOfStream == b.endOfStream &&
		a.strategy == b.strategy && a.header == b.header && a.peeked == b.peeked && a.body == b.body &&
		a.bodyError == b.bodyError && a.sampling == b.sampling && a.stream == b.stream && a.bodyBytes == b.bodyBytes &&
		a.answers == b.answers && a.madeID == b.madeID && a.pace.batch == b.pace.batch &&
		a.shown.authorization.ambiguous == b.shown.authorization.ambiguous && a.shown.apiKey.ambiguous == b.shown.apiKey.ambiguous &&
		a.status == b.status && slices.EqualFunc(a.notes, b.notes, func(x, y note) bool {
		return bytes.Equal(x.key, y.key) && bytes.Equal(x.value, y.value)
	})
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
			"max-tokens", "x-request-id", "x-envoy-external-address", "content-length", "x-session-affinity", "Max_Tokens", "temperature", "top_k", "",
			"authorization", "x-api-key", "x-request-class", "x-stainless-timeout", "x-stainless-read-timeout", "x-stainless-retry-count",
			"grpc-timeout", ":status", "retry-after", "retry-after-ms", "x-ratelimit-reset-tokens", "x-recommended-concurrency"}).Draw(t, "key")}
		text := rapid.SampledFrom([]string{"", "legacy", "batch", "429", "5S", "dynamic", "16", "1e3", "-7", "+7", "123456789012345678", "1234567890123456789", "junk", "\x00\xff"}).Draw(t, "text")
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
			[]string{wire.AttributeClusterName, wire.AttributeRouteName, wire.AttributeSource, wire.AttributeZone, wire.AttributeURISAN, wire.AttributeSubject, "x"}),
	}
	if rapid.Bool().Draw(t, "metadata") {
		m.MetadataContext = &corev3.Metadata{FilterMetadata: drawStructs(t, []string{wire.NamespacePeek, wire.NamespaceJWT, "fairlead.log", ""},
			[]string{"max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "error", "model", "prompt_cache_key", "n", "user", "claims"})}
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
		if got, want := claim(got.claims, "max_tokens", nil), dumbClaim(m, "max_tokens"); string(got) != want {
			t.Fatalf("claim: scanner %q, generated types %q", got, want)
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

// TestWhoMadeTheIDGoesWithTheID: of two sets of request headers with an answer's
// between them the last counts alone.
func TestWhoMadeTheIDGoesWithTheID(t *testing.T) {
	made, own := fromOutside("made"), chat(map[string]string{"x-request-id": "own"})
	var r request
	for _, row := range []struct {
		first, last message
		id          string
		made        bool
	}{{made, own, "own", false}, {own, made, "made", true}} {
		b := slices.Concat(marshal(t, row.first.proto()), marshal(t, answer("200")), marshal(t, row.last.proto()))
		if err := r.scan(b); err != nil || string(r.requestID) != row.id || r.madeID != row.made {
			t.Errorf("id %q, made %v, %v; want %q, %v", r.requestID, r.madeID, err, row.id, row.made)
		}
	}
}

// FuzzScan compares the scanner with the generated types on any message that
// those can read, in its canonical form; on anything else it must only not panic.
func FuzzScan(f *testing.F) {
	everything := chat(map[string]string{"authorization": "Bearer a", "x-api-key": "k", "x-request-class": "batch", "max_tokens": "1e3, 5",
		"x-stainless-timeout": "60", "x-stainless-read-timeout": "1e9", "x-stainless-retry-count": "2", "grpc-timeout": "5S",
		"content-length": "123", "x-session-affinity": "s", "temperature": "0.5", "top_k": "-1", "x-request-id": "r", "x-envoy-external-address": "192.0.2.1", "x-route-strategy": "legacy"})
	everything.peek["n"], everything.peek["user"], everything.claims = 4, "u", map[string]any{"sub": 7}
	everything.san, everything.subject, everything.zone = "spiffe://a", "CN=a", "z"
	f.Add(marshal(f, everything.proto()))
	f.Add(marshal(f, answer("429", "retry-after", "3", "anthropic-ratelimit-requests-reset", "2026-03-01T12:00:07Z")))
	f.Add(append(marshal(f, everything.proto()), marshal(f, answer("200"))...))
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		var got request
		err := got.scan(b)
		m := &extprocv3.ProcessingRequest{}
		if proto.Unmarshal(b, m) != nil {
			return
		}
		if err != nil {
			t.Fatalf("generated types read what the scanner doesn't: %v", err)
		}
		if err := got.scan(marshal(t, m)); err != nil {
			t.Fatal(err)
		}
		if want := dumbScan(m); !same(got, want) {
			t.Fatalf("scanner: %+v\ngenerated types: %+v", got, want)
		}
		if got, want := claim(got.claims, "sub", nil), dumbClaim(m, "sub"); string(got) != want {
			t.Fatalf("claim: scanner %q, generated types %q", got, want)
		}
	})
}
