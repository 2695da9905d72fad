package sim

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// decoder turns a YAML document into a Config and collects every fault on the
// way.
type decoder struct {
	file     string
	problems Problems

	names     map[string]int         // server name → line
	addresses map[netip.AddrPort]int // → line
	servers   []ServerConfig
}

func (d *decoder) fault(n *yaml.Node, path, format string, args ...any) {
	line := 1
	if n != nil && n.Line > 0 {
		line = n.Line
	}
	d.problems = append(d.problems, Problem{d.file, line, path, fmt.Sprintf(format, args...)})
}

func (d *decoder) config(data []byte) *Config {
	root := d.document(data)
	if root == nil {
		return nil
	}
	m := d.mapping(root, "", "apiVersion", "kind", "seed", "servers", "pools", "faults")
	d.constant(m, root, "apiVersion", "fairlead/v1alpha1")
	d.constant(m, root, "kind", "Fleet")
	cfg := &Config{Seed: 1}
	if n := m["seed"]; n != nil {
		cfg.Seed = uint64(d.integer(n, "seed", 0, math.MaxInt64))
	}
	for i, n := range d.sequence(m["servers"], "servers") {
		d.server(n, fmt.Sprintf("servers[%d]", i))
	}
	for i, n := range d.sequence(m["pools"], "pools") {
		d.pool(n, fmt.Sprintf("pools[%d]", i))
	}
	if len(d.servers) == 0 && len(d.problems) == 0 {
		d.fault(root, "", "no server; accepted: a list under servers, pools or both")
	}
	if len(d.servers) > maxServers {
		d.fault(root, "", "found %d servers; accepted: at most %d", len(d.servers), maxServers)
	}
	for i, n := range d.sequence(m["faults"], "faults") {
		if f, ok := d.scheduled(n, fmt.Sprintf("faults[%d]", i)); ok {
			cfg.Faults = append(cfg.Faults, f)
		}
	}
	cfg.Servers = d.servers
	return cfg
}

// document returns the root of the only document, or nil after a fault.
func (d *decoder) document(data []byte) *yaml.Node {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			d.fault(nil, "", "the file is empty; accepted: a document with kind: Fleet")
		} else {
			d.syntax(err)
		}
		return nil
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		d.fault(&more, "", "found more than one document; accepted: one")
		return nil
	}
	if len(doc.Content) == 0 {
		d.fault(nil, "", "the file is empty; accepted: a document with kind: Fleet")
		return nil
	}
	return doc.Content[0]
}

// syntax reports a YAML error at the line it names.
func (d *decoder) syntax(err error) {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	n := &yaml.Node{Line: 1}
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		if number, tail, ok := strings.Cut(rest, ": "); ok {
			if line, err := strconv.Atoi(number); err == nil {
				n.Line, text = line, tail
			}
		}
	}
	d.fault(n, "", "not YAML: %s", text)
}

// fields are a mapping's values by key.
type fields map[string]*yaml.Node

// mapping returns the fields of n and reports the ones that are unknown or there
// twice. It never returns nil.
func (d *decoder) mapping(n *yaml.Node, path string, known ...string) fields {
	m := fields{}
	n = deref(n)
	if n.Kind != yaml.MappingNode {
		d.fault(n, path, "found %s; accepted: a mapping with %s", describe(n), strings.Join(known, ", "))
		return m
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], deref(n.Content[i+1])
		switch {
		case !slices.Contains(known, key.Value):
			d.fault(key, join(path, key.Value), "unknown field; accepted: %s", strings.Join(known, ", "))
		case m[key.Value] != nil:
			d.fault(key, join(path, key.Value), "found twice; accepted: once")
		case value.Tag != "!!null":
			m[key.Value] = value
		}
	}
	return m
}

func (d *decoder) sequence(n *yaml.Node, path string) []*yaml.Node {
	if n == nil {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		d.fault(n, path, "found %s; accepted: a list", describe(n))
		return nil
	}
	if len(n.Content) > maxServers {
		d.fault(n, path, "found %d entries; accepted: at most %d", len(n.Content), maxServers)
		return nil
	}
	return n.Content
}

