package push

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// ClientTLS names PEM files; they are read anew for every connection.
type ClientTLS struct {
	CA          string // authority of the server's certificate
	Certificate string // chain that carries the node's name as a DNS name
	Key         string
	// ServerName is the name that the server's certificate must carry; "" means
	// the IP address of the target.
	ServerName string
}

func (t *ClientTLS) load() (*tls.Config, error) {
	pair, pool, err := loadPEM(t.Certificate, t.Key, t.CA)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{pair},
		RootCAs:      pool,
		ServerName:   t.ServerName,
	}, nil
}

func loadPEM(certificate, key, ca string) (tls.Certificate, *x509.CertPool, error) {
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		return pair, nil, fmt.Errorf("load certificate %q with key %q: %w", certificate, key, err)
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		return pair, nil, fmt.Errorf("load CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return pair, nil, fmt.Errorf("load CA %q: no certificate in it, want PEM", ca)
	}
	return pair, pool, nil
}

// ServerCredentials are [NewCredentials] that log to [slog.Default].
func ServerCredentials(t fleet.ServerTLS) (credentials.TransportCredentials, error) {
	c, err := NewCredentials(t, nil)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// NewCredentials returns credentials for mutual TLS 1.3: a client must show
// a certificate that t.ClientCA signed. The three files are looked at in every
// handshake and by [Credentials.ReloadError], and read when one of them changed.
// If they can't be used then, the last good ones stay in use; that is logged
// once per change. A nil log is slog.Default.
func NewCredentials(t fleet.ServerTLS, log *slog.Logger) (*Credentials, error) {
	if log == nil {
		log = slog.Default()
	}
	r := &reloader{files: t, log: log}
	r.stamps = r.stat()
	if r.config, r.err = r.load(); r.err != nil {
		return nil, r.err
	}
	config := &tls.Config{
		MinVersion:         tls.VersionTLS13,
		ClientAuth:         tls.RequireAndVerifyClientCert,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return r.current(), nil },
	}
	return &Credentials{credentials.NewTLS(config), r}, nil
}

// Credentials are a gRPC server's, from files that may change.
type Credentials struct {
	credentials.TransportCredentials
	reloader *reloader
}

// ReloadError looks at the files and returns why they are not in use as they are
// now, or nil.
func (c *Credentials) ReloadError() error {
	c.reloader.current()
	return c.reloader.lastError()
}

// Clone returns credentials that follow the same files.
func (c *Credentials) Clone() credentials.TransportCredentials {
	return &Credentials{c.TransportCredentials.Clone(), c.reloader}
}

// ServerHandshake is the wrapped one's. A handshake that fails never reaches the
// service, so it is counted and told of here.
func (c *Credentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		c.reloader.handshakeFailed(raw.RemoteAddr(), err)
	}
	return conn, info, err
}

// HandshakesFailed counts clients without a certificate that is accepted, and
// connections that spoke no TLS.
func (c *Credentials) HandshakesFailed() uint64 { return c.reloader.failed.Load() }

// handshakeFailed counts, and logs at most one in warnEvery: anybody who can
// connect can make these.
func (r *reloader) handshakeFailed(from net.Addr, err error) {
	n := r.failed.Add(1)
	now := time.Now()
	r.mu.Lock()
	due := r.warned.IsZero() || now.Sub(r.warned) >= warnEvery
	if due {
		r.warned = now
	}
	r.mu.Unlock()
	if due {
		r.log.Warn("a client of serve.push was refused in its TLS handshake", "from", from.String(), "error", err, "failed_so_far", n)
	}
}

// reloader keeps the newest usable content of the files.
type reloader struct {
	files fleet.ServerTLS
	log   *slog.Logger

	mu     sync.Mutex
	stamps [3]stamp // of the files when they were last read
	config *tls.Config
	err    error
	warned time.Time // of a failed handshake

	failed atomic.Uint64
}

// stamp tells a file's content from another's without reading it.
type stamp struct {
	modified time.Time
	size     int64
	missing  bool
	inode    os.FileInfo
}

func (s stamp) equal(o stamp) bool {
	if s.missing || o.missing {
		return s.missing == o.missing
	}
	return s.modified.Equal(o.modified) && s.size == o.size && os.SameFile(s.inode, o.inode)
}

func (r *reloader) stat() (stamps [3]stamp) {
	for i, name := range []string{r.files.Certificate, r.files.Key, r.files.ClientCA} {
		info, err := os.Stat(name)
		if err != nil {
			stamps[i].missing = true
			continue
		}
		stamps[i] = stamp{info.ModTime(), info.Size(), false, info}
	}
	return stamps
}

// current returns the configuration for a handshake that begins now, or the last
// good one if the files can't be used. The stamps
// are taken before the files are read: a file that changes in between is read
// again next time.
func (r *reloader) current() *tls.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	stamps := r.stat()
	if stamps[0].equal(r.stamps[0]) && stamps[1].equal(r.stamps[1]) && stamps[2].equal(r.stamps[2]) {
		return r.config
	}
	r.stamps = stamps
	config, err := r.load()
	if r.err = err; err != nil {
		r.log.Error("new TLS files can't be used, the ones before stay", "error", err)
		return r.config
	}
	r.config = config
	r.log.Info("TLS files were read anew", "certificate", r.files.Certificate)
	return config
}

func (r *reloader) load() (*tls.Config, error) {
	pair, pool, err := loadPEM(r.files.Certificate, r.files.Key, r.files.ClientCA)
	if err != nil {
		return nil, err
	}
	if pair.Leaf != nil && time.Now().After(pair.Leaf.NotAfter) {
		return nil, errors.New("certificate " + r.files.Certificate + " has expired on " + pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		NextProtos:   []string{"h2"},
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
		// A ticket would outlive the authority that its client was checked by.
		SessionTicketsDisabled: true,
	}, nil
}

func (r *reloader) lastError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}
