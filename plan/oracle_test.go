package plan

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// The oracle is a deliberately dumb second implementation of the rules of
// Decide on Inputs: names instead of ids, loops over everything, linear
// cumulative weights, no tables. It tells which pool serves, why, in which
// order the attempts go, and which endpoints may be chosen.
type oracleAnswer struct {
	action  Action
	reason  Reason
	moved   bool
	regroup bool
	order   []string // pool of each attempt
	// allowed are the endpoints that may be Picks[0], by index, each with the
	// reasons that it may have. A moved request's reason is the move's.
	allowed map[int][]Reason
	fits    fleet.Tokens
	// waits is the pool for which who is refused for now waits.
	waits string
}

func (a *oracleAnswer) allow(i int, why Reason) {
	if a.moved {
		why = a.reason
	}
	if a.allowed == nil {
		a.allowed = map[int][]Reason{}
	}
	a.allowed[i] = append(a.allowed[i], why)
}

func oracle(in Inputs, c Class, counts []int32) oracleAnswer {
	if int(c.Route) < 0 || int(c.Route) >= len(in.Routes) {
		return oracleAnswer{action: ActionLeave, reason: ReasonUnknownRoute}
	}
	r := in.Routes[c.Route]
	arm := ""
	if c.Arm >= 0 && int(c.Arm) < len(in.Pools) {
		arm = in.Pools[c.Arm].Name
	}
	in = oracleSpared(in, oracleChain(r, arm))
	if why, fits := oracleSize(in, r, c); why != 0 {
		out := oracleAnswer{action: ActionRefuse, reason: why, fits: fits}
		if why == ReasonNoRoom {
			out.waits = oracleWaits(in, oracleChain(r, arm))
		}
		return out
	}
	legacy := c.Strategy != fleet.StrategyDynamic
	if legacy {
		if c.Generates && oracleAllFull(in, oracleChain(r, arm), counts) {
			return oracleAnswer{action: ActionRefuse, reason: ReasonAllBusy, waits: oracleWaits(in, oracleChain(r, arm))}
		}
		if !c.Generates {
			return oracleAnswer{action: ActionLeave, reason: ReasonLegacy}
		}
		c.Prompt = 0
	}
	chain := oracleChain(r, arm)
	switch known := slices.Contains(chain, arm) || c.Arm == NoPool && len(r.Split) == 1; {
	case known:
	case legacy:
		return oracleAnswer{action: ActionLeave, reason: ReasonLegacy}
	default:
		return oracleAnswer{action: ActionLeave, reason: ReasonUnknownArm}
	}

	from, failing := int(c.Past), false
	if legacy {
		// Envoy sends it to the first pool that serves. Only if all of that are
		// closed it is passed by, or if admission said so; if all fail, one asks.
		first := slices.IndexFunc(chain, func(name string) bool { return oracleServes(in, name) })
		if first < 0 {
			return oracleAnswer{action: ActionLeave, reason: ReasonLegacy}
		}
		failing = oracleFailing(in, chain[first])
		if !failing && !oracleClosed(in, chain[first]) && int(c.Past) <= first {
			return oracleAnswer{action: ActionLeave, reason: ReasonLegacy}
		}
		if !failing {
			first++
		}
		from = max(first, from)
	}
	firstAlive := -1
	sticky := !legacy && r.Affinity == fleet.AffinitySession && c.Session != 0
	for pos, name := range chain {
		able := oracleAble(in, name, c.Level)
		if len(able) == 0 {
			continue
		}
		if firstAlive < 0 && (c.Generates || !oracleFailing(in, name)) {
			firstAlive = pos
		}
		var free []int
		for _, i := range able {
			e := oraclePool(in, name).Endpoints[i]
			if oracleFree(e, counts) && (!e.Failing || oracleMayAsk(in, chain, name, c, counts)) {
				free = append(free, i)
			}
		}
		if len(free) > 0 && pos >= from {
			out := oracleSteer(in, chain, pos, c)
			if c.Past > 0 && out.moved {
				out.reason = ReasonNotAdmitted
			}
			oracleAllow(&out, in, name, c, counts, sticky && oracleHasHomes(in, name), able, free)
			return out
		}
	}
	switch {
	case failing:
		return oracleAnswer{action: ActionRefuse, reason: ReasonAllBusy, waits: oracleWaits(in, chain)}
	case legacy:
		return oracleAnswer{action: ActionLeave, reason: ReasonLegacy}
	case firstAlive < 0:
		return oracleAnswer{action: ActionLeave, reason: ReasonNothingAlive}
	case c.Generates:
		return oracleAnswer{action: ActionRefuse, reason: ReasonAllBusy, waits: oracleWaits(in, chain)}
	}
	out := oracleSteer(in, chain, firstAlive, c)
	for _, i := range oracleAble(in, chain[firstAlive], c.Level) {
		out.allow(i, out.reason)
	}
	return out
}

