package engine

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestRTX4090ReplaysTheRealRun sends the 300 requests of a real vLLM run on an
// RTX 4090 (LLMServingSim, MIT) at their times into the profile fitted to it, and
// compares time per output token, throughput, the time to first token and how
// full the cache was.
func TestRTX4090ReplaysTheRealRun(t *testing.T) {
	requests := readServingRun(t)
	c := newClockwork(profile(t, "llama-3.1-8b-rtx4090"))
	sequences := make([]*Sequence, len(requests))
	next, full, batch, steps := 0, 0.0, 0.0, 0.0
	for next < len(requests) || c.e.RunningLen() > 0 {
		for next < len(requests) && requests[next].at <= c.now {
			sequences[next] = c.submit(requests[next].prompt, requests[next].output)
			next++
		}
		if _, ok := c.step(); !ok && next < len(requests) {
			c.now = requests[next].at
		}
		if c.e.WaitingLen() > 0 {
			full += c.e.KVUsage()
			batch += float64(c.e.RunningLen())
			steps++
		}
	}
	var perToken, first []float64
	tokens := 0
	for _, q := range sequences {
		ttft, _ := q.FirstToken()
		first = append(first, ttft.Seconds())
		perToken = append(perToken, 1000*(q.last-q.first).Seconds()/float64(q.Output-1))
		tokens += q.Output
	}
	slices.Sort(perToken)
	slices.Sort(first)
	throughput := float64(tokens) / c.now.Seconds()
	t.Logf("time per output token p50 %.1f ms, %.0f tokens/s, time to first token p50 %.1f s; with a queue: KV %.3f, batch %.1f; %d preemptions",
		perToken[len(perToken)/2], throughput, first[len(first)/2], full/steps, batch/steps, c.e.count.Preemptions)
	within(t, "time per output token", perToken[len(perToken)/2], 30.8, 0.15)
	within(t, "tokens per second", throughput, 1066, 0.15)
	within(t, "time to first token", first[len(first)/2], 60.2, 0.15)
	within(t, "KV usage with a queue", full/steps, 0.98, 0.05)
}

type served struct {
	at             time.Duration
	prompt, output int
}

// readServingRun reads the run's requests, or skips where they are not at hand.
func readServingRun(t *testing.T) []served {
	t.Helper()
	dir := os.Getenv("FAIRLEAD_TRACES")
	if dir == "" {
		dir = "../../../../shared/traces"
	}
	f, err := os.Open(filepath.Join(dir, "llmservingsim", "RTX4090_Llama-3.1-8B-requests.jsonl"))
	if err != nil {
		t.Skipf("the traces are not at hand (FAIRLEAD_TRACES): %v", err)
	}
	defer f.Close()
	var out []served
	origin := 0.0
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var row struct {
			Prompt int     `json:"input_toks"`
			Output int     `json:"output_toks"`
			Queued float64 `json:"queued_ts"`
		}
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			t.Fatal(err)
		}
		if len(out) == 0 {
			origin = row.Queued
		}
		out = append(out, served{time.Duration((row.Queued - origin) * 1e9), row.Prompt, row.Output})
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}
