package push

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// maskBits reads, from the source, the names of the bits of a mask type; the
// i-th name is bit 1<<i.
func maskBits(t *testing.T, file, typeName string) []string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range parsed.Decls {
		block, ok := d.(*ast.GenDecl)
		if !ok || block.Tok != token.CONST {
			continue
		}
		first := block.Specs[0].(*ast.ValueSpec)
		if ident, ok := first.Type.(*ast.Ident); !ok || ident.Name != typeName {
			continue
		}
		var names []string
		for _, spec := range block.Specs {
			names = append(names, spec.(*ast.ValueSpec).Names[0].Name)
		}
		return names
	}
	t.Fatalf("%s has no constants of type %s", file, typeName)
	return nil
}

// The wire's numbers, by the names of today's constants. A number may be added,
// never changed: agents and servers of different age talk to each other.
var (
	sampleNumbers = map[string]int32{
		"HasKVUsage": 1, "HasRunning": 2, "HasWaiting": 3, "HasKVTokens": 4, "HasMaxSeqs": 5, "HasQueuedTokens": 6,
		"HasPromptTokens": 7, "HasGenerationTokens": 8, "HasPreemptions": 9, "HasTTFT": 10, "HasGPUUtil": 11,
		"HasGRActive": 12, "HasDRAMActive": 13, "HasFBUsed": 14, "HasFBTotal": 15, "HasPower": 16, "HasPCIe": 17,
		"HasXID": 18, "HasCondition": 19,
	}
	gpuNumbers = map[string]int32{
		"GPUHasUtil": 1, "GPUHasGRActive": 2, "GPUHasSMActive": 3, "GPUHasTensorActive": 4, "GPUHasDRAMActive": 5,
		"GPUHasFBUsed": 6, "GPUHasFBTotal": 7, "GPUHasPower": 8, "GPUHasTemperatureMargin": 9, "GPUHasPCIe": 10,
		"GPUHasPCIeLink": 11, "GPUHasEnergy": 12, "GPUHasThrottle": 13, "GPUHasXID": 14, "GPUHasRecovery": 15,
		"GPUHasDBE": 16, "GPUHasRemap": 17,
	}
)

func TestEveryFieldHasItsStableNumber(t *testing.T) {
	check := func(names []string, numbers map[string]int32, known uint64, of func(bit uint32) uint64) {
		t.Helper()
		if len(names) != len(numbers) {
			t.Errorf("%d fields, %d numbers: a new field needs the next free number", len(names), len(numbers))
		}
		all := uint64(0)
		for i, name := range names {
			want := uint64(1) << numbers[name]
			if got := of(1 << i); got != want || want == 1 {
				t.Errorf("%s travels as mask %#x, want %#x", name, got, want)
			}
			all |= want
		}
		if all != known {
			t.Errorf("numbers %#x, the reader knows %#x", all, known)
		}
	}
	var e encoder
	e.index = map[string]uint32{}
	check(maskBits(t, "../sample.go", "Mask"), sampleNumbers, knownSample, func(bit uint32) uint64 {
		return e.endpoint(&Update{Sample: telemetry.Sample{Known: telemetry.Mask(bit)}}, time.Now(), time.Now()).GetKnown()
	})
	check(maskBits(t, "../gpu.go", "GPUMask"), gpuNumbers, knownGPU, func(bit uint32) uint64 {
		return e.gpu(&telemetry.GPU{Known: telemetry.GPUMask(bit)}, time.Now(), time.Now()).GetKnown()
	})
}

func TestFieldTablesAreInWireOrder(t *testing.T) {
	for i := 1; i < len(sampleFields); i++ {
		if sampleFields[i].wire < sampleFields[i-1].wire {
			t.Errorf("%v after %v", sampleFields[i].wire, sampleFields[i-1].wire)
		}
	}
	for i := 1; i < len(gpuFields); i++ {
		if gpuFields[i].wire < gpuFields[i-1].wire {
			t.Errorf("%v after %v", gpuFields[i].wire, gpuFields[i-1].wire)
		}
	}
}

