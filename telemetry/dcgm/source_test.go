//go:build dcgm && cgo && linux

package dcgm

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/fakedcgm"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// running is a source that reads the fake library. Frames are handed over one
// at a time: between two of them the test may change the script.
type running struct {
	*testing.T
	script *fakedcgm.Script
	source *Source
	frames chan telemetry.GPUFrame
	stop   context.CancelFunc
	ended  chan error
}

// start runs a source in the test's bubble: its clock stands still while
// someone works, so a second passes in no time, and the library's own clock,
// which does not, tells other times. Ages must not care.
func start(t *testing.T, script *fakedcgm.Script, o Options) *running {
	t.Helper()
	if o.Host == "" {
		o.Host = "127.0.0.1:5555"
	}
	source, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	r := &running{T: t, script: script, source: source, frames: make(chan telemetry.GPUFrame), stop: stop, ended: make(chan error, 1)}
	r.write()
	go func() {
		r.ended <- source.Run(ctx, func(f telemetry.GPUFrame) {
			select {
			case r.frames <- f:
			case <-ctx.Done():
			}
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-r.ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run returned %v; want that the context was cancelled", err)
		}
	})
	return r
}

// write gives the library the script as it stands.
func (r *running) write() {
	r.Helper()
	if err := r.script.Write(os.Getenv(fakedcgm.ScriptVariable)); err != nil {
		r.Fatal(err)
	}
}

func (r *running) next() telemetry.GPUFrame { return <-r.frames }

// well returns the next frame, which must be one without an error.
func (r *running) well() telemetry.GPUFrame {
	r.Helper()
	f := r.next()
	if f.Err != nil {
		r.Fatalf("frame: %v", f.Err)
	}
	return f
}

// skip passes over n frames and returns the one after.
func (r *running) skip(n int) telemetry.GPUFrame {
	for range n {
		r.next()
	}
	return r.next()
}

// await returns the first frame that ok accepts, of at most n.
func (r *running) await(n int, what string, ok func(telemetry.GPUFrame) bool) telemetry.GPUFrame {
	r.Helper()
	var f telemetry.GPUFrame
	for range n {
		if f = r.next(); ok(f) {
			return f
		}
	}
	r.Fatalf("no frame of %d: %s; the last: %+v; stats %+v", n, what, f, r.source.Stats())
	return f
}

func find(t *testing.T, f telemetry.GPUFrame, id string) telemetry.GPU {
	t.Helper()
	for _, g := range f.GPUs {
		if g.ID == id {
			return g
		}
	}
	t.Fatalf("no GPU %s in the frame: %+v", id, f)
	return telemetry.GPU{}
}

const everything = telemetry.GPUHasUtil | telemetry.GPUHasGRActive | telemetry.GPUHasSMActive | telemetry.GPUHasTensorActive |
	telemetry.GPUHasDRAMActive | telemetry.GPUHasFBUsed | telemetry.GPUHasFBTotal | telemetry.GPUHasPower | telemetry.GPUHasEnergy |
	telemetry.GPUHasTemperatureMargin | telemetry.GPUHasThrottle | telemetry.GPUHasPCIe | telemetry.GPUHasPCIeLink |
	telemetry.GPUHasXID | telemetry.GPUHasRecovery | telemetry.GPUHasDBE | telemetry.GPUHasRemap

// bubble runs a test with fake time.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, test)
}

