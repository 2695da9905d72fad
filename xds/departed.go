package xds

import (
	"container/list"
	"net/netip"
	"sync"
	"time"
)

// Bounds on what is remembered of Envoys that are gone. A sidecar that restarts
// or is cut off is back well before the first; the second bounds memory, at
// most about 3 kB each.
const (
	rememberDeparted = 10 * time.Minute
	maxDeparted      = 10_000
)

// nodeKey tells Envoys apart.
type nodeKey struct {
	group, node string
	listen      netip.AddrPort
}

func (n *NodeStatus) key() nodeKey { return nodeKey{n.Group, n.Node, n.Listen} }

// departed remembers Envoys whose last stream is over, oldest first. When it is
// full the oldest makes room.
type departed struct {
	mu    sync.Mutex
	order list.List // of NodeStatus, by LastSeen
	byKey map[nodeKey]*list.Element
}

// add remembers an Envoy that left at n.LastSeen, which is now.
func (d *departed) add(n NodeStatus) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.byKey == nil {
		d.byKey = map[nodeKey]*list.Element{}
	}
	d.drop(n.key())
	d.expire(n.LastSeen)
	if d.order.Len() >= maxDeparted {
		d.dropOldest()
	}
	d.byKey[n.key()] = d.order.PushBack(n)
}

// forget is told that an Envoy is back.
func (d *departed) forget(key nodeKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drop(key)
}

// list returns who is remembered at now.
func (d *departed) list(now time.Time) []NodeStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.expire(now)
	out := make([]NodeStatus, 0, d.order.Len())
	for e := d.order.Front(); e != nil; e = e.Next() {
		out = append(out, e.Value.(NodeStatus))
	}
	return out
}

func (d *departed) expire(now time.Time) {
	for e := d.order.Front(); e != nil; e = d.order.Front() {
		if n := e.Value.(NodeStatus); now.Sub(n.LastSeen) <= rememberDeparted {
			return
		}
		d.dropOldest()
	}
}

func (d *departed) dropOldest() {
	n := d.order.Front().Value.(NodeStatus)
	d.drop(n.key())
}

func (d *departed) drop(key nodeKey) {
	if e := d.byKey[key]; e != nil {
		d.order.Remove(e)
		delete(d.byKey, key)
	}
}
