package integration

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

const (
	jsonUsage = `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"caf\u00e9"},"finish_reason":"stop"}],  "usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18,"prompt_tokens_details":{"cached_tokens":5}}}`
	chunk     = `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"caf\u00e9 "}}]}` + "\n\n"
	lastChunk = `data: {"id":"x","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":30,"total_tokens":130}}` + "\n\n"
	done      = "data: [DONE]\n\n"
)

// anthropicStream is a stream of /v1/messages that took 20 tokens and gave 6.
var anthropicStream = []string{
	"event: message_start\ndata: " + `{"type":"message_start","message":{"id":"m","type":"message","role":"assistant","content":[],"model":"m","usage":{"input_tokens":20,"output_tokens":1}}}` + "\n\n",
	"event: content_block_start\ndata: " + `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}` + "\n\n",
	": a comment\n\n",
	"event: content_block_delta\ndata: " + `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"caf\u00e9"}}` + "\n\n",
	"event: message_delta\ndata: " + `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":6}}` + "\n\n",
	"event: message_stop\ndata: " + `{"type":"message_stop"}` + "\n\n",
}

// TestUsageSettlesReservations: tokens are reserved by what a request asks for
// and corrected to what it took; the metrics count what was taken, and where an
// answer does not tell it, nothing. No byte of an answer is changed, and each
// event of a stream comes when it was sent.
func TestUsageSettlesReservations(t *testing.T) {
	m := newModelServer(t)
	const day = 1_000_000
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ messages, chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, usage: true }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, usage: true }
limits:
  - { name: daily, tokens: %d/day }
