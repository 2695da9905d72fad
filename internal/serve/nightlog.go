package serve

import (
	"log/slog"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
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

// logRefusals says how many requests were refused for want of room.
func (s *Server) logRefusals(now time.Time) {
	if now.Sub(s.refusedLog) < refusalsEvery {
		return
	}
	if n := s.refused.Swap(0); n > 0 {
		s.log.Warn("requests refused: every endpoint that may serve them is at maxInFlight", "requests", n, "within", refusalsEvery)
		s.refusedLog = now
	}
}
