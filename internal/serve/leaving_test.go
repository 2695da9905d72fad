package serve

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// planOf is a plan of that tick, of nothing.
func planOf(t *testing.T, tick uint64) *plan.Plan {
	t.Helper()
	p, err := plan.Compile(plan.Inputs{Tick: tick})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestWhoLeavesIsWaitedForUntilAPlanKnows: the plan of the tick before doesn't; nor is
// it waited for for ever. The clock is the bubble's own.
func TestWhoLeavesIsWaitedForUntilAPlanKnows(t *testing.T) {
	for _, row := range []struct {
		name   string
		next   time.Duration // when there is a new plan
		waited time.Duration
		tick   uint64 // of the plan then
	}{
		{"a tick later", tickEvery + time.Millisecond, tickEvery + tickEvery/2, 8},
		{"never", time.Hour, 4 * tickEvery, 7},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &Server{}
			s.plan.Store(planOf(t, 7))
			next := planOf(t, 8)
			defer time.AfterFunc(row.next, func() { s.plan.Store(next) }).Stop()
			began := time.Now()
			s.awaitPlan(7)
			if took := time.Since(began); took != row.waited || s.plan.Load().Tick() != row.tick {
				t.Errorf("%s: waited for %v until the plan of tick %d; want %v and %d", row.name, took, s.plan.Load().Tick(), row.waited, row.tick)
			}
		})
	}
}

// TestConfigThatIsNotPublishedDrainsNobody: what it lacks serves on.
func TestConfigThatIsNotPublishedDrainsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // waits for a plan that nobody makes
		s, err := New(Options{Config: testConfig(t)})
		if err != nil {
			t.Fatal(err)
		}
		next := *s.config.Load()
		next.Pools = append([]fleet.Pool(nil), next.Pools...)
		next.Pools[0].Endpoints = next.Pools[0].Endpoints[:2]
		next.Groups = nil // nothing to publish
		if err := s.Reconfigure(&next); err == nil {
			t.Fatal("a config without groups was published")
		}
		s.step(time.Now().Add(bucket))
		rows := s.Fleet().Pools[0].Endpoints
		if len(rows) != 3 || rows[2].State == fleet.StateDraining.String() || rows[2].Share != rows[0].Share {
			t.Errorf("%+v; want three endpoints with equal shares", rows)
		}
	})
}

// TestEndpointsOfPoolsThatLeftAreForgotten, also while they work: there is nobody whose
// work it could be told apart from.
func TestEndpointsOfPoolsThatLeftAreForgotten(t *testing.T) {
	cfg := twoServers()
	cfg.Pools = append(cfg.Pools, fleet.Pool{Name: "spare", MaxInFlight: 8, Endpoints: []fleet.Endpoint{
		{Name: "s", Address: netip.MustParseAddrPort("10.0.0.2:1"), Capacity: 1}}})
	s := newViewed(t, cfg)
	s.step(time.Now())
	key := fleet.EndpointKey{Pool: "spare", Address: cfg.Pools[1].Endpoints[0].Address}
	s.ledger.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: "1718924567123-007-0001", Attempt: 1, Endpoint: key, At: time.Now()})
	s.reconfigure(twoServers(), nil)
	s.step(time.Now())
	if len(s.departed) != 0 || s.ledger.Total() != 1 {
		t.Errorf("%v are remembered, with %d in flight", s.departed, s.ledger.Total())
	}
	// One that left before its pool did is forgotten with it.
	s.reconfigure(cfg, nil)
	moved := *cfg
	moved.Pools = append([]fleet.Pool(nil), cfg.Pools...)
	moved.Pools[1].Endpoints = []fleet.Endpoint{{Name: "t", Address: netip.MustParseAddrPort("10.0.0.2:2"), Capacity: 1}}
	s.reconfigure(&moved, nil)
	s.step(time.Now())
	if !s.departed[key] {
		t.Fatalf("%v are remembered; want %v", s.departed, key)
	}
	s.reconfigure(twoServers(), nil)
	if len(s.departed) != 0 {
		t.Errorf("%v are remembered", s.departed)
	}
}

// TestWithoutOthersNoWorkIsElsewhere: where no endpoint holds anything by the plan,
// there are none whose work it could be told apart from.
func TestWithoutOthersNoWorkIsElsewhere(t *testing.T) {
	s := newViewed(t, twoServers())
	endpoint := func(i int, set func(*plan.EndpointInput)) plan.EndpointInput {
		e := plan.EndpointInput{Address: s.key(i).Address, Weight: 1, MaxInFlight: 10, InFlight: 3, State: fleet.StateNeutral}
		set(&e)
		return e
	}
	drains := func(e *plan.EndpointInput) { e.State = fleet.StateDraining }
	for _, row := range []struct {
		name      string
		set       func(*plan.EndpointInput) // of the other endpoint
		elsewhere int
	}{
		{"drains too", drains, 0},
		{"of weight 0", func(e *plan.EndpointInput) { e.Weight = 0 }, 0},
		{"closed at full risk", func(e *plan.EndpointInput) { e.Closed, e.Risk = true, 1 }, 0},
		{"serves", func(*plan.EndpointInput) {}, 3},
	} {
		got := s.poolViews(time.Now(), []plan.PoolInput{{Name: "h100", Endpoints: []plan.EndpointInput{endpoint(0, drains), endpoint(1, row.set)}}})[0]
		if got.Elsewhere != row.elsewhere || got.InFlight != 6 {
			t.Errorf("one drains, the other %s: told %+v; want %d of 6 elsewhere", row.name, got, row.elsewhere)
		}
	}
}
