package demo

import (
	"context"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/load"
)

// CompareOptions say what is run under both strategies.
type CompareOptions struct {
	Options
	Seeds    []uint64
	Sidecars []int
}

// Comparison holds every run, for the table and for -o json.
type Comparison struct {
	Kind string    `json:"kind"` // "comparison"
	Runs []Summary `json:"runs"`
	Rows []Compare `json:"rows"`
}

// Compare is one figure under both strategies with one number of sidecars.
type Compare struct {
	Sidecars int    `json:"sidecars"`
	Figure   string `json:"figure"`
	// Seeds is how many values stand behind the means. With one there is no
	// interval: the halves are 0 and Better is "-".
	Seeds int `json:"seeds"`
	// Means over the seeds with the half-widths of their 95 % intervals
	// (Student's t). The two orders of a seed share its arrivals, so they count
	// as one value, their mean.
	Legacy      float64 `json:"legacy"`
	LegacyHalf  float64 `json:"legacy_half"`
	Dynamic     float64 `json:"dynamic"`
	DynamicHalf float64 `json:"dynamic_half"`
	// Difference is dynamic − legacy, paired by seed.
	Difference     float64 `json:"difference"`
	DifferenceHalf float64 `json:"difference_half"`
	// Better is "dynamic", "legacy" or "" when the interval of the difference
	// holds 0, and "-" for figures that are not better or worse.
	Better string `json:"better"`
}

// figure is one row of the table.
type figure struct {
	name string
	of   func(Summary) float64
	// judged is false for figures that only describe the run.
	judged bool
}

func figures() []figure {
	return []figure{
		{"TTFT p50 ms", func(s Summary) float64 { return s.P50 }, true},
		{"TTFT p95 ms", func(s Summary) float64 { return s.P95 }, true},
		{"TTFT p99 ms", func(s Summary) float64 { return s.P99 }, true},
		{"over 2 s %", func(s Summary) float64 { return 100 * s.SlowShare }, true},
		{"errors", func(s Summary) float64 { return float64(s.Errors) }, true},
		{"429s", func(s Summary) float64 { return float64(s.Throttled) }, true},
		{"GPU h100 %", func(s Summary) float64 { return 100 * busyOf(s, "h100") }, false},
		{"GPU a100 %", func(s Summary) float64 { return 100 * busyOf(s, "a100") }, false},
		{"CPU fairlead+sim+load, cores", func(s Summary) float64 { return s.CPU[0].Cores }, false},
		{"CPU all Envoys, cores", func(s Summary) float64 { return envoyCores(s) }, false},
		{"CPU busiest Envoy, cores", func(s Summary) float64 { return busiestEnvoy(s) }, false},
		{"machine idle %", func(s Summary) float64 { return 100 * s.Idle }, false},
	}
}

func busyOf(s Summary, pool string) float64 {
	for _, b := range s.Utilisation {
		if b.Pool == pool {
			return b.Busy
		}
	}
	return math.NaN()
}

func envoyCores(s Summary) float64 {
	sum := 0.0
	for _, c := range s.CPU[1:] {
		sum += c.Cores
	}
	return sum
}

func busiestEnvoy(s Summary) float64 {
	most := 0.0
	for _, c := range s.CPU[1:] {
		most = max(most, c.Cores)
	}
	return most
}

// RunCompare runs the same arrivals and faults under both strategies, in both
// orders, for every seed and number of sidecars.
func RunCompare(ctx context.Context, o CompareOptions, note func(string)) (Comparison, error) {
	c := Comparison{Kind: "comparison"}
	total := 4 * len(o.Seeds) * len(o.Sidecars)
	each := o.Duration + drainLimit(o.Duration)
	note(fmt.Sprintf("%d runs of %s and up to %s of waiting for the last answers: at most %s", total, o.Duration, drainLimit(o.Duration), time.Duration(total)*each))
	for _, sidecars := range o.Sidecars {
		var seeds [][]pair
		for _, seed := range o.Seeds {
			var pairs []pair
			for _, order := range [][2]fleet.Strategy{
				{fleet.StrategyLegacy, fleet.StrategyDynamic},
				{fleet.StrategyDynamic, fleet.StrategyLegacy},
			} {
				p, err := runPair(ctx, o, sidecars, seed, order, func(s Summary) {
					c.Runs = append(c.Runs, s)
					note(fmt.Sprintf("run %d of %d: %d sidecars, seed %d, %-7s p50 %.0f ms, p99 %.0f ms, over 2 s %.2f %%, %d errors, %d 429s, machine %.0f %% idle",
						len(c.Runs), total, sidecars, seed, s.Strategy, s.P50, s.P99, 100*s.SlowShare, s.Errors, s.Throttled, 100*s.Idle))
				})
				if err != nil || ctx.Err() != nil {
					return c, err
				}
				pairs = append(pairs, p)
			}
			seeds = append(seeds, pairs)
		}
		for _, f := range figures() {
			c.Rows = append(c.Rows, compare(sidecars, f, seeds))
		}
	}
	return c, nil
}

