package agent

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// bench is an agent between fakes: what it reads is given by the test, what it
// sends is kept.
type bench struct {
	agent    *Agent
	gpus     chan telemetry.GPUFrame
	readings chan telemetry.Reading
	log      bytes.Buffer
	stop     func() error
	stats    push.ClientStats

	mu    sync.Mutex
	sent  []push.Frame
	order []string // children, as they ended
}

const script = `
space host 10.0.0.11
listen host 0.0.0.0:8000 501
listen host 0.0.0.0:8001 502
process 200 name=vllm holds=501
process 210 parent=200 session=200 name=VLLM::EngineCore gpus=GPU-a,GPU-b
process 300 name=vllm holds=502
process 310 parent=300 session=300 name=VLLM::EngineCore gpus=GPU-c
server 127.0.0.1:8000
server 127.0.0.1:8001
`

var (
	first  = netip.MustParseAddrPort("127.0.0.1:8000")
	second = netip.MustParseAddrPort("127.0.0.1:8001")
)

func testConfig() *Config {
	return &Config{Node: "gpu-a", Interval: 200 * time.Millisecond, Servers: []Server{
		{Listen: first, Advertise: netip.MustParseAddrPort("10.0.0.11:8000"), MetricsPath: "/metrics"},
		{Listen: second, Advertise: second, MetricsPath: "/metrics"},
	}}
}

// newBench starts an agent in the test's bubble.
func newBench(t *testing.T, change func(*bench, *Options)) *bench {
	t.Helper()
	b := &bench{gpus: make(chan telemetry.GPUFrame), readings: make(chan telemetry.Reading),
		stats: push.ClientStats{Connected: true, Sent: 7, Dropped: 2}}
	o := Options{Config: testConfig(), GPUs: gpuFake{b}, Engines: engineFake{b}, Sender: senderFake{b}, Proc: parseMachine(t, script).proc(),
		Log: slog.New(slog.NewTextHandler(&b.log, nil))}
	if change != nil {
		change(b, &o)
	}
	b.agent = New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.agent.Run(ctx) }()
	b.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { _ = b.stop() })
	return b
}

type (
	gpuFake    struct{ *bench }
	engineFake struct{ *bench }
	senderFake struct{ *bench }
)

func (f gpuFake) Run(ctx context.Context, out func(telemetry.GPUFrame)) error {
	return pass(ctx, f.bench, "GPUs", f.gpus, out)
}

func (f engineFake) Run(ctx context.Context, out func(telemetry.Reading)) error {
	return pass(ctx, f.bench, "engines", f.readings, out)
}

func pass[T any](ctx context.Context, b *bench, name string, in <-chan T, out func(T)) error {
	for {
		select {
		case v := <-in:
			out(v)
		case <-ctx.Done():
			b.end(name)
			return ctx.Err()
		}
	}
}

func (f senderFake) Send(x push.Frame) {
	f.mu.Lock()
	defer f.mu.Unlock()
	x.Endpoints = slices.Clone(x.Endpoints)
	f.sent = append(f.sent, x)
}

func (f senderFake) Run(ctx context.Context) error {
	<-ctx.Done()
	f.end("sender")
	return nil
}

func (f senderFake) Stats() push.ClientStats { return f.stats }

func (b *bench) end(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.order = append(b.order, name)
}

// newest is the last frame sent.
func (b *bench) newest(t *testing.T) push.Frame {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.sent) == 0 {
		t.Fatal("no frame was sent")
	}
	return b.sent[len(b.sent)-1]
}

// pass lets so much fake time go by.
func (b *bench) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func gpu(id string, util, power float64) telemetry.GPU {
	return telemetry.GPU{ID: id, At: time.Now(), Known: telemetry.GPUHasUtil | telemetry.GPUHasPower | telemetry.GPUHasXID | telemetry.GPUHasRecovery,
		Util: util, PowerWatts: power}
}

// gpuFrame is what the script's node says.
func gpuFrame() telemetry.GPUFrame {
	return telemetry.GPUFrame{At: time.Now(), Epoch: 3, GPUs: []telemetry.GPU{gpu("GPU-a", 0.2, 300), gpu("GPU-b", 0.9, 250), gpu("GPU-c", 0.5, 400)},
		Processes: map[int][]string{210: {"GPU-a", "GPU-b"}, 310: {"GPU-c"}}}
}

