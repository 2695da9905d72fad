package integration

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// endingSidecar is a sidecar that is about to be told to end, with what runs on it.
type endingSidecar struct {
	*fairleadProcess
	config  string
	listen  string
	streams []*eventStream
}

// runningSidecar starts `fairlead envoy` and two streams through it.
func runningSidecar(t *testing.T, drain string) endingSidecar {
	t.Helper()
	envoytest.Binary(t)
	up := envoytest.NewUpstream(t, named("up"))
	p := newPlace(t, fmt.Sprintf(`
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [ chat ] }
pools:
- { name: a, endpoints: [ { address: %q } ] }
routes:
- { name: chat, match: { prefix: / }, dialect: openai, pool: a }
`, up.Addr()))
	p.serve(t)
	e := endingSidecar{config: p.file, listen: envoytest.FreeAddr(t).String()}
	e.fairleadProcess = startFairlead(t, p.dir, "envoy", "-f", p.file, "--listen", e.listen, "--drain", drain)
	waitListening(t, e.listen)
	e.streams = startEventStreams(t, 2, e.listen, up, "up")
	return e
}

// tell sends SIGTERM, and waits until Envoy drains.
func (e *endingSidecar) tell(t *testing.T) {
	t.Helper()
	_ = e.cmd.Process.Signal(syscall.SIGTERM)
	envoytest.Eventually(t, "the sidecar to drain", func() bool {
		return strings.Contains(e.out.String(), "running requests: 2)")
	})
}

// wait waits for the end, which must be a clean one.
func (e *endingSidecar) wait(t *testing.T) {
	t.Helper()
	select {
	case <-e.done:
	case <-time.After(time.Minute):
		t.Fatal("the sidecar does not end")
	}
	if code := e.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit %d", code)
	}
}

func (e *endingSidecar) runs() bool {
	select {
	case <-e.done:
		return false
	default:
		return true
	}
}

// cut wants a stream to break off.
func (s *eventStream) cut(t *testing.T) {
	t.Helper()
	for s.body.Scan() {
	}
	if s.body.Err() == nil {
		t.Error("the stream ended whole")
	}
}

// keptAlive sends a request over a transport that keeps its connection, and reports
// whether the answer says that it is closed.
func keptAlive(t *testing.T, with *http.Transport, listen string) (closes bool) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+listen+chatPath, strings.NewReader(`{"max_tokens":4}`))
	if err != nil {
		t.Fatal(err)
	}
	response, err := with.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, bufio.NewReader(response.Body)); err != nil || response.StatusCode != http.StatusOK {
		t.Errorf("%d, %v", response.StatusCode, err)
	}
	return response.Close
}

// TestSidecarThatIsToldToEndLetsRequestsEnd: those that run, and those that come
// meanwhile. Connections on which nothing runs don't keep it.
func TestSidecarThatIsToldToEndLetsRequestsEnd(t *testing.T) {
	e := runningSidecar(t, "10m")
	idle, used := &http.Transport{}, &http.Transport{}
	t.Cleanup(idle.CloseIdleConnections)
	t.Cleanup(used.CloseIdleConnections)
	for _, with := range []*http.Transport{idle, used} {
		if keptAlive(t, with, e.listen) {
			t.Error("a connection is closed before the sidecar is told to end")
		}
	}
	e.tell(t)
	if !keptAlive(t, used, e.listen) {
		t.Error("a connection stays open though the sidecar ends")
	}
	if status, _, body := chat(t, e.listen); status != http.StatusOK {
		t.Errorf("a request over a new connection: %d, %s", status, body)
	}
	for _, s := range e.streams {
		s.pass(t, "while it drains")
	}
	e.streams[0].end(t)
	e.streams[1].pass(t, "the last one")
	if !e.runs() {
		t.Fatal("it ended while a request ran")
	}
	e.streams[1].end(t)
	e.wait(t)
}

func TestSidecarThatIsToldTwiceEndsAtOnce(t *testing.T) {
	e := runningSidecar(t, "10m")
	e.tell(t)
	_ = e.cmd.Process.Signal(syscall.SIGTERM)
	e.wait(t)
	for _, s := range e.streams {
		s.cut(t)
	}
}

func TestSidecarEndsAfterItsTimeToDrain(t *testing.T) {
	e := runningSidecar(t, "1s")
	e.tell(t)
	e.wait(t)
	if !strings.Contains(e.out.String(), "running requests are cut: 2\n") {
		t.Errorf("it says nothing of two requests that it cuts:\n%s", e.out.String())
	}
	for _, s := range e.streams {
		s.cut(t)
	}
}

// TestSidecarsInOneFolderEndByThemselves: one that is told to end leaves the other, and lets
// its own requests end.
func TestSidecarsInOneFolderEndByThemselves(t *testing.T) {
	e := runningSidecar(t, "10m")
	listen := envoytest.FreeAddr(t).String()
	other := startFairlead(t, e.cmd.Dir, "envoy", "-f", filepath.Base(e.config), "--listen", listen, "--node", "other")
	waitListening(t, listen)
	e.tell(t)
	for _, s := range e.streams {
		s.pass(t, "while it drains")
	}
	for _, s := range e.streams {
		s.end(t)
	}
	e.wait(t)
	if status, _, body := chat(t, listen); status != http.StatusOK {
		t.Errorf("the other sidecar: %d, %s", status, body)
	}
	_ = other.cmd.Process.Signal(syscall.SIGTERM)
}

// TestSidecarTakesNobodysAdminSocket, by which it would be drained instead.
func TestSidecarTakesNobodysAdminSocket(t *testing.T) {
	e := runningSidecar(t, "0")
	admin := regexp.MustCompile(`admin interface is on unix:(\S+)`).FindStringSubmatch(e.out.String())
	if admin == nil {
		t.Fatalf("it does not say where its admin interface is:\n%s", e.out.String())
	}
	second := startFairlead(t, e.cmd.Dir, "envoy", "-f", filepath.Base(e.config), "--listen", envoytest.FreeAddr(t).String(), "--admin", "unix:"+admin[1])
	select {
	case <-second.done:
	case <-time.After(time.Minute):
		t.Fatal("a second one runs by the same socket")
	}
	if got := second.out.String(); second.cmd.ProcessState.ExitCode() != 2 || !strings.Contains(got, "somebody listens there already") {
		t.Errorf("exit %d, %s", second.cmd.ProcessState.ExitCode(), got)
	}
}
