package admission

import (
	"sync"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Asker is whose a request is: the client, and what providers tell it apart by, which is
// the client again where that shows nothing else. The zero Asker is nobody.
type Asker struct{ Client, Credential Client }

// maxFormer bounds the requests that ended whose clients are remembered: what a second
// brings of those that failed, while Envoy's two logs are a tenth of that apart.
const maxFormer = 1024

// former remembers whose the requests were that ended last and failed somewhere, since
// Envoy's log of attempts may come after its log of requests.
type former struct {
	mu   sync.Mutex
	byID map[string]Asker
	ids  [maxFormer]string
	next int
}

func (f *former) add(id string, of Asker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byID == nil {
		f.byID = map[string]Asker{}
	}
	if _, there := f.byID[id]; there {
		f.byID[id] = of
		return
	}
	delete(f.byID, f.ids[f.next])
	f.byID[id], f.ids[f.next] = of, id
	f.next = (f.next + 1) % maxFormer
}

func (f *former) of(id string) (Asker, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, there := f.byID[id]
	return c, there
}

// Asker is whose request that is, while it runs, and some time after one of its attempts
// failed or it did. It returns false for requests that were not admitted here.
func (g *Gate) Asker(id string) (of Asker, ok bool) {
	if of, ok = g.claims.asker(id); ok {
		return of, true
	}
	return g.former.of(id)
}

// remember keeps whose a request is that ends, if the end of an attempt of it may still be
// told that speaks against a server.
func (g *Gate) remember(o *fleet.Outcome) {
	if o.Cause == fleet.CauseOK && o.Attempt <= 1 {
		return
	}
	if of, ok := g.claims.asker(o.ID); ok {
		g.former.add(o.ID, of)
	}
}
