//go:build unix && !linux

package envoyproc

import (
	"errors"
	"syscall"
	"time"
)

// sysProcAttr gives Envoy a process group of its own, so that Ctrl-C in a
// terminal reaches only this process and the stop keeps its order. There is no
// parent-death signal here: an Envoy may outlive a parent that was killed.
func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}

func runningCPU(int) (user, system time.Duration, err error) {
	return 0, 0, errors.New("not known while it runs on this system")
}
