package admission

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestLevelsWithoutBudgetsAreInOneLine: each alone would give slots for all places.
func TestLevelsWithoutBudgetsAreInOneLine(t *testing.T) {
	w := paced(20 / 1.2) // a slot each 0.1 s
	var last time.Duration
	for i := range 20 {
		a := w.ask(fmt.Sprint("client", i))
		a.Level = fleet.BurstLevel(i % 4)
		told := w.Refuse(&a, ReasonBusy).RetryAfter
		if i > 0 && (told < last-110*time.Millisecond || told > last+220*time.Millisecond) {
			t.Errorf("request %d is told %v after %v; want a slot each 0.1 s", i, told, last)
		}
		last = told
	}
	if last < 1900*time.Millisecond {
		t.Errorf("the last of twenty is told %v; want 2 s", last)
	}
}

// TestLevelsTakeTheirPartOfTheLine when they get budgets, and bring it back when these
// are over.
func TestLevelsTakeTheirPartOfTheLine(t *testing.T) {
	const now, apart = time.Minute, int64(100 * time.Millisecond)
	begin := int64(now + retryFloor)
	p := newPool("p", 64)
	for i := range p.levels {
		p.levels[i].line.spacing.Store(apart)
	}
	short, long := &p.levels[1], &p.levels[6]
	short.waiting, long.waiting = 2, 50
	p.tail.at.Store(begin + 52*apart)
	p.line(now)
	if at := short.line.tail.at.Load(); at != 0 || p.tailOf(1) != &p.tail {
		t.Errorf("without a budget it has a line of its own, up to %v", time.Duration(at))
	}
	short.budget.Store(32)
	long.budget.Store(32)
	p.line(now)
	for level, want := range map[fleet.BurstLevel]int64{1: begin + 2*apart, 6: begin + 50*apart} {
		if at := p.tailOf(level).at.Load(); at != want {
			t.Errorf("the line of level %d reaches to %v; want %v", level, time.Duration(at)-now, time.Duration(want)-now)
		}
	}
	p.tail.at.Store(begin + 52*apart)
	long.line.tail.at.Store(begin + 80*apart)
	short.budget.Store(math.MaxInt64)
	long.budget.Store(math.MaxInt64)
	p.line(now)
	if at := p.tailOf(1).at.Load(); at != begin+80*apart {
		t.Errorf("the line of all reaches to %v; want what the longer had", time.Duration(at)-now)
	}
	// What waits no more is not taken, and no more than all is.
	short.waiting = 1000
	short.budget.Store(32)
	p.line(now)
	if at := short.line.tail.at.Load(); at != begin+80*apart {
		t.Errorf("the line of a level reaches to %v; want no more than that of all", time.Duration(at)-now)
	}
}

// TestLineOfAllMovesUp as that of a level does, by the slots of those that wait.
func TestLineOfAllMovesUp(t *testing.T) {
	const now = time.Minute
	begin := int64(now + retryFloor)
	p := newPool("p", 64)
	lay := func(spacing time.Duration) {
		for i := range p.levels {
			p.levels[i].line.spacing.Store(int64(spacing))
		}
		p.line(now)
	}
	p.levels[3].waiting = 10
	lay(time.Second)
	p.tail.at.Store(begin + int64(10*time.Second))
	lay(600 * time.Millisecond)
	if at := p.tail.at.Load(); at != begin+int64(10*time.Second) {
		t.Errorf("by slots that are little closer it moved to %v", time.Duration(at)-now)
	}
	lay(100 * time.Millisecond)
	if at := p.tail.at.Load(); at != begin+int64(time.Second) {
		t.Errorf("by slots a tenth as far apart it moved to %v; want a second", time.Duration(at-begin))
	}
	p.levels[3].waiting = 0
	p.tail.at.Store(begin + int64(10*time.Second))
	lay(10 * time.Millisecond)
	if at := p.tail.at.Load(); at != begin+int64(10*time.Second) {
		t.Errorf("nobody waits, and it moved to %v", time.Duration(at-begin))
	}
}

