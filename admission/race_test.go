//go:build race

package admission

// raced is true where the race detector watches.
const raced = true
