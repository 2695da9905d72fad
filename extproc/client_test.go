package extproc

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// askedBy is the client that admission is asked about.
func askedBy(t *testing.T, dialect fleet.Dialect, change func(*message)) admission.Client {
	t.Helper()
	w, g := gated(t, func(in *plan.Inputs, _ *Options) { in.Routes[0].Dialect = dialect })
	m := chat(map[string]string{})
	m.source = "192.0.2.7:40000"
	change(&m)
	w.ask(t, m)
	return g.last().Client
}

func shows(key, value string) func(*message) {
	return func(m *message) { m.headers[key] = value }
}

// TestTheUsualSpellingCounts: a caller is no new client by spelling its
// credential anew, and the ids of a config mean the usual spelling.
func TestTheUsualSpellingCounts(t *testing.T) {
	long := "Bearer eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4iLCJzY29wZSI6Im1vZGVscyJ9.0123456789abcdef0123456789abcdef"
	for _, row := range []struct{ sent, counts string }{
		{"Bearer K", "Bearer K"}, {"bearer K", "Bearer K"}, {"BEARER  K", "Bearer K"}, {"bEaReR \t K", "Bearer K"}, {"Bearer\tK", "Bearer K"},
		{"  Bearer K  ", "Bearer K"}, {"Bearer k", "Bearer k"}, {"basic YTpi", "Basic YTpi"}, {"Basic YTpi", "Basic YTpi"},
		{"bearer " + long[len("Bearer "):], long}, {long, long},
		{"DIGEST username=a, uri=b", "Digest username=a, uri=b"}, {"AWS4-HMAC-SHA256 Credential=a, Signature=b", "Aws4-hmac-sha256 Credential=a, Signature=b"},
		{"sk-Plain", "Bearer sk-Plain"}, {" sk-Plain ", "Bearer sk-Plain"}, {"SK-PLAIN", "Bearer SK-PLAIN"}, {"Bearer sk-Plain", "Bearer sk-Plain"},
	} {
		sum := sha256.Sum256([]byte(row.counts))
		want := admission.ClientOfID(fleet.ClientKeyAuthorization, "sha256:"+hex.EncodeToString(sum[:]))
		if got := askedBy(t, fleet.DialectOpenAI, shows("authorization", row.sent)); got != want {
			t.Errorf("%q is another client than %q", row.sent, row.counts)
		}
	}
}

// TestTheUsualSpellingIsOne: what is spelt as usual stays, and however a scheme
// is spelt and spaced comes to the same. Headers are left as they came.
func TestTheUsualSpellingIsOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scheme := rapid.StringMatching(`bearer|basic|[A-Za-z][A-Za-z0-9-]{0,8}`).Draw(t, "scheme")
		key := rapid.StringMatching(`[!-~]([ -~\t]{0,90}[!-~])?`).Draw(t, "key")
		sent := []byte(randomCase(t, scheme) + rapid.StringMatching(`[ \t]{1,4}`).Draw(t, "blanks") + key)
		before := string(sent)
		want := strings.ToUpper(scheme[:1]) + strings.ToLower(scheme[1:]) + " " + key
		if strings.ContainsAny(key, ", \t") && (strings.EqualFold(scheme, "bearer") || strings.EqualFold(scheme, "basic")) {
			want = ""
		}
		once := canonical(sent, nil)
		if string(once) != want {
			t.Fatalf("%q: %q; want %q", before, once, want)
		}
		if again := canonical(once, nil); string(again) != want {
			t.Fatalf("%q: then %q", once, again)
		}
		if string(sent) != before {
			t.Fatalf("the header was changed to %q", sent)
		}
	})
}

func randomCase(t *rapid.T, s string) string {
	out := []byte(s)
	for i := range out {
		if rapid.Bool().Draw(t, "upper") {
			out[i] = strings.ToUpper(s[i : i+1])[0]
		} else {
			out[i] = strings.ToLower(s[i : i+1])[0]
		}
	}
	return string(out)
}

