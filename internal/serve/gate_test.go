package serve

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
	"slices"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/xds"
)

// twoServers is a pool of two endpoints, each with room for 64.
func twoServers() *fleet.Config {
	return &fleet.Config{
		Pools: []fleet.Pool{{Name: "h100", MaxInFlight: 64, Limit: fleet.LimitFixed, Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush}, Endpoints: []fleet.Endpoint{
			{Name: "a", Address: netip.MustParseAddrPort("10.0.0.1:1"), Capacity: 1}, {Name: "b", Address: netip.MustParseAddrPort("10.0.0.1:2"), Capacity: 1}}}},
		Routes: []fleet.Route{{Name: "chat", Split: fleet.Split{{Pool: "h100", Weight: 1}}}},
	}
}

// viewed is a scoring that keeps what it told admission last.
type viewed struct {
	*scoring
	views []admission.PoolView
}

func newViewed(t *testing.T, cfg *fleet.Config) *viewed {
	t.Helper()
	v := &viewed{}
	v.scoring = newScoring(scoringModel{Model: scorer.Formula(scorer.FormulaOptions{})}, accesslog.NewLedger(time.Now),
		func(_ time.Time, views []admission.PoolView) []admission.PoolState {
			v.views = views
			return nil
		})
	v.reconfigure(cfg, nil)
	return v
}

// outcome takes what happened to somebody's request.
func (v *viewed) outcome(o fleet.Outcome) { v.scoring.outcome(o, byKey(admission.Client{})) }

// step makes the inputs of a plan that is in force at once.
func (v *viewed) step(now time.Time) (plan.Inputs, *admin.Fleet) {
	inputs, shown := v.scoring.step(now)
	v.published()
	return inputs, shown
}

func (v *viewed) key(i int) fleet.EndpointKey {
	p := &v.config.Pools[0]
	return fleet.EndpointKey{Pool: p.Name, Address: p.Endpoints[i].Address}
}

// answers has an endpoint send a request away.
func (v *viewed) answers(i, code int, wait time.Duration, at time.Time) {
	v.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Endpoint: v.key(i), Code: code, RetryAfter: wait, At: at})
}

func TestAdmissionIsToldWhatEndpointsCanHold(t *testing.T) {
	s := testScoring(t, twoServers())
	endpoint := func(port uint16, set func(*plan.EndpointInput)) plan.EndpointInput {
		e := plan.EndpointInput{Address: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), port), Weight: 1, MaxInFlight: 10, State: fleet.StateNeutral}
		set(&e)
		return e
	}
	views := s.poolViews(time.Now(), []plan.PoolInput{
		{Name: "h100", Endpoints: []plan.EndpointInput{
			endpoint(1, func(e *plan.EndpointInput) { e.Risk, e.InFlight = 0.25, 3 }),
			endpoint(2, func(e *plan.EndpointInput) { e.Closed, e.InFlight, e.Risk = true, 2, 0.1 }),
			endpoint(3, func(e *plan.EndpointInput) { e.State, e.InFlight = fleet.StateDraining, 4 }),
			endpoint(4, func(e *plan.EndpointInput) { e.Weight, e.InFlight = 0, 8 }),
			endpoint(5, func(e *plan.EndpointInput) { e.MaxInFlight = 20; e.Risk = 0.5 }),
		}},
		{Name: "empty"},
		{Name: "drains", Endpoints: []plan.EndpointInput{endpoint(6, func(e *plan.EndpointInput) { e.State, e.InFlight = fleet.StateDraining, 5 })}},
		{Name: "closed", Endpoints: []plan.EndpointInput{
			endpoint(7, func(e *plan.EndpointInput) { e.Closed, e.Weight = true, 0 }),
			endpoint(8, func(e *plan.EndpointInput) { e.State = fleet.StateDraining }),
		}},
	})
	want := admission.PoolView{Name: "h100", Limit: 10*0.75 + 10*0.9 + 20*0.5, Closed: 10 * 0.9, InFlight: 17, Elsewhere: 14, Places: 40 + 6, Capacity: 4 * 64}
	if got := views[0]; got != want {
		t.Errorf("told %+v; want %+v", got, want)
	}
	if got := views[1]; got != (admission.PoolView{Name: "empty", Places: admission.Unbounded, Capacity: admission.None}) {
		t.Errorf("told %+v of a pool without endpoints", got)
	}
	free := s.poolViews(time.Now(), []plan.PoolInput{{Name: "h100", Endpoints: []plan.EndpointInput{
		endpoint(1, func(e *plan.EndpointInput) {}), endpoint(2, func(e *plan.EndpointInput) { e.MaxInFlight = 0 }), endpoint(3, func(e *plan.EndpointInput) {}),
	}}})
	if got := free[0].Places; got != admission.Unbounded {
		t.Errorf("%d places where an endpoint has no limit", got)
	}
	if drains, closed := views[2].Places, views[3].Places; drains != admission.Unbounded || closed != 0 {
		t.Errorf("%d places in a pool that drains and %d in one whose servers are closed; want no bound and none", drains, closed)
	}
}

