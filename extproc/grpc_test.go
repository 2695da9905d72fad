package extproc

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// serveOn starts a gRPC server on a Unix socket and returns a connection to it.
func serveOn(t testing.TB, register func(*grpc.Server), options ...grpc.ServerOption) *grpc.ClientConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(options...)
	register(g)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		g.Stop()
		<-done
	})
	return conn
}

func TestServiceAndHealthShareAServerWithTheRawCodec(t *testing.T) {
	w := newWorld(t)
	conn := serveOn(t, w.Register, ServerOptions()...)
	ctx := t.Context()
	for range 3 {
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(chat(nil).proto()); err != nil {
			t.Fatal(err)
		}
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if metadata(r, wire.NamespaceSteer) == nil {
			t.Errorf("not steered: %v", r)
		}
		if _, err := stream.Recv(); err == nil {
			t.Error("the stream goes on after its answer")
		}
	}
	check := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for _, name := range []string{"", ServiceName} {
			r, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: name})
			if err != nil || r.GetStatus() != want {
				t.Errorf("health of %q: %v, %v; want %v", name, r.GetStatus(), err, want)
			}
		}
	}
	check(healthv1.HealthCheckResponse_SERVING)
	w.SetServing(false)
	check(healthv1.HealthCheckResponse_NOT_SERVING)
	w.SetServing(true)
	check(healthv1.HealthCheckResponse_SERVING)
}

func TestOversizedMessageIsRefused(t *testing.T) {
	w := newWorld(t)
	conn := serveOn(t, w.Register, ServerOptions()...)
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.Send(chat(map[string]string{"x": string(make([]byte, maxMessage+1))}).proto())
	if _, err := stream.Recv(); err == nil {
		t.Error("a message above the limit was answered")
	}
}

func TestWatchdogTurnsHealthWhileAHandlerIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		w := newWorld(t, func(_ *plan.Inputs, o *Options) {
			o.Trusted = func(string) bool { <-release; return true }
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		go func() {
			m := chat(map[string]string{wire.HeaderRequestID: "abc"})
			done <- w.process(&fakeStream{in: [][]byte{marshal(t, m.proto())}})
		}()
		time.Sleep(blockedAfter / 2)
		if !w.Healthy() {
			t.Error("unhealthy though no handler was stuck for long")
		}
		time.Sleep(blockedAfter)
		if w.Healthy() {
			t.Error("healthy with a stuck handler")
		}
		close(release)
		if err := <-done; err != nil {
			t.Error(err)
		}
		time.Sleep(2 * watchInterval)
		if !w.Healthy() {
			t.Error("unhealthy though the handler has ended")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestWatchdogDoesNotOverruleSetServing(t *testing.T) {
	w := newWorld(t)
	w.SetServing(false)
	w.watch()
	if w.Healthy() {
		t.Error("healthy though told not to serve")
	}
}
