package alerts

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

const file = "../../examples/alerts/fairlead.rules.yaml"

// firing loads series (promtool's syntax, one value a second) and returns the
// alerts that fire at the given second.
func firing(t *testing.T, series string, at int) []string {
	t.Helper()
	storage := promqltest.LoadedStorage(t, "load 1s\n"+series)
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	manager := rules.NewManager(&rules.ManagerOptions{
		QueryFunc:    rules.EngineQueryFunc(engine, storage),
		AppendableV2: storage, Queryable: storage,
		Parser:  parser.NewParser(parser.Options{}),
		Context: context.Background(), Logger: slog.New(slog.DiscardHandler),
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
	})
	groups, errs := manager.LoadGroups(time.Second, labels.EmptyLabels(), "", nil, false, file)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	for second := range at + 1 {
		for _, g := range groups {
			g.Eval(t.Context(), time.Unix(int64(second), 0))
		}
	}
	var out []string
	for _, g := range groups {
		for _, r := range g.AlertingRules() {
			if r.LastError() != nil {
				t.Fatalf("%s: %v", r.Name(), r.LastError())
			}
			for _, a := range r.ActiveAlerts() {
				if a.State == rules.StateFiring {
					out = append(out, r.Name())
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func TestEachRuleFiresAndFallsSilent(t *testing.T) {
	const h100 = `fairlead_pool_info{pool="p",model="m",hardware="h100-80g"} 1x60` + "\n"
	const endpoint = `{pool="p",endpoint="e"}`
	for _, c := range []struct {
		name, series string
		at           int
		want         string
	}{
		{"risk stays high", `fairlead_endpoint_risk` + endpoint + ` 0.9x60`, 6, "FairleadEndpointHot"},
		{"risk has been high for 4 s", `fairlead_endpoint_risk` + endpoint + ` 0.9x60`, 4, ""},
		{"risk dips within 5 s", `fairlead_endpoint_risk` + endpoint + ` 0.9 0.9 0.9 0.5 0.9 0.9 0.9 0.9`, 7, ""},
		{"risk at the threshold", `fairlead_endpoint_risk` + endpoint + ` 0.82x60`, 30, ""},
		{"an H100 allocates 1.3 GB/s with half its cache full", h100 + `fairlead_endpoint_allocation` + endpoint + ` 0.0222x60` + "\n" + `fairlead_endpoint_kv_usage` + endpoint + ` 0.6x60`, 10, "FairleadAllocationFast"},
		{"the same with an empty cache", h100 + `fairlead_endpoint_allocation` + endpoint + ` 0.0222x60` + "\n" + `fairlead_endpoint_kv_usage` + endpoint + ` 0.2x60`, 10, ""},
		{"an RTX 4090 at the same share", `fairlead_pool_info{pool="p",model="m",hardware="rtx-4090"} 1x60` + "\n" + `fairlead_endpoint_allocation` + endpoint + ` 0.0222x60` + "\n" + `fairlead_endpoint_kv_usage` + endpoint + ` 0.6x60`, 10, ""},
		{"an RTX 4090 at 1.3 GB/s", `fairlead_pool_info{pool="p",model="m",hardware="rtx-4090"} 1x60` + "\n" + `fairlead_endpoint_allocation` + endpoint + ` 0.24x60` + "\n" + `fairlead_endpoint_kv_usage` + endpoint + ` 0.6x60`, 10, "FairleadAllocationFast"},
		{"70B on four H100 at 1.3 GB/s", `fairlead_pool_info{pool="p",model="m",hardware="4xh100-80g"} 1x60` + "\n" + `fairlead_endpoint_allocation` + endpoint + ` 0.0083x60` + "\n" + `fairlead_endpoint_kv_usage` + endpoint + ` 0.6x60`, 10, "FairleadAllocationFast"},
		{"numbers grow old", `fairlead_telemetry_age_seconds{pool="p",endpoint="e",source="engine"} 0+0.5x60`, 10, "FairleadTelemetryOld"},
		{"only the GPU page is old", `fairlead_telemetry_age_seconds{pool="p",endpoint="e",source="gpu"} 0+0.5x60`, 10, ""},
		{"a node is gone", `gpu_node_ready{node="a"} 1 1 0x60`, 20, "FairleadGPUNodeNotReady"},
		{"a node was gone for a moment", `gpu_node_ready{node="a"} 1 0 0 0 1x60`, 20, ""},
		{"a third of the pool is out", `fairlead_pool_ejected{pool="p"} 0.34x60`, 5, "FairleadPoolEjected"},
		{"30 % of the pool is out", `fairlead_pool_ejected{pool="p"} 0.3x60`, 5, ""},
		{"a config was refused", `fairlead_config_refused 1x60`, 15, "FairleadConfigRefused"},
		{"a model was refused", `fairlead_model_refused 1x60`, 15, "FairleadModelRefused"},
		{"TLS files were refused", `fairlead_push_tls_refused 1x60`, 15, "FairleadPushTLSRefused"},
		{"TLS files were half written for a moment", `fairlead_push_tls_refused 0 1 1 1 1 0x60`, 15, ""},
		{"the shared limiter is away", `fairlead_limiter_away 1x60`, 15, "FairleadLimiterAway"},
		{"the shared limiter was away for a moment", `fairlead_limiter_away 0 1 1 1 1 0x60`, 15, ""},
		{"requests pass undecided", `fairlead_requests_undecided_total{result="passed"} 0+1x60`, 20, "FairleadRequestsUndecided"},
		{"requests passed undecided long ago", `fairlead_requests_undecided_total{result="refused"} 0 5x60`, 40, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := strings.Join(firing(t, c.series, c.at), " "); got != c.want {
				t.Errorf("fires %q, want %q", got, c.want)
			}
		})
	}
}

// Thresholds of the allocation rule are arithmetic: hold them to it.
func TestAllocationThresholdsAre1200MegabytesPerSecond(t *testing.T) {
	for _, c := range []struct {
		tokens, bytes float64
		want          string
	}{{447_040, 131_072, "0.0205"}, {482_000, 327_680, "0.0076"}, {41_408, 131_072, "0.2211"}} {
		if got := fmt.Sprintf("%.4f", 1.2e9/(c.tokens*c.bytes)); got != c.want {
			t.Errorf("%v tokens of %v bytes: %s, want %s", c.tokens, c.bytes, got, c.want)
		}
	}
}

// The rules file says how long after the fact each rule fires.
func TestRulesFireAsLateAsTheFileSays(t *testing.T) {
	for _, c := range []struct {
		alert, series string
		began, after  int
	}{
		// The last number came at second 10.
		{"FairleadTelemetryOld", `fairlead_telemetry_age_seconds{pool="p",endpoint="e",source="engine"} 0x10 1+1x40`, 10, 4},
		{"FairleadPoolEjected", `fairlead_pool_ejected{pool="p"} 0x10 0.5x40`, 10, 3},
		{"FairleadGPUNodeNotReady", `gpu_node_ready{node="a"} 1x10 0x40`, 10, 11},
	} {
		for at := c.began; ; at++ {
			if at > 40 {
				t.Fatalf("%s does not fire", c.alert)
			}
			if slices.Contains(firing(t, c.series, at), c.alert) {
				if late := at - c.began; late != c.after {
					t.Errorf("%s fires %d s after the fact, the file says %d", c.alert, late, c.after)
				}
				break
			}
		}
	}
}
