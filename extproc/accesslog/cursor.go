package accesslog

import "google.golang.org/protobuf/encoding/protowire"

// cursor walks over the fields of a protobuf message. After next has returned
// true the field is in number, typ and, as its type has it, num or bytes, which
// points into the message. After it has returned false bad tells whether the
// message is malformed or at its end.
type cursor struct {
	rest   []byte
	bytes  []byte
	num    uint64
	number protowire.Number
	typ    protowire.Type
	bad    bool
}

func walk(b []byte) cursor { return cursor{rest: b} }

// next reads the field at hand. Nearly all have a tag (fields up to 2047) and a
// length or value (below 16384) of one or two bytes each; slow reads the rest.
func (c *cursor) next() bool {
	b := c.rest
	if len(b) < 2 {
		return c.slow()
	}
	tag, at := uint(b[0]), 1
	if tag >= 0x80 {
		if len(b) < 3 || b[1] >= 0x80 {
			return c.slow()
		}
		tag, at = tag&0x7f|uint(b[1])<<7, 2
	}
	typ := protowire.Type(tag & 7)
	if tag < 8 || (typ != protowire.BytesType && typ != protowire.VarintType) {
		return c.slow()
	}
	n := uint(b[at])
	at++
	if n >= 0x80 {
		if at >= len(b) || b[at] >= 0x80 {
			return c.slow()
		}
		n = n&0x7f | uint(b[at])<<7
		at++
	}
	c.number, c.typ = protowire.Number(tag>>3), typ
	if typ == protowire.VarintType {
		c.num, c.rest = uint64(n), b[at:]
		return true
	}
	b = b[at:]
	if n > uint(len(b)) {
		return c.fail()
	}
	c.bytes, c.rest = b[:n], b[n:]
	return true
}

func (c *cursor) slow() bool {
	if len(c.rest) == 0 {
		return false
	}
	number, typ, n := protowire.ConsumeTag(c.rest)
	if n < 0 || number > protowire.MaxValidNumber {
		return c.fail()
	}
	c.number, c.typ, c.rest = number, typ, c.rest[n:]
	switch typ {
	case protowire.BytesType:
		c.bytes, n = protowire.ConsumeBytes(c.rest)
	case protowire.VarintType:
		c.num, n = protowire.ConsumeVarint(c.rest)
	default:
		n = protowire.ConsumeFieldValue(number, typ, c.rest)
	}
	if n < 0 {
		return c.fail()
	}
	c.rest = c.rest[n:]
	return true
}

func (c *cursor) fail() bool {
	c.bad, c.rest = true, nil
	return false
}

// isBytes reports whether the field is the length-delimited one of this number.
func (c *cursor) isBytes(number protowire.Number) bool {
	return c.number == number && c.typ == protowire.BytesType
}

// isVarint reports whether the field is the varint of this number.
func (c *cursor) isVarint(number protowire.Number) bool {
	return c.number == number && c.typ == protowire.VarintType
}

// mapEntry reads an entry of a map from strings: key 1, value 2.
func mapEntry(b []byte) (key, value []byte, ok bool) {
	c := walk(b)
	for c.next() {
		switch {
		case c.isBytes(1):
			key = c.bytes
		case c.isBytes(2):
			value = c.bytes
		}
	}
	return key, value, !c.bad
}
