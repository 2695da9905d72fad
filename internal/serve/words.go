package serve

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
)

const (
	// mostClients bounds the clients of a pool that are told apart, mostWords the servers of
	// which is known what they told one.
	mostClients = 1024
	mostWords   = 16
	// forgetOf is among how many the one is looked for that is forgotten.
	forgetOf = 8
)

// words is what is known of the clients of a pool: what its servers told them, and whom
// they take. Of too many some that it knows least of are forgotten.
type words struct {
	clients map[admission.Client]*clientWords
}

// clientWords is what is known of one.
type clientWords struct {
	by []word
	// began is when the last of its requests began that a server of the pool took.
	began time.Time
}

// word is that a server told a client to stay away: when, and until when. since is whether
// it took a request of it that began after.
type word struct {
	from      *callers
	at, until time.Time
	since     bool
}

// client is what is known of a client.
func (w *words) client(of admission.Client) *clientWords {
	if c := w.clients[of]; c != nil {
		return c
	}
	if w.clients == nil {
		w.clients = map[admission.Client]*clientWords{}
	}
	if len(w.clients) >= mostClients {
		w.forget()
	}
	c := &clientWords{}
	w.clients[of] = c
	return c
}

// forget makes room for a client: for one that may come again last of some, and of those
// that may come now the one that was taken last longest ago.
func (w *words) forget() {
	var last admission.Client
	var least time.Time
	n := 0
	for of, c := range w.clients {
		if known := c.known(); n == 0 || known.Before(least) {
			last, least = of, known
		}
		if n++; n == forgetOf {
			break
		}
	}
	delete(w.clients, last)
}

// known is until when something of a client counts.
func (c *clientWords) known() time.Time {
	at := c.began
	for i := range c.by {
		at = later(at, c.by[i].until)
	}
	return at
}

// word is what a server told the client last, nil if nothing.
func (c *clientWords) word(from *callers) *word {
	for i := range c.by {
		if c.by[i].from == from {
			w := c.by[i]
			return &w
		}
	}
	return nil
}

// tell notes that a server tells the client to stay away.
func (c *clientWords) tell(from *callers, at, until time.Time) {
	soonest := 0
	for i := range c.by {
		switch {
		case c.by[i].from == from:
			c.by[i] = word{from: from, at: at, until: until}
			return
		case c.by[i].until.Before(c.by[soonest].until):
			soonest = i
		}
	}
	if len(c.by) < mostWords {
		c.by = append(c.by, word{from: from, at: at, until: until})
	} else {
		c.by[soonest] = word{from: from, at: at, until: until}
	}
}

// took takes that a server took a request of a client that began then.
func (w *words) took(from *callers, of admission.Client, began time.Time) {
	if of == (admission.Client{}) {
		return
	}
	c := w.client(of)
	c.began = later(c.began, began)
	for i := range c.by {
		if told := &c.by[i]; told.from == from && began.After(told.at) {
			told.since = true
		}
	}
}
