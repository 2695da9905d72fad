package integration

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// TestLimitsFollowWhoCallersAre: what Envoy verified, or the credential itself,
// tells callers apart, and nothing that a caller can make up to be taken for
// another.
func TestLimitsFollowWhoCallersAre(t *testing.T) {
	ca, issuer := newAuthority(t), newSigner(t)
	ca.issue("server", x509.ExtKeyUsageServerAuth)
	first := ca.issue("first", x509.ExtKeyUsageClientAuth, "spiffe://example/team-a")
	renewed := ca.issue("renewed", x509.ExtKeyUsageClientAuth, "spiffe://example/team-a")
	other := ca.issue("other", x509.ExtKeyUsageClientAuth, "spiffe://example/team-b")
	if err := os.WriteFile(filepath.Join(ca.dir, "jwks.json"), issuer.keys(), 0o600); err != nil {
		t.Fatal(err)
	}
	m := newModelServer(t)
	config := strings.ReplaceAll(`groups:
  - name: edge
    listener:
      address: LISTEN
      tls: { certificate: DIR/server.crt, key: DIR/server.key, clientCA: DIR/ca.crt }
      jwt: { issuer: "https://issuer.example", jwks: DIR/jwks.json }
    routes: [ token, cert, address, key ]
pools:
  - { name: a, endpoints: [ { address: "SERVER" } ] }
routes:
  - { name: token, match: { prefix: /token/ }, dialect: openai, pool: a }
  - { name: cert, match: { prefix: /cert/ }, dialect: openai, pool: a }
  - { name: address, match: { prefix: /address/ }, dialect: openai, pool: a }
  - { name: key, match: { prefix: /key/ }, dialect: openai, pool: a }
limits:
  - { name: by-token, key: jwt, claim: sub, routes: [ token ], requests: 2/day, clients: [ { id: carol, requests: 3/day } ] }
  - { name: by-cert, key: mtls, routes: [ cert ], requests: 2/day }
  - { name: by-address, key: address, routes: [ address ], requests: 2/day }
  - { name: by-key, routes: [ key ], requests: 2/day }
`, "DIR", ca.dir)
	config = strings.NewReplacer("SERVER", m.addr().String(), "LISTEN", envoytest.FreeAddr(t).String()).Replace(config)
	p := newPlace(t, config)
	p.serve(t)
	e, listen := p.sidecar(t)
	waitExtProc(e)

	over := func(certificate tls.Certificate) *http.Client {
		tr := ca.transport(certificate)
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr, Timeout: time.Minute}
	}
	one, two, three := over(first), over(renewed), over(other)
	token := func(sub string, id int) string {
		return "Bearer " + issuer.token(map[string]any{"iss": "https://issuer.example", "sub": sub, "jti": fmt.Sprint(id), "exp": time.Now().Add(time.Hour).Unix()})
	}
	for _, row := range []struct {
		who, route string
		with       *http.Client
		headers    []string
		left       int64 // remaining requests; −1: refused
	}{
		{"alice", "token", one, []string{"authorization", token("alice", 1)}, 1},
		{"alice, another token", "token", one, []string{"authorization", token("alice", 2)}, 0},
		{"alice, over another connection", "token", three, []string{"authorization", token("alice", 3)}, -1},
		{"bob", "token", one, []string{"authorization", token("bob", 4)}, 1},
		{"carol, who may more", "token", one, []string{"authorization", token("carol", 5)}, 2},

		{"team-a", "cert", one, []string{"authorization", "Bearer x"}, 1},
		{"team-a, renewed", "cert", two, []string{"authorization", "Bearer y"}, 0},
		{"team-a, calling itself team-b", "cert", one, []string{"x-forwarded-client-cert", "URI=spiffe://example/team-b"}, -1},
		{"team-b", "cert", three, nil, 1},

		{"an address", "address", one, []string{"authorization", "Bearer x"}, 1},
		{"the address with another key", "address", three, []string{"authorization", "Bearer y"}, 0},
		{"the address, forwarded for another", "address", one, []string{"x-forwarded-for", "203.0.113.9", "forwarded", "for=203.0.113.9", "x-real-ip", "203.0.113.9"}, -1},

		{"key x", "key", one, []string{"authorization", "Bearer x"}, 1},
		{"key x, with made-up headers", "key", three, []string{"authorization", "Bearer x", "x-client-id", "somebody", "x-fairlead-client", "somebody"}, 0},
		{"key x again", "key", two, []string{"authorization", "Bearer x", "user-agent", "another"}, -1},
		{"key y", "key", one, []string{"authorization", "Bearer y"}, 1},
		{"an API key", "key", one, []string{"x-api-key", "k"}, 1},
		{"the API key as a bearer's", "key", two, []string{"authorization", "bearer k"}, 0},
		{"no key: the address", "key", one, nil, 1},
		{"two that differ: the address", "key", three, []string{"authorization", "Token x", "x-api-key", "k"}, 0},
		{"key x beside another", "key", two, []string{"authorization", "Bearer x", "x-api-key", "decoy"}, -1},
	} {
		a, err := ask(t.Context(), row.with, "https://"+listen+"/"+row.route+chatPath, `{"max_tokens":4}`, false, row.headers...)
		if err != nil {
			t.Fatalf("%s: %v", row.who, err)
		}
		if row.left < 0 {
			if a.status != http.StatusTooManyRequests {
				t.Errorf("%s: status %d, remaining %q; want 429", row.who, a.status, a.header.Get("X-Ratelimit-Remaining"))
			} else {
				expectRefusal(t, a, fleet.DialectOpenAI)
			}
			continue
		}
		if got := whole(a.header, "X-Ratelimit-Remaining"); a.status != http.StatusOK || got != row.left {
			t.Errorf("%s: status %d, %d remaining; want 200 and %d: %.200s", row.who, a.status, got, row.left, a.body)
		}
	}
}

