package fleet

import (
	"fmt"
	"net/netip"
	"sort"
	"time"
)

// Bytes is a size in bytes.
type Bytes int64

// Tokens is a number of model tokens.
type Tokens int64

// Risk is the probability-like score of a GPU: 0 idle … 1 certain to fail its
// next request's latency target.
type Risk float64

// Thresholds of the states that people see. Traffic follows the smooth weight;
// see plan and scorer.
const (
	RiskEject  Risk = 0.82 // above: out of the pool, subject to the gate
	RiskPrefer Risk = 0.35 // below: preferred
)

// State is an endpoint's state as people, audits and EDS see it.
type State uint8

// States.
const (
	StateNeutral   State = iota + 1
	StatePreferred       // risk below RiskPrefer
	StateEjected         // risk above RiskEject, or a hard fault
	StateProbe           // readmitted, slow start running
	StateUnknown         // no telemetry young enough to judge
	StateDraining        // taken out of service by the config: running requests end, no new ones
)

var stateNames = [...]string{"invalid", "neutral", "preferred", "ejected", "probe", "unknown", "draining"}

func (s State) String() string { return name(stateNames[:], uint8(s)) }

func name(names []string, i uint8) string {
	if int(i) >= len(names) {
		i = 0
	}
	return names[i]
}

func (d Dialect) String() string {
	return name([]string{"invalid", "openai", "anthropic"}, uint8(d))
}

func (s Strategy) String() string {
	return name([]string{"invalid", "legacy", "dynamic"}, uint8(s))
}

func (k ClientKey) String() string {
	return name([]string{"invalid", "authorization", "jwt", "mtls", "address"}, uint8(k))
}

func (c RequestClass) String() string {
	return name([]string{"invalid", "interactive", "batch"}, uint8(c))
}

func (p Protocol) String() string {
	return name([]string{"invalid", "http1", "h2c"}, uint8(p))
}

// BurstLevel classes requests by their output budget: 0 … 7.
type BurstLevel uint8

// BurstLevels is the number of levels.
const BurstLevels = 8

// burstBounds[i] is the smallest budget that is above level i: <10, <64, <128,
// <256, <512, <1024, ≤2048, >2048.
var burstBounds = [BurstLevels - 1]Tokens{10, 64, 128, 256, 512, 1024, 2049}

// LevelOf returns the level of an output budget. Budgets below 1 are level 0.
func LevelOf(budget Tokens) BurstLevel {
	for i, bound := range burstBounds {
		if budget < bound {
			return BurstLevel(i)
		}
	}
	return BurstLevels - 1
}

// UpperBudget is the largest budget of a level; for the last level it is 4096,
// a working figure, since the level has no upper end.
func (l BurstLevel) UpperBudget() Tokens {
	if int(l) < len(burstBounds) {
		return burstBounds[l] - 1
	}
	return 4096
}

// SplitWeight is one arm of a split.
type SplitWeight struct {
	Pool   string
	Weight uint32 // any numbers; published as basis points
}

// Split divides a route's requests among pools. The order is part of the draw:
// the canary stands first, and a rise of its weight only adds sessions to it.
type Split []SplitWeight

// BasisPointsTotal is what the published weights of a split sum to.
const BasisPointsTotal = 10_000

// BasisPoints scales the weights to whole basis points that sum to
// BasisPointsTotal, by the largest-remainder method. Ties go to the earlier
// arm. It returns nil when all weights are 0.
func (s Split) BasisPoints() []uint32 {
	var total uint64
	for _, w := range s {
		total += uint64(w.Weight)
	}
	if total == 0 {
		return nil
	}
	points := make([]uint32, len(s))
	rest := make([]uint64, len(s))
	order := make([]int, len(s))
	given := uint32(0)
	for i, w := range s {
		scaled := uint64(w.Weight) * BasisPointsTotal
		points[i] = uint32(scaled / total)
		rest[i] = scaled % total
		order[i] = i
		given += points[i]
	}
	sort.SliceStable(order, func(a, b int) bool { return rest[order[a]] > rest[order[b]] })
	for i := 0; given < BasisPointsTotal; i++ {
		points[order[i]]++
		given++
	}
	return points
}

