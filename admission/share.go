package admission

import "math"

// demand is what one party wants of a capacity, and how much it weighs.
type demand struct{ want, weight float64 }

// waterLevel is the weighted max-min fair level λ: each party gets
// min(want, weight·λ), and together they get the capacity. It is +Inf where all
// wants fit. Weights are positive. The demands are overwritten.
//
// It is progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): who
// wants no more than an equal part per weight is satisfied, and what it leaves is
// the others', until nobody is satisfied by that. Without sorting that takes
// a few passes, each over those who are left (as Michelot, J. Optim. Theory Appl.
// 50, 1986, projects on a simplex).
func waterLevel(demands []demand, capacity float64) float64 {
	total, weight := 0.0, 0.0
	for _, d := range demands {
		total += d.want
		weight += d.weight
	}
	if total <= capacity {
		return math.Inf(1)
	}
	left := max(0, capacity)
	for {
		level := left / weight
		open := demands[:0]
		for _, d := range demands {
			if d.want > level*d.weight {
				open = append(open, d)
				continue
			}
			left -= d.want
			weight -= d.weight
		}
		switch {
		case len(open) == 0:
			return math.Inf(1) // they fit but for rounding
		case len(open) == len(demands):
			return level
		}
		demands = open
	}
}

// atLeastOne is a share as a whole number of requests: rounded down, but one is
// always allowed, so that nobody waits for ever.
func atLeastOne(share float64) int64 {
	if share >= math.MaxInt32 {
		return math.MaxInt32
	}
	return max(1, int64(share))
}
