package push

import (
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

const (
	// maxUnnamed bounds the nodes that are remembered though the configuration
	// does not name them, connected ones included. Where endpoints name no node
	// somebody must be able to speak for them, and without TLS names cost nothing.
	maxUnnamed = 64
	// maxStrange is how many frames of a node that is not known are answered
	// before its stream ends. The client then backs off to one stream in 5 s.
	maxStrange = window
)

// roster lists the nodes that may speak: those of endpoints whose telemetry is
// pushed. It is never written after it was made.
type roster struct {
	named map[string]struct{}
	open  bool // an endpoint names no node, and no identity is required
}

func rosterOf(pools []fleet.Pool, identity bool) *roster {
	k := &roster{named: map[string]struct{}{}}
	for _, p := range pools {
		if p.Telemetry.Source != fleet.TelemetryPush {
			continue
		}
		for _, e := range p.Endpoints {
			if e.Node != "" {
				k.named[e.Node] = struct{}{}
			} else if !identity {
				k.open = true
			}
		}
	}
	return k
}

func (k *roster) names(node string) bool {
	_, ok := k.named[node]
	return ok
}

func (k *roster) admits(node string) bool { return k.open || k.names(node) }

func errNotNamed(node string) error { return fmt.Errorf("the configuration names no node %q", node) }

// setRoster forgets the nodes that the new configuration does not name and the
// one before did, and those that nobody may be any more; their streams end with
// the next frame. The caller holds s.mu.
func (s *Server) setRoster(next *roster) {
	before := s.roster.Load()
	s.roster.Store(next)
	for name, n := range s.nodes {
		if next.names(name) || next.open && !before.names(name) {
			continue
		}
		n.gone.Store(true)
		delete(s.nodes, name)
	}
}

// unnamed counts the nodes that k does not name. The caller holds s.mu.
func (s *Server) unnamed(k *roster) (count int) {
	for name := range s.nodes {
		if !k.names(name) {
			count++
		}
	}
	return count
}

// strange says whether m comes from a node that is not known. It is asked before
// anything of m is read; a stream that began so stays so, since the GPUs' names
// came in its first frame.
func (r *receiver) strange(m *pushv1.Frame) bool {
	if r.node != nil || r.decoder.node != "" {
		return false
	}
	if r.stranger == "" && checkName(m.GetNode()) == nil && !r.server.roster.Load().admits(m.GetNode()) {
		r.stranger = m.GetNode()
	}
	return r.stranger != ""
}

// refuseStranger answers a frame of a node that is not known, of which nothing
// is kept but its name. An error ends the stream.
func (r *receiver) refuseStranger(m *pushv1.Frame) (*pushv1.Ack, error) {
	s := r.server
	if err := r.identity.speaksFor(r.stranger); err != nil {
		return nil, s.refuseStream(codes.PermissionDenied, err)
	}
	s.counts.framesRefused.Add(1)
	s.counts.unknownNodes.Add(1)
	err := errNotNamed(r.stranger)
	if r.strangeFrames++; r.strangeFrames > maxStrange {
		return nil, s.refuseStream(codes.PermissionDenied, err)
	}
	s.warn("telemetry of an unknown node is refused", "error", err)
	return &pushv1.Ack{Sequence: m.GetSequence(), Error: clip(err.Error())}, nil
}
