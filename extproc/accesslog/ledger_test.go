package accesslog

import (
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
)

var epoch = time.UnixMilli(1718924567123)

const id = "1718924567123-007-0001"

func endpoint(n int) fleet.EndpointKey {
	return fleet.EndpointKey{Pool: "h100", Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 8000)}
}

var a, b, c = endpoint(1), endpoint(2), endpoint(3)

// script drives a ledger with a clock of its own.
type script struct {
	*Ledger
	t   *testing.T
	now time.Time
}

func newScript(t *testing.T) *script {
	s := &script{t: t, now: epoch}
	s.Ledger = NewLedger(func() time.Time { return s.now })
	return s
}

func (s *script) wait(d time.Duration) { s.now = s.now.Add(d); s.Expire(s.now) }

func (s *script) decided(on fleet.EndpointKey) { s.Reserve(id, on, 0, 0, s.now) }

func (s *script) say(kind fleet.OutcomeKind, attempt int, on fleet.EndpointKey) {
	s.Apply(fleet.Outcome{Kind: kind, Node: "edge-1", ID: id, Attempt: attempt, Endpoint: on, At: s.now})
}

// expect checks the attempts in flight on a, b and c.
func (s *script) expect(what string, wantA, wantB, wantC int32) {
	s.t.Helper()
	got := [3]int32{s.InFlight(s.Slot(a)), s.InFlight(s.Slot(b)), s.InFlight(s.Slot(c))}
	if want := [3]int32{wantA, wantB, wantC}; got != want {
		s.t.Errorf("%s: in flight %v; want %v", what, got, want)
	}
	if total := int(wantA + wantB + wantC); s.Total() != total {
		s.t.Errorf("%s: total %d; want %d", what, s.Total(), total)
	}
}

func TestAttemptCountsFromDecisionToEnd(t *testing.T) {
	s := newScript(t)
	s.decided(a)
	s.expect("decided", 1, 0, 0)
	s.say(fleet.AttemptStarted, 1, a)
	s.expect("confirmed", 1, 0, 0)
	s.wait(20 * time.Second)
	s.say(fleet.Heartbeat, 1, a)
	s.wait(20 * time.Second)
	s.expect("kept by the heartbeat", 1, 0, 0)
	s.say(fleet.AttemptEnded, 1, a)
	s.expect("ended", 0, 0, 0)
	s.say(fleet.RequestEnded, 1, a)
	s.expect("request ended", 0, 0, 0)
	s.wait(memory)
	if n := s.records.Load(); n != 0 {
		t.Errorf("%d records are kept", n)
	}
}

func TestUnconfirmedDecisionEndsSoon(t *testing.T) {
	s := newScript(t)
	s.decided(a)
	s.wait(ProvisionalLease - time.Millisecond)
	s.expect("just before", 1, 0, 0)
	s.wait(time.Millisecond)
	s.expect("after", 0, 0, 0)
	s.say(fleet.AttemptStarted, 1, a)
	s.expect("a late start counts", 1, 0, 0)
}

func TestProvisionalAttemptMovesToWhereEnvoyWent(t *testing.T) {
	s := newScript(t)
	s.decided(a)
	s.say(fleet.AttemptStarted, 1, b)
	s.expect("moved", 0, 1, 0)
	s.say(fleet.RequestEnded, 1, b)
	s.expect("ended", 0, 0, 0)
}

func TestRetryEndsTheAttemptBefore(t *testing.T) {
	s := newScript(t)
	s.decided(a)
	s.say(fleet.AttemptStarted, 1, a)
	s.say(fleet.AttemptStarted, 2, b)
	s.expect("second attempt, end of the first not logged yet", 0, 1, 0)
	s.say(fleet.AttemptEnded, 1, a)
	s.expect("late end of the first", 0, 1, 0)
	s.say(fleet.Heartbeat, 1, a)
	s.expect("late heartbeat of the first", 0, 1, 0)
	s.say(fleet.AttemptEnded, 2, b)
	s.say(fleet.AttemptStarted, 3, c)
	s.expect("third attempt", 0, 0, 1)
	s.say(fleet.RequestEnded, 3, c)
	s.expect("over", 0, 0, 0)
}

func TestRefusedConnectionHasAnEndWithoutStart(t *testing.T) {
	s := newScript(t)
	s.decided(a)
	s.say(fleet.AttemptEnded, 1, a)
	s.expect("refused", 0, 0, 0)
	s.say(fleet.AttemptStarted, 2, b)
	s.expect("retried", 0, 1, 0)
	s.say(fleet.RequestEnded, 2, b)
	s.expect("over", 0, 0, 0)
}

