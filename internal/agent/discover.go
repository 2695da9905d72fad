package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Finding is what discovery knows of one server.
type Finding struct {
	// GPUs are the ids of its GPUs, sorted; empty if none were found.
	GPUs []string
	// Listeners and Workers are the ids of the processes that listen and of
	// those that compute.
	Listeners, Workers []int
	// Why says what kept the GPUs from being found; "" if they were.
	Why string
	// Same is true while a process lives that listened when GPUs were last found:
	// the server has not been restarted since.
	Same bool
}

// finder finds the GPUs of servers. It remembers its last answer, so that a
// round in which nothing changed reads a few small files only.
type finder struct {
	proc    procfs
	servers []Server
	key     string // what last rests on
	last    []Finding
	until   time.Time // when last is looked at anew all the same
	// listened are the listeners when GPUs were last found, with their start
	// times, per server.
	listened []map[int]uint64
}

func newFinder(proc fs.FS, servers []Server) *finder {
	return &finder{proc: procfs{proc}, servers: servers, listened: make([]map[int]uint64, len(servers))}
}

// doubtFor is how long an answer with open questions stands while nothing that
// it rests on changes. Looking anew reads all open files of all processes.
const doubtFor = 30 * time.Second

const nameThem = "; name its GPUs with gpus"

// computing is what the GPUs' source says of one process.
type computing struct {
	gpus []string
	// since is when it was first named, without a gap until now.
	since time.Time
}

// find returns a finding per server, in their order. Processes are those that
// are named as computing now; nil where that is not known.
func (f *finder) find(processes map[int]computing, now time.Time) []Finding {
	found := f.look(processes, now)
	for i := range found {
		found[i].Same = f.same(i)
		if found[i].Why == "" {
			f.listened[i] = f.startOf(found[i].Listeners)
		}
	}
	return found
}

// same reports whether a listener of the time when GPUs were last found lives.
func (f *finder) same(server int) bool {
	for pid, started := range f.listened[server] {
		if x, err := f.proc.process(pid); err == nil && x.started == started {
			return true
		}
	}
	return false
}

func (f *finder) startOf(pids []int) map[int]uint64 {
	starts := make(map[int]uint64, len(pids))
	for _, pid := range pids {
		if x, err := f.proc.process(pid); err == nil {
			starts[pid] = x.started
		}
	}
	return starts
}

// look is find without memory of who listened.
func (f *finder) look(processes map[int]computing, now time.Time) []Finding {
	if processes == nil {
		return f.none("the GPUs' source tells no processes" + nameThem)
	}
	s := &search{proc: f.proc, servers: f.servers}
	s.takeComputing(processes, now)
	if len(s.computing) == 0 {
		return f.none(s.whyIdle(len(processes)))
	}
	if err := s.readNamespaces(); err != nil {
		return f.none("the listening sockets can't be read (" + err.Error() + ")" + nameThem)
	}
	sockets := make([]bound, len(f.servers))
	for i, server := range f.servers {
		sockets[i] = s.socketsOf(server.Listen)
	}
	key := s.key(sockets)
	if key == f.key && (now.Before(f.until) || !slices.ContainsFunc(f.last, func(x Finding) bool { return x.Why != "" })) {
		return slices.Clone(f.last)
	}
	found, err := s.assign(sockets)
	if err != nil {
		return f.none(err.Error())
	}
	f.key, f.last, f.until = key, found, now.Add(doubtFor)
	return slices.Clone(found)
}

// none is the answer where no server's GPUs can be found.
func (f *finder) none(why string) []Finding {
	f.key = ""
	found := make([]Finding, len(f.servers))
	for i := range found {
		found[i].Why = why
	}
	return found
}

// search is one round of discovery.
type search struct {
	proc    procfs
	servers []Server
	// computing are the processes on GPUs that are still who they were.
	computing map[int]*process
	gpus      map[int][]string
	spaces    []space // the agent's own first
	// denied counts computing processes whose namespace may not be seen.
	denied int

	table map[int]*process
}

// space is a network namespace.
type space struct {
	listeners []listener
	// addresses are its own beside loopback; nil if they can't be read.
	addresses map[netip.Addr]bool
}

// oldestNews is longer than a list of computing processes can be old: DCGM
// makes one every 5 s, and telemetry/dcgm uses it for 15 s.
const oldestNews = 20 * time.Second

