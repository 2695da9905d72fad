package features

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

const tick = 200 * time.Millisecond

// TestSchemaIsPinned: models carry this hash. A change of it needs every shipped
// model trained anew.
func TestSchemaIsPinned(t *testing.T) {
	if got, want := SchemaHash(), "d08058c5d3051b09"; got != want {
		t.Errorf("schema hash %s, want %s", got, want)
	}
	want := []string{
		"kv_usage", "kv_slope_1s", "kv_slope_5s", "alloc_rate_1s", "alloc_slope_1s", "alloc_std_5s", "queued_tokens_frac",
		"waiting", "running_frac", "inflight_delta", "arr_tokens_1s", "gr_active_1s", "util_slope_1s", "dram_active_1s",
		"pcie_sat_1s", "blocked_5s", "err_5s",
	}
	if got := Names(); !slices.Equal(got, want) {
		t.Errorf("names %v", got)
	}
	// The constants are the positions.
	for i, name := range map[int]string{KVUsage: "kv_usage", AllocStd5s: "alloc_std_5s", Waiting: "waiting", GRActive1s: "gr_active_1s", Errors5s: "err_5s"} {
		if All[i].Name != name {
			t.Errorf("feature %d is %s, want %s", i, All[i].Name, name)
		}
	}
	for _, f := range All {
		if f.Unit == "" || f.Doc == "" || f.Source < FromEngine || f.Source > FromOwn {
			t.Errorf("%+v is not described", f)
		}
	}
}

// busy is an engine at work on a GPU: every field is known, and the numbers
// follow the tick's number.
func busy(i int) telemetry.Sample {
	k := float64(i)
	return telemetry.Sample{
		At: at(i), Changed: at(i), Known: 1<<19 - 1,
		KVUsage: 0.30 + 0.02*k, Running: 100 + k, Waiting: 3, KVTokens: 400_000, MaxSeqs: 256, QueuedTokens: 8000,
		PromptTokens: 1000 * k, GenerationTokens: 700 * k, Preemptions: math.Floor(k / 8), TTFTSum: 0.3 * k, TTFTCount: k,
		GPUUtil: 0.99, GRActive: 0.5 + 0.01*k, DRAMActive: 0.6, PCIeShare: 0.1 + 0.05*float64(i%3),
		FBUsedMiB: 74_000, FBTotalMiB: 81_000, PowerWatts: 500,
	}
}

var start = time.Now()

func at(i int) time.Time { return start.Add(time.Duration(i) * tick) }

var someOwn = scorer.Own{InFlight: 140, SentPromptTokens: 4000, ArrivedPromptTokens: 20_000, Errors5s: 2, MaxInFlight: 200}

// play fills a window with n ticks of busy, each changed by change, which may
// take the sample away.
func play(n int, change func(i int, s *telemetry.Sample) bool) *telemetry.Window {
	w := new(telemetry.Window)
	for i := range n {
		s := busy(i)
		if change == nil || change(i, &s) {
			w.Add(s)
		}
	}
	return w
}

func TestGoldenVector(t *testing.T) {
	got := Extract(play(telemetry.WindowTicks, nil), someOwn, at(24))
	want := Vector{
		KVUsage:          0.78, // 0.30 + 24 · 0.02
		KVSlope1s:        0.1,  // 0.02 per 200 ms
		KVSlope5s:        0.1,
		AllocRate1s:      0.1, // no falls
		AllocSlope1s:     0,
		AllocStd5s:       0,
		QueuedTokensFrac: 0.03, // (4,000 sent + 8,000 in the engine) / 400,000
		Waiting:          3,
		RunningFrac:      124.0 / 256,
		InFlightDelta:    13,   // 140 − 124 − 3
		ArrivedTokens1s:  0.05, // 20,000 / 400,000
		GRActive1s:       0.715,
		UtilSlope1s:      0.05,
		DRAMActive1s:     0.6,
		PCIeSat1s:        0.2,
		Blocked5s:        3, // preemptions; the cache was never full
		Errors5s:         2,
	}
	for i := range got {
		if math.Abs(float64(got[i]-want[i])) > 1e-6 {
			t.Errorf("%s = %v, want %v", All[i].Name, got[i], want[i])
		}
	}
}

