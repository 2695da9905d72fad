package admission

import (
	"strconv"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// maxField is the largest Integer of a structured field (RFC 9651 §3.3.1).
const maxField = 999_999_999_999_999

// EachHeader calls f for each header that tells the standing: X-RateLimit-* for
// requests, x-ratelimit-*-tokens for tokens, then RateLimit-Policy and RateLimit,
// which name every quota there is. A quota without a limit has none of them, a
// standing without any calls nothing. Resets and windows are whole seconds,
// rounded up, so that nobody who waits that long comes too early.
//
// While the standing is local the policies' names end in -local: their limit is
// then one replica's part.
//
// The values are appended to buf, which is returned for the next use; f may keep
// one only as long as nobody else uses buf. Nothing is allocated once buf has
// room (300 bytes always do).
func (s *Standing) EachHeader(buf []byte, f func(name string, value []byte)) []byte {
	if s.Requests.Limit <= 0 && s.Tokens.Limit <= 0 {
		return buf
	}
	if q := &s.Requests; q.Limit > 0 {
		buf = number(buf, f, wire.HeaderRateLimitLimit, q.Limit)
		buf = number(buf, f, wire.HeaderRateLimitRemaining, q.Remaining)
		buf = number(buf, f, wire.HeaderRateLimitReset, seconds(q.Reset))
	}
	if q := &s.Tokens; q.Limit > 0 {
		buf = number(buf, f, wire.HeaderRateLimitLimitTokens, q.Limit)
		buf = number(buf, f, wire.HeaderRateLimitRemainingTokens, q.Remaining)
		buf = number(buf, f, wire.HeaderRateLimitResetTokens, seconds(q.Reset))
	}
	start := len(buf)
	buf = s.each(buf, func(buf []byte, q *Quota) []byte {
		buf = parameter(buf, ";q=", q.Limit)
		return parameter(buf, ";w=", seconds(q.Window))
	})
	f(wire.HeaderRateLimitPolicy, buf[start:len(buf):len(buf)])
	start = len(buf)
	buf = s.each(buf, func(buf []byte, q *Quota) []byte {
		buf = parameter(buf, ";r=", q.Remaining)
		return parameter(buf, ";t=", seconds(q.Reset))
	})
	f(wire.HeaderRateLimit, buf[start:len(buf):len(buf)])
	return buf
}

// each appends a list with one member for each quota, with its parameters.
func (s *Standing) each(buf []byte, parameters func([]byte, *Quota) []byte) []byte {
	start := len(buf)
	for _, member := range [...]struct {
		name string
		q    *Quota
	}{{"requests", &s.Requests}, {"tokens", &s.Tokens}} {
		if member.q.Limit <= 0 {
			continue
		}
		if len(buf) > start {
			buf = append(buf, ", "...)
		}
		buf = append(append(buf, '"'), member.name...)
		if s.Local {
			buf = append(buf, "-local"...)
		}
		buf = parameters(append(buf, '"'), member.q)
	}
	return buf
}

func number(buf []byte, f func(string, []byte), name string, n int64) []byte {
	start := len(buf)
	buf = strconv.AppendInt(buf, field(n), 10)
	f(name, buf[start:len(buf):len(buf)])
	return buf
}

func parameter(buf []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(buf, name...), field(n), 10)
}

// field holds a number to 0 … maxField; a debt of tokens reads as nothing left.
func field(n int64) int64 { return min(max(n, 0), maxField) }

// seconds rounds up.
func seconds(d time.Duration) int64 {
	whole := int64(d / time.Second)
	if d%time.Second > 0 {
		whole++
	}
	return whole
}
