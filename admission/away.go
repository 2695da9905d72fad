package admission

import "time"

// away is until when a client is to stay away from a pool, by a server's own word.
type away struct {
	pool  *pool
	until time.Duration
	// asked: one of its requests entered since then.
	asked bool
}

// asksFirst is for how long after that one of its requests alone asks: by then a log entry
// tells whether the server wants none yet. It is as long as the word is taken for sooner
// than it was meant, so that who comes when the server said waits for nobody.
const asksFirst = 150 * time.Millisecond

// mostAway bounds the pools that a client is told to stay away from at a time.
const mostAway = 16

// TurnAway keeps a client out of a pool for so long from then on: a server there has told
// it alone to stay away, as providers do that limit each key. Its requests go to the next
// pool of their chain, or are refused (ReasonServerLimit). Envoy would send them on too,
// after an attempt in vain, but beside the next pool's limits. After that time one of them
// enters first. Clients that share one place of the table, for which it had no room, are
// not kept out.
func (g *Gate) TurnAway(of Client, pool string, wait time.Duration, at time.Time) {
	p := g.settings.Load().pools[pool]
	if p == nil || wait <= 0 {
		return
	}
	now := g.since(at)
	c := g.clients.lock(of, now)
	defer c.mu.Unlock()
	if !c.shared {
		c.turnAway(p, now, now+wait)
	}
}

func (c *client) turnAway(p *pool, now, until time.Duration) {
	kept := c.aways[:0]
	for _, a := range c.aways {
		switch {
		case a.pool == p:
			until = max(until, a.until)
		case a.until+asksFirst > now:
			kept = append(kept, a)
		}
	}
	if c.aways = kept; len(kept) < mostAway {
		c.aways = append(kept, away{pool: p, until: until})
	}
}

// awayFrom is until when the client is to stay away from a pool, the past if it is not to.
func (c *client) awayFrom(p *pool) time.Duration {
	a := c.toldBy(p)
	switch {
	case a == nil:
		return 0
	case a.asked:
		return a.until + asksFirst
	}
	return a.until
}

// asks notes that a request of the client enters a pool.
func (c *client) asks(p *pool, now time.Duration) {
	if a := c.toldBy(p); a != nil && now < a.until+asksFirst {
		a.asked = true
	}
}

func (c *client) toldBy(p *pool) *away {
	for i := range c.aways {
		if a := &c.aways[i]; a.pool == p {
			return a
		}
	}
	return nil
}