func engineSample() telemetry.Sample {
	now := time.Now()
	return telemetry.Sample{At: now, Changed: now, Known: telemetry.HasKVUsage | telemetry.HasRunning, KVUsage: 0.5, Running: 4}
}

func (b *bench) read(at netip.AddrPort, s telemetry.Sample, err error) {
	b.readings <- telemetry.Reading{Endpoint: fleet.EndpointKey{Address: at}, Sample: s, Err: err}
}

func TestFrameJoinsEngineNumbersWithTheWorstOfTheirGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		read := engineSample()
		b.read(first, read, nil)
		b.wait(300 * time.Millisecond)
		f := b.newest(t)
		if f.Node != "gpu-a" || f.Epoch != 3 || f.Err != "" || len(f.GPUs) != 3 || len(f.Endpoints) != 2 {
			t.Fatalf("frame %+v", f)
		}
		u := f.Endpoints[0]
		if u.Endpoint.String() != "10.0.0.11:8000" || u.Err != "" || !slices.Equal(u.GPUs, []string{"GPU-a", "GPU-b"}) {
			t.Errorf("update %+v", u)
		}
		if s := u.Sample; s.KVUsage != 0.5 || s.GPUUtil != 0.9 || s.PowerWatts != 300 || s.Condition != telemetry.ConditionOK {
			t.Errorf("sample %+v, want the engine's numbers with the larger of each GPU number", s)
		}
		if !u.Sample.At.Equal(read.At) || !u.Sample.Changed.Equal(read.Changed) {
			t.Errorf("sample of %v, changed %v; want the time of reading, %v", u.Sample.At, u.Sample.Changed, read.At)
		}
	})
}

func TestEngineThatIsDownStillTellsItsGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		read := engineSample()
		b.read(second, read, nil)
		b.wait(200 * time.Millisecond)
		at := gpuFrame()
		b.gpus <- at
		b.read(second, telemetry.Sample{}, errors.New("connection refused"))
		b.wait(200 * time.Millisecond)
		u := b.newest(t).Endpoints[1]
		if u.Err != "connection refused" || u.Sample.Known.HasEngine() || u.Sample.PowerWatts != 400 || !slices.Equal(u.GPUs, []string{"GPU-c"}) {
			t.Errorf("update %+v", u)
		}
		if !u.Sample.At.Equal(at.At) || !u.Sample.Changed.Equal(read.Changed) {
			t.Errorf("sample of %v, changed %v; want the GPUs' time %v and the engine's last change %v", u.Sample.At, u.Sample.Changed, at.At, read.Changed)
		}
		if u := b.newest(t).Endpoints[0]; u.Err != "not read yet" || !u.Sample.Known.HasGPU() {
			t.Errorf("a server that was never read: %+v", u)
		}
	})
}

func TestPageWithoutEngineNumbersIsNoReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.read(first, telemetry.Sample{At: time.Now()}, nil)
		b.wait(300 * time.Millisecond)
		if u := b.newest(t).Endpoints[0]; u.Err == "" {
			t.Errorf("update %+v, want a reason", u)
		}
		if n := strings.Count(b.logged(), "server's page can't be read"); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
	})
}

func TestGPUErrorLeavesGPUFieldsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		for range 3 {
			b.gpus <- telemetry.GPUFrame{At: time.Now(), Epoch: 3, GPUs: gpuFrame().GPUs, Err: errors.New("DCGM is slow")}
		}
		b.read(first, engineSample(), nil)
		b.wait(200 * time.Millisecond)
		f := b.newest(t)
		if f.Err != "DCGM is slow" || len(f.GPUs) != 0 || f.Endpoints[0].Sample.Known.HasGPU() || f.Endpoints[0].Sample.KVUsage != 0.5 {
			t.Errorf("frame %+v", f)
		}
		if !slices.Equal(f.Endpoints[0].GPUs, []string{"GPU-a", "GPU-b"}) {
			t.Errorf("GPUs %v, want those known before", f.Endpoints[0].GPUs)
		}
		if n := strings.Count(b.logged(), "DCGM is slow"); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
		b.gpus <- gpuFrame()
		b.read(first, engineSample(), nil)
		b.wait(200 * time.Millisecond)
		if f := b.newest(t); f.Err != "" || !f.Endpoints[0].Sample.Known.HasGPU() {
			t.Errorf("after the error: %+v", f)
		}
	})
}

