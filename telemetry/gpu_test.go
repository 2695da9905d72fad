package telemetry

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestConditionFollowsTheDriversWord(t *testing.T) {
	recovery := func(a RecoveryAction) GPU { return GPU{Known: GPUHasRecovery, Recovery: a} }
	remap := func(failed, pending bool) GPU {
		return GPU{Known: GPUHasRemap, RemapFailed: failed, RemapPending: pending}
	}
	both := func(a RecoveryAction, failed, pending bool) GPU {
		return GPU{Known: GPUHasRecovery | GPUHasRemap, Recovery: a, RemapFailed: failed, RemapPending: pending}
	}
	for name, tc := range map[string]struct {
		gpu  GPU
		want Condition
	}{
		"nothing known":             {GPU{}, 0},
		"not known, whatever it is": {GPU{Recovery: RecoverReboot, RemapFailed: true}, 0},
		"no action":                 {recovery(RecoverNone), ConditionOK},
		"GPU reset (1)":             {recovery(1), ConditionEject},
		"reboot (2)":                {recovery(2), ConditionEject},
		"drain peer to peer (3)":    {recovery(3), ConditionDrain},
		"drain and reset (4)":       {recovery(4), ConditionEject},
		"IMEX (5)":                  {recovery(5), ConditionDrain},
		"bus reset (6)":             {recovery(6), ConditionEject},
		"system reboot (7)":         {recovery(7), ConditionEject},
		"a number NVML lacks (8)":   {recovery(8), 0},
		"no remap":                  {remap(false, false), ConditionOK},
		"remap pending":             {remap(false, true), ConditionDrain},
		"remap failed":              {remap(true, false), ConditionEject},
		"failed and pending":        {remap(true, true), ConditionEject},
		"reset, remap pending":      {both(RecoverGPUReset, false, true), ConditionEject},
		"drain, remap failed":       {both(RecoverDrainP2P, true, false), ConditionEject},
		"no action, remap pending":  {both(RecoverNone, false, true), ConditionDrain},
		"lost, no action":           {GPU{Lost: true, Known: GPUHasRecovery}, ConditionLost},
	} {
		if got := tc.gpu.Condition(); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
	if got := fmt.Sprint(Condition(0), ConditionOK, ConditionDrain, ConditionEject, ConditionLost, Condition(9)); got != "unknown ok drain eject lost unknown" {
		t.Error(got)
	}
}

func TestPCIeShareIsTheBusierDirections(t *testing.T) {
	const known = GPUHasPCIe | GPUHasPCIeLink
	for _, tc := range []struct {
		gpu  GPU
		want float64
		ok   bool
	}{
		{GPU{Known: known, PCIeTX: 8e9, PCIeRX: 16e9, PCIeLink: 64e9}, 0.25, true},
		{GPU{Known: known, PCIeTX: 80e9, PCIeLink: 64e9}, 1, true},
		{GPU{Known: known, PCIeTX: 8e9}, 0, false},
		{GPU{Known: GPUHasPCIe, PCIeTX: 8e9, PCIeLink: 64e9}, 0, false},
	} {
		if got, ok := tc.gpu.PCIeShare(); got != tc.want || ok != tc.ok {
			t.Errorf("%+v: %v, %v", tc.gpu, got, ok)
		}
	}
}

func TestEndpointTakesTheWorstOfItsGPUs(t *testing.T) {
	const known = GPUHasUtil | GPUHasGRActive | GPUHasDRAMActive | GPUHasPower | GPUHasFBUsed | GPUHasFBTotal |
		GPUHasPCIe | GPUHasPCIeLink | GPUHasXID | GPUHasRecovery
	gpus := []GPU{
		{Known: known, Util: 0.9, GRActive: 0.2, DRAMActive: 0.7, PowerWatts: 300, FBUsedMiB: 40_000, FBTotalMiB: 80_000,
			PCIeTX: 1e9, PCIeRX: 32e9, PCIeLink: 64e9, XID: 31, XIDEvents: 2},
		{Known: known, Util: 0.5, GRActive: 0.8, DRAMActive: 0.1, PowerWatts: 700, FBUsedMiB: 20_000, FBTotalMiB: 24_000,
			PCIeTX: 2e9, PCIeLink: 64e9, XID: 94, XIDEvents: 5, Recovery: RecoverDrainP2P},
	}
	s := Sample{Known: HasKVUsage | HasXID | HasPower, KVUsage: 0.4, XID: 79, PowerWatts: 9e9}
	s.SetGPUs(gpus)
	want := Sample{Known: HasKVUsage | gpuFields, KVUsage: 0.4, GPUUtil: 0.9, GRActive: 0.8, DRAMActive: 0.7, PowerWatts: 700,
		FBUsedMiB: 20_000, FBTotalMiB: 24_000, PCIeShare: 0.5, XID: 31, XIDEvents: 2, Condition: ConditionDrain}
	if s != want {
		t.Errorf("got  %+v\nwant %+v", s, want)
	}
	gpus[0].Lost = true
	s.SetGPUs(gpus)
	if s.Condition != ConditionLost || s.GPUUtil != 0.5 || s.XID != 94 {
		t.Errorf("with a lost GPU: %+v", s)
	}
	s.SetGPUs([]GPU{{Lost: true, Known: known, Util: 1, XID: 79}})
	if s != (Sample{Known: HasKVUsage | HasCondition, KVUsage: 0.4, Condition: ConditionLost}) {
		t.Errorf("of a lost GPU alone: %+v", s)
	}
	s.SetGPUs(nil)
	if s != (Sample{Known: HasKVUsage, KVUsage: 0.4}) {
		t.Errorf("of no GPU: %+v", s)
	}
}

func TestFramebufferIsTheFullestGPUs(t *testing.T) {
	used := func(v float64) GPU { return GPU{Known: GPUHasFBUsed, FBUsedMiB: v} }
	of := func(v, total float64) GPU {
		return GPU{Known: GPUHasFBUsed | GPUHasFBTotal, FBUsedMiB: v, FBTotalMiB: total}
	}
	for name, tc := range map[string]struct {
		gpus        []GPU
		used, total float64
	}{
		"larger share, not larger use": {[]GPU{of(40, 80), of(20, 24)}, 20, 24},
		"totals unknown":               {[]GPU{used(10), used(30), used(20)}, 30, 0},
		"known before unknown":         {[]GPU{of(1, 100), used(90_000)}, 1, 100},
		"unknown before known":         {[]GPU{used(90_000), of(1, 100)}, 1, 100},
		"a total of 0 is none":         {[]GPU{of(5, 0)}, 5, 0},
		"an empty one":                 {[]GPU{of(0, 80)}, 0, 80},
		"not a number":                 {[]GPU{of(math.NaN(), 80), of(3, 80)}, 3, 80},
	} {
		var s Sample
		s.SetGPUs(tc.gpus)
		if s.FBUsedMiB != tc.used || s.FBTotalMiB != tc.total || !s.Known.Has(HasFBUsed) || s.Known.Has(HasFBTotal) != (tc.total > 0) {
			t.Errorf("%s: used %v of %v, known %b", name, s.FBUsedMiB, s.FBTotalMiB, s.Known)
		}
	}
}

// TestOrderOfGPUsDoesNotMatter, nor does a GPU twice change any level.
func TestOrderOfGPUsDoesNotMatter(t *testing.T) {
	one := rapid.Custom(func(t *rapid.T) GPU {
		number := func(name string, most int) float64 { return float64(rapid.IntRange(0, most).Draw(t, name)) }
		return GPU{
			Known: GPUMask(rapid.Uint32Range(0, 1<<17-1).Draw(t, "known")), Lost: rapid.IntRange(0, 9).Draw(t, "lost") == 0,
			Util: number("util", 100) / 100, GRActive: number("gr", 100) / 100, DRAMActive: number("dram", 100) / 100,
			PowerWatts: number("power", 700), FBUsedMiB: number("used", 4), FBTotalMiB: number("total", 4),
			PCIeTX: number("tx", 9), PCIeRX: number("rx", 9), PCIeLink: number("link", 9),
			XID: rapid.SampledFrom([]int{0, 31, 43, 48, 79, 94}).Draw(t, "xid"), XIDEvents: number("events", 3),
			Recovery: RecoveryAction(number("recovery", 9)), RemapFailed: rapid.Bool().Draw(t, "failed"), RemapPending: rapid.Bool().Draw(t, "pending"),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		gpus := rapid.SliceOfN(one, 0, 5).Draw(t, "gpus")
		var a, b Sample
		a.SetGPUs(gpus)
		b.SetGPUs(rapid.Permutation(gpus).Draw(t, "order"))
		// Two GPUs with the same share in use may have different sizes.
		if a.FBTotalMiB > 0 && a.FBUsedMiB/a.FBTotalMiB == b.FBUsedMiB/b.FBTotalMiB {
			b.FBUsedMiB, b.FBTotalMiB = a.FBUsedMiB, a.FBTotalMiB
		}
		if a != b {
			t.Fatalf("one order %+v\nanother   %+v", a, b)
		}
		if a.Known&^gpuFields != 0 || a.Known.Has(HasCondition) != (a.Condition != 0) {
			t.Fatalf("known %b, condition %s", a.Known, a.Condition)
		}
	})
}

func TestSetGPUsAllocatesNothing(t *testing.T) {
	gpus := make([]GPU, 8)
	for i := range gpus {
		gpus[i] = GPU{Known: 1<<17 - 1, Util: 0.5, FBUsedMiB: 1, FBTotalMiB: 2, XID: 31}
	}
	var s Sample
	if n := testing.AllocsPerRun(100, func() { s.SetGPUs(gpus) }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// TestXIDsOfSeveralGPUs plays the events of two GPUs into one endpoint's window:
// only an event of the gravest class that stands is news.
func TestXIDsOfSeveralGPUs(t *testing.T) {
	var w Window
	n := 0
	say := func(a, b GPU) bool {
		_, before := w.XID()
		s := Sample{At: at(n)}
		s.SetGPUs([]GPU{a, b})
		w.Add(s)
		n++
		_, since := w.XID()
		return !since.Equal(before)
	}
	xid := func(code int, events float64) GPU { return GPU{Known: GPUHasXID, XID: code, XIDEvents: events} }
	for i, step := range []struct {
		a, b GPU
		news bool
		what string
	}{
		{xid(48, 0), xid(0, 0), false, "a code that stood when first seen"},
		{xid(48, 0), xid(31, 1), false, "a dead process beside a GPU that has long shown 48"},
		{xid(48, 1), xid(31, 1), true, "48 again"},
		{xid(48, 1), xid(79, 2), true, "the other falls off the bus"},
		{xid(48, 1), xid(43, 3), false, "79 gives way to a harmless code: 48 was known"},
		{xid(48, 1), xid(79, 4), true, "79 again"},
		{xid(31, 2), xid(79, 4), false, "48 gives way to a lesser code"},
		{xid(0, 0), xid(0, 0), false, "the source began anew"},
		{xid(0, 0), xid(31, 1), true, "its first event"},
	} {
		if got := say(step.a, step.b); got != step.news {
			t.Errorf("step %d, %s: news %v, want %v", i, step.what, got, step.news)
		}
	}
}
