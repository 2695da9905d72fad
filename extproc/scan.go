package extproc

import (
	"bytes"
	"errors"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// kind is the oneof of a ProcessingRequest; the numbers are the field numbers
// of envoy/service/ext_proc/v3/external_processor.proto.
type kind uint8

const (
	kindNone             kind = 0
	kindRequestHeaders   kind = 2
	kindResponseHeaders  kind = 3
	kindRequestBody      kind = 4
	kindResponseBody     kind = 5
	kindRequestTrailers  kind = 6
	kindResponseTrailers kind = 7
)

// Further fields of a ProcessingRequest.
const (
	fieldMetadataContext = 8
	fieldAttributes      = 9
	fieldObservability   = 10
)

// asked is what a client's x-route-strategy header says.
type asked uint8

const (
	askedNothing asked = iota
	askedLegacy
	askedDynamic
	askedUnknown // another value, or two different ones
)

// request is what a decision needs of a ProcessingRequest. The byte slices
// point into the message.
type request struct {
	kind        kind
	observe     bool // observability mode: no answer is wanted
	endOfStream bool // no body follows

	strategy  asked
	header    Declared // max_tokens and its spellings
	sampling  Sampling
	requestID []byte
	madeID    bool   // Envoy made requestID, see headerExternalAddress
	bodyBytes int64  // content-length; 0 when unknown
	affinity  []byte // x-session-affinity
	shown     credentials
	pace      pace

	peeked    bool // json_to_metadata saw the body: a key, wire.KeyRead or an error
	body      Declared
	field     string       // of the body that says the largest number, a constant; "" is none
	answers   fleet.Tokens // n, how many answers are asked for; 0: not said, or no usable number
	bodyError bool
	stream    bool
	cacheKey  []byte // prompt_cache_key
	user      []byte

	claims []byte // a verified token's, see claim; a google.protobuf.Struct

	cluster, route, source, zone []byte
	uriSAN, subject              []byte // of the caller's certificate

	// Of an answer's headers: the status, 0 if there is none, and what may say
	// when to come back; see told.
	status int
	notes  []note
}

// note is one header of an answer.
type note struct{ key, value []byte }

// maxNotes is how many headers of an answer are looked at; the families that are
// known have some thirty.
const maxNotes = 64

// pace is what a caller says of its waits and retries, as sent; see ask.go.
type pace struct {
	batch                             bool // x-request-class: batch
	timeout, readTimeout, grpcTimeout []byte
	retries                           []byte
}

var errMalformed = errors.New("malformed protobuf")

// field is one field of a message: a varint or fixed value in num, a
// length-delimited one in bytes.
type field struct {
	number protowire.Number
	wire   protowire.Type
	num    uint64
	bytes  []byte
}

// next reads one field off b.
func next(b []byte) (field, []byte, error) {
	// Most fields are short strings with one byte of tag and one of length.
	if len(b) >= 2 && b[0] >= 8 && b[0] < 0x80 && b[0]&7 == byte(protowire.BytesType) && b[1] < 0x80 {
		if end := 2 + int(b[1]); end <= len(b) {
			return field{number: protowire.Number(b[0] >> 3), wire: protowire.BytesType, bytes: b[2:end]}, b[end:], nil
		}
	}
	number, typ, n := protowire.ConsumeTag(b)
	if n < 0 {
		return field{}, nil, errMalformed
	}
	f := field{number: number, wire: typ}
	b = b[n:]
	switch typ {
	case protowire.BytesType:
		f.bytes, n = protowire.ConsumeBytes(b)
	case protowire.VarintType:
		f.num, n = protowire.ConsumeVarint(b)
	case protowire.Fixed64Type:
		f.num, n = protowire.ConsumeFixed64(b)
	default:
		n = protowire.ConsumeFieldValue(number, typ, b)
	}
	if n < 0 {
		return field{}, nil, errMalformed
	}
	return f, b[n:], nil
}

// isBytes reports whether f is the length-delimited field number.
func (f *field) isBytes(number protowire.Number) bool {
	return f.number == number && f.wire == protowire.BytesType
}

// scan reads one ProcessingRequest. Only what a decision needs is looked at;
// the rest is skipped unread, valid or not.
func (r *request) scan(b []byte) error {
	*r = request{notes: r.notes[:0]}
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		b = rest
		switch {
		case f.wire == protowire.BytesType && f.number >= 2 && f.number <= 7:
			err = r.scanPhase(kind(f.number), f.bytes)
		case f.isBytes(fieldMetadataContext):
			err = r.scanMetadata(f.bytes)
		case f.isBytes(fieldAttributes):
			err = r.scanAttributes(f.bytes)
		case f.number == fieldObservability && f.wire == protowire.VarintType:
			r.observe = f.num != 0
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// scanPhase enters a member of the oneof. As everywhere in protobuf the last
// member wins and a repeated one is merged.
func (r *request) scanPhase(k kind, b []byte) error {
	if r.kind != k {
		r.kind, r.endOfStream = k, false
		r.strategy, r.header, r.sampling, r.bodyBytes, r.affinity = askedNothing, Declared{}, Sampling{}, 0, nil
		r.requestID, r.madeID = nil, false
		r.shown, r.pace = credentials{}, pace{}
		r.status, r.notes = 0, r.notes[:0]
	}
	take := (*request).requestHeader
	switch k {
	case kindRequestHeaders:
	case kindResponseHeaders:
		take = (*request).responseHeader
	default:
		return nil
	}
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		b = rest
		switch {
		case f.isBytes(1): // HttpHeaders.headers
			err = r.scanHeaders(f.bytes, take)
		case f.number == 3 && f.wire == protowire.VarintType: // end_of_stream
			r.endOfStream = f.num != 0
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// scanHeaders calls take for each header of a HeaderMap.
func (r *request) scanHeaders(b []byte, take func(r *request, key, value []byte)) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		b = rest
		if !f.isBytes(1) { // HeaderMap.headers
			continue
		}
		key, value, err := scanHeader(f.bytes)
		if err != nil {
			return err
		}
		take(r, key, value)
	}
	return nil
}

// Request headers that others name.
const (
	headerContentLength = "content-length"
	headerAuthorization = "authorization"
	headerAPIKey        = "x-api-key"
	// headerExternalAddress is Envoy's word that the request came from outside:
	// Envoy sets it where it replaces x-request-id by an id of its own, and never
	// where the caller's is kept. Our listeners remove one that a caller sends.
	headerExternalAddress = "x-envoy-external-address"
)

// classBatch is the one value of x-request-class that is believed.
const classBatch = "batch"

// scanHeader reads a HeaderValue: key 1, value 2, raw_value 3.
func scanHeader(b []byte) (key, value []byte, err error) {
	var raw []byte
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return nil, nil, err
		}
		b = rest
		switch {
		case f.isBytes(1):
			key = f.bytes
		case f.isBytes(2):
			value = f.bytes
		case f.isBytes(3):
			raw = f.bytes
		}
	}
	if len(raw) > 0 {
		value = raw
	}
	return key, value, nil
}

// requestHeader takes a header of a request.
func (r *request) requestHeader(key, value []byte) {
	switch string(key) {
	case wire.HeaderRouteStrategy:
		r.ask(value)
	case wire.HeaderMaxTokens, wire.HeaderXMaxTokens, wire.HeaderMaxTokensDash:
		r.header = r.header.Or(DeclaredText(value))
	case wire.HeaderTemperature:
		r.sampling.temperature(value)
	case wire.HeaderTopK:
		r.sampling.topK(value)
	case wire.HeaderRequestID:
		r.requestID = value
	case headerExternalAddress:
		r.madeID = true
	case wire.HeaderSessionAffinity:
		r.affinity = value
	case headerContentLength:
		r.bodyBytes = contentLength(value)
	case headerAuthorization:
		r.shown.authorization.add(value)
	case headerAPIKey:
		r.shown.apiKey.add(value)
	case wire.HeaderRequestClass:
		r.pace.batch = r.pace.batch || string(value) == classBatch
	case wire.HeaderStainlessTimeout:
		r.pace.timeout = value
	case wire.HeaderStainlessReadTimeout:
		r.pace.readTimeout = value
	case wire.HeaderStainlessRetry:
		r.pace.retries = value
	case wire.HeaderGRPCTimeout:
		r.pace.grpcTimeout = value
	}
}

// responseHeader takes a header of an answer.
func (r *request) responseHeader(key, value []byte) {
	switch {
	case string(key) == ":status":
		n, _ := digits(value)
		r.status = int(min(n, 1000))
	case mayTell(key) && len(value) > 0 && len(r.notes) < maxNotes:
		r.notes = append(r.notes, note{key, value})
	}
}

// mayTell reports whether a header of an answer may say when to come back: they
// name retries, rate limits or concurrency.
func mayTell(key []byte) bool {
	return bytes.Contains(key, []byte("retry")) || bytes.Contains(key, []byte("ratelimit")) ||
		string(key) == wire.HeaderRecommendedConcurrency
}

// told is the value of an answer's header, of several the first, "" if there is
// none.
func (r *request) told(name string) string {
	for i := range r.notes {
		if string(r.notes[i].key) == name {
			return string(r.notes[i].value)
		}
	}
	return ""
}

// session is the request's session: the header's, else that of the body's
// prompt_cache_key, else, where the route reads it, the body's user.
func (r *request) session(readUser bool) plan.Session {
	switch {
	case len(r.affinity) > 0:
		return plan.SessionOf(r.affinity)
	case len(r.cacheKey) > 0 || !readUser:
		return plan.SessionOf(r.cacheKey)
	}
	return plan.SessionOf(r.user)
}

// ask takes a value of x-route-strategy.
func (r *request) ask(value []byte) {
	got := askedUnknown
	switch string(value) {
	case "legacy":
		got = askedLegacy
	case "dynamic":
		got = askedDynamic
	}
	if r.strategy != askedNothing && r.strategy != got {
		got = askedUnknown
	}
	r.strategy = got
}

// entry reads an entry of a protobuf map with string keys: key 1, value 2.
func entry(b []byte) (key, value []byte, err error) {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return nil, nil, err
		}
		b = rest
		switch {
		case f.isBytes(1):
			key = f.bytes
		case f.isBytes(2):
			value = f.bytes
		}
	}
	return key, value, nil
}

