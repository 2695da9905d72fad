package integration

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf16"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/plan"
)

// steered is an Envoy with extproc and accesslog behind it, without xDS: what
// packages extproc and accesslog do together with the builders' configuration.
type steered struct {
	*factEnvoy
	cfg  *fleet.Config
	at   envoy.Runtime
	plan atomic.Pointer[plan.Plan]
	// kvFree are the free KV caches of the next plan; others are unknown.
	kvFree map[fleet.EndpointKey]fleet.Tokens

	ledger   atomic.Pointer[accesslog.Ledger]
	unseen   atomic.Bool // decisions see nothing in flight
	mu       sync.Mutex
	events   []extproc.Event
	outcomes []fleet.Outcome
	messages []*alsv3.StreamAccessLogsMessage

	stopExtProc, stopLog func()
}

func startSteered(t *testing.T, s shape) *steered {
	t.Helper()
	st := &steered{cfg: s.config(t), at: nobody(t)}
	st.ledger.Store(accesslog.NewLedger(time.Now))
	st.compile(t, nil)
	st.serveExtProc(t)
	st.serveLog(t)
	st.factEnvoy = startShape(t, s, st.at)
	t.Cleanup(func() { st.stopExtProc(); st.stopLog() })
	ctx, cancel := context.WithCancel(context.Background())
	expired := make(chan struct{})
	go func() {
		defer close(expired)
		for ctx.Err() == nil {
			st.ledger.Load().Expire(time.Now())
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-expired })
	st.waitSteered(t)
	return st
}

// compile makes the plan of the config; weight, if given, is asked for the
// weight of each endpoint.
func (s *steered) compile(t *testing.T, weight func(fleet.EndpointKey) float64) {
	t.Helper()
	in := plan.Inputs{Tick: 1}
	for _, p := range s.cfg.Pools {
		pool := plan.PoolInput{Name: p.Name, Tier: p.Tier, SpillAt: p.SpillAt}
		for _, e := range p.Endpoints {
			key := fleet.EndpointKey{Pool: p.Name, Address: e.Address}
			w := 1.0
			if weight != nil {
				w = weight(key)
			}
			in := plan.EndpointInput{
				Address: e.Address, Zone: e.Zone, Slot: s.ledger.Load().Slot(key), Weight: w,
				MaxInFlight: int32(p.MaxInFlight), KVFree: -1, State: fleet.StateNeutral,
			}
			if free, known := s.kvFree[key]; known {
				in.KVFree = free
			}
			in.InFlight = s.ledger.Load().InFlight(in.Slot)
			if e.Drain {
				in.State = fleet.StateDraining
			}
			pool.Endpoints = append(pool.Endpoints, in)
		}
		in.Pools = append(in.Pools, pool)
	}
	for _, r := range s.cfg.Routes {
		route := plan.RouteInput{
			Name: r.Name, Dialect: r.Dialect, Strategy: r.Strategy, ClientStrategy: r.ClientStrategy,
			TrustDeclared: r.TrustDeclared, DefaultBudget: r.DefaultMaxTokens,
			FirstTokenMillis: uint32(r.Timeouts.FirstToken.Milliseconds()), Affinity: r.Affinity,
			ComputedRetry: r.RetryFields == fleet.RetryFieldsComputed && r.OnFailure != fleet.FailClosed,
		}
		route.Split, route.Fallback = drawnAndFurther(r)
		in.Routes = append(in.Routes, route)
	}
	p, err := plan.Compile(in)
	if err != nil {
		t.Fatal(err)
	}
	s.plan.Store(p)
}

func (s *steered) serveExtProc(t *testing.T) {
	t.Helper()
	ids, err := extproc.NewIDs(7, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	service := extproc.New(extproc.Options{
		Plan:   s.plan.Load,
		Live:   liveLedger{s},
		Ledger: liveLedger{s},
		IDs:    ids,
		Observe: func(e extproc.Event) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.events = append(s.events, e)
		},
	})
	s.stopExtProc = serveUnix(t, s.at.ExtProc.Path, service.Register, extproc.ServerOptions()...)
}

// liveLedger is the ledger of the moment: tests replace it as a restart would.
type liveLedger struct{ s *steered }

func (l liveLedger) InFlight(slot uint32) int32 {
	if l.s.unseen.Load() {
		return 0
	}
	return l.s.ledger.Load().InFlight(slot)
}
func (l liveLedger) Reserve(id string, pick fleet.EndpointKey, limit int32, expected time.Duration, at time.Time) bool {
	return l.s.ledger.Load().Reserve(id, pick, limit, expected, at)
}
func (l liveLedger) Cancel(id string) { l.s.ledger.Load().Cancel(id) }

func (s *steered) serveLog(t *testing.T) {
	t.Helper()
	r := accesslog.New(accesslog.Options{
		Sink: func(o fleet.Outcome) {
			s.ledger.Load().Apply(o)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.outcomes = append(s.outcomes, o)
		},
		Observe: func(e accesslog.Event) {
			if e.Kind == accesslog.EventStreamEnded { // an Envoy's streams end together here
				s.ledger.Load().NodeGone(e.Node)
			}
		},
	})
	options := append(accesslog.ServerOptions(), grpc.StreamInterceptor(
		func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			return handler(srv, &recordingStream{ServerStream: stream, s: s})
		}))
	s.stopLog = serveUnix(t, s.at.AccessLog.Path, r.Register, options...)
}

