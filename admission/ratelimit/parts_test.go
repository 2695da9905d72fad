package ratelimit

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// pair is of requests and tokens.
type pair struct{ requests, tokens int64 }

// total is all that a question states was admitted.
func (q *question) total() pair { return pair{q.states.requests.total, q.states.tokens.total} }

// lonely is a limiter whose server was never reached.
func lonely(onError fleet.OnError, replicas, shard int) *Redis {
	return NewRedis(Options{Redis: fleet.Redis{OnError: onError, Replicas: replicas}, Shard: shard})
}

// claimOf is a reservation on its way.
func claimOf(k admission.LimitKey, r admission.Rates, cost int64) *claim {
	now := time.Now().UnixNano()
	return &claim{
		key: key{limit: k.Limit, client: k.Client, requests: r.Requests.Window, tokens: r.Tokens.Window},
		b:   budgetsOf(r), cost: cost, here: now, now: now,
	}
}

// hear has a limiter learn what the server answers to a reservation.
func hear(m *Redis, c *claim, reason admission.Reason, requests, tokens int64) {
	at := c.key.at(c.now)
	ans := answer{reason: reason, now: c.now / int64(time.Millisecond)}
	if c.b.requests.limited() {
		ans.requests = count{end: end(at.requests, c.b.requests.window) / int64(time.Millisecond), used: requests}
	}
	if c.b.tokens.limited() {
		ans.tokens = count{end: end(at.tokens, c.b.tokens.window) / int64(time.Millisecond), used: tokens}
	}
	m.learn(c, &ans)
}

func TestEachShardHasItsOwnPart(t *testing.T) {
	for _, row := range []struct {
		shard int
		want  int
	}{{-1, 2}, {0, 2}, {1, 2}, {2, 1}, {7, 1}} {
		m := lonely(fleet.OnErrorLocal, 3, row.shard)
		admitted := 0
		for range 10 {
			if m.Reserve(client("a"), requests(5, calm()), 0, time.Now()).Admitted {
				admitted++
			}
		}
		if admitted != row.want {
			t.Errorf("shard %d of 3 admits %d of 5, want %d", row.shard, admitted, row.want)
		}
	}
	// A limit of fewer requests than replicas is nothing at some, and says so.
	a := lonely(fleet.OnErrorLocal, 3, 2).Reserve(client("a"), requests(2, calm()), 0, time.Now())
	if a.Reason != admission.ReasonRequests || !a.Local || a.Requests.Limit == 0 {
		t.Errorf("%+v", a)
	}
}

// TestWhatTheServerSaidWasUsedUpStaysSo: others used it, and this replica has not
// touched its own part.
func TestWhatTheServerSaidWasUsedUpStaysSo(t *testing.T) {
	k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(1000, calm())}
	for _, row := range []struct {
		name             string
		requests, tokens int64 // used, as the server said
		cost             fleet.Tokens
		admits           int
		then             admission.Reason
	}{
		{"nothing", 0, 0, 0, 50, admission.ReasonRequests},
		{"all requests", 100, 0, 0, 0, admission.ReasonRequests},
		{"all requests but five", 95, 0, 0, 5, admission.ReasonRequests},
		{"all tokens", 10, 1000, 1, 0, admission.ReasonTokens},
		{"all tokens but 100", 10, 900, 45, 2, admission.ReasonTokens},
		{"nothing, and tokens of the part", 0, 0, 45, 11, admission.ReasonTokens},
	} {
		m := lonely(fleet.OnErrorLocal, 2, 0)
		hear(m, claimOf(k, r, 0), admission.ReasonRequests, row.requests, row.tokens)
		for range row.admits {
			if a := m.Reserve(k, r, row.cost, time.Now()); !a.Admitted || !a.Local {
				t.Fatalf("%s: %+v, want %d admitted", row.name, a, row.admits)
			}
		}
		for range 3 {
			if a := m.Reserve(k, r, row.cost, time.Now()); a.Reason != row.then {
				t.Errorf("%s: %+v after %d admitted, want %v", row.name, a, row.admits, row.then)
			}
		}
		// The server is told of those admitted, and of no others.
		told, tokens := m.untold(claimOf(k, r, 0))
		if told != int64(row.admits) || tokens != int64(row.admits)*int64(row.cost) {
			t.Errorf("%s: %d requests and %d tokens are to be told, want %d", row.name, told, tokens, row.admits)
		}
	}
}

