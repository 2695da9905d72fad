package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
)

// GPUSource reads the node's GPUs, as telemetry/dcgm does.
type GPUSource interface {
	// Run delivers frames to out until ctx ends; a frame with Err says why there
	// are no numbers. GPUs are let go before it returns.
	Run(ctx context.Context, out func(telemetry.GPUFrame)) error
}

// Sender takes frames, as push.Client does.
type Sender interface {
	// Send returns at once and keeps nothing of the frame's slices.
	Send(push.Frame)
	Run(ctx context.Context) error
	Stats() push.ClientStats
}

// Options of an Agent.
type Options struct {
	Config *Config
	// GPUs is nil on a node without GPUs.
	GPUs GPUSource
	// GPUCounts are what the source counts by itself, for metrics, by names that
	// never change; nil for none.
	GPUCounts func() map[string]uint64
	// Engines delivers what the servers' pages say; its endpoints are the
	// servers' Listen addresses (see [Targets]).
	Engines telemetry.Source
	Sender  Sender
	// Proc is the /proc tree; it must implement fs.ReadLinkFS, as os.DirFS does.
	Proc fs.FS
	Log  *slog.Logger // nil: slog.Default
}

// Targets are the pages that the agent scrapes.
func Targets(c *Config) []scrape.Target {
	targets := make([]scrape.Target, len(c.Servers))
	for i, s := range c.Servers {
		targets[i] = scrape.Target{
			Endpoint:  fleet.EndpointKey{Address: s.Listen},
			EngineURL: s.PageURL(),
			Interval:  c.Interval,
		}
	}
	return targets
}

// Times of discovery.
const (
	// discoverEvery bounds how long a change that the GPUs' process list does
	// not show stays unseen.
	discoverEvery = 5 * time.Second
	// discoverGap is the least time between two rounds, however fast processes
	// come and go.
	discoverGap = time.Second
)

// Agent is one node's agent.
type Agent struct {
	o      Options
	status atomic.Pointer[Status]
	listen net.Listener

	// What follows belongs to Run's goroutine.
	index   map[netip.AddrPort]int // server by Listen
	engines []engine
	gpu     telemetry.GPUFrame // the newest one, with or without numbers
	gpuAt   time.Time          // of the newest one with numbers
	silent  bool               // every GPU has said nothing for a while
	assign  *assignments
	counts  Counts
	looked  time.Time         // when discovery was last asked
	looking bool              // it has not answered yet
	pids    []int             // processes it was asked about
	named   map[int]time.Time // processes that compute, and since when they are named
	rows    []telemetry.GPU
}

// engine is what one server's page said last.
type engine struct {
	sample telemetry.Sample // newest with numbers
	err    string           // why there is none newer; "" if the last read was good
}

// New returns an agent; it starts nothing.
func New(o Options) *Agent {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	a := &Agent{o: o, index: map[netip.AddrPort]int{}, named: map[int]time.Time{}, engines: make([]engine, len(o.Config.Servers)),
		assign: newAssignments(o.Config.Servers, o.Log)}
	for i, s := range o.Config.Servers {
		a.index[s.Listen] = i
		a.engines[i].err = "not read yet"
	}
	if o.GPUs == nil {
		a.assign.noGPUs()
	}
	a.publish(time.Now())
	return a
}

// Listen binds the status address.
func (a *Agent) Listen() (err error) {
	if a.listen, err = net.Listen("tcp", a.o.Config.Status.Host); err != nil {
		return fmt.Errorf("status: listen on %s: %w", a.o.Config.Status.Host, err)
	}
	return nil
}

// StatusAddr is where the status page listens, after Listen.
func (a *Agent) StatusAddr() string { return a.listen.Addr().String() }

// question is what discovery is asked; see [finder.find].
type question struct {
	processes map[int]computing
	at        time.Time
}

