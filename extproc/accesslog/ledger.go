package accesslog

import (
	"cmp"
	"container/heap"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// How long things are believed. Envoy sends a heartbeat of every running
// request each 10 s (access_log_flush_interval) and its log batches are at most
// 25 ms late.
const (
	// ProvisionalLease is how long an attempt counts that was decided but that
	// no log entry confirmed. Short, so that entries lost on their way don't make
	// endpoints look full. While some Envoy's log doesn't arrive it is the least; see
	// Ledger.SetBlind.
	ProvisionalLease = 2 * time.Second
	// Lease is how long a confirmed attempt counts after its last sign of life:
	// two heartbeats and a half.
	Lease = 25 * time.Second
	// NodeGrace is how long the attempts of an Envoy whose log streams have all
	// ended still count at least: longer than the heartbeat's interval, so that an
	// Envoy that only lost its connection renews them in time.
	NodeGrace = 12 * time.Second
	// DeadGrace is how long the attempts of an Envoy count that is known to be
	// dead: the end of its streams may overtake what it logged last.
	DeadGrace = 500 * time.Millisecond
	// memory is how long an ended attempt is remembered, so that its start or
	// a heartbeat of it that comes late is known to be late. Less in a ledger that is
	// full of records.
	memory = 5 * time.Second
	// MaxAttempts bounds the records of attempts, running or remembered. When it is
	// reached, what ended longest ago is forgotten for what is new, so that no number
	// of ends keeps running attempts from being counted. Where as many run, Reserve
	// refuses whoever has a limit, and what the log tells of further attempts is not
	// counted (see Ledger.Dropped).
	MaxAttempts = 1 << 18
)

// requestOver is the attempt number that stands for "all of them".
const requestOver = 1 << 30

const shards = 64

// InFlight is the number of attempts on one endpoint.
type InFlight struct {
	Endpoint fleet.EndpointKey
	Attempts int
}

// Ledger counts the attempts in flight per endpoint: provisionally from the
// decision on, confirmed, corrected and ended by outcomes from the access log.
// An attempt is known by its request and its number; a request by the decision
// id, or by Envoy node and request id where ext_proc was away.
//
// All methods may be called from several goroutines; InFlight takes no lock.
type Ledger struct {
	slots   *slots
	now     func() time.Time
	seed    maphash.Seed
	shards  [shards]shard
	records atomic.Int64
	dropped atomic.Uint64
	max     int64
	blind   atomic.Bool
}

type shard struct {
	mu   sync.Mutex
	byID map[requestKey]*record
	// leases are the records whose attempts run.
	leases leases
	// over are the records that ended, in the order of their ends.
	over queue
	// free are records to use again, maxFree at most.
	free []*record
}

// maxFree bounds the records of a shard that are kept for use.
const maxFree = 64

// requestKey is {"", decision id} or {node, request id}.
type requestKey struct{ node, id string }

// record is one request: its running attempt, or the last one that ended.
type record struct {
	key       requestKey
	node      string // that logged it; "" until the first log entry
	attempt   int    // the attempt running or last ended
	running   bool
	confirmed bool
	endpoint  fleet.EndpointKey
	slot      uint32
	until     time.Time // running: end of lease; else: when to forget it
	// blindUntil is the end of an unconfirmed attempt's lease while the ledger is
	// blind.
	blindUntil time.Time
	queued     bool // in shard.over
	leased     int  // place in shard.leases, from 1 on; 0: not there
}

// leases is a heap of running records, the one whose lease ends first on top
// (heap.Interface).
type leases []*record

func (h leases) Len() int           { return len(h) }
func (h leases) Less(i, j int) bool { return h[i].until.Before(h[j].until) }

func (h leases) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].leased, h[j].leased = i+1, j+1
}

func (h *leases) Push(r any) {
	*h = append(*h, r.(*record))
	r.(*record).leased = len(*h)
}

func (h *leases) Pop() any {
	last := len(*h) - 1
	r := (*h)[last]
	(*h)[last], *h = nil, (*h)[:last]
	r.leased = 0
	return r
}

// queue is a first-in first-out list of records to forget.
type queue struct {
	items []dueRecord
	head  int
}

// dueRecord is a record and when to look whether it can be forgotten.
type dueRecord struct {
	*record
	due time.Time
}

func (q *queue) push(r *record) { q.items = append(q.items, dueRecord{r, r.until}) }

// due reports whether there is a first record that is due.
func (q *queue) due(now time.Time) bool {
	return q.head < len(q.items) && !now.Before(q.items[q.head].due)
}

