package integration

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoytest"
)

// holding answers what is posted only after it is released, with a short JSON
// body.
func holding(release <-chan struct{}) http.Handler {
	held := envoytest.Gate(release, envoytest.JSON(`{}`))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			held.ServeHTTP(w, r)
		}
	})
}

// twoDialects is a config with a route for each dialect over one pool of one
// server.
func twoDialects(t *testing.T, m *modelServer, pool, limits string) string {
	return fmt.Sprintf(`groups:
  - { name: edge, listener: { address: %s }, routes: [messages, chat] }
pools:
  - { name: a, endpoints: [ { address: %q } ], %s }
routes:
  - { name: messages, match: { prefix: /v1/messages }, dialect: anthropic, pool: a }
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, pool: a }
%s`, envoytest.FreeAddr(t), m.addr(), pool, limits)
}

// dialectPath is where request i goes: every other one speaks the other dialect.
func dialectPath(i int) (string, fleet.Dialect) {
	if i%2 == 0 {
		return chatPath, fleet.DialectOpenAI
	}
	return "/v1/messages", fleet.DialectAnthropic
}

// early waits until the minute is young enough for a window of a minute to hold
// what follows, and not so young that the next begins a minute later: who is refused waits
// a minute at most, and all would come in the moment in which it does.
func early(t *testing.T) {
	t.Helper()
	envoytest.Eventually(t, "a young minute", func() bool { return time.Now().Second() > 0 && time.Now().Second() < 35 })
}

// way is a way to a limit of 50.
type way struct {
	name, pool, limits string
	rate               bool // of requests
	tokens             bool // a rate of tokens
	// each: every request is another client's.
	each bool
}

// TestExactlyFiftyOfTwoHundredEnter sends 200 requests at a time against a limit
// of 50, by a server's limit, by a client's concurrency and by a rate of requests or
// tokens, each with the access log arriving and with nobody to take it.
func TestExactlyFiftyOfTwoHundredEnter(t *testing.T) {
	for _, way := range []way{
		{name: "a server's limit", pool: "maxInFlight: 50"},
		{name: "a server's limit, many clients", pool: "maxInFlight: 50", each: true},
		{name: "a client's concurrency", pool: "maxInFlight: 4096", limits: "limits:\n  - { name: clients, concurrency: 50 }\n"},
		{name: "a rate", pool: "maxInFlight: 4096", limits: "limits:\n  - { name: clients, requests: 50/min }\n", rate: true},
		// Each request reserves the quarter of its 31 bytes and its 16 tokens.
		{name: "a rate of tokens", pool: "maxInFlight: 4096", limits: "limits:\n  - { name: clients, tokens: 1155/min }\n", tokens: true},
	} {
		for _, log := range []string{"log arrives", "log is away"} {
			t.Run(way.name+", "+log, func(t *testing.T) {
				for range 5 {
					if oneBurst(t, way, log == "log is away") {
						return
					}
					t.Log("ext_proc was late on a loaded machine, and some requests passed without it: again")
				}
				t.Error("ext_proc was late five times")
			})
		}
	}
}

// oneBurst checks one burst; it returns false when ext_proc did not take part in
// all of it, so that it shows nothing: then requests pass, which is what routes
// do that fail open.
func oneBurst(t *testing.T, w way, away bool) bool {
	t.Helper()
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(holding(release))
	p := newPlace(t, twoDialects(t, m, w.pool, w.limits))
	p.serve(t)
	if away {
		// The sidecar finds nobody where the log should go.
		socket := p.config.Serve.AccessLog.Path
		if err := os.Rename(socket, socket+".away"); err != nil {
			t.Fatal(err)
		}
	}
	e, listen := p.sidecar(t)
	waitExtProc(e)
	if w.rate || w.tokens {
		early(t)
	}
	admitted, refused, inside := burst(t, m, listen, 200, w.each, release)
	for _, a := range admitted {
		if a.header.Get("X-Route-Strategy") != "dynamic" {
			return false
		}
	}
	if len(admitted) != 50 || len(refused) != 150 {
		t.Errorf("%d entered and %d were refused; want 50 and 150", len(admitted), len(refused))
	}
	if n := m.peak.Load(); inside != 50 || n != 50 {
		t.Errorf("the server held %d, and up to %d at a time; want 50", inside, n)
	}
	checkSlots(t, refused)
	if w.rate {
		checkRemaining(t, admitted, 50)
	}
	if w.tokens {
		checkTokens(t, admitted, 1155, 23)
	}
	return true
}