// takeComputing keeps the processes that are meant. One that began after its
// number was first named has only inherited it, unless it is older than any
// list.
func (s *search) takeComputing(processes map[int]computing, now time.Time) {
	s.computing, s.gpus = map[int]*process{}, map[int][]string{}
	uptime, err := s.proc.uptime()
	for pid, c := range processes {
		x, gone := s.proc.process(pid)
		if gone != nil {
			continue
		}
		age := uptime - time.Duration(x.started)*clockTick
		if err == nil && age < min(now.Sub(c.since), oldestNews) {
			continue
		}
		x.container = s.proc.container(pid)
		s.computing[pid], s.gpus[pid] = x, c.gpus
	}
}

func (s *search) whyIdle(named int) string {
	if named == 0 {
		return "no process computes on any GPU"
	}
	return fmt.Sprintf("none of the %d processes on the GPUs is in /proc, or all began after they were named; in a container the agent needs the host's process ids (hostPID: true)", named)
}

// readNamespaces reads the agent's network namespace and those of all computing
// processes.
func (s *search) readNamespaces() error {
	own, err := s.proc.namespace("self")
	if err != nil {
		return err
	}
	first, err := s.readSpace("self")
	if err != nil {
		return err
	}
	s.spaces = []space{first}
	seen := map[string]bool{own: true}
	for _, pid := range slices.Sorted(maps.Keys(s.computing)) {
		id, err := s.proc.namespace(strconv.Itoa(pid))
		if err == nil && !seen[id] {
			var other space
			if other, err = s.readSpace(strconv.Itoa(pid)); err == nil {
				seen[id] = true
				s.spaces = append(s.spaces, other)
			}
		}
		if errors.Is(err, fs.ErrPermission) {
			s.denied++
		}
	}
	return nil
}

func (s *search) readSpace(pid string) (space, error) {
	var x space
	var err error
	if x.listeners, err = s.proc.listeners(pid); err != nil {
		return x, err
	}
	x.addresses, _ = s.proc.addresses(pid) // unknown is an answer too
	return x, nil
}

// bound are the listening sockets of one server, or why there are none.
type bound struct {
	inodes []uint64
	why    string
}

// socketsOf finds the sockets that a connection from the agent to address
// arrives at.
func (s *search) socketsOf(address netip.AddrPort) bound {
	own := &s.spaces[0]
	if address.Addr().IsLoopback() || own.addresses[address.Addr()] {
		if inodes := own.covering(address); len(inodes) > 0 {
			return bound{inodes: inodes}
		}
		// Nobody here, so somebody may be behind a port mapping (docker -p and
		// hostPort without a proxy process): such a socket is bound to all
		// addresses of its namespace.
		return s.only(address, s.spaces[1:], func(x *space) []uint64 {
			return x.inodes(func(l listener) bool { return l.covers(address) && l.address.Addr().IsUnspecified() })
		})
	}
	found := s.only(address, s.spaces, func(x *space) []uint64 {
		if x.addresses[address.Addr()] {
			return x.covering(address)
		}
		return nil
	})
	if len(found.inodes) > 0 || slices.ContainsFunc(s.spaces, func(x space) bool { return x.addresses[address.Addr()] }) {
		return found
	}
	return s.only(address, s.spaces, func(x *space) []uint64 {
		if x.addresses == nil {
			return x.covering(address)
		}
		return nil
	})
}

// covering returns the sockets that a connection to address may arrive at.
func (x *space) covering(address netip.AddrPort) []uint64 {
	return x.inodes(func(l listener) bool { return l.covers(address) })
}

func (x *space) inodes(where func(listener) bool) []uint64 {
	var inodes []uint64
	for _, l := range x.listeners {
		if where(l) {
			inodes = append(inodes, l.inode)
		}
	}
	slices.Sort(inodes)
	return slices.Compact(inodes)
}

// only returns the sockets of the one namespace that has any.
func (s *search) only(address netip.AddrPort, spaces []space, covering func(*space) []uint64) bound {
	var found [][]uint64
	for i := range spaces {
		if inodes := covering(&spaces[i]); len(inodes) > 0 {
			found = append(found, inodes)
		}
	}
	switch {
	case len(found) == 1:
		return bound{inodes: found[0]}
	case len(found) > 1:
		return bound{why: fmt.Sprintf("processes in %d network namespaces listen on port %d%s", len(found), address.Port(), nameThem)}
	case s.denied > 0:
		return bound{why: fmt.Sprintf("nothing listens on %s here, and the network namespaces of %d of %d processes on the GPUs may not be looked at: permission denied (run as root or with CAP_SYS_PTRACE)%s", address, s.denied, len(s.computing), nameThem)}
	}
	return bound{why: fmt.Sprintf("nothing listens on %s", address)}
}

