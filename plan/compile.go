package plan

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Plan is what decisions are made from during one tick. It is immutable and
// safe for any number of concurrent readers; publish it through an
// atomic.Pointer.
type Plan struct {
	tick       uint64
	digest     string
	pools      []pool
	routes     []route
	poolIndex  map[string]PoolID
	routeIndex map[string]RouteID
	zoneIndex  map[string]ZoneID
	// ids are all pools in order: one of them is the chain of a pool alone.
	ids []PoolID
}

// pool keeps what the hot path reads of every candidate (endpoints) apart from
// what is read once per decision (addresses), so that the former stays in the
// CPU's cache at 10,000 endpoints.
type pool struct {
	name      string
	endpoints []endpoint
	addresses []address
	// serving lists the endpoints that don't drain, if any of the pool drains.
	serving []int32
	// drains is true when any endpoint drains.
	drains bool
	// closed is true where endpoints serve and all of them want no requests now.
	closed bool
	// trial is the pool as those chains see it that can spare endpoints that fail: it
	// has all in common but their limits. It is nil where none fails.
	trial *pool
	// outlook is what may be hoped of it by those that are refused.
	outlook outlook
	// well and open are route.spares and route.open of a chain of this pool alone.
	well, open bool
	// whole is what there is to choose from: all endpoints of weight > 0.
	whole region
	// zones are the parts of whole by the sidecar's zone: nil for zones without
	// endpoints of weight > 0, and empty where all are in one.
	zones []*region
	// zoneOf and spill are by endpoint, where zones is not empty: the zone, and how
	// many attempts in flight are too many to take a request of that zone.
	zoneOf []ZoneID
	spill  []int32
	// steered is the reason of a plain choice in this pool.
	steered Reason
}

// region is a set of a pool's endpoints.
type region struct {
	// tables holds one table per burst level; nil where there is no candidate.
	// Levels with equal candidates share one table.
	tables [fleet.BurstLevels]*table
	// idle holds a table over the idle endpoints for each level that goes there
	// first; see PoolInput.Backlogged.
	idle [fleet.BurstLevels]*table
	// ring gives sessions their homes; empty in pools that no route with affinity
	// uses.
	ring ring
}

type endpoint struct {
	slot uint32
	max  int32 // 0: unlimited; below 0: closed
	kv   int32 // free tokens of the KV cache; unlimited when unknown
	// calm is true when the endpoint's risk lets it take sessions.
	calm  bool
	idle  bool
	fails bool // true only in pool.trial
}

// affinityRisk is the risk from which an endpoint takes no request for the sake
// of its session: half-way to trouble, a warm cache is no longer worth it.
const affinityRisk = 0.5

type address struct {
	at   netip.AddrPort
	text string
}

type route struct {
	info RouteInfo
	// chains has one entry per pool that may be drawn. For a pool of the split:
	// that pool, the split's other pools in rotation after it, the fallback. For
	// one of the fallback (Envoy's routes may be a moment ahead of or behind the
	// plan): that pool, then the others in order.
	chains [][]PoolID
	// single is true when the split has one pool, so that it is known without
	// being told.
	single bool
	// sticky is true when sessions have homes.
	sticky bool
	// spares is true when the pools have an endpoint to send to that doesn't fail: those
	// that do take only trials then. open is true when such a one isn't closed either.
	spares, open bool
	// room is the largest free KV cache of the chain's endpoints that may be
	// chosen; unlimited where any is unknown.
	room int32
	// whole is the largest KV cache of the chain's endpoints that don't drain, as a
	// whole: math.MaxInt32 where one isn't known, or there is none.
	whole int32
	// most is what a request counts for at most by an estimate, on routes that refuse
	// what has no room: nearly all of the largest KV cache of the endpoints that may be
	// chosen. A cache that has so much free counts as empty. It is more than any
	// estimate where a cache isn't known, and on other routes: bodies with images in
	// them would all go to the one endpoint that is empty.
	most int32
}

