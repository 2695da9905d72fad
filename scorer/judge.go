package scorer

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Reason says why an endpoint has its state and weight; one enum for logs,
// metric labels and the page.
type Reason uint8

// Reasons.
const (
	ReasonNone     Reason = iota + 1 // nothing but its risk shapes the weight
	ReasonRisk                       // ejected: risk above RiskEject in two samples running
	ReasonXID                        // ejected: an XID that needs a reset
	ReasonLost                       // ejected: the GPU has fallen off the bus (XID 79), or the driver has lost it
	ReasonOOM                        // ejected: three out-of-memory answers in a row, which other endpoints don't give
	ReasonRefused                    // ejected: three refused or reset connections in a row
	ReasonGateHeld                   // would be ejected; kept because the pool cannot spare it
	ReasonProbe                      // readmitted or new: slow start is running; or long out, and tried with a little traffic
	ReasonStale                      // no telemetry young enough to judge
	ReasonNoSource                   // the pool has no telemetry; weight is plain capacity
	ReasonGPU                        // ejected: the driver says that a GPU needs a reset or a reboot, or could not remap a row
	ReasonGPUDrain                   // half the weight: the driver asks for a reset at leisure
	reasonCount
)

var reasonNames = [reasonCount]string{
	"invalid", "none", "risk", "xid", "lost", "oom", "refused", "gate_held", "probe", "stale", "no_source",
	"gpu", "gpu_drain",
}

func (r Reason) String() string {
	if r >= reasonCount {
		r = 0
	}
	return reasonNames[r]
}

// Reasons lists all valid reasons, for metric label sets.
func Reasons() []Reason {
	out := make([]Reason, 0, reasonCount-1)
	for r := Reason(1); r < reasonCount; r++ {
		out = append(out, r)
	}
	return out
}

// PoolView is one pool at one tick.
type PoolView struct {
	Name string
	// MaxInFlight bounds attempts per endpoint; 0 means unlimited.
	MaxInFlight int
	Endpoints   []EndpointView
}

// EndpointView is one endpoint at one tick.
type EndpointView struct {
	Address netip.AddrPort
	// Capacity is relative to the pool's other endpoints; values that are not
	// above 0 count as 1.
	Capacity float64
	// Window holds the endpoint's samples; nil where the pool has no telemetry.
	// Step only reads it.
	Window *telemetry.Window
	Own    Own
}

// Verdict is the judgement of one endpoint at one tick.
type Verdict struct {
	Endpoint fleet.EndpointKey
	// Risk is the model's last word, Smoothed the one that states follow.
	Risk, Smoothed fleet.Risk
	// Margin is the log odds of the model's last word.
	Margin float64
	State  fleet.State
	// Weight ≥ 0 is the share of new requests relative to the pool's other
	// endpoints; 0 only for an ejected endpoint.
	Weight float64
	Reason Reason
	// KVFree is the free part of the KV cache in tokens, or −1 if unknown.
	KVFree fleet.Tokens
	// KVSize is the whole KV cache in tokens, or 0 if unknown.
	KVSize fleet.Tokens
	// Stale is true when no telemetry is young enough to judge.
	Stale bool
}

