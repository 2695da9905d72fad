package serve

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// gauges are the instruments that show the fleet's state; those whose names
// don't begin with fairlead are names that dashboards of GPU fleets expect.
type gauges struct {
	risk, share, inFlight, age, state, condition, plan metric.Float64ObservableGauge
	allocationMB, allocation, ready                    metric.Float64ObservableGauge
	poolRisk, poolAllocation, ejected, kv, waiting     metric.Float64ObservableGauge
	poolInfo, scaling, limit, closed                   metric.Float64ObservableGauge
	poolLimit, clients, clientShare                    metric.Float64ObservableGauge
	levelInFlight, levelBudget, levelQueue, backlogged metric.Float64ObservableGauge
	all                                                []metric.Observable
}

func newGauges(meter metric.Meter) (*gauges, error) {
	g := &gauges{}
	for _, d := range []struct {
		into                    *metric.Float64ObservableGauge
		name, unit, description string
	}{
		{&g.risk, "fairlead.endpoint.risk", "", "Risk of the endpoint, 0 to 1."},
		{&g.share, "fairlead.endpoint.share", "", "Part of the pool's new requests that the plan sends to the endpoint, 0 to 1."},
		{&g.inFlight, "fairlead.endpoint.in_flight", "{request}", "Attempts running on the endpoint."},
		{&g.age, "fairlead.telemetry.age", "s", "Age of the newest numbers, by source; of the model server only numbers that still move count, and of one that never told any the time since it is waited for."},
		{&g.state, "fairlead.endpoint.state", "", "1 for the state that the endpoint is in."},
		{&g.condition, "fairlead.endpoint.gpu_condition", "", "1 for what the level signals of the endpoint's GPUs say: ok, drain, eject or lost."},
		{&g.kv, "fairlead.endpoint.kv_usage", "", "Share of the KV cache in use, 0 to 1; absent where the server does not tell."},
		{&g.waiting, "fairlead.endpoint.waiting", "{request}", "Requests queued in the model server; absent where it does not tell."},
		{&g.allocation, "fairlead.endpoint.allocation", "", "Memory allocation rate over 1 s, in shares of the KV cache per second."},
		{&g.allocationMB, "gpu_memory_allocation_rate_mb_per_sec", "", "Memory allocation rate over 1 s in MB/s: of the KV cache where the server tells its usage (pools[].kvBytesPerToken given), else of the framebuffer."},
		{&g.ready, "gpu_node_ready", "", "1 when the node has young telemetry, no GPU fault, and its agent, where one is expected, is connected."},
		{&g.poolRisk, "fairlead.pool.risk_5s", "", "Mean risk of the pool over the last 5 s and its deviation; for scaling."},
		{&g.poolAllocation, "fairlead.pool.allocation_5s", "", "Mean allocation rate over the last 5 s in shares of the KV cache per second and its deviation; for scaling."},
		{&g.ejected, "fairlead.pool.ejected", "", "Share of the pool's endpoints that are ejected, 0 to 1."},
		{&g.poolInfo, "fairlead.pool.info", "", "1, with the pool's model and hardware as the config names them."},
		{&g.scaling, "fairlead.endpoint.scaling", "", "Mean and deviation over the last 5 s of kv_usage, waiting and allocation; for scaling."},
		{&g.limit, "fairlead.endpoint.limit", "{request}", "Requests that the endpoint may have in flight."},
		{&g.closed, "fairlead.endpoint.closed", "", "1 while the endpoint told callers to stay away."},
		{&g.poolLimit, "fairlead.pool.limit", "{request}", "Requests that the pool can well have in flight: the endpoints' limits less their risk, changing slowly."},
		{&g.clients, "fairlead.pool.clients", "{client}", "Callers with requests in flight in the pool, or refused there of late."},
		{&g.clientShare, "fairlead.pool.client_share", "{request}", "Requests that an interactive caller of weight 1 may have in flight; a batch caller may have a quarter of that, either times its weight. Absent while there is enough for all."},
		{&g.levelInFlight, "fairlead.level.in_flight", "{request}", "Requests in flight by pool and burst level."},
		{&g.levelBudget, "fairlead.level.budget", "{request}", "What a burst level may have in flight; absent while the pool is not full."},
		{&g.levelQueue, "fairlead.level.queue", "s", "How long a request of the level that comes now would wait for a place of its budget."},
		{&g.backlogged, "fairlead.level.backlogged", "", "1 while the level is at its budget in a full pool."},
		{&g.plan, "fairlead.plan.age", "s", "Time since the plan in force was compiled."},
	} {
		gauge, err := meter.Float64ObservableGauge(d.name, metric.WithUnit(d.unit), metric.WithDescription(d.description))
		if err != nil {
			return nil, err
		}
		*d.into = gauge
		g.all = append(g.all, gauge)
	}
	return g, nil
}

