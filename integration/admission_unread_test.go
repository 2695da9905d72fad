package integration

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestUnreadBodiesAreRefusedWhereTheRouteSaysSo: a body that Envoy does not read
// is no way around a limit, and a header beside it neither.
func TestUnreadBodiesAreRefusedWhereTheRouteSaysSo(t *testing.T) {
	up := envoytest.NewUpstream(t, nil)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: / }, dialect: openai, pool: a, maxOutput: 100, unread: refuse }
`, up.Addr()))
	const small, large = `{"max_tokens":16,"messages":[]}`, `{"max_tokens":3000,"messages":[]}`
	for _, row := range []struct {
		name, body string
		chunked    bool
		headers    []string
		status     int
		says       string
	}{
		{"read", small, false, nil, http.StatusOK, ""},
		{"read, too much", large, false, nil, http.StatusBadRequest, "100"},
		{"chunked", large, true, nil, http.StatusBadRequest, "body_not_read"},
		{"chunked, with a header", large, true, []string{"max_tokens", "1"}, http.StatusBadRequest, "body_not_read"},
		{"no JSON by its type", large, false, []string{"content-type", "text/plain"}, http.StatusBadRequest, "body_not_read"},
		{"broken", `{"max_tokens":`, false, nil, http.StatusBadRequest, "body_not_read"},
		// JSON that servers may well take, and that Envoy can't hold.
		{"2^63", `{"max_tokens":9223372036854775808}`, false, nil, http.StatusBadRequest, "body_not_read"},
		{"2^64−1", `{"max_tokens":18446744073709551615}`, false, nil, http.StatusBadRequest, "body_not_read"},
		{"1e400", `{"max_tokens":1e400}`, false, nil, http.StatusBadRequest, "body_not_read"},
		{"9,001 digits", `{"max_tokens":` + strings.Repeat("9", 9001) + `}`, false, nil, http.StatusBadRequest, "body_not_read"},
		{"2^63 beside what is small", `{"max_tokens":16,"seed":9223372036854775808}`, false, nil, http.StatusBadRequest, "body_not_read"},
		{"2^63 in what is nested, with a header", `{"max_tokens":16,"x":[{"y":9223372036854775808}]}`, false, []string{"max_tokens", "16"}, http.StatusBadRequest, "body_not_read"},
		{"2^63−1, too much", `{"max_tokens":9223372036854775807}`, false, nil, http.StatusBadRequest, "100"},
		{"1e308, too much", `{"max_tokens":1e308}`, false, nil, http.StatusBadRequest, "100"},
		// Text that Envoy would drop for its length, and servers in Python read.
		{"blanks and too much", `{"max_tokens":"` + strings.Repeat(" ", 9000) + `3000"}`, false, nil, http.StatusBadRequest, "100"},
		{"blanks and too much beside what is small", `{"max_tokens":16,"max_completion_tokens":"` + strings.Repeat(" ", 9000) + `3000"}`, false, nil, http.StatusBadRequest, "100"},
		{"blanks and little", `{"max_tokens":"` + strings.Repeat(" ", 9000) + `16"}`, false, nil, http.StatusOK, ""},
		{"null, and long", `{"max_tokens":null,"messages":["` + strings.Repeat("x", 9000) + `"]}`, false, nil, http.StatusOK, ""},
		{"too long", strings.Repeat(" ", 1_000_000) + large, false, nil, http.StatusBadRequest, "body_not_read"},
	} {
		up.Forget()
		var a answer
		for range 5 { // ext_proc may be late on a loaded machine: then requests pass
			var err error
			if a, err = ask(t.Context(), s.with, "http://"+s.listen+chatPath, row.body, row.chunked, row.headers...); err != nil {
				t.Fatal(err)
			}
			if a.header.Get("X-Fairlead-Decision") != "" {
				break
			}
			up.Forget()
		}
		if a.status != row.status || !strings.Contains(a.body, row.says) {
			t.Errorf("%s: %d %s; want %d with %q", row.name, a.status, a.body, row.status, row.says)
		}
		if got := up.Count() > 0; got != (row.status == http.StatusOK) {
			t.Errorf("%s: reached the server: %v", row.name, got)
		}
		if row.says == "body_not_read" && a.header.Get("X-Should-Retry") != "false" {
			t.Errorf("%s: x-should-retry %q", row.name, a.header.Get("X-Should-Retry"))
		}
	}
}
