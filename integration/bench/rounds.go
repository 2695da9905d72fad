package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// cell is one piece at one rate.
type cell struct {
	piece string
	rate  float64
}

// through is what was measured through Envoy, a sample per round.
type through struct {
	samples map[cell][]sample
	// idle is what a server uses without requests, as a share of one core, per round.
	idle map[setup][]float64
}

// rounds measures every piece once a round. Rounds go through the pieces forth
// and back in turn, so that a machine that slows down is nobody's advantage.
func (w *world) rounds(ctx context.Context, o options) (through, error) {
	t := through{samples: map[cell][]sample{}, idle: map[setup][]float64{}}
	for round := range o.rounds {
		progress("round %d of %d", round+1, o.rounds)
		idle, err := w.idle(o.each)
		if err != nil {
			return t, err
		}
		for s, used := range idle {
			t.idle[s] = append(t.idle[s], used)
		}
		order := slices.Clone(pieces)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, rate := range o.rates {
			for _, p := range order {
				if p.body > smallBody && rate != o.rates[0] {
					continue // 90 MB/s and more measure the machine's memory
				}
				if err := ctx.Err(); err != nil {
					return t, err
				}
				s, err := w.measure(p, rate, o.each)
				if err != nil {
					return t, err
				}
				s.net = s.netOf(idle[p.setup], rate)
				c := cell{p.name, rate}
				t.samples[c] = append(t.samples[c], s)
			}
		}
	}
	return t, nil
}

// of returns a number of each round's sample that counts.
func (t through) of(piece string, rate float64, number func(sample) float64) []float64 {
	var out []float64
	for _, s := range t.samples[cell{piece, rate}] {
		if s.invalid == "" {
			out = append(out, number(s))
		}
	}
	return out
}

// ratio is a number of one piece over that of another in the same round; less is
// subtracted from both, piece by piece of the same round, if it is not "". A round
// in which a run doesn't count, or a side isn't above 0, says nothing: it is left
// out, and the interval's n tells how many were not.
func (t through) ratio(over, under, less string, rate float64, number func(sample) float64) interval {
	var out []float64
	a, b, c := t.samples[cell{over, rate}], t.samples[cell{under, rate}], t.samples[cell{less, rate}]
	for i := range min(len(a), len(b)) {
		base := sample{}
		if less != "" {
			if i >= len(c) {
				break
			}
			base = c[i]
		}
		if a[i].invalid != "" || b[i].invalid != "" || base.invalid != "" {
			continue
		}
		// Both sides are checked: leaving out rounds by one alone would favour the other.
		x, y := number(a[i])-number(base), number(b[i])-number(base)
		if x > 0 && y > 0 {
			out = append(out, x/y)
		}
	}
	return medianOf(out)
}

// whatFailed is an error that names a run that doesn't count, or nil.
func (t through) whatFailed() error {
	for c, all := range t.samples {
		for _, s := range all {
			if s.invalid != "" {
				return fmt.Errorf("%s at %.0f/s does not count: %s", c.piece, c.rate, s.invalid)
			}
		}
	}
	return nil
}

func cpuOf(s sample) float64   { return float64(s.net) }
func p50Of(s sample) float64   { return float64(s.p50) }
func grossOf(s sample) float64 { return float64(s.server) }

const (
	// mostP99 is the latency that the highest rate must keep.
	mostP99 = 10 * time.Millisecond
	// lowestRate is where a search begins.
	lowestRate = 400
	coarseStep = 1.5
	fineSteps  = 4
)

// searched are the pieces whose highest rate is looked for.
var searched = []string{
	"plain", "stock", "fairlead", "stock-logs", "fairlead-logs", "stock-body", "fairlead-body", "fairlead-body-logs",
	"plain-60k", "stock-60k", "fairlead-60k",
}

// highestRates looks, for each piece, for the highest rate at which 99 % of the
// answers come within mostP99 and every request was decided about, and returns one result per search.
func (w *world) highestRates(ctx context.Context, o options) (map[string][]float64, error) {
	out := map[string][]float64{}
	for n := range o.searches {
		progress("highest rates, search %d of %d", n+1, o.searches)
		for _, name := range searched {
			p := pieces[slices.IndexFunc(pieces, func(p piece) bool { return p.name == name })]
			rate, err := w.highestRate(ctx, p, o)
			if err != nil {
				return nil, err
			}
			out[name] = append(out[name], rate)
		}
	}
	return out, nil
}

// highestRate goes up in steps of coarseStep until a rate fails twice, and then
// halves the last step fineSteps times. 0 means that lowestRate failed.
func (w *world) highestRate(ctx context.Context, p piece, o options) (float64, error) {
	carries := func(rate float64) (bool, error) {
		for range 2 {
			if err := ctx.Err(); err != nil {
				return false, err
			}
			before, err := w.sidecars[p.setup].tally()
			if err != nil {
				return false, err
			}
			r, err := w.load(p).run(rate, o.try)
			if err != nil {
				return false, err
			}
			time.Sleep(settle)
			after, err := w.sidecars[p.setup].tally()
			if err != nil {
				return false, err
			}
			decided := p.audit(r, after.since(before), w.load(p).reason()) == ""
			// A load generator that fell behind has not offered the rate.
			offered := r.took < o.try+o.try/20+2*mostP99
			if decided && offered && r.p99 <= mostP99 {
				return true, nil
			}
		}
		return false, nil
	}
	low, high := 0.0, 0.0
	for rate := float64(lowestRate); high == 0; rate *= coarseStep {
		ok, err := carries(rate)
		if err != nil {
			return 0, err
		}
		if !ok {
			high = rate
			break
		}
		low = rate
		if o.short {
			return low, nil
		}
	}
	if low == 0 || o.short {
		return low, nil
	}
	for range fineSteps {
		middle := (low + high) / 2
		ok, err := carries(middle)
		if err != nil {
			return 0, err
		}
		if ok {
			low = middle
		} else {
			high = middle
		}
	}
	return low, nil
}

// decision is one line of module peer.
type decision struct {
	N           int     `json:"n"`
	What        string  `json:"what"`
	Nanoseconds float64 `json:"nanoseconds"`
	Allocations float64 `json:"allocations"`
	Bytes       float64 `json:"bytes"`
}

// decisions runs module peer.
func decisions(ctx context.Context, o options) ([]decision, error) {
	cmd := exec.CommandContext(ctx, "go", "run", ".", "-rounds", fmt.Sprint(o.rounds), "-each", o.decideEach.String())
	cmd.Dir = "peer"
	cmd.Env = append(os.Environ(), "GOWORK=off")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("module peer: %w", err)
	}
	var all []decision
	for line := range strings.Lines(string(out)) {
		var d decision
		if err := json.Unmarshal([]byte(line), &d); err != nil {
			return nil, fmt.Errorf("module peer: line %q: %w", line, err)
		}
		all = append(all, d)
	}
	return all, nil
}
