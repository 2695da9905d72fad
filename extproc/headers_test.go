package extproc

import (
	"reflect"
	"strings"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

const firstID = "1718924567123-007-0001"

func chat(headers map[string]string) message {
	return message{route: "chat", cluster: "h100", source: "127.0.0.1:5555", headers: headers,
		peek: map[string]any{"model": "m", "max_tokens": 100}}
}

func mutation(r *extprocv3.ProcessingResponse) *extprocv3.HeaderMutation {
	return r.GetRequestHeaders().GetResponse().GetHeaderMutation()
}

func TestDynamicRequestIsSteeredInsideTheDrawnPool(t *testing.T) {
	w := newWorld(t)
	r := w.ask(t, chat(nil))
	hosts := strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")
	if len(hosts) < 2 || !strings.HasPrefix(hosts[0], "10.0.0.") {
		t.Fatalf("hosts %v; want the first in h100 and a retry target", hosts)
	}
	if got := w.picks[firstID]; got.Pool != "h100" || got.Address.String() != hosts[0] {
		t.Errorf("ledger was told %v, Envoy %s", got, hosts[0])
	}
	want := map[string]any{
		wire.KeyDecision: firstID, wire.KeyPlan: w.plan.Digest(), wire.KeyStrategy: "dynamic",
		wire.KeyReason: "weighted", wire.KeyRequestID: firstID,
	}
	if got := metadata(r, wire.NamespaceLog); !reflect.DeepEqual(got, want) {
		t.Errorf("fairlead.log = %v; want %v", got, want)
	}
	if got := headerMap(t, mutation(r)); !reflect.DeepEqual(got, map[string]string{
		wire.HeaderDecision: firstID, wire.HeaderRequestID: firstID}) {
		t.Errorf("headers %v", got)
	}
	if r.GetRequestHeaders().GetResponse().GetClearRouteCache() {
		t.Error("route cache cleared without need")
	}
	if metadata(r, wire.NamespaceGroups) != nil {
		t.Error("groups named without a move")
	}
	e := w.lastEvent()
	if e.Route != "chat" || e.Pool != "h100" || e.Action != plan.ActionSteer || e.Strategy != fleet.StrategyDynamic ||
		e.Level != fleet.LevelOf(100) || e.BudgetSource != BudgetBody || !e.Generates || e.UnknownStrategy {
		t.Errorf("event %+v", e)
	}
}

// TestEventNamesThePickAndThePrompt: what was sent where, for the count of prompt
// tokens under way; where the plan does not steer nobody knows.
func TestEventNamesThePickAndThePrompt(t *testing.T) {
	w := newWorld(t)
	slots := map[string]uint32{"10.0.0.1:8000": 1, "10.0.0.2:8000": 2}
	m := chat(map[string]string{"content-length": "4000"})
	for range 20 {
		hosts := strings.Split(metadata(w.ask(t, m), wire.NamespaceSteer)[wire.KeyHosts].(string), ",")
		if e := w.lastEvent(); !e.Steered || e.Slot != slots[hosts[0]] || e.Prompt != 1000 {
			t.Fatalf("steered to %s: event %+v, want slot %d and 1000 tokens", hosts[0], e, slots[hosts[0]])
		}
	}
	m.headers[wire.HeaderRouteStrategy] = "legacy"
	w.ask(t, m)
	if e := w.lastEvent(); e.Steered || e.Slot != 0 || e.Prompt != 1000 {
		t.Errorf("left to Envoy: event %+v, want no slot and 1000 tokens", e)
	}
	m.route = "chat/other" // generates nothing
	w.ask(t, m)
	if e := w.lastEvent(); e.Prompt != 0 {
		t.Errorf("a prompt of %d tokens where nothing is generated", e.Prompt)
	}
}

func TestArmIsTheOneEnvoyDrew(t *testing.T) {
	w := newWorld(t)
	m := chat(nil)
	m.cluster = "a100"
	r := w.ask(t, m)
	if hosts := metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string); !strings.HasPrefix(hosts, "10.0.1.") {
		t.Errorf("hosts %s; want a100 first", hosts)
	}
}