// TestLineHasWhatNewcomersLeave: three tenths of the ends at least, three fifths at most,
// and more where it is long.
func TestLineHasWhatNewcomersLeave(t *testing.T) {
	const now = time.Minute
	for _, row := range []struct {
		ahead             time.Duration
		newcomers         float64
		wantFree, wantFar float64
	}{
		{0, 0, mostFree, farFree}, {0, 0.5, 0.5, 0.5}, {0, 0.6, 0.4, longFree}, {0, 2, freeShare, longFree},
		{longLine, 2, freeShare, longFree}, {(longLine + longestLine) / 2, 2, 0.4, longFree}, {longestLine, 2, longFree, longFree},
		{time.Hour, 2, longFree, longFree}, {time.Hour, 0.1, mostFree, farFree},
	} {
		var end tail
		end.at.Store(int64(now + row.ahead))
		free, far := end.free(now, row.newcomers)
		if math.Abs(free-row.wantFree) > 1e-9 || math.Abs(far-row.wantFar) > 1e-9 {
			t.Errorf("%v ahead, newcomers %v: %v and %v; want %v and %v", row.ahead, row.newcomers, free, far, row.wantFree, row.wantFar)
		}
	}
	l := line{}
	l.pace(now, 10, 20, 10)
	if near, far := l.apartAt(longestLine), l.apartAt(longestLine+1); near != 100*time.Millisecond || far != 50*time.Millisecond {
		t.Errorf("slots are %v apart, and %v far ahead", near, far)
	}
}

// TestNewcomersAreKnownByWhatComesForTheFirstTime, as a part of what a full pool ends; a
// burst counts little, and returns don't.
func TestNewcomersAreKnownByWhatComesForTheFirstTime(t *testing.T) {
	for _, row := range []struct {
		name     string
		every    time.Duration // a first try
		burst    int           // once
		retry    int
		low, top float64
	}{
		{"half of what ends", 100 * time.Millisecond, 0, 0, 0.4, 0.6},
		{"more than ends", 20 * time.Millisecond, 0, 0, 1.8, 2.6},
		{"returns", 20 * time.Millisecond, 0, 1, 0, 0.01},
		{"a burst", time.Hour, 500, 0, 0, 0.2},
	} {
		w := paced(20)
		for i := range 20 {
			a := w.ask(fmt.Sprint("running", i))
			w.Admit(&a)
			w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Attempt: 1, At: w.clock.now()})
		}
		w.pool().newcomers = 0
		came := 0
		come := func(n int) {
			for range n {
				came++
				a := w.counting(fmt.Sprint("client", came), row.retry)
				w.Refuse(&a, ReasonBusy)
			}
		}
		w.pool().fresh.Store(0)
		come(row.burst)
		next := time.Duration(0)
		const over = 2*freshOver + freshOver/2
		for at := time.Duration(0); at < over; at += 50 * time.Millisecond {
			for ; next <= at; next += row.every {
				if row.burst == 0 {
					come(1)
				}
			}
			if row.burst > 0 && at > freshOver {
				break
			}
			for i := range w.pool().levels {
				w.pool().levels[i].events, w.pool().levels[i].exposure = 1e6, 1e6
			}
			w.tick(50 * time.Millisecond)
		}
		if got := w.pool().newcomers; got < row.low || got > row.top {
			t.Errorf("%s: newcomers would take %.3f; want %v to %v", row.name, got, row.low, row.top)
		}
	}
}

// packed is a world whose 20 places clients have evenly, and end 20 requests per second.
func packed(cfg *fleet.Config, clients int, limiter Limiter) (w *world, ids []string) {
	w = newWorld(cfg, 20, limiter)
	w.hear(nil)
	for i := range 20 {
		a := w.ask(fmt.Sprint("running", i%clients))
		w.Admit(&a)
		ids = append(ids, a.ID)
	}
	w.pool().newcomers = 0
	w.pool().fresh.Store(0)
	return w, ids
}

// hear lets 50 ms go by, in which something is heard of the requests that run. Answers
// take a second, and a twentieth of that in level 1.
func (w *world) hear(ids []string) {
	for _, id := range ids {
		w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: id, Attempt: 1, At: w.clock.now()})
	}
	for i := range w.pool().levels {
		w.pool().levels[i].events, w.pool().levels[i].exposure = 1e6, 1e6
	}
	w.pool().levels[1].exposure /= 20
	w.tick(50 * time.Millisecond)
}

