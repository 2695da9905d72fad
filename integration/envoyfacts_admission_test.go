package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	accesslogdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

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
- { name: counted, match: { prefix: /v1/, model: m }, dialect: openai, usage: true, maxBody: 4KiB, split: [ { pool: a, weight: 1 } ] }
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

	t.Run("the route's limit on bodies stands", func(t *testing.T) {
		up.Forget()
		a := e.postJSON("/v1/chat/completions", `{"model":"m","pad":"`+strings.Repeat("x", 5<<10)+`"}`)
		expectError(t, a, 413, fleet.DialectOpenAI, "larger")
		if n := up.Count(); n != 0 {
			t.Errorf("%d requests reached the server", n)
		}
	})
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

// Answers that are much larger than any buffer pass whole and do not stall, read
// fast or slowly, whatever the filters make of them.
func TestFactUsageFiltersLetLargeAnswersPass(t *testing.T) {
	const line = "data: {\"choices\":[{\"delta\":{\"content\":\"0123456789012345678901234567890123456789\"}}]}\n\n"
	for name, c := range map[string]struct {
		kind, body string
		slow       bool
		counted    bool
	}{
		"events":        {"text/event-stream", strings.Repeat(line, 30_000) + "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":3,\"total_tokens\":8}}\n\ndata: [DONE]\n\n", false, true},
		"events slowly": {"text/event-stream", strings.Repeat(line, 100_000), true, false},
		"one event":     {"text/event-stream", "data: {\"pad\":\"" + strings.Repeat("x", 6<<20) + "\"}\n\n", true, false},
		"JSON":          {"application/json", `{"pad":"` + strings.Repeat("x", 7<<20) + `","usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}`, true, false},
		"not JSON":      {"application/json", strings.Repeat("[", 3<<20), false, false},
		"nothing":       {"application/json", "", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			up := envoytest.NewUpstream(t, envoytest.Status(200, c.body, "content-type", c.kind))
			logs := newLogReceiver(t)
			rt := nobody(t)
			rt.AccessLog = fleet.Address{Path: logs.socket}
			e := startShape(t, shape{text: usageShape, pools: map[string][]*envoytest.Upstream{"A": ups(up)}}, rt)
			const path = "/v1/chat/completions"
			response, err := e.open(t.Context(), "POST", path, strings.NewReader(`{"model":"m"}`), "content-type", "application/json")
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			if c.slow {
				// Buffers fill up to the server before anything is read.
				e.WaitStat("cluster.a.upstream_flow_control_paused_reading_total", func(n int64) bool { return n > 0 })
			}
			got, err := io.ReadAll(response.Body)
			if err != nil || string(got) != c.body {
				t.Errorf("got %d of %d bytes, equal: %v, %v", len(got), len(c.body), string(got) == c.body, err)
			}
			if tags := logs.downstreamEnd(path).GetCustomTags(); (tags[wire.TagOutput] == "3") != c.counted {
				t.Errorf("tags %v, want counts: %v", tags, c.counted)
			}
		})
	}
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

