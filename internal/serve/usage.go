package serve

import (
	"math"
	"sync"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// ratios learns, by route, how many bytes of a body make a prompt token: a route
// has one model, and what its callers send is of one kind more or less. Only
// routes with usage teach anything.
type ratios struct {
	mu      sync.Mutex
	byRoute map[string]float64
}

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

func newRatios() *ratios { return &ratios{byRoute: map[string]float64{}} }

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
	old, known := r.byRoute[o.Route]
	if !known {
		old = plan.DefaultBytesPerToken
	}
	r.byRoute[o.Route] = old + ratioWeight*(ratio-old)
}

// of is a route's ratio, 0 before it was taught anything. It moves in steps of a
// hundredth, so that the plan's digest doesn't change with each request.
func (r *ratios) of(route string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return math.Round(r.byRoute[route]*100) / 100
}

// reconfigure forgets routes that are gone.
func (r *ratios) reconfigure(cfg *fleet.Config) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := map[string]float64{}
	for _, route := range cfg.Routes {
		if v, ok := r.byRoute[route.Name]; ok {
			next[route.Name] = v
		}
	}
	r.byRoute = next
}
