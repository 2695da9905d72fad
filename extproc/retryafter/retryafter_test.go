package retryafter

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

var now = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

type headers map[string]string

func (h headers) get(name string) string { return h[name] }

func TestEveryFormOfAWait(t *testing.T) {
	const ms, s, m, h = time.Millisecond, time.Second, time.Minute, time.Hour
	const openaiRequests, openaiTokens = "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"
	const anthropicRequests, anthropicOutput = "anthropic-ratelimit-requests-reset", "anthropic-ratelimit-output-tokens-reset"
	for _, row := range []struct {
		name string
		h    headers
		want time.Duration // 0: nothing told
	}{
		{"nothing", headers{}, 0},

		{"milliseconds", headers{"retry-after-ms": "350"}, 350 * ms},
		{"fraction of a millisecond", headers{"retry-after-ms": "0.5"}, 500 * time.Microsecond},
		{"space around it", headers{"retry-after-ms": " 350\t"}, 350 * ms},
		{"Azure's milliseconds", headers{"x-ms-retry-after-ms": "1200.5"}, 1200*ms + 500*time.Microsecond},
		{"milliseconds go first", headers{"retry-after-ms": "350", "retry-after": "2"}, 350 * ms},
		{"unreadable milliseconds don't hide seconds", headers{"retry-after-ms": "soon", "retry-after": "2"}, 2 * s},
		{"nor do 0 milliseconds", headers{"retry-after-ms": "0", "retry-after": "2"}, 2 * s},

		{"seconds", headers{"retry-after": "30"}, 30 * s},
		{"fraction of a second", headers{"retry-after": "0.4"}, 400 * ms},
		{"HTTP date", headers{"retry-after": "Wed, 04 Mar 2026 05:06:27 GMT"}, 20 * s},
		{"HTTP date as of RFC 850", headers{"retry-after": "Wednesday, 04-Mar-26 05:06:27 GMT"}, 20 * s},
		{"HTTP date as of asctime", headers{"retry-after": "Wed Mar  4 05:06:27 2026"}, 20 * s},
		{"seconds go before resets", headers{"retry-after": "30", openaiRequests: "1s"}, 30 * s},
		{"0 seconds", headers{"retry-after": "0"}, 0},
		{"a day", headers{"retry-after": "86400"}, 24 * h},
		{"above a day", headers{"retry-after": "86401"}, Max},
		{"three years", headers{"retry-after": "99999999"}, Max},
		{"20 digits of seconds", headers{"retry-after": strings.Repeat("9", 20)}, Max},
		{"20 digits and a fraction", headers{"retry-after": strings.Repeat("9", 20) + ".5"}, Max},
		{"2⁶³ ns in seconds", headers{"retry-after": "9223372036.854775808"}, Max},
		{"400 digits of seconds", headers{"retry-after": strings.Repeat("9", 400)}, Max},
		{"400 zeros", headers{"retry-after": strings.Repeat("0", 400)}, 0},
		{"negative, 20 digits", headers{"retry-after": "-" + strings.Repeat("9", 20)}, 0},
		{"date in the year 9999", headers{"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, Max},
		{"date in the year 2400", headers{"retry-after": "Sat, 01 Jan 2400 00:00:00 GMT"}, Max},
		{"an absurd wait goes before what comes later", headers{"retry-after-ms": strings.Repeat("9", 20), "retry-after": "2"}, Max},
		{"RFC 3339 is not for this header", headers{"retry-after": "2026-03-04T05:06:27Z"}, 0},
		{"date that has passed", headers{"retry-after": "Wed, 04 Mar 2026 05:06:07 GMT"}, 0},
		{"date long ago", headers{"retry-after": "Mon, 01 Jan 0001 00:00:00 GMT"}, 0},
		{"negative", headers{"retry-after": "-5"}, 0},
		{"NaN", headers{"retry-after-ms": "NaN"}, 0},
		{"infinity", headers{"retry-after-ms": "Inf"}, 0},
		{"exponent", headers{"retry-after": "1e3"}, 0},
		{"hex", headers{"retry-after": "0x10"}, 0},
		{"two points", headers{"retry-after": "1.2.3"}, 0},
		{"a point alone", headers{"retry-after": "."}, 0},
		{"two values", headers{"retry-after": "5,7"}, 0},
		{"20 digits", headers{"retry-after-ms": strings.Repeat("9", 20)}, Max},
		{"400 digits", headers{"retry-after-ms": strings.Repeat("9", 400)}, Max},
		{"Azure's, 20 digits", headers{"x-ms-retry-after-ms": strings.Repeat("9", 20)}, Max},
		{"less than a nanosecond", headers{"retry-after-ms": "0.0000001"}, 0},

		{"OpenAI: seconds", headers{openaiRequests: "1s"}, s},
		{"OpenAI: minutes", headers{openaiTokens: "6m0s"}, 6 * m},
		{"OpenAI: milliseconds", headers{openaiTokens: "12ms"}, 12 * ms},
		{"fractions", headers{openaiTokens: "2m59.56s"}, 179*s + 560*ms},
		{"days", headers{openaiRequests: "0d2h"}, 2 * h},
		{"a day alone", headers{openaiRequests: "1d"}, 24 * h},
		{"above a day by days", headers{openaiRequests: "1d2h"}, Max},
		{"above a day by hours", headers{openaiRequests: "24h1ns"}, Max},
		{"300 years of hours", headers{openaiRequests: "2628000h"}, Max},
		{"hours of 20 digits", headers{openaiRequests: strings.Repeat("9", 20) + "h"}, Max},
		{"hours of 400 digits", headers{openaiRequests: strings.Repeat("9", 400) + "h1s"}, Max},
		{"days of 20 digits", headers{openaiRequests: strings.Repeat("9", 20) + "d"}, Max},
		{"half a day", headers{openaiRequests: "0.5d"}, 12 * h},
		{"a billion nanoseconds", headers{openaiRequests: "1000000000ns"}, s},
		{"microseconds in three spellings", headers{openaiRequests: "500us250µs250μs"}, ms},
		{"number without unit behind one", headers{openaiRequests: "1s5"}, 0},
		{"unit without number", headers{openaiRequests: "1ms"[1:]}, 0},
		{"two units", headers{openaiRequests: "1mss"}, 0},
		{"unknown unit", headers{openaiRequests: "1w"}, 0},
		{"20 digits and an unknown unit", headers{openaiRequests: strings.Repeat("9", 20) + "y"}, 0},
		{"two points in a duration", headers{openaiRequests: "1.2.3s"}, 0},
		{"days without number", headers{openaiRequests: "d2h"}, 0},
		{"negative duration", headers{openaiRequests: "-1s"}, 0},
		{"negative duration behind days", headers{openaiRequests: "1d-1s"}, 0},
		{"plain seconds", headers{openaiRequests: "17"}, 17 * s},
		{"Unix time", headers{wire.HeaderRateLimitReset: "1772600787"}, 20 * s},
		{"Unix time in milliseconds", headers{wire.HeaderRateLimitReset: "1772600787250"}, 20*s + 250*ms},
		{"Unix time that has passed", headers{wire.HeaderRateLimitReset: "1772600700"}, 0},
		{"between seconds and Unix time", headers{wire.HeaderRateLimitReset: "500000000"}, Max},
		{"Unix time of the year 9999", headers{wire.HeaderRateLimitReset: "253402300799"}, Max},
		{"Unix time in milliseconds of the year 9999", headers{wire.HeaderRateLimitReset: "253402300799000"}, Max},
		{"Unix time of 20 digits", headers{wire.HeaderRateLimitReset: strings.Repeat("9", 20)}, Max},
		{"Unix time of 400 digits", headers{wire.HeaderRateLimitReset: strings.Repeat("9", 400)}, Max},
		{"words", headers{wire.HeaderRateLimitReset: "tomorrow"}, 0},
		{"Anthropic", headers{anthropicRequests: "2026-03-04T05:06:27Z"}, 20 * s},
		{"Anthropic with a zone and a fraction", headers{anthropicOutput: "2026-03-04T06:06:27.5+01:00"}, 20*s + 500*ms},
		{"Anthropic: the year 9999", headers{anthropicRequests: "9999-12-31T23:59:59Z"}, Max},
		{"Anthropic: the year 2400", headers{anthropicOutput: "2400-01-01T00:00:00+01:00"}, Max},
		{"Anthropic: the year 0000", headers{anthropicRequests: "0000-01-01T00:00:00Z"}, 0},
		{"Anthropic: passed", headers{anthropicOutput: "2026-03-04T05:06:06Z"}, 0},

		{"which limit refused isn't known", headers{openaiRequests: "10s", openaiTokens: "3s"}, 3 * s},
		{"one is used up", headers{
			openaiRequests: "10s", "x-ratelimit-remaining-requests": "0",
			openaiTokens: "3s", "x-ratelimit-remaining-tokens": "40000",
		}, 10 * s},
		{"two are used up", headers{
			anthropicRequests: "2026-03-04T05:06:27Z", "anthropic-ratelimit-requests-remaining": "0",
			anthropicOutput: "2026-03-04T05:06:17Z", "anthropic-ratelimit-output-tokens-remaining": "0",
		}, 20 * s},
		{"the one used up is far away", headers{
			anthropicRequests: "9999-12-31T23:59:59Z", "anthropic-ratelimit-requests-remaining": "0",
			anthropicOutput: "2026-03-04T05:06:17Z", "anthropic-ratelimit-output-tokens-remaining": "0",
		}, Max},
		{"one that isn't used up is far away", headers{openaiRequests: strings.Repeat("9", 20) + "h", openaiTokens: "3s"}, 3 * s},
		{"none is used up", headers{
			openaiRequests: "10s", "x-ratelimit-remaining-requests": "5",
			openaiTokens: "3s", "x-ratelimit-remaining-tokens": "150",
		}, 3 * s},
		{"the one used up has passed", headers{
			openaiRequests: "0s", "x-ratelimit-remaining-requests": "0", openaiTokens: "3s",
		}, 3 * s},
	} {
		got, ok := Wait(row.h.get, now)
		if got != row.want || ok != (row.want > 0) {
			t.Errorf("%s: %v (%v); want %v", row.name, got, ok, row.want)
		}
	}
}

func TestOwnFieldsAreThoseThatCallersUnderstand(t *testing.T) {
	for _, row := range []struct {
		h    headers
		want bool
	}{
		{headers{}, false},
		{headers{"retry-after": ""}, false},
		{headers{"retry-after": "garbage"}, false},
		{headers{"retry-after": "-3"}, false},
		{headers{"retry-after-ms": "soon", "retry-after": "later"}, false},
		{headers{"x-ratelimit-reset-requests": "3s", headerAzureMs: "700"}, false},
		{headers{"retry-after": "0"}, true},
		{headers{"retry-after": " 3 "}, true},
		{headers{"retry-after": "0.4"}, true},
		{headers{"retry-after": "Wed, 04 Mar 2026 05:06:06 GMT"}, true},
		{headers{"retry-after": "Wed Mar  4 05:06:27 2026"}, true},
		{headers{"retry-after-ms": "350"}, true},
		{headers{"retry-after-ms": "soon", "retry-after": "3"}, true},
		{headers{"retry-after-ms": "350", "retry-after": "garbage"}, true},
	} {
		if got := Own(row.h.get); got != row.want {
			t.Errorf("%v: %v", row.h, got)
		}
	}
}

// Whoever logs wire.RetryHeaders must get a wait from each of them.
func TestEveryRetryHeaderIsRead(t *testing.T) {
	for _, name := range wire.RetryHeaders() {
		value := "5"
		if strings.HasPrefix(name, "anthropic-") {
			value = now.Add(5 * time.Second).Format(time.RFC3339)
		}
		if _, ok := Wait(headers{name: value}.get, now); !ok {
			t.Errorf("%s: %s tells nothing", name, value)
		}
	}
}

func TestHTTPHeaderFits(t *testing.T) {
	h := http.Header{}
	h.Set("Retry-After", "3")
	if d, ok := Wait(h.Get, now); !ok || d != 3*time.Second {
		t.Errorf("%v (%v)", d, ok)
	}
}

// TestDurationsAreGos holds the units against the standard library's.
func TestDurationsAreGos(t *testing.T) {
	for _, value := range []string{"1h2m3s4ms5us6ns", "1.5h", ".5s", "0.25m", "1m0s", "59.999999999s", "3s2h", "1us", "23h59m59.999999999s", "10ns", "1m.5s", "7ms", "1.s"} {
		want, err := time.ParseDuration(value)
		if got, ok := duration(value); err != nil || !ok || got != want {
			t.Errorf("%s: %v (%v); want %v, %v", value, got, ok, want, err)
		}
	}
}

func FuzzWait(f *testing.F) {
	for _, value := range []string{"350", "0.4", "6m0s", "1d2h", "1772600787", "2026-03-04T05:06:27Z", "Wed, 04 Mar 2026 05:06:27 GMT", "-1", "NaN", "1e309", "99999999999999999999", "99999999999999999999h", "9999-12-31T23:59:59Z"} {
		f.Add(value, value, "0")
	}
	f.Fuzz(func(t *testing.T, one, two, remaining string) {
		for i, name := range wire.RetryHeaders() {
			h := headers{name: one, wire.RetryHeaders()[(i+1)%len(wire.RetryHeaders())]: two}
			for _, l := range limits {
				h[l.remaining] = remaining
			}
			if d, ok := Wait(h.get, now); ok != (d > 0) || d > Max || d < 0 {
				t.Fatalf("%s: %q, next %q: %v (%v)", name, one, two, d, ok)
			}
		}
	})
}
