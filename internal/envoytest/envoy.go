package envoytest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/fairlead-proxy/fairlead/internal/envoybin"
	"github.com/fairlead-proxy/fairlead/internal/envoyproc"
)

// SkipVar names the variable that, set to 1 outside CI, skips tests that need a
// real Envoy. Nothing else skips them.
const SkipVar = "FAIRLEAD_SKIP_ENVOY"

const (
	// readyLimit bounds the wait for /ready; a start takes about 0.1 s on an
	// idle machine.
	readyLimit = 60 * time.Second
	pollEvery  = 10 * time.Millisecond
	// findLimit covers a first download on a slow line.
	findLimit = 5 * time.Minute
)

var findBinary = sync.OnceValues(func() (envoybin.Binary, error) {
	ctx, cancel := context.WithTimeout(context.Background(), findLimit)
	defer cancel()
	return envoybin.Find(ctx, envoybin.Options{Progress: os.Stderr})
})

// Binary returns the path of the Envoy that tests use. Where none can be had the
// test fails, with an error that says what to do; it is skipped only when
// FAIRLEAD_SKIP_ENVOY=1 is set and CI is not.
func Binary(tb testing.TB) string {
	tb.Helper()
	if os.Getenv(SkipVar) == "1" && os.Getenv("CI") == "" {
		tb.Skipf("%s=1: needs a real Envoy", SkipVar)
	}
	b, err := findBinary()
	if err != nil {
		tb.Fatalf("a real Envoy is needed: %v", err)
	}
	return b.Path
}

// Option changes how Start runs Envoy.
type Option func(*config)

type config struct {
	proc     envoyproc.Options
	notReady bool
}

// WithDrainTime sets --drain-time-s.
func WithDrainTime(d time.Duration) Option {
	return func(c *config) { c.proc.DrainTime = d }
}

// WithLogLevel sets Envoy's log level; the log is shown when the test fails.
func WithLogLevel(level string) Option {
	return func(c *config) { c.proc.LogLevel = level }
}

// WithConcurrency sets the number of worker threads, 1 by default.
func WithConcurrency(n int) Option {
	return func(c *config) { c.proc.Concurrency = n }
}

// WithEnv adds "KEY=value" pairs to Envoy's environment.
func WithEnv(env ...string) Option {
	return func(c *config) { c.proc.Env = append(c.proc.Env, env...) }
}

// WithoutReadyWait makes Start return while Envoy may still wait for its
// control plane.
func WithoutReadyWait() Option {
	return func(c *config) { c.notReady = true }
}

// Envoy is a running Envoy with its admin endpoint.
type Envoy struct {
	tb     testing.TB
	proc   *envoyproc.Process
	admin  string // "host:port" or "unix:path"
	client *http.Client
	log    *lockedBuffer
}

// Start runs Envoy with a bootstrap in YAML or JSON that must have an admin
// address (TCP, port 0 allowed, or a Unix socket), waits until /ready answers
// LIVE and ends it in Cleanup. The log is printed when the test has failed.
func Start(tb testing.TB, bootstrap []byte, opts ...Option) *Envoy {
	tb.Helper()
	e, err := start(tb, bootstrap, opts)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return e
}

// StartError runs an Envoy that is expected not to start and returns why; it
// fails the test when Envoy runs.
func StartError(tb testing.TB, bootstrap []byte, opts ...Option) error {
	tb.Helper()
	_, err := start(tb, bootstrap, append(opts, WithoutReadyWait()))
	if err == nil {
		tb.Fatalf("envoy accepted a bootstrap that it should refuse")
	}
	return err
}

func start(tb testing.TB, bootstrap []byte, opts []Option) (*Envoy, error) {
	tb.Helper()
	admin, err := adminAddress(bootstrap)
	if err != nil {
		return nil, err
	}
	e := &Envoy{tb: tb, admin: admin, log: &lockedBuffer{}}
	dir := ShortTempDir(tb)
	addressFile := dir + "/admin"
	c := config{proc: envoyproc.Options{
		Binary:           Binary(tb),
		Bootstrap:        bootstrap,
		Dir:              dir,
		Log:              e.log,
		AdminAddressPath: addressFile,
	}}
	for _, o := range opts {
		o(&c)
	}
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	if e.proc, err = envoyproc.Start(ctx, c.proc); err != nil {
		return nil, err
	}
	tb.Cleanup(e.cleanup)
	if strings.HasSuffix(admin, ":0") {
		bound, err := os.ReadFile(addressFile)
		if err != nil {
			return nil, fmt.Errorf("admin address: %w", err)
		}
		e.admin = strings.TrimSpace(string(bound))
	}
	e.client = adminClient(e.admin)
	if c.notReady {
		return e, nil
	}
	return e, e.waitReady(ctx)
}

func (e *Envoy) cleanup() {
	e.Stop()
	if e.client != nil {
		e.client.CloseIdleConnections()
	}
	if e.tb.Failed() {
		e.tb.Logf("log of envoy (pid %d):\n%s", e.proc.PID(), e.log.String())
	}
}

// WaitReady waits until /ready answers LIVE: all clusters and listeners of the
// first configuration are there.
func (e *Envoy) WaitReady() {
	e.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	if err := e.waitReady(ctx); err != nil {
		e.tb.Fatal(err)
	}
}

