package fleet

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// faultsOf returns the printed faults of a text.
func faultsOf(t *testing.T, text string) []string {
	t.Helper()
	c, err := Parse("f", []byte(text))
	if err == nil {
		return nil
	}
	var faults Faults
	if !errors.As(err, &faults) || len(faults) == 0 || c != nil {
		t.Fatalf("got %v, %v", c, err)
	}
	return strings.Split(err.Error(), "\n")
}

func TestBrokenFiles(t *testing.T) {
	for _, row := range []struct{ text, want string }{
		{"", "f: found nothing; accepted: a mapping with apiVersion, kind, groups, pools and routes"},
		{"# nothing but a comment\n", "f: found nothing; accepted: a mapping with apiVersion, kind, groups, pools and routes"},
		{"\n- a\n", "f:2: found a list; accepted: a mapping with apiVersion, kind, serve, groups, pools, routes, limits"},
		{"just text", `f:1: found "just text"; accepted: a mapping with apiVersion, kind, serve, groups, pools, routes, limits`},
		{"---\n", "f:2: found nothing; accepted: a mapping with apiVersion, kind, serve, groups, pools, routes, limits"},
		{"kind: x\n\tb: y\n", "f:2: found broken YAML (found a tab character that violates indentation); accepted: YAML; indent with spaces, quote values that hold : or #"},
		{"kind: [x\nb: y\n", "f:2: found broken YAML (did not find expected ',' or ']'); accepted: YAML; indent with spaces, quote values that hold : or #"},
		{"a: 1\nb: c: d\n", "f:2: found broken YAML (mapping values are not allowed in this context); accepted: YAML; indent with spaces, quote values that hold : or #"},
		{"a: 'x'y", "f:1: found broken YAML (did not find expected key); accepted: YAML; indent with spaces, quote values that hold : or #"},
		{"a: 1\n\nb: *gone\n", "f:3: found broken YAML (unknown anchor 'gone' referenced); accepted: YAML; indent with spaces, quote values that hold : or #"},
		{"a: 1\n---\nb: 2\n", "f:2: found a second document; accepted: one document per file"},
		{"a: 1\n---\nb: [\n", "f:4: found broken YAML (did not find expected node content); accepted: YAML; indent with spaces, quote values that hold : or #"},
		{"a: 1\nb: \xff\n", "f:2: found the byte 0xff, which is not UTF-8; accepted: a text file in UTF-8"},
		{"a: \x00", "f:1: found broken YAML (control characters are not allowed); accepted: YAML; indent with spaces, quote values that hold : or #"},
	} {
		got := faultsOf(t, row.text)
		if len(got) != 1 || got[0] != row.want {
			t.Errorf("%q:\ngot  %q\nwant %q", row.text, got, row.want)
		}
	}
}

// TestAliasBombIsRefusedUnexpanded ends at once since no alias is followed.
func TestAliasBombIsRefusedUnexpanded(t *testing.T) {
	var b strings.Builder
	b.WriteString("a0: &a0 [x]\n")
	for i := 1; i < 30; i++ {
		fmt.Fprintf(&b, "a%d: &a%d [%s*a%d]\n", i, i, strings.Repeat(fmt.Sprintf("*a%d,", i-1), 9), i-1)
	}
	got := faultsOf(t, b.String())
	if len(got) != 30+29*10 {
		t.Errorf("%d faults, want one per anchor and alias", len(got))
	}
}

func TestDeepNestingEndsInAFault(t *testing.T) {
	for _, depth := range []int{100, 9_000, 50_000} {
		if got := faultsOf(t, "pools: "+strings.Repeat("[", depth)+strings.Repeat("]", depth)); len(got) == 0 {
			t.Errorf("depth %d was accepted", depth)
		}
	}
}

// sample is a whole file with room for one key at each place.
const sample = `apiVersion: fairlead/v1alpha1
kind: Fairlead
serve: { shard: 1 <0> }
groups: [ { name: g, listener: { address: "127.0.0.1:1" <1> }, routes: [ r ] } ]
pools: [ { name: p <2> , endpoints: [ { address: 127.0.0.1:2 <3> } ] } ]
routes: [ { name: r, match: { prefix: / <5> }, dialect: openai, pool: p <4> } ]
`

// places names the rooms of sample; a place's line is its number + 2, but the
// endpoint's is its pool's.
const (
	inServe = iota
	inListener
	inPool
	inEndpoint
	inRoute
	inMatch
	placeCount
)

// with puts a text into one place of sample, nowhere if it is placeCount.
func with(place int, text string) string {
	out := sample
	for i := range placeCount {
		filling := ""
		if i == place {
			filling = ", " + text
		}
		out = strings.ReplaceAll(out, fmt.Sprintf("<%d>", i), filling)
	}
	return out
}

