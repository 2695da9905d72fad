package agent

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/fakedcgm"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// patience is how long an end-to-end test waits for an event on a loaded
// machine.
const patience = time.Minute

// TestAgentBinary runs the real binary, with go-dcgm over a fake libdcgm.
func TestAgentBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a binary with cgo")
	}
	dir := t.TempDir()
	lib, err := fakedcgm.Build(dir)
	if errors.Is(err, fakedcgm.ErrNoCompiler) && os.Getenv("CI") != "1" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	binary := buildAgent(t, dir)
	t.Run("from DCGM to serve", func(t *testing.T) { fromDCGMToServe(t, binary, lib) })
	t.Run("check", func(t *testing.T) { checkShowsGPUs(t, binary, lib) })
}

func fromDCGMToServe(t *testing.T, binary, lib string) {
	dir := t.TempDir()
	server := startSim(t)
	a, b := startWorker(t), startWorker(t)
	scriptFile := filepath.Join(dir, "script")
	dcgm := fakedcgm.New(3).Process(0, a).Process(1, b).Process(2, 1<<22+1). // a process that is not there
											Double(0, fakedcgm.FieldPower, 310).Double(1, fakedcgm.FieldPower, 420).
											Double(0, fakedcgm.FieldDRAMActive, 0.7).Double(1, fakedcgm.FieldDRAMActive, 0.4)
	write := func() {
		t.Helper()
		if err := dcgm.Write(scriptFile); err != nil {
			t.Fatal(err)
		}
	}
	write()
	certificates(t, dir)
	serve := startServe(t, dir)
	advertised := netip.MustParseAddrPort("10.0.0.11:8000")
	serve.push.SetPools([]fleet.Pool{{Name: "h100", Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush},
		Endpoints: []fleet.Endpoint{{Address: advertised, Node: "gpu-node"}}}})

	config := filepath.Join(dir, "agent.yaml")
	text := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Agent
