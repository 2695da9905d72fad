package plan

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// The canonical encoding of Inputs: a magic with a version, then the fields in
// the order of their declaration. Unsigned integers are uvarints, signed ones
// zigzag varints, floats their 8 IEEE bytes (big endian, −0 as 0), strings and
// lists are preceded by their length, addresses are netip's binary form as a
// string. There is one encoding for each value, and DecodeInputs accepts no
// other, so that equal digests mean equal inputs.
const (
	encodingMagic   = "fairlead-plan"
	encodingVersion = 5
)

// AppendCanonical appends the canonical encoding of in to dst.
func (in Inputs) AppendCanonical(dst []byte) []byte {
	dst = append(dst, encodingMagic...)
	dst = append(dst, encodingVersion)
	dst = binary.AppendUvarint(dst, in.Tick)
	dst = binary.AppendUvarint(dst, uint64(len(in.Pools)))
	for i := range in.Pools {
		dst = appendPool(dst, &in.Pools[i])
	}
	dst = binary.AppendUvarint(dst, uint64(len(in.Routes)))
	for i := range in.Routes {
		dst = appendRoute(dst, &in.Routes[i])
	}
	return dst
}

func appendPool(dst []byte, p *PoolInput) []byte {
	dst = appendString(dst, p.Name)
	dst = appendString(dst, p.Tier)
	dst = appendFloat(dst, p.SpillAt)
	dst = binary.AppendUvarint(dst, uint64(len(p.Endpoints)))
	for i := range p.Endpoints {
		dst = appendEndpoint(dst, &p.Endpoints[i])
	}
	for _, b := range p.Backlogged {
		dst = append(dst, boolByte(b))
	}
	return dst
}

func appendEndpoint(dst []byte, e *EndpointInput) []byte {
	dst = appendAddress(dst, e.Address)
	dst = appendString(dst, e.Zone)
	dst = binary.AppendUvarint(dst, uint64(e.Slot))
	dst = appendFloat(dst, e.Weight)
	dst = binary.AppendVarint(dst, int64(e.MaxInFlight))
	dst = binary.AppendVarint(dst, int64(e.InFlight))
	dst = binary.AppendVarint(dst, int64(e.KVFree))
	dst = binary.AppendVarint(dst, int64(e.KVSize))
	dst = appendFloat(dst, float64(e.Risk))
	dst = append(dst, boolByte(e.Closed), boolByte(e.Failing))
	dst = binary.AppendVarint(dst, int64(e.Trial))
	return append(dst, byte(e.State))
}

func appendRoute(dst []byte, r *RouteInput) []byte {
	dst = appendString(dst, r.Name)
	dst = append(dst, byte(r.Dialect), byte(r.Strategy), byte(r.ClientStrategy), boolByte(r.TrustDeclared))
	dst = binary.AppendVarint(dst, int64(r.DefaultBudget))
	dst = binary.AppendUvarint(dst, uint64(r.FirstTokenMillis))
	dst = appendStrings(dst, r.Split)
	dst = appendStrings(dst, r.Fallback)
	dst = append(dst, byte(r.Affinity), byte(r.ClientKey))
	dst = appendString(dst, r.Claim)
	dst = append(dst, byte(r.Class), boolByte(r.Limited))
	dst = binary.AppendVarint(dst, int64(r.MaxOutput))
	dst = append(dst, byte(r.Oversize), byte(r.NoRoom))
	dst = appendFloat(dst, r.BytesPerToken)
	dst = append(dst, boolByte(r.ComputedRetry), boolByte(r.RefuseUnread), boolByte(r.ReadUser))
	return binary.AppendVarint(dst, int64(r.MaxBody))
}

func appendStrings(dst []byte, list []string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(list)))
	for _, s := range list {
		dst = appendString(dst, s)
	}
	return dst
}

func appendString(dst []byte, s string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(s)))
	return append(dst, s...)
}

func appendAddress(dst []byte, a netip.AddrPort) []byte {
	var buf [32]byte
	text, _ := a.AppendBinary(buf[:0]) // never fails
	dst = binary.AppendUvarint(dst, uint64(len(text)))
	return append(dst, text...)
}

func appendFloat(dst []byte, f float64) []byte {
	if f == 0 {
		f = 0 // −0 too
	}
	return binary.BigEndian.AppendUint64(dst, math.Float64bits(f))
}

