package extproc

import (
	"bytes"
	"net/netip"
	"strconv"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// credentials are what a caller shows to be let in by.
type credentials struct{ authorization, apiKey credential }

// credential is one header's value. A caller that sends two different ones shows
// nothing: upstreams differ in which they take, and junk beside the real one
// would make a new client of each request.
type credential struct {
	value     []byte
	ambiguous bool
}

func (c *credential) add(value []byte) {
	if len(value) == 0 {
		return
	}
	c.ambiguous = c.ambiguous || (c.value != nil && !bytes.Equal(c.value, value))
	c.value = value
}

// client is who asks, by what the route tells clients apart by. A caller that
// doesn't show that (no credential, no verified token, no certificate) is known
// by its address.
//
// No header counts but the credential itself. A caller can still make one up and
// be a new client by it until the upstream refuses it; where that matters a route
// tells clients apart by a verified claim or a certificate.
func (r *request) client(info *plan.RouteInfo) admission.Client {
	var scratch [64]byte
	if value := r.identity(info, scratch[:0]); len(value) > 0 {
		key := info.ClientKey
		if key == 0 {
			key = fleet.ClientKeyAuthorization
		}
		return admission.ClientOf(key, value)
	}
	return admission.ClientOf(fleet.ClientKeyAddress, networkOf(r.source, scratch[:0]))
}

func (r *request) identity(info *plan.RouteInfo, scratch []byte) []byte {
	switch info.ClientKey {
	case fleet.ClientKeyJWT:
		return claim(r.claims, info.Claim, scratch)
	case fleet.ClientKeyMTLS:
		if len(r.uriSAN) > 0 {
			return r.uriSAN
		}
		return r.subject
	case fleet.ClientKeyAddress:
		return networkOf(r.source, scratch)
	}
	shown := &r.shown.authorization
	if shown.value == nil {
		shown = &r.shown.apiKey
	}
	if shown.ambiguous {
		return nil
	}
	return shown.value
}

// networkBits is how much of an IPv6 address tells callers apart: a subscriber has
// a whole /64, and could be a new client with each request.
const networkBits = 64

// networkOf is the address of ip:port, of IPv6 the beginning of its /64, as text;
// IPv4 stays as it stands. It may use scratch.
func networkOf(source, scratch []byte) []byte {
	host := hostOf(source)
	if bytes.IndexByte(host, ':') < 0 {
		return host
	}
	a, err := netip.ParseAddr(string(host))
	if err != nil {
		return host
	}
	if a = a.WithZone("").Unmap(); a.Is6() {
		network, _ := a.Prefix(networkBits) // never fails on IPv6
		a = network.Addr()
	}
	return a.AppendTo(scratch[:0])
}

// hostOf is the host of ip:port or [ip]:port; whatever has no port is returned
// as it is.
func hostOf(source []byte) []byte {
	if at := bytes.LastIndexByte(source, ':'); at >= 0 {
		source = source[:at]
	}
	if n := len(source); n >= 2 && source[0] == '[' && source[n-1] == ']' {
		source = source[1 : n-1]
	}
	return source
}

// claim is a claim of a verified token as text: a string as it is, a number
// without exponent, appended to scratch. Of any other kind, and where it isn't
// there or can't be read, it is empty.
func claim(namespace []byte, name string, scratch []byte) []byte {
	v := member(member(value{fields: namespace}, wire.KeyClaims), name)
	if v.isNumber {
		return strconv.AppendFloat(scratch, v.number, 'f', -1, 64)
	}
	return v.text
}

// member is a struct's field of that name, or the zero value. As in any protobuf
// map the last of several counts.
func member(of value, name string) (got value) {
	for b := of.fields; len(b) > 0; {
		f, rest, err := next(b)
		if err != nil {
			return value{}
		}
		b = rest
		if !f.isBytes(1) {
			continue
		}
		key, raw, err := entry(f.bytes)
		if err != nil {
			return value{}
		}
		if string(key) != name {
			continue
		}
		if got, err = scanValue(raw); err != nil {
			return value{}
		}
	}
	return got
}
