package admission

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// counts is how many of some ends of an account count, which all ran for so long.
func (p *pace) counts(n int, ran, usual time.Duration, good bool) (counted int) {
	for range n {
		if p.end(ran, usual, usual, good) {
			counted++
		}
	}
	return counted
}

func TestEndsCountByThePlacesTheyComeOf(t *testing.T) {
	const usual = 2 * time.Second
	for _, c := range []struct {
		name string
		ran  time.Duration
		good bool
		from int
		to   int
	}{
		{"as long as others", usual, true, 1000, 1000},
		{"half as long", usual / 2, true, 1000, 1000},
		{"a tenth", usual / 10, true, 195, 205},
		{"a hundredth", usual / 100, true, 20, 25},
		{"errors at once", usual / 100, false, 19, 21},
		{"errors at last", usual, false, 1000, 1000},
		{"nothing", 0, true, someEnds, someEnds},
		{"logs out of order", -time.Second, true, someEnds, someEnds},
	} {
		if got := new(pace).counts(1000, c.ran, usual, c.good); got < c.from || got > c.to {
			t.Errorf("%s: %d of 1000 ends count; want %d … %d", c.name, got, c.from, c.to)
		}
	}
}

// TestManyClientsCountAsOneWould: of those that fail at once and never come back as many ends
// count as if one client had sent them all.
func TestManyClientsCountAsOneWould(t *testing.T) {
	const usual = 2 * time.Second
	for ran, part := range map[time.Duration]float64{usual / 100: 0.02, usual / 10: 0.2, usual / 4: 0.5, usual / 2: 1} {
		n := 0
		for i := range 10_000 {
			var p pace
			p.begin(uint64(i) * 1_000_003)
			n += p.counts(1, ran, usual, false)
		}
		if got := float64(n) / 10_000; got < 0.9*part || got > min(1, 1.1*part) {
			t.Errorf("%v: %.3f of their ends count; want %.2f", ran, got, part)
		}
	}
}

// TestOutageOfManyClientsIsNoQueue: many clients with a request now and then are answered
// with errors in no time, and told to come back soon.
func TestOutageOfManyClientsIsNoQueue(t *testing.T) {
	l := newLoop(t, 16)
	l.holds, l.blind = true, true
	l.lasts[3] = 4 * time.Second
	var all []*caller
	for i := range 400 {
		all = append(all, &caller{name: fmt.Sprint("key ", i), open: 1, level: 3, sdk: true, think: 25 * time.Second, from: time.Duration(i) * 60 * time.Millisecond, fails: true, takes: time.Second})
	}
	l.run(all, time.Minute, 6*time.Minute)
	ended, gaveUp := 0, 0
	for _, c := range all {
		ended += c.ended
		gaveUp += c.gaveUp
	}
	t.Logf("%d ended, %d given up", ended, gaveUp)
	if 10*gaveUp > ended {
		t.Errorf("%d operations are given up, and %d answered; want less than a tenth", gaveUp, ended)
	}
}

// TestShortAndLongOnesOfOneClientCount: as its places do, over twenty requests.
func TestShortAndLongOnesOfOneClientCount(t *testing.T) {
	const short, long = 100 * time.Millisecond, 20 * time.Second
	var p pace
	n, mean := 0, (19*short+long)/20
	for range 50 {
		n += p.counts(1, long, mean, true) + p.counts(19, short, mean, true)
	}
	if n != 1000 {
		t.Errorf("%d of 1000 ends count; want all", n)
	}
}

// TestFasterPoolIsLearned: what every account has had places for is enough to learn it.
func TestFasterPoolIsLearned(t *testing.T) {
	var p pace
	p.counts(100, 20*time.Second, 20*time.Second, true)
	if n := p.counts(20, 2*time.Second, 20*time.Second, true); n != 20 {
		t.Errorf("%d of the first 20 short ends count; want all", n)
	}
}

func TestAccountsGoByTheirOwnTimes(t *testing.T) {
	const usual = 10 * time.Second
	for _, c := range []struct {
		ran  time.Duration
		ends int
		live int
		want time.Duration
	}{
		{usual, 100, 5, usual},
		{usual / 10, 0, 5, usual},
		{usual / 10, 2, 0, 5500 * time.Millisecond}, // two of its own, and two of its level
		{usual / 10, 100, 0, 1346 * time.Millisecond},
		{usual / 10, 100, 48, 5500 * time.Millisecond}, // of those in flight nothing is known
		{10 * usual, 100, 0, 96538 * time.Millisecond},
		{0, 100, 0, 384 * time.Millisecond},
	} {
		var p pace
		p.counts(c.ends, c.ran, usual, true)
		if got := p.takes(usual, c.live); got.Round(time.Millisecond) != c.want.Round(time.Millisecond) && (got-c.want).Abs() > time.Millisecond {
			t.Errorf("%d that ran %v, %d in flight: %v; want %v", c.ends, c.ran, c.live, got, c.want)
		}
	}
}

