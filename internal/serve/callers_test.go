package serve

import (
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestWhatOneClientIsToldShutsNobodyOut: a 429 may be for its asker alone. It tells to wait
// 30 s; the last event's closes for all so long, in a pool's only server, and in one of
// several.
func TestWhatOneClientIsToldShutsNobodyOut(t *testing.T) {
	const (
		s       = time.Second
		told    = 30*s - reopenEarly
		two     = 2 * lone
		four    = 4 * lone
		eight   = 8 * lone
		started = 1 // instead of a status
		beats   = 2
	)
	a, b, c, d, unknown := admission.Client{1}, admission.Client{2}, admission.Client{3}, admission.Client{4}, admission.Client{}
	type event struct {
		at   time.Duration
		code int
		of   admission.Client
		took time.Duration
	}
	type events []event
	for name, row := range map[string]struct {
		events events
		// only is for a pool's only server, among for one of several.
		only, among time.Duration
		// out is whether the asker is kept out, of one of several.
		out bool
	}{
		"nobody else was there":                   {events{{0, 429, a, 0}}, two, told, false},
		"the same was served":                     {events{{0, 200, a, 0}, {s, 429, a, 0}}, two, told, false},
		"another was served":                      {events{{0, 200, b, 0}, {s, 429, a, 0}}, 0, two, false},
		"another was served, and then the same":   {events{{0, 200, b, 0}, {0, 200, a, 0}, {s, 429, a, 0}}, 0, two, false},
		"another was served long ago":             {events{{0, 200, b, 0}, {60 * s, 429, a, 0}}, two, told, false},
		"another's long answer ends":              {events{{0, 200, b, 8 * s}, {s, 429, a, 0}}, 0, two, false},
		"another's answer of a minute ends":       {events{{0, 200, b, 60 * s}, {s, 429, a, 0}}, two, told, false},
		"another runs for a while":                {events{{0, started, b, 0}, {takenAfter, 429, a, 0}}, 0, two, false},
		"another has just begun":                  {events{{0, started, b, 0}, {takenAfter - 1, 429, a, 0}}, two, told, false},
		"another ended in another way":            {events{{0, started, b, 0}, {s / 4, 0, b, 0}, {s, 429, a, 0}}, two, told, false},
		"another runs for a while, unheard":       {events{{0, started, b, 0}, {begunFor, 429, a, 0}}, two, told, false},
		"another runs for long":                   {events{{0, beats, b, 300 * s}, {s, 429, a, 0}}, 0, two, false},
		"another begins for long":                 {events{{0, beats, b, takenAfter - 1}, {s, 429, a, 0}}, two, told, false},
		"refusals take as long as another runs":   {events{{0, 429, a, s}, {0, started, b, 0}, {2*s - 1, 429, c, s}}, four, told, false},
		"refusals take half as long":              {events{{0, 429, a, s}, {0, started, b, 0}, {2 * s, 429, c, s}}, two, four, false},
		"another was told so too":                 {events{{0, 200, b, 0}, {0, 200, c, 0}, {s, 429, a, 0}, {s, 429, b, 0}}, two, two, false},
		"another was told so after that":          {events{{0, 200, c, 0}, {s, 429, a, 0}, {2 * s, 429, b, 0}}, two, four, false},
		"a third at once":                         {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {s, 429, c, 0}}, two, two, false},
		"a third that began before it was closed": {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {3 * s, 429, c, 2 * s}}, two, two, false},
		"a third after that":                      {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {3 * s, 429, c, 0}}, four, four, false},
		"a third, and nobody was served":          {events{{s, 429, a, 0}, {2 * s, 429, b, 0}, {3 * s, 429, c, 0}}, eight, told, false},
		"the first of two comes again":            {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {2 * s, 429, a, 0}}, 0, 0, true},
		"the first of three comes again":          {events{{0, 200, d, 0}, {s, 429, a, 0}, {2 * s, 429, b, 0}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, four, eight, false},
		"another was told so and served since":    {events{{0, 429, b, 0}, {s, 200, b, 0}, {s, 429, a, 0}}, 0, two, false},
		"an answer that began before it ends":     {events{{0, 200, c, 0}, {s, 429, b, 0}, {2 * s, 200, c, 2 * s}, {2 * s, 429, a, 0}}, two, four, false},
		"one that began since the first":          {events{{0, 429, b, 0}, {2 * s, 429, a, 0}, {2 * s, 200, c, s}, {2 * s, 429, d, 0}}, 0, two, false},
		"the same was told so before":             {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 429, a, 0}}, 0, 0, true},
		"it was before others were served":        {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 200, b, 0}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, 0, 0, true},
		"it was long before others were served":   {events{{0, 429, a, 0}, {80 * s, 200, b, 0}, {90 * s, 429, c, 0}, {92 * s, 429, a, 0}}, two, four, false},
		"it was served itself since":              {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 200, a, 0}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, two, four, false},
		"what it began before was served":         {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 200, a, 2 * s}, {3 * s, 200, b, s}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, 0, 0, true},
	} {
		for _, alone := range []bool{true, false} {
			var of callers
			begin := time.Now()
			var got closing
			for _, e := range row.events {
				o := fleet.Outcome{Kind: fleet.AttemptEnded, ID: fmt.Sprint(e.of), Code: e.code, Duration: e.took, At: begin.Add(e.at), RetryAfter: 30 * s}
				switch e.code {
				case started:
					of.starts(&o, e.of)
				case beats:
					of.runs(&o, e.of)
				case http.StatusOK:
					of.ends(&o)
					of.serves(&o, e.of)
				default:
					of.ends(&o)
					got = of.closes(&o, e.of, alone)
				}
			}
			all, out := row.among, row.out
			if alone {
				all, out = row.only, true
			}
			if got.all != all || (got.asker > 0) != out || out && got.asker != told || got.said != told || all > 0 && got.guessed != (all != told) {
				t.Errorf("%s, alone %v: it closes %+v; want all for %v, and the asker %v", name, alone, got, all, out)
			}
		}
	}

	begin := time.Now()
	refusal := func(code int, wait time.Duration) *fleet.Outcome {
		return &fleet.Outcome{Kind: fleet.AttemptEnded, Code: code, RetryAfter: wait, At: begin}
	}
	served := func() *callers {
		of := new(callers)
		of.serves(&fleet.Outcome{At: begin}, b)
		return of
	}
	believed := closing{all: told, less: told, said: told}
	for name, got := range map[string]closing{
		"it isn't known whose it is":  served().closes(refusal(429, 30*s), unknown, true),
		"a server that is overloaded": served().closes(refusal(529, 30*s), a, true),
		"one that is unavailable":     served().closes(refusal(503, 30*s), a, true),
	} {
		if got != believed {
			t.Errorf("%s: it closes %+v; want %+v", name, got, believed)
		}
	}
	var nobodys callers
	nobodys.serves(&fleet.Outcome{At: begin}, unknown)
	for name, row := range map[string]struct{ got, want closing }{
		"nobody knows who was served":          {nobodys.closes(refusal(429, 30*s), a, true), closing{all: two, less: two, guessed: true, said: told, asker: told}},
		"it told no time":                      {served().closes(refusal(429, 0), a, true), closing{guessed: true, asker: lone}},
		"it told no time, nobody was served":   {new(callers).closes(refusal(429, 0), a, true), closing{all: lone, less: lone, guessed: true, asker: lone}},
		"it told a second, nobody was served":  {new(callers).closes(refusal(429, s), a, true), closing{all: lone, less: lone, said: lone, asker: lone}},
		"one of several":                       {new(callers).closes(refusal(429, 30*s), a, false), closing{all: told, less: two, said: told}},
		"one of several that tells more":       {served().closes(refusal(429, time.Hour), a, false), closing{all: two, less: two, guessed: true}},
		"one of several, nobody was served":    {new(callers).closes(refusal(429, time.Hour), a, false), closing{all: longestClosed - reopenEarly, less: two, guessed: true}},
		"a server that says no to one request": {served().closes(refusal(503, 0), a, true), closing{guessed: true}},
	} {
		if row.got != row.want {
			t.Errorf("%s: it closes %+v; want %+v", name, row.got, row.want)
		}
	}
}

