package push

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

const (
	// remembered is how long a node that left is shown.
	remembered = 10 * time.Minute
	// claimTime is how long an endpoint without a configured node belongs to the
	// node that spoke for it last.
	claimTime = 5 * time.Second
	// warnEvery bounds what agents, known or not, can write into the log.
	warnEvery = 10 * time.Second
)

// ServerOptions of a Server.
type ServerOptions struct {
	// Deliver takes each reading. It is called from several goroutines, for one
	// endpoint from one at a time, and must not block: it holds up its node.
	Deliver func(telemetry.Reading)
	Log     *slog.Logger     // nil: slog.Default
	Now     func() time.Time // nil: time.Now; readings carry its monotonic part
	// RequireIdentity takes frames only over TLS, from a client whose verified
	// certificate carries the frame's node as a DNS name, and only for endpoints
	// whose configured node that is. It needs [ServerCredentials]. Without it
	// endpoints that name no node are taken from anybody.
	RequireIdentity bool
}

// Counters count since the Server was made.
type Counters struct {
	Streams         uint64 // begun, refused ones included
	StreamsRefused  uint64 // without the identity they need, or over a limit
	StreamsReplaced uint64 // ended for a newer one of the same node
	Frames          uint64 // taken
	FramesRefused   uint64
	Readings        uint64 // delivered
	Refused         uint64 // endpoints of frames that were not taken
	Rejected        uint64 // values that could not be true, or are not known here
	Dropped         uint64 // frames that agents say they dropped
	UnknownNodes    uint64 // frames of nodes that the configuration doesn't name; FramesRefused has them too
}

// Node is what is known of an agent.
type Node struct {
	Name      string
	Epoch     uint32
	Connected bool
	// Age is how long ago its last frame arrived.
	Age      time.Duration
	Interval time.Duration // between its last two frames, by its own clock
	Frames   uint64        // taken
	Dropped  uint64        // by the agent, since that began
	Rejected uint64        // values that could not be true
	// Refused are endpoints of its last frame that were not taken; at most 8.
	Refused []Refusal
	// Endpoints are those of its last frame that were taken.
	Endpoints []NodeEndpoint
	GPUs      []telemetry.GPU // of its last frame
	// Err says why its GPUs could not be read, or why its last frame was refused.
	Err string
}

// NodeEndpoint is a model server on a node.
type NodeEndpoint struct {
	Endpoint netip.AddrPort
	GPUs     []string // ids
	Err      string   // why it could not be read
}

// Server takes the frames of agents. Its methods may be called from any
// goroutine. It starts none beside those of gRPC's streams.
type Server struct {
	o       ServerOptions
	targets atomic.Pointer[map[netip.AddrPort][]target]
	roster  atomic.Pointer[roster]
	counts  struct {
		streams, streamsRefused, streamsReplaced, frames, framesRefused, readings, refused, rejected, dropped, unknownNodes atomic.Uint64
	}

	// frames holds *received that no stream uses now.
	frames sync.Pool

	mu     sync.Mutex
	nodes  map[string]*node // those that the roster names, and at most maxUnnamed others
	warned time.Time
}

// target is one endpoint of one pool.
type target struct {
	key  fleet.EndpointKey
	node string // "" if the configuration names none
	*claim
}

// claim says who speaks for an endpoint.
type claim struct {
	mu   sync.Mutex
	node string
	at   time.Time // when it last spoke
	busy bool      // a reading is being delivered
	last time.Time // Sample.At of the newest reading
}

// node is one agent. Its stream's goroutine writes it.
type node struct {
	// turn is held while a frame is taken; a stream that lost its turn takes no
	// more.
	turn    sync.Mutex
	current *receiver

	// streams counts those that began and did not end, replaced ones included;
	// Server.mu guards it.
	streams int
	// gone is set when the configuration stops naming it.
	gone atomic.Bool

	mu    sync.Mutex
	shown Node // Age aside
	// lent says that callers of Nodes hold the slices of shown: they are replaced
	// then, not written.
	lent bool
	seen time.Time
}

// NewServer returns a server that knows no endpoint; it starts nothing.
func NewServer(o ServerOptions) *Server {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Server{o: o, nodes: map[string]*node{}}
	s.frames.New = func() any { return &received{} }
	s.targets.Store(&map[netip.AddrPort][]target{})
	s.roster.Store(&roster{})
	return s
}