func TestStrategyHeader(t *testing.T) {
	for _, row := range []struct {
		name, route, header string
		want                fleet.Strategy
		unknown             bool
	}{
		{"route default", "chat", "", fleet.StrategyDynamic, false},
		{"client asks legacy", "chat", "legacy", fleet.StrategyLegacy, false},
		{"client asks dynamic", "chat", "dynamic", fleet.StrategyDynamic, false},
		{"unknown value", "chat", "fastest", fleet.StrategyLegacy, true},
		{"other case", "chat", "Dynamic", fleet.StrategyLegacy, true},
		{"empty value", "chat", "", fleet.StrategyDynamic, false},
		{"route ignores the client", "messages", "dynamic", fleet.StrategyLegacy, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := newWorld(t)
			m := chat(nil)
			m.route = row.route
			if row.route == "messages" {
				m.cluster = "a100"
			}
			if row.header != "" {
				m.headers = map[string]string{wire.HeaderRouteStrategy: row.header}
			}
			r := w.ask(t, m)
			if got := metadata(r, wire.NamespaceLog)[wire.KeyStrategy]; got != row.want.String() {
				t.Errorf("strategy %v; want %v", got, row.want)
			}
			if steered := metadata(r, wire.NamespaceSteer) != nil; steered != (row.want == fleet.StrategyDynamic) {
				t.Errorf("steered: %v", steered)
			}
			if e := w.lastEvent(); e.UnknownStrategy != row.unknown {
				t.Errorf("unknown strategy counted: %v", e.UnknownStrategy)
			}
		})
	}
}

func TestWithoutPlanOrRouteTheRequestIsLeftToEnvoyWithIDs(t *testing.T) {
	noPlan := newWorld(t, func(_ *plan.Inputs, o *Options) { o.Plan = func() *plan.Plan { return nil } })
	other := chat(nil)
	other.route = "somebody-else"
	for reason, r := range map[string]*extprocv3.ProcessingResponse{
		"no_plan":       noPlan.ask(t, chat(nil)),
		"unknown_route": newWorld(t).ask(t, other),
	} {
		log := metadata(r, wire.NamespaceLog)
		if log[wire.KeyReason] != reason || log[wire.KeyStrategy] != "legacy" || log[wire.KeyDecision] != firstID {
			t.Errorf("%s: log %v", reason, log)
		}
		if metadata(r, wire.NamespaceSteer) != nil {
			t.Errorf("%s: steered", reason)
		}
		if headerMap(t, mutation(r))[wire.HeaderDecision] != firstID {
			t.Errorf("%s: no decision header", reason)
		}
	}
}

func TestFullPoolMovesTheRequestAndNamesGroups(t *testing.T) {
	w := newWorld(t)
	w.live[1], w.live[2] = 10, 10
	r := w.ask(t, chat(nil))
	if !r.GetRequestHeaders().GetResponse().GetClearRouteCache() || len(mutation(r).GetSetHeaders()) == 0 {
		t.Fatal("a moved request needs the route cache cleared and a header mutation")
	}
	hosts := strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")
	groups := metadata(r, wire.NamespaceGroups)["priority_groups"].([]any)
	if len(groups) != len(hosts) {
		t.Fatalf("%d groups for %d hosts", len(groups), len(hosts))
	}
	for i, g := range groups {
		want := "pool-h100"
		if strings.HasPrefix(hosts[i], "10.0.1.") {
			want = "pool-a100"
		}
		// A cluster named here would be a 503 of a sidecar that lacks it.
		if !reflect.DeepEqual(g, map[string]any{"name": want}) {
			t.Errorf("group %d is %v; its host is %s", i, g, hosts[i])
		}
	}
	if e := w.lastEvent(); !e.Moved || e.Pool != "a100" || e.Reason != plan.ReasonSpill {
		t.Errorf("event %+v", e)
	}
}

func TestSkippedPoolNamesGroupsWithoutClearingTheRoute(t *testing.T) {
	w := newWorld(t, func(in *plan.Inputs, _ *Options) {
		in.Pools = append(in.Pools, plan.PoolInput{Name: "empty", Tier: "empty"})
		in.Routes[0].Split = []string{"h100", "empty", "a100"}
	})
	r := w.ask(t, chat(nil))
	if r.GetRequestHeaders().GetResponse().GetClearRouteCache() {
		t.Error("route cache cleared though the first attempt stays in the drawn pool")
	}
	hosts := strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")
	groups, _ := metadata(r, wire.NamespaceGroups)["priority_groups"].([]any)
	if len(hosts) != 2 || len(groups) != 2 {
		t.Errorf("hosts %v, groups %v; want the two pools that have servers", hosts, groups)
	}
}