func TestClosedEndpointsAreNoRoom(t *testing.T) {
	s := newViewed(t, twoServers())
	now := time.Now()
	tell := func(at time.Time, closed float64, places int, reopens time.Duration) {
		t.Helper()
		s.step(at)
		got := s.views[0]
		if math.Abs(got.Closed-closed) > 1e-9 || got.Places != places || got.Reopens != reopens {
			t.Errorf("%v later admission is told %+v; want %v of it closed, %d places and %v until one opens", at.Sub(now), got, closed, places, reopens)
		}
	}
	s.step(now)
	tell(now, 0, 128, 0)
	one := s.views[0].Limit / 2
	if one <= 0 {
		t.Fatalf("%+v", s.views[0])
	}
	s.answers(0, 503, 10*time.Second, now)
	tell(now, one, 64, 0)
	s.answers(0, 429, 0, now) // a second, which ends before
	tell(now.Add(2*time.Second), one, 64, 0)
	s.answers(1, 429, 5*time.Second, now)
	// Who comes back when told must find it open, though both were closed for less.
	tell(now.Add(2*time.Second), 2*one, 0, 3*time.Second)
	s.answers(1, 429, 30*time.Second, now)
	tell(now.Add(2*time.Second), 2*one, 0, 8*time.Second)
	tell(now.Add(11*time.Second), one, 64, 0)
	tell(now.Add(31*time.Second), 0, 128, 0)
	if got := s.views[0].Limit; math.Abs(got-2*one) > 1e-9 {
		t.Errorf("a limit of %v; want it as before, %v", got, 2*one)
	}
}

// TestOnlyPoolsThatWantItHaveLearnedLimits: the others keep the config's, whatever
// their engines tell.
func TestOnlyPoolsThatWantItHaveLearnedLimits(t *testing.T) {
	for mode, want := range map[fleet.LimitMode]int32{0: 64, fleet.LimitFixed: 64, fleet.LimitLearned: 3} {
		cfg := twoServers()
		cfg.Pools[0].Limit = mode
		s := newViewed(t, cfg)
		s.states = []admission.PoolState{{Name: "h100"}}
		s.states[0].Levels[4] = admission.LevelState{InFlight: 2, MeanInput: 2000, MeanOutput: 1000}
		now := time.Now()
		s.read(telemetry.Reading{Endpoint: s.key(0), Sample: telemetry.Sample{At: now, Known: telemetry.HasKVTokens | telemetry.HasKVUsage, KVTokens: 10_000}})
		inputs, _ := s.step(now)
		if got := inputs.Pools[0].Endpoints[0].MaxInFlight; got != want {
			t.Errorf("limit %d of a pool of mode %d whose cache holds three requests, want %d", got, mode, want)
		}
	}
}

func TestLearnedBytesPerTokenReachThePlan(t *testing.T) {
	s := newViewed(t, twoServers())
	inputs, _ := s.step(time.Now())
	if got := inputs.Routes[0].BytesPerToken; got != 0 {
		t.Errorf("%v bytes a token before anything was learned, want 0", got)
	}
	for range 300 {
		s.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", RequestBytes: 8000, Usage: fleet.Usage{Known: true, Input: 1000}})
	}
	inputs, _ = s.step(time.Now())
	if got := inputs.Routes[0].BytesPerToken; got < 7.5 || got > 8 {
		t.Errorf("%v bytes a token in the plan, want 8 of what was learned", got)
	}
}

// runs is a server that serves nothing yet, with the time that its ticks go by.
type runs struct {
	*Server
	now time.Time
	ids int
}

func newRuns(t *testing.T, o Options) *runs {
	t.Helper()
	o.Config = testConfig(t)
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return &runs{Server: s, now: time.Now().Add(bucket)}
}

