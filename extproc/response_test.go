package extproc

import (
	"context"
	"errors"
	"io"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

func computed(in *plan.Inputs, _ *Options) { in.Routes[0].ComputedRetry = true }

// answer is a response_headers message; pairs are names and values.
func answer(status string, pairs ...string) *extprocv3.ProcessingRequest {
	h := &corev3.HeaderMap{Headers: []*corev3.HeaderValue{header(":status", status), header("content-type", "application/json")}}
	for i := 0; i < len(pairs); i += 2 {
		h.Headers = append(h.Headers, header(pairs[i], pairs[i+1]))
	}
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
		ResponseHeaders: &extprocv3.HttpHeaders{Headers: h},
	}}
}

// exchange plays messages and returns the answers.
func (w *world) exchange(t testing.TB, messages ...proto.Message) []*extprocv3.ProcessingResponse {
	t.Helper()
	st := &fakeStream{}
	for _, m := range messages {
		st.in = append(st.in, marshal(t, m))
	}
	if err := w.process(st); err != nil {
		t.Fatal(err)
	}
	var out []*extprocv3.ProcessingResponse
	for _, b := range st.out {
		out = append(out, readAnswer(t, b))
	}
	return out
}

func TestAnswersThatTurnAwayGetTheRetryFieldsTheyLack(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const none = "0s"
	for _, row := range []struct {
		name   string
		answer *extprocv3.ProcessingRequest
		want   map[string]string // nil: untouched
		source RetrySource       // 0: not looked at
		wait   string
	}{
		{"success", answer("200"), nil, 0, none},
		{"client error", answer("400"), nil, 0, none},
		{"server error", answer("500"), nil, 0, none},
		{"no status", answer(""), nil, 0, none},
		{"own retry-after", answer("429", "retry-after", "30"), nil, RetryKept, none},
		{"own retry-after-ms", answer("503", "retry-after-ms", "30"), nil, RetryKept, none},
		{"own, at once", answer("429", "retry-after", "0"), nil, RetryKept, none},
		{"own, of no use", answer("429", "retry-after", "soon"), map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
		{"own, empty", answer("429", "retry-after", ""), map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
		{"own, below 0", answer("429", "retry-after", "-3"), map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
		{"own, of no use, beside Azure's", answer("429", "retry-after", "soon", "x-ms-retry-after-ms", "700"), map[string]string{"retry-after-ms": "700", "retry-after": "1", "x-recommended-concurrency": "3"}, RetryTold, "700ms"},
		{"429", answer("429"), map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
		{"503", answer("503"), map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
		{"529", answer("529"), map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
		{"Azure", answer("429", "x-ms-retry-after-ms", "700"), map[string]string{"retry-after-ms": "700", "retry-after": "1", "x-recommended-concurrency": "3"}, RetryTold, "700ms"},
		{"OpenAI", answer("429", "x-ratelimit-reset-requests", "12ms", "x-ratelimit-remaining-requests", "0"),
			map[string]string{"retry-after-ms": "12", "retry-after": "1", "x-recommended-concurrency": "3"}, RetryTold, "12ms"},
		{"Anthropic", answer("529", "anthropic-ratelimit-requests-reset", "2026-03-01T12:00:07Z"),
			map[string]string{"retry-after-ms": "7000", "retry-after": "7", "x-recommended-concurrency": "3"}, RetryTold, "7s"},
		{"a long wait", answer("429", "x-ratelimit-reset-tokens", "6m0s"),
			map[string]string{"retry-after-ms": "60000", "retry-after": "60", "x-recommended-concurrency": "3", "x-should-retry": "false"}, RetryTold, "1m0s"},
		{"a wait of three years", answer("429", "x-ms-retry-after-ms", "99999999999"),
			map[string]string{"retry-after-ms": "60000", "retry-after": "60", "x-recommended-concurrency": "3", "x-should-retry": "false"}, RetryTold, "1m0s"},
		{"a limit that resets in the year 9999", answer("529", "anthropic-ratelimit-requests-reset", "9999-12-31T23:59:59Z"),
			map[string]string{"retry-after-ms": "60000", "retry-after": "60", "x-recommended-concurrency": "3", "x-should-retry": "false"}, RetryTold, "1m0s"},
		{"own word on retries", answer("429", "x-ratelimit-reset-tokens", "6m0s", "x-should-retry", "true", "x-recommended-concurrency", "77"),
			map[string]string{"retry-after-ms": "60000", "retry-after": "60", "x-recommended-concurrency": "3"}, RetryTold, "1m0s"},
		{"junk", answer("429", "x-ratelimit-reset-tokens", "whenever"),
			map[string]string{"retry-after-ms": "2234", "retry-after": "3", "x-recommended-concurrency": "8"}, RetryGiven, "2.234s"},
	} {
		t.Run(row.name, func(t *testing.T) {
			w, g := gated(t, computed, func(_ *plan.Inputs, o *Options) { o.Now = func() time.Time { return now } })
			g.verdict.Concurrency = 3
			out := w.exchange(t, chat(nil).proto(), row.answer)
			if len(out) != 2 || out[0].GetRequestHeaders() == nil || out[1].GetResponseHeaders() == nil {
				t.Fatalf("answers %v", out)
			}
			got := headerMap(t, out[1].GetResponseHeaders().GetResponse().GetHeaderMutation())
			if len(got) != len(row.want) || (row.want != nil && !reflect.DeepEqual(got, row.want)) {
				t.Errorf("sets %v; want %v", got, row.want)
			}
			if row.source == 0 {
				if len(w.answers) != 0 {
					t.Errorf("told of %v", w.answers)
				}
				return
			}
			wait, _ := time.ParseDuration(row.wait)
			want := Answer{Route: "chat", Status: int(mustStatus(row.answer)), Source: row.source, Wait: wait}
			if !reflect.DeepEqual(w.answers, []Answer{want}) {
				t.Errorf("told of %v; want %v", w.answers, want)
			}
			if slots := g.advised; slots != map[RetrySource]int{RetryGiven: 1}[row.source] {
				t.Errorf("%d slots taken", slots)
			}
			if g.advised > 0 && (g.last().ID != firstID || g.last().Route != "chat" || g.last().Pool != "h100") {
				t.Errorf("slot taken for %+v", g.last())
			}
		})
	}
}

func mustStatus(m *extprocv3.ProcessingRequest) (n uint64) {
	n, _ = digits(m.GetResponseHeaders().GetHeaders().GetHeaders()[0].GetRawValue())
	return n
}

func TestWithoutAdmissionThePlanSaysWhenToComeBack(t *testing.T) {
	w := newWorld(t, computed)
	out := w.exchange(t, chat(nil).proto(), answer("503"))
	checkRetryFields(t, headerMap(t, out[1].GetResponseHeaders().GetResponse().GetHeaderMutation()))
	w = newWorld(t, computed)
	st := &switching{fakeStream: fakeStream{in: [][]byte{marshal(t, chat(nil).proto()), marshal(t, answer("503"))}}, then: func() { w.plan = nil }}
	if err := w.process(st); err != nil || len(st.out) != 2 {
		t.Fatalf("%v, %d answers", err, len(st.out))
	}
	got := headerMap(t, readAnswer(t, st.out[1]).GetResponseHeaders().GetResponse().GetHeaderMutation())
	if got["retry-after-ms"] != "1000" {
		t.Errorf("without a plan: %v", got)
	}
}

// switching does something after the first answer.
type switching struct {
	fakeStream
	then func()
}

func (s *switching) SendMsg(m any) error {
	defer s.then()
	return s.fakeStream.SendMsg(m)
}

// TestOnlyStreamsThatEnvoyGoesOnWithWait: a refused request has no answer of an
// upstream, and Envoy sends headers of answers only for requests that generate.
func TestOnlyStreamsThatEnvoyGoesOnWithWait(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*message, *world)
		waits  bool
	}{
		{"generates", func(*message, *world) {}, true},
		{"legacy", func(m *message, _ *world) { m.headers[wire.HeaderRouteStrategy] = "legacy" }, true},
		{"doesn't generate", func(m *message, _ *world) { m.route = "chat/other" }, false},
		{"another route", func(m *message, _ *world) { m.route = "messages" }, false},
		{"unknown route", func(m *message, _ *world) { m.route = "somewhere" }, false},
		{"refused by the plan", func(_ *message, w *world) { w.live[1], w.live[2], w.live[3], w.live[4] = 10, 10, 10, 10 }, false},
		{"refused by admission", func(_ *message, w *world) {
			w.o.Admission.(*gate).verdict = admission.Verdict{Reason: admission.ReasonShare}
		}, false},
	} {
		w, _ := gated(t, computed)
		m := chat(map[string]string{})
		row.change(&m, w)
		st := &fakeStream{in: [][]byte{marshal(t, m.proto()), marshal(t, answer("429"))}}
		if err := w.process(st); err != nil {
			t.Errorf("%s: %v", row.name, err)
		}
		if waited := len(st.in) == 0; waited != row.waits {
			t.Errorf("%s: waited %v", row.name, waited)
		}
	}
}

// TestResponsePhaseEndsWellWhateverComes: an error there would turn a good
// answer into a 500 on routes that fail closed.
func TestResponsePhaseEndsWellWhateverComes(t *testing.T) {
	for name, row := range map[string]struct {
		in      [][]byte
		answers int
	}{
		"the caller is gone":     {nil, 0},
		"broken":                 {[][]byte{{0xff}}, 0},
		"no phase":               {[][]byte{{}}, 0},
		"request headers again":  {[][]byte{marshal(t, chat(nil).proto())}, 0},
		"trailers first":         {[][]byte{marshal(t, trailersMessage()), marshal(t, answer("429"))}, 2},
		"nothing after the end":  {[][]byte{marshal(t, answer("200")), marshal(t, answer("429"))}, 1},
		"without end, not ended": {slices.Repeat([][]byte{marshal(t, trailersMessage())}, 1000), maxMessages},
	} {
		w, _ := gated(t, computed)
		st := &fakeStream{in: append([][]byte{marshal(t, chat(nil).proto())}, row.in...)}
		if err := w.process(st); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if len(st.out) != 1+row.answers {
			t.Errorf("%s: %d answers in the response phase; want %d", name, len(st.out)-1, row.answers)
		}
	}
	w, _ := gated(t, computed, func(_ *plan.Inputs, o *Options) { o.ObserveAnswer = func(Answer) { panic("boom") } })
	if out := w.exchange(t, chat(nil).proto(), answer("429")); len(out) != 1 || !w.lastEvent().Failed {
		t.Errorf("after a panic: %d answers, event %+v", len(out), w.lastEvent())
	}
	if len(w.picks) != 1 {
		t.Error("a panic in the response phase gave back a place that is in use")
	}
}

func trailersMessage() *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}}
}

// TestBothPhasesThroughGRPC: the response phase over a real connection, and a
// client that goes away while the stream waits.
func TestBothPhasesThroughGRPC(t *testing.T) {
	w, _ := gated(t, computed)
	conn := serveOn(t, w.Register, ServerOptions()...)
	open := func() (extprocv3.ExternalProcessor_ProcessClient, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		st, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Send(chat(nil).proto()); err != nil {
			t.Fatal(err)
		}
		if r, err := st.Recv(); err != nil || r.GetRequestHeaders() == nil {
			t.Fatalf("%v, %v", r, err)
		}
		return st, cancel
	}
	_, leave := open()
	leave()
	st, done := open()
	defer done()
	if err := st.Send(answer("429")); err != nil {
		t.Fatal(err)
	}
	r, err := st.Recv()
	if err != nil {
		t.Fatal(err)
	}
	checkRetryFields(t, headerMap(t, r.GetResponseHeaders().GetResponse().GetHeaderMutation()))
	if _, err := st.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream goes on: %v", err)
	}
}

