package admission

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// purse counts the tokens of one client, in windows from the clock's zero on.
type purse struct {
	*clock
	rate fleet.Rate
	ends time.Time
	used int64
	asks int
	down bool // it does not count
}

func (p *purse) Reserve(_ LimitKey, r Rates, cost fleet.Tokens, _ time.Time) Reservation {
	p.asks++
	if p.down {
		return Reservation{Reason: ReasonLimiterDown}
	}
	if now := p.now(); !now.Before(p.ends) {
		p.ends, p.used = now.Truncate(p.rate.Window).Add(p.rate.Window), 0
	}
	got := Reservation{Reason: ReasonTokens}
	if p.used+int64(cost) <= p.rate.Amount {
		p.used += int64(cost)
		got = Reservation{Admitted: true, Reason: ReasonAdmitted, Ticket: Ticket{Rates: r, End: p.ends, Cost: cost}}
	}
	got.Tokens = Quota{Limit: p.rate.Amount, Remaining: p.rate.Amount - p.used, Window: p.rate.Window, Reset: p.ends.Sub(p.now())}
	return got
}

func (p *purse) Settle(t Ticket, used fleet.Tokens) {
	if t.End.Equal(p.ends) {
		p.used += int64(used - t.Cost)
	}
}

const (
	budget   = 8000
	answerIn = 2 * time.Second
)

// tokensWorld has a limit of 100,000 tokens a minute, and tells of answers.
type tokensWorld struct {
	*world
	purse *purse
}

func newTokensWorld() *tokensWorld {
	limit := fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 100_000, Window: time.Minute}}
	p := &purse{rate: limit.Tokens}
	w := &tokensWorld{newWorld(config(limit), 100, p), p}
	p.clock = w.clock
	return w
}

func (w *tokensWorld) try(retry int) (string, Verdict) {
	a := w.counting("a", retry)
	a.Level, a.Input, a.Output = fleet.LevelOf(budget), 0, budget
	return a.ID, w.Admit(&a)
}

// run admits so many and returns their ids.
func (w *tokensWorld) run(t *testing.T, n int) (ids []string) {
	t.Helper()
	for range n {
		id, v := w.try(0)
		if !v.Admitted {
			t.Fatalf("%+v", v)
		}
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: id, Attempt: 1, At: w.clock.now()})
		ids = append(ids, id)
	}
	return ids
}

// finish ends a request that used so many tokens; 0 is not told.
func (w *tokensWorld) finish(id string, used fleet.Tokens) {
	w.Apply(fleet.Outcome{
		Kind: fleet.RequestEnded, ID: id, Attempt: 1, Code: 200, Cause: fleet.CauseOK, At: w.clock.now(),
		Usage: fleet.Usage{Known: used > 0, Input: 1, Output: used - 1},
	})
}

// learn lets answers end that used so many tokens.
func (w *tokensWorld) learn(t *testing.T, used ...fleet.Tokens) {
	t.Helper()
	ids := w.run(t, len(used))
	w.tick(answerIn)
	for i, id := range ids {
		w.finish(id, used[i])
	}
	w.tick(0)
}

