package ratelimit

import (
	"context"
	"sync"
	"time"
)

// queue has the server told of a client's account, once for all that is there when its
// turn comes, or asked about it.
func (m *Redis) queue(k *key, look bool) {
	e, s := m.seen.held(k)
	if e == nil {
		return
	}
	defer s.mu.RUnlock()
	if e.account.queue(look) {
		m.enqueue(k, e.account)
	}
}

func (m *Redis) enqueue(k *key, a *account) {
	select {
	case m.tells <- *k:
	default:
		m.counts.unheard.Add(1)
		a.unqueue()
	}
}

// tellAll tells the server, beside the questions and whether or not it answers those in
// time, what this replica admitted alone, until ctx ends.
func (m *Redis) tellAll(ctx context.Context, l *link) {
	m.reached.Store(true)
	defer m.reached.Store(false)
	var telling sync.WaitGroup
	defer telling.Wait()
	slots := make(chan struct{}, maxTelling)
	for {
		select {
		case <-ctx.Done():
			return
		case slots <- struct{}{}:
		}
		select {
		case <-ctx.Done():
			return
		case k := <-m.tells:
			telling.Go(func() {
				defer func() { <-slots }()
				m.tell(ctx, l, &k)
			})
		}
	}
}

// tell puts a question that admits nothing: it states what the account holds, and its
// answer says what all have used. One at a time for each account.
func (m *Redis) tell(ctx context.Context, l *link, k *key) {
	c := claimTelling(*k, m.own.unix(time.Now()), m.ahead.Load())
	e, s := m.seen.held(k)
	if e == nil {
		return
	}
	a := e.account
	due := a.due(k.at(c.now))
	s.mu.RUnlock()
	if !due {
		return
	}
	q := m.question(c)
	limited, cancel := context.WithTimeout(ctx, tellLimit)
	defer cancel()
	ans, err := q.ask(limited, l.client)
	if err != nil {
		m.counts.untold.Add(1)
		q.end(nil)
	} else {
		m.counts.told.Add(1)
		m.hear(c, &ans, m.own.unix(time.Now()))
		q.end(&ans)
	}
	if err != nil || q.apart {
		sleep(ctx, firstRetry)
	}
	m.enqueue(k, a) // for what came meanwhile
}

// claimTelling is what is asked of a server whose clock is ahead, both in ns, by somebody
// who wants nothing: limits of -1 refuse even that.
func claimTelling(k key, here, ahead int64) *claim {
	return &claim{
		key: k, here: here, now: here + ahead,
		b: budgets{requests: budget{limit: -1, window: k.requests}, tokens: budget{limit: -1, window: k.tokens}},
	}
}
