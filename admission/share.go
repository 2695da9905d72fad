package admission

import (
	"cmp"
	"math"
	"slices"
)

// demand is what one party wants of a capacity, and how much it weighs.
type demand struct{ want, weight float64 }

// waterLevel is the weighted max-min fair level λ: each party gets
// min(want, weight·λ), and together they get the capacity. It is +Inf where all
// wants fit. Weights are positive. The demands are put in another order.
//
// It is progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): who
// wants least for its weight is satisfied first, and what it leaves is the
// others'.
func waterLevel(demands []demand, capacity float64) float64 {
	total, weight := 0.0, 0.0
	for _, d := range demands {
		total += d.want
		weight += d.weight
	}
	if total <= capacity {
		return math.Inf(1)
	}
	slices.SortFunc(demands, func(a, b demand) int { return cmp.Compare(a.want*b.weight, b.want*a.weight) })
	left := max(0, capacity)
	for _, d := range demands {
		if level := left / weight; d.want > level*d.weight {
			return level
		}
		left -= d.want
		weight -= d.weight
	}
	return math.Inf(1)
}

// atLeastOne is a share as a whole number of requests: rounded down, but one is
// always allowed, so that nobody waits for ever.
func atLeastOne(share float64) int64 {
	if share >= math.MaxInt32 {
		return math.MaxInt32
	}
	return max(1, int64(share))
}
