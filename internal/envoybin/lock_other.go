//go:build !linux && !darwin

package envoybin

import (
	"errors"
	"os"
)

// tryLock is never reached: there is no wheel to fetch for these platforms.
func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
