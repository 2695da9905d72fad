package ratelimit

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// withoutLedgers is the script of replicas that keep none: they count in the same
// keys while a fleet is being updated.
//
//go:embed testdata/limit-without-ledgers.lua
var withoutLedgers string

var scriptWithoutLedgers = rueidis.NewLuaScript(withoutLedgers)

// asked is a question on its way, between a replica of the model and the server.
type asked struct {
	*question
	claim *claim
	by    int
	// told is what its answer admits; nil: it is refused, or nobody waits any more.
	told    *told
	answer  *answer // that has not been delivered
	waiting bool
	tells   bool // and asks for nothing
}

// told is one admission by the server: what it says is used, and whether anybody
// was told so.
type told struct {
	used int64
	kept bool
}

// world has a few replicas ask the server about one client, over a net that loses,
// delays, reorders and repeats what it likes. Beside them it counts, plainly, what
// callers were told.
type world struct {
	t        *rapid.T
	client   rueidis.Client
	k        admission.LimitKey
	r        admission.Rates
	replicas []*Redis
	air      []*asked // may still reach the server, or reach it again
	said     []*told  // in the order in which the server decided

	requests, tokens int64 // admitted
	refused          bool  // the server refused something for want of requests
	forgets          bool  // ledgers may be lost
	tickets          []admission.Ticket
}

func (w *world) do(what string, limit int) int { return rapid.IntRange(0, limit-1).Draw(w.t, what) }

// ask has a replica put a question, which is in the air then.
func (w *world) ask(by int) *asked {
	c := claimOf(w.k, w.r, int64(1+w.do("cost", 50)))
	q := &asked{question: w.replicas[by].question(c), claim: c, by: by, waiting: true}
	w.air = append(w.air, q)
	return q
}

// tell has a replica state what it did, by a question that is in the air then.
func (w *world) tell(by int) {
	c := claimTelling(claimOf(w.k, w.r, 0).key, time.Now().UnixNano(), 0)
	w.air = append(w.air, &asked{question: w.replicas[by].question(c), claim: c, by: by, waiting: true, tells: true})
}