// startDecided starts a shape with an ext_proc server behind it.
func startDecided(t *testing.T, s shape, answer func(*extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse) (*factEnvoy, *processor, *logReceiver) {
	t.Helper()
	p, logs := newProcessor(t, answer), newLogReceiver(t)
	e := startShape(t, s, envoy.Runtime{ExtProc: fleet.Address{Path: p.socket}, AccessLog: fleet.Address{Path: logs.socket}})
	e.WaitStat("cluster."+wire.ClusterExtProc+".membership_healthy", func(n int64) bool { return n == 1 })
	return e, p, logs
}

// A client's standing comes from metadata, also on answers that ext_proc makes
// up, and stands in the place of all that the server says of its own limits;
// without metadata there is nothing. No server speaks in the gateway's name.
func TestFactLimitHeadersComeFromMetadata(t *testing.T) {
	theirs := map[string]string{
		"x-ratelimit-limit": "9", "x-ratelimit-remaining": "8", "x-ratelimit-reset": "7",
		"x-ratelimit-limit-tokens": "90", "x-ratelimit-remaining-tokens": "80", "x-ratelimit-reset-tokens": "70ms",
		"x-ratelimit-limit-requests": "10000", "x-ratelimit-remaining-requests": "9999", "x-ratelimit-reset-requests": "6m0s",
		"x-ratelimit-of-another-kind": "1",
		"ratelimit":                   `"default";r=50;t=30`, "ratelimit-policy": `"default";q=100;w=60`,
	}
	sent := []string{"x-recommended-concurrency", "99", "x-recommended-concurrency", "98",
		"x-fairlead-decision", "theirs", "x-fairlead-served-by", "theirs", "x-fairlead-whatever", "theirs", "x-execution-graph-id", "theirs"}
	for name, value := range theirs {
		sent = append(sent, name, value)
	}
	up := envoytest.NewUpstream(t, envoytest.Status(200, "{}", sent...))
	e, p, _ := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [limited, hinted, bare] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: limited, match: { prefix: /limited/, model: m }, dialect: openai, fairShare: false, pool: a }
- { name: hinted, match: { prefix: /hinted/ }, dialect: openai, pool: a }
- { name: bare, match: { prefix: /bare/ }, dialect: openai, fairShare: false, pool: a }
limits:
- { name: keys, key: authorization, routes: [limited], requests: 600/min }
`}, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	standing := map[string]string{
		"x-ratelimit-limit": "600", "x-ratelimit-remaining": "599", "x-ratelimit-reset": "31",
		"x-ratelimit-limit-tokens": "400000", "x-ratelimit-remaining-tokens": "399000", "x-ratelimit-reset-tokens": "32",
		"ratelimit": `"requests";r=599;t=31, "tokens";r=399000;t=32`, "ratelimit-policy": `"requests";q=600;w=60, "tokens";q=400000;w=60`,
		"x-recommended-concurrency": "8",
	}
	m := map[string]any{}
	for name, value := range standing {
		m[name] = value
	}
	and := func(other map[string]string) map[string]string {
		out := maps.Clone(theirs)
		maps.Copy(out, other)
		return out
	}
	logged := map[string]any{"strategy": "dynamic", "decision": "d-1"}
	limited := func() *extprocv3.ProcessingResponse {
		return reply(metadata{"fairlead.log": logged, "fairlead.limit": m})
	}
	for _, c := range []struct {
		name   string
		path   string
		answer func() *extprocv3.ProcessingResponse
		status int
		want   map[string]string
	}{
		{"an answer", "/limited/messages", limited, 200, standing},
		{"a refusal", "/limited/messages", func() *extprocv3.ProcessingResponse {
			r := refused(logged, `{}`, "retry-after-ms", "333", "x-should-retry", "false")
			r.DynamicMetadata = structOf(metadata{"fairlead.log": logged, "fairlead.limit": m})
			return r
		}, 429, standing},
		{"no standing", "/limited/messages", func() *extprocv3.ProcessingResponse { return reply(metadata{"fairlead.log": logged}) }, 200, nil},
		{"a part of a standing", "/limited/messages", func() *extprocv3.ProcessingResponse {
			return reply(metadata{"fairlead.log": logged, "fairlead.limit": map[string]any{"x-ratelimit-remaining": "3"}})
		}, 200, map[string]string{"x-ratelimit-remaining": "3"}},
		{"a route without limit", "/hinted/messages", limited, 200, and(map[string]string{"x-recommended-concurrency": "8"})},
		{"a route without limit or fair share", "/bare/messages", limited, 200, and(map[string]string{"x-recommended-concurrency": "8"})},
		{"no standing there", "/bare/messages", func() *extprocv3.ProcessingResponse { return reply(metadata{"fairlead.log": logged}) }, 200, theirs},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.answerWith(always(c.answer))
			a := e.postJSON(c.path, `{"model":"m"}`)
			if a.status != c.status {
				t.Errorf("status %d: %s", a.status, a.body)
			}
			for name := range and(standing) {
				if want, ok := c.want[name]; ok {
					expectHeader(t, a, name, want)
				} else if got := a.header.Values(name); len(got) > 0 {
					t.Errorf("%s: got %q, want none", name, got)
				}
			}
			expectHeader(t, a, wire.HeaderDecision, "d-1")
			for name := range a.header {
				if strings.HasPrefix(strings.ToLower(name), wire.ReservedPrefix) && a.header.Get(name) == "theirs" {
					t.Errorf("%s is the server's", name)
				}
			}
			if got := a.header.Values(wire.HeaderExecutionGraph); len(got) > 0 {
				t.Errorf("%s: %q", wire.HeaderExecutionGraph, got)
			}
			if c.status == 429 {
				expectHeader(t, a, "Retry-After-Ms", "333")
				if got := a.header.Values("Retry-After"); len(got) > 0 {
					t.Errorf("retry-after: got %q; what ext_proc says is whole", got)
				}
			} else {
				expectHeader(t, a, wire.HeaderServedBy, "a")
			}
		})
	}
	t.Run("a path that doesn't generate", func(t *testing.T) {
		p.answerWith(always(limited))
		a := e.postJSON("/limited/embeddings", `{"model":"m"}`)
		expectHeader(t, a, "X-Ratelimit-Limit", "9")
		expectHeader(t, a, wire.HeaderServedBy, "a")
		if got := a.header.Get("x-fairlead-whatever"); got != "" {
			t.Errorf("x-fairlead-whatever is the server's: %q", got)
		}
	})
	t.Run("ext_proc dead", func(t *testing.T) {
		p.kill()
		a := e.postJSON("/limited/messages", `{"model":"m"}`)
		for name := range and(standing) {
			if got := a.header.Values(name); len(got) > 0 {
				t.Errorf("%s: got %q, want none", name, got)
			}
		}
		expectHeader(t, a, wire.HeaderServedBy, "a")
		if got := a.header.Values(wire.HeaderDecision); len(got) > 0 {
			t.Errorf("a decision without ext_proc: %q", got)
		}
	})
}

// With a response phase ext_proc sees what the server itself has sent, and
// what it adds counts before what Envoy would add. Elsewhere, and with ext_proc
// dead, the fixed fields are there.
func TestFactResponsePhaseSeesAnswersAsServersSentThem(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	var answered atomic.Value
	answered.Store("")
	e, p, logs := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [computed, fixed] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: computed, match: { prefix: /computed/ }, dialect: openai, pool: a, retryFields: computed }
- { name: fixed, match: { prefix: /fixed/ }, dialect: openai, pool: a }
limits:
- { name: keys, key: authorization, requests: 600/min }
`}, func(r *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
		if r.GetResponseHeaders() == nil {
			return reply(metadata{"fairlead.limit": map[string]any{"x-ratelimit-reset": "31"}})
		}
		out := &extprocv3.HeadersResponse{}
		if ms := answered.Load().(string); ms != "" {
			out.Response = &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{
				{Header: &corev3.HeaderValue{Key: "retry-after-ms", RawValue: []byte(ms)}},
			}}}
		}
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: out}}
	})
	responses := func() (out []*extprocv3.ProcessingRequest) {
		for _, r := range p.requests() {
			if r.GetResponseHeaders() != nil {
				out = append(out, r)
			}
		}
		return out
	}

	for _, status := range []int{429, 503, 529} {
		up.Handle(envoytest.Status(status, "{}", "x-ratelimit-reset", "77", "x-ratelimit-reset-requests", "6m0s", "anthropic-ratelimit-tokens-reset", "2026-01-02T03:04:05Z"))
		path := fmt.Sprintf("/computed/messages?%d", status)
		answered.Store("4321")
		a := e.postJSON(path, `{}`)
		if a.status != status {
			t.Fatalf("status %d, want %d: %s", a.status, status, a.body)
		}
		expectHeader(t, a, "Retry-After-Ms", "4321")
		expectHeader(t, a, "X-Ratelimit-Reset", "31")
		if got := a.header.Values("X-Ratelimit-Reset-Requests"); len(got) > 0 {
			t.Errorf("%d: the server's own limit beside the client's: %q", status, got)
		}
		if got := a.header.Values("Retry-After"); len(got) > 0 {
			t.Errorf("%d: retry-after %q beside what was computed", status, got)
		}
		seen := responses()
		if len(seen) == 0 {
			t.Fatal("ext_proc saw no response headers")
		}
		sent := map[string]string{}
		for _, h := range seen[len(seen)-1].GetResponseHeaders().GetHeaders().GetHeaders() {
			sent[h.GetKey()] = string(h.GetRawValue())
		}
		for name, want := range map[string]string{":status": fmt.Sprint(status), "x-ratelimit-reset": "77", "x-ratelimit-reset-requests": "6m0s", "anthropic-ratelimit-tokens-reset": "2026-01-02T03:04:05Z", "retry-after-ms": "", "retry-after": ""} {
			if sent[name] != want {
				t.Errorf("%d: ext_proc saw %s %q, want %q", status, name, sent[name], want)
			}
		}
		answered.Store("")
		a = e.postJSON(path, `{}`)
		expectHeader(t, a, "Retry-After-Ms", "1000")
		expectHeader(t, a, "Retry-After", "1")

		before := len(responses())
		a = e.postJSON("/fixed/messages", `{}`)
		expectHeader(t, a, "Retry-After-Ms", "1000")
		expectHeader(t, a, "Retry-After", "1")
		if n := len(responses()) - before; n != 0 {
			t.Errorf("%d: a route that doesn't ask sent %d response headers to ext_proc", status, n)
		}

		// The log of each attempt has what the server sent, not what was added.
		for _, header := range []string{"x-ratelimit-reset=77", "x-ratelimit-reset-requests=6m0s", "anthropic-ratelimit-tokens-reset=2026-01-02T03:04:05Z"} {
			name, want, _ := strings.Cut(header, "=")
			if got := logs.upstreamEnd(path).GetResponse().GetResponseHeaders()[name]; got != want {
				t.Errorf("%d: %s in the log: %q, want %q", status, name, got, want)
			}
		}
		if got := logs.upstreamEnd(path).GetResponse().GetResponseHeaders(); got["retry-after-ms"] != "" || len(got) != 3 {
			t.Errorf("%d: headers in the log: %v", status, got)
		}
	}

	// A server's own fields stay, and an answer of another kind gets none.
	up.Handle(envoytest.Status(503, "{}", "retry-after", "30"))
	a := e.postJSON("/fixed/messages", `{}`)
	expectHeader(t, a, "Retry-After", "30")
	if got := a.header.Values("Retry-After-Ms"); len(got) > 0 {
		t.Errorf("retry-after-ms beside retry-after: 30: %q", got)
	}
	up.Handle(envoytest.Status(500, "{}"))
	if a := e.postJSON("/fixed/messages", `{}`); len(a.header.Values("Retry-After"))+len(a.header.Values("Retry-After-Ms")) > 0 {
		t.Errorf("a 500 has retry fields: %v", a.header)
	}
	p.kill()
	up.Handle(envoytest.Status(429, "{}"))
	a = e.postJSON("/computed/messages", `{}`)
	expectHeader(t, a, "Retry-After-Ms", "1000")
	expectHeader(t, a, "Retry-After", "1")
}

