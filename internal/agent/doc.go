// Package agent is `fairlead agent`, the process on a GPU node: it reads the
// node's GPUs, scrapes the node's own model servers, finds out which GPUs serve
// which server, and sends one frame per interval with both.
//
// It decides nothing about an endpoint: what can't be read is an unknown field
// and a text. It never guesses which GPUs a server has: where the process tree
// leaves it open, the server gets none and the text asks for the override.
//
// Invariants: one goroutine ([Agent.Run]'s own) owns the state, and only it
// sends; a number's age is kept from where they were read, so that old ones
// never look new; nothing it holds grows with what others send: servers come
// from the config, GPUs and processes from one frame. Run's children end before
// it returns, in this order: engines and discovery, GPUs (DCGM is shut down
// while the process still lives), sender, status page.
//
// # Which GPUs serve which server
//
// DCGM names the processes that compute on each GPU, and the kernel tells who
// listens on the server's address. Between the two lies a tree of processes,
// which differs by engine: vLLM's API server listens and its children compute,
// TGI's launcher has a router that listens and shards that compute beside it,
// Triton does both in one process. The rule:
//
//  1. A server's listeners are all processes that hold a listening socket on
//     its port, bound to its address or to all addresses; several of them
//     (forked workers, SO_REUSEPORT) count together.
//  2. A listener's container is its cgroup's, if that is one of a container.
//     A computing process belongs to a server if it is a listener, descends
//     from one, or runs in the same container as one.
//  3. Outside of containers only: if no listener and none of its descendants
//     computes, the nearest ancestor in the listener's session is looked for
//     below which, in the same session, somebody does. The session counts only
//     then, because whatever else was started from the same shell shares it.
//  4. A process that several servers could claim goes to the one with which it
//     shares the nearest ancestor. If that is the same process for two servers
//     and not itself a listener of both, it is ambiguous and goes to none.
//
// GPUs once found are kept through a restart of their server, and longer while
// the server lives and the GPU can't be read: DCGM names no process of a GPU
// that is lost, and just then its server must know.
//
// A server inside a pod listens in a network namespace of its own, so the
// namespaces of all computing processes are looked at beside the agent's.
package agent
