// Package bootstrap builds the file that a sidecar Envoy of a group starts
// from: who it is, where its control planes are, and what must be fixed before
// it hears from them. It is pure; everything else a sidecar needs comes over
// ADS (package envoy).
package bootstrap

import (
	"errors"
	"net/netip"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Options says whose bootstrap to build.
type Options struct {
	// NodeID names the sidecar; unique among all sidecars.
	NodeID string
	// Group is the sidecar's group; it becomes node.cluster.
	Group string
	// Listen is where the sidecar listens; it becomes node metadata.
	Listen netip.AddrPort
	// XDS are the control planes in order of preference.
	XDS []fleet.Address
	// Admin is where Envoy's own admin interface listens.
	Admin fleet.Address
	// DrainTime is how long old connections live after a listener change;
	// above the longest generation. Default 1h.
	DrainTime time.Duration
}

// Build builds the bootstrap.
func Build(o Options) (*bootstrapv3.Bootstrap, error) { return nil, errors.New("not built") }

// Render renders the bootstrap as "yaml" or "json".
func Render(o Options, format string) ([]byte, error) { return nil, errors.New("not built") }

// Args returns the Envoy flags that belong to a bootstrap stored at path.
func Args(o Options, path string) []string { return nil }
