package admission

import (
	"time"
)

// slots are the times at which an account's refused requests may come back.
//
// Every request that is sent away takes a slot of the level's line, as long as
// the account has no more of them outstanding than it may have requests in
// flight: more could not be served anyway. Further requests, and those that came
// back before their time, queue behind the account's own last slot, at a quarter
// of the line's rate, divided among all who do that. So whoever hammers waits
// longer and longer itself and takes from the others no more than an honest
// client with as many requests would; and all together return at no more than
// 1¼ of the rate that is free for them.
type slots struct {
	n      int // outstanding
	shared int // of n: from the level's line
	// first and last are the earliest and the latest of them.
	first, last time.Duration
	tail        time.Duration // the last slot behind the account's own
	early       float64       // returns before their time, of late
	earlyAt     time.Duration
}

const (
	// ownPace is how much further apart slots are that do not come from the line.
	ownPace = 4
	// earlyOver is the time constant after which an early return is forgiven.
	earlyOver = 10 * time.Second
)

// arrive notes that a request came, and reports whether it is one that was told
// to come later.
func (s *slots) arrive(now time.Duration, retry int, l *line) (early bool) {
	switch {
	case s.n == 0:
		return false
	case now >= s.first:
		s.used()
		l.returned.Add(1)
		return false
	case retry == 0:
		return false // it may well be another request
	}
	s.early = s.earliness(now) + 1
	s.earlyAt = now
	return true
}

// used takes the first slot away. Those between are taken as evenly spread.
func (s *slots) used() {
	s.n--
	s.shared = max(0, s.shared-1)
	if s.n > 0 {
		s.first += (s.last - s.first) / time.Duration(s.n)
	}
}

func (s *slots) earliness(now time.Duration) float64 {
	if s.early == 0 {
		return 0
	}
	return s.early * decay(now-s.earlyAt, earlyOver)
}

// give returns the slot of a request that is sent away, or false where that
// would be later than patience allows: then none is taken.
func (s *slots) give(now, patience time.Duration, l *line, quota, others int64, early bool) (time.Duration, bool) {
	earliness := s.earliness(now)
	if !early && int64(s.shared) < max(1, quota>>min(int(earliness+0.5), 62)) {
		slot, ok := l.next(now, patience)
		if ok {
			s.shared++
			s.took(slot)
		}
		return slot, ok
	}
	pace := float64(l.spacing.Load()) * ownPace * float64(max(1, others)) * (1 + earliness)
	slot := max(now+retryFloor, s.tail, s.last) + time.Duration(min(pace, float64(time.Hour)))
	if slot > now+patience {
		return slot, false
	}
	s.tail = slot
	if early {
		s.used() // it was told another slot before
	}
	s.took(slot)
	return slot, true
}

func (s *slots) took(slot time.Duration) {
	if s.n == 0 {
		s.first = slot
	}
	s.n++
	s.first, s.last = min(s.first, slot), max(s.last, slot)
}

// expire forgets slots whose clients did not come.
func (s *slots) expire(now time.Duration, l *line) {
	if s.n > 0 && now > s.last+abandoned {
		l.gone.Add(int64(s.n))
		s.n, s.shared = 0, 0
	}
}

// spread is a jitter of less than most, drawn by a seed. It stays below a slot's
// own spacing, so that it parts replicas without crowding slots: with a jitter in
// proportion to the wait, long waits would return in Poisson bunches.
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
