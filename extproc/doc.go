// Package extproc is the ext_proc service: it reads a request's headers as
// Envoy sends them, classes the request, asks the plan where it should go and
// admission whether it may, and answers with the endpoints to use, with nothing
// but ids, or with a refusal that says what to do. On routes that ask for it, it
// also adds retry fields to an upstream's answer that lacks them.
//
// It never looks at bodies (Envoy's json_to_metadata filter hands over the few
// fields that matter), and never decides: plan.Decide and Admission do. It waits
// for Admission, whose limiter may ask a shared count, within that one's deadline,
// and, with requests that find no place, for others to end: within 60 ms, of at
// most 256 at a time (hold.go; docs/adr/0013). What it cannot read it answers with a
// gRPC error, and Envoy, set to fail open, routes by itself.
//
// The order for a request that generates: decide, reserve a place on the endpoint
// that was picked (Ledger.Reserve is exact, the counts that the plan compares may
// be a moment old; where the place is taken, decide again with the next seed),
// ask admission, answer. A place is given back when admission refuses; where that
// is for the pool's sake, the next pool of the chain is tried. Who is refused
// because others are in flight is tried again for a moment, and only the last try
// gives a slot and counts. Other requests are steered and counted, never refused.
// Where a route refuses bodies that nobody could read, that comes before all of it; and
// before that a request whose content-length is above the route's limit passes to
// Envoy's 413, unsteered and uncounted.
//
// Invariants:
//   - a stream's handler never ends without an error before it has answered the
//     request headers (Envoy would go on unsteered and count nothing).
//   - once they are answered it never ends with one: an answer passes as it is.
//   - every value is sent as raw_value; value alone arrives empty.
//   - the route cache is cleared only for a request that is moved to another
//     pool, and then the answer has a header mutation, without which Envoy
//     ignores the clearing.
//   - pools are named by groups that routes themselves have, never by clusters: a
//     sidecar that lacks the group goes on along its own chain, one that lacks
//     the cluster would answer 503.
//   - an immediate response always has its status set; unset means 200.
//   - a header never stands for a body that nobody read, unless its route trusts
//     the header: the route's default counts if it is larger, and admission is told
//     that it is a guess.
//   - a client is not a new one by spelling its credential anew.
//   - what is reserved or admitted and not answered is given back.
//   - a wait that a client is told is 1 ms … 60 s, and no date.
//   - while a stream waits for an answer's headers, nothing of it holds a buffer
//     or a plan.
//
// Who owns which header of an answer to the client: the ids and the strategy
// (x-route-strategy, x-fairlead-decision, x-execution-graph-id, x-request-id)
// belong to Envoy's route configuration, which writes them from the metadata
// namespace fairlead.log over whatever is there; a refusal from here carries the
// same values, so that they are right under a route that doesn't. Where a client
// stands with its limit belongs to it too, on answers of upstreams: it writes
// that from the namespace fairlead.limit. All of a refusal's headers belong to
// this package, and the retry fields of answers in the response phase.
package extproc
