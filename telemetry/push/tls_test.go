package push

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

func listenTCP(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// files are the PEM files of one party.
type files struct{ ca, cert, key string }

func newFiles(t testing.TB) files { return filesIn(t.TempDir()) }

func filesIn(dir string) files {
	return files{filepath.Join(dir, "ca.pem"), filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")}
}

// issue writes a certificate of a for names, and trust as the authority of the
// other side.
func (f files) issue(t testing.TB, a, trust *authority, notAfter time.Time, usage x509.ExtKeyUsage, names ...string) files {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: notAfter,
		DNSNames: names, ExtKeyUsage: []x509.ExtKeyUsage{usage}, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	if usage == x509.ExtKeyUsageServerAuth {
		template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	f.write(t, f.ca, trust.pem)
	f.write(t, f.cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	f.write(t, f.key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
	return f
}

// write replaces a file by rename, as tools that rotate certificates do.
func (f files) write(t testing.TB, name string, content []byte) {
	t.Helper()
	if err := os.WriteFile(name+".new", content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
}

func (f files) server() fleet.ServerTLS {
	return fleet.ServerTLS{Certificate: f.cert, Key: f.key, ClientCA: f.ca}
}

func (f files) client() *ClientTLS {
	return &ClientTLS{CA: f.ca, Certificate: f.cert, Key: f.key}
}

func soon() time.Time { return time.Now().Add(time.Hour) }

// secured is a server under mutual TLS whose pool has an endpoint on gpu-a, one
// on gpu-b and one on no node.
type secured struct {
	*Server
	got     *readings
	at      fleet.Address
	own, ca *authority // of the server's certificate; of the clients'
	files   files
	creds   credentials.TransportCredentials
}

func newSecured(t *testing.T) *secured {
	t.Helper()
	s := &secured{got: newReadings(), own: newAuthority(t), ca: newAuthority(t), files: newFiles(t)}
	s.files.issue(t, s.own, s.ca, soon(), x509.ExtKeyUsageServerAuth)
	s.Server = NewServer(ServerOptions{Deliver: s.got.deliver, Log: quietLog, RequireIdentity: true})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "gpu-a"), endpoint("10.0.0.2:8000", "gpu-b"), endpoint("10.0.0.3:8000", ""))})
	creds, err := ServerCredentials(s.files.server())
	if err != nil {
		t.Fatal(err)
	}
	s.creds = creds
	l := listenTCP(t)
	s.at = fleet.Address{Host: l.Addr().String()}
	servingOn(t, s.Server, l, grpc.Creds(creds))
	return s
}

// agent returns files of a client that the server trusts.
func (s *secured) agent(t *testing.T, names ...string) files {
	return newFiles(t).issue(t, s.ca, s.own, soon(), x509.ExtKeyUsageClientAuth, names...)
}

func everyEndpoint() Frame {
	return Frame{Endpoints: []Update{update("10.0.0.1:8000", 1), update("10.0.0.2:8000", 2), update("10.0.0.3:8000", 3)}}
}

func TestAgentSpeaksForItsOwnNodeOnly(t *testing.T) {
	s := newSecured(t)
	c, _ := running(t, ClientOptions{Target: s.at, Node: "gpu-a", TLS: s.agent(t, "other", "gpu-a").client()})
	c.Send(everyEndpoint())
	eventually(t, "answer", func() bool { return c.Stats().Answered == 1 })
	all, _ := s.got.snapshot()
	if len(all) != 1 || all[0].Sample.Running != 1 {
		t.Errorf("delivered %v", all)
	}
	refused := c.Stats().Refused
	if len(refused) != 2 || !strings.Contains(refused[0].Reason, `another node than "gpu-a"`) || !strings.Contains(refused[1].Reason, errNoNode.Error()) {
		t.Errorf("refused %v", refused)
	}
}

func TestStrangersDeliverNothing(t *testing.T) {
	s := newSecured(t)
	stranger := newAuthority(t)
	issue := func(a, trust *authority, until time.Time, usage x509.ExtKeyUsage, names ...string) *ClientTLS {
		return newFiles(t).issue(t, a, trust, until, usage, names...).client()
	}
	const client = x509.ExtKeyUsageClientAuth
	for name, x := range map[string]struct {
		tls  *ClientTLS
		node string
		want string
	}{
		"wrong CA":                    {issue(stranger, s.own, soon(), client, "gpu-a"), "gpu-a", ""},
		"expired":                     {issue(s.ca, s.own, time.Now().Add(-time.Minute), client, "gpu-a"), "gpu-a", ""},
		"server's certificate":        {issue(s.ca, s.own, soon(), x509.ExtKeyUsageServerAuth, "gpu-a"), "gpu-a", ""},
		"another node's certificate":  {issue(s.ca, s.own, soon(), client, "gpu-b"), "gpu-a", `does not name node "gpu-a"`},
		"no name":                     {issue(s.ca, s.own, soon(), client), "gpu-a", `does not name node "gpu-a"`},
		"wildcard":                    {issue(s.ca, s.own, soon(), client, "*"), "gpu-a", `does not name node "gpu-a"`},
		"other case":                  {issue(s.ca, s.own, soon(), client, "GPU-A"), "gpu-a", `does not name node "gpu-a"`},
		"name with NUL":               {issue(s.ca, s.own, soon(), client, "gpu-a\x00.evil"), "gpu-a", ""},
		"plaintext":                   {nil, "gpu-a", ""},
		"client distrusts the server": {issue(s.ca, stranger, soon(), client, "gpu-a"), "gpu-a", "certificate"},
		"server has another name":     {func() *ClientTLS { c := s.agent(t, "gpu-a").client(); c.ServerName = "serve.example"; return c }(), "gpu-a", "certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			c, stop := running(t, ClientOptions{Target: s.at, Node: x.node, TLS: x.tls})
			c.Send(everyEndpoint())
			eventually(t, "a failure", func() bool { return c.Stats().Failures > 0 })
			stop()
			st := c.Stats()
			if st.Connects != 0 || !strings.Contains(st.LastError, x.want) {
				t.Errorf("stats %+v, want %q", st, x.want)
			}
		})
	}
	t.Run("no certificate", func(t *testing.T) {
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(s.own.pem)
		conn, err := grpc.NewClient("passthrough:///"+s.at.Host, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: pool})))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		stream, err := pushv1.NewTelemetryClient(conn).Push(ctx)
		if err == nil {
			_ = stream.Send(&pushv1.Frame{Node: "gpu-a", Sequence: 1, Endpoints: []*pushv1.Endpoint{row("10.0.0.1:8000", 1)}})
			_, err = stream.Recv()
		}
		if err == nil || ctx.Err() != nil {
			t.Errorf("got %v", err)
		}
	})
	t.Run("TLS 1.2", func(t *testing.T) {
		config, err := s.agent(t, "gpu-a").client().load()
		if err != nil {
			t.Fatal(err)
		}
		config.MinVersion, config.MaxVersion, config.ServerName = tls.VersionTLS12, tls.VersionTLS12, "127.0.0.1"
		if conn, err := tls.Dial("tcp", s.at.Host, config); err == nil {
			conn.Close()
			t.Error("accepted")
		}
	})
	if all, _ := s.got.snapshot(); len(all) != 0 {
		t.Errorf("delivered %v", all)
	}
	if n := s.Nodes(); len(n) != 0 {
		t.Errorf("nodes %+v", n)
	}
}

