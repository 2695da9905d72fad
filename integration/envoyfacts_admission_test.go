package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"

	accesslogdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// These tests hold what limits, usage and advice take for granted about Envoy,
// with the resources that package envoy builds.

// downstreamEnd waits for the end of the request with a path.
func (r *logReceiver) downstreamEnd(path string) *accesslogdatav3.AccessLogCommon {
	r.t.Helper()
	var found *accesslogdatav3.AccessLogCommon
	envoytest.Eventually(r.t, "the end of "+path, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, e := range r.entries {
			if e.kind() == accesslogdatav3.AccessLogType_DownstreamEnd && e.entry.GetRequest().GetPath() == path {
				found = e.entry.GetCommonProperties()
			}
		}
		return found != nil
	})
	return found
}

const usageShape = shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [counted, plain] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: counted, match: { prefix: /v1/, model: m }, dialect: openai, usage: true, split: [ { pool: a, weight: 1 } ] }
- { name: plain, match: { prefix: /v1/ }, dialect: openai, split: [ { pool: a, weight: 1 } ] }
`

func TestFactUsageIsReadWithoutTouchingAnswers(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	logs := newLogReceiver(t)
	rt := nobody(t)
	rt.AccessLog = fleet.Address{Path: logs.socket}
	e := startShape(t, shape{text: usageShape, pools: map[string][]*envoytest.Upstream{"A": ups(up)}}, rt)

	sse := func(events ...string) []string {
		for i := range events {
			events[i] = "data: " + events[i] + "\n\n"
		}
		return events
	}
	named := func(events ...string) (out []string) {
		for _, event := range events {
			kind, data, _ := strings.Cut(event, " ")
			out = append(out, "event: "+kind+"\ndata: "+data+"\n\n")
		}
		return out
	}
	chunk := func(text string) string {
		return `{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"` + text + `"}}],"usage":null}`
	}
	start := `message_start {"type":"message_start","message":{"id":"x","type":"message","role":"assistant","content":[],"model":"m","usage":{"input_tokens":10,"cache_creation_input_tokens":3,"cache_read_input_tokens":5,"output_tokens":1}}}`
	for _, c := range []struct {
		name, path string
		json       string
		events     []string
		cut        bool // the upstream breaks the stream off
		want       map[string]string
	}{
		{name: "OpenAI JSON", path: "/v1/chat/completions",
			json: `{ "id":"c", "object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"h\u0069"},"finish_reason":"stop"}],"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18,"prompt_tokens_details":{"cached_tokens":4}}}`,
			want: map[string]string{wire.TagInput: "11", wire.TagCached: "4", wire.TagOutput: "7"}},
		{name: "OpenAI legacy JSON", path: "/v1/completions",
			json: `{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"hi","finish_reason":"stop"}],"usage":{"prompt_tokens":12,"completion_tokens":8,"total_tokens":20}}`,
			want: map[string]string{wire.TagInput: "12", wire.TagCached: "0", wire.TagOutput: "8"}},
		{name: "OpenAI responses JSON", path: "/v1/responses",
			json: `{"id":"r","object":"response","created_at":1,"status":"completed","model":"m","output":[],"usage":{"input_tokens":13,"input_tokens_details":{"cached_tokens":2},"output_tokens":9,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":22}}`,
			want: map[string]string{wire.TagInput: "13", wire.TagCached: "2", wire.TagOutput: "9"}},
		{name: "OpenAI stream with usage", path: "/v1/chat/completions",
			events: sse(chunk("a"), chunk("b"), `{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":21,"completion_tokens":2,"total_tokens":23,"prompt_tokens_details":{"cached_tokens":16}}}`, `[DONE]`),
			want:   map[string]string{wire.TagInput: "21", wire.TagCached: "16", wire.TagOutput: "2", wire.TagSSEOutput: "2"}},
		{name: "OpenAI stream without usage", path: "/v1/chat/completions",
			events: sse(chunk("a"), chunk("b"), `[DONE]`), want: map[string]string{}},
		{name: "Anthropic JSON", path: "/v1/messages",
			json: `{"id":"x","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn","usage":{"input_tokens":10,"cache_creation_input_tokens":3,"cache_read_input_tokens":5,"output_tokens":6}}`,
			want: map[string]string{wire.TagInput: "18", wire.TagCached: "5", wire.TagOutput: "6"}},
		{name: "Anthropic stream", path: "/v1/messages",
			events: named(start, `content_block_delta {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"h"}}`,
				`message_delta {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}`, `message_stop {"type":"message_stop"}`),
			want: map[string]string{wire.TagInput: "18", wire.TagCached: "5", wire.TagOutput: "15", wire.TagSSEOutput: "15"}},
		{name: "OpenAI error event in a 200", path: "/v1/chat/completions",
			events: sse(chunk("a"), `{"error":{"message":"out of memory","type":"server_error","code":500}}`, `[DONE]`),
			want:   map[string]string{wire.TagSSEError: "true"}},
		{name: "Anthropic error event in a 200", path: "/v1/messages",
			events: named(start, `error {"type":"error","error":{"type":"overloaded_error"}}`),
			want:   map[string]string{wire.TagSSEError: "true", wire.TagInput: "18", wire.TagCached: "5", wire.TagOutput: "1"}},
		{name: "a stream that breaks off, with running usage", path: "/v1/chat/completions", cut: true,
			events: sse(`{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":21,"completion_tokens":1,"total_tokens":22}}`,
				`{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"b"}}],"usage":{"prompt_tokens":21,"completion_tokens":2,"total_tokens":23}}`),
			want: map[string]string{wire.TagSSEOutput: "2"}},
		{name: "no usage", path: "/v1/chat/completions", json: `{"ok": true}`, want: map[string]string{}},
		{name: "an error", path: "/v1/chat/completions", json: `nonsense`, want: map[string]string{}},
	} {
		for _, model := range []string{"m", "other"} {
			t.Run(c.name+" "+model, func(t *testing.T) {
				path := c.path + "?" + strings.ReplaceAll(c.name, " ", "-") + "-" + model
				events := make(chan string)
				switch {
				case c.cut:
					up.Handle(cutAfter(c.events...))
				case c.events != nil:
					up.Handle(envoytest.SSE(events))
				default:
					up.Handle(envoytest.Status(200, c.json, "content-type", "application/json"))
				}
				response, err := e.open(context.Background(), "POST", path, strings.NewReader(`{"model":"`+model+`"}`),
					"content-type", "application/json", "accept-encoding", "gzip")
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
				r := bufio.NewReader(response.Body)
				for _, event := range c.events {
					if !c.cut {
						events <- event
					}
					// Each event is sent only after the one before it was received.
					got := make([]byte, len(event))
					if _, err := io.ReadFull(r, got); err != nil || string(got) != event {
						t.Fatalf("got %q, %v; want %q", got, err, event)
					}
				}
				if !c.cut {
					close(events)
				}
				rest, err := io.ReadAll(r)
				if string(rest) != c.json || (err != nil) != c.cut {
					t.Errorf("the end: %q, %v; want %q", rest, err, c.json)
				}
				if c.json != "" && response.ContentLength != int64(len(c.json)) {
					t.Errorf("content-length %d, want %d", response.ContentLength, len(c.json))
				}
				counted := model == "m"
				if got := up.Last().Header.Get("accept-encoding"); (got == "") != counted {
					t.Errorf("accept-encoding upstream: %q", got)
				}
				want := c.want
				if !counted {
					want = map[string]string{}
				}
				if got := logs.downstreamEnd(path).GetCustomTags(); !maps.Equal(got, want) {
					t.Errorf("tags %v, want %v", got, want)
				}
			})
		}
	}

	t.Run("the client leaves", func(t *testing.T) {
		const path = "/v1/chat/completions?left"
		events := make(chan string, 1)
		up.Handle(envoytest.SSE(events))
		ctx, leave := context.WithCancel(context.Background())
		defer leave()
		response, err := e.open(ctx, "POST", path, strings.NewReader(`{"model":"m"}`), "content-type", "application/json")
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		event := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":3,\"total_tokens\":8}}\n\n"
		events <- event
		if _, err := io.ReadFull(response.Body, make([]byte, len(event))); err != nil {
			t.Fatal(err)
		}
		leave()
		if got, want := logs.downstreamEnd(path).GetCustomTags(), map[string]string{wire.TagSSEOutput: "3"}; !maps.Equal(got, want) {
			t.Errorf("tags %v, want %v", got, want)
		}
	})
}

// cutAfter streams events and then breaks the connection.
func cutAfter(events ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("content-type", "text/event-stream")
		for _, event := range events {
			fmt.Fprint(w, event)
		}
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
}

var _ = envoy.Build
