package ratelimit

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
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

// patient is a deadline that a loaded machine keeps.
const patient = 20 * time.Second

// replica is a limiter that runs, with what it logged.
type replica struct {
	*Redis
	log lockedBuffer
}

// replicas runs n limiters against one server until the test ends.
func replicas(t *testing.T, r fleet.Redis, n int) []*replica {
	t.Helper()
	r.Replicas = n
	if r.Deadline == 0 {
		r.Deadline = patient
	}
	all := make([]*replica, n)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range all {
		all[i] = &replica{}
		all[i].Redis = NewRedis(Options{Redis: r, Shard: i, Log: slog.New(slog.NewTextHandler(&all[i].log, nil))})
		running.Go(func() { _ = all[i].Run(ctx) }) // returns nil
	}
	t.Cleanup(func() {
		cancel()
		running.Wait()
		if t.Failed() {
			for i, m := range all {
				t.Logf("replica %d: %+v\n%s", i, m.Counters(), m.log.String())
			}
		}
	})
	return all
}

func up(t *testing.T, all ...*replica) {
	t.Helper()
	for _, m := range all {
		eventually(t, "the server is asked", func() bool { return m.Counters().Up })
	}
}

// down waits until a breaker is open, asking meanwhile if need be.
func down(t *testing.T, m *replica, ask func()) {
	t.Helper()
	eventually(t, "the server is not asked", func() bool {
		if ask != nil {
			ask()
		}
		return !m.Counters().Up
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not seen in a minute", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// calm is a window that does not end while a test runs.
func calm() time.Duration {
	for _, w := range []time.Duration{5 * time.Hour, 7 * time.Hour, 11 * time.Hour} {
		if w-time.Duration(time.Now().UnixNano()%int64(w)) > 3*time.Minute {
			return w
		}
	}
	return 13 * time.Hour
}

// ledger keeps the remaining values of admitted requests.
type ledger struct {
	mu   sync.Mutex
	left map[int64]int
}

func (l *ledger) add(a admission.Reservation) {
	if !a.Admitted {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left == nil {
		l.left = map[int64]int{}
	}
	l.left[a.Requests.Remaining]++
}

// admitted checks that no value was told twice and returns how many there are.
func (l *ledger) admitted(t *testing.T) int {
	t.Helper()
	for left, times := range l.left {
		if times > 1 {
			t.Errorf("%d admitted requests were told that %d remain", times, left)
		}
	}
	return len(l.left)
}

func TestReplicasTogetherAdmitExactlyTheLimit(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address()}, 3)
	up(t, all...)
	k, r := client("a"), admission.Rates{Requests: per(500, calm()), Tokens: per(1_000_000, calm())}
	var told ledger
	var wg sync.WaitGroup
	for _, m := range all {
		for range 8 {
			wg.Go(func() {
				last := int64(1 << 60)
				for range 40 {
					a := m.Reserve(k, r, 10, time.Now())
					told.add(a)
					if a.Admitted {
						if a.Requests.Remaining >= last || a.Local || a.Requests.Limit != 500 || a.Requests.Reset <= 0 {
							t.Errorf("after %d: %+v", last, a)
						}
						last = a.Requests.Remaining
						m.Settle(a.Ticket, 4)
					} else if a.Reason != admission.ReasonRequests || a.Requests.Remaining != 0 {
						t.Errorf("refused with %+v", a)
					}
				}
			})
		}
	}
	wg.Wait()
	if got := told.admitted(t); got != 500 {
		t.Errorf("%d admitted, want 500", got)
	}
	var settled uint64
	for _, m := range all {
		c := m.Counters()
		if c.Local != 0 || c.Errors != 0 || c.Clamps != 0 {
			t.Errorf("%+v", c)
		}
		eventually(t, "all settlements are sent", func() bool { return len(m.settles) == 0 })
		settled += m.Counters().Settled
	}
	// Refused requests took no tokens, and each admitted one gave back 6 of 10.
	eventually(t, "settled tokens", func() bool {
		return all[0].Reserve(client("a"), r, 0, time.Now()).Tokens.Remaining == 1_000_000-500*4
	})
}

func TestPartsOfALimitAddUpToIt(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 1000} {
		for _, limit := range []int64{0, 1, 2, 3, 10, 999, 1e12} {
			var sum int64
			for shard := range n {
				m := &Redis{redis: fleet.Redis{Replicas: n}, shard: int64(shard)}
				sum += m.share(limit)
			}
			if sum != limit {
				t.Errorf("%d replicas' parts of %d add up to %d", n, limit, sum)
			}
		}
	}
}

func TestWithoutRedisReplicasAdmitDisjointParts(t *testing.T) {
	all := replicas(t, fleet.Redis{Address: "unix:" + filepath.Join(t.TempDir(), "absent")}, 3)
	k, r := client("a"), requests(100, calm())
	total := 0
	for _, m := range all {
		var told ledger
		for range 60 {
			a := m.Reserve(k, r, 0, time.Now())
			told.add(a)
			if !a.Local {
				t.Fatalf("%+v", a)
			}
		}
		total += told.admitted(t)
	}
	if total != 100 {
		t.Errorf("%d admitted, want 100", total)
	}
	for _, m := range all {
		eventually(t, "it is told", func() bool { return m.log.count("redis does not answer") == 1 })
	}
}

func TestKilledServerIsReplacedByPartsAndUsedAgain(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address()}, 2)
	up(t, all...)
	k, r := client("a"), requests(100, calm())
	admitted := make([]int, len(all))
	reserve := func(i int) admission.Reservation {
		a := all[i].Reserve(k, r, 0, time.Now())
		if a.Admitted {
			admitted[i]++
		}
		return a
	}
	for range 20 {
		for i := range all {
			if a := reserve(i); a.Local {
				t.Fatalf("%+v", a)
			}
		}
	}
	s.Kill()
	for i := range all {
		for range 40 {
			if a := reserve(i); !a.Local {
				t.Fatalf("a dead server answered: %+v", a)
			}
		}
		if admitted[i] != 50 {
			t.Errorf("replica %d admitted %d before and after, want its part, 50", i, admitted[i])
		}
	}
	for _, m := range all {
		down(t, m, nil)
	}
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	up(t, all...)
	// The server knows nothing; each replica tells what it saw and what it did.
	for range 40 {
		for i := range all {
			reserve(i)
		}
	}
	if got := admitted[0] + admitted[1]; got < 100 || got > 130 {
		t.Errorf("%d admitted in one window of 100 in which the server died", got)
	}
	if a := all[0].Reserve(k, r, 0, time.Now()); a.Local || a.Reason != admission.ReasonRequests {
		t.Errorf("%+v", a)
	}
	for _, m := range all {
		if m.log.count("redis does not answer") != 1 || m.log.count("redis counts the limits") != 2 {
			t.Errorf("not one line for each transition:\n%s", m.log.String())
		}
		if c := m.Counters(); c.Connects != 2 {
			t.Errorf("%+v", c)
		}
	}
	if all[0].Counters().Clamps+all[1].Counters().Clamps == 0 {
		t.Error("the loss was not counted")
	}
}

