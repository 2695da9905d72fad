package serve

import (
	"fmt"
	"net/http/httptest"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
)

// fill lets a client ask for so many places and be refused those that it doesn't get.
func (r *runs) fill(client string, class fleet.RequestClass, n int) {
	for range n {
		r.ids++
		a := admission.Ask{ID: fmt.Sprintf("1718924567123-007-%04d", r.ids), Route: "chat", Pool: "gpu", Level: 3, Class: class, Output: 200,
			Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte(client)), At: r.now}
		if !r.ledger.Reserve(a.ID, gpu, 12, time.Minute, r.now) {
			r.gate.Refuse(&a, admission.ReasonBusy)
		} else if !r.gate.Admit(&a).Admitted {
			r.ledger.Cancel(a.ID)
		}
	}
}

// TestPoolsShowTheShareThatClientsHave: what a pool's row and metric say is what an
// interactive client of weight 1 has, and four times what a batch client has.
func TestPoolsShowTheShareThatClientsHave(t *testing.T) {
	r := newRuns(t, Options{})
	r.pass(bucket)
	share := regexp.MustCompile(`(?m)^# HELP fairlead_pool_client_share Requests .*interactive.*batch.*quarter.*\n(?:#.*\n)*fairlead_pool_client_share\{pool="gpu"\} (.*)$`)
	page := func() string {
		w := httptest.NewRecorder()
		r.metrics.handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		return w.Body.String()
	}
	if p := r.Fleet().Pools[0]; p.Name != "gpu" || p.Share != -1 || share.MatchString(page()) {
		t.Fatalf("share %v of pool %s while there is enough; want -1, and no metric", p.Share, p.Name)
	}
	r.fill("a", fleet.ClassInteractive, 8)
	r.fill("b", fleet.ClassInteractive, 8)
	r.fill("c", fleet.ClassBatch, 3)
	r.pass(bucket)
	got := r.Fleet().Pools[0].Share
	clients := r.Clients()
	if len(clients) != 3 || got <= 0 {
		t.Fatalf("share %v of a full pool, with clients %+v", got, clients)
	}
	for _, c := range clients {
		want := got
		if c.Class == fleet.ClassBatch.String() {
			want = got / 4
		}
		if c.Share != want {
			t.Errorf("%s client has a share of %v where the pool shows %v", c.Class, c.Share, got)
		}
	}
	found := share.FindStringSubmatch(page())
	if found == nil {
		t.Fatal("no metric of it, or one that doesn't say of whom")
	}
	if n, err := strconv.ParseFloat(found[1], 64); err != nil || n != got {
		t.Errorf("the metric is %s; want %v", found[1], got)
	}
}
