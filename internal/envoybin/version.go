package envoybin

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Oldest version accepted: Fairlead's configurations use filters and fields
// that Envoy 1.40 brought.
const (
	minMajor = 1
	minMinor = 40
)

// versionTimeout bounds `envoy --version`. It takes some 50 ms on an idle
// machine; a first run of a 100 MB binary from a cold disk takes seconds.
const versionTimeout = 30 * time.Second

// version is what an Envoy says about itself.
type version struct {
	major, minor, patch int
	// suffix is what follows the numbers, "-dev" for instance.
	suffix string
}

func (v version) String() string {
	return fmt.Sprintf("%d.%d.%d%s", v.major, v.minor, v.patch, v.suffix)
}

// supported says whether Fairlead can run with this Envoy. A development build
// of the oldest version was made before it, and is too old.
func (v version) supported() bool {
	if v.major != minMajor {
		return v.major > minMajor
	}
	if v.minor == minMinor && v.patch == 0 && v.suffix == "-dev" {
		return false
	}
	return v.minor >= minMinor
}

// versionLine finds the numbers in a line such as
// "envoy  version: 2c4b…/1.40.0/Clean/RELEASE/BoringSSL".
var versionLine = regexp.MustCompile(`version: [^/\s]*/(\d{1,6})\.(\d{1,6})\.(\d{1,6})([-+.][^/\s]*)?/`)

// parseVersion reads the output of `envoy --version`.
func parseVersion(output string) (version, error) {
	m := versionLine.FindStringSubmatch(output)
	if m == nil {
		return version{}, fmt.Errorf("found %q where a line such as %q was expected",
			clip(strings.TrimSpace(output), 200), "envoy version: <commit>/1.40.0/Clean/RELEASE/BoringSSL")
	}
	var v version
	v.major, _ = strconv.Atoi(m[1]) // at most six digits: cannot fail
	v.minor, _ = strconv.Atoi(m[2])
	v.patch, _ = strconv.Atoi(m[3])
	v.suffix = m[4]
	return v, nil
}

// check runs the binary with --version and returns its version, or why it
// cannot be used.
func check(ctx context.Context, path string) (version, error) {
	out, err := runVersion(ctx, path)
	if err != nil {
		return version{}, err
	}
	v, err := parseVersion(out)
	if err != nil {
		return version{}, fmt.Errorf("%s --version: %w", path, err)
	}
	if !v.supported() {
		return version{}, fmt.Errorf("%s is Envoy %s; accepted: %d.%d or newer", path, v, minMajor, minMinor)
	}
	return v, nil
}

func runVersion(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	for try := 0; ; try++ {
		cmd := exec.CommandContext(ctx, path, "--version")
		cmd.WaitDelay = time.Second
		out, err := cmd.CombinedOutput()
		// A process forked elsewhere in this program may, for a moment, hold
		// the just-written file open for writing.
		if errors.Is(err, syscall.ETXTBSY) && try < 50 {
			if waitErr := wait(ctx, 20*time.Millisecond); waitErr != nil {
				return "", waitErr
			}
			continue
		}
		if err != nil {
			return "", fmt.Errorf("run %s --version: %w%s", path, err, quoteTail(string(out)))
		}
		return string(out), nil
	}
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// quoteTail returns ": " and the last part of a program's output, or "".
func quoteTail(out string) string {
	out = strings.TrimSpace(out)
	if out == "" {
		return ""
	}
	lines := strings.Split(out, "\n")
	if len(lines) > 3 {
		lines = lines[len(lines)-3:]
	}
	return ": " + clip(strings.Join(lines, " | "), 400)
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
