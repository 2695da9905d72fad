// Package scorer owns the judgement of endpoints: how risky each one is, which
// state that puts it in, and which share of new requests it gets.
//
// It is pure: values in, values out; time comes in as now; no clock, no I/O, no
// goroutine. It never sends or moves a request, and it never refuses one:
// weights and states are inputs of a plan.
//
// Invariants, each held by a property test:
//   - missing data never ejects: not of the engine, and not of the GPU, whose
//     driver may answer for no GPU of a node any more;
//   - of a pool with n endpoints at least max(1, ⌈n/2⌉) serve, whatever their
//     risk;
//   - failures that a third of a pool shows at once, and more than one endpoint,
//     eject none of them as out of memory;
//   - while a pool has an endpoint with capacity, its weights sum to more than 0;
//   - risk grows with each input of the formula and lies in 0…1;
//   - the wall clock plays no part: steps of the system's clock change nothing.
package scorer
