package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/demo"
	"github.com/fairlead-proxy/fairlead/internal/envoybin"
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

// What --compare measures by default: the length of one run, and of its first
// part that does not count.
const (
	compareDuration = 25 * time.Second
	compareWarmup   = 2 * time.Second
)

// compareFlags say which runs --compare makes.
type compareFlags struct {
	seeds    int
	sidecars string
}

// options turns the flags into what is run.
func (c compareFlags) options(o demo.Options) (demo.CompareOptions, error) {
	out := demo.CompareOptions{Options: o}
	if c.seeds < 1 || c.seeds > 100 {
		return out, fmt.Errorf("--seeds %d; accepted: 1…100", c.seeds)
	}
	for seed := range c.seeds {
		out.Seeds = append(out.Seeds, o.Seed+uint64(seed))
	}
	for _, word := range strings.Split(c.sidecars, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || n > demo.MaxSidecars {
			return out, fmt.Errorf("--compare-sidecars %q; accepted: numbers 1…%d with commas between them", c.sidecars, demo.MaxSidecars)
		}
		out.Sidecars = append(out.Sidecars, n)
	}
	if out.Duration == 0 {
		out.Duration = compareDuration
	}
	out.Warmup = min(compareWarmup, out.Duration/2)
	return out, nil
}

// demoFlags are the flags of `fairlead demo`.
type demoFlags struct {
	options                   demo.Options
	faults                    faultFlags
	strategy, format, results string
	compare, verbose          bool
	compared                  compareFlags
}

func (f *demoFlags) register(flags *flag.FlagSet) {
	flags.IntVar(&f.options.Sidecars, "sidecars", 4, "`number` of Envoys")
	flags.Float64Var(&f.options.RPS, "rps", demo.DefaultRPS, "requests per second over all sidecars; the fleet saturates near 47")
	flags.DurationVar(&f.options.Duration, "duration", 0, "how long the load lasts; 0 is until interrupted (with --compare: 25s a run)")
	flags.Uint64Var(&f.options.Seed, "seed", 1, "seed of arrivals and lengths")
	flags.StringVar(&f.options.Scorer, "scorer", "formula", scorerUsage)
	flags.StringVar(&f.options.Model, "model", "", modelUsage)
	flags.StringVar(&f.strategy, "strategy", "dynamic", "`strategy`: legacy or dynamic")
	flags.StringVar(&f.format, "o", "text", "output `format`: text or json")
	flags.StringVar(&f.results, "results", "", "write every request with its times to this CSV `file`; not with --compare")
	flags.BoolVar(&f.verbose, "v", false, "log what the parts say")
	flags.BoolVar(&f.compare, "compare", false, "run both strategies, in both orders, with several seeds and numbers of sidecars, and print a table")
	flags.IntVar(&f.compared.seeds, "seeds", 3, "with --compare: `number` of seeds, from --seed on")
	flags.StringVar(&f.compared.sidecars, "compare-sidecars", "1,16", "with --compare: `numbers` of sidecars")
	flags.Var(&f.faults, "fault", "`fault` KIND[(FACTOR)]:SERVER[@START][+LENGTH], such as slow:h100-2@10s; KIND is slow, oom, xid, frozen, blank, crash, throttle, errorevent or silence; may be repeated")
}

// check reads the flags that need more than their type.
func (f *demoFlags) check() (runs demo.CompareOptions, err error) {
	if f.options.Strategy, err = fleet.ParseStrategy(f.strategy); err != nil {
		return runs, fmt.Errorf("--strategy %w", err)
	}
	if f.compare && f.results != "" {
		return runs, errors.New("--results together with --compare; accepted: one of them")
	}
	f.options.Faults = f.faults
	if err := f.options.Check(); err != nil {
		return runs, err
	}
	return f.compared.options(f.options)
}

func runDemo(ctx context.Context, args []string, io stdio) error {
	flags := newFlags("demo", "", "Runs simulated GPUs, serve, several real Envoys and a load on this machine; Ctrl-C ends it.", io)
	var f demoFlags
	f.register(flags)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	runs, err := f.check()
	if err != nil {
		return usageError{fmt.Errorf("fairlead demo: %w", err)}
	}
	reporter, err := demo.NewReporter(io.out, io.err, f.format, isTerminal(io.out))
	if err != nil {
		return usageError{fmt.Errorf("fairlead demo: -o: %w", err)}
	}
	binary, err := envoybin.Find(ctx, envoybin.Options{Progress: io.err})
	if err != nil {
		return err
	}
	f.options.Envoy, f.options.Log = binary.Path, demoLog(io.err, f.verbose)
	if f.compare {
		runs.Envoy, runs.Log = f.options.Envoy, f.options.Log
		return runCompare(ctx, runs, f.format, io)
	}
	return runOnce(ctx, f.options, f.results, reporter)
}

func runOnce(ctx context.Context, options demo.Options, resultsFile string, reporter demo.Reporter) (err error) {
	if resultsFile != "" {
		results, failed := newResults(resultsFile)
		if failed != nil {
			return failed
		}
		defer func() { err = errors.Join(err, results.close()) }()
		options.OnResult = results.add
	}
	summary, err := demo.Run(ctx, options, reporter)
	if err == nil && summary.Kind != "" {
		reporter.Summary(summary)
	}
	return err
}

func runCompare(ctx context.Context, runs demo.CompareOptions, format string, io stdio) error {
	c, err := demo.RunCompare(ctx, runs, func(note string) { fmt.Fprintln(io.err, note) })
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		fmt.Fprintf(io.err, "interrupted after %d runs; no table\n", len(c.Runs))
		return nil
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
