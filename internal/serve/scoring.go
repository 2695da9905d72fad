package serve

import (
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/own"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/features"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// maxReadings bounds what waits for the next tick; 1,000 endpoints deliver one
// reading each per tick. Beyond it the oldest is dropped: the newest counts.
const maxReadings = 16_384

// scoring owns what is known of every endpoint. Readings and outcomes come in
// from other goroutines; step, called by the tick loop alone, turns them into
// the inputs of a plan.
type scoring struct {
	model  scoringModel // guarded by mu, as the judge
	judge  *scorer.Judge
	ledger *accesslog.Ledger
	// prompts counts prompt tokens as they are sent.
	prompts *prompts
	ratios  *ratios
	// departed are endpoints that have left the config and may have requests in
	// flight still.
	departed map[fleet.EndpointKey]bool
	// admit tells admission of the pools and returns what it makes of them, in the
	// same order.
	admit func(time.Time, []admission.PoolView) []admission.PoolState
	// agents tells what the nodes' agents said last, by node; nil where none can.
	agents func() map[string]admin.Agent

	mu        sync.Mutex
	config    *fleet.Config
	routes    []plan.RouteInput // of config and the splits set by hand
	readings  []telemetry.Reading
	endpoints map[fleet.EndpointKey]*tracker
	scaling   map[string]*scaling   // by pool
	states    []admission.PoolState // of the last tick
	ticks     uint64
	bucketed  time.Time                     // when the last bucket began, on the grid of buckets
	chained   map[string]bool               // pools that some route has beside others
	passes    map[string]map[string]passing // by pool and Envoy node; see passedBy
	// held are the places that are held, by the ledger's slot; told are those whose
	// attempts the plan in the making knows of.
	held, told map[uint32]int32
}

// tracker is what is known of one endpoint.
type tracker struct {
	window telemetry.Window
	ends   own.Ends
	// lastErr is why the last reading failed, "" if it did not.
	lastErr string
	// arrived is when the model server's last numbers were read, changed or not.
	arrived time.Time
	// since is when it was first shown.
	since   time.Time
	foreign own.Foreign
	sent    own.Sent
	// closed is whether it takes requests, after it told callers to stay away.
	closed  closure
	callers callers
	// fails is whether its last attempts failed.
	fails failure
	// holds is the limit that the last tick gave it, also while it opens.
	holds int32
	limit admission.EndpointLimit
}

func newScoring(model scoringModel, ledger *accesslog.Ledger, admit func(time.Time, []admission.PoolView) []admission.PoolState) *scoring {
	return &scoring{
		model: model, judge: scorer.NewJudge(model), ledger: ledger, prompts: new(prompts), ratios: newRatios(), admit: admit,
		departed: map[fleet.EndpointKey]bool{}, held: map[uint32]int32{}, told: map[uint32]int32{},
	}
}

// setModel replaces the risk model from the next tick on; states stay.
func (s *scoring) setModel(model scoringModel) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.model = model
	s.judge.SetModel(model)
}

// reconfigure follows a new config or new splits: endpoints that stay keep
// their history.
func (s *scoring) reconfigure(cfg *fleet.Config, byHand map[string]fleet.Split) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := map[fleet.EndpointKey]*tracker{}
	for _, p := range cfg.Pools {
		of := &words{}
		for _, e := range p.Endpoints {
			key := fleet.EndpointKey{Pool: p.Name, Address: e.Address}
			if next[key] = s.endpoints[key]; next[key] == nil {
				next[key] = &tracker{ends: own.NewEnds(bucket)}
			} else if next[key].callers.words != nil {
				of = next[key].callers.words
			}
		}
		for _, e := range p.Endpoints {
			c := &next[fleet.EndpointKey{Pool: p.Name, Address: e.Address}].callers
			c.words, c.gone = of, e.Drain
		}
	}
	pools := map[string]*scaling{}
	for _, p := range cfg.Pools {
		if pools[p.Name] = s.scaling[p.Name]; pools[p.Name] == nil {
			pools[p.Name] = &scaling{}
		}
	}
	for key := range s.endpoints {
		if next[key] == nil {
			s.endpoints[key].callers.gone = true
			s.departed[key] = true
		}
	}
	for key := range s.departed {
		if next[key] != nil || pools[key.Pool] == nil {
			delete(s.departed, key)
		}
	}
	s.config, s.routes, s.endpoints, s.scaling = cfg, routeInputs(cfg, byHand), next, pools
	s.chained, s.passes = chained(s.routes), map[string]map[string]passing{}
	s.ratios.reconfigure(cfg)
	s.bucketed = time.Time{} // what people see follows at once
}

