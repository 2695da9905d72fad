package simulate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
)

// Options say what is compared.
type Options struct {
	Setup
	Warmup   time.Duration
	SLO      time.Duration
	Policies []Policy
	Routers  []int
	Seeds    []uint64
	// Done, if not nil, is told after each run.
	Done func(run, of int)
}

// Comparison holds every run and what they come to.
type Comparison struct {
	Kind     string  `json:"kind"` // "simulation"
	Arrivals string  `json:"arrivals"`
	About    string  `json:"about"` // the arrivals
	Scenario string  `json:"scenario"`
	Profile  string  `json:"profile"`
	GPUs     int     `json:"gpus"`
	Load     float64 `json:"load"`
	// Capacity and Rate are requests per second, Rate the mean offered.
	Capacity float64  `json:"capacity"`
	Rate     float64  `json:"rate"`
	Seconds  float64  `json:"seconds"`
	Warmup   float64  `json:"warmup_seconds"`
	SLO      float64  `json:"slo_seconds"`
	Seeds    []uint64 `json:"seeds"`
	// TooLong counts requests of all seeds that were left out because no GPU
	// could hold them.
	TooLong  int           `json:"too_long"`
	Policies []PolicyAbout `json:"policies"`
	Rows     []Row         `json:"rows"`
	Runs     []Outcome     `json:"runs"`
}

// PolicyAbout says what a policy is.
type PolicyAbout struct {
	Name  string `json:"name"`
	About string `json:"about"`
}

// Outcome is one run in figures.
type Outcome struct {
	Routers     int     `json:"routers"`
	Policy      string  `json:"policy"`
	Seed        uint64  `json:"seed"`
	Requests    int     `json:"requests"`
	Answered    int     `json:"answered"`
	Refused     int     `json:"refused"`
	Failed      int     `json:"failed"`
	P50         float64 `json:"ttft_p50_ms"`
	P95         float64 `json:"ttft_p95_ms"`
	P99         float64 `json:"ttft_p99_ms"`
	Slow        float64 `json:"share_over_slo"` // refused and failed ones count as over
	ITL99       float64 `json:"itl_p99_ms"`
	Preemptions int     `json:"preemptions"`
	Goodput     float64 `json:"goodput_rps"`
}

// Estimate is a mean over seeds with half the width of its 95 % interval
// (Student's t); with one seed there is no interval and Half is 0.
type Estimate struct {
	Mean float64 `json:"mean"`
	Half float64 `json:"half"`
}

// Row is one policy with one number of routers over all seeds.
type Row struct {
	Routers     int      `json:"routers"`
	Policy      string   `json:"policy"`
	P50         Estimate `json:"ttft_p50_ms"`
	P95         Estimate `json:"ttft_p95_ms"`
	P99         Estimate `json:"ttft_p99_ms"`
	Slow        Estimate `json:"share_over_slo"`
	ITL99       Estimate `json:"itl_p99_ms"`
	Preemptions Estimate `json:"preemptions"`
	Lost        Estimate `json:"share_refused_or_failed"`
	Goodput     Estimate `json:"goodput_rps"`
	// OursLess is the share over the objective of the policy "ours" less this
	// one's, paired by seed: negative is better. Nil for "ours" itself and where
	// it was not run.
	OursLess *Estimate `json:"ours_less_this,omitempty"`
	// Verdict is "better" or "worse" for what ours is against this policy, "even"
	// where the interval of the difference holds 0, "" where there is none.
	Verdict string `json:"verdict,omitempty"`
}

// Bounds of a comparison.
const (
	MaxSeeds = 100
	// MaxRuns bounds policies × numbers of routers × seeds.
	MaxRuns = 10_000
)

func (o *Options) check() error {
	runs := len(o.Policies) * len(o.Routers) * len(o.Seeds)
	switch {
	case len(o.Policies) == 0 || len(o.Routers) == 0 || len(o.Seeds) == 0:
		return errors.New("no policy, number of routers or seed")
	case len(o.Seeds) > MaxSeeds || runs > MaxRuns:
		return fmt.Errorf("%d seeds, %d runs; accepted: at most %d and %d", len(o.Seeds), runs, MaxSeeds, MaxRuns)
	}
	return nil
}

