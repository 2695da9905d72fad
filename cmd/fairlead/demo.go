package main

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/demo"
	"github.com/fairlead-proxy/fairlead/internal/envoybin"
	"github.com/fairlead-proxy/fairlead/internal/load"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// faultFlags collects --fault.
type faultFlags []demo.Fault

func (f *faultFlags) String() string { return "" }

func (f *faultFlags) Set(s string) error {
	server, fault, err := sim.ParseFault(s)
	if err != nil {
		return err
	}
	*f = append(*f, demo.Fault{Server: server, Fault: fault})
	return nil
}

// compareDefaults are what --compare runs when flags don't say otherwise.
var compareDefaults = struct {
	duration, warmup time.Duration
	seeds            []uint64
	sidecars         []int
}{25 * time.Second, 2 * time.Second, []uint64{1, 2, 3}, []int{1, 16}}

func runDemo(ctx context.Context, args []string, io stdio) (err error) {
	flags := newFlags("demo", "", "Runs simulated GPUs, serve, several real Envoys and a load on this machine; Ctrl-C ends it.", io)
	var faults faultFlags
	sidecars := flags.Int("sidecars", 4, "`number` of Envoys")
	rps := flags.Float64("rps", demo.DefaultRPS, "requests per second over all sidecars; the fleet saturates near 48")
	duration := flags.Duration("duration", 0, "how long the load lasts; 0 is until interrupted (with --compare: 25s a run)")
	strategy := flags.String("strategy", "dynamic", "`strategy`: legacy or dynamic")
	seed := flags.Uint64("seed", 1, "seed of arrivals and lengths")
	scorer := flags.String("scorer", "formula", "risk `model`: formula")
	format := flags.String("o", "text", "output `format`: text or json")
	compare := flags.Bool("compare", false, "run both strategies, in both orders, 3 seeds, with 1 and 16 sidecars, and print a table")
	resultsFile := flags.String("results", "", "write every request with its times to this CSV `file`")
	verbose := flags.Bool("v", false, "log what the parts say")
	flags.Var(&faults, "fault", "`fault` KIND[(FACTOR)]:SERVER[@START][+LENGTH], such as slow:h100-2@10s; may be repeated")
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	s, err := fleet.ParseStrategy(*strategy)
	if err != nil {
		return usageError{fmt.Errorf("fairlead demo: --strategy %w", err)}
	}
	reporter, err := demo.NewReporter(io.out, *format, isTerminal(io.out))
	if err != nil {
		return usageError{fmt.Errorf("fairlead demo: -o: %w", err)}
	}
	binary, err := envoybin.Find(ctx, envoybin.Options{Progress: io.err})
	if err != nil {
		return err
	}
	options := demo.Options{
		Envoy: binary.Path, Sidecars: *sidecars, RPS: *rps, Duration: *duration, Strategy: s, Scorer: *scorer,
		Seed: *seed, Faults: faults, Log: demoLog(io.err, *verbose),
	}
	if *resultsFile != "" {
		results, err := newResults(*resultsFile)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, results.close()) }()
		options.OnResult = results.add
	}
	if *compare {
		return runCompare(ctx, options, *format, io)
	}
	summary, err := demo.Run(ctx, options, reporter)
	if err == nil && summary.Kind != "" {
		reporter.Summary(summary)
	}
	return err
}

// results writes requests as CSV.
type results struct {
	mu   sync.Mutex
	file *os.File
	csv  *csv.Writer
}

func newResults(path string) (*results, error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	r := &results{file: file, csv: csv.NewWriter(file)}
	return r, r.csv.Write([]string{"at_ms", "target", "server", "stream", "prompt_tokens", "output_tokens", "status", "late_ms", "headers_ms", "first_token_ms", "total_ms", "cut", "error"})
}

func (r *results) add(x load.Result) {
	ms := func(d time.Duration) string { return strconv.FormatFloat(float64(d.Microseconds())/1000, 'f', 1, 64) }
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.csv.Write([]string{ms(x.At), x.Target, x.ServedBy, strconv.FormatBool(x.Stream), strconv.Itoa(x.Prompt), strconv.Itoa(x.Output),
		strconv.Itoa(x.Status), ms(x.Late), ms(x.HeaderTime), ms(x.FirstToken), ms(x.Total), strconv.FormatBool(x.Cut), x.Err}) // kept by Writer.Error
}

func (r *results) close() error {
	r.csv.Flush()
	return errors.Join(r.csv.Error(), r.file.Close())
}

func runCompare(ctx context.Context, options demo.Options, format string, io stdio) error {
	if options.Duration == 0 {
		options.Duration = compareDefaults.duration
	}
	options.Warmup = min(compareDefaults.warmup, options.Duration/2)
	c, err := demo.RunCompare(ctx, demo.CompareOptions{Options: options, Seeds: compareDefaults.seeds, Sidecars: compareDefaults.sidecars},
		func(note string) { fmt.Fprintln(io.err, note) })
	if err != nil {
		return err
	}
	if format == "json" {
		return json.NewEncoder(io.out).Encode(c)
	}
	c.WriteTable(io.out)
	return nil
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// demoLog shows errors always and the rest only on request: the live summary
// shares the terminal with it.
func demoLog(w io.Writer, verbose bool) *slog.Logger {
	level := slog.LevelError
	if verbose {
		level = slog.LevelInfo
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
}
