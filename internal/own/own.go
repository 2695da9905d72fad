// Package own keeps what the control plane knows of an endpoint without asking
// it: how attempts ended, how many prompt tokens it was sent, and how the
// engine's count of requests compares with ours. It is what scorer.Own is made
// of, in `fairlead serve` and, by the same code, in `fairlead simulate`, so that
// a model trained on the one sees the same numbers in the other.
//
// It is pure: no clock, no lock, no goroutine; times and counts come in, numbers
// go out. It never judges. Invariant: all memory is taken when a value is made.
//
// Two things are not the same on both sides. Prompt tokens since the newest
// sample: serve knows totals by tick ([Sent]), the simulator every single prompt
// ([SentExactly]), and serve bounds both what one request adds and what it
// believes in total. Buckets of ends: serve turns them every 200 ms, the
// simulator every [Tick].
package own

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/scorer"
)

// Tick is how often plans are made, and the resolution of [Sent].
const Tick = 50 * time.Millisecond

// Span is how long ends are counted for, as scorer.Own has it.
const Span = 5 * time.Second

// Ends counts how attempts on one endpoint ended. Make one with [NewEnds].
type Ends struct {
	ring    []bucket
	at      int
	sum     bucket // of the ring
	oom     int
	connect int
	// by is whose request the first of connect was; certain is false while all may be
	// that client's doing.
	by        admission.Client
	certain   bool
	successes uint64
}

// bucket counts the ends of one stretch of time.
type bucket struct {
	attempts, errors int
	headers          int           // how many had response headers
	headerTime       time.Duration // their sum
}

// NewEnds returns a count whose buckets are turned every so often; Span should
// be a multiple of it.
func NewEnds(every time.Duration) Ends { return Ends{ring: make([]bucket, max(1, Span/every))} }

// Add counts one attempt: why it ended, its HTTP status, and the time from its
// start to the response headers, 0 if none came. A 500 is how vLLM and SGLang
// report an engine that ran out of memory; Envoy's log has the status and not the
// text, so any 500 counts towards the streak, and anything else but a failed
// connection or a timeout ends it. What the caller or Envoy itself ended is no attempt that
// says anything; its headers still count.
//
// A request may bring about that the server breaks its connection. So broken
// connections in a row are a streak once one was refused, or two clients are in it.
// asker is whose request it was, zero if that isn't known or there are no others to
// tell apart; then they are a streak at once.
func (e *Ends) Add(cause fleet.Cause, code int, headerTime time.Duration, asker admission.Client) {
	var b bucket
	if headerTime > 0 {
		b.headers, b.headerTime = 1, headerTime
	}
	switch cause {
	case fleet.CauseOK, fleet.CauseClientError, fleet.CauseThrottled:
		e.oom, e.connect = 0, 0
		e.successes++
		b.attempts = 1
	case fleet.CauseConnectFailed, fleet.CauseReset:
		if e.connect == 0 {
			e.by, e.certain = asker, false
		}
		e.certain = e.certain || cause == fleet.CauseConnectFailed || asker == (admission.Client{}) || asker != e.by
		e.connect++
		b.attempts, b.errors = 1, 1
	case fleet.CauseServerError:
		e.connect = 0
		if code == 500 {
			e.oom++
		} else {
			e.oom = 0
		}
		b.attempts, b.errors = 1, 1
	case fleet.CauseTimeout:
		b.attempts, b.errors = 1, 1
	}
	e.ring[e.at].add(b, 1)
	e.sum.add(b, 1)
}

func (b *bucket) add(o bucket, sign int) {
	b.attempts += sign * o.attempts
	b.errors += sign * o.errors
	b.headers += sign * o.headers
	b.headerTime += time.Duration(sign) * o.headerTime
}

// Rotate begins a new bucket; the oldest is forgotten.
func (e *Ends) Rotate() {
	e.at = (e.at + 1) % len(e.ring)
	e.sum.add(e.ring[e.at], -1)
	e.ring[e.at] = bucket{}
}

// HeaderTime is the mean time to response headers, or false if none came.
func (e *Ends) HeaderTime() (time.Duration, bool) {
	if e.sum.headers == 0 {
		return 0, false
	}
	return e.sum.headerTime / time.Duration(e.sum.headers), true
}

// Own is the part of scorer.Own that ends tell.
func (e *Ends) Own() scorer.Own {
	o := scorer.Own{Errors5s: e.sum.errors, Attempts5s: e.sum.attempts, OOMStreak: e.oom, Successes: e.successes}
	if e.certain {
		o.ConnectStreak = e.connect
	}
	return o
}

// Foreign compares the engine's count of requests with our ledger's.
//
// What the engine has more is foreign: requests from before a restart of this
// process until their heartbeats come (10 s), or those of somebody else. What
// the ledger has more is unanswered: sent, and not counted by the engine. A
// reading is up to a tick older than the ledger's count, so only what stands in
// three readings running counts.
type Foreign struct {
	excess [3]int32 // engine's count less the ledger's; may be negative
	at     int
}

// Add takes a reading's count and the ledger's at that moment.
func (f *Foreign) Add(engine float64, ledger int32) {
	f.excess[f.at] = int32(max(-1<<20, min(engine-float64(ledger), 1<<20)))
	f.at = (f.at + 1) % len(f.excess)
}

// Requests is the foreign work.
func (f *Foreign) Requests() int32 { return max(0, min(f.excess[0], f.excess[1], f.excess[2])) }

// ledgerDelay is how much later than the engine the ledger learns of an end:
// Envoy's log batches (25 ms) and a margin for what is under way.
const ledgerDelay = 150 * time.Millisecond

// Unanswered is how many of our requests the engine does not count, less those
// that the ledger's delay explains at the present rate of ends.
func (f *Foreign) Unanswered(ends5s int) float64 {
	missing := -float64(max(f.excess[0], f.excess[1], f.excess[2]))
	return max(0, missing-float64(ends5s)/Span.Seconds()*ledgerDelay.Seconds())
}
