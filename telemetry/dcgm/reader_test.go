package dcgm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// scripted is an engine without DCGM, for what needs no library: it samples each
// field at the moment it is read.
type scripted struct {
	mu      sync.Mutex
	there   topology
	openErr error
	readErr error
	hang    chan struct{} // reads wait until it is closed
	values  map[slot]float64
	xidBits uint64        // with a fresh stamp at each read; none if 0
	skew    time.Duration // of the engine's clock
	energy  float64
	inside  int
	opens   int
	looks   int // at XIDs
	reads   int // of a whole GPU's values
	slow    int // those of them that took the slow fields too
}

func newScripted(gpus int) *scripted {
	s := &scripted{values: map[slot]float64{}}
	for i := range gpus {
		s.there.gpus = append(s.there.gpus, uint32(i))
	}
	return s
}

func (s *scripted) enter() func() {
	s.mu.Lock()
	s.inside++
	if s.inside > 1 {
		panic("two calls at once")
	}
	hang := s.hang
	s.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return func() {
		s.mu.Lock()
		s.inside--
		s.mu.Unlock()
	}
}

func (s *scripted) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *scripted) open(host) error {
	defer s.enter()()
	s.opens++
	return s.openErr
}

func (s *scripted) close() error { return nil }

func (s *scripted) topology() (topology, error) {
	defer s.enter()()
	return topology{gpus: slices.Clone(s.there.gpus), instances: slices.Clone(s.there.instances)}, s.readErr
}

func (s *scripted) group(string, []entity) (groupRef, error) { return 1, nil }
func (s *scripted) dropGroup(groupRef)                       {}
func (s *scripted) watch(_ groupRef, _ string, ids []fieldID, _, _ time.Duration, _ int) (watchRef, error) {
	return watchRef(ids[0]), nil
}
func (s *scripted) rewatch(watchRef) error { return nil }
func (s *scripted) dropWatch(watchRef)     {}

func (s *scripted) latest(entities []entity, ids []fieldID, _ bool, to []sample) ([]sample, error) {
	defer s.enter()()
	if s.readErr != nil {
		return to, s.readErr
	}
	s.energy++
	s.reads++
	if slices.Contains(ids, fields[slotDBE].id) {
		s.slow++
	}
	for _, e := range entities {
		for _, id := range ids {
			at := slotOf[id]
			v := sample{entity: e, field: id, kind: typeDouble, stamp: time.Now().Add(s.skew).UnixMicro(), bits: math.Float64bits(s.values[at])}
			switch at {
			case slotUUID:
				v.kind, v.text = typeText, fmt.Sprintf("GPU-%d", e.id)
			case slotName:
				v.kind, v.text = typeText, "a GPU"
			case slotEnergy:
				v.bits = math.Float64bits(s.energy)
			case slotXID:
				v.kind, v.bits = typeInt, s.xidBits
				if s.xidBits == 0 {
					v.status = -14 // DCGM_ST_NO_DATA
				}
			}
			to = append(to, v)
		}
	}
	return to, nil
}

func (s *scripted) since(w watchRef, _ int64, to []sample) ([]sample, error) {
	if fieldID(w) == fields[slotXID].id {
		s.looks++
	}
	return to, nil
}

func (s *scripted) gpuStatus(uint32) int { return 1 }

// runScripted runs a source over the engine; frames arrive one at a time.
func runScripted(t *testing.T, e *scripted, o Options) (next func() telemetry.GPUFrame, source *Source, stop func() error) {
	t.Helper()
	source, err := newSource(o, func() engine { return e })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	frames, ended := make(chan telemetry.GPUFrame), make(chan error, 1)
	go func() {
		ended <- source.Run(ctx, func(f telemetry.GPUFrame) {
			select {
			case frames <- f:
			case <-ctx.Done():
			}
		})
	}()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = stop() })
	return func() telemetry.GPUFrame { return <-frames }, source, stop
}

