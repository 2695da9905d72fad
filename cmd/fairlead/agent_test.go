package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

func TestAgentNamesAllFaultsOfFileAndFlagsAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: fairlead/v1alpha1\nkind: Agent\nspeed: 9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, errs := call(t, "agent", "-f", file, "--dcgm", "there", "--server", "8000")
	if code != exitUsage {
		t.Errorf("exit %d, want 2", code)
	}
	for _, want := range []string{
		file + ":3: speed: found an unknown field; accepted: apiVersion, kind, node, push",
		`--dcgm: found "there"; accepted: off, embedded`,
		`--server: found "8000"; accepted: LISTEN or LISTEN=ADVERTISE`,
	} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q in\n%s", want, errs)
		}
	}
	if code, _, errs := call(t, "agent"); code != exitUsage || !strings.Contains(errs, "--push") || !strings.Contains(errs, "--server") {
		t.Errorf("without anything: exit %d, %s", code, errs)
	}
}

// page serves a model server's metrics page.
func page(t *testing.T) (address string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "vllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n")
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

func TestAgentCheckShowsWhatItWouldDo(t *testing.T) {
	address := page(t)
	code, out, errs := call(t, "agent", "--check", "--node", "gpu-a", "--push", "unix:/nowhere/push.sock", "--dcgm", "off", "--server", address+"=10.0.0.11:8000")
	if code != 0 {
		t.Fatalf("exit %d, %s", code, errs)
	}
	for _, want := range []string{"node    gpu-a", "push    unix:/nowhere/push.sock, plaintext, every 200ms", "dcgm    off", address, "10.0.0.11:8000", "/metrics ok"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestAgentCheckNamesAPageThatCannotBeRead(t *testing.T) {
	address := envoytest.FreeAddr(t).String()
	code, out, _ := call(t, "agent", "--check", "--push", "unix:/x", "--dcgm", "off", "--server", address)
	if code != 0 || !strings.Contains(out, "connection refused") {
		t.Errorf("exit %d\n%s", code, out)
	}
}

func TestAgentWithoutTLSFilesDoesNotStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "agent.yaml")
	text := `apiVersion: fairlead/v1alpha1
kind: Agent
push: { address: 10.0.0.1:9443, tls: { ca: /nowhere/ca.crt, certificate: /nowhere/agent.crt, key: /nowhere/agent.key } }
dcgm: { off: true }
servers: [ { listen: 127.0.0.1:8000 } ]
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := call(t, "agent", "-f", file); code != exitFailed || !strings.Contains(errs, "/nowhere/agent.crt") {
		t.Errorf("exit %d, %s", code, errs)
	}
}

func TestAgentRunsUntilInterrupted(t *testing.T) {
	address, status := page(t), envoytest.FreeAddr(t).String()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"agent", "--node", "gpu-a", "--push", "unix:" + t.TempDir() + "/push.sock", "--dcgm", "off", "--status", status, "--server", address}, stdio{&out, &errs})
	}()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		code, page := getPage("http://" + status + "/metrics")
		if code == http.StatusOK && strings.Contains(page, `fairlead_agent_source_age_seconds{server="`+address+`",source="engine"}`) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no age of the engine's page; status %d:\n%s", code, page)
		}
	}
	if code, body := getPage("http://" + status + "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "push: ") {
		t.Errorf("ready without serve: %d %s", code, body)
	}
	cancel()
	if code := <-ended; code != 0 {
		t.Errorf("exit %d: %s", code, errs.String())
	}
}

func getPage(url string) (code int, body string) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	_, _ = b.ReadFrom(resp.Body)
	return resp.StatusCode, b.String()
}