func (r *runs) pass(d time.Duration) {
	r.now = r.now.Add(d)
	r.step(r.now)
}

var gpu = fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}

// enter admits a request and reserves its place.
func (r *runs) enter(t *testing.T) (id string) { return r.enterAs(t, admission.Client{}, gpu) }

func (r *runs) enterAs(t *testing.T, of admission.Client, on fleet.EndpointKey) (id string) {
	t.Helper()
	r.ids++
	id = fmt.Sprintf("1718924567123-007-%04d", r.ids)
	a := admission.Ask{ID: id, Route: "chat", Pool: on.Pool, Client: of, Level: 7, Class: fleet.ClassInteractive, Output: 4096, At: r.now}
	if v := r.gate.Admit(&a); !v.Admitted {
		t.Fatalf("%+v", v)
	}
	if !r.ledger.Reserve(id, on, 4, time.Minute, r.now) {
		t.Fatal("no place")
	}
	return id
}

// inFlight is what the ledger and the gate count.
func (r *runs) inFlight() [2]int { return [2]int{r.ledger.Total(), r.gate.Counters().Claims} }

// TestWithoutAnyLogRequestsCountForTheirTime: nothing will confirm them.
func TestWithoutAnyLogRequestsCountForTheirTime(t *testing.T) {
	r := newRuns(t, Options{})
	r.pass(bucket)
	r.enter(t)
	r.pass(3 * time.Second)
	if got := r.inFlight(); got != [2]int{1, 1} {
		t.Errorf("ledger and gate count %v after 3 s without any log; want one each", got)
	}
	r.pass(time.Minute)
	r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: "n"})
	r.pass(bucket)
	r.enter(t)
	r.pass(3 * time.Second)
	if got := r.inFlight(); got != [2]int{} {
		t.Errorf("ledger and gate count %v after 3 s in which a log came that told nothing of it; want none", got)
	}
	r.logsEnded("n")
	r.pass(bucket)
	r.enter(t)
	r.pass(3 * time.Second)
	if got := r.inFlight(); got != [2]int{1, 1} {
		t.Errorf("ledger and gate count %v after 3 s without the log that was there; want one each", got)
	}
}

// TestRequestsWithoutTheirDecisionAreStillThoseItCounted: one that went to a server
// is followed there and settled; one that ended before gives its place back.
func TestRequestsWithoutTheirDecisionAreStillThoseItCounted(t *testing.T) {
	for _, ran := range []bool{true, false} {
		r := newRuns(t, Options{})
		r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: "n"})
		const envoys = "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"
		r.decide(t, envoys)
		if got := r.inFlight(); got != [2]int{1, 1} {
			t.Fatalf("ledger and gate count %v", got)
		}
		end := fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: envoys, Route: "chat", Code: 200, Cause: fleet.CauseOK, At: r.now}
		if ran {
			at := gpu
			r.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: envoys, Attempt: 1, Endpoint: at, At: r.now})
			r.pass(3 * time.Second)
			if got := r.inFlight(); got != [2]int{1, 1} {
				t.Errorf("ledger and gate count %v while it runs; want one each", got)
			}
			end.Endpoint = at
		}
		r.outcome(end)
		if got := r.inFlight(); got != [2]int{} {
			t.Errorf("ran %v: ledger and gate count %v after its end", ran, got)
		}
		if id, ok := r.extproc.Unapplied("n", envoys, true); ok {
			t.Errorf("ran %v: decision %s is still known after its end", ran, id)
		}
	}
}

// TestALongRequestWithoutItsDecisionIsFollowedToItsEnd, however many others are
// decided meanwhile.
func TestALongRequestWithoutItsDecisionIsFollowedToItsEnd(t *testing.T) {
	r := newRuns(t, Options{})
	r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: "n"})
	const envoys = "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"
	r.decide(t, envoys)
	tell := func(kind fleet.OutcomeKind) {
		r.outcome(fleet.Outcome{Kind: kind, Node: "n", ID: envoys, Route: "chat", Attempt: 1, Endpoint: gpu, Cause: fleet.CauseOK, Code: 200, At: r.now})
	}
	runs := func(when string) {
		if got := r.inFlight(); got != [2]int{1, 1} {
			t.Fatalf("ledger and gate count %v %s; want one each", got, when)
		}
	}
	tell(fleet.AttemptStarted)
	for i := range 100_000 {
		other := fmt.Sprint("another-", i)
		r.decide(t, other)
		r.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: other, Route: "chat", At: r.now})
		if i%10 == 0 { // while there is room for the next, should any not end
			runs("beside others")
		}
		if i%20_000 == 0 {
			r.pass(10 * time.Second)
			runs("before a heartbeat")
			tell(fleet.Heartbeat)
		}
	}
	tell(fleet.RequestEnded)
	if got := r.inFlight(); got != [2]int{} {
		t.Errorf("ledger and gate count %v after its end", got)
	}
}

