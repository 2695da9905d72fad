// Package features turns an endpoint's window and our own counts into the 17
// numbers that a trained model sees. It is pure and allocates nothing.
//
// Invariants: order, meaning and unit of every feature are fixed by
// [SchemaHash], which a model file must carry; what is not known is NaN, never
// an invented number; the same values come out for the same window in training
// and in serving, since both call [Extract].
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
	FromOwn                      // our own ledger; never missing
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
	{"alloc_rate_1s", "1/s", FromEngine, "Growth of the KV cache in shares of its capacity, falls not counted, over 1 s. Of servers that tell no KV usage: growth of the framebuffer in shares of its total."},
	{"alloc_slope_1s", "1/s2", FromEngine, "alloc_rate of the last second less that of the second before, per second."},
	{"alloc_std_5s", "1/s", FromEngine, "Standard deviation of the growth rate from sample to sample over 5 s; missing below 10 rates."},
	{"queued_tokens_frac", "1", FromOwn, "Prompt tokens sent and not yet prefilled, by our own estimate, over the KV cache's tokens."},
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
	second      = time.Second
	fiveSeconds = 5 * time.Second
	// wholeWindow is longer than any window.
	wholeWindow = time.Hour

	// Fewest points of a slope or deviation over five seconds, out of 25.
	longPoints = 10
	// kvBlocked is the KV usage from which a waiting request is taken to wait for
	// blocks (AIPerf's guide names 0.9 as the capacity limit).
	kvBlocked = 0.9
	// xidErrors is what a new XID counts among the errors.
	xidErrors = 10
)

// Extract returns the features at now. A nil or empty window leaves only those
// of our own counts. Numbers older than scorer.FreshAge are missing.
func Extract(w *telemetry.Window, own scorer.Own, now time.Time) Vector {
	var x Vector
	for i := range x {
		x[i] = missing
	}
	e := extraction{w: w, own: own, now: now, x: &x}
	if w == nil {
		e.w = &empty
	}
	e.engine()
	e.gpu()
	e.ours()
	return x
}

var (
	missing = float32(math.NaN())
	empty   telemetry.Window
)

type extraction struct {
	w   *telemetry.Window
	own scorer.Own
	now time.Time
	x   *Vector
}

func (e *extraction) set(i int, v float64, ok bool) {
	if ok && !math.IsNaN(v) && !math.IsInf(v, 0) {
		e.x[i] = float32(v)
	}
}

// fresh returns the newest sample that knows f, if it is young.
func (e *extraction) fresh(f telemetry.Mask) (*telemetry.Sample, bool) {
	return e.w.Last(f, e.now, scorer.FreshAge)
}

func (e *extraction) engine() {
	if e.w.Age(e.now) > scorer.FreshAge {
		return
	}
	e.cache()
	if s, ok := e.fresh(telemetry.HasWaiting); ok {
		e.set(Waiting, s.Waiting, true)
	}
	if s, ok := e.fresh(telemetry.HasRunning); ok {
		if batch := e.batch(); batch > 0 {
			e.set(RunningFrac, s.Running/batch, true)
		}
	}
	if s, ok := e.fresh(telemetry.HasRunning | telemetry.HasWaiting); ok {
		e.set(InFlightDelta, float64(e.own.InFlight)-s.Running-s.Waiting, true)
	}
	e.blocked()
}

// cache fills what the KV cache tells.
func (e *extraction) cache() {
	field := telemetry.HasKVUsage
	if s, ok := e.fresh(field); ok {
		e.set(KVUsage, s.KVUsage, true)
		slope, ok := e.w.Slope(field, second)
		e.set(KVSlope1s, slope, ok)
		if e.w.Points(field, fiveSeconds) >= longPoints {
			slope, ok = e.w.Slope(field, fiveSeconds)
			e.set(KVSlope5s, slope, ok)
		}
	} else if _, ok := e.fresh(telemetry.HasFBUsed | telemetry.HasFBTotal); ok {
		field = telemetry.HasFBUsed
	} else {
		return
	}
	rate, ok := GrowthRate(e.w, field, second)
	e.set(AllocRate1s, rate, ok)
	before, okBefore := e.w.GrowthBetween(field, 2*second, second)
	e.set(AllocSlope1s, rate-before*growthScale(e.w, field), ok && okBefore)
	deviation, n := e.w.GrowthDeviation(field, fiveSeconds)
	e.set(AllocStd5s, deviation*growthScale(e.w, field), n >= longPoints)
}

