package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// maxBody bounds a request's body, as the Anthropic API does.
const maxBody = 32 << 20

// job is what a request asks for, whatever API it came by.
type job struct {
	model        string // "" is the server's
	prompt       int    // tokens
	maxTokens    int    // 0 if the client sets no limit
	ignoreEOS    bool   // exactly maxTokens
	forced       int    // answer's length set by fairlead_sim, or 0
	stream       bool
	includeUsage bool
}

// answer is what is known of an answer before it begins.
type answer struct {
	id      string // hex digits, unique within a server's life
	created int64  // Unix seconds
	model   string // in JSON, with its quotes
	seed    uint64 // of its text
	prompt  int
	output  int
	stops   bool // ends by itself rather than at the client's limit
	usage   bool // stream a chunk with the usage
}

// api is one of the interfaces a server speaks. Its methods append to buf and
// return it.
type api interface {
	// parse reads a body; the error is the client's fault.
	parse(body []byte) (job, error)
	// fail appends an error's body.
	fail(buf []byte, status int, err error) []byte
	// whole appends an answer in one piece.
	whole(buf []byte, a *answer) []byte
	// open appends what a stream has before its first text.
	open(buf []byte, a *answer) []byte
	// text appends the event with tokens from…to−1.
	text(buf []byte, a *answer, from, to int) []byte
	// close appends what a stream has after its last text.
	close(buf []byte, a *answer) []byte
	// breakOff appends the end of a stream that cannot go on.
	breakOff(buf []byte, err error) []byte
}

// simFields may stand in a body under "fairlead_sim" and set lengths that are
// else estimated and drawn.
type simFields struct {
	PromptTokens int `json:"prompt_tokens"`
	OutputTokens int `json:"output_tokens"`
}

func (f simFields) check() error {
	if min(f.PromptTokens, f.OutputTokens) < 0 || max(f.PromptTokens, f.OutputTokens) > maxTokenCount {
		return fmt.Errorf("fairlead_sim: token counts must be 0 to %d", maxTokenCount)
	}
	return nil
}

// maxTokenCount bounds token counts that clients name, far above every context.
const maxTokenCount = 1 << 40

// bytesPerToken estimates a prompt's tokens: about four bytes of English text
// make one token.
const bytesPerToken = 4

// promptTokens is the estimate for a prompt of n bytes, unless it is set.
func (f simFields) promptTokens(n int) int {
	if f.PromptTokens > 0 {
		return f.PromptTokens
	}
	return max(1, (n+bytesPerToken-1)/bytesPerToken)
}

// content is the text of a message: a string, or a list of parts of which those
// with text count.
type content struct {
	bytes int
}

// UnmarshalJSON implements json.Unmarshaler.
func (c *content) UnmarshalJSON(data []byte) error {
	data = bytes.TrimSpace(data)
	switch {
	case len(data) > 0 && data[0] == '"':
		var text string
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
		c.bytes = len(text)
		return nil
	case bytes.Equal(data, []byte("null")):
		return nil
	}
	var parts []struct {
		Text    string          `json:"text"`
		Content json.RawMessage `json:"content"` // of a tool_result; taken as it stands
	}
	if err := json.Unmarshal(data, &parts); err != nil {
		return errors.New("content must be a string or a list of parts")
	}
	for _, p := range parts {
		c.bytes += len(p.Text) + len(p.Content)
	}
	return nil
}

// message of a conversation, in both APIs.
type message struct {
	Role    string  `json:"role"`
	Content content `json:"content"`
}

// messageBytes checks messages and returns the bytes of their text.
func messageBytes(messages []message) (int, error) {
	if len(messages) == 0 {
		return 0, errors.New("messages: at least one message is required")
	}
	n := 0
	for i, m := range messages {
		if m.Role == "" {
			return 0, fmt.Errorf("messages[%d]: role is required", i)
		}
		n += m.Content.bytes
	}
	return n, nil
}

