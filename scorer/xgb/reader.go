package xgb

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// reader is a cursor over a document in one of the two encodings. Each method
// consumes exactly one value and fails if it is of another kind.
type reader interface {
	// object calls visit for each member; visit must consume the value.
	object(visit func(key string) error) error
	// array calls visit for each element; visit must consume it.
	array(visit func(i int) error) error
	text() (string, error)
	// floats and ints read an array of numbers. Booleans count as 0 and 1 among
	// ints.
	floats() ([]float32, error)
	ints() ([]int32, error)
	skip() error
	// end fails if anything stands after the document.
	end() error
}

// maxMembers bounds the members of an object whose keys are looked at.
const maxMembers = 1024

// members says what to do with the values of an object's known keys; the others
// are skipped.
type members map[string]func() error

// readObject reads an object and refuses duplicate keys, since readers disagree
// on which of two counts.
func readObject(r reader, known members) error {
	seen := map[string]bool{}
	return r.object(func(key string) error {
		if seen[key] {
			return inside(key, errors.New("duplicate key"))
		}
		if len(seen) == maxMembers {
			return fmt.Errorf("more than %d members in one object", maxMembers)
		}
		seen[key] = true
		read, ok := known[key]
		if !ok {
			read = r.skip
		}
		return inside(key, read())
	})
}

// inside puts where an error happened before its text.
func inside(where string, err error) error {
	if err == nil {
		return nil
	}
	return &pathError{path: shown(where), err: err}
}

// pathError is an error with the path of the member it happened at.
type pathError struct {
	path string
	err  error
}

func (e *pathError) Error() string {
	inner, ok := e.err.(*pathError)
	switch {
	case !ok:
		return e.path + ": " + e.err.Error()
	case strings.HasPrefix(inner.path, "["):
		return e.path + inner.Error()
	}
	return e.path + "." + inner.Error()
}

func (e *pathError) Unwrap() error { return e.err }

// shown is a text from the file, short and printable enough for an error.
func shown(s string) string {
	const most = 40
	plain := func(r rune) bool { return r > ' ' && r < utf8.RuneSelf && r != '"' }
	if len(s) > 0 && len(s) <= most && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return fmt.Sprintf("%.*q", most, s)
}