// oracleChain is the route's chain with an arm first; as configured where that is none
// of its pools.
func oracleChain(r RouteInput, arm string) []string {
	if arm != "" && !slices.Contains(r.Split, arm) && !slices.Contains(r.Fallback, arm) {
		return []string{arm}
	}
	if k := slices.Index(r.Fallback, arm); k >= 0 && !slices.Contains(r.Split, arm) {
		return append(append([]string{arm}, r.Split...), slices.Delete(slices.Clone(r.Fallback), k, k+1)...)
	}
	var chain []string
	at := max(0, slices.Index(r.Split, arm))
	for i := range r.Split {
		chain = append(chain, r.Split[(at+i)%len(r.Split)])
	}
	return append(chain, r.Fallback...)
}

// oracleHasHomes reports whether sessions have homes in a pool: it is on a route with them.
func oracleHasHomes(in Inputs, name string) bool {
	return slices.ContainsFunc(in.Routes, func(r RouteInput) bool {
		return r.Affinity == fleet.AffinitySession && (slices.Contains(r.Split, name) || slices.Contains(r.Fallback, name))
	})
}

// oracleSpared takes the mark off endpoints that fail where the chain has no other to send
// to: those that keep it can be spared.
func oracleSpared(in Inputs, chain []string) Inputs {
	for _, name := range chain {
		if slices.ContainsFunc(oraclePool(in, name).Endpoints, func(e EndpointInput) bool { return oracleChosen(e) && !e.Failing }) {
			return in
		}
	}
	in.Pools = slices.Clone(in.Pools)
	for i := range in.Pools {
		p := &in.Pools[i]
		p.Endpoints = slices.Clone(p.Endpoints)
		for k := range p.Endpoints {
			p.Endpoints[k].Failing = false
		}
	}
	return in
}

// oracleFailing reports whether some of a pool fail, and no other of it may be chosen.
func oracleFailing(in Inputs, name string) bool {
	failing := false
	for _, e := range oraclePool(in, name).Endpoints {
		if oracleChosen(e) && !e.Failing && !e.Closed {
			return false
		}
		failing = failing || e.Failing && e.State != fleet.StateDraining
	}
	return failing
}

// oracleMayAsk reports whether a request may ask a failing endpoint of a pool: another
// endpoint of the chain is at most at its limit, or all of it that don't fail are closed.
func oracleMayAsk(in Inputs, chain []string, pool string, c Class, counts []int32) bool {
	if !c.Generates {
		return !oracleFailing(in, pool)
	}
	open, takes := false, false
	for _, name := range chain {
		for i, e := range oraclePool(in, name).Endpoints {
			if !oracleChosen(e) || e.Failing || e.Closed {
				continue
			}
			open = true
			takes = takes || slices.Contains(oracleAble(in, name, c.Level), i) && (e.MaxInFlight == 0 || counts[e.Slot] <= e.MaxInFlight)
		}
	}
	return !open || takes
}

func oracleChosen(e EndpointInput) bool { return e.Weight > 0 && e.State != fleet.StateDraining }

// oracleWaits is the first pool of a chain with an endpoint to send to: one that neither
// fails nor is closed if any has such, then one that is closed, then one that fails, then
// one that Envoy alone may use; else the first.
func oracleWaits(in Inputs, chain []string) string {
	for _, meant := range []func(EndpointInput) bool{
		func(e EndpointInput) bool { return oracleChosen(e) && !e.Failing && !e.Closed },
		func(e EndpointInput) bool { return oracleChosen(e) && !e.Failing },
		oracleChosen,
		func(e EndpointInput) bool { return e.State != fleet.StateDraining },
	} {
		for _, name := range chain {
			if slices.ContainsFunc(oraclePool(in, name).Endpoints, meant) {
				return name
			}
		}
	}
	return chain[0]
}