func TestSourceReadsEveryField(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(2).Process(0, 4242).Process(1, 4242).Process(1, 77)
		r := start(t, script, Options{})
		f := r.well()
		if f.Epoch != 1 || len(f.GPUs) != 2 {
			t.Fatalf("epoch %d with %d GPUs; want epoch 1 with 2", f.Epoch, len(f.GPUs))
		}
		g := find(t, f, fakedcgm.UUID(1))
		if g.Known != everything {
			t.Errorf("known %b; want %b", g.Known, everything)
		}
		want := telemetry.GPU{
			ID: fakedcgm.UUID(1), Model: "NVIDIA H100 80GB HBM3", At: g.At, Known: everything,
			Util: 0.8, GRActive: 0.7, SMActive: 0.5, TensorActive: 0.25, DRAMActive: 0.4,
			FBUsedMiB: 75000, FBTotalMiB: 81000, PowerWatts: 420, EnergyJoules: g.EnergyJoules,
			TemperatureMargin: 30, PCIeTX: 1e9, PCIeRX: 2e9, PCIeLink: 32e9 * 128 / 130 / 8 * 16,
		}
		if g != want {
			t.Errorf("got  %+v\nwant %+v", g, want)
		}
		if g.EnergyJoules < 1e6 {
			t.Errorf("energy %v J; want at least the counter's start, a million", g.EnergyJoules)
		}
		if age := f.At.Sub(g.At); age < 0 || age > time.Second {
			t.Errorf("the newest value is %v old", age)
		}
		if p := f.Processes; len(p) != 2 || strings.Join(p[4242], " ") != fakedcgm.UUID(0)+" "+fakedcgm.UUID(1) || strings.Join(p[77], " ") != fakedcgm.UUID(1) {
			t.Errorf("processes %v", p)
		}
		if g.Condition() != telemetry.ConditionOK {
			t.Errorf("condition %v", g.Condition())
		}
	})
}

func TestBlankIsUnknownAndLeavesTheRest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		r := start(t, script, Options{})
		r.well()
		for _, word := range []string{"blank", "notfound", "notsupported", "noperm"} {
			script.Value(fakedcgm.EntityGPU, 0, fakedcgm.FieldUtil, 'i', 0, 0, word)
			script.Value(fakedcgm.EntityGPU, 0, fakedcgm.FieldPower, 'd', 0, 0, word)
			script.Value(fakedcgm.EntityGPU, 0, fakedcgm.FieldDRAMActive, 'd', 0, 0, word)
			script.Value(fakedcgm.EntityGPU, 0, fakedcgm.FieldName, 's', 0, 0, "<<<NOT_SUPPORTED>>>")
			r.write()
			g := r.well().GPUs[0]
			if want := everything &^ (telemetry.GPUHasUtil | telemetry.GPUHasDRAMActive); g.Known != want {
				t.Errorf("%s: known %b; want %b", word, g.Known, want)
			}
			if g.PowerWatts != 410 {
				t.Errorf("%s: power %v W; want the mean of the second, 410", word, g.PowerWatts)
			}
			if g.Util != 0 || g.DRAMActive != 0 || g.Model == "" {
				t.Errorf("%s: %+v", word, g)
			}
		}
		// 32-bit blanks in 64-bit fields.
		script.Int(0, fakedcgm.FieldFBUsed, 0x7ffffff2)
		r.write()
		if g := r.well().GPUs[0]; g.Known.Has(telemetry.GPUHasFBUsed) {
			t.Errorf("32-bit blank counts as %v MiB", g.FBUsedMiB)
		}
		script.Default(fakedcgm.EntityGPU, 0, fakedcgm.FieldFBUsed).NoData(fakedcgm.EntityGPU, 0, fakedcgm.FieldThrottle)
		r.write()
		if g := r.well().GPUs[0]; g.Known.Has(telemetry.GPUHasThrottle) || !g.Known.Has(telemetry.GPUHasFBUsed) {
			t.Errorf("without a sample of the throttle bits: known %b", g.Known)
		}
		if n := r.source.Stats().NoData; n != 1 {
			t.Errorf("%d samples without data counted; want 1", n)
		}
		if s := r.source.Stats(); s.Blank < 13 {
			t.Errorf("%d blanks counted; want at least 13", s.Blank)
		}
	})
}

func TestAbsurdValueIsRefusedAndTheLastGoodOneStandsASecond(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		r := start(t, script, Options{})
		r.well()
		script.Int(0, fakedcgm.FieldUtil, 334905)
		r.write()
		for tick := 1; tick <= 4; tick++ {
			if g := r.well().GPUs[0]; !g.Known.Has(telemetry.GPUHasUtil) || g.Util != 0.8 {
				t.Fatalf("tick %d: utilisation %v, known %v; want 0.8", tick, g.Util, g.Known.Has(telemetry.GPUHasUtil))
			}
		}
		r.well() // after exactly a second, give or take a microsecond
		if g := r.well().GPUs[0]; g.Known.Has(telemetry.GPUHasUtil) {
			t.Errorf("after 1.2 s utilisation is still known: %v", g.Util)
		}
		if s := r.source.Stats(); s.OutOfRange != 6 {
			t.Errorf("%d values out of range; want 6", s.OutOfRange)
		}
	})
}

