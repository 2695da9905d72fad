package integration

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// copyExample copies an example's files into a folder of the test's own and
// gives every loopback port another, free one, the same in all files.
func copyExample(t *testing.T, name string) (dir string, port func(string) string) {
	t.Helper()
	dir = envoytest.ShortTempDir(t)
	ports := map[string]string{}
	port = func(old string) string {
		if ports[old] == "" {
			ports[old] = fmt.Sprint(envoytest.FreePort(t))
		}
		return ports[old]
	}
	loopback := regexp.MustCompile(`127\.0\.0\.1:(\d+)`)
	for _, file := range []string{"fairlead.yaml", "fleet.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", "examples", name, file))
		if err != nil {
			t.Fatal(err)
		}
		text = loopback.ReplaceAllFunc(text, func(m []byte) []byte {
			return []byte("127.0.0.1:" + port(strings.TrimPrefix(string(m), "127.0.0.1:")))
		})
		if err := os.WriteFile(filepath.Join(dir, file), spreadPools(t, name, text, port), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, port
}

// spreadPools turns the fleet file's pools, which take ports in a row, into
// servers with the ports that the config got.
func spreadPools(t *testing.T, name string, text []byte, port func(string) string) []byte {
	t.Helper()
	pool := regexp.MustCompile(`(?m)^  - name: (\S+)\n    count: (\d+)\n    listen: 127\.0\.0\.1:(\d+)\n((?:    .*\n?)*)`)
	if !pool.Match(text) {
		return text
	}
	first := map[string]int{"h100": 18101, "a100": 18201, "blue": 18311, "green": 18321}
	if name == "limits" {
		first = map[string]int{"h100": 18321}
	}
	out := pool.ReplaceAllStringFunc(string(text), func(m string) string {
		g := pool.FindStringSubmatch(m)
		var servers strings.Builder
		n := 0
		if _, err := fmt.Sscan(g[2], &n); err != nil || first[g[1]] == 0 {
			t.Fatalf("pool %q of a fleet file", g[1])
		}
		for i := range n {
			fmt.Fprintf(&servers, "  - name: %s-%d\n    listen: 127.0.0.1:%s\n%s", g[1], i+1, port(fmt.Sprint(first[g[1]]+i)), g[4])
		}
		return servers.String()
	})
	return []byte(strings.Replace(out, "\npools:\n", "\nservers:\n", 1))
}

// readmeCommands returns the `go run ./cmd/fairlead …` lines of an example's
// README, without that prefix.
func readmeCommands(t *testing.T, name, verb string) [][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "examples", name, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	var out [][]string
	for _, line := range strings.Split(string(text), "\n") {
		words, ok := strings.CutPrefix(strings.TrimSpace(line), "go run ./cmd/fairlead ")
		if ok && strings.HasPrefix(words, verb+" ") {
			out = append(out, strings.Fields(strings.ReplaceAll(words, "examples/"+name+"/", "")))
		}
	}
	if len(out) == 0 {
		t.Fatalf("README of %s has no %q command", name, verb)
	}
	return out
}

// TestQuickstartAsItsReadmeSays starts sim, serve and Envoy as three processes
// with the README's own commands and uses them as the README does.
func TestQuickstartAsItsReadmeSays(t *testing.T) {
	envoytest.Binary(t)
	dir, port := copyExample(t, "quickstart")
	for _, verb := range []string{"sim", "serve", "envoy"} {
		for _, args := range readmeCommands(t, "quickstart", verb) {
			startFairlead(t, dir, args...)
		}
		if verb == "serve" {
			waitListening(t, "127.0.0.1:"+port("9900"))
		}
	}
	listen := "127.0.0.1:" + port("10000")
	waitListening(t, listen)
	body := `{"model":"llama-3.1-8b","max_tokens":32,"messages":[{"role":"user","content":"hello"}]}`
	envoytest.Eventually(t, "a steered answer", func() bool {
		status, header, text, err := tryPost("http://"+listen+"/v1/chat/completions", body)
		return err == nil && status == http.StatusOK && header.Get("X-Route-Strategy") == "dynamic" && strings.Contains(text, `"choices"`)
	})
	status, _, text, err := tryPost("http://"+listen+"/v1/messages", body, "anthropic-version", "2023-06-01")
	if err != nil || status != http.StatusOK || !strings.Contains(text, `"stop_reason"`) {
		t.Errorf("Anthropic API: status %d, %v, %s", status, err, text)
	}
	envoytest.Eventually(t, "risk of all eight endpoints in `fairlead fleet`", func() bool {
		out := runFairlead(t, dir, readmeCommands(t, "quickstart", "fleet")[0]...)
		return strings.Count(out, "100-") == 8 && !strings.Contains(out, " -  unknown")
	})
	if out := runFairlead(t, dir, readmeCommands(t, "quickstart", "proxy-status")[0]...); strings.Count(out, "SYNCED") != 5 {
		t.Errorf("proxy-status:\n%s", out)
	}
	if out := runFairlead(t, dir, readmeCommands(t, "quickstart", "rollout")[0]...); !strings.Contains(out, "h100=0.00% a100=100.00%") {
		t.Errorf("rollout set:\n%s", out)
	}
}

