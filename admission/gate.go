package admission

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Options are what a [Gate] is made of.
type Options struct {
	Config *fleet.Config
	// Limiter counts rates; nil counts none.
	Limiter Limiter
	// Now is the clock; nil is time.Now. Monotonic readings are used where there
	// are any.
	Now func() time.Time
	// Claims bounds the requests that are followed each by itself, Clients the
	// clients that are told apart; 0 stands for 262,144 and 16,384.
	Claims, Clients int
}

// maxClaims is as many as the ledger of package accesslog has attempts.
const maxClaims = 1 << 18

// Gate lets requests in. It counts each admitted request in flight, per client,
// pool and level, from Admit to the access log's RequestEnded, to Cancel, or to
// the end of its lease, whichever comes first, once.
//
// All methods may be called from several goroutines.
type Gate struct {
	limiter  Limiter
	now      func() time.Time
	epoch    time.Time
	began    time.Duration // epoch, since the Unix epoch
	settings atomic.Pointer[settings]
	blind    atomic.Bool // nobody's log arrives
	patchy   atomic.Bool // somebody's doesn't
	clients  clients
	aways    aways
	claims   claims
	former   former
	count    counters

	mu    sync.Mutex // of steps and reconfigurations
	last  time.Duration
	steps uint64
	ended []claim
}

// New returns a gate with nothing in flight.
func New(o Options) *Gate {
	g := &Gate{limiter: o.Limiter, now: o.Now}
	if g.now == nil {
		g.now = time.Now
	}
	g.epoch = g.now()
	g.began = time.Duration(g.epoch.UnixNano())
	if o.Claims <= 0 {
		o.Claims = maxClaims
	}
	if o.Clients <= 0 {
		o.Clients = maxClients
	}
	g.claims.init(o.Claims)
	g.clients.init(o.Clients)
	g.Reconfigure(o.Config)
	return g
}

// since is a moment as a time since the gate was made; the zero time is now.
func (g *Gate) since(at time.Time) time.Duration {
	if at.IsZero() {
		at = g.now()
	}
	return at.Sub(g.epoch)
}

// Reconfigure goes over to another configuration. Requests in flight stay counted, and
// count from then on for the limits on concurrency that it has for their routes.
func (g *Gate) Reconfigure(cfg *fleet.Config) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := compile(cfg, g.settings.Load())
	g.settings.Store(s)
	g.claims.recount(s)
}

// SetBlind says whether the access log of some Envoy, or of all, does not arrive.
// Then nothing confirms or ends requests of that Envoy, which can't be told from
// the others' before, and those that are admitted count for as long as requests of
// their level usually take, 2 s … 25 s, instead of 2 s; so do those before that
// nothing has confirmed.
func (g *Gate) SetBlind(some, all bool) {
	g.blind.Store(all)
	if some = some || all; !g.patchy.Swap(some) && some {
		g.claims.extend()
	}
}

// bid is a request with what the configuration says of it.
type bid struct {
	ask      *Ask
	route    *routeState
	pool     *pool
	limit    *fleet.Limit // nil: none
	use      string       // the limit that counts it in flight; "" is none
	cap      int          // of the client's concurrency, 0 none
	rates    Rates
	class    fleet.RequestClass
	weight   float64
	fair     bool
	now      time.Duration
	cost     fleet.Tokens
	rated    bool          // rates count
	reserved reservation   // of its tokens
	counts   bool          // what it says of its tries can be gone by
	early    bool          // it was told to come later
	due      bool          // it was told to come by now
	mine     bool          // … for a place of its limit, not of the pool
	kept     bool          // … until its credential is wanted again
	took     bool          // it found room before that and took this slot
	slot     slot          // if so
	fresh    bool          // it counts in pool.fresh
	ends     time.Duration // not before, if it enters; see ends
	takes    time.Duration // how long it is in flight, if it enters
	away     time.Duration // until when it is to stay away from the pool, 0 if it isn't
}