// cross sends frames through bytes, as one stream would.
type cross struct {
	e   encoder
	d   decoder
	seq uint64
	r   received
}

func (c *cross) frame(t interface{ Fatal(...any) }, f Frame, now time.Time) *received {
	c.seq++
	raw, err := proto.Marshal(c.e.encode(&f, c.seq, 0, now))
	if err != nil {
		t.Fatal(err)
	}
	var m pushv1.Frame
	if err := proto.Unmarshal(raw, &m); err != nil {
		t.Fatal(err)
	}
	if err := c.d.decode(&m, now, &c.r); err != nil {
		t.Fatal(err)
	}
	return &c.r
}

// drawSample draws every number within the bounds of its field.
func drawSample(t *rapid.T) telemetry.Sample {
	var s telemetry.Sample
	for i := range sampleFields {
		f := &sampleFields[i]
		*f.at(&s) = rapid.Float64Range(f.min, f.max).Draw(t, f.wire.String())
	}
	s.XID = rapid.IntRange(0, maxXID).Draw(t, "xid")
	s.Condition = telemetry.Condition(rapid.IntRange(1, 4).Draw(t, "condition"))
	return s
}

// known leaves of s what its mask says, as precise as the wire is.
func known(s telemetry.Sample, mask telemetry.Mask) telemetry.Sample {
	out := telemetry.Sample{At: s.At, Changed: s.Changed, Known: mask}
	for i := range sampleFields {
		f := &sampleFields[i]
		switch {
		case !mask.Has(f.bit):
		case f.counter:
			*f.at(&out) = *f.at(&s)
		default:
			*f.at(&out) = float64(float32(*f.at(&s)))
		}
	}
	if mask.Has(telemetry.HasXID) {
		out.XID = s.XID
	}
	if mask.Has(telemetry.HasCondition) {
		out.Condition = s.Condition
	}
	return out
}

func TestEverySampleCrossesTheWire(t *testing.T) {
	bits := len(maskBits(t, "../sample.go", "Mask"))
	now := time.Now()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSample(t)
		mask := telemetry.Mask(rapid.Uint32Range(0, 1<<bits-1).Draw(t, "mask"))
		s.Known = mask
		age := time.Duration(rapid.Int64Range(0, 3.6e9).Draw(t, "age")) * time.Microsecond
		s.At = now.Add(-age)
		if rapid.Bool().Draw(t, "changed") {
			s.Changed = s.At.Add(-time.Duration(rapid.Int64Range(0, int64(maxAge-age)/1000).Draw(t, "since")) * time.Microsecond)
		}
		u := Update{Endpoint: netip.MustParseAddrPort("[fd00::1]:8000"), Sample: s, Err: rapid.StringMatching(`[ -~]{0,200}`).Draw(t, "err")}
		for range rapid.IntRange(0, 9).Draw(t, "gpus") {
			u.GPUs = append(u.GPUs, rapid.StringMatching(`GPU-[0-9a-f]{8}(/[0-9])?`).Draw(t, "gpu"))
		}
		var c cross
		r := c.frame(t, Frame{Node: "n", At: now, Endpoints: []Update{u}}, now)
		want := u
		want.Sample = known(s, mask)
		if len(r.Endpoints) != 1 || r.rejected != 0 || !reflect.DeepEqual(r.Endpoints[0], want) {
			t.Fatalf("got  %+v\nwant %+v\nrejected %d refused %v", r.Endpoints, want, r.rejected, r.refused)
		}
	})
}

