package serve

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/admission/ratelimit"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
)

// scopeName is the instrumentation scope of all metrics.
const scopeName = "github.com/fairlead-proxy/fairlead"

// newDecisions: a decision takes microseconds, and what takes longer than Envoy's
// message timeout of 200 ms is a fault.
func newDecisions() *histogram {
	const us, ms = time.Microsecond, time.Millisecond
	return newHistogram("fairlead.decision", "Time from a request's headers message to its answer.",
		1*us, 2*us, 5*us, 10*us, 20*us, 50*us, 100*us, 200*us, 500*us, 1*ms, 5*ms, 20*ms, 200*ms)
}

func newHeaderTimes() *histogram {
	const ms = time.Millisecond
	return newHistogram("fairlead.attempt.headers",
		"Time from an attempt's start to its response headers, by Envoy's access log. Not the time to the first token.",
		5*ms, 10*ms, 25*ms, 50*ms, 100*ms, 250*ms, 500*ms, 1000*ms, 2000*ms, 4000*ms, 8000*ms, 16_000*ms, 32_000*ms, 64_000*ms)
}

// maxSeries bounds each family of labelled counters; what comes after that is
// counted under "other". Labels are names from the config and enums, so the
// bound is reached only by a config of that size.
const maxSeries = 4096

// requestKey labels a request; all values are config names or enums.
type requestKey struct{ route, pool, strategy, reason string }

// labels is a bounded family of counters that is cheap to add to from many
// goroutines: one read lock and one atomic add.
type labels[K comparable] struct {
	mu    sync.RWMutex
	byKey map[K]*atomic.Int64
	other K
}

func newLabels[K comparable](other K) *labels[K] {
	return &labels[K]{byKey: map[K]*atomic.Int64{other: {}}, other: other}
}

func (l *labels[K]) add(k K, n int64) {
	l.mu.RLock()
	c := l.byKey[k]
	l.mu.RUnlock()
	if c == nil {
		c = l.grow(k)
	}
	c.Add(n)
}

func (l *labels[K]) grow(k K) *atomic.Int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.byKey[k]; c != nil {
		return c
	}
	if len(l.byKey) >= maxSeries {
		return l.byKey[l.other]
	}
	c := new(atomic.Int64)
	l.byKey[k] = c
	return c
}

func (l *labels[K]) each(f func(K, int64)) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for k, c := range l.byKey {
		if n := c.Load(); n != 0 {
			f(k, n)
		}
	}
}

// xdsKey labels what happened on the xDS streams.
type xdsKey struct{ kind, typ string }

// admissionKey labels whether a generating request entered and why, limitKey what
// became of it under a limit.
type (
	admissionKey struct{ route, class, reason string }
	limitKey     struct{ policy, result string }
)

// attemptKey labels an attempt that ended, endKey a request.
type (
	attemptKey struct{ pool, cause string }
	endKey     struct{ code, cause string }
)

// outcome counts what Envoy logged to be over.
func (m *metrics) outcome(o fleet.Outcome) {
	switch o.Kind {
	case fleet.AttemptEnded:
		m.attempts.add(attemptKey{o.Endpoint.Pool, o.Cause.String()}, 1)
		if o.HeaderTime > 0 {
			m.headers.record(o.HeaderTime)
		}
	case fleet.RequestEnded:
		m.ended.add(endKey{codeClass(o.Code), o.Cause.String()}, 1)
		m.withoutDecision(&o)
	}
}

// withoutDecision counts a request that ended and that ext_proc did not decide
// about.
func (m *metrics) withoutDecision(o *fleet.Outcome) {
	switch {
	case accesslog.Decided(o.ID):
	case o.Cause == fleet.CauseLocal && o.Code == http.StatusServiceUnavailable:
		m.undecided.refused.Add(1)
	case o.Cause != fleet.CauseLocal && o.Endpoint.Address.IsValid():
		m.undecided.passed.Add(1)
	}
}

// codeClass is a status as a label: 429 and 503 by themselves, others by class.
func codeClass(code int) string {
	switch {
	case code == http.StatusTooManyRequests, code == http.StatusServiceUnavailable:
		return strconv.Itoa(code)
	case code >= 100 && code <= 599:
		return strconv.Itoa(code/100) + "xx"
	}
	return "none"
}

