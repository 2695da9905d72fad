package envoy

import (
	"errors"
	"fmt"
	"net/netip"
	"unicode/utf8"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
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

// Build builds the resources of one group. Errors name the route, pool or
// address that is at fault; what it returns has passed [Validate] and
// [Closure].
func Build(cfg *fleet.Config, group fleet.Group, rt Runtime) (Resources, error) {
	if err := checkStrings(cfg, group, rt); err != nil {
		return Resources{}, err
	}
	routes, err := routeConfig(cfg, group, rt)
	if err != nil {
		return Resources{}, err
	}
	r := Resources{Routes: []*routev3.RouteConfiguration{routes}}
	for _, p := range reachable(cfg, group) {
		c := poolCluster(p)
		cla, err := assignment(p, c)
		if err != nil {
			return Resources{}, err
		}
		r.Clusters = append(r.Clusters, c)
		r.Endpoints = append(r.Endpoints, cla)
	}
	extProc, err := extProcCluster(rt.ExtProc)
	if err != nil {
		return Resources{}, err
	}
	accessLog, err := accessLogCluster(rt.AccessLog)
	if err != nil {
		return Resources{}, err
	}
	r.Clusters = append(r.Clusters, extProc, accessLog)
	return r, r.check()
}

// reachable lists the pools that the group's routes can use, in the config's
// order.
func reachable(cfg *fleet.Config, group fleet.Group) []fleet.Pool {
	used := map[string]bool{}
	for _, name := range group.Routes {
		r, _ := cfg.RouteByName(name)
		for _, w := range r.Split {
			used[w.Pool] = true
		}
		for _, pool := range r.Fallback {
			used[pool] = true
		}
	}
	var out []fleet.Pool
	for _, p := range cfg.Pools {
		if used[p.Name] {
			out = append(out, p)
		}
	}
	return out
}

func (r Resources) check() error {
	faults := []error{Closure(r)}
	for _, m := range r.messages() {
		faults = append(faults, Validate(m))
	}
	return errors.Join(faults...)
}

func (r Resources) messages() []proto.Message {
	var out []proto.Message
	for _, m := range r.Clusters {
		out = append(out, m)
	}
	for _, m := range r.Endpoints {
		out = append(out, m)
	}
	for _, m := range r.Routes {
		out = append(out, m)
	}
	return out
}

// checkStrings refuses text that is not UTF-8, which protobuf can't carry.
func checkStrings(cfg *fleet.Config, group fleet.Group, rt Runtime) error {
	named := []struct{ what, value string }{
		{"group name", group.Name},
		{"ext_proc address", rt.ExtProc.String()},
		{"access log address", rt.AccessLog.String()},
	}
	for _, r := range cfg.Routes {
		named = append(named,
			struct{ what, value string }{"route name", r.Name},
			struct{ what, value string }{"route " + r.Name + ": prefix", r.Match.Prefix},
			struct{ what, value string }{"route " + r.Name + ": model", r.Match.Model})
	}
	for _, p := range cfg.Pools {
		named = append(named, struct{ what, value string }{"pool name", p.Name})
		if p.HealthCheck != nil {
			named = append(named, struct{ what, value string }{"pool " + p.Name + ": health check path", p.HealthCheck.Path})
		}
	}
	for _, n := range named {
		if !utf8.ValidString(n.value) {
			return fmt.Errorf("%s %q is not UTF-8", n.what, n.value)
		}
	}
	return nil
}