// TestNoFieldOfASampleIsForgotten fills every field by reflection, so that a
// field added to the struct and not to the wire is found.
func TestNoFieldOfASampleIsForgotten(t *testing.T) {
	now := time.Now()
	s := telemetry.Sample{At: now, Changed: now, Known: knownMask(t), Condition: telemetry.ConditionDrain}
	fill(t, reflect.ValueOf(&s).Elem())
	g := telemetry.GPU{ID: "GPU-1", Profile: "1g.10gb", Model: "NVIDIA", At: now, Known: telemetry.GPUMask(1<<len(maskBits(t, "../gpu.go", "GPUMask")) - 1),
		RemapFailed: true, RemapPending: true, Lost: true, Recovery: telemetry.RecoverReboot, Throttle: telemetry.ThrottleHarmful}
	fill(t, reflect.ValueOf(&g).Elem())
	var c cross
	r := c.frame(t, Frame{Node: "n", Epoch: 3, At: now, Endpoints: []Update{{Endpoint: netip.MustParseAddrPort("1.2.3.4:5"), Sample: s}}, GPUs: []telemetry.GPU{g}, Err: "why"}, now)
	if r.Node != "n" || r.Epoch != 3 || r.Err != "why" {
		t.Errorf("frame %+v", r.Frame)
	}
	if len(r.Endpoints) != 1 || r.Endpoints[0].Sample != s {
		t.Errorf("sample\n got %+v\nwant %+v", r.Endpoints, s)
	}
	if len(r.GPUs) != 1 || r.GPUs[0] != g {
		t.Errorf("GPU\n got %+v\nwant %+v", r.GPUs, g)
	}
}

func knownMask(t *testing.T) telemetry.Mask {
	return telemetry.Mask(1<<len(maskBits(t, "../sample.go", "Mask")) - 1)
}

// fill gives every number that is zero a value of its own that all ranges hold
// and a float32 keeps.
func fill(t *testing.T, v reflect.Value) {
	next := 0.0
	for i := range v.NumField() {
		f := v.Field(i)
		if !f.IsZero() {
			continue
		}
		next += 1
		switch f.Kind() {
		case reflect.Float64:
			f.SetFloat(next / 64)
			if name := v.Type().Field(i).Name; name == "KVTokens" || name == "MaxSeqs" || name == "XIDEvents" || name == "DBE" {
				f.SetFloat(next)
			}
		case reflect.Int:
			f.SetInt(int64(next))
		default:
			t.Fatalf("%s is a %s: the test cannot fill it", v.Type().Field(i).Name, f.Kind())
		}
	}
}

func TestEveryGPUCrossesTheWire(t *testing.T) {
	bits := len(maskBits(t, "../gpu.go", "GPUMask"))
	now := time.Now()
	rapid.Check(t, func(t *rapid.T) {
		mask := telemetry.GPUMask(rapid.Uint32Range(0, 1<<bits-1).Draw(t, "mask"))
		g := telemetry.GPU{ID: "GPU-1/3", Profile: "3g.40gb", Model: "NVIDIA H100 80GB HBM3", At: now.Add(-time.Second), Known: mask, Lost: rapid.Bool().Draw(t, "lost")}
		for i := range gpuFields {
			if f := &gpuFields[i]; mask.Has(f.bit) {
				*f.at(&g) = float64(float32(rapid.Float64Range(f.min, f.max).Draw(t, f.wire.String())))
			}
		}
		if mask.Has(telemetry.GPUHasEnergy) {
			g.EnergyJoules = rapid.Float64Range(0, maxCounter).Draw(t, "energy")
		}
		if mask.Has(telemetry.GPUHasThrottle) {
			g.Throttle = telemetry.Throttle(rapid.Uint32().Draw(t, "throttle"))
		}
		if mask.Has(telemetry.GPUHasXID) {
			g.XID, g.XIDEvents = rapid.IntRange(0, maxXID).Draw(t, "xid"), float64(rapid.IntRange(0, 1e9).Draw(t, "xids"))
		}
		if mask.Has(telemetry.GPUHasRecovery) {
			g.Recovery = telemetry.RecoveryAction(rapid.IntRange(0, 7).Draw(t, "recovery"))
		}
		if mask.Has(telemetry.GPUHasDBE) {
			g.DBE = float64(rapid.IntRange(0, 1e9).Draw(t, "dbe"))
		}
		if mask.Has(telemetry.GPUHasRemap) {
			g.RemapFailed, g.RemapPending = rapid.Bool().Draw(t, "failed"), rapid.Bool().Draw(t, "pending")
		}
		var c cross
		r := c.frame(t, Frame{Node: "n", At: now, GPUs: []telemetry.GPU{g}}, now)
		if len(r.GPUs) != 1 || r.GPUs[0] != g || r.rejected != 0 {
			t.Fatalf("got  %+v\nwant %+v", r.GPUs, g)
		}
		if r.GPUs[0].Condition() != g.Condition() {
			t.Fatalf("condition %v, want %v", r.GPUs[0].Condition(), g.Condition())
		}
	})
}

