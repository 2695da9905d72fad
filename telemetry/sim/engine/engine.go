package engine

import (
	"slices"
	"time"
)

// Sequence is one request inside an engine. The exported fields are set before
// Submit and not changed after it; the rest belongs to the engine.
type Sequence struct {
	Prompt int  // tokens, at least 1
	Output int  // tokens it will generate, at least 1
	Stops  bool // it ends by itself there, not at the client's limit
	// Every is how many tokens pass between two reports by Finish after the first
	// token; 0 reports the end only.
	Every int
	// Owner is the submitter's own; the engine never looks at it.
	Owner any

	computed  int // tokens whose KV is in the cache
	generated int
	blocks    int // KV blocks held
	state     State
	err       error // why it was killed

	arrived time.Duration
	first   time.Duration // of its first token
	last    time.Duration // of its latest token
}

// State is where a sequence stands.
type State uint8

// States. The zero State is a sequence that was not submitted.
const (
	Waiting  State = iota + 1
	Running        // in the batch
	Finished       // all tokens generated
	Killed         // see Err
)

// State returns where the sequence stands.
func (q *Sequence) State() State { return q.state }

// Err is why a killed sequence was killed.
func (q *Sequence) Err() error { return q.err }

// Generated is the number of its tokens so far.
func (q *Sequence) Generated() int { return q.generated }

// FirstToken is how long after its submission its first token came, or false if
// it has not yet.
func (q *Sequence) FirstToken() (time.Duration, bool) {
	return q.first - q.arrived, q.generated > 0
}

// tokens is the sequence's length so far. All but the latest token must be in
// the cache before the next one can be generated.
func (q *Sequence) tokens() int { return q.Prompt + q.generated }

// decoding reports whether the next step yields a token by decoding alone.
func (q *Sequence) decoding() bool { return q.generated > 0 && q.tokens()-q.computed == 1 }

// due reports whether the waiter wants to know of the latest token.
func (q *Sequence) due() bool {
	if q.generated == q.Output {
		return true
	}
	return q.Every > 0 && (q.generated-1)%q.Every == 0
}

// work is a sequence's share of the step under way.
type work struct {
	seq *Sequence
	n   int // tokens to compute
}

// Step describes the step under way.
type Step struct {
	Duration time.Duration
	Decode   time.Duration // the part bound by memory bandwidth
}

// Prefill is the part of the step bound by arithmetic.
func (s Step) Prefill() time.Duration { return s.Duration - s.Decode }

// Blocked says why the request at the head of the queue could not be admitted.
type Blocked uint8

// Reasons for a blocked head of the queue.
const (
	NotBlocked     Blocked = iota // the queue is empty, or waits only for the step's chunk
	BlockedByKV                   // the KV cache has no room for its prompt, or a sequence was just preempted
	BlockedByBatch                // the batch is at its largest
)

// Engine is the pure core: it holds sequences and advances them step by step.
type Engine struct {
	profile Profile
	slow    float64 // factor on step time by a fault, normally 1

	blocks int // of the KV cache
	used   int // blocks held by sequences

	waiting []*Sequence // first come first
	running []*Sequence // in order of admission
	plan    []work
	woken   []*Sequence
	blocked Blocked

	count Counters
	ttft  Histogram
	itl   Histogram
}

// Counters count since the engine started.
type Counters struct {
	Steps, Preemptions            uint64
	PromptTokens, GeneratedTokens uint64
	Submitted, Finished, Killed   uint64
	Stopped                       uint64 // of Finished: ended by themselves
	Busy                          time.Duration
}

// New returns an idle engine of a valid profile (see [Profile.Check]).
func New(p Profile) *Engine {
	return &Engine{
		profile: p, slow: 1, blocks: p.KVTokens / BlockTokens,
		ttft: NewHistogram(TTFTBounds), itl: NewHistogram(ITLBounds),
	}
}

// Profile returns what the engine was made of.
func (e *Engine) Profile() Profile { return e.profile }

// SetSlow makes every step from the next on factor times as long as the profile
// says; 1 is normal.
func (e *Engine) SetSlow(factor float64) { e.slow = factor }

// Slow is the factor of SetSlow.
func (e *Engine) Slow() float64 { return e.slow }

// Blocks is the size of the KV cache in blocks.
func (e *Engine) Blocks() int { return e.blocks }

// Used is the number of KV blocks held.
func (e *Engine) Used() int { return e.used }

// RunningLen is the size of the batch.
func (e *Engine) RunningLen() int { return len(e.running) }

// WaitingLen is the length of the queue.
func (e *Engine) WaitingLen() int { return len(e.waiting) }

// Count returns the counters.
func (e *Engine) Count() Counters { return e.count }

// TTFT is the histogram of times to first token. The caller must not write it.
func (e *Engine) TTFT() *Histogram { return &e.ttft }

// ITL is the histogram of inter-token latencies. The caller must not write it.
func (e *Engine) ITL() *Histogram { return &e.itl }

// SetITLBounds empties the histogram of inter-token latencies and gives it other
// bounds, in ascending seconds.
func (e *Engine) SetITLBounds(bounds []float64) { e.itl = NewHistogram(bounds) }

// Blocked is why the head of the queue could not be admitted when the step under
// way was planned. It holds until the next Begin, so that a step longer than the
// interval at which it is looked at makes no gaps; an engine at rest is not
// blocked.
func (e *Engine) Blocked() Blocked { return e.blocked }

