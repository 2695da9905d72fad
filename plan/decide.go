package plan

import (
	"math"
	"math/bits"
	"slices"

	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// furtherDraws is how many weighted draws follow when both candidates are at
	// their limit, before the pool is scanned.
	furtherDraws = 4
	// scanLimit is the largest pool of which every endpoint is looked at before
	// the pool counts as full. Larger ones are sampled by sampleDraws uniform
	// draws: a pool in which a share f of the endpoints is below its limit is
	// then wrongly taken for full with probability (1−f)^(32+6): at f = 10 % in
	// 1.8 % of the cases, at f = 1 % in 68 %. Looking at all 10,000 endpoints of
	// a saturated pool would cost some 20 µs for each request that is refused,
	// at the worst of times.
	scanLimit   = 64
	sampleDraws = 32
)

// Decide picks the endpoints of a request. It is a pure function of its
// arguments and of what live answers: the seed decides all draws. It takes
// constant time while an endpoint below its limit is among the first few draws,
// bounded time otherwise, and allocates nothing. A nil live stands for nothing
// in flight anywhere.
//
// Two candidates are drawn by weight; the one with fewer own sends in flight
// wins, the first on a tie. When both draws fall on one endpoint the second is
// repeated once, no more: forcing two different candidates would give an
// endpoint of almost no weight half of the traffic of a pool of two. So an
// endpoint of share w is among the candidates of at most 1−(1−w)³ of the
// requests.
//
// Endpoints of the request's zone come before others, see Class.Zone.
//
// On a route with affinity a session's own endpoint comes before any draw, as
// long as it is no worse a choice; see stick.
//
// An endpoint at its limit is not chosen while another candidate is below; a
// pool whose endpoints are all at their limits passes the request on to the
// next pool of the chain. So does one whose endpoints all fail, while others of the
// chain don't, but for a request that asks whether they still do.
func (p *Plan) Decide(c Class, seed uint64, live Live) (d Decision) {
	if live == nil {
		live = idle{}
	}
	r := p.route(c.Route)
	if r == nil {
		return leave(c.Arm, ReasonUnknownRoute)
	}
	if c.Generates && c.Budget > 0 {
		if d, refused := r.checkSize(&c); refused {
			if d.Reason == ReasonNoRoom {
				ch, _ := p.chain(r, c.Arm)
				d.Arm = p.awaited(r, ch)
			}
			return d
		}
	}
	var w wish
	w.begin(&c, seed, live)
	w.need, w.asks = min(w.need, r.most), c.Generates
	w.spares, w.open = p.spared(r, c.Arm)
	if c.Strategy != fleet.StrategyDynamic {
		return p.decideLegacy(r, c, &w)
	}
	ch, known := p.chain(r, c.Arm)
	if !known {
		return leave(c.Arm, ReasonUnknownArm)
	}
	if r.sticky {
		w.session = c.Session
	}
	if p.choose(&d, ch, int(c.Past), &w) {
		return passed(d, c.Past)
	}
	return p.decideFull(r, ch, c, &w)
}

// passed marks a decision that passed pools by.
func passed(d Decision, past uint8) Decision {
	if past > 0 && d.Moved {
		d.Reason = ReasonNotAdmitted
	}
	return d
}

// Further returns, for [Class].Past, how many pools stand in the chain up to that
// of a decision, that one included. It returns false where none is behind it, and
// for a decision that didn't pass by what the class tells.
func (p *Plan) Further(c Class, d *Decision) (past uint8, ok bool) {
	r := p.route(c.Route)
	if r == nil {
		return 0, false
	}
	ch, known := p.chain(r, c.Arm)
	if !known {
		return 0, false
	}
	pos := int(d.Pos)
	switch {
	case d.Action == ActionLeave && d.Reason == ReasonLegacy:
		pos = p.firstServing(ch)
	case d.Action != ActionSteer:
		return 0, false
	}
	return uint8(pos + 1), pos+1 < len(ch) && pos >= int(c.Past)
}

