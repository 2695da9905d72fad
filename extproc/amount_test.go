package extproc

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// TestMessagesQuoteWhatWasAsked: never the number where budgets are cut off, and
// the number of answers where it makes the request large.
func TestMessagesQuoteWhatWasAsked(t *testing.T) {
	limit := func(reason admission.Reason) func(*gate) {
		return func(g *gate) {
			g.verdict = admission.Verdict{Reason: reason, Standing: standing,
				Refusal: admission.Refusal{RetryAfter: time.Second, Concurrency: 1, ShouldRetry: true}}
		}
	}
	whole := " tokens even if its prompt is as short as it can be, which is more than your whole limit of 400000 tokens per minute: "
	for _, row := range []struct {
		name   string
		tokens any
		n      any
		change func(*plan.Inputs, *Options)
		gate   func(*gate)
		want   string
	}{
		{"over the model's limit", 1e300, nil, small, nil,
			"This request asks for more than 2000000000 output tokens and the model gives at most 8192: set max_tokens to 8192 or less."},
		{"over it by text with a digit separator", "9_000", nil, small, nil, "This request asks for 9000 output tokens and the model gives at most 8192"},
		{"at the cut", 2147483647, nil, small, nil, "This request asks for more than 2000000000 output tokens"},
		{"below the cut", 2147483646, nil, small, nil, "This request asks for 2147483646 output tokens"},
		{"no room", 1e10, nil, func(in *plan.Inputs, _ *Options) {
			in.Routes[0].NoRoom = fleet.OversizeRefuse
			for p := range in.Pools {
				for e := range in.Pools[p].Endpoints {
					in.Pools[p].Endpoints[e].KVFree = 5000
				}
			}
		}, nil, "No model server has room now for a request of more than 2000000000 output tokens. There is room for a max_tokens of 4000 at most."},
		{"over a whole limit", 1e10, nil, nil, limit(admission.ReasonTooMany),
			"This request may take more than 2000000000" + whole + "lower max_tokens or shorten the prompt."},
		{"one answer", 500, 1, nil, limit(admission.ReasonTooMany), "This request may take 625" + whole + "lower max_tokens or shorten"},
		{"several answers", 500, 3, nil, limit(admission.ReasonTooMany),
			"This request for 3 answers (n) may take 1625" + whole + "lower n or max_tokens, or shorten the prompt."},
		{"very many answers", 500, 1e300, nil, limit(admission.ReasonTooMany),
			"This request for more than 2000000000 answers (n) may take more than 2000000000" + whole + "lower n"},
		{"answers that make it too large", 2e9, 2, nil, limit(admission.ReasonTooMany),
			"This request for 2 answers (n) may take more than 2000000000" + whole + "lower n"},
		{"more than is left", 500, 3, nil, limit(admission.ReasonTokens),
			"This request for 3 answers (n) may take 2500 tokens and you have 1200 left of 400000 tokens per minute; the limit is reset in 12 s. Retry"},
		{"all by the estimate", 399_000, nil, nil, limit(admission.ReasonTokens),
			"This request may take 400000 tokens and you have 1200 left of 400000 tokens per minute; the limit is reset in 12 s. Retry"},
		{"more than all by the estimate", 399_001, nil, nil, limit(admission.ReasonTokens),
			"This request may take 400001 tokens and you have 1200 left of 400000 tokens per minute; the limit is reset in 12 s. " +
				"Its prompt may be shorter than estimated, so it is let in when all of the limit is left. Retry"},
		{"more than all of a part", 399_001, nil, nil, func(g *gate) { limit(admission.ReasonTokens)(g); g.verdict.Standing.Local = true },
			"This request may take 400001 tokens and you have 1200 left of 400000 tokens per minute; the limit is reset in 12 s. Retry"},
	} {
		change := row.change
		if change == nil {
			change = func(*plan.Inputs, *Options) {}
		}
		w, g := gated(t, change)
		if row.gate != nil {
			row.gate(g)
		}
		m := chat(map[string]string{"content-length": "4000"})
		m.peek["max_tokens"] = row.tokens
		if row.n != nil {
			m.peek["n"] = row.n
		}
		imm := w.ask(t, m).GetImmediateResponse()
		if got := readError(t, imm).Error.Message; !strings.HasPrefix(got, row.want) {
			t.Errorf("%s: %q\nwant %q", row.name, got, row.want)
		}
		if row.tokens != 2147483646 && strings.Contains(string(imm.GetBody()), "21474836") {
			t.Errorf("%s: quotes the cut: %s", row.name, imm.GetBody())
		}
	}
}