func TestEndWithoutStartIsIgnored(t *testing.T) {
	s := newScript(t)
	s.say(fleet.AttemptEnded, 1, a)
	s.say(fleet.RequestEnded, 1, a)
	s.expect("nothing was counted", 0, 0, 0)
}

// TestHeldPlacesCount: under the limit, and beside what runs.
func TestHeldPlacesCount(t *testing.T) {
	s := newScript(t)
	s.decided(a)
	slot := s.Hold(a)
	s.Hold(a)
	s.say(fleet.AttemptEnded, 1, a)
	s.wait(time.Hour)
	s.expect("held", 2, 0, 0)
	if s.Reserve("1718924567123-007-0002", a, 1, 0, s.now) {
		t.Error("the place was given away")
	}
	s.Release(slot, 2)
	s.expect("released", 0, 0, 0)
	if !s.Reserve("1718924567123-007-0003", a, 1, 0, s.now) {
		t.Error("the place isn't free")
	}
}

func TestLateStartAfterTheEndIsIgnored(t *testing.T) {
	for _, end := range []fleet.OutcomeKind{fleet.AttemptEnded, fleet.RequestEnded} {
		s := newScript(t)
		s.say(end, 1, a)
		s.say(fleet.AttemptStarted, 1, a)
		s.say(fleet.Heartbeat, 1, a)
		s.expect(end.String(), 0, 0, 0)
	}
}

func TestRestartedServeFindsStreamsByHeartbeat(t *testing.T) {
	s := newScript(t)
	s.say(fleet.Heartbeat, 2, b)
	s.expect("found", 0, 1, 0)
	s.say(fleet.AttemptEnded, 2, b)
	s.expect("ended", 0, 0, 0)
}

func TestHeartbeatWithoutUpstreamCountsNothing(t *testing.T) {
	s := newScript(t)
	s.say(fleet.Heartbeat, 0, fleet.EndpointKey{})
	s.expect("no upstream yet", 0, 0, 0)
	if s.records.Load() != 0 {
		t.Error("a record was made")
	}
}

func TestLeaseWithoutHeartbeatEnds(t *testing.T) {
	s := newScript(t)
	s.say(fleet.AttemptStarted, 1, a)
	s.wait(Lease - time.Second)
	s.expect("within the lease", 1, 0, 0)
	s.wait(time.Second)
	s.expect("after it", 0, 0, 0)
	s.say(fleet.Heartbeat, 1, a)
	s.expect("the log is back", 1, 0, 0)
}

func TestKilledEnvoyLosesItsLeasesAfterTheGrace(t *testing.T) {
	s := newScript(t)
	s.say(fleet.AttemptStarted, 1, a)
	s.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "edge-2", ID: "1718924567123-007-0002", Attempt: 1, Endpoint: b, At: s.now})
	s.NodeGone("edge-1")
	s.expect("at once", 1, 1, 0)
	s.wait(NodeGrace)
	s.expect("after the grace", 0, 1, 0)
}

// TestSilentEnvoysAttemptsCountForTheTimeExpected, where that is longer than the
// grace; a dead one's don't.
func TestSilentEnvoysAttemptsCountForTheTimeExpected(t *testing.T) {
	for _, dead := range []bool{false, true} {
		s := newScript(t)
		s.Reserve("1718924567123-007-0001", a, 0, 20*time.Second, s.now)
		s.say(fleet.AttemptStarted, 1, a)
		s.NodeGone("edge-1")
		if dead {
			s.NodeDead("edge-1")
			s.wait(DeadGrace)
			s.expect("dead", 0, 0, 0)
			continue
		}
		s.wait(20*time.Second - time.Millisecond)
		s.expect("before its time is over", 1, 0, 0)
		s.wait(time.Millisecond)
		s.expect("after", 0, 0, 0)
	}
}

func TestReconnectedEnvoyKeepsItsLeases(t *testing.T) {
	s := newScript(t)
	s.say(fleet.AttemptStarted, 1, a)
	s.NodeGone("edge-1")
	s.wait(10 * time.Second)
	s.say(fleet.Heartbeat, 1, a)
	s.wait(NodeGrace)
	s.expect("renewed", 1, 0, 0)
}

