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
			g.outcome(&o, toldBy(&o))
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

// TestGuessesEndWhenTheServerSaid, at the latest, and are shorter where it takes others.
func TestGuessesEndWhenTheServerSaid(t *testing.T) {
	const s = time.Second
	begin := time.Now()
	end := fleet.Outcome{Kind: fleet.AttemptEnded, Code: http.StatusTooManyRequests, At: begin}
	var c closure
	c.outcome(&end, closing{all: 2 * s, less: 2 * s, guessed: true, said: 4 * s})
	if got := c.open(); got != begin.Add(4*s+reopenEarly) {
		t.Errorf("it opens after %v", got.Sub(begin))
	}
	ask := fleet.Outcome{Kind: fleet.AttemptStarted, ID: "x", At: begin.Add(3 * s)}
	c.outcome(&ask, closing{})
	if got := c.open(); got != begin.Add(3*s+reopenEarly) {
		t.Errorf("asked after 3 s it opens after %v", got.Sub(begin))
	}
	c = closure{}
	c.outcome(&end, closing{all: 2 * s, less: 2 * s, guessed: true, said: 20 * s})
	if got := c.open(); got != begin.Add(2*s+unasked) {
		t.Errorf("unasked it opens after %v", got.Sub(begin))
	}
	c.outcome(&end, closing{all: 5 * s, less: 5 * s, guessed: true}) // says no more
	c.outcome(&end, closing{all: s, less: s, said: s})
	if c.said != begin.Add(20*s) || c.until != begin.Add(5*s) {
		t.Errorf("%+v", c)
	}

	c = closure{}
	c.outcome(&end, closing{all: 10 * s, less: 0, said: 10 * s})
	c.outcome(&end, closing{all: 8 * s, less: 3 * s, said: 8 * s})
	c.doubt(begin.Add(s))
	if c.until != begin.Add(3*s) || !c.guessed || !c.closed(begin.Add(2*s)) {
		t.Errorf("by one that it takes: %+v", c)
	}
	c.doubt(begin.Add(2 * s))
	if c.until != begin.Add(3*s) {
		t.Errorf("by another: %+v", c)
	}
	c.outcome(&end, closing{all: 10 * s, less: 10 * s, said: 10 * s}) // it is full, whoever asks
	c.doubt(begin.Add(4 * s))
	if c.until != begin.Add(10*s) || c.guessed {
		t.Errorf("of a server that is full: %+v", c)
	}
	c.doubt(begin.Add(20 * s))
	if c.until != begin.Add(10*s) {
		t.Errorf("of one that is open: %+v", c)
	}
	c = closure{}
	c.outcome(&end, closing{all: 10 * s, less: 0, said: 10 * s})
	c.doubt(begin.Add(s))
	if c.until != begin.Add(s) || c.closed(begin.Add(s)) || c.limit(64, 0, begin.Add(s)) != 1 {
		t.Errorf("it takes all others: %+v, with room for %d", c, c.limit(64, 0, begin.Add(s)))
	}
}

// TestPeopleSeeForHowLongAnEndpointIsClosed, and nothing of one that isn't.
func TestPeopleSeeForHowLongAnEndpointIsClosed(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	s.scoring.outcome(fleet.Outcome{
		Kind: fleet.AttemptEnded, Code: http.StatusTooManyRequests, Cause: fleet.CauseThrottled, RetryAfter: 30 * time.Second, At: now,
		Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")},
	}, admission.Asker{})
	s.step(now.Add(10 * time.Second))
	if rows := s.Fleet().Pools[0].Endpoints; !rows[0].Closed || rows[0].ClosedFor != (20*time.Second-reopenEarly).Seconds() || rows[1].Closed || rows[1].ClosedFor != 0 {
		t.Errorf("%+v", rows[:2])
	}
}
