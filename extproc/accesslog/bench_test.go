package accesslog

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// batchBytes is the size of Envoy's log batches (envoy.logBatchBytes).
const batchBytes = 16 << 10

// batches are full messages of both logs as recorded from a real Envoy; requests
// is how many requests they tell of: a start and an end of one attempt each, and
// an end of the request.
func batches(t testing.TB) (up, down []byte, requests int) {
	var start, attemptEnd, end *alsdatav3.HTTPAccessLogEntry
	for _, b := range recorded(t) {
		m := &alsv3.StreamAccessLogsMessage{}
		if err := proto.Unmarshal(b, m); err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetHttpLogs().GetLogEntry() {
			switch e.GetCommonProperties().GetAccessLogType() {
			case alsdatav3.AccessLogType_UpstreamPoolReady:
				start = cmp.Or(start, e)
			case alsdatav3.AccessLogType_UpstreamEnd:
				attemptEnd = cmp.Or(attemptEnd, e)
			case alsdatav3.AccessLogType_DownstreamEnd:
				end = cmp.Or(end, e)
			}
		}
	}
	var ups, downs []*alsdatav3.HTTPAccessLogEntry
	for size := 0; size < batchBytes; requests++ {
		name := fmt.Sprintf("1718924567%03d-007-%04d", requests, requests)
		s, a, d := proto.CloneOf(start), proto.CloneOf(attemptEnd), proto.CloneOf(end)
		for _, e := range []*alsdatav3.HTTPAccessLogEntry{s, a} {
			e.CommonProperties.CustomTags[wire.TagDecision] = name
			e.CommonProperties.CustomTags[wire.TagAttempt] = "1"
		}
		fields := d.GetCommonProperties().GetMetadata().GetFilterMetadata()[wire.NamespaceLog].GetFields()
		if fields[wire.KeyDecision] == nil {
			t.Fatal("the recorded entry has no decision")
		}
		fields[wire.KeyDecision] = structpb.NewStringValue(name)
		ups, downs = append(ups, s, a), append(downs, d)
		size += proto.Size(s) + proto.Size(a)
	}
	return marshal(t, logMessage("edge-1", wire.LogUpstream, ups...)), marshal(t, logMessage("edge-1", wire.LogDownstream, downs...)), requests
}

// cpu is the process's CPU time, garbage collection included.
func cpu(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkBatch is the CPU time that a request's three log entries take, in batches as Envoy
// sends them: read by the scanner and, as before it, by the generated types, in
// turns within one run.
func BenchmarkBatch(b *testing.B) {
	up, down, requests := batches(b)
	messages := map[string][]byte{wire.LogUpstream: up, wire.LogDownstream: down}
	r := New(Options{Sink: func(fleet.Outcome) {}})
	sources := map[string]*source{wire.LogUpstream: sourceOf(up), wire.LogDownstream: sourceOf(down)}
	scanner := func() {
		for name, message := range messages {
			r.take(message, sources[name])
		}
	}
	generated := func() {
		now := time.Now()
		for name, message := range messages {
			m := &alsv3.StreamAccessLogsMessage{}
			if err := proto.Unmarshal(message, m); err != nil {
				b.Fatal(err)
			}
			for _, e := range m.GetHttpLogs().GetLogEntry() {
				if o, ok := oracleOutcome(e, name, "edge-1", now); ok {
					r.o.Sink(o)
				}
			}
		}
	}
	const rounds = 20
	var took [2]time.Duration
	n := 0
	runtime.GC()
	for b.Loop() {
		n++
		for i, read := range [2]func(){scanner, generated} {
			began := cpu(b)
			for range rounds {
				read()
			}
			took[i] += cpu(b) - began
		}
	}
	perRequest := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / float64(n*rounds*requests) }
	b.ReportMetric(perRequest(took[0]), "scanner-ns/request")
	b.ReportMetric(perRequest(took[1]), "generated-ns/request")
	b.ReportMetric(float64(took[0])/float64(took[1]), "ratio")
}

// An outcome costs the copy of its id and nothing else.
func TestEntriesAreReadWithoutGarbage(t *testing.T) {
	up, down, requests := batches(t)
	r := New(Options{Sink: func(fleet.Outcome) {}, Now: func() time.Time { return epoch }})
	from, fromDown := sourceOf(up), sourceOf(down)
	allocs := testing.AllocsPerRun(50, func() {
		r.take(up, from)
		r.take(down, fromDown)
	})
	if perRequest := allocs / float64(requests); perRequest > 3 {
		t.Errorf("%.2f allocations per request; want one for each of three entries", perRequest)
	}
}

// typed is a receiver as it would be without the scanner.
type typed struct {
	alsv3.UnimplementedAccessLogServiceServer
	sink func(fleet.Outcome)
}

