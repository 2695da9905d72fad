package serve

import (
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
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

// countFailure takes the end of a request that no server answered, or the last with an
// error of its own. Callers that left, and answers that we or Envoy refused with, are none.
func (s *Server) countFailure(o *fleet.Outcome) {
	switch o.Cause {
	case fleet.CauseServerError, fleet.CauseConnectFailed, fleet.CauseReset, fleet.CauseTimeout:
		s.failed.count(o.Route + "/" + o.Cause.String())
	}
}

// fullLog tells of a full ledger, every refusalsEvery at most. The zero value is
// ready for use.
type fullLog struct {
	told    time.Time
	dropped uint64 // by then
}

// look says how many attempts the ledger could not count since the last line, of all
// that it has ever dropped.
func (f *fullLog) look(log *slog.Logger, now time.Time, dropped uint64) {
	if dropped == f.dropped || now.Sub(f.told) < refusalsEvery {
		return
	}
	log.Warn("in-flight ledger is full; limits admit nobody until attempts end", "running", accesslog.MaxAttempts, "not_counted", dropped-f.dropped)
	f.told, f.dropped = now, dropped
}

// undecidedLog tells of requests without a decision, every refusalsEvery at most. The zero
// value is ready for use.
type undecidedLog struct {
	told            time.Time
	passed, refused int64 // by then
}

// look says how many passed uncounted, and how many got a 503, since the last line, of all
// that ever did.
func (u *undecidedLog) look(log *slog.Logger, now time.Time, passed, refused int64) {
	if passed == u.passed && refused == u.refused || now.Sub(u.told) < refusalsEvery {
		return
	}
	log.Warn("requests had no decision: ext_proc was away, or later than its 200 ms", "passed_uncounted", passed-u.passed, "refused", refused-u.refused)
	u.told, u.passed, u.refused = now, passed, refused
}

// maxTallied bounds the names of a tally; routes that left the config stay a while.
const maxTallied = 256

// tally counts requests since the last line about them, by why. Its zero value is ready for
// use.
type tally struct {
	told  time.Time // when that was; owned by the tick loop
	mu    sync.Mutex
	byWhy map[string]int64
}

// tell writes a line with the counts, if there are any, every refusalsEvery at most.
func (r *tally) tell(log *slog.Logger, now time.Time, what string) {
	if now.Sub(r.told) < refusalsEvery {
		return
	}
	if why := r.take(); len(why) > 0 {
		log.Warn(what, append(why, "within", refusalsEvery)...)
		r.told = now
	}
}

func (r *tally) count(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byWhy == nil {
		r.byWhy = map[string]int64{}
	}
	if _, there := r.byWhy[why]; there || len(r.byWhy) < maxTallied {
		r.byWhy[why]++
	}
}

// take returns the counts as log attributes, in the order of their names, and
// begins anew.
func (r *tally) take() []any {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []any
	for _, why := range slices.Sorted(maps.Keys(r.byWhy)) {
		out = append(out, why, r.byWhy[why])
	}
	clear(r.byWhy)
	return out
}