// Run reads and sends until ctx ends, then ends its children in order and
// returns nil, or what went wrong in ending them.
func (a *Agent) Run(ctx context.Context) error {
	readings := make(chan telemetry.Reading)
	frames := make(chan telemetry.GPUFrame)
	questions := make(chan question, 1)
	findings := make(chan []Finding)

	var children family
	if a.listen != nil {
		children.start("status page", a.serveStatus)
	}
	children.start("sender", a.o.Sender.Run)
	if a.o.GPUs != nil {
		children.start("GPUs", func(ctx context.Context) error { return a.readGPUs(ctx, frames) })
		if a.assign.wantDiscovery() {
			children.start("discovery", func(ctx context.Context) error {
				return discover(ctx, newFinder(a.o.Proc, a.o.Config.Servers), questions, findings)
			})
		}
	}
	children.start("engines", func(ctx context.Context) error {
		return a.o.Engines.Run(ctx, func(r telemetry.Reading) { hand(ctx, readings, r) })
	})

	tick := time.NewTicker(a.o.Config.Interval)
	defer tick.Stop()
	for ctx.Err() == nil && !children.lost() {
		select {
		case <-ctx.Done():
		case <-children.ended:
		case r := <-readings:
			a.takeReading(r)
		case f := <-frames:
			a.takeGPUs(f)
			a.ask(time.Now(), questions)
		case found := <-findings:
			a.looking = false
			a.assign.learn(time.Now(), found, a.gpu.GPUs)
		case now := <-tick.C:
			a.o.Sender.Send(a.frame(now))
			a.counts.Frames++
			a.publish(now)
		}
	}
	a.o.Log.Info("agent is stopping")
	return children.end()
}

// hand gives a value to Run's goroutine, which is never busy for long.
func hand[T any](ctx context.Context, to chan<- T, v T) {
	select {
	case to <- v:
	case <-ctx.Done():
	}
}

// readGPUs runs the source, again and again should it give up by itself: the
// node's servers are worth reporting without GPUs too.
func (a *Agent) readGPUs(ctx context.Context, frames chan<- telemetry.GPUFrame) error {
	const slowest = 30 * time.Second
	for wait := time.Second; ; wait = min(2*wait, slowest) {
		err := a.o.GPUs.Run(ctx, func(f telemetry.GPUFrame) { hand(ctx, frames, f) })
		if ctx.Err() != nil {
			return err
		}
		if err == nil {
			err = errors.New("the GPUs' source ended")
		}
		hand(ctx, frames, telemetry.GPUFrame{At: time.Now(), Err: err})
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// discover answers questions until ctx ends.
func discover(ctx context.Context, f *finder, questions <-chan question, findings chan<- []Finding) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case q := <-questions:
			hand(ctx, findings, f.find(q.processes, q.at))
		}
	}
}

func (a *Agent) takeReading(r telemetry.Reading) {
	i, ok := a.index[r.Endpoint.Address]
	if !ok {
		return
	}
	e := &a.engines[i]
	before := e.err
	a.counts.EngineReads++
	switch {
	case r.Err != nil:
		a.counts.EngineFailures++
		e.err = r.Err.Error()
	case !r.Sample.Known.HasEngine():
		a.counts.EngineFailures++
		e.err = "the page has no number that is known of a model server"
	default:
		e.sample, e.err = r.Sample, ""
	}
	switch server := a.o.Config.Servers[i].Listen.String(); {
	case before != "" && e.err == "":
		a.o.Log.Info("server's page is read", "server", server)
	case before == "" && e.err != "", before == "not read yet":
		a.o.Log.Warn("server's page can't be read", "server", server, "error", e.err)
	}
}

func (a *Agent) takeGPUs(f telemetry.GPUFrame) {
	before := a.gpu
	a.gpu = f
	a.counts.GPUReads++
	if f.Err != nil {
		a.counts.GPUFailures++
		if before.Err == nil {
			a.o.Log.Warn("GPUs can't be read", "error", f.Err)
		}
		return
	}
	if before.Err != nil || before.At.IsZero() {
		a.o.Log.Info("GPUs are read", "gpus", len(f.GPUs), "epoch", f.Epoch)
	}
	if speak(f.GPUs) {
		if a.silent {
			a.o.Log.Info("GPUs speak again")
		}
		a.gpuAt, a.silent = f.At, false
	} else if !a.silent && f.At.Sub(a.gpuAt) > a.silentAfter() {
		a.silent = true
		a.o.Log.Warn("GPUs are silent", "error", errSilent)
	}
	a.nameProcesses(f)
	a.assign.gpusAre(f.At, f.GPUs)
}

