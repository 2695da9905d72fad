package extproc

import (
	"strconv"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// Waits that a client is told: SDKs give up or fall back to their own back-off
// above a minute, and treat zero as none (measured with the official SDKs).
const (
	minRetryAfter = time.Millisecond
	maxRetryAfter = time.Minute
)

const statusTooManyRequests = 429

// appendRefusal writes immediate_response: a 429 in the caller's dialect.
func (s *Service) appendRefusal(b []byte, v *verdict) []byte {
	advice := v.plan.Advice(v.class, s.o.Live, v.id.Seed())
	wait := min(max(advice.RetryAfter, minRetryAfter), maxRetryAfter)
	t := refusal{
		millis:      uint64((wait + time.Millisecond - 1) / time.Millisecond),
		seconds:     uint64((wait + time.Second - 1) / time.Second),
		concurrency: uint64(max(advice.RecommendedConcurrency, 1)),
	}
	b, immediate := open(b, 7) // ProcessingResponse.immediate_response
	b, code := open(b, 1)      // ImmediateResponse.status
	b = varint(b, 1, statusTooManyRequests)
	b = shut(b, code)
	b, headers := open(b, 2) // ImmediateResponse.headers
	b = t.appendHeaders(b, v)
	b = shut(b, headers)
	b, body := open(b, 3) // ImmediateResponse.body
	b = t.appendBody(b, v)
	b = shut(b, body)
	b, details := open(b, 5) // ImmediateResponse.details
	b = append(append(b, "fairlead_"...), v.decision.Reason.String()...)
	return shut(shut(b, details), immediate)
}

// refusal is the advice as the wire shows it.
type refusal struct {
	millis      uint64 // 1 … 60,000
	seconds     uint64 // millis rounded up
	concurrency uint64 // ≥ 1
}

func (t refusal) appendHeaders(b []byte, v *verdict) []byte {
	var digits [20]byte
	b = setHeader(b, wire.HeaderRetryAfterMs, appendUint(digits[:0], t.millis))
	b = setHeader(b, wire.HeaderRetryAfter, appendUint(digits[:0], t.seconds))
	b = setHeader(b, wire.HeaderRecommendedConcurrency, appendUint(digits[:0], t.concurrency))
	b = setHeader(b, "content-type", "application/json")
	b = setHeader(b, wire.HeaderRouteStrategy, v.strategy.String())
	b = setHeader(b, wire.HeaderDecision, v.idText)
	b = setHeader(b, wire.HeaderExecutionGraph, v.plan.Digest())
	return setHeader(b, wire.HeaderRequestID, v.requestID)
}

// appendBody writes the error object of the caller's API with two more members
// in it, which the official SDKs pass over. All that is inserted is digits or a
// plain id, so nothing needs escaping.
func (t refusal) appendBody(b []byte, v *verdict) []byte {
	anthropic := v.info.Dialect == fleet.DialectAnthropic
	if anthropic {
		b = append(b, `{"type":"error","error":{"type":"rate_limit_error","message":"`...)
	} else {
		b = append(b, `{"error":{"message":"`...)
	}
	b = t.appendMessage(b)
	if !anthropic {
		b = append(b, `","type":"rate_limit_error","param":null,"code":"rate_limit_exceeded`...)
	}
	b = appendUint(append(b, `","retry_after_ms":`...), t.millis)
	b = appendUint(append(b, `,"recommended_concurrency":`...), t.concurrency)
	b = append(b, '}')
	if anthropic {
		b = append(append(append(b, `,"request_id":"`...), v.requestID...), '"')
	}
	return append(b, '}')
}

func (t refusal) appendMessage(b []byte) []byte {
	b = append(b, "All model servers for this request are busy. Retry in "...)
	b = appendUint(b, t.millis)
	b = append(b, " ms and keep at most "...)
	b = appendUint(b, t.concurrency)
	if t.concurrency == 1 {
		return append(b, " request in flight."...)
	}
	return append(b, " requests in flight."...)
}

func appendUint(b []byte, n uint64) []byte { return strconv.AppendUint(b, n, 10) }
