package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/internal/envoybin"
	"github.com/fairlead-proxy/fairlead/internal/envoyproc"
)

// sidecarFlags describe one sidecar.
type sidecarFlags struct{ file, group, listen, zone, node, admin, xds string }

func (s *sidecarFlags) register(flags *flag.FlagSet) {
	flags.StringVar(&s.file, "f", "fairlead.yaml", "the config `file` of serve")
	flags.StringVar(&s.group, "group", "", "the sidecar's `group`; default: the config's only one")
	flags.StringVar(&s.listen, "listen", "", "listen on `ip:port` instead of the group's address")
	flags.StringVar(&s.zone, "zone", "", "the sidecar's `zone`, as in pools[].endpoints[].zone: endpoints there come first")
	flags.StringVar(&s.node, "node", "", "the sidecar's `id`, unique among all; default: host name, group and listening address")
	flags.StringVar(&s.admin, "admin", s.admin, "Envoy's own admin `address`: unix:PATH or ip:port; each Envoy needs another")
	flags.StringVar(&s.xds, "xds", "", "reach the xDS server at this `address` instead of serve.xds")
}

func (s *sidecarFlags) options() (bootstrap.Options, error) {
	cfg, err := fleet.Load(s.file)
	if err != nil {
		return bootstrap.Options{}, err
	}
	o, err := sidecarOptions(cfg, s.group, s.listen, s.node, s.admin, s.xds)
	if err != nil {
		return o, usageError{err}
	}
	o.Zone = s.zone
	return o, nil
}

func runBootstrap(_ context.Context, args []string, io stdio) error {
	flags := newFlags("bootstrap", "", "Prints the Envoy bootstrap for one sidecar of a group.\n"+
		"Run it with: envoy -c FILE --disable-hot-restart --drain-time-s SECONDS", io)
	sidecar := sidecarFlags{admin: "unix:envoy-admin.sock"}
	sidecar.register(flags)
	format := flags.String("o", "yaml", "output `format`: yaml or json")
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	if *format != "yaml" && *format != "json" {
		return usageError{fmt.Errorf("fairlead bootstrap: -o %q; accepted: yaml, json", *format)}
	}
	options, err := sidecar.options()
	if err != nil {
		return err
	}
	out, err := bootstrap.Render(options, *format)
	if err != nil {
		return err
	}
	_, err = io.out.Write(out)
	return err
}

func runEnvoy(ctx context.Context, args []string, io stdio) error {
	flags := newFlags("envoy", "", "Finds or fetches an Envoy and runs it as a sidecar, with the bootstrap that `fairlead bootstrap` prints.", io)
	var sidecar sidecarFlags
	sidecar.register(flags)
	flags.Lookup("admin").Usage += ",\nand has a socket of its own by default"
	concurrency := flags.Int("concurrency", 1, "worker `threads`")
	level := flags.String("log-level", "warning", "Envoy's log `level`")
	drain := flags.Duration("drain", drainFor, "let running requests end for this `time` when told to end (SIGTERM, Ctrl-C), and end at once when told again;\n"+
		"in Kubernetes 5s less than terminationGracePeriodSeconds (30 by default); 0 lets none end")
	if err := parse(flags, args, 0); err != nil {
		return err
	}
	if *drain < 0 {
		return usageError{fmt.Errorf("fairlead envoy: --drain %v; accepted: 0 or more", *drain)}
	}
	if sidecar.admin == "" {
		// Two Envoys may well run in one folder: told to end, one would drain the other.
		socket, remove, err := ownSocket()
		if err != nil {
			return err
		}
		defer remove()
		sidecar.admin = "unix:" + socket
	}
	options, err := sidecar.options()
	if err != nil {
		return err
	}
	if err := unused(ctx, options.Admin); err != nil {
		return err
	}
	binary, err := envoybin.Find(ctx, envoybin.Options{Progress: io.err})
	if err != nil {
		return err
	}
	file, err := bootstrap.Render(options, "yaml")
	if err != nil {
		return err
	}
	process, err := envoyproc.Start(ctx, envoyproc.Options{
		Binary: binary.Path, Bootstrap: file, Concurrency: *concurrency, DrainTime: options.DrainTime, LogLevel: *level, Log: io.err,
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(io.err, "Envoy %s is running as %s; it listens on %s once it has its configuration; its admin interface is on %s\n",
		binary.Version, options.NodeID, options.Listen, options.Admin)
	select {
	case <-process.Done():
		return process.Wait()
	case <-ctx.Done():
		if *drain > 0 {
			if err := newDrainer(process, options.Admin).drain(*drain, io.err); err != nil {
				fmt.Fprintf(io.err, "running requests are cut: %v\n", err)
			}
		}
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return process.Stop(stopping)
	}
}

// longestSocket bounds a socket's path (sun_path has 108 bytes on Linux, 104 elsewhere).
const longestSocket = 100

// ownSocket is a path for a socket in a folder of its own, which remove removes.
func ownSocket() (path string, remove func(), err error) {
	in := os.TempDir()
	if len(in)+len("/fl0123456789/envoy-admin.sock") > longestSocket {
		in = "/tmp"
	}
	dir, err := os.MkdirTemp(in, "fl")
	if err != nil {
		return "", nil, fmt.Errorf("a folder for Envoy's admin socket (--admin names another): %w", err)
	}
	return filepath.Join(dir, "envoy-admin.sock"), func() { _ = os.RemoveAll(dir) }, nil
}

// unused checks that nobody answers at the address that Envoy's admin interface is to have:
// Envoy takes the path of a socket from whoever listens there.
func unused(ctx context.Context, admin fleet.Address) error {
	conn, err := (&net.Dialer{Timeout: adminTimeout}).DialContext(ctx, admin.Network(), admin.Target())
	if err != nil {
		return nil
	}
	_ = conn.Close()
	return usageError{fmt.Errorf("--admin %s: somebody listens there already; accepted: a path or port that is free, another for each Envoy", admin)}
}