func TestInventoryTravelsOnceAndWhenItChanges(t *testing.T) {
	var c cross
	now := time.Now()
	send := func(gpus ...telemetry.GPU) *pushv1.Frame {
		c.seq++
		return c.e.encode(&Frame{Node: "n", At: now, GPUs: gpus}, c.seq, 0, now)
	}
	a, b := telemetry.GPU{ID: "GPU-a"}, telemetry.GPU{ID: "GPU-b"}
	for i, x := range []struct {
		gpus []telemetry.GPU
		want bool
	}{{[]telemetry.GPU{a, b}, true}, {[]telemetry.GPU{a, b}, false}, {[]telemetry.GPU{b}, true}, {[]telemetry.GPU{{ID: "GPU-b", Profile: "1g.10gb"}}, true}, {nil, true}, {nil, false}} {
		m := send(x.gpus...)
		if (m.GetInventory() != nil) != x.want || (m.GetNode() != "") != (i == 0) {
			t.Errorf("frame %d: inventory %v, node %q", i, m.GetInventory(), m.GetNode())
		}
		if err := c.d.decode(m, now, &c.r); err != nil || len(c.r.GPUs) != len(x.gpus) {
			t.Fatalf("frame %d: %v, %v", i, c.r.GPUs, err)
		}
		for j, g := range c.r.GPUs {
			if g.ID != x.gpus[j].ID || g.Profile != x.gpus[j].Profile {
				t.Errorf("frame %d: GPU %d is %q %q", i, j, g.ID, g.Profile)
			}
		}
	}
}

// full is a usual frame of a node with 8 GPUs.
func full(endpoints int, now time.Time) Frame {
	f := Frame{Node: "gpu-node-0017", Epoch: 2, At: now}
	ids := make([]string, 8)
	for i := range ids {
		ids[i] = "GPU-8a3b12f4-5c6d-7e8f-9a0b-1c2d3e4f506" + string(rune('0'+i))
		f.GPUs = append(f.GPUs, telemetry.GPU{
			ID: ids[i], Model: "NVIDIA H100 80GB HBM3", At: now.Add(-120 * time.Millisecond),
			Known: knownGPUs, Util: 0.97, GRActive: 0.96, SMActive: 0.61, TensorActive: 0.33, DRAMActive: 0.52,
			FBUsedMiB: 73411, FBTotalMiB: 81559, PowerWatts: 641.7, EnergyJoules: 91234567.8, TemperatureMargin: 31,
			PCIeTX: 1.3e9, PCIeRX: 0.4e9, PCIeLink: 6.3e10,
		})
	}
	per := 8 / endpoints
	for i := range endpoints {
		f.Endpoints = append(f.Endpoints, Update{
			Endpoint: netip.AddrPortFrom(netip.MustParseAddr("10.23.45.67"), uint16(8000+i)),
			GPUs:     ids[i*per : (i+1)*per],
			Sample: telemetry.Sample{
				At: now.Add(-130 * time.Millisecond), Changed: now.Add(-150 * time.Millisecond),
				Known:   1<<19 - 1&^telemetry.HasQueuedTokens,
				KVUsage: 0.71, Running: 83, Waiting: 4, KVTokens: 1.2e6, MaxSeqs: 256,
				PromptTokens: 123456789, GenerationTokens: 98765432, Preemptions: 17, TTFTSum: 45678.9, TTFTCount: 123456,
				GPUUtil: 0.97, GRActive: 0.96, DRAMActive: 0.52, FBUsedMiB: 73411, FBTotalMiB: 81559, PowerWatts: 641.7,
				PCIeShare: 0.02, Condition: telemetry.ConditionOK,
			},
		})
	}
	return f
}

