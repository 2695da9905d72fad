package serve

import (
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/xds"
)

// holdEvery is how often the sidecars' own limits are worked out: as often as
// they can be published.
const holdEvery = time.Second

// sidecarHold tells sidecars what each may have in flight to the pools of routes
// with holdAtSidecar. It is owned by the tick loop.
type sidecarHold struct {
	publish *xds.Server
	parts   *admission.Sidecars
	last    time.Time
}

func newSidecarHold(publish *xds.Server) *sidecarHold {
	return &sidecarHold{publish: publish, parts: admission.NewSidecars()}
}

// step divides the pools' limits at now among the sidecars that are connected,
// at most once a second. Groups without a hold are told so too: after a restart
// their sidecars would else keep limits that the config has given up.
func (h *sidecarHold) step(now time.Time, cfg *fleet.Config, pools []admission.PoolState) {
	if now.Sub(h.last) < holdEvery {
		return
	}
	h.last = now
	connected := map[string]int{}
	for _, g := range h.publish.Groups() {
		connected[g.Name] = g.Envoys
	}
	limits := make(map[string]float64, len(pools))
	for _, p := range pools {
		limits[p.Name] = p.Limit
	}
	parts := h.parts.Step(now, func(pool string) float64 { return limits[pool] },
		admission.SidecarGroups(cfg, func(group string) int { return connected[group] }))
	for group, limits := range parts {
		h.publish.SetMaxRequests(group, limits)
	}
}
