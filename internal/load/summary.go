package load

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Summary is what a set of results says together.
type Summary struct {
	// Requests counts all results; of them Throttled were refused with 429,
	// Failed failed (also those Dropped), the others succeeded.
	Requests, Throttled, Failed, Dropped int
	// FirstToken are times to first token of streams that succeeded; Whole are
	// times of whole answers without streaming.
	FirstToken, Whole Quantiles
	// OverLimit is the share, 0 … 1, of the streams that succeeded whose first
	// token took longer than the limit.
	OverLimit float64
	// Tokens counts output tokens of all answers.
	Tokens int
	// Late is how late the generator was.
	Late Quantiles
}

// Quantiles of a set of times; all 0 when N is 0.
type Quantiles struct {
	N                       int
	P50, P90, P95, P99, Max time.Duration
}

// Summarize sums results up; limit is the latency target of a stream's first
// token.
func Summarize(results []Result, limit time.Duration) Summary {
	s := Summary{Requests: len(results)}
	var first, whole, late []time.Duration
	over := 0
	for i := range results {
		r := &results[i]
		s.Tokens += r.Tokens
		if r.Dropped {
			s.Dropped++
		} else {
			late = append(late, r.Late)
		}
		switch {
		case r.Status == 429:
			s.Throttled++
		case r.Failed():
			s.Failed++
		case r.Whole:
			whole = append(whole, r.FirstToken)
		default:
			first = append(first, r.FirstToken)
			if r.FirstToken > limit {
				over++
			}
		}
	}
	s.FirstToken, s.Whole, s.Late = quantiles(first), quantiles(whole), quantiles(late)
	if len(first) > 0 {
		s.OverLimit = float64(over) / float64(len(first))
	}
	return s
}

func quantiles(times []time.Duration) Quantiles {
	slices.Sort(times)
	return Quantiles{
		N:   len(times),
		P50: Quantile(times, 0.50), P90: Quantile(times, 0.90), P95: Quantile(times, 0.95),
		P99: Quantile(times, 0.99), Max: Quantile(times, 1),
	}
}

// Quantile returns the exact q-quantile of sorted values by nearest rank (the
// smallest value that at least a share q of them doesn't exceed), or the zero
// value if there are none.
func Quantile[T cmp.Ordered](sorted []T, q float64) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	rank := int(math.Ceil(q*float64(len(sorted)) - 1e-9))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// MeanInterval returns the mean of xs and half the width of its 95 % confidence
// interval by Student's t distribution, which supposes that the values (one per
// seed, say) are independent and near normal. With fewer than two values
// nothing can be said about their spread: half is +Inf, and the mean of none is
// NaN.
func MeanInterval(xs []float64) (mean, half float64) {
	n := float64(len(xs))
	if n == 0 {
		return math.NaN(), math.Inf(1)
	}
	for _, x := range xs {
		mean += x / n
	}
	if n == 1 {
		return mean, math.Inf(1)
	}
	squares := 0.0
	for _, x := range xs {
		squares += (x - mean) * (x - mean)
	}
	return mean, tQuantile(len(xs)-1) * math.Sqrt(squares/(n-1)/n)
}

// PairedDifference returns the mean of b − a and half of its 95 % confidence
// interval, where a[i] and b[i] were measured under equal conditions (the same
// seed): what both share cancels out.
func PairedDifference(a, b []float64) (mean, half float64, err error) {
	if len(a) != len(b) {
		return 0, 0, fmt.Errorf("paired difference of %d and %d values: each needs its partner", len(a), len(b))
	}
	differences := make([]float64, len(a))
	for i := range a {
		differences[i] = b[i] - a[i]
	}
	mean, half = MeanInterval(differences)
	return mean, half, nil
}

// tTable are the 0.975 quantiles of Student's t distribution for 1 … 30 degrees
// of freedom, to three decimals.
var tTable = [...]float64{
	12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
	2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
	2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
}

// tQuantile is the 0.975 quantile; above the table by the first terms of its
// expansion around the normal quantile (Abramowitz and Stegun, 26.7.5), right to
// three decimals there.
func tQuantile(freedom int) float64 {
	if freedom <= len(tTable) {
		return tTable[freedom-1]
	}
	const z = 1.959964
	v := float64(freedom)
	return z + (z*z*z+z)/(4*v) + (5*math.Pow(z, 5)+16*z*z*z+3*z)/(96*v*v)
}