// Serving is the pool to which Envoy sends a request that is left to it: the first
// of the chain with endpoints that don't drain. It is NoPool where the chain isn't
// known or no pool serves.
func (p *Plan) Serving(c Class) PoolID {
	r := p.route(c.Route)
	if r == nil {
		return NoPool
	}
	ch, known := p.chain(r, c.Arm)
	if !known {
		return NoPool
	}
	if pos := p.firstServing(ch); pos < len(ch) {
		return ch[pos]
	}
	return NoPool
}

// firstServing is the position of the first pool of a chain that serves, len(ch) if
// none does.
func (p *Plan) firstServing(ch []PoolID) int {
	for pos, id := range ch {
		if p.pools[id].servers() > 0 {
			return pos
		}
	}
	return len(ch)
}

// servers is how many endpoints of a pool don't drain.
func (pl *pool) servers() int {
	if pl.drains {
		return len(pl.serving)
	}
	return len(pl.endpoints)
}

// choose picks an endpoint below its limit in the first pool of the chain, from a
// position on, that has one.
func (p *Plan) choose(d *Decision, ch []PoolID, from int, w *wish) bool {
	for pos := from; pos < len(ch); pos++ {
		pl := p.pools[ch[pos]].seen(w.spares)
		if pl.whole.tables[w.level] == nil {
			continue
		}
		if got, why, ok := pl.choose(w); ok && (!pl.endpoints[got.won].fails || p.mayAsk(pl, ch, w)) {
			p.steer(d, ch, pos, got, w)
			if !d.Moved {
				d.Reason = why
			}
			return true
		}
	}
	return false
}

// seen is the pool as a chain sees it that can spare failing endpoints, or can't.
func (pl *pool) seen(spares bool) *pool {
	if spares && pl.trial != nil {
		return pl.trial
	}
	return pl
}

// mayAsk reports whether a request may ask an endpoint of a pool that fails. If that still
// does, Envoy sends it to another by itself, where nothing is kept for it. So one of the
// chain's others must not be above its limit already. Where all are closed it is told so.
// A request that shows nothing is no reason to go to a pool that fails.
func (p *Plan) mayAsk(pl *pool, ch []PoolID, w *wish) bool {
	if !w.asks {
		return !pl.failing()
	}
	if !w.open {
		return true
	}
	for _, id := range ch {
		if pl := p.pools[id].seen(w.spares); pl.takesOneMore(w) {
			return true
		}
	}
	return false
}

// takesOneMore reports whether an endpoint that doesn't fail, among scanLimit of those
// that may be chosen, is not above its limit.
func (pl *pool) takesOneMore(w *wish) bool {
	t := pl.whole.tables[w.level]
	if t == nil {
		return false
	}
	n := len(t.cells)
	start := w.rng.below(n)
	for k := range min(n, scanLimit) {
		e := &pl.endpoints[t.candidate((start+k)%n)]
		if !e.fails && !e.full(w.live.InFlight(e.slot)-1) {
			return true
		}
	}
	return false
}

// checkSize refuses a request that asks for more than the model gives, or than
// any endpoint has room for now or ever, where the route wants that. The prompt's
// estimate alone makes nobody wait for more than an empty cache.
func (r *route) checkSize(c *Class) (Decision, bool) {
	refuse := func(why Reason, fits fleet.Tokens) (Decision, bool) {
		return Decision{Action: ActionRefuse, Reason: why, Arm: c.Arm, Fits: fits}, true
	}
	if most := r.info.MaxOutput; most > 0 && c.Budget > most && r.info.Oversize == fleet.OversizeRefuse {
		return refuse(ReasonOversize, most)
	}
	if r.info.NoRoom != fleet.OversizeRefuse {
		return Decision{}, false
	}
	prompt := c.Prompt
	if r.room >= r.most {
		prompt = c.PromptAtLeast
	}
	for _, has := range [...]struct {
		tokens int32
		prompt fleet.Tokens
		why    Reason
	}{{r.whole, c.PromptAtLeast, ReasonNeverFits}, {r.room, prompt, ReasonNoRoom}} {
		if fits := fleet.Tokens(has.tokens) - max(has.prompt, 0); c.Budget > fits && has.tokens < math.MaxInt32 {
			return refuse(has.why, max(fits, 0))
		}
	}
	return Decision{}, false
}

