package load

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Options of a load. Targets is required.
type Options struct {
	// Targets are base URLs ("http://127.0.0.1:9001"); arrival i goes to target
	// i modulo their number.
	Targets []string
	// Dialect is the API to speak; default OpenAI.
	Dialect fleet.Dialect
	// Path is the request's path; default the dialect's chat path.
	Path string
	// Model is the body's model; default "llama-3.1-8b".
	Model string
	// Header is added to every request.
	Header http.Header
	// OnResult is called once for every arrival whose time came, from many
	// goroutines at once, and must not block. Nil counts nothing.
	OnResult func(Result)
	// Timeout bounds each request, from the moment it was due; default 5
	// minutes.
	Timeout time.Duration
	// MaxInFlight bounds what is in flight; an arrival above it is not sent and
	// reported as Dropped. Default 4096.
	MaxInFlight int
	// DrainLimit is how long Run waits for answers after the last arrival;
	// what is left then is cut off. 0 waits for all, bounded by Timeout.
	DrainLimit time.Duration
}

const (
	defaultModel       = "llama-3.1-8b"
	defaultTimeout     = 5 * time.Minute
	defaultMaxInFlight = 4096
)

// Result is what the caller of one request saw. All times count from the moment
// the request was due.
type Result struct {
	Arrival
	// Target is the base URL it was sent to.
	Target string
	// Status is the HTTP status, 0 when no headers came.
	Status int
	// Err says what went wrong on the way or inside the answer: no answer, a
	// broken answer, an error event inside a stream, a stream without its end.
	// A whole answer with a status that is no success has no Err.
	Err string
	// Late is how late the generator sent it; more than some milliseconds mean
	// that the machine is short of CPU.
	Late time.Duration
	// HeaderTime is when the response headers came. Servers send them long
	// before the first token.
	HeaderTime time.Duration
	// FirstToken is when the first event with content came, or 0 if none did.
	// Without streaming it is when the whole answer had come, and Whole is true.
	FirstToken time.Duration
	Whole      bool
	// Total is when the answer ended.
	Total time.Duration
	// Tokens are the output tokens by the answer's usage field, or the number of
	// events with content where it has none.
	Tokens int
	// ServedBy names the server that answered, if it said so in ServerHeader,
	// else the pool that answered.
	ServedBy string
	// Strategy is what the answer says about how it was routed, or "".
	Strategy string
	// Pool is the pool that answered, if the answer says so.
	Pool string
	// RetryAfter is what a refusal asks for, to the millisecond, or 0.
	RetryAfter time.Duration
	// RecommendedConcurrency is what a refusal recommends, or 0.
	RecommendedConcurrency int
	// Incomplete is true when an answer began with success and did not end as its
	// API says.
	Incomplete bool
	// Cut is true when the request was still running at the drain limit. Times
	// that it had not reached by then are 0; Total is how long it had run.
	Cut bool
	// Dropped is true when the request was never sent; see
	// Options.MaxInFlight.
	Dropped bool
}

// Failed reports whether the request was in vain: not answered, not with
// success, or not to the end. A refusal (429) is not a failure.
func (r *Result) Failed() bool {
	return r.Status != http.StatusTooManyRequests && (r.Err != "" || r.Status/100 != 2 || r.Incomplete)
}

// ServerHeader is the response header in which a model server may name itself.
const ServerHeader = "x-served-by-server"

var (
	errDrain   = errors.New("not answered within the drain limit")
	errTimeout = errors.New("not answered within the time limit")
)

// Run sends the arrivals, which are in order of At, and returns when all were
// answered or cut off. It returns ctx's error when ctx ended first; requests
// still running are cut off then.
func Run(ctx context.Context, arrivals []Arrival, o Options) error {
	return RunSequence(ctx, slices.Values(arrivals), o)
}

// RunSequence is Run for arrivals that need not be in memory, or have no end.
func RunSequence(ctx context.Context, arrivals iter.Seq[Arrival], o Options) error {
	g, err := newGenerator(o)
	if err != nil {
		return err
	}
	defer g.client.CloseIdleConnections()
	requests, cut := context.WithCancelCause(ctx)
	defer cut(nil)
	g.send(ctx, requests, arrivals)

	finished := make(chan struct{})
	go func() {
		g.running.Wait()
		close(finished)
	}()
	var limit <-chan time.Time
	if o.DrainLimit > 0 {
		timer := time.NewTimer(o.DrainLimit)
		defer timer.Stop()
		limit = timer.C
	}
	select {
	case <-finished:
	case <-limit:
		cut(errDrain)
		<-finished
	}
	return ctx.Err()
}

type generator struct {
	o       Options
	client  *http.Client
	model   []byte // as JSON
	start   time.Time
	slots   chan struct{} // one per request in flight
	running sync.WaitGroup
}

func newGenerator(o Options) (*generator, error) {
	if len(o.Targets) == 0 {
		return nil, errors.New("load: no target")
	}
	if o.Dialect == 0 {
		o.Dialect = fleet.DialectOpenAI
	}
	if o.Dialect != fleet.DialectOpenAI && o.Dialect != fleet.DialectAnthropic {
		return nil, fmt.Errorf("load: unknown dialect %d", o.Dialect)
	}
	if o.Path == "" {
		o.Path = "/v1/chat/completions"
		if o.Dialect == fleet.DialectAnthropic {
			o.Path = "/v1/messages"
		}
	}
	for _, target := range o.Targets {
		if _, err := http.NewRequest(http.MethodPost, target+o.Path, nil); err != nil {
			return nil, fmt.Errorf("load: target %q: %w", target, err)
		}
	}
	o.Model = cmp.Or(o.Model, defaultModel)
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	o.MaxInFlight = cmp.Or(o.MaxInFlight, defaultMaxInFlight)
	if o.OnResult == nil {
		o.OnResult = func(Result) {}
	}
	model, err := json.Marshal(o.Model)
	if err != nil {
		return nil, fmt.Errorf("load: model: %w", err)
	}
	return &generator{
		o: o, model: model, client: newClient(o.MaxInFlight), start: time.Now(),
		slots: make(chan struct{}, o.MaxInFlight),
	}, nil
}

// newClient speaks HTTP/1.1 and keeps every connection that it may need again.
func newClient(connections int) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			MaxIdleConns:        connections,
			MaxIdleConnsPerHost: connections,
			IdleConnTimeout:     90 * time.Second,
			DisableCompression:  true,
			WriteBufferSize:     16 << 10, // most bodies in one write
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// send starts every request at its time, counted from one start: delays don't
// add up. It ends with ctx.
func (g *generator) send(ctx, requests context.Context, arrivals iter.Seq[Arrival]) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for a := range arrivals {
		if wait := time.Until(g.start.Add(a.At)); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		} else if ctx.Err() != nil {
			return
		}
		r := Result{Arrival: a, Target: g.o.Targets[a.Index%len(g.o.Targets)]}
		select {
		case g.slots <- struct{}{}:
			g.running.Go(func() {
				g.one(requests, &r)
				<-g.slots
				g.o.OnResult(r)
			})
		default:
			r.Dropped, r.Err = true, fmt.Sprintf("dropped by the generator: %d requests are in flight", g.o.MaxInFlight)
			g.o.OnResult(r)
		}
	}
}