// Admit lets a request in, or says why not and when to come back. An admitted
// request is in flight until its end is told by Apply or Cancel. A second request
// under one id takes the place of the first.
func (g *Gate) Admit(a *Ask) Verdict {
	b := g.bid(a)
	c, v := g.try(&b)
	if v.Reason != ReasonAdmitted {
		return v
	}
	got := g.consult(&b, c)
	if got.Admitted && g.claim(&b, c, got.Ticket) {
		b.pool.levels[a.Level].guess(max(0, a.Input), max(0, a.Output))
		g.count.admitted(&b, got.Ticket)
		return Verdict{Admitted: true, Reason: ReasonAdmitted, Standing: b.standing(got), Concurrency: v.Concurrency}
	}
	if got.Admitted {
		g.settle(got.Ticket, 0)
		got.Reason = ReasonBusy
	}
	return g.giveBack(&b, c, &got)
}

// try counts a request in flight before the limiter is asked, or refuses it. A panic here
// must not leave the client locked: all steps would wait for it.
func (g *Gate) try(b *bid) (*client, Verdict) {
	c := g.meet(b)
	defer c.mu.Unlock()
	why, hint := c.enter(b)
	limited := why == ReasonRequests || why == ReasonTokens // as if the limiter had been asked
	if why != ReasonAdmitted && !limited && b.ask.Hold {
		return c, Verdict{Reason: why, Held: true, Standing: b.standing(Reservation{})}
	}
	g.arrive(c, b, why != ReasonAdmitted && !limited)
	if limited {
		g.served(c, b)
		b.unfresh()
	}
	if why != ReasonAdmitted {
		v := Verdict{Reason: why, Standing: b.standing(c.known(b, why))}
		v.Refusal = g.refuse(c, b, why, v.Standing)
		g.count.refused(b, why)
		return c, v
	}
	g.served(c, b)
	g.aways.asks(b.ask.credential(), b.pool, b.now)
	return c, Verdict{Reason: why, Concurrency: hint}
}

// consult asks the limiter. If that panics, the place is given back.
func (g *Gate) consult(b *bid, c *client) (got Reservation) {
	answered := false
	defer func() {
		if !answered {
			c.mu.Lock()
			defer c.mu.Unlock()
			g.takeOut(c, b)
		}
	}()
	got = g.reserve(b)
	g.learn(b, c, &got)
	answered = true
	return got
}

// takeOut takes a request that was counted out of flight. The client is locked.
func (g *Gate) takeOut(c *client, b *bid) {
	b.reserved.back = b.reserved.tokens
	c.leave(b.pool, b.class, b.use, b.ends, &b.reserved)
	g.aways.unask(b.ask.credential(), b.pool, b.now, b.now)
	b.pool.leave(b.ask.Level)
	b.unfresh()
}

// giveBack refuses a request that was counted already, for what the limiter said.
func (g *Gate) giveBack(b *bid, c *client, got *Reservation) Verdict {
	v := Verdict{Reason: got.Reason, Standing: b.standing(*got)}
	c.mu.Lock()
	defer c.mu.Unlock()
	g.takeOut(c, b)
	why := got.Reason
	if got.Transient && !got.Admitted { // what is told of the window is only a part's
		why = ReasonLimiterDown
	}
	v.Refusal = g.refuse(c, b, why, v.Standing)
	g.count.refused(b, got.Reason)
	return v
}

// Refuse says when a request may come back that the plan refused, for ReasonBusy or
// ReasonNoRoom, or that Admit answered Held, for its reason. Its pool may be another.
func (g *Gate) Refuse(a *Ask, why Reason) Refusal {
	b := g.bid(a)
	c := g.meet(&b)
	defer c.mu.Unlock()
	g.arrive(c, &b, true)
	g.count.refused(&b, why)
	return g.refuse(c, &b, why, Standing{})
}

// Advise says when a request may come back that was admitted and that a server
// sent away. Nothing counts as refused by it.
func (g *Gate) Advise(a *Ask) Refusal {
	b := g.bid(a)
	c := g.meet(&b)
	defer c.mu.Unlock()
	c.account(b.pool, b.class).weight = b.weight
	return g.refuse(c, &b, ReasonBusy, Standing{})
}