func (r *typed) StreamAccessLogs(s alsv3.AccessLogService_StreamAccessLogsServer) error {
	m, err := s.Recv()
	for name := m.GetIdentifier().GetLogName(); err == nil; m, err = s.Recv() {
		now := time.Now()
		for _, e := range m.GetHttpLogs().GetLogEntry() {
			if o, ok := oracleOutcome(e, name, "edge-1", now); ok {
				r.sink(o)
			}
		}
	}
	return s.SendAndClose(&alsv3.StreamAccessLogsResponse{})
}

// sender passes finished messages through as they are.
type sender struct{ encoding.CodecV2 }

func (s sender) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return s.CodecV2.Marshal(v)
}

// dial serves on a Unix socket and returns a connection to it that sends bytes.
func dial(b *testing.B, register func(*grpc.Server), options ...grpc.ServerOption) *grpc.ClientConn {
	path := filepath.Join(b.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	g := grpc.NewServer(options...)
	register(g)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(sender{encoding.GetCodecV2("proto")})))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		<-done
	})
	return conn
}

// BenchmarkReceive is the whole way of a request's three entries, in batches of
// 16 KiB, from the socket into the ledger, with grpc-go's own part and that of a
// sender in this process: the CPU time of the scanning receiver and of one with
// the generated types, in turns within one run.
func BenchmarkReceive(b *testing.B) {
	up, down, requests := batches(b)
	var conns [2]*grpc.ClientConn
	for i := range conns {
		l := NewLedger(time.Now)
		if i == 0 {
			conns[i] = dial(b, New(Options{Sink: l.Apply}).Register, ServerOptions()...)
		} else {
			conns[i] = dial(b, func(g *grpc.Server) { alsv3.RegisterAccessLogServiceServer(g, &typed{sink: l.Apply}) }, grpc.MaxRecvMsgSize(MaxMessage))
		}
	}
	const rounds = 50
	send := func(conn *grpc.ClientConn) {
		var streams [2]grpc.ClientStream
		for i := range streams {
			var err error
			if streams[i], err = conn.NewStream(b.Context(), &grpc.StreamDesc{ClientStreams: true}, "/"+ServiceName+"/StreamAccessLogs"); err != nil {
				b.Fatal(err)
			}
		}
		for range rounds {
			if err := errors.Join(streams[0].SendMsg(up), streams[1].SendMsg(down)); err != nil {
				b.Fatal(err)
			}
		}
		for _, s := range streams {
			if err := errors.Join(s.CloseSend(), s.RecvMsg(&alsv3.StreamAccessLogsResponse{})); err != nil {
				b.Fatal(err)
			}
		}
	}
	var took [2]time.Duration
	n := 0
	for b.Loop() {
		n++
		for i, conn := range conns {
			began := cpu(b)
			send(conn)
			took[i] += cpu(b) - began
		}
	}
	perRequest := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / float64(n*rounds*requests) }
	b.ReportMetric(perRequest(took[0]), "scanner-ns/request")
	b.ReportMetric(perRequest(took[1]), "generated-ns/request")
	b.ReportMetric(float64(took[0])/float64(took[1]), "ratio")
}

// BenchmarkLeases is what a request costs the ledger, its part of the expiring 20
// times a second included, in virtual time at 400 and 4,000 requests a second:
// where no log arrives and leases end by themselves after 13 s, and where each
// request is confirmed at once and ends after 2 s.
func BenchmarkLeases(b *testing.B) {
	const tick = 50 * time.Millisecond
	pick := endpoint(1)
	for _, perSecond := range []int{400, 4_000} {
		ids := make([]string, 15*perSecond) // an id comes again when it is forgotten
		for i := range ids {
			ids[i] = fmt.Sprintf("%d-007-%04d", 1718924567123+i/10_000, i%10_000)
		}
		perTick := int(tick * time.Duration(perSecond) / time.Second)
		for _, blind := range []bool{true, false} {
			b.Run(fmt.Sprintf("%d-a-second/blind=%t", perSecond, blind), func(b *testing.B) {
				now := epoch
				l := NewLedger(func() time.Time { return now })
				l.SetBlind(blind)
				n := 0
				request := func() {
					l.Reserve(ids[n%len(ids)], pick, 0, 13*time.Second, now)
					if !blind {
						o := fleet.Outcome{Kind: fleet.AttemptStarted, Node: "edge", ID: ids[n%len(ids)], Attempt: 1, Endpoint: pick, At: now}
						l.Apply(o)
						if ended := n - 2*perSecond; ended >= 0 {
							o.ID, o.Kind = ids[ended%len(ids)], fleet.RequestEnded
							l.Apply(o)
						}
					}
					if n++; n%perTick == 0 {
						now = now.Add(tick)
						l.Expire(now)
					}
				}
				for range len(ids) {
					request()
				}
				for b.Loop() {
					request()
				}
			})
		}
	}
}