func TestWhatWasAdmittedAloneIsToldOnce(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(1000, calm())}
	last := m.Reserve(k, r, 5, time.Now())
	expect(t, last, admission.ReasonAdmitted, 99)
	s.Kill()
	for range 9 {
		a := m.Reserve(k, r, 5, time.Now())
		if !a.Local || !a.Admitted {
			t.Fatalf("%+v", a)
		}
	}
	down(t, m, nil)
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	up(t, m)
	for left := int64(89); left > 85; left-- {
		a := m.Reserve(k, r, 5, time.Now())
		expect(t, a, admission.ReasonAdmitted, left)
		if want := 5*left + 500; a.Tokens.Remaining != want {
			t.Fatalf("%d tokens left, want %d", a.Tokens.Remaining, want)
		}
	}
}

func TestFrozenServerCostsOneDeadlineAndThenNothing(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: time.Second}, 1)[0]
	up(t, m)
	k, r := client("a"), requests(1_000_000, calm())
	expect(t, m.Reserve(k, r, 0, time.Now()), admission.ReasonAdmitted, 999_999)
	s.Pause()
	before := m.Counters()
	const callers = 2000
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			if a := m.Reserve(k, r, 0, time.Now()); !a.Local || !a.Admitted {
				t.Errorf("%+v", a)
			}
		})
	}
	wg.Wait() // with a frozen server this is the proof that nobody waits for it
	c := m.Counters()
	// Whoever was let to ask was late. No more than 256 were in at once; each
	// that came back made room until the breaker was open.
	const bound = 256 + tripAfter - 1
	if asked := c.Calls - before.Calls; asked < tripAfter || asked > bound || c.Errors-before.Errors != asked {
		t.Errorf("of %d callers %d asked a frozen server, bound %d: %+v", callers, asked, bound, c)
	}
	if c.Up {
		t.Error("it is still asked")
	}
	for range 1000 {
		m.Reserve(k, r, 0, time.Now())
	}
	if after := m.Counters(); after.Calls != c.Calls || after.Local != before.Local+callers+1000 {
		t.Errorf("it was asked again: %+v, then %+v", c, after)
	}
	s.Resume()
	up(t, m)
	if a := m.Reserve(k, r, 0, time.Now()); a.Local {
		t.Errorf("%+v", a)
	}
}