const knownGPUs = telemetry.GPUHasUtil | telemetry.GPUHasGRActive | telemetry.GPUHasSMActive | telemetry.GPUHasTensorActive |
	telemetry.GPUHasDRAMActive | telemetry.GPUHasFBUsed | telemetry.GPUHasFBTotal | telemetry.GPUHasPower | telemetry.GPUHasEnergy |
	telemetry.GPUHasTemperatureMargin | telemetry.GPUHasThrottle | telemetry.GPUHasPCIe | telemetry.GPUHasPCIeLink |
	telemetry.GPUHasXID | telemetry.GPUHasRecovery | telemetry.GPUHasDBE | telemetry.GPUHasRemap

// TestFrameSizes holds what a frame costs on the wire, every field known.
func TestFrameSizes(t *testing.T) {
	now := time.Now()
	for _, x := range []struct{ endpoints, first, next int }{{1, 1300, 740}, {2, 1450, 880}} {
		f := full(x.endpoints, now)
		var e encoder
		first := proto.Size(e.encode(&f, 1, 0, now))
		next := proto.Size(e.encode(&f, 1<<20, 0, now))
		t.Logf("8 GPUs, %d endpoints: first frame %d bytes, the others %d", x.endpoints, first, next)
		if first > x.first || next > x.next {
			t.Errorf("8 GPUs, %d endpoints: first frame %d bytes, the others %d; budget %d and %d", x.endpoints, first, next, x.first, x.next)
		}
	}
}

func TestFrameOverTheLimitsSaysSo(t *testing.T) {
	now := time.Now()
	f := Frame{Node: "n", At: now}
	for i := range maxEndpoints + 5 {
		f.Endpoints = append(f.Endpoints, Update{Endpoint: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(i+1))})
	}
	var c cross
	r := c.frame(t, f, now)
	if len(r.Endpoints) != maxEndpoints || !strings.Contains(r.Err, "found 133 and 0") {
		t.Errorf("%d endpoints, %q", len(r.Endpoints), r.Err)
	}
	f.Endpoints = nil
	for i := range maxGPUs {
		f.GPUs = append(f.GPUs, telemetry.GPU{ID: strings.Repeat("x", 250) + string(rune('a'+i/26)) + string(rune('a'+i%26)), Model: strings.Repeat("y", 256), Profile: strings.Repeat("z", 200)})
	}
	r = c.frame(t, f, now)
	if len(r.GPUs) != 0 || !strings.Contains(r.Err, "a frame takes up to") {
		t.Errorf("%d GPUs, %q", len(r.GPUs), r.Err)
	}
	usual := full(1, now)
	usual.Node = "n"
	r = c.frame(t, usual, now)
	if len(r.GPUs) != 8 || r.GPUs[3].Model == "" {
		t.Errorf("%d GPUs after a frame too large", len(r.GPUs))
	}
}

