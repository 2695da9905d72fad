package integration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// peekLimit is the largest body that Envoy looks into with six digits of
// content-length.
const peekLimit = 999_999

// hostileBodies are documents that cost a JSON parser the most for their size.
func hostileBodies() map[string]string {
	fill := func(head, item, tail string, size int) string {
		return head + strings.Repeat(item, (size-len(head)-len(tail))/len(item)) + tail
	}
	var keys strings.Builder
	keys.WriteString(`{"model":"m"`)
	for i := 0; keys.Len() < peekLimit-20; i++ {
		fmt.Fprintf(&keys, `,"%d":1`, i)
	}
	keys.WriteString("}")
	eight := strings.Repeat("s", 8192)
	return map[string]string{
		"integers":                  fill(`{"max_tokens":4,"prompt":[1`, ",1", "]}", peekLimit),
		"unclosed arrays":           strings.Repeat("[", peekLimit),
		"unclosed objects":          strings.Repeat(`{"a":`, peekLimit/5),
		"999 levels":                `{"x":` + strings.Repeat("[", 990) + strings.Repeat("]", 990) + `}`,
		"100,000 keys":              keys.String(),
		"8 KiB strings":             fmt.Sprintf(`{"model":%[1]q,"prompt_cache_key":%[1]q,"max_tokens":%[1]q,"max_completion_tokens":%[1]q,"max_output_tokens":%[1]q,"stream":%[1]q,"user":%[1]q,"n":%[1]q}`, eight),
		"escapes":                   fill(`{"prompt":"`, `\u00e9`, `"}`, peekLimit),
		"empty objects":             fill(`{"x":[{}`, ",{}", "]}", peekLimit),
		"one duplicate key":         fill(`{"max_tokens":1`, `,"max_tokens":1`, "}", peekLimit),
		"text":                      fill(`{"prompt":"`, "x", `"}`, peekLimit),
		"integers beyond the limit": fill(`{"prompt":[1`, ",1", "]}", 3<<20),
		"truncated":                 fill(`{"prompt":[1`, ",1", "", peekLimit),
		"zero bytes":                strings.Repeat("\x00", peekLimit),
	}
}

// latencies are times of bystanders' requests.
type latencies struct {
	mu     sync.Mutex
	all    []time.Duration
	failed []string
}

func (l *latencies) add(d time.Duration, failure string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, d)
	if failure != "" {
		l.failed = append(l.failed, failure)
	}
}

func (l *latencies) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.all)
	if len(l.all) == 0 {
		return "none"
	}
	at := func(q float64) time.Duration {
		return l.all[int(q*float64(len(l.all)-1))].Round(100 * time.Microsecond)
	}
	return fmt.Sprintf("%d requests, p50 %v, p99 %v, max %v", len(l.all), at(0.5), at(0.99), at(1))
}

// TestHostileBodiesBesideBystanders sends costly and broken bodies, uploads that
// stall and uploads that break off, all beside small requests of somebody else.
// It reports how long those took and what memory Envoy took, and asserts that
// nobody is failed for it: no 5xx, every bystander served, nothing left in
// flight, no more memory than some multiple of what was sent at a time.
func TestHostileBodiesBesideBystanders(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for ten seconds")
	}
	m := newModelServer(t)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") }))
	p := newPlace(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s, uploadTimeout: 2s }, routes: [chat] }
pools:
  - { name: a, endpoints: [ { address: %q } ], maxInFlight: 4096 }
routes:
  - { name: chat, match: { prefix: / }, dialect: openai, pool: a }
