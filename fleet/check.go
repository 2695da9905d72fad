package fleet

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// check finds the faults that no single value shows, and fills in the defaults
// that depend on other values. Values that could not be read are skipped: they
// are reported already.
func (d *decoder) check(c *Config) {
	d.checkServe(&c.Serve)
	for i := range c.Pools {
		d.checkPool(&c.Pools[i], index("pools", i))
	}
	if c.Serve.Push.Address == (Address{}) {
		for i, p := range c.Pools {
			if p.Telemetry.Source == TelemetryPush {
				d.faultAt(join(index("pools", i), "telemetry.source"), "push, and nowhere to push to", "push together with serve.push")
			}
		}
	}
	if c.Serve.Push.TLS != nil {
		d.checkPushNodes(c.Pools)
	}
	for i := range c.Routes {
		d.checkRoute(&c.Routes[i], index("routes", i))
	}
	d.unique("pools", len(c.Pools), func(i int) string { return c.Pools[i].Name })
	d.unique("routes", len(c.Routes), func(i int) string { return c.Routes[i].Name })
	d.unique("groups", len(c.Groups), func(i int) string { return c.Groups[i].Name })
	d.checkPoolReferences(c)
	routes := byName(len(c.Routes), func(i int) string { return c.Routes[i].Name })
	d.checkLimits(c, routes)
	for i, g := range c.Groups {
		d.checkGroup(g, c.Routes, routes, index("groups", i))
	}
}

// checkPushNodes finds endpoints that nobody may push for: under TLS an agent
// speaks for the endpoints of the node that its certificate names.
func (d *decoder) checkPushNodes(pools []Pool) {
	for i, p := range pools {
		if p.Telemetry.Source != TelemetryPush {
			continue
		}
		list := join(index("pools", i), "endpoints")
		for k := range p.Endpoints {
			if at := index(list, k); !d.given(join(at, "node")) {
				d.faultAt(at, "no node, and nobody may push for it over serve.push.tls", "node: a DNS name in its agent's certificate")
			}
		}
	}
}

// unique reports names that stand twice in a list.
func (d *decoder) unique(list string, n int, name func(int) string) {
	first := map[string]int{}
	for i := range n {
		at := join(index(list, i), "name")
		before, again := first[name(i)]
		switch {
		case name(i) == "":
		case again:
			d.faultAt(at, fmt.Sprintf("%q, which %s has too", clip(name(i), 80), index(list, before)), "a name of its own")
		default:
			first[name(i)] = i
		}
	}
}

func byName(n int, name func(int) string) map[string]int {
	out := make(map[string]int, n)
	for i := n - 1; i >= 0; i-- { // the first of equal names wins
		if name(i) != "" {
			out[name(i)] = i
		}
	}
	return out
}

func (d *decoder) checkServe(s *Serve) {
	places := []struct {
		name string
		at   *Address
	}{{"xds", &s.XDS}, {"extproc", &s.ExtProc}, {"accessLog", &s.AccessLog}, {"admin", &s.Admin}, {"push", &s.Push.Address}}
	taken := map[string]string{}
	for _, p := range places {
		path := join("serve", p.name)
		where := addressPath(d, path)
		if p.name == "push" && s.Push.TLS != nil {
			if p.at.Path != "" {
				d.faultAt(join(path, "tls"), "TLS on a Unix socket", "tls together with IP:port")
			}
		} else if p.name != "admin" && p.name != "push" && unspecified(*p.at) {
			d.faultAt(where, fmt.Sprintf("%q, which sidecars are told to connect to and would reach themselves", p.at),
				"an address that sidecars can reach: unix:/path, a loopback address, or the host's own with plaintext: true")
		} else {
			d.checkPlaintext(*p.at, where)
		}
		if p.name == "admin" && p.at.Path != "" {
			d.faultAt(where, fmt.Sprintf("%q", p.at), "IP:port (browsers and Prometheus cannot reach a Unix socket)")
		}
		if p.at.Target() == "" {
			continue
		}
		if other, ok := taken[p.at.Target()]; ok {
			d.faultAt(where, fmt.Sprintf("%q, where %s listens too", p.at, other), "an address of its own")
			continue
		}
		taken[p.at.Target()] = path
	}
}

