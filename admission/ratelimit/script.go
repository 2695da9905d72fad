package ratelimit

import (
	"context"
	_ "embed"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/fairlead-proxy/fairlead/admission"
)

//go:embed limit.lua
var limitLua string

var script = rueidis.NewLuaScript(limitLua)

// redisName is the name of the key's count in Redis:
//
//	fairlead:limit:{<client's hash in hex>}:<request window>:<token window>:<limit>
//
// with windows in seconds. The braces are a cluster's hash tag: all counts of a
// client lie on one node. The limit's name comes last, since it may hold anything.
func (k *key) redisName() string {
	b := make([]byte, 0, 128)
	b = append(b, "fairlead:limit:{"...)
	b = hex.AppendEncode(b, k.client[:])
	b = append(b, "}:"...)
	b = strconv.AppendInt(b, int64(k.requests/time.Second), 10)
	b = append(b, ':')
	b = strconv.AppendInt(b, int64(k.tokens/time.Second), 10)
	b = append(b, ':')
	b = append(b, k.limit...)
	return string(b)
}

// count is what is used of a window that ends at a time, in ms since the Unix
// epoch.
type count struct{ end, used int64 }

// question is one reservation put to Redis.
type question struct {
	name string
	b    budgets
	cost int64
	// What this replica has seen used, and what it admitted alone since.
	seen, untold counts
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

func (q *question) arguments() []string {
	n := func(v int64) string { return strconv.FormatInt(v, 10) }
	return []string{
		"reserve",
		n(q.b.requests.limit), n(q.b.requests.window.Milliseconds()),
		n(q.b.tokens.limit), n(q.b.tokens.window.Milliseconds()),
		n(q.cost),
		n(q.seen.requests.end), n(q.seen.requests.used), n(q.seen.tokens.end), n(q.seen.tokens.used),
		n(q.untold.requests.end), n(q.untold.requests.used), n(q.untold.tokens.end), n(q.untold.tokens.used),
	}
}

// ask runs the script: one round trip, or two where the server does not have the
// script yet.
func (q *question) ask(ctx context.Context, c rueidis.Client) (answer, error) {
	v, err := script.Exec(ctx, c, []string{q.name}, q.arguments()).AsIntSlice()
	if err != nil {
		return answer{}, err
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
	name       string
	end, delta int64 // ms since the Unix epoch; tokens
}

// settle sends many settlements at once and returns how many the server took.
func settle(ctx context.Context, c rueidis.Client, all []settlement) (taken int) {
	executions := make([]rueidis.LuaExec, len(all))
	for i, s := range all {
		executions[i] = rueidis.LuaExec{
			Keys: []string{s.name},
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