// TestWhatNeverHadARouteEndsNoRequest: Envoy refused it before its filters, and its id
// is what its caller wrote.
func TestWhatNeverHadARouteEndsNoRequest(t *testing.T) {
	r := newRuns(t, Options{})
	r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: "n"})
	const envoys = "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"
	r.decide(t, envoys)
	end := fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: envoys, Code: 400, Cause: fleet.CauseLocal, At: r.now}
	r.outcome(end)
	if got := r.inFlight(); got != [2]int{1, 1} {
		t.Errorf("ledger and gate count %v after the end of what had no route", got)
	}
	end.Route = "chat"
	r.outcome(end)
	if got := r.inFlight(); got != [2]int{} {
		t.Errorf("ledger and gate count %v after its own end", got)
	}
}

// decide has ext_proc decide a request that Envoy gave that id.
func (r *runs) decide(t *testing.T, requestID string) {
	t.Helper()
	message, err := proto.Marshal(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{EndOfStream: true, Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
			{Key: "x-request-id", RawValue: []byte(requestID)}, {Key: "x-envoy-external-address", RawValue: []byte("10.20.30.40")}, {Key: ":method", RawValue: []byte("POST")},
		}}}},
		Attributes: map[string]*structpb.Struct{wire.AttributesKey: {Fields: map[string]*structpb.Value{
			wire.AttributeRouteName: structpb.NewStringValue("chat"), wire.AttributeClusterName: structpb.NewStringValue("gpu"),
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.extproc.Exchange(nil, message); err != nil {
		t.Fatal(err)
	}
}

// TestEndpointsThatLeaveDrainFirst, and come back where the new config is not
// taken.
func TestEndpointsThatLeaveDrainFirst(t *testing.T) {
	s := newViewed(t, twoServers())
	states := func() (out []fleet.State) {
		inputs, _ := s.step(time.Now())
		for _, e := range inputs.Pools[0].Endpoints {
			out = append(out, e.State)
		}
		return out
	}
	before := states()
	next := twoServers()
	if _, _, leaving := s.retire(next); leaving {
		t.Error("nobody leaves")
	}
	next.Pools[0].Endpoints = next.Pools[0].Endpoints[:1]
	restore, since, leaving := s.retire(next)
	if since != s.ticks {
		t.Errorf("since tick %d, now %d", since, s.ticks)
	}
	if got := states(); !leaving || len(got) != 2 || got[0] != before[0] || got[1] != fleet.StateDraining {
		t.Errorf("leaving %v, states %v; want the second to drain", leaving, got)
	}
	restore()
	if got := states(); !slices.Equal(got, before) {
		t.Errorf("states %v after all; want %v", got, before)
	}
	next.Pools[0].Endpoints[0].Address = netip.MustParseAddrPort("10.9.9.9:1")
	if _, _, leaving := s.retire(next); leaving {
		t.Error("all are replaced: the pool would stand empty until the others are there")
	}
	if s.config.Pools[0].Endpoints[1].Drain {
		t.Error("the config in force was changed")
	}
}

// TestPoolsDrainBeforeTheyShrink: unless others take the place of most of it, and
// nobody is left to serve meanwhile.
func TestPoolsDrainBeforeTheyShrink(t *testing.T) {
	server := func(n int, drain bool) fleet.Endpoint {
		return fleet.Endpoint{Address: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(n)), Drain: drain}
	}
	pool := func(numbers ...int) (out []fleet.Endpoint) {
		for _, n := range numbers {
			out = append(out, server(max(n, -n), n < 0)) // negative ones drain
		}
		return out
	}
	for _, row := range []struct {
		before, after []fleet.Endpoint
		want          int // that are to drain beside those that do
	}{
		{pool(1, 2), pool(1), 1}, {pool(1, 2, 3, 4), pool(1), 3}, {pool(1, 2, 3, 4), pool(3, 4), 2},
		{pool(1, 2, 3, 4), pool(1, 2, 5, 6), 2}, {pool(1, 2, 3, 4), pool(1, 5, 6, 7), 0}, {pool(1, 2), pool(3, 4), 0},
		{pool(1, 2), pool(1, 2, 3), 0}, {pool(1, -2, -3), pool(1), 0}, {pool(1, 2, -3, -4), pool(1), 1}, {pool(1, 2), pool(-1), 1},
	} {
		cfg := twoServers()
		cfg.Pools[0].Endpoints = row.before
		s := newViewed(t, cfg)
		drains := func() (n int) {
			for _, e := range s.config.Pools[0].Endpoints {
				if e.Drain {
					n++
				}
			}
			return n
		}
		was := drains()
		next := twoServers()
		next.Pools[0].Endpoints = row.after
		_, _, leaving := s.retire(next)
		if got := drains() - was; got != row.want || leaving != (row.want > 0) {
			t.Errorf("from %v to %v: %d drain, %v; want %d", row.before, row.after, got, leaving, row.want)
		}
	}
}

// TestWorkOnServersThatLeftIsWorkElsewhere, for as long as it runs and they don't
// come back.
func TestWorkOnServersThatLeftIsWorkElsewhere(t *testing.T) {
	s := newViewed(t, twoServers())
	s.step(time.Now())
	key := s.key(1)
	for i := range 3 {
		s.ledger.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: fmt.Sprintf("1718924567123-007-%04d", i), Attempt: 1, Endpoint: key, At: time.Now()})
	}
	told := func(what string, inFlight, elsewhere, places int) {
		t.Helper()
		s.step(time.Now())
		if got := s.views[0]; got.InFlight != inFlight || got.Elsewhere != elsewhere || got.Places != places {
			t.Errorf("%s: told %+v; want %d in flight, %d of them elsewhere, %d places", what, got, inFlight, elsewhere, places)
		}
	}
	told("both there", 3, 0, 128)
	less := twoServers()
	less.Pools[0].Endpoints = less.Pools[0].Endpoints[:1]
	s.reconfigure(less, nil)
	told("one has left", 3, 3, 64+3)
	s.reconfigure(twoServers(), nil)
	told("it is back", 3, 0, 128)
	s.reconfigure(less, nil)
	for i := range 3 {
		s.ledger.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: fmt.Sprintf("1718924567123-007-%04d", i), At: time.Now()})
	}
	told("all ended", 0, 0, 64)
	if len(s.departed) != 0 {
		t.Errorf("%v are remembered", s.departed)
	}
}

