package admission

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// How long a claim is believed without a sign of life; see the leases of package
// accesslog, which are the same.
const (
	unconfirmedLease = 2 * time.Second
	lease            = 25 * time.Second
	nodeGrace        = 12 * time.Second
	deadGrace        = 500 * time.Millisecond
	// remembered is how long a claim is known whose lease is over: a sign of life
	// brings it back, and its end still settles its tokens.
	remembered = 25 * time.Second
)

// claim is one admitted request.
type claim struct {
	id, node      string
	key           Client
	credential    Client
	client        *client
	route         *routeState
	pool          *pool
	limit         string      // that counts it, see rule.counts; "" none
	reserved      reservation // of that
	ticket        Ticket
	seen          time.Duration // until when it is known to have run
	until         time.Duration
	blindUntil    time.Duration // the end of its lease where nobody tells of requests
	began, ends   time.Duration // ends: not before, see ends; 0 is unknown
	input, output fleet.Tokens
	answers       fleet.Tokens // at least 1
	form          form         // of the answer; formUnread: input and output stand for a body that nobody read
	attempt       int
	// over is the attempt whose end was told last, and after for how long its answer told
	// the caller to stay away, 0 if it did not.
	over      int
	after     time.Duration
	level     fleet.BurstLevel
	class     fleet.RequestClass
	confirmed bool // a log entry told of it
	reached   bool // one told of an attempt on a server of its pool
	// lapsed: its lease is over, nothing counts it, and it is forgotten at until.
	lapsed bool
}

const claimShards = 64

// claims is the table of claims by decision id.
type claims struct {
	seed   maphash.Seed
	max    int64
	n      atomic.Int64 // places taken
	lapsed atomic.Int64 // of them
	turn   int          // of sweep
	shards [claimShards]claimShard
}

type claimShard struct {
	mu   sync.Mutex
	byID map[string]int32 // index into list
	list []claim          // id "" is a free place
	free []int32
	_    [64]byte // shards do not share a cache line
}

func (t *claims) init(most int) {
	t.seed, t.max = maphash.MakeSeed(), int64(most)
	for i := range t.shards {
		t.shards[i].byID = map[string]int32{}
	}
}

func (t *claims) shardOf(id string) *claimShard {
	return &t.shards[maphash.String(t.seed, id)%claimShards]
}

