package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// maxAsking bounds the questions that wait for Redis at once: a breaker lets
	// pass all that come before the first has failed. At 130 µs a question, which
	// a loopback Redis takes under load, 256 are two million a second.
	maxAsking = 256
	// maxSettling is how many settlements wait for the worker; what finds no room
	// is dropped and counted: its tokens come back when the window ends.
	maxSettling = 4096
	settleBatch = 64
	// settleLimit bounds one batch.
	settleLimit = time.Second

	// maxQueued is how many keys wait to be told to the server, each once; what finds no
	// room is told with its client's next question, or when it admits alone again.
	maxQueued = 4096
	// maxTelling bounds the statements under way. One of them takes the server as long as a
	// question; at 30 ms each 64 are 2,000 a second.
	maxTelling = 64
	// tellLimit bounds one statement: nobody waits for it.
	tellLimit = 2 * time.Second

	// The breaker opens after tripAfter failures in a row, or when half of at
	// least tripSample questions of the last tripWindow failed. The window rolls:
	// gobreaker ignores what was begun in a window that is over, and with a fixed
	// one all that a frozen server made late could be.
	tripAfter  = 3
	tripSample = 20
	tripWindow = 10 * time.Second
	// openFor is the shortest time between opening and a probe. Run decides when
	// it probes: after firstRetry, then half as often each time down to lastRetry,
	// each ± 25 %, so that replicas don't come back in step. Whatever happened, a
	// Redis that answers again is used within 2 s.
	openFor    = 100 * time.Millisecond
	firstRetry = 200 * time.Millisecond
	lastRetry  = time.Second
	// awayAfter is how long a server is not asked before it counts as away for longer.
	awayAfter = 2 * time.Second

	// processes is how many ledgers beside a count one shard may have. While a fleet is
	// updated two processes of a shard may run, and with one ledger each would forget
	// what the other one's holds. They meet in one of 16 cases; then what is late or
	// stated meanwhile may be counted more than once.
	processes = 16

	defaultDeadline = 5 * time.Millisecond
)

// Options of a [Redis].
type Options struct {
	// Redis says where the server is and what to do without it.
	Redis fleet.Redis
	// Shard, 0 … Redis.Replicas−1, says which part of a limit is this replica's.
	Shard int
	// Log receives a line when the server stops answering, when the reason is
	// another, and when it answers again, but not more than one absence in 10 s;
	// nil: nobody does.
	Log *slog.Logger
}

// Redis counts in a Redis or Valkey server that several replicas share.
//
// Each reservation is one round trip, bounded by the deadline of the config. When
// the server does not answer, a circuit breaker soon spares requests the wait,
// and until it answers again the config's onError decides:
//
//   - local: each replica admits its part of a limit, amount/replicas and one more
//     for the first amount%replicas shards, so that the parts add up to the limit.
//   - open: everything is admitted and nothing told.
//   - closed: nothing is admitted.
//
// In the window in which the server died, what this replica admitted before
// counts against its part, and a limit that the server last said was used up
// stays so. Where requests were spread evenly the replicas together then admit no
// more than the limit; where one replica admitted all, the others' parts come on
// top in that one window. What a replica admitted alone it tells the server at once,
// if that answers within half a second, though it may be later than the deadline, else
// with its next question of the same window; and by what it hears then it admits
// nothing more alone once the limit is used up. So a replica to which the server is
// always late admits beside the limit what comes to it within some two round trips,
// and at most its part. A question that was late may be counted by the server all the
// same: the next one has that taken back, but for a request that others have been told
// of meanwhile, which then stands for one that this replica admits alone. Settlements
// of what the server admitted are never sent late.
//
// A server that lost counts, by a restart or a failover to a replica that lagged,
// is told by each question what was seen used before, so that what remains goes
// on from the last value seen less one. Remaining values strictly decrease among
// requests that the server admitted in a window, and among those this replica
// admitted alone, but not across the two.
//
// It works from Redis 6.2 and on any Valkey, also as a cluster, with a
// maxmemory-policy of noeviction: a count that is evicted is room made. A user of its
// own needs, for keys fairlead:limit:*, the commands get, set, time, eval, evalsha and
// script|load, and select for a database other than 0. There is one key for each
// client and limit, of some 150 bytes, and one for each replica that asks about
// them, of some 250, or up to 16 where it begins anew within a window; they expire with their windows.
//
// A replica asks about 65,536 clients, each counted once for every limit that it is
// subject to, so keys are bounded too. Where it has no room for another, it asks about one
// of 32 counts of the limit, by the client's hash, which all replicas use for such clients;
// one count admits no more and tells no value twice, whoever shares it. A client that
// some replicas have room for and others don't is counted in two: it may be admitted twice
// its limit in a window, no more, and be told a value by each.
//
// Methods may be called at once from many goroutines.
type Redis struct {
	redis   fleet.Redis
	shard   int64
	owner   int64 // of ledgers: shard × processes + which of them, by chance
	log     *slog.Logger
	breaker *gobreaker.TwoStepCircuitBreaker[struct{}]
	link    atomic.Pointer[link] // nil: the server is not asked
	lost    atomic.Int64         // when the breaker opened that was closed, in ns since own.base; 0: never
	tripped chan struct{}        // has room for one: the breaker opened
	asking  chan struct{}
	settles chan settlement
	tells   chan key    // each at most once: its account knows
	reached atomic.Bool // the server answers, be it late: it can be told

	own  *Embedded // what this replica admitted, whoever counted
	seen *table    // what the server said was used, and accounts with it

	// ahead is how far the server's clock was when it last answered, in ns. By it
	// this replica's windows are the server's while that is away.
	ahead     atomic.Int64
	lastError atomic.Pointer[error]
	counts    struct {
		calls, errors, timeouts, busy, local, clamps, settled, dropped, connects, failures, told, untold, unheard atomic.Uint64
	}
}

