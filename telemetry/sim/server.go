package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// maxQueue bounds the requests that wait in one engine; above it the answer is
// 503. (vLLM has no such bound.)
const maxQueue = 4096

// maxLag is how far steps may fall behind their schedule before the engine
// stops catching up and counts the loss.
const maxLag = 250 * time.Millisecond

// Reasons why a sequence was killed.
var (
	errGone        = errors.New("client gone")
	errCrashed     = errors.New("server crashed")
	errQueueFull   = errors.New("the engine's queue is full")
	errOutOfMemory = apiText("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of " +
		"79.11 GiB of which 1.17 GiB is free. Including non-PyTorch memory, this process has 77.93 GiB memory in use.")
	// errEngine is what vLLM says in a stream when its engine fails.
	errEngine = apiText("EngineCore encountered an issue. See stack trace (above) for the root cause.")
)

// Server is one simulated model server.
type Server struct {
	cfg          ServerConfig
	seed         uint64
	log          *slog.Logger
	handler      http.Handler
	modelJSON    string
	engineLabels string
	cacheLabels  string
	gpuLabels    string
	start        time.Time // the origin of the engine's times

	listener net.Listener // set by Listen, owned by serve

	work  chan struct{} // capacity 1: a request arrived or a hang ended
	rerun chan struct{} // capacity 1: the fault schedule changed

	mu       sync.Mutex
	addr     netip.AddrPort
	engine   *engine.Engine
	activity engine.Activity
	lag      time.Duration // lost by steps that could not keep their schedule
	requests uint64        // since start, also those before a crash
	faults   faultState

	frozenEngine, frozenGPU []byte
}

func newServer(cfg ServerConfig, seed uint64, log *slog.Logger) *Server {
	cfg.TokensPerEvent = max(cfg.TokensPerEvent, 1)
	if cfg.GPU == "" {
		cfg.GPU = defaultGPU(cfg.Name)
	}
	s := &Server{
		cfg: cfg, seed: seed, log: log.With("server", cfg.Name),
		engine: engine.New(cfg.Engine), start: time.Now(),
		work: make(chan struct{}, 1), rerun: make(chan struct{}, 1),
	}
	s.faults.changed = make(chan struct{})
	s.modelJSON = quoteJSON(cfg.Model)
	s.engineLabels = fmt.Sprintf(`engine="0",model_name="%s"`, escapeLabel(cfg.Model))
	s.cacheLabels = fmt.Sprintf(`,block_size="%d",gpu_memory_utilization="%g",num_gpu_blocks="%d"`,
		BlockTokens, engine.MemoryShare, s.engine.Blocks())
	s.gpuLabels = fmt.Sprintf(`gpu="0",UUID="%s",device="nvidia0",modelName="%s",Hostname="%s"`,
		escapeLabel(cfg.GPU), escapeLabel(cfg.Engine.Hardware), escapeLabel(cfg.Name))
	s.handler = s.named(s.routes())
	return s
}

func escapeLabel(s string) string {
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s)
}

// Name returns the server's name.
func (s *Server) Name() string { return s.cfg.Name }

// Addr returns the address the server listens on, or, before [Fleet.Listen], the
// configured one.
func (s *Server) Addr() netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// Stats are a server's numbers. Counters run since its engine started: a crash
// sets all but Requests back to 0.
type Stats struct {
	Running, Waiting int
	KVUsage          float64       // 0…1
	Busy             time.Duration // the engine's; over the time passed it is the GPU's utilisation
	Lag              time.Duration // lost because the machine was too slow to keep the schedule
	Steps            uint64
	Preemptions      uint64
	PromptTokens     uint64
	GeneratedTokens  uint64
	Requests         uint64 // on generating paths, also refused ones
	Finished         uint64 // answered to the last token
	Aborted          uint64 // left by their client or killed by a fault
}

// Stats returns the server's numbers at this moment.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, c := s.engine, s.engine.Count()
	return Stats{
		Running: e.RunningLen(), Waiting: e.WaitingLen(), KVUsage: e.KVUsage(),
		Busy: c.Busy, Lag: s.lag, Steps: c.Steps, Preemptions: c.Preemptions,
		PromptTokens: c.PromptTokens, GeneratedTokens: c.GeneratedTokens,
		Requests: s.requests, Finished: c.Finished, Aborted: c.Killed,
	}
}

