// Package dcgm owns telemetry from NVIDIA's Data Center GPU Manager: what the
// GPUs of this node say, five times a second, as [telemetry.GPUFrame]s.
//
// It decides nothing about a GPU's worth. It decides only what is known: a
// number counts if it is not one of DCGM's blanks, lies in its field's range and
// is young. DCGM's per-value status says little (a driver error is cached as a
// blank with status 0 and a fresh stamp), so it is not relied on.
//
// Invariants:
//   - One goroutine makes every DCGM call, one call at a time, and never one
//     before a connection was made: a missing symbol ends the process without a
//     trace. At most one [Source] of a process reads at a time, because go-dcgm
//     has one host engine per process.
//   - A call that hangs holds one thread; no second caller is started. The
//     reader says in frames that it waits, and goes on when the call returns.
//   - Ages follow from local arrivals and from differences between DCGM's own
//     stamps. The host engine's clock may be wrong or step without making a
//     value seem old or young.
//   - A GPU of which nothing is known is in the frame with nothing known. It is
//     Lost only when DCGM says so, or when it is enumerated no more while others
//     are.
//
// go-dcgm needs cgo, and the library it loads can end the process. So the code
// that calls it has the build tag dcgm; without it [New] says how to build.
//
// go-dcgm's symbols are found when the library is loaded, so a binary that binds
// all symbols at its start does not start ("symbol lookup error", exit status
// 127): LD_BIND_NOW must not be set, and where the distribution's gcc links with
// -z now, as Ubuntu's does, the build needs -ldflags=-extldflags=-Wl,-z,lazy.
package dcgm
