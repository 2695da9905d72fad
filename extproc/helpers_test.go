package extproc

import (
	"cmp"
	"context"
	"io"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// world is a service with a plan of two pools and what it told others.
type world struct {
	*Service
	plan   *plan.Plan
	live   liveMap
	mu     sync.Mutex
	events []Event
	picks  map[string]fleet.EndpointKey
	limits []int32 // of reservations
	// expected is how long they are expected to take.
	expected []time.Duration
	full     int // reservations that are refused before one is granted
	// answers are the upstreams' answers that were looked at.
	answers []Answer
}

type liveMap map[uint32]int32

func (l liveMap) InFlight(slot uint32) int32 { return l[slot] }

var epoch = time.UnixMilli(1718924567123)

func newWorld(t testing.TB, change ...func(*plan.Inputs, *Options)) *world {
	t.Helper()
	w := &world{live: liveMap{}, picks: map[string]fleet.EndpointKey{}}
	in := plan.Inputs{
		Tick: 7,
		Pools: []plan.PoolInput{
			pool("h100", "10.0.0.1:8000", "10.0.0.2:8000"),
			pool("a100", "10.0.1.1:8000", "10.0.1.2:8000"),
		},
		Routes: []plan.RouteInput{
			{Name: "chat", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic, ClientStrategy: fleet.ClientStrategyHonor,
				DefaultBudget: 512, FirstTokenMillis: 15000, Split: []string{"h100", "a100"}},
			{Name: "messages", Dialect: fleet.DialectAnthropic, Strategy: fleet.StrategyLegacy, ClientStrategy: fleet.ClientStrategyIgnore,
				DefaultBudget: 512, Split: []string{"a100"}},
		},
	}
	for p := range in.Pools {
		for e := range in.Pools[p].Endpoints {
			in.Pools[p].Endpoints[e].Slot = uint32(1 + 2*p + e)
		}
	}
	ids, err := NewIDs(7, func() time.Time { return epoch })
	if err != nil {
		t.Fatal(err)
	}
	o := Options{
		Plan:    func() *plan.Plan { return w.plan },
		Live:    w.live,
		Ledger:  w,
		IDs:     ids,
		Observe: w.observe,
		ObserveAnswer: func(a Answer) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.answers = append(w.answers, a)
		},
	}
	for _, f := range change {
		f(&in, &o)
	}
	if w.plan, err = plan.Compile(in); err != nil {
		t.Fatal(err)
	}
	w.Service = New(o)
	return w
}

func pool(name string, addresses ...string) plan.PoolInput {
	p := plan.PoolInput{Name: name, Tier: name}
	for _, a := range addresses {
		p.Endpoints = append(p.Endpoints, plan.EndpointInput{
			Address: netip.MustParseAddrPort(a), Weight: 1, MaxInFlight: 10, KVFree: -1, State: fleet.StateNeutral,
		})
	}
	return p
}

func (w *world) observe(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

func (w *world) Reserve(id string, pick fleet.EndpointKey, limit int32, expected time.Duration, _ time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expected = append(w.expected, expected)
	if w.full > 0 {
		w.full--
		return false
	}
	w.picks[id] = pick
	w.limits = append(w.limits, limit)
	return true
}

func (w *world) Cancel(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.picks, id)
}

func (w *world) lastEvent() Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.events[len(w.events)-1]
}

// gate is an Admission that says what a test tells it to say.
type gate struct {
	verdict  admission.Verdict
	refusal  admission.Refusal
	asked    []admission.Ask
	refused  []admission.Reason
	canceled []string
	advised  int
	early    bool
	earlyIn  []string // the pools it was asked for
	holds    int      // that have begun and not ended
	// full is for how many asks there is no place; then verdict counts.
	full int
	// whyIn is why there is none in a pool, if not why.
	whyIn map[string]admission.Reason
	why   admission.Reason // for which; 0 is ReasonShare
	// waits are the waits that are told for pools, by name; it was asked for waited.
	waits  map[string]time.Duration
	waited []string
}

func (g *gate) Admit(a *admission.Ask) admission.Verdict {
	g.asked = append(g.asked, *a)
	if g.full > 0 {
		g.full--
		why := cmp.Or(g.whyIn[a.Pool], g.why, admission.ReasonShare)
		if a.Hold {
			return admission.Verdict{Reason: why, Held: true, Standing: g.verdict.Standing}
		}
		return admission.Verdict{Reason: why, Refusal: g.refusal, Standing: g.verdict.Standing}
	}
	return g.verdict
}

func (g *gate) Refuse(a *admission.Ask, why admission.Reason) admission.Refusal {
	g.asked = append(g.asked, *a)
	g.refused = append(g.refused, why)
	return g.refusal
}

func (g *gate) Wait(a *admission.Ask) time.Duration {
	g.waited = append(g.waited, a.Pool)
	return g.waits[a.Pool]
}

func (g *gate) BeginHold(a *admission.Ask) bool {
	g.earlyIn = append(g.earlyIn, a.Pool)
	if !g.early {
		g.holds++
	}
	return !g.early
}

func (g *gate) EndHold(a *admission.Ask) {
	if a.Pool != g.earlyIn[len(g.earlyIn)-1] || g.holds == 0 {
		panic("a hold ends that did not begin")
	}
	g.holds--
}

func (g *gate) Advise(a *admission.Ask) admission.Refusal {
	g.asked = append(g.asked, *a)
	g.advised++
	return g.refusal
}

func (g *gate) Usual(pool string, level fleet.BurstLevel) time.Duration {
	return time.Duration(len(pool)) * time.Second * time.Duration(1+level)
}

func (g *gate) Cancel(id string) { g.canceled = append(g.canceled, id) }

func (g *gate) last() admission.Ask { return g.asked[len(g.asked)-1] }

