package telemetry

import (
	"math"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"
)

const tick = 200 * time.Millisecond

var start = time.Now()

// at is the moment of the i-th tick.
func at(i int) time.Time { return start.Add(time.Duration(i) * tick) }

func idle(i int) Sample {
	return Sample{At: at(i), Known: HasKVUsage | HasRunning | HasWaiting | HasGenerationTokens, GenerationTokens: 500}
}

func working(i int, generated float64) Sample {
	s := idle(i)
	s.Running, s.GenerationTokens = 3, generated
	return s
}

func TestWindowKeepsNewestSamplesOnly(t *testing.T) {
	var w Window
	if _, ok := w.Latest(); ok || w.Age(start) != Never || w.Len() != 0 {
		t.Fatal("an empty window knows something")
	}
	for i := range 3 * WindowTicks {
		w.Add(working(i, float64(i)))
	}
	latest, _ := w.Latest()
	if w.Len() != WindowTicks || latest.GenerationTokens != 3*WindowTicks-1 {
		t.Fatalf("len %d, latest %v", w.Len(), latest.GenerationTokens)
	}
	if oldest := w.back(w.Len() - 1); oldest.GenerationTokens != 2*WindowTicks {
		t.Fatalf("oldest %v", oldest.GenerationTokens)
	}
}

func TestIdleEngineDoesNotAge(t *testing.T) {
	var w Window
	for i := range 100 {
		w.Add(idle(i))
	}
	if age := w.Age(at(99)); age != 0 {
		t.Fatalf("age %v of an idle engine that still answers", age)
	}
	if age := w.Age(at(109)); age != 10*tick {
		t.Fatalf("age %v ten ticks after the last answer", age)
	}
	if moved := w.Moved(); !moved.Equal(at(0)) {
		t.Fatalf("moved at %v, want the first sample", moved.Sub(start))
	}
}

func TestFrozenNumbersWithWorkRunningAge(t *testing.T) {
	var w Window
	w.Add(working(0, 10))
	w.Add(working(1, 20))
	for i := 2; i < 20; i++ {
		w.Add(working(i, 20))
	}
	if age := w.Age(at(19)); age != 18*tick {
		t.Fatalf("age %v, want 18 ticks", age)
	}
	w.Add(working(20, 21))
	if age := w.Age(at(20)); age != 0 {
		t.Fatalf("age %v after the numbers moved again", age)
	}
}

func TestSampleWithoutEngineNumbersProvesNothing(t *testing.T) {
	var w Window
	w.Add(Sample{At: at(0), Known: HasXID})
	if w.Age(at(0)) != Never {
		t.Fatal("a GPU page alone counted as proof of a live engine")
	}
	w.Add(idle(1))
	w.Add(Sample{At: at(9), Known: HasXID, XID: 79})
	if age := w.Age(at(9)); age != 8*tick {
		t.Fatalf("age %v, want 8 ticks", age)
	}
}

func TestSourcesOwnChangedIsKept(t *testing.T) {
	var w Window
	s := working(5, 1)
	s.Changed = at(2)
	w.Add(s)
	if age := w.Age(at(5)); age != 3*tick {
		t.Fatalf("age %v, want 3 ticks", age)
	}
}

func TestOlderSampleIsIgnored(t *testing.T) {
	var w Window
	w.Add(working(5, 1))
	w.Add(working(3, 99))
	if s, _ := w.Latest(); w.Len() != 1 || s.GenerationTokens != 1 {
		t.Fatalf("len %d, latest %v", w.Len(), s.GenerationTokens)
	}
}

func TestLastBridgesABlankTick(t *testing.T) {
	var w Window
	s := idle(0)
	s.KVUsage = 0.4
	w.Add(s)
	blank := idle(1)
	blank.Known &^= HasKVUsage
	w.Add(blank)
	if got, ok := w.Last(HasKVUsage, at(1), time.Second); !ok || got.KVUsage != 0.4 {
		t.Fatalf("got %v %v", got, ok)
	}
	if _, ok := w.Last(HasKVUsage, at(4), 600*time.Millisecond); ok {
		t.Fatal("an old value passed for a young one")
	}
}

func TestCounterResetIsDroppedAndCounted(t *testing.T) {
	var w Window
	for i, v := range []float64{100, 150, 5, 25} {
		w.Add(working(i, v))
	}
	delta, resets, ok := w.Delta(HasGenerationTokens, 5*time.Second)
	if delta != 70 || resets != 1 || !ok {
		t.Fatalf("delta %v resets %v ok %v", delta, resets, ok)
	}
}

func TestMeanTTFT(t *testing.T) {
	var w Window
	for i := range 6 {
		w.Add(Sample{At: at(i), Known: HasTTFT, TTFTSum: float64(i) * 0.5, TTFTCount: float64(2 * i)})
	}
	mean, count, ok := w.MeanTTFT(time.Second)
	if !ok || mean != 250*time.Millisecond || count != 10 {
		t.Fatalf("%v %v %v", mean, count, ok)
	}
	w.Add(Sample{At: at(6), Known: HasTTFT})
	if _, _, ok := w.MeanTTFT(time.Second); ok {
		t.Fatal("a mean across a restart")
	}
}

