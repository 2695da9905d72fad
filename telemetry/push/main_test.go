package push

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine behind. Started as the server of
// the 1,000-node measurement it is that server instead.
func TestMain(m *testing.M) {
	if os.Getenv(measureEnv) != "" {
		os.Exit(serveMeasured())
	}
	goleak.VerifyTestMain(m)
}