// addressPath is where the text of an address stands.
func addressPath(d *decoder, path string) string {
	if inner := join(path, "address"); d.given(inner) {
		return inner
	}
	return path
}

// unspecified says whether an address is 0.0.0.0 or [::], in whatever spelling.
// Sidecars are told to connect to the addresses of serve as they stand in the
// file, and a connection to the unspecified address ends at its own host.
func unspecified(a Address) bool {
	tcp, err := netip.ParseAddrPort(a.Host)
	return err == nil && tcp.Addr().Unmap().IsUnspecified()
}

// checkPlaintext refuses TCP that other machines can reach, unless the file
// says so.
func (d *decoder) checkPlaintext(a Address, path string) {
	if a.Host == "" || a.Plaintext {
		return
	}
	tcp, err := netip.ParseAddrPort(a.Host)
	if err != nil || tcp.Addr().IsLoopback() {
		return
	}
	d.faultAt(path, fmt.Sprintf("%q, which other machines can reach, without TLS", a.Host),
		plaintextAdvice(a, path))
}

func plaintextAdvice(a Address, path string) string {
	advice := fmt.Sprintf("unix:/path, a loopback address, or { address: %q, plaintext: true }", a.Host)
	if strings.HasPrefix(path, "serve.push") {
		advice += ", or tls beside the address"
	}
	return advice
}

func (d *decoder) checkPool(p *Pool, path string) {
	if p.Tier == "" {
		p.Tier = p.Name
	}
	if at := join(path, "http2"); p.Protocol == HTTP1 && d.given(at) {
		d.faultAt(at, "HTTP/2 settings on a pool that speaks http1", "http2 together with protocol: h2c")
	}
	if p.Decode != nil {
		at := join(path, "decode")
		if p.Limit != LimitLearned {
			d.faultAt(at, "how the batch slows down, with a fixed limit", "decode together with limit: learned")
		}
		if p.Decode.Target <= p.Decode.Base && d.given(join(at, "target")) {
			d.faultAt(join(at, "target"), fmt.Sprintf("%s, not above base %s", p.Decode.Target, p.Decode.Base), "more than base")
		}
	}
	d.checkTelemetry(p.Telemetry, join(path, "telemetry"))
	d.checkEndpoints(p.Endpoints, join(path, "endpoints"))
}

// checkTelemetry refuses settings that nothing would read.
func (d *decoder) checkTelemetry(t Telemetry, path string) {
	if t.Source != TelemetryScrape {
		for _, name := range []string{"interval", "enginePath", "gpuPath", "gpuPort"} {
			if at := join(path, name); d.given(at) {
				d.faultAt(at, "a setting of a source that is off", name+" together with source: scrape")
			}
		}
		return
	}
	if at := join(path, "gpuPort"); d.given(at) && !d.given(join(path, "gpuPath")) {
		d.faultAt(at, "a port without a page", "gpuPort together with gpuPath")
	}
}

func (d *decoder) checkEndpoints(endpoints []Endpoint, path string) {
	addresses, labels := map[netip.AddrPort]int{}, map[string]int{}
	for i := range endpoints {
		e, at := &endpoints[i], index(path, i)
		if e.Name == "" && e.Address.IsValid() {
			e.Name = e.Address.String()
		}
		if before, again := addresses[e.Address]; again && e.Address.IsValid() {
			d.faultAt(join(at, "address"), fmt.Sprintf("%q, which %s has too", e.Address, index(path, before)), "an address that no other endpoint of the pool has")
			continue // one fault: the default names are then equal too
		}
		addresses[e.Address] = i
		if before, again := labels[e.Name]; again && e.Name != "" {
			d.faultAt(join(at, "name"), fmt.Sprintf("%q, which %s has too", clip(e.Name, 80), index(path, before)), "a name of its own")
		}
		labels[e.Name] = i
		d.checkGPUs(e.GPUs, join(at, "gpus"))
	}
}

