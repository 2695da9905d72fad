package envoyproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// defaultGrace is how long Stop waits after SIGTERM when its context has no
	// deadline. Envoy ends within milliseconds of a SIGTERM: it doesn't drain.
	defaultGrace = 5 * time.Second
	// pipeDelay bounds the wait for the log pipe after the process has ended.
	pipeDelay = 2 * time.Second
)

// Options say what to run. Binary and Bootstrap are required.
type Options struct {
	// Binary is the path of the Envoy executable.
	Binary string
	// Bootstrap is the bootstrap configuration, as YAML or JSON.
	Bootstrap []byte
	// Dir holds the bootstrap file and is Envoy's working directory. It is
	// created with mode 0700 when missing; several Envoys may share one. When
	// empty, a temporary directory is made and removed with the process.
	Dir string
	// Concurrency is the number of worker threads; 0 means 1.
	Concurrency int
	// DrainTime is how long connections of a changed or removed listener may
	// live on; rounded up to whole seconds. 0 keeps Envoy's default of 600 s.
	DrainTime time.Duration
	// LogLevel is one of Envoy's levels (trace, debug, info, warning, error,
	// critical, off); empty means warning.
	LogLevel string
	// Log receives what Envoy prints, line by line; it may be nil. Writes come
	// from one goroutine.
	Log io.Writer
	// Env is added to this process's environment, as "KEY=value".
	Env []string
	// AdminAddressPath, when set, is a file that Envoy writes its admin address
	// to: useful where the bootstrap asks for port 0.
	AdminAddressPath string
}

// Process is an Envoy that was started. All methods may be called from any
// goroutine, also after the end.
type Process struct {
	cmd  *exec.Cmd
	out  *output
	done chan struct{}
	err  error // set before done is closed
	pid  int
}

// Start runs Envoy and returns once it has accepted its bootstrap and entered
// its main loop. Listeners and clusters that wait for a control plane may not be
// ready then; Envoy's admin endpoint /ready tells. An Envoy that ends earlier is
// an error that carries its last log lines. ctx bounds the start only: ending
// the process later is for Stop and Kill.
func Start(ctx context.Context, o Options) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start envoy: %w", err)
	}
	binary, err := filepath.Abs(o.Binary)
	if err != nil || o.Binary == "" {
		return nil, fmt.Errorf("start envoy: binary %q: a path is needed", o.Binary)
	}
	file, cleanup, err := writeBootstrap(o.Dir, o.Bootstrap)
	if err != nil {
		return nil, fmt.Errorf("start envoy: %w", err)
	}
	out := newOutput(o.Log, hideInfo(o.LogLevel))
	cmd := exec.Command(binary, arguments(file, o)...)
	cmd.Dir = filepath.Dir(file)
	cmd.Env = append(os.Environ(), o.Env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = pipeDelay
	cmd.SysProcAttr = sysProcAttr()
	p := &Process{cmd: cmd, out: out, done: make(chan struct{})}
	if err := p.launch(cleanup); err != nil {
		return nil, fmt.Errorf("start envoy: %w", err)
	}
	select {
	case <-out.running:
		return p, nil
	case <-p.done:
		return nil, fmt.Errorf("start envoy: ended before it was running: %w", p.exitError())
	case <-ctx.Done():
		p.Kill()
		<-p.done
		return nil, fmt.Errorf("start envoy: not running in time: %w%s", context.Cause(ctx), out.quoted())
	}
}

// launch starts the command from a goroutine that stays on one thread until the
// child has ended: the kernel sends the parent-death signal when the *thread*
// that forked ends, not the process.
func (p *Process) launch(cleanup func()) error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		if err == nil {
			p.pid = p.cmd.Process.Pid
		}
		if err != nil {
			cleanup()
		}
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		p.out.flush()
		cleanup()
		close(p.done)
	}()
	return <-started
}

func arguments(file string, o Options) []string {
	level := o.LogLevel
	if level == "" {
		level = "warning"
	}
	args := []string{
		"-c", file,
		"--disable-hot-restart",
		"--concurrency", strconv.Itoa(max(1, o.Concurrency)),
		"-l", level,
	}
	if hideInfo(o.LogLevel) {
		// The line that says Envoy is running is logged at info.
		// And ext_proc warns once per request while its server is away, which
		// is no news and fills a disk. And misc says of each message of the filters
		// that read usage that they are work in progress, some forty lines a sidecar.
		args = append(args, "--component-log-level", "main:info,ext_proc:error,misc:error")
	}
	if o.DrainTime > 0 {
		seconds := int64(math.Ceil(o.DrainTime.Seconds()))
		args = append(args, "--drain-time-s", strconv.FormatInt(seconds, 10))
	}
	if o.AdminAddressPath != "" {
		args = append(args, "--admin-address-path", o.AdminAddressPath)
	}
	return args
}