func TestFirstTokenLimitOnlyForStreamingRequests(t *testing.T) {
	for _, row := range []struct {
		name   string
		route  string
		stream any
		want   string
	}{
		{"streaming", "chat", true, "15000"},
		{"not streaming", "chat", false, ""},
		{"stream is text", "chat", "true", ""},
		{"path doesn't generate", "chat/other", true, ""},
		{"route without limit", "messages", true, ""},
	} {
		m := chat(nil)
		m.route = row.route
		m.peek["stream"] = row.stream
		r := newWorld(t).ask(t, m)
		if got := headerMap(t, mutation(r))[wire.HeaderPerTryTimeout]; got != row.want {
			t.Errorf("%s: per-try timeout %q; want %q", row.name, got, row.want)
		}
	}
}

func TestPromptIsEstimatedFromTheContentLength(t *testing.T) {
	for _, row := range []struct {
		length string
		want   fleet.Tokens
	}{
		{"", 0}, {"0", 0}, {"3", 0}, {"4", 1}, {"40000", 10_000}, {"999999999999", 1 << 20},
		{"9999999999999999999", 0}, {"-40", 0}, {"+40", 0}, {"4e3", 0}, {" 40", 0}, {"40, 40", 0}, {"0x40", 0},
	} {
		if got := promptTokens(contentLength([]byte(row.length)), 4); got != row.want {
			t.Errorf("content-length %q: %d tokens; want %d", row.length, got, row.want)
		}
	}
}

func TestLongPromptsGoWhereTheKVCacheHasRoom(t *testing.T) {
	w := newWorld(t, func(in *plan.Inputs, _ *Options) {
		in.Pools[0].Endpoints[0].KVFree, in.Pools[0].Endpoints[1].KVFree = 2_000, 20_000
	})
	first := func(m message) string {
		return strings.Split(metadata(w.ask(t, m), wire.NamespaceSteer)[wire.KeyHosts].(string), ",")[0]
	}
	long := chat(map[string]string{"content-length": "40000"})
	small, other := 0, 0
	for range 200 {
		if first(long) != "10.0.0.2:8000" {
			t.Fatal("10,000 tokens went to the endpoint that has 2,000 free")
		}
		if first(chat(map[string]string{"content-length": "4000"})) == "10.0.0.1:8000" {
			small++
		}
		long.route = "chat/other" // generates nothing
		if first(long) == "10.0.0.1:8000" {
			other++
		}
		long.route = "chat"
	}
	if small < 60 || other < 60 {
		t.Errorf("of 200 short prompts and 200 other requests %d and %d went to the smaller; want about 100", small, other)
	}
}

