package load

import (
	"cmp"
	"math"
)

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
