package demo

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
)

// Summary is the outcome of one run.
type Summary struct {
	Kind     string  `json:"kind"` // "summary"
	Strategy string  `json:"strategy"`
	Sidecars int     `json:"sidecars"`
	Seed     uint64  `json:"seed"`
	RPS      float64 `json:"rps"`
	// Seconds is the length of the measured part of the load.
	Seconds float64 `json:"seconds"`
	// Answers counts requests that ended in any way.
	Answers   int `json:"answers"`
	Errors    int `json:"errors"`
	Throttled int `json:"throttled"`
	// Unfinished counts answers that were still running 20 s after the last
	// arrival (sooner in a short run) and were cut off then; they are no errors.
	Unfinished int `json:"unfinished"`
	// Routed counts answers by the strategy that they say was really used: with
	// Fairlead away, or too late, Envoy goes on by itself and says legacy.
	Routed map[string]int `json:"routed"`
	// Times to first token of streams as their callers saw them, milliseconds.
	P50 float64 `json:"ttft_p50_ms"`
	P95 float64 `json:"ttft_p95_ms"`
	P99 float64 `json:"ttft_p99_ms"`
	// SlowShare is the share of streams whose first token took over 2 s.
	SlowShare   float64 `json:"share_over_2s"`
	Utilisation []Busy  `json:"gpu_utilisation"`
	CPU         []CPU   `json:"cpu"`
	Cores       int     `json:"cores"`
	// Idle is the idle share of the whole machine during the load, 0 … 1, or
	// −1 where it cannot be read.
	Idle float64 `json:"machine_idle"`
}

// Busy is how busy a pool's engines were, 0 … 1.
type Busy struct {
	Pool string  `json:"pool"`
	Busy float64 `json:"busy"`
}

// CPU is what a process used, in cores.
type CPU struct {
	Process string  `json:"process"`
	Cores   float64 `json:"cores"`
}

// maxDrain is how long a run waits for answers after its last arrival, at
// most; a short run waits less.
const maxDrain = 20 * time.Second

// drainLimit is the wait of a run of this length; 0 has no end and its load is
// cut by an interrupt.
func drainLimit(duration time.Duration) time.Duration {
	if duration == 0 {
		return maxDrain
	}
	return min(maxDrain, max(5*time.Second, duration))
}

// Run brings everything up, sends the load, reports once a second and returns
// the summary. Ending ctx ends the load early and is no error.
func Run(ctx context.Context, o Options, r Reporter) (Summary, error) {
	if err := o.Check(); err != nil {
		return Summary{}, err
	}
	s, err := start(ctx, o, r.Note)
	if err != nil {
		if ctx.Err() != nil {
			return Summary{}, nil
		}
		return Summary{}, err
	}
	summary, err := s.measure(ctx, o, r)
	return summary, errors.Join(err, s.down())
}

func (s *stack) measure(ctx context.Context, o Options, r Reporter) (Summary, error) {
	for _, f := range o.Faults {
		if err := s.sim.Inject(f.Server, f.Fault); err != nil {
			return Summary{}, err
		}
	}
	loading, stop := context.WithCancel(ctx)
	defer stop()
	results := newRecorder(o.Warmup)
	record := func(x load.Result) {
		if loading.Err() != nil {
			results.close()
		}
		results.add(x)
	}
	finished := make(chan error, 1)
	before, started := s.usage(), time.Now()
	go func() {
		finished <- load.RunSequence(loading, arrivalsOf(o), load.Options{
			Targets: s.targets, OnResult: both(record, o.OnResult), DrainLimit: drainLimit(o.Duration),
		})
	}()
	err := s.watch(loading, stop, o, r, results, finished, started)
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	return s.summary(o, results, before, time.Since(started)), err
}

func both(first, second func(load.Result)) func(load.Result) {
	if second == nil {
		return first
	}
	return func(r load.Result) {
		first(r)
		second(r)
	}
}

// watch reports once a second until the load has finished or a part of the
// stack has failed.
func (s *stack) watch(ctx context.Context, stop func(), o Options, r Reporter, results *recorder, finished <-chan error, started time.Time) error {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	last := started
	for {
		select {
		case err := <-finished:
			return err
		case <-s.failed.Done():
			stop()
			<-finished
			return errors.New("a part of the demo ended early")
		case dead := <-s.deadEnvoy:
			stop()
			<-finished
			return dead
		case now := <-ticker.C:
			second := secondOf(s.serve.Fleet(), s.shares(), results.take(), now.Sub(last))
			last = now
			second.Elapsed, second.Strategy, second.Sidecars = now.Sub(started).Seconds(), o.Strategy.String(), o.Sidecars
			for _, f := range o.Faults {
				if at := now.Sub(started); at >= f.At && (f.For == 0 || at < f.At+f.For) {
					second.Notes = append(second.Notes, fmt.Sprintf("fault: %s at %s", f.Kind, f.Server))
				}
			}
			r.Second(second)
			if ctx.Err() != nil {
				return <-finished
			}
		}
	}
}

// shares returns each pool's part of the chat route's requests as Envoy draws.
func (s *stack) shares() map[string]float64 {
	out := map[string]float64{}
	for _, split := range s.serve.Splits() {
		if split.Route != "chat" {
			continue
		}
		for _, w := range split.Effective {
			out[w.Pool] = float64(w.BasisPoints) / 10_000
		}
	}
	return out
}

func (s *stack) summary(o Options, results *recorder, before usage, took time.Duration) Summary {
	results.mu.Lock()
	defer results.mu.Unlock()
	t := results.total
	out := Summary{
		Kind: "summary", Strategy: o.Strategy.String(), Sidecars: o.Sidecars, Seed: o.Seed, RPS: o.RPS,
		Seconds: took.Seconds(),
		Answers: t.done, Errors: t.errors, Throttled: t.throttled, Unfinished: t.unfinished, Routed: t.strategies,
		P50:   milliseconds(quantile(t.firstToken, 0.50)),
		P95:   milliseconds(quantile(t.firstToken, 0.95)),
		P99:   milliseconds(quantile(t.firstToken, 0.99)),
		Cores: runtime.NumCPU(),
	}
	if o.Duration > 0 {
		out.Seconds = (o.Duration - o.Warmup).Seconds()
	}
	if n := len(t.firstToken); n > 0 {
		out.SlowShare = float64(t.slow()) / float64(n)
	}
	after := s.usage()
	out.CPU, out.Idle, out.Utilisation = after.since(before, took)
	return out
}
