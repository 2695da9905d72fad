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
	if value = bytes.TrimSpace(value); len(value) == 0 {
		return
	}
	c.ambiguous = c.ambiguous || (c.value != nil && !bytes.Equal(c.value, value))
	c.value = value
}

// by is what tells callers of that dialect apart, nil if nothing does: the one credential
// that is shown. Of two different ones one may be invented. Servers of the OpenAI API read
// authorization, and some x-api-key where that shows no bearer; those of the Anthropic API
// read one header or the other, or either, and nothing tells which. It may use scratch.
func (c *credentials) by(dialect fleet.Dialect, scratch []byte) []byte {
	value := c.authorization.value
	switch {
	case c.authorization.ambiguous:
		return nil
	case value == nil || isScheme(value):
		return canonical(c.apiKey.sure(), scratch)
	}
	shown := canonical(value, scratch)
	if dialect != fleet.DialectAnthropic && bytes.HasPrefix(shown, usualStart) && hasScheme(value) {
		return shown
	}
	if c.apiKey.ambiguous || c.apiKey.value != nil && !bytes.Equal(shown, canonical(c.apiKey.value, nil)) {
		return nil
	}
	return shown
}

// sure is the value if there is just one, else nil.
func (c *credential) sure() []byte {
	if c.ambiguous {
		return nil
	}
	return c.value
}

// hasScheme reports whether a value has more than one word.
func hasScheme(value []byte) bool { return bytes.ContainsAny(value, " \t") }

// isScheme reports whether a value is the scheme alone, as clients without a key
// send it.
func isScheme(value []byte) bool {
	return len(value) <= len(schemeBearer) && (bytes.EqualFold(value, schemeBearer) || bytes.EqualFold(value, schemeBasic))
}

var schemeBearer, schemeBasic = []byte("Bearer"), []byte("Basic")

// usualStart begins nearly every value, so it is looked for first (17 ns instead of
// 40 a request).
var usualStart = []byte("Bearer ")

// canonical is the one spelling of a credential, without white space around it, that
// counts: servers read the scheme in any case (RFC 9110, section 11.1) and any number of
// spaces behind it, some take a key without a scheme for a bearer's, and a client must not
// be a new one by spelling it anew. The usual spelling, "Bearer sk-1", stays as it is; any
// other is written to scratch.
//
// It is nil where there is more than one credential: Envoy joins several such
// headers with a comma, which has no place in a scheme, nor in a credential of
// these two (RFC 7617, RFC 6750), nor has white space, behind which some servers read no
// further. And it is nil where there is none.
func canonical(value, scratch []byte) []byte {
	if key, ok := bytes.CutPrefix(value, usualStart); ok && len(key) > 0 && key[0] != ' ' && key[0] != '\t' {
		if several(key) {
			return nil
		}
		return value
	}
	at := bytes.IndexAny(value, " \t")
	if at < 0 {
		at = len(value)
	}
	scheme, rest := value[:at], bytes.TrimLeft(value[at:], " \t")
	if bytes.IndexByte(scheme, ',') >= 0 {
		return nil
	}
	if isScheme(scheme) && several(rest) {
		return nil
	}
	if len(rest) == 0 {
		if len(value) == 0 || isScheme(value) {
			return nil
		}
		return append(append(scratch, usualStart...), value...)
	}
	if usual(scheme) && value[at] == ' ' && len(rest) == len(value)-at-1 {
		return value
	}
	for i, c := range scheme {
		scratch = append(scratch, inUsualCase(i, c))
	}
	return append(append(scratch, ' '), rest...)
}

// several reports whether what follows the scheme Bearer or Basic is more than one
// credential.
func several(rest []byte) bool {
	for _, c := range rest {
		if c <= ' ' || c == ',' || c >= 0x7f { // beyond ASCII there is white space too
			return true
		}
	}
	return false
}

// usual reports whether a scheme is spelt with a capital first letter and none
// behind.
func usual(scheme []byte) bool {
	for i, c := range scheme {
		if c != inUsualCase(i, c) {
			return false
		}
	}
	return true
}

// inUsualCase is the i-th character of a scheme as it is usually spelt.
func inUsualCase(i int, c byte) byte {
	switch {
	case i == 0 && 'a' <= c && c <= 'z':
		return c - 'a' + 'A'
	case i > 0 && 'A' <= c && c <= 'Z':
		return c - 'A' + 'a'
	}
	return c
}

// client is who asks, by what the route tells clients apart by. A caller that
// doesn't show that (no credential, no verified token, no certificate) is known
// by its address.
//
// No header counts but the credential itself, and nobody here verifies it: an
// invented credential is a client of its own, with a share and a limit of its
// own, until the upstream refuses it. Where that matters a route tells clients apart by a verified claim or a certificate.
func (r *request) client(info *plan.RouteInfo) admission.Client {
	var scratch [192]byte // keys of Anthropic have 108 bytes
	if value := r.identity(info, scratch[:0]); len(value) > 0 {
		key := info.ClientKey
		if key == 0 {
			key = fleet.ClientKeyAuthorization
		}
		return admission.ClientOf(key, value)
	}
	return admission.ClientOf(fleet.ClientKeyAddress, networkOf(r.source, scratch[:0]))
}

// credential is what providers tell the caller apart by, however the route tells clients
// apart: the credential that it shows, or the client where it shows none. A token that
// Envoy verified is none: a client may have a new one for each request.
func (r *request) credential(info *plan.RouteInfo, client admission.Client) admission.Client {
	var scratch [192]byte
	var value []byte
	switch info.ClientKey {
	case fleet.ClientKeyJWT:
		value = canonical(r.shown.apiKey.sure(), scratch[:0])
	case fleet.ClientKeyMTLS, fleet.ClientKeyAddress:
		value = r.shown.by(info.Dialect, scratch[:0])
	}
	if len(value) == 0 {
		return client
	}
	return admission.ClientOf(fleet.ClientKeyAuthorization, value)
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
	return r.shown.by(info.Dialect, scratch)
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
