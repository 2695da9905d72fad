package extproc

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// errorBody is an error in either dialect.
type errorBody struct {
	Type      string `json:"type"`
	RequestID string `json:"request_id"`
	Error     struct {
		Message     string  `json:"message"`
		Type        string  `json:"type"`
		Param       *string `json:"param"`
		Code        string  `json:"code"`
		Limit       int     `json:"max_tokens_limit"`
		RetryAfter  int     `json:"retry_after_ms"`
		Concurrency int     `json:"recommended_concurrency"`
	} `json:"error"`
}

func readError(t *testing.T, imm *extprocv3.ImmediateResponse) (b errorBody) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(imm.GetBody())))
	d.DisallowUnknownFields()
	if err := d.Decode(&b); err != nil {
		t.Fatalf("%v in %s", err, imm.GetBody())
	}
	return b
}

func small(in *plan.Inputs, _ *Options) {
	for i := range in.Routes {
		in.Routes[i].MaxOutput, in.Routes[i].Oversize = 8192, fleet.OversizeRefuse
	}
}

func TestMoreThanTheModelGivesIsA400(t *testing.T) {
	for _, route := range []string{"chat", "messages"} {
		w, g := gated(t, small)
		m := chat(nil)
		m.route, m.cluster = route, "a100"
		m.peek["max_tokens"] = 100000
		r := w.ask(t, m)
		imm := r.GetImmediateResponse()
		if imm.GetStatus().GetCode() != 400 || imm.GetDetails() != "fairlead_oversize" {
			t.Fatalf("%s: %v", route, r)
		}
		headers := headerMap(t, imm.GetHeaders())
		if headers[wire.HeaderShouldRetry] != "false" || headers["content-type"] != "application/json" {
			t.Errorf("%s: headers %v", route, headers)
		}
		for _, name := range []string{wire.HeaderRetryAfterMs, wire.HeaderRetryAfter, wire.HeaderRecommendedConcurrency} {
			if v, there := headers[name]; there {
				t.Errorf("%s: %s: %s, though waiting doesn't help", route, name, v)
			}
		}
		b := readError(t, imm)
		if b.Error.Type != "invalid_request_error" || b.Error.Limit != 8192 ||
			b.Error.Message != "This request asks for 100000 output tokens and the model gives at most 8192: set max_tokens to 8192 or less." {
			t.Errorf("%s: %s", route, imm.GetBody())
		}
		if route == "chat" && (b.Error.Code != "max_tokens_too_large" || b.Error.Param == nil || *b.Error.Param != "max_tokens") {
			t.Errorf("not OpenAI's shape: %s", imm.GetBody())
		}
		if route == "messages" && (b.Type != "error" || b.RequestID != headers[wire.HeaderRequestID] || b.Error.Code != "") {
			t.Errorf("not Anthropic's shape: %s", imm.GetBody())
		}
		if len(g.asked) != 0 || len(w.picks) != 0 {
			t.Errorf("%s: admission asked or place reserved for a request that can't be served", route)
		}
		if e := w.lastEvent(); e.Reason != plan.ReasonOversize || e.Action != plan.ActionRefuse || e.Admission != 0 {
			t.Errorf("%s: event %+v", route, e)
		}
	}
}

// TestRefusalsNameTheFieldThatTheCallerUsed, since official SDKs have several.
func TestRefusalsNameTheFieldThatTheCallerUsed(t *testing.T) {
	for _, row := range []struct {
		peek   map[string]any
		header string
		want   string
	}{
		{map[string]any{"max_completion_tokens": 100000}, "", "max_completion_tokens"},
		{map[string]any{"max_output_tokens": 100000}, "", "max_output_tokens"},
		{map[string]any{"max_tokens": 9000, "max_completion_tokens": 100000, "max_output_tokens": 5}, "", "max_completion_tokens"},
		{map[string]any{"max_tokens": 100000, "max_output_tokens": 9000}, "", "max_tokens"},
		{map[string]any{"max_output_tokens": 9000}, "100000", "max_tokens"},
		{map[string]any{"max_output_tokens": "junk"}, "100000", "max_tokens"},
	} {
		w, _ := gated(t, small)
		headers := map[string]string{}
		if row.header != "" {
			headers["max_tokens"] = row.header
		}
		m := chat(headers)
		m.cluster, m.peek = "a100", row.peek
		b := readError(t, w.ask(t, m).GetImmediateResponse())
		if b.Error.Param == nil || *b.Error.Param != row.want || !strings.Contains(b.Error.Message, "set "+row.want+" to 8192 or less.") {
			t.Errorf("%v, header %q: %+v", row.peek, row.header, b.Error)
		}
	}
}

