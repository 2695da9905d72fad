package push

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// rawStream opens a stream below the Client, to send what a Client would not.
func rawStream(t *testing.T, at fleet.Address) pushv1.Telemetry_PushClient {
	t.Helper()
	target := "unix:" + at.Path
	if at.Path == "" {
		target = "passthrough:///" + at.Host
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(func() {
		cancel()
		conn.Close()
	})
	stream, err := pushv1.NewTelemetryClient(conn).Push(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// exchange sends a frame and returns its answer.
func exchange(t *testing.T, stream pushv1.Telemetry_PushClient, m *pushv1.Frame) *pushv1.Ack {
	t.Helper()
	if err := stream.Send(m); err != nil {
		t.Fatal(err)
	}
	ack, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if ack.GetSequence() != m.GetSequence() {
		t.Fatalf("answer to %d, want %d", ack.GetSequence(), m.GetSequence())
	}
	return ack
}

func row(address string, running float32) *pushv1.Endpoint {
	return &pushv1.Endpoint{Address: address, Known: 1 << 2, Gauges: []float32{running}}
}

func TestAgesCrossTheWireWithoutClocks(t *testing.T) {
	type arrival struct {
		telemetry.Reading
		at time.Time
	}
	got := make(chan arrival, 1)
	s := NewServer(ServerOptions{Log: quietLog, Deliver: func(r telemetry.Reading) { got <- arrival{r, time.Now()} }})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
	at := fleet.Address{Host: "127.0.0.1:0"}
	l := listenTCP(t)
	at.Host = l.Addr().String()
	servingOn(t, s, l)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1"})
	u := update("10.0.0.1:8000", 1)
	made := time.Now()
	u.Sample.At, u.Sample.Changed = made.Add(-700*time.Millisecond), made.Add(-3*time.Second)
	c.Send(Frame{At: made, Endpoints: []Update{u}})
	select {
	case r := <-got:
		// The sample is at least as old as it was, and at most by the time on the
		// way older.
		if age := r.at.Sub(r.Sample.At); age < 700*time.Millisecond {
			t.Errorf("age %v", age)
		}
		if r.Sample.At.Before(u.Sample.At) {
			t.Errorf("sample %v before it was made", u.Sample.At.Sub(r.Sample.At))
		}
		if d := r.Sample.At.Sub(r.Sample.Changed); (d - 2300*time.Millisecond).Abs() > time.Millisecond {
			t.Errorf("changed %v before, want 2.3s", d)
		}
		if !strings.Contains(r.Sample.At.String(), " m=") || !strings.Contains(r.Sample.Changed.String(), " m=") {
			t.Errorf("%v and %v have no monotonic reading", r.Sample.At, r.Sample.Changed)
		}
	case <-time.After(patience):
		t.Fatal("nothing arrived")
	}
}

func TestTimeInTheQueueCountsAsAge(t *testing.T) {
	made := time.Now()
	var e encoder
	f := Frame{Node: "n", At: made, Endpoints: []Update{update("10.0.0.1:80", 1)}}
	f.Endpoints[0].Sample.At = made
	if m := e.encode(&f, 1, 0, made.Add(900*time.Millisecond)); m.Endpoints[0].AgeUs != 900e3 {
		t.Fatalf("age %d µs", m.Endpoints[0].AgeUs)
	}
}

func TestErrorsArrive(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
	at := socket(t)
	serving(t, s, at)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1"})
	c.Send(Frame{
		Err: "host engine is gone", Epoch: 4, GPUs: []telemetry.GPU{{ID: "GPU-1", Lost: true}},
		Endpoints: []Update{{
			Endpoint: netip.MustParseAddrPort("10.0.0.1:8000"), GPUs: []string{"GPU-1"}, Err: "connection refused",
			Sample: telemetry.Sample{At: time.Now(), Known: telemetry.HasCondition, Condition: telemetry.ConditionLost},
		}},
	})
	all := got.await(t, "error and GPU", atLeast(2))
	if all[0].Err == nil || all[0].Err.Error() != "connection refused" {
		t.Errorf("first %+v", all[0])
	}
	if all[1].Err != nil || all[1].Sample.Condition != telemetry.ConditionLost {
		t.Errorf("then %+v", all[1])
	}
	eventually(t, "answer", func() bool { return c.Stats().Answered == 1 })
	n := s.Nodes()
	if len(n) != 1 || n[0].Err != "host engine is gone" || n[0].Epoch != 4 || !n[0].Connected || n[0].Frames != 1 ||
		len(n[0].GPUs) != 1 || !n[0].GPUs[0].Lost || len(n[0].Endpoints) != 1 || n[0].Endpoints[0].Err != "connection refused" ||
		len(n[0].Endpoints[0].GPUs) != 1 {
		t.Errorf("nodes %+v", n)
	}
}

func TestAnswerNamesWhatIsNotTaken(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	scraped := pool("scraped", endpoint("10.0.0.3:8000", "n1"))
	scraped.Telemetry.Source = fleet.TelemetryScrape
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"), endpoint("10.0.0.2:8000", "n2"), endpoint("10.0.0.4:8000", "")), scraped})
	at := socket(t)
	serving(t, s, at)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1"})
	f := Frame{Endpoints: []Update{
		update("10.0.0.1:8000", 1), update("10.0.0.2:8000", 2), update("10.0.0.3:8000", 3), update("10.0.0.4:8000", 4),
	}}
	for i := range 10 {
		f.Endpoints = append(f.Endpoints, update(fmt.Sprintf("10.0.1.%d:8000", i), 0))
	}
	c.Send(f)
	eventually(t, "answer", func() bool { return c.Stats().Answered == 1 })
	refused := c.Stats().Refused
	if len(refused) != maxRefusals {
		t.Fatalf("refused %v", refused)
	}
	for i, want := range []Refusal{
		{"10.0.0.2:8000", `pool "a": it is on another node than "n1"`},
		{"10.0.0.3:8000", errUnknown.Error()},
		{"10.0.1.0:8000", errUnknown.Error()},
	} {
		if refused[i] != want {
			t.Errorf("refused %v, want %v", refused[i], want)
		}
	}
	all, _ := got.snapshot()
	if len(all) != 2 || all[0].Sample.Running != 1 || all[1].Sample.Running != 4 {
		t.Errorf("delivered %v", all)
	}
	if k := s.Counters(); k.Refused != 12 || k.Readings != 2 || k.Frames != 1 {
		t.Errorf("counters %+v", k)
	}
	if n := s.Nodes()[0]; len(n.Refused) != maxRefusals || len(n.Endpoints) != 2 {
		t.Errorf("node %+v", n)
	}
	// Once the configuration knows it, it is taken.
	s.SetPools([]fleet.Pool{pool("b", endpoint("10.0.0.3:8000", "n1"))})
	c.Send(Frame{Endpoints: []Update{update("10.0.0.3:8000", 5)}})
	all = got.await(t, "the new endpoint", atLeast(3))
	if all[2].Endpoint.Pool != "b" || all[2].Sample.Running != 5 {
		t.Errorf("delivered %v", all[2])
	}
}

func TestPoolsThatDisagreeAboutTheNodeAreToldApart(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1")), pool("b", endpoint("10.0.0.1:8000", "n2"))})
	at := socket(t)
	serving(t, s, at)
	for _, x := range []struct{ node, takes, refuses string }{{"n1", "a", "b"}, {"n2", "b", "a"}} {
		before, _ := got.snapshot()
		ack := exchange(t, rawStream(t, at), &pushv1.Frame{Node: x.node, Sequence: 1, Endpoints: []*pushv1.Endpoint{row("10.0.0.1:8000", 1)}})
		if r := ack.GetRefused(); len(r) != 1 || !strings.Contains(r[0].GetReason(), `"`+x.refuses+`"`) {
			t.Errorf("%s: refused %v", x.node, r)
		}
		if all, _ := got.snapshot(); len(all) != len(before)+1 || all[len(before)].Endpoint.Pool != x.takes {
			t.Errorf("%s: delivered %v", x.node, all[len(before):])
		}
	}
}

func TestEndpointWithoutNodeBelongsToWhoSpokeLast(t *testing.T) {
	now := time.Now()
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", ""))})
	tg := (*s.targets.Load())[netip.MustParseAddrPort("10.0.0.1:8000")][0]
	u := update("10.0.0.1:8000", 1)
	speak := func(node string, after time.Duration) error { return s.deliverTo(tg, node, &u, now.Add(after)) }
	if err := speak("n1", 0); err != nil {
		t.Fatal(err)
	}
	if err := speak("n2", claimTime-1); err == nil {
		t.Fatal("two nodes speak for one endpoint")
	}
	if err := speak("n1", claimTime-1); err != nil {
		t.Fatal(err)
	}
	if err := speak("n2", claimTime); err == nil {
		t.Fatal("a claim ended though its node spoke")
	}
	if err := speak("n2", 2*claimTime); err != nil {
		t.Fatal(err)
	}
}

func TestTimesOfAnEndpointNeverGoBack(t *testing.T) {
	var all []telemetry.Reading
	now := time.Now()
	s := NewServer(ServerOptions{Deliver: func(r telemetry.Reading) { all = append(all, r) }, Log: quietLog})
	pools := []fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))}
	s.SetPools(pools)
	for i, age := range []time.Duration{50, 300, 10, 20} {
		s.SetPools(pools) // keeps what is known of the endpoint
		tg := (*s.targets.Load())[netip.MustParseAddrPort("10.0.0.1:8000")][0]
		u := update("10.0.0.1:8000", float64(i))
		arrived := now.Add(time.Duration(i) * time.Millisecond)
		u.Sample.At = arrived.Add(-age * time.Millisecond)
		if err := s.deliverTo(tg, "n1", &u, arrived); err != nil {
			t.Fatal(err)
		}
		if i > 0 && all[i].Sample.At.Before(all[i-1].Sample.At) {
			t.Errorf("reading %d is %v before the one before it", i, all[i-1].Sample.At.Sub(all[i].Sample.At))
		}
	}
}

