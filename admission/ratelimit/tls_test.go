package ratelimit

import (
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
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// certificate is self-signed for 127.0.0.1, with its PEM.
func certificate(t *testing.T) (tls.Certificate, []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "redis"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private},
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// terminate passes TLS connections on to a Unix socket and returns its address:
// the fetched redis-server is built without TLS.
func terminate(t *testing.T, c tls.Certificate, socket string) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{c}})
	if err != nil {
		t.Fatal(err)
	}
	pass(t, l, socket, func() {})
	return l.Addr().String()
}

// pass hands a listener's connections on to a Unix socket, and calls wait before
// each piece of an answer, until the test ends.
func pass(t *testing.T, l net.Listener, socket string, wait func()) {
	var running sync.WaitGroup
	running.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", socket)
			if err != nil {
				in.Close()
				continue
			}
			running.Go(func() { relay(out, in, func() {}) })
			running.Go(func() { relay(in, out, wait) })
		}
	})
	t.Cleanup(func() { l.Close(); running.Wait() })
}

// relay copies until either end closes, and then closes both.
func relay(to, from net.Conn, wait func()) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		wait()
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

func TestTLSIsVerifiedByTheAuthority(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{Password: "sesame"})
	mine, _ := certificate(t)
	_, others := certificate(t)
	address := terminate(t, mine, s.Socket)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	write := func(content []byte) {
		if err := os.WriteFile(ca, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(others)
	t.Setenv("FAIRLEAD_TEST_REDIS_PASSWORD", "sesame")
	m := replicas(t, fleet.Redis{Address: address, TLS: true, CA: ca, Password: "env:FAIRLEAD_TEST_REDIS_PASSWORD"}, 1)[0]
	eventually(t, "another's certificate is refused", func() bool { return strings.Contains(m.log.String(), "x509") })
	write([]byte("no certificate"))
	if a := m.Reserve(client("a"), requests(10, calm()), 0, time.Now()); !a.Local {
		t.Fatalf("%+v", a)
	}
	write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: mine.Certificate[0]}))
	up(t, m)
	expect(t, m.Reserve(client("a"), requests(10, calm()), 0, time.Now()), admission.ReasonAdmitted, 8)
}