func TestOnlyDeclaredBudgetsAreTooLarge(t *testing.T) {
	for _, row := range []struct {
		name    string
		header  string
		peek    map[string]any
		trust   bool
		refused bool
	}{
		{"fits exactly", "", map[string]any{"max_tokens": 8192}, false, false},
		{"body", "", map[string]any{"max_tokens": 8193}, false, true},
		{"header", "8193", map[string]any{"max_tokens": 5}, false, true},
		{"trusted header fits", "5", map[string]any{"max_tokens": 9000}, true, false},
		{"trusted header absent", "", map[string]any{"max_tokens": 9000}, true, true},
		{"nothing declared, the default is larger", "", map[string]any{"model": "m"}, false, false},
		{"nothing readable", "", map[string]any{"max_tokens": "junk"}, false, false},
		{"broken body", "", map[string]any{"error": true}, false, false},
		{"broken body, header", "9000", map[string]any{"error": true}, false, true},
		{"body unread, header", "9000", nil, false, true},
		{"body unread, header fits", "9", nil, false, false},
		{"top of the scale", "", map[string]any{"max_tokens": 1e300}, false, true},
	} {
		w := newWorld(t, small, func(in *plan.Inputs, _ *Options) {
			in.Routes[0].DefaultBudget, in.Routes[0].TrustDeclared = 10000, row.trust
		})
		m := chat(map[string]string{})
		m.peek = row.peek
		if row.header != "" {
			m.headers["max_tokens"] = row.header
		}
		if got := w.ask(t, m).GetImmediateResponse() != nil; got != row.refused {
			t.Errorf("%s: refused %v", row.name, got)
		}
	}
}

func TestNoRoomTellsWhatFits(t *testing.T) {
	tight := func(free fleet.Tokens) func(*plan.Inputs, *Options) {
		return func(in *plan.Inputs, _ *Options) {
			for p := range in.Pools {
				for e := range in.Pools[p].Endpoints {
					in.Pools[p].Endpoints[e].KVFree = free
				}
			}
			for i := range in.Routes {
				in.Routes[i].NoRoom = fleet.OversizeRefuse
			}
		}
	}
	for _, row := range []struct {
		free fleet.Tokens
		fits int
		want string
	}{
		{5000, 4000, "No model server has room now for a request of 6000 output tokens. There is room for a max_tokens of 4000 at most. Retry in 1234 ms."},
		{500, 0, "No model server has room now for a request of 6000 output tokens. Retry in 1234 ms."},
	} {
		w, g := gated(t, tight(row.free))
		m := chat(map[string]string{"content-length": "4000"})
		m.peek["max_tokens"] = 6000
		imm := w.ask(t, m).GetImmediateResponse()
		if imm.GetStatus().GetCode() != 429 || imm.GetDetails() != "fairlead_no_room" {
			t.Fatalf("%d tokens free: %v", row.free, imm)
		}
		checkRetryFields(t, headerMap(t, imm.GetHeaders()))
		b := readError(t, imm)
		if b.Error.Limit != row.fits || b.Error.Message != row.want || b.Error.Code != "rate_limit_exceeded" {
			t.Errorf("%d tokens free: %s", row.free, imm.GetBody())
		}
		if !slices.Equal(g.refused, []admission.Reason{admission.ReasonNoRoom}) || w.lastEvent().Admission != admission.ReasonNoRoom {
			t.Errorf("told %v, event %+v", g.refused, w.lastEvent())
		}
		m.peek["max_tokens"] = row.fits
		if row.fits > 0 && w.ask(t, m).GetImmediateResponse() != nil {
			t.Errorf("%d tokens are refused, though that was said to fit", row.fits)
		}
	}
}

// caches gives every endpoint a KV cache, and the first route refuses what has no room.
func caches(size, free fleet.Tokens, bytesPerToken float64) func(*plan.Inputs, *Options) {
	return func(in *plan.Inputs, _ *Options) {
		for p := range in.Pools {
			for e := range in.Pools[p].Endpoints {
				in.Pools[p].Endpoints[e].KVSize, in.Pools[p].Endpoints[e].KVFree = size, free
			}
		}
		in.Routes[0].NoRoom, in.Routes[0].BytesPerToken = fleet.OversizeRefuse, bytesPerToken
	}
}

// TestLearnedRatiosRefuseNobodyForGood: whoever teaches a model that its tokens are a
// byte long makes others' prompts no longer than they can be. A server with nothing
// to do takes what may fit into it; while none is idle the caller is told to come
// back.
func TestLearnedRatiosRefuseNobodyForGood(t *testing.T) {
	for _, row := range []struct {
		free  fleet.Tokens
		bytes string
		code  int32 // 0: let in
	}{
		{30_000, "100000", 0}, {28_200, "100000", 0}, {28_000, "100000", 429}, {10_000, "100000", 429},
		{30_000, "957000", 400}, // at least 29,906 tokens
	} {
		w, _ := gated(t, caches(30_000, row.free, 1))
		m := chat(map[string]string{"content-length": row.bytes})
		m.peek["max_tokens"] = 100
		imm := w.ask(t, m).GetImmediateResponse()
		if got := int32(imm.GetStatus().GetCode()); got != row.code {
			t.Errorf("%d tokens free, %s bytes: %v; want %d", row.free, row.bytes, imm, row.code)
		}
		if row.code == 429 {
			checkRetryFields(t, headerMap(t, imm.GetHeaders()))
		}
	}
}

