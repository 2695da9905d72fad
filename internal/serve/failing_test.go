package serve

import (
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// TestFailingEndpointsAreAskedByOne: what a script tells of an endpoint of 64 places, and
// how many trials it takes at times after that, in ms; −1 is any number.
func TestFailingEndpointsAreAskedByOne(t *testing.T) {
	const ms, s = time.Millisecond, time.Second
	const started, ended = fleet.AttemptStarted, fleet.AttemptEnded
	type event struct {
		at    time.Duration
		kind  fleet.OutcomeKind
		cause fleet.Cause
		code  int
		took  time.Duration
	}
	refused := func(at time.Duration) event { return event{at, ended, fleet.CauseConnectFailed, 503, 0} }
	answer := func(at time.Duration, code int, took time.Duration) event {
		cause := fleet.CauseOK
		if code >= 500 {
			cause = fleet.CauseServerError
		}
		return event{at, ended, cause, code, took}
	}
	dead := []event{refused(0), refused(0), refused(0)}
	after := func(more ...event) []event { return append(dead[:3:3], more...) }
	for name, row := range map[string]struct {
		events []event
		want   map[time.Duration]int32
	}{
		"two failures":                    {dead[:2], map[time.Duration]int32{0: -1}},
		"three":                           {dead, map[time.Duration]int32{0: 0, 249 * ms: 0, 250 * ms: 1, time.Hour: 1}},
		"three with a good one between":   {[]event{refused(0), refused(0), answer(0, 200, 0), refused(0)}, map[time.Duration]int32{0: -1}},
		"three with a reset between":      {[]event{refused(0), {0, ended, fleet.CauseReset, 0, 0}, refused(0)}, map[time.Duration]int32{0: 0}},
		"three 503":                       {[]event{answer(0, 503, 0), answer(0, 503, 0), answer(0, 503, 0)}, map[time.Duration]int32{0: 0}},
		"callers who leave":               {[]event{{0, ended, fleet.CauseClientGone, 0, 0}, {0, ended, fleet.CauseClientGone, 0, 0}, {0, ended, fleet.CauseClientGone, 0, 0}}, map[time.Duration]int32{0: -1}},
		"three 529":                       {[]event{answer(0, 529, 0), answer(0, 529, 0), answer(0, 529, 0)}, map[time.Duration]int32{0: -1}},
		"more that had begun":             {after(refused(50*ms), refused(100*ms)), map[time.Duration]int32{249 * ms: 0, 250 * ms: 1}},
		"one asks and fails":              {after(refused(300 * ms)), map[time.Duration]int32{300 * ms: 0, 799 * ms: 0, 800 * ms: 1}},
		"many ask and fail":               {after(refused(s), refused(2*s), refused(4*s), refused(8*s), refused(16*s)), map[time.Duration]int32{17999 * ms: 0, 18 * s: 1}},
		"one asks and is answered":        {after(answer(400*ms, 200, 100*ms)), map[time.Duration]int32{399 * ms: 1, 400 * ms: 16, 500 * ms: 32, 600 * ms: -1}},
		"one asks and is told it is busy": {after(event{400 * ms, ended, fleet.CauseThrottled, 429, 100 * ms}), map[time.Duration]int32{400 * ms: 16}},
		"one that began before it failed": {after(answer(400*ms, 200, 2*s)), map[time.Duration]int32{400 * ms: 1}},
		"one asks and runs":               {after(event{300 * ms, started, 0, 0, 0}), map[time.Duration]int32{449 * ms: 1, 450 * ms: 16, 650 * ms: -1}},
		"one asks, where failures take 2 s": {[]event{answer(0, 504, 2*s), answer(0, 504, 2*s), answer(0, 504, s), {300 * ms, started, 0, 0, 0}},
			map[time.Duration]int32{4449 * ms: 1, 4450 * ms: 16}},
		"one asks, where failures take a minute": {[]event{answer(0, 504, 60*s), answer(0, 504, 60*s), answer(0, 504, 60*s), {300 * ms, started, 0, 0, 0}},
			map[time.Duration]int32{10299 * ms: 1, 10300 * ms: 16}},
		"one that was on its way runs": {after(event{100 * ms, started, 0, 0, 0}), map[time.Duration]int32{250 * ms: 1, 400 * ms: 1}},
		"one asks, where failures took 2 s before": {[]event{answer(0, 504, 2*s), answer(0, 504, 2*s), answer(0, 504, 2*s), answer(300*ms, 200, 0),
			refused(s), refused(s), refused(s), {1300 * ms, started, 0, 0, 0}}, map[time.Duration]int32{1449 * ms: 1, 1450 * ms: 16}},
		"it fails while it opens":          {after(event{300 * ms, started, 0, 0, 0}, refused(500*ms)), map[time.Duration]int32{500 * ms: 0, 999 * ms: 0, 1000 * ms: 1}},
		"it fails again, after a good one": {after(answer(400*ms, 200, 100*ms), refused(500*ms), refused(500*ms)), map[time.Duration]int32{500 * ms: 32, 600 * ms: -1}},
		"it fails for good again": {after(refused(300*ms), answer(900*ms, 200, 50*ms), refused(950*ms), refused(950*ms), refused(950*ms)),
			map[time.Duration]int32{950 * ms: 0, 1199 * ms: 0, 1200 * ms: 1}},
	} {
		for at, want := range row.want {
			var f failure
			begin := time.Now()
			events := row.events
			for now := time.Duration(0); now < at; now += 50 * ms { // as ticks do
				for len(events) > 0 && events[0].at <= now {
					f.hear(events[0].kind, events[0].cause, events[0].code, events[0].took, begin.Add(events[0].at))
					events = events[1:]
				}
				if f.trial(64, 0, begin.Add(now)); now > 30*s {
					break
				}
			}
			for _, e := range events {
				if e.at <= at {
					f.hear(e.kind, e.cause, e.code, e.took, begin.Add(e.at))
				}
			}
			got, failing := f.trial(64, 0, begin.Add(at))
			if !failing {
				got = -1
			}
			if got != want {
				t.Errorf("%s, after %v: %d; want %d", name, at, got, want)
			}
		}
	}
}

func (f *failure) hear(kind fleet.OutcomeKind, cause fleet.Cause, code int, took time.Duration, at time.Time) {
	f.outcome(&fleet.Outcome{Kind: kind, Route: "chat", Cause: cause, Code: code, Duration: took, At: at}, admission.Client{})
}

// kill makes an endpoint fail.
func (f *failure) kill(cause fleet.Cause, code int, at time.Time) {
	for range failStreak {
		f.hear(fleet.AttemptEnded, cause, code, 0, at)
	}
}

// TestWhatRunsOnAFailingEndpointAsksNothing: a server that stops listening ends what it
// has; one asks beside that.
func TestWhatRunsOnAFailingEndpointAsksNothing(t *testing.T) {
	begin := time.Now()
	var f failure
	f.kill(fleet.CauseConnectFailed, 503, begin)
	for _, row := range []struct {
		after    time.Duration
		inFlight int32
		want     int32
	}{{0, 12, 0}, {200 * time.Millisecond, 5, 0}, {250 * time.Millisecond, 4, 5}, {300 * time.Millisecond, 5, 5}, {350 * time.Millisecond, 3, 4}} {
		if got, failing := f.trial(8, row.inFlight, begin.Add(row.after)); got != row.want || !failing {
			t.Errorf("after %v, with %d in flight: %d, failing %v; want %d", row.after, row.inFlight, got, failing, row.want)
		}
	}
}

// TestWhatWasLetInWhileItOpenedAsksNothing: it failed again, and those still run.
func TestWhatWasLetInWhileItOpenedAsksNothing(t *testing.T) {
	begin := time.Now()
	var f failure
	f.kill(fleet.CauseConnectFailed, 503, begin)
	f.trial(64, 0, begin)
	f.hear(fleet.AttemptStarted, 0, 0, 0, begin.Add(300*time.Millisecond))
	f.trial(64, 12, begin.Add(500*time.Millisecond))
	f.hear(fleet.AttemptEnded, fleet.CauseConnectFailed, 503, 0, begin.Add(500*time.Millisecond))
	f.trial(64, 12, begin.Add(550*time.Millisecond))
	if got, failing := f.trial(64, 11, begin.Add(time.Second)); got != 12 || !failing {
		t.Errorf("beside 11 that run: %d, failing %v; want one more", got, failing)
	}
}

// TestWhatSpeaksForAnEndpointAndAgainst is by how an attempt ended.
func TestWhatSpeaksForAnEndpointAndAgainst(t *testing.T) {
	for name, row := range map[string]struct {
		fleet.Outcome
		failed, worked bool
	}{
		"an answer":                      {fleet.Outcome{Cause: fleet.CauseOK, Code: 200}, false, true},
		"a request that it can't take":   {fleet.Outcome{Cause: fleet.CauseClientError, Code: 400}, false, true},
		"a 429":                          {fleet.Outcome{Cause: fleet.CauseThrottled, Code: 429}, false, true},
		"a 529":                          {fleet.Outcome{Cause: fleet.CauseServerError, Code: 529}, false, false},
		"a 500":                          {fleet.Outcome{Cause: fleet.CauseServerError, Code: 500}, true, false},
		"a 502":                          {fleet.Outcome{Cause: fleet.CauseServerError, Code: 502}, true, false},
		"a 503":                          {fleet.Outcome{Cause: fleet.CauseServerError, Code: 503}, true, false},
		"a 503 with a time":              {fleet.Outcome{Cause: fleet.CauseServerError, Code: 503, RetryAfter: time.Second}, false, false},
		"no connection":                  {fleet.Outcome{Cause: fleet.CauseConnectFailed, Code: 503}, true, false},
		"a break before the answer":      {fleet.Outcome{Cause: fleet.CauseReset}, true, false},
		"a break of an answer":           {fleet.Outcome{Cause: fleet.CauseReset, Code: 200, HeaderTime: time.Second}, false, false},
		"a caller who left":              {fleet.Outcome{Cause: fleet.CauseClientGone}, false, false},
		"a time limit":                   {fleet.Outcome{Cause: fleet.CauseTimeout, Code: 504}, false, false},
		"an answer that was Envoy's own": {fleet.Outcome{Cause: fleet.CauseLocal, Code: 503}, false, false},
	} {
		if failed(&row.Outcome) != row.failed || worked(&row.Outcome) != row.worked {
			t.Errorf("%s: failed %v, worked %v", name, failed(&row.Outcome), worked(&row.Outcome))
		}
	}
}

// TestAnAskerOfWhomNothingIsHeard is for a log that is away: then nobody is kept out.
func TestAnAskerOfWhomNothingIsHeard(t *testing.T) {
	begin := time.Now()
	var f failure
	f.kill(fleet.CauseConnectFailed, 503, begin)
	f.trial(8, 0, begin)
	if got, failing := f.trial(8, 0, begin.Add(time.Hour)); got != 1 || !failing {
		t.Errorf("with nobody who asks: %d, failing %v", got, failing)
	}
	asks := begin.Add(2 * time.Hour)
	f.trial(8, 1, asks)
	if got, failing := f.trial(8, 1, asks.Add(longestDoubt-time.Millisecond)); got != 1 || !failing {
		t.Errorf("while it is waited for: %d, failing %v", got, failing)
	}
	if got, _ := f.trial(8, 1, asks.Add(longestDoubt)); got != 2 {
		t.Errorf("%d after it was waited for; want a quarter of the limit", got)
	}
	if _, failing := f.trial(8, 1, asks.Add(longestDoubt+openSteps*openStep)); failing {
		t.Error("it fails for ever")
	}
	f.hear(fleet.AttemptEnded, fleet.CauseConnectFailed, 503, 0, asks.Add(time.Minute))
	if _, failing := f.trial(8, 1, asks.Add(time.Minute)); !failing {
		t.Error("it never showed that it works, and another failure means nothing")
	}
}

// TestModelListsShowNothing: requests that don't generate make no endpoint fail, and mend
// none.
func TestModelListsShowNothing(t *testing.T) {
	now := time.Now()
	for _, suffix := range []string{wire.RouteOther, wire.RouteConnect} {
		v := newViewed(t, twoServers())
		hear := func(route string, cause fleet.Cause, code int, at time.Time) {
			for range failStreak {
				v.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Route: route, Cause: cause, Code: code, Endpoint: v.key(0), At: at})
			}
		}
		failing := func(at time.Time) bool {
			in, _ := v.step(at)
			return in.Pools[0].Endpoints[0].Failing
		}
		if hear("chat"+suffix, fleet.CauseServerError, 503, now); failing(now) {
			t.Errorf("%s: it fails", suffix)
		}
		hear("chat", fleet.CauseServerError, 503, now)
		if hear("chat"+suffix, fleet.CauseOK, http.StatusOK, now.Add(time.Second)); !failing(now.Add(2 * time.Second)) {
			t.Errorf("%s: it is well again", suffix)
		}
	}
}