func TestSampleIsGood(t *testing.T) {
	if got := faultsOf(t, with(inServe, "stateDir: x")); got != nil {
		t.Fatal(got)
	}
}

// TestValues lists, per key, values at both sides of each border.
func TestValues(t *testing.T) {
	long := strings.Repeat("x", 254)
	for _, row := range []struct {
		place     int
		key       string
		good, bad []string
	}{
		{inServe, "shard", nil, []string{"2"}}, // a second time
		{inServe, "stateDir", []string{"/var/x", "state", "./state"}, []string{"~", `"~/x"`, `""`, "[]", `"a\nb"`, "5"}},
		{inServe, "xds", []string{"unix:/a/b", "127.0.0.1:1", `"[::1]:65535"`, "{ address: 10.0.0.1:5, plaintext: true }", "{ address: unix:/x }",
			"unix:/" + strings.Repeat("x", 106)},
			[]string{"unix:", "unix:a/b", "unix:@abstract", "unix:/a//b", "unix:/a/", "unix:/a/../b", "unix:/" + strings.Repeat("x", 107),
				"127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "10.0.0.1:5", `"[::]:5"`, "localhost:5", ":5", "{ plaintext: true }", "{ address: 10.0.0.1:5 }",
				"0.0.0.0:5", "{ address: 0.0.0.0:5, plaintext: true }", `{ address: "[::]:5", plaintext: true }`, `{ address: "[::ffff:0.0.0.0]:5", plaintext: true }`,
				"{ address: 127.0.0.1:5, tls: true }", "127.0.0.1:9900", "unix:/run/fairlead/extproc.sock", "[]", "true"}},
		{inServe, "extproc", []string{"{ address: 10.0.0.1:5, plaintext: true }"}, []string{"{ address: 0.0.0.0:5, plaintext: true }"}},
		{inServe, "accessLog", []string{"{ address: 10.0.0.1:5, plaintext: true }"}, []string{`{ address: "[::]:5", plaintext: true }`}},
		{inServe, "admin", []string{"127.0.0.1:1", "{ address: 0.0.0.0:9900, plaintext: true }", `{ address: "[::]:9900", plaintext: true }`}, []string{"unix:/x", "0.0.0.0:9900", "{ address: unix:/x, plaintext: true }"}},
		{inServe, "push", []string{"unix:/p", "127.0.0.1:5", `"[::1]:5"`, "{ address: 0.0.0.0:5, plaintext: true }", "{ address: 0.0.0.0:5, tls: { certificate: c, key: k, clientCA: a } }"},
			[]string{"10.0.0.1:5", "0.0.0.0:5", `"[::]:5"`, "{ address: 10.0.0.1:5 }", "{ address: 10.0.0.1:5, plaintext: false }",
				"{ address: unix:/p, tls: { certificate: c, key: k, clientCA: a } }"}},
		{inListener, "peekDigits", []string{"1", "9"}, []string{"0", "10", "-1", "06", "0x6", "6.0", `"6"`, "1_0", "six", "null", "99999999999999999999"}},
		{inListener, "drainTime", []string{"1s", "24h", "1h30m", "1.5h"}, []string{"999ms", "24h1s", "60", "0", "-1s", "1 h", "1d", "1h30", "h", "1.h", "9999999999999h"}},
		{inListener, "uploadTimeout", []string{"1s", "24h", "1h30m", "1.5h"}, []string{"999ms", "24h1s", "60", "0", "-1s", "1 h", "1d", "1h30", "h", "1.h", "9999999999999h"}},
		{inListener, "http2", []string{"{}", "{ initialStreamWindow: 65535B }", "{ initialStreamWindow: 64KiB }", "{ initialStreamWindow: 2147483647B }", "{ initialConnectionWindow: 66kB }", "{ maxConcurrentStreams: 2147483647 }"},
			[]string{"[]", "null", "{ initialStreamWindow: 65534B }", "{ initialStreamWindow: 2147483648B }", "{ initialStreamWindow: 2GiB }", "{ initialStreamWindow: 65536 }", "{ initialStreamWindow: 64Ki }", "{ initialStreamWindow: 1.5MiB }", "{ initialStreamWindow: 64 KiB }", "{ initialStreamWindow: 999999999999GiB }", "{ maxConcurrentStreams: 0 }", "{ maxConcurrentStreams: 2147483648 }"}},
		{inListener, "trusted", []string{"[]", "[10.0.0.0/8]", "[0.0.0.0/0]", `["::1/128"]`}, []string{"10.0.0.0/8", "[10.0.0.1/8]", "[10.0.0.1]", `["fe80::%eth0/64"]`, "[example.org/8]"}},
		{inPool, "tier", []string{"a", "Large 2", "größe"}, []string{"1", "true", "null", `""`, `" a"`, `"a\u0007b"`, long, "2024-01-01"}},
		{inPool, "protocol", []string{"http1", "h2c", "h2c, http2: { initialStreamWindow: 1MiB }"}, []string{"h2", "HTTP1", "null", "http1, http2: {}"}},
		{inPool, "maxInFlight", []string{"1", "65535"}, []string{"0", "65536", "many"}},
		{inPool, "healthCheck", []string{"{}", "{ path: /x, interval: 10ms, timeout: 1ms, unhealthyThreshold: 1, healthyThreshold: 100 }"},
			[]string{"true", "null", "{ path: x }", "{ path: /a b }", "{ path: '/a?b' }", "{ path: '/a#b' }", "{ path: /ä }", "{ path: /" + strings.Repeat("x", 1024) + " }", "{ unhealthyThreshold: 0 }", "{ healthyThreshold: 101 }", "{ port: 1 }"}},
		{inPool, "outlierDetection", []string{"true", "false"}, []string{"yes", "True", "1", "null", `"true"`}},
		{inPool, "connectTimeout", []string{"1ms", "1m"}, []string{"999us", "61s", "0s", "3"}},
		{inPool, "telemetry", []string{"{}", "{ source: none }", "{ source: scrape, interval: 1s, enginePath: /m, gpuPath: /g, gpuPort: 1 }", "{ source: scrape, gpuPath: /g }"},
			[]string{"none", "{ source: push }", "{ source: sim }", "{ interval: 1s }", "{ source: none, gpuPath: /g }", "{ source: scrape, gpuPort: 1 }", "{ source: scrape, gpuPath: /g, gpuPort: 0 }"}},
		{inEndpoint, "capacity", []string{"0.01", "1000", "1", "1.5", "1e2"}, []string{"0", "0.001", "1001", "-1", ".nan", ".inf", "1_0", "one", `"1"`}},
		{inEndpoint, "gpus", []string{"[]", "[GPU-1, GPU-2]"}, []string{"GPU-1", "[GPU-1, GPU-1]", "[0]", `[""]`}},
		{inRoute, "strategy", []string{"legacy", "dynamic"}, []string{"Dynamic", "auto", "null"}},
		{inRoute, "clientStrategy", []string{"honor", "ignore"}, []string{"honour"}},
		{inRoute, "defaultMaxTokens", []string{"1", "10000000"}, []string{"0", "10000001"}},
		{inRoute, "fallback", []string{"[]"}, []string{"[p]", "[{ pool: p }]", "[{ pool: q }]", "[{}]", "[{ provider: x }]", "[{ static: x }]", "[{ pool: '' }]"}},
		{inRoute, "timeouts", []string{"{}", "{ firstToken: 1ms }", "{ firstToken: 1h }"}, []string{"{ firstToken: 0s }", "{ connect: 3s }", "{ idle: 3s }", "5s"}},
		{inRoute, "retryBody", []string{"1B", "1GiB", "2MiB, maxBody: 2MiB"}, []string{"0B", "2GiB", "8388608", "3MiB, maxBody: 2MiB"}},
		{inRoute, "maxBody", []string{"1B", "1GiB"}, []string{"0B", "1025MiB"}},
		{inRoute, "trustDeclared", []string{"true"}, []string{"1"}},
		{inMatch, "model", []string{"m", "org/model:8b@q4"}, []string{"1", `""`, "[m]"}},
		{inMatch, "connect", []string{"true"}, []string{"1"}},
		{inMatch, "path", nil, []string{"/x"}},
	} {
		for _, v := range row.good {
			if got := faultsOf(t, with(row.place, row.key+": "+v)); got != nil {
				t.Errorf("%s: %s: %q", row.key, clip(v, 60), got)
			}
		}
		for _, v := range row.bad {
			got := faultsOf(t, with(row.place, row.key+": "+v))
			if len(got) != 1 {
				t.Errorf("%s: %s: %d faults instead of one: %q", row.key, clip(v, 60), len(got), got)
			}
			for _, line := range got {
				if len(line) > 500 {
					t.Errorf("%s: %s: the message has %d bytes", row.key, clip(v, 60), len(line))
				}
			}
		}
	}
}

