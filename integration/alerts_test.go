package integration

import (
	"os"
	"os/exec"
	"testing"
)

// TestAlertRulesInPrometheus runs the module in alerts, which holds every alert
// rule against Prometheus's own engine. It fetches that engine's modules.
func TestAlertRulesInPrometheus(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "./...")
	cmd.Dir = "alerts"
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