// TestSessionsGoToOneEndpoint: by the header, else by the body's key, where the
// route has affinity and the path generates.
func TestSessionsGoToOneEndpoint(t *testing.T) {
	affine := func(in *plan.Inputs, _ *Options) {
		in.Routes[0].Affinity = fleet.AffinitySession
		in.Pools[0] = pool("h100", "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000")
	}
	none := func(in *plan.Inputs, o *Options) { affine(in, o); in.Routes[0].Affinity = fleet.AffinityNone }
	for _, row := range []struct {
		name, route, header string
		cacheKey            any
		change              func(*plan.Inputs, *Options)
		sticky              bool
	}{
		{"header", "chat", "ann", nil, affine, true},
		{"body", "chat", "", "ann", affine, true},
		{"header before body", "chat", "ann", "other", affine, true},
		{"no session", "chat", "", nil, affine, false},
		{"empty key", "chat", "", "", affine, false},
		{"key is no text", "chat", "", 7, affine, false},
		{"path doesn't generate", "chat/other", "ann", nil, affine, false},
		{"route without affinity", "chat", "ann", nil, none, false},
	} {
		w := newWorld(t, row.change)
		m := chat(map[string]string{})
		m.route = row.route
		if row.header != "" {
			m.headers[wire.HeaderSessionAffinity] = row.header
		}
		if row.cacheKey != nil {
			m.peek[wire.KeyPromptCacheKey] = row.cacheKey
		}
		seen := map[string]bool{}
		for range 100 {
			r := w.ask(t, m)
			seen[strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")[0]] = true
			if got := metadata(r, wire.NamespaceLog)[wire.KeyReason] == "affinity"; got != row.sticky {
				t.Fatalf("%s: reason %v", row.name, metadata(r, wire.NamespaceLog)[wire.KeyReason])
			}
		}
		if want := (map[bool]int{true: 1, false: 4})[row.sticky]; len(seen) != want {
			t.Errorf("%s: %d endpoints; want %d", row.name, len(seen), want)
		}
		if row.sticky {
			home := w.plan.Decide(plan.Class{Arm: 0, Strategy: fleet.StrategyDynamic, Generates: true, Session: plan.SessionOf([]byte("ann"))}, 1, nil)
			if !seen[w.plan.AddressText(home.Picks[0])] {
				t.Errorf("%s: went to %v", row.name, seen)
			}
		}
	}
}

func TestRequestsStayInTheSidecarsZone(t *testing.T) {
	w := newWorld(t, func(in *plan.Inputs, _ *Options) {
		in.Pools[0] = pool("h100", "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
		for i, zone := range []string{"a", "b", "b"} {
			in.Pools[0].Endpoints[i].Zone, in.Pools[0].Endpoints[i].Slot = zone, uint32(i)
		}
	})
	seen := func(zone string) (hosts, reasons map[string]int) {
		hosts, reasons = map[string]int{}, map[string]int{}
		m := chat(nil)
		m.zone = zone
		for range 100 {
			r := w.ask(t, m)
			hosts[strings.Split(metadata(r, wire.NamespaceSteer)[wire.KeyHosts].(string), ",")[0]]++
			reasons[metadata(r, wire.NamespaceLog)[wire.KeyReason].(string)]++
		}
		return hosts, reasons
	}
	if hosts, reasons := seen("a"); hosts["10.0.0.1:8000"] != 100 || reasons["weighted"] != 100 {
		t.Errorf("zone a: %v, %v", hosts, reasons)
	}
	if hosts, _ := seen("b"); len(hosts) != 2 || hosts["10.0.0.1:8000"] != 0 {
		t.Errorf("zone b: %v", hosts)
	}
	for _, zone := range []string{"", "elsewhere"} {
		if hosts, reasons := seen(zone); len(hosts) != 3 || reasons["weighted"] != 100 {
			t.Errorf("zone %q: %v, %v", zone, hosts, reasons)
		}
	}
	w.live[0] = 7 // of 10
	if _, reasons := seen("a"); reasons["zone_spill"] < 80 {
		t.Errorf("zone a at 70 %%: %v", reasons)
	}
}

func TestRequestIDIsKeptOnlyFromTrustedCallersAndIfPlain(t *testing.T) {
	trusting := func(_ *plan.Inputs, o *Options) {
		o.Trusted = func(source string) bool { return strings.HasPrefix(source, "127.0.0.1:") }
	}
	for _, row := range []struct{ name, source, id, want string }{
		{"trusted", "127.0.0.1:5555", "abc-1", "abc-1"},
		{"untrusted", "192.0.2.1:5555", "abc-1", firstID},
		{"trusted without id", "127.0.0.1:5555", "", firstID},
		{"line break", "127.0.0.1:5555", "a\r\nb", firstID},
		{"quote", "127.0.0.1:5555", `a"b`, firstID},
		{"backslash", "127.0.0.1:5555", `a\b`, firstID},
		{"escape sequence", "127.0.0.1:5555", "a\x1b[31m", firstID},
		{"not ASCII", "127.0.0.1:5555", "a\u2028b", firstID},
		{"too long", "127.0.0.1:5555", strings.Repeat("x", 129), firstID},
		{"1 MiB", "127.0.0.1:5555", strings.Repeat("x", 1<<20), firstID},
	} {
		m := chat(map[string]string{wire.HeaderRequestID: row.id})
		m.source = row.source
		r := newWorld(t, trusting).ask(t, m)
		if got := metadata(r, wire.NamespaceLog)[wire.KeyRequestID]; got != row.want {
			t.Errorf("%s: request id %v; want %v", row.name, got, row.want)
		}
		set, mutated := headerMap(t, mutation(r))[wire.HeaderRequestID]
		if mutated != (row.want == firstID) || (mutated && set != firstID) {
			t.Errorf("%s: x-request-id set to %q (%v)", row.name, set, mutated)
		}
	}
}

func TestEveryRequestGetsAnotherIDAndIndependentDraws(t *testing.T) {
	w := newWorld(t)
	hosts := map[any]int{}
	for range 1000 {
		hosts[strings.Split(metadata(w.ask(t, chat(nil)), wire.NamespaceSteer)[wire.KeyHosts].(string), ",")[0]]++
	}
	if len(w.picks) != 1000 {
		t.Errorf("%d ids for 1000 requests", len(w.picks))
	}
	for _, n := range hosts {
		if n < 400 {
			t.Errorf("two equal endpoints got %v", hosts)
		}
	}
}
