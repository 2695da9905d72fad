package demo

import (
	"testing"

	"github.com/fairlead-proxy/fairlead/examples"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// TestDefaultLoadIsEightTenthsOfTheFleet keeps the demo's default load, the
// fleet's size and the config's split by capacity in step.
func TestDefaultLoadIsEightTenthsOfTheFleet(t *testing.T) {
	file, err := examples.Quickstart.ReadFile("quickstart/fleet.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := sim.Parse("fleet.yaml", file)
	if err != nil {
		t.Fatal(err)
	}
	var prompts, outputs []int
	for a := range load.Sequence(1, 40, load.Constant, load.AzureConversation(), 0.5) {
		if prompts, outputs = append(prompts, a.Prompt), append(outputs, a.Output); len(prompts) == 5000 {
			break
		}
	}
	byPool, total := map[string]float64{}, 0.0
	for _, s := range cfg.Servers {
		c := s.Engine.Capacity(prompts, outputs)
		byPool[poolOf(s.Name)] += c
		total += c
	}
	t.Logf("capacity %.1f requests/s: h100 %.1f, a100 %.1f", total, byPool["h100"], byPool["a100"])
	if share := DefaultRPS / total; share < 0.8 || share > 0.9 {
		t.Errorf("%d requests/s are %.2f of the fleet's capacity of %.1f; want 0.8…0.9", DefaultRPS, share, total)
	}
	file, err = examples.Quickstart.ReadFile("quickstart/fairlead.yaml")
	if err != nil {
		t.Fatal(err)
	}
	config, err := fleet.Parse("fairlead.yaml", file)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range config.Routes {
		points := r.Split.BasisPoints()
		for i, arm := range r.Split {
			want := byPool[arm.Pool] / total
			if got := float64(points[i]) / fleet.BasisPointsTotal; got < want-0.02 || got > want+0.02 {
				t.Errorf("route %s: pool %s has %.2f of the split and %.2f of the capacity", r.Name, arm.Pool, got, want)
			}
		}
	}
}