func TestHostileValuesAreUnknown(t *testing.T) {
	now := time.Now()
	nan, inf := math.NaN(), math.Inf(1)
	base := func() *pushv1.Endpoint {
		return &pushv1.Endpoint{Address: "10.0.0.1:8000", Known: 1<<1 | 1<<2 | 1<<7, Gauges: []float32{0.5, 3}, Counters: []float64{100}}
	}
	const all = telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasPromptTokens
	for name, x := range map[string]struct {
		edit     func(*pushv1.Endpoint)
		known    telemetry.Mask
		rejected int
		refused  bool
	}{
		"fine":                   {func(*pushv1.Endpoint) {}, all, 0, false},
		"NaN":                    {func(m *pushv1.Endpoint) { m.Gauges[0] = float32(nan) }, all &^ telemetry.HasKVUsage, 1, false},
		"infinite":               {func(m *pushv1.Endpoint) { m.Gauges[1] = float32(inf) }, all &^ telemetry.HasRunning, 1, false},
		"over the range":         {func(m *pushv1.Endpoint) { m.Gauges[0] = 334905 }, all &^ telemetry.HasKVUsage, 1, false},
		"negative":               {func(m *pushv1.Endpoint) { m.Gauges[1] = -1 }, all &^ telemetry.HasRunning, 1, false},
		"blank counter":          {func(m *pushv1.Endpoint) { m.Counters[0] = 1.4e14 }, all &^ telemetry.HasPromptTokens, 1, false},
		"NaN counter":            {func(m *pushv1.Endpoint) { m.Counters[0] = nan }, all &^ telemetry.HasPromptTokens, 1, false},
		"unknown mask bits":      {func(m *pushv1.Endpoint) { m.Known |= 1<<63 | 1<<40 | 1 }, all, 3, false},
		"values of unknown bits": {func(m *pushv1.Endpoint) { m.Known |= 1 << 40; m.Gauges = append(m.Gauges, 9) }, all, 1, false},
		"too few values":         {func(m *pushv1.Endpoint) { m.Gauges = m.Gauges[:1] }, 0, 0, true},
		"too many values":        {func(m *pushv1.Endpoint) { m.Counters = append(m.Counters, 1) }, 0, 0, true},
		"no address":             {func(m *pushv1.Endpoint) { m.Address = "" }, 0, 0, true},
		"a name":                 {func(m *pushv1.Endpoint) { m.Address = "localhost:80" }, 0, 0, true},
		"an address with a zone": {func(m *pushv1.Endpoint) { m.Address = "[fe80::1%eth0]:80" }, 0, 0, true},
		"GPU not there":          {func(m *pushv1.Endpoint) { m.Gpus = []uint32{math.MaxUint32} }, 0, 0, true},
		"condition 0":            {func(m *pushv1.Endpoint) { m.Known |= conditionBit }, all, 1, false},
		"condition 77":           {func(m *pushv1.Endpoint) { m.Known |= conditionBit; m.Condition = 77 }, all, 1, false},
		"condition -1":           {func(m *pushv1.Endpoint) { m.Known |= conditionBit; m.Condition = -1 }, all, 1, false},
		"condition unsaid":       {func(m *pushv1.Endpoint) { m.Condition = 3 }, all, 0, false},
		"absurd XID": {func(m *pushv1.Endpoint) {
			m.Known |= 1 << 18
			m.Xid = math.MaxUint32
			m.Counters = append(m.Counters, 1)
		}, all, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := base()
			x.edit(m)
			var d decoder
			var r received
			if err := d.decode(&pushv1.Frame{Node: "n", Sequence: 1, Endpoints: []*pushv1.Endpoint{m}}, now, &r); err != nil {
				t.Fatal(err)
			}
			if x.refused != (len(r.refused) == 1) || x.refused == (len(r.Endpoints) == 1) {
				t.Fatalf("refused %v, taken %v", r.refused, r.Endpoints)
			}
			if x.refused {
				return
			}
			s := r.Endpoints[0].Sample
			if s.Known != x.known || r.rejected != x.rejected {
				t.Errorf("known %b want %b, rejected %d want %d", s.Known, x.known, r.rejected, x.rejected)
			}
			if trimmed := known(s, s.Known); trimmed != s {
				t.Errorf("an unknown field is not zero: %+v", s)
			}
		})
	}
}

