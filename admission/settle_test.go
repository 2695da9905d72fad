package admission

import (
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/fleet"
)

// ledgerLimiter admits everything and notes what is settled.
type ledgerLimiter struct{ settled []fleet.Tokens }

func (l *ledgerLimiter) Reserve(k LimitKey, r Rates, cost fleet.Tokens, now time.Time) Reservation {
	return Reservation{Admitted: true, Reason: ReasonAdmitted, Ticket: Ticket{Key: k, Rates: r, End: now.Add(time.Minute), Cost: cost}}
}

func (l *ledgerLimiter) Settle(_ Ticket, used fleet.Tokens) { l.settled = append(l.settled, used) }

// Requests of the test's world reserve 100 tokens of input and 200 of output.
func TestReservationsAreSettledByWhatIsKnown(t *testing.T) {
	const unsettled = -1
	for _, row := range []struct {
		name  string
		code  int
		cause fleet.Cause
		bytes int64
		usage fleet.Usage
		want  fleet.Tokens
	}{
		{"told in full", 200, fleet.CauseOK, 500, fleet.Usage{Known: true, Input: 80, Output: 30}, 110},
		{"told more than reserved", 200, fleet.CauseOK, 500, fleet.Usage{Known: true, Input: 400, Output: 900}, 1300},
		{"broken off: the prompt is charged as estimated", 200, fleet.CauseClientGone, 500, fleet.Usage{Known: true, Output: 30}, 130},
		{"ended in an error: output as long as it is", 200, fleet.CauseOK, 500, fleet.Usage{Known: true, Input: 80, Output: 1, Error: true}, 180},
		{"error that told more than its length", 200, fleet.CauseOK, 5, fleet.Usage{Known: true, Input: 80, Output: 50, Error: true}, 130},
		{"told a prompt and no usable output", 200, fleet.CauseOK, 500, fleet.Usage{Known: true, Input: 80}, 180},
		{"told nothing", 200, fleet.CauseOK, 500, fleet.Usage{}, unsettled},
		{"broken off and told nothing", 200, fleet.CauseClientGone, 500, fleet.Usage{}, 200},
		{"refused upstream", 503, fleet.CauseServerError, 20, fleet.Usage{}, 0},
	} {
		l := &ledgerLimiter{}
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 1e6, Window: time.Minute}}), 100, l)
		first := w.ask("c")
		w.Admit(&first)
		// The route learns 5 bytes a token.
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: first.ID, Code: 200, Cause: fleet.CauseOK, ResponseBytes: 500,
			Usage: fleet.Usage{Known: true, Input: 10, Output: 100}, At: w.clock.now()})
		l.settled = nil
		a := w.ask("c")
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: row.code, Cause: row.cause, ResponseBytes: row.bytes, Usage: row.usage, At: w.clock.now()})
		got := fleet.Tokens(unsettled)
		if len(l.settled) > 0 {
			got = l.settled[0]
		}
		if got != row.want || len(l.settled) > 1 {
			t.Errorf("%s: settled %v; want %v", row.name, l.settled, row.want)
		}
	}
}

// TestUnreadRequestsAreSettledByTheirLength: where nobody read the body, 100 and
// 200 tokens stand for it.
func TestUnreadRequestsAreSettledByTheirLength(t *testing.T) {
	for _, row := range []struct {
		name       string
		learned    bool // 5 bytes a token of output
		code       int
		cause      fleet.Cause
		sent, came int64
		usage      fleet.Usage
		want       fleet.Tokens
	}{
		{"long prompt", true, 200, fleet.CauseOK, 40_000, 500, fleet.Usage{}, 10_000 + 200},
		{"long answer", true, 200, fleet.CauseOK, 40, 50_000, fleet.Usage{}, 100 + 10_000},
		{"long answer, nothing learned", false, 200, fleet.CauseOK, 40, 50_000, fleet.Usage{}, 100 + 200},
		{"short both", true, 200, fleet.CauseOK, 4, 5, fleet.Usage{}, 300},
		{"broken off", true, 200, fleet.CauseClientGone, 40_000, 5000, fleet.Usage{}, 10_000 + 1000},
		{"told", true, 200, fleet.CauseOK, 40_000, 500, fleet.Usage{Known: true, Input: 9000, Output: 80}, 9080},
		{"told its output alone", true, 200, fleet.CauseClientGone, 40_000, 500, fleet.Usage{Known: true, Output: 80}, 10_080},
		{"an error", true, 400, fleet.CauseOK, 40_000, 50, fleet.Usage{}, 0},
	} {
		l := &ledgerLimiter{}
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 1e6, Window: time.Minute}}), 100, l)
		if row.learned {
			first := w.ask("c")
			w.Admit(&first)
			w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: first.ID, Code: 200, Cause: fleet.CauseOK, ResponseBytes: 500,
				Usage: fleet.Usage{Known: true, Input: 10, Output: 100}, At: w.clock.now()})
		}
		l.settled = nil
		a := w.ask("c")
		a.Unread = true
		w.Admit(&a)
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: row.code, Cause: row.cause,
			RequestBytes: row.sent, ResponseBytes: row.came, Usage: row.usage, At: w.clock.now()})
		if len(l.settled) != 1 || l.settled[0] != row.want {
			t.Errorf("%s: settled %v; want %v", row.name, l.settled, row.want)
		}
	}
}

