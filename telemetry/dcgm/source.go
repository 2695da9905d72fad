package dcgm

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/fairlead-proxy/fairlead/telemetry"
)

const (
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
	// parting is how long Run waits at its end for DCGM to be shut down: an
	// embedded host engine has threads inside the driver to end, and a GPU can
	// hang when a process that reads it just goes (dcgm-exporter issue 84). While
	// a call hangs there is little hope.
	parting         = 5 * time.Second
	partingWhenLate = time.Second
)

// inUse is true while a goroutine of some Source may be inside DCGM, which
// go-dcgm allows only once per process.
var inUse atomic.Bool

// Source reads this node's GPUs through DCGM. Make one with [New].
type Source struct {
	options Options
	host    host
	engine  func() engine
	counters
}

func newSource(o Options, make func() engine) (*Source, error) {
	o, h, err := o.complete()
	if err != nil {
		return nil, err
	}
	return &Source{options: o, host: h, engine: make}, nil
}

// Stats returns what was counted so far. It may be called at any time.
func (s *Source) Stats() Stats { return s.snapshot() }

// Run reads the GPUs at each interval and gives each frame to out, until ctx
// ends; it returns ctx's cause. Where DCGM cannot be reached it tries again
// after 1 s, then 2 s, up to 30 s. A frame's Err says why there are no GPUs in
// it; while a read takes longer than the deadline, a frame with [ErrSlow] comes
// once per deadline, and the read's own frame when it returns.
//
// Frames come one at a time, on Run's goroutine: a slow out delays the next
// read. A frame belongs to its receiver.
//
// At its end Run waits for DCGM to be shut down, up to 5 s, but only 1 s while a
// call is overdue. The goroutine inside that call, and its thread, stay until it
// returns, and then end by themselves. Until then another Run of this process is
// refused, as is one while another runs.
func (s *Source) Run(ctx context.Context, out func(telemetry.GPUFrame)) error {
	if !inUse.CompareAndSwap(false, true) {
		return errors.New("read GPUs: another reader of this process is inside DCGM")
	}
	r := &reader{
		host: s.host, interval: s.options.Interval, engine: s.engine(), count: &s.counters, log: s.options.Log,
		node: newNode(s.options.Interval, &s.counters),
	}
	o := &owner{asks: make(chan struct{}, 1), answers: make(chan answer, 1), gone: make(chan struct{})}
	go o.run(r)
	w := watch{source: s, owner: o, out: out}
	err := w.run(ctx)
	if w.late && !w.asked.IsZero() {
		o.leave(partingWhenLate)
	} else {
		o.leave(parting)
	}
	return err
}

// owner is the goroutine that makes the DCGM calls. Both channels have room for
// one, and at most one step is asked for at a time, so that neither side ever
// waits for the other: the owner ends even if nobody takes its answer.
type owner struct {
	asks    chan struct{}
	answers chan answer
	gone    chan struct{}
}

type answer struct {
	frame telemetry.GPUFrame
	err   error
}

func (o *owner) run(r *reader) {
	// DCGM calls can block in the driver; they hold this one thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(o.gone)
	defer inUse.Store(false)
	for range o.asks {
		frame, err := r.step()
		o.answers <- answer{frame, err}
	}
	r.disconnect()
}

// leave tells the owner to close the connection, and waits for that.
func (o *owner) leave(patience time.Duration) {
	close(o.asks)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-o.gone:
	case <-timer.C:
	}
}

// watch asks for a step at each interval and keeps the time.
type watch struct {
	source *Source
	owner  *owner
	out    func(telemetry.GPUFrame)

	asked   time.Time // of the step under way, zero if there is none
	late    bool      // it passed the deadline
	epoch   uint32
	retry   time.Duration // the wait after the next failure to connect
	notNow  time.Time     // no step before
	lastErr string
}

func (w *watch) run(ctx context.Context) error {
	tick := time.NewTicker(w.source.options.Interval)
	defer tick.Stop()
	deadline := time.NewTimer(w.source.options.Deadline)
	defer deadline.Stop()
	w.retry = firstRetry
	ask := func() {
		now := time.Now()
		if !w.asked.IsZero() || now.Before(w.notNow) {
			return
		}
		w.asked, w.late = now, false
		deadline.Reset(w.source.options.Deadline)
		w.owner.asks <- struct{}{}
	}
	ask()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			ask()
		case <-deadline.C:
			if w.asked.IsZero() {
				continue
			}
			w.slow()
			deadline.Reset(w.source.options.Deadline)
		case a := <-w.owner.answers:
			w.took()
			w.deliver(a)
		}
	}
}

// slow says that the step under way has no answer yet.
func (w *watch) slow() {
	waited := time.Since(w.asked).Round(time.Millisecond)
	if !w.late {
		w.late = true
		w.source.count(func(s *Stats) { s.Late++ })
		w.source.options.Log.Warn("DCGM is slow", "waited", waited)
	}
	w.out(telemetry.GPUFrame{At: time.Now(), Epoch: w.epoch, Err: fmt.Errorf("%w: no answer for %v", ErrSlow, waited)})
}

func (w *watch) took() {
	if w.late {
		w.source.options.Log.Info("DCGM answers again", "took", time.Since(w.asked).Round(time.Millisecond))
	}
	w.asked = time.Time{}
}

func (w *watch) deliver(a answer) {
	f := a.frame
	if f.At.IsZero() {
		f.At = time.Now()
	}
	w.epoch = max(w.epoch, f.Epoch)
	f.Epoch = w.epoch
	f.Err = a.err
	switch {
	case a.err == nil:
		w.retry, w.lastErr = firstRetry, ""
	default:
		if errors.Is(a.err, errConnect) {
			w.notNow = time.Now().Add(w.retry)
			w.retry = min(2*w.retry, lastRetry)
		}
		// The same failure again and again is said once.
		if text := a.err.Error(); text != w.lastErr {
			w.lastErr = text
			w.source.options.Log.Warn("no GPU telemetry", "err", a.err)
		}
	}
	w.out(f)
}
