// Package demo runs everything on one machine: simulated model servers, serve,
// several real Envoys as sidecars of one group, and an open-loop load. It owns
// the bringing-up and taking-down of that set, and what is shown of it; the
// parts are the product's own.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/examples"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoyproc"
	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/internal/serve"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// DefaultRPS is the demo's load in requests per second: eight to nine tenths of
// what the quickstart's fleet can take (a test keeps it so).
const DefaultRPS = 40

// MaxSidecars bounds the Envoys of one demo; each takes about 70 MB.
const MaxSidecars = 64

// Options of one demo.
type Options struct {
	Envoy    string // path of the Envoy binary
	Sidecars int
	RPS      float64
	// Duration bounds the load; 0 runs until ctx ends.
	Duration time.Duration
	// Warmup is the first part of Duration that the summary leaves out.
	Warmup   time.Duration
	Strategy fleet.Strategy
	Scorer   string
	// Model is a trained model's file for the scorer xgb; "" is the one that
	// comes with the program.
	Model string
	Seed  uint64
	// Faults are injected relative to the start of the load.
	Faults []Fault
	// OnResult, if set, also sees every result; it is called from many
	// goroutines at once and must not block for long.
	OnResult func(load.Result)
	Log      *slog.Logger
}

// Fault is a fault of one simulated server.
type Fault struct {
	Server string
	sim.Fault
}

// Check refuses what cannot be run, with what is accepted.
func (o Options) Check() error {
	switch {
	case o.Sidecars < 1 || o.Sidecars > MaxSidecars:
		return fmt.Errorf("found %d sidecars; accepted: 1…%d", o.Sidecars, MaxSidecars)
	case !(o.RPS > 0 && o.RPS <= 2000):
		return fmt.Errorf("found %g requests/s; accepted: above 0, at most 2000", o.RPS)
	case o.Duration < 0:
		return fmt.Errorf("found duration %s; accepted: 0 (until interrupted) or more", o.Duration)
	case o.Warmup < 0 || (o.Duration > 0 && o.Warmup >= o.Duration):
		return fmt.Errorf("found warm-up %s; accepted: 0 or more, below the duration", o.Warmup)
	}
	return o.checkFaults()
}

// checkFaults refuses faults of servers that the demo does not run, before
// anything is started.
func (o Options) checkFaults() error {
	cfg, err := simConfig(o.Seed)
	if err != nil {
		return err
	}
	var names []string
	for _, s := range cfg.Servers {
		names = append(names, s.Name)
	}
	for _, f := range o.Faults {
		if !slices.Contains(names, f.Server) {
			return fmt.Errorf("found a fault of server %q; accepted: %s", f.Server, strings.Join(names, ", "))
		}
	}
	return nil
}

// simConfig is the quickstart's fleet on free ports.
func simConfig(seed uint64) (*sim.Config, error) {
	file, err := examples.Quickstart.ReadFile("quickstart/fleet.yaml")
	if err != nil {
		return nil, err
	}
	cfg, err := sim.Parse("fleet.yaml", file)
	if err != nil {
		return nil, err
	}
	cfg.Seed = seed
	for i := range cfg.Servers {
		cfg.Servers[i].Listen = netip.MustParseAddrPort("127.0.0.1:0")
	}
	return cfg, nil
}

// stack is everything that runs.
type stack struct {
	dir     string
	sim     *sim.Fleet
	serve   *serve.Server
	config  *fleet.Config
	envoys  []*envoyproc.Process
	targets []string
	// deadEnvoy gets the error of the first sidecar that ends too early.
	deadEnvoy chan error
	// failed ends when a part of the stack has failed.
	failed context.Context
	stop   context.CancelFunc
	group  *errgroup.Group
}

// start brings everything up and returns once every sidecar answers.
func start(ctx context.Context, o Options, note func(string)) (_ *stack, err error) {
	s := &stack{deadEnvoy: make(chan error, MaxSidecars)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.down())
		}
	}()
	if s.dir, err = os.MkdirTemp("", "fl"); err != nil {
		return nil, err
	}
	base, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = stop
	s.group, s.failed = errgroup.WithContext(base)

	if err = s.startSim(o); err != nil {
		return s, err
	}
	if err = s.startServe(o); err != nil {
		return s, err
	}
	note(fmt.Sprintf("%d model servers and serve are up; admin API and metrics at http://%s", len(s.sim.Servers()), s.serve.AdminAddr()))
	if err = s.startEnvoys(ctx, o); err != nil {
		return s, err
	}
	note(fmt.Sprintf("%d sidecars are up: %s … %s", o.Sidecars, s.targets[0], s.targets[len(s.targets)-1]))
	return s, nil
}

func (s *stack) startSim(o Options) error {
	cfg, err := simConfig(o.Seed)
	if err != nil {
		return err
	}
	if s.sim, err = sim.New(cfg, o.Log); err != nil {
		return err
	}
	if err := s.sim.Listen(); err != nil {
		return err
	}
	s.group.Go(func() error { return s.sim.Run(s.failed) })
	return nil
}

func (s *stack) startServe(o Options) error {
	cfg, err := buildConfig(o.Strategy, s.dir, s.sim.Servers())
	if err != nil {
		return err
	}
	s.config = cfg
	if s.serve, err = serve.New(serve.Options{Config: cfg, Scorer: o.Scorer, ModelPath: o.Model, Log: o.Log}); err != nil {
		return err
	}
	if err := s.serve.Listen(); err != nil {
		return err
	}
	s.group.Go(func() error { return s.serve.Run(s.failed) })
	return nil
}