// TestServerSlowerThanTheDeadlineIsNotUsed has every answer come late.
func TestServerSlowerThanTheDeadlineIsNotUsed(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	var late atomic.Bool
	late.Store(true)
	address := delayed(t, s.Socket, func() {
		if late.Load() {
			time.Sleep(60 * time.Millisecond)
		}
	})
	m := replicas(t, fleet.Redis{Address: address, Deadline: 40 * time.Millisecond}, 1)[0]
	const cause = "its answer was later than 40ms (serve.redis.deadline)"
	eventually(t, "it is told", func() bool { return m.log.count("redis does not answer") == 1 })
	if m.log.count(cause) != 1 {
		t.Errorf("%s; want %q in it", m.log.String(), cause)
	}
	if a := m.Reserve(client("a"), requests(10, calm()), 0, time.Now()); !a.Local || m.Counters().Connects != 0 {
		t.Errorf("%+v, %+v", a, m.Counters())
	}
	late.Store(false)
	up(t, m)
	late.Store(true)
	k, r := client("b"), requests(1000, calm())
	for range 10 {
		if a := m.Reserve(k, r, 0, time.Now()); !a.Admitted {
			t.Errorf("%+v", a)
		}
	}
	down(t, m, nil)
	if c := m.Counters(); c.Timeouts < tripAfter || c.Calls > tripAfter {
		t.Errorf("%+v", c)
	}
	if err := *m.lastError.Load(); !strings.Contains(err.Error(), cause) {
		t.Errorf("%v; want %q in it", err, cause)
	}
	lost, failures := m.lost.Load(), m.Counters().Failures
	eventually(t, "probes are late too", func() bool { return m.Counters().Failures > failures+2 })
	if now := m.lost.Load(); lost == 0 || now != lost {
		t.Errorf("lost %d ns after it was made, and %d after some probes; want it lost once", lost, now)
	}
	late.Store(false)
	up(t, m)
}

// delayed passes connections on to a Unix socket and calls wait before each piece
// of an answer.
func delayed(t *testing.T, socket string, wait func()) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pass(t, l, socket, wait)
	return l.Addr().String()
}

