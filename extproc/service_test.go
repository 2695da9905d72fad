package extproc

import (
	"errors"
	"io"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

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

// FuzzProcess plays a sequence of up to 32 messages, cut out of the input by a
// length byte each, and checks that the stream ends, and ends in an error
// unless the headers were answered.
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
	w := newWorld(f)
	w.live[1], w.live[2] = 10, 10
	f.Fuzz(func(t *testing.T, b []byte) {
		st := &fakeStream{}
		for len(b) >= 2 && len(st.in) < 32 {
			n := min(int(b[0])<<8|int(b[1]), len(b)-2)
			st.in = append(st.in, b[2:2+n])
			b = b[2+n:]
		}
		w.events = w.events[:0]
		clear(w.picks)
		err := w.process(st)
		answered := false
		for _, out := range st.out {
			r := readAnswer(t, out)
			answered = answered || r.GetRequestHeaders() != nil || r.GetImmediateResponse() != nil
		}
		observed := len(w.events) > 0 && !w.events[len(w.events)-1].Failed
		if err == nil && !answered && !observed {
			t.Fatal("the stream ended well without an answer")
		}
	})
}
