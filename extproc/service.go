package extproc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// ServiceName is the gRPC service that Envoy calls; also the name under which
// gRPC health reports it, beside the empty one.
const ServiceName = "envoy.service.ext_proc.v3.ExternalProcessor"

// maxMessages bounds a stream. Envoy sends one to six messages in the modes
// that Fairlead configures.
const maxMessages = 16

// Ledger counts attempts in flight, from the moment they are decided.
type Ledger interface {
	// Reserve counts the attempt of a decision on an endpoint, or returns false
	// and counts nothing when the endpoint has limit attempts in flight already, or
	// when it has no memory left to count one. Limit 0 is no limit, and never
	// refused; a negative one is always reached. expected is how long
	// the request may take, for as long as no log tells.
	Reserve(id string, pick fleet.EndpointKey, limit int32, expected time.Duration, at time.Time) bool
	// Cancel undoes a reservation that nothing came of.
	Cancel(id string)
}

// Options configures a Service. Plan and IDs are required.
type Options struct {
	// Plan returns the plan in force, or nil before the first: then requests
	// are left to Envoy. It is called once per request, and again while one is held.
	Plan func() *plan.Plan
	// Live tells what is in flight; nil means nothing is.
	Live plan.Live
	// Ledger may be nil; then nothing is reserved.
	Ledger Ledger
	// Admission may be nil; then everything enters that the plan lets pass, and
	// those whom it refuses are told to wait a second.
	Admission Admission
	// Held, if not nil, lets requests that find no place be held for a moment before
	// they are refused.
	Held *Held
	IDs  *IDs
	// Trusted reports whether the x-request-id of a caller ("ip:port") is kept;
	// nil trusts nobody.
	Trusted func(source string) bool
	// Observe gets one event per request. It must be cheap and must not block.
	Observe func(Event)
	// ObserveAnswer gets one for each answer whose retry fields were looked at;
	// like Observe.
	ObserveAnswer func(Answer)
	Log           *slog.Logger
	// Now is the clock of events and of the ledger; default time.Now.
	Now func() time.Time
}

// Event is one request, for metrics. All strings come from bounded sets.
type Event struct {
	Route    string // "" when the plan doesn't know it
	Pool     string // pool of the first attempt, "" when unknown
	Strategy fleet.Strategy
	// UnknownStrategy: the client asked for a strategy that doesn't exist.
	UnknownStrategy bool
	// Reason is the plan's alone: where admission refused, how the request was to be
	// steered; see Why. Action is ActionRefuse where the plan or admission refused.
	Reason plan.Reason
	Action plan.Action
	// Admission says why a generating request entered or was refused; 0 where
	// admission was not asked. Of a request that is larger than its model allows,
	// or whose body nobody could read, only Reason tells.
	Admission admission.Reason
	// Limit is the name of the client's limit, "" if none counts; LimitLocal is
	// true while a replica counts its own part of it.
	Limit      string
	LimitLocal bool
	// Hinted: admitted, and told how many requests to have in flight.
	Hinted bool
	Class  fleet.RequestClass
	// Held: it found no place at first and waited for one.
	Held bool
	// Tries is how many decisions it took until a place could be reserved.
	Tries        int
	Moved        bool
	Generates    bool
	Level        fleet.BurstLevel
	Budget       fleet.Tokens
	BudgetSource BudgetSource
	// Answers ≥ 1 is how many answers are asked for, each of that budget.
	Answers  fleet.Tokens
	Sampling Sampling
	// Prompt is the estimated length of the prompt; 0 if unknown.
	Prompt fleet.Tokens
	// Slot is the counter of the endpoint that the plan picked; only where
	// Steered.
	Slot    uint32
	Steered bool
	// Took is the time from the message's arrival to the finished answer, without
	// that for which it was held.
	Took time.Duration
	// Failed: the message could not be read; only Took is set beside it.
	Failed bool
}

// Why is the name of the reason for what was decided: admission's where that refused,
// else the plan's. Metrics, logs and the answer itself have the same.
func (e *Event) Why() string { return why(e.Reason, e.Admission) }

// Service answers ext_proc streams. Its methods may be called from several
// goroutines.
type Service struct {
	o         Options
	busy      busy
	unapplied *unapplied
	health
}

