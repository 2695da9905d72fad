package features

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// oracle computes the features from a plain list of samples, oldest first, one
// feature after the other, straight from the table of definitions. It shares no
// code with Extract.
func oracle(list []telemetry.Sample, own scorer.Own, now time.Time) map[string]float64 {
	x := map[string]float64{}
	xidSince := oracleXID(list)
	var kept []telemetry.Sample // as many as a window holds, in order of arrival
	for _, s := range list {
		if len(kept) == 0 || !s.At.Before(kept[len(kept)-1].At) {
			kept = append(kept, s)
		}
	}
	if len(kept) > telemetry.WindowTicks {
		kept = kept[len(kept)-telemetry.WindowTicks:]
	}
	if e := max(0, own.Errors5s); xidSince != nil && now.Sub(*xidSince) <= 5*time.Second {
		x["err_5s"] = float64(e + 10)
	} else {
		x["err_5s"] = float64(e)
	}
	if len(kept) == 0 {
		return x
	}
	end := kept[len(kept)-1]
	live := !end.Changed.IsZero() && now.Sub(end.Changed) <= 600*time.Millisecond

	young := func(f telemetry.Mask) *telemetry.Sample {
		for i := len(kept) - 1; i >= 0; i-- {
			if s := kept[i]; s.Known.Has(f) && now.Sub(s.At) <= 600*time.Millisecond {
				return &kept[i]
			}
		}
		return nil
	}
	newest := func(f telemetry.Mask) (float64, bool) {
		for i := len(kept) - 1; i >= 0; i-- {
			if v, ok := kept[i].Value(f); ok {
				return v, true
			}
		}
		return 0, false
	}
	// points are those between from and to before the newest sample, oldest first.
	points := func(f telemetry.Mask, from, to time.Duration) (t, v []float64) {
		for _, s := range kept {
			age := end.At.Sub(s.At)
			if y, ok := s.Value(f); ok && age <= from && age >= to {
				t, v = append(t, -age.Seconds()), append(v, y)
			}
		}
		return t, v
	}

	if live {
		if s := young(telemetry.HasKVUsage); s != nil {
			x["kv_usage"] = s.KVUsage
			t, v := points(telemetry.HasKVUsage, time.Second, 0)
			oracleSlope(x, "kv_slope_1s", t, v, 3)
			t, v = points(telemetry.HasKVUsage, 5*time.Second, 0)
			oracleSlope(x, "kv_slope_5s", t, v, 10)
		}
		field, total := telemetry.Mask(0), 1.0
		_, everKV := newest(telemetry.HasKVUsage)
		if young(telemetry.HasKVUsage) != nil {
			field = telemetry.HasKVUsage
		} else if !everKV && young(telemetry.HasFBUsed|telemetry.HasFBTotal) != nil {
			if total, _ = newest(telemetry.HasFBTotal); total > 0 {
				field = telemetry.HasFBUsed
			}
		}
		if field != 0 {
			t, v := points(field, time.Second, 0)
			last, okLast := oracleGrowth(t, v)
			t, v = points(field, 2*time.Second, time.Second)
			before, okBefore := oracleGrowth(t, v)
			if okLast {
				x["alloc_rate_1s"] = last / total
			}
			if okLast && okBefore {
				x["alloc_slope_1s"] = last/total - before/total
			}
			t, v = points(field, 5*time.Second, 0)
			var rates []float64
			for i := 1; i < len(t); i++ {
				if t[i] > t[i-1] {
					rates = append(rates, math.Max(0, v[i]-v[i-1])/(t[i]-t[i-1])/total)
				}
			}
			if len(rates) >= 10 {
				x["alloc_std_5s"] = oracleDeviation(rates)
			}
		}
		if s := young(telemetry.HasWaiting); s != nil {
			x["waiting"] = s.Waiting
		}
		batch, _ := newest(telemetry.HasMaxSeqs)
		if batch <= 0 {
			batch = float64(own.MaxInFlight)
		}
		if s := young(telemetry.HasRunning); s != nil && batch > 0 {
			x["running_frac"] = s.Running / batch
		}
		if s := young(telemetry.HasRunning | telemetry.HasWaiting); s != nil {
			x["inflight_delta"] = float64(own.InFlight) - (s.Running + s.Waiting)
		}
		_, p := points(telemetry.HasPreemptions, 5*time.Second, 0)
		blocked, known := 0.0, len(p) >= 2
		for i := 1; i < len(p); i++ {
			if p[i] > p[i-1] {
				blocked += p[i] - p[i-1]
			}
		}
		for _, s := range kept {
			if end.At.Sub(s.At) > 5*time.Second || !s.Known.Has(telemetry.HasWaiting) {
				continue
			}
			known = true
			cacheFull := s.Known.Has(telemetry.HasKVUsage) && s.KVUsage >= 0.9
			batchFull := s.Known.Has(telemetry.HasRunning) && batch > 0 && s.Running >= batch
			if s.Waiting > 0 && (cacheFull || batchFull) {
				blocked++
			}
		}
		if known {
			x["blocked_5s"] = blocked
		}
	}

	for _, f := range []telemetry.Mask{telemetry.HasGRActive, telemetry.HasGPUUtil} {
		if young(f) != nil {
			t, v := points(f, time.Second, 0)
			x["gr_active_1s"] = oracleMean(v)
			oracleSlope(x, "util_slope_1s", t, v, 3)
			break
		}
	}
	if young(telemetry.HasDRAMActive) != nil {
		_, v := points(telemetry.HasDRAMActive, time.Second, 0)
		x["dram_active_1s"] = oracleMean(v)
	}
	if young(telemetry.HasPCIe) != nil {
		_, v := points(telemetry.HasPCIe, time.Second, 0)
		most := math.Inf(-1)
		for _, y := range v {
			most = math.Max(most, y)
		}
		x["pcie_sat_1s"] = most
	}

	if tokens, _ := newest(telemetry.HasKVTokens); tokens > 0 {
		queued := math.Max(0, own.SentPromptTokens)
		if s := young(telemetry.HasQueuedTokens); live && s != nil {
			queued += s.QueuedTokens
		} else if s := young(telemetry.HasWaiting); live && s != nil {
			queued += s.Waiting * oracleMeanPrompt(kept)
		}
		x["queued_tokens_frac"] = queued / tokens
		x["arr_tokens_1s"] = math.Max(0, own.ArrivedPromptTokens) / tokens
	}
	return x
}

