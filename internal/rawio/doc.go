// Package rawio makes the system calls of a gRPC server's sockets without the bookkeeping
// that lets Go's scheduler replace a thread that blocks in one: a socket that doesn't block
// needs none. Of a server that has a request now and then the bookkeeping is a sixth of all
// work: when nothing runs the scheduler's monitor sleeps, the first system call wakes it
// (runtime.entersyscallWakeSysmon), and then it looks every 20 µs whether something blocks
// until nothing runs again (Go 1.26, linux/amd64; seen with perf).
//
// While a raw call lasts its thread counts as one that runs Go code. So only calls that
// return at once are made so: reads and writes of sockets in non-blocking mode, which all of
// package net's are. Where there is nothing to read, or no room to write, package net waits.
//
// The monitor also preempts what runs for more than 10 ms. While it sleeps that waits for its
// next wake-up: at the next timer of the process, or the next system call of another kind. So
// this is for processes that have a timer every some ten milliseconds, or compute nothing for
// so long.
//
// Under the race detector the calls are package syscall's, which it knows of.
//
// On other systems than Linux connections are left as they are.
package rawio
