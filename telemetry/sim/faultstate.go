package sim

import (
	"context"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// faultState is what goes wrong with a server now and later. It is guarded by
// the server's lock.
type faultState struct {
	running  bool    // Run has begun: schedule holds times of day
	early    []Fault // injected before Run
	schedule []faultEvent
	active   [faultKinds]activeFault
	serial   uint64
	changed  chan struct{} // closed and replaced when active changes
}

// faultEvent is the begin or the end of a fault.
type faultEvent struct {
	at    time.Time
	begin bool
	fault Fault
	id    uint64 // of the begin that an end belongs to
}

// activeFault is a fault under way. Of two of one kind the later counts, and
// the end of the earlier does not end it.
type activeFault struct {
	on     bool
	factor float64
	id     uint64
}

// on reports whether a fault of the kind is under way. The caller holds the
// lock, as for the methods below.
func (s *Server) on(kind FaultKind) bool { return s.faults.active[kind].on }

// xid is the code on the GPU page, 0 for none.
func (s *Server) xid() int {
	if !s.on(XID) {
		return 0
	}
	return int(s.faults.active[XID].factor)
}

// hung reports whether the engine stands still.
func (s *Server) hung() bool { return xidStops(s.xid()) || s.on(Crash) }

// inject adds a fault and reports whether there was room for it.
func (s *Server) inject(f Fault) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	fs := &s.faults
	if len(fs.early) >= maxFaults || len(fs.schedule) >= maxFaults {
		return false
	}
	if !fs.running {
		fs.early = append(fs.early, f)
		return true
	}
	s.plan(f, time.Now())
	notify(s.rerun)
	return true
}

// plan puts a fault on the schedule.
func (s *Server) plan(f Fault, from time.Time) {
	s.faults.schedule = append(s.faults.schedule, faultEvent{at: from.Add(f.At), begin: true, fault: f})
	s.sortSchedule()
}

func (s *Server) sortSchedule() {
	slices.SortStableFunc(s.faults.schedule, func(a, b faultEvent) int { return a.at.Compare(b.at) })
}

// startFaults fixes the times of the faults injected before Run.
func (s *Server) startFaults(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.running = true
	for _, f := range s.faults.early {
		s.plan(f, now)
	}
	s.faults.early = nil
	s.applyDue(now)
}

// runFaults begins and ends faults at their times.
func (s *Server) runFaults(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait := time.Hour
		s.mu.Lock()
		s.applyDue(time.Now())
		if len(s.faults.schedule) > 0 {
			wait = time.Until(s.faults.schedule[0].at)
		}
		s.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-s.rerun:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) applyDue(now time.Time) {
	fs := &s.faults
	for len(fs.schedule) > 0 && !fs.schedule[0].at.After(now) {
		ev := fs.schedule[0]
		fs.schedule = slices.Delete(fs.schedule, 0, 1)
		if ev.begin {
			s.beginFault(ev)
		} else if fs.active[ev.fault.Kind].id == ev.id {
			s.endFault(ev.fault.Kind)
		}
	}
}

func (s *Server) beginFault(ev faultEvent) {
	fs, f := &s.faults, ev.fault
	if f.Kind == Frozen && !s.on(Frozen) {
		s.freeze()
	}
	fs.serial++
	fs.active[f.Kind] = activeFault{on: true, factor: f.Factor, id: fs.serial}
	if f.For > 0 {
		fs.schedule = append(fs.schedule, faultEvent{at: ev.at.Add(f.For), fault: f, id: fs.serial})
		s.sortSchedule()
	}
	switch f.Kind {
	case Slow:
		s.engine.SetSlow(f.Factor)
	case OutOfMemory:
		s.kill(errOutOfMemory)
	case Crash:
		s.kill(errCrashed)
		s.restartEngine()
	}
	s.faultsChanged()
	s.log.Info("fault begins", "fault", f.Kind.String(), "factor", f.Factor, "for", f.For)
}

func (s *Server) endFault(kind FaultKind) {
	s.faults.active[kind] = activeFault{}
	switch kind {
	case Slow:
		s.engine.SetSlow(1)
	case Frozen:
		s.frozenEngine, s.frozenGPU = nil, nil
	}
	notify(s.work) // a hang may be over
	s.faultsChanged()
	s.log.Info("fault ends", "fault", kind.String())
}

// restartEngine replaces the engine as a new process would.
func (s *Server) restartEngine() {
	slow := s.engine.Slow()
	s.engine = engine.New(s.cfg.Engine)
	s.engine.SetSlow(slow)
}

func (s *Server) faultsChanged() {
	close(s.faults.changed)
	s.faults.changed = make(chan struct{})
}

// awaitCrash waits until the server is, or is no longer, crashed, and reports
// whether that came before ctx ended.
func (s *Server) awaitCrash(ctx context.Context, crashed bool) bool {
	for {
		s.mu.Lock()
		now, changed := s.on(Crash), s.faults.changed
		s.mu.Unlock()
		if now == crashed {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}
