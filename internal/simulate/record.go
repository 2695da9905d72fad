package simulate

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/features"
	"github.com/fairlead-proxy/fairlead/telemetry"
)

// A recording is a folder of two files that a training program reads:
//
//   - rows.f32: little-endian float32, RowCount rows of len(Columns) numbers, no
//     header. NaN is missing. Rows stand run after run, inside a run GPU after
//     GPU, inside a GPU in order of time, one every 200 ms;
//   - index.json: an [Index]: what the columns are, the names behind scenario and
//     GPU type ids, and for each run where its rows lie and which split it is
//     meant for.
//
// A row is one GPU at a tick of the first router, at time t. Its features are
// what features.Extract makes of the samples that had arrived by then (so 50 to
// 250 ms old) and of that router's own counts. Its labels look ahead from t.
//
// A capacity gap is, as a set of moments and stretches of time of one GPU:
// (a) a preemption; (b) a step that was planned while the request at the head of
// the queue could not be admitted for lack of KV blocks or of a place in the
// batch, for the whole length of that step, so that steps longer than a tick
// make no holes; (c) a crashed engine; (d) the moment at which a request was
// sent to the GPU whose first token came later than 2 s after its arrival, or
// never. Then
//
//	gap_h(t)   = (a), (b) or (c) in (t, t+h], or (d) in (t, t+200 ms], while the
//	             decisions made from t's plan last
//	gap_now(t) = (a), (b), (c) or (d) in (t−200 ms, t]
//	onset(t)   = none of them in (t−1 s, t]
//
// An onset is what a model has to foresee: rows with onset = 0 are to be left out
// of training and of ranking measures, since what is there already needs no
// prediction.
//
// Splits: train, validation and test are the same scenarios and GPU types under
// other seeds; heldout-scenario and heldout-gpu occur in none of those.

// Format names the layout of a recording.
const Format = "fairlead-recording/1"

// Names of a recording's files.
const (
	RowsFile  = "rows.f32"
	IndexFile = "index.json"
)

// Splits of a recording.
const (
	SplitTrain           = "train"
	SplitValidation      = "validation"
	SplitTest            = "test"
	SplitHeldOutScenario = "heldout-scenario"
	SplitHeldOutGPU      = "heldout-gpu"
)

// Column describes one number of a row.
type Column struct {
	Name string `json:"name"`
	Unit string `json:"unit"`
	Doc  string `json:"doc"`
}

// Columns are the numbers of a row in order: the features, under their own names
// (kv_usage and alloc_rate_1s among them serve as baselines too), then labels,
// then what identifies the row and the baselines that are no features.
func Columns() []Column {
	var out []Column
	for _, f := range features.All {
		out = append(out, Column{f.Name, f.Unit, f.Doc})
	}
	return append(out,
		Column{"gap_200ms", "0 or 1", "Label: a capacity gap in the 200 ms after t."},
		Column{"gap_1s", "0 or 1", "Label: a capacity gap in the second after t."},
		Column{"gap_now", "0 or 1", "A capacity gap in the 200 ms before t."},
		Column{"onset", "0 or 1", "No capacity gap in the second before t: a label of 1 is a new one."},
		Column{"run", "id", "Index of the run in runs."},
		Column{"scenario", "id", "Index in scenarios."},
		Column{"seed", "id", "Seed of the run."},
		Column{"gpu", "id", "Index of the GPU in its run."},
		Column{"gpu_type", "id", "Index in gpu_types."},
		Column{"time", "s", "t, from the start of the run."},
		Column{"formula_risk", "1", "Risk by the formula at t; missing where it can't judge."},
		Column{"util", "1", "Newest GPU utilisation as NVML tells it."},
	)
}

// Index describes a recording.
type Index struct {
	Format string `json:"format"`
	Rows   string `json:"rows_file"`
	// Schema is features.SchemaHash at the time of recording.
	Schema      string         `json:"schema"`
	Columns     []Column       `json:"columns"`
	RowCount    int            `json:"row_count"`
	TickSeconds float64        `json:"tick_seconds"`
	SLOSeconds  float64        `json:"slo_seconds"`
	Scenarios   []string       `json:"scenarios"`
	GPUTypes    []string       `json:"gpu_types"`
	Runs        []RecordingRun `json:"runs"`
	// Notes say what stands behind the arrivals.
	Notes []string `json:"notes"`
}