// SetPools says which endpoints exist: those of pools whose telemetry is pushed,
// and with them which nodes may speak. A frame that is being taken may still
// reach an endpoint that is gone.
func (s *Server) SetPools(pools []fleet.Pool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	claims := map[fleet.EndpointKey]target{}
	for _, list := range *s.targets.Load() {
		for _, t := range list {
			claims[t.key] = t
		}
	}
	targets := map[netip.AddrPort][]target{}
	for _, p := range pools {
		if p.Telemetry.Source != fleet.TelemetryPush {
			continue
		}
		for _, e := range p.Endpoints {
			t := target{fleet.EndpointKey{Pool: p.Name, Address: e.Address}, e.Node, &claim{}}
			if old, ok := claims[t.key]; ok {
				t.claim = old.claim
			}
			targets[e.Address] = append(targets[e.Address], t)
		}
	}
	s.targets.Store(&targets)
	s.setRoster(rosterOf(pools, s.o.RequireIdentity))
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	pushv1.RegisterTelemetryServer(r, &service{server: s})
}

// ServerLimits are the options for the gRPC server that a Server registers on.
// Buffers are small because there is one connection for each node: gRPC's
// defaults take 64 KiB for each.
func ServerLimits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxSendMsgSize(maxMessage),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.MaxConcurrentStreams(4),
		grpc.ConnectionTimeout(quiet),
		grpc.ReadBufferSize(2 << 10),
		grpc.WriteBufferSize(2 << 10),
		grpc.InitialWindowSize(64 << 10),
		grpc.InitialConnWindowSize(64 << 10),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: quiet, MaxConnectionIdle: time.Minute}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
}

// Counters returns the counters.
func (s *Server) Counters() Counters {
	c := &s.counts
	return Counters{
		Streams: c.streams.Load(), StreamsRefused: c.streamsRefused.Load(), StreamsReplaced: c.streamsReplaced.Load(),
		Frames: c.frames.Load(), FramesRefused: c.framesRefused.Load(), Readings: c.readings.Load(),
		Refused: c.refused.Load(), Rejected: c.rejected.Load(), Dropped: c.dropped.Load(), UnknownNodes: c.unknownNodes.Load(),
	}
}

// Nodes returns the agents by name: those connected, and for ten minutes those
// that left. They are nodes that the configuration names, and where it has
// endpoints without a node at most 64 others. Callers share the slices in it and
// must not write to them: that makes it cheap enough for every few ticks.
func (s *Server) Nodes() []Node {
	now := s.o.Now()
	s.mu.Lock()
	s.prune(now)
	nodes := make([]*node, 0, len(s.nodes))
	for _, n := range s.nodes {
		nodes = append(nodes, n)
	}
	s.mu.Unlock()
	out := make([]Node, 0, len(nodes))
	for _, n := range nodes {
		out = append(out, n.copy(now))
	}
	slices.SortFunc(out, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func (n *node) copy(now time.Time) Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lent = true
	shown := n.shown
	shown.Age = max(0, now.Sub(n.seen))
	return shown
}

// prune forgets nodes that left long ago. The caller holds s.mu.
func (s *Server) prune(now time.Time) {
	for name, n := range s.nodes {
		if n.streams == 0 && now.Sub(n.lastSeen()) > remembered {
			delete(s.nodes, name)
		}
	}
}

// makeRoom forgets the unnamed node that left first, if any left. The caller
// holds s.mu.
func (s *Server) makeRoom(k *roster) {
	oldest, at := "", time.Time{}
	for name, n := range s.nodes {
		if n.streams > 0 || k.names(name) {
			continue
		}
		if seen := n.lastSeen(); oldest == "" || seen.Before(at) {
			oldest, at = name, seen
		}
	}
	delete(s.nodes, oldest)
}

func (n *node) lastSeen() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.seen
}

var errTooManyNodes = fmt.Errorf("%d nodes that the configuration does not name are there already; endpoints[].node names one", maxUnnamed)

// enter finds or makes a node and keeps it until the stream ends, or the
// configuration names it no more.
func (s *Server) enter(name string) (*node, error) {
	now := s.o.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.roster.Load()
	if !k.admits(name) {
		return nil, errNotNamed(name)
	}
	n := s.nodes[name]
	if n == nil {
		if !k.names(name) && s.unnamed(k) >= maxUnnamed {
			s.makeRoom(k)
			if s.unnamed(k) >= maxUnnamed {
				return nil, errTooManyNodes
			}
		}
		n = &node{shown: Node{Name: name}, seen: now}
		s.nodes[name] = n
	}
	n.streams++
	return n, nil
}

