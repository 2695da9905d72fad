// Package layers checks, as a test, what may import what and that every package
// says what it owns. It has no code of its own.
package layers
