package envoytest

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/http2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func bootstrap(admin string, up *Upstream) []byte {
	return fmt.Appendf(nil, `
admin: %s
static_resources:
  listeners:
  - name: in
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          upgrade_configs: [{upgrade_type: websocket}]
          http_filters: [{name: router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: up}}]}]}
  clusters:
  - name: up
    load_assignment: {cluster_name: up, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}}]}]}
`, admin, up.Addr().Port())
}

func TestEnvoyServesAndTellsItsStats(t *testing.T) {
	dir := ShortTempDir(t)
	for name, admin := range map[string]string{
		"tcp, any port":    `{address: {socket_address: {address: 127.0.0.1, port_value: 0}}}`,
		"tcp, fixed port":  fmt.Sprintf(`{address: {socket_address: {address: 127.0.0.1, port_value: %d}}}`, FreePort(t)),
		"tcp, JSON's name": fmt.Sprintf(`{"address": {"socketAddress": {"address": "127.0.0.1", "portValue": %d}}}`, FreePort(t)),
		"unix socket":      fmt.Sprintf(`{address: {pipe: {path: %s/a.sock}}}`, dir),
	} {
		t.Run(name, func(t *testing.T) {
			up := NewUpstream(t, Echo())
			e := Start(t, bootstrap(admin, up))
			answer, err := http.Get(fmt.Sprintf("http://%v/hello", e.Listener("in")))
			if err != nil {
				t.Fatal(err)
			}
			defer http.DefaultClient.CloseIdleConnections()
			defer answer.Body.Close()
			if answer.StatusCode != http.StatusOK || up.Last().Path != "/hello" {
				t.Errorf("status %d, upstream saw %q", answer.StatusCode, up.Last().Path)
			}
			e.WaitStat("cluster.up.upstream_rq_200", func(n int64) bool { return n == 1 })
			if n, ok := e.Stat("cluster.none.upstream_rq_200"); ok {
				t.Errorf("stat of a cluster that doesn't exist: %d", n)
			}
		})
	}
}

func TestKilledEnvoyIsGone(t *testing.T) {
	up := NewUpstream(t, nil)
	e := Start(t, bootstrap(`{address: {socket_address: {address: 127.0.0.1, port_value: 0}}}`, up))
	at := e.Listener("in")
	e.Kill()
	if c, err := net.Dial("tcp", at.String()); err == nil {
		c.Close()
		t.Error("its port still answers")
	}
	e.Stop() // harmless
}

func TestRefusedBootstrapIsReported(t *testing.T) {
	err := StartError(t, []byte(`
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources: {clusters: [{name: a, type: NO_SUCH}]}`))
	if !strings.Contains(err.Error(), "NO_SUCH") {
		t.Errorf("error does not name the fault: %v", err)
	}
}

func TestBootstrapWithoutAdminIsRefused(t *testing.T) {
	for _, text := range []string{"", "node: {id: a}", "admin: {}", "\t:"} {
		if a, err := adminAddress([]byte(text)); err == nil {
			t.Errorf("bootstrap %q: admin address %q, want an error", text, a)
		}
	}
}

func TestFreePortsDiffer(t *testing.T) {
	seen := make(map[int]bool)
	for range 50 {
		p := FreePort(t)
		if seen[p] {
			t.Fatalf("port %d given twice", p)
		}
		seen[p] = true
	}
}

func h1Client(t *testing.T) *http.Client { return client(t, false) }
func h2Client(t *testing.T) *http.Client { return client(t, true) }

func client(t *testing.T, h2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	tr := &http.Transport{Protocols: p}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute}
}

func TestUpstreamRecordsRequestsOfBothProtocols(t *testing.T) {
	up := NewUpstream(t, Echo())
	body := bytes.Repeat([]byte("0123456789"), 10_000)
	for _, c := range []*http.Client{h1Client(t), h2Client(t)} {
		r, _ := http.NewRequest("POST", "http://"+up.Addr().String()+"/p?q=1", bytes.NewReader(body))
		r.Header.Set("X-Mark", "here")
		answer, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		if !strings.Contains(string(text), `"x-mark":["here"]`) {
			t.Errorf("echo: %s", text)
		}
	}
	got := up.WaitRequests(2)
	if got[0].Proto != "HTTP/1.1" || got[1].Proto != "HTTP/2.0" {
		t.Errorf("protocols %s and %s", got[0].Proto, got[1].Proto)
	}
	for _, r := range got {
		_, n, sum := readBody(bytes.NewReader(body))
		if r.BodyLen != n || r.BodySHA256 != sum || len(r.Body) != keptBody || r.ContentLength != n || r.Path != "/p?q=1" {
			t.Errorf("recorded: %d bytes, content-length %d, path %s", r.BodyLen, r.ContentLength, r.Path)
		}
	}
	up.Forget()
	if up.Count() != 0 {
		t.Error("requests left after Forget")
	}
}

