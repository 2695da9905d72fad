// Package admission decides what may enter and what to tell whom may not. It
// owns: who a client is, burst levels with their budgets, concurrency limits of
// endpoints and pools, clients' shares, rate limits (counted by a [Limiter]; see
// package ratelimit) and the slots in which refused clients come back.
//
// It never picks an endpoint, which is the plan's, and writes no HTTP: its
// answers are values that package extproc puts into words.
//
// Invariants: a request that was admitted is counted in flight until its end, or
// until its lease is over, and never twice; among requests admitted in one window
// the remaining requests strictly decrease; each refused request has a slot of
// its own; every table is bounded, and what finds no room in it shares a place
// with others, never goes uncounted.
package admission
