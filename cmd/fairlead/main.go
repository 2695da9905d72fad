// Command fairlead is the control plane that makes Envoy route LLM traffic by
// live GPU risk. `fairlead help` lists what it does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// Exit statuses.
const (
	exitFailed = 1 // something went wrong while running
	exitUsage  = 2 // the call or the config is at fault
)

// command is one verb.
type command struct {
	name, summary string
	run           func(ctx context.Context, args []string, io stdio) error
}

// stdio is where a command reads and writes; tests give their own.
type stdio struct {
	out, err io.Writer
}

var commands = []command{
	{"demo", "run everything on this machine: simulated GPUs, serve, several real Envoys, load", runDemo},
	{"serve", "run the xDS server, ext_proc, access-log receiver, telemetry and admin API", runServe},
	{"agent", "run on a GPU node: read its GPUs and model servers, push both to serve", runAgent},
	{"sim", "run simulated model servers from a fleet file", runSim},
	{"simulate", "compare routing policies in a discrete-event simulation, or record telemetry to train with", runSimulate},
	{"bootstrap", "print the Envoy bootstrap for a sidecar of a group", runBootstrap},
	{"envoy", "find or fetch an Envoy and run it as a sidecar of a group", runEnvoy},
	{"validate", "check a config file and list all faults", runValidate},
	{"schema", "print the JSON Schema of the config file", runSchema},
	{"rollout", "show or set the weights of a route's split", runRollout},
	{"proxy-status", "show every sidecar and what it acknowledged", runProxyStatus},
	{"version", "print the version", runVersion},
	{"fleet", "show every endpoint with risk, state, share and requests in flight", runFleet},
	{"pools", "show every pool's limit, clients and burst levels", runPools},
	{"clients", "show which clients have most of every pool", runClients},
	{"nodes", "show every machine, its agent and its GPUs", runNodes},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], stdio{os.Stdout, os.Stderr}))
}

// run picks the command and turns its error into an exit status.
func run(ctx context.Context, args []string, io stdio) int {
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		usage(io.out)
		return 0
	}
	for _, c := range commands {
		if c.name != args[0] {
			continue
		}
		err := c.run(ctx, args[1:], io)
		switch {
		case err == nil, errors.Is(err, flag.ErrHelp):
			return 0
		case isUsage(err):
			fmt.Fprintln(io.err, err)
			return exitUsage
		default:
			fmt.Fprintf(io.err, "fairlead %s: %v\n", c.name, err)
			return exitFailed
		}
	}
	fmt.Fprintf(io.err, "fairlead: unknown command %q\n\n", args[0])
	usage(io.err)
	return exitUsage
}

func usage(w io.Writer) {
	fmt.Fprint(w, "fairlead routes LLM traffic through Envoy by live GPU risk.\n\nUsage: fairlead COMMAND [flags]\n\n")
	for _, c := range commands {
		fmt.Fprintf(w, "  %-13s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, "\nEach command explains its flags with -h.\n")
}

// usageError is a fault of the call, not of the run.
type usageError struct{ error }

func isUsage(err error) bool {
	var u usageError
	var faults fleet.Faults
	return errors.As(err, &u) || errors.As(err, &faults)
}

// newFlags returns a flag set that reports faults as usage errors.
func newFlags(name, args, about string, io stdio) *flag.FlagSet {
	flags := flag.NewFlagSet("fairlead "+name, flag.ContinueOnError)
	flags.SetOutput(io.err)
	flags.Usage = func() {
		fmt.Fprintf(io.err, "Usage: fairlead %s [flags]%s\n\n%s\n\n", name, args, about)
		flags.PrintDefaults()
	}
	return flags
}

// parse reads the flags and refuses arguments beyond the allowed number.
func parse(flags *flag.FlagSet, args []string, maxArgs int) error {
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError{fmt.Errorf("%s: %w", flags.Name(), err)}
	}
	if flags.NArg() > maxArgs {
		return usageError{fmt.Errorf("%s: unexpected argument %q", flags.Name(), flags.Arg(maxArgs))}
	}
	return nil
}

// parseAnywhere reads flags before, between and after the words, and returns
// the words.
func parseAnywhere(flags *flag.FlagSet, args []string) (words []string, err error) {
	for {
		if err := parse(flags, args, len(args)); err != nil {
			return nil, err
		}
		if flags.NArg() == 0 {
			return words, nil
		}
		words, args = append(words, flags.Arg(0)), flags.Args()[1:]
	}
}