// enqueue hands a sequence to the engine.
func (s *Server) enqueue(q *engine.Sequence) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.on(OutOfMemory):
		return errOutOfMemory
	case s.on(Crash):
		return errCrashed
	case s.engine.WaitingLen() >= maxQueue:
		return errQueueFull
	}
	s.engine.Submit(q, s.since(time.Now()))
	notify(s.work)
	return nil
}

// since is a moment as the engine counts it.
func (s *Server) since(now time.Time) time.Duration { return now.Sub(s.start) }

// abandon takes a sequence out of the engine because nobody waits for it.
func (s *Server) abandon(q *engine.Sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.engine.Cancel(q, errGone)
}

// progress is a sequence's state as its waiter sees it.
type progress struct {
	generated  int
	err        error // not nil when it was killed
	errorAfter int   // data events after which the stream shall break, or -1
}

func (s *Server) progress(q *engine.Sequence) progress {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := progress{generated: q.Generated(), err: q.Err(), errorAfter: -1}
	if s.on(ErrorEvent) {
		p.errorAfter = int(s.faults.active[ErrorEvent].factor)
	}
	return p
}

// notify leaves one token in a channel of capacity 1.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// steps runs the engine in real time. Each step starts at the scheduled end of
// the one before, so that late timers do not add up.
func (s *Server) steps(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var next time.Time // scheduled end of the last step; zero after a pause
	for {
		st, start, ok := s.beginStep(next)
		if !ok {
			next = time.Time{}
			select {
			case <-s.work:
				continue
			case <-ctx.Done():
				return
			}
		}
		next = start.Add(st.Duration)
		timer.Reset(time.Until(next))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		s.finishStep(st)
	}
}

func (s *Server) beginStep(scheduled time.Time) (st engine.Step, start time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hung() {
		return engine.Step{}, start, false
	}
	st, ok = s.engine.Begin()
	if !ok {
		return engine.Step{}, start, false
	}
	now := time.Now()
	start = now
	if !scheduled.IsZero() {
		if behind := now.Sub(scheduled); behind <= maxLag {
			start = scheduled
		} else {
			s.lag += behind
		}
	}
	s.activity.Add(s.since(start), st)
	return st, start, true
}

func (s *Server) finishStep(st engine.Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wake(s.engine.Finish(st, s.since(time.Now())))
}

// kill ends every sequence and wakes its waiter. The caller holds the lock.
func (s *Server) kill(err error) {
	s.wake(s.engine.KillAll(err))
}

// wake tells the waiters of sequences that something has happened. Each
// sequence's owner is its waiter's channel.
func (s *Server) wake(sequences []*engine.Sequence) {
	for _, q := range sequences {
		notify(q.Owner.(chan struct{}))
	}
}

// NameHeader is the response header in which a simulated server names itself,
// so that a caller can tell who answered through any number of proxies.
const NameHeader = "X-Served-By-Server"

func (s *Server) named(next http.Handler) http.Handler {
	name := []string{s.cfg.Name}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()[NameHeader] = name
		next.ServeHTTP(w, r)
	})
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", s.generation(chatAPI{}))
	mux.HandleFunc("POST /v1/completions", s.generation(completionAPI{}))
	mux.HandleFunc("POST /v1/messages", s.generation(messagesAPI{}))
	mux.HandleFunc("GET /v1/models", s.models)
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /metrics", s.page(&s.frozenEngine, s.enginePage))
	mux.HandleFunc("GET /gpu/metrics", s.page(&s.frozenGPU, s.gpuPage))
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages"} {
		mux.HandleFunc(path, wrongMethod)
	}
	mux.HandleFunc("/", notFound)
	return mux
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	body := `{"object":"list","data":[{"id":` + s.modelJSON +
		`,"object":"model","created":1735689600,"owned_by":"fairlead-sim","max_model_len":` +
		strconv.Itoa(s.cfg.Engine.MaxModelLen()) + `}]}`
	writeJSON(w, http.StatusOK, []byte(body))
}

// health answers as vLLM does: 503 when the engine is dead, 200 also when it
// merely stands still.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	dead := s.on(OutOfMemory)
	s.mu.Unlock()
	if dead {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}
