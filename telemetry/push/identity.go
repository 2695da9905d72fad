package push

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// identity is who a client has proved to be; nil where no proof is required.
type identity struct {
	names []string // DNS names of its certificate
	until time.Time
}

// identify returns what the client's verified certificate says.
func (s *Server) identify(ctx context.Context) (*identity, error) {
	if !s.o.RequireIdentity {
		return nil, nil
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, errors.New("no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 || len(info.State.PeerCertificates) == 0 {
		return nil, fmt.Errorf("client %s has shown no certificate that was verified", p.Addr)
	}
	leaf := info.State.PeerCertificates[0]
	return &identity{leaf.DNSNames, leaf.NotAfter}, nil
}

// speaksFor compares byte by byte: no wildcards, no folding of case, so that a
// certificate speaks for exactly the nodes it lists.
func (id *identity) speaksFor(node string) error {
	if id == nil || slices.Contains(id.names, node) {
		return nil
	}
	return fmt.Errorf("the client's certificate does not name node %q; DNS names in it: %q", node, id.names[:min(len(id.names), maxRefusals)])
}

// valid holds a stream, which may live for months, to its certificate's end.
func (id *identity) valid(now time.Time) error {
	if id != nil && now.After(id.until) {
		return errors.New("the client's certificate has expired")
	}
	return nil
}

// addressOf is where a stream comes from, for people.
func addressOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return p.Addr.String()
	}
	return "unknown"
}
