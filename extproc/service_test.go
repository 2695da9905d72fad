package extproc

import (
	"errors"
	"io"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

func requestBody() proto.Message {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{}}}
}

func TestStreamNeverEndsWellBeforeTheHeadersAreAnswered(t *testing.T) {
	for name, in := range map[string][][]byte{
		"no message":         nil,
		"body only":          {marshal(t, requestBody())},
		"message without id": {{}},
		"broken":             {{0xff}},
	} {
		st := &fakeStream{in: in}
		if err := newWorld(t).process(st); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: ended with %v", name, err)
		}
	}
}

func TestOtherMessagesGetTheMatchingEmptyAnswer(t *testing.T) {
	st := &fakeStream{}
	phases := []*extprocv3.ProcessingRequest{
		{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{}}},
		{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{}}},
		{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{}}},
		{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}},
		{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}},
		chat(nil).proto(),
		chat(nil).proto(),
	}
	for _, p := range phases {
		st.in = append(st.in, marshal(t, p))
	}
	if err := newWorld(t).process(st); err != nil {
		t.Fatal(err)
	}
	if len(st.in) != 1 || len(st.out) != 6 {
		t.Fatalf("%d messages left, %d answers; the stream ends when the headers are answered", len(st.in), len(st.out))
	}
	for i, want := range []func(*extprocv3.ProcessingResponse) bool{
		func(r *extprocv3.ProcessingResponse) bool { return r.GetResponseHeaders() != nil },
		func(r *extprocv3.ProcessingResponse) bool { return r.GetRequestBody() != nil },
		func(r *extprocv3.ProcessingResponse) bool { return r.GetResponseBody() != nil },
		func(r *extprocv3.ProcessingResponse) bool { return r.GetRequestTrailers() != nil },
		func(r *extprocv3.ProcessingResponse) bool { return r.GetResponseTrailers() != nil },
		func(r *extprocv3.ProcessingResponse) bool { return r.GetRequestHeaders() != nil },
	} {
		if r := readAnswer(t, st.out[i]); !want(r) {
			t.Errorf("answer %d is %v", i, r)
		}
	}
}

func TestEndlessStreamIsEnded(t *testing.T) {
	st := &fakeStream{}
	for range 1000 {
		st.in = append(st.in, marshal(t, requestBody()))
	}
	if err := newWorld(t).process(st); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("ended with %v", err)
	}
}

func TestObservabilityModeWantsNoAnswer(t *testing.T) {
	m := chat(nil)
	m.overwrite = func(r *extprocv3.ProcessingRequest) { r.ObservabilityMode = true }
	w := newWorld(t)
	st := &fakeStream{in: [][]byte{marshal(t, m.proto())}}
	if err := w.process(st); err != nil || len(st.out) != 0 || len(w.events) != 1 {
		t.Errorf("%v, %d answers, %d events", err, len(st.out), len(w.events))
	}
}

func TestPanicBecomesAnErrorAndAnEvent(t *testing.T) {
	var failed int
	w := newWorld(t, func(_ *plan.Inputs, o *Options) {
		o.Trusted = func(string) bool { panic("boom") }
		o.Observe = func(e Event) {
			if e.Failed {
				failed++
			}
		}
	})
	m := chat(map[string]string{wire.HeaderRequestID: "abc"})
	st := &fakeStream{in: [][]byte{marshal(t, m.proto())}}
	if err := w.process(st); status.Code(err) != codes.Internal || failed != 1 || len(st.out) != 0 {
		t.Errorf("%v, %d failures counted, %d answers", err, failed, len(st.out))
	}
	if w.busy.oldest(epoch) != 0 {
		t.Error("the handler still counts as running")
	}
}

