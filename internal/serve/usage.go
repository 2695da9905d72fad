package serve

import (
	"cmp"
	"math"
	"sync"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// ratios learns, by model, how many bytes of a body make a prompt token: a model has
// one tokenizer. It is a mean over tokens, not over requests: long prompts, of which
// the estimate matters, weigh by their length. The model is that of the pool which
// served, where the config names it, else the one that the route asks for; a route of
// which neither is known counts as a model of its own. Only routes with usage teach
// anything; others that are served by the same model learn with them.
type ratios struct {
	mu      sync.Mutex
	byModel map[string]lengths
	// pools and routes name the models of the config; a pool's is "" if unknown.
	pools  map[string]string
	routes map[string]routeModel
}

// routeModel is what a route's requests are estimated by, and what they teach where
// the pool's model is unknown.
type routeModel struct{ estimated, taught string }

// lengths are what prompts have had together, the old ones fading. There are tokens.
type lengths struct{ bytes, tokens float64 }

const (
	// memory is the number of tokens after which a prompt counts for 1/e: a thousand
	// chats of 500 tokens.
	memory = 500_000
	// mostWeight is what one prompt counts for at most, in tokens: a fiftieth of what
	// makes the ratio.
	mostWeight = memory / 50
	// priorWeight is what plan.DefaultBytesPerToken counts for at the begin, so that
	// no first prompt has more than a third of the say.
	priorWeight = 2 * mostWeight
	// fewestTokens is the shortest prompt that teaches: in shorter ones JSON's own
	// characters and the tokens that a chat template adds outweigh the text.
	fewestTokens = 256
	// Bounds of what is believed. English has about four characters a token,
	// Chinese about one and a half, of three bytes each, and a Cyrillic text whose
	// letters are escaped (\u0431) up to 24 bytes; a body that holds an image has
	// thousands of bytes a token and says nothing about others.
	leastRatio, largestRatio = 1.0, 32.0
)

func newRatios() *ratios { return &ratios{byModel: map[string]lengths{}} }

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
	l, known := r.byModel[model]
	if !known {
		l = lengths{bytes: priorWeight * plan.DefaultBytesPerToken, tokens: priorWeight}
	}
	r.byModel[model] = l.with(ratio, float64(o.Usage.Input))
}

// with adds a prompt of so many tokens, each of ratio bytes.
func (l lengths) with(ratio, tokens float64) lengths {
	tokens = min(tokens, mostWeight)
	kept := 1 - tokens/memory
	return lengths{bytes: kept*l.bytes + ratio*tokens, tokens: kept*l.tokens + tokens}
}

// of is the ratio for a route, 0 before its model was taught anything: of the model
// that most of its requests are drawn to. It moves in steps of a hundredth, so that
// the plan's digest doesn't change with each request.
func (r *ratios) of(route string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	l, known := r.byModel[r.routes[route].estimated]
	if !known {
		return 0
	}
	return math.Round(l.bytes/l.tokens*100) / 100
}

// reconfigure forgets models that are gone.
func (r *ratios) reconfigure(cfg *fleet.Config) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pools, r.routes = map[string]string{}, map[string]routeModel{}
	next := map[string]lengths{}
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
