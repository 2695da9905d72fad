// Package admission decides what may enter and what to tell whom may not. It
// owns: who a client is, burst levels with their budgets, concurrency limits of
// endpoints and pools, clients' shares, rate limits (counted by a [Limiter]; see
// package ratelimit) and the slots in which refused clients come back.
//
// A [Gate] counts every admitted request in flight, per client, pool and burst
// level, from its admission to its end, which the access log tells. While a pool
// is full, that is, has nine tenths of its limit in flight, or all but one place,
// each client is held to its weighted max-min share of it and each level to its
// budget; otherwise nobody is. Who is sent away gets a slot: in its client's own queue,
// when places of its share probably end, or, for the first few of a client that has
// less than half of its share, in a line of all. Shortly before and after a slot a
// place is kept for it, from first tries of the same client, and from clients that have
// their share, so that who polls does not take it. A credential that a server told
// alone to stay away is kept out of its pool for that time ([Gate.TurnAway]), in a queue of
// its own. Who finds its tokens used up waits for what its own running requests give back,
// if that is enough. All that needs an overview of clients happens in [Gate.Step]; a request
// takes a few short locks and allocates nothing.
//
// It never picks an endpoint, which is the plan's, and writes no HTTP: its
// answers are values that package extproc puts into words.
//
// Invariants: a request that was admitted is counted in flight until its end, or
// until its lease is over, and never twice; among requests admitted in one window
// the remaining requests strictly decrease; each refused request has a slot of
// its own; every table is bounded, and what finds no room in it shares a place
// with others, never goes uncounted. Where the table of claims is full, clients
// with a limit on concurrency are refused, since that limit is exact; requests of
// others count for their pool and level for as long as such requests take.
package admission
