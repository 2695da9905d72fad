package push

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// patience bounds every wait for an event; a loaded machine needs a lot.
const patience = 30 * time.Second

var quietLog = slog.New(slog.DiscardHandler)

// readings collects what a server delivers.
type readings struct {
	mu   sync.Mutex
	all  []telemetry.Reading
	more chan struct{} // closed and renewed at each reading
}

func newReadings() *readings { return &readings{more: make(chan struct{})} }

func (r *readings) deliver(x telemetry.Reading) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, x)
	close(r.more)
	r.more = make(chan struct{})
}

func (r *readings) snapshot() ([]telemetry.Reading, chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[:len(r.all):len(r.all)], r.more
}

// await waits until ok holds for what was delivered.
func (r *readings) await(t *testing.T, what string, ok func([]telemetry.Reading) bool) []telemetry.Reading {
	t.Helper()
	late := time.After(patience)
	for {
		all, more := r.snapshot()
		if ok(all) {
			return all
		}
		select {
		case <-more:
		case <-late:
			t.Fatalf("%s: not after %s; delivered %v", what, patience, all)
		}
	}
}

func atLeast(n int) func([]telemetry.Reading) bool {
	return func(all []telemetry.Reading) bool { return len(all) >= n }
}

// eventually polls what has no event to wait for.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for began := time.Now(); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatalf("%s: not after %s", what, patience)
		}
	}
}

// serving runs a gRPC server with s at an address until stop, or the test's
// end.
func serving(t *testing.T, s *Server, at fleet.Address, options ...grpc.ServerOption) (stop func()) {
	t.Helper()
	l, err := net.Listen(at.Network(), at.Target())
	if err != nil {
		t.Fatal(err)
	}
	return servingOn(t, s, l, options...)
}

func servingOn(t *testing.T, s *Server, l net.Listener, options ...grpc.ServerOption) (stop func()) {
	t.Helper()
	g := grpc.NewServer(append(ServerLimits(), options...)...)
	s.Register(g)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := g.Serve(l); err != nil {
			t.Error(err)
		}
	}()
	stop = sync.OnceFunc(func() {
		g.Stop()
		<-done
	})
	t.Cleanup(stop)
	return stop
}

// running runs a client until stop, or the test's end.
func running(t *testing.T, o ClientOptions) (c *Client, stop func()) {
	t.Helper()
	if o.Log == nil {
		o.Log = quietLog
	}
	c, err := NewClient(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(stop)
	return c, stop
}

// socket is a Unix address in a folder whose path is short enough.
func socket(t *testing.T) fleet.Address {
	t.Helper()
	dir, err := os.MkdirTemp("", "push")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return fleet.Address{Path: filepath.Join(dir, "s")}
}

func pool(name string, endpoints ...fleet.Endpoint) fleet.Pool {
	return fleet.Pool{Name: name, Endpoints: endpoints, Telemetry: fleet.Telemetry{Source: fleet.TelemetryPush}}
}

func endpoint(address, node string) fleet.Endpoint {
	return fleet.Endpoint{Address: netip.MustParseAddrPort(address), Node: node}
}

func update(address string, running float64) Update {
	return Update{
		Endpoint: netip.MustParseAddrPort(address),
		Sample:   telemetry.Sample{At: time.Now(), Known: telemetry.HasRunning, Running: running},
	}
}

func TestFrameArrivesOverUnixSocket(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1")), pool("b", endpoint("10.0.0.1:8000", "n1"))})
	at := socket(t)
	serving(t, s, at)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1"})
	c.Send(Frame{Endpoints: []Update{update("10.0.0.1:8000", 7)}})
	all := got.await(t, "both pools", atLeast(2))
	for i, p := range []string{"a", "b"} {
		if all[i].Endpoint.Pool != p || all[i].Sample.Running != 7 || all[i].Err != nil {
			t.Errorf("reading %d is %+v", i, all[i])
		}
	}
}

// countingHandler counts log records.
type countingHandler struct {
	slog.Handler
	n int
}

func (h *countingHandler) logger() *slog.Logger { return slog.New(h) }

func (h *countingHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h *countingHandler) Handle(context.Context, slog.Record) error {
	h.n++
	return nil
}