// bid looks up what counts for a request.
func (g *Gate) bid(a *Ask) bid {
	s := g.settings.Load()
	r := s.route(a.Route)
	b := bid{ask: a, route: r.state, limit: r.limit, class: a.Class, fair: r.fair, now: g.since(a.At)}
	if b.class == 0 {
		b.class = r.class
	}
	if b.pool = s.pools[a.Pool]; b.pool == nil {
		b.pool = r.state.nowhere
	}
	weight := 1.0
	if b.limit != nil {
		rule := r.rule(a.Client)
		b.cap, b.rates = rule.cap, rule.rates
		weight = rule.weight
		if lowered := b.class == fleet.ClassBatch && r.class != fleet.ClassBatch; rule.class != 0 && !lowered {
			b.class = rule.class
		}
		b.rated = b.rates != Rates{}
		if rule.counts() {
			b.use = b.limit.Name
		}
	}
	b.weight = weight * classWeight(b.class)
	b.cost = a.reserves(b.rates.Tokens)
	if window := b.rates.Tokens.Window; window > 0 {
		begun := (g.began + b.now) % window
		b.reserved = reservation{tokens: b.cost, window: window, ends: b.now - begun + window}
	}
	return b
}

// reserves is what the request takes of a limit on tokens until it is settled. What
// is more than a whole window by the estimate alone takes all of one: so it enters
// when a window begins, instead of never.
func (a *Ask) reserves(r fleet.Rate) fleet.Tokens {
	output := max(0, a.Output)
	return min(max(0, a.Input)+output, max(fleet.Tokens(r.Amount), max(0, a.InputAtLeast)+output))
}

// standing is what is told of the limit.
func (b *bid) standing(r Reservation) Standing {
	if b.limit == nil {
		return Standing{}
	}
	return Standing{Policy: b.limit.Name, Requests: r.Requests, Tokens: r.Tokens, Local: r.Local}
}

// reserve asks the limiter.
func (g *Gate) reserve(b *bid) Reservation {
	if !b.rated || g.limiter == nil {
		return Reservation{Admitted: true, Reason: ReasonAdmitted}
	}
	at := b.ask.At
	if at.IsZero() {
		at = g.now()
	}
	return g.limiter.Reserve(LimitKey{Limit: b.limit.Name, Client: b.ask.Client}, b.rates, b.cost, at)
}

// learn keeps what the limiter told for refusals that don't ask it, which are those for
// concurrency, and first tries that leave tokens to others. What is transient may be
// otherwise by then.
func (g *Gate) learn(b *bid, c *client, got *Reservation) {
	requests := b.cap > 0 && got.Requests.Limit > 0 && !got.Transient
	tokens := b.reserved.ends > 0 && got.Admitted && got.Tokens.Limit > 0
	if !requests && !tokens {
		return
	}
	now := g.since(time.Time{})
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shared { // or it would be told to others
		return
	}
	u := c.use(b.limit.Name)
	if requests {
		u.spent.learn(b, got, now)
	}
	if s := &u.reserved; tokens && s.limit > 0 && s.has(&b.reserved) {
		// Answers overtake each other; and if it is too much, the limiter is asked.
		s.left, s.limit = max(s.left, got.Tokens.Remaining), got.Tokens.Limit
	}
}

// known is the standing of a request that is refused without asking the limiter, as far
// as it is the reason. The client is locked.
func (c *client) known(b *bid, why Reason) Reservation {
	switch why {
	case ReasonRequests:
		got, _ := c.use(b.limit.Name).spent.standing(b)
		return got
	case ReasonTokens:
		s := &c.use(b.limit.Name).reserved
		return Reservation{Tokens: Quota{Limit: s.limit, Remaining: max(0, s.left), Window: b.rates.Tokens.Window, Reset: s.ends - b.now}}
	}
	return Reservation{}
}

// settle corrects a reservation to what was used.
func (g *Gate) settle(t Ticket, used fleet.Tokens) {
	if t == (Ticket{}) || g.limiter == nil {
		return
	}
	g.count.tokensSettled.Add(uint64(max(0, used)))
	g.limiter.Settle(t, used)
}