// RouteInfo is what others need to know of a route. It is read-only.
type RouteInfo struct {
	Name           string
	Dialect        fleet.Dialect
	Strategy       fleet.Strategy
	ClientStrategy fleet.ClientStrategy
	TrustDeclared  bool
	// DefaultBudget is the output budget of requests that declare none.
	DefaultBudget fleet.Tokens
	// FirstTokenMillis, if not 0, is the per-attempt limit for streaming
	// requests.
	FirstTokenMillis uint32
	// Affinity is AffinitySession where Class.Session counts.
	Affinity fleet.Affinity
	// The rest is as in RouteInput, with BytesPerToken's default filled in.
	ClientKey        fleet.ClientKey
	Claim            string
	Class            fleet.RequestClass
	Limited          bool
	MaxOutput        fleet.Tokens
	Oversize, NoRoom fleet.Oversize
	BytesPerToken    float64
	ComputedRetry    bool
	RefuseUnread     bool
	ReadUser         bool
	MaxBody          fleet.Bytes
}

// maxItems bounds pools and routes, whose ids are 16 bits wide, and keeps
// endpoint indexes far inside theirs.
const (
	maxItems     = math.MaxInt16
	maxEndpoints = 1 << 24
)

// Compile builds the plan of one tick. It copies all it keeps of in. It fails
// only on inputs that no valid configuration and no healthy scorer can produce:
// duplicate names or addresses, an invalid address, a weight or risk that is
// not a finite number ≥ 0, a negative limit or count, a share beyond 1, a route with a pool that is not
// there or without any pool. After an error the previous plan stays in use.
func Compile(in Inputs) (*Plan, error) {
	if len(in.Pools) > maxItems || len(in.Routes) > maxItems {
		return nil, fmt.Errorf("compile plan: %d pools and %d routes; accepted: at most %d of each", len(in.Pools), len(in.Routes), maxItems)
	}
	p := &Plan{
		tick:       in.Tick,
		digest:     digest(in),
		pools:      make([]pool, len(in.Pools)),
		routes:     make([]route, len(in.Routes)),
		poolIndex:  make(map[string]PoolID, len(in.Pools)),
		routeIndex: make(map[string]RouteID, len(in.Routes)),
		zoneIndex:  make(map[string]ZoneID),
		ids:        make([]PoolID, len(in.Pools)),
	}
	if err := p.indexZones(in.Pools); err != nil {
		return nil, fmt.Errorf("compile plan: %w", err)
	}
	sticky := stickyPools(in.Routes)
	for i := range in.Pools {
		name := in.Pools[i].Name
		if _, found := p.poolIndex[name]; found {
			return nil, fmt.Errorf("compile plan: two pools are named %q", name)
		}
		p.poolIndex[name], p.ids[i] = PoolID(i), PoolID(i)
		if err := p.compilePool(&p.pools[i], &in.Pools[i], sticky[name]); err != nil {
			return nil, fmt.Errorf("compile plan: pool %q: %w", name, err)
		}
	}
	for i := range in.Routes {
		name := in.Routes[i].Name
		if _, found := p.routeIndex[name]; found {
			return nil, fmt.Errorf("compile plan: two routes are named %q", name)
		}
		p.routeIndex[name] = RouteID(i)
		if err := p.compileRoute(&p.routes[i], &in.Routes[i], in.Pools); err != nil {
			return nil, fmt.Errorf("compile plan: route %q: %w", name, err)
		}
	}
	return p, nil
}

// digest is the first 64 bits of the SHA-256 of the canonical encoding: enough
// to tell the some thousand plans of a retention window apart, short enough for
// a header.
func digest(in Inputs) string {
	sum := sha256.Sum256(in.AppendCanonical(nil))
	return hex.EncodeToString(sum[:8])
}

// stickyPools are the pools that requests with a session may go to.
func stickyPools(routes []RouteInput) map[string]bool {
	out := make(map[string]bool)
	for i := range routes {
		if routes[i].Affinity != fleet.AffinitySession {
			continue
		}
		for _, name := range routes[i].Split {
			out[name] = true
		}
		for _, name := range routes[i].Fallback {
			out[name] = true
		}
	}
	return out
}

// indexZones numbers the zones in the order in which they occur.
func (p *Plan) indexZones(pools []PoolInput) error {
	for i := range pools {
		for k := range pools[i].Endpoints {
			zone := pools[i].Endpoints[k].Zone
			if zone == "" || p.zoneIndex[zone] != 0 {
				continue
			}
			if len(p.zoneIndex) == maxItems {
				return fmt.Errorf("more than %d zones", maxItems)
			}
			p.zoneIndex[zone] = ZoneID(len(p.zoneIndex) + 1)
		}
	}
	return nil
}

