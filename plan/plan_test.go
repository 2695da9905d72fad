package plan

import (
	"math"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fairlead-proxy/fairlead/fleet"
)

func TestCompileSaysWhatIsImpossible(t *testing.T) {
	for _, tc := range []struct {
		name   string
		break_ func(in *Inputs)
		want   string
	}{
		{"pool twice", func(in *Inputs) { in.Pools = append(in.Pools, PoolInput{Name: "pool"}) }, `two pools are named "pool"`},
		{"route twice", func(in *Inputs) { in.Routes = append(in.Routes, in.Routes[0]) }, `two routes are named "route"`},
		{"NaN weight", func(in *Inputs) { in.Pools[0].Endpoints[1].Weight = math.NaN() }, `pool "pool": endpoint 1 (10.1.0.1:80): weight is NaN`},
		{"infinite weight", func(in *Inputs) { in.Pools[0].Endpoints[1].Weight = math.Inf(1) }, "weight is +Inf"},
		{"negative weight", func(in *Inputs) { in.Pools[0].Endpoints[0].Weight = -1 }, "weight is -1"},
		{"NaN risk", func(in *Inputs) { in.Pools[0].Endpoints[0].Risk = fleet.Risk(math.NaN()) }, "risk is NaN"},
		{"negative limit", func(in *Inputs) { in.Pools[0].Endpoints[0].MaxInFlight = -1 }, "limit in flight is -1"},
		{"negative count", func(in *Inputs) { in.Pools[0].Endpoints[0].InFlight = -1 }, "-1 attempts in flight"},
		{"negative trials", func(in *Inputs) { in.Pools[0].Endpoints[0].Trial = -1 }, "-1 trials"},
		{"share above all", func(in *Inputs) { in.Pools[0].SpillAt = 1.1 }, `pool "pool": spills at 1.1 of a zone's capacity`},
		{"NaN share", func(in *Inputs) { in.Pools[0].SpillAt = math.NaN() }, "spills at NaN"},
		{"too many zones", func(in *Inputs) { *in = zonesOfTheirOwn(maxItems + 1) }, "more than 32767 zones"},
		{"KV cache of less than nothing", func(in *Inputs) { in.Pools[0].Endpoints[0].KVSize = -1 }, "a KV cache of -1 tokens"},
		{"KV below unknown", func(in *Inputs) { in.Pools[0].Endpoints[0].KVFree = -2 }, "free KV tokens are -2"},
		{"no address", func(in *Inputs) { in.Pools[0].Endpoints[0].Address = netip.AddrPort{} }, "address is not valid"},
		{"address twice", func(in *Inputs) { in.Pools[0].Endpoints[1].Address = in.Pools[0].Endpoints[0].Address }, "10.1.0.0:80 occurs twice"},
		{"dangling split", func(in *Inputs) { in.Routes[0].Split = []string{"gone"} }, `route "route": split: there is no pool "gone"`},
		{"dangling fallback", func(in *Inputs) { in.Routes[0].Fallback = []string{"gone"} }, `fallback: there is no pool "gone"`},
		{"arm twice", func(in *Inputs) { in.Routes[0].Split = []string{"pool", "pool"} }, `pool "pool" occurs twice`},
		{"no split", func(in *Inputs) { in.Routes[0].Split = nil }, "the split has no pool"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := onePool(3, nil)
			tc.break_(&in)
			p, err := Compile(in)
			if err == nil || !strings.Contains(err.Error(), tc.want) || p != nil {
				t.Errorf("got %v, %v; want an error with %q", p, err, tc.want)
			}
		})
	}
}

func TestCompileKeepsNothingOfItsInputs(t *testing.T) {
	in := onePool(2, func(i int, e *EndpointInput) { e.Weight = float64(i) })
	p := mustCompile(t, in)
	before := p.Decide(benchClass, 7, nil)
	in.Pools[0].Endpoints[1].Address = netip.MustParseAddrPort("9.9.9.9:9")
	in.Pools[0].Endpoints[1].Weight = 0
	in.Routes[0].Split[0] = "other"
	if after := p.Decide(benchClass, 7, nil); after != before || p.AddressText(after.Picks[0]) != "10.1.0.1:80" {
		t.Errorf("decided %+v (%s) after the inputs were changed", after, p.AddressText(after.Picks[0]))
	}
}

