package redisbin

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// findLimit covers a first download on a slow line.
	findLimit = 5 * time.Minute
	// readyLimit bounds the wait for PONG; a start takes some 20 ms on an idle
	// machine.
	readyLimit = 60 * time.Second
	// commandLimit bounds one command of a test.
	commandLimit = 30 * time.Second
	pollEvery    = 5 * time.Millisecond
	// logKept is how much of the server's output is shown when a test fails.
	logKept = 64 << 10
)

var findBinary = sync.OnceValues(func() (Binary, error) {
	ctx, cancel := context.WithTimeout(context.Background(), findLimit)
	defer cancel()
	return Find(ctx, Options{Progress: os.Stderr})
})

// Config says how a server runs. The zero Config is one without a password on a
// Unix socket alone.
type Config struct {
	// Binary is the program to run; "" is the one that Find finds.
	Binary string
	// TCP has the server listen on a free port of 127.0.0.1 too.
	TCP bool
	// Password, if set, must be shown by clients.
	Password string
	// Lines are further lines of the configuration file.
	Lines []string
}

// Server is a running redis-server, or one that was killed and may run again.
type Server struct {
	// Socket is its Unix socket's path.
	Socket string
	// Port is its port on 127.0.0.1; 0 without Config.TCP.
	Port int

	binary, dir, password string
	lines                 []string
	output                tail

	mu   sync.Mutex
	proc *process // nil while it does not run
}

// Start runs a server for a test and returns once it answers. It ends in the
// test's Cleanup; what it printed is shown when the test has failed. Where no
// server can be had the test fails, never skips.
func Start(tb testing.TB, c Config) *Server {
	tb.Helper()
	s, err := Launch(context.Background(), c)
	if err != nil {
		tb.Fatalf("a real redis-server is needed: %v", err)
	}
	tb.Cleanup(func() {
		s.Close()
		if tb.Failed() {
			tb.Logf("output of redis-server:\n%s", s.output.String())
		}
	})
	return s
}

// Launch is Start without a test: the caller must call Close.
func Launch(ctx context.Context, c Config) (*Server, error) {
	if c.Binary == "" {
		b, err := findBinary()
		if err != nil {
			return nil, err
		}
		c.Binary = b.Path
	}
	dir, err := os.MkdirTemp("", "flr") // short: a socket's path must stay below 100 bytes
	if err != nil {
		return nil, err
	}
	s := &Server{Socket: filepath.Join(dir, "redis.sock"), binary: c.Binary, dir: dir, password: c.Password, lines: c.Lines}
	if err := s.first(ctx, c.TCP); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// first starts the server; a port that somebody else took meanwhile is replaced.
func (s *Server) first(ctx context.Context, tcp bool) error {
	if !tcp {
		return s.Run(ctx)
	}
	var err error
	for range 5 {
		if s.Port, err = freePort(); err != nil {
			return err
		}
		if err = s.Run(ctx); err == nil || ctx.Err() != nil {
			return err
		}
	}
	return err
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// Address is where clients find the server, as the config file spells it: the
// port if it has one, else the socket.
func (s *Server) Address() string {
	if s.Port != 0 {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port))
	}
	return "unix:" + s.Socket
}

// Run starts a server that was killed or stopped, with nothing in it, on its old
// address, and returns once it answers.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc != nil {
		return errors.New("run redis-server: it runs already")
	}
	p, err := launch(s.binary, s.dir, s.config(), &s.output)
	if err != nil {
		return fmt.Errorf("run redis-server: %w", err)
	}
	for {
		if answer, err := s.Do("PING"); err == nil && answer == "PONG" {
			s.proc = p
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("run redis-server: it ended at once; it printed:\n%s", s.output.String())
		case <-ctx.Done():
			p.end(syscall.SIGKILL)
			return fmt.Errorf("run redis-server: no answer in time: %w; it printed:\n%s", ctx.Err(), s.output.String())
		case <-time.After(pollEvery):
		}
	}
}

