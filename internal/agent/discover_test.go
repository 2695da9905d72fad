package agent

import (
	"bufio"
	"encoding/hex"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

var update = flag.Bool("update", false, "rewrite golden files")

// TestDiscoveryScripts runs testdata/discover/*.txt: a machine in, findings out.
// Lines of a script:
//
//	space NAME [ADDRESS…]                    a network namespace; the first is the agent's
//	listen SPACE ADDRESS INODE               a listening socket
//	process PID KEY=VALUE…                   parent session name space holds (inodes)
//	                                         gpus container age cmdline, and for how
//	                                         long DCGM has named it (named)
//	gone PID GPU                             DCGM names a process that is not in /proc
//	denied PATH                              a file that may not be read
//	unlisted                                 DCGM tells no processes
//	server ADDRESS                           a configured server
func TestDiscoveryScripts(t *testing.T) {
	scripts, err := filepath.Glob("testdata/discover/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, name := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			script, want, _ := strings.Cut(string(text), "---\n")
			m := parseMachine(t, script)
			f := newFinder(m.proc(), m.servers)
			got := render(m.servers, f.find(m.processes, scriptNow))
			// A second round must say the same, from memory or not.
			if again := render(m.servers, f.find(m.processes, scriptNow)); again != got {
				t.Errorf("the second round says\n%swant\n%s", again, got)
			}
			if *update {
				if err := os.WriteFile(name, []byte(script+"---\n"+got), 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != want {
				t.Errorf("got\n%swant\n%s", got, want)
			}
		})
	}
}

func render(servers []Server, found []Finding) string {
	var b strings.Builder
	for i, f := range found {
		fmt.Fprintf(&b, "%s: ", servers[i].Listen)
		if f.Why != "" {
			fmt.Fprintf(&b, "unknown: %s\n", f.Why)
			continue
		}
		fmt.Fprintf(&b, "%s (processes %v, listening %v)\n", strings.Join(f.GPUs, " "), f.Workers, f.Listeners)
	}
	return b.String()
}

// machine is a made-up /proc tree.
type machine struct {
	files     fstest.MapFS
	spaces    []string
	listening map[string][]string // lines of net/tcp and net/tcp6, by space
	local     map[string][]string // addresses by space
	pids      map[string][]string // processes by space
	denied    map[string]bool
	servers   []Server
	processes map[int]computing
}

const uptimeSeconds = 100_000

var scriptNow = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func parseMachine(t *testing.T, script string) *machine {
	t.Helper()
	m := &machine{files: fstest.MapFS{}, listening: map[string][]string{}, local: map[string][]string{}, pids: map[string][]string{},
		denied: map[string]bool{}, processes: map[int]computing{}}
	m.write("uptime", fmt.Sprintf("%d.00 1.00\n", uptimeSeconds))
	for line := range strings.Lines(script) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		switch words[0] {
		case "space":
			m.spaces = append(m.spaces, words[1])
			m.local[words[1]] = words[2:]
		case "listen":
			m.listening[words[1]] = append(m.listening[words[1]], words[2]+" "+words[3])
		case "process":
			m.process(t, words[1], words[2:])
		case "gone":
			pid, _ := strconv.Atoi(words[1])
			m.processes[pid] = computing{gpus: []string{words[2]}, since: scriptNow}
		case "denied":
			m.denied[words[1]] = true
		case "unlisted":
			m.processes = nil
		case "server":
			m.servers = append(m.servers, Server{Listen: netip.MustParseAddrPort(words[1])})
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	m.pids[m.spaces[0]] = append(m.pids[m.spaces[0]], "self")
	for _, space := range m.spaces {
		for _, pid := range m.pids[space] {
			m.writeNetwork(t, space, pid)
		}
	}
	return m
}

func (m *machine) write(name, text string) { m.files[name] = &fstest.MapFile{Data: []byte(text)} }

func (m *machine) link(name, target string) {
	m.files[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink}
}

func (m *machine) process(t *testing.T, pid string, options []string) {
	t.Helper()
	o := map[string]string{"parent": "1", "session": pid, "name": "x", "space": m.spaces[0], "age": "1000s", "named": "0s"}
	for _, option := range options {
		key, value, _ := strings.Cut(option, "=")
		o[key] = value
	}
	age, err := time.ParseDuration(o["age"])
	if err != nil {
		t.Fatal(err)
	}
	started := int(uptimeSeconds*time.Second-age) / int(clockTick)
	m.write(pid+"/stat", fmt.Sprintf("%s (%s) S %s %s %s 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 %d 1000 10 0\n",
		pid, o["name"], o["parent"], o["session"], o["session"], started))
	cgroup := "0::/user.slice/session-1.scope\n"
	if c := o["container"]; c != "" {
		cgroup = "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + strings.Repeat(c, 64/len(c)) + ".scope\n"
	}
	m.write(pid+"/cgroup", cgroup)
	m.write(pid+"/cmdline", strings.ReplaceAll(o["cmdline"], "_", "\x00")+"\x00")
	m.link(pid+"/fd/0", "/dev/null")
	for i, inode := range strings.Split(o["holds"], ",") {
		if inode != "" {
			m.link(fmt.Sprintf("%s/fd/%d", pid, 3+i), "socket:["+inode+"]")
		}
	}
	m.pids[o["space"]] = append(m.pids[o["space"]], pid)
	if o["gpus"] != "" && m.processes != nil {
		n, _ := strconv.Atoi(pid)
		named, err := time.ParseDuration(o["named"])
		if err != nil {
			t.Fatal(err)
		}
		m.processes[n] = computing{strings.Split(o["gpus"], ","), scriptNow.Add(-named)}
	}
}

func (m *machine) writeNetwork(t *testing.T, space, pid string) {
	t.Helper()
	m.link(pid+"/ns/net", fmt.Sprintf("net:[%d]", 4026531840+slices.Index(m.spaces, space)))
	tables := map[bool]string{}
	for _, six := range []bool{false, true} {
		tables[six] = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	}
	for i, line := range m.listening[space] {
		address, inode, _ := strings.Cut(line, " ")
		a := netip.MustParseAddrPort(address)
		six := a.Addr().Is6()
		tables[six] += fmt.Sprintf("  %2d: %s 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000  0 %s 1 0000000000000000 100 0 0 10 0\n", i, hexAddress(a), inode)
	}
	// A connection from the same port is no listener.
	tables[false] += "  99: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000  0 999 1 0000000000000000 20 4 30 10 -1\n"
	m.write(pid+"/net/tcp", tables[false])
	m.write(pid+"/net/tcp6", tables[true])
	trie := "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
	six := "00000000000000000000000000000001 01 80 10 80       lo\n"
	for _, text := range m.local[space] {
		a := netip.MustParseAddr(text)
		if a.Is4() {
			trie += "     |-- " + text + "\n        /32 host LOCAL\n"
		} else {
			six += hex.EncodeToString(a.AsSlice()) + " 02 40 00 80     eth0\n"
		}
	}
	m.write(pid+"/net/fib_trie", trie)
	m.write(pid+"/net/if_inet6", six)
}

// hexAddress writes an address as /proc/net/tcp does.
func hexAddress(a netip.AddrPort) string {
	raw := a.Addr().AsSlice()
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	return fmt.Sprintf("%s:%04X", strings.ToUpper(hex.EncodeToString(raw)), a.Port())
}

// proc is the tree with its forbidden files.
func (m *machine) proc() fs.FS { return guarded{m.files, m.denied} }

type guarded struct {
	fstest.MapFS
	denied map[string]bool
}

func (g guarded) check(op, name string) error {
	for path := name; path != "."; path = filepath.Dir(path) {
		if g.denied[path] {
			return &fs.PathError{Op: op, Path: name, Err: fs.ErrPermission}
		}
	}
	return nil
}

func (g guarded) Open(name string) (fs.File, error) {
	if err := g.check("open", name); err != nil {
		return nil, err
	}
	return g.MapFS.Open(name)
}

func (g guarded) ReadFile(name string) ([]byte, error) {
	if err := g.check("open", name); err != nil {
		return nil, err
	}
	return g.MapFS.ReadFile(name)
}

func (g guarded) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := g.check("open", name); err != nil {
		return nil, err
	}
	return g.MapFS.ReadDir(name)
}

func (g guarded) ReadLink(name string) (string, error) {
	if err := g.check("readlink", name); err != nil {
		return "", err
	}
	return g.MapFS.ReadLink(name)
}

// TestFindsThisProcessInTheRealProc reads the kernel's own files: the test
// listens, and plays a process that computes.
func TestFindsThisProcessInTheRealProc(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			if strings.Contains(address, "::1") {
				continue // a machine without IPv6
			}
			t.Fatal(err)
		}
		defer l.Close()
		listen := netip.MustParseAddrPort(l.Addr().String())
		if listen.Addr().IsUnspecified() {
			listen = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), listen.Port())
		}
		f := newFinder(os.DirFS("/proc"), []Server{{Listen: listen}})
		found := f.find(map[int]computing{os.Getpid(): {[]string{"GPU-a", "GPU-b"}, time.Now().Add(time.Hour)}}, time.Now())
		if x := found[0]; x.Why != "" || !slices.Equal(x.GPUs, []string{"GPU-a", "GPU-b"}) || !slices.Contains(x.Listeners, os.Getpid()) {
			t.Errorf("%s: %+v, want the GPUs of process %d", listen, x, os.Getpid())
		}
	}
}

