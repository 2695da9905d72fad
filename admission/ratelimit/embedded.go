package ratelimit

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// Embedded counts in this process. Its methods may be called at once from many
// goroutines; after a client's first request they allocate nothing and take one
// compare-and-swap for each kind that is limited.
//
// Time is counted from the limiter's making by the monotonic clock where the
// given time has one, so that a wall clock that is set anew moves no window. A
// time without one is believed, and where it goes back the later window goes on
// until it is reached again.
type Embedded struct {
	base    time.Time
	clients *table
}

var _ admission.Limiter = (*Embedded)(nil)

// NewEmbedded returns a limiter for 65,536 clients, each counted once for every
// limit that it is subject to.
func NewEmbedded() *Embedded { return newEmbedded(maxClients) }

// Counters returns its counters, of which Sharing alone is of use.
func (m *Embedded) Counters() Counters { return Counters{Sharing: m.clients.sharing.Load()} }

func newEmbedded(clients int) *Embedded {
	return &Embedded{base: time.Now(), clients: newTable(clients)}
}

// unix is a time in ns since the Unix epoch, by the monotonic clock if it can.
func (m *Embedded) unix(now time.Time) int64 {
	return m.base.UnixNano() + int64(now.Sub(m.base))
}

// budget is what may be used in a window; the zero budget is no limit.
type budget struct {
	limit  int64
	window time.Duration
}

// budgets are those of one client. Unlike in a rate a limit of 0 is one, which
// admits nothing: a replica's part of a small limit may be that.
type budgets struct{ requests, tokens budget }

func budgetsOf(r admission.Rates) budgets {
	return budgets{requests: budgetOf(r.Requests), tokens: budgetOf(r.Tokens)}
}

func budgetOf(r fleet.Rate) budget {
	if r.Amount <= 0 || r.Window <= 0 {
		return budget{}
	}
	return budget{limit: min(r.Amount, maxUsed), window: r.Window}
}

func (b budget) limited() bool { return b.window > 0 }

// quota tells what is left of the budget's window.
func (b budget) quota(window, used, now int64) admission.Quota {
	if !b.limited() {
		return admission.Quota{}
	}
	return admission.Quota{
		Limit:     max(b.limit, 1), // 0 would say that there is none
		Remaining: max(b.limit-used, 0),
		Window:    b.window,
		Reset:     max(time.Duration(end(window, b.window)-now), 0),
	}
}

// end of a window, in ns since the Unix epoch.
func end(window int64, length time.Duration) int64 { return (window + 1) * int64(length) }

// Reserve takes one request and cost tokens of the windows that hold now.
func (m *Embedded) Reserve(k admission.LimitKey, r admission.Rates, cost fleet.Tokens, now time.Time) (a admission.Reservation) {
	b := budgetsOf(r)
	cost = max(cost, 0)
	a.Reason = admission.ReasonAdmitted
	if b.tokens.limited() && int64(cost) > b.tokens.limit {
		a.Reason = admission.ReasonTooMany
	}
	m.reserve(&a, &k, b, int64(cost), m.unix(now))
	if a.Admitted && b.tokens.limited() {
		a.Ticket.Key, a.Ticket.Rates, a.Ticket.Cost = k, r, cost
	}
	return a
}

// reserve fills in the answer. A reason other than ReasonAdmitted that stands in
// it already refuses the request, and tells no more than what is left.
//
// It takes tokens before the request and gives them back if no request was left,
// so that what remains of requests strictly decreases. The look at the requests
// before spares that. While tokens are held in vain another may be refused for
// them, but only in a window whose requests have run out, in which it would be
// refused anyhow.
func (m *Embedded) reserve(a *admission.Reservation, k *admission.LimitKey, b budgets, cost, now int64) {
	id := key{limit: k.Limit, client: k.Client, requests: b.requests.window, tokens: b.tokens.window}
	e, s, counted := m.clients.hold(&id, now)
	defer s.mu.RUnlock()
	at := id.at(counted)
	requests, asked, _ := e.requests.read(at.requests)
	tokens, used, _ := e.tokens.read(at.tokens)
	if a.Reason == admission.ReasonAdmitted && b.requests.limited() && asked >= b.requests.limit {
		a.Reason = admission.ReasonRequests
	}
	if a.Reason == admission.ReasonAdmitted && b.tokens.limited() {
		var ok bool
		if tokens, used, ok = e.tokens.take(at.tokens, cost, b.tokens.limit); !ok {
			a.Reason = admission.ReasonTokens
		}
	}
	if a.Reason == admission.ReasonAdmitted && b.requests.limited() {
		var ok bool
		if requests, asked, ok = e.requests.take(at.requests, 1, b.requests.limit); !ok {
			a.Reason = admission.ReasonRequests
			if b.tokens.limited() {
				e.tokens.add(tokens, -cost)
				used = max(used-cost, 0)
			}
		}
	}
	a.Admitted = a.Reason == admission.ReasonAdmitted
	a.Requests = b.requests.quota(requests, asked, now)
	a.Tokens = b.tokens.quota(tokens, used, now)
	if a.Admitted && b.tokens.limited() {
		a.Ticket.End = time.Unix(0, end(tokens, b.tokens.window))
	}
}

// Settle corrects a reservation to what was used, if its window still runs.
func (m *Embedded) Settle(t admission.Ticket, used fleet.Tokens) {
	b := budgetsOf(t.Rates)
	if t.End.IsZero() || !b.tokens.limited() {
		return
	}
	id := key{limit: t.Key.Limit, client: t.Key.Client, requests: b.requests.window, tokens: b.tokens.window}
	m.clients.correct(&id, windowEnding(t.End.UnixNano(), b.tokens.window), int64(max(used, 0)-t.Cost))
}

// correct adds to the tokens used of the window n, if that still counts.
func (t *table) correct(k *key, n, delta int64) {
	if e, s := t.held(k); e != nil {
		e.tokens.add(n, delta)
		s.mu.RUnlock()
	}
}

// windowEnding is the number of the window that ends at a time.
func windowEnding(at int64, window time.Duration) int64 { return number(at, window) - 1 }
