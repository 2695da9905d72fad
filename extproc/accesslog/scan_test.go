package accesslog

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func logMessage(node, logName string, entries ...*alsdatav3.HTTPAccessLogEntry) *alsv3.StreamAccessLogsMessage {
	return &alsv3.StreamAccessLogsMessage{
		Identifier: &alsv3.StreamAccessLogsMessage_Identifier{Node: &corev3.Node{Id: node}, LogName: logName},
		LogEntries: &alsv3.StreamAccessLogsMessage_HttpLogs{HttpLogs: &alsv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: entries}},
	}
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// rich is an entry that has everything an outcome is made of, and more.
func rich(kind alsdatav3.AccessLogType) *alsdatav3.HTTPAccessLogEntry {
	e := downstreamEntry(kind)
	c := e.CommonProperties
	c.CustomTags = map[string]string{
		wire.TagDecision: id, wire.TagAttempt: "2", wire.TagInput: "18", wire.TagCached: "5",
		wire.TagOutput: "200", wire.TagSSEOutput: "1e+06", wire.TagSSEError: "overloaded_error", "other": "x",
	}
	c.ResponseFlags = &alsdatav3.ResponseFlags{UpstreamRetryLimitExceeded: true, UnauthorizedDetails: &alsdatav3.ResponseFlags_Unauthorized{Reason: 1}}
	c.FilterStateObjects = nil
	c.StreamId = "stream"
	e.Request.RequestHeaders = map[string]string{wire.HeaderRequestID: "header-id", wire.HeaderDecision: id}
	e.Response.ResponseHeaders = map[string]string{"retry-after": "3", "x-ratelimit-reset-tokens": "6m0s", "content-type": "a/b"}
	e.Response.ResponseCode.Value = 429
	return e
}

// seeds are messages in all the forms that the scanner knows.
func seeds(t testing.TB) [][]byte {
	out := recorded(t)
	for _, kind := range []alsdatav3.AccessLogType{
		alsdatav3.AccessLogType_UpstreamPoolReady, alsdatav3.AccessLogType_UpstreamEnd,
		alsdatav3.AccessLogType_DownstreamPeriodic, alsdatav3.AccessLogType_DownstreamEnd, alsdatav3.AccessLogType_DownstreamStart,
	} {
		out = append(out,
			marshal(t, logMessage("edge-1", wire.LogUpstream, upstreamEntry(kind), rich(kind))),
			marshal(t, logMessage("edge-1", wire.LogDownstream, downstreamEntry(kind), rich(kind))))
	}
	e := upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd)
	e.CommonProperties.UpstreamRemoteAddress = &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: "/p"}}}
	e.CommonProperties.Duration = &durationpb.Duration{Seconds: 1 << 60, Nanos: -5}
	tcp := &alsv3.StreamAccessLogsMessage{LogEntries: &alsv3.StreamAccessLogsMessage_TcpLogs{TcpLogs: &alsv3.StreamAccessLogsMessage_TCPAccessLogEntries{}}}
	return append(out,
		marshal(t, logMessage("edge-1", wire.LogUpstream, e)),
		marshal(t, logMessage("", wire.LogDownstream, &alsdatav3.HTTPAccessLogEntry{})),
		marshal(t, logMessage("edge-1", "somebody-elses", e)),
		marshal(t, tcp),
		append(marshal(t, tcp), marshal(t, logMessage("a", wire.LogUpstream, e))...),
		append(marshal(t, logMessage("a", wire.LogUpstream, e)), marshal(t, tcp)...),
		append(marshal(t, logMessage("a", "x", rich(alsdatav3.AccessLogType_DownstreamEnd))), marshal(t, logMessage("b", wire.LogDownstream, e))...),
		nil)
}

// scanned is what a receiver makes of one message that begins a stream.
type scanned struct {
	outcomes []fleet.Outcome
	ignored  int
	node     string
}

func scan(b []byte) scanned {
	var got scanned
	r := New(Options{
		Now:  func() time.Time { return epoch },
		Sink: func(o fleet.Outcome) { got.outcomes = append(got.outcomes, o) },
		Observe: func(e Event) {
			if e.Kind == EventIgnored {
				got.ignored += e.N
			}
		},
	})
	from := sourceOf(b)
	got.node = from.node
	r.take(b, from)
	return got
}

