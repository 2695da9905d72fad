package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	alsv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/serve"
)

// Roles of child processes; each takes one argument.
const (
	roleStock      = "stock"       // socket path: the stock ext_proc server
	roleStockTuned = "stock-tuned" // socket path: the same with tunedGC
	roleSink       = "sink"        // socket path: an access-log receiver that drops everything
	roleServe      = "serve"       // config file: the whole of `fairlead serve`
)

// tunedGC is the GC percentage (GOGC) of the second stock server: what the rule of
// `fairlead serve` (a heap of 48 MiB at least, 800 % at most) gives a server as
// small as that.
const tunedGC = 800

// child is a server under test.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startChild runs this program again in a role and waits until it serves.
func startChild(role, argument string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "child", role, argument)
	cmd.Stderr = os.Stderr
	cmd.Env = collectorsOwn(os.Environ())
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, in: in, out: bufio.NewReader(out)}
	if line, err := c.out.ReadString('\n'); err != nil || line != "ready\n" {
		c.stop()
		return nil, fmt.Errorf("child %s: %q, %w", role, line, err)
	}
	return c, nil
}

// collectorsOwn takes out of an environment what would set the collectors of all
// servers alike: the table says how each is set.
func collectorsOwn(env []string) []string {
	return slices.DeleteFunc(env, func(v string) bool {
		return strings.HasPrefix(v, "GOGC=") || strings.HasPrefix(v, "GOMEMLIMIT=")
	})
}

// ask sends a command and returns the one line that answers it.
func (c *child) ask(command string) (string, error) {
	if _, err := io.WriteString(c.in, command+"\n"); err != nil {
		return "", err
	}
	line, err := c.out.ReadString('\n')
	return strings.TrimSpace(line), err
}

// usage is what a process has used so far.
type usage struct {
	cpu      time.Duration // user and system, by getrusage
	switches int64         // context switches, by getrusage
	writes   int64         // write calls, by /proc/self/io; 0 where there is none
}

func (u usage) since(before usage) usage {
	return usage{u.cpu - before.cpu, u.switches - before.switches, u.writes - before.writes}
}

func (c *child) usage() (u usage, err error) {
	line, err := c.ask("usage")
	if err != nil {
		return u, err
	}
	_, err = fmt.Sscan(line, (*int64)(&u.cpu), &u.switches, &u.writes)
	return u, err
}

// writes is how many write calls this process has made.
func writes() (n int64) {
	text, _ := os.ReadFile("/proc/self/io")
	_, rest, _ := strings.Cut(string(text), "syscw: ")
	_, _ = fmt.Sscan(rest, &n)
	return n
}

// stop ends the child by closing its input and waits.
func (c *child) stop() {
	_ = c.in.Close()
	timer := time.AfterFunc(10*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	_ = c.cmd.Wait()
}

// runChild is the child's side: it serves until its standard input ends.
func runChild(role, argument string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	run, err := server(role, argument)
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	failed := make(chan error, 1)
	running.Go(func() { failed <- run(ctx) })
	fmt.Println("ready")
	err = obey(os.Stdin)
	cancel()
	running.Wait()
	return errors.Join(err, <-failed)
}

// obey answers commands: "usage", "profile FILE" (begins one) and "profile" (ends
// it).
func obey(in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		command, argument, _ := strings.Cut(lines.Text(), " ")
		switch {
		case command == "usage":
			var r syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
				return err
			}
			fmt.Println(r.Utime.Nano()+r.Stime.Nano(), r.Nvcsw+r.Nivcsw, writes())
		case command == "profile" && argument != "":
			f, err := os.Create(argument)
			if err != nil {
				return err
			}
			if err := pprof.StartCPUProfile(f); err != nil {
				return err
			}
			fmt.Println("begun")
		case command == "profile":
			pprof.StopCPUProfile()
			fmt.Println("ended")
		default:
			return fmt.Errorf("command %q", lines.Text())
		}
	}
	return lines.Err()
}

// server prepares a role; its addresses are bound when it returns.
func server(role, argument string) (func(context.Context) error, error) {
	if role == roleServe {
		return fairlead(argument)
	}
	g := grpc.NewServer()
	switch role {
	case roleStock, roleStockTuned:
		if role == roleStockTuned {
			debug.SetGCPercent(tunedGC)
		}
		extprocv3.RegisterExternalProcessorServer(g, stock{})
		healthv1.RegisterHealthServer(g, health.NewServer())
	case roleSink:
		alsv3.RegisterAccessLogServiceServer(g, sink{})
	default:
		return nil, fmt.Errorf("role %q; accepted: %s, %s, %s, %s", role, roleStock, roleStockTuned, roleSink, roleServe)
	}
	l, err := net.Listen("unix", argument)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		defer context.AfterFunc(ctx, g.Stop)()
		if err := g.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return err
		}
		return nil
	}, nil
}

func fairlead(file string) (func(context.Context) error, error) {
	cfg, err := fleet.Load(file)
	if err != nil {
		return nil, err
	}
	s, err := serve.New(serve.Options{Config: cfg, TuneGC: true})
	if err != nil {
		return nil, err
	}
	return s.Run, s.Listen()
}

// stock is the least that an ext_proc server made with generated types does.
type stock struct {
	extprocv3.UnimplementedExternalProcessorServer
}

func (stock) Process(s extprocv3.ExternalProcessor_ProcessServer) error {
	if _, err := s.Recv(); err != nil {
		return err
	}
	return s.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}}})
}

// sink drops access logs.
type sink struct {
	alsv3.UnimplementedAccessLogServiceServer
}

func (sink) StreamAccessLogs(s alsv3.AccessLogService_StreamAccessLogsServer) error {
	for {
		if _, err := s.Recv(); err != nil {
			if errors.Is(err, io.EOF) {
				return s.SendAndClose(&alsv3.StreamAccessLogsResponse{})
			}
			return err
		}
	}
}