func TestExtremeWeightsStillDraw(t *testing.T) {
	weights := []float64{math.MaxFloat64, math.MaxFloat64, math.SmallestNonzeroFloat64}
	p := mustCompile(t, onePool(3, func(i int, e *EndpointInput) { e.Weight = weights[i] }))
	var got [3]int
	for seed := range uint64(10_000) {
		got[p.Decide(benchClass, seed, nil).Picks[0].Endpoint]++
	}
	if got[0] < 4700 || got[1] < 4700 || got[2] > 0 {
		t.Errorf("shares are %v, want about 5000, 5000, 0", got)
	}
}

func TestLevelsWithEqualCandidatesShareATable(t *testing.T) {
	in := onePool(4, func(i int, e *EndpointInput) { e.KVFree = []fleet.Tokens{-1, 300, 300, 5000}[i] })
	tables := mustCompile(t, in).pools[0].whole.tables
	if tables[0] != tables[3] || tables[4] != tables[7] || tables[3] == tables[4] {
		t.Error("want one table for levels 0–3 and one for 4–7")
	}
	if n := len(tables[4].cells); n != 2 {
		t.Errorf("level 4 has %d candidates, want the unknown one and the free one", n)
	}
	in = onePool(2, func(_ int, e *EndpointInput) { e.KVFree = 0 })
	tables = mustCompile(t, in).pools[0].whole.tables
	if tables[0] != tables[7] || len(tables[0].cells) != 2 {
		t.Error("when nobody fits, everybody is a candidate of every level")
	}
}

// TestPromptsThatFitNowhereSpread: KV readings are a tick old, so the roomiest
// endpoint must not get every request that fits nowhere.
func TestPromptsThatFitNowhereSpread(t *testing.T) {
	const n = 100
	p := mustCompile(t, onePool(n, func(i int, e *EndpointInput) { e.KVFree = fleet.Tokens(i) }))
	c := benchClass
	c.Prompt = 5000
	var got [n]int
	for seed := range uint64(10_000) {
		got[p.Decide(c, seed, nil).Picks[0].Endpoint]++
	}
	upper := 0
	for i, k := range got {
		if k > 1000 {
			t.Errorf("endpoint %d got %d of 10,000", i, k)
		}
		if i >= n/2 {
			upper += k
		}
	}
	// The roomiest of six uniform draws is in the upper half with 1 − 2⁻⁶.
	if upper < 9700 {
		t.Errorf("the roomier half got %d of 10,000, want about 9,840", upper)
	}
}

// TestPromptsAreSearchedExactlyInSmallPools: the one endpoint with room in its
// KV cache is found, and never one at its limit.
func TestPromptsAreSearchedExactlyInSmallPools(t *testing.T) {
	c := benchClass
	c.Prompt = 20_000
	for _, n := range []int{1, 3, scanLimit} {
		for roomy := range n {
			in := onePool(n, func(i int, e *EndpointInput) {
				e.MaxInFlight, e.KVFree = 4, 900
				if i == roomy {
					e.KVFree = 20_000 + c.Level.UpperBudget()
				}
			})
			p := mustCompile(t, in)
			live := make(counts, n)
			for seed := range uint64(5) {
				if d := p.Decide(c, seed, live); int(d.Picks[0].Endpoint) != roomy {
					t.Fatalf("%d endpoints, only %d has room: %+v", n, roomy, d)
				}
			}
			live[roomy] = 4
			d := p.Decide(c, 1, live)
			if n == 1 && d.Action != ActionRefuse {
				t.Fatalf("the only endpoint is at its limit: %+v", d)
			}
			if n > 1 && (d.Action != ActionSteer || int(d.Picks[0].Endpoint) == roomy) {
				t.Fatalf("%d endpoints, %d is at its limit: %+v", n, roomy, d)
			}
		}
	}
}

// TestSmallWeightStaysSmallInASmallPool: a forced distinct second candidate
// would give the idle endpoint of weight 0.02 half of the requests.
func TestSmallWeightStaysSmallInASmallPool(t *testing.T) {
	in := onePool(2, func(i int, e *EndpointInput) { e.Weight = []float64{1, 0.02}[i] })
	p := mustCompile(t, in)
	got := 0
	for seed := range uint64(100_000) {
		if p.Decide(benchClass, seed, counts{50, 0}).Picks[0].Endpoint == 1 {
			got++
		}
	}
	w := 0.02 / 1.02
	most := 1 - math.Pow(1-w, 3)
	if share := float64(got) / 100_000; share > most+0.003 || share < w {
		t.Errorf("share is %.4f, want between %.4f and %.4f", share, w, most)
	}
}