// read takes one reading; it never blocks for long.
func (s *scoring) read(r telemetry.Reading) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.endpoints[r.Endpoint]
	if t == nil {
		return // it has just left the config
	}
	if r.Err != nil {
		t.lastErr = r.Err.Error() // the missing sample ages the endpoint
		return
	}
	if r.Sample.Known.HasEngine() { // the GPU's numbers alone don't mend the engine's page
		t.lastErr, t.arrived = "", r.Sample.At
	}
	if len(s.readings) >= maxReadings {
		s.readings = s.readings[1:]
	}
	s.readings = append(s.readings, r)
}

// outcome takes what Envoy logged of an attempt that began or ended, and whose request it
// was, zero if that isn't known. It returns for how long the credential is to stay out of
// the endpoint's pool, 0 if it isn't. Servers limit credentials, whatever tells clients
// apart; what speaks against a server itself must come of several clients, which nobody can
// make up where they are verified.
func (s *scoring) outcome(o fleet.Outcome, of admission.Asker) (stayOut time.Duration) {
	s.ratios.learn(&o)
	if !o.Endpoint.Address.IsValid() {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.endpoints[o.Endpoint]
	if t == nil {
		return 0
	}
	// An engine that is lost still lists its models, and a provider limits the counting of
	// tokens by itself.
	if _, generates := wire.SplitRoute(o.Route); !generates {
		switch o.Kind {
		case fleet.AttemptStarted:
			s.reached(&o)
		case fleet.AttemptEnded:
			cause := o.Cause
			if cause == fleet.CauseReset && o.At.Sub(t.callers.served.lastAt) < othersFor {
				// Whose these are isn't known, and all may be one client's: like a timeout an
				// error, and of no streak.
				cause = fleet.CauseTimeout
			}
			t.ends.Add(cause, o.Code, o.HeaderTime, admission.Client{})
		}
		return 0
	}
	if o.Kind == fleet.AttemptEnded || o.Kind == fleet.RequestEnded {
		t.callers.ends(&o)
	}
	switch {
	case o.Kind == fleet.Heartbeat:
		t.callers.runs(&o, of)
		return 0
	case o.Kind == fleet.AttemptStarted:
		t.callers.starts(&o, of)
		s.reached(&o)
	case o.Cause == fleet.CauseOK:
		t.callers.serves(&o, of) // by the end that is told first: after it nobody knows who asked
	}
	if o.Kind == fleet.RequestEnded {
		return 0
	}
	asker := of.Client
	if !several(&t.callers.served, asker, o.At) {
		asker = admission.Client{}
	}
	var closes closing
	if o.Kind == fleet.AttemptEnded {
		t.ends.Add(o.Cause, o.Code, o.HeaderTime, asker)
		closes = toldBy(&o)
		if closes.all > 0 && o.Code == http.StatusTooManyRequests {
			closes = t.callers.closes(&o, of.Credential, s.beside(o.Endpoint))
		}
		if closes.all > 0 || s.chained[o.Endpoint.Pool] && failed(&o) && !answered500(&o) {
			s.hold(o.Endpoint)
		}
	}
	t.closed.outcome(&o, closes)
	t.fails.outcome(&o, asker)
	return closes.asker
}

// beside is what is known of the servers of an endpoint's pool that are in service beside
// it.
func (s *scoring) beside(of fleet.EndpointKey) (by beside) {
	for i := range s.config.Pools {
		p := &s.config.Pools[i]
		if p.Name != of.Pool {
			continue
		}
		for _, e := range p.Endpoints {
			t := s.endpoints[fleet.EndpointKey{Pool: p.Name, Address: e.Address}]
			if e.Address == of.Address || e.Drain || !t.fails.until.IsZero() {
				continue
			}
			if by.n++; by.n == 1 || t.closed.until.Before(by.opens) {
				by.opens = t.closed.until
			}
			by.turned = max(by.turned, len(t.callers.turned))
		}
	}
	return by
}

// reopen lets the servers of a pool be asked that told clients to stay away while it took
// nobody, once one of them takes requests.
func (s *scoring) reopen(p *fleet.Pool, now time.Time) {
	var of *words
	for _, e := range p.Endpoints {
		c := &s.endpoints[fleet.EndpointKey{Pool: p.Name, Address: e.Address}].callers
		if of = c.words; of.shut.IsZero() && !of.reopens {
			return
		}
		c.take(now)
	}
	if of == nil || !of.reopens {
		return
	}
	of.reopens = false
	for _, e := range p.Endpoints {
		s.endpoints[fleet.EndpointKey{Pool: p.Name, Address: e.Address}].closed.doubt(now)
	}
}

// hold keeps the place of an attempt that ended so that its endpoint may get nothing, or
// less, by the next plan, until that is in force. It is free milliseconds after it was
// taken, and each who has it meanwhile goes on to the next pool by Envoy itself, where
// nothing was kept for them. What fails in a pool that no route has beside others isn't
// tried elsewhere, and that takes what it is sent.
func (s *scoring) hold(on fleet.EndpointKey) { s.held[s.ledger.Hold(on)]++ }

// published is to be called when the plan of the last step's inputs is in force: it frees
// the places that were held for it.
func (s *scoring) published() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for slot, n := range s.told {
		s.ledger.Release(slot, n)
	}
	clear(s.told)
}