// oracleAllow finds what may be chosen in a pool where the endpoints free are
// below their limits. First come those of the request's zone with room there; the
// six draws may miss them, unless no other is drawn from. Then comes the pool.
func oracleAllow(out *oracleAnswer, in Inputs, name string, c Class, counts []int32, sticky bool, able, free []int) {
	p := oraclePool(in, name)
	idle := oracleIdle(p, able, c.Level)
	spare := func(i int) bool { return idle == nil || slices.Contains(idle, i) }
	why := func(i int, near Reason) Reason {
		if oracleHasZone(in, p, c.Zone) && p.Endpoints[i].Zone != oracleZones(in)[c.Zone-1] {
			return ReasonZoneSpill
		}
		return near
	}
	if oracleHasZone(in, p, c.Zone) {
		zone := oracleZones(in)[c.Zone-1]
		inZone := func(e EndpointInput) bool { return e.Zone == zone }
		hasRoom := func(i int) bool {
			e := p.Endpoints[i]
			if e.Closed {
				return false
			}
			at, limit := p.SpillAt, float64(e.MaxInFlight)
			if at == 0 {
				at = 0.7
			}
			if limit == 0 {
				limit = 256
			}
			return float64(counts[e.Slot]) < math.Ceil(at*(limit*(1-float64(e.Risk))))
		}
		if home := oracleHome(in, p, c, counts, inZone); sticky && home >= 0 && hasRoom(home) && spare(home) {
			out.allow(home, ReasonAffinity)
			return
		}
		meant := able
		if idle != nil {
			meant = idle
		}
		near, members := 0, oracleZoneAble(p, meant, zone)
		for _, i := range free {
			e := p.Endpoints[i]
			if e.Zone == zone && spare(i) && hasRoom(i) && (c.Prompt <= 0 || e.KVFree == -1 || e.KVFree >= oracleNeed(in, c)) {
				out.allow(i, out.reason)
				near++
			}
		}
		if near > 0 && near == members {
			return
		}
	}
	if home := oracleHome(in, p, c, counts, func(EndpointInput) bool { return true }); sticky && home >= 0 && spare(home) {
		out.allow(home, why(home, ReasonAffinity))
		return
	}
	if idle != nil {
		found := false
		for _, i := range free {
			if kv := p.Endpoints[i].KVFree; spare(i) && (c.Prompt <= 0 || kv == -1 || kv >= oracleNeed(in, c)) {
				out.allow(i, why(i, out.reason))
				found = true
			}
		}
		if found {
			return
		}
	}
	for _, i := range oracleRoomy(in, name, c, free) {
		out.allow(i, why(i, out.reason))
	}
}

// oracleServes reports whether the pool has endpoints that don't drain.
func oracleServes(in Inputs, name string) bool {
	return slices.ContainsFunc(oraclePool(in, name).Endpoints, func(e EndpointInput) bool { return e.State != fleet.StateDraining })
}

// oracleClosed reports whether the pool has serving endpoints and all are closed.
func oracleClosed(in Inputs, name string) bool {
	open, shut := 0, 0
	for _, p := range in.Pools {
		for _, e := range p.Endpoints {
			switch {
			case p.Name != name || e.State == fleet.StateDraining:
			case e.Closed:
				shut++
			default:
				open++
			}
		}
	}
	return open == 0 && shut > 0
}

func oracleFree(e EndpointInput, counts []int32) bool {
	if e.Failing && counts[e.Slot] >= e.Trial {
		return false
	}
	return !e.Closed && (e.MaxInFlight == 0 || counts[e.Slot] < e.MaxInFlight)
}

// oracleIdle lists the endpoints that a level goes to first; nil where it has no
// such preference.
func oracleIdle(p PoolInput, able []int, level fleet.BurstLevel) []int {
	if level == 0 || !p.Backlogged[level-1] {
		return nil
	}
	var idle []int
	for _, i := range able {
		e := p.Endpoints[i]
		limit := float64(e.MaxInFlight)
		if limit == 0 {
			limit = 256
		}
		if !e.Closed && e.Risk < 0.35 && float64(e.InFlight) <= limit/2 {
			idle = append(idle, i)
		}
	}
	if len(idle) == len(able) {
		return nil
	}
	return idle
}