func (s Split) String() string {
	out := ""
	for i, w := range s {
		if i > 0 {
			out += " "
		}
		out += fmt.Sprintf("%s=%d", w.Pool, w.Weight)
	}
	return out
}

// EndpointKey names an endpoint across the process.
type EndpointKey struct {
	Pool    string
	Address netip.AddrPort
}

// OutcomeKind says what an access-log entry told.
type OutcomeKind uint8

// Outcome kinds.
const (
	// AttemptStarted: an upstream connection is ready and the request is going
	// out to Endpoint.
	AttemptStarted OutcomeKind = iota + 1
	// AttemptEnded: that attempt is over, well or not.
	AttemptEnded
	// Heartbeat: the request is still running on Endpoint.
	Heartbeat
	// RequestEnded: the client's request is over.
	RequestEnded
)

func (k OutcomeKind) String() string {
	return name([]string{"invalid", "attempt_started", "attempt_ended", "heartbeat", "request_ended"}, uint8(k))
}

// Cause classes how an attempt or request ended.
type Cause uint8

// Causes.
const (
	CauseNone          Cause = iota // not ended yet
	CauseOK                         // 1xx–3xx
	CauseClientError                // 4xx other than 429
	CauseThrottled                  // 429
	CauseServerError                // 5xx from the upstream
	CauseConnectFailed              // refused or unreachable
	CauseReset                      // connection or stream reset by the upstream
	CauseTimeout                    // a time limit ran out
	CauseClientGone                 // the caller went away
	CauseLocal                      // Envoy or Fairlead answered itself
)

var causeNames = [...]string{"none", "ok", "client_error", "throttled", "server_error", "connect_failed", "reset", "timeout", "client_gone", "local"}

func (c Cause) String() string {
	if int(c) >= len(causeNames) {
		return "invalid"
	}
	return causeNames[c]
}

// Outcome is what Envoy logged about a request or one of its attempts.
type Outcome struct {
	Kind OutcomeKind
	// Node is the Envoy node id that logged it.
	Node string
	// ID joins entries: the decision id, or Envoy's request id where ext_proc
	// was away.
	ID string
	// Attempt counts from 1; for Heartbeat and RequestEnded it is the attempt
	// running or last run, 0 if there was none.
	Attempt int
	// Endpoint is the server really used (Envoy's upstream_remote_address); the
	// zero value when none was.
	Endpoint EndpointKey
	Route    string
	// Code is the HTTP status, 0 when none was sent.
	Code  int
	Cause Cause
	// HeaderTime is the time from the attempt's start to the first byte of the
	// response headers. It is not the time to the first token.
	HeaderTime time.Duration
	// Duration is the whole time of the attempt or request.
	Duration      time.Duration
	RequestBytes  int64
	ResponseBytes int64
	// RetryAfter is what the upstream's answer told to wait, 0 if nothing; for
	// AttemptEnded.
	RetryAfter time.Duration
	// Usage is what the answer said it took; for RequestEnded.
	Usage Usage
	At    time.Time // arrival
}

// Usage is what a generation took, as the answer itself tells.
type Usage struct {
	// Known is false when the answer told nothing, as on routes without usage.
	// The counts are then 0 and mean nothing.
	Known bool
	// Input counts prompt tokens, Cached the part of them that came from a
	// cache; Output counts generated tokens. Known with an Input of 0 is a stream
	// that broke off: what it had told of its output is known, its prompt is not.
	Input, Cached, Output Tokens
	// Error is true when the answer was a 200 whose stream told an error.
	Error bool
}

// ParseStrategy reads "legacy" or "dynamic".
func ParseStrategy(s string) (Strategy, error) {
	switch s {
	case "legacy":
		return StrategyLegacy, nil
	case "dynamic":
		return StrategyDynamic, nil
	}
	return 0, fmt.Errorf("%q; accepted: legacy, dynamic", s)
}
