package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
)

func runValidate(_ context.Context, args []string, io stdio) error {
	flags := newFlags("validate", " [FILE]", "Checks a config file; lists every fault with its line and exits 2.", io)
	file := flags.String("f", "fairlead.yaml", "the config `file`")
	if err := parse(flags, args, 1); err != nil {
		return err
	}
	if flags.NArg() == 1 {
		*file = flags.Arg(0)
	}
	cfg, err := fleet.Load(*file)
	if err != nil {
		return err
	}
	fmt.Fprintf(io.out, "%s: ok: %d groups, %d pools, %d routes, %d limits\n", *file, len(cfg.Groups), len(cfg.Pools), len(cfg.Routes), len(cfg.Limits))
	return nil
}

func runSchema(_ context.Context, args []string, io stdio) error {
	if err := parse(newFlags("schema", "", "Prints the JSON Schema of the config file.", io), args, 0); err != nil {
		return err
	}
	schema, err := fleet.Schema()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(io.out, "%s\n", schema)
	return err
}

// sidecarOptions resolves the flags of one sidecar against the config.
func sidecarOptions(cfg *fleet.Config, group, listen, node, adminAddress, xds string) (bootstrap.Options, error) {
	g, err := pickGroup(cfg, group)
	if err != nil {
		return bootstrap.Options{}, err
	}
	o := bootstrap.Options{Group: g.Name, Listen: g.Listener.Address, XDS: []fleet.Address{cfg.Serve.XDS}, DrainTime: g.Listener.DrainTime}
	if listen != "" {
		if o.Listen, err = netip.ParseAddrPort(listen); err != nil {
			return o, fmt.Errorf("--listen %q; accepted: ip:port", listen)
		}
	}
	if xds != "" {
		address, err := fleet.ParseAddress(xds)
		if err != nil {
			return o, fmt.Errorf("--xds: %w", err)
		}
		o.XDS = []fleet.Address{address}
	}
	if o.Admin, err = fleet.ParseAddress(adminAddress); err != nil {
		return o, fmt.Errorf("--admin: %w", err)
	}
	if o.Admin.Path != "" { // Envoy may run in another folder
		if o.Admin.Path, err = filepath.Abs(o.Admin.Path); err != nil {
			return o, fmt.Errorf("--admin: %w", err)
		}
	}
	if o.NodeID = node; node == "" {
		host, err := os.Hostname()
		if err != nil {
			return o, fmt.Errorf("--node is needed: no host name: %w", err)
		}
		o.NodeID = host + "/" + g.Name + "/" + o.Listen.String()
	}
	return o, nil
}

func pickGroup(cfg *fleet.Config, name string) (fleet.Group, error) {
	var names []string
	for _, g := range cfg.Groups {
		names = append(names, g.Name)
	}
	if name == "" {
		if len(cfg.Groups) == 1 {
			return cfg.Groups[0], nil
		}
		return fleet.Group{}, fmt.Errorf("--group is needed; accepted: %v", names)
	}
	if g, ok := cfg.GroupByName(name); ok {
		return g, nil
	}
	return fleet.Group{}, fmt.Errorf("--group %q is not in the config; accepted: %v", name, names)
}

func runVersion(_ context.Context, args []string, io stdio) error {
	if err := parse(newFlags("version", "", "Prints the version, the commit it was built from, and Go's version.", io), args, 0); err != nil {
		return err
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return errors.New("this binary carries no build information")
	}
	commit := ""
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			commit = " " + setting.Value
		}
	}
	fmt.Fprintf(io.out, "fairlead %s%s %s\n", info.Main.Version, commit, info.GoVersion)
	return nil
}
