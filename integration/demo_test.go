package integration

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/internal/demo"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
	"github.com/fairlead-proxy/fairlead/scorer/xgb"
)

// checkDemo reads the demo's JSON lines: one object per second, one summary.
func checkDemo(t *testing.T, out string) {
	t.Helper()
	var seconds []demo.Second
	var summaries []demo.Summary
	lines := bufio.NewScanner(strings.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var kind struct{ Kind string }
		if err := json.Unmarshal(lines.Bytes(), &kind); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		switch kind.Kind {
		default:
			t.Errorf("neither a second nor a summary: %s", lines.Text())
		case "second":
			var s demo.Second
			if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
				t.Fatal(err)
			}
			seconds = append(seconds, s)
		case "summary":
			var s demo.Summary
			if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
				t.Fatal(err)
			}
			summaries = append(summaries, s)
		}
	}
	if len(seconds) < 5 || len(summaries) != 1 {
		t.Fatalf("%d seconds and %d summaries in:\n%s", len(seconds), len(summaries), out)
	}
	rows := seconds[4].Rows
	if len(rows) != 10 {
		t.Errorf("%d rows, want 2 pools and 8 endpoints", len(rows))
	}
	served := map[string]bool{}
	for _, s := range seconds {
		for _, r := range s.Rows {
			if r.Endpoint != "" && r.RPS > 0 {
				served[r.Pool] = true
			}
		}
	}
	if !served["h100"] || !served["a100"] {
		t.Errorf("pools that served: %v", served)
	}
	for _, r := range rows {
		if r.Risk == nil {
			t.Errorf("no risk for %s %s after 5 s", r.Pool, r.Endpoint)
		}
	}
	s := summaries[0]
	if s.Answers < 80 || s.Errors != 0 || s.P50 <= 0 || len(s.CPU) != 3 || len(s.Utilisation) != 2 {
		t.Errorf("summary: %+v", s)
	}
}

// processesWith lists the processes whose command line names dir.
func processesWith(dir string) []string {
	var out []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(line), dir) {
			out = append(out, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return out
}

// TestDemoShowsTheTrainedModelsRisk runs the demo with the model that comes with
// the program: every endpoint that is known shows a risk, and the
// table says whose it is.
func TestDemoShowsTheTrainedModelsRisk(t *testing.T) {
	envoytest.Binary(t)
	shipped, err := xgb.Shipped()
	if err != nil {
		t.Fatal(err)
	}
	out := runFairlead(t, t.TempDir(), "demo", "--scorer", "xgb", "--duration", "4s", "--sidecars", "1", "--rps", "20", "-o", "json")
	risks := map[float64]bool{}
	for line := range strings.Lines(out) {
		var s demo.Second
		if err := json.Unmarshal([]byte(line), &s); err != nil || s.Kind != "second" {
			continue
		}
		if s.Scorer != "xgb" || !strings.HasPrefix(shipped.Info().Digest, s.Model) || s.Model == "" {
			t.Fatalf("scorer %q, model %q", s.Scorer, s.Model)
		}
		for _, r := range s.Rows {
			if r.Endpoint != "" && r.Risk != nil {
				risks[*r.Risk] = true
			}
		}
	}
	if len(risks) < 4 {
		t.Errorf("risks shown: %v; want the model's, which differ", risks)
	}
}