// claim enters the request among those in flight. Where the table is full, a
// request of a client with a limit on concurrency is refused, since that is
// exact; others are counted by pool and level until they have probably ended.
func (g *Gate) claim(b *bid, c *client, t Ticket) bool {
	until, blindUntil := b.now+unconfirmedLease, b.now+b.pool.levels[b.ask.Level].lease()
	if g.patchy.Load() {
		until = blindUntil
	}
	if b.ask.ID != "" {
		k := claim{
			id: b.ask.ID, key: b.ask.Client, credential: b.ask.credential(), client: c, route: b.route, pool: b.pool, limit: b.use, ticket: t,
			seen: b.now, until: until, blindUntil: blindUntil, began: b.now, ends: b.ends, reserved: b.reserved, input: max(0, b.ask.Input), output: max(0, b.ask.Output),
			answers: fleet.Tokens(max(1, b.ask.Answers)), form: b.ask.form(),
			level: b.ask.Level, class: b.class,
		}
		older, ok := g.claims.add(&k)
		if older.id != "" {
			older.reserved.back = older.reserved.tokens
			older.release()
			g.settle(older.ticket, 0) // one of the two goes on
		}
		if ok {
			return true
		}
	}
	g.count.tableFull.Add(1)
	if b.cap > 0 {
		return false
	}
	c.mu.Lock()
	c.leave(b.pool, b.class, b.use, b.ends, &b.reserved)
	c.mu.Unlock()
	// One second later than it ends at the earliest, and never a lap too late.
	second := int64(until/time.Second) + 1
	b.pool.levels[b.ask.Level].loose[second%looseSeconds].Add(1)
	return true
}

// Usual is how long a request of a pool and level counts that no log entry tells of,
// where the log of some Envoy doesn't come: 2 s … 25 s. It is what those took that a
// log told of last, and before the first a whole budget at 25 ms a token, or as far
// from that as the pool's other levels are.
func (g *Gate) Usual(pool string, level fleet.BurstLevel) time.Duration {
	p := g.settings.Load().pools[pool]
	if p == nil {
		return lease
	}
	return p.levels[min(level, fleet.BurstLevels-1)].lease()
}

// lease is how long a request of the level counts that no log entry tells of,
// where nobody tells of any.
func (l *level) lease() time.Duration {
	return min(max(time.Duration(l.usual.Load()), unconfirmedLease), lease)
}

// Cancel takes back an admission: the request is not going after all. Its claim
// and its tokens go back; the request stays counted in its window.
func (g *Gate) Cancel(id string) {
	if k, ok := g.claims.take(id); ok {
		if !k.lapsed {
			k.reserved.back = k.reserved.tokens
			k.leave()
			k.pool.leave(k.level)
		}
		g.aways.unask(k.credential, k.pool, k.began, g.since(g.now()))
		g.settle(k.ticket, 0)
	}
}

// Drop is Cancel for a request that ended before anything came of it, unless a log
// entry has told of it.
func (g *Gate) Drop(id string) {
	if !g.claims.confirmed(id) {
		g.Cancel(id)
	}
}

// leave takes the claim from its client.
func (k *claim) leave() {
	k.client.mu.Lock()
	k.client.leave(k.pool, k.class, k.limit, k.ends, &k.reserved)
	k.client.mu.Unlock()
}

// release ends a claim.
func (k *claim) release() {
	if !k.lapsed {
		k.leave()
		k.pool.end(k.level)
	}
}

// arrive notes that a request of the client came, and whether it was told to. The
// client is locked.
func (g *Gate) arrive(c *client, b *bid, refused bool) {
	a := c.account(b.pool, b.class)
	a.weight, a.came = b.weight, b.now
	if b.ask.Retry > 0 {
		c.returned, c.returns = b.now, true
		c.back(b.now)
	}
	if b.kept = g.aways.arrive(b, &a.slots); b.kept {
		return
	}
	var used, inLine bool
	if u := c.own(b); u != nil {
		b.mine = true
		b.early, b.due, _, _ = u.slots.arrive(b.now, b.ask.Retry, b.counts)
		return
	}
	b.early, b.due, used, inLine = a.slots.arrive(b.now, b.ask.Retry, b.counts)
	line := &b.pool.levels[b.ask.Level].line
	switch {
	case used:
		a.used()
		if inLine {
			line.returned.Add(1)
		}
	case b.ask.Retry == 0:
		if b.fresh = !refused || a.newcomer(b); b.fresh {
			b.pool.fresh.Add(1)
		}
	case b.ask.Retry > 0 && !b.early && !b.due && refused:
		line.others.Add(1) // who finds room needs no slot
	}
}