// upstreamEnd waits for the end of an attempt of the request with a path.
func (r *logReceiver) upstreamEnd(path string) *accesslogdatav3.HTTPAccessLogEntry {
	r.t.Helper()
	var found *accesslogdatav3.HTTPAccessLogEntry
	envoytest.Eventually(r.t, "an attempt of "+path, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, e := range r.entries {
			if e.kind() == accesslogdatav3.AccessLogType_UpstreamEnd && e.entry.GetRequest().GetPath() == path {
				found = e.entry
			}
		}
		return found != nil
	})
	return found
}

// Limits that nobody counts hold nobody back, or let nobody in: the route
// chooses. Nobody gets through by naming an endpoint himself.
func TestFactClosedRoutesRefuseWhileExtProcIsAway(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	e, p, _ := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [messages, chat, open] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a, onFailure: closed }
- { name: chat, match: { prefix: /v1/, model: m }, dialect: openai, pool: a, onFailure: closed }
- { name: open, match: { prefix: /v1/ }, dialect: openai, pool: a, unread: refuse }
`}, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	check := func(t *testing.T) {
		for path, dialect := range map[string]fleet.Dialect{"/v1/messages": fleet.DialectAnthropic, "/v1/chat/completions": fleet.DialectOpenAI} {
			up.Forget()
			a := e.postJSON(path, `{"model":"m"}`, "x-fairlead-decision", "mine", "x-gateway-destination-endpoint", up.Addr().String(), "x-envoy-max-retries", "3")
			expectError(t, a, 503, dialect, "Limits can't be checked")
			expectSoon(t, a)
			if n := up.Count(); n != 0 {
				t.Errorf("%s: %d requests got through", path, n)
			}
		}
		a := e.postJSON("/v1/chat/completions", `{"model":"other"}`, "x-fairlead-decision", "mine")
		if a.status != 200 || up.Last().Header.Get("x-fairlead-decision") != "" {
			t.Errorf("open: %d, decision %q", a.status, up.Last().Header.Get("x-fairlead-decision"))
		}
		if a := e.postJSON("/v1/embeddings", `{"model":"m"}`); a.status != 200 {
			t.Errorf("a path that doesn't generate: %d %s", a.status, a.body)
		}
	}
	t.Run("alive", func(t *testing.T) {
		for _, path := range []string{"/v1/messages", "/v1/chat/completions"} {
			if a := e.postJSON(path, `{"model":"m"}`); a.status != 200 {
				t.Errorf("%s: %d %s", path, a.status, a.body)
			}
		}
		up.Handle(envoytest.Status(504, "{}"))
		defer up.Handle(nil)
		if a := e.postJSON("/v1/messages", `{}`); a.status != 504 || a.body != "{}" {
			t.Errorf("a server's own 504 became %d %s", a.status, a.body)
		}
	})
	t.Run("hung", func(t *testing.T) {
		p.freeze.stop()
		defer p.freeze.thaw()
		// The wait for a decision is much shorter than the time until the health
		// check has failed, so that several requests in a row run into it first.
		timeouts := func() int64 { n, _ := e.Stat("http.fairlead.ext_proc.message_timeouts"); return n }
		before := timeouts()
		envoytest.Eventually(t, "an unhealthy ext_proc", func() bool {
			e.postJSON("/v1/messages", `{}`)
			n, _ := e.Stat("cluster." + wire.ClusterExtProc + ".membership_healthy")
			return n == 0
		})
		if n := timeouts() - before; n < 2 {
			t.Errorf("%d requests waited until ext_proc was found unhealthy, want 2 or more", n)
		}
		waited := timeouts()
		check(t)
		if n := timeouts() - waited; n != 0 {
			t.Errorf("%d requests waited for an unhealthy ext_proc", n)
		}
	})
	t.Run("dead", func(t *testing.T) {
		p.kill()
		// What serve is not there to count Envoy counts: check sends four requests, two
		// to routes that fail closed.
		const asked, passed = "http.fairlead.ext_proc.streams_failed", "http.fairlead.ext_proc.failure_mode_allowed"
		failed, _ := e.Stat(asked)
		allowed, _ := e.Stat(passed)
		check(t)
		e.WaitStat(asked, func(n int64) bool { return n == failed+4 })
		e.WaitStat(passed, func(n int64) bool { return n == allowed+2 })
	})
}

// An ext_proc that ends while a server works takes no answer with it, on whatever
// kind of route.
func TestFactAnswersOnTheirWaySurviveExtProc(t *testing.T) {
	release := make(chan struct{})
	up := envoytest.NewUpstream(t, envoytest.Gate(release, envoytest.Status(429, `{"mine":true}`)))
	e, p, _ := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [computed, closed] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: computed, match: { prefix: /computed/ }, dialect: openai, pool: a, retryFields: computed }
- { name: closed, match: { prefix: /closed/ }, dialect: openai, pool: a, onFailure: closed }
`}, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	type result struct {
		path string
		answer
		err error
	}
	results := make(chan result)
	paths := []string{"/computed/messages", "/closed/messages"}
	for _, path := range paths {
		go func() {
			a, err := e.try("POST", path, strings.NewReader(`{}`))
			results <- result{path, a, err}
		}()
	}
	up.WaitRequests(len(paths))
	p.kill()
	close(release)
	for range paths {
		r := <-results
		if r.err != nil || r.status != 429 || r.body != `{"mine":true}` {
			t.Errorf("%s: %d %s, %v", r.path, r.status, r.body, r.err)
		}
		expectHeader(t, r.answer, "Retry-After-Ms", "1000")
		expectHeader(t, r.answer, "Retry-After", "1")
	}
}