// TestPoolsThatAnswer500: one endpoint beside others is the scorer's, all are the chain's.
func TestPoolsThatAnswer500(t *testing.T) {
	s := newViewed(t, twoServers())
	now := time.Now()
	failing := func() (out [2]bool) {
		inputs, _ := s.step(now)
		for i := range out {
			out[i] = inputs.Pools[0].Endpoints[i].Failing
		}
		return out
	}
	answers := func(i, code int) {
		for range failStreak {
			s.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Route: "chat", Endpoint: s.key(i), Cause: fleet.CauseServerError, Code: code, At: now})
		}
	}
	answers(0, 500)
	if got := failing(); got != [2]bool{} {
		t.Errorf("one answers 500: %v", got)
	}
	answers(1, 500)
	if got := failing(); got != [2]bool{true, true} {
		t.Errorf("both answer 500: %v", got)
	}
	s.endpoints[s.key(0)].fails = failure{}
	answers(1, 503)
	answers(1, 500)
	if got := failing(); got != [2]bool{false, true} {
		t.Errorf("one answers 503, and 500 then: %v", got)
	}
}

// TestPlacesAreHeldUntilAPlanKnows: those of attempts that change what their endpoint gets.
func TestPlacesAreHeldUntilAPlanKnows(t *testing.T) {
	chain := twoServers()
	chain.Pools = append(chain.Pools, fleet.Pool{Name: "b200"})
	chain.Routes[0].Fallback = []string{"b200"}
	for name, row := range map[string]struct {
		outcome     fleet.Outcome
		alone, held int32
	}{
		"refused":            {fleet.Outcome{Cause: fleet.CauseConnectFailed}, 0, 1},
		"503":                {fleet.Outcome{Cause: fleet.CauseServerError, Code: 503}, 0, 1},
		"503 with a time":    {fleet.Outcome{Cause: fleet.CauseServerError, Code: 503, RetryAfter: time.Second}, 1, 1},
		"429":                {fleet.Outcome{Cause: fleet.CauseThrottled, Code: 429}, 1, 1},
		"529":                {fleet.Outcome{Cause: fleet.CauseServerError, Code: 529}, 1, 1},
		"500":                {fleet.Outcome{Cause: fleet.CauseServerError, Code: 500}, 0, 0},
		"an answer":          {fleet.Outcome{Cause: fleet.CauseOK, Code: 200}, 0, 0},
		"a caller who left":  {fleet.Outcome{Cause: fleet.CauseClientGone}, 0, 0},
		"one that has begun": {fleet.Outcome{Kind: fleet.AttemptStarted, Cause: fleet.CauseConnectFailed}, 0, 0},
	} {
		for _, in := range []struct {
			cfg  *fleet.Config
			held int32
		}{{twoServers(), row.alone}, {chain, row.held}} {
			s := newViewed(t, in.cfg)
			o := row.outcome
			if o.Kind == 0 {
				o.Kind = fleet.AttemptEnded
			}
			o.Endpoint, o.Route, o.At = s.key(0), "chat", time.Now()
			inFlight := func() int32 { return s.ledger.InFlight(s.ledger.Slot(s.key(0))) }
			s.outcome(o)
			if got := inFlight(); got != in.held {
				t.Errorf("%s, in a chain of %d: %d held; want %d", name, len(in.cfg.Pools), got, in.held)
			}
			s.scoring.step(time.Now())
			s.outcome(o) // of this the next plan doesn't know
			if got := inFlight(); got != 2*in.held {
				t.Errorf("%s, in a chain of %d, before the plan is in force: %d held; want %d", name, len(in.cfg.Pools), got, 2*in.held)
			}
			s.published()
			if got := inFlight(); got != in.held {
				t.Errorf("%s, in a chain of %d, when it is: %d held; want %d", name, len(in.cfg.Pools), got, in.held)
			}
			s.step(time.Now())
			if got := inFlight(); got != 0 {
				t.Errorf("%s: %d held for ever", name, got)
			}
		}
	}
}

