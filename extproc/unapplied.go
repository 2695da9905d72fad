package extproc

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// unapplied finds the decision of a request that Envoy logs without one: its caller
// left, or Envoy's patience ended, between the answer and its use. In the second case
// the request goes on. Its entries name it by Envoy's own id alone.
//
// Only ids that Envoy made are noted. Of those that callers bring several requests may
// have the same, and the end of one would pass for that of another: their leases end
// them.
type unapplied struct {
	latest latest
	// mu makes one step of finding a decision and keeping it. Requests that have
	// their decision never take it.
	mu      sync.Mutex
	running running
}

func newUnapplied() *unapplied {
	return &unapplied{latest: latest{seed: maphash.MakeSeed()}, running: running{most: mostRunning}}
}

// find returns the decision of the request that an Envoy logs by that id. With last
// it is known no more then; else it is known until then, and to that Envoy alone.
func (u *unapplied) find(node, requestID string, last bool) (n int64, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	key := logged{node, requestID}
	if n, ok = u.running.take(key); !ok {
		if n, ok = u.latest.take(requestID); !ok {
			return 0, false
		}
	}
	if !last {
		u.running.keep(key, n)
	}
	return n, true
}

// latest is a table of the latest decisions that no log entry has asked for, one for
// each of its places; where two requests meet in one, the later is known. So it takes
// no lock and no memory per request, and forgets some of the older, whose leases end
// them.
type latest struct {
	seed   maphash.Seed
	places [1 << 14]struct{ check, n atomic.Uint64 }
}

// put notes the decision of a request. Two that write to one place at a time leave
// a check that fits neither (Hyatt and Mann's XOR for lock-free hash tables, 2002).
func (l *latest) put(requestID []byte, id ID) {
	h := maphash.Bytes(l.seed, requestID)
	at := &l.places[h%uint64(len(l.places))]
	at.n.Store(uint64(id.n))
	at.check.Store(h ^ uint64(id.n))
}

// take returns the decision of a request, and forgets it.
func (l *latest) take(requestID string) (n int64, ok bool) {
	h := maphash.String(l.seed, requestID)
	at := &l.places[h%uint64(len(l.places))]
	found := at.n.Load()
	if found == 0 || !at.check.CompareAndSwap(h^found, 0) {
		return 0, false
	}
	return int64(found), true
}

// logged is a request as its Envoy logs it.
type logged struct{ node, requestID string }

// mostRunning is above how many requests run at a time that were answered later than
// Envoy's message timeout.
const mostRunning = 1 << 14

// running are the decisions of requests that go on without them, in two generations
// of most each. When the young one is full it becomes the old one, and what was old
// is forgotten: requests that weren't heard of while most others were. Running ones
// are, with each heartbeat.
type running struct {
	most       int
	young, old map[logged]int64
}

func (r *running) keep(key logged, n int64) {
	if r.young == nil || len(r.young) >= r.most {
		r.young, r.old = map[logged]int64{}, r.young
	}
	r.young[key] = n
}

func (r *running) take(key logged) (n int64, ok bool) {
	if n, ok = r.young[key]; ok {
		delete(r.young, key)
		return n, true
	}
	n, ok = r.old[key]
	delete(r.old, key)
	return n, ok
}

// Unapplied returns the id of the decision for a request that goes on, or ended,
// without it, by the id that Envoy gave the request and logs it by. False where it is
// not known, and after it was asked for a last time.
func (s *Service) Unapplied(node, requestID string, last bool) (decision string, ok bool) {
	if requestID == "" {
		return "", false
	}
	n, ok := s.unapplied.find(node, requestID, last)
	if !ok {
		return "", false
	}
	return ID{n, s.o.IDs.shard}.String(), true
}