func (d *decoder) checkGPUs(gpus []string, path string) {
	seen := map[string]bool{}
	for i, gpu := range gpus {
		if gpu != "" && seen[gpu] {
			d.faultAt(index(path, i), fmt.Sprintf("%q a second time", clip(gpu, 80)), "each GPU once")
		}
		seen[gpu] = true
	}
}

func (d *decoder) checkRoute(r *Route, path string) {
	if r.TrustDeclared && r.Match.Model != "" {
		d.faultAt(join(path, "trustDeclared"), "true on a route that matches the body's model", "false: matching the model needs the body that trustDeclared skips")
	}
	if r.SkipBody {
		if r.Match.Model != "" {
			d.faultAt(join(path, "skipBody"), "true on a route that matches the body's model", "false")
		}
		if r.ReadUser {
			d.faultAt(join(path, "readUser"), "true on a route that reads no body", "readUser without skipBody")
		}
		if r.Unread == OversizeRefuse && !r.TrustDeclared {
			d.faultAt(join(path, "unread"), "refuse on a route that reads no body", "unread: refuse without skipBody, or with trustDeclared")
		}
	}
	if r.OnFailure == FailClosed && r.RetryFields == RetryFieldsComputed {
		d.faultAt(join(path, "retryFields"), "computed together with onFailure: closed", "one of the two: an ext_proc that dies would replace running answers with its 503")
	}
	if d.given(join(path, "oversize")) && r.MaxOutput == 0 && !d.given(join(path, "maxOutput")) {
		d.faultAt(join(path, "oversize"), "a choice about a limit that is not given", "oversize together with maxOutput")
	}
	d.checkSplit(*r, path)
	if n := len(r.Split) + len(r.Fallback); n > maxChain {
		d.faultAt(join(path, "fallback"), fmt.Sprintf("a chain of %d pools", n), fmt.Sprintf("at most %d pools in split and fallback together", maxChain))
	}
	retry, whole := join(path, "retryBody"), join(path, "maxBody")
	if d.given(retry) && d.given(whole) && r.RetryBody > r.MaxBody && r.MaxBody > 0 {
		d.faultAt(retry, fmt.Sprintf("%s, above maxBody %s", r.RetryBody, r.MaxBody), "at most maxBody")
	}
}

// checkLimits finds limits that limit nothing, names that don't exist, and
// requests that two limits would claim.
func (d *decoder) checkLimits(c *Config, routes map[string]int) {
	for i := range c.Limits {
		if l := &c.Limits[i]; l.Name == "" {
			l.Name = fmt.Sprintf("limit-%d", i+1)
		}
	}
	d.unique("limits", len(c.Limits), func(i int) string { return c.Limits[i].Name })
	claimed, general := map[string]string{}, ""
	for i, l := range c.Limits {
		at := index("limits", i)
		d.checkLimit(l, at)
		if len(l.Routes) == 0 {
			if general != "" {
				d.faultAt(at, "no routes, and "+general+" names none either", "routes: the names of those it counts for")
			}
			general = at
		}
		for k, name := range l.Routes {
			path := index(join(at, "routes"), k)
			_, exists := routes[name]
			before, again := claimed[name]
			switch {
			case name == "":
			case !exists && len(c.Routes) > 0:
				d.faultAt(path, fmt.Sprintf("%q, which is no route", clip(name, 80)), known(routes, "one of the routes"))
			case again:
				d.faultAt(path, fmt.Sprintf("%q, which is in %s too", name, before), "each route in one limit")
			}
			claimed[name] = path
		}
	}
	d.checkClaims(c)
	d.checkUnread(c)
	d.checkDefaults(c)
	if r := c.Serve.Redis; r != nil {
		if r.Replicas > 0 && c.Serve.Shard >= r.Replicas {
			d.faultAt("serve.shard", fmt.Sprintf("%d, with %d replicas", c.Serve.Shard, r.Replicas), fmt.Sprintf("0 … %d, another in each replica", r.Replicas-1))
		}
		if d.given("serve.redis.ca") && !r.TLS {
			d.faultAt("serve.redis.ca", "an authority without TLS", "ca together with tls: true")
		}
		if len(c.Limits) == 0 {
			d.faultAt("serve.redis", "a server to count limits in, and no limits", "serve.redis together with limits")
		}
	}
}

