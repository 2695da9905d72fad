package demo

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
)

// bucket collects the answers of one endpoint, or of all.
type bucket struct {
	done, errors, throttled int
	// unfinished counts requests still running when the run was ended.
	unfinished int
	firstToken []time.Duration
	// strategies counts answers by the strategy that they say was used.
	strategies map[string]int
}

// add counts one result. A stream that was cut at the end of the run without a
// first token enters with the time it had waited, which is more than any limit
// of interest: leaving it out would hide the worst waits.
func (b *bucket) add(r load.Result) {
	b.done++
	if r.Strategy != "" {
		if b.strategies == nil {
			b.strategies = map[string]int{}
		}
		b.strategies[r.Strategy]++
	}
	switch {
	case r.Status == http.StatusTooManyRequests:
		b.throttled++
		return
	case r.Cut:
		b.unfinished++
	case r.Failed():
		b.errors++
		return
	}
	if !r.Stream {
		return
	}
	if r.FirstToken == 0 {
		if r.Total < slowLimit {
			return // cut so early that nothing can be said
		}
		r.FirstToken = r.Total
	}
	b.firstToken = append(b.firstToken, r.FirstToken)
}

// slow counts the streams whose first token took over slowLimit.
func (b *bucket) slow() int {
	n := 0
	for _, d := range b.firstToken {
		if d > slowLimit {
			n++
		}
	}
	return n
}

// recorder takes results from many goroutines and gives them out per second
// and for the whole run.
type recorder struct {
	mu    sync.Mutex
	now   map[string]*bucket
	total bucket
	// from leaves out of the total what arrived before it (warm-up).
	from time.Duration
	// closed says that the load was interrupted: what comes now was cut off.
	closed bool
}

// slowLimit is the latency target of the demo's summary: first token within 2 s.
const slowLimit = 2 * time.Second

func newRecorder(from time.Duration) *recorder {
	return &recorder{now: map[string]*bucket{}, from: from}
}

// close ends the recording.
func (r *recorder) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
}

func (r *recorder) add(result load.Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		result.Cut = true
	}
	b := r.now[result.ServedBy]
	if b == nil {
		b = &bucket{}
		r.now[result.ServedBy] = b
	}
	b.add(result)
	if result.At < r.from {
		return
	}
	r.total.add(result)
}

// take returns what came in since the last call, by server name; "" holds
// answers that no server gave.
func (r *recorder) take() map[string]*bucket {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.now
	r.now = map[string]*bucket{}
	return out
}

// quantile returns the q-quantile of unsorted values, or 0.
func quantile(values []time.Duration, q float64) time.Duration {
	sorted := slices.Clone(values)
	slices.Sort(sorted)
	return load.Quantile(sorted, q)
}
