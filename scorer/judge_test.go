package scorer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// serving counts the endpoints that get new requests and sums the weights.
func serving(verdicts []Verdict) (n int, weight float64) {
	for _, v := range verdicts {
		if v.Weight > 0 {
			n++
			weight += v.Weight
		}
	}
	return n, weight
}

// checkVerdicts asserts what must hold at every tick, whatever happened.
func checkVerdicts(t interface{ Fatalf(string, ...any) }, verdicts []Verdict) {
	n, weight := serving(verdicts)
	if need := max(1, (len(verdicts)+1)/2); len(verdicts) > 0 && (n < need || !(weight > 0)) {
		t.Fatalf("%d of %d endpoints serve, want %d; weights sum to %v", n, len(verdicts), need, weight)
	}
	for _, v := range verdicts {
		if !(v.Risk >= 0 && v.Risk <= 1 && v.Smoothed >= 0 && v.Smoothed <= 1) {
			t.Fatalf("risk %v, smoothed %v", v.Risk, v.Smoothed)
		}
		if math.IsNaN(v.Weight) || math.IsInf(v.Weight, 0) || (v.Weight == 0) != (v.State == fleet.StateEjected) {
			t.Fatalf("weight %v in state %s", v.Weight, v.State)
		}
		if v.Reason == 0 || v.Reason >= reasonCount || v.KVFree < -1 {
			t.Fatalf("reason %d, KV free %d", v.Reason, v.KVFree)
		}
	}
}

func quietPool(t *testing.T, n int) *fakePool {
	return newFakePool(t, []string{fmt.Sprint(n)})
}

// TestMissingDataEjectsNothing plays random patterns of silent, frozen, blank
// and returning pages of 1 … 6 endpoints: never an ejection, and an outage of
// all ends at plain capacity.
func TestMissingDataEjectsNothing(t *testing.T) {
	patterns := 10_000
	if testing.Short() {
		patterns = 500
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range patterns {
		f := quietPool(t, 1+rng.IntN(6))
		for _, e := range f.members {
			e.sample.KVUsage = 0.8 * rng.Float64() // high, but no reason to eject
			e.sample.XID = 79 * rng.IntN(2)        // stands since long ago
		}
		f.step()
		for range 2 + rng.IntN(4) {
			for _, e := range f.members {
				if rng.IntN(3) > 0 {
					continue
				}
				e.silent, e.frozen = rng.IntN(2) == 0, rng.IntN(2) == 0
				e.sample.Known ^= telemetry.Mask(rng.Uint32N(1<<15)) & (telemetry.HasKVUsage | telemetry.HasGPUUtil | telemetry.HasRunning | telemetry.HasXID)
				e.own.InFlight = rng.Int32N(3)
			}
			if rng.IntN(4) == 0 { // a pause of the ticks themselves
				f.now = f.now.Add(time.Duration(rng.IntN(300)) * time.Second)
			}
			for range 1 + rng.IntN(12) {
				verdicts := f.step()
				checkVerdicts(t, verdicts)
				for _, v := range verdicts {
					if v.State == fleet.StateEjected || v.Reason == ReasonGateHeld {
						t.Fatalf("%s by %s for missing data", v.State, v.Reason)
					}
				}
			}
		}
		for _, e := range f.members {
			e.silent = true
		}
		f.now = f.now.Add(HoldAge)
		for _, v := range f.step() {
			if v.Weight != 1 || v.State != fleet.StateUnknown || !v.Stale {
				t.Fatalf("in a total outage: %+v", v)
			}
		}
	}
}

// TestEnoughEndpointsServe throws random risks, faults, loads, outages and
// changes of membership at pools of any size.
func TestEnoughEndpointsServe(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := quietPool(t, rapid.IntRange(0, 24).Draw(rt, "n"))
		f.max = rapid.SampledFrom([]int{0, 10, 256}).Draw(rt, "max")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 7))
		for range rapid.IntRange(1, 80).Draw(rt, "ticks") {
			for _, e := range f.members {
				switch rng.IntN(20) {
				case 0, 1, 2, 3:
					e.sample.KVUsage = rng.Float64()
				case 4, 5:
					e.sample.KVUsage = 1
				case 6:
					e.own.OOMStreak = rng.IntN(6)
				case 7:
					e.own.ConnectStreak = rng.IntN(6)
				case 8:
					e.sample.XID = rng.IntN(160)
				case 9:
					e.silent = !e.silent
				case 10:
					e.own.InFlight = rng.Int32N(20) - 1
				case 11:
					e.own.Successes = rng.Uint64N(10)
				case 14:
					f.setOne(e, "condition="+[]string{"ok", "drain", "eject", "lost"}[rng.IntN(4)])
				case 15:
					f.setOne(e, "nogpu")
				case 13:
					e.own.Errors5s, e.own.Attempts5s = rng.IntN(5), rng.IntN(40)
				case 12:
					e.capacity = []float64{1, 0.5, 4, 0, -1, math.NaN(), math.Inf(1)}[rng.IntN(7)]
				}
			}
			if rng.IntN(15) == 0 {
				f.add(1)
			}
			if len(f.members) > 0 && rng.IntN(20) == 0 {
				f.members = f.members[1:]
			}
			checkVerdicts(rt, f.step())
		}
		if len(f.judge.endpoints) != len(f.members) {
			rt.Fatalf("%d endpoints remembered of %d", len(f.judge.endpoints), len(f.members))
		}
	})
}

