// Package telemetry owns what is known of GPUs and model servers and how fresh
// it is: samples of endpoints and of GPUs, sliding windows, and, in packages
// below it, the sources they come from (scrape, push, dcgm). It decides nothing.
//
// Invariants: what is not known is not in the mask, and never a zero that looks
// like a number; ages are judged by local arrivals and by change, never by an
// answer's status or a foreign clock; a window allocates nothing.
package telemetry

import (
	"context"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Mask says which fields of a Sample are known.
type Mask uint32

// Fields of a Sample.
const (
	HasKVUsage Mask = 1 << iota
	HasRunning
	HasWaiting
	HasKVTokens
	HasMaxSeqs
	HasPromptTokens
	HasGenerationTokens
	HasPreemptions
	HasTTFT
	HasGPUUtil
	HasDRAMActive
	HasFBUsed
	HasPower
	HasXID
	HasQueuedTokens
	HasGRActive
	HasFBTotal
	HasPCIe
	HasCondition
)

// Has reports whether all fields of f are known.
func (m Mask) Has(f Mask) bool { return m&f == f }

// Sample is what one endpoint said at one moment.
type Sample struct {
	// At is the local arrival time (with its monotonic reading); a sample's age
	// is judged by it. Changed is when any engine number last differed from the
	// sample before: HTTP 200 with frozen numbers ages.
	At      time.Time
	Changed time.Time
	Known   Mask

	KVUsage float64 // 0…1, share of KV-cache blocks in use
	Running float64 // requests in the batch
	Waiting float64 // requests queued in the engine
	// KVTokens is the KV cache's capacity in tokens.
	KVTokens float64
	// MaxSeqs is the engine's limit on the batch.
	MaxSeqs float64
	// QueuedTokens are prompt tokens accepted by the engine and not yet
	// prefilled. No engine's page that is understood today tells them; scoring
	// then estimates them from Waiting.
	QueuedTokens float64

	PromptTokens     float64 // counter
	GenerationTokens float64 // counter
	Preemptions      float64 // counter
	// TTFTSum (seconds) and TTFTCount are the engine's own histogram of times
	// to first token.
	TTFTSum, TTFTCount float64

	GPUUtil    float64 // 0…1
	DRAMActive float64 // 0…1
	FBUsedMiB  float64
	PowerWatts float64
	GRActive   float64 // 0…1, DCGM's graphics-engine activity
	FBTotalMiB float64
	PCIeShare  float64 // 0…1, the busier direction over what the link carries
	// XID is the last XID error code, 0 for none. XIDEvents counts XIDs, repeats
	// of one code included, where the source can; 0 where it can't.
	XID       int
	XIDEvents float64
	// Condition is the worst of its GPUs'.
	Condition Condition
}

// Reading is a sample of one endpoint, or the reason why there is none.
type Reading struct {
	Endpoint fleet.EndpointKey
	Sample   Sample
	Err      error
}

// Source delivers readings.
type Source interface {
	// Run delivers readings to out until ctx ends. It never blocks on a slow
	// endpoint longer than its deadline, and out must not block.
	Run(ctx context.Context, out func(Reading)) error
}