func TestSawtoothOfTheCache(t *testing.T) {
	// Up 0.04 in one tick, down 0.03 in the next: allocation goes on while the
	// usage hardly grows.
	w := play(telemetry.WindowTicks, func(i int, s *telemetry.Sample) bool {
		s.KVUsage = 0.3 + 0.01*float64(i/2)
		if i%2 == 1 {
			s.KVUsage += 0.04
		}
		return true
	})
	x := Extract(w, scorer.Own{}, at(24))
	// The last second has six samples and five steps: 19→20 down, 20→21 up,
	// 21→22 down, 22→23 up, 23→24 down.
	if got := float64(x[AllocRate1s]); math.Abs(got-0.08) > 1e-6 {
		t.Errorf("allocation rate %v, want two rises of 0.04 in 1 s", got)
	}
	if got := float64(x[AllocSlope1s]); math.Abs(got+0.04) > 1e-6 {
		t.Errorf("allocation slope %v, want two rises after three", got)
	}
	if got := float64(x[AllocStd5s]); math.Abs(got-0.1) > 1e-6 {
		t.Errorf("deviation %v, want that of rates of 0.2/s and 0/s in turn", got)
	}
	if x[KVSlope1s] >= 0.1 {
		t.Errorf("slope %v", x[KVSlope1s])
	}
}

func TestBlockedCountsPreemptionsAndStuckQueues(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(i int, s *telemetry.Sample)
		want   float32
	}{
		"a queue and a full cache":         {func(i int, s *telemetry.Sample) { s.Preemptions, s.KVUsage = 0, 0.9 }, 25},
		"a full cache and no queue":        {func(i int, s *telemetry.Sample) { s.Preemptions, s.KVUsage, s.Waiting = 0, 0.95, 0 }, 0},
		"a queue and a full batch":         {func(i int, s *telemetry.Sample) { s.Preemptions, s.KVUsage, s.Running = 0, 0.1, 256 }, 25},
		"both full count once":             {func(i int, s *telemetry.Sample) { s.Preemptions, s.KVUsage, s.Running = 0, 0.9, 300 }, 25},
		"preemptions alone":                {func(i int, s *telemetry.Sample) { s.Preemptions, s.KVUsage = float64(2*i), 0.1 }, 48},
		"a restart of the engine":          {func(i int, s *telemetry.Sample) { s.Preemptions, s.KVUsage = float64(100*(1-min(1, i/12))+i), 0.1 }, 23},
		"no such counter":                  {func(i int, s *telemetry.Sample) { s.Known &^= telemetry.HasPreemptions }, 0},
		"neither counter nor queue: known": {func(i int, s *telemetry.Sample) { s.Known &^= telemetry.HasPreemptions | telemetry.HasWaiting }, missing},
	} {
		t.Run(name, func(t *testing.T) {
			w := play(telemetry.WindowTicks, func(i int, s *telemetry.Sample) bool { tc.change(i, s); return true })
			if got := Extract(w, scorer.Own{}, at(24))[Blocked5s]; !same(got, tc.want) {
				t.Errorf("blocked %v, want %v", got, tc.want)
			}
		})
	}
}

func same(a, b float32) bool { return a == b || a != a && b != b }

