// Package serve wires the parts of `fairlead serve` into one process: it
// listens, starts the long-lived goroutines and ends them in order. It decides
// nothing itself; `cmd/fairlead`, the demo and the integration tests run it.
//
// Goroutines, all started by [Server.Run] and ended before it returns: the tick
// loop (owner of all scoring state), one publisher per group (xds), the
// scraper, four gRPC servers, the ext_proc watchdog, the admin HTTP server and
// the config watcher.
package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/own"
	"github.com/fairlead-proxy/fairlead/internal/rawio"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
	"github.com/fairlead-proxy/fairlead/xds"
)

// Options configure one process of serve.
type Options struct {
	Config *fleet.Config
	// ConfigPath, if set, is watched: a good change is published, a faulty one
	// changes nothing and is reported.
	ConfigPath string
	// Scorer names the risk model: "formula" (also "") or "xgb".
	Scorer string
	// ModelPath, if set, is a trained model's file for "xgb" in place of the one
	// that comes with the program. It is watched: a good change takes effect at
	// the next tick, a faulty one changes nothing and is reported.
	ModelPath string
	// TuneGC lets serve set the process's GC percentage, by how much lives.
	TuneGC bool
	Log    *slog.Logger
}

// Server is one process of serve. Build it with [New], then [Server.Listen],
// then [Server.Run].
type Server struct {
	log        *slog.Logger
	background context.Context // for log calls outside any request
	configPath string
	scorer     string // as the flag names it
	modelPath  string

	plan    atomic.Pointer[plan.Plan]
	view    atomic.Pointer[admin.Fleet]
	config  atomic.Pointer[fleet.Config]
	ledger  *accesslog.Ledger
	limiter limiter
	gate    *admission.Gate
	held    extproc.Held // bounds what ext_proc holds
	hold    *sidecarHold // owned by the tick loop
	// collector is owned by the tick loop.
	collector *collector
	scoring   *scoring
	scraper   *scrape.Scraper
	push      *push.Server
	pushTLS   *push.Credentials // nil without serve.push.tls
	publish   *xds.Server
	splits    *splits
	extproc   *extproc.Service
	metrics   *metrics
	handler   http.Handler
	present   *presence

	// reconfigure serialises config and split changes.
	reconfigure sync.Mutex
	// faulty is true while the config file is one that was not taken.
	faulty atomic.Bool
	// modelRefused is true while the model file is one that was not taken.
	modelRefused atomic.Bool
	// refused counts our 429s, by the reasons that metrics have too; failed the requests that
	// ended without an answer that a caller can use, by route and by what became of the last
	// attempt; shed the attempts whose servers told callers to stay away, by pool: where
	// others of the chain take these, nothing else tells.
	refused, failed, shed tally
	fullLog               fullLog      // owned by the tick loop
	undecided             undecidedLog // likewise

	lock      *os.File // on the state folder
	listeners struct{ xds, extproc, accessLog, admin, push net.Listener }
	servers   struct{ xds, extproc, accessLog, push *grpc.Server }
	xdsHealth *health.Server
	ready     atomic.Bool
}

// New builds a server. It starts nothing, but the first configuration is in
// the xDS caches when it returns, so that no sidecar ever sees an empty world.
func New(o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	model, err := loadModel(o.Scorer, o.ModelPath)
	if err != nil {
		return nil, err
	}
	s := &Server{log: o.Log, background: context.Background(), configPath: o.ConfigPath, scorer: o.Scorer, modelPath: o.ModelPath}
	s.config.Store(o.Config)
	s.view.Store(&admin.Fleet{Scorer: model.Name()})
	s.ledger = accesslog.NewLedger(time.Now)
	s.collector = newCollector(o.TuneGC)
	s.limiter = newLimiter(o.Config, o.Log)
	s.gate = admission.New(admission.Options{Config: o.Config, Limiter: s.limiter})
	s.scoring = newScoring(model, s.ledger, s.gate.Step)
	if s.splits, err = openSplits(o.Config.Serve.StateDir); err != nil {
		return nil, err
	}
	if s.metrics, err = newMetrics(s.Fleet, func() scrape.Counters { return s.scraper.Counters() },
		s.pushed, func() admission.Counters { return s.gate.Counters() }, s.shared, s.ledger.Dropped, s.faulty.Load, s.modelRefused.Load, s.pushTLSRefused); err != nil {
		return nil, err
	}
	s.present = newPresence()
	s.publish = xds.New(xds.Options{Log: o.Log, Observe: s.observeXDS})
	s.hold = newSidecarHold(s.publish)
	if err := s.submit(o.Config); err != nil {
		return nil, err
	}
	s.scraper = scrape.New(scrape.Targets(o.Config.Pools), scrape.Options{})
	if err := s.buildPush(o.Config); err != nil {
		return nil, err
	}
	if err := s.buildServices(o.Config); err != nil {
		return nil, err
	}
	s.step(time.Now())
	return s, nil
}

