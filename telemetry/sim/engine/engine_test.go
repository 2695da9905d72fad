package engine

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var errGone = errors.New("client gone")

// clockwork drives an engine on a clock of its own.
type clockwork struct {
	e   *Engine
	now time.Duration
}

func newClockwork(p Profile) *clockwork {
	return &clockwork{e: New(p)}
}

func (c *clockwork) submit(prompt, output int) *Sequence {
	q := &Sequence{Prompt: prompt, Output: output}
	c.e.Submit(q, c.now)
	return q
}

// step runs one step and reports whether there was one.
func (c *clockwork) step() (Step, bool) {
	s, ok := c.e.Begin()
	if ok {
		c.now += s.Duration
		c.e.Finish(s, c.now)
	}
	return s, ok
}

func (c *clockwork) drain(t *testing.T) {
	t.Helper()
	for range 1_000_000 {
		if _, ok := c.step(); !ok {
			return
		}
	}
	t.Fatal("the engine never came to rest")
}

func profile(t testing.TB, name string) Profile {
	t.Helper()
	p, err := ProfileByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// measured holds a batch's median inter-token latency in ms and its tokens per
// second, from the ML.ENERGY leaderboard (lm-arena-chat).
type measured struct {
	batch           int
	itl, throughput float64
}

// TestProfilesReproduceMeasuredDecoding keeps the batch full with prompts of 200
// and answers of 500 tokens on average, the lengths the fit assumes.
func TestProfilesReproduceMeasuredDecoding(t *testing.T) {
	tables := map[string][]measured{
		"llama-3.1-8b-h100":    {{8, 7.3, 1070}, {32, 8.9, 3391}, {64, 11.5, 5147}, {128, 16.5, 7037}, {255, 26.1, 9010}},
		"llama-3.1-70b-4xh100": {{8, 16.6, 470}, {64, 22.4, 2511}, {128, 27.9, 3876}, {255, 39.8, 4915}},
	}
	for name, table := range tables {
		for _, want := range table {
			itl, throughput := fullBatch(profile(t, name), want.batch)
			t.Logf("%s batch %d: inter-token latency %.1f ms (measured %.1f), %.0f tokens/s (measured %.0f)",
				name, want.batch, itl, want.itl, throughput, want.throughput)
			within(t, "inter-token latency", itl, want.itl, 0.15)
			within(t, "throughput", throughput, want.throughput, 0.15)
		}
	}
}

// fullBatch returns the median inter-token latency in ms and the tokens per
// second of an engine whose batch is always full.
func fullBatch(p Profile, batch int) (itl, throughput float64) {
	p.MaxSeqs = batch
	c := newClockwork(p)
	rng := rand.New(rand.NewPCG(1, uint64(batch)))
	for range batch { // sequences of a full batch are at all stages
		c.submit(100+rng.IntN(201), 1+rng.IntN(500))
	}
	refill := func() {
		for len(c.e.waiting) < batch {
			c.submit(100+rng.IntN(201), 250+rng.IntN(501))
		}
	}
	var gaps []float64
	var tokens uint64
	var begin time.Duration
	for i := range 6000 {
		refill()
		if i == 2000 {
			tokens, begin = c.e.count.GeneratedTokens, c.now
		}
		s, _ := c.step()
		if i >= 2000 {
			gaps = append(gaps, s.Duration.Seconds()*1000)
		}
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2], float64(c.e.count.GeneratedTokens-tokens) / (c.now - begin).Seconds()
}

func within(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if math.Abs(got-want) > share*want {
		t.Errorf("%s is %.4g, want %.4g within %.0f %%", what, got, want, 100*share)
	}
}

// TestProfilesReproduceMeasuredPrefill compares one prompt on an idle engine with
// LLMServingSim's layer times of an H100.
func TestProfilesReproduceMeasuredPrefill(t *testing.T) {
	for prompt, want := range map[int]float64{256: 11.8, 512: 17.8, 1024: 30.2, 2048: 64.8} {
		c := newClockwork(profile(t, "llama-3.1-8b-h100"))
		c.submit(prompt, 1)
		s, _ := c.step()
		within(t, "prefill", s.Duration.Seconds()*1000, want, 0.15)
	}
}

func TestEnginePrefillsLongPromptsInChunks(t *testing.T) {
	c := newClockwork(profile(t, "llama-3.1-8b-h100"))
	q := c.submit(5000, 3)
	for i, want := range []struct{ computed, generated int }{{2048, 0}, {4096, 0}, {5000, 1}, {5001, 2}, {5002, 3}} {
		c.step()
		if q.computed != want.computed || q.generated != want.generated {
			t.Fatalf("after step %d: %d computed, %d generated; want %+v", i+1, q.computed, q.generated, want)
		}
	}
	if q.state != Finished || c.e.used != 0 {
		t.Fatalf("state %d with %d blocks in use; want finished with none", q.state, c.e.used)
	}
}

func TestEngineDecodesBesideAPrefill(t *testing.T) {
	c := newClockwork(profile(t, "llama-3.1-8b-h100"))
	first := c.submit(10, 100)
	c.step()
	late := c.submit(3000, 1)
	c.step()
	if first.generated != 2 || late.computed != 2047 {
		t.Fatalf("first has %d tokens and late %d prefilled; want 2 and the rest of the chunk, 2047", first.generated, late.computed)
	}
}

func TestEngineAdmitsFirstComeFirstWhileTheCacheHoldsThePrompt(t *testing.T) {
	p := profile(t, "llama-3.1-8b-h100")
	p.KVTokens = 100 * BlockTokens
	c := newClockwork(p)
	a, b, small := c.submit(60*BlockTokens, 20), c.submit(60*BlockTokens, 2), c.submit(10, 2)
	c.step()
	if a.state != Running || b.state != Waiting || small.state != Waiting {
		t.Fatalf("states %d %d %d; want only the first running: nobody overtakes", a.state, b.state, small.state)
	}
	c.drain(t)
	if a.state != Finished || b.state != Finished || small.state != Finished || c.e.used != 0 {
		t.Fatal("all shall finish and leave no block behind")
	}
}

func TestEnginePreemptsTheYoungestAndRecomputesIt(t *testing.T) {
	p := profile(t, "llama-3.1-8b-h100")
	p.KVTokens = 10 * BlockTokens
	c := newClockwork(p)
	old, young := c.submit(4*BlockTokens, 60), c.submit(4*BlockTokens, 60)
	for old.generated < 60 {
		c.step()
		if young.generated > old.generated {
			t.Fatal("the youngest overtook the oldest")
		}
	}
	if c.e.count.Preemptions == 0 {
		t.Fatal("the cache overflowed without a preemption")
	}
	before := young.generated
	c.drain(t)
	if young.generated != 60 || before >= 60 || c.e.used != 0 || c.e.count.GeneratedTokens != 120 {
		t.Fatalf("young has %d tokens, %d in all, %d blocks in use; want 60, 120, 0",
			young.generated, c.e.count.GeneratedTokens, c.e.used)
	}
}

func TestEngineFreesACancelledSequenceInTheMiddleOfAStep(t *testing.T) {
	c := newClockwork(profile(t, "llama-3.1-8b-h100"))
	q, other := c.submit(1000, 10), c.submit(16, 2)
	s, _ := c.e.Begin()
	c.e.Cancel(q, errGone)
	if c.e.used != 1 {
		t.Fatalf("%d blocks in use after the cancel; want the other's one", c.e.used)
	}
	c.e.Finish(s, c.now)
	c.e.Cancel(q, errGone)
	c.drain(t)
	if q.generated != 0 || other.state != Finished || c.e.used != 0 || c.e.count.Killed != 1 {
		t.Fatal("the cancelled sequence went on, or the other did not")
	}
}

// TestEngineKeepsAccountOfItsBlocks drives an engine at random: blocks in use are
// always the sum over its sequences, at most the capacity, and 0 at the end.
func TestEngineKeepsAccountOfItsBlocks(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := profiles[0]
		p.KVTokens = rapid.IntRange(4, 40).Draw(rt, "blocks") * BlockTokens
		p.MaxSeqs = rapid.IntRange(1, 8).Draw(rt, "seqs")
		p.Chunk = rapid.IntRange(1, 64).Draw(rt, "chunk")
		c := newClockwork(p)
		var all []*Sequence
		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			switch rapid.IntRange(0, 9).Draw(rt, "act") {
			case 0, 1, 2:
				prompt := rapid.IntRange(1, p.KVTokens-1).Draw(rt, "prompt")
				all = append(all, c.submit(prompt, rapid.IntRange(1, p.KVTokens-prompt).Draw(rt, "output")))
			case 3:
				if len(all) > 0 {
					c.e.Cancel(rapid.SampledFrom(all).Draw(rt, "cancelled"), errGone)
				}
			default:
				c.step()
			}
			checkBlocks(rt, c.e)
		}
		for range 100_000 {
			if _, ok := c.step(); !ok {
				break
			}
			checkBlocks(rt, c.e)
		}
		for _, q := range all {
			if q.state == Finished && q.generated != q.Output || q.state == Waiting || q.state == Running {
				rt.Fatalf("a sequence ended in state %d with %d of %d tokens", q.state, q.generated, q.Output)
			}
		}
		if c.e.used != 0 || len(c.e.running)+len(c.e.waiting) != 0 {
			rt.Fatalf("%d blocks in use at rest", c.e.used)
		}
	})
}

