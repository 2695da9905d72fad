package sdks

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// late is how much later than told a client may come back.
const late = 50 * time.Millisecond

// waited checks that the second attempt came when the first one's answer said,
// and reports whether it was within late of that. It never excuses coming early.
func waited(t *testing.T, first, second attempt) bool {
	t.Helper()
	advised := first.advised()
	if advised <= 0 {
		t.Fatalf("status %d without %s: %v", first.status, wire.HeaderRetryAfterMs, first.header)
	}
	// The client's timer starts when it has read the answer, and that is after
	// the recorder began to write it: a client that comes early can't hide.
	took := second.came.Sub(first.answered)
	t.Logf("told %v, came back after %v", advised, took)
	if took < advised {
		t.Fatalf("came back after %v, told %v", took, advised)
	}
	return took <= advised+late
}

// inTime tries up to three times: a machine that stalls delays a client, which is
// not the client's doing. Coming early fails at once.
func inTime(t *testing.T, try func() bool) {
	t.Helper()
	for range 3 {
		if try() {
			return
		}
	}
	t.Errorf("never served within %v of the advised time", late)
}

// served reports whether who came back on time was served. On a machine that
// stalls Envoy's log comes late, and with it the time from which the server is
// asked again.
func served(t *testing.T, a attempt) bool {
	t.Helper()
	if a.status != http.StatusOK {
		t.Logf("status %d to who came back on time", a.status)
	}
	return a.status == http.StatusOK
}

// hold keeps a request of another client at the server until release.
func hold(t *testing.T, c client, p *place, apiKey string) (release func()) {
	t.Helper()
	gate := make(chan struct{})
	p.upstream.Handle(envoytest.Gate(gate, c.answer))
	done := make(chan error, 1)
	before := p.upstream.Count()
	go func() {
		// Requests that came before leave their places a moment after their answers,
		// with Envoy's log entries; until then this one is told to wait.
		for {
			status, wait, err := post(p, c, apiKey)
			if status == http.StatusTooManyRequests && wait > 0 {
				time.Sleep(wait)
				continue
			}
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("status %d", status)
			}
			done <- err
			return
		}
	}()
	p.upstream.WaitRequests(before + 1)
	return func() {
		t.Helper()
		close(gate)
		p.upstream.Handle(c.answer)
		if err := <-done; err != nil {
			t.Errorf("the held request: %v", err)
		}
	}
}

