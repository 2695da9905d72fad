package admission

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestLongAnswersAreLongAfterAQuietTime: a guess without any answer is 5 s at most;
// where answers told their lengths, it is by these, however long.
func TestLongAnswersAreLongAfterAQuietTime(t *testing.T) {
	for _, row := range []struct {
		name  string
		taken bool // 20 answers of 480 tokens, 12 s each
		want  time.Duration
	}{{"answers of 12 s were seen", true, 12 * time.Second}, {"none was", false, guessMost}} {
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
		if row.taken {
			w.teach(7, 20, 12*time.Second, 480)
		}
		for range 30 * 60 {
			w.tick(time.Second)
		}
		ask := func() Verdict {
			a := w.ask("a")
			a.Level, a.Output, a.Seed = 7, 4096, 0
			return w.Admit(&a)
		}
		ask()
		w.tick(0)
		if v := ask(); v.Reason != ReasonConcurrency || v.Refusal.RetryAfter < row.want || v.Refusal.RetryAfter > row.want*4/3 {
			t.Errorf("%s: %+v; want a slot after %v and its jitter", row.name, v, row.want)
		}
	}
}

// TestLoneClientsAreToldTheTimeOfWholeBudgets where these are small, and where nothing
// but a failure has ended, which took no time.
func TestLoneClientsAreToldTheTimeOfWholeBudgets(t *testing.T) {
	for _, row := range []struct {
		level  fleet.BurstLevel
		failed bool
		want   time.Duration
	}{
		{0, false, 9 * perToken},
		{4, false, hope},              // not 12.8 s: nothing runs
		{4, true, 511 * perToken / 3}, // half an end, of one and a half
	} {
		w := newWorld(config(), 1, nil)
		if row.failed {
			a := w.ask("a")
			a.Level, a.Output = row.level, row.level.UpperBudget()
			w.Admit(&a)
			w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: 503, Cause: fleet.CauseServerError, At: w.clock.now()})
			w.tick(time.Millisecond)
		}
		var told [2]time.Duration
		for i := range told {
			a := w.ask("a")
			a.Level, a.Seed = row.level, 0
			told[i] = w.Refuse(&a, ReasonBusy).RetryAfter
		}
		want := time.Duration(float64(row.want) / soloShare)
		if got := told[1] - told[0]; got < want || got > want*5/4 {
			t.Errorf("%+v: told %v, %v apart; want %v and a jitter of a quarter at most", row, told, got, want)
		}
	}
}

// TestTurnsMoveUpAgainAfterThoseOfSeveralLevels: once none of these is left, turns
// that were laid by a bad guess move up as ever.
func TestTurnsMoveUpAgainAfterThoseOfSeveralLevels(t *testing.T) {
	for _, mixed := range []bool{false, true} {
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 2}), 100, nil)
		ask := func(level fleet.BurstLevel) (Ask, Verdict) {
			a := w.ask("a")
			a.Level, a.Output = level, level.UpperBudget()
			return a, w.Admit(&a)
		}
		turn := func(level fleet.BurstLevel) time.Duration {
			_, v := ask(level)
			if v.Reason != ReasonConcurrency || !v.Refusal.ShouldRetry {
				t.Fatalf("mixed %v: %+v; want a turn", mixed, v)
			}
			return v.Refusal.RetryAfter
		}
		beat := func(id string) {
			w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: id, Node: "n", Attempt: 1, At: w.clock.now()})
		}
		long, _ := ask(7) // runs all along, so that the client is not forgotten
		beat(long.ID)
		first, _ := ask(3)
		turn(3)
		if mixed {
			turn(0)
		}
		w.end(first.ID)
		for range 30 {
			beat(long.ID)
			w.tick(time.Second)
		}
		// Of a level of which nothing has ended.
		second, _ := ask(5)
		before := time.Duration(0)
		for range 8 {
			before = turn(5)
		}
		w.end(second.ID)
		for range 40 {
			a, v := ask(5)
			if !v.Admitted {
				t.Fatalf("mixed %v: %+v", mixed, v)
			}
			w.tick(50 * time.Millisecond)
			w.end(a.ID)
			w.tick(0)
		}
		beat(long.ID)
		ask(5)
		after := turn(5)
		t.Logf("mixed %v: told %v at first, %v after answers of 50 ms", mixed, before, after)
		if before < 10*time.Second || after > 3*time.Second {
			t.Errorf("mixed %v: told %v at first, %v after answers of 50 ms; want turns that move up", mixed, before, after)
		}
	}
}

