package sim

import (
	"fmt"
	"math"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Config describes a simulated fleet. [Parse] returns it whole and valid; code
// that builds one gets faults from [New].
type Config struct {
	// Seed decides the lengths of answers, and nothing else.
	Seed    uint64
	Servers []ServerConfig
	Faults  []ScheduledFault
}

// ServerConfig describes one model server.
type ServerConfig struct {
	Name string // unique; [a-z0-9-], at most 63 bytes
	// Listen is the server's address. Port 0 takes a free one; a file must name
	// the port.
	Listen netip.AddrPort
	Model  string // what the API calls it
	GPU    string // UUID on the GPU page
	Engine Profile
	// TokensPerEvent is how many tokens a stream's event carries after the
	// first, which carries one. Default 1.
	TokensPerEvent int
}

// ScheduledFault is a fault with its server.
type ScheduledFault struct {
	Server string
	Fault  Fault
}

// maxServers bounds a fleet: each server has a port and three goroutines.
const maxServers = 1024

// maxFaults bounds the faults that one server can have ahead of it.
const maxFaults = 1024

var nameForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Problem is one fault of a fleet file.
type Problem struct {
	File string
	Line int
	Path string // such as servers[2].listen
	Text string // what was found and what is accepted
}

func (p Problem) String() string {
	if p.Path == "" {
		return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Text)
	}
	return fmt.Sprintf("%s:%d: %s: %s", p.File, p.Line, p.Path, p.Text)
}

// Problems are all faults of a fleet file, in order of lines.
type Problems []Problem

// Error lists the faults, one a line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// Load reads a fleet file. Faults come back as [Problems].
func Load(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("load fleet: %w", err)
	}
	return Parse(path, data)
}

// Parse reads a fleet from YAML; name stands for the file in messages. It
// returns either a valid config or [Problems], all of them.
func Parse(name string, data []byte) (*Config, error) {
	d := &decoder{file: name, names: map[string]int{}, addresses: map[netip.AddrPort]int{}}
	cfg := d.config(data)
	if len(d.problems) > 0 {
		slices.SortStableFunc(d.problems, func(a, b Problem) int { return a.Line - b.Line })
		return nil, d.problems
	}
	return cfg, nil
}

// check validates a config built by code.
func (c *Config) check() error {
	if len(c.Servers) == 0 || len(c.Servers) > maxServers {
		return fmt.Errorf("found %d servers; accepted: 1 to %d", len(c.Servers), maxServers)
	}
	names := map[string]bool{}
	for _, s := range c.Servers {
		if !nameForm.MatchString(s.Name) || names[s.Name] {
			return fmt.Errorf("server %q: a name is unique, of a-z, 0-9 and -, at most 63 bytes", s.Name)
		}
		names[s.Name] = true
		if !s.Listen.IsValid() {
			return fmt.Errorf("server %q: no address to listen on", s.Name)
		}
		if s.TokensPerEvent < 0 {
			return fmt.Errorf("server %q: found %d tokens per event; accepted: 1 or more", s.Name, s.TokensPerEvent)
		}
		if err := s.Engine.Check(); err != nil {
			return fmt.Errorf("server %q: %w", s.Name, err)
		}
	}
	for _, f := range c.Faults {
		if !names[f.Server] {
			return fmt.Errorf("fault %s: no server is named %q", f.Fault, f.Server)
		}
		if err := f.Fault.check(); err != nil {
			return fmt.Errorf("server %q: %w", f.Server, err)
		}
	}
	return nil
}

// defaultGPU is a stable UUID-like name for a server's GPU.
func defaultGPU(server string) string {
	h, g := hashString(1, server), hashString(2, server)
	return fmt.Sprintf("GPU-%08x-%04x-%04x-%04x-%012x",
		uint32(h>>32), uint16(h>>16), uint16(h), uint16(g>>48), g&(1<<48-1))
}

// hashString is FNV-1a over the seed and s, with a final mix.
func hashString[T string | []byte](seed uint64, s T) uint64 {
	h := uint64(14695981039346656037) ^ mix(seed)
	for i := 0; i < len(s); i++ {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return mix(h)
}

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// answerQuantiles are quantiles of the answers' lengths in Azure's trace of chat
// requests of 2023 (p50 129, p90 424, p99 601 tokens); both ends are chosen.
var answerQuantiles = []struct{ share, tokens float64 }{
	{0, 16}, {0.5, 129}, {0.9, 424}, {0.99, 601}, {1, 800},
}

// drawLength returns the tokens after which an answer ends by itself: the
// quantile of h, interpolated on a logarithmic scale.
func drawLength(h uint64) int {
	u := float64(h>>11) / (1 << 53)
	for i := 1; i < len(answerQuantiles); i++ {
		lo, hi := answerQuantiles[i-1], answerQuantiles[i]
		if u <= hi.share {
			at := (u - lo.share) / (hi.share - lo.share)
			return int(math.Round(lo.tokens * math.Pow(hi.tokens/lo.tokens, at)))
		}
	}
	return int(answerQuantiles[len(answerQuantiles)-1].tokens)
}
