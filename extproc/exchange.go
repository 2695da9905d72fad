package extproc

import (
	"context"
	"io"
)

// Exchange answers one message as the first of a stream of its own, by the same
// path but without a transport, and appends the answer to b. A request that is
// steered takes its places as any other; there is nobody to give them back but
// the ledger's leases. It is for benchmarks and tools.
func (s *Service) Exchange(b, message []byte) ([]byte, error) {
	e := exchange{in: message, out: b}
	_, err := s.requestPhase(&e)
	return e.out, err
}

// exchange is a stream of one message.
type exchange struct {
	in, out []byte
	read    bool
}

func (e *exchange) Context() context.Context { return context.Background() }

func (e *exchange) RecvMsg(m any) error {
	if e.read {
		return io.EOF
	}
	e.read = true
	in := m.(*rawIn)
	in.b = append(in.b[:0], e.in...)
	return nil
}

func (e *exchange) SendMsg(m any) error {
	out := m.(*rawOut)
	e.out = append(e.out, *out.b...)
	answers.Put(out.b)
	return nil
}
