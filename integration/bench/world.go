package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoybin"
)

// setup is one Envoy and the server that it asks.
type setup string

// Setups.
const (
	plain        setup = "plain"         // no ext_proc, no access log
	stockBare    setup = "stock"         // the stock server, no access log
	stockLogs    setup = "stock-logs"    // the stock server; logs go to a process that drops them
	tunedBare    setup = "tuned"         // as stockBare, the server with tunedGC
	tunedLogs    setup = "tuned-logs"    // as stockLogs, the server with tunedGC
	fairleadBare setup = "fairlead"      // fairlead serve, no access log
	fairleadLogs setup = "fairlead-logs" // fairlead serve, which also reads the logs
)

// steers reports whether answers must name a decision.
func (s setup) steers() bool { return s == fairleadBare || s == fairleadLogs }

// logs reports whether Envoy logs.
func (s setup) logs() bool { return s == stockLogs || s == tunedLogs || s == fairleadLogs }

// piece is one thing that is measured.
type piece struct {
	name  string
	title string
	setup setup
	path  string
	body  int // bytes
}

// Sizes of bodies.
const (
	smallBody = 300
	largeBody = 60_000
)

var pieces = []piece{
	{"plain", "no ext_proc", plain, pathHeaders, smallBody},
	{"stock", "stock ext_proc, empty answer", stockBare, pathHeaders, smallBody},
	{"tuned", "stock, GC tuned", tunedBare, pathHeaders, smallBody},
	{"fairlead", "Fairlead, headers only", fairleadBare, pathHeaders, smallBody},
	{"stock-logs", "stock, access logs dropped elsewhere", stockLogs, pathHeaders, smallBody},
	{"tuned-logs", "stock, GC tuned, access logs dropped elsewhere", tunedLogs, pathHeaders, smallBody},
	{"fairlead-logs", "Fairlead, headers only, access logs", fairleadLogs, pathHeaders, smallBody},
	{"stock-body", "stock, body fields", stockBare, pathBody, smallBody},
	{"fairlead-body", "Fairlead, body fields", fairleadBare, pathBody, smallBody},
	{"fairlead-body-logs", "Fairlead, body fields, access logs", fairleadLogs, pathBody, smallBody},
	{"plain-60k", "no ext_proc, 60 kB", plain, pathBody, largeBody},
	{"stock-60k", "stock, body fields, 60 kB", stockBare, pathBody, largeBody},
	{"fairlead-60k", "Fairlead, body fields, 60 kB", fairleadBare, pathBody, largeBody},
}

// request is what an official SDK sends for a chat completion, with a body of the
// given length. max_tokens comes last in the body, as most clients have it, and
// also as a header where the route takes it from there.
func (p piece) request(host string) []byte {
	const head, tail = `{"model":"llama-3.1-8b","messages":[{"role":"user","content":"`, `"}],"stream":false,"max_tokens":64}`
	body := head + strings.Repeat("word ", p.body)[:p.body-len(head)-len(tail)] + tail
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nhost: %s\r\n", p.path, host)
	if p.path == pathHeaders {
		b.WriteString("max_tokens: 64\r\n")
	}
	for _, h := range []string{
		"accept: application/json", "accept-encoding: gzip, deflate", "content-type: application/json",
		"user-agent: OpenAI/Python 3.3.1", "authorization: Bearer sk-0123456789abcdef0123456789abcdef0123456789abcdef",
		"x-stainless-lang: python", "x-stainless-package-version: 3.3.1", "x-stainless-os: Linux", "x-stainless-arch: x64",
		"x-stainless-runtime: CPython", "x-stainless-runtime-version: 3.12.3", "x-stainless-async: false",
		"x-stainless-retry-count: 0", "x-stainless-read-timeout: 600",
	} {
		b.WriteString(h + "\r\n")
	}
	fmt.Fprintf(&b, "content-length: %d\r\n\r\n%s", len(body), body)
	return b.Bytes()
}

// world is everything that runs.
type world struct {
	dir       string
	envoy     envoybin.Binary
	upstreams *upstreams
	children  []*child
	sidecars  map[setup]*sidecar
	servers   map[setup]*child // under test, by setup; none for plain
	loads     map[string]*load
}

// setups are all there are.
var setups = []setup{plain, stockBare, stockLogs, tunedBare, tunedLogs, fairleadBare, fairleadLogs}

// newWorld starts what the given setups need.
func newWorld(ctx context.Context, setups []setup) (w *world, err error) {
	w = &world{sidecars: map[setup]*sidecar{}, servers: map[setup]*child{}, loads: map[string]*load{}}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.envoy, err = envoybin.Find(ctx, envoybin.Options{Progress: os.Stderr}); err != nil {
		return w, err
	}
	if w.dir, err = os.MkdirTemp("", "flb"); err != nil {
		return w, err
	}
	if w.upstreams, err = startUpstreams(8); err != nil {
		return w, err
	}
	if _, err := w.child(roleSink, filepath.Join(w.dir, "sink")); err != nil {
		return w, err
	}
	for _, s := range setups {
		if err := w.start(ctx, s); err != nil {
			return w, err
		}
	}
	return w, w.check()
}

func (w *world) child(role, argument string) (*child, error) {
	c, err := startChild(role, argument)
	if err == nil {
		w.children = append(w.children, c)
	}
	return c, err
}

