package xgb

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/features"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// kvModel is a model of one tree: margin 2 from a KV usage of 0.5 on, else −3;
// +1 where it is missing.
func kvModel(names []string, schema string) map[string]any {
	doc := tinyModel()
	learner := doc["learner"].(map[string]any)
	learner["feature_names"] = append([]string{}, names...)
	learner["attributes"] = map[string]any{features.SchemaAttribute: schema}
	learner["learner_model_param"].(map[string]any)["num_feature"] = "17"
	return doc
}

func TestRiskFollowsTheWindow(t *testing.T) {
	m := mustLoad(t, kvModel(features.Names(), features.SchemaHash()))
	model, err := Risk(m, "kv")
	if err != nil {
		t.Fatal(err)
	}
	if model.Name() != "kv" {
		t.Errorf("name %q", model.Name())
	}
	now := time.Unix(1_700_000_000, 0)
	if _, ok := model.Assess(nil, scorer.Own{}, now); ok {
		t.Error("judged an endpoint without telemetry")
	}
	var w telemetry.Window
	if _, ok := model.Assess(&w, scorer.Own{}, now); ok {
		t.Error("judged an empty window")
	}
	for _, c := range []struct {
		kv     float64
		margin float64
	}{{0.1, -3}, {0.5, 2}, {0.9, 2}} {
		now = now.Add(200 * time.Millisecond)
		w.Add(telemetry.Sample{At: now, Known: telemetry.HasKVUsage, KVUsage: c.kv})
		a, ok := model.Assess(&w, scorer.Own{}, now)
		if !ok || a.Margin != c.margin || math.Abs(float64(a.Risk)-1/(1+math.Exp(-c.margin))) > 1e-12 || a.Hot() != (c.margin > 1.52) {
			t.Errorf("KV usage %v: %+v, %v; want margin %v", c.kv, a, ok, c.margin)
		}
	}
	if _, ok := model.Assess(&w, scorer.Own{}, now.Add(scorer.FreshAge+1)); ok {
		t.Error("judged a window that is too old")
	}
}

func TestRiskRefusesOtherFeatures(t *testing.T) {
	swapped := features.Names()
	swapped[0], swapped[1] = swapped[1], swapped[0]
	for _, c := range []struct {
		name, schema, want string
		names              []string
	}{
		{"no names", features.SchemaHash(), "found 0 feature names; accepted: the 17", nil},
		{"swapped", features.SchemaHash(), "feature 0: found kv_slope_1s; accepted: kv_usage", swapped},
		{"schema", "0123", "attribute fairlead_schema: found 0123; accepted: " + features.SchemaHash(), features.Names()},
		{"no schema", "", `found ""; accepted: ` + features.SchemaHash(), features.Names()},
	} {
		_, err := Risk(mustLoad(t, kvModel(c.names, c.schema)), "m")
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.name, err, c.want)
		}
	}
}

func TestAssessAllocatesNothing(t *testing.T) {
	m := mustLoad(t, kvModel(features.Names(), features.SchemaHash()))
	model, err := Risk(m, "kv")
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_700_000_000, 0)
	var w telemetry.Window
	w.Add(telemetry.Sample{At: now, Known: telemetry.HasKVUsage, KVUsage: 0.4})
	if n := testing.AllocsPerRun(100, func() { model.Assess(&w, scorer.Own{}, now) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func mustLoad(t *testing.T, doc map[string]any) *Model {
	t.Helper()
	data, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	m, err := Load(data, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}