func TestFlappingServerNeverBlocksAndDoesNotFillTheLog(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address(), Deadline: time.Second}, 2)
	up(t, all...)
	k, r := client("a"), admission.Rates{Requests: per(1e9, calm()), Tokens: per(1e12, calm())}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, m := range all {
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					a := m.Reserve(k, r, 10, time.Now())
					if !a.Admitted {
						t.Errorf("%+v", a)
						return
					}
					m.Settle(a.Ticket, 8)
				}
			})
		}
	}
	const turns = 3
	for i := range turns {
		if i%2 == 0 {
			s.Kill()
		} else {
			s.Pause()
		}
		for _, m := range all {
			down(t, m, nil)
		}
		if i%2 == 0 {
			if err := s.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		} else {
			s.Resume()
		}
		up(t, all...)
	}
	cancel()
	wg.Wait()
	for _, m := range all {
		downs, ups := m.log.count("redis does not answer"), m.log.count("redis counts the limits")
		if c := m.Counters(); downs < 1 || downs > turns || ups != downs+1 || c.Connects < turns+1 || c.Failures < turns {
			t.Errorf("%d lines of going and %d of coming back for %d turns: %+v", downs, ups, turns, c)
		}
	}
}

func TestStartsWithoutRedisAndFindsItLater(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{TCP: true})
	s.Kill()
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	k, r := client("a"), requests(10, calm())
	if a := m.Reserve(k, r, 0, time.Now()); !a.Local || !a.Admitted {
		t.Fatalf("%+v", a)
	}
	eventually(t, "it is told", func() bool { return m.log.count("redis does not answer") == 1 })
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	up(t, m)
	expect(t, m.Reserve(k, r, 0, time.Now()), admission.ReasonAdmitted, 8)
}

// TestAnAbsentServerIsNotStormed counts the connections that a server which hangs
// up at once gets, while requests come all the time.
func TestAnAbsentServerIsNotStormed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted atomic.Int64
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			c.Close()
		}
	})
	t.Cleanup(func() { l.Close(); running.Wait() })
	m := replicas(t, fleet.Redis{Address: l.Addr().String()}, 1)[0]
	k, r := client("a"), requests(1e9, calm())
	for accepted.Load() < 3 {
		if a := m.Reserve(k, r, 0, time.Now()); !a.Local {
			t.Fatalf("%+v", a)
		}
	}
	c := m.Counters()
	// The third connection comes 450 ms after the first at the earliest.
	if c.Local < 1000 || c.Calls != 0 || accepted.Load() > 3 {
		t.Errorf("%d connections, %+v", accepted.Load(), c)
	}
	if n := m.log.count("\n"); n != 1 {
		t.Errorf("%d lines of one absence:\n%s", n, m.log.String())
	}
}

func TestReplicaWhoseClockIsWrongKeepsTheServersWindows(t *testing.T) {
	for _, off := range []time.Duration{-3 * time.Hour, 3 * time.Hour} {
		s := redisbin.Start(t, redisbin.Config{})
		m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
		up(t, m)
		k, r := client("a"), requests(2, time.Minute)
		wrong := time.Now().Add(off)
		for range 3 {
			if a := m.Reserve(k, r, 0, wrong); a.Local {
				t.Fatalf("%+v", a)
			}
		}
		s.Kill()
		down(t, m, func() { m.Reserve(k, r, 0, wrong) })
		if a := m.Reserve(k, r, 0, wrong.Add(2*time.Minute)); !a.Local || !a.Admitted || a.Requests.Reset > time.Minute {
			t.Errorf("clock %v off: a new window without the server: %+v", off, a)
		}
	}
}

func TestWhatOthersWroteUnderAKeyIsReplaced(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	for i, command := range [][]string{{"SET", "", "what is this"}, {"RPUSH", "", "1"}, {"SET", "", "1 2 3"}} {
		k, r := client(fmt.Sprint(i)), admission.Rates{Requests: per(10, calm()), Tokens: per(10, calm())}
		command[1] = name(k, r)
		s.MustDo(t, command...)
		a := m.Reserve(k, r, 1, time.Now())
		expect(t, a, admission.ReasonAdmitted, 9)
		m.Settle(a.Ticket, 0)
		expect(t, m.Reserve(k, r, 1, time.Now()), admission.ReasonAdmitted, 8)
	}
	if c := m.Counters(); c.Errors != 0 || c.Local != 0 {
		t.Errorf("%+v", c)
	}
}

func TestWithoutRunItCountsAlone(t *testing.T) {
	m := NewRedis(Options{Redis: fleet.Redis{Address: "127.0.0.1:1"}})
	expect(t, m.Reserve(client("a"), requests(10, calm()), 0, time.Now()), admission.ReasonAdmitted, 9)
}

