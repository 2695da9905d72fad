package integration

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// authority signs certificates for a test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.write("ca.crt", "CERTIFICATE", der)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// issue signs a certificate and writes it with its key as name.crt and name.key.
func (a *authority) issue(name string, usage x509.ExtKeyUsage, uris ...string) tls.Certificate {
	a.t.Helper()
	key := newKey(a.t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{usage},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	for _, uri := range uris {
		u, err := url.Parse(uri)
		if err != nil {
			a.t.Fatal(err)
		}
		template.URIs = append(template.URIs, u)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".crt", "CERTIFICATE", der)
	a.write(name+".key", "PRIVATE KEY", pkcs8)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) write(name, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(filepath.Join(a.dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// transport speaks TLS to servers of the authority, with the given certificates.
func (a *authority) transport(certificates ...tls.Certificate) *http.Transport {
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return &http.Transport{
		DisableCompression: true, ForceAttemptHTTP2: true,
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certificates},
	}
}

// signer signs tokens with RS256.
type signer struct {
	t   *testing.T
	key *rsa.PrivateKey
}

func newSigner(t *testing.T) signer {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return signer{t, key}
}

func (s signer) keys() []byte {
	exponent := big.NewInt(int64(s.key.E)).Bytes()
	out, err := json.Marshal(map[string]any{"keys": []any{map[string]any{
		"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "k1",
		"n": base64.RawURLEncoding.EncodeToString(s.key.N.Bytes()), "e": base64.RawURLEncoding.EncodeToString(exponent),
	}}})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

func (s signer) token(claims map[string]any) string {
	s.t.Helper()
	return s.signed("RS256", claims, func(text string) []byte {
		digest := sha256.Sum256([]byte(text))
		signature, err := rsa.SignPKCS1v15(rand.Reader, s.key, crypto.SHA256, digest[:])
		if err != nil {
			s.t.Fatal(err)
		}
		return signature
	})
}

// unsigned is a token that says it needs no signature.
func (s signer) unsigned(claims map[string]any) string {
	s.t.Helper()
	return s.signed("none", claims, func(string) []byte { return nil })
}

// confused is a token whose secret is the issuer's public key in a form that
// everybody has.
func (s signer) confused(secret []byte, claims map[string]any) string {
	s.t.Helper()
	return s.signed("HS256", claims, func(text string) []byte {
		mac := hmac.New(sha256.New, secret)
		mac.Write([]byte(text))
		return mac.Sum(nil)
	})
}

// public is the public key as PEM.
func (s signer) public() []byte {
	s.t.Helper()
	der, err := x509.MarshalPKIXPublicKey(&s.key.PublicKey)
	if err != nil {
		s.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func (s signer) signed(alg string, claims map[string]any, sign func(text string) []byte) string {
	s.t.Helper()
	part := func(v any) string {
		out, err := json.Marshal(v)
		if err != nil {
			s.t.Fatal(err)
		}
		return base64.RawURLEncoding.EncodeToString(out)
	}
	text := part(map[string]any{"alg": alg, "typ": "JWT", "kid": "k1"}) + "." + part(claims)
	return text + "." + base64.RawURLEncoding.EncodeToString(sign(text))
}

// Who a caller is comes from what Envoy has verified: the certificate of the
// connection and the claims of a signed token, on the routes that ask for one.
func TestFactVerifiedIdentitiesReachExtProc(t *testing.T) {
	ca, issuer, forger := newAuthority(t), newSigner(t), newSigner(t)
	ca.issue("server", x509.ExtKeyUsageServerAuth)
	known := ca.issue("team-a", x509.ExtKeyUsageClientAuth, "spiffe://example/team-a")
	if err := os.WriteFile(filepath.Join(ca.dir, "jwks.json"), issuer.keys(), 0o600); err != nil {
		t.Fatal(err)
	}
	up := envoytest.NewUpstream(t, nil)
	text := strings.ReplaceAll(shapeHead+`
groups:
- name: edge
  listener:
    address: 127.0.0.1:1
    tls: { certificate: DIR/server.crt, key: DIR/server.key, clientCA: DIR/ca.crt }
    jwt: { issuer: "https://issuer.example", audiences: [models], jwks: DIR/jwks.json }
  routes: [messages, token, plain]
pools:
- { name: a, endpoints: $A }
routes:
- { name: token, match: { prefix: /v1/, model: m }, dialect: openai, pool: a }
- { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a }
- { name: plain, match: { prefix: /v1/ }, dialect: openai, pool: a, unread: refuse }
limits:
- { name: claims, key: jwt, claim: sub, routes: [token, messages], requests: 60/min }
- { name: certificates, key: mtls, routes: [plain], requests: 60/min }
`, "DIR", ca.dir)
	e, p, _ := startDecided(t, shape{text: text, pools: map[string][]*envoytest.Upstream{"A": ups(up)}},
		always(func() *extprocv3.ProcessingResponse { return reply(nil) }))
	e.scheme = "https"
	for _, h2 := range []bool{false, true} {
		tr := ca.transport(known)
		if !h2 {
			tr.Protocols = new(http.Protocols)
			tr.Protocols.SetHTTP1(true)
		}
		t.Cleanup(tr.CloseIdleConnections)
		e.client = &http.Client{Transport: tr, Timeout: time.Minute}
		good := map[string]any{"iss": "https://issuer.example", "aud": "models", "sub": "alice", "exp": time.Now().Add(time.Hour).Unix()}
		with := func(key string, value any) map[string]any {
			out := map[string]any{key: value}
			for k, v := range good {
				if k != key {
					out[k] = v
				}
			}
			return out
		}

		bearer := "Bearer " + issuer.token(good)
		a := e.postJSON("/v1/chat/completions", `{"model":"m"}`, "authorization", bearer, "x-forwarded-client-cert", "URI=spiffe://example/boss")
		if a.status != 200 {
			t.Fatalf("h2 %v: %d %s", h2, a.status, a.body)
		}
		attributes := p.last().GetAttributes()[wire.AttributesKey].GetFields()
		if got := attributes[wire.AttributeURISAN].GetStringValue(); got != "spiffe://example/team-a" {
			t.Errorf("h2 %v: URI SAN %q", h2, got)
		}
		if got := attributes[wire.AttributeSubject].GetStringValue(); got != "CN=team-a" {
			t.Errorf("h2 %v: subject %q", h2, got)
		}
		claims := p.last().GetMetadataContext().GetFilterMetadata()[wire.NamespaceJWT].GetFields()[wire.KeyClaims].GetStructValue()
		if got := claims.GetFields()["sub"].GetStringValue(); got != "alice" {
			t.Errorf("h2 %v: claims %v", h2, claims)
		}
		if got := up.Last().Header; got.Get("authorization") != bearer || got.Get("x-forwarded-client-cert") != "" {
			t.Errorf("h2 %v: the server got authorization %q, certificate details %q", h2, got.Get("authorization"), got.Get("x-forwarded-client-cert"))
		}

		before := len(p.requests())
		for name, header := range map[string]string{
			"none":           "",
			"not a token":    "Bearer sk-1234",
			"forged":         "Bearer " + forger.token(good),
			"expired":        "Bearer " + issuer.token(with("exp", time.Now().Add(-time.Hour).Unix())),
			"other issuer":   "Bearer " + issuer.token(with("iss", "https://other.example")),
			"other audience": "Bearer " + issuer.token(with("aud", "billing")),
			"unsigned":       "Bearer " + issuer.unsigned(good),
			"public secret":  "Bearer " + issuer.confused(issuer.public(), good),
			"modulus secret": "Bearer " + issuer.confused(issuer.key.N.Bytes(), good),
		} {
			for path, dialect := range map[string]fleet.Dialect{"/v1/chat/completions": fleet.DialectOpenAI, "/v1/messages": fleet.DialectAnthropic, "/v1/embeddings": fleet.DialectOpenAI} {
				var headers []string
				if header != "" {
					headers = []string{"authorization", header}
				}
				a := e.postJSON(path+"?access_token="+issuer.token(good), `{"model":"m"}`, headers...)
				expectError(t, a, 401, dialect, "token")
				if !strings.Contains(a.body, "authentication_error") {
					t.Errorf("%s %s: %s", name, path, a.body)
				}
			}
		}
		if n := len(p.requests()) - before; n != 0 {
			t.Errorf("ext_proc was asked about %d requests without a valid token", n)
		}
		if a := e.postJSON("/v1/chat/completions", `{"model":"other"}`); a.status != 200 {
			t.Errorf("a route that needs no token: %d %s", a.status, a.body)
		}
	}

	stranger := newAuthority(t).issue("stranger", x509.ExtKeyUsageClientAuth, "spiffe://example/team-a")
	for name, certificates := range map[string][]tls.Certificate{"none": nil, "a stranger's": {stranger}} {
		tr := ca.transport(certificates...)
		e.client = &http.Client{Transport: tr, Timeout: time.Minute}
		if a, err := e.try("GET", "/v1/models", nil); err == nil {
			t.Errorf("certificate %s: %d %s", name, a.status, a.body)
		}
		tr.CloseIdleConnections()
	}
}
