package ratelimit

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// oracle counts in the plainest way: a list of what is used for each client and
// window, the latest window that was counted in, and nothing clever.
type oracle struct{ counts map[string]*oracleCount }

type oracleCount struct {
	window int64
	used   int64
}

// at is a client's count of one kind with what is used of it now: a later window
// has nothing used, an earlier one does not count.
func (o *oracle) at(who, kind string, now time.Time, w time.Duration) (c *oracleCount, window, used int64) {
	id := fmt.Sprint(who, kind, w)
	if o.counts[id] == nil {
		o.counts[id] = &oracleCount{}
	}
	c = o.counts[id]
	if n := now.UnixNano() / int64(w); n > c.window {
		return c, n, 0
	}
	return c, c.window, c.used
}

func (o *oracle) reserve(who string, r admission.Rates, cost int64, now time.Time) (reason admission.Reason, requests, tokens int64) {
	q, n, asked := o.at(who, fmt.Sprint("requests", r.Tokens.Window), now, r.Requests.Window)
	k, l, used := o.at(who, fmt.Sprint("tokens", r.Requests.Window), now, r.Tokens.Window)
	switch {
	case cost > r.Tokens.Amount:
		reason = admission.ReasonTooMany
	case asked >= r.Requests.Amount:
		reason = admission.ReasonRequests
	case used+cost > r.Tokens.Amount:
		reason = admission.ReasonTokens
	default:
		reason = admission.ReasonAdmitted
		asked++
		used += cost
		*q, *k = oracleCount{n, asked}, oracleCount{l, used}
	}
	return reason, max(r.Requests.Amount-asked, 0), max(r.Tokens.Amount-used, 0)
}

// TestEmbeddedAgreesWithADumbOracle reserves and settles for a few clients while
// the clock goes on, stands and jumps by an hour, a day or a leap second, and the
// limits change.
func TestEmbeddedAgreesWithADumbOracle(t *testing.T) {
	windows := []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour}
	steps := []time.Duration{0, 0, time.Millisecond, 400 * time.Millisecond, time.Second, -time.Second, 20 * time.Second, time.Minute,
		time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour, 200 * 24 * time.Hour}
	rapid.Check(t, func(t *rapid.T) {
		m, o := NewEmbedded(), &oracle{counts: map[string]*oracleCount{}}
		now, latest := start, start
		rate := func(top int64, w time.Duration) fleet.Rate {
			return per(rapid.Int64Range(1, top).Draw(t, "amount"), w)
		}
		w := [2]time.Duration{rapid.SampledFrom(windows).Draw(t, "window"), rapid.SampledFrom(windows).Draw(t, "tokens' window")}
		r := admission.Rates{Requests: rate(8, w[0]), Tokens: rate(100, w[1])}
		type open struct {
			who    string
			ticket admission.Ticket
		}
		var tickets []open
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			who := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "who")
			switch rapid.SampledFrom([]string{"reserve", "reserve", "reserve", "settle", "change"}).Draw(t, "action") {
			case "change":
				r = admission.Rates{Requests: rate(8, w[0]), Tokens: rate(100, w[1])}
			case "settle":
				if len(tickets) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(tickets)-1).Draw(t, "which")
				used := rapid.Int64Range(0, 150).Draw(t, "used")
				settled := tickets[i]
				tickets = append(tickets[:i], tickets[i+1:]...)
				m.Settle(settled.ticket, fleet.Tokens(used))
				c := o.counts[fmt.Sprint(settled.who, fmt.Sprint("tokens", w[0]), w[1])]
				if (c.window+1)*int64(w[1]) == settled.ticket.End.UnixNano() {
					c.used = max(c.used+used-int64(settled.ticket.Cost), 0)
				}
			default:
				now = now.Add(rapid.SampledFrom(steps).Draw(t, "step"))
				if now.After(latest) {
					latest = now
				}
				if oldest := latest.Add(time.Second - back); now.Before(oldest) {
					now = oldest // before that a new entry counts in its first window
				}
				cost := rapid.Int64Range(0, 120).Draw(t, "cost")
				a := m.Reserve(client(who), r, fleet.Tokens(cost), now)
				reason, requests, tokens := o.reserve(who, r, cost, now)
				if a.Reason != reason || a.Admitted != (reason == admission.ReasonAdmitted) || a.Requests.Remaining != requests || a.Tokens.Remaining != tokens {
					t.Fatalf("got %v, %d, %d; want %v, %d, %d", a.Reason, a.Requests.Remaining, a.Tokens.Remaining, reason, requests, tokens)
				}
				if a.Requests.Reset < 0 || a.Tokens.Reset < 0 || a.Requests.Window != w[0] || a.Tokens.Limit != r.Tokens.Amount {
					t.Fatalf("%+v", a)
				}
				if a.Admitted {
					tickets = append(tickets, open{who, a.Ticket})
				}
			}
		}
	})
}

// TestServerAgreesWithTheEmbeddedLimiter puts the same requests of one long window
// to both.
func TestServerAgreesWithTheEmbeddedLimiter(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	server := replicas(t, fleet.Redis{Address: s.Address()}, 1)[0]
	up(t, server)
	w, run := calm(), 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		here := NewEmbedded()
		r := admission.Rates{
			Requests: per(rapid.Int64Range(1, 8).Draw(t, "requests"), w),
			Tokens:   per(rapid.Int64Range(1, 100).Draw(t, "tokens"), w),
		}
		if rapid.Bool().Draw(t, "no limit on requests") {
			r.Requests = fleet.Rate{}
		} else if rapid.Bool().Draw(t, "no limit on tokens") {
			r.Tokens = fleet.Rate{}
		}
		k := client(fmt.Sprint(run))
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			cost := fleet.Tokens(rapid.Int64Range(0, 110).Draw(t, "cost"))
			a, b := server.Reserve(k, r, cost, time.Now()), here.Reserve(k, r, cost, time.Now())
			if a.Reason != b.Reason || a.Admitted != b.Admitted || a.Local ||
				a.Requests.Remaining != b.Requests.Remaining || a.Tokens.Remaining != b.Tokens.Remaining ||
				a.Requests.Limit != b.Requests.Limit || a.Tokens.Window != b.Tokens.Window || a.Ticket.Cost != b.Ticket.Cost {
				t.Fatalf("the server says %+v, the embedded limiter %+v", a, b)
			}
		}
	})
}
