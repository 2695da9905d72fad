//go:build !race

package admission

const Raced = false