// Constants of the policy. The risk thresholds are fleet.RiskEject and
// fleet.RiskPrefer.
const (
	// alphaUp and alphaDown smooth the risk: about two samples up, six down.
	// From any start the second sample above RiskEject brings the smoothed risk
	// above ejectSmoothed (0.91 · 0.82 = 0.746), so it is enough to eject.
	alphaUp, alphaDown = 0.7, 0.3
	ejectSamples       = 2
	ejectSmoothed      = 0.7
	// returnBelow for calmSamples samples ends an ejection (1 s at 5 Hz).
	returnBelow = 0.55
	calmSamples = 5
	// calmTime is the same for a risk that fades without samples: as long as five
	// samples take from the first to the last.
	calmTime = (calmSamples - 1) * 200 * time.Millisecond
	// preferSamples below RiskPrefer make an endpoint preferred; it stays so up
	// to preferLost.
	preferSamples = 3
	preferLost    = 0.5

	// weightFloor keeps a little traffic on every endpoint that serves: it shows
	// when the endpoint gets better, which no silent one can.
	weightFloor = 0.02
	// drainShare is what is left of the weight of an endpoint whose GPU asks for a
	// reset at leisure: it works, and emptied it can be reset sooner, but who
	// drains it, and when, is the operator's to say (endpoints[].drain).
	drainShare = 0.5
	// slowStart is Envoy's formula with aggression 1: weight · max(0.1, t/30 s).
	slowStart    = 30 * time.Second
	slowStartMin = 0.1

	// probeAfter is how long risk keeps an endpoint out altogether; a hard fault
	// does for maxHold. From then on it is on probation: it gets probeShare of the
	// pool's requests, at most probeMost of its capacity. An engine whose KV usage
	// stands near 100 % though nothing runs (vLLM does that when it has lost blocks,
	// #29928), or a server whose page died, would otherwise never be asked again.
	probeAfter = 30 * time.Second
	probeShare = 0.01
	probeMost  = 0.1

	// HoldAge is how old telemetry may get while its last word still counts.
	HoldAge = 2 * time.Second
	// relax is the time constant with which a stale endpoint's risk goes to the
	// pool's median: unknown is neither best nor worst.
	relax = 5 * time.Second
	// staleTarget bounds that median, so that a loaded pool's last word cannot
	// hold a stale endpoint out for ever; it is below returnBelow.
	staleTarget = 0.5

	// riskShare and hardShare bound how much of a pool may be ejected; one
	// endpoint always may be, the last never.
	riskShare, hardShare = 0.3, 0.5
	// A pool is loaded as a whole from the first pair of values on, until it is
	// below the second: then risk is no reason to remove capacity.
	loadedRisk, relievedRisk         = 0.5, 0.45
	loadedInFlight, relievedInFlight = 0.85, 0.75

	// faultStreak is how many failures of a kind in a row are a hard fault.
	faultStreak = 3
	// sharedStreak out-of-memory answers in a row within sharedSpan, or
	// sharedErrors failures that are one in sharedShare of the last 5 s, show an
	// endpoint troubled. Of a pool, sharedRest⁻¹ troubled at once is the work of
	// its requests. Three failures in a row come by chance once in 8,000 attempts
	// at a rate of one in sharedShare.
	sharedStreak = 2
	sharedSpan   = 30 * time.Second
	sharedErrors = 2
	sharedShare  = 20
	sharedRest   = 3
	// maxHold bounds how long a hard fault is held against an endpoint without
	// evidence either way, and is how long it must have served well for its
	// earlier faults to be forgotten.
	maxHold = 5 * time.Minute
	// blindHold is the first hold where no telemetry of the whole pool could
	// give evidence (Envoy's base ejection time), and the longest of an endpoint there
	// that refused connections.
	blindHold = 30 * time.Second
	// provenBySuccesses is how many good answers prove an endpoint alive that
	// was reached in spite of its ejection (Envoy's own balancer, a retry).
	provenBySuccesses = 3
)

// firstHold is the shortest time a hard fault is held against an endpoint; it
// doubles with each repetition up to maxHold. Proposed values: a process that
// ran out of memory needs a moment to free it, a reset GPU needs a restart of
// the server on it, a refused connection is over as soon as someone listens.
func firstHold(r Reason) time.Duration {
	switch r {
	case ReasonRefused:
		return 2 * time.Second
	case ReasonOOM:
		return 10 * time.Second
	}
	return 30 * time.Second
}

// Judge keeps the states of all endpoints of all pools between ticks. Make one
// with NewJudge. It is not safe for concurrent use.
type Judge struct {
	model     Model
	endpoints map[fleet.EndpointKey]*endpoint
	pools     map[string]*pool
	tick      uint64
	scratch   []*endpoint
	wanted    []*endpoint
	medians   []float64
}

