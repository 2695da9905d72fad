package accesslog

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func address(host string, port uint32) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address: host, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: port},
	}}}
}

// upstreamEntry is an attempt's entry as Envoy 1.40.0 writes it: the two sizes
// of UpstreamEnd are swapped.
func upstreamEntry(kind alsdatav3.AccessLogType) *alsdatav3.HTTPAccessLogEntry {
	return &alsdatav3.HTTPAccessLogEntry{
		CommonProperties: &alsdatav3.AccessLogCommon{
			AccessLogType:             kind,
			UpstreamRemoteAddress:     address("10.0.0.1", 8000),
			UpstreamCluster:           "h100",
			RouteName:                 "chat",
			CustomTags:                map[string]string{wire.TagDecision: id, wire.TagAttempt: "2"},
			Duration:                  durationpb.New(2 * time.Second),
			TimeToFirstUpstreamRxByte: durationpb.New(30 * time.Millisecond),
		},
		Request:  &alsdatav3.HTTPRequestProperties{RequestBodyBytes: 277, RequestId: "uuid"},
		Response: &alsdatav3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(200), ResponseBodyBytes: 36},
	}
}

func downstreamEntry(kind alsdatav3.AccessLogType) *alsdatav3.HTTPAccessLogEntry {
	log, _ := structpb.NewStruct(map[string]any{wire.KeyDecision: id, wire.KeyStrategy: "dynamic"})
	return &alsdatav3.HTTPAccessLogEntry{
		CommonProperties: &alsdatav3.AccessLogCommon{
			AccessLogType:               kind,
			UpstreamRemoteAddress:       address("10.0.0.1", 8000),
			UpstreamCluster:             "h100",
			RouteName:                   "chat",
			UpstreamRequestAttemptCount: 2,
			Duration:                    durationpb.New(3 * time.Second),
			TimeToFirstUpstreamTxByte:   durationpb.New(10 * time.Millisecond),
			TimeToFirstUpstreamRxByte:   durationpb.New(40 * time.Millisecond),
			Metadata:                    &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{wire.NamespaceLog: log}},
		},
		Request:  &alsdatav3.HTTPRequestProperties{RequestBodyBytes: 36, RequestId: "uuid"},
		Response: &alsdatav3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(200), ResponseBodyBytes: 277},
	}
}

// outcomeOf lets the scanner read an entry of the log named logName.
func outcomeOf(t testing.TB, e *alsdatav3.HTTPAccessLogEntry, logName string) (fleet.Outcome, bool) {
	t.Helper()
	b, err := proto.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	var scanned entry
	var o fleet.Outcome
	if !scanned.scan(b) {
		t.Fatalf("malformed: %v", e)
	}
	ok := scanned.outcome(&o, logOf([]byte(logName)), "edge-1", newNames(), epoch)
	return o, ok
}

func TestEntriesBecomeOutcomes(t *testing.T) {
	on := fleet.EndpointKey{Pool: "h100", Address: netip.MustParseAddrPort("10.0.0.1:8000")}
	base := fleet.Outcome{Node: "edge-1", ID: id, Attempt: 2, Endpoint: on, Route: "chat", Code: 200, HeaderTime: 30 * time.Millisecond, At: epoch}
	for _, row := range []struct {
		name   string
		entry  *alsdatav3.HTTPAccessLogEntry
		log    string
		change func(*fleet.Outcome)
	}{
		{"attempt start", upstreamEntry(alsdatav3.AccessLogType_UpstreamPoolReady), wire.LogUpstream, func(o *fleet.Outcome) {
			o.Kind, o.Duration = fleet.AttemptStarted, 2*time.Second
		}},
		{"attempt end", upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd), wire.LogUpstream, func(o *fleet.Outcome) {
			o.Kind, o.Duration, o.Cause = fleet.AttemptEnded, 2*time.Second, fleet.CauseOK
			o.RequestBytes, o.ResponseBytes = 36, 277
		}},
		{"heartbeat", downstreamEntry(alsdatav3.AccessLogType_DownstreamPeriodic), wire.LogDownstream, func(o *fleet.Outcome) {
			o.Kind, o.Duration = fleet.Heartbeat, 3*time.Second
			o.RequestBytes, o.ResponseBytes = 36, 277
		}},
		{"request end", downstreamEntry(alsdatav3.AccessLogType_DownstreamEnd), wire.LogDownstream, func(o *fleet.Outcome) {
			o.Kind, o.Duration, o.Cause = fleet.RequestEnded, 3*time.Second, fleet.CauseOK
			o.RequestBytes, o.ResponseBytes = 36, 277
		}},
	} {
		want := base
		row.change(&want)
		if got, ok := outcomeOf(t, row.entry, row.log); !ok || got != want {
			t.Errorf("%s:\n got %+v (%v)\nwant %+v", row.name, got, ok, want)
		}
	}
}

func TestEntriesOfNoUse(t *testing.T) {
	end := downstreamEntry(alsdatav3.AccessLogType_DownstreamEnd)
	for name, row := range map[string]struct {
		entry *alsdatav3.HTTPAccessLogEntry
		log   string
	}{
		"nil":             {nil, wire.LogDownstream},
		"empty":           {&alsdatav3.HTTPAccessLogEntry{}, wire.LogDownstream},
		"another log":     {end, "somebody-elses"},
		"other type":      {downstreamEntry(alsdatav3.AccessLogType_DownstreamStart), wire.LogDownstream},
		"type of tomorro": {downstreamEntry(99), wire.LogUpstream},
	} {
		if o, ok := outcomeOf(t, row.entry, row.log); ok {
			t.Errorf("%s became %+v", name, o)
		}
	}
}

