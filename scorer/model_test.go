package scorer

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// inputs are everything the formula looks at.
type inputs struct {
	kv, waiting, queued, capacity, ttft, prompt float64
	errors, attempts, xid                       int
	sent                                        float64
}

// risk plays two samples a second apart and asks the formula at the second.
func (in inputs) risk(t interface{ Fatalf(string, ...any) }) fleet.Risk {
	begin := time.Now()
	known := telemetry.HasKVUsage | telemetry.HasWaiting | telemetry.HasRunning | telemetry.HasTTFT |
		telemetry.HasPromptTokens | telemetry.HasXID
	if in.capacity > 0 {
		known |= telemetry.HasKVTokens
	}
	if in.queued >= 0 {
		known |= telemetry.HasQueuedTokens
	}
	var w telemetry.Window
	w.Add(telemetry.Sample{At: begin, Known: known})
	now := begin.Add(time.Second)
	w.Add(telemetry.Sample{
		At: now, Known: known, KVUsage: in.kv, Waiting: in.waiting, QueuedTokens: max(0, in.queued), KVTokens: in.capacity,
		TTFTSum: 10 * in.ttft, TTFTCount: 10, PromptTokens: 10 * in.prompt, XID: in.xid,
	})
	word, ok := Formula(FormulaOptions{}).Assess(&w, Own{Errors5s: in.errors, Attempts5s: in.attempts, SentPromptTokens: in.sent}, now)
	if !ok {
		t.Fatalf("cannot judge %+v", in)
	}
	if r := word.Risk; !(r >= 0 && r <= 1) {
		t.Fatalf("risk %v of %+v", r, in)
	}
	return word.Risk
}

func near(got fleet.Risk, want, tolerance float64) bool {
	return float64(got) > want-tolerance && float64(got) < want+tolerance
}

func TestFormulaKnownPoints(t *testing.T) {
	calm := inputs{capacity: 400_000}
	for name, tc := range map[string]struct {
		change func(*inputs)
		want   float64
	}{
		"idle":                                {func(*inputs) {}, 0.0017},
		"KV cache at 72 %":                    {func(i *inputs) { i.kv = 0.72 }, 0.5},
		"KV cache at 90 %":                    {func(i *inputs) { i.kv = 0.9 }, 0.832},
		"half the cache, as much queued":      {func(i *inputs) { i.kv, i.queued = 0.45, 200_000 }, 0.832},
		"as much sent since the sample":       {func(i *inputs) { i.kv, i.sent = 0.45, 200_000 }, 0.832},
		"five waiting":                        {func(i *inputs) { i.waiting = 5 }, 0.832},
		"ten first tokens after 2.4 s":        {func(i *inputs) { i.ttft = 2.4 }, 0.832},
		"waiting × the engine's own mean":     {func(i *inputs) { i.queued, i.waiting, i.prompt, i.kv = -1, 2, 100_000, 0.45 }, 0.832},
		"waiting × the assumed mean":          {func(i *inputs) { i.queued, i.waiting, i.kv, i.capacity = -1, 2, 0.45, 4080 }, 0.832},
		"unknown capacity counts no queue":    {func(i *inputs) { i.queued, i.capacity = 1e6, 0 }, 0.0017},
		"three errors":                        {func(i *inputs) { i.errors = 3 }, 0.489},
		"eight errors are above the ejection": {func(i *inputs) { i.errors = 8 }, 0.8325},
		"eight errors among 24 attempts":      {func(i *inputs) { i.errors, i.attempts = 8, 24 }, 0.4495},
		"eight errors among 1,000 attempts":   {func(i *inputs) { i.errors, i.attempts = 8, 1000 }, 0.0159},
		"XID of a dead process":               {func(i *inputs) { i.xid = 31 }, 0.501},
		"XID that needs a reset":              {func(i *inputs) { i.xid = 79 }, 0.95},
		"XID without consequence":             {func(i *inputs) { i.xid = 43 }, 0.0017},
	} {
		in := calm
		tc.change(&in)
		if got := in.risk(t); !near(got, tc.want, 0.002) {
			t.Errorf("%s: risk %.4f, want %.4f", name, got, tc.want)
		}
	}
}