// inFlight is what runs on a slot's endpoint, without the places that are held for a plan
// in the making.
func (s *scoring) inFlight(slot uint32) int32 { return max(0, s.ledger.InFlight(slot)-s.told[slot]) }

// chained are the pools that some route has beside others.
func chained(routes []plan.RouteInput) map[string]bool {
	out := map[string]bool{}
	for i := range routes {
		r := &routes[i]
		if len(r.Split)+len(r.Fallback) < 2 {
			continue
		}
		for _, pools := range [2][]string{r.Split, r.Fallback} {
			for _, name := range pools {
				out[name] = true
			}
		}
	}
	return out
}

// admitted returns the config that the last tick went by, and what admission made
// of its pools.
func (s *scoring) admitted() (*fleet.Config, []admission.PoolState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.config, s.states
}

// step scores every endpoint at now and returns the inputs of the next plan,
// and once a bucket what people see of them, else nil.
func (s *scoring) step(now time.Time) (plan.Inputs, *admin.Fleet) {
	inputs, shown, cfg := s.score(now)
	if shown == nil {
		return inputs, nil
	}
	var agents map[string]admin.Agent
	if s.agents != nil {
		agents = s.agents() // not under the lock that every reading waits for
	}
	shown.Nodes = nodesOf(cfg, shown.Pools, agents)
	return inputs, shown
}

// score is step without the nodes; it returns the config that it scored by.
func (s *scoring) score(now time.Time) (plan.Inputs, *admin.Fleet, *fleet.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ticks++
	for slot, n := range s.held {
		s.told[slot] += n
	}
	clear(s.held)
	for _, r := range s.readings {
		if t := s.endpoints[r.Endpoint]; t != nil {
			t.window.Add(r.Sample)
			if r.Sample.Known.Has(telemetry.HasRunning) {
				t.foreign.Add(r.Sample.Running+r.Sample.Waiting, s.inFlight(s.ledger.Slot(r.Endpoint)))
			}
		}
	}
	clear(s.readings)
	s.readings = s.readings[:0]

	verdicts := s.judge.Step(now, s.views(now))
	for i := range s.routes {
		s.routes[i].BytesPerToken = s.ratios.of(s.routes[i].Name)
	}
	inputs := plan.Inputs{Tick: s.ticks, Routes: s.routes}
	var shown *admin.Fleet
	if s.bucketEnds(now) {
		shown = &admin.Fleet{At: now, Tick: s.ticks, Scorer: s.model.Name(), Model: s.model.digest}
	}
	for i := range s.config.Pools {
		p := &s.config.Pools[i]
		inService := serving(p)
		inputs.Pools = append(inputs.Pools, s.poolInput(now, p, verdicts[:inService]))
		if shown != nil {
			shown.Pools = append(shown.Pools, s.poolShown(now, p, verdicts[:inService]))
		}
		verdicts = verdicts[inService:]
	}
	s.states = s.admit(now, s.poolViews(now, inputs.Pools))
	byName := make(map[string]*admission.PoolState, len(s.states))
	for i := range s.states {
		byName[s.states[i].Name] = &s.states[i]
	}
	for i := range inputs.Pools {
		// A pool that the gate has not learned of yet, or no more, has no state:
		// it goes over to a new config a moment before the scoring does.
		state := byName[inputs.Pools[i].Name]
		if state == nil {
			continue
		}
		for level := range state.Levels {
			inputs.Pools[i].Backlogged[level] = state.Levels[level].Backlogged
		}
		if shown != nil {
			showAdmission(&shown.Pools[i], &inputs.Pools[i], state)
		}
	}
	if shown != nil {
		for _, t := range s.endpoints {
			t.ends.Rotate()
		}
	}
	return inputs, shown, s.config
}

