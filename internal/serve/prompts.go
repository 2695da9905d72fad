package serve

import (
	"sync/atomic"

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
// an endpoint that prefills some thousand. No prompt of the Azure conversation trace
// is longer than this, but 23 % of the Mooncake conversations are: those count for
// too little until the engine's next numbers show them.
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
