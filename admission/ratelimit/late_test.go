package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// lateness is a deadline that a server which runs keeps on a loaded machine, and
// one that is frozen costs a test a little.
const lateness = time.Second

// atOnce reserves n times at once and returns what was admitted, and how many were
// not.
func atOnce(m *replica, k admission.LimitKey, r admission.Rates, cost fleet.Tokens, n int) (admitted []admission.Reservation, refused int) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			a := m.Reserve(k, r, cost, time.Now())
			mu.Lock()
			defer mu.Unlock()
			if a.Admitted {
				admitted = append(admitted, a)
			} else {
				refused++
			}
		})
	}
	all.Wait()
	return admitted, refused
}

// counted is what the server holds of a client's windows.
func counted(t *testing.T, s *redisbin.Server, k admission.LimitKey, r admission.Rates) (requests, tokens int64) {
	t.Helper()
	value := s.MustDo(t, "GET", name(k, r))
	var ends [2]int64
	if n, err := fmt.Sscan(value, &ends[0], &requests, &ends[1], &tokens); n != 4 {
		t.Fatalf("%q: %v", value, err)
	}
	return requests, tokens
}

func TestAFreezeChargesWhatWasAdmittedOnce(t *testing.T) {
	for _, row := range []struct {
		name           string
		rounds, frozen int
	}{
		{"three questions late", 1, 3},
		{"four rounds of four", 4, 4},
		{"a long one", 1, 24},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := redisbin.Start(t, redisbin.Config{})
			m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)[0]
			up(t, m)
			k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(1_000_000, calm())}
			expect(t, m.Reserve(k, r, 10, time.Now()), admission.ReasonAdmitted, 99)
			requests, tokens := int64(1), int64(10)
			for range row.rounds {
				s.Pause()
				admitted, refused := atOnce(m, k, r, 10_000, row.frozen)
				if refused != 0 {
					t.Fatalf("%d refused", refused)
				}
				for _, a := range admitted {
					m.Settle(a.Ticket, 5010)
				}
				down(t, m, nil)
				s.Resume()
				up(t, m)
				requests += int64(row.frozen) + 1
				tokens += 5010*int64(row.frozen) + 10
				a := m.Reserve(k, r, 10, time.Now())
				expect(t, a, admission.ReasonAdmitted, 100-requests)
				if left := 1_000_000 - tokens; a.Tokens.Remaining != left {
					t.Errorf("%d tokens left, want %d", a.Tokens.Remaining, left)
				}
			}
		})
	}
}

// TestRefusedRequestsOfAFreezeCostNothing: the server takes the questions of three
// that their replica refused meanwhile.
func TestRefusedRequestsOfAFreezeCostNothing(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(200_000, calm())}
	expect(t, m.Reserve(k, r, 539, time.Now()), admission.ReasonAdmitted, 99)
	s.Pause()
	if admitted, refused := atOnce(m, k, r, 110_000, 3); refused != 3 {
		t.Fatalf("%+v admitted", admitted)
	}
	down(t, m, nil)
	s.Resume()
	up(t, m)
	a := m.Reserve(k, r, 1, time.Now())
	expect(t, a, admission.ReasonAdmitted, 98)
	if want := int64(200_000 - 540); a.Tokens.Remaining != want {
		t.Errorf("%d tokens left, want %d", a.Tokens.Remaining, want)
	}
}

// TestARefusalKeepsNobodyFromWhatCameBack: late questions of one replica use up the
// limit, another is refused meanwhile, and then they are taken back.
func TestARefusalKeepsNobodyFromWhatCameBack(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)
	up(t, all...)
	a, b := all[0], all[1]
	k, r := client("a"), requests(100, calm())
	var told ledger
	for range 50 {
		told.add(b.Reserve(k, r, 0, time.Now()))
	}
	s.Pause()
	if admitted, refused := atOnce(b, k, r, 0, 60); refused != 60 {
		t.Fatalf("%+v admitted", admitted)
	}
	down(t, b, nil)
	s.Resume()
	up(t, all...)
	expect(t, a.Reserve(k, r, 0, time.Now()), admission.ReasonRequests, 0)
	for m := b; ; {
		x := m.Reserve(k, r, 0, time.Now())
		if x.Local {
			t.Fatalf("%+v", x)
		}
		if !x.Admitted {
			break
		}
		told.add(x)
		if m == a {
			m = b
		} else {
			m = a
		}
	}
	if n := told.admitted(t); n != 100 {
		t.Errorf("%d admitted of 100", n)
	}
	if n := a.Counters().Clamps + b.Counters().Clamps; n != 0 {
		t.Errorf("the server lost counts %d times, by what it was told", n)
	}
}

// TestACountThatIsLostAloneMakesNoRoom: its ledger is still there.
func TestACountThatIsLostAloneMakesNoRoom(t *testing.T) {
	for range 5 {
		if countIsLost(t) {
			return
		}
		t.Log("the connection was given up with the late questions: again")
	}
	t.Error("late questions never reached the server")
}

