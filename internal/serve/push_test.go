package serve

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// Every reading waits for the scoring's lock, and copying what 4,096 agents said
// takes long.
func TestAgentsAreAskedWithoutTheScoringsLockAndOncePerBucket(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	s.scoring.agents = func() map[string]admin.Agent {
		asked++
		if !s.scoring.mu.TryLock() {
			t.Error("asked under the lock")
		} else {
			s.scoring.mu.Unlock()
		}
		return map[string]admin.Agent{"127.0.0.1": {Connected: true}}
	}
	now := time.Now().Add(bucket)
	shown := 0
	for range 8 {
		if _, view := s.scoring.step(now); view != nil {
			shown++
			if len(view.Nodes) != 1 || view.Nodes[0].Agent == nil || !view.Nodes[0].Agent.Connected {
				t.Errorf("nodes: %+v", view.Nodes)
			}
		}
		now = now.Add(tickEvery)
	}
	if shown != 2 || asked != shown {
		t.Errorf("asked %d times for %d buckets, want 2", asked, shown)
	}
}

// authority signs certificates for a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, dir string) *authority {
	t.Helper()
	a := &authority{}
	a.cert, a.key = a.sign(t, dir, "ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// sign writes NAME.crt and NAME.key; an authority without a key signs itself.
func (a *authority) sign(t *testing.T, dir, name string, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, by := a.cert, a.key
	if by == nil {
		parent, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{name + ".crt": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// node signs for an agent, under the names given.
func (a *authority) node(t *testing.T, dir, file string, names ...string) *push.ClientTLS {
	t.Helper()
	a.sign(t, dir, file, &x509.Certificate{DNSNames: names, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	at := func(name string) string { return filepath.Join(dir, name) }
	return &push.ClientTLS{CA: at("ca.crt"), Certificate: at(file + ".crt"), Key: at(file + ".key"), ServerName: "fairlead"}
}

// secured is a config whose two endpoints are pushed over TLS, by one node each.
func secured(t *testing.T) (*fleet.Config, *authority, string) {
	t.Helper()
	cfg, dir := testConfig(t), t.TempDir()
	ca := newAuthority(t, dir)
	ca.sign(t, dir, "push", &x509.Certificate{DNSNames: []string{"fairlead"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	cfg.Serve.Push = fleet.Push{Address: fleet.Address{Host: "127.0.0.1:0"}, TLS: &fleet.ServerTLS{
		Certificate: filepath.Join(dir, "push.crt"), Key: filepath.Join(dir, "push.key"), ClientCA: filepath.Join(dir, "ca.crt")}}
	gpu := &cfg.Pools[0]
	gpu.Telemetry.Source = fleet.TelemetryPush
	gpu.Endpoints = gpu.Endpoints[:2]
	gpu.Endpoints[0].Node, gpu.Endpoints[1].Node = "gpu-a", "gpu-b"
	return cfg, ca, dir
}

// runServer runs a server until the test ends.
func runServer(t *testing.T, cfg *fleet.Config) *Server {
	t.Helper()
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return s
}

// agent pushes a number for every endpoint of the pool, five times a second,
// until the test ends.
func agent(t *testing.T, s *Server, node string, tls *push.ClientTLS, running float64) *push.Client {
	t.Helper()
	c, err := push.NewClient(push.ClientOptions{Target: fleet.Address{Host: s.PushAddr()}, Node: node, TLS: tls, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() { _ = c.Run(ctx) })
	endpoints := s.config.Load().Pools[0].Endpoints
	parts.Go(func() {
		ticker := time.NewTicker(bucket)
		defer ticker.Stop()
		for {
			frame := push.Frame{}
			for _, e := range endpoints {
				frame.Endpoints = append(frame.Endpoints, push.Update{Endpoint: e.Address,
					Sample: telemetry.Sample{At: time.Now(), Known: telemetry.HasKVUsage | telemetry.HasRunning, Running: running}})
			}
			c.Send(frame)
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
	t.Cleanup(func() { stop(); parts.Wait() })
	return c
}

// eventually polls what has no event to wait for.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in 30 s", what)
		}
	}
}

// Whoever can push unasked can eject GPUs: over TLS serve takes a node's word for
// its own endpoints alone.
func TestServeTakesFramesOnlyFromTheNodeThatTheCertificateNames(t *testing.T) {
	cfg, ca, dir := secured(t)
	s := runServer(t, cfg)
	row := func(i int) admin.Endpoint { return s.Fleet().Pools[0].Endpoints[i] }

	t.Run("another node's certificate", func(t *testing.T) {
		c := agent(t, s, "gpu-a", ca.node(t, dir, "other", "gpu-b"), 66)
		eventually(t, "the refusal", func() bool {
			return strings.Contains(c.Stats().LastError, `does not name node "gpu-a"`) || c.Stats().Connects > 0
		})
		if st := c.Stats(); st.Connects > 0 {
			t.Errorf("gpu-b spoke as gpu-a: %+v", st)
		}
	})
	t.Run("no certificate", func(t *testing.T) {
		pool := x509.NewCertPool()
		pool.AddCert(ca.cert)
		conn, err := tls.Dial("tcp", s.PushAddr(), &tls.Config{RootCAs: pool, ServerName: "fairlead", NextProtos: []string{"h2"}})
		if err != nil {
			return // refused in the handshake
		}
		defer conn.Close()
		// In TLS 1.3 the server's refusal comes with its first bytes.
		if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "certificate required") {
			t.Errorf("got %v, want a demand for a certificate", err)
		}
	})
	t.Run("plaintext", func(t *testing.T) {
		c := agent(t, s, "gpu-a", nil, 77)
		eventually(t, "the failure", func() bool { return c.Stats().Failures > 0 || c.Stats().Connects > 0 })
		if st := c.Stats(); st.Connects > 0 {
			t.Errorf("taken without TLS: %+v", st)
		}
	})
	// These handshakes reach no service; they are counted all the same.
	eventually(t, "the failed handshakes to be counted", func() bool { _, failed := s.pushed(); return failed >= 2 })
	if row(0).Known || row(1).Known {
		t.Errorf("somebody's numbers were taken: %+v, %+v", row(0), row(1))
	}
	t.Run("its own certificate", func(t *testing.T) {
		c := agent(t, s, "gpu-a", ca.node(t, dir, "gpu-a", "gpu-a"), 7)
		eventually(t, "gpu-a's number", func() bool { return row(0).Known && row(0).Running == 7 })
		eventually(t, "the refusal of gpu-b's endpoint", func() bool { return len(c.Stats().Refused) == 1 })
		if r := c.Stats().Refused[0]; r.Endpoint != row(1).Address || !strings.Contains(r.Reason, "another node") {
			t.Errorf("refused %+v", r)
		}
		if row(1).Known {
			t.Errorf("gpu-a spoke for gpu-b: %+v", row(1))
		}
		eventually(t, "gpu-a's agent in the view", func() bool {
			n := s.Fleet().Nodes[0]
			return n.Name == "gpu-a" && n.Agent != nil && n.Agent.Connected && n.Agent.Refused == 1 && strings.Contains(n.Agent.Error, "not taken")
		})
	})
}

func TestGaugeTellsOfTLSFilesThatCannotBeUsed(t *testing.T) {
	cfg, _, dir := secured(t)
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	gauge := func() string {
		w := httptest.NewRecorder()
		s.metrics.handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		_, rest, _ := strings.Cut(w.Body.String(), "\nfairlead_push_tls_refused ")
		value, _, _ := strings.Cut(rest, "\n")
		return value
	}
	key := filepath.Join(dir, "push.key")
	good, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		content []byte
		want    string
	}{{good, "0"}, {good[:20], "1"}, {good, "0"}} {
		if err := os.WriteFile(key, x.content, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := gauge(); got != x.want {
			t.Errorf("%d of %d bytes of the key: gauge %q, want %s", len(x.content), len(good), got, x.want)
		}
	}
}

func TestFramesOfUnknownNodesAreOnThePage(t *testing.T) {
	cfg, ca, dir := secured(t)
	s := runServer(t, cfg)
	agent(t, s, "gpu-z", ca.node(t, dir, "gpu-z", "gpu-z"), 1)
	eventually(t, "the counter", func() bool {
		w := httptest.NewRecorder()
		s.metrics.handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		_, rest, found := strings.Cut(w.Body.String(), `fairlead_push_events_total{kind="unknown_node_frames"} `)
		return found && !strings.HasPrefix(rest, "0")
	})
}
