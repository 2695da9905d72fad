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
	if r := cfg.Serve.Redis; r != nil {
		return ratelimit.NewRedis(ratelimit.Options{Redis: *r, Shard: cfg.Serve.Shard, Log: log})
	}
	return embedded{ratelimit.NewEmbedded()}
}

// embedded needs nothing to run beside it.
type embedded struct{ *ratelimit.Embedded }

func (embedded) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// shared are the counters of limits that replicas share; false where this process
// counts alone.
func (s *Server) shared() (ratelimit.Counters, bool) {
	if r, ok := s.limiter.(*ratelimit.Redis); ok {
		return r.Counters(), true
	}
	return s.limiter.(embedded).Counters(), false
}