var _ admission.Limiter = (*Redis)(nil)

// NewRedis returns a limiter that counts alone until [Redis.Run] has reached the
// server.
func NewRedis(o Options) *Redis {
	m := &Redis{
		redis:   o.Redis,
		log:     o.Log,
		tripped: make(chan struct{}, 1),
		asking:  make(chan struct{}, maxAsking),
		settles: make(chan settlement, maxSettling),
		tells:   make(chan key, maxQueued),
		own:     NewEmbedded(),
		seen:    newTable(maxClients),
	}
	m.redis.Replicas = max(m.redis.Replicas, 1)
	m.shard = int64(min(max(o.Shard, 0), m.redis.Replicas-1))
	m.owner = m.shard*processes + rand.Int64N(processes)
	if m.redis.Deadline <= 0 {
		m.redis.Deadline = defaultDeadline
	}
	if m.redis.OnError == 0 {
		m.redis.OnError = fleet.OnErrorLocal
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.seen.accounts = true
	m.breaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Interval:     tripWindow,
		BucketPeriod: tripWindow / 10,
		Timeout:      openFor,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return c.ConsecutiveFailures >= tripAfter || c.Requests >= tripSample && 2*c.TotalFailures >= c.Requests
		},
		OnStateChange: func(_ string, _, to gobreaker.State) {
			if to != gobreaker.StateOpen {
				return
			}
			if m.link.Swap(nil) != nil { // else a probe failed
				m.lost.Store(int64(time.Since(m.own.base)))
			}
			select { // it runs under the breaker's lock: wake and be gone
			case m.tripped <- struct{}{}:
			default:
			}
		},
	})
	return m
}

// Counters of a [Redis] since it was made.
type Counters struct {
	Calls    uint64 // reservations put to the server
	Errors   uint64 // of them, answered by an error or not at all
	Timeouts uint64 // of the errors, those that were late
	Busy     uint64 // reservations not put to it, because too many waited
	Local    uint64 // reservations decided without it, for whatever reason
	Clamps   uint64 // times it had lost counts that this replica had seen
	Settled  uint64 // settlements that it took
	Dropped  uint64 // settlements that it did not
	Connects uint64 // times it answered after it had not
	Failures uint64 // times it was lost, or a try to reach it failed
	Told     uint64 // statements of what was admitted alone that it took
	Untold   uint64 // statements that it did not answer; they go again
	Unheard  uint64 // statements that found no room; they go with the next question
	Sharing  uint64 // counts begun for clients who share one, for want of room
	Up       bool   // it is asked
}

