package admission

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

func TestEndpointLimitIsTheLeastOfWhatIsKnown(t *testing.T) {
	for name, row := range map[string]struct {
		view EndpointView
		want int
	}{
		"nothing but the config": {EndpointView{Max: 256}, 256},
		"batch":                  {EndpointView{Max: 256, Batch: 212}, 212},
		"batch above the config": {EndpointView{Max: 100, Batch: 212}, 100},
		"KV cache":               {EndpointView{Max: 256, KVTokens: 41_408, MeanTokens: 1200}, 31},
		"KV cache, no mean yet":  {EndpointView{Max: 256, KVTokens: 41_408}, 256},
		"a request fills it":     {EndpointView{Max: 256, KVTokens: 1000, MeanTokens: 5000}, 1},
	} {
		var l EndpointLimit
		if got := l.Step(start, row.view); got != row.want {
			t.Errorf("%s: %d; want %d", name, got, row.want)
		}
	}
}

// plant is a simulated engine with callers that come at a rate, of whom as many
// are let in as the limit says.
type plant struct {
	engine   *engine.Engine
	limit    EndpointLimit
	view     EndpointView
	rng      *rand.Rand
	now      time.Duration
	next     time.Duration // arrival
	looked   time.Duration
	rate     float64 // of arrivals per second
	prompt   int
	output   int
	tellsQ   bool
	inFlight int
	most     int // the limit now
}

func newPlant(t *testing.T, max int, tellsQueue bool) *plant {
	t.Helper()
	profile, err := engine.ProfileByName("llama-3.1-8b-rtx4090")
	if err != nil {
		t.Fatal(err)
	}
	return &plant{
		engine: engine.New(profile), rng: rand.New(rand.NewPCG(1, 2)), most: max,
		view: EndpointView{Max: max, Measured: true, QueueKnown: tellsQueue}, prompt: 1000, output: 200, tellsQ: tellsQueue,
	}
}

// result is what became of a stretch of time.
type result struct {
	ttft       float64 // mean, seconds
	throughput float64 // requests finished per second
	limit      float64 // mean
	least      int
}

// run lets callers come at a rate.
func (p *plant) run(rate float64, d time.Duration) result {
	p.rate = rate
	end := p.now + d
	before, ttft := p.engine.Count(), *p.engine.TTFT()
	sum, looks, least := 0.0, 0.0, math.MaxInt
	for p.now < end {
		p.arrive()
		step, ok := p.engine.Begin()
		if !ok {
			step.Duration = 5 * time.Millisecond
		}
		p.now += step.Duration
		if ok {
			p.engine.Finish(step, p.now)
		}
		p.inFlight = p.engine.RunningLen() + p.engine.WaitingLen()
		for ; p.looked < p.now; p.looked += 200 * time.Millisecond {
			p.look()
			sum, looks, least = sum+float64(p.most), looks+1, min(least, p.most)
		}
	}
	count, after := p.engine.Count(), p.engine.TTFT()
	return result{
		ttft:       (after.Sum - ttft.Sum) / float64(after.Total-ttft.Total),
		throughput: float64(count.Finished-before.Finished) / d.Seconds(),
		limit:      sum / looks, least: least,
	}
}

// arrive lets those in that have come and find room.
func (p *plant) arrive() {
	for p.next <= p.now {
		if p.inFlight < p.most {
			p.engine.Submit(&engine.Sequence{Prompt: p.prompt/2 + p.rng.IntN(p.prompt), Output: 1 + p.rng.IntN(2*p.output)}, p.now)
			p.inFlight++
		}
		p.next = max(p.next, p.now-time.Second) + time.Duration(p.rng.ExpFloat64()/p.rate*float64(time.Second))
	}
}

func (p *plant) look() {
	count, ttft := p.engine.Count(), p.engine.TTFT()
	p.view.InFlight = p.inFlight
	p.view.TTFTSum, p.view.TTFTCount, p.view.PromptTokens = ttft.Sum, float64(ttft.Total), float64(count.PromptTokens)
	if p.tellsQ {
		p.view.Waiting = float64(p.engine.WaitingLen())
	}
	p.most = p.limit.Step(start.Add(p.looked), p.view)
}

// TestEndpointLimitHoldsAnEngineNearItsKnee overloads an engine whose KV cache
// holds about 35 requests, with a configured limit of 200: without a correction
// 165 of them wait.
func TestEndpointLimitHoldsAnEngineNearItsKnee(t *testing.T) {
	free := newPlant(t, 200, true)
	idle := free.run(1, 2*time.Minute)
	unlimited := newPlant(t, 200, true)
	unlimited.view.Measured = false
	worst := unlimited.run(20, 5*time.Minute)
	for name, tells := range map[string]bool{"queue told": true, "queue unknown": false} {
		p := newPlant(t, 200, tells)
		p.run(1, time.Minute)
		p.run(20, time.Minute)
		got := p.run(20, 10*time.Minute)
		t.Logf("%s: idle %.3fs; unlimited %.2fs at %.2f/s; limit %.0f: %.3fs at %.2f/s", name, idle.ttft, worst.ttft, worst.throughput, got.limit, got.ttft, got.throughput)
		if got.limit > 45 || got.ttft > 6*idle.ttft {
			t.Errorf("%s: limit %.0f, first tokens take %.2f s; want about 35 and near the %.2f s of an idle engine (%.2f s without a limit)", name, got.limit, got.ttft, idle.ttft, worst.ttft)
		}
		if got.throughput < 0.85*worst.throughput {
			t.Errorf("%s: %.2f requests/s; want near the engine's %.2f", name, got.throughput, worst.throughput)
		}
	}
}

