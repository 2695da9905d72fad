package envoytest

import (
	"context"
	"io"
)

// withStop returns a context that also ends when stop is closed.
func withStop(parent context.Context, stop <-chan struct{}) context.Context {
	ctx, cancel := context.WithCancel(parent)
	go func() {
		defer cancel()
		select {
		case <-stop:
		case <-ctx.Done():
		}
	}()
	return ctx
}

// closeWith runs work and closes c when ctx ends before it.
func closeWith(ctx context.Context, c io.Closer, work func()) {
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	work()
}