// TestTheServerCountsWholeWindowsAlike: a request whose estimate alone is more than a
// window has takes all of one, of the server as of this process, and gives back what
// it did not use.
func TestTheServerCountsWholeWindowsAlike(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	server := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, server)
	for name, limiter := range map[string]admission.Limiter{"server": server, "embedded": NewEmbedded()} {
		g := admission.New(admission.Options{Limiter: limiter, Config: &fleet.Config{
			Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)}},
			Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive, Usage: true}},
			Limits: []fleet.Limit{{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: per(15_000, calm())}},
		}})
		ask := func(id string, input, least fleet.Tokens) admission.Verdict {
			v := g.Admit(&admission.Ask{ID: id, Route: "r", Pool: "p", Client: client("a").Client, Level: 3, Input: input, InputAtLeast: least, Output: 100})
			if v.Standing.Local || v.Standing.Tokens.Limit != 15_000 {
				t.Errorf("%s: %+v", name, v.Standing)
			}
			return v
		}
		if v := ask("long", 17_857, 14_901); v.Reason != admission.ReasonTooMany {
			t.Errorf("%s: %+v of a request that no window has room for", name, v)
		}
		if v := ask("long", 17_857, 14_900); !v.Admitted || v.Standing.Tokens.Remaining != 0 {
			t.Fatalf("%s: %+v; want the whole window taken", name, v)
		}
		if v := ask("other", 17_857, 100); v.Reason != admission.ReasonTokens {
			t.Errorf("%s: %+v while the window is taken", name, v)
		}
		g.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: "long", Code: 200, Cause: fleet.CauseOK, Usage: fleet.Usage{Known: true, Input: 10_000, Output: 100}})
		eventually(t, "it is settled", func() bool { return name == "embedded" || server.Counters().Settled > 0 })
		if v := ask("short", 400, 100); !v.Admitted || v.Standing.Tokens.Remaining != 15_000-10_100-500 {
			t.Errorf("%s: %+v; want 4400 tokens left", name, v)
		}
	}
}

func TestOnErrorOpenAndClosed(t *testing.T) {
	for _, row := range []struct {
		onError fleet.OnError
		reason  admission.Reason
	}{
		{fleet.OnErrorOpen, admission.ReasonAdmitted},
		{fleet.OnErrorClosed, admission.ReasonLimiterDown},
	} {
		m := NewRedis(Options{Redis: fleet.Redis{OnError: row.onError}})
		k, r := client("a"), admission.Rates{Requests: per(1, calm()), Tokens: per(10, calm())}
		for range 3 {
			a := m.Reserve(k, r, 5, time.Now())
			if a.Reason != row.reason || a.Admitted != (row.onError == fleet.OnErrorOpen) || !a.Local {
				t.Errorf("%+v", a)
			}
			if a.Requests != (admission.Quota{}) || a.Tokens != (admission.Quota{}) {
				t.Errorf("it tells of quotas that nobody counts: %+v", a)
			}
		}
		if a := m.Reserve(k, r, 11, time.Now()); a.Reason != admission.ReasonTooMany {
			t.Errorf("%+v", a)
		}
	}
}

