package agent

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// procfs reads a /proc tree. All formats are those of proc(5).
type procfs struct{ fs fs.FS }

// process is one line of the process table.
type process struct {
	pid, parent, session int
	name                 string
	// started is the start time in clock ticks since boot; with the pid it names
	// a process for ever.
	started uint64
	// container is the id of the container it runs in; "" for none.
	container string
}

// clockTick is the unit of times in /proc/<pid>/stat: USER_HZ is 100 on all
// architectures that have NVIDIA GPUs.
const clockTick = 10 * time.Millisecond

// processes reads the process table. Processes that end meanwhile are left out.
func (p procfs) processes() (map[int]*process, error) {
	entries, err := fs.ReadDir(p.fs, ".")
	if err != nil {
		return nil, fmt.Errorf("read the process table: %w", err)
	}
	table := make(map[int]*process, len(entries))
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if x, err := p.process(pid); err == nil {
			table[pid] = x
		}
	}
	return table, nil
}

func (p procfs) process(pid int) (*process, error) {
	text, err := fs.ReadFile(p.fs, at(pid, "stat"))
	if err != nil {
		return nil, err
	}
	// pid (name) state parent group session …; the name may hold anything.
	open, end := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return nil, fmt.Errorf("%s: no name in brackets", at(pid, "stat"))
	}
	fields := strings.Fields(string(text[end+1:]))
	const parent, session, started = 1, 3, 19 // counted from the state
	if len(fields) <= started {
		return nil, fmt.Errorf("%s: %d fields after the name, want at least %d", at(pid, "stat"), len(fields), started+1)
	}
	x := &process{pid: pid, name: string(text[open+1 : end])}
	var errs [3]error
	x.parent, errs[0] = strconv.Atoi(fields[parent])
	x.session, errs[1] = strconv.Atoi(fields[session])
	x.started, errs[2] = strconv.ParseUint(fields[started], 10, 64)
	return x, errors.Join(errs[:]...)
}

