package serve

import (
	"net/http"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

const (
	// othersFor is how long a client that was taken shows that a server takes requests of
	// others than the one that it told to stay away, or that breaks it.
	othersFor = time.Minute
	// lone, doubled for each client after the first, is how long an endpoint counts as full
	// at most that told several; mostTurned are told apart.
	lone       = plainThrottle - reopenEarly
	mostTurned = 3
	// takenAfter is how long an attempt runs that is taken: a refusal is quick. Where the
	// last one was not, twice as long as that.
	takenAfter = 500 * time.Millisecond
	// mostBegun bounds the attempts that are waited for so long; begunFor is for how long,
	// then Envoy's heartbeat tells, or its log is away.
	mostBegun = 8
	begunFor  = 20 * time.Second
	// mostSpent bounds the clients that are known to be told to stay away.
	mostSpent = 64
)

// callers is what is known of the clients of a server: which ones it takes, and which ones
// it told to stay away.
type callers struct {
	taken clients
	// begun are attempts that may be taken, of clients that are told apart.
	begun []begun
	// turned are the clients that were told to stay away since one was taken, as far as that
	// was news, and turnedAt is when the first of them was.
	turned   []admission.Client
	turnedAt time.Time
	// round is when who begins shows what the last closing for all did not.
	round time.Time
	// spent are the clients to which the server said no last.
	spent []spent
	// refusedIn is how long its last refusal took.
	refusedIn time.Duration
}

// begun is an attempt of which nothing was told but that it began.
type begun struct {
	id string
	of admission.Client
	at time.Time
}

// spent is a client that was told to stay away: when, and until when.
type spent struct {
	of        admission.Client
	at, until time.Time
}

// closing is what the end of an attempt closes, and for how long; 0 is nothing.
type closing struct {
	all     time.Duration // the endpoint, for everybody
	guessed bool          // that is a guess
	// less is for how long it closes the endpoint if the server takes other clients, which
	// is not known yet; all if it does not matter.
	less time.Duration
	// said is the time that the server told, 0 if it told none that is believed.
	said  time.Duration
	asker time.Duration // the pool, for who asked
}

// closes is what a refusal closes. A server that sheds load does so for as long as it says.
// But providers limit each key for itself, and a 429 may be for the asker alone. If it can
// only be that (alone), that one is kept out of the pool for the time that it was told;
// others are for two seconds if another one was told so too since somebody was taken, for
// four if a third was after that, and so on: twice as long as long as nobody knows that the
// server takes others.
//
// One server of several may shed load for itself, and the others take whom it sent away: it
// is closed as long as it says, but where it takes other clients for two seconds by the
// first that is told so, and so on. Who was told so before others were taken, and is told
// so again, is no news, and kept out alone.
func (c *callers) closes(o *fleet.Outcome, asker admission.Client, alone bool) closing {
	told := toldBy(o)
	if told.all == 0 || o.Code != http.StatusTooManyRequests || asker == (admission.Client{}) {
		return told
	}
	c.take(o.At)
	n, news := c.tell(o, asker, told.all)
	others := c.several(asker, o.At)
	out := closing{guessed: true, said: told.said}
	if alone || !news {
		out.asker = told.all
	}
	switch {
	case !others && alone, news && !alone:
		out.all = lone << n
	case news && n > 1:
		out.all = lone << (n - 1)
	}
	out.less = min(out.all, told.all)
	if out.all >= told.all || !others && !alone {
		out.all, out.guessed = told.all, told.guessed
	}
	if out.all > 0 {
		c.round = o.At.Add(reopenEarly)
	}
	return out
}

// tell notes that a client was told to stay away for so long, and returns how many were
// since one was taken, and whether this one shows anything of the others. Who began before
// the last closing was in force shows what that one did. Those that were told so before
// are kept out already; only where hardly anybody else is left to ask do they show what
// the first of them did.
func (c *callers) tell(o *fleet.Outcome, asker admission.Client, wait time.Duration) (n int, news bool) {
	c.refusedIn = o.Duration
	again := c.spend(spent{asker, o.At, o.At.Add(wait)})
	switch {
	case slices.Contains(c.turned, asker):
		return len(c.turned), len(c.turned) == mostTurned
	case again:
		return 1, false
	case len(c.turned) == 0:
		c.turned, c.turnedAt = append(c.turned, asker), o.At
	case len(c.turned) < mostTurned && !o.At.Add(-o.Duration).Before(c.round):
		c.turned = append(c.turned, asker)
	}
	return len(c.turned), true
}

// spend notes a client that was told to stay away, and reports whether it was so before the
// last one was taken, and less than othersFor after it might come again. Of too many the
// one is forgotten that may come first.
func (c *callers) spend(s spent) (again bool) {
	soonest := 0
	for i := range c.spent {
		if old := &c.spent[i]; old.of == s.of {
			again = s.at.Sub(old.until) < othersFor && (len(c.turned) == 0 || old.at.Before(c.turnedAt))
			*old = s
			return again
		}
		if c.spent[i].until.Before(c.spent[soonest].until) {
			soonest = i
		}
	}
	if len(c.spent) < mostSpent {
		c.spent = append(c.spent, s)
	} else {
		c.spent[soonest] = s
	}
	return false
}

// toldUntil is until when the server told a client last to stay away, zero if it took it
// since or never did.
func (c *callers) toldUntil(asker admission.Client) time.Time {
	for i := range c.spent {
		if c.spent[i].of == asker {
			return c.spent[i].until
		}
	}
	return time.Time{}
}

// serves takes that a request of a client ended well. That shows that the server took it
// when its answer began; one that began before the first of those who were told shows
// nothing of after.
func (c *callers) serves(o *fleet.Outcome, asker admission.Client) {
	began := o.At.Add(-o.Duration)
	c.takes(asker, began, began.Add(o.HeaderTime))
}

// starts takes that an attempt of a client reached the server.
func (c *callers) starts(o *fleet.Outcome, asker admission.Client) {
	c.take(o.At)
	if asker == (admission.Client{}) || len(c.begun) == mostBegun || slices.ContainsFunc(c.begun, func(b begun) bool { return b.of == asker }) {
		return
	}
	c.begun = append(c.begun, begun{o.ID, asker, o.At})
}

// ends takes that an attempt is over, in whatever way.
func (c *callers) ends(o *fleet.Outcome) {
	c.begun = slices.DeleteFunc(c.begun, func(b begun) bool { return b.id == o.ID })
}

// runs takes that a request of a client was running there.
func (c *callers) runs(o *fleet.Outcome, asker admission.Client) {
	if o.Duration >= c.surely() {
		c.takes(asker, o.At.Add(-o.Duration), o.At)
	}
}

// surely is how long an attempt runs that is taken.
func (c *callers) surely() time.Duration { return max(takenAfter, 2*c.refusedIn) }

// take finds the attempts that were taken by now, since they run that long.
func (c *callers) take(now time.Time) {
	for _, b := range c.begun {
		if ran := now.Sub(b.at); ran >= c.surely() && ran < begunFor {
			c.takes(b.of, b.at, now)
		}
	}
	c.begun = slices.DeleteFunc(c.begun, func(b begun) bool { return now.Sub(b.at) >= min(c.surely(), begunFor) })
}

// takes notes that the server took a request of a client that began then.
func (c *callers) takes(of admission.Client, began, at time.Time) {
	c.taken.note(of, at)
	if began.After(c.turnedAt) {
		c.turned = c.turned[:0]
	}
	c.spent = slices.DeleteFunc(c.spent, func(s spent) bool { return s.of == of && began.After(s.at) })
}

// others reports whether the server takes clients that it didn't tell to stay away since
// then.
func (c *callers) others(at time.Time) bool {
	c.take(at)
	for _, one := range []struct {
		admission.Client
		at time.Time
	}{{c.taken.last, c.taken.lastAt}, {c.taken.other, c.taken.otherAt}} {
		if one.Client != (admission.Client{}) && at.Sub(one.at) < othersFor && !slices.Contains(c.turned, one.Client) {
			return true
		}
	}
	return false
}

// several reports whether a client is one of several that the server takes.
func (c *callers) several(asker admission.Client, at time.Time) bool {
	return asker != (admission.Client{}) && at.Sub(c.taken.besides(asker)) < othersFor
}

// clients are the last two clients that something happened to, and when it did.
type clients struct {
	last, other     admission.Client
	lastAt, otherAt time.Time
}

// note takes what happened to a client. Times may go back: of long answers the begin counts.
func (c *clients) note(of admission.Client, at time.Time) {
	switch {
	case of == admission.Client{}: // unknown
	case of == c.last:
		c.lastAt = later(c.lastAt, at)
	case of == c.other:
		c.otherAt = later(c.otherAt, at)
	case at.After(c.lastAt):
		c.other, c.otherAt, c.last, c.lastAt = c.last, c.lastAt, of, at
	case at.After(c.otherAt):
		c.other, c.otherAt = of, at
	}
	if c.otherAt.After(c.lastAt) {
		c.other, c.otherAt, c.last, c.lastAt = c.last, c.lastAt, c.other, c.otherAt
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func sooner(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// besides is when it happened last to anybody but one client; zero if never.
func (c *clients) besides(one admission.Client) time.Time {
	if c.last != one {
		return c.lastAt
	}
	return c.otherAt
}
