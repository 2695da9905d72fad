package ratelimit

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// connectLimit bounds a connection with its handshakes, and the first run of the
// script on it.
const connectLimit = 500 * time.Millisecond

var errLinkClosed = errors.New("the connection was given up")

// link is a client of Redis with the connections it made, so that they can be
// cut: a frozen server would hold them, and every question on them, for long.
type link struct {
	client rueidis.Client

	stop    context.CancelFunc // ends the telling; nil: nothing is told by it
	telling sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{} // as many as the client has: at most 4 a node
}

// open connects. Secrets and the authority's file are read anew for each
// connection, so that both may be changed while serving.
func open(ctx context.Context, r *fleet.Redis) (*link, error) {
	l := &link{conns: map[net.Conn]struct{}{}}
	stop := context.AfterFunc(ctx, l.cut) // ends a dial that hangs
	defer stop()
	path, socket := strings.CutPrefix(r.Address, "unix:")
	client, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{strings.TrimPrefix(r.Address, "unix:")},
		DialCtxFn: func(ctx context.Context, address string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			if socket {
				return l.dial(ctx, r, "unix", path)
			}
			return l.dial(ctx, r, "tcp", address)
		},
		AuthCredentialsFn: func(rueidis.AuthCredentialsContext) (rueidis.AuthCredentials, error) {
			password, err := readSecret(r.Password)
			return rueidis.AuthCredentials{Username: r.Username, Password: password}, err
		},
		Dialer:            net.Dialer{Timeout: connectLimit},
		ConnWriteTimeout:  time.Second,
		SelectDB:          r.Database,
		ClientName:        "fairlead",
		ClientSetInfo:     rueidis.DisableClientSetInfo,
		ForceSingleClient: socket, // a cluster's nodes are known by host and port
		DisableCache:      true,
		DisableRetry:      true,
		AlwaysPipelining:  true, // else a question that is late breaks the connection
		// A question has some 300 bytes.
		ReadBufferEachConn:  32 << 10,
		WriteBufferEachConn: 32 << 10,
	})
	if err != nil {
		l.cut()
		if client != nil {
			client.Close()
		}
		return nil, err
	}
	l.client = client
	return l, nil
}

func (l *link) dial(ctx context.Context, r *fleet.Redis, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tracked := &trackedConn{Conn: conn, link: l}
	if !l.track(tracked) {
		conn.Close()
		return nil, errLinkClosed
	}
	if !r.TLS {
		return tracked, nil
	}
	config, err := tlsConfig(r, network, address)
	if err != nil {
		tracked.Close()
		return nil, err
	}
	secure := tls.Client(tracked, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		tracked.Close()
		return nil, err
	}
	return secure, nil
}

func tlsConfig(r *fleet.Redis, network, address string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: "localhost"}
	if network == "tcp" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		c.ServerName = host
	}
	if r.CA == "" {
		return c, nil
	}
	pem, err := os.ReadFile(r.CA)
	if err != nil {
		return nil, fmt.Errorf("read the authority of redis: %w", err)
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("the authority of redis, %s, holds no PEM certificate", r.CA)
	}
	return c, nil
}

// readSecret returns what a reference stands for, less a file's last line end.
func readSecret(s fleet.Secret) (string, error) {
	if s == "" {
		return "", nil
	}
	kind, name, _ := strings.Cut(string(s), ":")
	switch kind {
	case "env":
		value, ok := os.LookupEnv(name)
		if !ok {
			return "", fmt.Errorf("the password of redis: the variable %s is not set", name)
		}
		return value, nil
	case "file":
		value, err := os.ReadFile(name)
		if err != nil {
			return "", fmt.Errorf("the password of redis: %w", err)
		}
		return strings.TrimRight(string(value), "\r\n"), nil
	}
	// Not quoted: it may be the secret itself.
	return "", errors.New("the password of redis is no reference; accepted: env:NAME or file:/path")
}

func (l *link) track(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.conns[c] = struct{}{}
	return true
}

// cut closes the connections, which answers every question on them with an
// error, and allows no others.
func (l *link) cut() {
	l.mu.Lock()
	conns := l.conns
	l.conns, l.closed = nil, true
	l.mu.Unlock()
	for c := range conns {
		_ = c.(*trackedConn).Conn.Close() // there is nobody left to tell
	}
}

func (l *link) close() {
	if l.stop != nil {
		l.stop()
	}
	l.cut()
	l.client.Close()
	l.telling.Wait()
}

type trackedConn struct {
	net.Conn
	link *link
}

func (c *trackedConn) Close() error {
	c.link.mu.Lock()
	delete(c.link.conns, c)
	c.link.mu.Unlock()
	return c.Conn.Close()
}
