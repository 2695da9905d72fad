package integration

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestSessionsKeepTheirServer sends conversations by header and by the body's
// key, then takes a server out of the choice and brings it back: only its own
// conversations move, and they come home.
func TestSessionsKeepTheirServer(t *testing.T) {
	servers := upstreams(t, 4)
	for i, u := range servers {
		u.Handle(named(fmt.Sprint(i)))
	}
	s := startSteered(t, shape{pools: map[string][]*envoytest.Upstream{"A": servers}, text: shapeHead + `
groups:
- { name: edge, listener: { address: 127.0.0.1:1 }, routes: [free, chat] }
pools:
- { name: a, endpoints: $A }
routes:
- { name: free, match: { prefix: /free/ }, dialect: openai, strategy: dynamic, affinity: none, split: [ { pool: a, weight: 1 } ] }
- { name: chat, match: { prefix: / }, dialect: openai, strategy: dynamic, split: [ { pool: a, weight: 1 } ] }
`})
	send := func(path, body string, headers ...string) string {
		t.Helper()
		r := s.postJSON(path, body, headers...)
		if r.status != http.StatusOK {
			t.Fatalf("%d: %s", r.status, r.body)
		}
		return r.body
	}
	const sessions = 12
	header := func(i int) string {
		return send(chatPath, `{}`, "x-session-affinity", fmt.Sprint("conversation ", i))
	}
	home := map[int]string{}
	used := map[string]int{}
	for i := range sessions {
		s.waitEmpty(t)
		home[i] = header(i)
		used[home[i]]++
	}
	if len(used) < 2 {
		t.Fatalf("%d sessions have homes %v", sessions, used)
	}
	check := func(what string, movedFrom string) {
		t.Helper()
		for i := range sessions {
			// Each request is out of the count before the next, so that the load
			// bound has nothing to say.
			s.waitEmpty(t)
			got := header(i)
			if (got != home[i]) != (home[i] == movedFrom) {
				t.Errorf("%s: session %d, at home on %s, went to %s", what, i, home[i], got)
			}
			s.waitEmpty(t)
			body := send(chatPath, fmt.Sprintf(`{"prompt_cache_key": "conversation %d"}`, i))
			if body != got {
				t.Errorf("%s: session %d went to %s by header and %s by body", what, i, got, body)
			}
		}
	}
	check("nothing changed", "")

	out := home[0]
	s.compile(t, func(key fleet.EndpointKey) float64 {
		for i, u := range servers {
			if fmt.Sprintf("%q", fmt.Sprint(i)) == out && key.Address == u.Addr() {
				return 0
			}
		}
		return 1
	})
	check("one server out", out)
	s.compile(t, nil)
	check("back again", "")

	for name, request := range map[string]func() string{
		"no session":            func() string { return send(chatPath, `{}`) },
		"route without":         func() string { return send("/free"+chatPath, `{}`, "x-session-affinity", "conversation 0") },
		"another each time":     func() string { return send(chatPath, fmt.Sprintf(`{"prompt_cache_key": "%d"}`, len(s.events))) },
		"path doesn't generate": func() string { return send("/v1/models", `{}`, "x-session-affinity", "conversation 0") },
	} {
		seen := map[string]bool{}
		for range 40 {
			seen[request()] = true
		}
		if len(seen) < 3 {
			t.Errorf("%s: 40 requests reached only %v", name, seen)
		}
	}
}