// NewJudge returns a Judge that takes risks from model.
func NewJudge(model Model) *Judge {
	return &Judge{model: model, endpoints: map[fleet.EndpointKey]*endpoint{}, pools: map[string]*pool{}}
}

// SetModel replaces the model; states and smoothed risks stay.
func (j *Judge) SetModel(model Model) { j.model = model }

// pool is what a pool carries from tick to tick.
type pool struct {
	tick   uint64
	loaded bool
}

// endpoint is what an endpoint carries from tick to tick, and its view at this
// one.
type endpoint struct {
	key  fleet.EndpointKey
	view EndpointView
	tick uint64

	// Evidence.
	lastSample time.Time // arrival of the newest sample that was judged
	judged     bool      // risk holds a word of the model
	age        time.Duration
	condition  telemetry.Condition // as said within HoldAge, else 0
	busySince  time.Time           // since when own requests have been in flight without a break
	risk       float64
	margin     float64
	smoothed   float64
	stepAt     time.Time

	// Streaks, in samples.
	bad, calm, prefer int
	preferred         bool
	// fadedSince is since when a stale risk has been below returnBelow; zero if it
	// is not.
	fadedSince time.Time

	// Ejection.
	riskOut    bool   // risk says out
	fault      Reason // hard fault that says out, or 0
	faultAt    time.Time
	faults     int    // hard faults one after another, for the hold
	successes  uint64 // Own.Successes at faultAt
	ejected    bool
	ejectedAt  time.Time
	readmitted time.Time
	admitted   time.Time // when slow start began; zero if it is not running

	// Faults that were already acted upon.
	oomSeen, connectSeen int
	xidSince             time.Time

	oomStreak int       // at the tick before
	oomGrew   time.Time // when it last grew
}

// Step judges all endpoints of all pools, in their order. now must not go back;
// it is compared by its monotonic reading. The result is the caller's.
// Endpoints and pools that are no longer in pools are forgotten; what their
// windows and Own tell of earlier faults is no news when they come back.
func (j *Judge) Step(now time.Time, pools []PoolView) []Verdict {
	j.tick++
	n := 0
	for i := range pools {
		n += len(pools[i].Endpoints)
	}
	out := make([]Verdict, 0, n)
	for i := range pools {
		out = j.stepPool(now, &pools[i], out)
	}
	for key, e := range j.endpoints {
		if e.tick != j.tick {
			delete(j.endpoints, key)
		}
	}
	for name, p := range j.pools {
		if p.tick != j.tick {
			delete(j.pools, name)
		}
	}
	return out
}

func (j *Judge) stepPool(now time.Time, view *PoolView, out []Verdict) []Verdict {
	p, members := j.members(now, view)
	for _, e := range members {
		e.observe(now, j.model)
	}
	target, blind := j.staleTarget(members)
	shared := sharedTrouble(now, members)
	for _, e := range members {
		e.relaxTo(now, target)
		e.findFaults(now, shared)
		e.weighRisk(now)
		e.endFault(now, blind)
		e.settle(now)
	}
	j.gate(now, p, view.MaxInFlight, members)
	first := len(out)
	for _, e := range members {
		out = append(out, e.verdict(now, blind))
	}
	probe(now, members, out[first:])
	return out
}

// members returns the carried state of the pool and its endpoints, made where
// they are new. Endpoints that come into a pool we know start slowly; those of
// a pool seen for the first time don't, since all would.
func (j *Judge) members(now time.Time, view *PoolView) (*pool, []*endpoint) {
	p, known := j.pools[view.Name]
	if !known {
		p = &pool{}
		j.pools[view.Name] = p
	}
	p.tick = j.tick
	j.scratch = j.scratch[:0]
	for _, v := range view.Endpoints {
		key := fleet.EndpointKey{Pool: view.Name, Address: v.Address}
		e, ok := j.endpoints[key]
		if !ok {
			e = &endpoint{key: key, stepAt: now}
			if known {
				e.admitted = now
			}
			j.endpoints[key] = e
		}
		if !(v.Capacity > 0) || math.IsInf(v.Capacity, 1) {
			v.Capacity = 1
		}
		e.view, e.tick = v, j.tick
		if !ok {
			e.adopt()
		}
		j.scratch = append(j.scratch, e)
	}
	return p, j.scratch
}

