package serve

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

// page is what a scraper sees of a registry.
func page(t *testing.T, r *prometheus.Registry) string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&out, f); err != nil {
			t.Fatal(err)
		}
	}
	return out.String()
}

// measured registers an OpenTelemetry histogram like h.
func measured(t testing.TB, h *histogram) (*prometheus.Registry, metric.Float64Histogram) {
	t.Helper()
	registry := prometheus.NewRegistry()
	exporter, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithoutScopeInfo(), otelprom.WithoutTargetInfo())
	if err != nil {
		t.Fatal(err)
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	t.Cleanup(func() { _ = provider.Shutdown(context.Background()) })
	var bounds []float64
	for _, b := range h.bounds {
		bounds = append(bounds, b.Seconds())
	}
	out, err := provider.Meter(scopeName).Float64Histogram(h.name, metric.WithUnit("s"),
		metric.WithDescription(h.description), metric.WithExplicitBucketBoundaries(bounds...))
	if err != nil {
		t.Fatal(err)
	}
	return registry, out
}

// TestHistogramsShowWhatOpenTelemetrysWould gives both the same durations, bounds
// and their neighbours among them: a scraper must see one page.
func TestHistogramsShowWhatOpenTelemetrysWould(t *testing.T) {
	for _, h := range []*histogram{newDecisions(), newHeaderTimes()} {
		wantFrom, oracle := measured(t, h)
		gotFrom := prometheus.NewRegistry()
		exporter, err := otelprom.New(otelprom.WithRegisterer(gotFrom), otelprom.WithoutScopeInfo(), otelprom.WithoutTargetInfo(),
			otelprom.WithProducer(&histograms{time.Now(), []*histogram{h}}))
		if err != nil {
			t.Fatal(err)
		}
		provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
		t.Cleanup(func() { _ = provider.Shutdown(context.Background()) })

		durations := []time.Duration{0, 1, time.Hour}
		for _, b := range h.bounds {
			durations = append(durations, b-1, b, b+1)
		}
		rng := rand.New(rand.NewPCG(1, 2))
		for range 1000 {
			durations = append(durations, time.Duration(rng.Uint64()>>(24+rng.IntN(40))))
		}
		for _, d := range durations {
			h.record(d)
			oracle.Record(t.Context(), d.Seconds())
		}
		got, want := withoutSum(page(t, gotFrom)), withoutSum(page(t, wantFrom))
		if got != want {
			t.Errorf("a scraper sees\n%s\nwant\n%s", got, want)
		}
		sum := time.Duration(0)
		for _, d := range durations {
			sum += d
		}
		if p := h.point(time.Time{}, time.Time{}); p.Sum != sum.Seconds() || p.Count != uint64(len(durations)) {
			t.Errorf("sum %v of %d, want %v of %d", p.Sum, p.Count, sum.Seconds(), len(durations))
		}
	}
}

// withoutSum drops the line of the sum, which OpenTelemetry adds up in floating
// point.
func withoutSum(page string) string {
	lines := strings.Split(page, "\n")
	return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, "_sum ") }), "\n")
}

func TestHistogramsCountFromManyGoroutines(t *testing.T) {
	h := newDecisions()
	var parts sync.WaitGroup
	for range 8 {
		parts.Go(func() {
			for i := range 1000 {
				h.record(time.Duration(i) * time.Microsecond)
			}
			h.record(-time.Second) // a clock that was set back
		})
	}
	parts.Wait()
	p := h.point(time.Time{}, time.Time{})
	if want := 8 * 999 * 500 * time.Microsecond; p.Count != 8*1001 || p.Sum != want.Seconds() {
		t.Errorf("%d of %v s, want %d of %v", p.Count, p.Sum, 8*1001, want.Seconds())
	}
}

// BenchmarkHistogram is one record, as the product does it and as OpenTelemetry
// would, in turns within one run.
func BenchmarkHistogram(b *testing.B) {
	h := newDecisions()
	_, otel := measured(b, h)
	var took [2]time.Duration
	const each = 1000
	for b.Loop() {
		began := time.Now()
		for i := range each {
			h.record(time.Duration(i) * 100)
		}
		half := time.Now()
		for i := range each {
			otel.Record(b.Context(), (time.Duration(i) * 100).Seconds())
		}
		took[0] += half.Sub(began)
		took[1] += time.Since(half)
	}
	n := float64(b.N * each)
	b.ReportMetric(float64(took[0].Nanoseconds())/n, "own-ns/record")
	b.ReportMetric(float64(took[1].Nanoseconds())/n, "otel-ns/record")
	b.ReportMetric(float64(took[0])/float64(took[1]), "ratio")
}
