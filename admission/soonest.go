package admission

import "time"

// A request that no pool of its chain has room for waits for one of them. Were it always
// the same one, all that the chain sends away would wait at the pace of that pool, and
// the places of the others would be whose who comes by chance: 216 workers of one key on
// 8 places and 64 behind them, of 2 s each, would be told 44 s on average by the slots of
// the 8, and nearly all not to come back. On one pool of 72 it is 4 s, and so it is here.

// Wait is how long a request would be told to wait for a place of its Ask's pool, but for
// the jitter, if it were refused now; no slot is taken. Past what the caller waits it is
// what a slot would need. It is 0 where others of its client wait for that pool and it may
// be one of them that comes too early, and less where one of their slots is due: then it
// is the time since, so that a request is taken for the one that is longest awaited. Of
// the pools of a chain a request that is refused waits for the one with the least.
func (g *Gate) Wait(a *Ask) time.Duration {
	b := g.bid(a)
	c := g.meet(&b)
	defer c.mu.Unlock()
	acc := c.find(b.pool, b.class)
	if acc == nil {
		acc = &account{pool: b.pool, class: b.class}
	}
	if b.away > b.now {
		t := acc.turn(&b, b.pool.accounts.Load())
		return g.aways.wait(&b, &t)
	}
	s := &acc.slots
	if first := a.Retry == 0 && b.counts; !first && s.n() > 0 && b.now >= s.first() {
		return s.first() - b.now - 1
	}
	if s.premature(b.now, a.Retry) {
		return 0
	}
	return acc.wait(&b)
}

// wait is how long lineUp would let a request wait that has no slot.
func (a *account) wait(b *bid) time.Duration {
	accounts := b.pool.accounts.Load()
	if !a.active {
		accounts++ // it would be
	}
	t := a.turn(b, accounts)
	if a.slots.inLine(&t) {
		last := time.Duration(t.tail.at.Load())
		at := max(t.now+retryFloor, t.first, last) + t.line.apartAt(last-t.now)
		if at <= t.now+t.patience || a.live == 0 {
			return at - b.now
		}
	}
	return t.now + t.queued - b.now
}
