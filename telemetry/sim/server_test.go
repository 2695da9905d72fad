package sim

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

var update = flag.Bool("update", false, "write golden files")

const testModel = "llama-3.1-8b"

func testConfig(t testing.TB) ServerConfig {
	return ServerConfig{
		Name: "h100-1", Listen: netip.MustParseAddrPort("127.0.0.1:0"), Model: testModel,
		Engine: profile(t, "llama-3.1-8b-h100"), TokensPerEvent: 4,
	}
}

// bubble runs a server's engine and faults on fake time; requests go straight to
// its handler.
func bubble(t *testing.T, cfg ServerConfig, body func(t *testing.T, s *Server)) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(cfg, 1, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		var parts sync.WaitGroup
		s.startFaults(time.Now())
		parts.Go(func() { s.steps(ctx) })
		parts.Go(func() { s.runFaults(ctx) })
		body(t, s)
		cancel()
		parts.Wait()
	})
}

// call sends a request and waits for its answer. A connection cut by the server
// is an answer with code 0.
func call(ctx context.Context, s *Server, method, path, body string) (rec *httptest.ResponseRecorder) {
	rec = httptest.NewRecorder()
	defer func() {
		if r := recover(); r != nil {
			if err, ok := r.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
				panic(r)
			}
			rec.Code = 0
		}
	}()
	s.handler.ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(body)).WithContext(ctx))
	return rec
}

func post(t *testing.T, s *Server, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	return call(t.Context(), s, http.MethodPost, path, body)
}

func chatBody(extra string) string {
	return `{"model":"` + testModel + `","messages":[{"role":"user","content":"How do I reset my password?"}]` + extra + `}`
}

func messagesBody(extra string) string {
	return `{"model":"` + testModel + `","max_tokens":64,"messages":[{"role":"user","content":[{"type":"text","text":"How do I reset my password?"}]}]` + extra + `}`
}

// TestAnswersAreByteExact compares whole answers with testdata; the sequence of
// events is each API's own.
func TestAnswersAreByteExact(t *testing.T) {
	rows := []struct{ name, path, body string }{
		{"chat-stream", "/v1/chat/completions", chatBody(`,"stream":true,"max_tokens":10,"ignore_eos":true`)},
		{"chat-stream-usage", "/v1/chat/completions", chatBody(`,"stream":true,"fairlead_sim":{"output_tokens":6},"stream_options":{"include_usage":true}`)},
		{"chat-stream-one-token", "/v1/chat/completions", chatBody(`,"stream":true,"max_completion_tokens":1`)},
		{"chat", "/v1/chat/completions", chatBody(`,"max_tokens":10,"ignore_eos":true`)},
		{"completion-stream", "/v1/completions", `{"model":"llama-3.1-8b","prompt":"Once upon","max_tokens":6,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`},
		{"completion", "/v1/completions", `{"model":"llama-3.1-8b","prompt":["Once","upon"],"max_tokens":6,"ignore_eos":true}`},
		{"messages-stream", "/v1/messages", messagesBody(`,"stream":true,"fairlead_sim":{"prompt_tokens":25,"output_tokens":10}`)},
		{"messages-stream-limit", "/v1/messages", messagesBody(`,"stream":true,"ignore_eos":true`)},
		{"messages", "/v1/messages", messagesBody(`,"system":"Be brief.","fairlead_sim":{"output_tokens":5}`)},
		{"chat-unknown-model", "/v1/chat/completions", `{"model":"gpt-5","messages":[{"role":"user","content":"hi"}]}`},
		{"chat-malformed", "/v1/chat/completions", `{"model":`},
		{"chat-too-long", "/v1/chat/completions", chatBody(`,"fairlead_sim":{"prompt_tokens":200000}`)},
		{"messages-no-limit", "/v1/messages", `{"model":"llama-3.1-8b","messages":[{"role":"user","content":"hi"}]}`},
		{"messages-unknown-model", "/v1/messages", `{"model":"claude","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			bubble(t, testConfig(t), func(t *testing.T, s *Server) {
				rec := post(t, s, row.path, row.body)
				golden(t, row.name, fmt.Sprintf("%d %s\n\n%s", rec.Code, rec.Header().Get("Content-Type"), rec.Body))
				atRest(t, s)
			})
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; got\n%s\nwant\n%s", path, got, want)
	}
}

func atRest(t *testing.T, s *Server) {
	t.Helper()
	if st := s.Stats(); st.Running != 0 || st.Waiting != 0 || st.KVUsage != 0 {
		t.Fatalf("the engine is not at rest: %+v", st)
	}
}

// timedWriter notes when headers and the first body bytes were sent.
type timedWriter struct {
	*httptest.ResponseRecorder
	headers, first time.Time
}

func (w *timedWriter) WriteHeader(code int) {
	w.headers = time.Now()
	w.ResponseRecorder.WriteHeader(code)
}

func (w *timedWriter) Write(p []byte) (int, error) {
	if w.first.IsZero() {
		w.first = time.Now()
	}
	return w.ResponseRecorder.Write(p)
}

func TestStreamSendsHeadersAtOnceAndTheFirstEventWithTheFirstToken(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		begin := time.Now()
		w := &timedWriter{ResponseRecorder: httptest.NewRecorder()}
		body := chatBody(`,"stream":true,"max_tokens":9,"ignore_eos":true,"fairlead_sim":{"prompt_tokens":4096}`)
		s.handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
		prefill := 2 * time.Duration(s.cfg.Engine.StepNS(0, 0, 2048))
		if w.headers.Sub(begin) != 0 || w.first.Sub(begin) != prefill {
			t.Fatalf("headers after %s, first event after %s; want 0 and %s", w.headers.Sub(begin), w.first.Sub(begin), prefill)
		}
		if n := strings.Count(w.Body.String(), `"content":" `); n != 3 {
			t.Fatalf("%d events for 9 tokens, one and then four each; want 3", n)
		}
	})
}

