package agent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// reader reads a YAML file strictly: what its keys don't name is a fault, and
// all faults are collected.
type reader struct {
	file   string
	faults fleet.Faults
	// lines holds the line of every value in the file, by path.
	lines map[string]int
	// flagged are the keys that the command line has set; their faults are its.
	flagged map[string]bool
}

// node is a value with its place.
type node struct {
	*yaml.Node
	path string
}

func (n node) isMapping() bool { return n.Kind == yaml.MappingNode }

// key is one key of a mapping. Required says what is accepted where the key is
// missing; "" makes it optional.
type key struct {
	name, required string
	read           func(node)
}

// Limits on what is read and reported.
const (
	maxFileSize = 1 << 20
	maxFaults   = 100
)

func (r *reader) fault(line int, path, found, accepted string) {
	r.faults = append(r.faults, fleet.Fault{File: r.file, Line: line, Path: path, Found: found, Accepted: accepted})
}

// absent reports a fault of a value that was read before, or that is missing,
// at its own line or that of the nearest value around it.
func (r *reader) absent(path, found, accepted string) {
	line, at, file := 0, path, r.file
	for line == 0 && at != "" {
		line = r.lines[at]
		at = at[:max(0, strings.LastIndexAny(at, ".["))]
	}
	top, _, _ := strings.Cut(path, ".")
	if file == "" || r.flagged[top] {
		file, line = "command line", 0
	}
	r.faults = append(r.faults, fleet.Fault{File: file, Line: line, Path: path, Found: found, Accepted: accepted})
}

// sorted returns the faults by line; those of the command line come last.
func (r *reader) sorted() fleet.Faults {
	slices.SortStableFunc(r.faults, func(a, b fleet.Fault) int {
		if (a.File == r.file) != (b.File == r.file) {
			return map[bool]int{true: -1, false: 1}[a.File == r.file]
		}
		return cmp.Compare(a.Line, b.Line)
	})
	if len(r.faults) > maxFaults {
		return append(r.faults[:maxFaults:maxFaults], fleet.Fault{File: r.file, Found: fmt.Sprintf("more than these %d faults", maxFaults), Accepted: "none"})
	}
	return r.faults
}

// document returns the root of a file's only YAML document, or nil and faults.
func (r *reader) document(data []byte) *yaml.Node {
	if len(data) > maxFileSize {
		r.fault(0, "", "more than 1 MiB", "a file of at most 1 MiB")
		return nil
	}
	if !utf8.Valid(data) {
		r.fault(0, "", "bytes that are not UTF-8", "a text file in UTF-8")
		return nil
	}
	in := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := in.Decode(&doc); {
	case errors.Is(err, io.EOF):
		r.fault(0, "", "nothing", "a mapping with apiVersion, kind and servers")
		return nil
	case err != nil:
		r.syntax(err)
		return nil
	}
	switch err := in.Decode(&second); {
	case err == nil:
		r.fault(second.Line, "", "a second document", "one document per file")
		return nil
	case !errors.Is(err, io.EOF):
		r.syntax(err)
		return nil
	}
	if r.plain(doc.Content[0]); len(r.faults) > 0 {
		return nil
	}
	return doc.Content[0]
}

var syntaxLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?(?s:(.*))$`)

func (r *reader) syntax(err error) {
	line, problem := 1, err.Error()
	if m := syntaxLine.FindStringSubmatch(problem); m != nil {
		if problem = m[2]; m[1] != "" {
			line, _ = strconv.Atoi(m[1]) // digits alone: cannot fail
		}
	}
	r.fault(line, "", "broken YAML ("+clip(problem)+")", "YAML; indent with spaces, quote values that hold : or #")
}

// plain refuses what would make a file say something else than it shows.
func (r *reader) plain(n *yaml.Node) {
	const written = "the value itself, written out"
	switch {
	case n.Kind == yaml.AliasNode:
		r.fault(n.Line, "", "the alias *"+clip(n.Value), written)
		return
	case n.Anchor != "":
		r.fault(n.Line, "", "the anchor &"+clip(n.Anchor), written)
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!merge":
		r.fault(n.Line, "", "the merge key <<", written)
	case n.Style&yaml.TaggedStyle != 0:
		r.fault(n.Line, "", "the tag "+clip(n.Tag), "a value without a tag")
	}
	for _, child := range n.Content {
		r.plain(child)
	}
}

// mapping reads a mapping with these keys and no others.
func (r *reader) mapping(n *yaml.Node, path string, keys []key) {
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
	}
	accepted := strings.Join(names, ", ")
	if n.Kind != yaml.MappingNode {
		r.fault(n.Line, path, describe(n), "a mapping with "+accepted)
		return
	}
	r.lines[path] = n.Line
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		at := join(path, clip(name.Value))
		k := slices.IndexFunc(keys, func(k key) bool { return k.name == name.Value })
		switch first, again := seen[name.Value]; {
		case name.Kind != yaml.ScalarNode:
			r.fault(name.Line, path, describe(name)+" as a key", accepted)
		case k < 0:
			r.fault(name.Line, at, "an unknown field", accepted)
		case again:
			r.fault(name.Line, at, fmt.Sprintf("the field a second time (first on line %d)", first), "each field once")
		default:
			seen[name.Value] = name.Line
			r.lines[at] = value.Line
			keys[k].read(node{value, at})
		}
	}
	for _, k := range keys {
		if _, ok := seen[k.name]; !ok && k.required != "" {
			r.fault(n.Line, join(path, k.name), "nothing", k.required)
		}
	}
}

// list reads a sequence; item is called for each place and returns its reader.
func (r *reader) list(most int, accepted string, item func() func(node)) func(node) {
	return func(n node) {
		switch {
		case n.Kind != yaml.SequenceNode:
			r.fault(n.Line, n.path, describe(n.Node), accepted)
		case len(n.Content) > most:
			r.fault(n.Line, n.path, fmt.Sprintf("%d items", len(n.Content)), fmt.Sprintf("at most %d", most))
		default:
			for i, content := range n.Content {
				at := fmt.Sprintf("%s[%d]", n.path, i)
				r.lines[at] = content.Line
				item()(node{content, at})
			}
		}
	}
}

// text reads a string; ok says whether it is accepted.
func (r *reader) text(accepted string, ok func(string) bool) func(node) {
	return r.explained(accepted, func(s string) string {
		if ok(s) {
			return ""
		}
		return accepted
	})
}

// explained reads a string; read returns "" or what is accepted instead.
func (r *reader) explained(accepted string, read func(string) string) func(node) {
	return func(n node) {
		instead := accepted
		if n.Kind == yaml.ScalarNode && n.ShortTag() != "!!null" {
			instead = read(n.Value)
			if instead == "" && n.ShortTag() != "!!str" {
				instead = accepted + `; quote it: "` + clip(n.Value) + `"`
			}
		}
		if instead != "" {
			r.fault(n.Line, n.path, describe(n.Node), instead)
		}
	}
}

func (r *reader) exactly(want string) func(node) {
	return r.text(want, func(s string) bool { return s == want })
}

func (r *reader) pemFile(into *string) func(node) {
	return r.text(acceptedFile, func(s string) bool {
		*into = s
		return s != "" && len(s) <= 1024 && strings.IndexFunc(s, unprintable) < 0 && !strings.HasPrefix(s, "~")
	})
}

func (r *reader) boolean(into *bool) func(node) {
	return func(n node) {
		if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" || n.Value != "true" && n.Value != "false" {
			r.fault(n.Line, n.path, describe(n.Node), "true or false")
			return
		}
		*into = n.Value == "true"
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// clip bounds what a message repeats of the file.
func clip(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// describe says what a node is.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!null":
		return "nothing"
	case "!!int", "!!float", "!!bool", "!!timestamp":
		return clip(n.Value)
	}
	return strconv.Quote(clip(n.Value))
}