// adopt takes the faults that a new endpoint brings along as already acted upon.
// Its window and its streaks may be older than the judge's knowledge of it, as
// those of a server that was drained, got its GPU reset and came back: only what
// happens from now on counts. A GPU's condition is a level and counts at once.
func (e *endpoint) adopt() {
	own := &e.view.Own
	e.oomSeen, e.connectSeen, e.successes = own.OOMStreak, own.ConnectStreak, own.Successes
	e.oomStreak = own.OOMStreak
	if e.view.Window != nil {
		_, e.xidSince = e.view.Window.XID()
	}
}

// observe takes in a new sample, if there is one.
func (e *endpoint) observe(now time.Time, model Model) {
	own := e.view.Own
	if own.InFlight <= 0 {
		e.busySince = time.Time{}
	} else if e.busySince.IsZero() {
		e.busySince = now
	}
	if own.OOMStreak > e.oomStreak {
		e.oomGrew = now
	}
	e.oomStreak = own.OOMStreak
	e.age = e.telemetryAge(now)
	e.condition = e.gpuCondition(now)
	if e.age > HoldAge {
		e.bad, e.calm, e.prefer, e.preferred = 0, 0, 0, false
		return
	}
	e.fadedSince = time.Time{}
	latest, _ := e.view.Window.Latest()
	if latest.At.Equal(e.lastSample) {
		return // a sample counts once, however many ticks it stands
	}
	word, ok := model.Assess(e.view.Window, own, now)
	if !ok || !(word.Risk >= 0) {
		return
	}
	e.lastSample = latest.At
	e.risk, e.margin = min(1, float64(word.Risk)), word.Margin
	e.smooth()
	e.judged = true
	e.bad = streak(e.bad, word.Hot())
	e.calm = streak(e.calm, e.smoothed < returnBelow)
	e.prefer = streak(e.prefer, e.smoothed < float64(fleet.RiskPrefer))
	if e.prefer >= preferSamples {
		e.preferred = true
	} else if e.smoothed > preferLost {
		e.preferred = false
	}
}

// telemetryAge is the window's age, or more where own requests are in flight
// and end well, and no number has moved since they came: a page frozen while
// the engine was idle still shows an idle engine. Where none ends well it is
// the engine that stands still, and the model is told by Own.Unanswered.
func (e *endpoint) telemetryAge(now time.Time) time.Duration {
	w := e.view.Window
	if w == nil {
		return telemetry.Never
	}
	age := w.Age(now)
	own := &e.view.Own
	if e.busySince.IsZero() || age == telemetry.Never || own.Attempts5s <= own.Errors5s {
		return age
	}
	since := e.busySince
	if w.Moved().After(since) {
		since = w.Moved()
	}
	// The hold time of telemetry, so that a slow client of an engine that is
	// long done does no harm at once.
	if still := now.Sub(since); still > HoldAge {
		age = max(age, still)
	}
	return age
}

// gpuCondition is what the driver says of the endpoint's GPUs, 0 if nothing that
// is young enough.
func (e *endpoint) gpuCondition(now time.Time) telemetry.Condition {
	if e.view.Window == nil {
		return 0
	}
	s, ok := e.view.Window.Last(telemetry.HasCondition, now, HoldAge)
	if !ok {
		return 0
	}
	return s.Condition
}

func (e *endpoint) smooth() {
	switch {
	case !e.judged:
		e.smoothed = e.risk
	case e.risk > e.smoothed:
		e.smoothed += alphaUp * (e.risk - e.smoothed)
	default:
		e.smoothed += alphaDown * (e.risk - e.smoothed)
	}
}