func boolByte(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// DecodeInputs reads what AppendCanonical wrote; empty lists come back as nil.
// It refuses anything that is not exactly one canonical encoding, and says at
// which byte. It doesn't check what Compile checks.
func DecodeInputs(b []byte) (Inputs, error) {
	d := decoder{all: b, rest: b}
	in := d.inputs()
	if d.err == nil && len(d.rest) > 0 {
		d.fail("%d bytes follow the end", len(d.rest))
	}
	if d.err != nil {
		return Inputs{}, fmt.Errorf("decode plan inputs: byte %d: %w", len(b)-len(d.rest), d.err)
	}
	return in, nil
}

// decoder reads from rest until the first error.
type decoder struct {
	all, rest []byte
	err       error
}

var errShort = errors.New("the encoding ends too early")

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

func (d *decoder) inputs() Inputs {
	if string(d.take(len(encodingMagic))) != encodingMagic {
		d.fail("the encoding does not begin with %q", encodingMagic)
	}
	if v := d.byte(); v != encodingVersion {
		d.fail("version is %d; accepted: %d", v, encodingVersion)
	}
	var in Inputs
	in.Tick = d.uvarint(math.MaxUint64)
	in.Pools = list(d, d.pool)
	in.Routes = list(d, d.route)
	return in
}

func (d *decoder) pool() PoolInput {
	p := PoolInput{Name: d.string(), Tier: d.string(), SpillAt: d.float(), Endpoints: list(d, d.endpoint)}
	for i := range p.Backlogged {
		p.Backlogged[i] = d.bool()
	}
	return p
}

func (d *decoder) endpoint() EndpointInput {
	return EndpointInput{
		Address:     d.address(),
		Zone:        d.string(),
		Slot:        uint32(d.uvarint(math.MaxUint32)),
		Weight:      d.float(),
		MaxInFlight: int32(d.varint(math.MinInt32, math.MaxInt32)),
		InFlight:    int32(d.varint(math.MinInt32, math.MaxInt32)),
		KVFree:      fleet.Tokens(d.varint(math.MinInt64, math.MaxInt64)),
		KVSize:      fleet.Tokens(d.varint(math.MinInt64, math.MaxInt64)),
		Risk:        fleet.Risk(d.float()),
		Closed:      d.bool(),
		Failing:     d.bool(),
		Trial:       int32(d.varint(math.MinInt32, math.MaxInt32)),
		State:       fleet.State(d.byte()),
	}
}

func (d *decoder) route() RouteInput {
	return RouteInput{
		Name:             d.string(),
		Dialect:          fleet.Dialect(d.byte()),
		Strategy:         fleet.Strategy(d.byte()),
		ClientStrategy:   fleet.ClientStrategy(d.byte()),
		TrustDeclared:    d.bool(),
		DefaultBudget:    fleet.Tokens(d.varint(math.MinInt64, math.MaxInt64)),
		FirstTokenMillis: uint32(d.uvarint(math.MaxUint32)),
		Split:            list(d, d.string),
		Fallback:         list(d, d.string),
		Affinity:         fleet.Affinity(d.byte()),
		ClientKey:        fleet.ClientKey(d.byte()),
		Claim:            d.string(),
		Class:            fleet.RequestClass(d.byte()),
		Limited:          d.bool(),
		MaxOutput:        fleet.Tokens(d.varint(math.MinInt64, math.MaxInt64)),
		Oversize:         fleet.Oversize(d.byte()),
		NoRoom:           fleet.Oversize(d.byte()),
		BytesPerToken:    d.float(),
		ComputedRetry:    d.bool(),
		RefuseUnread:     d.bool(),
		ReadUser:         d.bool(),
		MaxBody:          fleet.Bytes(d.varint(math.MinInt64, math.MaxInt64)),
	}
}

// list reads a length and as many elements. Each takes at least one byte, so
// that a made-up length can't ask for more memory than a small multiple of the
// encoding's own size.
func list[T any](d *decoder, element func() T) []T {
	n := d.uvarint(math.MaxInt32)
	if n > uint64(len(d.rest)) {
		d.fail("a list of %d elements in %d bytes", n, len(d.rest))
	}
	var out []T
	for i := uint64(0); i < n && d.err == nil; i++ {
		out = append(out, element())
	}
	return out
}

func (d *decoder) take(n int) []byte {
	if d.err != nil {
		return nil
	}
	if n > len(d.rest) {
		d.err = errShort
		return nil
	}
	out := d.rest[:n]
	d.rest = d.rest[n:]
	return out
}

func (d *decoder) byte() byte {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) bool() bool {
	b := d.byte()
	if b > 1 {
		d.fail("a truth value is %d; accepted: 0 or 1", b)
	}
	return b == 1
}

func (d *decoder) uvarint(largest uint64) uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.rest)
	switch {
	case n == 0:
		d.err = errShort
	case n < 0:
		d.fail("an integer has more than 64 bits")
	case n > 1 && d.rest[n-1] == 0:
		d.fail("an integer is longer than it need be")
	case v > largest:
		d.fail("an integer is %d; accepted: at most %d", v, largest)
	default:
		d.rest = d.rest[n:]
		return v
	}
	return 0
}

func (d *decoder) varint(smallest, largest int64) int64 {
	u := d.uvarint(math.MaxUint64)
	v := int64(u>>1) ^ -int64(u&1)
	if v < smallest || v > largest {
		d.fail("an integer is %d; accepted: %d to %d", v, smallest, largest)
		return 0
	}
	return v
}

func (d *decoder) float() float64 {
	b := d.take(8)
	if b == nil {
		return 0
	}
	u := binary.BigEndian.Uint64(b)
	if u == 1<<63 {
		d.fail("a number is -0; accepted: 0")
	}
	return math.Float64frombits(u)
}

func (d *decoder) string() string {
	n := d.uvarint(math.MaxInt32)
	return string(d.take(int(n)))
}

func (d *decoder) address() netip.AddrPort {
	raw := d.take(int(d.uvarint(math.MaxInt32)))
	var a netip.AddrPort
	if d.err == nil {
		if err := a.UnmarshalBinary(raw); err != nil {
			d.fail("an address of %d bytes: %w", len(raw), err)
		} else if again, _ := a.MarshalBinary(); string(again) != string(raw) {
			d.fail("an address is not in its shortest form")
		}
	}
	return a
}