func TestAnEarlyEndIsDrawnFromTheSeedAndTheBody(t *testing.T) {
	lengths := map[int]bool{}
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		for i := range 20 {
			body := chatBody(fmt.Sprintf(`,"user":"u%d"`, i))
			one, two := usageOf(t, post(t, s, "/v1/chat/completions", body)), usageOf(t, post(t, s, "/v1/chat/completions", body))
			if one != two {
				t.Fatalf("the same body got %d and %d tokens", one, two)
			}
			lengths[one] = true
		}
	})
	if len(lengths) < 10 {
		t.Fatalf("20 bodies got only %d lengths", len(lengths))
	}
}

func usageOf(t *testing.T, rec *httptest.ResponseRecorder) int {
	t.Helper()
	var answer struct {
		Usage struct {
			Completion int `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal(rec.Body.Bytes(), &answer); err != nil || answer.Usage.Completion == 0 {
		t.Fatalf("no usage in %d %s: %v", rec.Code, rec.Body, err)
	}
	return answer.Usage.Completion
}

func TestDrawnLengthsHaveTheTracesQuantiles(t *testing.T) {
	for _, q := range answerQuantiles {
		h := uint64(min(q.share, 1-1e-9) * (1 << 63) * 2)
		within(t, fmt.Sprintf("quantile %g", q.share), float64(drawLength(h)), q.tokens, 0.01)
	}
}

// TestSameSeedSameAnswers replays a load on fake time: every answer and its time
// are the same.
func TestSameSeedSameAnswers(t *testing.T) {
	run := func() string {
		var log strings.Builder
		bubble(t, testConfig(t), func(t *testing.T, s *Server) {
			var mu sync.Mutex
			var clients sync.WaitGroup
			ends := make([]string, 40)
			begin := time.Now()
			for i := range ends {
				clients.Go(func() {
					time.Sleep(time.Duration(i*7) * time.Millisecond)
					rec := post(t, s, "/v1/chat/completions", chatBody(fmt.Sprintf(`,"stream":true,"user":"u%d"`, i)))
					mu.Lock()
					defer mu.Unlock()
					ends[i] = fmt.Sprintf("%d %s %d\n", i, time.Since(begin), rec.Body.Len())
				})
			}
			clients.Wait()
			log.WriteString(strings.Join(ends, ""))
			atRest(t, s)
		})
		return log.String()
	}
	if one, two := run(), run(); one != two {
		t.Fatalf("two runs differ:\n%s\n%s", one, two)
	}
}

func TestAbortFreesTheSequenceAtOnce(t *testing.T) {
	for _, stream := range []string{"true", "false"} {
		bubble(t, testConfig(t), func(t *testing.T, s *Server) {
			ctx, cancel := context.WithCancel(t.Context())
			var client sync.WaitGroup
			client.Go(func() {
				call(ctx, s, http.MethodPost, "/v1/chat/completions", chatBody(`,"max_tokens":5000,"ignore_eos":true,"stream":`+stream))
			})
			pass(time.Second)
			if st := s.Stats(); st.Running != 1 || st.KVUsage == 0 {
				t.Fatalf("not under way: %+v", st)
			}
			cancel()
			client.Wait()
			atRest(t, s)
			if st := s.Stats(); st.Aborted != 1 || st.Finished != 0 {
				t.Fatalf("aborted %d, finished %d; want 1 and 0", st.Aborted, st.Finished)
			}
		})
	}
}

func TestQueueIsBounded(t *testing.T) {
	cfg := testConfig(t)
	cfg.Engine.MaxSeqs = 1
	bubble(t, cfg, func(t *testing.T, s *Server) {
		inject(t, s, "xid:h100-1") // nothing is taken from the queue
		for range maxQueue {
			if err := s.enqueue(&engine.Sequence{Prompt: 1, Output: 1, Owner: make(chan struct{}, 1)}); err != nil {
				t.Fatal(err)
			}
		}
		if rec := post(t, s, "/v1/messages", messagesBody("")); rec.Code != 503 || !strings.Contains(rec.Body.String(), "overloaded_error") {
			t.Fatalf("got %d %s; want 503 in the API's shape", rec.Code, rec.Body)
		}
	})
}

// pass lets fake time pass, and then everything happen that was due.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func inject(t *testing.T, s *Server, text string) {
	t.Helper()
	server, f, err := ParseFault(text)
	if err != nil || server != s.Name() {
		t.Fatalf("fault %q for %q: %v", text, server, err)
	}
	if !s.inject(f) {
		t.Fatalf("no room for fault %q", text)
	}
	synctest.Wait()
}

func TestSlowFaultStretchesStepsForItsTime(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		took := func() time.Duration {
			begin := time.Now()
			post(t, s, "/v1/chat/completions", chatBody(`,"max_tokens":20,"ignore_eos":true`))
			return time.Since(begin)
		}
		normal := took()
		inject(t, s, "slow(10):h100-1@1s+10s")
		if got := took(); got != normal {
			t.Fatalf("before the fault %s; want %s", got, normal)
		}
		pass(time.Second)
		if got := took(); got < 99*normal/10 || got > 101*normal/10 {
			t.Fatalf("under the fault %s; want ten times %s", got, normal)
		}
		pass(10 * time.Second)
		if got := took(); got != normal {
			t.Fatalf("after the fault %s; want %s", got, normal)
		}
	})
}

func TestOfTwoFaultsOfOneKindTheLaterCounts(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		inject(t, s, "slow(2):h100-1+2s")
		inject(t, s, "slow(3):h100-1@1s+5s")
		for _, want := range []float64{2, 3, 3, 3, 3, 3, 1} {
			synctest.Wait()
			s.mu.Lock()
			got := s.engine.Slow()
			s.mu.Unlock()
			if got != want {
				t.Fatalf("factor %g; want %g", got, want)
			}
			pass(time.Second)
		}
	})
}

func TestOutOfMemoryKillsWhatRunsAndRefusesTheRest(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		var clients sync.WaitGroup
		var whole, stream *httptest.ResponseRecorder
		clients.Go(func() {
			whole = post(t, s, "/v1/chat/completions", chatBody(`,"max_tokens":5000,"ignore_eos":true`))
		})
		clients.Go(func() { stream = post(t, s, "/v1/messages", messagesBody(`,"stream":true,"ignore_eos":true`)) })
		pass(100 * time.Millisecond)
		inject(t, s, "oom:h100-1+5s")
		clients.Wait()
		atRest(t, s)
		if whole.Code != 500 || !strings.Contains(whole.Body.String(), "CUDA out of memory") {
			t.Fatalf("got %d %s; want 500 with the engine's text", whole.Code, whole.Body)
		}
		if text := stream.Body.String(); stream.Code != 200 || !strings.Contains(text, "event: error\ndata: {\"type\":\"error\"") || strings.Contains(text, "message_stop") {
			t.Fatalf("got %d %s; want a stream that ends with an error event", stream.Code, text)
		}
		if rec := post(t, s, "/v1/chat/completions", chatBody("")); rec.Code != 500 {
			t.Fatalf("got %d while out of memory; want 500", rec.Code)
		}
		if rec := call(t.Context(), s, "GET", "/health", ""); rec.Code != 503 {
			t.Fatalf("health is %d; want 503", rec.Code)
		}
		pass(5 * time.Second)
		if rec := post(t, s, "/v1/chat/completions", chatBody("")); rec.Code != 200 {
			t.Fatalf("got %d afterwards; want 200", rec.Code)
		}
		if rec := call(t.Context(), s, "GET", "/health", ""); rec.Code != 200 {
			t.Fatalf("health is %d afterwards; want 200", rec.Code)
		}
	})
}

func TestAFatalXIDStopsTheEngineAndAnotherDoesNot(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		inject(t, s, "xid(31):h100-1+1s")
		if rec := post(t, s, "/v1/chat/completions", chatBody(`,"max_tokens":1`)); rec.Code != 200 {
			t.Fatalf("got %d under XID 31; want 200", rec.Code)
		}
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_DEV_XID_ERRORS", "31")
		pass(time.Second)
		inject(t, s, "xid(79):h100-1+10s")
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_DEV_XID_ERRORS", "79")
		begin := time.Now()
		if rec := post(t, s, "/v1/chat/completions", chatBody(`,"max_tokens":1`)); rec.Code != 200 || time.Since(begin) < 10*time.Second {
			t.Fatalf("got %d after %s; want an answer after the reset", rec.Code, time.Since(begin))
		}
		wantLine(t, s, "/gpu/metrics", "DCGM_FI_DEV_XID_ERRORS", "0")
	})
}

func TestThrottleAnswers429(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		for fault, want := range map[string]string{"429:h100-1+1s": "", "throttle(2.5):h100-1+1s": "3"} {
			inject(t, s, fault)
			for path, body := range map[string]string{"/v1/chat/completions": chatBody(""), "/v1/messages": messagesBody("")} {
				rec := post(t, s, path, body)
				if rec.Code != 429 || rec.Header().Get("Retry-After") != want || !json.Valid(rec.Body.Bytes()) {
					t.Fatalf("%s: got %d, retry-after %q, %s; want 429, %q", fault, rec.Code, rec.Header().Get("Retry-After"), rec.Body, want)
				}
			}
			pass(time.Second)
		}
	})
}

func TestErrorEventEndsAStreamInsideIts200(t *testing.T) {
	for events := range 3 {
		bubble(t, testConfig(t), func(t *testing.T, s *Server) {
			inject(t, s, fmt.Sprintf("errorevent(%d):h100-1", events))
			chat := post(t, s, "/v1/chat/completions", chatBody(`,"stream":true,"max_tokens":50,"ignore_eos":true`))
			claude := post(t, s, "/v1/messages", messagesBody(`,"stream":true,"ignore_eos":true`))
			if chat.Code != 200 || claude.Code != 200 {
				t.Fatalf("got %d and %d; want 200", chat.Code, claude.Code)
			}
			text := chat.Body.String()
			if n := strings.Count(text, `"content":" `); n != events || !strings.HasSuffix(text, "\"code\":500}}\n\ndata: [DONE]\n\n") || strings.Contains(text, `"finish_reason":"`) {
				t.Fatalf("%d events, then:\n%s", n, text)
			}
			text = claude.Body.String()
			if n := strings.Count(text, "event: content_block_delta"); n != events || !strings.Contains(text, "event: error\n") || strings.Contains(text, "message_stop") {
				t.Fatalf("%d events, then:\n%s", n, text)
			}
			atRest(t, s)
		})
	}
}

