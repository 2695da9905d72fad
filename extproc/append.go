package extproc

import (
	"encoding/binary"
	"math/bits"
)

// Writing protobuf by appending. Field numbers are those of
// envoy/service/ext_proc/v3, envoy/config/core/v3 and google.protobuf.Struct;
// the tests read every answer back with the generated types.

// open begins a length-delimited field (numbers below 16) and returns where its
// content starts, for shut.
func open(b []byte, number byte) ([]byte, int) {
	b = append(b, number<<3|2, 0)
	return b, len(b)
}

// shut ends the field whose content starts at: it writes the length, moving the
// content when the length needs more than one byte.
func shut(b []byte, at int) []byte {
	n := len(b) - at
	if n < 0x80 {
		b[at-1] = byte(n)
		return b
	}
	extra := (bits.Len64(uint64(n))+6)/7 - 1
	for range extra {
		b = append(b, 0)
	}
	copy(b[at+extra:], b[at:at+n])
	binary.PutUvarint(b[at-1:], uint64(n))
	return b
}

// text appends a string or bytes field.
func text[T string | []byte](b []byte, number byte, s T) []byte {
	b = append(b, number<<3|2)
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// varint appends an integer, enum or bool field.
func varint(b []byte, number byte, n uint64) []byte {
	b = append(b, number<<3)
	return binary.AppendUvarint(b, n)
}

// setHeader appends a HeaderMutation.set_headers entry that overwrites or adds.
// ext_proc only looks at the older append flag (measured on Envoy 1.40.0);
// append_action says the same for whoever reads it instead.
func setHeader[T string | []byte](b []byte, key string, value T) []byte {
	b, option := open(b, 1)
	b, header := open(b, 1)
	b = text(b, 1, key)
	b = text(b, 3, value) // raw_value
	b = shut(b, header)
	b = append(b, 2<<3|2, 0)                           // append: false
	b = varint(b, 3, appendActionOverwriteIfExistsAdd) // append_action
	return shut(b, option)
}

const appendActionOverwriteIfExistsAdd = 2

// openEntry begins a Struct field whose value is written by what follows;
// shutEntry ends it.
func openEntry(b []byte, key string) ([]byte, [2]int) {
	b, outer := open(b, 1)
	b = text(b, 1, key)
	b, inner := open(b, 2)
	return b, [2]int{outer, inner}
}

func shutEntry(b []byte, at [2]int) []byte { return shut(shut(b, at[1]), at[0]) }

// stringEntry appends a Struct field with a string.
func stringEntry[T string | []byte](b []byte, key string, value T) []byte {
	b, at := openEntry(b, key)
	b = text(b, 3, value)
	return shutEntry(b, at)
}

// openStruct begins a Struct field that is itself a Struct.
func openStruct(b []byte, key string) ([]byte, [3]int) {
	b, at := openEntry(b, key)
	b, inner := open(b, 5)
	return b, [3]int{at[0], at[1], inner}
}

func shutStruct(b []byte, at [3]int) []byte {
	return shutEntry(shut(b, at[2]), [2]int{at[0], at[1]})
}