// blocksFor is the number of KV blocks that hold n tokens.
func blocksFor(n int) int { return (n + BlockTokens - 1) / BlockTokens }

// Submit queues a sequence. One that is longer than the profile's MaxModelLen
// would be preempted for ever: the caller must not submit it.
func (e *Engine) Submit(q *Sequence, now time.Duration) {
	q.state, q.arrived = Waiting, now
	e.waiting = append(e.waiting, q)
	e.count.Submitted++
}

// Cancel removes a sequence and frees its blocks at once, also in the middle of
// a step. It does nothing to one that has ended.
func (e *Engine) Cancel(q *Sequence, err error) {
	switch q.state {
	case Waiting:
		e.waiting = without(e.waiting, q)
	case Running:
		e.running = without(e.running, q)
	default:
		return
	}
	e.release(q)
	q.state, q.err = Killed, err
	e.count.Killed++
}

// KillAll cancels every sequence and returns them.
func (e *Engine) KillAll(err error) []*Sequence {
	all := append(slices.Clone(e.running), e.waiting...)
	for _, q := range all {
		e.Cancel(q, err)
	}
	return all
}

func without(list []*Sequence, q *Sequence) []*Sequence {
	if i := slices.Index(list, q); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// hold makes q hold the blocks for n tokens and reports whether it could.
func (e *Engine) hold(q *Sequence, n int) bool {
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

func (e *Engine) release(q *Sequence) {
	e.used -= q.blocks
	q.blocks = 0
}

// Begin plans the next step and returns its length, or false when there is
// nothing to do.
func (e *Engine) Begin() (Step, bool) {
	e.plan = e.plan[:0]
	budget := e.profile.Chunk
	before := e.count.Preemptions
	budget = e.planRunning(budget)
	if e.count.Preemptions == before {
		e.planWaiting(budget)
	}
	e.blocked = e.headBlocked(e.count.Preemptions > before)
	if len(e.plan) == 0 {
		return Step{}, false
	}
	return e.measure(), true
}

// headBlocked judges the head of the queue once a step is planned.
func (e *Engine) headBlocked(preempted bool) Blocked {
	switch {
	case len(e.waiting) == 0:
		return NotBlocked
	case preempted || e.used+blocksFor(e.waiting[0].tokens()) > e.blocks:
		return BlockedByKV
	case len(e.running) >= e.profile.MaxSeqs:
		return BlockedByBatch
	}
	return NotBlocked
}

// planRunning gives each running sequence its tokens, oldest first. A sequence
// that finds no free block takes those of the youngest.
func (e *Engine) planRunning(budget int) int {
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
func (e *Engine) planWaiting(budget int) {
	admitted := 0
	for _, q := range e.waiting {
		if budget == 0 || len(e.running) >= e.profile.MaxSeqs || !e.hold(q, q.tokens()) {
			break
		}
		q.state = Running
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
func (e *Engine) preempt(q *Sequence) {
	e.running = without(e.running, q)
	e.release(q)
	q.computed, q.state = 0, Waiting
	e.waiting = slices.Insert(e.waiting, 0, q)
	e.count.Preemptions++
}

func (e *Engine) measure() Step {
	decoding, context, prefill := 0, 0, 0
	for _, w := range e.plan {
		if w.seq.decoding() {
			decoding++
			context += w.seq.computed
		} else {
			prefill += w.n
		}
	}
	return Step{
		Duration: time.Duration(e.slow * e.profile.StepNS(decoding, context, prefill)),
		Decode:   time.Duration(e.slow * e.profile.decodeNS(decoding, context)),
	}
}

// Finish ends the step that began last: it hands out tokens and returns the
// sequences whose waiters want to know. The slice is reused by the next call.
func (e *Engine) Finish(s Step, now time.Duration) []*Sequence {
	e.woken = e.woken[:0]
	e.count.Steps++
	e.count.Busy += s.Duration
	ended := false
	for _, w := range e.plan {
		q := w.seq
		if q.state != Running {
			continue // cancelled meanwhile
		}
		q.computed += w.n
		if q.computed == q.tokens() {
			e.emit(q, now)
			ended = ended || q.state == Finished
		}
	}
	if ended {
		e.running = slices.DeleteFunc(e.running, func(q *Sequence) bool { return q.state == Finished })
	}
	e.plan = e.plan[:0]
	return e.woken
}

// emit gives q its next token.
func (e *Engine) emit(q *Sequence, now time.Duration) {
	if q.generated == 0 {
		q.first = now
		e.ttft.Observe(now - q.arrived)
		e.count.PromptTokens += uint64(q.Prompt)
	} else {
		e.itl.Observe(now - q.last)
	}
	q.generated++
	q.last = now
	e.count.GeneratedTokens++
	if q.due() {
		e.woken = append(e.woken, q)
	}
	if q.generated == q.Output {
		e.release(q)
		q.state = Finished
		e.count.Finished++
		if q.Stops {
			e.count.Stopped++
		}
	}
}

// QueuedTokens is the number of prompt tokens accepted and not yet prefilled.
func (e *Engine) QueuedTokens() int {
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

// KVUsage is the share of KV blocks in use, 0…1.
func (e *Engine) KVUsage() float64 { return float64(e.used) / float64(e.blocks) }
