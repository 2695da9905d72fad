package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// stopWithin bounds how long one child may take to end. DCGM's calls can hang
// in the driver; the process then ends without it.
const stopWithin = 10 * time.Second

// family are the parts of the agent that run beside its own goroutine, in the
// order in which they were started. The zero family is empty.
type family struct {
	list  []*child
	ended chan struct{} // has room for one: some child has ended
}

type child struct {
	name   string
	cancel context.CancelFunc
	err    error
	done   chan struct{}
}

// start runs a child until the family ends.
func (f *family) start(name string, run func(context.Context) error) {
	if f.ended == nil {
		f.ended = make(chan struct{}, 1)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &child{name: name, cancel: cancel, done: make(chan struct{})}
	f.list = append(f.list, c)
	go func() {
		c.err = run(ctx)
		if c.err == nil && ctx.Err() == nil {
			c.err = errors.New("ended by itself")
		}
		close(c.done)
		select {
		case f.ended <- struct{}{}:
		default:
		}
	}()
}

// lost reports whether a child has ended by itself.
func (f *family) lost() bool {
	return slices.ContainsFunc(f.list, func(c *child) bool {
		select {
		case <-c.done:
			return true
		default:
			return false
		}
	})
}

// end ends the children, the last one first, each when the one before has
// ended. It returns what went wrong; that they were told to end is no error.
func (f *family) end() error {
	var errs []error
	for _, c := range slices.Backward(f.list) {
		c.cancel()
		late := time.NewTimer(stopWithin)
		select {
		case <-c.done:
			if c.err != nil && !errors.Is(c.err, context.Canceled) {
				errs = append(errs, fmt.Errorf("%s: %w", c.name, c.err))
			}
		case <-late.C:
			errs = append(errs, fmt.Errorf("%s: not ended within %s", c.name, stopWithin))
		}
		late.Stop()
	}
	return errors.Join(errs...)
}