// A host engine that samples no more answers for ever; its GPUs then know
// nothing, without any error.
func TestGPUsThatSayNothingAreTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		silent := func() telemetry.GPUFrame {
			f := gpuFrame()
			for i := range f.GPUs {
				f.GPUs[i].Known = 0
			}
			return f
		}
		for range 15 {
			b.gpus <- silent()
			b.read(first, engineSample(), nil)
			b.wait(200 * time.Millisecond)
		}
		if f := b.newest(t); f.Err != errSilent || f.Endpoints[0].Sample.KVUsage != 0.5 {
			t.Errorf("frame %+v", f)
		}
		if n := strings.Count(b.logged(), errSilent); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
		lost := silent()
		lost.GPUs[0].Lost = true
		b.gpus <- lost
		b.wait(200 * time.Millisecond)
		if f := b.newest(t); f.Err != "" || f.Endpoints[0].Sample.Condition != telemetry.ConditionLost {
			t.Errorf("a lost GPU says something: %+v", f)
		}
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		if f := b.newest(t); f.Err != "" || !strings.Contains(b.logged(), "GPUs speak again") {
			t.Errorf("afterwards: %+v", f)
		}
	})
}

// logged stops the agent and returns its log.
func (b *bench) logged() string {
	synctest.Wait()
	return b.log.String()
}

func TestSilentSourcesDoNotLookFresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		b.read(first, engineSample(), nil)
		b.wait(900 * time.Millisecond)
		if f := b.newest(t); f.Err != "" || f.Endpoints[0].Err != "" {
			t.Errorf("after 0.9 s: %+v", f)
		}
		b.wait(400 * time.Millisecond)
		f := b.newest(t)
		if f.Err == "" || len(f.GPUs) != 0 || f.Endpoints[0].Err == "" || f.Endpoints[0].Sample.Known != 0 {
			t.Errorf("after 1.3 s of silence: %+v", f)
		}
	})
}

func TestGPUsAreKeptThroughARestartButNotForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		gone := func() { f := gpuFrame(); f.Processes = map[int][]string{310: {"GPU-c"}}; b.gpus <- f }
		tick := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); {
				gone()
				b.wait(time.Second)
			}
		}
		tick(2 * time.Minute)
		if u := b.newest(t).Endpoints[0]; !slices.Equal(u.GPUs, []string{"GPU-a", "GPU-b"}) || !u.Sample.Known.HasGPU() {
			t.Errorf("two minutes into a restart: %+v", u)
		}
		tick(4 * time.Minute)
		if u := b.newest(t).Endpoints[0]; len(u.GPUs) != 0 || u.Sample.Known.HasGPU() {
			t.Errorf("after six minutes: %+v", u)
		}
		if u := b.newest(t).Endpoints[1]; !slices.Equal(u.GPUs, []string{"GPU-c"}) {
			t.Errorf("the other server: %+v", u)
		}
		kept, unknown := strings.Count(b.logged(), "the last known are kept"), strings.Count(b.logged(), "GPUs are unknown")
		if kept != 1 || unknown != 1 {
			t.Errorf("logged %d times as kept, %d times as unknown; want once each:\n%s", kept, unknown, b.logged())
		}
	})
}

func TestKeptGPUsGoWhenAnotherServerHasThem(t *testing.T) {
	a := newAssignments(testConfig().Servers, slog.New(slog.DiscardHandler))
	now := time.Now()
	a.learn(now, []Finding{{GPUs: []string{"GPU-a", "GPU-d"}}, {GPUs: []string{"GPU-b"}}}, nil)
	a.learn(now.Add(time.Second), []Finding{{Why: "nothing listens"}, {GPUs: []string{"GPU-a"}}}, nil)
	if got := a.list[0]; !slices.Equal(got.gpus, []string{"GPU-d"}) || got.why == "" {
		t.Errorf("kept %v, want those that no other server computes on", got.gpus)
	}
}

