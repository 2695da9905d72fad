package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/internal/envoyproc"
)

const (
	// drainFor is how long running requests may take by default: Kubernetes kills a
	// pod's containers 30 s after it told them to end (terminationGracePeriodSeconds),
	// and Envoy takes some seconds to end.
	drainFor = 25 * time.Second
	// drainStep is how often Envoy is asked what runs.
	drainStep = 100 * time.Millisecond
	// adminTimeout is how long Envoy may take to answer.
	adminTimeout = 2 * time.Second
)

// drainer lets an Envoy end its work, by its admin interface.
type drainer struct {
	process *envoyproc.Process
	admin   http.Client
}

func newDrainer(process *envoyproc.Process, admin fleet.Address) *drainer {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, admin.Network(), admin.Target())
	}
	return &drainer{process: process, admin: http.Client{
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: adminTimeout,
	}}
}

// drain lets running requests end, for so long at most, or until this process is told
// again to end. Envoy goes on listening until nothing runs, for callers that have not
// ended yet, and closes connections as they are answered; what is idle is not waited for.
func (d *drainer) drain(atMost time.Duration, notes io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	// While its health check fails Envoy closes connections as it answers on them. A
	// graceful drain of its listeners alone closes few before --drain-time-s has passed,
	// which is an hour, and refuses new ones from then on.
	if _, err := d.ask(ctx, http.MethodPost, "/healthcheck/fail"); err != nil {
		return fmt.Errorf("drain envoy: %w", err)
	}
	if n, err := d.running(ctx); err != nil || n > 0 {
		fmt.Fprintf(notes, "Envoy drains for up to %v (running requests: %d); another signal ends it at once\n", atMost, n)
	}
	if !d.idle(ctx) {
		if n, err := d.running(context.Background()); err == nil && n > 0 {
			fmt.Fprintf(notes, "running requests are cut: %d\n", n)
		}
		return nil
	}
	// What came between the last look and this is waited for too.
	if _, err := d.ask(ctx, http.MethodPost, "/drain_listeners"); err != nil {
		return fmt.Errorf("drain envoy: %w", err)
	}
	d.idle(ctx)
	return nil
}

// idle waits until nothing runs, and returns false where ctx or Envoy ended before.
func (d *drainer) idle(ctx context.Context) bool {
	step := time.NewTicker(drainStep)
	defer step.Stop()
	for {
		select {
		case <-step.C:
		case <-d.process.Done():
			return false
		case <-ctx.Done():
			return false
		}
		if n, err := d.running(ctx); err == nil && n == 0 {
			return true
		}
	}
}

// running is how many requests Envoy has not answered wholly.
func (d *drainer) running(ctx context.Context) (int, error) {
	const name = "http." + wire.StatPrefix + ".downstream_rq_active"
	text, err := d.ask(ctx, http.MethodGet, "/stats?filter="+url.QueryEscape("^"+strings.ReplaceAll(name, ".", `\.`)+"$"))
	value, found := strings.CutPrefix(strings.TrimSpace(text), name+": ")
	if err != nil || !found {
		return 0, err // without a listener there is no such number
	}
	return strconv.Atoi(value)
}

func (d *drainer) ask(ctx context.Context, method, page string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://envoy-admin"+page, nil)
	if err != nil {
		return "", err
	}
	answer, err := d.admin.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s", method, page, answer.Status)
	}
	return string(text), err
}