// TestALimitThatWasUsedUpIsNotOnceMoreIsHeard of it.
func TestALimitThatWasUsedUpIsNotOnceMoreIsHeard(t *testing.T) {
	k, r := client("a"), requests(100, calm())
	m := lonely(fleet.OnErrorLocal, 1, 0)
	c := claimOf(k, r, 0)
	said := func(want admission.Reason, seen, heard int64) {
		t.Helper()
		if got := m.usedUp(c); got != want {
			t.Errorf("%v, want %v", got, want)
		}
		q := m.question(c)
		q.end(nil)
		if q.seen.requests.used != seen || q.heard != heard || q.seen.requests.end == 0 {
			t.Errorf("%+v seen and %d heard, want %d and %d", q.seen.requests, q.heard, seen, heard)
		}
	}
	hear(m, c, admission.ReasonAdmitted, 50, 0)
	hear(m, c, admission.ReasonRequests, 100, 0)
	said(admission.ReasonRequests, 50, 100)
	hear(m, c, admission.ReasonAdmitted, 52, 0)
	hear(m, c, admission.ReasonAdmitted, 51, 0) // the earlier answer
	said(admission.ReasonAdmitted, 52, 52)
	hear(m, c, admission.ReasonTokens, 100, 0)
	said(admission.ReasonAdmitted, 52, 52)
	hear(m, c, admission.ReasonAdmitted, 100, 0)
	said(admission.ReasonRequests, 100, 100)
	c.now += int64(r.Requests.Window)
	hear(m, c, admission.ReasonRequests, 70, 0)
	said(admission.ReasonAdmitted, 0, 70) // of the later window
}

// TestWhatTheServerAdmittedCountsAgainstThePart, and what others used does not.
func TestWhatTheServerAdmittedCountsAgainstThePart(t *testing.T) {
	m := lonely(fleet.OnErrorLocal, 2, 0)
	k, r := client("a"), admission.Rates{Requests: per(10, calm()), Tokens: per(1000, calm())}
	for used := range int64(3) {
		hear(m, claimOf(k, r, 100), admission.ReasonAdmitted, used+1, 100*(used+1))
	}
	expect(t, m.Reserve(k, r, 100, time.Now()), admission.ReasonAdmitted, 1)
	a := m.Reserve(k, r, 101, time.Now()) // 400 of the part's 500 tokens are used
	expect(t, a, admission.ReasonTokens, 1)
	if a.Tokens.Remaining != 100 {
		t.Errorf("%d tokens of the part left, want 100", a.Tokens.Remaining)
	}
	expect(t, m.Reserve(k, r, 0, time.Now()), admission.ReasonAdmitted, 0)
	expect(t, m.Reserve(k, r, 0, time.Now()), admission.ReasonRequests, 0)
}

func TestWhatPassedOpenIsToldToTheServer(t *testing.T) {
	m := lonely(fleet.OnErrorOpen, 2, 0)
	k, r := client("a"), admission.Rates{Requests: per(2, calm()), Tokens: per(100, calm())}
	for range 5 {
		if a := m.Reserve(k, r, 30, time.Now()); !a.Admitted {
			t.Fatalf("%+v", a)
		}
	}
	q := m.question(claimOf(k, r, 1))
	if total := q.total(); total != (pair{5, 150}) {
		t.Errorf("%+v are told, want 5 requests and 150 tokens", total)
	}
	// Another says the same, which the server counts once.
	if again := m.question(claimOf(k, r, 1)); again.states != q.states {
		t.Errorf("%+v is told, and then %+v", q.states, again.states)
	}
	q.end(nil)
	if again := m.question(claimOf(k, r, 1)); again.total() != q.total() || again.states.epoch == q.states.epoch {
		t.Errorf("%+v are told after a question without an answer, want %+v in another epoch", again.states, q.states)
	}
}