// TestMissingWhen holds each feature's rule: the one thing taken away makes
// exactly these features missing.
func TestMissingWhen(t *testing.T) {
	engine := []int{KVUsage, KVSlope1s, KVSlope5s, AllocRate1s, AllocSlope1s, AllocStd5s, Waiting, RunningFrac, InFlightDelta, Blocked5s}
	kv := engine[:6]
	gpu := []int{GRActive1s, UtilSlope1s, DRAMActive1s, PCIeSat1s}
	all := append(append(slices.Clone(engine), gpu...), QueuedTokensFrac, ArrivedTokens1s)
	without := func(f telemetry.Mask) func(int, *telemetry.Sample) bool {
		return func(_ int, s *telemetry.Sample) bool { s.Known &^= f; return true }
	}
	blankTail := func(f telemetry.Mask, ticks int) func(int, *telemetry.Sample) bool {
		return func(i int, s *telemetry.Sample) bool {
			if i > 24-ticks {
				s.Known &^= f
			}
			return true
		}
	}
	for name, tc := range map[string]struct {
		ticks  int
		change func(int, *telemetry.Sample) bool
		own    func(*scorer.Own)
		age    time.Duration
		want   []int
	}{
		"nothing":                         {},
		"no window":                       {ticks: -1, want: all},
		"the last word is 600 ms old":     {age: scorer.FreshAge},
		"the last word is older":          {age: scorer.FreshAge + 1, want: append(slices.Clone(engine), gpu...)},
		"the engine's page stands still":  {change: func(i int, s *telemetry.Sample) bool { s.Changed = at(min(i, 20)); return true }, want: engine},
		"one sample":                      {ticks: 1, want: []int{KVSlope1s, KVSlope5s, AllocRate1s, AllocSlope1s, AllocStd5s, UtilSlope1s}},
		"two samples":                     {ticks: 2, want: []int{KVSlope1s, KVSlope5s, AllocSlope1s, AllocStd5s, UtilSlope1s}},
		"three samples":                   {ticks: 3, want: []int{KVSlope5s, AllocSlope1s, AllocStd5s}},
		"nine samples":                    {ticks: 9, want: []int{KVSlope5s, AllocStd5s}},
		"ten samples":                     {ticks: 10, want: []int{AllocStd5s}}, // nine rates
		"eleven samples":                  {ticks: 11},
		"no KV usage, but a framebuffer":  {change: without(telemetry.HasKVUsage), want: kv[:3]},
		"neither KV usage nor FB used":    {change: without(telemetry.HasKVUsage | telemetry.HasFBUsed), want: kv},
		"neither KV usage nor FB total":   {change: without(telemetry.HasKVUsage | telemetry.HasFBTotal), want: kv},
		"an FB total of 0":                {change: func(_ int, s *telemetry.Sample) bool { s.FBTotalMiB = 0; s.Known &^= telemetry.HasKVUsage; return true }, want: kv},
		"KV usage blank for 400 ms":       {change: blankTail(telemetry.HasKVUsage, 2)},
		"KV usage blank, FB stands still": {change: blankTail(telemetry.HasKVUsage, 4), want: kv},
		"no queue":                        {change: without(telemetry.HasWaiting), want: []int{Waiting, InFlightDelta}},
		"no batch":                        {change: without(telemetry.HasRunning), want: []int{RunningFrac, InFlightDelta}},
		"no largest batch, but our limit": {change: without(telemetry.HasMaxSeqs)},
		"neither": {change: without(telemetry.HasMaxSeqs), own: func(o *scorer.Own) { o.MaxInFlight = 0 },
			want: []int{RunningFrac}},
		"no cache size":                  {change: without(telemetry.HasKVTokens), want: []int{QueuedTokensFrac, ArrivedTokens1s}},
		"a cache size of 0":              {change: func(_ int, s *telemetry.Sample) bool { s.KVTokens = 0; return true }, want: []int{QueuedTokensFrac, ArrivedTokens1s}},
		"no preemptions":                 {change: without(telemetry.HasPreemptions)},
		"no DCGM":                        {change: without(telemetry.HasGRActive | telemetry.HasGPUUtil | telemetry.HasDRAMActive | telemetry.HasPCIe | telemetry.HasFBUsed | telemetry.HasFBTotal), want: gpu},
		"no profiling fields":            {change: without(telemetry.HasGRActive | telemetry.HasDRAMActive | telemetry.HasPCIe), want: []int{DRAMActive1s, PCIeSat1s}},
		"profiling blank for 600 ms":     {change: blankTail(telemetry.HasDRAMActive|telemetry.HasPCIe, 3)},
		"profiling blank for 800 ms":     {change: blankTail(telemetry.HasDRAMActive|telemetry.HasPCIe, 4), want: []int{DRAMActive1s, PCIeSat1s}},
		"an engine that never was there": {change: without(^telemetry.Mask(telemetry.HasGRActive | telemetry.HasGPUUtil | telemetry.HasDRAMActive | telemetry.HasPCIe)), want: append(slices.Clone(engine), QueuedTokensFrac, ArrivedTokens1s)},
		"numbers that are none":          {change: func(_ int, s *telemetry.Sample) bool { s.KVUsage, s.DRAMActive = math.NaN(), math.Inf(1); return true }, want: append(slices.Clone(kv), DRAMActive1s)},
		"beyond float32":                 {change: func(_ int, s *telemetry.Sample) bool { s.Waiting = 1e300; return true }, want: []int{Waiting, InFlightDelta}},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.ticks == 0 {
				tc.ticks = telemetry.WindowTicks
			}
			own := someOwn
			if tc.own != nil {
				tc.own(&own)
			}
			var w *telemetry.Window
			if tc.ticks > 0 {
				w = play(tc.ticks, func(i int, s *telemetry.Sample) bool {
					if s.Known = 1<<19 - 1; tc.change == nil {
						return true
					}
					return tc.change(i, s)
				})
			}
			x := Extract(w, own, at(tc.ticks-1).Add(tc.age))
			var got []int
			for i, v := range x {
				if v != v {
					got = append(got, i)
				}
			}
			slices.Sort(tc.want)
			if !slices.Equal(got, tc.want) {
				t.Errorf("missing %v, want %v", named(got), named(tc.want))
			}
		})
	}
}

