package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// call runs the command as main does.
func call(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code = run(t.Context(), args, stdio{&stdout, &stderr})
	return code, stdout.String(), stderr.String()
}

const quickstart = "../../examples/quickstart/fairlead.yaml"

func TestFaultsOfTheCallExitWith2AndSayWhatIsAccepted(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		says string
	}{
		{"unknown command", []string{"fly"}, `unknown command "fly"`},
		{"unknown flag", []string{"validate", "-z"}, "-z"},
		{"argument too many", []string{"schema", "x"}, `unexpected argument "x"`},
		{"unknown strategy", []string{"demo", "--strategy", "quantum"}, "accepted: legacy, dynamic"},
		{"fault of no server", []string{"demo", "--fault", "slow:h100-9"}, "accepted: h100-1"},
		{"too many sidecars", []string{"demo", "--sidecars", "65"}, "accepted: 1…64"},
		{"results of a comparison", []string{"demo", "--compare", "--results", "x.csv"}, "accepted: one of them"},
		{"no seeds", []string{"demo", "--compare", "--seeds", "0"}, "accepted: 1…100"},
		{"bad sidecars", []string{"demo", "--compare", "--compare-sidecars", "1,x"}, "accepted: numbers 1…64"},
		{"unknown fault", []string{"demo", "--fault", "boom:h100-1"}, "accepted:"},
		{"unknown format", []string{"demo", "-o", "xml"}, "accepted: text, json"},
		{"unknown group", []string{"bootstrap", "-f", quickstart, "--group", "nope"}, "accepted: [edge]"},
		{"bad listen", []string{"bootstrap", "-f", quickstart, "--listen", "here"}, "accepted: ip:port"},
		{"bad drain", []string{"envoy", "-f", quickstart, "--drain", "-1s"}, "accepted: 0 or more"},
		{"bad bootstrap format", []string{"bootstrap", "-f", quickstart, "-o", "toml"}, "accepted: yaml, json"},
		{"rollout without weights", []string{"rollout", "set", "chat"}, "accepted: get, set ROUTE POOL=WEIGHT"},
		{"rollout with a bad weight", []string{"rollout", "set", "-f", quickstart, "chat", "h100=-1"}, "whole number"},
		{"rollout with a pool twice", []string{"rollout", "set", "chat", "a=1", "a=2"}, "twice"},
		{"bad table format", []string{"fleet", "-f", quickstart, "-o", "csv"}, "accepted: table, json"},
		{"bad log level", []string{"serve", "-f", quickstart, "--log-level", "loud"}, "accepted: debug, info, warn, error"},
	} {
		code, _, errs := call(t, c.args...)
		if code != exitUsage || !strings.Contains(errs, c.says) {
			t.Errorf("%s: exit %d, %q; want exit 2 and %q", c.name, code, errs, c.says)
		}
	}
}

func TestValidateSaysWhatAFileHas(t *testing.T) {
	file := filepath.Join("..", "..", "examples", "limits", "fairlead.yaml")
	if code, out, errs := call(t, "validate", file); code != 0 || out != file+": ok: 1 groups, 1 pools, 2 routes, 1 limits\n" {
		t.Errorf("exit %d, %q, %q", code, out, errs)
	}
}

func TestMissingFileExitsWith1AndNamesIt(t *testing.T) {
	code, _, errs := call(t, "validate", "-f", "/nowhere/fairlead.yaml")
	if code != exitFailed || !strings.Contains(errs, "/nowhere/fairlead.yaml") {
		t.Errorf("exit %d, %q", code, errs)
	}
}

func TestUnknownScorerIsRefused(t *testing.T) {
	dir := t.TempDir()
	text, err := os.ReadFile(quickstart)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "fairlead.yaml")
	text = bytes.Replace(text, []byte("stateDir: .fairlead/quickstart"), []byte("stateDir: "+dir), 1)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, errs := call(t, "serve", "-f", file, "--scorer", "dice")
	if code == 0 || !strings.Contains(errs, "accepted: formula") {
		t.Errorf("exit %d, %q", code, errs)
	}
}

func TestHelpNamesEveryCommandAndTheReadmeDoesToo(t *testing.T) {
	code, out, _ := call(t, "help")
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if code != 0 {
		t.Errorf("help exits %d", code)
	}
	for _, c := range commands {
		if !strings.Contains(out, "  "+c.name+" ") {
			t.Errorf("help lacks %s", c.name)
		}
		if !strings.Contains(string(readme), "`fairlead "+c.name) {
			t.Errorf("README's table lacks fairlead %s", c.name)
		}
		if code, _, errs := call(t, c.name, "-h"); code != 0 || !strings.Contains(errs, "Usage: fairlead "+c.name) {
			t.Errorf("%s -h: exit %d, %q", c.name, code, errs)
		}
	}
	for _, m := range regexp.MustCompile("\\| `fairlead ([a-z-]+)").FindAllStringSubmatch(string(readme), -1) {
		found := false
		for _, c := range commands {
			found = found || c.name == m[1]
		}
		if !found {
			t.Errorf("README's table has fairlead %s, which does not exist", m[1])
		}
	}
}

