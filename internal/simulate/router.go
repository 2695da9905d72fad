package simulate

import (
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/own"
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
	sent     []own.SentExactly
	ends     []own.Ends
	foreign  []own.Foreign
	heard    []int // samples already compared with the ledger, by GPU

	outlier outliers
}

func newRouter(w *world, id int) *router {
	n := len(w.gpus)
	r := &router{
		w: w, id: id, rng: rand.New(rand.NewPCG(w.spec.Seed, 0x726f757465720000+uint64(id))),
		inFlight: make([]int32, n), ledger: make([]int32, n), sent: make([]own.SentExactly, n), ends: make([]own.Ends, n),
		foreign: make([]own.Foreign, n), heard: make([]int, n),
	}
	for g := range r.ends {
		r.ends[g] = own.NewEnds(tickPeriod)
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
	r.sent[g].Add(float64(q.seq.Prompt), r.w.gpus[g].arrived)
}

// ended notes that an attempt ended; Envoy knows at once, the ledger later.
func (r *router) ended(g int, ok bool) {
	r.inFlight[g]--
	r.w.agenda.add(r.w.now+ledgerDelay, ledgerHears, r.id, g)
	r.outlier.note(g, ok, r.w.now)
	if !ok {
		r.ends[g].Add(fleet.CauseReset, 0, 0, admission.Client{})
	}
}

// heardEnd is the ledger's turn.
func (r *router) heardEnd(g int) { r.ledger[g]-- }

// own is what the router knows of a GPU without asking it, made as serve makes
// it: package own names what differs.
func (r *router) own(g int) scorer.Own {
	o := r.ends[g].Own()
	o.InFlight = r.ledger[g]
	o.MaxInFlight = r.w.gpus[g].spec.Profile.MaxSeqs
	o.Unanswered = r.foreign[g].Unanswered(o.Attempts5s)
	o.SentPromptTokens = r.sent[g].SinceSample(r.w.gpus[g].arrived)
	o.ArrivedPromptTokens = r.sent[g].LastSecond()
	return o
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
		r.foreign[i].Add(s.Running+s.Waiting, r.ledger[i])
	}
}

// rotate ends the tick.
func (r *router) rotate() {
	for g := range r.sent {
		r.sent[g].Rotate()
		r.ends[g].Rotate()
	}
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
