package serve

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
)

const (
	// mostClients bounds the clients of a pool that are told apart, mostWords the servers of
	// which is known what they told one and when they took it.
	mostClients = 4096
	mostWords   = 32
	// forgetOf is among how many the one is looked for that is forgotten.
	forgetOf = 8
)

// words is what is known of the clients of a pool: what its servers told them, and whom
// they take. Of too many some that it knows least of are forgotten.
type words struct {
	clients map[admission.Client]*clientWords
	// shut is when a 429 closed the last of its servers, of which that one took nobody of
	// late; zero since one took a request that began after. Then reopens is set, until those
	// that told clients to stay away are asked whether they do so to all.
	shut    time.Time
	reopens bool
}

// clientWords is what is known of one.
type clientWords struct {
	by []word
	// began is when the last of its requests began that a server of the pool took.
	began time.Time
	// served is whether one of them was answered, or began to be: who is refused slowly,
	// since it sends its body slowly, seems taken meanwhile.
	served bool
}

// word is what is known of a client at one server: when it told it to stay away last, and
// until when, and when the last of its requests began that it took.
type word struct {
	from             *callers
	at, until, began time.Time
}

// tells reports whether the server tells the client to stay away: till then if it took none
// of its requests that began after, and for takenLately whatever it took, since it takes a
// client at its rate limit now and then.
func (w *word) tells(now time.Time) bool {
	return now.Sub(w.at) < takenLately || now.Before(w.until) && !w.began.After(w.at)
}

// known is until when it counts.
func (w *word) known() time.Time { return later(w.until, w.began) }

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

// forget makes room for a client: of some for one that no server ever took, which may be
// made up, and of these, or of those that one did, for the one of which the least counts yet.
func (w *words) forget() {
	var last admission.Client
	var least *clientWords
	n := 0
	for of, c := range w.clients {
		if n == 0 || c.lessThan(least) {
			last, least = of, c
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

// lessThan reports whether a client is to be forgotten before another one.
func (c *clientWords) lessThan(other *clientWords) bool {
	if c.served != other.served {
		return other.served
	}
	return c.known().Before(other.known())
}

// sooner is when the first of the servers that tell the client to stay away now wants it
// again, or then if that is sooner.
func (c *clientWords) sooner(then, now time.Time) time.Time {
	for i := range c.by {
		if w := &c.by[i]; !w.from.gone && w.until.After(now) && !w.began.After(w.at) {
			then = sooner(then, w.until)
		}
	}
	return then
}

// word is what is known of the client at a server, the zero word if nothing.
func (c *clientWords) word(from *callers) word {
	for i := range c.by {
		if c.by[i].from == from {
			return c.by[i]
		}
	}
	return word{}
}

// at is the word of a server, which of too many takes the place of the one of which the
// least counts yet.
func (c *clientWords) at(from *callers) *word {
	least := 0
	for i := range c.by {
		switch {
		case c.by[i].from == from:
			return &c.by[i]
		case c.by[i].known().Before(c.by[least].known()):
			least = i
		}
	}
	if len(c.by) < mostWords {
		c.by, least = append(c.by, word{}), len(c.by)
	}
	c.by[least] = word{from: from}
	return &c.by[least]
}

// tell notes that a server tells the client to stay away.
func (c *clientWords) tell(from *callers, at, until time.Time) {
	w := c.at(from)
	w.at, w.until = at, until
}

// took takes that a server took a request of a client that began then.
func (w *words) took(from *callers, of admission.Client, began time.Time) {
	if of == (admission.Client{}) {
		return
	}
	if !w.shut.IsZero() && began.After(w.shut) {
		w.shut, w.reopens = time.Time{}, true
	}
	c := w.client(of)
	c.began = later(c.began, began)
	one := c.at(from)
	one.began = later(one.began, began)
}

// serves notes that a server of the pool did not refuse a client, for sure.
func (w *words) serves(of admission.Client) {
	if of != (admission.Client{}) {
		w.client(of).served = true
	}
}
