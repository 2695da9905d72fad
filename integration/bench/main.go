package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	rounds  int
	short   bool
	peer    bool
	profile string
	out     string
	rates   []float64
	each    time.Duration // one piece in one round
	// search: how long a rate is tried, and how often the whole search is done.
	try      time.Duration
	searches int
	// decideEach is how long a decision is repeated in a round.
	decideEach time.Duration
}

func parseOptions(args []string) (options, error) {
	o := options{rates: []float64{400, 1500}, each: 2500 * time.Millisecond, try: time.Second, decideEach: 500 * time.Millisecond}
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.IntVar(&o.rounds, "rounds", 7, "interleaved rounds of each comparison; 7 or more for an interval of 95 %")
	f.IntVar(&o.searches, "searches", 3, "how often the highest rate of each piece is looked for; 0 leaves that out")
	f.BoolVar(&o.short, "short", false, "run every piece for a moment, to see that it works; the numbers mean nothing and no file is written")
	f.BoolVar(&o.peer, "peer", true, "compare decisions with gateway-api-inference-extension's scheduler (compiles a thousand packages)")
	f.StringVar(&o.profile, "profile", "", "write CPU profiles of the servers into this folder, and do nothing else")
	f.StringVar(&o.out, "o", "../../docs/benchmarks.md", "where the table is written to")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 || o.rounds < 1 || o.searches < 0 {
		return o, fmt.Errorf("found arguments %q, %d rounds and %d searches; accepted: no arguments, 1 or more rounds, 0 or more searches", f.Args(), o.rounds, o.searches)
	}
	if o.short {
		o.rounds, o.searches = 1, 1
		o.rates, o.each, o.try, o.decideEach = []float64{200, 400}, 100*time.Millisecond, 100*time.Millisecond, 10*time.Millisecond
	}
	return o, nil
}

func main() {
	if len(os.Args) == 4 && os.Args[1] == "child" {
		exit(runChild(os.Args[2], os.Args[3]))
	}
	o, err := parseOptions(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = run(ctx, o)
		stop()
	}
	exit(err)
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run measures everything, prints the table and writes it.
func run(ctx context.Context, o options) error {
	w, err := newWorld(ctx, setups)
	defer w.close()
	if err != nil {
		return err
	}
	if o.profile != "" {
		return profile(w, o.profile, 800, 10*time.Second)
	}
	t := &table{options: o, machine: thisMachine(), envoy: w.envoy.Version, command: "go run . " + strings.Join(os.Args[1:], " "), commit: commitOf(ctx, ".")}
	if t.through, err = w.rounds(ctx, o); err != nil {
		return err
	}
	if t.highest, err = w.highestRates(ctx, o); err != nil {
		return err
	}
	if o.peer {
		progress("decisions beside the peer's")
		if t.decisions, err = decisions(ctx, o); err != nil {
			return err
		}
	}
	text := t.markdown()
	fmt.Print(text)
	if o.short {
		return t.through.whatFailed()
	}
	return os.WriteFile(o.out, []byte(text), 0o644)
}

// progress tells what goes on; the table alone goes to standard output.
func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}