// TestRequestsOfSidecarsThatLeftEndInLedgerAndGate: after the time that they usually
// take, here longer than the grace of their logs, or almost at once where nothing of
// them is left.
func TestRequestsOfSidecarsThatLeftEndInLedgerAndGate(t *testing.T) {
	for _, row := range []struct {
		name        string
		leave       func(*runs)
		still, over time.Duration
	}{
		{"no log any more", func(r *runs) { r.logsEnded("n") }, 12 * time.Second, 26 * time.Second},
		{"no stream any more, xDS last", func(r *runs) {
			r.logsEnded("n")
			r.observeXDS(xds.Event{Kind: xds.EventDisconnect, Node: "n"})
		}, 0, 5 * time.Second},
		{"no stream any more, logs last", func(r *runs) {
			r.observeXDS(xds.Event{Kind: xds.EventDisconnect, Node: "n"})
			r.logsEnded("n")
		}, 0, 5 * time.Second},
		{"nothing happened", func(*runs) {}, 20 * time.Second, 26 * time.Second},
	} {
		r := newRuns(t, Options{})
		r.now = time.Now() // graces begin now
		r.observeXDS(xds.Event{Kind: xds.EventConnect, Node: "n"})
		for _, node := range []string{"n", "other"} {
			r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: node})
		}
		r.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: r.enter(t), Attempt: 1, Endpoint: gpu, At: r.now})
		row.leave(r)
		begin := r.now
		r.pass(row.still)
		if got := r.inFlight(); got != [2]int{1, 1} {
			t.Errorf("%s: ledger and gate count %v after %v; want one each", row.name, got, row.still)
		}
		r.now = begin
		r.pass(row.over)
		if got := r.inFlight(); got != [2]int{} {
			t.Errorf("%s: ledger and gate count %v after %v; want none", row.name, got, row.over)
		}
	}
}