func TestSchemaAndBootstrapPrintWhatTheyPromise(t *testing.T) {
	code, out, _ := call(t, "schema")
	if code != 0 || !json.Valid([]byte(out)) {
		t.Errorf("schema: exit %d, valid JSON: %v", code, json.Valid([]byte(out)))
	}
	code, out, _ = call(t, "bootstrap", "-f", quickstart, "-o", "json", "--node", "n1", "--listen", "127.0.0.1:7777")
	if code != 0 || !json.Valid([]byte(out)) || !strings.Contains(out, "127.0.0.1:7777") || !strings.Contains(out, `"n1"`) {
		t.Errorf("bootstrap: exit %d\n%s", code, out)
	}
}

func TestReadersSayWhenNobodyServes(t *testing.T) {
	address := envoytest.FreeAddr(t).String()
	for _, args := range [][]string{{"fleet", "--admin", address}, {"proxy-status", "--admin", address}, {"rollout", "get", "--admin", address}} {
		code, _, errs := call(t, args...)
		if code != exitFailed || !strings.Contains(errs, address) || !strings.Contains(errs, "is it running?") {
			t.Errorf("%v: exit %d, %q", args, code, errs)
		}
	}
}

func TestFlagsMayStandAnywhereAfterRollout(t *testing.T) {
	for _, args := range [][]string{
		{"rollout", "set", "-f", quickstart, "chat", "h100=1"},
		{"rollout", "set", "chat", "h100=1", "-f", quickstart},
		{"rollout", "-f", quickstart, "set", "chat", "h100=1"},
	} {
		if code, _, errs := call(t, args...); code != exitFailed || !strings.Contains(errs, "is it running?") {
			t.Errorf("%v: exit %d, %q", args, code, errs)
		}
	}
}

func TestReadersNeedOnlyTheAdminAddressOfTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "faulty.yaml")
	if err := os.WriteFile(file, []byte("serve: { admin: 127.0.0.1:1 }\nroutes: many\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := call(t, "fleet", "-f", file); code != exitFailed || !strings.Contains(errs, "127.0.0.1:1") || strings.Contains(errs, "routes") {
		t.Errorf("a faulty file: exit %d, %q", code, errs)
	}
	if code, _, errs := call(t, "fleet", "-f", "/nowhere.yaml"); code == 0 || !strings.Contains(errs, "--admin IP:PORT") {
		t.Errorf("no file: exit %d, %q", code, errs)
	}
}

// TestHelpSaysWhatAColumnMeans where its name alone could be taken for another thing.
func TestHelpSaysWhatAColumnMeans(t *testing.T) {
	for command, wants := range map[string][]string{
		"pools":   {"SHARE is how many requests an interactive client of weight 1", "a quarter"},
		"clients": {"EARLY", "x-stainless-retry-count", "look at WAITING", "not by client"},
	} {
		_, _, errs := call(t, command, "-h")
		for _, want := range wants {
			if !strings.Contains(strings.ReplaceAll(errs, "\n", " "), want) {
				t.Errorf("%s -h lacks %q:\n%s", command, want, errs)
			}
		}
	}
}