// enter counts a request in flight, or says why it may not be: ReasonRequests where its
// rate, by what the limiter told last, keeps it out for longer than its concurrency. The
// hint, if not 0, is how many the client should have in flight, which it nearly has. The
// client is locked.
func (c *client) enter(b *bid) (why Reason, hint int) {
	a := c.account(b.pool, b.class)
	if b.away > b.now {
		return ReasonServerLimit, 0
	}
	var u *use
	if limit := b.use; limit != "" {
		u = c.use(limit)
		if b.cap > 0 && (u.live >= b.cap || u.yields(b)) {
			if u.spends(b) {
				return ReasonRequests, 0
			}
			return ReasonConcurrency, 0
		}
		if u.short(b) {
			return ReasonTokens, 0
		}
	}
	share := b.pool.shareOf(b.weight)
	if b.fair && a.room(share) == 0 && (b.pool.keeps(a, share) || a.lingers(b)) {
		return ReasonShare, 0
	}
	if b.fair && a.defers(b) {
		return ReasonBusy, 0
	}
	if a.yields(b, share) {
		return ReasonTurn, 0
	}
	if why := b.pool.enter(b.ask.Level, b.ask.Unplaced); why != ReasonAdmitted {
		return why, 0
	}
	c.live++
	a.live++
	b.ends = b.pool.levels[b.ask.Level].endsAfter(b.now)
	a.ends.add(b.ends)
	a.again = false
	a.stir()
	if u != nil {
		u.live++
		u.ends.add(b.ends)
		u.reserved.add(&b.reserved, b.now)
		u.reserved.left -= int64(b.reserved.tokens)
	}
	return ReasonAdmitted, nearly(a, u, b, share)
}

// unfresh takes back what arrive counted: the request takes no place after all.
func (b *bid) unfresh() {
	if b.fresh {
		b.pool.fresh.Add(-1)
	}
}

// served takes the slot of a request away that found room before it. The client is
// locked.
func (g *Gate) served(c *client, b *bid) {
	switch a := c.account(b.pool, b.class); {
	case b.early && b.kept:
		g.aways.served(b)
	case b.early && b.mine:
		u := c.use(b.limit.Name)
		b.slot, b.took = u.slots.due[0], true
		u.slots.use()
	case b.early:
		a.used()
		if _, inLine := a.slots.use(); inLine {
			b.pool.levels[b.ask.Level].line.returned.Add(1)
		}
	}
}

// nearly is the hint to a client that has more than four fifths of its share, or
// of its limit, in flight.
func nearly(a *account, u *use, b *bid, share float64) int {
	hint := 0
	if u != nil && b.cap > 0 && 5*u.live > 4*b.cap {
		hint = b.cap
	}
	if most := atLeastOne(share); b.fair && most < math.MaxInt32 && 5*int64(a.live) > 4*most && (hint == 0 || int(most) < hint) {
		hint = int(most)
	}
	return hint
}

// enterAgain counts a claim in flight that was not counted for a while, whatever
// the limits. The client is locked.
func (c *client) enterAgain(k *claim) {
	c.live++
	a := c.account(k.pool, k.class)
	a.live++
	a.ends.add(k.ends)
	a.stir()
	if a.weight == 0 {
		a.weight = classWeight(k.class)
	}
	if k.limit != "" {
		u := c.use(k.limit)
		u.live++
		u.ends.add(k.ends)
		u.reserved.again(&k.reserved)
	}
}

// leave takes a request out of flight. The client is locked.
func (c *client) leave(p *pool, class fleet.RequestClass, limit string, ends time.Duration, r *reservation) {
	c.live--
	a := c.account(p, class)
	a.live--
	a.ends.drop(ends)
	if limit != "" {
		u := c.use(limit)
		u.live--
		u.ends.drop(ends)
		u.reserved.drop(r)
	}
}