// pair is one seed and order under both strategies.
type pair struct{ legacy, dynamic Summary }

func runPair(ctx context.Context, o CompareOptions, sidecars int, seed uint64, order [2]fleet.Strategy, done func(Summary)) (pair, error) {
	var p pair
	for _, strategy := range order {
		one := o.Options
		one.Sidecars, one.Seed, one.Strategy = sidecars, seed, strategy
		s, err := Run(ctx, one, silent{})
		if err != nil {
			return p, fmt.Errorf("%d sidecars, seed %d, %s: %w", sidecars, seed, strategy, err)
		}
		if ctx.Err() != nil {
			return p, nil
		}
		done(s)
		if strategy == fleet.StrategyLegacy {
			p.legacy = s
		} else {
			p.dynamic = s
		}
	}
	return p, nil
}

func compare(sidecars int, f figure, seeds [][]pair) Compare {
	var legacy, dynamic, difference []float64
	for _, pairs := range seeds {
		l, d := 0.0, 0.0
		for _, p := range pairs {
			l += f.of(p.legacy) / float64(len(pairs))
			d += f.of(p.dynamic) / float64(len(pairs))
		}
		legacy, dynamic, difference = append(legacy, l), append(dynamic, d), append(difference, d-l)
	}
	c := Compare{Sidecars: sidecars, Figure: f.name, Seeds: len(seeds)}
	if len(seeds) == 1 {
		c.Legacy, c.Dynamic, c.Difference, c.Better = legacy[0], dynamic[0], difference[0], "-"
		return c
	}
	c.Legacy, c.LegacyHalf = load.MeanInterval(legacy)
	c.Dynamic, c.DynamicHalf = load.MeanInterval(dynamic)
	c.Difference, c.DifferenceHalf = load.MeanInterval(difference)
	switch {
	case !f.judged:
		c.Better = "-"
	case c.Difference+c.DifferenceHalf < 0:
		c.Better = "dynamic"
	case c.Difference-c.DifferenceHalf > 0:
		c.Better = "legacy"
	}
	return c
}

// WriteTable prints the comparison for people.
func (c Comparison) WriteTable(w io.Writer) {
	const format = "%-8s %-29s %20s %20s %22s  %s\n"
	fmt.Fprintf(w, format, "SIDECARS", "FIGURE", "LEGACY", "DYNAMIC", "DYNAMIC − LEGACY", "BETTER")
	for _, r := range c.Rows {
		better := r.Better
		if better == "" {
			better = "within noise"
		}
		fmt.Fprintf(w, format, fmt.Sprint(r.Sidecars), r.Figure, interval(r.Legacy, r.LegacyHalf, r.Seeds),
			interval(r.Dynamic, r.DynamicHalf, r.Seeds), interval(r.Difference, r.DifferenceHalf, r.Seeds), better)
	}
	fmt.Fprintln(w, strings.TrimSpace(`
Means over the seeds (each the mean of both orders) ± half-width of the 95 % interval (Student's t). Legacy
is Envoy's least_request with active health checks and outlier detection; the difference is paired by seed.`))
}

func interval(mean, half float64, seeds int) string {
	digits := 2
	if math.Abs(mean) >= 100 {
		digits = 0
	}
	if seeds == 1 {
		return fmt.Sprintf("%.*f (one seed)", digits, mean)
	}
	return fmt.Sprintf("%.*f ± %.*f", digits, mean, digits, half)
}

// silent reports nothing.
type silent struct{}

func (silent) Note(string)     {}
func (silent) Second(Second)   {}
func (silent) Summary(Summary) {}