func TestWindowAllocatesNothing(t *testing.T) {
	var w Window
	i := 0
	if n := testing.AllocsPerRun(1000, func() {
		w.Add(working(i, float64(i)))
		w.Age(at(i))
		w.GrowthBetween(HasKVUsage, 5*time.Second, time.Second)
		w.Delta(HasGenerationTokens, 5*time.Second)
		w.MeanTTFT(time.Second)
		i++
	}); n != 0 {
		t.Fatalf("%v allocations per tick", n)
	}
}

func BenchmarkWindowAdd(b *testing.B) {
	var w Window
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		w.Add(working(i, float64(i)))
	}
}

// jumpWall moves the wall clock of a time without touching its monotonic
// reading, as a step of the system's clock does. It relies on time.Time's
// layout and fails the test if that changes.
func jumpWall(t *testing.T, base time.Time, by time.Duration) time.Time {
	t.Helper()
	jumped := base
	*(*uint64)(unsafe.Pointer(&jumped)) += uint64(int64(by/time.Second)) << 30
	if jumped.Sub(base) != 0 || jumped.Round(0).Sub(base.Round(0)) != by {
		t.Fatalf("this Go's time.Time has another layout: wall clock moved by %v", jumped.Round(0).Sub(base.Round(0)))
	}
	return jumped
}

func TestWallClockJumpsDoNotChangeAges(t *testing.T) {
	for _, by := range []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour} {
		var w Window
		for i := range 10 {
			s := working(i, float64(i))
			if i >= 5 {
				s.At = jumpWall(t, s.At, by)
			}
			w.Add(s)
		}
		if w.Len() != 10 || w.Age(jumpWall(t, at(11), by)) != 2*tick {
			t.Fatalf("jump of %v: len %d, age %v", by, w.Len(), w.Age(jumpWall(t, at(11), by)))
		}
		if rate, ok := w.GrowthBetween(HasGenerationTokens, time.Second, 0); !ok || math.Abs(rate-5) > 1e-6 {
			t.Fatalf("jump of %v: rate %v", by, rate)
		}
	}
}

func TestWindowFiguresAreSane(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w Window
		now := 0
		for range rapid.IntRange(1, 60).Draw(t, "n") {
			now += rapid.IntRange(-1, 3).Draw(t, "step")
			s := working(now, rapid.Float64Range(0, 100).Draw(t, "tokens"))
			s.Known = Mask(rapid.Uint32Range(0, 1<<19-1).Draw(t, "known"))
			w.Add(s)
		}
		if w.Age(at(now)) < 0 {
			t.Fatal("negative age")
		}
		delta, resets, _ := w.Delta(HasGenerationTokens, 5*time.Second)
		if delta < 0 || resets < 0 || resets >= WindowTicks {
			t.Fatalf("delta %v resets %v", delta, resets)
		}
		if rate, ok := w.GrowthBetween(HasGenerationTokens, 5*time.Second, 0); ok && !(rate >= 0) {
			t.Fatalf("growth %v", rate)
		}
	})
}

func TestXIDClassesNamedByTheCatalogue(t *testing.T) {
	for code, want := range map[int]XIDClass{
		0: XIDHarmless, 43: XIDHarmless, 45: XIDHarmless, 99999: XIDHarmless, -1: XIDHarmless,
		31: XIDSuspect, 94: XIDDrain, 63: XIDDrain, 48: XIDEject, 79: XIDEject, 119: XIDEject,
	} {
		if got := ClassifyXID(code); got != want {
			t.Errorf("XID %d: class %d, want %d", code, got, want)
		}
	}
}

func TestXIDIsNewsOnlyWhenItAppears(t *testing.T) {
	var w Window
	add := func(i int, known Mask, code int) {
		w.Add(Sample{At: at(i), Known: known, XID: code})
	}
	expect := func(what string, code int, since time.Time) {
		t.Helper()
		if gotCode, gotSince := w.XID(); gotCode != code || !gotSince.Equal(since) {
			t.Fatalf("%s: code %d since %v", what, gotCode, gotSince)
		}
	}
	add(0, HasKVUsage, 0)
	add(1, HasXID, 48)
	expect("standing on the first page", 48, time.Time{})
	add(2, HasGPUUtil, 0)
	add(3, HasXID, 48)
	expect("back after a blank", 48, time.Time{})
	add(4, HasXID, 79)
	expect("another code", 79, at(4))
	add(5, HasXID, 0)
	add(6, HasXID, 79)
	expect("cleared and back", 79, at(6))

	w = Window{}
	add(7, HasGPUUtil, 0)
	add(8, HasGPUUtil|HasXID, 31)
	expect("a series that appears with its first event", 31, at(8))
}