func (p *Plan) compilePool(pl *pool, in *PoolInput, sticky bool) error {
	if !(in.SpillAt >= 0 && in.SpillAt <= 1) {
		return fmt.Errorf("spills at %v of a zone's capacity; accepted: 0 to 1", in.SpillAt)
	}
	n := len(in.Endpoints)
	if n > maxEndpoints {
		return fmt.Errorf("%d endpoints; accepted: at most %d", n, maxEndpoints)
	}
	pl.name = in.Name
	pl.well, pl.open = wellIn(in.Endpoints)
	pl.endpoints = make([]endpoint, n)
	seen := make(map[netip.AddrPort]struct{}, n)
	for i := range in.Endpoints {
		e := &in.Endpoints[i]
		if err := checkEndpoint(e); err != nil {
			return fmt.Errorf("endpoint %d (%s): %w", i, e.Address, err)
		}
		if _, found := seen[e.Address]; found {
			return fmt.Errorf("endpoint %d: address %s occurs twice", i, e.Address)
		}
		seen[e.Address] = struct{}{}
		pl.drains = pl.drains || e.State == fleet.StateDraining
		pl.endpoints[i] = endpoint{slot: e.Slot, max: e.MaxInFlight, kv: kvRoom(e.KVFree), calm: e.Risk < affinityRisk, idle: e.idle()}
		if e.Closed {
			pl.endpoints[i].max = closed
		}
	}
	if pl.drains {
		pl.serving = serving(in.Endpoints)
	}
	pl.closed = allClosed(in.Endpoints)
	for i := range in.Endpoints {
		pl.outlook = max(pl.outlook, in.Endpoints[i].outlook())
	}
	pl.addresses = formatAddresses(in.Endpoints)
	everyone := candidates(in.Endpoints, math.MinInt64)
	sets := newLevelSets(in.Endpoints, everyone)
	idle := idleSets(in, &sets)
	pl.whole.compile(in.Endpoints, everyone, &sets, sticky)
	pl.whole.idle = idle.tables(in.Endpoints)
	p.compileZones(pl, in, everyone, &sets, &idle, sticky)
	pl.steered = ReasonWeighted
	if allUnknown(in.Endpoints) {
		pl.steered = ReasonNoTelemetry
	}
	pl.trial = onTrial(*pl, in.Endpoints)
	return nil
}

// onTrial is the pool where the endpoints of it that fail can be spared; nil where none
// fails.
func onTrial(pl pool, in []EndpointInput) *pool {
	fails := func(e EndpointInput) bool { return e.Failing && e.serves() }
	if !slices.ContainsFunc(in, fails) {
		return nil
	}
	pl.endpoints = slices.Clone(pl.endpoints)
	pl.closed, pl.outlook = true, outlookNone
	for i := range in {
		e, at := &in[i], &pl.endpoints[i]
		hope := e.outlook()
		if fails(*e) {
			at.fails, at.max = true, trial(e)
			hope = min(hope, outlookFailing)
		}
		pl.outlook = max(pl.outlook, hope)
		pl.closed = pl.closed && (e.Failing || e.Closed || !e.chosen())
	}
	return &pl
}

// trial is the limit of a failing endpoint that can be spared.
func trial(e *EndpointInput) int32 {
	switch {
	case e.Closed || e.Trial == 0:
		return closed
	case e.MaxInFlight == 0:
		return e.Trial
	}
	return min(e.Trial, e.MaxInFlight)
}

func (r *region) compile(in []EndpointInput, everyone []int32, sets *levelSets, sticky bool) {
	r.tables = sets.tables(in)
	if sticky {
		r.ring = newRing(in, settled(in, everyone))
	}
}

// settled leaves out endpoints in their slow start, unless that leaves none:
// their sessions stay with those who took them over, and come back at the end of
// it, not all at once at the beginning.
func settled(in []EndpointInput, set []int32) []int32 {
	out := make([]int32, 0, len(set))
	for _, e := range set {
		if in[e].State != fleet.StateProbe {
			out = append(out, e)
		}
	}
	if len(out) == 0 {
		return set
	}
	return out
}

