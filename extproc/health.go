package extproc

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	grpchealth "google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// A handler takes microseconds, and holdFor where its request is held. One that has
// run for blockedAfter is stuck, not slow: Envoy would wait its message timeout for every request, for ever, since
// timeouts don't eject an ext_proc server (measured on Envoy 1.40.0).
const (
	blockedAfter  = time.Second
	watchInterval = 250 * time.Millisecond
)

// health answers Envoy's gRPC health check of the ext_proc cluster.
type health struct {
	server *grpchealth.Server

	mu      sync.Mutex
	wanted  bool // by SetServing
	blocked bool // by the watchdog
}

func (h *health) init() {
	h.server = grpchealth.NewServer()
	h.wanted = true
	h.publish()
}

func (h *health) register(g *grpc.Server) { healthv1.RegisterHealthServer(g, h.server) }

// publish is called with the lock held (or before the value is shared).
func (h *health) publish() {
	state := healthv1.HealthCheckResponse_NOT_SERVING
	if h.wanted && !h.blocked {
		state = healthv1.HealthCheckResponse_SERVING
	}
	h.server.SetServingStatus("", state)
	h.server.SetServingStatus(ServiceName, state)
}

// SetServing says whether Envoy should use this server: false before a
// shutdown, so that requests go on without it.
func (h *health) SetServing(yes bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wanted = yes
	h.publish()
}

// Healthy is what the health check answers.
func (h *health) Healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.wanted && !h.blocked
}

// setBlocked reports whether that changed anything.
func (h *health) setBlocked(yes bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.blocked == yes {
		return false
	}
	h.blocked = yes
	h.publish()
	return true
}

// Run is the watchdog: while a handler is stuck, the health check answers
// NOT_SERVING and Envoy goes on without ext_proc. It returns nil when ctx ends.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.watch()
		}
	}
}

func (s *Service) watch() {
	blocked := s.busy.oldest(s.o.Now()) >= blockedAfter
	if !s.setBlocked(blocked) {
		return
	}
	if blocked {
		s.o.Log.Error("an ext_proc handler is stuck; health answers NOT_SERVING until it ends")
	} else {
		s.o.Log.Warn("ext_proc handlers run again; health answers SERVING")
	}
}

// busy remembers when the handlers now running began. It has room for marks
// handlers at a time; further ones are not watched.
type busy struct {
	next  atomic.Uint32
	began [marks]atomic.Int64 // Unix nanoseconds; 0: free
}

const marks = 2 * maxHeld

// enter takes a mark, or returns −1 when there is none free nearby.
func (b *busy) enter(at time.Time) int {
	first := b.next.Add(1)
	for i := range uint32(4) {
		m := int((first + i) % marks)
		if b.began[m].CompareAndSwap(0, at.UnixNano()) {
			return m
		}
	}
	return -1
}

func (b *busy) leave(mark int) {
	if mark >= 0 {
		b.began[mark].Store(0)
	}
}

// oldest is how long the longest-running handler has been running.
func (b *busy) oldest(now time.Time) time.Duration {
	var longest time.Duration
	for i := range b.began {
		if at := b.began[i].Load(); at != 0 {
			longest = max(longest, now.Sub(time.Unix(0, at)))
		}
	}
	return longest
}
