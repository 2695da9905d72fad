package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// simulateArgs is a comparison of a second of CPU at most.
func simulateArgs(more ...string) []string {
	return append([]string{"simulate", "--arrivals", "poisson", "--gpus", "2", "--duration", "10s", "--seeds", "2", "--routers", "1,2"}, more...)
}

func TestSimulatePrintsATableAndWritesFiles(t *testing.T) {
	dir := t.TempDir()
	table, chart := filepath.Join(dir, "runs.csv"), filepath.Join(dir, "chart.png")
	status, out, errs := call(t, simulateArgs("--csv", table, "--png", chart)...)
	if status != 0 {
		t.Fatalf("status %d: %s", status, errs)
	}
	for _, want := range []string{"1 router\n", "2 routers\n", "round-robin", "ours-constant", "load 0.75", "lengths fitted to the Azure conversation trace"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in the table:\n%s", want, out)
		}
	}
	rows, err := os.ReadFile(table)
	if err != nil || bytes.Count(rows, []byte("\n")) != 1+2*2*9 {
		t.Errorf("%d lines of CSV, %v; want one for each of 9 policies, 2 numbers of routers and 2 seeds", bytes.Count(rows, []byte("\n")), err)
	}
	picture, err := os.ReadFile(chart)
	if err != nil || !bytes.HasPrefix(picture, []byte("\x89PNG")) {
		t.Errorf("no PNG: %v", err)
	}
}

func TestSimulateSpeaksJSON(t *testing.T) {
	status, out, errs := call(t, simulateArgs("--policies", "p2c,ours", "-o", "json")...)
	if status != 0 {
		t.Fatalf("status %d: %s", status, errs)
	}
	var got struct {
		Kind string `json:"kind"`
		Rows []struct {
			Policy string `json:"policy"`
			Slow   struct {
				Mean *float64 `json:"mean"`
			} `json:"share_over_slo"`
		} `json:"rows"`
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	if got.Kind != "simulation" || len(got.Rows) != 4 || got.Rows[1].Policy != "ours" || got.Rows[1].Slow.Mean == nil {
		t.Fatalf("got %+v", got)
	}
}

func TestSimulateRecords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "recording")
	status, out, errs := call(t, "simulate", "--record", dir, "--record-small", "--traces", t.TempDir())
	if status != 0 {
		t.Fatalf("status %d: %s", status, errs)
	}
	rows, err := os.Stat(filepath.Join(dir, "rows.f32"))
	if err != nil || rows.Size() == 0 || !strings.Contains(out, "from 5 runs") {
		t.Fatalf("%v; said %q", err, out)
	}
}

func TestSimulateRefusesFaultyFlags(t *testing.T) {
	notModel := filepath.Join(t.TempDir(), "model.json")
	if err := os.WriteFile(notModel, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"accepted: azure, mooncake, poisson":      {"--arrivals", "weekly"},
		"different numbers 1…4096":                {"--routers", "4,4"},
		"--seeds 0; accepted: 1…100":              {"--seeds", "0"},
		`found policy "best"; accepted:`:          {"--policies", "best"},
		"--record-small without --record":         {"--record-small"},
		"-o \"xml\"; accepted: text, json":        {"-o", "xml"},
		"no such file":                            {"--model", filepath.Join(t.TempDir(), "missing")},
		"model.json":                              {"--model", notModel},
		`found scenario "calm"; accepted: steady`: {"--scenario", "calm"},
		`found profile "tpu"; accepted:`:          {"--profile", "tpu"},
		"load -1; accepted: above 0":              {"--load", "-1"},
	} {
		if status, _, errs := call(t, simulateArgs(args...)...); status != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%v: status %d, %q; want %d with %q", args, status, errs, exitUsage, want)
		}
	}
}