// reach has the server execute a question.
func (w *world) reach(q *asked) {
	ans, err := q.ask(w.t.Context(), w.client)
	if err == errClosed { //nolint:errorlint // as it is returned
		if q.waiting {
			w.t.Fatal("a question was refused as closed that its replica waits for")
		}
		return
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.refused = w.refused || ans.reason == admission.ReasonRequests && !q.tells
	if q.tells && ans.reason != admission.ReasonRequests {
		w.t.Fatalf("what asks for nothing was answered %+v", ans)
	}
	if q.waiting && q.answer == nil {
		q.answer = &ans
		if ans.reason == admission.ReasonAdmitted {
			q.told = &told{used: ans.requests.used}
			w.said = append(w.said, q.told)
		}
	}
}

// hear delivers the answer in time.
func (w *world) hear(q *asked) {
	q.waiting = false
	w.replicas[q.by].learn(q.claim, q.answer)
	q.end(q.answer)
	if q.told != nil {
		q.told.kept = true
		w.admit(q, admission.Ticket{End: time.UnixMilli(q.answer.tokens.end)})
	}
}

// lose lets the deadline pass. The replica decides alone, one way or the other.
func (w *world) lose(q *asked, admits bool) {
	q.waiting = false
	q.end(nil)
	if admits {
		w.replicas[q.by].owe(q.claim)
		n := q.claim.key.at(q.claim.now).tokens
		w.admit(q, admission.Ticket{Local: true, End: time.Unix(0, end(n, w.r.Tokens.Window))})
	}
}

func (w *world) admit(q *asked, t admission.Ticket) {
	w.requests++
	w.tokens += q.cost
	t.Key, t.Rates, t.Cost = w.k, w.r, fleet.Tokens(q.cost)
	if w.do("settled later", 2) == 0 {
		t.Key.Limit = strconv.Itoa(q.by) // the model's own mark
		w.tickets = append(w.tickets, t)
	}
}

// settle corrects an admission to what was used.
func (w *world) settle(i int) {
	t := w.tickets[i]
	w.tickets = append(w.tickets[:i], w.tickets[i+1:]...)
	delta := int64(w.do("used", 60)) - int64(t.Cost)
	if delta == 0 {
		return
	}
	w.tokens += delta
	c := claimOf(w.k, w.r, 0)
	by, err := strconv.Atoi(t.Key.Limit)
	if err != nil {
		w.t.Fatal(err)
	}
	if n := windowEnding(t.End.UnixNano(), w.r.Tokens.Window); t.Local {
		e, s := w.replicas[by].seen.held(&c.key)
		s.mu.RUnlock()
		if e.account.absorb(n, delta, w.do("is away", 3) == 0) {
			return
		}
	}
	count, _ := c.key.redisNames(0, false)
	if settle(w.t.Context(), w.client, []settlement{{count: count, end: t.End.UnixMilli(), delta: delta}}) != 1 {
		w.t.Fatal("not settled")
	}
}

// old has a replica without a ledger ask.
func (w *world) old() {
	c := claimOf(w.k, w.r, int64(1+w.do("cost", 50)))
	n := func(v int64) string { return strconv.FormatInt(v, 10) }
	count, _ := c.key.redisNames(0, false)
	args := []string{"reserve", n(c.b.requests.limit), n(c.b.requests.window.Milliseconds()),
		n(c.b.tokens.limit), n(c.b.tokens.window.Milliseconds()), n(c.cost), "0", "0", "0", "0", "0", "0", "0", "0"}
	v, err := scriptWithoutLedgers.Exec(w.t.Context(), w.client, []string{count}, args).AsIntSlice()
	if err != nil {
		w.t.Fatal(err)
	}
	switch v[0] {
	case 0:
		w.said = append(w.said, &told{used: v[2], kept: true})
		w.requests++
		w.tokens += c.cost
	case 1:
		w.refused = true
	}
}

// step does one thing that may happen.
func (w *world) step() {
	if len(w.tickets) > 0 && w.do("settles", 6) == 0 {
		w.settle(w.do("ticket", len(w.tickets)))
		return
	}
	if w.do("another replica", 12) == 0 {
		w.old()
		return
	}
	if w.forgets && w.do("forgets", 8) == 0 {
		c := claimOf(w.k, w.r, 0)
		_, ledger := c.key.redisNames(w.replicas[w.do("ledger", len(w.replicas))].owner, false)
		if err := w.client.Do(w.t.Context(), w.client.B().Del().Key(ledger).Build()).Error(); err != nil {
			w.t.Fatal(err)
		}
		return
	}
	if w.do("tells", 6) == 0 {
		w.tell(w.do("replica", len(w.replicas)))
		return
	}
	if len(w.air) == 0 || w.do("asks", 3) == 0 {
		w.ask(w.do("replica", len(w.replicas)))
		return
	}
	q := w.air[w.do("question", len(w.air))]
	switch {
	case q.waiting && q.answer != nil && w.do("in time", 4) > 0:
		w.hear(q)
	case q.waiting && w.do("late", 3) == 0:
		w.lose(q, !q.tells && w.do("admits", 2) == 0)
	case !q.waiting || q.answer == nil:
		w.reach(q) // the first time, or again
	}
}

// end lets what is in the air come late, and each replica say the last.
func (w *world) end() {
	for _, q := range w.air {
		if q.waiting {
			w.lose(q, !q.tells && w.do("admits", 2) == 0)
		}
	}
	if w.do("before the last word", 2) == 0 {
		w.flood()
	}
	for by := range w.replicas {
		w.lose(w.ask(by), false) // which closes the epoch of what was heard twice
	}
	for by := range w.replicas {
		q := w.ask(by)
		w.reach(q)
		w.hear(q)
	}
	w.air = w.air[:len(w.air)-len(w.replicas)]
	w.flood() // changes nothing more
}

// flood has all that ever was in the air reach the server, in any order.
func (w *world) flood() {
	for _, i := range rapid.Permutation(indices(len(w.air))).Draw(w.t, "order") {
		w.reach(w.air[i])
	}
}

func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// held is what the server counts, and how many of the requests are nobody's.
func (w *world) held() (requests, tokens, spare int64) {
	c := claimOf(w.k, w.r, 0)
	get := func(key string) string {
		v, err := w.client.Do(w.t.Context(), w.client.B().Get().Key(key).Build()).ToString()
		if err != nil && !rueidis.IsRedisNil(err) {
			w.t.Fatal(err)
		}
		return v
	}
	var ends [2]int64
	for _, m := range w.replicas {
		count, ledger := c.key.redisNames(m.owner, false)
		if n, err := fmt.Sscan(get(count), &ends[0], &requests, &ends[1], &tokens); n != 4 {
			w.t.Fatal(err)
		}
		spare += spareOf(get(ledger))
	}
	return requests, tokens, spare
}

// spareOf reads the requests that are nobody's from a ledger.
func spareOf(ledger string) int64 {
	const at = 7 * 8
	if len(ledger) < at+8 {
		return 0
	}
	return int64(math.Float64frombits(binary.LittleEndian.Uint64([]byte(ledger[at:]))))
}

// strict checks that those admitted by the server were told, in the order in which
// it decided, that more and more is used.
func (w *world) strict() {
	last := int64(0)
	for _, told := range w.said {
		if !told.kept {
			continue
		}
		if told.used <= last || told.used > w.r.Requests.Amount {
			w.t.Fatalf("somebody was told that %d are used after somebody was told that %d are, of %d", told.used, last, w.r.Requests.Amount)
		}
		last = told.used
	}
}

// most is the most that anybody was told is used.
func (w *world) most() (used int64) {
	for _, told := range w.said {
		if told.kept {
			used = told.used
		}
	}
	return used
}

func newWorld(t *rapid.T, client rueidis.Client, name string, limit int64) *world {
	w := &world{
		t: t, client: client,
		k: admission.LimitKey{Limit: name}, r: admission.Rates{Requests: per(limit, calm()), Tokens: per(1_000_000, calm())},
	}
	for i := range 1 + w.do("replicas", 4) {
		m := lonely(fleet.OnErrorLocal, 3, i%3) // the fourth is a second process of a shard
		m.owner = m.shard*processes + int64(i/3)
		w.replicas = append(w.replicas, m)
	}
	return w
}

// TestTheServersCountIsWhatWasAdmitted whatever is late, lost, repeated or comes in
// another order: in the end no token is counted that nobody was admitted for, nor a
// request, but for those that can't be taken back since somebody was told of less
// meanwhile. And no remaining value is told twice.
func TestTheServersCountIsWhatWasAdmitted(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	client, run := m.link.Load().client, 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		limit := rapid.SampledFrom([]int64{6, 10_000}).Draw(t, "limit")
		w := newWorld(t, client, fmt.Sprint("world ", run), limit)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			w.step()
		}
		w.end()
		w.strict()
		requests, tokens, spare := w.held()
		if tokens != w.tokens {
			t.Errorf("%d tokens counted, %d admitted", tokens, w.tokens)
		}
		if requests-spare != w.requests {
			t.Errorf("%d requests counted less %d of nobody's, %d admitted", requests, spare, w.requests)
		}
		if len(w.replicas) == 1 && !w.refused && requests > max(w.requests, w.most()) {
			t.Errorf("%d requests counted, of %d admitted and %d told as the most", requests, w.requests, w.most())
		}
	})
}

