package admission

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestOneWhoIgnoresItsTimesCostsItsSiblingsLittle: of 25 workers of a key on 8 places,
// or behind a limit of 8, one comes as it likes.
func TestOneWhoIgnoresItsTimesCostsItsSiblingsLittle(t *testing.T) {
	for _, limit := range []int{0, 8} {
		ended, gaveUp := 0, 0
		for seed := range 3 {
			l := newLoop(t, 8)
			if limit > 0 {
				l.places = 100
				l.world = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: limit}), 100, nil)
			}
			for range seed {
				l.rng.Uint64()
			}
			l.blind, l.holds = true, true
			for i := range l.lasts {
				l.lasts[i] = 2 * time.Second
			}
			work := &caller{name: "key", open: 24, level: 3, sdk: true, think: time.Millisecond}
			hammer := &caller{name: "key", open: 1, level: 3, hammers: true, think: 10 * time.Millisecond}
			l.run([]*caller{work, hammer}, 30*time.Second, 200*time.Second)
			ended, gaveUp = ended+work.ended, gaveUp+work.gaveUp
		}
		part := float64(gaveUp) / float64(ended+gaveUp)
		t.Logf("limit %d: %d of the others' operations ended, %.3f gave up", limit, ended, part)
		if part > 0.1 || ended < 1450 {
			t.Errorf("limit %d: %d of the others' operations ended, %.3f gave up", limit, ended, part)
		}
	}
}

// TestClientsAreGoneByWhileMoreAreInTimeThanEarly: a slot in the future, and returns to
// those of the past, or to none.
func TestClientsAreGoneByWhileMoreAreInTimeThanEarly(t *testing.T) {
	type comes struct {
		after time.Duration
		early bool
		retry int // 0 says nothing of its tries
	}
	for name, row := range map[string]struct {
		comes []comes
		after time.Duration
		obeys bool
	}{
		"nobody":                        {nil, 0, true},
		"one early":                     {[]comes{{0, true, 1}}, 0, false},
		"one early, long ago":           {[]comes{{0, true, 1}}, earlyOver, true},
		"one early, not long ago":       {[]comes{{0, true, 1}}, earlyOver / 2, false},
		"one of each":                   {[]comes{{0, true, 1}, {0, false, 1}}, 0, false},
		"two in time, one early":        {[]comes{{0, false, 1}, {0, true, 1}, {0, false, 2}}, 0, true},
		"two early, one in time":        {[]comes{{0, true, 1}, {0, true, 2}, {0, false, 1}}, 0, false},
		"two in time long ago":          {[]comes{{0, false, 1}, {0, false, 1}, {earlyOver, true, 1}}, 0, false},
		"three in time, not long ago":   {[]comes{{0, false, 1}, {0, false, 1}, {0, false, 1}, {earlyOver, true, 1}}, 0, true},
		"one in time after long":        {[]comes{{0, false, 1}, {0, false, 1}, {3 * earlyOver, false, 1}, {0, true, 1}, {0, true, 2}}, 0, false},
		"others that may be first ones": {[]comes{{0, true, 1}, {0, false, 0}, {0, false, 0}}, 0, false},
	} {
		now := time.Minute
		var s slots
		s.add(slot{at: time.Hour})
		for _, c := range row.comes {
			now += c.after
			if !c.early {
				s.add(slot{at: now})
			}
			if early, _, _, _ := s.arrive(now, c.retry, false); early != c.early {
				t.Fatalf("%s: early %v", name, early)
			}
		}
		if got := s.obeyed(now + row.after); got != row.obeys {
			t.Errorf("%s: goes by its slots: %v", name, got)
		}
	}
}
