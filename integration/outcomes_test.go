package integration

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestOutcomesTellUsageAndWaits sends answers that say what they took, or how
// long to stay away, through a real Envoy, and looks at what the access-log
// receiver makes of its entries. With FAIRLEAD_RECORD set it records them as
// seeds for the fuzz targets of package accesslog.
func TestOutcomesTellUsageAndWaits(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	s := startSteered(t, shape{pools: map[string][]*envoytest.Upstream{"A": ups(up)}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: chat, match: { prefix: /v1/ }, dialect: openai, strategy: dynamic, usage: true, split: [ { pool: a, weight: 1 } ] }
`})
	s.mu.Lock()
	s.messages = nil
	s.mu.Unlock()
	chunk := func(usage string) string {
		return fmt.Sprintf(`data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"}}],"usage":%s}`+"\n\n", usage)
	}
	const done = "data: [DONE]\n\n"
	stream := func(events ...string) http.Handler {
		all := make(chan string, len(events))
		for _, e := range events {
			all <- e
		}
		close(all)
		return envoytest.SSE(all)
	}
	for _, row := range []struct {
		name   string
		answer http.Handler
		usage  fleet.Usage
		wait   time.Duration
		cut    bool
	}{
		{"JSON", envoytest.JSON(`{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],` +
			`"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18,"prompt_tokens_details":{"cached_tokens":4}}}`),
			fleet.Usage{Known: true, Input: 11, Cached: 4, Output: 7}, 0, false},
		{"stream", stream(chunk("null"), chunk(`{"prompt_tokens":1234567,"completion_tokens":7654321,"total_tokens":8888888}`), done),
			fleet.Usage{Known: true, Input: 1234567, Output: 7654321}, 0, false},
		{"stream that tells nothing", stream(chunk("null"), done), fleet.Usage{}, 0, false},
		{"stream that breaks off", cutAfter(chunk(`{"prompt_tokens":21,"completion_tokens":1,"total_tokens":22}`), chunk(`{"prompt_tokens":21,"completion_tokens":2,"total_tokens":23}`)),
			fleet.Usage{Known: true, Output: 2}, 0, true},
		{"error in a stream", stream(chunk("null"), `data: {"error":{"message":"out of memory","type":"server_error","code":500}}`+"\n\n", done),
			fleet.Usage{Error: true}, 0, false},
		{"throttled", envoytest.Status(429, `{}`, "content-type", "application/json", "retry-after-ms", "1234", "retry-after", "2"), fleet.Usage{}, 1234 * time.Millisecond, false},
		{"throttled by tokens", envoytest.Status(429, `{}`, "content-type", "application/json", "x-ratelimit-reset-tokens", "1m0.5s"), fleet.Usage{}, time.Minute + 500*time.Millisecond, false},
		{"throttled for three years", envoytest.Status(429, `{}`, "content-type", "application/json", "retry-after", "99999999"), fleet.Usage{}, 24 * time.Hour, false},
		{"throttled without a word", envoytest.Status(429, `{}`, "content-type", "application/json"), fleet.Usage{}, 0, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			up.Handle(row.answer)
			a, err := s.try("POST", chatPath, strings.NewReader(`{"model":"m","stream":true}`), "content-type", "application/json")
			if (err != nil) != row.cut {
				t.Fatalf("error %v", err)
			}
			id := a.header.Get("x-fairlead-decision")
			attempt := s.outcome(t, id, func(o fleet.Outcome) bool { return o.Kind == fleet.AttemptEnded })
			if attempt.RetryAfter != row.wait || attempt.Usage != (fleet.Usage{}) {
				t.Errorf("attempt: %+v; want a wait of %v and no usage", attempt, row.wait)
			}
			request := s.outcome(t, id, ended)
			// Counts that came through metadata have six digits.
			if row.usage.Output > 999_999 {
				if off := request.Usage.Output - row.usage.Output; off < -10 || off > 10 {
					t.Errorf("output %d; want about %d", request.Usage.Output, row.usage.Output)
				}
				request.Usage.Output = row.usage.Output
			}
			if request.Usage != row.usage || request.RetryAfter != 0 {
				t.Errorf("request: %+v; want usage %+v and no wait", request, row.usage)
			}
		})
	}
	s.waitEmpty(t)
	if os.Getenv("FAIRLEAD_RECORD") != "" {
		s.record(t, "usage")
	}
}

// record writes the log messages seen so far.
func (s *steered) record(t *testing.T, what string) {
	t.Helper()
	if err := os.MkdirAll(recordTo, 0o755); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, m := range s.messages {
		out, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("%s-%02d-%s.pb", what, i, strings.TrimPrefix(m.GetIdentifier().GetLogName(), "fairlead."))
		if err := os.WriteFile(filepath.Join(recordTo, name), out, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
