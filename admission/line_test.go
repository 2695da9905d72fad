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
