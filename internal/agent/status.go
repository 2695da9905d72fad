package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Counts count since the agent began.
type Counts struct {
	GPUReads, GPUFailures       uint64 // frames of the GPUs' source; those with an error
	EngineReads, EngineFailures uint64 // pages asked for; those that gave no numbers
	Frames                      uint64 // frames made
}

// Status is what the agent knew at its last tick. It is never written after it
// was published.
type Status struct {
	At      time.Time
	Node    string
	NoGPUs  bool // the node has none by its config
	GPUs    []telemetry.GPU
	GPUAt   time.Time // when the GPUs last gave numbers; zero: never
	GPUErr  string    // why their numbers can't be used; "" if they can
	Epoch   uint32
	Servers []ServerStatus
	Counts  Counts
}

// ServerStatus is one server in a Status.
type ServerStatus struct {
	Server    Server
	ReadAt    time.Time // when its page last gave numbers; zero: never
	Err       string    // why its numbers can't be used; "" if they can
	GPUs      []string
	Listeners []int
	Workers   []int
	// Why says why it has no GPUs, or why they are not sure.
	Why string
}

// Status returns what the last tick knew.
func (a *Agent) Status() *Status { return a.status.Load() }

func (a *Agent) publish(now time.Time) {
	s := &Status{At: now, Node: a.o.Config.Node, NoGPUs: a.o.GPUs == nil, GPUAt: a.gpuAt, GPUErr: a.gpuTrouble(now),
		Epoch: a.gpu.Epoch, Counts: a.counts, Servers: make([]ServerStatus, len(a.engines))}
	if s.GPUErr == "" {
		s.GPUs = a.gpu.GPUs
	}
	for i := range a.engines {
		x := &a.assign.list[i]
		s.Servers[i] = ServerStatus{Server: a.o.Config.Servers[i], ReadAt: a.engines[i].sample.At, Err: a.engineTrouble(&a.engines[i], now),
			GPUs: x.gpus, Listeners: x.listeners, Workers: x.workers, Why: x.why}
	}
	a.status.Store(s)
}

// stuckAfter is when an agent that has not ticked counts as dead.
const stuckAfter = 10 * time.Second

// troubles lists what keeps the node from being judged: nothing that one engine
// says, since a dead engine is news, not a fault of the agent.
func (a *Agent) troubles(now time.Time) []string {
	s := a.Status()
	var out []string
	if s.GPUErr != "" {
		out = append(out, "GPUs: "+s.GPUErr)
	}
	if !s.NoGPUs {
		for _, x := range s.Servers {
			if len(x.GPUs) == 0 {
				out = append(out, fmt.Sprintf("GPUs of %s: %s", x.Server.Listen, x.Why))
			}
		}
	}
	if sent := a.o.Sender.Stats(); !sent.Connected {
		why := sent.LastError
		if why == "" {
			why = "no answer yet"
		}
		out = append(out, "push: "+why)
	} else {
		for _, r := range sent.Refused {
			out = append(out, fmt.Sprintf("push: serve does not take %s: %s", r.Endpoint, r.Reason))
		}
	}
	if now.Sub(s.At) > stuckAfter {
		out = append(out, "agent: stuck")
	}
	return out
}

