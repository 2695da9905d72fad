package ratelimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
	"unicode"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Run keeps the connection to the server, tells it what was admitted alone and sends
// settlements, until ctx ends. It never gives up and its absence is no error: onError
// says what then counts.
func (m *Redis) Run(ctx context.Context) error {
	away := outage{}
	var l *link // nil: the server does not answer at all
	defer func() {
		if l != nil {
			l.close()
		}
	}()
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		var err error
		if l, err = m.reach(ctx, l); err == nil {
			err = m.inTime(ctx, l)
		}
		if err == nil {
			m.counts.connects.Add(1)
			news := away.over()
			if news {
				m.log.Info("redis counts the limits", "address", m.redis.Address)
			}
			wait = firstRetry
			m.serve(ctx, l, news)
			if e := m.lastError.Load(); e != nil {
				err = *e
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if l != nil && !late(err) {
			l.close()
			l = nil
		}
		m.counts.failures.Add(1)
		if away.news(err, time.Now()) {
			m.log.Warn("redis does not answer; "+withoutIt[m.redis.OnError], "address", m.redis.Address, "error", err)
		}
		if !sleep(ctx, wait*3/4+rand.N(wait/2)) {
			return nil
		}
	}
}

// quiet is the least time between two lines about the server's absence: one that
// comes and goes would fill the log.
const quiet = 10 * time.Second

// outage decides what is logged about the server's absence: its begin, each other
// cause, and its end, where the begin was logged or nothing was yet.
type outage struct {
	at     time.Time // of the last line; zero before the first
	cause  string    // that it named; "" after the end
	silent bool      // it goes on, and no line tells of it
}

// news reports whether an absence for a cause is to be logged.
func (o *outage) news(err error, now time.Time) bool {
	cause := strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) { // ports differ each time
			return -1
		}
		return r
	}, err.Error())
	if cause == o.cause {
		return false
	}
	if !o.at.IsZero() && now.Sub(o.at) < quiet {
		o.silent = o.silent || o.cause == ""
		return false
	}
	o.at, o.cause, o.silent = now, cause, false
	return true
}

// over reports whether the end of an absence is to be logged.
func (o *outage) over() bool {
	said := !o.silent
	o.cause, o.silent = "", false
	return said
}

// withoutIt says what becomes of requests.
var withoutIt = map[fleet.OnError]string{
	fleet.OnErrorLocal:  "limits are counted without it (onError: local)",
	fleet.OnErrorOpen:   "nothing is limited (onError: open)",
	fleet.OnErrorClosed: "limited requests are refused (onError: closed)",
}

// reach returns a link on which the server answers, be it late: the one that is given, if
// it is of use still, or another. What was admitted alone is told by it until it is closed.
func (m *Redis) reach(ctx context.Context, l *link) (*link, error) {
	if l != nil {
		if m.probe(ctx, l, connectLimit) == nil {
			return l, nil
		}
		l.close()
	}
	l, err := open(ctx, &m.redis)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := m.probe(ctx, l, connectLimit); err != nil { // the server loads the script
		l.close()
		return nil, err
	}
	ctx, l.stop = context.WithCancel(ctx)
	l.telling.Go(func() { m.tellAll(ctx, l) })
	return l, nil
}

// inTime says why requests may not use the link: the server must answer within the
// deadline.
func (m *Redis) inTime(ctx context.Context, l *link) error {
	done, err := m.breaker.Allow()
	if err != nil {
		return err
	}
	err = m.explain(m.probe(ctx, l, m.redis.Deadline))
	done(err)
	if err != nil {
		return err
	}
	select {
	case <-m.tripped: // by an earlier probe
	default:
	}
	return nil
}

// probe counts a request of a client that does not exist: a server that answers
// but may not be written to is of no use.
func (m *Redis) probe(ctx context.Context, l *link, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	k := key{limit: "probe", requests: time.Second}
	q := question{b: budgets{requests: budget{limit: maxUsed, window: time.Second}}}
	q.count, q.ledger = k.redisNames(m.owner, false)
	_, err := q.ask(ctx, l.client)
	return err
}

// serve lets requests use the link and sends settlements, until the breaker opens
// or ctx ends. news says that the log was told of the link.
func (m *Redis) serve(ctx context.Context, l *link, news bool) {
	m.link.Store(l)
	defer func() {
		m.link.Store(nil)
		for { // nothing is sent late
			select {
			case <-m.settles:
				m.counts.dropped.Add(1)
			default:
				return
			}
		}
	}()
	if news {
		m.warnOfEviction(ctx, l)
	}
	batch := make([]settlement, 0, settleBatch)
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.tripped:
			return
		case s := <-m.settles:
			batch = append(batch[:0], s)
		}
		for more := true; more && len(batch) < settleBatch; {
			select {
			case s := <-m.settles:
				batch = append(batch, s)
			default:
				more = false
			}
		}
		limited, cancel := context.WithTimeout(ctx, settleLimit)
		taken := settle(limited, l.client, batch)
		cancel()
		m.counts.settled.Add(uint64(taken))
		m.counts.dropped.Add(uint64(len(batch) - taken))
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
