package xds

import (
	"fmt"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/stream/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// desk is a group's runtime without a network: every event comes when a test says
// so, at a time that it names.
type desk struct {
	t         testing.TB
	server    *Server
	group     *group
	now       time.Time
	rollbacks int
}

func newDesk(t testing.TB, edit ...func(*Options)) *desk {
	t.Helper()
	d := &desk{t: t, now: time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)}
	o := Options{Observe: func(e Event) {
		if e.Kind == EventRollback {
			d.rollbacks++
		}
	}}
	for _, e := range edit {
		e(&o)
	}
	d.server = New(o)
	if err := d.server.Submit(target("h100=100")); err != nil {
		t.Fatal(err)
	}
	d.group = d.server.allGroups()[0]
	return d
}

func (d *desk) set(n uint32) { d.server.SetMaxRequests("edge", map[string]uint32{"h100": n}) }

// after lets time go by and does what is due.
func (d *desk) after(wait time.Duration) (next time.Duration, more bool) {
	d.now = d.now.Add(wait)
	return d.group.stepRuntime(d.now)
}

// publish sets a limit and has it published.
func (d *desk) publish(n uint32) {
	d.t.Helper()
	d.set(n)
	d.after(time.Minute)
	d.serves(n)
}

func (d *desk) serves(n uint32) {
	d.t.Helper()
	if got := d.server.Groups()[0].MaxRequests["h100"]; got != n {
		d.t.Fatalf("it serves %d, want %d", got, n)
	}
}

// asker is one Envoy's stream.
type asker struct {
	d    *desk
	ses  *session
	n    int
	out  chan cache.DeltaResponse
	stop func()
}

// join is a stream's first request about runtimes, of an Envoy that holds a
// version, or "".
func (d *desk) join(name, version string) *asker {
	d.t.Helper()
	a := &asker{d: d, ses: &session{server: d.server, group: d.group, node: name}, out: make(chan cache.DeltaResponse, 8)}
	held := map[string]string{}
	if version != "" {
		held[wire.RuntimeName] = version
	}
	r := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeRuntime, ResourceNamesSubscribe: []string{wire.RuntimeName}, InitialResourceVersions: held}
	a.request(r)
	var err error
	a.stop, err = d.group.watchRuntime(a.ses, r, stream.NewDeltaSubscription([]string{wire.RuntimeName}, nil, held, false), a.out)
	if err != nil {
		d.t.Fatal(err)
	}
	if a.stop == nil { // answered at once
		a.stop = func() {}
	}
	return a
}

func (a *asker) request(r *discoveryv3.DeltaDiscoveryRequest) {
	a.d.t.Helper()
	a.d.group.mu.Lock()
	defer a.d.group.mu.Unlock()
	if _, err := a.d.group.runtimeRequest(a.ses, r, a.d.now); err != nil {
		a.d.t.Fatal(err)
	}
}

// answers what is published: with a refusal, or "" to accept it.
func (a *asker) answers(refusal string) {
	a.d.t.Helper()
	a.n++
	nonce := fmt.Sprint(a.n)
	a.d.group.mu.Lock()
	a.ses.runtime.add(&sent{nonce: nonce, versions: map[string]string{wire.RuntimeName: a.d.group.runtime.current.version}})
	a.d.group.mu.Unlock()
	r := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeRuntime, ResponseNonce: nonce}
	if refusal != "" {
		r.ErrorDetail = &statuspb.Status{Code: 13, Message: refusal}
	}
	a.request(r)
}

func (a *asker) leaves() {
	a.stop()
	a.d.group.mu.Lock()
	defer a.d.group.mu.Unlock()
	a.d.group.forgetRuntime(a.ses)
}

// told returns how many limits the next response to it has, or -1 if there is
// none.
func (a *asker) told() int {
	a.d.t.Helper()
	select {
	case r := <-a.out:
		message, err := r.GetDeltaDiscoveryResponse()
		if err != nil {
			a.d.t.Fatal(err)
		}
		layer := &runtimev3.Runtime{}
		if len(message.GetResources()) != 1 || message.GetResources()[0].GetResource().UnmarshalTo(layer) != nil {
			a.d.t.Fatalf("told %v", message)
		}
		return len(layer.GetLayer().GetFields())
	default:
		return -1
	}
}

