package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// inBench runs a go command in the module of the benchmarks and returns what it
// printed to standard output.
func inBench(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = "bench"
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("go %s: %v\n%s%s", strings.Join(args, " "), err, out.String(), errs.String())
	}
	return out.String()
}

func TestBenchmarksOwnTests(t *testing.T) { inBench(t, "test", "-count=1", "./...") }

// TestBenchmarksRun runs every piece of the benchmarks for a moment, so that the
// command in docs/benchmarks.md keeps working; the numbers mean nothing here. The
// scheduler that decisions are compared with takes minutes to compile: it is part
// of CI alone.
func TestBenchmarksRun(t *testing.T) {
	peer := os.Getenv("CI") != ""
	table := inBench(t, "run", ".", "-short", fmt.Sprintf("-peer=%t", peer))
	// How often each row stands in the table, by how it begins.
	rows := map[string]int{
		"| no ext_proc | 300 B | 200 | 1 of 1 |":                                                       1,
		"| no ext_proc | 300 B | 400 | 1 of 1 |":                                                       1,
		"| stock ext_proc, empty answer | 300 B | 200 | 1 of 1 |":                                      1,
		"| stock ext_proc, empty answer | 300 B | 400 | 1 of 1 |":                                      1,
		"| stock, GC tuned | 300 B | 200 | 1 of 1 |":                                                   1,
		"| stock, GC tuned | 300 B | 400 | 1 of 1 |":                                                   1,
		"| Fairlead, headers only | 300 B | 200 | 1 of 1 |":                                            1,
		"| Fairlead, headers only | 300 B | 400 | 1 of 1 |":                                            1,
		"| stock, access logs dropped elsewhere | 300 B | 200 | 1 of 1 |":                              1,
		"| stock, access logs dropped elsewhere | 300 B | 400 | 1 of 1 |":                              1,
		"| stock, GC tuned, access logs dropped elsewhere | 300 B | 200 | 1 of 1 |":                    1,
		"| stock, GC tuned, access logs dropped elsewhere | 300 B | 400 | 1 of 1 |":                    1,
		"| Fairlead, headers only, access logs | 300 B | 200 | 1 of 1 |":                               1,
		"| Fairlead, headers only, access logs | 300 B | 400 | 1 of 1 |":                               1,
		"| stock, body fields | 300 B | 200 | 1 of 1 |":                                                1,
		"| stock, body fields | 300 B | 400 | 1 of 1 |":                                                1,
		"| Fairlead, body fields | 300 B | 200 | 1 of 1 |":                                             1,
		"| Fairlead, body fields | 300 B | 400 | 1 of 1 |":                                             1,
		"| Fairlead, body fields, access logs | 300 B | 200 | 1 of 1 |":                                1,
		"| Fairlead, body fields, access logs | 300 B | 400 | 1 of 1 |":                                1,
		"| no ext_proc, 60 kB | 60000 B | 200 | 1 of 1 |":                                              1,
		"| stock, body fields, 60 kB | 60000 B | 200 | 1 of 1 |":                                       1,
		"| Fairlead, body fields, 60 kB | 60000 B | 200 | 1 of 1 |":                                    1,
		"| CPU: full decision, headers only, over the stock server | ":                                 2,
		"| CPU: full decision, headers only, over the stock server, GC tuned | ":                       2,
		"| CPU: decision and all access-log handling, over the stock server, which handles no logs | ": 2,
		"| CPU: decision and all access-log handling, over the stock server, GC tuned | ":              2,
		"| added p50: headers only, over the stock server | ":                                          2,
		"| added p50: headers only, over the stock server, GC tuned | ":                                2,
		"| added p50: with access logs, over the stock server, Envoy logging in both | ":               2,
		"| added p50: with access logs, over the stock server with none | ":                            2,
		"| no ext_proc | ":            3,
		"| Fairlead, headers only | ": 3,
	}
	if peer {
		for _, n := range []int{5, 25, 100, 500} {
			rows[fmt.Sprintf("| %d | ", n)] = 1
		}
	}
	for row, want := range rows {
		got := 0
		for line := range strings.Lines(table) {
			if strings.HasPrefix(line, row) {
				got++
			}
		}
		if got != want {
			t.Errorf("%d rows begin with %q, want %d", got, row, want)
		}
	}
	// One round of moments proves nothing, and the table says so.
	for _, verdict := range []string{"| held |", "missed", "NaN"} {
		if strings.Contains(strings.ReplaceAll(table, "A bar is missed", ""), verdict) {
			t.Errorf("the table of one round says %q", verdict)
		}
	}
	if t.Failed() {
		t.Logf("the table:\n%s", table)
	}
}
