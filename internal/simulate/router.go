package simulate

import (
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
)

// router is one replica with the sidecars that ask it: what it sent, what it
// knows, and how it chooses.
type router struct {
	w        *world
	id       int
	rng      *rand.Rand
	balancer balancer

	inFlight []int32 // own requests on each GPU, as Envoy counts them
	ledger   []int32 // the same as the ledger has it: ends come late
	sent     []sent
	ends     []ends
	foreign  []foreign
	heard    []int // samples already compared with the ledger, by GPU

	outlier outliers
}

func newRouter(w *world, id int) *router {
	n := len(w.gpus)
	r := &router{
		w: w, id: id, rng: rand.New(rand.NewPCG(w.spec.Seed, 0x726f757465720000+uint64(id))),
		inFlight: make([]int32, n), ledger: make([]int32, n), sent: make([]sent, n), ends: make([]ends, n),
		foreign: make([]foreign, n), heard: make([]int, n),
	}
	r.outlier = newOutliers(n)
	r.balancer = w.spec.Policy.build(r)
	return r
}

// InFlight implements plan.Live: slots are GPU indexes.
func (r *router) InFlight(slot uint32) int32 { return r.ledger[slot] }

// dispatched notes a request that goes to a GPU.
func (r *router) dispatched(g int, q *request) {
	r.inFlight[g]++
	r.ledger[g]++
	r.sent[g].add(float64(q.seq.Prompt), r.w.gpus[g].arrived)
}

// ended notes that an attempt ended; Envoy knows at once, the ledger later.
func (r *router) ended(g int, ok bool) {
	r.inFlight[g]--
	r.w.agenda.add(r.w.now+ledgerDelay, ledgerHears, r.id, g)
	r.outlier.note(g, ok, r.w.now)
	if !ok {
		r.ends[g].failed()
	}
}

// heardEnd is the ledger's turn.
func (r *router) heardEnd(g int) { r.ledger[g]-- }

// own is what the router knows of a GPU without asking it, as serve makes it.
func (r *router) own(g int) scorer.Own {
	own := r.ends[g].own()
	own.InFlight = r.ledger[g]
	own.MaxInFlight = r.w.gpus[g].spec.Profile.MaxSeqs
	own.Unanswered = r.foreign[g].unanswered(own.Attempts5s)
	own.SentPromptTokens = r.sent[g].sinceSample(r.w.gpus[g].arrived)
	own.ArrivedPromptTokens = r.sent[g].lastSecond()
	return own
}

// listen compares the samples that have come since the last tick with the
// ledger.
func (r *router) listen() {
	for i, g := range r.w.gpus {
		if g.arrived == r.heard[i] {
			continue
		}
		r.heard[i] = g.arrived
		s, _ := g.window.Latest()
		r.foreign[i].add(s.Running+s.Waiting, r.ledger[i])
	}
}

// rotate ends the tick.
func (r *router) rotate() {
	for g := range r.sent {
		r.sent[g].rotate()
		r.ends[g].rotate()
	}
}

// sent counts the prompt tokens sent to one GPU.
type sent struct {
	recent  [time.Second / tickPeriod]float64 // by tick: the last second
	at      int
	since   float64 // since the newest sample
	samples int     // which that was
}

func (s *sent) add(tokens float64, samples int) {
	s.recent[s.at] += tokens
	if samples != s.samples {
		s.samples, s.since = samples, 0
	}
	s.since += tokens
}

func (s *sent) sinceSample(samples int) float64 {
	if samples != s.samples {
		return 0
	}
	return s.since
}

func (s *sent) lastSecond() float64 {
	sum := 0.0
	for _, v := range s.recent {
		sum += v
	}
	return sum
}

func (s *sent) rotate() {
	s.at = (s.at + 1) % len(s.recent)
	s.recent[s.at] = 0
}

// ends counts how attempts on one GPU ended in the last 5 s. Faults here are
// crashes: resets and refused connections.
type ends struct {
	attempts, errors       [5 * time.Second / tickPeriod]int32 // by tick
	at                     int
	allAttempts, allErrors int32
	connect                int
	successes              uint64
}

func (e *ends) succeeded() {
	e.connect = 0
	e.successes++
	e.attempts[e.at]++
	e.allAttempts++
}

func (e *ends) failed() {
	e.connect++
	e.attempts[e.at]++
	e.errors[e.at]++
	e.allAttempts++
	e.allErrors++
}

func (e *ends) rotate() {
	e.at = (e.at + 1) % len(e.attempts)
	e.allAttempts -= e.attempts[e.at]
	e.allErrors -= e.errors[e.at]
	e.attempts[e.at], e.errors[e.at] = 0, 0
}

func (e *ends) own() scorer.Own {
	return scorer.Own{Errors5s: int(e.allErrors), Attempts5s: int(e.allAttempts), ConnectStreak: e.connect, Successes: e.successes}
}

// foreign compares an engine's count of requests with the ledger's over three
// samples, as serve does: what stands in all three counts.
type foreign struct {
	excess [3]int32
	at     int
}

func (f *foreign) add(engine float64, own int32) {
	f.excess[f.at] = int32(engine) - own
	f.at = (f.at + 1) % len(f.excess)
}

func (f *foreign) requests() int32 { return max(0, min(f.excess[0], f.excess[1], f.excess[2])) }

// logDelay is what serve takes the ledger to be behind the engine.
const logDelay = 150 * time.Millisecond

func (f *foreign) unanswered(ends5s int) float64 {
	missing := -float64(max(f.excess[0], f.excess[1], f.excess[2]))
	return max(0, missing-float64(ends5s)/5*logDelay.Seconds())
}

// outliers is Envoy's outlier detection at its defaults, for the baselines: five
// failures in a row put an endpoint out for 30 s times the number of its
// ejections, at most 10 % of the endpoints but always one; where fewer than half
// are left all are used (panic threshold).
type outliers struct {
	streak, times []int
	until         []time.Duration
	usable        []int32
	out           int
	next          time.Duration // when the first comes back
}

const (
	outlierStreak = 5
	outlierBase   = 30 * time.Second
)

func newOutliers(n int) outliers {
	o := outliers{streak: make([]int, n), times: make([]int, n), until: make([]time.Duration, n)}
	o.list(0)
	return o
}

func (o *outliers) note(g int, ok bool, now time.Duration) {
	if ok {
		o.streak[g] = 0
		return
	}
	o.streak[g]++
	if o.streak[g] < outlierStreak || o.until[g] > now || o.out >= max(1, len(o.streak)/10) {
		return
	}
	o.streak[g] = 0
	o.times[g]++
	o.until[g] = now + time.Duration(o.times[g])*outlierBase
	o.list(now)
}

// list rebuilds what is usable.
func (o *outliers) list(now time.Duration) {
	o.usable, o.out, o.next = o.usable[:0], 0, never
	for g, until := range o.until {
		if until > now {
			o.out++
			o.next = min(o.next, until)
			continue
		}
		o.usable = append(o.usable, int32(g))
	}
	if 2*len(o.usable) < len(o.until) {
		o.usable = o.usable[:0]
		for g := range o.until {
			o.usable = append(o.usable, int32(g))
		}
	}
}

const never = time.Duration(1<<63 - 1)

// at returns the endpoints that may be chosen, never none.
func (o *outliers) at(now time.Duration) []int32 {
	if now >= o.next {
		o.list(now)
	}
	return o.usable
}

// addressOf gives GPU i an address of its own.
func addressOf(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000)
}
