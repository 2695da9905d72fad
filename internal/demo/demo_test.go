package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admin"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

func stream(at, first time.Duration, edit func(*load.Result)) load.Result {
	r := load.Result{Arrival: load.Arrival{At: at, Stream: true}, Status: 200, FirstToken: first, Total: first + time.Second, ServedBy: "h100-1"}
	if edit != nil {
		edit(&r)
	}
	return r
}

func TestRecorderHidesNoWait(t *testing.T) {
	r := newRecorder(time.Second)
	r.add(stream(0, 9*time.Second, nil)) // warm-up
	r.add(stream(2*time.Second, 100*time.Millisecond, nil))
	r.add(stream(2*time.Second, 3*time.Second, nil))
	// Cut at the end without a first token: it has waited for 20 s.
	r.add(stream(3*time.Second, 0, func(x *load.Result) { x.Cut, x.Err, x.Total = true, "cut", 20*time.Second }))
	r.add(stream(3*time.Second, 0, func(x *load.Result) { x.Status = 503 }))
	r.add(stream(3*time.Second, 0, func(x *load.Result) { x.Status = 429 }))
	r.add(stream(3*time.Second, 0, func(x *load.Result) { x.Incomplete, x.Err = true, "broken off" }))
	r.add(load.Result{Arrival: load.Arrival{At: 3 * time.Second}, Status: 200, FirstToken: 50 * time.Second, Whole: true})
	r.close()
	// The interrupt cuts what runs: no error, and no wait made shorter by it.
	r.add(stream(4*time.Second, 0, func(x *load.Result) { x.Err, x.Total = "interrupted", 10*time.Millisecond }))
	b := r.total
	if b.done != 8 || b.errors != 2 || b.throttled != 1 || b.unfinished != 2 || len(b.firstToken) != 3 || b.slow() != 2 {
		t.Errorf("total: %+v, slow %d", b, b.slow())
	}
	second := r.take()
	if n := second["h100-1"].done; n != 8 {
		t.Errorf("this second: %d from h100-1, want 8 (the warm-up is shown too)", n)
	}
	if len(r.take()) != 0 {
		t.Error("a second is given out twice")
	}
}

func TestSecondJoinsFleetAndAnswers(t *testing.T) {
	f := admin.Fleet{Pools: []admin.Pool{{Name: "h100", Endpoints: []admin.Endpoint{
		{Name: "h100-1", Risk: 0.2, Known: true, State: "preferred", Share: 0.6, InFlight: 3, HeaderMillis: 12, Errors5s: 2},
		{Name: "h100-2", State: "unknown", Share: 0.4, InFlight: 1, HeaderMillis: -1},
	}}}}
	answers := map[string]*bucket{
		"h100-1": {done: 4, errors: 1, firstToken: []time.Duration{40 * time.Millisecond, 20 * time.Millisecond}},
		"":       {done: 2, throttled: 2},
	}
	s := secondOf(f, map[string]float64{"h100": 0.67}, answers, 2*time.Second)
	s.Strategy, s.Sidecars, s.Elapsed = "dynamic", 4, 7
	if s.Unserved != 2 || len(s.Rows) != 3 {
		t.Fatalf("%+v", s)
	}
	pool := s.Rows[0]
	if *pool.Risk != 0.2 || pool.InFlight != 4 || pool.RPS != 2 || *pool.P50 != 20 || *pool.P99 != 40 || pool.Errors != 1 || pool.Weight != 0.67 || pool.FailedLogged != 2 {
		t.Errorf("pool: %+v", pool)
	}
	if *s.Rows[1].Headers != 12 {
		t.Errorf("headers: %v", *s.Rows[1].Headers)
	}
	if s.Rows[2].Risk != nil || s.Rows[2].P50 != nil || s.Rows[2].Headers != nil {
		t.Errorf("unknown numbers are shown as numbers: %+v", s.Rows[2])
	}
	var text bytes.Buffer
	l := &lines{w: &text, redraw: true}
	l.Second(s)
	first := text.String()
	if strings.Contains(first, "\x1b") || !strings.Contains(first, "h100-2         -  unknown") {
		t.Errorf("first table:\n%s", first)
	}
	l.Second(s)
	if !strings.Contains(text.String(), "\x1b[5A\x1b[J") {
		t.Errorf("second table does not redraw over the five lines of the first:\n%q", text.String())
	}
	if encoded, err := json.Marshal(s); err != nil || !strings.Contains(string(encoded), `"ttft_p50_ms":null`) {
		t.Errorf("json: %s, %v", encoded, err)
	}
}