// FuzzProcess plays a sequence of up to 32 messages, cut out of the input by two
// length bytes each, to a route that waits for answers. It checks that the stream
// ends, that it ends in an error unless the request headers were answered, that
// every answer is one that its message allows, that at most one place stays
// reserved, and that nothing is reserved or admitted where none is.
func FuzzProcess(f *testing.F) {
	cut := func(messages ...proto.Message) []byte {
		var b []byte
		for _, m := range messages {
			one := marshal(f, m)
			b = append(append(b, byte(len(one)>>8), byte(len(one))), one...)
		}
		return b
	}
	many := chat(nil).proto()
	for i := range 200 {
		many.Attributes[string(rune('a'+i))] = mustStruct(map[string]any{"xds.route_name": "chat"})
	}
	everything := chat(map[string]string{"authorization": "Bearer a", "x-api-key": "k", "x-request-class": "batch",
		"x-stainless-timeout": "60", "x-stainless-read-timeout": "1e9", "x-stainless-retry-count": "2", "grpc-timeout": "5S"})
	everything.peek["n"], everything.peek["user"], everything.claims = 4, "u", map[string]any{"sub": 7}
	everything.san, everything.subject = "spiffe://a", "CN=a"
	trailers := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}}
	f.Add([]byte{})
	f.Add([]byte{0, 0})
	f.Add(cut(chat(nil).proto()))
	f.Add(cut(chat(nil).proto(), chat(nil).proto()))
	f.Add(cut(&extprocv3.ProcessingRequest{}, chat(nil).proto()))
	f.Add(cut(requestBody(), chat(nil).proto()))
	f.Add(cut(trailers, requestBody(), trailers))
	f.Add(cut(many))
	f.Add(cut(chat(map[string]string{"max_tokens": "1e400", "x-route-strategy": "\xff", "x-request-id": "\"\r\n"}).proto()))
	f.Add(cut(everything.proto(), answer("429", "x-ratelimit-reset-tokens", "6m0s")))
	f.Add(cut(chat(nil).proto(), answer("503", "retry-after", "3")))
	f.Add(cut(chat(nil).proto(), trailersMessage(), answer("529"), answer("429")))
	f.Add(cut(answer("429"), chat(nil).proto(), answer("200")))
	w, g := gated(f, computed, func(in *plan.Inputs, _ *Options) {
		in.Routes[0].ClientKey, in.Routes[0].Claim, in.Routes[0].ReadUser = fleet.ClientKeyJWT, "sub", true
		in.Routes[0].MaxOutput, in.Routes[0].Oversize, in.Routes[0].Affinity = 1<<20, fleet.OversizeRefuse, fleet.AffinitySession
	})
	w.live[1], w.live[2] = 10, 10
	f.Fuzz(func(t *testing.T, b []byte) {
		st := &fakeStream{}
		for len(b) >= 2 && len(st.in) < 32 {
			n := min(int(b[0])<<8|int(b[1]), len(b)-2)
			st.in = append(st.in, b[2:2+n])
			b = b[2+n:]
		}
		w.events, w.answers, w.limits, g.asked, g.refused, g.canceled = w.events[:0], nil, nil, nil, nil, nil
		clear(w.picks)
		err := w.process(st)
		answered := 0
		for _, out := range st.out {
			r := readAnswer(t, out)
			switch {
			case r.GetRequestHeaders() != nil || r.GetImmediateResponse() != nil:
				answered++
			case r.GetResponseHeaders().GetResponse().GetHeaderMutation() != nil:
				if answered != 1 {
					t.Fatal("retry fields before the request was answered")
				}
				checkRetryFields(t, addConcurrency(headerMap(t, r.GetResponseHeaders().GetResponse().GetHeaderMutation())))
			}
		}
		observed := len(w.events) > 0 && !w.events[len(w.events)-1].Failed
		if answered > 1 || (err == nil && answered == 0 && !observed) {
			t.Fatalf("the stream ended with %v after %d answers to request headers", err, answered)
		}
		if len(w.picks) > 1 || (answered == 0 && len(w.picks) > 0) {
			t.Fatalf("%d places reserved, %d answers", len(w.picks), answered)
		}
		if len(w.answers) > 1 {
			t.Fatalf("%d answers of one upstream", len(w.answers))
		}
	})
}

// addConcurrency fills in what is left out where it isn't known.
func addConcurrency(headers map[string]string) map[string]string {
	if headers[wire.HeaderRecommendedConcurrency] == "" {
		headers[wire.HeaderRecommendedConcurrency] = "1"
	}
	return headers
}
