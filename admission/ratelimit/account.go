package ratelimit

import (
	"math/rand/v2"
	"sync"
	"time"
)

// account is what this replica tells the server about one client and limit, so that
// the server's count is right although some questions get no answer in time: those
// it may have taken, or take later, or never, and meanwhile this replica decided
// alone.
//
// Questions belong to epochs. A question that was late ends its epoch: the next
// ones belong to another, and when all of it have ended, in time or late, the epoch
// is closed. From then on each question states, as one number that is complete, how
// much this replica admitted alone and by answers of closed epochs. The server sets
// what it counted against that, and takes no more questions of a closed epoch. So a
// statement may be made, lost, late and repeated in any order: the newest holds.
//
// Methods may be called at once from many goroutines.
type account struct {
	// id tells the account from that of an earlier process, or from one that the
	// table dropped. 1 … 10^13.
	id int64

	mu sync.Mutex
	// version numbers what is stated, from 1 on; acknowledged is the last version
	// that a question had which was answered.
	version, acknowledged int64
	closed                int64 // the last epoch that is closed; 0 before the first
	now, before           epoch // before: late and not closed; its number is 0 if there is none
	requests, tokens      tally

	queued bool // its key waits to be told, or is being told
	look   bool // to be told even if that says nothing new, for what the answer says
}

// epoch is a run of questions.
type epoch struct {
	number           int64 // from 1 on
	open             int   // questions that have not ended
	late             bool  // one of them was, and no more shall be put in this epoch
	requests, tokens int64 // admitted by its answers, in the tallies' windows
}

// tally is what was admitted in one window.
type tally struct {
	window   int64
	answered int64 // by answers of closed epochs
	alone    int64
	told     int64 // of alone, as last acknowledged
}

func newAccount() *account {
	return &account{id: 1 + rand.Int64N(1e13), version: 1, now: epoch{number: 1}}
}

// statement is what a question says of the account. The script says how it is read.
type statement struct {
	account, epoch, closed, version, acknowledged int64
	requests, tokens                              stated
}

// stated is of one window, by its number and its end in ms since the Unix epoch.
type stated struct {
	window, end int64
	total       int64 // admitted alone and by answers of closed epochs
	alone       int64 // of the total
	untold      int64 // of what was admitted alone: not acknowledged
	had         int64 // admitted by answers of the question's own epoch
}

// begin has one more question put and returns what it states. It must end, in time
// or late.
func (a *account) begin(b *budgets) (s statement) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now.open++
	return statement{
		account: a.id, epoch: a.now.number, closed: a.closed, version: a.version, acknowledged: a.acknowledged,
		requests: a.requests.stated(b.requests.window, a.now.requests),
		tokens:   a.tokens.stated(b.tokens.window, a.now.tokens),
	}
}

func (t *tally) stated(length time.Duration, had int64) stated {
	if length == 0 {
		return stated{}
	}
	return stated{
		window: t.window, end: end(t.window, length) / int64(time.Millisecond),
		total: t.answered + t.alone, alone: t.alone, untold: t.alone - t.told, had: had,
	}
}

// answered ends a question in time, with what it admitted in which windows: 0 of
// both where it was refused.
func (a *account) answered(s *statement, w windows, requests, tokens int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.advance(w)
	if s.version >= a.acknowledged {
		a.acknowledged = s.version
		a.requests.acknowledge(s.requests, w.requests)
		a.tokens.acknowledge(s.tokens, w.tokens)
	}
	e := a.epoch(s.epoch)
	if w.requests == a.requests.window {
		e.requests += requests
	}
	if w.tokens == a.tokens.window {
		e.tokens += tokens
	}
	e.open--
	a.turn()
}

// late ends a question of which nobody knows whether the server takes it.
func (a *account) late(s *statement) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.epoch(s.epoch)
	e.open--
	e.late = true
	a.turn()
}

// apart ends a question that the server decided without a ledger, whatever it said:
// what it states was not taken, and what it admitted is in no epoch there.
func (a *account) apart(s *statement) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.epoch(s.epoch).open--
	a.turn()
}

