package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fleet is a set of simulated model servers.
type Fleet struct {
	log     *slog.Logger
	servers []*Server
}

// New returns a fleet that does nothing yet. log may be nil.
func New(cfg *Config, log *slog.Logger) (*Fleet, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("build fleet: %w", err)
	}
	f := &Fleet{log: log}
	for _, sc := range cfg.Servers {
		s := newServer(sc, cfg.Seed, log)
		s.addr = sc.Listen
		f.servers = append(f.servers, s)
	}
	for _, sf := range cfg.Faults {
		if err := f.Inject(sf.Server, sf.Fault); err != nil {
			return nil, fmt.Errorf("build fleet: %w", err)
		}
	}
	return f, nil
}

// Servers returns the servers in the order of the config.
func (f *Fleet) Servers() []*Server { return slices.Clone(f.servers) }

// Inject schedules a fault of a server; see [Fault.At]. It may be called before,
// during and after Run.
func (f *Fleet) Inject(server string, fault Fault) error {
	if err := fault.check(); err != nil {
		return fmt.Errorf("inject into server %q: %w", server, err)
	}
	names := make([]string, len(f.servers))
	for i, s := range f.servers {
		if s.cfg.Name == server {
			if !s.inject(fault) {
				return fmt.Errorf("inject into server %q: %d faults are scheduled already; accepted: at most that many", server, maxFaults)
			}
			return nil
		}
		names[i] = s.cfg.Name
	}
	return fmt.Errorf("inject fault: no server is named %q; accepted: %s", server, strings.Join(names, ", "))
}

// Listen binds the ports of all servers, or none: when one is taken the error
// names server and address.
func (f *Fleet) Listen() error {
	for i, s := range f.servers {
		if err := s.listen(); err != nil {
			for _, opened := range f.servers[:i] {
				_ = opened.listener.Close() // nothing was accepted yet
				opened.listener = nil
			}
			return err
		}
	}
	return nil
}

func (s *Server) listen() error {
	ln, err := net.Listen("tcp", s.Addr().String())
	if err != nil {
		return fmt.Errorf("listen for server %q on %s: %w", s.cfg.Name, s.Addr(), err)
	}
	s.listener = ln
	s.mu.Lock()
	s.addr = ln.Addr().(*net.TCPAddr).AddrPort()
	s.addr = netip.AddrPortFrom(s.addr.Addr().Unmap(), s.addr.Port())
	s.mu.Unlock()
	return nil
}

// Run serves until ctx ends, then cuts what is still under way and returns nil
// after all goroutines have ended. It binds the ports if Listen did not. It can
// run once.
func (f *Fleet) Run(ctx context.Context) error {
	for _, s := range f.servers {
		if s.listener == nil {
			if err := f.Listen(); err != nil {
				return err
			}
			break
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(f.servers))
	now := time.Now()
	var running sync.WaitGroup
	for _, s := range f.servers {
		running.Go(func() {
			if err := s.run(ctx, now); err != nil {
				errs <- err
				cancel()
			}
		})
	}
	running.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// run is a server's life.
func (s *Server) run(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.startFaults(now)
	var parts sync.WaitGroup
	parts.Go(func() { s.steps(ctx) })
	parts.Go(func() { s.runFaults(ctx) })
	err := s.serve(ctx)
	cancel()
	parts.Wait()
	return err
}

// serve answers HTTP except while crashed.
func (s *Server) serve(ctx context.Context) error {
	for {
		if err := s.serveUntilCrash(ctx); err != nil {
			return fmt.Errorf("serve server %q: %w", s.cfg.Name, err)
		}
		if ctx.Err() != nil || !s.awaitCrash(ctx, false) || !s.listenAgain(ctx) {
			return nil
		}
	}
}

// listenAgain binds the same port until it succeeds or ctx ends.
func (s *Server) listenAgain(ctx context.Context) bool {
	for {
		err := s.listen()
		if err == nil {
			return true
		}
		s.log.Warn("cannot come back", "error", err)
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return false
		}
	}
}

// serveUntilCrash serves the listener until a crash, which resets every
// connection, or until ctx ends, which closes them.
func (s *Server) serveUntilCrash(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	ln := &trackedListener{Listener: s.listener, conns: map[*trackedConn]struct{}{}}
	srv := s.httpServer(ctx)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.awaitCrash(ctx, true)
	}()
	var err error
	select {
	case err = <-served:
	case <-stopped:
		_ = ln.Close() // Serve returns for it
		<-served
	}
	cancel() // handlers give up
	<-stopped
	ln.closeAll(parent.Err() == nil)
	quiet, done := context.WithTimeout(context.Background(), 5*time.Second)
	defer done()
	if e := srv.Shutdown(quiet); e != nil {
		_ = srv.Close()
	}
	return err
}

func (s *Server) httpServer(ctx context.Context) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           s.handler,
		Protocols:         &protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxQueue},
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// trackedListener knows its open connections, to be able to reset them.
type trackedListener struct {
	net.Listener
	mu    sync.Mutex
	conns map[*trackedConn]struct{}
}

type trackedConn struct {
	*net.TCPConn
	owner *trackedListener
}

// Accept implements net.Listener.
func (l *trackedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	conn := &trackedConn{c.(*net.TCPConn), l}
	l.mu.Lock()
	l.conns[conn] = struct{}{}
	l.mu.Unlock()
	return conn, nil
}

// Close implements net.Conn.
func (c *trackedConn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.conns, c)
	c.owner.mu.Unlock()
	return c.TCPConn.Close()
}

// closeAll closes every connection, with a reset if asked to: what clients of a
// dying process see.
func (l *trackedListener) closeAll(reset bool) {
	l.mu.Lock()
	conns := make([]*trackedConn, 0, len(l.conns))
	for c := range l.conns {
		conns = append(conns, c)
	}
	l.mu.Unlock()
	for _, c := range conns {
		if reset {
			_ = c.SetLinger(0) // a connection already gone needs none
		}
		_ = c.Close()
	}
}