// TestHeldPlacesAreFreeWithTheNextPlan: the server holds a place before the attempt's end
// frees it, and frees it with the plan that knows.
func TestHeldPlacesAreFreeWithTheNextPlan(t *testing.T) {
	r := newRuns(t, Options{})
	id := r.enter(t)
	for _, o := range []fleet.Outcome{{Kind: fleet.AttemptStarted}, {Kind: fleet.AttemptEnded, Cause: fleet.CauseThrottled, Code: 429}} {
		o.Node, o.ID, o.Attempt, o.Endpoint, o.At = "n", id, 1, gpu, r.now
		r.outcome(o)
	}
	if n := r.ledger.InFlight(r.ledger.Slot(gpu)); n != 1 {
		t.Errorf("%d places taken before the next plan; want one held", n)
	}
	r.pass(tickEvery)
	if n := r.ledger.InFlight(r.ledger.Slot(gpu)); n != 0 {
		t.Errorf("%d places taken after it", n)
	}
}

// TestAHeldPlaceIsNeverFree: not for the moment between an attempt's end and the hold.
func TestAHeldPlaceIsNeverFree(t *testing.T) {
	r := newRuns(t, Options{})
	for i := range 3000 {
		id := r.enter(t)
		over := make(chan bool)
		taken := make(chan bool, 1)
		go func() {
			for {
				if r.ledger.Reserve(fmt.Sprintf("1718924567124-%03d-%04d", i/1000, i%1000), gpu, 1, 0, r.now) {
					taken <- true
					return
				}
				select {
				case <-over:
					taken <- false
					return
				default:
				}
			}
		}()
		r.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "n", ID: id, Attempt: 1, Endpoint: gpu, Cause: fleet.CauseThrottled, Code: 429, At: r.now})
		close(over)
		if <-taken {
			t.Fatalf("after %d attempts one got a place that should be held", i)
		}
		r.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: id, Attempt: 1, Cause: fleet.CauseThrottled, Code: 429, At: r.now})
		r.scoring.step(r.now)
		r.scoring.published()
	}
}