// post sends a small request past the recorder and returns what a refusal advises.
func post(p *place, c client, apiKey string) (status int, wait time.Duration, err error) {
	request, err := http.NewRequest(http.MethodPost, "http://"+p.listen.String()+c.path, strings.NewReader(`{"model":"m","max_tokens":16}`))
	if err != nil {
		return 0, 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(c.auth, apiKey)
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, 0, err
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode, attempt{header: answer.Header}.advised(), err
}

// succeedsAfterOneRefusal asks while a request is held, releases that once the
// refusal has passed, and returns both attempts.
func succeedsAfterOneRefusal(t *testing.T, c client, p *place, holder string) (first, second attempt) {
	t.Helper()
	release := hold(t, c, p, holder)
	p.forget()
	type outcome struct {
		text string
		err  error
	}
	done := make(chan outcome, 1)
	go func() {
		text, _, err := c.ask(context.Background(), p.url, 16)
		done <- outcome{text, err}
	}()
	refused := p.attempts(t, 1)[0]
	if refused.status != http.StatusTooManyRequests {
		t.Fatalf("status %d, want 429", refused.status)
	}
	release()
	if o := <-done; o.err != nil || o.text != said {
		t.Fatalf("%q, %v", o.text, o.err)
	}
	all := p.attempts(t, 2)
	return all[0], all[1]
}

func TestClientsWaitTheAdvisedTimeForAFullPool(t *testing.T) {
	// 40 tokens of 25 ms: the advice is well below a second.
	eachClient(t, "defaultMaxTokens: 40", "maxInFlight: 1", "", func(t *testing.T, c client, p *place) {
		inTime(t, func() bool {
			first, second := succeedsAfterOneRefusal(t, c, p, "Bearer somebody-else")
			checkRefusal(t, first)
			return waited(t, first, second)
		})
	})
}

func TestClientsWaitTheAdvisedTimeForTheirOwnLimit(t *testing.T) {
	limits := "limits: [{ key: authorization, concurrency: 1 }]"
	eachClient(t, "defaultMaxTokens: 40", "", limits, func(t *testing.T, c client, p *place) {
		inTime(t, func() bool {
			first, second := succeedsAfterOneRefusal(t, c, p, c.credential)
			checkRefusal(t, first)
			if got := first.header.Get(wire.HeaderRecommendedConcurrency); got != "1" {
				t.Errorf("%s: %q, want 1", wire.HeaderRecommendedConcurrency, got)
			}
			return waited(t, first, second)
		})
	})
}

// TestClientsWaitForTheNextWindow: who comes back when it is told is served, and not
// refused once more because its slot was before the window. Jitter moves a slot back by
// less than a fiftieth of a window, so that it hides little of that.
func TestClientsWaitForTheNextWindow(t *testing.T) {
	limits := "limits: [{ key: authorization, requests: 50/s }]"
	eachClient(t, "", "", limits, func(t *testing.T, c client, p *place) {
		for range 4 {
			inTime(t, func() bool {
				first, second := servedInTheNextWindow(t, c, p)
				checkRefusal(t, first)
				checkStanding(t, first.header, "50", "0")
				return waited(t, first, second)
			})
		}
	})
}

// servedInTheNextWindow asks when the limit's window has no request left, and returns
// both attempts. Nobody else takes from the next one.
func servedInTheNextWindow(t *testing.T, c client, p *place) (first, second attempt) {
	t.Helper()
	ask := func() (remaining string) {
		t.Helper()
		text, header, err := c.ask(context.Background(), p.url, 16)
		if err != nil || text != said {
			t.Fatalf("%q, %v", text, err)
		}
		return header.Get(wire.HeaderRateLimitRemaining)
	}
	for {
		for ask() != "0" {
		}
		p.forget()
		ask()
		if p.atLeast(t, 1)[0].status == http.StatusOK { // a window has ended in between
			continue
		}
		all := p.attempts(t, 2)
		if got := all[1].status; got != http.StatusOK {
			t.Fatalf("status %d to who came back when told", got)
		}
		return all[0], all[1]
	}
}

func checkRefusal(t *testing.T, a attempt) {
	t.Helper()
	seconds := (a.advised() + time.Second - 1) / time.Second
	if got := a.header.Get(wire.HeaderRetryAfter); got != fmt.Sprint(int64(seconds)) {
		t.Errorf("%s %q beside %v", wire.HeaderRetryAfter, got, a.advised())
	}
	if got := a.header.Get(wire.HeaderShouldRetry); got != "" {
		t.Errorf("%s: %q", wire.HeaderShouldRetry, got)
	}
}

// checkStanding looks at the headers of a limit on requests.
func checkStanding(t *testing.T, h http.Header, limit, remaining string) {
	t.Helper()
	if l, r := h.Get(wire.HeaderRateLimitLimit), h.Get(wire.HeaderRateLimitRemaining); l != limit || r != remaining {
		t.Errorf("limit %q, remaining %q, want %s and %s", l, r, limit, remaining)
	}
	for _, name := range []string{wire.HeaderRateLimitReset, wire.HeaderRateLimit, wire.HeaderRateLimitPolicy} {
		if h.Get(name) == "" {
			t.Errorf("no %s", name)
		}
	}
}

func TestClientsStopWhereWaitingDoesNotHelp(t *testing.T) {
	limits := "limits: [{ key: authorization, requests: 1/day }]"
	eachClient(t, "", "", limits, func(t *testing.T, c client, p *place) {
		if text, header, err := c.ask(context.Background(), p.url, 16); err != nil || text != said {
			t.Fatalf("%q, %v", text, err)
		} else {
			checkStanding(t, header, "1", "0")
		}
		p.forget()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, _, err := c.ask(ctx, p.url, 16)
		f, ok := c.failed(err)
		if !ok {
			t.Fatalf("error %v", err)
		}
		one := p.attempts(t, 1)[0]
		if got := one.header.Get(wire.HeaderShouldRetry); got != "false" {
			t.Errorf("%s: %q, want false", wire.HeaderShouldRetry, got)
		}
		if f.status != http.StatusTooManyRequests || f.kind != "rate_limit_error" || !strings.Contains(f.text, "limit of 1 request") {
			t.Errorf("the client sees %+v", f)
		}
		if f.requestID == "" || f.requestID != one.header.Get(wire.HeaderRequestID) {
			t.Errorf("request id %q, sent %q", f.requestID, one.header.Get(wire.HeaderRequestID))
		}
	})
}

// TestClientsStopWhereTheirTimeIsTooShort: they send how long they wait, and who
// would be gone before its slot comes gets none.
func TestClientsStopWhereTheirTimeIsTooShort(t *testing.T) {
	const timeout = 2 * time.Second
	// A request of up to 512 tokens, of 25 ms each, is taken to end in 13 s.
	limits := "limits: [{ key: authorization, concurrency: 1 }]"
	eachClient(t, "", "", limits, func(t *testing.T, c client, p *place) {
		release := hold(t, c, p, c.credential)
		defer release()
		p.forget()
		f, ok := c.failed(c.within(context.Background(), p.url, 400, timeout))
		if !ok || f.status != http.StatusTooManyRequests {
			t.Fatalf("the client sees %+v", f)
		}
		one := p.attempts(t, 1)[0]
		if got := one.header.Get(wire.HeaderShouldRetry); got != "false" || one.advised() <= timeout {
			t.Errorf("%s: %q beside %v; want false beside more than %v", wire.HeaderShouldRetry, got, one.advised(), timeout)
		}
		if got := one.request.Get(wire.HeaderStainlessTimeout); got != "2" {
			t.Errorf("the client sent %s: %q", wire.HeaderStainlessTimeout, got)
		}
		// The same request with more time is told to come back.
		p.forget()
		ctx, cancel := context.WithCancel(context.Background())
		gaveUp := make(chan error, 1)
		go func() { gaveUp <- c.within(ctx, p.url, 400, time.Minute) }()
		patient := p.attempts(t, 1)[0]
		cancel()
		<-gaveUp
		if got := patient.header.Get(wire.HeaderShouldRetry); patient.status != http.StatusTooManyRequests || got != "" || patient.advised() <= timeout {
			t.Errorf("status %d, %s: %q beside %v; want 429 with a slot after more than %v",
				patient.status, wire.HeaderShouldRetry, got, patient.advised(), timeout)
		}
	})
}

// TestClientsComeAgainInTheirTimeAfterALimitOfRequests: who waits for the next window just
// so is told a time within its own, and who would be gone before that begins is told not to
// come.
func TestClientsComeAgainInTheirTimeAfterALimitOfRequests(t *testing.T) {
	limits := "limits: [{ key: authorization, requests: 2/min }]"
	eachClient(t, "", "", limits, func(t *testing.T, c client, p *place) {
		const least = 5 * time.Second // to the next window, so that it doesn't begin in between
		reset := time.Duration(0)
		for reset < least { // whoever is refused before waits until it begins
			for range 2 {
				p.forget()
				text, header, err := c.ask(context.Background(), p.url, 16)
				if err != nil || text != said {
					t.Fatalf("%q, %v", text, err)
				}
				envoytest.Eventually(t, "the answer recorded", func() bool {
					all := p.atLeast(t, 1)
					return all[len(all)-1].status == http.StatusOK
				})
				seconds, err := strconv.Atoi(header.Get(wire.HeaderRateLimitReset))
				if err != nil {
					t.Fatal(err)
				}
				reset = time.Duration(seconds) * time.Second
			}
		}
		p.forget()
		f, ok := c.failed(c.within(context.Background(), p.url, 16, 2*time.Second))
		if !ok || f.status != http.StatusTooManyRequests {
			t.Fatalf("the client sees %+v", f)
		}
		if one := p.attempts(t, 1)[0]; one.header.Get(wire.HeaderShouldRetry) != "false" || one.advised() <= 2*time.Second {
			t.Errorf("told %v, %v to who waits 2 s", one.advised(), one.header)
		}
		p.forget()
		ctx, cancel := context.WithCancel(context.Background())
		gaveUp := make(chan error, 1)
		go func() { gaveUp <- c.within(ctx, p.url, 16, reset+time.Second) }()
		one := p.attempts(t, 1)[0]
		cancel()
		<-gaveUp
		checkRefusal(t, one)
		if one.status != http.StatusTooManyRequests || one.advised() > reset+time.Second {
			t.Errorf("status %d, told %v to who waits %v", one.status, one.advised(), reset+time.Second)
		}
	})
}

func TestClientsDoNotRepeatOversizedRequests(t *testing.T) {
	eachClient(t, "maxOutput: 100", "", "", func(t *testing.T, c client, p *place) {
		_, _, err := c.ask(context.Background(), p.url, 500)
		f, ok := c.failed(err)
		if !ok {
			t.Fatalf("error %v", err)
		}
		p.attempts(t, 1)
		if f.status != http.StatusBadRequest || f.kind != "invalid_request_error" || !strings.Contains(f.text, "500") || !strings.Contains(f.text, "100") {
			t.Errorf("the client sees %+v", f)
		}
		if p.upstream.Count() != 0 {
			t.Error("the server saw the request")
		}
		if text, _, err := c.ask(context.Background(), p.url, 100); err != nil || text != said {
			t.Errorf("with what fits: %q, %v", text, err)
		}
	})
}

// A server that says it is overloaded, without saying for how long, is given
// retry fields on its answer's way out.
func TestClientsWaitWhereAServerNamesNoTime(t *testing.T) {
	for _, fields := range []string{"fixed", "computed"} {
		for _, status := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable, 529} {
			t.Run(fmt.Sprint(fields, " ", status), func(t *testing.T) {
				eachClient(t, "retryFields: "+fields, "", "", func(t *testing.T, c client, p *place) {
					inTime(t, func() bool {
						// Envoy itself repeats a 503 once inside the pool.
						refusals := 1
						if status == http.StatusServiceUnavailable {
							refusals = 2
						}
						failFirst(p, c, refusals, status)
						p.forget()
						if text, _, err := c.ask(context.Background(), p.url, 16); err != nil || text != said {
							t.Fatalf("%q, %v", text, err)
						}
						first, second := p.pair(t)
						if first.status != status {
							t.Errorf("status %d, want %d", first.status, status)
						}
						return waited(t, first, second) && served(t, second)
					})
				})
			})
		}
	}
}

