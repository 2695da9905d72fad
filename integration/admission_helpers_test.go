package integration

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// arrived is a request as a model server got it.
type arrived struct {
	header  http.Header
	path    string
	length  int64 // content-length; −1 when the body came in chunks
	bodyLen int64
	sum     string // hex SHA-256 of the body
	trailer http.Header
}

// modelServer is a model server that reads bodies as strictly as one does: what
// is not JSON is answered 400. It answers as its script says otherwise.
type modelServer struct {
	*httptest.Server
	mu     sync.Mutex
	last   arrived
	script http.Handler // nil: 200 and a short JSON body
	count  atomic.Int64
	inside atomic.Int64 // requests being answered
	peak   atomic.Int64
}

func newModelServer(t testing.TB) *modelServer {
	m := &modelServer{}
	m.Server = httptest.NewServer(http.HandlerFunc(m.serve))
	t.Cleanup(m.Close)
	return m
}

const notJSON = `{"error":{"message":"the body is not JSON"}}`

func (m *modelServer) serve(w http.ResponseWriter, r *http.Request) {
	m.count.Add(1)
	inside := m.inside.Add(1)
	for peak := m.peak.Load(); inside > peak && !m.peak.CompareAndSwap(peak, inside); peak = m.peak.Load() {
	}
	defer m.inside.Add(-1)
	body, _ := io.ReadAll(r.Body)
	m.mu.Lock()
	m.last = arrived{header: r.Header.Clone(), path: r.URL.RequestURI(), length: r.ContentLength, bodyLen: int64(len(body)), sum: digest(body), trailer: r.Trailer.Clone()}
	script := m.script
	m.mu.Unlock()
	if script != nil {
		script.ServeHTTP(w, r)
		return
	}
	w.Header().Set("content-type", "application/json")
	if len(body) > 0 && !json.Valid(bytes.TrimPrefix(body, []byte("\ufeff"))) {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, notJSON)
		return
	}
	_, _ = io.WriteString(w, `{"object":"answer"}`)
}

func (m *modelServer) answerWith(h http.Handler) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.script = h
}

// taking answers what is posted after a while, with a short JSON body.
func taking(d time.Duration) http.Handler {
	answers := envoytest.JSON(`{}`)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			pause(r.Context(), d)
			answers.ServeHTTP(w, r)
		}
	})
}

func (m *modelServer) lastArrived() arrived {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

func (m *modelServer) addr() netip.AddrPort {
	return netip.MustParseAddrPort(m.Listener.Addr().String())
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// wide is a client with many kept connections.
func wide(t testing.TB) *http.Client {
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 256}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute}
}

// ask sends a POST with JSON's content type unless the headers name another;
// with chunked the body has no length.
func ask(ctx context.Context, c *http.Client, url, body string, chunked bool, headers ...string) (answer, error) {
	var reader io.Reader = strings.NewReader(body)
	if chunked {
		reader = io.MultiReader(reader)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, reader)
	if err != nil {
		return answer{}, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	if r.Header.Get("content-type") == "" {
		r.Header.Set("content-type", "application/json")
	}
	response, err := c.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{status: response.StatusCode, header: response.Header, body: string(text)}, err
}

// bytewise sends the request with its body one byte at a time.
func bytewise(address, path, body string) (answer, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return answer{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n", path, len(body))
	for i := range len(body) {
		if _, err := c.Write([]byte{body[i]}); err != nil {
			return answer{}, err
		}
	}
	return answerOn(c)
}

// answerOn reads an answer from a connection.
func answerOn(c net.Conn) (answer, error) {
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{status: response.StatusCode, header: response.Header, body: string(text)}, err
}

// whole is the number in a header, −1 if there is none.
func whole(h http.Header, name string) int64 {
	n, err := strconv.ParseInt(h.Get(name), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// metricsPage reads the Prometheus page of serve.
func (p *place) metricsPage(t testing.TB) string {
	t.Helper()
	response, err := client.Get("http://" + p.config.Serve.Admin.Target() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

// metric sums the samples of a family whose labels contain each of the given
// `name="value"`.
func metric(page, family string, labels ...string) float64 {
	sum := 0.0
lines:
	for line := range strings.Lines(page) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || (name != family && !strings.HasPrefix(name, family+"{")) {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(name, l) {
				continue lines
			}
		}
		n, _ := strconv.ParseFloat(value, 64)
		sum += n
	}
	return sum
}

// residentBytes is a process's resident memory, 0 where the system does not tell.
func residentBytes(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// waitExtProc waits until Envoy's health check has found ext_proc serving; no
// request is sent for it.
func waitExtProc(e *envoytest.Envoy) {
	e.WaitStat("cluster."+wire.ClusterExtProc+".membership_healthy", func(n int64) bool { return n == 1 })
}
