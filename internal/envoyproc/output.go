package envoyproc

import (
	"bytes"
	"io"
	"strings"
	"sync"
)

const (
	maxLines   = 40   // log lines kept
	maxLineLen = 2048 // bytes of one kept line; the rest is cut
	// maxPartial bounds an unfinished line; a longer one is handed on in pieces.
	maxPartial = 64 << 10
)

// runningMark is what Envoy 1.40.0 logs (at info, component main) when its
// bootstrap is accepted, the admin listener is bound and the main loop begins.
const runningMark = "starting main dispatch loop"

// output receives Envoy's stdout and stderr, passes it on in whole lines, keeps
// the last ones and notices the running mark.
type output struct {
	to       io.Writer
	hideInfo bool // info lines are only there for the mark: don't show them
	running  chan struct{}

	mu      sync.Mutex
	seen    bool
	partial []byte
	last    []string // ring would save nothing at this size: oldest first
}

func newOutput(to io.Writer, hideInfo bool) *output {
	return &output{to: to, hideInfo: hideInfo, running: make(chan struct{})}
}

// hideInfo reports whether level shows less than info, so that info lines exist
// only because the main component was raised to info for the running mark.
func hideInfo(level string) bool {
	switch level {
	case "trace", "debug", "info":
		return false
	}
	return true
}

// Write never returns an error: one would end the copying of Envoy's output,
// and a full pipe would then block Envoy.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.partial = append(o.partial, p...)
	for {
		i := bytes.IndexByte(o.partial, '\n')
		if i < 0 && len(o.partial) < maxPartial {
			return len(p), nil
		}
		if i < 0 {
			i = len(o.partial) - 1
		}
		o.line(o.partial[:i+1])
		o.partial = o.partial[:copy(o.partial, o.partial[i+1:])]
	}
}

func (o *output) line(b []byte) {
	text := strings.TrimRight(string(b[:min(len(b), maxLineLen)]), "\r\n")
	if !o.seen && strings.Contains(text, runningMark) {
		o.seen = true
		close(o.running)
	}
	if o.hideInfo && isInfo(text) {
		return
	}
	if len(o.last) == maxLines {
		o.last = append(o.last[:0], o.last[1:]...)
	}
	o.last = append(o.last, text)
	if o.to != nil {
		_, _ = o.to.Write(b)
	}
}

// isInfo recognises Envoy's line head "[time][thread][level][component]".
func isInfo(line string) bool {
	head := line[:min(len(line), 80)]
	return strings.HasPrefix(head, "[") && strings.Contains(head, "][info][")
}

func (o *output) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.partial) > 0 {
		o.line(append(o.partial, '\n'))
		o.partial = nil
	}
}

func (o *output) lines() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.last...)
}

// quoted returns the last lines as the tail of an error message.
func (o *output) quoted() string {
	lines := o.lines()
	if len(lines) == 0 {
		return " (it printed nothing)"
	}
	return "; it printed:\n  " + strings.Join(lines, "\n  ")
}