func TestRequestIDsCountPerEnvoyAndDecisionIDsEverywhere(t *testing.T) {
	s := newScript(t)
	for _, node := range []string{"edge-1", "edge-2"} {
		s.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: node, ID: "client-id", Attempt: 1, Endpoint: a, At: s.now})
	}
	s.expect("same request id on two Envoys", 2, 0, 0)
	s.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "edge-1", ID: "client-id", At: s.now})
	s.expect("one ended", 1, 0, 0)
}

func decision(n int) string { return fmt.Sprintf("1718924567123-007-%04d", n) }

func TestReservationsStopAtTheLimit(t *testing.T) {
	s := newScript(t)
	for n, want := range []bool{true, true, false, false} {
		if got := s.Reserve(decision(n), a, 2, 0, s.now); got != want {
			t.Errorf("reservation %d: %v; want %v", n+1, got, want)
		}
	}
	s.expect("the limit", 2, 0, 0)
	if !s.Reserve(decision(2), b, 2, 0, s.now) {
		t.Error("another endpoint is full too")
	}
	s.expect("elsewhere", 2, 1, 0)
	if !s.Reserve(decision(9), a, 0, 0, s.now) {
		t.Error("limit 0 is a limit")
	}
	if s.Reserve(decision(10), c, -1, 0, s.now) {
		t.Error("a negative limit has room")
	}
	s.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: decision(0), Node: "edge-1", At: s.now})
	s.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: decision(9), Node: "edge-1", At: s.now})
	if !s.Reserve(decision(3), a, 2, 0, s.now) {
		t.Error("an end made no room")
	}
	if s.Reserve(decision(4), a, 2, 0, s.now) {
		t.Error("room for a third")
	}
	s.expect("the limit again", 2, 1, 0)
}

func TestReservationOfARequestTheLogKnowsCountsOnce(t *testing.T) {
	s := newScript(t)
	s.say(fleet.AttemptStarted, 1, b)
	if !s.Reserve(id, a, 1, 0, s.now) {
		t.Error("refused")
	}
	s.expect("as the log says", 0, 1, 0)
}

func TestReservationWithoutIDOrEndpointCountsNothing(t *testing.T) {
	s := newScript(t)
	if !s.Reserve("", a, 1, 0, s.now) || !s.Reserve(id, fleet.EndpointKey{}, 1, 0, s.now) {
		t.Error("refused")
	}
	s.expect("nothing", 0, 0, 0)
}

func TestCancelUndoesWhatNothingConfirmed(t *testing.T) {
	s := newScript(t)
	s.Reserve(id, a, 1, 0, s.now)
	s.Cancel(id)
	s.expect("cancelled", 0, 0, 0)
	s.Cancel(id)
	s.Cancel("")
	s.expect("cancelled twice", 0, 0, 0)
	if !s.Reserve(id, a, 1, 0, s.now) {
		t.Error("no room after the cancel")
	}
	s.say(fleet.AttemptStarted, 1, a)
	s.Cancel(id)
	s.expect("confirmed", 1, 0, 0)
	s.say(fleet.RequestEnded, 1, a)
	s.Cancel(id)
	s.expect("ended", 0, 0, 0)
}

func TestBlindReservationsLastAsLongAsExpected(t *testing.T) {
	for _, row := range []struct {
		name           string
		expected, want time.Duration
	}{
		{"unknown", 0, ProvisionalLease},
		{"short", time.Second, ProvisionalLease},
		{"within the bounds", 9 * time.Second, 9 * time.Second},
		{"long", time.Hour, Lease},
		{"negative", -time.Second, ProvisionalLease},
	} {
		for _, late := range []bool{false, true} {
			s := newScript(t)
			if !late {
				s.SetBlind(true)
			}
			s.Reserve(id, a, 1, row.expected, s.now)
			if late {
				s.SetBlind(true)
			}
			s.wait(row.want - time.Millisecond)
			s.expect(row.name+", just before", 1, 0, 0)
			s.wait(time.Millisecond)
			s.expect(row.name+", after", 0, 0, 0)
		}
	}
}

func TestLogThatComesBackEndsBlindReservations(t *testing.T) {
	s := newScript(t)
	s.SetBlind(true)
	s.Reserve(id, a, 0, 20*time.Second, s.now)
	s.SetBlind(false)
	s.Reserve(decision(2), b, 0, 20*time.Second, s.now)
	s.wait(ProvisionalLease)
	s.expect("the blind one stays, the later one doesn't", 1, 0, 0)
	s.say(fleet.AttemptEnded, 1, a)
	s.expect("ended", 0, 0, 0)
}

