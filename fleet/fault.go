package fleet

import (
	"fmt"
	"strings"
)

// Fault is one thing that is wrong with a config file.
type Fault struct {
	File string
	// Line counts from 1; 0 when the fault has no place in the file.
	Line int
	// Path leads to the value: "pools[0].maxInFlight"; "" is the whole file.
	Path string
	// Found says what is there, Accepted what could be.
	Found, Accepted string
}

// String returns the fault on one line:
//
//	fairlead.yaml:12: pools[0].maxInFlight: found "many"; accepted: a whole number 1…65535
func (f Fault) String() string {
	var b strings.Builder
	b.WriteString(f.File)
	if f.Line > 0 {
		fmt.Fprintf(&b, ":%d", f.Line)
	}
	b.WriteString(": ")
	if f.Path != "" {
		b.WriteString(f.Path + ": ")
	}
	fmt.Fprintf(&b, "found %s; accepted: %s", f.Found, f.Accepted)
	return b.String()
}

// Faults are all the faults of a file, by line. It is the error of [Parse] and
// [Load].
type Faults []Fault

// Error returns one line per fault.
func (fs Faults) Error() string {
	lines := make([]string, len(fs))
	for i, f := range fs {
		lines[i] = f.String()
	}
	return strings.Join(lines, "\n")
}

// maxFaults bounds the list. A file with more of them is probably not a config
// file at all; a last fault then says that there are more.
const maxFaults = 500

// clip bounds what a message repeats of the file.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