// buildServices builds the gRPC servers and the admin handler.
func (s *Server) buildServices(cfg *fleet.Config) error {
	ids, err := extproc.NewIDs(cfg.Serve.Shard, time.Now)
	if err != nil {
		return err
	}
	s.extproc = extproc.New(extproc.Options{
		Plan:      s.plan.Load,
		Live:      s.ledger,
		Ledger:    s.ledger,
		Admission: s.gate,
		Held:      &s.held,
		IDs:       ids,
		Trusted:   s.trusted,
		Observe:   s.observeRequest,
		ObserveAnswer: func(a extproc.Answer) {
			s.metrics.answers.add(answerKey{a.Route, a.Source.String()}, 1)
		},
		Log: s.log,
	})
	receiver := accesslog.New(accesslog.Options{
		Sink:    s.outcome,
		Observe: s.observeLog,
		Log:     s.log,
	})
	s.servers.accessLog = grpc.NewServer(append(accesslog.ServerOptions(), keepalives()...)...)
	receiver.Register(s.servers.accessLog)

	s.servers.xds = grpc.NewServer(xds.ServerOptions()...)
	s.publish.Register(s.servers.xds)
	// A bootstrap with several control planes checks the health of each.
	s.xdsHealth = health.NewServer()
	healthv1.RegisterHealthServer(s.servers.xds, s.xdsHealth)

	s.handler = admin.Handler(admin.Options{
		Listen:     cfg.Serve.Admin.Target(),
		Metrics:    s.metrics.handler,
		Ready:      s.readiness,
		Proxies:    s.Proxies,
		Fleet:      s.Fleet,
		Clients:    s.Clients,
		Splits:     s.Splits,
		SetSplit:   s.SetSplit,
		ClearSplit: s.ClearSplit,
	})
	return nil
}

// pingTimeout is how long a peer may leave a ping unanswered.
const pingTimeout = 15 * time.Second

// keepalives keep thousands of long-lived streams from holding dead peers:
// a sidecar that vanished without a word is noticed within a minute.
func keepalives() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
}

// Run serves until ctx ends or a part fails, then ends in order: not ready,
// ext_proc answers NOT_SERVING so that sidecars stop asking, running streams
// finish, logs are taken to the end, and only then xDS goes away.
func (s *Server) Run(ctx context.Context) error {
	stopped, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, running := errgroup.WithContext(stopped)
	serveGRPC := func(what string, g *grpc.Server, l net.Listener) {
		group.Go(func() error {
			if err := g.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				return fmt.Errorf("serve %s: %w", what, err)
			}
			return nil
		})
	}
	// Not before: its stream workers are goroutines.
	s.servers.extproc = grpc.NewServer(append(extproc.ServerOptions(), keepalives()...)...)
	s.extproc.Register(s.servers.extproc)
	serveGRPC("xds", s.servers.xds, s.listeners.xds)
	serveGRPC("extproc", s.servers.extproc, rawio.Listener(s.listeners.extproc, pingTimeout))
	serveGRPC("access log", s.servers.accessLog, rawio.Listener(s.listeners.accessLog, pingTimeout))
	if s.listeners.push != nil {
		serveGRPC("push", s.servers.push, s.listeners.push)
	}
	http1 := &http.Server{Handler: s.handler, ReadHeaderTimeout: 5 * time.Second}
	group.Go(func() error {
		if err := http1.Serve(s.listeners.admin); err != nil && !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve admin: %w", err)
		}
		return nil
	})
	publishing, endPublishing := context.WithCancel(running)
	defer endPublishing()
	part := func(ctx context.Context, run func(context.Context) error) {
		group.Go(func() error {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				return err
			}
			return nil // it ended because it was told to
		})
	}
	part(publishing, s.publish.Run)
	part(running, s.extproc.Run)
	part(running, func(ctx context.Context) error { return s.scraper.Run(ctx, s.scoring.read) })
	part(running, s.tick)
	part(running, s.limiter.Run)
	if s.configPath != "" {
		part(running, func(ctx context.Context) error {
			watchFile(ctx, s.configPath, s.log, s.reload)
			return nil
		})
	}
	if s.modelPath != "" {
		part(running, func(ctx context.Context) error {
			watchFile(ctx, s.modelPath, s.log, s.reloadModel)
			return nil
		})
	}
	s.extproc.SetServing(true)
	s.ready.Store(true)
	s.log.Info("serving", "xds", s.listeners.xds.Addr().String(), "extproc", s.listeners.extproc.Addr().String(),
		"access_log", s.listeners.accessLog.Addr().String(), "admin", s.listeners.admin.Addr().String())

	select {
	case <-ctx.Done():
	case <-running.Done(): // a part failed
	}
	s.shutdown(http1, endPublishing)
	stop()
	err := group.Wait()
	s.closeListeners() // all closed by their servers, but for the folder's lock
	return errors.Join(err, s.metrics.provider.Shutdown(context.WithoutCancel(ctx)))
}