func TestWholePoolAtRiskEjectsNothing(t *testing.T) {
	f := quietPool(t, 20)
	for range 30 {
		for i, e := range f.members {
			e.sample.KVUsage = 0.85 + 0.007*float64(i)
		}
		verdicts := f.step()
		if n, _ := serving(verdicts); n != 20 {
			t.Fatalf("%d of 20 serve", n)
		}
	}
}

// TestFlappingRiskMakesFewTransitions alternates one endpoint around the
// ejection threshold: hysteresis must keep its states apart.
func TestFlappingRiskMakesFewTransitions(t *testing.T) {
	f := quietPool(t, 10)
	changes := 0
	last := fleet.State(0)
	for i := range 3000 { // ten minutes
		f.members[0].sample.KVUsage = []float64{0.95, 0.95, 0.7}[i%3]
		if v := f.step()[0]; v.State != last {
			changes++
			last = v.State
		}
	}
	if changes > 3 {
		t.Fatalf("%d changes of state in ten minutes", changes)
	}
}

// TestSampleCountsOnce: ticks without a new sample must not turn one bad sample
// into two.
func TestSampleCountsOnce(t *testing.T) {
	f := quietPool(t, 4)
	for range 5 {
		f.step()
	}
	f.members[0].sample.KVUsage = 1
	f.step()
	f.members[0].silent = true
	for range 4 {
		if v := f.step()[0]; v.State == fleet.StateEjected {
			t.Fatal("one bad sample ejected")
		}
	}
}

func TestSecondBadSampleIsEnoughFromAnyStart(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := quietPool(t, 8)
		calm := rapid.Float64Range(0, 0.8).Draw(rt, "calm")
		for range rapid.IntRange(0, 30).Draw(rt, "ticks") {
			f.members[0].sample.KVUsage = calm
			f.step()
		}
		f.members[0].sample.KVUsage = rapid.Float64Range(math.Nextafter(float64(fleet.RiskEject), 1), 1).Draw(rt, "bad")
		if v := f.step()[0]; v.State == fleet.StateEjected {
			rt.Fatalf("ejected by the first bad sample: %+v", v)
		}
		if v := f.step()[0]; v.State != fleet.StateEjected || v.Weight != 0 {
			rt.Fatalf("not ejected by the second bad sample: %+v", v)
		}
	})
}

// jumpWall steps the wall clock of a time and leaves its monotonic reading.
func jumpWall(t *testing.T, base time.Time, by time.Duration) time.Time {
	t.Helper()
	jumped := base
	*(*uint64)(unsafe.Pointer(&jumped)) += uint64(int64(by/time.Second)) << 30
	if jumped.Sub(base) != 0 || jumped.Round(0).Sub(base.Round(0)) != by {
		t.Fatal("this Go's time.Time has another layout")
	}
	return jumped
}

func TestWallClockJumpsChangeNothing(t *testing.T) {
	play := func(by time.Duration) (all []Verdict) {
		f := quietPool(t, 6)
		f.members[0].sample.KVUsage = 0.95
		f.members[1].own.ConnectStreak = 3
		for i := range 200 {
			if i == 50 {
				f.now = jumpWall(t, f.now, by)
			}
			if i == 120 {
				f.members[0].sample.KVUsage, f.members[2].silent = 0.1, true
			}
			all = append(all, f.step()...)
		}
		return all
	}
	want := play(0)
	for _, by := range []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour} {
		for i, v := range play(by) {
			if v != want[i] {
				t.Fatalf("jump of %v: verdict %d is %+v, without the jump %+v", by, i, v, want[i])
			}
		}
	}
}

