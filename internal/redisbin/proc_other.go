//go:build unix && !linux

package redisbin

import "syscall"

// sysProcAttr: there is no parent-death signal here, so a server may outlive a
// parent that was killed.
func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