// observeFleet exports what view shows of every endpoint, pool and node.
func observeFleet(meter metric.Meter, view func() admin.Fleet) error {
	g, err := newGauges(meter)
	if err != nil {
		return err
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		f := view()
		if f.Plan != "" {
			o.ObserveFloat64(g.plan, time.Since(f.Compiled).Seconds())
		}
		for i := range f.Pools {
			g.observePool(o, &f.Pools[i])
		}
		for _, n := range f.Nodes {
			o.ObserveFloat64(g.ready, oneIf(n.Ready), metric.WithAttributes(attribute.String("node", n.Name)))
		}
		return nil
	}, g.all...)
	return err
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (g *gauges) observePool(o metric.Observer, p *admin.Pool) {
	o.ObserveFloat64(g.poolInfo, 1, metric.WithAttributes(attribute.String("pool", p.Name),
		attribute.String("model", p.Model), attribute.String("hardware", p.Hardware)))
	ejected := 0
	for i := range p.Endpoints {
		if p.Endpoints[i].State == "ejected" {
			ejected++
		}
		g.observeEndpoint(o, p, &p.Endpoints[i])
	}
	if len(p.Endpoints) > 0 {
		o.ObserveFloat64(g.ejected, float64(ejected)/float64(len(p.Endpoints)), metric.WithAttributes(attribute.String("pool", p.Name)))
	}
	pool := attribute.String("pool", p.Name)
	if len(p.Levels) > 0 {
		o.ObserveFloat64(g.poolLimit, p.Limit, metric.WithAttributes(pool))
		o.ObserveFloat64(g.clients, float64(p.Clients), metric.WithAttributes(pool))
		if p.Share >= 0 {
			o.ObserveFloat64(g.clientShare, p.Share, metric.WithAttributes(pool))
		}
	}
	for _, l := range p.Levels {
		at := metric.WithAttributes(pool, attribute.Int("level", l.Level))
		o.ObserveFloat64(g.levelInFlight, float64(l.InFlight), at)
		if l.Budget >= 0 {
			o.ObserveFloat64(g.levelBudget, l.Budget, at)
		}
		o.ObserveFloat64(g.levelQueue, l.QueueMillis/1000, at)
		o.ObserveFloat64(g.backlogged, oneIf(l.Backlogged), at)
	}
	for _, s := range []struct {
		gauge   metric.Float64ObservableGauge
		summary admin.Summary
	}{{g.poolRisk, p.Risk5s}, {g.poolAllocation, p.Allocation5s}} {
		if s.summary.N == 0 {
			continue
		}
		for kind, v := range map[string]float64{"mean": s.summary.Mean, "deviation": s.summary.Deviation} {
			o.ObserveFloat64(s.gauge, v, metric.WithAttributes(attribute.String("pool", p.Name), attribute.String("kind", kind)))
		}
	}
}

func (g *gauges) observeEndpoint(o metric.Observer, p *admin.Pool, e *admin.Endpoint) {
	labels := []attribute.KeyValue{attribute.String("pool", p.Name), attribute.String("endpoint", e.Name)}
	at := metric.WithAttributes(labels...)
	with := func(key, value string) metric.MeasurementOption {
		return metric.WithAttributes(append(labels[:2:2], attribute.String(key, value))...)
	}
	if e.Known {
		o.ObserveFloat64(g.risk, e.Risk, at)
		if e.KVUsage >= 0 {
			o.ObserveFloat64(g.kv, e.KVUsage, at)
		}
		if e.Waiting >= 0 {
			o.ObserveFloat64(g.waiting, e.Waiting, at)
		}
	}
	o.ObserveFloat64(g.share, e.Share, at)
	o.ObserveFloat64(g.inFlight, float64(e.InFlight), at)
	o.ObserveFloat64(g.limit, float64(e.Limit), at)
	o.ObserveFloat64(g.closed, oneIf(e.Closed), at)
	if e.Allocation >= 0 {
		o.ObserveFloat64(g.allocation, e.Allocation, at)
	}
	if e.AllocationMB >= 0 {
		o.ObserveFloat64(g.allocationMB, e.AllocationMB, at)
	}
	engineAge := e.TelemetryAge
	if engineAge < 0 && e.Awaited > 0 { // one that never spoke must not be silent to alerts too
		engineAge = e.Awaited
	}
	for source, seconds := range map[string]float64{"engine": engineAge, "gpu": e.GPUAge} {
		if seconds >= 0 {
			o.ObserveFloat64(g.age, seconds, with("source", source))
		}
	}
	for signal, s := range map[string]admin.Summary{"kv_usage": e.Scaling.KVUsage, "waiting": e.Scaling.Waiting, "allocation": e.Scaling.Allocation} {
		if s.N == 0 {
			continue
		}
		for kind, v := range map[string]float64{"mean": s.Mean, "deviation": s.Deviation} {
			o.ObserveFloat64(g.scaling, v, metric.WithAttributes(append(labels[:2:2], attribute.String("signal", signal), attribute.String("kind", kind))...))
		}
	}
	o.ObserveFloat64(g.state, 1, with("state", e.State))
	if e.Condition != "" && e.Condition != telemetry.Condition(0).String() {
		o.ObserveFloat64(g.condition, 1, with("condition", e.Condition))
	}
}
