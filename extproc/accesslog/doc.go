// Package accesslog turns what Envoy's gRPC access log tells into
// fleet.Outcome values, and keeps the ledger of attempts in flight that those
// outcomes and the decisions feed.
//
// It never decides where a request goes and never waits: a receiver that is away costs
// entries, not requests, since Envoy doesn't wait for its log.
//
// Invariants:
//   - access logs are lossy, late and, between streams, out of order; nothing
//     here needs them complete. Every lease ends by itself.
//   - Ledger.InFlight takes no lock and is never negative.
//   - when every request has ended, or its lease has, every counter is 0.
//   - Ledger.Reserve never lets an endpoint have more than the limit; what the
//     log tells of is counted all the same, since it is real.
//   - no number of ends keeps what runs from being counted: requests that never ran
//     leave nothing, and what ended gives way. A ledger full of what runs reserves
//     nothing under a limit.
//   - a log entry can't make the receiver panic, whatever it holds. It is scanned
//     where it lies, since the generated types would take most of what the log
//     costs; they are the scanner's oracle in tests. Nothing of an outcome points
//     into the message.
//   - what a message didn't say is unknown, never 0: see fleet.Usage.
package accesslog