// buildConfig is the quickstart's config with this run's addresses.
func buildConfig(strategy fleet.Strategy, dir string, servers []*sim.Server) (*fleet.Config, error) {
	file, err := examples.Quickstart.ReadFile("quickstart/fairlead.yaml")
	if err != nil {
		return nil, err
	}
	cfg, err := fleet.Parse("fairlead.yaml", file)
	if err != nil {
		return nil, err
	}
	socket := func(name string) fleet.Address { return fleet.Address{Path: filepath.Join(dir, name)} }
	cfg.Serve.XDS, cfg.Serve.ExtProc, cfg.Serve.AccessLog = socket("xds"), socket("ep"), socket("als")
	cfg.Serve.Admin = fleet.Address{Host: "127.0.0.1:0"}
	cfg.Serve.StateDir = dir
	bound := map[string]netip.AddrPort{}
	for _, server := range servers {
		bound[server.Name()] = server.Addr()
	}
	for p := range cfg.Pools {
		for e := range cfg.Pools[p].Endpoints {
			endpoint := &cfg.Pools[p].Endpoints[e]
			if endpoint.Address = bound[endpoint.Name]; !endpoint.Address.IsValid() {
				return nil, fmt.Errorf("no simulated server is called %q", endpoint.Name)
			}
		}
	}
	for r := range cfg.Routes {
		cfg.Routes[r].Strategy = strategy
	}
	return cfg, nil
}

func (s *stack) startEnvoys(ctx context.Context, o Options) error {
	addresses, err := freeAddresses(o.Sidecars)
	if err != nil {
		return err
	}
	for i, listen := range addresses {
		options := bootstrap.Options{
			NodeID:    fmt.Sprintf("sidecar-%d", i+1),
			Group:     s.config.Groups[0].Name,
			Listen:    listen,
			XDS:       []fleet.Address{s.config.Serve.XDS},
			Admin:     fleet.Address{Path: filepath.Join(s.dir, fmt.Sprintf("a%d", i+1))},
			DrainTime: s.config.Groups[0].Listener.DrainTime,
		}
		file, err := bootstrap.Render(options, "yaml")
		if err != nil {
			return err
		}
		process, err := envoyproc.Start(ctx, envoyproc.Options{
			Binary: o.Envoy, Bootstrap: file, Dir: s.dir, Concurrency: 1,
			DrainTime: options.DrainTime, LogLevel: "warning", Log: logWriter{o.Log, options.NodeID},
		})
		if err != nil {
			return fmt.Errorf("start sidecar %d: %w", i+1, err)
		}
		s.envoys = append(s.envoys, process)
		go func() {
			<-process.Done()
			s.deadEnvoy <- fmt.Errorf("%s ended early: %w", options.NodeID, errors.Join(process.Wait(), errEnded))
		}()
		s.targets = append(s.targets, "http://"+listen.String())
	}
	return s.waitReady(ctx, addresses)
}

// waitReady waits until every sidecar listens.
func (s *stack) waitReady(ctx context.Context, addresses []netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for i, address := range addresses {
		for {
			connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", address.String())
			if err == nil {
				_ = connection.Close()
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("sidecar %d does not listen on %s: %w; its last words:\n%s", i+1, address, ctx.Err(), lastLog(s.envoys[i]))
			case <-s.failed.Done():
				return errors.New("a part of the demo ended while the sidecars were starting")
			case <-s.envoys[i].Done():
				return fmt.Errorf("sidecar %d ended: %w", i+1, s.envoys[i].Wait())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// errEnded stands beside the exit status of a sidecar, which may be none.
var errEnded = errors.New("its process is gone")

func lastLog(p *envoyproc.Process) string {
	out := ""
	for _, line := range p.LastLog() {
		out += line + "\n"
	}
	return out
}

// freeAddresses returns loopback addresses that nobody listened on a moment
// ago. All are held at once, so they differ.
func freeAddresses(n int) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		out = append(out, netip.MustParseAddrPort(l.Addr().String()))
	}
	return out, nil
}

// down ends everything in order: sidecars first, then serve and the model
// servers.
func (s *stack) down() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var ending errgroup.Group
	for _, e := range s.envoys {
		ending.Go(func() error { return e.Stop(ctx) })
	}
	err := ending.Wait()
	if s.stop != nil {
		s.stop()
		if failed := s.group.Wait(); failed != nil && !errors.Is(failed, context.Canceled) {
			err = errors.Join(err, failed)
		}
	}
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}

// logWriter turns an Envoy's output into log records.
type logWriter struct {
	log  *slog.Logger
	node string
}

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Warn("envoy", "node", w.node, "line", string(p))
	return len(p), nil
}

var _ io.Writer = logWriter{}

// arrivalsOf is the demo's load: open loop, realistic lengths, half of it
// streaming. Without a duration it has no end.
func arrivalsOf(o Options) iter.Seq[load.Arrival] {
	all := load.Sequence(o.Seed, o.RPS, load.Constant, load.AzureConversation(), 0.5)
	if o.Duration == 0 {
		return all
	}
	return func(yield func(load.Arrival) bool) {
		for a := range all {
			if a.At >= o.Duration || !yield(a) {
				return
			}
		}
	}
}
