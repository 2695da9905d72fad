package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// one sends a request and reads its answer.
func (g *generator) one(ctx context.Context, r *Result) {
	due := g.start.Add(r.At)
	since := func() time.Duration { return max(time.Since(due), 1) } // 0 means never
	r.Late = time.Since(due)
	ctx, cancel := context.WithDeadlineCause(ctx, due.Add(g.o.Timeout), errTimeout)
	defer cancel()
	err := g.exchange(ctx, r, since)
	r.Total = since()
	if err != nil {
		r.Err = explain(ctx, err)
		r.Cut = errors.Is(context.Cause(ctx), errDrain)
		r.Incomplete = r.Status/100 == 2
	}
}

// explain prefers the reason why the request was cut off to the client's words
// about it.
func explain(ctx context.Context, err error) string {
	if cause := context.Cause(ctx); cause != nil {
		return cause.Error()
	}
	return err.Error()
}

func (g *generator) exchange(ctx context.Context, r *Result, since func() time.Duration) error {
	body := appendBody(nil, g.model, r.Arrival)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.Target+g.o.Path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header = g.header(r)
	response, err := g.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	r.HeaderTime = since()
	r.Status = response.StatusCode
	r.readHeader(response.Header)
	if r.Status/100 == 2 && strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") {
		return readStream(response.Body, g.o.Dialect, r, since)
	}
	return r.readWhole(response.Body, since)
}

func (g *generator) header(r *Result) http.Header {
	h := g.o.Header.Clone()
	if h == nil {
		h = make(http.Header, 4)
	}
	h.Set("Content-Type", "application/json")
	if r.Session != "" {
		h.Set(wire.HeaderSessionAffinity, r.Session)
	}
	if g.o.Dialect == fleet.DialectAnthropic {
		h.Set("Anthropic-Version", "2023-06-01")
	}
	return h
}

func (r *Result) readHeader(h http.Header) {
	r.Pool = h.Get(wire.HeaderServedBy)
	r.Strategy = h.Get(wire.HeaderRouteStrategy)
	r.ServedBy = h.Get(ServerHeader)
	if r.ServedBy == "" {
		r.ServedBy = r.Pool
	}
	r.RetryAfter = retryAfter(h)
	r.RecommendedConcurrency, _ = strconv.Atoi(h.Get(wire.HeaderRecommendedConcurrency))
}

// retryAfter reads retry-after-ms, else retry-after in seconds, as the SDKs do.
// Anything else, also a date, is 0.
func retryAfter(h http.Header) time.Duration {
	if ms, err := strconv.ParseFloat(h.Get(wire.HeaderRetryAfterMs), 64); err == nil && ms > 0 && ms < 1e9 {
		return time.Duration(ms * float64(time.Millisecond))
	}
	if s, err := strconv.ParseFloat(h.Get(wire.HeaderRetryAfter), 64); err == nil && s > 0 && s < 1e6 {
		return time.Duration(s * float64(time.Second))
	}
	return 0
}

// maxAnswer bounds how much of an answer without streaming is read.
const maxAnswer = 64 << 20

// tailSize is how much of the end of an answer is kept to find its usage in.
const tailSize = 1 << 10

func (r *Result) readWhole(body io.Reader, since func() time.Duration) error {
	tail := tailWriter{}
	n, err := io.Copy(&tail, io.LimitReader(body, maxAnswer+1))
	switch {
	case err != nil:
		return err
	case n > maxAnswer:
		return fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	case r.Status/100 != 2:
		return nil
	case r.Stream:
		return errors.New("asked for a stream, got a whole answer")
	}
	r.FirstToken, r.Whole = since(), true
	r.Tokens = usage(tail.bytes())
	return nil
}

// tailWriter keeps at least the last tailSize bytes written to it.
type tailWriter struct{ buf []byte }

func (t *tailWriter) Write(p []byte) (int, error) {
	if len(t.buf)+len(p) > 16*tailSize {
		kept := copy(t.buf, t.bytes())
		t.buf = t.buf[:kept]
	}
	t.buf = append(t.buf, p[max(0, len(p)-tailSize):]...)
	return len(p), nil
}

func (t *tailWriter) bytes() []byte { return t.buf[max(0, len(t.buf)-tailSize):] }

// appendBody appends a request body whose prompt has four bytes per token of
// a.Prompt, the usual estimate for English text, and that asks for exactly
// a.Output tokens (ignore_eos is vLLM's field for that). The same body does for
// both dialects. The model is already a JSON string.
func appendBody(dst, model []byte, a Arrival) []byte {
	dst = append(dst, `{"model":`...)
	dst = append(dst, model...)
	dst = append(dst, `,"max_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(a.Output, 1)), 10)
	dst = append(dst, `,"ignore_eos":true,"stream":`...)
	dst = strconv.AppendBool(dst, a.Stream)
	dst = append(dst, `,"messages":[{"role":"user","content":"`...)
	dst = appendPrompt(dst, a)
	return append(dst, `"}]}`...)
}

// bytesPerToken of prompts.
const bytesPerToken = 4

// filler is text that needs no escaping in JSON.
const filler = "the quick brown fox jumps over the lazy dog and sleeps until the sun comes up again; "

// appendPrompt begins with the arrival's number, so that no server has the
// prompt's beginning in a prefix cache.
func appendPrompt(dst []byte, a Arrival) []byte {
	size := bytesPerToken * max(a.Prompt, 1)
	end := len(dst) + size
	dst = strconv.AppendInt(dst, int64(a.Index), 10)
	dst = append(dst, ' ')
	for len(dst) < end {
		dst = append(dst, filler...)
	}
	return dst[:end]
}
