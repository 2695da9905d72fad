package serve

import (
	"context"
	"log/slog"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/admission/ratelimit"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// limiter is an admission.Limiter with what runs beside it.
type limiter interface {
	admission.Limiter
	Run(ctx context.Context) error
}

// newLimiter counts in the process, or in Redis where the config names one. A
// change of serve.redis takes a restart, like all of serve.
func newLimiter(cfg *fleet.Config, log *slog.Logger) limiter {
	return embedded{ratelimit.NewEmbedded()}
}

// embedded needs nothing to run beside it.
type embedded struct{ *ratelimit.Embedded }

func (embedded) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
