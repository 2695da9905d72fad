package serve

import (
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
	// mostBegun bounds the attempts that are waited for so long, mostOfOne those of a client,
	// which may change its credential with each; begunFor is for how long, then Envoy's
	// heartbeat tells, or its log is away.
	mostBegun = 8
	mostOfOne = 2
	begunFor  = 20 * time.Second
	// mostRepeated clients that were known to be limited show that all are, if nobody was
	// taken of late.
	mostRepeated = 16
	// takenLately is for how long a request that a server took shows that not all are
	// limited, and that it takes its client, unless it told that one to stay away as lately.
	// It is longer than others are kept out by two that are told so.
	takenLately = 5 * time.Second
)

// callers is what is known of the clients of a server: which ones it takes, and which ones
// it told to stay away. Clients are credentials here, since these are what providers limit.
type callers struct {
	taken clients
	// served are who had them, by what admission tells clients apart by.
	served clients
	// begun are attempts that may be taken, of clients that are told apart.
	begun []begun
	// turned are the clients that were told to stay away since one was taken, as far as that
	// was news, and turnedAt is when the first of them was; repeated and repeatedAt are
	// those of whom it was none.
	turned, repeated     []admission.Client
	turnedAt, repeatedAt time.Time
	// round is when who begins shows what the last closing for all did not.
	round time.Time
	// refusedIn is how long its last refusal took.
	refusedIn time.Duration
	// gone is whether it drains, or has left the config.
	gone bool
	// words is what is known of the clients of its pool.
	words *words
}

