package xgb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

// ubjReader reads the part of Universal Binary JSON (draft 12) that XGBoost
// writes: objects without declared type or count; arrays plain, with a count, or
// with a numeric type and a count. Numbers are big-endian. Every length is held
// against the bytes that are left before anything is allocated.
type ubjReader struct {
	data  []byte
	depth int
}

// maxNesting bounds how deep containers may nest; XGBoost's go eight deep.
const maxNesting = 64

func (r *ubjReader) marker() (byte, error) {
	if len(r.data) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	m := r.data[0]
	r.data = r.data[1:]
	return m, nil
}

// take returns the next n bytes.
func (r *ubjReader) take(n int) ([]byte, error) {
	if n > len(r.data) {
		return nil, fmt.Errorf("%d bytes announced, %d left", n, len(r.data))
	}
	b := r.data[:n]
	r.data = r.data[n:]
	return b, nil
}

// numberSize is the length of a number's payload, or 0 if marker is no number.
func numberSize(marker byte) int {
	switch marker {
	case 'i', 'U':
		return 1
	case 'I':
		return 2
	case 'l', 'd':
		return 4
	case 'L', 'D':
		return 8
	}
	return 0
}

// integer decodes the payload of an integer.
func integer(marker byte, b []byte) int64 {
	switch marker {
	case 'i':
		return int64(int8(b[0]))
	case 'U':
		return int64(b[0])
	case 'I':
		return int64(int16(binary.BigEndian.Uint16(b)))
	case 'l':
		return int64(int32(binary.BigEndian.Uint32(b)))
	}
	return int64(binary.BigEndian.Uint64(b))
}

// length reads a count or a string's length.
func (r *ubjReader) length() (int, error) {
	m, err := r.marker()
	if err != nil {
		return 0, err
	}
	size := numberSize(m)
	if size == 0 || m == 'd' || m == 'D' {
		return 0, fmt.Errorf("length of type %q; accepted: an integer", m)
	}
	b, err := r.take(size)
	if err != nil {
		return 0, err
	}
	n := integer(m, b)
	if n < 0 || n > int64(len(r.data)) {
		return 0, fmt.Errorf("length %d with %d bytes left", n, len(r.data))
	}
	return int(n), nil
}

func (r *ubjReader) text() (string, error) {
	if err := r.open('S', "a string"); err != nil {
		return "", err
	}
	return r.bareText()
}

// bareText reads a string without its marker, which is how keys are written.
func (r *ubjReader) bareText() (string, error) {
	n, err := r.length()
	if err != nil {
		return "", err
	}
	b, err := r.take(n)
	return string(b), err
}

func (r *ubjReader) open(want byte, what string) error {
	m, err := r.marker()
	if err != nil {
		return err
	}
	if m != want {
		return fmt.Errorf("found type %q; accepted: %s", m, what)
	}
	return nil
}

func (r *ubjReader) object(visit func(key string) error) error {
	if err := r.open('{', "an object"); err != nil {
		return err
	}
	return r.members(visit)
}

// members reads an object after its opening.
func (r *ubjReader) members(visit func(key string) error) error {
	return r.nested(func() error {
		for {
			if r.closed('}') {
				return nil
			}
			key, err := r.bareText()
			if err != nil {
				return fmt.Errorf("key: %w", err)
			}
			if err := visit(key); err != nil {
				return err
			}
		}
	})
}

func (r *ubjReader) nested(read func() error) error {
	if r.depth == maxNesting {
		return fmt.Errorf("containers nested more than %d deep", maxNesting)
	}
	r.depth++
	err := read()
	r.depth--
	return err
}

// closed consumes the closing marker if it comes next.
func (r *ubjReader) closed(with byte) bool {
	if len(r.data) == 0 || r.data[0] != with {
		return false
	}
	r.data = r.data[1:]
	return true
}

// header is what stands between the opening of an array and its first element.
type header struct {
	element byte // type of all elements, 0 if each says its own
	count   int  // −1 if a closing marker ends the array
}