// The body's user is read only where the route that the model has chosen asks
// for it; how many answers are asked for is always read.
func TestFactUserIsReadOnRoutesThatAskForIt(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	e, p, logs := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [asks, silent, rest, quiet] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: asks, match: { prefix: /v1/, model: asks }, dialect: openai, pool: a, readUser: true }
- { name: silent, match: { prefix: /v1/, model: silent }, dialect: openai, pool: a }
- { name: rest, match: { prefix: /rest/ }, dialect: openai, pool: a, readUser: true }
- { name: quiet, match: { prefix: /quiet/ }, dialect: openai, pool: a, skipBody: true }
`}, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	for i, c := range []struct {
		path, model string
		chunked     bool
		read, user  bool
	}{
		{"/v1/chat/completions", "asks", false, true, true},
		{"/v1/chat/completions", "silent", false, true, false},
		{"/v1/embeddings", "asks", false, true, false},
		{"/rest/chat/completions", "x", false, true, true},
		{"/rest/chat/completions", "x", true, false, false},
		{"/rest/models", "x", false, false, false},
		{"/quiet/chat/completions", "x", false, false, false},
	} {
		body := `{"n":3,"user":"u-1","model":"` + c.model + `","max_tokens":5}`
		path := fmt.Sprintf("%s?%d", c.path, i)
		var r io.Reader = strings.NewReader(body)
		if c.chunked {
			r = io.MultiReader(r)
		}
		if a := e.send("POST", path, r, "content-type", "application/json"); a.status != 200 {
			t.Fatalf("%s: %d %s", path, a.status, a.body)
		}
		if got := up.Last(); got.BodyLen != int64(len(body)) {
			t.Errorf("%s: the server got %d of %d bytes", path, got.BodyLen, len(body))
		}
		n, _ := peeked(p.last(), "n")
		user, _ := peeked(p.last(), "user")
		if (n == 3.0) != c.read || (user == "u-1") != c.user {
			t.Errorf("%s %s: n %v, user %v", path, c.model, n, user)
		}
		_, there := logs.downstreamEnd(path).GetMetadata().GetFilterMetadata()[wire.NamespacePeek].GetFields()["user"]
		if there != c.user {
			t.Errorf("%s %s: user in the log: %v", path, c.model, there)
		}
	}
}

// What is no readable JSON within the bounds counts as unread, in whatever way a
// body says so; zeros before a length hide nothing.
func TestFactBodiesAreReadWithinTheirBounds(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	e, p, _ := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1, peekDigits: 2 }, routes: [declared, plain] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: declared, match: { prefix: /declared/ }, dialect: openai, pool: a, trustDeclared: true }
- { name: plain, match: { prefix: /plain/ }, dialect: openai, pool: a }
`}, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	const (
		small = `{"max_tokens":5}`
		kind  = "content-type: application/json\r\n"
	)
	large := `{"max_tokens":5,"pad":"` + strings.Repeat("x", 100) + `"}`
	for _, c := range []struct {
		name, path, head, body string
		read                   bool
	}{
		{"small", "/plain", kind, small, true},
		{"large", "/plain", kind, large, false},
		{"zeros before the length", "/plain", kind + "content-length: 00000016\r\n", small, true},
		{"zeros before a large length", "/plain", kind + fmt.Sprintf("content-length: 000%d\r\n", len(large)), large, false},
		{"declared", "/declared", kind + "x-max-tokens: 7\r\n", small, false},
		{"not declared", "/declared", kind, small, true},
		{"large, not declared", "/declared", kind, large, false},
		{"no content type", "/plain", "", small, false},
		{"text", "/plain", "content-type: text/plain\r\n", small, false},
		{"two content types, text first", "/plain", "content-type: text/plain\r\n" + kind, small, false},
		{"two content types, text last", "/plain", kind + "content-type: text/plain\r\n", small, false},
		{"two equal content types", "/plain", kind + kind, small, false},
		{"an upgrade that isn't one", "/plain", kind + "upgrade: websocket\r\n", small, true},
		{"an upgrade to HTTP/2", "/plain", kind + "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n", small, true},
		{"broken", "/plain", kind, `{"max_tokens":5`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(p.requests())
			head := c.head
			if !strings.Contains(head, "content-length") {
				head += fmt.Sprintf("content-length: %d\r\n", len(c.body))
			}
			response := e.raw("POST " + c.path + "/chat/completions HTTP/1.1\r\nhost: x\r\n" + head + "\r\n" + c.body)
			if response.StatusCode != 200 {
				t.Fatalf("status %d", response.StatusCode)
			}
			if got := up.Last(); got.BodyLen != int64(len(c.body)) {
				t.Errorf("the server got %d of %d bytes", got.BodyLen, len(c.body))
			}
			if n := len(p.requests()) - before; n != 1 {
				t.Fatalf("ext_proc was asked %d times", n)
			}
			budget, found := peeked(p.last(), wire.KeyMaxTokens)
			_, read := peeked(p.last(), wire.KeyRead)
			failed, _ := peeked(p.last(), wire.KeyError)
			if (budget == 5.0) != c.read {
				t.Errorf("budget %v, want it read: %v", budget, c.read)
			}
			if !c.read && (found || read) && failed != true {
				t.Errorf("nothing says that the body is unread: budget %v, read %v, error %v", budget, read, failed)
			}
		})
	}
}

