package serve

import (
	"fmt"
	"strings"

	"google.golang.org/grpc"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// buildPush builds the server that agents push to. It exists also where the
// config names no place for it, and then nobody can reach it.
func (s *Server) buildPush(cfg *fleet.Config) error {
	options := push.ServerLimits()
	if tls := cfg.Serve.Push.TLS; tls != nil {
		var err error
		if s.pushTLS, err = push.NewCredentials(*tls, s.log); err != nil {
			return fmt.Errorf("serve.push.tls: %w", err)
		}
		options = append(options, grpc.Creds(s.pushTLS))
	}
	s.push = push.NewServer(push.ServerOptions{Deliver: s.scoring.read, Log: s.log, RequireIdentity: cfg.Serve.Push.TLS != nil})
	s.push.SetPools(cfg.Pools)
	s.servers.push = grpc.NewServer(options...)
	s.push.Register(s.servers.push)
	s.scoring.agents = s.agents
	return nil
}

// pushTLSRefused says whether the files of serve.push.tls are ones that can't be
// used, so that those before are in use.
func (s *Server) pushTLSRefused() bool { return s.pushTLS != nil && s.pushTLS.ReloadError() != nil }

// agents are what the nodes' agents said last, by node.
func (s *Server) agents() map[string]admin.Agent {
	nodes := s.push.Nodes()
	out := make(map[string]admin.Agent, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		agent := admin.Agent{
			Connected: n.Connected, Epoch: n.Epoch, FrameAge: n.Age.Seconds(),
			Frames: n.Frames, Dropped: n.Dropped, Refused: len(n.Refused), Rejected: n.Rejected, Error: agentError(n),
			GPUs: make([]admin.GPU, 0, len(n.GPUs)),
		}
		for k := range n.GPUs {
			g := &n.GPUs[k]
			agent.GPUs = append(agent.GPUs, admin.GPU{ID: g.ID, Profile: g.Profile, Model: g.Model, Condition: g.Condition().String(), XID: g.XID})
		}
		out[n.Name] = agent
	}
	return out
}

// agentError joins what an agent could not read with what was not taken of it.
func agentError(n *push.Node) string {
	var parts []string
	if n.Err != "" {
		parts = append(parts, n.Err)
	}
	for _, e := range n.Endpoints {
		if e.Err != "" {
			parts = append(parts, e.Endpoint.String()+": "+e.Err)
		}
	}
	for _, r := range n.Refused {
		parts = append(parts, "not taken: "+r.Endpoint+": "+r.Reason)
	}
	return strings.Join(parts, "; ")
}

// pushed are the counts of the agents' frames, with handshakes that never became
// a stream.
func (s *Server) pushed() (c push.Counters, handshakesFailed uint64) {
	if s.pushTLS != nil {
		handshakesFailed = s.pushTLS.HandshakesFailed()
	}
	return s.push.Counters(), handshakesFailed
}