// TestRatesHaveABoundThatIsTold: decoder and schema agree on both sides of it, and
// who passes it is told what it is.
func TestRatesHaveABoundThatIsTold(t *testing.T) {
	pattern := compiled(rate(new(Rate)).schema()["pattern"].(string))
	for text, want := range map[string]int64{ // 0 is refused
		"1/s": 1, "600/min": 600, "999999999999/h": 999_999_999_999, "1000000000000/day": 1_000_000_000_000,
		"1000000000001/day": 0, "1000000000010/s": 0, "5000000000000/day": 0, "9999999999999/s": 0, "10000000000000/h": 0,
		"99999999999999999999/s": 0, "0/min": 0, "01/s": 0, "-1/s": 0, "1.5/s": 0, "1/week": 0, "1/": 0, "/s": 0,
	} {
		file := with(placeCount, "") + "limits: [ { name: l, requests: " + text + " } ]\n"
		if faults := faultsOf(t, file); want == 0 {
			if len(faults) != 1 || !strings.HasSuffix(faults[0], "accepted: a whole number 1…1000000000000 per s, min, h or day, such as 600/min") {
				t.Errorf("%s: %q", text, faults)
			}
		} else if c, err := Parse("f", []byte(file)); err != nil || c.Limits[0].Requests.Amount != want {
			t.Errorf("%s: %v; want %d", text, faults, want)
		}
		if pattern.MatchString(text) != (want > 0) {
			t.Errorf("%s: the schema accepts it: %v", text, want == 0)
		}
	}
}