func deref(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode && n.Alias != nil {
		n = n.Alias
	}
	return n
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if n.Tag == "!!null" {
		return "nothing"
	}
	return strconv.Quote(n.Value)
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func (d *decoder) constant(m fields, parent *yaml.Node, key, want string) {
	n := m[key]
	if n == nil {
		d.fault(parent, key, "missing; accepted: %s", want)
	} else if n.Value != want {
		d.fault(n, key, "found %s; accepted: %s", describe(n), want)
	}
}

func (d *decoder) text(n *yaml.Node, path string) string {
	if n.Kind != yaml.ScalarNode || n.Value == "" {
		d.fault(n, path, "found %s; accepted: a text", describe(n))
		return ""
	}
	return n.Value
}

func (d *decoder) integer(n *yaml.Node, path string, lo, hi int64) int64 {
	v, err := strconv.ParseInt(n.Value, 10, 64)
	if n.Kind != yaml.ScalarNode || err != nil || v < lo || v > hi {
		d.fault(n, path, "found %s; accepted: a whole number from %d to %d", describe(n), lo, hi)
		return lo
	}
	return v
}

func (d *decoder) number(n *yaml.Node, path string, lo, hi float64) float64 {
	v, err := strconv.ParseFloat(n.Value, 64)
	if n.Kind != yaml.ScalarNode || err != nil || !(v >= lo && v <= hi) {
		d.fault(n, path, "found %s; accepted: a number from %g to %g", describe(n), lo, hi)
		return lo
	}
	return v
}

func (d *decoder) duration(n *yaml.Node, path string) (v time.Duration) {
	var err error
	if v, err = parseDuration(n.Value); n.Kind != yaml.ScalarNode || err != nil {
		d.fault(n, path, "found %s; accepted: a duration with unit, such as 500ms or 10s", describe(n))
	}
	return v
}

// server reads one entry of servers.
func (d *decoder) server(n *yaml.Node, path string) {
	m := d.mapping(n, path, "name", "listen", "model", "gpu", "engine")
	d.required(m, n, path, "name", "listen", "engine")
	s := d.common(m, path)
	if v := m["gpu"]; v != nil {
		s.GPU = d.text(v, join(path, "gpu"))
	}
	d.add(deref(n), path, s)
}

// pool reads one entry of pools: count servers with ports in a row, named
// NAME-1, NAME-2, …
func (d *decoder) pool(n *yaml.Node, path string) {
	m := d.mapping(n, path, "name", "count", "listen", "model", "engine")
	d.required(m, n, path, "name", "count", "listen", "engine")
	s := d.common(m, path)
	count := int64(0)
	if v := m["count"]; v != nil {
		count = d.integer(v, join(path, "count"), 1, maxServers)
	}
	if last := int64(s.Listen.Port()) + count - 1; last > math.MaxUint16 {
		d.fault(m["listen"], join(path, "listen"), "found port %d for %d servers; accepted: a last port of at most 65535",
			s.Listen.Port(), count)
		return
	}
	name, first := s.Name, s.Listen
	for i := range count {
		s.Name = fmt.Sprintf("%s-%d", name, i+1)
		s.Listen = netip.AddrPortFrom(first.Addr(), first.Port()+uint16(i))
		d.add(deref(n), path, s)
	}
}

func (d *decoder) required(m fields, parent *yaml.Node, path string, keys ...string) {
	if deref(parent).Kind != yaml.MappingNode {
		return // reported by mapping
	}
	for _, key := range keys {
		if m[key] == nil {
			d.fault(deref(parent), join(path, key), "missing")
		}
	}
}

// common reads what a server and a pool share. Model defaults to the profile's
// model.
func (d *decoder) common(m fields, path string) ServerConfig {
	s := ServerConfig{TokensPerEvent: 1}
	if v := m["name"]; v != nil {
		s.Name = d.text(v, join(path, "name"))
	}
	if v := m["listen"]; v != nil {
		s.Listen = d.address(v, join(path, "listen"))
	}
	if v := m["engine"]; v != nil {
		d.engine(v, join(path, "engine"), &s)
	}
	if v := m["model"]; v != nil {
		s.Model = d.text(v, join(path, "model"))
	}
	return s
}

func (d *decoder) address(n *yaml.Node, path string) netip.AddrPort {
	a, err := netip.ParseAddrPort(n.Value)
	if n.Kind != yaml.ScalarNode || err != nil || a.Port() == 0 {
		d.fault(n, path, "found %s; accepted: an IP address with a port from 1 to 65535", describe(n))
		return netip.AddrPort{}
	}
	return a
}

func (d *decoder) engine(n *yaml.Node, path string, s *ServerConfig) {
	m := d.mapping(n, path, "profile", "slowdown", "kvTokens", "maxSeqs", "chunk", "tokensPerEvent")
	d.required(m, n, path, "profile")
	if v := m["profile"]; v != nil {
		p, err := ProfileByName(v.Value)
		if err != nil {
			d.fault(v, join(path, "profile"), "%s", err)
		}
		s.Engine = p
		s.Model = modelOf(p.Name)
	}
	if v := m["slowdown"]; v != nil {
		s.Engine = s.Engine.Slowed(d.number(v, join(path, "slowdown"), 0.001, 1000))
	}
	for _, f := range []struct {
		key   string
		least int64
		into  *int
	}{
		{"kvTokens", BlockTokens, &s.Engine.KVTokens},
		{"maxSeqs", 1, &s.Engine.MaxSeqs},
		{"chunk", 1, &s.Engine.Chunk},
		{"tokensPerEvent", 1, &s.TokensPerEvent},
	} {
		if v := m[f.key]; v != nil {
			*f.into = int(d.integer(v, join(path, f.key), f.least, 100_000_000))
		}
	}
}

// modelOf is a profile's model: its name without the hardware.
func modelOf(profile string) string {
	if i := strings.LastIndexByte(profile, '-'); i > 0 {
		return profile[:i]
	}
	return profile
}

// add appends a server unless its name or address is taken or bad.
func (d *decoder) add(n *yaml.Node, path string, s ServerConfig) {
	if s.Name != "" && !nameForm.MatchString(s.Name) {
		d.fault(n, join(path, "name"), "found %q; accepted: a-z, 0-9 and -, at most 63 bytes", s.Name)
	}
	if line, taken := d.names[s.Name]; taken && s.Name != "" {
		d.fault(n, join(path, "name"), "found %q, as in line %d; accepted: each name once", s.Name, line)
	}
	if line, taken := d.addresses[s.Listen]; taken && s.Listen.IsValid() {
		d.fault(n, join(path, "listen"), "found %s, as in line %d; accepted: each address once", s.Listen, line)
	}
	d.names[s.Name] = n.Line
	d.addresses[s.Listen] = n.Line
	if s.GPU == "" {
		s.GPU = defaultGPU(s.Name)
	}
	if len(d.servers) <= maxServers {
		d.servers = append(d.servers, s)
	}
}

// scheduled reads one entry of faults.
func (d *decoder) scheduled(n *yaml.Node, path string) (ScheduledFault, bool) {
	before := len(d.problems)
	m := d.mapping(n, path, "server", "kind", "at", "for", "factor")
	d.required(m, n, path, "server", "kind")
	var f ScheduledFault
	if v := m["server"]; v != nil {
		f.Server = v.Value
		if _, ok := d.names[f.Server]; !ok {
			d.fault(v, join(path, "server"), "found %s; accepted: the name of a server above", describe(v))
		}
	}
	if v := m["kind"]; v != nil {
		kind, err := parseKind(v.Value)
		if err != nil {
			d.fault(v, join(path, "kind"), "%s", err)
		}
		f.Fault = NewFault(kind, 0, 0)
	}
	if v := m["at"]; v != nil {
		f.Fault.At = d.duration(v, join(path, "at"))
	}
	if v := m["for"]; v != nil {
		f.Fault.For = d.duration(v, join(path, "for"))
	}
	if v := m["factor"]; v != nil && f.Fault.Kind != 0 {
		f.Fault.Factor = d.number(v, join(path, "factor"), 0, math.MaxFloat64)
		if err := checkFactor(f.Fault.Kind, f.Fault.Factor); err != nil {
			d.fault(v, join(path, "factor"), "%s", err)
		}
	}
	return f, len(d.problems) == before
}
