package integration

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// conducted is the control plane of one config: xDS, ext_proc and access log,
// with the plan that follows from the config.
type conducted struct {
	*steered
	plane *adsPlane
}

func newConducted(t *testing.T, cfg *fleet.Config) *conducted {
	t.Helper()
	plane := newDeadPlane(t)
	s := &steered{cfg: cfg, at: plane.runtime}
	s.ledger.Store(accesslog.NewLedger(time.Now))
	s.compile(t, nil)
	s.serveExtProc(t)
	s.serveLog(t)
	t.Cleanup(func() { s.stopExtProc(); s.stopLog() })
	plane.start(cfg)
	return &conducted{s, plane}
}

// publish puts a config in force, for the plan and for Envoy.
func (c *conducted) publish(t *testing.T, cfg *fleet.Config) map[string]int {
	t.Helper()
	c.cfg = cfg
	c.compile(t, nil)
	return c.plane.publish(cfg)
}

func parseConfig(t *testing.T, text string) *fleet.Config {
	t.Helper()
	cfg, err := fleet.Parse("fairlead.yaml", []byte(shapeHead+text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return cfg
}

// TestDrainedEndpointFinishesItsStreamsAndGetsNothingNew drains one endpoint,
// then the whole pool, and takes it back, by nothing but changes of the config.
func TestDrainedEndpointFinishesItsStreamsAndGetsNothingNew(t *testing.T) {
	for _, row := range []struct{ name, pool string }{
		{"HTTP/1.1", ""},
		{"HTTP/2", "protocol: h2c, "},
		{"HTTP/1.1 with health checks", "healthCheck: { path: /health, interval: 100ms, timeout: 90ms }, outlierDetection: true, "},
		{"HTTP/2 with health checks", "protocol: h2c, healthCheck: { path: /health, interval: 100ms, timeout: 90ms }, outlierDetection: true, "},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			checkDrain(t, row.pool)
		})
	}
}

// eventStream is one running answer and the way to feed it.
type eventStream struct {
	path   string
	events chan string
	body   *bufio.Scanner
}

// startEventStreams opens event streams through an Envoy to an upstream that must
// be the only one to be chosen at the moment; other requests are answered with
// its name.
func startEventStreams(t *testing.T, n int, listen string, up *envoytest.Upstream, name string) []*eventStream {
	t.Helper()
	streams := scriptStreams(n, up, name)
	for _, s := range streams {
		s.open(t, listen)
	}
	return streams
}

// scriptStreams prepares an upstream for n streams that are still to be opened.
func scriptStreams(n int, up *envoytest.Upstream, name string) []*eventStream {
	streams := make([]*eventStream, n)
	scripts := http.NewServeMux()
	scripts.Handle("/", named(name))
	for i := range streams {
		streams[i] = &eventStream{events: make(chan string), path: fmt.Sprint("/v1/stream/", i)}
		scripts.Handle(streams[i].path, envoytest.SSE(streams[i].events))
	}
	up.Handle(scripts)
	return streams
}

func (s *eventStream) open(t *testing.T, listen string) {
	t.Helper()
	if !s.tryOpen(t, listen) {
		t.Fatalf("%s was answered by another", s.path)
	}
}

// tryOpen reports whether the request met the scripted upstream.
func (s *eventStream) tryOpen(t *testing.T, listen string) bool {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listen+s.path, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if response.Header.Get("Content-Type") != "text/event-stream" {
		return false
	}
	s.body = bufio.NewScanner(response.Body)
	s.pass(t, "first")
	return true
}

// pass sends one event and wants it at the other end.
func (s *eventStream) pass(t *testing.T, text string) {
	t.Helper()
	select {
	case s.events <- "data: " + text + "\n":
	case <-time.After(20 * time.Second):
		t.Fatalf("the stream is gone before %q", text)
	}
	if !s.body.Scan() || s.body.Text() != "data: "+text {
		t.Fatalf("got %q, %v; want %q", s.body.Text(), s.body.Err(), text)
	}
}

// end lets the stream end and wants nothing more.
func (s *eventStream) end(t *testing.T) {
	t.Helper()
	close(s.events)
	if s.body.Scan() || s.body.Err() != nil {
		t.Errorf("end of the stream: %q, %v", s.body.Text(), s.body.Err())
	}
}