// uptime is how long the machine runs.
func (p procfs) uptime() (time.Duration, error) {
	text, err := fs.ReadFile(p.fs, "uptime")
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), " ")
	seconds, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0, fmt.Errorf("uptime: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// containerID is how container runtimes name a container in its cgroup's path:
// docker-<id>.scope, cri-containerd-<id>.scope, crio-<id>.scope,
// libpod-<id>.scope or just <id>, an id being 64 hexadecimal digits.
var containerID = regexp.MustCompile(`(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)`)

// container returns the id of the container a process runs in, "" for none.
// With several in the path (containers inside containers) it is the innermost.
func (p procfs) container(pid int) string {
	text, err := fs.ReadFile(p.fs, at(pid, "cgroup"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if found := containerID.FindAllStringSubmatch(strings.TrimSpace(line), -1); len(found) > 0 {
			return found[len(found)-1][1]
		}
	}
	return ""
}

// namespace names the network namespace of a process ("net:[4026531840]").
func (p procfs) namespace(pid string) (string, error) {
	return fs.ReadLink(p.fs, path.Join(pid, "ns/net"))
}

// listener is a TCP socket in state LISTEN.
type listener struct {
	address netip.AddrPort // IPv4 as such, also where an IPv6 socket is bound to it
	inode   uint64
	six     bool
}

// listeners returns the listening sockets of a process's network namespace.
// That there is no IPv6 is no error.
func (p procfs) listeners(pid string) ([]listener, error) {
	four, err := p.table(path.Join(pid, "net/tcp"), false)
	if err != nil {
		return nil, err
	}
	six, err := p.table(path.Join(pid, "net/tcp6"), true)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return append(four, six...), nil
}

// connectionsSkipped is how many lines of connections in a row end the search
// for listening sockets. The kernel lists all of these first
// (Documentation/networking/proc_net_tcp.rst), so that a host with 100,000
// connections need not be read to its end; gVisor mixes them.
const connectionsSkipped = 1000

// table reads the listening sockets of net/tcp or net/tcp6.
func (p procfs) table(name string, six bool) ([]listener, error) {
	file, err := p.fs.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var found []listener
	skipped := 0
	lines := bufio.NewScanner(file)
	lines.Scan() // the header
	for skipped < connectionsSkipped && lines.Scan() {
		// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …
		fields := strings.Fields(lines.Text())
		const local, state, inode = 1, 3, 9
		if len(fields) <= inode {
			continue
		}
		if fields[state] != "0A" {
			skipped++
			continue
		}
		skipped = 0
		address, ok := parseHexAddress(fields[local])
		n, err := strconv.ParseUint(fields[inode], 10, 64)
		if ok && err == nil {
			found = append(found, listener{address, n, six})
		}
	}
	return found, lines.Err()
}

// parseHexAddress reads "0100007F:1F40": the address in 32-bit words as they
// lie in memory, so byte-reversed on little-endian machines, which all machines
// with NVIDIA's current driver are.
func parseHexAddress(text string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(text, ":")
	number, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, false
	}
	raw, err := hex.DecodeString(host)
	if err != nil || len(raw) != 4 && len(raw) != 16 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	address, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(address.Unmap(), uint16(number)), true
}

// covers reports whether a connection to address may arrive at the socket: it
// is bound to that address, or to all addresses. (An IPv6 socket bound to all
// takes IPv4 too unless it was told otherwise, which /proc does not show.)
func (l listener) covers(address netip.AddrPort) bool {
	bound := l.address.Addr()
	return l.address.Port() == address.Port() &&
		(bound == address.Addr() || bound.IsUnspecified() && (l.six || address.Addr().Is4()))
}

// addresses returns the addresses other than loopback that belong to a
// process's network namespace.
func (p procfs) addresses(pid string) (map[netip.Addr]bool, error) {
	own := map[netip.Addr]bool{}
	text, err := fs.ReadFile(p.fs, path.Join(pid, "net/fib_trie"))
	if err != nil {
		return nil, err
	}
	// A leaf is followed by what it is: "|-- 10.0.0.11" and "/32 host LOCAL".
	var leaf netip.Addr
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "|-- "); ok {
			leaf, _ = netip.ParseAddr(name)
		} else if line == "/32 host LOCAL" && leaf.IsValid() && !leaf.IsLoopback() {
			own[leaf] = true
		}
	}
	text, err = fs.ReadFile(p.fs, path.Join(pid, "net/if_inet6"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		digits, _, _ := strings.Cut(line, " ")
		raw, err := hex.DecodeString(digits)
		if a, ok := netip.AddrFromSlice(raw); err == nil && ok && !a.IsLoopback() {
			own[a] = true
		}
	}
	return own, nil
}

// sockets returns the inodes of the sockets a process holds.
func (p procfs) sockets(pid int) ([]uint64, error) {
	entries, err := fs.ReadDir(p.fs, at(pid, "fd"))
	if err != nil {
		return nil, err
	}
	var inodes []uint64
	for _, e := range entries {
		target, err := fs.ReadLink(p.fs, at(pid, "fd/"+e.Name()))
		if err != nil {
			if errors.Is(err, fs.ErrPermission) {
				return nil, err
			}
			continue // closed meanwhile
		}
		if digits, ok := strings.CutPrefix(target, "socket:["); ok {
			if inode, err := strconv.ParseUint(strings.TrimSuffix(digits, "]"), 10, 64); err == nil {
				inodes = append(inodes, inode)
			}
		}
	}
	return inodes, nil
}

// forwardsTo returns where a docker-proxy process forwards connections to:
// Docker starts one per published port, which listens in the host's namespace
// and hands on into the container's.
func (p procfs) forwardsTo(x *process) (netip.AddrPort, bool) {
	if x.name != "docker-proxy" {
		return netip.AddrPort{}, false
	}
	text, err := fs.ReadFile(p.fs, at(x.pid, "cmdline"))
	if err != nil {
		return netip.AddrPort{}, false
	}
	words := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
	value := func(flag string) string {
		if i := slices.Index(words, flag); i >= 0 && i+1 < len(words) {
			return words[i+1]
		}
		return ""
	}
	address, err := netip.ParseAddr(value("-container-ip"))
	port, err2 := strconv.ParseUint(value("-container-port"), 10, 16)
	return netip.AddrPortFrom(address, uint16(port)), err == nil && err2 == nil
}

func at(pid int, name string) string { return path.Join(strconv.Itoa(pid), name) }