// key says in one text what the answer rests on.
func (s *search) key(servers []bound) string {
	var b strings.Builder
	for _, x := range servers {
		fmt.Fprintf(&b, "%v %s;", x.inodes, x.why)
	}
	for _, pid := range slices.Sorted(maps.Keys(s.computing)) {
		fmt.Fprintf(&b, "%d@%d %s;", pid, s.computing[pid].started, s.gpus[pid])
	}
	return b.String()
}

// assign reads who holds the sockets and gives each server its processes.
func (s *search) assign(servers []bound) ([]Finding, error) {
	var err error
	if s.table, err = s.proc.processes(); err != nil {
		return nil, err
	}
	owners, denied := s.owners(servers)
	found := make([]Finding, len(servers))
	for i, x := range servers {
		if found[i].Why = x.why; x.why != "" {
			continue
		}
		found[i].Listeners, found[i].Why = s.listenersOf(x, owners, denied)
	}
	s.followProxies(found)
	s.share(found)
	return found, nil
}

// owners finds the processes that hold the servers' sockets, and how many
// processes' files may not be looked at.
func (s *search) owners(servers []bound) (owners map[uint64][]int, denied int) {
	owners = map[uint64][]int{}
	for _, x := range servers {
		for _, inode := range x.inodes {
			owners[inode] = nil
		}
	}
	for _, pid := range slices.Sorted(maps.Keys(s.table)) {
		held, err := s.proc.sockets(pid)
		if errors.Is(err, fs.ErrPermission) {
			denied++
		}
		slices.Sort(held)
		for _, inode := range slices.Compact(held) {
			if _, wanted := owners[inode]; wanted {
				owners[inode] = append(owners[inode], pid)
			}
		}
	}
	return owners, denied
}

func (s *search) listenersOf(x bound, owners map[uint64][]int, denied int) (pids []int, why string) {
	for _, inode := range x.inodes {
		pids = append(pids, owners[inode]...)
	}
	slices.Sort(pids)
	if pids = slices.Compact(pids); len(pids) > 0 {
		return pids, ""
	}
	if denied > 0 {
		return nil, fmt.Sprintf("its listening socket's owner can't be seen: permission denied on /proc/PID/fd of %d processes (run as root or with CAP_SYS_PTRACE)%s", denied, nameThem)
	}
	return nil, "no process in /proc holds its listening socket" + nameThem
}

// followProxies replaces docker-proxy processes by those that listen where they
// forward to.
func (s *search) followProxies(found []Finding) {
	for i := range found {
		for _, pid := range found[i].Listeners {
			x := s.table[pid]
			to, ok := s.proc.forwardsTo(x)
			if !ok {
				continue
			}
			behind := s.socketsOf(to)
			if behind.why != "" {
				found[i].Listeners, found[i].Why = nil, fmt.Sprintf("docker-proxy forwards to %s: %s", to, behind.why)
				break
			}
			owners, denied := s.owners([]bound{behind})
			found[i].Listeners, found[i].Why = s.listenersOf(behind, owners, denied)
			break
		}
	}
}

// claim is a server's claim on a computing process: nearness counts the steps
// up from the process to the nearest ancestor that it shares with one of the
// server's listeners.
type claim struct {
	server, nearness int
	descent          bool // that ancestor is a listener
}

// share gives each computing process to the servers that it works for; the rule
// is in the package's documentation.
func (s *search) share(found []Finding) {
	claims := map[int][]claim{}
	for pid, x := range s.computing {
		for i := range found {
			if c, ok := s.claim(x, i, found[i].Listeners); ok {
				claims[pid] = append(claims[pid], c)
			}
		}
	}
	for i := range found {
		s.claimBySession(i, found[i].Listeners, claims)
	}
	doubts := make([]string, len(found))
	for _, pid := range slices.Sorted(maps.Keys(claims)) {
		s.settle(pid, claims[pid], found, doubts)
	}
	for i := range found {
		x := &found[i]
		slices.Sort(x.GPUs)
		x.GPUs = slices.Compact(x.GPUs)
		switch {
		case len(x.GPUs) > 0 || x.Why != "":
		case doubts[i] != "":
			x.Why = doubts[i]
		default:
			x.Why = fmt.Sprintf("its process %s computes on no GPU, nor does any that belongs to it%s", s.nameOf(x.Listeners[0]), nameThem)
		}
	}
}

