// Package examples holds runnable set-ups: each folder has its files and the
// commands that start it, and each is started and queried by a test. The demo
// runs the fleet of quickstart.
package examples

import "embed"

// Quickstart holds fairlead.yaml and fleet.yaml of the quickstart folder.
//
//go:embed quickstart/*.yaml
var Quickstart embed.FS