// Counters returns the counters.
func (m *Redis) Counters() Counters {
	c := &m.counts
	return Counters{
		Calls: c.calls.Load(), Errors: c.errors.Load(), Timeouts: c.timeouts.Load(), Busy: c.busy.Load(),
		Local: c.local.Load(), Clamps: c.clamps.Load(), Settled: c.settled.Load(), Dropped: c.dropped.Load(),
		Connects: c.connects.Load(), Failures: c.failures.Load(), Up: m.link.Load() != nil,
		Told: c.told.Load(), Untold: c.untold.Load(), Unheard: c.unheard.Load(),
		Sharing: max(m.own.clients.sharing.Load(), m.seen.sharing.Load()), // the tables fill alike
	}
}

// Reserve takes one request and cost tokens. It blocks for the deadline at most.
func (m *Redis) Reserve(k admission.LimitKey, r admission.Rates, cost fleet.Tokens, now time.Time) (a admission.Reservation) {
	b := budgetsOf(r)
	cost = max(cost, 0)
	c := &claim{
		key:  key{limit: k.Limit, client: k.Client, requests: b.requests.window, tokens: b.tokens.window},
		b:    b,
		cost: int64(cost),
		here: m.own.unix(now),
	}
	c.now = c.here + m.ahead.Load()
	switch {
	case !b.requests.limited() && !b.tokens.limited():
		a.Admitted, a.Reason = true, admission.ReasonAdmitted
	case b.tokens.limited() && c.cost > b.tokens.limit:
		m.tooMany(c, &a)
	case !m.ask(c, &a):
		m.alone(c, &k, &a)
	}
	if !a.Ticket.End.IsZero() {
		a.Ticket.Key, a.Ticket.Rates, a.Ticket.Cost, a.Ticket.Local, a.Ticket.Shared = k, r, cost, a.Local, c.shared
	}
	return a
}

// claim is one reservation on its way.
type claim struct {
	key  key
	b    budgets
	cost int64
	// shared: the server counts it, or is told of it, where clients share a count.
	shared bool
	// In ns since the Unix epoch: by this replica's clock, and by the server's as
	// far as it is known.
	here, now int64
}

// ask lets the server decide and says whether it did.
func (m *Redis) ask(c *claim, a *admission.Reservation) bool {
	l := m.link.Load()
	if l == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), m.redis.Deadline)
	defer cancel()
	select {
	case m.asking <- struct{}{}:
	case <-ctx.Done():
		m.counts.busy.Add(1)
		return false
	}
	defer func() { <-m.asking }()
	if m.link.Load() != l { // it went away while this one waited
		return false
	}
	done, err := m.breaker.Allow()
	if err != nil {
		return false
	}
	q := m.question(c)
	ans, err := q.ask(ctx, l.client)
	m.counts.calls.Add(1)
	if err != nil {
		m.counts.errors.Add(1)
		if late(err) {
			m.counts.timeouts.Add(1)
		}
		if m.link.Load() == l { // else it is cut, and that is what the error tells of
			cause := m.explain(err)
			m.lastError.Store(&cause)
		}
		q.end(nil)
		done(err)
		return false
	}
	done(nil)
	m.ahead.Store(ans.now*int64(time.Millisecond) - c.here)
	m.learn(c, &ans)
	q.end(&ans)
	c.fill(a, &ans)
	return true
}

// late says that the error is of an answer that did not come in time.
func late(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}

// explain names the deadline that an answer was later than: such a server may be there
// and answer everybody else.
func (m *Redis) explain(err error) error {
	if !late(err) {
		return err
	}
	return fmt.Errorf("its answer was later than %v (serve.redis.deadline): %w", m.redis.Deadline, err)
}

// question returns what is asked. Its account waits for its end.
func (m *Redis) question(c *claim) *question {
	q := &question{b: c.b, cost: c.cost}
	e, s, _ := m.seen.hold(&c.key, c.now)
	c.shared = e.shared
	q.account = e.account
	q.states = e.account.begin(&c.b)
	q.seen, q.heard = e.counts(&c.b) // after begin: it holds all that answers of closed epochs said
	s.mu.RUnlock()
	q.count, q.ledger = c.key.redisNames(m.owner, c.shared)
	return q
}

// end ends the question in its account, with its answer or, if nil, without one in
// time. What the answer says must have been learned.
func (q *question) end(ans *answer) {
	switch {
	case q.apart:
		q.account.apart(&q.states)
	case ans == nil:
		q.account.late(&q.states)
	case ans.reason == admission.ReasonAdmitted:
		q.account.answered(&q.states, ans.windows(&q.b), 1, q.cost)
	default:
		q.account.answered(&q.states, ans.windows(&q.b), 0, 0)
	}
}

