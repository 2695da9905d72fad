package engine

import (
	"math"
	"slices"
	"time"
)

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

	// The sequences of a batch have one gap in common, so the last answer is
	// kept.
	lastD  time.Duration
	lastAt int
}

// NewHistogram returns an empty histogram with the given upper bounds.
func NewHistogram(bounds []float64) Histogram {
	return Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds)+1)}
}

// Observe counts d; a negative one counts as 0.
func (h *Histogram) Observe(d time.Duration) {
	s := max(d, 0).Seconds()
	if d != h.lastD || h.Total == 0 {
		h.lastD = d
		h.lastAt, _ = slices.BinarySearch(h.Bounds, s)
	}
	h.Counts[h.lastAt]++
	h.Sum += s
	h.Total++
}

// Quantile is the upper bound in seconds of the bucket that holds the q-quantile,
// +Inf for the last bucket's, 0 for an empty histogram.
func (h *Histogram) Quantile(q float64) float64 {
	if h.Total == 0 {
		return 0
	}
	rank, below := uint64(math.Ceil(q*float64(h.Total))), uint64(0)
	for i, n := range h.Counts[:len(h.Bounds)] {
		if below += n; below >= rank {
			return h.Bounds[i]
		}
	}
	return math.Inf(1)
}

// Merge adds the counts of another histogram with the same bounds.
func (h *Histogram) Merge(other *Histogram) {
	for i, n := range other.Counts {
		h.Counts[i] += n
	}
	h.Sum += other.Sum
	h.Total += other.Total
}
