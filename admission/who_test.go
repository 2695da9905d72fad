package admission

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestClientsShowsWhoFillsAPool: those with most first, with what they may have
// and how many of theirs wait.
func TestClientsShowsWhoFillsAPool(t *testing.T) {
	w := newWorld(config(), 10, nil)
	for range 9 {
		a := w.ask("hog")
		w.Admit(&a)
	}
	b := w.ask("modest")
	b.Class = fleet.ClassBatch
	w.Admit(&b)
	if got := w.Clients(10); len(got) != 2 || got[0].Share != got[1].Share && !math.IsInf(got[0].Share, 1) {
		t.Errorf("before a step: %+v", got)
	}
	c := w.ask("newcomer")
	w.Refuse(&c, ReasonBusy)
	w.tick(50 * time.Millisecond)
	for range 2 {
		a := w.ask("hog")
		if v := w.Admit(&a); v.Admitted {
			t.Fatal("the pool is full, and the hog has more than its share")
		}
	}
	got := w.Clients(10)
	if len(got) != 3 {
		t.Fatalf("%d clients: %+v", len(got), got)
	}
	hog := got[0]
	if hog.Client != named("hog") || hog.Pool != "p" || hog.InFlight != 9 || hog.Waiting != 2 || hog.Class != fleet.ClassInteractive || hog.Shared {
		t.Errorf("the hog is %+v", hog)
	}
	if hog.Share >= 10 || hog.Share < 1 {
		t.Errorf("the hog may have %v of 10", hog.Share)
	}
	for _, other := range got[1:] {
		switch other.Client {
		case named("modest"):
			if other.InFlight != 1 || other.Class != fleet.ClassBatch || other.Share*interactiveWeight != hog.Share {
				t.Errorf("modest is %+v beside %+v", other, hog)
			}
		case named("newcomer"):
			if other.InFlight != 0 || other.Waiting != 1 {
				t.Errorf("the newcomer is %+v", other)
			}
		default:
			t.Errorf("%+v", other)
		}
	}
	if got := w.Clients(1); len(got) != 1 || got[0].Client != named("hog") {
		t.Errorf("of one: %+v", got)
	}
	if got := fmt.Sprint(hog.Client); ClientOfID(fleet.ClientKeyAuthorization, got) != named("hog") {
		t.Errorf("%q is not an id of that client", got)
	}
}

// TestClientsShowsWhoIsKeptOut, also when nothing else is known of it any more.
func TestClientsShowsWhoIsKeptOut(t *testing.T) {
	w := newWorld(config(), 10, nil)
	a := w.ask("a")
	a.Class = fleet.ClassBatch
	w.Admit(&a)
	w.TurnAway(named("a"), "p", 40*time.Second, 0, w.clock.now())
	w.Cancel(a.ID)
	for range 30 {
		w.tick(time.Second)
	}
	got := w.Clients(10)
	if len(got) != 1 || got[0].Client != named("a") || got[0].Pool != "p" || got[0].Class != fleet.ClassBatch || got[0].Away != 10*time.Second || got[0].InFlight != 0 {
		t.Errorf("after 30 of 40 s: %+v", got)
	}
	for range 75 {
		w.tick(time.Second)
	}
	if got := w.Clients(10); len(got) != 0 {
		t.Errorf("long after: %+v", got)
	}
	if n := w.clients.n.Load(); n != 0 {
		t.Errorf("%d clients are remembered", n)
	}
}

// TestClientsShowsThoseItCannotTellApart as others.
func TestClientsShowsThoseItCannotTellApart(t *testing.T) {
	w := &world{clock: &clock{}}
	w.Gate = New(Options{Config: config(), Now: w.clock.now, Clients: 1})
	const others = 200
	for i := range 1 + others {
		a := w.ask(fmt.Sprint("client-", i))
		w.Admit(&a)
	}
	rows, sum := w.Clients(1000), 0
	for _, c := range rows {
		if c.Shared != (c.Client != named("client-0")) {
			t.Errorf("%+v", c)
		}
		sum += c.InFlight
	}
	// They are spread over 64 places, of which two in a hundred stay empty.
	if len(rows) < 45 || len(rows) > 1+sharedPlaces || sum != 1+others {
		t.Errorf("%d rows of %d in flight; want the first client and nearly %d others, of %d", len(rows), sum, sharedPlaces, 1+others)
	}
}