// answerKey labels a server's 429, 503 or 529 on a route with computed retry
// fields, by where its fields came from.
type answerKey struct{ route, source string }

// levelKey labels requests by burst level.
type levelKey struct{ level, result string }

// admitted counts whether a request entered: by admission, or refused for good
// before that was asked.
func (m *metrics) admitted(e *extproc.Event) {
	reason, result := e.Why(), "refused"
	switch {
	case e.Admission == admission.ReasonAdmitted:
		reason, result = e.Admission.String(), "admitted"
	case e.Action != plan.ActionRefuse:
		return // it generates nothing, or there is no plan
	}
	m.admission.add(admissionKey{e.Route, e.Class.String(), reason}, 1)
	m.levels.add(levelKey{strconv.Itoa(int(e.Level)), result}, 1)
	if e.Held {
		m.held.add(result, 1)
	}
	if e.Limit == "" {
		return
	}
	if e.LimitLocal {
		result += "_local"
	}
	m.limits.add(limitKey{e.Limit, result}, 1)
}

// metrics are the process's OpenTelemetry instruments with their Prometheus
// exporter.
type metrics struct {
	provider *sdkmetric.MeterProvider
	handler  http.Handler
	decision *histogram
	headers  *histogram

	requests  *labels[requestKey]
	budgets   *labels[string]
	admission *labels[admissionKey]
	limits    *labels[limitKey]
	answers   *labels[answerKey]
	levels    *labels[levelKey]
	xds       *labels[xdsKey]
	accessLog *labels[string]
	reloads   *labels[string]
	models    *labels[string]
	attempts  *labels[attemptKey]
	ended     *labels[endKey]
	// held counts requests that waited for a place, by whether they got one.
	held *labels[string]
	// anomalies counts requests that something was wrong with; they go on.
	anomalies *labels[string]
	// undecided counts requests without ext_proc, by what became of them.
	undecided struct{ passed, refused atomic.Int64 }
}

// newMetrics builds the instruments; view gives the state that gauges show,
// scraped the scraper's counts, pushed those of the agents' frames, gate those of
// admission, shared those of limits that replicas share, dropped the ledger's attempts that
// found no room, faulty, modelRefused and pushTLSRefused whether the config, the
// model file or the files of serve.push.tls are ones that were refused.
func newMetrics(view func() admin.Fleet, scraped func() scrape.Counters, pushed func() (push.Counters, uint64), gate func() admission.Counters, shared func() (ratelimit.Counters, bool), dropped func() uint64, faulty, modelRefused, pushTLSRefused func() bool) (*metrics, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewBuildInfoCollector())
	decision, headers := newDecisions(), newHeaderTimes()
	exporter, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithoutScopeInfo(), otelprom.WithoutTargetInfo(),
		otelprom.WithProducer(&histograms{time.Now(), []*histogram{decision, headers}}))
	if err != nil {
		return nil, err
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	m := &metrics{
		provider:  provider,
		handler:   promhttp.HandlerFor(registry, promhttp.HandlerOpts{}),
		decision:  decision,
		headers:   headers,
		requests:  newLabels(requestKey{"other", "other", "other", "other"}),
		budgets:   newLabels("other"),
		admission: newLabels(admissionKey{"other", "other", "other"}),
		limits:    newLabels(limitKey{"other", "other"}),
		answers:   newLabels(answerKey{"other", "other"}),
		levels:    newLabels(levelKey{"other", "other"}),
		xds:       newLabels(xdsKey{"other", "other"}),
		accessLog: newLabels("other"),
		reloads:   newLabels("other"),
		models:    newLabels("other"),
		attempts:  newLabels(attemptKey{"other", "other"}),
		ended:     newLabels(endKey{"other", "other"}),
		anomalies: newLabels("other"),
		held:      newLabels("other"),
	}
	meter := provider.Meter(scopeName)
	if err := m.observeCounters(meter, scraped, pushed, gate, shared, dropped); err != nil {
		return nil, err
	}
	return m, errors.Join(observeFleet(meter, view), observeUsage(meter, gate),
		observeFlag(meter, "fairlead.limiter.away", "1 while the shared count of limits does not answer: each replica does what onError says.", func() bool {
			c, is := shared()
			return is && !c.Up
		}),
		observeFlag(meter, "fairlead.config.refused", "1 while the config file is one that was refused: the last good one is in force.", faulty),
		observeFlag(meter, "fairlead.model.refused", "1 while the model file is one that was refused: the last good model scores.", modelRefused),
		observeFlag(meter, "fairlead.push.tls.refused", "1 while the files of serve.push.tls are ones that can't be used: the last good ones are in use.", pushTLSRefused))
}