// TestSidecarExampleAsItsReadmeSays starts two Envoys of one group, each with
// its own bootstrap; one weight change reaches both.
func TestSidecarExampleAsItsReadmeSays(t *testing.T) {
	envoytest.Binary(t)
	dir, port := copyExample(t, "sidecar")
	for _, verb := range []string{"sim", "serve", "envoy"} {
		for _, args := range readmeCommands(t, "sidecar", verb) {
			for i, arg := range args {
				if arg == "127.0.0.1:10011" {
					args[i] = "127.0.0.1:" + port("10011")
				}
			}
			startFairlead(t, dir, args...)
		}
		if verb == "serve" {
			waitListening(t, "127.0.0.1:"+port("9910"))
		}
	}
	for _, old := range []string{"10010", "10011"} {
		listen := "127.0.0.1:" + port(old)
		waitListening(t, listen)
		envoytest.Eventually(t, "an answer on "+listen, func() bool {
			status, _, _, err := tryPost("http://"+listen+"/v1/chat/completions", `{"model":"llama-3.1-8b","max_tokens":8,"messages":[{"role":"user","content":"hello"}]}`)
			return err == nil && status == http.StatusOK
		})
	}
	out := runFairlead(t, dir, readmeCommands(t, "sidecar", "rollout")[0]...)
	if !strings.Contains(out, "green=50.00% blue=50.00%") {
		t.Errorf("rollout set:\n%s", out)
	}
	client := admin.NewClient("127.0.0.1:" + port("9910"))
	envoytest.Eventually(t, "both sidecars synced", func() bool {
		proxies, err := client.Proxies(t.Context())
		if err != nil || len(proxies) != 2 {
			return false
		}
		for _, p := range proxies {
			for _, typ := range p.Types {
				if typ.State != "SYNCED" {
					return false
				}
			}
		}
		return true
	})
}

// TestLimitsExampleAsItsReadmeSays asks as the README does, by the config's
// callers.
func TestLimitsExampleAsItsReadmeSays(t *testing.T) {
	envoytest.Binary(t)
	dir, port := copyExample(t, "limits")
	for _, verb := range []string{"sim", "serve", "envoy"} {
		for _, args := range readmeCommands(t, "limits", verb) {
			startFairlead(t, dir, args...)
		}
		if verb == "serve" {
			waitListening(t, "127.0.0.1:"+port("9920"))
		}
	}
	url := "http://127.0.0.1:" + port("10020") + "/v1/chat/completions"
	waitListening(t, "127.0.0.1:"+port("10020"))
	ask := func(who string, tokens int) (int, http.Header, string) {
		status, header, text, err := tryPost(url, fmt.Sprintf(`{"model":"llama-3.1-8b","max_tokens":%d,"messages":[{"role":"user","content":"hello"}]}`, tokens), "authorization", who)
		if err != nil {
			t.Fatal(err)
		}
		return status, header, text
	}
	envoytest.Eventually(t, "a steered answer", func() bool {
		status, header, _ := ask("Bearer team-a", 8)
		return status == http.StatusOK && header.Get("X-Route-Strategy") == "dynamic"
	})
	// Seven within a minute, unless a new one begins in between.
	statuses := map[int]int{}
	for range 12 {
		status, header, text := ask("Bearer somebody", 8)
		statuses[status]++
		switch {
		case header.Get("X-Ratelimit-Limit") != "5, 5;w=60" && header.Get("X-Ratelimit-Limit") != "5":
			t.Errorf("x-ratelimit-limit is %q", header.Get("X-Ratelimit-Limit"))
		case status == http.StatusTooManyRequests && (header.Get("Retry-After-Ms") == "" || !strings.Contains(text, "rate_limit_exceeded")):
			t.Errorf("429 without its fields: %v %s", header, text)
		}
	}
	if statuses[http.StatusOK] < 5 || statuses[http.StatusOK] > 10 || statuses[http.StatusOK]+statuses[http.StatusTooManyRequests] != 12 {
		t.Errorf("answers by status: %v, want 5 (10 over the turn of a minute) of 12 admitted", statuses)
	}
	if status, _, text := ask("Bearer team-a", 9000); status != http.StatusBadRequest || !strings.Contains(text, "4096") {
		t.Errorf("9000 tokens: %d %s, want 400 with what fits", status, text)
	}
	if out := runFairlead(t, dir, readmeCommands(t, "limits", "pools")[0]...); !strings.Contains(out, "h100") || !strings.Contains(out, "<=2048") {
		t.Errorf("pools:\n%s", out)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(
		`{"model":"llama-3.1-8b","max_tokens":2000,"ignore_eos":true,"stream":true,"messages":[{"role":"user","content":"hello"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer team-a")
	request.Header.Set("Content-Type", "application/json")
	stream, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	out := runFairlead(t, dir, readmeCommands(t, "limits", "clients")[0]...)
	_ = stream.Body.Close()
	if !strings.Contains(out, "IN FLIGHT") || !strings.Contains(out, "sha256:52d361d570ff5083f508dc82eb1183e7 ") {
		t.Errorf("clients while one has a stream:\n%s", out)
	}
	envoytest.Eventually(t, "nobody is there", func() bool {
		return strings.HasPrefix(runFairlead(t, dir, readmeCommands(t, "limits", "clients")[0]...), "No client has requests in flight")
	})
}