// TestEndsOfRequestsAreNoAttempts: what their last attempt told counts once.
func TestEndsOfRequestsAreNoAttempts(t *testing.T) {
	s := newViewed(t, twoServers())
	for range 2 * failStreak {
		s.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", Endpoint: s.key(0), Cause: fleet.CauseConnectFailed, Code: 503, At: time.Now()})
	}
	s.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Route: "chat", Endpoint: s.key(0), Cause: fleet.CauseThrottled, Code: 429, At: time.Now()})
	inputs, _ := s.step(time.Now())
	if e := inputs.Pools[0].Endpoints[0]; e.Failing || e.Closed {
		t.Errorf("%+v", e)
	}
}

// TestTheServerSeesWhomEnvoyPassesBy: by requests that were let into one pool and run in
// another.
func TestTheServerSeesWhomEnvoyPassesBy(t *testing.T) {
	r := newRuns(t, Options{})
	spare := fleet.EndpointKey{Pool: "spare", Address: netip.MustParseAddrPort("127.0.0.1:1004")}
	for range passStreak + failStreak {
		o := fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: r.enter(t), Attempt: 1, Route: "chat", Endpoint: spare, At: r.now}
		r.outcome(o)
		o.Kind = fleet.RequestEnded
		r.outcome(o)
	}
	inputs, _ := r.scoring.step(r.now)
	for _, p := range inputs.Pools {
		for _, e := range p.Endpoints {
			if e.Failing != (p.Name == "gpu") {
				t.Errorf("%s of %s: failing %v", e.Address, p.Name, e.Failing)
			}
		}
	}
}