func TestUpstreamScripts(t *testing.T) {
	up := NewUpstream(t, nil)
	url := "http://" + up.Addr().String()
	for name, c := range map[string]*http.Client{"h1": h1Client(t), "h2": h2Client(t)} {
		t.Run(name, func(t *testing.T) {
			up.Handle(Status(429, "slow down", "retry-after", "7"))
			answer, err := c.Get(url)
			if err != nil || answer.StatusCode != 429 || answer.Header.Get("retry-after") != "7" {
				t.Fatalf("status: %v %v", answer, err)
			}
			answer.Body.Close()

			up.Handle(ResetBeforeAnswer())
			if answer, err := c.Post(url, "text/plain", strings.NewReader("x")); err == nil {
				answer.Body.Close()
				t.Errorf("reset: answer %d, want an error", answer.StatusCode)
			}

			events := make(chan string)
			up.Handle(SSE(events))
			answer, err = c.Get(url)
			if err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(answer.Body)
			for _, e := range []string{"data: a", "data: b"} {
				events <- e + "\n"
				if !lines.Scan() || lines.Text() != e {
					t.Errorf("event %q: got %q", e, lines.Text())
				}
			}
			close(events)
			if lines.Scan() {
				t.Errorf("after the end: %q", lines.Text())
			}
			answer.Body.Close()

			release := make(chan struct{})
			up.Handle(Gate(release, JSON("{}")))
			done := make(chan int)
			n := up.Count()
			go func() {
				answer, err := c.Get(url)
				if err != nil {
					done <- 0
					return
				}
				answer.Body.Close()
				done <- answer.StatusCode
			}()
			up.WaitRequests(n + 1)
			close(release)
			if code := <-done; code != 200 {
				t.Errorf("gate: status %d", code)
			}

			up.Handle(Hang())
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			r, _ := http.NewRequestWithContext(ctx, "GET", url, nil)
			if answer, err := c.Do(r); err == nil {
				answer.Body.Close()
				t.Error("hang: answered")
			}
		})
	}
}

func TestUpstreamCloseEndsHangingRequests(t *testing.T) {
	up := NewUpstream(t, Hang())
	done := make(chan error)
	c := h1Client(t)
	go func() {
		answer, err := c.Get("http://" + up.Addr().String())
		if err == nil {
			answer.Body.Close()
		}
		done <- err
	}()
	up.WaitRequests(1)
	up.Close()
	<-done
}

func TestWebSocketEchoReturnsBytes(t *testing.T) {
	up := NewUpstream(t, WebSocketEcho())
	conn, err := net.Dial("tcp", up.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET /chat HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
	r := bufio.NewReader(conn)
	answer, err := http.ReadResponse(r, nil)
	if err != nil || answer.StatusCode != 101 {
		t.Fatalf("%v %v", answer, err)
	}
	// The example of RFC 6455 §1.3.
	if got := answer.Header.Get("Sec-WebSocket-Accept"); got != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		t.Errorf("accept key %q", got)
	}
	fmt.Fprint(conn, "ping")
	got := make([]byte, 4)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "ping" {
		t.Errorf("echo %q, %v", got, err)
	}
}

func TestSettingsRecorderSeesWindows(t *testing.T) {
	rec := NewSettingsRecorder(t)
	const stream, connection = 128 << 10, 256 << 10
	c := h2Client(t)
	c.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: stream, MaxReceiveBufferPerConnection: connection}
	answer, err := c.Get("http://" + rec.Addr().String())
	if err != nil || answer.StatusCode != 200 {
		t.Fatalf("%v %v", answer, err)
	}
	answer.Body.Close()
	seen := rec.Seen()
	if len(seen) != 1 || seen[0].Values[http2.SettingInitialWindowSize] != stream || seen[0].ConnectionWindow < connection {
		t.Errorf("recorded %+v, want a stream window of %d and a connection window of at least %d", seen, stream, connection)
	}
}

func TestShortTempDirLeavesRoomForASocketName(t *testing.T) {
	if dir := ShortTempDir(t); len(dir) > 80 {
		t.Errorf("%d bytes: %s", len(dir), dir)
	}
}