// failFirst lets the server refuse its next n requests.
func failFirst(p *place, c client, n, status int, headers ...string) {
	script := make(chan http.Handler, n)
	for range n {
		script <- envoytest.Status(status, `{"error":{"message":"overloaded","type":"overloaded_error"}}`,
			append([]string{"content-type", "application/json"}, headers...)...)
	}
	p.upstream.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case h := <-script:
			h.ServeHTTP(w, r)
		default:
			c.answer.ServeHTTP(w, r)
		}
	}))
}

// What a server says itself stays.
func TestAServersOwnAdviceReachesClients(t *testing.T) {
	eachClient(t, "", "", "", func(t *testing.T, c client, p *place) {
		inTime(t, func() bool {
			failFirst(p, c, 1, http.StatusTooManyRequests, wire.HeaderRetryAfterMs, "321", wire.HeaderRetryAfter, "7")
			p.forget()
			if text, _, err := c.ask(context.Background(), p.url, 16); err != nil || text != said {
				t.Fatalf("%q, %v", text, err)
			}
			first, second := p.pair(t)
			if ms, s := first.advised(), first.header.Get(wire.HeaderRetryAfter); ms != 321*time.Millisecond || s != "7" {
				t.Errorf("told %v and %s s", ms, s)
			}
			return waited(t, first, second) && served(t, second)
		})
	})
}

func TestStreamsReachClients(t *testing.T) {
	eachClient(t, "usage: true", "", "", func(t *testing.T, c client, p *place) {
		events := make(chan string, len(c.events))
		for _, e := range c.events {
			events <- e + "\n\n"
		}
		close(events)
		p.upstream.Handle(envoytest.SSE(events))
		text, err := c.stream(context.Background(), p.url)
		if err != nil || text != said {
			t.Errorf("%q, %v", text, err)
		}
		answer := p.attempts(t, 1)[0]
		if answer.header.Get(wire.HeaderRequestID) == "" || answer.header.Get(wire.HeaderDecision) == "" {
			t.Errorf("ids are missing: %v", answer.header)
		}
	})
}
