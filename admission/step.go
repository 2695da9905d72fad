package admission

import (
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Step brings shares, budgets, the pace of retries and leases up to now, and
// tells what became of the pools of the views, in their order; those that the
// configuration does not know are left out. It is called every 50 ms or so.
func (g *Gate) Step(now time.Time, views []PoolView) []PoolState {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := g.since(now)
	dt := min(max(0, at-g.last), time.Second)
	g.last = max(g.last, at)
	g.expire(at)
	s := g.settings.Load()
	g.steps++
	s.eachPool(func(p *pool) { p.begin(g.steps, at) })
	keep := decay(dt, demandOver)
	g.aways.step(at)
	g.clients.each(at, func(c *client) { c.step(at, keep, g.steps, &g.aways) })
	byName := make(map[string]*PoolView, len(views))
	for i := range views {
		byName[views[i].Name] = &views[i]
	}
	s.eachPool(func(p *pool) { p.settle(at, dt, byName[p.name]) })
	out := make([]PoolState, 0, len(views))
	for i := range views {
		if p := s.pools[views[i].Name]; p != nil {
			out = append(out, p.state())
		}
	}
	return out
}

// expire ends the claims that nobody vouches for any more. Only where nobody tells
// of ends do these pass for ends: otherwise requests would seem to take no longer
// than their leases. But where none does and they didn't, all their time in flight
// would count and none of their ends, and leases would grow by themselves.
func (g *Gate) expire(now time.Duration) {
	g.ended = g.claims.expired(now, g.ended[:0])
	for i := range g.ended {
		if k := &g.ended[i]; g.blind.Load() || g.patchy.Load() && !k.confirmed {
			k.release()
		} else {
			k.leave()
			k.pool.leave(k.level)
		}
	}
	g.count.expired.Add(uint64(len(g.ended)))
	clear(g.ended) // holds nothing that has ended
}

// eachPool visits the pools and what stands for pools that are unknown.
func (s *settings) eachPool(visit func(*pool)) {
	for _, p := range s.pools {
		visit(p)
	}
	for _, r := range s.routes {
		visit(r.state.nowhere)
	}
	visit(s.other.state.nowhere)
}

// step brings a client's demands up to now, adds them to the pools', and forgets
// what is over. keep is the weight of the past in means. The client is locked.
func (c *client) step(now time.Duration, keep float64, step uint64, aways *aways) {
	idle := false
	for i := range c.accounts {
		a := &c.accounts[i]
		a.ends.trim(a.live)
		a.mean = a.mean*keep + float64(a.live)*(1-keep)
		a.slots.lapse(now, func(of fleet.BurstLevel, inLine bool) {
			c.lapse(now)
			if inLine {
				a.pool.levels[of].line.gone.Add(1)
			}
		})
		if a.slots.n() == 0 { // whoever is held for one has it still
			clear(a.held[:])
		}
		out := aways.from(c.key, a.pool) > now
		a.demand(step, now, out || c.unused(now) >= someLapsed)
		a.gone = !out && a.over(now)
		idle = idle || a.gone
	}
	if idle {
		c.accounts = slices.DeleteFunc(c.accounts, func(a account) bool { return a.gone })
	}
	for i := range c.uses {
		c.uses[i].ends.trim(c.uses[i].live)
		c.uses[i].slots.lapse(now, func(fleet.BurstLevel, bool) { c.lapse(now) })
		if c.uses[i].slots.n() == 0 {
			c.uses[i].held = 0
		}
	}
	if len(c.uses) > 0 && c.live == 0 {
		c.uses = slices.DeleteFunc(c.uses, func(u use) bool {
			return u.live == 0 && max(u.requests.last, u.tokens.last) < now && !u.slots.expects(now) && !u.reserved.teaches(now)
		})
	}
}

// over reports whether nothing is known of an account any more.
func (a *account) over(now time.Duration) bool {
	return a.live == 0 && !a.slots.expects(now) && a.mean <= 0.01 && a.slots.earliness(now) <= 0.1 && now >= a.counted
}

// absent reports whether the client seems to have left: a slot has been due for long,
// and nobody has come. Until somebody does, what waits is no demand, which would take
// from the others' shares.
func (a *account) absent(now time.Duration) bool {
	return a.slots.n() > 0 && now > a.slots.first()+absentAfter && now > a.came+absentAfter
}

// wantedShare is how much of its share an account may want of the levels' budgets. What it
// wants beyond would keep places of its levels empty that it doesn't get; with no more
// than its share nobody wants more than there is, and levels have no budgets. A choice.
const wantedShare = 1.25

// lets is the part of those that wait whom the account's share lets in.
func (a *account) lets(share float64) float64 {
	return min(1, max(0, wantedShare*share-float64(a.live))/float64(max(1, a.slots.n())))
}

// demand tells the pool what the account wants: what it has in flight and what
// waits to come back; idle is true where that doesn't come, as slots of its client
// lapse.
func (a *account) demand(step uint64, now time.Duration, idle bool) {
	p := a.pool
	if p.step != step {
		return // not of the configuration any more
	}
	want := max(float64(a.live), a.mean)
	if !idle && !a.absent(now) {
		want += float64(a.slots.n())
		if a.slots.n() > 0 {
			let := a.lets(p.shareOf(a.weight))
			for i, n := range a.slots.of {
				p.levels[i].waiting += int(n)
				p.levels[i].wants += let * float64(n)
			}
		}
	}
	if a.active = a.live > 0 || a.slots.n() > 0; a.active {
		p.active++
	}
	room := a.room(p.shareOf(a.weight))
	a.due, a.soon = 0, 0
	if !idle {
		a.due, a.soon = a.slots.coming(now, p.horizon, p, room), a.slots.coming(now, p.farther, p, min(room, 1))
	}
	if a.live > 0 {
		p.earliest = min(p.earliest, a.ends.first(a.live))
	}
	p.coming += a.due
	p.hoping += a.soon
	if want > 0.01 && a.weight > 0 {
		p.demands = append(p.demands, demand{want, a.weight})
	}
}