// TestTroubleOfAPoolIsNotAnEndpoints draws streaks and error shares: while a
// third of the pool, and more than one, shows trouble, nothing new is ejected as
// out of memory; one that fails alone is, at once.
func TestTroubleOfAPoolIsNotAnEndpoints(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := quietPool(t, rapid.IntRange(2, 24).Draw(rt, "n"))
		f.step()
		n := len(f.members)
		troubled := rapid.IntRange(1, n).Draw(rt, "troubled")
		for i := range troubled {
			own := &f.members[i].own
			if i > 0 && rapid.Bool().Draw(rt, "errors only") {
				own.Attempts5s = rapid.IntRange(2, 1000).Draw(rt, "attempts")
				own.Errors5s = max(2, (own.Attempts5s+19)/20)
			} else {
				own.OOMStreak = rapid.IntRange(2, 9).Draw(rt, "streak")
			}
		}
		f.members[0].own.OOMStreak = rapid.IntRange(3, 9).Draw(rt, "first")
		shared := troubled > 1 && 3*troubled >= n
		for i, v := range f.step() {
			switch {
			case shared && v.State == fleet.StateEjected:
				rt.Fatalf("%d of %d in trouble, and %d is %s by %s", troubled, n, i, v.State, v.Reason)
			case !shared && i == 0 && (v.State != fleet.StateEjected || v.Reason != ReasonOOM):
				rt.Fatalf("%d of %d in trouble, and the first is %s by %s", troubled, n, v.State, v.Reason)
			}
		}
	})
}

func TestPoolsDoNotTouchEachOther(t *testing.T) {
	f := quietPool(t, 2)
	judge, view := f.judge, func(pool string, ends []EndpointView) PoolView { return PoolView{Name: pool, Endpoints: ends} }
	var ends []EndpointView
	for _, e := range f.members {
		e.sample.At = f.now
		e.window.Add(e.sample)
		ends = append(ends, EndpointView{Address: e.address, Capacity: 1, Window: e.window})
	}
	judge.Step(f.now, []PoolView{view("x", ends), view("y", ends)})
	faulty := append([]EndpointView(nil), ends...)
	faulty[0].Own.OOMStreak = 3
	out := judge.Step(f.now, []PoolView{view("x", faulty), view("y", ends)})
	if len(out) != 4 || out[0].State != fleet.StateEjected || out[2].State == fleet.StateEjected ||
		out[2].Endpoint != (fleet.EndpointKey{Pool: "y", Address: ends[0].Address}) {
		t.Fatalf("%+v", out)
	}
}

// bigFleet is n endpoints in pools of 50 with full windows.
func bigFleet(n int) (pools []PoolView, advance func(now time.Time)) {
	for i := range n {
		if i%50 == 0 {
			pools = append(pools, PoolView{Name: fmt.Sprint("pool", i/50), MaxInFlight: 256})
		}
		p := &pools[len(pools)-1]
		p.Endpoints = append(p.Endpoints, EndpointView{
			Address:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000),
			Capacity: 1, Window: new(telemetry.Window), Own: Own{InFlight: 5},
		})
	}
	count := 0.0
	return pools, func(now time.Time) {
		count++
		for i := range pools {
			for k := range pools[i].Endpoints {
				pools[i].Endpoints[k].Window.Add(telemetry.Sample{
					At: now, Known: telemetry.HasKVUsage | telemetry.HasWaiting | telemetry.HasRunning | telemetry.HasKVTokens |
						telemetry.HasTTFT | telemetry.HasPromptTokens | telemetry.HasXID,
					KVUsage: float64(k%10) / 10, Running: 4, KVTokens: 400_000,
					TTFTSum: count, TTFTCount: 10 * count, PromptTokens: 1000 * count,
				})
			}
		}
	}
}

func TestStepAllocatesOnlyItsResult(t *testing.T) {
	pools, advance := bigFleet(200)
	j := NewJudge(Formula(FormulaOptions{}))
	now := time.Now()
	step := func() {
		now = now.Add(tick)
		advance(now)
		j.Step(now, pools)
	}
	for range 30 {
		step()
	}
	if n := testing.AllocsPerRun(50, step); n > 1 {
		t.Fatalf("%v allocations per tick, want 1: the verdicts", n)
	}
}

func BenchmarkStep1000Endpoints(b *testing.B) {
	pools, advance := bigFleet(1000)
	j := NewJudge(Formula(FormulaOptions{}))
	now := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		now = now.Add(tick)
		advance(now)
		b.StartTimer()
		j.Step(now, pools)
	}
}
