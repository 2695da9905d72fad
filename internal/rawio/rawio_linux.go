package rawio

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/mem"
)

// Listener returns a listener whose TCP and Unix stream connections read and write by raw
// system calls. Others it leaves as they are. A TCP connection ends when what was written
// to it isn't acknowledged for so long as unacknowledged says: grpc-go sets that itself
// (TCP_USER_TIMEOUT, to its keepalive's timeout), but not through a wrapper.
func Listener(l net.Listener, unacknowledged time.Duration) net.Listener {
	return listener{l, unacknowledged}
}

type listener struct {
	net.Listener
	unacknowledged time.Duration
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.wrap(c), nil
}

// wrap returns c with raw reads and writes, or c itself if it has no socket of its own
// that streams.
func (l listener) wrap(c net.Conn) net.Conn {
	var raw syscall.RawConn
	var err error
	switch c := c.(type) {
	case *net.TCPConn:
		if raw, err = c.SyscallConn(); err == nil {
			err = limit(raw, l.unacknowledged)
		}
	case *net.UnixConn:
		if c.LocalAddr().Network() != "unix" {
			return c
		}
		raw, err = c.SyscallConn()
	default:
		return c
	}
	if err != nil {
		return c
	}
	w := &conn{Conn: c, raw: raw}
	w.in.do, w.out.do, w.ready.do = w.in.read, w.out.write, w.ready.read
	return w
}

// limit sets how long what was written may be unacknowledged.
func limit(raw syscall.RawConn, unacknowledged time.Duration) (err error) {
	if e := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unacknowledged.Milliseconds()))
	}); e != nil {
		return e
	}
	return err
}

// conn is a connection. Deadlines, addresses and Close are those of the one inside.
type conn struct {
	net.Conn
	raw   syscall.RawConn
	in    input
	out   output
	ready lateInput
}

// input is a read that is under way. It is a field, and do its method value, so that
// reading allocates nothing.
type input struct {
	mu  sync.Mutex
	b   []byte
	n   int
	err error
	do  func(fd uintptr) bool
}

// read returns false where there is nothing yet.
func (i *input) read(fd uintptr) bool {
	i.n, i.err = call(unix.SYS_READ, fd, i.b)
	return i.err != unix.EAGAIN
}

// Read is net.Conn's.
func (c *conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return c.Conn.Read(b)
	}
	i := &c.in
	i.mu.Lock()
	defer i.mu.Unlock()
	i.b = b
	err := c.raw.Read(i.do)
	n, callErr := i.n, i.err
	i.b, i.n, i.err = nil, 0, nil
	return c.result("read", n, err, callErr)
}

// result is what a read returns. A stream that ended has nothing to read, without an error.
func (c *conn) result(op string, n int, waitErr, callErr error) (int, error) {
	switch {
	case waitErr != nil:
		return 0, waitErr // package net's: closed, or past a deadline
	case callErr != nil:
		return 0, c.failed(op, callErr)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// lateInput is a read whose buffer is taken when there is something to read.
type lateInput struct {
	mu   sync.Mutex
	size int
	pool mem.BufferPool
	b    *[]byte
	n    int
	err  error
	do   func(fd uintptr) bool
}

// read returns false where there is nothing yet.
func (i *lateInput) read(fd uintptr) bool {
	i.b = i.pool.Get(i.size)
	if i.n, i.err = call(unix.SYS_READ, fd, *i.b); i.err != nil {
		i.pool.Put(i.b)
		i.b = nil
	}
	return i.err != unix.EAGAIN
}

// ReadOnReady waits until there is something to read, takes a buffer of that size from the
// pool and reads into it. The caller puts the buffer back. grpc-go's transports read so
// where they can, so that connections which wait for requests hold no buffer.
func (c *conn) ReadOnReady(size int, pool mem.BufferPool) (b *[]byte, n int, err error) {
	i := &c.ready
	i.mu.Lock()
	defer i.mu.Unlock()
	i.size, i.pool = size, pool
	err = c.raw.Read(i.do)
	b, n, callErr := i.b, i.n, i.err
	i.pool, i.b, i.n, i.err = nil, nil, 0, nil
	if n, err = c.result("read", n, err, callErr); err != nil && b != nil {
		pool.Put(b)
		b = nil
	}
	return b, n, err
}

// output is a write that is under way.
type output struct {
	mu  sync.Mutex
	b   []byte // what is left of it
	err error
	do  func(fd uintptr) bool
}

// write returns false where there is no room for all.
func (o *output) write(fd uintptr) bool {
	for len(o.b) > 0 {
		n, err := call(unix.SYS_WRITE, fd, o.b)
		if err != nil {
			o.err = err
			return err != unix.EAGAIN
		}
		o.b = o.b[n:]
	}
	o.err = nil
	return true
}

// Write is net.Conn's.
func (c *conn) Write(b []byte) (int, error) {
	o := &c.out
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = b
	err := c.raw.Write(o.do)
	n, callErr := len(b)-len(o.b), o.err
	o.b, o.err = nil, nil
	switch {
	case err != nil:
		return n, err
	case callErr != nil:
		return n, c.failed("write", callErr)
	}
	return n, nil
}

// failed is an error as package net has it.
func (c *conn) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: c.LocalAddr().Network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(op, err)}
}

// maxCall is how much is read or written at a time, as in package internal/poll.
const maxCall = 1 << 30

// call reads into b, or writes from it, again if a signal came between.
func call(number, fd uintptr, b []byte) (int, error) {
	b = b[:min(len(b), maxCall)]
	for {
		n, err := once(number, fd, b)
		if err != unix.EINTR {
			return n, err
		}
	}
}