// oracleXID is when the GPU's last XID appeared, or nil if it has none that is
// news.
func oracleXID(list []telemetry.Sample) *time.Time {
	var since *time.Time
	code, events, seen := 0, 0.0, false
	var newest time.Time
	for _, s := range list {
		if s.At.Before(newest) {
			continue
		}
		newest = s.At
		if s.Known.Has(telemetry.HasXID) {
			old, fresh := telemetry.ClassifyXID(code), telemetry.ClassifyXID(s.XID)
			counts := s.XIDEvents > 0 || events > 0
			graver := fresh > old || fresh == old && s.XID > code
			if seen && (s.XIDEvents > events || counts && graver || !counts && s.XID != code) {
				at := s.At
				since = &at
			}
			code, events = s.XID, s.XIDEvents
		}
		seen = seen || s.Known.HasGPU()
	}
	if code == 0 {
		return nil
	}
	return since
}

// oracleMeanPrompt is the engine's tokens per request over what is kept: the
// rises of the counter, and the histogram's count.
func oracleMeanPrompt(kept []telemetry.Sample) float64 {
	const assumed = 1020
	var tokens []float64
	var counts, sums []float64
	for _, s := range kept {
		if s.Known.Has(telemetry.HasPromptTokens) {
			tokens = append(tokens, s.PromptTokens)
		}
		if s.Known.Has(telemetry.HasTTFT) {
			counts, sums = append(counts, s.TTFTCount), append(sums, s.TTFTSum)
		}
	}
	if len(tokens) < 2 || len(counts) == 0 {
		return assumed
	}
	total := 0.0
	for i := 1; i < len(tokens); i++ {
		total += math.Max(0, tokens[i]-tokens[i-1])
	}
	requests, sum := counts[len(counts)-1]-counts[0], sums[len(sums)-1]-sums[0]
	if total <= 0 || requests <= 0 || sum < 0 {
		return assumed
	}
	return total / requests
}

func oracleMean(v []float64) float64 {
	sum := 0.0
	for _, y := range v {
		sum += y
	}
	return sum / float64(len(v))
}

func oracleDeviation(v []float64) float64 {
	mean, sum := oracleMean(v), 0.0
	for _, y := range v {
		sum += (y - mean) * (y - mean)
	}
	return math.Sqrt(sum / float64(len(v)))
}

func oracleSlope(x map[string]float64, name string, t, v []float64, least int) {
	if len(t) < least || t[0] == t[len(t)-1] {
		return
	}
	meanT, meanV := oracleMean(t), oracleMean(v)
	var cov, spread float64
	for i := range t {
		cov += (t[i] - meanT) * (v[i] - meanV)
		spread += (t[i] - meanT) * (t[i] - meanT)
	}
	x[name] = cov / spread
}

func oracleGrowth(t, v []float64) (float64, bool) {
	if len(t) < 2 || t[0] == t[len(t)-1] {
		return 0, false
	}
	sum := 0.0
	for i := 1; i < len(v); i++ {
		sum += math.Max(0, v[i]-v[i-1])
	}
	return sum / (t[len(t)-1] - t[0]), true
}