// TestLostGPUStaysWithItsServer: DCGM names no processes of a GPU that it can't
// read, but the server's process lives and its tensor-parallel group is broken.
func TestLostGPUStaysWithItsServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		for range 600 { // ten minutes, twice as long as a restart may take
			f := gpuFrame()
			f.GPUs[1] = telemetry.GPU{ID: "GPU-b", At: time.Now(), Lost: true}
			f.Processes = map[int][]string{210: {"GPU-a"}, 310: {"GPU-c"}}
			b.gpus <- f
			b.wait(time.Second)
		}
		if u := b.newest(t).Endpoints[0]; !slices.Equal(u.GPUs, []string{"GPU-a", "GPU-b"}) || u.Sample.Condition != telemetry.ConditionLost {
			t.Errorf("after the loss of GPU-b: %v, condition %v", u.GPUs, u.Sample.Condition)
		}
		// A GPU that can be read and is no longer computed on is let go.
		f := gpuFrame()
		f.Processes = map[int][]string{210: {"GPU-a"}, 310: {"GPU-c"}}
		for range 6 {
			f.At = time.Now()
			b.gpus <- f
			b.wait(time.Second)
		}
		if u := b.newest(t).Endpoints[0]; !slices.Equal(u.GPUs, []string{"GPU-a"}) {
			t.Errorf("after GPU-b came back without a process: %v", u.GPUs)
		}
	})
}

// TestBlindNodeKeepsGPUsWhileItsServersLive: after XID 119 DCGM may read no GPU
// of the node any more, nor name a process.
func TestBlindNodeKeepsGPUsWhileItsServersLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := parseMachine(t, script)
		var mu sync.Mutex
		b := newBench(t, func(_ *bench, o *Options) { o.Proc = &lockedFS{mu: &mu, guarded: m.proc().(guarded)} })
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		blind := func(n int) {
			for range n {
				f := gpuFrame()
				for i := range f.GPUs {
					f.GPUs[i] = telemetry.GPU{ID: f.GPUs[i].ID, At: time.Now(), Known: telemetry.GPUHasXID, XID: 119}
				}
				f.Processes = map[int][]string{}
				b.gpus <- f
				b.wait(time.Second)
			}
		}
		blind(600)
		if u := b.newest(t).Endpoints[0]; !slices.Equal(u.GPUs, []string{"GPU-a", "GPU-b"}) || u.Sample.XID != 119 {
			t.Errorf("ten minutes blind: %v, XID %d", u.GPUs, u.Sample.XID)
		}
		mu.Lock()
		for name := range m.files { // the server ends
			if strings.HasPrefix(name, "200/") || strings.HasPrefix(name, "210/") {
				delete(m.files, name)
			}
		}
		mu.Unlock()
		blind(100)
		if u := b.newest(t).Endpoints[0]; len(u.GPUs) != 0 {
			t.Errorf("long after its process ended: %v", u.GPUs)
		}
		if u := b.newest(t).Endpoints[1]; !slices.Equal(u.GPUs, []string{"GPU-c"}) {
			t.Errorf("the server that lives: %v", u.GPUs)
		}
	})
}

// lockedFS lets a test change the tree meanwhile.
type lockedFS struct {
	guarded
	mu *sync.Mutex
}

func (l *lockedFS) Open(name string) (fs.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.guarded.Open(name)
}

func (l *lockedFS) ReadFile(name string) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.guarded.ReadFile(name)
}

func (l *lockedFS) ReadDir(name string) ([]fs.DirEntry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.guarded.ReadDir(name)
}

func (l *lockedFS) ReadLink(name string) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.guarded.ReadLink(name)
}

func TestDiscoveryLooksAgainSoonWhenProcessesChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rounds := &roundsFS{}
		b := newBench(t, func(_ *bench, o *Options) { rounds.FS = o.Proc.(guarded); o.Proc = rounds })
		steady := func(d time.Duration, f func() telemetry.GPUFrame) {
			for end := time.Now().Add(d); time.Now().Before(end); b.wait(200 * time.Millisecond) {
				b.gpus <- f()
			}
		}
		steady(4*time.Second, gpuFrame)
		if n := rounds.count(); n != 1 {
			t.Errorf("%d rounds in 4 s without a change, want 1", n)
		}
		steady(2*time.Second, gpuFrame)
		if n := rounds.count(); n != 2 {
			t.Errorf("%d rounds in 6 s without a change, want 2", n)
		}
		flip := false
		steady(3*time.Second, func() telemetry.GPUFrame {
			f := gpuFrame()
			if flip = !flip; flip {
				delete(f.Processes, 310)
			}
			return f
		})
		if n := rounds.count(); n < 4 || n > 6 {
			t.Errorf("%d rounds after 3 s of processes that come and go, want one a second", n)
		}
	})
}