func TestWrongPasswordIsToldWithoutIt(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{Password: "correct-horse"})
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("battery-staple\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := replicas(t, fleet.Redis{Address: s.Address(), Password: fleet.Secret("file:" + file)}, 1)[0]
	eventually(t, "the refusal is told", func() bool { return strings.Contains(m.log.String(), "WRONGPASS") })
	if strings.Contains(m.log.String(), "battery") {
		t.Errorf("the password stands in the log:\n%s", m.log.String())
	}
	if err := os.WriteFile(file, []byte("correct-horse\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	up(t, m)
	if strings.Contains(m.log.String(), "horse") {
		t.Errorf("the password stands in the log:\n%s", m.log.String())
	}
	t.Setenv("FAIRLEAD_TEST_REDIS_PASSWORD", "correct-horse")
	up(t, replicas(t, fleet.Redis{Address: s.Address(), Password: "env:FAIRLEAD_TEST_REDIS_PASSWORD"}, 1)...)
}

func TestAUserOfItsOwnNeedsFewCommands(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	s.MustDo(t, "ACL", "SETUSER", "fairlead", "on", ">sesame", "~fairlead:limit:*",
		"+get", "+set", "+time", "+eval", "+evalsha", "+script|load", "+select")
	t.Setenv("FAIRLEAD_TEST_REDIS_PASSWORD", "sesame")
	m := replicas(t, fleet.Redis{Address: s.Address(), Username: "fairlead", Password: "env:FAIRLEAD_TEST_REDIS_PASSWORD", Database: 2}, 1)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(10, calm()), Tokens: per(100, calm())}
	a := m.Reserve(k, r, 10, time.Now())
	expect(t, a, admission.ReasonAdmitted, 9)
	m.Settle(a.Ticket, 1)
	eventually(t, "it is settled", func() bool { return m.Counters().Settled == 1 })
	if size := s.MustDo(t, "DBSIZE"); size != "0" {
		t.Errorf("%s keys in database 0, want them in 2", size)
	}
}

func TestSecretsThatCannotBeRead(t *testing.T) {
	for _, row := range []struct{ secret, fault string }{
		{"env:FAIRLEAD_TEST_NOT_SET", "FAIRLEAD_TEST_NOT_SET is not set"},
		{"file:/absent/password", "/absent/password"},
		{"swordfish", "accepted: env:NAME or file:/path"},
	} {
		_, err := readSecret(fleet.Secret(row.secret))
		if err == nil || !strings.Contains(err.Error(), row.fault) || strings.Contains(err.Error(), "swordfish") {
			t.Errorf("%s: got %v", row.secret, err)
		}
	}
}

func TestScriptIsLoadedAnewAfterAFlush(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(10, calm()), Tokens: per(100, calm())}
	a := m.Reserve(k, r, 10, time.Now())
	expect(t, a, admission.ReasonAdmitted, 9)
	s.MustDo(t, "SCRIPT", "FLUSH")
	expect(t, m.Reserve(k, r, 10, time.Now()), admission.ReasonAdmitted, 8)
	s.MustDo(t, "SCRIPT", "FLUSH")
	m.Settle(a.Ticket, 0)
	eventually(t, "it is settled", func() bool { return m.Counters().Settled == 1 })
	if got := m.Reserve(k, r, 0, time.Now()); got.Tokens.Remaining != 90 || got.Local || m.Counters().Errors != 0 {
		t.Errorf("%+v, %+v", got, m.Counters())
	}
}

// TestLostCountsAreRestored has the server forget all, as a restart or a failover
// to an empty replica does, and then lose the last increments alone.
func TestLostCountsAreRestored(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address()}, 2)
	up(t, all...)
	k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(1000, calm())}
	last := []int64{1 << 60, 1 << 60}
	told := map[int64]int{}
	round := func() {
		for range 10 {
			for i, m := range all {
				a := m.Reserve(k, r, 1, time.Now())
				if !a.Admitted || a.Requests.Remaining >= last[i] {
					t.Errorf("replica %d: %+v after %d", i, a, last[i])
				}
				last[i] = a.Requests.Remaining
				told[last[i]]++
			}
		}
	}
	round()
	kept := s.MustDo(t, "GET", name(k, r))
	round()
	s.MustDo(t, "FLUSHALL")
	round()
	s.MustDo(t, "SET", name(k, r), kept)
	round()
	// The replica that asks first after a loss does not know of the other's last
	// request: that value is told twice, and no other.
	if len(told) < 78 {
		t.Errorf("80 requests were told %d different values, want 78 at least", len(told))
	}
	a := all[1].Reserve(k, r, 1, time.Now())
	expect(t, a, admission.ReasonAdmitted, last[1]-1)
	if clamps := all[0].Counters().Clamps + all[1].Counters().Clamps; clamps < 2 {
		t.Errorf("%d clamps counted, want one for each loss at least", clamps)
	}
	if left := a.Tokens.Remaining; left < 919 || left > 960 { // the second loss is not seen in tokens
		t.Errorf("%d tokens left", left)
	}
}

