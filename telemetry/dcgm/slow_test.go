//go:build dcgm && cgo && linux

package dcgm

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/fakedcgm"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// A call that hangs does so in real time, so these tests run in real time; they
// assert order, never durations.
const hang = time.Hour

func TestSlowEngineIsSaidAndWaitedFor(t *testing.T) {
	script := fakedcgm.New(1)
	r := start(t, script, Options{Interval: 100 * time.Millisecond, Deadline: 50 * time.Millisecond})
	well := func(f telemetry.GPUFrame) bool {
		return f.Err == nil && len(f.GPUs) == 1 && f.GPUs[0].Known == everything
	}
	r.await(200, "well", well)
	script.Delay(hang)
	r.write()
	var waited []string
	r.await(200, "three times slow", func(f telemetry.GPUFrame) bool {
		if errors.Is(f.Err, ErrSlow) {
			if len(f.GPUs) != 0 || f.Epoch != 1 {
				t.Errorf("frame while slow: %+v", f)
			}
			waited = append(waited, f.Err.Error())
		}
		return len(waited) == 3
	})
	if !strings.HasPrefix(waited[0], "engine slow: no answer for ") || waited[0] == waited[2] {
		t.Errorf("what is said: %q", waited)
	}
	// No one else went in meanwhile: the library ends a process that does.
	script.Delay(0)
	r.write()
	r.await(200, "well again", well)
	if s := r.source.Stats(); s.Late == 0 || s.Connects != 1 {
		t.Errorf("stats %+v; want late reads and one connection", s)
	}
}

func TestEndIsPromptWhileACallHangs(t *testing.T) {
	script := fakedcgm.New(1)
	path := os.Getenv(fakedcgm.ScriptVariable)
	if err := script.Write(path); err != nil {
		t.Fatal(err)
	}
	o := Options{Host: "localhost:5555", Interval: 100 * time.Millisecond, Deadline: 50 * time.Millisecond}
	source, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	hung := false
	err = source.Run(ctx, func(f telemetry.GPUFrame) {
		switch {
		case hung && errors.Is(f.Err, ErrSlow):
			stop()
		case !hung && f.Err == nil:
			hung = true
			if err := script.Delay(hang).Write(path); err != nil {
				t.Error(err)
			}
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("Run returned %v", err)
	}
	// The call still hangs, so nobody else may go in.
	if err := source.Run(t.Context(), func(telemetry.GPUFrame) {}); err == nil || !strings.Contains(err.Error(), "another reader") {
		t.Fatalf("a reader beside the call that hangs: %v; want that it is refused", err)
	}
	if err := script.Delay(0).Write(path); err != nil {
		t.Fatal(err)
	}
	// Once it returns, the way is free.
	for {
		ctx, stop := context.WithCancel(t.Context())
		err := source.Run(ctx, func(telemetry.GPUFrame) { stop() })
		stop()
		if errors.Is(err, context.Canceled) {
			break
		}
		time.Sleep(time.Millisecond)
	}
}

func TestWithoutLibdcgm(t *testing.T) {
	c := exec.Command(os.Args[0], "-test.run=^TestChildWithoutLibdcgm$", "-test.v")
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH=", withoutLibrary+"=1")
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestChildWithoutLibdcgm") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestChildWithoutLibdcgm is the process in which no library is found: it says
// so, tries again ever less often, and lives.
func TestChildWithoutLibdcgm(t *testing.T) {
	if os.Getenv(withoutLibrary) == "" {
		t.Skip("TestWithoutLibdcgm runs it in a process of its own")
	}
	bubble(t, func(t *testing.T) {
		begun := time.Now()
		r := start(t, fakedcgm.New(1), Options{Host: "embedded"})
		for i, want := range []time.Duration{0, 1, 3, 7, 15, 31, 61, 91} {
			f := r.next()
			if f.Err == nil || !strings.Contains(f.Err.Error(), "libdcgm.so.4 not found") || !strings.Contains(f.Err.Error(), "LD_LIBRARY_PATH") {
				t.Fatalf("frame %+v; want that the library was not found, and what to do", f)
			}
			if at := f.At.Sub(begun).Round(time.Second); at != want*time.Second {
				t.Errorf("attempt %d after %v; want %ds", i+1, at, want)
			}
		}
	})
}

// Before a connection, go-dcgm's functions end the process with exit status 127.
func TestNothingIsCalledWithoutAConnection(t *testing.T) {
	g := &goDCGM{}
	var errs []error
	add := func(err error) { errs = append(errs, err) }
	_, err := g.topology()
	add(err)
	_, err = g.group("g", nil)
	add(err)
	_, err = g.watch(1, "w", []fieldID{1}, time.Second, 0, 1)
	add(err)
	add(g.rewatch(1))
	_, err = g.latest(nil, nil, false, nil)
	add(err)
	_, err = g.since(1, 0, nil)
	add(err)
	add(g.close())
	g.dropGroup(1)
	g.dropWatch(1)
	if status := g.gpuStatus(0); status != 0 {
		t.Errorf("status %d; want unknown", status)
	}
	for i, err := range errs {
		if !errors.Is(err, errNotOpen) {
			t.Errorf("call %d: %v; want %v", i, err, errNotOpen)
		}
	}
}

func TestNewRefusesWhatItCannotRead(t *testing.T) {
	for _, o := range []Options{
		{Host: "gpu-node"}, {Host: ":5555"}, {Host: "node:0"}, {Host: "node:70000"}, {Host: "unix:relative"}, {Host: "tcp://"},
		{Interval: 50 * time.Millisecond}, {Interval: time.Minute}, {Deadline: -1},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}

// BenchmarkRead is one read of eight GPUs: the calls through go-dcgm, the fake
// library's answers, and the frame. Every fifth read takes the slow fields too.
func BenchmarkRead(b *testing.B) {
	if err := fakedcgm.New(8).Write(os.Getenv(fakedcgm.ScriptVariable)); err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		slow bool
	}{{"tick", false}, {"slow tick", true}} {
		b.Run(c.name, func(b *testing.B) {
			count := &counters{}
			o, h, err := Options{}.complete()
			if err != nil {
				b.Fatal(err)
			}
			r := &reader{host: h, interval: o.Interval, engine: &goDCGM{}, count: count, log: o.Log, node: newNode(o.Interval, count)}
			if _, err := r.step(); err != nil {
				b.Fatal(err)
			}
			defer r.disconnect()
			b.ReportAllocs()
			for b.Loop() {
				if c.slow {
					r.lastSlow = time.Time{}
				} else {
					r.lastSlow = time.Now()
				}
				if f, err := r.step(); err != nil || len(f.GPUs) != 8 {
					b.Fatal(len(f.GPUs), err)
				}
			}
		})
	}
}
