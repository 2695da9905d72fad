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
	made, up := admission.Client{5}, admission.Client{6}
	// known lets another server of the pool have taken all but the made up.
	known := func(of *callers, begin time.Time) {
		other := callers{words: of.words}
		for _, one := range []admission.Client{a, b, c, d} {
			other.serves(&fleet.Outcome{At: begin.Add(-2 * takenLately)}, byKey(one))
		}
	}
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
		"the same was served some time ago":        {events{{0, 200, a, 0}, {takenLately, 429, a, 0}}, two, told, false},
		"the same was served, another was told":    {events{{0, 429, b, 0}, {0, 200, a, time.Millisecond}, {s, 429, a, 0}}, two << 1, told, false},
		"nobody else was there":                    {events{{0, 429, a, 0}}, two, told, false},
		"the same was served":                      {events{{0, 200, a, 0}, {s, 429, a, 0}}, 0, told, false},
		"another was served":                       {events{{0, 200, b, 0}, {s, 429, a, 0}}, 0, two, false},
		"another was served, and then the same":    {events{{0, 200, b, 0}, {0, 200, a, 0}, {s, 429, a, 0}}, 0, two, false},
		"another was served long ago":              {events{{0, 200, b, 0}, {60 * s, 429, a, 0}}, two, told, false},
		"another's long answer ends":               {events{{0, 200, b, 8 * s}, {s, 429, a, 0}}, 0, two, false},
		"another's answer of a minute ends":        {events{{0, 200, b, 60 * s}, {s, 429, a, 0}}, two, told, false},
		"another runs for a while":                 {events{{0, started, b, 0}, {takenAfter, 429, a, 0}}, 0, two, false},
		"another has just begun":                   {events{{0, started, b, 0}, {takenAfter - 1, 429, a, 0}}, two, told, false},
		"another ended in another way":             {events{{0, started, b, 0}, {s / 4, 0, b, 0}, {s, 429, a, 0}}, two, told, false},
		"another runs for a while, unheard":        {events{{0, started, b, 0}, {begunFor, 429, a, 0}}, two, told, false},
		"another runs for long":                    {events{{0, beats, b, 300 * s}, {s, 429, a, 0}}, 0, two, false},
		"another begins for long":                  {events{{0, beats, b, takenAfter - 1}, {s, 429, a, 0}}, two, told, false},
		"refusals take as long as another runs":    {events{{0, 429, a, s}, {0, started, b, 0}, {2*s - 1, 429, c, s}}, four, told, false},
		"refusals take half as long":               {events{{0, 429, a, s}, {0, started, b, 0}, {2 * s, 429, c, s}}, two, four, false},
		"another was told so too":                  {events{{0, 200, b, 0}, {0, 200, c, 0}, {s, 429, a, 0}, {s, 429, b, 0}}, two, two, false},
		"another was told so after that":           {events{{0, 200, c, 0}, {s, 429, a, 0}, {2 * s, 429, b, 0}}, two, four, false},
		"a third at once":                          {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {s, 429, c, 0}}, two, two, false},
		"a third that began before it was closed":  {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {3 * s, 429, c, 2 * s}}, two, two, false},
		"a third after that":                       {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {3 * s, 429, c, 0}}, four, four, false},
		"a third, and nobody was served":           {events{{s, 429, a, 0}, {2 * s, 429, b, 0}, {3 * s, 429, c, 0}}, eight, told, false},
		"the first of two comes again":             {events{{0, 200, d, 0}, {s, 429, a, 0}, {s, 429, b, 0}, {2 * s, 429, a, 0}}, 0, 0, true},
		"the first of three comes again":           {events{{0, 200, d, 0}, {s, 429, a, 0}, {2 * s, 429, b, 0}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, four, eight, false},
		"another was told so and served since":     {events{{0, 429, b, 0}, {s, 200, b, 0}, {s, 429, a, 0}}, 0, two, false},
		"an answer that began before it ends":      {events{{0, 200, c, 0}, {s, 429, b, 0}, {2 * s, 200, c, 2 * s}, {2 * s, 429, a, 0}}, two, four, false},
		"one that began since the first":           {events{{0, 429, b, 0}, {2 * s, 429, a, 0}, {2 * s, 200, c, s}, {2 * s, 429, d, 0}}, 0, two, false},
		"the same was told so before":              {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 429, a, 0}}, 0, 0, true},
		"it was before others were served":         {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 200, b, 0}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, 0, 0, true},
		"it was long before others were served":    {events{{0, 429, a, 0}, {80 * s, 200, b, 0}, {90 * s, 429, c, 0}, {92 * s, 429, a, 0}}, two, four, false},
		"it was served itself since":               {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 200, a, 0}, {3 * s, 429, c, 0}, {4 * s, 429, a, 0}}, 0, two, false},
		"what it began before was served":          {events{{0, 200, b, 0}, {10 * s, 429, a, 0}, {12 * s, 200, a, 11 * s}, {13 * s, 200, b, s}, {13 * s, 429, c, 0}, {14 * s, 429, a, 0}}, 0, 0, true},
		"what it began just before was served":     {events{{0, 200, b, 0}, {10 * s, 429, a, 0}, {12 * s, 200, a, 3 * s}, {13 * s, 200, b, s}, {13 * s, 429, c, 0}, {14 * s, 429, a, 0}}, 0, two, false},
		"two of one are refused at once":           {events{{0, 200, b, 0}, {10 * s, 429, a, 0}, {10 * s, 429, a, 0}}, 0, two, false},
		"the second began before the first ended":  {events{{0, 200, b, 0}, {10 * s, 429, a, 0}, {11 * s, 429, a, s}}, 0, two, false},
		"one that was never taken":                 {events{{0, 200, b, 0}, {s, 429, made, 0}}, 0, 0, false},
		"one that was never taken, again":          {events{{0, 200, b, 0}, {s, 429, made, 0}, {2 * s, 429, made, 0}}, 0, 0, true},
		"a second that was never taken":            {events{{0, 200, b, 0}, {s, 429, made, 0}, {2 * s, 429, up, 0}}, 0, 0, false},
		"a second that was once taken":             {events{{0, 200, b, 0}, {s, 429, made, 0}, {2 * s, 429, a, 0}}, 0, two, false},
		"a second that wasn't, after one that was": {events{{0, 200, b, 0}, {s, 429, a, 0}, {2 * s, 429, up, 0}}, 0, 0, false},
		"never taken, and nobody is of late":       {events{{0, 200, b, 0}, {takenLately, 429, made, 0}, {6 * s, 429, up, 0}}, two, four, false},
		"never taken, and nobody is":               {events{{s, 429, made, 0}, {2 * s, 429, up, 0}}, four, told, false},
	} {
		for _, others := range []int{0, 7} {
			alone := others == 0
			of := callers{words: &words{}}
			begin := time.Now()
			known(&of, begin)
			var got closing
			for _, e := range row.events {
				o := fleet.Outcome{Kind: fleet.AttemptEnded, ID: fmt.Sprint(e.of), Code: e.code, Duration: e.took, At: begin.Add(e.at), RetryAfter: 30 * s}
				switch e.code {
				case started:
					of.starts(&o, byKey(e.of))
				case beats:
					of.runs(&o, byKey(e.of))
				case http.StatusOK:
					of.ends(&o)
					of.serves(&o, byKey(e.of))
				case http.StatusTooManyRequests:
					of.ends(&o)
					got = of.closes(&o, e.of, beside{n: others})
				default:
					of.ends(&o)
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
	refusal := func(wait time.Duration) *fleet.Outcome {
		return &fleet.Outcome{Kind: fleet.AttemptEnded, Code: http.StatusTooManyRequests, RetryAfter: wait, At: begin}
	}
	served := func() *callers {
		of := &callers{words: &words{}}
		known(of, begin)
		of.serves(&fleet.Outcome{At: begin}, byKey(b))
		return of
	}
	nobodys := callers{words: &words{}}
	nobodys.serves(&fleet.Outcome{At: begin}, byKey(unknown))
	for name, row := range map[string]struct{ got, want closing }{
		"nobody knows whose it is":            {(&callers{words: &words{}}).closes(refusal(30*s), unknown, beside{}), closing{all: told, less: told, said: told}},
		"it isn't known whose it is":          {served().closes(refusal(30*s), unknown, beside{}), closing{all: two, less: two, guessed: true, said: told}},
		"it isn't known whose, for a second":  {served().closes(refusal(s), unknown, beside{}), closing{all: lone, less: lone, said: lone}},
		"nobody knows who was served":         {nobodys.closes(refusal(30*s), a, beside{}), closing{all: two, less: two, guessed: true, said: told, asker: told}},
		"it told no time":                     {served().closes(refusal(0), a, beside{}), closing{guessed: true, asker: lone}},
		"it told no time, nobody was served":  {(&callers{words: &words{}}).closes(refusal(0), a, beside{}), closing{all: lone, less: lone, guessed: true, asker: lone}},
		"it told a second, nobody was served": {(&callers{words: &words{}}).closes(refusal(s), a, beside{}), closing{all: lone, less: lone, said: lone, asker: lone}},
		"one of several":                      {(&callers{words: &words{}}).closes(refusal(30*s), a, beside{n: 7}), closing{all: told, less: two, said: told}},
		"one of several that tells more":      {served().closes(refusal(time.Hour), a, beside{n: 7}), closing{all: two, less: two, guessed: true}},
		"one of several, nobody was served":   {(&callers{words: &words{}}).closes(refusal(time.Hour), a, beside{n: 7}), closing{all: longestClosed - reopenEarly, less: two, guessed: true}},
	} {
		if row.got != row.want {
			t.Errorf("%s: it closes %+v; want %+v", name, row.got, row.want)
		}
	}
}

// TestWhomAServerTakesIsBounded, of those that it told to stay away too.
func TestWhomAServerTakesIsBounded(t *testing.T) {
	of := callers{words: &words{}}
	begin := time.Now()
	client := func(i int) admission.Client { return admission.Client{byte(i), byte(i >> 8), 1} }
	for i := range 3 * mostClients {
		at := begin.Add(time.Duration(i) * time.Millisecond)
		of.starts(&fleet.Outcome{ID: fmt.Sprint(i), At: at}, byKey(client(i)))
		of.starts(&fleet.Outcome{ID: fmt.Sprint("other ", i), At: at}, byKey(client(0)))
		of.closes(&fleet.Outcome{Code: 429, RetryAfter: 30 * time.Second, At: at}, client(i), beside{})
		of.serves(&fleet.Outcome{At: at}, byKey(client(i-1)))
		if len(of.begun) > mostBegun || len(of.words.clients) > mostClients || len(of.turned) > mostTurned || len(of.repeated) > mostRepeated {
			t.Fatalf("%d begun, %d clients, %d turned, %d repeated", len(of.begun), len(of.words.clients), len(of.turned), len(of.repeated))
		}
	}
	n := 0
	for _, b := range of.begun {
		if b.of == byKey(client(0)) {
			n++
		}
	}
	if n > 1 {
		t.Errorf("%d of one client", n)
	}
	// Of a client that changes its credential there are two, which leaves others room.
	changing := callers{words: &words{}}
	for i := range mostBegun {
		changing.starts(&fleet.Outcome{ID: fmt.Sprint(i), At: begin}, admission.Asker{Client: client(1), Credential: client(2 + i)})
	}
	changing.starts(&fleet.Outcome{ID: "other", At: begin}, byKey(client(200)))
	if n := len(changing.begun); n != 3 || changing.begun[2].id != "other" {
		t.Errorf("%+v begun of one client with many credentials, and another", changing.begun)
	}
	// Of some the one is forgotten of which the least counts yet.
	w := words{clients: map[admission.Client]*clientWords{}}
	for i := range mostClients {
		w.client(client(i)).tell(&of, begin, begin.Add(time.Duration(i)*time.Second))
	}
	for i := range 64 {
		w.client(client(mostClients+i)).tell(&of, begin, begin.Add(time.Hour))
	}
	kept := 0
	for i := range 64 {
		if w.clients[client(mostClients+i)] != nil {
			kept++
		}
	}
	if kept != 64 {
		t.Errorf("%d of 64 are known that count longest", kept)
	}
	// And those that a server took stay, however many are made up.
	w = words{}
	for i := range 64 {
		w.took(&of, client(i), begin.Add(-time.Hour))
		w.serves(client(i))
	}
	for i := range 8 * mostClients {
		w.client(client(64+i)).tell(&of, begin, begin.Add(time.Minute))
	}
	for i := range 64 {
		if w.clients[client(i)] == nil {
			t.Errorf("client %d was taken, and is forgotten", i)
		}
	}
	var one clientWords
	servers := make([]callers, 3*mostWords)
	for i := range servers {
		one.tell(&servers[i], begin, begin.Add(time.Duration(i)*time.Second))
	}
	if len(one.by) != mostWords || one.word(&servers[len(servers)-1]).from == nil || one.word(&servers[0]).from != nil {
		t.Errorf("%d servers' words are known", len(one.by))
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
			return v.scoring.outcome(o, byKey(of))
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
		tell(-2*takenLately, 0, 200, spent, 0) // it is not made up
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
			n = 2
		}
		if out != want || closed(2*s) != n {
			t.Errorf("%s: by the second it is kept out for %v, and %d are closed; want %v and %d", name, out, closed(2*s), want, n)
		}
		left := 0
		if !others {
			left = 1
		}
		if n := closed(2*s + 2*lone); n != left {
			t.Errorf("%s: %d are closed soon after", name, n)
		}
	}
}

// TestAnIdlePoolIsNotShutByOneKey: when both of its servers told one to stay away the last
// is asked by others as if it were alone, and the other one once that takes them.
func TestAnIdlePoolIsNotShutByOneKey(t *testing.T) {
	const (
		s    = time.Second
		told = 60*s - reopenEarly
	)
	for name, sheds := range map[string]bool{"takes others": false, "takes nobody": true} {
		v := newViewed(t, twoServers())
		begin := time.Now()
		tell := func(at time.Duration, server, code int, of byte) time.Duration {
			o := fleet.Outcome{Kind: fleet.AttemptEnded, Code: code, Cause: fleet.CauseThrottled, RetryAfter: 60 * s, Endpoint: v.key(server), At: begin.Add(at)}
			if code == http.StatusOK {
				o.Cause, o.RetryAfter = fleet.CauseOK, 0
			}
			return v.scoring.outcome(o, byKey(admission.Client{of}))
		}
		closed := func(at time.Duration) (of [2]bool) {
			in, _ := v.step(begin.Add(at))
			return [2]bool{in.Pools[0].Endpoints[0].Closed, in.Pools[0].Endpoints[1].Closed}
		}
		if out := tell(0, 0, 429, 1); out != 0 {
			t.Errorf("%s: by one server the key is kept out for %v", name, out)
		}
		if out := tell(s, 1, 429, 1); out != told-s {
			t.Errorf("%s: by both the key is kept out for %v; want %v", name, out, told-s)
		}
		at := s
		for i, wait := range []time.Duration{2 * lone, 4 * lone, 8 * lone, 8 * lone} {
			if a, b := closed(at+wait-1), closed(at+wait); a != [2]bool{true, true} || b != [2]bool{true, false} {
				t.Fatalf("%s: closed are %v, and then %v; want the second to open after %v", name, a, b, wait)
			}
			at += wait
			if !sheds {
				break
			}
			if out := tell(at, 1, 429, byte(2+i)); out != told {
				t.Errorf("%s: another key is kept out for %v; want %v", name, out, told)
			}
		}
		if sheds {
			// One server that is asked so often is enough: as the first is about to open, the
			// second closes as it says, and then the first counts as alone.
			tell(told-s, 1, 429, 8)
			tell(told, 0, 429, 9)
			if a, b := closed(told+8*lone-1), closed(told+8*lone); a != [2]bool{true, true} || b != [2]bool{false, true} {
				t.Errorf("%s: closed are %v, and then %v; want the first to open", name, a, b)
			}
			continue
		}
		tell(at, 1, 200, 2)
		if got := closed(at); got != [2]bool{} {
			t.Errorf("%s: closed are %v once the second takes another key", name, got)
		}
	}
}

// TestOneServerOfManyLimitsNobody: neither one that says no again, while others take the
// client, nor less than half of those in service, or as many as take it. All take others.
func TestOneServerOfManyLimitsNobody(t *testing.T) {
	const s = time.Second
	asker, other := admission.Client{1}, admission.Client{2}
	type event struct {
		at     time.Duration
		server int
		kind   fleet.OutcomeKind
		code   int
		took   time.Duration
	}
	const ended, beat = fleet.AttemptEnded, fleet.Heartbeat
	const silent = 3 // takes nobody else but long ago
	for name, row := range map[string]struct {
		events []event // of the asker; 0 fails
		drain  []int
		want   time.Duration // from the last one
	}{
		"twice at once":                          {[]event{{10 * s, 0, ended, 429, 0}, {10 * s, 0, ended, 429, 0}}, nil, 0},
		"again, and nobody took it":              {[]event{{10 * s, 0, ended, 429, 0}, {11 * s, 0, ended, 429, 0}}, nil, 30*s - reopenEarly},
		"again, and another takes it":            {[]event{{9 * s, 1, ended, 200, s}, {10 * s, 0, ended, 429, 0}, {11 * s, 0, ended, 429, 0}}, nil, 0},
		"again, and another took it long ago":    {[]event{{2 * s, 1, ended, 200, s}, {10 * s, 0, ended, 429, 0}, {11 * s, 0, ended, 429, 0}}, nil, 30*s - reopenEarly},
		"again, and another still runs it":       {[]event{{10 * s, 0, ended, 429, 0}, {12 * s, 1, beat, 0, 3 * s}, {12 * s, 0, ended, 429, 0}}, nil, 0},
		"one of four":                            {[]event{{10 * s, 0, ended, 429, 0}}, nil, 0},
		"two of four":                            {[]event{{10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, nil, 30*s - reopenEarly},
		"two of five":                            {[]event{{10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, nil, 0},
		"two of four, and another takes it":      {[]event{{9 * s, 2, ended, 200, s}, {10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, nil, 30*s - reopenEarly},
		"two of four, and two others take it":    {[]event{{9 * s, 2, ended, 200, s}, {9 * s, 3, ended, 200, s}, {10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, nil, 0},
		"two of four, that had just taken it":    {[]event{{9 * s, 0, ended, 200, 0}, {9 * s, 1, ended, 200, 0}, {10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, nil, 30*s - reopenEarly},
		"two of four, that take it in between":   {[]event{{10 * s, 0, ended, 429, 0}, {12 * s, 0, ended, 200, s}, {12 * s, 1, ended, 200, s}, {14 * s, 1, ended, 429, 0}}, nil, 26*s - reopenEarly},
		"two of four, the first takes none else": {[]event{{10 * s, silent, ended, 429, 0}, {11 * s, 0, ended, 429, 0}}, nil, 0},
		"two of four, the last takes none else":  {[]event{{10 * s, 0, ended, 429, 0}, {11 * s, silent, ended, 429, 0}}, nil, 0},
		"two of four, the first is over":         {[]event{{10 * s, 0, ended, 429, 0}, {45 * s, 1, ended, 429, 0}}, nil, 0},
		"two of four, the first took it since":   {[]event{{10 * s, 0, ended, 429, 0}, {12 * s, 0, ended, 200, s}, {20 * s, 1, ended, 429, 0}}, nil, 0},
		"the first took one that began before":   {[]event{{10 * s, 0, ended, 429, 0}, {12 * s, 0, ended, 200, 3 * s}, {20 * s, 1, ended, 429, 0}}, nil, 20*s - reopenEarly},
		"a third took it since":                  {[]event{{10 * s, 0, ended, 429, 0}, {12 * s, 2, ended, 200, s}, {20 * s, 1, ended, 429, 0}}, nil, 20*s - reopenEarly},
		"another took it, and one that began":    {[]event{{9 * s, 1, ended, 200, 0}, {9 * s, 2, ended, 200, 8 * s}, {10 * s, 0, ended, 429, 0}, {11 * s, 0, ended, 429, 0}}, nil, 0},
		"two of four, of which one drains":       {[]event{{10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, []int{3}, 30*s - reopenEarly},
		"two of four, of which the first drains": {[]event{{10 * s, 0, ended, 429, 0}, {10 * s, 1, ended, 429, 0}}, []int{0}, 0},
		"one of four, of which three drain":      {[]event{{10 * s, 0, ended, 429, 0}}, []int{1, 2, 3}, 30*s - reopenEarly},
		"one that drains, beside one":            {[]event{{10 * s, 0, ended, 429, 0}}, []int{0, 2, 3}, 0},
		"one of four, of which three fail":       {[]event{{9 * s, 1, ended, 0, 0}, {9 * s, 2, ended, 0, 0}, {9 * s, 3, ended, 0, 0}, {10 * s, 0, ended, 429, 0}}, nil, 30*s - reopenEarly},
	} {
		cfg := twoServers()
		p := &cfg.Pools[0]
		if name == "two of five" {
			p.Endpoints = append(p.Endpoints, fleet.Endpoint{Name: "five", Address: netip.MustParseAddrPort("10.0.0.3:1"), Capacity: 1})
		}
		for i := range 2 {
			e := p.Endpoints[i]
			e.Name, e.Address = e.Name+"2", netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), uint16(i+1))
			p.Endpoints = append(p.Endpoints, e)
		}
		for _, i := range row.drain {
			p.Endpoints[i].Drain = true
		}
		v := newViewed(t, cfg)
		begin := time.Now()
		var got time.Duration
		tell := func(e event, of admission.Client) {
			o := fleet.Outcome{Kind: e.kind, Route: "chat", ID: "x", Code: e.code, Duration: e.took, Endpoint: v.key(e.server), At: begin.Add(e.at)}
			switch e.code {
			case 200:
				o.Cause = fleet.CauseOK
			case 429:
				o.Cause, o.RetryAfter = fleet.CauseThrottled, 30*s
			default:
				if o.Kind == ended {
					o.Cause = fleet.CauseConnectFailed
				}
			}
			got = v.scoring.outcome(o, byKey(of))
		}
		for i := range p.Endpoints { // all take others
			tell(event{0, i, ended, 200, 0}, other)
		}
		said := map[int]bool{}
		for _, e := range row.events {
			if said[e.server] = said[e.server] || e.code == 429; e.code == 429 { // and do lately
				for i := range said {
					if i != silent && said[i] {
						tell(event{e.at - s, i, ended, 200, 0}, other)
					}
				}
			}
			times := 1
			if e.code == 0 && e.kind == ended {
				times = failStreak
			}
			for range times {
				tell(e, asker)
			}
		}
		if got != row.want {
			t.Errorf("%s: it is kept out for %v; want %v", name, got, row.want)
		}
	}
}

// TestANewConfigKeepsWhatServersToldClients, of those that stay.
func TestANewConfigKeepsWhatServersToldClients(t *testing.T) {
	const s = time.Second
	v := newViewed(t, twoServers())
	begin := time.Now()
	tell := func(at time.Duration, server, code int, of admission.Client) time.Duration {
		o := fleet.Outcome{Kind: fleet.AttemptEnded, Code: code, Cause: fleet.CauseThrottled, RetryAfter: 30 * s, Endpoint: v.key(server), At: begin.Add(at)}
		if code == http.StatusOK {
			o.Cause = fleet.CauseOK
		}
		return v.scoring.outcome(o, byKey(of))
	}
	for i := range 2 {
		tell(0, i, 200, admission.Client{2})
	}
	tell(s, 0, 429, admission.Client{1})
	v.reconfigure(twoServers(), nil)
	if out := tell(2*s, 1, 429, admission.Client{1}); out == 0 {
		t.Error("what the first server told is forgotten")
	}
}

// TestHeartbeatsShowWhomAServerTakes, of answers that take minutes.
func TestHeartbeatsShowWhomAServerTakes(t *testing.T) {
	const s = time.Second
	cfg := twoServers()
	cfg.Pools[0].Endpoints = cfg.Pools[0].Endpoints[:1]
	for _, beats := range []bool{true, false} {
		v := newViewed(t, cfg)
		begin := time.Now()
		o := fleet.Outcome{Kind: fleet.AttemptStarted, ID: "x", Attempt: 1, Endpoint: v.key(0), At: begin}
		v.scoring.outcome(o, byKey(admission.Client{2}))
		if beats {
			o.Kind, o.Duration, o.At = fleet.Heartbeat, 100*s, begin.Add(100*s)
			v.scoring.outcome(o, byKey(admission.Client{2}))
		}
		v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, ID: "y", Code: 429, Cause: fleet.CauseThrottled, RetryAfter: 30 * s, Endpoint: v.key(0), At: begin.Add(110 * s)}, byKey(admission.Client{1}))
		in, _ := v.step(begin.Add(110 * s))
		if closed := in.Pools[0].Endpoints[0].Closed; closed == beats {
			t.Errorf("heartbeats come %v: closed for others %v", beats, closed)
		}
	}
}

// TestOneQuickRefusalAfterSlowOnes: from then on half a second shows that an attempt is
// taken.
func TestOneQuickRefusalAfterSlowOnes(t *testing.T) {
	of := callers{words: &words{}}
	begin := time.Now()
	for _, took := range []time.Duration{10 * time.Second, 10 * time.Millisecond} {
		of.closes(&fleet.Outcome{Code: 429, Duration: took, At: begin}, admission.Client{1}, beside{})
	}
	of.starts(&fleet.Outcome{ID: "x", At: begin}, byKey(admission.Client{2}))
	if of.take(begin.Add(takenAfter)); len(of.begun) > 0 {
		t.Errorf("after %v it is still not known to be taken", takenAfter)
	}
}

// TestManyThatAreLimitedAgainShowThatAllAre, where nobody is taken for long.
func TestManyThatAreLimitedAgainShowThatAllAre(t *testing.T) {
	const s = time.Second
	for _, row := range []struct {
		n     int
		quiet time.Duration
		all   bool
	}{{mostRepeated - 1, takenLately, false}, {mostRepeated, takenLately, true}, {mostRepeated, takenLately - 1, false}} {
		of := callers{words: &words{}}
		begin := time.Now()
		var got closing
		tell := func(at time.Duration, i int) {
			got = of.closes(&fleet.Outcome{Code: 429, RetryAfter: 5 * s, At: begin.Add(at)}, admission.Client{byte(i + 1)}, beside{})
		}
		takes := func(at time.Duration) {
			of.serves(&fleet.Outcome{At: begin.Add(at)}, byKey(admission.Client{200}))
			of.serves(&fleet.Outcome{At: begin.Add(at)}, byKey(admission.Client{201}))
		}
		for i := range row.n {
			tell(s, i)
		}
		takes(2 * s)
		for i := range row.n {
			tell(2*s+row.quiet, i)
		}
		first := got
		tell(2*s+row.quiet, row.n) // another one
		if (got.all > 0) != row.all || first.all > 0 {
			t.Errorf("%d of them, nobody taken for %v: they close %v, and then %v; want all %v", row.n, row.quiet, first.all, got.all, row.all)
		}
	}
}

// TestTheRepeatedAreCountedSinceOneWasTaken, of the clients that are told to stay away.
func TestTheRepeatedAreCountedSinceOneWasTaken(t *testing.T) {
	const s = time.Second
	of := callers{words: &words{}}
	begin := time.Now()
	tell := func(at time.Duration, i int) {
		of.closes(&fleet.Outcome{Code: 429, RetryAfter: 5 * s, At: begin.Add(at)}, admission.Client{byte(i + 1)}, beside{})
	}
	takes := func(at time.Duration) { of.serves(&fleet.Outcome{At: begin.Add(at)}, byKey(admission.Client{200})) }
	for i := range mostRepeated {
		tell(s, i)
	}
	takes(2 * s)
	for i := range mostRepeated / 2 {
		tell(3*s, i)
	}
	takes(4 * s)
	for i := range mostRepeated / 2 {
		tell(4*s+takenLately, mostRepeated/2+i)
	}
	if len(of.repeated) != mostRepeated/2 || len(of.turned) > 0 {
		t.Errorf("%d were told so again since one was taken, and %d newly", len(of.repeated), len(of.turned))
	}
}

// TestServersThatTakeOthersOpenSooner: nobody knew of them when it told one to stay away.
func TestServersThatTakeOthersOpenSooner(t *testing.T) {
	const s = time.Second
	spent, other := admission.Client{1}, admission.Client{2}
	single := newViewed(t, twoServers())
	begin := time.Now()
	for i, e := range []fleet.Outcome{{Kind: fleet.AttemptStarted}, {Kind: fleet.AttemptStarted}, {Kind: fleet.AttemptEnded, Code: 429, Cause: fleet.CauseThrottled, RetryAfter: 30 * s}} {
		e.ID, e.Endpoint, e.At = fmt.Sprint(i/2), single.key(0), begin
		single.scoring.outcome(e, byKey(spent))
	}
	if in, _ := single.step(begin.Add(10 * s)); !in.Pools[0].Endpoints[0].Closed {
		t.Error("it is open, since it takes another request of the one that it told to stay away")
	}
	v := newViewed(t, twoServers())
	closed := func(at time.Duration) bool {
		in, _ := v.step(begin.Add(at))
		return in.Pools[0].Endpoints[0].Closed
	}
	v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, ID: "x", Endpoint: v.key(0), At: begin}, byKey(other))
	v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, ID: "y", Endpoint: v.key(0), At: begin}, byKey(spent))
	v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, ID: "y", Code: 429, Cause: fleet.CauseThrottled, RetryAfter: 30 * s, Endpoint: v.key(0), At: begin}, byKey(spent))
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

// TestOverloadIsNobodysOwn: a 529, or a 503 with a time to wait, closes a server for all,
// beside clients that it takes.
func TestOverloadIsNobodysOwn(t *testing.T) {
	const s = time.Second
	for _, code := range []int{fleet.StatusOverloaded, http.StatusServiceUnavailable} {
		v := newViewed(t, twoServers())
		begin := time.Now()
		v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Code: 200, Cause: fleet.CauseOK, Endpoint: v.key(0), At: begin}, byKey(admission.Client{2}))
		out := v.scoring.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Code: code, Cause: fleet.CauseServerError, RetryAfter: 30 * s, Endpoint: v.key(0), At: begin}, byKey(admission.Client{1}))
		in, _ := v.step(begin.Add(29 * s))
		if !in.Pools[0].Endpoints[0].Closed || out != 0 {
			t.Errorf("a %d closes it for 29 s: %v, and keeps its asker out for %v", code, in.Pools[0].Endpoints[0].Closed, out)
		}
	}
}

// TestWhatGeneratesNothingTellsNothing: a provider limits the counting of tokens, or lists
// its models, by itself.
func TestWhatGeneratesNothingTellsNothing(t *testing.T) {
	const s = time.Second
	cfg := twoServers()
	cfg.Pools[0].Endpoints = cfg.Pools[0].Endpoints[:1]
	v := newViewed(t, cfg)
	begin := time.Now()
	tell := func(at time.Duration, route string, kind fleet.OutcomeKind, code int, of admission.Client) time.Duration {
		o := fleet.Outcome{Kind: kind, Route: route, ID: "x", Code: code, Endpoint: v.key(0), At: begin.Add(at)}
		switch code {
		case 200:
			o.Cause = fleet.CauseOK
		case 429:
			o.Cause, o.RetryAfter = fleet.CauseThrottled, 30*s
		}
		return v.scoring.outcome(o, byKey(of))
	}
	closed := func(at time.Duration) bool {
		in, _ := v.step(begin.Add(at))
		return in.Pools[0].Endpoints[0].Closed
	}
	if out := tell(0, "chat/other", fleet.AttemptEnded, 429, admission.Client{}); out > 0 || closed(0) {
		t.Error("a 429 to what generates nothing closes the server")
	}
	tell(s, "chat", fleet.AttemptEnded, 429, admission.Client{})
	for _, kind := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.AttemptEnded, fleet.RequestEnded} {
		tell(40*s, "chat/other", kind, 200, admission.Client{})
	}
	if c := v.endpoints[v.key(0)].closed; !c.asked.IsZero() || !c.answered.IsZero() {
		t.Errorf("what generates nothing asks: %+v", c)
	}
}

