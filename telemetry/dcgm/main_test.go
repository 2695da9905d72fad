//go:build dcgm && cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/internal/fakedcgm"
)

// withoutLibrary marks the process that must not find a libdcgm.
const withoutLibrary = "FAIRLEAD_TEST_WITHOUT_LIBDCGM"

// TestMain compiles the fake libdcgm and executes the test binary again with the
// library in its path: the loader reads the path at the start of a process only.
func TestMain(m *testing.M) {
	if os.Getenv(fakedcgm.ScriptVariable) != "" || os.Getenv(withoutLibrary) != "" {
		goleak.VerifyTestMain(m)
		return
	}
	code, err := again()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func again() (int, error) {
	dir, err := os.MkdirTemp("", "fakedcgm")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	lib, err := fakedcgm.Build(dir)
	if errors.Is(err, fakedcgm.ErrNoCompiler) && os.Getenv("CI") != "1" {
		fmt.Println("skipped:", err)
		return 0, nil
	}
	if err != nil {
		return 1, err
	}
	return run(fakedcgm.Env(lib, filepath.Join(dir, "script")), os.Args[1:]...)
}

// run executes this test binary with more environment variables.
func run(env []string, args ...string) (int, error) {
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), env...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}
