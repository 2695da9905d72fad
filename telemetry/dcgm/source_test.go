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
