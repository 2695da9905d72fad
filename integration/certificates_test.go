package integration

import (
	"context"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// TestCertificatesOfTheREADMELetANodeSpeakForItself runs the README's OpenSSL
// commands and pushes with what they made.
func TestCertificatesOfTheREADMELetANodeSpeakForItself(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil && os.Getenv("CI") != "1" {
		t.Skip(err)
	}
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "With OpenSSL 3:\n\n")
	script, _, _ := strings.Cut(rest, "\n\n")
	if !found || !strings.Contains(script, "sign gpu-a gpu-a") {
		t.Fatal("the README has no OpenSSL commands")
	}
	dir := t.TempDir()
	run := exec.CommandContext(t.Context(), "bash", "-e", "-c", script)
	run.Dir = dir
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	file := func(name string) string { return filepath.Join(dir, name) }
	credentials, err := push.ServerCredentials(fleet.ServerTLS{Certificate: file("push.crt"), Key: file("push.key"), ClientCA: file("ca.crt")})
	if err != nil {
		t.Fatal(err)
	}
	readings := make(chan telemetry.Reading, 16)
	server := push.NewServer(push.ServerOptions{RequireIdentity: true, Deliver: func(r telemetry.Reading) {
		select {
		case readings <- r:
		default:
		}
	}})
	own, others := netip.MustParseAddrPort("10.0.0.11:8000"), netip.MustParseAddrPort("10.0.0.12:8000")
	server.SetPools([]fleet.Pool{{Name: "h100", Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush},
		Endpoints: []fleet.Endpoint{{Address: own, Node: "gpu-a"}, {Address: others, Node: "gpu-b"}}}})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(append(push.ServerLimits(), grpc.Creds(credentials))...)
	server.Register(g)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	defer func() { g.Stop(); <-served }()

	client, err := push.NewClient(push.ClientOptions{
		Target: fleet.Address{Host: listener.Addr().String()}, Node: "gpu-a",
		TLS: &push.ClientTLS{CA: file("ca.crt"), Certificate: file("gpu-a.crt"), Key: file("gpu-a.key"), ServerName: "fairlead"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- client.Run(ctx) }()
	defer func() { cancel(); <-ended }()

	deadline := time.After(20 * time.Second)
	for {
		sample := telemetry.Sample{At: time.Now(), Changed: time.Now(), Known: telemetry.HasKVUsage, KVUsage: 0.5}
		client.Send(push.Frame{Endpoints: []push.Update{{Endpoint: others, Sample: sample}, {Endpoint: own, Sample: sample}}})
		select {
		case r := <-readings:
			if r.Endpoint.Address != own {
				t.Fatalf("gpu-a spoke for %v", r.Endpoint)
			}
			refused := client.Stats().Refused
			if len(refused) == 0 { // the answer may be on its way
				continue
			}
			if refused[0].Endpoint != others.String() {
				t.Errorf("refused %+v, want gpu-b's endpoint", refused)
			}
			return
		case <-time.After(50 * time.Millisecond):
		case <-deadline:
			t.Fatalf("nothing arrived: %+v", client.Stats())
		}
	}
}
