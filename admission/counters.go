package admission

import (
	"cmp"
	"math"
	"sync/atomic"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// counters are the gate's own; see Counters.
type counters struct {
	reasons        [reasonCount]atomic.Uint64
	tableFull      atomic.Uint64
	expired        atomic.Uint64
	tokensReserved atomic.Uint64
	tokensSettled  atomic.Uint64
}

func (n *counters) refused(b *bid, why Reason) {
	n.reasons[why].Add(1)
	b.route.refused.Add(1)
}

func (n *counters) admitted(b *bid, t Ticket) {
	n.reasons[ReasonAdmitted].Add(1)
	b.route.admitted.Add(1)
	if t.Cost > 0 {
		n.tokensReserved.Add(uint64(t.Cost))
	}
}

// routeState is what is counted of a route.
type routeState struct {
	name string
	// nowhere stands for the pool of requests whose pool is unknown.
	nowhere           *pool
	admitted, refused atomic.Uint64

	withUsage, within, above, below    atomic.Uint64
	input, cached, output, outReserved atomic.Uint64
	lengths                            [forms]lengths // by the form of the answer
}

// form is what an answer is expected to come as. A token has some four bytes in a whole
// answer and a hundred or two in a stream, where it has an event of its own: a mean of
// both is wrong for either.
type form uint8

const (
	formWhole  form = iota
	formStream      // the request asks for a stream
	formUnread      // nobody read what it asks for
	forms
)

// form is that of the answer that a request asks for.
func (a *Ask) form() form {
	switch {
	case a.Unread:
		return formUnread
	case a.Stream:
		return formStream
	}
	return formWhole
}

func newRouteState(name string, limit float64) *routeState {
	return &routeState{name: name, nowhere: newPool("", limit)}
}

// usage counts what a request took that told it, beside the output reserved for
// it.
func (r *routeState) usage(k *claim, reserved fleet.Tokens, o *fleet.Outcome) {
	u := &o.Usage
	r.withUsage.Add(1)
	r.input.Add(uint64(max(0, u.Input)))
	r.cached.Add(uint64(max(0, u.Cached)))
	r.output.Add(uint64(max(0, u.Output)))
	r.outReserved.Add(uint64(reserved))
	switch took := fleet.LevelOf(u.Output / k.answers); {
	case took == k.level:
		r.within.Add(1)
	case took > k.level:
		r.above.Add(1)
	default:
		r.below.Add(1)
	}
	if o.Cause == fleet.CauseOK && !u.Error { // else there may be more than it told
		r.lengths[k.form].add(o.ResponseBytes, u.Output)
	}
}

// ratio is by what the length of an answer of a form is judged, in bytes per output
// token; 0 where nothing is known. An answer of unknown form that does not tell what it
// took is a stream nearly always: whole ones tell, or don't come at all. Without one it is
// judged by whatever is known, so that a body that cannot be read is no way around a limit.
func (r *routeState) ratio(f form) float64 {
	if f != formUnread {
		return r.lengths[f].ratio()
	}
	return cmp.Or(r.lengths[formStream].ratio(), r.lengths[formUnread].ratio(), r.lengths[formWhole].ratio())
}

// generated estimates the output of an answer that broke off without telling it,
// from its length; the reservation where no answer of its form ever told.
func (r *routeState) generated(f form, bytes int64, reserved fleet.Tokens) fleet.Tokens {
	if output, ok := r.judge(f, bytes); ok {
		return min(reserved, output)
	}
	return reserved
}

// judge is the output of an answer of so many bytes, to the nearest token, and false where
// nothing is known of its form.
func (r *routeState) judge(f form, bytes int64) (fleet.Tokens, bool) {
	ratio := r.ratio(f)
	if ratio == 0 {
		return 0, false
	}
	return fleet.Tokens(math.Round(float64(max(0, bytes)) / ratio)), true
}

// Counters are sums since the start, for metrics.
type Counters struct {
	// ByReason counts verdicts and refusals.
	ByReason map[Reason]uint64
	// Claims is how many admitted requests are followed now, Clients how many
	// clients are told apart.
	Claims, Clients int
	// ClientsShared grows while there is no room to tell clients apart: it counts how often
	// one was looked for that shares a place with others.
	ClientsShared uint64
	// TableFull counts requests that found no room among the claims, Expired
	// times that the lease of a claim was over before its end was told.
	TableFull, Expired uint64
	// TokensReserved are those taken from limits at admission, TokensSettled those
	// that reservations were corrected to.
	TokensReserved, TokensSettled uint64
	Routes                        []RouteCounters
}

// RouteCounters are the sums of one route. Ratios of them are
//
//	token efficiency   Output / OutputReserved
//	cache hits         Cached / Input
//	burst compliance   Within / WithUsage
type RouteCounters struct {
	Route             string
	Admitted, Refused uint64
	// WithUsage counts admitted requests whose answers told their usage; the sums
	// below are of these.
	WithUsage uint64
	// Within counts those whose output, per answer, was of the burst level they
	// were classed in, Above and Below those of a larger and a smaller one.
	Within, Above, Below  uint64
	Input, Cached, Output uint64
	OutputReserved        uint64
}

// Counters returns the sums now. Routes are in no order; those that the
// configuration does not know are one, "other".
func (g *Gate) Counters() Counters {
	n := &g.count
	out := Counters{
		ByReason: map[Reason]uint64{}, Claims: int(g.claims.n.Load() - g.claims.lapsed.Load()), Clients: int(g.clients.n.Load()),
		ClientsShared: g.clients.sharing.Load(),
		TableFull:     n.tableFull.Load(), Expired: n.expired.Load(),
		TokensReserved: n.tokensReserved.Load(), TokensSettled: n.tokensSettled.Load(),
	}
	for r := ReasonAdmitted; r < reasonCount; r++ {
		out.ByReason[r] = n.reasons[r].Load()
	}
	s := g.settings.Load()
	for _, r := range s.routes {
		out.Routes = append(out.Routes, r.state.counters())
	}
	out.Routes = append(out.Routes, s.other.state.counters())
	return out
}

func (r *routeState) counters() RouteCounters {
	return RouteCounters{
		Route: r.name, Admitted: r.admitted.Load(), Refused: r.refused.Load(),
		WithUsage: r.withUsage.Load(), Within: r.within.Load(), Above: r.above.Load(), Below: r.below.Load(),
		Input: r.input.Load(), Cached: r.cached.Load(), Output: r.output.Load(),
		OutputReserved: r.outReserved.Load(),
	}
}
