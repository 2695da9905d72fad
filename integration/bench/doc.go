// Command bench measures what Fairlead costs beside its peers, each ratio from
// interleaved rounds in one run, prints the whole table and writes it to
// docs/benchmarks.md:
//
//	cd integration/bench && go run . -rounds 7
//
// It owns everything it measures with: an open-loop load at a fixed rate, plain
// upstream servers, one real Envoy per configuration made by Fairlead's own
// builders, and the servers under test, each a process of its own. The stock
// server is grpc-go as it comes, with Envoy's generated types and an empty
// answer, once with Go's default garbage collection and once tuned as `fairlead
// serve` tunes its own; Fairlead's is the whole of `fairlead serve`. Both end the
// stream after their answer. The comparison with another scheduler lives in the
// module peer, since that brings a thousand packages.
//
// Invariants: the two sides of a ratio get the same requests through the same
// Envoy configuration but for the address of the ext_proc server; CPU is what
// the kernel counted for the process (getrusage, CPU clocks), never a share of
// wall time; latency counts from when a request was due; a run counts only if
// Envoy's own counters say that every request was asked about and answered, and a
// ratio is judged only on enough rounds that say something; nothing outlives the
// command.
package main