// TestEscapedPromptsAreNotTakenForLongerOnes: a client may send a letter as the six
// bytes of its escape, as json.dumps of Python does, and a token has as many letters
// as elsewhere.
func TestEscapedPromptsAreNotTakenForLongerOnes(t *testing.T) {
	const text = "Скажи, сколько стоит проезд до Владивостока и обратно. "
	prompt := strings.Repeat(text, 200)
	characters := len([]rune(prompt))
	size := fleet.Tokens(characters*2/9) + 500 // 4½ characters a token
	w, g := gated(t, caches(size, size, 4))
	m := chat(map[string]string{"content-length": strconv.Itoa(len(strconv.QuoteToASCII(prompt)))})
	m.peek["max_tokens"] = 500
	if imm := w.ask(t, m).GetImmediateResponse(); imm != nil {
		t.Fatalf("%d characters and 500 tokens: %v; want it let in", characters, imm)
	}
	if a := g.last(); a.InputAtLeast <= 0 || a.InputAtLeast > size-500 || a.Input <= size {
		t.Errorf("estimated as %d tokens, %d at least", a.Input, a.InputAtLeast)
	}
}

// TestPromptsHaveNoMoreThanTheirEstimate at the least, however long a token is.
func TestPromptsHaveNoMoreThanTheirEstimate(t *testing.T) {
	w, g := gated(t, caches(2100, 2100, 50))
	m := chat(map[string]string{"content-length": "100000"}) // 2000 tokens
	m.peek["max_tokens"] = 100
	if imm := w.ask(t, m).GetImmediateResponse(); imm != nil {
		t.Fatalf("%v; want it let in", imm)
	}
	if a := g.last(); a.Input != 2000 || a.InputAtLeast != 2000 {
		t.Errorf("estimated as %d tokens, %d at least; want 2000 and 2000", a.Input, a.InputAtLeast)
	}
}

// TestWhatNoKVCacheEverHoldsIsA400: waiting doesn't help, and nothing is reserved.
func TestWhatNoKVCacheEverHoldsIsA400(t *testing.T) {
	for _, row := range []struct {
		route  string
		budget int
		prompt string
		fits   int
		want   string
	}{
		{"chat", 6000, "32000", 4000, "A request of 6000 output tokens behind a prompt of at least 1000 tokens is more than the whole KV cache of any model server: set max_tokens to 4000 or less."},
		{"messages", 6000, "0", 5000, "A request of 6000 output tokens is more than the whole KV cache of any model server: set max_tokens to 5000 or less."},
		{"chat", 10, "320000", 0, "A request of 10 output tokens behind a prompt of at least 10000 tokens is more than the whole KV cache of any model server: shorten the prompt."},
	} {
		w, g := gated(t, func(in *plan.Inputs, _ *Options) {
			for p := range in.Pools {
				for e := range in.Pools[p].Endpoints {
					in.Pools[p].Endpoints[e].KVFree, in.Pools[p].Endpoints[e].KVSize = 100, 5000
				}
			}
			for i := range in.Routes {
				in.Routes[i].NoRoom = fleet.OversizeRefuse
			}
		})
		m := chat(map[string]string{"content-length": row.prompt})
		m.route, m.cluster = row.route, "a100"
		m.peek["max_tokens"] = row.budget
		imm := w.ask(t, m).GetImmediateResponse()
		if imm.GetStatus().GetCode() != 400 || imm.GetDetails() != "fairlead_never_fits" {
			t.Fatalf("%+v: %v", row, imm)
		}
		headers := headerMap(t, imm.GetHeaders())
		if _, there := headers[wire.HeaderRetryAfterMs]; there || headers[wire.HeaderShouldRetry] != "false" {
			t.Errorf("%+v: %v", row, headers)
		}
		b := readError(t, imm)
		if b.Error.Message != row.want || b.Error.Limit != row.fits || b.Error.Type != "invalid_request_error" {
			t.Errorf("%s", imm.GetBody())
		}
		if row.route == "chat" && b.Error.Code != "context_length_exceeded" {
			t.Errorf("not OpenAI's shape: %s", imm.GetBody())
		}
		if len(g.asked)+len(g.refused)+len(w.picks) != 0 || w.lastEvent().Reason != plan.ReasonNeverFits {
			t.Errorf("%+v: asked %v, refused %v, %+v", row, g.asked, g.refused, w.lastEvent())
		}
	}
}

func TestUserIsASessionOnlyWhereTheRouteReadsIt(t *testing.T) {
	for _, row := range []struct {
		affinity, cacheKey, user string
		readUser                 bool
		want                     string
	}{
		{"", "", "u", true, "u"}, {"", "", "u", false, ""}, {"", "c", "u", true, "c"}, {"a", "c", "u", true, "a"}, {"a", "", "", true, "a"},
	} {
		r := request{affinity: []byte(row.affinity), cacheKey: []byte(row.cacheKey), user: []byte(row.user)}
		if got := r.session(row.readUser); got != plan.SessionOf([]byte(row.want)) {
			t.Errorf("%+v: another session", row)
		}
	}
}
