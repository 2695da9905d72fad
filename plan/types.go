// Package plan turns fleet state into an immutable Plan and requests into
// decisions. It is pure: no clock, no I/O, no protobuf, no goroutine. The same
// Inputs compile to the same Plan with the same digest, and the same (plan,
// class, seed, live counts) give the same Decision.
//
// Invariants: a Plan is never written after Compile; Decide takes constant time
// as long as an endpoint below its limit is among the first few draws, and
// allocates nothing.
package plan

import (
	"net/netip"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Inputs is everything a plan depends on.
type Inputs struct {
	// Tick counts the telemetry ticks that led here; it is part of the digest.
	Tick   uint64
	Pools  []PoolInput
	Routes []RouteInput
}

// PoolInput is one pool at one tick.
type PoolInput struct {
	Name string
	Tier string
	// SpillAt is the share of its endpoints' capacity from which a zone's requests
	// go to other zones too, 0 … 1; 0 stands for DefaultSpillAt. See Class.Zone.
	SpillAt   float64
	Endpoints []EndpointInput
	// Backlogged marks burst levels that are at their budget while the pool is
	// full. Requests of the next larger level then go to idle endpoints, those
	// with at most half of their limit in flight and a risk below
	// fleet.RiskPrefer, if the pool has any.
	Backlogged [fleet.BurstLevels]bool
}

// DefaultSpillAt leaves a zone the room that a burst inside one tick takes.
const DefaultSpillAt = 0.7

// EndpointInput is one endpoint at one tick.
type EndpointInput struct {
	Address netip.AddrPort
	// Zone is where the endpoint is; "" is nowhere in particular.
	Zone string
	// Slot indexes the live counter of this endpoint; stable for the life of
	// the process.
	Slot uint32
	// Weight ≥ 0 is the share of new requests relative to the pool's other
	// endpoints; 0 means none. In StateDraining it counts as 0.
	Weight float64
	// MaxInFlight bounds concurrent attempts; 0 means unlimited.
	MaxInFlight int32
	// InFlight ≥ 0 is how many attempts were in flight at the tick. It sets the
	// mean that the load bound of sessions goes by; limits go by the live count.
	InFlight int32
	// KVFree is the free part of the KV cache in tokens, or −1 if unknown.
	KVFree fleet.Tokens
	// KVSize is the whole KV cache in tokens, or 0 if unknown.
	KVSize fleet.Tokens
	Risk   fleet.Risk
	// Closed says that the endpoint told callers to stay away for now (a 429 or
	// 503 with a time to wait): it counts as full, whatever is in flight.
	Closed bool
	// Failing says that the endpoint's last attempts failed. Where the chain has another
	// to send to whose didn't, it takes at most Trial at a time, 0 for none; where all
	// fail, it is as any other.
	Failing bool
	Trial   int32
	// State StateDraining keeps the endpoint out of every choice, also where
	// nothing else is left: who drains a server wants to stop it. It is no room
	// for requests that Envoy steers either, since Envoy is told the same.
	State fleet.State
}

// weight is the endpoint's weight in the tables.
func (e *EndpointInput) weight() float64 {
	if e.State == fleet.StateDraining {
		return 0
	}
	return e.Weight
}

// capacity is how many attempts the endpoint can well have in flight: its limit,
// less its risk, which knows more of what is possible. An endpoint without a
// limit counts like the default of a pool.
func (e *EndpointInput) capacity() float64 {
	if e.Closed {
		return 0
	}
	return float64(e.limit()) * (1 - float64(e.Risk))
}

// idle reports whether the endpoint has much to spare; see PoolInput.Backlogged.
func (e *EndpointInput) idle() bool {
	return !e.Closed && e.Risk < fleet.RiskPrefer && int64(e.InFlight)*2 <= int64(e.limit())
}

// unlimitedInFlight stands for an endpoint without a limit: the default limit of a
// pool.
const unlimitedInFlight = 256

func (e *EndpointInput) limit() int32 {
	if e.MaxInFlight == 0 {
		return unlimitedInFlight
	}
	return e.MaxInFlight
}

// RouteInput is one route at one tick.
type RouteInput struct {
	Name           string
	Dialect        fleet.Dialect
	Strategy       fleet.Strategy
	ClientStrategy fleet.ClientStrategy
	TrustDeclared  bool
	// DefaultBudget is the output budget of requests that declare none.
	DefaultBudget fleet.Tokens
	// FirstTokenMillis, if not 0, is the per-attempt limit for streaming
	// requests.
	FirstTokenMillis uint32
	// Split are the pools of the first group, in draw order: those that Envoy
	// draws, that is, those of weight > 0.
	Split []string
	// Fallback are the pools after those of the split: the split's pools of
	// weight 0, which get no draw, then the route's fallback.
	Fallback []string
	// Affinity AffinitySession sends the requests of one session to one endpoint
	// of the pool while that endpoint has room; 0 is AffinityNone.
	Affinity fleet.Affinity
	// ClientKey and Claim say what tells the route's clients apart.
	ClientKey fleet.ClientKey
	Claim     string
	Class     fleet.RequestClass
	// Limited: a limit counts for the route, and its answers tell where a client
	// stands.
	Limited bool
	// MaxOutput is the model's limit on output tokens, 0 if unknown; Oversize and
	// NoRoom say what becomes of requests above it, and of those that no endpoint
	// has room for now. 0 is OversizePass.
	MaxOutput        fleet.Tokens
	Oversize, NoRoom fleet.Oversize
	// BytesPerToken turns a body's length into prompt tokens; 0 is
	// DefaultBytesPerToken.
	BytesPerToken float64
	// ComputedRetry: the answer's headers come to Fairlead when its status is one
	// that may lack retry fields.
	ComputedRetry bool
	// RefuseUnread: requests whose budget nobody could read are refused.
	RefuseUnread bool
	// ReadUser: the body's user names the session where nothing else does.
	ReadUser bool
	// MaxBody is the largest body that Envoy lets pass on the route, as far as is
	// known here; 0 is unknown.
	MaxBody fleet.Bytes
}

// DefaultBytesPerToken: one token is about four characters of English text
// (OpenAI's tokenizer page).
const DefaultBytesPerToken = 4

// Live reports how many attempts are in flight on an endpoint's slot.
type Live interface {
	InFlight(slot uint32) int32
}

// RouteID and PoolID index a Plan's routes and pools.
type (
	RouteID int16
	PoolID  int16
)

// NoPool stands for no pool.
const NoPool PoolID = -1

// ZoneID indexes the zones of a Plan's endpoints, from 1 on; 0 is none.
type ZoneID uint16

// Class is what a decision needs to know of a request.
type Class struct {
	Route RouteID
	// Arm is the pool that Envoy drew; NoPool if unknown.
	Arm      PoolID
	Level    fleet.BurstLevel
	Strategy fleet.Strategy
	// Budget is the exact output budget; 0 is unknown: then no size is refused.
	// It counts only for RouteInput.Oversize and NoRoom.
	Budget fleet.Tokens
	// Prompt is the estimated length of the prompt; 0 or less is unknown. The
	// request needs that much and its level's upper budget in an endpoint's free
	// KV cache; endpoints that are known to have less are taken only when no other of
	// the pool has room. Requests are never moved to another pool for that: the
	// estimate is rough, and a full KV cache empties. Only where RouteInput.NoRoom says
	// so they are refused, for now, unless one of the largest caches is empty.
	Prompt fleet.Tokens
	// Session is what requests that belong together share; 0 is none. It counts
	// on routes with AffinitySession.
	Session Session
	// Zone is where the asking sidecar is; 0 if that is unknown, or where no
	// endpoint is. In a pool with endpoints there and elsewhere, those there serve
	// while fewer attempts are in flight on them than SpillAt of their capacity,
	// which is their limit · (1 − risk). Beyond that the whole pool serves, each
	// endpoint by its weight, so that neither a small zone nor the one next to it
	// is overloaded.
	Zone ZoneID
	// Generates is false for paths that do not generate tokens: such requests
	// are steered but never shed.
	Generates bool
	// PromptAtLeast is what the prompt has at least, however long its tokens are; it is
	// no more than Prompt. Only that refuses a request for good, and only that counts
	// against it while one of the largest KV caches is empty.
	PromptAtLeast fleet.Tokens
	// Past is how many pools at the begin of the chain are passed by, as when
	// admission let the request into none of them.
	Past uint8
}

// Action is what to do with a request.
type Action uint8

// Actions.
const (
	ActionSteer  Action = iota + 1 // name the endpoints
	ActionLeave                    // let Envoy choose
	ActionRefuse                   // answer 429, or 400 with ReasonOversize, ReasonNeverFits and ReasonUnread
)

// Reason says why; one enum for logs, metric labels, headers and records.
type Reason uint8

// Reasons.
const (
	ReasonWeighted     Reason = iota + 1 // two weighted draws, fewer in flight won
	ReasonLegacy                         // the strategy is legacy
	ReasonUnknownRoute                   // the plan doesn't know the route
	ReasonNoPlan                         // no plan yet
	ReasonNoTelemetry                    // weights are plain capacity: no telemetry source or none young enough
	ReasonPoolEmpty                      // moved: the drawn pool has no endpoint to send to
	ReasonSpill                          // moved: every endpoint of the drawn pool is at its limit, or fails
	ReasonAllBusy                        // refused: every endpoint that may serve is at its limit
	ReasonNothingAlive                   // no pool of the chain has an endpoint; left to Envoy
	ReasonUnknownArm                     // the route splits and the drawn pool is unknown; left to Envoy
	ReasonAffinity                       // the session's own endpoint
	ReasonZoneSpill                      // an endpoint of another zone: those of the sidecar's have no room
	ReasonOversize                       // refused: the budget is above the model's limit; Decision.Fits is that
	ReasonNoRoom                         // refused: no endpoint's KV cache has room now, and none is empty; Decision.Fits is what has
	ReasonUnread                         // refused before a decision: nobody could read the body; see RouteInput.RefuseUnread
	ReasonNeverFits                      // refused: more than the whole of any endpoint's KV cache; Decision.Fits is what fits
	ReasonNotAdmitted                    // moved: admission let it into none of the pools before; see Class.Past
	ReasonBodyTooLarge                   // not decided: Envoy answers a 413, see RouteInput.MaxBody
	reasonCount
)

var reasonNames = [reasonCount]string{
	"invalid", "weighted", "legacy", "unknown_route", "no_plan", "no_telemetry",
	"pool_empty", "spill", "all_busy", "nothing_alive", "unknown_arm", "affinity", "zone_spill",
	"oversize", "no_room", "unread", "never_fits", "not_admitted", "body_too_large",
}

func (r Reason) String() string {
	if r >= reasonCount {
		r = 0
	}
	return reasonNames[r]
}

// Reasons lists all valid reasons, for metric label sets.
func Reasons() []Reason {
	out := make([]Reason, 0, reasonCount-1)
	for r := Reason(1); r < reasonCount; r++ {
		out = append(out, r)
	}
	return out
}

// MaxAttempts bounds the length of a decision's host list.
const MaxAttempts = 8

// Pick is one entry of the host list.
type Pick struct {
	Pool     PoolID
	Endpoint int32 // index inside the pool
}

// Decision is the outcome of Decide. It is a value without pointers.
type Decision struct {
	Action Action
	Reason Reason
	// Arm is the pool that serves the first attempt; Pos is its place in the chain,
	// where steered. With ReasonAllBusy and ReasonNoRoom it is the pool whose places the
	// request waits for: the first of the chain that has an endpoint to send to that isn't
	// closed, else one that opens again.
	Arm PoolID
	Pos uint8
	// Moved is true when Arm is not the pool Envoy drew: other groups must be
	// named and the route cache cleared.
	Moved bool
	// Regroup is true when Picks is not in step with the route's own groups: a
	// Moved decision, or one that leaves out a later pool of the chain because
	// it has no endpoint to send to. Then one group per entry of Picks has to be
	// named, or Envoy's retries burn entries meant for later groups. Only Moved
	// needs the route cache cleared: retries follow named groups without that
	// (measured on Envoy 1.40.0).
	Regroup bool
	// Picks[:N] are the endpoints in attempt order, over all groups of the
	// chain; Picks[0] is the choice.
	Picks [MaxAttempts]Pick
	N     uint8
	// Fits is the largest output budget that would not have been refused, with
	// ReasonOversize, ReasonNoRoom and ReasonNeverFits; 0 when not even one token fits.
	Fits fleet.Tokens
	// RunnerUp is the candidate that lost, for records; equal to Picks[0] when
	// both draws fell on one endpoint.
	RunnerUp Pick
	// LiveChosen and LiveRunnerUp are the counts that were compared.
	LiveChosen, LiveRunnerUp int32
}
