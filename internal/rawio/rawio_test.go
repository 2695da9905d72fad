package rawio

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a connection of either kind, its server's end wrapped.
func pair(t *testing.T, network string) (client, server net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		dir, err := os.MkdirTemp("", "rawio") // a short name
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		address = filepath.Join(dir, "s")
	}
	plain, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	l := Listener(plain, 15*time.Second)
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	client, err = net.Dial(network, l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server = <-accepted
	if server == nil {
		t.FailNow()
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	if _, raw := server.(interface {
		ReadOnReady(int, mem.BufferPool) (*[]byte, int, error)
	}); raw != (runtime.GOOS == "linux") {
		t.Fatalf("%T: raw %v", server, raw)
	}
	return client, server
}

var networks = []string{"tcp", "unix"}

// TestConnectionsAreAsPackageNetHasThem runs the conformance test of net.Conn with either
// end.
func TestConnectionsAreAsPackageNetHasThem(t *testing.T) {
	for _, network := range networks {
		for _, end := range []string{"server", "client"} {
			t.Run(network+"/"+end, func(t *testing.T) {
				nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
					client, server := pair(t, network)
					if end == "server" {
						client, server = server, client
					}
					return client, server, func() { client.Close(); server.Close() }, nil
				})
			})
		}
	}
}

// TestNothingIsLost sends more than a socket holds, in writes that it takes in parts, both
// ways at once.
func TestNothingIsLost(t *testing.T) {
	const size = 32 << 20
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			client, server := pair(t, network)
			var parts sync.WaitGroup
			for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
				sent := make([]byte, size)
				_, _ = rand.Read(sent)
				parts.Go(func() {
					n, err := way[0].Write(sent)
					if n != size || err != nil {
						t.Errorf("wrote %d, %v", n, err)
					}
				})
				parts.Go(func() {
					got := make([]byte, size)
					if _, err := io.ReadFull(way[1], got); err != nil || !bytes.Equal(got, sent) {
						t.Errorf("read something else, %v", err)
					}
				})
			}
			parts.Wait()
		})
	}
}

func TestEndsAndErrors(t *testing.T) {
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			client, server := pair(t, network)
			if n, err := server.Read(nil); n != 0 || err != nil {
				t.Errorf("an empty read: %d, %v", n, err)
			}
			if n, err := server.Write(nil); n != 0 || err != nil {
				t.Errorf("an empty write: %d, %v", n, err)
			}
			_, _ = client.Write([]byte("last"))
			client.Close()
			if all, err := io.ReadAll(server); string(all) != "last" || err != nil {
				t.Errorf("%q, %v before the end", all, err)
			}
			var failed *net.OpError
			for range 100 { // the first may go out before the other's answer
				if _, err := server.Write([]byte("too late")); err != nil {
					if !errors.As(err, &failed) || failed.Op != "write" || failed.Net != network ||
						!errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("%#v", err)
					}
					break
				}
				time.Sleep(time.Millisecond)
			}
			if failed == nil {
				t.Error("writes to nobody don't fail")
			}
			server.Close()
			if _, err := server.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
				t.Errorf("read of a closed one: %v", err)
			}
			if n, err := server.Write([]byte("x")); n != 0 || !errors.Is(err, net.ErrClosed) {
				t.Errorf("write to a closed one: %d, %v", n, err)
			}
		})
	}
}

// TestAResetIsAnError, not an end.
func TestAResetIsAnError(t *testing.T) {
	client, server := pair(t, "tcp")
	_ = client.(*net.TCPConn).SetLinger(0)
	client.Close()
	if n, err := server.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%d, %v", n, err)
	}
}

// reads counts how a connection is read.
type reads struct {
	net.Conn
	late, plain *atomic.Int32
}

func (r reads) ReadOnReady(size int, pool mem.BufferPool) (*[]byte, int, error) {
	r.late.Add(1)
	return r.Conn.(interface {
		ReadOnReady(int, mem.BufferPool) (*[]byte, int, error)
	}).ReadOnReady(size, pool)
}

func (r reads) Read(b []byte) (int, error) {
	r.plain.Add(1)
	return r.Conn.Read(b)
}

type countingListener struct {
	net.Listener
	late, plain atomic.Int32
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return reads{c, &l.late, &l.plain}, nil
}