// raw sends bytes on a connection of their own and reads the head of the answer.
// The connection closes with the test.
func (e *factEnvoy) raw(request string) *http.Response {
	e.t.Helper()
	response, _ := e.rawConn(request)
	return response
}

func (e *factEnvoy) rawConn(request string) (*http.Response, io.ReadWriter) {
	e.t.Helper()
	c, err := net.Dial("tcp", e.addr.String())
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = c.Close() })
	// Far above anything that is waited for; a hang fails the test.
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.WriteString(c, request); err != nil {
		e.t.Fatal(err)
	}
	r := bufio.NewReader(c)
	response, err := http.ReadResponse(r, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	return response, struct {
		io.Reader
		io.Writer
	}{r, c}
}

// A WebSocket on a path that generates is a generation to ext_proc, which may
// refuse it; elsewhere it passes. On a closed route none opens while ext_proc is
// away.
func TestFactUpgradesOnGeneratingPathsAreCounted(t *testing.T) {
	up := envoytest.NewUpstream(t, envoytest.WebSocketEcho())
	e, p, _ := startDecided(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [closed, chosen, open] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: closed, match: { prefix: /closed/ }, dialect: openai, pool: a, onFailure: closed, usage: true, trustDeclared: true }
- { name: chosen, match: { prefix: /chosen/, model: m }, dialect: openai, pool: a, onFailure: closed }
- { name: open, match: { prefix: /v1/ }, dialect: openai, pool: a }
`}, always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	upgrade := func(path, headers string) (int, io.ReadWriter) {
		response, c := e.rawConn("GET " + path + " HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n" +
			"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + headers + "\r\n")
		return response.StatusCode, c
	}
	paths := map[string]string{ // to the Envoy route that takes them
		"/v1/realtime?model=m": "open", "/v1/responses": "open", "/closed/v1/realtime": "closed", "/chosen/v1/realtime": "chosen",
		"/v1/other": "open" + wire.RouteOther, "/closed/v1/other": "closed" + wire.RouteOther, "/chosen/v1/other": "chosen" + wire.RouteOther,
	}
	t.Run("alive", func(t *testing.T) {
		for path, route := range paths {
			for _, headers := range []string{"", "content-type: application/json\r\n", "content-type: application/json\r\ncontent-length: 0\r\n", "content-type: application/json\r\ncontent-length: 4\r\n"} {
				before := len(p.requests())
				status, c := upgrade(path, headers)
				if status != http.StatusSwitchingProtocols {
					t.Fatalf("%s %q: status %d", path, headers, status)
				}
				for _, word := range []string{"ping", "pong"} {
					_, _ = io.WriteString(c, word)
					got := make([]byte, len(word))
					if _, err := io.ReadFull(c, got); err != nil || string(got) != word {
						t.Errorf("%s %q: echo %q, %v", path, headers, got, err)
					}
				}
				if n := len(p.requests()) - before; n != 1 {
					t.Fatalf("%s: ext_proc was asked %d times", path, n)
				}
				got := p.last().GetAttributes()[wire.AttributesKey].GetFields()[wire.AttributeRouteName].GetStringValue()
				if got != route {
					t.Errorf("%s %q: route %q, want %q", path, headers, got, route)
				}
			}
		}
		// Without an upgrade, a GET of the same paths generates nothing.
		for path, route := range map[string]string{"/v1/realtime": "open", "/chosen/v1/responses": "chosen"} {
			up.Handle(nil)
			e.get(path, "upgrade", "websocket")
			if got := p.last().GetAttributes()[wire.AttributesKey].GetFields()[wire.AttributeRouteName].GetStringValue(); got != route+wire.RouteOther {
				t.Errorf("GET %s: route %q", path, got)
			}
		}
		up.Handle(envoytest.WebSocketEcho())
	})
	t.Run("refused", func(t *testing.T) {
		p.answerWith(always(func() *extprocv3.ProcessingResponse {
			return refused(map[string]any{"strategy": "dynamic"}, `{}`, "retry-after-ms", "333")
		}))
		for path := range paths {
			if status, _ := upgrade(path, ""); status != http.StatusTooManyRequests {
				t.Errorf("%s: status %d", path, status)
			}
		}
	})
	t.Run("dead", func(t *testing.T) {
		p.kill()
		up.Forget()
		for path, route := range paths {
			want := http.StatusSwitchingProtocols
			if route == "closed" || route == "chosen" {
				want = http.StatusServiceUnavailable
			}
			if status, _ := upgrade(path, ""); status != want {
				t.Errorf("%s: status %d, want %d", path, status, want)
			}
		}
	})
}

// Counts that no server can mean leave no tag; all others come with every digit.
func TestFactUsageThatIsNoCountIsLeftOut(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	logs := newLogReceiver(t)
	rt := nobody(t)
	rt.AccessLog = fleet.Address{Path: logs.socket}
	e := startShape(t, shape{text: usageShape, pools: map[string][]*envoytest.Upstream{"A": ups(up)}}, rt)
	i := 0
	for n, want := range map[string]string{
		"99999999999999999999": "", "-30": "", "1.5": "", "1e300": "", `"7"`: "", "null": "", "true": "", "{}": "", "[3]": "",
		"9007199254740993": "", "3000000000": "", "4294967297": "", "9223372036854775807": "", "1000000001": "",
		"0": "0", "1": "1", "1234567": "1234567", "1e9": "1000000000", "1000000000": "1000000000",
	} {
		i++
		usage := `"usage":{"prompt_tokens":11,"completion_tokens":` + n + `,"total_tokens":18}`
		up.Handle(envoytest.Status(200, `{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[],`+usage+`}`, "content-type", "application/json"))
		path := fmt.Sprintf("/v1/chat/completions?json-%d", i)
		e.postJSON(path, `{"model":"m"}`)
		tags := logs.downstreamEnd(path).GetCustomTags()
		if got, ok := tags[wire.TagOutput]; got != want || ok != (want != "") || tags[wire.TagInput] != "11" {
			t.Errorf("%s: tags %v, want %q", n, tags, want)
		}
		up.Handle(envoytest.Status(200, `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],`+usage+"}\n\n", "content-type", "text/event-stream"))
		path = fmt.Sprintf("/v1/chat/completions?sse-%d", i)
		e.postJSON(path, `{"model":"m"}`)
		tags = logs.downstreamEnd(path).GetCustomTags()
		for _, tag := range []string{wire.TagOutput, wire.TagSSEOutput} {
			if got, ok := tags[tag]; got != want || ok != (want != "") {
				t.Errorf("%s in a stream: tags %v, want %q in %s", n, tags, want, tag)
			}
		}
	}
}