// add enters a claim; false when the table is full. An older claim of the same
// id, if there is one, is returned, and the caller must release it.
func (t *claims) add(c *claim) (older claim, ok bool) {
	s := t.shardOf(c.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, there := s.byID[c.id]; there {
		if older, s.list[at] = s.list[at], *c; older.lapsed {
			t.lapsed.Add(-1)
		}
		return older, true
	}
	if t.n.Add(1) > t.max {
		t.n.Add(-1)
		return claim{}, false
	}
	at := int32(len(s.list))
	if n := len(s.free); n > 0 {
		at, s.free = s.free[n-1], s.free[:n-1]
		s.list[at] = *c
	} else {
		s.list = append(s.list, *c)
	}
	s.byID[c.id] = at
	return claim{}, true
}

// take removes a claim and returns it, or false when there is none.
func (t *claims) take(id string) (claim, bool) {
	s := t.shardOf(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	at, there := s.byID[id]
	if !there {
		return claim{}, false
	}
	c := s.list[at]
	t.drop(s, at)
	return c, true
}

// asker is whose request a claim is of.
func (t *claims) asker(id string) (of Asker, ok bool) {
	s := t.shardOf(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	at, there := s.byID[id]
	if !there {
		return of, false
	}
	return Asker{s.list[at].key, s.list[at].credential}, true
}

// confirmed reports whether a log entry told of a claim.
func (t *claims) confirmed(id string) bool {
	s := t.shardOf(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	at, there := s.byID[id]
	return there && s.list[at].confirmed
}

// drop frees a place of a locked shard.
func (t *claims) drop(s *claimShard, at int32) {
	if s.list[at].lapsed {
		t.lapsed.Add(-1)
	}
	delete(s.byID, s.list[at].id)
	s.list[at] = claim{}
	s.free = append(s.free, at)
	t.n.Add(-1)
}

// renew lets a claim last until then, for a sign of life of an attempt, and makes it
// one of the pool where that runs, if that is known. Signs of earlier attempts than the
// one known, and of claims that have ended, are late. A lapsed claim is returned
// instead; one that was another pool's as it was.
func (t *claims) renew(o *fleet.Outcome, at *pool, until, now time.Duration) (c claim, lapsed, moved bool) {
	s := t.shardOf(o.ID)
	s.mu.Lock()
	defer s.mu.Unlock()
	i, there := s.byID[o.ID]
	if !there || o.Attempt < s.list[i].attempt {
		return claim{}, false, false
	}
	k := &s.list[i]
	if k.lapsed {
		return *k, true, false
	}
	k.confirm(o, until, now)
	if at != nil && at != k.pool {
		c, moved = *k, true
		k.pool, k.began, k.reached = at, now, true
	}
	return c, false, moved
}

// confirm takes in a sign of life.
func (c *claim) confirm(o *fleet.Outcome, until, now time.Duration) {
	c.confirmed, c.node, c.attempt, c.until = true, o.Node, o.Attempt, until
	c.reached = c.reached || o.Endpoint.Pool == c.pool.name
	if o.Kind == fleet.AttemptEnded {
		c.over, c.after = o.Attempt, o.RetryAfter
	}
	c.sight(now)
}

// sight adds the time up to now to what is known of how long requests of its level
// run.
func (c *claim) sight(now time.Duration) {
	if now > c.seen {
		c.pool.levels[c.level].toldFor.Add(int64(now - c.seen))
		c.seen = now
	}
}

// revive puts a claim in the place of its lapsed self, for a sign of life, or returns
// false when it has ended meanwhile or was revived already.
func (t *claims) revive(c *claim, o *fleet.Outcome, until, now time.Duration) bool {
	s := t.shardOf(c.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	at, there := s.byID[c.id]
	if !there || !s.list[at].lapsed {
		return false
	}
	s.list[at] = *c
	s.list[at].lapsed = false
	s.list[at].confirm(o, until, now)
	t.lapsed.Add(-1)
	return true
}

// extend gives claims that no log entry told of the leases that count where none
// may come.
func (t *claims) extend() {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		for at := range s.list {
			if c := &s.list[at]; !c.confirmed && !c.lapsed {
				c.until = max(c.until, c.blindUntil)
			}
		}
		s.mu.Unlock()
	}
}

// recount lets claims count for the limits of another configuration.
func (t *claims) recount(s *settings) {
	for i := range t.shards {
		shard := &t.shards[i]
		shard.mu.Lock()
		for at := range shard.list {
			if k := &shard.list[at]; k.id != "" {
				k.recount(s.route(k.route.name).use(k.key))
			}
		}
		shard.mu.Unlock()
	}
}

// recount lets a claim of a locked shard count for another limit.
func (c *claim) recount(limit string) {
	from := c.limit
	if from == limit {
		return
	}
	before := c.reserved
	c.limit, c.reserved.since = limit, 0 // the other limit has none of its tokens
	if c.lapsed {
		return
	}
	c.client.mu.Lock()
	defer c.client.mu.Unlock()
	if from != "" {
		u := c.client.use(from)
		u.live--
		u.ends.drop(c.ends)
		u.reserved.drop(&before)
	}
	if limit != "" {
		u := c.client.use(limit)
		u.live++
		u.ends.add(c.ends)
	}
}

// shorten lets the claims of an Envoy end at that time at the latest.
func (t *claims) shorten(node string, until func(*claim) time.Duration) {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		for at := range s.list {
			if c := &s.list[at]; c.id != "" && c.node == node && !c.lapsed {
				c.until = min(c.until, until(c))
			}
		}
		s.mu.Unlock()
	}
}

// sweepAll is how many claims are looked through at each step; of more, each
// step looks through a sixteenth.
const sweepAll = 4096

// expired lets claims lapse whose leases are over and appends them to out. Of
// many claims it finds some only at one of the next 15 steps.
func (t *claims) expired(now time.Duration, out []claim) []claim {
	first, n := 0, claimShards
	if t.n.Load() > sweepAll {
		n = claimShards / 16
		first = t.turn % 16 * n
		t.turn++
	}
	for i := first; i < first+n; i++ {
		s := &t.shards[i]
		s.mu.Lock()
		for at := range s.list {
			c := &s.list[at]
			if c.id == "" || c.until > now {
				continue
			}
			if !c.lapsed {
				out = append(out, *c)
			}
			t.lapse(s, int32(at), now)
		}
		s.mu.Unlock()
	}
	return out
}

// lapse makes a claim of a locked shard a lapsed one, or forgets it: when it was
// one, and when the table is half full, so that claims find room.
func (t *claims) lapse(s *claimShard, at int32, now time.Duration) {
	c := &s.list[at]
	if c.lapsed || 2*t.n.Load() > t.max {
		t.drop(s, at)
		return
	}
	c.lapsed, c.until, c.client = true, now+remembered, nil
	t.lapsed.Add(1)
}
