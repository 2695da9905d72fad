package admission

import (
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// maxClients bounds the clients that are told apart. One that has nothing in
	// flight makes room for a new one; when all have requests in flight, further
	// clients share sharedPlaces places by hash, and each place counts as one client. A
	// step looks at all: of a core it takes a hundredth for each thousand that have
	// requests in flight.
	maxClients   = 16_384
	sharedPlaces = 64
	clientShards = 64
	// evictOf is among how many the one longest not heard of is looked for.
	evictOf = 8
	// idleAfter is how long a client is remembered that has nothing in flight
	// and is not expected back.
	idleAfter = time.Minute
)

// Weights of the classes where there is not enough: a batch client still gets a
// fifth of a pool beside one interactive client, so that its work goes on, and
// waiting for people is worth four times as much as waiting for a job. The ratio
// is a choice; limits.clients.weight corrects it per client.
const (
	interactiveWeight = 4
	batchWeight       = 1
)

func classWeight(c fleet.RequestClass) float64 {
	if c == fleet.ClassBatch {
		return batchWeight
	}
	return interactiveWeight
}

// clients is the bounded table of clients.
type clients struct {
	seed maphash.Seed
	max  int64
	n    atomic.Int64
	// sharing counts how often a client was looked for that shares a place.
	sharing atomic.Uint64
	shards  [clientShards]clientShard
	shared  [sharedPlaces]struct {
		mu sync.Mutex
		client
	}
}

type clientShard struct {
	mu    sync.Mutex
	byKey map[Client]*client
	_     [64]byte // shards do not share a cache line
}

// client is what is known of one client. Its lock guards it.
type client struct {
	mu   *sync.Mutex
	key  Client // nobody's where shared
	seen time.Duration
	live int // requests in flight, of whatever limit and pool
	// returned is when a request came last that said that it was one tried before, if
	// returns. lapsed is how many more slots lapsed than such requests came, of late, as
	// of lapsedAt.
	returned, lapsedAt time.Duration
	returns            bool
	// tries is the most that a request said of its tries before it, of late, as of triedAt.
	tries    int
	triedAt  time.Duration
	lapsed   float64
	uses     []use
	accounts []account
	// shared: it stands for clients that the table had no room for.
	shared bool
}

// use is what a client has of one limit.
type use struct {
	limit string
	live  int
	ends  ends
	// slots are for its concurrency and for tokens that requests give back, and held is how
	// many of those requests came back and are held. requests and tokens are the slots in the
	// next windows of its rates.
	slots            slots
	held             int32
	requests, tokens promises
	reserved         reserved
	spent            spent
}

// account is what a client has of one pool in one class. A client that asks in
// both classes has two accounts, each with the class's weight.
type account struct {
	pool   *pool
	class  fleet.RequestClass
	weight float64
	live   int
	ends   ends
	mean   float64 // of live, over demandOver
	pace   pace
	slots  slots
	came   time.Duration // when a request came last
	// held are requests, by level, that came back and are held.
	held   [fleet.BurstLevels]int32
	active bool  // it is among pool.accounts
	gone   bool  // the last step found that nothing is known of it
	again  bool  // it came in its slot in vain, and the next place is kept for it
	due    int64 // what it has of pool.due
	soon   int64 // of pool.soon
	// counted is until when the account's share ends as many requests as were refused and
	// counted as newcomers.
	counted time.Duration
}

// stir notes that the account has requests in flight or slots outstanding.
func (a *account) stir() {
	if !a.active {
		a.active = true
		a.pool.accounts.Add(1)
	}
}

// turnsBelow is a share of which the fraction counts: of more, a place more or
// less is a fifth of it at most.
const turnsBelow = 4

// room is how many more requests the account may have in flight by its share. Of
// a small share the place of which it has a fraction is its own by turns: while it
// had less than its share of late.
func (a *account) room(share float64) int64 {
	if share >= math.MaxInt32 {
		return math.MaxInt32
	}
	n := max(0, int64(share)-int64(a.live))
	if share < turnsBelow && float64(a.live) < share && a.mean < share {
		n = max(n, 1)
	}
	return n
}

// newcomer reports whether a request that came for the first time, and was refused, is
// one of those whom ends of the pool are left for, and counts it. Of an account no more
// are than its share of what the pool ends, within freshOver: the others came before their
// time, or could not enter, since its share has no place for them. One counts for idleAfter
// at most: by then the pool may have been divided anew.
func (a *account) newcomer(b *bid) bool {
	if a.counted > b.now+freshOver {
		return false
	}
	each := float64(b.pool.takes.Load()) / max(a.entitled(b), 1e-3)
	a.counted = max(a.counted, b.now) + time.Duration(min(each, float64(idleAfter)))
	return true
}

// entitled is how many places of the pool are the account's: an even part while the pool
// is not divided, and all where clients have no shares.
func (a *account) entitled(b *bid) float64 {
	share, whole := b.pool.shareOf(b.weight), float64(b.pool.whole.Load())
	switch {
	case !b.fair:
		return whole
	case math.IsInf(share, 1):
		return whole / float64(max(1, b.pool.accounts.Load()))
	}
	return share
}

// used notes that a slot of the account is outstanding no more.
func (a *account) used() {
	n := min(a.due, 1000)
	a.due -= n
	a.pool.due.Add(-n)
}

func (t *clients) init(most int) {
	t.seed, t.max = maphash.MakeSeed(), int64(most)
	for i := range t.shards {
		t.shards[i].byKey = map[Client]*client{}
	}
	for i := range t.shared {
		t.shared[i].client.mu, t.shared[i].client.shared = &t.shared[i].mu, true
	}
}