func TestNewerStreamReplacesTheOlder(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
	at := socket(t)
	serving(t, s, at)
	older, newer := rawStream(t, at), rawStream(t, at)
	frame := func(sequence uint64, running float32) *pushv1.Frame {
		return &pushv1.Frame{Node: "n1", Sequence: sequence, Endpoints: []*pushv1.Endpoint{row("10.0.0.1:8000", running)}}
	}
	exchange(t, older, frame(100, 1))
	exchange(t, newer, frame(1, 2)) // its sequence is its own
	_ = older.Send(frame(101, 3))
	for {
		if _, err := older.Recv(); err != nil {
			if status.Code(err) != codes.Aborted {
				t.Fatalf("older stream ended with %v", err)
			}
			break
		}
	}
	exchange(t, newer, frame(2, 4))
	all, _ := got.snapshot()
	if len(all) != 3 || all[1].Sample.Running != 2 || all[2].Sample.Running != 4 {
		t.Errorf("delivered %v", all)
	}
	if n := s.Nodes(); len(n) != 1 || !n[0].Connected || n[0].Frames != 3 {
		t.Errorf("nodes %+v", n)
	}
	if k := s.Counters(); k.StreamsReplaced != 1 || k.Streams != 2 {
		t.Errorf("counters %+v", k)
	}
}

