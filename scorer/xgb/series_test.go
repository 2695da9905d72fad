package xgb

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// realRequest is one request of the real run; times are seconds since the first.
type realRequest struct {
	queued, scheduled, first, last float64
	prompt                         float64
}

// realTick is one second of the engine's own log.
type realTick struct {
	at, prompt, generated, running, waiting, kv float64
}

func tracePath(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("FAIRLEAD_TRACES")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared", "traces")
	}
	path := filepath.Join(dir, "llmservingsim", name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("the real series is not at hand (FAIRLEAD_TRACES): %v", err)
	}
	return path
}

func readRequests(t *testing.T) []realRequest {
	t.Helper()
	f, err := os.Open(tracePath(t, "RTX4090_Llama-3.1-8B-requests.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []realRequest
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r struct {
			Prompt    float64 `json:"input_toks"`
			Queued    float64 `json:"queued_ts"`
			Scheduled float64 `json:"scheduled_ts"`
			First     float64 `json:"first_token_ts"`
			Last      float64 `json:"last_token_ts"`
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, realRequest{queued: r.Queued, scheduled: r.Scheduled, first: r.First, last: r.Last, prompt: r.Prompt})
	}
	begin := out[0].queued
	for _, r := range out {
		begin = min(begin, r.queued)
	}
	for i := range out {
		out[i].queued -= begin
		out[i].scheduled -= begin
		out[i].first -= begin
		out[i].last -= begin
	}
	return out
}

func readTicks(t *testing.T) []realTick {
	t.Helper()
	f, err := os.Open(tracePath(t, "RTX4090_Llama-3.1-8B-timeseries.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var out []realTick
	for _, line := range lines[1:] {
		var v [6]float64
		for i := range v {
			if v[i], err = strconv.ParseFloat(line[i], 64); err != nil {
				t.Fatal(err)
			}
		}
		out = append(out, realTick{at: v[0], prompt: v[1], generated: v[2], running: v[3], waiting: v[4], kv: v[5] / 100})
	}
	return out
}

// replay feeds the run through a window, as a scrape of 1 Hz would, and returns
// each model's assessments.
func replay(ticks []realTick, requests []realRequest, models []scorer.Model) [][]scorer.Assessment {
	origin := time.Unix(1_700_000_000, 0)
	out := make([][]scorer.Assessment, len(models))
	var w telemetry.Window
	var prompt, generated float64
	for _, tick := range ticks {
		now := origin.Add(time.Duration(tick.at * float64(time.Second)))
		prompt, generated = prompt+tick.prompt, generated+tick.generated
		s := telemetry.Sample{
			At: now, Known: telemetry.HasKVUsage | telemetry.HasRunning | telemetry.HasWaiting | telemetry.HasKVTokens |
				telemetry.HasMaxSeqs | telemetry.HasPromptTokens | telemetry.HasGenerationTokens | telemetry.HasTTFT,
			KVUsage: tick.kv, Running: tick.running, Waiting: tick.waiting,
			KVTokens: 41_408, // of the run's log
			MaxSeqs:  256, PromptTokens: prompt, GenerationTokens: generated,
		}
		own := scorer.Own{MaxInFlight: 256}
		for _, r := range requests {
			if r.first <= tick.at {
				s.TTFTSum, s.TTFTCount = s.TTFTSum+r.first-r.queued, s.TTFTCount+1
			}
			if r.queued <= tick.at && r.last > tick.at {
				own.InFlight++
			}
			if r.queued <= tick.at && r.queued > tick.at-1 {
				own.ArrivedPromptTokens += r.prompt
			}
		}
		w.Add(s)
		for i, m := range models {
			a, _ := m.Assess(&w, own, now)
			out[i] = append(out[i], a)
		}
	}
	return out
}

// TestRealOverloadIsSeen replays the one public series of a real engine that runs
// out of KV cache: vLLM 0.19 with Llama-3.1-8B on an RTX 4090
// (github.com/casys-kaist/LLMServingSim, MIT). It is an illustration: one onset,
// sampled at 1 Hz, so that slopes over 1 s are missing; it proves nothing about
// how often a model is right.
func TestRealOverloadIsSeen(t *testing.T) {
	ticks, requests := readTicks(t), readRequests(t)
	// The overload begins with the first request that is not scheduled within 2 s.
	onset := requests[len(requests)-1].queued
	for _, r := range requests {
		if r.scheduled-r.queued > 2 {
			onset = min(onset, r.queued)
		}
	}
	m, err := Shipped()
	if err != nil {
		t.Fatal(err)
	}
	model, err := Risk(m, "xgb")
	if err != nil {
		t.Fatal(err)
	}
	models := []scorer.Model{scorer.Formula(scorer.FormulaOptions{}), model}
	t.Logf("first request that waits more than 2 s to be scheduled: queued at %.2f s", onset)
	for i, assessed := range replay(ticks, requests, models) {
		first, second, hot := -1.0, -1.0, 0
		for k, a := range assessed {
			if a.Hot() {
				hot++
				if first < 0 {
					first = ticks[k].at
				}
				if second < 0 && k > 0 && assessed[k-1].Hot() {
					second = ticks[k].at
				}
			}
			if k < 8 {
				t.Logf("%s: %2.0f s, KV %5.1f %%, running %2.0f, waiting %3.0f: risk %.3f", models[i].Name(), ticks[k].at, 100*ticks[k].kv,
					ticks[k].running, ticks[k].waiting, a.Risk)
			}
		}
		t.Logf("%s: first alarm %+.2f s from the onset, second in a row %+.2f s, hot in %d of %d samples", models[i].Name(),
			first-onset, second-onset, hot, len(assessed))
		if first < 0 || first > onset+2 {
			t.Errorf("%s: first alarm at %v s; want it within 2 s of the onset at %.2f s", models[i].Name(), first, onset)
		}
		if assessed[0].Hot() {
			t.Errorf("%s: hot at a KV usage of %v", models[i].Name(), ticks[0].kv)
		}
	}
}