// counts are what the entry's counters hold of their windows, and what was last heard
// of that of the requests.
func (e *entry) counts(b *budgets) (seen counts, heard int64) {
	seen = counts{requests: e.requests.count(b.requests.window), tokens: e.tokens.count(b.tokens.window)}
	last := e.heard.count(b.requests.window)
	if last.end > seen.requests.end {
		seen.requests = count{end: last.end}
	}
	return seen, max(last.used, seen.requests.used)
}

func (c *counter) count(length time.Duration) count {
	if length == 0 {
		return count{}
	}
	n, used := c.last()
	return count{end: end(n, length) / int64(time.Millisecond), used: used}
}

// learn notes what the answer says was used, and what it admitted of this
// replica's part.
func (m *Redis) learn(c *claim, ans *answer) {
	if ans.lost {
		m.counts.clamps.Add(1)
	}
	w := ans.windows(&c.b)
	e, s, _ := m.seen.hold(&c.key, c.now)
	// Requests that only the refused are told of may be nobody's, and taken back.
	if ans.reason == admission.ReasonAdmitted {
		e.requests.raise(w.requests, ans.requests.used)
	}
	if ans.reason != admission.ReasonTokens {
		e.heard.set(w.requests, ans.requests.used)
	}
	e.tokens.set(w.tokens, ans.tokens.used)
	s.mu.RUnlock()
	if ans.reason == admission.ReasonAdmitted {
		m.own.clients.note(c, w)
	}
}

// hear is learn of an answer that was long on its way, to what was asked at c.here and
// answered by the time received: the server's clock said ans.now at some time between.
func (m *Redis) hear(c *claim, ans *answer, received int64) {
	now := ans.now * int64(time.Millisecond)
	m.ahead.Store(min(max(m.ahead.Load(), now-received), now+int64(time.Millisecond)-c.here))
	m.learn(c, ans)
}

// windows are those in which the answer counts.
func (ans *answer) windows(b *budgets) (w windows) {
	if b.requests.limited() {
		w.requests = ans.requests.window(b.requests.window)
	}
	if b.tokens.limited() {
		w.tokens = ans.tokens.window(b.tokens.window)
	}
	return w
}

// note counts an admission that somebody else decided.
func (t *table) note(c *claim, w windows) {
	e, s, _ := t.hold(&c.key, c.now)
	defer s.mu.RUnlock()
	if c.b.requests.limited() {
		e.requests.note(w.requests, 1)
	}
	if c.b.tokens.limited() {
		e.tokens.note(w.tokens, c.cost)
	}
}

func (c count) window(length time.Duration) int64 {
	return windowEnding(c.end*int64(time.Millisecond), length)
}

func (c *claim) fill(a *admission.Reservation, ans *answer) {
	now := ans.now * int64(time.Millisecond)
	a.Reason, a.Admitted = ans.reason, ans.reason == admission.ReasonAdmitted
	if c.b.requests.limited() {
		a.Requests = c.b.requests.quota(ans.requests.window(c.b.requests.window), ans.requests.used, now)
	}
	if c.b.tokens.limited() {
		a.Tokens = c.b.tokens.quota(ans.tokens.window(c.b.tokens.window), ans.tokens.used, now)
		if a.Admitted {
			a.Ticket.End = time.UnixMilli(ans.tokens.end)
		}
	}
}

// tooMany refuses what no window can hold, without asking anybody.
func (m *Redis) tooMany(c *claim, a *admission.Reservation) {
	a.Reason = admission.ReasonTooMany
	requests, tokens := m.seen.used(c)
	at := c.key.at(c.now)
	a.Requests = c.b.requests.quota(at.requests, requests, c.now)
	a.Tokens = c.b.tokens.quota(at.tokens, tokens, c.now)
}

// alone decides without the server.
func (m *Redis) alone(c *claim, k *admission.LimitKey, a *admission.Reservation) {
	m.counts.local.Add(1)
	a.Local = true
	switch m.redis.OnError {
	case fleet.OnErrorClosed:
		a.Reason = admission.ReasonLimiterDown
		return
	case fleet.OnErrorOpen:
		a.Admitted, a.Reason = true, admission.ReasonAdmitted
		if c.b.tokens.limited() {
			a.Ticket.End = time.Unix(0, end(c.key.at(c.now).tokens, c.b.tokens.window))
		}
	default:
		a.Reason = m.usedUp(c)
		if a.Reason != admission.ReasonAdmitted && m.reached.Load() {
			m.queue(&c.key, true) // tokens may have come back
		}
		a.Transient = a.Reason == admission.ReasonAdmitted && !m.away()
		m.own.reserve(a, k, m.part(c.b), c.cost, c.now)
		if a.Reason == admission.ReasonRequests {
			a.Requests.Remaining = 0 // of the limit; of the part there may be some
		}
	}
	if a.Admitted {
		m.owe(c)
	}
}

