package sdks

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/internal/serve"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		exit(code)
	}))
}

// place is a running `fairlead serve`, a sidecar, an upstream, and a recorder
// between the client and the sidecar.
type place struct {
	upstream *envoytest.Upstream
	listen   netip.AddrPort
	*recorder
}

// newPlace runs the whole with one route for each API. route are further fields
// of both routes, pool of the pool, limits the limits section; each may be empty.
func newPlace(t *testing.T, route, pool, limits string) *place {
	t.Helper()
	p := &place{upstream: envoytest.NewUpstream(t, nil), listen: envoytest.FreeAddr(t)}
	dir := envoytest.ShortTempDir(t)
	cfg, err := fleet.Parse("sdks.yaml", fmt.Appendf(nil, `apiVersion: fairlead/v1alpha1
kind: Fairlead
serve:
  xds: unix:%[1]s/xds
  extproc: unix:%[1]s/ep
  accessLog: unix:%[1]s/als
  admin: %[2]s
  stateDir: %[1]s/state
groups:
  - { name: edge, listener: { address: %[3]s }, routes: [messages, chat] }
pools:
  - { name: servers, telemetry: { source: none }, endpoints: [{ address: %[4]s }] %[5]s }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, strategy: dynamic, pool: servers %[6]s }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, pool: servers %[6]s }
%[7]s
`, dir, envoytest.FreeAddr(t), p.listen, p.upstream.Addr(), more(pool), more(route), limits))
	if err != nil {
		t.Fatal(err)
	}
	runServe(t, cfg)
	text, err := bootstrap.Render(bootstrap.Options{
		NodeID: "sidecar", Group: "edge", Listen: p.listen, XDS: []fleet.Address{cfg.Serve.XDS},
		Admin: fleet.Address{Path: filepath.Join(dir, "adm")},
	}, "yaml")
	if err != nil {
		t.Fatal(err)
	}
	envoytest.Start(t, text)
	p.recorder = newRecorder(t, p.listen)
	envoytest.Eventually(t, "Fairlead to decide", func() bool {
		// A path that doesn't generate takes no place and counts for no limit.
		r, err := http.Get("http://" + p.listen.String() + "/v1/models")
		if err != nil {
			return false
		}
		_ = r.Body.Close()
		return r.Header.Get(wire.HeaderRouteStrategy) == "dynamic"
	})
	// Those asking counted as in flight until Envoy told of their ends.
	served, answered := admin.NewClient(cfg.Serve.Admin.Target()), time.Now()
	envoytest.Eventually(t, "nothing in flight", func() bool {
		f, err := served.Fleet(context.Background())
		return err == nil && f.At.After(answered) && len(f.Pools) == 1 && f.Pools[0].Endpoints[0].InFlight == 0
	})
	p.upstream.Forget()
	return p
}

func more(fields string) string {
	if fields == "" {
		return ""
	}
	return ", " + fields
}

func runServe(t *testing.T, cfg *fleet.Config) {
	t.Helper()
	s, err := serve.New(serve.Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

// attempt is one request as it passed the recorder, and its answer.
type attempt struct {
	came     time.Time // the request, with its headers
	answered time.Time // its answer, before the first byte of it went on
	status   int
	request  http.Header
	header   http.Header
}

// advised is the wait that the answer asks for; 0 if none.
func (a attempt) advised() time.Duration {
	ms, err := strconv.Atoi(a.header.Get(wire.HeaderRetryAfterMs))
	if err != nil {
		return 0
	}
	return time.Duration(ms) * time.Millisecond
}

// recorder is a reverse proxy that changes nothing and remembers when what
// passed. Clients talk to it with their own transport.
type recorder struct {
	url string
	mu  sync.Mutex
	all []attempt
	// running are those that are not in all yet; a client may have its answer before.
	running int
}

func newRecorder(t *testing.T, to netip.AddrPort) *recorder {
	r := &recorder{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: to.String()})
	proxy.FlushInterval = -1
	transport := &http.Transport{DisableCompression: true}
	proxy.Transport = transport
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		r.mu.Lock()
		r.running++
		r.mu.Unlock()
		defer func() { // also where the proxy gives up by a panic
			r.mu.Lock()
			defer r.mu.Unlock()
			r.running--
		}()
		a := attempt{came: time.Now(), request: request.Header.Clone()}
		seen := &statusWriter{ResponseWriter: w}
		proxy.ServeHTTP(seen, request)
		a.answered, a.status, a.header = seen.at, seen.status, w.Header().Clone()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.all = append(r.all, a)
	}))
	t.Cleanup(func() {
		server.Close()
		transport.CloseIdleConnections()
	})
	r.url = server.URL
	return r
}

type statusWriter struct {
	http.ResponseWriter
	status int
	at     time.Time
}

func (w *statusWriter) WriteHeader(status int) {
	w.status, w.at = status, time.Now()
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets the proxy flush.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// forget begins anew, when all that came before are known to have been answered.
func (r *recorder) forget() {
	for {
		r.mu.Lock()
		if r.running == 0 {
			r.all = nil
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
}

// pair waits until two have been answered and returns the first two.
func (r *recorder) pair(t *testing.T) (first, second attempt) {
	t.Helper()
	all := r.atLeast(t, 2)
	return all[0], all[1]
}

// attempts waits until n have been answered and returns them; there must be no
// more.
func (r *recorder) attempts(t *testing.T, n int) []attempt {
	t.Helper()
	out := r.atLeast(t, n)
	if len(out) != n {
		var seen []string
		for _, a := range out {
			seen = append(seen, strconv.Itoa(a.status))
		}
		t.Fatalf("%d attempts (%s), want %d", len(out), strings.Join(seen, " "), n)
	}
	return out
}

func (r *recorder) atLeast(t *testing.T, n int) []attempt {
	t.Helper()
	var out []attempt
	envoytest.Eventually(t, fmt.Sprintf("%d attempts", n), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		out = append([]attempt(nil), r.all...)
		return len(out) >= n
	})
	return out
}