// TestBeforeAnAnswerHasEndedNobodyIsToldToComeAtOnce: who comes in vain then waits for a
// whole budget's time, since its SDK tries only once more. Once answers are known that
// is over, and a minute without any doesn't bring it back.
func TestBeforeAnAnswerHasEndedNobodyIsToldToComeAtOnce(t *testing.T) {
	w := newWorld(config(), 4, nil)
	ask := func(retry int) Ask {
		a := w.counting("a", retry)
		a.Level, a.Output = 3, 255
		return a
	}
	fill := func() (ids []string) {
		for range 4 {
			a := ask(0)
			if v := w.Admit(&a); !v.Admitted {
				t.Fatalf("%+v", v)
			}
			w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
			ids = append(ids, a.ID)
		}
		w.tick(0)
		return ids
	}
	refuse := func(retry int) Refusal {
		a := ask(retry)
		return w.Refuse(&a, ReasonBusy)
	}
	running := fill()
	first := refuse(0)
	if first.RetryAfter < coldLeast || first.RetryAfter > 2*time.Second {
		t.Errorf("told %v; want half a second or more, and not much", first.RetryAfter)
	}
	w.tick(first.RetryAfter)
	second := refuse(1)
	if second.RetryAfter < 255*perToken || second.RetryAfter > coldMost || !second.ShouldRetry {
		t.Errorf("told %+v the second time; want the time of 255 tokens", second)
	}
	for _, id := range running {
		w.end(id)
	}
	w.tick(0)
	w.tick(2 * time.Minute)
	fill()
	for i := range 3 {
		if told := refuse(0).RetryAfter; told > 2*first.RetryAfter || told < first.RetryAfter*9/10 {
			t.Errorf("%d after two minutes is told %v; want what answers took before, %v", i, told, first.RetryAfter)
		}
	}
}

// TestLevelsAtTheirBudgetTellTheirQueue: as many as are ahead of the next, over the rate
// at which the level's requests end.
func TestLevelsAtTheirBudgetTellTheirQueue(t *testing.T) {
	const none = math.MaxInt64
	for _, row := range []struct {
		name         string
		full         bool
		live, budget int64
		waiting      int
		wants        float64 // of those that wait, whom their clients' shares let in
		ends         float64 // per second
		queue        time.Duration
		backlogged   bool
	}{
		{"no budget", true, 20, none, 10, 10, 0, 0, false},
		{"the pool is not full", false, 20, 20, 10, 10, 0, 0, false},
		{"at the budget", true, 20, 20, 0, 0, 0, 100 * time.Millisecond, true},
		{"and five wait", true, 20, 20, 5, 5, 0, 600 * time.Millisecond, true},
		{"who end faster than is expected", true, 20, 20, 5, 5, 30, 200 * time.Millisecond, true},
		{"and whom shares don't let in", true, 20, 20, 5, 0, 0, 600 * time.Millisecond, true},
		{"over the budget", true, 23, 20, 0, 0, 0, 400 * time.Millisecond, true},
		{"a place is kept and ten wait", true, 19, 20, 10, 5, 0, time.Second, true},
		{"two are lost to rounding and ten wait", true, 18, 20, 10, 5, 0, 900 * time.Millisecond, true},
		{"two are free and two come", true, 18, 20, 2, 2, 0, 0, false},
		{"one is free and ten wait for their shares alone", true, 19, 20, 10, 0, 0, 0, false},
		{"three are free and ten wait", true, 17, 20, 10, 10, 0, 0, false},
		{"none of one", true, 0, 1, 5, 5, 0, 0, false},
		{"a thousand wait for one place", true, 1, 1, 1e5, 1e5, 0, time.Hour, true},
	} {
		l := &level{waiting: row.waiting, wants: row.wants, ends: row.ends}
		l.live.Store(row.live)
		l.budget.Store(row.budget)
		l.expected.Store(int64(2 * time.Second)) // 10 of 20 end per second
		want := LevelState{InFlight: int(row.live), Budget: float64(row.budget), Queue: row.queue, Backlogged: row.backlogged}
		if row.budget == none {
			want.Budget = math.Inf(1)
		}
		if got := l.state(row.full); got != want {
			t.Errorf("%s: %+v; want %+v", row.name, got, want)
		}
	}
}

// TestQueueEstimateHoldsWhileRequestsWait: a pool of 50 with three workers a place shows
// a queue for as long as it is full, however its places are divided, and one that has
// room for all never does.
func TestQueueEstimateHoldsWhileRequestsWait(t *testing.T) {
	const places, takes = 50, 2500 * time.Millisecond
	for _, keys := range []int{1, 2, 3, 7, 11, 26} {
		for _, workers := range []int{44, 150} {
			l := newLoop(t, places)
			l.holds, l.blind = true, true
			l.lasts[3] = takes
			var callers []*caller
			for i := range keys {
				callers = append(callers, &caller{name: fmt.Sprint(i), open: (workers + i) / keys, level: 3, waits: true, counts: true})
			}
			steps, backlogged, least, most := 0, 0, time.Hour, time.Duration(0)
			l.see = func(st PoolState) {
				steps++
				if level := st.Levels[3]; level.Backlogged {
					backlogged++
					least, most = min(least, level.Queue), max(most, level.Queue)
				}
			}
			l.run(callers, 20*time.Second, 80*time.Second)
			switch {
			case workers < places && backlogged > 0:
				t.Errorf("%d clients with %d workers: backlogged in %d of %d steps; want never", keys, workers, backlogged, steps)
			case workers > places && backlogged < steps*9/10:
				t.Errorf("%d clients with %d workers: backlogged in %d of %d steps; want nine in ten", keys, workers, backlogged, steps)
			case workers > places && (least < 4*time.Second || most > 7*time.Second):
				// 100 wait, and 20 end per second.
				t.Errorf("%d clients with %d workers: a queue of %v to %v; want about 5 s", keys, workers, least, most)
			}
		}
	}
}
