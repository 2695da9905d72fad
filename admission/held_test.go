package admission

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// heldFor counts the requests of a client that are held for its limit.
func (w *world) heldFor(client string) int32 {
	c := w.clients.lock(named(client), w.since(w.clock.now()))
	defer c.mu.Unlock()
	return c.use("l").held
}

// TestHoldsBehindALimitThatNeverEndAreForgotten, with the slots that they are for, while
// the client has another request in flight.
func TestHoldsBehindALimitThatNeverEndAreForgotten(t *testing.T) {
	w := behind(t, 1)
	w.tick(w.turnAway("a", true).RetryAfter)
	back := w.counting("a", 1)
	if !w.BeginHold(&back) || w.heldFor("a") != 1 {
		t.Fatalf("%d are held", w.heldFor("a"))
	}
	if w.tick(abandoned / 2); w.heldFor("a") != 1 {
		t.Errorf("%d are held while the slot is outstanding", w.heldFor("a"))
	}
	if w.tick(abandoned); w.heldFor("a") != 0 {
		t.Errorf("%d are held after it has lapsed", w.heldFor("a"))
	}
	if w.EndHold(&back); w.heldFor("a") != 0 {
		t.Errorf("%d are held after its late end", w.heldFor("a"))
	}
}

// TestWhoComesAtItsVeryTimeIsHeldForIt: only those whose time has come count.
func TestWhoComesAtItsVeryTimeIsHeldForIt(t *testing.T) {
	for late, counts := range map[time.Duration]bool{0: true, time.Millisecond: true, -time.Nanosecond: false} {
		w := paced(1)
		w.turnAway("a", false)
		c := w.clients.lock(named("a"), 0)
		w.clock.at.Store(int64(c.account(w.pool(), fleet.ClassInteractive).slots.first() + late))
		c.mu.Unlock()
		back := w.counting("a", 1)
		if held := w.BeginHold(&back); held != counts || back.hold.counts != counts {
			t.Errorf("%v after its time: held %v, counts %v", late, held, back.hold.counts)
		}
	}
}

// TestFirstTriesMayBeReturnsAMinuteAfterTheLast: the client has none in flight that tells
// how often it was tried, or the program has another SDK by now.
func TestFirstTriesMayBeReturnsAMinuteAfterTheLast(t *testing.T) {
	for after, counts := range map[time.Duration]bool{tellsFor: true, tellsFor + time.Millisecond: false} {
		w := paced(1)
		a := w.counting("a", 1) // at once
		w.Admit(&a)
		w.runs(a.ID, 50*time.Second)
		w.clock.advance(after - 50*time.Second)
		first := w.ask("a")
		first.Counts = true
		b := w.bid(&first)
		c := w.meet(&b)
		c.mu.Unlock()
		if b.counts != counts {
			t.Errorf("%v after a return: what a first try says of itself counts: %v", after, b.counts)
		}
	}
}
