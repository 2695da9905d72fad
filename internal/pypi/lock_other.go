//go:build !linux && !darwin

package pypi

import (
	"errors"
	"os"
)

// tryLock is never reached: no wheel is pinned for these platforms.
func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
