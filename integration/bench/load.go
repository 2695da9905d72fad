package main

import (
	"bufio"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// maxConnections bounds what is in flight; a load that needs more than these is
// above what the machine carries, and its latencies say so.
const maxConnections = 256

// load sends one request over and over to one address at a fixed rate, whatever
// the answers do (open loop), over kept connections.
type load struct {
	address string
	request []byte
	most    int // connections

	free  chan *clientConn // last in, first out would need a lock; order matters little
	all   []*clientConn
	ready sync.WaitGroup

	mu     sync.Mutex
	took   []time.Duration
	failed atomic.Int64
	// steered counts answers that name a decision's strategy.
	steered atomic.Int64
	// why is the first failure.
	why atomic.Pointer[string]
	// pending are requests without an answer yet.
	pending atomic.Int64
}

// epoch is what clientConn counts from.
var epoch = time.Now()

type clientConn struct {
	conn  net.Conn
	start atomic.Int64 // of the request that runs, in ns since epoch; 0 when none does
}

func newLoad(address string, request []byte) *load {
	return &load{address: address, request: request, most: maxConnections, free: make(chan *clientConn, maxConnections)}
}

func (l *load) fail(err error) {
	l.failed.Add(1)
	text := err.Error()
	l.why.CompareAndSwap(nil, &text)
}

// result is what one run saw.
type result struct {
	sent, failed int
	steered      int // answers that took a decision's route
	waited       int // requests that were due when no connection was free
	p50, p99     time.Duration
	planned      time.Duration // how long requests were to be sent
	took         time.Duration // wall time from the first request to the last answer
}

// carried reports whether the rate was offered and answered. Where requests queue
// up, a server reads and writes many at once, and each costs less than it would at
// the rate. A twentieth and tardy of wall time are allowed, and one request in a
// hundred without a connection.
func (r result) carried() bool {
	return r.took <= r.planned+r.planned/20+tardy && r.waited*100 <= r.sent
}

const tardy = 200 * time.Millisecond

// run sends rate requests a second for d and waits for the last answer. A
// request's latency counts from the moment it was due, however late it was sent:
// counted from later, whoever makes the sender wait would seem fast.
func (l *load) run(rate float64, d time.Duration) (result, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Without it this thread wakes up 50 µs after each request was due. 0 sets the
	// default again (prctl(2)).
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	defer func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) }()
	l.mu.Lock()
	l.took = l.took[:0]
	l.mu.Unlock()
	l.failed.Store(0)
	l.steered.Store(0)
	l.why.Store(nil)

	n := int(rate * d.Seconds())
	gap := time.Duration(float64(time.Second) / rate)
	begin := time.Now()
	waited := 0
	for i := range n {
		due := begin.Add(time.Duration(i) * gap)
		if wait := time.Until(due); wait > 0 {
			sleep(wait)
		}
		if l.exhausted() {
			waited++
		}
		c, err := l.connection()
		if err != nil {
			return result{}, err
		}
		l.pending.Add(1)
		c.start.Store(int64(due.Sub(epoch)))
		if _, err := c.conn.Write(l.request); err != nil {
			// Its reader fails too, and counts it.
			_ = c.conn.Close()
		}
	}
	for deadline := time.Now().Add(5 * time.Second); l.pending.Load() > 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	r := result{sent: n, failed: int(l.failed.Load() + l.pending.Load()), steered: int(l.steered.Load()), waited: waited, planned: d, took: time.Since(begin)}
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.took)
	if len(l.took) > 0 {
		r.p50, r.p99 = l.took[len(l.took)/2], l.took[len(l.took)*99/100]
	}
	return r, nil
}

// sleep is exact to some tens of microseconds; the runtime's timers are rounded
// up to a millisecond where nothing else runs.
func sleep(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal may end it early: then the request is early by that much
}

// exhausted reports whether a request would have to wait for a connection.
func (l *load) exhausted() bool { return len(l.free) == 0 && len(l.all) >= l.most }

// connection takes a free connection, opens one, or waits.
func (l *load) connection() (*clientConn, error) {
	select {
	case c := <-l.free:
		return c, nil
	default:
	}
	if len(l.all) < l.most {
		conn, err := net.Dial("tcp", l.address)
		if err != nil {
			return nil, err
		}
		c := &clientConn{conn: conn}
		l.all = append(l.all, c)
		l.ready.Go(func() { l.read(c) })
		return c, nil
	}
	select {
	case c := <-l.free:
		return c, nil
	case <-time.After(10 * time.Second):
		return nil, fmt.Errorf("%s: no connection became free in 10 s: %s", l.address, l.reason())
	}
}

func (l *load) reason() string {
	if p := l.why.Load(); p != nil {
		return *p
	}
	return "no answers"
}

func (l *load) read(c *clientConn) {
	r := bufio.NewReaderSize(c.conn, 16<<10)
	for {
		m, err := readMessage(r)
		if err != nil {
			if c.start.Load() != 0 {
				l.fail(err)
				l.pending.Add(-1)
			}
			return
		}
		took := time.Since(epoch) - time.Duration(c.start.Swap(0))
		if m.status != 200 {
			l.fail(fmt.Errorf("status %d", m.status))
		}
		if m.steered {
			l.steered.Add(1)
		}
		l.mu.Lock()
		l.took = append(l.took, took)
		l.mu.Unlock()
		l.pending.Add(-1)
		l.free <- c
	}
}

func (l *load) close() {
	for _, c := range l.all {
		_ = c.conn.Close()
	}
	l.ready.Wait()
}