func streak(n int, on bool) int {
	if !on {
		return 0
	}
	return n + 1
}

func (e *endpoint) stale() bool { return e.age > HoldAge || !e.judged }

// staleTarget is the risk that stale endpoints relax to: the median of the
// pool's endpoints that can be judged, or of all if none can (blind).
func (j *Judge) staleTarget(members []*endpoint) (target float64, blind bool) {
	j.medians = j.medians[:0]
	for _, e := range members {
		if !e.stale() && !e.out() {
			j.medians = append(j.medians, e.smoothed)
		}
	}
	blind = !slices.ContainsFunc(members, func(e *endpoint) bool { return !e.stale() })
	if len(j.medians) == 0 {
		for _, e := range members {
			if e.judged {
				j.medians = append(j.medians, e.smoothed)
			}
		}
	}
	if len(j.medians) == 0 {
		return 0, blind
	}
	slices.Sort(j.medians)
	return min(staleTarget, j.medians[len(j.medians)/2]), blind
}

// out reports whether risk or a fault wants the endpoint out.
func (e *endpoint) out() bool { return e.riskOut || e.fault != 0 }

// relaxTo moves a stale endpoint's risk to the target with time.
func (e *endpoint) relaxTo(now time.Time, target float64) {
	passed := max(0, now.Sub(e.stepAt))
	e.stepAt = now
	if !e.stale() {
		return
	}
	if !e.judged {
		e.smoothed, e.risk = target, target
		return
	}
	e.smoothed += (target - e.smoothed) * (1 - math.Exp(-passed.Seconds()/relax.Seconds()))
	e.risk = e.smoothed
	switch {
	case e.smoothed >= returnBelow:
		e.fadedSince = time.Time{}
	case e.fadedSince.IsZero():
		e.fadedSince = now
	}
}

// sharedTrouble reports whether so many endpoints of the pool fail at once that
// their requests must be the cause: an engine that runs out of memory answers
// 500, and so does a healthy one to a request it cannot take, which its client
// sends again wherever it is routed. One troubled endpoint is its own fault
// even in the smallest pool.
func sharedTrouble(now time.Time, members []*endpoint) bool {
	troubled := 0
	for _, e := range members {
		if e.troubled(now) {
			troubled++
		}
	}
	return troubled > 1 && troubled*sharedRest >= len(members)
}

// troubled reports whether the endpoint's answers fail. Failed connections are
// no answers.
func (e *endpoint) troubled(now time.Time) bool {
	own := e.view.Own
	if own.OOMStreak >= sharedStreak && now.Sub(e.oomGrew) <= sharedSpan {
		return true
	}
	return own.ConnectStreak == 0 && own.Errors5s >= sharedErrors && own.Errors5s*sharedShare >= own.Attempts5s
}

// findFaults looks for a new hard fault. A streak of out-of-memory answers that
// grew while the whole pool was in trouble is passed over; only answers after
// that count against the endpoint.
//
// A GPU's condition is a level: it counts also when it stands at first sight, is
// a fault for as long as it is said, and is the reason shown. What the driver
// does not say (a node whose driver answers no more, XID 119, leaves every GPU
// without a word) is no fault; such GPUs' endpoints are judged by their engines.
func (e *endpoint) findFaults(now time.Time, shared bool) {
	own := e.view.Own
	e.oomSeen = min(e.oomSeen, own.OOMStreak)
	e.connectSeen = min(e.connectSeen, own.ConnectStreak)
	e.successes = min(e.successes, own.Successes)
	if shared {
		e.oomSeen = own.OOMStreak
	}
	xid := e.newXID()
	reason, standing := Reason(0), false
	switch {
	case e.condition == telemetry.ConditionLost:
		reason, standing = ReasonLost, true
	case xid == telemetry.XIDLost:
		reason = ReasonLost
	case e.condition == telemetry.ConditionEject:
		reason, standing = ReasonGPU, true
	case telemetry.ClassifyXID(xid) == telemetry.XIDEject:
		reason = ReasonXID
	case own.OOMStreak >= faultStreak && own.OOMStreak > e.oomSeen:
		reason = ReasonOOM
	case own.ConnectStreak >= faultStreak && own.ConnectStreak > e.connectSeen:
		reason = ReasonRefused
	default:
		return
	}
	e.oomSeen, e.connectSeen, e.successes = own.OOMStreak, own.ConnectStreak, own.Successes
	if e.fault == 0 {
		if now.Sub(e.readmitted) > maxHold {
			e.faults = 0
		}
		e.faults++
	}
	if e.fault == 0 || standing {
		e.fault = reason
	}
	e.faultAt = now
	e.calm = 0
}