// TestALostLedgerNeverMakesRoom: what the server forgets of a replica's doing may
// count twice, but nothing that was admitted goes uncounted.
func TestALostLedgerNeverMakesRoom(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	client, run := m.link.Load().client, 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		w := newWorld(t, client, fmt.Sprint("world ", run), 10_000)
		w.forgets = true
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			w.step()
		}
		w.end()
		w.strict()
		if requests, tokens, spare := w.held(); requests-spare < w.requests || tokens < w.tokens {
			t.Errorf("%d requests less %d of nobody's and %d tokens counted, %d and %d admitted", requests, spare, tokens, w.requests, w.tokens)
		}
	})
}

// TestALateQuestionThatFallsIntoALaterWindowCostsNothing there either.
func TestALateQuestionThatFallsIntoALaterWindowCostsNothing(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	r := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, r)
	client := r.link.Load().client
	rates := admission.Rates{Requests: per(10, time.Second), Tokens: per(1000, calm())}
	// Both answers after the late one have to fall into one second.
	for try := range 50 {
		m := lonely(fleet.OnErrorLocal, 1, 0)
		c := claimOf(admission.LimitKey{Limit: strconv.Itoa(try)}, rates, 7)
		put := func(q *question) answer {
			t.Helper()
			ans, err := q.ask(t.Context(), client)
			if err != nil {
				t.Fatal(err)
			}
			return ans
		}
		in := func(q *question) answer {
			ans := put(q)
			m.learn(c, &ans)
			q.end(&ans)
			return ans
		}
		first := in(m.question(c))
		late := m.question(c)
		late.end(nil)
		other := &question{count: "fairlead:limit:{other}", ledger: "fairlead:limit:{other}/0", b: c.b}
		eventually(t, "a later window", func() bool { return put(other).requests.end > first.requests.end })
		then, last := put(late), in(m.question(c))
		if last.requests.end != then.requests.end {
			continue
		}
		if then.requests.used != 1 || last.requests.used != 1 || last.tokens.used != 14 {
			t.Errorf("%+v, then %+v: want one request used, and 14 tokens after all", then, last)
		}
		return
	}
	t.Error("no two answers fell into one second")
}