func TestIDFallsBackToEnvoysRequestID(t *testing.T) {
	down := downstreamEntry(alsdatav3.AccessLogType_DownstreamEnd)
	down.CommonProperties.Metadata = nil
	up := upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd)
	up.CommonProperties.CustomTags[wire.TagDecision] = "-"
	for name, e := range map[string]*alsdatav3.HTTPAccessLogEntry{wire.LogDownstream: down, wire.LogUpstream: up} {
		if o, _ := outcomeOf(t, e, name); o.ID != "uuid" {
			t.Errorf("%s: id %q", name, o.ID)
		}
		e.Request.RequestHeaders = map[string]string{wire.HeaderRequestID: strings.Repeat("x", 10<<20)}
		if o, _ := outcomeOf(t, e, name); len(o.ID) != maxID {
			t.Errorf("%s: id of %d bytes", name, len(o.ID))
		}
	}
}

func TestFloorEndpointAndOddAddressesAreNoEndpoint(t *testing.T) {
	for name, a := range map[string]*corev3.Address{
		"none": nil, "pipe": {Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: "/void"}}},
		"name": address("model.example", 80), "port": address("10.0.0.1", 70000), "empty": address("", 0),
	} {
		e := upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd)
		e.CommonProperties.UpstreamRemoteAddress = a
		if o, ok := outcomeOf(t, e, wire.LogUpstream); !ok || o.Endpoint != (fleet.EndpointKey{}) {
			t.Errorf("%s: %+v", name, o.Endpoint)
		}
	}
}

func TestCauses(t *testing.T) {
	type flags = alsdatav3.ResponseFlags
	for _, row := range []struct {
		name    string
		code    uint32
		flags   *flags
		reached bool
		want    fleet.Cause
	}{
		{"fine", 200, nil, true, fleet.CauseOK},
		{"redirect", 304, nil, true, fleet.CauseOK},
		{"client error", 400, nil, true, fleet.CauseClientError},
		{"throttled by the server", 429, nil, true, fleet.CauseThrottled},
		{"shed by us", 429, nil, false, fleet.CauseLocal},
		{"server error", 500, nil, true, fleet.CauseServerError},
		{"retries used up", 503, &flags{UpstreamRetryLimitExceeded: true}, true, fleet.CauseServerError},
		{"refused", 503, &flags{UpstreamConnectionFailure: true}, true, fleet.CauseConnectFailed},
		{"reset in the middle", 200, &flags{UpstreamConnectionTermination: true}, true, fleet.CauseReset},
		{"stream reset", 503, &flags{UpstreamRemoteReset: true}, true, fleet.CauseReset},
		{"protocol error", 502, &flags{UpstreamProtocolError: true}, true, fleet.CauseReset},
		{"attempt's time limit", 504, &flags{UpstreamRequestTimeout: true}, true, fleet.CauseTimeout},
		{"idle", 408, &flags{StreamIdleTimeout: true}, true, fleet.CauseTimeout},
		{"client gone in the middle", 200, &flags{DownstreamConnectionTermination: true}, true, fleet.CauseClientGone},
		{"client gone before headers", 0, &flags{DownstreamConnectionTermination: true}, true, fleet.CauseClientGone},
		{"client gone before an upstream", 0, &flags{DownstreamConnectionTermination: true}, false, fleet.CauseClientGone},
		{"attempt given up", 0, nil, true, fleet.CauseClientGone},
		{"no healthy host", 503, &flags{NoHealthyUpstream: true}, false, fleet.CauseLocal},
		{"breaker", 503, &flags{UpstreamOverflow: true}, true, fleet.CauseLocal},
		{"no route", 404, &flags{NoRouteFound: true}, false, fleet.CauseLocal},
	} {
		b, err := proto.Marshal(row.flags)
		if err != nil {
			t.Fatal(err)
		}
		var f flagSet
		if !f.scan(b) {
			t.Fatalf("%s: malformed", row.name)
		}
		if got := causeOf(int(row.code), f, row.reached); got != row.want {
			t.Errorf("%s: %v; want %v", row.name, got, row.want)
		}
	}
}

// TestCallersCannotNameAnothersDecision: of a request that Envoy refuses before its
// filters the log shows the caller's own headers.
func TestCallersCannotNameAnothersDecision(t *testing.T) {
	const others = "1718924567123-007-0001"
	for name, set := range map[string]func(*alsdatav3.HTTPAccessLogEntry){
		"request id": func(e *alsdatav3.HTTPAccessLogEntry) { e.Request.RequestId = others },
		"its header": func(e *alsdatav3.HTTPAccessLogEntry) {
			e.Request.RequestHeaders = map[string]string{wire.HeaderRequestID: others}
		},
		"decision header": func(e *alsdatav3.HTTPAccessLogEntry) {
			e.CommonProperties.CustomTags = map[string]string{wire.TagDecision: others}
		},
	} {
		e := &alsdatav3.HTTPAccessLogEntry{
			CommonProperties: &alsdatav3.AccessLogCommon{AccessLogType: alsdatav3.AccessLogType_DownstreamEnd},
			Request:          &alsdatav3.HTTPRequestProperties{},
		}
		set(e)
		got := scan(marshal(t, logMessage("edge-1", wire.LogDownstream, e)))
		if len(got.outcomes) != 1 || Decided(got.outcomes[0].ID) {
			t.Errorf("%s: %+v", name, got.outcomes)
		}
	}
}
