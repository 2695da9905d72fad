package extproc

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/plan"
)

const (
	// holdFor is how long a request that finds no place is held before it is
	// refused. A request ends at once, but that it has ended is known only when
	// Envoy's next batch of log entries has come (envoy's logBatchTime, 25 ms):
	// a caller that sends its next request the moment it has an answer would be
	// refused for its own request before. It leaves most of Envoy's message
	// timeout of 200 ms to a machine that is busy.
	holdFor = 60 * time.Millisecond
	// maxHeld bounds the requests that are held at a time, heldEach those of one
	// client (of all that meet in one of heldGroups by their hash): further ones are
	// refused at once, so that who sends without end is not in others' way.
	maxHeld    = 256
	heldEach   = 16
	heldGroups = 256
)

// Ends wakes requests that are held when others may have ended. The zero value
// is ready for use; its methods may be called from several goroutines.
type Ends struct {
	held  atomic.Int32
	each  [heldGroups]atomic.Int32
	blind atomic.Bool
	mu    sync.Mutex
	next  chan struct{} // closed by the next Signal; nil while nobody waits for it
}

// Signal says that a place may have become free. It costs next to nothing while
// nobody is held.
func (e *Ends) Signal() {
	if e.held.Load() == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next != nil {
		close(e.next)
		e.next = nil
	}
}

// SetBlind says whether no access log arrives from anybody: then no end will be
// told of, and nobody is held.
func (e *Ends) SetBlind(blind bool) { e.blind.Store(blind) }

// join lets a client's request be held, if there is room and a point in it.
func (e *Ends) join(of *admission.Client) bool {
	if e == nil || e.blind.Load() {
		return false
	}
	all, own := e.held.Add(1), e.group(of).Add(1)
	if all > maxHeld || own > heldEach {
		e.leave(of)
		return false
	}
	return true
}

func (e *Ends) leave(of *admission.Client) {
	e.held.Add(-1)
	e.group(of).Add(-1)
}

// group counts the held requests of a client and of those it meets.
func (e *Ends) group(of *admission.Client) *atomic.Int32 { return &e.each[int(of[0])%heldGroups] }

// signal is closed by the next Signal.
func (e *Ends) signal() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == nil {
		e.next = make(chan struct{})
	}
	return e.next
}

// find finds a place for a classed request, or refuses it: at once where waiting
// a moment doesn't help, else once it was held for holdFor in vain.
func (s *Service) find(c *call, at time.Time) {
	held := s.try(c, at, s.o.Ends != nil && !c.req.observe)
	if !held {
		return
	}
	early := s.o.Admission != nil && s.o.Admission.Early(&c.ask)
	who := c.ask.Client
	if early || !s.o.Ends.join(&who) {
		s.try(c, at, false)
		return
	}
	defer s.o.Ends.leave(&who)
	c.verdict.held = true
	over := time.NewTimer(holdFor)
	defer over.Stop()
	for {
		ended := s.o.Ends.signal() // before the try: else an end between the two is missed
		if !s.try(c, s.o.Now(), true) {
			return
		}
		select {
		case <-ended:
		case <-over.C:
			s.try(c, s.o.Now(), false)
			return
		}
	}
}

// try decides, reserves and asks admission. Where mayHold is set and an end of
// another request could change the answer, it returns true and leaves nothing
// counted.
func (s *Service) try(c *call, at time.Time, mayHold bool) (held bool) {
	v := &c.verdict
	v.class.Past = 0
	s.place(v, at)
	if !v.class.Generates {
		return false
	}
	if s.o.Admission != nil && v.plan.Further(v.class, &v.decision) {
		if !s.enter(c, at, true) { // a pool behind may have room for it
			return false
		}
		if s.tryFurther(c, at) {
			return false
		}
		v.class.Past = 0
		s.place(v, at)
	}
	if v.decision.Action == plan.ActionRefuse && mayHold && v.decision.Reason == plan.ReasonAllBusy {
		if s.o.Admission != nil {
			s.ask(&c.ask, &c.req, v, at)
		}
		return true
	}
	return s.enter(c, at, mayHold)
}

// tryFurther looks for a pool that lets the request in behind the one that it was
// decided for, which has no share or budget left for it. True reports that it has
// its answer.
func (s *Service) tryFurther(c *call, at time.Time) bool {
	v := &c.verdict
	for v.plan.Further(v.class, &v.decision) {
		v.class.Past = v.decision.Pos + 1
		s.place(v, at)
		if v.decision.Action != plan.ActionSteer {
			return false
		}
		if !s.enter(c, at, true) {
			return true
		}
	}
	return false
}

// enter asks admission for a request that the plan lets pass, and for the advice
// for one that it refuses. It returns what became of Ask.Hold.
func (s *Service) enter(c *call, at time.Time, mayHold bool) (held bool) {
	v := &c.verdict
	if s.o.Admission != nil {
		s.ask(&c.ask, &c.req, v, at)
		c.ask.Hold = mayHold
	}
	if v.decision.Action == plan.ActionRefuse {
		s.refuse(c)
		return false
	}
	if s.o.Admission == nil {
		return false
	}
	if v.admit = s.o.Admission.Admit(&c.ask); !v.admit.Admitted && v.reserved {
		s.o.Ledger.Cancel(v.idString)
		v.reserved = false
	}
	return v.admit.Held
}