// TestStreamsAndWholeAnswersHaveLengthsOfTheirOwn: a token of a streamed answer has a
// frame of its own around it. What is learned of one kind says nothing of the other; who
// can't be told apart, since nobody read the body, counts as streamed where there is a
// choice.
func TestStreamsAndWholeAnswersHaveLengthsOfTheirOwn(t *testing.T) {
	const (
		whole, streamed, unread = 4, 150, 40 // bytes a token
		cut                     = fleet.CauseReset
	)
	for _, row := range []struct {
		name           string
		knows          []int64
		stream, unread bool
		came           int64
		want           fleet.Tokens // 100 are the prompt's
		told           fleet.Usage
	}{
		{"stream, nine tenths", []int64{whole, streamed, unread}, true, false, 90 * streamed, 100 + 90, fleet.Usage{}},
		{"whole, nine tenths", []int64{whole, streamed, unread}, false, false, 90 * whole, 100 + 90, fleet.Usage{}},
		{"stream, ended in an error", []int64{whole, streamed, unread}, true, false, 90 * streamed, 100 + 90, fleet.Usage{Known: true, Input: 100, Output: 1, Error: true}},
		{"stream, of which nothing is known", []int64{whole, unread}, true, false, 90 * streamed, 100 + 200, fleet.Usage{}},
		{"whole, of which nothing is known", []int64{streamed, unread}, false, false, 90 * whole, 100 + 200, fleet.Usage{}},
		{"unread", []int64{whole, streamed, unread}, false, true, 300 * streamed, 100 + 300, fleet.Usage{}},
		{"unread where no stream is known", []int64{whole, unread}, false, true, 300 * unread, 100 + 300, fleet.Usage{}},
		{"unread where only whole answers are known", []int64{whole}, false, true, 300 * whole, 100 + 300, fleet.Usage{}},
		{"unread where nothing is known", nil, false, true, 300 * streamed, 100 + 200, fleet.Usage{}},
	} {
		l := &ledgerLimiter{}
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 1e6, Window: time.Minute}}), 100, l)
		end := func(stream, unread bool, o fleet.Outcome) {
			a := w.ask("c")
			a.Stream, a.Unread = stream, unread
			w.Admit(&a)
			o.Kind, o.ID, o.Code, o.At = fleet.RequestEnded, a.ID, 200, w.clock.now()
			w.Apply(o)
		}
		for range 20 { // by turns
			for _, size := range row.knows {
				end(size == streamed, size == unread, fleet.Outcome{Cause: fleet.CauseOK, ResponseBytes: 100 * size,
					Usage: fleet.Usage{Known: true, Input: 10, Output: 100}})
			}
		}
		l.settled = nil
		end(row.stream, row.unread, fleet.Outcome{Cause: cut, ResponseBytes: row.came, Usage: row.told})
		if len(l.settled) != 1 || l.settled[0] != row.want {
			t.Errorf("%s: settled %v; want %v", row.name, l.settled, row.want)
		}
	}
}

// TestWhoLeavesBeforeTheAnswerIsChargedByTheTime that its request ran: an answer that
// comes in one piece has no length before it ends.
func TestWhoLeavesBeforeTheAnswerIsChargedByTheTime(t *testing.T) {
	for _, row := range []struct {
		name    string
		learned bool // 100 tokens in 2 s, 20 ms each
		ran     time.Duration
		code    int
		want    fleet.Tokens
	}{
		{"at once", true, 0, 0, 100},
		{"in the middle", true, time.Second, 0, 100 + 50},
		{"late", true, time.Minute, 0, 100 + 200},
		{"of a route of which nothing is known", false, time.Second, 0, 100 + 40},
		{"after the headers", true, time.Second, 200, 100 + 50},
	} {
		l := &ledgerLimiter{}
		w := newWorld(config(fleet.Limit{Name: "l", Key: fleet.ClientKeyAuthorization, Tokens: fleet.Rate{Amount: 1e6, Window: time.Minute}}), 100, l)
		if row.learned {
			w.teach(3, 20, 2*time.Second, 100)
			w.tick(0)
		}
		l.settled = nil
		a := w.ask("c")
		w.Admit(&a)
		for left := row.ran; left > 0; left -= time.Second {
			w.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: a.ID, Node: "n", Attempt: 1, At: w.clock.now()})
			w.clock.advance(time.Second)
		}
		w.Apply(fleet.Outcome{Kind: fleet.RequestEnded, ID: a.ID, Code: row.code, Cause: fleet.CauseClientGone, At: w.clock.now()})
		if len(l.settled) != 1 || l.settled[0] != row.want {
			t.Errorf("%s: settled %v; want %v", row.name, l.settled, row.want)
		}
	}
}