// TestLedgerAloneHoldsAServersLimit sends the same against a server's limit where there
// is no admission and decisions see nothing in flight: either would refuse most of what
// is too much before the ledger is asked.
func TestLedgerAloneHoldsAServersLimit(t *testing.T) {
	for range 5 {
		if ledgerBurst(t) {
			return
		}
		t.Log("ext_proc was late on a loaded machine, and some requests passed without it: again")
	}
	t.Error("ext_proc was late five times")
}

// ledgerBurst is oneBurst with the ledger alone.
func ledgerBurst(t *testing.T) bool {
	t.Helper()
	m := newModelServer(t)
	release := make(chan struct{})
	m.answerWith(holding(release))
	sh := twoServers(m.addr(), m.addr()).single()
	sh.text = strings.Replace(sh.text, "name: a, ", "name: a, maxInFlight: 50, ", 1)
	s := startSteered(t, sh)
	s.waitEmpty(t)
	s.unseen.Store(true)
	admitted, refused, inside := burst(t, m, s.addr.String(), 200, false, release)
	for _, a := range admitted {
		if a.header.Get(wire.HeaderRouteStrategy) != "dynamic" {
			return false
		}
	}
	if n := m.peak.Load(); len(admitted) != 50 || len(refused) != 150 || inside != 50 || n != 50 {
		t.Errorf("%d entered and %d were refused, the server held %d and up to %d at a time; want 50, 150, 50, 50",
			len(admitted), len(refused), inside, n)
	}
	s.waitEmpty(t)
	return true
}

// answered is an answer with the dialect it should be in.
type answered struct {
	answer
	dialect fleet.Dialect
}

// burst sends n requests at a time to a server that holds what reaches it until
// all others have their answer; then it releases them and parts the answers. With
// each, every request is another client's.
func burst(t *testing.T, m *modelServer, listen string, n int, each bool, release chan struct{}) (admitted, refused []answered, inside int64) {
	t.Helper()
	with := wide(t)
	with.Transport.(*http.Transport).MaxIdleConnsPerHost = n
	var mu sync.Mutex
	var all []answered
	var parts sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		path, dialect := dialectPath(i)
		token := "Bearer parallel"
		if each {
			token += strconv.Itoa(i)
		}
		parts.Go(func() {
			<-start
			a, err := ask(t.Context(), with, "http://"+listen+path, `{"max_tokens":16,"messages":[]}`, false, "authorization", token)
			if err != nil {
				t.Errorf("request %d: %v", i, err)
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, answered{a, dialect})
		})
	}
	close(start)
	envoytest.Eventually(t, "every request inside or answered", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return int(m.inside.Load())+len(all) == n
	})
	inside = m.inside.Load()
	close(release)
	parts.Wait()
	for _, a := range all {
		switch a.status {
		case http.StatusOK:
			admitted = append(admitted, a)
		case http.StatusTooManyRequests:
			refused = append(refused, a)
		default:
			t.Errorf("status %d: %s", a.status, a.body)
		}
	}
	return admitted, refused, inside
}

// checkSlots: each refusal is in its dialect and complete, and those that are
// told to come back are told to come one by one. Waits count from when each was
// refused, so a few of them may well be the same number for different times.
func checkSlots(t *testing.T, refused []answered) {
	t.Helper()
	waits := map[int64]bool{}
	again := 0
	for _, r := range refused {
		expectRefusal(t, r.answer, r.dialect)
		if r.header.Get("X-Should-Retry") == "false" {
			continue
		}
		again++
		waits[whole(r.header, "Retry-After-Ms")] = true
	}
	if len(waits)*4 < again*3 {
		t.Errorf("%d refused requests are told %d different waits", again, len(waits))
	}
	t.Logf("%d refused, %d of them told to come back, by %d different waits", len(refused), again, len(waits))
}