// pop takes the first record, due or not; nil if there is none.
func (q *queue) pop() *record {
	if q.head == len(q.items) {
		return nil
	}
	r := q.items[q.head].record
	q.items[q.head] = dueRecord{}
	if q.head++; 2*q.head >= len(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return r
}

// NewLedger returns an empty ledger that reads the time from now.
func NewLedger(now func() time.Time) *Ledger {
	l := &Ledger{slots: newSlots(), now: now, seed: maphash.MakeSeed(), max: MaxAttempts}
	for i := range l.shards {
		l.shards[i].byID = map[requestKey]*record{}
	}
	return l
}

// Slot returns the counter index of an endpoint, the same for as long as it is
// asked for at least every ten minutes. Beyond MaxSlots endpoints it is NoSlot.
func (l *Ledger) Slot(key fleet.EndpointKey) uint32 { return l.slots.of(key, l.now()) }

// InFlight returns the attempts in flight on a slot; never negative.
func (l *Ledger) InFlight(slot uint32) int32 {
	if slot >= MaxSlots {
		return 0
	}
	return l.slots.live[slot].Load()
}

// Total is the number of attempts in flight on all endpoints that have a slot.
func (l *Ledger) Total() int {
	total := 0
	for _, e := range l.slots.snapshot() {
		total += e.Attempts
	}
	return total
}

// Snapshot lists the endpoints with attempts in flight, ordered by pool and
// address.
func (l *Ledger) Snapshot() []InFlight {
	out := l.slots.snapshot()
	slices.SortFunc(out, func(a, b InFlight) int {
		return cmp.Or(cmp.Compare(a.Endpoint.Pool, b.Endpoint.Pool), a.Endpoint.Address.Compare(b.Endpoint.Address))
	})
	return out
}

// Dropped counts the times that an attempt was not counted because as many ran as
// the ledger can hold: reservations, of which those with a limit were refused, and
// starts and heartbeats in the log.
func (l *Ledger) Dropped() uint64 { return l.dropped.Load() }

// Reserve counts the first attempt of a decision on the endpoint that was picked,
// unless that would be more than limit attempts in flight on it: then it counts
// nothing and returns false. Looking and counting are one step, so any number of
// callers at a time get exactly limit reservations. Limit 0 is no limit, a
// negative one is always reached.
//
// A reservation counts until the log confirms and ends it, Cancel undoes it, or
// its lease is over: ProvisionalLease, and while the ledger is blind (SetBlind)
// what the request is expected to take, at least ProvisionalLease and at most
// Lease. A request that the log told of before is counted as the log says, and an
// empty id counts nothing; both return true. Nor does a ledger that is full of
// running attempts count anything: then only limit 0 returns true, since what isn't
// counted can't be held to a limit.
func (l *Ledger) Reserve(id string, pick fleet.EndpointKey, limit int32, expected time.Duration, at time.Time) bool {
	if limit < 0 {
		return false
	}
	if id == "" {
		return true
	}
	key := keyOf(id, "")
	s := l.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[key] != nil {
		return true // the log was faster
	}
	slot := NoSlot
	if named(pick) {
		var room bool
		if slot, room = l.slots.enterBelow(pick, limit, at); !room {
			return false
		}
	}
	r := l.add(s, key)
	if r == nil {
		l.slots.leave(slot)
		l.dropped.Add(1)
		return limit == 0
	}
	r.attempt, r.endpoint, r.slot, r.running = 1, pick, slot, true
	until := at.Add(ProvisionalLease)
	r.blindUntil = at.Add(min(max(expected, ProvisionalLease), Lease))
	if l.blind.Load() {
		until = r.blindUntil
	}
	s.lease(r, until)
	return true
}

// Cancel undoes a reservation that nothing came of. One that the log has
// confirmed stays: its attempt is real.
func (l *Ledger) Cancel(id string) {
	key := keyOf(id, "")
	s := l.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.byID[key]; r.reserved() {
		l.remove(s, r)
	}
}

// reserved reports whether there is a record, and nothing but a reservation in it.
func (r *record) reserved() bool { return r != nil && r.running && !r.confirmed }

// remove ends the attempt of a record and forgets it.
func (l *Ledger) remove(s *shard, r *record) {
	l.stop(s, r)
	l.forget(s, r)
}

// Hold counts one more attempt on an endpoint until Release: the place of one that ended
// so that the endpoint should get no other before that is taken into account. It returns
// the endpoint's slot, for Release.
func (l *Ledger) Hold(key fleet.EndpointKey) (slot uint32) { return l.slots.enter(key, l.now()) }

// Release ends what n calls of Hold counted.
func (l *Ledger) Release(slot uint32, n int32) {
	for range n {
		l.slots.leave(slot)
	}
}

// SetBlind says whether the access log of some Envoy doesn't arrive. Then nothing
// will confirm its reservations, which can't be told from others before, and
// ProvisionalLease would let endpoints look empty while they work: reservations,
// those that stand included, count for the time that their request is expected to
// take. When the log is back they keep it; heartbeats and ends correct it.
func (l *Ledger) SetBlind(blind bool) {
	if l.blind.Swap(blind) || !blind {
		return
	}
	l.each(func(s *shard, r *record) {
		if !r.confirmed {
			s.lease(r, r.blindUntil)
		}
	})
}

// Apply enters an outcome. Outcomes without an id are ignored.
func (l *Ledger) Apply(o fleet.Outcome) {
	if o.ID == "" {
		return
	}
	at := o.At
	if at.IsZero() {
		at = l.now()
	}
	key := keyOf(o.ID, o.Node)
	s := l.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byID[key]
	known := r != nil
	switch {
	case r.reserved() && neverRan(&o):
		l.remove(s, r)
		return
	case !known && (neverRan(&o) || o.Kind == fleet.Heartbeat && !named(o.Endpoint)):
		return
	case !known:
		if r = l.add(s, key); r == nil {
			l.missed(o.Kind)
			return
		}
	}
	r.node = o.Node
	switch o.Kind {
	case fleet.AttemptStarted:
		l.started(s, r, max(o.Attempt, 1), o.Endpoint, at)
	case fleet.Heartbeat:
		l.beat(s, r, o.Attempt, o.Endpoint, at)
	case fleet.AttemptEnded:
		l.ended(s, r, max(o.Attempt, 1), at)
	case fleet.RequestEnded:
		l.ended(s, r, requestOver, at)
	}
	if !known && !r.running && r.attempt == 0 {
		l.forget(s, r)
	}
}

// neverRan reports whether a request ended before it had an attempt: Envoy or
// ext_proc refused it, or there was no server. The log tells no more of it, so its
// end need not be remembered, and callers can have any number of such a second. A
// server that can't be named is not counted either.
func neverRan(o *fleet.Outcome) bool {
	return o.Kind == fleet.RequestEnded && o.Attempt <= 1 && !named(o.Endpoint)
}

// missed counts an entry that there was no record for, if its attempt runs.
func (l *Ledger) missed(kind fleet.OutcomeKind) {
	if kind == fleet.AttemptStarted || kind == fleet.Heartbeat {
		l.dropped.Add(1)
	}
}

// started begins attempt n, unless it or a later one is known already.
func (l *Ledger) started(s *shard, r *record, n int, on fleet.EndpointKey, at time.Time) {
	if n < r.attempt || (n == r.attempt && !r.running) {
		return // late
	}
	l.run(s, r, n, on, at)
}

// beat renews the running attempt. A heartbeat of an attempt nobody knows, as
// after a restart of this process, begins it.
func (l *Ledger) beat(s *shard, r *record, n int, on fleet.EndpointKey, at time.Time) {
	switch {
	case r.running && n < r.attempt:
		s.lease(r, at.Add(Lease)) // the request lives; its newer attempt is known better
	case r.running || n > r.attempt:
		l.run(s, r, max(n, 1), on, at)
	}
}

// ended closes attempt n and all before it.
func (l *Ledger) ended(s *shard, r *record, n int, at time.Time) {
	if n < r.attempt {
		return
	}
	l.stop(s, r)
	r.attempt = n
	r.until = at.Add(memory)
	if !r.queued {
		r.queued = true
		s.over.push(r)
	}
}

// run makes attempt n the running, confirmed one, on the endpoint really used.
func (l *Ledger) run(s *shard, r *record, n int, on fleet.EndpointKey, at time.Time) {
	if !r.running || (named(on) && on != r.endpoint) {
		l.stop(s, r)
		l.start(r, n, on, at)
	}
	r.attempt = n
	r.confirmed = true
	s.lease(r, at.Add(Lease))
}

func (l *Ledger) start(r *record, n int, on fleet.EndpointKey, at time.Time) {
	r.attempt, r.endpoint, r.running = n, on, true
	r.slot = NoSlot
	if named(on) {
		r.slot = l.slots.enter(on, at)
	}
}

// stop ends the running attempt, if one runs.
func (l *Ledger) stop(s *shard, r *record) {
	if r.running {
		l.slots.leave(r.slot)
		r.running = false
	}
	if r.leased > 0 {
		heap.Remove(&s.leases, r.leased-1)
	}
}

// NodeGone says that the last log stream of an Envoy has ended. It may go on
// serving unseen: its attempts end after NodeGrace, and after the time that they
// were expected to take, unless it shows them again.
func (l *Ledger) NodeGone(node string) {
	at := l.now().Add(NodeGrace)
	l.shorten(node, func(r *record) time.Time {
		if at.Before(r.blindUntil) {
			return r.blindUntil
		}
		return at
	})
}

// NodeDead says that an Envoy is gone altogether: its attempts end after
// DeadGrace. Should it only have been cut off, its heartbeats bring them back.
func (l *Ledger) NodeDead(node string) {
	at := l.now().Add(DeadGrace)
	l.shorten(node, func(*record) time.Time { return at })
}

// shorten lets the running attempts of an Envoy end at that time at the latest.
func (l *Ledger) shorten(node string, until func(*record) time.Time) {
	l.each(func(s *shard, r *record) {
		if limit := until(r); r.node == node && r.until.After(limit) {
			s.lease(r, limit)
		}
	})
}

// each calls do for every running attempt.
func (l *Ledger) each(do func(*shard, *record)) {
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		for _, r := range s.byID {
			if r.running {
				do(s, r)
			}
		}
		s.mu.Unlock()
	}
}

