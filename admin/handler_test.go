package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func newTestServer(t *testing.T) (*httptest.Server, *[]string) {
	t.Helper()
	var changes []string
	handler := Handler(Options{
		Listen:  "127.0.0.1:9900",
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "m 1\n") }),
		Ready:   func() error { return errors.New("no plan yet") },
		Proxies: func() []Proxy {
			return []Proxy{{Node: "n1", Types: []ProxyType{{Type: "RDS", State: "NACKED", Reason: "because"}}}}
		},
		Fleet:   func() Fleet { return Fleet{Plan: "abc"} },
		Clients: func() []Caller { return []Caller{{Pool: "a", Client: "sha256:00", InFlight: 3}} },
		Splits:  func() []Split { return []Split{{Route: "chat"}} },
		SetSplit: func(route string, weights map[string]uint32) error {
			if route != "chat" {
				return fmt.Errorf("%w route %q", ErrUnknown, route)
			}
			if len(weights) == 0 {
				return errors.New("no weights")
			}
			changes = append(changes, fmt.Sprint(route, weights))
			return nil
		},
		ClearSplit: func(route string) error { changes = append(changes, "clear "+route); return nil },
	})
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server, &changes
}

func TestClientReadsAndChanges(t *testing.T) {
	server, changes := newTestServer(t)
	c := NewClient(strings.TrimPrefix(server.URL, "http://"))
	ctx := context.Background()
	if f, err := c.Fleet(ctx); err != nil || f.Plan != "abc" {
		t.Errorf("fleet: %+v, %v", f, err)
	}
	if p, err := c.Proxies(ctx); err != nil || len(p) != 1 || p[0].Types[0].Reason != "because" {
		t.Errorf("proxies: %+v, %v", p, err)
	}
	if all, err := c.Clients(ctx); err != nil || len(all) != 1 || all[0].InFlight != 3 || all[0].Client != "sha256:00" {
		t.Errorf("clients: %+v, %v", all, err)
	}
	if s, err := c.SetSplit(ctx, "chat", map[string]uint32{"a": 1}); err != nil || len(s) != 1 {
		t.Errorf("set: %+v, %v", s, err)
	}
	if _, err := c.ClearSplit(ctx, "chat"); err != nil {
		t.Errorf("clear: %v", err)
	}
	if _, err := c.SetSplit(ctx, "nope", map[string]uint32{"a": 1}); err == nil || !strings.Contains(err.Error(), `unknown route "nope"`) {
		t.Errorf("unknown route: %v", err)
	}
	if got := fmt.Sprint(*changes); got != "[chatmap[a:1] clear chat]" {
		t.Errorf("changes: %s", got)
	}
}

func TestClientSaysWhenNobodyAnswers(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	address := strings.TrimPrefix(server.URL, "http://")
	server.Close()
	if _, err := NewClient(address).Fleet(context.Background()); err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("error does not name %s: %v", address, err)
	}
}

// TestClientSaysWhoseAnswersItDoesNotKnow: another server's, by its whole address.
func TestClientSaysWhoseAnswersItDoesNotKnow(t *testing.T) {
	for name, answers := range map[string]http.HandlerFunc{
		"not found": http.NotFound,
		"problem": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"error":{"code":"not_found"}}`, http.StatusNotFound)
		},
		"page": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") },
	} {
		server := httptest.NewServer(answers)
		_, err := NewClient(strings.TrimPrefix(server.URL, "http://")).Clients(context.Background())
		server.Close()
		if err == nil || !strings.Contains(err.Error(), server.URL+"/api/v1/clients answered ") || !strings.Contains(err.Error(), "serve.admin") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRefusals walks every way in that must be closed.
func TestRefusals(t *testing.T) {
	server, changes := newTestServer(t)
	for _, c := range []struct {
		name, method, path, host, contentType, body string
		want                                        int
	}{
		{"rebound name", "GET", "/api/v1/fleet", "evil.example:9900", "", "", http.StatusForbidden},
		{"rebound name on metrics", "GET", "/metrics", "evil.example", "", "", http.StatusForbidden},
		{"form from another origin", "PUT", "/api/v1/splits/chat", "", "text/plain", `{"weights":{"a":1}}`, http.StatusBadRequest},
		{"no content type", "PUT", "/api/v1/splits/chat", "", "", `{"weights":{"a":1}}`, http.StatusBadRequest},
		{"unknown field", "PUT", "/api/v1/splits/chat", "", "application/json", `{"wieghts":{"a":1}}`, http.StatusBadRequest},
		{"negative weight", "PUT", "/api/v1/splits/chat", "", "application/json", `{"weights":{"a":-1}}`, http.StatusBadRequest},
		{"change by GET", "GET", "/api/v1/splits/chat", "", "application/json", "", http.StatusMethodNotAllowed},
		{"profiling", "GET", "/debug/pprof/", "", "", "", http.StatusNotFound},
		{"not ready", "GET", "/readyz", "", "", "", http.StatusServiceUnavailable},
		{"alive", "GET", "/healthz", "localhost:1", "", "", http.StatusOK},
		{"metrics", "GET", "/metrics", "[::1]:9900", "", "", http.StatusOK},
	} {
		request, err := http.NewRequest(c.method, server.URL+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if c.host != "" {
			request.Host = c.host
		}
		if c.contentType != "" {
			request.Header.Set("Content-Type", c.contentType)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != c.want {
			t.Errorf("%s: status %d, want %d", c.name, response.StatusCode, c.want)
		}
	}
	if len(*changes) != 0 {
		t.Errorf("something was changed: %v", *changes)
	}
}