`, envoytest.FreeAddr(t), m.addr()))
	p.serve(t)
	e, listen := p.sidecar(t)
	waitExtProc(e)

	var bystanders, quiet latencies
	with := wide(t)
	url := "http://" + listen + chatPath
	small := func(ctx context.Context, into *latencies) {
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			began := time.Now()
			a, err := ask(context.WithoutCancel(ctx), with, url, `{"model":"m","max_tokens":16,"messages":[]}`, false)
			failure := ""
			if err != nil || a.status != http.StatusOK {
				failure = fmt.Sprintf("status %d, %v: %.200s", a.status, err, a.body)
			}
			into.add(time.Since(began), failure)
		}
	}
	alone, end := context.WithTimeout(t.Context(), time.Second)
	small(alone, &quiet)
	end()

	before := residentBytes(e.PID())
	peak := before
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var parts sync.WaitGroup
	var mu sync.Mutex
	statuses := map[string]map[int]int{}
	note := func(what string, status int) {
		mu.Lock()
		defer mu.Unlock()
		if statuses[what] == nil {
			statuses[what] = map[int]int{}
		}
		statuses[what][status]++
	}
	for range 2 {
		parts.Go(func() { small(ctx, &bystanders) })
	}
	for what, body := range hostileBodies() {
		parts.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				a, err := ask(context.WithoutCancel(ctx), with, url, body, i%5 == 4)
				if err != nil {
					a.status = -1
				}
				note(what, a.status)
				pause(ctx, 100*time.Millisecond) // the machine is the tests' too
			}
		})
	}
	for _, length := range []int{peekLimit, 5 << 20} {
		parts.Go(func() {
			stall(ctx, listen, length, func(status int, err error) {
				switch {
				case err == nil:
					note("stalled", status)
				case errors.Is(err, os.ErrDeadlineExceeded):
					t.Errorf("a stalled upload was held for 30 s")
				default:
					// On a machine that stalls itself the answer can be lost with its
					// connection.
					t.Logf("a stalled upload was closed: %v", err)
				}
			})
		})
		parts.Go(func() { breakOff(ctx, listen, length) })
	}
	parts.Go(func() {
		for ctx.Err() == nil {
			peak = max(peak, residentBytes(e.PID()))
			pause(ctx, 50*time.Millisecond)
		}
	})
	parts.Wait()

	for what, by := range statuses {
		for status, n := range by {
			// The server takes anything; what Envoy itself may say is that an
			// upload took too long.
			if status != http.StatusOK && (what != "stalled" || status != http.StatusRequestTimeout) {
				t.Errorf("%s: %d answers of status %d", what, n, status)
			}
		}
	}
	if statuses["stalled"][http.StatusRequestTimeout] == 0 {
		t.Error("no stalled upload was answered 408")
	}
	if len(quiet.failed)+len(bystanders.failed) > 0 {
		t.Errorf("%d bystanders failed, the first: %s", len(bystanders.failed), append(quiet.failed, bystanders.failed...)[0])
	}
	with.CloseIdleConnections()
	envoytest.Eventually(t, "in flight back at 0", func() bool { return p.inFlight() == 0 })
	after := residentBytes(e.PID())
	const mib = 1 << 20
	t.Logf("bystanders alone: %v", &quiet)
	t.Logf("bystanders beside hostile bodies: %v", &bystanders)
	t.Logf("Envoy's resident memory: %d MiB before, %d MiB at its peak, %d MiB after", before/mib, peak/mib, after/mib)
	t.Logf("answers: %v", statuses)
	// A parsed document takes up to some hundred times its size, one at a time
	// for each worker; and a dozen bodies are under way.
	if grown := (peak - before) / mib; grown > 1024 {
		t.Errorf("Envoy took %d MiB more", grown)
	}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// stall opens uploads that never end, a few at a time, and tells what each was
// answered, or why it was not.
func stall(ctx context.Context, address string, length int, answered func(int, error)) {
	for ctx.Err() == nil {
		var held []net.Conn
		for range 5 {
			if c, err := halfUpload(address, length, 1000); err == nil {
				held = append(held, c)
			}
		}
		for _, c := range held {
			_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
			var status int
			_, err := fmt.Fscanf(c, "HTTP/1.1 %d", &status)
			answered(status, err)
			_ = c.Close()
		}
	}
}

// breakOff opens uploads and goes away in the middle of them.
func breakOff(ctx context.Context, address string, length int) {
	for sent := 1; ctx.Err() == nil; sent = (sent*7 + 11) % length {
		if c, err := halfUpload(address, length, sent); err == nil {
			_ = c.Close()
		}
		pause(ctx, 10*time.Millisecond)
	}
}

// halfUpload sends the head of a request and sent bytes of its body.
func halfUpload(address string, length, sent int) (net.Conn, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	_ = c.SetWriteDeadline(time.Now().Add(10 * time.Second))
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", chatPath, length, strings.Repeat("[", sent))
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// TestNobodyEndsAnothersRequest: requests that Envoy refuses before it takes their
// headers off show in its log what their callers wrote there.
func TestNobodyEndsAnothersRequest(t *testing.T) {
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush() // its caller knows its ids
			<-release
		}
	}))
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: one, concurrency: 1 }
`, m.addr()))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.listen+chatPath, strings.NewReader(`{"max_tokens":4}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("content-type", "application/json")
	running, err := s.with.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer running.Body.Close()
	defer close(release)
	id := running.Header.Get("X-Request-Id")
	if running.StatusCode != http.StatusOK || !accesslog.Decided(id) {
		t.Fatalf("status %d, id %q", running.StatusCode, id)
	}
	for _, line := range []string{"GET /%00 HTTP/1.1\r\nhost: x\r\n", "GET /a#b HTTP/1.1\r\nhost: x\r\n", "GET /a HTTP/1.1\r\n", "GET /a HTTP/1.1\r\nhost: x\r\nhost: y\r\n"} {
		for _, header := range []string{"x-request-id", "x-fairlead-decision"} {
			c, err := net.Dial("tcp", s.listen)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = fmt.Fprintf(c, "%s%s: %s\r\nconnection: close\r\n\r\n", line, header, id)
			_, _ = io.ReadAll(c)
			_ = c.Close()
			pause(t.Context(), 200*time.Millisecond) // the log's batches
			if a := s.post(t, chatPath, `{"max_tokens":4}`); a.status != http.StatusTooManyRequests {
				t.Fatalf("%q with %s: status %d beside the one that runs", line, header, a.status)
			}
		}
	}
}

// TestAnIDOfOnesOwnFreesNoPlace: Envoy keeps the x-request-id of trusted callers, so
// any number of their requests may have the same. One that Envoy refuses before its
// filters, or whose caller leaves before its decision is applied, ends no other.
func TestAnIDOfOnesOwnFreesNoPlace(t *testing.T) {
	const body = `{"max_tokens":4}`
	for name, another := range map[string]func(c net.Conn, id string){
		"refused": func(c net.Conn, id string) {
			_, _ = fmt.Fprintf(c, "GET /%%00 HTTP/1.1\r\nhost: x\r\nx-request-id: %s\r\nconnection: close\r\n\r\n", id)
			_, _ = io.ReadAll(c)
		},
		"left": func(c net.Conn, id string) {
			_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\nx-request-id: %s\r\nauthorization: Bearer another\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", chatPath, id, len(body), body)
			pause(t.Context(), time.Millisecond)
			_ = c.(*net.TCPConn).SetLinger(0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			const clients = 60
			var at [clients]chan struct{} // the server has a client's request
			for i := range at {
				at[i] = make(chan struct{}, 2)
			}
			release := make(chan struct{})
			m := newModelServer(t)
			m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				var client int
				if _, err := fmt.Sscanf(r.Header.Get("authorization"), "Bearer %d", &client); err == nil && r.Header.Get(wire.HeaderDecision) != "" {
					at[client] <- struct{}{}
					<-release
				}
			}))
			s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN, trusted: [ 127.0.0.0/8 ] }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: one, concurrency: 1 }
`, m.addr()))
			s.post(t, chatPath, body) // opens the log
			var open, all sync.WaitGroup
			post := func(client int) (ended chan struct{}) {
				ended = make(chan struct{})
				open.Go(func() {
					defer close(ended)
					_, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, body, false,
						"authorization", fmt.Sprint("Bearer ", client), "x-request-id", fmt.Sprint("trace-", client))
					if err != nil {
						t.Error(err)
					}
				})
				return ended
			}
			for client := range clients {
				all.Go(func() {
					first := post(client)
					for range 6 {
						c, err := net.Dial("tcp", s.listen)
						if err != nil {
							t.Error(err)
							return
						}
						another(c, fmt.Sprint("trace-", client))
						_ = c.Close()
					}
					select {
					case <-at[client]:
					case <-first: // ext_proc was late
						return
					}
					pause(t.Context(), 100*time.Millisecond) // the log's batches
					select {
					case <-at[client]:
						t.Errorf("client %d has two requests in flight", client)
					case <-post(client):
					}
				})
			}
			all.Wait()
			close(release)
			open.Wait()
			if m.peak.Load() < clients/2 {
				t.Errorf("%d in flight at most, of %d clients", m.peak.Load(), clients)
			}
		})
	}
}