// recordingStream keeps each log message, under the name of its stream's log.
type recordingStream struct {
	grpc.ServerStream
	s    *steered
	name string
}

func (r *recordingStream) RecvMsg(m any) error {
	err := r.ServerStream.RecvMsg(m)
	if raw, ok := m.(*accesslog.Raw); ok && err == nil {
		kept := &alsv3.StreamAccessLogsMessage{}
		if err := proto.Unmarshal(raw.Bytes(), kept); err != nil {
			return err
		}
		if kept.GetIdentifier() != nil {
			r.name = kept.GetIdentifier().GetLogName()
		}
		kept.Identifier = &alsv3.StreamAccessLogsMessage_Identifier{Node: &corev3.Node{Id: "edge-1"}, LogName: r.name}
		r.s.mu.Lock()
		r.s.messages = append(r.s.messages, kept)
		r.s.mu.Unlock()
	}
	return err
}

// serveUnix serves on a Unix socket; the returned function stops at once.
func serveUnix(t *testing.T, path string, register func(*grpc.Server), options ...grpc.ServerOption) func() {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(options...)
	register(g)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	return sync.OnceFunc(func() { g.Stop(); <-done })
}

// waitSteered waits until Envoy's health check has found ext_proc serving.
func (s *steered) waitSteered(t *testing.T) {
	t.Helper()
	s.WaitStat("cluster."+wire.ClusterExtProc+".membership_healthy", func(n int64) bool { return n == 1 })
}

func (s *steered) waitEmpty(t *testing.T) {
	t.Helper()
	envoytest.Eventually(t, "in flight back to 0", func() bool { return s.ledger.Load().Total() == 0 })
}

// outcome waits for an outcome of a request.
func (s *steered) outcome(t *testing.T, id string, is func(fleet.Outcome) bool) fleet.Outcome {
	t.Helper()
	var found fleet.Outcome
	envoytest.Eventually(t, "outcome of "+id, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		i := slices.IndexFunc(s.outcomes, func(o fleet.Outcome) bool { return o.ID == id && is(o) })
		if i >= 0 {
			found = s.outcomes[i]
		}
		return i >= 0
	})
	return found
}

func ended(o fleet.Outcome) bool { return o.Kind == fleet.RequestEnded }

func (s *steered) lastEvent() extproc.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events[len(s.events)-1]
}

func (s *steered) inFlight(u *envoytest.Upstream) int {
	for _, e := range s.ledger.Load().Snapshot() {
		if e.Endpoint.Address == u.Addr() {
			return e.Attempts
		}
	}
	return 0
}

// steerShape is one pool of two servers behind a route for each dialect, with
// room for one request per server.
func steerShape(a, b *envoytest.Upstream, maxInFlight int) shape {
	return shape{pools: map[string][]*envoytest.Upstream{"A": {a, b}}, text: shapeHead + fmt.Sprintf(`
groups:
- name: edge
  listener: { address: 127.0.0.1:1 }
  routes: [messages, chat]
pools:
- { name: a, endpoints: $A, maxInFlight: %d }
routes:
- { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, strategy: dynamic, split: [ { pool: a, weight: 1 } ] }
- { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, split: [ { pool: a, weight: 1 } ], timeouts: { firstToken: 500ms } }
`, maxInFlight)}
}

// only gives weight to one server.
func only(u *envoytest.Upstream) func(fleet.EndpointKey) float64 {
	return func(key fleet.EndpointKey) float64 {
		if key.Address == u.Addr() {
			return 1
		}
		return 0
	}
}

const chatPath = "/v1/chat/completions"

func TestExtProcSteersWhereThePlanSays(t *testing.T) {
	a, b := envoytest.NewUpstream(t, envoytest.Echo()), envoytest.NewUpstream(t, envoytest.Echo())
	s := startSteered(t, steerShape(a, b, 256))
	for _, chosen := range []*envoytest.Upstream{a, b} {
		s.compile(t, only(chosen))
		before := chosen.Count()
		for range 20 {
			r := s.postJSON(chatPath, `{"max_tokens": 100}`, "x-request-id", "mine")
			if r.status != http.StatusOK {
				t.Fatalf("status %d: %s", r.status, r.body)
			}
			id := r.header.Get("x-fairlead-decision")
			if _, err := extproc.ParseID(id); err != nil {
				t.Error(err)
			}
			expectHeader(t, r, "X-Route-Strategy", "dynamic")
			expectHeader(t, r, "X-Fairlead-Decision", id)
			expectHeader(t, r, "X-Execution-Graph-Id", s.plan.Load().Digest())
			expectHeader(t, r, "X-Request-Id", id)
			got := map[string][]string{}
			if err := json.Unmarshal([]byte(r.body), &got); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"x-fairlead-decision", "x-request-id"} {
				if !slices.Equal(got[name], []string{id}) {
					t.Errorf("upstream got %s %v; want %s", name, got[name], id)
				}
			}
		}
		if n := chosen.Count() - before; n != 20 {
			t.Errorf("%d of 20 requests reached the plan's choice", n)
		}
	}
	e := s.lastEvent()
	if e.Route != "chat" || e.Pool != "a" || e.Budget != 100 || e.BudgetSource != extproc.BudgetBody || !e.Generates {
		t.Errorf("event %+v", e)
	}
	s.waitEmpty(t)
}

