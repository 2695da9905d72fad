package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	role    = `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	hello   = `data: {"choices":[{"delta":{"content":"hello"}}]}` + "\n\n"
	done    = "data: [DONE]\n\n"
	message = `event: message_start` + "\n" + `data: {"type":"message_start","message":{"usage":{"output_tokens":1}}}` + "\n\n"
	delta   = `event: content_block_delta` + "\n" + `data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}` + "\n\n"
	stop    = `event: message_stop` + "\n" + `data: {"type":"message_stop"}` + "\n\n"
)

// serve answers every request by handler and returns the base URL.
func serve(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	return s.URL
}

// run sends arrivals and returns the results by index.
func run(t *testing.T, arrivals []Arrival, o Options) []Result {
	t.Helper()
	out, err := runCtx(t.Context(), arrivals, o)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func runCtx(ctx context.Context, arrivals []Arrival, o Options) ([]Result, error) {
	var mu sync.Mutex
	var out []Result
	o.OnResult = func(r Result) {
		mu.Lock()
		defer mu.Unlock()
		out = append(out, r)
	}
	err := Run(ctx, arrivals, o)
	slices.SortFunc(out, func(a, b Result) int { return a.Index - b.Index })
	return out, err
}

func startStream(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
}

func write(w http.ResponseWriter, text string) {
	io.WriteString(w, text)
	w.(http.Flusher).Flush()
}

var oneStream = []Arrival{{Prompt: 10, Output: 2, Stream: true}}

// TestAnswersAreJudgedAsTheirAPIMeansThem: what a stream or answer contains and
// what the result says of it.
func TestAnswersAreJudgedAsTheirAPIMeansThem(t *testing.T) {
	long := strings.Repeat("x", 30_000)
	for _, tc := range []struct {
		name      string
		dialect   fleet.Dialect
		whole     bool // not a stream
		status    int
		body      string
		wantErr   string // "" for success
		wantToken bool
		tokens    int
	}{
		{name: "stream", body: role + hello + hello + done, wantToken: true, tokens: 2},
		{name: "spaces and CRLF", body: "data: {\"choices\" : [ { \"delta\": { \"content\" : \"a\" } } ] }\r\n\r\ndata: [DONE]\r\n\r\n", wantToken: true, tokens: 1},
		{name: "comments", body: ": ping\n\n" + role + hello + done, wantToken: true, tokens: 1},
		{name: "usage counts more than events", body: hello + `data: {"choices":[],"usage":{"completion_tokens":17}}` + "\n\n" + done, wantToken: true, tokens: 17},
		{name: "reasoning", body: `data: {"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}` + "\n\n" + done, wantToken: true, tokens: 1},
		{name: "text that looks like JSON", body: role + `data: {"choices":[{"delta":{"content":"say \"error\": and \"type\""}}]}` + "\n\n" + done, wantToken: true, tokens: 1},
		{name: "line longer than the buffer", body: role + `data: {"choices":[{"delta":{"content":"` + long + `"}}]}` + "\n\n" + done, wantToken: true, tokens: 1},
		{name: "no content", body: role + done},
		{name: "error event", body: role + `data: {"error":{"message":"CUDA out of memory","code":500}}` + "\n\n" + done, wantErr: "CUDA out of memory"},
		{name: "error event after tokens", body: hello + `data: {"error": {"message":"engine died"}}` + "\n\n", wantErr: "engine died", wantToken: true, tokens: 1},
		{name: "null error", body: `data: {"error":null,"choices":[{"delta":{"content":"a"}}]}` + "\n\n" + done, wantToken: true, tokens: 1},
		{name: "cut", body: role + hello, wantErr: "without its last event", wantToken: true, tokens: 1},
		{name: "empty stream", body: "", wantErr: "without its last event"},
		{name: "anthropic", dialect: fleet.DialectAnthropic, body: message + delta + delta +
			`data: {"type":"message_delta","usage":{"output_tokens":9}}` + "\n\n" + stop, wantToken: true, tokens: 9},
		{name: "anthropic cut", dialect: fleet.DialectAnthropic, body: message + delta, wantErr: "without its last event", wantToken: true, tokens: 1},
		{name: "anthropic error", dialect: fleet.DialectAnthropic, body: message +
			"event: error\n" + `data: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}` + "\n\n", wantErr: "Overloaded"},
		{name: "whole", whole: true, body: `{"choices":[{"message":{"content":"hello"}}],"usage":{"prompt_tokens":3,"completion_tokens":5}}`, wantToken: true, tokens: 5},
		{name: "whole and long", whole: true, body: `{"choices":[{"message":{"content":"` + long + `"}}],"usage":{"completion_tokens": 7}}`, wantToken: true, tokens: 7},
		{name: "server error", status: 500, body: `{"error":{"message":"no"}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				if tc.status != 0 {
					w.WriteHeader(tc.status)
				} else if !tc.whole {
					startStream(w)
				}
				write(w, tc.body)
			})
			arrivals := []Arrival{{Prompt: 10, Output: 2, Stream: !tc.whole}}
			r := run(t, arrivals, Options{Targets: []string{url}, Dialect: tc.dialect})[0]
			if (r.Err != "") != (tc.wantErr != "") || !strings.Contains(r.Err, tc.wantErr) || r.Incomplete != (tc.wantErr != "") {
				t.Errorf("err %q, incomplete %v; want %q", r.Err, r.Incomplete, tc.wantErr)
			}
			if (r.FirstToken > 0) != tc.wantToken || r.Tokens != tc.tokens || r.Whole != tc.whole {
				t.Errorf("first token %v, %d tokens, whole %v; want %v, %d, %v", r.FirstToken, r.Tokens, r.Whole, tc.wantToken, tc.tokens, tc.whole)
			}
			if r.Failed() != (tc.wantErr != "" || tc.status == 500) {
				t.Errorf("failed is %v", r.Failed())
			}
			if r.HeaderTime <= 0 || r.Total < r.HeaderTime {
				t.Errorf("headers after %v, all after %v", r.HeaderTime, r.Total)
			}
		})
	}
}

// TestFirstTokenIsTheFirstContentNotTheHeaders holds the content back until the
// headers and the event without content have been sent for a while.
func TestFirstTokenIsTheFirstContentNotTheHeaders(t *testing.T) {
	const pause = 60 * time.Millisecond
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		startStream(w)
		write(w, role)
		time.Sleep(pause) // the delay to be measured
		write(w, hello)
		time.Sleep(pause)
		write(w, done)
	})
	r := run(t, oneStream, Options{Targets: []string{url}})[0]
	if r.FirstToken-r.HeaderTime < pause*9/10 || r.Total-r.FirstToken < pause*9/10 {
		t.Errorf("headers %v, first token %v, total %v; want gaps of %v", r.HeaderTime, r.FirstToken, r.Total, pause)
	}
}

// TestLoadIsOpenLoop: all requests are sent while none is answered.
func TestLoadIsOpenLoop(t *testing.T) {
	const n = 50
	var waiting atomic.Int32
	all := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if waiting.Add(1) == n {
			close(all)
		}
		<-all
		io.WriteString(w, `{}`)
	})
	arrivals := Schedule(1, 1000, n*time.Millisecond, Constant, FixedLengths(5, 5), 0)
	if len(arrivals) != n {
		t.Fatalf("%d arrivals, want %d", len(arrivals), n)
	}
	for _, r := range run(t, arrivals, Options{Targets: []string{url}, Timeout: 30 * time.Second}) {
		if r.Failed() {
			t.Fatalf("request %d: %d %s", r.Index, r.Status, r.Err)
		}
	}
}

func TestArrivalsAboveTheBoundAreDroppedAndCounted(t *testing.T) {
	release := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-release
		io.WriteString(w, `{}`)
	})
	var mu sync.Mutex
	dropped, served := 0, 0
	err := Run(t.Context(), make([]Arrival, 10), Options{Targets: []string{url}, MaxInFlight: 3, OnResult: func(r Result) {
		mu.Lock()
		defer mu.Unlock()
		if r.Dropped {
			if dropped++; dropped == 7 {
				close(release)
			}
		} else if !r.Failed() {
			served++
		}
	}})
	if err != nil || dropped != 7 || served != 3 {
		t.Errorf("%v: dropped %d, served %d; want 7 and 3", err, dropped, served)
	}
}

func TestRefusalsCarryTheirAdvice(t *testing.T) {
	for _, tc := range []struct {
		header map[string]string
		want   time.Duration
	}{
		{map[string]string{"retry-after-ms": "1500", "retry-after": "2"}, 1500 * time.Millisecond},
		{map[string]string{"retry-after": "2"}, 2 * time.Second},
		{map[string]string{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0},
		{map[string]string{"retry-after-ms": "-5"}, 0},
		{map[string]string{"retry-after-ms": "NaN"}, 0},
		{nil, 0},
	} {
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			for k, v := range tc.header {
				w.Header().Set(k, v)
			}
			w.Header().Set("x-recommended-concurrency", "8")
			w.Header().Set("x-fairlead-served-by", "h100")
			w.WriteHeader(http.StatusTooManyRequests)
		})
		r := run(t, oneStream, Options{Targets: []string{url}})[0]
		if r.Status != 429 || r.RetryAfter != tc.want || r.RecommendedConcurrency != 8 || r.Err != "" || r.Failed() {
			t.Errorf("%v: got %+v, want retry after %v", tc.header, r, tc.want)
		}
		if r.Pool != "h100" || r.ServedBy != "h100" {
			t.Errorf("served by %q of pool %q", r.ServedBy, r.Pool)
		}
	}
}

func TestBrokenConnectionsAreErrors(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("late") != "" {
			startStream(w)
			write(w, hello)
		}
		panic(http.ErrAbortHandler)
	})
	r := run(t, oneStream, Options{Targets: []string{url}})[0]
	if r.Status != 0 || r.Err == "" || r.Incomplete || !r.Failed() {
		t.Errorf("cut before the headers: %+v", r)
	}
	r = run(t, oneStream, Options{Targets: []string{url}, Path: "/?late=1"})[0]
	if r.Status != 200 || r.Err == "" || !r.Incomplete || r.FirstToken == 0 {
		t.Errorf("cut in the stream: %+v", r)
	}
	r = run(t, oneStream, Options{Targets: []string{"http://127.0.0.1:1"}})[0]
	if r.Status != 0 || !strings.Contains(r.Err, "refused") {
		t.Errorf("nobody listens: %+v", r)
	}
}

// TestWhatHangsIsCutOff: by its time limit, by the drain limit, and with ctx.
func TestWhatHangsIsCutOff(t *testing.T) {
	started := make(chan struct{}, 3)
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		startStream(w)
		started <- struct{}{}
		<-r.Context().Done()
	})
	r := run(t, oneStream, Options{Targets: []string{url}, Timeout: 50 * time.Millisecond})[0]
	if r.Err != errTimeout.Error() || !r.Incomplete {
		t.Errorf("time limit: %+v", r)
	}
	<-started
	r = run(t, oneStream, Options{Targets: []string{url}, DrainLimit: 50 * time.Millisecond})[0]
	if r.Err != errDrain.Error() || !r.Cut {
		t.Errorf("drain limit: %+v", r)
	}
	<-started
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-started
		cancel()
	}()
	arrivals := []Arrival{oneStream[0], {At: time.Hour, Index: 1}}
	results, err := runCtx(ctx, arrivals, Options{Targets: []string{url}})
	if err != context.Canceled || len(results) != 1 || results[0].Err != context.Canceled.Error() {
		t.Errorf("ctx ended: %v, %+v", err, results)
	}
}

// TestBodiesAskForTheirLengths reads the body as a server does.
func TestBodiesAskForTheirLengths(t *testing.T) {
	for _, dialect := range []fleet.Dialect{fleet.DialectOpenAI, fleet.DialectAnthropic} {
		got := make(chan map[string]any, 10)
		var path, session atomic.Value
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			var body map[string]any
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				t.Error(err)
			}
			path.Store(r.URL.Path)
			session.Store(r.Header.Get("x-session-affinity") + r.Header.Get("x-extra"))
			got <- body
		})
		for _, prompt := range []int{0, 1, 7, 1020, 14050} {
			a := Arrival{Index: 123, Prompt: prompt, Output: prompt / 2, Stream: prompt == 7, Session: "s1"}
			run(t, []Arrival{a}, Options{Targets: []string{url}, Dialect: dialect, Model: `odd "model"`, Header: http.Header{"X-Extra": {"+x"}}})
			body := <-got
			text := body["messages"].([]any)[0].(map[string]any)["content"].(string)
			if tokens := (len(text) + 3) / 4; tokens != max(prompt, 1) {
				t.Errorf("prompt has %d tokens, want %d", tokens, prompt)
			}
			if body["max_tokens"] != float64(max(prompt/2, 1)) || body["ignore_eos"] != true || body["stream"] != a.Stream || body["model"] != `odd "model"` {
				t.Errorf("body is %v", body)
			}
		}
		want := map[fleet.Dialect]string{fleet.DialectOpenAI: "/v1/chat/completions", fleet.DialectAnthropic: "/v1/messages"}[dialect]
		if path.Load() != want || session.Load() != "s1+x" {
			t.Errorf("path %v, headers %v", path.Load(), session.Load())
		}
	}
}

func TestTargetsTakeTurnsAndConnectionsAreKept(t *testing.T) {
	var urls []string
	var counts [3]atomic.Int32
	var connections sync.Map
	for i := range counts {
		urls = append(urls, serve(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			counts[i].Add(1)
			connections.Store(r.RemoteAddr, true)
			w.Header().Set(ServerHeader, fmt.Sprint("s", i))
			io.WriteString(w, "{}")
		}))
	}
	// 20 ms apart: each answer is read before its target's next turn.
	arrivals := Schedule(1, 50, 600*time.Millisecond, Constant, FixedLengths(1, 1), 0)
	for _, r := range run(t, arrivals, Options{Targets: urls}) {
		if want := fmt.Sprint("s", r.Index%3); r.ServedBy != want || r.Target != urls[r.Index%3] {
			t.Errorf("request %d went to %s, %q", r.Index, r.Target, r.ServedBy)
		}
	}
	n := 0
	connections.Range(func(any, any) bool { n++; return true })
	if counts[0].Load() != 10 || counts[1].Load() != 10 || counts[2].Load() != 10 || n >= 30 {
		t.Errorf("requests %d, %d, %d over %d connections", counts[0].Load(), counts[1].Load(), counts[2].Load(), n)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]Options{
		"no target":         {},
		"unknown dialect 9": {Targets: []string{"http://x"}, Dialect: 9},
		`target "http://[`:  {Targets: []string{"http://["}},
	} {
		if err := Run(t.Context(), nil, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestRequestsAreSentAtTheirTimes uses fake time: each request starts exactly
// when it is due, although each takes a second.
func TestRequestsAreSentAtTheirTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &generator{start: time.Now(), slots: make(chan struct{}, 100), o: Options{Targets: []string{"http://x"}}}
		g.client = &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
			time.Sleep(time.Second)
			return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}"))}, nil
		})}
		g.o.Timeout = time.Minute
		var mu sync.Mutex
		var got []Result
		g.o.OnResult = func(r Result) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, r)
		}
		g.send(t.Context(), t.Context(), slices.Values(Schedule(3, 20, 2*time.Second, Poisson, FixedLengths(1, 1), 0)))
		g.running.Wait()
		if len(got) < 20 {
			t.Fatalf("only %d requests", len(got))
		}
		for _, r := range got {
			if r.Late != 0 || r.HeaderTime != time.Second || r.Total != time.Second {
				t.Errorf("request due at %v: late %v, headers %v, total %v", r.At, r.Late, r.HeaderTime, r.Total)
			}
		}
	})
}

