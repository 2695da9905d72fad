package agent

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Kind stands at the top of an agent's config file.
const Kind = "Agent"

// Config is a valid configuration with all defaults filled in.
type Config struct {
	// Node is the name that serve knows this machine by; default: the host's
	// name. With mutual TLS it is the DNS name in the agent's certificate.
	Node string
	Push Push
	DCGM DCGM
	// Interval is the time between two frames, and between two reads of GPUs and
	// pages; default 200ms.
	Interval time.Duration
	// Status is where metrics and health are served; default 127.0.0.1:9910.
	Status  fleet.Address
	Servers []Server
}

// Push is where frames go.
type Push struct {
	Address fleet.Address
	TLS     *TLS // nil: plaintext
}

// TLS names PEM files, and the name that serve's certificate must carry; ""
// for the address's host.
type TLS struct {
	CA, Certificate, Key, ServerName string
}

// DCGM says how the GPUs are read.
type DCGM struct {
	// Host is "embedded", a running host engine's "host:port" or "unix:/path", or
	// one of DCGM's own connection strings, "tcp://…" and "vsock://…".
	Host string
	// Off is for nodes without GPUs: only pages are read.
	Off bool
}

// DCGMEmbedded runs DCGM's engine inside the agent.
const DCGMEmbedded = "embedded"

// Server is one model server on this node.
type Server struct {
	// Listen is where the agent reads its page; Advertise is its address in
	// serve's config.
	Listen, Advertise netip.AddrPort
	MetricsPath       string
	// GPUs are its GPUs by hand; empty: they are found out.
	GPUs []Selector
}

// PageURL is where the server's metrics are read.
func (s Server) PageURL() string { return "http://" + s.Listen.String() + s.MetricsPath }

// Selector names a GPU by its UUID or how that begins, or one MIG instance of
// it.
type Selector struct {
	uuid, instance string // instance "" selects the GPU with all its instances
}

func (s Selector) String() string {
	if s.instance == "" {
		return s.uuid
	}
	return s.uuid + "/" + s.instance
}

var selectorText = regexp.MustCompile(`^(GPU-[0-9A-Za-z-]{1,64})(?:/([0-9]{1,5}))?$`)

const acceptedSelector = "a GPU's UUID or how it begins, such as GPU-8a3b, or UUID/instance for a MIG instance, such as GPU-8a3b/3"

// ParseSelector reads "GPU-8a3b" or "GPU-8a3b/3".
func ParseSelector(text string) (Selector, bool) {
	m := selectorText.FindStringSubmatch(text)
	if m == nil {
		return Selector{}, false
	}
	return Selector{uuid: m[1], instance: m[2]}, true
}

// Flags are what the command line sets; it wins over the file. Empty fields
// are not set.
type Flags struct {
	Node, Push, DCGM, Status string
	// Servers are "listen[=advertise]"; any of them replaces the file's list.
	Servers []string
}

// Bounds and defaults of the configuration.
const (
	defaultInterval = 200 * time.Millisecond
	minInterval     = 100 * time.Millisecond // DCGM's profiling fields are no faster
	maxInterval     = 5 * time.Second
	defaultStatus   = "127.0.0.1:9910"
	defaultPath     = "/metrics"
	// maxServers bounds the labels of metrics; a node has at most 16 GPUs with
	// seven MIG instances each.
	maxServers = 128
	maxGPUs    = 128
	// maxSocketPath is sizeof(sockaddr_un.sun_path) less the closing zero.
	maxSocketPath = 107
)

// Load reads the config file, or none if its name is empty, puts the flags over
// it and fills in defaults. What is wrong in either comes back at once, as
// [fleet.Faults].
func Load(file string, flags Flags) (*Config, error) {
	c := &Config{DCGM: DCGM{Host: DCGMEmbedded}, Interval: defaultInterval}
	c.Status, _ = fleet.ParseAddress(defaultStatus) // a constant that parses
	r := &reader{file: file, lines: map[string]int{}, flagged: map[string]bool{}}
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("load config: %w", err)
		}
		r.parse(data, c)
	}
	r.flags(flags, c)
	r.complete(c)
	if faults := r.sorted(); len(faults) > 0 {
		return nil, faults
	}
	return c, nil
}

