package serve

import (
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc/retryafter"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestEndpointsOpenInSteps: an endpoint said no at 0, and then what a script tells; its
// limit at times after that, in ms. −1 is closed.
func TestEndpointsOpenInSteps(t *testing.T) {
	type event struct {
		at   time.Duration
		kind fleet.OutcomeKind
		code int
		wait time.Duration
		id   string
	}
	const ms = time.Millisecond
	const started, ended = fleet.AttemptStarted, fleet.AttemptEnded
	no := event{0, ended, http.StatusTooManyRequests, 0, "before"}
	minute := event{0, ended, http.StatusTooManyRequests, time.Minute, "before"}
	absurd := event{0, ended, http.StatusTooManyRequests, retryafter.Max, "before"}
	told := event{0, ended, http.StatusServiceUnavailable, 2 * time.Second, "before"}
	for name, row := range map[string]struct {
		limit  int32
		events []event
		want   map[time.Duration]int32
	}{
		"it never said no":                      {64, nil, map[time.Duration]int32{0: 64}},
		"an answer that is no no":               {64, []event{{0, ended, 503, 0, "x"}, {0, started, 0, 0, "x"}}, map[time.Duration]int32{0: 64}},
		"it said for how long":                  {64, []event{told}, map[time.Duration]int32{1849 * ms: -1, 1850 * ms: 1, 1999 * ms: 1, 2000 * ms: 16, 2100 * ms: 32, 2200 * ms: 64, time.Hour: 64}},
		"it said for a minute":                  {64, []event{minute}, map[time.Duration]int32{59849 * ms: -1, 59850 * ms: 1, 60 * time.Second: 16}},
		"it said longer than is believed":       {64, []event{absurd}, map[time.Duration]int32{59849 * ms: -1, 59850 * ms: 1, 62849 * ms: 1, 62850 * ms: 16}},
		"it said so, and one asks":              {64, []event{absurd, {time.Minute, started, 0, 0, "x"}, {time.Minute + 50*ms, ended, 200, 0, "x"}}, map[time.Duration]int32{time.Minute: 1, time.Minute + 50*ms: 16}},
		"nobody asks":                           {64, []event{no}, map[time.Duration]int32{849 * ms: -1, 850 * ms: 1, 3849 * ms: 1, 3850 * ms: 16, 4050 * ms: 64}},
		"one asks, and nothing is heard of it":  {64, []event{no, {1000 * ms, started, 0, 0, "x"}, {1100 * ms, started, 0, 0, "x"}}, map[time.Duration]int32{1149 * ms: 1, 1150 * ms: 16, 1250 * ms: 32, 1350 * ms: 64}},
		"one asks and is answered":              {64, []event{no, {900 * ms, started, 0, 0, "x"}, {950 * ms, ended, 200, 0, "x"}, {960 * ms, ended, 200, 0, "x"}}, map[time.Duration]int32{949 * ms: 1, 950 * ms: 16, 1050 * ms: 32, 1150 * ms: 64}},
		"one asks and is told no":               {64, []event{no, {900 * ms, started, 0, 0, "x"}, {950 * ms, ended, 429, 0, "x"}}, map[time.Duration]int32{1799 * ms: -1, 1800 * ms: 1, 4799 * ms: 1, 4800 * ms: 16}},
		"one that began before shows nothing":   {64, []event{no, {100 * ms, started, 0, 0, "x"}, {500 * ms, ended, 200, 0, "x"}}, map[time.Duration]int32{850 * ms: 1, 3849 * ms: 1}},
		"a connection that failed is no answer": {64, []event{no, {900 * ms, started, 0, 0, "x"}, {910 * ms, ended, 0, 0, "x"}}, map[time.Duration]int32{1049 * ms: 1, 1050 * ms: 16}},
		"an end of another one shows nothing":   {64, []event{no, {900 * ms, started, 0, 0, "x"}, {910 * ms, ended, 200, 0, "y"}}, map[time.Duration]int32{1049 * ms: 1, 1050 * ms: 16}},
		"one asks and is told no, alone":        {64, []event{no, {900 * ms, started, 0, 0, "x"}, {950 * ms, ended, 503, 0, "x"}}, map[time.Duration]int32{1049 * ms: 1, 3849 * ms: 1, 3850 * ms: 16}},
		"another asks after it":                 {64, []event{no, {900 * ms, started, 0, 0, "x"}, {950 * ms, ended, 503, 0, "x"}, {1000 * ms, started, 0, 0, "y"}}, map[time.Duration]int32{1149 * ms: 1, 1150 * ms: 16}},
		"one asks and is told no, for a moment": {64, []event{no, {900 * ms, started, 0, 0, "x"}, {950 * ms, ended, 429, 100 * ms, "x"}}, map[time.Duration]int32{999 * ms: -1, 1000 * ms: 1, 1150 * ms: 16}},
		"an answer to one that began before":    {64, []event{no, {900 * ms, ended, 200, 0, "x"}}, map[time.Duration]int32{3849 * ms: 1}},
		"a shorter wait later opens nothing":    {64, []event{told, {50 * ms, ended, 429, 200 * ms, "x"}}, map[time.Duration]int32{1849 * ms: -1, 2000 * ms: 16}},
		"a small limit":                         {3, []event{told}, map[time.Duration]int32{1850 * ms: 1, 2000 * ms: 1, 2100 * ms: 2, 2200 * ms: 3}},
		"no limit":                              {0, []event{told}, map[time.Duration]int32{1850 * ms: 0}},
	} {
		var g closure
		begin := time.Now()
		for _, e := range row.events {
			o := fleet.Outcome{Kind: e.kind, Code: e.code, RetryAfter: e.wait, ID: e.id, At: begin.Add(e.at)}
			g.outcome(&o, new(tracker).closes(&o, admission.Client{}, true))
		}
		for after, want := range row.want {
			now := begin.Add(after)
			got := g.limit(row.limit, 0, now)
			if g.closed(now) {
				if got != row.limit {
					t.Errorf("%s: a limit of %d while it is closed; want %d", name, got, row.limit)
				}
				got = -1
			}
			if got != want {
				t.Errorf("%s, after %v: %d; want %d", name, after, got, want)
			}
		}
	}
}

// TestWhatRanBeforeKeepsNobodyFromAsking: a server that said no goes on with what it
// has, and one more is let in to ask, then a quarter of its limit beside it.
func TestWhatRanBeforeKeepsNobodyFromAsking(t *testing.T) {
	begin := time.Now()
	g := closure{until: begin}
	for _, row := range []struct {
		after    time.Duration
		inFlight int32
		want     int32
	}{{0, 30, 31}, {50 * time.Millisecond, 31, 31}, {reopenEarly, 31, 46}, {reopenEarly + openStep, 20, 62}, {reopenEarly + 2*openStep, 20, 64}} {
		if got := g.limit(64, row.inFlight, begin.Add(row.after)); got != row.want {
			t.Errorf("%v after it opens, with %d in flight: %d; want %d", row.after, row.inFlight, got, row.want)
		}
	}
	full := closure{until: begin}
	if got := full.limit(8, 12, begin); got != 8 {
		t.Errorf("a limit of %d where 12 run; want its own", got)
	}
}

// TestOpeningIsNoRisk: a pool's limit is what it was, of which a part is closed.
func TestOpeningIsNoRisk(t *testing.T) {
	s := newViewed(t, twoServers())
	inputs, _ := s.step(time.Now())
	whole := s.poolViews(time.Now(), inputs.Pools)[0]
	limit := inputs.Pools[0].Endpoints[0].MaxInFlight
	now := time.Now()
	s.endpoints[s.key(0)].closed.until = now.Add(-reopenEarly)
	inputs, _ = s.step(now)
	view := s.poolViews(now, inputs.Pools)[0]
	if got := inputs.Pools[0].Endpoints[0]; got.Closed || got.MaxInFlight != limit/4 {
		t.Errorf("while it opens: %+v of a limit of %d", got, limit)
	}
	if view.Limit != whole.Limit || view.Closed != float64(limit-limit/4) || view.Places != whole.Places-int(limit-limit/4) {
		t.Errorf("while it opens the pool is %+v; it was %+v", view, whole)
	}
}

// TestWhatOneClientIsToldShutsNobodyOut: a 429 may be for its asker alone.
func TestWhatOneClientIsToldShutsNobodyOut(t *testing.T) {
	const s = time.Second
	one, two, three, four, unknown := admission.Client{1}, admission.Client{2}, admission.Client{3}, admission.Client{4}, admission.Client{}
	type event struct {
		at    time.Duration
		code  int
		asker admission.Client
		took  time.Duration
	}
	told := 30*s - reopenEarly
	all := closing{all: told}
	both := func(all time.Duration) closing { return closing{all: all, asker: told, guessed: true} }
	for name, row := range map[string]struct {
		events []event // the last one counts
		want   closing
	}{
		"nobody else was there":                 {[]event{{0, 429, one, 0}}, all},
		"the same was served":                   {[]event{{0, 200, one, 0}, {s, 429, one, 0}}, all},
		"another was served":                    {[]event{{0, 200, two, 0}, {s, 429, one, 0}}, both(0)},
		"another was served, and then the same": {[]event{{0, 200, two, 0}, {0, 200, one, 0}, {s, 429, one, 0}}, both(0)},
		"another was served long ago":           {[]event{{0, 200, two, 0}, {60 * s, 429, one, 0}}, all},
		"another's long answer ends":            {[]event{{0, 200, two, 8 * s}, {s, 429, one, 0}}, both(0)},
		"another's answer of a minute ends":     {[]event{{0, 200, two, 60 * s}, {s, 429, one, 0}}, all},
		"another was told so too":               {[]event{{0, 200, two, 0}, {0, 200, three, 0}, {s, 429, one, 0}, {s, 429, two, 0}}, both(2 * lone)},
		"and a third":                           {[]event{{0, 200, four, 0}, {s, 429, one, 0}, {s, 429, two, 0}, {s, 429, three, 0}}, both(4 * lone)},
		"another was told so and served since":  {[]event{{0, 429, two, 0}, {s, 200, two, 0}, {s, 429, one, 0}}, both(0)},
		"an answer that began before it ends":   {[]event{{0, 200, three, 0}, {s, 429, two, 0}, {2 * s, 200, three, 2 * s}, {2 * s, 429, one, 0}}, both(2 * lone)},
		"one that began since the first":        {[]event{{0, 429, two, 0}, {2 * s, 429, one, 0}, {2 * s, 200, three, s}, {2 * s, 429, one, 0}}, both(0)},
		"the same was told so before":           {[]event{{0, 200, two, 0}, {s, 429, one, 0}, {2 * s, 429, one, 0}}, both(0)},
		"it isn't known whose it is":            {[]event{{0, 200, two, 0}, {s, 429, unknown, 0}}, all},
		"nobody knows who was served":           {[]event{{0, 200, unknown, 0}, {s, 429, one, 0}}, all},
		"a server that is overloaded":           {[]event{{0, 200, two, 0}, {s, 529, one, 0}}, closing{all: told}},
		"one that is unavailable":               {[]event{{0, 200, two, 0}, {s, 503, one, 0}}, closing{all: told}},
	} {
		var tr tracker
		begin := time.Now()
		var got closing
		for _, e := range row.events {
			o := fleet.Outcome{Kind: fleet.AttemptEnded, Code: e.code, Duration: e.took, At: begin.Add(e.at)}
			if e.code == 200 {
				tr.serves(&o, e.asker)
				continue
			}
			o.RetryAfter = 30 * s
			got = tr.closes(&o, e.asker, true)
		}
		if got != row.want {
			t.Errorf("%s: it closes %+v; want %+v", name, got, row.want)
		}
	}
	var tr tracker
	begin := time.Now()
	tr.serves(&fleet.Outcome{At: begin}, admission.Client{100})
	for i := range 20 { // a server that refuses all closes as long as it says
		o := fleet.Outcome{Kind: fleet.AttemptEnded, Code: 429, RetryAfter: 30 * s, At: begin}
		got := tr.closes(&o, admission.Client{byte(i + 1)}, true)
		if i >= mostTurned-1 && got != (closing{all: told, asker: told}) {
			t.Errorf("number %d: it closes %+v; want all for %v", i, got, told)
		}
	}
	tr = tracker{}
	o := fleet.Outcome{Kind: fleet.AttemptEnded, Cause: fleet.CauseOK, At: begin}
	tr.serves(&o, two)
	o = fleet.Outcome{Kind: fleet.AttemptEnded, Code: 429, At: begin}
	if got := tr.closes(&o, one, true); got != (closing{asker: lone, guessed: true}) {
		t.Errorf("without a time to wait it closes %+v; want the pool for the asker, a second", got)
	}
	o.RetryAfter = 30 * s
	if got := tr.closes(&o, one, false); got != (closing{all: told}) {
		t.Errorf("one server of several closes %+v; want itself for all", got)
	}
	var c clients
	c.note(one, begin)
	c.note(two, begin.Add(-s))
	c.note(three, begin.Add(-2*s))
	c.note(one, begin.Add(-3*s))
	if c.besides(one) != begin.Add(-s) || c.besides(two) != begin || c.besides(three) != begin {
		t.Errorf("%+v", c)
	}
	c.note(two, begin.Add(s))
	if c.besides(two) != begin || c.besides(one) != begin.Add(s) {
		t.Errorf("%+v", c)
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