func TestExtProcClientMayAskForLegacy(t *testing.T) {
	a, b := envoytest.NewUpstream(t, nil), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	for asked, want := range map[string]string{"legacy": "legacy", "dynamic": "dynamic", "magic": "legacy"} {
		r := s.postJSON(chatPath, `{}`, "x-route-strategy", asked)
		expectHeader(t, r, "X-Route-Strategy", want)
		expectHeader(t, r, "X-Fairlead-Decision", "*")
		if got := s.lastEvent().UnknownStrategy; got != (asked == "magic") {
			t.Errorf("%s: unknown strategy counted: %v", asked, got)
		}
	}
}

func TestExtProcRetryGoesToTheSecondOfTheList(t *testing.T) {
	a, b := envoytest.NewUpstream(t, envoytest.Status(503, "busy")), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	// b gets no first choice but is there as retry target.
	s.compile(t, func(key fleet.EndpointKey) float64 {
		if key.Address == a.Addr() {
			return 1
		}
		return 1e-9
	})
	for range 5 {
		r := s.postJSON(chatPath, `{}`)
		if r.status != http.StatusOK {
			t.Fatalf("status %d: %s", r.status, r.body)
		}
		id := r.header.Get("x-fairlead-decision")
		first := s.outcome(t, id, func(o fleet.Outcome) bool { return o.Kind == fleet.AttemptEnded && o.Attempt == 1 })
		if first.Endpoint.Address != a.Addr() || first.Code != 503 || first.Cause != fleet.CauseServerError {
			t.Errorf("first attempt %+v", first)
		}
		last := s.outcome(t, id, ended)
		if last.Endpoint.Address != b.Addr() || last.Attempt != 2 || last.Cause != fleet.CauseOK || last.Route != "chat" {
			t.Errorf("request %+v", last)
		}
	}
	s.waitEmpty(t)
}

func TestExtProcFirstTokenLimitMovesAStreamingRequest(t *testing.T) {
	a, b := envoytest.NewUpstream(t, envoytest.Hang()), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	s.compile(t, func(key fleet.EndpointKey) float64 {
		if key.Address == a.Addr() {
			return 1
		}
		return 1e-9
	})
	r := s.postJSON(chatPath, `{"stream": true}`)
	if r.status != http.StatusOK || b.Count() != 1 {
		t.Fatalf("status %d, second server saw %d: %s", r.status, b.Count(), r.body)
	}
	id := r.header.Get("x-fairlead-decision")
	s.outcome(t, id, func(o fleet.Outcome) bool {
		return o.Kind == fleet.AttemptEnded && o.Attempt == 1 && o.Endpoint.Address == a.Addr()
	})
	s.waitEmpty(t)
}

func TestExtProcShedsInBothDialects(t *testing.T) {
	release := make(chan struct{})
	gated := envoytest.Gate(release, envoytest.JSON(`{}`))
	slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			gated.ServeHTTP(w, r)
		}
	})
	a, b := envoytest.NewUpstream(t, slow), envoytest.NewUpstream(t, slow)
	s := startSteered(t, steerShape(a, b, 1))
	s.waitEmpty(t)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if r, err := s.try("POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json"); err != nil || r.status != 200 {
				t.Errorf("admitted request: %d, %v", r.status, err)
			}
		})
	}
	a.WaitRequests(1)
	b.WaitRequests(1)
	for path, dialect := range map[string]fleet.Dialect{
		chatPath: fleet.DialectOpenAI, "/v1/messages": fleet.DialectAnthropic,
		"/v1/chat/completion%73": fleet.DialectOpenAI, chatPath + "/.": fleet.DialectOpenAI, "/v1/messages/": fleet.DialectAnthropic,
	} {
		r := s.postJSON(path, `{}`)
		expectRefusal(t, r, dialect)
		expectHeader(t, r, "X-Execution-Graph-Id", s.plan.Load().Digest())
		if o := s.outcome(t, r.header.Get("x-fairlead-decision"), ended); o.Code != 429 || o.Cause != fleet.CauseLocal || o.Attempt != 0 {
			t.Errorf("outcome %+v", o)
		}
	}
	if r := s.get("/v1/models"); r.status != http.StatusOK {
		t.Errorf("a path that doesn't generate: status %d", r.status)
	}
	close(release)
	wg.Wait()
	s.waitEmpty(t)
	if r := s.postJSON(chatPath, `{}`); r.status != http.StatusOK {
		t.Errorf("status %d after the load is gone", r.status)
	}
}

