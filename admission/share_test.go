package admission

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// bisect is a dumb second way to the fair level: it tries levels.
func bisect(demands []demand, capacity float64) float64 {
	given := func(level float64) float64 {
		sum := 0.0
		for _, d := range demands {
			sum += min(d.want, level*d.weight)
		}
		return sum
	}
	if given(math.Inf(1)) <= capacity {
		return math.Inf(1)
	}
	low, high := 0.0, 1e12
	for range 200 {
		if mid := (low + high) / 2; given(mid) < capacity {
			low = mid
		} else {
			high = mid
		}
	}
	return low
}

func TestWaterLevelIsWhatBisectionFinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		demands := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) demand {
			return demand{
				want:   rapid.OneOf(rapid.Float64Range(0, 1000), rapid.Just(0.0), rapid.Just(10.0)).Draw(t, "want"),
				weight: rapid.SampledFrom([]float64{0.1, 1, 4, 40}).Draw(t, "weight"),
			}
		}), 0, 50).Draw(t, "demands")
		capacity := rapid.Float64Range(0, 20_000).Draw(t, "capacity")
		want := bisect(demands, capacity)
		got := waterLevel(slices.Clone(demands), capacity)
		if got != want && !(math.Abs(got-want) <= 1e-6*(1+want)) {
			t.Fatalf("level %v of %v at %v; want %v", got, demands, capacity, want)
		}
	})
}

// TestWaterLevelLeavesNothingAndTakesFromNobodyBelow states max-min fairness
// itself: all of the capacity is given, and who gets less than it wants gets at
// least as much per weight as anybody.
func TestWaterLevelLeavesNothingAndTakesFromNobodyBelow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		wants := rapid.SliceOfN(rapid.Float64Range(0, 100), 1, 30).Draw(t, "wants")
		demands := make([]demand, len(wants))
		for i, w := range wants {
			demands[i] = demand{w, float64(1 + i%4)}
		}
		capacity := rapid.Float64Range(0, 1000).Draw(t, "capacity")
		level := waterLevel(slices.Clone(demands), capacity)
		total, want := 0.0, 0.0
		for _, d := range demands {
			got := min(d.want, level*d.weight)
			total, want = total+got, want+d.want
			if got < d.want-1e-9 {
				for _, other := range demands {
					if min(other.want, level*other.weight)/other.weight > got/d.weight+1e-9 {
						t.Fatalf("one wants %v and gets %v, another gets more for its weight", d.want, got)
					}
				}
			}
		}
		if math.Abs(total-min(want, capacity)) > 1e-6 {
			t.Fatalf("given %v of %v to wants of %v", total, capacity, want)
		}
	})
}

func TestWaterLevelIsInfiniteWhereAllWantsFit(t *testing.T) {
	if got := waterLevel([]demand{{3, 1}, {4, 2}}, 7); !math.IsInf(got, 1) {
		t.Fatalf("level %v; want +Inf", got)
	}
}