// roundsFS counts rounds of discovery: each reads the machine's uptime once.
type roundsFS struct {
	FS guarded
	mu sync.Mutex
	n  int
}

func (r *roundsFS) Open(name string) (fs.File, error)          { return r.FS.Open(name) }
func (r *roundsFS) ReadLink(name string) (string, error)       { return r.FS.ReadLink(name) }
func (r *roundsFS) Lstat(name string) (fs.FileInfo, error)     { return r.FS.Lstat(name) }
func (r *roundsFS) ReadDir(name string) ([]fs.DirEntry, error) { return r.FS.ReadDir(name) }
func (r *roundsFS) ReadFile(name string) ([]byte, error) {
	if name == "uptime" {
		r.mu.Lock()
		r.n++
		r.mu.Unlock()
	}
	return r.FS.ReadFile(name)
}

func (r *roundsFS) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}

func TestOverrideNeedsNoDiscovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rounds := &roundsFS{}
		b := newBench(t, func(_ *bench, o *Options) {
			rounds.FS = o.Proc.(guarded)
			o.Proc = rounds
			o.Config.Servers[0].GPUs = selectors(t, "GPU-c")
			o.Config.Servers[1].GPUs = selectors(t, "GPU-a", "GPU-nowhere")
		})
		b.gpus <- gpuFrame()
		b.wait(300 * time.Millisecond)
		f := b.newest(t)
		if !slices.Equal(f.Endpoints[0].GPUs, []string{"GPU-c"}) || len(f.Endpoints[1].GPUs) != 0 || rounds.count() != 0 {
			t.Errorf("GPUs %v and %v after %d rounds of discovery", f.Endpoints[0].GPUs, f.Endpoints[1].GPUs, rounds.count())
		}
		if !strings.Contains(b.logged(), "GPU-nowhere is none of this node's GPUs") {
			t.Errorf("log: %s", b.logged())
		}
	})
}

func addr(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

func selectors(t *testing.T, texts ...string) (out []Selector) {
	t.Helper()
	for _, text := range texts {
		s, ok := ParseSelector(text)
		if !ok {
			t.Fatalf("%q is no selector", text)
		}
		out = append(out, s)
	}
	return out
}

func TestSelectors(t *testing.T) {
	ids := []string{"GPU-8a3b11", "GPU-8a3c22/1", "GPU-8a3c22/5", "GPU-99"}
	for _, c := range []struct{ selectors, want, why string }{
		{"GPU-99", "GPU-99", ""},
		{"GPU-8a3b", "GPU-8a3b11", ""},
		{"GPU-8a3c", "GPU-8a3c22/1 GPU-8a3c22/5", ""},
		{"GPU-8a3c/5", "GPU-8a3c22/5", ""},
		{"GPU-8a3c22/1 GPU-99", "GPU-8a3c22/1 GPU-99", ""},
		{"GPU-99 GPU-9", "GPU-99", ""},
		{"GPU-8a3", "", "GPU-8a3 begins 2 of this node's GPUs"},
		{"GPU-8a3c22/2", "", "GPU-8a3c22/2 is none"},
		{"GPU-99/1", "", "GPU-99/1 is none"},
	} {
		found, why := resolve(selectors(t, strings.Fields(c.selectors)...), ids)
		if strings.Join(found, " ") != c.want || !strings.HasPrefix(why, c.why) || (why == "") != (c.why == "") {
			t.Errorf("%s: %v %q, want %s %q", c.selectors, found, why, c.want, c.why)
		}
	}
	for _, bad := range []string{"", "GPU-", "8a3b", "MIG-1234", "GPU-8/", "GPU-8/a", "GPU-8a3b ", "GPU-8/1/2"} {
		if s, ok := ParseSelector(bad); ok {
			t.Errorf("%q was read as %v", bad, s)
		}
	}
}

func TestChildrenEndInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		b.gpus <- gpuFrame()
		b.wait(500 * time.Millisecond)
		if err := b.stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
		if want := []string{"engines", "GPUs", "sender"}; !slices.Equal(b.order, want) {
			t.Errorf("ended as %v, want %v", b.order, want)
		}
	})
}

