//go:build unix

package serve

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// lockFolder takes the state folder for this process. The lock ends with the
// returned file, also when the process is killed.
func lockFolder(dir string) (*os.File, error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("serve.stateDir: %w", err)
	}
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = folder.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("serve.stateDir: %s is in use by another serve; accepted: a folder of its own for each", dir)
		}
		return nil, fmt.Errorf("serve.stateDir: lock %s: %w", dir, err)
	}
	return folder, nil
}