func (m *metrics) observeCounters(meter metric.Meter, scraped func() scrape.Counters, pushed func() (push.Counters, uint64), gate func() admission.Counters, shared func() (ratelimit.Counters, bool), dropped func() uint64) error {
	counter := func(name, description string, observe func(metric.Int64Observer)) error {
		_, err := meter.Int64ObservableCounter(name, metric.WithDescription(description),
			metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
				observe(o)
				return nil
			}))
		return err
	}
	single := func(family *labels[string], label string) func(metric.Int64Observer) {
		return func(o metric.Int64Observer) {
			family.each(func(k string, n int64) { o.Observe(n, metric.WithAttributes(attribute.String(label, k))) })
		}
	}
	for _, c := range []struct {
		name, description string
		observe           func(metric.Int64Observer)
	}{
		{"fairlead.requests", "Requests seen by ext_proc, by what was decided and why: how it was steered, or the reason of its 429 or 400.", func(o metric.Int64Observer) {
			m.requests.each(func(k requestKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("route", k.route), attribute.String("pool", k.pool),
					attribute.String("strategy", k.strategy), attribute.String("reason", k.reason)))
			})
		}},
		{"fairlead.attempts", "Attempts that ended, by pool and how.", func(o metric.Int64Observer) {
			m.attempts.each(func(k attemptKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("pool", k.pool), attribute.String("cause", k.cause)))
			})
		}},
		{"fairlead.requests.ended", "Requests that ended, by status and how.", func(o metric.Int64Observer) {
			m.ended.each(func(k endKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("code", k.code), attribute.String("cause", k.cause)))
			})
		}},
		{"fairlead.requests.undecided", "Requests without a decision: ext_proc was dead, or later than its message timeout of 200 ms. Those that passed reached a server, neither steered nor limited; those refused got a 503, as where a route fails closed. What ended while serve itself was dead is not in it: Envoy's http.fairlead.ext_proc.failure_mode_allowed and streams_failed count that.", func(o metric.Int64Observer) {
			// Both from the begin on: a rate needs a value before the first.
			o.Observe(m.undecided.passed.Load(), metric.WithAttributes(attribute.String("result", "passed")))
			o.Observe(m.undecided.refused.Load(), metric.WithAttributes(attribute.String("result", "refused")))
		}},
		{"fairlead.budgets", "Requests by where their output budget came from.", single(m.budgets, "source")},
		{"fairlead.admission.requests", "Generating requests by why they entered or were refused with a 429 or a 400: refusals have the same reasons in fairlead_requests_total. A body that is too large by its content-length asks for nothing: Envoy answers it 413, and it is body_too_large there alone. One that turns out too large as it comes was admitted here. Decisions that Envoy no longer waited for count too (fairlead_requests_undecided_total has what became of those requests).", func(o metric.Int64Observer) {
			m.admission.each(func(k admissionKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("route", k.route), attribute.String("class", k.class), attribute.String("reason", k.reason)))
			})
		}},
		{"fairlead.limit.requests", "Requests under a limit, by its name: admitted, refused, and admitted_local and refused_local while the shared count does not answer.", func(o metric.Int64Observer) {
			m.limits.each(func(k limitKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("policy", k.policy), attribute.String("result", k.result)))
			})
		}},
		{"fairlead.answers.retry_fields", "Answers of 429, 503 and 529 on routes with retryFields: computed, by where their retry fields came from: kept (the server's own), told (its other headers) or given (by load).", func(o metric.Int64Observer) {
			m.answers.each(func(k answerKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("route", k.route), attribute.String("source", k.source)))
			})
		}},
		{"fairlead.level.requests", "Generating requests by burst level, admitted and refused.", func(o metric.Int64Observer) {
			m.levels.each(func(k levelKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("level", k.level), attribute.String("result", k.result)))
			})
		}},
		{"fairlead.usage.tokens", "Tokens of requests whose answers told their usage, by kind: input, cached (a part of input), output, and output_reserved, which is what the callers asked for.", func(o metric.Int64Observer) {
			for _, r := range gate().Routes {
				for kind, n := range map[string]uint64{"input": r.Input, "cached": r.Cached, "output": r.Output, "output_reserved": r.OutputReserved} {
					o.Observe(int64(n), metric.WithAttributes(attribute.String("route", r.Route), attribute.String("kind", kind)))
				}
			}
		}},
		{"fairlead.usage.requests", "Requests whose answers told their usage, by whether their output was of the burst level they were classed in, or of one above or below.", func(o metric.Int64Observer) {
			for _, r := range gate().Routes {
				for level, n := range map[string]uint64{"within": r.Within, "above": r.Above, "below": r.Below} {
					o.Observe(int64(n), metric.WithAttributes(attribute.String("route", r.Route), attribute.String("level", level)))
				}
			}
		}},
		{"fairlead.admission.events", "What happened to the requests that admission follows: tokens reserved and settled, requests that found no room among those followed (table_full), and ones whose end nobody told (expired); counts of limits that clients share who found no room among the 65,536 that are counted apart (limits_shared); and times that a client was looked for that shares its concurrency and its share of pools with others, since 16,384 have requests in flight (clients_shared).", func(o metric.Int64Observer) {
			c := gate()
			limits, _ := shared()
			for kind, n := range map[string]uint64{
				"tokens_reserved": c.TokensReserved, "tokens_settled": c.TokensSettled, "table_full": c.TableFull, "expired": c.Expired,
				"limits_shared": limits.Sharing, "clients_shared": c.ClientsShared,
			} {
				o.Observe(int64(n), metric.WithAttributes(attribute.String("kind", kind)))
			}
		}},
		{"fairlead.limiter.events", "Reservations put to the shared count of limits (calls), their errors and timeouts, those not put because too many waited (busy), those decided without it (local), counts that it had lost (clamps), settlements taken and dropped, times it came back (connects), times it was lost or not reached (failures), and statements of what was admitted without it that it took (told), did not answer (untold) and that found no room (unheard).", func(o metric.Int64Observer) {
			c, is := shared()
			if !is {
				return
			}
			for kind, n := range map[string]uint64{"calls": c.Calls, "errors": c.Errors, "timeouts": c.Timeouts, "busy": c.Busy, "local": c.Local,
				"clamps": c.Clamps, "settled": c.Settled, "dropped": c.Dropped, "connects": c.Connects, "failures": c.Failures,
				"told": c.Told, "untold": c.Untold, "unheard": c.Unheard} {
				o.Observe(int64(n), metric.WithAttributes(attribute.String("kind", kind)))
			}
		}},
		{"fairlead.xds.events", "Pushes, ACKs, NACKs and what else happened on xDS streams.", func(o metric.Int64Observer) {
			m.xds.each(func(k xdsKey, n int64) {
				o.Observe(n, metric.WithAttributes(attribute.String("event", k.kind), attribute.String("type", k.typ)))
			})
		}},
		{"fairlead.accesslog.entries", "Access-log entries received, by kind. A stream that ended may have taken entries with it.", single(m.accessLog, "kind")},
		{"fairlead.config.reloads", "Changes of the config file, by result.", single(m.reloads, "result")},
		{"fairlead.model.reloads", "Changes of the model file, by result.", single(m.models, "result")},
		{"fairlead.requests.held", "Requests that found no place and were held in ext_proc for up to 60 ms, by what became of them.", single(m.held, "result")},
		{"fairlead.request.anomalies", "Requests with an unknown strategy or a temperature or top_k out of range, and ext_proc messages that could not be read; they go on. Also decisions that did not reach their requests (decision_unapplied): the caller had left, or ext_proc was late.", single(m.anomalies, "kind")},
		{"fairlead.ledger.dropped", "Times that an attempt was not counted as in flight because as many ran as the ledger can hold (262,144). No request gets a place under a limit then.", func(o metric.Int64Observer) {
			o.Observe(int64(dropped()))
		}},
		{"fairlead.push.events", "Frames of agents and what became of them: streams and frames refused, frames of nodes that the config does not name, endpoints not taken, values that could not be true, frames that agents dropped.", func(o metric.Int64Observer) {
			c, handshakesFailed := pushed()
			for kind, n := range map[string]uint64{"streams": c.Streams, "streams_refused": c.StreamsRefused, "streams_replaced": c.StreamsReplaced,
				"frames": c.Frames, "frames_refused": c.FramesRefused, "readings": c.Readings, "endpoints_refused": c.Refused,
				"rejected_values": c.Rejected, "handshakes_failed": handshakesFailed, "dropped_by_agents": c.Dropped, "unknown_node_frames": c.UnknownNodes} {
				o.Observe(int64(n), metric.WithAttributes(attribute.String("kind", kind)))
			}
		}},
		{"fairlead.scrape.events", "Metrics pages asked for, failures, lines and numbers that could not be used, GPUs whose numbers stood still, GPUs beyond what a page may hold.", func(o metric.Int64Observer) {
			c := scraped()
			for kind, n := range map[string]uint64{"pages": c.Scrapes, "failures": c.Failures, "bad_lines": c.BadLines, "rejected_numbers": c.Rejected,
				"frozen_gpus": c.Frozen, "dropped_gpus": c.Dropped} {
				o.Observe(int64(n), metric.WithAttributes(attribute.String("kind", kind)))
			}
		}},
	} {
		if err := counter(c.name, c.description, c.observe); err != nil {
			return err
		}
	}
	return nil
}