func expectRefusal(t *testing.T, r answer, dialect fleet.Dialect) {
	t.Helper()
	if r.status != http.StatusTooManyRequests {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	for _, name := range []string{"X-Route-Strategy", "X-Fairlead-Decision", "X-Request-Id", "Retry-After", "Retry-After-Ms", "X-Recommended-Concurrency", "Content-Type"} {
		expectHeader(t, r, name, "*")
	}
	ms, _ := strconv.Atoi(r.header.Get("retry-after-ms"))
	sec, _ := strconv.Atoi(r.header.Get("retry-after"))
	if ms < 1 || ms > 60_000 || sec != (ms+999)/1000 {
		t.Errorf("retry after %d ms, %d s", ms, sec)
	}
	var body struct {
		Type  string
		Error struct {
			Type       string
			Message    string
			RetryAfter int `json:"retry_after_ms"`
		}
	}
	if err := json.Unmarshal([]byte(r.body), &body); err != nil || body.Error.RetryAfter != ms || body.Error.Type != "rate_limit_error" {
		t.Errorf("%v: %s", err, r.body)
	}
	if (body.Type == "error") != (dialect == fleet.DialectAnthropic) {
		t.Errorf("not in dialect %v: %s", dialect, r.body)
	}
}

// TestExtProcMovesARequestToAnotherPool: Envoy always draws pool a; while a is
// full, requests go to b, and where b fails to c.
func TestExtProcMovesARequestToAnotherPool(t *testing.T) {
	release := make(chan struct{})
	a := envoytest.NewUpstream(t, envoytest.Gate(release, envoytest.JSON(`{}`)))
	b, c := envoytest.NewUpstream(t, envoytest.Status(503, "busy")), envoytest.NewUpstream(t, envoytest.JSON(`"c"`))
	s := startSteered(t, shape{pools: map[string][]*envoytest.Upstream{"A": {a}, "B": {b}, "C": {c}}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
- { name: a, endpoints: $A, maxInFlight: 1 }
- { name: b, endpoints: $B }
- { name: c, endpoints: $C }
routes:
- { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, split: [ { pool: a, weight: 1 }, { pool: b, weight: 0 } ], fallback: [ { pool: c } ] }
`})
	var wg sync.WaitGroup
	wg.Go(func() {
		if r, err := s.try("POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json"); err != nil || r.status != 200 {
			t.Errorf("request in pool a: %d, %v", r.status, err)
		}
	})
	a.WaitRequests(1)
	r := s.postJSON(chatPath, `{}`)
	if r.status != http.StatusOK || r.body != `"c"` {
		t.Errorf("moved request: %d %s", r.status, r.body)
	}
	expectHeader(t, r, "X-Route-Strategy", "dynamic")
	id := r.header.Get("x-fairlead-decision")
	first := s.outcome(t, id, func(o fleet.Outcome) bool { return o.Kind == fleet.AttemptEnded && o.Attempt == 1 })
	last := s.outcome(t, id, ended)
	if first.Endpoint != (fleet.EndpointKey{Pool: "b", Address: b.Addr()}) || last.Endpoint != (fleet.EndpointKey{Pool: "c", Address: c.Addr()}) {
		t.Errorf("attempts on %v and %v; want b, then c", first.Endpoint, last.Endpoint)
	}
	if e := s.lastEvent(); !e.Moved || e.Pool != "b" || e.Reason != plan.ReasonSpill {
		t.Errorf("event %+v", e)
	}
	close(release)
	wg.Wait()
	s.waitEmpty(t)
	if r := s.postJSON(chatPath, `{}`); r.status != http.StatusOK || s.lastEvent().Moved {
		t.Errorf("with room in a again: %d, %+v", r.status, s.lastEvent())
	}
}

// TestExtProcAheadOfASidecar: the plan moves requests to a pool that the sidecar
// doesn't have, as one that refused or has not yet got the new configuration.
// It serves them along its own chain.
func TestExtProcAheadOfASidecar(t *testing.T) {
	a, b := envoytest.NewUpstream(t, envoytest.Status(503, "busy")), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	s.cfg.Pools = append(s.cfg.Pools, fleet.Pool{Name: "new", MaxInFlight: 256, Endpoints: []fleet.Endpoint{
		{Name: "new-1", Address: netip.MustParseAddrPort("127.0.0.1:1")},
	}})
	s.cfg.Routes[1].Split = fleet.Split{{Pool: "a", Weight: 1}, {Pool: "new", Weight: 1}}
	s.compile(t, func(key fleet.EndpointKey) float64 {
		if key.Pool == "new" {
			return 1
		}
		return 0
	})
	for range 10 {
		r := s.postJSON(chatPath, `{}`)
		if r.status != http.StatusOK {
			t.Fatalf("status %d: %s", r.status, r.body)
		}
		if e := s.lastEvent(); !e.Moved || e.Pool != "new" || e.Reason != plan.ReasonPoolEmpty {
			t.Errorf("event %+v", e)
		}
		if o := s.outcome(t, r.header.Get("x-fairlead-decision"), ended); o.Endpoint.Pool != "a" {
			t.Errorf("served by %v", o.Endpoint)
		}
	}
	s.waitEmpty(t)
}

func TestExtProcDeadPassesRequestsAsLegacyAndRecovers(t *testing.T) {
	a, b := envoytest.NewUpstream(t, nil), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	s.stopExtProc()
	for range 20 {
		r := s.postJSON(chatPath, `{}`, "x-request-id", "mine")
		if r.status != http.StatusOK {
			t.Fatalf("status %d: %s", r.status, r.body)
		}
		expectHeader(t, r, "X-Route-Strategy", "legacy")
		expectHeader(t, r, "X-Request-Id", "*")
	}
	r := s.postJSON(chatPath, `{}`)
	o := s.outcome(t, r.header.Get("x-request-id"), ended)
	if o.Attempt != 1 || o.Cause != fleet.CauseOK {
		t.Errorf("outcome joined by Envoy's request id: %+v", o)
	}
	s.waitEmpty(t)
	s.serveExtProc(t)
	envoytest.Eventually(t, "a steered request", func() bool {
		return s.postJSON(chatPath, `{}`).header.Get("x-route-strategy") == "dynamic"
	})
}

// utf16Text is text in UTF-16, little end first, with a byte order mark.
func utf16Text(text string) string {
	out := []byte{0xff, 0xfe}
	for _, unit := range utf16.Encode([]rune(text)) {
		out = append(out, byte(unit), byte(unit>>8))
	}
	return string(out)
}

func gzipped(t *testing.T, text string) string {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestExtProcClassesOddMaxTokensAsEnvoyExposesThem(t *testing.T) {
	a, b := envoytest.NewUpstream(t, nil), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	const top = extproc.MaxBudget
	jsonType := []string{"content-type", "application/json"}
	for _, row := range []struct {
		name    string
		body    string
		headers []string
		want    fleet.Tokens
		source  extproc.BudgetSource
	}{
		{"plain", `{"max_tokens":100}`, nil, 100, extproc.BudgetBody},
		{"spaces", "{\"max_tokens\" : \n 100 \n}", nil, 100, extproc.BudgetBody},
		{"fraction", `{"max_tokens":100.0}`, nil, 100, extproc.BudgetBody},
		{"half", `{"max_tokens":1.5}`, nil, 2, extproc.BudgetBody},
		{"exponent", `{"max_tokens":1e3}`, nil, 1000, extproc.BudgetBody},
		{"text", `{"max_tokens":"100"}`, nil, 100, extproc.BudgetBody},
		{"escaped key", `{"max\u005ftokens":100}`, nil, 100, extproc.BudgetBody},
		{"byte order mark", "\ufeff{\"max_tokens\":100}", nil, 100, extproc.BudgetBody},
		{"behind a long prompt", `{"prompt":"` + strings.Repeat("x", 100_000) + `","max_tokens":100}`, nil, 100, extproc.BudgetBody},
		{"duplicate, last larger", `{"max_tokens":16,"max_tokens":32000}`, nil, 32000, extproc.BudgetBody},
		{"duplicate, last smaller", `{"max_tokens":32000,"max_tokens":16}`, nil, 16, extproc.BudgetBody},
		{"two fields", `{"max_tokens":16,"max_completion_tokens":32000}`, nil, 32000, extproc.BudgetBody},
		{"Responses API", `{"max_output_tokens":300}`, nil, 300, extproc.BudgetBody},
		{"null beside a number", `{"max_tokens":null,"max_completion_tokens":30}`, nil, 30, extproc.BudgetBody},
		{"1e9", `{"max_tokens":1e9}`, nil, 1e9, extproc.BudgetBody},
		{"2^31", `{"max_tokens":2147483648}`, nil, top, extproc.BudgetBody},
		{"20 digits", `{"max_tokens":99999999999999999999}`, nil, top, extproc.BudgetBody},
		{"2^63", `{"max_tokens":9223372036854775808}`, nil, 512, extproc.BudgetUnreadable},
		{"2^64-1", `{"max_tokens":18446744073709551615}`, nil, 512, extproc.BudgetUnreadable},
		{"1e400", `{"max_tokens":1e400}`, nil, 512, extproc.BudgetUnreadable},
		{"10,000 digits", `{"max_tokens":` + strings.Repeat("9", 10_000) + `}`, nil, 512, extproc.BudgetUnreadable},
		{"zero", `{"max_tokens":0}`, nil, 512, extproc.BudgetInvalid},
		{"negative", `{"max_tokens":-1}`, nil, 512, extproc.BudgetInvalid},
		{"negative zero", `{"max_tokens":-0}`, nil, 512, extproc.BudgetInvalid},
		{"full-width digits in text", `{"max_tokens":"５１２"}`, nil, 512, extproc.BudgetInvalid},
		{"full-width digits", `{"max_tokens":５１２}`, nil, 512, extproc.BudgetUnreadable},
		{"digit separator in text", `{"max_tokens":"1_000"}`, nil, 1000, extproc.BudgetBody},
		{"digit separator", `{"max_tokens":1_000}`, nil, 512, extproc.BudgetUnreadable},
		// Envoy never hands over containers or null: as if absent.
		{"array", `{"max_tokens":[512]}`, nil, 512, extproc.BudgetDefault},
		{"object", `{"max_tokens":{}}`, nil, 512, extproc.BudgetDefault},
		{"null", `{"max_tokens":null}`, nil, 512, extproc.BudgetDefault},
		{"bool", `{"max_tokens":true}`, nil, 512, extproc.BudgetInvalid},
		{"empty text", `{"max_tokens":""}`, nil, 512, extproc.BudgetInvalid},
		{"text with junk", `{"max_tokens":"512abc"}`, nil, 512, extproc.BudgetInvalid},
		{"hexadecimal text", `{"max_tokens":"0x200"}`, nil, 512, extproc.BudgetInvalid},
		{"NaN", `{"max_tokens":NaN}`, nil, 512, extproc.BudgetUnreadable},
		{"truncated", `{"max_tokens":100`, nil, 512, extproc.BudgetUnreadable},
		{"two documents", `{"model":"m"}{"max_tokens":9}`, nil, 512, extproc.BudgetUnreadable},
		{"nested only", `{"model":"m","metadata":{"max_tokens":9},"messages":[{"max_tokens":9}]}`, nil, 512, extproc.BudgetDefault},
		{"inside the prompt", `{"model":"m","prompt":"\"max_tokens\":999999"}`, nil, 512, extproc.BudgetDefault},
		{"other case", `{"model":"m","Max_Tokens":9}`, nil, 512, extproc.BudgetDefault},
		{"1,000 levels deep", `{"max_tokens":9,"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`, nil, 512, extproc.BudgetUnreadable},
		{"UTF-16", utf16Text(`{"max_tokens":9}`), nil, 512, extproc.BudgetUnreadable},
		{"gzip", gzipped(t, `{"max_tokens":9}`), []string{"content-encoding", "gzip"}, 512, extproc.BudgetUnreadable},
		{"none of the keys", `{"messages":[]}`, nil, 512, extproc.BudgetDefault},
		{"none of the keys, header", `{"messages":[]}`, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"no model, header smaller", `{"max_tokens":300}`, []string{"max_tokens", "16"}, 300, extproc.BudgetMismatch},
		{"model is no text", `{"model":{},"messages":[]}`, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"model too long to hand over", `{"model":"` + strings.Repeat("m", 9000) + `"}`, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"empty object, header", `{}`, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"top-level array, header", `[512]`, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"empty body, header", ``, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"header alone", `{"model":"m"}`, []string{"max_tokens", "16"}, 16, extproc.BudgetHeader},
		{"header and body agree", `{"max_tokens":16}`, []string{"max-tokens", "16"}, 16, extproc.BudgetAgreed},
		{"header smaller", `{"max_tokens":32000}`, []string{"x-max-tokens", "16"}, 32000, extproc.BudgetMismatch},
		{"header larger", `{"max_tokens":16}`, []string{"x-max-tokens", "32000"}, 32000, extproc.BudgetMismatch},
		{"two headers", `{"model":"m"}`, []string{"x-max-tokens", "16", "x-max-tokens", "700"}, 700, extproc.BudgetHeader},
		{"list in a header", `{"model":"m"}`, []string{"x-max-tokens", "16, 32000"}, 32000, extproc.BudgetHeader},
		{"header with sign", `{"model":"m"}`, []string{"x-max-tokens", "+512"}, 512, extproc.BudgetHeader},
		{"empty header", `{"model":"m"}`, []string{"x-max-tokens", ""}, 512, extproc.BudgetInvalid},
		{"small header on a broken body", `{`, []string{"x-max-tokens", "16"}, 512, extproc.BudgetUnreadable},
	} {
		r := s.send("POST", chatPath, strings.NewReader(row.body), append(jsonType, row.headers...)...)
		if r.status != http.StatusOK {
			t.Errorf("%s: status %d: %s", row.name, r.status, r.body)
			continue
		}
		if e := s.lastEvent(); e.Budget != row.want || e.BudgetSource != row.source || e.Action != plan.ActionSteer {
			t.Errorf("%s: %d from %s, action %d; want %d from %s", row.name, e.Budget, e.BudgetSource, e.Action, row.want, row.source)
		}
	}
	large := `{"max_tokens":9,"prompt":"` + strings.Repeat("x", 1<<20) + `"}`
	if s.send("POST", chatPath, strings.NewReader(large), jsonType...); s.lastEvent().BudgetSource != extproc.BudgetUnread {
		t.Errorf("1 MiB body: %+v", s.lastEvent())
	}
	small := `{"messages":[],"prompt":"` + strings.Repeat("x", 1<<20) + `"}`
	if s.send("POST", chatPath, strings.NewReader(small), append(jsonType, "max_tokens", "16")...); s.lastEvent().BudgetSource != extproc.BudgetUnread || s.lastEvent().Budget != 512 {
		t.Errorf("1 MiB body with a small header: %+v", s.lastEvent())
	}
	if s.send("POST", chatPath, io.MultiReader(strings.NewReader(`{"max_tokens":9}`)), jsonType...); s.lastEvent().BudgetSource != extproc.BudgetUnread {
		t.Errorf("chunked body: %+v", s.lastEvent())
	}
}

// TestExtProcClassesEverySpellingOfAPath: whatever a server would take for a
// generating path counts as one, and the server gets the spelling that was
// matched.
func TestExtProcClassesEverySpellingOfAPath(t *testing.T) {
	uri := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.RequestURI) })
	a, b := envoytest.NewUpstream(t, uri), envoytest.NewUpstream(t, uri)
	s := startSteered(t, steerShape(a, b, 256))
	for _, row := range []struct {
		path, upstream string
		generates      bool
	}{
		{"/v1/chat/completions", "", true},
		{"/v1/chat/completions?x=%73/../a%2Fb//c", "", true},
		{"/v1/chat/completion%73", "/v1/chat/completions", true},
		{"/v1/%63hat/%63%6f%6D%70letions", "/v1/chat/completions", true},
		{"/v1/chat/completions/", "", true},
		{"/v1/chat/completions//", "/v1/chat/completions/", true},
		{"/v1/chat/completions/.", "/v1/chat/completions/", true},
		{"/v1/chat/completions/%2e", "/v1/chat/completions/", true},
		{"/v1/chat/completions/x/..", "/v1/chat/completions/", true},
		{"/v1/models/%2e%2E/chat/completions", "/v1/chat/completions", true},
		{"/v1/chat//completions", "/v1/chat/completions", true},
		{"//v1/chat/completions", "/v1/chat/completions", true},
		{"/v1/chat%2Fcompletions", "/v1/chat/completions", true},
		{"/v1/chat%5Ccompletions", "/v1/chat/completions", true},
		{"/v1/chat/completions%2F", "/v1/chat/completions/", true},
		{"/v1/chat/completions%0a", "", true},
		{"/v1/messages/", "", true},
		{"/v1/chat/completions/batch", "", true},
		{"/v1/chat/completions%2Fbatch", "/v1/chat/completions/batch", true},
		{"/v1/chat/completions/batches", "", false},
		{"/v1/message%73", "/v1/messages", true},
		// No server decodes these to a generating path.
		{"/v1/chat/completion%2573", "", false},
		{"/v1/chat%252Fcompletions", "", false},
		{"/v1/chat/completions%20", "", false},
		{"/v1/responses/..", "/v1/", false},
		{"/v1/models/org%2Fmodel", "/v1/models/org/model", false},
		{"/v1/files/a%20b", "", false},
	} {
		r := s.postJSON(row.path, `{}`)
		if row.upstream == "" {
			row.upstream = row.path
		}
		if r.status != http.StatusOK || r.body != row.upstream {
			t.Errorf("%s: status %d, the server saw %s; want %s", row.path, r.status, r.body, row.upstream)
		}
		if e := s.lastEvent(); e.Generates != row.generates {
			t.Errorf("%s: generates: %v; want %v", row.path, e.Generates, row.generates)
		}
		if got := fleet.Generates(row.upstream); got != row.generates {
			t.Errorf("%s: fleet.Generates: %v; want %v", row.upstream, got, row.generates)
		}
	}
	// A route's prefix can't be left again.
	for _, path := range []string{"/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/..%2Fmetrics", "/v1/chat/%2E%2E%2F..%5Cmetrics"} {
		expectError(t, s.postJSON(path, `{}`), 404, fleet.DialectOpenAI, "POST /metrics")
	}
	r := s.postJSON("/v1/chat/completions%00", `{}`)
	if r.status != http.StatusBadRequest || !strings.Contains(r.body, "path is not valid") {
		t.Errorf("zero byte: %d %s", r.status, r.body)
	}
	expectHeader(t, r, "Content-Type", "application/json")
	s.waitEmpty(t)
}

func TestInFlightReturnsToZeroAfterAborts(t *testing.T) {
	events := make(chan string)
	a, b := envoytest.NewUpstream(t, envoytest.SSE(events)), envoytest.NewUpstream(t, envoytest.Hang())
	s := startSteered(t, steerShape(a, b, 256))
	s.waitEmpty(t)
	t.Run("client gone in the middle of a stream", func(t *testing.T) {
		s.compile(t, only(a))
		ctx, cancel := context.WithCancel(t.Context())
		r, err := s.open(ctx, "POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		events <- "data: x\n\n"
		if n := s.inFlight(a); n != 1 {
			t.Errorf("%d in flight during the stream", n)
		}
		cancel()
		if o := s.outcome(t, r.Header.Get("x-fairlead-decision"), ended); o.Cause != fleet.CauseClientGone || o.Code != 200 {
			t.Errorf("outcome %+v", o)
		}
		s.waitEmpty(t)
	})
	t.Run("client gone before the headers", func(t *testing.T) {
		s.compile(t, only(b))
		ctx, cancel := context.WithCancel(t.Context())
		seen := b.Count()
		var wg sync.WaitGroup
		wg.Go(func() {
			if r, err := s.open(ctx, "POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json"); err == nil {
				r.Body.Close()
			}
		})
		b.WaitRequests(seen + 1)
		if n := s.inFlight(b); n != 1 {
			t.Errorf("%d in flight while waiting", n)
		}
		cancel()
		wg.Wait()
		s.waitEmpty(t)
	})
	t.Run("server gone in the middle of a stream", func(t *testing.T) {
		s.compile(t, only(a))
		a.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "data: x\n\n")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		r, err := s.try("POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json")
		if err == nil {
			t.Error("the break did not reach the client")
		}
		if o := s.outcome(t, r.header.Get("x-fairlead-decision"), ended); o.Cause != fleet.CauseReset {
			t.Errorf("outcome %+v", o)
		}
		s.waitEmpty(t)
	})
}

func TestInFlightReturnsToZeroAfterAKilledEnvoy(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the grace of a killed Envoy")
	}
	t.Parallel()
	a, b := envoytest.NewUpstream(t, envoytest.Hang()), envoytest.NewUpstream(t, envoytest.Hang())
	s := startSteered(t, steerShape(a, b, 256))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { _, _ = s.try("POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json") })
	}
	envoytest.Eventually(t, "four confirmed attempts", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		started := 0
		for _, o := range s.outcomes {
			if o.Kind == fleet.AttemptStarted && o.Route == "chat" {
				started++
			}
		}
		return started >= 4
	})
	s.Kill()
	wg.Wait()
	deadline := time.Now().Add(accesslog.NodeGrace + accesslog.Lease/4)
	for s.ledger.Load().Total() != 0 && time.Now().Before(deadline) {
		time.Sleep(200 * time.Millisecond)
	}
	if n := s.ledger.Load().Total(); n != 0 {
		t.Errorf("%d in flight after the grace", n)
	}
}

