package accesslog

import (
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// recorded returns log messages that a real Envoy 1.40.0 wrote (see
// integration.TestAccessLogEntriesAsRecorded), one per file.
func recorded(t testing.TB) [][]byte {
	t.Helper()
	names, err := filepath.Glob("testdata/envoy-1.40.0/*.pb")
	if err != nil {
		t.Fatal(err)
	}
	var out [][]byte
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

// sink collects what a receiver hands on.
type sink struct {
	mu       sync.Mutex
	outcomes chan fleet.Outcome
	ended    chan string
	events   map[EventKind]int
}

func serve(t *testing.T) (*Receiver, *sink, alsv3.AccessLogServiceClient) {
	t.Helper()
	s := &sink{outcomes: make(chan fleet.Outcome, 100), ended: make(chan string, 10), events: map[EventKind]int{}}
	r := New(Options{
		Sink: func(o fleet.Outcome) { s.outcomes <- o },
		Observe: func(e Event) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.events[e.Kind] += e.N
			if e.Kind == EventStreamEnded {
				s.ended <- e.Node
			}
		},
	})
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(ServerOptions()...)
	r.Register(g)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		<-done
	})
	return r, s, alsv3.NewAccessLogServiceClient(conn)
}

func receive[T any](t *testing.T, from chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(10 * time.Second):
		t.Fatal("nothing came in 10 s")
		panic("unreachable")
	}
}

func TestOnlyTheFirstMessageOfAStreamNamesTheNode(t *testing.T) {
	_, s, client := serve(t)
	stream, err := client.StreamAccessLogs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first := logMessage("edge-1", wire.LogUpstream, upstreamEntry(alsdatav3.AccessLogType_UpstreamPoolReady))
	second := logMessage("", "", upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd), &alsdatav3.HTTPAccessLogEntry{})
	second.Identifier = nil
	for _, m := range []*alsv3.StreamAccessLogsMessage{first, second} {
		if err := stream.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.AttemptEnded} {
		if o := receive(t, s.outcomes); o.Kind != want || o.Node != "edge-1" {
			t.Errorf("outcome %+v; want %v of edge-1", o, want)
		}
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Error(err)
	}
	if node := receive(t, s.ended); node != "edge-1" {
		t.Errorf("a stream of %s ended", node)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.events[EventEntries] != 2 || s.events[EventIgnored] != 1 || s.events[EventStreamBegan] != 1 || s.events[EventStreamEnded] != 1 {
		t.Errorf("events %v", s.events)
	}
}

func TestEachStreamOfANodeIsTold(t *testing.T) {
	_, s, client := serve(t)
	var streams []alsv3.AccessLogService_StreamAccessLogsClient
	for range 2 {
		stream, err := client.StreamAccessLogs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(logMessage("edge-1", wire.LogUpstream, upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd))); err != nil {
			t.Fatal(err)
		}
		receive(t, s.outcomes)
		streams = append(streams, stream)
	}
	for n, stream := range streams {
		if _, err := stream.CloseAndRecv(); err != nil {
			t.Fatal(err)
		}
		if node := receive(t, s.ended); node != "edge-1" {
			t.Errorf("a stream of %s ended", node)
		}
		s.mu.Lock()
		if began, ended := s.events[EventStreamBegan], s.events[EventStreamEnded]; began != 2 || ended != n+1 {
			t.Errorf("%d streams began and %d ended; want 2 and %d", began, ended, n+1)
		}
		s.mu.Unlock()
	}
}

func TestTenMegabyteEntryIsRead(t *testing.T) {
	_, s, client := serve(t)
	stream, err := client.StreamAccessLogs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e := upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd)
	e.Request.Path = string(make([]byte, 10<<20))
	if err := stream.Send(logMessage("edge-1", wire.LogUpstream, e)); err != nil {
		t.Fatal(err)
	}
	if o := receive(t, s.outcomes); o.ID != id {
		t.Errorf("outcome %+v", o)
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Error(err)
	}
}

func TestRecordedEntriesOfARealEnvoy(t *testing.T) {
	kinds := map[fleet.OutcomeKind]int{}
	for _, b := range recorded(t) {
		m := &alsv3.StreamAccessLogsMessage{}
		if err := proto.Unmarshal(b, m); err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetHttpLogs().GetLogEntry() {
			o, ok := outcomeOf(t, e, m.GetIdentifier().GetLogName())
			if !ok || o.ID == "" || o.Route == "" {
				t.Errorf("entry of %s became %+v (%v)", m.GetIdentifier().GetLogName(), o, ok)
			}
			kinds[o.Kind]++
		}
	}
	for _, kind := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.AttemptEnded, fleet.RequestEnded} {
		if kinds[kind] == 0 {
			t.Errorf("no recorded entry is %v", kind)
		}
	}
}
