package simulate

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// Setup is a fleet and a load, from which every seed's run is made.
type Setup struct {
	Workload Workload
	Scenario string // see Scenarios
	Profile  string // of the fleet's GPUs; see engine.ProfileNames
	GPUs     int
	// Load is the mean rate of arrivals as a share of what the fleet sustains.
	Load     float64
	Duration time.Duration
}

// Facts are what a setup came to.
type Facts struct {
	Capacity float64 // requests per second that the fleet sustains
	Rate     float64 // mean arrivals per second
	TooLong  int     // requests left out because no GPU could hold them
}

// Bounds of a setup's load and duration.
const (
	MaxLoad     = 10
	MaxDuration = 24 * time.Hour
)

// Check returns what makes the setup unusable, or nil.
func (s Setup) Check() error {
	if _, err := ScenarioByName(s.Scenario); err != nil {
		return err
	}
	if _, err := engine.ProfileByName(s.Profile); err != nil {
		return err
	}
	switch {
	case s.GPUs < 1 || s.GPUs > MaxGPUs:
		return fmt.Errorf("%d GPUs; accepted: 1…%d", s.GPUs, MaxGPUs)
	case !(s.Load > 0 && s.Load <= MaxLoad):
		return fmt.Errorf("load %g; accepted: above 0, at most %d", s.Load, MaxLoad)
	case s.Duration <= 0 || s.Duration > MaxDuration:
		return fmt.Errorf("duration %v; accepted: above 0, at most %v", s.Duration, MaxDuration)
	}
	return nil
}

// Spec returns the run of one seed, without policy, routers, warm-up and
// objective.
func (s Setup) Spec(seed uint64) (Spec, Facts, error) {
	if err := s.Check(); err != nil {
		return Spec{}, Facts{}, err
	}
	scenario, _ := ScenarioByName(s.Scenario)
	profile, _ := engine.ProfileByName(s.Profile)
	out := Spec{Seed: seed, GPUs: scenario.gpusOf(profile, s.GPUs), Duration: s.Duration}
	maxLen := longest(out.GPUs)
	facts := Facts{Capacity: capacityOf(out.GPUs, s.Workload)}
	facts.Rate = s.Load * facts.Capacity
	if !(facts.Rate > 0) {
		return Spec{}, Facts{}, fmt.Errorf("profile %q sustains no request of these arrivals", s.Profile)
	}
	out.Arrivals, facts.TooLong = s.Workload.Arrivals(seed, facts.Rate, s.Duration, maxLen)
	if scenario.shape != nil {
		out.Arrivals = scenario.shape(out.Arrivals, seed)
	}
	if scenario.faults != nil {
		out.Faults = scenario.faults(rand.New(rand.NewPCG(seed, 0x6661756c7473)), len(out.GPUs), s.Duration)
	}
	return out, facts, nil
}