// TestWhoAsksAllTheTimeIsNewcomersForItsShare: one client asks 60 times a second, or as
// often in bursts, whatever it is told, and is refused. It is no more newcomers than its
// share ends, and as much again at first; beside 20 others, the slots of the line are as
// dense as without it.
func TestWhoAsksAllTheTimeIsNewcomersForItsShare(t *testing.T) {
	for _, row := range []struct {
		name    string
		pause   int              // steps between two bursts
		clients int              // that have the places
		level   fleet.BurstLevel // of what it asks
		line    time.Duration    // how long the line is at least
		unfair  bool             // clients have no shares
		counts  bool             // it says that each try is the first …
		returns int              // … but for one in so many
		low     float64          // newcomers in the end
		top     float64          // and at most
	}{
		{name: "without a word on tries", pause: 1, clients: 20, level: 3, top: 0.1},
		{name: "in bursts", pause: 20, clients: 20, level: 3, top: 0.1},
		{name: "where the line is too long for anybody", pause: 1, clients: 20, level: 3, line: 2 * retryCap, top: 0.1},
		{name: "every try is the first", pause: 1, clients: 20, level: 3, counts: true, top: 0.1},
		{name: "it returns now and then", pause: 1, clients: 20, level: 3, counts: true, returns: 4, top: 0.1},
		{name: "short ones beside long ones", pause: 1, clients: 20, level: 1, top: 0.1},
		{name: "beside one other", pause: 1, clients: 1, level: 3, low: 0.4, top: 1},
		{name: "no shares", pause: 1, clients: 20, level: 3, unfair: true, low: 0.8, top: 2},
	} {
		cfg := config()
		cfg.Routes[0].FairShare = !row.unfair
		w, ids := packed(cfg, row.clients, nil)
		most := 0.0
		for step := range 600 {
			if row.line > 0 {
				w.pool().tail.after(int64(step)*int64(50*time.Millisecond) + int64(row.line))
			}
			for i := range 3 * row.pause {
				if step%row.pause > 0 {
					break
				}
				a := w.ask("hammer")
				a.Counts, a.Level = row.counts, row.level
				if row.returns > 0 && (3*step+i)%row.returns == 0 {
					a.Retry = 1
				}
				w.Refuse(&a, ReasonBusy)
			}
			w.hear(ids)
			most = max(most, w.pool().newcomers)
		}
		if got := w.pool().newcomers; most > row.top || got < row.low {
			t.Errorf("%s: newcomers would take %.2f of what ends, and %.2f at most; want %v at least, and %v at most", row.name, got, most, row.low, row.top)
		}
		if row.line > 0 || row.low > 0 {
			continue
		}
		var told time.Duration
		for i := range 30 {
			a := w.counting(fmt.Sprint("obedient", i), 1)
			told = w.Refuse(&a, ReasonBusy).RetryAfter
		}
		if most := 30*time.Second/(20*mostFree) + 500*time.Millisecond; told > most {
			t.Errorf("%s: the 30th of who comes now is told %v; want %v at most", row.name, told, most)
		}
	}
}

// TestWhoFindsRoomIsANewcomer, also where one client alone comes for all that ends; who
// then has used its rate takes nothing.
func TestWhoFindsRoomIsANewcomer(t *testing.T) {
	limit := fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Requests: fleet.Rate{Amount: 1, Window: time.Minute}}
	for _, limited := range []bool{false, true} {
		cfg := config()
		if limited {
			cfg = config(limit)
		}
		limiter := &oneLimiter{}
		w, ids := packed(cfg, 20, limiter)
		w.end(ids[0])
		limiter.full = true
		for range 600 {
			a := w.ask("client")
			if v := w.Admit(&a); v.Admitted == limited {
				t.Fatalf("limited %v: %v", limited, v.Reason)
			}
			w.end(a.ID)
			w.hear(ids[1:])
		}
		if got := w.pool().newcomers; !limited && got < 0.8 || limited && got > 0.01 {
			t.Errorf("limited %v: newcomers would take %.2f of what ends", limited, got)
		}
	}
}

// TestNewcomersOfACrowdCountAgainLater: where each has a thousandth of the pool, a request
// is all that a client's share ends in hours.
func TestNewcomersOfACrowdCountAgainLater(t *testing.T) {
	w, _ := packed(config(), 20, nil)
	w.pool().share.Store(math.Float64bits(1e-3 / interactiveWeight))
	w.pool().takes.Store(int64(time.Minute))
	for i, row := range []struct {
		pause time.Duration
		want  int64
	}{{0, 1}, {idleAfter - freshOver - 1, 1}, {1, 2}, {0, 2}} {
		w.clock.advance(row.pause)
		a := w.ask("client")
		w.Refuse(&a, ReasonBusy)
		if got := w.pool().fresh.Load(); got != row.want {
			t.Errorf("request %d: %d count; want %d", i, got, row.want)
		}
	}
}

// oneLimiter admits all, or nobody while it is full.
type oneLimiter struct{ full bool }

func (l *oneLimiter) Reserve(LimitKey, Rates, fleet.Tokens, time.Time) Reservation {
	if l.full {
		return Reservation{Reason: ReasonRequests}
	}
	return Reservation{Admitted: true, Reason: ReasonAdmitted}
}

func (l *oneLimiter) Settle(Ticket, fleet.Tokens) {}