func (s *Server) config() string {
	lines := append([]string{
		"bind 127.0.0.1",
		"port " + strconv.Itoa(s.Port),
		"unixsocket " + s.Socket,
		"unixsocketperm 700",
		"dir " + s.dir,
		`save ""`,
		"appendonly no",
		"daemonize no",
		"databases 4",
	}, s.lines...)
	if s.password != "" {
		lines = append(lines, "requirepass "+s.password)
	}
	return strings.Join(lines, "\n") + "\n"
}

// Kill ends the server as kill -9 does: what it held is lost.
func (s *Server) Kill() { s.signal(syscall.SIGKILL, true) }

// Stop ends the server in good order; it keeps nothing all the same.
func (s *Server) Stop() { s.signal(syscall.SIGTERM, true) }

// Pause freezes the server: connections stay, and nothing answers.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP, false) }

// Resume lets a frozen server go on.
func (s *Server) Resume() { s.signal(syscall.SIGCONT, false) }

// Running says whether the server was started and not ended since.
func (s *Server) Running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil
}

func (s *Server) signal(signal syscall.Signal, ends bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return
	}
	if !ends {
		_ = s.proc.cmd.Process.Signal(signal) // fails only when it has ended
		return
	}
	s.proc.end(signal)
	s.proc = nil
}

// Close kills the server and removes its directory.
func (s *Server) Close() {
	s.Kill()
	_ = os.RemoveAll(s.dir)
}

// Do sends one command to the server's socket and returns its answer, as text: a
// status, a string or a number. Arrays are not understood. An error that Redis
// answers is returned as such.
func (s *Server) Do(command ...string) (string, error) {
	conn, err := net.DialTimeout("unix", s.Socket, commandLimit)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(commandLimit)); err != nil {
		return "", err
	}
	in := bufio.NewReader(conn)
	if s.password != "" {
		if _, err := ask(conn, in, []string{"AUTH", s.password}); err != nil {
			return "", err
		}
	}
	return ask(conn, in, command)
}

// MustDo is Do for a command that must not fail.
func (s *Server) MustDo(tb testing.TB, command ...string) string {
	tb.Helper()
	answer, err := s.Do(command...)
	if err != nil {
		tb.Fatalf("redis %v: %v", command, err)
	}
	return answer
}

func ask(out io.Writer, in *bufio.Reader, command []string) (string, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%d\r\n", len(command))
	for _, word := range command {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(word), word)
	}
	if _, err := out.Write(b.Bytes()); err != nil {
		return "", err
	}
	line, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimRight(line, "\r\n")
	switch line[:min(1, len(line))] {
	case "+", ":":
		return line[1:], nil
	case "-":
		return "", errors.New(line[1:])
	case "$":
		n, err := strconv.Atoi(line[1:])
		if err != nil || n < 0 {
			return "", err // -1 is nil
		}
		body := make([]byte, n+2)
		if _, err := io.ReadFull(in, body); err != nil {
			return "", err
		}
		return string(body[:n]), nil
	}
	return "", fmt.Errorf("answer %q is not understood", line)
}

// process is one run of the server.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// launch starts the server from a goroutine that stays on one thread until it has
// ended: the kernel sends the parent-death signal when the thread that forked
// ends, not the process. The configuration goes in by stdin, so that no password
// stands in the process table.
func launch(binary, dir, config string, output io.Writer) (*process, error) {
	p := &process{cmd: exec.Command(binary, "-"), done: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Stdin = strings.NewReader(config)
	p.cmd.Stdout, p.cmd.Stderr = output, output
	p.cmd.WaitDelay = 2 * time.Second
	p.cmd.SysProcAttr = sysProcAttr()
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // how it ended is the test's doing
			close(p.done)
		}
	}()
	return p, <-started
}

func (p *process) end(signal syscall.Signal) {
	_ = p.cmd.Process.Signal(signal) // fails only when it has ended
	if signal != syscall.SIGKILL {
		_ = p.cmd.Process.Signal(syscall.SIGCONT) // a frozen one takes no other
	}
	<-p.done
}

// tail keeps the last part of what was written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if len(t.b) > logKept {
		t.b = append(t.b[:0], t.b[len(t.b)-logKept/2:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
