package ratelimit

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
)

func TestFullTableMakesRoomOnceWindowsAreOver(t *testing.T) {
	m := newEmbedded(40 * shards)
	r := requests(1, time.Minute)
	for i := range 5000 {
		m.Reserve(client(fmt.Sprint(i)), r, 0, start)
	}
	if n, shared := m.clients.size(); n > 40*shards || shared > shards {
		t.Fatalf("%d clients and %d shared counts, bounds %d and %d", n, shared, 40*shards, shards)
	}
	later := start.Add(2 * time.Minute)
	for i := range 10 * shards {
		expect(t, m.Reserve(client(fmt.Sprint("new ", i)), r, 0, later), admission.ReasonAdmitted, 0)
	}
}

func (t *table) size() (clients, shared int) {
	for i := range t.shards {
		clients += len(t.shards[i].clients)
		shared += len(t.shards[i].shared)
	}
	return clients, shared
}

func TestNobodyGoesUncountedInAFullTable(t *testing.T) {
	m := newEmbedded(shards)
	r := requests(3, time.Minute)
	admitted := 0
	for range 4 {
		for i := range 1000 {
			if m.Reserve(client(fmt.Sprint(i)), r, 0, start).Admitted {
				admitted++
			}
		}
	}
	if n := m.Counters().Sharing; n != shards {
		t.Errorf("%d shared counts were begun, want %d", n, shards)
	}
	// Each shard has one client and one count that all others of it share.
	if admitted != 3*2*shards {
		t.Errorf("%d admitted, want %d", admitted, 3*2*shards)
	}
}

func TestClientThatSharedACountGetsNoSecondWindow(t *testing.T) {
	m := newEmbedded(1)
	long, short := requests(3, time.Hour), requests(3, time.Second)
	for i := range 500 { // every shard is full of clients whose window is soon over
		m.Reserve(client(fmt.Sprint("short ", i)), short, 0, start)
	}
	k := client("late")
	for range 3 {
		if a := m.Reserve(k, long, 0, start); !a.Admitted {
			t.Fatalf("%+v", a)
		}
	}
	for _, after := range []time.Duration{time.Second, 2 * time.Second, time.Minute} {
		if a := m.Reserve(k, long, 0, start.Add(after)); a.Admitted {
			t.Errorf("after %v: admitted a fourth time of three", after)
		}
	}
	expect(t, m.Reserve(k, long, 0, start.Add(time.Hour)), admission.ReasonAdmitted, 2)
}

// TestClientsWithoutRoomShareOneAccount: they are one to the server, and it is told of
// all that was admitted of them.
func TestClientsWithoutRoomShareOneAccount(t *testing.T) {
	table := newTable(shards)
	table.accounts = true
	hold := func(client, rest byte) *entry {
		k := key{client: admission.Client{client, rest}, requests: time.Hour}
		e, s, _ := table.hold(&k, 0)
		e.requests.note(k.at(0).requests, 1) // it counts, so it stays
		s.mu.RUnlock()
		return e
	}
	first, second := hold(3, 0), hold(3+shards, 0)
	if first.shared || !second.shared || second.account == nil || second.account == first.account {
		t.Errorf("the first has %+v, the second %+v; want one of its own and a shared one, each with an account", first, second)
	}
	if e := hold(3, 1); e != second {
		t.Errorf("a third has %+v; want the one that is shared", e)
	}
	if e := hold(4, 0); e.shared {
		t.Error("a client of another place shares though there is room")
	}
	e := second.renewed(&key{requests: time.Hour}, windows{requests: maxOffset + 1})
	if e == second || !e.shared || e.account != second.account {
		t.Errorf("renewed, it is %+v; want it shared, with its account", e)
	}
}

func TestClockThatGoesBackHandsOutNoWindowTwice(t *testing.T) {
	for _, jump := range []time.Duration{time.Second, time.Hour, 24 * time.Hour} {
		for _, w := range []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour} {
			for _, clients := range []int{maxClients, 1} { // with room, and dropping what is over
				m := newEmbedded(clients)
				r := requests(2, w)
				count := func(name string, at time.Time) (n int) {
					for range 5 {
						a := m.Reserve(client(name), r, 0, at)
						if a.Admitted {
							n++
						}
						if a.Requests.Reset < 0 || a.Requests.Reset > jump+w {
							t.Errorf("jump %v, window %v: reset %v", jump, w, a.Requests.Reset)
						}
					}
					return n
				}
				first := count("a", start)
				for i := range 4 * shards { // others' requests sweep the table
					count(fmt.Sprint(i), start.Add(jump))
				}
				forward := count("a", start.Add(jump))
				again := count("a", start)
				again += count("a", start.Add(jump))
				if first != 2 || again != 0 || forward > 2 {
					t.Errorf("jump %v, window %v, room for %d: %d, then %d, then %d more", jump, w, clients, first, forward, again)
				}
				if n := count("a", start.Add(jump+2*w)); n > 2 {
					t.Errorf("jump %v, window %v: %d in a new window", jump, w, n)
				}
			}
		}
	}
}

