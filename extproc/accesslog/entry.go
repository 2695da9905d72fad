package accesslog

import (
	"net/netip"
	"strconv"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// maxID bounds the ids that are believed; a longer one is cut off, since a
// client can choose it where ext_proc is away.
const maxID = 128

// OutcomeOf translates an entry of the log named logName, written by Envoy
// node, arrived at. It returns false for entries that tell nothing of use. It
// never writes to the entry and keeps nothing of it but strings.
func OutcomeOf(e *alsdatav3.HTTPAccessLogEntry, logName, node string, at time.Time) (fleet.Outcome, bool) {
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
		upstream(&o, e)
	case wire.LogDownstream:
		downstream(&o, e)
	default:
		return fleet.Outcome{}, false
	}
	return o, true
}

// upstream fills in what an attempt's entry says. In UpstreamEnd the two sizes
// are swapped (Envoy 1.40.0), and the times count from the attempt's start.
func upstream(o *fleet.Outcome, e *alsdatav3.HTTPAccessLogEntry) {
	c := e.GetCommonProperties()
	o.ID = firstID(c.GetCustomTags()[wire.TagDecision], requestID(e))
	o.Attempt = count(c.GetCustomTags()[wire.TagAttempt])
	o.HeaderTime = c.GetTimeToFirstUpstreamRxByte().AsDuration()
	if o.Kind != fleet.AttemptEnded {
		return
	}
	o.RequestBytes = size(e.GetResponse().GetResponseBodyBytes())
	o.ResponseBytes = size(e.GetRequest().GetRequestBodyBytes())
	o.Cause = causeOf(o.Code, c.GetResponseFlags(), true)
}

// downstream fills in what a request's entry says.
func downstream(o *fleet.Outcome, e *alsdatav3.HTTPAccessLogEntry) {
	c := e.GetCommonProperties()
	log := c.GetMetadata().GetFilterMetadata()[wire.NamespaceLog].GetFields()
	o.ID = firstID(log[wire.KeyDecision].GetStringValue(), c.GetCustomTags()[wire.TagDecision],
		e.GetRequest().GetRequestHeaders()[wire.HeaderDecision], requestID(e))
	o.Attempt = int(min(c.GetUpstreamRequestAttemptCount(), maxAttempt))
	sent := c.GetTimeToFirstUpstreamTxByte().AsDuration()
	if got := c.GetTimeToFirstUpstreamRxByte().AsDuration(); got > 0 {
		o.HeaderTime = max(got-sent, 0)
	}
	o.RequestBytes = size(e.GetRequest().GetRequestBodyBytes())
	o.ResponseBytes = size(e.GetResponse().GetResponseBodyBytes())
	if o.Kind == fleet.RequestEnded {
		o.Cause = causeOf(o.Code, c.GetResponseFlags(), o.Endpoint.Address.IsValid())
	}
}

func requestID(e *alsdatav3.HTTPAccessLogEntry) string {
	if id := e.GetRequest().GetRequestHeaders()[wire.HeaderRequestID]; id != "" {
		return id
	}
	return e.GetRequest().GetRequestId()
}

func firstID(ids ...string) string {
	for _, id := range ids {
		if id != "" && id != "-" {
			return id[:min(len(id), maxID)]
		}
	}
	return ""
}

// maxAttempt is far above what any route allows and far below requestOver.
const maxAttempt = 1000

// count reads an attempt number; 0 when there is none.
func count(s string) int {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0
	}
	return int(min(n, maxAttempt))
}

func size(n uint64) int64 { return int64(min(n, 1<<62)) }

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

// causeOf classes an end by its response flags first, then by its status.
// Flags say what happened to the connection; a status may have been written by
// Envoy itself. reached tells whether an upstream was chosen.
func causeOf(code int, f *alsdatav3.ResponseFlags, reached bool) fleet.Cause {
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