// RecordingRun is one run of a recording.
type RecordingRun struct {
	ID       int     `json:"id"`
	Split    string  `json:"split"`
	Scenario string  `json:"scenario"`
	Seed     uint64  `json:"seed"`
	Profile  string  `json:"profile"`
	Policy   string  `json:"policy"`
	Routers  int     `json:"routers"`
	Arrivals string  `json:"arrivals"`
	Load     float64 `json:"load"`
	GPUs     int     `json:"gpus"`
	FirstRow int     `json:"first_row"`
	Rows     int     `json:"rows"`
	// Onset rows and the labels among them.
	OnsetRows int `json:"onset_rows"`
	Gap200ms  int `json:"gap_200ms"`
	Gap1s     int `json:"gap_1s"`
}

// Lengths of a recorded run: the first ticks fill the windows.
const (
	recordWarmup   = 10 * time.Second
	recordLength   = 60 * time.Second
	recordTail     = 2 * time.Second // arrivals go on, so that no label lacks its future
	recordGPUs     = 16
	recordSLO      = 2 * time.Second
	recordPeriod   = 200 * time.Millisecond // from row to row, whatever the tick
	shortLabel     = 200 * time.Millisecond
	longLabel      = time.Second
	smallRecordLen = 5 * time.Second
)

// RecordOptions say what is recorded.
type RecordOptions struct {
	Dir    string
	Traces string // folder of the public traces
	// Small records one short run of each split instead of the full set of about
	// 250 MB.
	Small bool
	// Done, if not nil, is told after each run.
	Done func(run, of int)
}

// unfinished ends the name of rows that are still being written.
const unfinished = ".unfinished"

// Record writes a recording into a folder, which is made if it is not there. A
// folder that holds a recording is refused. It ends early, with an error and
// without a trace, when ctx does.
func Record(ctx context.Context, o RecordOptions) (_ Index, err error) {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	rowsFile := filepath.Join(o.Dir, RowsFile)
	for _, name := range []string{RowsFile, IndexFile} {
		if _, err := os.Stat(filepath.Join(o.Dir, name)); err == nil {
			return Index{}, fmt.Errorf("record: %s holds a recording (%s); accepted: a folder without one", o.Dir, name)
		}
	}
	file, err := os.Create(rowsFile + unfinished)
	if err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	defer func() {
		_ = file.Close()
		if err != nil {
			_ = os.Remove(rowsFile + unfinished)
		}
	}()
	out := bufio.NewWriterSize(file, 1<<20)
	index := Index{
		Format: Format, Rows: RowsFile, Schema: features.SchemaHash(), Columns: Columns(),
		TickSeconds: recordPeriod.Seconds(), SLOSeconds: recordSLO.Seconds(),
	}
	plans := recordingPlan(o)
	workloads := map[string]Workload{}
	for _, p := range plans {
		if _, ok := workloads[p.arrivals]; ok {
			continue
		}
		w, err := LoadWorkload(p.arrivals, o.Traces)
		if err != nil {
			return Index{}, fmt.Errorf("record: %w", err)
		}
		workloads[p.arrivals] = w
		index.Notes = append(index.Notes, p.arrivals+": "+w.About)
	}
	for i, p := range plans {
		if err := ctx.Err(); err != nil {
			return Index{}, fmt.Errorf("record: %w", err)
		}
		run, err := p.record(i, workloads[p.arrivals], &index, out)
		if err != nil {
			return Index{}, fmt.Errorf("record run %d: %w", i, err)
		}
		index.Runs = append(index.Runs, run)
		index.RowCount += run.Rows
		if o.Done != nil {
			o.Done(i+1, len(plans))
		}
	}
	if err := out.Flush(); err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	if err := file.Close(); err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	text, err := json.MarshalIndent(index, "", " ")
	if err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	if err := os.Rename(rowsFile+unfinished, rowsFile); err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	if err := os.WriteFile(filepath.Join(o.Dir, IndexFile), append(text, '\n'), 0o644); err != nil {
		return Index{}, fmt.Errorf("record: %w", err)
	}
	return index, nil
}

// recorder collects the rows of one run.
type recorder struct {
	next, until time.Duration // of the rows still to come
	formula     scorer.Model
	gpus        [][]tickRow // by GPU
}

