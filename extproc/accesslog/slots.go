package accesslog

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// MaxSlots bounds the endpoints that have a counter of their own.
const MaxSlots = 16_384

// NoSlot is the slot of endpoints beyond MaxSlots. Its count is always 0: such
// an endpoint looks empty, so it is never taken for full.
const NoSlot uint32 = 0

// slotIdle is how long a slot must have been unused and unasked for before it
// may be given to another endpoint. Plans are compiled twenty times a second and ask for
// the slot of each of their endpoints, so no plan in use holds an idle slot.
const slotIdle = 10 * time.Minute

// slots maps endpoints to counters. The counters are read without a lock; the
// map is written under one.
type slots struct {
	live [MaxSlots]atomic.Int32

	mu    sync.Mutex
	byKey map[fleet.EndpointKey]uint32
	used  []slotUse // index: slot; used[NoSlot] stands for nobody
}

type slotUse struct {
	key  fleet.EndpointKey
	last time.Time
}

func newSlots() *slots {
	return &slots{byKey: map[fleet.EndpointKey]uint32{}, used: make([]slotUse, 1)}
}

// of returns the endpoint's slot and creates it if there is room.
func (s *slots) of(key fleet.EndpointKey, now time.Time) uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.find(key, now)
}

// find is of with the lock held.
func (s *slots) find(key fleet.EndpointKey, now time.Time) uint32 {
	if slot, ok := s.byKey[key]; ok {
		s.used[slot].last = now
		return slot
	}
	if len(s.used) < MaxSlots {
		s.used = append(s.used, slotUse{key, now})
		slot := uint32(len(s.used) - 1)
		s.byKey[key] = slot
		return slot
	}
	return s.recycle(key, now)
}

// recycle gives away the slot that has been idle longest, if any is idle.
func (s *slots) recycle(key fleet.EndpointKey, now time.Time) uint32 {
	best := NoSlot
	for slot := uint32(1); slot < uint32(len(s.used)); slot++ {
		use := s.used[slot]
		if s.live[slot].Load() != 0 || now.Sub(use.last) < slotIdle {
			continue
		}
		if best == NoSlot || use.last.Before(s.used[best].last) {
			best = slot
		}
	}
	if best == NoSlot {
		return NoSlot
	}
	delete(s.byKey, s.used[best].key)
	s.used[best] = slotUse{key, now}
	s.byKey[key] = best
	return best
}

// enter counts an attempt on an endpoint and returns the slot it was counted
// in. The count rises under the lock that recycle holds, so a slot with an
// attempt is never given away.
func (s *slots) enter(key fleet.EndpointKey, now time.Time) uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.find(key, now)
	if slot != NoSlot {
		s.live[slot].Add(1)
	}
	return slot
}

// enterBelow is enter, unless the endpoint has limit attempts already; then it
// counts nothing and returns false. A limit of 0 is none. Only leave changes a
// count without the lock, and it lowers it, so the count never passes the limit.
func (s *slots) enterBelow(key fleet.EndpointKey, limit int32, now time.Time) (uint32, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.find(key, now)
	if slot == NoSlot {
		return NoSlot, true
	}
	if limit > 0 && s.live[slot].Load() >= limit {
		return slot, false
	}
	s.live[slot].Add(1)
	return slot, true
}

// leave ends what enter or enterBelow counted.
func (s *slots) leave(slot uint32) {
	if slot != NoSlot {
		s.live[slot].Add(-1)
	}
}

// snapshot lists the endpoints that have attempts in flight.
func (s *slots) snapshot() []InFlight {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []InFlight
	for slot := 1; slot < len(s.used); slot++ {
		if n := s.live[slot].Load(); n > 0 {
			out = append(out, InFlight{Endpoint: s.used[slot].key, Attempts: int(n)})
		}
	}
	return out
}
