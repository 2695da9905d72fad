// Package simulate is a discrete-event simulation of a GPU fleet behind routers:
// it compares routing policies on the same arrivals, and records labelled
// telemetry to train risk models with.
//
// Time is virtual. Engines are [engine.Engine], telemetry goes through
// telemetry.Window, and the policies called "ours" are the real scorer.Judge,
// plan.Compile and Plan.Decide with one judge, one plan and one ledger per
// router, so that the comparison judges what ships. Nothing leaves the process.
//
// What a router knows is late, as in production: a GPU is sampled every 200 ms,
// each at a phase of its own; a sample arrives 50 ms later; every router scores
// and plans every 50 ms, again at a phase of its own; its ledger learns of an
// end 50 ms late. The baselines get what is generous to them: their own requests
// in flight without delay, as Envoy counts them, and llm-d's scores 50 ms old at
// most.
//
// In one thing ours knows more here than in production: the exact length of each
// prompt, and after which sample it was sent. There the length is estimated as a
// quarter of the content-length; what was sent since the last sample counts from
// the tick before its page was read (package own), at most 16,384 tokens a
// request, and a quarter of the endpoint's KV cache in all.
//
// Invariants: a run depends on its [Spec] alone, bit for bit, and starts no
// goroutine; all policies of a seed see the same arrivals, faults and phases;
// every arrival ends exactly once: answered, refused or failed.
package simulate