// checkDefaults checks that requests that say nothing of their output fit in their limits.
func (d *decoder) checkDefaults(c *Config) {
	for i, r := range c.Routes {
		l := c.LimitOf(r.Name)
		if l == nil {
			continue
		}
		at := join(index("routes", i), "defaultMaxTokens")
		if l.Tokens.Amount > 0 && Tokens(l.Tokens.Amount) < r.DefaultMaxTokens {
			d.faultAt(at, fmt.Sprintf("%d, more than limit %q has in a window (%s): requests without max_tokens would all be refused", r.DefaultMaxTokens, l.Name, l.Tokens),
				fmt.Sprintf("at most %d", l.Tokens.Amount))
		}
		for k := range l.Clients {
			if t := l.Clients[k].Tokens; t.Amount > 0 && Tokens(t.Amount) < r.DefaultMaxTokens {
				d.faultAt(at, fmt.Sprintf("%d, more than client %d of limit %q has in a window (%s): its requests without max_tokens would all be refused", r.DefaultMaxTokens, k, l.Name, t),
					fmt.Sprintf("at most %d", t.Amount))
			}
		}
	}
}

func (d *decoder) checkLimit(l Limit, at string) {
	given := func(name string) bool { return d.given(join(at, name)) }
	if !given("requests") && !given("tokens") && !given("concurrency") {
		d.faultAt(at, "a limit that limits nothing", "one or more of requests, tokens, concurrency")
	}
	if (l.Key == ClientKeyJWT) != (l.Claim != "") {
		d.faultAt(join(at, "claim"), map[bool]string{true: "a claim with another key", false: "no claim"}[l.Claim != ""], "claim together with key: jwt")
	}
	seen := map[string]int{}
	for k, client := range l.Clients {
		if client.ID == "" {
			continue
		}
		path := join(index(join(at, "clients"), k), "id")
		if accepted := clientIDFault(l.Key, client.ID); accepted != "" {
			found := fmt.Sprintf("%q", clip(client.ID, 80))
			if l.Key == ClientKeyAuthorization {
				found = unsaid(client.ID) // it may be the secret itself
			}
			d.faultAt(path, found, accepted)
			continue
		}
		who := client.ID
		if l.Key == ClientKeyAuthorization { // the first 32 digits say it all
			who = who[:len("sha256:")+32]
		}
		if before, again := seen[who]; again {
			d.faultAt(path, fmt.Sprintf("%q, which %s has too", clip(client.ID, 80), index(join(at, "clients"), before)), "each client once")
		}
		seen[who] = k
	}
}

// clientIDFault says what an id of a key must look like, or "" if it does.
func clientIDFault(key ClientKey, id string) string {
	switch key {
	case ClientKeyAuthorization:
		hex, ok := strings.CutPrefix(id, "sha256:")
		if whole := len(hex) == 64 || len(hex) == 32; !ok || !whole || strings.Trim(hex, "0123456789abcdef") != "" {
			return "sha256: and the 64 hex digits in lower case, or the first 32, of the hash of the header's value in its usual spelling (such as Bearer sk-…)"
		}
	case ClientKeyJWT, ClientKeyMTLS:
		if hex, ok := strings.CutPrefix(id, "sha256:"); ok && (len(hex) == 32 || len(hex) == 64) && strings.Trim(hex, "0123456789abcdef") == "" {
			return "the value itself, not its hash"
		}
	case ClientKeyAddress:
		a, err := netip.ParseAddr(id)
		if err != nil || a.Unmap().String() != id || a.Is6() && netip.PrefixFrom(a, 64).Masked().Addr() != a {
			return "an IPv4 address, or the first address of an IPv6 /64, in its shortest form"
		}
	}
	return ""
}

