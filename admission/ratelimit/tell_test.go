package ratelimit

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// near and far are two replicas of a server, which the second one reaches too late by far
// while late says so.
func nearAndFar(t *testing.T) (s *redisbin.Server, near, far *replica, late *atomic.Bool) {
	t.Helper()
	s, late = redisbin.Start(t, redisbin.Config{}), new(atomic.Bool)
	late.Store(true)
	address := delayed(t, s.Socket, func() {
		if late.Load() {
			time.Sleep(60 * time.Millisecond)
		}
	})
	near = replicas(t, fleet.Redis{Address: s.Address()}, 2)[0]
	far = replicas(t, fleet.Redis{Address: address, Deadline: 30 * time.Millisecond}, 2)[1]
	up(t, near)
	eventually(t, "the far one can tell it", far.reached.Load)
	return s, near, far, late
}

// holds waits until the server counts so much of a client's windows.
func holds(t *testing.T, s *redisbin.Server, k admission.LimitKey, r admission.Rates, requests, tokens int64) {
	t.Helper()
	eventually(t, "the server counts what was admitted", func() bool {
		if s.MustDo(t, "EXISTS", name(k, r)) == "0" {
			return false
		}
		gotRequests, gotTokens := counted(t, s, k, r)
		return gotRequests == requests && gotTokens == tokens
	})
}

// TestAServerThatIsAlwaysLateIsToldAndBelieved: what the far replica admits the near one
// counts, and the other way round.
func TestAServerThatIsAlwaysLateIsToldAndBelieved(t *testing.T) {
	s, near, far, _ := nearAndFar(t)
	k, r := client("a"), admission.Rates{Requests: per(60, calm()), Tokens: per(1_000_000, calm())}
	for i := range int64(10) {
		if a := far.Reserve(k, r, 10, time.Now()); !a.Admitted || !a.Local {
			t.Fatalf("%+v", a)
		}
		if i%3 == 0 {
			holds(t, s, k, r, i+1, 10*(i+1))
		}
	}
	holds(t, s, k, r, 10, 100)
	for left := int64(49); left >= 0; left-- {
		expect(t, near.Reserve(k, r, 10, time.Now()), admission.ReasonAdmitted, left)
	}
	expect(t, near.Reserve(k, r, 10, time.Now()), admission.ReasonRequests, 0)
	// The far one has 20 of its part left, and has heard of none of the others.
	if a := far.Reserve(k, r, 10, time.Now()); !a.Admitted {
		t.Fatalf("%+v", a)
	}
	holds(t, s, k, r, 61, 610)
	eventually(t, "the far one hears that the limit is used up", func() bool {
		requests, _ := far.seen.used(claimOf(k, r, 0))
		return requests == 61
	})
	if a := far.Reserve(k, r, 10, time.Now()); a.Reason != admission.ReasonRequests || a.Requests.Remaining != 0 {
		t.Errorf("%+v", a)
	}
	if c := far.Counters(); c.Calls != 0 || c.Connects != 0 || c.Told == 0 {
		t.Errorf("%+v; want it never asked, but told", c)
	}
	s.Pause()
	far.Reserve(client("b"), r, 10, time.Now())
	eventually(t, "a statement without an answer is counted", func() bool { return far.Counters().Untold > 0 })
	s.Resume()
	holds(t, s, client("b"), r, 1, 10)
}

// TestLateQuestionsAreCountedOnceThoughNobodyAsksAgain: the server executes them, and
// their replica admits their requests alone.
func TestLateQuestionsAreCountedOnceThoughNobodyAsksAgain(t *testing.T) {
	s, _, far, late := nearAndFar(t)
	late.Store(false)
	k, r := client("a"), admission.Rates{Requests: per(1e9, calm()), Tokens: per(1e12, calm())}
	inTime := 0
	eventually(t, "it answers in time", func() bool {
		a := far.Reserve(k, r, 10, time.Now())
		if !a.Admitted {
			t.Fatalf("%+v", a)
		}
		inTime++
		return !a.Local
	})
	late.Store(true)
	for range 2 * tripAfter {
		if a := far.Reserve(k, r, 10, time.Now()); !a.Admitted || !a.Local {
			t.Fatalf("%+v", a)
		}
	}
	if c := far.Counters(); c.Up || c.Timeouts < tripAfter {
		t.Fatalf("%+v", c)
	}
	all := int64(inTime + 2*tripAfter)
	holds(t, s, k, r, all, 10*all)
}