// Handler serves /metrics, /healthz (the agent itself works) and /readyz (GPUs
// are read and assigned, and serve takes the frames).
func (a *Agent) Handler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collector{a})
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if time.Since(a.Status().At) > stuckAfter {
			http.Error(w, "stuck", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if troubles := a.troubles(time.Now()); len(troubles) > 0 {
			http.Error(w, strings.Join(troubles, "\n"), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

func (a *Agent) serveStatus(ctx context.Context) error {
	server := &http.Server{Handler: a.Handler(), ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(a.listen); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// collector turns the status into metrics when it is asked. Its labels are
// addresses from the config and GPUs of one frame, so a GPU that is gone leaves
// no series behind.
type collector struct{ agent *Agent }

func metric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("fairlead_agent_"+name, help, labels, nil)
}

var (
	readsDesc     = metric("reads_total", "Reads of the GPUs and of model servers' pages.", "source")
	failuresDesc  = metric("read_failures_total", "Reads that gave no numbers.", "source")
	framesDesc    = metric("frames_total", "Frames made, written to serve, answered by it, and dropped because it was away or slow.", "what")
	connectedDesc = metric("push_connected", "1 while serve answers.")
	connectsDesc  = metric("push_connects_total", "Connections to serve.")
	pushFailsDesc = metric("push_failures_total", "Connections to serve that failed or broke.")
	refusedDesc   = metric("push_refused", "Model servers that serve does not take from this node.")
	countsDesc    = metric("gpu_source_total", "What the GPUs' source counts by itself.", "what")
	epochDesc     = metric("gpu_epoch", "How often the GPUs' source has connected.")
	ageDesc       = metric("source_age_seconds", "Age of the newest numbers.", "source", "server")
	serverDesc    = metric("server_gpus", "How many GPUs serve the model server; 0 if they are unknown.", "server")
	unknownDesc   = metric("servers_without_gpus", "Model servers whose GPUs are unknown.")
	utilDesc      = metric("gpu_util_ratio", "GPU utilisation, a mean over up to 1 s.", "gpu")
	fbDesc        = metric("gpu_framebuffer_used_bytes", "Framebuffer in use.", "gpu")
	fbTotalDesc   = metric("gpu_framebuffer_bytes", "Framebuffer in all.", "gpu")
	powerDesc     = metric("gpu_power_watts", "Power drawn.", "gpu")
	xidDesc       = metric("gpu_xid", "Last XID error code, 0 for none.", "gpu")
	xidsDesc      = metric("gpu_xid_events_total", "XID errors seen.", "gpu")
	conditionDesc = metric("gpu_condition", "1 for the condition that the GPU is in.", "gpu", "condition")
)

// Describe sends nothing: which series there are depends on the node.
func (collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(out chan<- prometheus.Metric) {
	s, sent, now := c.agent.Status(), c.agent.o.Sender.Stats(), time.Now()
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	const counter, gauge = prometheus.CounterValue, prometheus.GaugeValue
	put(readsDesc, counter, float64(s.Counts.EngineReads), "engine")
	put(failuresDesc, counter, float64(s.Counts.EngineFailures), "engine")
	put(framesDesc, counter, float64(s.Counts.Frames), "made")
	put(framesDesc, counter, float64(sent.Sent), "written")
	put(framesDesc, counter, float64(sent.Answered), "answered")
	put(framesDesc, counter, float64(sent.Dropped), "dropped")
	put(connectedDesc, gauge, number(sent.Connected))
	put(connectsDesc, counter, float64(sent.Connects))
	put(pushFailsDesc, counter, float64(sent.Failures))
	put(refusedDesc, gauge, float64(len(sent.Refused)))
	unknown := 0
	for _, x := range s.Servers {
		name := x.Server.Listen.String()
		if !x.ReadAt.IsZero() {
			put(ageDesc, gauge, now.Sub(x.ReadAt).Seconds(), "engine", name)
		}
		put(serverDesc, gauge, float64(len(x.GPUs)), name)
		if len(x.GPUs) == 0 {
			unknown++
		}
	}
	if s.NoGPUs {
		return
	}
	put(unknownDesc, gauge, float64(unknown))
	put(readsDesc, counter, float64(s.Counts.GPUReads), "gpu")
	put(failuresDesc, counter, float64(s.Counts.GPUFailures), "gpu")
	put(epochDesc, gauge, float64(s.Epoch))
	if c.agent.o.GPUCounts != nil {
		for what, n := range c.agent.o.GPUCounts() {
			put(countsDesc, counter, float64(n), what)
		}
	}
	if !s.GPUAt.IsZero() {
		put(ageDesc, gauge, now.Sub(s.GPUAt).Seconds(), "gpu", "")
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		id := strings.ToValidUTF8(g.ID, "?")
		for _, x := range []struct {
			known telemetry.GPUMask
			desc  *prometheus.Desc
			kind  prometheus.ValueType
			value float64
		}{
			{telemetry.GPUHasUtil, utilDesc, gauge, g.Util},
			{telemetry.GPUHasFBUsed, fbDesc, gauge, g.FBUsedMiB * (1 << 20)},
			{telemetry.GPUHasFBTotal, fbTotalDesc, gauge, g.FBTotalMiB * (1 << 20)},
			{telemetry.GPUHasPower, powerDesc, gauge, g.PowerWatts},
			{telemetry.GPUHasXID, xidDesc, gauge, float64(g.XID)},
			{telemetry.GPUHasXID, xidsDesc, counter, g.XIDEvents},
		} {
			if g.Known.Has(x.known) {
				put(x.desc, x.kind, x.value, id)
			}
		}
		put(conditionDesc, gauge, 1, id, g.Condition().String())
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Reason says in a line how a server's GPUs were found, or why not.
func (x ServerStatus) Reason() string {
	switch {
	case x.Why != "":
		return x.Why
	case len(x.Server.GPUs) > 0:
		return "by the config"
	case len(x.GPUs) == 0:
		return "-"
	}
	return fmt.Sprintf("processes %v, listening %v", x.Workers, x.Listeners)
}

// Complete is nil when GPUs are read and every server has some, or when the
// node has none.
func (s *Status) Complete() error {
	if s.NoGPUs {
		return nil
	}
	if s.GPUErr != "" {
		return errors.New("GPUs: " + s.GPUErr)
	}
	for _, x := range s.Servers {
		if len(x.GPUs) == 0 {
			return fmt.Errorf("GPUs of %s are unknown: %s", x.Server.Listen, x.Why)
		}
	}
	return nil
}