func TestComparePairsAndJudges(t *testing.T) {
	run := func(p99 float64, errors int) Summary {
		return Summary{P99: p99, Errors: errors, CPU: []CPU{{"fairlead", 0.1}, {"envoy", 0.2}, {"envoy", 0.3}}}
	}
	pairs := []pair{{run(1000, 1), run(500, 1)}, {run(1200, 0), run(720, 1)}, {run(900, 1), run(430, 0)}}
	rows := map[string]Compare{}
	for _, f := range figures() {
		rows[f.name] = compare(16, f, [][]pair{pairs[:1], pairs[1:2], pairs[2:]})
	}
	p99 := rows["TTFT p99 ms"]
	if p99.Better != "dynamic" || math.Abs(p99.Difference+1450.0/3) > 1e-9 || p99.DifferenceHalf <= 0 {
		t.Errorf("p99: %+v", p99)
	}
	if e := rows["errors"]; e.Better != "" {
		t.Errorf("errors differ within noise: %+v", e)
	}
	if c := rows["CPU busiest Envoy, cores"]; c.Better != "-" || c.Legacy != 0.3 {
		t.Errorf("CPU is described, not judged: %+v", c)
	}
	if one := compare(1, figures()[2], [][]pair{pairs[:1]}); one.Better != "-" || one.DifferenceHalf != 0 || one.Difference != -500 {
		t.Errorf("one seed has no interval: %+v", one)
	}
	c := Comparison{Rows: []Compare{p99, rows["errors"]}}
	var out bytes.Buffer
	c.WriteTable(&out)
	if !strings.Contains(out.String(), "within noise") || !strings.Contains(out.String(), "1033 ±") {
		t.Errorf("table:\n%s", out.String())
	}
	// Two orders of one seed are one value: the interval is over two seeds.
	twice := compare(16, figures()[2], [][]pair{{pairs[0], pairs[0]}, {pairs[1], pairs[1]}})
	once := compare(16, figures()[2], [][]pair{pairs[:1], pairs[1:2]})
	if twice.DifferenceHalf != once.DifferenceHalf {
		t.Errorf("repeating the orders made the interval %v, want %v", twice.DifferenceHalf, once.DifferenceHalf)
	}
	for i := range pairs {
		pairs[i] = pair{pairs[i].dynamic, pairs[i].legacy}
	}
	if r := compare(1, figures()[2], [][]pair{pairs[:1], pairs[1:2], pairs[2:]}); r.Better != "legacy" {
		t.Errorf("a loss is not shown as one: %+v", r)
	}
}

func TestConfigFollowsTheStrategyAndTheServers(t *testing.T) {
	sims, err := simConfig(1)
	if err != nil {
		t.Fatal(err)
	}
	servers, err := sim.New(sims, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := servers.Listen(); err != nil {
		t.Fatal(err)
	}
	defer func() { // Run closes what Listen opened
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = servers.Run(ctx)
	}()
	for _, want := range []fleet.Strategy{fleet.StrategyLegacy, fleet.StrategyDynamic} {
		cfg, err := buildConfig(want, t.TempDir(), servers.Servers())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range cfg.Routes {
			if r.Strategy != want {
				t.Errorf("route %s has strategy %s, want %s", r.Name, r.Strategy, want)
			}
		}
		if got := cfg.Pools[1].Endpoints[3].Address; got != servers.Servers()[7].Addr() {
			t.Errorf("a100-4 is at %s, its server at %s", got, servers.Servers()[7].Addr())
		}
	}
}

func TestOptionsOutOfRangeAreRefused(t *testing.T) {
	good := Options{Sidecars: 1, RPS: 40, Strategy: fleet.StrategyDynamic}
	if err := good.Check(); err != nil {
		t.Fatal(err)
	}
	for name, edit := range map[string]func(*Options){
		"0 sidecars":     func(o *Options) { o.Sidecars = 0 },
		"65 sidecars":    func(o *Options) { o.Sidecars = 65 },
		"no rate":        func(o *Options) { o.RPS = 0 },
		"NaN":            func(o *Options) { o.RPS = math.NaN() },
		"negative time":  func(o *Options) { o.Duration = -1 },
		"long warm-up":   func(o *Options) { o.Duration, o.Warmup = time.Second, time.Second },
		"unknown server": func(o *Options) { o.Faults = []Fault{{Server: "h100-9"}} },
	} {
		o := good
		edit(&o)
		if err := o.Check(); err == nil || !strings.Contains(err.Error(), "accepted") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
