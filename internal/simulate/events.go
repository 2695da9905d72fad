package simulate

import "time"

// eventKind says what happens.
type eventKind uint8

const (
	stepEnds      eventKind = iota + 1 // a: GPU, b: its epoch
	gpuSampled                         // a: GPU
	sampleArrives                      // a: GPU
	gpuGlanced                         // a: GPU
	routerTicks                        // a: router
	ledgerHears                        // a: router, b: GPU
	faultBegins                        // a: index of the fault
	faultEnds                          // a: index of the fault
)

// event is something that will happen. Events of one moment happen in the order
// in which they were scheduled.
type event struct {
	at   time.Duration
	n    uint64
	kind eventKind
	a, b int32
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.n < o.n }

// agenda is a binary heap of events, the next one first. (container/heap would
// box every event.)
type agenda struct {
	heap []event
	n    uint64
}

func (g *agenda) add(at time.Duration, kind eventKind, a, b int) {
	g.n++
	g.heap = append(g.heap, event{at: at, n: g.n, kind: kind, a: int32(a), b: int32(b)})
	h := g.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
			return
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

// next is when the next event happens; there must be one.
func (g *agenda) next() time.Duration { return g.heap[0].at }

func (g *agenda) pop() event {
	h := g.heap
	top, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	g.heap = h
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < last; down++ {
			if h[down].before(&h[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