// errSilent is of GPUs that are read and say nothing, as behind a host engine
// that samples no more: it answers with the numbers that it has.
const errSilent = "every GPU is silent: blank values, or numbers that stand still"

// speak reports whether any GPU says anything; one that is lost says that. A node
// without GPUs has nothing to say.
func speak(gpus []telemetry.GPU) bool {
	for i := range gpus {
		if gpus[i].Known != 0 || gpus[i].Lost {
			return true
		}
	}
	return len(gpus) == 0
}

// nameProcesses notes since when each process has been named.
func (a *Agent) nameProcesses(f telemetry.GPUFrame) {
	for pid := range f.Processes {
		if _, known := a.named[pid]; !known {
			a.named[pid] = f.At
		}
	}
	for pid := range a.named {
		if _, still := f.Processes[pid]; !still {
			delete(a.named, pid)
		}
	}
}

// ask sends discovery the newest processes, when it is time: every few seconds,
// and sooner when other processes compute than it was told.
func (a *Agent) ask(now time.Time, questions chan<- question) {
	if a.gpu.Err != nil || a.looking || !a.assign.wantDiscovery() {
		return
	}
	pids := slices.Sorted(maps.Keys(a.named))
	since := now.Sub(a.looked)
	if !a.looked.IsZero() && since < discoverEvery && (since < discoverGap || slices.Equal(pids, a.pids)) {
		return
	}
	a.looking, a.looked, a.pids = true, now, pids
	q := question{at: now}
	if a.gpu.Processes != nil {
		q.processes = make(map[int]computing, len(pids))
		for pid, gpus := range a.gpu.Processes {
			q.processes[pid] = computing{slices.Clone(gpus), a.named[pid]}
		}
	}
	questions <- q // has room: one is asked at a time
}

// silentAfter is when a source that says nothing counts as having said that it
// has nothing.
func (a *Agent) silentAfter() time.Duration { return max(time.Second, 5*a.o.Config.Interval) }

// gpuTrouble says why the GPUs' numbers can't be used; "" if they can.
func (a *Agent) gpuTrouble(now time.Time) string {
	switch {
	case a.o.GPUs == nil:
		return ""
	case a.gpu.Err != nil:
		return a.gpu.Err.Error()
	case a.gpu.At.IsZero():
		return "GPUs were not read yet"
	case now.Sub(a.gpu.At) > a.silentAfter():
		return "the GPUs' source is silent"
	case a.silent:
		return errSilent
	}
	return ""
}

// engineTrouble says why a server's numbers can't be used; "" if they can.
func (a *Agent) engineTrouble(e *engine, now time.Time) string {
	if e.err == "" && now.Sub(e.sample.At) > a.silentAfter() {
		return "no new page"
	}
	return e.err
}

// frame is what the node says now. An engine's numbers keep the time at which
// they were read; where there are none, the sample's time is the GPUs'.
func (a *Agent) frame(now time.Time) push.Frame {
	f := push.Frame{Node: a.o.Config.Node, Epoch: a.gpu.Epoch, At: now, Err: a.gpuTrouble(now),
		Endpoints: make([]push.Update, len(a.engines))}
	if f.Err == "" {
		f.GPUs = a.gpu.GPUs
	}
	for i := range a.engines {
		e := &a.engines[i]
		u := push.Update{Endpoint: a.o.Config.Servers[i].Advertise, GPUs: a.assign.list[i].gpus, Err: a.engineTrouble(e, now)}
		if u.Err == "" {
			u.Sample = e.sample
		}
		if a.rows = rowsOf(u.GPUs, f.GPUs, a.rows[:0]); len(a.rows) > 0 {
			u.Sample.SetGPUs(a.rows)
			if u.Err != "" {
				u.Sample.At, u.Sample.Changed = a.gpu.At, e.sample.Changed
			}
		}
		f.Endpoints[i] = u
	}
	return f
}