// TestPoolsThatEnvoyPassesByFail: by its own checks. One request that reached the pool says
// that some of its servers are well, and what one Envoy finds that others don't is its own.
func TestPoolsThatEnvoyPassesByFail(t *testing.T) {
	type event struct {
		node    string
		n       int // of them passed the pool by; 0 is one that reached it, −1 one that didn't
		seconds int // before it
	}
	const all = passStreak + failStreak
	for name, row := range map[string]struct {
		events []event
		fails  int
	}{
		"too few":                          {[]event{{"a", all - 1, 0}}, 0},
		"enough":                           {[]event{{"a", all, 0}}, 2},
		"with one between that reached it": {[]event{{"a", all - 1, 0}, {"a", 0, 0}, {"a", passStreak, 0}}, 0},
		"after one that reached it":        {[]event{{"a", 0, 0}, {"a", all, 0}}, 2},
		"of two Envoys":                    {[]event{{"a", passStreak - 1, 0}, {"b", passStreak - 1, 0}, {"a", 1, 0}}, 0},
		"each of two Envoys":               {[]event{{"a", passStreak, 0}, {"b", all, 0}}, 2},
		"another one reaches it":           {[]event{{"b", 0, 0}, {"a", 10 * all, 0}}, 0},
		"another one did, long ago":        {[]event{{"b", 0, 0}, {"a", passStreak, 0}, {"a", failStreak, 10}}, 2},
		"another one did, a while ago":     {[]event{{"b", 0, 0}, {"a", all, 9}}, 0},
		"another one's connection failed":  {[]event{{"b", -1, 0}, {"a", all, 0}}, 2},
	} {
		s := newViewed(t, twoServers())
		now := time.Now()
		for _, e := range row.events {
			now = now.Add(time.Duration(e.seconds) * time.Second)
			o := fleet.Outcome{Kind: fleet.AttemptStarted, Node: e.node, Route: "chat", Attempt: 1, At: now}
			for range e.n {
				s.passedBy("h100", &o)
				s.passedBy("another", &o)
			}
			switch e.n {
			case 0:
				o.Endpoint = s.key(1)
				s.outcome(o)
			case -1:
				o.Endpoint, o.Kind, o.Cause = s.key(1), fleet.AttemptEnded, fleet.CauseConnectFailed
				s.outcome(o)
			}
		}
		fails := 0
		inputs, _ := s.step(now)
		for _, e := range inputs.Pools[0].Endpoints {
			if e.Failing {
				fails++
			}
		}
		if fails != row.fails {
			t.Errorf("%s: %d fail; want %d", name, fails, row.fails)
		}
	}
	s := newViewed(t, twoServers())
	for i := range 3 * maxPassing {
		s.passedBy("h100", &fleet.Outcome{Kind: fleet.AttemptStarted, Node: strconv.Itoa(i), Route: "chat", At: time.Now()})
		if n := len(s.passes["h100"]); n > maxPassing {
			t.Fatalf("%d Envoys are told apart", n)
		}
	}
}

