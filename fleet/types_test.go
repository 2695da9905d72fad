package fleet

import (
	"math/bits"
	"reflect"
	"testing"

	"pgregory.net/rapid"
)

func TestBasisPointsExamples(t *testing.T) {
	for _, row := range []struct {
		weights []uint32
		want    []uint32
	}{
		{nil, nil},
		{[]uint32{0, 0}, nil},
		{[]uint32{7}, []uint32{10000}},
		{[]uint32{10, 90}, []uint32{1000, 9000}},
		{[]uint32{1, 1, 1}, []uint32{3334, 3333, 3333}}, // ties go to the earlier arm
		{[]uint32{0, 1, 0}, []uint32{0, 10000, 0}},
		{[]uint32{1, 2, 3, 4, 5, 6}, []uint32{476, 952, 1429, 1905, 2381, 2857}},
		{[]uint32{1, 1_000_000}, []uint32{0, 10000}},
		{[]uint32{4_294_967_295, 4_294_967_295}, []uint32{5000, 5000}},
	} {
		if got := splitOf(row.weights).BasisPoints(); !reflect.DeepEqual(got, row.want) {
			t.Errorf("%v: got %v, want %v", row.weights, got, row.want)
		}
	}
}

func splitOf(weights []uint32) Split {
	var s Split
	for i, w := range weights {
		s = append(s, SplitWeight{Pool: string(rune('a' + i)), Weight: w})
	}
	return s
}

// TestBasisPointsAreExact: the sum is the total, every arm is within one point
// of its exact share, an arm of weight 0 gets nothing, and a heavier arm never
// gets less.
func TestBasisPointsAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weights := rapid.SliceOfN(rapid.OneOf(rapid.Uint32Range(0, 5), rapid.Uint32()), 1, 8).Draw(t, "weights")
		s := splitOf(weights)
		points := s.BasisPoints()
		if !reflect.DeepEqual(points, s.BasisPoints()) {
			t.Fatal("not the same twice")
		}
		var total, sum uint64
		for _, w := range weights {
			total += uint64(w)
		}
		if total == 0 {
			if points != nil {
				t.Fatalf("points %v of nothing", points)
			}
			return
		}
		for i, p := range points {
			sum += uint64(p)
			if weights[i] == 0 && p != 0 {
				t.Fatalf("arm %d has %d points and no weight", i, p)
			}
			// |p·total − weight·10000| < total
			high, low := bits.Mul64(uint64(p), total)
			exact := uint64(weights[i]) * BasisPointsTotal
			if high != 0 || max(low, exact)-min(low, exact) >= total {
				t.Fatalf("arm %d has %d points of %v", i, p, weights)
			}
			for j, q := range points {
				if weights[i] > weights[j] && p < q {
					t.Fatalf("arms %d and %d: %v gives %v", i, j, weights, points)
				}
			}
		}
		if sum != BasisPointsTotal {
			t.Fatalf("%v sums to %d", points, sum)
		}
	})
}

func TestLevelBorders(t *testing.T) {
	for _, row := range []struct {
		budget Tokens
		want   BurstLevel
	}{
		{-1 << 63, 0}, {-1, 0}, {0, 0}, {9, 0}, {10, 1}, {63, 1}, {64, 2}, {127, 2}, {128, 3}, {255, 3}, {256, 4}, {511, 4},
		{512, 5}, {1023, 5}, {1024, 6}, {2048, 6}, {2049, 7}, {1<<63 - 1, 7},
	} {
		if got := LevelOf(row.budget); got != row.want {
			t.Errorf("%d tokens: level %d, want %d", row.budget, got, row.want)
		}
	}
	for l := BurstLevel(0); l < BurstLevels; l++ {
		if got := LevelOf(l.UpperBudget()); got != l {
			t.Errorf("the largest budget of level %d is of level %d", l, got)
		}
		if l < BurstLevels-1 && LevelOf(l.UpperBudget()+1) != l+1 {
			t.Errorf("one token more than level %d is not of the next level", l)
		}
	}
}

func TestNamesOfValues(t *testing.T) {
	for got, want := range map[string]string{
		DialectAnthropic.String(): "anthropic", StrategyLegacy.String(): "legacy", H2C.String(): "h2c",
		StateProbe.String(): "probe", Heartbeat.String(): "heartbeat", CauseClientGone.String(): "client_gone",
		State(99).String(): "invalid", Dialect(0).String(): "invalid", Cause(200).String(): "invalid",
		Bytes(0).String(): "0B", Bytes(65535).String(): "65535B", Bytes(64 << 10).String(): "64KiB", Bytes(3 << 30).String(): "3GiB",
		splitOf([]uint32{10, 90}).String(): "a=10 b=90",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestParseAddress(t *testing.T) {
	for _, text := range []string{"unix:/run/x.sock", "127.0.0.1:9900", "[::1]:1"} {
		a, err := ParseAddress(text)
		if err != nil || a.String() != text {
			t.Errorf("%s: got %v, %v", text, a, err)
		}
	}
	for _, text := range []string{"", "unix:", "localhost:1", "127.0.0.1", ":1"} {
		if a, err := ParseAddress(text); err == nil {
			t.Errorf("%q: accepted as %v", text, a)
		}
	}
}