// TestLogsThatEndShortenWhatTheGateCounts: a heartbeat's lease is longer than the grace of a
// log that is gone.
func TestLogsThatEndShortenWhatTheGateCounts(t *testing.T) {
	r := newRuns(t, Options{})
	r.now = time.Now() // graces begin now
	r.observeXDS(xds.Event{Kind: xds.EventConnect, Node: "n"})
	for _, node := range []string{"n", "other"} {
		r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: node})
	}
	for range 2 * fleet.BurstLevels { // requests take a second, as is known then
		id := r.enter(t)
		for _, kind := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.AttemptEnded, fleet.RequestEnded} {
			r.outcome(fleet.Outcome{Kind: kind, Node: "n", ID: id, Attempt: 1, Endpoint: gpu, Cause: fleet.CauseOK, Code: 200, Duration: time.Second, At: r.now})
		}
		r.pass(50 * time.Millisecond)
	}
	id := r.enter(t)
	for _, kind := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.Heartbeat} {
		r.outcome(fleet.Outcome{Kind: kind, Node: "n", ID: id, Attempt: 1, Endpoint: gpu, At: r.now})
	}
	r.logsEnded("n")
	begin := time.Now()
	for _, row := range []struct {
		after time.Duration
		want  int
	}{{10 * time.Second, 1}, {16 * time.Second, 0}} {
		r.now = begin
		r.pass(row.after)
		if got := r.gate.Counters().Claims; got != row.want {
			t.Errorf("the gate counts %v %v after its log ended; want %v", got, row.after, row.want)
		}
	}
}

// TestNobodyIsHeldForALogThatNobodySends, of which no end of a request can be learned.
func TestNobodyIsHeldForALogThatNobodySends(t *testing.T) {
	for _, logs := range []bool{true, false} {
		r := newRuns(t, Options{})
		if logs {
			r.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: "n"})
		}
		r.pass(bucket)
		refused := 0
		for i := 0; refused == 0 && i < 5000; i++ {
			r.decide(t, fmt.Sprint("request-", i))
			if i%50 == 0 {
				refused = r.series(t, "fairlead_requests_total", "reason")["all_busy"]
			}
		}
		held := 0
		for _, n := range r.series(t, "fairlead_requests_held_total", "result") {
			held += n
		}
		if refused == 0 || (held > 0) != logs {
			t.Errorf("logs arrive %v: %d refused, %d were held", logs, refused, held)
		}
	}
}

// TestHeapIsTunedOnlyWhereItIsWanted: a program that embeds serve keeps its own
// GC percentage.
func TestHeapIsTunedOnlyWhereItIsWanted(t *testing.T) {
	const before = 123
	last := debug.SetGCPercent(before)
	defer debug.SetGCPercent(last)
	percent := func() uint64 {
		sample := []runtimemetrics.Sample{{Name: "/gc/gogc:percent"}}
		runtimemetrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	newRuns(t, Options{}).pass(bucket)
	if got := percent(); got != before {
		t.Errorf("GC percentage %d, want the %d that was set", got, before)
	}
	tuned := newRuns(t, Options{TuneGC: true})
	tuned.pass(bucket)
	if got, want := percent(), tuned.collector.percent; want == 0 || got != uint64(want) {
		t.Errorf("GC percentage %d with TuneGC, want the %d that fits what lives", got, want)
	}
}

// TestLimiterTakesTheShardsPart: of two shards the first takes what does not
// divide.
func TestLimiterTakesTheShardsPart(t *testing.T) {
	for shard, want := range []int{3, 2} {
		cfg := testConfig(t)
		cfg.Serve.Redis, cfg.Serve.Shard = &fleet.Redis{Address: "127.0.0.1:1", Replicas: 2, OnError: fleet.OnErrorLocal}, shard
		l := newLimiter(cfg, slog.New(slog.DiscardHandler))
		rates := admission.Rates{Requests: fleet.Rate{Amount: 5, Window: 24 * time.Hour}}
		admitted, now := 0, time.Now()
		for range 10 {
			if l.Reserve(admission.LimitKey{Limit: "l"}, rates, 0, now).Admitted {
				admitted++
			}
		}
		if admitted != want {
			t.Errorf("shard %d of 2 admits %d of 5, want %d", shard, admitted, want)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := newLimiter(testConfig(t), nil).Run(ctx); err != nil {
		t.Error(err)
	}
}
