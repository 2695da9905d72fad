package serve

import (
	"net/netip"

	"github.com/fairlead-proxy/fairlead/admin"
)

// AdminAddr is where the admin API listens, after Listen.
func (s *Server) AdminAddr() string { return s.listeners.admin.Addr().String() }

// PushAddr is where agents push, after Listen; "" if the config names no place.
func (s *Server) PushAddr() string {
	if s.listeners.push == nil {
		return ""
	}
	return s.listeners.push.Addr().String()
}

// Fleet returns what the last tick knew of all pools.
func (s *Server) Fleet() admin.Fleet { return *s.view.Load() }

// shownClients is how many clients of each pool are shown.
const shownClients = 20

// Clients lists the clients that have most of each pool, as of now.
func (s *Server) Clients() []admin.Caller {
	out := []admin.Caller{}
	for _, c := range s.gate.Clients(shownClients) {
		who := c.Client.String()
		if c.Shared {
			who = "others"
		}
		class := ""
		if c.Class != 0 {
			class = c.Class.String()
		}
		out = append(out, admin.Caller{
			Pool: c.Pool, Client: who, Class: class, InFlight: c.InFlight, Waiting: c.Waiting,
			Share: bounded(c.Share), Early: c.Early, Away: c.Away.Seconds(),
		})
	}
	return out
}

// Proxies lists the sidecars with what they acknowledged; those that left in the
// last minutes too.
func (s *Server) Proxies() []admin.Proxy {
	out := []admin.Proxy{}
	for _, n := range s.publish.Status() {
		p := admin.Proxy{Node: n.Node, Group: n.Group, Listen: n.Listen.String(), Connected: n.Connected, Since: n.Since, LastSeen: n.LastSeen, Reason: n.Refused}
		for _, t := range n.Types {
			p.Types = append(p.Types, admin.ProxyType{Type: t.Type, State: string(t.State), Reason: t.Reason, LastAck: t.LastAck})
		}
		out = append(out, p)
	}
	return out
}

// trusted reports whether a caller's x-request-id is kept: its address lies in
// a listener's `trusted` ranges.
func (s *Server) trusted(source string) bool {
	address, err := netip.ParseAddrPort(source)
	if err != nil {
		return false
	}
	for _, g := range s.config.Load().Groups {
		for _, prefix := range g.Listener.TrustedCIDRs {
			if prefix.Contains(address.Addr().Unmap()) {
				return true
			}
		}
	}
	return false
}

// typeName shortens a type URL for metric labels.
func typeName(url string) string {
	switch url {
	case "type.googleapis.com/envoy.config.cluster.v3.Cluster":
		return "CDS"
	case "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment":
		return "EDS"
	case "type.googleapis.com/envoy.config.listener.v3.Listener":
		return "LDS"
	case "type.googleapis.com/envoy.config.route.v3.RouteConfiguration":
		return "RDS"
	case "type.googleapis.com/envoy.service.runtime.v3.Runtime":
		return "RTDS"
	case "":
		return "none"
	}
	return "other"
}