// warn logs what agents do wrong, at most once in warnEvery for all of them.
func (s *Server) warn(message string, args ...any) {
	now := s.o.Now()
	s.mu.Lock()
	late := s.warned.IsZero() || now.Sub(s.warned) >= warnEvery
	if late {
		s.warned = now
	}
	s.mu.Unlock()
	if late {
		s.o.Log.Warn(message, args...)
	}
}

// service is the gRPC service of a Server.
type service struct {
	pushv1.UnimplementedTelemetryServer
	server *Server
}

// Push takes frames one by one and answers each. An agent that reads no answers
// is soon not read either: flow control bounds what it holds.
func (v *service) Push(stream pushv1.Telemetry_PushServer) error {
	s := v.server
	s.counts.streams.Add(1)
	id, err := s.identify(stream.Context())
	if err != nil {
		return s.refuseStream(codes.Unauthenticated, err)
	}
	r := receiver{server: s, identity: id, from: addressOf(stream.Context())}
	defer r.end()
	var m pushv1.Frame
	for {
		switch err := stream.RecvMsg(&m); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		ack, err := r.take(&m)
		m.Reset() // 5 KiB less for each stream while it waits
		if err != nil {
			return err
		}
		if err := stream.Send(ack); err != nil {
			return err
		}
	}
}

func (s *Server) refuseStream(code codes.Code, err error) error {
	s.counts.streamsRefused.Add(1)
	s.warn("telemetry stream is refused", "error", err)
	return status.Error(code, err.Error())
}

// receiver takes the frames of one stream.
type receiver struct {
	server   *Server
	identity *identity
	from     string // the peer's address
	decoder  decoder
	node     *node // nil before the first frame
	// stranger is the name of a node that is not known, "" if it is.
	stranger      string
	strangeFrames int
}

// end takes the turn from r, if r still has it.
func (r *receiver) end() {
	if r.node == nil {
		return
	}
	n := r.node
	n.turn.Lock()
	if n.current == r {
		n.current = nil
		n.mu.Lock()
		n.shown.Connected = false
		n.mu.Unlock()
	}
	n.turn.Unlock()
	r.server.mu.Lock()
	n.streams--
	r.server.mu.Unlock()
}

// take takes one frame. An error ends the stream.
func (r *receiver) take(m *pushv1.Frame) (*pushv1.Ack, error) {
	s := r.server
	now := s.o.Now()
	if err := r.identity.valid(now); err != nil {
		return nil, s.refuseStream(codes.Unauthenticated, err)
	}
	if r.strange(m) {
		return r.refuseStranger(m)
	}
	f := s.frames.Get().(*received)
	defer s.frames.Put(f)
	ack := &pushv1.Ack{Sequence: m.GetSequence()}
	if err := r.decoder.decode(m, now, f); err != nil {
		s.counts.framesRefused.Add(1)
		if r.decoder.node == "" {
			return nil, s.refuseStream(codes.InvalidArgument, err)
		}
		ack.Error = err.Error()
		r.refuse(err)
		return ack, nil
	}
	if r.node == nil {
		if err := r.begin(); err != nil {
			return nil, err
		}
	}
	r.node.turn.Lock()
	defer r.node.turn.Unlock()
	if r.node.current != r {
		return nil, status.Error(codes.Aborted, "a newer stream of this node began")
	}
	if r.node.gone.Load() {
		return nil, status.Error(codes.Aborted, "the configuration has stopped naming this node")
	}
	refused := r.deliver(f, now)
	r.note(f, now, refused)
	ack.Refused = refused[:min(len(refused), maxRefusals)]
	ack.More = uint32(len(refused) - len(ack.Refused))
	return ack, nil
}

// begin checks the node of the first frame and makes r its live stream.
func (r *receiver) begin() error {
	s := r.server
	if err := r.identity.speaksFor(r.decoder.node); err != nil {
		return s.refuseStream(codes.PermissionDenied, err)
	}
	n, err := s.enter(r.decoder.node)
	if err != nil {
		return s.refuseStream(codes.ResourceExhausted, err)
	}
	r.node = n
	if before := n.replace(r); before != nil {
		s.counts.streamsReplaced.Add(1)
		s.warn("a newer stream of this node replaces the older; two agents with one name would do so for ever",
			"node", r.decoder.node, "from", r.from, "before", before.from)
	}
	return nil
}

// replace gives r the turn: after it returned, the stream before takes no frame
// any more; it ends with its next one, or with its connection. It returns the one
// before, or nil.
func (n *node) replace(r *receiver) *receiver {
	n.turn.Lock()
	defer n.turn.Unlock()
	before := n.current
	n.current = r
	n.mu.Lock()
	n.shown.Connected = true
	n.mu.Unlock()
	return before
}