// lease lets a running attempt count until then.
func (s *shard) lease(r *record, until time.Time) {
	r.until = until
	if r.leased > 0 {
		heap.Fix(&s.leases, r.leased-1)
		return
	}
	heap.Push(&s.leases, r)
}

// Expire ends the leases that ran out and forgets what needs no remembering,
// as of now. It returns how many running attempts it ended. It is cheap to call
// often: it looks at what is due and at nothing else.
func (l *Ledger) Expire(now time.Time) int {
	ended := 0
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		ended += l.endLeases(s, now)
		l.forgetOver(s, now)
		s.mu.Unlock()
	}
	return ended
}

// endLeases ends the leases of a shard that ran out.
func (l *Ledger) endLeases(s *shard, now time.Time) (ended int) {
	for len(s.leases) > 0 && !now.Before(s.leases[0].until) {
		l.remove(s, s.leases[0])
		ended++
	}
	return ended
}

// forgetOver forgets the records of a shard that ended long enough ago.
func (l *Ledger) forgetOver(s *shard, now time.Time) {
	for s.over.due(now) {
		r := s.over.pop()
		r.queued = false
		switch {
		case !s.ended(r):
		case now.Before(r.until): // a later end
			r.queued = true
			s.over.push(r)
		default:
			l.forget(s, r)
		}
	}
}