func named(indexes []int) (out []string) {
	for _, i := range indexes {
		out = append(out, All[i].Name)
	}
	return out
}

// TestFramebufferStandsInForTheCache: of a server without a pool, such as one
// that allocates by request, the framebuffer shows the growth.
func TestFramebufferStandsInForTheCache(t *testing.T) {
	w := play(telemetry.WindowTicks, func(i int, s *telemetry.Sample) bool {
		s.Known &^= telemetry.HasKVUsage
		s.FBUsedMiB = 20_000 + 810*float64(i) // a hundredth of the total each tick
		return true
	})
	if got := Extract(w, scorer.Own{}, at(24))[AllocRate1s]; math.Abs(float64(got)-0.05) > 1e-6 {
		t.Errorf("allocation rate %v, want 0.05 of the framebuffer per second", got)
	}
	if got, ok := GrowthRate(w, telemetry.HasFBUsed, time.Second); !ok || math.Abs(got-0.05) > 1e-9 {
		t.Errorf("growth rate %v, %v", got, ok)
	}
	if _, ok := GrowthRate(w, telemetry.HasKVUsage, time.Second); ok {
		t.Error("a growth rate of a field that nobody told")
	}
	noTotal := play(5, func(_ int, s *telemetry.Sample) bool { s.Known &^= telemetry.HasFBTotal; return true })
	if got, ok := GrowthRate(noTotal, telemetry.HasFBUsed, time.Second); ok {
		t.Errorf("a share of an unknown total: %v", got)
	}
}

func TestQueuedTokensAreEstimatedWhereTheEngineDoesNotTellThem(t *testing.T) {
	w := play(telemetry.WindowTicks, func(_ int, s *telemetry.Sample) bool { s.Known &^= telemetry.HasQueuedTokens; return true })
	// Three waiting at the engine's own mean of 1,000 tokens, and 4,000 sent.
	if got := Extract(w, someOwn, at(24))[QueuedTokensFrac]; math.Abs(float64(got)-7000.0/400_000) > 1e-7 {
		t.Errorf("queued %v", got)
	}
	// Of a page that stands still only our own part counts.
	frozen := play(telemetry.WindowTicks, func(i int, s *telemetry.Sample) bool { s.Changed = at(min(i, 3)); return true })
	if got := Extract(frozen, someOwn, at(24))[QueuedTokensFrac]; math.Abs(float64(got)-0.01) > 1e-7 {
		t.Errorf("queued %v of a frozen page", got)
	}
}

func TestXIDCountsAsErrorsWhileItIsNews(t *testing.T) {
	w := play(30, func(i int, s *telemetry.Sample) bool {
		if i >= 20 {
			s.XID = 31
		}
		return true
	})
	for _, tc := range []struct {
		age  time.Duration
		want float32
	}{{0, 12}, {5 * time.Second, 12}, {5*time.Second + 1, 2}} {
		if got := Extract(w, someOwn, at(20).Add(tc.age))[Errors5s]; got != tc.want {
			t.Errorf("%v after the XID: %v errors, want %v", tc.age, got, tc.want)
		}
	}
}

func TestMegabytesPerSecond(t *testing.T) {
	// Llama-3.1-8B: 2 · 32 layers · 8 heads · 128 · 2 bytes = 131,072 a token.
	if got := MegabytesPerSecond(0.1, 400_000, 131_072); math.Abs(got-5242.88) > 1e-9 {
		t.Errorf("%v MB/s", got)
	}
}

func TestExtractAllocatesNothing(t *testing.T) {
	withKV := play(telemetry.WindowTicks, nil)
	withFB := play(telemetry.WindowTicks, func(_ int, s *telemetry.Sample) bool {
		s.Known &^= telemetry.HasKVUsage | telemetry.HasQueuedTokens
		return true
	})
	for name, w := range map[string]*telemetry.Window{"cache": withKV, "framebuffer": withFB, "nil": nil} {
		if n := testing.AllocsPerRun(100, func() { Extract(w, someOwn, at(24)) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func TestSourceNames(t *testing.T) {
	got := fmt.Sprint(FromEngine, FromGPU, FromOwn, Source(0), Source(99))
	if got != "engine gpu own invalid invalid" {
		t.Error(got)
	}
	if reflect.TypeFor[Vector]().Len() != Count || len(All) != Count {
		t.Error("the vector does not hold every feature")
	}
}
