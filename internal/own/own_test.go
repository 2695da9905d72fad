package own

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestEndsCountStreaksAndRates(t *testing.T) {
	e := NewEnds(200 * time.Millisecond)
	end := func(cause fleet.Cause, code int) {
		e.Add(cause, code, 0, admission.Client{})
	}
	end(fleet.CauseServerError, 500)
	end(fleet.CauseServerError, 500)
	end(fleet.CauseClientGone, 0) // says nothing about the server
	if o := e.Own(); o.OOMStreak != 2 || o.Errors5s != 2 || o.Attempts5s != 2 {
		t.Errorf("after two 500s and a caller that left: %+v", o)
	}
	end(fleet.CauseClientError, 400)
	if o := e.Own(); o.OOMStreak != 0 || o.Successes != 1 || o.Attempts5s != 3 {
		t.Errorf("after a 400, which a working server sends: %+v", o)
	}
	end(fleet.CauseConnectFailed, 0)
	end(fleet.CauseReset, 0)
	if o := e.Own(); o.ConnectStreak != 2 {
		t.Errorf("after a refusal and a reset: %+v", o)
	}
	end(fleet.CauseServerError, 503)
	if o := e.Own(); o.ConnectStreak != 0 || o.OOMStreak != 0 {
		t.Errorf("a 503 ends the streak of failed connections and is no 500: %+v", o)
	}
	for range 25 {
		e.Rotate()
	}
	if o := e.Own(); o.Errors5s != 0 || o.Attempts5s != 0 {
		t.Errorf("5 s later: %+v", o)
	}
}

// TestOneClientsBrokenConnectionsAreNoStreak, as they may be its requests' doing. Those of
// two, or one that was refused, make all of them count.
func TestOneClientsBrokenConnectionsAreNoStreak(t *testing.T) {
	one, two := admission.Client{1}, admission.Client{2}
	type end struct {
		cause fleet.Cause
		of    admission.Client
	}
	const reset, refused, ok = fleet.CauseReset, fleet.CauseConnectFailed, fleet.CauseOK
	for name, row := range map[string]struct {
		ends []end
		want int
	}{
		"of one":                       {[]end{{reset, one}, {reset, one}, {reset, one}, {reset, one}}, 0},
		"of two":                       {[]end{{reset, one}, {reset, one}, {reset, two}}, 3},
		"of two, and the first again":  {[]end{{reset, one}, {reset, two}, {reset, one}}, 3},
		"of who isn't known":           {[]end{{reset, admission.Client{}}, {reset, admission.Client{}}}, 2},
		"refused":                      {[]end{{refused, one}, {refused, one}}, 2},
		"refused after broken":         {[]end{{reset, one}, {reset, one}, {refused, one}}, 3},
		"another was served between":   {[]end{{reset, two}, {ok, two}, {reset, one}, {reset, one}}, 0},
		"of one, after a streak ended": {[]end{{refused, one}, {ok, two}, {reset, one}, {reset, one}}, 0},
	} {
		e := NewEnds(Tick)
		errors := 0
		for _, end := range row.ends {
			e.Add(end.cause, 0, 0, end.of)
			if end.cause != ok {
				errors++
			}
		}
		if o := e.Own(); o.ConnectStreak != row.want || o.Errors5s != errors {
			t.Errorf("%s: a streak of %d and %d errors; want %d and %d", name, o.ConnectStreak, o.Errors5s, row.want, errors)
		}
	}
}

func TestTheLedgersDelayIsNoSilence(t *testing.T) {
	var f Foreign
	for range 3 {
		f.Add(10, 25) // 15 more in the ledger …
	}
	if n := f.Unanswered(1000); n != 0 { // … at 200 ends a second
		t.Errorf("%v unanswered at 200/s", n)
	}
	if n := f.Unanswered(0); n != 15 {
		t.Errorf("%v unanswered when nothing ends, want 15", n)
	}
	f.Add(25, 25)
	if n := f.Unanswered(0); n != 0 {
		t.Errorf("%v unanswered right after the engine counted all", n)
	}
}

func TestHeaderTimeIsTheMeanOfTheSpan(t *testing.T) {
	e := NewEnds(Tick)
	if _, ok := e.HeaderTime(); ok {
		t.Error("a mean of nothing")
	}
	e.Add(fleet.CauseOK, 200, 100*time.Millisecond, admission.Client{})
	e.Add(fleet.CauseServerError, 503, 0, admission.Client{}) // no headers came
	e.Rotate()
	e.Add(fleet.CauseClientGone, 0, 300*time.Millisecond, admission.Client{})
	if d, ok := e.HeaderTime(); !ok || d != 200*time.Millisecond {
		t.Errorf("%v, %v", d, ok)
	}
	for range Span/Tick - 1 {
		e.Rotate()
	}
	if d, ok := e.HeaderTime(); !ok || d != 300*time.Millisecond {
		t.Errorf("%v, %v once the first is forgotten", d, ok)
	}
	if e.Rotate(); e.sum != (bucket{}) {
		t.Errorf("left over: %+v", e.sum)
	}
}

// TestBothCountsOfSentTokensAgree feeds the same prompts and samples to serve's
// count and the simulator's. Over the last second they agree; since a sample they
// agree where it was read at a tick and arrived at once, and else serve's is the
// larger, by what was sent from the tick before the reading to its arrival.
func TestBothCountsOfSentTokensAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, delay := range []int{0, 1, 2} { // ticks from the reading to the sample's arrival
		for _, early := range []time.Duration{0, Tick / 3} { // how long before a tick it is read
			var serve Sent
			var exact SentExactly
			begin := time.Now()
			var total int64
			var sums []int64 // total at the end of each tick
			samples, read, differed := 0, 0, false
			for tick := range 400 {
				now := begin.Add(time.Duration(tick) * Tick)
				if tick%4 == 0 && tick >= 4 { // a sample arrives, just after the tick before
					samples, read = samples+1, tick-1-delay
				}
				for range rng.IntN(3) {
					n := 1 + rng.Int64N(1000)
					total += n
					exact.Add(float64(n), samples)
				}
				sums = append(sums, total)
				serve.Tick(now, 5, total)
				if tick > 20 {
					at := begin.Add(time.Duration(read)*Tick - early)
					from := read
					if early > 0 {
						from--
					}
					arrived := read + delay
					more := float64(sums[arrived] - sums[from])
					differed = differed || more != 0
					if got, want := serve.Since(at), exact.SinceSample(samples)+more; got != want {
						t.Fatalf("tick %d, delay %d, early %v: since the sample %v, want %v with %v from its reading to its arrival", tick, delay, early, got, want, more)
					}
					if got, want := serve.Since(now.Add(-time.Second)), exact.LastSecond(); got != want {
						t.Fatalf("tick %d: in the last second %v, the simulator says %v", tick, got, want)
					}
				}
				exact.Rotate()
			}
			if differed != (delay > 0 || early > 0) {
				t.Errorf("delay %d, early %v: the counts differed: %v", delay, early, differed)
			}
		}
	}
}