// TestParallelReservationsAreExact is the promise that a limit on parallel requests rests
// on. It runs on more threads than there may be CPUs, so that the kernel stops some of
// them between the look at the count and its change: often under the race detector, which
// makes that longer, seldom without.
func TestParallelReservationsAreExact(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	const callers, limit = 40, 10
	ids := make([]string, callers)
	for n := range ids {
		ids[n] = decision(n)
	}
	for _, blind := range []bool{false, true} {
		l := NewLedger(func() time.Time { return epoch })
		l.SetBlind(blind)
		for range 1000 {
			var admitted atomic.Int32
			var wg sync.WaitGroup
			start := make(chan struct{})
			for _, id := range ids {
				wg.Go(func() {
					<-start
					if l.Reserve(id, a, limit, 20*time.Second, epoch) {
						admitted.Add(1)
					}
				})
			}
			close(start)
			wg.Wait()
			if got := admitted.Load(); got != limit || l.InFlight(l.Slot(a)) != limit {
				t.Errorf("blind %v: %d admitted, %d in flight; want %d", blind, got, l.InFlight(l.Slot(a)), limit)
			}
			for _, id := range ids {
				l.Cancel(id)
			}
			if l.Total() != 0 {
				t.Errorf("%d in flight after all were cancelled", l.Total())
			}
			if t.Failed() {
				return
			}
		}
	}
}

// TestReservationsNeverPassTheLimit plays reservations, cancels, log entries and
// time in any order, in ledgers of any size: as long as nothing but reservations
// starts attempts, an endpoint never has more than the limit, whoever gets a place is
// counted, and whoever is refused met the endpoint or the ledger full.
func TestReservationsNeverPassTheLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := epoch
		l := NewLedger(func() time.Time { return now })
		limit := int32(rapid.IntRange(1, 5).Draw(t, "limit"))
		l.max = rapid.SampledFrom([]int64{1, 2, 5, 10, MaxAttempts}).Draw(t, "max")
		for step := range rapid.IntRange(1, 80).Draw(t, "steps") {
			id := decision(rapid.IntRange(0, 12).Draw(t, "request"))
			e := endpoint(rapid.IntRange(1, 2).Draw(t, "endpoint"))
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0, 1, 2:
				before, dropped := l.InFlight(l.Slot(e)), l.Dropped()
				ok := l.Reserve(id, e, limit, time.Duration(rapid.IntRange(0, 40).Draw(t, "expected"))*time.Second, now)
				full := l.Dropped() > dropped
				if !ok && (before < limit && !full || l.InFlight(l.Slot(e)) != before) {
					t.Fatalf("step %d: refused with %d of %d in flight, %d after it", step, before, limit, l.InFlight(l.Slot(e)))
				}
				key := keyOf(id, "")
				if ok == (l.shardOf(key).byID[key] == nil) {
					t.Fatalf("step %d: a place %v, and counted %v", step, ok, !ok)
				}
				if full && l.records.Load() < l.max {
					t.Fatalf("step %d: refused by a ledger of %d records; it holds %d", step, l.records.Load(), l.max)
				}
			case 3:
				l.Cancel(id)
			case 4:
				end := fleet.Outcome{Kind: fleet.RequestEnded, Node: "edge", ID: id, At: now}
				if rapid.Bool().Draw(t, "ran") {
					end.Endpoint = e
				}
				l.Apply(end)
			case 5:
				now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "pause")) * time.Millisecond)
				l.Expire(now)
				checkExpired(t, l, now)
				l.SetBlind(rapid.Bool().Draw(t, "blind"))
			}
			checkLeases(t, l)
			for n := 1; n <= 2; n++ {
				if got := l.InFlight(l.Slot(endpoint(n))); got < 0 || got > limit {
					t.Fatalf("step %d: %d in flight; the limit is %d", step, got, limit)
				}
			}
		}
		l.Expire(now.Add(Lease + memory))
		if l.Total() != 0 || l.records.Load() != 0 {
			t.Fatalf("%v in flight, %d records", l.Snapshot(), l.records.Load())
		}
	})
}