// TestIdentityIsRequiredBelowTheTransportToo covers a server that was wired to
// a plaintext listener by mistake.
func TestIdentityIsRequiredBelowTheTransportToo(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog, RequireIdentity: true})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "gpu-a"))})
	at := socket(t)
	serving(t, s, at)
	c, _ := running(t, ClientOptions{Target: at, Node: "gpu-a"})
	c.Send(everyEndpoint())
	eventually(t, "a failure", func() bool { return strings.Contains(c.Stats().LastError, "no certificate") })
	if all, _ := got.snapshot(); len(all) != 0 || s.Counters().StreamsRefused == 0 {
		t.Errorf("delivered %v, counters %+v", all, s.Counters())
	}
}

func TestStreamEndsWithItsCertificate(t *testing.T) {
	now := time.Now()
	r := &receiver{
		server:   NewServer(ServerOptions{Deliver: func(telemetry.Reading) { t.Error("delivered") }, Log: quietLog, Now: func() time.Time { return now }}),
		identity: &identity{names: []string{"gpu-a"}, until: now.Add(-1)},
	}
	r.server.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "gpu-a"))})
	if _, err := r.take(&pushv1.Frame{Node: "gpu-a", Sequence: 1, Endpoints: []*pushv1.Endpoint{row("10.0.0.1:8000", 1)}}); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("got %v", err)
	}
}

func TestCertificatesAreRotatedWithoutCuttingStreams(t *testing.T) {
	s := newSecured(t)
	old, _ := running(t, ClientOptions{Target: s.at, Node: "gpu-a", TLS: s.agent(t, "gpu-a").client()})
	frame := func(running float64) Frame { return Frame{Endpoints: []Update{update("10.0.0.1:8000", running)}} }
	old.Send(frame(1))
	s.got.await(t, "before", atLeast(1))
	eventually(t, "answer", func() bool { return old.Stats().Answered == 1 })

	// Both authorities and the server's certificate change.
	own, ca := newAuthority(t), newAuthority(t)
	s.files.issue(t, own, ca, soon(), x509.ExtKeyUsageServerAuth)
	after := newFiles(t).issue(t, ca, own, soon(), x509.ExtKeyUsageClientAuth, "gpu-b")
	for i := range 2 {
		b, stop := running(t, ClientOptions{Target: s.at, Node: "gpu-b", TLS: after.client()})
		b.Send(Frame{Endpoints: []Update{update("10.0.0.2:8000", 2)}})
		s.got.await(t, "with the new certificates", atLeast(2+i))
		stop()
	}
	old.Send(frame(3))
	s.got.await(t, "on the old stream", atLeast(4))
	if st := old.Stats(); st.Connects != 1 || st.Failures != 0 {
		t.Errorf("the old stream was cut: %+v", st)
	}
	// The old authority opens no new stream.
	late, stop := running(t, ClientOptions{Target: s.at, Node: "gpu-a", TLS: newFiles(t).issue(t, s.ca, own, soon(), x509.ExtKeyUsageClientAuth, "gpu-a").client()})
	late.Send(frame(4))
	eventually(t, "refusal", func() bool { return late.Stats().Failures > 0 })
	stop()
	if late.Stats().Connects != 0 {
		t.Error("the old authority is still trusted")
	}
}

