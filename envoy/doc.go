// Package envoy builds the Envoy resources that one group's sidecars are
// served, from fleet values alone: clusters, endpoint assignments, one route
// configuration and one listener per listening address.
//
// It owns the shape of everything Envoy is told. It never talks to an Envoy,
// reads no clock and keeps no state: the same config, group and runtime give
// byte-for-byte the same resources.
//
// Invariants, each guarded by a test:
//   - every route names its pools as priority groups, and every pool carries a
//     floor endpoint, so that a dead pool is a refused connection (which Envoy
//     retries) and never Envoy's own final 503;
//   - a client can't send a header of Fairlead's own: the listener removes them
//     before any filter or route sees the request;
//   - what differs by route is taken from the route that the body's model chose,
//     never from the one that Envoy picked before it had read the body; so only
//     what is read before the model may be switched by a route's filter settings;
//   - an answer's bytes are never changed, whatever is read out of it;
//   - a pool's cluster is the same in every group, and its assignment carries
//     the digest of that cluster, so that a changed cluster always comes with a
//     changed assignment and never stalls while warming;
//   - [Build] returns only resources that pass [Validate] and [Closure].
package envoy
