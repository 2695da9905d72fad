package extproc

import (
	"hash/maphash"
	"math"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/plan"
)

const (
	// holdFor is how long a request that finds no place is held before it is
	// refused, and holdStep how often it is tried again meanwhile. A request ends at
	// once, but that it has ended is known only when Envoy's next batch of log
	// entries has come (envoy's logBatchTime, 25 ms): a caller that sends its next
	// request the moment it has an answer would be refused for its own request
	// before. holdFor leaves most of Envoy's message timeout of 200 ms to a machine
	// that is busy.
	holdFor  = 60 * time.Millisecond
	holdStep = 10 * time.Millisecond
	// maxHeld bounds the requests that are held at a time, heldEach those of one
	// client (of all that meet in one of heldGroups): further ones are
	// refused at once, so that who sends without end is not in others' way.
	maxHeld    = 256
	heldEach   = 16
	heldGroups = 256
)

// groupSeed spreads clients over groups: who made up credentials could else choose
// theirs, and fill those of others.
var groupSeed = maphash.MakeSeed()

// Held bounds the requests that are held. The zero value is ready for use; its
// methods may be called from several goroutines.
type Held struct {
	all   atomic.Int32
	each  [heldGroups]atomic.Int32
	blind atomic.Bool
}

// SetBlind says whether no access log arrives from anybody: then no end will be
// told of, and nobody is held.
func (h *Held) SetBlind(blind bool) { h.blind.Store(blind) }

// join lets a client's request be held, if there is room and a point in it.
func (h *Held) join(of *admission.Client) bool {
	if h == nil || h.blind.Load() || !below(&h.all, maxHeld) {
		return false
	}
	if below(h.group(of), heldEach) {
		return true
	}
	h.all.Add(-1)
	return false
}

// below adds one to a count that is less than most.
func below(count *atomic.Int32, most int32) bool {
	for {
		n := count.Load()
		if n >= most {
			return false
		}
		if count.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (h *Held) leave(of *admission.Client) {
	h.all.Add(-1)
	h.group(of).Add(-1)
}

// group counts the held requests of a client and of those it meets.
func (h *Held) group(of *admission.Client) *atomic.Int32 {
	return &h.each[maphash.Bytes(groupSeed, of[:])%heldGroups]
}

// find finds a place for a classed request, or refuses it: at once where waiting
// a moment doesn't help, else once it was held for holdFor in vain.
func (s *Service) find(c *call, at time.Time) {
	if s.attempt(c, at) {
		return
	}
	if v := &c.verdict; v.decision.Action == plan.ActionRefuse || byPool(v.admit.Reason) {
		s.await(c)
	}
	if c.keptOut || !s.hold(c, at) {
		s.settle(c, s.o.Now())
	}
}

// hold tries a request again until it has its answer, or was held for holdFor: then
// it returns false. So it does at once for a request that may not be held. One whose
// caller leaves meanwhile gets no answer.
func (s *Service) hold(c *call, at time.Time) bool {
	if s.o.Held == nil || c.req.observe {
		return false
	}
	ask := c.ask // for the pool that it waits for
	if !s.o.Held.join(&ask.Client) {
		return false
	}
	defer s.o.Held.leave(&ask.Client)
	if s.o.Admission != nil {
		if !s.o.Admission.BeginHold(&ask) {
			return false
		}
		defer s.o.Admission.EndHold(&ask)
	}
	c.verdict.held = true
	step := time.NewTicker(holdStep)
	defer step.Stop()
	for before := s.o.Now(); ; {
		select {
		case <-step.C:
		case <-c.stream.Context().Done():
			c.left = true
			return true
		}
		now := s.o.Now()
		c.verdict.heldFor += now.Sub(before)
		s.renew(c)
		if s.attempt(c, now) {
			return true
		}
		// By the clock: on a machine that stalls steps come late.
		if before = s.o.Now(); before.Sub(at) >= holdFor {
			return false
		}
	}
}

// renew goes over to the plan in force, if that knows the request's route.
func (s *Service) renew(c *call) {
	v := &c.verdict
	before, now := v.plan, s.o.Plan()
	if now == nil || now == before {
		return
	}
	if v.plan = now; !v.classify(&c.req) {
		v.plan = before
	}
}

// attempt decides, reserves and asks admission, pool by pool along the chain. It
// returns false, with nothing counted, where an end of another request could change
// the answer.
func (s *Service) attempt(c *call, at time.Time) (answered bool) {
	v := &c.verdict
	v.class.Past, v.admit = 0, admission.Verdict{}
	if v.unread() {
		v.decision = plan.Decision{Action: plan.ActionRefuse, Reason: plan.ReasonUnread, Arm: v.class.Arm}
		return true
	}
	c.keptOut = true
	for {
		v.admit = admission.Verdict{}
		s.place(v, at)
		if !v.class.Generates {
			return true
		}
		if v.decision.Action == plan.ActionRefuse {
			c.keptOut = false
			if v.decision.Reason != plan.ReasonAllBusy {
				s.enter(c, at, false)
				return true
			}
			if s.o.Admission != nil {
				s.ask(&c.ask, &c.req, v, at)
			}
			return false
		}
		if !s.enter(c, at, true) {
			return true
		}
		c.keptOut = c.keptOut && v.admit.Reason == admission.ReasonServerLimit
		past, further := v.plan.Further(v.class, &v.decision)
		if !further || !byPool(v.admit.Reason) {
			return false
		}
		v.class.Past = past
	}
}

// byPool reports whether a refusal may be otherwise in another pool: for a share or
// a level of one, for its servers' own word, and for no place in the one that Envoy would
// choose.
func byPool(why admission.Reason) bool {
	switch why {
	case admission.ReasonShare, admission.ReasonTurn, admission.ReasonLevel, admission.ReasonBusy, admission.ReasonServerLimit:
		return true
	}
	return false
}

// await turns the ask to the pool of the chain that the request waits for, where it has
// the earliest slot. The places of all come free for those that were sent away.
func (s *Service) await(c *call) {
	if s.o.Admission == nil {
		return
	}
	v := &c.verdict
	var few [plan.MaxAttempts]plan.PoolID
	pools := v.plan.Awaited(few[:0], v.class)
	if len(pools) == 1 {
		c.ask.Pool = v.plan.PoolName(pools[0])
		return
	}
	soonest, least := c.ask.Pool, time.Duration(math.MaxInt64)
	for _, id := range pools {
		c.ask.Pool = v.plan.PoolName(id)
		if wait := s.o.Admission.Wait(&c.ask); wait < least {
			soonest, least = c.ask.Pool, wait
		}
	}
	c.ask.Pool = soonest
}

// settle is the last attempt: who finds no place in the first pool that has any is
// refused, and waits for one of the chain.
func (s *Service) settle(c *call, at time.Time) {
	v := &c.verdict
	if v.class.Past == 0 && v.decision.Action == plan.ActionRefuse {
		s.enter(c, at, false) // it was found just now
		return
	}
	v.class.Past, v.admit = 0, admission.Verdict{}
	s.place(v, at)
	if !s.enter(c, at, true) {
		return
	}
	if byPool(v.admit.Reason) {
		s.await(c)
	}
	c.ask.Hold = false
	v.admit = admission.Verdict{
		Reason: v.admit.Reason, Standing: v.admit.Standing,
		Refusal: s.o.Admission.Refuse(&c.ask, v.admit.Reason),
	}
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
