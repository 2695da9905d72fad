package fleet

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// maxFileSize bounds a config file. Ten thousand endpoints take about 1 MiB.
const maxFileSize = 4 << 20

// Load reads and parses a config file. The error is [Faults] when the file
// could be read but is not a valid configuration.
func Load(path string) (*Config, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("load config: %w", err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("load config: %w", err)
	}
	return Parse(path, data)
}

// Parse reads a configuration. Name is the file's name as messages show it.
// Whatever is wrong comes back at once, as [Faults].
func Parse(name string, data []byte) (*Config, error) {
	d := &decoder{file: name, lines: map[string]int{}}
	cfg := &Config{}
	if root := d.document(data); root != nil {
		d.mark("", root.Line)
		object(configFields(cfg)).read(d, root, "")
		d.check(cfg)
	}
	if len(d.faults) > 0 {
		return nil, d.sorted()
	}
	sum := sha256.Sum256(data)
	cfg.Digest = hex.EncodeToString(sum[:])
	return cfg, nil
}

// document returns the root of a file's only YAML document, or nil and faults.
func (d *decoder) document(data []byte) *yaml.Node {
	if len(data) > maxFileSize {
		d.fault(0, "", "more than 4 MiB", "a file of at most 4 MiB")
		return nil
	}
	if at := invalidUTF8(data); at >= 0 {
		d.fault(1+bytes.Count(data[:at], []byte{'\n'}), "", fmt.Sprintf("the byte 0x%02x, which is not UTF-8", data[at]), "a text file in UTF-8")
		return nil
	}
	in := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := in.Decode(&doc); {
	case errors.Is(err, io.EOF):
		d.fault(0, "", "nothing", "a mapping with apiVersion, kind, groups, pools and routes")
		return nil
	case err != nil:
		d.syntax(err, data)
		return nil
	}
	switch err := in.Decode(&second); {
	case err == nil:
		d.fault(second.Line, "", "a second document", "one document per file")
		return nil
	case !errors.Is(err, io.EOF):
		d.syntax(err, data)
		return nil
	}
	root := doc.Content[0]
	d.plain(root)
	if len(d.faults) > 0 {
		return nil
	}
	return root
}

func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 {
			return i
		}
		i += size
	}
	return -1
}

var (
	syntaxLine    = regexp.MustCompile(`^yaml: (?:line (\d+): )?(?s:(.*))$`)
	unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)
)

// syntax turns an error of the YAML parser into a fault.
func (d *decoder) syntax(err error, data []byte) {
	line, problem := 1, err.Error()
	if m := syntaxLine.FindStringSubmatch(problem); m != nil {
		problem = m[2]
		if m[1] != "" {
			line, _ = strconv.Atoi(m[1]) // digits alone: cannot fail
			// The library counts from 0 when its parser fails, from 1 when its
			// scanner does.
			if strings.HasPrefix(problem, "did not find expected") {
				line++
			}
		}
	}
	if m := unknownAnchor.FindStringSubmatch(problem); m != nil {
		before, _, _ := bytes.Cut(data, []byte("*"+m[1]))
		line = 1 + bytes.Count(before, []byte{'\n'})
	}
	d.fault(line, "", "broken YAML ("+clip(problem, 120)+")", "YAML; indent with spaces, quote values that hold : or #")
}

// plain refuses what would make a file say something else than it shows:
// aliases, anchors, merge keys and tags.
func (d *decoder) plain(n *yaml.Node) {
	const written = "the value itself, written out"
	switch {
	case n.Kind == yaml.AliasNode:
		d.fault(n.Line, "", "the alias *"+clip(n.Value, 40), written)
		return // what it points to is visited in its own place
	case n.Anchor != "":
		d.fault(n.Line, "", "the anchor &"+clip(n.Anchor, 40), written)
	case n.Kind == yaml.ScalarNode && n.ShortTag() == "!!merge":
		d.fault(n.Line, "", "the merge key <<", written)
	case n.Style&yaml.TaggedStyle != 0:
		d.fault(n.Line, "", "the tag "+clip(n.Tag, 40), "a value without a tag")
	}
	for _, child := range n.Content {
		d.plain(child)
	}
}
