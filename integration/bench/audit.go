package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// An answer of 200 proves nothing: where the ext_proc server is late or gone,
// Envoy lets requests pass without a decision, and fast. A run counts only if
// Envoy's counters and the answers' headers say that each request had what its
// piece is about.

// tally is what an Envoy has counted since its start.
type tally struct {
	streams  int64 // ext_proc streams started
	answers  int64 // messages received on them
	passed   int64 // streams that failed, so that requests passed without a decision
	timeouts int64 // messages without an answer in time
	dropped  int64 // access-log entries dropped
}

func (t tally) since(before tally) tally {
	return tally{
		t.streams - before.streams, t.answers - before.answers, t.passed - before.passed,
		t.timeouts - before.timeouts, t.dropped - before.dropped,
	}
}

// parseTally reads the text of Envoy's /stats; counters of one name below several
// prefixes are added up.
func parseTally(text string) (t tally, err error) {
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		var to *int64
		switch {
		case strings.HasSuffix(name, ".ext_proc.streams_started"):
			to = &t.streams
		case strings.HasSuffix(name, ".ext_proc.stream_msgs_received"):
			to = &t.answers
		case strings.HasSuffix(name, ".ext_proc.failure_mode_allowed"):
			to = &t.passed
		case strings.HasSuffix(name, ".ext_proc.message_timeouts"):
			to = &t.timeouts
		case strings.HasPrefix(name, "access_logs.") && strings.HasSuffix(name, ".logs_dropped"):
			to = &t.dropped
		default:
			continue
		}
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return t, fmt.Errorf("stats of envoy: %s: found %q, want a number", name, value)
		}
		*to += n
	}
	return t, nil
}

// audit says why a run doesn't count, or "". why is the load's first failure.
func (p piece) audit(r result, t tally, why string) string {
	asked, steered := int64(r.sent), r.sent
	if p.setup == plain {
		asked = 0
	}
	if !p.setup.steers() {
		steered = 0
	}
	switch {
	case r.sent == 0:
		return "nothing was sent"
	case r.failed > 0:
		return fmt.Sprintf("%d of %d requests failed: %s", r.failed, r.sent, why)
	case t.passed > 0:
		return fmt.Sprintf("%d of %d requests passed after their stream failed", t.passed, r.sent)
	case t.timeouts > 0:
		return fmt.Sprintf("%d of %d requests had no answer of the server in time", t.timeouts, r.sent)
	case t.streams != asked:
		return fmt.Sprintf("%d ext_proc streams for %d requests", t.streams, r.sent)
	case t.answers < asked:
		return fmt.Sprintf("%d answers on %d ext_proc streams", t.answers, t.streams)
	case r.steered != steered:
		return fmt.Sprintf("%d of %d requests took a decision's route, want %d", r.steered, r.sent, steered)
	case !r.carried():
		return fmt.Sprintf("the machine did not carry the rate: %v instead of %v, %d of %d requests waited for a connection",
			r.took.Round(time.Millisecond), r.planned, r.waited, r.sent)
	case t.dropped > 0:
		return fmt.Sprintf("envoy dropped %d access-log entries", t.dropped)
	}
	return ""
}

// tally asks Envoy's admin interface.
func (s *sidecar) tally() (tally, error) {
	r, err := s.adminClient.Get("http://envoy/stats?filter=ext_proc|logs_dropped")
	if err != nil {
		return tally{}, fmt.Errorf("stats of envoy: %w", err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return tally{}, fmt.Errorf("stats of envoy: %w", err)
	}
	if r.StatusCode != http.StatusOK {
		return tally{}, fmt.Errorf("stats of envoy: status %d", r.StatusCode)
	}
	return parseTally(string(text))
}

// overSocket is a client for whatever listens on a Unix socket; it keeps no
// connection.
func overSocket(path string) *http.Client {
	return &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
		},
	}
}