// checkAgainstOracle reads a message both ways. The scanner may read what the
// generated types refuse; what they read it must read alike.
func checkAgainstOracle(t *testing.T, b []byte) {
	t.Helper()
	got := scan(b)
	m := &alsv3.StreamAccessLogsMessage{}
	if proto.Unmarshal(b, m) != nil {
		return
	}
	node := m.GetIdentifier().GetNode().GetId()
	if node == "" {
		node = "unnamed"
	} else if len(node) > maxID {
		node = strings.ToValidUTF8(node[:maxID], "\uFFFD") + "…"
	}
	if got.node != node {
		t.Fatalf("node %q; want %q", got.node, node)
	}
	var want []fleet.Outcome
	ignored := 0
	for _, e := range m.GetHttpLogs().GetLogEntry() {
		o, ok := oracleOutcome(e, m.GetIdentifier().GetLogName(), node, epoch)
		if !ok {
			ignored++
			continue
		}
		o.ID = strings.ToValidUTF8(o.ID, "\uFFFD") // cut off within a character
		want = append(want, o)
	}
	if len(got.outcomes) != len(want) || got.ignored != ignored {
		t.Fatalf("%d outcomes, %d ignored; want %d, %d", len(got.outcomes), got.ignored, len(want), ignored)
	}
	for i := range want {
		if got.outcomes[i] != want[i] {
			t.Fatalf("entry %d:\n got %+v\nwant %+v", i, got.outcomes[i], want[i])
		}
	}
}

func TestScannerReadsWhatTheGeneratedTypesRead(t *testing.T) {
	for _, b := range seeds(t) {
		checkAgainstOracle(t, b)
	}
}

// TestScannerReadsMergedMessages sets entries together from pieces: fields that
// come twice, in another order, or split over several messages of the same
// number, as any protobuf writer may send them.
func TestScannerReadsMergedMessages(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var entries [][]byte
	for _, kind := range []alsdatav3.AccessLogType{alsdatav3.AccessLogType_UpstreamEnd, alsdatav3.AccessLogType_DownstreamEnd} {
		for _, e := range []*alsdatav3.HTTPAccessLogEntry{rich(kind), upstreamEntry(kind), downstreamEntry(kind)} {
			entries = append(entries, marshal(t, e))
		}
	}
	for range 3000 {
		var e []byte
		for range 1 + random.IntN(3) {
			e = append(e, shuffled(random, entries[random.IntN(len(entries))], new(alsdatav3.HTTPAccessLogEntry).ProtoReflect().Descriptor())...)
		}
		log := []string{wire.LogUpstream, wire.LogDownstream}[random.IntN(2)]
		b := marshal(t, logMessage("edge-1", log))
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		b = protowire.AppendBytes(b, protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), e))
		checkAgainstOracle(t, b)
	}
}

// shuffled puts the fields of a message in another order, doubles some and does
// the same to the messages in it.
func shuffled(random *rand.Rand, b []byte, d protoreflect.MessageDescriptor) []byte {
	var fields [][]byte
	for len(b) > 0 {
		number, typ, n := protowire.ConsumeTag(b)
		size := protowire.ConsumeFieldValue(number, typ, b[n:])
		field := b[:n+size]
		if f := d.Fields().ByNumber(number); f != nil && f.Message() != nil && typ == protowire.BytesType {
			inner, _ := protowire.ConsumeBytes(b[n:])
			field = protowire.AppendTag(nil, number, typ)
			field = protowire.AppendBytes(field, shuffled(random, inner, f.Message()))
		}
		fields = append(fields, field)
		if random.IntN(8) == 0 {
			fields = append(fields, field)
		}
		b = b[n+size:]
	}
	random.Shuffle(len(fields), func(i, k int) { fields[i], fields[k] = fields[k], fields[i] })
	var out []byte
	for _, f := range fields {
		out = append(out, f...)
	}
	return out
}

func TestMalformedEntryIsIgnoredAlone(t *testing.T) {
	good := marshal(t, upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd))
	logs := func(entries ...[]byte) []byte {
		var list []byte
		for _, e := range entries {
			list = protowire.AppendBytes(protowire.AppendTag(list, 1, protowire.BytesType), e)
		}
		b := marshal(t, logMessage("edge-1", wire.LogUpstream))
		return protowire.AppendBytes(protowire.AppendTag(b, 2, protowire.BytesType), list)
	}
	whole := logs(good, good)
	for _, row := range []struct {
		name          string
		message       []byte
		good, ignored int
	}{
		{"entry cut off", logs(good, good[:len(good)-3], good), 2, 1},
		{"entry of rubbish", logs(good, []byte{0xff, 0xff, 0xff}, good), 2, 1},
		{"entry of field 0", logs([]byte{0x00, 0x01}, good), 1, 1},
		{"message cut off", whole[:len(whole)-3], 0, 1},
		{"rubbish behind the entries", append(logs(good), 0x0f), 1, 1},
		{"all rubbish", []byte{0xff}, 0, 1},
		{"empty", nil, 0, 0},
	} {
		if got := scan(row.message); len(got.outcomes) != row.good || got.ignored != row.ignored {
			t.Errorf("%s: %d outcomes, %d ignored; want %d, %d", row.name, len(got.outcomes), got.ignored, row.good, row.ignored)
		}
	}
}

