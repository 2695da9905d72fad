package sim

import (
	"slices"
	"time"
)

// sequence is one request inside an engine. After submission its fields belong
// to the engine and are read and written under the server's lock.
type sequence struct {
	prompt int  // tokens
	output int  // tokens it will generate, at least 1
	stops  bool // it ends by itself there, not at the client's limit

	computed  int // tokens whose KV is in the cache
	generated int
	blocks    int // KV blocks held
	state     seqState
	err       error // why it was killed

	arrived time.Time
	last    time.Time // of its latest token

	// every is how many tokens pass between two wakes after the first token; 0
	// wakes at the end only.
	every int
	wake  chan struct{} // capacity 1
}

type seqState uint8

const (
	seqWaiting seqState = iota + 1
	seqRunning
	seqFinished
	seqKilled // see err
)

// tokens is the sequence's length so far. All but the latest token must be in
// the cache before the next one can be generated.
func (q *sequence) tokens() int { return q.prompt + q.generated }

// decoding reports whether the next step yields a token by decoding alone.
func (q *sequence) decoding() bool { return q.generated > 0 && q.tokens()-q.computed == 1 }

// due reports whether the waiter wants to know of the latest token.
func (q *sequence) due() bool {
	if q.generated == q.output {
		return true
	}
	return q.every > 0 && (q.generated-1)%q.every == 0
}

// work is a sequence's share of the step under way.
type work struct {
	seq *sequence
	n   int // tokens to compute
}

// step describes the step under way.
type step struct {
	duration time.Duration
	decode   time.Duration // the part bound by memory bandwidth
}

// engine is the pure core: it holds sequences and advances them step by step.
// Every step is a begin and a finish; sequences may be added and removed in
// between. It has no clock and no lock.
type engine struct {
	profile Profile
	slow    float64 // factor on step time by a fault, normally 1

	blocks int // of the KV cache
	used   int // blocks held by sequences

	waiting []*sequence // first come first
	running []*sequence // in order of admission
	plan    []work
	woken   []*sequence

	count counters
	ttft  histogram
	itl   histogram
}

// counters count since the engine started.
type counters struct {
	steps, preemptions            uint64
	promptTokens, generatedTokens uint64
	submitted, finished, dead     uint64
	stopped                       uint64 // of finished: ended by themselves
	busy                          time.Duration
}

func newEngine(p Profile) *engine {
	return &engine{
		profile: p, slow: 1, blocks: p.KVTokens / BlockTokens,
		ttft: newHistogram(ttftBounds), itl: newHistogram(itlBounds),
	}
}

// blocksFor is the number of KV blocks that hold n tokens.
func blocksFor(n int) int { return (n + BlockTokens - 1) / BlockTokens }

// submit queues a sequence.
func (e *engine) submit(q *sequence, now time.Time) {
	q.state, q.arrived = seqWaiting, now
	e.waiting = append(e.waiting, q)
	e.count.submitted++
}

// cancel removes a sequence and frees its blocks at once, also in the middle of
// a step.
func (e *engine) cancel(q *sequence, err error) {
	switch q.state {
	case seqWaiting:
		e.waiting = without(e.waiting, q)
	case seqRunning:
		e.running = without(e.running, q)
	default:
		return
	}
	e.release(q)
	q.state, q.err = seqKilled, err
	e.count.dead++
}

// killAll cancels every sequence and returns them.
func (e *engine) killAll(err error) []*sequence {
	all := append(slices.Clone(e.running), e.waiting...)
	for _, q := range all {
		e.cancel(q, err)
	}
	return all
}

