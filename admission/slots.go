package admission

import (
	"cmp"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// slots are the times at which an account's refused requests may come back.
//
// The line is for those that have less than half of their share of the pool: an account
// has freeSlots in it, or one more than its share where that is less, and fewer after it
// came back too early. Its further requests, and those of an account that has half of its
// share or is alone, wait in a queue of its own, in which slots come when places of its
// share probably end; see ends. So an account pushes the others out by freeSlots slots at
// most.
//
// Who comes back before its time goes behind the account's last slot, ownPace times as
// far as slots of the line are apart, and the farther the oftener that was.
type slots struct {
	// due are the earliest slots that are outstanding, in order; later is how many
	// more there are, none before laterFrom. Where none is due, none is later.
	due       []slot
	later     int
	laterFrom time.Duration
	vague     int           // of due are guesses
	last      time.Duration // the latest of all, before its jitter; 0 without any
	// shared is how many of all are of a level's line, laterShared how many of
	// later; so are of and laterOf, by level.
	shared, laterShared int
	of, laterOf         [fleet.BurstLevels]int32

	early    float64 // returns before their time, of late
	earlyAt  time.Duration
	timely   float64 // returns in their slots, of late
	timelyAt time.Duration
	// lent is how many requests may come that have no slot, the last by lentAt.
	lent   int
	lentAt time.Duration
	// lastFirm is the latest firm slot.
	lastFirm time.Duration
}

// slot is a time to come back.
type slot struct {
	at     time.Duration
	shared bool // of the level's line
	firm   bool // of a request that came in vain before
	last   bool // of one that will hardly come: its SDK has tried it as often as it does
	vague  bool // its time is a guess, see recall
	level  fleet.BurstLevel
}

const (
	// freeSlots is how many requests of one client may wait in the level's line,
	// however long that is: as many as a program with a small pool of connections
	// has open at once.
	freeSlots = 8
	// ownPace is how much further apart slots are of those that come too early.
	ownPace = 4
	// grace is how long after its slot a place is held for a client: a round trip
	// over a continent, and what a busy client is late.
	grace = 250 * time.Millisecond
	// earlyOver is the time constant with which an early return is forgiven.
	earlyOver = 10 * time.Second
	// keptSlots bounds slots.due. Of more slots the times are not known exactly.
	keptSlots = 2048
)

// n is how many slots are outstanding.
func (s *slots) n() int { return len(s.due) + s.later }

// first is the earliest outstanding slot; there must be one.
func (s *slots) first() time.Duration { return s.due[0].at }

// arrive notes that a request came, and reports whether it is one that was told
// to come later, and whether it came in a slot: used is true where that one is
// outstanding no more since then.
//
// A first try that is not known for one uses a slot that is due: callers that don't
// say that they return look like it. Where others of the client do say so, it may
// have been another request, and the one with the slot is still to come: it isn't
// early, though the next slot is later.
//
// inLine is true where the slot that was used was one of the line.
func (s *slots) arrive(now time.Duration, retry int, counts bool) (early, due, used, inLine bool) {
	switch {
	case counts && retry == 0:
		return false, false, false, false
	case s.n() > 0 && now >= s.first():
		_, inLine = s.use()
		if retry == 0 {
			s.lend(now, now)
		} else {
			s.timely, s.timelyAt = s.timeliness(now)+1, now
		}
		return false, true, true, inLine
	case retry == 0:
		return false, false, false, false // it may well be another request
	case s.n() > 0 && s.unsure():
		_, inLine = s.use()
		return false, false, true, inLine
	case s.owed(now):
		s.lent--
		return false, true, false, false
	case s.n() == 0:
		return false, false, false, false
	}
	s.early, s.earlyAt = s.earliness(now)+1, now
	return true, false, false, false
}

// lend notes that a request may come by then that has no slot: it was used by one that
// may not be the one it was given to, or a server sent the request away.
func (s *slots) lend(now, by time.Duration) {
	if !s.owed(now) {
		s.lent = 0
	}
	s.lent, s.lentAt = min(s.lent+1, keptSlots), max(s.lentAt, by)
}

// owed reports whether one with a slot that was lent may still come.
func (s *slots) owed(now time.Duration) bool { return s.lent > 0 && now <= s.lentAt+abandoned }

// expects reports whether requests may still come that were told to.
func (s *slots) expects(now time.Duration) bool { return s.n() > 0 || s.owed(now) }

// premature reports whether a request that says how often it was tried before
// comes earlier than it was told.
func (s *slots) premature(now time.Duration, retry int) bool {
	return retry > 0 && s.n() > 0 && now < s.first() && !s.unsure() && !s.owed(now)
}

// unsure reports whether some slots' times are not known exactly: then nobody is known
// to come too early.
func (s *slots) unsure() bool { return s.later > 0 || s.vague > 0 }

// use takes the earliest slot away, and returns its level, and whether it was one of
// the line.
func (s *slots) use() (of fleet.BurstLevel, inLine bool) {
	of, inLine = s.due[0].level, s.due[0].shared
	if inLine {
		s.shared--
	}
	s.of[of]--
	if s.due[0].vague {
		s.vague--
	}
	s.due = slices.Delete(s.due, 0, 1)
	switch {
	case len(s.due) > 0:
	case s.later > 0:
		s.recall()
	default:
		s.last = 0 // nobody waits for it any more
	}
	return of, inLine
}

// recall makes slots of the number of later ones, as if they were evenly spread,
// those of the line first.
func (s *slots) recall() {
	step := max(0, s.last-s.laterFrom) / time.Duration(max(1, s.later-1))
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
		s.due = append(s.due, slot{at: s.laterFrom, shared: shared, level: level, vague: true})
		s.vague++
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
	s.due = slices.Insert(s.due, s.from(n.at), n)
	if len(s.due) > keptSlots {
		s.laterFrom = s.due[keptSlots].at
		if s.due[keptSlots].vague {
			s.vague--
		}
		s.postpone(s.due[keptSlots])
		s.due = s.due[:keptSlots]
	}
}

// from is the index of the first slot in due that is not before a time.
func (s *slots) from(at time.Duration) int {
	i, _ := slices.BinarySearchFunc(s.due, at, func(o slot, t time.Duration) int { return cmp.Compare(o.at, t) })
	return i
}

// drop takes the latest slot of a level away, if there is one.
func (s *slots) drop(level fleet.BurstLevel) {
	if s.of[level] == 0 {
		return
	}
	s.of[level]--
	if s.laterOf[level] > 0 {
		s.later--
		s.laterOf[level]--
		if s.laterShared > s.later {
			s.laterShared--
			s.shared--
		}
		return
	}
	i := len(s.due) - 1
	for s.due[i].level != level {
		i--
	}
	if s.due[i].shared {
		s.shared--
	}
	if s.due[i].vague {
		s.vague--
	}
	if s.due = slices.Delete(s.due, i, i+1); len(s.due) == 0 && s.later > 0 {
		s.recall()
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

// timeliness is how many returns came in their slots, of late.
func (s *slots) timeliness(now time.Duration) float64 {
	if s.timely == 0 {
		return 0
	}
	return s.timely * decay(now-s.timelyAt, earlyOver)
}

// turn is a request that is sent away, as far as its slot goes by it.
type turn struct {
	asked time.Duration // when it came
	now   time.Duration // from when on there may be slots
	// patience is how long after now its slot may be.
	patience time.Duration
	line     *line
	tail     *tail // of the line, or of all levels together
	level    fleet.BurstLevel
	early    bool          // it came before its time
	last     bool          // it will not come again
	alone    bool          // nobody else uses the pool
	quick    bool          // its account's requests are in flight for far shorter than its level's
	most     int           // slots that its account may have in the line
	drawn    bool          // a slot of its client's queue is drawn
	live     int           // requests that its account has in flight …
	below    bool          // … which is less than its share
	first    time.Duration // no place for it becomes free before; 0 is unknown
	// cold is how long an answer may well take while none has ended, else 0.
	cold time.Duration
	// each is the time between two ends of the account's share, takes how long one
	// takes, and queued how long the queue of the client's requests is.
	each, takes, queued time.Duration
	course              course  // of those places; of a request that came in vain
	share               float64 // of the pool's places
	seed                uint64
}

// give returns the slot of a request that is sent away, or false where that
// would be later than patience allows: then none is taken.
func (s *slots) give(t *turn) (time.Duration, bool) {
	spacing := time.Duration(t.line.spacing.Load())
	if t.alone {
		spacing = time.Duration(t.line.solo.Load())
	}
	if t.early {
		return s.giveLast(t, ownPace*spacing)
	}
	if s.inLine(t) {
		spacing = t.line.apartAt(time.Duration(t.tail.at.Load()) - t.now)
		at, ok := t.tail.next(max(t.now+retryFloor, t.first), t.now+t.patience, spacing)
		if ok {
			return s.keep(t, at, true, spacing), true
		}
		if t.live == 0 { // nothing of its own ends, after which it could come
			return at, false
		}
	}
	return s.queue(t)
}

// inLine reports whether a request may have a slot of the line. That goes by ends that others
// may have: who ends faster has its own as well, in its queue.
func (s *slots) inLine(t *turn) bool {
	return !t.alone && !(t.quick && t.live > 0) && t.below && 2*float64(t.live) < t.share && s.shared < s.free(s.earliness(t.now), t.most)
}

// giveLast gives a slot behind the account's last to a request that came too early,
// instead of one that it has.
func (s *slots) giveLast(t *turn, pace time.Duration) (time.Duration, bool) {
	at := max(t.now+retryFloor, s.last) + span(float64(pace)*(1+s.earliness(t.now)))
	if at > t.now+t.patience {
		return at, false
	}
	s.drop(t.level)
	return s.keep(t, at, false, pace), true
}

// free is how many slots of the line the account may have.
func (s *slots) free(earliness float64, most int) int {
	return max(1, min(most, freeSlots>>int(min(earliness, freeSlots))))
}

// keep takes a slot, and returns when it is, with its jitter: by that it is no later than
// the caller waits.
func (s *slots) keep(t *turn, at time.Duration, shared bool, spacing time.Duration) time.Duration {
	last := max(s.last, at) // without jitter, or slots behind it would drift apart
	at += spread(t.seed, min((at-t.asked)/4, spacing, t.now+t.patience-at))
	s.add(slot{at: at, shared: shared, last: t.last, level: t.level})
	s.last = last
	return at
}

// lapse forgets the slots whose clients did not come, and tells of each the level, and
// whether it was one of the line.
func (s *slots) lapse(now time.Duration, gone func(of fleet.BurstLevel, inLine bool)) {
	for s.n() > 0 && now > s.first()+abandoned {
		gone(s.use())
	}
}

// coming is how many requests are expected at slots that are due until then, in
// thousandths, of most at most. Slots count by the share of those that come of
// their levels.
func (s *slots) coming(now, until time.Duration, p *pool, most int64) int64 {
	sum, n := 0.0, int64(0)
	for _, o := range s.due {
		if o.at > until || n == most {
			break
		}
		if o.at+grace >= now {
			sum += p.levels[o.level].line.returning
			n++
		}
	}
	return int64(1000 * sum)
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
