// Package bootstrap builds the file that a sidecar Envoy of a group starts
// from: who it is, where its control planes are, and what must be fixed before
// it hears from them. Everything else a sidecar needs comes over ADS (package
// envoy).
//
// It is pure: it reads and writes no file and starts no Envoy. The same
// options give the same bytes.
package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"
	"unicode/utf8"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// DefaultDrainTime is how long old connections live after a listener change
// when the options don't say.
const DefaultDrainTime = time.Hour

const (
	// Envoy's default back-off between attempts to reach the control plane
	// grows to 30 s: after an outage of 10 s it took another 6.9 s. With these
	// it took at most 0.3 s (measured on Envoy 1.40.0).
	backOffBase = 100 * time.Millisecond
	backOffMax  = time.Second

	connectTimeout = time.Second

	// HTTP/2 pings find a control plane that vanished without a word.
	keepaliveInterval = 30 * time.Second
	keepaliveTimeout  = 5 * time.Second

	// runtimeWait bounds the wait for the first RTDS answer, which Envoy's start
	// waits for before it asks for clusters (measured on Envoy 1.40.0): a control
	// plane that serves no runtime costs each start this much and no more. Not 0,
	// which waits for ever.
	runtimeWait = time.Second

	checkInterval = time.Second
	checkTimeout  = 500 * time.Millisecond

	adminSocketMode = 0o600

	// maxZone is the length that the config accepts for a zone. It travels with
	// every request that asks ext_proc.
	maxZone = 253
)

// Options says whose bootstrap to build.
type Options struct {
	// NodeID names the sidecar; unique among all sidecars, since the in-flight
	// ledger counts by it.
	NodeID string
	// Group is the sidecar's group; it becomes node.cluster.
	Group string
	// Listen is where the sidecar listens; it becomes node metadata
	// (wire.NodeListen), and the control plane builds the listener from it.
	Listen netip.AddrPort
	// Zone is where the sidecar runs, as the config's endpoints[].zone names it;
	// requests prefer endpoints there. "" is nowhere in particular.
	Zone string
	// XDS are the control planes in order of preference, at least one.
	XDS []fleet.Address
	// Admin is where Envoy's own admin interface listens; zero means nowhere.
	Admin fleet.Address
	// DrainTime is how long old connections live after a listener change, and
	// so must be above the longest generation: what still runs then is cut.
	// 0 means DefaultDrainTime. See [Args].
	DrainTime time.Duration
}

// Build builds the bootstrap and validates it, Any payloads included.
//
// With several control planes each is a priority of one cluster with a gRPC
// health check (service ""), so the servers must answer
// grpc.health.v1.Health/Check; without a check Envoy never uses the second.
//
// The runtime has a static layer, the layer wire.RuntimeName that comes over
// RTDS, and the admin layer. Envoy holds its start back until the RTDS resource
// is there, for a second at most if nobody serves it.
func Build(o Options) (*bootstrapv3.Bootstrap, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	xds, err := xdsCluster(o.XDS)
	if err != nil {
		return nil, err
	}
	b := &bootstrapv3.Bootstrap{
		Node: &corev3.Node{
			Id:      o.NodeID,
			Cluster: o.Group,
			Metadata: &structpb.Struct{Fields: map[string]*structpb.Value{
				wire.NodeListen: structpb.NewStringValue(o.Listen.String()),
			}},
		},
		DynamicResources: &bootstrapv3.Bootstrap_DynamicResources{
			AdsConfig: adsConfig(),
			CdsConfig: overADS(),
			LdsConfig: overADS(),
		},
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{Clusters: []*clusterv3.Cluster{xds}},
		LayeredRuntime:  runtimeLayers(),
	}
	if o.Zone != "" {
		b.Node.Locality = &corev3.Locality{Zone: o.Zone}
	}
	if o.Admin != (fleet.Address{}) {
		at, err := address(o.Admin)
		if err != nil {
			return nil, fmt.Errorf("admin: %w", err)
		}
		if p := at.GetPipe(); p != nil {
			p.Mode = adminSocketMode
		}
		b.Admin = &bootstrapv3.Admin{Address: at}
	}
	if err := envoy.Validate(b); err != nil {
		return nil, fmt.Errorf("bootstrap of %s: %w", o.NodeID, err)
	}
	return b, nil
}

