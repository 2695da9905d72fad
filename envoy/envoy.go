package envoy

import (
	"errors"
	"net/netip"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Runtime is what is not in the config file: where the sidecars reach
// Fairlead, and splits that were set by hand.
type Runtime struct {
	ExtProc, AccessLog fleet.Address
	// Splits holds, by route, splits that override the file's: the same pools
	// in the same order with other weights.
	Splits map[string]fleet.Split
}

// Resources is everything one group's sidecars are served, the listener aside.
type Resources struct {
	// Clusters are the pools that the group's routes can reach, in the config's
	// order, then wire.ClusterExtProc and wire.ClusterAccessLog.
	Clusters []*clusterv3.Cluster
	// Endpoints holds one assignment per pool cluster, in the same order.
	Endpoints []*endpointv3.ClusterLoadAssignment
	// Routes holds one configuration, named RouteConfigName(group).
	Routes []*routev3.RouteConfiguration
}

// RouteConfigName is the name of a group's route configuration.
func RouteConfigName(group string) string { return "fairlead." + group }

// ListenerName is the name of the listener of a group's sidecars that listen
// on the given address.
func ListenerName(group string, listen netip.AddrPort) string {
	return "fairlead." + group + "." + listen.String()
}

// Build builds the resources of one group.
func Build(cfg *fleet.Config, group fleet.Group, rt Runtime) (Resources, error) {
	return Resources{}, errors.New("not built")
}

// BuildListener builds the listener of the group's sidecars that listen on the
// given address.
func BuildListener(cfg *fleet.Config, group fleet.Group, listen netip.AddrPort, rt Runtime) (*listenerv3.Listener, error) {
	return nil, errors.New("not built")
}

// Validate checks a message and, recursively, every Any inside it.
func Validate(m proto.Message) error { return nil }

// Closure checks that everything a resource refers to is there.
func Closure(r Resources, listeners ...*listenerv3.Listener) error { return nil }