func TestWhatIsMadeOfNumbers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1).Double(0, fakedcgm.FieldSMActive, 1.03).Int(0, fakedcgm.FieldLinkWidth, 8).
			Int(0, fakedcgm.FieldThrottle, 0x24).Int(0, fakedcgm.FieldDBE, 2).Int(0, fakedcgm.FieldRemapPending, 1).
			Int(0, fakedcgm.FieldRecoveryAction, 3).Int(0, fakedcgm.FieldMargin, -4).Int(0, fakedcgm.FieldEnergy, 0)
		r := start(t, script, Options{})
		// Beyond two seconds too: an energy counter at zero is none, not one that stands.
		g := r.skip(20).GPUs[0]
		want := telemetry.GPU{
			ID: g.ID, Model: g.Model, At: g.At, Known: everything,
			Util: 0.8, GRActive: 0.7, SMActive: 1, TensorActive: 0.25, DRAMActive: 0.4,
			FBUsedMiB: 75000, FBTotalMiB: 81000, PowerWatts: 420, TemperatureMargin: -4,
			Throttle: telemetry.ThrottleSWThermal | 0x4, PCIeTX: 1e9, PCIeRX: 2e9, PCIeLink: 32e9 * 128 / 130 / 8 * 8,
			Recovery: telemetry.RecoverDrainP2P, DBE: 2, RemapPending: true,
		}
		if g != want {
			t.Errorf("got  %+v\nwant %+v", g, want)
		}
		if g.Condition() != telemetry.ConditionDrain {
			t.Errorf("condition %v; want drain", g.Condition())
		}
	})
}

func TestOldValueIsStaleAtFirstSight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1).Value(fakedcgm.EntityGPU, 0, fakedcgm.FieldDRAMActive, 'd', 0, 9*time.Second, "0.3")
		r := start(t, script, Options{})
		if g := r.well().GPUs[0]; g.Known.Has(telemetry.GPUHasDRAMActive) || !g.Known.Has(telemetry.GPUHasSMActive) {
			t.Errorf("known %b; want all but the nine seconds old DRAM activity", g.Known)
		}
		if s := r.source.Stats(); s.Stale == 0 {
			t.Error("no stale value counted")
		}
	})
}

func TestValueWithAStandingStampGoesStale(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		r := start(t, script, Options{})
		r.well()
		script.Standing(fakedcgm.EntityGPU, 0, fakedcgm.FieldSMActive, 'd', time.Hour, "0.9")
		r.write()
		r.await(7, "SM activity unknown, the rest known", func(f telemetry.GPUFrame) bool {
			return f.GPUs[0].Known == everything&^telemetry.GPUHasSMActive
		})
	})
}

func TestFrozenHostEngineMakesEverythingStaleAndRecovers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(2)
		r := start(t, script, Options{})
		r.well()
		script.Freeze(true)
		r.write()
		last := r.await(20, "nothing known", func(f telemetry.GPUFrame) bool {
			return f.Err == nil && f.GPUs[0].Known == 0 && f.GPUs[1].Known == 0
		})
		if age := last.At.Sub(last.GPUs[0].At); age < time.Second {
			t.Errorf("the newest value is said to be %v old", age)
		}
		script.Freeze(false)
		r.write()
		r.await(6, "all known again", func(f telemetry.GPUFrame) bool { return f.GPUs[0].Known == everything })
	})
}

func TestStandingEnergyUnderPowerMakesTheGPUStale(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(2)
		r := start(t, script, Options{})
		r.well()
		// New stamps, same numbers: only the energy counter tells.
		script.Int(0, fakedcgm.FieldEnergy, 5_000_000)
		r.write()
		begun := r.well().At
		f := r.await(20, "nothing of GPU 0 known", func(f telemetry.GPUFrame) bool { return find(t, f, fakedcgm.UUID(0)).Known == 0 })
		if waited := f.At.Sub(begun); waited < 2*time.Second || waited > 3*time.Second {
			t.Errorf("stale after %v; want a little over 2 s", waited)
		}
		if find(t, f, fakedcgm.UUID(1)).Known != everything {
			t.Error("the other GPU is not known whole")
		}
		if r.source.Stats().Frozen == 0 {
			t.Error("no frozen GPU counted")
		}
		// A GPU without power draws none.
		script.Double(0, fakedcgm.FieldPower, 0).Double(0, fakedcgm.FieldPowerAverage, 0)
		r.write()
		if g := find(t, r.well(), fakedcgm.UUID(0)); g.Known != everything {
			t.Errorf("known %b without power; want %b", g.Known, everything)
		}
	})
}