// TestQuickAnswersOfOneClientMakeNobodyElseReturnInVain: some keys have a pool, and another
// one's requests in the same level end after a hundredth of the time: errors of a program in
// a loop, or short answers.
func TestQuickAnswersOfOneClientMakeNobodyElseReturnInVain(t *testing.T) {
	for _, c := range []struct {
		name  string
		other caller
		most  float64 // of the others' operations that are given up
	}{
		{"errors", caller{fails: true, every: 33 * time.Millisecond, takes: 20 * time.Millisecond}, 0.15},
		{"short answers", caller{every: 33 * time.Millisecond, takes: 20 * time.Millisecond}, 0.15},
		{"SDK workers with short answers", caller{open: 16, sdk: true, takes: 200 * time.Millisecond, think: 300 * time.Millisecond}, 0.2},
	} {
		for _, keys := range []struct {
			n, open int
			takes   time.Duration
		}{{2, 16, 2 * time.Second}, {12, 2, 8 * time.Second}} {
			l := newLoop(t, 16)
			l.holds, l.blind = true, true
			l.lasts[3] = keys.takes
			other := c.other
			other.name, other.level, other.open = "other", 3, max(1, other.open)
			all := []*caller{&other}
			for i := range keys.n {
				all = append(all, &caller{name: fmt.Sprint("key ", i), open: keys.open, level: 3, sdk: true, think: 300 * time.Millisecond})
			}
			l.run(all, 30*time.Second, 6*time.Minute)
			ended, gaveUp := 0, 0
			for _, k := range all[1:] {
				ended += k.ended
				gaveUp += k.gaveUp
			}
			part := float64(gaveUp) / float64(gaveUp+ended)
			t.Logf("%s beside %d keys of %d, %v: %d served, %.3f given up; of the other %d served, %d given up", c.name, keys.n, keys.open, keys.takes, ended, part, other.ended, other.gaveUp)
			if part > c.most {
				t.Errorf("%s beside %d keys of %d, %v: %.3f of their operations are given up; want at most %.2f", c.name, keys.n, keys.open, keys.takes, part, c.most)
			}
		}
	}
}

// TestShortAnswersAreNotToldToWaitForLongOnes: of one key, interactive requests are short, and
// what its jobs do holds nearly all places for long. Siblings that end leave places more often.
func TestShortAnswersAreNotToldToWaitForLongOnes(t *testing.T) {
	l := newLoop(t, 16)
	l.holds, l.blind = true, true
	people := &caller{name: "a", level: 3, open: 8, sdk: true, think: time.Second, takes: time.Second / 2}
	jobs := &caller{name: "a", level: 3, open: 16, sdk: true, class: fleet.ClassBatch, think: 300 * time.Millisecond, takes: 30 * time.Second}
	l.run([]*caller{people, jobs}, time.Minute, 7*time.Minute)
	t.Logf("people: %d served, %d given up, told %v at most; jobs: %d served, %d given up", people.ended, people.gaveUp, people.longest, jobs.ended, jobs.gaveUp)
	if people.ended < 1200 || 50*people.gaveUp > people.ended {
		t.Errorf("%d short answers, and %d given up; want 1,200 and more, and a fiftieth given up at most", people.ended, people.gaveUp)
	}
	if jobs.ended < 100 {
		t.Errorf("%d long answers; want 100 and more", jobs.ended)
	}
}

// TestLongAnswersOfOneClientTakeNoMoreThanItsShare: one key asks all the time, whatever it is
// told, and keeps each place for long, beside some that come when they are told to.
func TestLongAnswersOfOneClientTakeNoMoreThanItsShare(t *testing.T) {
	for _, c := range []struct {
		places, keys, open int
		takes              time.Duration
	}{{16, 8, 4, 20 * time.Second}, {16, 8, 4, time.Minute}, {64, 32, 4, time.Minute}} {
		l := newLoop(t, c.places)
		l.holds, l.blind = true, true
		l.lasts[3] = 2 * time.Second
		hog := &caller{name: "hog", level: 3, open: 1, every: 33 * time.Millisecond, takes: c.takes, from: 30 * time.Second}
		all := []*caller{hog}
		for i := range c.keys {
			all = append(all, &caller{name: fmt.Sprint("key ", i), open: c.open, level: 3, sdk: true, think: 300 * time.Millisecond})
		}
		l.run(all, 2*time.Minute, 8*time.Minute)
		fair := float64(c.places) / float64(c.keys+1)
		t.Logf("%+v: %.1f places; its share is %.1f", c, l.shares[hog], fair)
		if got := l.shares[hog]; got > 2*fair {
			t.Errorf("%+v: it has %.1f places on average; its share is %.1f", c, got, fair)
		}
	}
}

// TestManyKeysWithShortAnswersBesideSomeWithLongOnes: each has one request at a time, and all
// together want twice the places. Neither kind is served at the cost of most of the other:
// by max-min the short ones would have 12.5 of 16 places, and they have 6.
func TestManyKeysWithShortAnswersBesideSomeWithLongOnes(t *testing.T) {
	l := newLoop(t, 16)
	l.blind, l.holds = true, true
	var shorts, longs []*caller
	for i := range 200 {
		shorts = append(shorts, &caller{name: fmt.Sprint("short", i), open: 1, level: 3, sdk: true, takes: 200 * time.Millisecond, think: 3 * time.Second})
	}
	for i := range 20 {
		longs = append(longs, &caller{name: fmt.Sprint("long", i), open: 1, level: 3, sdk: true, takes: 8 * time.Second, think: time.Second})
	}
	l.run(append(slices.Clone(shorts), longs...), time.Minute, 5*time.Minute)
	served := func(all []*caller) (ended, gaveUp int) {
		for _, c := range all {
			ended, gaveUp = ended+c.ended, gaveUp+c.gaveUp
		}
		return ended, gaveUp
	}
	short, shortUp := served(shorts)
	long, longUp := served(longs)
	busy, _ := l.busy()
	t.Logf("%d short ones ended, %d gave up; %d long ones ended, %d gave up; busy %.2f", short, shortUp, long, longUp, busy)
	if short < 6000 || shortUp*10 > short || long < 200 || longUp > long || busy < 0.85 {
		t.Errorf("%d short ones ended, %d gave up; %d long ones ended, %d gave up; busy %.2f", short, shortUp, long, longUp, busy)
	}
}
