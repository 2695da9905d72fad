package integration

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// Peeking holds a request until its body is complete and costs up to a second of
// a worker for large documents, so large and chunked bodies pass unread, but
// steered and whole.
func TestFactLargeAndChunkedBodiesAreNotPeeked(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	ep := newProcessor(t, steerTo(list(up)))
	e := startFacts(t, facts{
		filters:  []string{peekFilter, extProcFilter("")},
		routes:   []string{`{match: {prefix: /}, request_body_buffer_limit: 8388608, route: {cluster: a, timeout: 0s}}`},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster()},
	})
	document := func(size int) []byte {
		head := []byte(`{"model":"large","pad":"`)
		return append(append(head, zeros(size-len(head)-2)...), '"', '}')
	}
	type opaque struct{ io.Reader } // hides the length: the request is chunked
	for _, c := range []struct {
		name   string
		body   io.Reader
		size   int64
		peeked bool
	}{
		{"small", bytes.NewReader(document(200)), 200, true},
		{"six digits", bytes.NewReader(document(999_999)), 999_999, true},
		{"seven digits", bytes.NewReader(document(1_000_000)), 1_000_000, false},
		{"chunked", opaque{bytes.NewReader(document(200))}, 200, false},
	} {
		got := e.send(http.MethodPost, "/", c.body, "content-type", "application/json")
		model, ok := peeked(ep.last(), "model")
		if got.status != 200 || ok != c.peeked || (ok && model != "large") {
			t.Errorf("%s: status %d, model %v (%v), want it read: %v", c.name, got.status, model, ok, c.peeked)
		}
		if last := up.Last(); last.BodyLen != c.size {
			t.Errorf("%s: the upstream got %d bytes, want %d", c.name, last.BodyLen, c.size)
		}
	}
}

// The same matcher keeps tunnels open: their "body" never ends, and a filter that
// waits for it would hang them.
func TestFactTunnelsWithJSONContentTypePass(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			envoytest.WebSocketEcho().ServeHTTP(w, r)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprint(rw, "HTTP/1.1 200 OK\r\n\r\n")
		_ = rw.Flush()
		_, _ = io.Copy(conn, rw)
	}))
	ep := newProcessor(t, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	e := startFacts(t, facts{
		hcm:     `upgrade_configs: [{upgrade_type: websocket}, {upgrade_type: CONNECT}],`,
		filters: []string{peekFilter, extProcFilter("")},
		routes: []string{
			`{match: {connect_matcher: {}}, route: {cluster: a, timeout: 0s, upgrade_configs: [{upgrade_type: CONNECT}]}}`,
			clusterRoute(prefix("/"), "a"),
		},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster()},
	})
	for name, head := range map[string]string{
		"websocket": "GET /chat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
			"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
		"CONNECT": "CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\nContent-Type: application/json\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", e.addr.String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(30 * time.Second)) // a hang is the failure
			fmt.Fprint(conn, head)
			r := bufio.NewReader(conn)
			status, err := r.ReadString('\n')
			if err != nil || (!bytes.Contains([]byte(status), []byte(" 101 ")) && !bytes.Contains([]byte(status), []byte(" 200 "))) {
				t.Fatalf("answer %q, %v", status, err)
			}
			for line := status; line != "\r\n"; {
				if line, err = r.ReadString('\n'); err != nil {
					t.Fatal(err)
				}
			}
			for _, word := range []string{"one", "two"} {
				fmt.Fprint(conn, word)
				got := make([]byte, len(word))
				if _, err := io.ReadFull(r, got); err != nil || string(got) != word {
					t.Fatalf("echo of %q: %q, %v", word, got, err)
				}
			}
		})
	}
	if n := len(ep.requests()); n != 2 {
		t.Errorf("ext_proc saw %d of 2 tunnels", n)
	}
}

// What Envoy makes of odd values decides how max_tokens is classified: numbers
// come as doubles, the last duplicate wins, and integers between 2^63 and 2^64-1
// spoil the whole document.
func TestFactOddMaxTokensValuesAsEnvoyReadsThem(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	ep := newProcessor(t, steerTo(list(up)))
	e := startFacts(t, facts{
		filters:  []string{peekFilter, extProcFilter("")},
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster()},
	})
	const absent, broken = "absent", "broken"
	for value, want := range map[string]any{
		`1`: 1.0, `1e3`: 1000.0, `1.5`: 1.5, `-5`: -5.0, `"100"`: "100", `true`: true,
		`1, "max_tokens": 2`: 2.0, `5, "max_tokens": null`: absent,
		`null`: absent, `{}`: absent, `[1]`: absent,
		`99999999999999999999`: 1e20, `9223372036854775807`: 9223372036854775807.0,
		`9223372036854775808`: broken, `18446744073709551615`: broken, `1e999`: broken, `NaN`: broken, `01`: broken,
	} {
		if got := e.postJSON("/", `{"max_tokens": `+value+`}`); got.status != 200 {
			t.Errorf("%s: status %d", value, got.status)
		}
		got, ok := peeked(ep.last(), "max_tokens")
		if !ok {
			got = absent
		}
		if bad, _ := peeked(ep.last(), "error"); bad == true {
			got = broken
		}
		if got != want {
			t.Errorf("max_tokens %s: read as %v, want %v", value, got, want)
		}
	}
	// A content type that is not JSON looks like a broken body.
	e.send(http.MethodPost, "/", bytes.NewReader([]byte(`{"max_tokens": 1}`)), "content-type", "text/plain")
	if bad, _ := peeked(ep.last(), "error"); bad != true {
		t.Error("text/plain: no error reported")
	}
}