// newXID is the XID code that appeared since the tick before, or 0. A code that
// stood on the first page we saw, or at the judge's first sight of the endpoint,
// may be long over, so it is no news.
func (e *endpoint) newXID() int {
	if e.view.Window == nil {
		return 0
	}
	code, since := e.view.Window.XID()
	if since.Equal(e.xidSince) {
		return 0
	}
	e.xidSince = since
	return code
}

// weighRisk moves the risk's own ejection. One that the gate held or lifted
// ends with the first sample that is not bad, so that the end of a load peak
// ejects nobody for what is over.
func (e *endpoint) weighRisk(now time.Time) {
	switch {
	case !e.riskOut && e.bad >= ejectSamples && e.smoothed > ejectSmoothed:
		e.riskOut = true
		e.calm = 0
	case e.riskOut && !e.ejected && e.bad == 0:
		e.riskOut = false
	case e.riskOut && (e.calm >= calmSamples || !e.fadedSince.IsZero() && now.Sub(e.fadedSince) >= calmTime):
		e.riskOut = false
	}
}

// endFault ends a hard fault once its hold is over and something shows that the
// endpoint is well: calm samples since the fault, good answers, or, where the
// whole pool is blind, time alone. The hold of a GPU's condition begins when the
// driver says it no more.
//
// A server that refused connections and answers since is well, and has nothing to
// hold against it: where the gate kept it in, good answers end its fault at once, so
// that it isn't ejected for what is over when another comes back.
func (e *endpoint) endFault(now time.Time, blind bool) {
	if e.fault == 0 {
		return
	}
	calm := e.age <= FreshAge && e.calm >= calmSamples
	answers := e.view.Own.Successes-e.successes >= provenBySuccesses
	if e.fault == ReasonRefused && !e.ejected && answers && e.view.Own.ConnectStreak == 0 {
		e.fault, e.faults = 0, 0
		return
	}
	if now.Sub(e.faultAt) >= hold(e.fault, e.faults, blind) && (calm || answers || blind) {
		e.fault = 0
	}
}

// hold is how long the n-th hard fault in succession is held against an endpoint, without
// regard to what it does meanwhile. In a blind pool one that refused connections
// comes back for a try after blindHold at most: that costs a request a second attempt.
func hold(fault Reason, n int, blind bool) time.Duration {
	first, most := firstHold(fault), maxHold
	switch {
	case blind && fault == ReasonRefused:
		most = blindHold
	case blind:
		first = max(first, blindHold)
	}
	return min(most, first<<min(n-1, 8))
}

// settle ends the ejection of an endpoint that nothing wants out any more: it
// comes back through slow start.
func (e *endpoint) settle(now time.Time) {
	if e.ejected && !e.out() {
		e.ejected = false
		e.readmitted, e.admitted = now, now
	}
	if !e.admitted.IsZero() && now.Sub(e.admitted) >= slowStart {
		e.admitted = time.Time{}
	}
}

// onProbation reports whether an endpoint has been out for so long that a few
// requests should show whether it still deserves to be. While the driver says
// that its GPU needs a reset they would not.
func (e *endpoint) onProbation(now time.Time) bool {
	switch {
	case !e.ejected || e.condition >= telemetry.ConditionEject:
		return false
	case e.fault != 0:
		return now.Sub(e.faultAt) >= maxHold
	}
	return now.Sub(e.ejectedAt) >= probeAfter
}

