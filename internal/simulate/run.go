package simulate

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// Spec is everything a run depends on.
type Spec struct {
	Seed     uint64
	GPUs     []GPU
	Arrivals []load.Arrival // in order of time
	Faults   []Fault
	Routers  int
	Policy   Policy
	// Warmup is how long arrivals do not count in the result; Duration is when
	// the last could come.
	Warmup, Duration time.Duration
	// SLO is the longest time to first token that is good.
	SLO time.Duration
}

// Bounds of a run, far above what makes sense.
const (
	MaxGPUs    = 4096
	MaxRouters = 4096
)

func (s *Spec) check() error {
	switch {
	case len(s.GPUs) < 1 || len(s.GPUs) > MaxGPUs:
		return fmt.Errorf("%d GPUs; accepted: 1…%d", len(s.GPUs), MaxGPUs)
	case s.Routers < 1 || s.Routers > MaxRouters:
		return fmt.Errorf("%d routers; accepted: 1…%d", s.Routers, MaxRouters)
	case s.Duration <= 0 || s.Warmup < 0 || s.Warmup >= s.Duration:
		return fmt.Errorf("duration %v with a warm-up of %v; accepted: a duration above 0 and a shorter warm-up", s.Duration, s.Warmup)
	case s.SLO <= 0:
		return fmt.Errorf("objective %v; accepted: above 0", s.SLO)
	case s.Policy.build == nil:
		return errors.New("no policy")
	}
	longest := math.MaxInt
	for i, g := range s.GPUs {
		if err := g.Profile.Check(); err != nil {
			return fmt.Errorf("GPU %d: %w", i, err)
		}
		longest = min(longest, g.Profile.MaxModelLen())
	}
	last := time.Duration(0)
	for i, a := range s.Arrivals {
		if a.At < last || a.Prompt < 1 || a.Output < 1 || a.Prompt+a.Output > longest {
			return fmt.Errorf("arrival %d: %d prompt and %d output tokens at %v; accepted: in order of time, both at least 1, at most %d together", i, a.Prompt, a.Output, a.At, longest)
		}
		last = a.At
	}
	for i, f := range s.Faults {
		if f.GPU < 0 || f.GPU >= len(s.GPUs) || f.At < 0 || f.For <= 0 || !(f.Slow >= 0) || math.IsInf(f.Slow, 1) {
			return fmt.Errorf("fault %d: %+v; accepted: a GPU of the fleet, a length above 0, a factor of at least 0", i, f)
		}
	}
	return nil
}

// request is one arrival on its way.
type request struct {
	index   int
	arrived time.Duration
	router  int32
	gpu     int32
	second  int // where ours would retry; −1 leaves it to Envoy
	seed    uint64
	retried bool
	outcome outcome
	sent    time.Duration // of the latest attempt
	ttft    time.Duration // from the arrival, once answered
	perTok  time.Duration // mean time per output token after the first
	ended   time.Duration
	seq     engine.Sequence
}

// outcome is how a request ended.
type outcome uint8

const (
	answered outcome = iota + 1
	refused          // by the policy
	failed           // cut in the middle, or no second attempt left
)

// world is a run in progress.
type world struct {
	spec      Spec
	now       time.Duration
	agenda    agenda
	gpus      []*gpu
	addresses []netip.AddrPort
	routers   []*router
	requests  []request
	next      int // arrival
	open      int // requests that have arrived and not ended
	recorder  *recorder
}

// errCrashed is why sequences of a crashed engine ended.
var errCrashed = errors.New("engine crashed")

// Run simulates one policy. The same Spec always gives the same Result.
func Run(spec Spec) (Result, error) {
	w, err := newWorld(spec, nil)
	if err != nil {
		return Result{}, fmt.Errorf("simulate: %w", err)
	}
	w.run()
	return w.result(), nil
}

func newWorld(spec Spec, rec *recorder) (*world, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	w := &world{spec: spec, recorder: rec}
	for i, g := range spec.GPUs {
		w.gpus = append(w.gpus, newGPU(g))
		w.addresses = append(w.addresses, addressOf(i))
		if rec != nil {
			w.gpus[i].gaps = &timeline{}
		}
	}
	for i := range spec.Routers {
		w.routers = append(w.routers, newRouter(w, i))
	}
	w.arrivals()
	w.schedule()
	return w, nil
}