// oracleSize is why a request is refused for its size, 0 if it is not, and what
// would have been taken.
func oracleSize(in Inputs, r RouteInput, c Class) (Reason, fleet.Tokens) {
	if !c.Generates || c.Budget <= 0 {
		return 0, 0
	}
	if r.Oversize == fleet.OversizeRefuse && r.MaxOutput > 0 && c.Budget > r.MaxOutput {
		return ReasonOversize, r.MaxOutput
	}
	var all []EndpointInput
	for _, name := range append(slices.Clone(r.Split), r.Fallback...) {
		all = append(all, oraclePool(in, name).Endpoints...)
	}
	all = slices.DeleteFunc(all, func(e EndpointInput) bool { return e.State == fleet.StateDraining })
	needs := func(e EndpointInput) bool { return e.KVSize > 0 && e.KVSize < max(c.PromptAtLeast, 0)+c.Budget }
	if r.NoRoom == fleet.OversizeRefuse && len(all) > 0 && !slices.ContainsFunc(all, func(e EndpointInput) bool { return !needs(e) }) {
		largest := slices.MaxFunc(all, func(a, b EndpointInput) int { return int(a.KVSize - b.KVSize) })
		return ReasonNeverFits, max(largest.KVSize-max(c.PromptAtLeast, 0), 0)
	}
	most := fleet.Tokens(0)
	for _, name := range append(slices.Clone(r.Split), r.Fallback...) {
		for _, e := range oraclePool(in, name).Endpoints {
			if e.Weight > 0 && e.State != fleet.StateDraining {
				if e.KVFree < 0 {
					return 0, 0
				}
				most = max(most, e.KVFree)
			}
		}
	}
	if most >= oracleEmpty(in, r) {
		c.Prompt = c.PromptAtLeast
	}
	if most -= max(c.Prompt, 0); r.NoRoom == fleet.OversizeRefuse && c.Budget > most {
		return ReasonNoRoom, max(most, 0)
	}
	return 0, 0
}

// oracleEmpty is the free KV cache of an endpoint that counts as empty: all but a
// sixteenth of the largest that may be chosen.
func oracleEmpty(in Inputs, r RouteInput) fleet.Tokens {
	var sizes []fleet.Tokens
	for _, name := range append(slices.Clone(r.Split), r.Fallback...) {
		for _, e := range oraclePool(in, name).Endpoints {
			if e.Weight > 0 && e.State != fleet.StateDraining {
				sizes = append(sizes, e.KVSize)
			}
		}
	}
	if r.NoRoom != fleet.OversizeRefuse || len(sizes) == 0 || slices.Contains(sizes, 0) {
		return math.MaxInt32
	}
	largest := slices.Max(sizes)
	return largest - largest/16
}

// oracleNeed is the free KV cache that a request whose prompt is known looks for.
func oracleNeed(in Inputs, c Class) fleet.Tokens {
	return min(c.Prompt+c.Level.UpperBudget(), oracleEmpty(in, in.Routes[c.Route]))
}

// oracleZoneAble counts the endpoints of a zone among those that may serve.
func oracleZoneAble(p PoolInput, able []int, zone string) int {
	n := 0
	for _, i := range able {
		if p.Endpoints[i].Zone == zone {
			n++
		}
	}
	return n
}

// oracleZones lists the zones in the order in which they occur.
func oracleZones(in Inputs) []string {
	var out []string
	for _, p := range in.Pools {
		for _, e := range p.Endpoints {
			if e.Zone != "" && !slices.Contains(out, e.Zone) {
				out = append(out, e.Zone)
			}
		}
	}
	return out
}

// oracleHasZone reports whether a pool has endpoints both in the zone and
// elsewhere that may be chosen at all.
func oracleHasZone(in Inputs, p PoolInput, zone ZoneID) bool {
	names := oracleZones(in)
	if zone == 0 || int(zone) > len(names) {
		return false
	}
	here, elsewhere := false, false
	for _, e := range p.Endpoints {
		if e.Weight > 0 && e.State != fleet.StateDraining {
			here = here || e.Zone == names[zone-1]
			elsewhere = elsewhere || e.Zone != names[zone-1]
		}
	}
	return here && elsewhere
}

func oracleSteer(in Inputs, chain []string, pos int, c Class) oracleAnswer {
	level := c.Level
	out := oracleAnswer{action: ActionSteer, moved: pos > 0, regroup: pos > 0}
	switch {
	case pos > 0 && len(oracleAble(in, chain[0], level)) == 0:
		out.reason = ReasonPoolEmpty
	case pos > 0:
		out.reason = ReasonSpill
	default:
		out.reason = ReasonNoTelemetry
		for _, e := range oraclePool(in, chain[0]).Endpoints {
			if e.Weight > 0 && e.State != fleet.StateUnknown && e.State != fleet.StateDraining {
				out.reason = ReasonWeighted
			}
		}
	}
	rotated := append(slices.Clone(chain[pos:]), chain[:pos]...)
	for _, name := range rotated {
		if len(oracleAble(in, name, level)) > 0 {
			out.order = append(out.order, name)
		} else {
			out.regroup = true
		}
	}
	if len(out.order) == 1 {
		out.order = append(out.order, out.order[0])
	}
	out.order = out.order[:min(len(out.order), MaxAttempts)]
	return out
}

