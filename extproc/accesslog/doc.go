// Package accesslog turns what Envoy's gRPC access log tells into
// fleet.Outcome values, and keeps the ledger of attempts in flight that those
// outcomes and the decisions feed.
//
// It never decides anything and never waits: a receiver that is away costs
// entries, not requests, since Envoy doesn't wait for its log.
//
// Invariants:
//   - access logs are lossy, late and, between streams, out of order; nothing
//     here needs them complete. Every lease ends by itself.
//   - Ledger.InFlight takes no lock and is never negative.
//   - when every request has ended, or its lease has, every counter is 0.
//   - a log entry can't make the receiver panic, whatever it holds.
package accesslog