// TestWhomAServerTakesIsBounded, of those that it told to stay away too.
func TestWhomAServerTakesIsBounded(t *testing.T) {
	var of callers
	begin := time.Now()
	client := func(i int) admission.Client { return admission.Client{byte(i), byte(i >> 8), 1} }
	for i := range 1000 {
		at := begin.Add(time.Duration(i) * time.Millisecond)
		of.starts(&fleet.Outcome{ID: fmt.Sprint(i), At: at}, client(i))
		of.starts(&fleet.Outcome{ID: fmt.Sprint("other ", i), At: at}, client(0))
		of.closes(&fleet.Outcome{Code: 429, RetryAfter: time.Duration(1+i%50) * time.Second, At: at}, client(i), true)
		if len(of.begun) > mostBegun || len(of.spent) > mostSpent || len(of.turned) > mostTurned {
			t.Fatalf("%d begun, %d spent, %d turned", len(of.begun), len(of.spent), len(of.turned))
		}
	}
	if of.toldUntil(client(949)).IsZero() || !of.toldUntil(client(0)).IsZero() {
		t.Error("it knows one that was told a second and not one that was told fifty")
	}
	n := 0
	for _, b := range of.begun {
		if b.of == client(0) {
			n++
		}
	}
	if n > 1 {
		t.Errorf("%d of one client", n)
	}
}