// bucketEnds reports whether the tick at now ends a bucket and begins the next.
// Buckets lie on a grid, and a tick that is early by less than half a tick's time
// is the one that was due: ticks that jitter would else stretch every bucket to
// the tick after. After a pause of two buckets or more the grid begins anew.
func (s *scoring) bucketEnds(now time.Time) bool {
	switch passed := now.Sub(s.bucketed); {
	case s.bucketed.IsZero() || passed >= 2*bucket:
		s.bucketed = now
	case passed >= bucket-tickEvery/2:
		s.bucketed = s.bucketed.Add(bucket)
	default:
		return false
	}
	return true
}

// serving is how many endpoints of a pool are not draining.
func serving(p *fleet.Pool) int {
	n := 0
	for i := range p.Endpoints {
		if !p.Endpoints[i].Drain {
			n++
		}
	}
	return n
}

// believedShare is how much of the KV cache an estimate of sent tokens may stand
// for. Lengths are the callers' word: bodies without tokens to match must not
// look like a full server. The engine's own numbers have no such bound.
const believedShare = 0.25

// believable bounds an estimate of sent tokens by the size of the KV cache.
func believable(tokens float64, w *telemetry.Window) float64 {
	size, ok := w.Newest(telemetry.HasKVTokens)
	if !ok {
		return tokens // no model weighs tokens without that size
	}
	return min(tokens, believedShare*size)
}

// views are the judge's inputs, pools and endpoints in the config's order. An
// endpoint that drains is not judged: it is no capacity that the gate may count
// on, and it starts slowly when it comes back.
func (s *scoring) views(now time.Time) []scorer.PoolView {
	out := make([]scorer.PoolView, 0, len(s.config.Pools))
	for _, p := range s.config.Pools {
		view := scorer.PoolView{Name: p.Name, MaxInFlight: p.MaxInFlight, Endpoints: make([]scorer.EndpointView, 0, len(p.Endpoints))}
		for _, e := range p.Endpoints {
			if e.Drain {
				continue
			}
			key := fleet.EndpointKey{Pool: p.Name, Address: e.Address}
			t := s.endpoints[key]
			v := scorer.EndpointView{Address: e.Address, Capacity: e.Capacity, Own: t.ends.Own()}
			slot := s.ledger.Slot(key)
			v.Own.InFlight = s.inFlight(slot)
			v.Own.MaxInFlight = p.MaxInFlight
			t.sent.Tick(now, slot, s.prompts.of(slot))
			v.Own.ArrivedPromptTokens = believable(t.sent.Since(now.Add(-time.Second)), &t.window)
			if latest, ok := t.window.Latest(); ok {
				v.Own.SentPromptTokens = believable(t.sent.Since(latest.At), &t.window)
			}
			v.Own.Unanswered = t.foreign.Unanswered(v.Own.Attempts5s)
			if p.Telemetry.Source != fleet.TelemetryNone {
				v.Window = &t.window
			}
			view.Endpoints = append(view.Endpoints, v)
		}
		out = append(out, view)
	}
	return out
}