// tokenLimit checks a client's limit on the answer.
func tokenLimit(name string, v *int64) (int, error) {
	if v == nil {
		return 0, nil
	}
	if *v < 1 {
		return 0, fmt.Errorf("%s must be at least 1, got %d", name, *v)
	}
	return int(min(*v, maxTokenCount)), nil
}

// decodeBody reads a JSON object.
func decodeBody(body []byte, into any) error {
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("cannot read the body as JSON: %w", err)
	}
	return nil
}

// words make the text of answers; each stands for one token.
var words = [16]string{
	" the", " of", " and", " to", " in", " is", " that", " for",
	" it", " as", " was", " with", " be", " by", " on", " not",
}

// appendText appends the text of tokens from…to−1. It needs no escaping in JSON.
func (a *answer) appendText(buf []byte, from, to int) []byte {
	for i := from; i < to; i++ {
		buf = append(buf, words[mix(a.seed+uint64(i))&15]...)
	}
	return buf
}

// apiText is an error worded as a model server words it for its clients.
type apiText string

func (t apiText) Error() string { return string(t) }

func quoteJSON(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		return `""` // impossible for a string
	}
	return string(b)
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error is the client's own departure
}

func notFound(w http.ResponseWriter, r *http.Request) {
	writeJSON(w, http.StatusNotFound, chatAPI{}.fail(nil, http.StatusNotFound, fmt.Errorf("no such path: %s", r.URL.Path)))
}

func wrongMethod(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Allow", http.MethodPost)
	var speaks api = chatAPI{}
	if r.URL.Path == "/v1/messages" {
		speaks = messagesAPI{}
	}
	writeJSON(w, http.StatusMethodNotAllowed, speaks.fail(nil, http.StatusMethodNotAllowed, errors.New("method not allowed; accepted: POST")))
}

// generation serves an API's generating path.
func (s *Server) generation(speaks api) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		refuse := func(status int, err error) { writeJSON(w, status, speaks.fail(nil, status, err)) }
		retryAfter, dead := s.gate()
		switch {
		case retryAfter >= 0:
			if retryAfter > 0 {
				w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
			}
			refuse(http.StatusTooManyRequests, errors.New("too many requests"))
			return
		case dead:
			refuse(http.StatusInternalServerError, errOutOfMemory)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			refuse(http.StatusRequestEntityTooLarge, fmt.Errorf("the body is larger than %d bytes", maxBody))
			return
		} else if err != nil {
			refuse(http.StatusBadRequest, errors.New("the body broke off"))
			return
		}
		j, err := speaks.parse(body)
		if err != nil {
			refuse(http.StatusBadRequest, err)
			return
		}
		if j.model != "" && j.model != s.cfg.Model {
			refuse(http.StatusNotFound, apiText("The model `"+j.model+"` does not exist."))
			return
		}
		a := s.answer(j, body)
		if need := j.prompt + max(j.maxTokens, 1); need > s.cfg.Engine.MaxModelLen() {
			refuse(http.StatusBadRequest, apiText(fmt.Sprintf("This model's maximum context length is %d tokens. "+
				"However, you requested %d tokens (%d in the messages, %d in the completion).",
				s.cfg.Engine.MaxModelLen(), need, j.prompt, max(j.maxTokens, 1))))
			return
		}
		s.serveJob(w, r, speaks, j, a)
	}
}

// gate counts a request and says whether a fault refuses it: retryAfter is −1,
// or the seconds of a 429.
func (s *Server) gate() (retryAfter int, dead bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests++
	if s.on(Throttle) {
		return int(s.faults.active[Throttle].factor + 0.999), false
	}
	return -1, s.on(OutOfMemory)
}

// answer decides an answer's length: the client's limit if it ignores the end of
// sequence, else what is drawn by the seed and the body's bytes, up to the limit.
// So a request sent twice, or to another server, gets the same length.
func (s *Server) answer(j job, body []byte) *answer {
	h := hashString(s.seed, body)
	room := max(1, s.cfg.Engine.MaxModelLen()-j.prompt)
	limit := room
	if j.maxTokens > 0 {
		limit = min(limit, j.maxTokens)
	}
	a := &answer{
		created: time.Now().Unix(), model: s.modelJSON, seed: h,
		prompt: j.prompt, output: limit, usage: j.includeUsage,
	}
	wanted := drawLength(h)
	if j.forced > 0 {
		wanted = j.forced
	}
	if !(j.ignoreEOS && j.maxTokens > 0) && wanted <= limit {
		a.output, a.stops = wanted, true
	}
	s.mu.Lock()
	a.id = fmt.Sprintf("%016x", mix(hashString(s.seed, s.cfg.Name)+s.requests))
	s.mu.Unlock()
	return a
}

