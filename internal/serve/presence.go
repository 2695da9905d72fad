package serve

import "sync"

// presence knows which sidecars have an xDS stream and which have log streams
// here. A sidecar that has lost both at once is dead (or cut off; then its
// heartbeats bring its requests back): its requests must not fill endpoints for
// the rest of a lease.
type presence struct {
	mu    sync.Mutex
	nodes map[string]*streamsOf
}

// streamsOf is one sidecar's. Entries without streams are dropped, so there are
// as many as connected sidecars.
type streamsOf struct {
	xds  int
	logs int // one per worker of the Envoy
	// hadXDS is false for an Envoy that gets its configuration elsewhere: the
	// end of its log streams alone says little.
	hadXDS bool
}

func newPresence() *presence { return &presence{nodes: map[string]*streamsOf{}} }

func (p *presence) of(node string) *streamsOf {
	n := p.nodes[node]
	if n == nil {
		n = &streamsOf{}
		p.nodes[node] = n
	}
	return n
}

func (p *presence) xdsBegan(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.of(node)
	n.xds++
	n.hadXDS = true
}

// xdsEnded reports whether the sidecar is dead, as logsEnded does.
func (p *presence) xdsEnded(node string) (dead bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.of(node)
	n.xds = max(0, n.xds-1)
	return p.settle(node, n)
}

func (p *presence) logsBegan(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of(node).logs++
}

// blind reports whether the log of some sidecar does not come here, or of all. (An
// Envoy opens the stream with its first entry: one without traffic counts too.)
func (p *presence) blind() (some, all bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all = true
	for _, n := range p.nodes {
		some = some || n.logs == 0
		all = all && n.logs == 0
	}
	return some || all, all
}

// logsEnded is told of each log stream that ends; last is true when the sidecar
// has no other. Began and ended are counted, since a new stream may begin before
// the end of the old one is told.
func (p *presence) logsEnded(node string) (last, dead bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.of(node)
	n.logs = max(0, n.logs-1)
	return n.logs == 0, p.settle(node, n)
}

func (p *presence) settle(node string, n *streamsOf) (dead bool) {
	if n.xds > 0 || n.logs > 0 {
		return false
	}
	delete(p.nodes, node)
	return n.hadXDS
}
