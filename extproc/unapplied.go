package extproc

import (
	"hash/maphash"
	"sync/atomic"
)

// unapplied finds the decision of a request that Envoy logs without one: its caller
// left, or Envoy's patience ended, between the answer and its use. In the second case
// the request goes on. Its entries name it by Envoy's own id alone.
//
// It is a table of the latest decisions, one for each of its places; where two
// requests meet in one, the later is known. So it takes no lock and no memory per
// request, and forgets some of the older: their leases end them.
type unapplied struct {
	seed   maphash.Seed
	places [1 << 14]struct{ check, n atomic.Uint64 }
}

func newUnapplied() *unapplied { return &unapplied{seed: maphash.MakeSeed()} }

// put notes the decision of a request. Two that write to one place at a time leave
// a check that fits neither (Hyatt and Mann's XOR for lock-free hash tables, 2002).
func (u *unapplied) put(requestID []byte, id ID) {
	h := maphash.Bytes(u.seed, requestID)
	at := &u.places[h%uint64(len(u.places))]
	at.n.Store(uint64(id.n))
	at.check.Store(h ^ uint64(id.n))
}

// find returns the decision of a request. With last it is known no more then.
func (u *unapplied) find(requestID string, last bool) (n int64, ok bool) {
	h := maphash.String(u.seed, requestID)
	at := &u.places[h%uint64(len(u.places))]
	found := at.n.Load()
	if found == 0 || at.check.Load() != h^found {
		return 0, false
	}
	return int64(found), !last || at.check.CompareAndSwap(h^found, 0)
}

// Unapplied returns the id of the decision for a request that goes on, or ended,
// without it, by the id that Envoy gave the request. False where it is not known, and
// after it was asked for a last time.
func (s *Service) Unapplied(requestID string, last bool) (decision string, ok bool) {
	if requestID == "" {
		return "", false
	}
	n, ok := s.unapplied.find(requestID, last)
	if !ok {
		return "", false
	}
	return ID{n, s.o.IDs.shard}.String(), true
}
