package envoy

import (
	"errors"
	"fmt"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	prioritygroupv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/priority_group/v3"
	"google.golang.org/protobuf/proto"
)

// Closure checks that everything a resource refers to is there: each cluster
// that a route, a filter or an access log names; the assignment of each EDS
// cluster; the route configuration of each listener. It also refuses two
// resources of one name and assignments of no cluster. It returns all faults.
func Closure(r Resources, listeners ...*listenerv3.Listener) error {
	c := closure{names: map[string]map[string]bool{}}
	for _, m := range r.Clusters {
		c.add("cluster", m.GetName())
	}
	for _, m := range r.Endpoints {
		c.add("endpoint assignment", m.GetClusterName())
	}
	for _, m := range r.Routes {
		c.add("route configuration", m.GetName())
	}
	for _, m := range listeners {
		c.add("listener", m.GetName())
	}

	eds := map[string]bool{}
	for _, m := range r.Clusters {
		if m.GetType() == clusterv3.Cluster_EDS {
			eds[assignmentName(m)] = true
			c.need("endpoint assignment", assignmentName(m), "cluster "+m.GetName())
		}
	}
	for _, m := range r.Endpoints {
		if !eds[m.GetClusterName()] {
			c.fault("endpoint assignment %q belongs to no EDS cluster", m.GetClusterName())
		}
	}
	for _, m := range r.Clusters {
		c.references(m, "cluster "+m.GetName())
	}
	for _, m := range r.Routes {
		c.references(m, "route configuration "+m.GetName())
	}
	for _, m := range listeners {
		c.references(m, "listener "+m.GetName())
	}
	return errors.Join(c.faults...)
}

type closure struct {
	names  map[string]map[string]bool // by kind
	faults []error
}

func (c *closure) fault(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(format, args...))
}

func (c *closure) add(kind, name string) {
	if c.names[kind] == nil {
		c.names[kind] = map[string]bool{}
	}
	if c.names[kind][name] {
		c.fault("two resources of kind %s are named %q", kind, name)
	}
	c.names[kind][name] = true
}

func (c *closure) need(kind, name, by string) {
	if !c.names[kind][name] {
		c.fault("%s names %s %q, which is not there", by, kind, name)
	}
}

// references finds what a resource names, Any payloads included.
func (c *closure) references(resource proto.Message, by string) {
	walk(resource, func(m proto.Message) {
		switch m := m.(type) {
		case *corev3.GrpcService_EnvoyGrpc:
			c.need("cluster", m.GetClusterName(), by)
		case *prioritygroupv3.ClusterWeight:
			c.need("cluster", m.GetClusterName(), by)
		case *routev3.WeightedCluster_ClusterWeight:
			c.need("cluster", m.GetName(), by)
		case *routev3.RouteAction_RequestMirrorPolicy:
			c.need("cluster", m.GetCluster(), by)
		case *routev3.RouteAction:
			if name := m.GetCluster(); name != "" {
				c.need("cluster", name, by)
			}
		case *hcmv3.Rds:
			c.need("route configuration", m.GetRouteConfigName(), by)
		}
	})
}

func assignmentName(c *clusterv3.Cluster) string {
	if name := c.GetEdsClusterConfig().GetServiceName(); name != "" {
		return name
	}
	return c.GetName()
}