// TestWhatIsStatedOfAWindowThatHasNotBegunIsCountedInIt, although its ledger has
// expired by then: the replica takes the server's clock to be ahead.
func TestWhatIsStatedOfAWindowThatHasNotBegunIsCountedInIt(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	r := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, r)
	client := r.link.Load().client
	rates := admission.Rates{Requests: per(100, time.Second), Tokens: per(1000, time.Second)}
	// The answers have to fall into two seconds, one after the other.
	for try := range 50 {
		m := lonely(fleet.OnErrorLocal, 1, 0)
		in := func(now int64, alone int) answer {
			t.Helper()
			c := claimOf(admission.LimitKey{Limit: strconv.Itoa(try)}, rates, 7)
			c.now = now
			for range alone {
				m.owe(c)
			}
			q := m.question(c)
			ans, err := q.ask(t.Context(), client)
			if err != nil {
				t.Fatal(err)
			}
			m.learn(c, &ans)
			q.end(&ans)
			return ans
		}
		first := in(time.Now().Add(time.Second).UnixNano(), 30)
		eventually(t, "the next window", func() bool { return time.Now().UnixMilli() > first.requests.end+5 }) // the ledger is gone
		second := in(time.Now().UnixNano(), 0)
		third := in(time.Now().UnixNano(), 0)
		if third.requests.end != first.requests.end+1000 || second.requests.end != third.requests.end {
			continue
		}
		if first.requests.used != 1 || second.requests.used != 31 || second.tokens.used != 31*7 {
			t.Errorf("%+v, then %+v: want one request used, and in the next window 31", first, second)
		}
		if third.requests.used != 32 || third.tokens.used != 32*7 {
			t.Errorf("%+v, then %+v: want what was stated counted once", second, third)
		}
		return
	}
	t.Error("no answers fell into two seconds")
}

// stating asks with statements that are made up.
type stating struct {
	t      *testing.T
	client rueidis.Client
	c      *claim
	seen   counts
	heard  int64
}

func (s stating) ask(states statement) answer {
	s.t.Helper()
	q := &question{b: s.c.b, cost: s.c.cost, seen: s.seen, heard: s.heard, states: states}
	q.count, q.ledger = s.c.key.redisNames(0, false)
	ans, err := q.ask(s.t.Context(), s.client)
	if err != nil {
		s.t.Fatal(err)
	}
	return ans
}

func newStating(t *testing.T) stating {
	t.Helper()
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	return stating{
		t: t, client: m.link.Load().client,
		c: claimOf(client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(1000, calm())}, 5),
	}
}

func (s stating) expect(got answer, requests, tokens int64) {
	s.t.Helper()
	if got.reason != admission.ReasonAdmitted || got.requests.used != requests || got.tokens.used != tokens {
		s.t.Errorf("%+v, want %d requests and %d tokens used", got, requests, tokens)
	}
}

