package sim

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// DCGM's blank values: "not supported" for integers and doubles
// (DCGM_INT64_NOT_SUPPORTED, DCGM_FP64_NOT_SUPPORTED).
const (
	blankInt    = 0x7ffffffffffffff2
	blankDouble = 140737488355330.0
)

// pageBuffers are reused between scrapes.
var pageBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 16<<10); return &b }}

// page serves a metrics page built by render under the server's lock.
func (s *Server) page(frozen *[]byte, render func([]byte, time.Time) []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		buf := pageBuffers.Get().(*[]byte)
		s.mu.Lock()
		if s.on(Frozen) {
			*buf = append((*buf)[:0], *frozen...)
		} else {
			*buf = render((*buf)[:0], time.Now())
		}
		s.mu.Unlock()
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		w.Header().Set("Content-Length", strconv.Itoa(len(*buf)))
		_, _ = w.Write(*buf) // an error is the scraper's own departure
		pageBuffers.Put(buf)
	}
}

// freeze keeps what both pages say now.
func (s *Server) freeze() {
	now := time.Now()
	s.frozenEngine = s.enginePage(nil, now)
	s.frozenGPU = s.gpuPage(nil, now)
}

// metric writes samples of one family.
type metric struct {
	buf    []byte
	labels string // inside the braces
}

func (m *metric) family(name, kind string) {
	m.buf = append(m.buf, "# TYPE "...)
	m.buf = append(m.buf, name...)
	m.buf = append(m.buf, ' ')
	m.buf = append(m.buf, kind...)
	m.buf = append(m.buf, '\n')
}

func (m *metric) open(name, more string) {
	m.buf = append(m.buf, name...)
	m.buf = append(m.buf, '{')
	m.buf = append(m.buf, m.labels...)
	m.buf = append(m.buf, more...)
	m.buf = append(m.buf, "} "...)
}

func (m *metric) number(name, more string, v float64) {
	m.open(name, more)
	m.buf = strconv.AppendFloat(m.buf, v, 'g', -1, 64)
	m.buf = append(m.buf, '\n')
}

func (m *metric) whole(name, more string, v uint64) {
	m.open(name, more)
	m.buf = strconv.AppendUint(m.buf, v, 10)
	m.buf = append(m.buf, '\n')
}

func (m *metric) gauge(name string, v float64) {
	m.family(name, "gauge")
	m.number(name, "", v)
}

func (m *metric) counter(name string, v uint64) {
	m.family(name, "counter")
	m.whole(name, "", v)
}

// histogram writes h; les are the labels of its buckets, from bucketLabels.
func (m *metric) histogram(name string, h *engine.Histogram, les []string) {
	m.family(name, "histogram")
	var below uint64
	for i, n := range h.Counts {
		below += n
		m.buf = append(m.buf, name...)
		m.buf = append(m.buf, "_bucket{"...)
		m.buf = append(m.buf, m.labels...)
		m.buf = append(m.buf, les[i]...)
		m.buf = append(m.buf, "} "...)
		m.buf = strconv.AppendUint(m.buf, below, 10)
		m.buf = append(m.buf, '\n')
	}
	m.buf = append(m.buf, name...)
	m.number("_sum", "", h.Sum)
	m.buf = append(m.buf, name...)
	m.whole("_count", "", h.Total)
}

func bucketLabels(bounds []float64) []string {
	les := make([]string, 0, len(bounds)+1)
	for _, b := range bounds {
		text := strconv.FormatFloat(b, 'g', -1, 64)
		if b == float64(int64(b)) {
			text += ".0" // as Python's client writes it
		}
		les = append(les, `,le="`+text+`"`)
	}
	return append(les, `,le="+Inf"`)
}

var (
	ttftLabels = bucketLabels(engine.TTFTBounds)
	itlLabels  = bucketLabels(engine.ITLBounds)
)

