package serve

import (
	"runtime/debug"
	runtimemetrics "runtime/metrics"
)

const (
	// heapFloor is how large the heap may grow before it is collected, however
	// little of it lives: with some 10 MB alive and 1,500 requests a second the
	// default would collect several times a second.
	heapFloor = 48 << 20
	// leastGCPercent counts where more than that lives: half as much again, so
	// that a thousand nodes fit into 128 MiB.
	leastGCPercent = 50
	mostGCPercent  = 800
)

// collector sets how often the heap is collected, by how much of it lives. It
// is owned by the tick loop.
type collector struct {
	on      bool
	percent int
	sample  []runtimemetrics.Sample
}

func newCollector(on bool) *collector {
	return &collector{on: on, sample: []runtimemetrics.Sample{{Name: "/gc/heap/live:bytes"}}}
}

// gcPercent lets a heap of which live bytes live grow to heapFloor at least.
func gcPercent(live uint64) int {
	percent := heapFloor*100/(live+1) + 1 // what may be added to live, in percent of it
	if percent <= 100 {
		return leastGCPercent
	}
	return int(min(mostGCPercent, max(leastGCPercent, percent-100)))
}

// step follows what lives, in steps of a quarter: each change stops the world for
// a moment.
func (c *collector) step() {
	if !c.on {
		return
	}
	runtimemetrics.Read(c.sample)
	if c.sample[0].Value.Kind() != runtimemetrics.KindUint64 {
		return
	}
	want := gcPercent(c.sample[0].Value.Uint64())
	if c.percent == 0 || want*4 < c.percent*3 || want*3 > c.percent*4 {
		c.percent = want
		debug.SetGCPercent(want)
	}
}