// TestAnotherProcessTakesNothingBack of what the one before it in its shard did.
func TestAnotherProcessTakesNothingBack(t *testing.T) {
	s := newStating(t)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 1, 5)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 2, 10)
	s.expect(s.ask(statement{account: 2, epoch: 1, version: 1}), 3, 15)
	s.expect(s.ask(statement{account: 2, epoch: 2, closed: 1, version: 2}), 3, 15) // its own one, late
	s.expect(s.ask(statement{account: 1, epoch: 2, closed: 1, version: 2}), 4, 20) // is forgotten
}

// TestTwoProcessesOfAShardKeepALedgerEach: what the one admitted alone is stated by
// several of its questions at once, and the other one's come between.
func TestTwoProcessesOfAShardKeepALedgerEach(t *testing.T) {
	s := newStating(t)
	a, b := lonely(fleet.OnErrorLocal, 3, 1), lonely(fleet.OnErrorLocal, 3, 1)
	for b.owner == a.owner { // one of 16 does
		b = lonely(fleet.OnErrorLocal, 3, 1)
	}
	put := func(m *Redis, q *question) (ans answer) {
		t.Helper()
		ans, err := q.ask(t.Context(), s.client)
		if err != nil {
			t.Fatal(err)
		}
		m.learn(s.c, &ans)
		return ans
	}
	for range 20 {
		a.owe(s.c)
	}
	var asking []*question
	for range 4 {
		asking = append(asking, a.question(s.c))
	}
	for i, q := range asking {
		between := b.question(s.c)
		ans := put(b, between)
		between.end(&ans)
		s.expect(put(a, q), 20+2*int64(i+1), 5*(20+2*int64(i+1)))
	}
}

func TestAShardHasABoundedNumberOfLedgers(t *testing.T) {
	owners := map[int64]bool{}
	for range 1000 {
		m := lonely(fleet.OnErrorLocal, 3, 2)
		if m.owner/processes != 2 {
			t.Fatalf("owner %d of shard 2", m.owner)
		}
		owners[m.owner] = true
	}
	if len(owners) != processes {
		t.Errorf("%d owners, want all %d", len(owners), processes)
	}
}

// turn has the next windows begin: one that lies ahead of the server's clock goes on.
func (s stating) turn(last answer) (ends counts) {
	s.t.Helper()
	ends.requests.end = last.requests.end + s.c.b.requests.window.Milliseconds()
	ends.tokens.end = last.tokens.end + s.c.b.tokens.window.Milliseconds()
	count, _ := s.c.key.redisNames(0, false)
	value := fmt.Sprintf("%d 0 %d 0", ends.requests.end, ends.tokens.end)
	if err := s.client.Do(s.t.Context(), s.client.B().Set().Key(count).Value(value).Build()).Error(); err != nil {
		s.t.Fatal(err)
	}
	return ends
}

// TestRequestsThatAreNobodysEndWithTheirWindow, and stand for none of the next.
func TestRequestsThatAreNobodysEndWithTheirWindow(t *testing.T) {
	s := newStating(t)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 1, 5) // late
	s.expect(s.ask(statement{}), 2, 10)                                // another's
	last := s.ask(statement{account: 1, epoch: 2, closed: 1, version: 2})
	s.expect(last, 3, 10) // the first is nobody's
	ends := s.turn(last)
	s.expect(s.ask(statement{
		account: 1, epoch: 2, closed: 1, version: 3,
		requests: stated{end: ends.requests.end, total: 1}, tokens: stated{end: ends.tokens.end, total: 5},
	}), 2, 10)
}

// TestTheRunOfAnEarlierWindowGivesNothingBack in the next, though as many are used.
func TestTheRunOfAnEarlierWindowGivesNothingBack(t *testing.T) {
	s := newStating(t)
	var last answer
	for range 3 {
		last = s.ask(statement{account: 1, epoch: 1, version: 1})
	}
	s.expect(last, 3, 15)
	ends := s.turn(last)
	for i := range int64(2) {
		s.expect(s.ask(statement{}), i+1, 5*(i+1)) // another's
	}
	s.c.cost = 2000 // which is refused
	for i, total := range []int64{1, 0} {
		ans := s.ask(statement{
			account: 1, epoch: 1, version: int64(2 + i), requests: stated{end: ends.requests.end, total: total},
		})
		if ans.reason != admission.ReasonTokens || ans.requests.used != 3 {
			t.Errorf("%+v, want it refused with 3 requests used", ans)
		}
	}
}