func TestNothingIsToldOfWhatWasRefusedClosed(t *testing.T) {
	m := lonely(fleet.OnErrorClosed, 2, 0)
	k, r := client("a"), admission.Rates{Requests: per(2, calm()), Tokens: per(100, calm())}
	m.Reserve(k, r, 30, time.Now())
	if q := m.question(claimOf(k, r, 1)); q.total() != (pair{}) {
		t.Errorf("%+v are to be told", q.states)
	}
}

func TestSettlingCorrectsAllThatCountsWithoutTheServer(t *testing.T) {
	k, r := client("a"), admission.Rates{Tokens: per(100, calm())}
	t.Run("admitted alone", func(t *testing.T) {
		m := lonely(fleet.OnErrorLocal, 1, 0)
		a := m.Reserve(k, r, 60, time.Now())
		m.Settle(a.Ticket, 10)
		if b := m.Reserve(k, r, 90, time.Now()); !b.Admitted || b.Tokens.Remaining != 0 {
			t.Errorf("%+v, want the 50 tokens back", b)
		}
		if q := m.question(claimOf(k, r, 1)); q.states.tokens.untold != 100 {
			t.Errorf("%d tokens are to be told, want 100", q.states.tokens.untold)
		}
		if c := m.Counters(); c.Dropped != 0 {
			t.Errorf("%+v: a settlement of what the server does not know was dropped", c)
		}
	})
	t.Run("admitted alone, and the server is back but was not told", func(t *testing.T) {
		m := lonely(fleet.OnErrorLocal, 1, 0)
		a := m.Reserve(k, r, 60, time.Now())
		m.link.Store(&link{})
		m.Settle(a.Ticket, 10)
		if q := m.question(claimOf(k, r, 1)); q.states.tokens.untold != 10 || len(m.settles) != 0 {
			t.Errorf("%d tokens are to be told and %d settlements sent, want 10 and none", q.states.tokens.untold, len(m.settles))
		}
		q := m.question(claimOf(k, r, 1))
		q.end(&answer{reason: admission.ReasonTokens})
		m.Settle(a.Ticket, 10) // it was told
		if len(m.settles) != 1 {
			t.Errorf("%d settlements sent, want one", len(m.settles))
		}
	})
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("admitted alone, the server was told, and is away: %v", away), func(t *testing.T) {
			m := lonely(fleet.OnErrorLocal, 1, 0)
			a := m.Reserve(k, r, 60, time.Now())
			c := claimOf(k, r, 1)
			m.question(c).end(&answer{
				reason: admission.ReasonTokens,
				counts: counts{tokens: count{end: a.Ticket.End.UnixMilli(), used: 60}},
			})
			if !away {
				m.link.Store(&link{})
			}
			m.Settle(a.Ticket, 10)
			want, sent := int64(0), 1
			if away {
				want, sent = -50, 0 // it is stated when the server is back
			}
			if q := m.question(c); q.states.tokens.untold != want || len(m.settles) != sent {
				t.Errorf("%d tokens are to be told and %d settlements sent, want %d and %d", q.states.tokens.untold, len(m.settles), want, sent)
			}
		})
	}
	t.Run("passed open", func(t *testing.T) {
		m := lonely(fleet.OnErrorOpen, 1, 0)
		a := m.Reserve(k, r, 60, time.Now())
		m.Settle(a.Ticket, 10)
		if q := m.question(claimOf(k, r, 1)); q.states.tokens.untold != 10 {
			t.Errorf("%d tokens are to be told, want 10", q.states.tokens.untold)
		}
	})
	t.Run("admitted by the server", func(t *testing.T) {
		m := lonely(fleet.OnErrorLocal, 1, 0)
		c := claimOf(k, r, 60)
		hear(m, c, admission.ReasonAdmitted, 0, 60)
		ticket := admission.Ticket{Key: k, Rates: r, Cost: 60, End: time.Unix(0, end(c.key.at(c.now).tokens, r.Tokens.Window))}
		m.Settle(ticket, 10)
		if b := m.Reserve(k, r, 90, time.Now()); !b.Admitted || b.Tokens.Remaining != 0 {
			t.Errorf("%+v, want the 50 tokens back", b)
		}
		if c := m.Counters(); c.Dropped != 1 {
			t.Errorf("%+v, want the server's settlement dropped and counted", c)
		}
		if q := m.question(claimOf(k, r, 1)); q.seen.tokens.used != 10 || q.states.tokens.untold != 90 {
			t.Errorf("%+v, want 10 tokens seen and 90 to be told", q)
		}
	})
}