// compileZones parts a pool by zones, if its candidates are in more than one.
func (p *Plan) compileZones(pl *pool, in *PoolInput, everyone []int32, sets, idle *levelSets, sticky bool) {
	several := false
	for _, e := range everyone {
		several = several || in.Endpoints[e].Zone != in.Endpoints[everyone[0]].Zone
	}
	if !several {
		return
	}
	n := len(in.Endpoints)
	pl.zoneOf, pl.spill = make([]ZoneID, n), make([]int32, n)
	at := in.SpillAt
	if at == 0 {
		at = DefaultSpillAt
	}
	for i := range in.Endpoints {
		e := &in.Endpoints[i]
		pl.zoneOf[i] = p.zoneIndex[e.Zone]
		pl.spill[i] = int32(math.Ceil(at * e.capacity()))
	}
	parts := pl.byZone(everyone, len(p.zoneIndex)+1)
	levels, spare := pl.levelsByZone(sets, len(parts)), pl.levelsByZone(idle, len(parts))
	pl.zones = make([]*region, len(parts))
	for zone := 1; zone < len(parts); zone++ {
		if len(parts[zone]) == 0 {
			continue
		}
		var near, nearIdle levelSets
		for level := range near {
			near[level], nearIdle[level] = levels[level][zone], spare[level][zone]
		}
		pl.zones[zone] = new(region)
		pl.zones[zone].compile(in.Endpoints, parts[zone], &near, sticky)
		pl.zones[zone].idle = nearIdle.tables(in.Endpoints)
	}
}

// levelsByZone parts each level's set by zones.
func (pl *pool) levelsByZone(sets *levelSets, zones int) (out [fleet.BurstLevels][][]int32) {
	for level := range sets {
		if first := sets.shared(level); first < level {
			out[level] = out[first]
		} else {
			out[level] = pl.byZone(sets[level], zones)
		}
	}
	return out
}

// byZone parts a set by zones; n is above every zone's id.
func (pl *pool) byZone(set []int32, n int) [][]int32 {
	out := make([][]int32, n)
	for _, e := range set {
		zone := pl.zoneOf[e]
		out[zone] = append(out[zone], e)
	}
	return out
}

func checkEndpoint(e *EndpointInput) error {
	switch {
	case !e.Address.IsValid():
		return fmt.Errorf("the address is not valid")
	case !(e.Weight >= 0) || math.IsInf(e.Weight, 1):
		return fmt.Errorf("weight is %v; accepted: a finite number of at least 0", e.Weight)
	case !(e.Risk >= 0 && e.Risk <= 1):
		return fmt.Errorf("risk is %v; accepted: 0 to 1", float64(e.Risk))
	case e.MaxInFlight < 0:
		return fmt.Errorf("limit in flight is %d; accepted: at least 0 (0 is unlimited)", e.MaxInFlight)
	case e.Trial < 0:
		return fmt.Errorf("%d trials; accepted: at least 0 (0 is none)", e.Trial)
	case e.InFlight < 0:
		return fmt.Errorf("%d attempts in flight; accepted: at least 0", e.InFlight)
	case e.KVFree < -1:
		return fmt.Errorf("free KV tokens are %d; accepted: at least 0, or -1 for unknown", e.KVFree)
	case e.KVSize < 0:
		return fmt.Errorf("a KV cache of %d tokens; accepted: at least 0 (0 is unknown)", e.KVSize)
	}
	return nil
}

// outlook is what may be hoped of an endpoint, or of the best of a pool. More is better.
type outlook uint8

const (
	outlookNone    outlook = iota // it drains
	outlookEjected                // only Envoy's own choice may use it
	outlookFailing                // it may be chosen when it is well again
	outlookClosed                 // it may be chosen when it opens
	outlookOpen                   // it may be chosen
)

func (e *EndpointInput) outlook() outlook {
	switch {
	case !e.serves():
		return outlookNone
	case !e.chosen():
		return outlookEjected
	case e.Closed:
		return outlookClosed
	}
	return outlookOpen
}

// closed is the limit of an endpoint that takes nothing.
const closed = -1

// allClosed reports whether endpoints serve and all of them are closed.
func allClosed(in []EndpointInput) bool {
	any := false
	for i := range in {
		switch e := &in[i]; {
		case e.State == fleet.StateDraining:
		case !e.Closed:
			return false
		default:
			any = true
		}
	}
	return any
}

// serving lists the endpoints that don't drain.
func serving(in []EndpointInput) []int32 {
	out := make([]int32, 0, len(in))
	for i := range in {
		if in[i].State != fleet.StateDraining {
			out = append(out, int32(i))
		}
	}
	return out
}

// kvRoom is free KV cache as the hot path compares it; unknown is all there is.
func kvRoom(free fleet.Tokens) int32 {
	if free < 0 {
		return math.MaxInt32
	}
	return int32(min(free, math.MaxInt32))
}

