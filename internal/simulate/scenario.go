package simulate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// Scenario is what is special about a fleet and its load. Routers are told
// nothing of it: all endpoints have the same configured capacity.
type Scenario struct {
	Name, About string

	fleet  func(p engine.Profile, n int) []GPU
	shape  func([]load.Arrival, uint64) []load.Arrival
	faults func(rng *rand.Rand, gpus int, d time.Duration) []Fault
}

// Scenarios returns all scenarios in the order of the help.
func Scenarios() []Scenario {
	return []Scenario{
		{Name: "steady", About: "equal GPUs"},
		{Name: "bursts", About: "2.2 times the mean rate for 4 s of every 20 s, 0.7 times between", shape: burst},
		{Name: "mixed", About: "every fourth GPU has half the speed", fleet: halfSpeed},
		{Name: "slowdowns", About: "each GPU runs at a tenth of its speed for 5 s, once in 120 s on average", faults: slowdowns},
		{Name: "failures", About: "each GPU's engine crashes once in 10 min on average and is back after 20 s", faults: crashes},
		{Name: "types", About: "every other GPU is an L40S", fleet: withL40S},
	}
}

// ScenarioByName returns a scenario, or an error that names them all.
func ScenarioByName(name string) (Scenario, error) {
	var names []string
	for _, s := range Scenarios() {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return Scenario{}, fmt.Errorf("found scenario %q; accepted: %s", name, strings.Join(names, ", "))
}

// gpusOf is the scenario's fleet.
func (s Scenario) gpusOf(p engine.Profile, n int) []GPU {
	if s.fleet != nil {
		return s.fleet(p, n)
	}
	return equal(p, n)
}

func equal(p engine.Profile, n int) []GPU {
	return slices.Repeat([]GPU{{Type: shortName(p), Profile: p}}, n)
}

func shortName(p engine.Profile) string { return strings.TrimPrefix(p.Name, "llama-3.1-") }

func halfSpeed(p engine.Profile, n int) []GPU {
	out := equal(p, n)
	for i := 3; i < n; i += 4 {
		out[i] = slowedGPU(p, 2)
	}
	return out
}

// slowedGPU is one whose steps take factor times as long, all the time.
func slowedGPU(p engine.Profile, factor float64) GPU {
	return GPU{Type: fmt.Sprintf("%s/%g", shortName(p), factor), Profile: p.Slowed(factor)}
}

func withL40S(p engine.Profile, n int) []GPU {
	other, err := engine.ProfileByName("llama-3.1-8b-l40s")
	if err != nil {
		panic(err) // a profile of the package's own
	}
	out := equal(p, n)
	for i := 1; i < n; i += 2 {
		out[i] = GPU{Type: shortName(other), Profile: other}
	}
	return out
}

func burst(arrivals []load.Arrival, seed uint64) []load.Arrival {
	rng := rand.New(rand.NewPCG(seed, 0x6275727374))
	return WithBursts(arrivals, time.Duration(rng.Int64N(int64(burstPeriod))))
}

func slowdowns(rng *rand.Rand, gpus int, d time.Duration) []Fault {
	return recurring(rng, gpus, d, Fault{For: 5 * time.Second, Slow: 10}, 120*time.Second)
}

func crashes(rng *rand.Rand, gpus int, d time.Duration) []Fault {
	return recurring(rng, gpus, d, Fault{For: 20 * time.Second}, 600*time.Second)
}

// recurring repeats a fault on every GPU after exponential gaps.
func recurring(rng *rand.Rand, gpus int, d time.Duration, f Fault, every time.Duration) []Fault {
	var out []Fault
	for g := range gpus {
		for t := time.Duration(0); ; t += f.For {
			t += time.Duration(rng.ExpFloat64() * float64(every-f.For))
			if t >= d {
				break
			}
			f.GPU, f.At = g, t
			out = append(out, f)
		}
	}
	return out
}

// capacityOf is the requests per second that a fleet can sustain under a
// workload: the sum of its engines' own (see [engine.Profile.Capacity]).
func capacityOf(gpus []GPU, w Workload) float64 {
	prompt, output := w.Lengths(longest(gpus))
	known := map[string]float64{}
	sum := 0.0
	for _, g := range gpus {
		if _, ok := known[g.Type]; !ok {
			known[g.Type] = g.Profile.Capacity(prompt, output)
		}
		sum += known[g.Type]
	}
	return sum
}

// longest is how long a request may be for every GPU to hold it.
func longest(gpus []GPU) int {
	n := gpus[0].Profile.MaxModelLen()
	for _, g := range gpus {
		n = min(n, g.Profile.MaxModelLen())
	}
	return n
}