func checkBlocks(t *rapid.T, e *Engine) {
	sum := 0
	for _, q := range e.running {
		if q.blocks < blocksFor(q.computed) {
			t.Fatalf("%d tokens in %d blocks", q.computed, q.blocks)
		}
		sum += q.blocks
	}
	for _, q := range e.waiting {
		sum += q.blocks
	}
	if sum != e.used || e.used > e.blocks || len(e.running) > e.profile.MaxSeqs {
		t.Fatalf("%d blocks in use, %d held, of %d; %d running", e.used, sum, e.blocks, len(e.running))
	}
}

// TestCapacityIsWhatAnEngineSustains offers 95 % and 105 % of the estimate: the
// queue stays short at the first and grows at the second.
func TestCapacityIsWhatAnEngineSustains(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	prompt, output := make([]int, 2500), make([]int, 2500)
	for i := range prompt {
		prompt[i], output[i] = 50+rng.IntN(2000), 20+rng.IntN(400)
	}
	for _, name := range ProfileNames() {
		for _, maxSeqs := range []int{8, 256} {
			p := profile(t, name)
			p.MaxSeqs = maxSeqs
			rate := p.Capacity(prompt, output)
			calm, crowded := queueAfter(p, 0.95*rate, prompt, output), queueAfter(p, 1.05*rate, prompt, output)
			t.Logf("%s, batch %d: %.2f requests/s; %d waiting at 95 %%, %d at 105 %%", name, maxSeqs, rate, calm, crowded)
			if calm > 40 || crowded < 60 {
				t.Errorf("%s, batch %d: capacity %.2f/s leaves %d waiting at 95 %% and %d at 105 %%", name, maxSeqs, rate, calm, crowded)
			}
		}
	}
}

