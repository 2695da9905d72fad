package envoyproc_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/internal/envoyproc"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

const adminOnly = `admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}`

// parentVar makes the test binary play a program that starts an Envoy.
const parentVar = "ENVOYPROC_TEST_PARENT"

func TestMain(m *testing.M) {
	if binary := os.Getenv(parentVar); binary != "" {
		playParent(binary)
		return
	}
	goleak.VerifyTestMain(m)
}

func playParent(binary string) {
	p, err := envoyproc.Start(context.Background(), envoyproc.Options{Binary: binary, Bootstrap: []byte(adminOnly)})
	fmt.Println(err)
	if err == nil {
		fmt.Println(p.PID())
	}
	time.Sleep(time.Hour)
}

func startEnvoy(t *testing.T, o envoyproc.Options) *envoyproc.Process {
	t.Helper()
	o.Binary = envoytest.Binary(t)
	if o.Bootstrap == nil {
		o.Bootstrap = []byte(adminOnly)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	p, err := envoyproc.Start(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		<-p.Done()
	})
	return p
}

func TestStartedEnvoyHasItsBootstrapAndStopsOnSIGTERM(t *testing.T) {
	dir := envoytest.ShortTempDir(t)
	admin := filepath.Join(dir, "admin")
	p := startEnvoy(t, envoyproc.Options{Dir: dir, AdminAddressPath: admin, DrainTime: 1500 * time.Millisecond})
	address, err := os.ReadFile(admin)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.Get("http://" + string(address) + "/server_info")
	if err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	_, _ = page.ReadFrom(answer.Body)
	answer.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	for _, want := range []string{`"concurrency": 1`, `"drain_time": "2s"`, `"disable_hot_restart": true`} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("server_info lacks %s:\n%s", want, page.String())
		}
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Errorf("stop: %v", err)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("wait after SIGTERM: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "envoy-*")); len(left) > 0 {
		t.Errorf("bootstrap left behind: %v", left)
	}
	if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal after the end: %v, want ErrProcessDone", err)
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Errorf("second stop: %v", err)
	}
}

func TestRefusedBootstrapIsAnErrorWithEnvoysWords(t *testing.T) {
	_, err := envoyproc.Start(t.Context(), envoyproc.Options{
		Binary:    envoytest.Binary(t),
		Bootstrap: []byte(`static_resources: {clusters: [{name: pool, connect_timeout: soon}]}`),
	})
	if err == nil || !strings.Contains(err.Error(), "connect_timeout") || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("got %v, want an error that names connect_timeout and the exit status", err)
	}
}

func TestMissingBinaryIsAnError(t *testing.T) {
	for _, binary := range []string{"", "/does/not/exist"} {
		if _, err := envoyproc.Start(t.Context(), envoyproc.Options{Binary: binary}); err == nil {
			t.Errorf("binary %q: no error", binary)
		}
	}
}

func TestStartGivesUpWhenItsContextEnds(t *testing.T) {
	// A program that never logs Envoy's running line.
	script := filepath.Join(t.TempDir(), "silent")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho waiting\nexec sleep 60\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := envoyproc.Start(ctx, envoyproc.Options{Binary: script})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting") {
		t.Errorf("got %v, want the deadline and what was printed", err)
	}
}

func TestStopKillsAnEnvoyThatDoesNotEnd(t *testing.T) {
	p := startEnvoy(t, envoyproc.Options{})
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); err == nil {
		t.Error("stop of a stopped process: no error, want one that says it was killed")
	}
	if err := p.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("wait: %v, want the signal", err)
	}
}

func TestCPUIsKnownWhileRunningAndAfter(t *testing.T) {
	p := startEnvoy(t, envoyproc.Options{})
	user, system, err := p.CPU()
	if runtime.GOOS == "linux" && (err != nil || user+system <= 0) {
		t.Errorf("running: %v %v %v, want some time used by the start", user, system, err)
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	user, system, err = p.CPU()
	if err != nil || user+system <= 0 {
		t.Errorf("ended: %v %v %v", user, system, err)
	}
}

func TestEnvoyHasItsOwnProcessGroup(t *testing.T) {
	p := startEnvoy(t, envoyproc.Options{})
	group, err := syscall.Getpgid(p.PID())
	if err != nil || group != p.PID() {
		t.Errorf("process group %d (%v), want its own, %d", group, err, p.PID())
	}
}

func TestEnvoyDiesWithItsParent(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has a parent-death signal")
	}
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentVar+"="+envoytest.Binary(t))
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	if lines.Text() != "<nil>" {
		t.Fatalf("parent could not start envoy: %s", lines.Text())
	}
	lines.Scan()
	var pid int
	if _, err := fmt.Sscan(lines.Text(), &pid); err != nil {
		t.Fatal(err)
	}
	_ = parent.Process.Kill()
	_ = parent.Wait()
	envoytest.Eventually(t, "end of the orphan", func() bool { return !running(pid) })
}

// running is false for a process that is gone or waits to be reaped.
func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(stat, []byte(") Z "))
}