// deliver hands on what the node may say and returns what it may not.
func (r *receiver) deliver(f *received, now time.Time) []*pushv1.Refusal {
	s := r.server
	refused := f.refused
	targets := *s.targets.Load()
	taken := f.Endpoints[:0]
	for i := range f.Endpoints {
		u := &f.Endpoints[i]
		list := targets[u.Endpoint]
		err := errUnknown
		if len(list) > 0 {
			err = nil
		}
		some := false
		for _, t := range list {
			if problem := s.deliverTo(t, r.decoder.node, u, now); problem != nil {
				err = fmt.Errorf("pool %q: %w", t.key.Pool, problem)
				continue
			}
			some = true
		}
		if err != nil {
			refused = append(refused, &pushv1.Refusal{Address: u.Endpoint.String(), Reason: clip(err.Error())})
		}
		if some {
			taken = append(taken, *u)
		}
	}
	f.Endpoints = taken
	return refused
}

var (
	errUnknown = errors.New("no pool with pushed telemetry has this endpoint")
	errNoNode  = errors.New("the configuration names no node for it, which TLS requires")
)

// deliverTo hands u to one endpoint of one pool, if the node may speak for it.
func (s *Server) deliverTo(t target, name string, u *Update, now time.Time) error {
	switch {
	case t.node == "" && s.o.RequireIdentity:
		return errNoNode
	case t.node != "" && t.node != name:
		return fmt.Errorf("it is on another node than %q", name)
	}
	sample := u.Sample
	if err := t.take(name, &sample, now, t.node == ""); err != nil {
		return err
	}
	defer t.release()
	if u.Err != "" {
		s.counts.readings.Add(1)
		s.o.Deliver(telemetry.Reading{Endpoint: t.key, Err: errors.New(u.Err)})
		if sample.Known == 0 {
			return nil
		}
	}
	s.counts.readings.Add(1)
	s.o.Deliver(telemetry.Reading{Endpoint: t.key, Sample: sample})
	return nil
}

// take claims the endpoint for one reading and keeps its times from going back:
// the way of a frame is not always equally long. Where the configuration names
// no node (open), an endpoint belongs to who spoke for it last.
func (c *claim) take(name string, sample *telemetry.Sample, now time.Time, open bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy || open && c.node != name && c.node != "" && now.Sub(c.at) < claimTime {
		return fmt.Errorf("node %q speaks for it", c.node)
	}
	c.node, c.at, c.busy = name, now, true
	if sample.At.Before(c.last) {
		sample.At = c.last
	}
	c.last = sample.At
	return nil
}

func (c *claim) release() {
	c.mu.Lock()
	c.busy = false
	c.mu.Unlock()
}

// note keeps what Nodes shows.
func (r *receiver) note(f *received, now time.Time, refused []*pushv1.Refusal) {
	c := &r.server.counts
	c.frames.Add(1)
	c.refused.Add(uint64(len(refused)))
	c.rejected.Add(uint64(f.rejected))
	n := r.node
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen = now
	shown := &n.shown
	if f.dropped >= shown.Dropped {
		c.dropped.Add(f.dropped - shown.Dropped)
	} else { // the agent began anew
		c.dropped.Add(f.dropped)
	}
	shown.Epoch, shown.Interval, shown.Dropped, shown.Err = f.Epoch, f.interval, f.dropped, f.Err
	shown.Frames++
	shown.Rejected += uint64(f.rejected)
	if n.lent {
		shown.GPUs, shown.Endpoints, shown.Refused, n.lent = nil, nil, nil, false
	}
	shown.GPUs = append(shown.GPUs[:0], f.GPUs...)
	shown.Endpoints = slices.Grow(shown.Endpoints[:0], len(f.Endpoints))
	for i := range f.Endpoints {
		u := &f.Endpoints[i]
		shown.Endpoints = append(shown.Endpoints, NodeEndpoint{u.Endpoint, u.GPUs, u.Err})
	}
	shown.Refused = shown.Refused[:0]
	for _, x := range refused[:min(len(refused), maxRefusals)] {
		shown.Refused = append(shown.Refused, Refusal{x.GetAddress(), x.GetReason()})
	}
}

// refuse notes a frame that was not taken.
func (r *receiver) refuse(err error) {
	if r.node == nil {
		return
	}
	r.node.mu.Lock()
	r.node.shown.Err = clip(err.Error())
	r.node.mu.Unlock()
}