// TestWhatMayBeTwoCredentialsIsNone: Envoy joins several authorization headers
// with a comma, and nobody knows which of them a server will believe.
func TestWhatMayBeTwoCredentialsIsNone(t *testing.T) {
	address := admission.ClientOf(fleet.ClientKeyAddress, []byte("192.0.2.7"))
	for _, sent := range []string{
		"Bearer a,Bearer b", "bearer a, x", "BASIC YTpi,Bearer b", "Bearer a,", "a,Bearer b", "a,b", ",Bearer b", "Bearer a b", "Bearer a \t b", "bearer  a b", "Bearer Bearer a", "basic YTpi x", "Bearer a\u00a0b", "Bearer a\xa0", "Bearer a\x85b", "bearer a\x7f",
		"Bearer", "bearer ", "BASIC", " ", "",
	} {
		if got := askedBy(t, fleet.DialectOpenAI, shows("authorization", sent)); got != address {
			t.Errorf("%q doesn't count by the address", sent)
		}
	}
	for _, values := range [][]string{{"Bearer a", "Bearer b"}, {"Bearer a", "Bearer"}, {"Bearer", "bearer a"}} {
		got := askedBy(t, fleet.DialectOpenAI, func(m *message) {
			m.headers["x-api-key"] = "k"
			twice(m, "authorization", values...)
		})
		if got != address {
			t.Errorf("%q doesn't count by the address", values)
		}
	}
}

// TestOneCredentialIsOneClient in whichever header it comes. Where two different ones are
// shown none counts, since servers may read either; but a bearer's does that servers of the
// OpenAI API read.
func TestOneCredentialIsOneClient(t *testing.T) {
	by := func(value string) admission.Client {
		return admission.ClientOf(fleet.ClientKeyAuthorization, []byte(value))
	}
	address := admission.ClientOf(fleet.ClientKeyAddress, []byte("192.0.2.7"))
	both := func(authorization, apiKey string) func(*message) {
		return func(m *message) { m.headers["authorization"], m.headers["x-api-key"] = authorization, apiKey }
	}
	for _, shown := range []func(*message){
		both("Bearer a", "k"), both("bearer  a", " k"), both("Bearer a", "k,l"), both("Bearer a", "Bearer"),
		func(m *message) { m.headers["authorization"] = "Bearer a"; twice(m, "x-api-key", "k", "l") },
	} {
		m := message{headers: map[string]string{}}
		shown(&m)
		if got := askedBy(t, fleet.DialectOpenAI, shown); got != by("Bearer a") {
			t.Errorf("%q: another client than the bearer", m.headers)
		}
		if got := askedBy(t, fleet.DialectAnthropic, shown); got != address {
			t.Errorf("%q: another client than the address", m.headers)
		}
	}
	for _, row := range []struct {
		shown func(*message)
		want  admission.Client
	}{
		{both("a", "k"), address},
		{both("X 17", "k"), address},
		{both("Basic YTpi", "k"), address},
		{both("Bearer a,Bearer b", "k"), address},
		{both("Bearer k", "k"), by("Bearer k")},
		{both("bearer  k", "k"), by("Bearer k")},
		{both("bearer  k", " BEARER k"), by("Bearer k")},
		{both("k", "k"), by("Bearer k")},
		{both("Bearer", "k"), by("Bearer k")},
		{both("Bearer", "Bearer"), address},
		{shows("authorization", "bearer a"), by("Bearer a")},
		{both("Bearer a", ""), by("Bearer a")},
		{both("Bearer a", " "), by("Bearer a")},
		{both("Basic YTpi", "Basic YTpi"), by("Basic YTpi")},
		{shows("x-api-key", " k "), by("Bearer k")},
		{shows("x-api-key", "bearer k"), by("Bearer k")},
		{shows("x-api-key", "k,l"), address},
		{func(m *message) { twice(m, "x-api-key", "k", "l") }, address},
		{func(m *message) { m.headers["authorization"] = "k"; twice(m, "x-api-key", "k", "l") }, address},
	} {
		for _, dialect := range []fleet.Dialect{fleet.DialectOpenAI, fleet.DialectAnthropic} {
			if got := askedBy(t, dialect, row.shown); got != row.want {
				m := message{headers: map[string]string{}}
				row.shown(&m)
				t.Errorf("%s: %q: another client", dialect, m.headers)
			}
		}
	}
}
