package scorer

import (
	"math"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// Own is what we know of an endpoint without asking it: from our own ledger
// and from how requests to it ended.
type Own struct {
	// InFlight is the number of attempts running on it.
	InFlight int32
	// SentPromptTokens estimates the prompt tokens sent since its newest sample;
	// 0 if unknown.
	SentPromptTokens float64
	// ArrivedPromptTokens estimates the prompt tokens sent in the last second; 0
	// if unknown.
	ArrivedPromptTokens float64
	// MaxInFlight is the endpoint's limit on concurrent requests, which stands
	// for the engine's batch where its page doesn't tell that; 0 if there is
	// none.
	MaxInFlight int
	// Unanswered is how many requests of ours run on it, by our ledger, that the
	// engine does not count: they wait where it does not see them, or it has
	// lost them. What the ledger's own delay explains is taken off.
	Unanswered float64
	// Errors5s counts attempts of the last 5 s that ended by 5xx, reset or
	// timeout.
	Errors5s int
	// Attempts5s counts all attempts that ended in the last 5 s; 0 if unknown,
	// and then every one counts as failed.
	Attempts5s int
	// OOMStreak is how many out-of-memory answers came in a row.
	OOMStreak int
	// ConnectStreak is how many refused or reset connections came in a row, 0 while all
	// were reset and may be one client's doing.
	ConnectStreak int
	// Successes counts attempts that ended well since the process started.
	Successes uint64
}

// Model turns what is known of an endpoint into its risk. Implementations are
// pure and safe for concurrent use.
type Model interface {
	// Name identifies the model in metrics and records.
	Name() string
	// Assess judges an endpoint, or returns false if the window is too empty or
	// too old to judge. A w of nil is an endpoint without telemetry.
	Assess(w *telemetry.Window, own Own, now time.Time) (Assessment, bool)
}

// Assessment is a model's word on one endpoint.
type Assessment struct {
	// Risk lies in 0…1.
	Risk fleet.Risk
	// Margin is the log odds of Risk. Thresholds are compared on margins: a
	// boosted model's margin is the same bit for bit on every platform, while the
	// logistic function is not.
	Margin float64
}

// marginEject is the margin of fleet.RiskEject: ln(0.82/0.18) = 1.516347….
var marginEject = logit(float64(fleet.RiskEject))

// Hot reports whether the risk is above fleet.RiskEject.
func (a Assessment) Hot() bool { return a.Margin > marginEject }

// AssessRisk is the assessment of a model that has a risk and no margin.
func AssessRisk(risk float64) Assessment {
	risk = min(1, max(0, risk))
	return Assessment{Risk: fleet.Risk(risk), Margin: logit(risk)}
}

// AssessMargin is the assessment of a model that has a margin:
// risk = 1/(1+e^−margin).
func AssessMargin(margin float64) Assessment {
	return Assessment{Risk: fleet.Risk(1 / (1 + math.Exp(-margin))), Margin: margin}
}

// logit is ±Inf at 0 and 1.
func logit(p float64) float64 { return math.Log(p / (1 - p)) }

// FreshAge is how old a number may be to count as present: three ticks.
const FreshAge = 600 * time.Millisecond

// FormulaOptions are the constants of the formula that a fleet may want to
// change. The zero value takes the defaults.
type FormulaOptions struct {
	// TTFTLimit is the time to first token that is too long; default 2 s.
	TTFTLimit time.Duration
	// MeanPrompt is the assumed prompt length of a waiting request while the
	// engine itself has not told a mean; default 1,020 tokens, the median of the
	// Azure LLM inference trace of 2023 (conversations).
	MeanPrompt fleet.Tokens
}

// Constants of the formula.
const (
	defaultTTFTLimit  = 2 * time.Second
	defaultMeanPrompt = 1020

	// kvFull is the KV usage that counts as a full cache: above it vLLM soon
	// preempts (AIPerf's guide names 0.9 as the capacity limit).
	kvFull = 0.9
	// queueFull is the queue length that counts as saturation: the threshold of
	// the Gateway API inference extension (queue/5).
	queueFull = 5
	// steepness and centre place the logistic curve: risk 0.002 when idle, 0.35
	// at a load of 0.72, 0.5 at 0.8, 0.82 at 0.99. Of the curves tried in
	// simulation with 32 GPUs these kept the share of requests over 2 s to
	// first token at 0.05–0.11 % at 91 % load (round robin: 2–5 %).
	steepness = 8
	centre    = 0.8

	// errorPenalty is the probability that one failed request of the last 5 s
	// was chance: eight of them, with nothing that ended well, give a risk of
	// 0.83.
	errorPenalty = 0.8

	// ttftPrior is how many requests with no delay at all are added to the mean
	// time to first token: one long prompt alone must not look like a slow
	// server, and it would stand in five samples running.
	ttftPrior = 2
)

// xidRisk is the risk that an XID adds while it is news, by class. A code that
// kills the process halves the weight's base; one that asks for a later reset
// costs a little; one that needs a reset now is as good as certain.
var xidRisk = map[telemetry.XIDClass]float64{
	telemetry.XIDDrain:   0.3,
	telemetry.XIDSuspect: 0.5,
	telemetry.XIDEject:   0.95,
}

type formula struct {
	ttftLimit  time.Duration
	meanPrompt float64
}

// Formula returns the analytic model. With
//
//	load = max(kv/0.9 + queued/capacity, (waiting + unanswered)/5, ttft/limit)
//	risk = 1 − (1 − σ(8·(load − 0.8))) · 0.8^(errors²/attempts) · (1 − xid)
//
// where kv is the share of KV-cache blocks in use, queued the prompt tokens
// accepted or sent but not yet prefilled, capacity the KV cache's size in
// tokens, waiting the engine's queue, unanswered our requests that the engine
// does not count (a server that accepts and stays silent looks idle in its own
// numbers, and would draw all traffic), ttft the engine's own mean time to first
// token over the last second (with two requests of zero added), errors and
// attempts those of the last 5 s (a few errors among many answers weigh little)
// and xid the weight of an XID that appeared in the last 5 s (a gauge that
// never clears must not cost for ever).
//
// kv + queued/capacity is the analytic predictor that is hardest to beat: an
// average precision of 0.70–0.87 at 200 ms ahead in simulation, against
// 0.83–0.94 for boosted trees on 17 features, and better than those on GPUs
// they had not seen. An engine that does not say how many tokens are queued has
// waiting × mean prompt; one whose cache size is unknown goes by the other
// terms. The combination is a noisy or: each cause alone can raise the risk,
// none can lower it.
func Formula(o FormulaOptions) Model {
	f := formula{ttftLimit: o.TTFTLimit, meanPrompt: float64(o.MeanPrompt)}
	if f.ttftLimit <= 0 {
		f.ttftLimit = defaultTTFTLimit
	}
	if f.meanPrompt <= 0 {
		f.meanPrompt = defaultMeanPrompt
	}
	return f
}

func (formula) Name() string { return "formula" }

func (f formula) Assess(w *telemetry.Window, own Own, now time.Time) (Assessment, bool) {
	if w == nil || w.Age(now) > FreshAge {
		return Assessment{}, false
	}
	load, ok := f.load(w, own, now)
	if !ok {
		return Assessment{}, false
	}
	calm := 1 - 1/(1+math.Exp(-steepness*(load-centre)))
	calm *= math.Pow(errorPenalty, own.errorWeight())
	calm *= 1 - freshXID(w, now)
	return AssessRisk(1 - calm), true
}

// errorWeight is the number of errors times their share of all attempts.
func (o Own) errorWeight() float64 {
	errors := float64(max(0, o.Errors5s))
	if errors == 0 {
		return 0
	}
	return errors * errors / max(errors, float64(o.Attempts5s))
}

// load is the share of the endpoint's capacity in use; 1 is full.
func (f formula) load(w *telemetry.Window, own Own, now time.Time) (load float64, ok bool) {
	if s, known := w.Last(telemetry.HasKVUsage, now, FreshAge); known {
		load, ok = s.KVUsage/kvFull+f.queuedShare(w, own, now), true
	}
	if s, known := w.Last(telemetry.HasWaiting, now, FreshAge); known {
		load, ok = max(load, (s.Waiting+max(0, own.Unanswered))/queueFull), true
	}
	if !ok {
		return 0, false
	}
	if mean, count, known := w.MeanTTFT(time.Second); known {
		load = max(load, float64(mean)/float64(f.ttftLimit)*count/(count+ttftPrior))
	}
	return load, true
}

// queuedShare is the part of the KV cache that the prompts still to be
// prefilled will take.
func (f formula) queuedShare(w *telemetry.Window, own Own, now time.Time) float64 {
	capacity, ok := w.Last(telemetry.HasKVTokens, now, windowSpan)
	if !ok || capacity.KVTokens <= 0 {
		return 0
	}
	queued := max(0, own.SentPromptTokens)
	if s, ok := w.Last(telemetry.HasQueuedTokens, now, FreshAge); ok {
		queued += s.QueuedTokens
	} else if s, ok := w.Last(telemetry.HasWaiting, now, FreshAge); ok {
		queued += s.Waiting * f.promptLength(w)
	}
	return queued / capacity.KVTokens
}

// windowSpan is longer than any window: as old as the window holds.
const windowSpan = time.Hour

// promptLength is the engine's mean prompt length over the window.
func (f formula) promptLength(w *telemetry.Window) float64 {
	if tokens, ok := meanPrompt(w); ok {
		return tokens
	}
	return f.meanPrompt
}

// MeanPrompt is the engine's mean prompt length over the window in tokens, or
// the default of [FormulaOptions].MeanPrompt while it has not told one.
func MeanPrompt(w *telemetry.Window) float64 {
	if tokens, ok := meanPrompt(w); ok {
		return tokens
	}
	return defaultMeanPrompt
}

func meanPrompt(w *telemetry.Window) (float64, bool) {
	tokens, _, ok := w.Delta(telemetry.HasPromptTokens, windowSpan)
	_, requests, okCount := w.MeanTTFT(windowSpan)
	if !ok || !okCount || tokens <= 0 {
		return 0, false
	}
	return tokens / requests, true
}

// xidNews is how long an XID raises the risk: five seconds, as long as errors
// do.
const xidNews = 5 * time.Second

// freshXID is the weight of an XID that appeared a short while ago.
func freshXID(w *telemetry.Window, now time.Time) float64 {
	code, since := w.XID()
	if since.IsZero() || now.Sub(since) > xidNews {
		return 0
	}
	return xidRisk[telemetry.ClassifyXID(code)]
}
