package extproc

import (
	"bytes"
	"context"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	protobuf "google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// typicalMessage is a chat request as an SDK sends it through Envoy.
func typicalMessage(t testing.TB) []byte {
	m := chat(map[string]string{
		":authority": "models.example", ":scheme": "http", "user-agent": "OpenAI/Python 3.3.1", "accept": "application/json",
		"accept-encoding": "gzip, deflate", "authorization": "Bearer sk-0123456789abcdef0123456789abcdef0123456789abcdef",
		"x-stainless-lang": "python", "x-stainless-package-version": "3.3.1", "x-stainless-os": "Linux",
		"x-stainless-arch": "x64", "x-stainless-runtime": "CPython", "x-stainless-retry-count": "0",
		"x-stainless-read-timeout": "600", "content-length": "2345", "x-forwarded-proto": "http",
		"x-request-id": "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55", "x-envoy-external-address": "10.20.30.40",
		"x-fairlead-draw": "123456",
	})
	m.peek["stream"], m.peek["prompt_cache_key"] = true, "3f0c8a55-9c3e"
	return marshal(t, m.proto())
}

type nullLedger struct{}

func (nullLedger) Reserve(string, fleet.EndpointKey, int32, time.Duration, time.Time) bool {
	return true
}
func (nullLedger) Cancel(string) {}

func benchWorld(t testing.TB) *world {
	return newWorld(t, func(in *plan.Inputs, o *Options) {
		in.Routes[0].Affinity = fleet.AffinitySession
		o.Observe, o.Ledger, o.Now = nil, nullLedger{}, time.Now
		ids, _ := NewIDs(7, time.Now)
		o.IDs = ids
	})
}

// once is one stream through codec and service, without a transport.
type once struct {
	codec rawCodec
	in    mem.BufferSlice
}

func (o *once) Context() context.Context { return context.Background() }

func (o *once) RecvMsg(m any) error { return o.codec.Unmarshal(o.in, m) }

func (o *once) SendMsg(m any) error {
	out, err := o.codec.Marshal(m)
	out.Free()
	return err
}

func newOnce(t testing.TB) *once {
	return &once{codec: rawCodec{encoding.GetCodecV2(proto.Name)}, in: mem.BufferSlice{mem.SliceBuffer(typicalMessage(t))}}
}

func TestFullDecisionAllocatesLittle(t *testing.T) {
	limited := admission.Verdict{Admitted: true, Reason: admission.ReasonAdmitted, Standing: standing, Concurrency: 5}
	for _, row := range []struct {
		name  string
		gate  Admission
		claim bool
		spelt string // the authorization's scheme
		most  float64
	}{
		// The id's string for the ledger, grpc's slice and buffer around the answer.
		{"no admission", nil, false, "Bearer", 4},
		{"admission", quiet{}, false, "Bearer", 5},
		{"another spelling", quiet{}, false, "BEARER", 5},
		{"limit and hint", &steady{verdict: limited}, false, "Bearer", 5},
		{"refusal", &steady{verdict: admission.Verdict{Reason: admission.ReasonTokens, Standing: standing}}, false, "Bearer", 5},
		{"claim of a token", quiet{}, true, "Bearer", 5},
	} {
		w, st := benchWorld(t), newOnce(t)
		typical := bytes.Replace(typicalMessage(t), []byte("Bearer"), []byte(row.spelt), 1)
		st.in = mem.BufferSlice{mem.SliceBuffer(typical)}
		w.o.Admission = row.gate
		if row.claim {
			w.plan.RouteInfo(0).ClientKey, w.plan.RouteInfo(0).Claim = fleet.ClientKeyJWT, "sub"
			m := &extprocv3.ProcessingRequest{}
			_ = protobuf.Unmarshal(typical, m)
			m.MetadataContext.FilterMetadata[wire.NamespaceJWT] = mustStruct(map[string]any{wire.KeyClaims: map[string]any{"sub": 1e9}})
			st.in = mem.BufferSlice{mem.SliceBuffer(marshal(t, m))}
		}
		got := testing.AllocsPerRun(1000, func() {
			if err := w.process(st); err != nil {
				t.Fatal(err)
			}
		})
		if got > row.most {
			t.Errorf("%s: %v allocations per decision", row.name, got)
		}
	}
}

// steady is an Admission with one verdict.
type steady struct {
	quiet
	verdict admission.Verdict
}

func (s *steady) Admit(*admission.Ask) admission.Verdict { return s.verdict }

func BenchmarkFullDecision(b *testing.B)         { benchDecision(b, nil) }
func BenchmarkFullDecisionAdmitted(b *testing.B) { benchDecision(b, quiet{}) }
func BenchmarkFullDecisionOfALimit(b *testing.B) {
	benchDecision(b, &steady{verdict: admission.Verdict{Admitted: true, Reason: admission.ReasonAdmitted, Standing: standing}})
}

func benchDecision(b *testing.B, gate Admission) {
	w, st := benchWorld(b), newOnce(b)
	w.o.Admission = gate
	b.ReportAllocs()
	for b.Loop() {
		if err := w.process(st); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkStockCodec is what a server with generated types pays for reading
// the same message and writing an empty answer, deciding nothing.
func BenchmarkStockCodec(b *testing.B) {
	codec := encoding.GetCodecV2(proto.Name)
	in := mem.BufferSlice{mem.SliceBuffer(typicalMessage(b))}
	b.ReportAllocs()
	for b.Loop() {
		r := &extprocv3.ProcessingRequest{}
		if err := codec.Unmarshal(in, r); err != nil {
			b.Fatal(err)
		}
		out, err := codec.Marshal(emptyHeadersAnswer())
		if err != nil {
			b.Fatal(err)
		}
		out.Free()
	}
}

func emptyHeadersAnswer() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}}}
}

type emptyServer struct {
	extprocv3.UnimplementedExternalProcessorServer
}

func (emptyServer) Process(s extprocv3.ExternalProcessor_ProcessServer) error {
	if _, err := s.Recv(); err != nil {
		return err
	}
	return s.Send(emptyHeadersAnswer())
}

// The two socket benchmarks include the same client, so their difference is
// the servers'.
func BenchmarkSocketFullDecision(b *testing.B) {
	w := benchWorld(b)
	w.o.Admission = quiet{}
	benchSocket(b, serveOn(b, w.Register, ServerOptions()...))
}

func BenchmarkSocketStockEmptyServer(b *testing.B) {
	benchSocket(b, serveOn(b, func(g *grpc.Server) { extprocv3.RegisterExternalProcessorServer(g, emptyServer{}) }))
}

// rawClient sends prepared bytes and reads none, so that the client costs little.
type rawClient struct{ message []byte }

func (c rawClient) Marshal(any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(c.message)}, nil
}
func (rawClient) Unmarshal(mem.BufferSlice, any) error { return nil }
func (rawClient) Name() string                         { return "proto" }

func benchSocket(b *testing.B, conn *grpc.ClientConn) {
	codec := grpc.ForceCodecV2(rawClient{typicalMessage(b)})
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	b.ReportAllocs()
	for b.Loop() {
		st, err := conn.NewStream(b.Context(), desc, "/"+ServiceName+"/Process", codec)
		if err != nil {
			b.Fatal(err)
		}
		if err := st.SendMsg(st); err != nil {
			b.Fatal(err)
		}
		if err := st.RecvMsg(st); err != nil {
			b.Fatal(err)
		}
		if err := st.RecvMsg(st); err == nil {
			b.Fatal("the stream goes on")
		}
	}
}