func TestSlotsAreStableAndRecycledOnlyWhenIdle(t *testing.T) {
	s := newScript(t)
	held := s.Slot(endpoint(1))
	s.say(fleet.AttemptStarted, 1, endpoint(1))
	for i := 2; i < MaxSlots; i++ {
		if got := s.Slot(endpoint(i)); got == NoSlot || got == held {
			t.Fatalf("endpoint %d has slot %d", i, got)
		}
	}
	if got := s.Slot(endpoint(MaxSlots)); got != NoSlot {
		t.Errorf("an endpoint beyond the bound has slot %d", got)
	}
	if s.InFlight(NoSlot) != 0 {
		t.Error("NoSlot counts")
	}
	s.now = s.now.Add(slotIdle)
	second := s.Slot(endpoint(2)) // asked for: in use
	got := s.Slot(endpoint(MaxSlots))
	if got == NoSlot || got == held || got == second {
		t.Errorf("recycled slot %d; %d has an attempt, %d is in use", got, held, second)
	}
	if s.Slot(endpoint(1)) != held {
		t.Error("the slot with an attempt was given away")
	}
}

// checkExpired looks through every record: after Expire none may be due, and the
// count of records must be right.
func checkExpired(t *rapid.T, l *Ledger, now time.Time) {
	t.Helper()
	n := int64(0)
	for i := range l.shards {
		for key, r := range l.shards[i].byID {
			n++
			if r.key != key || !now.Before(r.until) {
				t.Fatalf("%v (running: %v) is due since %v", key, r.running, now.Sub(r.until))
			}
		}
	}
	if l.records.Load() != n {
		t.Fatalf("%d records counted, %d kept", l.records.Load(), n)
	}
}

// checkLeases looks for each running attempt in its heap, and for nothing else
// there; and that no record is kept for use that is in use.
func checkLeases(t *rapid.T, l *Ledger) {
	t.Helper()
	for i := range l.shards {
		s := &l.shards[i]
		running := 0
		for key, r := range s.byID {
			if r.running {
				running++
			}
			if r.running != (r.leased > 0) || (r.running && s.leases[r.leased-1] != r) {
				t.Fatalf("%v: running %v, place %d of %d", key, r.running, r.leased, len(s.leases))
			}
		}
		if len(s.leases) != running {
			t.Fatalf("%d leases of %d that run", len(s.leases), running)
		}
		for k := range s.leases {
			if k > 0 && s.leases.Less(k, (k-1)/2) {
				t.Fatalf("lease %d ends before the one above it", k)
			}
		}
		for _, r := range s.free {
			if *r != (record{}) {
				t.Fatalf("a record kept for use is %+v", r)
			}
		}
	}
}

// event is a step of one request's story.
type event struct {
	decide  bool
	outcome fleet.Outcome
}

// story draws what happens to one request: decision, attempts, retries, end.
func story(t *rapid.T, n int) []event {
	id := fmt.Sprintf("1718924567123-007-%04d", n)
	if rapid.Bool().Draw(t, "ext_proc away") {
		id = fmt.Sprintf("client-%d", n)
	}
	on := func() fleet.EndpointKey { return endpoint(rapid.IntRange(1, 4).Draw(t, "endpoint")) }
	say := func(kind fleet.OutcomeKind, attempt int, e fleet.EndpointKey) event {
		return event{outcome: fleet.Outcome{Kind: kind, Node: "edge", ID: id, Attempt: attempt, Endpoint: e}}
	}
	out := []event{{decide: true, outcome: fleet.Outcome{ID: id, Endpoint: on()}}}
	attempts := rapid.IntRange(0, 4).Draw(t, "attempts")
	for n := 1; n <= attempts; n++ {
		e := on()
		if rapid.Bool().Draw(t, "connected") {
			out = append(out, say(fleet.AttemptStarted, n, e))
			for range rapid.IntRange(0, 2).Draw(t, "heartbeats") {
				out = append(out, say(fleet.Heartbeat, n, e))
			}
		}
		out = append(out, say(fleet.AttemptEnded, n, e))
	}
	return append(out, say(fleet.RequestEnded, attempts, fleet.EndpointKey{}))
}

