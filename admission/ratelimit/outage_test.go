package ratelimit

import (
	"errors"
	"testing"
	"time"
)

// TestOutagesAreLoggedOnceAndAgainForAnotherCause, and a server that comes and goes
// does not fill the log.
func TestOutagesAreLoggedOnceAndAgainForAnotherCause(t *testing.T) {
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	refused := func(port string) error {
		return errors.New("dial tcp 127.0.0.1:" + port + ": connection refused")
	}
	wrong := errors.New("WRONGPASS invalid username-password pair")
	o := outage{}
	if !o.over() {
		t.Error("the first connection is not logged")
	}
	for i, step := range []struct {
		at   float64
		err  error // nil: it answers
		want bool
	}{
		{0, refused("41000"), true},
		{1, refused("41001"), false},
		{2, wrong, false}, // too soon; it is said when it goes on
		{11, wrong, true},
		{30, wrong, false},
		{31, nil, true},
		{31.5, refused("1"), true},
		{32, nil, true},
		{33, refused("1"), false}, // flaps
		{34, nil, false},
		{35, refused("1"), false},
		{42, refused("1"), true}, // it stays away
		{43, nil, true},
	} {
		got := false
		if step.err == nil {
			got = o.over()
		} else {
			got = o.news(step.err, at(step.at))
		}
		if got != step.want {
			t.Errorf("step %d, %v s, %v: logged %v, want %v", i, step.at, step.err, got, step.want)
		}
	}
}