// TestTheLastTwoClientsAreKnown, and when it was, whichever is told first.
func TestTheLastTwoClientsAreKnown(t *testing.T) {
	const s = time.Second
	one, two, three := admission.Client{1}, admission.Client{2}, admission.Client{3}
	begin := time.Now()
	var last clients
	last.note(one, begin)
	last.note(two, begin.Add(-s))
	last.note(three, begin.Add(-2*s))
	last.note(one, begin.Add(-3*s))
	if last.besides(one) != begin.Add(-s) || last.besides(two) != begin || last.besides(three) != begin {
		t.Errorf("%+v", last)
	}
	last.note(two, begin.Add(s))
	if last.besides(two) != begin || last.besides(one) != begin.Add(s) {
		t.Errorf("%+v", last)
	}
}

// TestWhoWasServedIsKnown in whichever order Envoy's two logs come: then another's 429 keeps
// that one out alone.
func TestWhoWasServedIsKnown(t *testing.T) {
	one, two := admission.Client{1}, admission.Client{2}
	attempt := fleet.Outcome{Kind: fleet.AttemptEnded, Cause: fleet.CauseOK, Code: 200, HeaderTime: time.Millisecond, Duration: time.Millisecond}
	request := fleet.Outcome{Kind: fleet.RequestEnded, Cause: fleet.CauseOK, Code: 200}
	refused := fleet.Outcome{Kind: fleet.AttemptEnded, Cause: fleet.CauseThrottled, Code: 429, RetryAfter: 30 * time.Second}
	ended := fleet.Outcome{Kind: fleet.RequestEnded, Cause: fleet.CauseThrottled, Code: 429}
	for name, order := range map[string][2][]fleet.Outcome{
		"attempts first": {{attempt, request}, {refused, ended}},
		"requests first": {{request, attempt}, {ended, refused}},
	} {
		r := newRuns(t, Options{})
		alone := fleet.EndpointKey{Pool: "spare", Address: netip.MustParseAddrPort("127.0.0.1:1004")}
		for i, of := range []admission.Client{two, one} {
			id := r.enterAs(t, of, alone)
			for _, o := range order[i] {
				o.Node, o.ID, o.Attempt, o.Route, o.Endpoint, o.At = "n", id, 1, "chat", alone, r.now
				r.outcome(o)
			}
		}
		inputs, _ := r.scoring.step(r.now)
		for _, p := range inputs.Pools {
			for _, e := range p.Endpoints {
				if e.Closed {
					t.Errorf("%s: %s is closed for all", name, e.Address)
				}
			}
		}
		for of, enters := range map[admission.Client]bool{one: false, two: true} {
			a := admission.Ask{ID: "1718924567123-007-9999", Route: "chat", Pool: "spare", Client: of, Level: 7, Class: fleet.ClassInteractive, Output: 4096, At: r.now}
			if v := r.gate.Admit(&a); v.Admitted != enters || !enters && v.Reason != admission.ReasonServerLimit {
				t.Errorf("%s: client %d is told %+v", name, of[0], v)
			}
		}
	}
}

