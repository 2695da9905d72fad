package fleet

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// scalar is a value written as one word. Tag is the YAML type that it must
// resolve to; read returns false to refuse it.
func scalar(tag, accepted string, s schema, read func(text string) bool) value {
	return explained(tag, accepted, s, func(text string) string {
		if !read(text) {
			return accepted
		}
		return ""
	})
}

// explained is a scalar whose faults can say more than what is accepted in
// general: read returns "" or what is accepted instead.
func explained(tag, accepted string, s schema, read func(text string) string) value {
	return value{
		accepted: accepted,
		schema:   func() schema { return s },
		read: func(d *decoder, n *yaml.Node, path string) {
			instead := ""
			switch {
			case n.Kind != yaml.ScalarNode:
				instead = accepted
			case n.ShortTag() == tag || tag == tagNumber && n.ShortTag() == tagInt:
				instead = read(n.Value)
			case tag == tagText && n.ShortTag() != "!!null" && read(n.Value) == "":
				instead = accepted + `; quote it: "` + clip(n.Value, 80) + `"`
			default:
				instead = accepted
			}
			if instead != "" {
				d.fault(n.Line, path, describe(n), instead)
			}
		},
	}
}

// YAML types of scalars.
const (
	tagText   = "!!str"
	tagInt    = "!!int"
	tagNumber = "!!float"
	tagBool   = "!!bool"
)

// nameOf is what pools, routes and groups are called. A faulty name is stored
// all the same, so that what refers to it isn't reported as dangling too.
func nameOf(into *string) value {
	const accepted = "1 to 63 of a–z, 0–9 and -, not first or last -, not beginning with fairlead-"
	return scalar(tagText, accepted,
		schema{"type": "string", "pattern": namePattern, "not": schema{"pattern": "^" + reservedName}},
		func(text string) bool {
			*into = text
			return nameText.MatchString(text) && !strings.HasPrefix(text, reservedName)
		})
}

const namePattern = `^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`

var nameText = regexp.MustCompile(namePattern)

// reservedName begins the names of resources of Fairlead's own.
const reservedName = "fairlead-"

// reference is the name of something that is defined elsewhere in the file;
// the checks find out whether it is.
func reference(into *string) value {
	return scalar(tagText, "a name", schema{"type": "string", "minLength": 1}, func(text string) bool {
		*into = text
		return text != ""
	})
}

