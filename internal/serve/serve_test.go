package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/xds"
	"github.com/fairlead-proxy/fairlead/xds/rollout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testConfig is a config with sockets of its own and one pool of three
// endpoints.
func testConfig(t *testing.T) *fleet.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "fl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg, err := fleet.Parse("test.yaml", fmt.Appendf(nil, `apiVersion: fairlead/v1alpha1
kind: Fairlead
serve: { xds: "unix:%[1]s/xds", extproc: "unix:%[1]s/ep", accessLog: "unix:%[1]s/als", admin: 127.0.0.1:9999, stateDir: %[1]s/state }
groups: [ { name: edge, listener: { address: 127.0.0.1:10000 }, routes: [chat] } ]
pools:
  - name: gpu
    maxInFlight: 4
    telemetry: { source: scrape }
    endpoints: [ { name: g1, address: 127.0.0.1:1001 }, { name: g2, address: 127.0.0.1:1002 }, { name: g3, address: 127.0.0.1:1003 } ]
  - { name: spare, endpoints: [ { name: s1, address: 127.0.0.1:1004 } ] }
routes:
  - { name: chat, match: { prefix: /v1/ }, dialect: openai, split: [ { pool: spare, weight: 0 }, { pool: gpu, weight: 1 } ] }
`, dir))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Serve.Admin.Host = "127.0.0.1:0"
	return cfg
}

func TestServerRunsAndEndsInOrder(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.readiness(); err == nil {
		t.Error("ready before Run")
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	if err := s.SetSplit("chat", map[string]uint32{"spare": 3}); err != nil {
		t.Fatal(err)
	}
	// A second serve in the same folder, whose config would end that weight.
	other := *s.config.Load()
	other.Routes = slices.Clone(other.Routes)
	other.Routes[0].Split = fleet.Split{{Pool: "spare", Weight: 1}, {Pool: "gpu", Weight: 1}}
	second, err := New(Options{Config: &other})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Listen(); err == nil || !strings.Contains(err.Error(), "in use by another serve") {
		t.Errorf("a second serve in the same state folder: %v", err)
	}
	if kept, err := rollout.NewStore(s.config.Load().Serve.StateDir).Load(); err != nil || len(kept.Routes()) != 1 {
		t.Errorf("the second serve touched the first one's weights: %v, %v", kept.Routes(), err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	deadline := time.Now().Add(20 * time.Second)
	for s.readiness() != nil || s.Fleet().Tick < 3 {
		if time.Now().After(deadline) {
			t.Fatal("not ready, or no ticks")
		}
		time.Sleep(5 * time.Millisecond)
	}
	if f := s.Fleet(); len(f.Pools) != 2 || f.Plan == "" || f.Pools[0].Endpoints[0].Share != 1.0/3 {
		t.Errorf("fleet: %+v", f)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := s.readiness(); err == nil {
		t.Error("ready after the end")
	}
	if err := second.Listen(); err != nil {
		t.Errorf("after the first has ended: %v", err)
	}
	second.closeListeners()
}

func TestListenNamesWhatIsInUse(t *testing.T) {
	cfg := testConfig(t)
	taken, err := net.Listen("unix", cfg.Serve.ExtProc.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Listen()
	if err == nil || !strings.Contains(err.Error(), "serve.extproc") || !strings.Contains(err.Error(), cfg.Serve.ExtProc.Path) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("error: %v", err)
	}
	// What was bound before is free again.
	again, err := net.Listen("unix", cfg.Serve.XDS.Path)
	if err != nil {
		t.Fatalf("xds socket is still held: %v", err)
	}
	_ = again.Close()
}

func TestListenReplacesALeftSocketAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, "left")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: left, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	got, err := listen("x", fleet.Address{Path: left})
	if err != nil {
		t.Fatalf("a socket that nobody answers on: %v", err)
	}
	info, err := os.Stat(left)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	_ = got.Close()

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen("x", fleet.Address{Path: file}); err == nil {
		t.Error("a plain file was replaced by a socket")
	}
	if kept, _ := os.ReadFile(file); string(kept) != "keep" {
		t.Errorf("the file holds %q", kept)
	}
}

func TestReconfigureKeepsTheProcessAndRefusesServe(t *testing.T) {
	cfg := testConfig(t)
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	other := *cfg
	other.Serve.Shard, other.Serve.Redis = 7, &fleet.Redis{Address: "10.0.0.9:6379"}
	if err := s.Reconfigure(&other); !errors.Is(err, errRestart) || !strings.HasPrefix(err.Error(), "serve.shard, serve.redis: ") {
		t.Errorf("a change under serve: %v", err)
	}
	smaller := *cfg
	smaller.Pools = append([]fleet.Pool(nil), cfg.Pools...)
	smaller.Pools[0].Endpoints = cfg.Pools[0].Endpoints[:2]
	if err := s.Reconfigure(&smaller); err != nil {
		t.Fatal(err)
	}
	s.step(time.Now())
	if n := len(s.Fleet().Pools[0].Endpoints); n != 2 {
		t.Errorf("%d endpoints after one was removed, want 2", n)
	}
}

func TestSplitsByHandMoveThePlanToo(t *testing.T) {
	cfg := testConfig(t)
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	decide := func(arm string) plan.Decision {
		t.Helper()
		s.step(time.Now())
		p := s.plan.Load()
		route, ok := p.Route("chat")
		pool, known := p.Pool(arm)
		if !ok || !known {
			t.Fatal("route or pool is not in the plan")
		}
		return p.Decide(plan.Class{Route: route, Arm: pool, Strategy: fleet.StrategyDynamic, Generates: true}, 1, s.ledger)
	}
	if d := decide("gpu"); d.Action != plan.ActionSteer || d.N != 2 {
		t.Errorf("with all weight on gpu: %+v", d)
	}
	if err := s.SetSplit("chat", map[string]uint32{"gpu": 0, "spare": 5}); err != nil {
		t.Fatal(err)
	}
	if d := decide("spare"); d.Action != plan.ActionSteer || s.plan.Load().PoolName(d.Arm) != "spare" {
		t.Errorf("with all weight on spare: %+v", d)
	}
	if got := s.Splits()[0]; !got.ByHand || got.Effective[0].BasisPoints != 10_000 || got.File[1].BasisPoints != 10_000 {
		t.Errorf("splits: %+v", got)
	}
	if err := s.SetSplit("chat", map[string]uint32{"gpu": 0, "spare": 0}); err == nil {
		t.Error("all weights 0 were taken")
	}
	if err := s.SetSplit("nope", map[string]uint32{"gpu": 1}); err == nil || !strings.Contains(err.Error(), "chat") {
		t.Errorf("unknown route: %v", err)
	}
	if err := s.ClearSplit("chat"); err != nil || s.Splits()[0].ByHand {
		t.Errorf("clear: %v, %+v", err, s.Splits()[0])
	}
}

func TestReadingsBeyondTheBoundDropTheOldest(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	key := fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}
	for i := range maxReadings + 10 {
		s.scoring.read(telemetry.Reading{Endpoint: key, Sample: telemetry.Sample{
			At: time.Now(), Known: telemetry.HasKVUsage, KVUsage: float64(i),
		}})
	}
	if n := len(s.scoring.readings); n != maxReadings {
		t.Errorf("%d readings wait, want %d", n, maxReadings)
	}
	if last := s.scoring.readings[maxReadings-1].Sample.KVUsage; last != maxReadings+9 {
		t.Errorf("the newest reading is %v", last)
	}
	s.scoring.read(telemetry.Reading{Endpoint: key, Err: errors.New("refused")})
	if n := len(s.scoring.readings); n != maxReadings {
		t.Errorf("a failed reading was queued: %d", n)
	}
}

func TestWatchSeesRenamesAndSwappedLinks(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("v1", "1")
	write("v2", "2")
	link := filepath.Join(dir, "config.yaml")
	if err := os.Symlink("v1", link); err != nil {
		t.Fatal(err)
	}
	changed := make(chan struct{}, 100)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		watchFile(ctx, link, slog.New(slog.DiscardHandler), func() { changed <- struct{}{} })
	}()
	await := func(what string, do func() error) {
		t.Helper()
		// The watch may begin after the change: change until it is seen.
		deadline := time.After(20 * time.Second)
		for {
			if err := do(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-changed:
				return
			case <-deadline:
				t.Fatalf("%s was not seen", what)
			case <-time.After(3 * settle):
			}
		}
	}
	swaps := 0
	await("a swapped link", func() error {
		next := link + ".next"
		_ = os.Remove(next)
		swaps++
		if err := os.Symlink([]string{"v1", "v2"}[swaps%2], next); err != nil {
			return err
		}
		return os.Rename(next, link)
	})
	await("a file renamed into place", func() error {
		write("tmp", "3 "+time.Now().String())
		return os.Rename(filepath.Join(dir, "tmp"), link)
	})
	await("a write in place", func() error { write("config.yaml", "4 "+time.Now().String()); return nil })
	// Noise in the folder neither hides a change nor makes one.
	noise, quiet := context.WithCancel(ctx)
	noisy := make(chan struct{})
	go func() {
		defer close(noisy)
		for noise.Err() == nil {
			_ = os.WriteFile(filepath.Join(dir, "log"), []byte(time.Now().String()), 0o600)
			time.Sleep(settle / 5)
		}
	}()
	await("a change beside a busy log file", func() error { write("config.yaml", "5 "+time.Now().String()); return nil })
	quiet()
	<-noisy
	// The folder is replaced: no notice comes, but it is looked at.
	if err := os.Rename(dir, dir+".old"); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir + ".old")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for len(changed) > 0 {
		<-changed
	}
	await("a file in a new folder of the same name", func() error { write("config.yaml", "6 "+time.Now().String()); return nil })
	stop()
	<-ended
}

func TestWatchGoesOnWhereTheFolderIsMissing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	changed := make(chan struct{}, 10)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		watchFile(ctx, filepath.Join(dir, "config.yaml"), slog.New(slog.DiscardHandler), func() { changed <- struct{}{} })
	}()
	time.Sleep(settle) // let it take its first look; a later one only makes the test pass too
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(20 * time.Second):
		t.Error("not seen")
	}
	stop()
	<-ended
}

// TestOutcomesReachStatesAndRows feeds what Envoy logs of a server that is gone.
func TestOutcomesReachStatesAndRows(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	key := fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}
	now := time.Now()
	for i := range 3 {
		s.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, ID: fmt.Sprint(i), Attempt: 1, Endpoint: key, Cause: fleet.CauseConnectFailed})
	}
	s.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, ID: "4", Attempt: 1, HeaderTime: 30 * time.Millisecond, Cause: fleet.CauseOK,
		Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1002")}})
	now = now.Add(bucket)
	s.step(now)
	rows := s.Fleet().Pools[0].Endpoints
	if rows[0].State != "ejected" || rows[0].Why != "refused" || rows[0].Share != 0 || rows[0].Errors5s != 3 {
		t.Errorf("three refused connections in a row: %+v", rows[0])
	}
	if rows[1].HeaderMillis != 30 || rows[1].Attempts5s != 1 || rows[2].HeaderMillis != -1 {
		t.Errorf("header times: %+v, %+v", rows[1], rows[2])
	}
}

// TestReadingsReachShares feeds one loaded engine beside two idle ones.
func TestReadingsReachShares(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for tick := range 4 {
		now = now.Add(bucket)
		for port, kv := range map[uint16]float64{1001: 0.65, 1002: 0.1, 1003: 0.1} {
			s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)},
				Sample: telemetry.Sample{At: now, Known: telemetry.HasKVUsage | telemetry.HasKVTokens | telemetry.HasRunning | telemetry.HasGenerationTokens,
					KVUsage: kv, KVTokens: 1000, Running: 2, GenerationTokens: float64(tick)}})
		}
		s.step(now)
	}
	rows := s.Fleet().Pools[0].Endpoints
	if !(rows[0].Share > 0.05 && rows[0].Share < 0.30 && rows[1].Share > 0.34) || !rows[0].Known || rows[0].KVUsage != 0.65 {
		t.Errorf("shares follow the load smoothly: %+v", rows)
	}
	// 1000 tokens, 65 % used: 350 free are too few for the largest level.
	p := s.plan.Load()
	route, _ := p.Route("chat")
	arm, _ := p.Pool("gpu")
	for seed := range uint64(200) {
		d := p.Decide(plan.Class{Route: route, Arm: arm, Level: fleet.LevelOf(400), Strategy: fleet.StrategyDynamic, Generates: true}, seed, s.ledger)
		if p.AddressText(d.Picks[0]) == "127.0.0.1:1001" {
			t.Fatal("a request was sent where it does not fit")
		}
	}
	s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}, Err: errors.New("connection refused")})
	s.step(now.Add(bucket))
	if got := s.Fleet().Pools[0].Endpoints[0].TelemetryError; got != "connection refused" {
		t.Errorf("telemetry error: %q", got)
	}
}

// TestFrozenNumbersAreAnError that people see, though their page answers.
func TestFrozenNumbersAreAnError(t *testing.T) {
	for _, row := range []struct {
		name         string
		quiet, moves bool
		want         string
	}{
		{"the numbers stand still", false, false, "page answers, numbers unchanged for 3 s"},
		{"the numbers move", false, true, ""},
		{"none come any more", true, false, ""},
	} {
		s, err := New(Options{Config: testConfig(t)})
		if err != nil {
			t.Fatal(err)
		}
		now := time.Now()
		for tick := range 31 {
			sample := telemetry.Sample{At: now, Known: telemetry.HasRunning | telemetry.HasGenerationTokens, Running: 2, GenerationTokens: 7}
			if row.moves {
				sample.GenerationTokens = float64(tick)
			}
			if tick == 0 || !row.quiet {
				s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}, Sample: sample})
			}
			s.step(now)
			now = now.Add(100 * time.Millisecond)
		}
		if got := s.Fleet().Pools[0].Endpoints[0].TelemetryError; got != row.want {
			t.Errorf("%s: telemetry error %q; want %q", row.name, got, row.want)
		}
	}
}

// TestForeignWorkTakesRoom: an engine that runs requests that the ledger does
// not know, as after a restart of serve, gets fewer of ours.
func TestForeignWorkTakesRoom(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)}) // maxInFlight 4
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	tick := func(running float64) {
		now = now.Add(bucket)
		for _, port := range []uint16{1001, 1002, 1003} {
			s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)},
				Sample: telemetry.Sample{At: now, Known: telemetry.HasRunning | telemetry.HasGenerationTokens, Running: running, GenerationTokens: float64(now.UnixMilli())}})
		}
		s.step(now)
	}
	room := func() (n int) {
		p := s.plan.Load()
		route, _ := p.Route("chat")
		arm, _ := p.Pool("gpu")
		live := &counted{}
		for seed := range uint64(100) {
			d := p.Decide(plan.Class{Route: route, Arm: arm, Strategy: fleet.StrategyDynamic, Generates: true}, seed, live)
			if d.Action == plan.ActionSteer && d.Arm == arm {
				live.n[s.ledger.Slot(fleet.EndpointKey{Pool: "gpu", Address: p.Address(d.Picks[0])})]++
				n++
			}
		}
		return n
	}
	tick(3)
	tick(3)
	if n := room(); n != 12 {
		t.Errorf("room for %d after two readings, want 12: one tick of delay is no foreign work", n)
	}
	tick(3)
	if n := room(); n != 3 {
		t.Errorf("room for %d beside three unknown requests each, want 3", n)
	}
	tick(9)
	tick(9)
	tick(9)
	if n := room(); n != 3 {
		t.Errorf("room for %d beside nine unknown requests each, want one each", n)
	}
	tick(0)
	if n := room(); n != 12 {
		t.Errorf("room for %d once they are gone, want 12", n)
	}
}

// TestASilentServerIsAtRisk: it takes requests and does nothing, and its own
// numbers say that it is idle.
func TestASilentServerIsAtRisk(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	key := fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}
	for i := range 8 {
		s.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: fmt.Sprintf("1718924567123-007-%04d", i), Attempt: 1, Endpoint: key, At: time.Now()})
	}
	now := time.Now()
	for range 6 {
		now = now.Add(bucket)
		for _, port := range []uint16{1001, 1002, 1003} {
			s.scoring.read(telemetry.Reading{Endpoint: fleet.EndpointKey{Pool: "gpu", Address: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)},
				Sample: telemetry.Sample{At: now, Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting}})
		}
		s.step(now)
	}
	rows := s.Fleet().Pools[0].Endpoints
	if rows[0].Risk < 0.82 || rows[0].Share > 0.05 || rows[1].Risk > 0.1 {
		t.Errorf("silent: %+v\nidle: %+v", rows[0], rows[1])
	}
}

// counted is a live count of its own.
type counted struct{ n [8]int32 }

func (c *counted) InFlight(slot uint32) int32 { return c.n[slot] }

// TestReconfigureScrapesNewEndpoints adds an endpoint whose page answers.
func TestReconfigureScrapesNewEndpoints(t *testing.T) {
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_waiting{engine=\"0\"} 0\n")
	}))
	defer page.Close()
	cfg := testConfig(t)
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	larger := *cfg
	larger.Pools = append([]fleet.Pool(nil), cfg.Pools...)
	larger.Pools[0].Endpoints = append(slices.Clone(cfg.Pools[0].Endpoints), fleet.Endpoint{
		Name: "new", Address: netip.MustParseAddrPort(page.Listener.Addr().String()), Capacity: 1,
	})
	if err := s.Reconfigure(&larger); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		rows := s.Fleet().Pools[0].Endpoints
		if len(rows) == 4 && rows[3].Known && rows[3].KVUsage == 0.5 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the new endpoint is not scraped: %+v", rows)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if got := s.config.Load(); got != &larger {
		t.Error("the old config is still the one in force")
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestTrustFollowsTheListener(t *testing.T) {
	cfg := testConfig(t)
	cfg.Groups[0].Listener.TrustedCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	for source, want := range map[string]bool{"10.1.2.3:99": true, "[::ffff:10.1.2.3]:99": true, "192.168.0.1:99": false, "": false, "x": false} {
		if s.trusted(source) != want {
			t.Errorf("%q trusted: %v, want %v", source, !want, want)
		}
	}
}

func TestASidecarIsDeadOnlyWhenAllItsStreamsEnded(t *testing.T) {
	p := newPresence()
	p.xdsBegan("a")
	p.logsBegan("a")
	p.logsBegan("a") // a second worker
	if last, dead := p.logsEnded("a"); last || dead {
		t.Error("gone with a log stream and its xDS stream up")
	}
	if last, dead := p.logsEnded("a"); !last || dead {
		t.Error("dead with its xDS stream up")
	}
	p.logsBegan("a")
	p.xdsBegan("a") // reconnected before the old stream was seen to end
	for range 2 {
		if p.xdsEnded("a") {
			t.Error("dead with its logs up")
		}
	}
	p.logsBegan("a") // a new stream, before the old one's end is told
	if some, all := p.blind(); some || all {
		t.Errorf("blind with all logs there: %v, %v", some, all)
	}
	p.xdsBegan("b")
	if some, all := p.blind(); !some || all {
		t.Errorf("one of two logs away: %v, %v", some, all)
	}
	if last, _ := p.logsEnded("a"); last {
		t.Error("without logs while a stream is up")
	}
	if _, dead := p.logsEnded("a"); !dead {
		t.Error("alive without any stream")
	}
	if some, all := p.blind(); !some || !all {
		t.Errorf("all logs away: %v, %v", some, all)
	}
	p.xdsEnded("b")
	if some, all := p.blind(); !some || !all {
		t.Errorf("nobody there: %v, %v", some, all)
	}
	p.logsBegan("static")
	if _, dead := p.logsEnded("static"); dead {
		t.Error("an Envoy that is configured elsewhere is not judged by its logs")
	}
	if len(p.nodes) != 0 {
		t.Errorf("%d nodes are kept", len(p.nodes))
	}
}

func TestADeadSidecarFreesItsEndpoints(t *testing.T) {
	s, err := New(Options{Config: testConfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	key := fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1001")}
	s.observeXDS(xds.Event{Kind: xds.EventConnect, Node: "n"})
	s.observeLog(accesslog.Event{Kind: accesslog.EventStreamBegan, Node: "n"})
	s.outcome(fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", ID: "1718924567123-007-0001", Attempt: 1, Endpoint: key, At: time.Now()})
	s.logsEnded("n")
	s.step(time.Now().Add(2 * accesslog.DeadGrace))
	if n := s.ledger.Total(); n != 1 {
		t.Errorf("%d in flight while the sidecar is up, want 1", n)
	}
	s.observeXDS(xds.Event{Kind: xds.EventDisconnect, Node: "n"})
	s.step(time.Now().Add(2 * accesslog.DeadGrace))
	if n := s.ledger.Total(); n != 0 {
		t.Errorf("%d in flight after the sidecar died", n)
	}
}

func TestAFailedSaveIsNotToldAsAnotherTruth(t *testing.T) {
	cfg := testConfig(t)
	s, err := New(Options{Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SetSplit("chat", map[string]uint32{"spare": 5}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(cfg.Serve.StateDir); err != nil {
		t.Fatal(err)
	}
	if err := s.SetSplit("chat", map[string]uint32{"spare": 7}); err == nil {
		t.Error("a weight that could not be kept was taken")
	}
	if got := s.Splits()[0].Effective[0].Weight; got != 5 {
		t.Errorf("weight %d after a change that failed, want 5", got)
	}
	// The file's own split changes: the weight set by hand ends. That can't be
	// written either, but it is what is published, shown and followed.
	other := *cfg
	other.Routes = append([]fleet.Route(nil), cfg.Routes...)
	other.Routes[0].Split = fleet.Split{{Pool: "spare", Weight: 1}, {Pool: "gpu", Weight: 3}}
	if err := s.Reconfigure(&other); err != nil {
		t.Fatal(err)
	}
	if got := s.Splits()[0]; got.ByHand || got.Effective[1].Weight != 3 {
		t.Errorf("splits: %+v", got)
	}
}

func TestLabelsAreBounded(t *testing.T) {
	l := newLabels("other")
	for i := range maxSeries + 100 {
		l.add(fmt.Sprint(i), 1)
	}
	series, other := 0, int64(0)
	l.each(func(k string, n int64) {
		series++
		if k == "other" {
			other = n
		}
	})
	if series != maxSeries || other != 101 {
		t.Errorf("%d series, %d under other; want %d and 101", series, other, maxSeries)
	}
}
