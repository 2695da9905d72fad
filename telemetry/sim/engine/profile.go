package engine

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// BlockTokens is the number of tokens in one KV-cache block, vLLM's default.
const BlockTokens = 16

// maxContext is the longest prompt and answer together that Llama 3.1 allows.
const maxContext = 131072

// Profile describes an inference engine: how long a step takes and how much it
// can hold. Times are float64 nanoseconds, as a token of context costs less than
// one.
type Profile struct {
	// Name is the profile's name in a fleet file, such as llama-3.1-8b-h100.
	Name string
	// Hardware is the GPU's model name as DCGM gives it.
	Hardware string

	BaseNS       float64 // fixed cost of a step
	PerSeqNS     float64 // for each sequence that decodes a token in it
	PerContextNS float64 // for each token of those sequences' contexts
	PerPrefillNS float64 // for each prompt token prefilled in it

	KVTokens int // capacity of the KV cache, in tokens
	MaxSeqs  int // largest batch
	Chunk    int // largest number of tokens, prompt and decode, in one step

	MemoryMiB int     // GPU memory
	IdleWatts float64 // power without work
	PeakWatts float64 // power limit
}

// MemoryShare is the part of the GPU's memory that vLLM takes at start
// (gpu_memory_utilization, default 0.92) and keeps.
const MemoryShare = 0.92

// profiles hold what the step model was fitted to.
//
// H100: medians of inter-token latency over batch size of the ML.ENERGY
// leaderboard (lm-arena-chat; Llama-3.1-8B on one H100, Llama-3.1-70B on four).
// That source does not tell lengths. Throughput and latency together imply 0.4
// prompt tokens per generated one for both models (70B: 1/throughput − ITL/batch
// = 0.047 ms, over 0.107 ms per prompt token), and the fit takes prompts of 200
// and answers of 500 tokens, so a mean context of 450. The cost per context
// token is the KV cache's bytes over 70 % of the memory bandwidth, the cost per
// sequence what then remains of the slope. Prefill: 8B from LLMServingSim's
// layer times (256 tokens 11.8 ms … 2048 tokens 64.8 ms), 70B from Splitwise's
// table (H100 TP4, 0.107 ms per token).
//
// A100: the H100's decode costs times the ratio of memory bandwidths
// (3.35/2.04 TB/s); the base so found, 11 ms, fits Vidur's 9.7 ms for the layers
// without attention and head. Prefill 0.07 ms per token is Vidur's measurement.
//
// RTX 4090: a real run of vLLM 0.19 with Llama-3.1-8B in bf16 into an exhausted
// KV cache (LLMServingSim, github.com/casys-kaist/LLMServingSim, MIT; state at
// 1 Hz and 300 requests). Its log gives the 41,408 KV tokens. Seconds without
// prefill give the decode costs: running/throughput is 18.0 ms at 8 sequences
// and 14,300 tokens, 20.2 at 15 and 22,800, 24.5 at 30 and 41,000, 26 at 41 and
// 41,000; seconds with prefill leave 79 µs per prompt token. The median time per
// output token of the whole run, prefills and preemptions included, is 31 ms.
//
// L40S: the RTX 4090 scaled and not measured: decoding by the ratio of memory
// bandwidths (1,008/864 GB/s), prefill by that of the dense bf16 rates with
// 32-bit accumulation (165/362 TFLOPS).
//
// KV capacity is arithmetic except for the RTX 4090: 92 % of the memory less
// weights and 4 GiB per GPU, over 131,072 bytes (8B) or 327,680 bytes (70B) per
// token.
var profiles = []Profile{
	{
		Name: "llama-3.1-8b-h100", Hardware: "NVIDIA H100 80GB HBM3",
		BaseNS: 6.69e6, PerSeqNS: 53_600, PerContextNS: 50, PerPrefillNS: 25_000,
		KVTokens: 447_040, MaxSeqs: 256, Chunk: 2048,
		MemoryMiB: 81_559, IdleWatts: 70, PeakWatts: 700,
	},
	{
		Name: "llama-3.1-8b-a100", Hardware: "NVIDIA A100-SXM4-80GB",
		BaseNS: 10.99e6, PerSeqNS: 88_000, PerContextNS: 82, PerPrefillNS: 70_000,
		KVTokens: 447_040, MaxSeqs: 256, Chunk: 2048,
		MemoryMiB: 81_920, IdleWatts: 60, PeakWatts: 400,
	},
	{
		Name: "llama-3.1-70b-4xh100", Hardware: "NVIDIA H100 80GB HBM3",
		BaseNS: 15.85e6, PerSeqNS: 71_400, PerContextNS: 50, PerPrefillNS: 107_000,
		KVTokens: 482_000, MaxSeqs: 256, Chunk: 2048,
		MemoryMiB: 81_559, IdleWatts: 70, PeakWatts: 700,
	},
	{
		Name: "llama-3.1-8b-rtx4090", Hardware: "NVIDIA GeForce RTX 4090",
		BaseNS: 15.3e6, PerSeqNS: 90_000, PerContextNS: 160, PerPrefillNS: 79_000,
		KVTokens: 41_408, MaxSeqs: 256, Chunk: 2048,
		MemoryMiB: 24_564, IdleWatts: 20, PeakWatts: 450,
	},
	{
		Name: "llama-3.1-8b-l40s", Hardware: "NVIDIA L40S",
		BaseNS: 17.85e6, PerSeqNS: 105_000, PerContextNS: 187, PerPrefillNS: 36_000,
		KVTokens: 184_000, MaxSeqs: 256, Chunk: 2048,
		MemoryMiB: 46_068, IdleWatts: 35, PeakWatts: 350,
	},
}