// label is free text for people and metrics, on one line.
func label(into *string) value {
	const limit = 253
	return scalar(tagText, fmt.Sprintf("a text of 1 to %d printable characters", limit),
		schema{"type": "string", "minLength": 1, "maxLength": limit, "pattern": `^[^\x00-\x1f\x7f]*$`},
		func(text string) bool {
			*into = text
			return text != "" && len(text) <= limit && strings.IndexFunc(text, unprintable) < 0 && strings.TrimSpace(text) == text
		})
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// urlPath is the path part of a URL.
func urlPath(into *string) value {
	const limit = 1024
	return scalar(tagText, fmt.Sprintf("a path that begins with /, printable ASCII without ?, # and spaces, at most %d characters", limit),
		schema{"type": "string", "pattern": pathPattern, "maxLength": limit},
		func(text string) bool { *into = text; return len(text) <= limit && pathText.MatchString(text) })
}

const pathPattern = `^/[!-"$->@-~]*$` // printable ASCII but # and ?

var pathText = regexp.MustCompile(pathPattern)

// exactly is a constant.
func exactly(text string) value {
	return scalar(tagText, text, schema{"const": text}, func(got string) bool { return got == text })
}

// choice is one of an enumeration that starts at 1. Later names choices that
// are planned but not supported yet.
func choice[T ~uint8](into *T, later []string, names ...string) value {
	accepted := strings.Join(names, " or ")
	return explained(tagText, accepted, schema{"enum": names}, func(text string) string {
		for i, name := range names {
			if text == name {
				*into = T(i + 1)
				return ""
			}
		}
		for _, name := range later {
			if text == name {
				return accepted + " (this version does not support " + name + " yet)"
			}
		}
		return accepted
	})
}

func boolean(into *bool) value {
	return scalar(tagBool, "true or false", schema{"type": "boolean"}, func(text string) bool {
		*into = text == "true"
		return text == "true" || text == "false"
	})
}

// whole is an integer in decimal, without leading zeros (which YAML 1.1 takes
// for octal).
func whole[T ~int | ~uint16 | ~uint32 | ~int64](into *T, low, high int64) value {
	return scalar(tagInt, fmt.Sprintf("a whole number %d…%d", low, high),
		schema{"type": "integer", "minimum": low, "maximum": high},
		func(text string) bool {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil || strconv.FormatInt(n, 10) != text || n < low || n > high {
				return false
			}
			*into = T(n)
			return true
		})
}

func number(into *float64, low, high float64) value {
	return scalar(tagNumber, fmt.Sprintf("a number %g…%g", low, high),
		schema{"type": "number", "minimum": low, "maximum": high},
		func(text string) bool {
			x, err := strconv.ParseFloat(text, 64)
			if err != nil || math.IsNaN(x) || x < low || x > high || strings.ContainsAny(text, "_xX") {
				return false
			}
			*into = x
			return true
		})
}

// durationPattern is what time.ParseDuration reads, less signs and bare dots.
const durationPattern = `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`

var durationText = regexp.MustCompile(durationPattern)

func duration(into *time.Duration, low, high time.Duration) value {
	examples := "250ms, 3s or 1h30m"
	if high < time.Second {
		examples = "5ms or 20ms"
	}
	accepted := fmt.Sprintf("a duration %s…%s with its unit, such as %s", short(low), short(high), examples)
	return scalar(tagText, accepted, schema{"type": "string", "pattern": durationPattern}, func(text string) bool {
		if !durationText.MatchString(text) {
			return false
		}
		d, err := time.ParseDuration(text)
		if err != nil || d < low || d > high {
			return false
		}
		*into = d
		return true
	})
}

// short writes 1h0m0s as 1h.
func short(d time.Duration) string {
	s := d.String()
	s = strings.TrimSuffix(s, "0s")
	if strings.HasSuffix(s, "h0m") {
		return strings.TrimSuffix(s, "0m")
	}
	if strings.HasSuffix(s, "m") {
		return s
	}
	return d.String()
}

var sizeUnits = map[string]int64{
	"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}

const sizePattern = `^([0-9]{1,12})(B|kB|MB|GB|KiB|MiB|GiB)$`

var sizeText = regexp.MustCompile(sizePattern)

func size(into *Bytes, low, high Bytes) value {
	accepted := fmt.Sprintf("a size %s…%s with its unit, such as 65535B, 64KiB or 1MiB (units: B, KiB, MiB, GiB, kB, MB, GB)", low, high)
	return scalar(tagText, accepted, schema{"type": "string", "pattern": sizePattern}, func(text string) bool {
		m := sizeText.FindStringSubmatch(text)
		if m == nil {
			return false
		}
		n, _ := strconv.ParseInt(m[1], 10, 64) // at most 12 digits: cannot fail
		unit := sizeUnits[m[2]]
		if n > int64(high)/unit || n*unit < int64(low) {
			return false
		}
		*into = Bytes(n * unit)
		return true
	})
}

// String writes the size in the largest binary unit that divides it: "64KiB".
func (b Bytes) String() string {
	for _, unit := range []string{"GiB", "MiB", "KiB"} {
		if n := Bytes(sizeUnits[unit]); b != 0 && b%n == 0 {
			return fmt.Sprintf("%d%s", b/n, unit)
		}
	}
	return fmt.Sprintf("%dB", int64(b))
}

// Patterns of addresses for editors; the exact rules are in code.
const (
	hostPortPattern = `^([0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}$`
	listenPattern   = `^(unix:/.+|([0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5})$`
)

// ipPort is an address to connect to or to listen on.
func ipPort(into *netip.AddrPort, refuse func(netip.Addr) string) value {
	const accepted = "IP:port, such as 10.0.0.11:8000 or [2001:db8::1]:8000"
	return explained(tagText, accepted, schema{"type": "string", "pattern": hostPortPattern}, func(text string) string {
		a, why := parseIPPort(text)
		if why == "" && refuse != nil {
			why = refuse(a.Addr())
		}
		if why != "" {
			return accepted + " (" + why + ")"
		}
		*into = a
		return ""
	})
}

// parseIPPort returns an address, or why there is none.
func parseIPPort(text string) (netip.AddrPort, string) {
	a, err := netip.ParseAddrPort(text)
	switch {
	case err != nil && looksLikeHost(text):
		return a, "host names are not looked up"
	case err != nil:
		return a, "an address and a port are needed"
	case a.Port() == 0:
		return a, "port 0 is none"
	case a.Addr().Zone() != "":
		return a, "zones mean something on one machine only"
	case a.Addr().Is4In6():
		return a, "write the IPv4 address as such"
	case a.Addr().IsMulticast():
		return a, "a multicast address is none for TCP"
	}
	return a, ""
}

func looksLikeHost(text string) bool {
	host, _, _ := strings.Cut(text, ":")
	return strings.IndexFunc(host, unicode.IsLetter) >= 0 && !strings.HasPrefix(text, "unix:") && !strings.HasPrefix(text, "[")
}

// unconnectable refuses addresses that nothing can be reached at.
func unconnectable(a netip.Addr) string {
	if a.IsUnspecified() {
		return "an unspecified address leads nowhere"
	}
	return ""
}

// maxSocketPath is the longest path a Unix socket can have on Linux
// (sizeof(sockaddr_un.sun_path) less the closing zero).
const maxSocketPath = 107

const acceptedListen = "unix:/path or IP:port"

// readListen reads "unix:/path" or "IP:port" and returns "" or what is accepted.
func readListen(into *Address, text string) string {
	why := ""
	if path, ok := strings.CutPrefix(text, "unix:"); ok {
		why = socketPathFault(path)
	} else {
		_, why = parseIPPort(text)
	}
	if why != "" {
		return acceptedListen + " (" + why + ")"
	}
	a, err := ParseAddress(text)
	if err != nil {
		return acceptedListen
	}
	into.Path, into.Host = a.Path, a.Host
	return ""
}

func socketPathFault(path string) string {
	switch {
	case !strings.HasPrefix(path, "/"):
		return "a socket's path must be absolute"
	case len(path) > maxSocketPath:
		return fmt.Sprintf("a socket's path has at most %d bytes, this one %d", maxSocketPath, len(path))
	case strings.IndexFunc(path, unprintable) >= 0 || path != filepath.Clean(path):
		return "a socket's path is printable and has no double or trailing slashes and no dots as names"
	}
	return ""
}

// listenAddress is "unix:/path" or "IP:port", or both of these as a mapping's
// address beside the word plaintext.
func listenAddress(into *Address) value {
	return addressOr(into, "a mapping with address and plaintext")
}

// pushListener is a listenAddress that may have TLS beside it.
func pushListener(into *Push) value {
	return addressOr(&into.Address, "a mapping with address, plaintext and tls",
		field{name: "tls", doc: "Mutual TLS.", value: optional(&into.TLS, serverTLSFields)})
}

// addressOr is an address as text, or as a mapping with more fields.
func addressOr(into *Address, mapping string, more ...field) value {
	text := explained(tagText, acceptedListen, schema{"type": "string", "pattern": listenPattern},
		func(text string) string { return readListen(into, text) })
	whole := object(append([]field{
		{name: "address", doc: "unix:/path or IP:port", required: true, value: text},
		{name: "plaintext", doc: "Allow TCP beyond loopback without TLS.", preset: "false", value: boolean(&into.Plaintext)},
	}, more...))
	accepted := acceptedListen + ", or " + mapping
	return value{
		accepted: accepted,
		schema:   func() schema { return schema{"oneOf": []schema{text.schema(), whole.schema()}} },
		read: func(d *decoder, n *yaml.Node, path string) {
			switch n.Kind {
			case yaml.ScalarNode:
				text.read(d, n, path)
			case yaml.MappingNode:
				whole.read(d, n, path)
			default:
				d.fault(n.Line, path, describe(n), accepted)
			}
		},
	}
}

// network is a range of addresses.
func network(into *netip.Prefix) value {
	const accepted = "a range of addresses, such as 10.0.0.0/8 or 2001:db8::/32"
	return explained(tagText, accepted, schema{"type": "string", "pattern": `^[0-9a-fA-F:.]+/[0-9]{1,3}$`}, func(text string) string {
		p, err := netip.ParsePrefix(text)
		switch {
		case err != nil:
			return accepted
		case p.Addr().Is4In6():
			return accepted + " (write the IPv4 range as such)"
		case p != p.Masked():
			return accepted + " (bits are set after the prefix; did you mean " + p.Masked().String() + "?)"
		}
		*into = p
		return ""
	})
}

// directory is a path on this machine.
func directory(into *string) value { return localPath(into, "a directory's path") }

// file is a file's path on this machine.
func file(into *string) value { return localPath(into, "a file's path") }

func localPath(into *string, accepted string) value {
	return explained(tagText, accepted, schema{"type": "string", "minLength": 1}, func(text string) string {
		*into = text
		switch {
		case text == "" || len(text) > 1024 || strings.IndexFunc(text, unprintable) >= 0:
			return accepted
		case strings.HasPrefix(text, "~"):
			return accepted + " (~ is not expanded)"
		}
		return ""
	})
}

// secret is a reference to a secret.
func secret(into *Secret) value {
	const accepted = "env:NAME or file:/path"
	v := scalar(tagText, accepted, schema{"type": "string", "pattern": secretPattern}, func(text string) bool { return true })
	v.read = func(d *decoder, n *yaml.Node, path string) {
		*into = Secret(n.Value)
		if n.Kind != yaml.ScalarNode || n.ShortTag() != tagText || len(n.Value) > 1024 || !secretText.MatchString(n.Value) {
			// The secret itself, most likely: it stays out of the message.
			d.fault(n.Line, path, unsaid(n.Value), accepted)
		}
	}
	return v
}

// unsaid describes a text that may be a secret.
func unsaid(text string) string { return fmt.Sprintf("a text of %d bytes", len(text)) }

const secretPattern = `^(env:[A-Za-z_][A-Za-z0-9_]*|file:[^\x00-\x1f\x7f]+)$`

var secretText = regexp.MustCompile(secretPattern)

// dialAddress is where to connect to: a host's name or address with a port, or a
// Unix socket.
func dialAddress(into *string) value {
	const accepted = "host:port or unix:/path"
	v := scalar(tagText, accepted, schema{"type": "string", "minLength": 1}, func(text string) bool {
		*into = text
		if path, ok := strings.CutPrefix(text, "unix:"); ok {
			return strings.HasPrefix(path, "/") && socketPathFault(path) == ""
		}
		host, port, err := net.SplitHostPort(text)
		n, perr := strconv.ParseUint(port, 10, 16)
		return err == nil && perr == nil && n > 0 && host != "" && len(text) <= 280 && strings.IndexFunc(host, func(r rune) bool { return unprintable(r) || r == ' ' || r == '/' || r == '@' }) < 0
	})
	read := v.read
	v.read = func(d *decoder, n *yaml.Node, path string) {
		if strings.ContainsAny(n.Value, "@") || strings.Contains(n.Value, "://") {
			*into = ""
			d.fault(n.Line, path, "a URL, perhaps with a password", accepted+"; username, password and tls are keys of their own")
			return
		}
		read(d, n, path)
	}
	return v
}

// rateWindows are the windows that a rate may have.
var rateWindows = []struct {
	name   string
	window time.Duration
}{{"s", time.Second}, {"min", time.Minute}, {"h", time.Hour}, {"day", 24 * time.Hour}}

// maxRate keeps counts inside 40 bits. It is a power of ten, which ratePattern
// writes as that: all of up to twelve digits, and one of thirteen.
const (
	maxRate     = 1_000_000_000_000
	ratePattern = `^([1-9][0-9]{0,11}|1000000000000)/(s|min|h|day)$`
)

// rate is an amount per window.
func rate(into *Rate) value {
	accepted := fmt.Sprintf("a whole number 1…%d per s, min, h or day, such as 600/min", int64(maxRate))
	return scalar(tagText, accepted, schema{"type": "string", "pattern": ratePattern}, func(text string) bool {
		amount, per, _ := strings.Cut(text, "/")
		n, err := strconv.ParseInt(amount, 10, 64)
		if err != nil || n < 1 || n > maxRate || strconv.FormatInt(n, 10) != amount {
			return false
		}
		for _, w := range rateWindows {
			if w.name == per {
				*into = Rate{Amount: n, Window: w.window}
				return true
			}
		}
		return false
	})
}

// String returns the form that the config file has, such as 600/min.
func (r Rate) String() string {
	for _, w := range rateWindows {
		if w.window == r.Window {
			return fmt.Sprintf("%d/%s", r.Amount, w.name)
		}
	}
	return fmt.Sprintf("%d/%s", r.Amount, r.Window)
}
