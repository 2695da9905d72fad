package envoybin

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/fairlead-proxy/fairlead/internal/pypi"
)

// Oldest version accepted: Fairlead's configurations use filters and fields
// that Envoy 1.40 brought.
const (
	minMajor = 1
	minMinor = 40
)

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
			pypi.Clip(strings.TrimSpace(output), 200), "envoy version: <commit>/1.40.0/Clean/RELEASE/BoringSSL")
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
	out, err := pypi.RunVersion(ctx, path)
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