func TestRefusedFramesDoNotEndTheStream(t *testing.T) {
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
	at := socket(t)
	serving(t, s, at)
	stream := rawStream(t, at)
	e := []*pushv1.Endpoint{row("10.0.0.1:8000", 1)}
	exchange(t, stream, &pushv1.Frame{Node: "n1", Sequence: 5, Endpoints: e})
	if ack := exchange(t, stream, &pushv1.Frame{Sequence: 5, Endpoints: e}); ack.GetError() != "sequence 5 after 5" {
		t.Errorf("answer %v", ack)
	}
	if ack := exchange(t, stream, &pushv1.Frame{Sequence: 6, Node: "n2", Endpoints: e}); ack.GetError() == "" {
		t.Errorf("answer %v", ack)
	}
	exchange(t, stream, &pushv1.Frame{Sequence: 7, Endpoints: e})
	if all, _ := got.snapshot(); len(all) != 2 {
		t.Errorf("delivered %v", all)
	}
	if k := s.Counters(); k.Frames != 2 || k.FramesRefused != 2 {
		t.Errorf("counters %+v", k)
	}
}

func TestFirstFrameWithoutNodeEndsTheStream(t *testing.T) {
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog})
	at := socket(t)
	serving(t, s, at)
	stream := rawStream(t, at)
	if err := stream.Send(&pushv1.Frame{Sequence: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Fatalf("got %v", err)
	}
}

func TestMessageOverTheLimitEndsTheStream(t *testing.T) {
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog})
	at := socket(t)
	serving(t, s, at)
	stream := rawStream(t, at)
	_ = stream.Send(&pushv1.Frame{Node: "n", Sequence: 1, Error: strings.Repeat("x", maxMessage)})
	if _, err := stream.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("got %v", err)
	}
}