func (e *Envoy) waitReady(ctx context.Context) error {
	var last string
	for {
		body, err := e.get(ctx, "/ready")
		if err == nil && strings.TrimSpace(body) == "LIVE" {
			return nil
		}
		last = strings.TrimSpace(fmt.Sprint(body, " ", err))
		select {
		case <-e.proc.Done():
			return fmt.Errorf("envoy ended before it was ready: %w", errors.Join(e.proc.Wait(), err))
		case <-ctx.Done():
			return fmt.Errorf("envoy not ready in time, last answer %q", last)
		case <-time.After(pollEvery):
		}
	}
}

// AdminGet returns the body of an admin page, whatever its status; it fails the
// test when the admin endpoint can't be reached.
func (e *Envoy) AdminGet(path string) string {
	e.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	body, err := e.get(ctx, path)
	if err != nil {
		e.tb.Fatalf("admin %s: %v", path, err)
	}
	return body
}

// AdminPost posts to an admin page, e.g. "/runtime_modify?key=value".
func (e *Envoy) AdminPost(path string) string {
	e.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	body, err := e.do(ctx, http.MethodPost, path)
	if err != nil {
		e.tb.Fatalf("admin %s: %v", path, err)
	}
	return body
}

func (e *Envoy) get(ctx context.Context, path string) (string, error) {
	return e.do(ctx, http.MethodGet, path)
}

func (e *Envoy) do(ctx context.Context, method, path string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://envoy-admin"+path, nil)
	if err != nil {
		return "", err
	}
	answer, err := e.client.Do(r)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return string(body), err
}

// Stat returns a counter's or gauge's value; false when Envoy has no such stat
// (many exist only after their first use).
func (e *Envoy) Stat(name string) (int64, bool) {
	e.tb.Helper()
	for line := range strings.Lines(e.AdminGet("/stats")) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok || key != name {
			continue
		}
		n, err := strconv.ParseInt(value, 10, 64)
		return n, err == nil
	}
	return 0, false
}

// WaitStat waits until a stat's value satisfies want and returns it. Envoy
// brings its workers' counters together within a second or so.
func (e *Envoy) WaitStat(name string, want func(int64) bool) int64 {
	e.tb.Helper()
	var n int64
	Eventually(e.tb, fmt.Sprintf("stat %s", name), func() bool {
		n, _ = e.Stat(name)
		return want(n)
	})
	return n
}

// Listener returns the bound address of a listener: useful where the
// configuration asks for port 0. It waits for the listener to appear.
func (e *Envoy) Listener(name string) netip.AddrPort {
	e.tb.Helper()
	var bound netip.AddrPort
	Eventually(e.tb, fmt.Sprintf("listener %q", name), func() bool {
		bound = listenerAddress(e.AdminGet("/listeners?format=json"), name)
		return bound.IsValid() && bound.Port() != 0
	})
	return bound
}

func listenerAddress(page, name string) netip.AddrPort {
	var answer struct {
		ListenerStatuses []struct {
			Name         string `json:"name"`
			LocalAddress struct {
				SocketAddress struct {
					Address   string `json:"address"`
					PortValue uint16 `json:"port_value"`
				} `json:"socket_address"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	if json.Unmarshal([]byte(page), &answer) != nil {
		return netip.AddrPort{}
	}
	for _, l := range answer.ListenerStatuses {
		if l.Name != name {
			continue
		}
		if ip, err := netip.ParseAddr(l.LocalAddress.SocketAddress.Address); err == nil {
			return netip.AddrPortFrom(ip, l.LocalAddress.SocketAddress.PortValue)
		}
	}
	return netip.AddrPort{}
}

// Log returns what Envoy has printed so far.
func (e *Envoy) Log() string { return e.log.String() }

// PID is the process id.
func (e *Envoy) PID() int { return e.proc.PID() }

// Process gives access to signals and processor times.
func (e *Envoy) Process() *envoyproc.Process { return e.proc }

// AdminAddress is "host:port", or "unix:" and the path of a socket.
func (e *Envoy) AdminAddress() string { return e.admin }

// Kill ends Envoy as a crash would and waits for its end.
func (e *Envoy) Kill() {
	e.proc.Kill()
	<-e.proc.Done()
}

// Stop ends Envoy with SIGTERM; running streams are cut. It may be called again.
func (e *Envoy) Stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := e.proc.Stop(ctx); err != nil {
		e.tb.Logf("%v", err)
	}
}

func adminClient(address string) *http.Client {
	network, target := "tcp", address
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, target = "unix", path
	}
	var d net.Dialer
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, network, target)
		},
		DisableCompression: true,
	}}
}

// adminAddress finds the admin address in a bootstrap; protobuf's JSON names
// and original names are both accepted.
func adminAddress(bootstrap []byte) (string, error) {
	var b struct {
		Admin struct {
			Address struct {
				Snake socketAddress `yaml:"socket_address"`
				Camel socketAddress `yaml:"socketAddress"`
				Pipe  struct {
					Path string `yaml:"path"`
				} `yaml:"pipe"`
			} `yaml:"address"`
		} `yaml:"admin"`
	}
	if err := yaml.Unmarshal(bootstrap, &b); err != nil {
		return "", fmt.Errorf("bootstrap: %w", err)
	}
	a := b.Admin.Address
	if a.Pipe.Path != "" {
		return "unix:" + a.Pipe.Path, nil
	}
	for _, s := range []socketAddress{a.Snake, a.Camel} {
		if s.Address != "" {
			return net.JoinHostPort(s.Address, strconv.Itoa(max(s.Snake, s.Camel))), nil
		}
	}
	return "", errors.New("bootstrap: no admin address (admin.address.socket_address or admin.address.pipe)")
}

type socketAddress struct {
	Address string `yaml:"address"`
	Snake   int    `yaml:"port_value"`
	Camel   int    `yaml:"portValue"`
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
