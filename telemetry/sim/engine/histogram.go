package engine

import "time"

// Bucket bounds in seconds, those of vLLM's histograms. They are not to be
// written.
var (
	TTFTBounds = []float64{
		0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5,
		7.5, 10, 20, 40, 80, 160, 640, 2560,
	}
	ITLBounds = []float64{
		0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
		10, 20, 40, 80,
	}
)

// Histogram counts durations in fixed buckets.
type Histogram struct {
	Bounds []float64 // seconds, ascending
	Counts []uint64  // per bucket, the last one unbounded
	Sum    float64   // seconds
	Total  uint64
}

// NewHistogram returns an empty histogram with the given upper bounds.
func NewHistogram(bounds []float64) Histogram {
	return Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds)+1)}
}

// Observe counts d; a negative one counts as 0.
func (h *Histogram) Observe(d time.Duration) {
	s := max(d, 0).Seconds()
	i := 0
	for i < len(h.Bounds) && s > h.Bounds[i] {
		i++
	}
	h.Counts[i]++
	h.Sum += s
	h.Total++
}
