package admission

import (
	"net/http"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Apply takes in an outcome from the access log. Outcomes of requests that are
// not in flight here change nothing. It returns the pool that a request was let into
// that runs in another and reached no server of that one: Envoy, which asks servers for
// their health itself, passed it by. Else it returns "".
func (g *Gate) Apply(o fleet.Outcome) (passed string) {
	if o.ID == "" {
		return ""
	}
	switch at := g.since(o.At); o.Kind {
	case fleet.AttemptStarted, fleet.Heartbeat:
		passed = g.renew(&o, at+lease, at)
	case fleet.AttemptEnded:
		// The next attempt or the request's end comes at once; should it be lost,
		// nothing will.
		g.claims.renew(&o, nil, at+unconfirmedLease, at)
	case fleet.RequestEnded:
		g.remember(&o)
		if k, ok := g.claims.take(o.ID); ok {
			k.sight(at)
			good := o.Cause == fleet.CauseOK && o.Code < 400
			if good {
				k.pool.levels[k.level].answers.add(at - k.began)
				g.aways.welcome(&k, &o, at)
			} else {
				g.aways.unask(k.credential, k.pool, k.began, at)
			}
			g.account(&k, &o, at)
			k.finish(at, good)
			k.excuse(&o, at)
		}
	}
	return passed
}

// renew lets a claim last until then, and returns the pool that it was of, if it runs in
// another and passed that by. One that has lapsed counts again: the request ran on unseen.
func (g *Gate) renew(o *fleet.Outcome, until, now time.Duration) (passed string) {
	at := g.settings.Load().pools[o.Endpoint.Pool]
	k, lapsed, moved := g.claims.renew(o, at, until, now)
	switch {
	case moved:
		g.aways.unask(k.credential, k.pool, k.began, now)
		k.move(at)
		if !k.reached {
			passed = k.pool.name
		}
		return passed
	case !lapsed:
		return ""
	case at != nil:
		k.pool = at
	}
	k.client = g.clients.lock(k.key, now)
	k.client.enterAgain(&k)
	k.client.mu.Unlock()
	k.pool.enterAgain(k.level)
	if !g.claims.revive(&k, o, until, now) {
		k.leave()
		k.pool.leave(k.level)
	}
	return ""
}

// move makes a request one of another pool, where it runs: Envoy tried it again there,
// or passed its own pool by. What it takes of its client's limit stays.
func (k *claim) move(to *pool) {
	k.client.mu.Lock()
	from := k.client.account(k.pool, k.class)
	from.live--
	from.ends.drop(k.ends)
	a := k.client.account(to, k.class)
	a.live++
	a.ends.add(k.ends)
	a.stir()
	if a.weight == 0 {
		a.weight = classWeight(k.class)
	}
	k.client.mu.Unlock()
	to.enterAgain(k.level)
	k.pool.leave(k.level)
}

// excuse expects a request again that a server answered so that official SDKs try it
// again, and other callers too: it comes when the answer said, or after some seconds at
// most, and has no slot that it could be too early for.
func (k *claim) excuse(o *fleet.Outcome, at time.Duration) {
	switch {
	case o.Code == http.StatusRequestTimeout, o.Code == http.StatusConflict, o.Code == http.StatusTooManyRequests, o.Code >= 500:
	default:
		return
	}
	c := k.client
	if k.lapsed {
		return // its client is not known any more
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	by := at + k.told(o)
	c.account(k.pool, k.class).slots.lend(at, by)
	if k.limit != "" {
		c.use(k.limit).slots.lend(at, by)
	}
}

// told is within which time a request may come again that a server sent away: 8 s … 60 s.
// Its last attempt's entry says what the caller was told. That comes in another log,
// which may be behind: then it is as long as anybody waits, if the answer is one of those
// that tell.
func (k *claim) told(o *fleet.Outcome) time.Duration {
	switch {
	case k.over >= o.Attempt:
		return min(max(k.after, backoff), retryMax)
	case fleet.TurnsAway(o.Code):
		return retryMax
	}
	return backoff
}

// backoff is how long official SDKs wait at most before they try again, where nothing
// says for how long (openai-go's and anthropic-sdk-go's retryDelay).
const backoff = 8 * time.Second

// account takes in what a request took.
func (g *Gate) account(k *claim, o *fleet.Outcome, at time.Duration) {
	l, reserved := &k.pool.levels[k.level], k.output
	if k.form == formUnread {
		k.measure(o)
	}
	switch used := &o.Usage; {
	case used.Known:
		g.charge(k, k.charged(o))
		k.reserved.told = true
		l.tokens(plausible(used.Input, k.input), plausible(used.Output, max(k.output, k.level.UpperBudget())))
		k.route.usage(k, reserved, o)
	case failed(o):
		g.charge(k, 0)
	case k.form == formUnread:
		g.charge(k, k.input+k.output)
		l.tokens(k.input, k.output)
	case o.Cause == fleet.CauseOK:
		l.tokens(k.input, k.output) // the reservation stands
	case o.ResponseBytes == 0: // its caller left before there was an answer
		g.charge(k, k.input+min(k.output, k.pool.levels[k.level].within(at-k.began)))
	default:
		g.charge(k, k.input+k.route.generated(k.form, o.ResponseBytes, k.output))
	}
}

// charge settles what a request has reserved.
func (g *Gate) charge(k *claim, used fleet.Tokens) {
	k.reserved.back = k.reserved.tokens - used
	g.settle(k.ticket, used)
}

// within is how many tokens a request of the level generates in a time, on average.
func (l *level) within(ran time.Duration) fleet.Tokens {
	return fleet.Tokens(max(0, ran) / time.Duration(l.tokenTime.Load()))
}

// plausible is a number of tokens that a server told, as far as it may move the
// means that limits are learned from: eight times what was expected, and 4,096 at
// least. A prompt that was expected to have four bytes a token has no more than four
// times as many (a token a byte); one absurd number would else make a pool's limit 1
// for hundreds of answers.
func plausible(told, expected fleet.Tokens) fleet.Tokens {
	return min(told, max(8*expected, 4096))
}

// bytesPerToken stands for the length of a token of a prompt: about four
// characters of English text (OpenAI's tokenizer page).
const bytesPerToken = 4

// measure estimates by its length, now that it is known, what a request took
// whose body nobody read: never less than was reserved for it, so that a body that
// cannot be read is no way around a limit.
func (k *claim) measure(o *fleet.Outcome) {
	k.input = max(k.input, fleet.Tokens(o.RequestBytes/bytesPerToken))
	if output, ok := k.route.judge(k.form, o.ResponseBytes); ok {
		k.output = max(k.output, output)
	}
}

// charged is what a request is charged that told what it took. A stream that
// broke off tells its output alone, one that ended in an error may have generated
// more than it told, and one that tells no output at all told something there that
// is no number: nobody is charged less than what is known otherwise.
func (k *claim) charged(o *fleet.Outcome) fleet.Tokens {
	input, output := o.Usage.Input, o.Usage.Output
	if input == 0 { // no prompt has no tokens
		input = k.input
	}
	if o.Usage.Error || output == 0 {
		output = max(output, k.route.generated(k.form, o.ResponseBytes, k.output))
	}
	return input + output
}

// failed reports whether a request was answered with an error, which takes no
// tokens, or not answered at all though its caller stayed.
func failed(o *fleet.Outcome) bool {
	return o.Code >= 400 || o.Code == 0 && o.Cause != fleet.CauseClientGone
}

// NodeGone says that the last log stream of an Envoy has ended. It may go on
// serving unseen: its requests end after 12 s, and after the time that they usually
// take, unless it shows them again.
func (g *Gate) NodeGone(node string) {
	at := g.since(time.Time{}) + nodeGrace
	g.claims.shorten(node, func(c *claim) time.Duration { return max(at, c.blindUntil) })
}

// NodeDead says that an Envoy is gone altogether: its requests end after 0.5 s.
func (g *Gate) NodeDead(node string) {
	at := g.since(time.Time{}) + deadGrace
	g.claims.shorten(node, func(*claim) time.Duration { return at })
}
