package admission

import (
	"net/http"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// answer is how a server answered an attempt, and for how long it told the caller to
// stay away.
type answer struct {
	code  int
	after time.Duration
}

// answered tells of a request's attempts and of its end, as the access log does. The two
// logs are streams of their own: the last attempt's end may be told after the
// request's.
func (w *world) answered(id string, late bool, attempts ...answer) {
	var last fleet.Outcome
	for i, a := range attempts {
		w.Apply(fleet.Outcome{Kind: fleet.AttemptStarted, ID: id, Node: "n", Attempt: i + 1, At: w.clock.now()})
		last = fleet.Outcome{Kind: fleet.AttemptEnded, ID: id, Node: "n", Attempt: i + 1, Code: a.code, RetryAfter: a.after, At: w.clock.now()}
		if !late || i+1 < len(attempts) {
			w.Apply(last)
		}
	}
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: id, Node: "n", Attempt: last.Attempt, Code: last.Code, Cause: fleet.CauseOK, At: w.clock.now()})
	if late {
		w.Apply(last)
	}
}

// postpone moves all slots of a client.
func (w *world) postpone(client string, by time.Duration) {
	c := w.clients.lock(named(client), w.since(w.clock.now()))
	defer c.mu.Unlock()
	move := func(s *slots) {
		for i := range s.due {
			s.due[i].at += by
		}
	}
	for i := range c.accounts {
		move(&c.accounts[i].slots)
	}
	for i := range c.uses {
		move(&c.uses[i].slots)
	}
}

// sentAway is a world where client "a" has one request in flight, and another that was
// told to come, in more than a minute: behind its limit, or by the pool.
func sentAway(limited bool) (w *world, id string) {
	w = paced(1)
	if limited {
		w = newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}), 100, nil)
	}
	w.tick(time.Minute)
	a := w.counting("a", 0)
	w.Admit(&a)
	w.turnAway("a", limited)
	w.postpone("a", 2*time.Minute)
	return w, a.ID
}

// turnAway sends a first try away that is behind its limit, or by the pool.
func (w *world) turnAway(client string, limited bool) Refusal {
	a := w.counting(client, 0)
	a.Timeout = time.Hour
	if limited {
		return w.Admit(&a).Refusal
	}
	return w.Refuse(&a, ReasonBusy)
}

// early reports whether a return of a client comes before its time, and sends it away.
func (w *world) early(client string) bool {
	a := w.counting(client, 1)
	held := w.BeginHold(&a)
	if held {
		w.EndHold(&a)
	}
	w.Refuse(&a, ReasonBusy)
	return !held
}

// TestWhoAServerSentAwayIsNotEarly: the request comes back as its server said, and the
// only slot of its client is a sibling's. What comes beyond that is early.
func TestWhoAServerSentAwayIsNotEarly(t *testing.T) {
	const busy, broken, unavailable = http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable
	for name, row := range map[string]struct {
		answers []answer
		late    bool // the last attempt's end is told after the request's
		back    time.Duration
		early   bool
	}{
		"told no time, back soon":              {[]answer{{busy, 0}}, false, time.Second, false},
		"told no time, back late":              {[]answer{{busy, 0}}, false, 15 * time.Second, true},
		"told 20 s":                            {[]answer{{busy, 20 * time.Second}}, false, 20 * time.Second, false},
		"told 20 s, back much later":           {[]answer{{busy, 20 * time.Second}}, false, 26 * time.Second, true},
		"told 20 s, known after the end":       {[]answer{{unavailable, 20 * time.Second}}, true, 20 * time.Second, false},
		"told more than anybody waits":         {[]answer{{busy, time.Hour}}, false, retryMax + abandoned, false},
		"told more, back later than anybody":   {[]answer{{busy, time.Hour}}, false, retryMax + abandoned + time.Second, true},
		"told 40 s by the first of two":        {[]answer{{busy, 40 * time.Second}, {busy, 0}}, false, 20 * time.Second, true},
		"told 20 s by the second of two":       {[]answer{{busy, 0}, {busy, 20 * time.Second}}, false, 20 * time.Second, false},
		"the second's end is told late":        {[]answer{{busy, time.Second}, {busy, 20 * time.Second}}, true, 20 * time.Second, false},
		"told 40 s, answered by another":       {[]answer{{busy, 40 * time.Second}, {http.StatusOK, 0}}, false, time.Second, true},
		"told 40 s, broken at another":         {[]answer{{busy, 40 * time.Second}, {broken, 0}}, false, 20 * time.Second, true},
		"broken, back soon":                    {[]answer{{broken, 0}}, false, 8 * time.Second, false},
		"broken, back late, known after":       {[]answer{{broken, 0}}, true, 20 * time.Second, true},
		"a timeout":                            {[]answer{{http.StatusRequestTimeout, 0}}, false, time.Second, false},
		"a conflict":                           {[]answer{{http.StatusConflict, 0}}, false, time.Second, false},
		"an answer":                            {[]answer{{http.StatusOK, 0}}, false, time.Second, true},
		"a bad request":                        {[]answer{{http.StatusBadRequest, 0}}, false, time.Second, true},
		"broken after 40 s told, known after":  {[]answer{{busy, 40 * time.Second}, {broken, 0}}, true, 20 * time.Second, true},
		"overloaded, told 20 s, known after":   {[]answer{{fleet.StatusOverloaded, 20 * time.Second}}, true, 20 * time.Second, false},
		"unavailable, told nothing, back late": {[]answer{{unavailable, 0}}, false, 20 * time.Second, true},
	} {
		for _, limited := range []bool{false, true} {
			w, id := sentAway(limited)
			w.answered(id, row.late, row.answers...)
			w.clock.advance(row.back)
			if got := w.early("a"); got != row.early {
				t.Errorf("%s, limited %v: early %v", name, limited, got)
			}
			again := w.counting("a", 1)
			if !limited && w.BeginHold(&again) { // else it may have been one of the pool
				t.Errorf("%s: a second one is not early", name)
			}
		}
	}
}

// TestWhoReachedNoServerIsSoonBack: Envoy says itself that there is none, and no entry of
// an attempt will come that tells more.
func TestWhoReachedNoServerIsSoonBack(t *testing.T) {
	for back, early := range map[time.Duration]bool{8 * time.Second: false, 20 * time.Second: true} {
		w, id := sentAway(false)
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: id, Code: http.StatusServiceUnavailable, Cause: fleet.CauseLocal, At: w.clock.now()})
		w.clock.advance(back)
		if got := w.early("a"); got != early {
			t.Errorf("back after %v: early %v", back, got)
		}
	}
}

// TestSignsOfLifeKeepWhatAServerTold: they may be late.
func TestSignsOfLifeKeepWhatAServerTold(t *testing.T) {
	w, id := sentAway(false)
	at := w.clock.now()
	w.Apply(fleet.Outcome{Kind: fleet.AttemptEnded, ID: id, Attempt: 1, Code: 429, RetryAfter: 20 * time.Second, At: at})
	w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: id, Attempt: 1, At: at})
	w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: id, Attempt: 1, Code: 429, At: at})
	w.clock.advance(20 * time.Second)
	if w.early("a") {
		t.Error("early when its server told it to come")
	}
}