// TestOneClientsRequestsFailNobody: what may be their doing. A connection that nobody
// answers, or a gateway's error, is not.
func TestOneClientsRequestsFailNobody(t *testing.T) {
	one, two := admission.Client{1}, admission.Client{2}
	reset := fleet.Outcome{Cause: fleet.CauseReset}
	for name, row := range map[string]struct {
		outcome fleet.Outcome
		askers  []admission.Client
		fails   bool
	}{
		"500s of one":               {fleet.Outcome{Cause: fleet.CauseServerError, Code: 500}, []admission.Client{one, one, one, one}, false},
		"500s of two":               {fleet.Outcome{Cause: fleet.CauseServerError, Code: 500}, []admission.Client{one, one, two}, true},
		"500s of nobody known":      {fleet.Outcome{Cause: fleet.CauseServerError, Code: 500}, []admission.Client{{}, {}, {}}, true},
		"broken of one":             {reset, []admission.Client{one, one, one, one, one}, false},
		"broken of two":             {reset, []admission.Client{one, one, two}, true},
		"broken of who isn't known": {reset, []admission.Client{{}, {}, {}}, true},
		"503s of one":               {fleet.Outcome{Cause: fleet.CauseServerError, Code: 503}, []admission.Client{one, one, one}, true},
		"no connection":             {fleet.Outcome{Cause: fleet.CauseConnectFailed}, []admission.Client{one, one, one}, true},
	} {
		var f failure
		now := time.Now()
		for _, asker := range row.askers {
			o := row.outcome
			o.Kind, o.Route, o.At = fleet.AttemptEnded, "chat", now
			f.outcome(&o, asker)
		}
		if _, failing := f.trial(64, 0, now); failing != row.fails {
			t.Errorf("%s: failing %v; want %v", name, failing, row.fails)
		}
	}
	var f failure
	now := time.Now()
	hear := func(cause fleet.Cause, asker admission.Client) {
		f.outcome(&fleet.Outcome{Kind: fleet.AttemptEnded, Route: "chat", Cause: cause, At: now}, asker)
	}
	hear(fleet.CauseReset, one)
	hear(fleet.CauseReset, two)
	hear(fleet.CauseOK, two)
	for range 2 * failStreak {
		hear(fleet.CauseReset, one)
	}
	if _, failing := f.trial(64, 0, now); failing {
		t.Error("it fails by one client's requests, after another was served")
	}
}

