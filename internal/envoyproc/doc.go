// Package envoyproc runs one Envoy as a child process.
//
// It writes the bootstrap to a file, starts the binary, knows when Envoy has
// taken its configuration, keeps its last log lines for error messages and ends
// it. It never restarts an Envoy and never writes or reads a configuration's
// meaning.
//
// Invariants: no Envoy outlives this process (on Linux the kernel kills it with
// its parent); every goroutine of a [Process] has ended once [Process.Done] is
// closed; the memory kept for log lines is bounded.
package envoyproc