// TestEndpointLimitFindsTheKneeOfAnEngineThatWasNeverIdle starts in an overload:
// no time without a queue was ever seen.
func TestEndpointLimitFindsTheKneeOfAnEngineThatWasNeverIdle(t *testing.T) {
	p := newPlant(t, 200, true)
	p.run(20, 3*time.Minute)
	if got := p.run(20, 10*time.Minute); got.limit > 45 || got.limit < 25 || got.ttft > 1 {
		t.Errorf("limit %.0f, first tokens take %.2f s; want about 35 and less than 1 s", got.limit, got.ttft)
	}
}

func TestEndpointLimitRecoversAfterAnEngineWasSlow(t *testing.T) {
	p := newPlant(t, 30, true)
	before := p.run(8, 2*time.Minute)
	p.engine.SetSlow(6)
	slow := p.run(8, 2*time.Minute)
	p.engine.SetSlow(1)
	p.run(8, time.Minute)
	after := p.run(8, 2*time.Minute)
	t.Logf("limit %.1f, slow %.1f (least %d), after %.1f", before.limit, slow.limit, slow.least, after.limit)
	if slow.limit > 0.8*before.limit {
		t.Errorf("a slow engine is sent %.1f at once; want clearly less than %.1f", slow.limit, before.limit)
	}
	if after.limit < 0.9*before.limit {
		t.Errorf("after it the limit is %.1f; want %.1f again", after.limit, before.limit)
	}
}

// TestEndpointLimitLooksAtNoLengthOfAnswers lets answers grow eight times as long
// at a load that leaves no queue.
func TestEndpointLimitLooksAtNoLengthOfAnswers(t *testing.T) {
	p := newPlant(t, 20, true)
	p.run(2, time.Minute)
	p.output = 800
	if got := p.run(0.5, 5*time.Minute); got.least < 20 {
		t.Errorf("longer answers brought the limit down to %d; want it to stay 20", got.least)
	}
}

// TestEndpointLimitFollowsPromptsThatGrow lets prompts grow four times as long.
func TestEndpointLimitFollowsPromptsThatGrow(t *testing.T) {
	p := newPlant(t, 16, false)
	p.output, p.prompt = 400, 300
	p.run(1, time.Minute)
	short := p.run(4, 2*time.Minute)
	p.prompt = 1200
	got := p.run(4, 5*time.Minute)
	t.Logf("first tokens take %.3f s and then %.3f s, limit %.1f", short.ttft, got.ttft, got.limit)
	if got.limit < 14 {
		t.Errorf("longer prompts brought the limit down to %.1f; want it to stay near 16", got.limit)
	}
}

func TestEndpointLimitStaysWithinItsBounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var l EndpointLimit
		now, v := start, EndpointView{}
		for range 200 {
			now = now.Add(time.Duration(rng.IntN(3000)-200) * time.Millisecond)
			v.InFlight, v.Max, v.Batch = rng.IntN(400), 1+rng.IntN(300), rng.IntN(300)
			v.KVTokens, v.MeanTokens = float64(rng.IntN(2))*5e5*rng.Float64(), float64(rng.IntN(3000))
			v.Measured, v.QueueKnown, v.Waiting = rng.IntN(4) > 0, rng.IntN(2) == 0, float64(rng.IntN(50))
			v.TTFTCount += float64(rng.IntN(40))
			v.TTFTSum += rng.ExpFloat64()
			v.PromptTokens += float64(rng.IntN(9000))
			if rng.IntN(20) == 0 {
				v.TTFTCount, v.TTFTSum, v.PromptTokens = 0, 0, 0 // the engine began anew
			}
			if got := l.Step(now, v); got < 1 || got > v.Max || v.Batch > 0 && got > v.Batch {
				t.Fatalf("limit %d of %+v", got, v)
			}
		}
	}
}

func TestEndpointLimitFadesWithoutNews(t *testing.T) {
	l := EndpointLimit{factor: 0.2, predict: 1, short: 5}
	v := EndpointView{Max: 100, Measured: true, TTFTCount: 50, TTFTSum: 50, InFlight: 0}
	now := start
	for range 60 * 5 {
		l.Step(now, v)
		now = now.Add(200 * time.Millisecond)
	}
	if got := l.Step(now, v); got != 100 {
		t.Errorf("a minute after the last first token the limit is %d; want 100", got)
	}
}