func TestBytesThatAreNoTextBecomeText(t *testing.T) {
	e := upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd)
	b := marshal(t, logMessage("edge-1", wire.LogUpstream, e))
	for _, word := range []string{"chat", "h100", id, "edge-1"} {
		b = []byte(strings.ReplaceAll(string(b), word, "\xff"+word[1:]))
	}
	got := scan(b)
	if len(got.outcomes) != 1 {
		t.Fatalf("%+v", got)
	}
	o := got.outcomes[0]
	for _, s := range []string{o.ID, o.Route, o.Endpoint.Pool, o.Node} {
		if !utf8.ValidString(s) || !strings.HasPrefix(s, "\uFFFD") {
			t.Errorf("%q", s)
		}
	}
}

func TestNamesAreKeptOnceAndBounded(t *testing.T) {
	n := newNames()
	for i := range 3 * maxNames {
		want := fmt.Sprintf("route-%d", i)
		if got := n.of([]byte(want)); got != want {
			t.Fatalf("%q; want %q", got, want)
		}
	}
	long := strings.Repeat("x", maxName+1)
	if got := n.of([]byte(long)); got != long || len(n.strings) != maxNames {
		t.Errorf("%d names are kept", len(n.strings))
	}
	for i := range 3 * maxNames {
		want := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		if got := n.addr([]byte(want.String())); got != want {
			t.Fatalf("%v; want %v", got, want)
		}
	}
	if len(n.addrs) != maxNames || n.addr([]byte("model.example")).IsValid() {
		t.Errorf("%d addresses are kept", len(n.addrs))
	}
}

func TestUsage(t *testing.T) {
	type tagged = map[string]string
	for _, row := range []struct {
		name string
		code uint32
		tags tagged
		want fleet.Usage
	}{
		{"no tags", 200, nil, fleet.Usage{}},
		{"Envoy's sign for nothing", 200, tagged{wire.TagInput: "-", wire.TagOutput: "-", wire.TagSSEOutput: "", wire.TagSSEError: "-"}, fleet.Usage{}},
		{"all", 200, tagged{wire.TagInput: "18", wire.TagCached: "5", wire.TagOutput: "200"}, fleet.Usage{Known: true, Input: 18, Cached: 5, Output: 200}},
		{"nothing put out", 200, tagged{wire.TagInput: "18", wire.TagOutput: "0"}, fleet.Usage{Known: true, Input: 18}},
		{"more cached than there was", 200, tagged{wire.TagInput: "18", wire.TagCached: "50"}, fleet.Usage{Known: true, Input: 18, Cached: 18}},
		{"cached alone", 200, tagged{wire.TagCached: "5"}, fleet.Usage{}},
		{"broken off", 200, tagged{wire.TagSSEOutput: "37"}, fleet.Usage{Known: true, Output: 37}},
		{"as a double", 200, tagged{wire.TagSSEOutput: "1.5e+03"}, fleet.Usage{Known: true, Output: 1500}},
		{"stream told more", 200, tagged{wire.TagInput: "1", wire.TagOutput: "7", wire.TagSSEOutput: "9"}, fleet.Usage{Known: true, Input: 1, Output: 9}},
		{"stream told less", 200, tagged{wire.TagInput: "1", wire.TagOutput: "7", wire.TagSSEOutput: "5"}, fleet.Usage{Known: true, Input: 1, Output: 7}},
		{"error in a 200", 200, tagged{wire.TagSSEError: "overloaded_error"}, fleet.Usage{Error: true}},
		{"error after some tokens", 200, tagged{wire.TagSSEError: "x", wire.TagSSEOutput: "3"}, fleet.Usage{Known: true, Output: 3, Error: true}},
		{"error of a 500 is no news", 500, tagged{wire.TagSSEError: "x"}, fleet.Usage{}},
		{"rubbish", 200, tagged{wire.TagInput: "many", wire.TagOutput: "-7", wire.TagSSEOutput: "NaN", wire.TagCached: "Inf"}, fleet.Usage{}},
		{"beyond any model", 200, tagged{wire.TagInput: "1000000001", wire.TagOutput: "99999999999999999999"}, fleet.Usage{}},
		{"one of them rubbish", 200, tagged{wire.TagInput: "18", wire.TagOutput: "1e999"}, fleet.Usage{Known: true, Input: 18}},
	} {
		e := downstreamEntry(alsdatav3.AccessLogType_DownstreamEnd)
		e.CommonProperties.CustomTags = row.tags
		e.Response.ResponseCode.Value = row.code
		if o, ok := outcomeOf(t, e, wire.LogDownstream); !ok || o.Usage != row.want {
			t.Errorf("%s: %+v; want %+v", row.name, o.Usage, row.want)
		}
		for _, kind := range []alsdatav3.AccessLogType{alsdatav3.AccessLogType_DownstreamPeriodic, alsdatav3.AccessLogType_UpstreamEnd} {
			e.CommonProperties.AccessLogType = kind
			log := wire.LogDownstream
			if kind == alsdatav3.AccessLogType_UpstreamEnd {
				log = wire.LogUpstream
			}
			if o, _ := outcomeOf(t, e, log); o.Usage != (fleet.Usage{}) {
				t.Errorf("%s: %v has usage %+v", row.name, kind, o.Usage)
			}
		}
	}
}

