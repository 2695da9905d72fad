package extproc

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// verdict is a decision with all that its answer shows.
type verdict struct {
	plan     *plan.Plan // nil when there is none
	info     *plan.RouteInfo
	class    plan.Class
	decision plan.Decision
	// try says which try to decide it was, from 0; one more than the last when none
	// got the place that it was decided on. tries is how many there were.
	try, tries int
	// held: it waited for a place, and how long.
	held    bool
	heldFor time.Duration
	// reserved: the ledger counts the pick. admit is what admission said; its
	// Reason is 0 where it wasn't asked, or had nothing to say.
	reserved bool
	admit    admission.Verdict
	// strategy is the one really used: dynamic only if the plan picked or
	// refused, or if there is nothing to pick for a body that is too large.
	strategy fleet.Strategy
	id       ID
	idText   []byte // the decision id
	idString string // the same, made once for ledger and admission
	// requestID is what the client gets back; keepID is true when it is the
	// client's own.
	requestID []byte
	keepID    bool
	budget    fleet.Tokens
	source    BudgetSource
	answers   fleet.Tokens // asked for, each of that budget; 0 is 1
	field     string       // as which callers are told to lower the budget
}

// refused reports whether the answer is a refusal, by the plan or by admission.
func (v *verdict) refused() bool {
	return v.decision.Action == plan.ActionRefuse || (v.admit.Reason != 0 && !v.admit.Admitted)
}

// hopeless reports whether the request is refused as it is, whenever it comes: no
// wait helps, and nobody is asked for one.
func (v *verdict) hopeless() bool {
	switch v.decision.Reason {
	case plan.ReasonOversize, plan.ReasonNeverFits, plan.ReasonUnread:
		return true
	}
	return false
}

// unread reports whether the route refuses the request because nobody could read
// its body. What a header declares does not change that, unless the route trusts
// it: one token in a header beside a body of unknown content would be a way
// around every limit. An upgrade is refused alike: nobody reads what will go
// through it.
func (v *verdict) unread() bool {
	return v.info.RefuseUnread && v.class.Generates && v.source.guessed()
}

// bodyTooLarge reports whether the length says that the body is more than the route
// takes. Then Envoy answers 413, by the same header and before any of the body
// (envoy's limitBody).
func (v *verdict) bodyTooLarge(r *request) bool {
	return v.info.MaxBody > 0 && r.bodyBytes > int64(v.info.MaxBody)
}

// requestHeaders is the phase that matters: class, decide, reserve, admit,
// answer. Of a caller that left meanwhile nothing is counted.
func (s *Service) requestHeaders(c *call, began time.Time) error {
	v := &c.verdict
	*v = verdict{id: s.o.IDs.Next(), plan: s.o.Plan(), strategy: fleet.StrategyLegacy}
	v.idText = v.id.Append(c.id[:0])
	v.requestID, v.keepID = s.requestID(&c.req, v.idText)
	s.decide(c, began)
	if c.left {
		return errLeft
	}
	c.answered = true
	if (v.reserved || v.admit.Admitted) && c.req.madeID {
		s.unapplied.latest.put(c.req.requestID, v.id)
	}
	if !c.req.observe {
		c.out.b = answers.Get(0)
		*c.out.b = appendAnswer(*c.out.b, c)
	}
	s.o.Observe(event(c, s.o.Now().Sub(began)-v.heldFor))
	if c.req.observe {
		s.withdraw(v)
	}
	return nil
}

// decide classes the request and finds a place for it.
func (s *Service) decide(c *call, at time.Time) {
	v := &c.verdict
	v.class.Arm, v.decision.Arm = plan.NoPool, plan.NoPool
	v.decision.Action = plan.ActionLeave
	if v.plan == nil {
		v.decision.Reason = plan.ReasonNoPlan
		return
	}
	if !v.classify(&c.req) {
		v.decision.Reason = plan.ReasonUnknownRoute
		return
	}
	v.idString = string(v.idText)
	if v.bodyTooLarge(&c.req) {
		s.passToRefusal(c, at)
		return
	}
	s.find(c, at)
	if v.decision.Action != plan.ActionLeave {
		v.strategy = v.class.Strategy
	}
}