// TestARunGoesOnWithWhatIsStated: nobody but the caller's own has been told of any of it.
func TestARunGoesOnWithWhatIsStated(t *testing.T) {
	s := newStating(t)
	var last answer
	for range 3 {
		last = s.ask(statement{account: 1, epoch: 1, version: 1}) // two of them late
	}
	s.expect(last, 3, 15)
	alone := func(n int64) stated { return stated{end: last.requests.end, total: n} }
	s.seen.requests = count{end: last.requests.end, used: 1}
	s.c.cost = 2000 // which is refused
	for i, step := range []struct {
		closed, total, want int64
	}{
		{0, 1, 4}, // the first that was admitted alone
		{1, 3, 3}, // both, and the one by an answer
	} {
		ans := s.ask(statement{account: 1, epoch: 2, closed: step.closed, version: int64(2 + i), requests: alone(step.total)})
		if ans.reason != admission.ReasonTokens || ans.requests.used != step.want {
			t.Errorf("%+v, want it refused with %d requests used", ans, step.want)
		}
	}
}

// TestWhatIsRestoredIsKeptThoughItRefuses who told of it.
func TestWhatIsRestoredIsKeptThoughItRefuses(t *testing.T) {
	s := newStating(t)
	first := s.ask(statement{})
	s.expect(first, 1, 5)
	s.seen.requests = count{end: first.requests.end, used: 100}
	for range 2 {
		if ans := s.ask(statement{}); ans.reason != admission.ReasonRequests || ans.requests.used != 100 {
			t.Errorf("%+v, want it refused with all requests used", ans)
		}
		s.seen = counts{}
	}
}

// TestTokensThatComeBackDoNotFallBelowNothing where they were settled before.
func TestTokensThatComeBackDoNotFallBelowNothing(t *testing.T) {
	s := newStating(t)
	first := s.ask(statement{account: 1, epoch: 1, version: 1}) // late
	s.expect(first, 1, 5)
	count, _ := s.c.key.redisNames(0, false)
	if n := settle(t.Context(), s.client, []settlement{{count: count, end: first.tokens.end, delta: -3}}); n != 1 {
		t.Fatal("not settled")
	}
	s.expect(s.ask(statement{account: 1, epoch: 2, closed: 1, version: 2}), 1, 5)
}

// TestAnotherProcessBeginsItsEpochsAnew whatever the one before it closed.
func TestAnotherProcessBeginsItsEpochsAnew(t *testing.T) {
	s := newStating(t)
	s.expect(s.ask(statement{account: 1, epoch: 6, closed: 5, version: 9}), 1, 5)
	s.expect(s.ask(statement{account: 2, epoch: 1, version: 1}), 2, 10)
}

// TestWhatIsStatedOfAWindowThatHasNotBegunWaits for it: the replica's clock is ahead.
func TestWhatIsStatedOfAWindowThatHasNotBegunWaits(t *testing.T) {
	s := newStating(t)
	first := s.ask(statement{account: 1, epoch: 1, version: 1})
	s.expect(first, 1, 5)
	of := func(ahead, requests, tokens int64) statement {
		return statement{
			account: 1, epoch: 2, closed: 1, version: 2,
			requests: stated{end: first.requests.end + ahead, total: requests},
			tokens:   stated{end: first.tokens.end + ahead, total: tokens},
		}
	}
	s.expect(s.ask(of(1, 9, 90)), 2, 10)
	s.expect(s.ask(of(0, 9, 90)), 11, 100) // 9 stated, 2 by answers
	s.expect(s.ask(of(-1, 9, 90)), 12, 15) // nothing of this window: 9 requests are nobody's
}