func TestLostGPU(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(2)
		r := start(t, script, Options{})
		r.well()
		// The XID comes first; DCGM notices the loss within a second or two.
		script.Blank(1).XID(1, 79)
		r.write()
		g := find(t, r.well(), fakedcgm.UUID(1))
		if g.Lost || g.Known != telemetry.GPUHasXID || g.XID != 79 || g.XIDEvents != 1 {
			t.Errorf("blank GPU with XID 79: %+v", g)
		}
		script.Lose(1)
		r.write()
		f := r.well()
		g = find(t, f, fakedcgm.UUID(1))
		if !g.Lost || g.Known != 0 || g.Condition() != telemetry.ConditionLost || g.Model == "" || !g.At.Equal(f.At) {
			t.Errorf("lost GPU: %+v", g)
		}
		if peer := find(t, f, fakedcgm.UUID(0)); peer.Lost || peer.Known != everything {
			t.Errorf("its peer: %+v", peer)
		}
		// Status lost with values that go on is no loss.
		script.Restore(1).Status(1, fakedcgm.StatusLost)
		r.write()
		if g := find(t, r.well(), fakedcgm.UUID(1)); g.Lost || g.Known&^telemetry.GPUHasXID == 0 {
			t.Errorf("GPU whose values go on: %+v", g)
		}
	})
}

func TestGPUThatIsEnumeratedNoMoreIsLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(2)
		r := start(t, script, Options{})
		r.well()
		script.Gone(1).Restart(1)
		r.write()
		f := r.await(10, "a new epoch", func(f telemetry.GPUFrame) bool { return f.Err == nil && f.Epoch == 2 })
		if g := find(t, f, fakedcgm.UUID(1)); !g.Lost || g.Known != 0 {
			t.Errorf("GPU that went: %+v", g)
		}
		if g := find(t, f, fakedcgm.UUID(0)); g.Lost {
			t.Errorf("GPU that stayed: %+v", g)
		}
		script.Gone(0)
		r.write()
		r.await(10, "no GPU", func(f telemetry.GPUFrame) bool {
			if f.Err != nil && len(f.GPUs) != 0 {
				t.Fatalf("without any GPU: %+v; want no verdict", f)
			}
			return errors.Is(f.Err, errNoGPU)
		})
		script.Restore(0).Restore(1)
		r.write()
		f = r.await(200, "both GPUs", func(f telemetry.GPUFrame) bool { return f.Err == nil && len(f.GPUs) == 2 })
		if find(t, f, fakedcgm.UUID(1)).Lost {
			t.Error("GPU that came back is lost")
		}
	})
}

func TestGPUsThatCannotBeIdentifiedWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(3).Blank(0).Blank(1).Status(2, fakedcgm.StatusUnsupported)
		r := start(t, script, Options{})
		if f := r.next(); len(f.GPUs) != 0 || !errors.Is(f.Err, errNoGPU) || f.Epoch != 1 {
			t.Errorf("no GPU tells its UUID: %+v", f)
		}
		script.Restore(1)
		r.write()
		f := r.await(6, "one GPU", func(f telemetry.GPUFrame) bool { return f.Err == nil })
		if len(f.GPUs) != 1 || f.GPUs[0].ID != fakedcgm.UUID(1) {
			t.Errorf("one GPU tells its UUID: %+v", f.GPUs)
		}
		script.Restore(0)
		r.write()
		f = r.await(6, "two GPUs", func(f telemetry.GPUFrame) bool { return len(f.GPUs) == 2 })
		if g := find(t, f, fakedcgm.UUID(0)); g.Known != everything || f.Epoch != 1 {
			t.Errorf("the other one: epoch %d, %+v", f.Epoch, g)
		}
		// A driver that tells nothing later does not make a GPU nameless.
		script.Blank(0)
		r.write()
		f = r.skip(6)
		if g := find(t, f, fakedcgm.UUID(0)); g.Model == "" || g.Known != 0 || g.Lost {
			t.Errorf("GPU that turned blank: %+v", g)
		}
		if s := r.source.Stats(); s.Connects != 1 || s.Failed[CauseNoGPU] == 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestXIDsAreEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		// From before: known, not counted.
		script := fakedcgm.New(2).XID(0, 13)
		r := start(t, script, Options{})
		if g := find(t, r.well(), fakedcgm.UUID(0)); g.XID != 13 || g.XIDEvents != 0 {
			t.Errorf("XID from before the source: %+v", g)
		}
		expect := func(what string, id string, code int, events float64) {
			t.Helper()
			g := find(t, r.well(), id)
			if g.XID != code || g.XIDEvents != events || !g.Known.Has(telemetry.GPUHasXID) {
				t.Errorf("%s: XID %d, %v events, known %v; want %d, %v", what, g.XID, g.XIDEvents, g.Known.Has(telemetry.GPUHasXID), code, events)
			}
		}
		script.XID(0, 31)
		r.write()
		expect("a new one", fakedcgm.UUID(0), 31, 1)
		expect("nothing new", fakedcgm.UUID(0), 31, 1)
		script.XID(0, 31)
		r.write()
		expect("the same again", fakedcgm.UUID(0), 31, 2)
		script.XID(0, 62).XID(0, 45)
		r.write()
		expect("two in one second", fakedcgm.UUID(0), 45, 4)
		expect("the other GPU", fakedcgm.UUID(1), 0, 0)
		script.XID(1, 79)
		r.write()
		expect("the other GPU's first", fakedcgm.UUID(1), 79, 1)
		expect("the first GPU still", fakedcgm.UUID(0), 45, 4)
		// A lost connection to an engine that lives on: the same stamps come again.
		script.Call(codeConnectionGone)
		r.write()
		r.next()
		script.Call(0).XID(0, 94)
		r.write()
		f := r.await(10, "a new epoch", func(f telemetry.GPUFrame) bool { return f.Epoch == 2 && f.Err == nil })
		if g := find(t, f, fakedcgm.UUID(0)); g.XID != 94 || g.XIDEvents != 5 {
			t.Errorf("after a reconnect: XID %d, %v events; want 94, 5", g.XID, g.XIDEvents)
		}
		if s := r.source.Stats(); s.XIDs != 6 {
			t.Errorf("%d XIDs counted; want 6", s.XIDs)
		}
	})
}

func TestXID119BlindsTheNodeWithoutMakingItLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(3)
		r := start(t, script, Options{})
		r.well()
		script.XID(1, 119).Blank(0).Blank(1).Blank(2)
		r.write()
		r.await(5, "only the XID known", func(f telemetry.GPUFrame) bool {
			if f.Err != nil || len(f.GPUs) != 3 {
				t.Fatalf("frame %+v; want three GPUs and no error", f)
			}
			for _, g := range f.GPUs {
				if g.Lost {
					t.Fatalf("%s is called lost", g.ID)
				}
				if g.ID != fakedcgm.UUID(1) && (g.Known != 0 || g.Condition() != 0) {
					return false
				}
			}
			g := find(t, f, fakedcgm.UUID(1))
			return g.Known == telemetry.GPUHasXID && g.XID == 119 && g.XIDEvents == 1
		})
		// The host engine restarts.
		script.Restore(0).Restore(1).Restore(2).Restart(1)
		r.write()
		r.await(10, "everything known", func(f telemetry.GPUFrame) bool {
			return f.Err == nil && f.Epoch == 2 && find(t, f, fakedcgm.UUID(0)).Known == everything
		})
	})
}