// TestALoneClientsRequestsShowWhatFails, since there are no others that would be shut out.
func TestALoneClientsRequestsShowWhatFails(t *testing.T) {
	lone, other := admission.Client{1}, admission.Client{2}
	for _, beside := range []bool{false, true} {
		v := newViewed(t, twoServers())
		now := time.Now()
		hear := func(cause fleet.Cause, of admission.Client) {
			v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Route: "chat", Cause: cause, Endpoint: v.key(0), At: now}, byKey(of))
		}
		if beside {
			hear(fleet.CauseOK, other)
		}
		for range failStreak {
			hear(fleet.CauseReset, lone)
		}
		in, _ := v.step(now)
		if got := in.Pools[0].Endpoints[0].Failing; got == beside {
			t.Errorf("another was served %v: failing %v", beside, got)
		}
	}
}

// TestSeveralKeysOfAClientAreOneBeforeAFailingServer: clients may be told apart by what
// nobody can make up, and keys can be.
func TestSeveralKeysOfAClientAreOneBeforeAFailingServer(t *testing.T) {
	lone, other := admission.Client{1}, admission.Client{2}
	for _, beside := range []bool{false, true} {
		v := newViewed(t, twoServers())
		now := time.Now()
		hear := func(cause fleet.Cause, of admission.Client, key byte) {
			v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Route: "chat", Cause: cause, Endpoint: v.key(0), At: now}, admission.Asker{Client: of, Credential: admission.Client{key}})
		}
		hear(fleet.CauseOK, lone, 3)
		hear(fleet.CauseOK, lone, 4)
		if beside {
			hear(fleet.CauseOK, other, 5)
		}
		for i := range failStreak {
			hear(fleet.CauseReset, lone, 3+byte(i%2))
		}
		in, _ := v.step(now)
		if got := in.Pools[0].Endpoints[0].Failing; got == beside {
			t.Errorf("another client was served %v: failing %v", beside, got)
		}
	}
}