// Text of more than 8 KiB is dropped, and a constant in on_present does not tell
// that it was there: it is written for every key, there or not, and never
// on_missing. As a number such text comes as far as C's strtod reads it between
// ASCII white space; with an underscore or another blank in it, it looks like null.
func TestFactLongTextComesAsANumberAlone(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	ep := newProcessor(t, steerTo(list(up)))
	rule := func(present, missing string) string {
		return fmt.Sprintf(`{selectors: [{key: k}], on_present: {metadata_namespace: fairlead.peek, %s}, on_missing: {metadata_namespace: fairlead.peek, key: %s, value: true},
  on_error: {metadata_namespace: fairlead.peek, key: error, value: true}}`, present, missing)
	}
	e := startFacts(t, facts{
		filters: []string{`{name: envoy.filters.http.json_to_metadata, typed_config: {"@type": ` + typePrefix + `extensions.filters.http.json_to_metadata.v3.JsonToMetadata,
  request_rules: {rules: [` + strings.Join([]string{
			rule("key: constant, value: there", "no_constant"),
			rule("key: plain", "no_plain"),
			rule("key: text, type: STRING", "no_text"),
			rule("key: number, type: NUMBER", "no_number"),
			// The later rule of one key counts, if it writes anything.
			rule("key: both, type: NUMBER", "no_both"),
			rule("key: both", "no_both"),
		}, ", ") + `]}}}`, extProcFilter("")},
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...), ep.cluster()},
	})
	blanks := strings.Repeat(" ", 8192)
	long := func(number any) map[string]any {
		return map[string]any{"no_plain": true, "no_text": true, "number": number, "both": number, "no_both": true}
	}
	none := map[string]any{"no_plain": true, "no_text": true, "no_number": true, "no_both": true}
	short := func(plain any, text string, number any) map[string]any {
		m := map[string]any{"plain": plain, "text": text, "number": number, "both": plain}
		if number == nil {
			delete(m, "number")
			m["no_number"], m["no_both"] = true, true
		}
		if text == "" {
			delete(m, "text") // and nothing says so
		}
		return m
	}
	for _, c := range []struct {
		name, body string
		want       map[string]any
	}{
		{"number", `{"k":5}`, short(5.0, "5", 5.0)},
		{"true", `{"k":true}`, short(true, "1", 1.0)},
		{"text", `{"k":"5"}`, short("5", "5", 5.0)},
		{"text that is no number", `{"k":"9_0"}`, short("9_0", "9_0", nil)},
		{"empty text", `{"k":""}`, short("", "", nil)},
		{"8,192 bytes", `{"k":"` + blanks[1:] + `9"}`, short(blanks[1:]+"9", blanks[1:]+"9", 9.0)},
		{"8,193 bytes", `{"k":"` + blanks + `9"}`, long(9.0)},
		{"900,000 bytes", `{"k":"` + strings.Repeat(" ", 900_000) + `9000"}`, long(9000.0)},
		{"escaped newlines before it", `{"k":"` + strings.Repeat(`\n`, 8192) + `9"}`, long(9.0)},
		{"blanks behind it", `{"k":"9` + blanks + `"}`, long(9.0)},
		{"zeros before it", `{"k":"` + strings.Repeat("0", 8192) + `9"}`, long(9.0)},
		{"zeros behind its point", `{"k":"9.` + strings.Repeat("0", 8192) + `"}`, long(9.0)},
		{"digits", `{"k":"` + strings.Repeat("9", 8193) + `"}`, long("Infinity")},
		{"no number", `{"k":"` + blanks + `nan"}`, long("NaN")},
		{"an underscore", `{"k":"` + blanks + `9_0"}`, none},
		{"no-break spaces", `{"k":"` + strings.Repeat(`\u00a0`, 4096) + `9"}`, none},
		{"long text that is no number", `{"k":"` + blanks + `x"}`, none},
		{"null", `{"k":null}`, none},
		{"object", `{"k":{"a":1}}`, none},
		{"array", `{"k":[1]}`, none},
		{"absent", `{"x":1}`, none},
	} {
		if got := e.postJSON("/", c.body); got.status != 200 {
			t.Errorf("%s: status %d", c.name, got.status)
		}
		c.want["constant"] = "there"
		got := ep.last().GetMetadataContext().GetFilterMetadata()["fairlead.peek"].AsMap()
		if !maps.Equal(got, c.want) {
			t.Errorf("%s: %.300v; want %.300v", c.name, got, c.want)
		}
	}
}

// One port serves HTTP/1.1 and HTTP/2 in clear, as clients of both kinds need.
func TestFactOnePortServesHTTP1AndH2C(t *testing.T) {
	t.Parallel()
	up := envoytest.NewUpstream(t, nil)
	e := startFacts(t, facts{
		hcm:      `http2_protocol_options: {initial_stream_window_size: 65536},`,
		routes:   []string{clusterRoute(prefix("/"), "a")},
		clusters: []string{pool("a", "", hostsOf(up)...)},
	})
	for _, h2 := range []bool{false, true} {
		protocols := new(http.Protocols)
		protocols.SetHTTP1(!h2)
		protocols.SetUnencryptedHTTP2(h2)
		tr := &http.Transport{Protocols: protocols}
		e.client = &http.Client{Transport: tr, Timeout: time.Minute}
		response, err := e.open(t.Context(), http.MethodGet, "/", nil)
		if err != nil {
			t.Fatalf("h2 %v: %v", h2, err)
		}
		response.Body.Close()
		tr.CloseIdleConnections()
		if response.StatusCode != 200 || (response.ProtoMajor == 2) != h2 {
			t.Errorf("h2 %v: status %d over %s", h2, response.StatusCode, response.Proto)
		}
	}
}
