// Package ratelimit counts requests and tokens per client and window. It owns
// the two implementations of [admission.Limiter]: [Embedded], which counts in
// this process, and [Redis], which counts in a Redis or Valkey server for
// several replicas and, while that does not answer, in this process by its part.
//
// It never decides which limit a request is subject to, never speaks HTTP, and
// never holds what a client is known by, only its hash.
//
// Windows are fixed and begin at whole multiples of their length since the Unix
// epoch. A fixed window lets a client use two windows' worth around a boundary;
// in exchange what remains strictly decreases among admitted requests, which no
// token bucket can promise. Smoothing is the admission gate's work.
//
// Invariants:
//   - a window is never handed out twice, whatever the clock does: when it goes
//     back, the later window goes on;
//   - a refused request takes nothing;
//   - tokens are settled, in both directions, only in the window they were
//     reserved from;
//   - tables are bounded, and with them the keys in Redis; a client that finds no
//     room shares a count with others: nobody goes uncounted;
//   - while the shared count is away, replicas' parts of a limit add up to the
//     limit.
package ratelimit
