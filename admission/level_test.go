package admission

import (
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