type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

func TestSchedulesDependOnlyOnTheirSeed(t *testing.T) {
	l := AzureConversation()
	constant := Schedule(7, 40, 100*time.Second, Constant, l, 0.5)
	if !slices.Equal(constant, Schedule(7, 40, 100*time.Second, Constant, l, 0.5)) {
		t.Error("two schedules of one seed differ")
	}
	if len(constant) != 4000 || constant[1].At != 25*time.Millisecond {
		t.Errorf("%d arrivals, the second at %v", len(constant), constant[1].At)
	}
	poisson := Schedule(7, 80, 100*time.Second, Poisson, l, 0.5)
	streams, gaps, square := 0, 0.0, 0.0
	for i, a := range poisson {
		if i < len(constant) {
			if c := constant[i]; c.Prompt != a.Prompt || c.Output != a.Output || c.Stream != a.Stream {
				t.Fatalf("arrival %d is %+v at one rate and %+v at the other", i, c, a)
			}
		}
		if a.Stream {
			streams++
		}
		if i > 0 {
			gap := (a.At - poisson[i-1].At).Seconds()
			gaps += gap
			square += gap * gap
		}
	}
	n := float64(len(poisson))
	if math.Abs(n-8000) > 4*math.Sqrt(8000) {
		t.Errorf("%.0f Poisson arrivals, want about 8000", n)
	}
	// An exponential gap has a coefficient of variation of 1.
	if mean := gaps / n; math.Abs(math.Sqrt(square/n-mean*mean)/mean-1) > 0.05 {
		t.Errorf("gaps are not exponential: mean %v, mean square %v", mean, square/n)
	}
	if share := float64(streams) / n; math.Abs(share-0.5) > 0.03 {
		t.Errorf("%.2f of the requests stream, want 0.5", share)
	}
	if slices.Equal(constant, Schedule(8, 40, 100*time.Second, Constant, l, 0.5)) {
		t.Error("another seed gives the same schedule")
	}
	for _, rps := range []float64{0, -1, math.NaN()} {
		if got := Schedule(1, rps, time.Second, Poisson, l, 0); len(got) != 0 {
			t.Errorf("%v rps gives %d arrivals", rps, len(got))
		}
	}
}