// TestALostEndOfAnAttemptIsToldByTheRequests, which ended too.
func TestALostEndOfAnAttemptIsToldByTheRequests(t *testing.T) {
	cfg := twoServers()
	cfg.Pools[0].Endpoints = cfg.Pools[0].Endpoints[:1]
	v := newViewed(t, cfg)
	now := time.Now()
	for _, kind := range []fleet.OutcomeKind{fleet.AttemptStarted, fleet.RequestEnded} {
		v.scoring.outcome(fleet.Outcome{Kind: kind, Route: "chat", ID: "x", Attempt: 1, Code: 429, Cause: fleet.CauseThrottled, Endpoint: v.key(0), At: now}, byKey(admission.Client{1}))
	}
	if n := len(v.endpoints[v.key(0)].callers.begun); n != 0 {
		t.Errorf("%d of its attempts run", n)
	}
}

// TestWhoIsRefusedSlowlyMayBeMadeUp all the same: while its attempt runs it seems taken.
func TestWhoIsRefusedSlowlyMayBeMadeUp(t *testing.T) {
	const s = time.Second
	begin := time.Now()
	for _, row := range []struct {
		name   string
		shows  func(*callers, admission.Asker)
		closes bool
	}{
		{"nothing", func(*callers, admission.Asker) {}, false},
		{"an answer", func(of *callers, a admission.Asker) { of.serves(&fleet.Outcome{At: begin}, a) }, true},
		{"a heartbeat", func(of *callers, a admission.Asker) { of.runs(&fleet.Outcome{At: begin, Duration: 10 * s}, a) }, false},
		{"one of an answer", func(of *callers, a admission.Asker) {
			of.runs(&fleet.Outcome{At: begin, Duration: 10 * s, Code: 200}, a)
		}, true},
	} {
		of := callers{words: &words{}}
		slow := byKey(admission.Client{1})
		row.shows(&of, slow)
		closes := false
		for i := range 4 {
			at := begin.Add(time.Duration(i) * s)
			of.serves(&fleet.Outcome{At: at}, byKey(admission.Client{2}))
			of.starts(&fleet.Outcome{ID: "x", At: at}, slow)
			got := of.closes(&fleet.Outcome{Code: 429, RetryAfter: 30 * s, Duration: 700 * time.Millisecond, At: at.Add(700 * time.Millisecond)}, slow.Credential, beside{n: 1})
			closes = closes || got.all > 0
			of.ends(&fleet.Outcome{ID: "x"})
			of.refusedIn = 0 // others are refused quickly
		}
		if closes != row.closes {
			t.Errorf("known by %s it closes the server: %v", row.name, closes)
		}
	}
}

// byKey is who asked, where clients are told apart by their keys.
func byKey(c admission.Client) admission.Asker { return admission.Asker{Client: c, Credential: c} }
