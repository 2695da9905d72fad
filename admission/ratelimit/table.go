package ratelimit

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
)

// Bounds of a table.
const (
	maxClients = 65_536
	shards     = 32
)

// key names an entry. The windows are part of it: a limit whose windows change
// counts anew, and one whose amounts change goes on counting.
type key struct {
	limit            string
	client           admission.Client
	requests, tokens time.Duration // 0: not limited
}

// entry is what one client has used of one limit.
type entry struct{ requests, tokens counter }

// windows of a key at one moment, by their numbers; 0 where not limited.
type windows struct{ requests, tokens int64 }

func (k *key) at(now int64) (w windows) {
	if k.requests > 0 {
		w.requests = number(now, k.requests)
	}
	if k.tokens > 0 {
		w.tokens = number(now, k.tokens)
	}
	return w
}

func (e *entry) outgrown(w windows) bool {
	return e.requests.outgrown(w.requests) || e.tokens.outgrown(w.tokens)
}

// over says that nothing the entry holds counts any more.
func (e *entry) over(k *key, w windows) bool {
	return (k.requests == 0 || e.requests.window() < w.requests) &&
		(k.tokens == 0 || e.tokens.window() < w.tokens)
}

// table holds the entries of a bounded number of clients.
//
// When a shard has no room, entries whose windows are over make some; if none is,
// the client shares one entry per limit and shard with all others that find no
// room, until that entry's window is over. The shared entries are as many as the
// config has limits, per shard.
type table struct {
	seed   maphash.Seed // so that nobody can choose which clients meet in a shard
	room   int          // clients in a shard
	shards [shards]shard
}

type shard struct {
	mu      sync.RWMutex
	clients map[key]*entry
	shared  map[key]*entry // the client in the key is zero
	// swept is the latest time at which entries that were over were dropped. The
	// shard's time never goes back behind it: a dropped window is not begun anew.
	// In ns since the Unix epoch; nobody counts before that.
	swept int64
	_     [64]byte // shards don't share a cache line
}

func newTable(clients int) *table {
	t := &table{seed: maphash.MakeSeed(), room: max(clients/shards, 1)}
	for i := range t.shards {
		t.shards[i].clients = map[key]*entry{}
		t.shards[i].shared = map[key]*entry{}
	}
	return t
}

func (t *table) shard(k *key) *shard {
	return &t.shards[maphash.Bytes(t.seed, k.client[:])%shards]
}

// hold returns the entry of k and the time that counts for it, with the shard
// read-locked: an entry is never dropped while somebody counts in it.
func (t *table) hold(k *key, now int64) (*entry, *shard, int64) {
	s := t.shard(k)
	for {
		s.mu.RLock()
		at := max(now, s.swept)
		if e := s.find(k); e != nil && !e.outgrown(k.at(at)) {
			return e, s, at
		}
		s.mu.RUnlock()
		s.mu.Lock()
		s.place(k, max(now, s.swept), t.room)
		s.mu.Unlock()
	}
}

// held is hold for an entry that must exist already; nil if it does not, and
// then nothing is locked.
func (t *table) held(k *key) (*entry, *shard) {
	s := t.shard(k)
	s.mu.RLock()
	if e := s.find(k); e != nil {
		return e, s
	}
	s.mu.RUnlock()
	return nil, nil
}

func (s *shard) find(k *key) *entry {
	if e := s.clients[*k]; e != nil {
		return e
	}
	if len(s.shared) == 0 {
		return nil
	}
	return s.shared[k.anyone()]
}

func (k *key) anyone() key {
	shared := *k
	shared.client = admission.Client{}
	return shared
}

// place makes sure that find finds an entry of k with room for its numbers.
func (s *shard) place(k *key, now int64, room int) {
	w := k.at(now)
	if e := s.clients[*k]; e != nil {
		s.clients[*k] = e.current(w)
		return
	}
	shared := k.anyone()
	if e := s.shared[shared]; e != nil {
		if !e.over(&shared, w) {
			s.shared[shared] = e.current(w)
			return
		}
		delete(s.shared, shared)
	}
	if len(s.clients) >= room {
		s.sweep(now)
	}
	if len(s.clients) < room {
		s.clients[*k] = fresh(w)
	} else {
		s.shared[shared] = fresh(w)
	}
}

// sweep drops what is over, at most once a second: no window is shorter.
func (s *shard) sweep(now int64) {
	if now-s.swept < int64(time.Second) {
		return
	}
	s.swept = now
	for _, m := range []map[key]*entry{s.clients, s.shared} {
		for k, e := range m {
			if e.over(&k, k.at(now)) {
				delete(m, k)
			}
		}
	}
}

func fresh(w windows) *entry {
	e := &entry{}
	e.requests.first, e.tokens.first = w.requests, w.tokens
	return e
}

// current is the entry, or a copy whose numbers begin at w if it is outgrown.
// The shard must be locked.
func (e *entry) current(w windows) *entry {
	if !e.outgrown(w) {
		return e
	}
	c := &entry{}
	for _, kind := range []struct {
		from, to *counter
		n        int64
	}{{&e.requests, &c.requests, w.requests}, {&e.tokens, &c.tokens, w.tokens}} {
		first, word := kind.from.moved(kind.n)
		kind.to.first = first
		kind.to.word.Store(word)
	}
	return c
}