// scanMetadata reads Metadata.filter_metadata (1) for the peeked fields and for
// the claims of a token, which are looked into only where a route asks for one.
func (r *request) scanMetadata(b []byte) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		b = rest
		if !f.isBytes(1) {
			continue
		}
		name, fields, err := entry(f.bytes)
		if err != nil {
			return err
		}
		switch string(name) {
		case wire.NamespacePeek:
			err = r.scanStruct(fields, (*request).peek)
		case wire.NamespaceJWT:
			r.claims = fields
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// scanAttributes reads one entry of the attributes map.
func (r *request) scanAttributes(b []byte) error {
	name, fields, err := entry(b)
	if err != nil || string(name) != wire.AttributesKey {
		return err
	}
	return r.scanStruct(fields, (*request).attribute)
}

// scanStruct calls take for each field of a Struct.
func (r *request) scanStruct(b []byte, take func(*request, []byte, value)) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		b = rest
		if !f.isBytes(1) {
			continue
		}
		name, raw, err := entry(f.bytes)
		if err != nil {
			return err
		}
		v, err := scanValue(raw)
		if err != nil {
			return err
		}
		take(r, name, v)
	}
	return nil
}

// value is a google.protobuf.Value: number 2, string 3, bool 4 or struct 5. Of
// all other kinds it is the zero value.
type value struct {
	isNumber, isString, isBool bool
	number                     float64
	text                       []byte
	yes                        bool
	fields                     []byte // of a struct
}

