package admission

import (
	"math"
	"time"
)

// limiterWait is the shortest wait where no limiter counts, or one that is late this
// once has a replica refuse by its part; the longest is twice as long, within which
// package ratelimit finds one that answers again.
const limiterWait = time.Second

// refuse finds what a refused client is told. The client is locked.
func (g *Gate) refuse(c *client, b *bid, why Reason, st Standing) Refusal {
	a := c.account(b.pool, b.class)
	r := Refusal{InFlight: a.live, Concurrency: c.advised(a, b)}
	if b.limit == nil {
		g.lineUp(&r, c, a, b, why)
		return r
	}
	switch why {
	case ReasonConcurrency:
		u := c.use(b.limit.Name)
		r.InFlight, r.Concurrency = u.live, b.cap
		u.lineUp(&r, b, c.gaveUp(b))
	case ReasonRequests:
		c.nextWindow(&r, b, &c.use(b.limit.Name).requests, st.Requests, 1)
	case ReasonTokens:
		c.awaitTokens(&r, b, st.Tokens)
	case ReasonLimiterDown:
		r.ShouldRetry = limiterWait <= b.patience(retryMax)
		r.RetryAfter = whole(limiterWait + b.jitter(limiterWait, limiterWait, r.ShouldRetry))
	case ReasonTooMany:
		r.RetryAfter = whole(max(st.Tokens.Reset, time.Second))
	default:
		g.lineUp(&r, c, a, b, why)
	}
	return r
}

// advised is how many requests the client should have in flight.
func (c *client) advised(a *account, b *bid) int {
	n := atLeastOne(b.pool.shareOf(b.weight))
	if n >= math.MaxInt32 || !b.fair {
		n = int64(max(1, a.live))
	}
	if b.cap > 0 {
		n = min(n, int64(b.cap))
	}
	return int(n)
}

// lineUp gives a slot of the level's line, or of the account's own, and where its
// credential is kept out one behind the others of that.
func (g *Gate) lineUp(r *Refusal, c *client, a *account, b *bid, why Reason) {
	out := b.away > b.now
	if !out {
		a.stir()
	}
	t := a.turn(b, b.pool.accounts.Load())
	if t.last = c.gaveUp(b); out {
		t.early = b.early && b.kept
		g.aways.lineUp(r, b, &t)
		return
	}
	t.early = b.early && !b.mine && !b.kept
	slot, ok := a.giveNext(&t, b, why)
	if !ok && b.due && b.ask.Retry > 0 {
		t.course = a.course(t.now, t.level, t.each, b.pool.shareOf(b.weight))
		slot, ok = a.slots.insist(&t)
	}
	if !ok {
		slot, ok = a.slots.give(&t)
	}
	wait := slot - b.now
	if r.ShouldRetry = ok; !ok {
		wait = b.hopeless(wait, max(retryCap, t.now-b.now), time.Duration(t.line.spacing.Load()))
	}
	r.RetryAfter = whole(wait)
}

// turn is what the slot of a request goes by, of a pool that so many accounts use.
func (a *account) turn(b *bid, accounts int64) turn {
	l := &b.pool.levels[b.ask.Level]
	from, patience := b.span()
	alone, share := accounts <= 1, b.pool.shareOf(b.weight)
	each := a.each(b.ask.Level, share, alone)
	return turn{
		asked: b.now, now: from, patience: patience, seed: b.ask.Seed, level: b.ask.Level,
		line: &l.line, tail: b.pool.tailOf(b.ask.Level), most: a.places(share, alone),
		alone: alone, drawn: !alone, live: a.live, below: a.room(share) > 0,
		each: each, queued: a.queued(from, b.ask.Level, each, share), first: a.firstEnd(share),
		takes: a.takes(l), quick: a.quick(l), cold: time.Duration(l.cold.Load()),
		share: min(share, float64(b.pool.whole.Load())),
	}
}

// hopeless is what a request is told that has no slot, and would have had one after so
// long, for who comes back all the same: past what others wait, which is most, later than
// those, as far as that is no more than retryMax.
func (b *bid) hopeless(wait, most, spacing time.Duration) time.Duration {
	if wait > most {
		return most + spread(b.ask.Seed, retryMax-most)
	}
	return wait + spread(b.ask.Seed, min(wait/4, spacing))
}

// giveNext gives a request that came when it was told to and found no place a
// slot at which the next that becomes free is kept for it, once in a row, if the
// account has less than a share so small that it can't wait for its others.
func (a *account) giveNext(t *turn, b *bid, why Reason) (slot time.Duration, ok bool) {
	if !b.due || t.cold > 0 {
		return 0, false
	}
	share, at := b.pool.shareOf(b.weight), max(t.now+time.Duration(b.pool.lead.Load()), t.first)
	a.again = !a.again && why == ReasonBusy && share < turnsBelow && a.room(share) > 0 && at <= t.now+t.patience
	if !a.again {
		return 0, false
	}
	a.due += 1000
	a.pool.due.Add(1000)
	return a.slots.keep(t, at, true, retryFloor), true
}