node: gpu-node
push: { address: "%s", tls: { ca: %[2]s/ca.crt, certificate: %[2]s/agent.crt, key: %[2]s/agent.key, serverName: fairlead } }
dcgm: { host: embedded }
status: 127.0.0.1:0
servers: [ { listen: "%[3]s", advertise: "%[4]s" } ]
`, serve.address, dir, server.Addr(), advertised)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ended := filepath.Join(dir, "ended")
	agent := startAgent(t, binary, append(fakedcgm.Env(lib, scriptFile), fakedcgm.EndedVariable+"="+ended), "-f", config)

	complete := serve.await(t, agent, "engine and GPU numbers", func(r telemetry.Reading) bool {
		return r.Err == nil && r.Sample.Known.Has(telemetry.HasKVUsage|telemetry.HasPower|telemetry.HasDRAMActive|telemetry.HasXID|telemetry.HasCondition)
	})
	if s := complete.Sample; complete.Endpoint != (fleet.EndpointKey{Pool: "h100", Address: advertised}) || s.PowerWatts != 420 || math.Abs(s.DRAMActive-0.7) > 1e-6 ||
		s.XID != 0 || s.Condition != telemetry.ConditionOK {
		t.Errorf("reading %+v, want the worst of GPUs 0 and 1", complete)
	}
	// What a frame says of its node is noted after its readings were handed on.
	serve.await(t, agent, "the next frame", func(telemetry.Reading) bool { return true })
	node := serve.push.Nodes()[0]
	if want := []string{fakedcgm.UUID(0), fakedcgm.UUID(1)}; node.Name != "gpu-node" || len(node.GPUs) != 3 || !slices.Equal(node.Endpoints[0].GPUs, want) {
		t.Errorf("node %+v, want three GPUs, the endpoint on %v", node, want)
	}
	ask(t, server.Addr())
	serve.await(t, agent, "tokens that the engine made", func(r telemetry.Reading) bool { return r.Sample.GenerationTokens > 0 })

	dcgm.XID(1, 79)
	write()
	serve.await(t, agent, "XID 79", func(r telemetry.Reading) bool { return r.Sample.XID == 79 && r.Sample.XIDEvents == 1 })
	dcgm.Lose(1)
	write()
	serve.await(t, agent, "a lost GPU", func(r telemetry.Reading) bool {
		return r.Sample.Condition == telemetry.ConditionLost && r.Sample.PowerWatts == 310
	})

	// A GPU can hang when the process that reads it is killed (dcgm-exporter
	// issue 84), so the agent must shut DCGM down when it is told to end.
	if _, err := os.Stat(ended); err == nil {
		t.Error("DCGM was shut down before the agent was told to end")
	}
	if err := agent.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	agent.awaitEnd(t)
	if _, err := os.Stat(ended); err != nil {
		t.Errorf("the agent ended without shutting DCGM down: %v", err)
	}
}

func checkShowsGPUs(t *testing.T, binary, lib string) {
	dir := t.TempDir()
	server := startSim(t)
	scriptFile := filepath.Join(dir, "script")
	if err := fakedcgm.New(2).Process(1, startWorker(t)).Write(scriptFile); err != nil {
		t.Fatal(err)
	}
	check := func() (string, error) {
		c := exec.Command(binary, "agent", "--check", "--push", "unix:"+dir+"/push.sock", "--node", "n", "--server", server.Addr().String())
		c.Env = append(os.Environ(), fakedcgm.Env(lib, scriptFile)...)
		out, err := c.CombinedOutput()
		return string(out), err
	}
	// A check gives up after a few seconds, which a loaded machine may exceed.
	await := func(good func(out string, err error) bool) {
		t.Helper()
		for began := time.Now(); ; {
			out, err := check()
			if good(out, err) {
				return
			}
			if time.Since(began) > patience {
				t.Fatalf("%v\n%s", err, out)
			}
		}
	}
	await(func(out string, err error) bool {
		return err == nil && strings.Contains(out, fakedcgm.UUID(0)) && strings.Contains(out, "/metrics ok") &&
			strings.Contains(out, fakedcgm.UUID(1)+"  processes [")
	})
	if err := fakedcgm.New(2).Write(scriptFile); err != nil {
		t.Fatal(err)
	}
	await(func(out string, err error) bool {
		return err != nil && strings.Contains(out, "are unknown: no process computes on any GPU")
	})
}

// buildAgent builds the binary with DCGM.
func buildAgent(t *testing.T, dir string) string {
	t.Helper()
	binary := filepath.Join(dir, "fairlead")
	build := exec.Command("go", "build", "-tags", "dcgm", "-ldflags=-s -w", "-o", binary, "github.com/fairlead-proxy/fairlead/cmd/fairlead")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return binary
}

// startSim runs a simulated model server in this process.
func startSim(t *testing.T) *sim.Server {
	t.Helper()
	profile, err := sim.ProfileByName("llama-3.1-8b-h100")
	if err != nil {
		t.Fatal(err)
	}
	servers, err := sim.New(&sim.Config{Servers: []sim.ServerConfig{{
		Name: "one", Listen: netip.MustParseAddrPort("127.0.0.1:0"), Model: "m", GPU: fakedcgm.UUID(0), Engine: profile,
	}}}, nil)
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
	return servers.Servers()[0]
}

// startWorker runs a child of this process, which listens, that plays one of
// its workers.
func startWorker(t *testing.T) int {
	t.Helper()
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	return c.Process.Pid
}

// ask sends the model server a request.
func ask(t *testing.T, server netip.AddrPort) {
	t.Helper()
	body := `{"model":"m","max_tokens":16,"messages":[{"role":"user","content":"say something"}]}`
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Post("http://"+server.String()+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("chat completion: status %d", resp.StatusCode)
	}
}

// receiver is the end of `serve` that takes frames.
type receiver struct {
	push     *push.Server
	address  string
	readings chan telemetry.Reading
}

func startServe(t *testing.T, dir string) *receiver {
	t.Helper()
	credentials, err := push.ServerCredentials(fleet.ServerTLS{
		Certificate: dir + "/serve.crt", Key: dir + "/serve.key", ClientCA: dir + "/ca.crt"})
	if err != nil {
		t.Fatal(err)
	}
	r := &receiver{readings: make(chan telemetry.Reading, 1)}
	r.push = push.NewServer(push.ServerOptions{RequireIdentity: true, Deliver: func(x telemetry.Reading) {
		select {
		case r.readings <- x:
		default: // the test is not looking
		}
	}})
	listen, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.address = listen.Addr().String()
	server := grpc.NewServer(append(push.ServerLimits(), grpc.Creds(credentials))...)
	r.push.Register(server)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listen) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return r
}

// await waits for a reading of the agent.
func (r *receiver) await(t *testing.T, from *agentProcess, what string, ok func(telemetry.Reading) bool) telemetry.Reading {
	t.Helper()
	var last telemetry.Reading
	late := time.After(patience)
	for {
		select {
		case last = <-r.readings:
			if ok(last) {
				return last
			}
		case <-from.ended:
			t.Fatalf("the agent ended before %s: %v", what, from.err)
		case <-late:
			t.Fatalf("no %s within %s; last reading %+v, nodes %+v", what, patience, last, r.push.Nodes())
		}
	}
}

// agentProcess is a running agent.
type agentProcess struct {
	*os.Process
	ended chan struct{} // closed at its end
	err   error         // how it ended

	mu  sync.Mutex
	log bytes.Buffer
}

func (a *agentProcess) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.log.Write(p)
}

func (a *agentProcess) text() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.log.String()
}

func startAgent(t *testing.T, binary string, env []string, args ...string) *agentProcess {
	t.Helper()
	a := &agentProcess{ended: make(chan struct{})}
	c := exec.Command(binary, append([]string{"agent"}, args...)...)
	c.Env = append(os.Environ(), env...)
	c.Stdout, c.Stderr = a, a
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	a.Process = c.Process
	go func() { a.err = c.Wait(); close(a.ended) }()
	t.Cleanup(func() {
		_ = c.Process.Kill()
		<-a.ended
		if t.Failed() {
			t.Logf("the agent said:\n%s", a.text())
		}
	})
	return a
}

// awaitEnd waits for a clean end.
func (a *agentProcess) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-a.ended:
		if a.err != nil || !strings.Contains(a.text(), "agent is stopping") {
			t.Errorf("after SIGTERM: %v, want a clean end", a.err)
		}
	case <-time.After(patience):
		t.Errorf("still running %s after SIGTERM", patience)
	}
}

// certificates writes an authority and what it signed: serve's certificate for
// the name fairlead, the agent's for gpu-node.
func certificates(t *testing.T, dir string) {
	t.Helper()
	authority := template(t, 1, "authority")
	authority.IsCA, authority.BasicConstraintsValid, authority.KeyUsage = true, true, x509.KeyUsageCertSign
	key := writeKey(t, filepath.Join(dir, "ca.key"))
	writeCertificate(t, filepath.Join(dir, "ca.crt"), authority, authority, key, key)
	for i, name := range []string{"fairlead", "gpu-node"} {
		file := filepath.Join(dir, []string{"serve", "agent"}[i])
		leaf := template(t, int64(2+i), name)
		leaf.DNSNames = []string{name}
		leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
		writeCertificate(t, file+".crt", leaf, authority, writeKey(t, file+".key"), key)
	}
}

func template(t *testing.T, serial int64, name string) *x509.Certificate {
	t.Helper()
	now := time.Now()
	return &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)}
}

func writeKey(t *testing.T, file string) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, file, "PRIVATE KEY", der)
	return key
}

func writeCertificate(t *testing.T, file string, leaf, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, leaf, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, file, "CERTIFICATE", der)
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}