// TestSmallPoolsAreSearchedExactly: the one endpoint with room is found in
// every pool of up to scanLimit endpoints.
func TestSmallPoolsAreSearchedExactly(t *testing.T) {
	for _, n := range []int{1, 2, 17, scanLimit} {
		in := onePool(n, func(i int, e *EndpointInput) { e.MaxInFlight = 4; e.Weight = 0.001 + float64(i) })
		p := mustCompile(t, in)
		for free := range n {
			live := make(counts, n)
			for i := range live {
				live[i] = 4
			}
			live[free] = 3
			for seed := range uint64(5) {
				d := p.Decide(benchClass, seed, live)
				if d.Action != ActionSteer || int(d.Picks[0].Endpoint) != free {
					t.Fatalf("%d endpoints, only %d has room: %+v", n, free, d)
				}
			}
		}
	}
}

// TestLargePoolsAreSampled: above scanLimit a share f with room is missed with
// probability (1−f)^38, and the number of looks is bounded.
func TestLargePoolsAreSampled(t *testing.T) {
	const n, rounds = 1000, 20_000
	p := mustCompile(t, onePool(n, func(_ int, e *EndpointInput) { e.MaxInFlight = 4 }))
	for _, free := range []int{0, 10, 100, 300} {
		live := &counting{counts: make(counts, n)}
		for i := range live.counts {
			if i%n >= free {
				live.counts[i] = 4
			}
		}
		refused, most := 0, 0
		for seed := range uint64(rounds) {
			live.looks = 0
			if p.Decide(benchClass, seed, live).Action == ActionRefuse {
				refused++
			}
			most = max(most, live.looks)
		}
		want := math.Pow(1-float64(free)/n, 2+furtherDraws+sampleDraws)
		margin := 4*math.Sqrt(want*(1-want)/rounds) + 1e-9
		if got := float64(refused) / rounds; math.Abs(got-want) > margin {
			t.Errorf("%d of %d with room: %.4f refused, want %.4f ± %.4f", free, n, got, want, margin)
		}
		if most > 2+furtherDraws+sampleDraws {
			t.Errorf("looked at %d counts for one decision", most)
		}
	}
}

type counting struct {
	counts
	looks int
}

func (c *counting) InFlight(slot uint32) int32 { c.looks++; return c.counts[slot] }

func TestLookupsOfUnknownIDsAreEmpty(t *testing.T) {
	p := mustCompile(t, onePool(1, nil))
	for _, pick := range []Pick{{Pool: NoPool}, {Pool: 7}, {Endpoint: -1}, {Endpoint: 1}} {
		if p.AddressText(pick) != "" || p.Address(pick).IsValid() {
			t.Errorf("%+v has an address", pick)
		}
	}
	if p.PoolName(NoPool) != "" || p.RouteInfo(-1) != nil || p.RouteInfo(1) != nil {
		t.Error("unknown ids are known")
	}
	if got := p.Awaited(nil, Class{Route: 1}); len(got) != 0 {
		t.Errorf("a request of an unknown route waits for %v", got)
	}
	if _, found := p.Pool("gone"); found {
		t.Error("pool found")
	}
	if id, found := p.Route("route"); !found || p.RouteInfo(id).DefaultBudget != 512 {
		t.Error("route not found")
	}
}

func TestNegativeZeroIsZero(t *testing.T) {
	in := onePool(2, nil)
	in.Pools[0].Endpoints[0].Weight = 0
	a := mustCompile(t, in).Digest()
	in.Pools[0].Endpoints[0].Weight = math.Copysign(0, -1)
	if b := mustCompile(t, in).Digest(); a != b {
		t.Errorf("digest %s for 0 and %s for -0", a, b)
	}
}

// TestDigestIsStable pins the encoding: a change of this value is a change of
// version.
func TestDigestIsStable(t *testing.T) {
	if got, want := mustCompile(t, bigFleet(10)).Digest(), "b5df94f69fe4a12b"; got != want {
		t.Errorf("digest is %s, want %s", got, want)
	}
}

