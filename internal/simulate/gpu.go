package simulate

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/own"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// What the telemetry's delays are; see the package comment.
const (
	samplePeriod = 200 * time.Millisecond
	sampleDelay  = 50 * time.Millisecond
	glancePeriod = 50 * time.Millisecond
	tickPeriod   = own.Tick // serve's
	ledgerDelay  = 50 * time.Millisecond
)

// GPU is one simulated GPU, or group of GPUs that work in step, with its engine.
type GPU struct {
	// Type names the hardware and its speed in tables and recordings.
	Type    string
	Profile engine.Profile
}

// Fault is something that goes wrong with one GPU for a while.
type Fault struct {
	GPU     int
	At, For time.Duration
	// Slow makes steps that many times as long; 0 is a crash: what runs is lost,
	// connections are refused, and the engine comes back empty.
	Slow float64
}

// gpu is a GPU at work.
type gpu struct {
	spec     GPU
	engine   *engine.Engine
	activity engine.Activity
	step     engine.Step // under way if busy
	busy     bool
	epoch    int  // counts crashes, so that a step of a dead engine ends nothing
	down     bool // crashed
	slowed   int  // slow-down faults under way
	slow     float64

	window   telemetry.Window // what has arrived; all routers hear the same
	arrived  int              // samples that have
	onTheWay []telemetry.Sample

	// glance is what llm-d's scorers look at.
	glanceKV, glanceWaiting float64

	gone engine.Counters   // of engines before the present one
	itl  *engine.Histogram // of all its engines
	gaps *timeline         // nil unless recorded
}

// itlBounds are 2 % apart from 1 ms to 100 s.
var itlBounds = func() []float64 {
	var out []float64
	for b := 0.001; b < 100; b *= 1.02 {
		out = append(out, b)
	}
	return out
}()

func newGPU(spec GPU) *gpu {
	itl := engine.NewHistogram(itlBounds)
	g := &gpu{spec: spec, itl: &itl, slow: 1}
	g.boot()
	return g
}

// boot starts an empty engine.
func (g *gpu) boot() {
	g.engine = engine.New(g.spec.Profile)
	g.engine.SetITLBounds(itlBounds)
	g.engine.SetSlow(g.slow)
}

// bury keeps the numbers of the engine that ends.
func (g *gpu) bury() {
	c := g.engine.Count()
	g.gone.Preemptions += c.Preemptions
	g.gone.Killed += c.Killed
	g.gone.Finished += c.Finished
	g.itl.Merge(g.engine.ITL())
}

// origin is the moment 0 of a run as telemetry tells time.
var origin = time.Unix(1_700_000_000, 0)

func at(now time.Duration) time.Time { return origin.Add(now) }

// sample is what the GPU and its engine say at now, stamped with its arrival.
// Of the engine it has what a scrape of vLLM's page has; how many prompt tokens
// are queued stands on no page. Framebuffer use is flat, as with every server
// that allocates its KV cache in advance. Activities, power and the PCIe link
// are of plausible shape and not calibrated.
func (g *gpu) sample(now time.Duration) telemetry.Sample {
	e, c := g.engine, g.engine.Count()
	p := g.spec.Profile
	l := g.activity.At(now)
	return telemetry.Sample{
		At: at(now + sampleDelay),
		Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens |
			telemetry.HasPromptTokens | telemetry.HasGenerationTokens | telemetry.HasPreemptions | telemetry.HasTTFT |
			telemetry.HasGPUUtil | telemetry.HasGRActive | telemetry.HasDRAMActive | telemetry.HasFBUsed |
			telemetry.HasFBTotal | telemetry.HasPower | telemetry.HasPCIe | telemetry.HasXID | telemetry.HasCondition,
		KVUsage: e.KVUsage(), Running: float64(e.RunningLen()), Waiting: float64(e.WaitingLen()),
		KVTokens:     float64(e.Blocks() * engine.BlockTokens),
		PromptTokens: float64(c.PromptTokens), GenerationTokens: float64(c.GeneratedTokens), Preemptions: float64(c.Preemptions),
		TTFTSum: e.TTFT().Sum, TTFTCount: float64(e.TTFT().Total),
		GPUUtil: rounded(l.Busy(), 100), GRActive: rounded(l.Busy(), 1000),
		// A slowed GPU moves its bytes over more time.
		DRAMActive: rounded(l.DRAMActive()/e.Slow(), 1000),
		FBUsedMiB:  float64(p.MemoryUsedMiB()), FBTotalMiB: float64(p.MemoryMiB),
		PowerWatts: rounded(l.Watts(p), 1),
		PCIeShare:  rounded(0.004*l.Decode+0.02*l.Prefill, 1000),
		Condition:  telemetry.ConditionOK,
	}
}

func rounded(v, steps float64) float64 { return math.Round(v*steps) / steps }
