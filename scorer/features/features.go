// Package features turns an endpoint's window and our own counts into the 17
// numbers that a trained model sees. It is pure and allocates nothing. It judges
// nothing and keeps nothing between calls.
//
// Invariants: order, meaning and unit of every feature are fixed by
// [SchemaHash], which a model file must carry; what is not known is NaN, never
// an invented number, and no feature is infinite; the same values come out for
// the same window in training and in serving, since both call [Extract].
package features

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Count is the number of features.
const Count = 17

// Vector holds the features in order; NaN means missing.
type Vector [Count]float32

// Indexes of the features.
const (
	KVUsage = iota
	KVSlope1s
	KVSlope5s
	AllocRate1s
	AllocSlope1s
	AllocStd5s
	QueuedTokensFrac
	Waiting
	RunningFrac
	InFlightDelta
	ArrivedTokens1s
	GRActive1s
	UtilSlope1s
	DRAMActive1s
	PCIeSat1s
	Blocked5s
	Errors5s
)

// Source says where a feature comes from: what goes missing together.
type Source uint8

// Sources.
const (
	FromEngine Source = iota + 1 // the model server's page
	FromGPU                      // DCGM, by agent or exporter
	// FromOwn is our own ledger. Missing only where it is measured by the KV
	// cache's tokens and the window doesn't know those.
	FromOwn
)

func (s Source) String() string {
	names := [...]string{"invalid", "engine", "gpu", "own"}
	if int(s) >= len(names) {
		s = 0
	}
	return names[s]
}

// Feature describes one feature.
type Feature struct {
	Name   string
	Unit   string
	Source Source
	Doc    string
}

// All lists the features in order. Windows are 200 ms, 1 s and 5 s; slopes are
// least squares.
var All = [Count]Feature{
	{"kv_usage", "1", FromEngine, "Share of KV-cache blocks in use."},
	{"kv_slope_1s", "1/s", FromEngine, "Slope of kv_usage over 1 s; missing below 3 points."},
	{"kv_slope_5s", "1/s", FromEngine, "Slope of kv_usage over 5 s; missing below 10 points."},
	{"alloc_rate_1s", "1/s", FromEngine, "Growth of the KV cache in shares of its capacity, falls not counted, over 1 s; missing below 2 points. Of servers that tell no KV usage: growth of the framebuffer in shares of its total."},
	{"alloc_slope_1s", "1/s2", FromEngine, "alloc_rate of the last second less that of the second before, per second."},
	{"alloc_std_5s", "1/s", FromEngine, "Standard deviation of the growth rate from sample to sample over 5 s; missing below 10 rates."},
	{"queued_tokens_frac", "1", FromOwn, "Prompt tokens sent since the newest sample, and those queued in the engine (its own number, else waiting times its mean prompt), over the KV cache's tokens."},
	{"waiting", "requests", FromEngine, "Requests queued in the engine."},
	{"running_frac", "1", FromEngine, "Requests in the batch over the largest batch."},
	{"inflight_delta", "requests", FromEngine, "Own requests in flight less those the engine counted in its newest sample."},
	{"arr_tokens_1s", "1/s", FromOwn, "Prompt tokens sent in the last second over the KV cache's tokens."},
	{"gr_active_1s", "1", FromGPU, "Mean graphics-engine activity over 1 s; utilisation where that is not known."},
	{"util_slope_1s", "1/s", FromGPU, "Slope of the same over 1 s; missing below 3 points."},
	{"dram_active_1s", "1", FromGPU, "Mean DRAM activity over 1 s."},
	{"pcie_sat_1s", "1", FromGPU, "Largest share of the PCIe link's bandwidth in use over 1 s."},
	{"blocked_5s", "count", FromEngine, "Preemptions in 5 s, and samples of those in which requests waited while the KV cache or the batch was full."},
	{"err_5s", "count", FromOwn, "Failed requests of the last 5 s, and 10 for a new XID."},
}

// Names returns the names in order.
func Names() []string {
	names := make([]string, Count)
	for i := range All {
		names[i] = All[i].Name
	}
	return names
}

