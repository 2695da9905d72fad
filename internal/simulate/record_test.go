package simulate

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/scorer/features"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// TestLabelsOfATimelineMadeByHand is the labels' oracle: every rule once.
func TestLabelsOfATimelineMadeByHand(t *testing.T) {
	const ms = time.Millisecond
	line := &timeline{}
	line.add(5000*ms, 5000*ms) // a preemption
	line.add(9000*ms, 9400*ms) // a blocked step, longer than two ticks,
	line.add(9400*ms, 9500*ms) // and the next
	line.missed = []time.Duration{20_050 * ms, 15_000 * ms}
	line.settle()
	if len(line.spans) != 2 {
		t.Fatalf("%d spans; steps that touch are one", len(line.spans))
	}
	for _, test := range []struct {
		at   time.Duration
		want labels
	}{
		{3900 * ms, labels{onset: true}},
		{4000 * ms, labels{long: true, onset: true}}, // (t, t+1 s] holds its end
		{4799 * ms, labels{long: true, onset: true}}, //
		{4800 * ms, labels{short: true, long: true, onset: true}},
		{4999 * ms, labels{short: true, long: true, onset: true}},
		{5000 * ms, labels{now: true}}, // the future excludes t, the past holds it
		{5199 * ms, labels{now: true}},
		{5200 * ms, labels{}}, // quiet, not yet for a second
		{6000 * ms, labels{onset: true}},
		{8000 * ms, labels{long: true, onset: true}},
		{9200 * ms, labels{short: true, long: true, now: true}}, // inside the step
		{9600 * ms, labels{now: true}},
		{9700 * ms, labels{}},
		{10_500 * ms, labels{onset: true}},
		{14_000 * ms, labels{onset: true}}, // a miss counts only for the tick it is sent in
		{14_900 * ms, labels{short: true, long: true, onset: true}},
		{15_000 * ms, labels{now: true}},
		{15_900 * ms, labels{}},
		{16_000 * ms, labels{onset: true}},
		{19_850 * ms, labels{short: true, long: true, onset: true}},
		{19_849 * ms, labels{onset: true}},
	} {
		if got := line.labelsAt(test.at); got != test.want {
			t.Errorf("at %v: %+v, want %+v", test.at, got, test.want)
		}
	}
}

// TestTimelinesComeFromTheEngine: one GPU with room for little. The second
// request waits for KV blocks until the first is done, and misses its objective;
// then the engine crashes.
func TestTimelinesComeFromTheEngine(t *testing.T) {
	p, err := engine.ProfileByName(smallGPU)
	if err != nil {
		t.Fatal(err)
	}
	p.KVTokens = 1600
	policies, err := PoliciesByName([]string{Random}, nil)
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorld(Spec{
		Seed: 1, GPUs: []GPU{{Type: "tiny", Profile: p}}, Routers: 1, Policy: policies[0], Duration: time.Minute, SLO: 2 * time.Second,
		Arrivals: []load.Arrival{{At: time.Second, Prompt: 1000, Output: 200}, {At: 1500 * time.Millisecond, Prompt: 900, Output: 2}, {At: 40 * time.Second, Prompt: 10, Output: 1}},
		Faults:   []Fault{{GPU: 0, At: 20 * time.Second, For: time.Second}},
	}, newRecorder(1, 0, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	w.run()
	w.noteMisses()
	gaps := w.gpus[0].gaps
	first, second := &w.requests[0], &w.requests[1]
	if len(gaps.spans) != 2 || len(gaps.missed) != 1 || gaps.missed[0] != second.sent {
		t.Fatalf("spans %v, missed %v; want the wait, the crash and the second request", gaps.spans, gaps.missed)
	}
	wait := gaps.spans[0]
	// The wait begins with the first step planned after its arrival and ends with
	// the step that frees the blocks.
	if wait.from < second.arrived || wait.from > second.arrived+100*time.Millisecond || wait.to != first.ended {
		t.Errorf("wait %v; want from just after %v to %v", wait, second.arrived, first.ended)
	}
	if crash := gaps.spans[1]; crash != (span{20 * time.Second, 21 * time.Second}) {
		t.Errorf("crash %v", crash)
	}
}

func readRecording(t *testing.T, dir string) (Index, [][]float32) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, IndexFile))
	if err != nil {
		t.Fatal(err)
	}
	var index Index
	if err := json.Unmarshal(text, &index); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, RowsFile))
	if err != nil {
		t.Fatal(err)
	}
	width := 4 * len(index.Columns)
	if len(data) != width*index.RowCount {
		t.Fatalf("%d bytes; the index says %d rows of %d", len(data), index.RowCount, width)
	}
	rows := make([][]float32, index.RowCount)
	for i := range rows {
		rows[i] = make([]float32, len(index.Columns))
		if err := binary.Read(bytes.NewReader(data[i*width:(i+1)*width]), binary.LittleEndian, rows[i]); err != nil {
			t.Fatal(err)
		}
	}
	return index, rows
}

