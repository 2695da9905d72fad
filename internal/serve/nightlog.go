package serve

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// maxChangesLogged bounds the lines of one tick; a fleet that changes as a
// whole says so in one more.
const maxChangesLogged = 20

// quietStates are between which an endpoint wanders with its load; a line for
// each step would be noise.
func quietState(state string) bool {
	return state == fleet.StateNeutral.String() || state == fleet.StatePreferred.String()
}

// logChanges says which endpoints were ejected, came back, or are no longer
// known, and why.
func (s *Server) logChanges(before, after *admin.Fleet) {
	old := map[string]string{}
	for _, p := range before.Pools {
		for _, e := range p.Endpoints {
			old[p.Name+" "+e.Address] = e.State
		}
	}
	logged, more := 0, 0
	for _, p := range after.Pools {
		for _, e := range p.Endpoints {
			was, known := old[p.Name+" "+e.Address]
			if !known || was == e.State || quietState(was) && quietState(e.State) {
				continue
			}
			if logged++; logged > maxChangesLogged {
				more++
				continue
			}
			level := slog.LevelInfo
			if e.State == fleet.StateEjected.String() {
				level = slog.LevelWarn
			}
			s.log.Log(s.background, level, "endpoint state changed", "pool", p.Name, "endpoint", e.Name,
				"from", was, "to", e.State, "why", e.Why, "risk", e.Risk, "share", e.Share, "in_flight", e.InFlight,
				"telemetry_error", e.TelemetryError)
		}
	}
	if more > 0 {
		s.log.Warn("more endpoints changed their state", "endpoints", more)
	}
}

// refusalsEvery is how often refused requests are told of, at most.
const refusalsEvery = 10 * time.Second

// logRefusals says how many requests were refused, and why: for want of room, by
// their callers' own limits, or for their size.
func (s *Server) logRefusals(now time.Time) {
	if now.Sub(s.refusedLog) < refusalsEvery {
		return
	}
	var why []any
	for _, r := range []struct {
		name  string
		count *atomic.Int64
	}{{"no_room_in_pools", &s.refused.room}, {"client_limits", &s.refused.limits}, {"size", &s.refused.size}} {
		if n := r.count.Swap(0); n > 0 {
			why = append(why, r.name, n)
		}
	}
	if len(why) > 0 {
		s.log.Warn("requests refused", append(why, "within", refusalsEvery)...)
		s.refusedLog = now
	}
}

// refusals counts refused requests since the last line about them.
type refusals struct{ room, limits, size atomic.Int64 }

func (r *refusals) add(e *extproc.Event) {
	switch {
	case e.Reason == plan.ReasonOversize:
		r.size.Add(1)
	case e.Admission == admission.ReasonConcurrency, e.Admission == admission.ReasonRequests, e.Admission == admission.ReasonTokens,
		e.Admission == admission.ReasonTooMany, e.Admission == admission.ReasonLimiterDown:
		r.limits.Add(1)
	default:
		r.room.Add(1)
	}
}
