package scorer

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// loss is what a node's telemetry may lack.
type loss uint8

const (
	lossAll    loss = iota // no sample comes
	lossEngine             // the agent tells of GPUs, the server's page is gone
	lossGPU                // the server's page comes, nothing of GPUs (XID 119, DCGM ended)
	lossBlank              // samples come without a number
	lossFrozen             // the same numbers over and over
	losses
)

// loadedFleet is a pool at work, on nodes of two endpoints, judged by the
// formula. Its true load goes on whatever its telemetry says.
type loadedFleet struct {
	judge     *Judge
	now       time.Time
	rng       *rand.Rand
	endpoints []*loadedEndpoint
	view      []PoolView
}

type loadedEndpoint struct {
	window *telemetry.Window
	kv     float64
	sample telemetry.Sample
	lost   bool
	kind   loss
}

func newLoadedFleet(rng *rand.Rand, nodes int) *loadedFleet {
	f := &loadedFleet{judge: NewJudge(Formula(FormulaOptions{})), now: time.Now(), rng: rng, view: []PoolView{{Name: "p", MaxInFlight: 256}}}
	for i := range 2 * nodes {
		e := &loadedEndpoint{window: new(telemetry.Window), kv: 0.3 + 0.5*rng.Float64()}
		e.sample = telemetry.Sample{
			Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens | telemetry.HasPromptTokens |
				telemetry.HasGenerationTokens | telemetry.HasTTFT | telemetry.HasGPUUtil | telemetry.HasXID | telemetry.HasCondition,
			KVTokens: 400_000, GPUUtil: 0.99, XID: 79 * rng.IntN(2), Condition: telemetry.ConditionOK, // the code stands since long ago
		}
		f.endpoints = append(f.endpoints, e)
		f.view[0].Endpoints = append(f.view[0].Endpoints, EndpointView{
			Address:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 8000),
			Capacity: 1, Window: e.window,
			Own: Own{InFlight: 40, Attempts5s: 50, SentPromptTokens: 2000},
		})
	}
	return f
}

// step lets time pass and judges.
func (f *loadedFleet) step(passed time.Duration) []Verdict {
	f.now = f.now.Add(passed)
	for i, e := range f.endpoints {
		own := &f.view[0].Endpoints[i].Own
		own.InFlight = 30 + f.rng.Int32N(30)
		own.Successes += 10
		own.Errors5s = f.rng.IntN(2) // one in fifty fails: no reason
		e.kv = min(0.82, max(0.1, e.kv+0.04*(f.rng.Float64()-0.5)))
		truth := &e.sample
		truth.At, truth.KVUsage = f.now, e.kv
		truth.Running, truth.Waiting = float64(own.InFlight-1), float64(f.rng.IntN(2))
		truth.PromptTokens += 10_000
		truth.GenerationTokens += 5_000
		truth.TTFTSum += 2
		truth.TTFTCount += 10
		said := *truth
		if e.lost {
			switch e.kind {
			case lossAll:
				continue
			case lossEngine:
				said.Known &= telemetry.HasGPUUtil | telemetry.HasXID | telemetry.HasCondition
			case lossGPU:
				said.Known &^= telemetry.HasGPUUtil | telemetry.HasXID | telemetry.HasCondition
			case lossBlank:
				said.Known = 0
			case lossFrozen:
				if last, ok := e.window.Latest(); ok {
					said = *last
					said.At, said.Changed = f.now, time.Time{}
				}
			}
		}
		e.window.Add(said)
	}
	return f.judge.Step(f.now, f.view)
}

// pass lets a span pass: at the pace of ticks at its ends, in longer steps in
// between, so that five minutes cost little.
func (f *loadedFleet) pass(span time.Duration, check func(since time.Duration, verdicts []Verdict)) {
	for since := time.Duration(0); since < span; {
		step := tick
		if left := span - since; since > 7*time.Second && left > 3*time.Second {
			step = min(left-2*time.Second, since/4)
		}
		since += step
		check(since, f.step(step))
	}
}

