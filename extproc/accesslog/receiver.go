package accesslog

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// MaxMessage is the largest log message accepted. Envoy batches 16 KiB, but one
// entry holds every header that it was told to log and every peeked string.
const MaxMessage = 16 << 20

// ServerOptions are the limits for the gRPC server that a Receiver registers on.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxHeaderListSize(64 << 10),
		grpc.MaxConcurrentStreams(1 << 14),
	}
}

// EventKind says what the receiver saw.
type EventKind uint8

// Event kinds.
const (
	EventEntries     EventKind = iota + 1 // N entries became outcomes
	EventIgnored                          // N entries told nothing of use
	EventStreamBegan                      // a log stream of Node began
	EventStreamEnded                      // a log stream of Node ended; entries may be missing
)

// String is the kind's metric label.
func (k EventKind) String() string {
	switch k {
	case EventEntries:
		return "entries"
	case EventIgnored:
		return "ignored"
	case EventStreamBegan:
		return "stream_began"
	case EventStreamEnded:
		return "stream_ended"
	}
	return "invalid"
}

// Event is what Options.Observe gets.
type Event struct {
	Kind EventKind
	Node string
	N    int
}

// Options configures a Receiver. Only Sink is required.
type Options struct {
	// Sink gets every outcome, in the order of its stream; several streams call
	// it at the same time. It must not block.
	Sink func(fleet.Outcome)
	// NodeGone is called when the last log stream of an Envoy has ended.
	NodeGone func(node string)
	// Observe gets counts for metrics.
	Observe func(Event)
	Log     *slog.Logger
	// Now stamps outcomes; default time.Now.
	Now func() time.Time
}

// Receiver serves envoy.service.accesslog.v3.AccessLogService.
type Receiver struct {
	alsv3.UnimplementedAccessLogServiceServer
	o Options

	mu      sync.Mutex
	streams map[string]int // open streams per node
}

// New returns a Receiver. It starts nothing.
func New(o Options) *Receiver {
	if o.Observe == nil {
		o.Observe = func(Event) {}
	}
	if o.NodeGone == nil {
		o.NodeGone = func(string) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Receiver{o: o, streams: map[string]int{}}
}

// Register adds the service to a gRPC server made with ServerOptions.
func (r *Receiver) Register(g *grpc.Server) { alsv3.RegisterAccessLogServiceServer(g, r) }

// Streams is the number of open log streams per Envoy node.
func (r *Receiver) Streams() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string]int, len(r.streams))
	for node, n := range r.streams {
		out[node] = n
	}
	return out
}

// StreamAccessLogs reads one stream: one logger of one worker of one Envoy.
// Only its first message says whose it is.
func (r *Receiver) StreamAccessLogs(s alsv3.AccessLogService_StreamAccessLogsServer) error {
	first, err := s.Recv()
	if errors.Is(err, io.EOF) {
		return s.SendAndClose(&alsv3.StreamAccessLogsResponse{})
	}
	if err != nil {
		return err
	}
	node := nodeName(first)
	logName := first.GetIdentifier().GetLogName()
	r.open(node)
	defer r.close(node)
	for m := first; ; {
		r.take(m, logName, node)
		if m, err = s.Recv(); err != nil {
			break
		}
	}
	if errors.Is(err, io.EOF) {
		return s.SendAndClose(&alsv3.StreamAccessLogsResponse{})
	}
	return err
}

// take hands the entries of one message on.
func (r *Receiver) take(m *alsv3.StreamAccessLogsMessage, logName, node string) {
	now := r.o.Now()
	good, ignored := 0, 0
	for _, e := range m.GetHttpLogs().GetLogEntry() {
		o, ok := OutcomeOf(e, logName, node, now)
		if !ok {
			ignored++
			continue
		}
		good++
		r.o.Sink(o)
	}
	if good > 0 {
		r.o.Observe(Event{EventEntries, node, good})
	}
	if ignored > 0 {
		r.o.Observe(Event{EventIgnored, node, ignored})
	}
}

func (r *Receiver) open(node string) {
	r.mu.Lock()
	r.streams[node]++
	r.mu.Unlock()
	r.o.Observe(Event{EventStreamBegan, node, 1})
	r.o.Log.Debug("access log stream began", "node", node)
}

func (r *Receiver) close(node string) {
	r.mu.Lock()
	r.streams[node]--
	last := r.streams[node] == 0
	if last {
		delete(r.streams, node)
	}
	r.mu.Unlock()
	r.o.Observe(Event{EventStreamEnded, node, 1})
	r.o.Log.Debug("access log stream ended", "node", node, "last", last)
	if last {
		r.o.NodeGone(node)
	}
}

// nodeName bounds what a peer calls itself.
func nodeName(m *alsv3.StreamAccessLogsMessage) string {
	id := m.GetIdentifier().GetNode().GetId()
	if id == "" {
		return "unnamed"
	}
	if len(id) > maxID {
		return fmt.Sprintf("%s…", id[:maxID])
	}
	return id
}
