package extproc

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/fairlead-proxy/fairlead/fleet/wire"
	"github.com/fairlead-proxy/fairlead/plan"
)

func fullWorld(t *testing.T) *world {
	w := newWorld(t)
	for slot := uint32(1); slot <= 4; slot++ {
		w.live[slot] = 10
	}
	return w
}

func TestAllBusyIsRefusedInTheDialect(t *testing.T) {
	for _, route := range []string{"chat", "messages"} {
		t.Run(route, func(t *testing.T) {
			w := fullWorld(t)
			m := chat(nil)
			m.route, m.cluster = route, "a100"
			r := w.ask(t, m)
			imm := r.GetImmediateResponse()
			if imm == nil {
				t.Fatalf("not refused: %v", r)
			}
			if imm.GetStatus().GetCode() != 429 || imm.GetDetails() != "fairlead_all_busy" {
				t.Errorf("status %v, details %q", imm.GetStatus(), imm.GetDetails())
			}
			headers := headerMap(t, imm.GetHeaders())
			checkRetryFields(t, headers)
			log := metadata(r, wire.NamespaceLog)
			for header, want := range map[string]any{
				wire.HeaderDecision: log[wire.KeyDecision], wire.HeaderRequestID: log[wire.KeyRequestID],
				wire.HeaderRouteStrategy: log[wire.KeyStrategy], wire.HeaderExecutionGraph: log[wire.KeyPlan],
				"content-type": "application/json",
			} {
				if headers[header] != want {
					t.Errorf("%s is %q, metadata says %v", header, headers[header], want)
				}
			}
			checkBody(t, route, imm, headers)
			if len(w.picks) != 0 {
				t.Error("a refused request was entered into the ledger")
			}
			if e := w.lastEvent(); e.Action != plan.ActionRefuse || e.Reason != plan.ReasonAllBusy {
				t.Errorf("event %+v", e)
			}
		})
	}
}

func checkRetryFields(t *testing.T, headers map[string]string) {
	t.Helper()
	ms, err := strconv.Atoi(headers[wire.HeaderRetryAfterMs])
	if err != nil || ms < 1 || ms > 60000 {
		t.Errorf("retry-after-ms %q", headers[wire.HeaderRetryAfterMs])
	}
	if sec, err := strconv.Atoi(headers[wire.HeaderRetryAfter]); err != nil || sec != (ms+999)/1000 {
		t.Errorf("retry-after %q beside %d ms", headers[wire.HeaderRetryAfter], ms)
	}
	if n, err := strconv.Atoi(headers[wire.HeaderRecommendedConcurrency]); err != nil || n < 1 {
		t.Errorf("recommended concurrency %q", headers[wire.HeaderRecommendedConcurrency])
	}
}

func checkBody(t *testing.T, route string, imm *extprocv3.ImmediateResponse, headers map[string]string) {
	t.Helper()
	var body struct {
		Type      string `json:"type"`
		RequestID string `json:"request_id"`
		Error     struct {
			Message     string  `json:"message"`
			Type        string  `json:"type"`
			Param       *string `json:"param"`
			Code        string  `json:"code"`
			RetryAfter  int     `json:"retry_after_ms"`
			Concurrency int     `json:"recommended_concurrency"`
		} `json:"error"`
	}
	d := json.NewDecoder(strings.NewReader(string(imm.GetBody())))
	d.DisallowUnknownFields()
	if err := d.Decode(&body); err != nil {
		t.Fatalf("%v in %s", err, imm.GetBody())
	}
	if strconv.Itoa(body.Error.RetryAfter) != headers[wire.HeaderRetryAfterMs] ||
		strconv.Itoa(body.Error.Concurrency) != headers[wire.HeaderRecommendedConcurrency] {
		t.Errorf("body and headers disagree: %s, %v", imm.GetBody(), headers)
	}
	if body.Error.Type != "rate_limit_error" || !strings.Contains(body.Error.Message, "Retry in "+headers[wire.HeaderRetryAfterMs]+" ms") {
		t.Errorf("error %+v", body.Error)
	}
	switch route {
	case "chat":
		if body.Type != "" || body.Error.Code != "rate_limit_exceeded" || !strings.Contains(string(imm.GetBody()), `"param":null`) {
			t.Errorf("not OpenAI's shape: %s", imm.GetBody())
		}
	case "messages":
		if body.Type != "error" || body.RequestID != headers[wire.HeaderRequestID] || body.Error.Code != "" {
			t.Errorf("not Anthropic's shape: %s", imm.GetBody())
		}
	}
}

func TestPathsThatDoNotGenerateAreNeverRefused(t *testing.T) {
	for _, route := range []string{"chat/other", "chat/connect"} {
		w := fullWorld(t)
		m := chat(nil)
		m.route = route
		if r := w.ask(t, m); r.GetImmediateResponse() != nil {
			t.Errorf("%s: refused: %v", route, r)
		}
		if w.lastEvent().Generates || w.lastEvent().Route != "chat" {
			t.Errorf("%s: event %+v", route, w.lastEvent())
		}
	}
}
