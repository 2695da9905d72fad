package serve

import (
	"context"
	"sync/atomic"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// histogram counts durations in buckets, without labels. It stands for an
// OpenTelemetry histogram where every request passes: a record is two atomic adds,
// a fraction of what it costs there (BenchmarkHistogram). The exporter gets it
// through histograms.
type histogram struct {
	name, description string
	bounds            []time.Duration // upper, inclusive, ascending
	counts            []atomic.Uint64 // one more than bounds
	nanos             atomic.Int64
}

func newHistogram(name, description string, bounds ...time.Duration) *histogram {
	return &histogram{name: name, description: description, bounds: bounds, counts: make([]atomic.Uint64, len(bounds)+1)}
}

// record counts a duration; one below 0 as 0.
func (h *histogram) record(d time.Duration) {
	d = max(d, 0)
	i := 0
	for i < len(h.bounds) && d > h.bounds[i] {
		i++
	}
	h.counts[i].Add(1)
	h.nanos.Add(int64(d))
}

// point is what was counted since began. The buckets are read one after the
// other: a record that comes meanwhile may be in the sum alone.
func (h *histogram) point(began, now time.Time) metricdata.HistogramDataPoint[float64] {
	p := metricdata.HistogramDataPoint[float64]{StartTime: began, Time: now}
	for i := range h.counts {
		n := h.counts[i].Load()
		p.BucketCounts = append(p.BucketCounts, n)
		p.Count += n
	}
	for _, b := range h.bounds {
		p.Bounds = append(p.Bounds, b.Seconds())
	}
	p.Sum = time.Duration(h.nanos.Load()).Seconds()
	return p
}

// histograms hands them to a reader of OpenTelemetry metrics.
type histograms struct {
	began time.Time
	all   []*histogram
}

var _ sdkmetric.Producer = (*histograms)(nil)

// Produce returns all of them; it never fails.
func (h *histograms) Produce(context.Context) ([]metricdata.ScopeMetrics, error) {
	var out metricdata.ScopeMetrics
	out.Scope.Name = scopeName
	now := time.Now()
	for _, one := range h.all {
		out.Metrics = append(out.Metrics, metricdata.Metrics{
			Name: one.name, Description: one.description, Unit: "s",
			Data: metricdata.Histogram[float64]{
				Temporality: metricdata.CumulativeTemporality,
				DataPoints:  []metricdata.HistogramDataPoint[float64]{one.point(h.began, now)},
			},
		})
	}
	return []metricdata.ScopeMetrics{out}, nil
}
