package integration

import (
	"os"
	"os/exec"
	"testing"
)

// TestOfficialClientsObeyRefusals runs the module in sdks, in which the official
// Go clients of OpenAI and Anthropic talk to a real Envoy with Fairlead behind.
func TestOfficialClientsObeyRefusals(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "./...")
	cmd.Dir = "sdks"
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
