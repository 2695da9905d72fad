package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// decoder collects what one reading of a file finds.
type decoder struct {
	file   string
	faults Faults
	more   bool // faults beyond maxFaults were left out
	// lines holds the line of every value that stands in the file, by path.
	lines map[string]int
}

func (d *decoder) fault(line int, path, found, accepted string) {
	if len(d.faults) == maxFaults {
		d.more = true
		return
	}
	d.faults = append(d.faults, Fault{File: d.file, Line: line, Path: path, Found: found, Accepted: accepted})
}

// sorted returns the faults by line; those of one line stay in the order in
// which they were found.
func (d *decoder) sorted() Faults {
	slices.SortStableFunc(d.faults, func(a, b Fault) int { return cmp.Compare(a.Line, b.Line) })
	if d.more {
		return append(d.faults, Fault{File: d.file, Found: fmt.Sprintf("more than these %d faults", maxFaults), Accepted: "none"})
	}
	return d.faults
}

// faultAt reports a fault of a value that was read before.
func (d *decoder) faultAt(path, found, accepted string) {
	d.fault(d.line(path), path, found, accepted)
}

func (d *decoder) mark(path string, line int) { d.lines[path] = line }

// given says whether a value stands in the file.
func (d *decoder) given(path string) bool { _, ok := d.lines[path]; return ok }

// line returns where a value stands, or the nearest value around it.
func (d *decoder) line(path string) int {
	for {
		if line, ok := d.lines[path]; ok {
			return line
		}
		cut := strings.LastIndexAny(path, ".[")
		if cut < 0 {
			return d.lines[""]
		}
		path = path[:cut]
	}
}

// value is one kind of YAML value, bound to the place its content goes to. The
// same value reads files and describes itself in the JSON Schema.
type value struct {
	// accepted says in words what is read.
	accepted string
	schema   func() schema
	// read decodes a node or reports faults.
	read func(d *decoder, n *yaml.Node, path string)
	// absent, if set, fills in what is not in the file.
	absent func(d *decoder, path string)
	// fields are those of a mapping, or of a list's items.
	fields []field
	many   bool // a list
}

// field is one key of a mapping.
type field struct {
	name string
	// doc is shown by editors that know the schema.
	doc      string
	required bool
	// preset is the default as YAML text; "" for none.
	preset string
	value  value
	// later marks a key that is planned but that this version does not enforce:
	// it is refused, and later says what to write instead.
	later string
}

// object is a mapping with the given keys and no others.
func object(fields []field) value {
	return value{
		accepted: "a mapping with " + names(fields),
		fields:   fields,
		schema:   func() schema { return objectSchema(fields) },
		read: func(d *decoder, n *yaml.Node, path string) {
			if n.Kind != yaml.MappingNode {
				d.fault(n.Line, path, describe(n), "a mapping with "+names(fields))
				return
			}
			readObject(d, n, path, fields)
		},
		absent: func(d *decoder, path string) {
			for _, f := range fields {
				f.missing(d, join(path, f.name))
			}
		},
	}
}

func readObject(d *decoder, n *yaml.Node, path string, fields []field) {
	seen := make(map[string]int, len(fields))
	planned := false
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, content := n.Content[i], n.Content[i+1]
		at := join(path, keyText(key.Value))
		f := lookup(fields, key.Value)
		first, again := seen[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			d.fault(key.Line, path, describe(key)+" as a key", names(fields))
		case f == nil:
			d.fault(key.Line, at, "an unknown field", suggest(fields, key.Value))
		case f.later != "":
			d.fault(key.Line, at, "a field that this version does not support yet", f.later)
			planned = true
		case again:
			d.fault(key.Line, at, fmt.Sprintf("the field a second time (first on line %d)", first), "each field once")
		default:
			seen[key.Value] = key.Line
			d.mark(at, content.Line)
			f.value.read(d, content, at)
		}
	}
	// A planned field alone stands in the required one's place: one fault is enough.
	planned = planned && len(n.Content) == 2
	for _, f := range fields {
		if _, ok := seen[f.name]; !ok && !(planned && f.required) {
			f.missing(d, join(path, f.name))
		}
	}
}

