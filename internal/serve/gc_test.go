package serve

import "testing"

func TestHeapIsCollectedByWhatLives(t *testing.T) {
	for _, c := range []struct {
		live uint64
		want int
	}{{0, 800}, {1 << 20, 800}, {12 << 20, 300}, {24 << 20, 100}, {32 << 20, 50}, {48 << 20, 50}, {1 << 40, 50}} {
		if got := gcPercent(c.live); got != c.want {
			t.Errorf("%d MiB alive: %d %%, want %d", c.live>>20, got, c.want)
		}
	}
}
