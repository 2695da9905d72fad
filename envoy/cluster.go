package envoy

import (
	"fmt"
	"net/netip"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	leastrequestv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/least_request/v3"
	overridehostv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	metadatav3 "github.com/envoyproxy/go-control-plane/envoy/type/metadata/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

const (
	// initialFetch bounds how long a cluster may warm without endpoints. While
	// one warms, Envoy holds back the acknowledgement of its whole CDS
	// response, so this is not the default of 15 s, and never 0 (for ever).
	initialFetch = time.Second

	// breakerLimit keeps Envoy's circuit breakers out of the way: an overflow
	// is Envoy's own final 503, which no retry policy covers. Shedding is the
	// plan's. The default of 3 concurrent retries would drop most failovers of
	// a burst (measured on Envoy 1.40.0: 47 of 50).
	breakerLimit = 1 << 20

	// upstreamIdle closes idle HTTP/1.1 connections before the server does:
	// uvicorn, under most Python model servers, closes them after 5 s, and a
	// request sent into that moment is lost.
	upstreamIdle = 4 * time.Second

	// gRPC health check of the ext_proc cluster: a frozen process costs
	// requests their message timeout until so many checks in a row were missed,
	// at most 2 × (interval + timeout) = 1.4 s. One missed check is not enough:
	// on a loaded machine 4 of 101 checks of a process that was alive timed out,
	// and each took decisions and limits away for 60 to 90 ms (measured on Envoy
	// 1.40.0).
	ownCheckInterval = 500 * time.Millisecond
	ownCheckTimeout  = 200 * time.Millisecond
	ownChecksToMiss  = 2

	ownConnectTimeout = 250 * time.Millisecond

	// Outlier detection: an endpoint is ejected after gatewayFailures answers of
	// 502, 503 or 504 in a row, or serverErrors (Envoy's default) of any 5xx, and
	// tried again after ejectionTime, longer at each repetition.
	gatewayFailures = 3
	serverErrors    = 5
	outlierInterval = time.Second
	ejectionTime    = 10 * time.Second
	maxEjectionTime = 60 * time.Second
	// maxEjected leaves half of a pool in place whatever happens.
	maxEjected = 50
)

const protocolOptions = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

// poolCluster builds a pool's cluster. It depends on the pool alone, so that
// it is the same in every group.
func poolCluster(p fleet.Pool) *clusterv3.Cluster {
	c := &clusterv3.Cluster{
		Name:                 p.Name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
		EdsClusterConfig:     &clusterv3.Cluster_EdsClusterConfig{EdsConfig: eds()},
		ConnectTimeout:       duration(p.ConnectTimeout),
		LoadBalancingPolicy:  overrideHost(),
		CommonLbConfig:       noPanic(),
		CircuitBreakers:      openBreakers(),
		// An endpoint taken out of the config gets nothing new at once, not
		// only after its health check fails.
		IgnoreHealthOnHostRemoval: true,
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			protocolOptions: packed(poolProtocol(p)),
		},
		// A server that vanished without a word is noticed after 90 s, also in
		// the middle of a long silent generation.
		UpstreamConnectionOptions: &clusterv3.UpstreamConnectionOptions{TcpKeepalive: &corev3.TcpKeepalive{
			KeepaliveTime: u32(60), KeepaliveInterval: u32(10), KeepaliveProbes: u32(3),
		}},
	}
	if p.HealthCheck != nil {
		c.HealthChecks = []*corev3.HealthCheck{httpCheck(p.Protocol, *p.HealthCheck)}
	}
	if p.OutlierDetection {
		c.OutlierDetection = outlierDetection()
	}
	return c
}

func eds() *corev3.ConfigSource {
	source := ads()
	source.InitialFetchTimeout = duration(initialFetch)
	return source
}

// overrideHost lets ext_proc name endpoints in attempt order; without a name
// (ext_proc dead, strategy legacy, list used up) Envoy's least request picks.
func overrideHost() *clusterv3.LoadBalancingPolicy {
	return lbPolicy("envoy.load_balancing_policies.override_host", packed(&overridehostv3.OverrideHost{
		OverrideHostSources: []*overridehostv3.OverrideHost_OverrideHostSource{
			{Metadata: metadataKey(wire.NamespaceSteer, wire.KeyHosts)},
		},
		SelectedHostKey: metadataKey(wire.NamespaceServed, wire.KeyHost),
		FallbackPolicy: lbPolicy("envoy.load_balancing_policies.least_request",
			packed(&leastrequestv3.LeastRequest{})),
	}))
}

func lbPolicy(name string, config *anypb.Any) *clusterv3.LoadBalancingPolicy {
	return &clusterv3.LoadBalancingPolicy{Policies: []*clusterv3.LoadBalancingPolicy_Policy{{
		TypedExtensionConfig: &corev3.TypedExtensionConfig{Name: name, TypedConfig: config},
	}}}
}

func metadataKey(namespace, key string) *metadatav3.MetadataKey {
	return &metadatav3.MetadataKey{Key: namespace, Path: []*metadatav3.MetadataKey_PathSegment{{
		Segment: &metadatav3.MetadataKey_PathSegment_Key{Key: key},
	}}}
}

// noPanic keeps Envoy from sending to endpoints it believes dead, and applies
// health changes at once.
func noPanic() *clusterv3.Cluster_CommonLbConfig {
	return &clusterv3.Cluster_CommonLbConfig{
		HealthyPanicThreshold: &typev3.Percent{Value: 0},
		UpdateMergeWindow:     duration(0),
	}
}