// ProfileByName returns a built-in profile, or an error that names them all.
func ProfileByName(name string) (Profile, error) {
	for _, p := range profiles {
		if p.Name == name {
			return p, nil
		}
	}
	return Profile{}, fmt.Errorf("found profile %q; accepted: %s", name, strings.Join(ProfileNames(), ", "))
}

// ProfileNames returns the names of the built-in profiles in ascending order.
func ProfileNames() []string {
	names := make([]string, len(profiles))
	for i, p := range profiles {
		names[i] = p.Name
	}
	slices.Sort(names)
	return names
}

// Slowed returns the profile with every step factor times as long. A factor
// above 1 makes an engine that saturates at a small load and so costs a small
// machine little CPU.
func (p Profile) Slowed(factor float64) Profile {
	p.BaseNS *= factor
	p.PerSeqNS *= factor
	p.PerContextNS *= factor
	p.PerPrefillNS *= factor
	return p
}

// MaxModelLen is the largest sum of prompt and answer, in tokens: what one
// sequence alone can hold in the KV cache, at most 131,072.
func (p Profile) MaxModelLen() int {
	return min(p.KVTokens/BlockTokens*BlockTokens, maxContext)
}

// StepNS is the model's duration of one step in nanoseconds.
func (p Profile) StepNS(decoding, context, prefill int) float64 {
	return p.decodeNS(decoding, context) + p.PerPrefillNS*float64(prefill)
}

// decodeNS is the part of a step that reads weights and KV cache.
func (p Profile) decodeNS(decoding, context int) float64 {
	return p.BaseNS + p.PerSeqNS*float64(decoding) + p.PerContextNS*float64(context)
}

// Capacity returns the requests per second an engine can sustain when the i-th
// of many requests has prompt[i] and output[i] tokens: the rate at which the
// batch just stays at its largest, limited by MaxSeqs or by the KV cache. Above
// it the queue grows without end. It returns 0 for an empty or unequal sample.
//
// At batch B a request takes output·(base/B + perSeq) + perContext·Σcontext +
// perPrefill·prompt of the engine's time.
func (p Profile) Capacity(prompt, output []int) float64 {
	if len(prompt) == 0 || len(prompt) != len(output) {
		return 0
	}
	var in, out, contexts float64
	for i := range prompt {
		pi, oi := float64(prompt[i]), float64(output[i])
		in += pi
		out += oi
		contexts += oi*pi + oi*oi/2 // a sequence's context summed over its decode steps
	}
	if out <= 0 {
		return 0
	}
	meanContext := contexts / out // of a sequence found in the batch
	batch := min(float64(p.MaxSeqs), math.Floor(float64(p.KVTokens)/(meanContext+BlockTokens/2)))
	if batch < 1 {
		return 0
	}
	perRequestNS := (out*(p.BaseNS/batch+p.PerSeqNS) + p.PerContextNS*contexts + p.PerPrefillNS*in) / float64(len(prompt))
	return 1e9 / perRequestNS
}

// MemoryUsedMiB is the GPU memory in use from the engine's start to its end.
func (p Profile) MemoryUsedMiB() int { return int(float64(p.MemoryMiB) * MemoryShare) }

// Check returns what makes the profile unusable, or nil.
func (p Profile) Check() error {
	switch {
	case !(p.BaseNS > 0) || p.PerSeqNS < 0 || p.PerContextNS < 0 || p.PerPrefillNS < 0 ||
		math.IsInf(p.BaseNS+p.PerSeqNS+p.PerContextNS+p.PerPrefillNS, 0) || math.IsNaN(p.PerSeqNS+p.PerContextNS+p.PerPrefillNS):
		return fmt.Errorf("profile %q: step costs must be finite, with a base above 0", p.Name)
	case p.KVTokens < BlockTokens:
		return fmt.Errorf("profile %q: found %d KV tokens; accepted: %d or more", p.Name, p.KVTokens, BlockTokens)
	case p.MaxSeqs < 1:
		return fmt.Errorf("profile %q: found a batch of %d; accepted: 1 or more", p.Name, p.MaxSeqs)
	case p.Chunk < 1:
		return fmt.Errorf("profile %q: found a chunk of %d tokens; accepted: 1 or more", p.Name, p.Chunk)
	}
	return nil
}
