package push

import (
	"bufio"
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

func BenchmarkEncode(b *testing.B) {
	now := time.Now()
	f := full(2, now)
	var e encoder
	e.encode(&f, 1, 0, now)
	b.ReportAllocs()
	for i := uint64(2); b.Loop(); i++ {
		if _, err := proto.Marshal(e.encode(&f, i, 0, now)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	now := time.Now()
	f := full(2, now)
	var e encoder
	var d decoder
	var r received
	if err := d.decode(e.encode(&f, 1, 0, now), now, &r); err != nil {
		b.Fatal(err)
	}
	raw, err := proto.Marshal(e.encode(&f, 2, 0, now))
	if err != nil {
		b.Fatal(err)
	}
	var m pushv1.Frame
	b.ReportAllocs()
	for b.Loop() {
		m.Reset()
		if err := proto.Unmarshal(raw, &m); err != nil {
			b.Fatal(err)
		}
		d.sequence = 1
		if err := d.decode(&m, now, &r); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(int64(len(raw)))
}

// The measurement of 1,000 nodes at 5 Hz runs the server in a process of its
// own, so that what the clients cost is not counted. measureEnv makes this
// binary that process; it holds the folder of the server's certificate files,
// or "plain".
const (
	measureEnv = "FAIRLEAD_PUSH_MEASURE"
	nodes      = 1000
)

func nodeName(i int) string { return fmt.Sprintf("gpu-node-%04d", i) }

func nodeAddress(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i / 250), byte(i % 250)}), 8000)
}

// serveMeasured serves until standard input ends. It writes its address first,
// and for each line that it reads what it has used so far.
func serveMeasured() int {
	windows := map[fleet.EndpointKey]*telemetry.Window{}
	p := fleet.Pool{Name: "h100", Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush}}
	for i := range nodes {
		p.Endpoints = append(p.Endpoints, fleet.Endpoint{Address: nodeAddress(i), Node: nodeName(i)})
		windows[fleet.EndpointKey{Pool: p.Name, Address: nodeAddress(i)}] = &telemetry.Window{}
	}
	// What serve does with a reading is outside this package; keeping it in its
	// window is the least.
	secured := os.Getenv(measureEnv) != "plain"
	s := NewServer(ServerOptions{Log: quietLog, RequireIdentity: secured, Deliver: func(r telemetry.Reading) { windows[r.Endpoint].Add(r.Sample) }})
	s.SetPools([]fleet.Pool{p})
	options := ServerLimits()
	if secured {
		creds, err := ServerCredentials(filesIn(os.Getenv(measureEnv)).server())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		options = append(options, grpc.Creds(creds))
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	g := grpc.NewServer(options...)
	s.Register(g)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = g.Serve(l)
	}()
	fmt.Println(l.Addr())
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var usage syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
		k := s.Counters()
		fmt.Println(usage.Utime.Nano()+usage.Stime.Nano(), k.Frames, k.Readings, k.Dropped, residentKiB(), runtime.NumGoroutine())
	}
	g.Stop()
	<-done
	return 0
}

func residentKiB() (kib int) {
	status, _ := os.ReadFile("/proc/self/status")
	_, after, _ := strings.Cut(string(status), "VmRSS:")
	_, _ = fmt.Sscan(after, &kib)
	return kib
}

// usage is one line of serveMeasured.
type usage struct {
	cpu                       time.Duration
	frames, readings, dropped uint64
	rssKiB, goroutines        int
}

// BenchmarkServeThousandNodes runs rounds of one frame from each of 1,000
// agents, 200 ms apart, over as many connections, and reports what the server's
// process uses: cores at this rate, CPU for each frame, and resident memory, its
// own before the first connection included. Budget for all of `serve`: 0.5 core
// and 128 MiB. `-benchtime 100x` takes 20 s.
func BenchmarkServeThousandNodes(b *testing.B) {
	for _, name := range []string{"plain", "mTLS"} {
		b.Run(name, func(b *testing.B) { measure(b, name == "mTLS") })
	}
}

func measure(b *testing.B, secured bool) {
	dir, agents := "plain", make([]*ClientTLS, nodes)
	if secured {
		dir = b.TempDir()
		own, ca := newAuthority(b), newAuthority(b)
		filesIn(dir).issue(b, own, ca, soon(), x509.ExtKeyUsageServerAuth)
		for i := range agents {
			agents[i] = newFiles(b).issue(b, ca, own, soon(), x509.ExtKeyUsageClientAuth, nodeName(i)).client()
		}
	}
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), measureEnv+"="+dir)
	child.Stderr = os.Stderr
	in, _ := child.StdinPipe()
	out, _ := child.StdoutPipe()
	if err := child.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = child.Wait()
	}()
	lines := bufio.NewScanner(out)
	line := func() string {
		if !lines.Scan() {
			b.Fatal("the server ended")
		}
		return lines.Text()
	}
	at := fleet.Address{Host: line()}
	read := func() (u usage) {
		fmt.Fprintln(in)
		if _, err := fmt.Sscan(line(), &u.cpu, &u.frames, &u.readings, &u.dropped, &u.rssKiB, &u.goroutines); err != nil {
			b.Fatal(err)
		}
		return u
	}

	base := read()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	clients := make([]*Client, nodes)
	frames := make([]Frame, nodes)
	for i := range clients {
		c, err := NewClient(ClientOptions{Target: at, Node: nodeName(i), TLS: agents[i], Log: quietLog})
		if err != nil {
			b.Fatal(err)
		}
		clients[i] = c
		frames[i] = full(1, time.Now())
		frames[i].Endpoints[0].Endpoint = nodeAddress(i)
		running.Go(func() { _ = c.Run(ctx) })
	}
	round := func() {
		now := time.Now()
		for i, c := range clients {
			f := frames[i]
			f.At = now
			f.Endpoints[0].Sample.At, f.Endpoints[0].Sample.Changed = now, now
			c.Send(f)
			// Agents are not in step: a round is spread over its 200 ms.
			if i%50 == 49 {
				time.Sleep(time.Until(now.Add(200 * time.Millisecond * time.Duration(i+1) / nodes)))
			}
		}
	}
	for read().frames < 2*nodes {
		round()
	}
	before, began := read(), time.Now()
	for b.Loop() {
		round()
	}
	after, took := read(), time.Since(began)
	n := after.frames - before.frames
	b.ReportMetric((after.cpu-before.cpu).Seconds()/took.Seconds(), "cores")
	b.ReportMetric(float64((after.cpu-before.cpu).Microseconds())/float64(n), "µs/frame")
	b.ReportMetric(float64(n)/took.Seconds(), "frames/s")
	b.ReportMetric(float64(max(before.rssKiB, after.rssKiB))/1024, "MiB-RSS")
	b.ReportMetric(float64(base.rssKiB)/1024, "MiB-RSS-before")
	b.ReportMetric(float64(after.dropped), "dropped")
	b.ReportMetric(float64(after.goroutines-base.goroutines)/nodes, "goroutines/node")
	if after.readings != after.frames {
		b.Errorf("%d readings of %d frames", after.readings, after.frames)
	}
}
