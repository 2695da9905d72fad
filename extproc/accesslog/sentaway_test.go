package accesslog

import (
	"testing"
	"time"

	alsdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead-proxy/fairlead/admission"
	"github.com/fairlead-proxy/fairlead/fleet"
	"github.com/fairlead-proxy/fairlead/fleet/wire"
)

// TestCallersComeBackWhenTheirServerSaid has Envoy's entries of a request that a server
// sent away for a while read by the gate: it may come back then, before another one of
// its client, whichever of Envoy's two logs is ahead.
func TestCallersComeBackWhenTheirServerSaid(t *testing.T) {
	for _, row := range []struct {
		told  string // seconds
		late  bool   // the request's end is known before its attempt's
		back  time.Duration
		early bool
	}{{"15", false, 15 * time.Second, false}, {"15", true, 15 * time.Second, false}, {"1", false, 15 * time.Second, true}} {
		now := epoch
		gate := admission.New(admission.Options{
			Now: func() time.Time { return now },
			Config: &fleet.Config{
				Pools:  []fleet.Pool{{Name: "h100", MaxInFlight: 1, Endpoints: make([]fleet.Endpoint, 1)}},
				Routes: []fleet.Route{{Name: "chat", Class: fleet.ClassInteractive, FairShare: true}},
			},
		})
		ask := func(retry int) *admission.Ask {
			return &admission.Ask{
				ID: id, Route: "chat", Pool: "h100", Client: admission.ClientOf(fleet.ClientKeyAuthorization, []byte("Bearer a")),
				Class: fleet.ClassInteractive, Level: 7, Input: 100, Output: 3000, Counts: true, Retry: retry, At: now,
			}
		}
		if v := gate.Admit(ask(0)); !v.Admitted {
			t.Fatalf("%+v", v)
		}
		gate.Apply(fleet.Outcome{Kind: fleet.Heartbeat, ID: id, Attempt: 1, At: now})
		for range 10 { // what takes so long is taken to take as long again
			now = now.Add(time.Second)
			gate.Step(now, []admission.PoolView{{Name: "h100", Limit: 1, InFlight: 1}})
		}
		if r := gate.Refuse(ask(0), admission.ReasonBusy); !r.ShouldRetry || r.RetryAfter < 16*time.Second {
			t.Fatalf("the other one is told %+v", r)
		}

		attempt := upstreamEntry(alsdatav3.AccessLogType_UpstreamEnd)
		attempt.Response.ResponseCode = wrapperspb.UInt32(429)
		attempt.Response.ResponseHeaders = map[string]string{"retry-after": row.told}
		over := downstreamEntry(alsdatav3.AccessLogType_DownstreamEnd)
		over.Response.ResponseCode = wrapperspb.UInt32(429)
		told, _ := outcomeOf(t, attempt, wire.LogUpstream)
		ended, _ := outcomeOf(t, over, wire.LogDownstream)
		if row.late {
			told, ended = ended, told
		}
		told.At, ended.At = now, now
		gate.Apply(told)
		gate.Apply(ended)
		now = now.Add(row.back)
		if got := !gate.BeginHold(ask(1)); got != row.early {
			t.Errorf("%+v: early %v", row, got)
		}
	}
}