// ended reports whether a record of the queue is of a request that ended: it may
// have a newer attempt, or was forgotten.
func (s *shard) ended(r *record) bool { return !r.running && s.byID[r.key] == r }

// giveWay forgets the record of a shard that ended first, due or not; false if none
// has ended.
func (l *Ledger) giveWay(s *shard) bool {
	for r := s.over.pop(); r != nil; r = s.over.pop() {
		r.queued = false
		if s.ended(r) {
			l.forget(s, r)
			return true
		}
	}
	return false
}

// add makes a record, in a full ledger in place of one that ended. It returns nil
// where all records of the shard are of running attempts.
func (l *Ledger) add(s *shard, key requestKey) *record {
	for l.records.Add(1) > l.max {
		l.records.Add(-1)
		if !l.giveWay(s) {
			return nil
		}
	}
	r := s.unused()
	r.key = key
	s.byID[key] = r
	return r
}

func (s *shard) unused() *record {
	last := len(s.free) - 1
	if last < 0 {
		return new(record)
	}
	r := s.free[last]
	s.free[last], s.free = nil, s.free[:last]
	return r
}

// forget drops a record whose attempt doesn't run. The caller uses it no more.
func (l *Ledger) forget(s *shard, r *record) {
	delete(s.byID, r.key)
	l.records.Add(-1)
	if !r.queued && len(s.free) < maxFree {
		*r = record{}
		s.free = append(s.free, r)
	}
}

func (l *Ledger) shardOf(key requestKey) *shard {
	return &l.shards[maphash.String(l.seed, key.id)%shards]
}

func named(e fleet.EndpointKey) bool { return e.Address.IsValid() }

// keyOf tells decision ids, which are unique everywhere, from request ids,
// which clients may repeat and which only count within the Envoy they came to.
func keyOf(id, node string) requestKey {
	if Decided(id) {
		return requestKey{id: id}
	}
	return requestKey{node: node, id: id}
}

// Milliseconds since 1970 have 12 digits from March 1973 on and 15 at the end of
// the year 9999; fewer would be telephone numbers too.
const (
	leastMillis = len("100000000000")
	mostMillis  = len("253402300799999")
)

// Decided reports whether an outcome's id has the shape of a decision id,
// 1718924567123-007-0001: whether ext_proc answered for the request. For the others
// nobody reserved or admitted anything; their id is Envoy's own request id, or ""
// where the log told none, and a caller that chose one of that shape is told apart.
func Decided(id string) bool {
	at := len(id) - len("-007-0001")
	if at < leastMillis || at > mostMillis || id[at] != '-' || id[at+4] != '-' {
		return false
	}
	for i := range len(id) {
		if i != at && i != at+4 && (id[i] < '0' || id[i] > '9') {
			return false
		}
	}
	return true
}
