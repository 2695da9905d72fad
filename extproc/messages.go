package extproc

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// emptyAnswer[k] answers a message of kind k with "go on": the matching member
// of the ProcessingResponse (its number is one less), empty.
var emptyAnswer = [...][]byte{
	kindResponseHeaders:  {2<<3 | 2, 0},
	kindRequestBody:      {3<<3 | 2, 0},
	kindResponseBody:     {4<<3 | 2, 0},
	kindRequestTrailers:  {5<<3 | 2, 0},
	kindResponseTrailers: {6<<3 | 2, 0},
}

// otherMessage answers what Fairlead's configuration doesn't ask Envoy for,
// but another one might.
func otherMessage(c *call) error {
	if int(c.req.kind) >= len(emptyAnswer) || emptyAnswer[c.req.kind] == nil {
		return status.Error(codes.InvalidArgument, "message without a phase")
	}
	if c.req.observe {
		return nil
	}
	c.out.b = answers.Get(0)
	*c.out.b = append(*c.out.b, emptyAnswer[c.req.kind]...)
	return nil
}