func (s *Server) serveJob(w http.ResponseWriter, r *http.Request, speaks api, j job, a *answer) {
	wake := make(chan struct{}, 1)
	q := &engine.Sequence{Prompt: a.prompt, Output: a.output, Stops: a.stops, Owner: wake}
	if j.stream {
		q.Every = s.cfg.TokensPerEvent
	}
	s.mu.Lock()
	silent := s.on(Silence)
	s.mu.Unlock()
	if silent {
		if j.stream {
			startStream(w)
		}
		<-r.Context().Done()
		return
	}
	switch err := s.enqueue(q); {
	case errors.Is(err, errCrashed):
		panic(http.ErrAbortHandler)
	case errors.Is(err, errQueueFull):
		writeJSON(w, http.StatusServiceUnavailable, speaks.fail(nil, http.StatusServiceUnavailable, err))
		return
	case err != nil:
		writeJSON(w, http.StatusInternalServerError, speaks.fail(nil, http.StatusInternalServerError, err))
		return
	}
	defer s.abandon(q) // nothing happens when it is done
	if j.stream {
		s.stream(w, r, speaks, a, q, wake)
	} else {
		s.whole(w, r, speaks, a, q, wake)
	}
}

// whole answers in one piece after the last token.
func (s *Server) whole(w http.ResponseWriter, r *http.Request, speaks api, a *answer, q *engine.Sequence, wake <-chan struct{}) {
	select {
	case <-wake:
	case <-r.Context().Done():
		return
	}
	switch err := s.progress(q).err; {
	case errors.Is(err, errCrashed):
		panic(http.ErrAbortHandler)
	case err != nil:
		writeJSON(w, http.StatusInternalServerError, speaks.fail(nil, http.StatusInternalServerError, err))
	default:
		writeJSON(w, http.StatusOK, speaks.whole(nil, a))
	}
}

// startStream sends the headers at once, long before the first token, as vLLM's
// HTTP server does.
func startStream(w http.ResponseWriter) *http.ResponseController {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	c := http.NewResponseController(w)
	_ = c.Flush() // an error is seen by the next write
	return c
}

// stream answers with an event for the first token and one for every
// TokensPerEvent after it.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, speaks api, a *answer, q *engine.Sequence, wake <-chan struct{}) {
	control := startStream(w)
	var buf []byte
	sent, events := 0, 0
	for sent < a.output {
		select {
		case <-wake:
		case <-r.Context().Done():
			return
		}
		p := s.progress(q)
		if errors.Is(p.err, errCrashed) {
			panic(http.ErrAbortHandler)
		}
		buf = buf[:0]
		broken := p.err
		for next := s.nextEvent(sent, a.output); broken == nil && sent < a.output && next <= p.generated; next = s.nextEvent(sent, a.output) {
			if p.errorAfter >= 0 && events >= p.errorAfter {
				broken = errEngine
				break
			}
			if sent == 0 {
				buf = speaks.open(buf, a)
			}
			buf = speaks.text(buf, a, sent, next)
			sent, events = next, events+1
		}
		if broken != nil {
			buf = speaks.breakOff(buf, broken)
		} else if sent == a.output {
			buf = speaks.close(buf, a)
		}
		if _, err := w.Write(buf); err != nil || control.Flush() != nil || broken != nil {
			return
		}
	}
}

// nextEvent is the number of tokens sent after the next event.
func (s *Server) nextEvent(sent, output int) int {
	if sent == 0 {
		return 1
	}
	return min(sent+s.cfg.TokensPerEvent, output)
}
