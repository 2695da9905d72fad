package pypi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// versionTimeout bounds `program --version`. It takes some 50 ms on an idle
// machine; a first run of a 100 MB binary from a cold disk takes seconds.
const versionTimeout = 30 * time.Second

// CacheDir is the directory name under cache or, if that is "", under "fairlead"
// in the user's cache directory; "" if the user has none.
func CacheDir(cache, name string) (string, error) {
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", nil // no home directory: other ways to find a program may still work
		}
		cache = filepath.Join(user, "fairlead")
	}
	abs, err := filepath.Abs(cache)
	if err != nil {
		return "", fmt.Errorf("find the cache directory %q: %w", cache, err)
	}
	return filepath.Join(abs, name), nil
}

// LookPath finds an executable file on PATH, as getenv tells it.
func LookPath(getenv func(string) string, name string) (string, error) {
	for _, dir := range filepath.SplitList(getenv("PATH")) {
		if !filepath.IsAbs(dir) {
			continue // "." on PATH would run whatever lies in the working directory
		}
		path := filepath.Join(dir, name)
		if Executable(path) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no executable %s there", name)
}

// Executable says why a file cannot be run, or nil.
func Executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case os.IsNotExist(err):
		return fmt.Errorf("%s does not exist", path)
	case err != nil:
		return err
	case info.IsDir():
		return fmt.Errorf("%s is a directory", path)
	case info.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("%s is not executable (mode %s)", path, strings.TrimPrefix(info.Mode().Perm().String(), "-"))
	}
	return nil
}

// RunVersion runs a program with --version and returns what it says.
func RunVersion(ctx context.Context, path string) (string, error) {
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
	return ": " + Clip(strings.Join(lines, " | "), 400)
}

// Clip shortens a text to n bytes and an ellipsis.
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