func TestSettlingMoreThanThereIsEndsAtNothing(t *testing.T) {
	k, r := client("a"), admission.Rates{Requests: per(10, time.Hour), Tokens: per(100, time.Hour)}
	m := NewEmbedded()
	a := m.Reserve(k, r, 10, start)
	expect(t, a, admission.ReasonAdmitted, 9)
	for range 3 {
		m.Settle(a.Ticket, 0)
	}
	b := m.Reserve(k, r, 100, start)
	expect(t, b, admission.ReasonAdmitted, 8)
	if b.Tokens.Remaining != 0 || b.Ticket.End != a.Ticket.End {
		t.Errorf("%+v, want all tokens of the window taken", b)
	}
}

func TestServersTokensDoNotFallBelowNothing(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(10, calm()), Tokens: per(100, calm())}
	a := m.Reserve(k, r, 10, time.Now())
	expect(t, a, admission.ReasonAdmitted, 9)
	for range 3 {
		m.Settle(a.Ticket, 0)
	}
	eventually(t, "all is settled", func() bool { return m.Counters().Settled == 3 })
	b := m.Reserve(k, r, 100, time.Now())
	expect(t, b, admission.ReasonAdmitted, 8)
	if b.Tokens.Remaining != 0 || b.Local || m.Counters().Clamps != 0 {
		t.Errorf("%+v, %+v: want all tokens of the window taken, by the server's count", b, m.Counters())
	}
}

// TestRequestsThatRunOutMeanwhileGiveTheirTokensBack has two goroutines take the
// last request at once, many times: whoever loses it has taken tokens already.
func TestRequestsThatRunOutMeanwhileGiveTheirTokensBack(t *testing.T) {
	const rounds = 30_000
	m := NewEmbedded()
	r := admission.Rates{Requests: per(2, time.Hour), Tokens: per(1000, time.Hour)}
	keys := make([]admission.LimitKey, rounds)
	for i := range keys {
		keys[i] = client(strconv.Itoa(i))
		m.Reserve(keys[i], r, 0, start) // one of two is left
	}
	var at [2]atomic.Int64 // the round each is in
	var all sync.WaitGroup
	for who := range at {
		all.Go(func() {
			for i, k := range keys {
				at[who].Store(int64(i))
				for at[1-who].Load() < int64(i) { // meet
				}
				m.Reserve(k, r, 10, start)
			}
			at[who].Store(rounds)
		})
	}
	all.Wait()
	for i, k := range keys {
		if a := m.Reserve(k, r, 0, start); a.Requests.Remaining != 0 || a.Tokens.Remaining != 990 {
			t.Fatalf("round %d: %+v, want one request of 10 tokens admitted", i, a)
		}
	}
}

// TestWhatIsToldWithARefusedRequestIsKept: the server refuses by what it is told.
func TestWhatIsToldWithARefusedRequestIsKept(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(10, calm()), Tokens: per(100, calm())}
	for range 6 {
		m.Reserve(k, r, 5, time.Now())
	}
	var version int64
	ask := func(told counts) answer {
		t.Helper()
		c := claimOf(k, r, 1)
		q := &question{b: c.b, cost: 1}
		q.count, q.ledger = c.key.redisNames(1, false)
		version++
		q.states = statement{
			account: 1, epoch: 1, version: version,
			requests: stated{end: told.requests.end, total: told.requests.used},
			tokens:   stated{end: told.tokens.end, total: told.tokens.used},
		}
		ans, err := q.ask(t.Context(), m.link.Load().client)
		if err != nil {
			t.Fatal(err)
		}
		return ans
	}
	first := ask(counts{})
	if first.reason != admission.ReasonAdmitted || first.requests.used != 7 {
		t.Fatalf("%+v", first)
	}
	old := counts{requests: count{end: first.requests.end - 1000, used: 3}, tokens: count{end: first.tokens.end - 1000, used: 50}}
	if ans := ask(old); ans.reason != admission.ReasonAdmitted || ans.requests.used != 8 || ans.tokens.used != 32 {
		t.Errorf("%+v after being told of windows that are over, want 8 requests and 32 tokens used", ans)
	}
	told := counts{requests: count{end: first.requests.end, used: 4}, tokens: count{end: first.tokens.end, used: 9}}
	for _, c := range []counts{told, told} {
		if ans := ask(c); ans.reason != admission.ReasonRequests || ans.requests.used != 12 || ans.tokens.used != 41 {
			t.Errorf("%+v, want it refused, with 12 requests and 41 tokens used", ans)
		}
	}
	// The same of tokens alone.
	k, r = client("b"), admission.Rates{Tokens: per(100, calm())}
	first = ask(counts{})
	told = counts{tokens: count{end: first.tokens.end, used: 99}}
	for _, c := range []counts{told, told} {
		if ans := ask(c); ans.reason != admission.ReasonTokens || ans.tokens.used != 100 {
			t.Errorf("%+v, want it refused, with 100 tokens used", ans)
		}
	}
}

