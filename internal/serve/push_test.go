package serve

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
)

// Every reading waits for the scoring's lock, and copying what 4,096 agents said
// takes long.
func TestAgentsAreAskedWithoutTheScoringsLockAndOncePerBucket(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	s.scoring.agents = func() map[string]admin.Agent {
		asked++
		if !s.scoring.mu.TryLock() {
			t.Error("asked under the lock")
		} else {
			s.scoring.mu.Unlock()
		}
		return map[string]admin.Agent{"127.0.0.1": {Connected: true}}
	}
	now := time.Now().Add(bucket)
	shown := 0
	for range 8 {
		if _, view := s.scoring.step(now); view != nil {
			shown++
			if len(view.Nodes) != 1 || view.Nodes[0].Agent == nil || !view.Nodes[0].Agent.Connected {
				t.Errorf("nodes: %+v", view.Nodes)
			}
		}
		now = now.Add(tickEvery)
	}
	if shown != 2 || asked != shown {
		t.Errorf("asked %d times for %d buckets, want 2", asked, shown)
	}
}