func TestFinderReadsLittleWhileNothingChanges(t *testing.T) {
	text, err := os.ReadFile("testdata/discover/vllm-tp4.txt")
	if err != nil {
		t.Fatal(err)
	}
	script, _, _ := strings.Cut(string(text), "---\n")
	m := parseMachine(t, script)
	counted := &countingFS{FS: m.proc().(guarded)}
	f := newFinder(counted, m.servers)
	f.find(m.processes, scriptNow)
	first := counted.fds
	if first == 0 {
		t.Fatal("the first round looked into no process's files")
	}
	f.find(m.processes, scriptNow)
	if counted.fds != first {
		t.Errorf("the second round looked into %d more folders of open files, want none", counted.fds-first)
	}
	// The same process id, begun anew, is another process.
	m.process(t, "211", []string{"parent=1", "session=9", "name=other", "age=500s", "gpus=GPU-0"})
	found := f.find(m.processes, scriptNow)
	if counted.fds == first || slices.Contains(found[0].GPUs, "GPU-0") {
		t.Errorf("a reused process id was taken for the old one: %v", found[0].GPUs)
	}
}

func TestRestartedServerIsNotTheSame(t *testing.T) {
	m := parseMachine(t, script)
	f := newFinder(m.proc(), m.servers)
	if found := f.find(m.processes, scriptNow); found[0].Same || found[0].Why != "" {
		t.Fatalf("first round: %+v", found[0])
	}
	if found := f.find(map[int]computing{}, scriptNow); !found[0].Same || found[0].Why == "" {
		t.Errorf("no process is named, but the server lives: %+v", found[0])
	}
	m.process(t, "200", []string{"name=vllm", "holds=501", "age=10s"})
	if found := f.find(m.processes, scriptNow); found[0].Same {
		t.Errorf("a process with the old one's number passes for it: %+v", found[0])
	}
	if found := f.find(m.processes, scriptNow); !found[0].Same {
		t.Errorf("the new server lives: %+v", found[0])
	}
}

