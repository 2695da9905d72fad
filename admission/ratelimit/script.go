package ratelimit

import (
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/fairlead-proxy/fairlead/admission"
)

//go:embed limit.lua
var limitLua string

var script = rueidis.NewLuaScript(limitLua)

// redisNames are the names of the key's count in Redis and of a replica's ledger
// beside it:
//
//	fairlead:limit:{<client's hash in hex>}:<request window>:<token window>:<limit>
//	fairlead:limit:{<client's hash in hex>}/<owner>:<request window>:<token window>:<limit>
//
// with windows in seconds. The braces are a cluster's hash tag: all that belongs to
// a client lies on one node. The limit's name comes last, since it may hold anything.
// Of a count that clients share, shared:<place> stands instead of the hash.
func (k *key) redisNames(owner int64, shared bool) (count, ledger string) {
	b := make([]byte, 0, 256)
	b = k.appendName(b, -1, shared)
	n := len(b)
	both := string(k.appendName(b, owner, shared))
	return both[:n], both[n:]
}

// appendName appends the name of the count, or of an owner's ledger if that is not
// below 0.
func (k *key) appendName(b []byte, owner int64, shared bool) []byte {
	b = append(b, "fairlead:limit:{"...)
	if shared {
		b = strconv.AppendInt(append(b, "shared:"...), int64(k.place()), 10)
	} else {
		b = hex.AppendEncode(b, k.client[:])
	}
	b = append(b, '}')
	if owner >= 0 {
		b = append(b, '/')
		b = strconv.AppendInt(b, owner, 10)
	}
	b = append(b, ':')
	b = strconv.AppendInt(b, int64(k.requests/time.Second), 10)
	b = append(b, ':')
	b = strconv.AppendInt(b, int64(k.tokens/time.Second), 10)
	b = append(b, ':')
	return append(b, k.limit...)
}

// count is what is used of a window that ends at a time, in ms since the Unix
// epoch.
type count struct{ end, used int64 }

// question is one reservation put to Redis.
type question struct {
	count, ledger string // keys
	b             budgets
	cost          int64
	seen          counts // what this replica has seen used: of requests, who was admitted
	heard         int64  // requests that it last heard are used of seen's window; not less
	account       *account
	states        statement
	apart         bool // the server decides without what it states
}

// counts are of requests and tokens.
type counts struct{ requests, tokens count }

// answer is what Redis says.
type answer struct {
	reason admission.Reason
	counts
	now  int64 // ms since the Unix epoch, by the server
	lost bool  // the server had lost what this replica has seen
}

// packed is the question as the script unpacks it: 23 numbers as little-endian
// doubles, which hold whole numbers up to 2^53.
func (q *question) packed() string {
	s := &q.states
	numbers := [...]int64{
		q.b.requests.limit, q.b.requests.window.Milliseconds(),
		q.b.tokens.limit, q.b.tokens.window.Milliseconds(),
		q.cost,
		q.seen.requests.end, q.seen.requests.used, q.heard, q.seen.tokens.end, q.seen.tokens.used,
		s.account, s.epoch, s.closed, s.version, s.acknowledged,
		s.requests.end, s.requests.total, s.requests.untold, s.requests.had,
		s.tokens.end, s.tokens.total, s.tokens.untold, s.tokens.had,
	}
	b := make([]byte, 0, len(numbers)*8)
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(n)))
	}
	return string(b)
}

// errClosed is the answer to a question that this replica no longer waits for.
var errClosed = errors.New("the question's epoch is closed")

// closedEpoch is what the script returns instead of a reason then.
const closedEpoch = 3

// ask has the server decide: one round trip, or two where it does not have the script
// yet, or where the count and the ledger lie apart for the moment: a cluster moves the
// slot of the two. Then it is asked once more, and apart from the account.
func (q *question) ask(ctx context.Context, c rueidis.Client) (answer, error) {
	ans, err := q.run(ctx, c)
	if e, ok := rueidis.IsRedisErr(err); ok && e.IsTryAgain() {
		alone := *q
		alone.states = statement{}
		q.apart = true
		return alone.run(ctx, c)
	}
	return ans, err
}

// run runs the script. Without an account it asks for no ledger.
func (q *question) run(ctx context.Context, c rueidis.Client) (answer, error) {
	keys := []string{q.count, q.ledger}
	if q.states.epoch == 0 {
		keys = keys[:1]
	}
	v, err := script.Exec(ctx, c, keys, []string{"reserve", q.packed()}).AsIntSlice()
	if err != nil {
		return answer{}, err
	}
	if len(v) == 7 && v[0] == closedEpoch {
		return answer{}, errClosed
	}
	if len(v) != 7 || v[0] < 0 || v[0] > 2 {
		return answer{}, fmt.Errorf("the script answered %v, not what was expected", v)
	}
	return answer{
		reason: [...]admission.Reason{admission.ReasonAdmitted, admission.ReasonRequests, admission.ReasonTokens}[v[0]],
		counts: counts{requests: count{end: v[1], used: v[2]}, tokens: count{end: v[3], used: v[4]}},
		now:    v[5],
		lost:   v[6] == 1,
	}, nil
}

// settlement corrects tokens in Redis.
type settlement struct {
	count      string // its key
	end, delta int64  // ms since the Unix epoch; tokens
}

// settle sends many settlements at once and returns how many the server took.
func settle(ctx context.Context, c rueidis.Client, all []settlement) (taken int) {
	executions := make([]rueidis.LuaExec, len(all))
	for i, s := range all {
		executions[i] = rueidis.LuaExec{
			Keys: []string{s.count},
			Args: []string{"settle", strconv.FormatInt(s.end, 10), strconv.FormatInt(s.delta, 10)},
		}
	}
	for _, r := range script.ExecMulti(ctx, c, executions...) {
		if n, err := r.AsInt64(); err == nil && n == 1 { // 0: its window is over
			taken++
		}
	}
	return taken
}
