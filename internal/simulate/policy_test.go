package simulate

import (
	"slices"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// A comparison is worth what its baselines are: these tests fail where one of
// them is weaker, or ours knows more or less, than it is said to.

// choices counts where n requests with seeds of their own go.
func choices(r *router, n int) []int {
	seen := make([]int, len(r.w.gpus))
	for i := range n {
		seen[r.balancer.choose(&request{seed: mix(uint64(i)), seq: engine.Sequence{Prompt: 10, Output: 1}}, -1)]++
	}
	return seen
}

// hears has a sample of every GPU arrive now, after say has changed it.
func (w *world) hears(say func(i int, s *telemetry.Sample)) {
	for i, g := range w.gpus {
		s := g.sample(w.now - sampleDelay)
		s.GenerationTokens = w.now.Seconds() // an engine whose numbers stand still counts as frozen
		say(i, &s)
		g.window.Add(s)
		g.arrived++
	}
	for _, r := range w.routers {
		r.listen()
	}
}

// until lets what is due up to then happen; look sees each event after it.
func (w *world) until(then time.Duration, look func(e event)) {
	for w.agenda.next() <= then {
		e := w.agenda.pop()
		w.now = e.at
		w.handle(e)
		look(e)
	}
	w.now = then
}

func TestBaselinesEjectWhatFails(t *testing.T) {
	for _, name := range []string{RoundRobin, Random, LeastRequest, P2C, MaxScore, Argmin} {
		t.Run(name, func(t *testing.T) {
			w := idleWorld(t, name, 4, 1)
			r := w.routers[0]
			for range 5 {
				r.dispatched(2, &w.requests[0])
				r.ended(2, false)
			}
			if seen := choices(r, 200); seen[2] != 0 || seen[0] == 0 || seen[1] == 0 || seen[3] == 0 {
				t.Errorf("%v after five failures in a row of GPU 2; want none there", seen)
			}
			w.now = 30 * time.Second
			if seen := choices(r, 200); seen[2] == 0 {
				t.Errorf("%v after 30 s; want GPU 2 back", seen)
			}
		})
	}
}

// TestArgminFollowsTheJudge: the smallest risk is that of the telemetry at the
// last tick.
func TestArgminFollowsTheJudge(t *testing.T) {
	w := idleWorld(t, Argmin, 3, 1)
	r := w.routers[0]
	for calm := range 3 {
		w.now += 10 * time.Second
		w.hears(func(i int, s *telemetry.Sample) {
			s.KVUsage, s.Running = 0.1, 2
			if i != calm {
				s.KVUsage, s.Running, s.Waiting = 0.97, 30, 10
			}
		})
		before := choices(r, 50)
		r.balancer.tick()
		if seen := choices(r, 50); seen[calm] != 50 {
			t.Errorf("%v with GPU %d alone calm", seen, calm)
		}
		if calm > 0 && before[calm] != 0 {
			t.Errorf("%v before the tick; want what the last one said", before)
		}
	}
}

// TestMaxScoreAddsBothScores: with one of them equal everywhere the other
// decides.
func TestMaxScoreAddsBothScores(t *testing.T) {
	w := idleWorld(t, MaxScore, 3, 1)
	for i, kv := range []float64{0.5, 0.3, 0.4} {
		w.gpus[i].glanceKV, w.gpus[i].glanceWaiting = kv, 2
	}
	if seen := choices(w.routers[0], 50); seen[1] != 50 {
		t.Errorf("%v with equal queues; want the emptiest cache, GPU 1", seen)
	}
	for i, waiting := range []float64{3, 2, 1} {
		w.gpus[i].glanceKV, w.gpus[i].glanceWaiting = 0.5, waiting
	}
	if seen := choices(w.routers[0], 50); seen[2] != 50 {
		t.Errorf("%v with equal caches; want the shortest queue, GPU 2", seen)
	}
}

// TestMaxScoreLooksEvery50ms: each GPU is looked at every 50 ms, and what is
// seen is the engine.
func TestMaxScoreLooksEvery50ms(t *testing.T) {
	w := idleWorld(t, MaxScore, 2, 1)
	p := w.gpus[0].spec.Profile
	for range p.MaxSeqs + 3 { // nothing has been admitted yet: all wait
		w.gpus[0].engine.Submit(&engine.Sequence{Prompt: 100, Output: 5}, 0)
	}
	last, looks := make([]time.Duration, 2), 0
	w.until(2*time.Second, func(e event) {
		if e.kind != gpuGlanced {
			return
		}
		if gap := w.now - last[e.a]; gap > 50*time.Millisecond {
			t.Errorf("GPU %d was looked at %v after the last time", e.a, gap)
		}
		last[e.a] = w.now
		looks++
	})
	if looks != 80 {
		t.Errorf("%d looks at 2 GPUs in 2 s; want 80", looks)
	}
	if got := w.gpus[0].glanceWaiting; got != float64(p.MaxSeqs+3) {
		t.Errorf("%v requests seen to wait; want %d", got, p.MaxSeqs+3)
	}
	w.gpus[0].engine.Begin()
	w.until(2050*time.Millisecond, func(event) {})
	if got := w.gpus[0].glanceKV; got <= 0 || got != w.gpus[0].engine.KVUsage() {
		t.Errorf("KV usage seen %v; the engine has %v", got, w.gpus[0].engine.KVUsage())
	}
}

// TestOnlyTheLedgerIsLate: Envoy's count falls with the end, the ledger's 50 ms
// later.
func TestOnlyTheLedgerIsLate(t *testing.T) {
	w := idleWorld(t, Ours, 2, 2)
	r := w.routers[1]
	r.dispatched(0, &w.requests[0])
	if r.inFlight[0] != 1 || r.InFlight(0) != 1 {
		t.Fatalf("%d in flight, %d in the ledger; both count a request when it goes", r.inFlight[0], r.InFlight(0))
	}
	w.now = time.Millisecond
	r.ended(0, true)
	for _, after := range []time.Duration{0, 49 * time.Millisecond} {
		w.until(time.Millisecond+after, func(event) {})
		if r.inFlight[0] != 0 || r.InFlight(0) != 1 || r.own(0).InFlight != 1 {
			t.Errorf("%v after the end: %d in flight, %d in the ledger; want 0 and 1", after, r.inFlight[0], r.InFlight(0))
		}
	}
	w.until(51*time.Millisecond, func(event) {})
	if r.InFlight(0) != 0 || r.own(0).InFlight != 0 || w.routers[0].InFlight(0) != 0 {
		t.Errorf("50 ms after the end the ledgers have %d and %d", r.InFlight(0), w.routers[0].InFlight(0))
	}
}

// TestOursLeavesRoomForOthers: what an engine works on beyond the router's own
// requests takes room there.
func TestOursLeavesRoomForOthers(t *testing.T) {
	for _, others := range []bool{true, false} {
		w := idleWorld(t, Ours, 2, 1)
		r := w.routers[0]
		most := int32(w.gpus[0].spec.Profile.MaxSeqs)
		if !others {
			r.ledger[0] = most - 2 // all of it is the router's own
		}
		for range 3 {
			w.now += 200 * time.Millisecond
			w.hears(func(i int, s *telemetry.Sample) {
				s.KVUsage = 0.2
				if i == 0 {
					s.Running = float64(most - 2)
				}
			})
		}
		r.balancer.tick()
		r.ledger[0], r.ledger[1] = 2, 20
		seen := choices(r, 400)
		if others && seen[0] != 0 {
			t.Errorf("%v; want none for GPU 0, which others and 2 of ours fill", seen)
		}
		if !others && seen[0] < 40 {
			t.Errorf("%v; want GPU 0 chosen: nobody else is there", seen)
		}
	}
}

// TestRoutersKnowTheirOwn holds what own says, number by number.
func TestRoutersKnowTheirOwn(t *testing.T) {
	w := idleWorld(t, Ours, 2, 2)
	r := w.routers[0]
	quiet := func(int, *telemetry.Sample) {}
	if got, want := r.own(0).MaxInFlight, w.gpus[0].spec.Profile.MaxSeqs; got != want {
		t.Errorf("at most %d in flight; the engine takes %d", got, want)
	}

	w.now = 200 * time.Millisecond
	w.hears(quiet)
	q := &request{seq: engine.Sequence{Prompt: 700, Output: 1}}
	r.dispatched(0, q)
	r.dispatched(0, q)
	if own := r.own(0); own.InFlight != 2 || own.SentPromptTokens != 1400 || own.ArrivedPromptTokens != 1400 {
		t.Errorf("%+v after two prompts of 700 tokens", own)
	}
	if own, other := r.own(1), w.routers[1].own(0); own.SentPromptTokens != 0 || other.SentPromptTokens != 0 || other.InFlight != 0 {
		t.Errorf("the other GPU has %+v, the other router %+v", own, other)
	}
	// The engine's next sample has them; what came in the last second stays.
	w.now += 200 * time.Millisecond
	w.hears(quiet)
	if own := r.own(0); own.SentPromptTokens != 0 || own.ArrivedPromptTokens != 1400 {
		t.Errorf("%+v after the next sample", own)
	}
	for range 21 {
		r.rotate()
	}
	if own := r.own(0); own.ArrivedPromptTokens != 0 {
		t.Errorf("%v tokens of the last second after 1.05 s", own.ArrivedPromptTokens)
	}

	// Three samples running in which the engine has none of our two: they hang on
	// the way, or are lost.
	w.now += 200 * time.Millisecond
	w.hears(quiet)
	w.now += 200 * time.Millisecond
	w.hears(quiet)
	if got := r.own(0).Unanswered; got != 2 {
		t.Errorf("%v unanswered; want the 2 that the engine does not have", got)
	}
	if got := r.own(1).Unanswered; got != 0 {
		t.Errorf("%v unanswered where nothing was sent", got)
	}
	w.now += 200 * time.Millisecond
	w.hears(func(i int, s *telemetry.Sample) { s.Waiting = 2 })
	if got := r.own(0).Unanswered; got != 0 {
		t.Errorf("%v unanswered; one sample in which the engine has all is enough", got)
	}

	r.ended(0, false)
	r.ended(0, false)
	if own := r.own(0); own.Errors5s != 2 || own.Attempts5s != 2 || own.ConnectStreak != 2 {
		t.Errorf("%+v after two failures", own)
	}
}

// TestWhatIsLeftToEnvoyIsRetriedAnywhere: without a decision there is no second
// endpoint, and GPU 0 is none.
func TestWhatIsLeftToEnvoyIsRetriedAnywhere(t *testing.T) {
	w := idleWorld(t, Ours, 4, 1)
	b := w.routers[0].balancer.(*ours)
	var err error
	if b.plan, err = plan.Compile(plan.Inputs{Tick: 1}); err != nil {
		t.Fatal(err)
	}
	seen := make([]int, 4)
	for i := range 400 {
		q := &request{seed: mix(uint64(i)), seq: engine.Sequence{Prompt: 10, Output: 1}}
		first := b.choose(q, -1)
		second := b.choose(q, first)
		if first < 0 || second < 0 || first == second {
			t.Fatalf("chose %d, then %d", first, second)
		}
		seen[second]++
	}
	if slices.Min(seen) < 60 {
		t.Errorf("retries went to %v; want about 100 each", seen)
	}
}

// TestTelemetryAndTicksComeWhenSaid holds the package comment's times: every GPU
// is sampled every 200 ms, each sample is 50 ms old when it arrives, every router
// scores and plans every 50 ms.
func TestTelemetryAndTicksComeWhenSaid(t *testing.T) {
	w := idleWorld(t, Ours, 2, 3)
	var sampled [2]time.Duration
	samples, ticks := 0, 0
	w.until(2*time.Second-1, func(e event) {
		switch e.kind {
		case gpuSampled:
			sampled[e.a] = w.now
			samples++
		case sampleArrives:
			if late := w.now - sampled[e.a]; late != 50*time.Millisecond {
				t.Errorf("a sample of GPU %d arrived %v after it was taken", e.a, late)
			}
			if s, _ := w.gpus[e.a].window.Latest(); !s.At.Equal(at(w.now)) {
				t.Errorf("a sample that arrived at %v is stamped %v", w.now, s.At.Sub(origin))
			}
		case routerTicks:
			ticks++
		case gpuGlanced:
			t.Error("ours looked at the engines as max-score does")
		}
	})
	if samples != 20 || ticks != 120 {
		t.Errorf("%d samples of 2 GPUs and %d ticks of 3 routers in 2 s; want 20 and 120", samples, ticks)
	}
}