// three is a desk with three Envoys that have all accepted a limit of 5 and are
// served one of 6.
func three(t *testing.T) (d *desk, a, b, c *asker) {
	t.Helper()
	d = newDesk(t)
	a, b, c = d.join("a", ""), d.join("b", ""), d.join("c", "")
	d.publish(5)
	for _, x := range []*asker{a, b, c} {
		x.answers("")
	}
	d.publish(6)
	return d, a, b, c
}

func TestOneRefusalOfSeveralTakesNothingBack(t *testing.T) {
	d, a, b, c := three(t)
	a.answers("no")
	a.answers("no again")
	d.after(time.Minute)
	d.serves(6)
	b.answers("")
	c.answers("no")
	d.after(time.Minute)
	d.serves(5)
	if d.rollbacks != 1 {
		t.Errorf("%d rollbacks", d.rollbacks)
	}
}

func TestARefusalThatWasTakenBackIsNone(t *testing.T) {
	d, a, b, _ := three(t)
	a.answers("no")
	a.answers("")
	b.answers("no")
	d.after(time.Minute)
	d.serves(6)
}

func TestTheOnlyOneTakesItsRefusalBack(t *testing.T) {
	d := newDesk(t)
	a := d.join("a", "")
	d.publish(5)
	a.answers("")
	d.publish(6)
	a.answers("no")
	d.after(time.Minute)
	d.serves(5)
}

// With the others gone, one that refuses is the only one.
func TestOneThatIsLeftAloneTakesItsRefusalBack(t *testing.T) {
	d, a, b, c := three(t)
	a.answers("no")
	b.leaves()
	d.after(time.Minute)
	d.serves(6)
	c.leaves()
	d.after(time.Minute)
	d.serves(5)
}

// What one of several refused isn't accepted content, whoever takes it: were it,
// there would be nothing to go back to when the refuser is the only one left.
func TestWhatOneRefusedIsNotAccepted(t *testing.T) {
	d, a, b, c := three(t)
	a.answers("no")
	b.answers("")
	c.answers("")
	b.leaves()
	c.leaves()
	d.after(time.Minute)
	d.serves(5)
	if d.rollbacks != 1 {
		t.Errorf("%d rollbacks", d.rollbacks)
	}
}

// Two refusals of which one left are one.
func TestARefuserThatLeftCountsNoMore(t *testing.T) {
	d, a, b, _ := three(t)
	a.answers("no")
	a.leaves()
	b.answers("no")
	d.after(time.Minute)
	d.serves(6)
	if d.rollbacks != 0 {
		t.Errorf("%d rollbacks", d.rollbacks)
	}
}

// A fleet whose first limits are none is told so; without that the Envoys would
// keep for ever what a server before this one set.
func TestTheFirstLimitsMayBeNone(t *testing.T) {
	for _, none := range []map[string]uint32{nil, {}} {
		d := newDesk(t)
		a := d.join("a", "of a server before this one")
		d.after(time.Hour)
		d.after(time.Hour)
		if got := a.told(); got != -1 {
			t.Fatalf("told %d limits although nobody set any", got)
		}
		d.server.SetMaxRequests("edge", none)
		d.after(0)
		if got := a.told(); got != 0 {
			t.Errorf("set to %v: told %d limits, want 0", none, got)
		}
		d.publish(5)
		if got := a.told(); got != -1 {
			t.Errorf("told %d limits without a question", got)
		}
	}
}

func TestFirstNoLimitsReachAnEnvoyThatComesBack(t *testing.T) {
	first := newRig(t, target("h100=10 a100=90"), unpaced)
	before := first.join("n1", "edge", layered)
	first.limit("h100", 5)
	eventually(t, "the limit", func() bool { return before.holdsLimit("h100", 5) })
	second := newRig(t, target("h100=10 a100=90"), unpaced)
	c := second.join("n1", "edge", layered, holding(before))
	second.server.SetMaxRequests("edge", nil)
	eventually(t, "no limits", func() bool { return len(c.runtime()) == 0 && second.state("n1", "RTDS") == "SYNCED" })
}

// The shipped times: an Envoy that comes back is left alone for three seconds.
func TestAnEnvoyThatComesBackIsToldAfterThreeSeconds(t *testing.T) {
	d := newDesk(t)
	a := d.join("a", "of a server before this one")
	d.set(5)
	if next, more := d.after(0); next != 3*time.Second || !more {
		t.Errorf("next %v (%t), want 3s", next, more)
	}
	if next, more := d.after(3*time.Second - time.Millisecond); next != time.Millisecond || !more {
		t.Errorf("next %v (%t), want 1ms", next, more)
	}
	if got := a.told(); got != -1 {
		t.Errorf("told %d limits before the time", got)
	}
	if next, more := d.after(time.Millisecond); more {
		t.Errorf("next %v with nothing to do", next)
	}
	if got := a.told(); got != 1 {
		t.Errorf("told %d limits, want 1", got)
	}
}

