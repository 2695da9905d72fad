package admission

import "time"

// pace is what is known of how long an account's requests are in flight, beside others of
// their levels. A level goes by the output that requests may have, and what they have may be
// far less: one client's end after 0.2 s and another's after 20.
type pace struct {
	// ended counts the account's ends of late, of which the last 1/oneRequest are known; ran
	// is for how long those were in flight, and told for how long those of their levels
	// were that logs told of, in seconds.
	ended, ran, told float64
	// credit is for how many more ends it has had places.
	credit float64
}

const (
	// usualOnes is how many requests an account is taken to have had that were in flight as
	// long as their level's, beside the ones that it has in flight, of which nothing is known
	// yet: those that end first are the short ones.
	usualOnes = 2
	// quickTimes is how many times as often as a level's the requests of an account may end. A
	// choice: who has the level's shorter half is no exception yet.
	quickTimes = 2
	// slowTimes is how many times as long as its level's an account's requests run of which it
	// has no more than its share beside others that wait, also where a place is free. A choice:
	// beside it who waits may find the place taken for that long.
	slowTimes = 2
	// mostCredit is for how many ends an account may have had places before. Where one in
	// twenty of an account's requests is long, as many short ones lie between two of them;
	// and when a pool becomes faster, it is learned by as many ends of each account.
	mostCredit = 32
)

// begin lets an account begin with a part of an end, drawn by a seed: of a thousand that
// end one request each after a tenth of the time, and are forgotten, two hundred ends count,
// as of one that ends a thousand.
func (p *pace) begin(seed uint64) {
	const whole = time.Second
	p.credit = float64(spread(seed, whole)) / float64(whole)
}

// end takes in that a request ended, well or not, that ran for so long, while those of its
// level are expected to for usual and did so for told, and reports whether others may have
// its place. Of an account's ends quickTimes as many count as others would have in its
// places, and the first someEnds good ones: the client that sends tens of short requests a
// second has each place again that these leave, and who was told to come at one of their
// ends would come in vain.
func (p *pace) end(ran, usual, told time.Duration, good bool) bool {
	ran = max(ran, 0)
	p.ended++
	p.ran += ran.Seconds()
	p.told += told.Seconds()
	first := good && p.ended <= someEnds
	if lasts := p.ended * oneRequest; lasts > 1 {
		p.ended /= lasts
		p.ran /= lasts
		p.told /= lasts
	}
	p.credit = min(mostCredit, p.credit+quickTimes*float64(ran)/float64(max(usual, time.Millisecond)))
	switch {
	case first:
		p.credit = max(0, p.credit-1)
	case p.credit < 1:
		return false
	default:
		p.credit--
	}
	return true
}

// takes is how long requests of an account are in flight that has so many now, where those
// of their level are for so long.
func (p *pace) takes(usual time.Duration, live int) time.Duration {
	if p.ended == 0 {
		return usual
	}
	others := usual.Seconds() * float64(max(0, live)+usualOnes)
	return max(1, time.Duration(float64(usual)*(p.ran+others)/(p.told+others)))
}

// alone reports whether nobody else uses the account's pool: then what its level's requests
// take is what its own do.
func (a *account) alone() bool { return a.pool.accounts.Load() <= 1 }

// takes is how long a request of the account is in flight.
func (a *account) takes(l *level) time.Duration {
	usual := time.Duration(max(1, l.expected.Load()))
	if a.alone() {
		return usual
	}
	return a.pace.takes(usual, a.live)
}

// quick reports whether so many more of the account's requests end than of its level's that
// not all of its ends count for others.
func (a *account) quick(l *level) bool {
	return quickTimes*a.takes(l) < time.Duration(l.expected.Load())
}

// takes is how long a request of the client is in flight.
func (c *client) takes(b *bid) time.Duration {
	l := &b.pool.levels[b.ask.Level]
	if a := c.find(b.pool, b.class); a != nil {
		return a.takes(l)
	}
	return time.Duration(max(1, l.expected.Load()))
}

// lingers reports whether requests of the account are in flight for far longer than others
// of their level: by those that ended, or else by half of those that run. Past its share it
// takes no place then that others leave free for a moment, since it would keep it for long.
func (a *account) lingers(b *bid) bool {
	l := &b.pool.levels[b.ask.Level]
	long := slowTimes * time.Duration(l.expected.Load())
	begins := a.ends.at // and l.least after them
	switch {
	case a.alone(), float64(a.live) < b.pool.shareOf(b.weight):
		return false
	case a.pace.ended > 0:
		return a.takes(l) > long
	}
	return len(begins) > 0 && b.now-begins[len(begins)/2] > long
}

// finish ends a claim, of a request that was answered well or not.
func (k *claim) finish(at time.Duration, good bool) {
	l := &k.pool.levels[k.level]
	if k.lapsed {
		l.toldEnds.Add(1)
		return
	}
	usual, told := time.Duration(l.expected.Load()), time.Duration(l.told.Load())
	if told == 0 {
		told = usual
	}
	k.client.mu.Lock()
	a := k.client.account(k.pool, k.class)
	if a.pace.ended == 0 {
		a.pace.begin(uint64(k.began))
	}
	frees := a.pace.end(at-k.began, usual, told, good) || a.alone()
	k.client.leave(k.pool, k.class, k.limit, k.ends, &k.reserved)
	k.client.mu.Unlock()
	if frees {
		l.toldEnds.Add(1)
		k.pool.end(k.level)
	} else {
		k.pool.leave(k.level)
	}
}