func TestWatchdogSpeaksOncePerDeadlineAndStartsNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newScripted(1)
		next, source, _ := runScripted(t, e, Options{})
		first := next()
		if first.Err != nil || first.Epoch != 1 {
			t.Fatalf("first frame %+v", first)
		}
		hang := make(chan struct{})
		e.change(func() { e.hang = hang })
		for i := 1; i <= 5; i++ {
			f := next()
			// The next read begins 200 ms after the first; the deadline is a second.
			want := 200*time.Millisecond + time.Duration(i)*time.Second
			if at := f.At.Sub(first.At); !errors.Is(f.Err, ErrSlow) || at != want || f.Epoch != 1 || len(f.GPUs) != 0 {
				t.Errorf("frame %d after %v: %+v; want that it is slow, after %v", i, at, f, want)
			}
			if text := fmt.Sprintf("engine slow: no answer for %ds", i); f.Err.Error() != text {
				t.Errorf("frame %d says %q; want %q", i, f.Err, text)
			}
		}
		e.change(func() { e.hang = nil })
		close(hang)
		// The answer of the call that hung: what it brings is as old as the call.
		f := next()
		if f.Err != nil || len(f.GPUs) != 1 || f.GPUs[0].Known != 0 || f.At.Sub(first.At) < 5*time.Second {
			t.Errorf("the late frame: %+v; want one of now, with nothing known", f)
		}
		f = next()
		if f.Err != nil || !f.GPUs[0].Known.Has(telemetry.GPUHasPower) {
			t.Errorf("the frame after: %+v", f)
		}
		if s := source.Stats(); s.Late != 1 || s.Connects != 1 || s.Reads != 3 {
			t.Errorf("stats %+v; want one late read of three", s)
		}
	})
}

func TestRunEndsWithinASecondWhileACallHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newScripted(1)
		next, source, stop := runScripted(t, e, Options{})
		next()
		hang := make(chan struct{})
		e.change(func() { e.hang = hang })
		next() // slow
		begun := time.Now()
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(begun); took > partingWhenLate {
			t.Errorf("Run ended after %v; want at most %v", took, partingWhenLate)
		}
		if err := source.Run(t.Context(), nil); err == nil {
			t.Error("a second reader is let in while a call hangs")
		}
		close(hang)
		synctest.Wait()
		if inUse.Load() {
			t.Error("the call returned, but its goroutine did not end")
		}
	})
}

func TestRunEndsAtOnceWhileItWaitsToConnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newScripted(1)
		e.openErr = errors.New("no host engine")
		next, _, stop := runScripted(t, e, Options{})
		if f := next(); !errors.Is(f.Err, errConnect) || f.Epoch != 0 {
			t.Errorf("frame %+v", f)
		}
		begun := time.Now()
		if err := stop(); !errors.Is(err, context.Canceled) || time.Since(begun) != 0 {
			t.Errorf("Run returned %v after %v", err, time.Since(begun))
		}
	})
}

func TestUnknownFailuresEndTheConnectionAfterAFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newScripted(1)
		next, source, _ := runScripted(t, e, Options{})
		next()
		e.change(func() { e.readErr = errors.New("odd") })
		for range maxFailures {
			if f := next(); f.Err == nil || f.Epoch != 1 {
				t.Fatalf("frame %+v", f)
			}
		}
		e.change(func() { e.readErr = nil })
		if f := next(); f.Err != nil || f.Epoch != 2 {
			t.Errorf("frame %+v; want a new epoch", f)
		}
		if s := source.Stats(); s.Failed[CauseOther] != maxFailures || s.Connects != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestSlowFieldsAreReadOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newScripted(1)
		next, _, stop := runScripted(t, e, Options{})
		for range 26 {
			next()
		}
		_ = stop()
		if e.reads != 26 || e.slow != 6 {
			t.Errorf("%d reads in 5 s, %d of them of the slow fields; want 26 and 6", e.reads, e.slow)
		}
	})
}

func TestNoVerdictOnGPUsWhereNoneIsSeen(t *testing.T) {
	n := newNode(defaultInterval, &counters{})
	n.known["GPU-0"] = &remembered{}
	n.begin(topology{})
	if f := n.frame(time.Now()); len(f.GPUs) != 0 {
		t.Errorf("frame %+v; want no GPU", f)
	}
}

func TestBlankXIDsAreNoReasonToLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newScripted(1)
		e.xidBits = blankInt64 + 2
		next, _, stop := runScripted(t, e, Options{})
		for range 20 {
			next()
		}
		_ = stop()
		if e.looks != 1 {
			t.Errorf("the kept XIDs were read %d times; want once", e.looks)
		}
	})
}

func TestSkewIsReportedFromASecondOn(t *testing.T) {
	for _, c := range []struct {
		skew   time.Duration
		skewed bool
	}{{0, false}, {900 * time.Millisecond, false}, {-900 * time.Millisecond, false}, {1100 * time.Millisecond, true}, {-time.Hour, true}} {
		synctest.Test(t, func(t *testing.T) {
			e := newScripted(1)
			e.skew = c.skew
			next, source, _ := runScripted(t, e, Options{})
			next()
			if f := next(); f.Err != nil || !f.GPUs[0].Known.Has(telemetry.GPUHasPower) {
				t.Errorf("skew %v: %+v", c.skew, f)
			}
			if s := source.Stats(); s.Skew != c.skew || s.Skewed != c.skewed {
				t.Errorf("skew %v is reported as %v, %v; want %v", c.skew, s.Skew, s.Skewed, c.skewed)
			}
		})
	}
}

