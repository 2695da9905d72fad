package telemetry

import (
	"math"
	"time"
)

// ScalingSpan is how far back [Window.Scaling] looks: five seconds, where an
// ejection is decided on samples of 200 ms. A fleet grows in minutes, so its
// signals may be slow, and must not jump with one long prompt.
const ScalingSpan = 5 * time.Second

// Spread is the mean and the population standard deviation of a number, and of
// how many values. Without any all three are 0.
type Spread struct {
	Mean, Deviation float64
	Points          int

	squares float64 // sum of squared distances from the mean
}

// add takes in a value (Welford's update, which does not cancel).
func (s *Spread) add(v float64) {
	s.Points++
	distance := v - s.Mean
	s.Mean += distance / float64(s.Points)
	s.squares += distance * (v - s.Mean)
	s.Deviation = math.Sqrt(max(0, s.squares) / float64(s.Points))
}

// Scaling is what an endpoint says for the size of its fleet.
type Scaling struct {
	KVUsage Spread // 0…1
	Waiting Spread // requests queued in the engine
	// AllocRate is the growth of KVUsage from sample to sample in shares of the
	// cache per second; falls count as 0, because freeing memory does not undo an
	// allocation.
	AllocRate Spread
}

// Scaling returns means and deviations over the ScalingSpan before now. Of an
// endpoint that has been silent, or whose numbers have stood still with work
// running (see [Sample.Settle]), for that long it knows nothing.
func (w *Window) Scaling(now time.Time) Scaling {
	var s Scaling
	if w.Age(now) > ScalingSpan {
		return s
	}
	var newer *Sample // the next sample with a KV usage
	for i := range w.n {
		v := w.back(i)
		if now.Sub(v.At) > ScalingSpan {
			break
		}
		if v.Known.Has(HasWaiting) {
			s.Waiting.add(v.Waiting)
		}
		if !v.Known.Has(HasKVUsage) {
			continue
		}
		s.KVUsage.add(v.KVUsage)
		if newer != nil && newer.At.After(v.At) {
			s.AllocRate.add(max(0, newer.KVUsage-v.KVUsage) / newer.At.Sub(v.At).Seconds())
		}
		newer = v
	}
	return s
}