func TestRetryAfterOfAttempts(t *testing.T) {
	for _, row := range []struct {
		name    string
		kind    alsdatav3.AccessLogType
		code    uint32
		headers map[string]string
		want    time.Duration
	}{
		{"throttled", alsdatav3.AccessLogType_UpstreamEnd, 429, map[string]string{"retry-after": "3"}, 3 * time.Second},
		{"busy", alsdatav3.AccessLogType_UpstreamEnd, 503, map[string]string{"retry-after-ms": "250", "retry-after": "1"}, 250 * time.Millisecond},
		{"overloaded", alsdatav3.AccessLogType_UpstreamEnd, 529, map[string]string{"x-ratelimit-reset-requests": "6m0s", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-tokens": "1s"}, 6 * time.Minute},
		{"three years", alsdatav3.AccessLogType_UpstreamEnd, 429, map[string]string{"retry-after": "99999999"}, 24 * time.Hour},
		{"20 digits", alsdatav3.AccessLogType_UpstreamEnd, 503, map[string]string{"retry-after-ms": "99999999999999999999"}, 24 * time.Hour},
		{"the year 9999", alsdatav3.AccessLogType_UpstreamEnd, 529, map[string]string{"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 24 * time.Hour},
		{"tells nothing", alsdatav3.AccessLogType_UpstreamEnd, 429, map[string]string{"retry-after": "soon"}, 0},
		{"no headers", alsdatav3.AccessLogType_UpstreamEnd, 429, nil, 0},
		{"resets on a good answer", alsdatav3.AccessLogType_UpstreamEnd, 200, map[string]string{"x-ratelimit-reset-requests": "1s"}, 0},
		{"another error", alsdatav3.AccessLogType_UpstreamEnd, 500, map[string]string{"retry-after": "3"}, 0},
		{"before the end", alsdatav3.AccessLogType_UpstreamPoolReady, 429, map[string]string{"retry-after": "3"}, 0},
	} {
		e := upstreamEntry(row.kind)
		e.Response.ResponseCode.Value = row.code
		e.Response.ResponseHeaders = row.headers
		if o, ok := outcomeOf(t, e, wire.LogUpstream); !ok || o.RetryAfter != row.want {
			t.Errorf("%s: %v; want %v", row.name, o.RetryAfter, row.want)
		}
	}
}

// FuzzMessage feeds bytes as one log message through both readers and the
// ledger.
func FuzzMessage(f *testing.F) {
	for _, b := range seeds(f) {
		f.Add(b)
	}
	l := NewLedger(func() time.Time { return epoch }) // empty again after each message
	f.Fuzz(func(t *testing.T, b []byte) {
		checkAgainstOracle(t, b)
		for _, o := range scan(b).outcomes {
			if len(o.ID) > 3*maxID || o.Attempt < 0 || o.Attempt > maxAttempt || o.RequestBytes < 0 || o.ResponseBytes < 0 ||
				o.RetryAfter < 0 || o.Usage.Input < 0 || o.Usage.Cached > o.Usage.Input || o.Usage.Output < 0 ||
				!utf8.ValidString(o.ID) || !utf8.ValidString(o.Route) {
				t.Errorf("outcome out of bounds: %+v", o)
			}
			l.Apply(o)
		}
		l.Expire(epoch.Add(Lease + memory))
		if l.Total() != 0 {
			t.Errorf("%v in flight", l.Snapshot())
		}
	})
}

// FuzzEntry mutates one entry, so that mutations land in the fields that count.
func FuzzEntry(f *testing.F) {
	for _, kind := range []alsdatav3.AccessLogType{alsdatav3.AccessLogType_UpstreamEnd, alsdatav3.AccessLogType_DownstreamEnd} {
		f.Add(marshal(f, rich(kind)), true)
		f.Add(marshal(f, upstreamEntry(kind)), true)
		f.Add(marshal(f, downstreamEntry(kind)), false)
	}
	f.Fuzz(func(t *testing.T, e []byte, upstream bool) {
		log := wire.LogDownstream
		if upstream {
			log = wire.LogUpstream
		}
		b := marshal(t, logMessage("edge-1", log))
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		checkAgainstOracle(t, protowire.AppendBytes(b, protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), e)))
	})
}