// TestSessionsAreNotResumed: a resumed session would skip the check of the
// client's certificate.
func TestSessionsAreNotResumed(t *testing.T) {
	s := newSecured(t)
	config, err := s.agent(t, "gpu-a").client().load()
	if err != nil {
		t.Fatal(err)
	}
	config.ServerName, config.NextProtos, config.ClientSessionCache = "127.0.0.1", []string{"h2"}, tls.NewLRUClientSessionCache(4)
	for range 2 {
		conn, err := tls.Dial("tcp", s.at.Host, config)
		if err != nil {
			t.Fatal(err)
		}
		// Tickets come before the server's first bytes.
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if conn.ConnectionState().DidResume {
			t.Error("resumed")
		}
		conn.Close()
	}
}

func TestBadNewFilesKeepTheOldOnes(t *testing.T) {
	s := newSecured(t)
	reload := s.creds.(interface{ ReloadError() error }).ReloadError
	agent := s.agent(t, "gpu-a")
	good, err := os.ReadFile(s.files.cert)
	if err != nil {
		t.Fatal(err)
	}
	other := newFiles(t).issue(t, s.own, s.ca, soon(), x509.ExtKeyUsageServerAuth)
	otherCert, err := os.ReadFile(other.cert)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range []struct {
		name    string
		spoil   func()
		restore func()
	}{
		{"half written", func() { s.files.write(t, s.files.cert, good[:100]) }, func() { s.files.write(t, s.files.cert, good) }},
		{"another key's", func() { s.files.write(t, s.files.cert, otherCert) }, func() { s.files.write(t, s.files.cert, good) }},
		{"missing", func() { _ = os.Remove(s.files.ca) }, func() { s.files.write(t, s.files.ca, s.ca.pem) }},
		{"empty CA", func() { s.files.write(t, s.files.ca, nil) }, func() { s.files.write(t, s.files.ca, s.ca.pem) }},
	} {
		send := func(n int) {
			t.Helper()
			c, stop := running(t, ClientOptions{Target: s.at, Node: "gpu-a", TLS: agent.client()})
			defer stop()
			c.Send(Frame{Endpoints: []Update{update("10.0.0.1:8000", 1)}})
			s.got.await(t, x.name, atLeast(n))
		}
		x.spoil()
		send(2*i + 1)
		if err := reload(); err == nil {
			t.Errorf("%s: not reported", x.name)
		}
		x.restore()
		send(2*i + 2)
		if err := reload(); err != nil {
			t.Errorf("%s: still reported: %v", x.name, err)
		}
	}
}

func TestServerCredentialsNameTheFileAtFault(t *testing.T) {
	ca := newAuthority(t)
	f := newFiles(t).issue(t, ca, ca, soon(), x509.ExtKeyUsageServerAuth)
	expired := newFiles(t).issue(t, ca, ca, time.Now().Add(-time.Minute), x509.ExtKeyUsageServerAuth)
	for _, x := range []struct {
		t    fleet.ServerTLS
		want string
	}{
		{fleet.ServerTLS{Certificate: f.cert + "x", Key: f.key, ClientCA: f.ca}, f.cert + "x"},
		{fleet.ServerTLS{Certificate: f.cert, Key: f.key, ClientCA: f.ca + "x"}, f.ca + "x"},
		{fleet.ServerTLS{Certificate: f.cert, Key: f.key, ClientCA: f.key}, "no certificate in it"},
		{expired.server(), "has expired"},
	} {
		if _, err := ServerCredentials(x.t); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("got %v, want %q", err, x.want)
		}
	}
}

// A rotation that went wrong must show before the first agent connects anew.
func TestBadNewFilesAreNoticedAndLoggedWithoutAHandshake(t *testing.T) {
	ca := newAuthority(t)
	f := newFiles(t).issue(t, ca, ca, soon(), x509.ExtKeyUsageServerAuth)
	var log countingHandler
	c, err := NewCredentials(f.server(), log.logger())
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(f.key)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ReloadError(); err != nil || log.n != 0 {
		t.Fatalf("unchanged files: %v, %d lines", err, log.n)
	}
	f.write(t, f.key, key[:20])
	for range 3 {
		if err := c.Clone().(*Credentials).ReloadError(); err == nil || log.n != 1 {
			t.Errorf("half a key: %v, %d lines", err, log.n)
		}
	}
	f.write(t, f.key, key)
	if err := c.ReloadError(); err != nil || log.n != 2 {
		t.Errorf("good again: %v, %d lines", err, log.n)
	}
}