// passToRefusal lets a request pass to the 413 that it gets from Envoy: nobody is asked
// for a place or for tokens, which would be taken from others until a log entry told of
// the 413, and no caller waits for a certain refusal. The ask is filled in for advice
// alone: a sidecar that is behind may have a larger limit, and let the body pass.
func (s *Service) passToRefusal(c *call, at time.Time) {
	v := &c.verdict
	v.decision.Reason, v.decision.Arm = plan.ReasonBodyTooLarge, v.class.Arm
	v.strategy = v.class.Strategy
	if s.o.Admission != nil {
		s.ask(&c.ask, &c.req, v, at)
	}
}

// maxTries is how many decisions a request gets at a time. Each but the last found a
// place that another request took between the look at the counts and the reservation.
const maxTries = 4

// place decides until the decided place could be reserved.
func (s *Service) place(v *verdict, at time.Time) {
	for range maxTries {
		v.try = v.tries
		v.tries++
		v.decision = v.plan.Decide(v.class, v.id.SeedOf(v.try), s.o.Live)
		if v.decision.Action != plan.ActionSteer || s.reserve(v, at) {
			return
		}
	}
	v.try = v.tries
	v.decision = plan.Decision{Action: plan.ActionRefuse, Reason: plan.ReasonAllBusy, Arm: v.decision.Arm}
}

// reserve enters the first attempt into the ledger. False reports that its
// endpoint has as many as it may; requests that don't generate are counted and
// never refused.
func (s *Service) reserve(v *verdict, at time.Time) bool {
	if s.o.Ledger == nil {
		return true
	}
	pick, limit := v.decision.Picks[0], int32(0)
	if v.class.Generates {
		limit = v.plan.Limit(v.class.Route, pick)
	}
	v.reserved = s.o.Ledger.Reserve(v.idString, fleet.EndpointKey{
		Pool: v.plan.PoolName(pick.Pool), Address: v.plan.Address(pick),
	}, limit, s.expected(v, pick.Pool), at)
	return v.reserved
}

// refuse finds what a client is told whom the plan refuses.
func (s *Service) refuse(c *call) {
	v := &c.verdict
	if v.hopeless() {
		return
	}
	v.admit.Reason = admission.ReasonBusy
	if v.decision.Reason == plan.ReasonNoRoom {
		v.admit.Reason = admission.ReasonNoRoom
	}
	v.admit.Refusal = plainRefusal
	if s.o.Admission != nil {
		s.await(c)
		v.admit.Refusal = s.o.Admission.Refuse(&c.ask, v.admit.Reason)
	}
}

// withdraw gives back what was counted for a request that nothing came of.
func (s *Service) withdraw(v *verdict) {
	if v.reserved {
		s.o.Ledger.Cancel(v.idString)
	}
	if v.admit.Admitted {
		s.o.Admission.Cancel(v.idString)
	}
	v.reserved, v.admit.Admitted = false, false
}

// classify fills in the class; it returns false when the plan doesn't know the
// route.
func (v *verdict) classify(r *request) bool {
	name, generates := wire.SplitRoute(string(r.route))
	route, known := v.plan.Route(name)
	if !known {
		return false
	}
	v.info = v.plan.RouteInfo(route)
	in := BudgetInput{
		Header:        r.header,
		Body:          r.body,
		BodyError:     r.bodyError && !r.endOfStream,
		BodyUnread:    !r.peeked && !r.endOfStream,
		TrustDeclared: v.info.TrustDeclared,
		Default:       v.info.DefaultBudget,
	}
	v.budget, v.source = Budget(in)
	v.answers, v.field = r.answers, r.field
	if v.field == "" || r.header.Tokens > r.body.Tokens { // the header is called so too
		v.field = wire.KeyMaxTokens
	}
	v.class = plan.Class{
		Route:     route,
		Arm:       plan.NoPool,
		Level:     fleet.LevelOf(v.budget),
		Strategy:  strategyOf(v.info, r.strategy),
		Zone:      v.plan.Zone(string(r.zone)),
		Generates: generates,
	}
	if generates {
		v.class.Budget = in.declared()
		v.class.Prompt = promptTokens(r.bodyBytes, v.info.BytesPerToken)
		v.class.PromptAtLeast = min(v.class.Prompt, promptTokens(r.bodyBytes, longestToken))
		if v.info.Affinity == fleet.AffinitySession {
			v.class.Session = r.session(v.info.ReadUser)
		}
	}
	if arm, known := v.plan.Pool(string(r.cluster)); known {
		v.class.Arm = arm
	}
	return true
}