// checkRemaining: each admitted request was told another number of remaining
// ones, limit−1 … 0.
func checkRemaining(t *testing.T, admitted []answered, limit int64) {
	t.Helper()
	var left []int64
	for _, a := range admitted {
		left = append(left, whole(a.header, "X-Ratelimit-Remaining"))
		if n := whole(a.header, "X-Ratelimit-Limit"); n != limit {
			t.Errorf("x-ratelimit-limit %d; want %d", n, limit)
		}
		if !strings.Contains(a.header.Get("Ratelimit-Policy"), fmt.Sprintf("q=%d", limit)) || a.header.Get("Ratelimit") == "" {
			t.Errorf("RateLimit %q, RateLimit-Policy %q", a.header.Get("Ratelimit"), a.header.Get("Ratelimit-Policy"))
		}
	}
	slices.Sort(left)
	for i, n := range left {
		if n != int64(i) {
			t.Errorf("remaining %v; want 0 … %d once each", left, limit-1)
			break
		}
	}
}

// checkTokens: each admitted request left another number of tokens, cost apart.
func checkTokens(t *testing.T, admitted []answered, limit, cost int64) {
	t.Helper()
	var left []int64
	for _, a := range admitted {
		left = append(left, whole(a.header, "X-Ratelimit-Remaining-Tokens"))
	}
	slices.Sort(left)
	slices.Reverse(left)
	for i, n := range left {
		if n != limit-int64(i+1)*cost {
			t.Errorf("remaining tokens %v; want %d less for each", left, cost)
			break
		}
	}
}

// TestPlacesStayTakenWhileTheLogIsAway: for as long as requests of their level
// take, not only for the two seconds in which a log that arrives would confirm
// them. The log of a second sidecar may arrive.
func TestPlacesStayTakenWhileTheLogIsAway(t *testing.T) {
	for _, w := range []way{
		{name: "a server's limit", pool: "maxInFlight: 5"},
		{name: "a client's concurrency", pool: "maxInFlight: 4096", limits: "limits:\n  - { name: clients, concurrency: 5 }\n"},
	} {
		for _, beside := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, another log arrives %v", w.name, beside), func(t *testing.T) { placesStay(t, w, beside) })
		}
	}
}

func placesStay(t *testing.T, w way, beside bool) {
	m := newModelServer(t)
	release := make(chan struct{})
	held := holding(release)
	m.answerWith(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("x-short") == "" {
			held.ServeHTTP(w, r)
		}
	}))
	p := newPlace(t, twoDialects(t, m, w.pool, w.limits))
	p.serve(t)
	path, _ := dialectPath(0)
	with := wide(t)
	post := func(listen string, headers ...string) answer {
		a, err := ask(t.Context(), with, "http://"+listen+path, `{"max_tokens":2000,"messages":[]}`, false, append(headers, "authorization", "Bearer a")...)
		if err != nil {
			t.Error(err)
		}
		return a
	}
	if beside {
		e, listen := p.sidecar(t)
		waitExtProc(e)
		if a := post(listen, "x-short", "1"); a.status != http.StatusOK {
			t.Fatalf("status %d: %s", a.status, a.body)
		}
		e.WaitStat("cluster."+wire.ClusterAccessLog+".upstream_rq_active", func(n int64) bool { return n > 0 })
	}
	socket := p.config.Serve.AccessLog.Path
	if err := os.Rename(socket, socket+".away"); err != nil {
		t.Fatal(err)
	}
	e, listen := p.sidecar(t)
	waitExtProc(e)
	var parts sync.WaitGroup
	for range 5 {
		parts.Go(func() { post(listen) })
	}
	envoytest.Eventually(t, "five inside", func() bool { return m.inside.Load() == 5 })
	pause(t.Context(), 4*time.Second)
	late := make(chan answer, 1)
	parts.Go(func() { late <- post(listen) })
	select {
	case a := <-late:
		if a.status != http.StatusTooManyRequests {
			t.Errorf("status %d beside five that run; want 429", a.status)
		}
	case <-time.After(10 * time.Second):
		t.Errorf("a sixth is inside, of %d", m.inside.Load())
	}
	close(release)
	parts.Wait()
}