func TestWallClockThatIsSetMovesNoWindow(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), requests(1, time.Hour)
	now := time.Now()
	if a := m.Reserve(k, r, 0, now); !a.Admitted {
		t.Fatalf("%+v", a)
	}
	// A time of time.Now counts by its monotonic reading, which nobody sets.
	if got, want := m.unix(now.Add(time.Minute))-m.unix(now), int64(time.Minute); got != want {
		t.Errorf("a minute is %d ns, want %d", got, want)
	}
	if got := m.unix(now.Round(0).Add(24*time.Hour)) - m.unix(now); got < int64(23*time.Hour) {
		t.Errorf("a time without a monotonic reading is not believed: a day is %d ns", got)
	}
}

func TestWindowNumbersNeverWrap(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), admission.Rates{Requests: per(2, time.Second), Tokens: per(100, 24*time.Hour)}
	// 2^24 windows of a second are 194 days.
	for _, days := range []int{0, 1, 190, 193, 194, 195, 196, 400, 400 + 194, 4000} {
		now := start.AddDate(0, 0, days)
		expect(t, m.Reserve(k, r, 10, now), admission.ReasonAdmitted, 1)
		expect(t, m.Reserve(k, r, 10, now), admission.ReasonAdmitted, 0)
		a := m.Reserve(k, r, 10, now)
		expect(t, a, admission.ReasonRequests, 0)
		if a.Tokens.Remaining != 80 {
			t.Errorf("after %d days: %d tokens left, want 80", days, a.Tokens.Remaining)
		}
	}
}

// TestAnOutgrownCounterKeepsItsTokens renews the request counter, 194 days old,
// in the middle of a longer window of tokens.
func TestAnOutgrownCounterKeepsItsTokens(t *testing.T) {
	m := NewEmbedded()
	k, r := client("a"), admission.Rates{Requests: per(2, time.Second), Tokens: per(100, 400*24*time.Hour)}
	begin := time.Unix(0, (start.UnixNano()/int64(400*24*time.Hour)+1)*int64(400*24*time.Hour))
	m.Reserve(k, r, 30, begin)
	a := m.Reserve(k, r, 30, begin.AddDate(0, 0, 300))
	if !a.Admitted || a.Tokens.Remaining != 40 {
		t.Errorf("%+v", a)
	}
}

// TestWhatWasHeardIsKeptAsLongAsItCounts, also by itself and in an old counter.
func TestWhatWasHeardIsKeptAsLongAsItCounts(t *testing.T) {
	const n = 1 << 30
	k := key{requests: time.Second}
	e := fresh(&k, windows{requests: n}, back)
	e.heard.set(n+1, 9)
	if e.over(&k, windows{requests: n + 1}) || !e.over(&k, windows{requests: n + 2}) {
		t.Error("what was heard does not count until its window is over")
	}
	// A renewed counter begins in another window than those beside it.
	e.heard = counter{first: n - maxOffset}
	e.heard.set(n, 9)
	if !e.outgrown(windows{requests: n + 1}) {
		t.Error("what will be heard has no room")
	}
	if _, used, _ := e.renewed(&k, windows{requests: n + 1}).heard.read(n + 1); used != 0 {
		t.Errorf("%d heard of a window that has begun since", used)
	}
	e.requests.first = n - maxOffset - 1 // outgrown, in the window that still counts
	if _, used, _ := e.renewed(&k, windows{requests: n}).heard.read(n); used != 9 {
		t.Errorf("%d heard once it was renewed, want 9", used)
	}
}

func TestTableHoldsUnderConcurrentEviction(t *testing.T) {
	m := newEmbedded(4 * shards)
	r := requests(5, time.Second)
	var mu sync.Mutex
	admitted := map[string]int{}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for step := range 40 {
				now := start.Add(time.Duration(step) * 500 * time.Millisecond)
				for i := range 100 {
					name := fmt.Sprint(i * (1 + g%2))
					// A goroutine that is behind the others counts in their window.
					if a := m.Reserve(client(name), r, 0, now); a.Admitted {
						mu.Lock()
						admitted[fmt.Sprint(name, " ", now.Add(a.Requests.Reset).Unix())]++
						mu.Unlock()
					}
				}
			}
		})
	}
	wg.Wait()
	for at, n := range admitted {
		if n > 5 {
			t.Errorf("client and window %q: %d admitted of 5", at, n)
		}
	}
}

// TestAWindowIsNotHandedOutTwiceWhenTheClockGoesBack: what was counted in it has been
// forgotten, so the one that the clock had reached counts.
func TestAWindowIsNotHandedOutTwiceWhenTheClockGoesBack(t *testing.T) {
	m := newEmbedded(shards)
	r := requests(1, time.Minute)
	a := client("a")
	expect(t, m.Reserve(a, r, 0, start), admission.ReasonAdmitted, 0)
	later := start.Add(2 * time.Minute)
	for i := range 1000 { // makes room in every shard
		m.Reserve(client(fmt.Sprint(i)), r, 0, later)
	}
	admitted := 0
	for range 3 {
		for _, at := range []time.Time{start, later} {
			if m.Reserve(a, r, 0, at).Admitted {
				admitted++
			}
		}
	}
	if admitted > 1 {
		t.Errorf("%d admitted of 1 a minute, in the window that the clock had reached", admitted)
	}
}