// writeBootstrap puts the configuration into a file of its own, so that several
// Envoys may share dir. Envoy reads JSON under the name .yaml too.
func writeBootstrap(dir string, bootstrap []byte) (file string, cleanup func(), err error) {
	remove := os.Remove
	if dir == "" {
		if dir, err = os.MkdirTemp("", "fl"); err != nil {
			return "", nil, err
		}
		remove = func(name string) error { return os.RemoveAll(filepath.Dir(name)) }
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", nil, err
	}
	if err = os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, err
	}
	f, err := os.CreateTemp(dir, "envoy-*.yaml") // mode 0600
	if err != nil {
		return "", nil, err
	}
	_, err = f.Write(bootstrap)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = remove(f.Name())
		return "", nil, fmt.Errorf("write bootstrap: %w", err)
	}
	return f.Name(), func() { _ = remove(f.Name()) }, nil
}

// PID is the process id; it stays the same after the end.
func (p *Process) PID() int { return p.pid }

// Done is closed when Envoy has ended, its last output was read and its files
// were removed.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait blocks until Envoy has ended. It returns nil after exit status 0 (also
// the end by SIGTERM), else an error with the last log lines.
func (p *Process) Wait() error {
	<-p.done
	if p.err == nil {
		return nil
	}
	return fmt.Errorf("envoy (pid %d): %w", p.pid, p.exitError())
}

func (p *Process) exitError() error {
	err := p.err
	if err == nil {
		err = errors.New("exit status 0")
	}
	return fmt.Errorf("%w%s", err, p.out.quoted())
}

// Signal sends a signal. It returns os.ErrProcessDone after the end.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Kill ends Envoy at once, as a crash would. It does not wait.
func (p *Process) Kill() { _ = p.cmd.Process.Kill() }

// Stop ends Envoy with SIGTERM and waits. When ctx ends first (or after 5 s, if
// it has no deadline) it uses SIGKILL and says so in its error. Envoy doesn't
// drain at SIGTERM: running streams are cut.
func (p *Process) Stop(ctx context.Context) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultGrace)
		defer cancel()
	}
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop envoy (pid %d): %w", p.pid, err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
	}
	p.Kill()
	<-p.done
	return fmt.Errorf("stop envoy (pid %d): killed, it did not end after SIGTERM: %w", p.pid, context.Cause(ctx))
}

// LastLog returns the last lines Envoy printed, oldest first, at most 40.
func (p *Process) LastLog() []string { return p.out.lines() }

// CPU returns the processor time Envoy has used so far, all threads together.
// While it runs this is read from /proc in steps of 10 ms, and is an error on
// systems without it; after the end it comes from the exit status.
func (p *Process) CPU() (user, system time.Duration, err error) {
	select {
	case <-p.done:
		return p.cmd.ProcessState.UserTime(), p.cmd.ProcessState.SystemTime(), nil
	default:
	}
	user, system, err = runningCPU(p.pid)
	if err == nil {
		return user, system, nil
	}
	// It may have ended between the two looks; its output is read soon after.
	select {
	case <-p.done:
		return p.cmd.ProcessState.UserTime(), p.cmd.ProcessState.SystemTime(), nil
	default:
		return 0, 0, fmt.Errorf("cpu of envoy (pid %d): %w", p.pid, err)
	}
}

// parseStat reads user and system time from the text of /proc/PID/stat: fields
// 14 and 15, counted after the command name, which may itself hold spaces and
// parentheses (proc_pid_stat(5)). ticks is the clock rate in 1/s.
func parseStat(text string, ticks int64) (user, system time.Duration, err error) {
	_, rest, ok := cutLast(text, ")")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 13 {
		return 0, 0, fmt.Errorf("stat line %q: too few fields", text)
	}
	u, errU := strconv.ParseInt(fields[11], 10, 64)
	s, errS := strconv.ParseInt(fields[12], 10, 64)
	if err := errors.Join(errU, errS); err != nil {
		return 0, 0, fmt.Errorf("stat line %q: %w", text, err)
	}
	tick := time.Second / time.Duration(ticks)
	return time.Duration(u) * tick, time.Duration(s) * tick, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