func TestSilenceSendsAStreamsHeadersAndNothingElse(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		inject(t, s, "silence:h100-1")
		for _, row := range []struct {
			stream  string
			headers bool
		}{{"true", true}, {"false", false}} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			w := &timedWriter{ResponseRecorder: httptest.NewRecorder()}
			body := chatBody(`,"stream":` + row.stream)
			s.handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)).WithContext(ctx))
			if ctx.Err() == nil || w.headers.IsZero() == row.headers || w.Body.Len() > 0 {
				t.Fatalf("stream %s: headers sent at %v, %d bytes", row.stream, w.headers, w.Body.Len())
			}
			cancel()
		}
	})
}

func TestCrashKillsWhatRunsAndResetsTheCounters(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		post(t, s, "/v1/chat/completions", chatBody(`,"max_tokens":5`))
		var client sync.WaitGroup
		var cut *httptest.ResponseRecorder
		client.Go(func() {
			cut = post(t, s, "/v1/chat/completions", chatBody(`,"stream":true,"max_tokens":5000,"ignore_eos":true`))
		})
		pass(100 * time.Millisecond)
		inject(t, s, "crash:h100-1+1s")
		client.Wait()
		if cut.Code != 0 || strings.Contains(cut.Body.String(), "[DONE]") {
			t.Fatalf("a running stream ended with %d %s; want it cut", cut.Code, cut.Body)
		}
		if st := s.Stats(); st.GeneratedTokens != 0 || st.Requests != 2 {
			t.Fatalf("%+v after a crash; want counters at 0", st)
		}
		pass(time.Second)
		if rec := post(t, s, "/v1/chat/completions", chatBody("")); rec.Code != 200 {
			t.Fatalf("got %d afterwards; want 200", rec.Code)
		}
	})
}

func TestFaultsOfTheConfigBeginAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(testConfig(t), 1, slog.New(slog.DiscardHandler))
		inject(t, s, "frozen:h100-1@2s")
		time.Sleep(time.Hour) // until Run
		ctx, cancel := context.WithCancel(t.Context())
		s.startFaults(time.Now())
		var parts sync.WaitGroup
		parts.Go(func() { s.runFaults(ctx) })
		for _, want := range []bool{false, false, true} {
			synctest.Wait()
			s.mu.Lock()
			got := s.on(Frozen)
			s.mu.Unlock()
			if got != want {
				t.Fatalf("frozen is %v, want %v", got, want)
			}
			pass(time.Second)
		}
		cancel()
		parts.Wait()
	})
}

func TestUnknownPathsAndMethodsAnswerInTheAPIsShape(t *testing.T) {
	bubble(t, testConfig(t), func(t *testing.T, s *Server) {
		for _, row := range []struct {
			method, path string
			code         int
		}{{"GET", "/v1/chat/completions", 405}, {"DELETE", "/v1/messages", 405}, {"POST", "/v1/embeddings", 404}, {"GET", "/", 404}} {
			rec := call(t.Context(), s, row.method, row.path, "")
			var body struct {
				Error struct{ Type, Message string }
			}
			if err := json.Unmarshal(rec.Body.Bytes(), &body); err != nil || rec.Code != row.code || body.Error.Type == "" || body.Error.Message == "" {
				t.Errorf("%s %s: got %d %s", row.method, row.path, rec.Code, rec.Body)
			}
		}
		if rec := call(t.Context(), s, "GET", "/v1/models", ""); rec.Code != 200 || !strings.Contains(rec.Body.String(), `"id":"llama-3.1-8b"`) || !json.Valid(rec.Body.Bytes()) {
			t.Errorf("models: got %d %s", rec.Code, rec.Body)
		}
	})
}