func TestHostileGPURowsAreDropped(t *testing.T) {
	now := time.Now()
	inventory := &pushv1.Inventory{Items: []*pushv1.Inventory_Item{{Id: "GPU-a"}, {Id: "GPU-b"}}}
	var d decoder
	var r received
	decode := func(rows ...*pushv1.GPU) {
		t.Helper()
		if err := d.decode(&pushv1.Frame{Node: "n", Sequence: d.sequence + 1, Inventory: inventory, Gpus: rows}, now, &r); err != nil {
			t.Fatal(err)
		}
	}
	decode(&pushv1.GPU{Index: 2}, &pushv1.GPU{Index: 1}, &pushv1.GPU{Index: 1}, &pushv1.GPU{Index: math.MaxUint32})
	if len(r.GPUs) != 1 || r.GPUs[0].ID != "GPU-b" || r.rejected != 3 {
		t.Errorf("%+v, rejected %d", r.GPUs, r.rejected)
	}
	decode(&pushv1.GPU{Known: 1 << 1}, &pushv1.GPU{Index: 1, Gauges: []float32{1}})
	if len(r.GPUs) != 0 || r.rejected != 2 {
		t.Errorf("%+v, rejected %d: the values don't match the mask", r.GPUs, r.rejected)
	}
	decode(&pushv1.GPU{
		Known:  1<<1 | 1<<12 | 1<<14 | 1<<15 | 1<<16 | 1<<50,
		Gauges: []float32{4294967295}, EnergyJoules: math.NaN(), Xid: 1e6, Recovery: 8, DoubleBitErrors: math.MaxUint64,
	})
	if want := (telemetry.GPU{ID: "GPU-a", At: now}); len(r.GPUs) != 1 || r.GPUs[0] != want || r.rejected != 6 {
		t.Errorf("%+v, rejected %d", r.GPUs, r.rejected)
	}
}

func TestHostileFramesAreRefused(t *testing.T) {
	now := time.Now()
	items := func(ids ...string) *pushv1.Inventory {
		inventory := &pushv1.Inventory{}
		for _, id := range ids {
			inventory.Items = append(inventory.Items, &pushv1.Inventory_Item{Id: id})
		}
		return inventory
	}
	wide := &pushv1.Inventory{}
	for i := range maxGPUs {
		wide.Items = append(wide.Items, &pushv1.Inventory_Item{Id: fmt.Sprintf("%0*d", maxName, i)})
	}
	var many []*pushv1.Endpoint
	for range maxEndpoints {
		many = append(many, &pushv1.Endpoint{Gpus: make([]uint32, 10)})
	}
	for name, x := range map[string]struct {
		m    *pushv1.Frame
		want string
	}{
		"sequence twice":       {&pushv1.Frame{Sequence: 5}, "sequence 5 after 5"},
		"sequence back":        {&pushv1.Frame{Sequence: 4}, "sequence 4 after 5"},
		"other node":           {&pushv1.Frame{Sequence: 6, Node: "m"}, `node "m" in a stream of node "n"`},
		"too many endpoints":   {&pushv1.Frame{Sequence: 6, Endpoints: make([]*pushv1.Endpoint, maxEndpoints+1)}, "129 endpoints"},
		"too many GPUs":        {&pushv1.Frame{Sequence: 6, Gpus: make([]*pushv1.GPU, maxGPUs+1)}, "257 GPUs"},
		"GPU twice":            {&pushv1.Frame{Sequence: 6, Inventory: items("a", "a")}, "a is twice there"},
		"GPU without id":       {&pushv1.Frame{Sequence: 6, Inventory: items("")}, "id: is missing"},
		"GPU with newline":     {&pushv1.Frame{Sequence: 6, Inventory: items("a\nb")}, "not printable"},
		"names over budget":    {&pushv1.Frame{Sequence: 6, Inventory: wide}, "names of 64768 bytes, accepted: up to 32768"},
		"too many references":  {&pushv1.Frame{Sequence: 6, Endpoints: many}, "endpoints on 1280 GPUs in all, accepted: up to 1024"},
		"inventory over limit": {&pushv1.Frame{Sequence: 6, Inventory: items(make([]string, maxGPUs+1)...)}, "257 GPUs"},
	} {
		t.Run(name, func(t *testing.T) {
			var d decoder
			var r received
			if err := d.decode(&pushv1.Frame{Node: "n", Sequence: 5, Inventory: items("GPU-old")}, now, &r); err != nil {
				t.Fatal(err)
			}
			if err := d.decode(x.m, now, &r); err == nil || !strings.Contains(err.Error(), x.want) {
				t.Fatalf("got %v, want %q", err, x.want)
			}
			// The stream goes on; rows are not read by an inventory that was replaced.
			if err := d.decode(&pushv1.Frame{Sequence: 7, Gpus: []*pushv1.GPU{{}}}, now, &r); err != nil {
				t.Fatal(err)
			}
			if replaced := x.m.Inventory != nil; (len(r.GPUs) == 0) != replaced {
				t.Errorf("%d GPUs", len(r.GPUs))
			}
		})
	}
	for _, name := range []string{"", "a\nb", strings.Repeat("a", 254), "a\xffb", "gpu-a\x00.evil"} {
		var d decoder
		var r received
		if err := d.decode(&pushv1.Frame{Node: name, Sequence: 1}, now, &r); err == nil || d.node != "" {
			t.Errorf("node %q was taken", name)
		}
	}
}

