package extproc

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc/retryafter"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// waiting is what is kept of a request until the headers of its answer come: on
// routes with plan.RouteInfo.ComputedRetry, where Envoy sends them. It lives as
// long as the upstream takes, so it holds neither buffers nor the plan.
type waiting struct {
	ask admission.Ask
	// concurrency is admission's hint, 0 if it gave none.
	concurrency int
}

// RetrySource says where the retry fields of an answer come from.
type RetrySource uint8

// Retry sources.
const (
	RetryKept  RetrySource = iota + 1 // the upstream's own, untouched
	RetryTold                         // from the resets of limits that the upstream told of
	RetryGiven                        // the upstream told nothing: a slot
)

var retrySources = [...]string{"none", "kept", "told", "given"}

// String is the source's metric label.
func (s RetrySource) String() string {
	if int(s) >= len(retrySources) {
		return retrySources[0]
	}
	return retrySources[s]
}

// Answer is one answer of an upstream that turned a request away, for metrics.
type Answer struct {
	Route  string
	Status int // 429, 503 or 529
	Source RetrySource
	// Wait is what the client is told to wait; 0 where the upstream's own fields
	// stand.
	Wait time.Duration
}

// responsePhase waits for the headers of the answer and ends the stream with
// them. It always ends well: whatever is amiss, the answer passes as it is. A
// caller or an Envoy that is gone is nothing amiss.
func (s *Service) responsePhase(st stream, w *waiting) error {
	var late lateIn
	for range maxMessages {
		if st.RecvMsg(&late) != nil {
			return nil
		}
		if done := s.lateMessage(st, late.take(), w); done {
			return nil
		}
	}
	return nil
}

// lateMessage handles one message of the response phase; true ends the stream.
func (s *Service) lateMessage(st stream, c *call, w *waiting) bool {
	defer c.release()
	if s.dispatch(c, w) != nil {
		return true
	}
	if c.out.b != nil {
		if st.SendMsg(&c.out) != nil {
			return true
		}
		c.out.b = nil
	}
	return c.answered
}

// responseHeaders adds the retry fields that an answer lacks, or has of no use.
func (s *Service) responseHeaders(c *call, w *waiting, now time.Time) {
	c.answered = true
	if c.req.observe {
		return
	}
	c.out.b = answers.Get(0)
	if status := c.req.status; !fleet.TurnsAway(status) {
		*c.out.b = append(*c.out.b, emptyAnswer[kindResponseHeaders]...)
		return
	}
	a := Answer{Route: w.ask.Route, Status: c.req.status, Source: RetryKept}
	if retryafter.Own(c.req.told) {
		*c.out.b = append(*c.out.b, emptyAnswer[kindResponseHeaders]...)
	} else {
		var fields wait
		fields, a.Source = s.waitOf(&c.req, w, now)
		a.Wait = time.Duration(fields.millis) * time.Millisecond
		*c.out.b = appendRetryFields(*c.out.b, &fields)
	}
	s.o.ObserveAnswer(a)
}

// waitOf is what to tell a client whose upstream turned it away without retry
// fields that it can use: what the upstream's limits say, else a slot like that of a
// request refused here. Its own word on whether to retry stands.
func (s *Service) waitOf(r *request, w *waiting, now time.Time) (wait, RetrySource) {
	source := RetryGiven
	var fields wait
	if told, ok := retryafter.Wait(r.told, now); ok {
		source = RetryTold
		fields = waitFor(told)
		fields.concurrency = uint64(max(w.concurrency, 0))
		fields.shouldRetry = told <= maxRetryAfter
	} else {
		fields = waitOf(s.slot(w, now))
	}
	if r.told(wire.HeaderShouldRetry) != "" {
		fields.shouldRetry = true
	}
	return fields, source
}

// awayFor is the least that callers are told of a server that named no time: for
// as long as that it gets no requests from others either.
const awayFor = time.Second

// slot is admission's advice, counted from when the server may be asked again.
func (s *Service) slot(w *waiting, now time.Time) admission.Refusal {
	if s.o.Admission == nil {
		return plainRefusal
	}
	w.ask.At = now
	r := s.o.Admission.Advise(&w.ask)
	r.RetryAfter = min(r.RetryAfter+awayFor, maxRetryAfter)
	return r
}

// plainRefusal is what is told where nobody counts.
var plainRefusal = admission.Refusal{RetryAfter: awayFor, Concurrency: 1, ShouldRetry: true}

func appendRetryFields(b []byte, fields *wait) []byte {
	b, headers := open(b, 2)  // ProcessingResponse.response_headers
	b, response := open(b, 1) // HeadersResponse.response
	b, mutation := open(b, 2) // CommonResponse.header_mutation
	b = fields.appendFields(b)
	b = shut(shut(shut(b, mutation), response), headers)
	if fields.concurrency == 0 {
		return b
	}
	b, metadata := open(b, 8) // ProcessingResponse.dynamic_metadata, see appendStanding
	b, limit := openStruct(b, wire.NamespaceLimit)
	b = appendHint(b, fields.concurrency)
	return shut(shutStruct(b, limit), metadata)
}