// away says that the server has not been asked for longer than it takes to find one
// that answers again after some late answers.
func (m *Redis) away() bool {
	lost := m.lost.Load()
	return m.link.Load() == nil && (lost == 0 || time.Since(m.own.base)-time.Duration(lost) >= awayAfter)
}

// owe has the server told of what was admitted alone.
func (m *Redis) owe(c *claim) {
	e, s, _ := m.seen.hold(&c.key, c.now)
	c.shared = e.shared
	e.account.admit(c.key.at(c.now), 1, c.cost)
	s.mu.RUnlock()
	m.queue(&c.key, false)
}

// untold is what of the claim's windows was admitted alone and the server, as far as
// is known, has not been told.
func (m *Redis) untold(c *claim) (requests, tokens int64) {
	e, s := m.seen.held(&c.key)
	if e == nil {
		return 0, 0
	}
	defer s.mu.RUnlock()
	return e.account.untold(c.key.at(c.now))
}

// part is this replica's part of the budgets.
func (m *Redis) part(b budgets) budgets {
	b.requests.limit = m.share(b.requests.limit)
	b.tokens.limit = m.share(b.tokens.limit)
	return b
}

func (m *Redis) share(limit int64) int64 {
	n := int64(m.redis.Replicas)
	part := limit / n
	if m.shard < limit%n {
		part++
	}
	return part
}

// usedUp says whether of a window that still runs nothing is left, by what the
// server last said and what was admitted alone since.
func (m *Redis) usedUp(c *claim) admission.Reason {
	requests, tokens := m.seen.used(c)
	more, moreTokens := m.untold(c)
	switch {
	case c.b.requests.limited() && requests+more >= c.b.requests.limit:
		return admission.ReasonRequests
	case c.b.tokens.limited() && c.cost > c.b.tokens.limit-tokens-moreTokens:
		return admission.ReasonTokens
	}
	return admission.ReasonAdmitted
}

// used is what the table holds of the windows that count now.
func (t *table) used(c *claim) (requests, tokens int64) {
	e, s := t.held(&c.key)
	if e == nil {
		return 0, 0
	}
	defer s.mu.RUnlock()
	at := c.key.at(c.now)
	_, requests, _ = e.requests.read(at.requests)
	_, heard, _ := e.heard.read(at.requests)
	_, tokens, _ = e.tokens.read(at.tokens)
	return max(requests, heard), tokens
}

// Settle corrects a reservation to what was used, if its window still runs. What
// the server does not take at once is dropped and counted.
func (m *Redis) Settle(t admission.Ticket, used fleet.Tokens) {
	b := budgetsOf(t.Rates)
	delta := int64(max(used, 0) - t.Cost)
	if t.End.IsZero() || !b.tokens.limited() || delta == 0 {
		return
	}
	k := key{limit: t.Key.Limit, client: t.Key.Client, requests: b.requests.window, tokens: b.tokens.window}
	n := windowEnding(t.End.UnixNano(), b.tokens.window)
	m.own.clients.correct(&k, n, delta)
	if t.Local && m.absorb(&k, n, delta) {
		m.queue(&k, false)
		return // the server will be told what was used
	}
	m.seen.correct(&k, n, delta)
	if m.link.Load() == nil {
		m.counts.dropped.Add(1)
		return
	}
	select {
	case m.settles <- settlement{count: string(k.appendName(nil, -1, t.Shared)), end: t.End.UnixMilli(), delta: delta}:
	default:
		m.counts.dropped.Add(1)
	}
}

// absorb corrects what was admitted alone in the window n, if the server was not
// told of it or can't be now.
func (m *Redis) absorb(k *key, n, delta int64) bool {
	e, s := m.seen.held(k)
	if e == nil {
		return false
	}
	defer s.mu.RUnlock()
	return e.account.absorb(n, delta, m.link.Load() == nil)
}