// TestLengthsFollowTheTrace compares drawn lengths with the published figures,
// and with the trace itself where it is at hand.
func TestLengthsFollowTheTrace(t *testing.T) {
	const n = 100_000
	prompts, outputs := make([]int, n), make([]int, n)
	for i := range n {
		prompts[i], outputs[i] = AzureConversation().Draw(uint64(i))
	}
	slices.Sort(prompts)
	slices.Sort(outputs)
	for q, want := range map[float64][2]int{0.5: {1020, 129}, 0.9: {2735, 424}, 0.99: {4142, 601}} {
		near(t, fmt.Sprint("prompt at ", q), Quantile(prompts, q), want[0], 0.02)
		near(t, fmt.Sprint("output at ", q), Quantile(outputs, q), want[1], 0.02)
	}

	trace := readTrace(t)
	if trace == nil {
		return
	}
	var p, o []int
	for _, a := range trace {
		p, o = append(p, a.Prompt), append(o, a.Output)
	}
	slices.Sort(p)
	slices.Sort(o)
	near(t, "mean prompt", mean(prompts), mean(p), 0.05)
	near(t, "mean output", mean(outputs), mean(o), 0.05)
	for _, q := range []float64{0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99} {
		near(t, fmt.Sprint("prompt at ", q), Quantile(prompts, q), Quantile(p, q), 0.05)
		near(t, fmt.Sprint("output at ", q), Quantile(outputs, q), Quantile(o, q), 0.05)
	}
}

