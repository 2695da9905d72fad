package admission

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// TestLimitsThatAReloadChangesCountWhatRuns: who adds a limit on concurrency while a client
// has too many in flight means those.
func TestLimitsThatAReloadChangesCountWhatRuns(t *testing.T) {
	limit := func(name string, n int) *fleet.Config {
		return config(fleet.Limit{Name: name, Key: fleet.ClientKeyAuthorization, Concurrency: n})
	}
	rated := config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Requests: fleet.Rate{Amount: 1000, Window: time.Second}})
	exception := config(fleet.Limit{
		Name: "l", Key: fleet.ClientKeyAuthorization, Requests: fleet.Rate{Amount: 1000, Window: time.Second},
		Clients: []fleet.LimitClient{{ID: named("a").String(), Concurrency: 6}},
	})
	for name, row := range map[string]struct {
		before, after *fleet.Config
		most          int
	}{
		"as it was":                  {limit("l", 5), limit("l", 5), 5},
		"raised":                     {limit("l", 5), limit("l", 7), 7},
		"lowered":                    {limit("l", 5), limit("l", 2), 5},
		"renamed":                    {limit("l", 5), limit("m", 5), 5},
		"added":                      {config(), limit("l", 6), 6},
		"added to a limit on a rate": {rated, limit("l", 6), 6},
		"added for one client":       {rated, exception, 6},
		"taken away":                 {limit("l", 5), config(), 15},
	} {
		w := newWorld(row.before, 100, nil)
		var in []string
		enter := func(times int) {
			for range times {
				if a := w.ask("a"); w.Admit(&a).Admitted {
					in = append(in, a.ID)
				}
			}
		}
		enter(5)
		w.Reconfigure(row.after)
		enter(10)
		if len(in) != row.most {
			t.Errorf("%s: %d are in flight; want %d", name, len(in), row.most)
		}
		w.Reconfigure(row.before)
		w.Reconfigure(row.after)
		for _, id := range in {
			w.end(id)
		}
		in = nil
		if enter(15); len(in) != min(15, max(row.most, 2)) && name != "lowered" || name == "lowered" && len(in) != 2 {
			t.Errorf("%s: when all had ended %d entered", name, len(in))
		}
	}
}

// TestWhatLapsedCountsForTheLimitThatAReloadBrought, once it is seen again.
func TestWhatLapsedCountsForTheLimitThatAReloadBrought(t *testing.T) {
	w := newWorld(config(), 100, nil)
	a := w.ask("a")
	w.Admit(&a)
	for range 10 { // nobody tells of it
		w.tick(time.Second)
	}
	w.Reconfigure(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Concurrency: 1}))
	w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, Node: "n", ID: a.ID, Attempt: 1, Endpoint: fleet.EndpointKey{Pool: "p"}, At: w.clock.now()})
	b := w.ask("a")
	if v := w.Admit(&b); v.Admitted {
		t.Error("two are in flight; want 1")
	}
	w.end(a.ID)
	if v := w.Admit(&b); !v.Admitted {
		t.Errorf("none is in flight, and it is told %+v", v)
	}
}
