package admission

import (
	"fmt"
	"math"
	"testing"
	"time"
)

// TestRoomOfALevelCountsPlacesOfOthers: they end at their own pace, and are taken at the
// level's.
func TestRoomOfALevelCountsPlacesOfOthers(t *testing.T) {
	for _, c := range []struct {
		own, others  int64
		ownTakes     time.Duration
		othersTakes  time.Duration
		holds, wants float64
	}{
		{0, 0, time.Second, time.Second, 8, 8},
		{8, 0, time.Second, time.Second, 8, 8},
		{0, 8, time.Second, time.Second, 8, 8},
		{0, 8, 10 * time.Second, time.Second, 8, 8},
		{0, 8, time.Second, 10 * time.Second, 8, 0.8},
		{4, 4, time.Second, 10 * time.Second, 8, 4.4},
		{2, 4, time.Second, 10 * time.Second, 8, 4.4},
		{0, 16, time.Second, 4 * time.Second, 8, 4}, // more than the pool holds
		{16, 0, time.Second, time.Second, 8, 8},
		{0, 8, time.Second, time.Second, 0, 0},
	} {
		p := newPool("p", c.holds)
		p.live.Store(c.own + c.others)
		own, others := &p.levels[5], &p.levels[3]
		own.live.Store(c.own)
		own.expected.Store(int64(c.ownTakes))
		others.live.Store(c.others)
		others.expected.Store(int64(c.othersTakes))
		if got := p.room(own); math.Abs(got-c.wants) > 1e-9 {
			t.Errorf("%+v: %v places", c, got)
		}
	}
}

// TestWhoAsksForALevelThatIsNotInFlightIsToldWhenOthersEnd: answers of a second have all
// eight places of a pool. Who asks for longer ones, of which nothing is known, is to come
// when a place is free, whether its client has the others or not.
func TestWhoAsksForALevelThatIsNotInFlightIsToldWhenOthersEnd(t *testing.T) {
	for _, one := range []bool{false, true} {
		w := newWorld(config(), 8, nil)
		w.teach(3, 20, time.Second, 100)
		name := func(kind string, i int) string {
			if one {
				return "one"
			}
			return fmt.Sprint(kind, i)
		}
		for i := range 8 {
			a := w.ask(name("own", i))
			w.Admit(&a)
		}
		for range 12 {
			w.tick(50 * time.Millisecond)
		}
		for i := range 4 {
			a := w.ask(name("new", i))
			a.Level = 5
			if r := w.Refuse(&a, ReasonBusy); !r.ShouldRetry || r.RetryAfter > 10*time.Second {
				t.Errorf("all of one client %v: request %d is told %v, retry %v; want 10s at most", one, i, r.RetryAfter, r.ShouldRetry)
			}
			w.tick(50 * time.Millisecond)
		}
	}
}

// TestCallersOfALevelThatIsNotInFlightAreNotSentAway: eight keys fill eight places with
// answers of a second, and two more ask for long ones.
func TestCallersOfALevelThatIsNotInFlightAreNotSentAway(t *testing.T) {
	for _, takes := range []time.Duration{100 * time.Millisecond, time.Second, 5 * time.Second} {
		l := newLoop(t, 8)
		l.blind, l.holds, l.exact = true, true, true
		l.lasts[5] = takes
		var callers []*caller
		for i := range 8 {
			callers = append(callers, &caller{name: fmt.Sprint("own", i), open: 1, level: 3, sdk: true, think: time.Millisecond})
		}
		others := []*caller{}
		for i := range 2 {
			others = append(others, &caller{name: fmt.Sprint("other", i), open: 1, level: 5, sdk: true, think: time.Millisecond, from: 10 * time.Second})
		}
		callers = append(callers, others...)
		l.run(callers, 10*time.Second, 70*time.Second)
		mean, _ := l.busy()
		for _, c := range others {
			t.Logf("answers of %v: %s had %d, gave up %d, and was told %v at most; busy %.2f", takes, c.name, c.ended, c.gaveUp, c.longest, mean)
			if c.longest > retryCap || c.gaveUp > 3 {
				t.Errorf("answers of %v: %s was told %v, and gave up %d times; want %v at most, and hardly ever", takes, c.name, c.longest, c.gaveUp, retryCap)
			}
		}
	}
}
