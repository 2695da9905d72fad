// Package retryafter reads from an answer's headers how long its server wants
// callers to stay away.
//
// It owns the forms: Retry-After, the milliseconds of the official SDKs and of
// Azure, and the resets of OpenAI, Anthropic and those who took after them. It
// never decides what to do about the wait.
//
// Invariant: a wait that is returned is above 0 and at most Max, whatever the
// headers hold.
package retryafter

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// Max is the longest wait that is told; a longer one counts as this. It may be a
// broken clock or a count of something else, but whoever sends it wants no request
// soon, and nobody here acts on more than a minute.
const Max = 24 * time.Hour

// Wait returns how long the headers tell to wait, as of now, and false when they
// tell nothing that can be understood. header returns a header's value by its
// lower-case name, "" where there is none.
//
// The first that can be read counts, in the order that the official SDKs have:
// retry-after-ms (and Azure's x-ms-retry-after-ms), then retry-after. Only
// servers that send neither are read by the resets of their limits. Of several
// limits those count that are used up (their remaining header says 0), and of
// them the one that resets last, since each of them refuses; if none is known to
// be used up, the one that resets first, since it isn't known which one refused.
//
// A value of 0, a negative one, a time that has passed and anything unreadable tell
// nothing, and the next header is looked at.
func Wait(header func(name string) string, now time.Time) (time.Duration, bool) {
	for _, name := range []string{wire.HeaderRetryAfterMs, headerAzureMs} {
		if d, ok := number(header(name), time.Millisecond); ok {
			return d, true
		}
	}
	if d, ok := seconds(header(wire.HeaderRetryAfter), now); ok {
		return d, true
	}
	return resets(header, now)
}

// Own reports whether the headers that callers go by, retry-after-ms and retry-after, tell
// them something: a number, also 0, or a date, also one that has passed. Anything else is
// as if it were missing.
func Own(header func(name string) string) bool {
	if _, ok := decimal(strings.TrimSpace(header(wire.HeaderRetryAfterMs))); ok {
		return true
	}
	value := strings.TrimSpace(header(wire.HeaderRetryAfter))
	if _, ok := decimal(value); ok {
		return true
	}
	_, err := http.ParseTime(value)
	return err == nil
}

const headerAzureMs = "x-ms-retry-after-ms"

// limits are the families of limits: the header of the reset and of what is left.
var limits = []struct{ reset, remaining string }{
	{"x-ratelimit-reset-requests", "x-ratelimit-remaining-requests"},
	{wire.HeaderRateLimitResetTokens, wire.HeaderRateLimitRemainingTokens},
	{wire.HeaderRateLimitReset, wire.HeaderRateLimitRemaining},
	{"anthropic-ratelimit-requests-reset", "anthropic-ratelimit-requests-remaining"},
	{"anthropic-ratelimit-tokens-reset", "anthropic-ratelimit-tokens-remaining"},
	{"anthropic-ratelimit-input-tokens-reset", "anthropic-ratelimit-input-tokens-remaining"},
	{"anthropic-ratelimit-output-tokens-reset", "anthropic-ratelimit-output-tokens-remaining"},
}

// Headers are the names that Wait asks for. Those of wire.RetryHeaders tell a
// wait; the rest tell which limits are used up.
func Headers() []string {
	out := []string{wire.HeaderRetryAfterMs, headerAzureMs, wire.HeaderRetryAfter}
	for _, l := range limits {
		out = append(out, l.reset, l.remaining)
	}
	return out
}

func resets(header func(string) string, now time.Time) (time.Duration, bool) {
	var last, first time.Duration // of those used up; of all
	for _, l := range limits {
		d, ok := reset(header(l.reset), now)
		if !ok {
			continue
		}
		if first == 0 || d < first {
			first = d
		}
		if usedUp(header(l.remaining)) {
			last = max(last, d)
		}
	}
	if last > 0 {
		return last, true
	}
	return first, first > 0
}