func TestTables(t *testing.T) {
	var out bytes.Buffer
	err := showFleet(&out, "table", admin.Fleet{Pools: []admin.Pool{{Name: "h100", Endpoints: []admin.Endpoint{
		{Name: "h100-1", Address: "10.0.0.1:80", Risk: 0.42, Known: true, State: "neutral", Share: 0.75, InFlight: 7, TelemetryAge: 0.21, Why: "none",
			HeaderMillis: -1, KVUsage: 0.375, Running: 12, Waiting: 0},
		{Name: "h100-2", Address: "10.0.0.2:80", State: "unknown", Why: "gate_held", Closed: true, ClosedFor: 53.7, Failing: true, TelemetryAge: -1, HeaderMillis: -1, KVUsage: -1, Running: -1, Waiting: -1},
		{Name: "h100-3", State: "preferred", Why: "none", Closed: true, ClosedFor: 1.23, TelemetryAge: -1, HeaderMillis: -1, KVUsage: -1, Running: -1, Waiting: -1},
	}}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0.42", "75.0 %", "210ms", "h100-2", "unknown"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("fleet table lacks %q:\n%s", want, out.String())
		}
	}
	lines := strings.Split(out.String(), "\n")
	for i, want := range []string{"0/0 - 0.38 12 0 210ms - none", "0/0 - - - - - - gate_held, closed 54s, failing", "0/0 - - - - - - closed 1.2s"} { // headers, KV, running, waiting, age, GPU, why
		if row := strings.Join(strings.Fields(lines[i+1]), " "); !strings.HasSuffix(row, want) {
			t.Errorf("fleet table, row %d: %q, want it to end with %q", i+1, row, want)
		}
	}
	out.Reset()
	err = showPools(&out, "table", admin.Fleet{Pools: []admin.Pool{
		{Name: "h100", Limit: 31.6, Clients: 3, Share: 10.5, Levels: []admin.Level{
			{Level: 3, InFlight: 2, Budget: 12}, {Level: 7, InFlight: 12, Budget: 12, QueueMillis: 250, Backlogged: true}}},
		{Name: "idle", Limit: 8, Share: -1, Levels: []admin.Level{{Level: 0, Budget: -1}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"h100 32 3 10.5 <256 2 12 0s", ">2048 12 12 250ms backlogged", "idle 8 0 - <10 0 - 0s"} {
		if row := strings.Join(strings.Fields(strings.Split(out.String(), "\n")[i+1]), " "); row != want {
			t.Errorf("pools table, row %d: %q, want %q", i+1, row, want)
		}
	}
	out.Reset()
	err = showClients(&out, "table", []admin.Caller{
		{Pool: "h100", Client: "sha256:00ff", Class: "interactive", InFlight: 30, Waiting: 12, Share: 7.5, Early: 3.6, Away: 12.4},
		{Pool: "h100", Client: "others", Class: "batch", InFlight: 1, Share: -1},
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"h100 sha256:00ff interactive 30 7.5 12 4 12.4s", "h100 others batch 1 - 0 0 -"} {
		if row := strings.Join(strings.Fields(strings.Split(out.String(), "\n")[i+1]), " "); row != want {
			t.Errorf("clients table, row %d: %q, want %q", i+1, row, want)
		}
	}
	out.Reset()
	if err := showClients(&out, "table", nil); err != nil || !strings.HasPrefix(out.String(), "No client has requests in flight") {
		t.Errorf("no clients: %v\n%s", err, out.String())
	}
	out.Reset()
	if err := showClients(&out, "json", []admin.Caller{}); err != nil || out.String() != "[]\n" {
		t.Errorf("no clients as JSON: %v\n%s", err, out.String())
	}
	out.Reset()
	since := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	err = showSplits(&out, "table", []admin.Split{{Route: "chat", ByHand: true, Since: since,
		File:      []admin.Weight{{Pool: "a", BasisPoints: 1000}, {Pool: "b", BasisPoints: 9000}},
		Effective: []admin.Weight{{Pool: "a", BasisPoints: 10_000}, {Pool: "b"}}}})
	if err != nil || !strings.Contains(out.String(), "a=100.00% b=0.00%") || !strings.Contains(out.String(), "2026-11-29T12:00:00Z") {
		t.Errorf("splits table: %v\n%s", err, out.String())
	}
	out.Reset()
	err = showProxies(&out, "table", []admin.Proxy{
		{Node: "n1", Group: "edge", Listen: "127.0.0.1:1", Reason: "no such group", Types: []admin.ProxyType{{Type: "LDS", State: "SYNCED"}}},
		{Node: "n2", Group: "edge", Listen: "127.0.0.1:1", Reason: "no such group"},
	})
	if err != nil || strings.Count(out.String(), "no such group") != 2 {
		t.Errorf("proxies of no group: %v\n%s", err, out.String())
	}
	out.Reset()
	err = showProxies(&out, "json", []admin.Proxy{{Node: "n1", Types: []admin.ProxyType{{Type: "LDS", State: "NACKED", Reason: "cannot bind"}}}})
	var back []admin.Proxy
	if err != nil || json.Unmarshal(out.Bytes(), &back) != nil || back[0].Types[0].Reason != "cannot bind" {
		t.Errorf("proxies as JSON: %v\n%s", err, out.String())
	}
}

func TestInterruptedBeforeItBegan(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	file := filepath.Join(t.TempDir(), "fleet.yaml")
	text := fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fleet
servers:
  - { name: one, listen: "%s", engine: { profile: llama-3.1-8b-h100 } }
  - { name: two, listen: "%s", engine: { profile: llama-3.1-8b-h100 } }
`, envoytest.FreeAddr(t), envoytest.FreeAddr(t))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	if code := run(ctx, []string{"sim", "-f", file}, stdio{&out, &errs}); code != 0 {
		t.Errorf("sim after an interrupt: exit %d, %s", code, errs.String())
	}
}
