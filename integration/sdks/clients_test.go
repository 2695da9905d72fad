package sdks

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	openaioption "github.com/openai/openai-go/v3/option"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

var exit = os.Exit

// failure is what a client makes of an answer that is not 200.
type failure struct {
	status    int
	text      string // the error as a person reads it
	kind      string // the API's type of error
	requestID string
}

// client is one of the two official clients.
type client struct {
	name string
	// path is where its requests go; auth and credential are the header that says
	// whose they are.
	path, auth, credential string
	// ask sends one request with a given budget and returns what was generated.
	ask func(ctx context.Context, url string, maxTokens int64) (text string, header http.Header, err error)
	// within sends one request whose caller waits no longer than timeout for each
	// answer.
	within func(ctx context.Context, url string, maxTokens int64, timeout time.Duration) error
	// stream asks for a stream and returns what its deltas add up to.
	stream func(ctx context.Context, url string) (string, error)
	failed func(error) (failure, bool)
	// once sends one request that is not tried again, and returns how long its answer
	// says to wait if it was refused.
	once func(ctx context.Context, url string) (wait time.Duration, err error)
	// answer and events are what a server of that API says.
	answer http.Handler
	events []string
}

const (
	key   = "sk-test-0123456789"
	model = "m"
	said  = "Hello there"
)

var clients = []client{
	{
		name: "openai-go",
		path: "/v1/chat/completions", auth: "Authorization", credential: "Bearer " + key,
		ask: func(ctx context.Context, url string, maxTokens int64) (string, http.Header, error) {
			var raw *http.Response
			c := newOpenAI(url)
			got, err := c.Chat.Completions.New(ctx, openaiRequest(maxTokens), openaioption.WithResponseInto(&raw))
			if err != nil {
				return "", nil, err
			}
			return got.Choices[0].Message.Content, raw.Header, nil
		},
		within: func(ctx context.Context, url string, maxTokens int64, timeout time.Duration) error {
			c := newOpenAI(url)
			_, err := c.Chat.Completions.New(ctx, openaiRequest(maxTokens), openaioption.WithRequestTimeout(timeout))
			return err
		},
		stream: func(ctx context.Context, url string) (string, error) {
			c := newOpenAI(url)
			s := c.Chat.Completions.NewStreaming(ctx, openaiRequest(16))
			defer s.Close()
			var text strings.Builder
			for s.Next() {
				for _, c := range s.Current().Choices {
					text.WriteString(c.Delta.Content)
				}
			}
			return text.String(), s.Err()
		},
		failed: func(err error) (failure, bool) {
			var e *openai.Error
			if !errors.As(err, &e) {
				return failure{}, false
			}
			return failure{e.StatusCode, e.Message, e.Type, e.Response.Header.Get("x-request-id")}, true
		},
		once: func(ctx context.Context, url string) (time.Duration, error) {
			c := newOpenAI(url)
			_, err := c.Chat.Completions.New(ctx, openaiRequest(16), openaioption.WithMaxRetries(0))
			var e *openai.Error
			if errors.As(err, &e) && e.StatusCode == http.StatusTooManyRequests {
				return attempt{header: e.Response.Header}.advised(), nil
			}
			return 0, err
		},
		answer: envoytest.JSON(`{"id":"c-1","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello there"},"finish_reason":"stop"}],` +
			`"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`),
		events: []string{
			`data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":"Hello"}}]}`,
			`data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" there"}}]}`,
			`data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`,
			`data: [DONE]`,
		},
	},
	{
		name: "anthropic-sdk-go",
		path: "/v1/messages", auth: "X-Api-Key", credential: key,
		ask: func(ctx context.Context, url string, maxTokens int64) (string, http.Header, error) {
			var raw *http.Response
			c := newAnthropic(url)
			got, err := c.Messages.New(ctx, anthropicRequest(maxTokens), anthropicoption.WithResponseInto(&raw))
			if err != nil {
				return "", nil, err
			}
			return got.Content[0].Text, raw.Header, nil
		},
		within: func(ctx context.Context, url string, maxTokens int64, timeout time.Duration) error {
			c := newAnthropic(url)
			_, err := c.Messages.New(ctx, anthropicRequest(maxTokens), anthropicoption.WithRequestTimeout(timeout))
			return err
		},
		stream: func(ctx context.Context, url string) (string, error) {
			c := newAnthropic(url)
			s := c.Messages.NewStreaming(ctx, anthropicRequest(16))
			defer s.Close()
			var whole anthropic.Message
			for s.Next() {
				if err := whole.Accumulate(s.Current()); err != nil {
					return "", err
				}
			}
			if s.Err() != nil || len(whole.Content) == 0 {
				return "", s.Err()
			}
			return whole.Content[0].Text, nil
		},
		failed: func(err error) (failure, bool) {
			var e *anthropic.Error
			if !errors.As(err, &e) {
				return failure{}, false
			}
			var body struct {
				Error struct{ Message string }
			}
			_ = json.Unmarshal([]byte(e.RawJSON()), &body)
			return failure{e.StatusCode, body.Error.Message, string(e.Type()), e.RequestID}, true
		},
		once: func(ctx context.Context, url string) (time.Duration, error) {
			c := newAnthropic(url)
			_, err := c.Messages.New(ctx, anthropicRequest(16), anthropicoption.WithMaxRetries(0))
			var e *anthropic.Error
			if errors.As(err, &e) && e.StatusCode == http.StatusTooManyRequests {
				return attempt{header: e.Response.Header}.advised(), nil
			}
			return 0, err
		},
		answer: envoytest.JSON(`{"id":"m-1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"Hello there"}],"stop_reason":"end_turn",` +
			`"usage":{"input_tokens":3,"output_tokens":2}}`),
		events: []string{
			"event: message_start\n" + `data: {"type":"message_start","message":{"id":"m-1","type":"message","role":"assistant","model":"m","content":[],"usage":{"input_tokens":3,"output_tokens":0}}}`,
			"event: content_block_start\n" + `data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`,
			"event: content_block_delta\n" + `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}`,
			"event: content_block_delta\n" + `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" there"}}`,
			"event: content_block_stop\n" + `data: {"type":"content_block_stop","index":0}`,
			"event: message_delta\n" + `data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}`,
			"event: message_stop\n" + `data: {"type":"message_stop"}`,
		},
	},
}

func newOpenAI(url string) openai.Client {
	return openai.NewClient(openaioption.WithBaseURL(url+"/v1/"), openaioption.WithAPIKey(key))
}

func openaiRequest(maxTokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: model, MaxCompletionTokens: openai.Int(maxTokens),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hi")},
	}
}

func newAnthropic(url string) anthropic.Client {
	return anthropic.NewClient(anthropicoption.WithBaseURL(url), anthropicoption.WithAPIKey(key))
}

func anthropicRequest(maxTokens int64) anthropic.MessageNewParams {
	return anthropic.MessageNewParams{
		Model: model, MaxTokens: maxTokens,
		Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("Hi"))},
	}
}

// eachClient runs a test with each client at a place of its own, both at once:
// most of it is waiting.
func eachClient(t *testing.T, route, pool, limits string, f func(t *testing.T, c client, p *place)) {
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			// The clients use the default transport; its idle connections would look
			// like leaks.
			t.Cleanup(http.DefaultClient.CloseIdleConnections)
			p := newPlace(t, route, pool, limits)
			p.upstream.Handle(c.answer)
			f(t, c, p)
		})
	}
}