// failing is a source or sender that gives up.
type failing struct {
	senderFake
	err error
}

func (f *failing) Run(context.Context) error { return f.err }

func TestAgentEndsWithAChildThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(b *bench, o *Options) { o.Sender = &failing{senderFake: senderFake{b}, err: errors.New("no more")} })
		b.wait(time.Second)
		if err := b.stop(); err == nil || !strings.Contains(err.Error(), "sender: no more") {
			t.Errorf("Run: %v, want what ended", err)
		}
		if want := []string{"engines", "GPUs"}; !slices.Equal(b.order, want) {
			t.Errorf("ended as %v, want %v", b.order, want)
		}
	})
}

func TestChildThatEndsWithoutAReasonIsAFaultToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(b *bench, o *Options) { o.Sender = &failing{senderFake: senderFake{b}} })
		b.wait(time.Second)
		if err := b.stop(); err == nil || !strings.Contains(err.Error(), "sender: ended by itself") {
			t.Errorf("Run: %v, want what ended", err)
		}
	})
}

type sourceThatGivesUp struct {
	b    *bench
	mu   sync.Mutex
	runs int
}

func (s *sourceThatGivesUp) Run(ctx context.Context, out func(telemetry.GPUFrame)) error {
	s.mu.Lock()
	s.runs++
	n := s.runs
	s.mu.Unlock()
	if n < 3 {
		return errors.New("libdcgm.so.4 not found")
	}
	return gpuFake{s.b}.Run(ctx, out)
}

func TestSourceThatGivesUpIsRunAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(b *bench, o *Options) { o.GPUs = &sourceThatGivesUp{b: b} })
		b.wait(500 * time.Millisecond)
		if f := b.newest(t); f.Err != "libdcgm.so.4 not found" {
			t.Errorf("frame %+v, want the reason", f)
		}
		b.wait(3 * time.Second)
		b.gpus <- gpuFrame()
		b.wait(200 * time.Millisecond)
		if f := b.newest(t); f.Err != "" || len(f.GPUs) != 3 {
			t.Errorf("after the third start: %+v", f)
		}
	})
}

type hung struct{ release chan struct{} }

func (h hung) Run(context.Context, func(telemetry.GPUFrame)) error { <-h.release; return nil }

func TestHungSourceDoesNotKeepTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hung{make(chan struct{})}
		b := newBench(t, func(_ *bench, o *Options) { o.GPUs = h })
		b.wait(time.Second)
		err := b.stop()
		close(h.release)
		if err == nil || !strings.Contains(err.Error(), "GPUs: not ended within 10s") {
			t.Errorf("Run: %v", err)
		}
		if want := []string{"engines", "sender"}; !slices.Equal(b.order, want) {
			t.Errorf("ended as %v, want %v", b.order, want)
		}
	})
}

func TestNodeWithoutGPUsSendsEnginesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(_ *bench, o *Options) { o.GPUs = nil })
		b.read(first, engineSample(), nil)
		b.wait(300 * time.Millisecond)
		if f := b.newest(t); f.Err != "" || len(f.GPUs) != 0 || f.Endpoints[0].Sample.KVUsage != 0.5 {
			t.Errorf("frame %+v", f)
		}
		if troubles := b.agent.troubles(time.Now()); len(troubles) != 0 {
			t.Errorf("not ready: %v", troubles)
		}
	})
}

func TestTargetsAreTheServersOwnPages(t *testing.T) {
	targets := Targets(testConfig())
	if len(targets) != 2 || targets[0].EngineURL != "http://127.0.0.1:8000/metrics" || targets[0].GPUURL != "" || targets[0].Interval != 200*time.Millisecond {
		t.Errorf("targets %+v", targets)
	}
}

func TestProcOfThisMachineHasWhatIsRead(t *testing.T) {
	p := procfs{os.DirFS("/proc")}
	table, err := p.processes()
	if err != nil || table[os.Getpid()] == nil || table[os.Getpid()].parent != os.Getppid() {
		t.Errorf("own process: %+v, %v", table[os.Getpid()], err)
	}
	if up, err := p.uptime(); err != nil || up <= 0 {
		t.Errorf("uptime %v, %v", up, err)
	}
}