// TestReadersKeepTheirPlanWhileItIsSwapped is for the race detector.
func TestReadersKeepTheirPlanWhileItIsSwapped(t *testing.T) {
	in := bigFleet(20)
	var current atomic.Pointer[Plan]
	current.Store(mustCompile(t, in))
	live := busyLedger(20, func(i int) int32 { return int32(i) })
	done := make(chan struct{})
	var readers sync.WaitGroup
	for r := range 4 {
		readers.Go(func() {
			var rec Record
			for seed := uint64(r); ; seed += 4 {
				select {
				case <-done:
					return
				default:
				}
				p := current.Load()
				d := p.DecideRecorded(benchClass, seed, live, &rec)
				if p.AddressText(d.Picks[0]) == "" {
					t.Error("no address")
					return
				}
				if _, same := p.Replay(rec); !same {
					t.Error("replay differs")
					return
				}
				live[d.Picks[0].Endpoint].Add(1)
			}
		})
	}
	for tick := range uint64(200) {
		in.Tick = tick
		in.Pools[0].Endpoints[tick%20].Weight = float64(tick % 3)
		current.Store(mustCompile(t, in))
	}
	close(done)
	readers.Wait()
}

func FuzzDecodeInputs(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(encodingMagic))
	f.Add(Inputs{}.AppendCanonical(nil))
	f.Add(onePool(3, nil).AppendCanonical(nil))
	sticky := inZones(bigFleet(10))
	sticky.Routes[0].Affinity = fleet.AffinitySession
	f.Add(sticky.AppendCanonical(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		in, err := DecodeInputs(b)
		if err != nil {
			return
		}
		if again := in.AppendCanonical(nil); string(again) != string(b) {
			t.Fatalf("read\n%x\nwrote\n%x", b, again)
		}
		if p, err := Compile(in); err == nil {
			for zone := range ZoneID(3) {
				c := Class{Strategy: fleet.StrategyDynamic, Generates: true, Zone: zone, Session: Session(zone), Prompt: fleet.Tokens(zone) << 40}
				p.Decide(c, 1, nil)
			}
		}
	})
}

func TestDecodeInputsSaysWhatIsWrong(t *testing.T) {
	good := onePool(2, nil).AppendCanonical(nil)
	version := append([]byte(nil), good...)
	version[len(encodingMagic)] = 9
	for _, tc := range []struct {
		name string
		in   []byte
		want string
	}{
		{"empty", nil, "ends too early"},
		{"other magic", []byte("something else than that"), `does not begin with "fairlead-plan"`},
		{"other version", version, "version is 9; accepted: 5"},
		{"cut", good[:len(good)-3], "ends too early"},
		{"longer", append(append([]byte(nil), good...), 1, 2), "2 bytes follow the end"},
		{"long integer", append(append([]byte(encodingMagic), encodingVersion), 0x80, 0x00), "longer than it need be"},
		{"huge list", append(append([]byte(encodingMagic), encodingVersion), 0, 0xff, 0xff, 0x7f), "a list of 2097151 elements in 0 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := DecodeInputs(tc.in); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

// TestLimitOfAFailingEndpointIsTheRoutes: it takes trials where another can serve.
func TestLimitOfAFailingEndpointIsTheRoutes(t *testing.T) {
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), port) }
	p, err := Compile(Inputs{
		Pools: []PoolInput{
			{Name: "failing", Endpoints: []EndpointInput{
				{Address: at(1), Weight: 1, MaxInFlight: 4, KVFree: -1, Failing: true, Trial: 9, State: fleet.StateNeutral},
				{Address: at(2), Weight: 1, KVFree: -1, Failing: true, Trial: 2, State: fleet.StateNeutral},
				{Address: at(3), Weight: 1, KVFree: -1, Failing: true, State: fleet.StateNeutral},
			}},
			{Name: "well", Endpoints: []EndpointInput{{Address: at(4), Weight: 1, MaxInFlight: 5, KVFree: -1, State: fleet.StateNeutral}}},
		},
		Routes: []RouteInput{{Name: "alone", Split: []string{"failing"}}, {Name: "chain", Split: []string{"failing"}, Fallback: []string{"well"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for endpoint, want := range [][3]int32{{4, 4, 4}, {0, 2, 0}, {0, closed, 0}} {
		pick := Pick{Endpoint: int32(endpoint)}
		if got := [3]int32{p.Limit(0, pick), p.Limit(1, pick), p.Limit(-1, pick)}; got != want {
			t.Errorf("endpoint %d: %d alone, in a chain and on no route; want %d", endpoint, got, want)
		}
	}
	if got := p.Limit(1, Pick{Pool: 1}); got != 5 {
		t.Errorf("%d on the pool that is well", got)
	}
}
