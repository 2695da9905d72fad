// Package integration holds tests that run Fairlead's parts together with a real
// Envoy. It exports nothing.
//
// The envoyfacts tests need none of Fairlead's own packages but the builders of
// Envoy's configuration and test support: they keep, as tests against the real
// Envoy, what the design takes for granted about it. When one of them fails after
// an upgrade of Envoy, the comment above it says which part of the design stands
// on it.
package integration