// TestInFlightSurvivesRestarts: the log receiver goes away and comes back, then
// the whole ledger is lost as with a restart of serve, both in the middle of a
// stream; the heartbeat finds it again, and its end ends it.
func TestInFlightSurvivesRestarts(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for heartbeats")
	}
	events := make(chan string)
	t.Parallel()
	a, b := envoytest.NewUpstream(t, envoytest.SSE(events)), envoytest.NewUpstream(t, nil)
	s := startSteered(t, steerShape(a, b, 256))
	s.compile(t, only(a))
	r, err := s.open(t.Context(), "POST", chatPath, strings.NewReader(`{}`), "content-type", "application/json")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	id := r.Header.Get("x-fairlead-decision")
	s.outcome(t, id, func(o fleet.Outcome) bool { return o.Kind == fleet.AttemptStarted })
	s.stopLog()
	if n := s.inFlight(a); n != 1 {
		t.Errorf("%d in flight without a log receiver", n)
	}
	s.ledger.Store(accesslog.NewLedger(time.Now))
	s.serveLog(t)
	deadline := time.Now().Add(45 * time.Second)
	for s.inFlight(a) == 0 && time.Now().Before(deadline) {
		time.Sleep(200 * time.Millisecond)
	}
	if n := s.inFlight(a); n != 1 {
		t.Fatalf("%d in flight; a heartbeat should have found the stream", n)
	}
	close(events)
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		t.Error(err)
	}
	s.waitEmpty(t)
}

