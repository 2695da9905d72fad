package admission

import "github.com/fairlead-proxy/fairlead/fleet"

// hold is where a request that is held counts among those.
type hold struct {
	pool  *pool
	class fleet.RequestClass
	limit string // whose place it waits for; "" is one of the pool
	// counts: among those that are held, ahead: also for clients with nothing in
	// flight.
	counts, ahead bool
}

// BeginHold says that a request that found no place is held, and will be asked for
// again in a moment: others that come for the first time leave it the next place. It
// reports false, and counts nothing, where it was told to come later: such a request is
// not to be held. Else EndHold follows, for the same Ask.
func (g *Gate) BeginHold(a *Ask) bool {
	b := g.bid(a)
	c := g.meet(&b)
	defer c.mu.Unlock()
	acc := c.account(b.pool, b.class)
	waits, held := &acc.slots, &acc.held[a.Level]
	a.hold = hold{pool: b.pool, class: b.class}
	if u := c.own(&b); u != nil {
		waits, held, a.hold.limit = &u.slots, &u.held, b.limit.Name
	}
	if waits.premature(b.now, a.Retry) && !g.aways.due(&b) {
		return false
	}
	a.hold.counts = a.Retry > 0 && int(*held) < waits.from(b.now+1)
	if a.hold.counts {
		*held++
		// Who has its share, or all of its limit, may not take the places that newcomers
		// would leave it.
		a.hold.ahead = a.hold.limit == "" && (!b.fair || acc.room(b.pool.shareOf(b.weight)) > 0) &&
			(b.cap == 0 || c.use(b.limit.Name).live < b.cap)
	}
	if a.hold.ahead {
		b.pool.held.Add(1)
	}
	return true
}

// EndHold says that a request is held no more; it is asked for a last time after it.
func (g *Gate) EndHold(a *Ask) {
	h := &a.hold
	if h.ahead {
		h.pool.held.Add(-1)
	}
	if !h.counts {
		return
	}
	c := g.clients.lock(a.Client, g.since(a.At))
	defer c.mu.Unlock()
	held := &c.account(h.pool, h.class).held[a.Level]
	if h.limit != "" {
		held = &c.use(h.limit).held
	}
	*held = max(0, *held-1) // it may have been forgotten meanwhile
}
