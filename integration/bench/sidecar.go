package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fairlead-proxy/fairlead/envoy"
	"github.com/fairlead-proxy/fairlead/envoy/bootstrap"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoyproc"
	"github.com/fairlead-proxy/fairlead/xds"
)

// Paths of the two routes: one takes max_tokens from the header and leaves the
// body alone, one has Envoy look into the body.
const (
	pathHeaders = "/h/v1/chat/completions"
	pathBody    = "/b/v1/chat/completions"
)

const group = "bench"

// filterPeek is the filter that finds fields of bodies.
const filterPeek = "envoy.filters.http.json_to_metadata"

// configText is the configuration of every Envoy and of every `fairlead serve`
// here. Limits are too high to be met: what is measured is what a request costs
// that passes.
func configText(dir string, admin netip.AddrPort, endpoints []netip.AddrPort) string {
	var list strings.Builder
	for i, a := range endpoints {
		fmt.Fprintf(&list, "      - { name: s%d, address: %s }\n", i+1, a)
	}
	return fmt.Sprintf(`apiVersion: fairlead/v1alpha1
kind: Fairlead
serve:
  xds: unix:%[1]s/xds
  extproc: unix:%[1]s/extproc
  accessLog: unix:%[1]s/accesslog
  admin: %[2]s
  stateDir: %[1]s/state
groups:
  - { name: %[3]s, listener: { address: 127.0.0.1:1 }, routes: [headers, body] }
pools:
  - name: servers
    maxInFlight: 65535
    telemetry: { source: none }
    endpoints:
%[4]sroutes:
  - { name: headers, match: { prefix: /h/ }, dialect: openai, strategy: dynamic, pool: servers, trustDeclared: true }
  - { name: body, match: { prefix: /b/ }, dialect: openai, strategy: dynamic, pool: servers }
limits:
  - { key: authorization, requests: 1000000000/min, tokens: 1000000000000/min, concurrency: 1000000 }
`, dir, admin, group, list.String())
}

// without says what is taken out of the builders' listener.
type without struct{ extProc, logs bool }

// strip takes filters out of the listener that Fairlead's builder makes.
func (w without) strip(l *listenerv3.Listener) (*listenerv3.Listener, error) {
	filter := l.FilterChains[0].Filters[0]
	m := &hcmv3.HttpConnectionManager{}
	if err := filter.GetTypedConfig().UnmarshalTo(m); err != nil {
		return nil, err
	}
	if w.extProc {
		// The peek serves ext_proc alone: with neither this is a plain proxy.
		m.HttpFilters = slices.DeleteFunc(m.HttpFilters, func(f *hcmv3.HttpFilter) bool {
			return f.Name == wire.AttributesKey || f.Name == filterPeek
		})
	}
	if w.logs {
		m.AccessLog, m.AccessLogOptions = nil, nil
		last := m.HttpFilters[len(m.HttpFilters)-1]
		router := &routerv3.Router{}
		if err := last.GetTypedConfig().UnmarshalTo(router); err != nil {
			return nil, err
		}
		router.UpstreamLog, router.UpstreamLogOptions = nil, nil
		packed, err := anypb.New(router)
		if err != nil {
			return nil, err
		}
		last.ConfigType = &hcmv3.HttpFilter_TypedConfig{TypedConfig: packed}
	}
	packed, err := anypb.New(m)
	if err != nil {
		return nil, err
	}
	filter.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: packed}
	return l, nil
}

// sidecar is a real Envoy, with a control plane of its own in this process.
type sidecar struct {
	listen netip.AddrPort
	envoy  *envoyproc.Process
	plane  *grpc.Server
	cancel context.CancelFunc
	ended  chan struct{}

	adminClient *http.Client
}

// startSidecar starts an Envoy that asks at.ExtProc and logs to at.AccessLog,
// and waits until it answers.
func startSidecar(ctx context.Context, binary, dir, name string, cfg *fleet.Config, at envoy.Runtime, w without) (*sidecar, error) {
	listen, err := freeAddress()
	if err != nil {
		return nil, err
	}
	admin := filepath.Join(dir, name+".adm")
	s := &sidecar{
		listen: listen, plane: grpc.NewServer(xds.ServerOptions()...), ended: make(chan struct{}),
		adminClient: overSocket(admin),
	}
	plane := xds.New(xds.Options{
		BuildListener: func(c *fleet.Config, g fleet.Group, a netip.AddrPort, rt envoy.Runtime) (*listenerv3.Listener, error) {
			l, err := envoy.BuildListener(c, g, a, rt)
			if err != nil {
				return nil, err
			}
			return w.strip(l)
		},
	})
	if err := plane.Submit(xds.Target{Config: cfg, Runtime: at}); err != nil {
		return nil, err
	}
	plane.Register(s.plane)
	socket := filepath.Join(dir, name+".xds")
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	var running context.Context
	running, s.cancel = context.WithCancel(context.Background())
	go func() {
		defer close(s.ended)
		served := make(chan struct{})
		go func() { defer close(served); _ = s.plane.Serve(l) }()
		_ = plane.Run(running)
		s.plane.Stop()
		<-served
	}()
	text, err := bootstrap.Render(bootstrap.Options{
		NodeID: name, Group: group, Listen: listen, XDS: []fleet.Address{{Path: socket}},
		Admin: fleet.Address{Path: admin},
	}, "json")
	if err == nil {
		s.envoy, err = envoyproc.Start(ctx, envoyproc.Options{Binary: binary, Bootstrap: text, Dir: dir})
	}
	if err == nil {
		err = s.waitAnswer(ctx)
	}
	if err != nil {
		s.stop()
		return nil, fmt.Errorf("sidecar %s: %w", name, err)
	}
	return s, nil
}

func (s *sidecar) waitAnswer(ctx context.Context) error {
	var last error
	for ctx.Err() == nil {
		r, err := http.Post("http://"+s.listen.String()+pathHeaders, "application/json", strings.NewReader("{}"))
		if err == nil {
			_, _ = io.Copy(io.Discard, r.Body)
			_ = r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("status %d", r.StatusCode)
		}
		last = err
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("does not answer: %w", last)
}

// steered reports the strategy that an answer names.
func (s *sidecar) steered() (string, error) {
	r, err := http.NewRequest(http.MethodPost, "http://"+s.listen.String()+pathHeaders, strings.NewReader("{}"))
	if err != nil {
		return "", err
	}
	r.Header.Set("max_tokens", "16")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return answer.Header.Get(wire.HeaderRouteStrategy), err
}

func (s *sidecar) stop() {
	if s.envoy != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = s.envoy.Stop(ctx)
	}
	s.cancel()
	<-s.ended
}

// cpu is the processor time that Envoy has used, by its CPU clock
// (clock_getcpuclockid(3)).
func (s *sidecar) cpu() (time.Duration, error) {
	var t unix.Timespec
	const schedClock = 2 // CPUCLOCK_SCHED of linux/posix-timers.h
	if err := unix.ClockGettime(int32(^s.envoy.PID()<<3|schedClock), &t); err != nil {
		return 0, fmt.Errorf("cpu of envoy: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

// freeAddress returns a loopback address that nothing listens on.
func freeAddress() (netip.AddrPort, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort(), nil
}
