package push

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// Back-off between attempts to connect.
const (
	firstDelay = 100 * time.Millisecond
	lastDelay  = 5 * time.Second
)

// defaultQueue is 1 s of frames at 5 Hz: what is older is of no use.
const defaultQueue = 5

// ClientOptions of a Client.
type ClientOptions struct {
	// Target is where `serve` takes frames.
	Target fleet.Address
	// TLS is required on TCP beyond loopback, unless Target says plaintext, and
	// is an error on a Unix socket.
	TLS *ClientTLS
	// Node is the name under which the configuration knows this node; under TLS
	// also a DNS name of the client's certificate.
	Node string
	// Queue is how many frames are kept while the server is away or slow; the
	// oldest are dropped. Default 5.
	Queue int
	Log   *slog.Logger // nil: slog.Default
}

// Client sends a node's frames. Send and Stats may be called from any
// goroutine, Run once at a time.
type Client struct {
	o ClientOptions

	mu    sync.Mutex
	queue []Frame // oldest first, at most o.Queue
	stats ClientStats
	// refusal is why the newest answered frame was refused, "" if it was not.
	refusal string
	wake    chan struct{} // has room for one: the queue may hold something
	// sequence counts the frames written, over all streams. Only Run's goroutine
	// uses it.
	sequence uint64
}

// ClientStats count since the Client was made.
type ClientStats struct {
	Sent     uint64 // frames written to a stream
	Answered uint64 // frames that the server answered
	Dropped  uint64 // frames dropped because the client was behind
	Connects uint64 // streams that the server accepted
	Failures uint64 // attempts and streams that ended in an error
	// Connected is true while the server answers.
	Connected bool
	LastError string // of the newest failure; "" if there was none
	// Refused are endpoints that the newest answer named; at most 8.
	Refused []Refusal
}

// NewClient checks the options; it starts nothing.
func NewClient(o ClientOptions) (*Client, error) {
	if err := checkName(o.Node); err != nil {
		return nil, fmt.Errorf("node name %w", err)
	}
	if o.Target == (fleet.Address{}) {
		return nil, errors.New("no address to push to; accepted: unix:/path or IP:port")
	}
	if err := checkTransport(o.Target, o.TLS != nil); err != nil {
		return nil, fmt.Errorf("push to %s: %w", o.Target, err)
	}
	if o.TLS != nil {
		if _, err := o.TLS.load(); err != nil {
			return nil, fmt.Errorf("push to %s: %w", o.Target, err)
		}
	}
	if o.Queue <= 0 {
		o.Queue = defaultQueue
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return &Client{o: o, wake: make(chan struct{}, 1)}, nil
}

func checkTransport(a fleet.Address, tls bool) error {
	switch {
	case a.Path != "" && tls:
		return errors.New("TLS on a Unix socket; accepted: TLS with IP:port")
	case a.Path != "" || tls || a.Plaintext:
		return nil
	}
	if at, err := netip.ParseAddrPort(a.Host); err == nil && at.Addr().Unmap().IsLoopback() {
		return nil
	}
	return errors.New("no TLS beyond loopback; accepted: TLS, or plaintext said in that word")
}

// Send hands over a frame and returns at once. It keeps nothing of f's slices.
// When the queue is full the oldest frame is dropped and counted.
func (c *Client) Send(f Frame) {
	if f.At.IsZero() {
		f.At = time.Now()
	}
	f.Node = c.o.Node
	f.GPUs = slices.Clone(f.GPUs)
	f.Endpoints = slices.Clone(f.Endpoints)
	for i := range f.Endpoints {
		f.Endpoints[i].GPUs = slices.Clone(f.Endpoints[i].GPUs)
	}
	c.mu.Lock()
	if len(c.queue) >= c.o.Queue {
		c.queue = slices.Delete(c.queue, 0, 1)
		c.stats.Dropped++
	}
	c.queue = append(c.queue, f)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// next takes the oldest frame, and how many were dropped so far.
func (c *Client) next() (f Frame, dropped uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		return Frame{}, 0, false
	}
	f = c.queue[0]
	c.queue = slices.Delete(c.queue, 0, 1)
	return f, c.stats.Dropped, true
}

// Stats returns the counters.
func (c *Client) Stats() ClientStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	stats := c.stats
	stats.Refused = slices.Clone(stats.Refused)
	return stats
}

// Run sends frames until ctx ends, and returns nil then. It connects anew after
// every failure, with a jittered back-off of 100 ms to 5 s; certificates are
// read anew each time.
func (c *Client) Run(ctx context.Context) error {
	delay := firstDelay
	for ctx.Err() == nil {
		began := time.Now()
		err := c.stream(ctx)
		if ctx.Err() != nil {
			break
		}
		c.failed(err)
		// A stream that lived is a new start; one that is refused again and again
		// must not be tried ten times a second.
		if time.Since(began) > lastDelay {
			delay = firstDelay
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay/2 + rand.N(delay)):
		}
		delay = min(2*delay, lastDelay)
	}
	return nil
}