// TestAgentThatReadsNoAnswersIsStopped sends far more frames than answers fit
// into any buffer: the server must not queue them.
func TestAgentThatReadsNoAnswersIsStopped(t *testing.T) {
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog})
	s.SetPools([]fleet.Pool{openPool()})
	at := socket(t)
	stop := serving(t, s, at)
	stream := rawStream(t, at)
	blocked := make(chan int, 1)
	go func() {
		i := 0
		for ; stream.Send(&pushv1.Frame{Node: "n1", Sequence: uint64(i + 1), Error: strings.Repeat("x", 200)}) == nil; i++ {
		}
		blocked <- i
	}()
	// It is blocked when a whole second goes by without a frame.
	last, since := uint64(0), time.Now()
	eventually(t, "the agent to be blocked", func() bool {
		if n := s.Counters().Frames; n != last {
			last, since = n, time.Now()
		}
		return last > 0 && time.Since(since) > time.Second
	})
	if another := exchange(t, rawStream(t, at), &pushv1.Frame{Node: "n2", Sequence: 1}); another.GetError() != "" {
		t.Errorf("another agent: %v", another)
	}
	stop()
	if n := <-blocked; n > 200_000 {
		t.Errorf("%d frames were accepted", n)
	}
}

func TestSlowServerGetsTheNewestFrames(t *testing.T) {
	const frames = 100
	got := newReadings()
	gate, entered := make(chan struct{}), make(chan struct{}, 1000)
	s := NewServer(ServerOptions{Log: quietLog, Deliver: func(r telemetry.Reading) {
		entered <- struct{}{}
		<-gate
		got.deliver(r)
	}})
	s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
	at := socket(t)
	serving(t, s, at)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1"})
	c.Send(Frame{Endpoints: []Update{update("10.0.0.1:8000", 0)}})
	<-entered
	for i := 1; i < frames; i++ {
		c.Send(Frame{Endpoints: []Update{update("10.0.0.1:8000", float64(i))}})
	}
	close(gate)
	all := got.await(t, "the newest frame", func(all []telemetry.Reading) bool {
		return len(all) > 0 && all[len(all)-1].Sample.Running == frames-1
	})
	// What was on the way, what the queue held, and nothing else.
	if len(all) > window+defaultQueue {
		t.Errorf("%d frames arrived, at most %d can", len(all), window+defaultQueue)
	}
	for i := 1; i < len(all); i++ {
		if all[i].Sample.Running <= all[i-1].Sample.Running {
			t.Errorf("frame %v after %v", all[i].Sample.Running, all[i-1].Sample.Running)
		}
	}
	stats := c.Stats()
	if stats.Dropped != uint64(frames-len(all)) {
		t.Errorf("%d dropped, %d of %d arrived", stats.Dropped, len(all), frames)
	}
	eventually(t, "the server to know", func() bool { return s.Counters().Dropped == stats.Dropped && s.Nodes()[0].Dropped == stats.Dropped })
}

func TestReconnectsAfterServerRestart(t *testing.T) {
	got := newReadings()
	newServer := func() *Server {
		s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
		s.SetPools([]fleet.Pool{pool("a", endpoint("10.0.0.1:8000", "n1"))})
		return s
	}
	at := socket(t)
	stop := serving(t, newServer(), at)
	c, _ := running(t, ClientOptions{Target: at, Node: "n1", Queue: 3})
	gpus := []telemetry.GPU{{ID: "GPU-1"}}
	c.Send(Frame{GPUs: gpus, Endpoints: []Update{update("10.0.0.1:8000", 1)}})
	got.await(t, "first frame", atLeast(1))
	eventually(t, "answer", func() bool { return c.Stats().Answered == 1 })
	stop()
	eventually(t, "the client to notice", func() bool { return !c.Stats().Connected })
	for i := range 20 {
		c.Send(Frame{GPUs: gpus, Endpoints: []Update{update("10.0.0.1:8000", float64(100+i))}})
	}
	if st := c.Stats(); st.Dropped != 17 || st.LastError == "" || st.Failures == 0 {
		t.Errorf("stats %+v", st)
	}
	s := newServer()
	serving(t, s, at)
	all := got.await(t, "the frames kept", atLeast(4))
	for i, r := range all[1:] {
		if r.Sample.Running != float64(117+i) {
			t.Errorf("frame %v", r.Sample.Running)
		}
	}
	eventually(t, "answers", func() bool { st := c.Stats(); return st.Connected && st.Connects == 2 && st.Answered == 4 })
	if n := s.Nodes(); len(n) != 1 || n[0].Dropped != 17 || len(n[0].GPUs) != 1 || n[0].GPUs[0].ID != "GPU-1" {
		t.Errorf("nodes %+v", n)
	}
}