// TestWhatIsUsedOfALateServersTokensIsToldAndHeard: what one replica gives back the
// other one has, either way.
func TestWhatIsUsedOfALateServersTokensIsToldAndHeard(t *testing.T) {
	s, near, far, _ := nearAndFar(t)
	k, r := client("a"), admission.Rates{Tokens: per(1000, calm())}
	a := far.Reserve(k, r, 500, time.Now())
	if !a.Admitted {
		t.Fatalf("%+v", a)
	}
	holds(t, s, k, r, 0, 500)
	take := func(cost fleet.Tokens, left int64) admission.Ticket {
		t.Helper()
		b := near.Reserve(k, r, cost, time.Now())
		if !b.Admitted || b.Local || b.Tokens.Remaining != left {
			t.Fatalf("%+v; want %d tokens left", b, left)
		}
		return b.Ticket
	}
	b := take(500, 0)
	far.Settle(a.Ticket, 100)
	holds(t, s, k, r, 0, 600)
	take(400, 0)
	if a := far.Reserve(k, r, 10, time.Now()); !a.Admitted { // it has not heard of that
		t.Fatalf("%+v", a)
	}
	eventually(t, "the far one hears that nothing is left", func() bool {
		_, tokens := far.seen.used(claimOf(k, r, 0))
		return tokens == 1010
	})
	if a := far.Reserve(k, r, 300, time.Now()); a.Reason != admission.ReasonTokens {
		t.Fatalf("%+v", a)
	}
	near.Settle(b, 10)
	eventually(t, "the far one hears that there is room", func() bool {
		return far.Reserve(k, r, 300, time.Now()).Admitted
	})
}

// TestWhatIsToldWaitsOnceForEachClient: while the server is away the queue is bounded, and
// what is told when it is back is of windows that run.
func TestWhatIsToldWaitsOnceForEachClient(t *testing.T) {
	m := lonely(fleet.OnErrorLocal, 1, 0)
	r := admission.Rates{Requests: per(10, time.Second), Tokens: per(1000, calm())}
	reserve := func(i int, r admission.Rates) {
		t.Helper()
		if a := m.Reserve(client(fmt.Sprint(i)), r, 1, time.Now()); !a.Admitted {
			t.Fatalf("%+v", a)
		}
	}
	for range 3 {
		reserve(0, r)
	}
	if n := len(m.tells); n != 1 {
		t.Errorf("%d wait for one client", n)
	}
	for i := range maxQueued + 7 {
		reserve(i, r)
	}
	if n := len(m.tells); n != maxQueued {
		t.Errorf("%d wait, want %d", n, maxQueued)
	}
	if n := m.Counters().Unheard; n != 7 {
		t.Errorf("%d are counted that found no room, want 7", n)
	}
	turn := func(later time.Duration) bool {
		k := <-m.tells
		e, s := m.seen.held(&k)
		defer s.mu.RUnlock()
		return e.account.due(k.at(time.Now().Add(later).UnixNano()))
	}
	if !turn(0) || !turn(time.Minute) { // of the tokens' window, which runs
		t.Error("what was admitted alone is not told")
	}
	if turn(2 * calm()) {
		t.Error("a window is told of that is over")
	}
	reserve(maxQueued+6, r) // found no room before
	if n := len(m.tells); n != maxQueued-2 {
		t.Errorf("%d wait, want %d", n, maxQueued-2)
	}
}

// TestTheServersClockIsBelievedAsFarAsALateAnswerTells has the answer take 2 s.
func TestTheServersClockIsBelievedAsFarAsALateAnswerTells(t *testing.T) {
	const second = int64(time.Second)
	for name, row := range map[string]struct{ known, server, want int64 }{
		"known better":          {300, 1300, 300},
		"asked when it said so": {5000, 1300, 301},
		"told at once":          {-4000, 1300, -1700},
	} {
		m := lonely(fleet.OnErrorLocal, 1, 0)
		m.ahead.Store(row.known * second / 1000)
		k, r := client("a"), requests(10, calm())
		c := claimTelling(claimOf(k, r, 0).key, second, 0)
		m.hear(c, &answer{reason: admission.ReasonRequests, now: row.server}, 3*second)
		if got := time.Duration(m.ahead.Load()); got != time.Duration(row.want)*time.Millisecond {
			t.Errorf("%s: the server's clock is %v ahead, want %d ms", name, got, row.want)
		}
	}
}
