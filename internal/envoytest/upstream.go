package envoytest

import (
	"crypto/sha1"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// keptBody is how much of a request's body is kept for inspection.
const keptBody = 64 << 10

// Request is what an Upstream saw of one request.
type Request struct {
	Method, Path, Host string
	Proto              string // "HTTP/1.1" or "HTTP/2.0"
	Header             http.Header
	ContentLength      int64  // -1 when chunked or unknown
	Body               []byte // the first 64 KiB
	BodyLen            int64
	BodySHA256         string // hex
	Remote             string // the connection's peer
}

// Upstream is a scripted HTTP server, HTTP/1.1 and HTTP/2 in clear on one port,
// that records its requests. Its zero script answers 200 with a small JSON body.
type Upstream struct {
	tb      testing.TB
	addr    netip.AddrPort
	server  *http.Server
	stop    chan struct{}
	once    sync.Once
	served  sync.WaitGroup
	mu      sync.Mutex
	closed  bool // no handler starts any more
	handler http.Handler
	seen    []Request
}

// NewUpstream starts an upstream on a free loopback port; it ends in Cleanup.
// h may be nil.
func NewUpstream(tb testing.TB, h http.Handler) *Upstream {
	tb.Helper()
	return NewUpstreamAt(tb, netip.MustParseAddrPort("127.0.0.1:0"), h)
}

// NewUpstreamAt starts an upstream on a given address, e.g. one that a
// configuration already names.
func NewUpstreamAt(tb testing.TB, at netip.AddrPort, h http.Handler) *Upstream {
	tb.Helper()
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		tb.Fatalf("upstream: %v", err)
	}
	u := &Upstream{
		tb:   tb,
		addr: netip.MustParseAddrPort(l.Addr().String()),
		stop: make(chan struct{}),
	}
	u.Handle(h)
	u.server = &http.Server{Handler: http.HandlerFunc(u.serve), Protocols: new(http.Protocols)}
	u.server.Protocols.SetHTTP1(true)
	u.server.Protocols.SetUnencryptedHTTP2(true)
	u.served.Go(func() {
		if err := u.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			tb.Errorf("upstream %v: %v", u.addr, err)
		}
	})
	tb.Cleanup(u.Close)
	return u
}

// Addr is where it listens.
func (u *Upstream) Addr() netip.AddrPort { return u.addr }

// Handle sets the script for requests from now on; nil is JSON("{}").
func (u *Upstream) Handle(h http.Handler) {
	if h == nil {
		h = JSON("{}")
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.handler = h
}

// Close ends the server with all connections and handlers.
func (u *Upstream) Close() {
	u.once.Do(func() {
		u.mu.Lock()
		u.closed = true
		u.mu.Unlock()
		close(u.stop)
		_ = u.server.Close()
		u.served.Wait()
	})
}

// Requests returns what was received so far, in order of arrival.
func (u *Upstream) Requests() []Request {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]Request(nil), u.seen...)
}

// Count is the number of requests received so far.
func (u *Upstream) Count() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.seen)
}

// WaitRequests waits until at least n requests have arrived.
func (u *Upstream) WaitRequests(n int) []Request {
	u.tb.Helper()
	Eventually(u.tb, fmt.Sprintf("%d requests at upstream %v", n, u.addr), func() bool { return u.Count() >= n })
	return u.Requests()
}

// Last returns the newest request; it fails the test when there is none.
func (u *Upstream) Last() Request {
	u.tb.Helper()
	all := u.Requests()
	if len(all) == 0 {
		u.tb.Fatalf("upstream %v: no request was received", u.addr)
	}
	return all[len(all)-1]
}

// Forget drops the recorded requests.
func (u *Upstream) Forget() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen = nil
}

