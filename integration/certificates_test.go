package integration

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/internal/serve"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// TestCertificatesOfTheREADMELetANodeSpeakForItself runs the README's OpenSSL
// commands and pushes to serve with what they made.
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
	own, others := netip.MustParseAddrPort("10.0.0.11:8000"), netip.MustParseAddrPort("10.0.0.12:8000")
	server := serving(t, fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
serve:
  xds: unix:%[1]s/xds
  extproc: unix:%[1]s/ep
  accessLog: unix:%[1]s/als
  admin: %[2]s
  push: { address: "%[3]s", tls: { certificate: %[4]s/push.crt, key: %[4]s/push.key, clientCA: %[4]s/ca.crt } }
  stateDir: %[1]s/state
groups: [ { name: edge, listener: { address: 127.0.0.1:10000 }, routes: [chat] } ]
pools:
  - { name: h100, telemetry: { source: push }, endpoints: [ { address: "%[5]s", node: gpu-a }, { address: "%[6]s", node: gpu-b } ] }
routes: [ { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: h100 } ]
`, envoytest.ShortTempDir(t), envoytest.FreeAddr(t), envoytest.FreeAddr(t), dir, own, others))

	// The certificate of gpu-a does not let its holder speak as gpu-b.
	impostor := pushing(t, server, dir, "gpu-b", own, others)
	await(t, "the refusal", func() bool { return strings.Contains(impostor.Stats().LastError, `does not name node "gpu-b"`) },
		func() any { return impostor.Stats() })

	client := pushing(t, server, dir, "gpu-a", own, others)
	endpoints := func() []admin.Endpoint { return server.Fleet().Pools[0].Endpoints }
	await(t, "gpu-a's number", func() bool { e := endpoints()[0]; return e.Known && e.KVUsage == 0.5 },
		func() any { return client.Stats() })
	await(t, "the refusal of gpu-b's endpoint", func() bool { return len(client.Stats().Refused) > 0 }, func() any { return client.Stats() })
	if refused := client.Stats().Refused; refused[0].Endpoint != others.String() || endpoints()[1].Known {
		t.Errorf("refused %+v; gpu-b's endpoint: %+v", refused, endpoints()[1])
	}
}

// serving runs serve in this process until the test ends.
func serving(t *testing.T, text string) *serve.Server {
	t.Helper()
	config, err := fleet.Parse("test", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	server, err := serve.New(serve.Options{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return server
}

// pushing runs an agent that calls itself node, has the certificate of gpu-a and
// says something of every endpoint five times a second, until the test ends.
func pushing(t *testing.T, server *serve.Server, dir, node string, endpoints ...netip.AddrPort) *push.Client {
	t.Helper()
	file := func(name string) string { return filepath.Join(dir, name) }
	client, err := push.NewClient(push.ClientOptions{
		Target: fleet.Address{Host: server.PushAddr()}, Node: node, Log: slog.New(slog.DiscardHandler),
		TLS: &push.ClientTLS{CA: file("ca.crt"), Certificate: file("gpu-a.crt"), Key: file("gpu-a.key"), ServerName: "fairlead"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() { _ = client.Run(ctx) })
	parts.Go(func() {
		ticker := time.NewTicker(200 * time.Millisecond)
		defer ticker.Stop()
		for {
			var frame push.Frame
			for _, e := range endpoints {
				now := time.Now()
				frame.Endpoints = append(frame.Endpoints, push.Update{Endpoint: e,
					Sample: telemetry.Sample{At: now, Changed: now, Known: telemetry.HasKVUsage, KVUsage: 0.5}})
			}
			client.Send(frame)
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
	t.Cleanup(func() { cancel(); parts.Wait() })
	return client
}

// await polls what has no event to wait for; state is shown when it does not
// come.
func await(t *testing.T, what string, ok func() bool, state func() any) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in 30 s: %+v", what, state())
		}
	}
}