// grace bounds each step of the shutdown.
const grace = 2 * time.Second

func (s *Server) shutdown(http1 *http.Server, endPublishing func()) {
	s.ready.Store(false)
	s.extproc.SetServing(false)
	gracefully(s.servers.extproc)
	gracefully(s.servers.accessLog)
	gracefully(s.servers.push)
	s.xdsHealth.Shutdown()
	endPublishing() // ends the ADS streams with a status
	gracefully(s.servers.xds)
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := http1.Shutdown(ctx); err != nil {
		_ = http1.Close()
	}
}

// gracefully lets running calls end, but not longer than grace: access-log and
// xDS streams never end by themselves.
func gracefully(g *grpc.Server) {
	done := make(chan struct{})
	go func() {
		g.GracefulStop()
		close(done)
	}()
	timer := time.NewTimer(grace / 4)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		g.Stop()
		<-done
	}
}

// tickEvery is how often a plan is made. Samples come five times a second from
// each endpoint, but not from all at once, and what we have sent ourselves since
// is known at any moment: a plan every 50 ms brings both to the requests 75 ms
// earlier on average than one every 200 ms (ADR 0010).
const tickEvery = own.Tick

// bucket is the resolution of what is counted over seconds and of what people
// are shown: the interval of samples.
const bucket = 200 * time.Millisecond

func (s *Server) tick(ctx context.Context) error {
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-ticker.C:
			s.step(now)
		}
	}
}

// step runs one tick: expire leases, score, compile, swap.
func (s *Server) step(now time.Time) {
	s.ledger.Expire(now)
	inputs, view := s.scoring.step(now)
	p, err := plan.Compile(inputs)
	if err != nil {
		// Impossible for inputs made from a valid config; the last plan stays.
		s.log.Error("plan not compiled; the last one stays in force", "error", err)
		return
	}
	s.plan.Store(p)
	s.scoring.published()
	cfg, states := s.scoring.admitted()
	s.hold.step(now, cfg, states)
	if view == nil {
		return
	}
	some, all := s.present.blind()
	s.ledger.SetBlind(some)
	s.collector.step()
	s.gate.SetBlind(some, all)
	s.held.SetBlind(all)
	view.Plan, view.Compiled = p.Digest(), now
	s.logChanges(s.view.Load(), view)
	s.view.Store(view)
	s.refused.tell(s.log, now, "requests refused")
	s.failed.tell(s.log, now, "requests failed at their servers")
	s.shed.tell(s.log, now, "servers told callers to stay away")
	s.fullLog.look(s.log, now, s.ledger.Dropped())
	s.undecided.look(s.log, now, s.metrics.undecided.passed.Load(), s.metrics.undecided.refused.Load())
}

// readiness says why the process should get no traffic yet.
func (s *Server) readiness() error {
	switch {
	case !s.ready.Load():
		return errors.New("starting or stopping")
	case s.plan.Load() == nil:
		return errors.New("no plan yet")
	}
	return nil
}

