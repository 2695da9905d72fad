package admission

import (
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// away is that a server told a client to stay away from a pool: when, until when, and how
// long that answer took.
type away struct {
	pool              *pool
	told, until, took time.Duration
	// asked is when one of its requests entered to ask whether the server takes it, 0 if
	// none did.
	asked time.Duration
	// lets is whether one may ask already: an answer of the client ended since it was told,
	// and the server may limit how many it has.
	lets bool
}

const (
	// asksFirst is for how long after that time one of its requests alone asks, from when it
	// enters and beside twice what the refusal before took: by then a log entry tells whether
	// the server wants none yet.
	asksFirst = 150 * time.Millisecond
	// asksOnce is for how long after that time it is waited for one that asks.
	asksOnce = time.Minute
	// longestRefusal bounds how long the next refusal is waited for.
	longestRefusal = 5 * time.Second
)

// mostAway bounds the pools that a client is told to stay away from at a time.
const mostAway = 16

// TurnAway keeps a client out of a pool for so long from then on: a server there has told
// it alone to stay away, as providers do that limit each key, by an answer that took so
// long. Its requests go to the next pool of their chain, or are refused
// (ReasonServerLimit). Envoy would send them on too, after an attempt in vain, but beside
// the next pool's limits. After that time one of them enters first, and one before it for
// each of its answers that ends. Clients that share one place of the table, for which it
// had no room, are not kept out.
func (g *Gate) TurnAway(of Client, pool string, wait, took time.Duration, at time.Time) {
	p := g.settings.Load().pools[pool]
	if p == nil || wait <= 0 {
		return
	}
	now := g.since(at)
	c := g.clients.lock(of, now)
	defer c.mu.Unlock()
	if !c.shared {
		c.turnAway(p, now, now+wait, min(max(0, took), longestRefusal))
	}
}

func (c *client) turnAway(p *pool, now, until, took time.Duration) {
	kept := c.aways[:0]
	for _, a := range c.aways {
		switch {
		case a.pool == p:
			until = max(until, a.until)
		case a.until+asksOnce > now:
			kept = append(kept, a)
		}
	}
	if c.aways = kept; len(kept) < mostAway {
		c.aways = append(kept, away{pool: p, told: now, until: until, took: took})
	}
}

// awayFrom is until when the client is to stay away from a pool, the past if it is not to.
func (c *client) awayFrom(p *pool) time.Duration {
	a := c.toldBy(p)
	switch {
	case a == nil || a.lets:
		return 0
	case a.asked > 0:
		return max(a.until, a.asked+asksFirst+2*a.took)
	}
	return a.until
}

// asks notes that a request of the client enters a pool.
func (c *client) asks(p *pool, now time.Duration) {
	if a := c.toldBy(p); a != nil && (a.lets || a.asked < a.until && now < a.until+asksOnce) {
		a.asked, a.lets = max(now, 1), false
	}
}

// welcome takes that a request was answered well. If it asked for a client that was to stay
// away, that need not any more; else one may ask.
func (k *claim) welcome(o *fleet.Outcome, now time.Duration) {
	c := k.client
	if k.lapsed {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.toldBy(k.pool)
	switch {
	case a == nil:
	case o.Endpoint.Pool != "" && o.Endpoint.Pool != k.pool.name: // another pool answered
		a.unask(k.began, now)
	case a.asked > 0 && k.began >= a.asked:
		c.aways = slices.DeleteFunc(c.aways, func(a away) bool { return a.pool == k.pool })
	case now < a.until && now >= a.told+asksFirst: // of two logs one may be late
		a.lets = true
	}
}

// unask takes that a request did not ask after all: it went away, was refused otherwise, or
// failed.
func (k *claim) unask(now time.Duration) {
	c := k.client
	if k.lapsed {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if a := c.toldBy(k.pool); a != nil {
		a.unask(k.began, now)
	}
}

// unask lets another ask, if the request that entered then was the one that does.
func (a *away) unask(began, now time.Duration) {
	if a.asked > 0 && a.asked == max(began, 1) {
		a.asked, a.lets = 0, now < a.until
	}
}

// toldBy is what a server of a pool told the client, nil if nothing.
func (c *client) toldBy(p *pool) *away {
	for i := range c.aways {
		if a := &c.aways[i]; a.pool == p {
			return a
		}
	}
	return nil
}
