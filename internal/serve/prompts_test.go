package serve

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/internal/own"
)

func TestSentPromptTokensAreCountedSinceASampleAndOverASecond(t *testing.T) {
	var p prompts
	var s own.Sent
	begin := time.Now()
	at := func(tick int) time.Time { return begin.Add(time.Duration(tick) * tickEvery) }
	if s.Since(begin) != 0 {
		t.Error("something was sent before the first tick")
	}
	for tick := range 40 {
		s.Tick(at(tick), 7, p.of(7))
		p.add(7, 100) // between this tick and the next
		p.add(8, 1)
	}
	for _, c := range []struct {
		name string
		from time.Time
		want float64
	}{
		{"a sample of this tick", at(39), 0},
		{"a sample of the tick before", at(38), 100},
		{"a sample between two ticks counts from the earlier", at(38).Add(tickEvery / 2), 100},
		{"one second", at(39).Add(-time.Second), 2000},
		{"longer than is kept", begin.Add(-time.Hour), 2000},
	} {
		if got := s.Since(c.from); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	s.Tick(at(40), 9, 5_000) // the slot was dealt anew: another endpoint's total
	if got := s.Since(begin); got != 0 {
		t.Errorf("%v tokens after a new slot, want 0", got)
	}
	p.add(accesslog.NoSlot, 100)
	if p.of(accesslog.NoSlot) != 0 {
		t.Error("an endpoint without a slot has a count")
	}
}