// lineUp gives a slot behind the client's other requests of the limit, as far away as
// callers wait: where a client has what it may have, no fallback serves it better.
func (u *use) lineUp(r *Refusal, b *bid, last bool) {
	from := b.opens()
	t := u.turn(b, b.cap)
	t.now, t.patience, t.last, t.queued = from, b.patience(retryMax)-(from-b.now), last, u.queued(from, b)
	if b.due && b.ask.Retry > 0 {
		t.course = u.course(from, b)
	}
	var slot time.Duration
	slot, r.ShouldRetry = u.slot(b, &t)
	wait := slot - b.now
	if !r.ShouldRetry {
		wait = b.hopeless(wait, retryMax, t.each)
	}
	r.RetryAfter = whole(wait)
}

// turn is what the slot of a request behind so many places of its limit goes by.
func (u *use) turn(b *bid, places int) turn {
	return turn{
		asked: b.now, level: b.ask.Level, seed: b.ask.Seed, early: b.early && b.mine,
		each: span(float64(b.takes) / float64(places)), takes: b.takes, share: float64(places),
		cold: time.Duration(b.pool.levels[b.ask.Level].cold.Load()),
	}
}

// slot gives a slot of the limit's queue.
func (u *use) slot(b *bid, t *turn) (slot time.Duration, ok bool) {
	switch {
	case t.early:
		return u.slots.giveLast(t, t.each)
	case b.due && b.ask.Retry > 0:
		if slot, ok = u.slots.insist(t); ok {
			return slot, ok
		}
	}
	return u.slots.queue(t)
}

// nextWindow gives a slot in one of the limit's next windows, at the window's pace. One
// that would so be later than the caller waits is drawn from the time between the begin of
// its window and then, if there is any: the window has room for it.
func (c *client) nextWindow(r *Refusal, b *bid, p *promises, q Quota, cost int64) {
	begins := b.now + max(q.Reset, time.Millisecond)
	again := b.ask.Retry > 0
	early := p.roll(begins, q.Window, again)
	next := *p
	slot, latest := max(b.opens(), p.last), b.now+b.patience(retryMax)
	// All windows begin at once: a tenth of one is there to spread in.
	spacing := time.Duration(float64(q.Window) * min(1, float64(cost)/float64(max(1, q.Limit))))
	most := min(spacing, q.Window/10)
	if !early {
		slot = next.promise(b.opens(), q, cost)
		if opens := max(b.opens(), next.window); slot > latest && opens < latest && next.spares(q, again) {
			slot, most = opens, latest-opens
		}
	}
	wait := slot - b.now
	r.ShouldRetry = slot <= latest
	told := wait + b.jitter(wait, most, r.ShouldRetry)
	// Who isn't to come takes nothing. Nor does who won't, where only one window is within
	// retryMax: of shorter ones, what it leaves unused thins out the slots of those who come.
	if r.ShouldRetry && (q.Window < retryMax || !c.gaveUp(b)) {
		next.last = max(p.last, min(next.last, b.now+told))
		*p = next
	}
	r.RetryAfter = whole(told)
}

// jitter parts requests that are told the same wait, by less than most. Who is to come
// again is told nothing that is later than its caller waits.
func (b *bid) jitter(wait, most time.Duration, again bool) time.Duration {
	left := retryMax - wait
	if again {
		left = b.patience(retryMax) - wait
	}
	return spread(b.ask.Seed, min(most, left))
}

// opens is when there may be slots: from now on, or from when an endpoint of the
// pool wants requests again.
func (b *bid) opens() time.Duration {
	return max(b.now, time.Duration(b.pool.reopens.Load()), b.away)
}

// span is from when there may be slots for the pool's places, and how long after that
// the caller waits for one at most: retryCap, but retryMax where an endpoint said
// itself when it opens.
func (b *bid) span() (from, patience time.Duration) {
	if from = b.opens(); from > b.now {
		return from, b.patience(retryMax) - (from - b.now)
	}
	return b.now, b.patience(retryCap)
}

// patience is how long the caller waits at most.
func (b *bid) patience(most time.Duration) time.Duration {
	if b.ask.Timeout > 0 {
		return min(b.ask.Timeout, most)
	}
	return most
}

// whole is a wait in whole milliseconds, rounded up, 1 ms … 60 s.
func whole(wait time.Duration) time.Duration {
	up := (wait + time.Millisecond - 1).Truncate(time.Millisecond)
	return min(max(up, time.Millisecond), retryMax)
}
