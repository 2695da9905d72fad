package simulate

import (
	"fmt"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Policy is a way to choose an endpoint.
type Policy struct {
	// Name stands in flags, tables and files.
	Name string
	// About says what it is in a few words.
	About string

	build   func(*router) balancer
	glances bool // looks at metrics of 50 ms
}

// balancer chooses GPUs for one router.
type balancer interface {
	// choose returns a GPU, or −1 to refuse the request. After a failed attempt
	// failed is its GPU, otherwise −1.
	choose(q *request, failed int) int
	// tick runs at the router's every tick, as serve scores and plans.
	tick()
}

// Names of the policies.
const (
	RoundRobin   = "round-robin"
	Random       = "random"
	LeastRequest = "least-request"
	P2C          = "p2c"
	MaxScore     = "max-score"
	Argmin       = "argmin"
	Ours         = "ours"
	OursModel    = "ours-model"
	OursConstant = "ours-constant"
)

// Policies returns all policies, in the order of tables. The one called
// ours-model needs a model and is left out where it is nil.
func Policies(model scorer.Model) []Policy {
	formula := scorer.Formula(scorer.FormulaOptions{})
	out := []Policy{
		{Name: RoundRobin, About: "each router takes the endpoints in turn", build: func(r *router) balancer {
			return &roundRobin{r: r, next: r.rng.IntN(len(r.w.gpus))}
		}},
		{Name: Random, About: "uniform", build: func(r *router) balancer { return &random{r: r} }},
		{Name: LeastRequest, About: "fewest own requests in flight, all endpoints looked at", build: func(r *router) balancer { return &least{r: r} }},
		{Name: P2C, About: "the one of two random endpoints with fewer own requests in flight: Envoy's least request", build: func(r *router) balancer { return &twoChoices{r: r} }},
		{Name: MaxScore, About: "largest sum of llm-d's queue score (min-max) and KV score (1 − usage), metrics at most 50 ms old, ties at random", glances: true, build: func(r *router) balancer { return &maxScore{r: r} }},
		{Name: Argmin, About: "smallest risk at the last tick", build: func(r *router) balancer {
			return &argmin{r: r, judge: scorer.NewJudge(formula), risk: make([]float64, len(r.w.gpus))}
		}},
		{Name: Ours, About: "scorer.Judge with the formula, plan.Decide", build: func(r *router) balancer { return newOurs(r, formula) }},
	}
	if model != nil {
		out = append(out, Policy{Name: OursModel, About: "the same with the model " + model.Name(), build: func(r *router) balancer { return newOurs(r, model) }})
	}
	return append(out, Policy{Name: OursConstant, About: "the same with a constant risk: what the pick alone does", build: func(r *router) balancer { return newOurs(r, constant{}) }})
}

// PoliciesByName picks from all; an unknown name is an error that lists them.
func PoliciesByName(names []string, model scorer.Model) ([]Policy, error) {
	all := Policies(model)
	var out []Policy
	for _, name := range names {
		i := 0
		for i < len(all) && all[i].Name != name {
			i++
		}
		if i == len(all) {
			known := make([]string, len(all))
			for k := range all {
				known[k] = all[k].Name
			}
			return nil, fmt.Errorf("found policy %q; accepted: %s", name, strings.Join(known, ", "))
		}
		out = append(out, all[i])
	}
	return out, nil
}

// constant is a model that tells endpoints not apart.
type constant struct{}

// Name implements scorer.Model.
func (constant) Name() string { return "constant" }

// Assess implements scorer.Model.
func (constant) Assess(w *telemetry.Window, _ scorer.Own, now time.Time) (scorer.Assessment, bool) {
	if w == nil || w.Age(now) > scorer.FreshAge {
		return scorer.Assessment{}, false
	}
	return scorer.AssessRisk(0.2), true
}

// roundRobin is Envoy's: a router's first endpoint is random.
type roundRobin struct {
	r    *router
	next int
}

func (b *roundRobin) tick() {}

func (b *roundRobin) choose(_ *request, failed int) int {
	usable := b.r.outlier.at(b.r.w.now)
	for range 2 {
		b.next++
		if g := int(usable[b.next%len(usable)]); g != failed || len(usable) == 1 {
			return g
		}
	}
	return failed
}

type random struct{ r *router }

func (b *random) tick() {}

func (b *random) choose(_ *request, failed int) int { return b.r.uniform(failed) }

// uniform draws an endpoint other than failed, if there is another.
func (r *router) uniform(failed int) int {
	usable := r.outlier.at(r.w.now)
	g := int(usable[r.rng.IntN(len(usable))])
	for g == failed && len(usable) > 1 {
		g = int(usable[r.rng.IntN(len(usable))])
	}
	return g
}

// best returns the endpoint of the lowest cost, ties at random.
func (r *router) best(failed int, cost func(g int) float64) int {
	usable := r.outlier.at(r.w.now)
	chosen, lowest, ties := -1, 0.0, 0
	for _, i := range usable {
		g := int(i)
		if g == failed && len(usable) > 1 {
			continue
		}
		switch c := cost(g); {
		case chosen < 0 || c < lowest:
			chosen, lowest, ties = g, c, 1
		case c == lowest:
			ties++
			if r.rng.IntN(ties) == 0 {
				chosen = g
			}
		}
	}
	return chosen
}

type least struct{ r *router }

func (b *least) tick() {}

func (b *least) choose(_ *request, failed int) int {
	return b.r.best(failed, func(g int) float64 { return float64(b.r.inFlight[g]) })
}

type twoChoices struct{ r *router }

func (b *twoChoices) tick() {}

func (b *twoChoices) choose(_ *request, failed int) int {
	first, second := b.r.uniform(failed), b.r.uniform(failed)
	if b.r.inFlight[second] < b.r.inFlight[first] {
		return second
	}
	return first
}

// maxScore is llm-d's default picker over its queue and KV-cache scorers, of
// equal weight and without its prefix scorer: the queue score is 1 for the
// shortest queue and 0 for the longest, the KV score 1 − usage.
type maxScore struct{ r *router }

func (b *maxScore) tick() {}

func (b *maxScore) choose(_ *request, failed int) int {
	gpus := b.r.w.gpus
	shortest, longest := gpus[0].glanceWaiting, gpus[0].glanceWaiting
	for _, g := range gpus {
		shortest, longest = min(shortest, g.glanceWaiting), max(longest, g.glanceWaiting)
	}
	return b.r.best(failed, func(i int) float64 {
		queue := 1.0
		if longest > shortest {
			queue = (longest - gpus[i].glanceWaiting) / (longest - shortest)
		}
		return -(queue + 1 - gpus[i].glanceKV)
	})
}

// argmin follows the risk that scorer.Judge gave at the last tick.
type argmin struct {
	r     *router
	judge *scorer.Judge
	risk  []float64
}

func (b *argmin) tick() {
	for g, v := range b.judge.Step(at(b.r.w.now), []scorer.PoolView{b.r.view()}) {
		b.risk[g] = float64(v.Risk)
	}
}

func (b *argmin) choose(_ *request, failed int) int {
	return b.r.best(failed, func(g int) float64 { return b.risk[g] })
}

// poolName is the name of the only pool.
const poolName = "fleet"

// view is what the judge sees of the fleet through this router's eyes.
func (r *router) view() scorer.PoolView {
	v := scorer.PoolView{Name: poolName, Endpoints: make([]scorer.EndpointView, len(r.w.gpus))}
	for i, g := range r.w.gpus {
		v.MaxInFlight = max(v.MaxInFlight, g.spec.Profile.MaxSeqs)
		v.Endpoints[i] = scorer.EndpointView{Address: r.w.addresses[i], Window: &g.window, Own: r.own(i)}
	}
	return v
}

// ours is the product: judge, plan and pick as serve runs them.
type ours struct {
	r     *router
	judge *scorer.Judge
	plan  *plan.Plan
	ticks uint64
}

func newOurs(r *router, model scorer.Model) balancer {
	b := &ours{r: r, judge: scorer.NewJudge(model)}
	b.tick()
	return b
}

// defaultBudget is the output budget of requests that declare none, as most do;
// the traces have none either.
const defaultBudget fleet.Tokens = 1024

func (b *ours) tick() {
	view := b.r.view()
	verdicts := b.judge.Step(at(b.r.w.now), []scorer.PoolView{view})
	pool := plan.PoolInput{Name: poolName, Endpoints: make([]plan.EndpointInput, len(verdicts))}
	for i, v := range verdicts {
		// What the engine works on for others takes room too, as serve has it.
		limit := int32(view.MaxInFlight)
		if b.r.w.gpus[i].window.Age(at(b.r.w.now)) <= time.Second {
			limit = max(1, limit-b.r.foreign[i].Requests())
		}
		pool.Endpoints[i] = plan.EndpointInput{
			Address: v.Endpoint.Address, Slot: uint32(i), Weight: v.Weight, MaxInFlight: limit,
			KVFree: v.KVFree, KVSize: v.KVSize, Risk: v.Risk, State: v.State,
		}
	}
	b.ticks++
	p, err := plan.Compile(plan.Inputs{Tick: b.ticks, Pools: []plan.PoolInput{pool}, Routes: []plan.RouteInput{{
		Name: "route", Dialect: fleet.DialectOpenAI, Strategy: fleet.StrategyDynamic, ClientStrategy: fleet.ClientStrategyIgnore,
		DefaultBudget: defaultBudget, Split: []string{poolName},
	}}})
	if err != nil {
		panic(fmt.Sprintf("a judge's verdicts do not compile: %v", err)) // impossible: Compile accepts all that Step returns
	}
	b.plan = p
}

func (b *ours) choose(q *request, failed int) int {
	switch {
	case failed >= 0 && q.second < 0:
		return b.r.uniform(failed)
	case failed >= 0:
		return q.second
	}
	d := b.plan.Decide(plan.Class{
		Arm: 0, Level: fleet.LevelOf(defaultBudget), Strategy: fleet.StrategyDynamic, Generates: true,
		Prompt: fleet.Tokens(q.seq.Prompt),
	}, q.seed, b.r)
	switch d.Action {
	case plan.ActionRefuse:
		return -1
	case plan.ActionLeave: // Envoy chooses, for a retry too
		q.second = -1
		return b.r.uniform(failed)
	}
	q.second = int(d.Picks[1].Endpoint)
	return int(d.Picks[0].Endpoint)
}
