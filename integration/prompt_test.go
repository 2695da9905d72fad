package integration

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestLongPromptsGoWhereTheirKVCacheFits: Envoy tells ext_proc the body's length,
// and a plan that knows of KV caches follows it. A body in chunks has no length.
func TestLongPromptsGoWhereTheirKVCacheFits(t *testing.T) {
	a, b := envoytest.NewUpstream(t, named("a")), envoytest.NewUpstream(t, named("b"))
	s := startSteered(t, steerShape(a, b, 256))
	s.kvFree = map[fleet.EndpointKey]fleet.Tokens{
		{Pool: "a", Address: a.Addr()}: 3_000, {Pool: "a", Address: b.Addr()}: 30_000,
	}
	s.compile(t, nil)
	for _, row := range []struct {
		name    string
		size    int
		chunked bool
		over    *factEnvoy
		servers []string     // that get it
		prompt  fleet.Tokens // about, since JSON counts too
	}{
		{"short", 4_000, false, s.factEnvoy, []string{"a", "b"}, 1_000},
		{"long", 40_000, false, s.factEnvoy, []string{"b"}, 10_000},
		{"long, over HTTP/2", 40_000, false, overHTTP2(t, s.factEnvoy), []string{"b"}, 10_000},
		{"longer than what Envoy reads of bodies; fits nowhere", 1_200_000, false, s.factEnvoy, []string{"b"}, 300_000},
		{"in chunks: unknown", 40_000, true, s.factEnvoy, []string{"a", "b"}, 0},
	} {
		seen := map[string]bool{}
		for range 20 {
			var body io.Reader = strings.NewReader(`{"max_tokens": 100, "prompt": "` + strings.Repeat("x", row.size) + `"}`)
			if row.chunked {
				body = io.NopCloser(body)
			}
			r := row.over.send(http.MethodPost, chatPath, body, "content-type", "application/json")
			if r.status != http.StatusOK {
				t.Fatalf("%s: %d %s", row.name, r.status, r.body)
			}
			seen[strings.Trim(r.body, `"`)] = true
			if got := s.lastEvent().Prompt; got < row.prompt || got > row.prompt+20 {
				t.Fatalf("%s: %d tokens; want about %d", row.name, got, row.prompt)
			}
		}
		// What fits nowhere goes to the roomiest of six draws: hardly ever to a.
		if fits := row.prompt < 30_000; fits && len(seen) != len(row.servers) || !seen[row.servers[0]] {
			t.Errorf("%s: went to %v", row.name, seen)
		}
	}
}