func (u *Upstream) serve(w http.ResponseWriter, r *http.Request) {
	u.mu.Lock()
	if u.closed {
		u.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	u.served.Add(1)
	u.mu.Unlock()
	defer u.served.Done()
	seen := Request{
		Method: r.Method, Path: r.URL.RequestURI(), Host: r.Host, Proto: r.Proto,
		Header: r.Header.Clone(), ContentLength: r.ContentLength, Remote: r.RemoteAddr,
	}
	if !streams(r) {
		seen.Body, seen.BodyLen, seen.BodySHA256 = readBody(r.Body)
	}
	u.mu.Lock()
	u.seen = append(u.seen, seen)
	handler := u.handler
	u.mu.Unlock()
	handler.ServeHTTP(w, r.WithContext(withStop(r.Context(), u.stop)))
}

// streams tells requests whose body is a tunnel and never ends by itself.
func streams(r *http.Request) bool {
	return r.Method == http.MethodConnect || r.Header.Get("Upgrade") != ""
}

func readBody(body io.Reader) (head []byte, n int64, sum string) {
	hash := sha256.New()
	first := &limitedBuffer{limit: keptBody}
	n, _ = io.Copy(io.MultiWriter(hash, first), body)
	return first.b, n, hex.EncodeToString(hash.Sum(nil))
}

type limitedBuffer struct {
	b     []byte
	limit int
}

func (l *limitedBuffer) Write(p []byte) (int, error) {
	l.b = append(l.b, p[:min(len(p), l.limit-len(l.b))]...)
	return len(p), nil
}

// JSON answers 200 with a JSON body.
func JSON(body string) http.Handler {
	return Status(http.StatusOK, body, "content-type", "application/json")
}

// Status answers with a status, a body and headers given as name, value pairs.
func Status(code int, body string, headers ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Add(headers[i], headers[i+1])
		}
		w.Header().Set("content-length", strconv.Itoa(len(body)))
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	})
}

// ResetBeforeAnswer reads the request and then breaks the connection (HTTP/1.1:
// TCP reset; HTTP/2: RST_STREAM) without a byte of an answer, as a server that
// dies while it works.
func ResetBeforeAnswer() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 {
			panic(http.ErrAbortHandler)
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = conn.Close()
	})
}

// Hang never answers: it returns when the client goes away or the upstream is
// closed.
func Hang() http.Handler {
	return http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
}

// Gate waits for release to be closed (or to yield a value) and then goes on
// with next: a handler whose delay the test decides.
func Gate(release <-chan struct{}, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
			next.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	})
}

// SSE answers 200 text/event-stream: headers at once, then every value of
// events as it comes, written as it stands and flushed; it ends when the channel
// is closed.
func SSE(events <-chan string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("content-type", "text/event-stream")
		w.WriteHeader(http.StatusOK)
		control := http.NewResponseController(w)
		_ = control.Flush()
		for {
			select {
			case e, ok := <-events:
				if !ok {
					return
				}
				_, _ = io.WriteString(w, e)
				_ = control.Flush()
			case <-r.Context().Done():
				return
			}
		}
	})
}

// Echo answers 200 with a JSON object of the request's headers (lower-case name
// to list of values, with ":method", ":path" and ":authority").
func Echo() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		all := map[string][]string{
			":method":    {r.Method},
			":path":      {r.URL.RequestURI()},
			":authority": {r.Host},
		}
		for name, values := range r.Header {
			all[strings.ToLower(name)] = values
		}
		w.Header().Set("content-type", "application/json")
		_ = json.NewEncoder(w).Encode(all)
	})
}

// WebSocketEcho accepts a WebSocket upgrade (RFC 6455 handshake) or any other
// upgrade and then returns every byte it receives.
func WebSocketEcho() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer conn.Close()
		sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
		fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nupgrade: %s\r\nconnection: Upgrade\r\nsec-websocket-accept: %s\r\n\r\n",
			r.Header.Get("Upgrade"), base64.StdEncoding.EncodeToString(sum[:]))
		if rw.Flush() != nil {
			return
		}
		closeWith(r.Context(), conn, func() { _, _ = io.Copy(conn, rw) })
	})
}