func TestEndpointTwiceInAFrameCountsOnce(t *testing.T) {
	var d decoder
	var r received
	m := &pushv1.Frame{Node: "n", Sequence: 1, Endpoints: []*pushv1.Endpoint{{Address: "10.0.0.1:80"}, {Address: "10.0.0.1:80"}}}
	if err := d.decode(m, time.Now(), &r); err != nil || len(r.Endpoints) != 1 || len(r.refused) != 1 {
		t.Fatalf("%v, taken %v, refused %v", err, r.Endpoints, r.refused)
	}
}

func TestAgesAreClamped(t *testing.T) {
	now := time.Now()
	changed := uint64(5)
	var d decoder
	var r received
	m := &pushv1.Frame{Node: "n", Sequence: 1, Endpoints: []*pushv1.Endpoint{
		{Address: "10.0.0.1:80", AgeUs: math.MaxUint64},
		{Address: "10.0.0.2:80", AgeUs: 1000, ChangedAgeUs: &changed},
	}}
	if err := d.decode(m, now, &r); err != nil {
		t.Fatal(err)
	}
	old, young := r.Endpoints[0].Sample, r.Endpoints[1].Sample
	if now.Sub(old.At) != time.Hour || !old.Changed.IsZero() {
		t.Errorf("age %v, changed %v", now.Sub(old.At), old.Changed)
	}
	if now.Sub(young.At) != time.Millisecond || !young.Changed.Equal(young.At) {
		t.Errorf("age %v, changed %v before", now.Sub(young.At), now.Sub(young.Changed))
	}
	// The agent's side: a sample of the future is of now, no time at all is the
	// frame's.
	var e encoder
	f := Frame{Node: "n", At: now.Add(-time.Second), Endpoints: []Update{{Sample: telemetry.Sample{At: now.Add(time.Hour)}}, {}}}
	out := e.encode(&f, 1, 0, now)
	if a, b := out.Endpoints[0].AgeUs, out.Endpoints[1].AgeUs; a != 0 || b != 1e6 {
		t.Errorf("ages %d and %d µs", a, b)
	}
}

func TestTextIsBoundedAndPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                     "plain",
		"a\r\nb\x1b[31m\x00c\u2028": "a  b [31m c ",
		"ok\xff\xfe":                "ok",
		strings.Repeat("é", 200):    strings.Repeat("é", 128),
	} {
		if got := clip(in); got != want {
			t.Errorf("clip(%q) = %q", in, got)
		}
	}
}