// begun is an attempt of which nothing was told but that it began.
type begun struct {
	id string
	of admission.Asker
	at time.Time
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

// beside is what is known of the others of a server's pool that are in service.
type beside struct {
	n      int
	opens  time.Time // the first of them; not after now if one is open
	turned int       // the most clients that one told to stay away since it took one
}

// closes is what a 429 closes, of a server beside others of its pool. A server that sheds
// load does so for as long as it says. But providers limit each key for itself, and a 429
// may be for the asker alone. Of a pool's only server that one is kept out of the pool for
// the time that it was told; others are for two seconds if another one was told so too
// since somebody was taken, for four if a third was after that, and so on, and for twice
// that while nobody knows that the server takes others. Who was told so before others were
// taken, and is told so again, is no news, and kept out alone, unless many are.
//
// One server of several may shed load for itself, and the others take whom it sent away: it
// is closed as long as it says, but where it takes other clients for two seconds by the
// first that is told so, and so on. A client that half of them tell so, or that one tells so
// again and none takes, is limited, as by a pool's only server. So is one whose refusal
// closes the last server of an idle pool: that one counts as the only one, and shows for all
// whether the pool takes others. Where it does, those that were closed before are asked too.
//
// A credential that no server of the pool ever took may be made up, another one with each
// request. Where others are taken of late it shows nothing of them, and closes nothing.
func (c *callers) closes(o *fleet.Outcome, asker admission.Client, by beside) closing {
	told := toldBy(o)
	c.take(o.At)
	if asker == (admission.Client{}) {
		if told.all > 2*lone && c.others(o.At) {
			told.all, told.less, told.guessed = 2*lone, 2*lone, true
		}
		return told
	}
	c.refusedIn = o.Duration
	known := c.words.client(asker)
	before := known.word(c)
	again := repeats(o, before, known.began)
	taken := several(&c.taken, asker, o.At)
	alone, until := by.n == 0, o.At.Add(told.all)
	if by.n > 0 {
		alone, until = c.limited(known, asker, o.At, until, by.n)
	}
	shut := !taken && !alone && by.opens.After(o.At)
	if shut {
		alone, until = true, known.sooner(until, o.At)
		c.words.shut = o.At
	}
	n, news := 1, false
	if madeUp := !known.served && c.takesBeside(asker, o.At); !madeUp {
		n, news = c.tell(o, asker, before)
		news = news || !alone && !again
	}
	if shut {
		n = max(n, by.turned)
	}
	known.tell(c, o.At, o.At.Add(told.all))
	out := closing{guessed: true, said: told.said}
	if alone || again && !news {
		out.asker = until.Sub(o.At)
	}
	switch {
	case !taken && alone && n == 1 && c.taken.last == asker && o.At.Sub(c.taken.lastAt) < takenLately:
		// It is the only one that is there, and is kept out already.
	case !taken && alone, news && !alone:
		out.all = lone << n
	case news && n > 1:
		out.all = lone << (n - 1)
	}
	out.less = min(out.all, told.all)
	if out.all >= told.all || !taken && !alone || shut && out.all > 0 && by.opens.Sub(o.At) <= out.all {
		out.all, out.guessed = told.all, told.guessed
	}
	if out.all > 0 {
		c.round = o.At.Add(reopenEarly)
	}
	return out
}

// limited reports whether half of a pool's servers that are in service, two at least, tell
// a client to stay away now that this one does so until then, while they take others, and
// fewer take it; and until when it is to, which is when the first of them wants it again.
func (c *callers) limited(known *clientWords, asker admission.Client, now, until time.Time, others int) (bool, time.Time) {
	if !c.takesBeside(asker, now) {
		return false, until
	}
	tell, take := 1, 0
	for i := range known.by {
		w := &known.by[i]
		switch {
		case w.from == c || w.from.gone:
		case w.tells(now) && w.from.takesBeside(asker, now):
			if tell++; w.until.After(now) {
				until = sooner(until, w.until)
			}
		case now.Sub(w.began) < takenLately:
			take++
		}
	}
	return tell > 1 && 2*tell > others && tell > take, until
}

// repeats reports whether a server told a client to stay away that had come after it was
// told so before and of which no server of the pool, since shortly before that, took a
// request: the last that one did began then.
func repeats(o *fleet.Outcome, before word, began time.Time) bool {
	return !before.at.IsZero() && !o.At.Add(-o.Duration).Before(before.at.Add(reopenEarly)) && !began.After(before.at.Add(-takenLately))
}

// tell notes that a client was told to stay away, as it was before, and returns how many
// were since one was taken, and whether this one shows anything of the others. Who began
// before the last closing was in force shows what that one did. Those that were told so
// before are kept out already; only where hardly anybody else is left to ask do they show
// what the first of them did.
func (c *callers) tell(o *fleet.Outcome, asker admission.Client, before word) (n int, news bool) {
	switch {
	case slices.Contains(c.turned, asker):
		return len(c.turned), len(c.turned) == mostTurned
	case o.At.Sub(before.until) < othersFor && (len(c.turned) == 0 || before.at.Before(c.turnedAt)) && !c.repeat(o, asker):
		return 1, false
	case len(c.turned) == 0:
		c.turned, c.turnedAt = append(c.turned, asker), o.At
	case len(c.turned) < mostTurned && !o.At.Add(-o.Duration).Before(c.round):
		c.turned = append(c.turned, asker)
	}
	return len(c.turned), true
}

// repeat notes a client of whom it is no news that it is told to stay away, and reports
// whether that is news of all, since many were and nobody was taken of late.
func (c *callers) repeat(o *fleet.Outcome, asker admission.Client) (many bool) {
	if len(c.repeated) == 0 {
		c.repeatedAt = o.At
	}
	if !slices.Contains(c.repeated, asker) && len(c.repeated) < mostRepeated {
		c.repeated = append(c.repeated, asker)
	}
	return len(c.repeated) == mostRepeated && o.At.Sub(c.taken.lastAt) >= takenLately
}

// serves takes that a request of a client ended well. That shows that the server took it
// when its answer began; one that began before the first of those who were told shows
// nothing of after.
func (c *callers) serves(o *fleet.Outcome, asker admission.Asker) {
	began := o.At.Add(-o.Duration)
	c.takes(asker, began, began.Add(o.HeaderTime))
	c.words.serves(asker.Credential)
}

// starts takes that an attempt of a client reached the server.
func (c *callers) starts(o *fleet.Outcome, asker admission.Asker) {
	c.take(o.At)
	if asker == (admission.Asker{}) || len(c.begun) == mostBegun {
		return
	}
	ofOne := 0
	for _, b := range c.begun {
		if b.of.Client == asker.Client {
			ofOne++
		}
		if b.of == asker || ofOne == mostOfOne {
			return
		}
	}
	c.begun = append(c.begun, begun{o.ID, asker, o.At})
}

// ends takes that an attempt is over, in whatever way.
func (c *callers) ends(o *fleet.Outcome) {
	c.begun = slices.DeleteFunc(c.begun, func(b begun) bool { return b.id == o.ID })
}

// runs takes that a request of a client was running there.
func (c *callers) runs(o *fleet.Outcome, asker admission.Asker) {
	if o.Duration >= c.surely() {
		c.takes(asker, o.At.Add(-o.Duration), o.At)
		if o.Code > 0 { // its answer has begun
			c.words.serves(asker.Credential)
		}
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
func (c *callers) takes(of admission.Asker, began, at time.Time) {
	c.taken.note(of.Credential, at)
	c.served.note(of.Client, at)
	if began.After(c.turnedAt) {
		c.turned = c.turned[:0]
	}
	if began.After(c.repeatedAt) {
		c.repeated = c.repeated[:0]
	}
	c.words.took(c, of.Credential, began)
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

// takesBeside reports whether the server took another client than one within takenLately.
func (c *callers) takesBeside(one admission.Client, now time.Time) bool {
	return now.Sub(c.taken.besides(one)) < takenLately
}

// several reports whether one is beside others whom the server takes.
func several(taken *clients, one admission.Client, at time.Time) bool {
	return one != (admission.Client{}) && at.Sub(taken.besides(one)) < othersFor
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
