package telemetry

import (
	"math"
	"testing"
)

func TestPCIeBandwidth(t *testing.T) {
	for _, c := range []struct {
		generation, lanes int
		want              float64 // GB/s one way
	}{
		{1, 16, 4}, {2, 16, 8}, {3, 16, 15.754}, {4, 16, 31.508}, {5, 16, 63.015}, {5, 8, 31.508}, {6, 16, 118}, {7, 16, 236},
		{8, 16, 0}, {0, 16, 0}, {-1, 16, 0}, {5, 0, 0}, {5, -1, 0},
	} {
		if got := PCIeBandwidth(c.generation, c.lanes) / 1e9; math.Abs(got-c.want) > 0.001 {
			t.Errorf("generation %d, %d lanes: %v GB/s; want %v", c.generation, c.lanes, got, c.want)
		}
	}
}
