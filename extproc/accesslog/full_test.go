package accesslog

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// ends tells of the end of a request, of which n attempts began and the last, if
// on is named, was there.
func (s *script) ends(id string, n int, on fleet.EndpointKey) {
	s.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "edge-1", ID: id, Attempt: n, Endpoint: on, At: s.now})
}

func (s *script) starts(id string, on fleet.EndpointKey) {
	s.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "edge-1", ID: id, Attempt: 1, Endpoint: on, At: s.now})
}

// sameShard returns n decision ids whose records lie in one shard.
func (s *script) sameShard(n int) (ids []string) {
	of := s.shardOf(keyOf(decision(0), ""))
	for i := 0; len(ids) < n; i++ {
		if id := decision(i); s.shardOf(keyOf(id, "")) == of {
			ids = append(ids, id)
		}
	}
	return ids
}

// TestOnlyRequestsThatRanAreRemembered: of the others nothing comes late. Envoy
// counts an attempt also where it found no server.
func TestOnlyRequestsThatRanAreRemembered(t *testing.T) {
	for _, id := range []string{id, "7a1e3f0c-8a55-9c3e-8a55-7a1e3f0c8a55"} {
		for _, row := range []struct {
			attempts int
			on       fleet.EndpointKey
			want     bool
		}{
			{0, fleet.EndpointKey{}, false},
			{1, fleet.EndpointKey{}, false},
			{1, a, true},
			{0, a, true},
			{2, fleet.EndpointKey{}, true}, // no server for the second
		} {
			s := newScript(t)
			s.ends(id, row.attempts, row.on)
			if got := s.records.Load() == 1; got != row.want {
				t.Errorf("%s, attempt %d on %v: remembered %v; want %v", id, row.attempts, row.on, got, row.want)
			}
			s.starts(id, b)
			s.expect("a start that comes later", 0, map[bool]int32{false: 1}[row.want], 0)
		}
	}
}

// TestReservationOfARequestThatNeverRanEndsWithIt, and one of whose attempts the log
// told is remembered.
func TestReservationOfARequestThatNeverRanEndsWithIt(t *testing.T) {
	for _, told := range []fleet.OutcomeKind{0, fleet.AttemptStarted, fleet.AttemptEnded} {
		s := newScript(t)
		s.decided(a)
		if told != 0 {
			s.say(told, 1, a)
		}
		s.ends(id, 1, fleet.EndpointKey{})
		s.expect("ended", 0, 0, 0)
		if got := s.records.Load() == 1; got != (told != 0) {
			t.Errorf("told %v: remembered %v", told, got)
		}
		s.wait(memory)
		if n := s.records.Load(); n != 0 {
			t.Errorf("told %v: %d records are kept", told, n)
		}
	}
}

// TestEndsByTheThousandLeaveLimitsExact: what ended makes room for what begins.
func TestEndsByTheThousandLeaveLimitsExact(t *testing.T) {
	for name, on := range map[string]fleet.EndpointKey{"never ran": {}, "ran": b} {
		s := newScript(t)
		s.max = 4096
		for i := range 2 * s.max {
			s.ends(fmt.Sprint("stranger-", i), 1, on)
		}
		got := 0
		for i := range 100 {
			if s.Reserve(decision(i), a, 10, 0, s.now) {
				got++
			}
		}
		s.expect(name, 10, 0, 0)
		if got != 10 || s.Dropped() != 0 {
			t.Errorf("%s: of a limit of 10, %d of 100 got a place; %d dropped", name, got, s.Dropped())
		}
		if n := s.records.Load(); n > s.max {
			t.Errorf("%s: %d records; at most %d are allowed", name, n, s.max)
		}
	}
}

// TestWhatEndedLongestAgoGivesWay, and what runs never does.
func TestWhatEndedLongestAgoGivesWay(t *testing.T) {
	s := newScript(t)
	ids := s.sameShard(6)
	s.max = 4
	s.starts(ids[0], a)
	s.starts(ids[1], b)
	for _, id := range ids[1:5] { // the first of them was running
		s.ends(id, 1, b)
	}
	s.expect("one runs", 1, 0, 0)
	if n := s.records.Load(); n != 4 {
		t.Errorf("%d records; want 4", n)
	}
	for _, id := range ids[2:5] {
		s.starts(id, c)
	}
	s.expect("late starts of those that are remembered", 1, 0, 0)
	s.starts(ids[1], c)
	s.expect("of the one that gave way", 1, 0, 1)
	s.starts(ids[5], c)
	s.expect("one more", 1, 0, 2)
	if s.Dropped() != 0 {
		t.Errorf("%d dropped", s.Dropped())
	}
}

// TestReservationsOfRequestsOnUnnamedServersStand: the log tells of an attempt, and not
// where.
func TestReservationsOfRequestsOnUnnamedServersStand(t *testing.T) {
	for _, told := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.Heartbeat} {
		s := newScript(t)
		s.decided(a)
		s.say(told, 1, fleet.EndpointKey{})
		s.wait(ProvisionalLease)
		s.expect(told.String(), 1, 0, 0)
	}
}

