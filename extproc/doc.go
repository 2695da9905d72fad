// Package extproc is the ext_proc service: it reads a request's headers as
// Envoy sends them, classes the request, asks the plan and answers with the
// endpoints to use, with nothing but ids, or with a 429.
//
// It never looks at bodies (Envoy's json_to_metadata filter hands over the few
// fields that matter), never waits for anything, and never decides: plan.Decide
// does. What it cannot read it answers with a gRPC error, and Envoy, set to fail
// open, routes by itself.
//
// Invariants:
//   - a stream's handler never ends without an error before it has answered the
//     request headers (Envoy would go on unsteered and count nothing).
//   - every value is sent as raw_value; value alone arrives empty.
//   - the route cache is cleared only for a request that is moved to another
//     pool, and then the answer has a header mutation, without which Envoy
//     ignores the clearing.
//   - pools are named by groups that routes themselves have, never by clusters: a
//     sidecar that lacks the group goes on along its own chain, one that lacks
//     the cluster would answer 503.
//   - an immediate response always has its status set; unset means 200.
//
// Who owns which header of an answer to the client: the ids and the strategy
// (x-route-strategy, x-fairlead-decision, x-execution-graph-id, x-request-id)
// belong to Envoy's route configuration, which writes them from the metadata
// namespace fairlead.log over whatever is there; a 429 from here carries the
// same values, so that they are right under a route that doesn't. The retry
// fields of that 429 belong to this package.
package extproc