// GrowthRate is the memory allocation rate over the last over: the sum of rises
// of KV usage (or of the framebuffer, as a share of its total) per second; falls
// are not counted, because freeing memory does not undo an allocation. In shares
// of capacity per second; false with fewer than two points.
func GrowthRate(w *telemetry.Window, f telemetry.Mask, over time.Duration) (float64, bool) {
	rate, ok := w.GrowthBetween(f, over, 0)
	return rate * growthScale(w, f), ok
}

// growthScale turns a field's unit into shares of capacity.
func growthScale(w *telemetry.Window, f telemetry.Mask) float64 {
	if f != telemetry.HasFBUsed {
		return 1
	}
	if total, ok := w.Newest(telemetry.HasFBTotal); ok && total > 0 {
		return 1 / total
	}
	return 0
}

// batch is the largest batch, 0 if unknown.
func (e *extraction) batch() float64 {
	if v, ok := e.w.Newest(telemetry.HasMaxSeqs); ok {
		return v
	}
	return float64(e.own.MaxInFlight)
}

// blocked counts preemptions and samples with a blocked queue.
func (e *extraction) blocked() {
	preempted, _, ok := e.w.Delta(telemetry.HasPreemptions, fiveSeconds)
	if !ok {
		preempted = 0
	}
	batch, stuck, seen := e.batch(), 0, 0
	e.w.Each(fiveSeconds, func(s *telemetry.Sample) {
		if !s.Known.Has(telemetry.HasWaiting) {
			return
		}
		seen++
		full := s.Known.Has(telemetry.HasKVUsage) && s.KVUsage >= kvBlocked ||
			s.Known.Has(telemetry.HasRunning) && batch > 0 && s.Running >= batch
		if s.Waiting > 0 && full {
			stuck++
		}
	})
	e.set(Blocked5s, preempted+float64(stuck), ok || seen > 0)
}

func (e *extraction) gpu() {
	activity := telemetry.HasGRActive
	if _, ok := e.fresh(activity); !ok {
		activity = telemetry.HasGPUUtil
	}
	if _, ok := e.fresh(activity); ok {
		mean, ok := e.w.Mean(activity, second)
		e.set(GRActive1s, mean, ok)
		slope, ok := e.w.Slope(activity, second)
		e.set(UtilSlope1s, slope, ok)
	}
	if _, ok := e.fresh(telemetry.HasDRAMActive); ok {
		mean, ok := e.w.Mean(telemetry.HasDRAMActive, second)
		e.set(DRAMActive1s, mean, ok)
	}
	if _, ok := e.fresh(telemetry.HasPCIe); ok {
		most, ok := e.w.Max(telemetry.HasPCIe, second)
		e.set(PCIeSat1s, most, ok)
	}
}

func (e *extraction) ours() {
	if tokens, ok := e.w.Newest(telemetry.HasKVTokens); ok && tokens > 0 {
		queued := max(0, e.own.SentPromptTokens)
		if s, ok := e.fresh(telemetry.HasQueuedTokens); ok {
			queued += s.QueuedTokens
		} else if s, ok := e.fresh(telemetry.HasWaiting); ok && s.Waiting > 0 {
			queued += s.Waiting * scorer.MeanPrompt(e.w)
		}
		e.set(QueuedTokensFrac, queued/tokens, true)
		e.set(ArrivedTokens1s, e.own.ArrivedPromptTokens/tokens, true)
	}
	errors := float64(max(0, e.own.Errors5s))
	if code, since := e.w.XID(); code != 0 && !since.IsZero() && e.now.Sub(since) <= fiveSeconds {
		errors += xidErrors
	}
	e.set(Errors5s, errors, true)
}
