package accesslog

import (
	"math"
	"net/netip"
	"strconv"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"

	"github.com/fairlead-proxy/fairlead/extproc/retryafter"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// oracleOutcome is what the scanner must find, read by the generated types: an
// entry of the log named logName, written by Envoy node, arrived at.
func oracleOutcome(e *alsdatav3.HTTPAccessLogEntry, logName, node string, at time.Time) (fleet.Outcome, bool) {
	c := e.GetCommonProperties()
	o := fleet.Outcome{
		Node:     node,
		Endpoint: endpointOf(c),
		Route:    c.GetRouteName(),
		Code:     int(e.GetResponse().GetResponseCode().GetValue()),
		Duration: c.GetDuration().AsDuration(),
		At:       at,
	}
	switch c.GetAccessLogType() {
	case alsdatav3.AccessLogType_UpstreamPoolReady:
		o.Kind = fleet.AttemptStarted
	case alsdatav3.AccessLogType_UpstreamEnd:
		o.Kind = fleet.AttemptEnded
	case alsdatav3.AccessLogType_DownstreamPeriodic:
		o.Kind = fleet.Heartbeat
	case alsdatav3.AccessLogType_DownstreamEnd:
		o.Kind = fleet.RequestEnded
	default:
		return fleet.Outcome{}, false
	}
	switch logName {
	case wire.LogUpstream:
		oracleUpstream(&o, e)
	case wire.LogDownstream:
		oracleDownstream(&o, e)
	default:
		return fleet.Outcome{}, false
	}
	return o, true
}

// oracleUpstream is for an attempt's entry. In UpstreamEnd the two sizes
// are swapped (Envoy 1.40.0), and the times count from the attempt's start.
func oracleUpstream(o *fleet.Outcome, e *alsdatav3.HTTPAccessLogEntry) {
	c := e.GetCommonProperties()
	o.ID = oracleID(e, true)
	o.Attempt = oracleCount(c.GetCustomTags()[wire.TagAttempt])
	o.HeaderTime = c.GetTimeToFirstUpstreamRxByte().AsDuration()
	if o.Kind != fleet.AttemptEnded {
		return
	}
	o.RequestBytes = size(e.GetResponse().GetResponseBodyBytes())
	o.ResponseBytes = size(e.GetRequest().GetRequestBodyBytes())
	o.Cause = oracleCause(o.Code, c.GetResponseFlags(), true)
	switch o.Code {
	case 429, 503, 529:
		headers := e.GetResponse().GetResponseHeaders()
		o.RetryAfter, _ = retryafter.Wait(func(name string) string { return headers[name] }, o.At)
	}
}

// oracleDownstream is for a request's entry.
func oracleDownstream(o *fleet.Outcome, e *alsdatav3.HTTPAccessLogEntry) {
	c := e.GetCommonProperties()
	o.ID = oracleID(e, o.Endpoint.Address.IsValid())
	o.Attempt = int(min(c.GetUpstreamRequestAttemptCount(), maxAttempt))
	sent := c.GetTimeToFirstUpstreamTxByte().AsDuration()
	if got := c.GetTimeToFirstUpstreamRxByte().AsDuration(); got > 0 {
		o.HeaderTime = max(got-sent, 0)
	}
	o.RequestBytes = size(e.GetRequest().GetRequestBodyBytes())
	o.ResponseBytes = size(e.GetResponse().GetResponseBodyBytes())
	if o.Kind == fleet.RequestEnded {
		o.Cause = oracleCause(o.Code, c.GetResponseFlags(), o.Endpoint.Address.IsValid())
		o.Usage = oracleUsage(c.GetCustomTags(), o.Code)
	}
}

// oracleID believes what ext_proc told, what reached a server next, and a caller last.
func oracleID(e *alsdatav3.HTTPAccessLogEntry, sent bool) string {
	c := e.GetCommonProperties()
	told := c.GetMetadata().GetFilterMetadata()[wire.NamespaceLog].GetFields()[wire.KeyDecision].GetStringValue()
	tag := ""
	if sent {
		tag = c.GetCustomTags()[wire.TagDecision]
	}
	if id := oracleFirstID(told, tag); id != "" {
		return id
	}
	id := oracleFirstID(oracleRequestID(e))
	if Decided(id) {
		return "~" + id
	}
	return id
}

func oracleRequestID(e *alsdatav3.HTTPAccessLogEntry) string {
	if id := e.GetRequest().GetRequestHeaders()[wire.HeaderRequestID]; id != "" {
		return id
	}
	return e.GetRequest().GetRequestId()
}

func oracleFirstID(ids ...string) string {
	for _, id := range ids {
		if id != "" && id != "-" {
			return id[:min(len(id), maxID)]
		}
	}
	return ""
}

// oracleCount reads an attempt number; 0 when there is none.
func oracleCount(s string) int {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0
	}
	return int(min(n, maxAttempt))
}

// endpointOf is the server really used; the zero key where there was none or
// where it is not an IP address (the floor endpoint may be a pipe).
func endpointOf(c *alsdatav3.AccessLogCommon) fleet.EndpointKey {
	a := addrPort(c.GetUpstreamRemoteAddress())
	if !a.IsValid() {
		return fleet.EndpointKey{}
	}
	return fleet.EndpointKey{Pool: c.GetUpstreamCluster(), Address: a}
}

func addrPort(a *corev3.Address) netip.AddrPort {
	s := a.GetSocketAddress()
	ip, err := netip.ParseAddr(s.GetAddress())
	if err != nil || s.GetPortValue() > 65535 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ip, uint16(s.GetPortValue()))
}

// oracleCause classes an end by its response flags first, then by its status.
// Flags say what happened to the connection; a status may have been written by
// Envoy itself. reached tells whether an upstream was chosen.
func oracleCause(code int, f *alsdatav3.ResponseFlags, reached bool) fleet.Cause {
	switch {
	case f.GetDownstreamConnectionTermination() || f.GetDownstreamRemoteReset() || f.GetDownstreamProtocolError():
		return fleet.CauseClientGone
	case f.GetUpstreamRequestTimeout() || f.GetStreamIdleTimeout() || f.GetDurationTimeout() || f.GetUpstreamMaxStreamDurationReached():
		return fleet.CauseTimeout
	case f.GetUpstreamConnectionFailure() || f.GetDnsResolutionFailure():
		return fleet.CauseConnectFailed
	case f.GetUpstreamConnectionTermination() || f.GetUpstreamRemoteReset() || f.GetUpstreamProtocolError():
		return fleet.CauseReset
	case f.GetNoHealthyUpstream() || f.GetUpstreamOverflow() || f.GetNoRouteFound() || f.GetNoClusterFound() ||
		f.GetLocalReset() || f.GetRateLimited() || f.GetOverloadManager() || f.GetNoFilterConfigFound():
		return fleet.CauseLocal
	case !reached:
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

// oracleUsage reads the tags one by one.
func oracleUsage(tags map[string]string, code int) fleet.Usage {
	var u fleet.Usage
	known := func(tag string) fleet.Tokens {
		n, err := strconv.ParseFloat(tags[tag], 64)
		if err != nil || math.IsNaN(n) || n < 0 || n > 1e9 {
			return 0
		}
		if tag != wire.TagCached {
			u.Known = true
		}
		return fleet.Tokens(math.Round(n))
	}
	u.Input = known(wire.TagInput)
	u.Cached = min(known(wire.TagCached), u.Input)
	u.Output = max(known(wire.TagOutput), known(wire.TagSSEOutput))
	message := tags[wire.TagSSEError]
	u.Error = code/100 == 2 && message != "" && message != "-"
	return u
}
