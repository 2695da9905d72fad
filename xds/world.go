package xds

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// Target is one desired world: a whole configuration and what is not in its
// file.
type Target struct {
	Config  *fleet.Config
	Runtime envoy.Runtime
}

// item is one resource with the version that go-control-plane's delta caches
// give it: the SHA-256 of its deterministic bytes.
type item struct {
	msg     proto.Message
	version string
}

func newItem(msg proto.Message) (item, error) {
	raw, err := cache.MarshalResource(msg)
	if err != nil {
		return item{}, err
	}
	return item{msg: msg, version: cache.HashResource(raw)}, nil
}

// items are the resources of one type by name.
type items map[string]item

func (m items) add(name string, msg proto.Message) error {
	if name == "" {
		return errors.New("a resource without a name")
	}
	if _, ok := m[name]; ok {
		return fmt.Errorf("%q is there twice", name)
	}
	it, err := newItem(msg)
	if err != nil {
		return fmt.Errorf("marshal %q: %w", name, err)
	}
	m[name] = it
	return nil
}

// world is everything one group is to be served. It is immutable.
type world struct {
	builders  builders
	target    Target
	group     fleet.Group
	resources envoy.Resources
	clusters  items
	endpoints items
	routes    items
	// listeners holds the listeners of the addresses that were known when the
	// world was built, the group's default always among them.
	listeners map[netip.AddrPort]listenerItem
	// digest identifies the content; listeners of other addresses follow from
	// the same input and are not in it.
	digest string
}

type listenerItem struct {
	name string
	item
}

// builders are the functions that turn fleet values into Envoy's resources.
type builders struct {
	resources func(*fleet.Config, fleet.Group, envoy.Runtime) (envoy.Resources, error)
	listener  func(*fleet.Config, fleet.Group, netip.AddrPort, envoy.Runtime) (*listenerv3.Listener, error)
}

// newWorld builds, validates and closure-checks a group's world, with the
// listener of the group's default address and those of addresses.
func newWorld(b builders, t Target, g fleet.Group, addresses []netip.AddrPort) (*world, error) {
	r, err := b.resources(t.Config, g, t.Runtime)
	if err != nil {
		return nil, err
	}
	w := &world{
		builders: b, target: t, group: g, resources: r,
		clusters: items{}, endpoints: items{}, routes: items{},
		listeners: map[netip.AddrPort]listenerItem{},
	}
	var errs []error
	for _, c := range r.Clusters {
		errs = append(errs, inside("cluster", checked(w.clusters, c.GetName(), c)))
	}
	for _, e := range r.Endpoints {
		errs = append(errs, inside("assignment", checked(w.endpoints, e.GetClusterName(), e)))
	}
	for _, rc := range r.Routes {
		errs = append(errs, inside("route configuration", checked(w.routes, rc.GetName(), rc)))
	}
	for _, a := range append([]netip.AddrPort{g.Listener.Address}, addresses...) {
		if _, ok := w.listeners[a]; ok {
			continue
		}
		l, err := w.buildListener(a)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		w.listeners[a] = l
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	w.digest = w.computeDigest()
	return w, nil
}

func checked(m items, name string, msg proto.Message) error {
	if err := envoy.Validate(msg); err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	return m.add(name, msg)
}

func inside(kind string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %w", kind, err)
}

// buildListener builds and checks the listener for one address.
func (w *world) buildListener(a netip.AddrPort) (listenerItem, error) {
	l, err := w.builders.listener(w.target.Config, w.group, a, w.target.Runtime)
	if err != nil {
		return listenerItem{}, fmt.Errorf("build listener %s: %w", a, err)
	}
	m := items{}
	if err := checked(m, l.GetName(), l); err != nil {
		return listenerItem{}, fmt.Errorf("listener %s: %w", a, err)
	}
	if a == w.group.Listener.Address {
		// Listeners of other addresses differ in nothing that closure sees.
		if err := envoy.Closure(w.resources, l); err != nil {
			return listenerItem{}, fmt.Errorf("listener %s: %w", a, err)
		}
	}
	return listenerItem{name: l.GetName(), item: m[l.GetName()]}, nil
}

// listenerFor returns the listener of an address, building it if it wasn't
// known when the world was built.
func (w *world) listenerFor(a netip.AddrPort) (listenerItem, error) {
	if l, ok := w.listeners[a]; ok {
		return l, nil
	}
	return w.buildListener(a)
}

func (w *world) computeDigest() string {
	h := sha256.New()
	for _, m := range []items{w.clusters, w.endpoints, w.routes} {
		for _, name := range sortedNames(m) {
			fmt.Fprintf(h, "%q=%s\n", name, m[name].version)
		}
		fmt.Fprintln(h)
	}
	fmt.Fprintln(h, w.listeners[w.group.Listener.Address].version)
	return hex.EncodeToString(h.Sum(nil)[:6])
}

// shareAssignments makes worlds use the same message for equal assignments, so
// that a pool in many groups is kept once.
func shareAssignments(worlds map[string]*world) {
	seen := map[string]item{} // by version
	for _, w := range worlds {
		for name, it := range w.endpoints {
			if first, ok := seen[it.version]; ok {
				w.endpoints[name] = first
			} else {
				seen[it.version] = it
			}
		}
	}
}

func sortedNames[V any](m map[string]V) []string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// generationNamespace is the metadata namespace that carries the generation of
// a resource that is published again after a refusal. Nothing reads it: it is
// there so that the content, and with it the version, differs.
const generationNamespace = "fairlead.xds"

// withGeneration returns a copy of msg that behaves the same and has other
// bytes. An Envoy that refuses a route or endpoint response drops its good
// resources too, while the server's bookkeeping has them as delivered; only
// changed content is sent again.
func withGeneration(msg proto.Message, generation uint64) proto.Message {
	out := proto.Clone(msg)
	switch m := out.(type) {
	case *clusterv3.Cluster:
		m.Metadata = stamped(m.Metadata, generation)
	case *routev3.RouteConfiguration:
		m.Metadata = stamped(m.Metadata, generation)
	case *listenerv3.Listener:
		m.Metadata = stamped(m.Metadata, generation)
	case *endpointv3.ClusterLoadAssignment:
		// An assignment has no metadata of its own; its localities have.
		for _, locality := range m.Endpoints {
			locality.Metadata = stamped(locality.Metadata, generation)
		}
		if len(m.Endpoints) == 0 {
			m.Endpoints = []*endpointv3.LocalityLbEndpoints{{Metadata: stamped(nil, generation)}}
		}
	}
	return out
}

func stamped(md *corev3.Metadata, generation uint64) *corev3.Metadata {
	if md == nil {
		md = &corev3.Metadata{}
	}
	if md.FilterMetadata == nil {
		md.FilterMetadata = map[string]*structpb.Struct{}
	}
	md.FilterMetadata[generationNamespace] = &structpb.Struct{Fields: map[string]*structpb.Value{
		"generation": structpb.NewNumberValue(float64(generation)),
	}}
	return md
}

// Types that are published.
const (
	typeCDS = resource.ClusterType
	typeEDS = resource.EndpointType
	typeRDS = resource.RouteType
	typeLDS = resource.ListenerType
	// typeRuntime is published apart from the others; see runtime.go.
	typeRuntime = resource.RuntimeType
)
