package serve

import (
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// prompts sums the prompt tokens that the plan has sent to each endpoint, by
// the ledger's slots. Adding is one atomic operation, from any goroutine. What
// Envoy's own balancer sends is not in it: where that went is known only later,
// from the log.
type prompts struct {
	total [accesslog.MaxSlots]atomic.Int64
}

// maxPromptCounted bounds what one request adds. The length is an estimate from
// the body's, and a body may be an image: 2 MB would count as 524,288 tokens, for
// an endpoint that prefills some thousand. Longer prompts than this are under one
// in a thousand in the public conversation traces.
const maxPromptCounted fleet.Tokens = 16_384

func (p *prompts) add(slot uint32, tokens fleet.Tokens) {
	tokens = min(tokens, maxPromptCounted)
	if slot != accesslog.NoSlot && slot < accesslog.MaxSlots && tokens > 0 {
		p.total[slot].Add(int64(tokens))
	}
}

func (p *prompts) of(slot uint32) int64 {
	if slot >= accesslog.MaxSlots {
		return 0
	}
	return p.total[slot].Load()
}

// sentTicks is how many totals are kept: those at the ends of one second's ticks.
const sentTicks = int(time.Second/tickEvery) + 1

// sent keeps, for one endpoint, the total at the end of the last ticks.
type sent struct {
	slot uint32
	ring [sentTicks]struct {
		at    time.Time
		total int64
	}
	n, at int
}

// tick notes the total at now. A slot that was dealt anew begins again.
func (s *sent) tick(now time.Time, slot uint32, total int64) {
	if s.n > 0 && slot != s.slot { // counts of a slot's earlier owner don't matter: only differences do
		*s = sent{}
	}
	s.slot = slot
	s.ring[s.at].at, s.ring[s.at].total = now, total
	s.at = (s.at + 1) % sentTicks
	s.n = min(s.n+1, sentTicks)
}

// since is how many tokens were sent after t, to the resolution of a tick: from
// the newest tick that is not after t on. Where t is before all that is kept it
// is what was sent since the oldest.
func (s *sent) since(t time.Time) float64 {
	if s.n == 0 {
		return 0
	}
	newest := s.ring[(s.at-1+sentTicks)%sentTicks].total
	from := newest
	for i := range s.n {
		e := s.ring[(s.at-1-i+2*sentTicks)%sentTicks]
		from = e.total
		if !e.at.After(t) {
			break
		}
	}
	return float64(max(0, newest-from))
}