func TestNodesThatLeftAreForgotten(t *testing.T) {
	now := time.Now()
	s := NewServer(ServerOptions{Log: quietLog, Deliver: func(telemetry.Reading) {}, Now: func() time.Time { return now }})
	s.SetPools([]fleet.Pool{openPool()})
	left := begin(t, s, "left")
	begin(t, s, "stays")
	left.end()
	now = now.Add(remembered)
	if n := s.Nodes(); len(n) != 2 || n[0].Connected || !n[1].Connected || n[0].Age != remembered {
		t.Errorf("nodes %+v", n)
	}
	now = now.Add(1)
	if n := s.Nodes(); len(n) != 1 || n[0].Name != "stays" {
		t.Errorf("nodes %+v", n)
	}
}

// begin starts a stream of a node, without a connection.
func begin(t *testing.T, s *Server, node string) *receiver {
	t.Helper()
	r := &receiver{server: s, decoder: decoder{node: node}}
	if err := r.begin(); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestDropsAreCountedOverRestartsOfTheAgent(t *testing.T) {
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: quietLog})
	s.SetPools([]fleet.Pool{openPool()})
	at := socket(t)
	serving(t, s, at)
	for _, x := range []struct{ dropped, total uint64 }{{7, 7}, {9, 9}, {2, 11}, {2, 11}} {
		exchange(t, rawStream(t, at), &pushv1.Frame{Node: "n", Sequence: 1, Dropped: x.dropped})
		if k := s.Counters().Dropped; k != x.total {
			t.Errorf("dropped %d, counted %d, want %d", x.dropped, k, x.total)
		}
	}
}

func TestClientOptionsAreChecked(t *testing.T) {
	tcp := func(host string) fleet.Address { return fleet.Address{Host: host} }
	for _, x := range []struct {
		o    ClientOptions
		want string
	}{
		{ClientOptions{Target: tcp("127.0.0.1:1")}, "node name is missing"},
		{ClientOptions{Target: tcp("127.0.0.1:1"), Node: "a\nb"}, "not printable"},
		{ClientOptions{Node: "n"}, "no address"},
		{ClientOptions{Node: "n", Target: tcp("10.0.0.1:1")}, "no TLS beyond loopback"},
		{ClientOptions{Node: "n", Target: fleet.Address{Path: "/x"}, TLS: &ClientTLS{}}, "TLS on a Unix socket"},
		{ClientOptions{Node: "n", Target: tcp("10.0.0.1:1"), TLS: &ClientTLS{Certificate: "/nowhere", Key: "/nowhere"}}, `load certificate "/nowhere"`},
		{ClientOptions{Node: "n", Target: tcp("127.0.0.1:1")}, ""},
		{ClientOptions{Node: "n", Target: tcp("[::1]:1")}, ""},
		{ClientOptions{Node: "n", Target: fleet.Address{Path: "/x"}}, ""},
		{ClientOptions{Node: "n", Target: fleet.Address{Host: "10.0.0.1:1", Plaintext: true}}, ""},
	} {
		_, err := NewClient(x.o)
		if x.want == "" && err != nil || x.want != "" && (err == nil || !strings.Contains(err.Error(), x.want)) {
			t.Errorf("%+v: got %v, want %q", x.o, err, x.want)
		}
	}
}

// TestManyNodesAtOnce lets agents, configuration and readers meet under the
// race detector.
func TestManyNodesAtOnce(t *testing.T) {
	const agents, frames = 12, 40
	got := newReadings()
	s := NewServer(ServerOptions{Deliver: got.deliver, Log: quietLog})
	p := pool("a")
	for i := range agents {
		p.Endpoints = append(p.Endpoints, endpoint(fmt.Sprintf("10.0.0.%d:8000", i), fmt.Sprint("n", i)))
	}
	s.SetPools([]fleet.Pool{p})
	at := socket(t)
	serving(t, s, at)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				s.SetPools([]fleet.Pool{p})
				_, _ = s.Nodes(), s.Counters()
			}
		}
	})
	for i := range agents {
		c, _ := running(t, ClientOptions{Target: at, Node: fmt.Sprint("n", i), Queue: frames})
		for j := range frames {
			c.Send(Frame{GPUs: []telemetry.GPU{{ID: fmt.Sprint("GPU-", j)}}, Endpoints: []Update{update(p.Endpoints[i].Address.String(), float64(j))}})
		}
	}
	all := got.await(t, "all frames", atLeast(agents*frames))
	close(stop)
	readers.Wait()
	last := map[fleet.EndpointKey]telemetry.Sample{}
	for _, r := range all {
		before, any := last[r.Endpoint]
		if any && (r.Sample.Running != before.Running+1 || r.Sample.At.Before(before.At)) {
			t.Fatalf("%v: %v after %v", r.Endpoint, r.Sample, before)
		}
		last[r.Endpoint] = r.Sample
	}
}