// Compare runs every policy with every number of routers on the same arrivals,
// seed by seed. It ends early, with an error, when ctx does.
func Compare(ctx context.Context, o Options) (Comparison, error) {
	if err := o.check(); err != nil {
		return Comparison{}, fmt.Errorf("simulate: %w", err)
	}
	out := Comparison{
		Kind: "simulation", Arrivals: o.Workload.Name, About: o.Workload.About, Scenario: o.Scenario, Profile: o.Profile,
		GPUs: o.GPUs, Load: o.Load, Seconds: o.Duration.Seconds(), Warmup: o.Warmup.Seconds(), SLO: o.SLO.Seconds(), Seeds: o.Seeds,
	}
	for _, p := range o.Policies {
		out.Policies = append(out.Policies, PolicyAbout{p.Name, p.About})
	}
	all := len(o.Policies) * len(o.Routers) * len(o.Seeds)
	for _, seed := range o.Seeds {
		spec, facts, err := o.Spec(seed)
		if err != nil {
			return Comparison{}, fmt.Errorf("simulate: %w", err)
		}
		out.Capacity, out.Rate = facts.Capacity, facts.Rate
		out.TooLong += facts.TooLong
		spec.Warmup, spec.SLO = o.Warmup, o.SLO
		for _, spec.Routers = range o.Routers {
			for _, spec.Policy = range o.Policies {
				if err := ctx.Err(); err != nil {
					return Comparison{}, fmt.Errorf("simulate: %w", err)
				}
				result, err := Run(spec)
				if err != nil {
					return Comparison{}, err
				}
				out.Runs = append(out.Runs, outcomeOf(spec, &result))
				if o.Done != nil {
					o.Done(len(out.Runs), all)
				}
			}
		}
	}
	out.Rows = rows(o, out.Runs)
	return out, nil
}

func outcomeOf(spec Spec, r *Result) Outcome {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return Outcome{
		Routers: spec.Routers, Policy: spec.Policy.Name, Seed: spec.Seed,
		Requests: r.Requests, Answered: r.Answered, Refused: r.Refused, Failed: r.Failed,
		P50: ms(r.TTFTQuantile(0.5)), P95: ms(r.TTFTQuantile(0.95)), P99: ms(r.TTFTQuantile(0.99)),
		Slow: r.SlowShare(), ITL99: ms(r.ITL99), Preemptions: r.Preemptions, Goodput: r.Goodput,
	}
}

// rows sums up, router numbers in order and policies in order.
func rows(o Options, runs []Outcome) []Row {
	var out []Row
	for _, routers := range o.Routers {
		ours := pick(runs, routers, Ours)
		for _, p := range o.Policies {
			mine := pick(runs, routers, p.Name)
			row := Row{
				Routers: routers, Policy: p.Name,
				P50:         estimate(mine, func(r Outcome) float64 { return r.P50 }),
				P95:         estimate(mine, func(r Outcome) float64 { return r.P95 }),
				P99:         estimate(mine, func(r Outcome) float64 { return r.P99 }),
				Slow:        estimate(mine, slow),
				ITL99:       estimate(mine, func(r Outcome) float64 { return r.ITL99 }),
				Preemptions: estimate(mine, func(r Outcome) float64 { return float64(r.Preemptions) }),
				Lost:        estimate(mine, func(r Outcome) float64 { return float64(r.Refused+r.Failed) / float64(max(1, r.Requests)) }),
				Goodput:     estimate(mine, func(r Outcome) float64 { return r.Goodput }),
			}
			if p.Name != Ours && len(ours) > 0 {
				row.OursLess, row.Verdict = against(ours, mine)
			}
			out = append(out, row)
		}
	}
	return out
}

func slow(r Outcome) float64 { return r.Slow }

// pick returns the runs of one policy in the order of the seeds.
func pick(runs []Outcome, routers int, policy string) []Outcome {
	var out []Outcome
	for _, r := range runs {
		if r.Routers == routers && r.Policy == policy {
			out = append(out, r)
		}
	}
	return out
}

func estimate(runs []Outcome, of func(Outcome) float64) Estimate {
	values := make([]float64, len(runs))
	for i, r := range runs {
		values[i] = of(r)
	}
	return interval(values)
}

func interval(values []float64) Estimate {
	mean, half := load.MeanInterval(values)
	if len(values) < 2 {
		half = 0
	}
	return Estimate{Mean: mean, Half: half}
}

// against pairs the runs of ours and another policy by seed.
func against(ours, other []Outcome) (*Estimate, string) {
	differences := make([]float64, len(ours))
	for i := range ours {
		differences[i] = slow(ours[i]) - slow(other[i])
	}
	e := interval(differences)
	switch {
	case len(differences) < 2:
		return &e, ""
	case e.Mean+e.Half < 0:
		return &e, "better"
	case e.Mean-e.Half > 0:
		return &e, "worse"
	}
	return &e, "even"
}

// RoutersOf returns the numbers of routers in the order of the rows.
func (c *Comparison) RoutersOf() []int {
	var out []int
	for _, r := range c.Rows {
		if !slices.Contains(out, r.Routers) {
			out = append(out, r.Routers)
		}
	}
	return out
}
