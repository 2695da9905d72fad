package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/fairlead-proxy/fairlead/internal/agent"
	"github.com/fairlead-proxy/fairlead/telemetry/dcgm"
	"github.com/fairlead-proxy/fairlead/telemetry/push"
	"github.com/fairlead-proxy/fairlead/telemetry/scrape"
)

// checkWithin bounds how long `fairlead agent --check` looks at GPUs and pages.
const checkWithin = 5 * time.Second

func runAgent(ctx context.Context, args []string, io stdio) error {
	flags := newFlags("agent", "", "Runs on a GPU node: reads its GPUs and its model servers' pages, and pushes both to serve. Flags win over the file.", io)
	file := flags.String("f", "", "the config `file`; none is needed where flags say it all")
	var over agent.Flags
	flags.StringVar(&over.Node, "node", "", "the `name` that serve knows this machine by; default: the host's name")
	flags.StringVar(&over.Push, "push", "", "where serve takes frames: `address` unix:/path or host:port")
	flags.StringVar(&over.DCGM, "dcgm", "", "`host` engine to read GPUs from: embedded, host:port, unix:/path, or off")
	flags.StringVar(&over.Status, "status", "", "`address` of metrics and health")
	flags.Func("server", "a model server, `LISTEN[=ADVERTISE]`, such as 127.0.0.1:8000=10.0.0.11:8000; may be repeated", func(s string) error {
		over.Servers = append(over.Servers, s)
		return nil
	})
	check := flags.Bool("check", false, "validate, show what would be done with the GPUs found per server, and end")
	log := registerLog(flags.String)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	logger, err := log.logger(io.err)
	if err != nil {
		return usageError{fmt.Errorf("fairlead agent: %w", err)}
	}
	cfg, err := agent.Load(*file, over)
	if err != nil {
		return err
	}
	if *check {
		logger = slog.New(slog.DiscardHandler)
	}
	options, err := agentOptions(cfg, logger)
	if err != nil {
		return err
	}
	if *check {
		return checkAgent(ctx, options, io.out)
	}
	a := agent.New(options)
	if err := a.Listen(); err != nil {
		return err
	}
	logger.Info("agent", "node", cfg.Node, "push", cfg.Push.Address.String(), "status", a.StatusAddr(), "servers", len(cfg.Servers))
	return a.Run(ctx)
}

// agentOptions makes what the agent reads from and sends to.
func agentOptions(cfg *agent.Config, log *slog.Logger) (agent.Options, error) {
	o := agent.Options{Config: cfg, Proc: os.DirFS("/proc"), Log: log, Engines: scrape.New(agent.Targets(cfg), scrape.Options{})}
	client := push.ClientOptions{Target: cfg.Push.Address, Node: cfg.Node, Log: log}
	if t := cfg.Push.TLS; t != nil {
		client.TLS = &push.ClientTLS{CA: t.CA, Certificate: t.Certificate, Key: t.Key, ServerName: t.ServerName}
	}
	sender, err := push.NewClient(client)
	if err != nil {
		return o, err
	}
	o.Sender = sender
	if !cfg.DCGM.Off {
		source, err := dcgm.New(dcgm.Options{Host: cfg.DCGM.Host, Interval: cfg.Interval, Log: log})
		if err != nil {
			return o, fmt.Errorf("%w (without GPUs: --dcgm off)", err)
		}
		o.GPUs = source
		o.GPUCounts = func() map[string]uint64 { return countsOf(source.Stats()) }
	}
	return o, nil
}

// countsOf names what DCGM's reader counts.
func countsOf(s dcgm.Stats) map[string]uint64 {
	counts := map[string]uint64{
		"reads": s.Reads, "late": s.Late, "connects": s.Connects, "reconfigurations": s.Reconfigurations, "rewatches": s.Rewatches,
		"blank": s.Blank, "out of range": s.OutOfRange, "no data": s.NoData, "stale": s.Stale, "frozen": s.Frozen, "xids": s.XIDs,
		"clock steps": s.ClockSteps,
	}
	for cause, n := range s.Failed {
		counts["failed: "+string(cause)] = n
	}
	return counts
}

// checkAgent looks at GPUs, servers and pages for a while without sending
// anything, and prints what it saw. It fails if GPUs can't be read or a
// server's are unknown.
func checkAgent(ctx context.Context, o agent.Options, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, checkWithin)
	defer cancel()
	status, err := agent.Check(ctx, o)
	if err != nil {
		return err
	}
	c := o.Config
	transport := "plaintext"
	if c.Push.TLS != nil {
		transport = "mutual TLS"
	}
	gpus := c.DCGM.Host
	if c.DCGM.Off {
		gpus = "off"
	}
	fmt.Fprintf(w, "node    %s\npush    %s, %s, every %s\nstatus  http://%s\ndcgm    %s\n", c.Node, c.Push.Address, transport, c.Interval, c.Status.Host, gpus)
	if status.GPUErr != "" {
		fmt.Fprintf(w, "        %s\n", status.GPUErr)
	}
	fmt.Fprintln(w)
	printGPUs(w, status)
	printServers(w, status)
	return status.Complete()
}

func printGPUs(w io.Writer, s *agent.Status) {
	if len(s.GPUs) == 0 {
		return
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "GPU\tMODEL\tPROFILE\tCONDITION")
	for i := range s.GPUs {
		g := &s.GPUs[i]
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", g.ID, orDash(g.Model), orDash(g.Profile), g.Condition())
	}
	_ = table.Flush()
	fmt.Fprintln(w)
}

func printServers(w io.Writer, s *agent.Status) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SERVER\tADVERTISED AS\tPAGE\tGPUS\tWHY")
	for _, x := range s.Servers {
		page := x.Server.MetricsPath + " ok"
		if x.Err != "" {
			page = x.Err
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", x.Server.Listen, x.Server.Advertise, page, orDash(strings.Join(x.GPUs, " ")), x.Reason())
	}
	_ = table.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