func (o Options) check() error {
	var faults []error
	if o.NodeID == "" {
		faults = append(faults, errors.New("no node id; accepted: any text unique among all sidecars"))
	}
	if o.Group == "" {
		faults = append(faults, errors.New("no group; accepted: the name of a group in the config"))
	}
	if !o.Listen.IsValid() {
		faults = append(faults, errors.New("no listening address; accepted: IP:port"))
	}
	if len(o.Zone) > maxZone || !utf8.ValidString(o.Zone) {
		faults = append(faults, fmt.Errorf("zone: found %q; accepted: at most %d bytes of UTF-8", o.Zone, maxZone))
	}
	if len(o.XDS) == 0 {
		faults = append(faults, errors.New("no control plane; accepted: one or more of unix:/path or IP:port"))
	}
	if o.DrainTime < 0 {
		faults = append(faults, fmt.Errorf("drain time: found %v; accepted: 0 or more", o.DrainTime))
	}
	return errors.Join(faults...)
}

func adsConfig() *corev3.ApiConfigSource {
	return &corev3.ApiConfigSource{
		ApiType:                   corev3.ApiConfigSource_DELTA_GRPC,
		TransportApiVersion:       corev3.ApiVersion_V3,
		SetNodeOnFirstMessageOnly: true,
		GrpcServices: []*corev3.GrpcService{{TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{
			EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{
				ClusterName: wire.ClusterXDS,
				RetryPolicy: &corev3.RetryPolicy{RetryBackOff: &corev3.BackoffStrategy{
					BaseInterval: durationpb.New(backOffBase), MaxInterval: durationpb.New(backOffMax),
				}},
			},
		}}},
	}
}

func overADS() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		ResourceApiVersion:    corev3.ApiVersion_V3,
	}
}

func runtimeOverADS() *corev3.ConfigSource {
	source := overADS()
	source.InitialFetchTimeout = durationpb.New(runtimeWait)
	return source
}

func xdsCluster(planes []fleet.Address) (*clusterv3.Cluster, error) {
	protocol, err := anypb.New(&httpv3.HttpProtocolOptions{
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
					Http2ProtocolOptions: &corev3.Http2ProtocolOptions{ConnectionKeepalive: &corev3.KeepaliveSettings{
						Interval: durationpb.New(keepaliveInterval), Timeout: durationpb.New(keepaliveTimeout),
					}},
				},
			},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("xds cluster: %w", err)
	}
	c := &clusterv3.Cluster{
		Name:                 wire.ClusterXDS,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       durationpb.New(connectTimeout),
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol,
		},
		LoadAssignment: &endpointv3.ClusterLoadAssignment{ClusterName: wire.ClusterXDS},
	}
	for i, plane := range planes {
		at, err := address(plane)
		if err != nil {
			return nil, fmt.Errorf("control plane %d: %w", i+1, err)
		}
		c.LoadAssignment.Endpoints = append(c.LoadAssignment.Endpoints, &endpointv3.LocalityLbEndpoints{
			Priority: uint32(i),
			LbEndpoints: []*endpointv3.LbEndpoint{{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{
				Endpoint: &endpointv3.Endpoint{Address: at},
			}}},
		})
	}
	if len(planes) > 1 {
		c.HealthChecks = []*corev3.HealthCheck{{
			Interval:           durationpb.New(checkInterval),
			NoTrafficInterval:  durationpb.New(checkInterval),
			UnhealthyInterval:  durationpb.New(checkInterval),
			Timeout:            durationpb.New(checkTimeout),
			UnhealthyThreshold: wrapperspb.UInt32(2),
			HealthyThreshold:   wrapperspb.UInt32(1),
			HealthChecker:      &corev3.HealthCheck_GrpcHealthCheck_{GrpcHealthCheck: &corev3.HealthCheck_GrpcHealthCheck{}},
		}}
		// A stream to a control plane that hangs ends, and the next one goes
		// to the other.
		c.CloseConnectionsOnHostHealthFailure = true
	}
	return c, nil
}