// TestAKeyThatAllServersLimitClosesNone but for a moment: of two servers each tells it to
// stay away, and takes others.
func TestAKeyThatAllServersLimitClosesNone(t *testing.T) {
	const s = time.Second
	spent, other := admission.Client{1}, admission.Client{2}
	for name, others := range map[string]bool{"others are served": true, "nobody else is": false} {
		v := newViewed(t, twoServers())
		begin := time.Now()
		tell := func(at time.Duration, server, code int, of admission.Client, wait time.Duration) time.Duration {
			o := fleet.Outcome{Kind: fleet.AttemptEnded, Code: code, Cause: fleet.CauseThrottled, RetryAfter: wait, Endpoint: v.key(server), At: begin.Add(at)}
			if code == http.StatusOK {
				o.Cause = fleet.CauseOK
			}
			return v.scoring.outcome(o, of)
		}
		closed := func(at time.Duration) (n int) {
			in, _ := v.step(begin.Add(at))
			for _, e := range in.Pools[0].Endpoints {
				if e.Closed {
					n++
				}
			}
			return n
		}
		if others {
			tell(0, 0, 200, other, 0)
			tell(0, 1, 200, other, 0)
		}
		if out := tell(s, 0, 429, spent, 20*s); out != 0 || closed(s) != 1 {
			t.Errorf("%s: by the first it is kept out for %v, and %d are closed; want one for all", name, out, closed(s))
		}
		out, n := tell(2*s, 1, 429, spent, 30*s), 1
		want := 19*s - reopenEarly // when the first takes it again
		if !others {
			want, n = 0, 2
		}
		if out != want || closed(2*s) != n {
			t.Errorf("%s: by the second it is kept out for %v, and %d are closed; want %v and %d", name, out, closed(2*s), want, n)
		}
		if n := closed(4 * s); others != (n == 0) {
			t.Errorf("%s: %d are closed 3 s after the first", name, n)
		}
	}
}

// TestServersThatTakeOthersOpenSooner: nobody knew of them when it told one to stay away.
func TestServersThatTakeOthersOpenSooner(t *testing.T) {
	const s = time.Second
	spent, other := admission.Client{1}, admission.Client{2}
	v := newViewed(t, twoServers())
	begin := time.Now()
	closed := func(at time.Duration) bool {
		in, _ := v.step(begin.Add(at))
		return in.Pools[0].Endpoints[0].Closed
	}
	v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, ID: "x", Endpoint: v.key(0), At: begin}, other)
	v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, ID: "y", Endpoint: v.key(0), At: begin}, spent)
	v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, ID: "y", Code: 429, Cause: fleet.CauseThrottled, RetryAfter: 30 * s, Endpoint: v.key(0), At: begin}, spent)
	for _, row := range []struct {
		at   time.Duration
		want bool
	}{{takenAfter - 1, true}, {2*lone - 1, true}, {2 * lone, false}} {
		if got := closed(row.at); got != row.want {
			t.Errorf("after %v it is closed: %v", row.at, got)
		}
	}
	if got := v.endpoints[v.key(0)].closed; got.said != begin.Add(30*s-reopenEarly) || !got.guessed {
		t.Errorf("%+v", got)
	}
}