func scanValue(b []byte) (value, error) {
	var v value
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return v, err
		}
		b = rest
		switch {
		case f.number == 2 && f.wire == protowire.Fixed64Type:
			v = value{isNumber: true, number: math.Float64frombits(f.num)}
		case f.isBytes(3):
			v = value{isString: true, text: f.bytes}
		case f.number == 4 && f.wire == protowire.VarintType:
			v = value{isBool: true, yes: f.num != 0}
		case f.isBytes(5):
			v = value{fields: f.bytes}
		case f.number >= 1 && f.number <= 6:
			v = value{}
		}
	}
	return v, nil
}

// peek takes one field that Envoy found in the body.
func (r *request) peek(name []byte, v value) {
	r.peeked = true
	switch string(name) {
	case wire.KeyMaxTokens:
		r.declare(wire.KeyMaxTokens, v)
	case wire.KeyMaxCompletionTokens:
		r.declare(wire.KeyMaxCompletionTokens, v)
	case wire.KeyMaxOutputTokens:
		r.declare(wire.KeyMaxOutputTokens, v)
	case wire.KeyStream:
		r.stream = v.isBool && v.yes
	case wire.KeyPromptCacheKey:
		r.cacheKey = v.text
	case wire.KeyUser:
		r.user = v.text
	case wire.KeyN:
		r.answers = v.declared().Tokens
	case wire.KeyError:
		r.bodyError = r.bodyError || (v.isBool && v.yes)
	}
}

// declare takes an output budget that a field of the body declares.
func (r *request) declare(field string, v value) {
	d := v.declared()
	if d.Tokens > r.body.Tokens {
		r.field = field
	}
	r.body = r.body.Or(d)
}

func (v value) declared() Declared {
	switch {
	case v.isNumber:
		return DeclaredNumber(v.number)
	case v.isString:
		return DeclaredText(v.text)
	}
	return Declared{Seen: true}
}

func (r *request) attribute(name []byte, v value) {
	switch string(name) {
	case wire.AttributeClusterName:
		r.cluster = v.text
	case wire.AttributeRouteName:
		r.route = v.text
	case wire.AttributeSource:
		r.source = v.text
	case wire.AttributeZone:
		r.zone = v.text
	case wire.AttributeURISAN:
		r.uriSAN = v.text
	case wire.AttributeSubject:
		r.subject = v.text
	}
}