// queueAfter offers the sample at an even rate and returns how many requests
// wait when the last has come.
func queueAfter(p Profile, rate float64, prompt, output []int) int {
	c := newClockwork(p)
	begin, next := c.now, 0
	for next < len(prompt) {
		for next < len(prompt) && (c.now-begin).Seconds()*rate >= float64(next) {
			c.submit(prompt[next], output[next])
			next++
		}
		if _, ok := c.step(); !ok {
			c.now = begin + time.Duration(float64(next)/rate*1e9) + 1
		}
	}
	return len(c.e.waiting)
}

func TestCapacityOfAnEmptySampleIsZero(t *testing.T) {
	p := profile(t, "llama-3.1-8b-h100")
	if p.Capacity(nil, nil) != 0 || p.Capacity([]int{1}, nil) != 0 {
		t.Fatal("a sample without lengths has no capacity")
	}
}

func TestActivityIsTheShareOfTheLastSecond(t *testing.T) {
	var a Activity
	now := 100 * time.Second
	for i := range 10_000 { // half busy in steps of 0.5 ms
		a.Add(now+time.Duration(i)*time.Millisecond, Step{Duration: 500 * time.Microsecond, Decode: 250 * time.Microsecond})
	}
	l := a.At(now + 10*time.Second)
	within(t, "busy", l.Busy(), 0.5, 0.02)
	within(t, "decode", l.Decode, 0.25, 0.02)
	a.Add(now+20*time.Second, Step{Duration: 10 * time.Second, Decode: 10 * time.Second})
	within(t, "busy in a long step", a.At(now+25*time.Second).Busy(), 1, 0.001)
	if busy := a.At(now + 40*time.Second).Busy(); busy != 0 {
		t.Fatalf("busy %g long after the last step", busy)
	}
}

