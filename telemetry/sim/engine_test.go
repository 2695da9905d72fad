package sim

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// clockwork drives an engine on a clock of its own.
type clockwork struct {
	e   *engine
	now time.Time
}

func newClockwork(p Profile) *clockwork {
	return &clockwork{e: newEngine(p), now: time.Unix(0, 0)}
}

func (c *clockwork) submit(prompt, output int) *sequence {
	q := &sequence{prompt: prompt, output: output}
	c.e.submit(q, c.now)
	return q
}

// step runs one step and reports whether there was one.
func (c *clockwork) step() (step, bool) {
	s, ok := c.e.begin()
	if ok {
		c.now = c.now.Add(s.duration)
		c.e.finish(s, c.now)
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
	var begin time.Time
	for i := range 6000 {
		refill()
		if i == 2000 {
			tokens, begin = c.e.count.generatedTokens, c.now
		}
		s, _ := c.step()
		if i >= 2000 {
			gaps = append(gaps, s.duration.Seconds()*1000)
		}
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2], float64(c.e.count.generatedTokens-tokens) / c.now.Sub(begin).Seconds()
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
		within(t, "prefill", s.duration.Seconds()*1000, want, 0.15)
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
	if q.state != seqFinished || c.e.used != 0 {
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
	if a.state != seqRunning || b.state != seqWaiting || small.state != seqWaiting {
		t.Fatalf("states %d %d %d; want only the first running: nobody overtakes", a.state, b.state, small.state)
	}
	c.drain(t)
	if a.state != seqFinished || b.state != seqFinished || small.state != seqFinished || c.e.used != 0 {
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
	if c.e.count.preemptions == 0 {
		t.Fatal("the cache overflowed without a preemption")
	}
	before := young.generated
	c.drain(t)
	if young.generated != 60 || before >= 60 || c.e.used != 0 || c.e.count.generatedTokens != 120 {
		t.Fatalf("young has %d tokens, %d in all, %d blocks in use; want 60, 120, 0",
			young.generated, c.e.count.generatedTokens, c.e.used)
	}
}

func TestEngineFreesACancelledSequenceInTheMiddleOfAStep(t *testing.T) {
	c := newClockwork(profile(t, "llama-3.1-8b-h100"))
	q, other := c.submit(1000, 10), c.submit(16, 2)
	s, _ := c.e.begin()
	c.e.cancel(q, errGone)
	if c.e.used != 1 {
		t.Fatalf("%d blocks in use after the cancel; want the other's one", c.e.used)
	}
	c.e.finish(s, c.now)
	c.e.cancel(q, errGone)
	c.drain(t)
	if q.generated != 0 || other.state != seqFinished || c.e.used != 0 || c.e.count.dead != 1 {
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
		var all []*sequence
		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			switch rapid.IntRange(0, 9).Draw(rt, "act") {
			case 0, 1, 2:
				prompt := rapid.IntRange(1, p.KVTokens-1).Draw(rt, "prompt")
				all = append(all, c.submit(prompt, rapid.IntRange(1, p.KVTokens-prompt).Draw(rt, "output")))
			case 3:
				if len(all) > 0 {
					c.e.cancel(rapid.SampledFrom(all).Draw(rt, "cancelled"), errGone)
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
			if q.state == seqFinished && q.generated != q.output || q.state == seqWaiting || q.state == seqRunning {
				rt.Fatalf("a sequence ended in state %d with %d of %d tokens", q.state, q.generated, q.output)
			}
		}
		if c.e.used != 0 || len(c.e.running)+len(c.e.waiting) != 0 {
			rt.Fatalf("%d blocks in use at rest", c.e.used)
		}
	})
}

func checkBlocks(t *rapid.T, e *engine) {
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
		for next < len(prompt) && c.now.Sub(begin).Seconds()*rate >= float64(next) {
			c.submit(prompt[next], output[next])
			next++
		}
		if _, ok := c.step(); !ok {
			c.now = begin.Add(time.Duration(float64(next)/rate*1e9) + 1)
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
	var a activity
	now := time.Unix(100, 0)
	for i := range 10_000 { // half busy in steps of 0.5 ms
		a.add(now.Add(time.Duration(i)*time.Millisecond), step{duration: 500 * time.Microsecond, decode: 250 * time.Microsecond})
	}
	l := a.at(now.Add(10 * time.Second))
	within(t, "busy", l.busy(), 0.5, 0.02)
	within(t, "decode", l.decode, 0.25, 0.02)
	a.add(now.Add(20*time.Second), step{duration: 10 * time.Second, decode: 10 * time.Second})
	within(t, "busy in a long step", a.at(now.Add(25*time.Second)).busy(), 1, 0.001)
	if busy := a.at(now.Add(40 * time.Second)).busy(); busy != 0 {
		t.Fatalf("busy %g long after the last step", busy)
	}
}