// A newcomer that holds nothing is answered whatever its neighbours keep.
func TestANewcomerIsToldAtOnce(t *testing.T) {
	d := newDesk(t)
	d.join("a", "of a server before this one")
	d.publish(5)
	if got := d.join("b", "").told(); got != 1 {
		t.Errorf("told %d limits, want 1", got)
	}
}

// The step is due when the first of two things is: a change that is paced, or an
// Envoy that has kept its runtime for long enough.
func TestTheNextStepIsTheSooner(t *testing.T) {
	for _, c := range []struct {
		every, settle time.Duration
		change        bool
		want          time.Duration
	}{
		{10 * time.Second, 30 * time.Second, false, 30 * time.Second},
		{10 * time.Second, 30 * time.Second, true, 10 * time.Second},
		{30 * time.Second, 10 * time.Second, true, 10 * time.Second},
		{30 * time.Second, 10 * time.Second, false, 10 * time.Second},
	} {
		d := newDesk(t, paced(c.every, c.settle))
		d.set(5)
		d.after(0)
		a := d.join("a", "of a server before this one")
		if c.change {
			d.set(6)
		}
		if next, more := d.after(0); next != c.want || !more {
			t.Errorf("%+v: next %v (%t)", c, next, more)
		}
		a.stop()
		wantNext := time.Duration(0)
		if c.change {
			wantNext = c.every
		}
		if next, more := d.after(0); next != wantNext || more != c.change {
			t.Errorf("%+v, the Envoy gone: next %v (%t)", c, next, more)
		}
	}
}

// Taking back is paced as a change is, and paces the next.
func TestTakingBackIsPaced(t *testing.T) {
	d, a, b, _ := three(t)
	d.set(7)
	d.after(time.Minute)
	a.answers("no")
	b.answers("no")
	if next, more := d.after(100 * time.Millisecond); next != 900*time.Millisecond || !more {
		t.Errorf("next %v (%t)", next, more)
	}
	d.serves(7)
	d.after(900 * time.Millisecond)
	d.serves(5)
	d.set(8)
	if next, more := d.after(400 * time.Millisecond); next != 600*time.Millisecond || !more {
		t.Errorf("after it was taken back: next %v (%t)", next, more)
	}
	d.after(600 * time.Millisecond)
	d.serves(8)
}

// A question that was withdrawn between being due and being asked is not asked.
func TestAWithdrawnQuestionIsNotAsked(t *testing.T) {
	d := newDesk(t)
	a := d.join("a", "of a server before this one")
	d.publishQuietly(5)
	d.group.mu.Lock()
	due, _ := d.group.settledWatches(d.now.Add(time.Hour))
	d.group.mu.Unlock()
	if len(due) != 1 {
		t.Fatalf("%d questions are due", len(due))
	}
	a.stop()
	due[0].start(d.group.runtime.cache)
	d.publish(6)
	if got := a.told(); got != -1 {
		t.Errorf("told %d limits", got)
	}
	if n := d.group.runtime.cache.NumWatches(wire.RuntimeName); n != 0 {
		t.Errorf("%d watches", n)
	}
}

// publishQuietly sets and publishes a limit without a step of kept questions.
func (d *desk) publishQuietly(n uint32) {
	d.set(n)
	d.group.mu.Lock()
	push, _, _ := d.group.moveRuntime(d.now)
	d.group.mu.Unlock()
	d.group.put(d.group.runtime.cache, typeRuntime, push)
}

// One that is withdrawn later leaves no watch in the cache.
func TestAQuestionWithdrawnLaterLeavesNothing(t *testing.T) {
	d := newDesk(t)
	d.publish(5)
	d.group.mu.Lock()
	version := d.group.runtime.current.version
	d.group.mu.Unlock()
	a := d.join("a", version) // holds what is served: its question stays open
	d.after(time.Hour)
	if n := d.group.runtime.cache.NumWatches(wire.RuntimeName); n != 1 {
		t.Fatalf("%d watches", n)
	}
	a.stop()
	d.publish(6)
	if n := d.group.runtime.cache.NumWatches(wire.RuntimeName); n != 0 || a.told() != -1 {
		t.Errorf("%d watches", n)
	}
}
