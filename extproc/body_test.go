package extproc

import (
	"strconv"
	"testing"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

const smallBody = 64 << 10

func limitedBody(in *plan.Inputs, _ *Options) {
	for i := range in.Routes {
		in.Routes[i].MaxBody = smallBody
	}
}

// TestBodiesOverTheLimitAskForNothing: Envoy answers them 413, whatever is decided.
func TestBodiesOverTheLimitAskForNothing(t *testing.T) {
	for _, row := range []struct {
		name, length, route string
		change              func(*plan.Inputs, *Options)
		large               bool
	}{
		{name: "a byte more", length: "65537", large: true},
		{name: "zeros before it", length: "00065537", large: true},
		{name: "18 digits", length: "999999999999999999", large: true},
		{name: "on a legacy route", route: "messages", length: "65537", large: true},
		{name: "nothing is generated", route: "chat/other", length: "65537", large: true},
		{name: "where unread bodies are refused", length: "65537", change: strict, large: true},
		{name: "just as much", length: "65536"},
		{name: "no length"},
		{name: "no number", length: "70000,70000"},
		{name: "no limit is known", length: "65537", change: func(in *plan.Inputs, _ *Options) { in.Routes[0].MaxBody = 0 }},
	} {
		changes := []func(*plan.Inputs, *Options){limitedBody}
		if row.change != nil {
			changes = append(changes, row.change)
		}
		w, g := gated(t, changes...)
		m := chat(map[string]string{"content-length": row.length})
		m.peek = map[string]any{"max_tokens": 1 << 30}
		if row.large && row.change != nil {
			m.peek = nil
		}
		if row.length == "" {
			delete(m.headers, "content-length")
		}
		if row.route != "" {
			m.route = row.route
		}
		r := w.ask(t, m)
		entered := len(g.asked) + len(w.picks)
		e := w.lastEvent()
		if !row.large {
			if entered == 0 || e.Reason == plan.ReasonBodyTooLarge {
				t.Errorf("%s: reason %v, admission asked %d times, %d places", row.name, e.Reason, len(g.asked), len(w.picks))
			}
			continue
		}
		if entered > 0 || len(g.refused) > 0 || len(g.earlyIn) > 0 {
			t.Errorf("%s: admission asked %d times, %d places reserved", row.name, len(g.asked), len(w.picks))
		}
		common := r.GetRequestHeaders().GetResponse()
		if common == nil || common.GetClearRouteCache() || headerMap(t, common.GetHeaderMutation())[wire.HeaderDecision] == "" {
			t.Errorf("%s: %v; want that it goes on with its ids", row.name, r)
		}
		if metadata(r, wire.NamespaceSteer) != nil || metadata(r, wire.NamespaceLog)[wire.KeyReason] != "body_too_large" {
			t.Errorf("%s: metadata %v", row.name, r.GetDynamicMetadata())
		}
		if e.Reason != plan.ReasonBodyTooLarge || e.Why() != "body_too_large" || e.Action != plan.ActionLeave || e.Admission != 0 ||
			e.Steered || e.Route == "" || e.Pool != m.cluster || (e.Strategy == fleet.StrategyLegacy) != (m.route == "messages") {
			t.Errorf("%s: event %+v", row.name, e)
		}
	}
}

// TestAnswersToBodiesOverTheLimitGetRetryFields, should a sidecar let such a body pass
// whose own limit is a larger one for a moment.
func TestAnswersToBodiesOverTheLimitGetRetryFields(t *testing.T) {
	w, g := gated(t, limitedBody, computed)
	m := chat(map[string]string{"content-length": strconv.Itoa(smallBody + 1), "authorization": "Bearer a"})
	w.exchange(t, m.proto(), answer("503"))
	if g.advised != 1 || g.last().Route != "chat" || g.last().Client == (admission.Client{}) || g.last().Seed == 0 {
		t.Errorf("advised %d times, of %+v", g.advised, g.asked)
	}
}