// runtimeLayers fixes what must hold from the first request on. The guard
// keeps Envoy 1.40 from crashing when an upstream ext_proc filter streams a
// large answer (measured); it costs nothing without such a filter. What the
// control plane says at run time, limits in flight, comes after it. The admin
// layer comes last, so that an operator's override wins.
func runtimeLayers() *bootstrapv3.LayeredRuntime {
	return &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{
		{Name: "static", LayerSpecifier: &bootstrapv3.RuntimeLayer_StaticLayer{StaticLayer: &structpb.Struct{
			Fields: map[string]*structpb.Value{
				"envoy.reloadable_features.grpc_side_stream_flow_control": structpb.NewBoolValue(false),
			},
		}}},
		{Name: "rtds", LayerSpecifier: &bootstrapv3.RuntimeLayer_RtdsLayer_{RtdsLayer: &bootstrapv3.RuntimeLayer_RtdsLayer{
			Name: wire.RuntimeName, RtdsConfig: runtimeOverADS(),
		}}},
		{Name: "admin", LayerSpecifier: &bootstrapv3.RuntimeLayer_AdminLayer_{AdminLayer: &bootstrapv3.RuntimeLayer_AdminLayer{}}},
	}}
}

func address(a fleet.Address) (*corev3.Address, error) {
	if a.Path != "" {
		return &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: a.Path}}}, nil
	}
	ap, err := netip.ParseAddrPort(a.Host)
	if err != nil {
		return nil, fmt.Errorf("found address %q; accepted: unix:/path or IP:port", a.String())
	}
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       ap.Addr().Unmap().String(),
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(ap.Port())},
	}}}, nil
}

// Render renders the bootstrap as "yaml" or "json". The same options give the
// same bytes.
func Render(o Options, format string) ([]byte, error) {
	b, err := Build(o)
	if err != nil {
		return nil, err
	}
	// protojson varies its white space on purpose; both branches below replace
	// it.
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(b)
	if err != nil {
		return nil, fmt.Errorf("render bootstrap: %w", err)
	}
	switch format {
	case "json":
		var out bytes.Buffer
		if err := json.Indent(&out, raw, "", "  "); err != nil {
			return nil, fmt.Errorf("render bootstrap: %w", err)
		}
		return append(out.Bytes(), '\n'), nil
	case "yaml":
		// JSON is YAML; read as such, whole numbers stay whole.
		var tree any
		if err := yaml.Unmarshal(raw, &tree); err != nil {
			return nil, fmt.Errorf("render bootstrap: %w", err)
		}
		var out bytes.Buffer
		enc := yaml.NewEncoder(&out)
		enc.SetIndent(2)
		if err := enc.Encode(tree); err != nil {
			return nil, fmt.Errorf("render bootstrap: %w", err)
		}
		return out.Bytes(), nil
	}
	return nil, fmt.Errorf("bootstrap format: found %q; accepted: yaml, json", format)
}

// Args returns the Envoy flags that belong to a bootstrap stored at path (its
// name must end in .yaml or .json, which is how Envoy tells the formats
// apart):
//
//   - --drain-time-s, because that is how long a changed listener's old
//     connections live, and it can't be said in the file;
//   - --disable-hot-restart, because several Envoys on one host would
//     otherwise meet in one shared-memory region.
func Args(o Options, path string) []string {
	drain := o.DrainTime
	if drain == 0 {
		drain = DefaultDrainTime
	}
	whole := int64((drain + time.Second - 1) / time.Second)
	return []string{
		"-c", path,
		"--drain-time-s", strconv.FormatInt(whole, 10),
		"--disable-hot-restart",
	}
}