// readTrace returns the real trace, or nil when it isn't there.
func readTrace(t *testing.T) []Arrival {
	folder := os.Getenv("FAIRLEAD_TRACES")
	if folder == "" {
		folder = filepath.Join("..", "..", "..", "shared", "traces")
	}
	f, err := os.Open(filepath.Join(folder, "azure-2023", "AzureLLMInferenceTrace_conv.csv"))
	if err != nil {
		t.Logf("not compared with the real trace (FAIRLEAD_TRACES): %v", err)
		return nil
	}
	defer f.Close()
	trace, err := ReadAzureTrace(f)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

func near(t *testing.T, what string, got, want int, within float64) {
	t.Helper()
	if math.Abs(float64(got-want)) > within*float64(want)+1 {
		t.Errorf("%s is %d, want %d ± %.0f %%", what, got, want, within*100)
	}
}

func mean(xs []int) int {
	sum := 0
	for _, x := range xs {
		sum += x
	}
	return sum / len(xs)
}

func TestReadAzureTrace(t *testing.T) {
	const head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
	got, err := ReadAzureTrace(strings.NewReader(head + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"))
	if err != nil || len(got) != 2 || got[1] != (Arrival{Index: 1, At: 4314579 * time.Microsecond, Prompt: 396, Output: 109}) {
		t.Errorf("got %+v, %v", got, err)
	}
	for in, want := range map[string]string{
		"":                              "EOF",
		"a,b,c\n":                       "found columns",
		head + "2023-11-16,1,2\n":       "line 2",
		head + "x\n":                    "wrong number of fields",
		head + "2023-11-16 1:2:3,x,2\n": "line 2",
	} {
		if _, err := ReadAzureTrace(strings.NewReader(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", in, err, want)
		}
	}
}

func TestQuantileIsTheNearestRank(t *testing.T) {
	xs := []int{10, 20, 30, 40, 50, 60, 70, 80, 90, 100}
	for q, want := range map[float64]int{0: 10, 0.1: 10, 0.11: 20, 0.5: 50, 0.9: 90, 0.91: 100, 1: 100} {
		if got := Quantile(xs, q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
}

// TestMeanInterval checks against an interval computed by hand (standard
// deviation √0.39, times 4.303/√3) and against printed tables of t.
func TestMeanInterval(t *testing.T) {
	mean, half := MeanInterval([]float64{4.1, 5.0, 5.3})
	if math.Abs(mean-4.8) > 1e-9 || math.Abs(half-1.5515) > 1e-3 {
		t.Errorf("got %v ± %v", mean, half)
	}
	for freedom, want := range map[int]float64{1: 12.706, 2: 4.303, 30: 2.042, 31: 2.0395, 60: 2.0003, 1000: 1.9623} {
		if got := tQuantile(freedom); math.Abs(got-want) > 6e-4 {
			t.Errorf("t quantile for %d degrees of freedom is %v, want %v", freedom, got, want)
		}
	}
	if mean, half := MeanInterval([]float64{3}); mean != 3 || !math.IsInf(half, 1) {
		t.Errorf("one value gives %v ± %v", mean, half)
	}
}

// FuzzStream: no stream of bytes breaks the reader, and only one with its last
// event is complete.
func FuzzStream(f *testing.F) {
	f.Add(role+hello+done, false)
	f.Add(message+delta+stop, true)
	f.Add("data: {\"error\":", false)
	f.Add("data:\n\ndata: \"content\":\"", false)
	f.Add("data: {\"type\":\"", true)
	f.Fuzz(func(t *testing.T, text string, anthropic bool) {
		dialect := fleet.DialectOpenAI
		last := "[DONE]"
		if anthropic {
			dialect, last = fleet.DialectAnthropic, "message_stop"
		}
		var r Result
		err := readStream(strings.NewReader(text), dialect, &r, func() time.Duration { return 1 })
		if err == nil && !strings.Contains(text, last) {
			t.Fatalf("%q counts as complete", text)
		}
		if r.Tokens < 0 {
			t.Fatalf("%q has %d tokens", text, r.Tokens)
		}
	})
}