// A recording is hours of somebody's work: it is never overwritten, and one that
// was interrupted leaves nothing that looks like one.
func TestRecordingIsNeverOverwrittenAndNeverHalf(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := Record(ctx, RecordOptions{Dir: dir, Small: true, Done: func(run, _ int) { cancel() }}); err == nil {
		t.Fatal("an interrupted recording is no error")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("an interrupted recording left %v, %v", left, err)
	}
	old := filepath.Join(dir, RowsFile)
	if err := os.WriteFile(old, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Record(context.Background(), RecordOptions{Dir: dir, Small: true}); err == nil || !strings.Contains(err.Error(), "holds a recording (rows.f32); accepted: a folder without one") {
		t.Errorf("error %v", err)
	}
	if text, err := os.ReadFile(old); err != nil || string(text) != "precious" {
		t.Errorf("the old rows are %q, %v", text, err)
	}
}

func TestRecordingIsWhatTheIndexSays(t *testing.T) {
	dir := t.TempDir()
	done := 0
	written, err := Record(context.Background(), RecordOptions{Dir: dir, Small: true, Done: func(run, of int) { done = run - of }})
	if err != nil || done != 0 {
		t.Fatalf("%v; progress ended at %d before the end", err, done)
	}
	index, rows := readRecording(t, dir)
	if index.Format != Format || index.Schema != features.SchemaHash() || index.RowCount != written.RowCount || len(index.Columns) != features.Count+12 {
		t.Fatalf("index %+v", index)
	}
	column := func(name string) int {
		i := slices.IndexFunc(index.Columns, func(c Column) bool { return c.Name == name })
		if i < 0 {
			t.Fatalf("no column %q", name)
		}
		return i
	}
	gpu, at, run, scenario, kind := column("gpu"), column("time"), column("run"), column("scenario"), column("gpu_type")
	kv, risk, onset := column("kv_usage"), column("formula_risk"), column("onset")
	next := 0
	splits := map[string]bool{}
	for _, r := range index.Runs {
		splits[r.Split] = true
		if r.FirstRow != next || r.Rows == 0 || r.Rows%r.GPUs != 0 {
			t.Fatalf("run %d: %d rows from %d of %d GPUs; want to begin at %d", r.ID, r.Rows, r.FirstRow, r.GPUs, next)
		}
		onsets := 0
		for i, row := range rows[r.FirstRow : r.FirstRow+r.Rows] {
			if int(row[run]) != r.ID || index.Scenarios[int(row[scenario])] != r.Scenario || int(row[kind]) >= len(index.GPUTypes) {
				t.Fatalf("run %d, row %d: %v", r.ID, i, row)
			}
			if int(row[gpu]) != i/(r.Rows/r.GPUs) {
				t.Fatalf("run %d, row %d is of GPU %v", r.ID, i, row[gpu])
			}
			if i%(r.Rows/r.GPUs) > 0 && math.Abs(float64(row[at]-rows[r.FirstRow+i-1][at])-0.2) > 1e-4 {
				t.Fatalf("run %d, row %d at %v s", r.ID, i, row[at])
			}
			if !(row[kv] >= 0 && row[kv] <= 1) || !(row[risk] >= 0 && row[risk] <= 1) {
				t.Fatalf("run %d, row %d: KV usage %v, risk %v", r.ID, i, row[kv], row[risk])
			}
			onsets += int(row[onset])
		}
		if onsets != r.OnsetRows {
			t.Errorf("run %d: %d onset rows, the index says %d", r.ID, onsets, r.OnsetRows)
		}
		next += r.Rows
	}
	if len(splits) != 5 || next != index.RowCount {
		t.Errorf("splits %v, %d rows in runs of %d", splits, next, index.RowCount)
	}
	again := t.TempDir()
	if _, err := Record(context.Background(), RecordOptions{Dir: again, Small: true}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{RowsFile, IndexFile} {
		a, err1 := os.ReadFile(filepath.Join(dir, name))
		b, err2 := os.ReadFile(filepath.Join(again, name))
		if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs between two recordings (%v, %v)", name, err1, err2)
		}
	}
}

// TestFullRecordingKeepsItsSplitsApart checks the plan without running it.
func TestFullRecordingKeepsItsSplitsApart(t *testing.T) {
	plan := recordingPlan(RecordOptions{Traces: "../../" + TracesDir()})
	scenarios, profiles := map[string]map[string]bool{}, map[string]map[string]bool{}
	seeds := map[uint64]bool{}
	rows := 0
	for _, r := range plan {
		if scenarios[r.split] == nil {
			scenarios[r.split], profiles[r.split] = map[string]bool{}, map[string]bool{}
		}
		scenarios[r.split][r.name], profiles[r.split][r.profile] = true, true
		if seeds[r.seed] {
			t.Fatalf("seed %d occurs twice", r.seed)
		}
		seeds[r.seed] = true
		rows += r.gpus * int(r.length/recordPeriod)
	}
	for name := range scenarios[SplitHeldOutScenario] {
		if scenarios[SplitTrain][name] {
			t.Errorf("scenario %q is held out and trained on", name)
		}
	}
	for name := range profiles[SplitHeldOutGPU] {
		for _, split := range []string{SplitTrain, SplitValidation, SplitTest, SplitHeldOutScenario} {
			if profiles[split][name] {
				t.Errorf("profile %q is held out and occurs in %s", name, split)
			}
		}
	}
	if bytes := rows * 4 * len(Columns()); bytes > 300e6 {
		t.Errorf("the full set has %d bytes", bytes)
	}
}