func TestInstanceTakesItsParentsUUIDWhereDCGMGivesNone(t *testing.T) {
	n := newNode(defaultInterval, &counters{})
	n.begin(topology{gpus: []uint32{0}, instances: []instance{{id: 3, nvml: 1}}})
	now := time.Now()
	if f := n.frame(now); len(f.GPUs) != 0 {
		t.Errorf("frame %+v; want no GPU without a UUID", f)
	}
	n.absorb([]sample{{entity: entity{groupGPU, 0}, field: fields[slotUUID].id, kind: typeText, stamp: 1, text: "GPU-0"}}, now)
	if f := n.frame(now); len(f.GPUs) != 1 || f.GPUs[0].ID != "GPU-0/1" {
		t.Errorf("frame %+v; want the instance GPU-0/1", f)
	}
}

func TestInstanceWithoutAProfileNameIsNamedByItsSize(t *testing.T) {
	a := topology{gpus: []uint32{0}, instances: []instance{{id: 3, uuid: "GPU-0", nvml: 1, shape: [2]uint{19, 1}}}}
	b := topology{gpus: []uint32{0}, instances: []instance{{id: 3, uuid: "GPU-0", nvml: 1, shape: [2]uint{14, 2}, profile: "2g.20gb"}}}
	if got := a.instances[0].name(); got != "1g.profile19" {
		t.Errorf("name %q", got)
	}
	if a.same(b) || !a.same(a) {
		t.Error("instances of another size are the same")
	}
}

// FuzzNode feeds a node what no library should say; whatever it is, what is
// called known is finite and in range.
func FuzzNode(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})
	f.Add([]byte{255, 'd', 0, 0, 0, 0, 0, 0, 0, 0xe0, 0x42})
	f.Fuzz(func(t *testing.T, data []byte) {
		n := newNode(defaultInterval, &counters{})
		n.begin(topology{gpus: []uint32{0, 1}, instances: []instance{{id: 9, gpu: 1, uuid: "GPU-1"}}})
		now := time.Now()
		for len(data) >= 14 {
			var bits uint64
			for _, b := range data[5:13] {
				bits = bits<<8 | uint64(b)
			}
			s := sample{
				entity: entity{data[0], uint32(data[1] % 10)}, field: fields[int(data[2])%len(fields)].id,
				kind: "idstb"[data[3]%5], status: int(int8(data[4])) / 64, stamp: int64(data[13]) << 13, bits: bits, text: string(data[5:9]),
			}
			data = data[14:]
			n.absorb([]sample{s}, now)
			n.processes([]sample{s}, now)
			now = now.Add(time.Duration(data0(data)) * 20 * time.Millisecond)
			n.blankWatches()
			n.settle()
			for _, g := range n.frame(now).GPUs {
				for _, v := range []float64{g.Util, g.GRActive, g.SMActive, g.TensorActive, g.DRAMActive} {
					if !(v >= 0 && v <= 1) {
						t.Fatalf("activity %v: %+v", v, g)
					}
				}
				for _, v := range []float64{g.FBUsedMiB, g.FBTotalMiB, g.PowerWatts, g.EnergyJoules, g.PCIeTX, g.PCIeRX, g.PCIeLink, g.DBE} {
					if !(v >= 0 && v <= 1e16) {
						t.Fatalf("number %v: %+v", v, g)
					}
				}
			}
		}
	})
}

func data0(data []byte) byte {
	if len(data) == 0 {
		return 0
	}
	return data[0]
}

// BenchmarkFrame is what a read costs beside DCGM: eight GPUs, the fields of a
// tick.
func BenchmarkFrame(b *testing.B) {
	e := newScripted(8)
	n := newNode(defaultInterval, &counters{})
	n.begin(e.there)
	var ids []fieldID
	for i := range fields {
		ids = append(ids, fields[i].id)
	}
	entities := n.entities(wholeGPU)
	samples, _ := e.latest(entities, ids, false, nil)
	now := time.Now()
	n.absorb(samples, now)
	b.ReportAllocs()
	for b.Loop() {
		for i := range samples {
			samples[i].stamp += 200_000
		}
		now = now.Add(200 * time.Millisecond)
		n.absorb(samples, now)
		if f := n.frame(now); len(f.GPUs) != 8 {
			b.Fatal(len(f.GPUs))
		}
	}
}
