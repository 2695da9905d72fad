package extproc

import (
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Limits of the gRPC server. A request-headers message holds at most Envoy's
// 60 KiB of headers, the peeked strings of at most 8 KiB each and the
// attributes.
const (
	maxMessage    = 1 << 20
	maxHeaderList = 64 << 10
	maxStreams    = 1 << 14
	// flowWindow is fixed so that grpc-go sends no probes to estimate the
	// bandwidth-delay product of a local connection.
	flowWindow = 1 << 20
	// streamWorkers handle streams on stacks that have grown already, instead of
	// a goroutine for each stream that has to grow its own: 32 instead of 35 µs of
	// CPU a request in a server that is never idle, where a stock server that
	// answers empty takes 45 (Envoy 1.40.0, 2 cores, 60 interleaved rounds).
	// Streams that wait for their answer occupy one; when none is free gRPC starts
	// a goroutine.
	streamWorkers = 32
)

// ServerOptions are what the gRPC server of a Service must be made with: the
// codec that hands over raw bytes, and limits. Other services (gRPC health) may
// live on the same server: the codec falls back to protobuf for them.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(rawCodec{encoding.GetCodecV2(proto.Name)}),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxHeaderListSize(maxHeaderList),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.InitialWindowSize(flowWindow),
		grpc.InitialConnWindowSize(flowWindow),
		grpc.NumStreamWorkers(streamWorkers),
	}
}

// rawIn receives a message's bytes as they came. The bytes are valid until the
// next receive.
type rawIn struct{ b []byte }

// lateIn receives a message of a stream that waits for it, maybe for minutes: a
// buffer is taken only when the message is there.
type lateIn struct{ c *call }

func (in *lateIn) take() (c *call) {
	c, in.c = in.c, nil
	return c
}

// rawOut is a finished message. Its bytes belong to gRPC once it is sent.
type rawOut struct{ b *[]byte }

// rawCodec passes rawIn, lateIn and rawOut through untouched.
type rawCodec struct{ encoding.CodecV2 }

func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	out, ok := v.(*rawOut)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	return mem.BufferSlice{mem.NewBuffer(out.b, answers)}, nil
}

func (c rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	var in *rawIn
	switch v := v.(type) {
	case *rawIn:
		in = v
	case *lateIn:
		v.c = newCall()
		in = &v.c.in
	default:
		return c.CodecV2.Unmarshal(data, v)
	}
	in.b = in.b[:0]
	for _, part := range data {
		in.b = append(in.b, part.ReadOnlyData()...)
	}
	return nil
}

// answers recycles the buffers that answers are written into; gRPC gives one
// back when its bytes are on the wire.
var answers = &answerPool{}

// answerSize is above what any answer but one with a very long client id needs,
// and above grpc's threshold for pooling (1 KiB).
const (
	answerSize = 4 << 10
	keepAnswer = 64 << 10
)

type answerPool struct{ p sync.Pool }

// Get implements mem.BufferPool. It ignores the length: answers are appended to.
func (a *answerPool) Get(int) *[]byte {
	if b, ok := a.p.Get().(*[]byte); ok {
		*b = (*b)[:0]
		return b
	}
	b := make([]byte, 0, answerSize)
	return &b
}

// Put implements mem.BufferPool.
func (a *answerPool) Put(b *[]byte) {
	if c := cap(*b); c >= answerSize && c <= keepAnswer {
		a.p.Put(b)
	}
}
