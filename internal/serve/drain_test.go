package serve

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestDrainingEndpointGetsNothingAndComesBackSlowly(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	cfg := *s.config.Load()
	drain := func(on bool) {
		pools := append([]fleet.Pool(nil), cfg.Pools...)
		pools[0].Endpoints = append([]fleet.Endpoint(nil), pools[0].Endpoints...)
		pools[0].Endpoints[0].Drain = on
		next := cfg
		next.Pools = pools
		s.scoring.reconfigure(&next, nil)
	}
	share := func(now time.Time) (drained, other float64, state string) {
		s.step(now)
		e := s.Fleet().Pools[0].Endpoints
		return e[0].Share, e[1].Share, e[0].State
	}
	now := time.Now()
	if first, other, _ := share(now); first != other {
		t.Fatalf("shares %v and %v before the drain", first, other)
	}
	drain(true)
	if first, other, state := share(now.Add(bucket)); first != 0 || other != 0.5 || state != fleet.StateDraining.String() {
		t.Errorf("share %v, the others %v, state %s while it drains", first, other, state)
	}
	drain(false)
	if first, other, state := share(now.Add(2 * bucket)); first <= 0 || first >= other/2 || state == fleet.StateDraining.String() {
		t.Errorf("share %v, the others %v, state %s when it is back: want a slow start", first, other, state)
	}
	if got := s.plan.Load(); got == nil || got.Tick() < 3 {
		t.Error("no plan compiled with a draining endpoint")
	}
}
