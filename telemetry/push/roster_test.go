package push

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// openPool has an endpoint that names no node.
func openPool() fleet.Pool { return pool("open", endpoint("10.9.9.9:8000", "")) }

// silent is a server that keeps no reading, with the given pools.
func silent(pools ...fleet.Pool) *Server {
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog})
	s.SetPools(pools)
	return s
}

// largeFrame is about as large as a frame may be.
func largeFrame() *pushv1.Frame {
	m := &pushv1.Frame{Sequence: 1, Inventory: &pushv1.Inventory{}}
	for i := range maxGPUs {
		m.Inventory.Items = append(m.Inventory.Items, &pushv1.Inventory_Item{Id: fmt.Sprintf("GPU-%036d", i), Profile: "1g.18gb", Model: strings.Repeat("m", 70)})
		m.Gpus = append(m.Gpus, &pushv1.GPU{Index: uint32(i), Known: 1, Gauges: []float32{0.5}})
	}
	for i := range maxEndpoints {
		e := row(fmt.Sprintf("10.9.9.9:%d", 8000+i), 1)
		e.Error = strings.Repeat("e", maxText)
		e.Gpus = make([]uint32, maxReferences/maxEndpoints)
		m.Endpoints = append(m.Endpoints, e)
	}
	return m
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Without TLS a name costs nothing: what names nobody configured must leave
// nothing behind.
func TestMadeUpNodesTakeNoMemory(t *testing.T) {
	const streams = 1024
	for _, x := range []struct {
		name  string
		pool  fleet.Pool
		nodes int
		most  uint64 // MiB, of the streams themselves included
	}{
		{"every endpoint names its node", pool("a", endpoint("10.9.9.9:8000", "n1")), 0, 4},
		{"an endpoint names no node", openPool(), maxUnnamed, 48},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := silent(x.pool)
			m := largeFrame()
			before := heap()
			receivers := make([]*receiver, streams)
			refused := 0
			for i := range receivers {
				r := &receiver{server: s}
				m.Node = fmt.Sprint("made-up-", i)
				if ack, err := r.take(m); err != nil {
					receivers[i] = nil // the stream is over
					refused++
					continue
				} else if ack.GetError() != "" {
					refused++
				}
				receivers[i] = r
			}
			if grown := (int64(heap()) - int64(before)) >> 20; grown > int64(x.most) {
				t.Errorf("%d MiB more, want at most %d", grown, x.most)
			}
			if n := len(s.Nodes()); n != x.nodes {
				t.Errorf("%d nodes are remembered, want %d", n, x.nodes)
			}
			if refused != streams-x.nodes {
				t.Errorf("%d were refused, want %d", refused, streams-x.nodes)
			}
			runtime.KeepAlive(receivers)
		})
	}
}

func TestUnknownNodeIsToldAndItsStreamEnds(t *testing.T) {
	s := silent(pool("a", endpoint("10.0.0.1:8000", "n1")))
	at := socket(t)
	serving(t, s, at)
	stream := rawStream(t, at)
	for i := range maxStrange {
		m := &pushv1.Frame{Sequence: uint64(i + 1)}
		if i == 0 { // the node stands in the first frame only
			m.Node = "n2"
		}
		if ack := exchange(t, stream, m); ack.GetError() != `the configuration names no node "n2"` {
			t.Fatalf("answer %d: %v", i, ack)
		}
	}
	_ = stream.Send(&pushv1.Frame{Sequence: maxStrange + 1})
	if _, err := stream.Recv(); status.Code(err) != codes.PermissionDenied {
		t.Fatalf("got %v", err)
	}
	k := s.Counters()
	if k.UnknownNodes != maxStrange+1 || k.FramesRefused != k.UnknownNodes || k.StreamsRefused != 1 || k.Frames != 0 {
		t.Errorf("counters %+v", k)
	}
	if len(s.Nodes()) != 0 {
		t.Errorf("nodes %+v", s.Nodes())
	}
}

// A client is refused in its first stream and taken in a later one, which brings
// the GPUs' names.
func TestNodeIsTakenOnceTheConfigurationNamesIt(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	at := socket(t)
	serving(t, s, at)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1"})
	frame := Frame{GPUs: []telemetry.GPU{{ID: "GPU-1"}}, Endpoints: []Update{update("10.0.0.1:8000", 1)}}
	for range maxStrange + 1 {
		c.Send(frame)
	}
	eventually(t, "the refusal", func() bool {
		return strings.Contains(c.Stats().LastError, `names no node "n1"`)
	})
	if c.Stats().Connected || c.Stats().Connects != 0 {
		t.Errorf("refused, and connected: %+v", c.Stats())
	}
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
	eventually(t, "a reading", func() bool {
		c.Send(frame)
		all, _ := got.snapshot()
		return len(all) > 0
	})
	eventually(t, "the GPU", func() bool { n := s.Nodes(); return len(n) == 1 && len(n[0].GPUs) == 1 })
}

func TestNodeThatTheConfigurationDropsIsForgotten(t *testing.T) {
	both, one := pool("a", endpoint("10.0.0.1:8000", "n1"), endpoint("10.0.0.2:8000", "n2")), pool("a", endpoint("10.0.0.1:8000", "n1"))
	for name, after := range map[string][]fleet.Pool{"its endpoint left": {one}, "names are given up": {one, openPool()}} {
		t.Run(name, func(t *testing.T) {
			s := silent(both)
			stays, goes := &receiver{server: s}, &receiver{server: s}
			for node, r := range map[string]*receiver{"n1": stays, "n2": goes} {
				if ack, err := r.take(&pushv1.Frame{Node: node, Sequence: 1}); err != nil || ack.GetError() != "" {
					t.Fatal(ack, err)
				}
			}
			s.SetPools(after)
			if n := s.Nodes(); len(n) != 1 || n[0].Name != "n1" {
				t.Errorf("nodes %+v", n)
			}
			if _, err := stays.take(&pushv1.Frame{Sequence: 2}); err != nil {
				t.Error(err)
			}
			if _, err := goes.take(&pushv1.Frame{Sequence: 2}); status.Code(err) != codes.Aborted {
				t.Errorf("got %v", err)
			}
			goes.end()
			stays.end()
		})
	}
}