func openBreakers() *clusterv3.CircuitBreakers {
	return &clusterv3.CircuitBreakers{Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
		MaxConnections:     u32(breakerLimit),
		MaxPendingRequests: u32(breakerLimit),
		MaxRequests:        u32(breakerLimit),
		MaxRetries:         u32(breakerLimit),
	}}}
}

func poolProtocol(p fleet.Pool) *httpv3.HttpProtocolOptions {
	if p.Protocol == fleet.H2C {
		return http2Protocol(http2Options(p.HTTP2))
	}
	return &httpv3.HttpProtocolOptions{
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{IdleTimeout: duration(upstreamIdle)},
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_HttpProtocolOptions{
					HttpProtocolOptions: &corev3.Http1ProtocolOptions{},
				},
			},
		},
	}
}

func http2Protocol(o *corev3.Http2ProtocolOptions) *httpv3.HttpProtocolOptions {
	return &httpv3.HttpProtocolOptions{
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
					Http2ProtocolOptions: o,
				},
			},
		},
	}
}

// http2Options leaves zero values to Envoy's defaults.
func http2Options(h fleet.HTTP2) *corev3.Http2ProtocolOptions {
	o := &corev3.Http2ProtocolOptions{}
	if h.InitialStreamWindow != 0 {
		o.InitialStreamWindowSize = u32(uint32(h.InitialStreamWindow))
	}
	if h.InitialConnectionWindow != 0 {
		o.InitialConnectionWindowSize = u32(uint32(h.InitialConnectionWindow))
	}
	if h.MaxConcurrentStreams != 0 {
		o.MaxConcurrentStreams = u32(h.MaxConcurrentStreams)
	}
	return o
}

func httpCheck(protocol fleet.Protocol, h fleet.HealthCheck) *corev3.HealthCheck {
	codec := typev3.CodecClientType_HTTP1
	if protocol == fleet.H2C {
		codec = typev3.CodecClientType_HTTP2
	}
	return &corev3.HealthCheck{
		Timeout:            duration(h.Timeout),
		Interval:           duration(h.Interval),
		NoTrafficInterval:  duration(h.Interval),
		UnhealthyInterval:  duration(h.Interval),
		UnhealthyThreshold: u32(h.UnhealthyThreshold),
		HealthyThreshold:   u32(h.HealthyThreshold),
		HealthChecker: &corev3.HealthCheck_HttpHealthCheck_{HttpHealthCheck: &corev3.HealthCheck_HttpHealthCheck{
			Path: h.Path, CodecClientType: codec,
		}},
	}
}

// outlierDetection ejects endpoints for what they answered, a 500 included.
// Connection errors are counted apart and eject nobody: the floor endpoint
// refuses every connection and must stay, else a dead pool becomes Envoy's own
// final 503 again (measured on Envoy 1.40.0: from the seventh request on with
// the default settings, never with these). Endpoints that refuse connections are
// for health checks and the plan to find.
func outlierDetection() *clusterv3.OutlierDetection {
	never := u32(0)
	return &clusterv3.OutlierDetection{
		SplitExternalLocalOriginErrors:         true,
		ConsecutiveGatewayFailure:              u32(gatewayFailures),
		EnforcingConsecutiveGatewayFailure:     u32(100),
		Consecutive_5Xx:                        u32(serverErrors),
		EnforcingConsecutive_5Xx:               u32(100),
		EnforcingConsecutiveLocalOriginFailure: never,
		EnforcingSuccessRate:                   never,
		EnforcingLocalOriginSuccessRate:        never,
		Interval:                               duration(outlierInterval),
		BaseEjectionTime:                       duration(ejectionTime),
		MaxEjectionTime:                        duration(maxEjectionTime),
		MaxEjectionPercent:                     u32(maxEjected),
		// In a pool of two or three, 50 % may round down to none.
		AlwaysEjectOneHost: wrapperspb.Bool(true),
	}
}

// extProcCluster is where decisions come from. Its health check makes a frozen
// server cost nothing after ownChecksToMiss: requests then pass unsteered at once.
func extProcCluster(a fleet.Address) (*clusterv3.Cluster, error) {
	c, err := ownCluster(wire.ClusterExtProc, a)
	if err != nil {
		return nil, err
	}
	c.CommonLbConfig = noPanic()
	c.HealthChecks = []*corev3.HealthCheck{{
		Timeout:            duration(ownCheckTimeout),
		Interval:           duration(ownCheckInterval),
		NoTrafficInterval:  duration(ownCheckInterval),
		UnhealthyInterval:  duration(ownCheckInterval),
		UnhealthyThreshold: u32(ownChecksToMiss),
		HealthyThreshold:   u32(1),
		HealthChecker:      &corev3.HealthCheck_GrpcHealthCheck_{GrpcHealthCheck: &corev3.HealthCheck_GrpcHealthCheck{}},
	}}
	return c, nil
}

// accessLogCluster has no health check: a log receiver that is away delays no
// request, and the first entry after its return gets through.
func accessLogCluster(a fleet.Address) (*clusterv3.Cluster, error) {
	return ownCluster(wire.ClusterAccessLog, a)
}

// ownCluster is a gRPC server of Fairlead's own at one fixed address.
func ownCluster(name string, a fleet.Address) (*clusterv3.Cluster, error) {
	at, err := address(a)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       duration(ownConnectTimeout),
		CircuitBreakers:      openBreakers(),
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			protocolOptions: packed(http2Protocol(&corev3.Http2ProtocolOptions{})),
		},
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: name,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{
				LbEndpoints: []*endpointv3.LbEndpoint{{
					HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: at}},
				}},
			}},
		},
	}, nil
}

func parseHost(host string) (netip.AddrPort, error) {
	ap, err := netip.ParseAddrPort(host)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("found address %q; accepted: unix:/path or IP:port", host)
	}
	return ap, nil
}
