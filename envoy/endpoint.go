package envoy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"net/netip"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// FloorPath is the address of every pool's floor endpoint: a socket below
	// a file that is no folder, which nobody can ever create. Envoy's access
	// log shows it as the upstream address of an attempt that found no live
	// endpoint.
	FloorPath = "/dev/null/fairlead-floor"

	// overprovisioning keeps requests at the live endpoints as long as one of
	// them is healthy: with Envoy's default of 140 a pool with less than 72 %
	// of its endpoints healthy would send a share to the floor.
	overprovisioning = 1_000_000

	// weightScale is the weight of a pool's largest endpoint when capacities
	// differ.
	weightScale = 1000

	digestNamespace = "fairlead"
	digestKey       = "cluster"
)

// assignment builds a pool's endpoints: the real ones at priority 0 and the
// floor at priority 1. A pool without real ones has the floor alone.
func assignment(p fleet.Pool, c *clusterv3.Cluster) (*endpointv3.ClusterLoadAssignment, error) {
	digest, err := clusterDigest(c)
	if err != nil {
		return nil, err
	}
	cla := &endpointv3.ClusterLoadAssignment{
		ClusterName: p.Name,
		Policy:      &endpointv3.ClusterLoadAssignment_Policy{OverprovisioningFactor: u32(overprovisioning)},
	}
	if len(p.Endpoints) > 0 {
		cla.Endpoints = append(cla.Endpoints, &endpointv3.LocalityLbEndpoints{LbEndpoints: lbEndpoints(p.Endpoints)})
	}
	cla.Endpoints = append(cla.Endpoints, floor(digest))
	return cla, nil
}

// clusterDigest is the hex SHA-256 of a cluster's bytes. A content hash, not a
// counter: it is right after a restart too.
func clusterDigest(c *clusterv3.Cluster) (string, error) {
	b, err := deterministic.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("digest of cluster %s: %w", c.GetName(), err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

func lbEndpoints(endpoints []fleet.Endpoint) []*endpointv3.LbEndpoint {
	weights := weights(endpoints)
	out := make([]*endpointv3.LbEndpoint, len(endpoints))
	for i, e := range endpoints {
		out[i] = &endpointv3.LbEndpoint{
			HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
				Address: socket(e.Address),
			}},
			LoadBalancingWeight: u32(weights[i]),
			HealthStatus:        health(e),
		}
	}
	return out
}

// health tells Envoy of endpoints that drain: its own balancer sends them
// nothing new, whatever their health checks say, and what runs there runs to its
// end (measured on Envoy 1.40.0 with HTTP/1.1 and HTTP/2). A pool that drains
// altogether goes to its floor, and so to the next pool of the chain. Removing
// the endpoint would do as much, but then nobody could see it drain. Endpoints
// that the plan names are used whatever is said here, so the plan must not name
// them either.
func health(e fleet.Endpoint) corev3.HealthStatus {
	if e.Drain {
		return corev3.HealthStatus_DRAINING
	}
	return corev3.HealthStatus_UNKNOWN
}

// weights scales capacities to 1 … weightScale. Equal capacities give equal
// weights, with which Envoy's least request really compares requests in
// flight; unequal ones turn it into a weighted round robin, so risk never goes
// in here.
func weights(endpoints []fleet.Endpoint) []uint32 {
	largest := 0.0
	for _, e := range endpoints {
		largest = max(largest, e.Capacity)
	}
	out := make([]uint32, len(endpoints))
	for i, e := range endpoints {
		out[i] = weightScale
		if largest > 0 {
			out[i] = max(1, uint32(math.Round(e.Capacity/largest*weightScale)))
		}
	}
	return out
}

// floor is an endpoint that refuses every connection within a millisecond.
// Envoy never retries its own "no healthy host"; a refused connection it does,
// so a dead pool fails over. It is kept out of health checks (see
// outlierDetection for the other way to lose it), and it carries the cluster's
// digest.
func floor(digest string) *endpointv3.LocalityLbEndpoints {
	return &endpointv3.LocalityLbEndpoints{
		Priority: 1,
		LbEndpoints: []*endpointv3.LbEndpoint{{
			HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
				Address:           pipe(FloorPath),
				HealthCheckConfig: &endpointv3.Endpoint_HealthCheckConfig{DisableActiveHealthCheck: true},
			}},
			LoadBalancingWeight: wrapperspb.UInt32(1),
			Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
				digestNamespace: object(map[string]*structpb.Value{digestKey: text(digest)}),
			}},
		}},
	}
}

func socket(a netip.AddrPort) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       a.Addr().Unmap().String(),
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port())},
	}}}
}
