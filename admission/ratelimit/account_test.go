package ratelimit

import (
	"testing"
	"time"
)

var accounted = budgets{requests: budget{limit: 100, window: time.Hour}, tokens: budget{limit: 1000, window: time.Hour}}

func TestACorrectionIsStatedOnlyIfTheServerDoesNotKnow(t *testing.T) {
	a, w := newAccount(), windows{7, 7}
	a.admit(w, 1, 60)
	if !a.absorb(7, -10, false) {
		t.Error("not stated of what was not told yet")
	}
	s := a.begin(&accounted)
	if s.tokens.total != 50 || s.tokens.untold != 50 {
		t.Errorf("%+v", s)
	}
	if !a.absorb(7, -10, false) {
		t.Error("not stated of what is on its way")
	}
	a.answered(&s, w, 0, 0)
	version := s.version
	if s = a.begin(&accounted); s.version <= version {
		t.Errorf("version %d after %d, of another sum", s.version, version)
	}
	if s.tokens.total != 40 || s.tokens.untold != -10 {
		t.Errorf("%+v; want 40 tokens, and 10 more to be taken back", s)
	}
	a.answered(&s, w, 0, 0)
	if a.absorb(7, -10, false) {
		t.Error("stated of what the server knows")
	}
	if a.absorb(7, -41, true) || a.absorb(6, -10, true) || !a.absorb(7, -10, true) {
		t.Error("with the server away, what is there can be stated, of its window, and no more")
	}
}

func TestAnEarlierAnswerAcknowledgesNoLess(t *testing.T) {
	a, w := newAccount(), windows{7, 7}
	a.admit(w, 1, 10)
	first := a.begin(&accounted)
	a.admit(w, 1, 10)
	second := a.begin(&accounted)
	a.answered(&second, w, 0, 0)
	a.answered(&first, w, 0, 0)
	if requests, tokens := a.untold(w); requests != 0 || tokens != 0 {
		t.Errorf("%d requests and %d tokens are untold after all was acknowledged", requests, tokens)
	}
}

func TestALaterWindowBeginsWithNothing(t *testing.T) {
	a, w, next := newAccount(), windows{7, 7}, windows{8, 8}
	var open [4]statement
	for i := range open {
		open[i] = a.begin(&accounted)
	}
	a.answered(&open[0], w, 1, 5)
	a.admit(w, 1, 10)
	a.answered(&open[1], next, 1, 5)
	a.answered(&open[2], w, 1, 5) // of the window that is over
	if requests, tokens := a.untold(next); requests != 0 || tokens != 0 {
		t.Errorf("%d requests and %d tokens of a window that is over are untold", requests, tokens)
	}
	version := a.version
	a.late(&open[3])
	s := a.begin(&accounted)
	if s.version <= version {
		t.Errorf("version %d after %d, though an epoch was closed", s.version, version)
	}
	if s.requests.total != 1 || s.tokens.total != 5 || s.requests.window != 8 || s.closed != open[0].epoch {
		t.Errorf("%+v, want one request of 5 tokens in the window 8", s)
	}
	// What was told of the one window acknowledges nothing of the other.
	a.admit(next, 1, 10)
	before := a.begin(&accounted)
	last := windows{9, 9}
	a.admit(last, 1, 10)
	a.answered(&before, next, 0, 0)
	if requests, tokens := a.untold(last); requests != 1 || tokens != 10 {
		t.Errorf("%d requests and %d tokens are untold, want 1 and 10", requests, tokens)
	}
	if requests, _ := a.untold(windows{10, 10}); requests != 0 {
		t.Errorf("%d requests are untold of a window that has not begun", requests)
	}
	if requests, _ := a.untold(next); requests != 1 {
		t.Errorf("%d requests are untold after the clock went back, want 1", requests)
	}
}

// TestAnAnswerOfAnEarlierWindowAcknowledgesNothing: the server lets what is stated of
// a window wait until that has begun.
func TestAnAnswerOfAnEarlierWindowAcknowledgesNothing(t *testing.T) {
	for _, row := range []struct{ answer, untold windows }{
		{windows{6, 6}, windows{1, 10}},
		{windows{7, 6}, windows{0, 10}},
		{windows{6, 7}, windows{1, 0}},
		{windows{7, 7}, windows{0, 0}},
	} {
		a, w := newAccount(), windows{7, 7}
		a.admit(w, 1, 10)
		s := a.begin(&accounted)
		a.answered(&s, row.answer, 1, 5)
		if requests, tokens := a.untold(w); requests != row.untold.requests || tokens != row.untold.tokens {
			t.Errorf("%+v: %d requests and %d tokens are untold, want %+v", row.answer, requests, tokens, row.untold)
		}
		if stated := a.absorb(7, -5, false); stated != (row.untold.tokens > 0) {
			t.Errorf("%+v: a correction of what the server does not count is stated: %v", row.answer, stated)
		}
	}
}

// TestWhatIsAskedApartIsNotTheAccounts: the server did not take the statement.
func TestWhatIsAskedApartIsNotTheAccounts(t *testing.T) {
	a, w := newAccount(), windows{7, 7}
	a.admit(w, 1, 10)
	s := a.begin(&accounted)
	a.apart(&s)
	if requests, tokens := a.untold(w); requests != 1 || tokens != 10 || a.acknowledged != 0 {
		t.Errorf("%d requests and %d tokens are untold, want 1 and 10", requests, tokens)
	}
	late, apart := a.begin(&accounted), a.begin(&accounted)
	a.late(&late)
	if a.closed != 0 {
		t.Error("an epoch was closed of which a question goes on")
	}
	a.apart(&apart)
	if s = a.begin(&accounted); s.closed != 1 || s.epoch != 2 || s.requests.total != 1 || s.tokens.total != 10 {
		t.Errorf("%+v, want the first epoch closed and no more stated", s)
	}
}

func TestAnEpochThatGoesOnBringsNothingIntoALaterWindow(t *testing.T) {
	a, w, next := newAccount(), windows{7, 7}, windows{8, 8}
	first, late, last := a.begin(&accounted), a.begin(&accounted), a.begin(&accounted)
	a.answered(&first, w, 1, 5)
	a.late(&late)
	a.answered(&last, next, 0, 0)
	if s := a.begin(&accounted); s.closed != 1 || s.requests.total != 0 || s.tokens.total != 0 {
		t.Errorf("%+v, want the first epoch closed and nothing of it in the later window", s)
	}
}

func TestAnAccountIsNotOverWhileALateEpochGoesOn(t *testing.T) {
	a, k := newAccount(), &key{requests: time.Hour, tokens: time.Hour}
	late, last := a.begin(&accounted), a.begin(&accounted)
	a.late(&late)
	if a.over(k, windows{9, 9}) {
		t.Error("over, though a question has not ended")
	}
	a.late(&last)
	if !a.over(k, windows{9, 9}) {
		t.Error("not over")
	}
}
