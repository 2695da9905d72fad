package simulate

import (
	"bytes"
	"context"
	"encoding/csv"
	"image/png"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

const smallGPU = "llama-3.1-8b-rtx4090"

// independent is the workload that needs no trace.
func independent(t testing.TB) Workload {
	t.Helper()
	w, err := LoadWorkload(Poisson, "")
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func small(t testing.TB, scenario string, gpus int, load float64, d time.Duration) Options {
	return Options{
		Setup:  Setup{Workload: independent(t), Scenario: scenario, Profile: smallGPU, GPUs: gpus, Load: load, Duration: d},
		Warmup: d / 10, SLO: 2 * time.Second, Policies: Policies(nil), Routers: []int{1, 4}, Seeds: []uint64{1, 2},
	}
}

func compare(t testing.TB, o Options) Comparison {
	t.Helper()
	c, err := Compare(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTheSameSeedsGiveTheSameBytes(t *testing.T) {
	var tables, files [2]bytes.Buffer
	for i := range tables {
		c := compare(t, small(t, "failures", 4, 0.9, 20*time.Second))
		if err := c.WriteTable(&tables[i]); err != nil {
			t.Fatal(err)
		}
		if err := c.WriteCSV(&files[i]); err != nil {
			t.Fatal(err)
		}
		if err := c.WritePNG(&files[i]); err != nil {
			t.Fatal(err)
		}
	}
	if tables[0].String() != tables[1].String() || !bytes.Equal(files[0].Bytes(), files[1].Bytes()) {
		t.Fatal("two comparisons of the same seeds differ")
	}
	other := small(t, "failures", 4, 0.9, 20*time.Second)
	other.Seeds = []uint64{3, 4}
	var table bytes.Buffer
	c := compare(t, other)
	if err := c.WriteTable(&table); err != nil || table.String() == tables[0].String() {
		t.Fatalf("other seeds give the same table (%v)", err)
	}
}

// TestEveryArrivalEndsOnce drives every policy through faults at random: each
// request has one outcome, engines and counts are empty at the end.
func TestEveryArrivalEndsOnce(t *testing.T) {
	work := independent(t)
	policies := Policies(nil)
	rapid.Check(t, func(rt *rapid.T) {
		s := Setup{
			Workload: work, Scenario: rapid.SampledFrom(Scenarios()).Draw(rt, "scenario").Name, Profile: smallGPU,
			GPUs: rapid.IntRange(1, 5).Draw(rt, "gpus"), Load: rapid.Float64Range(0.2, 2).Draw(rt, "load"), Duration: 5 * time.Second,
		}
		spec, _, err := s.Spec(rapid.Uint64Range(1, 1000).Draw(rt, "seed"))
		if err != nil {
			rt.Fatal(err)
		}
		for range rapid.IntRange(0, 3).Draw(rt, "faults") {
			spec.Faults = append(spec.Faults, Fault{
				GPU: rapid.IntRange(0, s.GPUs-1).Draw(rt, "gpu"), At: time.Duration(rapid.IntRange(0, 6000).Draw(rt, "at")) * time.Millisecond,
				For: time.Duration(rapid.IntRange(1, 3000).Draw(rt, "for")) * time.Millisecond, Slow: float64(rapid.IntRange(0, 5).Draw(rt, "slow")),
			})
		}
		spec.Policy, spec.Routers, spec.SLO = rapid.SampledFrom(policies).Draw(rt, "policy"), rapid.IntRange(1, 3).Draw(rt, "routers"), time.Second
		w, err := newWorld(spec, nil)
		if err != nil {
			rt.Fatal(err)
		}
		w.run()
		checkEmpty(rt, w)
	})
}

func checkEmpty(t *rapid.T, w *world) {
	for i := range w.requests {
		q := &w.requests[i]
		if q.outcome == 0 || q.ended < q.arrived || q.outcome == answered && (q.ttft <= 0 || q.seq.Generated() != q.seq.Output) {
			t.Fatalf("request %d: outcome %d, ended %v after arriving at %v, first token %v", i, q.outcome, q.ended, q.arrived, q.ttft)
		}
	}
	for i, g := range w.gpus {
		if g.engine.RunningLen()+g.engine.WaitingLen()+g.engine.Used() != 0 {
			t.Fatalf("GPU %d still holds work", i)
		}
	}
	for _, r := range w.routers {
		if slices.Max(r.inFlight) != 0 || slices.Min(r.inFlight) != 0 || slices.Min(r.ledger) < 0 {
			t.Fatalf("router %d counts %v in flight, the ledger %v", r.id, r.inFlight, r.ledger)
		}
	}
	r := w.result()
	if n := r.Answered + r.Refused + r.Failed; n != r.Requests || r.Slow < r.Refused+r.Failed || len(r.TTFT) != r.Answered {
		t.Fatalf("%d of %d requests in the result: %+v", n, r.Requests, r)
	}
}

func TestPoliciesSeeTheSameArrivals(t *testing.T) {
	c := compare(t, small(t, "bursts", 2, 0.7, 20*time.Second))
	for _, r := range c.Runs {
		if first := c.Runs[0]; r.Seed == first.Seed && r.Requests != first.Requests {
			t.Errorf("%s with %d routers saw %d requests, %s %d", r.Policy, r.Routers, r.Requests, first.Policy, first.Requests)
		}
	}
}

// TestOursBeatsWhatItShould holds the result that matters at a small scale, with
// four routers and fixed seeds. The fleet has 64 GPUs because what herds does so
// the more the more requests come between two looks at the fleet.
func TestOursBeatsWhatItShould(t *testing.T) {
	if testing.Short() {
		t.Skip("some seconds of CPU")
	}
	o := small(t, "steady", 64, 0.8, 40*time.Second)
	o.Routers, o.Seeds = []int{4}, []uint64{1, 2, 3, 4}
	var err error
	if o.Policies, err = PoliciesByName([]string{RoundRobin, Random, MaxScore, Argmin, LeastRequest, Ours}, nil); err != nil {
		t.Fatal(err)
	}
	for _, r := range compare(t, o).Rows {
		t.Logf("%-14s over 2 s %.3f %% ± %.3f; ours less this: %+v %s", r.Policy, 100*r.Slow.Mean, 100*r.Slow.Half, r.OursLess, r.Verdict)
		switch r.Policy {
		case Ours:
		case LeastRequest:
			if r.Verdict == "worse" {
				t.Errorf("ours is worse than %s by %+v", r.Policy, r.OursLess)
			}
		default:
			if r.Verdict != "better" {
				t.Errorf("ours against %s: %q by %+v; want better, outside the interval", r.Policy, r.Verdict, r.OursLess)
			}
		}
	}
}

// idleWorld is a fleet without load.
func idleWorld(t *testing.T, policy string, gpus, routers int) *world {
	t.Helper()
	policies, err := PoliciesByName([]string{policy}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := engine.ProfileByName(smallGPU)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorld(Spec{
		Seed: 1, GPUs: equal(p, gpus), Routers: routers, Policy: policies[0], Duration: time.Hour, SLO: time.Second,
		Arrivals: []load.Arrival{{At: time.Minute, Prompt: 1, Output: 1}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestPoliciesChooseAsTheySay(t *testing.T) {
	q := &request{seq: engine.Sequence{Prompt: 100, Output: 10}}
	t.Run(RoundRobin, func(t *testing.T) {
		r := idleWorld(t, RoundRobin, 5, 1).routers[0]
		seen := make([]int, 5)
		for range 20 {
			seen[r.balancer.choose(q, -1)]++
		}
		if !slices.Equal(seen, []int{4, 4, 4, 4, 4}) {
			t.Fatalf("20 requests over 5 endpoints: %v", seen)
		}
	})
	t.Run(LeastRequest, func(t *testing.T) {
		r := idleWorld(t, LeastRequest, 4, 1).routers[0]
		copy(r.inFlight, []int32{3, 1, 2, 1})
		seen := make([]int, 4)
		for range 100 {
			seen[r.balancer.choose(q, -1)]++
		}
		if seen[0]+seen[2] != 0 || min(seen[1], seen[3]) < 20 {
			t.Fatalf("%v; want only the two of fewest, both often", seen)
		}
	})
	t.Run(P2C, func(t *testing.T) {
		r := idleWorld(t, P2C, 3, 1).routers[0]
		copy(r.inFlight, []int32{9, 1, 5})
		seen := make([]int, 3)
		for range 900 {
			seen[r.balancer.choose(q, -1)]++
		}
		// Of nine pairs of draws one is twice the busiest, and five have the idlest.
		if math.Abs(float64(seen[0])-100) > 40 || math.Abs(float64(seen[1])-500) > 60 {
			t.Fatalf("%v; want about 100, 500, 300", seen)
		}
	})
	t.Run(MaxScore, func(t *testing.T) {
		w := idleWorld(t, MaxScore, 3, 1)
		w.gpus[0].glanceKV, w.gpus[0].glanceWaiting = 0.1, 4 // 0 + 0.9
		w.gpus[1].glanceKV, w.gpus[1].glanceWaiting = 0.8, 0 // 1 + 0.2
		w.gpus[2].glanceKV, w.gpus[2].glanceWaiting = 0.5, 2 // 0.5 + 0.5
		if got := w.routers[0].balancer.choose(q, -1); got != 1 {
			t.Fatalf("chose %d; want the largest sum of queue and KV score, 1", got)
		}
	})
	t.Run(Argmin, func(t *testing.T) {
		r := idleWorld(t, Argmin, 3, 1).routers[0]
		copy(r.balancer.(*argmin).risk, []float64{0.3, 0.2, 0.25})
		for range 10 {
			if got := r.balancer.choose(q, -1); got != 1 {
				t.Fatalf("chose %d; want the smallest risk, 1", got)
			}
		}
	})
	t.Run("a retry goes elsewhere", func(t *testing.T) {
		for _, p := range Policies(nil) {
			r := idleWorld(t, p.Name, 4, 1).routers[0]
			for i := range 50 {
				q.seed = uint64(i)
				first := r.balancer.choose(q, -1)
				if again := r.balancer.choose(q, first); again == first || again < 0 {
					t.Fatalf("%s retried %d on %d", p.Name, first, again)
				}
			}
		}
	})
}

// TestOursFollowsWeightsAndCounts: an endpoint that the judge holds for full
// gets next to nothing, and of two candidates the one with fewer own requests
// wins.
func TestOursFollowsWeightsAndCounts(t *testing.T) {
	w := idleWorld(t, Ours, 4, 1)
	r := w.routers[0]
	for i, g := range w.gpus {
		s := g.sample(0)
		if i == 2 {
			s.KVUsage, s.Waiting, s.Running = 0.99, 8, 30
		}
		g.window.Add(s)
		g.arrived++
	}
	w.now = sampleDelay
	r.balancer.tick()
	count := func() []int {
		seen := make([]int, 4)
		for i := range 2000 {
			seen[r.balancer.choose(&request{seed: mix(uint64(i)), seq: engine.Sequence{Prompt: 10}}, -1)]++
		}
		return seen
	}
	if seen := count(); seen[2] > 60 || min(seen[0], seen[1], seen[3]) < 500 {
		t.Fatalf("shares %v; want next to nothing for the full one and even shares for the rest", seen)
	}
	r.ledger[0] = 50
	if seen := count(); seen[0] >= seen[1]/3 {
		t.Fatalf("shares %v; want few for the one with 50 in flight", seen)
	}
}

// TestTelemetryIsLate: what the window says is what the engine said 50 ms before
// it arrived, and never newer.
func TestTelemetryIsLate(t *testing.T) {
	o := small(t, "steady", 2, 0.9, 10*time.Second)
	spec, _, err := o.Spec(1)
	if err != nil {
		t.Fatal(err)
	}
	spec.Policy, spec.Routers, spec.SLO = Policies(nil)[0], 1, time.Second
	w, err := newWorld(spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	type state struct{ running, kv float64 }
	said := map[time.Duration]state{}
	samples := 0
	for w.next < len(w.requests) || w.open > 0 {
		if w.next < len(w.requests) && w.requests[w.next].arrived <= w.agenda.next() {
			q := &w.requests[w.next]
			w.next++
			w.now = q.arrived
			w.open++
			w.route(q, -1)
			continue
		}
		e := w.agenda.pop()
		w.now = e.at
		if e.kind == gpuSampled && e.a == 0 {
			said[w.now] = state{float64(w.gpus[0].engine.RunningLen()), w.gpus[0].engine.KVUsage()}
		}
		w.handle(e)
		if e.kind == sampleArrives && e.a == 0 {
			s, _ := w.gpus[0].window.Latest()
			sent := s.At.Sub(origin) - sampleDelay
			if want, ok := said[sent]; !ok || want != (state{s.Running, s.KVUsage}) || w.now-sent != sampleDelay {
				t.Fatalf("at %v the window says %v running, KV %v; the engine said %v at %v", w.now, s.Running, s.KVUsage, want, sent)
			}
			samples++
		}
	}
	if samples < 50 {
		t.Fatalf("%d samples arrived in 10 s", samples)
	}
}

// TestSamplesAreWhatARealServerShows: framebuffer use never moves, activity
// stays within its bounds and rises with work.
func TestSamplesAreWhatARealServerShows(t *testing.T) {
	o := small(t, "slowdowns", 2, 1.1, 20*time.Second)
	spec, _, err := o.Spec(1)
	if err != nil {
		t.Fatal(err)
	}
	spec.Policy, spec.Routers, spec.SLO = Policies(nil)[0], 1, time.Second
	w, err := newWorld(spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	idle := w.gpus[0].sample(0)
	w.run()
	busy, ok := w.gpus[0].window.Latest()
	if !ok || idle.FBUsedMiB != busy.FBUsedMiB || busy.FBUsedMiB < 0.9*busy.FBTotalMiB {
		t.Fatalf("framebuffer %v MiB before and %v MiB after the load", idle.FBUsedMiB, busy.FBUsedMiB)
	}
	if idle.GRActive != 0 || idle.PowerWatts != 20 {
		t.Errorf("idle: activity %v, %v W", idle.GRActive, idle.PowerWatts)
	}
	for name, v := range map[string]float64{"GRActive": busy.GRActive, "DRAMActive": busy.DRAMActive, "PCIeShare": busy.PCIeShare, "GPUUtil": busy.GPUUtil} {
		if v < 0 || v > 1 {
			t.Errorf("%s is %v", name, v)
		}
	}
}

func TestOutliersFollowEnvoysDefaults(t *testing.T) {
	o := newOutliers(20)
	for range outlierStreak - 1 {
		o.note(3, false, 0)
	}
	o.note(3, true, 0)
	for range outlierStreak - 1 {
		o.note(3, false, 0)
	}
	if len(o.at(0)) != 20 {
		t.Fatal("ejected before five failures in a row")
	}
	o.note(3, false, 0)
	for range outlierStreak {
		o.note(4, false, 0)
		o.note(5, false, 0)
	}
	if got := o.at(1); len(got) != 18 || slices.Contains(got, 3) || slices.Contains(got, 4) {
		t.Fatalf("usable %v; want all but 3 and 4: 10 %% at most", got)
	}
	if len(o.at(outlierBase)) != 20 {
		t.Fatal("not back after 30 s")
	}
}

func TestArrivalsOfATraceKeepLengthsAndReachTheRate(t *testing.T) {
	var trace []load.Arrival
	for i := range 100 {
		trace = append(trace, load.Arrival{At: time.Duration(i*i) * time.Millisecond, Prompt: 10 + i, Output: 1 + i})
	}
	w := workload("test", "", trace)
	got, tooLong := w.Arrivals(7, 50, 20*time.Second, 205)
	if tooLong == 0 || math.Abs(float64(len(got)+tooLong)-1000) > 30 {
		t.Fatalf("%d arrivals and %d too long; want about 1,000", len(got), tooLong)
	}
	for i := 1; i < len(got); i++ {
		if got[i].At < got[i-1].At || got[i].Prompt-got[i].Output != 9 || got[i].Index != i {
			t.Fatalf("arrival %d: %+v after %+v", i, got[i], got[i-1])
		}
	}
}

func TestBurstsKeepTheMeanRate(t *testing.T) {
	var even []load.Arrival
	for i := range 6000 {
		even = append(even, load.Arrival{At: time.Duration(i) * 10 * time.Millisecond})
	}
	got := WithBursts(even, 0)
	in := func(from, to time.Duration) int {
		n := 0
		for _, a := range got {
			if a.At >= from && a.At < to {
				n++
			}
		}
		return n
	}
	if n := in(0, 4*time.Second); n != 880 {
		t.Errorf("%d arrivals in the burst; want 2.2 times 400", n)
	}
	if n := in(0, 60*time.Second); n != 6000 {
		t.Errorf("%d arrivals in three periods; want all 6,000", n)
	}
	if !slices.IsSortedFunc(WithBursts(even, 7*time.Second), func(a, b load.Arrival) int { return int(a.At - b.At) }) {
		t.Error("the warp turns time back")
	}
}

func TestReadMooncakeTrace(t *testing.T) {
	got, err := ReadMooncakeTrace(strings.NewReader(`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": []}
{"timestamp": 3000, "input_length": 7, "output_length": 1, "hash_ids": [0]}
`))
	if err != nil || len(got) != 3 {
		t.Fatalf("%d requests, %v", len(got), err)
	}
	if got[0].Prompt != 6758 || got[1].At != 1500*time.Millisecond || got[2].At != 3*time.Second || got[2].Index != 2 {
		t.Fatalf("got %+v; want the two of one timestamp spread over its 3 s", got)
	}
	for in, want := range map[string]string{
		`{"timestamp": 0, "input_length": 0, "output_length": 1}`:                        "line 1",
		"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1}\n{\"timestamp\":": "line 2",
		`{"input_length": 1, "output_length": 1}`:                                        "timestamp",
	} {
		if _, err := ReadMooncakeTrace(strings.NewReader(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v; want %q in it", in, err, want)
		}
	}
}

// TestPublicTraces reads the real files where they are at hand.
func TestPublicTraces(t *testing.T) {
	for name, want := range map[string]int{Azure: 19366, Mooncake: 12031} {
		w, err := LoadWorkload(name, "../../"+TracesDir())
		if err != nil || w.trace == nil {
			t.Logf("%s: not at hand (FAIRLEAD_TRACES): %v", name, err)
			continue
		}
		if len(w.trace) != want {
			t.Errorf("%s: %d requests, want %d", name, len(w.trace), want)
		}
		if got, _ := w.Arrivals(1, 20, 30*time.Second, 1<<20); len(got) < 300 || len(got) > 900 {
			t.Errorf("%s: %d arrivals in 30 s at 20/s", name, len(got))
		}
	}
	w, err := LoadWorkload(Azure, t.TempDir())
	if err != nil || w.trace != nil || !strings.Contains(w.About, "not at hand") {
		t.Errorf("without the trace: %q, %v; want fitted lengths, and it says so", w.About, err)
	}
	if _, err := LoadWorkload(Mooncake, t.TempDir()); err == nil {
		t.Error("Mooncake without its trace gives no error")
	}
}

func TestChartAndCSVHaveEveryRun(t *testing.T) {
	c := compare(t, small(t, "steady", 2, 0.5, 10*time.Second))
	var drawing, text bytes.Buffer
	if err := c.WritePNG(&drawing); err != nil {
		t.Fatal(err)
	}
	picture, err := png.Decode(&drawing)
	if err != nil || picture.Bounds().Dx() != 960 || picture.Bounds().Dy() != 576 {
		t.Fatalf("picture %v, %v; want 960 × 576", picture.Bounds(), err)
	}
	if err := c.WriteCSV(&text); err != nil {
		t.Fatal(err)
	}
	lines, err := csv.NewReader(&text).ReadAll()
	if err != nil || len(lines) != 1+2*2*len(Policies(nil)) || lines[0][7] != "policy" {
		t.Fatalf("%d lines, %v", len(lines), err)
	}
}

func TestVerdictNeedsTheWholeInterval(t *testing.T) {
	runs := func(shares ...float64) []Outcome {
		var out []Outcome
		for _, s := range shares {
			out = append(out, Outcome{Slow: s})
		}
		return out
	}
	for _, test := range []struct {
		ours, other []Outcome
		want        string
	}{
		{runs(0.01, 0.02, 0.01), runs(0.05, 0.06, 0.05), "better"},
		{runs(0.05, 0.06, 0.05), runs(0.01, 0.02, 0.01), "worse"},
		{runs(0.01, 0.06, 0.01), runs(0.05, 0.02, 0.02), "even"},
		{runs(0.01), runs(0.05), ""},
	} {
		if e, got := against(test.ours, test.other); got != test.want {
			t.Errorf("%v against %v: %q by %+v, want %q", test.ours, test.other, got, e, test.want)
		}
	}
}

func TestFaultySpecsAreRefused(t *testing.T) {
	good := func() Spec {
		o := small(t, "steady", 2, 0.5, time.Second)
		spec, _, err := o.Spec(1)
		if err != nil {
			t.Fatal(err)
		}
		spec.Policy, spec.Routers, spec.SLO = Policies(nil)[0], 1, time.Second
		return spec
	}
	if _, err := Run(good()); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Spec){
		"no GPU":           func(s *Spec) { s.GPUs = nil },
		"no router":        func(s *Spec) { s.Routers = 0 },
		"no policy":        func(s *Spec) { s.Policy = Policy{} },
		"warm-up too long": func(s *Spec) { s.Warmup = s.Duration },
		"no objective":     func(s *Spec) { s.SLO = 0 },
		"request too long": func(s *Spec) { s.Arrivals = []load.Arrival{{Prompt: 50_000, Output: 1}} },
		"time goes back": func(s *Spec) {
			s.Arrivals = []load.Arrival{{At: 2, Prompt: 1, Output: 1}, {At: 1, Prompt: 1, Output: 1}}
		},
		"fault without GPU":  func(s *Spec) { s.Faults = []Fault{{GPU: 2, For: 1}} },
		"fault that is NaN":  func(s *Spec) { s.Faults = []Fault{{For: 1, Slow: math.NaN()}} },
		"profile that hangs": func(s *Spec) { s.GPUs[0].Profile.MaxSeqs = 0 },
	} {
		spec := good()
		spoil(&spec)
		if _, err := Run(spec); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for name, spoil := range map[string]func(*Options){
		"scenario": func(o *Options) { o.Scenario = "calm" }, "profile": func(o *Options) { o.Profile = "tpu" },
		"load": func(o *Options) { o.Load = 0 }, "GPUs": func(o *Options) { o.GPUs = 0 }, "seeds": func(o *Options) { o.Seeds = nil },
		"duration": func(o *Options) { o.Duration = 0 },
	} {
		o := small(t, "steady", 2, 0.5, time.Second)
		spoil(&o)
		if _, err := Compare(context.Background(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := PoliciesByName([]string{"best"}, nil); err == nil || !strings.Contains(err.Error(), RoundRobin) {
		t.Errorf("unknown policy: %v; want the known ones named", err)
	}
	if _, err := PoliciesByName([]string{OursModel}, nil); err == nil {
		t.Error("ours-model without a model accepted")
	}
	if all := Policies(scorer.Formula(scorer.FormulaOptions{})); len(all) != len(Policies(nil))+1 {
		t.Error("a model adds no policy")
	}
}

func TestCompareEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Compare(ctx, small(t, "steady", 2, 0.5, time.Second)); err == nil {
		t.Error("a comparison went on after the end of its context")
	}
	if _, err := Record(ctx, RecordOptions{Dir: t.TempDir(), Small: true}); err == nil {
		t.Error("a recording went on after the end of its context")
	}
}

// BenchmarkRun is 100 s of 32 GPUs at 75 % load under the shipped policy with
// four routers.
func BenchmarkRun(b *testing.B) {
	o := small(b, "steady", 32, 0.75, 100*time.Second)
	spec, _, err := o.Spec(1)
	if err != nil {
		b.Fatal(err)
	}
	policies, _ := PoliciesByName([]string{Ours}, nil)
	spec.Policy, spec.Routers, spec.SLO = policies[0], 4, 2*time.Second
	for b.Loop() {
		if _, err := Run(spec); err != nil {
			b.Fatal(err)
		}
	}
}
