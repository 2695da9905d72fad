package extproc

import (
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

func strict(in *plan.Inputs, _ *Options) {
	for i := range in.Routes {
		in.Routes[i].RefuseUnread = true
	}
}

func TestUnreadBodiesAreRefusedInTheDialect(t *testing.T) {
	for _, route := range []string{"chat", "messages"} {
		w, g := gated(t, strict)
		m := chat(map[string]string{"transfer-encoding": "chunked"})
		m.route, m.cluster, m.peek = route, "a100", nil
		r := w.ask(t, m)
		imm := r.GetImmediateResponse()
		if imm.GetStatus().GetCode() != 400 || imm.GetDetails() != "fairlead_unread" {
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
		if b.Error.Type != "invalid_request_error" || b.Error.Param != nil || b.Error.Limit != 0 {
			t.Errorf("%s: %s", route, imm.GetBody())
		}
		for _, accepted := range []string{"application/json", "not compressed", "content-length", "999999 bytes"} {
			if !strings.Contains(b.Error.Message, accepted) {
				t.Errorf("%s: the message doesn't say %q: %s", route, accepted, b.Error.Message)
			}
		}
		if strings.Contains(b.Error.Message, "header") {
			t.Errorf("%s: a header is no help on this route: %s", route, b.Error.Message)
		}
		if route == "chat" && (b.Error.Code != "body_not_read" || !strings.Contains(string(imm.GetBody()), `"param":null`)) {
			t.Errorf("not OpenAI's shape: %s", imm.GetBody())
		}
		if route == "messages" && (b.Type != "error" || b.RequestID != headers[wire.HeaderRequestID] || b.Error.Code != "") {
			t.Errorf("not Anthropic's shape: %s", imm.GetBody())
		}
		if got := metadata(r, wire.NamespaceLog)[wire.KeyReason]; got != "unread" || metadata(r, wire.NamespaceSteer) != nil {
			t.Errorf("%s: metadata %v", route, r.GetDynamicMetadata())
		}
		if len(g.asked) != 0 || len(w.picks) != 0 {
			t.Errorf("%s: admission asked or place reserved", route)
		}
		if e := w.lastEvent(); e.Reason != plan.ReasonUnread || e.Action != plan.ActionRefuse || e.Admission != 0 || e.Steered || e.Pool != "a100" {
			t.Errorf("%s: event %+v", route, e)
		}
	}
}

// TestWhatCountsAsRead: a header is no way around a limit, unless the route
// trusts it. Where nothing is refused admission learns that the numbers are
// guesses.
func TestWhatCountsAsRead(t *testing.T) {
	for _, row := range []struct {
		name, header string
		peek         map[string]any
		noBody       bool
		trust        bool
		other        bool // the path generates nothing
		guessed      bool
	}{
		{name: "read", peek: map[string]any{"max_tokens": 5}},
		{name: "read, nothing declared", peek: map[string]any{wire.KeyRead: true}},
		{name: "read, and a header", header: "1", peek: map[string]any{"max_tokens": 5}},
		{name: "read, and no usable number", peek: map[string]any{"max_tokens": "junk"}},
		{name: "unread", guessed: true},
		{name: "unread, and a header", header: "1", guessed: true},
		{name: "unread, and a large header", header: "100000", guessed: true},
		{name: "unread, and a trusted header", header: "1", trust: true},
		{name: "unread, and a trusted header that is no number", header: "junk", trust: true, guessed: true},
		{name: "unread, and a trusted header of nothing", header: "0", trust: true, guessed: true},
		{name: "unread on a route that trusts headers", trust: true, guessed: true},
		{name: "broken", peek: map[string]any{"error": true}, guessed: true},
		{name: "broken, and a header", header: "1", peek: map[string]any{"error": true}, guessed: true},
		{name: "broken, and a trusted header", header: "1", peek: map[string]any{"error": true}, trust: true},
		{name: "broken after a number", peek: map[string]any{"max_tokens": 5, "error": true}, guessed: true},
		{name: "no body", noBody: true},
		{name: "no body and no content-type", peek: map[string]any{"error": true}, noBody: true},
		{name: "no body, and a header", header: "7", noBody: true},
		{name: "generates nothing", other: true},
	} {
		ask := func(change ...func(*plan.Inputs, *Options)) (refused bool, w *world, g *gate) {
			w, g = gated(t, append(change, func(in *plan.Inputs, _ *Options) { in.Routes[0].TrustDeclared = row.trust })...)
			m := chat(map[string]string{})
			m.peek, m.noBody = row.peek, row.noBody
			if row.header != "" {
				m.headers["max_tokens"] = row.header
			}
			if row.other {
				m.route = "chat/other"
			}
			imm := w.ask(t, m).GetImmediateResponse()
			if imm != nil && row.trust != strings.Contains(string(imm.GetBody()), "max_tokens header") {
				t.Errorf("%s: the header is offered in vain, or not offered: %s", row.name, imm.GetBody())
			}
			return imm != nil, w, g
		}
		if refused, _, _ := ask(strict); refused != row.guessed {
			t.Errorf("%s: refused %v", row.name, refused)
		}
		refused, _, g := ask()
		if refused {
			t.Errorf("%s: refused on a route that lets such requests pass", row.name)
		}
		if !row.other && g.last().Unread != row.guessed {
			t.Errorf("%s: admission is told Unread %v", row.name, g.last().Unread)
		}
	}
}

// TestUnplacedAreThoseThatEnvoyChoosesFor: no endpoint's count holds a place for
// them.
func TestUnplacedAreThoseThatEnvoyChoosesFor(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*message)
		want   bool
	}{
		{"dynamic", func(*message) {}, false},
		{"legacy", func(m *message) { m.headers[wire.HeaderRouteStrategy] = "legacy" }, true},
		{"legacy by the route", func(m *message) { m.route, m.cluster = "messages", "a100" }, true},
		{"unknown arm", func(m *message) { m.cluster = "" }, true},
	} {
		w, g := gated(t)
		m := chat(map[string]string{})
		row.change(&m)
		w.ask(t, m)
		if g.last().Unplaced != row.want || (len(w.picks) == 0) != row.want {
			t.Errorf("%s: unplaced %v, %d places reserved", row.name, g.last().Unplaced, len(w.picks))
		}
	}
	w, g := gated(t)
	for slot := uint32(1); slot <= 4; slot++ {
		w.live[slot] = 10
	}
	w.ask(t, chat(nil))
	if len(g.refused) != 1 || g.last().Unplaced {
		t.Errorf("refused by the plan: %v, unplaced %v", g.refused, g.last().Unplaced)
	}
}
