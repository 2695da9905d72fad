package accesslog

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
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
				start = e
			case alsdatav3.AccessLogType_UpstreamEnd:
				attemptEnd = e
			case alsdatav3.AccessLogType_DownstreamEnd:
				end = e
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
