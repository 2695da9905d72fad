// Package engine owns the model of an LLM inference engine: what a step of
// continuous batching costs, what the KV cache holds, who waits and who is
// preempted, and what the GPU shows of it. It has no clock, no lock, no I/O and
// no random numbers; it imports nothing of ours.
//
// An [Engine] works in steps as vLLM's does: chunked prefill, a paged KV cache,
// first-come first-served admission, and preemption of the youngest sequence by
// recomputation. Its driver asks for a step ([Engine.Begin]), lets its time pass,
// and ends it ([Engine.Finish]); sequences come and go in between. A step lasts
//
//	t = base + perSeq·decoding + perContext·Σcontext + perPrefill·prefilled
//
// with coefficients fitted to published measurements ([Profile]). All moments
// are durations since one origin that the driver chooses, such as its start.
//
// Invariants: the number of KV blocks in use is the sum over the sequences, at
// most the capacity, and 0 when none is left; every sequence submitted ends
// exactly once, finished or killed; nobody overtakes the head of the queue.
package engine