// TestTokensThatAreSoonBackAreWaitedFor, each for its own, instead of for the next window,
// where it is known that requests give some back, and enough, and in time.
func TestTokensThatAreSoonBackAreWaitedFor(t *testing.T) {
	for name, row := range map[string]struct {
		learned []fleet.Tokens
		at      time.Duration // since the window's begin
		running int
		soon    int // of 14 that are refused then
	}{
		"answers are short":           {[]fleet.Tokens{200, 200}, 10 * time.Second, 12, 14},
		"nothing was learned":         {nil, 10 * time.Second, 12, 0},
		"usage is not told":           {[]fleet.Tokens{0, 0}, 10 * time.Second, 10, 0},
		"budgets are used up":         {[]fleet.Tokens{budget, budget}, 10 * time.Second, 10, 0},
		"more than budgets is used":   {[]fleet.Tokens{2 * budget}, 10 * time.Second, 10, 0},
		"half of budgets is used":     {[]fleet.Tokens{budget / 2, budget / 2}, 10 * time.Second, 11, 11},
		"the window ends before that": {[]fleet.Tokens{200, 200}, 59 * time.Second, 12, 0},
	} {
		w := newTokensWorld()
		w.learn(t, row.learned...)
		w.tick(row.at - time.Duration(w.clock.at.Load()))
		w.run(t, row.running)
		w.tick(500 * time.Millisecond)
		var waits []time.Duration
		left := time.Minute - time.Duration(w.clock.at.Load())
		for range 14 {
			_, v := w.try(0)
			if v.Admitted || v.Reason != ReasonTokens {
				t.Fatalf("%s: %+v", name, v)
			}
			if v.Refusal.RetryAfter < left {
				waits = append(waits, v.Refusal.RetryAfter)
			}
			if !v.Refusal.ShouldRetry && v.Refusal.RetryAfter < left {
				t.Errorf("%s: told %+v", name, v.Refusal)
			}
		}
		if queued, _ := w.waiting("a"); queued != row.soon {
			t.Errorf("%s: %d wait in the queue; want %d", name, queued, row.soon)
		}
		if len(waits) != row.soon {
			t.Errorf("%s: %d wait for what is given back; want %d: %v", name, len(waits), row.soon, waits)
		}
		for i := 2; i < len(waits); i++ {
			if waits[i] <= waits[i-2] { // jitter may change two
				t.Errorf("%s: not one after the other: %v", name, waits)
				break
			}
		}
		if len(waits) > 0 && waits[0] < time.Second {
			t.Errorf("%s: told %v, when none of the answers of 2 s has ended", name, waits[0])
		}
	}
}

// TestFirstTriesLeaveTokensToThoseThatWereToldToCome, as far as there are no more.
func TestFirstTriesLeaveTokensToThoseThatWereToldToCome(t *testing.T) {
	for _, ended := range []int{1, 2} {
		w := newTokensWorld()
		w.learn(t, 200, 200)
		ids := w.run(t, 12)
		w.tick(time.Second)
		_, v := w.try(0)
		if v.Admitted || !v.Refusal.ShouldRetry {
			t.Fatalf("%+v", v)
		}
		w.tick(v.Refusal.RetryAfter - time.Millisecond)
		for _, id := range ids[:ended] {
			w.finish(id, 200)
		}
		asked := w.purse.asks
		_, first := w.try(0)
		if more := ended > 1; first.Admitted != more {
			t.Errorf("after %d ends a first try finds %+v", ended, first)
		}
		if q := first.Standing.Tokens; !first.Admitted && (w.purse.asks != asked || first.Reason != ReasonTokens || q.Limit != 100_000 || q.Remaining != w.purse.rate.Amount-w.purse.used || q.Reset != w.purse.ends.Sub(w.clock.now()) || q.Window != time.Minute) {
			t.Errorf("a first try is told %+v; want what is left, which no one else has", first)
		}
		w.tick(time.Millisecond)
		if _, v := w.try(1); !v.Admitted {
			t.Errorf("after %d ends the one that was told to come finds %+v", ended, v)
		}
	}
}

// TestWhoComesTooEarlyForTokensGoesBehindTheOthers, and takes nobody's slot.
func TestWhoComesTooEarlyForTokensGoesBehindTheOthers(t *testing.T) {
	w := newTokensWorld()
	w.learn(t, 200, 200)
	w.run(t, 12)
	w.tick(100 * time.Millisecond)
	var last time.Duration
	for range 3 {
		_, v := w.try(0)
		last = v.Refusal.RetryAfter
	}
	w.tick(10 * time.Millisecond)
	_, v := w.try(1)
	if v.Admitted || v.Refusal.RetryAfter <= last {
		t.Errorf("comes too early and is told %+v; want later than %v", v, last)
	}
	if limit, _ := w.waiting("a"); limit != 3 {
		t.Errorf("%d wait; want 3", limit)
	}
}

// TestOtherClientsTokensAreNotWaitedFor: those that share a place in the table are counted
// each by itself by the limiter.
func TestOtherClientsTokensAreNotWaitedFor(t *testing.T) {
	w := newTokensWorld()
	w.learn(t, 200, 200)
	w.run(t, 12)
	w.tick(time.Second)
	c := w.clients.lock(named("a"), 0)
	c.shared = true
	c.mu.Unlock()
	if _, v := w.try(0); v.Admitted || v.Refusal.RetryAfter < 50*time.Second {
		t.Errorf("%+v; want the next window", v)
	}
}

