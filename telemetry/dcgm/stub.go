//go:build !(dcgm && cgo && linux)

package dcgm

// New returns [ErrNotBuilt].
func New(Options) (*Source, error) { return nil, ErrNotBuilt }