// observeUsage exports the ratios of what requests asked for and what they took,
// since the start; from the counters any other span can be had.
func observeUsage(meter metric.Meter, gate func() admission.Counters) error {
	var instruments []metric.Observable
	gauge := func(name, description string) (metric.Float64ObservableGauge, error) {
		g, err := meter.Float64ObservableGauge(name, metric.WithDescription(description))
		instruments = append(instruments, g)
		return g, err
	}
	efficiency, err1 := gauge("fairlead.usage.token_efficiency", "Output tokens over the output budgets asked for; above 1 where a default stood for them.")
	hits, err2 := gauge("fairlead.usage.cache_hit_ratio", "Cached prompt tokens over prompt tokens, 0 to 1.")
	compliance, err3 := gauge("fairlead.usage.burst_compliance", "Share of requests whose output was of the burst level they were classed in, 0 to 1.")
	following, err4 := gauge("fairlead.admission.in_flight", "Admitted requests that are followed to their end.")
	clients, err5 := gauge("fairlead.admission.clients", "Callers that are told apart.")
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return err
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		c := gate()
		o.ObserveFloat64(following, float64(c.Claims))
		o.ObserveFloat64(clients, float64(c.Clients))
		for _, r := range c.Routes {
			at := metric.WithAttributes(attribute.String("route", r.Route))
			for _, ratio := range []struct {
				gauge     metric.Float64ObservableGauge
				part, all uint64
			}{{efficiency, r.Output, r.OutputReserved}, {hits, r.Cached, r.Input}, {compliance, r.Within, r.WithUsage}} {
				if ratio.all > 0 {
					o.ObserveFloat64(ratio.gauge, float64(ratio.part)/float64(ratio.all), at)
				}
			}
		}
		return nil
	}, instruments...)
	return err
}

func observeFlag(meter metric.Meter, name, description string, set func() bool) error {
	_, err := meter.Float64ObservableGauge(name, metric.WithDescription(description),
		metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
			o.Observe(oneIf(set()))
			return nil
		}))
	return err
}