// epoch is that of a question which has not ended.
func (a *account) epoch(number int64) *epoch {
	if number == a.now.number {
		return &a.now
	}
	return &a.before
}

// turn closes the epoch before, once all its questions have ended, and goes on to
// the next where one was late. No more than two are open: while the one before is,
// the present one goes on.
func (a *account) turn() {
	for {
		if a.before.number > 0 {
			if a.before.open > 0 {
				return
			}
			a.closed = a.before.number
			a.requests.answered += a.before.requests
			a.tokens.answered += a.before.tokens
			a.before = epoch{}
			a.version++
		}
		if !a.now.late {
			return
		}
		a.before, a.now = a.now, epoch{number: a.now.number + 1}
	}
}

// admit notes what was admitted without the server.
func (a *account) admit(w windows, requests, tokens int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.advance(w)
	a.version++
	a.requests.add(w.requests, requests)
	a.tokens.add(w.tokens, tokens)
}

// absorb corrects the tokens that were admitted alone in the window n, if that will
// be stated anew in any case, or if it must. Else it changes nothing and returns
// false: the server knows of them all.
func (a *account) absorb(n, delta int64, must bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	known := a.version == a.acknowledged && a.tokens.alone == a.tokens.told
	if a.tokens.window != n || a.tokens.alone+delta < 0 || known && !must {
		return false
	}
	a.version++
	a.tokens.add(n, delta)
	return true
}

// untold is what was admitted alone and not acknowledged, of the windows that count
// now. It may be less than nothing: corrections are untold too.
func (a *account) untold(w windows) (requests, tokens int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests.untold(w.requests), a.tokens.untold(w.tokens)
}

// queue says that the account's key must be queued: it was not yet. look has the server
// asked though there is nothing to tell it.
func (a *account) queue(look bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look = a.look || look
	if a.queued {
		return false
	}
	a.queued = true
	return true
}

// unqueue notes that the key found no room.
func (a *account) unqueue() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.queued, a.look = false, false
}

// due says that the server must be told, now that it is the key's turn; else the key is
// no longer queued. What windows that are over held is of no use to anybody.
func (a *account) due(w windows) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	news := a.version > a.acknowledged
	a.queued = a.look || a.requests.due(w.requests, news) || a.tokens.due(w.tokens, news)
	a.look = false
	return a.queued
}

// over says that nothing the account holds counts any more, and nothing is asked.
func (a *account) over(k *key, w windows) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now.open == 0 && a.before.open == 0 &&
		(k.requests == 0 || a.requests.window < w.requests) &&
		(k.tokens == 0 || a.tokens.window < w.tokens)
}

// advance begins the tallies anew in windows that are later.
func (a *account) advance(w windows) {
	if w.requests > a.requests.window {
		a.requests = tally{window: w.requests}
		a.now.requests, a.before.requests = 0, 0
	}
	if w.tokens > a.tokens.window {
		a.tokens = tally{window: w.tokens}
		a.now.tokens, a.before.tokens = 0, 0
	}
}

// add counts in the window n, if that is the tally's.
func (t *tally) add(n, amount int64) {
	if n == t.window {
		t.alone = min(t.alone+amount, maxUsed)
	}
}

// acknowledge notes that what was stated is counted, by an answer of the window n. In
// an earlier one than it is about the server has not counted it: it waits.
func (t *tally) acknowledge(s stated, n int64) {
	if s.window == t.window && n >= s.window {
		t.told = s.alone
	}
}

// due says that the server must be told of the window n. One that begins there later than
// here has not been counted, though the statement was acknowledged.
func (t *tally) due(n int64, news bool) bool {
	return n > 0 && t.window == n && (news || t.alone != t.told)
}

// untold is of the window n, or of a later one if that is the tally's: the clock
// went back.
func (t *tally) untold(n int64) int64 {
	if n > t.window {
		return 0
	}
	return t.alone - t.told
}