func TestConnectionLossBeginsANewEpochAndWatchesAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		r := start(t, script, Options{})
		r.well()
		script.Restart(1).Connect(codeGeneric)
		r.write()
		f := r.next()
		if f.Err == nil || f.Epoch != 1 || len(f.GPUs) != 0 {
			t.Fatalf("frame after the loss: %+v", f)
		}
		// Attempts at once, then after 1, 2, 4, … and at most 30 s.
		var waits []time.Duration
		last := r.next().At
		for range 7 {
			f := r.next()
			waits = append(waits, f.At.Sub(last).Round(time.Second))
			last = f.At
		}
		for i, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
			if waits[i] != want*time.Second {
				t.Errorf("attempt %d came after %v; want %ds", i+2, waits[i], want)
			}
		}
		script.Connect(0)
		r.write()
		f = r.await(2, "connected", func(f telemetry.GPUFrame) bool { return f.Err == nil })
		if f.Epoch != 2 || f.GPUs[0].Known != everything {
			t.Errorf("frame after the return: epoch %d, known %b", f.Epoch, f.GPUs[0].Known)
		}
		s := r.source.Stats()
		if s.Connects != 2 || s.Failed[CauseConnection] != 1 || s.Failed[CauseConnect] != 8 {
			t.Errorf("stats %+v", s)
		}
	})
}

// codeGeneric is DCGM_ST_GENERIC_ERROR.
const codeGeneric = -3

func TestFailedCallsAreCountedByCause(t *testing.T) {
	for _, c := range []struct {
		code  int
		cause Cause
		epoch uint32
	}{
		{codePaused, CausePaused, 1}, {codeDriverTimeout, CauseDriverTimeout, 1}, {codeDetached, CauseDetached, 1},
		{codeTimeout, CauseTimeout, 1}, {codeGeneric, CauseOther, 2},
	} {
		t.Run(string(c.cause), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				script := fakedcgm.New(1)
				r := start(t, script, Options{})
				r.well()
				r.well()
				script.Call(c.code)
				r.write()
				if f := r.next(); f.Err == nil || len(f.GPUs) != 0 {
					t.Fatalf("frame %+v; want an error", f)
				}
				r.skip(maxFailures)
				script.Call(0)
				r.write()
				f := r.await(50, "well again", func(f telemetry.GPUFrame) bool { return f.Err == nil })
				if f.Epoch != c.epoch {
					t.Errorf("epoch %d; want %d", f.Epoch, c.epoch)
				}
				if s := r.source.Stats(); s.Failed[c.cause] == 0 {
					t.Errorf("failures %v; want some of %q", s.Failed, c.cause)
				}
			})
		})
	}
}

func TestSkewedClockChangesNothing(t *testing.T) {
	for _, skew := range []time.Duration{5 * time.Second, -5 * time.Second, 365 * 24 * time.Hour} {
		t.Run(skew.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				script := fakedcgm.New(1).Skew(skew).Value(fakedcgm.EntityGPU, 0, fakedcgm.FieldDRAMActive, 'd', 0, 4*time.Second, "0.3")
				r := start(t, script, Options{})
				for range 10 {
					if g := r.well().GPUs[0]; g.Known != everything&^telemetry.GPUHasDRAMActive {
						t.Fatalf("known %b; want all but the value that is four seconds old", g.Known)
					}
				}
				if s := r.source.Stats(); !s.Skewed {
					t.Errorf("skew %v is not reported as such", s.Skew)
				}
			})
		})
	}
}

func TestBackwardClockStepChangesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		r := start(t, script, Options{})
		r.well()
		script.Skew(-5 * time.Second)
		r.write()
		for range 20 {
			if g := r.well().GPUs[0]; g.Known != everything {
				t.Fatalf("known %b; want everything", g.Known)
			}
		}
		if s := r.source.Stats(); s.ClockSteps != 1 {
			t.Errorf("%d clock steps; want 1", s.ClockSteps)
		}
	})
}

