package serve

import (
	"bytes"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/extproc/accesslog"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

func TestRefusalsAreToldByReason(t *testing.T) {
	var r tally
	add := func(e *extproc.Event) { r.count(e.Why()) }
	for range 2 {
		add(&extproc.Event{Reason: plan.ReasonAllBusy, Admission: admission.ReasonBusy})
	}
	add(&extproc.Event{Reason: plan.ReasonWeighted, Admission: admission.ReasonRequests})
	add(&extproc.Event{Reason: plan.ReasonOversize})
	want := []any{"all_busy", int64(2), "oversize", int64(1), "rate_requests", int64(1)}
	if got := r.take(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := r.take(); len(got) != 0 {
		t.Errorf("%v after it was told", got)
	}
}

// TestFullLedgerIsToldOfEveryTenSeconds, with what was not counted in between.
func TestFullLedgerIsToldOfEveryTenSeconds(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	var f fullLog
	begin := time.Unix(1_700_000_000, 0)
	for _, row := range []struct {
		after   time.Duration
		dropped uint64
		want    string // "" is no line
	}{
		{0, 0, ""},
		{time.Second, 5, "not_counted=5"},
		{2 * time.Second, 7, ""},
		{11 * time.Second, 8, "not_counted=3"},
		{21 * time.Second, 8, ""},
		{22 * time.Second, 9, "not_counted=1"},
	} {
		out.Reset()
		f.look(log, begin.Add(row.after), row.dropped)
		if got := out.String(); (got != "") != (row.want != "") || !strings.Contains(got, row.want) {
			t.Errorf("after %v with %d dropped: %q; want %q", row.after, row.dropped, got, row.want)
		}
	}
}

// TestFullLedgerAdmitsNobodyAndSaysSo, once as many run as it can hold.
func TestFullLedgerAdmitsNobodyAndSaysSo(t *testing.T) {
	var out bytes.Buffer
	r := newRuns(t, Options{Log: slog.New(slog.NewTextHandler(&out, nil))})
	start := fleet.Outcome{Kind: fleet.AttemptStarted, Node: "n", Attempt: 1, Endpoint: gpu, At: r.now}
	for i := range accesslog.MaxAttempts {
		start.ID = strconv.Itoa(i)
		r.ledger.Apply(start)
	}
	if r.ledger.Reserve("1718924567123-007-0001", fleet.EndpointKey{Pool: "gpu", Address: netip.MustParseAddrPort("127.0.0.1:1002")}, 4, 0, r.now) {
		t.Error("a place that nobody counts")
	}
	r.pass(bucket)
	if !strings.Contains(out.String(), "in-flight ledger is full") || !strings.Contains(out.String(), "not_counted=1") {
		t.Errorf("log: %s", &out)
	}
	page := httptest.NewRecorder()
	r.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(page.Body.String(), "\nfairlead_ledger_dropped_total 1\n") {
		t.Error("the metric does not count it")
	}
}

// TestRequestsThatNobodyCountedAreTold of, by how many there were since the last line.
func TestRequestsThatNobodyCountedAreTold(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	var u undecidedLog
	begin := time.Now()
	for _, row := range []struct {
		after           time.Duration
		passed, refused int64
		want            string
	}{
		{0, 0, 0, ""},
		{time.Second, 3, 0, "passed_uncounted=3 refused=0"},
		{5 * time.Second, 8, 0, ""},
		{11 * time.Second, 9, 2, "passed_uncounted=6 refused=2"},
		{30 * time.Second, 9, 2, ""},
		{31 * time.Second, 9, 5, "passed_uncounted=0 refused=3"},
	} {
		out.Reset()
		u.look(log, begin.Add(row.after), row.passed, row.refused)
		if got := out.String(); (got != "") != (row.want != "") || !strings.Contains(got, row.want) {
			t.Errorf("after %v with %d and %d: %q; want %q", row.after, row.passed, row.refused, got, row.want)
		}
	}
	out.Reset()
	r := newRuns(t, Options{Log: log})
	r.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: "0b6bbd9f-2c5e-4c3f-9d6a-7f3f0e0e0e0e", Route: "chat", Attempt: 1, Endpoint: gpu, Cause: fleet.CauseOK, Code: 200, At: r.now})
	r.pass(bucket)
	if !strings.Contains(out.String(), "passed_uncounted=1") {
		t.Errorf("the server says %q", &out)
	}
}

