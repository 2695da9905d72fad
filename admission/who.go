package admission

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// ClientState is what a client has of a pool in one class.
type ClientState struct {
	Pool string
	// Client is nobody's where Shared, and a credential where servers told one of several
	// that a client has to stay away; then it has nothing but Away and Waiting, and no class.
	Client Client
	// Shared marks one of the places that clients share for which the table had no
	// room.
	Shared bool
	Class  fleet.RequestClass
	// InFlight counts requests in flight, Waiting those that were refused and are
	// expected to come back.
	InFlight, Waiting int
	// Share is what it may have in flight; +Inf while the pool is not full.
	Share float64
	// Early is how many of late came back before they were told to, of those that
	// say that they come back (Ask.Retry above 0): others look like further requests.
	Early float64
	// Away is for how long it is kept out of the pool yet, since a server told it alone to
	// stay away; 0 if it isn't.
	Away time.Duration
}

// String is the client as fleet.LimitClient.ID takes it for authorization headers.
func (c Client) String() string { return "sha256:" + hex.EncodeToString(c[:]) }

// Clients returns, by pool, the clients with the most requests in flight and
// waiting, then those that are kept out, at most so many of each pool. It looks at all
// that are known: it is made to be asked by people, not by the tick.
func (g *Gate) Clients(most int) []ClientState {
	s, now := g.settings.Load(), g.since(g.now())
	var all []ClientState
	aways := g.aways.list(now)
	g.clients.look(func(key Client, shared bool, c *client) {
		for i := range c.accounts {
			a := &c.accounts[i]
			out := aways[a.pool][key]
			if s.pools[a.pool.name] != a.pool || a.live == 0 && a.slots.n() == 0 && out == (kept{}) {
				continue
			}
			st := ClientState{
				Pool: a.pool.name, Client: key, Shared: shared, Class: a.class,
				InFlight: a.live, Waiting: a.slots.expected(now), Share: math.Inf(1), Early: a.slots.earliness(now), Away: out.left,
			}
			if a.pool.full() {
				st.Share = a.pool.shareOf(a.weight)
			}
			all = append(all, st)
		}
	})
	for i := range all {
		of := aways[s.pools[all[i].Pool]]
		all[i].Waiting += of[all[i].Client].waiting // once, of two classes
		delete(of, all[i].Client)
	}
	for p, of := range aways {
		for key, out := range of {
			if s.pools[p.name] == p {
				all = append(all, ClientState{Pool: p.name, Client: key, Waiting: out.waiting, Share: math.Inf(1), Away: out.left})
			}
		}
	}
	slices.SortFunc(all, func(a, b ClientState) int {
		return cmp.Or(
			strings.Compare(a.Pool, b.Pool),
			cmp.Compare(b.InFlight+b.Waiting, a.InFlight+a.Waiting),
			bytes.Compare(a.Client[:], b.Client[:]),
			cmp.Compare(a.Class, b.Class),
		)
	})
	of, n := "", 0
	return slices.DeleteFunc(all, func(st ClientState) bool {
		if st.Pool != of {
			of, n = st.Pool, 0
		}
		n++
		return n > most
	})
}

// look visits all clients, locked, and changes nothing.
func (t *clients) look(visit func(key Client, shared bool, c *client)) {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		for key, c := range s.byKey {
			visit(key, false, c)
		}
		s.mu.Unlock()
	}
	for i := range t.shared {
		c := &t.shared[i].client
		c.mu.Lock()
		visit(Client{}, true, c)
		c.mu.Unlock()
	}
}