func TestMIGInstances(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(2).Instance(7, 0, 3, 1, "1g.10gb").Instance(8, 0, 5, 3, "3g.40gb").Process(0, 12).Process(1, 13)
		r := start(t, script, Options{})
		f := r.well()
		if len(f.GPUs) != 3 {
			t.Fatalf("%d GPUs; want GPU 1 and two instances: %+v", len(f.GPUs), f.GPUs)
		}
		find(t, f, fakedcgm.UUID(1))
		g := find(t, f, fakedcgm.UUID(0)+"/3")
		want := telemetry.GPU{
			ID: fakedcgm.UUID(0) + "/3", Profile: "1g.10gb", Model: "NVIDIA H100 80GB HBM3", At: g.At, Known: g.Known,
			GRActive: 0.6, SMActive: 0.45, TensorActive: 0.2, DRAMActive: 0.35, FBUsedMiB: 9000, FBTotalMiB: 9984,
			TemperatureMargin: 30, PCIeTX: 1e9, PCIeRX: 2e9, PCIeLink: 32e9 * 128 / 130 / 8 * 16,
		}
		if g != want {
			t.Errorf("got  %+v\nwant %+v", g, want)
		}
		if unknown := telemetry.GPUHasUtil | telemetry.GPUHasPower | telemetry.GPUHasEnergy; g.Known != everything&^unknown {
			t.Errorf("known %b; want everything but utilisation, power and energy", g.Known)
		}
		if p := find(t, f, fakedcgm.UUID(0)+"/5").Profile; p != "3g.40gb" {
			t.Errorf("profile %q; want 3g.40gb", p)
		}
		if p := f.Processes; len(p) != 1 || len(p[13]) != 1 {
			t.Errorf("processes %v; want only those of the whole GPU", p)
		}
		// What befalls the board befalls its instances.
		script.XID(0, 94).Int(0, fakedcgm.FieldRecoveryAction, 4)
		r.write()
		f = r.skip(5)
		if g := find(t, f, fakedcgm.UUID(0)+"/5"); g.XID != 94 || g.XIDEvents != 1 || g.Condition() != telemetry.ConditionEject {
			t.Errorf("instance of a GPU that needs a reset: %+v", g)
		}
		script.Lose(0)
		r.write()
		f = r.skip(5)
		if g := find(t, f, fakedcgm.UUID(0)+"/3"); !g.Lost || g.Known != 0 {
			t.Errorf("instance of a lost GPU: %+v", g)
		}
	})
}

func TestManyInstances(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(8)
		for i := range 56 {
			script.Instance(100+i, i/7, 7+i%7, 1, "1g.10gb")
		}
		r := start(t, script, Options{})
		f := r.well()
		if len(f.GPUs) != 56 {
			t.Fatalf("%d instances; want 56", len(f.GPUs))
		}
		for _, g := range f.GPUs {
			if !g.Known.Has(telemetry.GPUHasSMActive|telemetry.GPUHasFBUsed|telemetry.GPUHasRecovery) || g.Profile != "1g.10gb" {
				t.Errorf("instance %+v", g)
			}
		}
	})
}