// TestWaitsKeepToTheCallersDeadline: a slot later than the caller waits is none.
func TestWaitsKeepToTheCallersDeadline(t *testing.T) {
	m := newModelServer(t)
	s := startServed(t, fmt.Sprintf(`groups:
  - { name: edge, listener: { address: LISTEN }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: clients, requests: 1/min }
`, m.addr()))
	early(t)
	if r := s.post(t, chatPath, `{"max_tokens":4}`); r.status != http.StatusOK {
		t.Fatalf("the minute's only request: status %d: %s", r.status, r.body)
	}
	for _, row := range []struct {
		name, value string
		again       bool
	}{
		{"x-stainless-timeout", "600", true},
		{"x-stainless-timeout", "3", false},
		{"x-stainless-read-timeout", "3", false},
		{"grpc-timeout", "3S", false},
		{"grpc-timeout", "3000m", false},
		{"x-stainless-timeout", "soon", true},
	} {
		// Another client each: slots of one follow each other.
		token := "Bearer " + row.name + row.value
		if r := s.post(t, chatPath, `{"max_tokens":4}`, "authorization", token); r.status != http.StatusOK {
			t.Fatalf("status %d", r.status)
		}
		r := s.post(t, chatPath, `{"max_tokens":4}`, "authorization", token, row.name, row.value)
		expectRefusal(t, r, fleet.DialectOpenAI)
		if again := r.header.Get("X-Should-Retry") != "false"; again != row.again {
			t.Errorf("%s %s, retry-after-ms %s: x-should-retry %q", row.name, row.value, r.header.Get("Retry-After-Ms"), r.header.Get("X-Should-Retry"))
		}
	}
}

// TestChangedLimitsCountForWhatRuns: limits follow the file, and requests in
// flight stay counted over the change.
func TestChangedLimitsCountForWhatRuns(t *testing.T) {
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(holding(release))
	listen := envoytest.FreeAddr(t)
	config := func(concurrency int) string {
		return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [ chat ] }
pools:
  - { name: a, endpoints: [ { address: %q } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
limits:
  - { name: clients, concurrency: %d }
`, listen, m.addr(), concurrency)
	}
	s := startServed(t, config(2))
	var parts sync.WaitGroup
	hold := func() {
		parts.Go(func() {
			if a, err := ask(t.Context(), s.with, "http://"+s.listen+chatPath, `{"max_tokens":4}`, false); err != nil || a.status != http.StatusOK {
				t.Errorf("status %d, %v: %s", a.status, err, a.body)
			}
		})
	}
	full := func(limit string) {
		t.Helper()
		r := s.post(t, chatPath, `{"max_tokens":4}`)
		expectRefusal(t, r, fleet.DialectOpenAI)
		expectHeader(t, r, "X-Recommended-Concurrency", limit)
	}
	hold()
	hold()
	envoytest.Eventually(t, "two inside", func() bool { return m.inside.Load() == 2 })
	full("2")
	reloads := func() float64 { return metric(s.metricsPage(t), "fairlead_config_reloads_total") }
	before := reloads()
	s.write(t, "", config(3))
	envoytest.Eventually(t, "the change taken", func() bool { return reloads() == before+1 })
	hold()
	envoytest.Eventually(t, "three inside", func() bool { return m.inside.Load() == 3 })
	full("3")
	before = reloads()
	s.write(t, "", config(1))
	envoytest.Eventually(t, "the change taken", func() bool { return reloads() == before+1 })
	full("1")
	close(release)
	parts.Wait()
	envoytest.Eventually(t, "room again", func() bool { return s.post(t, chatPath, `{"max_tokens":4}`).status == http.StatusOK })
}
