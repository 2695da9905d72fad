package admission

import (
	"fmt"
	"testing"
	"time"
)

// rounds lets so many requests of a level be in flight, which end together each time that
// they take, and begin anew. It reports whether the level forgot what it had learned.
func (l *level) rounds(live int, takes, until time.Duration) (forgot bool) {
	const step = 50 * time.Millisecond
	l.live.Store(int64(live))
	for at := step; at <= until; at += step {
		if at%takes < step {
			l.ended.Add(int64(live) * int64(max(1, step/takes)))
		}
		before := l.events
		l.step(step)
		l.expect(3, 1)
		forgot = forgot || l.events < 0.9*before
	}
	return forgot
}

// TestSlowerServersAreNoticed: what was learned of fast ones counts for little when answers
// take four times as long, or hundreds of times.
func TestSlowerServersAreNoticed(t *testing.T) {
	for _, c := range []struct {
		live        int
		takes, slow time.Duration
	}{
		{12, 500 * time.Millisecond, 5 * time.Second},
		{12, 10 * time.Millisecond, 5 * time.Second},
		{1, 100 * time.Millisecond, 5 * time.Second},
		{4, time.Second, 8 * time.Second},
		{64, time.Second, 5 * time.Second},
	} {
		l := &newPool("p", 64).levels[3]
		l.rounds(c.live, c.takes, 30*time.Second)
		if l.rounds(c.live, c.takes, 10*time.Second) {
			t.Errorf("%+v: forgot what did not change", c)
		}
		l.ends = 1e3
		l.rounds(c.live, time.Hour, c.slow-50*time.Millisecond)
		if got := time.Duration(l.expected.Load()); got < c.slow/4 || got > 3*c.slow {
			t.Errorf("%+v: expected to take %v before the first slow one ends", c, got)
		}
		if l.ends > 500 {
			t.Errorf("%+v: %v end a second", c, l.ends)
		}
		l.rounds(c.live, c.slow, 4*c.slow)
		if got := time.Duration(l.expected.Load()); got < c.slow*3/5 || got > 2*c.slow {
			t.Errorf("%+v: expected to take %v", c, got)
		}
	}
}

// TestBurstsAreNoSlowerServers: none of many that begin at once ends for a while.
func TestBurstsAreNoSlowerServers(t *testing.T) {
	for _, takes := range []time.Duration{50 * time.Millisecond, 500 * time.Millisecond, 5 * time.Second} {
		l := &newPool("p", 100).levels[3]
		l.rounds(1, takes, 30*time.Second)
		for _, live := range []int{2, 100, 1, 0, 100, 3, 50} {
			if l.rounds(live, takes, 4*takes) {
				t.Errorf("answers of %v: what was learned is forgotten when %d begin", takes, live)
			}
		}
	}
}

// TestEndsThatAreToldLateAreNoSlowerServers: logs tell of ends in batches, of which short
// answers have ended in numbers.
func TestEndsThatAreToldLateAreNoSlowerServers(t *testing.T) {
	l := &newPool("p", 100).levels[3]
	l.rounds(1, 20*time.Millisecond, 30*time.Second)
	if l.rounds(100, time.Hour, 200*time.Millisecond) || l.rounds(100, 20*time.Millisecond, time.Second) {
		t.Error("what was learned is forgotten when the first of 100 short ones are told of 200 ms late")
	}
}

// TestCallersAreToldByServersThatBecameSlower: SDK workers on twelve places, whose answers
// take many times as long from one moment on.
func TestCallersAreToldByServersThatBecameSlower(t *testing.T) {
	for _, row := range []struct {
		takes time.Duration
		slow  float64
		exact bool
		keys  int
	}{
		{500 * time.Millisecond, 10, true, 4},
		{500 * time.Millisecond, 10, false, 4},
		{20 * time.Millisecond, 250, true, 4},
		{20 * time.Millisecond, 250, false, 4},
		{500 * time.Millisecond, 10, true, 1},
		{500 * time.Millisecond, 10, false, 20},
	} {
		l := newLoop(t, 12)
		l.blind, l.holds, l.exact = true, true, row.exact
		l.lasts[3], l.slow, l.slowAt = row.takes, row.slow, time.Minute
		var callers []*caller
		for i := range row.keys {
			callers = append(callers, &caller{name: fmt.Sprint(i), open: 20 / row.keys, level: 3, sdk: true, think: time.Millisecond})
		}
		l.run(callers, l.slowAt, l.slowAt+time.Minute)
		ended, gaveUp := 0, 0
		for _, c := range callers {
			ended += c.ended
			gaveUp += c.gaveUp
		}
		mean, _ := l.busy()
		t.Logf("%+v: %d of %d gave up; busy %.2f", row, gaveUp, ended+gaveUp, mean)
		if most := (ended + gaveUp) * 3 / 10; gaveUp > most {
			t.Errorf("%+v: %d of %d gave up; want %d at most", row, gaveUp, ended+gaveUp, most)
		}
	}
}