// draining stands for the verdict of an endpoint that the config drains.
var draining = scorer.Verdict{State: fleet.StateDraining, Reason: scorer.ReasonNone, KVFree: -1, Stale: true}

// each calls visit for every endpoint of a pool with its verdict, in order.
func each(p *fleet.Pool, verdicts []scorer.Verdict, visit func(*fleet.Endpoint, scorer.Verdict)) {
	for i := range p.Endpoints {
		e, v := &p.Endpoints[i], draining
		if !e.Drain {
			v, verdicts = verdicts[0], verdicts[1:]
		}
		visit(e, v)
	}
}

// meanTokens is the mean of prompt and answer together over what the pool has in
// flight, 0 if nothing is or is known.
func (s *scoring) meanTokens(pool string) float64 {
	tokens, requests := 0.0, 0.0
	for i := range s.states {
		if s.states[i].Name != pool {
			continue
		}
		for _, l := range s.states[i].Levels {
			tokens += float64(l.InFlight) * (l.MeanInput + l.MeanOutput)
			requests += float64(l.InFlight)
		}
	}
	if requests == 0 {
		return 0
	}
	return tokens / requests
}

// learnedLimit is how many attempts the endpoint may have in flight by what its
// engine tells; maxInFlight as long as that is nothing.
func (t *tracker) learnedLimit(now time.Time, p *fleet.Pool, inFlight int32, meanTokens float64) int {
	v := admission.EndpointView{InFlight: int(max(inFlight, 0)), Max: p.MaxInFlight, MeanTokens: meanTokens}
	if p.Decode != nil {
		v.Batch = p.Decode.Batch()
	}
	v.KVTokens, _ = t.window.Newest(telemetry.HasKVTokens)
	if latest, ok := t.window.Last(telemetry.HasTTFT, now, scorer.FreshAge); ok {
		v.Measured, v.TTFTSum, v.TTFTCount = true, latest.TTFTSum, latest.TTFTCount
		if latest.Known.Has(telemetry.HasPromptTokens) {
			v.PromptTokens = latest.PromptTokens
		}
		v.QueueKnown, v.Waiting = latest.Known.Has(telemetry.HasWaiting), latest.Waiting
	}
	return t.limit.Step(now, v)
}

func (s *scoring) poolInput(now time.Time, p *fleet.Pool, verdicts []scorer.Verdict) plan.PoolInput {
	meanTokens := s.meanTokens(p.Name)
	s.reopen(p, now)
	input := plan.PoolInput{Name: p.Name, Tier: p.Tier, SpillAt: p.SpillAt, Endpoints: make([]plan.EndpointInput, 0, len(p.Endpoints))}
	each(p, verdicts, func(e *fleet.Endpoint, v scorer.Verdict) {
		key := fleet.EndpointKey{Pool: p.Name, Address: e.Address}
		slot := s.ledger.Slot(key)
		// What the engine works on beside our own requests takes room too. One
		// place always stays: the engine's word may be wrong.
		limit := int32(p.MaxInFlight)
		if p.Limit == fleet.LimitLearned {
			limit = int32(s.endpoints[key].learnedLimit(now, p, s.inFlight(slot), meanTokens))
		}
		t := s.endpoints[key]
		if t.window.Age(now) <= foreignAge {
			limit = max(1, limit-t.foreign.Requests())
		}
		t.holds = limit
		trial, failing := t.fails.trial(limit, s.inFlight(slot), now)
		if t.closed.closed(now) && t.callers.others(now) {
			t.closed.doubt(now)
		}
		limit = t.closed.limit(limit, s.inFlight(slot), now)
		input.Endpoints = append(input.Endpoints, plan.EndpointInput{
			Address: e.Address, Zone: e.Zone, Slot: slot, Weight: v.Weight, MaxInFlight: limit,
			InFlight: s.inFlight(slot), KVFree: v.KVFree, KVSize: v.KVSize, Risk: v.Risk, State: v.State,
			Closed: t.closed.closed(now), Failing: failing, Trial: trial,
		})
	})
	s.spareAnswers(&input)
	return input
}

