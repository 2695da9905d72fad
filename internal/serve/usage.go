package serve

import (
	"cmp"
	"math"
	"sync"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// ratios learns, by model, how many bytes of a body make a prompt token: a model has
// one tokenizer. The model is that of the pool which served, where the config names
// it, else the one that the route asks for; a route of which neither is known counts
// as a model of its own. Only routes with usage teach anything; others that are
// served by the same model learn with them.
type ratios struct {
	mu      sync.Mutex
	byModel map[string]float64
	// pools and routes name the models of the config; a pool's is "" if unknown.
	pools  map[string]string
	routes map[string]routeModel
}

// routeModel is what a route's requests are estimated by, and what they teach where
// the pool's model is unknown.
type routeModel struct{ estimated, taught string }

const (
	// ratioWeight is what one request counts for: the last fifty or so make the
	// ratio.
	ratioWeight = 0.02
	// fewestTokens is the shortest prompt that teaches: in shorter ones JSON's
	// own characters outweigh the text.
	fewestTokens = 64
	// Bounds of what is believed. English has about four characters a token,
	// Chinese about one and a half, of three bytes each; a body that holds an
	// image has thousands of bytes a token and says nothing about others.
	leastRatio, largestRatio = 1.0, 16.0
)

func newRatios() *ratios { return &ratios{byModel: map[string]float64{}} }

// learn takes a request that ended.
func (r *ratios) learn(o *fleet.Outcome) {
	if o.Kind != fleet.RequestEnded || !o.Usage.Known || o.Usage.Input < fewestTokens || o.RequestBytes <= 0 {
		return
	}
	ratio := float64(o.RequestBytes) / float64(o.Usage.Input)
	if ratio < leastRatio || ratio > largestRatio {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	model := r.pools[o.Endpoint.Pool]
	if model == "" {
		model = r.routes[o.Route].taught
	}
	if model == "" {
		return // the route has left the config
	}
	old, known := r.byModel[model]
	if !known {
		old = plan.DefaultBytesPerToken
	}
	r.byModel[model] = old + ratioWeight*(ratio-old)
}

// of is the ratio for a route, 0 before its model was taught anything: of the model
// that most of its requests are drawn to. It moves in steps of a hundredth, so that
// the plan's digest doesn't change with each request.
func (r *ratios) of(route string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return math.Round(r.byModel[r.routes[route].estimated]*100) / 100
}

// reconfigure forgets models that are gone.
func (r *ratios) reconfigure(cfg *fleet.Config) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pools, r.routes = map[string]string{}, map[string]routeModel{}
	next := map[string]float64{}
	keep := func(model string) string {
		if v, ok := r.byModel[model]; ok {
			next[model] = v
		}
		return model
	}
	for _, p := range cfg.Pools {
		if p.Model != "" {
			r.pools[p.Name] = keep("model " + p.Model)
		}
	}
	for _, route := range cfg.Routes {
		m := routeModel{taught: "route " + route.Name}
		if route.Match.Model != "" {
			m.taught = "model " + route.Match.Model
		}
		m.estimated = cmp.Or(r.pools[heaviest(route.Split)], keep(m.taught))
		r.routes[route.Name] = m
	}
	r.byModel = next
}

// heaviest is the pool that most requests are drawn to, the first of several.
func heaviest(split fleet.Split) string {
	most, pool := uint32(0), ""
	for _, arm := range split {
		if pool == "" || arm.Weight > most {
			most, pool = arm.Weight, arm.Pool
		}
	}
	return pool
}