// TestTelemetryBlackoutUnderLoadEjectsNothing: one node, half of them or all
// lose their telemetry for 1, 5, 30 or 300 s under load, in any of five ways, in
// 10,000 random patterns. No endpoint is ejected for it, nor held back by the
// gate as one that should be; the last word holds for HoldAge; by 30 s an
// endpoint of which nothing is known weighs as the pool's median, and all of them
// alike where nothing is known of any.
func TestTelemetryBlackoutUnderLoadEjectsNothing(t *testing.T) {
	patterns := 10_000
	if testing.Short() {
		patterns = 300
	}
	rng := rand.New(rand.NewPCG(6, 28))
	for n := range patterns {
		nodes := 1 + rng.IntN(3)
		f := newLoadedFleet(rng, nodes)
		calm := func(_ time.Duration, verdicts []Verdict) {
			for i, v := range verdicts {
				if v.State == fleet.StateEjected || v.Reason == ReasonGateHeld || !(v.Weight > 0) {
					t.Fatalf("pattern %d: %s by %s, weight %v, with loss %+v", n, v.State, v.Reason, v.Weight, f.endpoints[i])
				}
			}
		}
		f.pass(2*time.Second, calm)
		for range 1 + rng.IntN(2) {
			span := []time.Duration{1, 5, 30, 300}[rng.IntN(4)] * time.Second
			dark := []int{1, (nodes + 1) / 2, nodes}[rng.IntN(3)]
			kind := loss(rng.IntN(int(losses)))
			order := rng.Perm(nodes)[:dark]
			for _, node := range order {
				for _, e := range f.endpoints[2*node : 2*node+2] {
					e.lost, e.kind = true, kind
				}
			}
			trace := newFading()
			f.pass(span, func(since time.Duration, verdicts []Verdict) {
				calm(since, verdicts)
				trace.check(t, f, since, verdicts)
			})
			for _, e := range f.endpoints {
				e.lost = false
			}
			f.pass(time.Duration(1+rng.IntN(4))*time.Second, calm)
		}
	}
}

// fading follows the weights of one loss.
type fading struct {
	held   map[int]float64 // weights when the model fell silent
	lo, hi float64         // of the smoothed risks of those that are heard
}

func newFading() *fading { return &fading{held: map[int]float64{}, lo: 1, hi: 0} }

// check asserts how the weights of endpoints whose engines are not heard go.
func (d *fading) check(t *testing.T, f *loadedFleet, since time.Duration, verdicts []Verdict) {
	t.Helper()
	heard := 0
	for i, v := range verdicts {
		if e := f.endpoints[i]; !e.lost || e.kind == lossGPU {
			if heard++; v.Stale {
				t.Fatalf("an engine that speaks is stale after %v: %+v", since, v)
			}
			d.lo, d.hi = min(d.lo, float64(v.Smoothed)), max(d.hi, float64(v.Smoothed))
		}
	}
	for i, v := range verdicts {
		e := f.endpoints[i]
		if !e.lost || e.kind == lossGPU {
			continue
		}
		// The last sample came a tick before the loss, and a frozen page's first
		// repetition tells nothing yet.
		switch held, ok := d.held[i]; {
		case since < HoldAge-2*tick && v.Stale:
			t.Fatalf("stale after %v by loss %d", since, e.kind)
		case since <= FreshAge+tick:
		case since < HoldAge-2*tick && !ok:
			d.held[i] = v.Weight
		case since < HoldAge-2*tick && v.Weight != held:
			t.Fatalf("loss %d: weight %v became %v after %v, within the hold", e.kind, held, v.Weight, since)
		case since > HoldAge+2*tick && !v.Stale:
			t.Fatalf("loss %d: not stale after %v", e.kind, since)
		case since <= 30*time.Second:
		case heard == 0 && v.Weight != 1:
			t.Fatalf("all dark for %v, and the weight is %v", since, v.Weight)
		case heard > 0 && (float64(v.Smoothed) < min(staleTarget, d.lo)-0.01 || float64(v.Smoothed) > min(staleTarget, d.hi)+0.01):
			t.Fatalf("after %v risk %v, outside of the pool's %v … %v", since, v.Smoothed, d.lo, d.hi)
		}
	}
}
