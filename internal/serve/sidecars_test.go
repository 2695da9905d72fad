package serve

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/xds"
)

// TestSidecarsAreToldWhatTheyMayHold: once a second, each group, also of the hold
// that a new config gives up.
func TestSidecarsAreToldWhatTheyMayHold(t *testing.T) {
	config := func(hold string) *fleet.Config {
		cfg, err := fleet.Parse("fairlead.yaml", []byte(`apiVersion: fairlead/v1alpha1
kind: Fairlead
groups:
  - { name: edge, listener: { address: 127.0.0.1:1 }, routes: [chat, free] }
pools:
  - { name: a, endpoints: [ { address: 127.0.0.1:2 } ] }
  - { name: b, endpoints: [ { address: 127.0.0.1:3 } ] }
routes:
  - { name: chat, match: { prefix: /v1/chat }, dialect: openai, holdAtSidecar: `+hold+`, split: [{ pool: a, weight: 1 }] }
  - { name: free, match: { prefix: / }, dialect: openai, split: [{ pool: b, weight: 1 }] }
`))
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	publish := xds.New(xds.Options{})
	if err := publish.Submit(xds.Target{Config: config("true"), Runtime: envoy.Runtime{
		ExtProc: fleet.Address{Path: "/run/x"}, AccessLog: fleet.Address{Path: "/run/a"},
	}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = publish.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	told := func(want map[string]uint32) {
		t.Helper()
		var got map[string]uint32
		for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
			got = publish.Groups()[0].MaxRequests
			if len(got) == len(want) && got["a"] == want["a"] && got["b"] == want["b"] {
				return
			}
		}
		t.Fatalf("sidecars are told %v, want %v", got, want)
	}
	hold := newSidecarHold(publish)
	now := time.Now()
	pools := func(a float64) []admission.PoolState {
		return []admission.PoolState{{Name: "a", Limit: a}, {Name: "b", Limit: 3}}
	}
	hold.step(now, config("true"), pools(10))
	told(map[string]uint32{"a": 10})
	hold.step(now.Add(time.Second/2), config("true"), pools(20)) // too soon
	hold.step(now.Add(time.Second), config("true"), pools(30))
	told(map[string]uint32{"a": 30})
	hold.step(now.Add(2*time.Second), config("true"), pools(0)) // nothing to hold
	told(nil)
	hold.step(now.Add(3*time.Second), config("true"), pools(40))
	told(map[string]uint32{"a": 40})
	hold.step(now.Add(4*time.Second), config("false"), pools(40))
	told(nil)
}