// TestFactExternalAddressTellsWhoMadeTheID: ext_proc takes x-envoy-external-address as
// Envoy's word that it made the request's id. Trusted callers keep theirs, unless they
// forward for somebody, and nobody can write that header.
func TestFactExternalAddressTellsWhoMadeTheID(t *testing.T) {
	const own = "an-id-of-its-own"
	for trusted, keeps := range map[string]bool{"127.0.0.0/8": true, "10.0.0.0/8": false} {
		m := newModelServer(t)
		s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN, trusted: [ %s ] }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
`, trusted, m.addr()))
		s.process.kill() // which would replace Envoy's id by the decision's
		for _, forwarded := range []bool{false, true} {
			headers := []string{"x-request-id", own, "x-envoy-external-address", "192.0.2.1"}
			if forwarded {
				headers = append(headers, "x-forwarded-for", "10.1.2.3")
			}
			kept, address := keeps && !forwarded, "127.0.0.1"
			if kept {
				address = ""
			}
			s.postOnce(t, chatPath, `{"max_tokens":4}`, headers...)
			got := m.lastArrived().header
			if id, from := got.Get("x-request-id"), got.Get("x-envoy-external-address"); (id == own) != kept || from != address {
				t.Errorf("trusted %s, forwarded %v: id %q, external address %q; want its own %v, %q", trusted, forwarded, id, from, kept, address)
			}
		}
	}
}
