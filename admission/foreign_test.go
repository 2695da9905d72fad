package admission

import (
	"fmt"
	"testing"
	"time"
)

// TestPlacesOfForeignRequestsEnd: of eight places some or all are held by requests that
// were not admitted here. Who is refused is told to come, whether anything is known of
// what answers take or not, and by the others' places alone where there are enough.
func TestPlacesOfForeignRequestsEnd(t *testing.T) {
	for _, known := range []bool{false, true} {
		for _, foreign := range []int{0, 4, 7, 8} {
			w := newWorld(config(), 8, nil)
			if known {
				w.teach(3, 20, time.Second, 100)
			}
			for i := range 8 - foreign {
				a := w.ask(fmt.Sprint("own", i))
				w.Admit(&a)
			}
			step := func() {
				w.clock.advance(50 * time.Millisecond)
				w.Step(w.clock.now(), []PoolView{{Name: "p", Limit: 8, InFlight: 8, Places: 8}})
			}
			for range 12 {
				step()
			}
			for i := range 4 {
				a := w.ask(fmt.Sprint("new", i))
				r := w.Refuse(&a, ReasonBusy)
				if most := 8 * time.Second; !r.ShouldRetry || r.RetryAfter > most {
					t.Errorf("%d foreign, known %v: request %d is told %v, retry %v; want %v at most", foreign, known, i, r.RetryAfter, r.ShouldRetry, most)
				}
				step()
			}
		}
	}
}

// TestForeignPlacesCountForLevels is by what is known of the times: where none are told
// of, a foreign request takes as long as the pool's, or guessMost.
func TestForeignPlacesCountForLevels(t *testing.T) {
	for _, c := range []struct {
		foreign           int64
		takes, level      time.Duration // 0: the pool has none
		divides, foreigns float64
		gain              float64
	}{
		{0, time.Second, time.Second, 8, 0, 1},
		{4, time.Second, time.Second, 4, 4, 1},
		{6, time.Second, time.Second, 2, 6, 3},
		{8, time.Second, time.Second, 1, 8, 8},
		{8, time.Second, 2 * time.Second, 1, 8, 8},
		{8, 4 * time.Second, time.Second, 1, 2, 2},
		{8, 0, guessMost / 4, 1, 2, 2},
		{20, time.Second, time.Second, 1, 20, 8}, // more than the pool holds
	} {
		p := newPool("p", 8)
		p.foreign.Store(c.foreign)
		p.takes.Store(int64(c.takes))
		l := &p.levels[3]
		l.expected.Store(int64(c.level))
		if d, f, g := p.divides(), p.foreignFor(l), p.gain(l); d != c.divides || f != c.foreigns || g != c.gain {
			t.Errorf("%+v: divides %v, foreign places count for %v, gain %v", c, d, f, g)
		}
	}
	drained := newPool("p", 0)
	drained.foreign.Store(8)
	if d, g := drained.divides(), drained.gain(&drained.levels[3]); d != 0 || g != 1 {
		t.Errorf("a pool without places divides %v, with a gain of %v", d, g)
	}
}

// TestCallersWaitForRequestsOfBeforeARestart: answers of 25 s have all eight places, and
// nothing is known of them. Callers come 11 s before they end.
func TestCallersWaitForRequestsOfBeforeARestart(t *testing.T) {
	for _, c := range []struct{ workers, keys int }{{8, 1}, {8, 8}, {16, 2}, {16, 8}, {32, 1}, {32, 8}} {
		l := newLoop(t, 8)
		l.blind, l.holds, l.exact = true, true, true
		l.lasts[5] = 25 * time.Second
		callers := []*caller{{name: "before", open: 8, level: 5, foreign: true, tries: 1}}
		for i := range c.keys {
			callers = append(callers, &caller{name: fmt.Sprint(i), open: c.workers / c.keys, level: 3, sdk: true, think: time.Millisecond, from: 14 * time.Second})
		}
		l.run(callers, 0, 40*time.Second)
		ended, gaveUp := 0, 0
		for _, o := range callers[1:] {
			ended += o.ended
			gaveUp += o.gaveUp
		}
		mean, _ := l.busy()
		t.Logf("%+v: %d ended, %d gave up; busy %.2f", c, ended, gaveUp, mean)
		if gaveUp > c.workers {
			t.Errorf("%+v: %d gave up; want %d at most", c, gaveUp, c.workers)
		}
		if ended < 70 { // 120 fit in what is left
			t.Errorf("%+v: %d ended; want 70", c, ended)
		}
	}
}

// TestClientsBesideForeignRequestsAreToldToCome: twelve places are held by 12 workers whose
// answers take half a second and which nobody sends away here.
func TestClientsBesideForeignRequestsAreToldToCome(t *testing.T) {
	l := newLoop(t, 12)
	l.blind, l.holds = true, true
	l.lasts[5] = 500 * time.Millisecond
	callers := []*caller{{name: "embeddings", open: 12, level: 5, foreign: true, think: time.Millisecond}}
	for i := range 8 {
		callers = append(callers, &caller{name: fmt.Sprint(i), open: 1, level: 3, sdk: true, think: time.Millisecond, from: 5 * time.Second})
	}
	l.run(callers, 20*time.Second, 120*time.Second)
	for _, c := range callers[1:] {
		t.Logf("%s had %d answers, gave up %d, and was told %v at most", c.name, c.ended, c.gaveUp, c.longest)
		if c.longest > retryCap {
			t.Errorf("%s was told %v; want %v at most", c.name, c.longest, retryCap)
		}
	}
}