// showAdmission fills what people see of a pool's limits.
func showAdmission(row *admin.Pool, in *plan.PoolInput, state *admission.PoolState) {
	row.Limit, row.Clients, row.Share = state.Limit, state.Clients, bounded(state.ShareOf(fleet.ClassInteractive, 1))
	for i := range state.Levels {
		l := &state.Levels[i]
		row.Levels = append(row.Levels, admin.Level{
			Level: i, InFlight: l.InFlight, Budget: bounded(l.Budget), QueueMillis: float64(l.Queue.Microseconds()) / 1000, Backlogged: l.Backlogged,
		})
	}
	for i := range in.Endpoints {
		row.Endpoints[i].Limit, row.Endpoints[i].Closed = in.Endpoints[i].MaxInFlight, in.Endpoints[i].Closed
		row.Endpoints[i].Failing = in.Endpoints[i].Failing
	}
}

// bounded is −1 for what has no bound.
func bounded(limit float64) float64 {
	if math.IsInf(limit, 1) {
		return -1
	}
	return limit
}

func (s *scoring) poolShown(now time.Time, p *fleet.Pool, verdicts []scorer.Verdict) admin.Pool {
	shown := admin.Pool{Name: p.Name, Tier: p.Tier, Model: p.Model, Hardware: p.Hardware, Endpoints: make([]admin.Endpoint, 0, len(p.Endpoints))}
	total := 0.0
	for _, v := range verdicts {
		total += v.Weight
	}
	each(p, verdicts, func(e *fleet.Endpoint, v scorer.Verdict) {
		key := fleet.EndpointKey{Pool: p.Name, Address: e.Address}
		t := s.endpoints[key]
		row := s.row(now, t, v, float64(p.KVBytesPerToken))
		if t.since.IsZero() {
			t.since = now
		}
		if row.TelemetryAge < 0 && p.Telemetry.Source != fleet.TelemetryNone {
			row.Awaited = now.Sub(t.since).Seconds()
		}
		if t.closed.closed(now) {
			row.ClosedFor = t.closed.until.Sub(now).Seconds()
		}
		row.Name, row.Address, row.Node, row.Zone = e.Name, e.Address.String(), e.Node, e.Zone
		row.Known = !v.Stale && p.Telemetry.Source != fleet.TelemetryNone
		row.InFlight = s.inFlight(s.ledger.Slot(key))
		if total > 0 {
			row.Share = v.Weight / total
		}
		shown.Endpoints = append(shown.Endpoints, row)
	})
	signals := s.scaling[p.Name]
	signals.add(shown.Endpoints)
	shown.Risk5s, shown.Allocation5s = signals.risk.show(), signals.allocation.show()
	return shown
}

// row is what people see of one endpoint, as far as its own history tells.
func (s *scoring) row(now time.Time, t *tracker, v scorer.Verdict, kvBytes float64) admin.Endpoint {
	ended := t.ends.Own()
	row := admin.Endpoint{
		Risk: float64(v.Risk), State: v.State.String(), Why: v.Reason.String(), Weight: v.Weight,
		TelemetryError: t.lastErr, Errors5s: ended.Errors5s, Attempts5s: ended.Attempts5s, HeaderMillis: -1, TelemetryAge: -1, GPUAge: -1,
		Allocation: -1, AllocationMB: -1,
	}
	if d, ok := t.ends.HeaderTime(); ok {
		row.HeaderMillis = float64(d.Microseconds()) / 1000
	}
	if age := t.window.Age(now); age != telemetry.Never {
		row.TelemetryAge = age.Seconds()
		if v.Reason == scorer.ReasonStale && row.TelemetryError == "" && age > scorer.HoldAge && now.Sub(t.arrived) <= scorer.HoldAge {
			row.TelemetryError = fmt.Sprintf("page answers, numbers unchanged for %.0f s", row.TelemetryAge)
		}
	}
	last := func(field telemetry.Mask) float64 {
		if sample, ok := t.window.Last(field, now, time.Hour); ok {
			v, _ := sample.Value(field)
			return v
		}
		return -1
	}
	row.KVUsage, row.Running, row.Waiting = last(telemetry.HasKVUsage), last(telemetry.HasRunning), last(telemetry.HasWaiting)
	showGPU(&row, &t.window, now)
	showAllocation(&row, &t.window, now, kvBytes)
	row.Scaling = scalingOf(t.window.Scaling(now))
	return row
}

