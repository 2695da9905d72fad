package admission

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// away is that a server told a credential to stay away from a pool: when, until when, and
// how long that answer took.
type away struct {
	pool              *pool
	told, until, took time.Duration
	// asked is when one of its requests entered to ask whether the server takes it, 0 if
	// none did.
	asked time.Duration
	// lets is how many may ask already: so many answers to it ended since it was told, and
	// the server may limit how many it has.
	lets int
	// slots are of requests that it keeps out, apart from those that wait for places.
	slots slots
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

const (
	// mostAway bounds the pools that a credential is told to stay away from at a time.
	mostAway = 16
	// mostTold bounds the credentials that are told apart, which who makes up some could fill.
	mostTold = 4096
)

// aways are the credentials that servers told to stay away from pools. Providers limit
// each for itself, whatever tells clients apart.
type aways struct {
	n  atomic.Int64 // credentials: as long as there is none nobody waits for the lock
	mu sync.Mutex
	by map[Client][]away
}

// TurnAway keeps requests with a credential out of a pool for so long from then on: a
// server there has told it alone to stay away, as providers do that limit each key, by an
// answer that took so long. They go to the next pool of their chain, or are refused
// (ReasonServerLimit). Envoy would send them on too, after an attempt in vain, but beside
// the next pool's limits. After that time one of them enters first, and one before it for
// each of its answers that ends. Of 4,096 credentials it is known at a time.
func (g *Gate) TurnAway(of Client, pool string, wait, took time.Duration, at time.Time) {
	p := g.settings.Load().pools[pool]
	if p == nil || wait <= 0 {
		return
	}
	now, took := g.since(at), max(0, took)
	g.aways.tell(of, now-took, now, away{pool: p, told: now, until: now + wait, took: min(took, longestRefusal)})
}

// tell notes what a server told a request with a credential that began then.
func (t *aways) tell(of Client, began, now time.Duration, word away) {
	t.mu.Lock()
	defer t.mu.Unlock()
	list, known := t.by[of]
	if !known && len(t.by) >= mostTold {
		t.forget()
	}
	list = slices.DeleteFunc(list, func(a away) bool {
		if a.pool != word.pool {
			return a.over(now)
		}
		if began <= a.told { // it is no newer
			word.told, word.until = a.told, max(word.until, a.until)
		}
		word.slots = a.slots
		return true
	})
	if len(list) < mostAway {
		list = append(list, word)
	}
	if t.by == nil {
		t.by = map[Client][]away{}
	}
	t.by[of] = list
	t.n.Store(int64(len(t.by)))
}

// forget makes room for a credential: of some the one may come again that may soonest.
func (t *aways) forget() {
	var soonest Client
	least := time.Duration(math.MaxInt64)
	n := 0
	for of, list := range t.by { // in random order
		last := time.Duration(0)
		for i := range list {
			last = max(last, list[i].last())
		}
		if last < least {
			soonest, least = of, last
		}
		if n++; n == evictOf {
			break
		}
	}
	delete(t.by, soonest)
}

// over reports whether nothing follows from it any more.
func (a *away) over(now time.Duration) bool { return a.until+asksOnce <= now && a.slots.n() == 0 }

// step forgets what is over.
func (t *aways) step(now time.Duration) {
	if t.n.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for of, list := range t.by {
		for i := range list {
			list[i].slots.lapse(now, func(fleet.BurstLevel, bool) {})
		}
		if list = slices.DeleteFunc(list, func(a away) bool { return a.over(now) }); len(list) > 0 {
			t.by[of] = list
		} else {
			delete(t.by, of)
		}
	}
	t.n.Store(int64(len(t.by)))
}

// from is until when a credential is to stay away from a pool, the past if it is not to.
func (t *aways) from(of Client, p *pool) (until time.Duration) {
	t.with(of, p, func(a *away) { until = a.last() })
	return until
}

// with calls what for what a server of a pool told a credential, if one did.
func (t *aways) with(of Client, p *pool, what func(*away)) {
	if t.n.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	list := t.by[of]
	for i := range list {
		if list[i].pool == p {
			what(&list[i])
			return
		}
	}
}

// kept is for how long a credential is kept out of a pool yet, and how many of its requests
// wait for that.
type kept struct {
	left    time.Duration
	waiting int
}

// list is what is known of the credentials that are kept out of pools, or wait.
func (t *aways) list(now time.Duration) map[*pool]map[Client]kept {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[*pool]map[Client]kept{}
	for of, list := range t.by {
		for i := range list {
			a := &list[i]
			k := kept{max(0, a.last()-now), a.slots.expected(now)}
			if k == (kept{}) {
				continue
			}
			if out[a.pool] == nil {
				out[a.pool] = map[Client]kept{}
			}
			out[a.pool][of] = k
		}
	}
	return out
}

// last is until when the credential is to stay away, the past if it is not to.
func (a *away) last() time.Duration {
	switch {
	case a.lets > 0:
		return 0
	case a.asked > 0:
		return max(a.until, a.asked+asksFirst+2*a.took)
	}
	return a.until
}

// asks notes that a request with a credential enters a pool.
func (t *aways) asks(of Client, p *pool, now time.Duration) {
	t.with(of, p, func(a *away) {
		if a.lets > 0 || a.asked < a.until && now < a.until+asksOnce {
			a.asked, a.lets = max(now, 1), max(0, a.lets-1)
		}
	})
}

// welcome takes that a request was answered well. If it asked for a credential that was to
// stay away, that need not any more; else one may ask.
func (t *aways) welcome(k *claim, o *fleet.Outcome, now time.Duration) {
	t.with(k.credential, k.pool, func(a *away) {
		switch {
		case o.Endpoint.Pool != "" && o.Endpoint.Pool != k.pool.name: // another pool answered
			a.unask(k.began, now)
		case a.asked > 0 && k.began >= a.asked:
			a.until, a.asked, a.lets = -asksOnce, 0, 0 // over
		case now < a.until && now >= a.told+asksFirst: // of two logs one may be late
			a.lets++
		}
	})
}

// arrive notes that a request came, and reports whether it is one that waited until its
// credential was wanted again, and not one that waits for a place of others, as far as that
// can be told.
func (t *aways) arrive(b *bid, others *slots) (one bool) {
	if b.counts && b.ask.Retry == 0 {
		return false
	}
	t.with(b.ask.credential(), b.pool, func(a *away) {
		s := &a.slots
		if s.n() == 0 || b.now < s.first() && (b.ask.Retry == 0 || others.expects(b.now)) {
			return
		}
		one = true
		b.early, b.due, _, _ = s.arrive(b.now, b.ask.Retry, b.counts)
	})
	return one
}

// due reports whether a request may be one that waited until its credential was wanted
// again.
func (t *aways) due(b *bid) (due bool) {
	t.with(b.ask.credential(), b.pool, func(a *away) { due = a.slots.n() > 0 && b.now >= a.slots.first() })
	return due
}

// served takes the slot of one away that came before it, and was let in.
func (t *aways) served(b *bid) {
	t.with(b.ask.credential(), b.pool, func(a *away) {
		if a.slots.n() > 0 { // another client with the credential may have taken it
			a.slots.use()
		}
	})
}

// queued is how long the queue of those that a credential is kept out with is, at the pace
// of the client's share.
func (a *away) queued(each time.Duration) time.Duration {
	wait := span(float64(a.slots.n()+1) * float64(each) / queueShare)
	if a.slots.n() > 0 && a.asked < a.until { // one asks first
		wait += asksFirst + 2*a.took
	}
	return wait
}

// wait is how long lineUp would let a request wait.
func (t *aways) wait(b *bid, turn *turn) time.Duration {
	wait := turn.now - b.now
	t.with(b.ask.credential(), b.pool, func(a *away) { wait += a.queued(turn.each) })
	return wait
}

// lineUp gives a slot behind the others of its credential to a request that is kept out: it
// waits for the server's word, not for a place, and is in nobody's way meanwhile.
func (t *aways) lineUp(r *Refusal, b *bid, turn *turn) {
	slot := turn.now + retryFloor // if it was forgotten just now
	r.ShouldRetry = turn.patience >= retryFloor
	t.with(b.ask.credential(), b.pool, func(a *away) {
		turn.queued, turn.first = a.queued(turn.each), 0
		if turn.early {
			slot, r.ShouldRetry = a.slots.giveLast(turn, ownPace*turn.each)
		} else {
			slot, r.ShouldRetry = a.slots.queue(turn)
		}
	})
	wait := slot - b.now
	if !r.ShouldRetry {
		wait = b.hopeless(wait, max(retryCap, turn.now-b.now), turn.each)
	}
	r.RetryAfter = whole(wait)
}

// unask takes that a request did not ask after all: it went away, was refused otherwise, or
// failed.
func (t *aways) unask(of Client, p *pool, began, now time.Duration) {
	t.with(of, p, func(a *away) { a.unask(began, now) })
}

// unask lets another ask, if the request that entered then was the one that does.
func (a *away) unask(began, now time.Duration) {
	if a.asked > 0 && a.asked == max(began, 1) {
		if a.asked = 0; now < a.until {
			a.lets++
		}
	}
}