func name(k admission.LimitKey, r admission.Rates) string {
	id := key{limit: k.Limit, client: k.Client, requests: r.Requests.Window, tokens: r.Tokens.Window}
	return string(id.appendName(nil, -1, false))
}

func TestServersWindowBeginsAnew(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	k, r := client("a"), requests(3, time.Second)
	windows := map[int64]map[int64]int{}
	for len(windows) < 3 {
		a := m.Reserve(k, r, 0, time.Now())
		if !a.Admitted {
			if a.Reason != admission.ReasonRequests || a.Requests.Reset <= 0 || a.Requests.Reset > time.Second {
				t.Fatalf("%+v", a)
			}
			time.Sleep(5 * time.Millisecond)
			continue
		}
		value := s.MustDo(t, "GET", name(k, r))
		end, err := strconv.ParseInt(strings.Fields(value + " 0")[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if end == 0 {
			continue // over before it was read
		}
		if windows[end] == nil {
			windows[end] = map[int64]int{}
		}
		windows[end][a.Requests.Remaining]++
		if windows[end][a.Requests.Remaining] > 1 {
			t.Errorf("%d was told twice in the window that ends at %d", a.Requests.Remaining, end)
		}
	}
}

func TestLateSettlementsChangeNothing(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Tokens: per(100, calm())}
	a := m.Reserve(k, r, 60, time.Now())
	a.Ticket.End = a.Ticket.End.Add(-calm())
	m.Settle(a.Ticket, 0)
	eventually(t, "it is refused", func() bool { return m.Counters().Dropped == 1 })
	if n := m.Counters().Settled; n != 0 {
		t.Errorf("%d settled", n)
	}
	if got := m.Reserve(k, r, 0, time.Now()).Tokens.Remaining; got != 40 {
		t.Errorf("%d left, want 40", got)
	}
}

func TestSettlementsBeyondTheQueueAreDroppedAndCounted(t *testing.T) {
	m := NewRedis(Options{})
	m.link.Store(&link{}) // as if it were up, with a worker that sends nothing
	k, r := client("a"), admission.Rates{Tokens: per(1e9, calm())}
	ticket := admission.Ticket{Key: k, Rates: r, Cost: 10, End: time.Now().Add(time.Hour)}
	for range maxSettling + 7 {
		m.Settle(ticket, 1)
	}
	if c := m.Counters(); c.Dropped != 7 {
		t.Errorf("%+v", c)
	}
}

func TestNamesOfCountsKeepAClientOnOneNodeOfACluster(t *testing.T) {
	k := key{limit: "per {team}", client: admission.Client{0xab, 0xcd}, requests: time.Minute, tokens: 24 * time.Hour}
	const want = "fairlead:limit:{abcd0000000000000000000000000000}:60:86400:per {team}"
	const wantLedger = "fairlead:limit:{abcd0000000000000000000000000000}/17:60:86400:per {team}"
	if count, ledger := k.redisNames(17, false); count != want || ledger != wantLedger {
		t.Errorf("got %s and %s, want %s and %s", count, ledger, want, wantLedger)
	}
	const wantShared = "fairlead:limit:{shared:11}:60:86400:per {team}"
	const wantSharedLedger = "fairlead:limit:{shared:11}/17:60:86400:per {team}"
	if count, ledger := k.redisNames(17, true); count != wantShared || ledger != wantSharedLedger {
		t.Errorf("got %s and %s, want %s and %s", count, ledger, wantShared, wantSharedLedger)
	}
}

func TestRunsOnACluster(t *testing.T) {
	nodes, _ := clusterOf(t, 1)
	m := replicas(t, fleet.Redis{Address: nodes[0].Address()}, 1)[0]
	up(t, m)
	for i := range 20 {
		k, r := client(fmt.Sprint(i)), admission.Rates{Requests: per(10, calm()), Tokens: per(100, calm())}
		a := m.Reserve(k, r, 10, time.Now())
		expect(t, a, admission.ReasonAdmitted, 9)
		m.Settle(a.Ticket, 20)
	}
	eventually(t, "all is settled", func() bool { return m.Counters().Settled == 20 })
	if c := m.Counters(); c.Local != 0 || c.Errors != 0 {
		t.Errorf("%+v", c)
	}
}

// clusterOf starts nodes of which the first holds all slots, and returns their ids.
func clusterOf(t *testing.T, n int) (nodes []*redisbin.Server, ids []string) {
	t.Helper()
	for range n {
		s := redisbin.Start(t, redisbin.Config{TCP: true, Lines: []string{"cluster-enabled yes"}})
		nodes, ids = append(nodes, s), append(ids, s.MustDo(t, "CLUSTER", "MYID"))
	}
	slots := []string{"CLUSTER", "ADDSLOTS"}
	for slot := range 16384 {
		slots = append(slots, strconv.Itoa(slot))
	}
	nodes[0].MustDo(t, slots...)
	for _, s := range nodes[1:] {
		port := strconv.Itoa(s.Port)
		nodes[0].MustDo(t, "CLUSTER", "MEET", "127.0.0.1", port, strconv.Itoa(s.Port+10_000))
	}
	for _, s := range nodes {
		eventually(t, "the cluster is formed", func() bool {
			info, err := s.Do("CLUSTER", "INFO")
			return err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprint("cluster_known_nodes:", n))
		})
	}
	return nodes, ids
}