// probe gives the endpoints on probation their share of the pool's weight.
func probe(now time.Time, members []*endpoint, verdicts []Verdict) {
	serving := 0.0
	for i := range verdicts {
		serving += verdicts[i].Weight
	}
	for i, e := range members {
		if e.onProbation(now) {
			v := &verdicts[i]
			v.Weight = min(probeMost*e.view.Capacity, serving*probeShare/(1-probeShare))
			v.State, v.Reason = fleet.StateProbe, ReasonProbe
		}
	}
}

// verdict writes down what the tick came to.
func (e *endpoint) verdict(now time.Time, blind bool) Verdict {
	v := Verdict{
		Endpoint: e.key,
		Risk:     fleet.Risk(e.risk),
		Smoothed: fleet.Risk(e.smoothed),
		Margin:   e.margin,
		Stale:    e.stale(),
		KVSize:   e.kvSize(now),
		KVFree:   e.kvFree(now),
		Weight:   e.weight(now, blind),
	}
	v.State, v.Reason = e.state()
	return v
}

func (e *endpoint) state() (fleet.State, Reason) {
	reason := ReasonNone
	switch {
	case e.ejected && e.fault != 0:
		return fleet.StateEjected, e.fault
	case e.ejected:
		return fleet.StateEjected, ReasonRisk
	case e.out():
		reason = ReasonGateHeld
	case e.view.Window == nil:
		reason = ReasonNoSource
	case e.stale():
		reason = ReasonStale
	case e.draining():
		reason = ReasonGPUDrain
	case !e.admitted.IsZero():
		reason = ReasonProbe
	}
	switch {
	case e.stale():
		return fleet.StateUnknown, reason
	case !e.admitted.IsZero():
		return fleet.StateProbe, reason
	case e.preferred && !e.out() && !e.draining():
		return fleet.StatePreferred, reason
	}
	return fleet.StateNeutral, reason
}

// draining reports whether a GPU works and asks for a reset at leisure.
func (e *endpoint) draining() bool { return e.condition == telemetry.ConditionDrain }

// weight is capacity · max(0.02, (1−r)²) · slow start, and half of that with a
// GPU to be drained. In a blind pool it is capacity · slow start: nothing is
// known that could tell endpoints apart.
func (e *endpoint) weight(now time.Time, blind bool) float64 {
	if e.ejected {
		return 0
	}
	share := max(weightFloor, (1-e.risk)*(1-e.risk))
	switch {
	case e.fault != 0:
		share = weightFloor
	case blind:
		share = 1
	}
	if e.draining() {
		share *= drainShare
	}
	if !e.admitted.IsZero() {
		t := max(time.Second, now.Sub(e.admitted))
		share *= min(1, max(slowStartMin, t.Seconds()/slowStart.Seconds()))
	}
	return e.view.Capacity * share
}

// kvSize is the whole KV cache in tokens, or 0. A server with stale telemetry may
// have come back with another.
func (e *endpoint) kvSize(now time.Time) fleet.Tokens {
	if e.stale() {
		return 0
	}
	size, ok := e.view.Window.Last(telemetry.HasKVTokens, now, windowSpan)
	if !ok {
		return 0
	}
	return fleet.Tokens(max(0, size.KVTokens))
}

// kvFree is the free part of the KV cache in tokens, or −1.
func (e *endpoint) kvFree(now time.Time) fleet.Tokens {
	if e.stale() {
		return -1
	}
	usage, okUsage := e.view.Window.Last(telemetry.HasKVUsage, now, HoldAge)
	size, okSize := e.view.Window.Last(telemetry.HasKVTokens, now, windowSpan)
	if !okUsage || !okSize {
		return -1
	}
	return fleet.Tokens((1 - min(1, max(0, usage.KVUsage))) * size.KVTokens)
}
