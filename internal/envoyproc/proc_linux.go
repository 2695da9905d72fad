package envoyproc

import (
	"fmt"
	"os"
	"syscall"
	"time"
)

// userHZ is the unit of /proc's times in 1/s: 100 on every Linux architecture
// that Go supports (USER_HZ, proc_pid_stat(5)).
const userHZ = 100

// sysProcAttr gives Envoy a process group of its own, so that Ctrl-C in a
// terminal reaches only this process and the stop keeps its order, and lets the
// kernel kill Envoy when this process dies.
func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func runningCPU(pid int) (user, system time.Duration, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	return parseStat(string(text), userHZ)
}
