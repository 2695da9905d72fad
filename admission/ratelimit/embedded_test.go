package ratelimit

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestMain checks that nothing is left running. rueidis's cluster client, when it
// is closed, leaves one goroutine that sleeps for a second at most.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/rueidis.(*call).DelayDo.func1"))
}

// start is the beginning of a window of every length, without a monotonic
// reading.
var start = time.Unix(1_764_374_400, 0)

func client(name string) admission.LimitKey {
	return admission.LimitKey{Limit: "free", Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte(name))}
}

func per(n int64, w time.Duration) fleet.Rate { return fleet.Rate{Amount: n, Window: w} }

func requests(n int64, w time.Duration) admission.Rates { return admission.Rates{Requests: per(n, w)} }

func expect(t *testing.T, a admission.Reservation, reason admission.Reason, remaining int64) {
	t.Helper()
	if a.Reason != reason || a.Admitted != (reason == admission.ReasonAdmitted) || a.Requests.Remaining != remaining {
		t.Fatalf("got %v (admitted %v), %d requests left; want %v, %d", a.Reason, a.Admitted, a.Requests.Remaining, reason, remaining)
	}
}

func TestRemainingCountsDownAndStartsAnewInTheNextWindow(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), requests(3, time.Minute)
	now := start.Add(10 * time.Second)
	for left := int64(2); left >= 0; left-- {
		a := m.Reserve(k, r, 0, now)
		expect(t, a, admission.ReasonAdmitted, left)
		if a.Requests.Limit != 3 || a.Requests.Window != time.Minute || a.Requests.Reset != 50*time.Second {
			t.Fatalf("%+v", a.Requests)
		}
	}
	expect(t, m.Reserve(k, r, 0, now), admission.ReasonRequests, 0)
	expect(t, m.Reserve(k, r, 0, start.Add(time.Minute-1)), admission.ReasonRequests, 0)
	expect(t, m.Reserve(k, r, 0, start.Add(time.Minute)), admission.ReasonAdmitted, 2)
	expect(t, m.Reserve(client("b"), r, 0, now), admission.ReasonAdmitted, 2)
}

func TestRequestRefusedForTokensTakesNoRequest(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), admission.Rates{Requests: per(10, time.Minute), Tokens: per(100, time.Minute)}
	expect(t, m.Reserve(k, r, 60, start), admission.ReasonAdmitted, 9)
	expect(t, m.Reserve(k, r, 60, start), admission.ReasonTokens, 9)
	expect(t, m.Reserve(k, r, 101, start), admission.ReasonTooMany, 9)
	a := m.Reserve(k, r, 40, start)
	expect(t, a, admission.ReasonAdmitted, 8)
	if a.Tokens.Remaining != 0 || a.Tokens.Limit != 100 {
		t.Fatalf("%+v", a.Tokens)
	}
}

func TestRequestRefusedForRequestsTakesNoTokens(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), admission.Rates{Requests: per(1, time.Minute), Tokens: per(100, time.Hour)}
	expect(t, m.Reserve(k, r, 10, start), admission.ReasonAdmitted, 0)
	a := m.Reserve(k, r, 50, start)
	expect(t, a, admission.ReasonRequests, 0)
	if a.Tokens.Remaining != 90 {
		t.Fatalf("%d tokens left, want 90", a.Tokens.Remaining)
	}
}

func TestSettlingCorrectsBothWaysInItsOwnWindowOnly(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), admission.Rates{Tokens: per(100, time.Minute)}
	left := func(now time.Time) int64 { return m.Reserve(k, r, 0, now).Tokens.Remaining }

	first := m.Reserve(k, r, 80, start)
	m.Settle(first.Ticket, 30)
	if got := left(start); got != 70 {
		t.Fatalf("%d left after giving back 50, want 70", got)
	}
	second := m.Reserve(k, r, 10, start)
	m.Settle(second.Ticket, 200)
	if got := left(start); got != 0 {
		t.Fatalf("%d left after using 230 of 100, want 0", got)
	}
	if a := m.Reserve(k, r, 1, start); a.Reason != admission.ReasonTokens {
		t.Fatalf("got %v from an overdrawn window", a.Reason)
	}
	late := m.Reserve(k, r, 90, start.Add(time.Minute))
	next := start.Add(2 * time.Minute)
	if got := left(next); got != 100 {
		t.Fatalf("%d left in a new window, want 100: debts end with their window", got)
	}
	m.Settle(late.Ticket, 0)
	m.Settle(admission.Ticket{}, 50)
	if got := left(next); got != 100 {
		t.Fatalf("%d left after settling an old window, want 100", got)
	}
}

// TestConcurrentRequestsGetEachRemainingValueOnce runs on more threads than there may be
// CPUs, so that the kernel stops some of them between a look at a counter and its change.
func TestConcurrentRequestsGetEachRemainingValueOnce(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	for range 200 {
		if concurrentRequests(t); t.Failed() {
			return
		}
	}
}

// concurrentRequests sends 16 times 100 requests at once against a limit of 500.
func concurrentRequests(t *testing.T) {
	t.Helper()
	m := NewEmbedded()
	k, r := client("a"), admission.Rates{Requests: per(500, time.Hour), Tokens: per(1_000_000, time.Hour)}
	var told [16][]int64 // what remains, by who asks
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for n := range told {
		wg.Go(func() {
			<-begin
			for range 100 {
				a := m.Reserve(k, r, 10, start)
				if !a.Admitted {
					continue
				}
				told[n] = append(told[n], a.Requests.Remaining)
				m.Settle(a.Ticket, 7)
			}
		})
	}
	close(begin)
	wg.Wait()
	seen := map[int64]int{}
	for _, all := range told {
		last := int64(1 << 60)
		for _, left := range all {
			if left >= last {
				t.Errorf("%d after %d", left, last)
			}
			last = left
			seen[left]++
		}
	}
	for left := range int64(500) {
		if seen[left] != 1 {
			t.Errorf("%d was handed out %d times", left, seen[left])
		}
	}
	if got := m.Reserve(k, r, 0, start).Tokens.Remaining; got != 1_000_000-500*7 {
		t.Errorf("%d tokens left, want %d: a refused request took some", got, 1_000_000-500*7)
	}
}
