package simulate

import (
	"slices"
	"sort"
	"time"
)

// timeline holds the moments and stretches of time at which one GPU had a
// capacity gap.
type timeline struct {
	spans []span // each at or after the one before; merged where they touch
	// missed are the times at which requests were sent to the GPU that then
	// missed their objective; sorted by settle.
	missed []time.Duration
}

// span is a stretch of time with both ends in it; a moment where they are equal.
type span struct{ from, to time.Duration }

// add appends a span that begins no earlier than those before it.
func (t *timeline) add(from, to time.Duration) {
	if n := len(t.spans); n > 0 && from <= t.spans[n-1].to {
		t.spans[n-1].to = max(t.spans[n-1].to, to)
		return
	}
	t.spans = append(t.spans, span{from, to})
}

func (t *timeline) settle() { slices.Sort(t.missed) }

// gapIn reports whether a span meets (after, until].
func (t *timeline) gapIn(after, until time.Duration) bool {
	i := sort.Search(len(t.spans), func(i int) bool { return t.spans[i].to > after })
	return i < len(t.spans) && t.spans[i].from <= until
}

// missedIn reports whether a request sent in (after, until] missed its
// objective.
func (t *timeline) missedIn(after, until time.Duration) bool {
	i := sort.Search(len(t.missed), func(i int) bool { return t.missed[i] > after })
	return i < len(t.missed) && t.missed[i] <= until
}