func oraclePool(in Inputs, name string) PoolInput {
	for _, p := range in.Pools {
		if p.Name == name {
			return p
		}
	}
	return PoolInput{}
}

// oracleHome is the session's endpoint if it may take the request, else −1: of
// all endpoints of weight > 0 that are meant the one whose point is nearest
// behind a probe; those in their slow start only if there are no others.
func oracleHome(in Inputs, p PoolInput, c Class, counts []int32, meant func(EndpointInput) bool) int {
	home, nearest, members, inFlight, limits := -1, uint64(math.MaxUint64), 0, int32(0), int32(0)
	serves := func(e EndpointInput) bool { return e.Weight > 0 && e.State != fleet.StateDraining && meant(e) }
	settled := slices.ContainsFunc(p.Endpoints, func(e EndpointInput) bool { return serves(e) && e.State != fleet.StateProbe })
	for i, e := range p.Endpoints {
		if !serves(e) || settled && e.State == fleet.StateProbe {
			continue
		}
		members++
		inFlight += e.InFlight
		if limits += e.MaxInFlight; e.MaxInFlight == 0 {
			limits += 256
		}
		for k := range uint64(probes) {
			probe := mix(uint64(c.Session)) + (k+1)*mix(uint64(c.Session)+golden)
			if distance := place(e.Address) - probe; distance < nearest {
				home, nearest = i, distance
			}
		}
	}
	if home < 0 {
		return -1
	}
	e, n := p.Endpoints[home], counts[p.Endpoints[home].Slot]
	switch {
	case e.Risk >= 0.5, !oracleFree(e, counts), float64(n) > 1.25*float64(inFlight)/float64(members)+max(1, float64(limits)/float64(members)/16),
		e.KVFree >= 0 && (e.KVFree < c.Level.UpperBudget() || c.Prompt > 0 && e.KVFree < oracleNeed(in, c)):
		return -1
	}
	return home
}

// oracleRoomy keeps the endpoints whose free KV cache holds the prompt and the
// level's budget; all of them if none does or the prompt is unknown.
func oracleRoomy(in Inputs, name string, c Class, free []int) []int {
	var roomy []int
	for _, i := range free {
		if kv := oraclePool(in, name).Endpoints[i].KVFree; kv == -1 || kv >= oracleNeed(in, c) {
			roomy = append(roomy, i)
		}
	}
	if c.Prompt <= 0 || len(roomy) == 0 {
		return free
	}
	return roomy
}

// oracleAble lists the endpoints that may serve a level.
func oracleAble(in Inputs, name string, level fleet.BurstLevel) []int {
	var weighted, fitting []int
	for i, e := range oraclePool(in, name).Endpoints {
		if e.Weight > 0 && e.State != fleet.StateDraining {
			weighted = append(weighted, i)
			if e.KVFree == -1 || e.KVFree >= level.UpperBudget() {
				fitting = append(fitting, i)
			}
		}
	}
	if len(fitting) == 0 {
		return weighted
	}
	return fitting
}

func oracleAllFull(in Inputs, names []string, counts []int32) bool {
	total := 0
	for _, name := range names {
		for _, e := range oraclePool(in, name).Endpoints {
			if e.State == fleet.StateDraining {
				continue
			}
			total++
			if oracleFree(e, counts) {
				return false
			}
		}
	}
	return total > 0
}

// oracleDraw draws among the candidates of a pool by linear cumulative weight.
func oracleDraw(p PoolInput, able []int, rng *rand.Rand) int {
	sum := 0.0
	for _, i := range able {
		sum += p.Endpoints[i].Weight
	}
	x := rng.Float64() * sum
	for _, i := range able {
		if x -= p.Endpoints[i].Weight; x < 0 {
			return i
		}
	}
	return able[len(able)-1]
}

// oracleChoose is the two-candidate choice for a pool with room everywhere.
func oracleChoose(p PoolInput, able []int, counts []int32, rng *rand.Rand) int {
	a, b := oracleDraw(p, able, rng), oracleDraw(p, able, rng)
	if a == b {
		b = oracleDraw(p, able, rng)
	}
	if counts[p.Endpoints[b].Slot] < counts[p.Endpoints[a].Slot] {
		return b
	}
	return a
}