// SchemaHash identifies order, names and units: the first 64 bits of a SHA-256,
// in hex. A model file carries it as the attribute [SchemaAttribute].
func SchemaHash() string {
	h := sha256.New()
	for i := range All {
		fmt.Fprintf(h, "%d %s %s\n", i, All[i].Name, All[i].Unit)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// SchemaAttribute is the name of the model attribute that holds the SchemaHash.
const SchemaAttribute = "fairlead_schema"

const (
	second   = time.Second
	longSpan = 5 * time.Second
	// wholeWindow is longer than any window.
	wholeWindow = time.Hour

	// Fewest points of a slope over a second, and of a slope or deviation over
	// five, out of 25.
	shortPoints, longPoints = 3, 10
	// kvBlocked is the KV usage from which a waiting request is taken to wait for
	// blocks (AIPerf's guide names 0.9 as the capacity limit).
	kvBlocked = 0.9
	// xidErrors is what a new XID counts among the errors.
	xidErrors = 10
)

// missing is how a model is told that a feature is not known.
var missing = float32(math.NaN())

// Extract returns the features at now. A nil or empty window leaves only those
// of our own counts. Numbers older than scorer.FreshAge are missing, and so are
// those of an engine whose page stands still (see [telemetry.Sample.Settle]).
func Extract(w *telemetry.Window, own scorer.Own, now time.Time) Vector {
	var x Vector
	for i := range x {
		x[i] = missing
	}
	var p pass
	live := false
	if w != nil {
		p.now = now
		w.Each(wholeWindow, func(s *telemetry.Sample) { p.add(s) })
		live = w.Age(now) <= scorer.FreshAge
	}
	if live {
		x.engine(&p, w, own)
	}
	x.gpu(&p)
	x.ours(&p, w, own, live)
	return x
}

// set writes a feature that is known. What float32 cannot hold stays missing.
func (x *Vector) set(i int, v float64, known bool) {
	if f := float32(v); known && !math.IsNaN(v) && !math.IsInf(float64(f), 0) {
		x[i] = f
	}
}

func (x *Vector) engine(p *pass, w *telemetry.Window, own scorer.Own) {
	if p.kv != nil {
		x.set(KVUsage, p.kv.KVUsage, true)
		slope, ok := p.kv1s.slope(shortPoints)
		x.set(KVSlope1s, slope, ok)
		slope, ok = p.kv5s.slope(longPoints)
		x.set(KVSlope5s, slope, ok)
		x.allocation(&p.kvGrowth, 1)
	} else if !p.kvSeen && p.framebuffer {
		// A server that tells its KV usage has the pool for it allocated from the
		// start: its framebuffer stands still whatever happens, and would hide a
		// page that left the usage blank.
		if total, ok := framebufferTotal(w); ok {
			var g allocation
			end := p.end
			w.Each(longSpan, func(s *telemetry.Sample) {
				if s.Known.Has(telemetry.HasFBUsed) {
					g.add(end.Sub(s.At), s.FBUsedMiB)
				}
			})
			x.allocation(&g, 1/total)
		}
	}
	batch := p.maxSeqs
	if batch <= 0 {
		batch = float64(own.MaxInFlight)
	}
	if p.waiting != nil {
		x.set(Waiting, p.waiting.Waiting, true)
	}
	if p.running != nil {
		x.set(RunningFrac, p.running.Running/batch, batch > 0)
	}
	if p.load != nil {
		x.set(InFlightDelta, float64(own.InFlight)-p.load.Running-p.load.Waiting, true)
	}
	blocked := float64(p.kvBlocked)
	for _, running := range p.queuing[:p.nQueuing] {
		if batch > 0 && running >= batch {
			blocked++
		}
	}
	preempted, counted := p.preempted.growth()
	x.set(Blocked5s, preempted+blocked, counted || p.queueSeen)
}

// allocation writes what growing memory tells; scale turns the field's unit into
// shares of capacity.
func (x *Vector) allocation(g *allocation, scale float64) {
	rate, ok := g.last.rate()
	x.set(AllocRate1s, rate*scale, ok)
	before, okBefore := g.before.rate()
	x.set(AllocSlope1s, (rate-before)*scale, ok && okBefore)
	deviation, n := g.steps.deviation()
	x.set(AllocStd5s, deviation*scale, n >= longPoints)
}

func (x *Vector) gpu(p *pass) {
	activity := &p.gr
	if !activity.young {
		activity = &p.util
	}
	if activity.young {
		mean, ok := activity.mean()
		x.set(GRActive1s, mean, ok)
		slope, ok := activity.slope(shortPoints)
		x.set(UtilSlope1s, slope, ok)
	}
	if p.dram.young {
		mean, ok := p.dram.mean()
		x.set(DRAMActive1s, mean, ok)
	}
	if p.pcie.young {
		x.set(PCIeSat1s, p.pcie.most, p.pcie.n > 0)
	}
}

func (x *Vector) ours(p *pass, w *telemetry.Window, own scorer.Own, live bool) {
	if p.kvTokens > 0 {
		queued := max(0, own.SentPromptTokens)
		switch {
		case !live:
		case p.queued != nil:
			queued += p.queued.QueuedTokens
		case p.waiting != nil && p.waiting.Waiting > 0:
			queued += p.waiting.Waiting * scorer.MeanPrompt(w)
		}
		x.set(QueuedTokensFrac, queued/p.kvTokens, true)
		x.set(ArrivedTokens1s, max(0, own.ArrivedPromptTokens)/p.kvTokens, true)
	}
	errors := float64(max(0, own.Errors5s))
	if w != nil {
		if code, since := w.XID(); code != 0 && !since.IsZero() && p.now.Sub(since) <= longSpan {
			errors += xidErrors
		}
	}
	x.set(Errors5s, errors, true)
}

// pass is what one walk over the window gathers, from the newest sample back.
// One walk instead of one per feature: 25 samples are 6 kB, and a thousand
// windows stay in no cache.
type pass struct {
	now, end time.Time // end is the newest sample's arrival; spans end there
	started  bool

	// The newest young samples that know a field, or nil.
	kv, waiting, running, load, queued *telemetry.Sample
	framebuffer                        bool // one young sample knows use and total

	kvSeen                bool
	kv1s, kv5s            trend
	kvGrowth              allocation
	gr, util, dram, pcie  activity
	preempted             counter
	queueSeen             bool
	kvBlocked             int                            // samples with a queue and a full cache
	queuing               [telemetry.WindowTicks]float64 // running, where a queue stood and the cache was not full
	nQueuing              int
	maxSeqs, kvTokens     float64 // newest known, 0 if none is
	sizeSeen, tokensKnown bool
}

func (p *pass) add(s *telemetry.Sample) {
	if !p.started {
		p.end, p.started = s.At, true
	}
	k, age, young := s.Known, p.end.Sub(s.At), p.now.Sub(s.At) <= scorer.FreshAge
	if k.Has(telemetry.HasMaxSeqs) && !p.sizeSeen {
		p.maxSeqs, p.sizeSeen = s.MaxSeqs, true
	}
	if k.Has(telemetry.HasKVTokens) && !p.tokensKnown {
		p.kvTokens, p.tokensKnown = s.KVTokens, true
	}
	if young {
		p.addYoung(s, k)
	}
	if k.Has(telemetry.HasKVUsage) {
		p.kvSeen = true
	}
	if age > longSpan {
		return
	}
	t := seconds(age)
	if k.Has(telemetry.HasKVUsage) {
		p.kv5s.add(t, s.KVUsage)
		p.kvGrowth.add(age, s.KVUsage)
		if age <= second {
			p.kv1s.add(t, s.KVUsage)
		}
	}
	if k.Has(telemetry.HasPreemptions) {
		p.preempted.add(s.Preemptions)
	}
	if k.Has(telemetry.HasWaiting) {
		p.addQueue(s, k)
	}
	if age <= second {
		p.gr.add(k.Has(telemetry.HasGRActive), young, t, s.GRActive)
		p.util.add(k.Has(telemetry.HasGPUUtil), young, t, s.GPUUtil)
		p.dram.add(k.Has(telemetry.HasDRAMActive), young, t, s.DRAMActive)
		p.pcie.add(k.Has(telemetry.HasPCIe), young, t, s.PCIeShare)
	}
}

func (p *pass) addYoung(s *telemetry.Sample, k telemetry.Mask) {
	first := func(to **telemetry.Sample, f telemetry.Mask) {
		if *to == nil && k.Has(f) {
			*to = s
		}
	}
	first(&p.kv, telemetry.HasKVUsage)
	first(&p.waiting, telemetry.HasWaiting)
	first(&p.running, telemetry.HasRunning)
	first(&p.load, telemetry.HasRunning|telemetry.HasWaiting)
	first(&p.queued, telemetry.HasQueuedTokens)
	p.framebuffer = p.framebuffer || k.Has(telemetry.HasFBUsed|telemetry.HasFBTotal)
}

// addQueue notes a sample in which requests waited for blocks, or perhaps for a
// place in the batch, whose size is not known yet.
func (p *pass) addQueue(s *telemetry.Sample, k telemetry.Mask) {
	p.queueSeen = true
	switch {
	case s.Waiting <= 0:
	case k.Has(telemetry.HasKVUsage) && s.KVUsage >= kvBlocked:
		p.kvBlocked++
	case k.Has(telemetry.HasRunning):
		p.queuing[p.nQueuing] = s.Running
		p.nQueuing++
	}
}

// seconds is a sample's time relative to the newest, ≤ 0.
func seconds(age time.Duration) float64 { return -float64(age) / float64(second) }

// trend fits a line by least squares through points (t in seconds, v). Both are
// taken relative to the first point, so that equal times and equal values leave
// exact zeros.
type trend struct {
	n            int
	t0, v0       float64
	t, v, tt, tv float64
}

func (r *trend) add(t, v float64) {
	if r.n == 0 {
		r.t0, r.v0 = t, v
	}
	t, v = t-r.t0, v-r.v0
	r.n++
	r.t += t
	r.v += v
	r.tt += t * t
	r.tv += t * v
}

// slope is in units per second; false with fewer than least points or none apart
// in time.
func (r *trend) slope(least int) (float64, bool) {
	n := float64(r.n)
	spread := n*r.tt - r.t*r.t
	if r.n < least || spread <= 0 {
		return 0, false
	}
	return (n*r.tv - r.t*r.v) / spread, true
}

// activity is one of the GPU's numbers over the last second. young says that a
// sample of scorer.FreshAge knows it.
type activity struct {
	trend
	most  float64
	young bool
}

func (a *activity) add(known, young bool, t, v float64) {
	if !known {
		return
	}
	a.young = a.young || young
	if a.n == 0 || v > a.most {
		a.most = v
	}
	a.trend.add(t, v)
}

func (a *activity) mean() (float64, bool) {
	if a.n == 0 {
		return 0, false
	}
	return a.v0 + a.v/float64(a.n), true
}

// allocation follows a memory that grows and shrinks, newest value first.
type allocation struct {
	last, before rise // of the last second, and of the second before
	steps        steps
}

func (g *allocation) add(age time.Duration, v float64) {
	t := seconds(age)
	g.steps.add(t, v)
	if age <= second {
		g.last.add(t, v)
	}
	if age >= second && age <= 2*second {
		g.before.add(t, v)
	}
}

// rise sums the rises of a value, newest first.
type rise struct {
	n                          int
	sum, newer, newest, oldest float64
}

func (r *rise) add(t, v float64) {
	if r.n == 0 {
		r.newest = t
	} else {
		r.sum += max(0, r.newer-v)
	}
	r.newer, r.oldest = v, t
	r.n++
}

// rate is the sum of rises per second; false with fewer than two points or none
// apart in time.
func (r *rise) rate() (float64, bool) {
	if r.n < 2 || r.newest <= r.oldest {
		return 0, false
	}
	return r.sum / (r.newest - r.oldest), true
}

// steps gathers the rate of growth from each sample to the next, falls as 0,
// relative to the first of them, so that equal rates leave an exact zero.
type steps struct {
	begun               bool
	n                   int
	newer, at           float64
	first, sum, squares float64
}

func (s *steps) add(t, v float64) {
	if s.begun && s.at > t {
		rate := max(0, s.newer-v) / (s.at - t)
		if s.n == 0 {
			s.first = rate
		}
		rate -= s.first
		s.sum += rate
		s.squares += rate * rate
		s.n++
	}
	s.newer, s.at, s.begun = v, t, true
}

// deviation is the population standard deviation of the rates, and how many
// there are.
func (s *steps) deviation() (float64, int) {
	if s.n == 0 {
		return 0, 0
	}
	mean := s.sum / float64(s.n)
	return math.Sqrt(max(0, s.squares/float64(s.n)-mean*mean)), s.n
}

// counter sums a counter's growth, newest value first. One that fell was reset:
// that one difference is dropped.
type counter struct {
	n          int
	sum, newer float64
}

func (c *counter) add(v float64) {
	if c.n > 0 {
		c.sum += max(0, c.newer-v)
	}
	c.newer = v
	c.n++
}

func (c *counter) growth() (float64, bool) { return c.sum, c.n >= 2 }

// GrowthRate is the memory allocation rate over the last over: the sum of rises
// of KV usage (or of the framebuffer, as a share of its total) per second; falls
// are not counted, because freeing memory does not undo an allocation. In shares
// of capacity per second; false with fewer than two points, or of the
// framebuffer where its total is unknown.
func GrowthRate(w *telemetry.Window, f telemetry.Mask, over time.Duration) (float64, bool) {
	rate, ok := w.GrowthBetween(f, over, 0)
	if f != telemetry.HasFBUsed {
		return rate, ok
	}
	total, known := framebufferTotal(w)
	if !ok || !known {
		return 0, false
	}
	return rate / total, true
}

func framebufferTotal(w *telemetry.Window) (float64, bool) {
	total, ok := w.Newest(telemetry.HasFBTotal)
	return total, ok && total > 0
}

// MegabytesPerSecond turns an allocation rate in shares of the KV cache's
// capacity per second into MB/s (10⁶ bytes), given the capacity in tokens and
// the bytes that one token takes: 2 (K and V) · layers · KV heads · head size ·
// bytes per number, 131,072 for Llama-3.1-8B in 16 bits.
func MegabytesPerSecond(sharePerSecond, kvTokens, bytesPerToken float64) float64 {
	return sharePerSecond * kvTokens * bytesPerToken / 1e6
}
