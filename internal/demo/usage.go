package demo

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// usage is what everything had used at one moment.
type usage struct {
	own    time.Duration // CPU of this process: model servers, serve and load
	envoys []time.Duration
	busy   map[string]busyTime // by pool
	idle   machineTime
}

// busyTime is the time that a pool's engines had work, summed over them.
type busyTime struct {
	engines int
	busy    time.Duration
}

// machineTime is the machine's CPU time, in ticks.
type machineTime struct{ idle, total uint64 }

func (s *stack) usage() usage {
	u := usage{own: ownCPU(), busy: map[string]busyTime{}, idle: machine()}
	for _, e := range s.envoys {
		user, system, err := e.CPU()
		if err != nil {
			user, system = 0, 0
		}
		u.envoys = append(u.envoys, user+system)
	}
	for _, server := range s.sim.Servers() {
		pool := poolOf(server.Name())
		b := u.busy[pool]
		b.engines++
		b.busy += server.Stats().Busy
		u.busy[pool] = b
	}
	return u
}

// poolOf is the pool of a simulated server: its name without the number.
func poolOf(server string) string {
	if i := strings.LastIndexByte(server, '-'); i > 0 {
		return server[:i]
	}
	return server
}

// since returns CPU in cores, the machine's idle share and the pools'
// utilisation between two moments.
func (u usage) since(before usage, took time.Duration) ([]CPU, float64, []Busy) {
	cores := func(d time.Duration) float64 { return d.Seconds() / took.Seconds() }
	out := []CPU{{"fairlead (model servers, serve, load)", cores(u.own - before.own)}}
	for i := range u.envoys {
		out = append(out, CPU{fmt.Sprintf("envoy sidecar-%d", i+1), cores(u.envoys[i] - before.envoys[i])})
	}
	idle := -1.0
	if total := u.idle.total - before.idle.total; total > 0 {
		idle = float64(u.idle.idle-before.idle.idle) / float64(total)
	}
	var busy []Busy
	for _, pool := range []string{"h100", "a100"} {
		if b := u.busy[pool]; b.engines > 0 {
			busy = append(busy, Busy{pool, cores(b.busy-before.busy[pool].busy) / float64(b.engines)})
		}
	}
	return out, idle, busy
}

func ownCPU() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// machine reads the first line of /proc/stat: user, nice, system, idle, iowait,
// irq, softirq, steal (proc(5)). Elsewhere it returns zeros.
func machine() machineTime {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return machineTime{}
	}
	line, _, _ := strings.Cut(string(text), "\n")
	var m machineTime
	for i, field := range strings.Fields(line) {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil || i > 8 {
			continue
		}
		m.total += n
		if i == 4 || i == 5 {
			m.idle += n
		}
	}
	return m
}
