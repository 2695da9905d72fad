package push

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/telemetry"
	"github.com/fairlead-proxy/fairlead/telemetry/push/pushv1"
)

// silentServer is a stream to a server that takes frames and never answers.
type silentServer struct {
	pushv1.Telemetry_PushClient
	sent []*pushv1.Frame
}

func (s *silentServer) Send(m *pushv1.Frame) error {
	s.sent = append(s.sent, m)
	return nil
}

func testClient(t *testing.T) *Client {
	t.Helper()
	c, err := NewClient(ClientOptions{Target: fleet.Address{Path: filepath.Join(t.TempDir(), "none")}, Node: "n", Log: quietLog})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestSilentServerIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, stream := testClient(t), &silentServer{}
		for range defaultQueue {
			c.Send(Frame{})
		}
		began := time.Now()
		err := c.pump(t.Context(), stream, make(chan *pushv1.Ack), make(chan error, 1))
		if err == nil || !strings.Contains(err.Error(), "no answer for 5s") || time.Since(began) != quiet {
			t.Errorf("got %v after %s", err, time.Since(began))
		}
		if len(stream.sent) != window {
			t.Errorf("%d frames on the way, the window is %d", len(stream.sent), window)
		}
	})
}

func TestIdleClientWaitsForNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, stream := testClient(t), &silentServer{}
		answers, ctx := make(chan *pushv1.Ack), t.Context()
		ctx, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		go func() {
			c.Send(Frame{})
			time.Sleep(time.Second)
			answers <- &pushv1.Ack{Sequence: 1}
		}()
		if err := c.pump(ctx, stream, answers, make(chan error, 1)); err != context.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
		if st := c.Stats(); st.Answered != 1 || !st.Connected {
			t.Errorf("stats %+v", st)
		}
	})
}

// TestAnswersThatCannotBeDoNotOpenTheWindow: a server may be hostile, too.
func TestAnswersThatCannotBeDoNotOpenTheWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, stream := testClient(t), &silentServer{}
		for range defaultQueue {
			c.Send(Frame{})
		}
		answers := make(chan *pushv1.Ack)
		go func() {
			answers <- &pushv1.Ack{Sequence: 0}
			answers <- &pushv1.Ack{Sequence: 0}
			for i := range 3 {
				answers <- &pushv1.Ack{Sequence: uint64(i)}
			}
		}()
		_ = c.pump(t.Context(), stream, answers, make(chan error, 1))
		if len(stream.sent) != defaultQueue || c.Stats().Answered != 2 {
			t.Errorf("%d frames sent, %d answered", len(stream.sent), c.Stats().Answered)
		}
	})
}

func TestBackOffGrowsToItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := testClient(t)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		if err := c.Run(ctx); err != nil {
			t.Fatal(err)
		}
		// Waits of 0.1, 0.2, 0.4, 0.8, 1.6, 3.2 and then 5 s, each ±50 %: about 125.
		if n := c.Stats().Failures; n < 90 || n > 180 {
			t.Errorf("%d attempts in ten minutes", n)
		}
		if !strings.Contains(c.Stats().LastError, "no such file") {
			t.Errorf("last error %q", c.Stats().LastError)
		}
	})
}

func TestRefusedStrangersFillNoLog(t *testing.T) {
	now := time.Now()
	lines := &countingHandler{Handler: quietLog.Handler()}
	s := NewServer(ServerOptions{Deliver: func(telemetry.Reading) {}, Log: lines.logger(), Now: func() time.Time { return now }})
	for range 100 {
		s.warn("telemetry stream is refused")
	}
	now = now.Add(warnEvery)
	s.warn("telemetry stream is refused")
	if lines.n != 2 {
		t.Errorf("%d lines", lines.n)
	}
}