// TestRequestsAreRememberedFromTheirLastEndOn, not from that of an attempt before.
func TestRequestsAreRememberedFromTheirLastEndOn(t *testing.T) {
	s := newScript(t)
	s.say(fleet.AttemptEnded, 1, a)
	s.wait(memory / 2)
	s.ends(id, 2, b)
	s.wait(memory - time.Millisecond)
	s.say(fleet.AttemptStarted, 2, b)
	s.expect("late", 0, 0, 0)
	s.wait(time.Millisecond)
	if n := s.records.Load(); n != 0 {
		t.Errorf("%d records are kept", n)
	}
}

// TestRetriedRequestsDoNotGiveWay: their first attempt ended, but they run.
func TestRetriedRequestsDoNotGiveWay(t *testing.T) {
	s := newScript(t)
	ids := s.sameShard(4)
	s.max = 2
	say := func(id string, kind fleet.OutcomeKind, attempt int) {
		s.Apply(fleet.Outcome{Kind: kind, Node: "edge-1", ID: id, Attempt: attempt, Endpoint: a, At: s.now})
	}
	say(ids[0], fleet.AttemptEnded, 1)
	say(ids[0], fleet.AttemptStarted, 2)
	s.ends(ids[1], 1, a)
	if !s.Reserve(ids[2], b, 10, 0, s.now) {
		t.Error("the one behind it gave no way")
	}
	if s.Reserve(ids[3], b, 10, 0, s.now) {
		t.Error("a place in a ledger that is full")
	}
	s.expect("the second attempt runs", 1, 1, 0)
	say(ids[0], fleet.AttemptEnded, 2)
	s.expect("ended", 0, 1, 0)
	if !s.Reserve(ids[3], b, 10, 0, s.now) {
		t.Error("what ended for good gave no way")
	}
	s.expect("the next", 0, 2, 0)
	s.wait(Lease + memory)
	if n := s.records.Load(); n != 0 {
		t.Errorf("%d records are kept", n)
	}
}

// TestFullLedgerAdmitsNobodyToALimit: what it can't count it can't hold to a limit.
// Who has none goes on, uncounted.
func TestFullLedgerAdmitsNobodyToALimit(t *testing.T) {
	s := newScript(t)
	s.max = 2
	for i, want := range []bool{true, true, false, false, false} {
		if got := s.Reserve(decision(i), a, 100, 0, s.now); got != want {
			t.Errorf("reservation %d: %v; want %v", i, got, want)
		}
	}
	if !s.Reserve(decision(5), a, 0, 0, s.now) {
		t.Error("refused, with no limit")
	}
	s.starts(decision(6), b)
	s.Apply(fleet.Outcome{Kind: fleet.Heartbeat, Node: "edge-1", ID: decision(7), Attempt: 1, Endpoint: b, At: s.now})
	s.expect("two of eight", 2, 0, 0)
	if s.Dropped() != 6 {
		t.Errorf("%d dropped; want 6", s.Dropped())
	}
	s.ends(decision(6), 1, b) // nothing to count
	s.Apply(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "edge-1", ID: decision(7), Attempt: 1, Endpoint: b, At: s.now})
	if s.Dropped() != 6 {
		t.Errorf("%d dropped after two ends; want 6", s.Dropped())
	}
	s.wait(ProvisionalLease)
	s.expect("room again", 0, 0, 0)
	if !s.Reserve(decision(8), b, 1, 0, s.now) || s.Reserve(decision(9), b, 1, 0, s.now) {
		t.Error("the limit is not 1 again")
	}
	s.expect("counted again", 0, 1, 0)
}

// TestLimitsHoldWhileEndsFillTheLedger: no endpoint gets more than its limit, and the
// ledger never more records than it may.
func TestLimitsHoldWhileEndsFillTheLedger(t *testing.T) {
	const callers, limit, most = 8, 20, 256
	l := NewLedger(func() time.Time { return epoch })
	l.max = most
	var admitted atomic.Int32
	var wg sync.WaitGroup
	for n := range callers {
		wg.Go(func() {
			for i := range 500 {
				l.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: fmt.Sprint("stranger-", n, "-", i), Endpoint: b})
				if l.Reserve(decision(n*500+i), a, limit, 20*time.Second, epoch) {
					admitted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	// A shard is full of what ended long before the last reservation comes.
	if got := l.InFlight(l.Slot(a)); got != limit || admitted.Load() != limit {
		t.Errorf("%d admitted, %d in flight; want %d", admitted.Load(), got, limit)
	}
	if n := l.records.Load(); n > most {
		t.Errorf("%d records; at most %d are allowed", n, most)
	}
}

// BenchmarkEnds is what the end of a request costs that never ran, and that of one
// that ran, in a ledger that is full of such.
func BenchmarkEnds(b *testing.B) {
	for name, on := range map[string]fleet.EndpointKey{"refused": {}, "ran": a} {
		b.Run(name, func(b *testing.B) {
			l := NewLedger(func() time.Time { return epoch })
			l.max = 1 << 14
			ids := make([]string, 1<<16)
			for i := range ids {
				ids[i] = fmt.Sprint("stranger-", i)
			}
			n := 0
			end := func() {
				l.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: ids[n%len(ids)], Endpoint: on, At: epoch})
				n++
			}
			for range len(ids) {
				end()
			}
			b.ReportAllocs()
			for b.Loop() {
				end()
			}
		})
	}
}
