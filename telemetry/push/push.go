package push

import (
	"net/netip"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Update is what one model server of a node said, or why it could not be read.
type Update struct {
	// Endpoint is spelled as the configuration of `serve` does.
	Endpoint netip.AddrPort
	// Sample may hold the GPUs' numbers alone when the server could not be read.
	Sample telemetry.Sample
	// GPUs are the ids of the GPUs that serve it.
	GPUs []string
	// Err says why the model server could not be read; "" if it could.
	Err string
}

// Frame is what one node said at one moment.
type Frame struct {
	// Node is filled in by the client from its options.
	Node string
	// Epoch counts the agent's connections to its GPUs.
	Epoch uint32
	// At is when the frame was made, with its monotonic reading; where a sample
	// or a GPU has no time it stands in. Zero means the moment of Send.
	At        time.Time
	Endpoints []Update // at most 128
	// GPUs are for people and metrics; what steers traffic stands in the samples.
	GPUs []telemetry.GPU // at most 256
	// Err says why the GPUs could not be read; "" if they could.
	Err string
}

// Refusal is an endpoint that the server does not take, and why.
type Refusal struct {
	Endpoint string
	Reason   string
}

const (
	// window is how many frames may be on the way, sent and not answered: 0.8 s
	// at 5 Hz, well above any round trip. It keeps a stalled server from being
	// fed, later, numbers that grew old in a socket's buffer and that would look
	// fresh on arrival.
	window = 4
	// maxRefusals bounds the endpoints that one answer names.
	maxRefusals = 8
	// quiet is how long one side waits for the other before it gives a stream
	// up: the client for an answer.
	quiet = 5 * time.Second
)