func (r *ubjReader) header() (header, error) {
	h := header{count: -1}
	if r.closed('$') {
		m, err := r.marker()
		if err != nil {
			return h, err
		}
		if numberSize(m) == 0 {
			return h, fmt.Errorf("array of type %q; accepted: a numeric type", m)
		}
		h.element = m
	}
	if !r.closed('#') {
		if h.element != 0 {
			return h, errors.New("typed array without a count")
		}
		return h, nil
	}
	n, err := r.length()
	h.count = n
	if size := max(1, numberSize(h.element)); err == nil && n > len(r.data)/size {
		err = fmt.Errorf("array of %d elements of %d bytes with %d bytes left", n, size, len(r.data))
	}
	return h, err
}

func (r *ubjReader) array(visit func(i int) error) error {
	if err := r.open('[', "an array"); err != nil {
		return err
	}
	h, err := r.header()
	if err != nil {
		return err
	}
	if h.element != 0 {
		return fmt.Errorf("array of numbers of type %q; accepted: an array of strings or objects", h.element)
	}
	return r.elements(h, visit)
}

// elements calls visit for each element of an array whose elements say their
// type.
func (r *ubjReader) elements(h header, visit func(i int) error) error {
	return r.nested(func() error {
		for i := 0; ; i++ {
			if h.count < 0 && r.closed(']') || i == h.count {
				return nil
			}
			if err := visit(i); err != nil {
				return err
			}
		}
	})
}

func (r *ubjReader) floats() ([]float32, error) {
	var out []float32
	err := r.numbers(func(n int) { out = make([]float32, 0, n) }, func(m byte, b []byte) error {
		switch m {
		case 'd':
			out = append(out, math.Float32frombits(binary.BigEndian.Uint32(b)))
		case 'D':
			out = append(out, float32(math.Float64frombits(binary.BigEndian.Uint64(b))))
		case 'T', 'F':
			return fmt.Errorf("found type %q; accepted: a number", m)
		default:
			out = append(out, float32(integer(m, b)))
		}
		return nil
	})
	return out, err
}

func (r *ubjReader) ints() ([]int32, error) {
	var out []int32
	err := r.numbers(func(n int) { out = make([]int32, 0, n) }, func(m byte, b []byte) error {
		switch m {
		case 'd', 'D':
			return fmt.Errorf("found type %q; accepted: an integer", m)
		case 'T':
			out = append(out, 1)
			return nil
		case 'F':
			out = append(out, 0)
			return nil
		}
		v := integer(m, b)
		if v != int64(int32(v)) {
			return fmt.Errorf("%d does not fit 32 bits", v)
		}
		out = append(out, int32(v))
		return nil
	})
	return out, err
}

// numbers reads an array of numbers or booleans. size is told a bound on their
// count, if there is one, before add gets the first.
func (r *ubjReader) numbers(size func(n int), add func(marker byte, payload []byte) error) error {
	if err := r.open('[', "an array of numbers"); err != nil {
		return err
	}
	h, err := r.header()
	if err != nil {
		return err
	}
	if h.count >= 0 {
		size(h.count)
	}
	for i := 0; i != h.count; i++ {
		if h.count < 0 && r.closed(']') {
			return nil
		}
		m := h.element
		if m == 0 {
			if m, err = r.marker(); err != nil {
				return err
			}
		}
		n := numberSize(m)
		if n == 0 && m != 'T' && m != 'F' {
			return fmt.Errorf("[%d]: found type %q; accepted: a number", i, m)
		}
		b, err := r.take(n)
		if err != nil {
			return err
		}
		if err := add(m, b); err != nil {
			return fmt.Errorf("[%d]: %w", i, err)
		}
	}
	return nil
}

func (r *ubjReader) skip() error {
	m, err := r.marker()
	if err != nil {
		return err
	}
	switch m {
	case 'Z', 'T', 'F':
		return nil
	case 'C':
		_, err = r.take(1)
		return err
	case 'S':
		_, err = r.bareText()
		return err
	case '{':
		return r.members(func(string) error { return r.skip() })
	case '[':
		return r.skipArray()
	}
	size := numberSize(m)
	if size == 0 {
		return fmt.Errorf("unknown type %q", m)
	}
	_, err = r.take(size)
	return err
}

func (r *ubjReader) skipArray() error {
	h, err := r.header()
	if err != nil {
		return err
	}
	if h.element == 0 {
		return r.elements(h, func(int) error { return r.skip() })
	}
	_, err = r.take(h.count * numberSize(h.element))
	return err
}

func (r *ubjReader) end() error {
	if len(r.data) > 0 {
		return fmt.Errorf("%d more bytes after the document", len(r.data))
	}
	return nil
}