// answeredBy sends one request and returns the name that its upstream answers.
func answeredBy(t *testing.T, listen string, headers ...string) string {
	t.Helper()
	status, _, body := chat(t, listen, headers...)
	if status != http.StatusOK {
		t.Fatalf("%d: %s", status, body)
	}
	return strings.Trim(body, `"`)
}

// expectOnly waits until requests reach one upstream alone, since workers follow
// the acknowledgement within moments, and then wants it to stay so.
func expectOnly(t *testing.T, listen, want string, headers ...string) {
	t.Helper()
	envoytest.Eventually(t, fmt.Sprint("only ", want, " is reached with ", headers), func() bool {
		for range 20 {
			if answeredBy(t, listen, headers...) != want {
				return false
			}
		}
		return true
	})
	for range 60 {
		if got := answeredBy(t, listen, headers...); got != want {
			t.Errorf("with %v: %s answered after %s alone had for twenty requests", headers, got, want)
		}
	}
}

func expectReached(t *testing.T, listen, want string, headers ...string) {
	t.Helper()
	envoytest.Eventually(t, fmt.Sprint(want, " is reached with ", headers), func() bool {
		return answeredBy(t, listen, headers...) == want
	})
}

func chats(u *envoytest.Upstream) int {
	n := 0
	for _, r := range u.Requests() {
		if r.Path == chatPath {
			n++
		}
	}
	return n
}

func checkDrain(t *testing.T, options string) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	spare := envoytest.NewUpstream(t, named("spare"))
	config := func(drainA, drainB bool, fallback string) *fleet.Config {
		return parseConfig(t, fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
- { name: gpu, %s endpoints: [ { address: %q, drain: %v }, { address: %q, drain: %v } ] }
- { name: spare, endpoints: [ { address: %q } ] }
routes:
- { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [ { pool: gpu, weight: 1 } ], fallback: [ %s ] }
`, options, a.Addr(), drainA, b.Addr(), drainB, spare.Addr(), fallback))
	}
	const fallback = "{ pool: spare }"
	c := newConducted(t, config(false, false, fallback))
	e, listen := c.plane.serving("s1")
	c.factEnvoy = &factEnvoy{t: t, Envoy: e}
	c.waitSteered(t)
	// Also the requests of all the changes must be answered.
	load := startLoad(t, 40, listen)

	c.compile(t, only(a))
	streams := startEventStreams(t, 2, listen, a, "a")
	flow := func(text string) {
		t.Helper()
		for _, s := range streams {
			s.pass(t, text)
		}
	}
	c.compile(t, nil)
	everyStrategy := func(check func(t *testing.T, listen, want string, headers ...string), want string) {
		t.Helper()
		for _, strategy := range []string{"dynamic", "legacy"} {
			check(t, listen, want, "x-route-strategy", strategy)
		}
	}
	everyStrategy(expectReached, "a")
	everyStrategy(expectReached, "b")

	if got := c.publish(t, config(true, false, fallback)); len(got) != 1 || got["ClusterLoadAssignment"] != 1 {
		t.Errorf("draining an endpoint sent %v", got)
	}
	everyStrategy(expectOnly, "b")
	flow("one of two drains")

	// The last of the pool drains: the chain goes on.
	c.publish(t, config(true, true, fallback))
	everyStrategy(expectOnly, "spare")
	flow("all drain")
	load.mustNotFail(t)

	// Nothing else is left: an error that clients may try again, and still
	// nothing new for those that drain.
	c.publish(t, config(true, true, ""))
	had := chats(a) + chats(b)
	for _, strategy := range []string{"dynamic", "legacy"} {
		refused := func() bool {
			status, _, body := chat(t, listen, "x-route-strategy", strategy)
			return status == http.StatusServiceUnavailable && strings.Contains(body, `"error"`)
		}
		envoytest.Eventually(t, "503 under "+strategy, refused)
		for range 20 {
			if !refused() {
				t.Errorf("%s: an answer other than 503 without anybody who serves", strategy)
			}
		}
	}
	if n := chats(a) + chats(b) - had; n != 0 {
		t.Errorf("%d new requests reached draining endpoints", n)
	}
	flow("nobody serves")

	c.publish(t, config(false, false, fallback))
	everyStrategy(expectReached, "a")
	everyStrategy(expectReached, "b")
	flow("back")
	for _, s := range streams {
		s.end(t)
	}
}