// TestWaitingAreNoMoreThanThereAre: SDKs try twice more, and slots that were told to
// others are nobody's who waits; so are those that are over.
func TestWaitingAreNoMoreThanThereAre(t *testing.T) {
	sum, most := 0, 0
	const runs = 10
	for seed := range uint64(runs) {
		l := newLoop(t, 8)
		l.rng = rand.New(rand.NewPCG(seed, 5))
		l.blind, l.holds = true, true
		c := &caller{name: "key", open: 24, level: 3, sdk: true, think: time.Millisecond}
		l.run([]*caller{c}, 0, 20*time.Second+time.Duration(seed)*time.Second)
		n := l.Clients(1)[0].Waiting
		sum, most = sum+n, max(most, n)
		l.tick(10 * time.Second)
		for _, st := range l.Clients(1) {
			if st.Waiting != 0 {
				t.Errorf("%d wait ten seconds after the last came", st.Waiting)
			}
		}
	}
	if mean := float64(sum) / runs; mean < 13 || mean > 19 || most > 21 {
		t.Errorf("%.1f wait on average, %d at most; of 24 workers 8 have a place", mean, most)
	}
}

// TestWhoTriesOftenerIsSeenToWait: its program has set another number of retries.
func TestWhoTriesOftenerIsSeenToWait(t *testing.T) {
	for _, row := range []struct {
		retries []int // of requests a while apart
		want    int
	}{{[]int{0}, 1}, {[]int{1}, 1}, {[]int{2}, 0}, {[]int{3}, 1}, {[]int{3, 2}, 1}} {
		w := newWorld(config(), 4, nil)
		for _, retry := range row.retries {
			w.tick(10 * time.Second) // the slot before is over
			a := w.counting("a", retry)
			w.Refuse(&a, ReasonBusy)
		}
		if got := w.Clients(1)[0].Waiting; got != row.want {
			t.Errorf("%d wait after one that was tried %v times before; want %d", got, row.retries, row.want)
		}
		w.tick(2 * tellsFor)
		last := w.counting("a", 2)
		w.Refuse(&last, ReasonBusy)
		if got := w.Clients(1)[0].Waiting; got != 0 {
			t.Errorf("after %v and two minutes: %d wait after one that was tried twice; want none", row.retries, got)
		}
	}
}

// TestShareOfAClassAndWeightIsWhatItsClientsHave: of a pool's state as of its clients.
func TestShareOfAClassAndWeightIsWhatItsClientsHave(t *testing.T) {
	w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Clients: []fleet.LimitClient{{ID: named("heavy").String(), Weight: 3}}}), 10, nil)
	fill := func(client string, class fleet.RequestClass) {
		for range 10 {
			a := w.ask(client)
			a.Class = class
			if !w.Admit(&a).Admitted {
				w.Refuse(&a, ReasonBusy)
			}
		}
	}
	empty := w.tick(0)
	if got := empty.ShareOf(fleet.ClassBatch, 3); !math.IsInf(got, 1) {
		t.Errorf("share %v of an empty pool", got)
	}
	fill("plain", fleet.ClassInteractive)
	fill("heavy", fleet.ClassInteractive)
	fill("heavy", fleet.ClassBatch)
	fill("plain", fleet.ClassBatch)
	state := w.tick(50 * time.Millisecond)
	rows := w.Clients(10)
	if len(rows) != 4 {
		t.Fatalf("%d rows: %+v", len(rows), rows)
	}
	for _, c := range rows {
		weight := 1.0
		if c.Client == named("heavy") {
			weight = 3
		}
		if got := state.ShareOf(c.Class, weight); got != c.Share || got <= 0 || math.IsInf(got, 1) {
			t.Errorf("%s of weight %v: %v by the pool, %v by the client", c.Class, weight, got, c.Share)
		}
	}
}

// TestEarlyIsKnownOnlyOfWhoCountsItsTries: who comes back without saying so looks like
// further requests that wait too.
func TestEarlyIsKnownOnlyOfWhoCountsItsTries(t *testing.T) {
	for _, row := range []struct {
		retry  int
		counts bool
		early  bool
	}{{0, false, false}, {0, true, false}, {1, true, true}} {
		w := newWorld(config(), 1, nil)
		hog := w.ask("hog")
		w.Admit(&hog)
		w.tick(50 * time.Millisecond)
		for i := range 20 {
			a := w.ask("blind")
			if i > 0 {
				a.Retry, a.Counts = row.retry, row.counts
			}
			w.Refuse(&a, ReasonBusy)
		}
		rows := w.Clients(10)
		blind := rows[slices.IndexFunc(rows, func(c ClientState) bool { return c.Client == named("blind") })]
		if blind.Early > 1 != row.early || !row.early && blind.Early != 0 || (blind.Waiting == 1) != row.early || blind.InFlight != 0 {
			t.Errorf("%+v: %+v", row, blind)
		}
	}
}
