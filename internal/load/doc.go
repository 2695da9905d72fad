// Package load is an open-loop load generator for model servers that speak
// OpenAI's or Anthropic's HTTP API. It owns when requests are sent, how long
// they are and what their callers saw; it knows nothing of routing.
//
// Open loop means that a request is sent when its time has come, whether or not
// earlier ones were answered, and that all times count from the moment it was
// due: a slow server, or a slow generator, can't hide its slowness by being
// asked less often (coordinated omission).
//
// Invariants: the arrivals depend on their seed alone, so that policies can be
// compared on equal terms; what is in flight is bounded, and what the bound
// keeps back is reported as dropped; no goroutine outlives [Run].
package load
