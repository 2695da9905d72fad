package scrape

import (
	"bytes"
	"strconv"
)

// NameTable holds the metric names that a scan looks for. It is immutable.
type NameTable struct {
	ids map[string]int
}

// NewNameTable returns a table in which names[i] has id i. Of equal names the
// last one wins.
func NewNameTable(names ...string) *NameTable {
	t := &NameTable{ids: make(map[string]int, len(names))}
	for i, n := range names {
		t.ids[n] = i
	}
	return t
}

// lookup returns the id of a name, or −1.
func (t *NameTable) lookup(name []byte) int {
	if id, ok := t.ids[string(name)]; ok {
		return id
	}
	return -1
}

// Stats says what a scan met.
type Stats struct {
	Lines   int // lines of the page, comments and empty ones included
	Samples int // wanted samples emitted
	Bad     int // wanted lines that could not be read
}

// Scan reads a page in the Prometheus text format (or OpenMetrics, whose
// exemplars and `# EOF` it skips) and calls emit for each sample whose name is
// in names, in page order, with the raw text between the braces (see [Label])
// and the value, which may be NaN or infinite. It allocates nothing; labels
// aliases page.
//
// Lines are independent: a line that cannot be read costs that line alone, and
// names that nobody asked for are not looked at beyond their name. So a page
// that is cut off, has CRLF ends, trailing blanks, exemplars or float
// timestamps still yields its good lines, where the reference parser gives up
// at the first fault. Names written in quotes inside the braces (for names
// outside [a-zA-Z0-9_:]) are not looked for: no model server or GPU exporter
// has such a name.
func Scan(page []byte, names *NameTable, emit func(id int, labels []byte, value float64)) Stats {
	var st Stats
	// Histograms repeat one name over many lines: comparing with the name
	// before is an order of magnitude cheaper than finding its end and hashing.
	var last []byte
	lastID := -1
	for len(page) > 0 {
		line := page
		if end := bytes.IndexByte(page, '\n'); end >= 0 {
			line, page = page[:end], page[end+1:]
		} else {
			page = nil
		}
		st.Lines++
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		n := len(last)
		if n == 0 || len(line) <= n || !bytes.Equal(line[:n], last) || nameByte[line[n]] {
			line = skipBlanks(line)
			n = 0
			for n < len(line) && nameByte[line[n]] {
				n++
			}
			if n == 0 {
				continue
			}
			last, lastID = line[:n], names.lookup(line[:n])
		}
		if lastID < 0 {
			continue
		}
		labels, value, ok := parseRest(line[n:])
		if !ok {
			st.Bad++
			continue
		}
		st.Samples++
		emit(lastID, labels, value)
	}
	return st
}

// nameByte says which bytes a metric name is made of.
var nameByte = func() (t [256]bool) {
	for c := range t {
		b := byte(c)
		t[c] = b == '_' || b == ':' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z'
	}
	return t
}()

func blank(b byte) bool { return b == ' ' || b == '\t' }

func skipBlanks(b []byte) []byte {
	for len(b) > 0 && blank(b[0]) {
		b = b[1:]
	}
	return b
}

// token splits off the bytes up to the next blank.
func token(b []byte) (head, rest []byte) {
	for i, c := range b {
		if blank(c) {
			return b[:i], b[i:]
		}
	}
	return b, nil
}

// parseRest reads what follows the name: labels, value, and a timestamp or an
// exemplar, both of which are skipped.
func parseRest(b []byte) (labels []byte, value float64, ok bool) {
	if n := len(b); n > 0 && b[n-1] == '\r' {
		b = b[:n-1]
	}
	b = skipBlanks(b)
	if len(b) > 0 && b[0] == '{' {
		end := closingBrace(b)
		if end < 0 {
			return nil, 0, false
		}
		labels, b = b[1:end], skipBlanks(b[end+1:])
	}
	head, rest := token(b)
	if value, ok = parseNumber(head); !ok {
		return nil, 0, false
	}
	rest = skipBlanks(rest)
	if len(rest) == 0 || rest[0] == '#' {
		return labels, value, true
	}
	stamp, rest := token(rest)
	if _, ok = parseNumber(stamp); !ok {
		return nil, 0, false
	}
	rest = skipBlanks(rest)
	return labels, value, len(rest) == 0 || rest[0] == '#'
}

// closingBrace returns the index of the brace that closes b[0], or −1. Braces
// inside quoted values don't count.
func closingBrace(b []byte) int {
	quoted := false
	for i := 1; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case c == '}' && !quoted:
			return i
		}
	}
	return -1
}

// longestNumber bounds the text of a number. No exporter writes more than some
// 24 bytes; up to 32 the conversion needs no heap.
const longestNumber = 1024

// parseNumber reads a decimal float as the text format defines it: what
// strconv takes, without hexadecimal floats and digit separators.
func parseNumber(b []byte) (float64, bool) {
	if len(b) == 0 || len(b) > longestNumber || bytes.ContainsAny(b, "pP_") {
		return 0, false
	}
	v, err := strconv.ParseFloat(string(b), 64)
	return v, err == nil
}

// Label returns the raw, still escaped value of a label from the text between
// the braces, or nil if it is not there.
func Label(labels []byte, name string) []byte {
	for {
		key, value, rest, ok := nextLabel(labels)
		if !ok {
			return nil
		}
		if string(key) == name {
			return value
		}
		labels = rest
	}
}

// nextLabel splits off the first label; false where there is none more that can
// be read.
func nextLabel(labels []byte) (key, value, rest []byte, ok bool) {
	eq := bytes.IndexByte(labels, '=')
	if eq < 0 {
		return nil, nil, nil, false
	}
	rest = skipBlanks(labels[eq+1:])
	if len(rest) == 0 || rest[0] != '"' {
		return nil, nil, nil, false
	}
	end := closingQuote(rest)
	if end < 0 {
		return nil, nil, nil, false
	}
	return trimKey(labels[:eq]), rest[1:end], rest[end+1:], true
}

// trimKey takes blanks and the comma before a label's name away, and blanks
// after it.
func trimKey(b []byte) []byte {
	for len(b) > 0 && (blank(b[0]) || b[0] == ',') {
		b = b[1:]
	}
	for len(b) > 0 && (blank(b[len(b)-1]) || b[len(b)-1] == ',') {
		b = b[:len(b)-1]
	}
	return b
}

// closingQuote returns the index of the quote that closes b[0], or −1.
func closingQuote(b []byte) int {
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}