// wish is what one request looks for in a pool, and the state of its draws.
type wish struct {
	rng   draws
	live  Live
	level fleet.BurstLevel
	// need is how much free KV cache an endpoint must have, in tokens; 0 when the
	// prompt is unknown: then only the level's table looks at the KV cache. It is
	// no more than an empty one has; see route.most.
	need int32
	// session is 0 where none counts.
	session Session
	zone    ZoneID
	// spares and open are the chain's, see Plan.spared. asks is whether the request's end
	// shows whether an endpoint works.
	spares, open, asks bool
}

// begin fills in place: a copy of what was just written costs a fifth of a
// decision's time.
func (w *wish) begin(c *Class, seed uint64, live Live) {
	w.rng, w.live, w.level, w.zone = newDraws(seed), live, min(c.Level, fleet.BurstLevels-1), c.Zone
	if c.Prompt > 0 {
		w.need = int32(min(c.Prompt, math.MaxInt32/2) + w.level.UpperBudget())
	}
}

// able reports whether an endpoint with that much in flight may take the
// request.
func (w *wish) able(e *endpoint, inFlight int32) bool { return !e.full(inFlight) && e.kv >= w.need }

// leave is a decision that lets Envoy choose.
func leave(arm PoolID, why Reason) Decision {
	return Decision{Action: ActionLeave, Reason: why, Arm: arm}
}

// decideLegacy leaves the choice to Envoy but sheds as for dynamic requests.
// Envoy's own balancer knows nothing of our weights, so every endpoint of the
// chain counts, also those of weight 0, but not those that drain, which Envoy
// knows of. Nor does it know of servers that told callers to stay away: where all
// of a pool have, the request is moved along the chain, as it is where admission
// did not let it into that pool, and where all of the pool fail and others don't.
func (p *Plan) decideLegacy(r *route, c Class, w *wish) (d Decision) {
	if c.Generates {
		ch, known := p.chain(r, c.Arm) // all chains of a route have the same pools, but for a pool alone
		if p.everyEndpointFull(ch, w) {
			return p.allBusy(r, ch)
		}
		if !known {
			return leave(c.Arm, ReasonLegacy)
		}
		pos := p.firstServing(ch) // to which Envoy would send it
		if pos == len(ch) {
			return leave(c.Arm, ReasonLegacy)
		}
		pl, from := p.pools[ch[pos]].seen(w.spares), pos+1
		failing := pl.failing()
		if failing {
			from = pos // one may ask
		} else if !pl.closed && int(c.Past) <= pos {
			return leave(c.Arm, ReasonLegacy)
		}
		if p.choose(&d, ch, max(from, int(c.Past)), w) {
			return passed(d, c.Past)
		}
		if failing {
			return p.allBusy(r, ch)
		}
	}
	return leave(c.Arm, ReasonLegacy)
}

// failing reports whether nothing of a pool is left, as it is seen, but endpoints that
// fail and can be spared, and such as are closed.
func (pl *pool) failing() bool {
	return pl.closed && slices.ContainsFunc(pl.endpoints, func(e endpoint) bool { return e.fails })
}

// allBusy refuses a request for which the chain has no place.
func (p *Plan) allBusy(r *route, ch []PoolID) Decision {
	return Decision{Action: ActionRefuse, Reason: ReasonAllBusy, Arm: p.awaited(r, ch)}
}

// everyEndpointFull is false for a chain without endpoints that serve: such
// requests get Envoy's own 503, since no capacity exists that could be waited
// for.
func (p *Plan) everyEndpointFull(ch []PoolID, w *wish) bool {
	w.need = 0 // Envoy's balancer knows nothing of KV caches
	any := false
	for _, id := range ch {
		pl := p.pools[id].seen(w.spares)
		n, candidate := pl.servers(), pl.anyone
		if pl.drains {
			candidate = pl.anyServing
		}
		if n == 0 {
			continue
		}
		any = true
		if _, found := pl.findAble(n, w, candidate); found {
			return false
		}
	}
	return any
}