`, m.addr(), day))
	const body = `{"max_tokens":5000,"stream":true,"messages":[{"role":"user","content":"hello"}]}`
	const reserved = 5000 + int64(len(body))/4
	usage := func(kind string) float64 {
		return metric(s.metricsPage(t), "fairlead_usage_tokens_total", fmt.Sprintf("kind=%q", kind))
	}
	settled := func() float64 {
		return metric(s.metricsPage(t), "fairlead_admission_events_total", `kind="tokens_settled"`)
	}
	left := int64(day)
	// reserve sends a request and checks what it left of the day's tokens.
	reserve := func(what, path string) answer {
		t.Helper()
		r := s.post(t, path, body, "authorization", "Bearer one")
		if got := whole(r.header, "X-Ratelimit-Remaining-Tokens"); r.status != http.StatusOK || got != left-reserved {
			t.Errorf("%s: status %d, %d tokens left; want %d", what, r.status, got, left-reserved)
		}
		return r
	}
	// took waits until what a request took has been settled.
	took := func(what string, before float64, input, output int64) {
		t.Helper()
		envoytest.Eventually(t, what+" settled", func() bool { return settled() == before+float64(input+output) })
		left -= input + output
	}

	before := settled()
	m.answerWith(envoytest.Status(http.StatusOK, jsonUsage, "content-type", "application/json"))
	if r := reserve("JSON", chatPath); r.body != jsonUsage || whole(r.header, "Content-Length") != int64(len(jsonUsage)) {
		t.Errorf("the answer was changed: %v %s", r.header, r.body)
	}
	took("JSON", before, 11, 7)
	if in, cached, out := usage("input"), usage("cached"), usage("output"); in != 11 || cached != 5 || out != 7 {
		t.Errorf("usage counted: %v input, %v cached, %v output; want 11, 5, 7", in, cached, out)
	}

	before = settled()
	s.stream(t, m, chatPath, body, []string{chunk, ": a comment\n\n", chunk, chunk, lastChunk, done})
	took("stream", before, 100, 30)
	before = settled()
	s.stream(t, m, "/v1/messages", body, anthropicStream)
	took("Anthropic stream", before, 20, 6)
	if in, out := usage("input"), usage("output"); in != 131 || out != 43 {
		t.Errorf("usage counted: %v input, %v output; want 131 and 43", in, out)
	}
	m.answerWith(envoytest.Status(http.StatusOK, jsonUsage, "content-type", "application/json"))
	before = settled()
	reserve("after streams", chatPath)
	took("after streams", before, 11, 7)

	// An error takes nothing.
	m.answerWith(envoytest.Status(http.StatusBadRequest, `{"error":{"message":"no"}}`, "content-type", "application/json"))
	ended := func() float64 { return metric(s.metricsPage(t), "fairlead_requests_ended_total") }
	requests := ended()
	if r := s.post(t, chatPath, body, "authorization", "Bearer one"); r.status != http.StatusBadRequest {
		t.Errorf("status %d", r.status)
	}
	envoytest.Eventually(t, "the error logged", func() bool { return ended() == requests+1 })
	m.answerWith(envoytest.Status(http.StatusOK, jsonUsage, "content-type", "application/json"))
	before = settled()
	reserve("after an error", chatPath)
	took("after an error", before, 11, 7)

	// A stream that does not tell its usage is not one that took nothing.
	in, out, told := usage("input"), usage("output"), metric(s.metricsPage(t), "fairlead_usage_requests_total")
	requests = ended()
	s.stream(t, m, chatPath, body, []string{chunk, chunk, done})
	envoytest.Eventually(t, "the stream logged", func() bool { return ended() == requests+1 })
	left -= reserved // stands
	if usage("input") != in || usage("output") != out || metric(s.metricsPage(t), "fairlead_usage_requests_total") != told {
		t.Error("usage was counted that no answer told")
	}
	m.answerWith(envoytest.Status(http.StatusOK, jsonUsage, "content-type", "application/json"))
	reserve("after a stream without usage", chatPath)

	page := s.metricsPage(t)
	for _, family := range []string{"fairlead_usage_token_efficiency", "fairlead_usage_cache_hit_ratio", "fairlead_usage_burst_compliance"} {
		if v := metric(page, family); !strings.Contains(page, family) || v < 0 || v > 1 {
			t.Errorf("%s: %v", family, v)
		}
	}
}

// stream sends a request and gets each event before the next one is sent.
func (s *served) stream(t *testing.T, m *modelServer, path, body string, events []string) {
	t.Helper()
	feed := make(chan string)
	m.answerWith(envoytest.SSE(feed))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.listen+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("content-type", "application/json")
	request.Header.Set("authorization", "Bearer one")
	response, err := s.with.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	for _, want := range events {
		select {
		case feed <- want:
		case <-t.Context().Done():
			t.Fatal("the server takes no event")
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(response.Body, got); err != nil || string(got) != want {
			t.Fatalf("event %q came as %q, %v", want, got, err)
		}
	}
	close(feed)
	if rest, err := io.ReadAll(response.Body); err != nil || len(rest) > 0 {
		t.Errorf("behind the last event: %q, %v", rest, err)
	}
}

// TestBrokenStreamIsChargedByTheLengthOfStreams, also on a route whose whole answers
// have far fewer bytes a token: 90 of 100 chunks are some 90 tokens.
func TestBrokenStreamIsChargedByTheLengthOfStreams(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a, usage: true }
limits:
  - { name: daily, tokens: 1000000/day }
`, m.addr()))
	settled := func() float64 {
		return metric(s.metricsPage(t), "fairlead_admission_events_total", `kind="tokens_settled"`)
	}
	sends := func(n int, end func(io.Writer)) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("content-type", "text/event-stream")
			_, _ = io.WriteString(w, strings.Repeat(chunk, n))
			_ = http.NewResponseController(w).Flush()
			end(w)
		})
	}
	const (
		plain    = `{"max_tokens":5000}`
		streamed = `{"max_tokens":5000,"stream":true}`
		told     = `data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":100,"total_tokens":200}}` + "\n\n"
	)
	long := fmt.Sprintf(`{"object":"chat.completion","choices":[{"message":{"content":%q}}],"usage":{"prompt_tokens":100,"completion_tokens":1000,"total_tokens":1100}}`, strings.Repeat("word", 1000))
	for range 5 {
		before := settled()
		m.answerWith(envoytest.Status(http.StatusOK, long, "content-type", "application/json"))
		s.post(t, chatPath, plain)
		m.answerWith(sends(100, func(w io.Writer) { _, _ = io.WriteString(w, told+done) }))
		s.post(t, chatPath, streamed)
		envoytest.Eventually(t, "both settled", func() bool { return settled() >= before+1100+200 })
	}
	before := settled()
	m.answerWith(sends(90, func(io.Writer) { panic(http.ErrAbortHandler) }))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.listen+chatPath, strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("content-type", "application/json")
	response, err := s.with.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.ReadAll(response.Body); err == nil {
		t.Fatal("the stream did not break off")
	}
	envoytest.Eventually(t, "the broken stream settled", func() bool { return settled() > before })
	prompt := float64(len(streamed) / 4)
	if output := settled() - before - prompt; output < 80 || output > 90 {
		t.Errorf("%v tokens of output charged for 90 of 100 chunks; want 80 to 90", output)
	}
}
