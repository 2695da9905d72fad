package telemetry

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestScalingSeesFiveSeconds(t *testing.T) {
	var w Window
	for i := range 60 {
		s := working(i, float64(i))
		s.KVUsage, s.Waiting = 0.2+0.1*float64(i%2), 4 // up 0.1 in one tick, down in the next
		w.Add(s)
	}
	got := w.Scaling(at(59))
	near := func(what string, s Spread, mean, deviation float64, points int) {
		t.Helper()
		if math.Abs(s.Mean-mean) > 1e-9 || math.Abs(s.Deviation-deviation) > 1e-9 || s.Points != points {
			t.Errorf("%s: %+v, want mean %v, deviation %v of %d", what, s, mean, deviation, points)
		}
	}
	near("KV usage", got.KVUsage, 0.2+0.1*13/25, math.Sqrt(0.01*13*12/625.0), 25)
	near("waiting", got.Waiting, 4, 0, 25)
	near("allocation", got.AllocRate, 0.25, 0.25, 24)

	// Two seconds on, the oldest ten have left the span.
	later := w.Scaling(at(69))
	if later.KVUsage.Points != 16 || later.AllocRate.Points != 15 {
		t.Errorf("two seconds later: %+v", later)
	}
	if gone := w.Scaling(at(59 + 26)); gone != (Scaling{}) {
		t.Errorf("after more than five seconds of silence: %+v", gone)
	}
}

func TestScalingKnowsNothingOfAFrozenPage(t *testing.T) {
	var w Window
	for i := range 60 {
		w.Add(working(i, 77))
	}
	if got := w.Scaling(at(59)); got != (Scaling{}) {
		t.Errorf("%+v of numbers that stand still", got)
	}
}

func TestScalingSkipsBlanks(t *testing.T) {
	var w Window
	for i := range 5 {
		s := working(i, float64(i))
		s.KVUsage = 0.1 * float64(i)
		if i == 2 {
			s.Known &^= HasKVUsage
		}
		w.Add(s)
	}
	got := w.Scaling(at(4))
	if got.KVUsage.Points != 4 || got.Waiting.Points != 5 || got.AllocRate.Points != 3 {
		t.Errorf("%+v", got)
	}
	if math.Abs(got.AllocRate.Mean-0.5) > 1e-9 { // 0.2 in 0.4 s across the blank
		t.Errorf("allocation %+v", got.AllocRate)
	}
}

// TestSpreadIsTheTextbooks compares the running update with two plain passes.
func TestSpreadIsTheTextbooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 1, 25).Draw(t, "values")
		var s Spread
		sum := 0.0
		for _, v := range values {
			s.add(v)
			sum += v
		}
		mean, squares := sum/float64(len(values)), 0.0
		for _, v := range values {
			squares += (v - mean) * (v - mean)
		}
		deviation := math.Sqrt(squares / float64(len(values)))
		if math.Abs(s.Mean-mean) > 1e-9*1e6 || math.Abs(s.Deviation-deviation) > 1e-9*1e6 || s.Points != len(values) {
			t.Fatalf("%+v, want mean %v, deviation %v", s, mean, deviation)
		}
	})
}

func TestScalingAllocatesNothing(t *testing.T) {
	var w Window
	for i := range WindowTicks {
		w.Add(working(i, float64(i)))
	}
	if n := testing.AllocsPerRun(100, func() { w.Scaling(at(WindowTicks)) }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func BenchmarkScaling(b *testing.B) {
	var w Window
	for i := range WindowTicks {
		w.Add(working(i, float64(i)))
	}
	b.ReportAllocs()
	for b.Loop() {
		w.Scaling(at(WindowTicks - 1))
	}
}
