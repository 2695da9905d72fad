package admission

import (
	"cmp"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// slots are the times at which an account's refused requests may come back.
//
// The level's line is for everybody's first few: an account has freeSlots in it,
// fewer after it came back too early, and more only as long as the line is short.
// Its further requests, and those that came back before their time, queue behind
// the account's own last slot, ownPace times as far apart and the farther the more
// accounts do that. So who hammers waits longer and longer itself, and pushes the
// others out by freeSlots slots and crowd at most.
type slots struct {
	// due are the earliest slots that are outstanding, in order; later is how many
	// more there are, none before laterFrom. Where none is due, none is later.
	due       []slot
	later     int
	laterFrom time.Duration
	last      time.Duration // the latest of all
	// shared is how many of all are of a level's line, laterShared how many of
	// later; so are of and laterOf, by level.
	shared, laterShared int
	of, laterOf         [fleet.BurstLevels]int32

	early   float64 // returns before their time, of late
	earlyAt time.Duration
}

// slot is a time to come back.
type slot struct {
	at     time.Duration
	shared bool // of the level's line
	level  fleet.BurstLevel
}

const (
	// freeSlots is how many requests of one client may wait in the level's line,
	// however long that is: as many as a program with a small pool of connections
	// has open at once.
	freeSlots = 8
	// crowd is how long the line may be for more of them.
	crowd = 500 * time.Millisecond
	// ownPace is how much further apart slots outside the line are. With it all
	// refused clients return at 1¼ of the planned rate.
	ownPace = 4
	// earlyOver is the time constant with which an early return is forgiven.
	earlyOver = 10 * time.Second
	// keptSlots bounds slots.due. Of more slots the times are not known exactly.
	keptSlots = 64
)

// n is how many slots are outstanding.
func (s *slots) n() int { return len(s.due) + s.later }

// own is how many of them are outside the line.
func (s *slots) own() int { return s.n() - s.shared }

// first is the earliest outstanding slot; there must be one.
func (s *slots) first() time.Duration { return s.due[0].at }

// arrive notes that a request came, and reports whether it is one that was told
// to come later.
func (s *slots) arrive(now time.Duration, retry int, l *line) (early bool) {
	switch {
	case s.n() == 0:
		if retry > 0 {
			l.others.Add(1)
		}
		return false
	case now >= s.first():
		s.use()
		l.returned.Add(1)
		return false
	case retry == 0:
		return false // it may well be another request
	}
	s.early, s.earlyAt = s.earliness(now)+1, now
	return true
}

// use takes the earliest slot away.
func (s *slots) use() {
	if s.due[0].shared {
		s.shared--
	}
	s.of[s.due[0].level]--
	s.due = slices.Delete(s.due, 0, 1)
	if len(s.due) == 0 && s.later > 0 {
		s.recall()
	}
}

// recall makes slots of the number of later ones, as if they were evenly spread,
// those of the line first.
func (s *slots) recall() {
	step := (s.last - s.laterFrom) / time.Duration(max(1, s.later-1))
	level := fleet.BurstLevel(0)
	for range min(s.later, keptSlots) {
		shared := s.laterShared > 0
		if shared {
			s.laterShared--
		}
		for s.laterOf[level] == 0 {
			level++
		}
		s.laterOf[level]--
		s.due = append(s.due, slot{s.laterFrom, shared, level})
		s.later--
		s.laterFrom += step
	}
}

// add keeps a slot.
func (s *slots) add(n slot) {
	s.last = max(s.last, n.at)
	if n.shared {
		s.shared++
	}
	s.of[n.level]++
	if s.later > 0 && n.at >= s.laterFrom {
		s.postpone(n)
		return
	}
	at, _ := slices.BinarySearchFunc(s.due, n.at, func(o slot, t time.Duration) int { return cmp.Compare(o.at, t) })
	s.due = slices.Insert(s.due, at, n)
	if len(s.due) > keptSlots {
		s.laterFrom = s.due[keptSlots].at
		s.postpone(s.due[keptSlots])
		s.due = s.due[:keptSlots]
	}
}

// postpone keeps a slot by number alone.
func (s *slots) postpone(n slot) {
	s.later++
	if n.shared {
		s.laterShared++
	}
	s.laterOf[n.level]++
}

func (s *slots) earliness(now time.Duration) float64 {
	if s.early == 0 {
		return 0
	}
	return s.early * decay(now-s.earlyAt, earlyOver)
}

// give returns the slot of a request that is sent away, or false where that
// would be later than patience allows: then none is taken. quota is how many
// requests the account may have in flight, crowding how many accounts queue
// outside the line.
func (s *slots) give(now, patience time.Duration, l *line, of fleet.BurstLevel, quota, crowding int64, early bool) (time.Duration, bool) {
	earliness := s.earliness(now)
	if !early {
		longest := min(patience, crowd)
		if s.shared < max(1, freeSlots>>int(min(earliness, freeSlots))) {
			longest = patience
		}
		if longest == patience || int64(s.shared) < quota {
			at, ok := l.next(now, longest)
			if ok {
				s.add(slot{at, true, of})
				return at, true
			}
			if longest == patience {
				return at, false
			}
		}
	}
	pace := float64(l.spacing.Load()) * ownPace * float64(max(1, crowding)) * (1 + earliness)
	at := max(now+retryFloor, s.last) + time.Duration(min(pace, float64(time.Hour)))
	if at > now+patience {
		return at, false
	}
	s.add(slot{at, false, of})
	return at, true
}

// expire forgets slots whose clients did not come.
func (s *slots) expire(now time.Duration, p *pool) {
	if s.n() == 0 || now <= s.last+abandoned {
		return
	}
	for i, n := range s.of {
		p.levels[i].line.gone.Add(int64(n))
	}
	*s = slots{due: s.due[:0], early: s.early, earlyAt: s.earlyAt}
}

// spread is a jitter of less than most, drawn by a seed. For slots it stays
// below their spacing, so that it parts replicas without crowding slots: with a
// jitter in proportion to the wait, long waits would return in Poisson bunches.
func spread(seed uint64, most time.Duration) time.Duration {
	if most <= 0 {
		return 0
	}
	seed += 0x9e3779b97f4a7c15 // splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
	seed = (seed ^ seed>>30) * 0xbf58476d1ce4e5b9
	seed = (seed ^ seed>>27) * 0x94d049bb133111eb
	seed ^= seed >> 31
	return time.Duration(float64(seed>>11) / (1 << 53) * float64(most))
}
