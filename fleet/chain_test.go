package fleet_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// TestLongestChainFitsADecision ties the config's limit to the plan's.
func TestLongestChainFitsADecision(t *testing.T) {
	for pools, good := range map[int]bool{plan.MaxAttempts: true, plan.MaxAttempts + 1: false} {
		var defined, fallback []string
		for i := range pools {
			defined = append(defined, fmt.Sprintf("{ name: p%d, endpoints: [] }", i))
			if i > 0 {
				fallback = append(fallback, fmt.Sprintf("{ pool: p%d }", i))
			}
		}
		_, err := fleet.Parse("chain.yaml", []byte(`
apiVersion: fairlead/v1alpha1
kind: Fairlead
groups: [ { name: g, listener: { address: "127.0.0.1:1" }, routes: [ r ] } ]
pools: [ `+strings.Join(defined, ", ")+` ]
routes: [ { name: r, match: { prefix: / }, dialect: openai, pool: p0, fallback: [ `+strings.Join(fallback, ", ")+` ] } ]
`))
		if (err == nil) != good {
			t.Errorf("%d pools: %v", pools, err)
		}
	}
}
