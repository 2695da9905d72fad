package xds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// DefaultAckDeadline is how long a step waits for ACKs. It is above the 1 s
// after which Envoy stops waiting for the endpoints of a warming cluster, and
// holds its CDS ACK no longer.
const DefaultAckDeadline = 3 * time.Second

// Options configure a [Server]. The zero value is usable.
type Options struct {
	Log *slog.Logger // default: discard
	// AckDeadline bounds the wait for ACKs of each step; default
	// [DefaultAckDeadline].
	AckDeadline time.Duration
	// Observe is told what happens; it is called from stream and publisher
	// goroutines, without locks held, and must not block. May be nil.
	Observe func(Event)
	// Build and BuildListener make the resources; default [envoy.Build] and
	// [envoy.BuildListener]. They must be pure: a listener may be built later
	// than the rest, when a sidecar with another address connects.
	Build         func(*fleet.Config, fleet.Group, envoy.Runtime) (envoy.Resources, error)
	BuildListener func(*fleet.Config, fleet.Group, netip.AddrPort, envoy.Runtime) (*listenerv3.Listener, error)

	// For tests; default runtimeEvery, runtimeSettle and lingerMargin after the
	// group's upload timeout.
	runtimeEvery, runtimeSettle, linger time.Duration
}

// Server is the ADS server of all groups.
type Server struct {
	log         *slog.Logger
	ackDeadline time.Duration
	observe     func(Event)
	builders    builders
	extras      *extras
	departed    departed

	runtimeEvery, runtimeSettle time.Duration
	linger                      time.Duration // 0 but in tests

	submitting sync.Mutex // one Submit at a time

	mu      sync.Mutex
	groups  map[string]*group
	runCtx  context.Context // nil until Run
	stopped bool
	running sync.WaitGroup // publishers
}

// New returns a server without content. It starts nothing: see [Server.Submit],
// [Server.Register] and [Server.Run].
func New(o Options) *Server {
	s := &Server{
		log: o.Log, ackDeadline: o.AckDeadline, observe: o.Observe,
		builders: builders{resources: o.Build, listener: o.BuildListener},
		extras:   newExtras(),
		groups:   map[string]*group{},

		runtimeEvery: cmp.Or(o.runtimeEvery, runtimeEvery), runtimeSettle: cmp.Or(o.runtimeSettle, runtimeSettle),
		linger: o.linger,
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.ackDeadline <= 0 {
		s.ackDeadline = DefaultAckDeadline
	}
	if s.observe == nil {
		s.observe = func(Event) {}
	}
	if s.builders.resources == nil {
		s.builders.resources = envoy.Build
	}
	if s.builders.listener == nil {
		s.builders.listener = envoy.BuildListener
	}
	return s
}

// ServerOptions are the gRPC options an ADS server needs: Envoy's keepalive
// pings, each 30 s, are far more frequent than grpc-go allows by default, and a
// reconnecting Envoy names the version of everything it holds in one message.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(64 << 20),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	}
}

// Register adds the aggregated discovery service to a gRPC server. Streams are
// refused with Unavailable until the first Submit; an Envoy retries.
func (s *Server) Register(g *grpc.Server) {
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, ads{s})
}