// history draws samples as a bad day brings them: blanks of single fields and of
// whole sources, gaps, equal times, samples out of order, restarts, frozen
// pages, and a last word that may be old.
func history(t *rapid.T) (list []telemetry.Sample, own scorer.Own, now time.Time) {
	start := time.Now()
	at := time.Duration(0)
	const all = 1<<19 - 1
	usual := telemetry.Mask(rapid.Uint32Range(0, all).Draw(t, "usual"))
	if rapid.Bool().Draw(t, "knows all") {
		usual = all
	}
	// float draws plain numbers; rapid's own favour 1e-300 and its like, which
	// real gauges don't show.
	float := func(name string, most int) float64 {
		return float64(rapid.IntRange(0, most*1000).Draw(t, name)) / 1000
	}
	steady := rapid.Bool().Draw(t, "steady")
	counters := [4]float64{}
	for range rapid.IntRange(0, 40).Draw(t, "samples") {
		step := 200 * time.Millisecond
		if !steady {
			step = rapid.SampledFrom([]time.Duration{0, 40, 190, 200, 200, 200, 210, 400, 1000, 2600, -100}).Draw(t, "step") * time.Millisecond
		}
		at += step
		for i := range counters {
			counters[i] += float("count", 50)
			if rapid.IntRange(0, 30).Draw(t, "restart") == 0 {
				counters[i] = 0
			}
		}
		known := usual
		switch rapid.IntRange(0, 9).Draw(t, "loss") {
		case 0:
			known &= telemetry.Mask(rapid.Uint32Range(0, all).Draw(t, "left"))
		case 1:
			known &= telemetry.HasGPUUtil | telemetry.HasGRActive | telemetry.HasDRAMActive | telemetry.HasPCIe | telemetry.HasXID
		}
		s := telemetry.Sample{
			At: start.Add(at), Known: known,
			KVUsage: float("kv", 1), Running: float64(rapid.IntRange(0, 300).Draw(t, "running")), Waiting: float64(rapid.IntRange(0, 9).Draw(t, "waiting")),
			KVTokens: float64(rapid.SampledFrom([]int{0, 40_000, 400_000}).Draw(t, "tokens")), MaxSeqs: float64(rapid.SampledFrom([]int{0, 128, 256}).Draw(t, "batch")),
			QueuedTokens: float("queued", 9000), PromptTokens: 1000 * counters[0], Preemptions: counters[1],
			TTFTSum: counters[2], TTFTCount: counters[3],
			GPUUtil: float("util", 1), GRActive: float("gr", 1), DRAMActive: float("dram", 1), PCIeShare: float("pcie", 1),
			FBUsedMiB: float("fb", 80_000), FBTotalMiB: float64(rapid.SampledFrom([]int{0, 80_000}).Draw(t, "total")),
			XID: rapid.SampledFrom([]int{0, 0, 0, 31, 79}).Draw(t, "xid"), XIDEvents: float64(rapid.IntRange(0, 2).Draw(t, "events")),
		}
		s.Changed = s.At.Add(-rapid.SampledFrom([]time.Duration{0, 0, 0, 500, 600, 700, 9000}).Draw(t, "still") * time.Millisecond)
		list = append(list, s)
	}
	now = start.Add(at + rapid.SampledFrom([]time.Duration{0, 0, 30, 400, 600, 601, 3000, 20_000}).Draw(t, "age")*time.Millisecond)
	own = scorer.Own{
		InFlight: rapid.Int32Range(-1, 300).Draw(t, "in flight"), MaxInFlight: rapid.SampledFrom([]int{0, 256}).Draw(t, "max"),
		SentPromptTokens: float("sent", 9000) - 100, ArrivedPromptTokens: float("arrived", 9000) - 100,
		Errors5s: rapid.IntRange(-1, 20).Draw(t, "errors"),
	}
	return list, own, now
}

// TestExtractAgreesWithAPlainSecondImplementation: equal up to float32's
// rounding, and missing exactly where the definitions say so.
func TestExtractAgreesWithAPlainSecondImplementation(t *testing.T) {
	known := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		list, own, now := history(t)
		var w telemetry.Window
		for _, s := range list {
			w.Add(s)
		}
		got, want := Extract(&w, own, now), oracle(list, own, now)
		for i, f := range All {
			v, ok := want[f.Name]
			if isMissing := math.IsNaN(float64(got[i])); isMissing == ok {
				t.Fatalf("%s: got %v, want %v (known %v)", f.Name, got[i], v, ok)
			}
			// Differences of values near 1 leave an error of some 1e-16 each, which
			// times a rate of 25/s and a root stays below 1e-7.
			if ok && math.Abs(float64(got[i])-v) > 1e-6*math.Abs(v)+2e-7 {
				t.Fatalf("%s: got %v, want %v", f.Name, got[i], v)
			}
			if ok {
				known[f.Name]++
			}
		}
		for name := range want {
			if index(name) < 0 {
				t.Fatalf("the oracle has a feature %q", name)
			}
		}
	})
	for _, f := range All {
		if known[f.Name] == 0 {
			t.Errorf("%s was missing in every history: nothing is tested", f.Name)
		}
	}
}

func index(name string) int {
	for i := range All {
		if All[i].Name == name {
			return i
		}
	}
	return -1
}
