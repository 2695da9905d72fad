package accesslog

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// entry is what an outcome needs of an HTTPAccessLogEntry
// (envoy/data/accesslog/v3/accesslog.proto). The byte slices point into the
// message. As everywhere in protobuf a field that comes again overwrites, and a
// message that comes again is merged.
type entry struct {
	kind     int32 // AccessLogType
	cluster  []byte
	route    []byte
	upstream socket
	flags    flagSet
	attempts uint32

	duration, firstTx, firstRx span

	decision []byte // of the metadata in wire.NamespaceLog
	tags     tags

	requestID       []byte // of Envoy
	headerRequestID []byte
	requestBytes    uint64

	code          uint32
	responseBytes uint64
	retry         []header
}

// tags are the custom tags of package envoy's access logs; nil where there is
// none.
type tags struct {
	decision, attempt                      []byte
	input, cached, output, sseErr, sseTold []byte
}

// header is one of retryafter.Headers(), by its index there.
type header struct {
	index int
	value []byte
}

// span is a Duration as it stands on the wire.
type span struct {
	seconds int64
	nanos   int32
}

// socket is an Address: host and port when it is a socket's.
type socket struct {
	host []byte
	port uint32
	is   bool
}

// flagSet holds the booleans of ResponseFlags: bit n is the field numbered n.
type flagSet uint32

func (s flagSet) any(of flagSet) bool { return s&of != 0 }

// reset lets go of the message.
func (e *entry) reset() {
	clear(e.retry)
	*e = entry{retry: e.retry[:0]}
}

// scan reads an entry; it returns false when it is malformed. Fields that no
// outcome needs are skipped unread, valid or not.
func (e *entry) scan(b []byte) bool {
	e.reset()
	c := walk(b)
	for c.next() {
		if c.typ != protowire.BytesType {
			continue
		}
		ok := true
		switch c.number {
		case 1:
			ok = e.scanCommon(c.bytes)
		case 3:
			ok = e.scanRequest(c.bytes)
		case 4:
			ok = e.scanResponse(c.bytes)
		}
		if !ok {
			return false
		}
	}
	return !c.bad
}

// scanCommon reads an AccessLogCommon.
func (e *entry) scanCommon(b []byte) bool {
	c := walk(b)
	for c.next() {
		if c.typ == protowire.VarintType {
			switch c.number {
			case 24:
				e.attempts = uint32(c.num)
			case 33:
				e.kind = int32(c.num)
			}
			continue
		}
		if c.typ != protowire.BytesType {
			continue
		}
		ok := true
		switch c.number {
		case 7:
			ok = e.firstTx.scan(c.bytes)
		case 9:
			ok = e.firstRx.scan(c.bytes)
		case 13:
			ok = e.upstream.scan(c.bytes)
		case 15:
			e.cluster = c.bytes
		case 16:
			ok = e.flags.scan(c.bytes)
		case 17:
			ok = e.scanMetadata(c.bytes)
		case 19:
			e.route = c.bytes
		case 22:
			ok = e.scanTag(c.bytes)
		case 23:
			ok = e.duration.scan(c.bytes)
		}
		if !ok {
			return false
		}
	}
	return !c.bad
}

func (s *span) scan(b []byte) bool {
	c := walk(b)
	for c.next() {
		switch {
		case c.isVarint(1):
			s.seconds = int64(c.num)
		case c.isVarint(2):
			s.nanos = int32(c.num)
		}
	}
	return !c.bad
}

func (s span) proto() *durationpb.Duration {
	return &durationpb.Duration{Seconds: s.seconds, Nanos: s.nanos}
}

// scan reads an Address: a socket's is field 1, the other kinds are 2 and 3.
func (s *socket) scan(b []byte) bool {
	c := walk(b)
	for c.next() {
		switch {
		case c.isBytes(1):
			if !s.is {
				*s = socket{is: true}
			}
			if !s.scanSocket(c.bytes) {
				return false
			}
		case c.isBytes(2), c.isBytes(3):
			*s = socket{}
		}
	}
	return !c.bad
}

// scanSocket reads a SocketAddress: address 2, port_value 3 or named_port 4.
func (s *socket) scanSocket(b []byte) bool {
	c := walk(b)
	for c.next() {
		switch {
		case c.isBytes(2):
			s.host = c.bytes
		case c.isVarint(3):
			s.port = uint32(c.num)
		case c.isBytes(4):
			s.port = 0
		}
	}
	return !c.bad
}