// Submit makes t the desired world of all groups. Everything is built,
// validated and checked for closure first; on any fault all faults are
// returned and nothing changes. Submit returns once the world is taken over,
// not when Envoys have it: see [Server.Settled]. Content equal to what was
// submitted before is not published again, also when Envoys refused it.
func (s *Server) Submit(t Target) error {
	s.submitting.Lock()
	defer s.submitting.Unlock()
	worlds, err := s.buildWorlds(t)
	if err != nil {
		return fmt.Errorf("build the xDS resources: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errors.New("the xDS server has stopped")
	}
	for name, g := range s.groups {
		if worlds[name] == nil {
			delete(s.groups, name)
			g.remove(status.Errorf(codes.NotFound, "group %q is no longer in the configuration; accepted: %s",
				name, strings.Join(sortedNames(worlds), ", ")))
		}
	}
	for _, name := range sortedNames(worlds) {
		if g := s.groups[name]; g != nil {
			g.submit(worlds[name])
			continue
		}
		g := newGroup(s, worlds[name])
		s.groups[name] = g
		s.start(g)
	}
	return nil
}

func (s *Server) buildWorlds(t Target) (map[string]*world, error) {
	if t.Config == nil || len(t.Config.Groups) == 0 {
		return nil, errors.New("a configuration with at least one group is needed")
	}
	worlds := map[string]*world{}
	var errs []error
	for _, g := range t.Config.Groups {
		if worlds[g.Name] != nil {
			errs = append(errs, fmt.Errorf("group %q is there twice", g.Name))
			continue
		}
		w, err := newWorld(s.builders, t, g, s.knownAddresses(g.Name))
		if err != nil {
			errs = append(errs, fmt.Errorf("group %q: %w", g.Name, err))
			continue
		}
		worlds[g.Name] = w
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	shareAssignments(worlds)
	return worlds, nil
}

func (s *Server) knownAddresses(name string) []netip.AddrPort {
	s.mu.Lock()
	g := s.groups[name]
	s.mu.Unlock()
	if g == nil {
		return nil
	}
	return g.addresses()
}

// Run publishes until ctx ends, then ends all streams with Unavailable and
// returns nil. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	s.mu.Lock()
	if s.runCtx != nil {
		s.mu.Unlock()
		return errors.New("xds: Run was called twice")
	}
	s.runCtx = ctx
	for _, g := range s.groups {
		s.start(g)
	}
	s.mu.Unlock()

	<-ctx.Done()
	s.mu.Lock()
	s.stopped = true
	groups := s.groups
	s.groups = map[string]*group{}
	s.mu.Unlock()
	for _, g := range groups {
		g.remove(status.Error(codes.Unavailable, "the control plane is shutting down"))
	}
	s.running.Wait()
	return nil
}

// start runs a group's publishers if Run is active. The caller holds s.mu.
func (s *Server) start(g *group) {
	if s.runCtx == nil || s.stopped {
		return
	}
	s.running.Go(func() { g.run(s.runCtx) })
	s.running.Go(func() { g.runRuntime(s.runCtx) })
}

// Settled waits until no group has anything left to publish; without Run that
// takes until ctx ends, if anything is left. Envoys that missed the deadline
// don't hold it up; see [Server.Status]. Runtimes are not waited for, nor
// clusters that still linger.
func (s *Server) Settled(ctx context.Context) error {
	for {
		g := s.unsettled()
		if g == nil {
			return nil
		}
		select {
		case <-g.idleChan():
		case <-ctx.Done():
			return fmt.Errorf("wait until group %q is published: %w", g.name, ctx.Err())
		}
	}
}

func (s *Server) unsettled() *group {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.groups {
		select {
		case <-g.idleChan():
		default:
			return g
		}
	}
	return nil
}

// groupOf finds the group a new stream belongs to, or the status that refuses it.
func (s *Server) groupOf(name string) (*group, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch g := s.groups[name]; {
	case s.stopped:
		return nil, status.Error(codes.Unavailable, "the control plane is shutting down")
	case len(s.groups) == 0:
		return nil, status.Error(codes.Unavailable, "the control plane has no configuration yet")
	case g == nil:
		return nil, status.Error(codes.NotFound, s.notAGroup(name))
	default:
		return g, nil
	}
}

// notAGroup says that a name is none of a group. The caller holds mu.
func (s *Server) notAGroup(name string) string {
	return fmt.Sprintf("group %q (node.cluster) is not in the configuration; accepted: %s", oneLine(name), strings.Join(sortedNames(s.groups), ", "))
}

// unknownGroup is why an Envoy of a group is refused, "" if it isn't.
func (s *Server) unknownGroup(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.groups) == 0 || s.groups[name] != nil {
		return ""
	}
	return s.notAGroup(name)
}