func (w *world) start(ctx context.Context, s setup) error {
	dir := filepath.Join(w.dir, string(s))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	admin, err := freeAddress()
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "fairlead.yaml")
	if err := os.WriteFile(file, []byte(configText(dir, admin, w.upstreams.addresses)), 0o600); err != nil {
		return err
	}
	cfg, err := fleet.Load(file)
	if err != nil {
		return err
	}
	at := envoy.Runtime{ExtProc: cfg.Serve.ExtProc, AccessLog: cfg.Serve.AccessLog}
	var c *child
	switch s {
	case stockBare, stockLogs:
		c, err = w.child(roleStock, cfg.Serve.ExtProc.Path)
	case tunedBare, tunedLogs:
		c, err = w.child(roleStockTuned, cfg.Serve.ExtProc.Path)
	case fairleadBare, fairleadLogs:
		c, err = w.child(roleServe, file)
	}
	if s.logs() && !s.steers() {
		at.AccessLog = fleet.Address{Path: filepath.Join(w.dir, "sink")}
	}
	if err != nil {
		return err
	}
	if c != nil {
		w.servers[s] = c
	}
	strip := without{extProc: s == plain, logs: !s.logs()}
	w.sidecars[s], err = startSidecar(ctx, w.envoy.Path, dir, string(s), cfg, at, strip)
	return err
}

// check makes sure that Fairlead decides where it should.
func (w *world) check() error {
	for s := range w.sidecars {
		want := fleet.StrategyLegacy.String()
		if s.steers() {
			want = fleet.StrategyDynamic.String()
		}
		var got string
		var err error
		for range 200 {
			if got, err = w.sidecars[s].steered(); err == nil && got == want {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if err != nil || got != want {
			return fmt.Errorf("%s: strategy %q, want %q (%w)", s, got, want, err)
		}
	}
	return nil
}

func (w *world) close() {
	for _, l := range w.loads {
		l.close()
	}
	for _, s := range w.sidecars {
		if s != nil {
			s.stop()
		}
	}
	for _, c := range w.children {
		c.stop()
	}
	if w.upstreams != nil {
		w.upstreams.close()
	}
	if w.dir != "" {
		_ = os.RemoveAll(w.dir)
	}
}

func (w *world) load(p piece) *load {
	l := w.loads[p.name]
	if l == nil {
		at := w.sidecars[p.setup].listen.String()
		l = newLoad(at, p.request(at))
		w.loads[p.name] = l
	}
	return l
}

// sample is one run of one piece.
type sample struct {
	server, envoy time.Duration // CPU per request
	net           time.Duration // server's, less what it uses without requests
	p50, p99      time.Duration
	// invalid says why the run doesn't count, or is "".
	invalid string
}

const (
	warmUp = 300 * time.Millisecond
	// settle is longer than Envoy gathers log entries for (25 ms), so that all
	// that a run caused has been done when CPU is read.
	settle = 150 * time.Millisecond
)

// measure runs a piece at a rate, and once more if the first run doesn't count.
func (w *world) measure(p piece, rate float64, d time.Duration) (s sample, err error) {
	for range 2 {
		s, err = w.measureOnce(p, rate, d)
		if err != nil || s.invalid == "" {
			return s, err
		}
		progress("%s at %.0f/s does not count: %s", p.name, rate, s.invalid)
	}
	return s, nil
}

func (w *world) measureOnce(p piece, rate float64, d time.Duration) (sample, error) {
	l := w.load(p)
	if _, err := l.run(rate, min(warmUp, d)); err != nil {
		return sample{}, err
	}
	time.Sleep(settle)
	counted, err := w.sidecars[p.setup].tally()
	if err != nil {
		return sample{}, err
	}
	server, envoy, err := w.cpu(p.setup)
	if err != nil {
		return sample{}, err
	}
	r, err := l.run(rate, d)
	if err != nil {
		return sample{}, err
	}
	time.Sleep(settle)
	server2, envoy2, err := w.cpu(p.setup)
	if err != nil {
		return sample{}, err
	}
	counted2, err := w.sidecars[p.setup].tally()
	if err != nil {
		return sample{}, err
	}
	s := r.sample(server2-server, envoy2-envoy)
	s.invalid = p.audit(r, counted2.since(counted), l.reason())
	return s, nil
}

// sample is what a run cost each of its requests, of the CPU that the server and Envoy
// used meanwhile.
func (r result) sample(server, envoy time.Duration) sample {
	n := time.Duration(max(1, r.sent))
	return sample{server: server / n, envoy: envoy / n, p50: r.p50, p99: r.p99}
}

// netOf is the server's CPU per request without what it uses while nothing is asked:
// idle, a share of one core, which at so many requests a second falls to each of them in
// equal parts.
func (s sample) netOf(idle, rate float64) time.Duration {
	return s.server - time.Duration(idle/rate*float64(time.Second))
}

func (w *world) cpu(s setup) (server, envoy time.Duration, err error) {
	if c := w.servers[s]; c != nil {
		u, err := c.usage()
		if err != nil {
			return 0, 0, err
		}
		server = u.cpu
	}
	envoy, err = w.sidecars[s].cpu()
	return server, envoy, err
}

// idle is what each server uses without requests, as a share of one core.
func (w *world) idle(d time.Duration) (map[setup]float64, error) {
	before := map[setup]usage{}
	for s, c := range w.servers {
		u, err := c.usage()
		if err != nil {
			return nil, err
		}
		before[s] = u
	}
	time.Sleep(d)
	out := map[setup]float64{}
	for s, c := range w.servers {
		u, err := c.usage()
		if err != nil {
			return nil, err
		}
		out[s] = u.since(before[s]).cpu.Seconds() / d.Seconds()
	}
	return out, nil
}