func TestFormulaGrowsWithEachInput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string, most float64) float64 { return rapid.Float64Range(0, most).Draw(t, name) }
		in := inputs{
			kv: draw("kv", 1), waiting: draw("waiting", 50), queued: draw("queued", 1e6), capacity: 1000 + draw("capacity", 1e6),
			ttft: draw("ttft", 10), errors: rapid.IntRange(0, 30).Draw(t, "errors"),
			attempts: rapid.IntRange(0, 100).Draw(t, "attempts"), sent: draw("sent", 1e5),
		}
		if rapid.Bool().Draw(t, "engine without queued tokens") {
			in.queued, in.prompt = -1, draw("prompt", 1e5)
		}
		base := in.risk(t)
		for name, worse := range map[string]func(*inputs){
			"kv":       func(i *inputs) { i.kv += (1 - i.kv) / 2 },
			"waiting":  func(i *inputs) { i.waiting += 1 },
			"queued":   func(i *inputs) { i.queued *= 1.5 },
			"capacity": func(i *inputs) { i.capacity /= 2 },
			"ttft":     func(i *inputs) { i.ttft += 0.3 },
			"errors":   func(i *inputs) { i.errors++ },
			"failed":   func(i *inputs) { i.attempts /= 2 },
			"sent":     func(i *inputs) { i.sent += 100 },
			"xid":      func(i *inputs) { i.xid = 31 },
		} {
			if in.queued < 0 && name == "queued" {
				continue
			}
			changed := in
			worse(&changed)
			if got := changed.risk(t); got < base-1e-12 {
				t.Fatalf("more %s lowers the risk from %v to %v: %+v", name, base, got, in)
			}
		}
	})
}

func TestFormulaDoesNotJudgeWithoutYoungNumbers(t *testing.T) {
	m := Formula(FormulaOptions{})
	now := time.Now()
	if _, ok := m.Assess(nil, Own{Errors5s: 100}, now); ok {
		t.Error("judged an endpoint without telemetry")
	}
	var w telemetry.Window
	if _, ok := m.Assess(&w, Own{}, now); ok {
		t.Error("judged an empty window")
	}
	w.Add(telemetry.Sample{At: now, Known: telemetry.HasRunning | telemetry.HasXID})
	if _, ok := m.Assess(&w, Own{}, now); ok {
		t.Error("judged without KV usage and queue")
	}
	w.Add(telemetry.Sample{At: now.Add(tick), Known: telemetry.HasWaiting, Waiting: 1})
	if _, ok := m.Assess(&w, Own{}, now.Add(tick+FreshAge)); !ok {
		t.Error("did not judge numbers just young enough")
	}
	if _, ok := m.Assess(&w, Own{}, now.Add(tick+FreshAge+1)); ok {
		t.Error("judged old numbers")
	}
}

// TestOneLongPromptIsNoSlowServer: a single first token after 2 s stands in the
// window for a second, that is in five samples.
func TestOneLongPromptIsNoSlowServer(t *testing.T) {
	m := Formula(FormulaOptions{})
	var w telemetry.Window
	now := time.Now()
	for i := range 10 {
		now = now.Add(tick)
		s := telemetry.Sample{At: now, Known: telemetry.HasWaiting | telemetry.HasTTFT}
		if i >= 3 {
			s.TTFTSum, s.TTFTCount = 2, 1
		}
		w.Add(s)
		if r, ok := m.Assess(&w, Own{}, now); !ok || r.Risk >= fleet.RiskPrefer {
			t.Fatalf("risk %v after one long prompt", r.Risk)
		}
	}
}

func TestXIDCostsOnlyWhileItIsNews(t *testing.T) {
	m := Formula(FormulaOptions{})
	var w telemetry.Window
	now := time.Now()
	risk := func(xid int) fleet.Risk {
		now = now.Add(tick)
		w.Add(telemetry.Sample{At: now, Known: telemetry.HasKVUsage | telemetry.HasXID, XID: xid})
		r, _ := m.Assess(&w, Own{}, now)
		return r.Risk
	}
	for range 10 {
		risk(0)
	}
	if r := risk(31); r < 0.5 {
		t.Fatalf("risk %v when the XID appears", r)
	}
	for range telemetry.WindowTicks {
		risk(31)
	}
	if r := risk(31); r > 0.01 {
		t.Fatalf("risk %v of an XID that stands since 5 s", r)
	}
}