// arrivals prepares the requests; which router gets one depends on the seed
// alone.
func (w *world) arrivals() {
	w.requests = make([]request, len(w.spec.Arrivals))
	for i, a := range w.spec.Arrivals {
		h := mix(w.spec.Seed<<20 + uint64(i))
		q := &w.requests[i]
		*q = request{index: i, arrived: a.At, router: int32(h % uint64(w.spec.Routers)), seed: mix(h)}
		q.seq = engine.Sequence{Prompt: a.Prompt, Output: a.Output, Stops: true, Owner: q}
	}
}

// schedule fixes the phases of all that is periodic, and the faults.
func (w *world) schedule() {
	phase := func(kind eventKind, i int, period time.Duration) time.Duration {
		h := mix(w.spec.Seed ^ mix(uint64(kind)<<32+uint64(i)))
		return time.Duration(h % uint64(period))
	}
	for i := range w.gpus {
		w.agenda.add(phase(gpuSampled, i, samplePeriod), gpuSampled, i, 0)
		if w.spec.Policy.glances {
			w.agenda.add(phase(gpuGlanced, i, glancePeriod), gpuGlanced, i, 0)
		}
	}
	for i := range w.routers {
		w.agenda.add(phase(routerTicks, i, tickPeriod), routerTicks, i, 0)
	}
	for i, f := range w.spec.Faults {
		w.agenda.add(f.At, faultBegins, i, 0)
	}
}

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// run lets everything happen until the last request has ended.
func (w *world) run() {
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
		w.handle(e)
	}
}

func (w *world) handle(e event) {
	i := int(e.a)
	switch e.kind {
	case stepEnds:
		w.stepEnds(i, int(e.b))
	case gpuSampled:
		w.sampleGPU(i)
		w.agenda.add(w.now+samplePeriod, gpuSampled, i, 0)
	case sampleArrives:
		g := w.gpus[i]
		g.window.Add(g.onTheWay[0])
		g.onTheWay = g.onTheWay[1:]
		g.arrived++
	case gpuGlanced:
		if g := w.gpus[i]; !g.down {
			g.glanceKV, g.glanceWaiting = g.engine.KVUsage(), float64(g.engine.WaitingLen())
		}
		w.agenda.add(w.now+glancePeriod, gpuGlanced, i, 0)
	case routerTicks:
		w.tick(i)
		w.agenda.add(w.now+tickPeriod, routerTicks, i, 0)
	case ledgerHears:
		w.routers[i].heardEnd(int(e.b))
	case faultBegins:
		w.faultBegins(i)
	case faultEnds:
		w.faultEnds(i)
	}
}

func (w *world) sampleGPU(i int) {
	g := w.gpus[i]
	if g.down {
		return // the scrape fails; the last sample ages
	}
	g.onTheWay = append(g.onTheWay, g.sample(w.now))
	w.agenda.add(w.now+sampleDelay, sampleArrives, i, 0)
}

func (w *world) tick(i int) {
	r := w.routers[i]
	r.listen()
	r.balancer.tick()
	if i == 0 && w.recorder != nil {
		w.recorder.tick(w)
	}
	r.rotate()
}

// route sends a request to where its router's policy says.
func (w *world) route(q *request, failedOn int) {
	r := w.routers[q.router]
	i := r.balancer.choose(q, failedOn)
	if i < 0 {
		w.end(q, refused)
		return
	}
	q.gpu, q.sent = int32(i), w.now
	r.dispatched(i, q)
	g := w.gpus[i]
	if g.down {
		w.attemptFailed(q) // connection refused
		return
	}
	g.engine.Submit(&q.seq, w.now)
	if !g.busy {
		w.beginStep(i)
	}
}

// attemptFailed ends an attempt; one that had no token yet has a second one, as
// Envoy retries it.
func (w *world) attemptFailed(q *request) {
	w.routers[q.router].ended(int(q.gpu), false)
	if q.retried || q.seq.Generated() > 0 {
		w.end(q, failed)
		return
	}
	q.retried = true
	old := &q.seq
	q.seq = engine.Sequence{Prompt: old.Prompt, Output: old.Output, Stops: true, Owner: q}
	w.route(q, int(q.gpu))
}

func (w *world) end(q *request, how outcome) {
	q.outcome, q.ended = how, w.now
	w.open--
}