// claim is by descent or by container.
func (s *search) claim(x *process, server int, listeners []int) (claim, bool) {
	chain := s.chain(x.pid)
	for steps, pid := range chain {
		if slices.Contains(listeners, pid) {
			return claim{server, steps, true}, true
		}
	}
	best := claim{server: server, nearness: len(chain) + 1}
	for _, l := range listeners {
		if x.container != "" && s.container(l) == x.container {
			best.nearness = min(best.nearness, s.nearest(chain, l))
		}
	}
	return best, best.nearness <= len(chain)
}

// claimBySession adds a server's claims under rule 3.
func (s *search) claimBySession(server int, listeners []int, claims map[int][]claim) {
	for _, cs := range claims {
		if slices.ContainsFunc(cs, func(c claim) bool { return c.server == server }) {
			return
		}
	}
	for _, l := range listeners {
		if s.container(l) != "" {
			continue
		}
		session := s.table[l].session
		for _, ancestor := range s.chain(l)[1:] {
			if s.table[ancestor].session != session {
				break
			}
			if s.claimBelow(ancestor, session, server, claims) {
				break
			}
		}
	}
}

// claimBelow claims the processes below an ancestor that compute in the session
// and descend from no other server's listener.
func (s *search) claimBelow(ancestor, session, server int, claims map[int][]claim) (any bool) {
	for pid, x := range s.computing {
		steps := slices.Index(s.chain(pid), ancestor)
		if steps < 0 || x.session != session || slices.ContainsFunc(claims[pid], func(c claim) bool { return c.descent }) {
			continue
		}
		claims[pid] = append(claims[pid], claim{server: server, nearness: steps})
		any = true
	}
	return any
}

// settle gives a computing process to those with the nearest claim.
func (s *search) settle(pid int, claims []claim, found []Finding, doubts []string) {
	nearest := slices.MinFunc(claims, func(a, b claim) int { return cmp.Compare(a.nearness, b.nearness) })
	claims = slices.DeleteFunc(slices.Clone(claims), func(c claim) bool { return c.nearness > nearest.nearness })
	slices.SortFunc(claims, func(a, b claim) int { return cmp.Compare(a.server, b.server) })
	claims = slices.CompactFunc(claims, func(a, b claim) bool { return a.server == b.server })
	first := claims[0]
	for _, c := range claims[1:] {
		// The same listening process serves both addresses, or it is in doubt.
		if c.descent && first.descent || slices.Equal(found[c.server].Listeners, found[first.server].Listeners) {
			continue
		}
		for _, d := range claims {
			doubts[d.server] = fmt.Sprintf("the process %s on %s could belong to it or to another server beside it%s", s.nameOf(pid), strings.Join(s.gpus[pid], " "), nameThem)
		}
		return
	}
	for _, c := range claims {
		x := &found[c.server]
		x.GPUs = append(x.GPUs, s.gpus[pid]...)
		x.Workers = append(x.Workers, pid)
	}
}

// chain returns a process and its ancestors, nearest first.
func (s *search) chain(pid int) []int {
	const deepest = 1024 // the table is no snapshot: reused ids could make a ring
	var out []int
	for x := s.table[pid]; x != nil && len(out) < deepest; x = s.table[x.parent] {
		out = append(out, x.pid)
	}
	return out
}

// nearest counts the steps up a chain to the first that is also l or an
// ancestor of it; the chain's length if there is none.
func (s *search) nearest(chain []int, l int) int {
	line := s.chain(l)
	for steps, pid := range chain {
		if slices.Contains(line, pid) {
			return steps
		}
	}
	return len(chain)
}

// container of a process in the table; "" for none.
func (s *search) container(pid int) string {
	x := s.table[pid]
	if x == nil {
		return ""
	}
	if x.container == "" {
		x.container = s.proc.container(pid)
	}
	return x.container
}

func (s *search) nameOf(pid int) string {
	if x := s.table[pid]; x != nil {
		return fmt.Sprintf("%d (%s)", pid, clip(x.name))
	}
	return strconv.Itoa(pid)
}
