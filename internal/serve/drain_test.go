package serve

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
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

// TestDrainForgetsOldFaults: what was long over before an endpoint was drained
// does not put it out when it comes back, and what happens after that does.
func TestDrainForgetsOldFaults(t *testing.T) {
	for _, xid := range []int{48, 79, 0} { // 0: three refused connections
		t.Run(fmt.Sprint(xid), func(t *testing.T) {
			s, err := New(Options{Config: testConfig(t)})
			if err != nil {
				t.Fatal(err)
			}
			cfg := *s.config.Load()
			key := fleet.EndpointKey{Pool: cfg.Pools[0].Name, Address: cfg.Pools[0].Endpoints[0].Address}
			now, code, tokens := time.Now(), 0, 0.0
			play := func(span time.Duration) string {
				for end := now.Add(span); now.Before(end); {
					now, tokens = now.Add(bucket), tokens+1
					s.scoring.read(telemetry.Reading{Endpoint: key, Sample: telemetry.Sample{
						At: now, Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasGenerationTokens | telemetry.HasXID,
						KVUsage: 0.1, Running: 1, GenerationTokens: tokens, XID: code,
					}})
					s.step(now)
				}
				return s.Fleet().Pools[0].Endpoints[0].State
			}
			fault := func() {
				if xid != 0 {
					code, xid = xid, 48+79-xid // the other one, next time
					return
				}
				for range 3 {
					s.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Endpoint: key, Cause: fleet.CauseConnectFailed}, byKey(admission.Client{}))
				}
			}
			ejected := fleet.StateEjected.String()
			play(time.Second)
			fault()
			if got := play(bucket); got != ejected {
				t.Fatalf("%s at a fault", got)
			}
			if got := play(10 * time.Minute); got == ejected {
				t.Fatal("still out after ten minutes without a fault")
			}
			pools := append([]fleet.Pool(nil), cfg.Pools...)
			pools[0].Endpoints = append([]fleet.Endpoint(nil), pools[0].Endpoints...)
			pools[0].Endpoints[0].Drain = true
			drained := cfg
			drained.Pools = pools
			s.scoring.reconfigure(&drained, nil)
			play(10 * time.Second)
			s.scoring.reconfigure(&cfg, nil)
			if got := play(bucket); got != fleet.StateProbe.String() {
				t.Errorf("%s after the drain, want a slow start", got)
			}
			fault()
			if got := play(bucket); got != ejected {
				t.Errorf("%s at a new fault after the drain", got)
			}
		})
	}
}