// TestGRPCReadsLate: grpc-go's server takes its buffers when there is something to read. It
// is an interface of its own that it looks for; should it go, each sidecar's connection holds
// a buffer.
func TestGRPCReadsLate(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads are package net's")
	}
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &countingListener{Listener: Listener(plain, time.Minute)}
	server := grpc.NewServer()
	healthv1.RegisterHealthServer(server, health.NewServer())
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(l) }) // ended by Stop
	client, err := grpc.NewClient(plain.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if _, err := healthv1.NewHealthClient(client).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	_ = client.Close()
	server.Stop()
	serving.Wait()
	// The client's preface is read apart.
	if late, early := l.late.Load(), l.plain.Load(); late < 10 || early > 2 {
		t.Errorf("%d reads with late buffers, %d others", late, early)
	}
}

// counted counts the buffers that are out.
type counted struct{ out atomic.Int32 }

func (c *counted) Get(size int) *[]byte {
	c.out.Add(1)
	b := make([]byte, size)
	return &b
}

func (c *counted) Put(*[]byte) { c.out.Add(-1) }

// TestWaitingConnectionsHoldNoBuffer: and none is lost at the end.
func TestWaitingConnectionsHoldNoBuffer(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads are package net's")
	}
	client, server := pair(t, "unix")
	reader := server.(interface {
		ReadOnReady(int, mem.BufferPool) (*[]byte, int, error)
	})
	type read struct {
		text string
		err  error
	}
	var pool counted
	reads := make(chan read)
	var stopped sync.WaitGroup
	stopped.Go(func() {
		for {
			b, n, err := reader.ReadOnReady(16, &pool)
			if err != nil {
				reads <- read{err: err}
				return
			}
			text := string((*b)[:n])
			pool.Put(b)
			reads <- read{text: text}
		}
	})
	for _, text := range []string{"one", "two"} {
		time.Sleep(10 * time.Millisecond) // it waits, as a rule
		if n := pool.out.Load(); n != 0 {
			t.Errorf("%d buffers held while nothing comes", n)
		}
		if _, err := client.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if got := <-reads; got.text != text || got.err != nil {
			t.Errorf("%q, %v; want %q", got.text, got.err, text)
		}
	}
	client.Close()
	if got := <-reads; got.err != io.EOF {
		t.Errorf("%v at the end", got.err)
	}
	stopped.Wait()
	server.Close()
	if _, _, err := reader.ReadOnReady(16, &pool); !errors.Is(err, net.ErrClosed) {
		t.Errorf("%v when it is closed", err)
	}
	if n := pool.out.Load(); n != 0 {
		t.Errorf("%d buffers lost", n)
	}
}

func TestReadsAndWritesAllocateNothing(t *testing.T) {
	client, server := pair(t, "unix")
	b := make([]byte, 64)
	if n := testing.AllocsPerRun(200, func() {
		if _, err := server.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(client, b); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(server, b); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestTheRaceDetectorSeesTheOrder: what one did before it wrote came before what the other
// does after it read. Only the race detector can fail it.
func TestTheRaceDetectorSeesTheOrder(t *testing.T) {
	client, server := pair(t, "unix")
	shared := 0
	var parts sync.WaitGroup
	parts.Go(func() {
		shared = 1
		_, _ = server.Write([]byte("x"))
		_, _ = io.ReadFull(server, make([]byte, 1))
		shared = 3
	})
	_, _ = io.ReadFull(client, make([]byte, 1))
	shared = 2
	_, _ = client.Write([]byte("x"))
	parts.Wait()
	if shared != 3 {
		t.Error(shared)
	}
}

// one accepts a connection.
type one struct {
	net.Listener
	c net.Conn
}

func (o one) Accept() (net.Conn, error) {
	if o.c == nil {
		return nil, net.ErrClosed
	}
	return o.c, nil
}

// TestOthersAreLeftAsTheyAre: a connection without a socket, one whose socket keeps the
// bounds of messages, and errors.
func TestOthersAreLeftAsTheyAre(t *testing.T) {
	pipe, other := net.Pipe()
	defer pipe.Close()
	defer other.Close()
	packets := packetPair(t)
	for _, c := range []net.Conn{pipe, packets, nil} {
		got, err := Listener(one{c: c}, time.Second).Accept()
		if got != c || (err != nil) != (c == nil) {
			t.Errorf("%T became %T, %v", c, got, err)
		}
	}
}

// packetPair is one end of a connection of kind unixpacket.
func packetPair(t *testing.T) net.Conn {
	t.Helper()
	dir, err := os.MkdirTemp("", "rawio")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := net.Listen("unixpacket", filepath.Join(dir, "s"))
	if err != nil {
		t.Skip(err) // not on every system
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			c.Close()
		}
	}()
	c, err := net.Dial("unixpacket", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