// checkUnread finds routes whose limits a body that Envoy does not read would walk
// around: such a body names no model, so it takes the route of the same paths that
// asks for none.
func (d *decoder) checkUnread(c *Config) {
	byName := map[string]int{}
	for i := range c.Routes {
		byName[c.Routes[i].Name] = i
	}
	told := map[string]bool{}
	for i, g := range c.Groups {
		for k, name := range g.Routes {
			at, ok := byName[name]
			if !ok || c.Routes[at].Match.Model == "" {
				continue
			}
			strict := &c.Routes[at]
			for _, other := range g.Routes[k+1:] {
				o, ok := byName[other]
				if !ok || c.Routes[o].Match.Model != "" || !strings.HasPrefix(strict.Match.Prefix, c.Routes[o].Match.Prefix) {
					continue
				}
				if loose := &c.Routes[o]; loose.Unread != OversizeRefuse && !told[name] {
					if what := d.looser(c, strict, loose); what != "" {
						told[name] = true
						d.faultAt(index(join(index("groups", i), "routes"), k), fmt.Sprintf("%q with %s, and %q takes the same paths without it: bodies that name no readable model go there", name, what, other),
							fmt.Sprintf("the same on %q, or unread: refuse there", other))
					}
				}
				break // the first such route takes them all
			}
		}
	}
}

// looser says what a route asks for that another does not, "" if nothing.
func (d *decoder) looser(c *Config, strict, loose *Route) string {
	limit := c.LimitOf(strict.Name)
	switch {
	case limit != nil && limit != c.LimitOf(loose.Name):
		return fmt.Sprintf("limit %q", limit.Name)
	case strict.OnFailure == FailClosed && loose.OnFailure != FailClosed:
		return "onFailure: closed"
	}
	return ""
}

// checkClaims finds groups whose sidecars could never tell the clients of a
// limit apart.
func (d *decoder) checkClaims(c *Config) {
	for i := range c.Groups {
		g := &c.Groups[i]
		listener := join(index("groups", i), "listener")
		for _, name := range g.Routes {
			l := c.LimitOf(name)
			switch {
			case l == nil:
			case l.Key == ClientKeyJWT && g.Listener.JWT == nil:
				d.faultAt(listener, fmt.Sprintf("no jwt, and limit %q of route %q tells clients apart by a claim", l.Name, name), "jwt: whose tokens are verified")
			case l.Key == ClientKeyMTLS && (g.Listener.TLS == nil || g.Listener.TLS.ClientCA == ""):
				d.faultAt(listener, fmt.Sprintf("no tls.clientCA, and limit %q of route %q tells clients apart by their certificates", l.Name, name), "tls with clientCA")
			default:
				continue
			}
			if l != nil {
				break
			}
		}
	}
}

func (d *decoder) checkSplit(r Route, path string) {
	pool, split := d.given(join(path, "pool")), d.given(join(path, "split"))
	switch {
	case pool && split:
		d.faultAt(join(path, "pool"), "pool and split", "one of pool and split")
		return
	case !pool && !split:
		d.faultAt(path, "neither pool nor split", "one of pool and split")
		return
	}
	if len(r.Split) > 0 && !d.faulty(join(path, "split")) {
		d.checkWeights(r.Split, join(path, "split"))
	}
}

// checkWeights refuses a split that sends nothing anywhere, and weights that
// would be published as 0 although they are not.
func (d *decoder) checkWeights(s Split, path string) {
	points := s.BasisPoints()
	if points == nil {
		d.faultAt(path, "weights that are all 0", "at least one weight above 0")
		return
	}
	for i, w := range s {
		if w.Weight > 0 && points[i] == 0 {
			d.faultAt(join(index(path, i), "weight"), fmt.Sprintf("%d, too little of the split for one basis point", w.Weight), "0, or a larger share")
		}
	}
}

// faulty says whether a fault was reported at or below a path.
func (d *decoder) faulty(path string) bool {
	for _, f := range d.faults {
		if f.Path == path || strings.HasPrefix(f.Path, path+".") || strings.HasPrefix(f.Path, path+"[") {
			return true
		}
	}
	return false
}