// TestOneClientsBrokenConnectionsEjectNobody, while others are served by the same server. What
// shows that it is gone ejects it at once: broken connections of two, also in the middle of
// answers, or one that nobody answers.
func TestOneClientsBrokenConnectionsEjectNobody(t *testing.T) {
	type end struct {
		cause      fleet.Cause
		headerTime time.Duration
		route      string
		of         admission.Asker
	}
	const s, reset = time.Second, fleet.CauseReset
	one, two := byKey(admission.Client{1}), byKey(admission.Client{2})
	another := admission.Asker{Client: one.Client, Credential: admission.Client{3}}
	broken := func(of admission.Asker) end { return end{reset, 0, "chat", of} }
	cut := func(of admission.Asker) end { return end{reset, s, "chat", of} }
	listing := end{reset, 0, "chat" + wire.RouteOther, admission.Asker{}}
	refused := end{fleet.CauseConnectFailed, 0, "chat", one}
	many := []end{broken(one), broken(one), broken(one), broken(one), broken(one), broken(one), broken(one)}
	for name, row := range map[string]struct {
		served  admission.Asker // before all
		ago     time.Duration
		ends    []end
		ejected bool
	}{
		"one's":                             {two, s, many, false},
		"one's answers":                     {two, s, []end{cut(one), cut(one), cut(one), cut(one)}, false},
		"one's with two keys":               {two, s, []end{broken(one), broken(another), broken(one), broken(another)}, false},
		"two's":                             {two, s, []end{broken(one), broken(one), broken(two)}, true},
		"two's answers":                     {two, s, []end{cut(two), cut(one), cut(one)}, true},
		"one's, then nobody is there":       {two, s, []end{broken(one), broken(one), refused}, true},
		"one's, who alone was served":       {one, s, many[:3], true},
		"one's, nobody was served":          {admission.Asker{}, s, many[:3], true},
		"one's, others were a minute ago":   {two, othersFor, many[:3], true},
		"of callers that show nothing":      {two, s, []end{broken(admission.Asker{}), broken(admission.Asker{}), broken(admission.Asker{})}, true},
		"of what generates nothing":         {two, s, []end{listing, listing, listing, listing}, false},
		"one's beside that":                 {two, s, []end{listing, broken(one), listing, broken(one), listing, broken(one)}, false},
		"two's beside that":                 {two, s, []end{broken(one), listing, broken(two), broken(one)}, true},
		"of that, nobody was served":        {admission.Asker{}, s, []end{listing, listing, listing}, true},
		"of that, others were a minute ago": {two, othersFor, []end{listing, listing, listing}, true},
	} {
		v := newViewed(t, twoServers())
		now := time.Now()
		hear := func(e end, at time.Time) {
			v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Route: e.route, Cause: e.cause, HeaderTime: e.headerTime, Endpoint: v.key(0), At: at}, e.of)
		}
		v.step(now.Add(-row.ago))
		hear(end{fleet.CauseOK, 0, "chat", row.served}, now.Add(-row.ago))
		for _, e := range row.ends {
			hear(e, now)
		}
		in, _ := v.step(now)
		if got := in.Pools[0].Endpoints[0].State == fleet.StateEjected; got != row.ejected {
			t.Errorf("%s: ejected %v; want %v", name, got, row.ejected)
		}
	}
}

// TestPeopleSeeWhatFails: beside what is closed.
func TestPeopleSeeWhatFails(t *testing.T) {
	row := admin.Pool{Endpoints: make([]admin.Endpoint, 2)}
	in := plan.PoolInput{Endpoints: []plan.EndpointInput{{MaxInFlight: 7, Failing: true}, {MaxInFlight: 8, Closed: true}}}
	showAdmission(&row, &in, &admission.PoolState{})
	if got := row.Endpoints[0]; got.Limit != 7 || !got.Failing || got.Closed {
		t.Errorf("the first is shown as %+v", got)
	}
	if got := row.Endpoints[1]; got.Limit != 8 || got.Failing || !got.Closed {
		t.Errorf("the second is shown as %+v", got)
	}
}