// TestWaitingStreamHoldsLittle: what this package keeps of a request while its
// answer is under way; gRPC's own stream and goroutine come on top.
func TestWaitingStreamHoldsLittle(t *testing.T) {
	if got := reflect.TypeFor[waiting]().Size() + reflect.TypeFor[lateIn]().Size(); got > 256 {
		t.Errorf("%d bytes a stream", got)
	}
	w, _ := gated(t, computed)
	w.o.Observe, w.o.ObserveAnswer = func(Event) {}, func(Answer) {}
	w.Service.o.Ledger = nil
	const streams = 2000
	release, waits := make(chan struct{}), make(chan struct{}, streams)
	ended := make(chan error, streams)
	one := marshal(t, chat(map[string]string{"x-filler": strings.Repeat("x", 16<<10)}).proto())
	w.o.Admission = quiet{}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for range streams {
		go func() {
			ended <- w.process(&held{fakeStream: fakeStream{in: [][]byte{one}}, waits: waits, release: release})
		}()
	}
	for range streams {
		<-waits
	}
	each := (int64(heap()) - int64(before)) / streams
	close(release)
	for range streams {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d bytes of heap a waiting stream", each)
	if each > 2<<10 {
		t.Errorf("a waiting stream holds %d bytes of heap", each)
	}
}

// held ends its stream when it is told to; it throws answers away.
type held struct {
	fakeStream
	waits   chan<- struct{}
	release <-chan struct{}
}

func (h *held) RecvMsg(m any) error {
	if len(h.in) > 0 {
		return h.fakeStream.RecvMsg(m)
	}
	h.waits <- struct{}{}
	<-h.release
	return io.EOF
}

func (h *held) SendMsg(m any) error {
	answers.Put(m.(*rawOut).b)
	return nil
}

// quiet admits everything and notes nothing.
type quiet struct{}

func (quiet) Admit(*admission.Ask) admission.Verdict {
	return admission.Verdict{Admitted: true, Reason: admission.ReasonAdmitted}
}
func (quiet) Refuse(*admission.Ask, admission.Reason) admission.Refusal { return admission.Refusal{} }
func (quiet) Wait(*admission.Ask) time.Duration                         { return 0 }
func (quiet) BeginHold(*admission.Ask) bool                             { return true }
func (quiet) EndHold(*admission.Ask)                                    {}
func (quiet) Advise(*admission.Ask) admission.Refusal                   { return admission.Refusal{} }
func (quiet) Usual(string, fleet.BurstLevel) time.Duration              { return time.Second }
func (quiet) Cancel(string)                                             {}

// TestSlotIsThatOfTheCaller: the request is remembered until its answer comes.
func TestSlotIsThatOfTheCaller(t *testing.T) {
	w, g := gated(t, computed)
	w.exchange(t, chat(map[string]string{"x-stainless-timeout": "9", "authorization": "Bearer a"}).proto(), answer("503"))
	if a := g.last(); a.Timeout != 9*time.Second || a.Client != admission.ClientOf(fleet.ClientKeyAuthorization, []byte("Bearer a")) {
		t.Errorf("slot taken for %+v", a)
	}
}
