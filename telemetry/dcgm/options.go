package dcgm

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"
)

// ErrNotBuilt is what New returns in a binary built without the tag dcgm.
var ErrNotBuilt = errors.New("this binary was built without DCGM; build with: CGO_ENABLED=1 go build -tags dcgm -ldflags=-extldflags=-Wl,-z,lazy ./cmd/fairlead")

// ErrSlow is in a frame's Err while a DCGM call takes longer than the deadline.
var ErrSlow = errors.New("engine slow")

// Options say where DCGM is and how often to read it.
type Options struct {
	// Host is "embedded" (a host engine inside this process; also when empty),
	// "host:port" or "unix:/path" of a running nv-hostengine, or a connection
	// string of DCGM 4.5 and later: tcp://…, unix://…, vsock://….
	Host string
	// Interval is the time between frames, 100 ms to 5 s; 0 means 200 ms. DCGM's
	// profiling fields have no valid values below 100 ms on Hopper (go-nvml's
	// nvml.h asks the same of two GPM samples).
	Interval time.Duration
	// Deadline is how long one read may take before frames say that DCGM is
	// slow; 0 means 1 s.
	Deadline time.Duration
	Log      *slog.Logger // nil discards
}

const (
	defaultInterval = 200 * time.Millisecond
	minInterval     = 100 * time.Millisecond
	maxInterval     = 5 * time.Second
	defaultDeadline = time.Second
)

func (o Options) complete() (Options, host, error) {
	h, err := parseHost(o.Host)
	if err != nil {
		return o, h, err
	}
	if o.Interval == 0 {
		o.Interval = defaultInterval
	}
	if o.Interval < minInterval || o.Interval > maxInterval {
		return o, h, fmt.Errorf("interval %v: DCGM is read every %v to %v", o.Interval, minInterval, maxInterval)
	}
	if o.Deadline == 0 {
		o.Deadline = defaultDeadline
	}
	if o.Deadline < 0 {
		return o, h, fmt.Errorf("deadline %v: must be positive", o.Deadline)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o, h, nil
}

// host is a parsed Options.Host: embedded, or the arguments of go-dcgm's
// standalone connection.
type host struct {
	text     string
	embedded bool
	args     []string
}

const hostForms = `accepted are "embedded", "host:port", "unix:/path", or a connection string tcp://…, unix://…, vsock://…`

func parseHost(text string) (host, error) {
	lower := strings.ToLower(text)
	switch {
	case text == "" || text == "embedded":
		return host{text: "embedded", embedded: true}, nil
	case strings.HasPrefix(lower, "tcp://"), strings.HasPrefix(lower, "unix://"), strings.HasPrefix(lower, "vsock://"):
		if strings.HasSuffix(text, "://") {
			return host{}, fmt.Errorf("DCGM host %q names no address; %s", text, hostForms)
		}
		return host{text: text, args: []string{text}}, nil
	case strings.HasPrefix(text, "unix:"):
		path := strings.TrimPrefix(text, "unix:")
		if !strings.HasPrefix(path, "/") {
			return host{}, fmt.Errorf("DCGM host %q: the socket's path must be absolute; %s", text, hostForms)
		}
		return host{text: text, args: []string{path, "1"}}, nil
	}
	name, port, err := net.SplitHostPort(text)
	if err != nil {
		return host{}, fmt.Errorf("DCGM host %q: %w; %s", text, err, hostForms)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || name == "" {
		return host{}, fmt.Errorf("DCGM host %q: needs a host and a port from 1 to 65535; %s", text, hostForms)
	}
	return host{text: text, args: []string{text, "0"}}, nil
}