// formatAddresses writes all addresses into one string and cuts it up: one
// allocation instead of one per endpoint and tick.
func formatAddresses(in []EndpointInput) []address {
	out := make([]address, len(in))
	ends := make([]int, len(in))
	text := make([]byte, 0, 24*len(in))
	for i := range in {
		text = in[i].Address.AppendTo(text)
		ends[i] = len(text)
	}
	all, start := string(text), 0
	for i, end := range ends {
		out[i] = address{at: in[i].Address, text: all[start:end]}
		start = end
	}
	return out
}

// allUnknown reports whether nothing is known of any endpoint that may be
// chosen.
func allUnknown(in []EndpointInput) bool {
	for i := range in {
		if in[i].weight() > 0 && in[i].State != fleet.StateUnknown {
			return false
		}
	}
	return true
}

func (p *Plan) compileRoute(r *route, in *RouteInput, pools []PoolInput) error {
	if len(in.Split) == 0 {
		return fmt.Errorf("the split has no pool")
	}
	split, err := p.resolve(in.Split)
	if err != nil {
		return fmt.Errorf("split: %w", err)
	}
	for i, id := range split {
		if slices.Contains(split[:i], id) {
			return fmt.Errorf("split: pool %q occurs twice", in.Split[i])
		}
	}
	fallback, err := p.resolve(in.Fallback)
	if err != nil {
		return fmt.Errorf("fallback: %w", err)
	}
	r.chains = chainsOf(split, fallback)
	r.single = len(split) == 1
	r.sticky = in.Affinity == fleet.AffinitySession
	r.info = RouteInfo{
		Name:             in.Name,
		Dialect:          in.Dialect,
		Strategy:         in.Strategy,
		ClientStrategy:   in.ClientStrategy,
		TrustDeclared:    in.TrustDeclared,
		DefaultBudget:    in.DefaultBudget,
		FirstTokenMillis: in.FirstTokenMillis,
		Affinity:         in.Affinity,
		ClientKey:        in.ClientKey,
		Claim:            in.Claim,
		Class:            in.Class,
		Limited:          in.Limited,
		MaxOutput:        in.MaxOutput,
		Oversize:         in.Oversize,
		NoRoom:           in.NoRoom,
		BytesPerToken:    in.BytesPerToken,
		ComputedRetry:    in.ComputedRetry,
		RefuseUnread:     in.RefuseUnread,
		ReadUser:         in.ReadUser,
		MaxBody:          in.MaxBody,
	}
	if r.info.BytesPerToken == 0 {
		r.info.BytesPerToken = DefaultBytesPerToken
	}
	for _, id := range r.chains[0] { // all chains of a route have the same pools
		in := pools[id].Endpoints
		r.room = max(r.room, roomIn(in))
		r.whole = max(r.whole, wholeIn(in, (*EndpointInput).serves))
		r.most = max(r.most, wholeIn(in, (*EndpointInput).chosen))
		well, open := wellIn(in)
		r.spares, r.open = r.spares || well, r.open || open
	}
	if r.info.NoRoom != fleet.OversizeRefuse {
		r.most = math.MaxInt32
	}
	if r.whole == 0 {
		r.whole = math.MaxInt32
	}
	r.most -= r.most / emptyTaken
	return nil
}

// emptyTaken: of a KV cache that counts as empty a sixteenth may be taken, as by a
// short request or by blocks that the engine keeps to itself.
const emptyTaken = 16

// serves reports whether the endpoint doesn't drain.
func (e *EndpointInput) serves() bool { return e.State != fleet.StateDraining }

// chosen reports whether the endpoint may be chosen.
func (e *EndpointInput) chosen() bool { return e.weight() > 0 }

// roomIn is the largest free KV cache of the endpoints that may be chosen.
func roomIn(in []EndpointInput) int32 {
	room := int32(0)
	for i := range in {
		if in[i].chosen() {
			room = max(room, kvRoom(in[i].KVFree))
		}
	}
	return room
}

// wellIn reports whether there is an endpoint to send to that doesn't fail, and one that is
// not closed either.
func wellIn(in []EndpointInput) (well, open bool) {
	for i := range in {
		if in[i].chosen() && !in[i].Failing {
			well, open = true, open || !in[i].Closed
		}
	}
	return well, open
}

