package extproc

import (
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

// splitRoute parts an Envoy route's name into the config route's and whether
// its requests generate tokens.
func splitRoute(envoyRoute string) (name string, generates bool) {
	for _, suffix := range [...]string{wire.RouteOther, wire.RouteConnect} {
		if name, ok := strings.CutSuffix(envoyRoute, suffix); ok {
			return name, false
		}
	}
	return envoyRoute, true
}

// verdict is a decision with all that its answer shows.
type verdict struct {
	plan     *plan.Plan // nil when there is none
	info     *plan.RouteInfo
	class    plan.Class
	decision plan.Decision
	// strategy is the one really used: dynamic only if the plan picked or
	// refused.
	strategy fleet.Strategy
	id       ID
	idText   []byte // the decision id
	// requestID is what the client gets back; keepID is true when it is the
	// client's own.
	requestID []byte
	keepID    bool
	budget    fleet.Tokens
	source    BudgetSource
}

// requestHeaders is the phase that matters: class, decide, answer.
func (s *Service) requestHeaders(c *call, began time.Time) {
	v := s.decide(&c.req)
	v.idText = v.id.Append(c.id[:0])
	v.requestID, v.keepID = s.requestID(&c.req, v.idText)
	if v.decision.Action == plan.ActionSteer {
		s.count(&v, began)
	}
	c.answered = true
	if !c.req.observe {
		c.out.b = answers.Get(0)
		*c.out.b = s.appendAnswer(*c.out.b, &c.req, &v)
	}
	s.o.Observe(event(&c.req, &v, s.o.Now().Sub(began)))
}

// decide classes the request and asks the plan.
func (s *Service) decide(r *request) verdict {
	v := verdict{id: s.o.IDs.Next(), plan: s.o.Plan(), strategy: fleet.StrategyLegacy}
	v.class.Arm, v.decision.Arm = plan.NoPool, plan.NoPool
	v.decision.Action = plan.ActionLeave
	if v.plan == nil {
		v.decision.Reason = plan.ReasonNoPlan
		return v
	}
	if !v.classify(r) {
		v.decision.Reason = plan.ReasonUnknownRoute
		return v
	}
	v.decision = v.plan.Decide(v.class, v.id.Seed(), s.o.Live)
	if v.decision.Action != plan.ActionLeave {
		v.strategy = v.class.Strategy
	}
	return v
}

// classify fills in the class; it returns false when the plan doesn't know the
// route.
func (v *verdict) classify(r *request) bool {
	name, generates := splitRoute(string(r.route))
	route, known := v.plan.Route(name)
	if !known {
		return false
	}
	v.info = v.plan.RouteInfo(route)
	v.budget, v.source = Budget(BudgetInput{
		Header:        r.header,
		Body:          r.body,
		BodyError:     r.bodyError,
		BodyUnread:    !r.peeked && !r.endOfStream,
		TrustDeclared: v.info.TrustDeclared,
		Default:       v.info.DefaultBudget,
	})
	v.class = plan.Class{
		Route:     route,
		Arm:       plan.NoPool,
		Level:     fleet.LevelOf(v.budget),
		Strategy:  strategyOf(v.info, r.strategy),
		Zone:      v.plan.Zone(string(r.zone)),
		Generates: generates,
	}
	if generates {
		v.class.Prompt = promptTokens(r.bodyBytes)
		if v.info.Affinity == fleet.AffinitySession {
			v.class.Session = r.session()
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

// count enters the first attempt into the ledger.
func (s *Service) count(v *verdict, at time.Time) {
	if s.o.Ledger == nil {
		return
	}
	pick := v.decision.Picks[0]
	s.o.Ledger.Decided(string(v.idText), "", fleet.EndpointKey{
		Pool: v.plan.PoolName(pick.Pool), Address: v.plan.Address(pick),
	}, at)
}

func event(r *request, v *verdict, took time.Duration) Event {
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
	}
	if v.decision.Action == plan.ActionSteer {
		e.Slot, e.Steered = v.plan.Slot(v.decision.Picks[0])
	}
	if v.info != nil {
		e.Route = v.info.Name
		e.Pool = v.plan.PoolName(v.decision.Arm)
	}
	return e
}

// appendAnswer writes the ProcessingResponse.
func (s *Service) appendAnswer(b []byte, r *request, v *verdict) []byte {
	if v.decision.Action == plan.ActionRefuse {
		b = s.appendRefusal(b, v)
	} else {
		b = appendGoOn(b, r, v)
	}
	return appendMetadata(b, v)
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
func appendMetadata(b []byte, v *verdict) []byte {
	b, metadata := open(b, 8) // ProcessingResponse.dynamic_metadata
	b, log := openStruct(b, wire.NamespaceLog)
	b = stringEntry(b, wire.KeyDecision, v.idText)
	if v.plan != nil {
		b = stringEntry(b, wire.KeyPlan, v.plan.Digest())
	}
	b = stringEntry(b, wire.KeyStrategy, v.strategy.String())
	b = stringEntry(b, wire.KeyReason, v.decision.Reason.String())
	b = stringEntry(b, wire.KeyRequestID, v.requestID)
	b = shutStruct(b, log)
	if v.decision.Action == plan.ActionSteer {
		b = appendHosts(b, v)
		if v.decision.Regroup {
			b = appendGroups(b, v)
		}
	}
	return shut(b, metadata)
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
