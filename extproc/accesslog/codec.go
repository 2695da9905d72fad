package accesslog

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// MaxMessage is the largest log message accepted. Envoy batches 16 KiB, but one
// entry holds every header that it was told to log and every peeked string.
const MaxMessage = 16 << 20

// flowWindow is fixed so that grpc-go sends no probes to estimate the
// bandwidth-delay product, and holds several batches of Envoy's.
const flowWindow = 1 << 20

// ServerOptions are what the gRPC server that a Receiver registers on must be
// made with: the codec that hands over raw bytes, and limits.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(rawCodec{encoding.GetCodecV2(proto.Name)}),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxHeaderListSize(64 << 10),
		grpc.MaxConcurrentStreams(1 << 14),
		grpc.InitialWindowSize(flowWindow),
		grpc.InitialConnWindowSize(flowWindow),
	}
}

// Raw receives a message's bytes as they came. They are valid until the next
// receive.
type Raw struct{ b []byte }

// Bytes are the message's, for whoever listens in on a stream.
func (r *Raw) Bytes() []byte { return r.b }

// keepInput is the largest buffer that a stream keeps between its messages:
// Envoy's batches of 16 KiB and one entry that overshoots.
const keepInput = 64 << 10

// reset makes room for the next message.
func (r *Raw) reset() {
	if cap(r.b) > keepInput {
		r.b = nil
	}
	r.b = r.b[:0]
}

// rawCodec passes Raw through untouched, and everything else to protobuf's.
type rawCodec struct{ encoding.CodecV2 }

func (c rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	in, ok := v.(*Raw)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	in.reset()
	for _, part := range data {
		in.b = append(in.b, part.ReadOnlyData()...)
	}
	return nil
}