// New returns a Service that reports itself as serving. It starts nothing; see
// Run for the watchdog.
func New(o Options) *Service {
	if o.Live == nil {
		o.Live = nothingLive{}
	}
	if o.Trusted == nil {
		o.Trusted = func(string) bool { return false }
	}
	if o.Observe == nil {
		o.Observe = func(Event) {}
	}
	if o.ObserveAnswer == nil {
		o.ObserveAnswer = func(Answer) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Service{o: o, unapplied: newUnapplied()}
	s.health.init()
	return s
}

type nothingLive struct{}

func (nothingLive) InFlight(uint32) int32 { return 0 }

// Register adds the service and its gRPC health to a server made with
// ServerOptions.
func (s *Service) Register(g *grpc.Server) {
	g.RegisterService(&grpc.ServiceDesc{
		ServiceName: ServiceName,
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName:    "Process",
			Handler:       func(_ any, stream grpc.ServerStream) error { return s.process(stream) },
			ServerStreams: true,
			ClientStreams: true,
		}},
		Metadata: "envoy/service/ext_proc/v3/external_processor.proto",
	}, s)
	s.health.register(g)
}

// call is the state of one phase of a stream: of one HTTP request.
type call struct {
	in      rawIn
	out     rawOut
	req     request
	verdict verdict
	ask     admission.Ask
	id      [32]byte
	// scratch has room for the values of all headers of a standing.
	scratch [384]byte
	// stream is the call's own; left is true when it ended while the request was held.
	stream stream
	left   bool
	// keptOut is true when each pool of the chain keeps the client out for its server's own
	// word: a moment changes nothing.
	keptOut bool
	// answered is true once the phase's message has its answer.
	answered bool
}

var calls = sync.Pool{New: func() any { return new(call) }}

func newCall() *call { return calls.Get().(*call) }

// keepInput is the largest input buffer that is kept for the next stream.
const keepInput = 32 << 10

func (c *call) release() {
	if cap(c.in.b) > keepInput {
		c.in.b = nil
	}
	clear(c.req.notes)
	c.req = request{notes: c.req.notes[:0]}
	c.out.b, c.verdict, c.ask, c.answered = nil, verdict{}, admission.Ask{}, false
	c.stream, c.left = nil, false
	calls.Put(c)
}

// stream is the part of grpc.ServerStream that process uses.
type stream interface {
	Context() context.Context
	RecvMsg(any) error
	SendMsg(any) error
}

var (
	errUnanswered = status.Error(codes.Aborted, "the stream ended before request headers came")
	errTooMany    = status.Error(codes.ResourceExhausted, "too many messages on one stream")
	errPanic      = status.Error(codes.Internal, "internal error")
	errLeft       = status.Error(codes.Canceled, "the caller left while its request was held")
)

// process serves one stream. It ends well only after the request headers were
// answered; on most routes nothing follows them.
func (s *Service) process(st stream) error {
	w, err := s.requestPhase(st)
	if err != nil || w == nil {
		return err
	}
	return s.responsePhase(st, w)
}

// requestPhase answers messages up to the request headers. It returns what the
// response phase needs, nil if there is none.
func (s *Service) requestPhase(st stream) (*waiting, error) {
	c := newCall()
	defer c.release()
	c.stream = st
	for range maxMessages {
		if err := st.RecvMsg(&c.in); err != nil {
			if errors.Is(err, io.EOF) {
				return nil, errUnanswered
			}
			return nil, err
		}
		if err := s.dispatch(c, nil); err != nil {
			return nil, err
		}
		if c.out.b != nil {
			if err := st.SendMsg(&c.out); err != nil {
				s.withdraw(&c.verdict)
				return nil, err
			}
			c.out.b = nil
		}
		if c.answered {
			return s.waits(c), nil
		}
	}
	return nil, errTooMany
}

// waits is what the response phase needs, nil if Envoy sends no response headers.
func (s *Service) waits(c *call) *waiting {
	v := &c.verdict
	if v.info == nil || !v.info.ComputedRetry || !v.class.Generates || v.refused() || c.req.observe {
		return nil
	}
	if s.o.Admission == nil {
		c.ask.Route, c.ask.Seed = v.info.Name, v.id.Seed()
	}
	return &waiting{ask: c.ask, concurrency: v.admit.Concurrency}
}

// dispatch turns the message in c.in into the answer in c.out, which stays
// empty when none is wanted. w is nil in the request phase.
func (s *Service) dispatch(c *call, w *waiting) (err error) {
	began := s.o.Now()
	mark := s.busy.enter(began)
	defer func() {
		s.busy.leave(mark)
		if v := recover(); v != nil {
			s.o.Log.Error("ext_proc handler panicked", "panic", v, "stack", string(debug.Stack()))
			c.out.b, err = nil, errPanic
			s.withdraw(&c.verdict)
		}
		if err != nil && !c.left {
			s.o.Observe(Event{Failed: true, Took: s.o.Now().Sub(began)})
		}
	}()
	if err := c.req.scan(c.in.b); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	switch {
	case w == nil && c.req.kind == kindRequestHeaders:
		return s.requestHeaders(c, began)
	case w != nil && c.req.kind == kindResponseHeaders:
		s.responseHeaders(c, w, began)
		return nil
	default:
		return otherMessage(c)
	}
}
