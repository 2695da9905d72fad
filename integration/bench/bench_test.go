package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "child" {
		exit(runChild(os.Args[2], os.Args[3]))
	}
	goleak.VerifyTestMain(m)
}

func TestRequestsAreWhatTheRoutesExpect(t *testing.T) {
	for _, p := range pieces {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(p.request("127.0.0.1:1"))))
		if err != nil {
			t.Fatalf("%s: %v", p.name, err)
		}
		body, err := io.ReadAll(r.Body)
		var asked struct {
			MaxTokens int `json:"max_tokens"`
		}
		if err != nil || len(body) != p.body || json.Unmarshal(body, &asked) != nil || asked.MaxTokens != 64 {
			t.Errorf("%s: %d bytes of body, %v: %.80s…", p.name, len(body), err, body)
		}
		if declared := r.Header.Get(wire.HeaderMaxTokens); (declared != "") != (p.path == pathHeaders) {
			t.Errorf("%s on %s: header max_tokens %q", p.name, p.path, declared)
		}
		if !fleet.Generates(p.path) {
			t.Errorf("%s does not generate", p.path)
		}
	}
}

func TestEachSetupHasTheFiltersItNames(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:1")
	cfg, err := fleet.Parse("bench.yaml", []byte(configText("/run/bench", netip.MustParseAddrPort("127.0.0.1:2"), []netip.AddrPort{at})))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []without{{}, {extProc: true}, {logs: true}, {extProc: true, logs: true}} {
		l, err := envoy.BuildListener(cfg, cfg.Groups[0], at, envoy.Runtime{ExtProc: cfg.Serve.ExtProc, AccessLog: cfg.Serve.AccessLog})
		if err != nil {
			t.Fatal(err)
		}
		if l, err = w.strip(l); err != nil {
			t.Fatal(err)
		}
		m := &hcmv3.HttpConnectionManager{}
		if err := l.FilterChains[0].Filters[0].GetTypedConfig().UnmarshalTo(m); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{wire.AttributesKey, filterPeek} {
			if there := slices.ContainsFunc(m.HttpFilters, func(f *hcmv3.HttpFilter) bool { return f.Name == name }); there == w.extProc {
				t.Errorf("%+v: filter %s is there: %t", w, name, there)
			}
		}
		text := l.String()
		if logs := strings.Contains(text, wire.LogUpstream) || len(m.AccessLog) > 0; logs == w.logs {
			t.Errorf("%+v: logs: %t", w, logs)
		}
		if err := envoy.Validate(l); err != nil {
			t.Errorf("%+v: %v", w, err)
		}
	}
}

func TestLoadCountsEveryAnswer(t *testing.T) {
	u, err := startUpstreams(1)
	if err != nil {
		t.Fatal(err)
	}
	defer u.close()
	at := u.addresses[0].String()
	l := newLoad(at, pieces[0].request(at))
	defer l.close()
	for range 2 {
		r, err := l.run(500, 100*time.Millisecond)
		if err != nil || r.sent != 50 || r.failed != 0 || len(l.took) != 50 || r.p50 <= 0 || r.p99 < r.p50 {
			t.Errorf("%+v with %d latencies, %v", r, len(l.took), err)
		}
	}
}