func usedUp(remaining string) bool {
	n, err := strconv.ParseInt(strings.TrimSpace(remaining), 10, 64)
	return err == nil && n <= 0
}

// seconds reads a Retry-After (RFC 9110, 10.2.3): seconds, or an HTTP date. The
// fractions of a second that some servers send are read as the SDKs read them.
func seconds(value string, now time.Time) (time.Duration, bool) {
	if d, ok := number(value, time.Second); ok {
		return d, true
	}
	at, err := http.ParseTime(strings.TrimSpace(value))
	return until(at, now, err)
}

// Numbers from which on a reset is a point in time, not a wait: 10⁹ s is the
// year 2001 as Unix time and 31 years as a wait.
const (
	unixSeconds = 1e9
	unixMillis  = 1e12
)

// reset reads the time of a reset: a duration like OpenAI's (1s, 6m0s, 12ms,
// also with days), a number of seconds, Unix time in seconds or milliseconds, or
// a time as of RFC 3339 or of HTTP.
func reset(value string, now time.Time) (time.Duration, bool) {
	value = strings.TrimSpace(value)
	if n, ok := decimal(value); ok {
		switch {
		case n >= unixMillis:
			return believed((n - float64(now.UnixMilli())) * float64(time.Millisecond))
		case n >= unixSeconds:
			return believed(n*float64(time.Second) - float64(now.UnixNano()))
		}
		return believed(n * float64(time.Second))
	}
	if at, err := time.Parse(time.RFC3339, value); err == nil {
		return until(at, now, nil)
	}
	if at, err := http.ParseTime(value); err == nil {
		return until(at, now, nil)
	}
	return duration(value)
}

// units are those of a Go duration, and days. One that begins like another stands
// before it.
var units = []struct {
	name string
	size time.Duration
}{
	{"d", 24 * time.Hour}, {"h", time.Hour}, {"ms", time.Millisecond}, {"m", time.Minute}, {"s", time.Second},
	{"us", time.Microsecond}, {"µs", time.Microsecond}, {"μs", time.Microsecond}, {"ns", time.Nanosecond},
}

// duration reads a Go duration without a sign that may have days: 1d2h. Unlike
// time.ParseDuration it tells one that overflows from one that can't be read.
func duration(value string) (time.Duration, bool) {
	ns := 0.0
	for value != "" {
		end := strings.IndexFunc(value, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
		if end < 0 {
			return 0, false
		}
		n, ok := decimal(value[:end])
		size, rest := cutUnit(value[end:])
		if !ok || size == 0 {
			return 0, false
		}
		ns, value = ns+n*float64(size), rest
	}
	return believed(ns)
}

// cutUnit cuts off the unit that a text begins with; 0 if that is none.
func cutUnit(s string) (size time.Duration, rest string) {
	for _, u := range units {
		if rest, ok := strings.CutPrefix(s, u.name); ok {
			return u.size, rest
		}
	}
	return 0, s
}

func until(at, now time.Time, err error) (time.Duration, bool) {
	if err != nil {
		return 0, false
	}
	return believed(float64(at.Sub(now))) // Sub saturates, it doesn't wrap
}

// number reads a count of units.
func number(value string, unit time.Duration) (time.Duration, bool) {
	n, ok := decimal(strings.TrimSpace(value))
	if !ok {
		return 0, false
	}
	return believed(n * float64(unit))
}

// decimal reads digits with at most one point; +Inf if they are too many. What a
// float may look like besides (signs, exponents, hex, NaN) no server means by a wait.
func decimal(s string) (float64, bool) {
	for i := range len(s) {
		if (s[i] < '0' || s[i] > '9') && s[i] != '.' {
			return 0, false
		}
	}
	n, err := strconv.ParseFloat(s, 64)
	return n, err == nil || errors.Is(err, strconv.ErrRange)
}

// believed bounds a wait in nanoseconds, which may be ±Inf.
func believed(ns float64) (time.Duration, bool) {
	if ns < 1 {
		return 0, false
	}
	return time.Duration(math.Round(min(ns, float64(Max)))), true
}