// enginePage appends the model server's page: vLLM v1's names, and beside them a
// few of our own under fairlead_sim_.
func (s *Server) enginePage(buf []byte, now time.Time) []byte {
	if s.on(Blank) {
		return buf
	}
	e, c := s.engine, s.engine.Count()
	m := metric{buf: buf, labels: s.engineLabels}
	m.gauge("vllm:num_requests_running", float64(e.RunningLen()))
	m.gauge("vllm:num_requests_waiting", float64(e.WaitingLen()))
	m.gauge("vllm:kv_cache_usage_perc", e.KVUsage())
	m.counter("vllm:num_preemptions_total", c.Preemptions)
	m.counter("vllm:prompt_tokens_total", c.PromptTokens)
	m.counter("vllm:generation_tokens_total", c.GeneratedTokens)
	m.family("vllm:request_success_total", "counter")
	m.whole("vllm:request_success_total", `,finished_reason="stop"`, c.Stopped)
	m.whole("vllm:request_success_total", `,finished_reason="length"`, c.Finished-c.Stopped)
	m.whole("vllm:request_success_total", `,finished_reason="abort"`, c.Killed)
	m.histogram("vllm:time_to_first_token_seconds", e.TTFT(), ttftLabels)
	m.histogram("vllm:inter_token_latency_seconds", e.ITL(), itlLabels)
	m.family("vllm:cache_config_info", "gauge")
	m.whole("vllm:cache_config_info", s.cacheLabels, 1)
	m.gauge("fairlead_sim_queued_prompt_tokens", float64(e.QueuedTokens()))
	m.gauge("fairlead_sim_max_num_seqs", float64(e.Profile().MaxSeqs))
	m.counter("fairlead_sim_steps_total", c.Steps)
	m.family("fairlead_sim_busy_seconds_total", "counter")
	m.number("fairlead_sim_busy_seconds_total", "", c.Busy.Seconds())
	m.family("fairlead_sim_lag_seconds_total", "counter")
	m.number("fairlead_sim_lag_seconds_total", "", s.lag.Seconds())
	return m.buf
}

// gpuPage appends a page as dcgm-exporter writes it, for one GPU. Utilisation is
// measured over the last second. Activities other than the engine's busy share
// are of plausible shape and not calibrated.
func (s *Server) gpuPage(buf []byte, now time.Time) []byte {
	p := s.cfg.Engine
	l := s.activity.At(s.since(now))
	watts := l.Watts(p)
	used := uint64(p.MemoryUsedMiB())
	m := metric{buf: buf, labels: s.gpuLabels}
	if s.on(Blank) {
		m.family("DCGM_FI_DEV_GPU_UTIL", "gauge")
		m.whole("DCGM_FI_DEV_GPU_UTIL", "", blankInt)
		m.family("DCGM_FI_DEV_FB_USED", "gauge")
		m.whole("DCGM_FI_DEV_FB_USED", "", blankInt)
		m.gauge("DCGM_FI_DEV_POWER_USAGE", blankDouble)
		return m.buf
	}
	m.gauge("DCGM_FI_DEV_GPU_UTIL", float64(int(100*l.Busy()+0.5)))
	m.gauge("DCGM_FI_DEV_FB_USED", float64(used))
	m.gauge("DCGM_FI_DEV_FB_FREE", float64(uint64(p.MemoryMiB)-used))
	m.gauge("DCGM_FI_DEV_POWER_USAGE", watts)
	m.counter("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", uint64(1000*s.activity.Joules(p, s.since(now))))
	m.gauge("DCGM_FI_DEV_GPU_TEMP", float64(int(35+45*watts/max(p.PeakWatts, 1))))
	m.gauge("DCGM_FI_DEV_XID_ERRORS", float64(s.xid()))
	m.gauge("DCGM_FI_PROF_GR_ENGINE_ACTIVE", l.Busy())
	m.gauge("DCGM_FI_PROF_DRAM_ACTIVE", l.DRAMActive())
	m.gauge("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", l.TensorActive())
	return m.buf
}
