package admission

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Client names a caller: the first 128 bits of a SHA-256, so that neither tables
// nor Redis ever hold what a caller is known by. The zero Client is nobody, as
// which all callers count that show nothing to be known by.
type Client [16]byte

// ClientOf is the client that shows the value. Of an authorization header it is
// the hash of the value as given, which is its usual spelling (see
// fleet.LimitClient.ID); of anything else the key's name is hashed too,
// so that a token's claim is never taken for an address.
func ClientOf(key fleet.ClientKey, value []byte) Client {
	if len(value) == 0 {
		return Client{}
	}
	if key == fleet.ClientKeyAuthorization {
		return cut(sha256.Sum256(value))
	}
	h := sha256.New()
	h.Write([]byte(key.String()))
	h.Write([]byte{0})
	h.Write(value)
	return cut([sha256.Size]byte(h.Sum(nil)))
}

// ClientOfID is the client that a limit's exception is for; see
// fleet.LimitClient.ID. The id must be valid.
func ClientOfID(key fleet.ClientKey, id string) Client {
	if digits, ok := strings.CutPrefix(id, "sha256:"); ok && key == fleet.ClientKeyAuthorization {
		var c Client
		sum, _ := hex.DecodeString(digits) // the config's check read it
		copy(c[:], sum)
		return c
	}
	return ClientOf(key, []byte(id))
}

func cut(sum [sha256.Size]byte) Client { return Client(sum[:len(Client{})]) }

// Ask is one request that wants to enter. Strings and times come from the
// caller; nothing of it is kept but ID.
type Ask struct {
	// ID is the decision id; the claim of an admitted request goes by it.
	ID    string
	Route string // of the config
	// Pool serves the first attempt; "" when unknown: then levels and shares do
	// not count, and rate limits and the client's concurrency do.
	Pool   string
	Client Client
	// Credential is what providers tell callers apart by; zero stands for Client.
	Credential Client
	Level      fleet.BurstLevel
	// Class is the route's, or what the caller lowered it to; a client's own
	// class goes before the route's.
	Class fleet.RequestClass
	// Input is the estimated length of the prompt, 0 if unknown; Output is the
	// declared budget times the number of answers asked for. Their sum is reserved
	// from a limit on tokens; see InputAtLeast.
	Input, Output fleet.Tokens
	// InputAtLeast is what the prompt has at least, 0 if unknown. Only by that is a
	// request refused for good; an estimate that alone passes a whole window's tokens
	// reserves all of them.
	InputAtLeast fleet.Tokens
	// Unread: the prompt and the budget are not the request's own but what stands
	// for them, since nobody could read its body. It is settled by its length.
	Unread bool
	// Stream: the answer is to come in pieces. It means nothing beside Unread.
	Stream bool
	// Answers is how many answers Output is for together; 0 stands for 1.
	Answers int
	// Unplaced: no place at an endpoint is reserved for it (Envoy chooses); then
	// the pool's places bound how many enter.
	Unplaced bool
	// Timeout is how long the caller waits for an attempt, 0 if it did not say.
	Timeout time.Duration
	// Retry counts the attempts that the caller's SDK says it made before this.
	Retry int
	// Counts: the SDK says so also of a first try, which is known for one by it if
	// others of the client were seen to return; see Gate.meet.
	Counts bool
	At     time.Time
	// Hold: if it is refused because others are in flight, it will be asked for
	// again in a moment. Then it is given no slot and not counted as refused.
	Hold bool
	// Seed draws the jitter of a slot.
	Seed uint64

	hold hold // see BeginHold
}

// credential is what providers tell the caller apart by.
func (a *Ask) credential() Client {
	if a.Credential != (Client{}) {
		return a.Credential
	}
	return a.Client
}

// Reason says why a request entered or did not; one enum for logs, metric
// labels, headers and records.
type Reason uint8

// Reasons.
const (
	ReasonAdmitted    Reason = iota + 1
	ReasonBusy               // every endpoint is at its limit (the plan says so)
	ReasonNoRoom             // no endpoint's KV cache has room for it now (the plan says so)
	ReasonConcurrency        // the client has as many in flight as its limit lets it, or the last are promised to others of it
	ReasonTurn               // the last places are for others of the client's requests, that were told to come now
	ReasonShare              // the pool is full and the client has its share of it
	ReasonLevel              // the pool is full and the burst level has its budget of it
	ReasonRequests           // the client's requests of this window are used up
	ReasonTokens             // the client's tokens of this window are used up, or the last are promised to others of it
	ReasonTooMany            // more tokens, at the least, than a whole window has
	ReasonLimiterDown        // nobody counts, and the config says onError: closed
	ReasonServerLimit        // a server of the pool told this client, or credential of it, alone to stay away
	reasonCount
)

var reasonNames = [reasonCount]string{
	"invalid", "admitted", "all_busy", "no_room", "concurrency", "turn", "share", "level",
	"rate_requests", "rate_tokens", "rate_too_many_tokens", "limiter_down", "server_limit",
}

func (r Reason) String() string {
	if r >= reasonCount {
		r = 0
	}
	return reasonNames[r]
}

// Quota is how much of a limit is left. Limit 0 is no limit; then the rest means
// nothing.
type Quota struct {
	Limit, Remaining int64
	Window           time.Duration
	// Reset is the time until the window ends.
	Reset time.Duration
}

// Standing is where a client stands with its limit, for the headers of an answer.
type Standing struct {
	// Policy is the limit's name; "" when the route has none.
	Policy           string
	Requests, Tokens Quota
	// Local is true while a replica admits its own part of the limit, because the
	// shared count does not answer.
	Local bool
}