// parse reads a file's content into c.
func (r *reader) parse(data []byte, c *Config) {
	root := r.document(data)
	if root == nil {
		return
	}
	r.mapping(root, "", []key{
		{"apiVersion", fleet.APIVersion, r.exactly(fleet.APIVersion)},
		{"kind", Kind, r.exactly(Kind)},
		{"node", "", r.text(acceptedNode, func(s string) bool { c.Node = s; return nodeText.MatchString(s) })},
		{"push", "", r.push(&c.Push)},
		{"dcgm", "", r.dcgm(&c.DCGM)},
		{"interval", "", r.interval(&c.Interval)},
		{"status", "", r.status(&c.Status)},
		{"servers", "", r.list(maxServers, "a list of servers, each with listen", func() func(n node) {
			c.Servers = append(c.Servers, Server{})
			return r.server(&c.Servers[len(c.Servers)-1])
		})},
	})
}

const acceptedNode = "1 to 253 of a–z, A–Z, 0–9, dot, - and _"

var nodeText = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,253}$`)

func (r *reader) push(p *Push) func(node) {
	address := r.explained(acceptedPush, func(s string) string { return readPush(s, &p.Address) })
	return func(n node) {
		if !n.isMapping() {
			address(n)
			return
		}
		r.mapping(n.Node, n.path, []key{
			{"address", acceptedPush, address},
			{"plaintext", "", r.boolean(&p.Address.Plaintext)},
			{"tls", "", func(n node) {
				p.TLS = &TLS{}
				r.mapping(n.Node, n.path, []key{
					{"ca", acceptedFile, r.pemFile(&p.TLS.CA)},
					{"certificate", acceptedFile, r.pemFile(&p.TLS.Certificate)},
					{"key", acceptedFile, r.pemFile(&p.TLS.Key)},
					{"serverName", "", r.text("a host's name", func(s string) bool { p.TLS.ServerName = s; return hostText.MatchString(s) })},
				})
			}},
		})
	}
}

func (r *reader) dcgm(d *DCGM) func(node) {
	return func(n node) {
		r.mapping(n.Node, n.path, []key{
			{"host", "", r.explained(acceptedDCGM, func(s string) string { return readDCGM(s, d) })},
			{"off", "", r.boolean(&d.Off)},
		})
		if d.Off && r.lines[n.path+".host"] != 0 {
			r.fault(r.lines[n.path+".host"], n.path+".host", "an engine to read, beside off: true", "one of the two")
		}
	}
}

func (r *reader) interval(into *time.Duration) func(node) {
	return r.text(fmt.Sprintf("a duration %s…%s with its unit, such as 200ms", minInterval, maxInterval), func(s string) bool {
		d, err := time.ParseDuration(s)
		*into = d
		return err == nil && d >= minInterval && d <= maxInterval
	})
}

func (r *reader) status(into *fleet.Address) func(node) {
	address := r.explained(acceptedStatus, func(s string) string { return readStatus(s, into) })
	return func(n node) {
		if !n.isMapping() {
			address(n)
			return
		}
		r.mapping(n.Node, n.path, []key{
			{"address", acceptedStatus, address},
			{"plaintext", "", r.boolean(&into.Plaintext)},
		})
	}
}

func (r *reader) server(s *Server) func(node) {
	return func(n node) {
		s.MetricsPath = defaultPath
		r.mapping(n.Node, n.path, []key{
			{"listen", acceptedServer, r.explained(acceptedServer, func(t string) string { return readServer(t, &s.Listen) })},
			{"advertise", "", r.explained(acceptedServer, func(t string) string { return readServer(t, &s.Advertise) })},
			{"metricsPath", "", r.text("a path that begins with /, printable ASCII without ?, # and spaces", func(t string) bool {
				s.MetricsPath = t
				return len(t) <= 1024 && pathText.MatchString(t)
			})},
			{"gpus", "", r.list(maxGPUs, "a list of GPUs, each "+acceptedSelector, func() func(node) {
				return r.text(acceptedSelector, func(t string) bool {
					g, ok := ParseSelector(t)
					s.GPUs = append(s.GPUs, g)
					return ok
				})
			})},
		})
		if !s.Advertise.IsValid() {
			s.Advertise = s.Listen
		}
	}
}

// What addresses look like.
const (
	acceptedPush   = "unix:/path, IP:port or host:port"
	acceptedDCGM   = "embedded, host:port or unix:/path"
	acceptedStatus = "IP:port, such as 127.0.0.1:9910"
	acceptedServer = "IP:port, such as 127.0.0.1:8000"
	acceptedFile   = "a PEM file's path"
)

var (
	pathText = regexp.MustCompile(`^/[!-"$->@-~]*$`) // printable ASCII but # and ?
	hostText = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?$`)
)

// The readers below return "" or what is accepted instead.

func readPush(text string, into *fleet.Address) string {
	a, why := readTarget(text)
	if why != "" {
		return acceptedPush + " (" + why + ")"
	}
	into.Path, into.Host = a.Path, a.Host
	return ""
}

func readDCGM(text string, d *DCGM) string {
	d.Host = text
	if text == DCGMEmbedded || strings.HasPrefix(text, "tcp://") || strings.HasPrefix(text, "vsock://") {
		return ""
	}
	if _, why := readTarget(text); why != "" {
		return acceptedDCGM + " (" + why + ")"
	}
	return ""
}

// readTarget reads a place to connect to, or says why there is none.
func readTarget(text string) (fleet.Address, string) {
	if path, ok := strings.CutPrefix(text, "unix:"); ok {
		switch {
		case !strings.HasPrefix(path, "/"):
			return fleet.Address{}, "a socket's path must be absolute"
		case len(path) > maxSocketPath:
			return fleet.Address{}, fmt.Sprintf("a socket's path has at most %d bytes, this one %d", maxSocketPath, len(path))
		}
		return fleet.Address{Path: path}, ""
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return fleet.Address{}, "a host and a port are needed"
	}
	if p, err := strconv.ParseUint(port, 10, 16); err != nil || p == 0 {
		return fleet.Address{}, "a port is 1…65535"
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.IsUnspecified() {
			return fleet.Address{}, "an unspecified address leads nowhere"
		}
	} else if !hostText.MatchString(host) {
		return fleet.Address{}, fmt.Sprintf("%q is no host", host)
	}
	return fleet.Address{Host: text}, ""
}

func readStatus(text string, into *fleet.Address) string {
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		return acceptedStatus
	}
	into.Path, into.Host = "", a.String()
	return ""
}

func readServer(text string, into *netip.AddrPort) string {
	a, err := netip.ParseAddrPort(text)
	why := ""
	switch {
	case err != nil:
		return acceptedServer
	case a.Port() == 0:
		why = "port 0 is none"
	case a.Addr().IsUnspecified():
		why = "the address that the agent connects to, not the one that the server binds"
	case a.Addr().Zone() != "" || a.Addr().Is4In6() || a.Addr().IsMulticast():
		why = "a plain unicast address"
	}
	if why != "" {
		return acceptedServer + " (" + why + ")"
	}
	*into = a
	return ""
}

// flags puts the command line over the file.
func (r *reader) flags(f Flags, c *Config) {
	set := func(flag, text string, read func(string) string) {
		if text == "" {
			return
		}
		r.flagged[strings.TrimPrefix(flag, "--")] = true
		if instead := read(text); instead != "" {
			r.faults = append(r.faults, fleet.Fault{File: flag, Found: strconv.Quote(clip(text)), Accepted: instead})
		}
	}
	set("--node", f.Node, func(s string) string {
		if c.Node = s; nodeText.MatchString(s) {
			return ""
		}
		return acceptedNode
	})
	set("--push", f.Push, func(s string) string {
		if strings.HasPrefix(s, "unix:") {
			c.Push.TLS = nil // the file's TLS is for TCP
		}
		return readPush(s, &c.Push.Address)
	})
	set("--dcgm", f.DCGM, func(s string) string {
		if c.DCGM = (DCGM{Off: s == "off", Host: DCGMEmbedded}); c.DCGM.Off {
			return ""
		}
		if instead := readDCGM(s, &c.DCGM); instead != "" {
			return "off, " + instead
		}
		return ""
	})
	set("--status", f.Status, func(s string) string { return readStatus(s, &c.Status) })
	for i, text := range f.Servers {
		if i == 0 {
			c.Servers = nil
		}
		set("--server", text, func(s string) string {
			listen, advertise, both := strings.Cut(s, "=")
			server := Server{MetricsPath: defaultPath}
			instead := readServer(listen, &server.Listen)
			if server.Advertise = server.Listen; both && instead == "" {
				instead = readServer(advertise, &server.Advertise)
			}
			c.Servers = append(c.Servers, server)
			if instead != "" {
				return "LISTEN or LISTEN=ADVERTISE, each " + instead
			}
			return ""
		})
	}
}

// complete checks what belongs together and fills in what is still missing.
func (r *reader) complete(c *Config) {
	if len(r.faults) > 0 {
		return // half-read values would only give faults of their own
	}
	if c.Node == "" {
		host, err := os.Hostname()
		if err == nil && !nodeText.MatchString(host) {
			err = errors.New("the host's name " + strconv.Quote(clip(host)) + " is none")
		}
		if err != nil {
			r.absent("node", "nothing, and no host name ("+err.Error()+")", acceptedNode)
		}
		c.Node = host
	}
	switch {
	case c.Push.Address == (fleet.Address{}):
		r.absent("push", "nothing", acceptedPush+", here or with --push")
	case c.Push.Address.Path != "" && c.Push.TLS != nil:
		r.absent("push.tls", "TLS on a Unix socket", "TLS on TCP alone")
	case c.Push.TLS != nil && c.Push.Address.Plaintext:
		r.absent("push.plaintext", "plaintext beside tls", "one of the two")
	case c.Push.TLS == nil && beyondLoopback(c.Push.Address) && !c.Push.Address.Plaintext:
		r.absent("push", c.Push.Address.Host+", which is not on this host, without tls", "tls with ca, certificate and key, or plaintext: true")
	}
	if beyondLoopback(c.Status) && !c.Status.Plaintext {
		r.absent("status", c.Status.Host+", which others can reach", "a loopback address, or a mapping with address and plaintext: true")
	}
	if len(c.Servers) == 0 {
		r.absent("servers", "none", "at least one server, here or with --server")
	}
	r.unique(c.Servers)
}

func (r *reader) unique(servers []Server) {
	listen, advertise := map[netip.AddrPort]int{}, map[netip.AddrPort]int{}
	for i, s := range servers {
		if first, again := listen[s.Listen]; again {
			r.absent(fmt.Sprintf("servers[%d].listen", i), fmt.Sprintf("%s, as in servers[%d]", s.Listen, first), "each server once")
		}
		if first, again := advertise[s.Advertise]; again {
			r.absent(fmt.Sprintf("servers[%d].advertise", i), fmt.Sprintf("%s, as in servers[%d]", s.Advertise, first), "each address once")
		}
		listen[s.Listen], advertise[s.Advertise] = i, i
	}
}

// beyondLoopback reports whether a TCP address leaves this host.
func beyondLoopback(a fleet.Address) bool {
	host, _, err := net.SplitHostPort(a.Host)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return err != nil || !ip.IsLoopback()
}
