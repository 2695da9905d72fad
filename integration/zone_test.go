package integration

import (
	"fmt"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/plan"
)

// TestSidecarsKeepToTheirZone runs a sidecar in each of two zones and one that
// is nowhere: requests stay in the zone until it is at 70 % of its capacity, and
// come back.
func TestSidecarsKeepToTheirZone(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	config := func(drain bool) *fleet.Config {
		return parseConfig(t, fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
- { name: gpu, maxInFlight: 10, endpoints: [ { address: %q, zone: a, drain: %v }, { address: %q, zone: b } ] }
routes:
- { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [ { pool: gpu, weight: 1 } ] }
`, a.Addr(), drain, b.Addr()))
	}
	c := newConducted(t, config(false))
	c.plane.zones = map[string]string{"s-a": "a", "s-b": "b"}
	listen := map[string]string{}
	for _, id := range []string{"s-a", "s-b", "s-nowhere"} {
		e, at := c.plane.serving(id)
		listen[id] = at
		c.factEnvoy = &factEnvoy{t: t, Envoy: e}
		c.waitSteered(t)
	}
	stay := func(id, want string) {
		t.Helper()
		for range 15 {
			if got := answeredBy(t, listen[id]); got != want {
				t.Fatalf("a request of %s went to %s", id, got)
			}
			if reason := c.lastEvent().Reason; reason != plan.ReasonWeighted {
				t.Fatalf("a request of %s went to %s: %s", id, want, reason)
			}
			c.waitEmptyBut(t, 0)
		}
	}
	stay("s-a", "a")
	stay("s-b", "b")
	expectReached(t, listen["s-nowhere"], "a")
	expectReached(t, listen["s-nowhere"], "b")

	// Six streams: a little room is left. Seven: none.
	c.waitEmptyBut(t, 0)
	streams := scriptStreams(7, a, "a")
	for _, s := range streams[:6] {
		s.open(t, listen["s-a"])
	}
	if got := answeredBy(t, listen["s-a"]); got != "a" {
		t.Errorf("with six in flight a request of zone a went to %s", got)
	}
	c.waitEmptyBut(t, 6)
	streams[6].open(t, listen["s-a"])
	spilled := 0
	for range 30 {
		got, reason := answeredBy(t, listen["s-a"]), c.lastEvent().Reason
		if (got == "b") != (reason == plan.ReasonZoneSpill) {
			t.Errorf("went to %s: %s", got, reason)
		}
		if got == "b" {
			spilled++
		}
		c.waitEmptyBut(t, 7)
	}
	// Seven of eight have b among their draws, and that has less to do.
	if spilled < 15 {
		t.Errorf("%d of 30 requests left the full zone", spilled)
	}
	for _, s := range streams {
		s.end(t)
	}
	c.waitEmptyBut(t, 0)
	stay("s-a", "a")

	// Nobody is left in the zone: all others serve, and that is no spill.
	c.publish(t, config(true))
	stay("s-a", "b")
}

// waitEmptyBut waits until so many attempts are in flight.
func (s *steered) waitEmptyBut(t *testing.T, n int) {
	t.Helper()
	envoytest.Eventually(t, fmt.Sprint(n, " in flight"), func() bool { return int(s.ledger.Load().Total()) == n })
}
