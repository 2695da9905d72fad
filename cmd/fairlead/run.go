package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/serve"
	"github.com/fairlead-proxy/fairlead/telemetry/sim"
)

// What the flags that choose the risk model say of themselves.
const (
	scorerUsage = "risk `model`: formula, or xgb for the trained one"
	modelUsage  = "with --scorer xgb: an XGBoost model `file` (JSON or UBJSON) in place of the one that comes with the program; watched"
)

func runServe(ctx context.Context, args []string, io stdio) error {
	flags := newFlags("serve", "", "Runs the control plane until interrupted. A good change of the config file is published at once.", io)
	file := flags.String("f", "fairlead.yaml", "the config `file`")
	scorer := flags.String("scorer", "formula", scorerUsage)
	model := flags.String("model", "", modelUsage)
	log := registerLog(flags.String)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	logger, err := log.logger(io.err)
	if err != nil {
		return usageError{fmt.Errorf("fairlead serve: %w", err)}
	}
	cfg, err := fleet.Load(*file)
	if err != nil {
		return err
	}
	path, err := filepath.Abs(*file)
	if err != nil {
		return err
	}
	server, err := serve.New(serve.Options{
		Config: cfg, ConfigPath: path, Scorer: *scorer, ModelPath: *model, Log: logger,
		TuneGC: os.Getenv("GOGC") == "",
	})
	if err != nil {
		return err
	}
	if err := server.Listen(); err != nil {
		return err
	}
	return server.Run(ctx)
}

func runSim(ctx context.Context, args []string, io stdio) error {
	flags := newFlags("sim", "", "Runs simulated model servers until interrupted.", io)
	file := flags.String("f", "fleet.yaml", "the fleet `file`")
	var faults faultFlags
	flags.Var(&faults, "fault", "`fault` KIND[(FACTOR)]:SERVER[@START][+LENGTH], such as slow:h100-2@10s; may be repeated")
	log := registerLog(flags.String)
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	logger, err := log.logger(io.err)
	if err != nil {
		return usageError{fmt.Errorf("fairlead sim: %w", err)}
	}
	cfg, err := sim.Load(*file)
	if err != nil {
		return usageError{err}
	}
	for _, f := range faults {
		cfg.Faults = append(cfg.Faults, sim.ScheduledFault{Server: f.Server, Fault: f.Fault})
	}
	servers, err := sim.New(cfg, logger)
	if err != nil {
		return usageError{err}
	}
	if err := servers.Listen(); err != nil {
		return err
	}
	for _, s := range servers.Servers() {
		logger.Info("model server", "name", s.Name(), "address", s.Addr().String())
	}
	return servers.Run(ctx)
}

// logFlags say what is logged and how.
type logFlags struct{ level, format *string }

func registerLog(flag func(name, value, usage string) *string) logFlags {
	return logFlags{
		level:  flag("log-level", "info", "lowest `level` logged: debug, info, warn, error"),
		format: flag("log-format", "text", "log `format`: text or json"),
	}
}

func (l logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(strings.ToUpper(*l.level))); err != nil {
		return nil, fmt.Errorf("--log-level %q; accepted: debug, info, warn, error", *l.level)
	}
	options := &slog.HandlerOptions{Level: level}
	switch *l.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format %q; accepted: text, json", *l.format)
}