func (s *flagSet) scan(b []byte) bool {
	c := walk(b)
	for c.next() {
		if c.typ != protowire.VarintType || c.number > 31 {
			continue
		}
		bit := flagSet(1) << c.number
		*s &^= bit
		if c.num != 0 {
			*s |= bit
		}
	}
	return !c.bad
}

// scanMetadata reads the decision id from Metadata.filter_metadata (1).
func (e *entry) scanMetadata(b []byte) bool {
	c := walk(b)
	for c.next() {
		if !c.isBytes(1) {
			continue
		}
		name, _, ok := mapEntry(c.bytes)
		if !ok {
			return false
		}
		if string(name) == wire.NamespaceLog {
			e.decision = nil // a key that comes again replaces the whole
			if !e.scanLog(c.bytes) {
				return false
			}
		}
	}
	return !c.bad
}

// scanLog reads the Struct in value (2) of a map entry, as often as it comes.
func (e *entry) scanLog(b []byte) bool {
	c := walk(b)
	for c.next() {
		if c.isBytes(2) && !e.scanFields(c.bytes) {
			return false
		}
	}
	return !c.bad
}

// scanFields reads Struct.fields (1).
func (e *entry) scanFields(b []byte) bool {
	c := walk(b)
	for c.next() {
		if !c.isBytes(1) {
			continue
		}
		name, _, ok := mapEntry(c.bytes)
		if !ok {
			return false
		}
		if string(name) == wire.KeyDecision {
			if e.decision, ok = stringValue(c.bytes); !ok {
				return false
			}
		}
	}
	return !c.bad
}

// stringValue reads the Value in value (2) of a map entry: its string_value (3)
// if that is the kind it is of.
func stringValue(b []byte) (text []byte, ok bool) {
	c := walk(b)
	for c.next() {
		if !c.isBytes(2) {
			continue
		}
		v := walk(c.bytes)
		for v.next() {
			switch {
			case v.isBytes(3):
				text = v.bytes
			case v.isVarint(1), v.isVarint(4), v.isBytes(5), v.isBytes(6), v.number == 2 && v.typ == protowire.Fixed64Type:
				text = nil
			}
		}
		if v.bad {
			return nil, false
		}
	}
	return text, !c.bad
}

func (e *entry) scanTag(b []byte) bool {
	name, value, ok := mapEntry(b)
	if !ok {
		return false
	}
	switch string(name) {
	case wire.TagDecision:
		e.tags.decision = value
	case wire.TagAttempt:
		e.tags.attempt = value
	case wire.TagInput:
		e.tags.input = value
	case wire.TagCached:
		e.tags.cached = value
	case wire.TagOutput:
		e.tags.output = value
	case wire.TagSSEError:
		e.tags.sseErr = value
	case wire.TagSSEOutput:
		e.tags.sseTold = value
	}
	return true
}

// scanRequest reads an HTTPRequestProperties.
func (e *entry) scanRequest(b []byte) bool {
	c := walk(b)
	for c.next() {
		switch {
		case c.isBytes(9):
			e.requestID = c.bytes
		case c.isVarint(12):
			e.requestBytes = c.num
		case c.isBytes(13):
			name, value, ok := mapEntry(c.bytes)
			if !ok {
				return false
			}
			if string(name) == wire.HeaderRequestID {
				e.headerRequestID = value
			}
		}
	}
	return !c.bad
}

// scanResponse reads an HTTPResponseProperties.
func (e *entry) scanResponse(b []byte) bool {
	c := walk(b)
	for c.next() {
		ok := true
		switch {
		case c.isBytes(1):
			ok = e.scanCode(c.bytes)
		case c.isVarint(3):
			e.responseBytes = c.num
		case c.isBytes(4):
			ok = e.scanHeader(c.bytes)
		}
		if !ok {
			return false
		}
	}
	return !c.bad
}

// scanCode reads a UInt32Value.
func (e *entry) scanCode(b []byte) bool {
	c := walk(b)
	for c.next() {
		if c.isVarint(1) {
			e.code = uint32(c.num)
		}
	}
	return !c.bad
}

// scanHeader keeps a response header that tells how long to stay away.
func (e *entry) scanHeader(b []byte) bool {
	name, value, ok := mapEntry(b)
	if !ok {
		return false
	}
	index, wanted := retryIndex[string(name)]
	if !wanted {
		return true
	}
	for i := range e.retry {
		if e.retry[i].index == index {
			e.retry[i].value = value
			return true
		}
	}
	e.retry = append(e.retry, header{index, value})
	return true
}