// decideFull is for requests that no pool has room for, or that no pool can
// serve at all.
func (p *Plan) decideFull(r *route, ch []PoolID, c Class, w *wish) (d Decision) {
	for pos, id := range ch {
		pl := p.pools[id].seen(w.spares)
		t := pl.whole.tables[w.level]
		if t == nil {
			continue
		}
		if c.Generates {
			return p.allBusy(r, ch)
		}
		if pl.failing() {
			continue
		}
		p.steer(&d, ch, pos, pl.leastLoaded(t, w), w)
		return d
	}
	return leave(c.Arm, ReasonNothingAlive)
}

// awaited is the pool of a chain for whose places those wait that are refused: the
// first that takes requests, else the first that will. A pool that drains, that fails, or
// that is closed for a while, frees no place; who waited for it would wait beside others
// that do.
func (p *Plan) awaited(r *route, ch []PoolID) PoolID {
	best := ch[0]
	for _, id := range ch[1:] {
		if p.hope(r, id) > p.hope(r, best) {
			best = id
		}
	}
	return best
}

// hope is what may be hoped of a pool by the requests of a route.
func (p *Plan) hope(r *route, id PoolID) outlook {
	spares, _ := p.spared(r, id)
	return p.pools[id].seen(spares).outlook
}

// Awaited appends the pools of a request's chain of which one may be waited for: those
// that are as good for it as [Decision].Arm is for a refusal, in the chain's order. It
// appends nothing for an unknown route.
func (p *Plan) Awaited(dst []PoolID, c Class) []PoolID {
	r := p.route(c.Route)
	if r == nil {
		return dst
	}
	ch, _ := p.chain(r, c.Arm)
	best := p.hope(r, p.awaited(r, ch))
	for _, id := range ch {
		if p.hope(r, id) == best {
			dst = append(dst, id)
		}
	}
	return dst
}

// choice is a chosen endpoint and the one it was compared with.
type choice struct {
	won, lost         int32
	liveWon, liveLost int32
}

// choose draws an endpoint below its limit, of the request's zone while that has
// room; false reports that every endpoint is at its limit.
func (pl *pool) choose(w *wish) (choice, Reason, bool) {
	near := pl.near(w)
	if near == nil {
		return pl.chooseIn(&pl.whole, w)
	}
	if got, why, ok := pl.chooseNear(near, w); ok {
		return got, why, true
	}
	got, why, ok := pl.chooseIn(&pl.whole, w)
	if ok && pl.zoneOf[got.won] != w.zone {
		why = ReasonZoneSpill
	}
	return got, why, ok
}

// near is the part of the pool in the request's zone, or nil if the pool has none
// or that is all there is.
func (pl *pool) near(w *wish) *region {
	if int(w.zone) >= len(pl.zones) {
		return nil
	}
	return pl.zones[w.zone] // none for zone 0
}

// chooseNear is for the endpoints of the request's zone. It doesn't search: a
// zone in which six draws find no room is as good as full, and others have some.
func (pl *pool) chooseNear(r *region, w *wish) (got choice, why Reason, ok bool) {
	t := r.tables[w.level]
	if pl.whole.idle[w.level] != nil {
		t = r.idle[w.level]
	}
	if t == nil {
		return got, 0, false
	}
	if w.session != 0 {
		if got, ok := pl.stick(&r.ring, w); ok && got.liveWon < pl.spill[got.won] {
			return got, ReasonAffinity, true
		}
	}
	two, ok := pl.drawTwo(t, w, pl.spill)
	if ok {
		return two, pl.steered, true
	}
	for range furtherDraws {
		e := t.drawOne(&w.rng)
		n := w.live.InFlight(pl.endpoints[e].slot)
		if w.able(&pl.endpoints[e], n) && n < pl.spill[e] {
			return choice{won: e, lost: two.won, liveWon: n, liveLost: two.liveWon}, pl.steered, true
		}
	}
	return got, 0, false
}

