//go:build !(dcgm && cgo && linux)

package dcgm

import (
	"errors"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNewSaysHowToBuildWithDCGM(t *testing.T) {
	if s, err := New(Options{}); s != nil || !errors.Is(err, ErrNotBuilt) {
		t.Errorf("New returned %v, %v; want %v", s, err, ErrNotBuilt)
	}
}
