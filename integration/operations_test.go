package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestServerIsDrainedByTheConfigFile takes a server out of service and back as an
// operator does: by two edits of the config file.
func TestServerIsDrainedByTheConfigFile(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	config := func(drain bool) string {
		return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
  - { name: gpu, endpoints: [{ name: gpu-1, address: %s, drain: %v }, { name: gpu-2, address: %s }] }
routes:
  - { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [{ pool: gpu, weight: 1 }] }
`, a.Addr(), drain, b.Addr())
	}
	p := newPlace(t, config(false))
	p.serve(t)
	_, listen := p.sidecar(t)
	load := startLoad(t, 40, listen)
	everyStrategy := func(check func(t *testing.T, listen, want string, headers ...string), want string) {
		t.Helper()
		for _, strategy := range []string{"dynamic", "legacy"} {
			check(t, listen, want, "x-route-strategy", strategy)
		}
	}
	everyStrategy(expectReached, "a")
	everyStrategy(expectReached, "b")

	stream := scriptStreams(1, a, "a")[0]
	// b answers this path with its name, a with a stream: until a is met.
	envoytest.Eventually(t, "a stream on a", func() bool { return stream.tryOpen(t, listen) })

	p.write(t, "", config(true))
	everyStrategy(expectOnly, "b")
	// Ends of the load's requests that were on it come with the log.
	envoytest.Eventually(t, "the fleet shows the drain, with the stream alone in flight", func() bool {
		e := p.endpoint(t, "gpu-1")
		return e.State == "draining" && e.Share == 0 && e.InFlight == 1
	})
	stream.pass(t, "while it drains")
	stream.end(t)
	envoytest.Eventually(t, "nothing in flight, so it may be stopped", func() bool { return p.endpoint(t, "gpu-1").InFlight == 0 })

	p.write(t, "", config(false))
	everyStrategy(expectReached, "a")
	load.mustNotFail(t)
}

// waitIdle waits until nothing is in flight, as counted after this moment.
func (p *place) waitIdle(t *testing.T) {
	t.Helper()
	tick := uint64(0)
	envoytest.Eventually(t, "nothing in flight", func() bool {
		f, err := p.client.Fleet(context.Background())
		if err != nil {
			return false
		}
		if tick == 0 {
			tick = f.Tick
		}
		return f.Tick >= tick+2 && p.inFlight() == 0
	})
}

// TestZonesAndSessionsFromTheConfig runs a sidecar in each of two zones, as
// `fairlead bootstrap --zone` sets it up.
func TestZonesAndSessionsFromTheConfig(t *testing.T) {
	servers := upstreams(t, 4)
	var endpoints strings.Builder
	zones := []string{"a", "a", "b", "b"}
	for i, u := range servers {
		u.Handle(named(zones[i] + fmt.Sprint(i)))
		fmt.Fprintf(&endpoints, "{ address: %s, zone: %s }, ", u.Addr(), zones[i])
	}
	p := newPlace(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
  - { name: gpu, endpoints: [%s] }
routes:
  - { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [{ pool: gpu, weight: 1 }] }
`, strings.TrimSuffix(endpoints.String(), ", ")))
	p.serve(t)
	for _, zone := range []string{"a", "b"} {
		_, listen := p.sidecar(t, "--zone", zone)
		// Before the first health check of ext_proc has passed, Envoy picks.
		envoytest.Eventually(t, "requests are steered", func() bool {
			_, header, _ := chat(t, listen)
			return header.Get("X-Route-Strategy") == "dynamic"
		})
		reached := map[string]bool{}
		for range 60 {
			got := answeredBy(t, listen)
			if !strings.HasPrefix(got, zone) {
				t.Errorf("a request of zone %s went to %s", zone, got)
			}
			reached[got] = true
		}
		if len(reached) != 2 {
			t.Errorf("zone %s: reached %v", zone, reached)
		}
		for session := range 3 {
			home := ""
			for range 3 {
				// The load bound has nothing to say when nothing is in flight.
				p.waitIdle(t)
				got := answeredBy(t, listen, "x-session-affinity", fmt.Sprint("session ", session))
				if home != "" && got != home || !strings.HasPrefix(got, zone) {
					t.Errorf("zone %s, session %d: went to %s after %s", zone, session, got, home)
				}
				home = got
			}
		}
	}
}
