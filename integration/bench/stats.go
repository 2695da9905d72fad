package main

import (
	"math"
	"slices"
)

// interval is a median with a distribution-free confidence interval.
type interval struct {
	median, low, high float64
	n                 int
}

// medianOf returns the median of the rounds' values and the narrowest pair of
// order statistics x(k) … x(n+1−k) that covers the median of the distribution
// with at least 95 %: its coverage is 1 − 2·P(Binomial(n, ½) < k), whatever the
// distribution (David and Nagaraja, Order Statistics, §7.1). Below six rounds no
// pair covers so much; then it is the whole range.
func medianOf(values []float64) interval {
	n := len(values)
	if n == 0 {
		return interval{math.NaN(), math.NaN(), math.NaN(), 0}
	}
	x := slices.Sorted(slices.Values(values))
	k, tail, term := 0, 0.0, math.Pow(0.5, float64(n)) // term is P(Binomial = k)
	for k < (n+1)/2 {
		tail += term
		if 1-2*tail < 0.95 {
			break
		}
		term *= float64(n-k) / float64(k+1)
		k++
	}
	k = max(k, 1)
	median := x[n/2]
	if n%2 == 0 {
		median = (x[n/2-1] + x[n/2]) / 2
	}
	return interval{median: median, low: x[k-1], high: x[n-k], n: n}
}