// Refusal is what a refused client is told.
type Refusal struct {
	// RetryAfter is 1 ms … 60 s, whole milliseconds: the request's own slot.
	RetryAfter time.Duration
	// Concurrency ≥ 1 is how many requests the client should have in flight.
	Concurrency int
	// InFlight is how many it has.
	InFlight int
	// ShouldRetry is false when waiting cannot help.
	ShouldRetry bool
}

// Verdict is the outcome of [Gate.Admit].
type Verdict struct {
	Admitted bool
	Reason   Reason
	// Held: not admitted for now; see Ask.Hold. Reason and Standing are set beside it.
	Held bool
	// Refusal is set where neither admitted nor held.
	Refusal  Refusal
	Standing Standing
	// Concurrency, if not 0, is a hint for an admitted client that is near its
	// share: how many requests it should have in flight.
	Concurrency int
}

// LimitKey names one count of a limiter.
type LimitKey struct {
	Limit  string // its name
	Client Client
}

// Rates are the rates that count for a key. A zero rate is no limit.
type Rates struct{ Requests, Tokens fleet.Rate }

// Ticket is what a reservation is settled by. The zero Ticket settles nothing.
type Ticket struct {
	Key LimitKey
	// Rates are those it was reserved under.
	Rates Rates
	// End is the end of the token window it was taken from.
	End time.Time
	// Cost is what was reserved.
	Cost fleet.Tokens
	// Local: taken from the replica's own part.
	Local bool
	// Shared: taken from a count in Redis that clients share.
	Shared bool
}

// Reservation is a limiter's answer.
type Reservation struct {
	Admitted bool
	// Reason is ReasonAdmitted, ReasonRequests, ReasonTokens, ReasonTooMany or
	// ReasonLimiterDown.
	Reason Reason
	// Requests and Tokens are what is left after it.
	Requests, Tokens Quota
	Local            bool
	// Transient: the replica's own part decided alone, of a shared count that is not
	// known to be away and did not say that the window is used up. It may decide
	// otherwise within 2 s: a refusal does not hold until the window ends.
	Transient bool
	Ticket    Ticket
}

// Limiter counts requests and tokens per window.
//
// Windows are fixed: they begin at whole multiples of their length since the Unix
// epoch. Among the requests that are admitted in one window, Requests.Remaining
// strictly decreases in the order of admission; a refused request takes nothing.
type Limiter interface {
	// Reserve takes one request and cost tokens, or nothing at all. It may block
	// for a limiter's own deadline, no longer.
	Reserve(k LimitKey, r Rates, cost fleet.Tokens, now time.Time) Reservation
	// Settle corrects a reservation to what was used, in both directions, if its
	// window still runs. It must not block. A ticket is settled at most once.
	Settle(t Ticket, used fleet.Tokens)
}

// Unbounded stands for Places without a limit, None for no Capacity at all.
const (
	Unbounded = -1
	None      = -1
)

// PoolView is what the tick tells of a pool.
type PoolView struct {
	Name string
	// Limit is Σ limit · (1 − risk) of its endpoints that take requests, before
	// slew. Those that told callers to stay away for now are in it; Closed is their
	// part of it.
	Limit, Closed float64
	// Capacity is what its endpoints may have in flight by the config, at no risk;
	// those that drain have none. Where it changes, Limit changes without slew: the
	// config's changes are meant. 0 is unknown; None where all drain.
	Capacity float64
	// InFlight is the sum over its endpoints, by the ledger.
	InFlight int
	// Elsewhere is how many of them are at endpoints that take no further ones:
	// closed, draining or ejected. They take nobody's place at the others, of which
	// there must be some.
	Elsewhere int
	// Places is how many requests may be in flight at most: the sum of the limits of
	// its endpoints that take requests, whatever their risk, and what is in flight at
	// those that are closed or drain. It is 0 where all are closed; Unbounded where
	// any has no limit, and where none serves at all.
	Places int
	// Reopens is how long it takes until the first of its endpoints wants requests
	// again, where all told callers to stay away; else 0. Nobody is told to come
	// back before.
	Reopens time.Duration
}

// LevelState is one burst level of a pool.
type LevelState struct {
	InFlight int
	// Budget is how many it may have in flight while the pool is full; +Inf while
	// it is not.
	Budget float64
	// Queue is how long a request that comes now would wait for a place of the
	// level's budget; 0 when there is one.
	Queue time.Duration
	// Backlogged is true when the level is at its budget in a pool that is full, or
	// close to it while more wait than would fill it.
	Backlogged bool
	// MeanInput and MeanOutput are means of what requests of the level took:
	// usage where it is known, estimates and budgets elsewhere. 0 before the first.
	MeanInput, MeanOutput float64
}

// PoolState is what admission knows of a pool at a tick.
type PoolState struct {
	Name string
	// Limit is PoolView.Limit after slew: at most 30 % down and 10 % up a second.
	Limit  float64
	Levels [fleet.BurstLevels]LevelState
	// Clients is how many have requests in flight or were refused of late.
	Clients int
	// Share is how many requests each unit of weight may have in flight; +Inf while
	// the pool is not full. What a client gets is ShareOf.
	Share float64
}

// ShareOf is how many requests a client of that class and weight
// (limits[].clients[].weight, else 1) may have in flight; +Inf while the pool is not
// full.
func (s *PoolState) ShareOf(class fleet.RequestClass, weight float64) float64 {
	return s.Share * classWeight(class) * weight
}