func (w *world) beginStep(i int) {
	g := w.gpus[i]
	before := g.engine.Count().Preemptions
	step, ok := g.engine.Begin()
	if g.gaps != nil && g.engine.Count().Preemptions > before {
		g.gaps.add(w.now, w.now)
	}
	if g.busy = ok; !ok {
		return
	}
	g.step = step
	g.activity.Add(w.now, step)
	if g.gaps != nil && g.engine.Blocked() != engine.NotBlocked {
		g.gaps.add(w.now, w.now+step.Duration)
	}
	w.agenda.add(w.now+max(1, step.Duration), stepEnds, i, g.epoch)
}

func (w *world) stepEnds(i, epoch int) {
	g := w.gpus[i]
	if epoch != g.epoch {
		return // its engine has crashed meanwhile
	}
	for _, q := range g.engine.Finish(g.step, w.now) {
		w.answered(q.Owner.(*request))
	}
	w.beginStep(i)
}

func (w *world) answered(q *request) {
	r := w.routers[q.router]
	r.ended(int(q.gpu), true)
	r.ends[q.gpu].Add(fleet.CauseOK, 0, 0, admission.Client{})
	first, _ := q.seq.FirstToken()
	q.ttft = q.sent + first - q.arrived
	if q.seq.Output > 1 {
		q.perTok = (w.now - q.sent - first) / time.Duration(q.seq.Output-1)
	}
	w.end(q, answered)
}

func (w *world) faultBegins(i int) {
	f := w.spec.Faults[i]
	g := w.gpus[f.GPU]
	w.agenda.add(w.now+f.For, faultEnds, i, 0)
	if f.Slow > 0 {
		g.slowed++
		g.slow = f.Slow
		g.engine.SetSlow(g.slow)
		return
	}
	if g.down {
		return
	}
	if g.gaps != nil {
		g.gaps.add(w.now, w.now+f.For)
	}
	g.down = true
	g.epoch++
	g.busy = false
	dead := g.engine.KillAll(errCrashed)
	g.bury()
	g.boot()
	for _, q := range dead {
		w.attemptFailed(q.Owner.(*request))
	}
}

func (w *world) faultEnds(i int) {
	f := w.spec.Faults[i]
	g := w.gpus[f.GPU]
	if f.Slow > 0 {
		if g.slowed--; g.slowed == 0 {
			g.slow = 1
			g.engine.SetSlow(1)
		}
		return
	}
	g.down = false
}

// Result is what one run came to. Times are of requests that arrived after the
// warm-up.
type Result struct {
	Requests int // after the warm-up
	Answered int
	Refused  int
	Failed   int
	// TTFT holds the times to first token of those answered, in ascending order.
	TTFT []time.Duration
	// Slow counts requests that had no first token within the objective: slow,
	// refused or failed.
	Slow int
	// ITL99 is the 99th percentile of all gaps between tokens of the whole run,
	// to 2 %.
	ITL99 time.Duration
	// Preemptions of the whole run.
	Preemptions int
	// Goodput is the number of requests per second that were answered in full
	// with their first token in time.
	Goodput float64
}

func (w *world) result() Result {
	out := Result{}
	for i := range w.requests {
		q := &w.requests[i]
		if q.arrived < w.spec.Warmup {
			continue
		}
		out.Requests++
		switch q.outcome {
		case answered:
			out.Answered++
			out.TTFT = append(out.TTFT, q.ttft)
		case refused:
			out.Refused++
		case failed:
			out.Failed++
		}
		if q.outcome != answered || q.ttft > w.spec.SLO {
			out.Slow++
		}
	}
	slices.Sort(out.TTFT)
	itl := engine.NewHistogram(itlBounds)
	for _, g := range w.gpus {
		g.bury()
		itl.Merge(g.itl)
		out.Preemptions += int(g.gone.Preemptions)
	}
	out.ITL99 = time.Duration(itl.Quantile(0.99) * float64(time.Second))
	out.Goodput = float64(out.Requests-out.Slow) / (w.spec.Duration - w.spec.Warmup).Seconds()
	return out
}

// SlowShare is the share of requests without a first token within the
// objective, 0…1.
func (r *Result) SlowShare() float64 {
	if r.Requests == 0 {
		return 0
	}
	return float64(r.Slow) / float64(r.Requests)
}

// TTFTQuantile is a quantile of the times to first token of answered requests.
func (r *Result) TTFTQuantile(q float64) time.Duration { return load.Quantile(r.TTFT, q) }