// stick takes the session's home, if that is calm, has room in its KV cache for
// the request (for the level's budget at least), and has not much more in flight
// than the mean of the ring. Otherwise the request goes where any other would:
// the session comes home with its next. A pool that is on no route with sessions has
// no homes.
func (pl *pool) stick(r *ring, w *wish) (choice, bool) {
	if len(r.points) == 0 {
		return choice{}, false
	}
	home := r.home(w.session)
	e := &pl.endpoints[home]
	n := w.live.InFlight(e.slot)
	room := max(w.need, int32(w.level.UpperBudget()))
	spare := e.idle || pl.whole.idle[w.level] == nil
	return choice{won: home, lost: home, liveWon: n, liveLost: n}, e.calm && spare && n <= r.most && e.kv >= room && !e.full(n)
}

// chooseIn draws two endpoints of the whole pool that are below their limits,
// with room for the request if any has.
func (pl *pool) chooseIn(r *region, w *wish) (choice, Reason, bool) {
	t := r.tables[w.level]
	if w.session != 0 {
		if got, ok := pl.stick(&r.ring, w); ok {
			return got, ReasonAffinity, true
		}
	}
	if idle := r.idle[w.level]; idle != nil {
		if got, ok := pl.chooseIdle(idle, w); ok {
			return got, pl.steered, true
		}
	}
	got, ok := pl.drawTwo(t, w, nil)
	if !ok {
		got, ok = pl.chooseOther(t, got, w)
	}
	return got, pl.steered, ok
}

// chooseIdle takes an idle endpoint that is able, if there is one.
func (pl *pool) chooseIdle(t *table, w *wish) (choice, bool) {
	got, ok := pl.drawTwo(t, w, nil)
	if !ok {
		var found choice
		if found, ok = pl.findAble(len(t.cells), w, t.candidate); ok {
			got = choice{won: found.won, lost: got.won, liveWon: found.liveWon, liveLost: got.liveWon}
		}
	}
	return got, ok
}

// drawTwo draws two candidates; the one with fewer attempts in flight wins, of
// those that are able and, where spill is given, below their place in it. False
// reports that neither is; then the first stands as won.
func (pl *pool) drawTwo(t *table, w *wish, spill []int32) (got choice, ok bool) {
	a, b := t.drawTwo(&w.rng)
	ea, eb := &pl.endpoints[a], &pl.endpoints[b]
	la := w.live.InFlight(ea.slot)
	lb := la
	if a != b {
		lb = w.live.InFlight(eb.slot)
	}
	ableA, ableB := w.able(ea, la), w.able(eb, lb)
	if spill != nil {
		ableA, ableB = ableA && la < spill[a], ableB && lb < spill[b]
	}
	if ableB && (!ableA || lb < la) {
		return choice{won: b, lost: a, liveWon: lb, liveLost: la}, true
	}
	return choice{won: a, lost: b, liveWon: la, liveLost: lb}, ableA
}

// chooseOther looks further when neither candidate is able. What it finds is
// compared with the first of them. When the KV cache is what all lack, the
// roomiest of the endpoints drawn serves. Not the roomiest of all: KV readings
// are a tick old, and everybody would go there until the next.
func (pl *pool) chooseOther(t *table, two choice, w *wish) (got choice, ok bool) {
	got = choice{won: two.won, lost: two.won, liveWon: two.liveWon, liveLost: two.liveWon}
	roomiest := int32(-1)
	spare := func(e, inFlight int32) {
		if at := &pl.endpoints[e]; !at.full(inFlight) && at.kv > roomiest {
			got.won, got.liveWon, roomiest = e, inFlight, at.kv
		}
	}
	spare(two.won, two.liveWon)
	spare(two.lost, two.liveLost)
	for range furtherDraws {
		e := t.drawOne(&w.rng)
		n := w.live.InFlight(pl.endpoints[e].slot)
		if w.able(&pl.endpoints[e], n) {
			got.won, got.liveWon = e, n
			return got, true
		}
		spare(e, n)
	}
	found, ok := pl.findAble(len(t.cells), w, t.candidate)
	if !ok && roomiest < 0 && w.need > 0 {
		anywhere := *w
		anywhere.need = 0
		found, ok = pl.findAble(len(t.cells), &anywhere, t.candidate)
		w.rng = anywhere.rng
	}
	if ok {
		got.won, got.liveWon = found.won, found.liveWon
	}
	return got, ok || roomiest >= 0
}

