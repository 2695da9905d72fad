//go:build race

package admission

// Raced is true where the race detector watches.
const Raced = true