func TestUnnamedNodesAreBoundedAndNamedOnesAlwaysFindRoom(t *testing.T) {
	now := time.Now()
	s := NewServer(ServerOptions{Log: quietLog, Deliver: func(telemetry.Reading) {}, Now: func() time.Time { return now }})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1")), openPool()})
	var first *receiver
	for i := range maxUnnamed {
		r := begin(t, s, fmt.Sprint("u", i))
		if i == 7 {
			first = r
		}
	}
	one := &receiver{server: s, decoder: decoder{node: "one more"}}
	if err := one.begin(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("got %v", err)
	}
	begin(t, s, "n1").end()
	first.end() // one leaves: its place is free though it is still shown
	if len(s.Nodes()) != maxUnnamed+1 {
		t.Fatal("a node that left is not shown")
	}
	begin(t, s, "one more")
	names := map[string]bool{}
	for _, n := range s.Nodes() {
		names[n.Name] = true
	}
	if len(names) != maxUnnamed+1 || !names["n1"] || names["u7"] || !names["one more"] {
		t.Fatalf("%d nodes: %v", len(names), names)
	}
}

// With identities endpoints without a node are nobody's: names that no endpoint
// has are strangers.
func TestUnnamedNodesNeedAServerWithoutIdentities(t *testing.T) {
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog, RequireIdentity: true})
	s.SetPools([]fleet.Pool{openPool()})
	r := &receiver{server: s, identity: &identity{names: []string{"n1"}, until: time.Now().Add(time.Hour)}}
	if ack, err := r.take(&pushv1.Frame{Node: "n1", Sequence: 1}); err != nil || ack.GetError() == "" {
		t.Errorf("got %v, %v", ack, err)
	}
	r = &receiver{server: s, identity: &identity{names: []string{"n1"}, until: time.Now().Add(time.Hour)}}
	if _, err := r.take(&pushv1.Frame{Node: "n2", Sequence: 1}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("got %v", err)
	}
}

// Nodes copies no rows: what it handed out is replaced by the next frame and not
// written.
func TestNodesHandsOutRowsWithoutCopyingThem(t *testing.T) {
	s := silent(pool("a", endpoint("10.9.9.9:8000", "n1")))
	r := &receiver{server: s}
	m := largeFrame()
	m.Node = "n1"
	if ack, err := r.take(m); err != nil || ack.GetError() != "" {
		t.Fatal(ack, err)
	}
	a, b := s.Nodes()[0], s.Nodes()[0]
	if &a.GPUs[0] != &b.GPUs[0] || &a.Endpoints[0] != &b.Endpoints[0] || &a.Refused[0] != &b.Refused[0] {
		t.Error("rows were copied")
	}
	wantGPU, wantEndpoint, wantRefusal := a.GPUs[0], a.Endpoints[0], a.Refused[0]
	next := &pushv1.Frame{Sequence: 2, Gpus: []*pushv1.GPU{{Index: 5}}, Endpoints: []*pushv1.Endpoint{row("10.9.9.8:1", 2)}}
	if ack, err := r.take(next); err != nil || ack.GetError() != "" {
		t.Fatal(ack, err)
	}
	if a.GPUs[0] != wantGPU || a.Endpoints[0].Err != wantEndpoint.Err || a.Refused[0] != wantRefusal || len(a.GPUs) != maxGPUs {
		t.Error("rows that were handed out have changed")
	}
	if c := s.Nodes()[0]; len(c.GPUs) != 1 || c.GPUs[0].ID == a.GPUs[0].ID || len(c.Endpoints) != 0 || len(c.Refused) != 1 {
		t.Errorf("after the next frame: %d GPUs, %d endpoints, %d refused", len(c.GPUs), len(c.Endpoints), len(c.Refused))
	}
}

// BenchmarkNodes asks for 1,000 nodes of 8 GPUs as serve does: five times a
// second, each node having said something since.
func BenchmarkNodes(b *testing.B) {
	p := pool("a")
	for i := range nodes {
		p.Endpoints = append(p.Endpoints, fleet.Endpoint{Address: nodeAddress(i), Node: nodeName(i)})
	}
	s := silent(p)
	now := time.Now()
	receivers, encoders := make([]*receiver, nodes), make([]encoder, nodes)
	sequence := uint64(0)
	round := func() {
		sequence++
		for i := range receivers {
			f := full(1, now)
			f.Node, f.Endpoints[0].Endpoint = nodeName(i), nodeAddress(i)
			if ack, err := receivers[i].take(encoders[i].encode(&f, sequence, 0, now)); err != nil || ack.GetError() != "" {
				b.Fatal(ack, err)
			}
		}
	}
	for i := range receivers {
		receivers[i] = &receiver{server: s}
	}
	b.ReportAllocs()
	for range b.N {
		b.StopTimer()
		round()
		b.StartTimer()
		if n := s.Nodes(); len(n) != nodes || len(n[0].GPUs) != 8 {
			b.Fatal(len(n))
		}
	}
}
