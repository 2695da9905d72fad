package accesslog

import (
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"

	"github.com/fairlead-proxy/fairlead/extproc/retryafter"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// maxID bounds the ids that are believed; a longer one is cut off, since a
// client can choose it where ext_proc is away.
const maxID = 128

// logKind is the log that a stream carries.
type logKind uint8

const (
	logOther logKind = iota // somebody else's: nothing of it is read
	logUpstream
	logDownstream
)

func logOf(name []byte) logKind {
	switch string(name) {
	case wire.LogUpstream:
		return logUpstream
	case wire.LogDownstream:
		return logDownstream
	}
	return logOther
}

// outcome translates the entry that was scanned last, of a log written by Envoy
// node, arrived at. It returns false for entries that tell nothing of use.
// Nothing of the outcome points into the message.
func (e *entry) outcome(o *fleet.Outcome, log logKind, node string, names names, at time.Time) bool {
	kind := kindOf(e.kind)
	if kind == 0 || log == logOther {
		return false
	}
	*o = fleet.Outcome{
		Kind:     kind,
		Node:     node,
		Endpoint: e.endpoint(names),
		Route:    names.of(e.route),
		Code:     int(e.code),
		Duration: e.duration.proto().AsDuration(),
		At:       at,
	}
	if log == logUpstream {
		e.attempt(o)
	} else {
		e.request(o)
	}
	return true
}

// kindOf is 0 for types of no use.
func kindOf(logged int32) fleet.OutcomeKind {
	switch alsdatav3.AccessLogType(logged) {
	case alsdatav3.AccessLogType_UpstreamPoolReady:
		return fleet.AttemptStarted
	case alsdatav3.AccessLogType_UpstreamEnd:
		return fleet.AttemptEnded
	case alsdatav3.AccessLogType_DownstreamPeriodic:
		return fleet.Heartbeat
	case alsdatav3.AccessLogType_DownstreamEnd:
		return fleet.RequestEnded
	}
	return 0
}

// attempt fills in what an attempt's entry says. In UpstreamEnd the two sizes
// are swapped (Envoy 1.40.0), and the times count from the attempt's start.
func (e *entry) attempt(o *fleet.Outcome) {
	o.ID = e.id(true)
	o.Attempt = count(e.tags.attempt)
	o.HeaderTime = e.firstRx.proto().AsDuration()
	if o.Kind != fleet.AttemptEnded {
		return
	}
	o.RequestBytes = size(e.responseBytes)
	o.ResponseBytes = size(e.requestBytes)
	o.Cause = causeOf(o.Code, e.flags, true)
	o.RetryAfter = e.retryAfter(o.At)
}

// request fills in what a request's entry says.
func (e *entry) request(o *fleet.Outcome) {
	o.ID = e.id(o.Endpoint.Address.IsValid())
	o.Attempt = int(min(e.attempts, maxAttempt))
	if got := e.firstRx.proto().AsDuration(); got > 0 {
		o.HeaderTime = max(got-e.firstTx.proto().AsDuration(), 0)
	}
	o.RequestBytes = size(e.requestBytes)
	o.ResponseBytes = size(e.responseBytes)
	if o.Kind == fleet.RequestEnded {
		o.Cause = causeOf(o.Code, e.flags, o.Endpoint.Address.IsValid())
		o.Usage = e.tags.usage(o.Code)
	}
}

// id is the decision's, or the request's. sent says that the request went to a
// server. A request that Envoy refuses before it takes its caller's headers off, or
// gives it an id, shows what its caller wrote there: whoever wrote another's decision
// id would end that one. The metadata are ext_proc's own.
func (e *entry) id(sent bool) string {
	if id := firstID(e.decision); id != "" {
		return id
	}
	if id := firstID(e.tags.decision); sent && id != "" {
		return id
	}
	id := firstID(e.headerRequestID, e.requestID)
	if Decided(id) {
		return forged + id
	}
	return id
}

// forged marks request ids that have the shape of a decision's.
const forged = "~"

// firstID returns the first id there is, made fit for keys and logs.
func firstID(ids ...[]byte) string {
	for _, id := range ids {
		if len(id) > 0 && string(id) != "-" {
			return text(id[:min(len(id), maxID)])
		}
	}
	return ""
}

// text copies bytes that should be UTF-8.
func text(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}

// maxAttempt is far above what any route allows and far below requestOver.
const maxAttempt = 1000

// count reads an attempt number; 0 when there is none.
func count(b []byte) int {
	n, err := strconv.ParseUint(string(b), 10, 32)
	if err != nil {
		return 0
	}
	return int(min(n, maxAttempt))
}

func size(n uint64) int64 { return int64(min(n, 1<<62)) }

// endpoint is the server really used; the zero key where there was none or where
// it is not an IP address (the floor endpoint may be a pipe).
func (e *entry) endpoint(names names) fleet.EndpointKey {
	if len(e.upstream.host) == 0 || e.upstream.port > math.MaxUint16 {
		return fleet.EndpointKey{}
	}
	ip := names.addr(e.upstream.host)
	if !ip.IsValid() {
		return fleet.EndpointKey{}
	}
	return fleet.EndpointKey{Pool: names.of(e.cluster), Address: netip.AddrPortFrom(ip, uint16(e.upstream.port))}
}

// maxNames bounds the names and the addresses that a stream remembers; further
// ones are read from each entry. maxName is how long a remembered one may be.
const (
	maxNames = 512
	maxName  = 128
)

// names keeps one string of each route and pool that a stream tells of, and the
// address of each server, so that an entry's need no memory of their own.
type names struct {
	strings map[string]string
	addrs   map[string]netip.Addr
}

func newNames() names {
	return names{strings: map[string]string{}, addrs: map[string]netip.Addr{}}
}

func (n names) of(b []byte) string {
	if s, ok := n.strings[string(b)]; ok {
		return s
	}
	s := text(b)
	if len(n.strings) < maxNames && len(b) <= maxName {
		n.strings[string(b)] = s
	}
	return s
}

// addr reads an IP address; it is the zero one where b is none.
func (n names) addr(b []byte) netip.Addr {
	if a, ok := n.addrs[string(b)]; ok {
		return a
	}
	a, err := netip.ParseAddr(string(b))
	if err == nil && len(n.addrs) < maxNames && len(b) <= maxName {
		n.addrs[string(b)] = a
	}
	return a
}

// Response flags that classify an end, by their field numbers in ResponseFlags.
const (
	flagsClientGone    flagSet = 1<<15 | 1<<19 | 1<<28        // downstream: connection termination, protocol error, remote reset
	flagsTimeout       flagSet = 1<<3 | 1<<17 | 1<<20 | 1<<23 // upstream request timeout, stream idle timeout, max stream duration reached, duration timeout
	flagsConnectFailed flagSet = 1<<6 | 1<<27                 // upstream connection failure, DNS resolution failure
	flagsReset         flagSet = 1<<5 | 1<<7 | 1<<24          // upstream: remote reset, connection termination, protocol error
	flagsLocal         flagSet = 1<<2 | 1<<4 | 1<<8 | 1<<9 |  // no healthy upstream, local reset, upstream overflow, no route found
		1<<12 | 1<<22 | 1<<25 | 1<<26 // rate limited, no filter config found, no cluster found, overload manager
)

// causeOf classes an end by its response flags first, then by its status.
// Flags say what happened to the connection; a status may have been written by
// Envoy itself. reached tells whether an upstream was chosen.
func causeOf(code int, f flagSet, reached bool) fleet.Cause {
	switch {
	case f.any(flagsClientGone):
		return fleet.CauseClientGone
	case f.any(flagsTimeout):
		return fleet.CauseTimeout
	case f.any(flagsConnectFailed):
		return fleet.CauseConnectFailed
	case f.any(flagsReset):
		return fleet.CauseReset
	case f.any(flagsLocal), !reached:
		return fleet.CauseLocal
	}
	switch {
	case code == 0:
		return fleet.CauseClientGone // the attempt was given up before any status, by nobody upstream
	case code == 429:
		return fleet.CauseThrottled
	case code >= 500:
		return fleet.CauseServerError
	case code >= 400:
		return fleet.CauseClientError
	default:
		return fleet.CauseOK
	}
}

// retryIndex finds the headers that retryafter reads.
var (
	retryNames = retryafter.Headers()
	retryIndex = indexOf(retryNames)
)

func indexOf(names []string) map[string]int {
	out := make(map[string]int, len(names))
	for i, name := range names {
		out[name] = i
	}
	return out
}

// retryAfter is what an answer that puts callers off told them to wait, 0 if
// nothing.
func (e *entry) retryAfter(at time.Time) time.Duration {
	if len(e.retry) == 0 || !fleet.TurnsAway(int(e.code)) {
		return 0
	}
	d, _ := retryafter.Wait(func(name string) string {
		for _, h := range e.retry {
			if retryNames[h.index] == name {
				return string(h.value)
			}
		}
		return ""
	}, at)
	return d
}

// usage reads what an answer said it took.
//
// Envoy tells input, cached and output of answers that came to their end; input
// contains cached. Of a stream that broke off it tells only the output told up
// to then: that is Known too, with Input 0, which no real prompt has, so that
// whoever charges for it adds an estimate of the prompt instead of letting the
// whole go by a guess. The larger output counts: what was told was used.
// A tag that is no plausible count is as if it were not there.
func (t *tags) usage(code int) fleet.Usage {
	input, hasInput := tokens(t.input)
	output, hasOutput := tokens(t.output)
	told, hasTold := tokens(t.sseTold)
	u := fleet.Usage{Error: code >= 200 && code < 300 && present(t.sseErr)}
	if !hasInput && !hasOutput && !hasTold {
		return u
	}
	cached, _ := tokens(t.cached)
	u.Known, u.Input, u.Cached, u.Output = true, input, min(cached, input), max(output, told)
	return u
}

// present: Envoy writes "-" for what isn't there.
func present(tag []byte) bool { return len(tag) > 0 && string(tag) != "-" }

// maxTokens is far above what any model takes or makes in one request.
const maxTokens = 1e9

// tokens reads a count. Envoy writes numbers that came through metadata as it
// writes a double: 1e+06.
func tokens(tag []byte) (fleet.Tokens, bool) {
	if !present(tag) {
		return 0, false
	}
	n, err := strconv.ParseFloat(string(tag), 64)
	if err != nil || !(n >= 0 && n <= maxTokens) {
		return 0, false
	}
	return fleet.Tokens(math.Round(n)), true
}