// reachablePool is one mention of a pool by a route.
type reachablePool struct{ name, path string }

// mentions lists a route's pools in chain order.
func (d *decoder) mentions(r Route, path string) []reachablePool {
	var out []reachablePool
	for i, w := range r.Split {
		at := join(index(join(path, "split"), i), "pool")
		if d.given(join(path, "pool")) {
			at = join(path, "pool")
		}
		out = append(out, reachablePool{w.Pool, at})
	}
	for i, pool := range r.Fallback {
		out = append(out, reachablePool{pool, join(index(join(path, "fallback"), i), "pool")})
	}
	return out
}

// checkPoolReferences finds pools that don't exist and pools that a chain
// would try twice.
func (d *decoder) checkPoolReferences(c *Config) {
	if len(c.Pools) == 0 {
		return // reported already
	}
	pools := byName(len(c.Pools), func(i int) string { return c.Pools[i].Name })
	for i, r := range c.Routes {
		first := map[string]string{}
		for _, m := range d.mentions(r, index("routes", i)) {
			_, exists := pools[m.name]
			before, again := first[m.name]
			switch {
			case m.name == "":
			case !exists:
				d.faultAt(m.path, fmt.Sprintf("%q, which is no pool", clip(m.name, 80)), known(pools, "one of the pools"))
			case again:
				d.faultAt(m.path, fmt.Sprintf("%q, which is in %s too", m.name, before), "each pool once in split and fallback together")
			default:
				first[m.name] = m.path
			}
		}
	}
}

// known lists the names that could have been meant, the list bounded.
func known(names map[string]int, of string) string {
	const most = 10
	out := slices.Sorted(maps.Keys(names))
	if len(out) > most {
		out = append(out[:most], "…")
	}
	return of + ": " + clip(strings.Join(out, ", "), 63*most)
}

func (d *decoder) checkGroup(g Group, all []Route, routes map[string]int, path string) {
	if len(all) == 0 {
		return // reported already
	}
	var earlier []groupRoute
	seen := map[string]bool{}
	for i, name := range g.Routes {
		at := index(join(path, "routes"), i)
		r, exists := routes[name]
		switch {
		case name == "":
		case !exists:
			d.faultAt(at, fmt.Sprintf("%q, which is no route", clip(name, 80)), known(routes, "one of the routes"))
		case seen[name]:
			d.faultAt(at, fmt.Sprintf("%q a second time", name), "each route once")
		default:
			d.checkReachable(all[r], earlier, at)
			earlier = append(earlier, groupRoute{all[r], at})
		}
		seen[name] = true
	}
}

// groupRoute is a route in its place in a group.
type groupRoute struct {
	Route
	path string
}

// checkReachable refuses a route that an earlier one of its group leaves no
// request. A group's routes are matched in the order of the list.
func (d *decoder) checkReachable(r Route, earlier []groupRoute, at string) {
	if r.Match.Prefix == "" {
		return
	}
	for _, e := range earlier {
		switch {
		case e.Match.Connect && r.Match.Connect:
			d.faultAt(at, fmt.Sprintf("%q after %q, both with connect: true", r.Name, e.Name), "one such route per group (CONNECT requests have no path to tell them apart)")
			return
		case e.Match.Prefix == "":
		case e.Match.Prefix == r.Match.Prefix && e.Match.Model == r.Match.Model:
			d.faultAt(at, fmt.Sprintf("%q, which matches the same prefix and model as %q", r.Name, e.Name), "routes that differ in prefix or model")
			return
		case e.Match.covers(r.Match):
			d.faultAt(at, fmt.Sprintf("%q after %q, which takes all its requests", r.Name, e.Name), "the narrower route first")
			return
		}
	}
}

// covers says whether every request that matches n matches m.
func (m Match) covers(n Match) bool {
	return strings.HasPrefix(n.Prefix, m.Prefix) &&
		(m.Model == "" || m.Model == n.Model) &&
		(m.Connect || !n.Connect)
}
