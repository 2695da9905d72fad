package xds

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// lingering makes clusters stay for d after the routes to them were replaced.
func lingering(d time.Duration) func(*Options) { return func(o *Options) { o.linger = d } }

// A request that came under the old routes may still be on its way to its cluster.
func TestPoolThatWasRenamedLingers(t *testing.T) {
	r := newRig(t, target("blue=100"), lingering(time.Hour))
	c := r.join("n1", "edge")
	r.publish(target("green=100"))
	c.expect("CDS +green", "EDS +green", "RDS +fairlead.edge")
	if st := r.server.Groups()[0]; st.Publisher != "idle" || synced(r) != 1 {
		t.Errorf("it waits for what lingers: %+v, %d synced", st, synced(r))
	}
	c.forget()
	// Other changes go on, and one that brings the pool back has it at once.
	r.publish(target("green=50 red=50"))
	c.expect("CDS +red", "EDS +red", "RDS +fairlead.edge")
	c.forget()
	r.publish(target("blue=50 red=50"))
	c.expect("RDS +fairlead.edge")
	g := r.server.allGroups()[0]
	g.mu.Lock()
	leaving := g.longestLeaving()
	g.mu.Unlock()
	if !slices.Equal(leaving, []string{"green"}) {
		t.Errorf("%v linger, want green alone", leaving)
	}
	// Who connects meanwhile holds it too, so that nobody differs.
	r.join("n2", "edge")
}

func TestPoolThatLingeredGoesWithItsAssignment(t *testing.T) {
	r := newRig(t, target("blue=100"), lingering(50*time.Millisecond))
	c := r.join("n1", "edge")
	r.publish(target("green=100"))
	eventually(t, "blue is gone", func() bool { return slices.Contains(c.got(), "CDS -blue") })
	c.expect("CDS +green", "EDS +green", "RDS +fairlead.edge", "CDS -blue")
	g := r.server.allGroups()[0]
	eventually(t, "its assignment too", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.endpoints["blue"].msg == nil
	})
	if synced(r) != 1 {
		t.Error("n1 is not synced")
	}
}

// An Envoy that never takes the routes keeps nothing in the others.
func TestMuteEnvoyKeepsNoPoolThatLeaves(t *testing.T) {
	r := newRig(t, target("blue=100"), lingering(50*time.Millisecond), deadline(50*time.Millisecond))
	quick := r.join("quick", "edge")
	slow := r.join("slow", "edge")
	slow.mu.Lock()
	slow.mute[typeRDS] = true
	slow.mu.Unlock()
	r.publish(target("green=100"))
	for _, c := range []*client{quick, slow} {
		eventually(t, "blue is gone", func() bool { return slices.Contains(c.got(), "CDS -blue") })
	}
}

// What was refused would be refused by each Envoy that connects.
func TestPoolThatWasRefusedDoesNotLinger(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90"), lingering(time.Hour))
	c := r.join("n1", "edge", refusing(func(typ string, resp *discoveryv3.DeltaDiscoveryResponse) string {
		for _, res := range resp.GetResources() {
			if typ == "CDS" && res.GetName() == "bad" {
				return "no"
			}
		}
		return ""
	}))
	r.publish(target("h100=10 a100=80 bad=10"))
	eventually(t, "it is taken back", func() bool { return r.count(EventRollback) == 1 && slices.Contains(c.got(), "CDS -bad") })
	if r.state("n1", "CDS") == "SYNCED" {
		t.Error("the refusal is not shown")
	}
}

// What one Envoy of several refuses lingers for the others' requests.
func TestWhatOneOfSeveralRefusesLingers(t *testing.T) {
	r := newRig(t, target("blue=100"), lingering(time.Hour))
	well := r.join("well", "edge")
	r.join("odd", "edge", refusing(func(typ string, resp *discoveryv3.DeltaDiscoveryResponse) string {
		for _, res := range resp.GetResources() {
			if typ == "CDS" && res.GetName() == "next" {
				return "no"
			}
		}
		return ""
	}))
	r.publish(target("blue=50 next=50"))
	eventually(t, "one refuses", func() bool { return strings.HasPrefix(r.state("odd", "CDS"), "NACKED") })
	r.publish(target("blue=100"))
	r.publish(target("blue=50 red=50")) // what the one before did is over
	if got := well.got(); slices.Contains(got, "CDS -next") || !slices.Contains(got, "CDS +red") {
		t.Errorf("%q; want next to stay", got)
	}
}

func TestNoMoreThanABoundLinger(t *testing.T) {
	now := time.Now()
	g := &group{server: &Server{}, leaving: map[string]time.Time{}}
	w := &world{group: fleet.Group{Listener: fleet.Listener{UploadTimeout: time.Minute}}}
	var first, second []string
	for i := range maxLeaving {
		first = append(first, fmt.Sprintf("a%04d", i))
	}
	for i := range 3 {
		second = append(second, fmt.Sprint("b", i))
	}
	g.linger(w, first, now)
	g.linger(w, first[:10], now.Add(time.Second)) // nobody's stay is prolonged
	if due := g.dueDepartures(now); len(due) != 0 {
		t.Errorf("%d go while there is room", len(due))
	}
	g.linger(w, second, now.Add(time.Second))
	if due := g.dueDepartures(now.Add(time.Second)); len(due) != 3 || due[0][0] != 'a' {
		t.Errorf("%v go, want three of those that came first", due)
	}
	over := now.Add(time.Minute + lingerMargin)
	if due := g.dueDepartures(over); len(due) != len(first) || slices.Contains(due, "b0") {
		t.Errorf("%d go after a minute and the margin, want %d", len(due), len(first))
	}
	shorter := &world{group: fleet.Group{Listener: fleet.Listener{UploadTimeout: time.Second}}}
	g.linger(shorter, []string{"c"}, now.Add(time.Second))
	if at := g.leaving["c"]; !at.Equal(now.Add(time.Second + time.Minute + lingerMargin)) {
		t.Errorf("what begins before a shorter timeout has %v", at.Sub(now))
	}
	if wait, more := g.nextDeparture(now); !more || wait != time.Minute+lingerMargin {
		t.Errorf("the next goes in %v, %t", wait, more)
	}
}

// Uploads go on for as long as the config said under which they began, be it that of the
// start, or one that was replaced by another meanwhile.
func TestClustersOutlastTheUploadsOfConfigsBefore(t *testing.T) {
	now := time.Now()
	uploads := func(d time.Duration) *world {
		return &world{group: fleet.Group{Listener: fleet.Listener{UploadTimeout: d}}}
	}
	g := newGroup(&Server{}, uploads(time.Hour))
	g.linger(uploads(30*time.Second), []string{"a"}, now)
	g.linger(uploads(30*time.Second), []string{"b"}, now.Add(10*time.Minute))
	g.linger(uploads(30*time.Second), []string{"c"}, now.Add(2*time.Hour))
	for name, want := range map[string]time.Duration{"a": time.Hour, "b": time.Hour, "c": 2*time.Hour + 30*time.Second} {
		if at := g.leaving[name]; !at.Equal(now.Add(want + lingerMargin)) {
			t.Errorf("%s goes after %v, want %v", name, at.Sub(now), want+lingerMargin)
		}
	}
}