// recordTo is the folder that TestAccessLogEntriesAsRecorded writes to when
// FAIRLEAD_RECORD is set; they seed the fuzz target of package accesslog.
const recordTo = "../extproc/accesslog/testdata/envoy-1.40.0"

// TestAccessLogEntriesAsRecorded checks what Envoy logs of a retried request:
// the sizes, times, attempts and ids that package accesslog relies on.
func TestAccessLogEntriesAsRecorded(t *testing.T) {
	a, b := envoytest.NewUpstream(t, envoytest.Status(503, "busy")), envoytest.NewUpstream(t, envoytest.JSON(`{"answer":42}`))
	s := startSteered(t, steerShape(a, b, 256))
	s.compile(t, func(key fleet.EndpointKey) float64 {
		if key.Address == a.Addr() {
			return 1
		}
		return 1e-9
	})
	s.mu.Lock()
	s.messages = nil
	s.mu.Unlock()
	const body = `{"model":"m","max_tokens":7,"stream":false}`
	r := s.postJSON(chatPath, body)
	id := r.header.Get("x-fairlead-decision")
	for attempt, on := range []*envoytest.Upstream{a, b} {
		o := s.outcome(t, id, func(o fleet.Outcome) bool { return o.Kind == fleet.AttemptEnded && o.Attempt == attempt+1 })
		if o.Endpoint.Address != on.Addr() || o.Endpoint.Pool != "a" || o.RequestBytes != int64(len(body)) || o.Node != "shape-1" {
			t.Errorf("attempt %d: %+v", attempt+1, o)
		}
		if o.HeaderTime <= 0 || o.HeaderTime > time.Minute {
			t.Errorf("attempt %d: headers after %v", attempt+1, o.HeaderTime)
		}
	}
	o := s.outcome(t, id, ended)
	if o.RequestBytes != int64(len(body)) || o.ResponseBytes != int64(len(r.body)) || o.Attempt != 2 || o.Duration <= 0 {
		t.Errorf("request: %+v", o)
	}
	if os.Getenv("FAIRLEAD_RECORD") == "" {
		return
	}
	if err := os.MkdirAll(recordTo, 0o755); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, m := range s.messages {
		out, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("%02d-%s.pb", i, strings.TrimPrefix(m.GetIdentifier().GetLogName(), "fairlead."))
		if err := os.WriteFile(filepath.Join(recordTo, name), out, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