// gated is a world with a gate that admits all.
func gated(t testing.TB, change ...func(*plan.Inputs, *Options)) (*world, *gate) {
	g := &gate{
		verdict: admission.Verdict{Admitted: true, Reason: admission.ReasonAdmitted},
		refusal: admission.Refusal{RetryAfter: 1234 * time.Millisecond, Concurrency: 8, InFlight: 12, ShouldRetry: true},
	}
	change = append(change, func(_ *plan.Inputs, o *Options) { o.Admission = g })
	return newWorld(t, change...), g
}

// message builds a ProcessingRequest as Envoy sends it.
type message struct {
	headers   map[string]string
	peek      map[string]any
	route     string
	cluster   string
	source    string
	zone      string
	noBody    bool
	claims    map[string]any // of a verified token
	san       string         // of the caller's certificate
	subject   string
	overwrite func(*extprocv3.ProcessingRequest)
}

func (m message) proto() *extprocv3.ProcessingRequest {
	headers := &corev3.HeaderMap{}
	add := func(k, v string) {
		headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: k, RawValue: []byte(v)})
	}
	add(":path", "/v1/chat/completions")
	add(":method", "POST")
	add("content-type", "application/json")
	for k, v := range m.headers {
		add(k, v)
	}
	attributes := map[string]any{}
	for k, v := range map[string]string{
		wire.AttributeRouteName: m.route, wire.AttributeClusterName: m.cluster, wire.AttributeSource: m.source, wire.AttributeZone: m.zone,
		wire.AttributeURISAN: m.san, wire.AttributeSubject: m.subject,
	} {
		if v != "" {
			attributes[k] = v
		}
	}
	r := &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: headers, EndOfStream: m.noBody,
		}},
		Attributes: map[string]*structpb.Struct{wire.AttributesKey: mustStruct(attributes)},
	}
	if m.peek != nil {
		r.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{wire.NamespacePeek: mustStruct(m.peek)}}
	}
	if m.claims != nil {
		if r.MetadataContext == nil {
			r.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{}}
		}
		r.MetadataContext.FilterMetadata[wire.NamespaceJWT] = mustStruct(map[string]any{wire.KeyClaims: m.claims})
	}
	if m.overwrite != nil {
		m.overwrite(r)
	}
	return r
}

func mustStruct(m map[string]any) *structpb.Struct {
	s, err := structpb.NewStruct(m)
	if err != nil {
		panic(err)
	}
	return s
}

// fakeStream plays messages to process and keeps the answers.
type fakeStream struct {
	in  [][]byte
	out [][]byte
	ctx context.Context // nil never ends
}

func (f *fakeStream) Context() context.Context {
	if f.ctx == nil {
		return context.Background()
	}
	return f.ctx
}

func (f *fakeStream) RecvMsg(m any) error {
	if len(f.in) == 0 {
		return io.EOF
	}
	in := mem.BufferSlice{mem.SliceBuffer(f.in[0])}
	f.in = f.in[1:]
	return rawCodec{}.Unmarshal(in, m)
}

func (f *fakeStream) SendMsg(m any) error {
	out := m.(*rawOut)
	f.out = append(f.out, append([]byte(nil), *out.b...))
	answers.Put(out.b)
	return nil
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// ask sends one message and returns the checked answer.
func (w *world) ask(t testing.TB, m message) *extprocv3.ProcessingResponse {
	t.Helper()
	st := &fakeStream{in: [][]byte{marshal(t, m.proto())}}
	if err := w.process(st); err != nil {
		t.Fatal(err)
	}
	if len(st.out) != 1 {
		t.Fatalf("%d answers to one message", len(st.out))
	}
	return readAnswer(t, st.out[0])
}

// readAnswer reads an answer with the generated types, validates it and checks
// that it is written as protobuf itself would write it.
func readAnswer(t testing.TB, b []byte) *extprocv3.ProcessingResponse {
	t.Helper()
	r := &extprocv3.ProcessingResponse{}
	if err := proto.Unmarshal(b, r); err != nil {
		t.Fatalf("answer is not protobuf: %v", err)
	}
	if err := r.ValidateAll(); err != nil {
		t.Fatalf("answer is not valid: %v", err)
	}
	if len(r.ProtoReflect().GetUnknown()) > 0 {
		t.Fatal("answer has unknown fields")
	}
	if again := marshal(t, r); len(again) != len(b) {
		t.Fatalf("answer has %d bytes, its canonical form %d", len(b), len(again))
	}
	return r
}

// headerMap flattens set_headers and checks how each is to be applied.
func headerMap(t testing.TB, m *extprocv3.HeaderMutation) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, h := range m.GetSetHeaders() {
		if _, twice := out[h.GetHeader().GetKey()]; twice {
			t.Errorf("header %s is set twice", h.GetHeader().GetKey())
		}
		if h.GetHeader().GetValue() != "" {
			t.Errorf("header %s uses value, which arrives empty", h.GetHeader().GetKey())
		}
		//lint:ignore SA1019 the only flag that ext_proc looks at (measured on Envoy 1.40.0)
		if h.GetAppend() == nil || h.GetAppend().GetValue() ||
			h.GetAppendAction() != corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD {
			t.Errorf("header %s doesn't overwrite", h.GetHeader().GetKey())
		}
		out[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	return out
}

// metadata returns one namespace of an answer as plain Go values, nil if absent.
func metadata(r *extprocv3.ProcessingResponse, namespace string) map[string]any {
	s := r.GetDynamicMetadata().GetFields()[namespace].GetStructValue()
	if s == nil {
		return nil
	}
	return s.AsMap()
}

func header(key, value string) *corev3.HeaderValue {
	return &corev3.HeaderValue{Key: key, RawValue: []byte(value)}
}