// TestCountsExpireWithTheirWindows: a client's keys live as long as its longer
// window, no longer.
func TestCountsExpireWithTheirWindows(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	long := calm()
	for i, r := range []admission.Rates{
		requests(10, long), {Tokens: per(100, long)},
		{Requests: per(10, long), Tokens: per(100, time.Second)}, {Requests: per(10, time.Second), Tokens: per(100, long)},
	} {
		k := client(fmt.Sprint(i))
		a := m.Reserve(k, r, 10, time.Now())
		for _, settle := range []bool{false, true} {
			if settle {
				before := m.Counters().Settled
				m.Settle(a.Ticket, 5)
				if a.Ticket.End.IsZero() {
					continue // no tokens to settle
				}
				eventually(t, "it is settled", func() bool { return m.Counters().Settled > before })
			}
			count, ledger := claimOf(k, r, 0).key.redisNames(m.owner, false)
			for _, key := range []string{count, ledger} {
				left, err := strconv.ParseInt(s.MustDo(t, "PTTL", key), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				// calm leaves three minutes of the window, of which the test takes a part.
				if d := time.Duration(left) * time.Millisecond; d < time.Minute || d > long {
					t.Errorf("%+v, settled %v: %s lives for %v of its window of %v", r, settle, key, d, long)
				}
			}
		}
	}
}

// TestLogNamesTheCauseOfAFrozenServer: many wait when the connection is given up,
// and what they see then is no cause.
func TestLogNamesTheCauseOfAFrozenServer(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: time.Second}, 1)[0]
	up(t, m)
	s.Pause()
	var all sync.WaitGroup
	for i := range maxAsking / 2 {
		all.Go(func() {
			time.Sleep(time.Duration(i) * 4 * time.Millisecond) // most still wait when the first are late
			m.Reserve(client(fmt.Sprint(i)), requests(1e6, calm()), 0, time.Now())
		})
	}
	all.Wait()
	down(t, m, nil)
	eventually(t, "it is told", func() bool { return m.log.count("redis does not answer") == 1 })
	if line := m.log.String(); !strings.Contains(line, context.DeadlineExceeded.Error()) || strings.Contains(line, "closed") {
		t.Errorf("a frozen server is told as\n%s", line)
	}
	s.Resume()
	up(t, m)
}

func TestLogSaysWhatBecomesOfRequests(t *testing.T) {
	for _, row := range []struct {
		onError fleet.OnError
		want    string
	}{
		{0, "limits are counted without it (onError: local)"},
		{fleet.OnErrorLocal, "limits are counted without it (onError: local)"},
		{fleet.OnErrorOpen, "nothing is limited (onError: open)"},
		{fleet.OnErrorClosed, "limited requests are refused (onError: closed)"},
	} {
		m := replicas(t, fleet.Redis{Address: "unix:" + filepath.Join(t.TempDir(), "absent"), OnError: row.onError}, 1)[0]
		eventually(t, "it is told", func() bool { return m.log.count("redis does not answer") == 1 })
		line := m.log.String()
		if !strings.Contains(line, row.want) || strings.Contains(line, "counted") != strings.Contains(row.want, "counted") {
			t.Errorf("onError %v: %s", row.onError, line)
		}
	}
}