// tickRow is a row without its labels.
type tickRow struct {
	at       time.Duration
	features features.Vector
	risk     float32
	util     float32
}

func newRecorder(gpus int, from, until time.Duration) *recorder {
	return &recorder{next: from, until: until, formula: scorer.Formula(scorer.FormulaOptions{}), gpus: make([][]tickRow, gpus)}
}

// tick records what the first router knows now.
func (r *recorder) tick(w *world) {
	if w.now < r.next || w.now >= r.until {
		return
	}
	r.next = w.now + recordPeriod
	for i, g := range w.gpus {
		own, now := w.routers[0].own(i), at(w.now)
		row := tickRow{at: w.now, features: features.Extract(&g.window, own, now), risk: missing, util: missing}
		if word, ok := r.formula.Assess(&g.window, own, now); ok {
			row.risk = float32(word.Risk)
		}
		if s, ok := g.window.Last(telemetry.HasGPUUtil, now, scorer.FreshAge); ok {
			row.util = float32(s.GPUUtil)
		}
		r.gpus[i] = append(r.gpus[i], row)
	}
}

var missing = float32(math.NaN())

// noteMisses enters the requests that missed their objective into the timelines
// of the GPUs they were sent to.
func (w *world) noteMisses() {
	for i := range w.requests {
		q := &w.requests[i]
		if q.outcome == failed || q.outcome == answered && q.ttft > w.spec.SLO {
			t := w.gpus[q.gpu].gaps
			t.missed = append(t.missed, q.sent)
		}
	}
	for _, g := range w.gpus {
		g.gaps.settle()
	}
}

// labels are the labels of a tick.
type labels struct{ short, long, now, onset bool }

// labelsAt judges a tick; see the comment on recordings.
func (t *timeline) labelsAt(at time.Duration) labels {
	missed := t.missedIn(at, at+shortLabel)
	return labels{
		short: missed || t.gapIn(at, at+shortLabel),
		long:  missed || t.gapIn(at, at+longLabel),
		now:   t.gapIn(at-recordPeriod, at) || t.missedIn(at-recordPeriod, at),
		onset: !t.gapIn(at-longLabel, at) && !t.missedIn(at-longLabel, at),
	}
}

// recordedRun is one run of the plan.
type recordedRun struct {
	split                     string
	name                      string // of the scenario in the recording
	scenario                  string // of Scenarios
	profile, policy, arrivals string
	seed                      uint64
	load                      float64
	routers                   int
	gpus                      int
	length                    time.Duration
}

// record makes the run and writes its rows.
func (p recordedRun) record(id int, work Workload, index *Index, out *bufio.Writer) (RecordingRun, error) {
	end := recordWarmup + p.length + recordTail
	spec, _, err := Setup{
		Workload: work, Scenario: p.scenario, Profile: p.profile, GPUs: p.gpus, Load: p.load, Duration: end,
	}.Spec(p.seed)
	if err != nil {
		return RecordingRun{}, err
	}
	policies, err := PoliciesByName([]string{p.policy}, nil)
	if err != nil {
		return RecordingRun{}, err
	}
	spec.Policy, spec.Routers, spec.SLO = policies[0], p.routers, recordSLO
	rec := newRecorder(len(spec.GPUs), recordWarmup, recordWarmup+p.length)
	w, err := newWorld(spec, rec)
	if err != nil {
		return RecordingRun{}, err
	}
	w.run()
	w.noteMisses()
	run := RecordingRun{
		ID: id, Split: p.split, Scenario: p.name, Seed: p.seed, Profile: p.profile, Policy: p.policy, Routers: p.routers,
		Arrivals: work.Name, Load: p.load, GPUs: len(spec.GPUs), FirstRow: index.RowCount,
	}
	scenario := float32(idOf(&index.Scenarios, p.name))
	row := make([]byte, 0, 4*len(index.Columns))
	for g, rows := range rec.gpus {
		kind := float32(idOf(&index.GPUTypes, spec.GPUs[g].Type))
		for i := range rows {
			tick := &rows[i]
			l := w.gpus[g].gaps.labelsAt(tick.at)
			run.count(l)
			row = row[:0]
			for _, v := range tick.features {
				row = appendFloat(row, v)
			}
			for _, v := range []float32{
				bit(l.short), bit(l.long), bit(l.now), bit(l.onset), float32(id), scenario, float32(p.seed), float32(g), kind,
				float32(tick.at.Seconds()), tick.risk, tick.util,
			} {
				row = appendFloat(row, v)
			}
			if _, err := out.Write(row); err != nil {
				return RecordingRun{}, err
			}
		}
	}
	return run, nil
}

