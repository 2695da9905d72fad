package xgb

import (
	_ "embed"
)

// The model that scorer/train made; MODEL_CARD.md says from what, and how good it
// is.
//
//go:embed model.ubj
var shipped []byte

// Shipped returns the model in the binary. It fails only if the file that was
// embedded is broken, which a test rules out.
func Shipped() (*Model, error) { return Load(shipped, LoadOptions{}) }
