package simulate

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/load"
)

// Workload is a source of arrivals at a rate that is still to be chosen.
type Workload struct {
	// Name is azure, mooncake or poisson; About says what it really is.
	Name, About string

	trace []load.Arrival // nil: independent callers with lengths
	span  time.Duration  // of the trace
}

// Names of the workloads.
const (
	Azure    = "azure"
	Mooncake = "mooncake"
	Poisson  = "poisson"
)

// TracesDir is where the public traces lie: the environment's FAIRLEAD_TRACES,
// else ../shared/traces.
func TracesDir() string {
	if dir := os.Getenv("FAIRLEAD_TRACES"); dir != "" {
		return dir
	}
	return filepath.Join("..", "shared", "traces")
}

// LoadWorkload returns a workload by name, with its trace from dir. Where the
// Azure trace is not there it is replaced by independent callers with lengths
// fitted to it, and About says so; the Mooncake trace has no such fit.
func LoadWorkload(name, dir string) (Workload, error) {
	independent := Workload{Name: Poisson, About: "Poisson arrivals with lengths fitted to the Azure conversation trace of 2023"}
	switch name {
	case Poisson:
		return independent, nil
	case Azure:
		trace, err := readTrace(filepath.Join(dir, "azure-2023", "AzureLLMInferenceTrace_conv.csv"), load.ReadAzureTrace)
		if errors.Is(err, fs.ErrNotExist) {
			independent.Name = Azure
			independent.About += " (the trace itself is not at hand)"
			return independent, nil
		}
		return workload(name, "arrivals and lengths of the Azure conversation trace of 2023, time compressed", trace), err
	case Mooncake:
		trace, err := readTrace(filepath.Join(dir, "mooncake", "conversation_trace.jsonl"), ReadMooncakeTrace)
		return workload(name, "arrivals and lengths of the Mooncake conversation trace, time compressed, without reuse of prefixes", trace), err
	}
	return Workload{}, fmt.Errorf("found arrivals %q; accepted: %s, %s, %s", name, Azure, Mooncake, Poisson)
}

func readTrace(path string, read func(io.Reader) ([]load.Arrival, error)) ([]load.Arrival, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	defer f.Close()
	trace, err := read(f)
	if err == nil && len(trace) < 2 {
		err = errors.New("fewer than 2 requests")
	}
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", path, err)
	}
	return trace, nil
}

func workload(name, about string, trace []load.Arrival) Workload {
	w := Workload{Name: name, About: about, trace: trace}
	if n := len(trace); n > 0 {
		w.span = trace[n-1].At * time.Duration(n) / time.Duration(n-1)
	}
	return w
}

// mooncakeGrid is the grid on which the Mooncake trace's timestamps lie.
const mooncakeGrid = 3 * time.Second

// ReadMooncakeTrace reads a trace of the Mooncake data set (FAST'25 release): a
// JSON object a line with timestamp in ms, input_length and output_length. Its
// timestamps lie on a grid of 3 s; the requests of one point are spread evenly
// over it. The hash_ids, which tell shared prefixes, are not read.
func ReadMooncakeTrace(r io.Reader) ([]load.Arrival, error) {
	var out []load.Arrival
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		row := struct {
			Timestamp *int64 `json:"timestamp"`
			Input     int    `json:"input_length"`
			Output    int    `json:"output_length"`
		}{}
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			return nil, fmt.Errorf("read trace: line %d: %w", n, err)
		}
		if row.Timestamp == nil || *row.Timestamp < 0 || row.Input < 1 || row.Output < 1 {
			return nil, fmt.Errorf("read trace: line %d: accepted: timestamp of at least 0, input_length and output_length of at least 1", n)
		}
		out = append(out, load.Arrival{At: time.Duration(*row.Timestamp) * time.Millisecond, Prompt: row.Input, Output: row.Output})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	slices.SortStableFunc(out, func(a, b load.Arrival) int { return int(a.At - b.At) })
	spread(out)
	return out, nil
}

// spread moves requests with one timestamp apart, and numbers all.
func spread(trace []load.Arrival) {
	for from := 0; from < len(trace); {
		to := from
		for to < len(trace) && trace[to].At == trace[from].At {
			to++
		}
		base := trace[from].At
		for i := from; i < to; i++ {
			trace[i].At = base + mooncakeGrid*time.Duration(i-from)/time.Duration(to-from)
			trace[i].Index = i
		}
		from = to
	}
}

// Lengths returns the prompt and output lengths of many requests, as a sample
// for engine.Profile.Capacity. Requests longer than maxLen are left out.
func (w Workload) Lengths(maxLen int) (prompt, output []int) {
	trace := w.trace
	if trace == nil {
		trace = load.Schedule(1, 1000, 20*time.Second, load.Poisson, load.AzureConversation(), 0)
	}
	for _, a := range trace {
		if a.Prompt+a.Output <= maxLen {
			prompt, output = append(prompt, a.Prompt), append(output, a.Output)
		}
	}
	return prompt, output
}

// Arrivals returns the arrivals of one seed at a mean rate per second over d.
// Requests longer than maxLen tokens, prompt and answer together, are left out;
// too many of them is how many that were. A trace begins at a point that the
// seed chooses, runs faster or slower, and begins anew at its end.
func (w Workload) Arrivals(seed uint64, rate float64, d time.Duration, maxLen int) (out []load.Arrival, tooLong int) {
	if w.trace == nil {
		for _, a := range load.Schedule(seed, rate, d, load.Poisson, load.AzureConversation(), 0) {
			if a.Prompt+a.Output > maxLen {
				tooLong++
				continue
			}
			out = append(out, a)
		}
		return out, tooLong
	}
	rng := rand.New(rand.NewPCG(seed, 0x7472616365))
	first := rng.IntN(len(w.trace))
	pace := float64(len(w.trace)) / w.span.Seconds() / rate
	begin := w.trace[first].At
	for i := first; ; i++ {
		a := w.trace[i%len(w.trace)]
		passed := a.At + w.span*time.Duration(i/len(w.trace)) - begin
		a.At = time.Duration(float64(passed) * pace)
		if a.At >= d {
			return out, tooLong
		}
		if a.Prompt+a.Output > maxLen {
			tooLong++
			continue
		}
		a.Index = len(out)
		out = append(out, a)
	}
}

// Bursts of [WithBursts]: every 20 s the rate rises to 2.2 times the mean for
// 4 s; between bursts it is 0.7 times the mean, so that the mean stays.
const (
	burstPeriod = 20 * time.Second
	burstLength = 4 * time.Second
	burstRate   = 2.2
	calmRate    = 0.7
)

// WithBursts warps the times of arrivals of steady rate into bursts; phase is
// where in a period they begin.
func WithBursts(arrivals []load.Arrival, phase time.Duration) []load.Arrival {
	burst := burstLength.Seconds() * burstRate // operational time in a burst
	period := burstPeriod.Seconds()
	warp := func(u float64) float64 {
		whole := float64(int(u / period))
		rest := u - whole*period
		if rest < burst {
			return whole*period + rest/burstRate
		}
		return whole*period + burstLength.Seconds() + (rest-burst)/calmRate
	}
	out := slices.Clone(arrivals)
	start := phase.Seconds()
	for i := range out {
		out[i].At = time.Duration((warp(out[i].At.Seconds()+start) - warp(start)) * float64(time.Second))
	}
	return out
}
