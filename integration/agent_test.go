package integration

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/internal/fakedcgm"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// agentPlace is a node with three GPUs and three simulated model servers, one on
// each, whose numbers reach serve through the real agent alone.
type agentPlace struct {
	*place
	dcgm   *fakedcgm.Script
	script string
	lib    string
	binary string
	// agentFile is the agent's config.
	agentFile string
}

func newAgentPlace(t *testing.T) *agentPlace {
	t.Helper()
	p := &agentPlace{}
	dir := envoytest.ShortTempDir(t)
	var err error
	p.lib, err = fakedcgm.Build(dir)
	if errors.Is(err, fakedcgm.ErrNoCompiler) && os.Getenv("CI") != "1" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.binary = filepath.Join(dir, "fairlead-dcgm")
	build := exec.Command("go", "build", "-tags", "dcgm", "-ldflags=-extldflags=-Wl,-z,lazy", "-o", p.binary, "../cmd/fairlead")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p.script = filepath.Join(dir, "script")
	p.dcgm = fakedcgm.New(3)
	p.say(t)
	servers := startServers(t, 3)
	var endpoints, listens strings.Builder
	for i, s := range servers {
		fmt.Fprintf(&endpoints, "      - { name: gpu-%d, address: %q, node: n1 }\n", i+1, s.Addr())
		fmt.Fprintf(&listens, "  - { listen: %q, gpus: [%s] }\n", s.Addr(), fakedcgm.UUID(i))
	}
	p.place = newPlace(t, "groups: []")
	head := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
serve:
  xds: unix:%[1]s/xds
  extproc: unix:%[1]s/ep
  accessLog: unix:%[1]s/als
  admin: %[2]s
  push: unix:%[1]s/push
  stateDir: %[1]s/state
`, p.dir, envoytest.FreeAddr(t))
	p.write(t, head, `groups: [ { name: edge, listener: { address: 127.0.0.1:10000 }, routes: [chat] } ]
pools:
  - name: gpu
    telemetry: { source: push }
    kvBytesPerToken: 128KiB
    endpoints:
`+endpoints.String()+`routes: [ { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: gpu } ]
`)
	p.agentFile = filepath.Join(p.dir, "agent.yaml")
	text := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Agent
node: n1
push: { address: "unix:%s/push" }
dcgm: { host: embedded }
status: 127.0.0.1:0
servers:
%s`, p.dir, listens.String())
	if err := os.WriteFile(p.agentFile, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// startServers runs simulated model servers in this process.
func startServers(t *testing.T, n int) []*sim.Server {
	t.Helper()
	profile, err := sim.ProfileByName("llama-3.1-8b-h100")
	if err != nil {
		t.Fatal(err)
	}
	cfg := &sim.Config{}
	for i := range n {
		cfg.Servers = append(cfg.Servers, sim.ServerConfig{Name: fmt.Sprintf("gpu-%d", i+1), Listen: netip.MustParseAddrPort("127.0.0.1:0"), Model: "m", GPU: fakedcgm.UUID(i), Engine: profile})
	}
	servers, err := sim.New(cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := servers.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- servers.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return servers.Servers()
}

// say tells the fake libdcgm what its GPUs say from now on.
func (p *agentPlace) say(t *testing.T) {
	t.Helper()
	if err := p.dcgm.Write(p.script); err != nil {
		t.Fatal(err)
	}
}

// agent starts the real agent.
func (p *agentPlace) agent(t *testing.T) *fairleadProcess {
	t.Helper()
	return startBinary(t, p.binary, p.dir, fakedcgm.Env(p.lib, p.script), "agent", "-f", p.agentFile)
}

// ask posts a small request that the simulated servers accept.
func (p *agentPlace) ask(t *testing.T, address string) (int, http.Header, string) {
	t.Helper()
	status, header, body, err := tryPost("http://"+address+"/v1/chat/completions", `{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	return status, header, body
}

// await waits for a state of the fleet.
func (p *agentPlace) await(t *testing.T, what string, holds func(admin.Fleet) bool) {
	t.Helper()
	var last admin.Fleet
	defer func() {
		if t.Failed() {
			t.Logf("last seen: %+v", last)
		}
	}()
	envoytest.Eventually(t, what, func() bool {
		f, err := p.client.Fleet(t.Context())
		if err != nil {
			return false
		}
		last = f
		return holds(f)
	})
}

func endpoints(f admin.Fleet) []admin.Endpoint { return f.Pools[0].Endpoints }

func everyEndpoint(f admin.Fleet, holds func(admin.Endpoint) bool) bool {
	for _, e := range endpoints(f) {
		if !holds(e) {
			return false
		}
	}
	return true
}

// TestAgentSteersTrafficAwayFromALostGPU goes the whole way: libdcgm (a fake),
// go-dcgm, the agent, the push stream, serve, ext_proc, a real Envoy.
func TestAgentSteersTrafficAwayFromALostGPU(t *testing.T) {
	p := newAgentPlace(t)
	p.serve(t)
	agent := p.agent(t)
	_, address := p.sidecar(t)
	p.await(t, "numbers of three GPUs", func(f admin.Fleet) bool {
		return f.Nodes[0].Ready && f.Nodes[0].Agent != nil && len(f.Nodes[0].Agent.GPUs) == 3 &&
			everyEndpoint(f, func(e admin.Endpoint) bool { return e.Known && e.Condition == "ok" && e.GPUAge >= 0 })
	})
	served := map[string]int{}
	for range 60 {
		status, header, body := p.ask(t, address)
		if status != 200 {
			t.Fatalf("status %d: %s", status, body)
		}
		served[header.Get("X-Served-By-Server")]++
	}
	if len(served) != 3 {
		t.Fatalf("served by %v, want all three", served)
	}

	// The driver loses GPU 2: blank values with status 0 and fresh stamps.
	p.dcgm.Lose(1)
	p.say(t)
	p.await(t, "the endpoint of the lost GPU to be out", func(f admin.Fleet) bool {
		e := endpoints(f)[1]
		return e.State == fleet.StateEjected.String() && e.Why == "lost" && e.Share == 0 && e.Condition == "lost" && !f.Nodes[0].Ready && f.Nodes[0].Why == "lost"
	})
	for range 40 {
		if status, header, body := p.ask(t, address); status != 200 || header.Get("X-Served-By-Server") == "gpu-2" {
			t.Fatalf("status %d from %s while its GPU is lost: %s", status, header.Get("X-Served-By-Server"), body)
		}
	}

	// The agent dies: nobody is ejected for silence.
	p.dcgm = fakedcgm.New(3)
	p.say(t)
	agent.kill()
	p.await(t, "the node to be unknown", func(f admin.Fleet) bool {
		return f.Nodes[0].Why != "" && !f.Nodes[0].Agent.Connected && everyEndpoint(f, func(e admin.Endpoint) bool { return !e.Known })
	})
	f, err := p.client.Fleet(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range endpoints(f) {
		if i != 1 && (e.State == fleet.StateEjected.String() || e.Share == 0) {
			t.Errorf("%s is %s with share %v after its agent died", e.Name, e.State, e.Share)
		}
	}
	if status, _, body := p.ask(t, address); status != 200 {
		t.Errorf("status %d while the agent is dead: %s", status, body)
	}

	// It comes back, and the GPU is well again.
	p.agent(t)
	p.await(t, "the lost GPU's endpoint to serve again", func(f admin.Fleet) bool {
		return f.Nodes[0].Ready && everyEndpoint(f, func(e admin.Endpoint) bool { return e.Known && e.Share > 0 })
	})
	out := runFairlead(t, p.dir, "nodes", "--admin", p.config.Serve.Admin.Target())
	if !strings.Contains(out, "n1") || !strings.Contains(out, "connected") || strings.Count(out, fakedcgm.UUID(0)) != 1 {
		t.Errorf("fairlead nodes:\n%s", out)
	}
}
