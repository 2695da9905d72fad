package accesslog

import (
	"errors"
	"io"
	"log/slog"
	"time"

	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"

	"github.com/fairlead-proxy/fairlead/fleet"
)

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
	// Observe gets counts for metrics, and is told of each stream that begins and
	// ends. An Envoy has several, one per log and worker, and a new one may begin
	// before the end of the old one is told: who wants to know which Envoys have any
	// counts both.
	Observe func(Event)
	Log     *slog.Logger
	// Now stamps outcomes; default time.Now.
	Now func() time.Time
}

// Receiver serves envoy.service.accesslog.v3.AccessLogService.
type Receiver struct{ o Options }

// New returns a Receiver. It starts nothing.
func New(o Options) *Receiver {
	if o.Observe == nil {
		o.Observe = func(Event) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Receiver{o: o}
}

// ServiceName is the gRPC service that Envoy streams its logs to.
const ServiceName = "envoy.service.accesslog.v3.AccessLogService"

// Register adds the service to a gRPC server made with ServerOptions.
func (r *Receiver) Register(g *grpc.Server) {
	g.RegisterService(&grpc.ServiceDesc{
		ServiceName: ServiceName,
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName:    "StreamAccessLogs",
			Handler:       func(_ any, stream grpc.ServerStream) error { return r.receive(stream) },
			ClientStreams: true,
		}},
		Metadata: "envoy/service/accesslog/v3/als.proto",
	}, r)
}

// stream is the part of grpc.ServerStream that receive uses.
type stream interface {
	RecvMsg(any) error
	SendMsg(any) error
}

// source is one stream: one logger of one worker of one Envoy.
type source struct {
	node  string
	log   logKind
	names names
	entry entry
}

// receive reads one stream. Only its first message says whose it is.
func (r *Receiver) receive(st stream) error {
	var in Raw
	err := st.RecvMsg(&in)
	if err == nil {
		from := sourceOf(in.b)
		r.open(from.node)
		defer r.close(from.node)
		for err == nil {
			r.take(in.b, from)
			in.reset() // a large one isn't held until the next comes
			err = st.RecvMsg(&in)
		}
	}
	if errors.Is(err, io.EOF) {
		return st.SendMsg(&alsv3.StreamAccessLogsResponse{})
	}
	return err
}

// sourceOf reads StreamAccessLogsMessage.identifier (1).
func sourceOf(message []byte) *source {
	var node, logName []byte
	for c := walk(message); c.next(); {
		if !c.isBytes(1) {
			continue
		}
		for id := walk(c.bytes); id.next(); {
			switch {
			case id.isBytes(1): // node
				for n := walk(id.bytes); n.next(); {
					if n.isBytes(1) {
						node = n.bytes
					}
				}
			case id.isBytes(2):
				logName = id.bytes
			}
		}
	}
	return &source{node: nodeName(node), log: logOf(logName), names: newNames()}
}

// take hands the entries of one StreamAccessLogsMessage on: http_logs (2), unless
// tcp_logs (3) took their place. What is malformed is ignored alone: an entry, or
// what follows in a message that is cut off.
func (r *Receiver) take(message []byte, from *source) {
	now := r.o.Now()
	good, ignored := 0, 0
	logs := walk(httpLogs(message))
	for logs.next() {
		if !logs.isBytes(2) {
			continue
		}
		entries := walk(logs.bytes)
		for entries.next() {
			if !entries.isBytes(1) {
				continue
			}
			var o fleet.Outcome
			if !from.entry.scan(entries.bytes) || !from.entry.outcome(&o, from.log, from.node, from.names, now) {
				ignored++
				continue
			}
			good++
			r.o.Sink(o)
		}
		if entries.bad {
			ignored++
		}
	}
	if logs.bad {
		ignored++
	}
	from.entry.reset()
	if good > 0 {
		r.o.Observe(Event{EventEntries, from.node, good})
	}
	if ignored > 0 {
		r.o.Observe(Event{EventIgnored, from.node, ignored})
	}
}

// httpLogs is the part of a message behind its last tcp_logs.
func httpLogs(message []byte) []byte {
	part := message
	for c := walk(message); c.next(); {
		if c.isBytes(3) {
			part = c.rest
		}
	}
	return part
}

func (r *Receiver) open(node string) {
	r.o.Observe(Event{EventStreamBegan, node, 1})
	r.o.Log.Debug("access log stream began", "node", node)
}

func (r *Receiver) close(node string) {
	r.o.Observe(Event{EventStreamEnded, node, 1})
	r.o.Log.Debug("access log stream ended", "node", node)
}

// nodeName bounds what a peer calls itself.
func nodeName(id []byte) string {
	if len(id) == 0 {
		return "unnamed"
	}
	if len(id) > maxID {
		return text(id[:maxID]) + "…"
	}
	return text(id)
}