func scalingOf(s telemetry.Scaling) admin.Scaling {
	show := func(s telemetry.Spread) admin.Summary {
		return admin.Summary{Mean: s.Mean, Deviation: s.Deviation, N: s.Points}
	}
	return admin.Scaling{KVUsage: show(s.KVUsage), Waiting: show(s.Waiting), Allocation: show(s.AllocRate)}
}

// showGPU fills what is known of the endpoint's GPUs.
func showGPU(row *admin.Endpoint, w *telemetry.Window, now time.Time) {
	for _, field := range []telemetry.Mask{telemetry.HasGPUUtil, telemetry.HasGRActive, telemetry.HasFBUsed} {
		if sample, ok := w.Last(field, now, time.Hour); ok {
			row.GPUAge = now.Sub(sample.At).Seconds()
			break
		}
	}
	row.Condition = telemetry.Condition(0).String()
	if sample, ok := w.Last(telemetry.HasCondition, now, time.Hour); ok {
		row.Condition = sample.Condition.String()
	}
	row.XID, _ = w.XID()
}

// showAllocation fills the memory allocation rate: of the KV cache, or of the
// framebuffer where the server tells no KV usage. kvBytes is what a token takes,
// 0 if unknown.
func showAllocation(row *admin.Endpoint, w *telemetry.Window, now time.Time, kvBytes float64) {
	if _, ok := w.Last(telemetry.HasKVUsage, now, scorer.FreshAge); ok {
		rate, ok := features.GrowthRate(w, telemetry.HasKVUsage, time.Second)
		if !ok {
			return
		}
		row.Allocation = rate
		if tokens, ok := w.Newest(telemetry.HasKVTokens); ok && kvBytes > 0 {
			row.AllocationMB = features.MegabytesPerSecond(rate, tokens, kvBytes)
		}
		return
	}
	if s, ok := w.Last(telemetry.HasFBUsed|telemetry.HasFBTotal, now, scorer.FreshAge); ok && s.FBTotalMiB > 0 {
		if rate, ok := features.GrowthRate(w, telemetry.HasFBUsed, time.Second); ok {
			row.Allocation = rate
			row.AllocationMB = features.MegabytesPerSecond(rate, s.FBTotalMiB, 1<<20)
		}
	}
}

// routeInputs lays out every route's chain as the builders do: arms that are
// drawn, then arms without weight, then the fallback.
func routeInputs(cfg *fleet.Config, byHand map[string]fleet.Split) []plan.RouteInput {
	out := make([]plan.RouteInput, 0, len(cfg.Routes))
	for _, r := range cfg.Routes {
		split := r.Split
		if s, ok := byHand[r.Name]; ok {
			split = s
		}
		in := plan.RouteInput{
			Name: r.Name, Dialect: r.Dialect, Strategy: r.Strategy, ClientStrategy: r.ClientStrategy, Affinity: r.Affinity,
			TrustDeclared: r.TrustDeclared, DefaultBudget: r.DefaultMaxTokens,
			FirstTokenMillis: uint32(r.Timeouts.FirstToken.Milliseconds()),
			Class:            r.Class, Limited: cfg.LimitOf(r.Name) != nil,
			MaxOutput: r.MaxOutput, Oversize: r.Oversize, NoRoom: r.NoRoom, RefuseUnread: r.Unread == fleet.OversizeRefuse,
			// A closed route has no response phase: with one, an ext_proc that died
			// would replace running answers with a 503 (measured on Envoy 1.40.0).
			ComputedRetry: r.RetryFields == fleet.RetryFieldsComputed && r.OnFailure != fleet.FailClosed, ReadUser: r.ReadUser,
			MaxBody: r.MaxBody,
		}
		in.ClientKey, in.Claim = cfg.ClientKeyOf(r.Name)
		points := split.BasisPoints()
		for i, arm := range split {
			if points[i] > 0 {
				in.Split = append(in.Split, arm.Pool)
			} else {
				in.Fallback = append(in.Fallback, arm.Pool)
			}
		}
		in.Fallback = append(in.Fallback, r.Fallback...)
		out = append(out, in)
	}
	return out
}

// foreignAge is how old an engine's numbers may be to speak of foreign work.
const foreignAge = time.Second
