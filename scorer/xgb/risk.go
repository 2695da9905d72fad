package xgb

import (
	"fmt"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/features"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

type risk struct {
	model *Model
	name  string
}

// Risk makes a [scorer.Model] of m: features, margin, risk = 1/(1+e^−margin). It
// refuses a model that was trained on other features, or on features of another
// meaning, than [features.Extract] gives. Like the formula it does not judge an
// endpoint without telemetry, or one whose engine's numbers are older than
// scorer.FreshAge.
func Risk(m *Model, name string) (scorer.Model, error) {
	names := features.Names()
	if found := m.info.Features; len(found) != len(names) {
		return nil, fmt.Errorf("model %q: found %d feature names; accepted: the %d of this program", name, len(found), len(names))
	}
	for i, found := range m.info.Features {
		if found != names[i] {
			return nil, fmt.Errorf("model %q: feature %d: found %s; accepted: %s", name, i, shown(found), names[i])
		}
	}
	if found := m.info.Attributes[features.SchemaAttribute]; found != features.SchemaHash() {
		return nil, fmt.Errorf("model %q: attribute %s: found %s; accepted: %s (train the model anew)",
			name, features.SchemaAttribute, shown(found), features.SchemaHash())
	}
	return risk{model: m, name: name}, nil
}

func (r risk) Name() string { return r.name }

func (r risk) Assess(w *telemetry.Window, own scorer.Own, now time.Time) (scorer.Assessment, bool) {
	if w == nil || w.Age(now) > scorer.FreshAge {
		return scorer.Assessment{}, false
	}
	x := features.Extract(w, own, now)
	return scorer.AssessMargin(float64(r.model.Margin(x[:]))), true
}
