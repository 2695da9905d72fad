package xds

import (
	"fmt"
	"testing"
	"time"
)

func TestEnvoyThatLeftIsShownUntilItIsBack(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90", secondGroup))
	before := time.Now()
	c := r.join("n1", "edge")
	other := r.connect("n1", "core") // the same node elsewhere is another Envoy
	eventually(t, "both are synced", func() bool { return synced(r) == 2 })
	only := func() NodeStatus {
		t.Helper()
		var found []NodeStatus
		for _, n := range r.server.Status() {
			if n.Group == "edge" {
				found = append(found, n)
			}
		}
		if len(found) != 1 {
			t.Fatalf("edge has %+v", found)
		}
		return found[0]
	}
	if n := only(); !n.Connected || n.LastSeen.Before(before) {
		t.Fatalf("connected: %+v", n)
	}
	c.close()
	eventually(t, "it is gone", func() bool { return !only().Connected })
	n := only()
	if n.Node != "n1" || n.Listen.String() != "127.0.0.1:9001" || n.LastSeen.Before(n.Since) || n.LastSeen.After(time.Now()) {
		t.Errorf("gone: %+v", n)
	}
	if len(n.Types) != 4 || n.Types[0].Type != "CDS" || n.Types[0].State != Synced || n.Types[0].Version == "" {
		t.Errorf("gone: %+v", n.Types)
	}
	if n.Refused != "" {
		t.Errorf("one of a known group is refused: %s", n.Refused)
	}
	if later := only(); !later.LastSeen.Equal(n.LastSeen) {
		t.Errorf("last seen moved from %s to %s", n.LastSeen, later.LastSeen)
	}
	if g := r.server.Groups()[1]; g.Name != "edge" || g.Envoys != 0 {
		t.Errorf("group %+v", g)
	}

	again := r.connect("n1", "edge", holding(c))
	eventually(t, "it is back", func() bool { return synced(r) == 2 })
	if n := only(); !n.Connected || !n.Since.After(before) {
		t.Errorf("back: %+v", n)
	}
	// Reconnected before the old stream was found broken: it never was away.
	next := r.connect("n1", "edge", holding(again))
	eventually(t, "both streams are in", func() bool { return r.server.Groups()[1].Envoys == 2 })
	again.close()
	eventually(t, "the old stream is over", func() bool { return r.server.Groups()[1].Envoys == 1 })
	if n := only(); !n.Connected {
		t.Errorf("shown as gone: %+v", n)
	}
	next.close()
	other.close()
	eventually(t, "both are gone", func() bool { return connected(r.server) == 0 && len(r.server.Status()) == 2 })
}

func TestDepartedAreForgottenInTimeAndBounded(t *testing.T) {
	start := time.Now()
	var d departed
	node := func(i int, at time.Time) NodeStatus {
		return NodeStatus{Node: fmt.Sprint("n", i), Group: "edge", LastSeen: at}
	}
	d.add(node(1, start))
	d.add(node(2, start.Add(time.Minute)))
	if got := d.list(start.Add(rememberDeparted)); len(got) != 2 || got[0].Node != "n1" {
		t.Errorf("at ten minutes: %+v", got)
	}
	if got := d.list(start.Add(rememberDeparted + time.Second)); len(got) != 1 || got[0].Node != "n2" {
		t.Errorf("behind ten minutes: %+v", got)
	}
	// One that leaves again is the latest.
	d.add(node(3, start.Add(11*time.Minute)))
	d.add(node(2, start.Add(12*time.Minute)))
	if got := d.list(start.Add(12 * time.Minute)); len(got) != 2 || got[1].Node != "n2" {
		t.Errorf("left again: %+v", got)
	}
	at := start.Add(12 * time.Minute)
	for i := range maxDeparted + 5 {
		d.add(node(i, at))
	}
	got := d.list(at)
	if len(got) != maxDeparted || len(d.byKey) != maxDeparted || got[0].Node != "n5" || got[len(got)-1].Node != fmt.Sprint("n", maxDeparted+4) {
		t.Errorf("%d remembered, from %s to %s", len(got), got[0].Node, got[len(got)-1].Node)
	}
	d.forget(nodeKey{group: "edge", node: "n7"})
	d.forget(nodeKey{group: "edge", node: "never seen"})
	if got := d.list(at); len(got) != maxDeparted-1 {
		t.Errorf("%d remembered after one came back", len(got))
	}
	if got := d.list(at.Add(time.Hour)); len(got) != 0 || len(d.byKey) != 0 {
		t.Errorf("%d remembered after an hour", len(got))
	}
}

// TestEnvoyWhoseGroupWasRenamedIsShownWithTheReason why it is not served any more.
func TestEnvoyWhoseGroupWasRenamedIsShownWithTheReason(t *testing.T) {
	r := newRig(t, target("h100=10 a100=90", secondGroup))
	r.join("n1", "core")
	r.publish(target("h100=10 a100=90"))
	eventually(t, "it is gone", func() bool { return connected(r.server) == 0 && len(r.server.Status()) == 1 })
	want := `group "core" (node.cluster) is not in the configuration; accepted: edge`
	if all := r.server.Status(); len(all) != 1 || all[0].Refused != want {
		t.Errorf("%+v; want one refused since %s", all, want)
	}
	r.publish(target("h100=10 a100=90", secondGroup))
	if all := r.server.Status(); len(all) != 1 || all[0].Refused != "" {
		t.Errorf("its group is back: %+v", all)
	}
}
