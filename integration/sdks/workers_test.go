package sdks

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// work has workers do something over and over for a while, until it fails; the servers
// take so long to answer.
func (p *place) work(t *testing.T, c client, workers int, takes, runs time.Duration, do func() error) {
	t.Helper()
	p.upstream.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(takes):
			c.answer.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
	ctx, cancel := context.WithTimeout(context.Background(), runs)
	defer cancel()
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := do(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}

// TestWorkersOfOneKeyAreServedInTurn: 24 workers behind one official client, which
// tries each request three times, on eight places. Each goes on as soon as it has its
// answer or an error.
func TestWorkersOfOneKeyAreServedInTurn(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 12 seconds")
	}
	const workers, places, takes, runs = 24, 8, 300 * time.Millisecond, 12 * time.Second
	for name, row := range map[string]struct{ route, pool, limits string }{
		"a pool of eight":  {"defaultMaxTokens: 40", "maxInFlight: 8", ""},
		"a limit of eight": {"defaultMaxTokens: 40", "maxInFlight: 64", "limits: [{ name: each, concurrency: 8 }]"},
	} {
		t.Run(name, func(t *testing.T) {
			eachClient(t, row.route, row.pool, row.limits, func(t *testing.T, c client, p *place) {
				var served, failed atomic.Int64
				p.work(t, c, workers, takes, runs, func() error {
					_, _, err := c.ask(context.Background(), p.url, 16)
					if f, ok := c.failed(err); ok && f.status == http.StatusTooManyRequests {
						failed.Add(1)
						return nil
					}
					if err == nil {
						served.Add(1)
					}
					return err
				})
				most := places * int64(runs/takes)
				t.Logf("%d served, of %d at most; %d used up their retries", served.Load(), most, failed.Load())
				if 10*failed.Load() > served.Load() {
					t.Errorf("%d used up their retries and %d were served; want a tenth at most", failed.Load(), served.Load())
				}
				if served.Load()*2 < most {
					t.Errorf("%d served where %d can be", served.Load(), most)
				}
			})
		})
	}
}

// TestProgramsThatAskAgainThemselvesAreServed: four workers, whose client tries each
// request once and says so of each, wait as they are told and ask again, behind a limit
// of one.
func TestProgramsThatAskAgainThemselvesAreServed(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for 8 seconds")
	}
	const workers, takes, runs = 4, 400 * time.Millisecond, 8 * time.Second
	eachClient(t, "defaultMaxTokens: 40", "maxInFlight: 64", "limits: [{ name: each, concurrency: 1 }]", func(t *testing.T, c client, p *place) {
		var served, refused atomic.Int64
		p.work(t, c, workers, takes, runs, func() error {
			wait, err := c.once(context.Background(), p.url)
			switch {
			case err != nil:
			case wait > 0:
				refused.Add(1)
				time.Sleep(wait)
			default:
				served.Add(1)
			}
			return err
		})
		most := int64(runs / takes)
		t.Logf("%d served, of %d at most; %d refusals", served.Load(), most, refused.Load())
		if served.Load()*2 < most {
			t.Errorf("%d served where %d can be", served.Load(), most)
		}
	})
}
