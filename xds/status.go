package xds

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// State says whether an Envoy holds what is published for it.
type State string

// States.
const (
	Synced State = "SYNCED" // it holds what is published
	Stale  State = "STALE"  // it hasn't confirmed what is published
	Nacked State = "NACKED" // it refused what was published
)

// NodeStatus is one Envoy, connected or gone for at most ten minutes.
type NodeStatus struct {
	Node   string         `json:"node"`
	Group  string         `json:"group"`
	Listen netip.AddrPort `json:"listen"`
	Since  time.Time      `json:"since"` // start of its stream
	// Connected is false when its last stream is over. Envoy goes on with what
	// it holds: Types are then as of LastSeen, and say nothing about what was
	// published since.
	Connected bool `json:"connected"`
	// LastSeen is the end of its last stream; of a connected Envoy, the time of
	// the call.
	LastSeen time.Time `json:"lastSeen"`
	// Refused says why one that left is given no stream any more: its group is not in
	// the configuration. Else it is "".
	Refused string       `json:"refused,omitempty"`
	Types   []TypeStatus `json:"types"` // CDS, EDS, RDS, LDS, RTDS; only those it asked for
}

// TypeStatus is what an Envoy holds of one type.
type TypeStatus struct {
	Type    string    `json:"type"` // "CDS", "EDS", "RDS", "LDS" or "RTDS"
	TypeURL string    `json:"typeUrl"`
	State   State     `json:"state"`
	Reason  string    `json:"reason,omitempty"` // one line, at most 512 bytes
	LastAck time.Time `json:"lastAck,omitzero"` // zero: none on this stream
	// Version is a digest of the versions the Envoy confirmed; Envoys with the
	// same content show the same.
	Version string `json:"version"`
}

// GroupStatus is what a group is served.
type GroupStatus struct {
	Name      string `json:"name"`
	Envoys    int    `json:"envoys"`
	Desired   string `json:"desired"`   // digest of what was submitted last
	Published string `json:"published"` // digest of what is served
	Publisher string `json:"publisher"` // "idle" or "publishing"
	// Refused says why the published content isn't the desired one, or is "".
	Refused string `json:"refused,omitempty"`
	// MaxRequests are the limits in flight that each sidecar is served, by
	// cluster; see [Server.SetMaxRequests].
	MaxRequests map[string]uint32 `json:"maxRequests,omitempty"`
	// RuntimeRefused says why MaxRequests aren't those set last, or is "".
	RuntimeRefused string `json:"runtimeRefused,omitempty"`
}

var statusTypes = []struct{ name, url string }{
	{"CDS", typeCDS}, {"EDS", typeEDS}, {"RDS", typeRDS}, {"LDS", typeLDS},
}

// Status returns all connected Envoys and those that left within the last ten
// minutes (the latest 10,000), sorted by group, node and address.
func (s *Server) Status() []NodeStatus {
	now := time.Now()
	out := []NodeStatus{}
	for _, g := range s.allGroups() {
		out = append(out, g.nodes(now)...)
	}
	connected := make(map[nodeKey]bool, len(out))
	for i := range out {
		connected[out[i].key()] = true
	}
	for _, n := range s.departed.list(now) {
		// An Envoy that reconnects may be in before its old stream is found broken.
		if !connected[n.key()] {
			n.Refused = s.unknownGroup(n.Group)
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b NodeStatus) int {
		return cmp.Or(strings.Compare(a.Group, b.Group), strings.Compare(a.Node, b.Node), a.Listen.Compare(b.Listen), a.Since.Compare(b.Since))
	})
	return out
}

// Groups returns all groups, sorted by name.
func (s *Server) Groups() []GroupStatus {
	out := []GroupStatus{}
	for _, g := range s.allGroups() {
		out = append(out, g.status())
	}
	return out
}

func (s *Server) allGroups() []*group {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*group, 0, len(s.groups))
	for _, name := range sortedNames(s.groups) {
		out = append(out, s.groups[name])
	}
	return out
}

func (g *group) status() GroupStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	st := GroupStatus{
		Name: g.name, Envoys: len(g.sessions), Desired: g.desired.digest, Published: g.current.digest,
		Publisher: "idle", Refused: g.refusedText,
		MaxRequests: g.runtime.current.limits, RuntimeRefused: g.runtime.refusedText,
	}
	select {
	case <-g.idle:
	default:
		st.Publisher = "publishing"
	}
	return st
}

func (g *group) nodes(now time.Time) []NodeStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]NodeStatus, 0, len(g.sessions))
	for ses := range g.sessions {
		out = append(out, g.nodeStatus(ses, now))
	}
	return out
}

// nodeStatus describes a connected Envoy at now. The caller holds g.mu.
func (g *group) nodeStatus(ses *session, now time.Time) NodeStatus {
	n := NodeStatus{Node: ses.node, Group: g.name, Listen: ses.listen, Since: ses.since, Connected: true, LastSeen: now, Types: []TypeStatus{}}
	for _, t := range statusTypes {
		if ts := ses.types[t.url]; ts != nil {
			st := g.typeStatus(ses, t.url, ts)
			st.Type = t.name
			n.Types = append(n.Types, st)
		}
	}
	if ses.runtime != nil {
		n.Types = append(n.Types, g.runtimeStatus(ses))
	}
	return n
}

// typeStatus judges one type. A refusal stays visible while the group serves
// something else than what is desired, although the Envoy has meanwhile
// accepted that.
func (g *group) typeStatus(ses *session, typeURL string, ts *typeState) TypeStatus {
	st := TypeStatus{TypeURL: typeURL, State: Synced, LastAck: ts.lastAck, Version: heldDigest(ts.held)}
	switch r := ts.refused; {
	case r != nil && !r.answered && !ts.caughtUp(g.published(typeURL, ses)):
		st.State, st.Reason = Nacked, r.text
	case r != nil && g.refusedText != "" && r.world == g.handled.digest:
		st.State, st.Reason = Nacked, oneLine("taken back; it holds the last accepted content: "+r.text)
	case ts.quiet(g.published(typeURL, ses)) && ts.caughtUp(g.published(typeURL, ses)):
	case ts.late:
		st.State, st.Reason = Stale, fmt.Sprintf("no ACK within %s", g.server.ackDeadline)
	default:
		st.State, st.Reason = Stale, "waiting for its ACK"
	}
	return st
}

func heldDigest(held map[string]string) string {
	h := sha256.New()
	for _, name := range sortedNames(held) {
		fmt.Fprintf(h, "%q=%s\n", name, held[name])
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}