// failed notes the end of a stream. The first failure after a connection is
// logged, the next ones only if they tell something new.
func (c *Client) failed(err error) {
	c.mu.Lock()
	news := c.stats.Connected || c.stats.LastError != err.Error()
	c.stats.Failures++
	c.stats.Connected = false
	c.stats.LastError = err.Error()
	c.stats.Refused = nil
	dropped := c.stats.Dropped
	c.mu.Unlock()
	if news {
		c.o.Log.Warn("telemetry is not being delivered", "to", c.o.Target.String(), "error", err, "dropped", dropped)
	}
}

// stream opens one stream and sends until it breaks or ctx ends.
func (c *Client) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := c.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := pushv1.NewTelemetryClient(conn).Push(ctx)
	if err != nil {
		return err
	}
	answers := make(chan *pushv1.Ack)
	ended := make(chan error, 1)
	go func() {
		for {
			ack, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case answers <- ack:
			case <-ctx.Done():
				ended <- ctx.Err()
				return
			}
		}
	}()
	err = c.pump(ctx, stream, answers, ended)
	if !errors.Is(err, errEnded) {
		cancel()
	}
	for {
		select {
		case <-answers:
		case reason := <-ended:
			switch {
			case !errors.Is(err, errEnded):
				return err
			case errors.Is(reason, io.EOF):
				return errors.New("the server ended the stream")
			}
			return reason
		}
	}
}

var errEnded = errors.New("stream ended")

// pump writes frames while the window has room. errEnded means that ended holds
// the reason.
func (c *Client) pump(ctx context.Context, stream pushv1.Telemetry_PushClient, answers <-chan *pushv1.Ack, ended chan error) error {
	var (
		e      encoder
		flying int // frames on the way
	)
	overdue := time.NewTimer(quiet)
	overdue.Stop()
	defer overdue.Stop()
	for {
		for flying < window {
			f, dropped, ok := c.next()
			if !ok {
				break
			}
			c.sequence++
			if err := stream.Send(e.encode(&f, c.sequence, dropped, time.Now())); err != nil {
				return errEnded // io.EOF: the reason comes from Recv
			}
			c.sent()
			if flying++; flying == 1 {
				overdue.Reset(quiet)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			ended <- err
			return errEnded
		case <-overdue.C:
			return fmt.Errorf("no answer for %s", quiet)
		case ack := <-answers:
			// One answer may stand for several frames: the server answers the
			// newest when it is behind.
			before := flying
			flying = int(min(uint64(flying), c.sequence-min(ack.GetSequence(), c.sequence)))
			if overdue.Stop(); flying > 0 {
				overdue.Reset(quiet)
			}
			c.answered(ack, before-flying)
		case <-c.wake:
		}
	}
}

func (c *Client) sent() {
	c.mu.Lock()
	c.stats.Sent++
	c.mu.Unlock()
}

// answered notes an answer, and logs endpoints that the server doesn't take
// whenever they change: that is a fault of somebody's configuration.
func (c *Client) answered(ack *pushv1.Ack, frames int) {
	var refused []Refusal
	for _, r := range ack.GetRefused() {
		if len(refused) == maxRefusals {
			break
		}
		refused = append(refused, Refusal{Endpoint: clip(r.GetAddress()), Reason: clip(r.GetReason())})
	}
	c.mu.Lock()
	refusal := clip(ack.GetError())
	began := !c.stats.Connected && refusal == ""
	news := refusal != c.refusal
	c.refusal = refusal
	changed := !slices.Equal(refused, c.stats.Refused)
	c.stats.Answered += uint64(frames)
	if began {
		c.stats.Connected = true
		c.stats.Connects++
	}
	c.stats.Refused = refused
	c.mu.Unlock()
	if began {
		c.o.Log.Info("telemetry is being delivered", "to", c.o.Target.String(), "node", c.o.Node)
	}
	if refusal != "" && news {
		c.o.Log.Warn("frame was refused", "reason", refusal)
	}
	if changed && len(refused) > 0 {
		c.o.Log.Warn("endpoints are refused", "refused", refused, "more", ack.GetMore())
	}
}

func (c *Client) dial() (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if c.o.TLS != nil {
		config, err := c.o.TLS.load()
		if err != nil {
			return nil, err
		}
		creds = credentials.NewTLS(config)
	}
	target := c.o.Target
	var dialer net.Dialer
	return grpc.NewClient("passthrough:///"+target.Target(),
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, target.Network(), target.Target())
		}),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: quiet}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: quiet}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithDisableServiceConfig(),
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10),
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10),
	)
}