// outcome takes what Envoy logged to the ledger, the scoring and the metrics.
func (s *Server) outcome(o fleet.Outcome) {
	s.metrics.outcome(o)
	if o.Kind == fleet.RequestEnded {
		s.countFailure(&o)
	}
	if o.Kind == fleet.AttemptEnded && closedFor(&o) > 0 {
		s.shed.count(o.Endpoint.Pool)
	}
	if !accesslog.Decided(o.ID) {
		s.unapplied(&o)
	}
	asker, _ := s.gate.Asker(o.ID)
	// Before the place is free: it may be held.
	if wait := s.scoring.outcome(o, asker); wait > 0 {
		s.gate.TurnAway(asker.Credential, o.Endpoint.Pool, wait, o.Duration, o.At)
	}
	s.ledger.Apply(o)
	if pool := s.gate.Apply(o); pool != "" {
		s.scoring.passedBy(pool, &o)
	}
}

// unapplied looks for the decision of a request that Envoy logs without one. A
// request that went to a server without it is what was counted by it all the same;
// one that ended before gives that back. One that Envoy refused before it had a route
// had no decision, and shows whatever id its caller wrote.
func (s *Server) unapplied(o *fleet.Outcome) {
	if o.Route == "" && !o.Endpoint.Address.IsValid() {
		return
	}
	over := o.Kind == fleet.RequestEnded
	id, ok := s.extproc.Unapplied(o.Node, o.ID, over)
	if !ok {
		return
	}
	if over {
		s.metrics.anomalies.add("decision_unapplied", 1)
	}
	switch {
	case o.Endpoint.Address.IsValid():
		o.ID = id
	case over:
		s.ledger.Cancel(id)
		s.gate.Drop(id)
	}
}

func (s *Server) observeXDS(e xds.Event) {
	s.metrics.xds.add(xdsKey{string(e.Kind), typeName(e.TypeURL)}, 1)
	switch e.Kind {
	case xds.EventConnect:
		s.present.xdsBegan(e.Node)
	case xds.EventDisconnect:
		if s.present.xdsEnded(e.Node) {
			s.nodeDead(e.Node)
		}
	}
}

func (s *Server) nodeDead(node string) {
	s.ledger.NodeDead(node)
	s.gate.NodeDead(node)
}

func (s *Server) observeLog(e accesslog.Event) {
	s.metrics.accessLog.add(e.Kind.String(), int64(max(e.N, 1)))
	switch e.Kind {
	case accesslog.EventStreamBegan:
		s.present.logsBegan(e.Node)
	case accesslog.EventStreamEnded:
		s.logsEnded(e.Node)
	}
}

// logsEnded is told of each log stream that ends.
func (s *Server) logsEnded(node string) {
	switch last, dead := s.present.logsEnded(node); {
	case dead:
		s.nodeDead(node)
	case last:
		s.ledger.NodeGone(node)
		s.gate.NodeGone(node)
	}
}

func (s *Server) observeRequest(e extproc.Event) {
	if e.Failed {
		s.metrics.anomalies.add("unreadable_message", 1)
		return
	}
	if e.UnknownStrategy {
		s.metrics.anomalies.add("unknown_strategy", 1)
	}
	if e.Sampling.Invalid {
		s.metrics.anomalies.add("invalid_sampling", 1)
	}
	if e.Action == plan.ActionRefuse {
		s.refused.count(e.Why())
	}
	if e.Steered {
		s.scoring.prompts.add(e.Slot, e.Prompt)
	}
	s.metrics.requests.add(requestKey{e.Route, e.Pool, e.Strategy.String(), e.Why()}, 1)
	s.metrics.budgets.add(e.BudgetSource.String(), 1)
	s.metrics.admitted(&e)
	s.metrics.decision.record(e.Took)
}

// submit publishes a configuration with the weights set by hand, and lets the
// scoring follow it. Endpoints that leave get nothing new before Envoys lose them:
// what was steered there would go to any that are left, full or not.
func (s *Server) submit(cfg *fleet.Config) error {
	byHand := s.splits.effective(cfg)
	restore, since, leaving := s.scoring.retire(cfg)
	if leaving {
		s.awaitPlan(since)
	}
	err := s.publish.Submit(xds.Target{Config: cfg, Runtime: envoy.Runtime{
		ExtProc:   cfg.Serve.ExtProc,
		AccessLog: cfg.Serve.AccessLog,
		Splits:    byHand,
	}})
	if err != nil {
		restore()
		return err
	}
	s.gate.Reconfigure(cfg)
	s.scoring.reconfigure(cfg, byHand)
	return nil
}

// awaitPlan waits for the plan of a tick after that one, some ticks at most.
func (s *Server) awaitPlan(since uint64) {
	for range 8 {
		time.Sleep(tickEvery / 2)
		if s.plan.Load().Tick() > since {
			return
		}
	}
}
