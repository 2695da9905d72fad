package extproc

import (
	"strconv"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// Waits that a client is told: SDKs give up or fall back to their own back-off
// above a minute, and treat zero as none (measured with the official SDKs).
const (
	minRetryAfter = time.Millisecond
	maxRetryAfter = time.Minute
)

const (
	statusBadRequest      = 400
	statusTooManyRequests = 429
)

// refusal is what an answer to a refused request tells, as the wire shows it.
type refusal struct {
	v *verdict
	wait
	// limit is the largest max_tokens that fits, 0 if it isn't known.
	limit fleet.Tokens
}

// wait is when and how to come back.
type wait struct {
	millis      uint64 // 1 … 60,000; 0 where no wait helps
	seconds     uint64 // millis rounded up
	concurrency uint64 // 0 is not known
	shouldRetry bool
}

func waitOf(r admission.Refusal) wait {
	w := waitFor(r.RetryAfter)
	w.concurrency, w.shouldRetry = uint64(max(r.Concurrency, 1)), r.ShouldRetry
	return w
}

// waitFor is a wait within what clients understand.
func waitFor(d time.Duration) wait {
	d = min(max(d, minRetryAfter), maxRetryAfter)
	return wait{
		millis:      uint64((d + time.Millisecond - 1) / time.Millisecond),
		seconds:     uint64((d + time.Second - 1) / time.Second),
		shouldRetry: true,
	}
}

// appendFields appends the retry fields that say so.
func (w *wait) appendFields(b []byte) []byte {
	var digits [20]byte
	if w.millis > 0 {
		b = setHeader(b, wire.HeaderRetryAfterMs, appendUint(digits[:0], w.millis))
		b = setHeader(b, wire.HeaderRetryAfter, appendUint(digits[:0], w.seconds))
	}
	if w.concurrency > 0 {
		b = setHeader(b, wire.HeaderRecommendedConcurrency, appendUint(digits[:0], w.concurrency))
	}
	if !w.shouldRetry {
		b = setHeader(b, wire.HeaderShouldRetry, "false")
	}
	return b
}

// refusalOf is how a verdict that refuses is told.
func refusalOf(v *verdict) refusal {
	r := refusal{v: v, limit: v.decision.Fits}
	if !v.hopeless() {
		r.wait = waitOf(v.admit.Refusal)
	}
	return r
}

// appendRefusal writes immediate_response: a 429, or a 400, in the caller's
// dialect.
func appendRefusal(b []byte, v *verdict, scratch []byte) []byte {
	r := refusalOf(v)
	status := uint64(statusTooManyRequests)
	if v.hopeless() {
		status = statusBadRequest
	}
	b, immediate := open(b, 7) // ProcessingResponse.immediate_response
	b, code := open(b, 1)      // ImmediateResponse.status
	b = varint(b, 1, status)
	b = shut(b, code)
	b, headers := open(b, 2) // ImmediateResponse.headers
	b = r.appendHeaders(b, scratch)
	b = shut(b, headers)
	b, body := open(b, 3) // ImmediateResponse.body
	b = r.appendBody(b)
	b = shut(b, body)
	b, details := open(b, 5) // ImmediateResponse.details
	b = append(append(b, "fairlead_"...), v.reason()...)
	return shut(shut(b, details), immediate)
}

func (r *refusal) appendHeaders(b, scratch []byte) []byte {
	v := r.v
	b = r.appendFields(b)
	v.admit.Standing.EachHeader(scratch, func(name string, value []byte) { b = setHeader(b, name, value) })
	b = setHeader(b, "content-type", "application/json")
	b = setHeader(b, wire.HeaderRouteStrategy, v.strategy.String())
	b = setHeader(b, wire.HeaderDecision, v.idText)
	b = setHeader(b, wire.HeaderExecutionGraph, v.plan.Digest())
	return setHeader(b, wire.HeaderRequestID, v.requestID)
}

// appendBody writes the error object of the caller's API with further members in
// it, which the official SDKs pass over. All that is inserted is digits or a
// plain id, so nothing needs escaping.
func (r *refusal) appendBody(b []byte) []byte {
	anthropic := r.v.info.Dialect == fleet.DialectAnthropic
	kind, param, code := "rate_limit_error", "", "rate_limit_exceeded"
	switch r.v.decision.Reason {
	case plan.ReasonUnread:
		kind, code = "invalid_request_error", "body_not_read"
	case plan.ReasonOversize:
		kind, param, code = "invalid_request_error", r.v.field, "max_tokens_too_large"
	case plan.ReasonNeverFits:
		kind, param, code = "invalid_request_error", r.v.field, "context_length_exceeded"
	case plan.ReasonNoRoom:
		param = r.v.field
	}
	if anthropic {
		b = append(append(append(b, `{"type":"error","error":{"type":"`...), kind...), `","message":"`...)
	} else {
		b = append(b, `{"error":{"message":"`...)
	}
	b = append(r.appendMessage(b), '"')
	if !anthropic {
		b = append(append(b, `,"type":"`...), kind...)
		if b = append(b, `","param":`...); param == "" {
			b = append(b, "null"...)
		} else {
			b = append(append(append(b, '"'), param...), '"')
		}
		b = append(append(append(b, `,"code":"`...), code...), '"')
	}
	if r.millis > 0 {
		b = appendUint(append(b, `,"retry_after_ms":`...), r.millis)
		b = appendUint(append(b, `,"recommended_concurrency":`...), r.concurrency)
	}
	if r.limit > 0 {
		b = appendTokens(append(b, `,"max_tokens_limit":`...), r.limit)
	}
	b = append(b, '}')
	if anthropic {
		b = append(append(append(b, `,"request_id":"`...), r.v.requestID...), '"')
	}
	return append(b, '}')
}

// appendMessage writes a sentence that a person can follow, and then when to come
// back.
func (r *refusal) appendMessage(b []byte) []byte {
	v := r.v
	switch v.decision.Reason {
	case plan.ReasonUnread:
		return r.appendUnread(b)
	case plan.ReasonOversize:
		return r.appendOversize(b)
	case plan.ReasonNeverFits:
		return r.appendNeverFits(b)
	}
	s := &v.admit.Standing
	switch v.admit.Reason {
	case admission.ReasonNoRoom:
		return r.appendNoRoom(b)
	case admission.ReasonConcurrency:
		if f := &v.admit.Refusal; f.InFlight < f.Concurrency {
			b = appendInt(append(b, "Of the "...), int64(f.Concurrency))
			b = append(b, " requests that you may have in flight the last are for those of yours that have waited."...)
			break
		}
		b = r.appendInFlight(append(b, "You have "...), " and may have ", ", as many as you may")
	case admission.ReasonShare:
		b = append(b, "The model servers are full."...)
		if v.admit.Refusal.InFlight > 0 {
			b = r.appendInFlight(append(b, " You have "...), " and your share is ", ", which is your share")
		}
	case admission.ReasonTurn:
		b = append(b, "The last places at the model servers are for requests of yours that have waited."...)
	case admission.ReasonLevel:
		b = append(b, "The model servers are full, and requests with an output budget like this one's have their part of them."...)
	case admission.ReasonRequests:
		b = appendInt(append(b, "Your limit of "...), s.Requests.Limit)
		b = appendPeriod(append(b, " requests per "...), s.Requests.Window)
		b = r.appendPromised(appendReset(append(b, " is used up"...), s.Requests.Reset), s.Requests.Reset)
	case admission.ReasonTokens:
		b = r.appendTokensLeft(b)
	case admission.ReasonTooMany:
		b = appendInt(append(r.appendCost(b, v.class.PromptAtLeast), " tokens even if its prompt is as short as it can be, which is more than your whole limit of "...), s.Tokens.Limit)
		b = appendPeriod(append(b, " tokens per "...), s.Tokens.Window)
		if v.answers > 1 {
			b = append(append(append(b, ": lower n or "...), v.field...), ", or shorten the prompt."...)
		} else {
			b = append(append(append(b, ": lower "...), v.field...), " or shorten the prompt."...)
		}
	case admission.ReasonServerLimit:
		b = append(b, "The model servers have told you to stay away for a while, for a limit of their own."...)
	case admission.ReasonLimiterDown:
		b = append(b, "Rate limits can't be counted at the moment, and nothing is admitted meanwhile."...)
	default:
		b = append(b, "All model servers for this request are busy."...)
		if r.shouldRetry {
			b = appendUint(append(b, " Retry in "...), r.millis)
			b = appendUint(append(b, " ms and keep at most "...), r.concurrency)
			return append(append(b, plural(r.concurrency, " request")...), " in flight."...)
		}
	}
	return r.appendRetry(b)
}

// appendUnread says what a body must be like to be read.
func (r *refusal) appendUnread(b []byte) []byte {
	b = append(b, "The proxy could not read this request's body, and nothing enters here whose size is unknown. "+
		"Accepted: a valid JSON body (whole numbers below 2^63) with content-type application/json, not compressed, with a content-length "+
		"(no chunked transfer) of at most what the proxy reads, 999999 bytes unless it is configured otherwise"...)
	if r.v.info.TrustDeclared {
		b = append(b, "; or a max_tokens header with a whole number above 0"...)
	}
	return append(b, '.')
}

func (r *refusal) appendOversize(b []byte) []byte {
	b = appendAmount(append(b, "This request asks for "...), r.v.class.Budget)
	b = appendTokens(append(b, " output tokens and the model gives at most "...), r.limit)
	return r.appendLower(append(b, ": "...))
}

// appendTokensLeft says how much the request would take of what is left, and that
// an estimate alone needs no more than all of a limit.
func (r *refusal) appendTokensLeft(b []byte) []byte {
	s := &r.v.admit.Standing
	b = appendInt(append(r.appendCost(b, r.v.class.Prompt), " tokens and you have "...), max(s.Tokens.Remaining, 0))
	b = appendInt(append(b, " left of "...), s.Tokens.Limit)
	b = appendPeriod(append(b, " tokens per "...), s.Tokens.Window)
	b = r.appendPromised(appendReset(b, s.Tokens.Reset), s.Tokens.Reset)
	if !s.Local && int64(r.cost(r.v.class.Prompt)) > s.Tokens.Limit {
		b = append(b, " Its prompt may be shorter than estimated, so it is let in when all of the limit is left."...)
	}
	return b
}

// appendCost says how much of a limit on tokens the request would take with such a
// prompt, and for how many answers, if for more than one.
func (r *refusal) appendCost(b []byte, prompt fleet.Tokens) []byte {
	b = append(b, "This request"...)
	if n := r.v.answers; n > 1 {
		b = append(appendAmount(append(b, " for "...), n), " answers (n)"...)
	}
	return appendAmount(append(b, " may take "...), r.cost(prompt))
}

// cost is what the request takes of a limit on tokens with such a prompt.
func (r *refusal) cost(prompt fleet.Tokens) fleet.Tokens {
	return min(prompt, MaxBudget) + times(r.v.budget, r.v.answers)
}

func (r *refusal) appendNeverFits(b []byte) []byte {
	b = appendAmount(append(b, "A request of "...), r.v.class.Budget)
	b = append(b, " output tokens"...)
	if n := r.v.class.PromptAtLeast; n > 0 {
		b = append(appendAmount(append(b, " behind a prompt of at least "...), n), " tokens"...)
	}
	b = append(b, " is more than the whole KV cache of any model server: "...)
	if r.limit > 0 {
		return r.appendLower(b)
	}
	return append(b, "shorten the prompt."...)
}

// appendLower says to what the caller should lower its budget, by the name of the field
// that it used.
func (r *refusal) appendLower(b []byte) []byte {
	b = append(append(append(b, "set "...), r.v.field...), " to "...)
	return append(appendTokens(b, r.limit), " or less."...)
}

func (r *refusal) appendNoRoom(b []byte) []byte {
	b = appendAmount(append(b, "No model server has room now for a request of "...), r.v.class.Budget)
	b = append(b, " output tokens."...)
	if r.limit > 0 {
		b = append(append(append(b, " There is room for a "...), r.v.field...), " of "...)
		b = appendTokens(b, r.limit)
		b = append(b, " at most."...)
	}
	return r.appendRetry(b)
}

// appendInFlight tells how many requests the client has in flight and, where that
// is more than it should have, how many those are.
func (r *refusal) appendInFlight(b []byte, should, atLimit string) []byte {
	has, may := uint64(max(r.v.admit.Refusal.InFlight, 0)), r.concurrency
	b = appendUint(b, has)
	b = append(append(b, plural(has, " request")...), " in flight"...)
	if has <= may {
		return append(append(b, atLimit...), ": wait until one has ended."...)
	}
	b = appendUint(append(b, should...), may)
	b = appendUint(append(b, ": reduce concurrent requests from "...), has)
	b = appendUint(append(b, " to "...), may)
	return append(b, '.')
}

// appendPromised says why waiting for the next window does not help.
func (r *refusal) appendPromised(b []byte, reset time.Duration) []byte {
	if r.shouldRetry || reset > time.Duration(r.millis)*time.Millisecond {
		return b
	}
	return append(b, " Requests that were refused before this one have their turns first, and its own would come too late."...)
}

func (r *refusal) appendRetry(b []byte) []byte {
	if !r.shouldRetry {
		return append(b, " Do not retry: waiting will not help in time."...)
	}
	b = appendUint(append(b, " Retry in "...), r.millis)
	return append(b, " ms."...)
}

// appendPeriod names a window: "minute", or "5m0s" if it has no name.
func appendPeriod(b []byte, window time.Duration) []byte {
	switch window {
	case time.Second:
		return append(b, "second"...)
	case time.Minute:
		return append(b, "minute"...)
	case time.Hour:
		return append(b, "hour"...)
	case 24 * time.Hour:
		return append(b, "day"...)
	}
	return append(b, window.String()...)
}

// appendReset says when the window ends, in whole seconds, rounded up.
func appendReset(b []byte, reset time.Duration) []byte {
	b = append(b, "; the limit is reset in "...)
	b = appendUint(b, uint64((max(reset, 0)+time.Second-1)/time.Second))
	return append(b, " s."...)
}

func plural(n uint64, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

func appendUint(b []byte, n uint64) []byte { return strconv.AppendUint(b, n, 10) }

func appendInt(b []byte, n int64) []byte { return strconv.AppendInt(b, n, 10) }

// appendAmount is appendTokens for what a caller asked for: where that was cut off
// at MaxBudget, a number that nobody sent, it says what it surely exceeds.
func appendAmount(b []byte, n fleet.Tokens) []byte {
	if n >= MaxBudget {
		return append(b, "more than 2000000000"...)
	}
	return appendTokens(b, n)
}

func appendTokens(b []byte, n fleet.Tokens) []byte { return strconv.AppendInt(b, int64(n), 10) }