// countIsLost reports false where the late questions were lost with their connection, and
// there is nothing to see.
func countIsLost(t *testing.T) bool {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(1_000_000, calm())}
	expect(t, m.Reserve(k, r, 10, time.Now()), admission.ReasonAdmitted, 99)
	s.Pause()
	admitted, refused := atOnce(m, k, r, 10_000, 3)
	if refused != 0 {
		t.Fatalf("%d refused", refused)
	}
	for _, a := range admitted {
		m.Settle(a.Ticket, 5010)
	}
	down(t, m, nil)
	s.Resume()
	// The late ones reach it, and are the ledger's before the count is gone.
	for tries := 0; ; tries++ {
		if requests, _ := counted(t, s, k, r); requests == 4 {
			break
		}
		if tries == 50 {
			return false
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.MustDo(t, "DEL", name(k, r))
	up(t, m)
	a := m.Reserve(k, r, 10, time.Now())
	expect(t, a, admission.ReasonAdmitted, 95)
	if want := int64(1_000_000 - 3*5010 - 20); a.Tokens.Remaining != want {
		t.Errorf("%d tokens left, want %d", a.Tokens.Remaining, want)
	}
	return true
}

// TestLateQuestionsWithoutAnOutageCostNothing: two are late, which is no outage,
// and their replica has used up its part.
func TestLateQuestionsWithoutAnOutageCostNothing(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)[0]
	up(t, m)
	k, r := client("a"), admission.Rates{Requests: per(100, calm()), Tokens: per(100_000, calm())}
	const cost = 5020
	var tickets []admission.Ticket
	for range 16 {
		a := m.Reserve(k, r, cost, time.Now())
		if !a.Admitted || a.Local {
			t.Fatalf("%+v", a)
		}
		tickets = append(tickets, a.Ticket)
	}
	s.Pause()
	if admitted, refused := atOnce(m, k, r, cost, 2); refused != 2 {
		t.Fatalf("%+v admitted", admitted)
	}
	s.Resume()
	if !m.Counters().Up {
		t.Fatal("two late questions were an outage")
	}
	for _, ticket := range tickets {
		m.Settle(ticket, 10)
	}
	eventually(t, "all is settled", func() bool { return m.Counters().Settled == 16 })
	a := m.Reserve(k, r, 10, time.Now())
	expect(t, a, admission.ReasonAdmitted, 83)
	if want := int64(100_000 - 17*10); a.Tokens.Remaining != want {
		t.Errorf("%d tokens left, want %d", a.Tokens.Remaining, want)
	}
}

// TestAFlappingServerCountsWhatWasAdmitted: whatever was late, the server's count
// is in the end what two replicas admitted, and the limit is used up.
func TestAFlappingServerCountsWhatWasAdmitted(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	const limit = 100
	all := replicas(t, fleet.Redis{Address: s.Address(), Deadline: 200 * time.Millisecond}, 2)
	up(t, all...)
	k, r := client("a"), admission.Rates{Requests: per(limit, calm()), Tokens: per(1_000_000, calm())}
	admitted := 0
	for range 8 {
		s.Pause()
		for _, m := range all {
			some, _ := atOnce(m, k, r, 1000, 4)
			for _, a := range some {
				m.Settle(a.Ticket, 500)
			}
			admitted += len(some)
			down(t, m, nil)
		}
		s.Resume()
		up(t, all...)
		for range 2 {
			for _, m := range all {
				if a := m.Reserve(k, r, 500, time.Now()); a.Admitted {
					admitted++
				}
			}
		}
	}
	// Until each is refused by the server, which has heard its last word then.
	for _, m := range all {
		for {
			a := m.Reserve(k, r, 500, time.Now())
			if a.Admitted {
				admitted++
			} else if !a.Local {
				break
			}
		}
	}
	requests, tokens := counted(t, s, k, r)
	spare := int64(0) // late questions that were refused alone, after which others were told of less
	for _, m := range all {
		_, ledger := claimOf(k, r, 0).key.redisNames(m.owner, false)
		spare += spareOf(s.MustDo(t, "GET", ledger))
	}
	if requests-spare != int64(admitted) || tokens != 500*int64(admitted) {
		t.Errorf("%d requests less %d of nobody's and %d tokens counted, of %d admitted", requests, spare, tokens, admitted)
	}
	if int64(admitted) < limit-spare {
		t.Errorf("%d admitted of %d", admitted, limit)
	}
}

// TestManyAskersAndShortFreezesAreCountedOnce has answers, late questions and what is
// decided alone meet at every moment.
func TestManyAskersAndShortFreezesAreCountedOnce(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	all := replicas(t, fleet.Redis{Address: s.Address(), Deadline: 20 * time.Millisecond}, 2)
	up(t, all...)
	k, r := client("a"), admission.Rates{Requests: per(1e9, calm()), Tokens: per(1e12, calm())}
	const cost = 10
	var told ledger
	var admitted atomic.Int64
	ask := func(m *replica) admission.Reservation {
		a := m.Reserve(k, r, cost, time.Now())
		if a.Admitted {
			admitted.Add(1)
		}
		if !a.Local {
			told.add(a)
		}
		return a
	}
	ctx, cancel := context.WithCancel(t.Context())
	var askers sync.WaitGroup
	for _, m := range all {
		for range 4 {
			askers.Go(func() {
				for ctx.Err() == nil {
					ask(m)
					time.Sleep(time.Millisecond)
				}
			})
		}
	}
	for range 10 {
		late := all[0].Counters().Timeouts
		s.Pause()
		eventually(t, "a question is late", func() bool {
			c := all[0].Counters()
			return c.Timeouts > late || !c.Up // by one that was late before
		})
		s.Resume()
		up(t, all...)
	}
	cancel()
	askers.Wait()
	for _, m := range all {
		eventually(t, "the last word is heard", func() bool { return !ask(m).Local })
	}
	requests, tokens := counted(t, s, k, r)
	spare := int64(0)
	for _, m := range all {
		_, ledger := claimOf(k, r, 0).key.redisNames(m.owner, false)
		spare += spareOf(s.MustDo(t, "GET", ledger))
	}
	if n := admitted.Load(); requests-spare != n || tokens != cost*n {
		t.Errorf("%d requests less %d of nobody's and %d tokens counted, of %d admitted", requests, spare, tokens, n)
	}
	told.admitted(t)
}
