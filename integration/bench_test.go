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
		"| no ext_proc | 300 B |":                                                  2,
		"| stock ext_proc, empty answer | 300 B |":                                 2,
		"| Fairlead, headers only | 300 B |":                                       2,
		"| stock, access logs dropped elsewhere | 300 B |":                         2,
		"| Fairlead, headers only, access logs | 300 B |":                          2,
		"| stock, body fields | 300 B |":                                           2,
		"| Fairlead, body fields | 300 B |":                                        2,
		"| Fairlead, body fields, access logs | 300 B |":                           2,
		"| no ext_proc, 60 kB | 60000 B |":                                         1,
		"| stock, body fields, 60 kB | 60000 B |":                                  1,
		"| Fairlead, body fields, 60 kB | 60000 B |":                               1,
		"| CPU: Fairlead's full decision":                                          2,
		"| CPU: decision and all access-log handling":                              2,
		"| added p50: Fairlead, headers only":                                      2,
		"| added p50 with access logs":                                             2,
		"| added p50: Fairlead with access logs over the stock server with none |": 2,
		"| no ext_proc | ":                                                         3,
		"| Fairlead, headers only | ":                                              3,
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
	if t.Failed() {
		t.Logf("the table:\n%s", table)
	}
}
