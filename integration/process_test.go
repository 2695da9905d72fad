package integration

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// fairleadBinary builds the command once for all tests of this package.
var binaryBuilt atomic.Bool

var fairleadBinary = sync.OnceValues(func() (string, error) {
	binaryBuilt.Store(true)
	dir, err := os.MkdirTemp("", "flbin")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "fairlead")
	out, err := exec.Command("go", "build", "-o", path, "../cmd/fairlead").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// removeBinary deletes what fairleadBinary built; TestMain calls it.
func removeBinary() {
	if !binaryBuilt.Load() {
		return
	}
	if path, err := fairleadBinary(); err == nil {
		_ = os.RemoveAll(filepath.Dir(path))
	}
}

// client opens a connection for each request, so that no idle one outlives a
// test and every request meets the listener anew.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}, Timeout: time.Minute}

// fairleadProcess is a running `fairlead` with what it printed.
type fairleadProcess struct {
	t    testing.TB
	cmd  *exec.Cmd
	out  *lockedText
	done chan struct{}
}

type lockedText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startFairlead starts the command in dir; it is killed at the end of the test
// and its output shown if the test failed.
func startFairlead(t testing.TB, dir string, args ...string) *fairleadProcess {
	t.Helper()
	binary, err := fairleadBinary()
	if err != nil {
		t.Fatal(err)
	}
	return startBinary(t, binary, dir, nil, args...)
}

// startBinary is startFairlead with another build of the command, and variables
// beside this process's own.
func startBinary(t testing.TB, binary, dir string, env []string, args ...string) *fairleadProcess {
	t.Helper()
	p := &fairleadProcess{t: t, cmd: exec.Command(binary, args...), out: &lockedText{}, done: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, p.out, p.out
	p.cmd.Env = append(os.Environ(), env...)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("output of fairlead %s:\n%s", strings.Join(args, " "), p.out)
		}
	})
	return p
}

// kill ends the process without warning and waits for its end.
func (p *fairleadProcess) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// interrupt asks the process to end, as Ctrl-C does, and waits.
func (p *fairleadProcess) interrupt() {
	p.t.Helper()
	_ = p.cmd.Process.Signal(os.Interrupt)
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		p.t.Error("process did not end within 20 s of an interrupt")
		p.kill()
	}
}

// freeze stops the process without ending it; thaw lets it run again.
func (p *fairleadProcess) freeze() { _ = p.cmd.Process.Signal(syscall.SIGSTOP) }
func (p *fairleadProcess) thaw()   { _ = p.cmd.Process.Signal(syscall.SIGCONT) }

// runFairlead runs the command to its end and returns what it printed to
// standard output.
func runFairlead(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, code := tryFairlead(t, dir, args...)
	if code != 0 {
		t.Fatalf("fairlead %s: exit %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

// tryFairlead returns both outputs (if it failed) or standard output alone.
func tryFairlead(t *testing.T, dir string, args ...string) (string, int) {
	t.Helper()
	binary, err := fairleadBinary()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	var out, errs bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &errs
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return out.String() + errs.String(), cmd.ProcessState.ExitCode()
	}
	return out.String(), 0
}

// place is a folder with a config, and the addresses in it.
type place struct {
	dir    string
	config *fleet.Config
	client *admin.Client
	file   string
}

// newPlace writes a config whose serve: part listens on sockets of its own; body
// is the rest of the file.
func newPlace(t *testing.T, body string) *place {
	t.Helper()
	p := &place{dir: envoytest.ShortTempDir(t)}
	p.file = filepath.Join(p.dir, "fairlead.yaml")
	p.write(t, fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
serve:
  xds: unix:%[1]s/xds
  extproc: unix:%[1]s/ep
  accessLog: unix:%[1]s/als
  admin: %[2]s
  stateDir: %[1]s/state
`, p.dir, envoytest.FreeAddr(t)), body)
	return p
}

// write replaces the config file by rename, as an editor does.
func (p *place) write(t *testing.T, head, body string) {
	t.Helper()
	if head == "" {
		old, err := os.ReadFile(p.file)
		if err != nil {
			t.Fatal(err)
		}
		head, _, _ = strings.Cut(string(old), "groups:")
	}
	next := p.file + ".next"
	if err := os.WriteFile(next, []byte(head+strings.TrimLeft(body, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, p.file); err != nil {
		t.Fatal(err)
	}
	cfg, err := fleet.Load(p.file)
	if err != nil {
		return // a test of a faulty file
	}
	p.config = cfg
	p.client = admin.NewClient(cfg.Serve.Admin.Target())
}

// serve starts `fairlead serve` and waits until it is ready.
func (p *place) serve(t *testing.T) *fairleadProcess {
	t.Helper()
	process := startFairlead(t, p.dir, "serve", "-f", p.file, "--log-level", "debug")
	p.waitReady(t, process)
	return process
}

func (p *place) waitReady(t testing.TB, process *fairleadProcess) {
	t.Helper()
	url := "http://" + p.config.Serve.Admin.Target() + "/readyz"
	envoytest.Eventually(t, "serve to be ready", func() bool {
		select {
		case <-process.done:
			t.Fatalf("serve ended:\n%s", process.out)
		default:
		}
		response, err := client.Get(url)
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// sidecar starts a real Envoy from the bootstrap that `fairlead bootstrap`
// prints, and returns it with its listening address once that answers.
func (p *place) sidecar(t *testing.T, args ...string) (*envoytest.Envoy, string) {
	t.Helper()
	listen := envoytest.FreeAddr(t).String()
	admin := filepath.Join(p.dir, "a"+listen[strings.LastIndexByte(listen, ':')+1:])
	file := runFairlead(t, p.dir, append([]string{"bootstrap", "-f", p.file, "--listen", listen, "--admin", "unix:" + admin}, args...)...)
	e := envoytest.Start(t, []byte(file))
	waitListening(t, listen)
	return e, listen
}

func waitListening(t *testing.T, address string) {
	t.Helper()
	envoytest.Eventually(t, "a listener on "+address, func() bool {
		c, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			return false
		}
		_ = c.Close()
		return true
	})
}

// pools renders pools in YAML: name → addresses, in the order given.
func poolYAML(name string, extra string, addresses ...netip.AddrPort) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  - name: %s\n", name)
	for _, line := range strings.Split(strings.TrimSpace(extra), "\n") {
		if line != "" {
			fmt.Fprintf(&b, "    %s\n", strings.TrimSpace(line))
		}
	}
	b.WriteString("    endpoints:\n")
	for i, a := range addresses {
		fmt.Fprintf(&b, "      - { name: %s-%d, address: %s }\n", name, i+1, a)
	}
	return b.String()
}

// chat posts a small request and returns status, headers and body.
func chat(t *testing.T, address string, headers ...string) (int, http.Header, string) {
	t.Helper()
	status, header, body, err := tryPost("http://"+address+"/v1/chat/completions", `{"model":"m","max_tokens":16,"messages":[]}`, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return status, header, body
}

func tryPost(url, body string, headers ...string) (int, http.Header, string, error) {
	request, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return 0, nil, "", err
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, response.Header, string(text), err
}