// wholeIn is the largest KV cache of the endpoints that count, 0 without any.
func wholeIn(in []EndpointInput, counts func(*EndpointInput) bool) int32 {
	whole := int32(0)
	for i := range in {
		switch {
		case !counts(&in[i]):
		case in[i].KVSize == 0:
			return math.MaxInt32
		default:
			whole = max(whole, kvRoom(in[i].KVSize))
		}
	}
	return whole
}

func chainsOf(split, fallback []PoolID) [][]PoolID {
	var out [][]PoolID
	for i := range split {
		out = append(out, slices.Concat(split[i:], split[:i], fallback))
	}
	for i, id := range fallback {
		if !slices.Contains(split, id) && !slices.Contains(fallback[:i], id) {
			out = append(out, slices.Concat([]PoolID{id}, split, fallback[:i], fallback[i+1:]))
		}
	}
	return out
}

func (p *Plan) resolve(names []string) ([]PoolID, error) {
	out := make([]PoolID, len(names))
	for i, name := range names {
		id, found := p.poolIndex[name]
		if !found {
			return nil, fmt.Errorf("there is no pool %q", name)
		}
		out[i] = id
	}
	return out, nil
}

// Tick returns the tick of the inputs.
func (p *Plan) Tick() uint64 { return p.tick }

// Digest returns 16 hex digits that name the inputs: equal inputs have equal
// digests in every process.
func (p *Plan) Digest() string { return p.digest }

// Route returns the id of a route.
func (p *Plan) Route(name string) (RouteID, bool) {
	id, found := p.routeIndex[name]
	return id, found
}

// Pool returns the id of a pool.
func (p *Plan) Pool(name string) (PoolID, bool) {
	id, found := p.poolIndex[name]
	return id, found
}

// RouteInfo returns a route's facts, or nil if the plan doesn't know it. The
// caller must not write to it.
func (p *Plan) RouteInfo(id RouteID) *RouteInfo {
	if r := p.route(id); r != nil {
		return &r.info
	}
	return nil
}

// Zone returns the id of a zone, or 0 if no endpoint is there.
func (p *Plan) Zone(name string) ZoneID { return p.zoneIndex[name] }

// PoolName returns a pool's name, or "" if the plan doesn't know it.
func (p *Plan) PoolName(id PoolID) string {
	if pl := p.pool(id); pl != nil {
		return pl.name
	}
	return ""
}

// Address returns the address of a pick, or the zero value if there is none.
func (p *Plan) Address(pick Pick) netip.AddrPort {
	if a := p.address(pick); a != nil {
		return a.at
	}
	return netip.AddrPort{}
}

// Slot returns the live counter of a pick, or false if there is none.
func (p *Plan) Slot(pick Pick) (uint32, bool) {
	pl := p.pool(pick.Pool)
	if pl == nil || pick.Endpoint < 0 || int(pick.Endpoint) >= len(pl.endpoints) {
		return 0, false
	}
	return pl.endpoints[pick.Endpoint].slot, true
}

// Limit is how many attempts may be in flight on a pick for a request of a route; 0 is
// no limit. It is what a caller that has to be exact reserves a place under: the counts
// that Decide compares may be a moment old. Of a closed endpoint it is negative.
func (p *Plan) Limit(route RouteID, pick Pick) int32 {
	pl := p.pool(pick.Pool)
	if pl == nil || uint(pick.Endpoint) >= uint(len(pl.endpoints)) {
		return 0
	}
	if r := p.route(route); r != nil {
		spares, _ := p.spared(r, pick.Pool)
		pl = pl.seen(spares)
	}
	return pl.endpoints[pick.Endpoint].max
}

// AddressText returns "ip:port" of a pick, or "" if there is none. It doesn't
// allocate.
func (p *Plan) AddressText(pick Pick) string {
	if a := p.address(pick); a != nil {
		return a.text
	}
	return ""
}

func (p *Plan) address(pick Pick) *address {
	pl := p.pool(pick.Pool)
	if pl == nil || uint(pick.Endpoint) >= uint(len(pl.addresses)) {
		return nil
	}
	return &pl.addresses[pick.Endpoint]
}

func (p *Plan) pool(id PoolID) *pool {
	if uint(id) >= uint(len(p.pools)) {
		return nil
	}
	return &p.pools[id]
}

func (p *Plan) route(id RouteID) *route {
	if uint(id) >= uint(len(p.routes)) {
		return nil
	}
	return &p.routes[id]
}