type countingFS struct {
	FS  guarded
	fds int
}

func (c *countingFS) Open(name string) (fs.File, error)      { return c.FS.Open(name) }
func (c *countingFS) ReadFile(name string) ([]byte, error)   { return c.FS.ReadFile(name) }
func (c *countingFS) ReadLink(name string) (string, error)   { return c.FS.ReadLink(name) }
func (c *countingFS) Lstat(name string) (fs.FileInfo, error) { return c.FS.Lstat(name) }
func (c *countingFS) ReadDir(name string) ([]fs.DirEntry, error) {
	if strings.HasSuffix(name, "/fd") {
		c.fds++
	}
	return c.FS.ReadDir(name)
}

func TestFinderLooksAnewAtWhatIsInDoubt(t *testing.T) {
	m := parseMachine(t, "space host\nlisten host 0.0.0.0:8000 501\nprocess 200 name=nginx holds=501\nprocess 300 gpus=GPU-0\nserver 127.0.0.1:8000\n")
	counted := &countingFS{FS: m.proc().(guarded)}
	f := newFinder(counted, m.servers)
	for _, c := range []struct {
		after time.Duration
		looks bool
	}{{0, true}, {5 * time.Second, false}, {25 * time.Second, false}, {31 * time.Second, true}, {40 * time.Second, false}} {
		before := counted.fds
		if found := f.find(m.processes, scriptNow.Add(c.after)); found[0].Why == "" {
			t.Fatalf("found %v", found[0].GPUs)
		}
		if looked := counted.fds > before; looked != c.looks {
			t.Errorf("after %s open files were read: %v, want %v", c.after, looked, c.looks)
		}
	}
}