func TestNames(t *testing.T) {
	for name, good := range map[string]bool{
		"a": true, "0": false, "h100": true, "a-b": true, strings.Repeat("x", 63): true,
		"": false, strings.Repeat("x", 64): false, "-a": false, "a-": false, "A": false, "a_b": false, "a.b": false, "ä": false,
		"fairlead-x": false, "fairlead": true, "a/other": false, `"0"`: true,
	} {
		text := strings.ReplaceAll(with(placeCount, ""), "pool: p", "pool: "+name)
		text = strings.Replace(text, "name: p ", "name: "+name+" ", 1)
		if got := faultsOf(t, text); (got == nil) != good {
			t.Errorf("pool %s: %q", name, got)
		}
	}
}

func TestSuggestions(t *testing.T) {
	fields := poolFields(new(Pool))
	for wrong, want := range map[string]string{
		"maxInflight": "maxInFlight", "max_in_flight": "maxInFlight", "MAX-IN-FLIGHT": "maxInFlight", "endpoint": "endpoints",
		"healthcheck": "healthCheck", "nmae": "name", "modell": "model",
	} {
		if got := suggest(fields, wrong); !strings.HasPrefix(got, want+" (the nearest name)") {
			t.Errorf("%s: %s", wrong, got)
		}
	}
	for _, wrong := range []string{"", "x", "weights", strings.Repeat("name", 1000)} {
		if got := suggest(fields, wrong); strings.Contains(got, "nearest") {
			t.Errorf("%s: %s", clip(wrong, 20), got)
		}
	}
}

// routesInOneGroup are matches in their group's order.
func routesInOneGroup(matches ...string) string {
	var names, routes []string
	for i, m := range matches {
		names = append(names, fmt.Sprintf("r%d", i))
		routes = append(routes, fmt.Sprintf("\n  - { name: r%d, match: { %s }, dialect: openai, pool: p }", i, m))
	}
	return `apiVersion: fairlead/v1alpha1
kind: Fairlead
groups: [ { name: g, listener: { address: "127.0.0.1:1" }, routes: [ ` + strings.Join(names, ", ") + ` ] } ]
pools: [ { name: p, endpoints: [] } ]
routes:` + strings.Join(routes, "") + "\n"
}

func TestRoutesThatGetNoRequest(t *testing.T) {
	for _, row := range []struct {
		matches []string
		dead    int // how many
	}{
		{[]string{"prefix: /v1/chat", "prefix: /v1"}, 0},
		{[]string{"prefix: /v1", "prefix: /v1/chat"}, 1},
		{[]string{"prefix: /v1", "prefix: /v1"}, 1},
		{[]string{"prefix: /v1", "prefix: /v1x"}, 1}, // prefixes are of text, not of path segments
		{[]string{"prefix: /", "prefix: /v1, model: a", "prefix: /v2"}, 2},
		{[]string{"prefix: /v1, model: a", "prefix: /v1, model: b", "prefix: /v1"}, 0},
		{[]string{"prefix: /v1, model: a", "prefix: /v1/chat, model: a"}, 1},
		{[]string{"prefix: /v1, model: a", "prefix: /v1/chat"}, 0},
		{[]string{"prefix: /v1, model: a", "prefix: /v1, model: a"}, 1},
		{[]string{"prefix: /v1", "prefix: /v1/x, connect: true"}, 0}, // it still gets CONNECT
		{[]string{"prefix: /v1", "prefix: /v1, connect: true"}, 1},
		{[]string{"prefix: /a, connect: true", "prefix: /b, connect: true"}, 1},
	} {
		got := faultsOf(t, routesInOneGroup(row.matches...))
		if len(got) != row.dead {
			t.Errorf("%q: %q", row.matches, got)
		}
	}
}
