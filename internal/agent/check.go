package agent

import (
	"context"
	"errors"

	"github.com/fairlead-proxy/fairlead/telemetry/push"
)

// Check runs the agent without sending anything until all servers were read
// and have their GPUs, or until ctx's deadline, and returns what it knew then.
func Check(ctx context.Context, o Options) (*Status, error) {
	run, enough := context.WithCancel(ctx)
	defer enough()
	watch := &watcher{enough: enough}
	o.Sender = watch
	watch.agent = New(o)
	if err := watch.agent.Run(run); err != nil {
		return nil, err
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil, ctx.Err()
	}
	return watch.agent.Status(), nil
}

// watcher stands in a Sender's place and ends the run when nothing is missing.
type watcher struct {
	agent  *Agent
	enough func()
}

// Send is called by the agent's own goroutine, one tick after the status it
// looks at.
func (w *watcher) Send(push.Frame) {
	s := w.agent.Status()
	if s.Complete() != nil {
		return
	}
	for _, x := range s.Servers {
		if x.Err != "" {
			return
		}
	}
	w.enough()
}

func (w *watcher) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (w *watcher) Stats() push.ClientStats { return push.ClientStats{} }