func TestLoadTellsFailures(t *testing.T) {
	u, err := startUpstreams(1)
	if err != nil {
		t.Fatal(err)
	}
	at := u.addresses[0].String()
	l := newLoad(at, pieces[0].request(at))
	defer l.close()
	if _, err := l.run(100, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	u.close()
	if r, err := l.run(100, 50*time.Millisecond); err == nil && r.failed == 0 {
		t.Errorf("no failure although the server is gone: %+v", r)
	}
}

// The only connection hangs for a moment, so that later requests can't be sent
// when they are due: that wait is theirs.
func TestLatencyCountsFromWhenARequestWasDue(t *testing.T) {
	const stall, gap = 200 * time.Millisecond, 10 * time.Millisecond
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	var served sync.WaitGroup
	served.Go(func() {
		c, err := server.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		r := bufio.NewReader(c)
		for first := true; ; first = false {
			if _, err := readMessage(r); err != nil {
				return
			}
			if first {
				time.Sleep(stall)
			}
			if _, err := c.Write(answer); err != nil {
				return
			}
		}
	})
	at := server.Addr().String()
	l := newLoad(at, pieces[0].request(at))
	l.most = 1
	r, err := l.run(float64(time.Second/gap), 100*time.Millisecond)
	l.close()
	served.Wait()
	if err != nil || r.failed > 0 || len(l.took) != 10 {
		t.Fatalf("%+v with %d latencies, %v", r, len(l.took), err)
	}
	// The last of ten was due after 90 ms and could not be sent before 200 ms.
	if r.waited == 0 || r.carried() {
		t.Errorf("%d waited, carried: %t", r.waited, r.carried())
	}
	if least := stall - 9*gap; l.took[0] < least {
		t.Errorf("a latency of %v; each request waited for %v at least", l.took[0], least)
	}
}

func TestMessagesAreReadToTheirEnd(t *testing.T) {
	const messages = "HTTP/1.1 429 Too Many\r\nContent-Length: 3\r\n\r\nabc" + "POST / HTTP/1.1\r\nx: y\r\ncontent-length:0\r\n\r\n" +
		"HTTP/1.1 200 OK\r\nX-Route-Strategy: dynamic\r\ncontent-length: 1\r\n\r\na" + "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-route-strategy: legacy\r\n\r\n"
	r := bufio.NewReader(strings.NewReader(messages))
	for _, want := range []message{{status: 429}, {}, {status: 200, steered: true}, {status: 200}} {
		if m, err := readMessage(r); m != want || err != nil {
			t.Errorf("%+v, %v; want %+v", m, err, want)
		}
	}
	for _, bad := range []string{"", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc"} {
		if _, err := readMessage(bufio.NewReader(strings.NewReader(bad))); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestABarIsMissedOnlyByTheWholeInterval(t *testing.T) {
	b := bar{most: 1.1}
	for _, c := range []struct {
		low, high float64
		n         int
		want      string
	}{
		{0.9, 1.1, 7, "held"},
		{0.9, 1.1, 6, notMeasured},
		{0.9, 1.2, 7, "not missed (the interval reaches above)"},
		{1.11, 1.2, 7, "missed"},
		{0.9, 1.1, 4, notMeasured},
		{1.11, 1.2, 4, notMeasured},
		{0.9, 1.1, 0, notMeasured},
		{math.NaN(), math.NaN(), 7, notMeasured},
		{0.9, math.NaN(), 7, notMeasured},
		{0.9, math.Inf(1), 7, notMeasured},
		{math.Inf(-1), 0.9, 7, notMeasured},
	} {
		if got := b.verdict(interval{median: 1, low: c.low, high: c.high, n: c.n}, 7); got != c.want {
			t.Errorf("%v … %v of %d: %q, want %q", c.low, c.high, c.n, got, c.want)
		}
	}
	if got := (bar{}).verdict(interval{low: 5, high: 5, n: 7}, 7); got != "" {
		t.Errorf("no bar: %q", got)
	}
	for rounds, want := range map[int]int{1: 7, 7: 7, 9: 7, 14: 10, 15: 11} {
		if got := leastRounds(rounds); got != want {
			t.Errorf("of %d rounds: %d, want %d", rounds, got, want)
		}
	}
}

// TestBarsAreThose guards what is compared with what, and the bars: README quotes them.
func TestBarsAreThose(t *testing.T) {
	type row struct {
		over, under, less string
		most              float64
	}
	of := func(bars []bar) (out []row) {
		for _, b := range bars {
			out = append(out, row{b.over, b.under, b.less, b.most})
		}
		return out
	}
	if got, want := of(cpuBars), []row{
		{"fairlead", "stock", "", 0.9},
		{"fairlead", "tuned", "", 0.9},
		{"fairlead-logs", "stock-logs", "", 1.1},
		{"fairlead-logs", "tuned-logs", "", 1.1},
		{"fairlead-body", "stock-body", "", 0},
	}; !slices.Equal(got, want) {
		t.Errorf("CPU: %v, want %v", got, want)
	}
	if got, want := of(latencyBars), []row{
		{"fairlead", "stock", "plain", 1.05},
		{"fairlead", "tuned", "plain", 1.05},
		{"fairlead-logs", "stock-logs", "plain", 1.15},
		{"fairlead-logs", "tuned-logs", "plain", 1.15},
		{"fairlead-logs", "stock", "plain", 1.15},
		{"fairlead-body", "stock-body", "plain", 0},
	}; !slices.Equal(got, want) {
		t.Errorf("latency: %v, want %v", got, want)
	}
}

// TestBothSidesOfABarHaveOneConfiguration: the same requests on the same route, through
// an Envoy that logs in both or in neither; one bar says that it is of another kind.
func TestBothSidesOfABarHaveOneConfiguration(t *testing.T) {
	for _, b := range slices.Concat(cpuBars, latencyBars) {
		over, under := named(t, b.over), named(t, b.under)
		if !over.setup.steers() || under.setup.steers() || under.setup == plain {
			t.Errorf("%s: %s over %s", b.title, over.setup, under.setup)
		}
		logs := over.setup.logs() == under.setup.logs() || strings.HasSuffix(b.title, "with none")
		if !logs || over.path != under.path || over.body != under.body {
			t.Errorf("%s: %+v over %+v", b.title, over, under)
		}
		if b.less != "" && named(t, b.less).setup != plain {
			t.Errorf("%s: less %s", b.title, b.less)
		}
	}
}

// named is the piece of a name.
func named(t *testing.T, name string) piece {
	t.Helper()
	i := slices.IndexFunc(pieces, func(p piece) bool { return p.name == name })
	if i < 0 {
		t.Fatalf("there is no piece %q", name)
	}
	return pieces[i]
}

// TestNetCPUPerRequest: of 1,000 requests at 400 a second, each has a 400th of what the
// server uses in a second without any.
func TestNetCPUPerRequest(t *testing.T) {
	s := result{sent: 1000, p50: time.Millisecond, p99: 2 * time.Millisecond}.sample(300*time.Millisecond, 500*time.Millisecond)
	s.net = s.netOf(0.02, 400)
	want := sample{server: 300 * time.Microsecond, envoy: 500 * time.Microsecond, net: 250 * time.Microsecond, p50: time.Millisecond, p99: 2 * time.Millisecond}
	if s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	if cpuOf(s) != float64(want.net) || grossOf(s) != float64(want.server) || p50Of(s) != float64(want.p50) {
		t.Errorf("net %v, gross %v, p50 %v of %+v", cpuOf(s), grossOf(s), p50Of(s), s)
	}
}

// TestTableTellsRatiosAndBars looks at whole lines of a table of seven equal rounds.
func TestTableTellsRatiosAndBars(t *testing.T) {
	tr := through{samples: map[cell][]sample{}, idle: map[setup][]float64{}}
	for name, s := range map[string]sample{
		"plain": {p50: 100}, "fairlead": {server: 900, net: 800, p50: 195}, "stock": {server: 1100, net: 1000, p50: 200},
		"fairlead-logs": {server: 1200, net: 1150, p50: 220}, "stock-logs": {server: 1000, net: 1000, p50: 180},
	} {
		tr.samples[cell{name, 400}] = slices.Repeat([]sample{s}, 7)
	}
	text := (&table{
		options: options{rounds: 7, searches: 3, rates: []float64{400}}, through: tr, commit: "abc1234", command: "go run .",
		highest: map[string][]float64{"plain": {0, 2250, 1500}, "stock": {0, 0, 1500}},
	}).markdown()
	for _, want := range []string{
		"`integration/bench` of commit abc1234 on ",
		"| CPU: full decision, headers only, over the stock server | 400 | ≤ 0.90 | 0.80 (0.80 … 0.80) | 7 of 7 | held | 0.82 (0.82 … 0.82) | 7 of 7 | held |",
		"over the stock server, which handles no logs | 400 | ≤ 1.10 | 1.15 (1.15 … 1.15) | 7 of 7 | missed | 1.20 (1.20 … 1.20) | 7 of 7 | missed |",
		"| added p50: headers only, over the stock server | 400 | ≤ 1.05 | 0.95 (0.95 … 0.95) | 7 of 7 | held |",
		"over the stock server, Envoy logging in both | 400 | ≤ 1.15 | 1.50 (1.50 … 1.50) | 7 of 7 | missed |",
		"| no ext_proc | 1500 | < 400 … 2250 |",
		"| stock ext_proc, empty answer | < 400 | < 400 … 1500 |",
		"Not searched: stock, GC tuned; ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestCommitIsUnknownOutsideACheckout(t *testing.T) {
	if got := commitOf(t.Context(), t.TempDir()); got != "unknown" {
		t.Errorf("%q", got)
	}
	dir := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-c", "user.name=x", "-c", "user.email=x@x.example"}, args...)...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	git("init", "-q")
	git("commit", "-q", "--allow-empty", "-m", "first")
	if got := commitOf(t.Context(), dir); !regexp.MustCompile("^[0-9a-f]{7,}$").MatchString(got) {
		t.Errorf("%q is no commit", got)
	}
}

func TestRatiosAreTakenWithinARound(t *testing.T) {
	tr := through{samples: map[cell][]sample{
		{"plain", 1}: {{p50: 100}, {p50: 200}, {p50: 300}},
		{"a", 1}:     {{p50: 130}, {p50: 240}, {p50: 310}},
		{"b", 1}:     {{p50: 120}, {p50: 220}, {p50: 305}},
	}}
	if got := tr.ratio("a", "b", "plain", 1, p50Of); got.low != 1.5 || got.median != 2 || got.high != 2 || got.n != 3 {
		t.Errorf("%+v", got)
	}
}

func TestRoundsThatSayNothingAreLeftOut(t *testing.T) {
	const bad = "it failed"
	tr := through{samples: map[cell][]sample{
		{"plain", 1}: {{p50: 100}, {p50: 100}, {p50: 100}, {p50: 100}, {p50: 100}, {p50: 100}, {p50: 100, invalid: bad}},
		{"a", 1}:     {{p50: 130}, {p50: 130}, {p50: 130}, {p50: 90}, {p50: 130, invalid: bad}, {p50: 130}, {p50: 130}},
		{"b", 1}:     {{p50: 110}, {p50: 100}, {p50: 80}, {p50: 110}, {p50: 110}, {p50: 110, invalid: bad}, {p50: 110}},
	}}
	// Left over is the first. Of the others a side isn't above plain, or a run
	// doesn't count.
	got := tr.ratio("a", "b", "plain", 1, p50Of)
	if got.n != 1 || got.low != 3 || got.high != 3 {
		t.Errorf("%+v", got)
	}
	if v := (bar{most: 1e9}).verdict(got, 7); v != notMeasured {
		t.Errorf("verdict %q", v)
	}
	if got := tr.of("a", 1, p50Of); len(got) != 6 {
		t.Errorf("%v", got)
	}
	if err := tr.whatFailed(); err == nil || !strings.Contains(err.Error(), bad) {
		t.Errorf("%v", err)
	}
	if got := tr.ratio("a", "nothing", "plain", 1, p50Of); got.n != 0 || ratio(got) != "–" {
		t.Errorf("of nothing: %+v", got)
	}
	if got := tr.ratio("a", "b", "nothing", 1, p50Of); got.n != 0 {
		t.Errorf("less nothing: %+v", got)
	}
}

// A server that costs nothing in the noise: a table of such rounds must not say
// that a bar is held.
func TestATableOfNoiseHoldsNothing(t *testing.T) {
	tr := through{samples: map[cell][]sample{}, idle: map[setup][]float64{}}
	for range 7 {
		for _, p := range pieces {
			c := cell{p.name, 400}
			tr.samples[c] = append(tr.samples[c], sample{p50: 100})
		}
	}
	text := (&table{options: options{rounds: 7, rates: []float64{400}}, through: tr}).markdown()
	if n := strings.Count(text, "| "+notMeasured+" |"); n != 2*len(cpuBars)+len(latencyBars) {
		t.Errorf("%d verdicts of %q in\n%s", n, notMeasured, text)
	}
	if strings.Contains(text, "| held") || strings.Contains(text, "NaN") {
		t.Error(text)
	}
}

func TestOnlyDecidedRequestsCount(t *testing.T) {
	piece := func(name string) piece {
		return pieces[slices.IndexFunc(pieces, func(p piece) bool { return p.name == name })]
	}
	good := tally{streams: 50, answers: 50}
	for _, c := range []struct {
		name, piece string
		r           result
		t           tally
		want        string
	}{
		{"decided", "fairlead", result{sent: 50, steered: 50}, good, ""},
		{"answered", "stock", result{sent: 50}, good, ""},
		{"several answers on a stream", "fairlead-body", result{sent: 50, steered: 50}, tally{streams: 50, answers: 100}, ""},
		{"nothing to decide", "plain", result{sent: 50}, tally{}, ""},
		{"nothing sent", "plain", result{}, tally{}, "nothing was sent"},
		{"a failure", "stock", result{sent: 50, failed: 1}, good, "1 of 50 requests failed: status 500"},
		{"one passed", "stock", result{sent: 50}, tally{streams: 50, answers: 50, passed: 1}, "passed after their stream failed"},
		{"one timed out", "stock", result{sent: 50}, tally{streams: 50, answers: 50, timeouts: 1}, "had no answer of the server in time"},
		{"one was not asked about", "stock", result{sent: 50}, tally{streams: 49, answers: 50}, "49 ext_proc streams for 50 requests"},
		{"somebody else asked", "stock", result{sent: 50}, tally{streams: 51, answers: 51}, "51 ext_proc streams for 50 requests"},
		{"asked although plain", "plain", result{sent: 50}, good, "50 ext_proc streams for 50 requests"},
		{"one stream ended without an answer", "stock", result{sent: 50}, tally{streams: 50, answers: 49}, "49 answers on 50 ext_proc streams"},
		{"one took the default route", "fairlead", result{sent: 50, steered: 49}, good, "49 of 50 requests took a decision's route, want 50"},
		{"steered by the stock server", "tuned", result{sent: 50, steered: 1}, good, "want 0"},
		{"took too long", "stock", result{sent: 50, planned: time.Second, took: 1300 * time.Millisecond}, good, "did not carry the rate: 1.3s instead of 1s"},
		{"took a little longer", "stock", result{sent: 50, planned: time.Second, took: 1200 * time.Millisecond}, good, ""},
		{"a request waited", "stock", result{sent: 50, waited: 1}, good, "1 of 50 requests waited for a connection"},
		{"logs dropped", "fairlead-logs", result{sent: 50, steered: 50}, tally{streams: 50, answers: 50, dropped: 2}, "dropped 2 access-log entries"},
	} {
		got := piece(c.piece).audit(c.r, c.t, "status 500")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// Envoy lets requests pass when its server is gone: all of them are answered with
// 200, and faster than before.
func TestARunWithoutItsServerDoesNotCount(t *testing.T) {
	w, err := newWorld(t.Context(), []setup{plain, stockBare, fairleadBare})
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	const rate, each = 100, 300 * time.Millisecond
	measure := func(name string) string {
		t.Helper()
		s, err := w.measure(pieces[slices.IndexFunc(pieces, func(p piece) bool { return p.name == name })], rate, each)
		if err != nil {
			t.Fatal(err)
		}
		return s.invalid
	}
	for _, name := range []string{"plain", "stock", "fairlead", "fairlead-body"} {
		if why := measure(name); why != "" {
			t.Errorf("%s: %s", name, why)
		}
	}
	for _, s := range []setup{stockBare, fairleadBare} {
		if err := w.servers[s].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = w.servers[s].cmd.Process.Signal(syscall.SIGCONT) }()
		l := w.load(piece{name: string(s), setup: s, path: pathHeaders, body: smallBody})
		before, err := w.sidecars[s].tally()
		if err != nil {
			t.Fatal(err)
		}
		r, err := l.run(rate, each)
		if err != nil {
			t.Fatal(err)
		}
		after, err := w.sidecars[s].tally()
		if err != nil {
			t.Fatal(err)
		}
		why := piece{setup: s}.audit(r, after.since(before), l.reason())
		if r.failed > 0 || why == "" {
			t.Errorf("%s stands still: %+v, %+v, %q", s, r, after.since(before), why)
		}
		t.Logf("%s stands still: %s", s, why)
	}
}

func TestCountersOfEnvoyAreRead(t *testing.T) {
	const text = "access_logs.grpc_access_log.logs_dropped: 2\naccess_logs.grpc_access_log.logs_written: 9\n" +
		"http.a.ext_proc.failure_mode_allowed: 3\nhttp.a.ext_proc.message_timeouts: 4\nhttp.a.ext_proc.streams_started: 5\n" +
		"http.b.ext_proc.streams_started: 6\nhttp.a.ext_proc.stream_msgs_received: 7\nhttp.a.ext_proc.streams_closed: 1\n"
	got, err := parseTally(text)
	if want := (tally{streams: 11, answers: 7, passed: 3, timeouts: 4, dropped: 2}); got != want || err != nil {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	if d := got.since(tally{1, 2, 3, 4, 5}); d != (tally{10, 5, 0, 0, -3}) {
		t.Errorf("difference %+v", d)
	}
	if _, err := parseTally("http.a.ext_proc.streams_started: many\n"); err == nil {
		t.Error("no error")
	}
}

func TestServersSetTheirOwnCollectors(t *testing.T) {
	got := collectorsOwn([]string{"GOGC=1", "HOME=/", "GOMEMLIMIT=1GiB", "GOGCX=1"})
	if !slices.Equal(got, []string{"HOME=/", "GOGCX=1"}) {
		t.Errorf("%q", got)
	}
}
