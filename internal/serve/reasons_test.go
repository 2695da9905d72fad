package serve

import (
	"fmt"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/plan"
)

// series reads the samples of one family from the metrics page: by the value of one
// label, summed over the others.
func (r *runs) series(t *testing.T, family, label string) map[string]int {
	t.Helper()
	page := httptest.NewRecorder()
	r.metrics.handler.ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	out := map[string]int{}
	for line := range strings.Lines(page.Body.String()) {
		if !strings.HasPrefix(line, family+"{") {
			continue
		}
		_, rest, found := strings.Cut(line, label+`="`)
		value, _, _ := strings.Cut(rest, `"`)
		n, err := strconv.Atoi(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]))
		if !found || err != nil {
			t.Fatalf("no %s, or %v: %s", label, err, line)
		}
		out[value] += n
	}
	return out
}

// TestRequestsAreCountedByWhatRefusedThem: one steered, two refused by each reason of
// admission, three for good by the plan, four that ask for nothing to be generated, five that Envoy
// answers 413. The families count the same refusals.
func TestRequestsAreCountedByWhatRefusedThem(t *testing.T) {
	r := newRuns(t, Options{})
	see := func(n int, e extproc.Event) {
		e.Route, e.Pool, e.Strategy, e.Class, e.Generates = "chat", "gpu", fleet.StrategyDynamic, fleet.ClassInteractive, true
		for range n {
			r.observeRequest(e)
		}
	}
	see(1, extproc.Event{Reason: plan.ReasonNoTelemetry, Action: plan.ActionSteer, Admission: admission.ReasonAdmitted})
	want := map[string]int{"no_telemetry": 1}
	for why := admission.ReasonBusy; why <= admission.ReasonLimiterDown; why++ {
		steered := plan.ReasonNoTelemetry
		switch why {
		case admission.ReasonBusy:
			steered = plan.ReasonAllBusy
		case admission.ReasonNoRoom:
			steered = plan.ReasonNoRoom
		}
		see(2, extproc.Event{Reason: steered, Action: plan.ActionRefuse, Admission: why})
		want[why.String()] = 2
	}
	for _, why := range []plan.Reason{plan.ReasonOversize, plan.ReasonNeverFits, plan.ReasonUnread} {
		see(3, extproc.Event{Reason: why, Action: plan.ActionRefuse})
		want[why.String()] = 3
	}
	see(4, extproc.Event{Reason: plan.ReasonWeighted, Action: plan.ActionSteer})
	want["weighted"] = 4
	see(5, extproc.Event{Reason: plan.ReasonBodyTooLarge, Action: plan.ActionLeave})
	want["body_too_large"] = 5
	if got := r.series(t, "fairlead_requests_total", "reason"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("requests by reason %v\nwant %v", got, want)
	}
	refused := 2*int(admission.ReasonLimiterDown-admission.ReasonBusy+1) + 3*3
	delete(want, "weighted")
	delete(want, "no_telemetry")
	delete(want, "body_too_large")
	want["admitted"] = 1
	if got := r.series(t, "fairlead_admission_requests_total", "reason"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("generating requests by reason %v\nwant %v", got, want)
	}
	if got := r.series(t, "fairlead_level_requests_total", "result"); got["admitted"] != 1 || got["refused"] != refused {
		t.Errorf("generating requests by level %v; want %d refused", got, refused)
	}
}
