package serve

import (
	"net/netip"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/scorer"
)

// nodeName is the machine of an endpoint.
func nodeName(e *fleet.Endpoint) string {
	if e.Node != "" {
		return e.Node
	}
	return hostOf(e.Address)
}

func hostOf(a netip.AddrPort) string { return a.Addr().Unmap().String() }

// gpuFaults are the reasons for which a node's GPU is to blame.
var gpuFaults = map[string]bool{
	scorer.ReasonXID.String(): true, scorer.ReasonLost.String(): true, scorer.ReasonGPU.String(): true,
}

// nodesOf judges every machine of the config, in the order in which they first
// stand there. agents are by node name.
func nodesOf(cfg *fleet.Config, pools []admin.Pool, agents map[string]admin.Agent) []admin.Node {
	index := map[string]int{}
	var out []admin.Node
	var judged []nodeJudgement
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		for k := range p.Endpoints {
			name := nodeName(&p.Endpoints[k])
			at, ok := index[name]
			if !ok {
				at = len(out)
				index[name] = at
				out = append(out, admin.Node{Name: name})
				judged = append(judged, nodeJudgement{})
			}
			judged[at].add(p.Telemetry.Source, &pools[i].Endpoints[k])
		}
	}
	for i := range out {
		n := &out[i]
		if agent, ok := agents[n.Name]; ok {
			n.Agent = &agent
		}
		n.Why = judged[i].missing(n.Agent)
		n.Ready = n.Why == ""
	}
	return out
}

// readyAge is how young the numbers of an endpoint in drain must be for its node
// to be ready: as young as those that an endpoint is judged by.
const readyAge = 2 * time.Second

// nodeJudgement gathers what a node's endpoints show.
type nodeJudgement struct {
	known, measured, pushed bool
	fault                   string
}

func (j *nodeJudgement) add(source fleet.TelemetrySource, e *admin.Endpoint) {
	j.measured = j.measured || source != fleet.TelemetryNone
	j.pushed = j.pushed || source == fleet.TelemetryPush
	// What drains is not judged, and may still be seen well.
	seen := e.TelemetryAge >= 0 && e.TelemetryAge <= readyAge.Seconds()
	j.known = j.known || e.Known || e.State == fleet.StateDraining.String() && seen
	if gpuFaults[e.Why] {
		j.fault = e.Why
	}
}

// missing says why the node is not ready, "" if it is.
func (j *nodeJudgement) missing(agent *admin.Agent) string {
	switch {
	case j.fault != "":
		return j.fault
	case !j.measured:
		return "no_source"
	case j.pushed && agent == nil:
		return "no_agent"
	case j.pushed && !agent.Connected:
		return "agent_away"
	case !j.known:
		return "stale"
	}
	return ""
}
