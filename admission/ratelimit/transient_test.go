package ratelimit

import (
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/redisbin"
)

// TestALateAnswerTellsNobodyToWaitForTheWindow: a replica that has admitted more than its
// part can't decide alone, and the next request may be admitted.
func TestALateAnswerTellsNobodyToWaitForTheWindow(t *testing.T) {
	s := redisbin.Start(t, redisbin.Config{})
	m := replicas(t, fleet.Redis{Address: s.Address(), Deadline: lateness}, 2)[0]
	up(t, m)
	g := admission.New(admission.Options{Limiter: m.Redis, Config: &fleet.Config{
		Pools:  []fleet.Pool{{Name: "p", MaxInFlight: 100, Endpoints: make([]fleet.Endpoint, 1)}},
		Routes: []fleet.Route{{Name: "r", Class: fleet.ClassInteractive}},
		Limits: []fleet.Limit{{Name: "l", Key: fleet.ClientKeyAuthorization, Requests: fleet.Rate{Amount: 10, Window: calm()}}},
	}})
	n := 0
	ask := func() admission.Verdict {
		n++
		return g.Admit(&admission.Ask{ID: strconv.Itoa(n), Route: "r", Pool: "p", Client: client("a").Client, At: time.Now(), Seed: uint64(n)})
	}
	admitted := func(n int) {
		t.Helper()
		for range n {
			if v := ask(); !v.Admitted || v.Standing.Local {
				t.Fatalf("%+v", v)
			}
		}
	}
	admitted(6)
	s.Pause()
	v := ask()
	if r := v.Refusal; v.Reason != admission.ReasonRequests || !v.Standing.Local || !r.ShouldRetry || r.RetryAfter < time.Second || r.RetryAfter > 2*time.Second {
		t.Errorf("%+v; want it refused by the replica's part and told to come back in 1 s … 2 s", v)
	}
	s.Resume()
	admitted(4)
	s.Pause() // the server has said nothing of it, but that the last was admitted
	v = ask()
	if v.Reason != admission.ReasonRequests || !v.Standing.Local || v.Refusal.ShouldRetry {
		t.Errorf("%+v; want it told not to retry: all of the limit is used up", v)
	}
	s.Resume()
}

func TestWhatAPartDecidesIsTransientUntilTheServerIsAway(t *testing.T) {
	for name, row := range map[string]struct {
		lost time.Duration // after the limiter was made, an hour ago
		want bool
	}{
		"never there":     {0, false},
		"lost long ago":   {time.Minute, false},
		"lost of late":    {2 * time.Hour, true}, // ahead, so that no delay makes it long ago
		"lost 2 s before": {time.Hour - awayAfter, false},
	} {
		m := lonely(fleet.OnErrorLocal, 2, 0)
		m.own.base = time.Now().Add(-time.Hour)
		m.lost.Store(int64(row.lost))
		k, r := client("a"), admission.Rates{Requests: per(4, calm()), Tokens: per(40, calm())}
		for _, cost := range []fleet.Tokens{10, 30, 10, 10} { // admitted, tokens, admitted, requests
			a := m.Reserve(k, r, cost, time.Now())
			if a.Transient != row.want {
				t.Errorf("%s, %v: transient is %v, want %v", name, a.Reason, a.Transient, row.want)
			}
		}
		c := claimOf(k, r, 10)
		hear(m, c, admission.ReasonRequests, 4, 30)
		if a := m.Reserve(k, r, 10, time.Now()); a.Reason != admission.ReasonRequests || a.Transient {
			t.Errorf("%s: %+v; want what the server said, until the window ends", name, a)
		}
	}
}