// TestALostLedgerIsKnownByWhatWasAnswered: what the open epoch admitted is in the
// count, and not added when its epoch is closed.
func TestALostLedgerIsKnownByWhatWasAnswered(t *testing.T) {
	s := newStating(t)
	first := s.ask(statement{account: 1, epoch: 1, version: 1})
	s.expect(first, 1, 5)
	_, ledger := s.c.key.redisNames(0, false)
	if err := s.client.Do(t.Context(), s.client.B().Del().Key(ledger).Build()).Error(); err != nil {
		t.Fatal(err)
	}
	of := func(epoch, closed, total, had int64) statement {
		return statement{
			account: 1, epoch: epoch, closed: closed, version: epoch, acknowledged: 1,
			requests: stated{end: first.requests.end, total: total, had: had},
			tokens:   stated{end: first.tokens.end, total: 5 * total, had: 5 * had},
		}
	}
	s.expect(s.ask(of(1, 0, 0, 1)), 2, 10)
	s.expect(s.ask(of(2, 1, 2, 0)), 3, 15)
}

// TestWhatIsAskedWithoutAnAccountIsCountedWithoutALedger, and says that what ledgers hold
// is not the whole count.
func TestWhatIsAskedWithoutAnAccountIsCountedWithoutALedger(t *testing.T) {
	s := newStating(t)
	s.expect(s.ask(statement{}), 1, 5)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 2, 10)
	s.expect(s.ask(statement{}), 3, 15)
	_, ledger := s.c.key.redisNames(0, false)
	if n, err := s.client.Do(t.Context(), s.client.B().Del().Key(ledger).Build()).AsInt64(); n != 1 || err != nil {
		t.Errorf("%d ledgers, %v; want that of the account", n, err)
	}
	s.expect(s.ask(statement{}), 4, 20)
	if n, err := s.client.Do(t.Context(), s.client.B().Exists().Key(ledger).Build()).AsInt64(); n != 0 || err != nil {
		t.Errorf("%d ledgers, %v; want none", n, err)
	}
}

// TestAnAccountInUseIsKept when the table is full, and one that is not makes room.
func TestAnAccountInUseIsKept(t *testing.T) {
	m := lonely(fleet.OnErrorLocal, 1, 0)
	m.seen = newTable(shards)
	m.seen.accounts = true
	r := admission.Rates{Requests: per(10, time.Hour), Tokens: per(10, time.Hour)}
	kept := func(first int, at time.Time) (all []*question) {
		for i := range 1000 {
			c := claimOf(client(strconv.Itoa(first+i)), r, 1)
			c.now = at.UnixNano()
			q := m.question(c)
			if c.shared {
				q.end(nil)
			} else {
				all = append(all, q)
			}
		}
		return all
	}
	asking := kept(0, start)
	if len(asking) != shards {
		t.Errorf("%d clients have an account of their own, want %d", len(asking), shards)
	}
	later := start.Add(2 * time.Hour)
	if n := len(kept(1000, later)); n != 0 {
		t.Errorf("%d accounts whose questions have not ended were dropped", n)
	}
	for _, q := range asking {
		q.end(nil)
		q.account.admit(windows{number(later.UnixNano(), time.Hour), number(later.UnixNano(), time.Hour)}, 1, 1)
	}
	if n := len(kept(2000, later.Add(time.Minute))); n != 0 {
		t.Errorf("%d accounts of what is to be told were dropped", n)
	}
	if n := len(kept(3000, later.Add(time.Hour))); n != shards {
		t.Errorf("%d accounts that are over made room, want %d", n, shards)
	}
}

// TestWhatCameBackMayBeAnothers: who is admitted then is told a value that was late
// before, and that is not taken back once more.
func TestWhatCameBackMayBeAnothers(t *testing.T) {
	s := newStating(t)
	first := statement{account: 1, epoch: 1, version: 1}
	s.expect(s.ask(first), 1, 5) // late
	told := s.ask(first)
	s.expect(told, 2, 10)
	s.expect(s.ask(first), 3, 15) // late
	second := statement{
		account: 1, epoch: 2, closed: 1, version: 2,
		requests: stated{end: told.requests.end, total: 1}, tokens: stated{end: told.tokens.end, total: 5},
	}
	mine := s
	mine.seen.requests = told.requests
	large := *s.c
	large.cost, mine.c = 2000, &large
	ahead := mine
	ahead.seen.requests.end++ // it has forgotten what it saw of this window
	if ans := ahead.ask(second); ans.requests.used != 3 || ans.tokens.used != 5 {
		t.Errorf("%+v, want 3 requests and 5 tokens used", ans)
	}
	if ans := mine.ask(second); ans.reason != admission.ReasonTokens || ans.requests.used != 2 || ans.tokens.used != 5 {
		t.Errorf("%+v, want it refused with 2 requests and 5 tokens used", ans)
	}
	s.expect(s.ask(statement{}), 3, 10) // another's
	mine.c = s.c
	s.expect(mine.ask(second), 4, 15)
}