// TestBlockedSaysWhyTheQueueStands holds a small engine in each state.
func TestBlockedSaysWhyTheQueueStands(t *testing.T) {
	small := profile(t, "llama-3.1-8b-h100")
	small.KVTokens, small.MaxSeqs = 10*BlockTokens, 2
	cases := map[string]struct {
		prompts []int
		want    Blocked
	}{
		"no queue":                       {[]int{16, 16}, NotBlocked},
		"the batch is full":              {[]int{16, 16, 16}, BlockedByBatch},
		"the cache has no room":          {[]int{6 * BlockTokens, 6 * BlockTokens}, BlockedByKV},
		"the cache is named before both": {[]int{5 * BlockTokens, 4 * BlockTokens, 9 * BlockTokens}, BlockedByKV},
	}
	for name, test := range cases {
		c := newClockwork(small)
		for _, n := range test.prompts {
			c.submit(n, 8)
		}
		if _, ok := c.e.Begin(); !ok || c.e.Blocked() != test.want {
			t.Errorf("%s: blocked %d, want %d", name, c.e.Blocked(), test.want)
		}
	}
	chunked := profile(t, "llama-3.1-8b-h100")
	chunked.Chunk = 32
	c := newClockwork(chunked)
	c.submit(100, 1)
	c.submit(100, 1)
	if c.e.Begin(); c.e.Blocked() != NotBlocked || c.e.WaitingLen() != 1 {
		t.Errorf("a request that waits for the next chunk is blocked %d, %d waiting", c.e.Blocked(), c.e.WaitingLen())
	}
}

// TestBlockedHoldsForTheWholeStep: what stood when the step was planned is seen
// until the next one is, also after the step has freed room.
func TestBlockedHoldsForTheWholeStep(t *testing.T) {
	p := profile(t, "llama-3.1-8b-h100")
	p.MaxSeqs = 1
	c := newClockwork(p)
	c.submit(16, 1)
	c.submit(16, 1)
	c.step()
	if c.e.RunningLen() != 0 || c.e.Blocked() != BlockedByBatch {
		t.Fatalf("%d running, blocked %d; want the latched reason after the batch has emptied", c.e.RunningLen(), c.e.Blocked())
	}
	if c.e.Begin(); c.e.Blocked() != NotBlocked {
		t.Fatalf("blocked %d with an empty queue", c.e.Blocked())
	}
}

func TestFirstTokenIsMeasuredFromSubmission(t *testing.T) {
	c := newClockwork(profile(t, "llama-3.1-8b-h100"))
	c.now = time.Minute
	q := c.submit(512, 2)
	if _, ok := q.FirstToken(); ok {
		t.Fatal("a first token before the first step")
	}
	s, _ := c.step()
	c.step()
	if got, ok := q.FirstToken(); !ok || got != s.Duration {
		t.Fatalf("first token after %v, %t; want the first step, %v", got, ok, s.Duration)
	}
}