func TestMIGReconfigurationBeginsANewEpoch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1).Instance(7, 0, 3, 1, "1g.10gb")
		r := start(t, script, Options{})
		r.well()
		// The same ids, another size.
		script.Instance(7, 0, 3, 2, "2g.20gb")
		r.write()
		f := r.await(7, "the new size", func(f telemetry.GPUFrame) bool { return f.Err == nil && f.Epoch == 2 })
		if g := f.GPUs[0]; g.Profile != "2g.20gb" || g.FBTotalMiB != 2*9984 || len(f.GPUs) != 1 {
			t.Errorf("after the reconfiguration: %+v", f.GPUs)
		}
		// MIG off: the GPU is whole.
		script.NoInstances()
		r.write()
		f = r.await(7, "MIG off", func(f telemetry.GPUFrame) bool { return f.Err == nil && f.Epoch == 3 })
		if g := f.GPUs[0]; g.ID != fakedcgm.UUID(0) || g.Known != everything || len(f.GPUs) != 1 {
			t.Errorf("after MIG was turned off: %+v", f.GPUs)
		}
		// MIG on without instances: nothing could run on it.
		script.Int(0, 67, 1)
		r.write()
		f = r.await(7, "no usable GPU", func(f telemetry.GPUFrame) bool { return f.Err != nil })
		if len(f.GPUs) != 0 || !errors.Is(f.Err, errNoGPU) {
			t.Errorf("MIG on without instances: %+v", f)
		}
		// Watches must not pile up: 64 groups is all that DCGM has.
		script.Default(fakedcgm.EntityGPU, 0, 67)
		for i := range 40 {
			script.Instance(7, 0, 3, 1+i%3, "again")
			r.write()
			r.await(7, "the next size", func(f telemetry.GPUFrame) bool { return f.Err == nil && f.Epoch == uint32(4+i) })
		}
		if s := r.source.Stats(); s.Reconfigurations != 42 || s.Connects != 1 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestTenBlankTicksRenewTheWatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		r := start(t, script, Options{})
		r.well()
		// Profiling fields stay blank after an XID 31, until they are watched anew.
		for _, field := range []int{fakedcgm.FieldGRActive, fakedcgm.FieldSMActive, fakedcgm.FieldTensorActive, fakedcgm.FieldDRAMActive} {
			script.NeedWatch(field, 2)
		}
		script.XID(0, 31)
		r.write()
		blank := 0
		r.await(12, "SM activity known again", func(f telemetry.GPUFrame) bool {
			g := f.GPUs[0]
			if !g.Known.Has(telemetry.GPUHasFBUsed) || f.Epoch != 1 {
				t.Fatalf("frame %+v; want the other fields known, in the same epoch", f)
			}
			if !g.Known.Has(telemetry.GPUHasSMActive) {
				blank++
				return false
			}
			return true
		})
		if s := r.source.Stats(); blank != blankReadsToRewatch || s.Rewatches != 1 {
			t.Errorf("%d blank ticks, %d new watches; want %d and 1", blank, s.Rewatches, blankReadsToRewatch)
		}
		// Watches that help nothing are renewed less and less often.
		script.NeedWatch(fakedcgm.FieldSMActive, 1000)
		r.write()
		r.skip(700)
		if s := r.source.Stats(); s.Rewatches < 4 || s.Rewatches > 8 {
			t.Errorf("%d new watches in 140 s; want some, rarer each time", s.Rewatches)
		}
	})
}

func TestFieldsThatDCGMRefusesLeaveTheRest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1)
		for _, field := range []int{1001, 1002, 1004, 1005, 1009, 1010} {
			script.Unsupported(field, -36) // DCGM_ST_PROFILING_NOT_SUPPORTED
		}
		script.Unsupported(fakedcgm.FieldRecoveryAction, -13).Unsupported(int(pidField), -13)
		r := start(t, script, Options{})
		f := r.well()
		g := f.GPUs[0]
		without := telemetry.GPUHasGRActive | telemetry.GPUHasSMActive | telemetry.GPUHasTensorActive | telemetry.GPUHasDRAMActive |
			telemetry.GPUHasPCIe | telemetry.GPUHasPCIeLink | telemetry.GPUHasRecovery
		if g.Known != everything&^without {
			t.Errorf("known %b; want %b", g.Known, everything&^without)
		}
		if f.Processes != nil {
			t.Errorf("processes %v; want nil: they can't be told", f.Processes)
		}
		if s := r.source.Stats(); len(s.Unsupported) != 8 {
			t.Errorf("refused fields %v; want 8", s.Unsupported)
		}
	})
}

func TestProcessesThatEndLeaveTheMap(t *testing.T) {
	bubble(t, func(t *testing.T) {
		script := fakedcgm.New(1).Process(0, 7)
		r := start(t, script, Options{})
		r.well()
		script.NoProcesses()
		r.write()
		r.await(85, "no process", func(f telemetry.GPUFrame) bool { return f.Processes != nil && len(f.Processes) == 0 })
	})
}

func TestHostForms(t *testing.T) {
	for _, host := range []string{"embedded", "", "localhost:5555", "unix:/tmp/nv-hostengine", "tcp://127.0.0.1:5555", "unix:///tmp/nv-hostengine"} {
		t.Run(host, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				o := Options{Host: host}
				if host == "" {
					o.Host = "embedded"
				}
				r := start(t, fakedcgm.New(1), o)
				r.well()
			})
		})
	}
}

func TestOneReaderPerProcess(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := start(t, fakedcgm.New(1), Options{})
		r.well()
		second, err := New(Options{Host: "127.0.0.1:5555"})
		if err != nil {
			t.Fatal(err)
		}
		if err := second.Run(t.Context(), func(telemetry.GPUFrame) {}); err == nil || !strings.Contains(err.Error(), "another reader") {
			t.Errorf("a second reader: %v; want that it is refused", err)
		}
	})
}