// TestWhatWasHeardWithARefusalIsRestoredOnlyWhereTheCountIsMissing: of a count that
// is there it may have come back.
func TestWhatWasHeardWithARefusalIsRestoredOnlyWhereTheCountIsMissing(t *testing.T) {
	s := newStating(t)
	first := s.ask(statement{})
	s.expect(first, 1, 5)
	s.seen.requests, s.heard = count{end: first.requests.end, used: 1}, 40
	s.expect(s.ask(statement{}), 2, 10)
	count, _ := s.c.key.redisNames(0, false)
	old := fmt.Sprintf("%d 60 %d 0", first.requests.end-s.c.b.requests.window.Milliseconds(), first.tokens.end)
	for _, c := range []rueidis.Completed{
		s.client.B().Del().Key(count).Build(),
		s.client.B().Set().Key(count).Value(old).Build(), // of the window before
	} {
		if err := s.client.Do(t.Context(), c).Error(); err != nil {
			t.Fatal(err)
		}
		s.expect(s.ask(statement{}), 41, 5)
	}
	s.heard = 0
	s.seen.requests.used = 50
	if ans := s.ask(statement{}); ans.requests.used != 51 || !ans.lost {
		t.Errorf("%+v, want what the admitted were told restored", ans)
	}
}

// TestTwoEpochsMayBeOpen, and their questions come in any order.
func TestTwoEpochsMayBeOpen(t *testing.T) {
	s := newStating(t)
	s.expect(s.ask(statement{account: 1, epoch: 2, version: 1}), 1, 5)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 2, 10)
	s.expect(s.ask(statement{account: 1, epoch: 2, version: 1}), 3, 15)
	// The first is closed, its question was late and nobody has asked since but in
	// the second: its tokens come back.
	s.expect(s.ask(statement{account: 1, epoch: 2, closed: 1, version: 2}), 4, 15)
	// So is the second: none of four was heard.
	s.expect(s.ask(statement{account: 1, epoch: 3, closed: 2, version: 3}), 1, 5)

	// What was told in an open epoch bounds what comes back, whichever came last.
	s = newStating(t)
	s.expect(s.ask(statement{account: 1, epoch: 2, version: 1}), 1, 5)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 2, 10)
	s.expect(s.ask(statement{account: 1, epoch: 2, closed: 1, version: 2}), 3, 10)

	// So does what was told in the older one while the newer had nothing.
	s = newStating(t)
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 1, 5)
	s.expect(s.ask(statement{account: 1, epoch: 2, version: 1}), 2, 10)
	s.c.cost = 2000
	third := statement{account: 1, epoch: 3, closed: 1, version: 2}
	if ans := s.ask(third); ans.reason != admission.ReasonTokens {
		t.Errorf("%+v, want it refused", ans)
	}
	s.c.cost = 5
	s.expect(s.ask(third), 3, 10)
}

// TestWhatIsNoLedgerIsReplaced as what is no count is.
func TestWhatIsNoLedgerIsReplaced(t *testing.T) {
	s := newStating(t)
	_, ledger := s.c.key.redisNames(0, false)
	for i, value := range []string{"", "what is this", string(make([]byte, 16*8)), "\xff" + string(make([]byte, 16*8-2)) + "\xff"} {
		if err := s.client.Do(t.Context(), s.client.B().Set().Key(ledger).Value(value).Build()).Error(); err != nil {
			t.Fatal(err)
		}
		s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), int64(i+1), 5*int64(i+1))
	}
	for _, c := range []rueidis.Completed{s.client.B().Del().Key(ledger).Build(), s.client.B().Rpush().Key(ledger).Element("1").Build()} {
		if err := s.client.Do(t.Context(), c).Error(); err != nil {
			t.Fatal(err)
		}
	}
	s.expect(s.ask(statement{account: 1, epoch: 1, version: 1}), 5, 25)
}