// findAble looks for an able endpoint among n candidates: at all of them,
// beginning anywhere, up to scanLimit, otherwise at sampleDraws of them.
func (pl *pool) findAble(n int, w *wish, candidate func(int) int32) (choice, bool) {
	start := w.rng.below(n)
	for k := range min(n, scanLimit) {
		i := start + k
		if i >= n {
			i -= n
		}
		if n > scanLimit {
			if k == sampleDraws {
				break
			}
			i = w.rng.below(n)
		}
		e := candidate(i)
		if l := w.live.InFlight(pl.endpoints[e].slot); w.able(&pl.endpoints[e], l) {
			return choice{won: e, liveWon: l}, true
		}
	}
	return choice{}, false
}

func (pl *pool) anyone(i int) int32     { return int32(i) }
func (pl *pool) anyServing(i int) int32 { return pl.serving[i] }
func (t *table) candidate(i int) int32  { return t.cells[i].self }

// leastLoaded takes the endpoint with the fewest own sends in flight out of a
// few draws, whether or not it is at its limit.
func (pl *pool) leastLoaded(t *table, w *wish) choice {
	first := t.drawOne(&w.rng)
	n := w.live.InFlight(pl.endpoints[first].slot)
	got := choice{won: first, lost: first, liveWon: n, liveLost: n}
	for range 1 + furtherDraws {
		e := t.drawOne(&w.rng)
		if n := w.live.InFlight(pl.endpoints[e].slot); n < got.liveWon {
			got.lost, got.liveLost = got.won, got.liveWon
			got.won, got.liveWon = e, n
		}
	}
	return got
}

func (e *endpoint) full(inFlight int32) bool { return e.max != 0 && inFlight >= e.max }

// steer fills the decision for a choice in the pool at pos.
func (p *Plan) steer(d *Decision, ch []PoolID, pos int, got choice, w *wish) {
	arm := ch[pos]
	pl := p.pools[arm].seen(w.spares)
	d.Action, d.Reason, d.Arm, d.Pos = ActionSteer, pl.steered, arm, uint8(pos)
	d.Moved, d.Regroup = pos > 0, pos > 0
	d.RunnerUp = Pick{Pool: arm, Endpoint: got.lost}
	d.LiveChosen, d.LiveRunnerUp = got.liveWon, got.liveLost
	d.add(Pick{Pool: arm, Endpoint: got.won})
	if d.Moved {
		d.Reason = ReasonSpill
		if p.pools[ch[0]].whole.tables[w.level] == nil {
			d.Reason = ReasonPoolEmpty
		}
	}
	// The pools behind the chosen one first; those before it, which are at
	// their limits, last.
	for k := 1; k < len(ch) && d.N < MaxAttempts; k++ {
		i := pos + k
		if i >= len(ch) {
			i -= len(ch)
		}
		id := ch[i]
		next := p.pools[id].seen(w.spares)
		t := next.retries(w)
		if t == nil {
			d.Regroup = true
			continue
		}
		d.add(Pick{Pool: id, Endpoint: next.retryTarget(t, w)})
	}
	if d.N == 1 {
		d.add(Pick{Pool: arm, Endpoint: pl.second(got, w)})
	}
}

func (d *Decision) add(pick Pick) {
	d.Picks[d.N] = pick
	d.N++
}

// retries is the table for attempts after the first: the zone's, where it has
// candidates, else the whole pool's.
func (pl *pool) retries(w *wish) *table {
	if near := pl.near(w); near != nil && near.tables[w.level] != nil {
		return near.tables[w.level]
	}
	return pl.whole.tables[w.level]
}

// second is the target of a second attempt in the same pool: another endpoint of
// the zone if there is one, else of the pool.
func (pl *pool) second(got choice, w *wish) int32 {
	t := pl.retries(w)
	if len(t.cells) == 1 {
		t = pl.whole.tables[w.level]
	}
	return t.other(got, &w.rng)
}