// TestNextWindowIsPromisedByWhatRequestsUse: of 100,000 tokens a dozen budgets are one, but
// many more answers.
func TestNextWindowIsPromisedByWhatRequestsUse(t *testing.T) {
	for _, used := range []fleet.Tokens{0, 200} {
		w := newTokensWorld()
		w.learn(t, used, used)
		w.tick(59*time.Second - time.Duration(w.clock.at.Load()))
		w.run(t, 10)
		if used > 0 {
			w.run(t, 2)
		}
		again := 0
		for range 40 {
			if _, v := w.try(0); v.Refusal.ShouldRetry {
				again++
			}
		}
		if want := map[bool]int{false: 12, true: 40}[used > 0]; again != want {
			t.Errorf("usage of %d: %d of 40 are told to come in the next window; want %d", used, again, want)
		}
	}
}

// TestWhatRequestsGiveBackIsRememberedForAWhile.
func TestWhatRequestsGiveBackIsRememberedForAWhile(t *testing.T) {
	w := newTokensWorld()
	w.learn(t, 200, 200)
	for range 50 {
		w.tick(time.Second)
	}
	if uses, _, _ := w.known("a"); uses != 1 {
		t.Errorf("%d uses are known", uses)
	}
	for range 90 {
		w.tick(time.Second)
	}
	if uses, _, there := w.known("a"); uses != 0 || there {
		t.Errorf("%d uses are known after its window and a minute", uses)
	}
}

// TestWhatIsLeftIsKnown between two refusals: by what enters, ends, fails, is taken back and
// asked for anew.
func TestWhatIsLeftIsKnown(t *testing.T) {
	w := newTokensWorld()
	w.learn(t, 200, 200)
	ids := w.run(t, 12)
	if _, v := w.try(0); v.Admitted {
		t.Fatalf("%+v", v)
	}
	same := func(after string) {
		c := w.clients.lock(named("a"), w.since(w.clock.now()))
		defer c.mu.Unlock()
		if got, want := c.uses[0].reserved.left, w.purse.rate.Amount-w.purse.used; got != want {
			t.Errorf("after %s %d are left; want %d", after, got, want)
		}
	}
	same("a refusal")
	w.finish(ids[0], 200)
	same("an end")
	w.finish(ids[1], 2*budget)
	same("the end of one that used more")
	w.finish(ids[2], 0)
	same("an end without usage")
	w.Cancel(ids[3])
	same("one that was taken back")
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: ids[4], Attempt: 1, Code: 500, Cause: fleet.CauseOK, At: w.clock.now()})
	same("a failure")
	w.run(t, 1)
	same("one that entered")
	a := w.counting("a", 0)
	a.ID, a.Level, a.Input, a.Output = ids[5], fleet.LevelOf(budget), 0, budget
	if v := w.Admit(&a); !v.Admitted {
		t.Fatalf("%+v", v)
	}
	same("one that came again")
	w.purse.down = true
	if _, v := w.try(2); v.Admitted || v.Reason != ReasonLimiterDown {
		t.Fatalf("%+v", v)
	}
	w.purse.down = false
	same("one that the limiter did not count")
	w.tick(time.Minute)
	for _, id := range ids[6:] {
		w.finish(id, 200)
	}
	w.run(t, 12)
	if _, v := w.try(0); v.Admitted {
		t.Fatalf("%+v", v)
	}
	same("the next window began")
}

// TestFullTableReservesNoTokens: a request that is not followed is none of those that give
// something back.
func TestFullTableReservesNoTokens(t *testing.T) {
	w := newTokensWorld()
	w.Gate = New(Options{Config: config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: w.purse.rate}), Limiter: w.purse, Now: w.clock.now, Claims: 1})
	w.tick(0)
	for range 3 {
		if _, v := w.try(0); !v.Admitted {
			t.Fatalf("%+v", v)
		}
	}
	c := w.clients.lock(named("a"), 0)
	defer c.mu.Unlock()
	if u := &c.uses[0]; u.live != 1 || u.reserved.live != 1 || u.reserved.tokens != budget {
		t.Errorf("%d are in flight, %d with %d tokens; want the one that is followed", u.live, u.reserved.live, u.reserved.tokens)
	}
}

