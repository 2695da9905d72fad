package serve

import (
	"reflect"
	"testing"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/extproc"
	"github.com/fairlead-proxy/fairlead/plan"
)

func TestRefusalsAreToldByReason(t *testing.T) {
	var r refusals
	for range 2 {
		r.add(&extproc.Event{Reason: plan.ReasonAllBusy, Admission: admission.ReasonBusy})
	}
	r.add(&extproc.Event{Reason: plan.ReasonWeighted, Admission: admission.ReasonRequests})
	r.add(&extproc.Event{Reason: plan.ReasonOversize})
	want := []any{"all_busy", int64(2), "oversize", int64(1), "rate_requests", int64(1)}
	if got := r.take(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := r.take(); len(got) != 0 {
		t.Errorf("%v after it was told", got)
	}
}
