package main

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestMedianIntervalIsAnOrderStatistic(t *testing.T) {
	rounds := func(n int) []float64 {
		out := make([]float64, n)
		for i := range out {
			out[i] = float64(i + 1)
		}
		rand.Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
		return out
	}
	// Tables of the sign test, two-sided 5 %: n = 7 leaves out none, 9 one, 12
	// two, 15 three at each end.
	for _, c := range []struct {
		n                 int
		median, low, high float64
	}{
		{1, 1, 1, 1}, {2, 1.5, 1, 2}, {5, 3, 1, 5}, {6, 3.5, 1, 6}, {7, 4, 1, 7}, {8, 4.5, 1, 8},
		{9, 5, 2, 8}, {12, 6.5, 3, 10}, {15, 8, 4, 12},
	} {
		got := medianOf(rounds(c.n))
		if got.median != c.median || got.low != c.low || got.high != c.high {
			t.Errorf("n = %d: %v [%v, %v], want %v [%v, %v]", c.n, got.median, got.low, got.high, c.median, c.low, c.high)
		}
	}
	if got := medianOf(nil); !math.IsNaN(got.median) {
		t.Errorf("no rounds: %v", got)
	}
}

func TestMedianIntervalCoversTheMedian(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const trials = 4000
	missed := 0
	for range trials {
		values := make([]float64, 9)
		for i := range values {
			values[i] = random.ExpFloat64()
		}
		if m := medianOf(values); m.low > math.Ln2 || m.high < math.Ln2 {
			missed++
		}
	}
	// 3.9 % by the formula.
	if share := float64(missed) / trials; share < 0.025 || share > 0.05 {
		t.Errorf("%.1f %% of the intervals miss the median", 100*share)
	}
}