// FuzzBodies sends any body to all generating paths: the answer is always one of
// the API's, and nothing stays behind.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{
		"", "{}", "[]", "null", `{"messages":[]}`, `{"messages":[{"role":"user","content":null}]}`,
		chatBody(""), chatBody(`,"stream":true`), chatBody(`,"max_tokens":-1`), chatBody(`,"max_tokens":9223372036854775807`),
		chatBody(`,"max_tokens":1e3`), chatBody(`,"max_tokens":18446744073709551616`), chatBody(`,"fairlead_sim":{"prompt_tokens":9223372036854775807}`),
		messagesBody(""), messagesBody(`,"stream":true,"system":[{"type":"text","text":"x"}]`),
		`{"model":"llama-3.1-8b","prompt":[[1,2],[3]],"max_tokens":2}`, `{"model":"llama-3.1-8b","prompt":{"a":1}}`,
		`{"model":"llama-3.1-8b","max_tokens":2,"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"text":"x"}]}]}]}`,
		`{"model":"\ud800","messages":[{"role":"\u0000","content":"` + "\xff" + `"}]}`,
	} {
		f.Add(seed)
	}
	cfg := testConfig(f)
	cfg.Engine = cfg.Engine.Slowed(1e-4)
	cfg.Engine.KVTokens = 4096
	f.Fuzz(func(t *testing.T, body string) {
		s := newServer(cfg, 1, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		var parts sync.WaitGroup
		parts.Go(func() { s.steps(ctx) })
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages"} {
			rec := post(t, s, path, body)
			stream := strings.HasPrefix(rec.Header().Get("Content-Type"), "text/event-stream")
			switch {
			case stream && rec.Code == 200:
				if text := rec.Body.String(); !strings.HasSuffix(text, "[DONE]\n\n") && !strings.HasSuffix(text, "{\"type\":\"message_stop\"}\n\n") {
					t.Errorf("%s: a stream ends with %q", path, text)
				}
			case rec.Code == 200 || rec.Code >= 400 && rec.Code < 500:
				var answer map[string]any
				if err := json.Unmarshal(rec.Body.Bytes(), &answer); err != nil || (rec.Code == 200) == (answer["error"] != nil) {
					t.Errorf("%s: got %d %s", path, rec.Code, rec.Body)
				}
			default:
				t.Errorf("%s: got %d", path, rec.Code)
			}
		}
		cancel()
		parts.Wait()
		if st := s.Stats(); st.Running+st.Waiting != 0 || st.KVUsage != 0 {
			t.Errorf("left behind: %+v", st)
		}
	})
}