// TestServersThatShedAreTold, by pool, also where no request fails for it.
func TestServersThatShedAreTold(t *testing.T) {
	var out bytes.Buffer
	r := newRuns(t, Options{Log: slog.New(slog.NewTextHandler(&out, nil))})
	shed := func(code int, wait time.Duration) {
		r.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "n", ID: "x", Route: "chat", Endpoint: gpu, Cause: fleet.CauseThrottled, Code: code, RetryAfter: wait, At: r.now})
	}
	shed(429, 0)
	shed(529, time.Second)
	shed(503, time.Second)
	shed(503, 0) // for itself alone
	shed(500, time.Second)
	r.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: "x", Route: "chat", Endpoint: gpu, Cause: fleet.CauseThrottled, Code: 429, At: r.now})
	r.pass(bucket)
	if want := `msg="servers told callers to stay away" gpu=3 within=10s`; !strings.Contains(out.String(), want) {
		t.Errorf("log: %s; want %s", &out, want)
	}
	out.Reset()
	shed(429, 0)
	if r.pass(bucket); strings.Contains(out.String(), "stay away") {
		t.Errorf("within ten seconds: %s", &out)
	}
	if r.pass(refusalsEvery); !strings.Contains(out.String(), "gpu=1 within") {
		t.Errorf("after ten seconds: %s", &out)
	}
}

// TestFailedRequestsAreTold: who has no answer of a server, by route and why; not who left,
// was refused, or was told that its request is wrong.
func TestFailedRequestsAreTold(t *testing.T) {
	var out bytes.Buffer
	r := newRuns(t, Options{Log: slog.New(slog.NewTextHandler(&out, nil))})
	for cause, n := range map[fleet.Cause]int{
		fleet.CauseConnectFailed: 3, fleet.CauseServerError: 2, fleet.CauseReset: 1, fleet.CauseTimeout: 1,
		fleet.CauseOK: 1, fleet.CauseClientError: 1, fleet.CauseClientGone: 1, fleet.CauseLocal: 1, fleet.CauseThrottled: 1,
	} {
		for range n {
			r.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: "x", Route: "chat", Cause: cause, Code: 503, At: r.now})
			r.outcome(fleet.Outcome{Kind: fleet.AttemptEnded, Node: "n", ID: "x", Route: "chat", Endpoint: gpu, Cause: cause, Code: 503, At: r.now})
		}
	}
	r.pass(bucket)
	if want := "chat/connect_failed=3 chat/reset=1 chat/server_error=2 chat/timeout=1 within=10s"; !strings.Contains(out.String(), want) {
		t.Errorf("log: %s; want %s", &out, want)
	}
	out.Reset()
	r.outcome(fleet.Outcome{Kind: fleet.RequestEnded, Node: "n", ID: "x", Route: "chat", Cause: fleet.CauseReset, At: r.now})
	if r.pass(bucket); strings.Contains(out.String(), "failed") {
		t.Errorf("within ten seconds: %s", &out)
	}
	if r.pass(refusalsEvery); !strings.Contains(out.String(), "chat/reset=1 within") {
		t.Errorf("after ten seconds: %s", &out)
	}
	var many tally
	for i := range 2 * maxTallied {
		many.count(strconv.Itoa(i))
	}
	if n := len(many.take()) / 2; n != maxTallied {
		t.Errorf("%d names; want %d at most", n, maxTallied)
	}
}
