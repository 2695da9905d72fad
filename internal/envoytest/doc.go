// Package envoytest gives tests a real Envoy and scripted upstream servers.
//
// It owns what it starts: every Envoy, server and goroutine ends in the test's
// Cleanup. It knows nothing about Fairlead's own configuration. Everything
// listens on loopback or on a Unix socket in a short temporary directory.
package envoytest