// BenchmarkDiscovery measures a round on this machine's own /proc: one in which
// nothing changed, and one that looks at all processes.
func BenchmarkDiscovery(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	servers := []Server{{Listen: netip.MustParseAddrPort(l.Addr().String())}}
	processes := map[int]computing{os.Getpid(): {[]string{"GPU-a"}, time.Now().Add(time.Hour)}}
	for name, forget := range map[string]bool{"unchanged": false, "anew": true} {
		b.Run(name, func(b *testing.B) {
			f := newFinder(os.DirFS("/proc"), servers)
			for b.Loop() {
				if forget {
					f.key = ""
				}
				if found := f.find(processes, time.Now()); found[0].Why != "" {
					b.Fatal(found[0].Why)
				}
			}
			table, _ := f.proc.processes()
			b.ReportMetric(float64(len(table)), "processes")
		})
	}
}

func TestHexAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:1F40":                         "127.0.0.1:8000",
		"00000000:0050":                         "0.0.0.0:80",
		"00000000000000000000000000000000:1F40": "[::]:8000",
		"00000000000000000000000001000000:1F40": "[::1]:8000",
		"0000000000000000FFFF00000100007F:1F40": "127.0.0.1:8000", // IPv4 on an IPv6 socket
		"B80D0120000000000000000001000000:1F40": "[2001:db8::1]:8000",
	} {
		if got, ok := parseHexAddress(text); !ok || got.String() != want {
			t.Errorf("%s: %v %v, want %s", text, got, ok, want)
		}
	}
	for _, bad := range []string{"", ":", "0100007F", "0100007F:", "0100007F:12345", "01:1F40", "zz00007F:1F40"} {
		if got, ok := parseHexAddress(bad); ok {
			t.Errorf("%q: %v, want none", bad, got)
		}
	}
}

func TestContainerOfACgroup(t *testing.T) {
	id, inner := strings.Repeat("0123456789abcdef", 4), strings.Repeat("f", 64)
	for cgroup, want := range map[string]string{
		"0::/system.slice/docker-" + id + ".scope\n":                               id,
		"12:memory:/docker/" + id + "\n0::/\n":                                     id,
		"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + id + ".scope\n": id,
		"0::/kubepods-pod1.slice:cri-containerd:" + id + "\n":                      id,
		"0::/machine.slice/libpod-" + id + ".scope/container\n":                    id,
		"0::/docker/" + id + "/docker/" + inner + "\n":                             inner, // a container inside a container
		"0::/user.slice/user-1000.slice/session-2.scope\n":                         "",
		"0::/system.slice/vllm@" + id[:32] + ".service\n":                          "",
		"0::/\n": "",
	} {
		p := procfs{fstest.MapFS{"7/cgroup": &fstest.MapFile{Data: []byte(cgroup)}}}
		if got := p.container(7); got != want {
			t.Errorf("%q: %q, want %q", cgroup, got, want)
		}
	}
}

func FuzzProcessTable(f *testing.F) {
	f.Add("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 55 0 0", "0::/docker/"+strings.Repeat("ab", 32), "  0: 0100007F:1F40 0:0 0A 0:0 0:0 0 0 0 77 1")
	f.Fuzz(func(t *testing.T, stat, cgroup, tcp string) {
		files := fstest.MapFS{}
		for name, text := range map[string]string{"7/stat": stat, "7/cgroup": cgroup, "7/net/tcp": "header\n" + tcp, "7/net/fib_trie": tcp, "uptime": stat} {
			files[name] = &fstest.MapFile{Data: []byte(text)}
		}
		p := procfs{files}
		if x, err := p.process(7); err == nil && x.pid != 7 {
			t.Errorf("process %+v", x)
		}
		if id := p.container(7); id != "" && len(id) != 64 {
			t.Errorf("container %q", id)
		}
		listeners, _ := p.listeners("7")
		lines := 0
		for scan := bufio.NewScanner(strings.NewReader(tcp)); scan.Scan(); {
			lines++
		}
		if len(listeners) > lines {
			t.Errorf("%d listeners from %d lines", len(listeners), lines)
		}
		_, _ = p.addresses("7")
		_, _ = p.uptime()
	})
}