// TestASlotThatMovesIsCountedAllTheSame: of a client that is new, of one whose keys
// have not moved and of those of which one of two has.
func TestASlotThatMovesIsCountedAllTheSame(t *testing.T) {
	nodes, ids := clusterOf(t, 2)
	from, to := nodes[0], nodes[1]
	m := replicas(t, fleet.Redis{Address: from.Address()}, 1)[0]
	up(t, m)
	r := admission.Rates{Requests: per(100, calm()), Tokens: per(1000, calm())}
	keys := map[string]admission.LimitKey{}
	for _, limit := range []string{"new", "has not moved", "the count has", "the ledger has"} {
		keys[limit] = admission.LimitKey{Limit: limit, Client: client("a").Client}
	}
	asked := map[string]int64{}
	ask := func(limit string) {
		t.Helper()
		asked[limit]++
		a := m.Reserve(keys[limit], r, 5, time.Now())
		if !a.Admitted || a.Local || a.Requests.Remaining != 100-asked[limit] || a.Tokens.Remaining != 1000-5*asked[limit] {
			t.Errorf("%s: %+v, want it the server's admission %d", limit, a, asked[limit])
		}
	}
	for limit := range keys {
		if limit != "new" {
			ask(limit)
		}
	}
	slot := from.MustDo(t, "CLUSTER", "KEYSLOT", name(keys["new"], r))
	to.MustDo(t, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
	from.MustDo(t, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
	move := func(key string) {
		from.MustDo(t, "MIGRATE", "127.0.0.1", strconv.Itoa(to.Port), key, "0", "10000")
	}
	ledgerOf := func(limit string) string {
		_, ledger := claimOf(keys[limit], r, 0).key.redisNames(m.owner, false)
		return ledger
	}
	move(name(keys["the count has"], r))
	move(ledgerOf("the ledger has"))
	for range 5 {
		for limit := range keys {
			ask(limit)
		}
	}
	for _, limit := range []string{"has not moved", "the ledger has"} {
		move(name(keys[limit], r))
	}
	for _, limit := range []string{"has not moved", "the count has"} {
		move(ledgerOf(limit))
	}
	for _, s := range []*redisbin.Server{to, from} {
		s.MustDo(t, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])
	}
	for range 2 {
		for limit := range keys {
			m.question(claimOf(keys[limit], r, 5)).end(nil) // never sent: all before it is stated
			ask(limit)
		}
	}
	if c := m.Counters(); c.Errors != 0 || c.Local != 0 || c.Connects != 1 {
		t.Errorf("%+v, want no error", c)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lockedBuffer) count(text string) int { return strings.Count(l.String(), text) }