// lock returns the locked client of a key.
func (t *clients) lock(key Client, now time.Duration) *client {
	hash := maphash.Bytes(t.seed, key[:])
	s := &t.shards[hash%clientShards]
	s.mu.Lock()
	c := s.byKey[key]
	if c == nil {
		c = t.add(s, key, now)
	}
	if c == nil {
		s.mu.Unlock()
		t.sharing.Add(1)
		c = &t.shared[hash/clientShards%sharedPlaces].client
		c.mu.Lock()
	}
	c.seen = now
	return c
}

// add makes room for a client in a locked shard; nil when there is none.
func (t *clients) add(s *clientShard, key Client, now time.Duration) *client {
	if t.n.Add(1) > t.max {
		t.n.Add(-1)
		if !s.evict(now) {
			return nil
		}
	}
	c := &client{mu: &s.mu, key: key}
	s.byKey[key] = c
	return c
}

// evict forgets one of the clients that have nothing in flight, of some it looks
// at the one longest not heard of, one that is expected back only if all are,
// and reports whether there was one. The shard is locked.
func (s *clientShard) evict(now time.Duration) bool {
	var oldest *client
	var key Client
	seen, waits := 0, false
	for k, c := range s.byKey { // in random order
		if c.live > 0 {
			continue
		}
		if w := c.waits(now); oldest == nil || waits && !w || w == waits && c.seen < oldest.seen {
			oldest, key, waits = c, k, w
		}
		if seen++; seen == evictOf {
			break
		}
	}
	if oldest != nil {
		delete(s.byKey, key)
	}
	return oldest != nil
}

// waits reports whether any of the client's requests was told to come back, and did not
// yet.
func (c *client) waits(now time.Duration) bool {
	for i := range c.accounts {
		if c.accounts[i].slots.expects(now) {
			return true
		}
	}
	for i := range c.uses {
		if c.uses[i].slots.expects(now) {
			return true
		}
	}
	return false
}

// each visits all clients, locked, and forgets those that nothing is known of
// any more.
func (t *clients) each(now time.Duration, visit func(*client)) {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		for key, c := range s.byKey {
			visit(c)
			if c.live == 0 && now-c.seen > idleAfter && !c.waits(now) {
				delete(s.byKey, key)
				t.n.Add(-1)
			}
		}
		s.mu.Unlock()
	}
	for i := range t.shared {
		c := &t.shared[i].client
		c.mu.Lock()
		visit(c)
		c.mu.Unlock()
	}
}

// use returns what the client has of a limit.
func (c *client) use(limit string) *use {
	for i := range c.uses {
		if c.uses[i].limit == limit {
			return &c.uses[i]
		}
	}
	c.uses = append(c.uses, use{limit: limit})
	return &c.uses[len(c.uses)-1]
}

// find is the client's account of a pool, nil if it has none yet.
func (c *client) find(p *pool, class fleet.RequestClass) *account {
	for i := range c.accounts {
		if a := &c.accounts[i]; a.pool == p && a.class == class {
			return a
		}
	}
	return nil
}

// account returns what the client has of a pool.
func (c *client) account(p *pool, class fleet.RequestClass) *account {
	if a := c.find(p, class); a != nil {
		return a
	}
	c.accounts = append(c.accounts, account{pool: p, class: class})
	return &c.accounts[len(c.accounts)-1]
}

// places is how many slots of a line the account may have: one more than its
// share of the pool, and one in all while it has its share.
func (a *account) places(share float64, alone bool) int {
	switch {
	case alone:
		return freeSlots
	case a.room(share) == 0:
		return 1
	}
	return int(min(freeSlots, math.Ceil(share)+1))
}

// meet locks the client of a request, and finds whether what the request says of its
// tries can be gone by: an SDK that tries each request only once says of all that it is
// the first, also where its program waits as told and asks again. So somebody of the
// client must have returned within tellsFor, and not many more slots have lapsed than
// requests returned.
func (g *Gate) meet(b *bid) *client {
	c := g.clients.lock(b.ask.Client, b.now)
	c.tried(b)
	b.takes = c.takes(b)
	b.away = g.aways.from(b.ask.credential(), b.pool)
	b.counts = b.ask.Counts && (b.ask.Retry > 0 || c.returns && b.now <= c.returned+tellsFor && c.unused(b.now) < someLapsed)
	return c
}

// sdkRetries is how often official SDKs try a request again, unless they are told to
// do otherwise (openai-go's and anthropic-sdk-go's MaxRetries).
const sdkRetries = 2

// tried notes how often a request says it was tried before.
func (c *client) tried(b *bid) {
	if b.ask.Retry >= c.tries || b.now > c.triedAt+tellsFor {
		c.tries, c.triedAt = b.ask.Retry, b.now
	}
}

// gaveUp reports whether a request that is refused will not be tried again: official
// SDKs do so twice, and none of the client was seen to do so more often.
func (c *client) gaveUp(b *bid) bool { return b.ask.Retry == sdkRetries && c.tries <= sdkRetries }

const (
	// tellsFor is how long after a return the client's first tries are known for such.
	tellsFor = time.Minute
	// someLapsed is how many more slots must have lapsed than requests returned before
	// the client isn't gone by: operations that give up leave one now and then.
	someLapsed = 3
)

// unused is how many more slots lapsed than requests returned, of late.
func (c *client) unused(now time.Duration) float64 {
	if c.lapsed == 0 {
		return 0
	}
	return c.lapsed * decay(now-c.lapsedAt, tellsFor)
}

// lapse counts a slot that lapsed.
func (c *client) lapse(now time.Duration) { c.lapsed, c.lapsedAt = c.unused(now)+1, now }

// back counts a return, which takes one that lapsed back: an operation that gives up
// leaves a slot behind, and has returned twice.
func (c *client) back(now time.Duration) { c.lapsed, c.lapsedAt = max(0, c.unused(now)-1), now }