// TestInFlightReturnsToZero plays many requests with entries lost, doubled and
// in any order. No counter is ever negative, and in the end all are zero: at
// once when nothing is lost and the end comes last, after the leases otherwise.
func TestInFlightReturnsToZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := epoch
		l := NewLedger(func() time.Time { return now })
		var events []event
		for n := range rapid.IntRange(1, 6).Draw(t, "requests") {
			events = append(events, story(t, n)...)
		}
		tidy := rapid.Bool().Draw(t, "tidy")
		if !tidy {
			events = rapid.Permutation(events).Draw(t, "order")
		}
		for _, e := range events {
			copies := 1
			if !tidy {
				copies = rapid.SampledFrom([]int{0, 1, 1, 1, 2}).Draw(t, "copies")
			}
			for range copies {
				if e.decide {
					l.Reserve(e.outcome.ID, e.outcome.Endpoint, 0, 5*time.Second, now)
					if !tidy && rapid.IntRange(0, 9).Draw(t, "cancel") == 0 {
						l.Cancel(e.outcome.ID)
					}
					continue
				}
				e.outcome.At = now
				l.Apply(e.outcome)
			}
			if !tidy {
				now = now.Add(time.Duration(rapid.IntRange(0, 8000).Draw(t, "pause")) * time.Millisecond)
				l.Expire(now)
				checkExpired(t, l, now)
				l.SetBlind(rapid.Bool().Draw(t, "blind"))
				if rapid.IntRange(0, 9).Draw(t, "gone") == 0 {
					l.NodeGone("edge")
				}
			}
			checkLeases(t, l)
			for n := 1; n <= 4; n++ {
				if got := l.InFlight(l.Slot(endpoint(n))); got < 0 {
					t.Fatalf("%d in flight on endpoint %d", got, n)
				}
			}
		}
		if tidy {
			// A provisional lease under a client's id is not joined with the log
			// (the Envoy is unknown at the decision); it ends by itself.
			now = now.Add(ProvisionalLease)
			l.Expire(now)
		} else {
			now = now.Add(Lease + memory)
			l.Expire(now)
		}
		if l.Total() != 0 {
			t.Fatalf("%v in flight at the end", l.Snapshot())
		}
		now = now.Add(Lease + memory)
		l.Expire(now)
		if n := l.records.Load(); n != 0 {
			t.Fatalf("%d records are kept", n)
		}
	})
}

func TestLedgerIsSafeForConcurrentUse(t *testing.T) {
	l := NewLedger(time.Now)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				id := fmt.Sprintf("1718924567123-%03d-%04d", g, i)
				e := endpoint(1 + i%4)
				l.Reserve(id, e, 0, time.Second, time.Now())
				l.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: id, Attempt: 1, Endpoint: e})
				_ = l.InFlight(l.Slot(e))
				l.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: id, Attempt: 1})
			}
		})
	}
	wg.Go(func() {
		for range 50 {
			l.Expire(time.Now())
			l.NodeGone("n")
			l.Snapshot()
		}
	})
	wg.Wait()
	if l.Total() != 0 {
		t.Errorf("%v in flight", l.Snapshot())
	}
}

func BenchmarkDecidedToEnd(b *testing.B) {
	l := NewLedger(time.Now)
	e := endpoint(1)
	now := time.Now()
	ids := make([]string, 8192)
	for i := range ids {
		ids[i] = fmt.Sprintf("1718924567%03d-007-%04d", i/1000, i%1000)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		id := ids[i%len(ids)]
		if i%len(ids) == len(ids)-1 {
			l.Expire(now.Add(time.Hour))
		}
		i++
		l.Reserve(id, e, 0, time.Second, now)
		l.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: id, Attempt: 1, Endpoint: e, At: now})
		l.Apply(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "n", ID: id, Attempt: 1, Endpoint: e, At: now})
		l.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: id, Attempt: 1, At: now})
	}
}

// BenchmarkExpire is a second of ticks over what a second of 1,500 requests
// leaves behind, with 3,000 of them running.
func BenchmarkExpire(b *testing.B) {
	now := epoch
	l := NewLedger(func() time.Time { return now })
	const perSecond, running, ticks = 1500, 3000, 20
	n := 0
	id := func(n int) string {
		return fmt.Sprintf("1718924%06d-%03d-%04d", n/1000%1000000, n/10000000%1000, n%1000)
	}
	second := func() {
		for range ticks {
			for range perSecond / ticks {
				e := endpoint(n % 100)
				l.Reserve(id(n), e, 0, time.Second, now)
				l.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: id(n), Attempt: 1, Endpoint: e, At: now})
				if n >= running {
					l.Apply(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: id(n - running), At: now})
				}
				n++
			}
			now = now.Add(time.Second / ticks)
			b.StartTimer()
			l.Expire(now)
			b.StopTimer()
		}
	}
	b.StopTimer()
	for range 10 {
		second()
	}
	b.ResetTimer()
	for range b.N {
		second()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*perSecond), "ns/request")
}

func BenchmarkInFlight(b *testing.B) {
	l := NewLedger(time.Now)
	slot := l.Slot(endpoint(1))
	for b.Loop() {
		l.InFlight(slot)
	}
}