// TestReservationsAreOfOneWindow, the latest; after another configuration windows may be
// shorter, and end before one that was known.
func TestReservationsAreOfOneWindow(t *testing.T) {
	var s reserved
	now := time.Duration(0)
	enter := func(window, ends time.Duration) *reservation {
		r := &reservation{tokens: 10, window: window, ends: ends}
		now++
		s.add(r, now)
		return r
	}
	want := func(when string, live int) {
		t.Helper()
		if s.live != live || s.tokens != fleet.Tokens(10*live) {
			t.Errorf("%s: %d with %d tokens; want %d", when, s.live, s.tokens, live)
		}
	}
	first := enter(time.Minute, time.Minute)
	want("one", 1)
	second := enter(time.Minute, 2*time.Minute)
	want("one of the next window", 1)
	late := enter(time.Minute, time.Minute)
	want("one of the last window, late", 1)
	s.drop(first)
	s.drop(late)
	want("those of the last window ended", 1)
	long := enter(time.Hour, time.Hour)
	want("one of an hour", 1)
	s.drop(second)
	want("one of before that ended", 1)
	short := enter(time.Minute, 3*time.Minute)
	want("one of a minute again", 1)
	s.drop(long)
	want("that of the hour ended", 1)
	none := enter(0, 0)
	want("one without a limit on tokens", 1)
	other := enter(time.Hour, 3*time.Minute)
	want("one of an hour that ends at the same time", 1)
	back := enter(time.Minute, 3*time.Minute)
	want("one of a minute, a third time", 1)
	s.drop(short)
	s.drop(other)
	want("those of before that ended", 1)
	s.drop(back)
	s.again(back)
	s.again(long)
	want("one that is seen again, beside one of before", 1)
	s.again(short)
	want("one of another count of the window that is seen again", 2)
	s.drop(short)
	s.drop(back)
	s.drop(none)
	want("all ended", 0)
	s = reserved{}
	s.again(back)
	want("one that is seen again after all was forgotten", 1)
}

// TestRenamedLimitGivesNothingBack of what was reserved under its name before.
func TestRenamedLimitGivesNothingBack(t *testing.T) {
	w := newTokensWorld()
	w.learn(t, 200, 200)
	ids := w.run(t, 11)
	w.Reconfigure(config(fleet.Limit{Name: "m", Key: fleet.ClientKeyAuthorization, Tokens: w.purse.rate}))
	state := func(limit string) (live int, s reserved) {
		c := w.clients.lock(named("a"), w.since(w.clock.now()))
		defer c.mu.Unlock()
		u := c.use(limit)
		return u.live, u.reserved
	}
	if live, s := state("l"); live != 0 || s.live != 0 || s.tokens != 0 {
		t.Errorf("%d are in flight of the old name, %d with %d tokens; want none", live, s.live, s.tokens)
	}
	if live, s := state("m"); live != 11 || s.live != 0 || s.tokens != 0 {
		t.Errorf("%d are in flight of the new name, %d with %d tokens; want 11 and none", live, s.live, s.tokens)
	}
	w.run(t, 1)
	for _, id := range ids {
		w.finish(id, 200)
	}
	if live, s := state("m"); live != 1 || s.live != 1 || s.tokens != budget || s.part() == 0 {
		t.Errorf("%d are in flight in the end, %d with %d tokens, and it is known that %.2f come back; want the one that entered since", live, s.live, s.tokens, s.part())
	}
}

// TestFirstTriesAskTheLimiterOnceItHasRoom: tokens come back at another replica, or somebody
// raises the limit, and only the limiter knows.
func TestFirstTriesAskTheLimiterOnceItHasRoom(t *testing.T) {
	w := newTokensWorld()
	w.learn(t, 200, 200)
	w.run(t, 11)
	id, v := w.try(0)
	for range 3 {
		id, v = w.try(0)
	}
	if v.Admitted || v.Reason != ReasonTokens || !v.Refusal.ShouldRetry {
		t.Fatalf("%s is told %+v; want that its tokens are used up", id, v)
	}
	w.purse.used -= 10 * budget // given back elsewhere
	w.tick(v.Refusal.RetryAfter)
	if _, v = w.try(1); !v.Admitted {
		t.Fatalf("in its slot one is told %+v", v)
	}
	asks := w.purse.asks
	if _, v = w.try(0); !v.Admitted || w.purse.asks != asks+1 {
		t.Errorf("a first try is told %+v, while the limiter has %d", v, w.purse.rate.Amount-w.purse.used)
	}
}