// strategyOf is what the client asks for, where the route lets it; a value that
// doesn't exist means legacy.
func strategyOf(info *plan.RouteInfo, a asked) fleet.Strategy {
	if info.ClientStrategy == fleet.ClientStrategyIgnore {
		return info.Strategy
	}
	switch a {
	case askedNothing:
		return info.Strategy
	case askedDynamic:
		return fleet.StrategyDynamic
	default:
		return fleet.StrategyLegacy
	}
}

// maxRequestID bounds the client ids that are kept.
const maxRequestID = 128

// requestID is the id the client gets back: its own if the caller is trusted
// and the id is short and plain, else the decision id.
func (s *Service) requestID(r *request, own []byte) (id []byte, kept bool) {
	if plainID(r.requestID) && s.o.Trusted(string(r.source)) {
		return r.requestID, true
	}
	return own, false
}

// plainID accepts 1 … 128 visible ASCII characters without quote and backslash:
// nothing that could break a log line or a JSON body.
func plainID(id []byte) bool {
	if len(id) == 0 || len(id) > maxRequestID {
		return false
	}
	for _, c := range id {
		if c <= ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

func event(c *call, took time.Duration) Event {
	r, v := &c.req, &c.verdict
	e := Event{
		Strategy:        v.strategy,
		UnknownStrategy: r.strategy == askedUnknown,
		Reason:          v.decision.Reason,
		Action:          v.decision.Action,
		Moved:           v.decision.Moved,
		Generates:       v.class.Generates,
		Level:           v.class.Level,
		Budget:          v.budget,
		BudgetSource:    v.source,
		Sampling:        r.sampling,
		Took:            took,
		Prompt:          v.class.Prompt,
		Answers:         max(v.answers, 1),
		Tries:           v.tries,
		Admission:       v.admit.Reason,
		Limit:           v.admit.Standing.Policy,
		LimitLocal:      v.admit.Standing.Local,
		Hinted:          v.admit.Admitted && v.admit.Concurrency > 0,
		Held:            v.held,
	}
	switch {
	case v.refused():
		e.Action = plan.ActionRefuse
	case v.decision.Action == plan.ActionSteer:
		e.Slot, e.Steered = v.plan.Slot(v.decision.Picks[0])
	}
	if v.info != nil {
		e.Route = v.info.Name
		e.Pool = v.plan.PoolName(v.decision.Arm)
		e.Class = classOf(v.info, r)
	}
	return e
}

// appendAnswer writes the ProcessingResponse.
func appendAnswer(b []byte, c *call) []byte {
	r, v := &c.req, &c.verdict
	if v.refused() {
		b = appendRefusal(b, v, c.scratch[:0])
	} else {
		b = appendGoOn(b, r, v)
	}
	return appendMetadata(b, v, c.scratch[:0])
}

// appendGoOn writes request_headers: the ids, and for a moved request the order
// to match the route anew.
func appendGoOn(b []byte, r *request, v *verdict) []byte {
	b, headers := open(b, 1)  // ProcessingResponse.request_headers
	b, response := open(b, 1) // HeadersResponse.response
	b, mutation := open(b, 2) // CommonResponse.header_mutation
	b = setHeader(b, wire.HeaderDecision, v.idText)
	if !v.keepID {
		b = setHeader(b, wire.HeaderRequestID, v.requestID)
	}
	if r.stream && v.info != nil && v.class.Generates && v.info.FirstTokenMillis > 0 {
		var digits [10]byte
		b = setHeader(b, wire.HeaderPerTryTimeout, appendUint(digits[:0], uint64(v.info.FirstTokenMillis)))
	}
	b = shut(b, mutation)
	if v.decision.Moved {
		b = varint(b, 5, 1) // CommonResponse.clear_route_cache
	}
	return shut(shut(b, response), headers)
}

// appendMetadata writes dynamic_metadata: what logs and answers show, the hosts
// and, where the hosts are not in step with the route's own groups, the groups.
func appendMetadata(b []byte, v *verdict, scratch []byte) []byte {
	b, metadata := open(b, 8) // ProcessingResponse.dynamic_metadata
	b, log := openStruct(b, wire.NamespaceLog)
	b = stringEntry(b, wire.KeyDecision, v.idText)
	if v.plan != nil {
		b = stringEntry(b, wire.KeyPlan, v.plan.Digest())
	}
	b = stringEntry(b, wire.KeyStrategy, v.strategy.String())
	b = stringEntry(b, wire.KeyReason, v.reason())
	b = stringEntry(b, wire.KeyRequestID, v.requestID)
	if v.try > 0 {
		var digits [4]byte
		b = stringEntry(b, wire.KeyTry, appendUint(digits[:0], uint64(v.try)))
	}
	if v.class.Past > 0 {
		var digits [3]byte
		b = stringEntry(b, wire.KeyPast, appendUint(digits[:0], uint64(v.class.Past)))
	}
	b = shutStruct(b, log)
	if v.refused() {
		refused := refusalOf(v)
		return shut(appendStanding(b, v, refused.concurrency, scratch), metadata)
	}
	b = appendStanding(b, v, uint64(max(v.admit.Concurrency, 0)), scratch)
	if v.decision.Action == plan.ActionSteer {
		b = appendHosts(b, v)
		if v.decision.Regroup {
			b = appendGroups(b, v)
		}
	}
	return shut(b, metadata)
}

// appendStanding writes, by header name, what the route's configuration puts on
// the answer: where the client stands with its limit, and how many requests it
// should have in flight, 0 for no word on it. A refusal carries these headers
// itself too, for routes of another making: ours take them off all answers first,
// since servers may send the like.
func appendStanding(b []byte, v *verdict, concurrency uint64, scratch []byte) []byte {
	standing := &v.admit.Standing
	if standing.Requests.Limit <= 0 && standing.Tokens.Limit <= 0 && concurrency == 0 {
		return b
	}
	b, limit := openStruct(b, wire.NamespaceLimit)
	standing.EachHeader(scratch, func(name string, value []byte) { b = stringEntry(b, name, value) })
	b = appendHint(b, concurrency)
	return shutStruct(b, limit)
}

// appendHint writes the entry of a recommended concurrency, 0 for none.
func appendHint(b []byte, concurrency uint64) []byte {
	if concurrency == 0 {
		return b
	}
	var digits [20]byte
	return stringEntry(b, wire.HeaderRecommendedConcurrency, appendUint(digits[:0], concurrency))
}

// reason is why the answer is as it is.
func (v *verdict) reason() string { return why(v.decision.Reason, v.admit.Reason) }

// why is the name of what decided: admission's reason where that refused, or has the
// plan's own under its own name (all_busy, no_room), else the plan's.
func why(planned plan.Reason, admitted admission.Reason) string {
	if admitted != 0 && admitted != admission.ReasonAdmitted {
		return admitted.String()
	}
	return planned.String()
}

// appendHosts writes "ip:port,…" in attempt order; Envoy keeps one cursor over
// all groups.
func appendHosts(b []byte, v *verdict) []byte {
	b, steer := openStruct(b, wire.NamespaceSteer)
	b, hosts := openEntry(b, wire.KeyHosts)
	b, list := open(b, 3)
	for i, pick := range v.decision.Picks[:v.decision.N] {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, v.plan.AddressText(pick)...)
	}
	b = shutEntry(shut(b, list), hosts)
	return shutStruct(b, steer)
}

// appendGroups writes a priority_group override, one group per attempt:
// {"priority_groups": [{"name": "pool-a100"}, …]}. It names only groups that the
// route itself has. A sidecar whose route lacks one of them, because it is older
// or newer than the plan, goes on along its own chain at that position; a
// cluster named here that it lacks would be its final 503 (both measured on
// Envoy 1.40.0).
func appendGroups(b []byte, v *verdict) []byte {
	b, groups := openStruct(b, wire.NamespaceGroups)
	b, entry := openEntry(b, "priority_groups")
	b, list := open(b, 6) // Value.list_value
	for _, pick := range v.decision.Picks[:v.decision.N] {
		var at, group int
		b, at = open(b, 1)    // ListValue.values
		b, group = open(b, 5) // Value.struct_value
		b = appendPoolGroup(b, v.plan.PoolName(pick.Pool))
		b = shut(shut(b, group), at)
	}
	b = shutEntry(shut(b, list), entry)
	return shutStruct(b, groups)
}

func appendPoolGroup(b []byte, pool string) []byte {
	b, entry := openEntry(b, "name")
	b, name := open(b, 3)
	b = append(append(b, wire.GroupPool...), pool...)
	return shutEntry(shut(b, name), entry)
}