func (r *RecordingRun) count(l labels) {
	r.Rows++
	if !l.onset {
		return
	}
	r.OnsetRows++
	r.Gap200ms += int(bit(l.short))
	r.Gap1s += int(bit(l.long))
}

func appendFloat(row []byte, v float32) []byte {
	return binary.LittleEndian.AppendUint32(row, math.Float32bits(v))
}

func bit(b bool) float32 {
	if b {
		return 1
	}
	return 0
}

// idOf is the index of a name, which is added if it is new.
func idOf(names *[]string, name string) int {
	for i, n := range *names {
		if n == name {
			return i
		}
	}
	*names = append(*names, name)
	return len(*names) - 1
}

// recordingPlan lists the runs. Training runs use policies that leave gaps to
// learn from: under a good policy there are none (a prevalence of 10⁻⁵ under P2C
// in one experiment, and the model learnt nothing).
func recordingPlan(o RecordOptions) []recordedRun {
	var out []recordedRun
	routers := []int{1, 4, 16}
	bad := []string{Random, RoundRobin, Argmin}
	const gaming, data = "llama-3.1-8b-rtx4090", "llama-3.1-8b-h100"
	grid := func(split string, scenarios, profiles, policies, arrivals []string, loads ...float64) {
		for _, scenario := range scenarios {
			for _, profile := range profiles {
				for _, policy := range policies {
					for _, a := range arrivals {
						for _, l := range loads {
							out = append(out, recordedRun{
								split: split, name: scenario, scenario: scenario, profile: profile, policy: policy, arrivals: a, load: l,
								seed: uint64(len(out) + 1), routers: routers[len(out)%len(routers)], gpus: recordGPUs, length: recordLength,
							})
						}
					}
				}
			}
		}
	}
	known := []string{"steady", "bursts", "slowdowns"}
	both := []string{Azure, Poisson}
	grid(SplitTrain, known, []string{gaming, data}, bad, both, 0.6, 0.7, 0.8, 0.9, 1, 1.1)
	grid(SplitValidation, known, []string{gaming, data}, bad, both[:1], 0.65, 0.85, 1.05)
	grid(SplitTest, known, []string{gaming, data}, bad, both[:1], 0.65, 0.85, 1.05)
	grid(SplitHeldOutScenario, []string{"mixed", "failures"}, []string{gaming}, bad, both[:1], 0.6, 0.75, 0.9)
	// named gives the runs from a place on a scenario name of their own.
	named := func(from int, name string) {
		for i := from; i < len(out); i++ {
			out[i].name = name
		}
	}
	closed := len(out)
	grid(SplitHeldOutScenario, []string{"steady"}, []string{gaming, data}, []string{P2C, Ours}, both, 0.8, 0.95)
	named(closed, "closed-loop")
	if _, err := os.Stat(filepath.Join(o.Traces, "mooncake")); err == nil {
		long := len(out)
		grid(SplitHeldOutScenario, []string{"steady"}, []string{data}, bad, []string{Mooncake}, 0.6, 0.75, 0.9)
		named(long, "long-prompts")
	}
	grid(SplitHeldOutGPU, []string{"steady", "bursts"}, []string{"llama-3.1-8b-l40s", "llama-3.1-8b-a100"}, bad, both[:1], 0.75, 0.9, 1, 1.1)
	if !o.Small {
		return out
	}
	return onePerSplit(out)
}

// onePerSplit keeps one short run of every split on few GPUs.
func onePerSplit(all []recordedRun) []recordedRun {
	rng := rand.New(rand.NewPCG(1, 0x736d616c6c))
	var out []recordedRun
	for _, split := range []string{SplitTrain, SplitValidation, SplitTest, SplitHeldOutScenario, SplitHeldOutGPU} {
		var candidates []recordedRun
		for _, r := range all {
			if r.split == split && r.load >= 0.75 && r.arrivals != Mooncake {
				candidates = append(candidates, r)
			}
		}
		r := candidates[rng.IntN(len(candidates))]
		r.gpus, r.length = 4, smallRecordLen
		out = append(out, r)
	}
	return out
}
