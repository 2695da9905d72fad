package admission

import (
	"github.com/fairlead-proxy/fairlead/fleet"
)

// settings is a configuration as requests look it up. It is not written after it
// was made; what it points to lives on over configurations.
type settings struct {
	routes map[string]*route
	pools  map[string]*pool
	other  *route // of requests whose route the configuration does not know
}

// route is what the configuration says of a route.
type route struct {
	state *routeState
	limit *fleet.Limit
	class fleet.RequestClass
	fair  bool
	rest  rule            // of clients without an exception
	own   map[Client]rule // exceptions
}

// rule is what counts for a client of a route.
type rule struct {
	cap    int
	rates  Rates
	weight float64
	class  fleet.RequestClass // 0: the request's
}

// counts reports whether a client's requests in flight count for its limit: by its
// concurrency, or by what they give back of its tokens.
func (r *rule) counts() bool { return r.cap > 0 || r.rates.Tokens.Window > 0 }

func (s *settings) route(name string) *route {
	if r := s.routes[name]; r != nil {
		return r
	}
	return s.other
}

func (r *route) rule(c Client) rule {
	if len(r.own) > 0 {
		if own, ok := r.own[c]; ok {
			return own
		}
	}
	return r.rest
}

// use is the limit that counts a client's requests in flight; "" is none.
func (r *route) use(of Client) string {
	if rule := r.rule(of); r.limit == nil || !rule.counts() {
		return ""
	}
	return r.limit.Name
}

// otherRoute names what is counted for routes that the configuration does not
// know.
const otherRoute = "other"

// compile makes settings of a configuration; what the last ones count is taken
// over by name.
func compile(cfg *fleet.Config, last *settings) *settings {
	s := &settings{routes: map[string]*route{}, pools: map[string]*pool{}}
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		if last != nil && last.pools[p.Name] != nil {
			s.pools[p.Name] = last.pools[p.Name]
			continue
		}
		s.pools[p.Name] = newPool(p.Name, configuredLimit(p))
	}
	for i := range cfg.Routes {
		r := &cfg.Routes[i]
		s.routes[r.Name] = compileRoute(cfg, r, last)
	}
	s.other = &route{class: fleet.ClassInteractive, fair: true, limit: cfg.LimitOf("")}
	s.other.state = newRouteState(otherRoute, 1)
	if last != nil {
		s.other.state = last.other.state
	}
	s.other.compileLimit()
	return s
}

// configuredLimit is a pool's limit until a step tells it.
func configuredLimit(p *fleet.Pool) float64 {
	return float64(max(1, p.MaxInFlight*len(p.Endpoints)))
}

func compileRoute(cfg *fleet.Config, r *fleet.Route, last *settings) *route {
	out := &route{limit: cfg.LimitOf(r.Name), class: r.Class, fair: r.FairShare}
	if out.class == 0 {
		out.class = fleet.ClassInteractive
	}
	if last != nil && last.routes[r.Name] != nil {
		out.state = last.routes[r.Name].state
	} else {
		out.state = newRouteState(r.Name, routeLimit(cfg, r))
	}
	out.compileLimit()
	return out
}

func (r *route) compileLimit() {
	if r.limit != nil {
		r.rest, r.own = compileRules(r.limit)
	}
}

// routeLimit is what the pools of a route's split may have in flight.
func routeLimit(cfg *fleet.Config, r *fleet.Route) float64 {
	limit := 0.0
	for _, arm := range r.Split {
		if p, ok := cfg.PoolByName(arm.Pool); ok {
			limit += configuredLimit(&p)
		}
	}
	return max(1, limit)
}

func compileRules(l *fleet.Limit) (rest rule, own map[Client]rule) {
	rest = rule{cap: l.Concurrency, rates: Rates{l.Requests, l.Tokens}, weight: 1}
	if len(l.Clients) == 0 {
		return rest, nil
	}
	own = make(map[Client]rule, len(l.Clients))
	for i := range l.Clients {
		c := &l.Clients[i]
		r := rule{cap: c.Concurrency, rates: Rates{c.Requests, c.Tokens}, weight: c.Weight, class: c.Class}
		if r.cap == 0 {
			r.cap = rest.cap
		}
		if r.rates.Requests == (fleet.Rate{}) {
			r.rates.Requests = rest.rates.Requests
		}
		if r.rates.Tokens == (fleet.Rate{}) {
			r.rates.Tokens = rest.rates.Tokens
		}
		if r.weight <= 0 {
			r.weight = 1
		}
		own[ClientOfID(l.Key, c.ID)] = r
	}
	return rest, own
}
