// Package push owns the way of telemetry from node agents to `fairlead serve`:
// compact frames over a gRPC stream, from [Client] to [Server].
//
// It judges nothing about an endpoint; it decides only who may speak for which
// endpoint and which numbers can be true. Who could push unasked could eject
// GPUs, so what arrives is hostile until checked: a node speaks only for the
// endpoints that the configuration gives it, and under mutual TLS only with a
// certificate of its name.
//
// Invariants: Send never blocks and a client behind drops the oldest frames; at
// most window frames are on the way, so numbers cannot grow old unseen in a
// buffer; a node has one live stream, the newest; readings of one endpoint are
// delivered in order and their times never go back; whatever a peer sends or
// withholds, a stream holds a bounded amount of memory, and what outlives it is
// kept of nodes that the configuration names alone, and of at most 64 others where
// endpoints name none. Times cross the wire as ages, so clocks need not agree.
//
// A frame of 8 GPUs and one endpoint with everything known takes 721 bytes, 862
// with two endpoints, and 550 more when it brings the GPUs' names: the first of
// a stream does, and later ones when the names change.
package push
