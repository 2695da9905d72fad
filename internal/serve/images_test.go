package serve

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// TestBodiesFullOfImagesEjectNobody: a body's length is the caller's word for its
// prompt's. Two megabytes of image are half a million tokens by that measure.
func TestBodiesFullOfImagesEjectNobody(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.config.Load()
	pool := cfg.Pools[0]
	slots := make([]uint32, len(pool.Endpoints))
	for i, e := range pool.Endpoints {
		slots[i] = s.ledger.Slot(fleet.EndpointKey{Pool: pool.Name, Address: e.Address})
	}
	now := time.Now()
	worst := 0.0
	for tick := range 100 {
		now = now.Add(tickEvery)
		if tick%4 == 0 {
			for _, e := range pool.Endpoints {
				s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: pool.Name, Address: e.Address}, Sample: telemetry.Sample{
					At: now.Add(-120 * time.Millisecond), Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens,
					KVUsage: 0.1, Running: 2, KVTokens: 447_040,
				}})
			}
		}
		for range 4 { // to the first endpoint alone
			s.observeRequest(extproc.Event{Steered: true, Slot: slots[0], Prompt: 1 << 20})
		}
		s.step(now)
		e := s.Fleet().Pools[0].Endpoints[0]
		worst = max(worst, e.Risk)
		if e.State == fleet.StateEjected.String() {
			t.Fatalf("tick %d: ejected, why %s, risk %v", tick, e.Why, e.Risk)
		}
	}
	if worst > float64(fleet.RiskPrefer) {
		t.Errorf("risk went up to %v by the length of bodies, with a tenth of the cache in use", worst)
	}
	if worst < 0.005 {
		t.Errorf("risk stayed at %v: sent tokens count for nothing", worst)
	}
}
