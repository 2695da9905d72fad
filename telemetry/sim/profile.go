package sim

import "github.com/fairlead-proxy/fairlead/telemetry/sim/engine"

// BlockTokens is the number of tokens in one KV-cache block.
const BlockTokens = engine.BlockTokens

// Profile describes an inference engine; see [engine.Profile].
type Profile = engine.Profile

// ProfileByName returns a built-in profile, or an error that names them all.
func ProfileByName(name string) (Profile, error) { return engine.ProfileByName(name) }

// ProfileNames returns the names of the built-in profiles in ascending order.
func ProfileNames() []string { return engine.ProfileNames() }