// retryTarget picks an endpoint of a later pool. It is not scanned for room:
// few requests get that far.
func (pl *pool) retryTarget(t *table, w *wish) int32 {
	a, b := t.drawTwo(&w.rng)
	if a == b {
		return a
	}
	ea, eb := &pl.endpoints[a], &pl.endpoints[b]
	la, lb := w.live.InFlight(ea.slot), w.live.InFlight(eb.slot)
	if ableA, ableB := w.able(ea, la), w.able(eb, lb); ableA != ableB {
		if ableB {
			return b
		}
		return a
	}
	if lb < la {
		return b
	}
	return a
}

// other is the target of a second attempt in the same pool: the runner-up, or
// else some other candidate, or the same one if it is alone.
func (t *table) other(got choice, rng *draws) int32 {
	if got.lost != got.won {
		return got.lost
	}
	for range furtherDraws {
		if e := t.drawOne(rng); e != got.won {
			return e
		}
	}
	i := rng.below(len(t.cells))
	if t.cells[i].self == got.won {
		i = (i + 1) % len(t.cells)
	}
	return t.cells[i].self
}

// drawTwo draws two candidates, the second once more if it is the first again.
// One value of the sequence serves both draws.
func (t *table) drawTwo(rng *draws) (a, b int32) {
	random := rng.next()
	a, b = t.draw(uint32(random>>32)), t.draw(uint32(random))
	if a == b && len(t.cells) > 1 {
		b = t.drawOne(rng)
	}
	return a, b
}

func (t *table) drawOne(rng *draws) int32 { return t.draw(uint32(rng.next() >> 32)) }

// chain returns the pools of a request in the order in which they are tried. An
// arm that is not of the route's chain stands alone: Envoy has the routes of another
// config for a moment, or for longer, and the request goes to that pool all the
// same, within its limits. Without any arm, or with one that the plan doesn't have,
// the chain is known only if the split has a single pool.
func (p *Plan) chain(r *route, arm PoolID) ([]PoolID, bool) {
	for _, ch := range r.chains {
		if ch[0] == arm {
			return ch, true
		}
	}
	if p.pool(arm) != nil {
		return p.ids[arm : arm+1 : arm+1], true
	}
	return r.chains[0], arm == NoPool && r.single
}

// spared are route.spares and route.open for requests of an arm: those of the route, but
// of the pool alone where that is not the route's, since the others can't serve it then.
func (p *Plan) spared(r *route, arm PoolID) (spares, open bool) {
	if pl := p.pool(arm); pl != nil && !slices.Contains(r.chains[0], arm) {
		return pl.well, pl.open
	}
	return r.spares, r.open
}

// AppendChain appends the pools of a request's attempts as the route's own
// groups have them: the arm, the split's other pools in rotation after it, then
// the fallback; a single pool stands twice. It appends nothing for an unknown
// route, or for an unknown arm of a route that splits. A decision with Regroup
// follows its Picks instead.
func (p *Plan) AppendChain(dst []PoolID, c Class) []PoolID {
	r := p.route(c.Route)
	if r == nil {
		return dst
	}
	ch, known := p.chain(r, c.Arm)
	if !known {
		return dst
	}
	dst = append(dst, ch...)
	if len(ch) == 1 {
		dst = append(dst, ch[0])
	}
	return dst
}

// idle is a Live with nothing in flight.
type idle struct{}

func (idle) InFlight(uint32) int32 { return 0 }

// draws is the random sequence of one seed: splitmix64 (Steele, Lea, Flood:
// "Fast splittable pseudorandom number generators", OOPSLA 2014), whose n-th
// value is a hash of seed + n·golden. Seeds that follow each other are fine.
type draws uint64

// newDraws hashes the seed, so that the sequences of seeds that differ by a
// multiple of golden don't overlap.
func newDraws(seed uint64) draws { return draws(mix(seed)) }

const golden = 0x9e3779b97f4a7c15

func (d *draws) next() uint64 {
	*d += golden
	return mix(uint64(*d))
}

// below returns a uniform integer in [0, n); n is above 0.
func (d *draws) below(n int) int {
	i, _ := bits.Mul64(d.next(), uint64(n))
	return int(i)
}

func mix(z uint64) uint64 {
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb
	return z ^ (z >> 31)
}
