package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/serve"
	"github.com/fairlead-proxy/fairlead/internal/simulate"
	"github.com/fairlead-proxy/fairlead/scorer"
	"github.com/fairlead-proxy/fairlead/scorer/xgb"
	"github.com/fairlead-proxy/fairlead/telemetry/sim/engine"
)

// simulateFlags are the flags of `fairlead simulate`.
type simulateFlags struct {
	arrivals, traces  string
	routers, policies string
	model             string
	seeds             int
	seed              uint64
	setup             simulate.Setup
	slo               time.Duration
	csv, png, format  string
	record            string
	recordSmall       bool
}

func (f *simulateFlags) register(flags *flag.FlagSet) {
	var scenarios []string
	for _, s := range simulate.Scenarios() {
		scenarios = append(scenarios, s.Name+" ("+s.About+")")
	}
	flags.StringVar(&f.arrivals, "arrivals", simulate.Azure, "`source` of arrivals and lengths: azure, mooncake or poisson")
	flags.StringVar(&f.traces, "traces", simulate.TracesDir(), "`folder` of the public traces; also FAIRLEAD_TRACES. Without it, lengths fitted to the Azure trace and Poisson arrivals")
	flags.Float64Var(&f.setup.Load, "load", 0.75, "mean rate of arrivals as a `share` of what the fleet sustains")
	flags.IntVar(&f.setup.GPUs, "gpus", 32, "`number` of GPUs, each with an engine")
	flags.StringVar(&f.setup.Profile, "profile", "llama-3.1-8b-rtx4090", "engine `profile` of the GPUs: "+strings.Join(engine.ProfileNames(), ", "))
	flags.StringVar(&f.setup.Scenario, "scenario", "steady", "`scenario`: "+strings.Join(scenarios, ", "))
	flags.DurationVar(&f.setup.Duration, "duration", 400*time.Second, "simulated time of arrivals; the first tenth, at most 30s, does not count")
	flags.StringVar(&f.routers, "routers", "1,4,16,64", "`numbers` of routers that share the load and know only their own requests")
	flags.StringVar(&f.policies, "policies", "", "`names` of policies with commas between them; all by default")
	flags.StringVar(&f.model, "model", "", "an XGBoost model `file` for the policy ours-model, in place of the one that comes with the program")
	flags.IntVar(&f.seeds, "seeds", 5, "`number` of seeds")
	flags.Uint64Var(&f.seed, "seed", 1, "first seed")
	flags.DurationVar(&f.slo, "slo", 2*time.Second, "longest good time to first token")
	flags.StringVar(&f.csv, "csv", "", "write every run to this CSV `file`")
	flags.StringVar(&f.png, "png", "", "draw a chart into this PNG `file`")
	flags.StringVar(&f.format, "o", "text", "output `format`: text or json")
	flags.StringVar(&f.record, "record", "", "write labelled telemetry of some 400 runs (230 MB) into this `folder` instead of comparing policies")
	flags.BoolVar(&f.recordSmall, "record-small", false, "with --record: five short runs")
}

// options turns the flags into what is compared.
func (f *simulateFlags) options() (simulate.Options, error) {
	o := simulate.Options{Setup: f.setup, SLO: f.slo, Warmup: min(f.setup.Duration/10, 30*time.Second)}
	err := f.setup.Check()
	if err != nil {
		return o, err
	}
	if o.Workload, err = simulate.LoadWorkload(f.arrivals, f.traces); err != nil {
		return o, fmt.Errorf("--arrivals: %w", err)
	}
	for _, word := range strings.Split(f.routers, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || n > simulate.MaxRouters || slices.Contains(o.Routers, n) {
			return o, fmt.Errorf("--routers %q; accepted: different numbers 1…%d with commas between them", f.routers, simulate.MaxRouters)
		}
		o.Routers = append(o.Routers, n)
	}
	slices.Sort(o.Routers)
	if f.seeds < 1 || f.seeds > simulate.MaxSeeds {
		return o, fmt.Errorf("--seeds %d; accepted: 1…%d", f.seeds, simulate.MaxSeeds)
	}
	for i := range f.seeds {
		o.Seeds = append(o.Seeds, f.seed+uint64(i))
	}
	model, err := simulatedModel(f.model)
	if err != nil {
		return o, fmt.Errorf("--model: %w", err)
	}
	if f.policies == "" {
		o.Policies = simulate.Policies(model)
		return o, nil
	}
	o.Policies, err = simulate.PoliciesByName(strings.Split(f.policies, ","), model)
	if err != nil {
		return o, fmt.Errorf("--policies: %w", err)
	}
	return o, nil
}

// simulatedModel is the model of ours-model: the one in a file, or the one that
// comes with the program.
func simulatedModel(file string) (scorer.Model, error) {
	trees, err := xgb.Shipped()
	if file != "" {
		trees, err = serve.ReadModel(file)
	}
	if err != nil {
		return nil, err
	}
	return xgb.Risk(trees, "xgb")
}

func runSimulate(ctx context.Context, args []string, io stdio) error {
	flags := newFlags("simulate", "", "Compares routing policies in a discrete-event simulation of a GPU fleet, on the same arrivals and in virtual time.", io)
	var f simulateFlags
	f.register(flags)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	if f.format != "text" && f.format != "json" {
		return usageError{fmt.Errorf("fairlead simulate: -o %q; accepted: text, json", f.format)}
	}
	if f.record != "" {
		return runRecord(ctx, f, io)
	}
	if f.recordSmall {
		return usageError{errors.New("fairlead simulate: --record-small without --record; accepted: both")}
	}
	o, err := f.options()
	if err != nil {
		return usageError{fmt.Errorf("fairlead simulate: %w", err)}
	}
	o.Done = progress(io.err)
	c, err := simulate.Compare(ctx, o)
	if err != nil {
		return err
	}
	if err := writeFile(f.csv, c.WriteCSV); err != nil {
		return err
	}
	if err := writeFile(f.png, c.WritePNG); err != nil {
		return err
	}
	if f.format == "json" {
		return writeJSON(io.out, c)
	}
	return c.WriteTable(io.out)
}

func runRecord(ctx context.Context, f simulateFlags, io stdio) error {
	index, err := simulate.Record(ctx, simulate.RecordOptions{Dir: f.record, Traces: f.traces, Small: f.recordSmall, Done: progress(io.err)})
	if err != nil {
		return err
	}
	if f.format == "json" {
		return writeJSON(io.out, index)
	}
	_, err = fmt.Fprintf(io.out, "%d rows of %d numbers from %d runs in %s\n%s\n", index.RowCount, len(index.Columns), len(index.Runs), f.record, strings.Join(index.Notes, "\n"))
	return err
}

// progress tells how far a long simulation is, now and then.
func progress(w io.Writer) func(run, of int) {
	begin := time.Now()
	last := begin
	return func(run, of int) {
		if now := time.Now(); now.Sub(last) >= 5*time.Second {
			last = now
			fmt.Fprintf(w, "%d of %d runs after %v\n", run, of, now.Sub(begin).Round(time.Second))
		}
	}
}

func writeJSON(w io.Writer, v any) error {
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	return out.Encode(v)
}

// writeFile writes into a file, if there is a path.
func writeFile(path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}