// missing fills in a field that is not in the file.
func (f field) missing(d *decoder, path string) {
	switch {
	case f.later != "":
	case f.required:
		d.faultAt(path, "nothing", f.value.accepted)
	case f.preset != "":
		f.value.read(d, &yaml.Node{Kind: yaml.ScalarNode, Value: f.preset, Line: d.line(path)}, path)
	case f.value.absent != nil:
		f.value.absent(d, path)
	}
}

// optional is an object that may be left out as a whole.
func optional[T any](into **T, fields func(*T) []field) value {
	whole := object(fields(new(T)))
	whole.read = func(d *decoder, n *yaml.Node, path string) {
		*into = new(T)
		object(fields(*into)).read(d, n, path)
	}
	whole.absent = nil
	return whole
}

// anyNumber is the upper bound of lists that only the file's size bounds.
const anyNumber = 0

// list is a sequence of so many items.
func list[T any](into *[]T, atLeast, atMost int, item func(*T) value) value {
	accepted := "a list"
	if atLeast > 0 {
		accepted = "a list that is not empty"
	}
	one := item(new(T))
	return value{
		accepted: accepted,
		fields:   one.fields,
		many:     true,
		schema: func() schema {
			s := schema{"type": "array", "items": one.schema()}
			if atLeast > 0 {
				s["minItems"] = atLeast
			}
			if atMost != anyNumber {
				s["maxItems"] = atMost
			}
			return s
		},
		read: func(d *decoder, n *yaml.Node, path string) {
			switch {
			case n.Kind != yaml.SequenceNode:
				d.fault(n.Line, path, describe(n), accepted)
			case len(n.Content) < atLeast:
				d.fault(n.Line, path, "an empty list", accepted)
			case atMost != anyNumber && len(n.Content) > atMost:
				d.fault(n.Line, path, fmt.Sprintf("%d items", len(n.Content)), fmt.Sprintf("at most %d", atMost))
			default:
				*into = make([]T, len(n.Content))
				for i, content := range n.Content {
					at := index(path, i)
					d.mark(at, content.Line)
					item(&(*into)[i]).read(d, content, at)
				}
			}
		},
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// keyText writes a key as part of a path; odd ones are quoted.
func keyText(key string) string {
	key = clip(key, 60)
	if strings.IndexFunc(key, func(r rune) bool { return unprintable(r) || r == ' ' }) >= 0 || key == "" {
		return strconv.Quote(key)
	}
	return key
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func lookup(fields []field, name string) *field {
	for i := range fields {
		if fields[i].name == name {
			return &fields[i]
		}
	}
	return nil
}

// names lists the keys that are read.
func names(fields []field) string {
	var out []string
	for _, f := range fields {
		if f.later == "" {
			out = append(out, f.name)
		}
	}
	return strings.Join(out, ", ")
}

// suggest lists the keys, the one that was probably meant first.
func suggest(fields []field, wrong string) string {
	best, distance := "", 3 // more than two letters off is another word
	for _, f := range fields {
		if got := editDistance(squash(wrong), squash(f.name)); f.later == "" && got < distance && got < len(f.name) {
			best, distance = f.name, got
		}
	}
	if best == "" {
		return names(fields)
	}
	return fmt.Sprintf("%s (the nearest name) or another of %s", best, names(fields))
}

// squash makes max_in_flight, max-in-flight and maxInFlight equal.
func squash(name string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(clip(name, 64)))
}

// editDistance is the Levenshtein distance in bytes.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// describe says what a node is.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		return describeScalar(n)
	}
	return "something that is neither a mapping nor a list nor a plain value"
}

func describeScalar(n *yaml.Node) string {
	switch n.ShortTag() {
	case "!!null":
		return "nothing"
	case "!!int", "!!float", "!!bool", "!!timestamp":
		return clip(n.Value, 80)
	}
	return fmt.Sprintf("%q", clip(n.Value, 80))
}
