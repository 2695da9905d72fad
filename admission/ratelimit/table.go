package ratelimit

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
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
type entry struct {
	requests, tokens counter
	// heard is, in the table of what a server said, what that last said was used of
	// the requests, also to who was refused; requests is then the most that who was
	// admitted was told.
	heard   counter
	account *account // in a table with accounts; else nil
	shared  bool     // by clients that found no room
}

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
	return e.requests.outgrown(w.requests) || e.heard.outgrown(w.requests) || e.tokens.outgrown(w.tokens)
}

// over says that nothing the entry holds counts any more.
func (e *entry) over(k *key, w windows) bool {
	return (k.requests == 0 || max(e.requests.window(), e.heard.window()) < w.requests) &&
		(k.tokens == 0 || e.tokens.window() < w.tokens) &&
		(e.account == nil || e.account.over(k, w))
}

// table holds the entries of a bounded number of clients.
//
// When a shard has no room, entries whose windows are over make some; if none is,
// the client shares one entry per limit and shard with all others that find no
// room, until that entry's window is over. The shared entries are as many as the
// config has limits, per shard.
type table struct {
	seed maphash.Seed // so that nobody can choose which clients meet in a shard
	room int          // clients in a shard
	// accounts: each entry has an account, and stands for a count that replicas share.
	// So clients must meet in the same shards in all of them, and that goes by their
	// hash alone. Who looks for made-up ones that meet in one fills that with a 32nd
	// of the clients that fill all; whom else it holds takes a credential to tell.
	accounts bool
	sharing  atomic.Uint64 // shared entries that were begun
	shards   [shards]shard
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
	if t.accounts {
		return &t.shards[k.place()]
	}
	return &t.shards[maphash.Bytes(t.seed, k.client[:])%shards]
}

// place is the number of the shared count that takes the client in where it finds no
// room, in every replica: 0 … 31.
func (k *key) place() int { return int(k.client[0]) % shards }

// hold returns the entry of k and the time that counts for it, with the shard
// read-locked: an entry is never dropped while somebody counts in it.
func (t *table) hold(k *key, now int64) (*entry, *shard, int64) {
	s := t.shard(k)
	for {
		s.mu.RLock()
		at := max(now, s.swept)
		if e := s.current(k, k.at(at)); e != nil {
			return e, s, at
		}
		s.mu.RUnlock()
		s.mu.Lock()
		s.place(k, max(now, s.swept), t)
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

// current is the entry in which k counts now; nil if one must be placed.
func (s *shard) current(k *key, w windows) *entry {
	e := s.clients[*k]
	if e == nil && len(s.shared) > 0 {
		if e = s.shared[k.anyone()]; e != nil && e.over(k, w) {
			return nil // there may be room by now
		}
	}
	if e == nil || e.outgrown(w) {
		return nil
	}
	return e
}

func (k *key) anyone() key {
	shared := *k
	shared.client = admission.Client{}
	return shared
}

// place makes sure that k has an entry to count in.
func (s *shard) place(k *key, now int64, t *table) {
	w := k.at(now)
	if e := s.clients[*k]; e != nil {
		s.clients[*k] = e.renewed(k, w)
		return
	}
	shared := k.anyone()
	if e := s.shared[shared]; e != nil {
		if !e.over(&shared, w) {
			s.shared[shared] = e.renewed(k, w)
			return
		}
		delete(s.shared, shared)
	}
	if len(s.clients) >= t.room {
		s.sweep(now)
	}
	var e *entry
	if len(s.clients) < t.room {
		e = fresh(k, w, back)
		s.clients[*k] = e
	} else {
		e = fresh(k, w, 0) // it counts from now on
		e.shared = true
		s.shared[shared] = e
		t.sharing.Add(1)
	}
	if t.accounts {
		e.account = newAccount()
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

// back is how far before its making an entry can count: Redis has another clock,
// and this one may go back.
const back = 48 * time.Hour

func fresh(k *key, w windows, back time.Duration) *entry {
	e := &entry{}
	if k.requests > 0 {
		e.requests.first = w.requests - int64(back/k.requests)
		e.heard.first = e.requests.first
	}
	if k.tokens > 0 {
		e.tokens.first = w.tokens - int64(back/k.tokens)
	}
	return e
}

// renewed is the entry, or a fresh one with what still counts if it is outgrown.
// The shard must be locked.
func (e *entry) renewed(k *key, w windows) *entry {
	if !e.outgrown(w) {
		return e
	}
	c := fresh(k, w, back)
	c.account, c.shared = e.account, e.shared
	c.requests.renew(&e.requests, w.requests)
	c.heard.renew(&e.heard, w.requests)
	c.tokens.renew(&e.tokens, w.tokens)
	return c
}