func without(list []*sequence, q *sequence) []*sequence {
	if i := slices.Index(list, q); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// hold makes q hold the blocks for n tokens and reports whether it could.
func (e *engine) hold(q *sequence, n int) bool {
	more := blocksFor(n) - q.blocks
	if more <= 0 {
		return true
	}
	if e.used+more > e.blocks {
		return false
	}
	e.used += more
	q.blocks += more
	return true
}

func (e *engine) release(q *sequence) {
	e.used -= q.blocks
	q.blocks = 0
}

// begin plans the next step and returns its length, or false when there is
// nothing to do.
func (e *engine) begin() (step, bool) {
	e.plan = e.plan[:0]
	budget := e.profile.Chunk
	before := e.count.preemptions
	budget = e.planRunning(budget)
	if e.count.preemptions == before {
		e.planWaiting(budget)
	}
	if len(e.plan) == 0 {
		return step{}, false
	}
	return e.measure(), true
}

// planRunning gives each running sequence its tokens, oldest first. A sequence
// that finds no free block takes those of the youngest.
func (e *engine) planRunning(budget int) int {
	for i := 0; i < len(e.running) && budget > 0; i++ {
		q := e.running[i]
		n := min(q.tokens()-q.computed, budget)
		for !e.hold(q, q.computed+n) {
			youngest := e.running[len(e.running)-1]
			e.preempt(youngest)
			if youngest == q {
				return budget
			}
		}
		e.plan = append(e.plan, work{q, n})
		budget -= n
	}
	return budget
}

// planWaiting admits queued sequences, first come first, while the batch has
// room and the cache holds the whole prompt of the next.
func (e *engine) planWaiting(budget int) {
	admitted := 0
	for _, q := range e.waiting {
		if budget == 0 || len(e.running) >= e.profile.MaxSeqs || !e.hold(q, q.tokens()) {
			break
		}
		q.state = seqRunning
		e.running = append(e.running, q)
		n := min(q.tokens()-q.computed, budget)
		e.plan = append(e.plan, work{q, n})
		budget -= n
		admitted++
	}
	e.waiting = slices.Delete(e.waiting, 0, admitted)
}

// preempt puts a running sequence back to the head of the queue; its cache is
// dropped and will be computed anew.
func (e *engine) preempt(q *sequence) {
	e.running = without(e.running, q)
	e.release(q)
	q.computed, q.state = 0, seqWaiting
	e.waiting = slices.Insert(e.waiting, 0, q)
	e.count.preemptions++
}

func (e *engine) measure() step {
	decoding, context, prefill := 0, 0, 0
	for _, w := range e.plan {
		if w.seq.decoding() {
			decoding++
			context += w.seq.computed
		} else {
			prefill += w.n
		}
	}
	return step{
		duration: time.Duration(e.slow * e.profile.stepNS(decoding, context, prefill)),
		decode:   time.Duration(e.slow * e.profile.decodeNS(decoding, context)),
	}
}

// finish ends the step that began last: it hands out tokens and returns the
// sequences whose waiters want to know. The slice is reused by the next call.
func (e *engine) finish(s step, now time.Time) []*sequence {
	e.woken = e.woken[:0]
	e.count.steps++
	e.count.busy += s.duration
	for _, w := range e.plan {
		q := w.seq
		if q.state != seqRunning {
			continue // cancelled meanwhile
		}
		q.computed += w.n
		if q.computed == q.tokens() {
			e.emit(q, now)
		}
	}
	e.plan = e.plan[:0]
	return e.woken
}

// emit gives q its next token.
func (e *engine) emit(q *sequence, now time.Time) {
	if q.generated == 0 {
		e.ttft.observe(now.Sub(q.arrived))
		e.count.promptTokens += uint64(q.prompt)
	} else {
		e.itl.observe(now.Sub(q.last))
	}
	q.generated++
	q.last = now
	e.count.generatedTokens++
	if q.due() {
		e.woken = append(e.woken, q)
	}
	if q.generated == q.output {
		e.running = without(e.running, q)
		e.release(q)
		q.state = seqFinished
		e.count.finished++
		if q.stops {
			e.count.stopped++
		}
	}
}

// queuedTokens is the number of prompt tokens accepted and not yet prefilled.
func (e *engine) queuedTokens() int {
	n := 0
	for _, q := range e.waiting {
		n += q.tokens()
	}
	for _, q := range e.running {
		if !q.decoding() {
			n += q.tokens() - q.computed
		}
	}
	return n
}

// kvUsage is the share of KV blocks in use, 0…1.
func (e *engine) kvUsage() float64 { return float64(e.used) / float64(e.blocks) }
